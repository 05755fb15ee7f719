"""Probabilities of bytes from tokens. Reference: a Markov chain, whose tokens are enumerated."""

import itertools

import numpy as np
import pytest
import tokenizers as library

from lm.data.tokenizers import ByteTokenizer, SubwordTokenizer, TokenIds, plan_tokenizer
from lm.inference.bytes import (
    ContextFinder,
    list_continuations,
    next_byte_probs,
    node_log_probs,
    prefix_log_probs,
    spell_vocabulary,
)

LETTERS, LENGTH = 'abc', 7


def two_merges() -> SubwordTokenizer:
    vocab = {'a': 0, 'b': 1, 'c': 2, 'ab': 3, 'abc': 4}
    bpe = library.Tokenizer(library.models.BPE(vocab, [('a', 'b'), ('ab', 'c')]))
    bpe.decoder = library.decoders.ByteLevel()
    return SubwordTokenizer(bpe, 7, 5, 6, cuttable=False)


def train_tokenizer(*texts: str, size: int = 300) -> SubwordTokenizer:
    return plan_tokenizer(f'bpe:{size}').build(texts)


class Chain:
    """Texts of LENGTH letters, each drawn given the `order` letters before, and their token
    model.
    """

    def __init__(self, order: int, tokenizer):
        rng = np.random.default_rng(order)
        contexts = [
            ''.join(c) for n in range(order + 1) for c in itertools.product(LETTERS, repeat=n)
        ]
        self.order = order
        self.table = {
            c: dict(zip(LETTERS, rng.dirichlet([0.5] * 3), strict=True)) for c in contexts
        }
        self.begun, self.tokenizer = {}, tokenizer
        for letters in itertools.product(LETTERS, repeat=LENGTH):
            text = ''.join(letters)
            p = np.prod([self.next(text[:i])[text[i]] for i in range(LENGTH)])
            tokens = [*tokenizer.encode(text), tokenizer.eos_id]
            for n in range(len(tokens) + 1):
                key = tuple(tokens[:n])
                self.begun[key] = self.begun.get(key, 0) + p

    def next(self, before: str) -> dict[str, float]:
        return self.table[before[max(0, len(before) - self.order) :]]

    def log_ps(self, tree):
        """Returns log p(next token | its tokens) for each node, by enumerating all texts."""
        prefixes, log_ps = [()], []
        for parent, token in zip(tree.parents[1:], tree.tokens[1:], strict=True):
            prefixes.append((*prefixes[parent], token))
        with np.errstate(divide='ignore'):
            for tokens, ids in zip(prefixes, tree.next_tokens, strict=True):
                masses = [self.begun.get((*tokens, i), 0.0) for i in ids.tolist()]
                log_ps.append(np.log(np.array(masses)) - np.log(self.begun.get(tokens, np.nan)))
        return log_ps


@pytest.mark.parametrize('order', [1, 2, 3])
def test_next_byte_probs_match_markov_chain(order):
    tokenizer = two_merges()
    chain, covers = Chain(order, tokenizer), ContextFinder(two_merges())
    for text in ('', 'a', 'b', 'ab', 'ba', 'aab', 'abab', 'cabab', 'abcab', 'abcaba'):
        tree = covers.build_tree(text.encode(), open_ended=True)
        probs = next_byte_probs(tree, chain.log_ps(tree), covers.token_bytes)
        expected = np.zeros(256)
        expected[list(LETTERS.encode())] = list(chain.next(text).values())
        np.testing.assert_allclose(probs, expected, atol=1e-9, err_msg=text)


def test_prefix_probs_match_markov_chain():
    chain, covers = Chain(2, two_merges()), ContextFinder(two_merges())
    text = 'abcabab'
    tree = covers.build_tree(text.encode())
    steps = [np.log(chain.next(text[:n])[text[n]]) for n in range(len(text))]
    log_p = prefix_log_probs(tree, chain.log_ps(tree))
    np.testing.assert_allclose(log_p, [0, *np.cumsum(steps)], atol=1e-9)


def test_single_encoding_has_less_than_prefix_probability():
    """Catches a missing cover: the encoding of 'a' alone has less than P(a)."""
    chain, covers = Chain(1, two_merges()), ContextFinder(two_merges())
    tree = covers.build_tree(b'a')
    log_ps = chain.log_ps(tree)
    log_p = node_log_probs(tree, log_ps)[tree.trunk[-1]]
    assert np.exp(log_p) < 0.99 * np.exp(prefix_log_probs(tree, log_ps)[-1])


TEXTS = (
    "the cat  sat\n\non the mat, the  cats are here; I're it's 12 cats\n\n\nend \t x",
    'naïve café × élan — “quoted” 日本語 🎉 cafés naïveté',
)


@pytest.mark.parametrize('text', TEXTS)
@pytest.mark.parametrize('size', [258, 300])
def test_prefix_probs_decrease_and_bound_encoding(text, size):
    """For any token model, P of the bytes decreases along a text and is at least P of the
    encoding.
    """
    tokenizer = train_tokenizer(*TEXTS, size=size)
    covers, rng = ContextFinder(tokenizer), np.random.default_rng(0)
    tree = covers.build_tree(text.encode())
    assert b''.join(covers.token_bytes[tree.tokens[n]] for n in tree.trunk[1:]) == text.encode()
    assert [tree.tokens[n] for n in tree.trunk[1:]] == tokenizer.encode(text)
    log_ps = []
    for ids in tree.next_tokens:
        p_V = rng.dirichlet(np.ones(tokenizer.vocab_size))
        log_ps.append(np.log(p_V[ids]))
    log_p, weights = prefix_log_probs(tree, log_ps), node_log_probs(tree, log_ps)
    assert np.all(np.diff(log_p) <= 1e-9)
    for node in tree.trunk:
        assert log_p[tree.ends[node]] >= weights[node] - 1e-9
    if size == 258:  # every token is a byte
        np.testing.assert_allclose(log_p, weights[list(tree.trunk)])


def test_contexts_encode_texts():
    """'\\n\\n' is one token at the end of a text, and two before a word."""
    tokenizer = train_tokenizer('x\n\n' * 9, 'y\n\n' * 9, size=262)
    assert len(tokenizer.encode('x\n\n')) == 2 < len(tokenizer.encode('x\n\ny')) - 1
    tree = ContextFinder(tokenizer).build_tree(b'x\n\n')
    assert [end for end in tree.ends if end == 3] == [3, 3]
    bytes_ = ContextFinder(ByteTokenizer()).build_tree('xé'.encode())
    assert list(bytes_.parents) == [-1, 0, 1, 2]


def test_impossible_tokens_do_not_follow():
    """'a' then 'b' is always one token, so no cover has them apart."""
    tree = ContextFinder(two_merges()).build_tree(b'abb')
    next_tokens = dict(zip(tree.tokens, tree.next_tokens, strict=True))
    assert next_tokens[0].tolist() == []  # behind 'a' alone
    assert next_tokens[-1].tolist() == [0, 3, 4]
    assert next_tokens[3].tolist() == [1]


def test_trunk_is_always_in_tree(monkeypatch):
    monkeypatch.setattr('lm.inference.bytes.NEXT_TEXTS', (b'',))
    tokenizer = train_tokenizer('x\n\n' * 9, 'y\n\n' * 9, size=262)
    tree = ContextFinder(tokenizer).build_tree(b'x\n\ny')
    assert [tree.tokens[n] for n in tree.trunk[1:]] == tokenizer.encode('x\n\ny')
    for node in tree.trunk[1:]:
        assert tree.tokens[node] in tree.next_tokens[tree.parents[node]]


def test_text_may_end_within_character():
    tokenizer = train_tokenizer(*TEXTS)
    tree = ContextFinder(tokenizer).build_tree('café'.encode()[:-1], open_ended=True)
    log_ps = [np.full(len(ids), -1.0) for ids in tree.next_tokens]
    probs = next_byte_probs(tree, log_ps, ContextFinder(tokenizer).token_bytes)
    assert probs[0xA9] > 0
    assert not probs[:0x80].any()
    assert list_continuations(b'\xff') == list_continuations(b'a\xa9') == []


def test_added_token_without_row_has_no_bytes():
    tokenizer = train_tokenizer(*TEXTS)
    tokenizer.library.add_tokens([f'<image{i}>' for i in range(tokenizer.vocab_size)])
    assert tokenizer.list_tokens_without_row()
    assert len(spell_vocabulary(tokenizer)) == tokenizer.vocab_size


def test_lossy_tokenizer_is_refused():
    with pytest.raises(ValueError, match='Texts of this model are token ids'):
        spell_vocabulary(TokenIds(16, 0, 1))
    words = library.Tokenizer(library.models.WordLevel({'a': 0}, unk_token='a'))
    with pytest.raises(ValueError, match='This one has the decoders none'):
        spell_vocabulary(SubwordTokenizer(words, 3, 1, 2, cuttable=False))
    spaced = train_tokenizer(*TEXTS)
    spaced.library.pre_tokenizer = library.pre_tokenizers.ByteLevel(add_prefix_space=True)
    with pytest.raises(ValueError, match="This one changes the text 'a'"):
        spell_vocabulary(spaced)
