"""Contract: the kernels that a config gets, by platform and by name, and imports of kernel files in
one direction. Equivalence: matmul kernels.
"""

import ast
import functools
import graphlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from modules.kernels import IMPLEMENTATIONS, OPERATIONS, PLATFORM_BOUND, kernels_for
from modules.kernels.matmul import MATMUL_KERNELS, narrow_first
from modules.kernels.matmul.low_precision import Simulated
from tests import ROOT
from tests.modules.test_attention_kernels import ROUNDING

RECIPES = {
    name: row
    for name, row in MATMUL_KERNELS.items()
    if isinstance(row, type) and issubclass(row, Simulated)
}
EXACT = sorted(MATMUL_KERNELS.keys() - RECIPES.keys())  # these do not round their operands


def name_kernels(kernels):
    return ' '.join(f'{operation}={name}' for operation, name in kernels.names)


def test_kernels_suit_the_platform():
    """`auto` is resolved once; an explicit name is kept, for all operations or for one."""
    chunked = 'attention=blocked linear_attention=chunked recurrence=chunked'
    plain_kernels = 'rms_norm=reference softmax=reference cross_entropy=reference'
    assert name_kernels(kernels_for('cpu')) == f'{chunked} matmul=narrow_first {plain_kernels}'
    assert name_kernels(kernels_for('cpu')) == name_kernels(kernels_for('tpu', 'xla_cpu'))
    assert name_kernels(kernels_for('gpu')) == f'{chunked} matmul=direct {plain_kernels}'
    assert name_kernels(kernels_for('tpu')) == f'{chunked} matmul=einsum {plain_kernels}'
    assert name_kernels(kernels_for('tpu')) == name_kernels(kernels_for('cpu', 'xla_tpu'))
    slow = 'attention=reference linear_attention=quadratic recurrence=reference matmul=direct'
    slow = f'{slow} {plain_kernels}'
    assert name_kernels(kernels_for('cpu', 'reference')) == slow
    changed = kernels_for('cpu', 'auto', attention='reference')
    chunked = 'linear_attention=chunked recurrence=chunked'
    expected = f'attention=reference {chunked} matmul=narrow_first {plain_kernels}'
    assert name_kernels(changed) == expected
    names = {'recurrence': 'chunked', 'matmul': 'narrow_first'}
    equal = kernels_for('cpu', 'reference', linear_attention='chunked', **names)
    assert equal == changed
    assert changed.matmul is narrow_first


@pytest.mark.parametrize('operation', ['implementation', *OPERATIONS])
def test_unknown_kernels_are_rejected(operation):
    with pytest.raises(ValueError, match=f'kernels.{operation} must be one of .*direkt'):
        kernels_for('cpu', **{operation: 'direkt'})


def test_implementations_cover_all_operations():
    for name, choices in IMPLEMENTATIONS.items():
        assert choices.keys() == OPERATIONS.keys()
        rows = (OPERATIONS[operation][choices[operation]] for operation in PLATFORM_BOUND)
        bound = {platform for row in rows for platform in row.platforms or ()}
        kernels_for(bound.pop() if bound else 'cpu', name, **choices)


@pytest.mark.parametrize(
    'operation, name, platforms',
    [
        ('attention', 'splash', 'tpu'),
        *((op, 'pallas', 'tpu, gpu') for op in PLATFORM_BOUND if op != 'attention'),
    ],
)
def test_unavailable_kernel_is_rejected(operation, name, platforms):
    message = f'kernels.{operation}={name} runs only on {platforms}, but these'
    with pytest.raises(ValueError, match=message):
        kernels_for('cpu', **{operation: name})


def imported_files(path, files):
    """Returns which of `files` (by dotted name) a file imports anywhere, inside functions too."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom):
            for alias in node.names:
                name = f'{node.module}.{alias.name}'
                yield files.get(name, files.get(node.module))
        elif isinstance(node, ast.Import):
            yield from (files.get(alias.name) for alias in node.names)


@pytest.mark.parametrize('package', ['kernels', 'parallel'])
def test_kernel_imports_have_no_cycle(package):
    """`graphlib` names the files of a cycle. Catches a kernel that imports its caller, at the top
    or inside a function.
    """
    paths = (ROOT / 'modules' / package).rglob('*.py')
    files = {
        '.'.join(path.relative_to(ROOT).with_suffix('').parts).removesuffix('.__init__'): path
        for path in paths
    }
    graph = {path: {*imported_files(path, files)} - {None} for path in files.values()}
    assert package != 'kernels' or sum(map(len, graph.values())) > 50  # the scan sees imports
    graphlib.TopologicalSorter(graph).prepare()


@pytest.mark.parametrize('dtype', ROUNDING)
@pytest.mark.parametrize('shape', [(6, 5, 3), (6, 3, 5), (6, 4, 4)])
def test_narrow_first_product(shape, dtype):
    """Forward, gradient and tangent match x @ w, whichever side is narrower."""
    m, i, o = shape
    rng = np.random.default_rng(0)
    x, dx, w, dw, g = (
        jnp.asarray(rng.normal(size=s), dtype) for s in ((m, i), (m, i), (i, o), (i, o), (m, o))
    )

    @functools.partial(jax.jit, static_argnums=0)
    def forward_and_derivatives(fn):
        y, pull = jax.vjp(fn, x, w)
        return y, *pull(g), jax.jvp(fn, (x, w), (dx, dw))[1]

    x64, w64, g64 = (np.asarray(a, np.float64) for a in (x, w, g))
    tangent = np.asarray(dx, np.float64) @ w64 + x64 @ np.asarray(dw, np.float64)
    expected = (x64 @ w64, g64 @ w64.T, x64.T @ g64, tangent)
    for name in EXACT:
        for actual, expected_array in zip(
            forward_and_derivatives(kernels_for('cpu', matmul=name).matmul), expected, strict=True
        ):
            assert actual.dtype == jnp.dtype(dtype)
            atol = 4 * ROUNDING[dtype] * np.abs(expected_array).max()
            np.testing.assert_allclose(
                np.asarray(actual, np.float64), expected_array, rtol=0, atol=atol
            )


def test_narrow_first_under_vmap():
    x, w = (jnp.float32(np.random.default_rng(0).normal(size=s)) for s in ((2, 6, 5), (2, 5, 3)))
    np.testing.assert_allclose(jax.vmap(narrow_first)(x, w), x @ w, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize('name', EXACT)
@pytest.mark.parametrize('o', [3, 300])
def test_out_dtype_is_used_for_sums(name, o):
    """bfloat16 in and float32 out: not the rounded sum. Catches a kernel that ignores out_dtype."""
    x, w = (jnp.bfloat16(np.random.default_rng(0).normal(size=s)) for s in ((6, 64), (64, o)))
    y = kernels_for('cpu', matmul=name).matmul(x, w, jnp.float32)
    assert y.dtype == jnp.float32
    np.testing.assert_allclose(y, np.float64(x) @ np.float64(w), rtol=1e-5, atol=1e-4)
