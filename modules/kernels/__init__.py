"""Equal ways to compute the same thing: a folder for each operation, a choice for each of them.

Choices agree to rounding (tests/modules/test_kernels.py); they differ in speed, memory, in what can
be differentiated twice and in what they serve. Nothing falls back from one to another. The product
`wta_crs` is no equal of the others, so that no implementation has it: its gradients are estimates.
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
from modules.kernels.platforms import refuse_platform
from modules.kernels.rms_norm import RMS_NORM_KERNELS
from modules.kernels.softmax import SOFTMAX_KERNELS

OPERATIONS = {
    'attention': ATTENTION_KERNELS,
    'linear_attention': LINEAR_ATTENTION_KERNELS,
    'matmul': MATMUL_KERNELS,
    'rms_norm': RMS_NORM_KERNELS,
    'softmax': SOFTMAX_KERNELS,
    'cross_entropy': CROSS_ENTROPY_KERNELS,
}
# Their rows say on which platforms they run.
PLATFORM_BOUND = ('attention', 'rms_norm', 'softmax', 'cross_entropy')

XLA = {
    'attention': 'blocked',
    'linear_attention': 'chunked',
    'matmul': 'direct',
    'rms_norm': 'reference',
    'softmax': 'reference',
    'cross_entropy': 'reference',
}
# A choice for each operation, by the name of its kernel.
IMPLEMENTATIONS = {
    'reference': {
        'attention': 'reference',
        'linear_attention': 'quadratic',
        'matmul': 'direct',
        'rms_norm': 'reference',
        'softmax': 'reference',
        'cross_entropy': 'reference',
    },
    'xla': XLA,
    'xla_cpu': XLA | {'matmul': 'narrow_first'},
    # On GPUs alone, and on TPUs alone.
    'cudnn': XLA | {'attention': 'cudnn'},
    'splash': XLA | {'attention': 'splash'},
    'pallas': XLA | dict.fromkeys(('rms_norm', 'softmax', 'cross_entropy'), 'pallas'),
}


@dataclasses.dataclass(frozen=True)
class Kernels:
    """The chosen kernels of a platform by name, and as functions: `attention` is `attend` without
    its first argument, `linear_attention` a row of `LINEAR_ATTENTION_KERNELS`, `matmul` one of
    `MATMUL_KERNELS`, with `matmul_options`, `rms_norm`, `softmax` and `cross_entropy` of the
    tables of that name. str() gives the names, for a log.
    """

    platform: str
    attention_name: str
    linear_attention_name: str
    matmul_name: str
    rms_norm_name: str
    softmax_name: str
    cross_entropy_name: str
    matmul_options: tuple[tuple[str, Any], ...] = ()

    def name_of(self, operation: str) -> str:
        """The name of the kernel of an operation."""
        return vars(self)[f'{operation}_name']

    @property
    def attention(self) -> Callable[..., jax.Array]:
        kernel = functools.partial(attend, self.attention_name)
        if self.attention_name != 'reference' or self.softmax_name == 'reference':
            return kernel
        return functools.partial(kernel, softmax=self.softmax)

    @property
    def linear_attention(self) -> Callable[..., tuple[jax.Array, Any]]:
        return LINEAR_ATTENTION_KERNELS[self.linear_attention_name]

    @property
    def matmul(self) -> Callable[..., jax.Array]:
        row = MATMUL_KERNELS[self.matmul_name]
        return row(**dict(self.matmul_options)) if isinstance(row, type) else row

    @property
    def rms_norm(self) -> Callable[..., jax.Array]:
        return RMS_NORM_KERNELS[self.rms_norm_name].on(self.platform)

    @property
    def softmax(self) -> Callable[..., jax.Array]:
        return SOFTMAX_KERNELS[self.softmax_name].on(self.platform)

    @property
    def fused_cross_entropy(self) -> Callable[..., dict[str, jax.Array]] | None:
        """None where what the loss itself computes is the chosen one."""
        return (
            None if CROSS_ENTROPY_KERNELS[self.cross_entropy_name].is_plain else self.cross_entropy
        )

    @property
    def cross_entropy(self) -> Callable[..., dict[str, jax.Array]]:
        return CROSS_ENTROPY_KERNELS[self.cross_entropy_name].on(self.platform)

    def __str__(self) -> str:
        names = {name.removesuffix('_name'): value for name, value in vars(self).items()}
        del names['matmul_options'], names['platform']
        return ' '.join(f'{operation}={name}' for operation, name in names.items())


def kernels_for(
    platform: str,
    implementation: str = 'auto',
    *,
    matmul_options: Mapping[str, Any] | None = None,
    **named: str,
) -> Kernels:
    """The one place that reads 'auto': an operation's is what the implementation has, and the
    implementation's is what suits devices of `platform` ('cpu', 'gpu', 'tpu').

    named: kernels of `OPERATIONS` by name; those left out are 'auto'. matmul_options: those of the
    row `matmul`, where it has some.

    ValueError for a name that no table has, and for a kernel that does not run there.
    """
    if implementation == 'auto':
        implementation = 'xla_cpu' if platform == 'cpu' else 'xla'
    names = dict(choose(IMPLEMENTATIONS, implementation, 'kernels.implementation'))
    for operation, name in named.items():
        if name != 'auto':
            choose(OPERATIONS[operation], name, f'kernels.{operation}')
            names[operation] = name
    for operation in PLATFORM_BOUND:
        refuse_platform(operation, OPERATIONS[operation], names[operation], platform)
    chosen = {f'{operation}_name': name for operation, name in names.items()}
    return Kernels(platform, **chosen, matmul_options=tuple((matmul_options or {}).items()))
