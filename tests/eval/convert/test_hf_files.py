"""Contract: each field that a family reads has a type, and files are chosen as in transformers."""

import json

import numpy as np
import pytest

from eval.convert import hf_positions, safetensors
from eval.convert.families import FAMILIES
from eval.convert.hf_config import ConfigFields
from eval.convert.hf_files import FIELDS, ROPE_FIELDS, is_dropout, read_config
from eval.convert.import_hf import import_folder
from tests import hostile_models
from tests.eval.convert.test_hf import CASES, base
from tests.hostile_models import INDEX, ONE_FILE, in_shards, write_model


def names_taken(monkeypatch) -> set[str]:
    """Returns the fields that families take from the configs of `CASES`."""
    names, take = set(), ConfigFields.take

    def record(self, name, *default):
        names.add(name)
        return take(self, name, *default)

    monkeypatch.setattr(ConfigFields, 'take', record)
    for case in CASES.values():
        FAMILIES[case['config']['model_type']].read(case['config'])
    entries = [entry for family in FAMILIES.values() for entry in family.entries]
    return names | {getattr(entry, at, '') for entry in entries for at in ('name', 'also')}


def test_family_fields_have_types(monkeypatch):
    """Catches a new entry of a family for a field without bounds."""
    names = {name for name in names_taken(monkeypatch) if name and not is_dropout(name)}
    assert names - FIELDS.keys() == set()
    scalings = {name for options in hf_positions.SCALING_OPTIONS.values() for name in options}
    assert scalings - ROPE_FIELDS.keys() == set()


@pytest.mark.parametrize('case', CASES)
def test_types_accept_real_configs(tmp_path, case):
    """The configs are files that transformers wrote. Catches a bound that excludes a real model."""
    (tmp_path / 'config.json').write_text(json.dumps(CASES[case]['config']))
    assert read_config(tmp_path) == CASES[case]['config']


def write_tensors(folder, value, file=ONE_FILE):
    """Writes tensors of llama3 that are all `value`."""
    shapes = CASES['llama3']['tensors']
    arrays = {name: np.full(shape, value, np.float32) for name, shape in shapes.items()}
    safetensors.write_file(folder / file, safetensors.make_tensors(arrays))
    return arrays


@pytest.mark.parametrize('lacks_shards', [False, True])
def test_single_file_precedes_index(tmp_path, lacks_shards):
    """The order follows transformers (modeling_utils, _get_resolved_checkpoint_files). A note says
    so.
    """
    write_model(tmp_path / 'model', 'llama3')
    names = write_tensors(tmp_path / 'model', 1.0)
    if not lacks_shards:
        write_tensors(tmp_path / 'model', 7.0, 'old.safetensors')
    index = {'weight_map': dict.fromkeys(names, 'old.safetensors')}
    (tmp_path / 'model' / INDEX).write_text(json.dumps(index))
    model = import_folder(tmp_path / 'model', base(), tmp_path / 'out')
    assert np.asarray(model.params['embedding']).max() == 1
    assert any(note.startswith(f'{ONE_FILE} was read') and INDEX in note for note in model.notes)


def test_linked_files_import(tmp_path):
    """The cache of the Hub has the files in blobs, and a snapshot of links to them."""
    write_model(tmp_path / 'blobs', 'llama3')
    in_shards(tmp_path / 'blobs', 'llama3')
    (tmp_path / 'snapshot').mkdir()
    for path in (tmp_path / 'blobs').iterdir():
        (tmp_path / 'snapshot' / path.name).symlink_to(f'../blobs/{path.name}')
    model = import_folder(tmp_path / 'snapshot', base(), tmp_path / 'out')
    assert model.notes == [] and model.tokenizer.eos_id == 2


def test_unused_files_are_noted(tmp_path):
    """An adapter beside the weights, and different tokens that end a text. A .bin is not
    mentioned.
    """
    write_model(tmp_path / 'model', 'llama3')
    (tmp_path / 'model' / 'adapter_config.json').write_text('{"base_model_name_or_path": "x"}')
    (tmp_path / 'model' / 'pytorch_model.bin').write_text('older weights')
    (tmp_path / 'model' / 'generation_config.json').write_text('{"eos_token_id": [5, 6]}')
    notes = import_folder(tmp_path / 'model', base(), tmp_path / 'out').notes
    assert len(notes) == 2
    assert 'adapter in adapter_config.json was not imported' in notes[0]
    assert 'eos_token_id=[5, 6], but documents end with 2 here' in notes[1]


def test_huge_number_is_not_a_size(tmp_path):
    """Python parses integers of up to 4,300 digits without an error; model_max_length has 31."""
    write_model(tmp_path / 'model', 'llama3')
    settings = {'model_max_length': 10**30, 'eos_token': '</s>'}
    (tmp_path / 'model' / 'tokenizer_config.json').write_text(json.dumps(settings))
    hostile_models.with_field('hidden_size', '9' * 9000)(tmp_path / 'model')
    with pytest.raises(ValueError, match=r'hidden_size must be a whole number from 1 .* got inf'):
        import_folder(tmp_path / 'model', base(), tmp_path / 'out')
