"""Contract: each row of other_programs.toml can be read, and names what there is here."""

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
    """The second meaning of a name would replace the first without a word."""
    columns = [TABLE[section].values() for section in ('fields', 'flags', 'forms', 'presets')]
    rows = {section: TABLE[section] for section in ('values', 'also', 'notes', 'absent')}
    columns += [[row.get('names') or row['words'] for row in rows[section]] for section in rows]
    columns += [[TABLE[line]] for line in ('batches_of_a_step', 'models', 'hub')]
    for column in columns:
        names = Counter(' '.join(column).split())
        assert names and names.most_common(1)[0][1] == 1, names.most_common(1)


def test_rows_name_fields_and_configs_that_there_are():
    there = foreign_names()
    assert {path for paths in there.fields.values() for path in paths} <= FIELDS.keys()
    assert {path for pair in there.shares.values() for path in pair} <= FIELDS.keys()
    assert {path for fields in there.implied.values() for path in fields} <= FIELDS.keys()
    assert there.values.keys() <= there.fields.keys() | FIELDS.keys()
    assert there.forms.keys() | {*there.step_batches, *there.hub} <= there.fields.keys()
    assert all((ROOT / f'configs/{name}.py').is_file() for name in there.presets)
    assert all(place.count('/') == 1 for place in there.corpora.values())


def test_words_are_letters_and_digits_and_sentences_are_lines():
    """A word in another spelling would match nothing."""
    there = foreign_names()
    words = [
        *there.absent,
        *there.corpora,
        *(size for row in there.presets.values() for size in row),
    ]
    words += [value for table in there.values.values() for value in table]
    assert [name for name in words if name != normalize_name(name)] == []
    for said in (*there.absent.values(), *there.notes.values()):
        assert said == ' '.join(said.split()) and said
    assert not any(said.endswith('.') for said in there.absent.values())
    assert all(said.endswith('.') for said in there.notes.values())
    assert all(form.format('x') for form in there.forms.values())


def test_the_file_is_read_on_a_miss_alone():
    foreign_names.cache_clear()
    resolve(default.get_config())
    assert not foreign_names.cache_info().currsize
    assert other_programs.replacement_hint('use_wandb') and foreign_names.cache_info().currsize == 1
