"""Influence scores. Reference: explicit gradients of two checkpoints of a model."""

import functools
import importlib
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from lm.devices.mesh import make_mesh
from lm.inference.load import load
from lm.inference.probes import gradients
from tests.helpers import BOS, initial_state, tiny_config, tiny_learner

suite = importlib.import_module('eval.suites.influence')  # the package has the function so

CONFIG = tiny_config({'optim.schedule': 'warmup_cosine', 'model.n_layers': 1})
LENGTHS = (8, 5)  # the second is padded
RATES = [CONFIG.optim.lr * 0.5 * (1 + np.cos(np.pi * (step / 20))) for step in (4, 20)]


@functools.cache
def rows(seed=0):
    tokens, segments = np.zeros((2, 2, 9), np.int32)
    rng = np.random.default_rng(seed)
    for i, length in enumerate(LENGTHS):
        tokens[i, 1 : length + 1], segments[i, : length + 1] = rng.integers(1, 16, length), 1
    assert BOS == 0
    return {'tokens': tokens, 'segments': segments}


@functools.cache
def weights(seed):
    return initial_state(CONFIG, seed).weights


@functools.cache
def gradient_program():
    """One program for all lengths: the model is causal, so that later tokens change nothing."""

    def run(run_weights, tokens_1T, is_target_T):
        def true_T(logits_BTV):
            return logits_BTV[0, jnp.arange(8), tokens_1T[0, 1:]]

        def mean_loss(logits_BTV, _):
            losses_T = jax.nn.logsumexp(logits_BTV[0], -1) - true_T(logits_BTV)
            return jnp.sum(losses_T * is_target_T) / jnp.sum(is_target_T)

        def sum_target_logits(logits_BTV, _):
            return jnp.sum(true_T(logits_BTV) * is_target_T)

        learner = tiny_learner(CONFIG)
        of_loss, _ = gradients(learner, run_weights, tokens_1T[:, :-1], mean_loss)
        _, of_logits = gradients(learner, run_weights, tokens_1T[:, :-1], sum_target_logits)
        return of_loss, of_logits['embedding'][0]

    return jax.jit(run)


def explicit(seed, i, row_seed=0):
    """Returns the gradients (of the loss in all weights, flat; of logits in embeddings [T, D])."""
    length, tokens_1T = LENGTHS[i], rows(row_seed)['tokens'][i : i + 1]
    of_loss, in_embedding = gradient_program()(weights(seed), tokens_1T, np.arange(8) < length)
    flat = np.concatenate([np.ravel(leaf) for leaf in jax.tree.leaves(of_loss)])
    return flat.astype(np.float64), np.asarray(in_embedding, np.float64)[:length]


@pytest.fixture(scope='module')
def scores():
    """Scores from the checkpoints of steps 4 and 20, with the weights of seeds 0 and 1."""
    checkpoint = types.SimpleNamespace(
        learner=tiny_learner(CONFIG),
        recipe=CONFIG,
        mesh=make_mesh(CONFIG.mesh, jax.devices()[:1]),
        weights=weights(1),
        step=20,
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(suite, 'load_weights', lambda _, step: {4: weights(0)}[step])
        patch.setattr(suite, 'GROUP_ROWS', 3)  # one row is padding
        return suite.score_documents(checkpoint, [4, 20], rows(), rows(1))


@pytest.mark.full
def test_vog_matches_explicit_gradients(scores):
    for i in range(2):
        explicit_gradients = np.stack([explicit(seed, i)[1] for seed in (0, 1)])
        assert scores['vog'][i] == pytest.approx(
            np.var(explicit_gradients, axis=0).mean(), rel=1e-4
        )


@pytest.mark.full
def test_tracin_matches_explicit_gradients(scores):
    for i in range(2):
        explicit_gradients = [explicit(seed, i)[0] for seed in (0, 1)]
        held_out = [
            np.mean([explicit(seed, j, row_seed=1)[0] for j in (0, 1)], 0) for seed in (0, 1)
        ]
        itself = sum(rate * g @ g for rate, g in zip(RATES, explicit_gradients, strict=True))
        assert scores['tracin_self'][i] == pytest.approx(itself, rel=1e-4)
        along = sum(r * g @ v for r, g, v in zip(RATES, explicit_gradients, held_out, strict=True))
        assert scores['tracin_validation'][i] == pytest.approx(along, rel=1e-3)


def test_el2n_is_the_error_norm():
    logits_TV = np.random.default_rng(0).normal(0, 2, (5, 7)).astype(np.float32)
    p_TV = np.exp(logits_TV) / np.exp(logits_TV).sum(1, keepdims=True)
    labels_T = np.array([0, 6, 3, 3, 1])
    expected = np.linalg.norm(p_TV - np.eye(7)[labels_T], axis=1)
    losses_T = -np.log(p_TV[np.arange(5), labels_T])
    np.testing.assert_allclose(suite.compute_error_norms(logits_TV, losses_T), expected, rtol=1e-5)


def test_spacing_is_equal():
    assert suite.spaced_indices(10, 2) == [4, 9]
    assert suite.spaced_indices(3, 5) == [0, 1, 2]
    assert suite.spaced_indices(7, 7) == list(range(7))
    assert suite.spaced_indices(1000, 3)[-1] == 999


def test_running_variance_matches_numpy():
    values = np.random.default_rng(0).normal(5, 2, (6, 3, 2))
    running = suite.RunningVariance()
    for array in values:
        running.add(array)
    np.testing.assert_allclose(running.value(), values.var(0))


@pytest.mark.full  # three programs of a run that the session has trained
def test_run_scores_its_documents(whole):
    suite_result = suite.influence(load(whole), documents=5, checkpoints=2, validation=2)
    columns, numbers = suite_result.items, suite_result.numbers
    assert len(columns['item']) == len(columns['text']) == numbers['documents'] == 5
    assert all(len(column) == 5 for column in columns.values())
    assert numbers['vog'] == pytest.approx(np.mean(columns['vog'])) and numbers['vog'] > 0
    assert np.mean(columns['vog_normalised']) == pytest.approx(0, abs=1e-6)  # of float32
    assert all(0 < value < 2**0.5 for value in columns['el2n'])
    assert -1 <= numbers['spearman_loss_el2n'] <= 1
    assert numbers['checkpoints'] == 2 and all(columns['text'])
