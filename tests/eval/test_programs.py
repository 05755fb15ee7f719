"""Programs that read checkpoints: loading, perplexity, generation, and their output."""

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
    """A model that has memorized its short text."""
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


@pytest.mark.full
def test_perplexity_matches_the_run(workdir):
    written = read_rows(workdir / 'metrics.jsonl')[-1]
    measured = perplexity(load(workdir)).numbers
    for name in ('validation_ce', 'bits_per_byte', 'perplexity'):
        np.testing.assert_allclose(measured[name], written[name], rtol=1e-6)


@pytest.mark.full
def test_path_names_an_older_checkpoint(workdir):
    older, newest = load(workdir / 'checkpoints' / '100'), load(workdir)
    assert (older.step, newest.step) == (100, 200)
    same_step = load_step(newest, 100)
    assert (same_step.step, same_step.path) == (
        100,
        older.path,
    ) and same_step.learner is newest.learner
    jax.tree.map(np.testing.assert_array_equal, same_step.weights, older.weights)
    records = [row for row in read_rows(workdir / 'metrics.jsonl') if 'bits_per_byte' in row]
    np.testing.assert_allclose(
        perplexity(older).numbers['bits_per_byte'], records[0]['bits_per_byte'], rtol=1e-6
    )


def test_ngram_suite_on_the_same_split(workdir):
    checkpoint = load(workdir)
    measured = ngram(checkpoint).numbers
    assert measured['bytes'] == perplexity(checkpoint).numbers['bytes']
    assert 0 < measured['ngram5_bits_per_byte'] < 2  # eight words, each of one following letter


@pytest.mark.full
def test_generate_continues_the_text(workdir):
    """The text may exceed one window of 16 tokens."""
    (text,) = generate(load(workdir), ['3: abcdefgh abc'], tokens=40, temperature=0)
    assert text.startswith('3: abcdefgh abcdefgh abcdefgh abcdefgh abc')


@pytest.mark.full
def test_prompts_are_independent(workdir):
    """Prompts may exceed one window of 16 tokens; the first row is sampled as if it were alone."""
    checkpoint, prompts = load(workdir), ['3: abcdefgh abc', '1']
    together = generate(checkpoint, prompts, tokens=20, temperature=0)
    assert together == [
        generate(checkpoint, [prompt], tokens=20, temperature=0)[0] for prompt in prompts
    ]
    texts = [
        generate(checkpoint, prompt, 9, temperature=2.0)[0] for prompt in (prompts, prompts[:1])
    ]
    assert texts[0] == texts[1]


@pytest.mark.full
def test_generate_is_repeatable_by_seed(workdir):
    checkpoint = load(workdir)
    texts = [generate(checkpoint, ['1'], 20, temperature=2.0, seed=s)[0] for s in (0, 0, 1)]
    assert texts[0] == texts[1] != texts[2]


@pytest.mark.full
def test_sampling_stop_strings_and_converse(workdir, monkeypatch, capsys):
    """With more prompts than slots, the i-th is sampled with seed + i. A line gives the same text
    as its prompt. A stop string ends a text, even if tokens cut it.
    """
    checkpoint = load(workdir)
    many = generate(checkpoint, ['1: abcdefgh ', '2'] * 9, 12, 2.0, seed=5)
    options = {'top_k': 250, 'top_p': 0.99, 'min_p': 1e-3}
    (single,) = generate(checkpoint, ['2'], 12, 2.0, seed=12)
    assert many[7] == single and len({*many[1::2]}) > 1
    (stopped,) = generate(checkpoint, ['3: abcd'], 14, temperature=0, stop=['zz', 'h ab'])
    assert stopped == '3: abcdefg'
    monkeypatch.setattr('sys.stdin', io.StringIO('3: abc\n' + 'long ' * 9 + '\n2\n'))
    converse(checkpoint, 12, Sampling(2.0, **options, seed=1), [])
    stdout, error = capsys.readouterr()
    completions = [
        generate(checkpoint, [prompt], 12, 2.0, seed=1, **options)[0] for prompt in ('3: abc', '2')
    ]
    assert stdout == ''.join(
        text[len(prompt) :] + '\n'
        for text, prompt in zip(completions, ('3: abc', '2'), strict=True)
    )
    assert error == (
        'error: a prompt must have 1 to 16 tokens, including the start token; got 46. Cut its '
        'beginning.\n'
    )


@pytest.mark.parametrize('place', ['', 'checkpoints/7', 'tokenizer'])
def test_errors_missing_checkpoint(place, workdir, tmp_path):
    root = workdir if place else tmp_path
    with pytest.raises(ValueError, match='has no checkpoint'):
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
    json_path = tmp_path / 'out.json'
    page, suite = tmp_path / 'page.html', '--suite=perplexity'
    options = ('--perplexity.stride=8', '--perplexity.documents=1', '--step=100')
    arguments = (f'--checkpoint={workdir}', suite, *options, f'--out={json_path}', f'--page={page}')
    process = run_module('eval', *arguments)
    assert process.returncode == 0, process.stderr
    record = json.loads(process.stdout)
    assert json.loads(json_path.read_text()) == record and record['step'] == 100
    assert 0 < record['perplexity']['tokens'] < perplexity(load(workdir)).numbers['tokens']
    assert 'Bits per byte by domain' in page.read_text()
    (path,) = (workdir / 'evaluations' / '100').iterdir()
    assert read_json(path)['options'] == {'stride': 8, 'documents': 1, 'source': ''}


@pytest.mark.full
def test_eval_program_suggests_the_nearest_suite(workdir):
    process = run_module('eval', f'--checkpoint={workdir}', '--suite=perplexty')
    assert process.returncode == 1 and "Did you mean 'perplexity'" in process.stderr
    assert 'Traceback' not in process.stderr


@pytest.mark.full
def test_generate_program_prints_the_text(workdir):
    """Streamed, with the text of the function."""
    process = run_module(
        'eval.generate', f'--checkpoint={workdir}', '--prompt=3: abc', '--tokens=6'
    )
    assert process.returncode == 0, process.stderr
    assert process.stdout == generate(load(workdir), ['3: abc'], 6)[0] + '\n'


@pytest.mark.full
@pytest.mark.parametrize(
    ('flag', 'message'),
    [
        ('--top_p=0', 'error: top_p must be above 0 and at most 1'),
        ('--stop=', 'error: --stop must not be empty'),
        ('--prompt=' + 'long ' * 9, 'error: a prompt must have 1 to 16 tokens'),
    ],
)
def test_generate_program_errors_are_one_line(flag, message, workdir):
    process = run_module('eval.generate', f'--checkpoint={workdir}', flag)
    assert process.returncode == 1 and process.stderr.startswith(message) and not process.stdout
    assert process.stderr.count('\n') == 1


def test_tiny_settings_are_fields():
    """A renamed field would otherwise only show in a subprocess."""
    assert set(TINY) <= set(json_fields())


def json_fields() -> list[str]:
    from configs import default
    from lm.config.resolve import flatten, resolve

    return list(flatten(resolve(default.get_config())))


@pytest.mark.full
@pytest.mark.parametrize(
    ('module', 'flag'),
    [
        ('eval.coordinates', '--config=FILE'),
        ('eval.generate', '--checkpoint=WORKDIR'),
        ('eval.serve', '--checkpoint=WORKDIR'),
    ],
)
def test_missing_flag_is_named(module, flag):
    process = run_module(module)
    assert process.returncode == 1 and process.stdout == ''
    assert process.stderr.startswith(f'error: {flag} is required')
