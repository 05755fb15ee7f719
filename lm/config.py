"""The seam between a ConfigDict, which a user edits, and frozen dataclasses, which the code reads.

Defaults live in `configs/default.py` and nowhere else: no field below has one, and after `resolve`
nobody asks for a field that might be missing. A field that is added later may carry a dataclass
default, meaning "what a checkpoint written before this field existed did".
"""

import dataclasses
import hashlib
import json
import typing
from collections.abc import Mapping
from typing import Any

from ml_collections import ConfigDict

from modules.choices import nearest


@dataclasses.dataclass(frozen=True)
class ModelConfig:
    d_model: int
    n_layers: int
    n_heads: int
    n_kv_heads: int
    d_ff: int
    norm: str
    norm_eps: float | None
    placement: str
    attention: str
    qk_norm: str
    activation: str
    position: str
    reparam: str
    tie_embeddings: bool
    logit_softcap: float
    dtype: str
    remat: str
    scan_layers: bool
    mix_fraction: float | None = None
    embedding_norm: str = 'none'
    final_norm: str = 'auto'
    embedding_scale: bool | None = None
    mlp: str = 'auto'
    n_experts: int = 4
    experts_per_token: int = 2
    expert_capacity: float = 1.2
    bias: bool = False
    readout_bias: bool = False


@dataclasses.dataclass(frozen=True)
class NormConfig:
    """Options of norm layers; None: what the layer's own class has, as it was published."""

    scale: bool | None = None
    bias: bool | None = None
    groups: int | None = None
    heads: int | None = None
    rank: int | None = None
    alpha: float | None = None
    alpha_attention: float | None = None
    rescale: bool | None = None
    estimated: bool | None = None
    ghost_batches: int | None = None
    momentum: float | None = None
    window: int | None = None
    warmup: int | None = None
    filter_outliers: bool | None = None
    removal_start: int | None = None
    removal_gap: int | None = None


@dataclasses.dataclass(frozen=True)
class LossConfig:
    name: str
    z_loss: float
    label_smoothing: float
    balance_loss: float = 0.01


@dataclasses.dataclass(frozen=True)
class OptimConfig:
    name: str
    lr: float
    schedule: str
    warmup_steps: int
    decay_fraction: float
    final_lr_fraction: float
    b1: float
    b2: float
    eps: float
    weight_decay: float
    decay_rule: str
    clip_norm: float


@dataclasses.dataclass(frozen=True)
class ScalingConfig:
    name: str
    init_scale: float


@dataclasses.dataclass(frozen=True)
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


@dataclasses.dataclass(frozen=True)
class TrainConfig:
    steps: int
    microbatches: int
    eval_every: int
    eval_batches: int
    checkpoint_every: int
    keep_last: int
    keep_best: int
    log_every: int
    on_divergence: str
    seed: int
    diagnose_every: int = 0
    init_from: str = ''
    trainable: str = 'all'


@dataclasses.dataclass(frozen=True)
class MeshConfig:
    data: int
    run: int = -1


@dataclasses.dataclass(frozen=True)
class KernelsConfig:
    implementation: str
    run_axis: str = 'auto'
    attention: str = 'auto'
    matmul: str = 'auto'


@dataclasses.dataclass(frozen=True)
class Config:
    model: ModelConfig
    loss: LossConfig
    optim: OptimConfig
    scaling: ScalingConfig
    data: DataConfig
    train: TrainConfig
    mesh: MeshConfig
    kernels: KernelsConfig
    norm: NormConfig = NormConfig()


def resolve(raw: Mapping[str, Any]) -> Config:
    """A ConfigDict, or the dict of a config.json, as frozen dataclasses: one run.

    Raises ValueError for a field that is unknown (with the nearest one), missing, or of another
    type, and for a sweep, whose runs `lm.sweep.cells` resolves.
    """
    if not isinstance(raw, Mapping | ConfigDict):
        raise ValueError(f'a config holds sections; got {raw!r}')
    fields = dict(raw.items())
    if fields.pop('sweep', None) is not None:
        raise ValueError('this config describes many runs (config.sweep), and one is wanted here')
    return _build(Config, fields, '')


def _build(cls: type, raw: Mapping[str, Any], prefix: str) -> Any:
    if not isinstance(raw, Mapping | ConfigDict):
        raise ValueError(f'config section {prefix.rstrip(".")} must hold fields; got {raw!r}')
    fields = {field.name: field for field in dataclasses.fields(cls)}
    for name in raw:
        if name not in fields:
            raise ValueError(f'config has no field {prefix}{name}.{nearest(name, fields)}')
    values = {}
    for name, field in fields.items():
        path = prefix + name
        if name not in raw:
            if field.default is not dataclasses.MISSING:
                continue
            raise ValueError(
                f'config lacks {path}; start from configs.default.get_config(), which has it'
            )
        if dataclasses.is_dataclass(field.type):
            values[name] = _build(field.type, raw[name], path + '.')
        else:
            values[name] = _checked(raw[name], field.type, path)
    return cls(**values)


def types_of(declared: Any) -> tuple[type, ...]:
    """(float, NoneType) for a field that may be None, (float,) for one that may not."""
    return typing.get_args(declared) or (declared,)


def _checked(value: Any, wanted: Any, path: str) -> Any:
    types = types_of(wanted)
    if float in types and type(value) is int:
        return float(value)
    if type(value) not in types:
        names = ' or '.join('None' if t is type(None) else t.__name__ for t in types)
        raise ValueError(f'{path} must be {names}; got {value!r} of type {type(value).__name__}')
    return value


def to_dict(config: Config) -> dict[str, Any]:
    """The inverse of `resolve`, as plain dicts."""
    return dataclasses.asdict(config)


def to_json(config: Config) -> str:
    return json.dumps(to_dict(config), indent=2) + '\n'


def digest(config: Config) -> str:
    """Eight hexadecimal digits that name a run by its resolved config."""
    return hashlib.sha256(to_json(config).encode()).hexdigest()[:8]


def flatten(config: Config | Mapping[str, Any], prefix: str = '') -> dict[str, Any]:
    """{'model.d_model': 256, ...}, in declaration order."""
    tree = to_dict(config) if isinstance(config, Config) else config
    flat = {}
    for name, value in tree.items():
        if isinstance(value, Mapping):
            flat |= flatten(value, prefix + name + '.')
        else:
            flat[prefix + name] = value
    return flat


def differences(old: Config, new: Config) -> dict[str, tuple[Any, Any]]:
    """{'optim.lr': (old value, new value)} for every field in which the two differ."""
    a, b = flatten(old), flatten(new)
    return {path: (a[path], b[path]) for path in b if a[path] != b[path]}
