"""Families like Llama: RMSNorm, rotary positions and SwiGLU."""

from eval.convert.families.common import (
    ACTIVATIONS,
    ATTENTION,
    BLOCK,
    DECODER,
    ENDS,
    GATED,
    GATED_BIASES,
    LLAMA_ROWS,
    MLP,
    NO_BIAS,
    OUT,
    OUT_BIASES,
    PRE,
    QK_NORMS,
    QKV,
    QKV_BIASES,
    SELF_ATTN,
    SILU,
    norm_rows,
    size_entries,
)
from eval.convert.families.family import Family, make_row
from eval.convert.hf_config import (
    BRANCH_FACTOR,
    EMBEDDING_FACTOR,
    INPUT_BIASES,
    LOGIT_DIVISOR,
    MLP_BIASES,
    OUTPUT_BIASES,
    AttentionFactor,
    Biases,
    BiasFlag,
    ChoiceField,
    EvenHeadDim,
    FixedField,
    ForeignField,
    HeadDim,
    NoDropout,
    WeightFactor,
)
from eval.convert.hf_positions import NoRopeLayers, Rope, RopeByKind, Window

BIASED_ROWS = (*LLAMA_ROWS, *QKV_BIASES, *OUT_BIASES, *GATED_BIASES)
LLAMA = Family(
    'LlamaForCausalLM',
    (
        *size_entries(2048),
        HeadDim(),
        Rope(),
        SILU,
        Biases(),
        FixedField('rope_interleaved', False),
    ),
    DECODER,
    BIASED_ROWS,
)
MISTRAL = Family(
    'MistralForCausalLM',
    (*size_entries(131_072, 8), HeadDim(), Rope(), Window(4096), SILU),
    DECODER,
    LLAMA_ROWS,
)
MINISTRAL = Family(
    'MinistralForCausalLM',
    (
        *size_entries(131_072, 8),
        HeadDim(),
        Rope(),
        Window(4096, has_types=True, is_needed=True),
        SILU,
    ),
    DECODER,
    LLAMA_ROWS,
)
SEED_OSS = Family(
    'SeedOssForCausalLM',
    (
        *size_entries(524_288, 8),
        HeadDim(128),
        Rope(),
        SILU,
        Biases(
            (
                BiasFlag('attention_bias', 'queries, keys and values', INPUT_BIASES, True),
                BiasFlag('attention_out_bias', 'outputs of attention', OUTPUT_BIASES),
                BiasFlag('mlp_bias', 'mlp', MLP_BIASES),
            )
        ),
        NoDropout('residual_dropout'),
    ),
    DECODER,
    BIASED_ROWS,
)
# An import writes the multipliers of muP into weights (eval.convert.hf_factors).
GRANITE = Family(
    'GraniteForCausalLM',
    (
        *size_entries(2048),
        HeadDim(),
        Rope(),
        SILU,
        Biases(),
        AttentionFactor('attention_multiplier'),
        WeightFactor('embedding_multiplier', EMBEDDING_FACTOR),
        WeightFactor('logits_scaling', LOGIT_DIVISOR),
        WeightFactor('residual_multiplier', BRANCH_FACTOR),
    ),
    DECODER,
    BIASED_ROWS,
)
ARCEE = Family(
    'ArceeForCausalLM',
    (
        *size_entries(4096, eps=1e-5),
        HeadDim(),
        Rope(),
        ChoiceField('hidden_act', 'model.activation', ACTIVATIONS, 'relu2'),
        Biases(),
    ),
    DECODER,
    tuple(row for row in BIASED_ROWS if '.gate_proj.' not in row.name),
)
QWEN2 = Family(
    'Qwen2ForCausalLM',
    (
        *size_entries(32_768, 32),
        EvenHeadDim(),
        Rope(),
        Window(4096, has_types=True, has_use=True),
        SILU,
        FixedField('use_mrope', False),
        ForeignField('attention_bias', True),
    ),
    DECODER | {'model.qkv_bias': True},
    (*LLAMA_ROWS, *QKV_BIASES),
)
QWEN3 = Family(
    'Qwen3ForCausalLM',
    (
        *size_entries(32_768, 32),
        HeadDim(128),
        Rope(),
        Window(4096, has_types=True, has_use=True),
        SILU,
        NO_BIAS,
    ),
    DECODER | {'model.qk_norm': 'rmsnorm'},
    (*LLAMA_ROWS, *QK_NORMS),
)
OLMO2 = Family(
    'Olmo2ForCausalLM',
    (*size_entries(2048, eps=1e-5), EvenHeadDim(), Rope(), SILU, NO_BIAS),
    DECODER
    | {
        'model.placement': 'output',
        'model.qk_norm': 'rmsnorm',
        'attention.qk_norm_over': 'model',
    },
    (
        *ENDS,
        *QKV,
        *OUT,
        *GATED,
        *QK_NORMS,
        *norm_rows(BLOCK + 'post_attention_layernorm', 'layers/attention_norm_out'),
        *norm_rows(BLOCK + 'post_feedforward_layernorm', 'layers/mlp_norm_out'),
        *norm_rows('model.norm', 'final_norm'),
    ),
)
OLMO3_WINDOW = Window(4096, period=4, has_types=True, is_needed=True)
OLMO3 = Family(
    'Olmo3ForCausalLM',
    (
        *size_entries(2048, eps=1e-5),
        HeadDim(),
        RopeByKind(OLMO3_WINDOW, 500_000.0, 500_000.0, local_name=''),
        OLMO3_WINDOW,
        SILU,
        NO_BIAS,
    ),
    OLMO2.constants,
    OLMO2.rows,
)
PHI3 = Family(
    'Phi3ForCausalLM',
    (
        *size_entries(4096, eps=1e-5),
        EvenHeadDim(),
        Rope(
            is_partial=True,
            kinds=('default', 'longrope'),
            # Names in earlier files, which Phi3Config replaces (convert_rope_params_to_dict).
            kind_aliases={'su': 'longrope', 'yarn': 'longrope'},
            original_length=4096,
        ),
        Window(),
        SILU,
        NO_BIAS,
    ),
    DECODER,
    (
        *ENDS,
        make_row(
            SELF_ATTN + 'qkv_proj.weight',
            ATTENTION + '{query,key,value}',
            '(N|K|K H) D -> D N|K|K H',
        ),
        *OUT,
        make_row(BLOCK + 'mlp.gate_up_proj.weight', MLP + '{gate,up}', 'F|F D -> D F|F'),
        GATED[-1],
        *PRE,
    ),
)

SMOLLM3 = Family(
    'SmolLM3ForCausalLM',
    (
        *size_entries(32_768, 4, tied=True),
        EvenHeadDim(),
        Rope(2_000_000.0),
        NoRopeLayers(),
        Window(has_types=True, has_use=True, is_no_rope=True),
        SILU,
        NO_BIAS,
        FixedField('mlp_bias', False),
    ),
    DECODER,
    LLAMA_ROWS,
)
