"""Families with experts."""

from eval.convert.families.common import (
    ATTENTION,
    BLOCK,
    DECODER,
    ENDS,
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
    size_entries,
)
from eval.convert.families.family import Family, TensorRow, make_row, rows_with_bias
from eval.convert.hf_config import (
    AliasField,
    ChoiceField,
    EvenHeadDim,
    FixedField,
    ForeignField,
    HeadDim,
    Mxfp4,
    SharedField,
)
from eval.convert.hf_positions import Rope, Window

EXPERTS = DECODER | {'model.mlp': 'moe', 'mlp.gates': 'renormalised', 'mlp.router_noise': 0.0}
EXPERT_ALIASES = {'num_experts': 'num_local_experts'}
MIXTRAL_EXPERT = BLOCK + 'block_sparse_moe.experts.{E}.'
MIXTRAL = Family(
    'MixtralForCausalLM',
    (
        *size_entries(131_072, 8, 1e-5),
        HeadDim(),
        Rope(1_000_000.0),
        Window(),
        SILU,
        SharedField('num_local_experts', 'mlp.n_experts', 8),
        SharedField('num_experts_per_tok', 'mlp.experts_per_token', 2),
    ),
    EXPERTS,
    (
        *ENDS,
        *QKV,
        *OUT,
        *PRE,
        make_row(BLOCK + 'block_sparse_moe.gate.weight', MLP + 'router', 'E D -> D E'),
        make_row(MIXTRAL_EXPERT + 'w1.weight', MLP + 'gate', 'F D -> D F'),
        make_row(MIXTRAL_EXPERT + 'w3.weight', MLP + 'up', 'F D -> D F'),
        make_row(MIXTRAL_EXPERT + 'w2.weight', MLP + 'down', 'D F -> F D'),
    ),
    aliases=EXPERT_ALIASES,
)
RENORMALISED = ChoiceField(
    'norm_topk_prob', 'mlp.gates', {True: 'renormalised', False: 'softmax'}, False
)
# The class has no norm_topk_prob: its router always divides by the sum.
RENORMALISED_ALWAYS = ForeignField('norm_topk_prob', True)
QWEN_EXPERT = BLOCK + 'mlp.experts.{E}.'
QWEN_EXPERT_ROWS = (
    make_row(BLOCK + 'mlp.gate.weight', MLP + 'router', 'E D -> D E'),
    make_row(QWEN_EXPERT + 'gate_proj.weight', MLP + 'gate', 'X D -> D X'),
    make_row(QWEN_EXPERT + 'up_proj.weight', MLP + 'up', 'X D -> D X'),
    make_row(QWEN_EXPERT + 'down_proj.weight', MLP + 'down', 'D X -> X D'),
)


def shared_rows(name: str) -> tuple[TensorRow, ...]:
    """Returns the rows of the MLP of shared experts, which has this name in the files."""
    return (
        make_row(f'{BLOCK}mlp.{name}.gate_proj.weight', MLP + 'shared_gate', 'S D -> D S'),
        make_row(f'{BLOCK}mlp.{name}.up_proj.weight', MLP + 'shared_up', 'S D -> D S'),
        make_row(f'{BLOCK}mlp.{name}.down_proj.weight', MLP + 'shared_down', 'D S -> S D'),
    )


SHARED_EXPERT_ROWS = (
    *shared_rows('shared_expert'),
    make_row(BLOCK + 'mlp.shared_expert_gate.weight', MLP + 'shared_weight', 'G D -> D G'),
)
QWEN3_MOE = Family(
    'Qwen3MoeForCausalLM',
    (
        *size_entries(32_768, 4),
        HeadDim(),
        Rope(),
        Window(4096, has_use=True),
        SILU,
        NO_BIAS,
        SharedField(
            'moe_intermediate_size', 'model.d_ff', 768
        ),  # of an expert: all layers have experts
        SharedField('num_local_experts', 'mlp.n_experts', 128, alias='num_experts'),
        SharedField('num_experts_per_tok', 'mlp.experts_per_token', 8),
        RENORMALISED,
        FixedField('decoder_sparse_step', 1),
        FixedField('mlp_only_layers', [], (None,)),
        ForeignField('use_qk_norm', True),
    ),
    EXPERTS | {'model.qk_norm': 'rmsnorm'},
    (
        *ENDS,
        *QKV,
        *QK_NORMS,
        *OUT,
        *PRE,
        *QWEN_EXPERT_ROWS,
    ),
)
OLMOE = Family(
    'OlmoeForCausalLM',
    (
        *size_entries(4096, eps=1e-5),
        EvenHeadDim(),
        Rope(),
        SILU,
        NO_BIAS,
        FixedField('clip_qkv', None),
        SharedField('num_local_experts', 'mlp.n_experts', 64, alias='num_experts'),
        SharedField('num_experts_per_tok', 'mlp.experts_per_token', 8),
        RENORMALISED,
    ),
    EXPERTS | {'model.qk_norm': 'rmsnorm', 'attention.qk_norm_over': 'model'},
    QWEN3_MOE.rows,
)

GPT_OSS_ROPE = {
    'rope_type': 'yarn',
    'factor': 32.0,
    'beta_fast': 32.0,
    'beta_slow': 1.0,
    'truncate': False,
    'original_max_position_embeddings': 4096,
}
GPT_OSS = Family(
    'GptOssForCausalLM',
    (
        *size_entries(131_072, 8, 1e-5),
        HeadDim(64),
        Rope(150_000.0, default_parameters=GPT_OSS_ROPE),
        Window(128, period=2, has_types=True, is_needed=True),
        SILU,
        SharedField('num_local_experts', 'mlp.n_experts', 128),
        SharedField('num_experts_per_tok', 'mlp.experts_per_token', 4),
        AliasField('experts_per_token', 'num_experts_per_tok'),
        FixedField('attention_bias', True),
        FixedField('swiglu_alpha', 1.702),
        FixedField('swiglu_limit', 7.0),
        Mxfp4(),
    ),
    EXPERTS | {'model.bias': True, 'model.activation': 'swiglu_oai', 'attention.sinks': 'learned'},
    (
        *ENDS,
        *QKV,
        *QKV_BIASES,
        *OUT,
        *OUT_BIASES,
        make_row(SELF_ATTN + 'sinks', ATTENTION + 'sinks', 'N -> N'),
        *PRE,
        *rows_with_bias(BLOCK + 'mlp.router', MLP + 'router', 'E D -> D E', 'E -> E'),
        make_row(BLOCK + 'mlp.experts.gate_up_proj', MLP + '{gate,up}', 'E D (F 2) -> E D F'),
        make_row(
            BLOCK + 'mlp.experts.gate_up_proj_bias', MLP + '{gate_bias,up_bias}', 'E (F 2) -> E F'
        ),
        make_row(BLOCK + 'mlp.experts.down_proj', MLP + 'down', 'E F D -> E F D'),
        make_row(BLOCK + 'mlp.experts.down_proj_bias', MLP + 'down_bias', 'E D -> E D'),
    ),
    aliases=EXPERT_ALIASES,
)
