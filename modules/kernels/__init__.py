"""Equal ways to compute the same thing: a folder for each operation, a choice for each of them.

Choices agree to rounding (tests/modules/test_kernels.py); they differ in speed, memory, in what can
be differentiated twice and in what they serve. Nothing falls back from one to another.
"""

import dataclasses
import functools
from collections.abc import Callable

import jax

from modules.choices import choose
from modules.kernels.attention import ATTENTION_KERNELS, attend, refuse_platform
from modules.kernels.matmul import MATMUL_KERNELS

# A choice for each operation, by the name of its kernel.
IMPLEMENTATIONS = {
    'reference': {'attention': 'reference', 'matmul': 'direct'},
    'xla': {'attention': 'blocked', 'matmul': 'direct'},
    'xla_cpu': {'attention': 'blocked', 'matmul': 'narrow_first'},
    'cudnn': {'attention': 'cudnn', 'matmul': 'direct'},  # on GPUs alone
    'splash': {'attention': 'splash', 'matmul': 'direct'},  # on TPUs alone
}


@dataclasses.dataclass(frozen=True)
class Kernels:
    """The chosen kernels by name, and as functions: `attention` is `attend` without its first
    argument, `matmul` a row of `MATMUL_KERNELS`. str() gives the names, for a log.
    """

    attention_name: str
    matmul_name: str

    @property
    def attention(self) -> Callable[..., jax.Array]:
        return functools.partial(attend, self.attention_name)

    @property
    def matmul(self) -> Callable[..., jax.Array]:
        return MATMUL_KERNELS[self.matmul_name]

    def __str__(self) -> str:
        return f'attention={self.attention_name} matmul={self.matmul_name}'


def kernels_for(
    platform: str, implementation: str = 'auto', attention: str = 'auto', matmul: str = 'auto'
) -> Kernels:
    """The one place that reads 'auto': an operation's is what the implementation has, and the
    implementation's is what suits devices of `platform` ('cpu', 'gpu', 'tpu').

    ValueError for a name that no table has, and for a kernel that does not run there.
    """
    if implementation == 'auto':
        implementation = 'xla_cpu' if platform == 'cpu' else 'xla'
    names = dict(choose(IMPLEMENTATIONS, implementation, 'kernels.implementation'))
    given = (('attention', attention, ATTENTION_KERNELS), ('matmul', matmul, MATMUL_KERNELS))
    for operation, name, table in given:
        if name != 'auto':
            choose(table, name, f'kernels.{operation}')
            names[operation] = name
    refuse_platform(names['attention'], platform)
    return Kernels(names['attention'], names['matmul'])
