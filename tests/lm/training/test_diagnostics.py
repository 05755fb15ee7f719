"""Reference and equivalence: what is recorded of each layer, against the layers one by one."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn

import lm.model.transformer
from lm.model.transformer import Block, block_groups
from lm.training.diagnostics import make_diagnose_step, matrix_names, norm_by_layer
from lm.training.state import make_hyper
from lm.training.step import make_train_step, target_weights
from modules.params import named_leaves
from modules.sequence import whole_rows
from tests.helpers import (
    BOS,
    initial_state,
    packed_batch,
    program_of,
    tiny_batch,
    tiny_config,
    tiny_learner,
    tiny_model,
    train_step,
    with_needs,
)

CONFIG = tiny_config({'model.n_layers': 3})
STATE = functools.partial(initial_state, CONFIG)
OF_ROLES = ('gradient_rms', 'update_rms', 'weight_rms', 'update_ratio')


@functools.cache
def program(config):
    return jax.jit(make_diagnose_step(tiny_learner(config)))


def diagnose(config, state, batch):
    return program(program_of(config))(state, batch, make_hyper(config))


@pytest.mark.full
def test_residual_rms_is_that_of_the_stream_behind_each_block():
    """Catches an rms of the update, of the normalized stream, or layers in another order."""
    state, batch = initial_state(CONFIG), tiny_batch()
    seen = diagnose(CONFIG, state, batch)['residual_rms']
    x_BTD = jnp.asarray(state.params['embedding'])[batch['tokens'][:, :-1]]
    (group,) = block_groups(CONFIG)
    block = Block(CONFIG, tiny_model(CONFIG).kernels, group)
    apply = jax.jit(lambda w, x, number: block.apply({'params': w}, x, number, whole_rows(8))[0])
    for layer in range(3):
        params = jax.tree.map(lambda w, layer=layer: w[layer], state.params['layers'])
        x_BTD = apply(params, x_BTD, jnp.float32(layer + 1))
        np.testing.assert_allclose(seen[layer], np.sqrt(np.mean(np.square(x_BTD))), rtol=1e-5)


@pytest.mark.full
def test_unrolled_layers_are_recorded_as_scanned_ones():
    unrolled = tiny_config({'model.n_layers': 3, 'model.scan_layers': False})
    state, batch = initial_state(CONFIG), tiny_batch()
    found = diagnose(unrolled, state, batch)
    for name, value in diagnose(CONFIG, state, batch).items():
        np.testing.assert_allclose(found[name], value, rtol=1e-5, err_msg=name)


@pytest.mark.full
def test_gradient_norm_by_layer_is_part_of_the_whole():
    """Of the mean token loss: the step's own gradient norm, squared, less what no layer holds."""
    state, batch, hyper = initial_state(CONFIG), tiny_batch(), make_hyper(CONFIG)
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


@pytest.mark.full
def test_names():
    """Those that reports and warnings read: catches one that gets lost, or a shape that changes."""
    shapes = {name: value.shape for name, value in diagnose(CONFIG, STATE(), tiny_batch()).items()}
    moments = ('rms', 'largest', 'kurtosis')
    by_layer = {f'{x}_{m}' for x in ('residual', 'attention_output', 'mlp_output') for m in moments}
    by_layer |= {'residual_sink', 'layer_param_norm', 'layer_grad_norm'}
    by_layer |= {f'{x}_{role}' for x in OF_ROLES for role in ('hidden', 'vector')}
    matrices = ('query', 'key', 'value', 'out', 'up', 'down')
    by_layer |= {f'singular_value_{name}' for name in matrices}
    scalars = {'logit_mean', 'logit_largest', 'log_z_mean', 'log_z_largest'}
    scalars |= {f'gradient_noise_{name}' for name in ('signal', 'trace', 'scale')}
    outside = ('embedding', 'readout', 'vector_outside')
    scalars |= {f'{x}_{role}' for x in OF_ROLES for role in outside}
    by_head = {f'attention_{x}' for x in ('entropy', 'entropy_share', 'largest_logit')}
    by_head |= {'attention_first_token', 'attention_logit_size'}
    wanted = dict.fromkeys(by_layer, (3,)) | dict.fromkeys(scalars, ())
    assert shapes == wanted | dict.fromkeys(by_head, (3, 2))


def rms(*arrays):
    flat = np.concatenate([np.ravel(np.float64(a)) for a in arrays])
    return np.sqrt(np.mean(flat**2))


@pytest.mark.full
@pytest.mark.parametrize('reparam', ['weight_norm', 'shared', 'normalize_and_project'])
def test_updates_are_those_of_the_step(reparam):
    """By role and layer, from the parameters before and after a training step: catches a direction
    that is not scaled, decay or a map after the update left out, and another role's parameters.
    """
    config = tiny_config({'model.n_layers': 3, 'model.reparam': reparam, 'optim.lr': 0.01})
    before, batch = initial_state(config), packed_batch()
    after, _ = train_step(config)(before, batch, make_hyper(config))
    seen = diagnose(config, before, batch)
    specs = named_leaves(tiny_learner(config).description.specs)
    old, new = named_leaves(before.params), named_leaves(after.params)
    for role in ('hidden', 'vector'):
        paths = [p for p in specs if specs[p].role == role and specs[p].axes[:1] == ('layer',)]
        if reparam == 'shared' and role == 'hidden':
            assert not paths and f'update_rms_{role}' not in seen
            continue
        for layer in range(3):
            update = rms(*(np.float64(new[p][layer]) - old[p][layer] for p in paths))
            weight = rms(*(old[p][layer] for p in paths))
            assert seen[f'update_rms_{role}'][layer] == pytest.approx(update, rel=1e-3)
            assert seen[f'weight_rms_{role}'][layer] == pytest.approx(weight, rel=1e-5)
            assert seen[f'update_ratio_{role}'][layer] == pytest.approx(update / weight, rel=1e-3)
    names = {'embedding': 'embedding', 'readout': 'readout', 'vector': 'vector_outside'}
    names |= {'hidden': 'hidden_outside'} if reparam == 'shared' else {}
    for role, name in names.items():
        paths = [p for p in specs if specs[p].role == role and specs[p].axes[:1] != ('layer',)]
        update = rms(*(np.float64(new[p]) - old[p] for p in paths))
        assert seen[f'update_rms_{name}'] == pytest.approx(update, rel=1e-3)


@pytest.mark.full
def test_gradients_by_role_make_the_gradient_norm():
    """Catches a gradient of the weights used, one after clipping, and a role that is left out."""
    config = tiny_config({'model.n_layers': 3, 'model.reparam': 'weight_norm'})
    state, batch = initial_state(config), tiny_batch()
    whole = float(train_step(config)(state, batch, make_hyper(config))[1]['grad_norm'])
    seen = diagnose(config, state, batch)
    specs, params = named_leaves(tiny_learner(config).description.specs), named_leaves(state.params)
    total = 0.0
    for path, spec in specs.items():
        is_layered = spec.axes[:1] == ('layer',)
        outside = spec.role == 'vector' and not is_layered
        name = f'gradient_rms_{spec.role}' + ('_outside' if outside else '')
        count = params[path][0].size if is_layered else params[path].size
        total += float(np.sum(np.square(seen[name]))) * count
    assert np.sqrt(total) == pytest.approx(whole, rel=1e-4)


@pytest.mark.full
def test_readout_over_the_tokens_of_the_loss():
    """Against all logits at once: catches padding and beginnings of documents that count."""
    config = tiny_config({'model.n_layers': 3, 'model.logit_softcap': 3.0})
    state, batch = initial_state(config), packed_batch()
    seen, tokens = diagnose(config, state, batch), batch['tokens'][:, :-1]
    logits = tiny_model(config).apply({'params': state.params}, tokens, None, tokens > 0)
    kept = np.float64(logits)[np.asarray(target_weights(batch, BOS)) > 0]
    log_z = np.log(np.sum(np.exp(kept), -1))
    wanted = {
        'logit_mean': kept.mean(),
        'logit_largest': np.abs(kept).max(),
        'log_z_mean': log_z.mean(),
        'log_z_largest': np.abs(log_z).max(),
    }
    for name, value in wanted.items():
        assert seen[name] == pytest.approx(value, rel=1e-4), name


@pytest.mark.full
@pytest.mark.parametrize('reparam', ['none', 'weight_norm'])
def test_singular_values_are_of_the_weights_used(reparam):
    config = tiny_config({'model.n_layers': 3, 'model.reparam': reparam})
    state, learner = initial_state(config), tiny_learner(config)
    louder = jax.tree.map(lambda w: np.array(w), state.params)
    query = louder['layers']['attention']['query']
    query = query['gain'] if reparam == 'weight_norm' else query
    query *= np.arange(1, 4).reshape(3, *[1] * (query.ndim - 1))
    state = state.replace(params=louder)
    seen = diagnose(config, state, tiny_batch())
    used = learner.variables(state.weights)['params']['layers']
    for name in ('query', 'key', 'out'):
        weight = np.float64(used['attention'][name]).reshape(3, 16, -1)
        wanted = np.linalg.svd(weight, compute_uv=False)[:, 0]
        np.testing.assert_allclose(seen[f'singular_value_{name}'], wanted, rtol=0.02)


@pytest.mark.full
@pytest.mark.parametrize('reparam', ['sigma', 'shared+sigma'])
def test_what_a_reparametrisation_knows_of_its_matrices(reparam):
    """sigmaReparam's own norm and gain, by layer, also where one matrix serves all: of the stored
    weights at the start, whose singular values are numpy's.
    """
    config = tiny_config({'model.n_layers': 3, 'model.reparam': reparam})
    state = initial_state(config)
    used = tiny_learner(config).variables(state.weights)['params']['layers']
    seen = diagnose(config, state, tiny_batch())
    for name, part in (('query', 'attention'), ('down', 'mlp')):
        weight = np.float64(used[part][name])
        wanted = np.linalg.svd(weight.reshape(*weight.shape[:2], -1), compute_uv=False)[:, 0]
        np.testing.assert_allclose(seen[f'sigma_{name}'], wanted, rtol=0.02)
        np.testing.assert_allclose(seen[f'gamma_{name}'], seen[f'sigma_{name}'], rtol=1e-5)


def test_matrices_of_norms_and_of_one_name_are_told_apart():
    """The MLP's own keep their names whatever the norms: catches curves of two things under one."""
    changes = {'model.norm': 'gated_rmsnorm', 'model.activation': 'swiglu'}
    config = tiny_config(changes | {'attention.gate': 'headwise'})
    names = set(matrix_names(tiny_learner(config)).values())
    assert {'up', 'down', 'attention_gate', 'mlp_gate', 'mlp_norm_in_down', 'query'} <= names


@pytest.mark.full
def test_experts_give_the_largest_of_theirs():
    config = tiny_config({'model.mlp': 'moe', 'mlp.n_experts': 3})
    state = initial_state(config)
    up_LEDF = np.float64(state.params['layers']['mlp']['up'])
    wanted = np.linalg.svd(up_LEDF, compute_uv=False)[..., 0].max(-1)
    found = diagnose(config, state, tiny_batch())['singular_value_up']
    np.testing.assert_allclose(found, wanted, rtol=0.02)


@pytest.mark.full
def test_outputs_of_sublayers_and_the_stream_without_padding():
    """Against what each sublayer adds to the stream: catches outputs after the norm or the
    placement, attention's in the place of the MLP's, and padding that counts.
    """
    state, batch = initial_state(CONFIG), packed_batch()
    tokens, segments = batch['tokens'][:, :-1], batch['segments'][:, :-1]
    variables = tiny_learner(CONFIG).variables(state.weights)
    _, filled = tiny_model(CONFIG).apply(
        variables, tokens, None, segments > 0, mutable=['activations']
    )
    seen, stream = diagnose(CONFIG, state, batch), filled['activations']
    attention, mlp = (np.float64(stream['layers'][f'after_{x}']) for x in ('attention', 'mlp'))
    before = np.concatenate([np.float64(stream['embedding'])[None], mlp[:-1]])
    wanted = {
        'residual': mlp,
        'attention_output': attention - before,
        'mlp_output': mlp - attention,
    }
    for name, x_LBTD in wanted.items():
        for layer in range(3):
            kept = x_LBTD[layer][segments > 0]
            assert seen[f'{name}_rms'][layer] == pytest.approx(rms(kept), rel=1e-4)
            assert seen[f'{name}_largest'][layer] == pytest.approx(np.abs(kept).max(), rel=1e-4)


@pytest.mark.full
@pytest.mark.parametrize('scan', [True, False])
def test_nothing_of_it_is_in_the_training_step(scan, monkeypatch):
    """Off means absent from the text of the lowered step, which is the same where the functions
    that measure are none: catches what is computed and dropped, and names of it.
    """
    config = tiny_config({'model.scan_layers': scan})
    learner = tiny_learner(config)
    arguments = initial_state(config), tiny_batch(), make_hyper(config)

    def text(function, debug_info=False):
        return jax.jit(function).lower(*arguments).as_text(debug_info=debug_info)

    named = text(make_train_step(learner), debug_info=True)
    assert '/diagnostics/' not in named and '/diagnostics/' in text(
        make_diagnose_step(learner), True
    )
    step = text(make_train_step(learner))
    for function in ('moments', 'sink'):
        monkeypatch.setattr(lm.model.transformer, function, refuse)
    assert text(make_train_step(learner)) == step
    every = tiny_config({'model.scan_layers': scan, 'train.diagnose_every': 1})
    assert text(make_train_step(tiny_learner(every))) == step
    with pytest.raises(AssertionError, match='asked'):
        text(make_diagnose_step(learner))


def refuse(*_, **__):
    raise AssertionError('asked')


def test_norm_by_layer_is_over_all_but_the_first_axis():
    tree = {
        'gain': jnp.array([[1.0, 1.0], [2.0, 2.0]]),
        'matrix': jnp.ones((2, 1, 2)),
        'scalar': jnp.array([0.0, 5.0]),
    }
    np.testing.assert_allclose(norm_by_layer(tree), [2.0, np.sqrt(8 + 2 + 25)])


@pytest.mark.full
@pytest.mark.parametrize('placement', ['mix', 'hybrid_star', 'resi_dual', 'wide'])
def test_groups_of_blocks_are_recorded_in_order_of_depth(placement):
    """One number a block, the first block's first: catches groups in the order of their names."""
    changes = with_needs({'model.placement': placement, 'model.n_layers': 3})
    config = tiny_config(changes | ({'model.mix_fraction': 0.4} if placement == 'mix' else {}))
    state, batch = initial_state(config), tiny_batch()
    seen = diagnose(config, state, batch)
    assert all(value.shape[:1] in ((), (3,)) for value in seen.values())
    assert seen['layer_param_norm'].shape == (3,) and seen['log_z_mean'].shape == ()
    first = block_groups(config)[0].name
    louder = dict(state.params)
    if placement != 'wide':
        louder[first] = jax.tree.map(lambda w: w.copy(), louder[first])
        louder[first]['mlp']['down'][0] *= 100
        after = diagnose(config, state.replace(params=louder), batch)
        moved = after['layer_param_norm'] != seen['layer_param_norm']
        np.testing.assert_array_equal(moved, [True, False, False])


@pytest.mark.default_rows('True')
@pytest.mark.parametrize('scan', [True, False])
def test_step_and_evaluation_record_nothing(scan, monkeypatch):
    """Off means absent: no layer even asks for its diagnostics to be kept."""
    config = tiny_config({'model.scan_layers': scan})
    model, params = tiny_model(config), initial_state(config).params

    monkeypatch.setattr(nn.Module, 'sow', refuse)
    model.apply({'params': params}, tiny_batch()['tokens'][:, :-1])
    with pytest.raises(AssertionError, match='asked'):
        model.apply({'params': params}, tiny_batch()['tokens'][:, :-1], mutable=['diagnostics'])
