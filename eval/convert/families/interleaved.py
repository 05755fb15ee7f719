"""Families with interleaved rotary positions: GPT-J, GLM, Helium and ERNIE 4.5.

Ours turn features that are half of the rotated ones apart. Rows of queries and keys are therefore
permuted within each head (H~R in layouts), which changes no logit.
"""

from eval.convert.families.common import (
    ACTIVATIONS,
    ATTENTION,
    BLOCK,
    DECODER,
    ENDS,
    GATED,
    GATED_BIASES,
    MLP,
    OUT,
    OUT_BIASES,
    PRE,
    READOUT,
    SELF_ATTN,
    SILU,
    norm_rows,
    size_entries,
)
from eval.convert.families.family import Family, TensorRow, make_row, rows_with_bias
from eval.convert.hf_config import (
    INPUT_BIASES,
    MLP_BIASES,
    Biases,
    BiasFlag,
    ChoiceField,
    EvenHeadDim,
    HeadDim,
    HiddenWidth,
    IgnoredField,
    MaxPositions,
    NoDropout,
    SharedField,
)
from eval.convert.hf_positions import Rope, RotaryDim


def interleaved_rows(attention: str) -> tuple[tuple[TensorRow, ...], tuple[TensorRow, ...]]:
    """Returns the rows of queries, keys and values, and of their biases."""
    weights, biases = zip(
        rows_with_bias(
            attention + 'q_proj', ATTENTION + 'query', '(N H~R) D -> D N H', '(N H~R) -> N H'
        ),
        rows_with_bias(
            attention + 'k_proj', ATTENTION + 'key', '(K H~R) D -> D K H', '(K H~R) -> K H'
        ),
        rows_with_bias(
            attention + 'v_proj', ATTENTION + 'value', '(K H) D -> D K H', '(K H) -> K H'
        ),
        strict=True,
    )
    return weights, biases


QKV, QKV_BIASES = interleaved_rows(SELF_ATTN)
HELIUM = Family(
    'HeliumForCausalLM',
    (
        *size_entries(4096, 20, 1e-8),
        # Their code multiplies all heads by a matrix of [hidden_size, hidden_size].
        EvenHeadDim(128),
        Rope(100_000.0),
        SILU,
        Biases(
            (
                BiasFlag('attention_bias', 'queries, keys and values', INPUT_BIASES),
                BiasFlag('mlp_bias', 'mlp', MLP_BIASES),
            )
        ),
    ),
    DECODER,
    (*ENDS, *QKV, *QKV_BIASES, *OUT, *GATED, *GATED_BIASES, *PRE),
)
ERNIE4_5 = Family(
    'Ernie4_5ForCausalLM',
    (
        *size_entries(131_072, 2, 1e-5, tied=True),
        HeadDim(128),
        Rope(500_000.0),
        SILU,
        SharedField('use_bias', 'model.bias', False),
    ),
    DECODER,
    (*ENDS, *QKV, *QKV_BIASES, *OUT, *OUT_BIASES, *GATED, *GATED_BIASES, *PRE),
)

GLM_ENTRIES = (
    *size_entries(131_072, 2, 0.00000015625),
    HeadDim(128),
    Rope(fraction=0.5, is_partial=True),
    SILU,
    SharedField('attention_bias', 'model.qkv_bias', True),
)
GLM_ROWS = (
    *ENDS,
    *QKV,
    *QKV_BIASES,
    *OUT,
    make_row(BLOCK + 'mlp.gate_up_proj.weight', MLP + '{gate,up}', 'F|F D -> D F|F'),
    GATED[-1],
)
GLM = Family('GlmForCausalLM', GLM_ENTRIES, DECODER, (*GLM_ROWS, *PRE))
GLM4 = Family(
    'Glm4ForCausalLM',
    GLM_ENTRIES,
    DECODER | {'model.placement': 'peri'},
    (
        *GLM_ROWS,
        *norm_rows(BLOCK + 'input_layernorm', 'layers/attention_norm_in'),
        *norm_rows(BLOCK + 'post_self_attn_layernorm', 'layers/attention_norm_out'),
        *norm_rows(BLOCK + 'post_attention_layernorm', 'layers/mlp_norm_in'),
        *norm_rows(BLOCK + 'post_mlp_layernorm', 'layers/mlp_norm_out'),
        *norm_rows('model.norm', 'final_norm'),
    ),
)

H = 'transformer.h.{L}.'
GPTJ = Family(
    'GPTJForCausalLM',
    (
        SharedField('n_embd', 'model.d_model'),
        SharedField('n_layer', 'model.n_layers'),
        SharedField('n_head', 'model.n_heads'),
        HiddenWidth('n_inner', 'n_embd'),
        MaxPositions('n_positions'),
        RotaryDim(),
        SharedField('layer_norm_epsilon', 'norm.eps', 1e-5),
        SharedField('tie_word_embeddings', 'model.tie_embeddings', False),
        ChoiceField('activation_function', 'model.activation', ACTIVATIONS, 'gelu_new'),
        NoDropout('resid_pdrop'),
        NoDropout('embd_pdrop'),
        NoDropout('attn_pdrop'),
        # Fields of its files that their code does not read.
        IgnoredField('rotary', True),
        IgnoredField('scale_attn_weights', True),
    ),
    DECODER
    | {
        'model.norm': 'layernorm',
        'model.placement': 'parallel_shared',
        'model.mlp_bias': True,
        'model.readout_bias': True,
    },
    (
        make_row('transformer.wte.weight', 'embedding', 'V D -> V D'),
        READOUT,
        make_row('lm_head.bias', 'readout_bias', 'V -> V'),
        *interleaved_rows(H + 'attn.')[0],
        make_row(H + 'attn.out_proj.weight', ATTENTION + 'out', 'D (N H) -> N H D'),
        *rows_with_bias(H + 'mlp.fc_in', MLP + 'up', 'F D -> D F', 'F -> F'),
        *rows_with_bias(H + 'mlp.fc_out', MLP + 'down', 'D F -> F D', 'D -> D'),
        *norm_rows(H + 'ln_1', 'layers/attention_norm_in', bias=True),
        *norm_rows('transformer.ln_f', 'final_norm', bias=True),
    ),
    prefix='transformer.',
    unused_suffixes=('.attn.bias', '.attn.masked_bias'),  # buffers of the causal mask
    aliases={
        'hidden_size': 'n_embd',
        'max_position_embeddings': 'n_positions',
        'num_attention_heads': 'n_head',
        'num_hidden_layers': 'n_layer',
    },
)
