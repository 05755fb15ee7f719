"""Contract: each row of other_programs.toml is valid, and names existing fields."""

import tomllib
from collections import Counter
from pathlib import Path

from configs import default
from lm.config import other_programs
from lm.config.fields import FIELDS
from lm.config.other_programs import foreign_names, normalize_name
from lm.config.resolve import resolve
from tests import ROOT

TABLE = tomllib.loads(Path(other_programs.__file__).with_suffix('.toml').read_text())


def test_no_name_is_listed_twice():
    """The second meaning of a name would silently replace the first."""
    columns = [TABLE[section].values() for section in ('fields', 'flags', 'forms', 'presets')]
    rows = {section: TABLE[section] for section in ('values', 'also', 'notes', 'absent')}
    columns += [[row.get('names') or row['words'] for row in rows[section]] for section in rows]
    columns += [[TABLE[line]] for line in ('batches_of_a_step', 'models', 'hub')]
    for column in columns:
        names = Counter(' '.join(column).split())
        assert names and names.most_common(1)[0][1] == 1, names.most_common(1)


def test_rows_name_existing_fields_and_configs():
    foreign = foreign_names()
    assert {path for paths in foreign.fields.values() for path in paths} <= FIELDS.keys()
    assert {path for pair in foreign.shares.values() for path in pair} <= FIELDS.keys()
    assert {path for fields in foreign.implied.values() for path in fields} <= FIELDS.keys()
    assert foreign.values.keys() <= foreign.fields.keys() | FIELDS.keys()
    assert foreign.forms.keys() | {*foreign.step_batches, *foreign.hub} <= foreign.fields.keys()
    assert all((ROOT / f'configs/{name}.py').is_file() for name in foreign.presets)
    assert all(dataset.count('/') == 1 for dataset in foreign.corpora.values())


def test_words_and_sentences_are_well_formed():
    """A word in another spelling would match nothing."""
    foreign = foreign_names()
    words = [
        *foreign.absent,
        *foreign.corpora,
        *(size for row in foreign.presets.values() for size in row),
    ]
    words += [value for table in foreign.values.values() for value in table]
    assert [name for name in words if name != normalize_name(name)] == []
    for sentence in (*foreign.absent.values(), *foreign.notes.values()):
        assert sentence == ' '.join(sentence.split()) and sentence
    assert not any(sentence.endswith('.') for sentence in foreign.absent.values())
    assert all(sentence.endswith('.') for sentence in foreign.notes.values())
    assert all(form.format('x') for form in foreign.forms.values())


def test_file_is_read_on_first_miss():
    foreign_names.cache_clear()
    resolve(default.get_config())
    assert not foreign_names.cache_info().currsize
    assert other_programs.replacement_hint('use_wandb') and foreign_names.cache_info().currsize == 1
