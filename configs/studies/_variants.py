"""The variants of a study, chosen by the name behind the colon in --config=FILE:NAME."""


def choose[Variant](name: str, variants: dict[str, Variant]) -> Variant:
    """Returns the variant of a name.

    Raises:
      ValueError: if there is no variant of this name.
    """
    if name not in variants:
        names = ', '.join(map(repr, variants))
        raise ValueError(f'the variant must be one of {names}; got {name!r}')
    return variants[name]
