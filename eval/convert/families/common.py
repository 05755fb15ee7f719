"""Entries of config.json and rows of tensors that several families have."""

from typing import Any

from eval.convert.families.family import TensorRow, make_row, rows_with_bias
from eval.convert.hf_config import MISSING, FixedField, MaxPositions, SharedField

ATTENTION, MLP = 'layers/attention/', 'layers/mlp/'

# The defaults of all families.
DECODER = {
    'model.norm': 'rmsnorm',
    'model.placement': 'pre',
    'model.attention': 'softmax',
    'model.qk_norm': 'none',
    'model.position': 'rope',
    'model.activation': 'swiglu',
    'model.mlp': 'dense',
    'model.bias': False,
    'model.qkv_bias': False,
    'model.mlp_bias': False,
    'model.embedding_scale': False,
    'model.logit_softcap': 0.0,
}

# transformers' 'gelu' is exact (erf), ours the tanh approximation.
ACTIVATIONS = {
    'gelu_new': 'gelu',
    'gelu_pytorch_tanh': 'gelu',
    'gelu_fast': 'gelu',
    'gelu_accurate': 'gelu',
    'gelu_python_tanh': 'gelu',
    'gelu': 'gelu_exact',
    'gelu_python': 'gelu_exact',
    'relu': 'relu',
    'relu2': 'squared_relu',
    'silu': 'silu',
    'swish': 'silu',
}


def size_entries(
    max_positions: int,
    kv_heads: int | None = None,
    eps: float = 1e-6,
    tied: bool = False,
    d_ff: Any = MISSING,
) -> tuple[Any, ...]:
    """Returns the entries that nearly all families have.

    Args:
      max_positions: default of the tokens in a row, as in their class; so are the other arguments.
      kv_heads: heads of keys; None: the number of query heads.
      eps: of the norms.
      tied: whether the embedding is the readout.
      d_ff: hidden width of an MLP, of a class whose files need not have it: all have experts.
    """
    return (
        SharedField('hidden_size', 'model.d_model'),
        SharedField('num_hidden_layers', 'model.n_layers'),
        SharedField('num_attention_heads', 'model.n_heads'),
        SharedField('num_key_value_heads', 'model.n_kv_heads', kv_heads),
        SharedField('intermediate_size', 'model.d_ff', d_ff),
        SharedField('rms_norm_eps', 'norm.eps', eps),
        SharedField('tie_word_embeddings', 'model.tie_embeddings', tied),
        MaxPositions(default=max_positions),
    )


SILU = FixedField('hidden_act', 'silu', ('swish',))
NO_BIAS = FixedField('attention_bias', False)


def norm_rows(
    name: str, path: str, offset: float = 0.0, bias: bool = False
) -> tuple[TensorRow, ...]:
    """Returns the rows of a norm's gain and, with `bias`, of its bias.

    Args:
      name: of the norm in the files.
      path: of the norm in our tree.
      offset: our gains minus the file's.
      bias: whether the norm has a bias.
    """
    rows = (make_row(f'{name}.weight', f'{path}/scale', 'D -> D', offset),)
    return rows + ((make_row(f'{name}.bias', f'{path}/bias', 'D -> D'),) if bias else ())


EMBEDDING = make_row('model.embed_tokens.weight', 'embedding', 'V D -> V D')
READOUT = make_row('lm_head.weight', 'readout', 'V D -> D V')
ENDS = (EMBEDDING, READOUT)
BLOCK = 'model.layers.{L}.'
SELF_ATTN = BLOCK + 'self_attn.'
QKV, QKV_BIASES = zip(
    rows_with_bias(SELF_ATTN + 'q_proj', ATTENTION + 'query', '(N H) D -> D N H', '(N H) -> N H'),
    rows_with_bias(SELF_ATTN + 'k_proj', ATTENTION + 'key', '(K H) D -> D K H', '(K H) -> K H'),
    rows_with_bias(SELF_ATTN + 'v_proj', ATTENTION + 'value', '(K H) D -> D K H', '(K H) -> K H'),
    strict=True,
)
OUT, OUT_BIASES = zip(
    rows_with_bias(SELF_ATTN + 'o_proj', ATTENTION + 'out', 'D (N H) -> N H D', 'D -> D'),
    strict=True,
)
GATED, GATED_BIASES = zip(
    rows_with_bias(BLOCK + 'mlp.gate_proj', MLP + 'gate', 'F D -> D F', 'F -> F'),
    rows_with_bias(BLOCK + 'mlp.up_proj', MLP + 'up', 'F D -> D F', 'F -> F'),
    rows_with_bias(BLOCK + 'mlp.down_proj', MLP + 'down', 'D F -> F D', 'D -> D'),
    strict=True,
)
PRE = (
    *norm_rows(BLOCK + 'input_layernorm', 'layers/attention_norm_in'),
    *norm_rows(BLOCK + 'post_attention_layernorm', 'layers/mlp_norm_in'),
    *norm_rows('model.norm', 'final_norm'),
)
QK_NORMS = (
    make_row(SELF_ATTN + 'q_norm.weight', ATTENTION + 'query_norm/scale', 'H -> H'),
    make_row(SELF_ATTN + 'k_norm.weight', ATTENTION + 'key_norm/scale', 'H -> H'),
)
LLAMA_ROWS = (*ENDS, *QKV, *OUT, *GATED, *PRE)
