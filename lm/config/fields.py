"""The fields of a config, by section: their types, bounds and tables.

Fields that belong to no part are declared here; `configs/default.py` gives them values. A field
that was added later may have a dataclass default, which reproduces the behaviour before the field
existed. The options of parts (`modules.options`) are further fields of their section, None unless
they are set.
"""

import dataclasses
import sys
import typing
from typing import TYPE_CHECKING, Annotated, Any

from lm.config.choice import AUTO, Choice
from modules.activations import ACTIVATIONS
from modules.attention import ATTENTIONS
from modules.kernels import (
    ATTENTION_KERNELS,
    CROSS_ENTROPY_KERNELS,
    IMPLEMENTATIONS,
    LINEAR_ATTENTION_KERNELS,
    MATMUL_KERNELS,
    RMS_NORM_KERNELS,
    SOFTMAX_KERNELS,
)
from modules.losses import AUXILIARIES, LOSSES
from modules.mlp import MLPS
from modules.norms import NORMS
from modules.numerics import REMAT_POLICIES
from modules.objectives import OBJECTIVES
from modules.optim import AVERAGES, OPTIMIZERS, SCHEDULES
from modules.options import Option, annotation_types, make_section
from modules.placements import PLACEMENTS
from modules.positions import POSITIONS
from modules.readouts import READOUTS
from modules.reparam import REPARAMS
from modules.scaling import DECAY_RULES, INITS, PARAMETRIZATIONS

FINITE = sys.float_info.max


Size = Annotated[int, Option(minimum=1)]
Count = Annotated[int, Option(minimum=0)]
Norm = Annotated[str, Choice(NORMS, 'norm', inline=True)]


def dropout_option(description: str) -> Option:
    """Returns the option of a dropout rate; `description` ends the sentence 'share that ...'."""
    return Option(f'share that training drops {description}', 0, 0.99, off_value=0.0, traced=True)


@dataclasses.dataclass(frozen=True, kw_only=True)
class ModelConfig:
    d_model: Size
    n_layers: Size
    n_heads: Size
    d_ff: Size
    norm: Norm
    placement: Annotated[str, Choice(PLACEMENTS, 'model')]
    attention: Annotated[str, Choice(ATTENTIONS, 'attention')]
    qk_norm: Norm
    activation: Annotated[str, Choice(ACTIVATIONS, 'mlp')]
    position: Annotated[str, Choice(POSITIONS, 'attention')]
    reparam: Annotated[str, Choice(REPARAMS, 'reparam', several=True, auto=True)]
    tie_embeddings: bool
    logit_softcap: Annotated[float, Option(minimum=0, maximum=FINITE)]
    dtype: Annotated[str, Option(choices=(AUTO, 'bfloat16', 'float32'))]  # auto: by where it trains
    remat: Annotated[str, Choice(REMAT_POLICIES)]
    scan_layers: bool
    n_kv_heads: Annotated[int | None, Option(minimum=1)] = None  # None: n_heads
    head_dim: Annotated[int | None, Option(minimum=1)] = None  # None: d_model / n_heads
    embedding_norm: Norm = 'none'
    final_norm: Annotated[str, Choice(NORMS, 'norm', inline=True, auto=True)] = AUTO
    embedding_scale: bool | None = None  # learned, from sqrt(d_model) on; None: the norm's own
    mlp: Annotated[str, Choice(MLPS, 'mlp', auto=True, sows=True)] = AUTO
    bias: bool = False
    qkv_bias: bool = False  # of queries, keys and values alone
    mlp_bias: bool = False  # of the matrices of MLPs alone
    readout: Annotated[str, Choice(READOUTS, 'model')] = 'learned'
    readout_bias: bool = False
    dropout: Annotated[float, dropout_option('of the results of attention and MLPs; 0: none')] = 0.0
    attention_dropout: Annotated[
        float | None, dropout_option('of the probabilities of attention; None: model.dropout')
    ] = None
    embedding_dropout: Annotated[
        float | None, dropout_option('of the embeddings, positions added; None: model.dropout')
    ] = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class NormConfig:
    """Options of norm layers, for all norms of the model that have them."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class AttentionConfig:
    """Options of attention layers and of positions."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class MLPConfig:
    """Options of MLPs and activations."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class ReparamConfig:
    """Options of reparametrisations."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class LossConfig:
    name: Annotated[str, Choice(LOSSES, 'loss')]
    chunk: Annotated[
        int | None, Option('tokens whose logits are made at a time; 0: all; None: chosen', 0)
    ] = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class OptimConfig:
    name: Annotated[str, Choice(OPTIMIZERS, 'optim')]
    lr: Annotated[float, Option(minimum=0, maximum=FINITE, traced=True)]
    others: Annotated[str, Choice(OPTIMIZERS, 'optim')] = 'adamw'
    others_lr: Annotated[
        float | None,
        Option('learning rate of all but hidden matrices; None: the same', 0, FINITE, traced=True),
    ] = None
    embedding_gradient_shrink: Annotated[
        float | None,
        Option('factor of the gradient of the word embedding; None: 1', 0, 1, traced=True),
    ] = None
    update_clip: Annotated[
        float | None,
        Option('largest rms of the update of a matrix; None: any', 1e-6, FINITE, traced=True),
    ] = None
    ghost_radius: Annotated[
        float | None,
        Option(
            'largest spread of logits that a step moves, over pi; None: any',
            1e-6,
            FINITE,
            traced=True,
        ),
    ] = None
    match_rms: Annotated[
        float | None,
        Option(
            'rms that updates of hidden matrices get; None: their own', 1e-6, FINITE, traced=True
        ),
    ] = None
    schedule: Annotated[str, Choice(SCHEDULES, 'optim')]
    weight_decay: Annotated[float, Option(minimum=0, maximum=FINITE, traced=True)]
    decay_rule: Annotated[str, Choice(DECAY_RULES, 'optim')]
    clip_norm: Annotated[float, Option(minimum=0, traced=True)]
    average: Annotated[str, Choice(AVERAGES, 'optim')] = 'none'


@dataclasses.dataclass(frozen=True, kw_only=True)
class ScalingConfig:
    name: Annotated[str, Choice(PARAMETRIZATIONS, 'scaling')]
    init_scale: Annotated[float, Option(minimum=0, maximum=FINITE, traced=True)]
    base_width: Annotated[
        int | None, Option('of the model that a parametrisation scales against', 1)
    ] = None
    base_depth: Annotated[int | None, Option('blocks of that model', 1)] = None
    base_heads: Annotated[
        int | None, Option('heads of that model; None: as many as are as wide as here', 1)
    ] = None
    init: Annotated[str, Choice(INITS)] = 'fan_in'
    embedding_std: Annotated[
        float | None,
        Option('deviation of embeddings; None: that of scaling.init', 0, FINITE, traced=True),
    ] = None
    zero_init: Annotated[
        str,
        Option(
            'query, readout or both start at 0, besides what the parametrisation has so',
            choices=('none', 'query', 'readout', 'both'),
        ),
    ] = 'none'


@dataclasses.dataclass(frozen=True, kw_only=True)
class DataConfig:
    source: str
    tokenizer: str
    text_field: str
    seq_len: int
    batch_size: int
    packing: str
    mask_documents: bool
    epochs: int
    validation_fraction: float
    invalid_utf8: str
    seed: int
    prefetch: int
    cache_dir: str
    objective: Annotated[str, Choice(OBJECTIVES, 'data', several=True, shares=True)] = 'causal'
    missing_text: Annotated[str, Option('of records without text', choices=('skip', 'stop'))] = (
        'skip'
    )
    mixture: str | None = None  # `lm.config.mixture` reads it; instead of source
    validation_source: str = ''  # the text of the validation split; empty: a part of source


@dataclasses.dataclass(frozen=True, kw_only=True)
class TrainConfig:
    steps: Annotated[int, Option(minimum=1, traced=True)]
    microbatches: Size
    eval_every: Count
    eval_batches: Count
    checkpoint_every: Count
    keep_last: Size
    keep_best: Count
    log_every: Size
    on_divergence: Annotated[str, Option(choices=('rollback', 'skip_step', 'stop'))]
    seed: Annotated[int, Option(minimum=0, maximum=2**32 - 1)]  # JAX takes others modulo 2^32
    diagnose_every: Count = 0
    init_from: str = ''
    trainable: Annotated[str, Option(choices=('all', 'norms', 'lora'))] = 'all'
    eval_objectives: Annotated[str, Choice(OBJECTIVES, 'data', several=True)] = 'causal'
    profile: Annotated[
        str, Option('STEP:COUNT: the steps that are traced; empty: none', is_observer=True)
    ] = ''


Devices = Annotated[int, Option(minimum=-1)]
GIVEN = 'given'


@dataclasses.dataclass(frozen=True, kw_only=True)
class MeshConfig:
    data: Devices
    fsdp: Devices = 1
    expert: Devices = 1
    context: Devices = 1
    tensor: Devices = 1
    run: Devices = -1
    axes: Annotated[str, Option(choices=(GIVEN, AUTO))] = GIVEN


@dataclasses.dataclass(frozen=True, kw_only=True)
class KernelsConfig:
    implementation: Annotated[str, Choice(IMPLEMENTATIONS, auto=True)]
    attention: Annotated[str, Choice(ATTENTION_KERNELS, 'kernels', auto=True)] = AUTO
    linear_attention: Annotated[str, Choice(LINEAR_ATTENTION_KERNELS, auto=True)] = AUTO
    matmul: Annotated[str, Choice(MATMUL_KERNELS, 'kernels', auto=True)] = AUTO
    rms_norm: Annotated[str, Choice(RMS_NORM_KERNELS, auto=True)] = AUTO
    softmax: Annotated[str, Choice(SOFTMAX_KERNELS, auto=True)] = AUTO
    cross_entropy: Annotated[str, Choice(CROSS_ENTROPY_KERNELS, auto=True)] = AUTO
    run_axis: Annotated[str, Option(choices=(AUTO, 'loop', 'vmap'))] = AUTO


if not TYPE_CHECKING:  # type checkers see the classes without the options of parts
    ModelConfig = make_section(ModelConfig, PLACEMENTS, READOUTS)
    NormConfig = make_section(NormConfig, NORMS)
    AttentionConfig = make_section(AttentionConfig, ATTENTIONS, POSITIONS)
    MLPConfig = make_section(MLPConfig, MLPS, ACTIVATIONS)
    ReparamConfig = make_section(ReparamConfig, REPARAMS)
    LossConfig = make_section(LossConfig, LOSSES, AUXILIARIES)
    OptimConfig = make_section(OptimConfig, OPTIMIZERS, SCHEDULES, DECAY_RULES, AVERAGES)
    ScalingConfig = make_section(ScalingConfig, PARAMETRIZATIONS)
    DataConfig = make_section(DataConfig, OBJECTIVES)
    KernelsConfig = make_section(KernelsConfig, MATMUL_KERNELS, ATTENTION_KERNELS)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config:
    model: ModelConfig
    norm: NormConfig
    attention: AttentionConfig
    mlp: MLPConfig
    reparam: ReparamConfig
    loss: LossConfig
    optim: OptimConfig
    scaling: ScalingConfig
    data: DataConfig
    train: TrainConfig
    mesh: MeshConfig
    kernels: KernelsConfig


@dataclasses.dataclass(frozen=True)
class Field:
    """Static facts about a config field.

    Attributes:
      types: the Python types that the field accepts.
      option: bounds and description, if it declares any.
      choice: the table that it names a row of, if it does.
      default: the dataclass default, or MISSING.
      is_part_option: declared by a part instead of this file.
    """

    types: tuple[type, ...]
    option: Option | None
    choice: Choice | None
    default: Any
    is_part_option: bool


def _collect_fields() -> dict[str, Field]:
    """Returns {'section.name': Field} for every field of Config."""
    collected = {}
    for name, cls in typing.get_type_hints(Config).items():
        hints = typing.get_type_hints(cls, include_extras=True)
        # `make_section` derives a class with the options of parts; its base has the other fields.
        declared_here = cls.__mro__[1].__annotations__ if cls.__mro__[1] is not object else hints
        for field in dataclasses.fields(cls):
            hint = hints[field.name]
            metadata = getattr(hint, '__metadata__', ())
            collected[f'{name}.{field.name}'] = Field(
                annotation_types(hint),
                next((m for m in metadata if isinstance(m, Option)), None),
                next((m for m in metadata if isinstance(m, Choice)), None),
                field.default,
                field.name not in declared_here,
            )
    return collected


FIELDS = _collect_fields()
CHOICES = {path: field.choice for path, field in FIELDS.items() if field.choice}


def is_off(path: str, value: Any) -> bool:
    """Returns whether a traced field with this value (None or off) is absent from programs."""
    option = FIELDS[path].option
    return value is None or (option is not None and value == option.off_value)


def is_passive(path: str) -> bool:
    """Returns whether a field only observes a run, so that the training does not depend on it."""
    option = FIELDS[path].option
    return option is not None and option.is_observer


# Traced fields are arguments of a compiled program, so runs that differ only in them share it.
RUN_PATHS = (
    *(path for path, field in FIELDS.items() if field.option and field.option.traced),
    'train.seed',
    'data.seed',
)
