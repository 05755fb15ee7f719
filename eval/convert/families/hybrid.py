"""Families with recurrences between layers of attention: Qwen3-Next, Qwen 3.5 and OLMo Hybrid."""

import dataclasses

from eval.convert.families.common import (
    ATTENTION,
    BLOCK,
    DECODER,
    ENDS,
    GATED,
    NO_BIAS,
    OUT,
    PRE,
    QK_NORMS,
    QKV,
    SELF_ATTN,
    SILU,
    norm_rows,
    size_entries,
)
from eval.convert.families.experts import (
    EXPERTS,
    QWEN_EXPERT_ROWS,
    RENORMALISED_ALWAYS,
    SHARED_EXPERT_ROWS,
)
from eval.convert.families.family import Family, TensorRow, kind_rows, make_row
from eval.convert.families.llama import OLMO2
from eval.convert.hf_config import ChoiceField, EvenHeadDim, HeadDim, SharedField
from eval.convert.hf_layers import (
    RECURRENCE,
    SOFTMAX,
    DenseListed,
    LayerKinds,
    MlpKinds,
    RecurrentSizes,
    SameEps,
    SharedWidth,
    StartField,
)
from eval.convert.hf_positions import OptionalRope, Rope
from eval.convert.layouts import GroupedLayout

LINEAR_ATTN = BLOCK + 'linear_attn.'
# Of layers of a recurrence, behind its name in model.pattern.
UNROTATED = 'position=none,qk_norm_over=none'
RECURRENT = DECODER | {'model.qk_norm': 'rmsnorm', 'attention.negative_eigenvalues': False}
TAPS = ATTENTION + '{query_conv,key_conv,value_conv}'
NUMBERS = (
    make_row(LINEAR_ATTN + 'A_log', ATTENTION + 'decay_log_rate', 'W -> W'),
    make_row(LINEAR_ATTN + 'dt_bias', ATTENTION + 'decay_step_bias', 'W -> W'),
)
MIXED_TAPS = make_row(LINEAR_ATTN + 'conv1d.weight', TAPS, '(P|P|W Q|Q|U) 1 C -> P|P|W Q|Q|U C')
OUTPUT = (
    make_row(LINEAR_ATTN + 'norm.weight', ATTENTION + 'output_scale', 'U -> U'),
    make_row(LINEAR_ATTN + 'out_proj.weight', ATTENTION + 'out', 'D (W U) -> W U D'),
)


def grouped_row(name: str, paths: tuple[str, ...], axes: str) -> TensorRow:
    """Returns the row of a matrix that interleaves arrays by head of keys.

    Args:
      name: of the tensor.
      paths: of our arrays, behind ATTENTION.
      axes: of our arrays.
    """
    return TensorRow(
        LINEAR_ATTN + name,
        tuple(ATTENTION + path for path in paths),
        GroupedLayout(axes, 'P'),
    )


NEXT_ROWS = kind_rows(
    RECURRENCE,
    grouped_row('in_proj_qkvz.weight', ('query', 'key', 'value', 'gate'), 'D P|P|W|W Q|Q|U|U'),
    grouped_row('in_proj_ba.weight', ('write', 'decay'), 'D W|W'),
    MIXED_TAPS,
    *NUMBERS,
    *OUTPUT,
)
QWEN3_5_ROWS = kind_rows(
    RECURRENCE,
    make_row(
        LINEAR_ATTN + 'in_proj_qkv.weight',
        ATTENTION + '{query,key,value}',
        '(P|P|W Q|Q|U) D -> D P|P|W Q|Q|U',
    ),
    make_row(LINEAR_ATTN + 'in_proj_z.weight', ATTENTION + 'gate', '(W U) D -> D W U'),
    make_row(LINEAR_ATTN + 'in_proj_b.weight', ATTENTION + 'write', 'W D -> D W'),
    make_row(LINEAR_ATTN + 'in_proj_a.weight', ATTENTION + 'decay', 'W D -> D W'),
    MIXED_TAPS,
    *NUMBERS,
    *OUTPUT,
)
# The norms multiply by 1 + weight, except for the gated one behind the recurrence.
QWEN_ROWS = (
    *ENDS,
    *kind_rows(
        SOFTMAX,
        # Queries and gates of a head are next to each other.
        make_row(SELF_ATTN + 'q_proj.weight', ATTENTION + '{query,gate}', '(N 2 H) D -> D N H'),
        *QKV[1:],
        *(row._replace(offset=1.0) for row in QK_NORMS),
        *OUT,
    ),
    *(row._replace(offset=1.0) for row in PRE),
)
NEXT_CONSTANTS = RECURRENT | {'attention.gate': 'elementwise'}
NEXT_ROPE = Rope(fraction=0.25, is_partial=True)
# Of images: text has the same position in all three sections of its features.
QWEN3_5_ROPE = dataclasses.replace(NEXT_ROPE, ignored=('mrope_section', 'mrope_interleaved'))
NEXT_EXPERTS = NEXT_CONSTANTS | EXPERTS | {'model.qk_norm': 'rmsnorm', 'mlp.shared_gate': True}
QWEN3_NEXT = Family(
    'Qwen3NextForCausalLM',
    (
        *size_entries(32_768, 2),
        HeadDim(256),
        NEXT_ROPE,
        SILU,
        NO_BIAS,
        SharedField('moe_intermediate_size', 'mlp.expert_width', 512),
        SharedWidth(512, 512),
        SharedField('num_experts', 'mlp.n_experts', 512),
        SharedField('num_experts_per_tok', 'mlp.experts_per_token', 10),
        ChoiceField('norm_topk_prob', 'mlp.gates', {True: 'renormalised', False: 'softmax'}, True),
        LayerKinds(UNROTATED, DenseListed(), interval_name='full_attention_interval'),
        RecurrentSizes(),
        SameEps(),
    ),
    NEXT_EXPERTS,
    (
        *QWEN_ROWS,
        *NEXT_ROWS,
        *kind_rows('dense', *GATED),
        *kind_rows('moe', *QWEN_EXPERT_ROWS, *SHARED_EXPERT_ROWS),
    ),
    extra_prefix='mtp.',
)
QWEN3_5 = Family(
    'Qwen3_5ForCausalLM',
    (
        *size_entries(32_768, 4),
        HeadDim(256),
        QWEN3_5_ROPE,
        SILU,
        NO_BIAS,
        LayerKinds(UNROTATED, interval_name='full_attention_interval'),
        RecurrentSizes(),
        SameEps(),
    ),
    NEXT_CONSTANTS,
    (*QWEN_ROWS, *QWEN3_5_ROWS, *GATED),
    extra_prefix='mtp.',
)
QWEN3_5_MOE = Family(
    'Qwen3_5MoeForCausalLM',
    (
        *size_entries(32_768, 2, d_ff=512),
        HeadDim(256),
        QWEN3_5_ROPE,
        SILU,
        NO_BIAS,
        SharedField('moe_intermediate_size', 'model.d_ff', 512),
        SharedWidth(512, 512),
        SharedField('num_experts', 'mlp.n_experts', 256),
        SharedField('num_experts_per_tok', 'mlp.experts_per_token', 8),
        RENORMALISED_ALWAYS,
        LayerKinds(UNROTATED, MlpKinds(), interval_name='full_attention_interval'),
        RecurrentSizes(),
        SameEps(),
    ),
    NEXT_EXPERTS,
    (*QWEN_ROWS, *QWEN3_5_ROWS, *QWEN_EXPERT_ROWS, *SHARED_EXPERT_ROWS),
    extra_prefix='mtp.',
)

# Norms stand before the sublayers of a recurrent block, and behind those of an attention block.
HYBRID_TAPS = tuple(
    make_row(
        f'{LINEAR_ATTN}{name}_conv1d.weight', f'{ATTENTION}{path}_conv', f'({axes}) 1 C -> {axes} C'
    )
    for name, path, axes in (('q', 'query', 'P Q'), ('k', 'key', 'P Q'), ('v', 'value', 'W U'))
)
OLMO_HYBRID_ROWS = kind_rows(
    RECURRENCE,
    make_row(LINEAR_ATTN + 'q_proj.weight', ATTENTION + 'query', '(P Q) D -> D P Q'),
    make_row(LINEAR_ATTN + 'k_proj.weight', ATTENTION + 'key', '(P Q) D -> D P Q'),
    make_row(LINEAR_ATTN + 'v_proj.weight', ATTENTION + 'value', '(W U) D -> D W U'),
    make_row(LINEAR_ATTN + 'g_proj.weight', ATTENTION + 'gate', '(W U) D -> D W U'),
    make_row(LINEAR_ATTN + 'a_proj.weight', ATTENTION + 'decay', 'W D -> D W'),
    make_row(LINEAR_ATTN + 'b_proj.weight', ATTENTION + 'write', 'W D -> D W'),
    *HYBRID_TAPS,
    *NUMBERS,
    make_row(LINEAR_ATTN + 'o_norm.weight', ATTENTION + 'output_scale', 'U -> U'),
    make_row(LINEAR_ATTN + 'o_proj.weight', ATTENTION + 'out', 'D (W U) -> W U D'),
    *norm_rows(BLOCK + 'attention_layer_norm', 'layers/attention_norm_in'),
    *norm_rows(BLOCK + 'feedforward_layer_norm', 'layers/mlp_norm_in'),
)
OLMO_HYBRID = Family(
    'OlmoHybridForCausalLM',
    (
        *size_entries(65_536),
        EvenHeadDim(),
        OptionalRope(),
        SILU,
        NO_BIAS,
        LayerKinds(f'{UNROTATED},placement=pre', is_last_full=True),
        RecurrentSizes(None, None, None, None),
        SharedField('linear_allow_neg_eigval', 'attention.negative_eigenvalues', True),
        *(
            StartField(f'linear_{name}')
            for name in ('a_log_min', 'a_log_max', 'dt_min', 'dt_max', 'dt_init_floor')
        ),
    ),
    {**OLMO2.constants, 'attention.output_norm_eps': 1e-5},
    (
        *ENDS,
        *kind_rows(
            SOFTMAX,
            *QKV,
            *QK_NORMS,
            *OUT,
            # As transformers writes it: it renames the norm of all layers.
            *norm_rows(BLOCK + 'feedforward_layer_norm', 'layers/attention_norm_out'),
            *norm_rows(BLOCK + 'post_feedforward_layernorm', 'layers/mlp_norm_out'),
        ),
        *OLMO_HYBRID_ROWS,
        *GATED,
        *norm_rows('model.norm', 'final_norm'),
    ),
    tensor_aliases={
        '.input_layernorm.': '.attention_layer_norm.',
        '.post_attention_layernorm.': '.feedforward_layer_norm.',
    },
)
