"""The fields of a config, by section: their types, bounds and tables.

Fields that belong to no part are declared here; `configs/default.py` gives them values. A field
that was added later may have a dataclass default, which reproduces the behaviour before the field
existed. The string in an annotation describes the field; without one, its Option does. The options
of parts (`modules.options`) are further fields of their section, None unless they are set.
"""

import dataclasses
import sys
import typing
from typing import TYPE_CHECKING, Annotated, Any

from lm.config.choice import AUTO, Choice
from lm.config.groups import add_group_fields
from modules.activations import ACTIVATIONS
from modules.attention import ATTENTIONS
from modules.kernels import (
    ATTENTION_KERNELS,
    CROSS_ENTROPY_KERNELS,
    IMPLEMENTATIONS,
    LINEAR_ATTENTION_KERNELS,
    MATMUL_KERNELS,
    RECURRENCE_KERNELS,
    RMS_NORM_KERNELS,
    SOFTMAX_KERNELS,
)
from modules.losses import AUXILIARIES, LOSSES
from modules.mlp import MLPS
from modules.norms import NORMS
from modules.numerics import REMAT_POLICIES
from modules.objectives import OBJECTIVES
from modules.optim import AVERAGES, OPTIMIZERS, SCHEDULES
from modules.optim.base import BELOW_1
from modules.optim.storage import NEAREST, STOCHASTIC
from modules.options import Option, annotation_types, make_section
from modules.placements import PLACEMENTS
from modules.positions import POSITIONS
from modules.readouts import READOUTS
from modules.reparam import REPARAMS
from modules.residual import STREAMS
from modules.scaling import DECAY_RULES, INITS, PARAMETRIZATIONS
from modules.scaling.transfer import TRANSFERS

FINITE = sys.float_info.max
NO_RULE = 'none'
# Rules for relative updates scale with the batch as `sqrt` does, and are left out.
STAGE_RULES = (NO_RULE, *(name for name, rule in TRANSFERS.items() if not rule.is_relative))


Size = Annotated[int, Option(minimum=1)]
Count = Annotated[int, Option(minimum=0)]
Norm = Annotated[str, Choice(NORMS, 'norm', inline=True)]


def dropout_option(target: str, default: str) -> Option:
    """Returns the option of a dropout rate.

    Args:
      target: what training drops a share of.
      default: the meaning of the default.
    """
    description = f'share of {target} dropped in training; {default}'
    return Option(description, 0, 0.99, off_value=0.0, traced=True)


@dataclasses.dataclass(frozen=True, kw_only=True)
class ModelConfig:
    d_model: Annotated[Size, 'width of the residual stream']
    n_layers: Annotated[Size, 'number of blocks']
    n_heads: Annotated[Size, 'number of attention heads']
    d_ff: Annotated[Size, 'hidden width of an MLP']
    norm: Annotated[Norm, 'norm in the blocks']
    placement: Annotated[str, Choice(PLACEMENTS, 'model'), 'positions of the norms in a block']
    attention: Annotated[str, Choice(ATTENTIONS, 'attention'), 'attention layer']
    qk_norm: Annotated[Norm, 'norm of queries and keys']
    activation: Annotated[
        str, Choice(ACTIVATIONS, 'mlp'), 'activation of the MLPs; a gated one adds a third matrix'
    ]
    position: Annotated[str, Choice(POSITIONS, 'attention'), 'position encoding']
    reparam: Annotated[
        str,
        Choice(REPARAMS, 'reparam', several=True, auto=True),
        'map from stored to used weights; in a list, the last is applied first',
    ]
    tie_embeddings: Annotated[bool, 'whether the readout shares the weights of the embedding']
    logit_softcap: Annotated[
        float,
        Option(minimum=0, maximum=FINITE),
        'c in c tanh(z / c) for output logits z; 0: no softcap',
    ]
    dtype: Annotated[
        str,
        Option(choices=(AUTO, 'bfloat16', 'float32')),
        'type of matmuls; auto: bfloat16 on TPUs and GPUs, float32 on CPUs',
    ]
    remat: Annotated[
        str,
        Choice(REMAT_POLICIES),
        'activations that the backward pass computes again, to save memory',
    ]
    scan_layers: Annotated[bool, 'compile one block and scan over depth; for deep models']
    n_kv_heads: Annotated[
        int | None, Option(minimum=1), 'heads of keys and values; None: model.n_heads'
    ] = None
    head_dim: Annotated[
        int | None, Option(minimum=1), 'width of a head; None: d_model / n_heads'
    ] = None
    embedding_norm: Annotated[Norm, 'norm of the embeddings'] = 'none'
    final_norm: Annotated[
        str,
        Choice(NORMS, 'norm', inline=True, auto=True),
        'norm before the readout; auto: model.norm if the placement has one',
    ] = AUTO
    embedding_scale: Annotated[
        bool | None, 'multiply embeddings by a learned scalar; None: if model.norm does'
    ] = None
    mlp: Annotated[
        str,
        Choice(MLPS, 'mlp', auto=True, sows=True),
        'MLP of a block; auto: chosen by the placement',
    ] = AUTO
    pattern: Annotated[
        str | None, 'kinds of blocks, repeated over depth: linear*3+softmax; None: one kind'
    ] = None
    bias: Annotated[bool, 'add biases to the matrices in the blocks'] = False
    qkv_bias: Annotated[bool, 'add biases to queries, keys and values only'] = False
    mlp_bias: Annotated[bool, 'add biases to the matrices of MLPs only'] = False
    readout: Annotated[
        str, Choice(READOUTS, 'model'), 'map from the residual stream to the logits'
    ] = 'learned'
    stream: Annotated[
        str, Choice(STREAMS, 'model'), 'residual stream: what sublayers read and add to'
    ] = 'plain'
    readout_bias: Annotated[bool, 'add a bias to the readout'] = False
    dropout: Annotated[float, dropout_option('the outputs of attention and MLPs', '0: none')] = 0.0
    attention_dropout: Annotated[
        float | None, dropout_option('attention probabilities', 'None: model.dropout')
    ] = None
    embedding_dropout: Annotated[
        float | None, dropout_option('the embeddings, after positions', 'None: model.dropout')
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
    name: Annotated[str, Choice(LOSSES, 'loss'), 'loss to train on']
    chunk: Annotated[
        int | None, Option('tokens whose logits are computed at once; 0: all; None: automatic', 0)
    ] = None
    token_weights: Annotated[
        str | None,
        "weights of the next tokens, by equal stages of the run: '1 0.5:0, 1'; None: '1'",
    ] = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class OptimConfig:
    name: Annotated[str, Choice(OPTIMIZERS, 'optim'), 'optimizer of hidden matrices']
    lr: Annotated[float, Option(minimum=0, maximum=FINITE, traced=True), 'peak learning rate']
    others: Annotated[
        str, Choice(OPTIMIZERS, 'optim'), 'optimizer of embeddings, readout and vectors'
    ] = 'adamw'
    embedding_gradient_shrink: Annotated[
        float | None,
        Option('factor of the gradient of the word embedding; None: 1', 0, 1, traced=True),
    ] = None
    update_clip: Annotated[
        float | None,
        Option(
            'largest root mean square of the update of a parameter; None: no limit',
            1e-6,
            FINITE,
            traced=True,
        ),
    ] = None
    update_clip_sigmas: Annotated[
        float | None,
        Option(
            'largest norm of updates, in deviations above the mean of recent ones; None: any',
            0,
            FINITE,
            traced=True,
        ),
    ] = None
    ghost_radius: Annotated[
        float | None,
        Option(
            'largest spread of the change of logits in a step, divided by pi; None: no limit',
            1e-6,
            FINITE,
            traced=True,
        ),
    ] = None
    match_rms: Annotated[
        float | None,
        Option(
            'root mean square of the updates of hidden matrices; None: not rescaled',
            1e-6,
            FINITE,
            traced=True,
        ),
    ] = None
    schedule: Annotated[str, Choice(SCHEDULES, 'optim'), 'learning-rate schedule']
    weight_decay: Annotated[
        float, Option(minimum=0, maximum=FINITE, traced=True), 'strength of weight decay'
    ]
    decay_rule: Annotated[
        str,
        Choice(DECAY_RULES, 'optim'),
        'how weight decay scales with learning rate, schedule and width',
    ]
    clip_norm: Annotated[
        float,
        Option(minimum=0, traced=True),
        'largest global norm of the gradient; inf: no clipping',
    ]
    average: Annotated[
        str, Choice(AVERAGES, 'optim'), 'average of the weights that evaluation uses'
    ] = 'none'
    momentum_dtype: Annotated[
        str,
        Option('type in which momentum is stored', choices=('float32', 'bfloat16')),
    ] = 'float32'
    second_moment_dtype: Annotated[
        str,
        Option('type in which second moments are stored', choices=('float32', 'bfloat16')),
    ] = 'float32'
    weight_dtype: Annotated[
        str,
        Option('type in which weights are stored', choices=('float32', 'bfloat16')),
    ] = 'float32'
    weight_rounding: Annotated[
        str,
        Option('rounding of new weights to optim.weight_dtype', choices=(STOCHASTIC, NEAREST)),
    ] = STOCHASTIC
    match_norm: Annotated[
        float | None,
        Option(
            'norm of an update, as a multiple of the norm of its matrix; None: not rescaled',
            1e-6,
            FINITE,
            traced=True,
        ),
    ] = None
    match_norm_floor: Annotated[
        float | None,
        Option(
            'smallest norm of an update, as a multiple of the norm of its matrix; None: any',
            1e-6,
            FINITE,
            traced=True,
        ),
    ] = None
    match_norm_roles: Annotated[
        str,
        Option(
            'matrices that optim.match_norm and its floor apply to',
            choices=('hidden', 'hidden+readout'),
        ),
    ] = 'hidden'
    momentum_start: Annotated[
        float | None,
        Option(
            'momentum before its warm-up to optim.momentum; None: constant momentum',
            0,
            BELOW_1,
            traced=True,
        ),
    ] = None
    momentum_warmup_steps: Annotated[
        int | None,
        Option(
            'steps from optim.momentum_start to optim.momentum', 1, time_unit='steps', traced=True
        ),
    ] = None
    weight_decay_end: Annotated[
        float | None,
        Option(
            'share of weight decay at the last step, reached linearly; None: constant strength',
            0,
            FINITE,
            traced=True,
        ),
    ] = None
    cautious_decay: Annotated[
        bool, 'decay only weights that have the sign of the direction of their update'
    ] = False
    cautious_updates: Annotated[
        bool, 'apply only entries of a direction that have the sign of the gradient'
    ] = False


@dataclasses.dataclass(frozen=True, kw_only=True)
class ScalingConfig:
    name: Annotated[
        str,
        Choice(PARAMETRIZATIONS, 'scaling'),
        'how initial weights and learning rates scale with model size',
    ]
    init_scale: Annotated[
        float,
        Option(minimum=0, maximum=FINITE, traced=True),
        'factor of the standard deviation of initial weights',
    ]
    base_width: Annotated[
        int | None, Option('width of the base model that the parametrisation scales from', 1)
    ] = None
    base_depth: Annotated[int | None, Option('number of blocks of the base model', 1)] = None
    base_heads: Annotated[
        int | None, Option('heads of the base model; None: heads as wide as here', 1)
    ] = None
    init: Annotated[str, Choice(INITS), 'distribution of initial weights'] = 'fan_in'
    embedding_std: Annotated[
        float | None,
        Option(
            'standard deviation of initial embeddings; None: as scaling.init',
            0,
            FINITE,
            traced=True,
        ),
    ] = None
    zero_init: Annotated[
        str,
        Option(
            'matrices that start at 0, in addition to those of the parametrisation',
            choices=('none', 'query', 'readout', 'both'),
        ),
    ] = 'none'


@dataclasses.dataclass(frozen=True, kw_only=True)
class DataConfig:
    source: Annotated[
        str, 'text to train on: python, docstrings, text:, chat:, hub:, tfds: or synthetic:'
    ]
    tokenizer: Annotated[str, 'bpe:SIZE (trained on the text), byte, hf:PATH or ids:SIZE,BOS,EOS']
    text_field: Annotated[str, 'field of a record that has its text']
    seq_len: Annotated[int, 'tokens per row']
    batch_size: Annotated[int, 'rows per step, over all devices and hosts']
    packing: Annotated[str, 'how documents fill rows: concat or best_fit']
    mask_documents: Annotated[bool, 'whether attention stays within a document']
    epochs: Annotated[int, 'maximum number of passes over a source']
    validation_fraction: Annotated[float, 'share of the documents held out for validation']
    invalid_utf8: Annotated[str, 'bytes that are not UTF-8: replace and count them, or stop']
    seed: Annotated[int, 'seed of the order of rows']
    prefetch: Annotated[int, 'batches prepared in advance']
    cache_dir: Annotated[
        str, 'folder of prepared data; empty: $XDG_CACHE_HOME/evenkeel or ~/.cache/evenkeel'
    ]
    objective: Annotated[
        str,
        Choice(OBJECTIVES, 'data', several=True, shares=True),
        'what the model learns to predict; several are mixed by shares',
    ] = 'causal'
    missing_text: Annotated[
        str, Option('records without text: skip and count them, or stop', choices=('skip', 'stop'))
    ] = 'skip'
    mixture: Annotated[str | None, 'several sources with weights, in place of data.source'] = None
    validation_source: Annotated[str, 'separate validation text; empty: a share of data.source'] = (
        ''
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class TrainConfig:
    steps: Annotated[int, Option(minimum=1, traced=True), 'number of steps']
    microbatches: Annotated[Size, 'parts of a batch that are computed one after another']
    eval_every: Annotated[Count, 'steps between evaluations; 0: only at the end']
    eval_batches: Annotated[Count, 'validation batches per evaluation; 0: the whole split']
    checkpoint_every: Annotated[Count, 'steps between checkpoints; 0: only at the end']
    keep_last: Annotated[Size, 'how many of the latest checkpoints to keep']
    keep_best: Annotated[Count, 'how many of the best checkpoints to keep']
    log_every: Annotated[Size, 'steps between rows of metrics']
    on_divergence: Annotated[
        str,
        Option(choices=('rollback', 'skip_step', 'stop')),
        'what to do if the loss or gradient diverges',
    ]
    seed: Annotated[
        int, Option(minimum=0, maximum=2**32 - 1), 'seed of the initial parameters'
    ]  # JAX takes others modulo 2^32
    on_spike: Annotated[
        str,
        Option(choices=('record', 'skip', 'stop')),
        'what to do if a finite loss or gradient norm is a spike',
    ] = 'record'
    spike_sigmas: Annotated[
        float,
        Option(minimum=0, maximum=FINITE),
        'standard deviations above the mean of recent steps that make a spike',
    ] = 6.0
    spike_window: Annotated[
        int, Option(minimum=2, maximum=10_000), 'recent steps that a step is compared with'
    ] = 128
    spike_from: Annotated[
        int, Option(minimum=2, maximum=10_000), 'recent steps from which on there are spikes'
    ] = 64
    diagnose_every: Annotated[Count, 'steps between diagnostics of layers; 0: none'] = 0
    init_from: Annotated[
        str, 'workdir or checkpoint with the initial weights; empty: random weights'
    ] = ''
    trainable: Annotated[str, Option(choices=('all', 'norms', 'lora')), 'parameters to train'] = (
        'all'
    )
    eval_objectives: Annotated[
        str,
        Choice(OBJECTIVES, 'data', several=True),
        'objectives to evaluate on the validation split',
    ] = 'causal'
    profile: Annotated[
        str, Option('steps to trace, as STEP:COUNT; empty: none', is_observer=True)
    ] = ''
    checkpoint_steps: Annotated[
        str,
        Option(
            'steps whose checkpoints stay: 100,200, log, before_decay, every:N', is_observer=True
        ),
    ] = ''
    branch_from: Annotated[
        str, 'RUN@STEP or RUN whose state, config and place in the text the run continues'
    ] = ''

    stages: Annotated[
        str | None, "parts of the run: '0.3: batch_size=8; 1: lr_factor=0.5'; None: one"
    ] = None
    seconds: Annotated[
        float | None,
        Option(minimum=1e-37, maximum=FINITE),
        'seconds of steps; sets train.steps from the time of a step here; None: train.steps',
    ] = None
    stage_rule: Annotated[
        str,
        Option('rule for the settings of stages with other batches', choices=STAGE_RULES),
    ] = NO_RULE


@dataclasses.dataclass(frozen=True, kw_only=True)
class EvalConfig:
    """Evaluations during training, besides the validation split."""

    texts: Annotated[
        str | None, "further held-out texts by name: {'wiki': 'text:wiki.txt'}; None: none"
    ] = None
    texts_every: Annotated[
        int | None,
        Option(minimum=0),
        'steps between evaluations of eval.texts; 0: only at the end; None: train.eval_every',
    ] = None
    texts_tokens: Annotated[Count, 'tokens of each text that are evaluated, about; 0: all'] = (
        131_072
    )
    suites: Annotated[
        str | None, "suites of eval: 'NAME[:VALUE],...' or a dict of names; None: none"
    ] = None
    suites_every: Annotated[
        int | None,
        Option(minimum=0),
        'steps between evaluations of eval.suites; 0: only at the ends; None: train.eval_every',
    ] = None
    suite_options: Annotated[
        str | None, 'options of the suites, as NAME.OPTION=VALUE, with commas between'
    ] = None


Devices = Annotated[int, Option(minimum=-1)]
GIVEN = 'given'


@dataclasses.dataclass(frozen=True, kw_only=True)
class MeshConfig:
    data: Annotated[Devices, 'devices that share the rows of a batch; -1: all remaining devices']
    fsdp: Annotated[Devices, 'devices that share rows, and parameters along model.d_model'] = 1
    expert: Annotated[Devices, 'devices that share rows, and the experts of model.mlp=moe'] = 1
    context: Annotated[Devices, 'devices that share the tokens of a row'] = 1
    tensor: Annotated[
        Devices, 'devices that share heads, hidden features of MLPs and the vocabulary'
    ] = 1
    run: Annotated[
        Devices, 'devices that train different runs of a sweep; -1: as many as possible'
    ] = -1
    axes: Annotated[
        str,
        Option(choices=(GIVEN, AUTO)),
        'given: sizes as configured; auto: choose sizes for the axes of size 1',
    ] = GIVEN


@dataclasses.dataclass(frozen=True, kw_only=True)
class KernelsConfig:
    implementation: Annotated[
        str,
        Choice(IMPLEMENTATIONS, auto=True),
        'kernels of all operations; auto: chosen for the platform',
    ]
    attention: Annotated[
        str,
        Choice(ATTENTION_KERNELS, 'kernels', auto=True),
        'attention kernel; auto: splash on TPUs, cudnn on GPUs, if they support the model',
    ] = AUTO
    linear_attention: Annotated[
        str, Choice(LINEAR_ATTENTION_KERNELS, auto=True), 'kernel of linear attention'
    ] = AUTO
    recurrence: Annotated[
        str,
        Choice(RECURRENCE_KERNELS, 'kernels', auto=True),
        'kernel of the attention layers that are linear recurrences',
    ] = AUTO
    matmul: Annotated[
        str, Choice(MATMUL_KERNELS, 'kernels', auto=True), 'kernel of matmuls with weights'
    ] = AUTO
    rms_norm: Annotated[
        str,
        Choice(RMS_NORM_KERNELS, auto=True),
        'kernel of norms that divide by the root mean square',
    ] = AUTO
    softmax: Annotated[
        str,
        Choice(SOFTMAX_KERNELS, auto=True),
        'kernel of softmax in reference attention and routers',
    ] = AUTO
    cross_entropy: Annotated[
        str, Choice(CROSS_ENTROPY_KERNELS, auto=True), 'kernel of the cross-entropy loss'
    ] = AUTO
    run_axis: Annotated[
        str,
        Option(choices=(AUTO, 'loop', 'vmap')),
        'runs of a sweep on one device; auto: loop on CPUs, vmap elsewhere',
    ] = AUTO


if not TYPE_CHECKING:  # type checkers see the classes without the options of parts
    ModelConfig = make_section(ModelConfig, PLACEMENTS, READOUTS, STREAMS)
    NormConfig = make_section(NormConfig, NORMS)
    AttentionConfig = make_section(AttentionConfig, ATTENTIONS, POSITIONS)
    MLPConfig = make_section(MLPConfig, MLPS, ACTIVATIONS)
    ReparamConfig = make_section(ReparamConfig, REPARAMS)
    LossConfig = make_section(LossConfig, LOSSES, AUXILIARIES)
    OptimConfig = add_group_fields(OptimConfig)
    OptimConfig = make_section(OptimConfig, OPTIMIZERS, SCHEDULES, DECAY_RULES, AVERAGES)
    ScalingConfig = make_section(ScalingConfig, PARAMETRIZATIONS)
    DataConfig = make_section(DataConfig, OBJECTIVES)
    KernelsConfig = make_section(
        KernelsConfig, MATMUL_KERNELS, ATTENTION_KERNELS, RECURRENCE_KERNELS
    )


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
    eval: EvalConfig
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
      description: one line.
      is_part_option: declared by a part instead of this file.
    """

    types: tuple[type, ...]
    option: Option | None
    choice: Choice | None
    default: Any
    description: str
    is_part_option: bool


def _collect_fields() -> dict[str, Field]:
    """Returns {'section.name': Field} for every field of Config."""
    collected = {}
    for name, cls in typing.get_type_hints(Config).items():
        hints = typing.get_type_hints(cls, include_extras=True)
        # `make_section` derives a class with the options of parts; its bases have the other fields.
        bases = [base for base in cls.__mro__[1:] if base is not object]
        declared_here = set().union(*(base.__annotations__ for base in bases)) if bases else hints
        for field in dataclasses.fields(cls):
            hint = hints[field.name]
            metadata = getattr(hint, '__metadata__', ())
            option = next((m for m in metadata if isinstance(m, Option)), None)
            description = option.description if option else ''
            collected[f'{name}.{field.name}'] = Field(
                annotation_types(hint),
                option,
                next((m for m in metadata if isinstance(m, Choice)), None),
                field.default,
                next((m for m in metadata if isinstance(m, str)), description),
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
