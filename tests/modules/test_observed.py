"""Statistics of attention. Reference: all scores at once in float64. Property: memory."""

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


def numpy_statistics(logits_BNTS, window=None, segments_BT=None, valid_BT=None, sinks_N=None):
    """Computes the statistics query by query, in float64."""
    batch, heads, length, _ = logits_BNTS.shape
    entropy, share, first, largest, size = ([[] for _ in range(heads)] for _ in range(5))
    for b, n, t in itertools.product(range(batch), range(heads), range(length)):
        if valid_BT is not None and not valid_BT[b, t]:
            continue
        documents = np.zeros(length) if segments_BT is None else segments_BT[b]
        document = [s for s in range(t + 1) if documents[s] == documents[t]]
        visible = [s for s in document if window is None or t - s < window]
        outcomes = logits_BNTS[b, n, t, visible]
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
            first[n].append(probs[0] if visible[0] == document[0] else 0.0)
    return {
        'attention_entropy': [np.mean(per_query) for per_query in entropy],
        'attention_entropy_share': [np.mean(per_query) for per_query in share],
        'attention_largest_logit': [np.max(per_query) for per_query in largest],
        'attention_logit_size': [np.mean(per_query) for per_query in size],
        'attention_first_token': [np.mean(per_query) for per_query in first],
    }


def draw_arrays(seed=0):
    rng = np.random.default_rng(seed)
    return {
        'q': rng.normal(size=(B, N, T, H)),
        'k': rng.normal(size=(B, K, T, H)),
        'sinks_N': rng.normal(size=N),
        'slopes_N': rng.uniform(0.1, 1, N),
        'key_bias_BKS': rng.normal(size=(B, K, T)),
        'segments_BT': np.array([[1, 1, 1, 1, 2, 2, 2, 2, 2, 0, 0], [1] * 6 + [2] + [3] * 4]),
    }


def numpy_logits(arrays, scores, slopes_N=None, key_bias_BKS=None):
    k = np.repeat(arrays['k'], N // K, axis=1)
    logits = np.einsum('bnth,bnsh->bnts', arrays['q'], k) * scores.compute_scale(H)
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
def test_statistics_match_reference(case, block):
    """Catches a mask, bias or sink that is omitted or applied in another order, the row's first
    token instead of the document's, counted padding, and a last block counted twice.
    """
    scores, names = CASES[case]
    arrays = draw_arrays()
    extra = {name: arrays[name] for name in names}
    biases = {name: extra.pop(name) for name in ('slopes_N', 'key_bias_BKS') if name in extra}
    if 'segments_BT' in extra:
        extra['valid_BT'] = extra['segments_BT'] > 0
    expected = numpy_statistics(numpy_logits(arrays, scores, **biases), scores.window, **extra)
    q, k = jnp.float32(arrays['q']), jnp.float32(arrays['k'])
    statistics = jax.jit(
        lambda q, k, extra: attention_statistics(q, k, scores, **extra, block=block),
    )(q, k, jax.tree.map(jnp.asarray, extra | biases))
    assert statistics.keys() == expected.keys()
    for name, actual in statistics.items():
        assert actual.shape == (N,) and actual.dtype == jnp.float32
        np.testing.assert_allclose(actual, expected[name], rtol=2e-5, err_msg=name)


def test_is_full_turns_window_off():
    """`is_full` is a traced scalar. Catches a scalar read at trace time, and its negation."""
    arrays, scores = draw_arrays(), Scores(window=2)
    q, k = jnp.float32(arrays['q']), jnp.float32(arrays['k'])
    compute = jax.jit(lambda is_full: attention_statistics(q, k, scores, is_full=is_full))
    for is_full, window in ((True, None), (False, 2)):
        expected = numpy_statistics(numpy_logits(arrays, scores), window)
        for name, actual in compute(jnp.array(is_full)).items():
            np.testing.assert_allclose(actual, expected[name], rtol=2e-5)


@pytest.mark.parametrize('size', [1e4, 3e4])
def test_large_logits_keep_precision(size):
    """Entropy is exact for logits as large as in a diverging run, where a difference of log Z and
    the mean logit would be off by more than the entropy.
    """
    rng = np.random.default_rng(0)
    logits = rng.uniform(0, 1, (1, 1, T, T)).astype(np.float32) + np.float32(size)
    statistics = weight_statistics(lambda rows: jnp.take(jnp.asarray(logits), rows, axis=2), T)
    expected = numpy_statistics(logits.astype(np.float64))
    for name, actual in statistics.items():
        np.testing.assert_allclose(actual, expected[name], rtol=1e-5)


def test_zero_weights_give_no_nan():
    """log 0 of linear attention gives no NaN, and a query with one key has no share."""
    logits = np.zeros((1, 1, T, T), np.float32)
    logits[..., 1::2] = -np.inf
    logits[..., np.arange(T), np.arange(T)] = 0.0
    statistics = weight_statistics(lambda rows: jnp.take(jnp.asarray(logits), rows, axis=2), T)
    assert all(np.isfinite(actual).all() for actual in statistics.values())
    single_key = weight_statistics(lambda rows: jnp.zeros((1, 1, len(rows), 1)), 1)
    assert single_key['attention_entropy'] == 0 and np.isnan(single_key['attention_entropy_share'])


@pytest.mark.full
def test_memory_grows_linearly():
    """At T = 4,096 neither the program nor its gradient has an array of all scores. Catches a mask
    [T, S], and blocks that are all kept for a backward pass.
    """
    length = 4096
    q = jax.ShapeDtypeStruct((1, 1, length, 4), jnp.float32)
    segments = jax.ShapeDtypeStruct((1, length), jnp.int32)
    scores = Scores(softcap=5.0, window=1000)

    def compute(q, k, segments):
        return attention_statistics(q, k, scores, segments_BT=segments, valid_BT=segments > 0)

    def loss(q, k, segments):
        return jnp.sum(q * k), compute(q, k, segments)

    for function in (compute, jax.grad(loss, has_aux=True)):
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
def test_statistics_get_kernel_arguments(changes, monkeypatch):
    """The same queries, keys, scores, segments and arrays, in every layer. Catches an option of the
    scores that the statistics lack, and queries before their rotation.
    """
    calls = []

    def spy_on(name, function):
        def record(*arguments, **options):
            calls.append((name, arguments, options))
            return function(*arguments, **options)

        return record

    learner, batch = tiny_learner(checked_config(changes)), packed_batch()
    variables = learner.variables(initial_state(learner.recipe).weights)
    kernel = spy_on('kernel', partial(attend, 'reference'))
    monkeypatch.setattr(softmax, 'attention_statistics', spy_on('seen', attention_statistics))
    monkeypatch.setattr(Kernels, 'attention', property(lambda kernels: kernel))
    compute_activations(learner, variables, batch, (DIAGNOSTICS,), {})
    (first, (q, k, scores), options), (second, kernel_args, kernel_options) = calls[:2]
    segments, valid = options.pop('segments_BT'), options.pop('valid_BT')
    assert (first, second) == ('seen', 'kernel')
    assert q is kernel_args[0] and k is kernel_args[1] and segments is kernel_args[4]
    assert scores == kernel_args[3] and valid.shape == (8, 8)
    is_full, kernel_is_full = options.pop('is_full'), kernel_options.pop('is_full')
    assert (is_full is None) == (kernel_is_full is None)
    assert options.keys() == kernel_options.keys() and all(
        options[name] is kernel_options[name] for name in options
    )
