"""Reference and equivalence: diagnostics of each layer, against the layers one by one."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn

import lm.model.block
from lm.model.block import Block
from lm.model.pattern import block_groups
from lm.training.diagnostics import make_diagnose_step, matrix_names, norm_by_layer
from lm.training.state import make_hyper
from lm.training.step import make_train_step, target_weights
from modules.params import named_leaves
from modules.sequence import whole_rows
from tests.helpers import (
    BOS,
    initial_state,
    packed_batch,
    program_config,
    tiny_batch,
    tiny_config,
    tiny_learner,
    tiny_model,
    train_step,
    with_needs,
)

CONFIG = tiny_config({'model.n_layers': 3})
STATE = functools.partial(initial_state, CONFIG)
ROLE_DIAGNOSTICS = ('gradient_rms', 'update_rms', 'weight_rms', 'update_ratio')


@functools.cache
def program(config):
    return jax.jit(make_diagnose_step(tiny_learner(config)))


def diagnose(config, state, batch):
    return program(program_config(config))(state, batch, make_hyper(config))


@pytest.mark.full
def test_residual_rms_matches_block_outputs():
    """Catches an rms of the update or of the normalized stream, and layers in another order."""
    state, batch = initial_state(CONFIG), tiny_batch()
    rms_L = diagnose(CONFIG, state, batch)['residual_rms']
    x_BTD = jnp.asarray(state.params['embedding'])[batch['tokens'][:, :-1]]
    (group,) = block_groups(CONFIG)
    block = Block(CONFIG, tiny_model(CONFIG).kernels, group.stacks[0].group)
    apply_block = jax.jit(
        lambda w, x, number: block.apply({'params': w}, x, number, whole_rows(8))[0]
    )
    for layer in range(3):
        params = jax.tree.map(lambda w, layer=layer: w[layer], state.params['layers'])
        x_BTD = apply_block(params, x_BTD, jnp.float32(layer + 1))
        np.testing.assert_allclose(rms_L[layer], np.sqrt(np.mean(np.square(x_BTD))), rtol=1e-5)


@pytest.mark.full
def test_unrolled_layers_equal_scanned():
    unrolled = tiny_config({'model.n_layers': 3, 'model.scan_layers': False})
    state, batch = initial_state(CONFIG), tiny_batch()
    diagnostics = diagnose(unrolled, state, batch)
    for name, value in diagnose(CONFIG, state, batch).items():
        np.testing.assert_allclose(diagnostics[name], value, rtol=1e-5, err_msg=name)


@pytest.mark.full
def test_layer_gradient_norms_sum_to_total():
    """The step's gradient norm, squared, minus parameters outside layers."""
    state, batch, hyper = initial_state(CONFIG), tiny_batch(), make_hyper(CONFIG)
    whole = float(train_step(CONFIG)(state, batch, hyper)[1]['grad_norm'])
    by_layer = diagnose(CONFIG, state, batch)['layer_grad_norm']
    without_layers = jax.tree.map(lambda w: w, state.params)
    del without_layers['layers']

    def loss(outside):
        metrics = train_step(CONFIG)(state.replace(params=state.params | outside), batch, hyper)[1]
        return metrics['loss']

    outside = jax.grad(loss)(without_layers)
    outside_squares = sum(float(jnp.sum(jnp.square(g))) for g in jax.tree.leaves(outside))
    np.testing.assert_allclose(np.sum(np.square(by_layer)), whole**2 - outside_squares, rtol=1e-4)


@pytest.mark.full
def test_diagnostics_have_known_names_and_shapes():
    """Reports and warnings read these names: catches a lost name, and a changed shape."""
    shapes = {name: value.shape for name, value in diagnose(CONFIG, STATE(), tiny_batch()).items()}
    moments = ('rms', 'largest', 'kurtosis')
    by_layer = {
        f'{prefix}_{moment}'
        for prefix in ('residual', 'attention_output', 'mlp_output')
        for moment in moments
    }
    by_layer |= {'residual_sink', 'layer_param_norm', 'layer_grad_norm'}
    by_layer |= {f'{prefix}_{role}' for prefix in ROLE_DIAGNOSTICS for role in ('hidden', 'vector')}
    matrices = ('query', 'key', 'value', 'out', 'up', 'down')
    by_layer |= {f'singular_value_{name}' for name in matrices}
    scalars = {'logit_mean', 'logit_largest', 'log_z_mean', 'log_z_largest', 'logit_sharpness'}
    scalars |= {f'gradient_noise_{name}' for name in ('signal', 'trace', 'scale')}
    outside = ('embedding', 'readout', 'vector_outside')
    scalars |= {f'{prefix}_{role}' for prefix in ROLE_DIAGNOSTICS for role in outside}
    by_head = {f'attention_{prefix}' for prefix in ('entropy', 'entropy_share', 'largest_logit')}
    by_head |= {'attention_first_token', 'attention_logit_size'}
    expected = dict.fromkeys(by_layer, (3,)) | dict.fromkeys(scalars, ())
    assert shapes == expected | dict.fromkeys(by_head, (3, 2))


def rms(*arrays):
    flat = np.concatenate([np.ravel(np.float64(a)) for a in arrays])
    return np.sqrt(np.mean(flat**2))


@pytest.mark.full
@pytest.mark.parametrize('reparam', ['weight_norm', 'shared', 'normalize_and_project'])
def test_updates_match_training_step(reparam):
    """Updates by role and layer are computed from the parameters before and after a training step.

    Catches an unscaled direction, missing decay or map after the update, and parameters of another
    role.
    """
    config = tiny_config({'model.n_layers': 3, 'model.reparam': reparam, 'optim.lr': 0.01})
    before, batch = initial_state(config), packed_batch()
    after, _ = train_step(config)(before, batch, make_hyper(config))
    diagnostics = diagnose(config, before, batch)
    specs = named_leaves(tiny_learner(config).description.specs)
    start, end = named_leaves(before.params), named_leaves(after.params)
    for role in ('hidden', 'vector'):
        paths = [
            path
            for path in specs
            if specs[path].role == role and specs[path].axes[:1] == ('layer',)
        ]
        if reparam == 'shared' and role == 'hidden':
            assert not paths and f'update_rms_{role}' not in diagnostics
            continue
        for layer in range(3):
            update = rms(*(np.float64(end[path][layer]) - start[path][layer] for path in paths))
            weight = rms(*(start[path][layer] for path in paths))
            assert diagnostics[f'update_rms_{role}'][layer] == pytest.approx(update, rel=1e-3)
            assert diagnostics[f'weight_rms_{role}'][layer] == pytest.approx(weight, rel=1e-5)
            assert diagnostics[f'update_ratio_{role}'][layer] == pytest.approx(
                update / weight, rel=1e-3
            )
    names = {'embedding': 'embedding', 'readout': 'readout', 'vector': 'vector_outside'}
    names |= {'hidden': 'hidden_outside'} if reparam == 'shared' else {}
    for role, name in names.items():
        paths = [
            path
            for path in specs
            if specs[path].role == role and specs[path].axes[:1] != ('layer',)
        ]
        update = rms(*(np.float64(end[path]) - start[path] for path in paths))
        assert diagnostics[f'update_rms_{name}'] == pytest.approx(update, rel=1e-3)


@pytest.mark.full
def test_role_gradients_sum_to_gradient_norm():
    """Catches a gradient of the used weights, a gradient after clipping, and a missing role."""
    config = tiny_config({'model.n_layers': 3, 'model.reparam': 'weight_norm'})
    state, batch = initial_state(config), tiny_batch()
    grad_norm = float(train_step(config)(state, batch, make_hyper(config))[1]['grad_norm'])
    diagnostics = diagnose(config, state, batch)
    specs, params = named_leaves(tiny_learner(config).description.specs), named_leaves(state.params)
    total = 0.0
    for path, spec in specs.items():
        is_layered = spec.axes[:1] == ('layer',)
        is_outside = spec.role == 'vector' and not is_layered
        name = f'gradient_rms_{spec.role}' + ('_outside' if is_outside else '')
        count = params[path][0].size if is_layered else params[path].size
        total += float(np.sum(np.square(diagnostics[name]))) * count
    assert np.sqrt(total) == pytest.approx(grad_norm, rel=1e-4)


@pytest.mark.full
def test_rounding_is_measured_in_each_layer():
    """Of the operands of rounded products: the last block and the readout are wide."""
    config = tiny_config(
        {
            'model.n_layers': 3,
            'model.pattern': 'softmax|softmax:matmul=auto',
            'kernels.matmul': 'mxfp8',
        }
    )
    diagnostics = diagnose(config, initial_state(config), tiny_batch())
    names = {name for name in diagnostics if name.startswith(('rounding', 'underflow', 'overflow'))}
    matrices = ('query', 'key', 'value', 'out', 'up', 'down')
    quantities = ('rounding_error', 'underflow', 'overflow')
    assert names == {f'{q}_{o}_{m}' for q in quantities for o in 'xwg' for m in matrices}
    errors = diagnostics['rounding_error_x_up']
    assert np.all((errors[:2] > 0.01) & (errors[:2] < 0.1)) and np.isnan(errors[2])


@pytest.mark.full
def test_readout_covers_target_tokens():
    """Reference: all logits at once. Catches padding and beginnings of documents that count."""
    config = tiny_config({'model.n_layers': 3, 'model.logit_softcap': 3.0})
    state, batch = initial_state(config), packed_batch()
    diagnostics, tokens = diagnose(config, state, batch), batch['tokens'][:, :-1]
    logits = tiny_model(config).apply({'params': state.params}, tokens, None, tokens > 0)
    target_logits = np.float64(logits)[np.asarray(target_weights(batch, BOS)) > 0]
    log_z = np.log(np.sum(np.exp(target_logits), -1))
    expected = {
        'logit_mean': target_logits.mean(),
        'logit_largest': np.abs(target_logits).max(),
        'log_z_mean': log_z.mean(),
        'log_z_largest': np.abs(log_z).max(),
    }
    labels = np.asarray(batch['tokens'][:, 1:])[np.asarray(target_weights(batch, BOS)) > 0]
    expected['logit_sharpness'] = np.mean(list(map(search_sharpness, target_logits, labels)))
    for name, value in expected.items():
        assert diagnostics[name] == pytest.approx(value, rel=1e-3), name


def search_sharpness(logits, label):
    """Searches the box of perturbations by gradient ascent, in float64."""
    reach = 5e-4 * (np.abs(logits) + 1)

    def loss(z):
        return np.log(np.sum(np.exp(z))) - z[label]

    z = logits.copy()
    for _ in range(20):
        gradient = np.exp(z) / np.sum(np.exp(z)) - (np.arange(len(z)) == label)
        z = np.clip(z + 10 * gradient, logits - reach, logits + reach)
    return 100 * (loss(z) - loss(logits)) / (1 + loss(logits))


@pytest.mark.full
@pytest.mark.parametrize('reparam', ['none', 'weight_norm'])
def test_singular_values_match_used_weights(reparam):
    config = tiny_config({'model.n_layers': 3, 'model.reparam': reparam})
    state, learner = initial_state(config), tiny_learner(config)
    louder = jax.tree.map(lambda w: np.array(w), state.params)
    query = louder['layers']['attention']['query']
    query = query['gain'] if reparam == 'weight_norm' else query
    query *= np.arange(1, 4).reshape(3, *[1] * (query.ndim - 1))
    state = state.replace(params=louder)
    diagnostics = diagnose(config, state, tiny_batch())
    used = learner.variables(state.weights)['params']['layers']
    for name in ('query', 'key', 'out'):
        weight = np.float64(used['attention'][name]).reshape(3, 16, -1)
        expected = np.linalg.svd(weight, compute_uv=False)[:, 0]
        np.testing.assert_allclose(diagnostics[f'singular_value_{name}'], expected, rtol=0.02)


@pytest.mark.full
@pytest.mark.parametrize('reparam', ['sigma', 'shared+sigma'])
def test_reparam_measures_match_matrices(reparam):
    """sigmaReparam's norm and gain, by layer, also if one matrix serves all layers.

    At the start they are the singular values of the stored weights.
    """
    config = tiny_config({'model.n_layers': 3, 'model.reparam': reparam})
    state = initial_state(config)
    used = tiny_learner(config).variables(state.weights)['params']['layers']
    diagnostics = diagnose(config, state, tiny_batch())
    for name, part in (('query', 'attention'), ('down', 'mlp')):
        weight = np.float64(used[part][name])
        expected = np.linalg.svd(weight.reshape(*weight.shape[:2], -1), compute_uv=False)[:, 0]
        np.testing.assert_allclose(diagnostics[f'sigma_{name}'], expected, rtol=0.02)
        np.testing.assert_allclose(
            diagnostics[f'gamma_{name}'], diagnostics[f'sigma_{name}'], rtol=1e-5
        )


def test_matrix_names_are_unique():
    """The MLP's matrices keep their names for all norms: catches two curves under one name."""
    changes = {'model.norm': 'gated_rmsnorm', 'model.activation': 'swiglu'}
    config = tiny_config(changes | {'attention.gate': 'headwise'})
    names = set(matrix_names(tiny_learner(config)).values())
    assert {'up', 'down', 'attention_gate', 'mlp_gate', 'mlp_norm_in_down', 'query'} <= names


@pytest.mark.full
def test_experts_report_their_maximum():
    config = tiny_config({'model.mlp': 'moe', 'mlp.n_experts': 3})
    state = initial_state(config)
    up_LEDF = np.float64(state.params['layers']['mlp']['up'])
    expected = np.linalg.svd(up_LEDF, compute_uv=False)[..., 0].max(-1)
    singular_values = diagnose(config, state, tiny_batch())['singular_value_up']
    np.testing.assert_allclose(singular_values, expected, rtol=0.02)


@pytest.mark.full
def test_expert_gradient_errors_are_averaged():
    """Catches an axis of experts in the place of heads, and a sum over experts."""
    changes = {'model.mlp': 'moe', 'mlp.n_experts': 3, 'kernels.matmul': 'mxfp8'}
    config = tiny_config({**changes, 'model.n_layers': 2})
    errors = diagnose(config, initial_state(config), tiny_batch())['rounding_error_g_up']
    assert errors.shape == (2,) and np.all((errors > 0.01) & (errors < 0.05))


@pytest.mark.full
def test_sublayer_outputs_exclude_padding():
    """Reference: the changes that each sublayer makes to the stream.

    Catches outputs after the norm or the placement, attention and MLP exchanged, and padding that
    counts.
    """
    state, batch = initial_state(CONFIG), packed_batch()
    tokens, segments = batch['tokens'][:, :-1], batch['segments'][:, :-1]
    variables = tiny_learner(CONFIG).variables(state.weights)
    _, collections = tiny_model(CONFIG).apply(
        variables, tokens, None, segments > 0, mutable=['activations']
    )
    diagnostics, stream = diagnose(CONFIG, state, batch), collections['activations']
    attention, mlp = (np.float64(stream['layers'][f'after_{x}']) for x in ('attention', 'mlp'))
    before = np.concatenate([np.float64(stream['embedding'])[None], mlp[:-1]])
    expected = {
        'residual': mlp,
        'attention_output': attention - before,
        'mlp_output': mlp - attention,
    }
    for name, x_LBTD in expected.items():
        for layer in range(3):
            tokens_x = x_LBTD[layer][segments > 0]
            assert diagnostics[f'{name}_rms'][layer] == pytest.approx(rms(tokens_x), rel=1e-4)
            assert diagnostics[f'{name}_largest'][layer] == pytest.approx(
                np.abs(tokens_x).max(), rel=1e-4
            )


@pytest.mark.full
@pytest.mark.parametrize('scan', [True, False])
def test_training_step_contains_no_diagnostics(scan, monkeypatch):
    """Off means absent from the lowered step, whose text is the same without the measuring
    functions.

    Catches diagnostics that are computed and dropped, and names of them.
    """
    config = tiny_config({'model.scan_layers': scan})
    learner = tiny_learner(config)
    arguments = initial_state(config), tiny_batch(), make_hyper(config)

    def lower_text(function, debug_info=False):
        return jax.jit(function).lower(*arguments).as_text(debug_info=debug_info)

    named = lower_text(make_train_step(learner), debug_info=True)
    assert '/diagnostics/' not in named and '/diagnostics/' in lower_text(
        make_diagnose_step(learner), True
    )
    step = lower_text(make_train_step(learner))
    for function in ('moments', 'sink_share'):
        monkeypatch.setattr(lm.model.block, function, refuse)
    assert lower_text(make_train_step(learner)) == step
    diagnosing = tiny_config({'model.scan_layers': scan, 'train.diagnose_every': 1})
    assert lower_text(make_train_step(tiny_learner(diagnosing))) == step
    with pytest.raises(AssertionError, match='asked'):
        lower_text(make_diagnose_step(learner))


def refuse(*_, **__):
    raise AssertionError('asked')


def test_norm_by_layer_reduces_all_but_first_axis():
    tree = {
        'gain': jnp.array([[1.0, 1.0], [2.0, 2.0]]),
        'matrix': jnp.ones((2, 1, 2)),
        'scalar': jnp.array([0.0, 5.0]),
    }
    np.testing.assert_allclose(norm_by_layer(tree), [2.0, np.sqrt(8 + 2 + 25)])


@pytest.mark.full
@pytest.mark.parametrize('placement', ['mix', 'hybrid_star', 'resi_dual', 'wide'])
def test_groups_are_recorded_in_depth_order(placement):
    """One number per block, first block first: catches groups sorted by name."""
    changes = with_needs({'model.placement': placement, 'model.n_layers': 3})
    config = tiny_config(changes | ({'model.mix_fraction': 0.4} if placement == 'mix' else {}))
    state, batch = initial_state(config), tiny_batch()
    diagnostics = diagnose(config, state, batch)
    assert all(value.shape[:1] in ((), (3,)) for value in diagnostics.values())
    assert diagnostics['layer_param_norm'].shape == (3,) and diagnostics['log_z_mean'].shape == ()
    first = block_groups(config)[0].name
    louder = dict(state.params)
    if placement != 'wide':
        louder[first] = jax.tree.map(lambda w: w.copy(), louder[first])
        louder[first]['mlp']['down'][0] *= 100
        after = diagnose(config, state.replace(params=louder), batch)
        has_changed = after['layer_param_norm'] != diagnostics['layer_param_norm']
        np.testing.assert_array_equal(has_changed, [True, False, False])


@pytest.mark.default_rows('True')
@pytest.mark.parametrize('scan', [True, False])
def test_step_and_evaluation_sow_nothing(scan, monkeypatch):
    """Off means absent: no layer even tries to sow diagnostics."""
    config = tiny_config({'model.scan_layers': scan})
    model, params = tiny_model(config), initial_state(config).params

    monkeypatch.setattr(nn.Module, 'sow', refuse)
    model.apply({'params': params}, tiny_batch()['tokens'][:, :-1])
    with pytest.raises(AssertionError, match='asked'):
        model.apply({'params': params}, tiny_batch()['tokens'][:, :-1], mutable=['diagnostics'])
