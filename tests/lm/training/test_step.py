"""One step. Reference: metrics and gradients from their definitions. Equivalence: microbatches,
devices and runs mapped together change nothing. Property: padding and bad steps change nothing.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from lm.config.resolve import update_recipe
from lm.devices.mesh import make_mesh, put_batch
from lm.devices.shardings import jit_init, state_shardings
from lm.training.state import make_hyper
from lm.training.step import make_eval_step, split_microbatches, target_weights
from modules.params import named_leaves
from tests.helpers import (
    BOS,
    assert_trees_close,
    initial_state,
    jit_eval_step,
    jit_train_step,
    packed_batch,
    tiny_batch,
    tiny_config,
    tiny_learner,
    train_step,
)

CONFIG = tiny_config({'loss.z_loss': 0.01, 'loss.label_smoothing': 0.1})
STATE = functools.partial(initial_state, CONFIG)
PATHS = {
    'lr': 'optim.lr',
    'weight_decay': 'optim.weight_decay',
    'clip_norm': 'optim.clip_norm',
    'warmup_steps': 'optim.warmup_steps',
    'label_smoothing': 'loss.label_smoothing',
}
PADDING = {'tokens': np.full((8, 9), BOS, np.int32), 'segments': np.zeros((8, 9), np.int32)}


def run(batch=None, state=None, config=CONFIG, **hyper):
    """Does one step from the start with fields of Hyper changed.

    Hyper is traced, so that nothing compiles again.
    """
    changed = {PATHS[name]: jnp.float32(value) for name, value in hyper.items()}
    changed = make_hyper(config) | changed
    return train_step(config)(state or STATE(), packed_batch() if batch is None else batch, changed)


def norm(tree):
    return np.sqrt(sum(np.sum(np.square(np.float64(leaf))) for leaf in jax.tree.leaves(tree)))


def difference(a, b):
    return jax.tree.map(lambda x, y: np.float64(x) - np.float64(y), a, b)


def assert_same_bits(a, b):
    jax.tree.map(np.testing.assert_array_equal, jax.device_get(a), jax.device_get(b))


@functools.cache
def reference_step():
    """Returns (sums over target tokens, gradient of the mean objective), without the code under
    test.
    """
    batch, model = packed_batch(), tiny_learner(CONFIG).model
    labels = batch['tokens'][:, 1:].reshape(-1)
    weights = (batch['segments'][:, 1:].reshape(-1) > 0) & (labels != BOS)
    uniform = 0.9 * np.eye(16)[labels] + 0.1 / 16

    def mean(params):
        logits = model.apply({'params': params}, batch['tokens'][:, :-1])
        logits = logits.reshape(-1, logits.shape[-1])
        z = jnp.square(jax.nn.logsumexp(logits, -1))
        ce = optax.softmax_cross_entropy_with_integer_labels(logits, labels)
        objective = optax.softmax_cross_entropy(logits, jnp.float32(uniform)) + 0.01 * z
        sums = {'loss': objective, 'ce': ce, 'z_loss': z}
        means = jax.tree.map(lambda x: jnp.sum(x * weights) / weights.sum(), sums)
        return means['loss'], means

    grads, means = jax.jit(jax.grad(mean, has_aux=True))(STATE().params)
    return means | {'batch_tokens': weights.sum()}, grads


def test_only_real_tokens_are_targets():
    """Padding is no target, nor the beginning of a document, which is not predictable; an end is
    one.
    """
    tokens = jnp.int32([[0, 5, 6, 0, 7, 8, 9]])
    segments = jnp.int32([[1, 1, 1, 2, 2, 2, 0]])
    batch = {'tokens': tokens, 'segments': segments}
    np.testing.assert_array_equal(target_weights(batch, 0), [[1, 1, 0, 1, 1, 0]])


@pytest.mark.full
def test_metrics_match_definitions():
    """Means per target token of the whole batch. Catches a mean over rows, or one that includes
    padding.
    """
    _, metrics = run()
    means, grads = reference_step()
    norms = {'grad_norm', 'update_norm'}
    assert metrics.keys() == {'loss', 'ce', 'z_loss', 'lr', 'batch_tokens'} | norms
    for name, value in means.items():
        np.testing.assert_allclose(metrics[name], value, rtol=1e-5, err_msg=name)
    np.testing.assert_allclose(metrics['grad_norm'], norm(grads), rtol=1e-5)
    np.testing.assert_allclose(metrics['lr'], CONFIG.optim.lr, rtol=1e-6)


@pytest.mark.full
def test_update_norm_includes_lr_and_decay():
    """Learning rate and weight decay included."""
    state, metrics = run(lr=0.1, weight_decay=0.5)
    expected = norm(difference(state.params, STATE().params))
    np.testing.assert_allclose(metrics['update_norm'], expected, rtol=1e-4)


def test_first_update_is_adam():
    """-lr (g / (|g| + eps) + wd w), no decay for vectors: the whole chain, signs included."""
    state, _ = run(lr=0.1, weight_decay=0.5, clip_norm=np.inf)
    _, grads = reference_step()
    start, params = named_leaves(STATE().params), named_leaves(state.params)
    for path, grad in named_leaves(grads).items():
        decay = 0.0 if path.endswith('scale') else 0.5
        expected = -0.1 * (grad / (np.abs(grad) + CONFIG.optim.eps) + decay * start[path])
        np.testing.assert_allclose(params[path] - start[path], expected, atol=1e-4, err_msg=path)


@pytest.mark.default_rows('0.05')
@pytest.mark.parametrize('clip', [0.05, 1e6])
def test_gradient_is_clipped(clip):
    """The optimizer sees at most `clip_norm`; grad_norm is before clipping. Adam's m is (1
    - b1) g.
    """
    state, metrics = run(clip_norm=clip)
    norm_seen = norm(optax.tree.get(state.opt_state, 'mu')) / (1 - CONFIG.optim.b1)
    np.testing.assert_allclose(norm_seen, min(clip, metrics['grad_norm']), rtol=1e-4)
    np.testing.assert_allclose(metrics['grad_norm'], norm(reference_step()[1]), rtol=1e-5)
    assert metrics['grad_norm'] > 0.05


def test_lr_follows_schedule():
    """lr belongs to the step about to be done; each step counts as one."""
    state = STATE()
    for step, lr in enumerate((0.25, 0.5, 0.75, 1.0, 1.0)):
        state, metrics = run(state=state, lr=1.0, warmup_steps=4)
        np.testing.assert_allclose(metrics['lr'], lr, rtol=1e-6)
        assert int(state.step) == step + 1


def test_padding_changes_nothing():
    """Its tokens do not matter. Catches a padding token that is weighted or attended to."""
    batch, changed = packed_batch(), packed_batch()
    is_padding = batch['segments'] == 0
    changed['tokens'] = np.where(is_padding, tiny_batch(seed=5)['tokens'], batch['tokens'])
    assert (changed['tokens'] != batch['tokens']).any()
    assert_same_bits(run(batch), run(changed))


@pytest.mark.full
@pytest.mark.parametrize(('rule', 'share'), [('decoupled', 0.1 * 0.25), ('independent', 0.25)])
@pytest.mark.parametrize('warmup', [0, 2])
def test_weight_decay_without_gradient(rule, share, warmup):
    """All padding: w becomes w - lr wd w, or w - wd w at the peak, and half of it midway in the
    warm-up.

    Vectors keep every bit.
    """
    config = tiny_config({'optim.decay_rule': rule})
    state, metrics = run(PADDING, config=config, lr=0.1, weight_decay=0.25, warmup_steps=warmup)
    share = share / 2 if warmup else share
    start = named_leaves(STATE().params)
    for path, value in named_leaves(state.params).items():
        if path.endswith('scale'):
            np.testing.assert_array_equal(value, start[path])
        else:
            np.testing.assert_allclose(value, (1 - share) * start[path], rtol=1e-6, err_msg=path)
    assert (metrics['loss'], metrics['grad_norm'], metrics['batch_tokens']) == (0, 0, 0)


def test_microbatches_take_each_row_once():
    batch = tiny_batch(rows=6)
    parts = split_microbatches(batch, 3)
    assert parts['tokens'].shape == (3, 2, 9)
    for i in range(3):
        np.testing.assert_array_equal(parts['tokens'][i], batch['tokens'][i::3])


def test_microbatches_equal_one_batch():
    """The microbatches have different numbers of target tokens: catches a mean of means."""
    batch = packed_batch()
    counts = np.sum(split_microbatches({'w': target_weights(batch, BOS)}, 4)['w'], (1, 2))
    assert len(set(counts.tolist())) > 1
    config = tiny_config(
        {'loss.z_loss': 0.01, 'loss.label_smoothing': 0.1, 'train.microbatches': 4}
    )
    assert_trees_close(run(config=config), run(), rtol=1e-4, atol=1e-6)


@functools.cache
def compile_on_eight_devices():
    """Compiles the step as the training loop does, with two microbatches; returns it with
    its mesh.
    """
    config = tiny_config(
        {'loss.z_loss': 0.01, 'loss.label_smoothing': 0.1, 'train.microbatches': 2}
    )
    mesh, learner = make_mesh(config.mesh), tiny_learner(config)
    shardings = state_shardings(learner, mesh)
    state = jax.device_put(STATE(), shardings)
    jitted = jit_train_step(learner, mesh)
    batch = packed_batch(rows=16)
    step = jitted.lower(state, batch, make_hyper(config)).compile()
    return mesh, state, step, batch, shardings


@pytest.mark.full
def test_eight_devices_equal_one():
    """Two steps on a batch cut over devices; the state is donated, and its shardings stay."""
    mesh, state, step, batch, shardings = compile_on_eight_devices()
    hyper, reference = make_hyper(CONFIG), STATE()
    for _ in range(2):
        donated = jax.tree.map(jnp.copy, state)
        next_state, metrics = step(donated, put_batch(mesh, batch), hyper)
        reference, expected = train_step(CONFIG)(reference, batch, hyper)
        assert_trees_close((next_state, metrics), (reference, expected), rtol=1e-4, atol=1e-6)
        assert all(leaf.is_deleted() for leaf in jax.tree.leaves(donated.params))
        jax.tree.map(
            lambda leaf, sharding: leaf.sharding.is_equivalent_to(sharding, leaf.ndim) or 1 / 0,
            next_state,
            shardings,
        )
        state = next_state


@pytest.mark.full
def test_init_on_eight_devices_equals_one():
    key, hyper = jax.random.key(0), make_hyper(CONFIG)
    init = jit_init(tiny_learner(CONFIG), make_mesh(CONFIG.mesh))
    state = init.lower(key, hyper).compile()(key, hyper)
    assert_trees_close(state, STATE(), rtol=1e-6, atol=1e-7)
    assert all(len(leaf.sharding.device_set) == 8 for leaf in jax.tree.leaves(state))


def test_evaluation_sums_match_training_metrics():
    """The same numbers before the update, as sums; on one device and on eight."""
    learner, hyper, batch = tiny_learner(CONFIG), make_hyper(CONFIG), packed_batch()
    _, metrics = run()
    step = jax.jit(make_eval_step(learner))
    sums = step(STATE().weights, batch, hyper)
    tokens = float(metrics['batch_tokens'])
    assert float(sums['tokens']) == tokens
    for name, metric in (('objective', 'loss'), ('ce', 'ce'), ('z_loss', 'z_loss')):
        np.testing.assert_allclose(sums[name], metrics[metric] * tokens, rtol=1e-5)
    mesh = make_mesh(CONFIG.mesh)
    jitted = jit_eval_step(learner, mesh)
    arguments = (STATE().weights, batch, hyper)
    on_eight = jitted.lower(*arguments).compile()
    arguments = jax.device_put(arguments, on_eight.input_shardings[0])
    assert_trees_close(on_eight(*arguments), sums, rtol=1e-5, atol=0)


SKIPPING = tiny_config(
    {'loss.z_loss': 0.01, 'loss.label_smoothing': 0.1, 'train.on_divergence': 'skip_step'}
)


@pytest.mark.default_rows('loss')
@pytest.mark.parametrize('cause', ['update', 'loss'])
def test_nonfinite_step_is_skipped(cause):
    """Parameters and moments keep every bit; the step is counted and reported."""
    params = jax.tree.map(np.copy, STATE().params)
    if cause == 'loss':
        params['embedding'][3, 0] = np.inf
    start = STATE().replace(params=params)
    state, metrics = run(state=start, config=SKIPPING, lr=np.nan if cause == 'update' else 0.1)
    assert metrics['skipped'] == 1
    assert np.isfinite(metrics['loss']) == (cause == 'update')
    assert not np.isfinite(metrics['update_norm'])
    assert int(state.step) == int(start.step) + 1
    assert_same_bits((state.params, state.opt_state), (start.params, start.opt_state))


def test_overflowing_gradient_norm_is_skipped():
    """Clipping by an infinite norm would give a finite update that only decays."""
    config = update_recipe(SKIPPING, {'loss.z_loss': 1e25})
    state, metrics = run(config=config)
    assert np.isinf(metrics['grad_norm']) and np.isfinite(metrics['update_norm'])
    assert metrics['skipped'] == 1
    assert_same_bits(state.params, STATE().params)


def test_finite_step_is_not_skipped():
    state, metrics = run(config=SKIPPING)
    assert metrics.pop('skipped') == 0
    assert_trees_close((state, metrics), run(), rtol=1e-5, atol=1e-7)


def test_loss_falls_on_repeated_batch():
    """The loss falls from ln 16, chance, to almost zero in 30 steps."""
    tokens = np.tile(np.int32([3, 9, 4, 12]), (8, 3))[:, :9]
    batch = {'tokens': tokens, 'segments': np.ones_like(tokens)}
    state, losses = STATE(), []
    for _ in range(30):
        state, metrics = run(batch, state, lr=0.03, weight_decay=0.0, label_smoothing=0.0)
        losses.append(float(metrics['ce']))
    assert losses[0] > 1.5
    assert losses[-1] < 0.1


def test_model_reads_mask_documents():
    """data.mask_documents changes losses, and the first document does not affect the second."""
    config = tiny_config({'data.mask_documents': True})
    hyper = make_hyper(config)
    step = jax.jit(make_eval_step(tiny_learner(config)))
    batch, changed = packed_batch(), packed_batch()
    first = (batch['segments'] == 1) & (batch['tokens'] != BOS)
    changed['tokens'] = np.where(first, tiny_batch(seed=5)['tokens'], batch['tokens'])
    for rows in (batch, changed):  # the first document becomes padding
        rows['segments'] = np.where(rows['segments'] == 1, 0, rows['segments'])
    sums = [step(STATE().weights, rows, hyper) for rows in (batch, changed)]
    assert_same_bits(*sums)
    plain = jax.jit(make_eval_step(tiny_learner(CONFIG)))
    sums = [plain(STATE().weights, rows, hyper) for rows in (batch, changed)]
    assert abs(sums[0]['ce'] - sums[1]['ce']) > 1e-3
