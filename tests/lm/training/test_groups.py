"""Groups of parameters: their rates, decay, optimizers and schedules, in updates and tables."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from lm.config.resolve import digest, flatten, resolve, update_recipe
from lm.devices.mesh import make_mesh
from lm.model.check import check
from lm.run.tables import GROUP_COLUMNS, format_schedule, group_parameters, parameter_rows
from lm.study.plan.cells import expand_sweep, group_by_program
from lm.training.state import check_learner, make_hyper
from lm.training.step import make_train_step
from lm.training.update import group_fractions, numbers_at_step, peak_lrs, update_stages
from modules.optim import unbox_state
from modules.optim.groups import GROUPS, HIDDEN, find_group, group_chain
from modules.optim.stages import apply_stages, stored_stages
from modules.params import ParamSpec, named_leaves
from tests.helpers import (
    checked_config,
    initial_state,
    packed_batch,
    tiny_config,
    tiny_learner,
    tiny_raw,
    train_step,
)

ADAMW = {'optim.name': 'adamw', 'optim.others': 'adamw', 'optim.weight_decay': 0.1}
MOE = {'model.mlp': 'moe', 'model.position': 'learned', 'model.bias': True}


def train(config, n_steps=2):
    """Returns {path: weight} after some steps."""
    state = initial_state(config)
    for i in range(n_steps):
        state, _ = train_step(config)(state, packed_batch(i), make_hyper(config))
    return {path: np.asarray(weight) for path, weight in named_leaves(state.params).items()}


def table(config):
    """Returns {path: row} of the parameter table."""
    rows = parameter_rows(tiny_learner(config), make_mesh(config.mesh))
    return {row['parameter']: row for row in rows}


def find_groups(config):
    specs = named_leaves(tiny_learner(config).description.specs)
    return {path: find_group(spec) for path, spec in specs.items()}


def test_each_parameter_is_in_one_group():
    """By its declaration: a router is apart from matrices, positions from words."""
    by_path = find_groups(tiny_config(MOE | {'model.stream': 'mhc'}))
    assert {*by_path.values()} == {*GROUPS, HIDDEN} - {'others', 'scalar'}
    assert by_path['layers/mlp_stream_mix_scale'] == 'stream'
    assert by_path['embedding'] == 'embedding' and by_path['readout'] == 'readout'
    last_names = {path.rpartition('/')[2]: group for path, group in by_path.items()}
    expected = {'router': 'router', 'query': HIDDEN, 'scale': 'norm', 'router_bias': 'vector'}
    assert expected.items() <= last_names.items()
    assert {path for path, group in by_path.items() if group == 'tables'} == {'positions/table'}
    assert find_group(ParamSpec('vector', ('layer',))) == 'scalar'
    assert find_group(ParamSpec('vector', (), part='norm')) == 'norm'
    assert {group_chain(g) for g in GROUPS} >= {('others',), ('norm', 'others'), ('router',)}


FREE = ADAMW | {'optim.clip_norm': float('inf')}  # no number that all gradients determine


def second_update(config, step=3):
    """Returns {path: update} of the second of two steps with different gradients.

    Gradients and weights do not depend on the config, so that only the update does.
    """
    learner, hyper = tiny_learner(config), make_hyper(config)
    description, fractions = learner.description, group_fractions(config, hyper, jnp.int32(step))
    shapes, tree = jax.tree.flatten(description.shapes)
    rng = np.random.default_rng(0)

    def draw():
        return tree.unflatten([jnp.float32(rng.normal(size=s.shape)) for s in shapes])

    params = draw()
    stages = update_stages(config, description, hyper, fractions)
    stored = unbox_state(stored_stages(stages).init(params))
    for grads in (draw(), draw()):
        updates, stored, _ = apply_stages(stages, grads, stored, params, grad=grads)
    return {path: np.asarray(update) for path, update in named_leaves(updates).items()}


SAME = {
    'optim.others_lr': 3e-3,
    'optim.embedding_lr': 3e-3,
    'optim.readout_lr_factor': 1.0,
    'optim.norm_b1': 0.9,
    'optim.embedding_b2': 0.95,
    'optim.embedding_eps': 1e-3,
    'optim.readout_weight_decay': 0.1,
    'optim.readout_optimizer': 'adamw',
}


@pytest.mark.full
def test_equal_settings_are_one_group_bit_for_bit():
    """Settings equal to their parents change nothing, in four states or in one.

    Operation by operation, since the compiler rounds another program differently.
    """
    config, separate = (tiny_config(FREE | changes) for changes in ({}, SAME))
    flat = flatten(config)
    assert (flat['optim.lr'], flat['optim.b2'], flat['optim.eps']) == (3e-3, 0.95, 1e-3)
    assert len(config.optimizers) == 2 and len(separate.optimizers) == 5
    with jax.disable_jit():
        whole, parts = second_update(config), second_update(separate)
    for path, update in whole.items():
        np.testing.assert_array_equal(parts[path], update, err_msg=path)


@pytest.mark.full
def test_equal_settings_train_alike():
    """As one group, up to the compiler's rounding of another program: rates alone are exact."""
    rates = {path: value for path, value in SAME.items() if '_lr' in path or 'decay' in path}
    whole, same_rates, separate = (
        train(tiny_config(ADAMW | changes)) for changes in ({}, rates, SAME)
    )
    for path, weight in whole.items():
        np.testing.assert_array_equal(same_rates[path], weight, err_msg=path)
        np.testing.assert_allclose(separate[path], weight, rtol=1e-5, atol=1e-7, err_msg=path)


# A setting, and the columns of the table that it changes.
CHANGES = {
    'lr': (0.01, {'lr', 'decay/step', 'horizon (steps)'}),
    'lr_factor': (2.0, {'lr', 'decay/step', 'horizon (steps)'}),
    'weight_decay': (0.5, {'decay/step', 'horizon (steps)'}),
    'b1': (0.5, {'options'}),
    'b2': (0.5, {'options'}),
    'eps': (0.5, {'options'}),
    'optimizer': ('lion', {'optimizer', 'options'}),
}


@pytest.mark.parametrize('setting', CHANGES)
@pytest.mark.parametrize('group', ['embedding', 'norm'])
def test_setting_changes_its_group_alone(group, setting):
    """In the table and in the update. Catches a setting that reaches a sibling, or only a table."""
    value, columns = CHANGES[setting]
    config, changed = (
        checked_config(FREE | changes) for changes in ({}, {f'optim.{group}_{setting}': value})
    )
    if group == 'norm' and setting.startswith('lr'):  # without decay
        columns = {'lr'}
    members = {path for path, name in find_groups(config).items() if name == group}
    before, after = table(config), table(changed)
    for path, row in before.items():
        differing = {column for column in row if row[column] != after[path][column]}
        assert differing == (columns if path in members else set()), path
    updates, changed_updates = second_update(config), second_update(changed)
    moved = {p for p, u in updates.items() if not np.allclose(u, changed_updates[p], rtol=1e-4)}
    assert moved == members


@pytest.mark.full
def test_rate_moves_only_its_weights():
    """In a training step: the update of the embedding is twice as large, all others are equal."""
    changes = FREE | {'optim.weight_decay': 0.0}
    start = named_leaves(initial_state(tiny_config(changes)).params)
    plain, doubled = (
        train(tiny_config(changes | settings), n_steps=1)
        for settings in ({}, {'optim.embedding_lr': 6e-3})
    )
    for path, weight in plain.items():
        if path == 'embedding':
            expected = 2 * (weight - start[path])
            np.testing.assert_allclose(doubled[path] - start[path], expected, rtol=1e-3, atol=1e-7)
        else:
            np.testing.assert_array_equal(doubled[path], weight, err_msg=path)


def test_unset_rates_follow_their_parents():
    rates = {'optim.lr': 0.5, 'optim.others_lr_factor': 0.5, 'optim.norm_lr': 3.0}
    assert peak_lrs(rates | {'optim.readout_lr_factor': 4.0}) == {
        HIDDEN: 0.5,
        'router': 0.5,
        'others': 0.25,
        'norm': 3.0,
        'readout': 2.0,
        **dict.fromkeys(('embedding', 'tables', 'stream', 'scalar', 'vector'), 0.25),
    }


def test_rules_use_group_numbers():
    """Under muP, the group's rate times the factor of width, and its decay."""
    changes = {'scaling.name': 'mup', 'scaling.base_width': 8, 'optim.readout_lr': 0.02}
    plain, changed = (
        table(checked_config(FREE | changes | settings))
        for settings in ({}, {'optim.readout_weight_decay': 0.4})
    )
    # The readout of muP is scaled in the forward pass here, so that its rate is the group's.
    rates = {path: float(row['lr']) for path, row in plain.items()}
    assert rates['readout'] == 0.02 and rates['embedding'] == 0.003
    assert rates['layers/attention/query'] == pytest.approx(0.003 * 8 / 16)
    shares = {path: float(row['decay/step']) for path, row in plain.items()}
    assert shares['readout'] == pytest.approx(0.02 * 0.1)
    assert shares['embedding'] == pytest.approx(0.003 * 0.1)
    changed_shares = {path: float(row['decay/step']) for path, row in changed.items()}
    assert changed_shares['readout'] == pytest.approx(4 * shares['readout'], rel=1e-2)
    assert changed_shares['embedding'] == shares['embedding']


def test_group_has_its_schedule():
    """The readout decays over half the run, the rest over a fifth."""
    changes = {'optim.schedule': 'warmup_stable_decay', 'train.steps': 10}
    changes |= {'optim.decay_fraction': 0.2, 'optim.readout_decay_fraction': 0.5}
    config = checked_config(FREE | changes)
    fractions = group_fractions(config, make_hyper(config), jnp.arange(10))
    np.testing.assert_allclose(fractions[HIDDEN], [*[1] * 8, 0.5, 0], atol=1e-6)
    np.testing.assert_allclose(fractions['readout'], [*[1] * 5, 0.8, 0.6, 0.4, 0.2, 0], atol=1e-6)
    assert fractions['norm'] is fractions[HIDDEN]
    plain = second_update(update_recipe(config, {'optim.readout_decay_fraction': None}), step=6)
    changed = second_update(config, step=6)
    np.testing.assert_allclose(changed['readout'], 0.6 * plain['readout'], rtol=1e-5)
    np.testing.assert_array_equal(changed['embedding'], plain['embedding'])
    assert 'readout_lr' in format_schedule(config).splitlines()[1]


def test_momentum_and_decay_follow_the_step():
    """By their formulas at the first, a middle and the last step; other numbers stay."""
    changes = {'optim.name': 'muon', 'optim.momentum': 0.9, 'train.steps': 10}
    changes |= {'optim.momentum_start': 0.5, 'optim.momentum_warmup_steps': 4}
    changes |= {'optim.weight_decay_end': 0.0, 'optim.readout_weight_decay': 0.5}
    hyper = make_hyper(checked_config(ADAMW | changes))
    rows = [numbers_at_step(hyper, step) for step in (0, 2, 9)]
    for path, expected in {
        'optim.momentum': [0.6, 0.8, 0.9],
        'optim.weight_decay': [0.09, 0.07, 0.0],
        'optim.readout_weight_decay': [0.45, 0.35, 0.0],
        'optim.lr': [0.003] * 3,
    }.items():
        np.testing.assert_allclose([row[path] for row in rows], expected, atol=1e-7, err_msg=path)


@pytest.mark.full
def test_step_uses_its_numbers():
    """Without decay at the end, the last step only adds the direction."""
    changes = ADAMW | {'train.steps': 1, 'optim.weight_decay': 0.5}
    ends, plain = (
        train(tiny_config(changes | settings), n_steps=1)
        for settings in ({'optim.weight_decay_end': 0.0}, {'optim.weight_decay': 0.0})
    )
    decayed = train(tiny_config(changes), n_steps=1)
    for path, weight in plain.items():
        np.testing.assert_allclose(ends[path], weight, rtol=1e-6, err_msg=path)
    assert not np.allclose(decayed['embedding'], plain['embedding'], rtol=1e-6)


def test_options_are_shown_if_an_optimizer_has_several():
    """As many distinct options as optimizers do not mean one for each."""
    shared = dict.fromkeys(GROUP_COLUMNS, 'x')
    settings = [('sgd', '-'), ('frozen', '-'), ('adamw', 'b1=0.9'), ('adamw', 'b1=0.5')]
    rows = [
        {'parameter': name, 'shape': '2', **shared, 'optimizer': optimizer, 'options': options}
        for name, (optimizer, options) in zip('abcd', settings, strict=True)
    ]
    several, single = (group_parameters(part)[0] for part in (rows, rows[:3]))
    assert [line['options'] for line in several] == ['-', '-', 'b1=0.9', 'b1=0.5']
    assert not any('options' in line for line in single)


def test_router_may_leave_the_matrices():
    """It follows hidden matrices unless it is set."""
    muon = {**MOE, 'optim.name': 'muon'}
    config = checked_config(muon)
    changed = checked_config(muon | {'optim.router_optimizer': 'adamw', 'optim.router_lr': 0.01})
    router = [path for path, group in find_groups(config).items() if group == 'router']
    assert [table(config)[path]['optimizer'] for path in router] == ['muon'] * len(router)
    rows = table(changed)
    assert [(rows[path]['optimizer'], rows[path]['lr']) for path in router] == [('adamw', '0.01')]
    assert rows['layers/attention/query']['optimizer'] == 'muon'


def test_unrolled_layers_have_the_same_table():
    settings = {'optim.norm_weight_decay': 0.2, 'optim.embedding_lr_factor': 3.0}
    configs = [tiny_config(settings | {'model.scan_layers': scan}) for scan in (False, True)]
    first, second = map(table, configs)
    assert first == second
    lines, _ = group_parameters(list(first.values()))
    assert {line['group']: line['decay/step'] for line in lines}['norm'] == '0.0006'


@pytest.mark.full
def test_runs_with_other_settings_share_a_program():
    """Numbers are traced: two runs in one program are the runs alone. Catches a static number."""
    sweep = {'optim.embedding_lr': (1e-3, 1e-2), 'optim.readout_b1': (0.5, 0.8)}
    cells = [cell.recipe for cell in expand_sweep(tiny_raw(ADAMW), sweep)]
    assert len(group_by_program(expand_sweep(tiny_raw(ADAMW), sweep))) == 1
    step = make_train_step(tiny_learner(cells[0]))
    hypers = [make_hyper(cell) for cell in cells]
    stacked = jax.tree.map(lambda *numbers: jnp.stack(numbers), *hypers)
    state = initial_state(cells[0])
    together, _ = jax.jit(jax.vmap(step, (None, None, 0)))(state, packed_batch(), stacked)
    for i, hyper in enumerate(hypers):
        single, _ = train_step(cells[0])(state, packed_batch(), hyper)
        pairs = zip(jax.tree.leaves(together.params), jax.tree.leaves(single.params), strict=True)
        for stacked_weight, weight in pairs:
            np.testing.assert_allclose(stacked_weight[i], weight, rtol=1e-5, atol=1e-7)


def test_group_options_name_the_run():
    """An option that only a group's optimizer reads is part of the identity. Catches two runs in
    one folder.
    """
    settings = {**ADAMW, 'optim.readout_optimizer': 'sgd'}
    digests = {digest(tiny_config(settings | changes)) for changes in ({}, {'optim.momentum': 0.5})}
    assert len(digests) == 2


WRONG = [
    ({'optim.readout_lr': 0.1, 'optim.readout_lr_factor': 2.0}, 'Leave one of them out'),
    ({'optim.embedding_optimizer': 'adam_w'}, "optim.embedding_optimizer.*Did you mean 'adamw'"),
    ({'optim.embedding_optimizer': 'muon'}, 'does not support parameters with the roles embedding'),
    ({'optim.norm_optimizer': 'normalized_gd', 'optim.norm_b1': 0.5}, 'the option b1'),
    ({'optim.readout_decay_fraction': 0.5}, 'constant does not have the option decay_fraction'),
    ({'optim.norm_weight_decay': -0.1}, 'optim.norm_weight_decay must be at least 0'),
    ({'optim.vector_b2': 1.0}, 'optim.vector_b2 must be'),
    ({'optim.momentum_start': 0.5}, 'Set both, or leave both out'),
    (
        ADAMW | {'optim.momentum_start': 0.5, 'optim.momentum_warmup_steps': 3},
        'no optimizer of this config has the option momentum',
    ),
    (
        {'optim.weight_decay_end': 0.0, 'optim.decay_rule': 'timescale'},
        'timescale does not depend on the strength',
    ),
    ({'optim.router_lr': 0.1}, 'no parameters in the group router .routers of experts.; it has'),
    ({'optim.readout_b1': 0.5, 'model.tie_embeddings': True}, 'set optim.embedding_b1'),
    ({'optim.tables_lr': 0.1}, 'no parameters in the group tables'),
    (
        {
            'optim.readout_optimizer': 'sgd',
            'scaling.name': 'complete_p',
            'scaling.base_width': 8,
            'scaling.base_depth': 1,
        },
        'complete_p has no rules for optim.readout_optimizer=sgd, a sgd-like optimizer',
    ),
]


@pytest.mark.parametrize(('changes', 'message'), WRONG)
def test_wrong_setting_is_refused(changes, message):
    """Before anything is compiled."""
    with pytest.raises(ValueError, match=message):
        config = tiny_config(changes)
        check(config)
        check_learner(tiny_learner(config))


@pytest.mark.parametrize(
    ('name', 'hint'),
    [
        ('hidden_lr', 'optim.lr'),
        ('no_decay', 'embedding_weight_decay'),
        ('param_groups', 'follow from the model'),
        ('unembedding_lr', 'optim.readout_lr'),
        ('embeding_lr', 'embedding_lr'),
    ],
)
def test_other_names_are_answered(name, hint):
    raw = tiny_raw()
    raw['optim'][name] = 0.1
    with pytest.raises(ValueError, match=hint):
        resolve(raw)
