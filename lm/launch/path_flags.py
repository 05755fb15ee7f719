"""Flags with paths as values. Importing them does not import JAX, which the process beside a run
lacks.
"""

from absl import flags

from lm.storage.files import expand_home

flags.disclaim_key_flags()  # flags that are defined here belong to the program that asks for them

CSV = flags.CsvListSerializer(',')


def define_path(
    name: str, default: str | None, text: str, *, is_list: bool = False, is_multi: bool = False
) -> flags.FlagHolder:
    """Defines a flag with a path or a URL as its value; a leading ~ stands for a home folder.

    Args:
      name: the flag's name.
      default: its default value; for a list, with commas.
      text: a line of help.
      is_list: whether its value is a list, with commas.
      is_multi: whether it may be given several times.

    Returns:
      The flag's holder.
    """
    if is_multi:
        # absl's stubs do not allow a flag without serializer, which its code does.
        return flags.DEFINE_multi(PathParser(), None, name, default, text)  # ty: ignore[no-matching-overload]
    if is_list:
        return flags.DEFINE(PathListParser(), name, default, text, flags.FLAGS, CSV)
    return flags.DEFINE(PathParser(), name, default, text)


class PathParser(flags.ArgumentParser):
    """Parses a path."""

    def parse(self, argument: str) -> str:
        """Returns the path with a leading ~ expanded."""
        return expand_home(argument)


class PathListParser(flags.ListParser):
    """Parses paths with commas between them."""

    def parse(self, argument: str | list[str]) -> list[str]:
        """Returns the paths with a leading ~ expanded."""
        return [expand_home(path) for path in super().parse(argument)]
