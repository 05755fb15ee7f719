"""Held-out texts during training (eval.texts). Reference: the suite of perplexity on the checkpoint
of the same step. Equivalence: training is the same without them, and a resumed run has their rows.
"""

import json
import math

import numpy as np
import pytest

from eval import perplexity
from eval.load import load
from eval.runs import frame, metrics_frame
from lm.config.texts import parse_texts
from lm.data.in_memory import TextRequest, encode_source, encode_text
from lm.data.tokenizers import ByteTokenizer
from lm.launch.exit_status import DONE, SIGNALLED
from lm.model.check import check
from lm.run.start import check_run
from lm.storage.files import read_json
from tests.helpers import tiny_config
from tests.sweep_helpers import (
    base,
    before_step,
    cell_config,
    curves,
    terminate_at,
    timeless,
    write_corpus,
)
from train import train, train_sweep

pytestmark = pytest.mark.usefixtures('programs_once')

LIMIT = 200  # tokens of each text


@pytest.fixture(scope='module')
def corpus(tmp_path_factory):
    return write_corpus(tmp_path_factory.mktemp('corpus'))


@pytest.fixture(scope='module')
def texts(tmp_path_factory):
    folder = tmp_path_factory.mktemp('texts')
    (folder / 'words.txt').write_text('norm layer head token ' * 40)
    (folder / 'letters.txt').write_text('déjà vu ' * 9)
    return {name: f'text:{folder}/{name}.txt' for name in ('words', 'letters')}


def tree(corpus, texts=None, **changes):
    named = {'eval_texts': repr(texts), 'eval_texts_tokens': LIMIT} if texts else {}
    return base(corpus, **named, **changes)


@pytest.fixture(scope='module')
def text_run(corpus, texts, tmp_path_factory):
    workdir = tmp_path_factory.mktemp('trained') / 'run'
    changes = {'eval_texts_every': 3, 'train_checkpoint_every': 3}
    assert train(cell_config(tree(corpus, texts, **changes), {}), workdir) == DONE
    return workdir


def text_rows(workdir):
    return [row for row in timeless(workdir) if 'texts_ce' in row]


def test_rows_equal_the_suite(text_run, texts):
    """The words are cut at the limit. Catches a mean of tokens for the mean over texts, bytes of
    the whole text, and batches that train.eval_batches cuts.
    """
    rows = text_rows(text_run)
    assert [row['step'] for row in rows] == [3, 6, 8]
    last = rows[-1]
    (text_run / 'cut.txt').write_text(('norm layer head token ' * 40)[:LIMIT])
    sources = texts | {'words': f'text:{text_run}/cut.txt'}
    bits = []
    for name, source in sources.items():
        numbers = perplexity(load(text_run), source=source).numbers
        assert last[f'text_{name}_ce'] == pytest.approx(numbers['ce'], rel=1e-5)
        assert last[f'text_{name}_bits_per_byte'] == pytest.approx(numbers['bits_per_byte'], 1e-5)
        bits.append(numbers['bits_per_byte'])
    assert last['texts_bits_per_byte'] == pytest.approx(sum(bits) / 2, rel=1e-5)
    assert abs(bits[0] - bits[1]) > 1e-3
    ces = [last[f'text_{name}_ce'] for name in texts]
    assert last['texts_ce'] == pytest.approx(sum(ces) / 2, rel=1e-12)


def test_records_have_the_texts(text_run, texts):
    """summary.json, the table of runs and the frame of metrics."""
    last, summary = text_rows(text_run)[-1], read_json(text_run / 'summary.json')
    assert {name: summary[name] for name in last if name != 'step'}.items() <= last.items()
    described = summary['held_out_texts']
    assert {name: text['source'] for name, text in described.items()} == texts
    assert described['letters']['bytes'] == len(('déjà vu ' * 9).encode())
    (row,) = frame(text_run).to_dict('records')
    assert row['texts_bits_per_byte'] == last['texts_bits_per_byte']
    by_name = {name: last[f'text_{name}_bits_per_byte'] for name in texts}
    assert json.loads(row['texts']) == by_name
    metrics = metrics_frame(text_run).set_index('step')
    assert metrics.loc[3, 'text_words_ce'] == text_rows(text_run)[0]['text_words_ce']


def test_training_is_the_same_without_texts(text_run, corpus, tmp_path):
    """Bitwise, and by default they have the steps of the validation split."""
    assert train(cell_config(tree(corpus, train_checkpoint_every=3), {}), tmp_path) == DONE
    plain = timeless(tmp_path)
    assert [row for row in timeless(text_run) if 'texts_ce' not in row] == plain
    recipe = tiny_config({'eval.texts': "{'a': 'python'}", 'train.eval_every': 7})
    assert recipe.texts_every == 7 and tiny_config().texts == {}


@pytest.mark.parametrize('stop', [3, 4])
def test_killed_run_has_the_same_rows(stop, text_run, corpus, texts, tmp_path, monkeypatch):
    """Ended at the step of an evaluation, and at the next."""
    changes = {'eval_texts_every': 3, 'train_checkpoint_every': 3}
    recipe = cell_config(tree(corpus, texts, **changes), {})
    with monkeypatch.context() as patch:
        before_step(patch, terminate_at(stop))
        assert train(recipe, tmp_path) > SIGNALLED
    assert train(recipe, tmp_path) == DONE
    assert timeless(tmp_path) == timeless(text_run)


@pytest.mark.full
def test_changed_text_is_noticed(corpus, tmp_path, monkeypatch):
    """As the text of training is. The text behind the limit does not count."""
    file = tmp_path / 'text.txt'
    file.write_text('a' * 100 + 'b' * 900)
    recipe = cell_config(tree(corpus, {'mine': f'text:{file}'}), {})
    with monkeypatch.context() as patch:
        before_step(patch, terminate_at(4))
        assert train(recipe, tmp_path / 'run') > SIGNALLED
    before = file.read_text()
    file.write_text('c' + before[1:])
    with pytest.raises(ValueError, match=r"the text 'mine' of eval.texts .* --continue_changed"):
        train(recipe, tmp_path / 'run')
    file.write_text(before + 'more')
    assert train(recipe, tmp_path / 'run') == DONE


@pytest.mark.full
@pytest.mark.parametrize('run_axis', ['loop', 'vmap'])
def test_sweep_runs_have_their_texts(run_axis, text_run, corpus, texts, tmp_path):
    """Two runs of a program; the first is the run that trained alone."""
    changes = {'eval_texts_every': 3, 'train_checkpoint_every': 3, 'kernels_run_axis': run_axis}
    seeds = [{'train.seed': seed} for seed in range(2)]
    assert train_sweep(tree(corpus, texts, **changes), seeds, tmp_path) == DONE
    first, second = curves(tmp_path).values()
    both_rows = ([row for row in rows if 'texts_ce' in row] for rows in (first, second))
    for row, second_row, expected in zip(*both_rows, text_rows(text_run), strict=True):
        assert row.keys() == expected.keys() and second_row['texts_ce'] != row['texts_ce']
        for name, value in expected.items():
            assert row[name] == pytest.approx(value, rel=0 if run_axis == 'loop' else 1e-5)


def test_limit_counts_tokens(tmp_path):
    """Whole documents up to the limit, of which the last is cut; bytes are those of the text that
    is left. Catches a limit of documents, and bytes of a document that is cut.
    """
    for i, text in enumerate(('ab' * 10, 'é' * 50, 'never read')):
        (tmp_path / f'{i}.txt').write_text(text)
    fields, tokenizer = tiny_config({'data.seq_len': 8}).data, ByteTokenizer()

    def encode(tokens):
        request = TextRequest(f'text:{tmp_path}/*.txt', 'eval.texts', tokens=tokens)
        return encode_text(request, tokenizer, fields, print)

    cut = encode(42)
    assert cut.texts == ['ab' * 10, 'é' * 10] and cut.rows.n_bytes == 40
    assert cut.rows.n_tokens == 42  # with an EOS each
    assert encode(0).texts[2] == 'never read'
    assert encode(22).texts == ['ab' * 10]
    assert encode(42).digest == cut.digest != encode(44).digest


def test_conversations_are_counted_whole(tmp_path):
    """The answers count, and a conversation that reaches the limit is the last."""
    messages = [{'role': 'user', 'content': 'hi'}, {'role': 'assistant', 'content': 'hello'}]
    file = tmp_path / 'chats.jsonl'
    file.write_text((json.dumps({'messages': messages}) + '\n') * 5)
    fields = tiny_config({'data.seq_len': 64}).data
    rows = [
        encode_source(
            TextRequest(f'chat:{file}', 'eval.texts', tokens=tokens),
            ByteTokenizer(),
            fields,
            'byte',
            print,
        ).rows
        for tokens in (0, 1)
    ]
    assert [len(part.targets.n_bytes) for part in rows] == [5, 1]
    assert rows[0].n_tokens == 5 * rows[1].n_tokens < 5 * rows[1].longest


WRONG = {
    'text:book.txt': 'must be a dict of names',
    "{'a': 'python', 'a': 'text:x'}": 'the same name twice',
    "{'a b': 'python'}": 'one word of letters',
    "{'a': ''}": 'must have a source after each name',
    "{'a': 3}": 'must have a source after each name',
    "{'a': 'python', 'b': 'python'}": 'List it once',
    '{}': 'must be a dict of names',
}


@pytest.mark.usefixtures('nothing_is_traced')
@pytest.mark.parametrize('text', WRONG)
def test_wrong_texts_are_refused(text):
    with pytest.raises(ValueError, match=WRONG[text]):
        tiny_config({'eval.texts': text})


@pytest.mark.usefixtures('nothing_is_traced')
def test_wrong_sources_are_refused(tmp_path):
    for changes, message in (
        ({'eval.texts': "{'a': 'book.txt'}"}, r"eval.texts, 'a' must begin with its kind"),
        ({'eval.texts': f"{{'a': 'text:{tmp_path}/no.txt'}}"}, "eval.texts, 'a'=text:"),
        ({'eval.texts_every': 3}, 'eval.texts_every=3 has no effect without eval.texts'),
        ({'eval.texts_tokens': 3}, 'eval.texts_tokens=3 has no effect without eval.texts'),
    ):
        with pytest.raises(ValueError, match=message):
            check_run(tiny_config(changes))
    check(tiny_config({'eval.texts': "{'a': 'python'}", 'eval.texts_every': 0}))


@pytest.mark.parametrize(
    ('name', 'content', 'message'),
    [
        ('empty.txt', '', r"^eval\.texts, 'mine'=text:.* contains no text"),
        ('pairs.jsonl', '{"good": "a"}', r"^eval\.texts, 'mine': .* has no field 'text'"),
    ],
)
def test_unusable_text_is_named(name, content, message, corpus, tmp_path):
    """Before the first step."""
    (tmp_path / name).write_text(content)
    with pytest.raises(ValueError, match=message):
        train(cell_config(tree(corpus, {'mine': f'text:{tmp_path}/{name}'}), {}), tmp_path / 'run')


def test_spaces_do_not_change_the_run():
    first, second = (
        tiny_config({'eval.texts': text}) for text in ("{'a':'python'}", "{ 'a' : 'python' }")
    )
    assert first == second and parse_texts(first.eval.texts) == {'a': 'python'}
    assert not math.isnan(np.float64(first.eval.texts_tokens))
