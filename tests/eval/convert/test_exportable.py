"""Contract: what --print_config says of an export is the choice of the export."""

import pytest

from configs import default, llama_124m
from docs import generate
from eval.convert import export_hf
from eval.convert.exportable import describe_export, find_export_family
from lm.config.resolve import resolve, single_run_config, update_recipe
from tests.fixtures.hf.exports import SETS, checkpoint
from tests.helpers import tiny_config


def read_config(module):
    return resolve(single_run_config(module.get_config().to_dict()))


def test_configs_say_their_export():
    """Catches a config whose export is refused though a family has it, and the reverse."""
    assert describe_export(read_config(llama_124m)) == 'as LlamaForCausalLM (model_type llama)'
    description = describe_export(read_config(default))
    assert description.startswith('no family of transformers can represent this model; ')
    assert description.endswith("lacks model.activation='gelu' (it has 'swiglu')")


@pytest.mark.parametrize('name', ['biases of queries', 'sigma, tied'])
def test_same_family_as_the_export(name):
    """A checkpoint of the recipe, whose weights are random, goes out as that family."""
    source = checkpoint(SETS[name])
    exported = export_hf.convert_checkpoint(source, 'float32')
    assert find_export_family(source.recipe) == exported.model_type


@pytest.mark.parametrize(
    ('changes', 'message'),
    [
        ({'model.placement': 'mix'}, "lacks .*model.placement='mix'"),
        ({'model.readout_bias': True}, 'no parameter for readout_bias, except if it stays 0'),
        ({'model.norm': 'batchnorm'}, "lacks .*model.norm='batchnorm'"),
    ],
)
def test_lack_is_named(changes, message):
    """Catches a trained bias that no family has a tensor for."""
    llama = tiny_config(SETS['llama'])
    with pytest.raises(ValueError, match=message):
        find_export_family(update_recipe(llama, changes))
    assert 'Families' not in describe_export(update_recipe(llama, changes))


def test_statistics_are_refused_with_their_field():
    source = checkpoint({'model.final_norm': 'layernorm_removal', 'model.qk_norm': 'batchnorm'})
    with pytest.raises(ValueError, match=r'model\.final_norm and model\.qk_norm: stats'):
        export_hf.convert_checkpoint(source, 'float32')


def test_page_lists_each_config():
    page = generate.exports()
    for name in ('default', 'llama_124m', 'llama_1b', 'llama_8b'):
        assert f'`configs/{name}.py`' in page
    assert '| as LlamaForCausalLM (model_type llama) |' in page and 'as Qwen3ForCausalLM' in page
