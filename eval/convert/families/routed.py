"""Families with shared experts: those with the router of DeepSeek-V3, ERNIE 4.5 and Qwen 2."""

import dataclasses

from eval.convert.families.common import (
    BLOCK,
    ENDS,
    GATED,
    MLP,
    NO_BIAS,
    OUT,
    PRE,
    QK_NORMS,
    QKV,
    QKV_BIASES,
    SILU,
    size_entries,
)
from eval.convert.families.experts import (
    EXPERTS,
    QWEN_EXPERT_ROWS,
    RENORMALISED,
    SHARED_EXPERT_ROWS,
    shared_rows,
)
from eval.convert.families.family import Family, TensorRow, kind_rows, make_row
from eval.convert.families.interleaved import QKV as INTERLEAVED_QKV
from eval.convert.hf_config import (
    ChoiceField,
    ConfigEntry,
    ConfigFields,
    EvenHeadDim,
    FixedField,
    HeadDim,
    SharedField,
)
from eval.convert.hf_layers import (
    DenseFirst,
    DenseListed,
    DenseOutside,
    ExtraLayers,
    LayerKinds,
    MlpKinds,
    SharedWidth,
)
from eval.convert.hf_positions import FULL, SLIDING, Rope, Window

# The scores are sigmoids, and a bias that is no weight takes part in the choice.
SCORED = EXPERTS | {'mlp.gates': 'sigmoid', 'mlp.balance': 'bias'}
ROUTER_BIAS = make_row(BLOCK + 'mlp.gate.e_score_correction_bias', MLP + 'expert_bias', 'E -> E')


def routed_entries(
    width: int,
    n_experts: int | None,
    per_token: int | None,
    is_sum_default: bool = True,
    width_field: str = 'mlp.expert_width',
) -> tuple[ConfigEntry, ...]:
    """Returns the entries of DeepSeek-V3's experts.

    Args:
      width: default of the hidden width of an expert, as in their class; so are the others.
      n_experts: number of experts.
      per_token: experts of a token.
      is_sum_default: whether gates are divided by their sum if the file does not say it.
      width_field: of the width of an expert; model.d_ff if all layers have experts.
    """
    return (
        SharedField('moe_intermediate_size', width_field, width),
        SharedField('n_routed_experts', 'mlp.n_experts', n_experts),
        SharedField('num_experts_per_tok', 'mlp.experts_per_token', per_token),
        SharedField('n_shared_experts', 'mlp.shared_experts', 1),
        SharedField('routed_scaling_factor', 'mlp.route_scale', 1.0),
        Groups(),
        SummedGates(is_sum_default),
    )


class Groups(ConfigEntry):
    """n_group and topk_group. If a token may use all groups, they change nothing."""

    def read(self, fields: ConfigFields) -> dict:
        groups, chosen = (fields.take(name, 1) for name in ('n_group', 'topk_group'))
        if chosen == groups:
            groups = chosen = 1
        return {'mlp.expert_groups': groups, 'mlp.groups_per_token': chosen}

    def write(self, flat: dict) -> dict:
        return {'n_group': flat['mlp.expert_groups'], 'topk_group': flat['mlp.groups_per_token']}


@dataclasses.dataclass(frozen=True)
class SummedGates(ConfigEntry):
    """norm_topk_prob, which must be true: our sigmoid gates are divided by their sum."""

    default: bool

    def read(self, fields: ConfigFields) -> dict:
        if not fields.take('norm_topk_prob', self.default):
            raise ValueError(
                'config.json has norm_topk_prob=False; only True is supported, as our gates of '
                'sigmoids are divided by their sum'
            )
        return {}

    def write(self, flat: dict) -> dict:
        return {'norm_topk_prob': True}


def routed_rows(*attention: TensorRow, bias: TensorRow = ROUTER_BIAS) -> tuple[TensorRow, ...]:
    """Returns the rows of a model with dense MLPs and experts, with these rows of attention.

    Args:
      *attention: rows of attention.
      bias: the row of the bias of the choice.
    """
    experts = (*QWEN_EXPERT_ROWS, bias, *shared_rows('shared_experts'))
    return (
        *ENDS,
        *attention,
        *PRE,
        *kind_rows('dense', *GATED),
        *kind_rows('moe', *experts),
    )


ALIASES = {'num_local_experts': 'n_routed_experts'}
GLM4_MOE = Family(
    'Glm4MoeForCausalLM',
    (
        *size_entries(131_072, 8, 1e-5),
        HeadDim(),
        Rope(fraction=0.5, is_partial=True),
        SILU,
        SharedField('attention_bias', 'model.qkv_bias', False),
        ChoiceField('use_qk_norm', 'model.qk_norm', {True: 'rmsnorm', False: 'none'}, False),
        *routed_entries(1408, 128, 8),
        LayerKinds(mlps=DenseFirst(1)),
        ExtraLayers('num_mtp_layers', 'num_nextn_predict_layers'),
    ),
    SCORED,
    routed_rows(*QKV, *QKV_BIASES, *QK_NORMS, *OUT),
    aliases=ALIASES,
    extra_layers=True,
)
SOLAR_OPEN = Family(
    'SolarOpenForCausalLM',
    (
        *size_entries(131_072, 8, 1e-5, d_ff=1280),
        HeadDim(128),
        Rope(1_000_000.0),
        SILU,
        SharedField('attention_bias', 'model.qkv_bias', False),
        *routed_entries(1280, 128, 8, width_field='model.d_ff'),
        LayerKinds(mlps=MlpKinds()),
    ),
    SCORED,
    routed_rows(*QKV, *QKV_BIASES, *OUT),
    aliases=ALIASES,
)


class LateWindow(Window):
    """Layers have a window from max_window_layers on, 62 by default (dots1)."""

    def default_types(self, fields: ConfigFields, layers: int, window: int | None) -> list[str]:
        first = fields.take('max_window_layers', 62)
        first = layers if window is None else first
        return [FULL if layer < first else SLIDING for layer in range(layers)]


DOTS1 = Family(
    'Dots1ForCausalLM',
    (
        *size_entries(2048, 32),
        HeadDim(),
        Rope(),
        LateWindow(4096, has_types=True),
        SILU,
        NO_BIAS,
        *routed_entries(1408, None, None, is_sum_default=False),
        LayerKinds(mlps=DenseFirst(0)),
    ),
    SCORED | {'model.qk_norm': 'rmsnorm'},
    routed_rows(*QKV, *QK_NORMS, *OUT),
    aliases=ALIASES,
)
ERNIE4_5_MOE = Family(
    'Ernie4_5_MoeForCausalLM',
    (
        *size_entries(131_072, 4, 1e-5, tied=True),
        HeadDim(),
        Rope(500_000.0),
        SILU,
        FixedField('use_bias', False),
        SharedField('moe_intermediate_size', 'mlp.expert_width', 1536),
        SharedField('moe_num_experts', 'mlp.n_experts', 64),
        SharedField('moe_k', 'mlp.experts_per_token', 6),
        SharedField('moe_num_shared_experts', 'mlp.shared_experts', 2),
        # The least sum that gates are divided by: of the largest of a softmax, it is larger.
        FixedField('moe_norm_min', 1e-12),
        LayerKinds(mlps=DenseOutside()),
    ),
    EXPERTS | {'mlp.balance': 'bias'},
    routed_rows(
        *INTERLEAVED_QKV,
        *OUT,
        bias=make_row(
            BLOCK + 'mlp.moe_statics.e_score_correction_bias', MLP + 'expert_bias', '1 E -> E'
        ),
    ),
    aliases={'num_experts': 'moe_num_experts', 'num_experts_per_tok': 'moe_k'},
)


class EarlyWindow(Window):
    """Every other layer before max_window_layers has a window (Qwen 2 with experts)."""

    def default_types(self, fields: ConfigFields, layers: int, window: int | None) -> list[str]:
        last = fields.take('max_window_layers', 28)
        last = 0 if window is None else last
        return [SLIDING if layer % 2 == 0 and layer < last else FULL for layer in range(layers)]


QWEN2_MOE = Family(
    'Qwen2MoeForCausalLM',
    (
        *size_entries(32_768, 16),
        EvenHeadDim(),
        Rope(),
        EarlyWindow(4096, has_types=True, has_use=True),
        SILU,
        SharedField('qkv_bias', 'model.qkv_bias', True),
        SharedField('moe_intermediate_size', 'mlp.expert_width', 1408),
        SharedWidth(5632, 1408),
        SharedField('num_experts', 'mlp.n_experts', 60),
        SharedField('num_experts_per_tok', 'mlp.experts_per_token', 4),
        RENORMALISED,
        LayerKinds(mlps=DenseListed()),
    ),
    EXPERTS | {'mlp.shared_gate': True},
    (
        *ENDS,
        *QKV,
        *QKV_BIASES,
        *OUT,
        *PRE,
        *kind_rows('dense', *GATED),
        *kind_rows('moe', *QWEN_EXPERT_ROWS, *SHARED_EXPERT_ROWS),
    ),
)
