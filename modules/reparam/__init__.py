"""Reparametrisations: maps from the weights that are stored and optimised to the weights used.

They are shaped like an optax transform and applied to the whole tree, so that layers need not know
of them. A new reparametrisation is a function here and a row in `REPARAMS`: it maps specs and
shapes of the parameters, and its options, to a `Reparam`, and is decorated with its facts
(`modules.reparam.base.reparam_row`).
"""

from collections.abc import Mapping, Sequence
from typing import Any

import jax

from modules.reparam.base import Reparam, chain, multiply_weights, none, shared
from modules.reparam.low_rank import lora
from modules.reparam.magnitude import (
    normalize_and_project,
    weight_compander,
    weight_norm,
    weight_standardization,
)
from modules.reparam.spectral import sigma, spectral_cap, spectral_norm

__all__ = ['REPARAMS', 'Reparam', 'chain', 'multiply_weights', 'reparametrise']

REPARAMS: dict[str, Any] = {  # functions with the facts of `reparam_row`
    'none': none,
    'lora': lora,
    'normalize_and_project': normalize_and_project,
    'shared': shared,
    'sigma': sigma,
    'spectral_cap': spectral_cap,
    'spectral_norm': spectral_norm,
    'weight_compander': weight_compander,
    'weight_norm': weight_norm,
    'weight_standardization': weight_standardization,
}


def check_order(names: Sequence[str]) -> None:
    """Raises ValueError if a row that maps stored weights after each update is not the last."""
    for name in names[:-1]:
        if REPARAMS[name].maps_after_update:
            valid_order = '+'.join([*(row for row in names if row != name), name])
            raise ValueError(
                f'model.reparam={"+".join(names)}: {name} changes the stored weights after each '
                f'update, so it must come last. Write {valid_order}.'
            )


def reparametrise(
    names: Sequence[str], specs: Any, shapes: Any, options: Mapping[str, Mapping[str, Any]]
) -> Reparam:
    """Chains the rows `names`: the model reads the output of the first, the input of the last is
    stored.

    Args:
      names: rows of `REPARAMS`.
      specs: a ParamSpec for each parameter.
      shapes: a ShapeDtypeStruct for each parameter.
      options: the options of each row, by its name.

    Returns:
      One `Reparam`.

    Raises:
      ValueError: as `check_order`, and as the rows do.
    """
    check_order(names)

    def make_reparam(name, specs, shapes):
        extra = {'names': tuple(names)} if REPARAMS[name].reads_names else {}
        return REPARAMS[name](specs, shapes, **options.get(name, {}), **extra)

    first, *later_names = names
    reparam = make_reparam(first, specs, shapes)
    for name in later_names:
        stored = jax.eval_shape(lambda params, reparam=reparam: reparam.init(params)[0], shapes)
        reparam = chain(reparam, make_reparam(name, reparam.specs, stored))
    return reparam
