"""Families of Gemma."""

from eval.convert.families.common import (
    BLOCK,
    DECODER,
    ENDS,
    GATED,
    NO_BIAS,
    OUT,
    QK_NORMS,
    QKV,
    norm_rows,
    size_entries,
)
from eval.convert.families.family import Family, TensorRow
from eval.convert.hf_config import FixedField, HeadDim, IgnoredField, QueryScalar, SharedField
from eval.convert.hf_positions import Rope, RopeByKind, Window


def four_norms(offset: float) -> tuple[TensorRow, ...]:
    """Returns the norms of Gemma 2 and 3: before and after each part."""
    return (
        *norm_rows(BLOCK + 'input_layernorm', 'layers/attention_norm_in', offset),
        *norm_rows(BLOCK + 'post_attention_layernorm', 'layers/attention_norm_out', offset),
        *norm_rows(BLOCK + 'pre_feedforward_layernorm', 'layers/mlp_norm_in', offset),
        *norm_rows(BLOCK + 'post_feedforward_layernorm', 'layers/mlp_norm_out', offset),
        *norm_rows('model.norm', 'final_norm', offset),
    )


GEMMA_ALWAYS = DECODER | {
    'model.placement': 'peri',
    'model.activation': 'geglu',
    'model.embedding_scale': True,
}
GEMMA_ACTIVATION = FixedField(
    'hidden_activation', 'gelu_pytorch_tanh', (None, 'gelu_new', 'gelu_fast')
)
# The norms of Gemma multiply by 1 + weight, so that our gains are the file's plus 1.
GEMMA2 = Family(
    'Gemma2ForCausalLM',
    (
        *size_entries(8192, 4, tied=True),
        HeadDim(256),
        QueryScalar(256),
        Rope(),
        Window(4096, period=2, has_types=True, is_needed=True),
        SharedField('final_logit_softcapping', 'model.logit_softcap', 30.0, null_value=0.0),
        SharedField('attn_logit_softcapping', 'attention.softcap', 50.0, null_value=0.0),
        GEMMA_ACTIVATION,
        FixedField('hidden_act', 'gelu_pytorch_tanh'),
        FixedField('use_bidirectional_attention', None, (False,)),
        NO_BIAS,
    ),
    GEMMA_ALWAYS,
    (*ENDS, *QKV, *OUT, *GATED, *four_norms(1.0)),
)

GEMMA3 = Family(
    'Gemma3ForCausalLM',
    (
        *size_entries(131_072, 4, tied=True),
        HeadDim(256),
        QueryScalar(256),
        RopeByKind(),
        Window(4096, period=6, has_types=True, is_needed=True, has_pattern=True),
        SharedField('final_logit_softcapping', 'model.logit_softcap', None, null_value=0.0),
        IgnoredField('attn_logit_softcapping', None),
        GEMMA_ACTIVATION,
        FixedField('hidden_act', 'gelu_pytorch_tanh'),
        FixedField('use_bidirectional_attention', None, (False,)),
        NO_BIAS,
    ),
    GEMMA_ALWAYS | {'model.qk_norm': 'rmsnorm'},
    (
        *ENDS,
        *QKV,
        *OUT,
        *GATED,
        *four_norms(1.0),
        *(row._replace(offset=1.0) for row in QK_NORMS),
    ),
)
