"""Reference: what transformers makes of config.json, ours of a field and ours of an export.

`tests/fixtures/hf/fields.py`, `exports.py` and `loads.py` have recorded it.
"""

import json
import tempfile
from pathlib import Path

import numpy as np
import pytest

from eval.convert import export_hf, hf_config
from eval.convert.hf_config import ConfigFields
from eval.convert.hf_families import FAMILIES
from eval.convert.import_hf import import_folder
from tests.eval.convert.test_hf import CASES, CLOSE, FOLDER, TOKENS_BT, base, checkpoint_of, saved
from tests.fixtures.hf.exports import SETS, checkpoint
from tests.fixtures.hf.exports import TOKENS_BT as TOKENS_OF_OURS_BT
from tests.fixtures.hf.seeded import changed, few, weight

RECORD = json.loads((FOLDER / 'fields.json').read_text())
PROBES = RECORD.pop('probes')
EXPORTS = json.loads((FOLDER / 'exports.json').read_text())


def recorded(file, name):
    with np.load(FOLDER / file) as logits:
        return logits[name]


def difference(found, wanted):
    """Of logits as `few` takes them, relative to the largest of all."""
    return np.max(np.abs(found - wanted)[1:]) / wanted[0]


def definition(raw):
    """What our importer makes of a config.json; data.seq_len and notes are no part of the model."""
    fields = FAMILIES[raw['model_type']].read(raw)
    apart = (hf_config.NOTES, hf_config.MAX_POSITIONS, 'data.seq_len')
    return {path: value for path, value in fields.items() if path not in apart}


def config_of(name):
    return changed(CASES[name]['config'], RECORD[name]['changes'])


def probes_of(name):
    """Yields (fields, config.json, result) of the probes of a case."""
    for number, result in RECORD[name]['results'].items():
        fields = PROBES[int(number)]
        yield number, fields, changed(config_of(name), fields), result


@pytest.mark.parametrize('name', RECORD)
def test_a_field_means_what_it_means_in_transformers(name):
    """A field that their code ignores changes nothing here, or is refused; one that it reads
    changes the model. Catches rope_fraction read from a LLaMA, and a default that is another.
    """
    before, rows = definition(config_of(name)), recorded('fields.npz', name)
    for number, fields, raw, result in probes_of(name):
        try:
            after = definition(raw)
        except ValueError:
            continue
        if result == 'same':
            assert after == before, fields
        elif result != 'refused' and number not in RECORD[name]['tensors'] and after == before:
            assert difference(rows[result], rows[0]) < CLOSE, fields  # another rounding of the same


@pytest.mark.full
@pytest.mark.parametrize('name', RECORD)
def test_logits_with_another_field_are_theirs(name):
    """Of each model that both have, once. Catches a rule of RoPE or of windows that is another."""
    rows, models = recorded('fields.npz', name), {}
    for number, fields, raw, result in probes_of(name):
        if result in ('same', 'refused'):
            continue
        shapes = CASES[name]['tensors'] | RECORD[name]['tensors'].get(number, {})
        arrays = {key: weight(key, shape) for key, shape in shapes.items() if shape}
        with tempfile.TemporaryDirectory() as folder:
            saved(Path(folder), name, arrays)
            (Path(folder) / 'config.json').write_text(json.dumps(raw))
            try:
                found = import_folder(Path(folder), base(), Path('run'))
            except ValueError:
                continue
        model = json.dumps([definition(raw), found.recipe.data.seq_len], sort_keys=True)
        if model not in models:
            models[model] = few(np.asarray(checkpoint_of(found).logits(TOKENS_BT))[0])
        assert difference(models[model], rows[result]) < CLOSE, fields
    assert len(models) > 5


# Attributes of a config that no file has, or that evaluation does not depend on.
APART = {
    '_attn_implementation',
    'default_theta',
    'ignore_keys_at_rope_validation',
    'is_heterogeneous',
    'per_layer_config',
}
# Fields of a file that a class makes others of, and the attribute that its model reads.
BECOMES = {
    'max_window_layers': 'layer_types',
    'no_rope_layer_interval': 'no_rope_layers',
    'num_local_experts': 'num_experts',
    'original_max_position_embeddings': 'rope_parameters',
    'partial_rotary_factor': 'rope_parameters',
    'rope_local_base_freq': 'rope_parameters',
    'rope_scaling': 'rope_parameters',
    'rope_theta': 'rope_parameters',
    'rotary_emb_base': 'rope_parameters',
    'rotary_pct': 'rope_parameters',
    'sliding_window_pattern': 'layer_types',
}
READ_BY_ALL = {'tie_word_embeddings'}  # by what models share
NAMES_OF_GPT2 = {
    'hidden_size': 'n_embd',
    'max_position_embeddings': 'n_positions',
    'num_attention_heads': 'n_head',
    'num_hidden_layers': 'n_layer',
}


@pytest.mark.parametrize('name', RECORD)
def test_importers_and_transformers_read_the_same_fields(name):
    """What their model reads is taken or known to change nothing; what changes ours is read there,
    and a probe has changed it.
    """
    raw, reads = config_of(name), {*RECORD[name]['reads']}
    fields = ConfigFields(raw)
    for entry in FAMILIES[raw['model_type']].entries:
        entry.read(fields)
    renamed = {NAMES_OF_GPT2.get(field, field) for field in reads} if name == 'gpt2' else reads
    dropouts = {field for field in reads if 'dropout' in field or field.endswith('_pdrop')}
    assert renamed <= fields.taken | APART | dropouts
    if 'num_local_experts' in reads:
        renamed |= {'num_experts'}  # the same attribute
    before, probed = definition(raw), set()
    for _, changes, other, _ in probes_of(name):
        probed |= changes.keys()
        try:
            is_other = definition(other) != before
        except ValueError:
            continue
        if is_other and len(changes) == 1:
            field = next(iter(changes))
            assert BECOMES.get(field, field) in renamed | READ_BY_ALL, field
    unprobed = {'hidden_size', 'n_embd', 'n_head', 'n_layer', 'quantization_config'}
    unprobed |= {'experts_per_token'}  # not read, and no note where it is the same number
    assert fields.taken - hf_config.IGNORED_FIELDS <= probed | unprobed


def exported(name):
    return export_hf.export_checkpoint(checkpoint(SETS[name]))


@pytest.mark.full
@pytest.mark.parametrize('name', SETS)
def test_transformers_computes_our_exports(tmp_path, name):
    """To rounding, or the export is refused. Catches a field that they do not read, though our own
    importer does.
    """
    if 'refused' in EXPORTS[name]:
        with pytest.raises(
            ValueError, match=r'no family of theirs has this model|no bias of logits'
        ):
            exported(name)
        return
    source = checkpoint(SETS[name])
    export_hf.write_folder(tmp_path / 'out', source, exported(name), 'float32')
    assert json.loads((tmp_path / 'out' / 'config.json').read_text()) == EXPORTS[name]['config']
    logits = few(np.asarray(source.logits(TOKENS_OF_OURS_BT))[0])
    assert difference(logits, recorded('exports.npz', name)) < CLOSE


def test_exports_are_many():
    """A set that was added is recorded too."""
    assert EXPORTS.keys() == SETS.keys()
    assert sum('config' in one for one in EXPORTS.values()) >= 48
