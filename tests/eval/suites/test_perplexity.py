"""Perplexity by document. Reference: the training loop's evaluation, and windows one by one."""

import functools
import itertools
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
from tests.eval.suites.checkpoints import of_recipe
from tests.helpers import jit_eval_step

LENGTH = 16
WORDS = ['norm', 'layer', 'head', 'token', 'scale', 'depth', 'width', 'step', 'loss', 'embed']


@pytest.fixture(scope='module')
def text(tmp_path_factory):
    """Two folders of documents of 3 to 47 bytes, some of them equal."""
    folder = tmp_path_factory.mktemp('text')
    for name, most in (('short', LENGTH - 1), ('long', 3 * LENGTH)):
        (folder / name).mkdir()
        for i in range(30):
            words = ' '.join(WORDS[(i // 2 * j + i // 2 + 3) % len(WORDS)] for j in range(9))
            (folder / name / f'{i:02}.txt').write_text(words[: 3 + i * 7 % (most - 3)])
    return folder


def a_checkpoint(text: Path, source: str, **changes) -> Checkpoint:
    """Random weights, with the data of a config."""
    fields = {'data.source': f'text:{text}/{source}/*.txt', 'data.cache_dir': str(text / 'cache')}
    if source == 'both':
        mixture = {name: (w, f'text:{text}/{name}/*.txt') for name, w in SHARES.items()}
        fields = fields | {'data.source': '', 'data.mixture': repr(mixture)}
    recipe = tiny(fields, data_validation_fraction=0.5, data_seq_len=LENGTH, **changes)
    opened = data.open_dataset(recipe.data, say=discard_line)
    return of_recipe(recipe, opened.tokenizer, meta={'data': opened.digest})


SHARES = {'short': 0.75, 'long': 0.25}


def of_the_loop(c: Checkpoint) -> dict[str, float]:
    batches = functools.partial(data.evaluation_batches, batch_size=8, limit=0)
    rows = data.open_dataset(c.recipe.data, say=discard_line).validation
    step = jit_eval_step(c.learner, c.mesh)
    return evaluate(step, c.weights, c.hyper, c.mesh, batches, rows)


def test_reference_numbers_and_documents_add_up_to_the_loops(text):
    """A mixture, whose documents see each other within a row. Catches tokens that are counted for
    the next document, masked attention, and shares left out.
    """
    checkpoint = a_checkpoint(text, 'both')
    found, wanted = perplexity(checkpoint), of_the_loop(checkpoint)
    for name, value in wanted.items():
        assert found.numbers[name] == pytest.approx(value, rel=1e-6), name
    items = {name: np.array(column) for name, column in found.items.items()}
    for domain in SHARES:
        own = items['domain'] == domain
        ce = items['nats'][own].sum() / items['tokens'][own].sum()
        assert ce == pytest.approx(wanted[f'validation_{domain}_ce'], rel=1e-6)
    assert items['bytes'].sum() == found.numbers['bytes']
    assert items['tokens'].sum() == found.numbers['tokens']
    assert len({*items['item']}) == len(items['item']) > len({i[:16] for i in items['item']})
    (table,) = found.tables.values()
    bits = dict(zip(table.columns['domain'], table.columns['bits per byte'], strict=True))
    mean = sum(share * bits[name] for name, share in SHARES.items())
    assert mean == pytest.approx(wanted['bits_per_byte'], rel=1e-6)


@pytest.mark.full
def test_equivalence_windows_of_whole_documents_are_rows_that_mask_them(text):
    masked = {'data_mask_documents': True, 'data_packing': 'best_fit'}
    checkpoint = a_checkpoint(text, 'short', **masked)
    rows, windows = perplexity(checkpoint), perplexity(checkpoint, stride=LENGTH)
    assert rows.numbers['validation_ce'] > 1
    for name, value in rows.numbers.items():
        assert windows.numbers[name] == pytest.approx(value, rel=1e-6), name
    assert windows.items['item'] == rows.items['item']
    np.testing.assert_allclose(windows.items['nats'], rows.items['nats'], rtol=1e-5)


@pytest.mark.full
def test_reference_windows_move_on_by_the_stride(text):
    """Each token from the logits of its own window alone; and the first documents are those of all.
    Catches a token scored twice, and one with less context than it has.
    """
    checkpoint, stride = a_checkpoint(text, 'long'), 5
    found = perplexity(checkpoint, stride=stride, documents=6).items
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
        assert found['nats'][number] == pytest.approx(nats, rel=1e-5)
        assert found['tokens'][number] == len(tokens) - 1
    every = perplexity(checkpoint, stride=stride).items
    assert len(every['item']) > 6
    assert {name: column[:6] for name, column in every.items()} == found


def test_rows_of_a_few_documents_are_counted_alone(text):
    checkpoint = a_checkpoint(text, 'long')
    few, every = perplexity(checkpoint, documents=3), perplexity(checkpoint)
    np.testing.assert_allclose(few.items['nats'], every.items['nats'][:3], rtol=1e-5)
    assert few.items['item'] == every.items['item'][:3]
    nats, n_bytes = sum(few.items['nats']), sum(few.items['bytes'])
    assert few.numbers['bits_per_byte'] == pytest.approx(nats / math.log(2) / n_bytes)
    assert few.numbers['bytes'] == n_bytes < every.numbers['bytes']


@pytest.mark.parametrize(
    ('n', 'stride', 'counts'), [(2, 4, [1]), (9, 4, [8]), (10, 4, [8, 1]), (17, 8, [8, 8])]
)
def test_property_windows_score_each_token_once(n, stride, counts):
    """Windows of 8, of a document of n tokens."""
    windows = list(split_windows(np.arange(n), 8, stride))
    scored = [tokens[1 + before :].tolist() for tokens, before in windows]
    assert [*itertools.chain(*scored)] == [*range(1, n)]
    assert list(map(len, scored)) == counts


def test_what_cannot_be_read_is_refused(text):
    with pytest.raises(ValueError, match='stride=17 is more than'):
        perplexity(a_checkpoint(text, 'long'), stride=17)
