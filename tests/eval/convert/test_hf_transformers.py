"""Reference: fields of config.json and our exports, as transformers interprets them.

`tests/fixtures/hf/fields.py`, `exports.py` and `loads.py` have recorded it.
"""

import json
import tempfile
from pathlib import Path

import numpy as np
import pytest

from eval.convert import export_hf, hf_config, hf_ignored
from eval.convert.families import FAMILIES
from eval.convert.hf_config import ConfigFields
from eval.convert.import_hf import import_folder
from tests.eval.convert.test_hf import (
    CASES,
    CLOSE,
    FOLDER,
    TOKENS_BT,
    base,
    make_checkpoint,
    save_case,
)
from tests.fixtures.hf.exports import SETS, checkpoint
from tests.fixtures.hf.exports import TOKENS_BT as TOKENS_OF_OURS_BT
from tests.fixtures.hf.seeded import PROBES, change_fields, few, read_folder, weight

RECORD = read_folder(PROBES)
EXPORTS = json.loads((FOLDER.parent / 'exports.json').read_text())


def read_rows(name):
    with np.load(PROBES / f'{name}.npz') as file:
        return file['rows']


def difference(logits, expected):
    """The largest difference of logits from `few`, relative to the largest logit."""
    return np.max(np.abs(logits - expected)[1:]) / expected[0]


APART_FROM_MODEL = (hf_config.NOTES, hf_config.MAX_POSITIONS, 'data.seq_len')


def import_definition(raw):
    """Our import of a config.json, without data.seq_len and notes, which do not belong to the
    model. A dynamic scaling changes nothing in rows of its original length.
    """
    fields, apart = FAMILIES[raw['model_type']].read(raw), {*APART_FROM_MODEL}
    is_dynamic = fields.get('attention.rope_scaling') == 'dynamic'
    if is_dynamic and fields['attention.rope_original_length'] >= TOKENS_BT.shape[1]:
        apart |= {f'attention.rope_{name}' for name in ('scaling', 'factor', 'original_length')}
    return {path: value for path, value in fields.items() if path not in apart}


def read_config(name):
    return change_fields(CASES[name]['config'], RECORD[name]['changes'])


def iterate_probes(name):
    """Yields (fields, config.json, outcome, changed shapes of tensors) for the probes of a case."""
    for probe in RECORD[name]['probes']:
        fields, raw = probe['fields'], read_config(name)
        yield fields, change_fields(raw, fields), probe['outcome'], probe.get('tensors', {})


@pytest.mark.parametrize('name', RECORD)
def test_fields_mean_the_same_as_in_transformers(name):
    """A field that their code ignores changes nothing here, or is refused; a field that it reads
    changes the model. Catches rope_fraction read from a LLaMA, and a different default.
    """
    before, rows = import_definition(read_config(name)), read_rows(name)
    for fields, raw, outcome, shapes in iterate_probes(name):
        try:
            after = import_definition(raw)
        except ValueError:
            continue
        if outcome == 'same':
            assert after == before, fields
        elif outcome != 'refused' and not shapes and after == before:
            assert difference(rows[outcome], rows[0]) < CLOSE, (
                fields
            )  # another rounding of the same


@pytest.mark.full
@pytest.mark.parametrize('name', RECORD)
def test_logits_with_changed_fields(name):
    """Compares each distinct model that both have. Catches a different rule of RoPE or windows."""
    rows, models = read_rows(name), {}
    for fields, raw, outcome, changed_shapes in iterate_probes(name):
        if outcome in ('same', 'refused'):
            continue
        shapes = CASES[name]['tensors'] | changed_shapes
        arrays = {key: weight(key, shape) for key, shape in shapes.items() if shape}
        with tempfile.TemporaryDirectory() as folder:
            save_case(Path(folder), name, arrays)
            (Path(folder) / 'config.json').write_text(json.dumps(raw))
            try:
                model = import_folder(Path(folder), base(), Path('run'))
            except ValueError:
                continue
        definition = json.dumps([import_definition(raw), model.recipe.data.seq_len], sort_keys=True)
        if definition not in models:
            models[definition] = few(np.asarray(make_checkpoint(model).logits(TOKENS_BT))[0])
        assert difference(models[definition], rows[outcome]) < CLOSE, fields
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
def test_importer_reads_the_same_fields(name):
    """Fields that their model reads are taken or known to change nothing. Fields that change ours
    are read there, and some probe changes them.
    """
    raw, reads = read_config(name), {*RECORD[name]['reads']}
    fields = ConfigFields(raw)
    for entry in FAMILIES[raw['model_type']].entries:
        entry.read(fields)
    names = NAMES_OF_GPT2 if name in ('gpt2', 'gptj') else {}
    names = FAMILIES[raw['model_type']].aliases | names
    renamed = {names.get(field, field) for field in reads}
    dropouts = {field for field in reads if 'dropout' in field or field.endswith('_pdrop')}
    assert renamed <= fields.taken | APART | dropouts
    if 'num_local_experts' in reads:
        renamed |= {'num_experts'}  # the same attribute
    before, probed = import_definition(raw), set()
    for changes, changed_raw, _, _ in iterate_probes(name):
        probed |= changes.keys()
        try:
            is_other = import_definition(changed_raw) != before
        except ValueError:
            continue
        if is_other and len(changes) == 1:
            field = next(iter(changes))
            assert BECOMES.get(field, field) in renamed | READ_BY_ALL, field
    unprobed = {'hidden_size', 'n_embd', 'n_head', 'n_layer', 'quantization_config'}
    unprobed |= {'intermediate_size'} - raw.keys()  # of a class without dense MLPs
    unprobed |= {'num_mtp_layers', 'num_nextn_predict_layers'}  # of layers that are not loaded
    unprobed |= {'experts_per_token'}  # not read, and no note where it is the same number
    assert fields.taken - hf_config.IGNORED_FIELDS <= probed | unprobed


@pytest.mark.parametrize('name', RECORD)
def test_fields_without_effect_are_not_read(name):
    """Their model reads no field of the list. Catches a listed field that changes a model, and a
    family that takes any value of a field that its model reads.
    """
    reads = RECORD[name]['reads']
    assert [field for field in reads if hf_ignored.find_reason(field)] == []
    fields = ConfigFields(read_config(name))
    for entry in FAMILIES[fields.raw['model_type']].entries:
        entry.read(fields)
    assert {*reads} & hf_ignored.NEUTRAL_VALUES.keys() <= fields.taken


def export_set(name):
    return export_hf.export_checkpoint(checkpoint(SETS[name]))


@pytest.mark.full
@pytest.mark.parametrize('name', SETS)
def test_transformers_computes_exports(tmp_path, name):
    """Logits are equal up to rounding, or the export is refused. Catches a field that they ignore
    although our importer reads it.
    """
    if 'refused' in EXPORTS[name]:
        with pytest.raises(
            ValueError,
            match=r'no family of transformers (can represent|has the blocks)|no bias of logits',
        ):
            export_set(name)
        return
    source = checkpoint(SETS[name])
    export_hf.write_folder(tmp_path / 'out', source, export_set(name), 'float32')
    assert json.loads((tmp_path / 'out' / 'config.json').read_text()) == EXPORTS[name]['config']
    logits = few(np.asarray(source.logits(TOKENS_OF_OURS_BT))[0])
    assert difference(logits, np.float32(EXPORTS[name]['logits'])) < CLOSE


def test_exports_are_recorded():
    """Every set of options has a record."""
    assert EXPORTS.keys() == SETS.keys()
    assert sum('config' in export for export in EXPORTS.values()) >= 48
