"""Statistics of attention. Reference: against all scores at once in float64. Property: memory."""

import itertools
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from lm.training.step import compute_activations
from modules.attention import softmax
from modules.kernels import Kernels
from modules.kernels.attention import attend
from modules.kernels.attention.base import Scores
from modules.kernels.attention.observed import attention_statistics, weight_statistics
from modules.statistics import DIAGNOSTICS
from tests.helpers import checked_config, initial_state, packed_batch, tiny_learner

B, N, K, T, H = 2, 4, 2, 11, 8


def dense(logits_BNTS, window=None, segments_BT=None, valid_BT=None, sinks_N=None):
    """Query by query, in float64."""
    batch, heads, length, _ = logits_BNTS.shape
    entropy, share, first, largest, size = ([[] for _ in range(heads)] for _ in range(5))
    for b, n, t in itertools.product(range(batch), range(heads), range(length)):
        if valid_BT is not None and not valid_BT[b, t]:
            continue
        documents = np.zeros(length) if segments_BT is None else segments_BT[b]
        document = [s for s in range(t + 1) if documents[s] == documents[t]]
        seen = [s for s in document if window is None or t - s < window]
        outcomes = logits_BNTS[b, n, t, seen]
        largest[n].append(outcomes.max())
        size[n].append(np.mean(np.abs(outcomes)))
        if sinks_N is not None:
            outcomes = np.append(outcomes, sinks_N[n])
        probs = np.exp(outcomes - outcomes.max())
        probs /= probs.sum()
        entropy[n].append(-np.sum(probs * np.log(probs)))
        if len(probs) > 1:
            share[n].append(entropy[n][-1] / np.log(len(probs)))
        if t != document[0]:
            first[n].append(probs[0] if seen[0] == document[0] else 0.0)
    return {
        'attention_entropy': [np.mean(of_head) for of_head in entropy],
        'attention_entropy_share': [np.mean(of_head) for of_head in share],
        'attention_largest_logit': [np.max(of_head) for of_head in largest],
        'attention_logit_size': [np.mean(of_head) for of_head in size],
        'attention_first_token': [np.mean(of_head) for of_head in first],
    }


def arrays(seed=0):
    rng = np.random.default_rng(seed)
    return {
        'q': rng.normal(size=(B, N, T, H)),
        'k': rng.normal(size=(B, K, T, H)),
        'sinks_N': rng.normal(size=N),
        'slopes_N': rng.uniform(0.1, 1, N),
        'key_bias_BKS': rng.normal(size=(B, K, T)),
        'segments_BT': np.array([[1, 1, 1, 1, 2, 2, 2, 2, 2, 0, 0], [1] * 6 + [2] + [3] * 4]),
    }


def logits_of(given, scores, slopes_N=None, key_bias_BKS=None):
    k = np.repeat(given['k'], N // K, axis=1)
    logits = np.einsum('bnth,bnsh->bnts', given['q'], k) * scores.compute_scale(H)
    if key_bias_BKS is not None:
        logits += np.repeat(key_bias_BKS, N // K, axis=1)[:, :, None]
    if scores.softcap:
        logits = scores.softcap * np.tanh(logits / scores.softcap)
    if slopes_N is not None:
        t = np.arange(T)
        logits = logits - slopes_N[None, :, None, None] * (t[:, None] - t)
    return logits


CASES = {
    'plain': (Scores(), ()),
    'scaled, in a window': (Scores(scale=0.9, window=3), ()),
    'documents and padding': (Scores(), ('segments_BT',)),
    'sinks': (Scores(), ('sinks_N', 'segments_BT')),
    'biases outside and inside a softcap': (Scores(softcap=1.5), ('slopes_N', 'key_bias_BKS')),
    'all': (
        Scores(scale=2.0, softcap=2.0, window=2),
        ('segments_BT', 'sinks_N', 'slopes_N', 'key_bias_BKS'),
    ),
}


@pytest.mark.default_rows('plain-4', 'all-4', 'sinks-4')
@pytest.mark.parametrize('block', [4, pytest.param(128, marks=pytest.mark.full)])
@pytest.mark.parametrize('case', CASES)
def test_against_all_scores_at_once(case, block):
    """Catches a mask, a bias or a sink that is left out or applied in another order, a first token
    that is the row's and not the document's, padding that counts, and a last block counted twice.
    """
    scores, names = CASES[case]
    given = arrays()
    extra = {name: given[name] for name in names}
    biases = {name: extra.pop(name) for name in ('slopes_N', 'key_bias_BKS') if name in extra}
    if 'segments_BT' in extra:
        extra['valid_BT'] = extra['segments_BT'] > 0
    wanted = dense(logits_of(given, scores, **biases), scores.window, **extra)
    q, k = jnp.float32(given['q']), jnp.float32(given['k'])
    found = jax.jit(
        lambda q, k, extra: attention_statistics(q, k, scores, **extra, block=block),
    )(q, k, jax.tree.map(jnp.asarray, extra | biases))
    assert found.keys() == wanted.keys()
    for name, value in found.items():
        assert value.shape == (N,) and value.dtype == jnp.float32
        np.testing.assert_allclose(value, wanted[name], rtol=2e-5, err_msg=name)


def test_a_layer_may_turn_its_window_off():
    """By a traced scalar: catches one that is read where the program is made, and its opposite."""
    given, scores = arrays(), Scores(window=2)
    q, k = jnp.float32(given['q']), jnp.float32(given['k'])
    found = jax.jit(lambda is_full: attention_statistics(q, k, scores, is_full=is_full))
    for is_full, window in ((True, None), (False, 2)):
        wanted = dense(logits_of(given, scores), window)
        for name, value in found(jnp.array(is_full)).items():
            np.testing.assert_allclose(value, wanted[name], rtol=2e-5)


@pytest.mark.parametrize('size', [1e4, 3e4])
def test_large_logits_lose_nothing(size):
    """Entropy is exact where logits are as large as those of a run that diverges: a difference of
    log Z and the mean logit would be off by more than the entropy there.
    """
    rng = np.random.default_rng(0)
    logits = rng.uniform(0, 1, (1, 1, T, T)).astype(np.float32) + np.float32(size)
    found = weight_statistics(lambda rows: jnp.take(jnp.asarray(logits), rows, axis=2), T)
    wanted = dense(logits.astype(np.float64))
    for name, value in found.items():
        np.testing.assert_allclose(value, wanted[name], rtol=1e-5)


def test_weights_that_are_zero_are_no_outcome_that_counts():
    """log 0 of a linear attention gives no NaN, and one query of one key has no share."""
    logits = np.zeros((1, 1, T, T), np.float32)
    logits[..., 1::2] = -np.inf
    logits[..., np.arange(T), np.arange(T)] = 0.0
    found = weight_statistics(lambda rows: jnp.take(jnp.asarray(logits), rows, axis=2), T)
    assert all(np.isfinite(value).all() for value in found.values())
    alone = weight_statistics(lambda rows: jnp.zeros((1, 1, len(rows), 1)), 1)
    assert alone['attention_entropy'] == 0 and np.isnan(alone['attention_entropy_share'])


@pytest.mark.full
def test_memory_grows_with_the_length_alone():
    """At T = 4,096 no array of all scores is in the program, nor in that of a gradient through it.
    Catches a mask [T, S], and blocks that are all kept for a backward pass.
    """
    length = 4096
    q = jax.ShapeDtypeStruct((1, 1, length, 4), jnp.float32)
    segments = jax.ShapeDtypeStruct((1, length), jnp.int32)
    scores = Scores(softcap=5.0, window=1000)

    def seen(q, k, segments):
        return attention_statistics(q, k, scores, segments_BT=segments, valid_BT=segments > 0)

    def loss(q, k, segments):
        return jnp.sum(q * k), seen(q, k, segments)

    for function in (seen, jax.grad(loss, has_aux=True)):
        compiled = jax.jit(function).lower(q, q, segments).compile()
        temporary = compiled.memory_analysis().temp_size_in_bytes
        assert temporary < length * length  # bytes of a mask alone; the scores take four times that


@pytest.mark.full
@pytest.mark.parametrize(
    'changes',
    [
        {'attention.softcap': 2.0, 'attention.sinks': 'learned', 'data.mask_documents': True},
        {'attention.window': 2, 'attention.full_every': 2, 'attention.logit_scale': 'mup'},
        {'model.attention': 'l2', 'attention.sinks': 'off_by_one', 'data.mask_documents': True},
    ],
    ids=str,
)
def test_a_layer_says_of_itself_what_its_kernel_gets(changes, monkeypatch):
    """The same queries, keys, scores, segments and arrays, in every layer: catches an option of the
    scores that the record does not have, and queries before their rotation.
    """
    calls = []

    def spied(name, function):
        def spy(*arguments, **more):
            calls.append((name, arguments, more))
            return function(*arguments, **more)

        return spy

    learner, batch = tiny_learner(checked_config(changes)), packed_batch()
    variables = learner.variables(initial_state(learner.recipe).weights)
    kernel = spied('kernel', partial(attend, 'reference'))
    monkeypatch.setattr(softmax, 'attention_statistics', spied('seen', attention_statistics))
    monkeypatch.setattr(Kernels, 'attention', property(lambda kernels: kernel))
    compute_activations(learner, variables, batch, (DIAGNOSTICS,), {})
    (first, (q, k, scores), more), (second, used, given) = calls[:2]
    segments, valid = more.pop('segments_BT'), more.pop('valid_BT')
    assert (first, second) == ('seen', 'kernel')
    assert q is used[0] and k is used[1] and segments is used[4]
    assert scores == used[3] and valid.shape == (8, 8)
    full, full_given = more.pop('is_full'), given.pop('is_full')
    assert (full is None) == (full_given is None)
    assert more.keys() == given.keys() and all(more[name] is given[name] for name in more)
