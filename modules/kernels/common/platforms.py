"""Rows of tables of kernels, and the platforms that they run on."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

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
