"""Reference: norms against their closed forms in NumPy float64, forward and gradient. Property:
invariances, initial values and parameters of each norm.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from modules.norms import NORMS
from modules.norms.base import default_groups
from modules.params import NORM, named_leaves, split_boxes
from modules.statistics import STATS
from tests.modules.norm_driver import (
    WEIGHTS,
    D,
    M,
    build,
    differentiate,
    run,
    tokens,
    weight_options,
)
from tests.modules.norm_references import REFERENCES, derivative

TOLERANCE = {'float32': 1e-5, 'bfloat16': 2**-8}  # bfloat16: half a unit in the last place
RECURRENT = {'powernorm', 'unified'}  # tests/modules/test_running_norms.py
OPTIONS = [
    *((name, {}) for name in REFERENCES if name != 'ghost_batchnorm'),
    ('batch_channel', {'estimated': True}),
    ('batch_channel', {'groups': 4, 'momentum': 0.3}),
    ('batchnorm', {'scale': False, 'momentum': 0.3}),
    ('batchnorm', {'bias': False, 'eps': 0.1}),
    ('dyt', {'bias': True}),
    ('evonorm_b0', {'momentum': 0.3, 'eps': 0.1}),
    ('evonorm_s0', {'groups': 8}),
    ('gated_rmsnorm', {'rank': 3}),
    ('ghost_batchnorm', {'ghost_batches': 1}),
    ('ghost_batchnorm', {'ghost_batches': 3, 'momentum': 0.3}),
    ('l1norm', {'rescale': True}),
    ('l1norm', {'scale': False, 'bias': False}),
    ('layernorm', {'scale': False}),
    ('layernorm', {'bias': False, 'eps': 0.1}),
    ('layernorm_removal', {'removal_start': 1, 'bias': False}),
    ('layernorm_removal', {'removal_start': 1, 'order': 1, 'ema_decay': 0.3}),
    ('rmsnorm', {'scale': False, 'eps': 0.1}),
    ('rmsnorm_removal', {'removal_start': 1, 'removal_gap': 0, 'order': 3}),
    ('rmsnorm_removal', {'bias': True, 'scale': False, 'ema_decay': 0.3}),
    ('seednorm', {'heads': 4}),
]
LOW = pytest.mark.full  # bfloat16 sums in float32 too: in the default tier rmsnorm shows it
CASES = [
    pytest.param(
        name, options, training, dtype, marks=[LOW] * (dtype != 'float32' and name != 'rmsnorm')
    )
    for name, options in OPTIONS
    for training in ((True, False) if REFERENCES[name].measure else (False,))
    for dtype in TOLERANCE
    if dtype == 'float32' or not options or name == 'ghost_batchnorm'
]


def test_every_norm_has_a_reference():
    names = NORMS.keys() - RECURRENT
    missing = sorted(names - REFERENCES.keys())
    assert REFERENCES.keys() == names, (
        f'tests/modules/norm_references.py: REFERENCES lacks a row for {missing}, the published '
        'equation in float64 NumPy'
    )
    assert {name for name, _ in OPTIONS} == REFERENCES.keys()


def reference(name, case, x, w, training):
    """Returns (f(x, p) -> y whose derivative is the published one, the next statistics)."""
    row, options = REFERENCES[name], case.options
    options = options | {'groups': options.get('groups') or D // 8}
    stats = {k: np.float64(v) for k, v in case.stats.get(STATS, {}).items()}
    if not training:
        return lambda x, p: row.apply(x, p, stats, options), {}
    statistics, following = row.measure(x, w, stats, options)
    if options.get('estimated'):
        return lambda x, p: row.apply(x, p, statistics, options), following

    def apply(x, p):
        return row.apply(x, p, row.measure(x, w, stats, options)[0], options)

    return apply, following


@pytest.mark.parametrize(('name', 'options', 'training', 'dtype'), CASES)
def test_forward_and_gradient(name, options, training, dtype):
    """Gradients in x and every parameter, and the next running statistics; with padding."""
    case = build(name, dtype=dtype, **options, **weight_options(name))
    x, dy = tokens(dtype)
    params = jax.tree.map(np.float64, case.params)
    f, following = reference(name, case, x, WEIGHTS, training)
    low = [jnp.asarray(v, dtype) for v in (x, dy)]
    y, stats, grads, _, dx = differentiate(case.norm, training)(case.params, case.stats, *low)
    assert y.dtype == dx.dtype == jnp.dtype(dtype)
    rtol = TOLERANCE[dtype]
    np.testing.assert_allclose(np.float64(y), f(x, params), rtol=rtol, atol=1e-5)
    expected = derivative(lambda x: np.sum(f(x, params) * dy), x)
    np.testing.assert_allclose(np.float64(dx), expected, rtol=rtol, atol=2e-5)
    for key, grad in grads.items():
        expected = derivative(lambda v, k=key: np.sum(f(x, params | {k: v}) * dy), params[key])
        np.testing.assert_allclose(grad, expected, rtol=1e-4, atol=1e-4, err_msg=key)
    assert stats.keys() == following.keys()
    for key, statistic in stats.items():
        assert statistic.dtype in (jnp.float32, jnp.int32)
        np.testing.assert_allclose(statistic, following[key], rtol=1e-5, atol=1e-6, err_msg=key)


def evaluate_initial(name, x, **options):
    """Returns the output of a norm with its initial parameters, in evaluation."""
    case = build(name, randomize=False, features=x.shape[-1], **options)
    return np.float64(run(case.norm, case.params, case.stats, jnp.float32(x), False)[0])


@pytest.mark.parametrize(
    ('name', 'like', 'options'),
    [
        ('ada_rmsnorm', 'rmsnorm', {}),
        ('layernorm_removal', 'layernorm', {}),
        ('pre_affine_rmsnorm', 'rmsnorm', {}),
        ('rmsnorm_removal', 'rmsnorm', {}),
        ('seednorm', 'rmsnorm', {}),
        ('seednorm', 'rmsnorm', {'heads': 4}),
    ],
)
def test_norm_starts_as_another(name, like, options):
    """Catches a parameter that starts at another value."""
    x, _ = tokens()
    np.testing.assert_allclose(
        evaluate_initial(name, x, eps=1e-6, **options), evaluate_initial(like, x), rtol=1e-6
    )


def test_ada_rmsnorm_can_be_the_identity():
    case, (x, _) = build('ada_rmsnorm'), tokens()
    params = {'alpha': np.ones(D, np.float32), 'beta': np.zeros(D, np.float32)}
    y, _ = run(case.norm, params, {}, jnp.float32(x), False)
    np.testing.assert_allclose(y, x, rtol=1e-5)


def test_crmsnorm_equals_centred_layernorm():
    """Over all coordinates but the last. Catches a division by D instead of D + 1."""
    x, _ = tokens()
    x = x - np.mean(x, -1, keepdims=True)
    expected = evaluate_initial('layernorm', x, scale=False, bias=False)
    np.testing.assert_allclose(
        evaluate_initial('rmsnorm', x, scale=False), expected, rtol=1e-5, atol=1e-6
    )
    np.testing.assert_allclose(
        evaluate_initial('crmsnorm', x[:, :-1]), expected[:, :-1], rtol=1e-5, atol=1e-6
    )


def test_dyt_alpha_differs_at_attention():
    def alpha(**options):
        return build('dyt', randomize=False, **options).params['alpha']

    assert alpha() == alpha(site='attention') == np.float32(0.5)
    options = {'alpha': 0.2, 'alpha_attention': 0.8}
    assert alpha(site='attention', **options) == np.float32(0.8)
    for site in ('embedding', 'mlp', 'qk', 'final'):
        assert alpha(site=site, **options) == np.float32(0.2)
    assert build('dyt').params.keys() == {'alpha', 'scale'}
    assert build('dyt', bias=True).params.keys() == {'alpha', 'scale', 'bias'}


@pytest.mark.parametrize(
    ('features', 'groups'), [(7, 1), (16, 2), (24, 3), (100, 10), (256, 32), (4096, 32)]
)
def test_default_groups(features, groups):
    assert default_groups(features) == groups


@pytest.mark.parametrize('name', ['batch_channel', 'evonorm_s0', 'powernorm'])
def test_groups_must_divide_the_width(name):
    with pytest.raises(ValueError, match='must divide the width; got 5 for 16'):
        build(name, groups=5)


# Norms that are invariant in training, with eps = 0, to the scale of each token or of the batch.
SCALE_FREE = {
    'token': {
        'crmsnorm',
        'gated_rmsnorm',
        'l1norm',
        'layernorm',
        'layernorm_removal',
        'powernorm',
        'pre_affine_rmsnorm',
        'rmsnorm',
        'rmsnorm_removal',
    },
    'batch': {'batch_channel', 'batchnorm', 'evonorm_b0', 'ghost_batchnorm', 'unified'},
}
SHIFT_SENSITIVE = NORMS.keys() - {'layernorm', 'layernorm_removal', 'l1norm'}


def run_training(name, x, **options):
    case = build(name, **options)
    return np.float64(run(case.norm, case.params, case.stats, jnp.float32(x), True)[0])


@pytest.mark.parametrize('name', NORMS)
def test_scale_invariance(name):
    """N(c x) = N(x) for exactly the norms of SCALE_FREE. Catches an eps that is not applied."""
    x, _ = tokens()
    options = {'eps': 0.0} if 'eps' in NORMS[name].__dataclass_fields__ else {}
    y = run_training(name, x, **options)
    batch_change = np.abs(run_training(name, 0.25 * x, **options) - y).max()
    token_change = np.abs(
        run_training(name, np.linspace(0.2, 2, M)[:, None] * x, **options) - y
    ).max()
    measured = 'token' if token_change < 1e-4 else 'batch' if batch_change < 1e-4 else 'none'
    declared = next((kind for kind, names in SCALE_FREE.items() if name in names), 'none')
    assert measured == declared, (
        f'{name} is invariant to the scale of: {measured}; if the paper says so too, put it there '
        'in SCALE_FREE of this file'
    )


@pytest.mark.parametrize('name', NORMS)
def test_shift_invariance(name):
    """N(x + c) = N(x), with a number c for each token, for norms that centre tokens."""
    x, _ = tokens()
    change = np.abs(
        run_training(name, x + np.linspace(0, 2, M)[:, None]) - run_training(name, x)
    ).max()
    measured, declared = bool(change > 1e-4), name in SHIFT_SENSITIVE
    assert measured == declared, (
        f'{name} changes when a number is added to each token: {measured}; if the paper says so '
        'too, correct SHIFT_SENSITIVE of this file'
    )


def test_layer_norm_is_accurate_at_a_large_mean():
    """Catches E[x^2] - E[x]^2, which has no digits left here."""
    x, _ = tokens()
    x = np.float64(np.float32(x + 1e4))
    case = build('layernorm', randomize=False)
    expected = REFERENCES['layernorm'].apply(x, {}, None, case.options)
    np.testing.assert_allclose(evaluate_initial('layernorm', x), expected, rtol=2e-3, atol=2e-3)


@pytest.mark.parametrize('name', NORMS)
def test_norms_serve_heads_too(name):
    """[B, N, T, H] is normalized over its last axis, or per channel over all other axes."""
    x, _ = tokens()
    valid_B1T1 = np.float32([[1, 1, 0], [1, 0, 1]]).reshape(2, 1, 3, 1)
    flat_valid = np.broadcast_to(valid_B1T1, (2, 2, 3, 1)).reshape(M, 1)
    options = {'ghost_batches': 2} if name == 'ghost_batchnorm' else {}
    heads = build(name, **options, **weight_options(name, valid_B1T1))
    flat_case = build(name, **options, **weight_options(name, flat_valid))
    x_BNTH = jnp.float32(x).reshape(2, 2, 3, D)
    y_BNTH, stats = run(heads.norm, heads.params, heads.stats, x_BNTH, True)
    y, expected = run(flat_case.norm, flat_case.params, flat_case.stats, jnp.float32(x), True)
    np.testing.assert_allclose(y_BNTH.reshape(M, D), y, rtol=1e-5, atol=1e-6)
    for key, statistic in stats.items():
        np.testing.assert_allclose(statistic, expected[key], rtol=1e-5, err_msg=key)


@pytest.mark.parametrize('name', NORMS)
def test_norm_parameters_have_float32_and_decay(name):
    """float32 under bfloat16, along the norm's axis, with the right decay.

    Catches a gain in the compute type, a gain that decays, a matrix that does not.
    """
    ones = jnp.ones((M, D), 'bfloat16')
    variables = NORMS[name](axis='head_dim').init(jax.random.key(0), ones)
    params, specs = split_boxes(variables.pop('params', {}))
    assert all(leaf.dtype in (jnp.float32, jnp.int32) for leaf in jax.tree.leaves(variables))
    for key, spec in named_leaves(specs).items():
        assert params[key].dtype == jnp.float32
        assert spec.part == NORM
        matrix = name == 'gated_rmsnorm' and key in ('up', 'down')
        assert spec.role == ('hidden' if matrix else 'vector')
        assert spec.decayed == (name == 'seednorm' and key in ('alpha', 'beta'))
        assert spec.axes in ((), ('head_dim',), ('group',)) or matrix
    if name == 'gated_rmsnorm':
        assert (specs['down'].axes, specs['down'].fan_in) == (('head_dim', 'rank'), ('head_dim',))
        assert (specs['up'].axes, specs['up'].fan_in) == (('rank', 'head_dim'), ('rank',))
        assert params['down'].shape == (D, 16) and build(name, rank=3).params['up'].shape == (3, D)
