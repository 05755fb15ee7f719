"""What reads checkpoints: loading, perplexity, generation, and the programs' answers."""

import io
import json

import jax
import numpy as np
import pytest

from eval import ngram, perplexity
from eval.generate import converse, generate
from eval.load import load, load_step
from lm.inference.sampling import Sampling
from lm.record.metrics import read_rows
from lm.storage.files import read_json
from tests.commands import tiny
from tests.eval.programs import run_module
from tests.sweep_helpers import TINY
from train import DONE, train


@pytest.fixture(scope='module')
def corpus(tmp_path_factory):
    folder = tmp_path_factory.mktemp('text')
    for i in range(20):
        (folder / f'{i}.txt').write_text(f'{i}: ' + 'abcdefgh ' * 12)
    return {'data.source': f'text:{folder}/*.txt', 'data.cache_dir': str(folder / 'cache')}


@pytest.fixture(scope='module')
def workdir(corpus, tmp_path_factory):
    """A model that has learnt its short text by heart."""
    folder = tmp_path_factory.mktemp('runs') / 'run'
    config = tiny(
        corpus,
        train_steps=200,
        train_eval_every=100,
        train_checkpoint_every=100,
        optim_lr=0.02,
        model_reparam='weight_norm',
    )
    assert train(config, folder) == DONE
    return folder


def test_perplexity_of_the_checkpoint_is_that_of_the_run(workdir):
    written = read_rows(workdir / 'metrics.jsonl')[-1]
    measured = perplexity(load(workdir)).numbers
    for name in ('validation_ce', 'bits_per_byte', 'perplexity'):
        np.testing.assert_allclose(measured[name], written[name], rtol=1e-6)


@pytest.mark.full
def test_an_older_checkpoint_is_named_by_its_path(workdir):
    older, newest = load(workdir / 'checkpoints' / '100'), load(workdir)
    assert (older.step, newest.step) == (100, 200)
    beside = load_step(newest, 100)
    assert (beside.step, beside.path) == (100, older.path) and beside.learner is newest.learner
    jax.tree.map(np.testing.assert_array_equal, beside.weights, older.weights)
    written = [row for row in read_rows(workdir / 'metrics.jsonl') if 'bits_per_byte' in row]
    np.testing.assert_allclose(
        perplexity(older).numbers['bits_per_byte'], written[0]['bits_per_byte'], rtol=1e-6
    )


def test_ngram_suite_on_the_same_split(workdir):
    checkpoint = load(workdir)
    measured = ngram(checkpoint).numbers
    assert measured['bytes'] == perplexity(checkpoint).numbers['bytes']
    assert 0 < measured['ngram5_bits_per_byte'] < 2  # eight words, each of one following letter


@pytest.mark.full
def test_generate_goes_on_as_the_text_does(workdir):
    """Beyond one window of 16 tokens too."""
    (text,) = generate(load(workdir), ['3: abcdefgh abc'], tokens=40, temperature=0)
    assert text.startswith('3: abcdefgh abcdefgh abcdefgh abcdefgh abc')


@pytest.mark.full
def test_prompts_of_different_length_are_gone_on_as_alone(workdir):
    """Beyond one window of 16 tokens; the first row draws what it draws alone."""
    checkpoint, prompts = load(workdir), ['3: abcdefgh abc', '1']
    together = generate(checkpoint, prompts, tokens=20, temperature=0)
    assert together == [generate(checkpoint, [p], tokens=20, temperature=0)[0] for p in prompts]
    drawn = [generate(checkpoint, p, 9, temperature=2.0)[0] for p in (prompts, prompts[:1])]
    assert drawn[0] == drawn[1]


@pytest.mark.full
def test_generate_is_repeatable_by_seed(workdir):
    checkpoint = load(workdir)
    texts = [generate(checkpoint, ['1'], 20, temperature=2.0, seed=s)[0] for s in (0, 0, 1)]
    assert texts[0] == texts[1] != texts[2]


@pytest.mark.full
def test_samples_stops_and_typed_prompts(workdir, monkeypatch, capsys):
    """More prompts than slots; the i-th is drawn with seed + i; a line gives what its text gives;
    a stop string ends a text, also where tokens cut it.
    """
    checkpoint = load(workdir)
    many = generate(checkpoint, ['1: abcdefgh ', '2'] * 9, 12, 2.0, seed=5)
    options = {'top_k': 250, 'top_p': 0.99, 'min_p': 1e-3}
    (one,) = generate(checkpoint, ['2'], 12, 2.0, seed=12)
    assert many[7] == one and len({*many[1::2]}) > 1
    (stopped,) = generate(checkpoint, ['3: abcd'], 14, temperature=0, stop=['zz', 'h ab'])
    assert stopped == '3: abcdefg'
    monkeypatch.setattr('sys.stdin', io.StringIO('3: abc\n' + 'long ' * 9 + '\n2\n'))
    converse(checkpoint, 12, Sampling(2.0, **options, seed=1), [])
    found, error = capsys.readouterr()
    wanted = [generate(checkpoint, [p], 12, 2.0, seed=1, **options)[0] for p in ('3: abc', '2')]
    assert found == ''.join(
        text[len(p) :] + '\n' for text, p in zip(wanted, ('3: abc', '2'), strict=True)
    )
    assert error == (
        'error: a prompt has 1 to 16 tokens, with the one that begins it; got 46. Leave out its '
        'beginning.\n'
    )


@pytest.mark.parametrize('place', ['', 'checkpoints/7', 'tokenizer'])
def test_no_checkpoint_says_what_to_give(place, workdir, tmp_path):
    root = workdir if place else tmp_path
    with pytest.raises(ValueError, match='holds no checkpoint'):
        load(root / place)


@pytest.mark.full
def test_changed_data_is_refused(corpus, tmp_path):
    folder = tmp_path / 'text'
    folder.mkdir()
    for i in range(4):
        (folder / f'{i}.txt').write_text(f'{i} norms ' * 50)
    config = tiny(corpus, data_source=f'text:{folder}/*.txt', train_steps=4)
    assert train(config, tmp_path / 'run') == DONE
    (folder / '0.txt').write_text('other norms ' * 50)
    with pytest.raises(ValueError, match='has changed since training'):
        perplexity(load(tmp_path / 'run'))


@pytest.mark.full
def test_eval_program_writes_json(workdir, tmp_path):
    out = tmp_path / 'out.json'
    page, suite = tmp_path / 'page.html', '--suite=perplexity'
    options = ('--perplexity.stride=8', '--perplexity.documents=1', '--step=100')
    words = (f'--checkpoint={workdir}', suite, *options, f'--out={out}', f'--page={page}')
    done = run_module('eval', *words)
    assert done.returncode == 0, done.stderr
    record = json.loads(done.stdout)
    assert json.loads(out.read_text()) == record and record['step'] == 100
    assert 0 < record['perplexity']['tokens'] < perplexity(load(workdir)).numbers['tokens']
    assert 'Bits per byte by domain' in page.read_text()
    (path,) = (workdir / 'evaluations' / '100').iterdir()
    assert read_json(path)['options'] == {'stride': 8, 'documents': 1}


@pytest.mark.full
def test_eval_program_answers_an_unknown_suite_with_the_nearest(workdir):
    done = run_module('eval', f'--checkpoint={workdir}', '--suite=perplexty')
    assert done.returncode == 1 and "Did you mean 'perplexity'" in done.stderr
    assert 'Traceback' not in done.stderr


@pytest.mark.full
def test_generate_program_prints_the_text(workdir):
    """Streamed, which is what the function gives."""
    done = run_module('eval.generate', f'--checkpoint={workdir}', '--prompt=3: abc', '--tokens=6')
    assert done.returncode == 0, done.stderr
    assert done.stdout == generate(load(workdir), ['3: abc'], 6)[0] + '\n'


@pytest.mark.full
@pytest.mark.parametrize(
    ('flag', 'said'),
    [
        ('--top_p=0', 'error: top_p must be above 0 and at most 1'),
        ('--stop=', 'error: --stop= is empty'),
        ('--prompt=' + 'long ' * 9, 'error: a prompt has 1 to 16 tokens'),
    ],
)
def test_generate_program_answers_bad_input_in_a_line(flag, said, workdir):
    done = run_module('eval.generate', f'--checkpoint={workdir}', flag)
    assert done.returncode == 1 and done.stderr.startswith(said) and not done.stdout
    assert done.stderr.count('\n') == 1


def test_tiny_settings_are_of_the_default_config():
    """A renamed field would otherwise only show in a subprocess."""
    assert set(TINY) <= set(json_fields())


def json_fields() -> list[str]:
    from configs import default
    from lm.config.resolve import flatten, resolve

    return list(flatten(resolve(default.get_config())))
