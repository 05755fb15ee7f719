"""Rows of tables of kernels, and the platforms that they run on."""

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any

from modules.choices import choose

PALLAS = ('tpu', 'gpu')  # platforms with kernels written here


@dataclasses.dataclass(frozen=True)
class Kernel:
    """A row of a table of kernels.

    compute: gets the `platform` by name, unless `platforms` is None, for all. is_forward_mode:
    whether it has a derivative in forward mode. is_plain: whether a loss computes the same by
    itself, so that it needs no kernel.
    """

    compute: Callable[..., Any]
    platforms: tuple[str, ...] | None = None
    is_forward_mode: bool = True
    is_plain: bool = False

    def on(self, platform: str) -> Callable[..., Any]:
        """Returns the kernel for devices of one of its platforms."""
        if self.platforms is None:
            return self.compute
        return functools.partial(self.compute, platform=platform)


def refuse_platform(operation: str, table: Mapping[str, Any], name: str, platform: str) -> None:
    """Raises ValueError where the kernel `name` of a table does not run on `platform`."""
    row = choose(table, name, f'kernels.{operation}')
    able = [n for n, one in table.items() if one.platforms is None or platform in one.platforms]
    if name not in able:
        raise ValueError(
            f'kernels.{operation}={name} runs on {", ".join(row.platforms)} alone, and these '
            f'devices are {platform}; choose auto, or {", ".join(able)}'
        )
