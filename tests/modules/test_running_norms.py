"""Reference: PowerNorm and Unified Normalization against their recursions in NumPy float64, over
updates that cross warm-up, the filling of the window and outliers; forward, backward and both kinds
of statistics. Property: the gradient with ema_decay = 1 and an empty backward statistic.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from modules.statistics import BACKWARD_STATS, STATS
from tests.modules.norm_driver import WEIGHTS, build, differentiate, run, tokens
from tests.modules.norm_references import derivative, mean, split_groups

VALID = np.float32(WEIGHTS)
CLOSE = {'rtol': 3e-4, 'atol': 3e-5}  # float32 over a dozen updates


def to_float64(tree):
    """Converts to float64; counts stay integers."""
    return jax.tree.map(lambda v: np.float64(v) if v.dtype == np.float32 else int(v), tree)


def mean_square(x):
    """Returns the mean square over valid tokens."""
    return np.sum(x**2 * WEIGHTS, 0) / np.sum(WEIGHTS)


def scale_groups(x, o):
    grouped = split_groups(x, o['groups'])
    return (grouped / np.sqrt(mean(grouped**2) + o['eps'])).reshape(x.shape)


def power_update(x, dy, p, stats, backward, o):
    """Returns (y, dx, dscale, dbias, the next STATS, the next BACKWARD_STATS) of MaskPowerNorm."""
    t, eps, a = stats['updates'] + 1, o['eps'], o['ema_decay']
    s = scale_groups(x, o)
    batch_mean_square, phi, e = mean_square(s), stats['mean_square'], backward['running_gz']
    z = s / np.sqrt((batch_mean_square if t <= o['warmup'] else phi) + eps)
    if t < o['warmup']:
        phi = phi * (t - 1) / t + batch_mean_square / t
    phi = a * phi + (1 - a) * batch_mean_square
    g = dy * p['scale'] - (1 - a) * e * z
    ds = g / np.sqrt(batch_mean_square + eps)
    dx = derivative(lambda x: np.sum(scale_groups(x, o) * ds), x)
    following = {'mean_square': phi, 'updates': t}
    y = z * p['scale'] + p['bias']
    e = e + np.mean(g * z, 0)
    return y, dx, np.sum(dy * z, 0), np.sum(dy, 0), following, {'running_gz': e}


def unified_update(x, dy, p, stats, backward, o):
    """Returns the same as `power_update` for UN1d."""
    t, w, eps, m = stats['updates'] + 1, o['window'], o['eps'], o['ema_decay']
    window, running = stats['window'].copy(), stats['mean_square']
    spread, x2, young = np.var(np.sqrt(window), ddof=1), mean_square(x), t < o['warmup']
    window[t % w] = x2
    with np.errstate(divide='ignore'):
        geometric = np.exp(np.mean(np.log(window), 0))
    outlier = o['filter_outliers'] and not young
    outlier = outlier and np.any(np.mean(window, 0) - geometric > spread * w)
    if outlier:
        window[t % w] = running
        geometric = np.exp(np.mean(np.log(window), 0))
    skip = outlier or w == 1
    used = x2 if t <= w or young or skip else geometric
    z = x / np.sqrt(used + eps)
    r = np.clip(np.sqrt((used + eps) / (running + eps)), 1 / 5, 5)
    r = 1.0 if t <= max(1000, o['warmup']) or skip else r
    g = dy * p['scale'] * r
    gz, e, window_gz = np.mean(g * z, 0), backward['running_gz'], backward['window_gz'].copy()
    window_gz[t % w] = e if skip else gz
    averaged = gz if t <= w or young or skip else np.mean(window_gz, 0)
    e = m * e + (1 - m) * averaged
    dx = (g - (averaged if skip else e) * z) / np.sqrt(used + eps)
    following = {'mean_square': m * running + (1 - m) * used, 'window': window}
    following |= {'updates': t, 'skipped': stats['skipped'] + int(outlier)}
    y = z * p['scale'] + p['bias']
    backward = {'window_gz': window_gz, 'running_gz': e}
    return y, dx, np.sum(dy * r * z, 0), np.sum(dy, 0), following, backward


SIZES = [1, 1.5, 1, 0.5, 1, 2, 1, 1, 0.7, 1]
OUTLIERS = [1, 1, 1, 1, 1, 30, 1, 1, 1.2, 30]
FAR = [1, 1, 1, 1e3, 1, 1, 1e-3, 1e-3, 1, 1]  # compensation above 5 and below 1/5


def follow(name, sizes, updates, **options):
    """Compares batches of these sizes with the recursion, and returns its last statistics.

    updates: number of updates before the first batch; 0: everything has its initial value.
    """
    case = build(name, valid=VALID, **options)
    stats, published = case.stats, {'powernorm': power_update, 'unified': unified_update}[name]
    empty = build(name, randomize=False, **options).stats
    stats = empty if updates == 0 else stats
    stats[STATS]['updates'] = np.int32(updates)
    if name == 'unified':
        stats[STATS]['skipped'] = np.int32(0)
    if updates and case.options.get('filter_outliers'):  # batches of size 1 until now
        usual = np.float32(mean_square(tokens()[0]))
        window = np.tile(usual, (case.options['window'], 1))
        stats[STATS] |= {'mean_square': usual, 'window': window}
    step = differentiate(case.norm, True)
    p, exact = to_float64((case.params, stats))
    for i, size in enumerate(sizes):
        x, dy = tokens()[0] * size, tokens(seed=i)[1]
        x[i], x = 0, np.float64(np.float32(x))
        y, next_stats, grads, backward, dx = step(
            case.params, stats, jnp.float32(x), jnp.float32(dy)
        )
        actual = y, dx, grads['scale'], grads['bias'], next_stats, backward
        expected = published(x, dy, p, exact[STATS], exact[BACKWARD_STATS], case.options)
        assert [next_stats.keys(), backward.keys()] == [expected[4].keys(), expected[5].keys()]
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, **CLOSE), actual, expected)
        stats = {STATS: next_stats, BACKWARD_STATS: backward}
        exact = {STATS: expected[4], BACKWARD_STATS: expected[5]}
    y, _ = run(case.norm, case.params, stats, jnp.float32(x), False)
    z = scale_groups(x, case.options) if name == 'powernorm' else x
    z = z / np.sqrt(exact[STATS]['mean_square'] + case.options['eps'])
    np.testing.assert_allclose(y, z * p['scale'] + p['bias'], **CLOSE)
    return exact


@pytest.mark.parametrize(
    ('updates', 'options'),
    [
        (0, {'warmup': 3}),
        (0, {'warmup': 0, 'groups': 4, 'ema_decay': 0.6}),
        (7, {'warmup': 10, 'groups': 2, 'eps': 0.1}),
    ],
)
def test_power_norm_follows_its_recursion(updates, options):
    """Catches warm-up off by one, the running mean square in dx, statistics updated too late."""
    assert follow('powernorm', SIZES, updates, **options)[STATS]['updates'] == updates + len(SIZES)


@pytest.mark.parametrize(
    ('updates', 'sizes', 'options', 'skipped'),
    [
        (0, SIZES, {'warmup': 0}, 0),
        (0, SIZES, {'warmup': 6, 'window': 3, 'ema_decay': 0.6}, 0),
        (0, SIZES, {'warmup': 0, 'window': 1}, 0),
        (0, OUTLIERS, {'warmup': 4, 'window': 3, 'filter_outliers': True}, 2),
        (0, OUTLIERS, {'warmup': 100, 'window': 3, 'filter_outliers': True}, 0),
        (995, SIZES, {'warmup': 998, 'ema_decay': 0.6, 'eps': 0.1}, 0),
        (998, FAR, {'warmup': 1, 'window': 3}, 0),
        (998, FAR, {'warmup': 1005, 'window': 3}, 0),
        (998, OUTLIERS, {'warmup': 1, 'filter_outliers': True}, 2),
    ],
)
def test_unified_norm_follows_its_recursion(updates, sizes, options, skipped):
    """Catches a wrong slot, an outlier's mean square kept, compensation during warm-up."""
    assert follow('unified', sizes, updates, **options)[STATS]['skipped'] == skipped


@pytest.mark.parametrize('name', ['powernorm', 'unified'])
def test_bfloat16_update_matches_float64(name):
    """One update under warm-up: x and dx in bfloat16, everything else in float32."""
    case = build(name, dtype='bfloat16', valid=VALID)
    x, dy = tokens('bfloat16')
    low = [jnp.asarray(v, 'bfloat16') for v in (x, dy)]
    y, next_stats, grads, backward, dx = differentiate(case.norm, True)(
        case.params, case.stats, *low
    )
    assert y.dtype == dx.dtype == jnp.bfloat16
    published = {'powernorm': power_update, 'unified': unified_update}[name]
    p, stats = to_float64((case.params, case.stats))
    expected = published(x, dy, p, stats[STATS], stats[BACKWARD_STATS], case.options)
    for actual, exact in zip((y, dx), expected, strict=False):
        np.testing.assert_allclose(np.float64(actual), exact, rtol=2**-8, atol=2e-5)
    float32_outputs = grads['scale'], grads['bias'], next_stats, backward
    assert all(leaf.dtype in (jnp.float32, jnp.int32) for leaf in jax.tree.leaves(float32_outputs))
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, **CLOSE), float32_outputs, expected[2:]
    )


def test_power_norm_without_decay_scales_gradient():
    """ds = dy scale / sqrt(mean square), whatever the running statistics of the backward pass."""
    case = build('powernorm', ema_decay=1.0, eps=0.0, groups=1)
    x, dy = tokens()
    x = x / np.sqrt(mean(x**2))  # its own group scaling, which then only projects the gradient
    _, _, _, _, dx = differentiate(case.norm, True)(
        case.params, case.stats, jnp.float32(x), jnp.float32(dy)
    )
    ds = dy * case.params['scale'] / np.sqrt(np.mean(x**2, 0))
    np.testing.assert_allclose(dx, ds - x * mean(ds * x), rtol=1e-4, atol=1e-5)


def test_outliers_do_not_enter_window():
    """If filtered, a batch 30 times as large leaves the running mean square in its slot."""
    options = {'warmup': 1, 'window': 3, 'eps': 0.0}
    filtered, unfiltered = (
        follow('unified', [1, 1, 1, 1, 30], 5, filter_outliers=f, **options) for f in (True, False)
    )
    assert filtered[STATS]['window'].max() < 100 < unfiltered[STATS]['window'].max()


@pytest.mark.parametrize(('root', 'skipped'), [(3.4, 0), (4.0, 1)])
def test_unified_norm_uses_unbiased_variance(root, skipped):
    """One channel, a window of 1 and 9: their roots have variance 2, so that the limit is 4.

    With root^2 instead of 9, the means differ by (root - 1)^2 / 2: 2.88 and 4.5.
    """
    case = build('unified', features=1, window=2, warmup=1, filter_outliers=True)
    stats = {'window': np.float32([[1], [9]]), 'updates': np.int32(2), 'skipped': np.int32(0)}
    carried = case.stats | {STATS: case.stats[STATS] | stats}
    _, next_stats = run(case.norm, case.params, carried, jnp.full((4, 1), root), True)
    assert next_stats['skipped'] == skipped
