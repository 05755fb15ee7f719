"""Flags with paths as values. Importing them does not import JAX, which the process beside a run
lacks.
"""

from collections.abc import Sequence

from absl import flags

from lm.storage.buckets import parse_local_path
from lm.storage.files import expand_home

flags.disclaim_key_flags()  # flags that are defined here belong to the program that asks for them

CSV = flags.CsvListSerializer(',')


def define_path(
    name: str,
    default: str | None,
    text: str,
    *,
    is_list: bool = False,
    is_multi: bool = False,
    is_local: bool = False,
    endings: Sequence[str] = (),
) -> flags.FlagHolder:
    """Defines a flag with a path or a URL as its value; a leading ~ stands for a home folder.

    Args:
      name: the flag's name.
      default: its default value; for a list, with commas.
      text: a line of help.
      is_list: whether its value is a list, with commas.
      is_multi: whether it may be given several times.
      is_local: whether a URL is refused, as for files that a program writes.
      endings: endings that a local path may have; (): any.

    Returns:
      The flag's holder.
    """
    if is_multi:
        # absl's stubs do not allow a flag without serializer, which its code does.
        return flags.DEFINE_multi(PathParser(), None, name, default, text)  # ty: ignore[no-matching-overload]
    if is_list:
        return flags.DEFINE(PathListParser(), name, default, text, flags.FLAGS, CSV)
    parser = LocalPathParser(name, tuple(endings)) if is_local else PathParser()
    return flags.DEFINE(parser, name, default, text)


class PathParser(flags.ArgumentParser):
    """Parses a path."""

    def parse(self, argument: str) -> str:
        """Returns the path with a leading ~ expanded."""
        return expand_home(argument)


class LocalPathParser(PathParser):
    """Parses a path on this machine, or '' for none.

    Args:
      name: of the flag.
      endings: endings that the path may have; (): any.
    """

    def __init__(self, name: str, endings: Sequence[str] = ()) -> None:
        self.name, self.endings = name, endings

    def parse(self, argument: str) -> str:
        """Returns the path with a leading ~ expanded. Raises flags.Error for a refused one."""
        path = super().parse(argument)
        if path:
            try:
                parse_local_path(path, f'--{self.name}', self.endings)
            except ValueError as error:
                raise flags.Error(str(error)) from None  # absl repeats flag and value otherwise
        return path


class PathListParser(flags.ListParser):
    """Parses paths with commas between them."""

    def parse(self, argument: str | list[str]) -> list[str]:
        """Returns the paths with a leading ~ expanded. Raises ValueError if one is empty."""
        paths = super().parse(argument)
        if not paths or not all(paths):
            raise ValueError(
                f'must list at least one path, and no empty one; got {argument!r}. Is a variable '
                'of the shell unset?'
            )
        return [expand_home(path) for path in paths]
