"""Routers, biases that balance experts, shared experts and ragged products. Reference: NumPy
float64, after the code of torchtitan. Property: a bias balances a planted imbalance. Equivalence:
microbatches, scan, remat, runs in one program; ragged products and buffers without drops.
"""

import functools
import operator
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from lm.devices.check_mesh import check_devices
from lm.devices.mesh import make_mesh
from lm.training import step
from lm.training.state import make_hyper
from lm.training.step import make_train_step
from modules.activations import ACTIVATIONS
from modules.experts import BIAS, COUNTS, mean_square_log_z, update_biases
from modules.grouped_product import grouped_product
from modules.mlp import MoE
from modules.params import split_boxes
from modules.statistics import AUXILIARY, DIAGNOSTICS, STATS
from tests.helpers import (
    assert_trees_close,
    checked_config,
    initial_state,
    packed_batch,
    tiny_config,
    tiny_learner,
)
from tests.modules.test_mlp import REFERENCE

TOKENS, WIDTH, HIDDEN, EXPERTS = 24, 6, 10, 4
BIASED = {'model.mlp': 'moe', 'mlp.balance': 'bias', 'mlp.gates': 'sigmoid'}


def moe(**options):
    options = {'n_experts': EXPERTS, 'router_noise': 0.0, 'balance': 'bias'} | options
    return MoE(HIDDEN, ACTIVATIONS['swiglu'], REFERENCE, jnp.float32, **options)


def draw(layer, seed=0, scale=1.0):
    """Returns x [M, D], parameters and a bias for each expert."""
    rng = np.random.default_rng(seed)
    x = jnp.float32(rng.normal(size=(TOKENS, WIDTH)))
    params, _ = split_boxes(jax.eval_shape(layer.init, jax.random.key(0), x)['params'])
    params = {n: jnp.float32(rng.normal(size=leaf.shape)) for n, leaf in params.items()}
    bias_E = jnp.float32(scale * rng.normal(size=EXPERTS))
    return x, params, {STATS: {BIAS: bias_E, COUNTS: jnp.zeros(EXPERTS)}}


@functools.partial(jax.jit, static_argnums=(0, 5))
def run(layer, params, stats, x, valid=None, mutable=(STATS, AUXILIARY)):
    variables = {'params': params} | (stats if layer.balance == 'bias' else {})
    return layer.apply(variables, x[None], None if valid is None else valid[None], mutable=mutable)


def swiglu(x, p, name=''):
    gate, up = x @ p[f'{name}gate'], x @ p[f'{name}up']
    return (gate / (1 + np.exp(-gate)) * up) @ p[f'{name}down']


def limit_groups(scores, groups, per_token):
    """Returns scores [M, E] with -inf outside of the best groups, after DeepSeek-V3's equations."""
    limited = np.full(scores.shape, -np.inf)
    for m, parts in enumerate(np.split(row, groups) for row in scores):
        rated = [np.sort(part)[-2:].sum() for part in parts]
        for group in np.argsort(rated)[-per_token:]:
            places = np.split(np.arange(scores.shape[1]), groups)[group]
            limited[m, places] = scores[m, places]
    return limited


def reference(params, bias_E, x, per_token, scale=1.0, shared=False, groups=None):
    """Returns (outputs [M, D], experts chosen [M, K]) with sigmoid gates, float64."""
    p, x = {n: np.float64(w) for n, w in params.items()}, np.float64(x)
    scores = 1 / (1 + np.exp(-x @ p['router']))
    rated = scores + np.float64(bias_E)
    rated = limit_groups(rated, *groups) if groups else rated
    chosen, y = np.argsort(-rated, 1)[:, :per_token], np.zeros(x.shape)
    for m, experts in enumerate(chosen):
        for e in experts:
            weight = scale * scores[m, e] / (scores[m, experts].sum() + 1e-20)
            y[m] += weight * swiglu(x[m], {n: p[n][e] for n in ('up', 'gate', 'down')})
    weight = 1 / (1 + np.exp(-x @ p['shared_weight'])) if 'shared_weight' in p else 1.0
    return (y + weight * swiglu(x, p, 'shared_') if shared else y), chosen


def test_sigmoid_gates_and_shared_experts_match_reference():
    """Catches weights with the bias, a bias on logits, a scale of the shared experts, and weights
    that are not divided by their sum.
    """
    layer = moe(gates='sigmoid', route_scale=2.5, shared_experts=3, granularity=5)
    x, params, stats = draw(layer)
    assert params['up'].shape == (EXPERTS, WIDTH, 2) and params['shared_up'].shape == (WIDTH, 6)
    expected, chosen = reference(params, stats[STATS][BIAS], x, 2, 2.5, shared=True)
    _, unbiased = reference(params, np.zeros(EXPERTS), x, 2)
    assert (np.sort(chosen) != np.sort(unbiased)).any()
    _, updated = run(layer, params, stats, x)
    y, _ = run(layer, params, stats, x, None, ())
    np.testing.assert_allclose(y[0], expected, rtol=1e-4, atol=1e-4)
    counts = np.bincount(chosen.ravel(), minlength=EXPERTS)
    np.testing.assert_array_equal(updated[STATS][COUNTS], counts)
    assert AUXILIARY not in updated


@pytest.mark.parametrize('balance', ['bias', 'none'])
def test_groups_and_shared_gate_match_reference(balance):
    """Catches groups rated by their best expert alone, groups of experts that are not neighbours,
    a choice without groups where there is no bias, and a gate that is not of the token.
    """
    groups = {'n_experts': 8, 'expert_groups': 4, 'groups_per_token': 2, 'experts_per_token': 3}
    layer = moe(
        gates='sigmoid',
        balance=balance,
        shared_experts=2,
        shared_gate=True,
        expert_width=3,
        **groups,
    )
    x, params, _ = draw(layer)
    assert params['up'].shape == (8, WIDTH, 3) and params['shared_up'].shape == (WIDTH, 6)
    bias_E = jnp.float32(np.random.default_rng(3).normal(size=8)) * (balance == 'bias')
    stats = {STATS: {BIAS: bias_E, COUNTS: jnp.zeros(8)}}
    expected, chosen = reference(params, bias_E, x, 3, shared=True, groups=(4, 2))
    _, ungrouped = reference(params, bias_E, x, 3)
    assert (np.sort(chosen) != np.sort(ungrouped)).any()
    y, _ = run(layer, params, stats, x, None, ())
    np.testing.assert_allclose(y[0], expected, rtol=1e-4, atol=1e-4)


def test_bias_has_no_gradient():
    """A common shift changes nothing: catches a bias in the weights."""
    layer = moe(gates='sigmoid')
    x, params, stats = draw(layer)

    def loss(bias_E):
        return jnp.sum(run(layer, params, {STATS: stats[STATS] | {BIAS: bias_E}}, x, None, ())[0])

    bias_E = stats[STATS][BIAS]
    assert not np.any(jax.grad(loss)(bias_E))
    np.testing.assert_array_equal(loss(bias_E + 0.5), loss(bias_E))


def test_counts_add_up_over_microbatches_without_padding():
    """Catches an update per microbatch, counts of padding, and a mean over layers."""
    layer = moe()
    x, params, stats = draw(layer)
    valid = jnp.ones((TOKENS, 1)).at[:5].set(0)
    _, whole = run(layer, params, stats, x, valid)
    _, first = run(layer, params, stats, x[:12], valid[:12])
    _, second = run(layer, params, {STATS: first[STATS]}, x[12:], valid[12:])
    assert_trees_close(second[STATS], whole[STATS], rtol=0, atol=0)
    assert whole[STATS][COUNTS].sum() == 2 * (TOKENS - 5)
    layers = {BIAS: jnp.zeros((2, 3)), COUNTS: jnp.float32([[1, 6, 2], [5, 5, 5]])}
    after = update_biases({'a': {'mlp': layers}, 'key': jnp.ones(2)}, 0.5)
    signs = np.array([1, -1, 1]) - 1 / 3
    np.testing.assert_allclose(after['a']['mlp'][BIAS], [0.5 * signs, [0, 0, 0]], rtol=1e-6)
    assert not np.any(after['a']['mlp'][COUNTS]) and np.all(after['key'] == 1)


def test_bias_balances_planted_imbalance():
    """The twin with the sign turned keeps the imbalance."""
    layer = moe(gates='sigmoid', n_experts=EXPERTS, experts_per_token=1)
    x, params, stats = draw(layer, scale=0.0)
    x = x.at[:, 0].set(1.0)
    params['router'] = (0.5 * params['router']).at[0].set(jnp.float32([2.0, 0, 0, 0]))

    @functools.partial(jax.jit, static_argnums=0)
    def largest_load(steps, rate):
        def step(stats, _):
            _, updated = run(layer, params, {STATS: stats}, x)
            return update_biases(updated[STATS], rate), updated[STATS][COUNTS]

        counts_SE = jax.lax.scan(step, stats[STATS], length=steps)[1]
        return jnp.max(counts_SE, 1) * EXPERTS / TOKENS

    loads = largest_load(60, 0.01)
    assert loads[0] > 2.5 and loads[-1] < 1.4
    assert largest_load(60, -0.01)[-1] > 2.5


def test_all_experts_equal_dense_sum():
    """E = k: whatever the bias, each token passes through every expert."""
    layer = moe(gates='softmax', experts_per_token=EXPERTS, expert_capacity=9.0)
    x, params, stats = draw(layer)
    p, x64 = {n: np.float64(w) for n, w in params.items()}, np.float64(x)
    probs = np.exp(x64 @ p['router'])
    probs /= probs.sum(1, keepdims=True)
    experts = [swiglu(x64, {n: p[n][e] for n in ('up', 'gate', 'down')}) for e in range(EXPERTS)]
    expected = np.einsum('me,emd->md', probs, np.array(experts))
    for dispatch in ('capacity', 'ragged'):
        y, _ = run(layer.clone(dispatch=dispatch), params, stats, x)
        np.testing.assert_allclose(y[0], expected, rtol=1e-4, atol=1e-4)


@pytest.mark.full
def test_ragged_products_equal_buffers_without_drops():
    """Values and gradients, with biases and padding, and an expert without tokens. Catches an order
    that is not inverted, a bias of another expert, and padding that counts.
    """
    layer = moe(bias=True, expert_capacity=9.0, gates='renormalised')
    x, params, stats = draw(layer)
    stats[STATS][BIAS] = jnp.float32([0, 0.2, -5, 0.1])
    valid = jnp.ones((TOKENS, 1)).at[3:7].set(0)

    def loss(layer, params, x):
        y, updated = run(layer, params, stats, x, valid)
        return jnp.sum(jnp.sin(y)), (y, updated)

    grad = jax.value_and_grad(loss, argnums=(1, 2), has_aux=True)
    (_, expected), expected_grads = grad(layer, params, x)
    (_, actual), grads = grad(layer.clone(dispatch='ragged'), params, x)
    assert_trees_close(actual, expected, rtol=1e-5, atol=1e-5)
    assert_trees_close(grads, expected_grads, rtol=1e-4, atol=1e-4)
    assert not np.any(expected[0][0, 3:7]) and np.abs(expected_grads[0]['up'][1]).max() > 0.01


def test_ragged_gradient_maps_over_runs():
    rng = np.random.default_rng(0)
    x, w = (jnp.float32(rng.normal(size=shape)) for shape in ((2, 7, 3), (2, 3, 3, 2)))
    sizes = jnp.int32([[2, 0, 5], [4, 3, 0]])

    def loss(x, w, sizes):
        return jnp.sum(jnp.cos(grouped_product(x, w, sizes)))

    grad = jax.jit(jax.vmap(jax.grad(loss, argnums=(0, 1))))(x, w, sizes)
    for i, groups in enumerate(([0, 0, 2, 2, 2, 2, 2], [0, 0, 0, 0, 1, 1, 1])):
        x64, w64 = np.float64(x[i]), np.float64(w[i])[groups]
        slope = -np.sin(np.einsum('ni,nio->no', x64, w64))
        np.testing.assert_allclose(grad[0][i], np.einsum('no,nio->ni', slope, w64), atol=1e-5)
        expected = np.zeros((3, 3, 2))
        np.add.at(expected, groups, x64[:, :, None] * slope[:, None])
        np.testing.assert_allclose(grad[1][i], expected, atol=1e-5)


def test_z_loss_for_constant_logits():
    """(c + log E)^2, without padding."""
    logits = jnp.full((TOKENS, EXPERTS), 0.7).at[:3].set(9.0)
    valid = jnp.ones((TOKENS, 1)).at[:3].set(0)
    expected = (0.7 + np.log(EXPERTS)) ** 2
    np.testing.assert_allclose(mean_square_log_z(logits, valid), expected, rtol=1e-6)
    np.testing.assert_allclose(mean_square_log_z(logits[3:], None), expected, rtol=1e-6)
    layer = moe(router_z_loss=True, balance='none')
    x, params, _ = draw(layer)
    params['router'] = jnp.zeros_like(params['router'])
    _, updated = run(layer, params, {}, x)
    assert updated[AUXILIARY].keys() == {'router_z_loss'}
    np.testing.assert_allclose(
        updated[AUXILIARY]['router_z_loss'][0], np.log(EXPERTS) ** 2, rtol=1e-6
    )


@pytest.mark.parametrize('capacity_over', ['batch', 'row'])
def test_diagnostics_match_counts(capacity_over):
    """Reference: counts of the chosen experts in NumPy. Catches a capacity of the whole batch for
    each row, and padding that counts.
    """
    layer = moe(capacity_over=capacity_over, expert_capacity=0.8, gates='sigmoid')
    x, params, stats = draw(layer)
    valid = np.ones((TOKENS, 1))
    valid[:4] = 0
    rows = 2 if capacity_over == 'row' else 1
    _, chosen = reference(params, stats[STATS][BIAS], x, 2)
    counts = np.zeros((rows, EXPERTS))
    for token in range(4, TOKENS):
        counts[token * rows // TOKENS, chosen[token]] += 1
    shape = (2, TOKENS // 2)
    variables = {'params': params, **stats}
    _, sown = layer.apply(
        variables, x.reshape(*shape, -1), valid.reshape(*shape, 1), mutable=(DIAGNOSTICS,)
    )
    values = {name: float(value[0]) for name, value in sown[DIAGNOSTICS].items()}
    capacity = int(np.ceil(0.8 * 2 / EXPERTS * TOKENS / rows))
    dropped = np.maximum(counts - capacity, 0).sum() / counts.sum()
    assert values == pytest.approx(
        {
            'expert_largest_load': counts.sum(0).max() * EXPERTS / counts.sum(),
            'expert_dropped_share': dropped,
            'expert_bias_range': np.ptp(stats[STATS][BIAS]),
        },
        rel=1e-5,
    )
    assert dropped > 0


def step_once(changes, **numbers):
    config = checked_config(BIASED | changes)
    train_step, state = jax.jit(make_train_step(tiny_learner(config))), initial_state(config)
    hyper = make_hyper(config) | {path: jnp.float32(n) for path, n in numbers.items()}
    state, metrics = train_step(state, packed_batch(), hyper)
    return state.stats[STATS], metrics['loss']


@functools.cache
def plain_step():
    return step_once({'mlp.expert_capacity': 9.0, 'mlp.router_noise': 0.0})


def test_step_finishes_statistics_once(monkeypatch):
    """With two microbatches. Catches a step that never moves biases, or moves them in each."""
    calls = []
    monkeypatch.setattr(step, 'finish_step', lambda *args: calls.append(args) or args[1])
    config = checked_config(BIASED | {'train.microbatches': 2})
    learner = tiny_learner(config)
    state = jax.eval_shape(lambda: initial_state(config))
    jax.eval_shape(make_train_step(learner), state, packed_batch(), make_hyper(config))
    assert len(calls) == 1


@pytest.mark.full
@pytest.mark.parametrize(
    'changes',
    [{'train.microbatches': 2}, {'model.remat': 'full'}, {'mlp.dispatch': 'ragged'}],
)
def test_step_moves_biases_once(changes):
    """Two microbatches equal one batch; recomputation counts once. Without drops, as each
    microbatch has a capacity.
    """
    stats, loss = step_once({'mlp.expert_capacity': 9.0, 'mlp.router_noise': 0.0} | changes)
    expected, expected_loss = plain_step()
    assert_trees_close(stats, expected, rtol=0, atol=1e-9)
    np.testing.assert_allclose(loss, expected_loss, rtol=1e-5)
    (biases,) = [stats['layers']['mlp'][BIAS]]
    assert np.abs(biases).max() == pytest.approx(1e-3, rel=1) and not np.any(
        stats['layers']['mlp'][COUNTS]
    )


@pytest.mark.full
def test_scan_equals_unrolled_layers():
    (scanned, loss), (unrolled, unrolled_loss) = (
        step_once({'model.scan_layers': scan, 'mlp.router_noise': 0.0}) for scan in (True, False)
    )
    np.testing.assert_allclose(loss, unrolled_loss, rtol=1e-5)
    assert_trees_close(scanned, unrolled, rtol=0, atol=1e-9)


@pytest.mark.full
def test_runs_in_one_program_have_separate_biases():
    changes = BIASED | {'mlp.dispatch': 'ragged', 'mlp.router_noise': 0.0}
    config = checked_config(changes)
    train_step, state = make_train_step(tiny_learner(config)), initial_state(config)
    states = jax.tree.map(lambda leaf: jnp.stack([leaf, leaf]), state)
    hypers = jax.tree.map(lambda leaf: jnp.stack([leaf, leaf]), make_hyper(config))
    rates = jnp.float32([1e-3, 0.25])
    after, metrics = jax.jit(jax.vmap(train_step, (0, None, 0)))(
        states, packed_batch(), hypers | {'mlp.bias_rate': rates}
    )
    for i, rate in enumerate(rates):
        single, loss = step_once(
            {'mlp.dispatch': 'ragged', 'mlp.router_noise': 0.0}, **{'mlp.bias_rate': rate}
        )
        mapped = jax.tree.map(operator.itemgetter(i), after.stats[STATS])
        assert_trees_close(mapped, single, rtol=0, atol=1e-8)
        np.testing.assert_allclose(metrics['loss'][i], loss, rtol=1e-5)


@pytest.mark.parametrize(
    ('changes', 'message'),
    [
        ({'mlp.granularity': 3}, 'mlp.granularity must divide model.d_ff'),
        ({'mlp.shared_gate': True}, 'but mlp.shared_experts=0'),
        ({'mlp.granularity': 2, 'mlp.expert_width': 8}, 'Leave one of them out'),
        (
            {'mlp.expert_width': 8, 'scaling.name': 'mup', 'scaling.base_width': 8},
            'mlp.expert_width=8 is the same in the base model',
        ),
        ({'mlp.expert_groups': 3}, 'mlp.expert_groups must divide mlp.n_experts'),
        ({'mlp.expert_groups': 4}, 'have fewer than the 2 experts'),
        ({'mlp.groups_per_token': 2}, 'must be at most mlp.expert_groups; got 2 and 1'),
        (
            {'mlp.expert_groups': 2, 'mlp.experts_per_token': 3},
            'mlp.groups_per_token=1 groups have only 2 experts',
        ),
        (
            {'mlp.dispatch': 'ragged', 'mlp.capacity_over': 'row'},
            'it has no capacity, so that mlp.capacity_over=row would have no effect',
        ),
        ({'mlp.dispatch': 'ragged', 'kernels.matmul': 'einsum'}, 'Choose kernels.matmul=direct'),
        (
            {'mlp.dispatch': 'ragged', 'model.activation': 'selu', 'mlp.alpha_dropout': 0.1},
            'no dropout of hidden activations',
        ),
        ({'loss.balance_loss': 0.1, 'mlp.balance': 'bias'}, 'moe and mlp.balance=loss'),
        ({'mlp.bias_rate': 0.01}, 'mlp.bias_rate=0.01 has no effect with mlp.balance=loss'),
        ({'loss.router_z_loss': 0.1}, 'moe and mlp.router_z_loss=True'),
        (
            {
                'mlp.gates': 'sigmoid',
                'kernels.softmax': 'reference',
                'kernels.attention': 'blocked',
            },
            'without mlp.gates=sigmoid',
        ),
    ],
)
def test_settings_without_effect_are_refused(changes, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        checked_config({'model.mlp': 'moe'} | changes)


def test_ragged_experts_are_not_sharded():
    config = tiny_config(
        {'model.mlp': 'moe', 'mlp.dispatch': 'ragged', 'mesh.data': 4, 'mesh.expert': 2}
    )
    with pytest.raises(ValueError, match=r'Use these devices for mesh\.fsdp'):
        check_devices(config, make_mesh(config.mesh))
