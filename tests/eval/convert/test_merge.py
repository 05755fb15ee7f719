"""Reference: means, variances and bases of matrices made by hand. Property: copies of a model merge
to it bitwise, and as many directions as models lose nothing. Contract: what cannot be merged.
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


def test_variance_is_that_of_the_parts():
    """A case by hand: both parts have variance 5, their mean 4 about 4. Catches a variance of the
    standard deviation, about 0, or over one axis alone.
    """
    parts = [np.array([[1.0, 3.0], [5.0, 7.0]]), np.array([[3.0, 1.0], [7.0, 5.0]])]
    merged = compute_mean(parts)
    np.testing.assert_array_equal(merged, [[2, 2], [6, 6]])
    away = 2 * np.sqrt((5 + 5 * EPS) / (4 + 5 * EPS))
    wanted = [[4 - away, 4 - away], [4 + away, 4 + away]]
    np.testing.assert_allclose(rescale_variance(merged, parts, 0), wanted, rtol=1e-14)


def test_a_scale_of_the_weights_is_one_of_the_result():
    """Catches eps that is not relative: weights of a wide model have small variances."""
    rng = np.random.default_rng(0)
    parts = [rng.normal(size=(8, 8)) for _ in range(4)]
    once = rescale_variance(compute_mean(parts), parts, 0)
    small = [1e-4 * part for part in parts]
    np.testing.assert_allclose(
        rescale_variance(compute_mean(small), small, 0), 1e-4 * once, rtol=1e-10
    )


def test_independent_parts_lose_variance_and_get_it_back():
    """Catches layers that share a variance: the second has 100 times that of the first."""
    rng, sizes = np.random.default_rng(0), np.array([1.0, 10.0])[:, None, None]
    models = [{'up': (sizes * rng.normal(size=(2, 64, 64))).astype(np.float32)} for _ in range(8)]
    plain = merge_params({'up': LAYERS}, models, None)['up']
    kept = merge_params({'up': LAYERS}, models, 'variance')['up']
    np.testing.assert_allclose(np.var(plain, (1, 2)), np.array([1, 100]) / 8, rtol=0.1)
    wanted = np.mean([np.var(model['up'], (1, 2)) for model in models], 0)
    np.testing.assert_allclose(np.var(kept, (1, 2)), wanted, rtol=1e-2)


def test_vectors_are_means():
    """Catches gains that are rescaled about their mean, of whose variance nothing is known."""
    rng = np.random.default_rng(0)
    models = [{'scale': rng.normal(1, 0.1, (2, 16)).astype(np.float32)} for _ in range(3)]
    found = merge_params({'scale': GAIN}, models, 'variance')['scale']
    np.testing.assert_allclose(found, np.mean([model['scale'] for model in models], 0), rtol=1e-6)


def test_constants_stay():
    """Parts without a variance, or whose mean has none, make no number that is not finite."""
    ones = np.ones((3, 3))
    np.testing.assert_array_equal(rescale_variance(ones, [ones, ones], 0), ones)
    opposite = [np.eye(3), -np.eye(3)]
    np.testing.assert_array_equal(
        rescale_variance(compute_mean(opposite), opposite, 0), np.zeros((3, 3))
    )


def test_directions_are_the_principal_ones():
    """A case by hand: of 3 a and 4 b with a, b orthonormal, one direction keeps 4 b whole."""
    base = {'up': np.ones((1, 4), np.float32)}
    changes = np.array([[3.0, 0, 0, 0], [0, 0, 4.0, 0]], np.float32)
    models = [{'up': base['up'] + change} for change in changes]
    bases = compute_bases({'up': MATRIX}, base, models, 1)
    rebuilt = [rebuild_params(base, bases, i) for i in range(2)]
    np.testing.assert_allclose(rebuilt[0]['up'], base['up'], atol=1e-6)
    np.testing.assert_allclose(rebuilt[1]['up'], models[1]['up'], rtol=1e-6)
    errors = [relative_error(base, *both) for both in zip(models, rebuilt, strict=True)]
    np.testing.assert_allclose(errors, [1, 0], atol=1e-6)


@pytest.mark.parametrize('p', [1, 3, 5])
def test_what_is_lost_are_the_smaller_singular_values(p):
    """Catches another order, and coefficients without their sizes."""
    differences = np.random.default_rng(0).normal(size=(5, 40))
    basis = compute_basis(differences, p)
    lost = np.sum((basis.coefficients @ basis.directions - differences) ** 2)
    sizes = np.linalg.svd(differences, compute_uv=False)
    np.testing.assert_allclose(lost, np.sum(sizes[p:] ** 2), atol=1e-12)


@functools.cache
def known(norm='rmsnorm'):
    """A model in memory, with a tokenizer."""
    return dataclasses.replace(checkpoint({'model.norm': norm}), tokenizer=ByteTokenizer())


def moved(one, seed, size=0.1):
    """The same model with each parameter moved."""
    rng = np.random.default_rng(seed)
    params = {
        path: leaf + np.float32(size) * rng.normal(size=leaf.shape).astype(np.float32)
        for path, leaf in named_leaves(one.weights.params).items()
    }
    params = unflatten_dict(params, sep='/')
    return dataclasses.replace(one, weights=one.weights.replace(params=params))


@pytest.mark.parametrize('keep', [None, 'variance'])
def test_copies_of_a_model_merge_to_it_bitwise(keep):
    """Statistics and counters too. Catches sums in float32, a variance by other sums than the
    parts', and counters that are rounded.
    """
    one = known('batchnorm')
    found = merge.merge_checkpoints([one] * 7, keep)
    wanted = named_leaves({'params': one.weights.params, 'stats': one.weights.stats})
    for path, leaf in named_leaves({'params': found.params, 'stats': found.stats}).items():
        assert leaf.dtype == wanted[path].dtype, path
        np.testing.assert_array_equal(leaf, wanted[path], path)


@pytest.mark.full
def test_as_many_directions_as_models_lose_nothing():
    """And fewer lose more. The bytes are those of the arrays."""
    base = known()
    models = [moved(base, seed) for seed in range(3)]
    errors = [merge.compress_to_basis(base, models, p).errors for p in (1, 2, 3)]
    assert max(errors[2]) < 1e-5 < 0.3 < np.mean(errors[1]) < np.mean(errors[0])
    n_params = sum(leaf.size for leaf in named_leaves(base.weights.params).values())
    least = 4 * 2 * n_params
    assert least < merge.compress_to_basis(base, models, 2).n_bytes < 1.02 * least


def test_a_file_has_the_bases(tmp_path):
    base = known()
    found = merge.compress_to_basis(base, [moved(base, seed) for seed in range(3)], 2)
    merge.write_bases(tmp_path / merge.BASIS, found.bases)
    stored = safetensors.read_header(tmp_path / merge.BASIS)
    for path, basis in found.bases.items():
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
def test_models_that_are_not_alike_are_refused(case):
    changes, match = REFUSED[case]
    other = dataclasses.replace(known(), recipe=tiny_config(changes))
    with pytest.raises(ValueError, match=match):
        merge.check_alike([known(), other])


def test_what_training_alone_reads_may_differ():
    other = dataclasses.replace(known(), recipe=tiny_config({'model.dropout': 0.1}))
    merge.check_alike([known(), other])


ASKED = [
    ((['a'], None, None, ''), 'two checkpoints or more; got a alone'),
    ((['a', 'b'], None, 2, ''), 'add --base=RUN'),
    ((['a', 'b'], None, None, 'c'), 'add --basis=P'),
    ((['a', 'b'], 'variance', 1, 'c'), 'leave one out'),
    ((['a', 'b'], None, 3, 'c'), 'from 1 to 2, .* got 3'),
    ((['a', 'b'], None, 0, 'c'), 'from 1 to 2, .* got 0'),
]


@pytest.mark.parametrize(('asked', 'match'), ASKED)
def test_what_merges_to_nothing_is_refused(asked, match):
    with pytest.raises(ValueError, match=match):
        merge.check_arguments(*asked)


@pytest.mark.full
def test_runs_are_merged_by_a_command(tmp_path, capsys):
    """To a mean, and in a basis of all directions. Catches an order of runs that is lost."""
    base = known()
    models = {'base': base, 'a': moved(base, 1), 'b': moved(base, 2)}
    meta = {'vocab_size': base.meta['vocab_size'], 'data': None}
    for name, one in models.items():
        write_workdir(tmp_path / name, one.recipe, one.weights, one.tokenizer, 3, meta)
    paths = {name: str(tmp_path / name) for name in models}
    options = {'keep': None, 'basis': None, 'base': '', 'out': str(tmp_path / 'mean')}
    convert.run(['merge', paths['a'], paths['b']], options)
    mean = named_leaves(load(tmp_path / 'mean').weights.params)
    for path, leaf in mean.items():
        both = [named_leaves(models[name].weights.params)[path] for name in 'ab']
        np.testing.assert_allclose(leaf, (both[0] + both[1]) / 2, rtol=1e-5, atol=1e-7)
    options |= {'basis': 2, 'base': paths['base'], 'out': str(tmp_path / 'basis')}
    convert.run(['merge', paths['a'], paths['b']], options)
    for name, number in (('a', 1), ('b', 2)):
        found = named_leaves(load(tmp_path / 'basis' / str(number)).weights.params)
        wanted = named_leaves(models[name].weights.params)
        for path, leaf in found.items():
            np.testing.assert_allclose(leaf, wanted[path], atol=1e-5)
    assert 'MB beside the base; the 2 models have' in capsys.readouterr().out
