"""Reference: models with fields and sizes that few files have, as transformers computes them.

`tests/fixtures/hf/variants.py` has recorded the logits. Equivalence: the export is the same model.
"""

import functools
import json
import tempfile
from pathlib import Path

import numpy as np
import pytest

from eval.convert import export_hf, hf_config, safetensors
from eval.convert.families import FAMILIES
from eval.convert.import_hf import import_folder
from tests import ROOT
from tests.eval.convert.test_hf import CLOSE, TOKENS_BT, base, make_checkpoint
from tests.fixtures.hf.seeded import few, weight

FOLDER = ROOT / "tests" / "fixtures" / "hf"
VARIANTS = json.loads((FOLDER / 'variants.json').read_text())


@functools.cache
def import_variant(name):
    case = VARIANTS[name]
    arrays = {key: weight(key, shape) for key, shape in case['tensors'].items()}
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / 'config.json').write_text(json.dumps(case['config']))
        safetensors.write_folder(Path(folder), safetensors.make_tensors(arrays), 10**9)
        return import_folder(Path(folder), base(), Path('run'))


@pytest.mark.parametrize('name', VARIANTS)
def test_variant_matches_transformers(name):
    """Catches a base that does not grow with the row, or grows within the original length, and the
    base of full layers in a model whose layers all have a window.
    """
    with np.load(FOLDER / 'variants.npz') as record:
        expected = record[name]
    logits = few(np.asarray(make_checkpoint(import_variant(name)).logits(TOKENS_BT))[0])
    assert np.max(np.abs(logits - expected)[1:]) / expected[0] < CLOSE


def read_definition(raw):
    """Returns our fields of a config.json, without notes."""
    fields = FAMILIES[raw['model_type']].read(raw)
    fields['model.n_kv_heads'] = fields.get('model.n_kv_heads') or fields['model.n_heads']
    return {path: value for path, value in fields.items() if path != hf_config.NOTES}


@pytest.mark.parametrize('name', VARIANTS)
def test_variant_is_exported_as_it_came(name):
    """config.json with the same meaning, and the same tensors. Catches a length of dynamic
    scaling that follows data.seq_len, and layer_types of another period.
    """
    checkpoint, case = make_checkpoint(import_variant(name)), VARIANTS[name]
    exported = export_hf.convert_checkpoint(checkpoint, 'float32')
    written = {'model_type': exported.model_type} | exported.config
    assert exported.model_type == case['config']['model_type']
    assert read_definition(written) == read_definition(case['config'])
    tensors = export_hf.export_tensors(exported, 'float32')
    expected = {key: weight(key, shape) for key, shape in case['tensors'].items()}
    assert tensors.keys() == expected.keys()
    for key, tensor in tensors.items():
        # Gains are written as gain - 1, which rounds.
        np.testing.assert_allclose(tensor.make(), expected[key], rtol=1e-6, atol=1e-6, err_msg=key)
