"""Contract: each row of other_programs.toml is valid, and names existing fields."""

import re
import tomllib
from collections import Counter
from importlib.util import find_spec
from pathlib import Path

import pytest

from configs import default
from eval.evaluation.suite_flags import SUITES
from eval.sync.trackers import TRACKERS
from lm.config import other_programs
from lm.config.fields import CHOICES, FIELDS
from lm.config.other_programs import (
    download_hint,
    elsewhere_hint,
    foreign_names,
    is_near,
    normalize_name,
)
from lm.config.resolve import resolve
from lm.launch.command import explain_refusal
from tests import ROOT

TABLE = tomllib.loads(Path(other_programs.__file__).with_suffix('.toml').read_text())


def test_no_name_is_listed_twice():
    """The second meaning of a name would silently replace the first."""
    columns = [TABLE[section].values() for section in ('fields', 'flags', 'forms', 'presets')]
    rows = {section: TABLE[section] for section in ('values', 'also', 'notes', 'absent')}
    columns += [[row.get('names') or row['words'] for row in rows[section]] for section in rows]
    columns += [TABLE['exact'].values(), TABLE['batches'].values()]
    columns += [TABLE['tokens'].values()]
    columns += [[TABLE[line]] for line in ('models', 'hub', 'devices', 'lists', 'configs')]
    for column in columns:
        names = Counter(' '.join(column).split())
        assert names and names.most_common(1)[0][1] == 1, names.most_common(1)


def test_rows_name_existing_fields_and_configs():
    foreign = foreign_names()
    assert {path for paths in foreign.fields.values() for path in paths} <= FIELDS.keys()
    assert {path for pair in foreign.shares.values() for path in pair} <= FIELDS.keys()
    assert {path for fields in foreign.implied.values() for path in fields} <= FIELDS.keys()
    assert foreign.values.keys() <= foreign.fields.keys() | FIELDS.keys()
    names_here = {path.split('.')[1] for path in FIELDS}
    assert foreign.forms.keys() <= foreign.fields.keys() | names_here
    assert {*foreign.hub} <= foreign.fields.keys()
    assert foreign.batches.keys() <= foreign.fields.keys()
    assert {*foreign.tokens.values()} <= FIELDS.keys()
    assert all(other_programs.replacement_hint(name) for name in foreign.tokens)
    settings = [setting.split('=') for setting in foreign.exact.values()]
    assert [pair for pair in settings if explain_refusal(*pair)] == []
    assert all((ROOT / f'configs/{name}.py').is_file() for name in foreign.presets)
    assert all(dataset.count('/') == 1 for dataset in foreign.corpora.values())


def test_words_and_sentences_are_well_formed():
    """A word in another spelling would match nothing."""
    foreign = foreign_names()
    words = [
        *foreign.absent,
        *foreign.corpora,
        *(size.replace('.', '') for row in foreign.presets.values() for size in row),
    ]
    words += [value for table in foreign.values.values() for value in table]
    assert [name for name in words if name != normalize_name(name)] == []
    for sentence in (*foreign.absent.values(), *foreign.notes.values()):
        assert sentence == ' '.join(sentence.split()) and sentence
    assert not any(sentence.endswith('.') for sentence in foreign.absent.values())
    assert all(sentence.endswith('.') for sentence in foreign.notes.values())
    assert all(form.format('x') for form in foreign.forms.values())


def list_explanations() -> list[str]:
    """Returns all sentences that an answer may hold."""
    foreign = foreign_names()
    elsewhere = [say for rows in foreign.elsewhere.values() for _, say in rows]
    hint = download_hint('OWNER/NAME', 'mine')
    return [*foreign.absent.values(), *foreign.notes.values(), *elsewhere, hint]


def test_explanations_name_fields_and_values_that_work():
    text = ' '.join(list_explanations())
    sections = '|'.join({path.split('.')[0] for path in FIELDS})
    fields_text = re.sub(r'python -m [\w.]+', '', text)  # programs of eval
    paths = re.findall(rf'(?<![\w.])(?:--config\.)?((?:{sections})\.(?!py\b)\w+)', fields_text)
    assert len(paths) > 50 and {*paths} <= FIELDS.keys()
    values = re.findall(r'--config\.(\w+\.\w+)=([\w:./*]+)', text)
    placeholders = re.compile('[A-Z:]+$')  # STEP:COUNT
    values = [pair for pair in values if not placeholders.match(pair[1])]
    assert values and [pair for pair in values if explain_refusal(*pair)] == []


def test_explanations_name_programs_and_extras_that_exist():
    text = ' '.join(list_explanations())
    for name in re.findall(r'python -m ([\w.]+)', text):
        spec = find_spec(name)
        assert spec and (not spec.submodule_search_locations or find_spec(f'{name}.__main__')), name
    sources = [*ROOT.glob('eval/**/*.py'), *ROOT.glob('lm/launch/*.py'), *ROOT.glob('tpu/**/*.py')]
    sources.append(ROOT / 'train.py')
    code = '\n'.join(file.read_text() for file in sources)
    commands = text.replace('tensorboard --logdir', '').replace('--local-dir', '')  # of others
    flags = {*re.findall(r'--(\w[\w-]*)', commands)} - {'config'}
    unknown = [f for f in flags if f"'{f}'" not in code and f' {f}: str = option(' not in code]
    assert flags and unknown == []
    assert {'import-hf', 'export-hf'} <= {*re.findall(r'eval\.convert (\S+)', text)}
    assert all(f"'{name}': " in code for name in re.findall(r'eval\.convert (\S+)', text))
    project = tomllib.loads((ROOT / 'pyproject.toml').read_text())['project']
    extras = {*re.findall(r'\bextra (\w+)', text)}
    assert extras and extras <= project['optional-dependencies'].keys()
    assert {*re.findall(r'--(?:track|to)=(\w+)', text)} <= TRACKERS.keys()
    assert {*re.findall(r'--suite=(\w+)', text)} <= SUITES.keys()
    files = re.findall(r'configs/\w+\.py|docs/[\w/]+\.md', text)
    assert all((ROOT / file).is_file() for file in files) and 'docs/guide/hosts.md' in files


def test_absent_names_are_not_here():
    """A part or a field that was added since would be refused in words of the time before it."""
    parts = {normalize_name(row) for choice in CHOICES.values() for row in choice.table}
    fields = {normalize_name(path.split('.')[1]) for path in FIELDS}
    assert foreign_names().absent.keys() & parts == set()
    # The axis of the mesh, and the residual stream, which the --stream of servers does not mean.
    assert foreign_names().absent.keys() & fields == {'data', 'stream'}


@pytest.mark.parametrize(
    ('path', 'text', 'words'),
    [
        ('data.source', 'gs://bucket/data', 'text:gs://BUCKET/GLOB'),
        ('data.validation_source', 's3://bucket/data', 'text:s3://BUCKET/GLOB'),
        ('data.source', 'text:gs://bucket/data/*.txt', ''),
        ('data.source', 'text:https://host/a.txt', 'fetch the files'),
        ('data.source', '["https://host/a.jsonl.gz"]', 'text:GLOB'),
        ('data.source', 'mine/*.jsonl', ''),
        ('data.tokenizer', 'openai-community/gpt2', 'tokenizer.json'),
        ('data.tokenizer', 'tokenizers/llama', ''),
        ('train.init_from', 'Qwen/Qwen3-0.6B', 'import-hf'),
        ('train.init_from', 'gs://bucket/llama-3', ''),  # a run may be there
        ('train.init_from', 'out/run', ''),
    ],
)
def test_value_that_is_elsewhere_is_explained(path, text, words):
    hint = elsewhere_hint(path, text)
    assert words in hint and bool(words) == bool(hint)


def test_model_that_is_on_disk_is_no_model_of_the_hub(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert elsewhere_hint('train.init_from', 'runs/llama-3')
    Path('runs/llama-3').mkdir(parents=True)
    assert elsewhere_hint('train.init_from', 'runs/llama-3') == ''


@pytest.mark.parametrize(
    ('name', 'other', 'is_part', 'expected'),
    [
        ('step', 'steps', True, True),
        ('learning_rat', 'learning_rate', True, True),
        ('seq_length', 'max_seq_len', True, True),
        ('warmupsteps', 'warmup_steps', True, True),
        ('lrr', 'lr', True, False),  # shares no word
        ('lrr', 'lr', False, True),
        ('embedding_lr', 'embedding_norm', True, False),
        ('embedding_lr', 'embedding_norm', False, False),
        ('profiler_steps', 'aro_steps', True, False),
        ('temperature', 'readout_temperature', True, False),
    ],
)
def test_near_names_share_their_words(name, other, is_part, expected):
    assert is_near(name, other, is_part) is expected


def test_file_is_read_on_first_miss():
    foreign_names.cache_clear()
    resolve(default.get_config())
    assert not foreign_names.cache_info().currsize
    assert other_programs.replacement_hint('use_wandb') and foreign_names.cache_info().currsize == 1
