"""Reference and equivalence: what is recorded of each layer, against the layers one by one."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn

from lm.diagnostics import make_diagnose, norm_by_layer
from lm.model import Block, groups_of_blocks
from lm.state import hyper_from
from modules.sequence import whole_rows
from tests.helpers import (
    initial_state,
    tiny_batch,
    tiny_config,
    tiny_learner,
    tiny_model,
    train_step,
    with_needs,
)

CONFIG = tiny_config({'model.n_layers': 3})


def diagnose(config, state, batch):
    return make_diagnose(tiny_learner(config))(state.weights, batch, hyper_from(config))


def test_residual_rms_is_that_of_the_stream_behind_each_block():
    """Catches an rms of the update, of the normalized stream, or layers in another order."""
    state, batch = initial_state(CONFIG), tiny_batch()
    seen = diagnose(CONFIG, state, batch)['residual_rms']
    x_BTD = jnp.asarray(state.params['embedding'])[batch['tokens'][:, :-1]]
    (group,) = groups_of_blocks(CONFIG)
    block = Block(CONFIG, tiny_model(CONFIG).kernels, group)
    for layer in range(3):
        params = jax.tree.map(lambda w, layer=layer: w[layer], state.params['layers'])
        x_BTD, _ = block.apply({'params': params}, x_BTD, jnp.float32(layer + 1), whole_rows(8))
        np.testing.assert_allclose(seen[layer], np.sqrt(np.mean(np.square(x_BTD))), rtol=1e-5)


def test_unrolled_layers_are_recorded_as_scanned_ones():
    unrolled = tiny_config({'model.n_layers': 3, 'model.scan_layers': False})
    state, batch = initial_state(CONFIG), tiny_batch()
    for name, value in diagnose(CONFIG, state, batch).items():
        assert value.shape == (3,)
        np.testing.assert_allclose(diagnose(unrolled, state, batch)[name], value, rtol=1e-5)


def test_gradient_norm_by_layer_is_part_of_the_whole():
    """Of the mean token loss: the step's own gradient norm, squared, less what no layer holds."""
    state, batch, hyper = initial_state(CONFIG), tiny_batch(), hyper_from(CONFIG)
    whole = float(train_step(CONFIG)(state, batch, hyper)[1]['grad_norm'])
    by_layer = diagnose(CONFIG, state, batch)['layer_grad_norm']
    without_layers = jax.tree.map(lambda w: w, state.params)
    del without_layers['layers']

    def loss(outside):
        metrics = train_step(CONFIG)(state.replace(params=state.params | outside), batch, hyper)[1]
        return metrics['loss']

    outside = jax.grad(loss)(without_layers)
    rest = sum(float(jnp.sum(jnp.square(g))) for g in jax.tree.leaves(outside))
    np.testing.assert_allclose(np.sum(np.square(by_layer)), whole**2 - rest, rtol=1e-4)


def test_norm_by_layer_is_over_all_but_the_first_axis():
    tree = {
        'gain': jnp.array([[1.0, 1.0], [2.0, 2.0]]),
        'matrix': jnp.ones((2, 1, 2)),
        'scalar': jnp.array([0.0, 5.0]),
    }
    np.testing.assert_allclose(norm_by_layer(tree), [2.0, np.sqrt(8 + 2 + 25)])


@pytest.mark.parametrize('placement', ['mix', 'hybrid_star', 'resi_dual', 'wide'])
def test_groups_of_blocks_are_recorded_in_order_of_depth(placement):
    """One number a block, the first block's first: catches groups in the order of their names."""
    changes = with_needs({'model.placement': placement, 'model.n_layers': 3})
    config = tiny_config(changes | ({'model.mix_fraction': 0.4} if placement == 'mix' else {}))
    state, batch = initial_state(config), tiny_batch()
    seen = diagnose(config, state, batch)
    assert all(value.shape == (3,) for value in seen.values())
    first = groups_of_blocks(config)[0].name
    louder = dict(state.params)
    if placement != 'wide':
        louder[first] = jax.tree.map(lambda w: w.copy(), louder[first])
        louder[first]['mlp']['down'][0] *= 100
        after = diagnose(config, state.replace(params=louder), batch)
        moved = after['layer_param_norm'] != seen['layer_param_norm']
        np.testing.assert_array_equal(moved, [True, False, False])


@pytest.mark.parametrize('scan', [True, False])
def test_step_and_evaluation_record_nothing(scan, monkeypatch):
    """Off means absent: no layer even asks for its diagnostics to be kept."""
    config = tiny_config({'model.scan_layers': scan})
    model, params = tiny_model(config), initial_state(config).params

    def refuse(*_, **__):
        raise AssertionError('sown')

    monkeypatch.setattr(nn.Module, 'sow', refuse)
    model.apply({'params': params}, tiny_batch()['tokens'][:, :-1])
    with pytest.raises(AssertionError, match='sown'):
        model.apply({'params': params}, tiny_batch()['tokens'][:, :-1], mutable=['diagnostics'])
