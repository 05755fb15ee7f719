"""Reference and property: samples from logits, against plain numpy."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import stats

from lm.inference.sampling import (
    SEED_RANGE,
    Sampling,
    SamplingBatch,
    filter_logits,
    find_largest,
    invert_cdf,
    sample_tokens,
)

VOCAB = 150  # more than two blocks of sums
LOGITS_V = np.random.default_rng(0).normal(0, 2, VOCAB).astype(np.float32)
SAMPLINGS = {
    'all': Sampling(),
    'temperature': Sampling(temperature=0.5),
    'top_k': Sampling(top_k=7),
    'top_p': Sampling(temperature=2.0, top_p=0.6),
    'min_p': Sampling(min_p=0.2),
    'together': Sampling(temperature=1.5, top_k=40, top_p=0.9, min_p=0.05),
}
jitted_sample, jitted_filter = jax.jit(sample_tokens), jax.jit(filter_logits)


def probabilities(logits_V: np.ndarray, sampling: Sampling) -> np.ndarray:
    """Filters by sorting, one after the other, as `transformers` does."""

    def normal(kept_V):
        return p_V * kept_V / np.sum(p_V * kept_V)

    p_V = np.exp(logits_V.astype(np.float64) / sampling.temperature)
    order_V = np.argsort(-p_V)
    kept_V = np.ones(len(p_V), bool)
    if sampling.top_k:
        kept_V[order_V[sampling.top_k :]] = False
    before_V = np.cumsum(normal(kept_V)[order_V]) - normal(kept_V)[order_V]
    kept_V[order_V[before_V >= sampling.top_p]] = False
    kept_V &= normal(kept_V) >= sampling.min_p * np.max(normal(kept_V))
    return normal(kept_V)


def test_filters_match_sorting():
    """Each row of a batch has its own filters, alone and together, in one program."""
    rng = np.random.default_rng(1)
    samplings = [*SAMPLINGS.values(), Sampling(top_k=VOCAB + 1), Sampling(top_p=1e-6)]
    logits_BV = rng.normal(0, 3, (len(samplings), VOCAB)).astype(np.float32)
    filtered_BV = jitted_filter(logits_BV, SamplingBatch.stack(samplings))
    for logits_V, filtered_V, sampling in zip(logits_BV, filtered_BV, samplings, strict=True):
        expected_V = probabilities(logits_V, sampling)
        np.testing.assert_array_equal(np.isfinite(filtered_V), expected_V > 0)
        np.testing.assert_allclose(jax.nn.softmax(filtered_V), expected_V, rtol=1e-4, atol=1e-7)


@pytest.mark.parametrize(
    ('p_V', 'sampling', 'n_kept'),
    [
        ([0.4, 0.3, 0.2, 0.1], Sampling(top_k=2, top_p=0.5), 1),  # top_p first would keep 2
        ([0.5, 0.2, 0.15, 0.15], Sampling(top_p=0.69, min_p=0.35), 2),  # min_p first: 1
        ([0.5, 0.3, 0.1, 0.1], Sampling(top_k=3), 4),  # equal ones stay together
    ],
)
def test_filters_apply_in_this_order(p_V, sampling, n_kept):
    filtered_1V = jitted_filter(jnp.log(jnp.array([p_V])), SamplingBatch.stack([sampling]))
    assert np.isfinite(filtered_1V).sum() == n_kept


@pytest.mark.parametrize('sampling', SAMPLINGS.values(), ids=SAMPLINGS)
def test_samples_follow_probabilities(sampling):
    """Chi-square over 4,000 seeds. Catches a missing filter, and numbers that are not uniform."""
    count = 4000
    rows = SamplingBatch.stack(
        [
            Sampling(sampling.temperature, sampling.top_k, sampling.top_p, sampling.min_p, seed)
            for seed in range(count)
        ]
    )
    logits_BV = np.broadcast_to(LOGITS_V, (count, VOCAB))
    tokens_B = np.asarray(jitted_sample(logits_BV, rows, np.zeros(count, np.int32)))
    expected_V = count * probabilities(LOGITS_V, sampling)
    counts_V = np.bincount(tokens_B, minlength=VOCAB)
    assert not counts_V[expected_V == 0].any()
    rare_V = expected_V < 5  # together, as the test is of large counts
    counts, expected = (
        np.append(x_V[~rare_V], x_V[rare_V].sum()) for x_V in (counts_V, expected_V)
    )
    is_possible = expected > 0
    assert stats.chisquare(counts[is_possible], expected[is_possible]).pvalue > 1e-3


def test_samples_depend_on_seed_and_position_only():
    """Samples do not depend on the place in the batch. Seeds of 64 bits differ, and negative seeds
    are allowed.
    """
    seeds = [3, 3 + 2**32, 3 - SEED_RANGE, -1, 4, 3]
    logits_BV = np.zeros((len(seeds), VOCAB), np.float32)
    rows = SamplingBatch.stack([Sampling(seed=seed) for seed in seeds])

    def sample_at(positions):
        return np.asarray(jitted_sample(logits_BV, rows, np.array(positions, np.int32))).tolist()

    first = sample_at([5] * 6)
    assert first[0] == first[2] == first[5] and len({*first}) == 4
    assert sample_at([5, 6, 7, 8, 9, 10])[0] == first[0] != sample_at([6] * 6)[0]


def test_temperature_0_takes_likeliest():
    logits_BV = np.random.default_rng(2).normal(size=(6, VOCAB)).astype(np.float32)
    rows = SamplingBatch.stack([Sampling(0.0, seed=i) for i in range(6)])
    tokens_B = jitted_sample(logits_BV, rows, np.arange(6, dtype=np.int32))
    np.testing.assert_array_equal(tokens_B, logits_BV.argmax(-1))


def test_largest_logit_is_the_first_among_equals():
    """Catches a token out of the vocabulary for a row without a largest logit."""
    logits_BV = np.array([[0, 2, 2], [-np.inf] * 3, [1, np.nan, np.nan], [3, np.inf, 1]])
    np.testing.assert_array_equal(find_largest(logits_BV), jnp.argmax(logits_BV, -1))


@pytest.mark.parametrize('vocab', [2, 64, 65, VOCAB])
def test_extreme_uniforms_sample_possible_tokens(vocab):
    """Rounded sums never lead to a filtered token."""
    logits_V = np.random.default_rng(3).normal(0, 1, vocab).astype(np.float32)
    logits_V[[0, -1]] = -np.inf, 0.0
    if vocab > 64:
        logits_V[-2:] = -np.inf
    possible_V = np.flatnonzero(np.isfinite(logits_V))
    largest = np.nextafter(np.float32(1), np.float32(0))
    logits_BV = np.broadcast_to(logits_V, (3, vocab))
    tokens_B = invert_cdf(jnp.asarray(logits_BV), jnp.float32([0.0, 1 - 2**-23, largest]))
    np.testing.assert_array_equal(tokens_B, [possible_V[0], possible_V[-1], possible_V[-1]])


@pytest.mark.parametrize(
    ('field', 'value'),
    [
        ('temperature', -0.1),
        ('temperature', float('nan')),
        ('top_k', -1),
        ('top_p', 0.0),
        ('top_p', 1.1),
        ('min_p', -0.1),
        ('min_p', float('nan')),
    ],
)
def test_invalid_option_is_named(field, value):
    with pytest.raises(ValueError, match=rf'^{field} must be .*; got {value}$'):
        Sampling(**{field: value})
