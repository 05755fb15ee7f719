"""The n-gram baseline. Reference: a slow dictionary version; property: it is a distribution."""

from collections import Counter, defaultdict

import numpy as np
import pytest

from eval.suites.ngram import START, kneser_ney_bits


def as_bytes(*texts: str) -> list[np.ndarray]:
    return [np.frombuffer(text.encode(), np.uint8) for text in texts]


def slow_bits(train: list[str], test: list[str], order: int) -> float:
    """The equation of `kneser_ney_bits`, gram by gram, with dictionaries."""

    def grams(texts):
        for text in texts:
            symbols = [START] * (order - 1) + list(text.encode())
            for i in range(len(symbols) - order + 1):
                yield tuple(symbols[i : i + order])

    levels = [Counter(grams(train))]
    for _ in range(order - 1):
        levels.insert(0, Counter(gram[1:] for gram in levels[0]))
    after = []
    for counts in levels:
        contexts = defaultdict(dict)
        for gram, count in counts.items():
            contexts[gram[:-1]][gram[-1]] = count
        after.append(contexts)

    def probability(gram, n):
        if n == 0:
            return 1 / 256
        counts = levels[n - 1]
        once, twice = (sum(c == k for c in counts.values()) for k in (1, 2))
        discount = once / (once + 2 * twice) if once else 0.0
        gram = gram[len(gram) - n :]
        followers = after[n - 1].get(gram[:-1])
        if not followers:
            return probability(gram, n - 1)
        total = sum(followers.values())
        discounted = max(followers.get(gram[-1], 0) - discount, 0) / total
        return discounted + discount * len(followers) / total * probability(gram, n - 1)

    return -sum(np.log2(probability(gram, order)) for gram in grams(test))


@pytest.mark.parametrize('order', [1, 2, 3, 5])
def test_kneser_ney_matches_slow_version(order):
    train = ['abracadabra', 'a cad bard', 'brand', 'abra']
    test = ['cadabra', 'bad zebra']
    bits, n_bytes = kneser_ney_bits(as_bytes(*train), as_bytes(*test), order)
    assert n_bytes == sum(map(len, test))
    np.testing.assert_allclose(bits, slow_bits(train, test, order), rtol=1e-9)


def test_byte_probabilities_sum_to_one():
    train = as_bytes('abracadabra', 'banana band')
    next_bytes = [np.array([97, 98, byte], np.uint8) for byte in range(256)]
    prefix, _ = kneser_ney_bits(train, as_bytes('ab'), 3)
    whole = [kneser_ney_bits(train, [text], 3)[0] for text in next_bytes]
    np.testing.assert_allclose(sum(2 ** (prefix - bits) for bits in whole), 1, rtol=1e-9)


def test_longer_context_lowers_bits():
    text = 'the norm of the layer is the norm of the head. ' * 20
    bits = [kneser_ney_bits(as_bytes(text), as_bytes(text), order)[0] for order in (1, 3, 5)]
    assert bits[0] > 2 * bits[1] > 2 * bits[2]
