"""One lookup for every table of named parts."""

import difflib
from collections.abc import Iterable, Mapping


def nearest(name: str, names: Iterable[str]) -> str:
    """' Did you mean X?' for the closest of `names`, or '' where none is close."""
    close = difflib.get_close_matches(str(name).lower(), list(names), n=1, cutoff=0.5)
    return f' Did you mean {close[0]!r}?' if close else ''


def choose[T](table: Mapping[str, T], name: str, what: str) -> T:
    """`table[name]`; a ValueError that lists the choices and the nearest one otherwise.

    `what` is the config field the name came from, such as 'model.norm'.
    """
    if name not in table:
        raise ValueError(
            f'{what} must be one of {", ".join(sorted(table))}; got {name!r}.{nearest(name, table)}'
        )
    return table[name]


def nearest_divisor(n: int, wanted: int) -> int:
    """The divisor of n that is nearest to `wanted`."""
    return min((d for d in range(1, n + 1) if n % d == 0), key=lambda d: abs(d - wanted))
