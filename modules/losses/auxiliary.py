"""Terms of the objective that layers sow (`modules.statistics.AUXILIARY`), weighed by name."""

import sys
from typing import Annotated

import jax

from modules.facts import demands_nothing, marks
from modules.options import Option

auxiliary_row = marks(check=demands_nothing)


@auxiliary_row()
def balance_loss(
    sown: jax.Array,
    *,
    balance_loss: Annotated[
        float, Option('weight of the balance of experts', 0, sys.float_info.max, traced=True)
    ] = 0.01,
) -> jax.Array:
    """balance_loss * sown: how unevenly experts are chosen, summed over layers (`modules.mlp.MoE`;
    arXiv:2101.03961, equation 4).
    """
    return balance_loss * sown
