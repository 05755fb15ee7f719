"""Which kernels run where."""

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any

from modules.choices import choose

PALLAS = ('tpu', 'gpu')  # platforms that have kernels of our own


@dataclasses.dataclass(frozen=True)
class Kernel:
    """compute: the kernel, or, where platforms have one each, {platform: kernel}. is_forward_mode:
    whether it has a derivative in forward mode.
    """

    compute: Callable[..., Any] | Mapping[str, Callable[..., Any]]
    is_forward_mode: bool = True

    @property
    def platforms(self) -> tuple[str, ...] | None:
        """Those it runs on; None: all."""
        return tuple(self.compute) if isinstance(self.compute, Mapping) else None

    def on(self, platform: str) -> Callable[..., Any]:
        """The kernel for devices of a platform, which is one of its own."""
        return self.compute[platform] if self.platforms else self.compute


def pallas_kernel(compute: Callable[..., Any]) -> Kernel:
    """The kernel compute(*arrays, platform=...) of each platform that has one."""
    on_each = {platform: functools.partial(compute, platform=platform) for platform in PALLAS}
    return Kernel(on_each, is_forward_mode=False)


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
