"""Trained: an MLP under each row: equal functions of equivalent rows, and slopes against width."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from modules.params import ParamSpec
from modules.scaling import (
    INITS,
    PARAMETRIZATIONS,
    compute_growth,
    compute_scaling,
    one_channel_shape,
)

LAYERS = (  # of an MLP whose width grows
    ParamSpec('embedding', ('vocab', 'embed')),
    ParamSpec('hidden', ('embed', 'mlp'), ('embed',)),
    ParamSpec('hidden', ('mlp', 'embed'), ('mlp',)),
    ParamSpec('readout', ('embed', 'vocab'), ('embed',)),
)
VOCAB, BASE = 8, 32


def mlp_run(name, family, width, steps, lr):
    """Returns (features and outputs at each step [steps + 1, ...]) of a tanh MLP on four tokens."""
    row, weights, scalings = PARAMETRIZATIONS[name], [], []
    for i, spec in enumerate(LAYERS):
        shape, base = (
            tuple(VOCAB if a == 'vocab' else n for a in spec.axes) for n in (width, BASE)
        )
        if row.is_absolute:
            base = one_channel_shape(spec, shape)
        growth = compute_growth(spec, shape, base)
        scaling = compute_scaling(row, INITS['fan_in'], spec, (shape, base), (1, 1), growth, family)
        draw = np.random.default_rng(i).standard_normal(shape)
        weights.append(jnp.asarray(scaling.init_std * draw))
        scalings.append(scaling)
    tx = {'sgd': optax.identity(), 'adam': optax.scale_by_adam(eps=1e-40)}[family]

    def outputs(weights):
        used = [s.forward_factor * w for s, w in zip(scalings, weights, strict=True)]
        first, second, third, last = used
        x = first[: VOCAB // 2]
        x = x / jnp.sqrt(jnp.mean(jnp.square(x), axis=-1, keepdims=True))
        features = jnp.tanh(x @ second) @ third
        return features, jnp.tanh(features) @ last

    def loss(weights):
        _, logits = outputs(weights)
        labels = jnp.arange(VOCAB // 2) + VOCAB // 2
        return jnp.mean(optax.softmax_cross_entropy_with_integer_labels(logits, labels))

    @jax.jit
    def step(weights, state):
        direction, state = tx.update(jax.grad(loss)(weights), state, weights)
        moved = [
            w - lr * s.lr_factor * d for w, s, d in zip(weights, scalings, direction, strict=True)
        ]
        return moved, state

    state, records = tx.init(weights), [jax.device_get(outputs(weights))]
    for _ in range(steps):
        weights, state = step(weights, state)
        records.append(jax.device_get(outputs(weights)))
    return records


@pytest.mark.full
@pytest.mark.parametrize('family', ['sgd', 'adam'])
def test_equal_classes_are_equal_functions(family):
    """`mup` and `spectral` differ by the symmetry of (a, b, c): a factor in the forward pass, in
    the deviation and in the rate. Over 20 steps in float64 they are the same function. Catches a
    rate or factor that belongs to the other form, whatever its size.
    """
    with jax.enable_x64(True):
        runs = [mlp_run(name, family, 4 * BASE, 20, 0.02) for name in ('mup', 'spectral')]
    for mup, spectral in zip(*runs, strict=True):
        np.testing.assert_allclose(mup[1], spectral[1], rtol=1e-10, atol=1e-10)
    assert not np.allclose(runs[0][0][1], runs[0][-1][1], atol=1e-2)  # something was learned


# Slopes of log rms against log width after three steps: of the change of features, and of outputs.
SLOPES = {
    ('standard', 'sgd'): (0.1, 2.0, 0.3, 5.0),
    ('ntk', 'sgd'): (-0.7, -0.35, -0.3, 0.2),
    ('mean_field', 'sgd'): (-0.05, 0.05, -0.05, 0.05),
    ('mup', 'sgd'): (-0.05, 0.05, -0.05, 0.05),
    ('mup', 'adam'): (-0.05, 0.05, -0.05, 0.05),
    ('unit', 'adam'): (-0.05, 0.05, -0.05, 0.05),
    ('standard', 'adam'): (0.1, 2.0, 0.3, 5.0),
}


@pytest.mark.full
@pytest.mark.default_rows('mup-adam')
@pytest.mark.parametrize(('name', 'family'), SLOPES)
def test_slopes_against_width(name, family):
    """`standard` blows up, with `ntk` features stop moving, `mup` is flat (arXiv:2011.14522)."""
    widths = (128, 256, 512, 1024)
    changes = []
    for width in widths:
        lr = 0.5 if family == 'sgd' or name == 'unit' else 0.02
        first, *_, last = mlp_run(name, family, width, 3, lr)
        changes.append([np.sqrt(np.mean((b - a) ** 2)) for a, b in zip(first, last, strict=True)])
    slopes = [
        np.polyfit(np.log(widths), np.log(column), 1)[0] for column in zip(*changes, strict=True)
    ]
    min_f, max_f, min_o, max_o = SLOPES[name, family]
    assert min_f <= slopes[0] <= max_f and min_o <= slopes[1] <= max_o, slopes
