"""Which kernels run where."""

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any

from modules.choices import choose

PALLAS = ('tpu', 'gpu')  # those that have kernels of our own


@dataclasses.dataclass(frozen=True)
class Kernel:
    """compute: the kernel. platforms: those it runs on, of which it is given the `platform`; None:
    all. is_forward_mode: whether it has a derivative in forward mode. is_plain: whether it is the
    operation as it is written elsewhere, and no kernel.
    """

    compute: Callable[..., Any]
    platforms: tuple[str, ...] | None = None
    is_forward_mode: bool = True
    is_plain: bool = False

    def on(self, platform: str) -> Callable[..., Any]:
        """The kernel for devices of a platform, which is one of its own."""
        if self.platforms is None:
            return self.compute
        return functools.partial(self.compute, platform=platform)


def refuse_platform(operation: str, table: Mapping[str, Any], name: str, platform: str) -> None:
    """ValueError where the row `name` of a table of kernels does not run on `platform`."""

    def runs(row):
        return row.platforms is None or platform in row.platforms

    row = choose(table, name, f'kernels.{operation}')
    if not runs(row):
        able = [other for other, one in table.items() if runs(one)]
        raise ValueError(
            f'kernels.{operation}={name} runs on {", ".join(row.platforms)} alone, and these '
            f'devices are {platform}; choose auto, or {", ".join(able)}'
        )
