"""Perplexity by document. Reference: the training loop's evaluation, and windows one by one."""

import dataclasses
import functools
import itertools
import json
import math
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from eval.suites.perplexity import perplexity, split_windows
from lm import data
from lm.inference.load import Checkpoint
from lm.run.evaluate import evaluate
from lm.storage.files import discard_line
from tests.commands import tiny
from tests.eval.suites.checkpoints import checkpoint_from_recipe
from tests.helpers import jit_eval_step

LENGTH = 16
WORDS = ['norm', 'layer', 'head', 'token', 'scale', 'depth', 'width', 'step', 'loss', 'embed']


@pytest.fixture(scope='module')
def text(tmp_path_factory):
    """Two folders of documents of 3 to 47 bytes, some equal."""
    folder = tmp_path_factory.mktemp('text')
    for name, max_length in (('short', LENGTH - 1), ('long', 3 * LENGTH)):
        (folder / name).mkdir()
        for i in range(30):
            words = ' '.join(WORDS[(i // 2 * j + i // 2 + 3) % len(WORDS)] for j in range(9))
            (folder / name / f'{i:02}.txt').write_text(words[: 3 + i * 7 % (max_length - 3)])
    return folder


def make_checkpoint(text: Path, source: str, **changes) -> Checkpoint:
    """Random weights, with the data of a config."""
    fields = {'data.source': f'text:{text}/{source}/*.txt', 'data.cache_dir': str(text / 'cache')}
    if source == 'both':
        mixture = {name: (w, f'text:{text}/{name}/*.txt') for name, w in SHARES.items()}
        fields = fields | {'data.source': '', 'data.mixture': repr(mixture)}
    recipe = tiny(fields, data_validation_fraction=0.5, data_seq_len=LENGTH, **changes)
    opened = data.open_dataset(recipe.data, say=discard_line)
    return checkpoint_from_recipe(recipe, opened.tokenizer, meta={'data': opened.digest})


SHARES = {'short': 0.75, 'long': 0.25}


def evaluate_like_training(c: Checkpoint) -> dict[str, float]:
    batches = functools.partial(data.evaluation_batches, batch_size=8, limit=0)
    rows = data.open_dataset(c.recipe.data, say=discard_line).validation
    step = jit_eval_step(c.learner, c.mesh)
    return evaluate(step, c.weights, c.hyper, c.mesh, batches, rows)


def test_documents_sum_to_training_evaluation(text):
    """A mixture, with documents that see each other within a row. Catches tokens that are counted
    for the next document, masked attention, and missing shares.
    """
    checkpoint = make_checkpoint(text, 'both')
    suite_result, expected = perplexity(checkpoint), evaluate_like_training(checkpoint)
    for name, value in expected.items():
        assert suite_result.numbers[name] == pytest.approx(value, rel=1e-6), name
    columns = {name: np.array(column) for name, column in suite_result.items.items()}
    for domain in SHARES:
        in_domain = columns['domain'] == domain
        ce = columns['nats'][in_domain].sum() / columns['tokens'][in_domain].sum()
        assert ce == pytest.approx(expected[f'validation_{domain}_ce'], rel=1e-6)
    assert columns['bytes'].sum() == suite_result.numbers['bytes']
    assert columns['tokens'].sum() == suite_result.numbers['tokens']
    assert len({*columns['item']}) == len(columns['item']) > len({i[:16] for i in columns['item']})
    (table,) = suite_result.tables.values()
    bits = dict(zip(table.columns['domain'], table.columns['bits per byte'], strict=True))
    mean = sum(share * bits[name] for name, share in SHARES.items())
    assert mean == pytest.approx(expected['bits_per_byte'], rel=1e-6)


@pytest.mark.full
def test_whole_windows_equal_masked_rows(text):
    masked = {'data_mask_documents': True, 'data_packing': 'best_fit'}
    checkpoint = make_checkpoint(text, 'short', **masked)
    rows, windows = perplexity(checkpoint), perplexity(checkpoint, stride=LENGTH)
    assert rows.numbers['validation_ce'] > 1
    for name, value in rows.numbers.items():
        assert windows.numbers[name] == pytest.approx(value, rel=1e-6), name
    assert windows.items['item'] == rows.items['item']
    np.testing.assert_allclose(windows.items['nats'], rows.items['nats'], rtol=1e-5)


@pytest.mark.full
def test_windows_advance_by_stride(text):
    """Each token is scored by the logits of its own window, and the first documents score the same
    as in all. Catches a token scored twice, and a token with too little context.
    """
    checkpoint, stride = make_checkpoint(text, 'long'), 5
    columns = perplexity(checkpoint, stride=stride, documents=6).items
    rows = data.open_dataset(checkpoint.recipe.data, say=discard_line).validation
    documents = [next_ for _, next_ in zip(range(6), rows.documents(with_marks=True), strict=False)]
    assert max(map(len, documents)) > LENGTH + 2 * stride
    for number, tokens in enumerate(documents):
        nats = 0.0
        for t in range(1, len(tokens)):
            moves = max(0, math.ceil((t - LENGTH) / stride))
            window = tokens[moves * stride : moves * stride + LENGTH]
            padded = jnp.array([[*window, *[0] * (LENGTH - len(window))]])
            context = t - moves * stride
            assert context >= min(t, LENGTH - stride + 1)
            log_p = jax.nn.log_softmax(checkpoint.logits(padded)[0, context - 1])
            nats -= float(log_p[tokens[t]])
        assert columns['nats'][number] == pytest.approx(nats, rel=1e-5)
        assert columns['tokens'][number] == len(tokens) - 1
    all_columns = perplexity(checkpoint, stride=stride).items
    assert len(all_columns['item']) > 6
    assert {name: column[:6] for name, column in all_columns.items()} == columns


def test_few_documents_are_scored_alone(text):
    checkpoint = make_checkpoint(text, 'long')
    few, all_documents = perplexity(checkpoint, documents=3), perplexity(checkpoint)
    np.testing.assert_allclose(few.items['nats'], all_documents.items['nats'][:3], rtol=1e-5)
    assert few.items['item'] == all_documents.items['item'][:3]
    nats, n_bytes = sum(few.items['nats']), sum(few.items['bytes'])
    assert few.numbers['bits_per_byte'] == pytest.approx(nats / math.log(2) / n_bytes)
    assert few.numbers['bytes'] == n_bytes < all_documents.numbers['bytes']


@pytest.mark.parametrize(
    ('n', 'stride', 'counts'), [(2, 4, [1]), (9, 4, [8]), (10, 4, [8, 1]), (17, 8, [8, 8])]
)
def test_windows_score_each_token_once(n, stride, counts):
    """Windows of 8, of a document of n tokens."""
    windows = list(split_windows(np.arange(n), 8, stride))
    scored = [tokens[1 + before :].tolist() for tokens, before in windows]
    assert [*itertools.chain(*scored)] == [*range(1, n)]
    assert list(map(len, scored)) == counts


def test_invalid_requests_are_refused(text):
    with pytest.raises(ValueError, match=r'stride must be at most .*; got 17'):
        perplexity(make_checkpoint(text, 'long'), stride=17)


@pytest.mark.parametrize('stride', [0, 12])
def test_other_chats_are_scored_by_their_answers(text, stride, tmp_path):
    """All of the source, both splits; a question would add to nats and tokens."""
    turns = [('user', 'a'), ('assistant', 'bc')]
    for i in range(4):
        messages = [{'role': role, 'content': f'{i}{word}'} for role, word in turns]
        with open(tmp_path / 'chats.jsonl', 'a') as file:
            file.write(json.dumps({'messages': messages}) + '\n')
    c = make_checkpoint(text, 'short', data_mask_documents=True)
    long = dataclasses.replace(c.recipe.data, seq_len=32)
    c = dataclasses.replace(c, recipe=dataclasses.replace(c.recipe, data=long))
    scored = perplexity(c, source=f'chat:{tmp_path}/chats.jsonl', stride=stride)
    n = len(' 0bc') + 1  # and EOS
    assert scored.numbers['tokens'] == 4 * n and scored.numbers['bytes'] == 4 * (n - 1)
    expected = 0.0
    for i in range(4):
        ids = c.tokenizer.encode(f'user: {i}a\nassistant: {i}bc')
        ids = jnp.array([[c.tokenizer.bos_id, *ids, c.tokenizer.eos_id]])
        log_p_TV = jax.nn.log_softmax(c.logits(ids[:, :-1])[0].astype(jnp.float32))
        expected -= float(
            sum(log_p_TV[t - 1, ids[0, t]] for t in range(ids.shape[1] - n, ids.shape[1]))
        )
    np.testing.assert_allclose(sum(scored.items['nats']), expected, rtol=1e-5)
