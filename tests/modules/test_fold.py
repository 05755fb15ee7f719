"""Reference: folded matrices compute the same function, in float64, against the equations in
NumPy.
"""

import jax
import numpy as np
import pytest

from modules.norms import NORMS, fold
from modules.norms.fold import Affine

L, M, D, O = 2, 5, 8, 6  # noqa: E741 - layers, tokens, width, outputs
EPS = 1e-3
EXACT = {'rtol': 1e-12, 'atol': 1e-12}


def draw(*shape, seed=0):
    return np.random.default_rng(seed).normal(0.5, 1, shape)


def standardize(x):
    return (x - x.mean(-1, keepdims=True)) / np.sqrt(x.var(-1, keepdims=True) + EPS)


def rms_normalize(x):
    return x / np.sqrt(np.mean(x**2, -1, keepdims=True) + EPS)


def crms_normalize(x):
    """Normalizes the first D - 1 of D numbers that sum to zero, as the paper's code does."""
    total = np.sum(x, -1, keepdims=True)
    return x / np.sqrt((np.sum(x**2, -1, keepdims=True) + total**2) / (x.shape[-1] + 1) + EPS)


def apply(affine, x):
    """Applies the map itself, layer by layer: x [L, M, D]."""
    x = x - x.mean(-1, keepdims=True) if affine.centred else x
    x = x if affine.scale is None else x * affine.scale[:, None]
    return x if affine.shift is None else x + affine.shift[:, None]


@pytest.mark.parametrize('with_bias', [False, True])
@pytest.mark.parametrize('centred', [False, True])
@pytest.mark.parametrize('scale, shift', [(0, 0), (1, 0), (0, 1), (1, 1)])
def test_reader_absorbs_affine_map(scale, shift, centred, with_bias):
    """Catches a gain on the outputs, a shift through the folded matrix, a mean over outputs."""
    scale_and_shift = draw(L, D, seed=1) if scale else None, draw(L, D, seed=2) if shift else None
    affine = Affine(*scale_and_shift, centred)
    x, kernel, bias = draw(L, M, D), draw(L, D, O, seed=3), draw(L, O, seed=4) * with_bias
    expected = apply(affine, x) @ kernel + bias[:, None]
    folded, folded_bias = fold.fold_into_reader(affine, kernel, bias if with_bias else None)
    assert (folded_bias is not None) == bool(shift or with_bias)
    np.testing.assert_allclose(
        x @ folded + (0 if folded_bias is None else folded_bias[:, None]), expected, **EXACT
    )


def test_reader_without_layer_axis():
    """Like the readout."""
    affine, x, kernel = Affine(draw(D, seed=1), draw(D, seed=2), True), draw(M, D), draw(D, O)
    folded, bias = fold.fold_into_reader(affine, kernel)
    centred = x - x.mean(-1, keepdims=True)
    np.testing.assert_allclose(
        x @ folded + bias, (centred * affine.scale + affine.shift) @ kernel, **EXACT
    )


def stream(write, x):
    """Returns the sum of embeddings and of a matrix with its bias: x [M, I] -> [M, D]."""
    embeddings, kernel, bias = draw(M, D), draw(O, D, seed=5), draw(D, seed=6)
    return write(embeddings) + x @ write(kernel) + write(bias)


def test_recentred_writers_make_layernorm_an_rmsnorm():
    """Catches a mean over inputs, and a missing bias."""
    x = draw(M, O, seed=7)
    plain, recentred = stream(lambda w: w, x), stream(fold.recentre_writer, x)
    np.testing.assert_allclose(recentred.mean(-1), 0, atol=1e-15)
    np.testing.assert_allclose(rms_normalize(recentred), standardize(plain), **EXACT)
    assert np.abs(rms_normalize(plain) - standardize(plain)).max() > 0.1


def test_compressed_stream_equals_rmsnorm():
    """Catches another dropped coordinate, the last one's sign, D instead of D - 1 in the mean."""
    x, kernel = draw(M, O, seed=7), draw(D, O, seed=8)
    full = stream(fold.recentre_writer, x)
    short = stream(lambda w: fold.compress_writer(fold.recentre_writer(w)), x)
    assert short.shape == (M, D - 1)
    np.testing.assert_allclose(
        crms_normalize(short) @ fold.compress_reader(kernel), rms_normalize(full) @ kernel, **EXACT
    )


def evaluate_layer(name, x, **options):
    """Returns (params, stats, y) of a layer in evaluation, with positive drawn variables."""
    norm = NORMS[name](eps=EPS, **options)
    shapes = jax.eval_shape(norm.init, jax.random.key(0), x)
    shapes.pop('bwd_stats', None)
    rng = np.random.default_rng(3)

    def draw_leaf(leaf):
        if np.issubdtype(leaf.dtype, np.integer):
            return np.full(leaf.shape, 100, leaf.dtype)  # enough updates to remove all norms
        return rng.uniform(0.5, 2, leaf.shape)

    variables = jax.tree.map(draw_leaf, {'params': {}, 'stats': {}} | jax.device_get(unbox(shapes)))
    backward = {'bwd_stats': {'window_gz': np.zeros((4, D)), 'running_gz': np.zeros(D)}}
    y = norm.apply(variables | (backward if name == 'unified' else {}), x)
    assert y.dtype == np.float64
    return variables['params'], variables['stats'], np.asarray(y)


def unbox(collections):
    return {
        name: {k: getattr(v, 'value', v) for k, v in tree.items()}
        for name, tree in collections.items()
    }


WITHOUT_AFFINE = {'scale': False, 'bias': False}
NORMS_WITHOUT_AFFINE = [
    name
    for name in fold.CONSTANT_AFFINE
    if set(WITHOUT_AFFINE) <= set(NORMS[name].__dataclass_fields__)
]


@pytest.mark.parametrize(
    'name, options',
    [(n, {}) for n in fold.CONSTANT_AFFINE] + [(n, WITHOUT_AFFINE) for n in NORMS_WITHOUT_AFFINE],
)
def test_constant_norms_match_affine_map(name, options):
    """Catches a missing eps, a variance instead of a deviation, a mean that the shift ignores."""
    with jax.enable_x64(True):
        x = draw(M, D)
        params, stats, y = evaluate_layer(name, x, **options)
    affine = fold.CONSTANT_AFFINE[name](params, stats, EPS)
    assert affine.centred == (name == 'layernorm_removal')
    whole = Affine(*(None if a is None else np.broadcast_to(a, (1, D)) for a in affine[:2]))
    whole = whole._replace(centred=affine.centred)
    np.testing.assert_allclose(y, apply(whole, x[None])[0], **EXACT)


@pytest.mark.parametrize(
    'name, normalize', [('layernorm', standardize), ('rmsnorm', rms_normalize)]
)
def test_learned_affine_maps(name, normalize):
    with jax.enable_x64(True):
        x = draw(M, D)
        params, stats, y = evaluate_layer(name, x)
    affine = fold.LEARNED_AFFINE[name](params, stats, EPS)
    shift = 0 if affine.shift is None else affine.shift
    np.testing.assert_allclose(y, normalize(x) * affine.scale + shift, **EXACT)
