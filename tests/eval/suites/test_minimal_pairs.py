"""Minimal pairs. Reference: sums of log-probabilities by hand; property: a grammar is learnt."""

import json
import random

import jax
import numpy as np
import pytest

from eval.suites.minimal_pairs import minimal_pairs, read_pairs
from lm.data.tokenizers import TokenIds
from tests.eval.suites.checkpoints import make_checkpoint, make_learner
from tests.helpers import make_training, tiny_config

CHANGES = {'data.seq_len': 8, 'optim.lr': 0.02, 'model.n_layers': 1}
TOKENIZER = TokenIds(16, 0, 1)
NOUNS, ADVERBS, VERBS = range(2, 6), range(6, 9), range(9, 13)  # odd: plural


def sentence(rng, agrees=True):
    """Token ids: a noun, two adverbs, and a verb that has the noun's number if it `agrees`."""
    noun, verb = rng.choice(NOUNS), rng.choice(VERBS[::2])
    verb += (verb % 2 == noun % 2) != agrees
    return [noun, *rng.choices(ADVERBS, k=2), verb]


def write_grammar(path, pairs=60):
    lines = []
    for i in range(pairs):
        good, bad = (sentence(random.Random(i), agrees) for agrees in (True, False))
        uid = 'plural' if good[0] % 2 else 'singular'
        good, bad = (' '.join(map(str, token_ids)) for token_ids in (good, bad))
        lines.append(json.dumps({'sentence_good': good, 'sentence_bad': bad, 'UID': uid}))
    path.write_text('\n'.join(lines) + '\n')


def train_grammar(steps):
    """Returns the weights after some steps on sentences of the grammar, one per row."""
    learner, rng = make_learner(tiny_config(CHANGES), TOKENIZER), random.Random(-1)
    rows = [[0, *sentence(rng), 1] for _ in range(steps * 8)]
    tokens = np.zeros((steps, 8, 9), np.int32)
    tokens[:, :, :6] = np.reshape(rows, (steps, 8, 6))
    segments = np.broadcast_to(np.arange(9) < 6, tokens.shape).astype(np.int32)
    hyper = make_checkpoint(CHANGES, TOKENIZER).hyper
    batches = {'tokens': tokens, 'segments': segments}
    return jax.device_get(make_training(learner)(jax.random.key(0), hyper, batches)[1]).weights


@pytest.mark.full
def test_training_teaches_grammar(tmp_path):
    write_grammar(tmp_path / 'pairs.jsonl')
    path, trained = str(tmp_path), train_grammar(300)
    before = minimal_pairs(make_checkpoint(CHANGES, TOKENIZER), path=path).numbers
    after = minimal_pairs(make_checkpoint(CHANGES, TOKENIZER, weights=trained), path=path).numbers
    assert before['p_value'] > 0.01
    assert after['p_value'] < 1e-6
    assert after['accuracy'] > 0.85


@pytest.mark.default_rows('True')
@pytest.mark.parametrize('end', [False, True])
def test_scores_by_paradigm(tmp_path, end):
    texts = [('2 6 9', '2 6 10'), ('3 7 8 10', '3 7'), ('4 9', '9 4')]
    lines = [{'sentence_good': good, 'sentence_bad': bad, 'field': 'x'} for good, bad in texts]
    for line in lines[:2]:
        line['UID'] = 'number'
    (tmp_path / 'order.jsonl').write_text('\n'.join(map(json.dumps, lines)))
    checkpoint = make_checkpoint(CHANGES, TOKENIZER)
    suite_result = minimal_pairs(checkpoint, path=str(tmp_path / '*.jsonl'), end=end)
    rows = [[0, *map(int, text.split()), *[1] * end] for pair in texts for text in pair]
    logits_BTV = checkpoint.logits(np.array([row + [0] * (6 - len(row)) for row in rows]))
    log_p_BTV = np.asarray(jax.nn.log_softmax(logits_BTV))
    log_probs = [
        [of[i, t] for i, t in enumerate(row[1:])] for of, row in zip(log_p_BTV, rows, strict=True)
    ]
    sums, means = (np.reshape([f(log_p) for log_p in log_probs], (3, 2)) for f in (np.sum, np.mean))
    right, by_mean = sums[:, 0] > sums[:, 1], means[:, 0] > means[:, 1]
    np.testing.assert_allclose(suite_result.items['margin'], sums[:, 0] - sums[:, 1], atol=1e-5)
    assert suite_result.items['is_right'] == right.tolist()
    assert suite_result.items['item'] == ['number/0', 'number/1', 'order/0']
    expected = {
        'accuracy': (right[:2].mean() + right[2]) / 2,
        'standard_error': np.sqrt(right[:2].var() / 2) / 2,
        'accuracy_of_pairs': right.mean(),
        'accuracy_by_mean': (by_mean[:2].mean() + by_mean[2]) / 2,
        'pairs': 3,
        'paradigms': 2,
    }
    assert {k: suite_result.numbers[k] for k in expected} == pytest.approx(expected)
    table = suite_result.tables['Accuracy by paradigm'].columns
    assert table['paradigm'] == ['number', 'order']
    assert table['pairs'] == [2, 1]


def test_limit_applies_per_paradigm(tmp_path):
    write_grammar(tmp_path / 'pairs.jsonl')
    paradigms = [pair.paradigm for pair in read_pairs(str(tmp_path / 'pairs.jsonl'), limit=3)]
    assert sorted(paradigms) == ['plural'] * 3 + ['singular'] * 3


@pytest.mark.parametrize(
    ('line', 'words'),
    [
        ('{"sentence_good": "a"}', "pairs.jsonl:1 is not a minimal pair: 'sentence_bad' must be"),
        ('{"sentence_good": 1, "sentence_bad": "b"}', "'sentence_good' must be printable text"),
        ('[1]', 'pairs.jsonl:1 must be an object'),
        ('{', 'pairs.jsonl:1 is not JSON'),
        ('', 'contains no lines'),
    ],
)
def test_invalid_lines_are_refused(tmp_path, line, words):
    (tmp_path / 'pairs.jsonl').write_text(line)
    with pytest.raises(ValueError, match=words):
        list(read_pairs(str(tmp_path)))


@pytest.mark.full
def test_missing_files_and_long_sentences_are_refused(tmp_path):
    for path, words in (('', 'needs sentences'), (str(tmp_path), 'matches no .jsonl file')):
        with pytest.raises(ValueError, match=words):
            list(read_pairs(path))
    line = {'sentence_good': '2 ' * 20, 'sentence_bad': '3'}
    (tmp_path / 'long.jsonl').write_text(json.dumps(line))
    with pytest.raises(ValueError, match=r'long\.jsonl:1: a sentence must have 1 to .* got 20'):
        minimal_pairs(make_checkpoint(CHANGES, TOKENIZER), path=str(tmp_path))
