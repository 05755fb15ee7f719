"""Reference: logits of models saved by transformers. Equivalence: an export is imported bitwise.

Contract: models that do not fit are refused, with a list. `tests/fixtures/hf/make.py` made the
cases.
"""

import functools
import json
import re
import tempfile
from pathlib import Path

import jax
import ml_dtypes
import numpy as np
import pytest
import tokenizers as library

from configs import default
from eval.convert import __main__ as convert
from eval.convert import (
    export_hf,
    hf_config,
    hf_files,
    hf_multimodal,
    import_hf,
    mxfp4,
    read_back,
    safetensors,
)
from eval.convert.families import FAMILIES
from eval.convert.fold import build_cpu_learner, fold_checkpoint
from eval.convert.import_hf import build_weights, import_folder, largest_difference
from eval.convert.layouts import GroupedLayout, Layout
from eval.load import Checkpoint, load
from eval.suites.perplexity import perplexity
from lm.config.fields import MeshConfig
from lm.config.resolve import resolve, to_dict, update_recipe
from lm.data import tokenizers
from lm.devices.mesh import make_mesh
from lm.inference.decoding import extend, init_cache
from lm.record.metrics import read_rows
from tests.eval.convert.test_commands import checkpoint as own_checkpoint
from tests.fixtures.hf.seeded import CASES as FOLDER
from tests.fixtures.hf.seeded import read_folder, tokens, weight
from train import DONE, train

CASES = read_folder(FOLDER)
TOKENS_BT = tokens().astype(np.int32)
CLOSE = 1e-5


def base(**model):
    raw = default.get_config().to_dict()
    raw['model'] |= {'scan_layers': True} | model  # compiles one layer
    return raw


def draw_weights(name):
    return {n: weight(n, shape) for n, shape in CASES[name]['tensors'].items()}


def save_case(folder, name, arrays=None, max_bytes=10**9, **fields):
    """Writes a folder as transformers saves one."""
    folder.mkdir(exist_ok=True)
    config = {k: v for k, v in (CASES[name]['config'] | fields).items() if v != 'left out'}
    (folder / 'config.json').write_text(json.dumps(config))
    arrays = draw_weights(name) if arrays is None else arrays
    safetensors.write_folder(folder, safetensors.make_tensors(arrays), max_bytes)
    return folder


@functools.cache
def import_case(name):
    with tempfile.TemporaryDirectory() as folder:
        return import_folder(save_case(Path(folder), name), base(), Path('run'))


def make_checkpoint(model, recipe=None):
    recipe = recipe or model.recipe
    learner = build_cpu_learner(recipe, model.vocab_size)
    weights = build_weights(model.params)
    meta = {'vocab_size': model.vocab_size, 'model_type': model.model_type}
    path = Path('memory/checkpoints/0')
    return Checkpoint(path, recipe, 0, meta, learner, None, None, weights, model.tokenizer)


def assert_same(params, expected):
    """Asserts bitwise equality."""
    assert params.keys() == expected.keys()
    for path, array in expected.items():
        np.testing.assert_array_equal(params[path], array, path)


@functools.cache
def read_logits(name):
    with np.load(FOLDER / f'{name}.npz') as file:
        return file['logits']


DEFAULT_ROWS = ('gemma2', 'gpt2', 'granite', 'llama3')


@pytest.mark.default_rows(*DEFAULT_ROWS)
@pytest.mark.parametrize('name', CASES)
def test_import_matches_transformers(name):
    """Catches heads that are split otherwise, a misplaced norm, and a different RoPE or window."""
    logits = make_checkpoint(import_case(name)).logits(TOKENS_BT)
    assert largest_difference(np.asarray(logits)[0], read_logits(name)) < CLOSE


CUT = {'fsdp': 2, 'expert': 2, 'tensor': 2}  # heads, experts and the width of the model


def import_on_mesh(name, **mesh):
    """The import sharded over the eight devices of the tests."""
    with tempfile.TemporaryDirectory() as folder:
        cut = make_mesh(MeshConfig(data=1, **mesh))
        return import_folder(save_case(Path(folder), name), base(), Path('run'), cut)


@pytest.mark.parametrize('mesh', [{'fsdp': 8}, CUT])
@pytest.mark.parametrize('name', ['gemma3', 'phi3', 'pythia'])
def test_import_shards_over_devices(name, mesh):
    """Bitwise: arrays that share a tensor, side by side or interleaved, gains with an offset of 1,
    and scaled queries. Catches a wrong range, and a range that is read twice.
    """
    sharded, whole = import_on_mesh(name, **mesh), import_case(name)
    assert_same(sharded.params, whole.params)
    if mesh == {'fsdp': 8}:  # nothing is read twice; CUT has copies of what it does not cut
        assert sharded.n_bytes_read == sharded.file_bytes == whole.n_bytes_read
    up = sharded.params['layers/mlp/up']
    assert up.addressable_shards[0].data.size == up.size / (8 if 'tensor' not in mesh else 4)


@pytest.mark.full
@pytest.mark.parametrize('name', CASES)
def test_sharded_import_matches_transformers(name):
    """Catches a sharding rule that a family's axes miss, and a kernel that is wrong when
    sharded.
    """
    model = import_on_mesh(name, **CUT)
    assert_same(model.params, import_case(name).params)
    logits = np.asarray(make_checkpoint(model).logits(np.repeat(TOKENS_BT, 8, 0)))
    up = next(array for path, array in model.params.items() if path.endswith('/mlp/up'))
    assert len(up.sharding.device_set) == 8
    assert max(largest_difference(row, read_logits(name)) for row in logits) < CLOSE


@pytest.mark.full
@pytest.mark.parametrize('name', CASES)
def test_logits_unscanned_and_cached(name):
    """One token at a time, and with layers that are not scanned."""
    model = import_case(name)
    recipe = update_recipe(model.recipe, {'model.scan_layers': False})
    checkpoint = make_checkpoint(model, recipe)
    logits = checkpoint.logits(TOKENS_BT)
    assert largest_difference(np.asarray(logits)[0], read_logits(name)) < CLOSE
    step = jax.jit(functools.partial(extend, checkpoint.learner))
    cache = init_cache(checkpoint.learner, checkpoint.variables, 1, TOKENS_BT.shape[1])
    parts = []
    for t in range(TOKENS_BT.shape[1]):
        logits, cache = step(checkpoint.variables, cache, TOKENS_BT[:, t : t + 1])
        parts.append(np.asarray(logits)[0, 0])
    assert largest_difference(np.stack(parts), read_logits(name)) < CLOSE


def export_case(name):
    """The export of an import, without the comparison of logits."""
    checkpoint = make_checkpoint(import_case(name))
    return checkpoint, export_hf.convert_checkpoint(checkpoint, 'float32')


@pytest.mark.default_rows(*DEFAULT_ROWS)
@pytest.mark.parametrize('name', CASES)
def test_export_reimports_bitwise(tmp_path, name):
    """Names, layouts and config.json are as transformers wrote them. Catches a row that works in
    one direction only.
    """
    checkpoint, exported = export_case(name)
    export_hf.write_folder(tmp_path / 'out', checkpoint, exported, 'float32', max_bytes=9000)
    again = import_folder(tmp_path / 'out', base(), Path('run'))
    assert export_hf.describe_model(again.recipe) == export_hf.describe_model(
        import_case(name).recipe
    )
    assert_same(again.params, import_case(name).params)
    stored = dict(safetensors.map_tensors(safetensors.read_folder(tmp_path / 'out')))
    case = CASES[name]
    assert {n: list(array.shape) for n, array in stored.items()} == case['tensors']
    config = hf_files.read_config(tmp_path / 'out')
    for field in ('model_type', 'architectures', 'tie_word_embeddings', 'vocab_size', 'dtype'):
        assert config[field] == case['config'][field]


@pytest.mark.parametrize(
    'axes, shapes',
    [
        ('D (3 N H) -> D N H', [(6, 4, 2)] * 3),
        ('(N 3 H) D -> D N H', [(6, 4, 2)] * 3),
        ('(N|K|K H) D -> D N|K|K H', [(6, 4, 2), (6, 2, 2), (6, 2, 2)]),
        ('E D (F 2) -> E D F', [(3, 6, 5)] * 2),
        ('(P|P|W Q|Q|U) 1 C -> P|P|W Q|Q|U C', [(2, 3, 4), (2, 3, 4), (4, 5, 4)]),
    ],
)
def test_layout_round_trips(axes, shapes):
    layout = Layout(axes)
    tensor = np.random.default_rng(0).normal(size=layout.file_shape(shapes))
    parts = [layout.take(tensor, shapes, part) for part in range(len(shapes))]
    assert [part.shape for part in parts] == shapes
    np.testing.assert_array_equal(layout.join(parts), tensor)


def test_grouped_layout_matches_qwen3_next():
    """Reference: fix_query_key_value_ordering of its class. Catches groups by array."""
    rng, shapes = np.random.default_rng(0), [(7, 2, 3), (7, 2, 3), (7, 4, 5), (7, 4, 5)]
    arrays = [rng.normal(size=shape) for shape in shapes]
    layout = GroupedLayout('D P|P|W|W Q|Q|U|U', 'P').with_lengths({'P': 2})
    tensor = layout.join(arrays)
    assert tensor.shape == layout.file_shape(shapes) == (52, 7)
    grouped = tensor.reshape(2, 26, 7)  # a head of keys, with its query, key, values and gates
    for head in range(2):
        query, key, *values = np.split(grouped[head], [3, 6, 11, 16, 21])
        np.testing.assert_array_equal(query.T, arrays[0][:, head])
        np.testing.assert_array_equal(key.T, arrays[1][:, head])
        for place, value in enumerate(values):
            of_head = arrays[2 + place // 2][:, 2 * head + place % 2]
            np.testing.assert_array_equal(value.T, of_head)
    for part, array in enumerate(arrays):
        np.testing.assert_array_equal(layout.take(tensor, shapes, part), array)
        ranges = [range(2, 5), range(1, 2), range(1, 3)]
        cut = layout.take(tensor, shapes, part, ranges)
        np.testing.assert_array_equal(cut, array[2:5, 1:2, 1:3])


def test_router_bias_is_a_statistic():
    """It is read into the statistics of its layers, and counts start at 0."""
    model = import_case('glm4_moe')
    weights = build_weights(model.params)
    stats = weights.stats['stats']['layers']['mlp']
    biases_LE = [weight(f'model.layers.{n}.mlp.gate.e_score_correction_bias', [4]) for n in (1, 2)]
    np.testing.assert_array_equal(stats['expert_bias'], biases_LE)
    assert stats['expert_counts'].shape == (2, 4) and not np.any(stats['expert_counts'])
    assert 'expert_bias' not in weights.params['layers']['mlp']


@pytest.mark.full
def test_model_with_router_biases_is_written_and_loaded(tmp_path):
    """Catches statistics that a run does not store, and biases that are not read again."""
    model = import_case('glm4_moe')
    import_hf.write_run(tmp_path, tmp_path / 'run', model)
    loaded = load(tmp_path / 'run')
    logits = np.asarray(loaded.logits(TOKENS_BT))[0]
    assert largest_difference(logits, read_logits('glm4_moe')) < CLOSE
    exported = export_hf.export_checkpoint(loaded)
    assert exported.model_type == 'glm4_moe' and exported.difference < CLOSE


def test_layers_that_predict_further_tokens_are_skipped(tmp_path):
    """GLM has them behind the last layer, Qwen3-Next under another name."""
    for case, name in (
        ('glm4_moe', 'model.layers.3.eh_proj.weight'),
        ('qwen3_next', 'mtp.fc.weight'),
    ):
        arrays = draw_weights(case) | {name: np.ones((2, 2), np.float32)}
        model = import_folder(save_case(tmp_path / case, case, arrays), base(), Path('run'))
        assert_same(model.params, import_case(case).params)
        (note,) = [note for note in model.notes if 'predict further tokens' in note]
        assert name in note and 'skipped 1 tensors' in note
    arrays = draw_weights('llama2') | {'model.layers.3.eh_proj.weight': np.ones((2, 2), 'f')}
    with pytest.raises(ValueError, match=r'unknown tensors: model\.layers\.3\.eh_proj'):
        import_folder(save_case(tmp_path / 'llama2', 'llama2', arrays), base(), Path('run'))


def test_olmo_hybrid_with_module_names_imports(tmp_path):
    """Files may have the names of the modules instead of those that transformers writes."""
    names = {
        '.attention_layer_norm.': '.input_layernorm.',
        '.feedforward_layer_norm.': '.post_attention_layernorm.',
    }
    arrays = draw_weights('olmo_hybrid')
    for ours, theirs in names.items():
        arrays = {name.replace(ours, theirs): array for name, array in arrays.items()}
    model = import_folder(save_case(tmp_path, 'olmo_hybrid', arrays), base(), Path('run'))
    assert_same(model.params, import_case('olmo_hybrid').params)


def test_qwen3_5_text_model_imports(tmp_path):
    """Bitwise equal to the text model alone. Sections of RoPE are for images."""
    arrays = {
        name.replace('model.', 'model.language_model.', 1): array
        for name, array in draw_weights('qwen3_5').items()
    }
    arrays |= {'model.visual.a.weight': np.ones(2, 'f'), 'mtp.fc.weight': np.ones(2, 'f')}
    text_config = dict(CASES['qwen3_5']['config'])
    sections = {'mrope_section': [1, 1, 2], 'mrope_interleaved': True}
    text_config['rope_parameters'] = text_config['rope_parameters'] | sections
    folder = save_case(tmp_path, 'qwen3_5', arrays)
    whole = {'model_type': 'qwen3_5', 'text_config': text_config, 'vision_config': {}}
    (folder / 'config.json').write_text(json.dumps(whole))
    model, expected = import_folder(folder, base(), Path('run')), import_case('qwen3_5')
    assert (model.model_type, model.recipe) == ('qwen3_5_text', expected.recipe)
    assert_same(model.params, expected.params)
    assert any('visual (1 tensors)' in note for note in model.notes)


def test_hub_files_import(tmp_path):
    """Names without prefix, masks, a config.json of transformers 4, bfloat16, more rows than
    tokens, a table that is stored twice, several files.
    """
    short = {n.removeprefix('transformer.'): x for n, x in draw_weights('gpt2').items()}
    wide = np.concatenate([short['wte.weight'], np.ones((6, 16), np.float32)])
    tensors = {'h.0.attn.bias': np.ones((1, 1, 8, 8), np.float32), 'wte.weight': wide}
    folder = save_case(
        tmp_path / 'gpt2', 'gpt2', short | tensors, max_bytes=9000, n_ctx=32, dtype='left out'
    )
    model = import_folder(folder, base(), Path('run'))
    assert model.vocab_size == 70 and '70 rows' in model.notes[0]
    assert 'attn_pdrop=0.1' in model.notes[1]
    np.testing.assert_array_equal(
        model.params['layers/mlp/up'], import_case('gpt2').params['layers/mlp/up']
    )
    half = {n: x.astype(ml_dtypes.bfloat16) for n, x in draw_weights('llama3').items()}
    half['lm_head.weight'] = half['model.embed_tokens.weight']
    rope = CASES['llama3']['config']['rope_parameters']
    four = {
        'rope_parameters': 'left out',
        'rope_theta': rope['rope_theta'],
        'rope_scaling': {k: v for k, v in rope.items() if k != 'rope_theta'},
        'torch_dtype': 'bfloat16',
        'head_dim': None,
    }
    folder = save_case(tmp_path / 'llama3', 'llama3', half, **four)
    again = import_folder(folder, base(), Path('run'))
    assert again.recipe == import_case('llama3').recipe
    expected = import_case('llama3').params['layers/attention/query'].astype(ml_dtypes.bfloat16)
    np.testing.assert_array_equal(again.params['layers/attention/query'], expected)
    half['lm_head.weight'] = half['lm_head.weight'] + half['lm_head.weight']
    with pytest.raises(ValueError, match=r'ties lm_head.weight to the embedding'):
        import_folder(save_case(tmp_path / 'llama3', 'llama3', half), base(), Path('run'))


@pytest.mark.full
def test_mxfp4_weights_import(tmp_path):
    """Weights equal those that transformers dequantises (make.py), and the same in float32."""
    with np.load(FOLDER.parent / 'mxfp4.npz') as file:
        numbers = mxfp4.dequantise(file['blocks'], file['scales'])
        np.testing.assert_array_equal(np.swapaxes(numbers, 1, 2), file['dequantised'])
    rng, sizes = np.random.default_rng(0), {'hidden_size': 32, 'intermediate_size': 32}
    wide = {}
    for name, shape in CASES['gpt_oss']['tensors'].items():
        of_keys = '.k_proj.' in name or '.v_proj.' in name  # 16 is K H there
        wider = [{16: 32, 24: 32, 48: 64}.get(size, size) for size in shape]
        wide[name] = weight(name, [*shape[:1], *wider[1:]] if of_keys else wider)
    packed = dict(wide)
    for name in [name for name in wide if name.endswith(('gate_up_proj', 'down_proj'))]:
        experts, inputs, outputs = packed.pop(name).shape
        blocks = rng.integers(0, 256, (experts, outputs, inputs // 32, 16), dtype=np.uint8)
        scales = rng.integers(120, 130, blocks.shape[:-1], dtype=np.uint8)
        wide[name] = np.swapaxes(mxfp4.dequantise(blocks, scales), 1, 2)
        packed |= {f'{name}_blocks': blocks, f'{name}_scales': scales}
    quantised = {'quantization_config': {'quant_method': 'mxfp4'}}
    cut = make_mesh(MeshConfig(data=1, fsdp=4, expert=2))  # experts, and parts of a group of 32
    whole_model, packed_model, sharded_model = (
        import_folder(
            save_case(tmp_path / n, 'gpt_oss', arrays, **sizes, **extra_fields),
            base(),
            Path('r'),
            m,
        )
        for n, arrays, extra_fields, m in (
            ('whole', wide, {}, None),
            ('packed', packed, quantised, None),
            ('packed', packed, quantised, cut),
        )
    )
    assert_same(packed_model.params, whole_model.params)
    assert_same(sharded_model.params, whole_model.params)


@pytest.mark.parametrize('attention, mlp', [(True, True), (True, False), (False, True)])
def test_llama_with_biases_imports(tmp_path, attention, mlp):
    """Biases of attention only: the MLP gets biases of 0, which are exported as zeros. Biases of
    the MLP alone are ours.
    """
    config, arrays = {'attention_bias': attention, 'mlp_bias': mlp}, draw_weights('llama2')
    sizes = {'q': 16, 'k': 8, 'v': 8, 'o': 16} if attention else {}
    names = {f'self_attn.{name}_proj.bias': size for name, size in sizes.items()}
    if mlp:
        names |= {'mlp.gate_proj.bias': 24, 'mlp.up_proj.bias': 24, 'mlp.down_proj.bias': 16}
    for layer in range(2):
        full = {f'model.layers.{layer}.{name}': size for name, size in names.items()}
        arrays |= {name: weight(name, [size]) for name, size in full.items()}
    model = import_folder(save_case(tmp_path, 'llama2', arrays, **config), base(), Path('run'))
    assert (model.recipe.model.bias, model.recipe.model.mlp_bias) == (attention, not attention)
    for path in (p for p in model.params if p.endswith('_bias')):
        assert np.any(model.params[path]) == (attention if '/attention/' in path else mlp), path
    notes = [note for note in model.notes if 'biases of' in note]
    assert len(notes) == (attention and not mlp)
    converted = export_hf.convert_checkpoint(make_checkpoint(model), 'float32')
    written = {n: t.make() for n, t in export_hf.export_tensors(converted, 'float32').items()}
    assert (converted.config['attention_bias'], converted.config['mlp_bias']) == (attention, True)
    for name, array in arrays.items():
        np.testing.assert_array_equal(written.pop(name), array)
    assert not any(map(np.any, written.values()))


@pytest.mark.full
def test_llama_with_attention_biases_equals_qwen(tmp_path):
    """Reference: the logits of Qwen 2, which has no bias of outputs or in the MLP."""
    config = CASES['llama2']['config'] | {'attention_bias': True, 'rms_norm_eps': 1e-6}
    biases = {f'model.layers.{i}.self_attn.o_proj.bias': np.zeros(16, 'f') for i in range(2)}
    folder = save_case(tmp_path, 'llama2', draw_weights('qwen2') | biases, **config)
    model = import_folder(folder, base(), Path('run'))
    logits = np.asarray(make_checkpoint(model).logits(TOKENS_BT))[0]
    assert largest_difference(logits, read_logits('qwen2')) < CLOSE


@pytest.mark.parametrize('version', [4, 5])
def test_gemma3_text_model_imports(tmp_path, version):
    """Bitwise equal to the text model alone. The import notes the parts that it leaves out, and
    needs a text_config.
    """
    start, head = {4: ('language_model.model.', ''), 5: ('model.language_model.', 'model.')}[
        version
    ]
    arrays = {start + n.removeprefix('model.'): x for n, x in draw_weights('gemma3').items()}
    arrays |= {f'{head}vision_tower.a.weight': np.ones(2, 'f')}
    arrays |= {f'{head}multi_modal_projector.b': np.ones(2, 'f')}
    text_config = {k: v for k, v in CASES['gemma3']['config'].items() if 'token_id' not in k}
    whole = {
        'model_type': 'gemma3',
        'text_config': text_config | {'num_attention_heads': 4},
        'vision_config': {'hidden_size': 8},
        'eos_token_id': [2, 5],
        'bos_token_id': 1,
    }
    folder = save_case(tmp_path, 'gemma3', arrays)
    (folder / 'config.json').write_text(json.dumps(whole))
    model, expected = import_folder(folder, base(), Path('run')), import_case('gemma3')
    assert (model.model_type, model.recipe) == ('gemma3_text', expected.recipe)
    assert_same(model.params, expected.params)
    assert 'vision_tower (1 tensors), multi_modal_projector (1 tensors)' in model.notes[0]
    (folder / 'config.json').write_text(json.dumps(whole | {'text_config': None}))
    with pytest.raises(ValueError, match="with model_type='gemma3' must have a text_config"):
        import_folder(folder, base(), Path('run'))


def test_text_config_has_class_defaults():
    """The config.json of Gemma 3 of 4B, without heads and maximum positions."""
    text_config = {'model_type': 'gemma3_text', 'hidden_size': 2560, 'num_hidden_layers': 34}
    text_config |= {'intermediate_size': 10240, 'sliding_window': 1024}
    text_config |= {'rope_scaling': {'factor': 8.0, 'rope_type': 'linear'}}
    full_config = hf_multimodal.find_text_config(
        {'model_type': 'gemma3', 'text_config': text_config}
    )
    fields = FAMILIES['gemma3_text'].read(full_config)
    assert (fields['model.n_heads'], fields['model.n_kv_heads']) == (8, 4)
    assert (fields['model.d_model'], fields['model.head_dim']) == (2560, 256)
    assert fields['attention.full_every'] == 6 and fields['attention.rope_factor'] == 8


BAD_FIELDS = {
    'lacking': ('llama2', {'alibi': True}, r'config.json has alibi=True, which the importer'),
    'left out': ('llama2', {'hidden_size': 'left out'}, 'must have the field hidden_size'),
    'no family': (
        'llama2',
        {'model_type': 'nope'},
        r'which is not supported\. Supported: .*gpt2.*qwen3',
    ),
    'activation': ('llama2', {'hidden_act': 'gelu'}, "hidden_act='gelu'; only"),
    'rope': ('llama2', {'rope_parameters': {'rope_type': 'dynamic'}}, "rope_type='dynamic'"),
    'rope field': (
        'llama2',
        {'rope_parameters': 'left out', 'rope_scaling': {'type': 'linear'}},
        'linear.* must have factor',
    ),
    'layers': (
        'gemma2',
        {'num_hidden_layers': 3, 'layer_types': [*['full_attention'] * 2, 'sliding_attention']},
        'order of layer_types',
    ),
    'chunks': (
        'mistral',
        {'layer_types': ['chunked_attention'] * 2},
        "'chunked_attention'; supported",
    ),
    'quantised': ('llama2', {'quantization_config': {'bits': 4}}, 'quantization_config'),
    'not causal': ('llama2', {'is_causal': False}, 'is_causal=False'),
    'without heads': ('gpt2', {'pruned_heads': {'0': [1]}}, 'pruned_heads='),
    'biases': ('mistral', {'mlp_bias': True}, 'mlp_bias=True'),
    'head': ('qwen2', {'head_dim': 8}, 'head_dim=8; a qwen2 with 16 features and 4 heads'),
    'two names': (
        'gpt2',
        {'num_hidden_layers': 7},
        'num_hidden_layers=7 and n_layer=2, which are the same',
    ),
    'longrope': ('llama2', {'rope_scaling': {'type': 'su'}}, "rope_type='su', which .*; supported"),
    'gates': ('glm4_moe', {'norm_topk_prob': False}, 'norm_topk_prob=False; only True'),
    'values': (
        'qwen3_next',
        {'linear_value_head_dim': 18},
        'linear_value_head_dim=18 and linear_key_head_dim=12; our values are a whole number',
    ),
    'taps': (
        'olmo_hybrid',
        {'linear_conv_kernel_dim': 1},
        'linear_conv_kernel_dim=1; .*at least 2',
    ),
    'kinds': (
        'qwen3_5',
        {'layer_types': ['linear_attention', 'sliding_attention', 'full_attention']},
        "layer_types 'sliding_attention'; a qwen3_5_text has linear_attention and full_attention",
    ),
    'shared': (
        'qwen2_moe',
        {'shared_expert_intermediate_size': 20},
        'shared_expert_intermediate_size=20 and moe_intermediate_size=12',
    ),
    'least sum': ('ernie4_5_moe', {'moe_norm_min': 0.1}, 'moe_norm_min=0.1; only 1e-12'),
    'ntk': (
        'llama2',
        {'rope_scaling': {'type': 'ntk'}},
        "'ntk', which .*dynamic",
    ),
}


@pytest.mark.parametrize('name', BAD_FIELDS)
def test_unsupported_field_is_named(name):
    """The error is raised before any weight is read."""
    case, fields, message = BAD_FIELDS[name]
    config = CASES[case]['config'] | fields
    config = {k: v for k, v in config.items() if v != 'left out'}
    with pytest.raises(ValueError, match=message) as error:
        convert.import_hf.find_family(config).read(config)
    assert '\n' not in str(error.value)


def test_duplicate_version_4_fields_are_read():
    """If no field says at which layer windows begin, all layers of a family have a window."""
    expected = {'attention.rope_base': 500.0, 'attention.rope_fraction': 0.5}
    twice = {'rotary_emb_base': 500, 'rope_theta': 500, 'rotary_pct': 0.5}
    twice |= {'partial_rotary_factor': 0.5, 'rope_parameters': None}
    window = {'use_sliding_window': True, 'sliding_window': 8, 'max_window_layers': 2}
    for case, fields, fields_read in (
        ('pythia', twice, expected),
        ('gemma2', {'sliding_window_size': 8}, {}),
        ('mixtral', {'rope_parameters': None}, {'attention.rope_base': 1e6}),
        ('qwen3_moe', window, {'attention.window': 8}),
    ):
        config = CASES[case]['config']
        flat, before = (FAMILIES[config['model_type']].read(c) for c in (config | fields, config))
        assert flat == before | fields_read, case


def read_case(name, **fields):
    config = CASES[name]['config'] | fields
    return FAMILIES[config['model_type']].read(config)


def test_fields_without_effect_are_noted():
    """A single note lists them. Catches an unknown field that passes with them."""
    fields = {
        'unsloth_fixed': True,
        'unsloth_version': '2025.3.19',
        'temperature': 0.6,
        'attention_bias': False,
        'pruned_heads': {},
        'head_dim': 4,
    }
    for name in ('mistral', 'qwen2', 'phi3', 'gemma3'):
        width = {'head_dim': CASES[name]['config'].get('head_dim', 4)}
        flat = read_case(name, **fields | width)
        (note,) = flat.pop(hf_config.NOTES)
        assert 'unsloth_fixed, unsloth_version (of a training program); temperature (gen' in note
        assert flat == read_case(name), name
    with pytest.raises(ValueError, match=r'^config.json has logit_scale=0.5, which the importer'):
        read_case('llama2', **fields, logit_scale=0.5)


def test_phi3_names_of_longrope():
    """Phi3Config renames both; YaRN of other families stays YaRN. Catches factors that are lost."""
    long = {'short_factor': [1.0, 2.0], 'long_factor': [2.0, 4.0]}
    flats = [
        read_case('phi3', rope_scaling=long | {key: kind})
        for key, kind in (('rope_type', 'longrope'), ('type', 'su'), ('rope_type', 'yarn'))
    ]
    assert flats[0] == flats[1] == flats[2]
    assert flats[1]['attention.rope_scaling'] == 'longrope'
    assert flats[1]['attention.rope_long_factor'] == '2.0,4.0'
    yarn = {'type': 'yarn', 'factor': 2.0}
    assert read_case('llama2', rope_scaling=yarn)['attention.rope_scaling'] == 'yarn'


def test_aliases_of_fields(tmp_path):
    """Names of attribute_map in transformers. Catches sizes that are checked before renaming."""
    left_out = dict.fromkeys(('n_embd', 'n_head', 'n_layer', 'n_positions'), 'left out')
    names = {alias: CASES['gpt2']['config'][n] for alias, n in FAMILIES['gpt2'].aliases.items()}
    folder = save_case(tmp_path, 'gpt2', **left_out, **names)
    assert import_folder(folder, base(), Path('run')).recipe == import_case('gpt2').recipe
    folder = save_case(tmp_path, 'gpt2', **left_out, **names | {'num_hidden_layers': 3})
    with pytest.raises(ValueError, match='n_layer=3, but the files contain tensors of 2 layers'):
        import_folder(folder, base(), Path('run'))
    for name in ('mixtral', 'gpt_oss'):
        experts = CASES[name]['config']['num_local_experts']
        assert read_case(name, num_experts=experts, num_local_experts=None) == read_case(name)


def test_config_with_base_model_imports():
    fields, scaled = FAMILIES['llama'].read(CASES['llama2']['config']), base()
    scaled['scaling'] |= {'name': 'mup', 'base_width': 32}
    recipe, scaled_recipe = (
        import_hf.recipe_for(fields, raw, 'ids:64,1,2') for raw in (base(), scaled)
    )
    assert recipe == scaled_recipe


def test_mismatched_tensors_are_listed(tmp_path):
    arrays = draw_weights('llama2')
    arrays['model.layers.2.mlp.up_proj.weight'] = arrays.pop('model.layers.1.mlp.up_proj.weight')
    arrays['model.norm.weight'] = np.ones(8, np.float32)
    with pytest.raises(ValueError) as error:
        import_folder(save_case(tmp_path, 'llama2', arrays), base(), Path('run'))
    message = str(error.value)
    assert 'missing tensors: model.layers.1.mlp.up_proj.weight;' in message
    assert 'unknown tensors: model.layers.2.mlp.up_proj.weight;' in message
    assert 'model.norm.weight is [8], not [16]' in message
    arrays = {n: x.astype(np.int8) for n, x in draw_weights('llama2').items()}
    with pytest.raises(ValueError, match='int8; quantised weights are not supported'):
        import_folder(save_case(tmp_path, 'llama2', arrays), base(), Path('run'))
    del arrays['model.embed_tokens.weight']
    with pytest.raises(ValueError, match=r'must contain model.embed_tokens.weight'):
        import_folder(save_case(tmp_path, 'llama2', arrays), base(), Path('run'))


def test_unexportable_model_names_fields():
    model = import_case('llama3')
    for changes, message in (
        ({'model.placement': 'post', 'model.final_norm': 'none'}, "model.placement='post'"),
        ({'attention.gate': 'headwise'}, "attention.gate='headwise' .it has 'none'"),
        ({'attention.window': 4, 'attention.full_every': 3}, 'full_every=3'),
        ({'model.norm': 'dyt', 'model.final_norm': 'dyt'}, "model.norm='dyt' .it has 'rmsnorm'"),
        ({'model.qk_norm': 'rmsnorm:eps=0.1'}, 'the same eps; .*0.1 in model.qk_norm'),
        ({'model.qk_norm': 'layernorm:eps=0.1'}, "model.qk_norm='layernorm'"),
    ):
        with pytest.raises(
            ValueError, match='no family of transformers can represent this model'
        ) as error:
            export_hf.select_family(update_recipe(model.recipe, changes), model.params)
        assert re.search(message, str(error.value))


def test_partial_rotary_as_in_transformers(tmp_path):
    """LLaMA in transformers rotates whole heads, whatever partial_rotary_factor says, and cannot
    scale a part.
    """
    half, linear = {'partial_rotary_factor': 0.5}, {'rope_type': 'linear', 'factor': 2.0}
    model = import_folder(save_case(tmp_path, 'llama2', **half), base(), Path('run'))
    assert model.recipe == import_case('llama2').recipe
    assert 'partial_rotary_factor=0.5, which transformers ignores in a llama' in model.notes[0]
    family, config = FAMILIES['llama'], CASES['llama2']['config']
    for fields in (half | {'rope_scaling': linear}, {'rope_parameters': linear | half}):
        with pytest.raises(ValueError, match=r'cannot combine in a llama'):
            family.read(config | fields)
    part = update_recipe(model.recipe, {'attention.rope_fraction': 0.5})
    name, config, _ = export_hf.select_family(part, model.params, 'llama')
    assert (name, config['partial_rotary_factor']) == ('phi3', 0.5)
    biased = update_recipe(part, {'model.bias': True})
    with pytest.raises(ValueError, match=r'rope_fraction=0.5 .it has 1.0'):
        export_hf.select_family(biased, model.params | {'layers/mlp/up_bias': np.ones(1)}, 'llama')


@pytest.mark.parametrize('name', ['gemma2', 'gemma3', 'gpt_oss'])
def test_windowless_export_has_window_size(name):
    """Their code makes a mask of windows even if no layer has a window, and fails with null."""
    usual = ['window', 'full_every', 'rope_local_base', 'rope_scaling', 'rope_factor']
    usual += ['rope_original_length', 'rope_beta_fast', 'rope_beta_slow', 'rope_truncate']
    changes = {f'attention.{option}': None for option in usual}
    recipe = update_recipe(import_case(name).recipe, changes)
    family, config, exported_recipe = export_hf.select_family(recipe, import_case(name).params)
    assert family == CASES[name]['config']['model_type'] and config['sliding_window'] > 0
    assert set(config['layer_types']) == {'full_attention'}
    assert exported_recipe.attention.options['window'] is None


@pytest.mark.parametrize(('difference', 'is_allowed'), [(2e-5, True), (3e-5, False)])
def test_export_allows_the_rounding_of_its_weights(monkeypatch, difference, is_allowed):
    """Weights moved by a unit of the last place differ by 5e-6 here. Catches a fixed bound, which
    refuses deep models, and a bound that lets another model pass.
    """
    checkpoint = make_checkpoint(import_case('mistral'))
    differences = iter([difference, 5e-6])
    monkeypatch.setattr(export_hf, 'largest_difference', lambda *logits: next(differences))
    if is_allowed:
        assert export_hf.export_checkpoint(checkpoint).difference == difference
    else:
        with pytest.raises(
            ValueError, match=r'differ by 3\.0e-05 .* rounding explains at most 2\.5e-05'
        ):
            export_hf.export_checkpoint(checkpoint)


def test_weights_move_by_one_unit():
    values = np.float32([1.0, -3.0, 0.1, 1e-3])
    moved = export_hf.move_by_ulp(values)
    assert np.all(moved != values) and np.all(np.abs(moved / values - 1) < 2.5e-7)


def test_export_measures_bfloat16_difference_on_files(tmp_path):
    """The comparison uses the weights that an import reads, bitwise; gains have an offset of 1."""
    checkpoint = make_checkpoint(import_case('gemma3'))
    converted = export_hf.convert_checkpoint(checkpoint, 'bfloat16')
    export_hf.write_folder(tmp_path / 'out', checkpoint, converted, 'bfloat16')
    again, rounded = import_folder(tmp_path / 'out', base(), Path('run')), 0
    for path, array in export_hf.round_params(converted, 'bfloat16').items():
        np.testing.assert_array_equal(array, again.params[path])
        rounded += np.any(array != converted.params[path])
    assert rounded > 10


@pytest.mark.default_rows('granite-4')
@pytest.mark.parametrize('name, n_fields', [('granite', 4), ('gemma2', 1)])
def test_export_takes_factors_out_again(tmp_path, name, n_fields):
    """The files of bfloat16 and their multipliers are those of the source, bit for bit. Catches a
    factor that stays in a weight, or that config.json loses.
    """
    half = {n: x.astype(ml_dtypes.bfloat16) for n, x in draw_weights(name).items()}
    model = import_folder(save_case(tmp_path / 'source', name, half), base(), Path('run'))
    assert len(model.factors) == n_fields
    checkpoint = make_checkpoint(model)
    checkpoint.meta[import_hf.FACTORS] = dict(model.factors)
    exported = export_hf.convert_checkpoint(checkpoint, 'bfloat16')
    assert exported.config.items() >= {
        (field, value)
        for field, value in CASES[name]['config'].items()
        if 'multiplier' in field or ('scal' in field and isinstance(value, int | float))
    }
    export_hf.write_folder(tmp_path / 'out', checkpoint, exported, 'bfloat16')
    stored = dict(safetensors.map_tensors(safetensors.read_folder(tmp_path / 'out')))
    assert_same(stored, half)
    assert_same(export_hf.round_params(exported, 'bfloat16'), model.params)


@pytest.mark.full
def test_bfloat16_export_states_difference(tmp_path):
    """The difference refers to the files, some 1e-2, not to the float32 weights before rounding."""
    checkpoint = make_checkpoint(import_case('llama2'))
    exported = export_hf.export_checkpoint(checkpoint, 'bfloat16')
    export_hf.write_folder(tmp_path / 'out', checkpoint, exported, 'bfloat16')
    again = make_checkpoint(import_folder(tmp_path / 'out', base(), Path('run')))
    expected, logits = (np.asarray(model.logits(TOKENS_BT))[0] for model in (checkpoint, again))
    assert exported.difference < CLOSE and 1e-3 < exported.stored_difference < 0.1
    assert (
        0.2 < largest_difference(logits, expected) / exported.stored_difference < 5
    )  # of other tokens


def test_embedding_factor_rounding_is_noted():
    """transformers rounds sqrt(D) to the dtype of loading: sqrt(24) is 4.90625 in bfloat16, and
    sqrt(16) is 4 in both.
    """
    square = import_case('gemma2').recipe
    recipe, bfloat16 = update_recipe(square, {'model.d_model': 24}), np.dtype(ml_dtypes.bfloat16)
    for noted, dtype, count in ((square, bfloat16, 0), (recipe, np.dtype(np.float32), 0)):
        assert len(import_hf.factor_notes(noted, dtype, {'embedding_scale'})) == count
    (note,) = import_hf.factor_notes(recipe, bfloat16, {'embedding_scale'})
    assert '= 4.90625, rounded to' in note and 'uses 4.8989797 and' in note


WORDS = [f'w{i}' for i in range(50)]


def with_tokenizer(folder):
    """Adds a tokenizer of 50 words, with tokens for unknown words, begin and end."""
    vocab = {word: i + 3 for i, word in enumerate(WORDS)} | {'<unk>': 0, '<s>': 1, '</s>': 2}
    words = library.Tokenizer(library.models.WordLevel(vocab, '<unk>'))
    words.pre_tokenizer = library.pre_tokenizers.Whitespace()
    words.save(str(folder / 'tokenizer.json'))
    named = json.dumps(
        {'bos_token': '<s>', 'eos_token': {'__type': 'AddedToken', 'content': '</s>'}}
    )
    (folder / 'tokenizer_config.json').write_text(named)
    return folder


def test_tokenizer_imports(tmp_path):
    """BOS and EOS are ids of the model, whose table may have more rows than tokens, never fewer."""
    with_tokenizer(tmp_path)
    tokenizer = tokenizers.load_for_model(tmp_path, 64, 62, 63)
    assert (tokenizer.vocab_size, tokenizer.bos_id, tokenizer.eos_id) == (64, 1, 2)
    (tmp_path / 'tokenizer_config.json').unlink()
    ids = [
        tokenizers.load_for_model(tmp_path, 64, *bos_eos)
        for bos_eos in ((7, 8), (None, 8), (None, None))
    ]
    assert [(loaded.bos_id, loaded.eos_id) for loaded in ids] == [(7, 8), (8, 8), (63, 63)]
    with pytest.raises(ValueError, match='has the id 52, but the model has 52 embeddings'):
        tokenizers.load_for_model(tmp_path, 52, 1, 2)
    ids = tokenizers.plan_tokenizer('ids:64,1,2').build([])
    ids.save(tmp_path / 'saved')
    assert tokenizers.load(tmp_path / 'saved') == ids
    assert ids.encode('3 63') == [3, 63] and ids.decode([3, 63]) == '3 63'
    with pytest.raises(ValueError, match="reads token ids below 64; got '64'"):
        ids.encode('1 64')


def test_notes_on_tokenizers(tmp_path):
    """Of tokens without a row, and of a vocabulary that is not read."""
    with_tokenizer(tmp_path)
    words = library.Tokenizer.from_file(str(tmp_path / 'tokenizer.json'))
    words.add_special_tokens(['<image>', '<audio>'])
    words.save(str(tmp_path / 'tokenizer.json'))

    def list_notes(size):
        tokenizer, spec = import_hf.load_tokenizer(tmp_path, {}, size, Path('run'))
        return import_hf.list_tokenizer_notes(tmp_path, tokenizer, spec)

    assert list_notes(55) == list_notes(64) == []
    (note,) = list_notes(53)
    assert "the 53 rows of the embedding: '<image>' (53), '<audio>' (54). A text" in note
    assert "the 54 rows of the embedding: '<audio>' (54)." in list_notes(54)[0]
    (tmp_path / 'tokenizer.json').unlink()
    (note,) = list_notes(8)
    assert 'no tokenizer.json' in note and 'data.tokenizer=ids:8,7,7' in note
    (tmp_path / 'tokenizer.model').touch()
    (note,) = list_notes(8)
    assert 'ids:8,7,7): ' in note and 'tokenizer.model is not a model of SentencePiece' in note
    model = Path(__file__).parents[2] / 'fixtures' / 'vocabularies' / 'llama.model'
    (tmp_path / 'tokenizer.model').write_bytes(model.read_bytes())
    assert list_notes(600) == ['tokenizer.json was made from tokenizer.model, with the same ids']


@pytest.mark.parametrize(
    ('arrays', 'message'),
    [
        ({'tokens': TOKENS_BT}, 'logits is not a file in the archive'),
        (
            {'tokens': TOKENS_BT, 'logits': np.zeros((3, 5), 'f')},
            r'got tokens .* and logits \[3, 5',
        ),
        ({'tokens': TOKENS_BT, 'logits': np.zeros((*TOKENS_BT.shape, 2), 'f')}, 'from 0 to 1, and'),
        ({'tokens': TOKENS_BT, 'logits': np.zeros((*TOKENS_BT.shape, 99), int)}, 'real numbers'),
        ({'tokens': TOKENS_BT * 1.0, 'logits': np.zeros((*TOKENS_BT.shape, 99), 'f')}, 'whole and'),
        ({'tokens': TOKENS_BT, 'logits': np.full((*TOKENS_BT.shape, 99), np.nan)}, 'finite logits'),
        (TOKENS_BT, 'a single array without a name'),
        (b'PK\x03\x04 cut short', 'Write it with np.savez'),
        (b'words', 'Write it with np.savez'),
        (b'', 'Write it with np.savez'),
        (None, 'No such file'),
    ],
)
def test_unfit_reference_is_refused_before_the_import(tmp_path, arrays, message):
    """The folder of the model is missing, and nobody looks for it."""
    path = tmp_path / 'seen.npz'
    if isinstance(arrays, bytes):
        path.write_bytes(arrays)
    elif isinstance(arrays, dict):
        np.savez(path, **arrays)
    elif arrays is not None:
        with path.open('wb') as file:
            np.save(file, arrays)
    options = {'out': str(tmp_path / 'run'), 'config': default.get_config()}
    with pytest.raises(ValueError, match=message) as error:
        convert.run(['import-hf', str(tmp_path)], options | {'reference': str(path)})
    assert str(error.value).startswith(f'--reference={path} must be an .npz file')
    assert '\n' not in str(error.value) and not (tmp_path / 'run').exists()


def test_reference_with_another_vocabulary_is_refused(tmp_path):
    """Catches a workdir that is written before logits of two shapes are subtracted."""
    folder = with_tokenizer(save_case(tmp_path / 'hf', 'llama2'))
    logits = np.zeros((*TOKENS_BT.shape, 99), np.float32)
    np.savez(tmp_path / 'seen.npz', tokens=TOKENS_BT, logits=logits)
    options = {'out': str(tmp_path / 'run'), 'config': default.get_config()}
    with pytest.raises(ValueError, match=r'must have logits of the .* tokens of the model; got 99'):
        convert.run(['import-hf', str(folder)], options | {'reference': str(tmp_path / 'seen.npz')})
    assert not (tmp_path / 'run').exists()


@pytest.mark.full
def test_import_evaluates_trains_and_exports(tmp_path, capsys):
    """The full path of a user. Training begins with the weights of the evaluation."""
    rng = np.random.default_rng(0)
    texts = [' '.join(rng.choice(WORDS, 40)) for _ in range(40)]
    (tmp_path / 'text.jsonl').write_text('\n'.join(json.dumps({'text': t}) for t in texts))
    config = default.get_config()
    config.data.source, config.data.cache_dir = f'text:{tmp_path}/text.jsonl', str(tmp_path / 'c')
    config.data.validation_fraction, config.data.batch_size = 0.2, 8
    folder, run = with_tokenizer(save_case(tmp_path / 'hf', 'llama2')), tmp_path / 'run'
    np.savez(tmp_path / 'seen.npz', tokens=TOKENS_BT, logits=read_logits('llama2')[None])
    options = {'out': str(run), 'config': config, 'reference': str(tmp_path / 'seen.npz')}
    convert.run(['import-hf', str(folder)], options)
    printed = capsys.readouterr().out
    assert '--config.model.activation=swiglu' in printed
    assert float(printed.split()[-1]) < CLOSE
    imported_run = load(run)
    assert imported_run.encode('w0 w49').tolist() == [[1, 3, 52]]
    sharded_run = load(run, mesh=make_mesh(MeshConfig(data=1, fsdp=8), jax.devices()))
    logits = np.asarray(sharded_run.logits(np.repeat(TOKENS_BT, 8, 0)))
    assert largest_difference(logits[3], read_logits('llama2')) < CLOSE
    before = perplexity(imported_run).numbers
    tree = to_dict(imported_run.recipe)
    for section, name, value in (
        ('train', 'init_from', str(run)),
        ('train', 'steps', 1),
        ('train', 'eval_every', 1),
        ('optim', 'lr', 0.0),
    ):
        tree[section][name] = value
    assert train(resolve(tree), tmp_path / 'tuned') == DONE
    rows = read_rows(tmp_path / 'tuned' / 'metrics.jsonl')
    assert rows[0]['ce'] == pytest.approx(before['validation_ce'], rel=0.1)  # of other rows
    assert rows[-1]['validation_ce'] == pytest.approx(before['validation_ce'], rel=1e-6)
    options = {'checkpoint': str(tmp_path / 'tuned'), 'out': str(tmp_path / 'out')}
    convert.run(['export-hf'], options | {'dtype': 'float32'})
    assert 'model_type=llama' in capsys.readouterr().out
    again = import_folder(tmp_path / 'out', base(), run)
    assert_same(again.params, import_case('llama2').params)
    assert again.tokenizer.encode('w0 w49') == [3, 52]
    names = [path / 'tokenizer_config.json' for path in (tmp_path / 'out', folder)]
    assert names[0].read_bytes() == names[1].read_bytes()


@pytest.mark.full
def test_folded_gpt2_exports(tmp_path):
    """The stream has no mean, so that LayerNorm equals RMSNorm. The bias of the logits moves into
    the last norm.
    """
    model = import_case('gpt2')
    folded = fold_checkpoint(make_checkpoint(model), 'rmsnorm', untie=True)
    source = make_checkpoint(model, folded.recipe)
    object.__setattr__(source, 'weights', folded.weights)
    exported = export_hf.export_checkpoint(source)
    assert exported.model_type == 'gpt2' and exported.difference < CLOSE
    export_hf.write_folder(tmp_path / 'out', source, exported, 'float32')
    again = import_folder(tmp_path / 'out', base(), Path('run'))
    logits = make_checkpoint(again).logits(TOKENS_BT)
    assert largest_difference(np.asarray(logits)[0], read_logits('gpt2')) < CLOSE


OURS = {'model.norm': 'rmsnorm', 'model.activation': 'swiglu', 'model.n_kv_heads': 1}
TIED = {'model.tie_embeddings': True}
BASE = {'scaling.name': 'mup', 'scaling.base_width': 8, 'model.n_kv_heads': 2}


@pytest.mark.full
@pytest.mark.parametrize(
    'changes, family',
    [
        (OURS | TIED | BASE | {'model.reparam': 'weight_norm'}, 'llama'),
        (OURS | TIED | {'model.embedding_scale': True, 'norm.scale': False}, 'llama'),
        (
            OURS
            | {'model.qk_norm': 'rmsnorm', 'model.reparam': 'sigma'}
            | {'attention.logit_scale': 'mup'},
            'qwen3',
        ),
        (OURS | {'model.mlp': 'moe', 'model.qk_norm': 'rmsnorm'}, 'qwen3_moe'),
        ({'model.norm': 'layernorm', 'model.position': 'learned', 'norm.bias': False}, 'gpt2'),
    ],
)
def test_export_writes_unsupported_parts_into_weights(changes, family):
    """Reparametrisations, factors of muP, a factor of embeddings, and missing gains and biases."""
    exported = export_hf.export_checkpoint(own_checkpoint(changes))
    assert (exported.model_type, exported.difference < CLOSE) == (family, True)
    assert exported.recipe.model.reparam == 'none' and exported.recipe.scaling.name == 'standard'


def test_every_family_has_a_case():
    assert {case['config']['model_type'] for case in CASES.values()} == FAMILIES.keys()


def test_export_is_read_back_from_its_files(tmp_path, capsys, monkeypatch):
    """Catches a comparison of the model in memory with itself: a weight that changes on the disk
    changes the difference, and the folder is no model then.
    """
    checkpoint, target = make_checkpoint(import_case('llama2')), tmp_path / 'out'
    monkeypatch.setattr(convert, 'load', lambda path: checkpoint)
    convert.export_run(target, {'checkpoint': 'run', 'dtype': 'float32'})
    printed = capsys.readouterr().out
    assert re.search(
        r'read back 0.\d+ MB .*out: for 2 rows of 64 random tokens, .* 0.0e\+00 of the', printed
    )
    stored = safetensors.read_folder(target)['model.norm.weight']
    with stored.file.open('r+b') as file:
        file.seek(stored.begin)
        file.write(np.float32(7).tobytes())
    with pytest.raises(ValueError, match=r'contain a different model: .* was removed'):
        read_back.compare_files(target, checkpoint, 0.0)
    assert not (target / 'config.json').exists()
