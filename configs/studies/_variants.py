"""The variants of a study, chosen by the name behind the colon in --config=FILE:NAME."""

from collections.abc import Mapping


def choose[Variant](name: str, variants: Mapping[str, Variant]) -> Variant:
    """Returns the variant of a name.

    Raises:
      ValueError: if there is no variant of this name.
    """
    if name not in variants:
        known = ', '.join(map(repr, variants))
        raise ValueError(f'the variant must be one of {known}; got {name!r}')
    return variants[name]
