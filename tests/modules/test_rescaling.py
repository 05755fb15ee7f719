"""Reference: the gradient through a step against finite differences in numpy float64, features of
rows by numpy and `statistics.NormalDist`. Property: weights that can not all go to 0.
"""

import statistics

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from scipy import special

from modules.losses.rescaling import (
    FEATURES,
    init_rescaler,
    normal_divergence,
    normal_overlap,
    rescaled_step,
    row_features,
    row_weights,
    trimmed_weights,
)

R, INPUTS, LR = 9, 4, 0.1
ROOT = 0.1  # with a small one Adam's first step is a sign, which has no slope
RNG = np.random.default_rng(0)
STEPS = {  # the update of a first step, by hand
    'sgd': (optax.sgd(LR), lambda g: -LR * g),
    'adam': (
        optax.adam(LR, eps_root=ROOT),
        lambda g: -LR * g / (np.sqrt(g**2 + ROOT) + 1e-8),
    ),
}


def standard(x):
    return (x - x.mean(0)) / np.sqrt(x.var(0) + 1e-5)


def reference_weights(rescaler, features, form):
    """Returns the weights of rows, by numpy."""
    hidden = np.maximum(standard(features @ rescaler['first_FF']), 0)
    weights = special.softmax(standard(hidden @ rescaler['second_FK']), -1)[:, 1]
    return weights / weights.mean() if form == 'mean_one' else weights


def squares(params, batch):
    """Losses of linear regression, and features that depend on the parameters; any numpy."""
    x, y = batch
    residual = x @ params - y
    return residual**2 / 2, (residual[:, None] * (1 + x)) ** 2


def slopes(params, batch):
    """The gradient of each of the losses, [R, INPUTS]."""
    x, y = batch
    return (x @ params - y)[:, None] * x


@pytest.mark.parametrize(
    'name, form',
    [('adam', 'mean_one'), pytest.param('sgd', 'published', marks=pytest.mark.full)],
)
def test_gradient_through_a_step(name, form):
    """Catches a step that is not differentiated, features that are, and a wrong form.

    The last input is 0 in both batches, so that a parameter has no gradient: Adam's root would be
    differentiated at 0.
    """
    transform, update = STEPS[name]
    x, y = RNG.normal(size=(2, R, INPUTS)), RNG.normal(size=(2, R))
    x[..., -1] = 0
    batch, next_batch = zip(x, y, strict=True)
    params = RNG.normal(size=INPUTS)
    with jax.enable_x64(True):
        rescaler = init_rescaler(jax.random.key(0), INPUTS)
        step = jax.jit(
            lambda o, p: rescaled_step(
                squares, transform, o, p, transform.init(p), (batch, next_batch), form
            )
        )
        actual = jax.device_get(step(rescaler, jnp.asarray(params)))
        rescaler = jax.device_get(rescaler)

    def params_after(rescaler):
        weights = reference_weights(rescaler, squares(params, batch)[1], form)
        return params + update(weights @ slopes(params, batch) / R)

    features_after = squares(params_after(rescaler), next_batch)[1]

    def loss_after(rescaler):
        return np.mean(
            reference_weights(rescaler, features_after, form)
            * squares(params_after(rescaler), next_batch)[0]
        )

    np.testing.assert_allclose(actual.params, params_after(rescaler), rtol=1e-9)
    np.testing.assert_allclose(
        actual.weights_R, reference_weights(rescaler, squares(params, batch)[1], form), rtol=1e-9
    )
    for leaf, values in rescaler.items():
        expected = np.zeros_like(values)
        for index in np.ndindex(values.shape):
            sides = []
            for sign in (1, -1):
                perturbed = values.copy()
                perturbed[index] += sign * 1e-6
                sides.append(loss_after(rescaler | {leaf: perturbed}))
            expected[index] = (sides[0] - sides[1]) / 2e-6
        np.testing.assert_allclose(actual.gradient[leaf], expected, rtol=1e-5, atol=1e-8)


def test_weights_cannot_all_go_to_0():
    """Small and large matrices, features far from 0: a mean near 1/2, or of 1; weights differ."""

    @jax.jit
    def in_both_forms(rescaler, features):
        return [row_weights(rescaler, features, form) for form in ('published', 'mean_one')]

    for seed in range(10):
        rescaler = init_rescaler(jax.random.key(seed))
        large = {name: 100 * leaf for name, leaf in rescaler.items()}
        features = np.float32(1000 + RNG.normal(size=(64, FEATURES)))
        for matrices in (rescaler, large):
            published, mean_one = (np.array(w) for w in in_both_forms(matrices, features))
            assert 0.35 < published.mean() < 0.65 and np.std(published) > 0.05
            np.testing.assert_allclose(mean_one.mean(), 1, rtol=1e-5)
            np.testing.assert_allclose(mean_one * published.mean(), published, rtol=1e-5)


def test_unknown_form_is_refused():
    with pytest.raises(ValueError, match=r"'meanone'.*'mean_one'"):
        row_weights(init_rescaler(jax.random.key(0)), jnp.ones((2, FEATURES)), 'meanone')


def test_row_features_follow_publication():
    """Numpy row by row, in groups by agreement; catches deviations of a population, and groups of
    the other rows. Of as many passes with the label on top as not, the first decides.
    """
    logits, labels = RNG.normal(0, 2, (4, R, 5)), RNG.integers(0, 5, R)
    for row, right in enumerate(([0, 1], [2, 3], [0, 1, 2], [1, 2, 3], [3])):
        logits[:, row, labels[row]] = -9
        logits[right, row, labels[row]] = 9
    losses = -np.take_along_axis(special.log_softmax(logits, -1), labels[None, :, None], -1)[..., 0]
    actual = jax.jit(row_features)(jnp.float32(losses), jnp.float32(logits), labels)
    right = np.argmax(logits, -1) == labels
    agrees = np.where(right.mean(0) == 0.5, right[0], right.mean(0) > 0.5)
    assert agrees[:5].tolist() == [True, False, True, True, False]
    tops = special.softmax(logits, -1).max(-1)
    sizes = [
        f(x) for x in (losses, tops) for f in (lambda x: x.mean(0), lambda x: x.std(0, ddof=1))
    ]
    group = [np.array([x[agrees == label].mean() for label in agrees]) for x in sizes[:2]]
    sizes += [divergence(*sizes[:2], *group), overlap(*sizes[:2], *group)]
    columns = []
    for x in sizes:
        mates = [x[agrees == label] for label in agrees]
        columns += [x, [m.mean() for m in mates], [m.std(ddof=1) for m in mates]]
    np.testing.assert_allclose(actual, np.stack([*columns, agrees], 1), rtol=2e-3, atol=1e-4)


def divergence(mean, std, other_mean, other_std):
    return np.log(other_std / std) + (std**2 + (mean - other_mean) ** 2) / 2 / other_std**2 - 0.5


def overlap(*distributions):
    rows = zip(*np.broadcast_arrays(*distributions), strict=True)
    return np.array(
        [statistics.NormalDist(m, s).overlap(statistics.NormalDist(n, t)) for m, s, n, t in rows]
    )


def test_normal_divergence_and_overlap():
    """Deviations that are equal, nearly equal and far apart, either the larger; and of 0."""
    mean, std = np.array([0.0, 1, 2, 3, -1, 0.3]), np.array([1.0, 1, 1, 0.01, 5, 2])
    second = np.array([0.0, 3, 0, 2, 2, 0.3]), np.array([1.0, 1, 1 + 1e-5, 3, 0.2, 1])
    with_zeros = np.array([[1.0, 1, 1, 1], [0, 0, 1, 0], [2, 2, 2, 1], [1, 0, 0, 0]])
    inputs = jnp.float32(np.concatenate([[mean, std, *second], with_zeros], 1))
    divergences, overlaps = jax.jit(lambda x: (normal_divergence(*x), normal_overlap(*x)))(inputs)
    np.testing.assert_allclose(overlaps[:6], overlap(mean, std, *second), atol=1e-5)
    expected = divergence(mean, std, *second)
    np.testing.assert_allclose(divergences[:6], expected, rtol=1e-5, atol=1e-6)
    assert divergences[6:].tolist() == [0, 0, 0, 0]
    np.testing.assert_allclose(overlaps[6:], [0.0, 0, 0, 1], atol=1e-6)


def test_single_pass_is_refused():
    with pytest.raises(ValueError, match=r'need at least two passes; got 1\. Run the model'):
        row_features(jnp.ones((1, 2)), jnp.ones((1, 2, 3)), jnp.array([0, 0]))


def test_trimmed_weights_leave_out_the_largest_losses():
    losses = jnp.array([3.0, 1, 9, 2, 5, 4, 0, 8, 7, 6])
    weights = trimmed_weights(losses, 0.3)
    np.testing.assert_allclose(weights, np.where(np.array(losses) < 7, 10 / 7, 0), rtol=1e-6)
    for share in (1.0, -0.2):
        with pytest.raises(ValueError, match=f'must keep at least one of 10 rows; got {share}'):
            trimmed_weights(losses, share)
