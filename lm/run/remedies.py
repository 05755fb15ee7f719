"""What is known to help against each warning of `lm.run.warnings`: config lines, their sources."""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

from lm.config.fields import FIELDS
from lm.config.recipe import Recipe
from lm.config.resolve import changed, flatten, settle
from lm.model.check import check

Flat = dict[str, Any]


class Remedy(NamedTuple):
    """value(flat config) is what to set the field `path` to; None where the run has it already."""

    path: str
    value: Callable[[Flat], Any]
    source: str


def _lower_lr(flat: Flat) -> float:
    return float(f'{flat["optim.lr"] / 3:.2g}')


def _longer_warmup(flat: Flat) -> int | None:
    """Twice as long, a tenth of the run at least; None where that is most of it."""
    wanted = max(2 * (flat['optim.warmup_steps'] or 0), math.ceil(flat['train.steps'] / 10))
    return wanted if wanted <= flat['train.steps'] / 2 else None


def _unless(path: str, value: Any, has_it: Callable[[Any], bool]) -> Callable[[Flat], Any]:
    """`value`, where a run that has another one of the field has not `has_it`."""
    return lambda flat: None if has_it(flat[path]) else value


def _at_most(path: str, bound: float) -> Callable[[Flat], Any]:
    """`bound`, where the run has none, which 0 stands for, or a higher one."""
    return _unless(path, bound, lambda now: bool(now) and now <= bound)


def _sigma(flat: Flat) -> str | None:
    """Beside what the run has."""
    now = flat['model.reparam'].split('+')
    return None if 'sigma' in now else '+'.join(['sigma', *(n for n in now if n != 'none')])


def _peri(flat: Flat) -> str | None:
    """Nothing where there is no norm to be placed."""
    return None if flat['model.norm'] == 'none' or flat['model.placement'] == 'peri' else 'peri'


LOWER_LR = Remedy('optim.lr', _lower_lr, 'arXiv:2309.14322')
LONGER_WARMUP = Remedy('optim.warmup_steps', _longer_warmup, 'arXiv:2309.14322')
QK_NORM = Remedy(
    'model.qk_norm',
    _unless('model.qk_norm', 'rmsnorm', lambda now: now != 'none'),
    'arXiv:2302.05442',
)
SIGMA = Remedy('model.reparam', _sigma, 'arXiv:2303.06296')
SOFTCAP = Remedy('attention.softcap', _at_most('attention.softcap', 50.0), 'arXiv:2408.00118')
Z_LOSS = Remedy(
    'loss.z_loss', _unless('loss.z_loss', 1e-4, lambda now: now >= 1e-4), 'arXiv:2204.02311'
)
LOGIT_SOFTCAP = Remedy(
    'model.logit_softcap', _at_most('model.logit_softcap', 30.0), 'arXiv:2408.00118'
)
CLIPPING = Remedy('optim.clip_norm', _at_most('optim.clip_norm', 1.0), 'arXiv:1211.5063')
SHORTER_MEMORY = Remedy('optim.b2', _at_most('optim.b2', 0.95), 'arXiv:2304.13013')
PERI = Remedy('model.placement', _peri, 'arXiv:2502.02732')
NORM = Remedy(
    'model.norm', _unless('model.norm', 'rmsnorm', lambda now: now != 'none'), 'arXiv:1910.07467'
)
SCALED_LAYERS = Remedy(
    'model.placement',
    _unless('model.placement', 'layernorm_scaling', lambda now: now != 'pre'),
    'arXiv:2502.05795',
)

REMEDIES = {
    'entropy_collapse': (QK_NORM, SIGMA, SOFTCAP, LOWER_LR, LONGER_WARMUP),
    'largest_logit': (QK_NORM, SIGMA, SOFTCAP, LOWER_LR),
    'update_jump': (LOWER_LR, LONGER_WARMUP, SHORTER_MEMORY, CLIPPING),
    'log_z_drift': (Z_LOSS, LOGIT_SOFTCAP, LOWER_LR),
    'dead_layer': (SCALED_LAYERS, LOWER_LR, LONGER_WARMUP),
    'exploding_layer': (NORM, PERI, LOWER_LR, LONGER_WARMUP),
}


def help_with(kind: str, recipe: Recipe) -> list[list[str]]:
    """[['--config.model.qk_norm=rmsnorm', 'arXiv:2302.05442'], ...]: what the run has not, and what
    its config would be accepted with.
    """
    flat, found = flatten(recipe), []
    for path, value_of, source in REMEDIES[kind]:
        value = value_of(flat) if _is_read(flat, path) else None
        if value is not None and _is_accepted(recipe, path, value):
            text = f'{value:g}' if isinstance(value, float) else str(value)
            found.append([f'--config.{path}={text}', source])
    return found


def _is_read(flat: Flat, path: str) -> bool:
    """An option that no chosen part reads is None."""
    return path in FIELDS and (flat[path] is not None or not FIELDS[path].of_parts)


def _is_accepted(recipe: Recipe, path: str, value: Any) -> bool:
    try:
        check(settle(changed(recipe.config, {path: value})))
    except ValueError:
        return False
    return True
