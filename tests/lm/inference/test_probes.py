"""Probes of a checkpoint's model. Equivalence: scanned = unrolled, and the logits of training.
Property: causal by gradient; the gradient of a shift is that of the activation.
"""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from lm.inference.probes import (
    forward_diagnostics,
    gradients,
    input_moments,
    input_squares,
    join_blocks,
    logit_lens,
    next_token_loss,
    observe,
    split_blocks,
)
from lm.model.block import BLOCK_ACTIVATIONS
from lm.model.pattern import block_groups
from modules.params import named_leaves
from tests.helpers import (
    VOCAB,
    assert_trees_close,
    checked_config,
    initial_state,
    tiny_batch,
    tiny_learner,
)

TOKENS = tiny_batch(rows=2)['tokens'][:, :-1]
B, T = TOKENS.shape
LAYERS = 2
CASES = {  # one group of blocks, two, two streams, a map of the weights
    'pre': {},
    'mix': {'model.placement': 'mix', 'model.mix_fraction': 0.5},
    'resi_dual': {'model.placement': 'resi_dual'},
    'hybrid_star': {'model.placement': 'hybrid_star', 'model.reparam': 'weight_norm'},
}


@functools.cache
def observe_case(case, scan=True):
    """Returns (learner, weights, logits, activations)."""
    changes = {'model.n_layers': LAYERS, 'model.scan_layers': scan}
    config = checked_config(CASES[case] | changes)
    learner, weights = tiny_learner(config), initial_state(config).weights
    run = jax.jit(functools.partial(observe, learner))
    return learner, weights, *run(weights, TOKENS)


@functools.cache
def case_gradients(case):
    learner, weights, *_ = observe_case(case)
    return jax.jit(lambda w: gradients(learner, w, TOKENS))(weights)


@pytest.mark.full
@pytest.mark.parametrize('case', CASES)
def test_all_blocks_are_observed_scanned_or_not(case):
    *_, logits, activations = observe_case(case)
    shapes = {name: x.shape for name, x in activations.items()}
    stream, stacked = (B, T, 16), (LAYERS, B, T, 16)
    assert shapes == {
        'embedding': stream,
        'after_attention': stacked,
        'after_mlp': stacked,
        'final': stream,
    }
    assert_trees_close(activations, observe_case(case, scan=False)[3], rtol=1e-5, atol=1e-5)
    assert logits.shape == (B, T, VOCAB)


@pytest.mark.full
@pytest.mark.parametrize('case', CASES)
def test_final_activations_give_logits(case):
    learner, weights, logits, activations = observe_case(case)

    @functools.partial(jax.jit)
    def in_training(weights, final):
        variables = learner.variables(weights)
        x_BTD, readout = learner.model.apply(variables, TOKENS, method='activations')
        return x_BTD, readout(final)

    x_BTD, final_logits = in_training(weights, activations['final'])
    np.testing.assert_allclose(activations['final'], x_BTD, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(final_logits, logits, rtol=1e-5, atol=1e-5)


@pytest.mark.full
def test_logit_lens_is_norm_and_readout_per_block():
    learner, weights, logits, activations = observe_case('pre')
    lens_logits = jax.jit(functools.partial(logit_lens, learner))(weights, TOKENS)
    np.testing.assert_allclose(lens_logits[-1], logits, rtol=1e-5, atol=1e-5)
    x_BTD = activations['after_mlp'][0]
    normed = x_BTD / jnp.sqrt(jnp.mean(x_BTD**2, -1, keepdims=True) + 1e-6)
    scaled = normed * weights.params['final_norm']['scale'][None, None]
    by_hand = scaled @ weights.params['readout']
    np.testing.assert_allclose(lens_logits[0], by_hand, rtol=1e-4, atol=1e-5)


@pytest.mark.full
def test_head_diagnostics_match_definitions():
    """Entropy is positive as a mean over queries, although the first query sees one token."""
    learner, weights, *_, activations = observe_case('pre')
    diagnostics = jax.jit(functools.partial(forward_diagnostics, learner))(weights, TOKENS)
    N = learner.recipe.model.n_heads
    assert diagnostics['attention_entropy'].shape == (LAYERS, N)
    assert np.all(
        (diagnostics['attention_entropy'] > 0) & (diagnostics['attention_entropy'] < np.log(T))
    )
    rms_L = jnp.sqrt(jnp.mean(activations['after_mlp'] ** 2, (1, 2, 3)))
    np.testing.assert_allclose(diagnostics['residual_rms'], rms_L, rtol=1e-5)


def test_activations_match_definitions():
    """The first is the table's rows; each block adds to the one before; the last is normalized."""
    _, weights, _, activations = observe_case('pre')
    rows = weights.params['embedding'][TOKENS]
    np.testing.assert_allclose(activations['embedding'], rows, rtol=1e-6)
    stream = activations['after_mlp'][-1]
    rms = jnp.sqrt(jnp.mean(stream**2, -1, keepdims=True) + 1e-6)
    np.testing.assert_allclose(activations['final'], stream / rms, rtol=1e-5)
    path = [activations['embedding']]
    for pair in zip(activations['after_attention'], activations['after_mlp'], strict=True):
        path += pair
    for before, after in itertools.pairwise(path):
        assert 0.01 < float(jnp.abs(after - before).mean()) < 10


@pytest.mark.full
@pytest.mark.parametrize('case', CASES)
def test_split_blocks_inverts_join_blocks(case):
    learner, _, _, activations = observe_case(case)
    config = learner.recipe
    again = join_blocks(config, split_blocks(config, activations))
    jax.tree.map(np.testing.assert_array_equal, again, activations)
    counts = [len(split_blocks(config, activations)[g.name]['after_mlp']) for g in
              block_groups(config)]  # fmt: skip
    assert counts == [group.count for group in block_groups(config)]


@pytest.mark.full
@pytest.mark.parametrize('case', CASES)
def test_gradients_cover_all_weights_and_activations(case):
    """Catches blocks that a scan leaves out, and a single shift for all."""
    _, weights, _, activations = observe_case(case)
    by_weight, by_activation = case_gradients(case)
    assert jax.tree.map(jnp.shape, by_weight) == jax.tree.map(jnp.shape, weights.params)
    assert jax.tree.map(jnp.shape, by_activation) == jax.tree.map(jnp.shape, activations)
    for path, gradient in named_leaves(by_weight).items():
        assert np.abs(gradient).max() > 0, path
    for name in ('after_attention', 'after_mlp'):
        sizes = np.abs(by_activation[name]).max((1, 2, 3))
        assert np.all(sizes > 0) and len(set(sizes.tolist())) == LAYERS, name


@pytest.mark.full
def test_activation_gradient_matches_finite_difference():
    learner, weights, _, activations = observe_case('mix')
    _, by_activation = case_gradients('mix')
    rng = np.random.default_rng(0)

    @jax.jit
    def loss(shifts):
        return next_token_loss(observe(learner, weights, TOKENS, shifts)[0], TOKENS)

    for name, x in activations.items():
        direction = jnp.float32(rng.normal(size=x.shape))
        zeros = jax.tree.map(jnp.zeros_like, activations)
        up, down = (loss(zeros | {name: sign * 1e-2 * direction}) for sign in (1, -1))
        expected = jnp.vdot(by_activation[name], direction)
        np.testing.assert_allclose((up - down) / 2e-2, expected, rtol=0.02, atol=2e-4, err_msg=name)


@pytest.mark.full
def test_final_activation_gradient_is_closed_form():
    """(softmax - one-hot) W' over the targets. Catches a shift that counts twice."""
    _, weights, logits, _ = observe_case('pre')
    expected = jax.nn.softmax(logits) - jax.nn.one_hot(jnp.roll(TOKENS, -1, 1), VOCAB)
    expected = expected.at[:, -1].set(0) @ weights.params['readout'].T / (B * (T - 1))
    np.testing.assert_allclose(case_gradients('pre')[1]['final'], expected, rtol=1e-4, atol=1e-6)


@pytest.mark.full
def test_gradients_are_causal():
    """For the logits of token t, no later activation matters, and activation t does."""
    learner, weights, *_ = observe_case('pre')
    at = 3

    @jax.jit
    def by_activation():
        return gradients(learner, weights, TOKENS, lambda logits, _: logits[:, at].sum())[1]

    for name, gradient in by_activation().items():
        size = np.abs(gradient).max((0, 1, 3) if name in BLOCK_ACTIVATIONS else (0, 2))
        assert np.all(size[at + 1 :] == 0) and size[at] > 0, name
        assert name == 'final' or np.all(size[: at + 1] > 0), name


def test_loss_predicts_next_token():
    logits = jnp.zeros((1, 3, 4)).at[0, 0, 2].set(1.0)
    first = -jax.nn.log_softmax(logits[0, 0])[2]
    loss = next_token_loss(logits, jnp.array([[1, 2, 3]]))
    np.testing.assert_allclose(loss, (first + np.log(4)) / 2, rtol=1e-6)


@pytest.mark.parametrize('scan', [True, pytest.param(False, marks=pytest.mark.full)])
def test_input_squares_match_matrix_inputs(scan):
    """Without norms, matrices read the stream; in rows of one token attention returns its value.

    Catches another layer's inputs, inputs of another product, and a sum instead of a mean.
    """
    config = checked_config(
        {'model.norm': 'none', 'model.n_layers': LAYERS, 'model.scan_layers': scan}
    )
    learner, weights = tiny_learner(config), initial_state(config).weights
    tokens_B1 = TOKENS.reshape(-1, 1)
    squares = jax.jit(functools.partial(input_squares, learner))(weights, tokens_B1)
    _, streams = jax.jit(functools.partial(observe, learner))(weights, tokens_B1)
    entering = jnp.concatenate([streams['embedding'][None], streams['after_mlp'][:-1]])
    layers, between = weights.params['layers'], streams['after_attention']
    inputs = {
        'attention/query': entering,
        'attention/key': entering,
        'attention/value': entering,
        'attention/out': jnp.einsum('lbtd,ldnh->lbtnh', entering, layers['attention']['value']),
        'mlp/up': between,
        'mlp/down': jax.nn.gelu(jnp.einsum('lbtd,ldf->lbtf', between, layers['mlp']['up'])),
    }
    assert squares.keys() == {f'layers/{name}' for name in inputs}
    for name, x in inputs.items():
        expected = jnp.mean(x**2, (1, 2))
        np.testing.assert_allclose(squares[f'layers/{name}'], expected, rtol=1e-4, err_msg=name)
    moments = jax.jit(functools.partial(input_moments, learner))(weights, tokens_B1)
    assert moments.keys() == squares.keys()
    for name, x in inputs.items():
        flat_x = x.reshape(LAYERS, B * T, -1)
        expected = jnp.einsum('lmi,lmj->lij', flat_x, flat_x) / (B * T)
        moment = moments[f'layers/{name}']
        np.testing.assert_allclose(moment, expected, rtol=1e-4, atol=1e-6, err_msg=name)
