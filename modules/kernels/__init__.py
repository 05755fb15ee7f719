"""Kernels: a folder for each operation, with a table of implementations that agree to rounding.

They differ in speed, memory, platforms, and support for second derivatives. None falls back to
another. `lm.model` builds `Kernels` from the config; layers and losses call them. No implementation
includes `wta_crs`, as its weight gradients are estimates, or a matmul of few bits.
"""

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any

import jax

from modules.choices import choose
from modules.kernels.attention import ATTENTION_KERNELS, attend
from modules.kernels.cross_entropy import CROSS_ENTROPY_KERNELS
from modules.kernels.linear_attention import LINEAR_ATTENTION_KERNELS
from modules.kernels.matmul import MATMUL_KERNELS
from modules.kernels.matmul.low_precision import Simulated
from modules.kernels.recurrence import RECURRENCE_KERNELS
from modules.kernels.rms_norm import RMS_NORM_KERNELS
from modules.kernels.softmax import SOFTMAX_KERNELS

__all__ = [
    'ATTENTION_KERNELS',
    'CROSS_ENTROPY_KERNELS',
    'IMPLEMENTATIONS',
    'LINEAR_ATTENTION_KERNELS',
    'MATMUL_KERNELS',
    'OPERATIONS',
    'PLATFORM_BOUND',
    'RECURRENCE_KERNELS',
    'RMS_NORM_KERNELS',
    'SOFTMAX_KERNELS',
    'Kernels',
    'kernels_for',
]

#: The table of kernels of each operation.
OPERATIONS: dict[str, Mapping[str, Any]] = {
    'attention': ATTENTION_KERNELS,
    'linear_attention': LINEAR_ATTENTION_KERNELS,
    'recurrence': RECURRENCE_KERNELS,
    'matmul': MATMUL_KERNELS,
    'rms_norm': RMS_NORM_KERNELS,
    'softmax': SOFTMAX_KERNELS,
    'cross_entropy': CROSS_ENTROPY_KERNELS,
}
#: Operations with kernels that run on some platforms only; their rows declare `platforms`.
PLATFORM_BOUND = ('attention', 'rms_norm', 'softmax', 'cross_entropy')

XLA = dict.fromkeys(OPERATIONS, 'reference') | {
    'attention': 'blocked',
    'linear_attention': 'chunked',
    'recurrence': 'chunked',
    'matmul': 'direct',
}
# {name: {operation: kernel}}
IMPLEMENTATIONS = {
    'reference': XLA
    | {'attention': 'reference', 'linear_attention': 'quadratic', 'recurrence': 'reference'},
    'xla': XLA,
    'xla_cpu': XLA | {'matmul': 'narrow_first'},
    'xla_tpu': XLA | {'matmul': 'einsum'},
    'cudnn': XLA | {'attention': 'cudnn'},
    'splash': XLA | {'attention': 'splash', 'matmul': 'einsum'},
    'pallas': XLA | dict.fromkeys(('rms_norm', 'softmax', 'cross_entropy'), 'pallas'),
}


@dataclasses.dataclass(frozen=True)
class Kernels:
    """The chosen kernel of each operation, by name and as a function."""

    platform: str  #: of the devices: 'cpu', 'gpu' or 'tpu'
    names: tuple[tuple[str, str], ...]  #: (operation, kernel)
    matmul_options: tuple[tuple[str, Any], ...] = ()  #: (name, value) of the matmul kernel
    attention_options: tuple[tuple[str, Any], ...] = ()  #: (name, value) of the attention kernel
    recurrence_options: tuple[tuple[str, Any], ...] = ()  #: (name, value) of the recurrence kernel

    def kernel_name(self, operation: str) -> str:
        """Returns the name of the kernel that computes an operation.

        Args:
          operation: a key of `OPERATIONS`.
        """
        return dict(self.names)[operation]

    def _row(self, operation: str) -> Any:
        return OPERATIONS[operation][self.kernel_name(operation)]

    @property
    def attention(self) -> Callable[..., jax.Array]:
        """Returns `attend` without its first argument."""
        kernel: Callable[..., jax.Array] = functools.partial(attend, self.kernel_name('attention'))
        if self.attention_options:
            kernel = functools.partial(kernel, options=dict(self.attention_options))
        holds_scores = self._row('attention').holds_scores
        # Fused attention kernels have a softmax inside, and only the reference can take another.
        if not holds_scores or self.kernel_name('softmax') == 'reference':
            return kernel
        return functools.partial(kernel, softmax=self.softmax)

    @property
    def linear_attention(self) -> Callable[..., tuple[jax.Array, Any]]:
        """Returns the kernel in `LINEAR_ATTENTION_KERNELS`."""
        return self._row('linear_attention')

    @property
    def recurrence(self) -> Callable[..., tuple[jax.Array, jax.Array]]:
        """Returns the kernel in `RECURRENCE_KERNELS`, with its options bound."""
        row, options = self._row('recurrence'), dict(self.recurrence_options)
        return functools.partial(row, **options) if options else row

    @property
    def matmul(self) -> Callable[..., jax.Array]:
        """Returns (x [M, I], w [I, O], out_dtype) -> [M, O], with its options bound.

        Its attribute `flat` is False if it also takes other axes.
        """
        row = self._row('matmul')
        return row(**dict(self.matmul_options)) if isinstance(row, type) else row

    def with_formats(self, numbers: Mapping[str, jax.Array]) -> 'Kernels':
        """Returns the kernels with formats of the matmul kernel as scalars of a program.

        Args:
          numbers: `encode_format` of each operand, x, w or g.
        """
        options = (*self.matmul_options, ('numbers', (*numbers.items(),)))
        return dataclasses.replace(self, matmul_options=options)

    def matmul_for(self, layers: str) -> Callable[..., jax.Array]:
        """Returns `matmul`, or the kernel of the platform for layers that `matmul` leaves wide.

        Args:
          layers: 'attention', 'mlp', 'router' or 'readout'.
        """
        kernel = self.matmul
        if isinstance(kernel, Simulated) and layers in kernel.list_wide_layers():
            return kernels_for(self.platform).matmul
        return kernel

    @property
    def rms_norm(self) -> Callable[..., jax.Array]:
        """Returns (x [..., D], scale [D], eps, out_dtype) -> [..., D]."""
        return self._row('rms_norm').for_platform(self.platform)

    @property
    def softmax(self) -> Callable[..., jax.Array]:
        """Returns the softmax over the last axis, for this platform."""
        return self._row('softmax').for_platform(self.platform)

    @property
    def fused_cross_entropy(self) -> Callable[..., dict[str, jax.Array]] | None:
        """Returns the kernel, or None if the loss computes the same in plain operations."""
        row = self._row('cross_entropy')
        return None if row.is_plain else row.for_platform(self.platform)


def kernels_for(
    platform: str,
    implementation: str = 'auto',
    *,
    matmul_options: Mapping[str, Any] | None = None,
    attention_options: Mapping[str, Any] | None = None,
    recurrence_options: Mapping[str, Any] | None = None,
    **kernel_names: str,
) -> Kernels:
    """Chooses a kernel for each operation.

    Args:
      platform: of the devices: 'cpu', 'gpu' or 'tpu'.
      implementation: a name in `IMPLEMENTATIONS`; 'auto' suits the platform.
      matmul_options: options of the matmul kernel, if it has any.
      attention_options: options of the attention kernel, if it has any.
      recurrence_options: options of the recurrence kernel, if it has any.
      **kernel_names: kernels by operation; 'auto', the default, takes the implementation's.

    Returns:
      The `Kernels`.

    Raises:
      ValueError: for a name in no table, and for a kernel that does not run on the platform.
    """
    if implementation == 'auto':
        # XLA for CPUs and for TPUs want another matmul (`modules.kernels.matmul`).
        # `lm.model.kernels` replaces more where a compiled step then moves fewer bytes.
        implementation = {'cpu': 'xla_cpu', 'tpu': 'xla_tpu'}.get(platform, 'xla')
    names = dict(choose(IMPLEMENTATIONS, implementation, 'kernels.implementation'))
    for operation, name in kernel_names.items():
        if name != 'auto':
            choose(OPERATIONS[operation], name, f'kernels.{operation}')
            names[operation] = name
    for operation in PLATFORM_BOUND:
        name, table = names[operation], OPERATIONS[operation]
        supported = [n for n, row in table.items() if platform in (row.platforms or (platform,))]
        if name not in supported:
            raise ValueError(
                f'kernels.{operation}={name} runs only on {", ".join(table[name].platforms)}, but '
                f'these devices are {platform}. Choose auto, or {", ".join(supported)}.'
            )
    option_pairs = (
        tuple((options or {}).items())
        for options in (matmul_options, attention_options, recurrence_options)
    )
    return Kernels(platform, tuple(names.items()), *option_pairs)
