"""Contract: a parameter is described once, and its description survives stacking."""

import jax
import jax.numpy as jnp
import pytest
from flax import linen as nn

from modules.params import LAYER, ROLES, ParamSpec, declare, named_leaves, split_boxes

ONES = nn.initializers.ones


class Layer(nn.Module):
    """A layer with a described matrix, and a vector that is described if `describe`."""

    describe: bool = True

    @nn.compact
    def __call__(self, x, _=None):
        matrix = self.param('matrix', declare(ONES, 'hidden', ('in', 'out'), ('in',)), (3, 3))
        vector = declare(ONES, 'vector', ('out',)) if self.describe else ONES
        return x @ matrix + self.param('vector', vector, (3,))[None], None


def init_shapes(module):
    return jax.eval_shape(lambda: module.init(jax.random.key(0), jnp.ones((1, 3)))['params'])


def test_split_gives_parallel_trees():
    params, specs = split_boxes(init_shapes(Layer()))
    assert params['matrix'].shape == (3, 3)
    assert specs == {
        'matrix': ParamSpec('hidden', ('in', 'out'), ('in',)),
        'vector': ParamSpec('vector', ('out',)),
    }
    assert jax.tree.structure(params) == jax.tree.structure(specs)


@pytest.mark.parametrize('index', [0, 1])
def test_scan_adds_layer_axis(index):
    """Catches an axis name at another position than its dimension."""
    stack = nn.scan(
        Layer,
        variable_axes={'params': index},
        split_rngs={'params': True},
        length=5,
        metadata_params={nn.meta.PARTITION_NAME: LAYER},
    )
    params, specs = split_boxes(init_shapes(stack()))
    for path, spec in named_leaves(specs).items():
        shape = named_leaves(params)[path].shape
        assert shape[spec.axes.index(LAYER)] == 5
        assert len(spec.axes) == len(shape)
    assert specs['matrix'].fan_in == ('in',)
    assert specs['matrix'].fan_in_size(params['matrix'].shape) == 3


def test_layer_axis_can_be_removed():
    box = declare(ONES, 'hidden', ('in', 'out'), ('in',))(jax.random.key(0), (2, 3))
    stacked = box.add_axis(1, {})
    assert stacked.spec.axes == ('in', LAYER, 'out')
    assert stacked.remove_axis(1, {}).spec == box.spec


def test_undescribed_parameter_is_named():
    outer = nn.Sequential([Layer(describe=False)])
    with pytest.raises(ValueError, match=r'parameter layers_0/vector was created without'):
        split_boxes(init_shapes(outer))


def test_axes_must_name_each_dimension():
    with pytest.raises(ValueError, match=r"axes \('embed',\) must name each .* \(3, 4\)"):
        declare(ONES, 'vector', ('embed',))(jax.random.key(0), (3, 4))


def test_role_and_fan_in_must_be_known():
    with pytest.raises(ValueError, match=f'one of {", ".join(ROLES)}; got .matrix.'):
        declare(ONES, 'matrix', ('in', 'out'))
    with pytest.raises(ValueError, match=r"fan_in names axes \['width'\]"):
        ParamSpec('hidden', ('in', 'out'), ('width',))


def test_fan_in_counts_all_summed_axes():
    spec = ParamSpec('hidden', ('layer', 'heads', 'head_dim', 'embed'), ('heads', 'head_dim'))
    assert spec.fan_in_size((7, 2, 5, 3)) == 10
    assert ParamSpec('vector', ('embed',)).fan_in_size((3,)) == 1
    with pytest.raises(ValueError, match='longer'):
        spec.fan_in_size((2, 5, 3))


def test_named_leaves_keep_specs_whole():
    spec = ParamSpec('vector', ('embed',))
    assert named_leaves({'a': {'b': spec}, 'c': 1}) == {'a/b': spec, 'c': 1}
