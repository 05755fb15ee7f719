"""Flags whose value is a path. They bring no JAX, as the process that follows a run has none."""

from absl import flags

from lm.storage.files import expand_home

flags.disclaim_key_flags()  # flags that are defined here belong to the program that asks for them

CSV = flags.CsvListSerializer(',')


def define_path(
    name: str, default: str | None, text: str, *, is_list: bool = False, is_multi: bool = False
) -> flags.FlagHolder:
    """Defines a flag whose value is a path or a URL; a leading ~ stands for a home folder.

    Args:
      name: the flag's name.
      default: its value where it is not given; of a list, with commas.
      text: a line of help.
      is_list: whether its value is a list, with commas.
      is_multi: whether it may be given again.

    Returns:
      The flag's holder.
    """
    if is_multi:
        return flags.DEFINE_multi(PathParser(), None, name, default, text)
    if is_list:
        return flags.DEFINE(PathListParser(), name, default, text, flags.FLAGS, CSV)
    return flags.DEFINE(PathParser(), name, default, text)


class PathParser(flags.ArgumentParser):
    """Reads a path."""

    def parse(self, argument: str) -> str:
        return expand_home(argument)


class PathListParser(flags.ListParser):
    """Reads paths with commas between them."""

    def parse(self, argument: str | list[str]) -> list[str]:
        return [expand_home(path) for path in super().parse(argument)]
