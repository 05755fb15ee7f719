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
from eval.convert.families import FAMILIES, find_family
from eval.convert.hf_unread import LACKING_PARTS, LACKING_TABLES
from eval.convert.import_hf import import_folder
from lm.config.resolve import update_recipe
from tests import ROOT
from tests.eval.convert.test_hf import CLOSE, TOKENS_BT, base, make_checkpoint
from tests.fixtures.hf.seeded import few, weight

FOLDER = ROOT / 'tests' / 'fixtures' / 'hf'
VARIANTS = json.loads((FOLDER / 'variants.json').read_text())


@functools.cache
def import_variant(name):
    case = VARIANTS[name]
    arrays = {key: weight(key, shape) for key, shape in case['tensors'].items()}
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / 'config.json').write_text(json.dumps(case['config']))
        safetensors.write_folder(Path(folder), safetensors.make_tensors(arrays), 10**9)
        return import_folder(Path(folder), base(), Path('run'))


@pytest.mark.full
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


def test_dynamic_length_ignores_longer_rows():
    """Catches max_position_embeddings that follows longer rows of training: the base would grow
    from there.
    """
    recipe = update_recipe(import_variant('dynamic').recipe, {'data.seq_len': 32})
    checkpoint = make_checkpoint(import_variant('dynamic'), recipe)
    config = export_hf.convert_checkpoint(checkpoint, 'float32').config
    assert config['max_position_embeddings'] == 8
    assert config['rope_parameters'] == {'rope_type': 'dynamic', 'factor': 4.0, 'rope_theta': 100.0}


UNREAD = {
    'mamba': 'lack a state-space mixer in place of attention',
    'rwkv': 'lack a recurrence',
    't5': 'lack an encoder and cross-attention',
    'bert': 'lack bidirectional attention',
    'llava': 'lack an image encoder',
    'deepseek_v3': 'lack multi-head latent attention',
    'jamba': 'lack state-space layers among',
    'kimi_linear': 'lack linear attention with a decay for each feature',
    'bailing_hybrid': 'lack multi-head latent attention',
    'hunyuan_v1_moe': 'no table of its tensors .*a shared expert',
    'gemma3n': 'lack AltUp, LAuReL',
    'falcon': 'no table of its tensors .*one or two norms',
    'bloom': 'no table of its tensors .*ALiBi',
    'mpt': 'no table of its tensors .*clip_qkv',
    'opt': 'no table of its tensors .*positions that begin at 2',
    'phi': 'no table of its tensors .*a bias of the logits',
    'stablelm': 'no table of its tensors .*norms of queries by head',
    'cohere': 'no table of its tensors .*logit_scale',
    'nothing': 'Supported: .*gemma2, gemma3, .*qwen3_moe',
}


@pytest.mark.parametrize('name', sorted(UNREAD.keys() - FAMILIES.keys()))
def test_unread_type_says_what_lacks(name):
    """One line, which names no read type as if it would do. Catches 'Did you mean' of a lookup."""
    with pytest.raises(ValueError, match=UNREAD[name]) as error:
        find_family({'model_type': name})
    text = str(error.value)
    assert f'model_type={name!r}, which is not supported' in text and '\n' not in text
    assert name == 'nothing' or not any(f'{family!r}' in text for family in FAMILIES)


def test_code_beside_the_weights_is_named():
    with pytest.raises(ValueError, match=r'code comes with the weights and is not run\. Supported'):
        find_family({'model_type': 'internlm2', 'auto_map': {'AutoModel': 'modeling.Model'}})


def test_unread_type_has_a_single_reason():
    """Catches a type with two reasons, of which only the first would be said."""
    assert not LACKING_PARTS.keys() & LACKING_TABLES.keys()
