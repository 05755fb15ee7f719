"""Reference: each recipe against its formulas in float64 numpy, with the casts of ml_dtypes.
Equivalence: products in the formats themselves; operands that are not rounded. Property: a Hadamard
matrix, keys, layers that stay wide.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from modules.kernels import kernels_for
from modules.kernels.matmul.low_precision import Simulated
from modules.params import split_boxes
from modules.precision.blocks import (
    ROUNDING_ERRORS,
    SCALES,
    Operand,
    check_operand,
    measure_rounding,
    round_operand,
)
from modules.precision.products import mix_rows, record_gradient
from modules.statistics import STATS
from tests.modules.test_kernels import RECIPES
from tests.modules.test_products import SingleMatmul

E4M3, E5M2, E2M1 = ml_dtypes.float8_e4m3fn, ml_dtypes.float8_e5m2, ml_dtypes.float4_e2m1fn
TOKENS, WIDTH, OUT = 48, 160, 144  # no multiples of 128: the last blocks are shorter
RNG = np.random.default_rng(0)
SPREAD = np.exp(RNG.normal(size=(TOKENS, 1)))  # tokens of different sizes, as in a model
X = np.float32(SPREAD * RNG.normal(size=(TOKENS, WIDTH)))
X[3, 5] = 40.0  # an outlier
W = np.float32(RNG.normal(size=(WIDTH, OUT)) / np.sqrt(WIDTH))
G = np.float32(RNG.normal(size=(TOKENS, OUT)) * 1e-4)


def cast(values, dtype):
    largest = float(ml_dtypes.finfo(dtype).max)
    return np.float64(np.float32(np.clip(values, -largest, largest)).astype(dtype))


def integers(values, n_bits):
    largest = 2 ** (n_bits - 1) - 1
    return np.clip(np.round(values), -largest, largest)


def by_blocks(a, rows, columns, round_block):
    """Rounds each block of a matrix; 0: the whole axis."""
    a, (n_rows, n_columns) = np.float64(a), a.shape
    rounded = np.empty_like(a)
    for i in range(0, n_rows, rows or n_rows):
        for j in range(0, n_columns, columns or n_columns):
            block = slice(i, i + (rows or n_rows)), slice(j, j + (columns or n_columns))
            rounded[block] = round_block(a[block])
    return rounded


def to_max(a, dtype):
    inverse = float(ml_dtypes.finfo(dtype).max) / np.abs(a).max()
    return cast(a * inverse, dtype) / inverse


def to_pow2(a):
    inverse = 2.0 ** np.floor(np.log2(448 / np.abs(a).max()))
    return cast(a * inverse, E4M3) / inverse


def to_mx(a):
    scale = 2.0 ** (np.floor(np.log2(np.abs(a).max())) - 8)
    return cast(a / scale, E4M3) * scale


def to_nvfp4(a, tensor):
    tensor_scale = np.abs(tensor).max() / (6 * 448)
    scale = tensor_scale * cast(np.abs(a).max() / (6 * tensor_scale), E4M3)
    return cast(a / scale, E2M1) * scale


def to_integers(a, n_bits):
    scale = np.abs(a).max() / (2 ** (n_bits - 1) - 1)
    return integers(a / scale, n_bits) * scale


def products(x, w, g, w_dx, x_dw, g_dw):
    """(y, dx, dw) of rounded operands: of y x and w, of dx g and w_dx, of dw x_dw and g_dw."""
    return x @ w, g @ w_dx.T, x_dw.T @ g_dw


def tensorwise():
    x, w, g = to_max(X, E4M3), to_max(W, E4M3), to_max(G, E5M2)
    return products(x, w, g, w, x, g)


def rowwise(is_dw_wide=False):
    x, w, g = (
        by_blocks(X, 1, 0, to_pow2),
        by_blocks(W, 0, 1, to_pow2),
        by_blocks(G, 1, 0, to_pow2),
    )
    if is_dw_wide:
        return products(x, w, g, to_pow2(np.float64(W)), np.float64(X), np.float64(G))
    by_columns = (by_blocks(a, 0, 1, to_pow2) for a in (X, G))
    return products(x, w, g, by_blocks(W, 1, 0, to_pow2), *by_columns)


def deepseek():
    block = functools.partial(to_max, dtype=E4M3)
    x, g = by_blocks(X, 1, 128, block), by_blocks(G, 1, 128, block)
    x_dw, g_dw = by_blocks(X, 128, 1, block), by_blocks(G, 128, 1, block)
    w = by_blocks(W, 128, 128, block)
    return products(x, w, g, w, x_dw, g_dw)


def mxfp8():
    x, g, w = by_blocks(X, 1, 32, to_mx), by_blocks(G, 1, 32, to_mx), by_blocks(W, 32, 1, to_mx)
    x_dw, g_dw = by_blocks(X, 32, 1, to_mx), by_blocks(G, 32, 1, to_mx)
    return products(x, w, g, by_blocks(W, 1, 32, to_mx), x_dw, g_dw)


def nvfp4():
    """With gradients that are rounded to nearest."""

    def round_blocks(a, rows, columns):
        return by_blocks(a, rows, columns, functools.partial(to_nvfp4, tensor=a))

    x, w, g = round_blocks(X, 1, 16), round_blocks(W, 16, 16), round_blocks(G, 1, 16)
    x_dw, g_dw = (round_blocks(np.float64(mix_rows(jnp.asarray(a), 16)), 16, 1) for a in (X, G))
    return products(x, w, g, w, x_dw, g_dw)


def int8():
    is_outlier = np.abs(X) >= 6
    scale = np.where(is_outlier, 0, np.abs(np.float64(X))).max(1, keepdims=True) / 127
    x = np.where(is_outlier.any(0), X, integers(X / scale, 8) * scale)
    w = by_blocks(W, 0, 1, functools.partial(to_integers, n_bits=8))
    g = by_blocks(G, 1, 0, functools.partial(to_integers, n_bits=8))
    return products(x, w, g, to_integers(np.float64(W), 8), np.float64(X), np.float64(G))


def int6():
    """With gradients that are rounded to nearest."""
    rounds = functools.partial(to_integers, n_bits=6)
    x, w, g = by_blocks(X, 1, 0, rounds), by_blocks(W, 0, 1, rounds), by_blocks(G, 1, 0, rounds)
    by_columns = (by_blocks(a, 0, 1, rounds) for a in (X, G))
    return products(x, w, g, by_blocks(W, 1, 0, rounds), *by_columns)


def bitnet(size=np.mean):
    scale = size(np.abs(np.float64(W)))
    w = np.clip(np.round(W / scale), -1, 1) * scale
    x = by_blocks(X, 1, 0, functools.partial(to_integers, n_bits=8))
    return products(x, w, np.float64(G), w, x, np.float64(G))


NEAREST = {'g_rounding': 'nearest'}
CASES = {
    'simulated': (tensorwise, {}),
    'fp8_tensorwise': (tensorwise, {}),
    'fp8_rowwise': (rowwise, {}),
    'fp8_rowwise_gw_hp': (functools.partial(rowwise, is_dw_wide=True), {}),
    'deepseek_fp8': (deepseek, {}),
    'mxfp8': (mxfp8, {}),
    'nvfp4': (nvfp4, NEAREST),
    'int8': (int8, {}),
    'int6': (int6, NEAREST),
    'bitnet': (bitnet, {}),
}


def compute(kernel, x=X, w=W, g=G, key=None):
    """(y, dx, dw) of a kernel."""
    y, pull = jax.vjp(jax.jit(lambda x, w: kernel(x, w, key=key)), x, w)
    return y, *pull(g)


def relative_error(actual, expected):
    return np.linalg.norm(np.float64(actual) - expected) / np.linalg.norm(expected)


@pytest.mark.parametrize('name', RECIPES)
def test_recipe_matches_its_formulas(name):
    """Forward and both gradients. A value at a tie may round otherwise than in float64, so that the
    norm of the difference is compared: a hundredth of the error of rounding. Catches blocks along
    the wrong axis, operands that are not rounded again, and scales of another kind.
    """
    reference, options = CASES[name]
    exact = np.float64(X) @ W, np.float64(G) @ W.T, np.float64(X).T @ G
    for actual, expected, wide in zip(
        compute(RECIPES[name](**options)), reference(), exact, strict=True
    ):
        rounding = relative_error(expected, wide)
        assert relative_error(actual, expected) < max(0.01 * rounding, 1e-6)
        assert rounding == 0 or rounding > 0.003  # the recipe has an effect


def test_median_scale():
    y = compute(RECIPES['bitnet'](w_scale='median'))[0]
    assert relative_error(y, bitnet(np.median)[0]) < 1e-5
    assert relative_error(y, bitnet()[0]) > 0.01


def test_wide_operands_are_exact():
    """A control: nothing is rounded, so that products are those of the plain kernel."""
    kernel = Simulated(x_format='wide', w_format='wide', g_format='wide')
    exact = np.float64(X) @ W, np.float64(G) @ W.T, np.float64(X).T @ G
    for actual, expected in zip(compute(kernel), exact, strict=True):
        assert relative_error(actual, expected) < 1e-6


@pytest.mark.parametrize('name', ['fp8_tensorwise', 'fp8_rowwise', 'int8', 'int6'])
def test_real_products_match_simulated(name):
    """Multiplied as float8 and int8, which XLA for CPUs can: the same up to the order of sums."""
    options = {'outlier_size': 0.0, 'g_rounding': 'nearest'}
    simulated = compute(RECIPES[name](**options))
    real = compute(RECIPES[name](**options, real_products=True))
    for actual, expected in zip(real, simulated, strict=True):
        assert relative_error(actual, np.float64(expected)) < 1e-6
    text = jax.jit(RECIPES[name](**options, real_products=True)).lower(X, W).as_text()
    assert ('f8E4M3FN' if 'fp8' in name else 'xi8>') in text.partition('dot_general')[2]


@pytest.mark.parametrize('name', RECIPES)
def test_text_rows_do_not_matter(name):
    """[B, T, I] gives what [B T, I] gives: a mesh that cuts T changes no number."""
    kernel = RECIPES[name](g_rounding='nearest')
    y, dx, dw = compute(kernel)
    by_rows = compute(kernel, X.reshape(3, 16, WIDTH), W, G.reshape(3, 16, OUT))
    for actual, expected in zip(by_rows, (y, dx, dw), strict=True):
        np.testing.assert_allclose(
            actual.reshape(expected.shape), expected, rtol=1e-5, atol=1e-6 * np.abs(expected).max()
        )


@pytest.mark.parametrize('size', [2, 16])
def test_mixed_rows_have_the_same_product(size):
    """Catches a matrix that is not orthogonal, and blocks that are not full."""
    x, g = mix_rows(jnp.asarray(X[:40]), size), mix_rows(jnp.asarray(G[:40]), size)
    np.testing.assert_allclose(x.T @ g, X[:40].T @ G[:40], rtol=1e-3, atol=1e-7)
    assert np.abs(x).max() < 0.8 * np.abs(X).max()  # the outlier is spread


def test_stochastic_gradient_is_unbiased():
    """The mean of many draws is the wide gradient; a single draw is not. Catches a key that both
    operands share, and one that is not used.
    """
    kernel = Simulated(x_format='wide', w_format='wide', g_format='e2m1', g_rounding='stochastic')
    draw = jax.jit(jax.vmap(lambda key: compute(kernel, X[:, :4], W[:4, :8], G[:, :8], key)[1:]))
    many = draw(jax.random.split(jax.random.key(0), 2000))
    exact = np.float64(G[:, :8]) @ W[:4, :8].T, np.float64(X[:, :4]).T @ G[:, :8]
    for draws, expected in zip(many, exact, strict=True):
        errors = np.std(draws, 0) / np.sqrt(len(draws))
        within = np.abs(np.mean(draws, 0, dtype=np.float64) - expected) < 4 * errors + 1e-9
        assert np.all(within) and relative_error(draws[0], expected) > 0.01


ELASTIC = Simulated(x_format='wide', g_format='wide', w_format='int2|int3|int8')


def test_elastic_width_equals_a_plain_format():
    """Each draw has one of the widths, in all of y, dx and dw, and each width is drawn. Outside of
    training it is the widest. Catches another draw in the backward pass.
    """
    plain = [
        compute(dataclasses.replace(ELASTIC, w_format=name), X, W, G)
        for name in ('int2', 'int3', 'int8')
    ]
    draw = jax.jit(lambda key: compute(ELASTIC, X, W, G, key))
    widths = set()
    for seed in range(16):
        parts = draw(jax.random.key(seed))
        matches = [
            all(np.allclose(a, b, rtol=1e-5, atol=1e-5) for a, b in zip(parts, same, strict=True))
            for same in plain
        ]
        assert sum(matches) == 1
        widths.add(matches.index(True))
    assert widths == {0, 1, 2}
    for part, expected in zip(compute(ELASTIC, X, W, G), plain[2], strict=True):
        np.testing.assert_allclose(part, expected, rtol=1e-6)


def test_elastic_width_needs_a_scale():
    with pytest.raises(ValueError, match=r'has no exponent for kernels\.w_scale=e8m0'):
        check_operand(Operand('int2|int4', scale='e8m0'), 'kernels.w')


def test_layers_and_updates_have_different_keys():
    """In training a layer draws a key from its state; in evaluation, values go to the nearest."""
    module, x = SingleMatmul('in', matmul='nvfp4'), jnp.float32(RNG.normal(size=(2, 16, 8)))
    variables = module.init(jax.random.key(0), x)
    params = split_boxes(variables['params'])[0]
    assert jax.tree.structure(params) == jax.tree.structure(
        split_boxes(SingleMatmul('in').init(jax.random.key(0), x)['params'])[0]
    )

    def gradient(stats):
        def loss(params):
            y, changed = module.apply({'params': params, STATS: stats}, x, mutable=[STATS])
            return jnp.sum(y * jnp.sin(jnp.arange(y.size).reshape(y.shape))), changed[STATS]

        grads, stats = jax.grad(loss, has_aux=True)(params)
        return grads['w'], stats

    first, stats = gradient(variables[STATS])
    second, _ = gradient(stats)
    assert np.any(first != second)
    plain = [module.apply({'params': params, STATS: s}, x) for s in (variables[STATS], stats)]
    np.testing.assert_array_equal(*plain)


def test_router_and_readout_stay_wide():
    kernels = kernels_for('cpu', matmul='mxfp8')
    assert kernels.matmul_for('readout') is kernels_for('cpu').matmul
    assert kernels.matmul_for('router') is kernels_for('cpu').matmul
    assert kernels.matmul_for('mlp') == RECIPES['mxfp8']()
    options = {'wide_layers': 'none'}
    kernels = kernels_for('cpu', matmul='mxfp8', matmul_options=options)
    assert kernels.matmul_for('readout') == RECIPES['mxfp8'](**options)


@pytest.mark.parametrize('name', SCALES)
def test_zeros_stay_zero(name):
    """A matrix of zeros has no scale. Catches 0 / 0."""
    format = 'int2' if name in ('mean', 'median') else 'e4m3'
    operand = Operand(format, 'tensor' if format == 'int2' else '16', name)
    codes, scale = round_operand(jnp.zeros((32, 32)), operand, (-1,))
    np.testing.assert_array_equal(codes * scale, np.zeros((32, 32)))


def test_measured_rounding():
    """By hand: 1000 / 448 of four values. Without a scale, e2m1 ends at 6 and begins at 0.5."""
    x = jnp.float32([[1000.0, 500.0, 0.001, 0.0]])
    kernel = RECIPES['fp8_tensorwise']()
    measured = kernel.measure_rounding(x, x.T)
    assert measured['underflow_x'] == measured['underflow_w'] == 0.25
    assert measured['overflow_x'] == 0
    kernel = Simulated(x_format='e2m1', x_scale='none')
    measured = kernel.measure_rounding(jnp.float32([[12.0, 0.2, 0.3, -7.0]]), x.T)
    assert (measured['underflow_x'], measured['overflow_x']) == (0.25, 0.5)
    expected = np.linalg.norm([6, 0.2, 0.2, 1]) / np.linalg.norm([12, 0.2, 0.3, 7])
    np.testing.assert_allclose(measured['rounding_error_x'], expected, rtol=1e-6)


@pytest.mark.parametrize('name', ['fp8_rowwise', 'mxfp8', 'nvfp4', 'int8', 'bitnet'])
def test_traced_formats_match_constant_ones(name):
    """Of products and both gradients. Catches an operand that keeps its constant format."""
    key, kernel = jax.random.key(1), RECIPES[name]()
    x, w, g = (jax.random.normal(jax.random.key(i), (64, 64)) for i in range(3))
    codes = dataclasses.replace(kernel, traced_formats=True).encode_formats()
    replaced = dict.fromkeys(codes, 'int4' if kernel.w_format.startswith('int') else 'e5m2')
    held = dataclasses.replace(kernel, **replaced)  # its formats must not matter

    def outcome(kernel, numbers):
        kernel = dataclasses.replace(kernel, numbers=tuple(numbers.items()))
        y, vjp = jax.vjp(lambda x, w: kernel(x, w, key=key), x, w)
        return y, vjp(g), kernel.measure_rounding(x, w)

    numbers = {option[0]: jnp.float32(code) for option, code in codes.items()}
    traced = jax.jit(lambda numbers: outcome(held, numbers))(numbers)
    expected = jax.jit(lambda: outcome(kernel, {}))()
    jax.tree.map(
        functools.partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-5), traced, expected
    )


def test_recorded_gradient():
    """Reference: the gradient itself, given as a cotangent, which passes unchanged."""
    precision = Simulated(g_format='e2m1', g_scale='none').precision
    g_MO = jnp.float32([[12.0, 0.2, 0.3, -7.0]])
    errors = dict.fromkeys(ROUNDING_ERRORS, jnp.float32(0))
    _, vjp = jax.vjp(functools.partial(record_gradient, precision), g_MO, errors)
    passed_MO, measured = vjp(g_MO)
    np.testing.assert_array_equal(passed_MO, g_MO)
    assert measured == measure_rounding(g_MO, precision.g, (-1,))
    assert (measured['underflow'], measured['overflow']) == (0.25, 0.5)
