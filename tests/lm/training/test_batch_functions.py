"""Functions of a batch that optimizers get beside its gradient, and learners that they refuse."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from lm.config.resolve import update_recipe
from lm.training.state import build_learner, check_learner, make_hyper
from lm.training.step import batch_functions, split_microbatches, target_weights
from modules.params import named_leaves
from tests.helpers import (
    BOS,
    VOCAB,
    assert_trees_close,
    initial_state,
    make_training,
    packed_batch,
    program_config,
    stack,
    tiny_config,
    tiny_learner,
    train_step,
    trained_on_all_devices,
)

REFERENCE = {'model.n_layers': 1, 'model.d_model': 8, 'model.d_ff': 16, 'model.position': 'none'}
REFERENCE |= {'kernels.implementation': 'reference'}
TIED = {'model.tie_embeddings': True, 'model.logit_softcap': 5.0, 'model.reparam': 'sigma'}
PLAIN = {'optim.name': 'sgd', 'optim.others': 'sgd', 'optim.eps': None, 'optim.momentum': 0.0}
PLAIN |= {'optim.weight_decay': 0.0, 'optim.clip_norm': math.inf, 'optim.lr': 0.1}
ROWS = {
    'sven': {'optim.sven_group': 2, 'optim.sven_kappa': 1.0},
    'cge': {'optim.cge_coordinates': 40},
    'gauss_newton': {'optim.lr': 1.0, 'optim.others_lr': 0.01},
    'normalized_gd': {'optim.lr': 0.1},
    'adamw': {'optim.ghost_radius': 0.1, 'loss.chunk': 20},
}


def take_step(changes):
    """Returns (update, metrics); all numbers share one program."""
    config = tiny_config(REFERENCE | changes)
    state = initial_state(config)
    after, metrics = train_step(program_config(config))(state, packed_batch(), make_hyper(config))
    return jax.tree.map(lambda a, b: np.asarray(a - b), after.params, state.params), metrics


@pytest.mark.full
def test_functions_agree_with_step_loss():
    """Shares of two microbatches, of eight sequences and of logits each sum to the loss of the
    step.

    Padding does not count, and all are functions of the stored weights. Catches shares divided by
    their own tokens, and logits before the softcap.
    """
    config = tiny_config(REFERENCE | TIED)
    learner, state, hyper = tiny_learner(config), initial_state(config), make_hyper(config)
    batch = packed_batch()

    def sums(params):
        total = jnp.sum(target_weights(batch, BOS))
        halves = batch_functions(learner, state, hyper, split_microbatches(batch, 2), total)
        sequences = batch_functions(learner, state, hyper, split_microbatches(batch, 8), total)

        def from_logits(rows):
            return halves.share_from_logits(halves.logits_fn(params, rows), rows)

        return {
            'value': halves.value_fn(params),
            'shares': jnp.sum(jax.lax.map(lambda rows: halves.share_fn(params, rows), halves.rows)),
            'sequences': jnp.sum(
                jax.lax.map(lambda rows: sequences.share_fn(params, rows), sequences.rows)
            ),
            'logits': jnp.sum(jax.lax.map(from_logits, halves.rows)),
            'tokens': jnp.sum(halves.weights) - total,
        }

    values = jax.jit(sums)(state.params)
    _, metrics = train_step(config)(state, batch, hyper)
    for name in ('value', 'shares', 'sequences', 'logits'):
        np.testing.assert_allclose(values[name], metrics['loss'], rtol=1e-6, err_msg=name)
    assert values['tokens'] == 0


@pytest.mark.full
@pytest.mark.parametrize('name', ROWS)
def test_mapped_runs_equal_single_runs(name):
    """Two steps of two runs with other seeds, beside adamw.

    Catches means of microbatches, and a batch whose sequences change places.
    """
    changes = REFERENCE | {'optim.name': name} | ROWS[name]
    config, batches = tiny_config(changes), [packed_batch(seed) for seed in range(2)]
    hypers = stack([make_hyper(config)] * 2)
    mapped = make_training(tiny_learner(update_recipe(config, {'train.microbatches': 2})), runs=2)
    keys = jax.vmap(jax.random.key)(jnp.arange(2))
    rows = stack([stack([batch, batch]) for batch in batches])
    _, final = mapped(keys, hypers, rows)
    single_params = []
    for seed in range(2):
        state = initial_state(config, seed)
        for batch in batches:
            state, _ = train_step(config)(state, batch, make_hyper(config))
        single_params.append(state.params)
    # Rounding is larger for differences of two losses over 0.005, and for a search.
    rtol = {'cge': 1e-3, 'gauss_newton': 1e-3}.get(name, 1e-4)
    assert_trees_close(final.params, stack(single_params), rtol=rtol, atol=rtol / 10)


@pytest.mark.full
@pytest.mark.parametrize('name', ['sven', 'adamw'])
def test_sharded_step_equals_one_device(name):
    """Catches a maximum or a mean over one device's rows."""
    config = tiny_config(REFERENCE | {'optim.name': name} | ROWS[name])
    final = trained_on_all_devices(
        tiny_learner(config), stack([packed_batch()]), make_hyper(config)
    )
    state, _ = train_step(config)(initial_state(config), packed_batch(), make_hyper(config))
    assert_trees_close(final.params, state.params, rtol=1e-4, atol=1e-5)


@pytest.mark.full
def test_normalized_gd_divides_by_error_probability():
    """The mean over target tokens of 1 - p, which only such runs record."""
    config = tiny_config(REFERENCE | PLAIN)
    learner, batch, state = tiny_learner(config), packed_batch(), initial_state(config)
    logits = learner.model.apply({'params': state.params}, batch['tokens'][:, :-1])
    p = np.take_along_axis(
        np.asarray(jax.nn.softmax(logits)), batch['tokens'][:, 1:, None].astype(int), -1
    )[..., 0]
    weights = np.asarray(target_weights(batch, BOS))
    error_probability = np.sum(weights * (1 - p)) / weights.sum()
    normalized = {'optim.name': 'normalized_gd', 'optim.others': 'normalized_gd'}
    normalized |= {'optim.momentum': None, 'loss.chunk': 20}
    plain, plain_metrics = take_step(PLAIN)
    normalized_update, metrics = take_step(PLAIN | normalized)
    np.testing.assert_allclose(metrics['error_probability'], error_probability, rtol=1e-5)
    assert 'error_probability' not in plain_metrics
    scaled = jax.tree.map(lambda u: u / error_probability, plain)
    assert_trees_close(normalized_update, scaled, rtol=1e-4, atol=1e-7)


@pytest.mark.full
def test_unread_gradients_are_not_computed():
    """The gradient norm covers the other parameters. Catches a backward pass that the metrics keep
    alive.
    """
    plain, _ = take_step(PLAIN)
    _, metrics = take_step(PLAIN | {'optim.name': 'cge', 'optim.cge_coordinates': 2})
    specs = named_leaves(tiny_learner(tiny_config(REFERENCE | PLAIN)).description.specs)
    updates = named_leaves(plain)
    read_grads = [updates[path] / 0.1 for path, spec in specs.items() if spec.role != 'hidden']
    np.testing.assert_allclose(metrics['grad_norm'], optax.tree.norm(read_grads), rtol=1e-5)


NO_DERIVATIVE = (
    r'needs a forward-mode derivative of the logits, which kernels.attention=blocked does not '
    r'have. Choose kernels.attention=reference.$'
)


@pytest.mark.parametrize(
    ('changes', 'message'),
    [
        (
            {'optim.name': 'sven', 'model.d_model': 1024, 'model.d_ff': 4096},
            r'optim.name=sven supports at most 5,000,000 parameters; got 25,165,824. .*smaller',
        ),
        (
            {'optim.name': 'cge', 'model.d_model': 128, 'model.d_ff': 512},
            r'optim.name=cge supports at most 100,000 parameters; got 393,216',
        ),
        (
            {'optim.others': 'cge', 'data.seq_len': 1000, 'model.position': 'learned'}
            | {'model.d_model': 128},
            r'optim.others=cge supports at most 100,000 parameters; got 132,\d+',
        ),
        ({'optim.ghost_radius': 1.0}, 'optim.ghost_radius ' + NO_DERIVATIVE),
        ({'optim.name': 'gauss_newton'}, 'optim.name=gauss_newton ' + NO_DERIVATIVE),
        ({'optim.ghost_radius': 1.0, 'kernels.attention': 'reference'}, None),
        ({'optim.ghost_radius': 1.0, 'model.attention': 'linear'}, None),
        ({'optim.name': 'sophia'}, None),
        ({'optim.name': 'sven', 'optim.others': 'sven', 'optim.eps': None}, None),
    ],
)
def test_unsupported_learners_are_refused(changes, message):
    """The check needs only shapes, and runs before anything is compiled."""
    learner = build_learner(tiny_config(changes), VOCAB, BOS, 'cpu')
    if message is None:
        check_learner(learner)
        return
    with pytest.raises(ValueError, match=message):
        check_learner(learner)
