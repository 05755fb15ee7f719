"""Contract and reference: the initial state of training, and the description of each parameter."""

import io

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from rich.console import Console

from lm.config.fields import RUN_PATHS
from lm.devices.mesh import make_mesh
from lm.devices.shardings import state_layout
from lm.run.tables import (
    format_table,
    group_parameters,
    make_table,
    optimizer_state_bytes,
    parameter_count,
    parameter_rows,
)
from lm.training.state import make_hyper
from modules.params import named_leaves
from modules.reparam import REPARAMS
from tests.helpers import initial_state, tiny_config, tiny_learner
from tests.modules.test_reparam import HOLDING

WIDE = {'model.d_model': 64, 'model.d_ff': 192, 'model.n_layers': 3, 'data.seq_len': 64}


def init_weights(config):
    state = initial_state(config)
    return state.params, state.reparam


def test_hyper_holds_traced_options():
    """Only numbers that the chosen parts read, in float32: no decay_fraction with a constant rate.

    Catches a number read from another section.
    """
    config = tiny_config({'optim.lr': 0.125, 'train.steps': 7, 'loss.z_loss': 0.5})
    hyper = make_hyper(config)
    expected = {'optim.lr': 0.125, 'train.steps': 7, 'loss.z_loss': 0.5, 'optim.b2': 0.95}
    assert (
        expected.items() <= {path: round(float(value), 6) for path, value in hyper.items()}.items()
    )
    assert all(value.dtype == jnp.float32 and value.shape == () for value in hyper.values())
    assert set(hyper) < set(RUN_PATHS)
    assert not {'optim.decay_fraction', 'loss.balance_loss', 'train.seed'} & set(hyper)


@pytest.mark.default_rows('rope')
@pytest.mark.parametrize('position', ['rope', 'learned'])
def test_matrices_have_their_standard_deviation(position):
    """Measured against 1/sqrt(fan_in); vectors as declared; no two layers alike.

    Catches a layer axis counted in the fan-in, and layers drawn from one key.
    """
    config = tiny_config(WIDE | {'model.position': position})
    params = named_leaves(initial_state(config).params)
    fan_in = {'mlp/down': 192}  # 64, the width, for all others
    for path, value in params.items():
        if path.endswith('scale'):
            np.testing.assert_array_equal(value, 1)
            continue
        expected = fan_in.get(path.removeprefix('layers/'), 64) ** -0.5
        tolerance = 4 * expected / np.sqrt(2 * value.size)  # four standard errors
        assert abs(np.std(value) - expected) < tolerance, path
        assert abs(np.mean(value)) < 4 * expected / np.sqrt(value.size), path
        if path.startswith('layers/'):
            assert np.abs(np.corrcoef(value.reshape(3, -1))[0, 1]) < 0.1, path


def test_init_scale_multiplies_only_matrices():
    """The scale may be traced; another seed gives another draw."""
    config = tiny_config()
    once = named_leaves(initial_state(config).params)
    twice = named_leaves(initial_state(tiny_config({'scaling.init_scale': 2.0})).params)
    reseeded = named_leaves(initial_state(config, seed=1).params)
    for path, value in once.items():
        is_vector = path.endswith('scale')
        np.testing.assert_allclose(twice[path], value * (1 if is_vector else 2), rtol=1e-6)
        assert np.array_equal(reseeded[path], value) == is_vector


@pytest.mark.full
@pytest.mark.parametrize('reparam', REPARAMS)
def test_description_covers_stored_parameters(reparam):
    """Each tree is parallel to the parameters; the standard deviations belong to the used
    weights.
    """
    config = tiny_config({'model.reparam': reparam})
    description = tiny_learner(config).description
    params = named_leaves(initial_state(config).params)
    assert named_leaves(description.shapes).keys() == params.keys()
    assert named_leaves(description.specs).keys() == params.keys()
    assert named_leaves(description.scalings).keys() == params.keys()
    for path, shape in named_leaves(description.shapes).items():
        assert (shape.shape, shape.dtype) == (params[path].shape, params[path].dtype)
    used, _ = description.reparam.apply(*init_weights(config), False)
    random_paths = {path for path, value in named_leaves(used).items() if np.std(value) > 0}
    assert named_leaves(description.init_stds).keys() == random_paths


@pytest.mark.default_rows('sigma')
@pytest.mark.parametrize('reparam', [name for name in HOLDING if name != 'shared'])
def test_reparam_keeps_initial_weights(reparam):
    """The same seed gives the same model for every stored form."""
    config = tiny_config({'model.reparam': reparam})
    description = tiny_learner(config).description
    used, _ = description.reparam.apply(*init_weights(config), True)
    plain = initial_state(tiny_config({'model.reparam': 'none'})).params
    for path, value in named_leaves(plain).items():
        np.testing.assert_allclose(named_leaves(used)[path], value, rtol=1e-5, err_msg=path)


def test_state_starts_at_step_0_with_float32_moments():
    state = initial_state(tiny_config({'model.dtype': 'bfloat16'}))
    assert state.step == 0
    assert state.step.dtype == np.int32
    floats = [a for a in jax.tree.leaves((state.params, state.opt_state)) if a.dtype != np.int32]
    assert {a.dtype for a in floats} == {np.dtype(np.float32)}


@pytest.mark.parametrize(('name', 'per_parameter'), [('adamw', 8), ('lion', 4)])
def test_optimizer_state_bytes(name, per_parameter):
    """One or two float32 moments, and a counter. Catches parameters counted as state, and missing
    types.
    """
    changes = {'optim.name': name, 'optim.others': name, 'optim.eps': None}
    learner = tiny_learner(tiny_config(changes))
    n_bytes = optimizer_state_bytes(state_layout(learner)[0])
    assert n_bytes == per_parameter * parameter_count(learner) + 4


@pytest.mark.default_rows('none', 'sigma')
@pytest.mark.parametrize('reparam', REPARAMS)
def test_table_lists_every_parameter(reparam):
    """One row each, with the numbers in use. Catches a missing factor."""
    config = tiny_config({'model.reparam': reparam, 'scaling.init_scale': 2.0, 'optim.lr': 0.5})
    learner, mesh = tiny_learner(config), make_mesh(config.mesh)
    rows = {row['parameter']: row for row in parameter_rows(learner, mesh)}
    params = named_leaves(initial_state(config).params)
    assert rows.keys() == params.keys()
    assert parameter_count(learner) == sum(p.size for p in params.values())
    assert make_table(list(rows.values())).row_count == len(params)
    assert format_table(list(rows.values())).count('\n') == len(params) + 1
    table = rows['embedding']
    assert (table['shape'], table['role'], table['sharding']) == (
        '16 x 16',
        'embedding',
        'replicated',
    )
    assert (table['init std'], table['lr'], table['decay/step'], table['horizon (steps)']) == (
        '0.5',
        '0.5',
        '0.05',
        '20',
    )
    norm = rows['final_norm/scale']
    assert (norm['init std'], norm['decay/step'], norm['horizon (steps)']) == ('declared', '0', '-')


def test_narrow_table_keeps_whole_words():
    settings = {'optimizer': 'muon', 'decay/step': '0.0005', 'horizon (steps)': '2,000'}
    row = {'group': 'hidden: matrix and 4 more', 'parameters': '1,572,864'} | settings
    for width in (60, 120):
        console = Console(file=io.StringIO(), width=width)
        console.print(make_table([row]))
        printed = console.file.getvalue()
        assert sorted(printed.split()) == sorted(' '.join([*row, *row.values()]).split())
        assert max(map(len, printed.splitlines())) <= width


def test_groups_hold_all_parameters():
    """Equal settings share a row, and common settings are left out. Catches a lost group."""
    config = tiny_config({'optim.weight_decay': 0.1})
    learner = tiny_learner(config)
    rows = parameter_rows(learner, make_mesh(config.mesh))
    groups, common = group_parameters(rows)
    counts = [int(group['parameters'].replace(',', '')) for group in groups]
    assert sum(counts) == parameter_count(learner) and len(groups) < len(rows) / 2
    assert common == {
        'optimizer': 'adamw',
        'lr': '0.003',
        'reparam': 'none',
        'sharding': 'replicated',
    }
    assert 'decay/step' in groups[0] and 'lr' not in groups[0]
    labels = [group['group'] for group in groups]
    assert len({*labels}) == len(labels) and labels[0] == 'embedding'


def test_table_shows_frozen_parameters():
    config = tiny_config({'train.trainable': 'norms'})
    rows = parameter_rows(tiny_learner(config), make_mesh(config.mesh))
    for row in rows:
        columns = (row['optimizer'], row['lr'], row['decay/step'])
        is_norm = row['parameter'].endswith('scale')
        assert columns == (('adamw', '0.003', '0') if is_norm else ('frozen', '0', '0'))
    assert {row['optimizer'] for row in rows} == {'adamw', 'frozen'}


def test_table_shows_sharding_per_dimension():
    """Catches a dimension over two mesh axes, such as the heads of attention/out."""
    sizes = {'model.n_heads': 8, 'model.n_kv_heads': 8, 'mesh.fsdp': 2, 'mesh.tensor': 4}
    config = tiny_config(sizes | {'mesh.data': 1})
    rows = parameter_rows(tiny_learner(config), make_mesh(config.mesh))
    shardings = {row['parameter'].removeprefix('layers/'): row['sharding'] for row in rows}
    assert shardings['attention/query'] == '-, fsdp, tensor, -'
    assert shardings['attention/out'] == '-, tensor+fsdp, -, -'
    assert shardings['final_norm/scale'] == 'replicated'
