"""Property: rotary positions that turn neighbours are a permutation of rows. Contract: biases and
fields of the families that have them.
"""

from pathlib import Path

import numpy as np
import pytest

from eval.convert import export_hf, import_hf
from eval.convert.import_hf import import_folder
from eval.convert.layouts import Layout
from lm.config.resolve import update_recipe
from tests.eval.convert.test_hf import (
    assert_same,
    base,
    draw_weights,
    import_case,
    make_checkpoint,
    read_case,
    save_case,
)
from tests.fixtures.hf.seeded import weight


def test_paired_features_round_trip():
    """Only the first R features of each head are in pairs in the file. Catches pairs over the whole
    head, over two heads, the inverse order, and a range that is cut before features are in order.
    """
    layout, shapes = Layout('(N H~R) D -> D N H').with_lengths({'R': 6}), [(3, 2, 9)]
    order = [0, 3, 1, 4, 2, 5, 6, 7, 8]  # places in our head of the features of the file
    ours = np.arange(3 * 2 * 9).reshape(3, 2, 9)
    tensor = layout.join([ours])
    np.testing.assert_array_equal(tensor, ours[:, :, order].transpose(1, 2, 0).reshape(18, 3))
    np.testing.assert_array_equal(layout.take(tensor, shapes, 0), ours)
    ranges = [range(1, 3), range(0, 1), range(1, 5)]
    np.testing.assert_array_equal(layout.take(tensor, shapes, 0, ranges), ours[1:3, 0:1, 1:5])


def test_rotated_part_is_permuted():
    """Half of each head in GLM. Catches pairs over whole heads, and permuted values."""
    key, value = (
        draw_weights('glm4')[f'model.layers.1.self_attn.{name}_proj.weight'].reshape(2, 8, 24)
        for name in ('k', 'v')
    )
    params = import_case('glm4').params
    ours = np.moveaxis(params['layers/attention/key'][1], 0, -1)
    np.testing.assert_array_equal(ours, key[:, [0, 2, 1, 3, 4, 5, 6, 7]])
    np.testing.assert_array_equal(np.moveaxis(params['layers/attention/value'][1], 0, -1), value)


BIAS_NAMES = ('bias', 'qkv_bias', 'mlp_bias')


def test_helium_with_biases_imports(tmp_path):
    """Of queries, keys and values, and of the MLP, as ours. Catches biases that are not permuted
    with their rows, and an attention_bias that needs an output's.
    """
    arrays, sizes = draw_weights('helium'), {'q': 24, 'k': 8, 'v': 8}
    inputs = {f'self_attn.{name}_proj.bias': size for name, size in sizes.items()}
    mlp = {'mlp.gate_proj.bias': 20, 'mlp.up_proj.bias': 20, 'mlp.down_proj.bias': 24}
    for has_mlp, names in ((False, inputs), (True, inputs | mlp)):
        full = {f'model.layers.{i}.{name}': size for name, size in names.items() for i in range(2)}
        biases = {name: weight(name, [size]) for name, size in full.items()}
        fields = {'attention_bias': True, 'mlp_bias': has_mlp}
        folder = save_case(tmp_path / str(has_mlp), 'helium', arrays | biases, **fields)
        model = import_folder(folder, base(), Path('run'))
        assert model.recipe.model.qkv_bias and not model.recipe.model.bias
        assert model.recipe.model.mlp_bias == has_mlp
        key_bias = biases['model.layers.1.self_attn.k_proj.bias'].reshape(2, 4)[:, [0, 2, 1, 3]]
        np.testing.assert_array_equal(model.params['layers/attention/key_bias'][1], key_bias)
        exported = export_hf.convert_checkpoint(make_checkpoint(model), 'float32')
        assert fields.items() <= exported.config.items()
        written = {n: t.make() for n, t in export_hf.export_tensors(exported, 'float32').items()}
        assert_same(written, arrays | biases)
    recipe = update_recipe(model.recipe, {f'model.{n}': n == 'bias' for n in BIAS_NAMES})
    params = model.params | {'layers/attention/out_bias': np.ones((2, 24), np.float32)}
    assert export_hf.select_family(recipe, params, 'helium')[0] == 'llama'


@pytest.mark.parametrize('name', ['llama2', 'gpt2', 'starcoder2', 'glm'])
def test_imports_reset_mlp_bias(name):
    """Catches model.mlp_bias of --config that reaches an imported model."""
    recipe = import_hf.recipe_for(read_case(name), base(mlp_bias=True), 'ids:67,1,2')
    assert not recipe.model.mlp_bias


# Fields of files on the Hub that their classes do not declare.
HUB_FIELDS = {
    'starcoder2': {
        'attention_softmax_in_fp32': True,
        'layer_norm_epsilon': 1e-05,
        'mlp_type': 'default',
        'norm_type': 'layer_norm',
        'residual_dropout': 0.1,
        'scale_attention_softmax_in_fp32': True,
        'scale_attn_weights': True,
    },
    'gptj': {
        'gradient_checkpointing': False,
        'n_inner': None,
        'rotary': True,
        'scale_attn_weights': True,
        'summary_type': 'cls_index',
        'task_specific_params': {'text-generation': {'do_sample': True}},
    },
}


@pytest.mark.parametrize('name', HUB_FIELDS)
def test_hub_fields_change_nothing(name):
    """Catches a field of the files of a family that is refused, or makes a note."""
    assert read_case(name, **HUB_FIELDS[name]) == read_case(name)


def test_gptj_has_no_attention_biases():
    """Biases of MLP and logits alone, so that a trained model can be exported. Catches a bias of
    logits that moves into the last norm, and rotated features beyond a head.
    """
    model = import_case('gptj')
    assert model.recipe.model.readout_bias and model.recipe.model.mlp_bias
    assert {path for path in model.params if path.startswith('layers/attention/')} == {
        f'layers/attention/{name}' for name in ('query', 'key', 'value', 'out')
    }
    np.testing.assert_array_equal(
        model.params['readout_bias'], draw_weights('gptj')['lm_head.bias']
    )
    exported = export_hf.convert_checkpoint(make_checkpoint(model), 'float32')
    assert_same(exported.params, model.params)
    for rotated in (3, 10):
        with pytest.raises(
            ValueError, match=f'rotary_dim={rotated}; it must be even and at most 8'
        ):
            read_case('gptj', rotary_dim=rotated)
