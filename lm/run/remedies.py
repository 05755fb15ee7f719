"""Config lines that are known to help against the warnings of `lm.run.warnings`, with sources."""

import contextlib
import math
from collections.abc import Callable
from typing import Any, NamedTuple

from lm.config.fields import FIELDS
from lm.config.recipe import Recipe
from lm.config.resolve import flatten, resolve_config, update_config
from lm.model.check import check

Flat = dict[str, Any]


class Remedy(NamedTuple):
    """A value for the field `path`; value(flat config) is None if the run has it already."""

    path: str
    value: Callable[[Flat], Any]
    source: str


def _longer_warmup(flat: Flat) -> int | None:
    """Returns twice the warmup, at least a tenth of the run; None if that exceeds half of it."""
    steps = max(2 * (flat['optim.warmup_steps'] or 0), math.ceil(flat['train.steps'] / 10))
    return steps if steps <= flat['train.steps'] / 2 else None


def _set_unless(path: str, value: Any, source: str, has_it: Callable[[Any], bool]) -> Remedy:
    """Sets the field to `value`, unless has_it(the run's value)."""
    return Remedy(path, lambda flat: None if has_it(flat[path]) else value, source)


def _lower_to(path: str, bound: float, source: str) -> Remedy:
    """Sets the field to `bound`, unless the run has a value up to that; 0 stands for no bound."""
    return _set_unless(path, bound, source, lambda current: bool(current) and current <= bound)


def _add_sigma(flat: Flat) -> str | None:
    parts = flat['model.reparam'].split('+')
    return (
        None
        if 'sigma' in parts
        else '+'.join(['sigma', *(part for part in parts if part != 'none')])
    )


def _use_peri(flat: Flat) -> str | None:
    return None if flat['model.norm'] == 'none' or flat['model.placement'] == 'peri' else 'peri'


LOWER_LR = Remedy('optim.lr', lambda flat: float(f'{flat["optim.lr"] / 3:.2g}'), 'arXiv:2309.14322')
LONGER_WARMUP = Remedy('optim.warmup_steps', _longer_warmup, 'arXiv:2309.14322')
QK_NORM = _set_unless('model.qk_norm', 'rmsnorm', 'arXiv:2302.05442', lambda norm: norm != 'none')
SIGMA = Remedy('model.reparam', _add_sigma, 'arXiv:2303.06296')
SOFTCAP = _lower_to('attention.softcap', 50.0, 'arXiv:2408.00118')
Z_LOSS = _set_unless('loss.z_loss', 1e-4, 'arXiv:2204.02311', lambda weight: weight >= 1e-4)
LOGIT_SOFTCAP = _lower_to('model.logit_softcap', 30.0, 'arXiv:2408.00118')
CLIPPING = _lower_to('optim.clip_norm', 1.0, 'arXiv:1211.5063')
SHORTER_MEMORY = _lower_to('optim.b2', 0.95, 'arXiv:2304.13013')
PERI = Remedy('model.placement', _use_peri, 'arXiv:2502.02732')
NORM = _set_unless('model.norm', 'rmsnorm', 'arXiv:1910.07467', lambda norm: norm != 'none')
SCALED_LAYERS = _set_unless(
    'model.placement', 'layernorm_scaling', 'arXiv:2502.05795', lambda placement: placement != 'pre'
)
GRADIENT_SCALE = _set_unless(
    'kernels.g_scale', 'max', 'arXiv:2209.05433', lambda scale: scale != 'none'
)
STOCHASTIC = _set_unless(
    'kernels.g_rounding', 'stochastic', 'arXiv:1502.02551', lambda rounding: rounding != 'nearest'
)

REMEDIES = {
    'entropy_collapse': (QK_NORM, SIGMA, SOFTCAP, LOWER_LR, LONGER_WARMUP),
    'largest_logit': (QK_NORM, SIGMA, SOFTCAP, LOWER_LR),
    'update_jump': (LOWER_LR, LONGER_WARMUP, SHORTER_MEMORY, CLIPPING),
    'log_z_drift': (Z_LOSS, LOGIT_SOFTCAP, LOWER_LR),
    'dead_layer': (SCALED_LAYERS, LOWER_LR, LONGER_WARMUP),
    'exploding_layer': (NORM, PERI, LOWER_LR, LONGER_WARMUP),
    'lost_gradient': (GRADIENT_SCALE, STOCHASTIC),
}


def list_remedies(kind: str, recipe: Recipe) -> list[list[str]]:
    """Returns config lines that the config would accept: ['--config.optim.b2=0.95', source], ..."""
    flat, remedies = flatten(recipe), []
    for path, value_of, source in REMEDIES[kind]:
        # An option that no chosen part reads is None.
        is_read = path in FIELDS and (flat[path] is not None or not FIELDS[path].is_part_option)
        if not is_read or (value := value_of(flat)) is None:
            continue
        with contextlib.suppress(ValueError):
            check(resolve_config(update_config(recipe.config, {path: value})))
            text = f'{value:g}' if isinstance(value, float) else str(value)
            remedies.append([f'--config.{path}={text}', source])
    return remedies
