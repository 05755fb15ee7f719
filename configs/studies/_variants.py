"""The variants of a study, chosen by the name behind the colon in --config=FILE:NAME."""


def check_variant(name: str, names: tuple[str, ...]) -> None:
    """Raises ValueError, which lists the names, for another name."""
    if name not in names:
        listed = ', '.join(map(repr, names))
        raise ValueError(f'the variant must be one of {listed}; got {name!r}')


def choose[Variant](name: str, variants: dict[str, Variant]) -> Variant:
    """Returns the variant of a name.

    Raises:
      ValueError: if there is no variant of this name.
    """
    check_variant(name, tuple(variants))
    return variants[name]
