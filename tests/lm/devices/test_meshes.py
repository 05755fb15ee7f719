"""Equivalence: a run on any mesh is the run on one device, and which meshes a config can have."""

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
]


def config_of(model, sizes):
    given = COMMON | MODELS[model] | {f'mesh.{a}': n for a, n in ({'data': 1} | sizes).items()}
    config = tiny_config(given)
    check(config)
    return config


def losses_of(model, sizes, devices=None):
    """[STEPS], and the parameters after them, as they lie."""
    config = config_of(model, sizes)
    learner, mesh = tiny_learner(config), make_mesh(config.mesh, devices)
    check_devices(config, mesh)
    step, shardings = make_train_step(learner), state_shardings(learner, mesh)
    batches = [packed_batch(i) for i in range(STEPS)]
    batches = jax.tree.map(lambda *rows: np.stack(rows), *batches)
    over_steps = jax.tree.map(lambda s: s.update(spec=(None, *s.spec)), batch_sharding(mesh))

    def run(key, hyper, batches):
        state = jax.lax.with_sharding_constraint(init_state(learner, hyper, key), shardings)

        def one(state, batch):
            state, metrics = step(state, batch, hyper)
            return jax.lax.with_sharding_constraint(state, shardings), metrics['loss']

        return jax.lax.scan(one, state, batches)

    whole = replicated_sharding(mesh)
    jitted = jax.jit(trace_on_mesh(mesh, run), in_shardings=(whole, whole, over_steps))
    state, losses = jitted(jax.random.key(0), make_hyper(config), batches)
    return np.array(losses), state.params


@functools.cache
def losses_alone(model):
    return losses_of(model, {}, tuple(jax.devices()[:1]))[0]


@pytest.mark.default_rows('default-2data-2fsdp-2tensor')
@pytest.mark.parametrize(
    ('model', 'sizes'),
    PAIRS,
    ids=[f'{m}-{"-".join(f"{n}{a}" for a, n in s.items())}' for m, s in PAIRS],
)
def test_losses_are_those_of_one_device(model, sizes):
    """Catches sums that are of a part, rows or heads that are mixed up, and a mask by places that
    are those of a part: keys of other documents, or later ones.
    """
    losses, params = losses_of(model, sizes)
    np.testing.assert_allclose(losses, losses_alone(model), rtol=0, atol=1e-5)
    assert losses[-1] < losses[0] - 0.01
    n_cut = sum(not leaf.sharding.is_fully_replicated for leaf in jax.tree.leaves(params))
    assert (n_cut > 0) == bool({'fsdp', 'tensor', 'expert'} & sizes.keys())


@pytest.mark.parametrize(
    ('sizes', 'changes', 'said'),
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
        ({'expert': 2}, {}, r'mesh\.expert=2 cuts experts, and model\.mlp=dense has none'),
        (
            {'expert': 8},
            MODELS['experts'],
            r'mesh\.expert must divide mlp\.n_experts; got 8 for 4.*mesh.expert=4 or',
        ),
        (
            {'fsdp': 8},
            {'optim.ghost_radius': 0.1},
            r'optim\.ghost_radius differentiates in forward',
        ),
        ({'context': 2}, {'model.attention': 'linear'}, r'model\.attention=linear reads in order'),
    ],
)
def test_what_a_mesh_cannot_cut(sizes, changes, said):
    given = COMMON | {f'mesh.{axis}': n for axis, n in ({'data': 1} | sizes).items()} | changes
    config = tiny_config(given)
    with pytest.raises(ValueError, match=said):
        check_devices(config, make_mesh(config.mesh))


def test_what_stays_whole_is_said():
    config = tiny_config(COMMON | {'model.n_kv_heads': 2, 'mesh.data': 2, 'mesh.tensor': 4})
    kept, logits = list_mesh_notes(config, make_mesh(config.mesh), 258)
    assert kept.startswith('keys and values are whole') and 'model.n_kv_heads, 2.' in kept
    assert 'mesh.tensor=4 does not divide the vocabulary, 258. 260 would be cut.' in logits
    assert not list(list_mesh_notes(config, make_mesh(config_of('default', {'data': 8}).mesh), 258))


def test_a_whole_torus_is_said(monkeypatch):
    """Catches a note for one dimension of it, which is what is advised."""
    monkeypatch.setattr(check_mesh, 'torus_shape', lambda devices: [4, 2])
    whole, part = (tiny_config(COMMON | {'mesh.data': 8 // n, 'mesh.fsdp': n}) for n in (8, 4))
    (said,) = list_mesh_notes(whole, make_mesh(whole.mesh), 256)
    assert 'a whole torus of 4 x 2' in said and 'mesh.fsdp=4 with mesh.data=-1' in said
    assert not list(list_mesh_notes(part, make_mesh(part.mesh), 256))
