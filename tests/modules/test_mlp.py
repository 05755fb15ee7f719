"""Mixtures of experts. Reference: each token through its experts in NumPy float64. Property:
dependence between tokens, in training and in evaluation. Random features. Reference: the kernel of
a ReLU layer in closed form. Property: they are not trained.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from modules.activations import ACTIVATIONS
from modules.kernels import kernels_for
from modules.mlp import FEATURES, MLP, MLPS, MoE, RandomFeatures, orthogonal_features
from modules.params import named_leaves, split_boxes
from modules.statistics import AUXILIARY, STATS, key_from_int, key_to_int
from tests.helpers import assert_trees_close, checked_config, initial_state, tiny_learner

TOKENS, WIDTH, HIDDEN, EXPERTS = 12, 6, 5, 4
REFERENCE = kernels_for('cpu', 'reference')


def moe(activation='relu', expert_capacity=1.2, dtype=jnp.float32, **options):
    return MoE(
        HIDDEN,
        ACTIVATIONS[activation],
        REFERENCE,
        dtype,
        n_experts=EXPERTS,
        expert_capacity=expert_capacity,
        **options,
    )


def draw(layer, seed=0):
    """Returns x [M, D], params scaled so that experts neither agree nor explode, and stats."""
    x = jnp.float32(np.random.default_rng(seed).normal(size=(TOKENS, WIDTH)))
    variables = jax.jit(layer.init)(jax.random.key(seed), x)
    params, specs = split_boxes(variables['params'])
    assert all(spec.role == 'hidden' for spec in specs.values())
    return x, params, {STATS: variables[STATS]} if STATS in variables else {}


@functools.partial(jax.jit, static_argnums=0)
def train(layer, params, stats, x, valid=None):
    return layer.apply({'params': params, **stats}, x, valid, mutable=[STATS, AUXILIARY])


@functools.partial(jax.jit, static_argnums=0)
def evaluate(layer, params, stats, x):
    return layer.apply({'params': params, **stats}, x)


def numpy_experts(params, x, gated):
    """Returns the output of each expert for each token, [M, E, D], float64."""
    p = {name: np.float64(value) for name, value in params.items()}
    up = np.einsum('md,edf->mef', x, p['up'])
    if gated:
        gate = np.einsum('md,edf->mef', x, p['gate'])
        hidden = gate / (1 + np.exp(-gate)) * up
    else:
        hidden = np.maximum(up, 0)
    return np.einsum('mef,efd->med', hidden, p['down'])


def numpy_router(params, x, noise=0.0):
    logits = np.float64(x) @ np.float64(params['router']) + noise
    shifted = np.exp(logits - logits.max(-1, keepdims=True))
    return shifted / shifted.sum(-1, keepdims=True)


def numpy_mixture(probs, outputs, capacity, per_token=2):
    """Sums each token's likeliest experts that have capacity left, with tokens in order."""
    y, load = np.zeros(outputs.shape[::2]), np.zeros(EXPERTS, int)
    for token, p in enumerate(probs):
        for expert in np.argsort(-p)[:per_token]:
            if load[expert] < capacity:
                y[token] += p[expert] * outputs[token, expert]
            load[expert] += 1
    return y


@pytest.mark.default_rows('swiglu')
@pytest.mark.parametrize('activation', ['relu', 'swiglu'])
def test_evaluation_sums_likeliest_experts(activation):
    """Gates are not normalized over them; no token is dropped, and there is no noise."""
    layer = moe(activation)
    x, params, stats = draw(layer)
    outputs = numpy_experts(params, np.float64(x), activation == 'swiglu')
    expected = numpy_mixture(numpy_router(params, x), outputs, capacity=TOKENS)
    np.testing.assert_allclose(evaluate(layer, params, stats, x), expected, rtol=1e-4, atol=1e-5)


def test_renormalised_gates_match_reference():
    """With biases of the router and of each expert, as in gpt-oss. Catches gates divided by the sum
    over all experts, a bias shared by all, and a router that chooses without its bias.
    """
    layer = moe('swiglu', gates='renormalised', bias=True, router_noise=0.0)
    rng = np.random.default_rng(1)
    x = jnp.float32(rng.normal(size=(TOKENS, WIDTH)))
    params, specs = split_boxes(jax.jit(layer.init)(jax.random.key(0), x)['params'])
    biases = {name for name, spec in specs.items() if spec.role == 'vector'}
    assert biases == {'router_bias', 'up_bias', 'gate_bias', 'down_bias'}
    params |= {name: jnp.float32(rng.normal(size=params[name].shape)) for name in biases}
    p = {name: np.float64(value) for name, value in params.items()}
    logits_ME = np.float64(x) @ p['router'] + p['router_bias']
    expected = np.zeros((TOKENS, WIDTH))
    for token, logits_E in enumerate(logits_ME):
        chosen = np.argsort(-logits_E)[:2]
        gates = np.exp(logits_E[chosen]) / np.exp(logits_E[chosen]).sum()
        for gate, e in zip(gates, chosen, strict=True):
            up, gated = (x[token] @ p[n][e] + p[f'{n}_bias'][e] for n in ('up', 'gate'))
            hidden = gated / (1 + np.exp(-gated)) * up
            expected[token] += gate * (hidden @ p['down'][e] + p['down_bias'][e])
    np.testing.assert_allclose(evaluate(layer, params, {}, x), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.full
def test_training_without_noise_equals_evaluation():
    """If no expert is full; and no key is carried."""
    layer = moe(expert_capacity=10.0, router_noise=0.0)
    x, params, stats = draw(layer)
    assert not stats
    trained, _ = train(layer, params, stats, x)
    np.testing.assert_array_equal(trained, evaluate(layer, params, stats, x))


@pytest.mark.full
@pytest.mark.parametrize('expert_capacity', [0.4, 1.2, 10.0])
def test_training_drops_tokens_beyond_capacity(expert_capacity):
    """With noise of deviation 1/E from the layer's own key. Catches a drop by likelihood, or a
    capacity that ignores the number of choices.
    """
    layer = moe(expert_capacity=expert_capacity)
    x, params, stats = draw(layer)
    params['router'] = params['router'].at[:, 0].set(0).at[:, 1].add(0.5)
    noise_key, next_key = jax.random.split(key_from_int(stats[STATS]['key']))
    noise = np.asarray(jax.random.normal(noise_key, (TOKENS, EXPERTS))) / EXPERTS
    probs = numpy_router(params, x, noise)
    capacity = int(np.ceil(expert_capacity * 2 * TOKENS / EXPERTS))
    expected = numpy_mixture(probs, numpy_experts(params, np.float64(x), gated=False), capacity)
    y, updated = train(layer, params, stats, x)
    np.testing.assert_allclose(y, expected, rtol=1e-4, atol=1e-5)
    np.testing.assert_array_equal(updated[STATS]['key'], key_to_int(next_key))
    shares = np.zeros(EXPERTS)
    for p in probs:
        shares[np.argsort(-p)[:2]] += 1 / (2 * TOKENS)
    balance = EXPERTS * np.sum(probs.mean(0) * shares)
    np.testing.assert_allclose(updated[AUXILIARY]['balance_loss'][0], balance, rtol=1e-5)


def test_balance_counts_choices():
    """E sum_e mean(p_e) share_e in float64, 1 if all experts are alike; padding does not count.
    Catches shares of tokens, which sum to k instead of 1, and means over padding.
    """
    rng = np.random.default_rng(0)
    probs, valid = rng.dirichlet(np.ones(EXPERTS), TOKENS), np.arange(TOKENS)[:, None] >= 3
    chosen = np.argsort(-probs)[:, :2]
    mask = np.eye(EXPERTS)[chosen].sum(1) * valid
    shares = np.bincount(chosen[3:].ravel(), minlength=EXPERTS) / chosen[3:].size
    expected = EXPERTS * np.sum(probs[3:].mean(0) * shares)
    layer = moe(experts_per_token=2)
    with jax.enable_x64(True):
        np.testing.assert_allclose(layer.compute_balance(probs, mask, valid), expected, rtol=1e-12)
        alike = np.full((TOKENS, EXPERTS), 1 / EXPERTS)
        np.testing.assert_allclose(layer.compute_balance(alike, 2 * alike, None), 1.0, rtol=1e-12)


def test_rows_have_separate_capacity():
    """In training, with full experts. Catches rows that use another row's or expert's capacity."""
    layer = moe(expert_capacity=0.5, router_noise=0.0, capacity_over='row')
    x, params, stats = draw(layer)
    rows_BTD = x.reshape(2, TOKENS // 2, WIDTH)
    y_BTD, _ = train(layer, params, stats, rows_BTD)
    for row_TD, y_TD in zip(rows_BTD, y_BTD, strict=True):
        single_row, _ = train(layer, params, stats, row_TD[None])
        np.testing.assert_allclose(y_TD, single_row[0], rtol=1e-5, atol=1e-6)
    assert np.abs(y_BTD).max() > 0.1


@pytest.mark.full
def test_evaluation_is_independent_by_token():
    """Checked by gradient; in training a token depends on earlier tokens, which may use up
    capacity.
    """
    layer = moe(expert_capacity=0.5)
    x, params, stats = draw(layer)
    jacobian = jax.jacrev(lambda x: evaluate(layer, params, stats, x).sum(-1))(x)
    depends = np.abs(jacobian).max(-1) > 0
    np.testing.assert_array_equal(depends, np.eye(TOKENS, dtype=bool))
    params['router'] = jnp.zeros_like(params['router']).at[0].set(jnp.arange(4.0) * 5)
    ones = x.at[:, 0].set(1.0)
    before, _ = train(layer, params, stats, ones)
    after, _ = train(layer, params, stats, ones.at[:4, 0].set(-1.0))
    assert np.abs(before[4:] - after[4:]).max() > 1e-3
    last, _ = train(layer, params, stats, ones.at[8:, 0].set(-1.0))
    np.testing.assert_array_equal(last[:8], before[:8])


@pytest.mark.full
def test_padding_uses_no_capacity():
    layer = moe(expert_capacity=0.5)
    x, params, stats = draw(layer)
    valid = jnp.ones((TOKENS, 1)).at[:4].set(0.0)
    y, updated = train(layer, params, stats, x, valid)
    changed, changed_stats = train(layer, params, stats, x.at[:4].multiply(-3.0), valid)
    np.testing.assert_array_equal(changed[4:], y[4:])
    assert updated[AUXILIARY]['balance_loss'][0] == changed_stats[AUXILIARY]['balance_loss'][0]


@pytest.mark.full
def test_parameters_stay_float32():
    layer = moe(dtype=jnp.bfloat16)
    x, params, stats = draw(layer)
    assert all(w.dtype == jnp.float32 for w in params.values())
    y, _ = train(layer, params, stats, x.astype(jnp.bfloat16))
    assert y.dtype == jnp.bfloat16
    exact, _ = train(moe(), params, stats, x)
    assert 0 < np.abs(np.float32(y) - exact).max() < 0.05 * np.abs(exact).max()


def test_dense_mlp_with_biases():
    layer = MLP(HIDDEN, ACTIVATIONS['relu'], REFERENCE, jnp.float32, bias=True)
    x = jnp.float32(np.random.default_rng(0).normal(size=(TOKENS, WIDTH)))
    params, specs = split_boxes(layer.init(jax.random.key(0), x)['params'])
    assert specs['up_bias'].role == specs['down_bias'].role == 'vector'
    params |= {'up_bias': jnp.arange(5.0), 'down_bias': jnp.arange(6.0)}
    up, down = np.asarray(params['up']), np.asarray(params['down'])
    expected = np.maximum(np.asarray(x) @ up + np.arange(5.0), 0) @ down + np.arange(6.0)
    np.testing.assert_allclose(layer.apply({'params': params}, x), expected, rtol=1e-5, atol=1e-5)


def selu_layer(kind, alpha_dropout):
    """Builds a layer without a limit of tokens, so that calls differ only in the dropout."""
    row, options = ACTIVATIONS['selu'], {'expert_capacity': 10.0} if kind == 'moe' else {}
    dropout = row.dropout(alpha_dropout=alpha_dropout)
    return MLPS[kind](HIDDEN, row, REFERENCE, jnp.float32, dropout, **options)


@pytest.mark.full
@pytest.mark.parametrize('kind', MLPS)
def test_alpha_dropout_advances_its_key(kind):
    """Evaluation has no dropout; each step drops other activations; rate 0 carries nothing. Catches
    a constant key, and a key that no checkpoint would hold.
    """
    plain, layer = selu_layer(kind, 0.0), selu_layer(kind, 0.3)
    x, params, stats = draw(plain)
    _, _, with_key = draw(layer)
    assert with_key[STATS].keys() - stats.get(STATS, {}).keys() == {'dropout_key'}
    np.testing.assert_array_equal(
        evaluate(layer, params, with_key, x), evaluate(plain, params, stats, x)
    )
    first, later = train(layer, params, with_key, x)
    repeated, _ = train(layer, params, with_key, x)
    np.testing.assert_array_equal(first, repeated)
    next_stats = {STATS: with_key[STATS] | {'dropout_key': later[STATS]['dropout_key']}}
    second, _ = train(layer, params, next_stats, x)
    assert np.abs(first - second).max() > 0.05
    assert np.abs(first - train(plain, params, stats, x)[0]).max() > 0.05


@pytest.mark.full
def test_alpha_dropout_matches_equation():
    """Reference: selu(x W_up), a share of it set to its infimum, scaled by a, shifted by b, then
    W_down.
    """
    rate, infimum = 0.3, -1.7580993408473766
    layer = selu_layer('dense', rate)
    x, params, stats = draw(layer)
    y, _ = train(layer, params, stats, x)
    dropout_key, _ = jax.random.split(key_from_int(stats[STATS]['dropout_key']))
    dropped = np.asarray(jax.random.bernoulli(dropout_key, rate, (TOKENS, HIDDEN)))
    assert 0.1 < dropped.mean() < 0.5
    hidden = np.float64(jax.nn.selu(x @ params['up']))
    a = ((1 - rate) * (1 + rate * infimum**2)) ** -0.5
    hidden = a * np.where(dropped, infimum, hidden) - a * rate * infimum
    np.testing.assert_allclose(y, hidden @ np.float64(params['down']), rtol=1e-4, atol=1e-4)


@pytest.mark.default_rows('layer1')
@pytest.mark.parametrize('layer', [moe(), MLP(HIDDEN, ACTIVATIONS['relu'], REFERENCE, jnp.float32)])
def test_rows_share_capacity(layer):
    """[B, T, D] gives the same as its tokens in a single row; experts take them in order."""
    x, params, stats = draw(layer)
    valid = jnp.ones((TOKENS, 1)).at[:4].set(0.0)
    expected, updated = train(layer, params, stats, x, valid)
    shape = (3, TOKENS // 3)
    y, reshaped_stats = train(
        layer, params, stats, x.reshape(*shape, WIDTH), valid.reshape(*shape, 1)
    )
    np.testing.assert_array_equal(y, expected.reshape(y.shape))
    assert_trees_close(reshaped_stats, updated, rtol=0, atol=0)


@pytest.mark.full
def test_only_expert_weights_have_expert_axis():
    """The router reads every token, so it counts fully."""
    specs = split_boxes(
        moe('swiglu').init(jax.random.key(0), jnp.ones((1, TOKENS, WIDTH)))['params']
    )[1]
    assert {name: spec.axes for name, spec in specs.items()} == {
        'router': ('embed', 'router'),
        'up': ('expert', 'embed', 'mlp'),
        'gate': ('expert', 'embed', 'mlp'),
        'down': ('expert', 'mlp', 'embed'),
    }


def test_every_mlp_is_tested_here():
    assert {'dense': MLP, 'moe': MoE, 'random_features': RandomFeatures} == MLPS


class TestRandomFeatures:
    @pytest.mark.parametrize('name', FEATURES)
    def test_wide_layer_approximates_relu_kernel(self, name):
        """Reference: |x| |w| (sin t + (pi - t) cos t) / 2 pi, with W_down the mean over features of
        W. Catches features of another variance, and features without a sign.
        """
        rng, n = np.random.default_rng(0), 1 << 15
        x, w = rng.normal(size=(2, 4, 4))
        layer = RandomFeatures(n, ACTIVATIONS['relu'], REFERENCE, jnp.float32, features=name)
        params, specs = split_boxes(layer.init(jax.random.key(0), jnp.float32(x))['params'])
        assert specs['up'].frozen and not specs['down'].frozen
        params['down'] = np.maximum(w @ np.float64(params['up']), 0).T / n
        actual = np.float64(layer.apply({'params': params}, jnp.float32(x)))
        lengths = np.linalg.norm(x, axis=1)[:, None] * np.linalg.norm(w, axis=1)
        t = np.arccos(x @ w.T / lengths)
        expected = lengths * (np.sin(t) + (np.pi - t) * np.cos(t)) / (2 * np.pi)
        assert np.abs(actual - expected).max() < 0.03 * lengths.max()

    def test_orthogonal_features_have_gaussian_lengths(self):
        up_DF = np.float64(orthogonal_features(jax.random.key(0), (16, 40)))
        lengths = np.linalg.norm(up_DF, axis=0)
        cosines = up_DF.T @ up_DF / np.outer(lengths, lengths)
        for start, stop in ((0, 16), (16, 32), (32, 40)):
            block = cosines[start:stop, start:stop]
            np.testing.assert_allclose(block, np.eye(stop - start), atol=1e-5)
        assert np.abs(cosines[:16, 16:]).max() > 0.3
        assert np.mean(lengths**2) == pytest.approx(16, rel=0.2) and np.ptp(lengths) > 1

    def test_only_second_product_has_bias(self):
        layer = RandomFeatures(HIDDEN, ACTIVATIONS['relu'], REFERENCE, jnp.float32, bias=True)
        params, _ = split_boxes(layer.init(jax.random.key(0), jnp.ones((TOKENS, WIDTH)))['params'])
        assert params.keys() == {'up', 'down', 'down_bias'}

    @pytest.mark.parametrize('reparam', ['none', 'weight_norm', 'lora'])
    def test_reparametrisations_do_not_train_features(self, reparam):
        changes = {'model.mlp': 'random_features', 'model.reparam': reparam}
        description = tiny_learner(checked_config(changes)).description
        is_trained = named_leaves(description.trainable)
        assert {path for path, trains in is_trained.items() if not trains} == {'layers/mlp/up'}
        assert ('layers/mlp/down' in is_trained) == (reparam == 'none')

    @pytest.mark.full
    def test_orthogonal_init_keeps_features(self):
        """Catches an initialisation that changes frozen weights."""
        changes = {'model.mlp': 'random_features', 'scaling.init': 'orthogonal'}
        params = named_leaves(initial_state(checked_config(changes)).params)
        up, down = (np.linalg.svd(params[f'layers/mlp/{name}'][0])[1] for name in ('up', 'down'))
        assert np.ptp(up) > 0.5 * up.max() and np.ptp(down) < 1e-4 * down.max()

    def test_gate_is_rejected(self):
        with pytest.raises(ValueError, match='needs a second one for its gate'):
            checked_config({'model.mlp': 'random_features', 'model.activation': 'swiglu'})
