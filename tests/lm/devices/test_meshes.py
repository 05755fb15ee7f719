"""Equivalence: a run on any mesh equals the run on one device.

Contract: the meshes that a config can have.
"""

import functools

import jax
import numpy as np
import pytest

from lm.devices import check_mesh
from lm.devices.check_mesh import check_devices, list_mesh_notes
from lm.devices.mesh import batch_sharding, make_mesh, replicated_sharding, trace_on_mesh
from lm.devices.shardings import state_shardings
from lm.model.check import check
from lm.training.state import init_state, make_hyper
from lm.training.step import make_train_step
from tests.helpers import packed_batch, tiny_config, tiny_learner

STEPS = 20
COMMON = {'model.n_heads': 4, 'model.n_kv_heads': 4, 'data.mask_documents': True}
MODELS = {
    'default': {},
    'spectral': {
        'model.reparam': 'sigma',
        'model.qk_norm': 'rmsnorm',
        'model.placement': 'peri',
        'optim.name': 'muon',
    },
    'of batches': {'model.norm': 'powernorm', 'model.placement': 'mix'},
    'experts': {
        'model.mlp': 'moe',
        'mlp.n_experts': 4,
        'mlp.gates': 'renormalised',
        'model.bias': True,
        'model.head_dim': 6,
        'model.placement': 'parallel_shared',
        'attention.no_rope_every': 2,
    },
    'ragged experts': {
        'model.mlp': 'moe',
        'mlp.dispatch': 'ragged',
        'mlp.balance': 'bias',
        'mlp.gates': 'sigmoid',
        'mlp.shared_experts': 1,
        'mlp.router_noise': 0.0,
        'loss.token_weights': '1 0.5:0, 1',
        'loss.chunk': 32,
    },
    'streams': {
        'model.stream': 'mhc',
        'attention.value_residual': 'learned',
        'attention.value_embeddings': True,
    },
    'attention residuals': {'model.stream': 'attention_residual'},
    'experts by rows': {'model.mlp': 'moe', 'mlp.n_experts': 4, 'mlp.capacity_over': 'row'},
}
MESHES = [
    {'data': 8},
    {'fsdp': 8},
    {'data': 2, 'tensor': 4},
    {'data': 2, 'fsdp': 2, 'tensor': 2},
    {'data': 2, 'context': 4},
]
# Every mesh with the default model, and every other model where its own code has the most to lose:
# Muon's matrices cut both ways, statistics over rows that are cut, experts along their own axis and
# queues that end with a row.
PAIRS = [
    *(('default', mesh) for mesh in MESHES),
    ('spectral', {'data': 2, 'fsdp': 2, 'tensor': 2}),
    ('of batches', {'data': 2, 'context': 4}),
    ('experts', {'expert': 2, 'fsdp': 2, 'tensor': 2}),
    ('experts by rows', {'fsdp': 8}),
    ('ragged experts', {'data': 2, 'fsdp': 2, 'tensor': 2}),
    ('ragged experts', {'data': 2, 'context': 4}),
    ('streams', {'data': 2, 'fsdp': 2, 'tensor': 2}),
    ('attention residuals', {'fsdp': 2, 'context': 4}),
]


def make_config(model, sizes):
    changes = COMMON | MODELS[model] | {f'mesh.{a}': n for a, n in ({'data': 1} | sizes).items()}
    config = tiny_config(changes)
    check(config)
    return config


def compute_losses(model, sizes, devices=None):
    """Returns the losses [STEPS], and the final parameters, still sharded."""
    config = make_config(model, sizes)
    learner, mesh = tiny_learner(config), make_mesh(config.mesh, devices)
    check_devices(config, mesh)
    step, shardings = make_train_step(learner), state_shardings(learner, mesh)
    batches = [packed_batch(i) for i in range(STEPS)]
    batches = jax.tree.map(lambda *rows: np.stack(rows), *batches)
    over_steps = jax.tree.map(lambda s: s.update(spec=(None, *s.spec)), batch_sharding(mesh))

    def run(key, hyper, batches):
        state = jax.lax.with_sharding_constraint(init_state(learner, hyper, key), shardings)

        def scan_step(state, batch):
            state, metrics = step(state, batch, hyper)
            return jax.lax.with_sharding_constraint(state, shardings), metrics['loss']

        return jax.lax.scan(scan_step, state, batches)

    replicated = replicated_sharding(mesh)
    jitted = jax.jit(trace_on_mesh(mesh, run), in_shardings=(replicated, replicated, over_steps))
    state, losses = jitted(jax.random.key(0), make_hyper(config), batches)
    return np.array(losses), state.params


@functools.cache
def compute_losses_on_one_device(model):
    return compute_losses(model, {}, tuple(jax.devices()[:1]))[0]


@pytest.mark.full
@pytest.mark.default_rows('default-2data-2fsdp-2tensor')
@pytest.mark.parametrize(
    ('model', 'sizes'),
    PAIRS,
    ids=[f'{m}-{"-".join(f"{n}{a}" for a, n in s.items())}' for m, s in PAIRS],
)
def test_losses_equal_one_device(model, sizes):
    """Catches sums over a part, rows or heads that are mixed up, and a mask by positions within a
    part: keys of other documents, or later keys.
    """
    losses, params = compute_losses(model, sizes)
    np.testing.assert_allclose(losses, compute_losses_on_one_device(model), rtol=0, atol=1e-5)
    assert losses[-1] < losses[0] - 0.01
    n_cut = sum(not leaf.sharding.is_fully_replicated for leaf in jax.tree.leaves(params))
    assert (n_cut > 0) == bool({'fsdp', 'tensor', 'expert'} & sizes.keys())


@pytest.mark.parametrize(
    ('sizes', 'changes', 'message'),
    [
        (
            {'fsdp': 8},
            {'model.d_model': 20},
            r'mesh\.fsdp must divide model\.d_model; got 8 for 20',
        ),
        ({'tensor': 8}, {}, r'mesh\.tensor must divide model\.n_heads; got 8 for 4.*tensor=4 or'),
        ({'tensor': 4}, {'model.d_ff': 30}, r'mesh\.tensor must divide model\.d_ff; got 4 for 30'),
        ({'context': 8}, {'data.seq_len': 12}, r'mesh\.context must divide data\.seq_len; got 8'),
        (
            {'data': 2, 'fsdp': 4},
            {'data.batch_size': 12},
            r'mesh\.data \* mesh\.fsdp = 1 \* 8; got',
        ),
        ({'expert': 2}, {}, r'mesh\.expert=2 shards experts, but model\.mlp=dense has none'),
        (
            {'expert': 8},
            MODELS['experts'],
            r'mesh\.expert must divide mlp\.n_experts; got 8 for 4.*mesh.expert=4 or',
        ),
        (
            {'fsdp': 8},
            {'optim.ghost_radius': 0.1},
            r'optim\.ghost_radius needs a forward-mode derivative',
        ),
        (
            {'context': 2},
            {'model.attention': 'linear'},
            r'model\.attention=linear reads them in order',
        ),
    ],
)
def test_indivisible_mesh_is_refused(sizes, changes, message):
    fields = COMMON | {f'mesh.{axis}': n for axis, n in ({'data': 1} | sizes).items()} | changes
    config = tiny_config(fields)
    with pytest.raises(ValueError, match=message):
        check_devices(config, make_mesh(config.mesh))


def test_replicated_arrays_are_noted():
    config = tiny_config(COMMON | {'model.n_kv_heads': 2, 'mesh.data': 2, 'mesh.tensor': 4})
    keys_note, logits_note = list_mesh_notes(config, make_mesh(config.mesh), 258)
    assert keys_note.startswith('keys and values are whole') and 'model.n_kv_heads, 2.' in keys_note
    assert 'mesh.tensor=4 does not divide the vocabulary, 258. 260 would be sharded.' in logits_note
    assert not list(
        list_mesh_notes(config, make_mesh(make_config('default', {'data': 8}).mesh), 258)
    )


def test_fsdp_over_whole_torus_is_noted(monkeypatch):
    """Catches a note for one dimension of it, which is the advised mesh."""
    monkeypatch.setattr(check_mesh, 'torus_shape', lambda devices: [4, 2])
    whole, part = (tiny_config(COMMON | {'mesh.data': 8 // n, 'mesh.fsdp': n}) for n in (8, 4))
    (note,) = list_mesh_notes(whole, make_mesh(whole.mesh), 256)
    assert 'a whole torus of 4 x 2' in note and 'mesh.fsdp=4 and mesh.data=-1' in note
    assert not list(list_mesh_notes(part, make_mesh(part.mesh), 256))
