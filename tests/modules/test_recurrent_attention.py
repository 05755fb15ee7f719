"""Layers of linear recurrences. Reference: against NumPy in float64, token by token. Equivalence: a
row read in parts, devices, rematerialisation. Property: initial values and learning rates.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from lm.devices.check_mesh import check_devices
from lm.devices.mesh import make_mesh, put_batch
from lm.devices.shardings import state_shardings
from lm.training.state import make_hyper
from modules.attention import ATTENTIONS
from modules.attention.base import CACHE
from modules.attention.recurrent import draw_log_a, draw_step_bias, draw_taps
from modules.kernels import kernels_for
from modules.norms import NORMS
from modules.params import named_leaves, split_boxes
from modules.positions import POSITIONS
from modules.sequence import packed_rows, partial_rows, whole_rows
from tests.helpers import (
    assert_trees_close,
    checked_config,
    initial_state,
    jit_train_step,
    packed_batch,
    tiny_config,
    tiny_learner,
    train_step,
)

LENGTH, D, HEADS, KV_HEADS, K = 9, 16, 4, 2, 4
NAMES = ['gla', 'gated_delta']
ROWS = [
    ('gla', {}),
    ('gla', {'conv_width': 1, 'output_gate': 'none', 'expand_value': 2}),
    ('gated_delta', {}),
    ('gated_delta', {'conv_width': 1, 'negative_eigenvalues': True}),
    # Four states of two heads of keys, which are narrower than those of the model.
    ('gated_delta', {'key_heads': 2, 'value_heads': 4, 'key_width': 3, 'output_norm_eps': 0.1}),
]


def layer(name, qk_norm='none', position='none', dtype=jnp.float32, **options):
    return ATTENTIONS[name](
        n_heads=HEADS,
        n_kv_heads=KV_HEADS,
        head_dim=K,
        qk_norm=lambda name, over: NORMS[qk_norm](name=name),
        rotate=POSITIONS[position].rotate,
        kernels=kernels_for('cpu'),
        dtype=dtype,
        **options,
    )


def draw_x(batch=1, length=LENGTH, seed=0):
    return jnp.float32(np.random.default_rng(seed).normal(size=(batch, length, D)))


@functools.cache
def draw_params(module):
    shapes = jax.eval_shape(module.init, jax.random.key(0), draw_x(), whole_rows(LENGTH))['params']
    rng = np.random.default_rng(2)
    return jax.tree.map(
        lambda leaf: jnp.float32(rng.normal(size=leaf.shape) / 2), split_boxes(shapes)[0]
    )


@functools.partial(jax.jit, static_argnums=0)
def apply_layer(module, params, x_BTD, sequence):
    return module.apply({'params': params}, x_BTD, sequence)


def sigmoid(x):
    return 1 / (1 + np.exp(-x))


def numpy_layer(
    name,
    x,
    w,
    conv_width=4,
    output_gate='silu',
    negative_eigenvalues=False,
    value_heads=None,
    key_width=K,
    output_norm_eps=1e-5,
    **_,
):
    """Computes one document in float64, from the published equations, a head at a time."""

    def convolve(matrix, head):
        y = x @ w[matrix][:, head]
        if conv_width == 1:
            return y * sigmoid(y) if name == 'gated_delta' else y
        padded = np.concatenate([np.zeros((conv_width - 1, y.shape[1])), y])
        taps = w[f'{matrix}_conv'][head]
        y = sum(padded[i : i + len(y)] * taps[:, i] for i in range(conv_width))
        return y * sigmoid(y)

    total = np.zeros_like(x)
    for n in range(HEADS):
        # As in the code of Qwen3-Next, a head of queries and keys is for neighbouring values.
        places = (n, n // 2, n // 2) if value_heads is None else (n // 2, n // 2, n)
        q, k, v = map(convolve, ('query', 'key', 'value'), places)
        step = np.log1p(np.exp(x @ w['decay'][:, n] + w['decay_step_bias'][n]))
        g = -np.exp(w['decay_log_rate'][n]) * step
        if name == 'gated_delta':
            q, k = (y / np.sqrt(np.sum(y**2, -1, keepdims=True) + 1e-6) for y in (q, k))
            b = sigmoid(x @ w['write'][:, n]) * (2 if negative_eigenvalues else 1)
        s, y = np.zeros((key_width, v.shape[1])), np.zeros_like(v)
        for t in range(len(x)):
            s = np.exp(g[t]) * s
            value = b[t] * (v[t] - s.T @ k[t]) if name == 'gated_delta' else v[t]
            s = s + np.outer(k[t], value)
            y[t] = s.T @ q[t] / np.sqrt(key_width)
        y = y / np.sqrt(np.mean(y**2, -1, keepdims=True) + output_norm_eps) * w['output_scale']
        if output_gate == 'silu':
            gate = x @ w['gate'][:, n]
            y = y * gate * sigmoid(gate)
        total += y @ w['out'][n]
    return total


@pytest.mark.parametrize(('name', 'options'), ROWS, ids=str)
def test_layer_matches_equations(name, options):
    """Catches the taps in reverse, a SiLU before the convolution, a gate before the norm, beta
    without sigmoid, a decay with the wrong sign, and heads that share the wrong key head.
    """
    module = layer(name, **options)
    params = draw_params(module)
    w = {key: np.float64(value) for key, value in params.items()}
    expected = numpy_layer(name, np.float64(draw_x()[0]), w, **options)
    actual = apply_layer(module, params, draw_x(), whole_rows(LENGTH))[0]
    np.testing.assert_allclose(actual, expected, rtol=1e-3, atol=1e-4 * np.abs(expected).max())


@functools.partial(jax.jit, static_argnums=0)
def apply_with_cache(module, variables, x_BTD, sequence):
    return module.apply(variables, x_BTD, sequence, mutable=[CACHE])


@pytest.mark.full
@pytest.mark.parametrize('name', NAMES)
def test_cached_row_equals_whole_row(name):
    """Rows of different lengths with padding, read a token or many at a time: shorter and longer
    than the convolution. Catches padding in the state or the window, and a cache without a reset.
    """
    module = layer(name, position='rope')
    params, x = draw_params(module), draw_x(2)
    whole = apply_layer(module, params, x, whole_rows(LENGTH))
    variables, start = {'params': params}, np.zeros(2, int)
    for count in np.array([(4, 2), (1, 1), (1, 0), (3, 4)]):
        length = max(count)
        part = np.full((2, length, D), 7.0, np.float32)  # padding is not zero
        for row, n in enumerate(count):
            part[row, :n] = x[row, start[row] : start[row] + n]
        sequence = partial_rows(jnp.int32(start), jnp.int32(count), int(length), capacity=LENGTH)
        y, cache = apply_with_cache(module, variables, part, sequence)
        variables = {'params': params} | cache
        for row, n in enumerate(count):
            target = whole[row, start[row] : start[row] + n]
            np.testing.assert_allclose(y[row, :n], target, rtol=1e-4, atol=1e-5)
        start = start + count
    value_dim = K * (2 if name == 'gated_delta' else 1)
    assert {key: v.shape for key, v in variables[CACHE].items()} == {
        'state': (2, HEADS, K, value_dim),
        'query_window': (2, HEADS, 3, K),
        'key_window': (2, KV_HEADS, 3, K),
        'value_window': (2, KV_HEADS, 3, value_dim),
    }
    sequence = partial_rows(jnp.int32([0, 0]), jnp.int32([3, 3]), 3, capacity=LENGTH)
    reused, _ = apply_with_cache(module, variables, x[:, :3], sequence)
    np.testing.assert_allclose(reused, whole[:, :3], rtol=1e-4, atol=1e-5)


@pytest.mark.full
@pytest.mark.parametrize('name', NAMES)
def test_documents_equal_separate_rows(name):
    """Documents shorter and longer than the convolution, one of a single token."""
    module, segments = layer(name), jnp.int32([[1, 1, 2, 3, 3, 3, 3, 3, 0]])
    params, x = draw_params(module), draw_x()
    packed = apply_layer(module, params, x, packed_rows(segments))
    for start, stop in ((0, 2), (2, 3), (3, 8)):
        single = apply_layer(module, params, x[:, start:stop], whole_rows(stop - start))
        np.testing.assert_allclose(packed[:, start:stop], single, rtol=1e-4, atol=1e-5)


@pytest.mark.full
@pytest.mark.parametrize('name', NAMES)
def test_bfloat16_sums_in_float32(name):
    """The output is in the type of the model, and the state of the cache in float32."""
    module = layer(name, dtype=jnp.bfloat16)
    sequence = partial_rows(jnp.int32([0]), jnp.int32([LENGTH]), LENGTH, capacity=LENGTH)
    params = draw_params(module)
    y, cache = apply_with_cache(module, {'params': params}, draw_x(), sequence)
    assert y.dtype == cache[CACHE]['query_window'].dtype == jnp.bfloat16
    assert cache[CACHE]['state'].dtype == jnp.float32
    exact = apply_layer(layer(name), params, draw_x(), whole_rows(LENGTH))
    np.testing.assert_allclose(jnp.float32(y), exact, atol=0.05 * np.abs(exact).max())


def test_initial_values_are_published():
    """e^A_log is uniform in 0 to 16, the step log-uniform in 0.001 to 0.1, and taps in +- 1/2."""
    keys = jax.random.split(jax.random.key(0), 3)
    rate = np.exp(draw_log_a(keys[0], (4000,)))
    step = np.asarray(jax.nn.softplus(draw_step_bias(keys[1], (4000,))))
    taps = np.asarray(draw_taps(keys[2], (1000, 4)))
    for values, low, high in ((rate, 0, 16), (np.log10(step), -3, -1), (taps, -0.5, 0.5)):
        places = (values.ravel() - low) / (high - low)
        assert places.min() > -1e-3 and places.max() < 1 + 1e-3
        np.testing.assert_allclose(
            np.histogram(places, 4, (0, 1))[0] / places.size, 0.25, atol=0.03
        )


@pytest.mark.parametrize('name', NAMES)
@pytest.mark.parametrize(
    ('changes', 'matrix', 'number'),
    [
        ({}, 0.5, 0.5),
        ({'scaling.base_heads': 2}, 0.5, 1.0),  # one side of these matrices grows, as of a readout
        ({'optim.name': 'muon'}, 1.0, 1.0),
    ],
    ids=str,
)
def test_mup_scales_matrices_only(name, changes, matrix, number):
    """At twice the width: rates of matrices fall with Adam, those of numbers and filters do not."""
    sizes = {'model.attention': name, 'scaling.name': 'mup', 'scaling.base_width': 8}
    description = tiny_learner(checked_config(sizes | changes)).description
    rates = {
        path.split('/')[-1]: scaling.lr_factor
        for path, scaling in named_leaves(description.scalings).items()
        if '/attention/' in path
    }
    vectors = ('decay_log_rate', 'decay_step_bias', 'output_scale')
    filters = ('query_conv', 'key_conv', 'value_conv')
    numbers = ('decay', 'write') if name == 'gated_delta' else ('decay',)
    assert rates == {
        **dict.fromkeys(('query', 'key', 'value', 'gate', 'out'), matrix),
        **dict.fromkeys((*vectors, *filters), 1.0),
        **dict.fromkeys(numbers, number),
    }


def test_decay_rates_and_gains_are_not_decayed():
    """Weight decay applies to matrices and filters, as in the authors' code."""
    description = tiny_learner(tiny_config({'model.attention': 'gated_delta'})).description
    factors = {
        path.split('/')[-1]: scaling.decay_factor
        for path, scaling in named_leaves(description.scalings).items()
        if '/attention/' in path
    }
    undecayed = {key for key, factor in factors.items() if factor == 0}
    assert undecayed == {'decay_log_rate', 'decay_step_bias', 'output_scale'}
    assert set(factors.values()) == {0.0, 1.0}


@functools.cache
def step_on_one_device(name):
    config = tiny_config({'model.attention': name, 'model.n_heads': 4})
    return train_step(config)(initial_state(config), packed_batch(), make_hyper(config))


@pytest.mark.full
@pytest.mark.parametrize('name', NAMES)
@pytest.mark.parametrize('sizes', [{'data': 2, 'fsdp': 2, 'tensor': 2}, {'tensor': 8}], ids=str)
def test_eight_devices_equal_one(name, sizes):
    """A step with heads over `tensor`, also if the axis does not divide them, and rows over `data`
    and `fsdp`.
    """
    changes = {f'mesh.{axis}': n for axis, n in ({'data': 1} | sizes).items()}
    config = tiny_config({'model.attention': name, 'model.n_heads': 4} | changes)
    mesh, learner = make_mesh(config.mesh), tiny_learner(config)
    state = jax.device_put(initial_state(config), state_shardings(learner, mesh))
    batch = put_batch(mesh, packed_batch())
    actual = jit_train_step(learner, mesh)(state, batch, make_hyper(config))
    assert_trees_close(jax.device_get(actual), step_on_one_device(name), rtol=1e-4, atol=1e-5)


@pytest.mark.full
@pytest.mark.parametrize('name', NAMES)
def test_rematerialisation_keeps_the_step(name):
    config = tiny_config({'model.attention': name, 'model.n_heads': 4, 'model.remat': 'full'})
    actual = train_step(config)(initial_state(config), packed_batch(), make_hyper(config))
    assert_trees_close(actual, step_on_one_device(name), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize('name', NAMES)
def test_context_axis_is_refused(name):
    config = checked_config({'model.attention': name, 'mesh.context': 2, 'mesh.data': 4})
    with pytest.raises(ValueError, match=f'model.attention={name} reads them in order'):
        check_devices(config, make_mesh(config.mesh))


def test_layer_may_leave_its_norm_out():
    """With qk_norm_over=none, the layer is that of a model without norms of queries and keys."""
    module = layer('gated_delta', qk_norm='rmsnorm', qk_norm_over='none')
    params = draw_params(module)
    assert 'query_norm' not in params
    plain = apply_layer(layer('gated_delta'), params, draw_x(), whole_rows(LENGTH))
    bare = apply_layer(module, params, draw_x(), whole_rows(LENGTH))
    np.testing.assert_array_equal(bare, plain)


@pytest.mark.parametrize(
    ('changes', 'says'),
    [
        ({'attention.key_heads': 2}, 'two numbers of heads of a recurrence; got 2 and None'),
        ({'attention.value_heads': 2}, 'two numbers of heads of a recurrence; got None and 2'),
        ({'attention.key_heads': 3, 'attention.value_heads': 4}, 'must divide attention.value_h'),
        (
            {'attention.key_width': 4, 'scaling.name': 'mup', 'scaling.base_width': 8},
            'attention.key_width=4 is the same in the base model',
        ),
        (
            {'attention.qk_norm_over': 'none', 'attention.norm_values': True}
            | {'model.qk_norm': 'rmsnorm'},
            'attention.qk_norm_over=none leaves their norms out',
        ),
    ],
)
def test_sizes_are_checked(changes, says):
    with pytest.raises(ValueError, match=says):
        checked_config({'model.attention': 'gated_delta'} | changes)
