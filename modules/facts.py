"""Facts that a row of a table declares beside its options, such as its rule for other parts.

A row that is a class or a record has them as fields with defaults. A function gets them from a
decorator, which sets every fact of the table, so that readers need not ask whether a row has one:

    loss = marks(linear_readout=False, check=demands_nothing)

    @loss(linear_readout=True)
    def spherical_z(...): ...

`check(recipe, part)` is the row's own rule: it raises ValueError, before anything is compiled, if
the rest of a config does not go with the row. `recipe` is the resolved config (`lm.config.recipe`),
and `part` the row with its options, whose `path` names the field that chose it.
"""

from collections.abc import Callable
from typing import Any


def accept_any(recipe: Any, part: Any) -> None:
    """Accepts any config: the rule of a row that goes with everything."""


def longest_horizon(blocks: int, **lengths: int) -> int:
    """Returns the steps or updates after which a row behaves as published: its longest length.

    Args:
      blocks: those of the model.
      **lengths: its options with `modules.options.Option.time_unit`.
    """
    return max(lengths.values())


def row_decorator(**defaults: Any) -> Callable[..., Callable[[Any], Any]]:
    """Makes the decorator of a table's functions, which sets each fact to its value or default.

    The decorator raises TypeError for a fact that is not in `defaults`.
    """

    def mark(**facts: Any) -> Callable[[Any], Any]:
        if unknown := sorted(set(facts) - set(defaults)):
            raise TypeError(f'rows of this table declare {sorted(defaults)}; got {unknown}')

        def declared(row: Any) -> Any:
            for name, value in {**defaults, **facts}.items():
                setattr(row, name, value)
            return row

        return declared

    return mark
