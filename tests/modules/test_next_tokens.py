"""Losses of several next tokens. Reference: float64 over packed documents. Property: documents do
not see each other's tokens. Equivalence: the weight 1 is no option; chunks equal the whole.
"""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from lm.training.state import make_hyper
from lm.training.step import (
    TOKEN_WEIGHTS,
    TRAINING,
    add_token_weights,
    apply_loss,
    make_train_step,
    target_weights,
    token_sums,
)
from modules.kernels.cross_entropy import base
from modules.kernels.matmul import direct
from modules.losses import (
    LOSSES,
    chunk_loss,
    logits_loss,
    parse_token_weights,
    shift_targets,
    token_weights_at,
    weigh_next_tokens,
)
from modules.products import Readout
from tests.helpers import (
    BOS,
    assert_trees_close,
    checked_config,
    initial_state,
    packed_batch,
    tiny_config,
    tiny_learner,
)

PUBLISHED = '1 0.5 0.25:0, 1 0.5:0, 1'
SEGMENTS = jnp.int32([[1, 1, 1, 1, 2, 2, 2, 2, 2], [1, 1, 1, 2, 2, 3, 3, 0, 0]])
TOKENS = jnp.int32([[0, 5, 3, 4, 0, 2, 6, 6, 1], [0, 2, 4, 0, 3, 0, 5, 0, 0]])
VOCAB, WIDTH = 7, 4


def test_weights_match_published_code():
    """The schedule of train_gpt_medium.py, whose stages are thirds."""
    stages = parse_token_weights('loss.token_weights', PUBLISHED)
    for step in range(31):
        x = step / 30
        if x < 1 / 3:
            expected = [1.0, 0.5, 0.25 * (1 - 3 * x)]
        elif x < 2 / 3:
            expected = [1.0, 0.5 * (1 - (3 * x - 1)), 0.0]
        else:
            expected = [1.0, 0.0, 0.0]
        actual = jax.jit(functools.partial(token_weights_at, stages))(step / 30 + 1e-6)
        np.testing.assert_allclose(actual, expected, atol=1e-5)


@pytest.mark.parametrize('text', ['', '1,', '0.5:0:1', '0 1', '1 x', '1 -1', '1 nan', '1 inf'])
def test_bad_weights_are_refused(text):
    with pytest.raises(ValueError, match=r'loss\.token_weights: .*For example'):
        parse_token_weights('loss.token_weights', text)


def draw():
    rng = np.random.default_rng(0)
    x = jnp.float32(rng.normal(size=(2, 8, WIDTH)))
    return x, Readout(jnp.float32(rng.normal(size=(WIDTH, VOCAB))), None, 0.0, direct, jnp.float32)


def compute_sums(x, readout, tokens=TOKENS, chunk=0, weights=(1.0, 0.5, 0.25), row=None):
    row = row or LOSSES['cross_entropy']
    batch = {'tokens': tokens, 'segments': SEGMENTS}
    targets = shift_targets(tokens[:, 1:], target_weights(batch, 0), SEGMENTS, len(weights))
    loss = chunk_loss(weigh_next_tokens(row), chunk)
    numbers = {'token_weights': jnp.float32(weights), 'z_loss': 1e-2, 'label_smoothing': 0.1}
    return loss(x, readout, *targets, **numbers)


def test_loss_matches_reference_on_packed_documents():
    """Sums over positions t and k of w_k l(logits_t, token_(t + k)), in float64. Catches targets
    beyond a document, a row or padding, BOS as a target, and a shift by one.
    """
    x, readout = draw()
    logits = np.float64(x) @ np.float64(readout.weight_DV)
    log_z = np.log(np.exp(logits).sum(-1))
    objective = ce = 0.0
    pairs = 0
    for b in range(2):
        for t in range(8):
            for k, weight in enumerate((1.0, 0.5, 0.25), 1):
                if t + k > 8 or SEGMENTS[b, t + k] != SEGMENTS[b, t] or SEGMENTS[b, t] == 0:
                    continue
                if TOKENS[b, t + k] == 0:
                    continue
                loss = log_z[b, t] - logits[b, t, TOKENS[b, t + k]]
                smooth = log_z[b, t] - logits[b, t].mean()
                objective += weight * (0.9 * loss + 0.1 * smooth + 1e-2 * log_z[b, t] ** 2)
                ce += loss * (k == 1)
                pairs += 1
    sums = compute_sums(x, readout)
    assert pairs == 11 + 6 + 3
    np.testing.assert_allclose(sums['objective'], objective, rtol=1e-5)
    np.testing.assert_allclose(sums['ce'], ce, rtol=1e-5)


def test_chunks_and_kernels_equal_the_whole():
    """Values and gradients. Catches chunks along the axis of next tokens."""
    x, readout = draw()

    def objective(x, weight_DV, chunk, row):
        return compute_sums(x, readout.replace(weight_DV=weight_DV), chunk=chunk, row=row)[
            'objective'
        ]

    grad = jax.value_and_grad(objective, argnums=(0, 1))
    expected = grad(x, readout.weight_DV, 0, None)
    fused = logits_loss(base.cross_entropy)  # as kernels are called
    for chunk, row in ((5, None), (0, fused), (5, fused)):
        actual = grad(x, readout.weight_DV, chunk, row)
        assert_trees_close(actual, expected, rtol=1e-5, atol=1e-5)


def test_documents_do_not_leak():
    """The gradient in the logits of a document does not depend on the tokens of another."""
    x, readout = draw()

    def gradient(tokens):
        return jax.grad(lambda x: compute_sums(x, readout, tokens)['objective'])(x)

    before = gradient(TOKENS)
    after = gradient(TOKENS.at[0, 5:].set(jnp.int32([1, 1, 2, 3])))
    np.testing.assert_array_equal(before[0, :4], after[0, :4])
    assert np.abs(before[0, 4:] - after[0, 4:]).max() > 1e-3


def test_targets_stay_in_their_document_without_bos():
    """Catches a comparison with the token before the target."""
    segments, labels = jnp.int32([[1, 1, 2, 2, 2, 2]]), jnp.int32([[5, 6, 7, 8, 9]])
    labels, weights = shift_targets(labels, jnp.ones((1, 5)), segments, 3)
    np.testing.assert_array_equal(weights[0, :, 1], [0, 0, 1, 1, 0])
    np.testing.assert_array_equal(weights[0, :, 2], [0, 0, 1, 0, 0])
    np.testing.assert_array_equal(labels[0, 2], [7, 8, 9])


def lower_step(changes):
    config = tiny_config(changes)
    step = jax.jit(make_train_step(tiny_learner(config)))
    return step.lower(initial_state(config), packed_batch(), make_hyper(config)).as_text()


def test_weight_one_is_no_option():
    assert lower_step({'loss.token_weights': '1, 1'}) == lower_step({})


def test_training_weighs_next_tokens_and_evaluation_does_not():
    """One program serves the run; the last stage is the plain loss. Catches weights of another
    step, and evaluation on several tokens.
    """
    config = checked_config({'loss.token_weights': '1 0.5:0, 1', 'loss.chunk': 16})
    learner, state, batch = tiny_learner(config), initial_state(config), packed_batch()
    hyper = make_hyper(config)
    assert TOKEN_WEIGHTS not in hyper

    @jax.jit
    def train_loss(step):
        numbers = add_token_weights(learner, hyper, step)
        variables = learner.variables(state.weights)
        return apply_loss(learner, variables, batch, numbers, TRAINING)[0]

    steps = config.train.steps
    start, quarter, end = (train_loss(jnp.int32(s)) for s in (0, steps // 4, steps // 2))
    plain = jax.jit(lambda: token_sums(learner, learner.variables(state.weights), batch, hyper))()
    np.testing.assert_allclose(end['objective'], plain['objective'], rtol=1e-6)
    extra = start['objective'] - plain['objective']
    assert extra > 0.3 * plain['objective']
    share = 1 - 2 * (steps // 4) / steps
    np.testing.assert_allclose(quarter['objective'] - plain['objective'], share * extra, rtol=1e-4)
    for sums in (start, quarter, end):
        np.testing.assert_allclose(sums['ce'], plain['ce'], rtol=1e-6)
        assert sums['tokens'] == plain['tokens'] == target_weights(batch, BOS).sum()


@pytest.mark.parametrize(
    ('changes', 'message'),
    [
        ({'data.objective': 'causal:0.5+infill:0.5'}, 'infill, which changes texts'),
        ({'loss.name': 'spherical_z'}, 'computed from sums of logits'),
        ({'loss.token_weights': '1 ' * 99}, 'Name fewer'),
    ],
)
def test_losses_without_next_tokens_are_refused(changes, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        checked_config({'loss.token_weights': '1 0.5'} | changes)
