"""Reference: an adapter's factors multiply to the matrices of a file. Contract: unsupported
models.
"""

import json
import shutil

import numpy as np
import pytest

from eval.convert import safetensors
from eval.convert.export_hf import export_checkpoint, export_tensors, find_source_family
from eval.convert.export_peft import (
    CONFIG,
    PREFIX,
    WEIGHTS,
    export_adapter,
    join_factors,
    write_folder,
)
from eval.convert.import_hf import write_run
from eval.convert.layouts import Layout
from lm.data.tokenizers import ByteTokenizer
from modules.params import ParamSpec
from tests.eval.convert.test_commands import checkpoint
from tests.eval.convert.test_hf import import_case

LLAMA = {
    'model.norm': 'rmsnorm',
    'model.activation': 'swiglu',
    'model.reparam': 'lora',
    'reparam.rank': 3,
    'reparam.alpha': 2.0,
    'model.n_kv_heads': 1,
}
QUERY = ParamSpec('hidden', ('layer', 'embed', 'heads', 'head_dim'), ('embed',))
OUT = ParamSpec('hidden', ('layer', 'heads', 'head_dim', 'embed'), ('heads', 'head_dim'))
# A file's layout, the matrix's description, its shape, and whether the file has [inputs, outputs].
LAYOUTS = [
    ('(N H) D -> D N H', QUERY, (6, 2, 4), False),
    ('D (N H) -> N H D', OUT, (2, 4, 6), False),
    ('D (N H) -> D N H', QUERY, (6, 2, 4), True),
    ('(N H~R) D -> D N H', QUERY, (6, 2, 7), False),
]


@pytest.mark.parametrize(('axes', 'spec', 'shape', 'turned'), LAYOUTS)
def test_factors_multiply_to_the_file_matrix(axes, spec, shape, turned):
    """Catches exchanged A and B, and heads in another order than in the file."""
    rng, n_rows, layout = np.random.default_rng(0), len(spec.fan_in), Layout(axes, {'R': 6})
    a = rng.normal(size=(*shape[:n_rows], 3))
    b = rng.normal(size=(3, *shape[n_rows:]))
    expected = layout.join([np.tensordot(a, b, 1)])
    in_a, in_b, is_transposed = join_factors(layout, spec, [(a, b)])
    assert is_transposed == turned and in_a.shape[0] == in_b.shape[1] == 3
    np.testing.assert_allclose((in_b @ in_a).T if turned else in_b @ in_a, expected)


@pytest.mark.parametrize(
    ('axes', 'heads', 'turned'),
    [
        ('(N|K|K H) D -> D N|K|K H', (2, 1, 1), False),
        ('(N 3 H) D -> D N H', (2, 2, 2), False),
        ('D (3 N H) -> D N H', (2, 2, 2), True),
    ],
)
def test_matrices_in_one_tensor_share_factors(axes, heads, turned):
    """Concatenated or interleaved. Catches factors of one matrix that reach another's outputs."""
    rng, layout = np.random.default_rng(0), Layout(axes)
    pairs = [(rng.normal(size=(6, 3)), rng.normal(size=(3, n, 4))) for n in heads]
    expected = layout.join([np.tensordot(a, b, 1) for a, b in pairs])
    in_a, in_b, is_transposed = join_factors(layout, QUERY, pairs)
    assert is_transposed == turned and in_a.shape == (9, 6)
    np.testing.assert_allclose((in_b @ in_a).T if turned else in_b @ in_a, expected)


@pytest.mark.full
def test_adapter_names_match_imported_model(tmp_path):
    """Phi-3, which as a LLaMA would have a tensor for each matrix. The family is recorded in the
    run of train.init_from, and not in the adapter's run.
    """
    write_run(tmp_path, tmp_path / 'run', import_case('phi3'))
    changes = {'model.n_layers': 1, 'train.init_from': str(tmp_path / 'run')}
    source = checkpoint(LLAMA | changes | {'reparam.rslora': True})
    adapter = export_adapter(source, 'someone/phi')
    name = f'{PREFIX}model.layers.0.self_attn.qkv_proj'
    assert adapter.config['target_modules'] == [
        *('mlp.down_proj', 'mlp.gate_up_proj', 'self_attn.o_proj', 'self_attn.qkv_proj')
    ]
    a, b = (adapter.tensors[f'{name}.lora_{x}.weight'] for x in 'AB')
    assert a.shape == (9, 16) and b.shape == (32, 9)
    rank, alpha = (adapter.config[f'{x}_pattern']['self_attn.qkv_proj'] for x in ('rank', 'alpha'))
    assert rank == 9 and alpha / 3 == pytest.approx(2 / 3**0.5)
    shutil.rmtree(tmp_path / 'run')
    assert find_source_family(source) is None


@pytest.mark.full
def test_base_plus_adapter_is_merged_model(tmp_path):
    """W = base + alpha / r B A for each tensor, by the names and shapes of PEFT's files."""
    source = checkpoint(LLAMA)
    adapter = export_adapter(source, 'someone/base')
    write_folder(tmp_path / 'adapter', adapter, ByteTokenizer())
    config = json.loads((tmp_path / 'adapter' / CONFIG).read_text())
    assert config['r'] == 3 and config['lora_alpha'] == 2 and not config['fan_in_fan_out']
    assert 'self_attn.q_proj' in config['target_modules'] and config['peft_type'] == 'LORA'
    stored = safetensors.read_header(tmp_path / 'adapter' / WEIGHTS)
    arrays = {name: np.array(x) for name, x in safetensors.map_tensors(stored)}
    merged = {n: t.make() for n, t in export_tensors(export_checkpoint(source), 'float32').items()}
    b_is_0 = {n: x for n, x in arrays.items() if n.endswith('lora_A.weight')}
    assert len(b_is_0) == 2 * 7  # two layers
    base = source.weights.params['layers']['attention']['query']['base'][1]
    name = 'model.layers.1.self_attn.q_proj'
    a, b = (arrays[f'{PREFIX}{name}.lora_{x}.weight'] for x in 'AB')
    assert a.shape == (3, 16) and b.shape == (16, 3)
    expected = base.reshape(16, 16).T + 2 / 3 * b @ a
    np.testing.assert_allclose(merged[f'{name}.weight'], expected, rtol=1e-5, atol=1e-5)


@pytest.mark.full
def test_adapter_fits_files_with_multipliers(tmp_path):
    """W = base + alpha / r B A holds for the files of a Granite, whose weights are ours without its
    multipliers. Catches an adapter that is as many times too small on the source.
    """
    write_run(tmp_path, tmp_path / 'run', import_case('granite'))
    source = checkpoint(LLAMA | {'train.init_from': str(tmp_path / 'run')})
    adapter, exported = export_adapter(source, 'someone/granite'), export_checkpoint(source)
    assert exported.config['residual_multiplier'] == 0.22
    merged = export_tensors(exported, 'float32')
    name, layers = 'model.layers.1.self_attn.o_proj', source.weights.params['layers']
    a, b = (adapter.tensors[f'{PREFIX}{name}.lora_{x}.weight'] for x in 'AB')
    base_weight = layers['attention']['out']['base'][1].reshape(-1, 16).T / 0.22
    expected = base_weight + 2 / 3 * b @ a
    np.testing.assert_allclose(merged[f'{name}.weight'].make(), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.full
@pytest.mark.parametrize(
    ('changes', 'message'),
    [
        ({'model.reparam': 'none', 'reparam.rank': None, 'reparam.alpha': None}, 'reparam=none. '),
        (
            {'reparam.roles': 'readout'},
            r'has the role readout \(leave that role out of reparam.roles\)',
        ),
    ],
)
def test_unsupported_adapter_is_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        export_adapter(checkpoint(LLAMA | changes), '')
