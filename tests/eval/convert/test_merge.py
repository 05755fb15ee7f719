"""Reference: means, variances and bases of small matrices. Contract: models that cannot be merged.

Property: copies of a model merge to it bitwise, and as many directions as models lose nothing.
"""

import dataclasses
import functools

import numpy as np
import pytest
from flax.traverse_util import unflatten_dict

from eval.convert import __main__ as convert
from eval.convert import merge, safetensors
from eval.convert.fold import write_workdir
from eval.convert.means import (
    EPS,
    compute_bases,
    compute_basis,
    compute_mean,
    merge_params,
    rebuild_params,
    relative_error,
    rescale_variance,
)
from eval.load import load
from lm.data.tokenizers import ByteTokenizer
from modules.params import ParamSpec, named_leaves
from tests.eval.convert.test_commands import checkpoint
from tests.helpers import tiny_config

MATRIX = ParamSpec('hidden', ('embed', 'mlp'), ('embed',))
LAYERS = ParamSpec('hidden', ('layer', 'embed', 'mlp'), ('embed',))
GAIN = ParamSpec('vector', ('layer', 'embed'))


def test_variance_matches_parts():
    """Reference, by hand: both parts have variance 5, their mean has variance 4 about 4. Catches a
    variance of the standard deviation, about 0, or over one axis only.
    """
    parts = [np.array([[1.0, 3.0], [5.0, 7.0]]), np.array([[3.0, 1.0], [7.0, 5.0]])]
    merged = compute_mean(parts)
    np.testing.assert_array_equal(merged, [[2, 2], [6, 6]])
    away = 2 * np.sqrt((5 + 5 * EPS) / (4 + 5 * EPS))
    expected = [[4 - away, 4 - away], [4 + away, 4 + away]]
    np.testing.assert_allclose(rescale_variance(merged, parts, 0), expected, rtol=1e-14)


def test_merge_scales_with_weights():
    """Catches eps that is not relative: weights of a wide model have small variances."""
    rng = np.random.default_rng(0)
    parts = [rng.normal(size=(8, 8)) for _ in range(4)]
    once = rescale_variance(compute_mean(parts), parts, 0)
    small = [1e-4 * part for part in parts]
    np.testing.assert_allclose(
        rescale_variance(compute_mean(small), small, 0), 1e-4 * once, rtol=1e-10
    )


def test_independent_parts_regain_variance():
    """Catches layers that share a variance: the second has 100 times the variance of the first."""
    rng, sizes = np.random.default_rng(0), np.array([1.0, 10.0])[:, None, None]
    models = [{'up': (sizes * rng.normal(size=(2, 64, 64))).astype(np.float32)} for _ in range(8)]
    plain = merge_params({'up': LAYERS}, models, None)['up']
    rescaled = merge_params({'up': LAYERS}, models, 'variance')['up']
    np.testing.assert_allclose(np.var(plain, (1, 2)), np.array([1, 100]) / 8, rtol=0.1)
    expected = np.mean([np.var(model['up'], (1, 2)) for model in models], 0)
    np.testing.assert_allclose(np.var(rescaled, (1, 2)), expected, rtol=1e-2)


def test_vectors_are_plain_means():
    """Catches gains that are rescaled about their mean; nothing is known about their variance."""
    rng = np.random.default_rng(0)
    models = [{'scale': rng.normal(1, 0.1, (2, 16)).astype(np.float32)} for _ in range(3)]
    scale = merge_params({'scale': GAIN}, models, 'variance')['scale']
    np.testing.assert_allclose(scale, np.mean([model['scale'] for model in models], 0), rtol=1e-6)


def test_constants_stay_finite():
    """Parts or means without variance make no number that is not finite."""
    ones = np.ones((3, 3))
    np.testing.assert_array_equal(rescale_variance(ones, [ones, ones], 0), ones)
    opposite = [np.eye(3), -np.eye(3)]
    np.testing.assert_array_equal(
        rescale_variance(compute_mean(opposite), opposite, 0), np.zeros((3, 3))
    )


def test_directions_are_principal():
    """Reference, by hand: for 3 a and 4 b with orthonormal a, b, one direction keeps 4 b whole."""
    base = {'up': np.ones((1, 4), np.float32)}
    changes = np.array([[3.0, 0, 0, 0], [0, 0, 4.0, 0]], np.float32)
    models = [{'up': base['up'] + change} for change in changes]
    bases = compute_bases({'up': MATRIX}, base, models, 1)
    rebuilt = [rebuild_params(base, bases, i) for i in range(2)]
    np.testing.assert_allclose(rebuilt[0]['up'], base['up'], atol=1e-6)
    np.testing.assert_allclose(rebuilt[1]['up'], models[1]['up'], rtol=1e-6)
    errors = [relative_error(base, *pair) for pair in zip(models, rebuilt, strict=True)]
    np.testing.assert_allclose(errors, [1, 0], atol=1e-6)


@pytest.mark.parametrize('p', [1, 3, 5])
def test_low_rank_error_is_smaller_singular_values(p):
    """Catches another order, and coefficients without their magnitudes."""
    differences = np.random.default_rng(0).normal(size=(5, 40))
    basis = compute_basis(differences, p)
    lost = np.sum((basis.coefficients @ basis.directions - differences) ** 2)
    sizes = np.linalg.svd(differences, compute_uv=False)
    np.testing.assert_allclose(lost, np.sum(sizes[p:] ** 2), atol=1e-12)


@functools.cache
def known_model(norm='rmsnorm'):
    """A model in memory, with a tokenizer."""
    return dataclasses.replace(checkpoint({'model.norm': norm}), tokenizer=ByteTokenizer())


def perturb_model(model, seed, size=0.1):
    """The same model with all parameters perturbed."""
    rng = np.random.default_rng(seed)
    params = {
        path: leaf + np.float32(size) * rng.normal(size=leaf.shape).astype(np.float32)
        for path, leaf in named_leaves(model.weights.params).items()
    }
    params = unflatten_dict(params, sep='/')
    return dataclasses.replace(model, weights=model.weights.replace(params=params))


@pytest.mark.parametrize('keep', [None, 'variance'])
def test_copies_merge_bitwise(keep):
    """Statistics and counters too. Catches sums in float32, a variance by other sums than the
    parts', and counters that are rounded.
    """
    model = known_model('batchnorm')
    merged = merge.merge_checkpoints([model] * 7, keep)
    expected = named_leaves({'params': model.weights.params, 'stats': model.weights.stats})
    for path, leaf in named_leaves({'params': merged.params, 'stats': merged.stats}).items():
        assert leaf.dtype == expected[path].dtype, path
        np.testing.assert_array_equal(leaf, expected[path], path)


@pytest.mark.full
def test_full_basis_loses_nothing():
    """Fewer directions lose more. The bytes are the arrays' bytes."""
    base = known_model()
    models = [perturb_model(base, seed) for seed in range(3)]
    errors = [merge.compress_to_basis(base, models, p).errors for p in (1, 2, 3)]
    assert max(errors[2]) < 1e-5 < 0.3 < np.mean(errors[1]) < np.mean(errors[0])
    n_params = sum(leaf.size for leaf in named_leaves(base.weights.params).values())
    min_bytes = 4 * 2 * n_params
    assert min_bytes < merge.compress_to_basis(base, models, 2).n_bytes < 1.02 * min_bytes


def test_bases_file(tmp_path):
    base = known_model()
    compressed = merge.compress_to_basis(base, [perturb_model(base, seed) for seed in range(3)], 2)
    merge.write_bases(tmp_path / merge.BASIS, compressed.bases)
    stored = safetensors.read_header(tmp_path / merge.BASIS)
    for path, basis in compressed.bases.items():
        for name, array in basis._asdict().items():
            np.testing.assert_array_equal(safetensors.map_tensor(stored[f'{path}/{name}']), array)


REFUSED = {
    'architecture': ({'model.activation': 'relu'}, r"activation='gelu' and 'relu'"),
    'size': ({'model.d_ff': 16}, 'model.d_ff=32 and 16'),
    'factors of the forward pass': (
        {'scaling.name': 'mup', 'scaling.base_width': 8},
        "scaling.name='standard' and 'mup'",
    ),
    'a map of the weights': ({'model.reparam': 'weight_norm'}, 'fold --to=none'),
}


@pytest.mark.parametrize('case', REFUSED)
def test_different_models_are_refused(case):
    changes, match = REFUSED[case]
    different = dataclasses.replace(known_model(), recipe=tiny_config(changes))
    with pytest.raises(ValueError, match=match):
        merge.check_alike([known_model(), different])


def test_training_fields_may_differ():
    different = dataclasses.replace(known_model(), recipe=tiny_config({'model.dropout': 0.1}))
    merge.check_alike([known_model(), different])


BAD_ARGUMENTS = [
    ((['a'], None, None, ''), 'at least two checkpoints; got only a'),
    ((['a', 'b'], None, 2, ''), 'needs --base=RUN'),
    ((['a', 'b'], None, None, 'c'), 'add --basis=P'),
    ((['a', 'b'], 'variance', 1, 'c'), 'Leave one out'),
    ((['a', 'b'], None, 3, 'c'), 'from 1 to 2, .* got 3'),
    ((['a', 'b'], None, 0, 'c'), 'from 1 to 2, .* got 0'),
]


@pytest.mark.parametrize(('arguments', 'match'), BAD_ARGUMENTS)
def test_bad_arguments_are_refused(arguments, match):
    with pytest.raises(ValueError, match=match):
        merge.check_arguments(*arguments)


@pytest.mark.full
def test_merge_command(tmp_path, capsys):
    """Into a mean, and in a basis of all directions. Catches a lost order of runs."""
    base = known_model()
    models = {'base': base, 'a': perturb_model(base, 1), 'b': perturb_model(base, 2)}
    meta = {'vocab_size': base.meta['vocab_size'], 'data': None}
    for name, model in models.items():
        write_workdir(tmp_path / name, model.recipe, model.weights, model.tokenizer, 3, meta)
    paths = {name: str(tmp_path / name) for name in models}
    options = {'keep': None, 'basis': None, 'base': '', 'out': str(tmp_path / 'mean')}
    convert.run(['merge', paths['a'], paths['b']], options)
    mean = named_leaves(load(tmp_path / 'mean').weights.params)
    for path, leaf in mean.items():
        leaves = [named_leaves(models[name].weights.params)[path] for name in 'ab']
        np.testing.assert_allclose(leaf, (leaves[0] + leaves[1]) / 2, rtol=1e-5, atol=1e-7)
    options |= {'basis': 2, 'base': paths['base'], 'out': str(tmp_path / 'basis')}
    convert.run(['merge', paths['a'], paths['b']], options)
    for name, number in (('a', 1), ('b', 2)):
        rebuilt = named_leaves(load(tmp_path / 'basis' / str(number)).weights.params)
        expected = named_leaves(models[name].weights.params)
        for path, leaf in rebuilt.items():
            np.testing.assert_allclose(leaf, expected[path], atol=1e-5)
    assert 'MB besides the base, instead of' in capsys.readouterr().out
