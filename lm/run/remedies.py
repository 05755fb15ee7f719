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
    """value(flat config): what to set the field `path` to; None where the run has it already."""

    path: str
    value: Callable[[Flat], Any]
    source: str


def _longer_warmup(flat: Flat) -> int | None:
    """Twice as long, and at least a tenth of the run; None where that is over half of it."""
    wanted = max(2 * (flat['optim.warmup_steps'] or 0), math.ceil(flat['train.steps'] / 10))
    return wanted if wanted <= flat['train.steps'] / 2 else None


def _set_unless(path: str, value: Any, source: str, has_it: Callable[[Any], bool]) -> Remedy:
    """Sets the field to `value`, unless has_it(the run's own value)."""
    return Remedy(path, lambda flat: None if has_it(flat[path]) else value, source)


def _lower_to(path: str, bound: float, source: str) -> Remedy:
    """Sets the field to `bound`, unless the run has that or a lower one; 0 stands for none."""
    return _set_unless(path, bound, source, lambda now: bool(now) and now <= bound)


def _add_sigma(flat: Flat) -> str | None:
    now = flat['model.reparam'].split('+')
    return None if 'sigma' in now else '+'.join(['sigma', *(n for n in now if n != 'none')])


def _use_peri(flat: Flat) -> str | None:
    return None if flat['model.norm'] == 'none' or flat['model.placement'] == 'peri' else 'peri'


LOWER_LR = Remedy('optim.lr', lambda flat: float(f'{flat["optim.lr"] / 3:.2g}'), 'arXiv:2309.14322')
LONGER_WARMUP = Remedy('optim.warmup_steps', _longer_warmup, 'arXiv:2309.14322')
QK_NORM = _set_unless('model.qk_norm', 'rmsnorm', 'arXiv:2302.05442', lambda now: now != 'none')
SIGMA = Remedy('model.reparam', _add_sigma, 'arXiv:2303.06296')
SOFTCAP = _lower_to('attention.softcap', 50.0, 'arXiv:2408.00118')
Z_LOSS = _set_unless('loss.z_loss', 1e-4, 'arXiv:2204.02311', lambda now: now >= 1e-4)
LOGIT_SOFTCAP = _lower_to('model.logit_softcap', 30.0, 'arXiv:2408.00118')
CLIPPING = _lower_to('optim.clip_norm', 1.0, 'arXiv:1211.5063')
SHORTER_MEMORY = _lower_to('optim.b2', 0.95, 'arXiv:2304.13013')
PERI = Remedy('model.placement', _use_peri, 'arXiv:2502.02732')
NORM = _set_unless('model.norm', 'rmsnorm', 'arXiv:1910.07467', lambda now: now != 'none')
SCALED_LAYERS = _set_unless(
    'model.placement', 'layernorm_scaling', 'arXiv:2502.05795', lambda now: now != 'pre'
)

REMEDIES = {
    'entropy_collapse': (QK_NORM, SIGMA, SOFTCAP, LOWER_LR, LONGER_WARMUP),
    'largest_logit': (QK_NORM, SIGMA, SOFTCAP, LOWER_LR),
    'update_jump': (LOWER_LR, LONGER_WARMUP, SHORTER_MEMORY, CLIPPING),
    'log_z_drift': (Z_LOSS, LOGIT_SOFTCAP, LOWER_LR),
    'dead_layer': (SCALED_LAYERS, LOWER_LR, LONGER_WARMUP),
    'exploding_layer': (NORM, PERI, LOWER_LR, LONGER_WARMUP),
}


def list_remedies(kind: str, recipe: Recipe) -> list[list[str]]:
    """Lines that the config would be accepted with: ['--config.optim.b2=0.95', source], ..."""
    flat, found = flatten(recipe), []
    for path, value_of, source in REMEDIES[kind]:
        # An option that no chosen part reads is None.
        is_read = path in FIELDS and (flat[path] is not None or not FIELDS[path].is_part_option)
        if not is_read or (value := value_of(flat)) is None:
            continue
        with contextlib.suppress(ValueError):
            check(resolve_config(update_config(recipe.config, {path: value})))
            text = f'{value:g}' if isinstance(value, float) else str(value)
            found.append([f'--config.{path}={text}', source])
    return found
