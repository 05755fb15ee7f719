"""Facts that a row of a table declares beside its options, such as a check of the other parts.

A row that is a class or a record has its facts as fields with defaults. A function gets them from a
decorator, which sets every fact of the table, so that readers need not test whether a row has it:

    loss = row_decorator(linear_readout=False, check=accept_any)

    @loss(linear_readout=True)
    def spherical_z(...): ...

`check(recipe, part)` raises ValueError, before anything is compiled, if the rest of a config does
not fit the row. `recipe` is the resolved config (`lm.config.recipe`). `part` is the row with its
options; `part.path` names the field that chose it.
"""

from collections.abc import Callable
from typing import Any


def accept_any(recipe: Any, part: Any) -> None:
    """Accepts any config: the check of a row that works with everything."""


def longest_horizon(blocks: int, **lengths: int) -> int:
    """Returns the steps or updates after which a row behaves as published: its longest horizon.

    Args:
      blocks: the number of blocks of the model.
      **lengths: the options of the row that have an `Option.time_unit` (`modules.options`).
    """
    return max(lengths.values())


def row_decorator(**defaults: Any) -> Callable[..., Callable[[Any], Any]]:
    """Makes the decorator of a table's functions, which sets each fact to its value or default.

    The decorator raises TypeError for a fact that is not in `defaults`.
    """

    def set_facts(**facts: Any) -> Callable[[Any], Any]:
        if unknown := sorted(set(facts) - set(defaults)):
            raise TypeError(f'rows of this table declare {sorted(defaults)}; got {unknown}')

        def decorate(row: Any) -> Any:
            for name, value in {**defaults, **facts}.items():
                setattr(row, name, value)
            return row

        return decorate

    return set_facts
