"""The bytes suite on trees of a model. Reference: each context read whole, without a cache."""

import jax
import numpy as np
import pytest

from eval.load import load
from eval.suites.bytes import bytes_, score_trees, split_tree
from lm.data.tokenizers import ByteTokenizer, plan_tokenizer
from lm.inference.bytes import ContextFinder, node_log_probs, prefix_log_probs
from tests.eval.suites.checkpoints import make_checkpoint

TEXTS = ('the cat sat on the ca', 'a cat\n\nsat in  the café')
CHANGES = {'data.seq_len': 64, 'model.n_layers': 1}


@pytest.fixture(scope='module')
def tokenizer():
    return plan_tokenizer('bpe:280').build(['the cat sat on the mat'] * 3)


@pytest.mark.full
def test_cache_matches_separate_contexts(tokenizer):
    checkpoint, covers = make_checkpoint(CHANGES, tokenizer), ContextFinder(tokenizer)
    trees = [covers.build_tree(text.encode()) for text in TEXTS]
    gained = []
    for tree, log_probs in zip(trees, score_trees(checkpoint, trees), strict=True):
        rows = [[tokenizer.bos_id]]
        for parent, token in zip(tree.parents[1:], tree.tokens[1:], strict=True):
            rows.append([*rows[parent], token])
        tokens_BT = np.array([row + [0] * (64 - len(row)) for row in rows], np.int32)
        padded = np.zeros((64, 64), np.int32)
        padded[: len(rows)] = tokens_BT
        log_p_BTV = np.asarray(jax.nn.log_softmax(checkpoint.logits(padded)))
        expected = [log_p_BTV[i, len(row) - 1][tree.next_tokens[i]] for i, row in enumerate(rows)]
        for actual_node, expected_node in zip(log_probs, expected, strict=True):
            np.testing.assert_allclose(actual_node, expected_node, rtol=1e-4, atol=1e-5)
        gained.append(
            prefix_log_probs(tree, log_probs)[-1] - node_log_probs(tree, log_probs)[tree.trunk[-1]]
        )
    assert gained[0] > 0.001  # ' cat' has the last bytes of the first text too
    assert gained[1] >= -1e-9


@pytest.mark.full
def test_byte_model_has_its_own_probabilities():
    checkpoint, text = make_checkpoint(CHANGES), 'a café'
    tree = ContextFinder(ByteTokenizer()).build_tree(text.encode())
    log_p = prefix_log_probs(tree, next(score_trees(checkpoint, [tree])))
    log_p_TV = jax.nn.log_softmax(checkpoint.logits(checkpoint.encode(text))[0])
    log_p_N = [log_p_TV[i, byte] for i, byte in enumerate(text.encode())]
    np.testing.assert_allclose(log_p, [0, *np.cumsum(log_p_N)], rtol=1e-5, atol=1e-5)


def test_nodes_follow_their_contexts(tokenizer):
    tree = ContextFinder(tokenizer).build_tree(TEXTS[0].encode())
    cached, contexts = [], {}
    for part in split_tree(tree, bos_id=-1):
        assert part.tokens == [tree.tokens[node] for node in part.nodes]
        for i, node in enumerate(part.nodes):
            contexts[node] = (*cached, *part.nodes[: i + 1])
        cached += part.nodes if part.is_cached else []
    assert cached == list(tree.trunk)
    assert sorted(contexts) == list(range(len(tree.parents)))
    for node, path in contexts.items():
        assert path == ((*contexts[tree.parents[node]], node) if node else (0,))


@pytest.mark.full
def test_documents_are_truncated(whole):
    checkpoint = load(whole)
    numbers = bytes_(checkpoint, documents=2, length=10).numbers
    assert (numbers['documents'], numbers['bytes']) == (2, 20)
    assert numbers['bits_per_byte'] == pytest.approx(numbers['bits_per_byte_by_tokens'])
    suite_result = bytes_(checkpoint, documents=1, length=10_000)
    assert suite_result.items['bytes'] == [checkpoint.recipe.data.seq_len - 1]
    assert (
        suite_result.items['bits'][0] / suite_result.items['bytes'][0]
        == suite_result.numbers['bits_per_byte']
    )
