"""Reparametrisations: maps from the weights that are stored and optimised to the weights used.

Shaped like an optax transform and applied to the whole tree, so that layers never know. A new one
is a file here and a row in `REPARAMS`: a function of the specs and the shapes of the parameters,
and of its options, to a `Reparam`, with its facts (`modules.reparam.base.reparam_row`).
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax

from modules.reparam.base import Reparam, chain, multiplied, none, unchanged
from modules.reparam.compander import weight_compander
from modules.reparam.projection import normalize_and_project
from modules.reparam.shared import shared
from modules.reparam.spectral import sigma, spectral_cap, spectral_norm
from modules.reparam.standardization import weight_standardization
from modules.reparam.weight_norm import weight_norm

__all__ = ['REPARAMS', 'Reparam', 'chain', 'multiplied', 'reparametrise']

REPARAMS: dict[str, Callable[..., Reparam]] = {
    'none': none,
    'normalize_and_project': normalize_and_project,
    'shared': shared,
    'sigma': sigma,
    'spectral_cap': spectral_cap,
    'spectral_norm': spectral_norm,
    'weight_compander': weight_compander,
    'weight_norm': weight_norm,
    'weight_standardization': weight_standardization,
}


def reparametrise(
    names: Sequence[str], specs: Any, shapes: Any, options: Mapping[str, Mapping[str, Any]]
) -> Reparam:
    """The rows `names` in a chain: the model reads the first, and the last one is stored.

    options: those of each row, by its name. Raises ValueError where one that has a map after the
    update is not the last, and as the rows do.
    """
    first, *rest = names
    made = REPARAMS[first](specs, shapes, **options.get(first, {}))
    for before, name in zip(names, rest, strict=False):
        if made.after_update is not unchanged:
            last = '+'.join([*(other for other in names if other != before), before])
            raise ValueError(
                f'{"+".join(names)}: {before} maps what is stored after each update, so that it '
                f'must be the last of several; write {last}'
            )
        stored = jax.eval_shape(lambda params, made=made: made.init(params)[0], shapes)
        made = chain(made, REPARAMS[name](made.specs, stored, **options.get(name, {})))
    return made
