"""What a row of a table says of itself beside its options: facts, and a rule for the rest.

A row that is a class or a record has them as fields with defaults. One that is a function is
marked, and a mark sets each fact that its table knows, so that no reader has to ask whether a row
has it:

    loss = marks(linear_readout=False, check=demands_nothing)

    @loss(linear_readout=True)
    def spherical_z(...): ...

`check(recipe, part)` is the row's own rule: ValueError, before anything is compiled, where the rest
of a config does not go with it. `recipe` is what the config comes to (`lm.recipe`), and `part` the
row with its options, whose `path` names the field that chose it.
"""

from collections.abc import Callable
from typing import Any


def demands_nothing(recipe: Any, part: Any) -> None:
    """The rule of a row that goes with everything."""
    del recipe, part


def longest(blocks: int, **lengths: int) -> int:
    """How long a row takes to get to where it is as published, in steps or updates.

    lengths: its options that are counted so (`modules.options.Option.counted_in`); blocks: how many
    the model has.
    """
    del blocks
    return max(lengths.values())


def marks(**defaults: Any) -> Callable[..., Callable[[Any], Any]]:
    """Makes the decorator of a table's functions, which sets each fact as given or by default.

    The decorator raises TypeError for a fact that the table does not know.
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
