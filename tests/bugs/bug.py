from typing import NamedTuple


class Bug(NamedTuple):
    """In `file`, the text `right` becomes `wrong`; `tests` are arguments of pytest."""

    file: str
    right: str
    wrong: str
    tests: str
