"""Cells of config.sweep, and groups of cells."""

import cProfile
import pstats
import re

import numpy as np
import pytest

from configs import default
from lm.config.fields import CHOICES, FIELDS, RUN_PATHS
from lm.config.groups import SETTINGS
from lm.config.resolve import digest, flatten, resolve
from lm.study.plan.cells import (
    check_sources,
    describe_ignored,
    expand_sweep,
    group_by_program,
    split_sweep,
)
from modules.optim.groups import GROUPS
from tests.helpers import another, tiny_config, tiny_raw


def changes(sweep) -> list[dict]:
    return [cell.changes for cell in expand_sweep(tiny_raw(), sweep)]


def refusal(sweep) -> str:
    with pytest.raises(ValueError) as error:
        expand_sweep(tiny_raw(), sweep)
    return str(error.value)


def test_axes_are_multiplied_and_the_last_changes_fastest():
    assert changes({'optim.lr': (0.1, 0.2), 'train.seed': (0, 1)}) == [
        {'optim.lr': 0.1, 'train.seed': 0},
        {'optim.lr': 0.1, 'train.seed': 1},
        {'optim.lr': 0.2, 'train.seed': 0},
        {'optim.lr': 0.2, 'train.seed': 1},
    ]


def test_zipped_fields_move_together():
    assert changes({'zip': {'model.d_ff': (16, 64), 'optim.lr': (0.2, 0.1)}}) == [
        {'model.d_ff': 16, 'optim.lr': 0.2},
        {'model.d_ff': 64, 'optim.lr': 0.1},
    ]


def test_zips_give_several_axes():
    first = {'optim.lr': (0.1, 0.2), 'optim.b1': (0.8, 0.9)}
    second = {'train.seed': (1, 2), 'data.seed': (3, 4)}
    assert changes({'zip': (first, second)}) == [
        {'optim.lr': lr, 'optim.b1': b1, 'train.seed': seed, 'data.seed': seed + 2}
        for lr, b1 in ((0.1, 0.8), (0.2, 0.9))
        for seed in (1, 2)
    ]


def test_listed_changes_form_an_axis():
    listed = ({}, {'loss.z_loss': 0.0}, {'optim.b2': 0.9, 'optim.b1': 0.8})
    assert changes({'list': listed}) == list(listed)
    assert changes({'list': listed, 'train.seed': (1, 2)}) == [
        {**changes, 'train.seed': seed} for changes in listed for seed in (1, 2)
    ]


@pytest.mark.parametrize('kind', [tuple, list])
def test_tuple_sweep_is_one_list(kind):
    listed = kind([{'optim.lr': 0.1}, {'train.seed': 5}])
    assert changes(listed) == list(listed)


def test_cell_name_is_single_run_digest():
    (cell,) = expand_sweep(tiny_raw(), {'optim.lr': (0.1,), 'model.norm': ('layernorm',)})
    single = tiny_config({'optim.lr': 0.1, 'model.norm': 'layernorm'})
    assert cell.recipe == single and cell.name == digest(single)


def test_cell_name_ignores_other_axes():
    few = {cell.name for cell in expand_sweep(tiny_raw(), {'optim.lr': (0.1, 0.2)})}
    many = {
        c.name
        for c in expand_sweep(tiny_raw(), {'train.seed': (0, 1), 'optim.lr': (0.2, 0.1, 0.3)})
    }
    assert len(many) == 6 and few < many


def test_numbers_are_cast_to_field_types():
    as_floats = expand_sweep(tiny_raw(), {'optim.lr': (1.0, 2.0)})
    for axis in ((1, 2), np.array([1.0, 2.0]), np.array([1, 2]), (np.float64(1), np.int64(2))):
        assert expand_sweep(tiny_raw(), {'optim.lr': axis}) == as_floats
    for cell in expand_sweep(tiny_raw(), {'train.seed': np.arange(2)}):
        assert type(cell.changes['train.seed']) is type(cell.recipe.train.seed) is int


def test_config_file_and_flag_give_equal_cells():
    """A ConfigDict takes every form of a sweep unchanged, including keys with dots."""
    sweep = {
        'optim.lr': (0.1, 0.2),
        'zip': {'model.d_ff': (16, 64), 'optim.b1': (0.8, 0.9)},
        'list': ({}, {'loss.z_loss': 0.0}),
        'train.seed': range(2),
    }
    for form in (sweep, ({'optim.lr': 0.1}, {'optim.lr': 0.2})):
        config = default.get_config()
        config.sweep = form
        base, split, _ = split_sweep(config)
        assert 'sweep' not in base and expand_sweep(tiny_raw(), split) == expand_sweep(
            tiny_raw(), form
        )
    assert split_sweep(default.get_config())[1] is None


@pytest.mark.parametrize(
    ('sweep', 'answer'),
    [
        ({'optim.lrr': (0.1,)}, r"'optim.lrr' is not a config field. Did you mean 'optim.lr'?"),
        ({'lr': (0.1,)}, r"'lr' is not a config field. Did you mean 'optim.lr'?"),
        ({'zipp': {'optim.lr': (0.1,)}}, "Did you mean 'zip'?"),
        ({'zip': {'optim.lrr': (0.1,)}}, "Did you mean 'optim.lr'?"),
        ([{'optim.lrr': 0.1}], "Did you mean 'optim.lr'?"),
        ({3: (0.1,)}, 'axis 3 is not a config field'),
        ({'optim.lr': 0.1}, 'optim.lr must be a tuple of values; got 0.1'),
        ({'optim.lr': np.array(0.1)}, 'optim.lr must be a tuple of values'),
        ({'model.norm': 'rmsnorm'}, "model.norm must be a tuple of values; got 'rmsnorm'"),
        ({'zip': {'optim.lr': 0.1}}, 'optim.lr must be a tuple of values; got 0.1'),
        ({'optim.lr': ()}, 'axis optim.lr has no values'),
        ({'list': ()}, 'axis list has no values'),
        ((), 'axis list has no values'),
        ({}, 'sweep is empty'),
        ({'zip': ()}, 'sweep is empty'),
        (0.1, 'sweep must map fields to values'),
        ("{'optim.lr': (10**-3,)}", 'must be a Python literal (1e-3, not 10**-3)'),
        ({'zip': 0.1}, 'zip must map fields to equally many values'),
        ({'zip': {}}, 'zip must map fields to equally many values'),
        ({'list': (0.1,)}, 'list must contain dicts'),
        (
            {'zip': {'optim.lr': (0.1, 0.2), 'train.seed': (1, 2, 3)}},
            "equally many values per field; got {'optim.lr': 2, 'train.seed': 3}",
        ),
        ({'optim.lr': (0.1,), 'zip': {'optim.lr': (0.2,)}}, 'two axes of the sweep change optim.l'),
        ({'list': [{}, {'optim.lr': 1}], 'optim.lr': (2,)}, 'two axes of the sweep change optim.l'),
        ({'train.seed': (0, 1.5)}, 'train.seed must be int; got 1.5 of type float'),
        ({'train.seed': (True,)}, 'train.seed must be int; got True of type bool'),
        ({'optim.lr': ('0.1',)}, "optim.lr must be float; got '0.1' of type str"),
        (
            {'optim.lr': (0.1, -1.0)},
            "cell {'optim.lr': -1.0}: optim.lr must be at least 0 and finite",
        ),
        ({'optim.lr': (float('nan'),)}, 'optim.lr must be at least 0 and finite'),
        ({'model.norm': ('rmsnrom',)}, "Did you mean 'rmsnorm'?"),
        ({'model.n_heads': (2, 3)}, 'model.n_heads must divide model.d_model'),
        ({'optim.lr': (1, 1.0)}, 'two cells of the sweep are the same run'),
        ([{}, {'train.steps': 20}], "the same run: {} and {'train.steps': 20}"),
        ([{}, {'norm.eps': 1e-6}], "the same run: {} and {'norm.eps': 1e-06}"),
        ({'model.mlp': ('auto', 'dense')}, 'the same run'),
        ({'model.dtype': ('auto', 'bfloat16')}, 'depends on the machine; a sweep must name'),
        (
            {'optim.decay_fraction': (0.1, 0.2)},
            "cell {'optim.decay_fraction': 0.1}: optim.decay_fraction=0.1 is not used by "
            'this config (optim.schedule=constant), so it would have no effect. It is used '
            'with optim.schedule=warmup_stable_decay.',
        ),
        (
            {'train.seed': range(10**30)},
            f'axis train.seed must have at most 100,000 values; got range(0, {10**30}). Leave',
        ),
        ({'zip': {'train.seed': range(200_000)}}, 'axis train.seed must have at most 100,000'),
        (
            {'train.seed': range(1000), 'data.seed': range(1000), 'optim.lr': (0.1,)},
            'at most 100,000 cells; got 1,000,000 (1000 x 1000 x 1).',
        ),
        ({'model.norm': ('rmsnorm:scal=False',)}, 'rmsnorm has no such option, only'),
    ],
)
def test_bad_sweep_is_refused_with_advice(sweep, answer):
    assert re.search(re.escape(answer), refusal(sweep))


def test_check_sources_looks_for_text():
    """The plan of a sweep, or its board, may be made on a machine without the text."""
    source = 'text:/none/*.txt'
    cells = expand_sweep(tiny_raw(), {'data.source': ('python', source), 'train.seed': (0, 1)})
    check_sources(cells[:2])
    with pytest.raises(ValueError, match='no file matches') as error:
        check_sources(cells)
    assert str(error.value).startswith(f'sweep cell {cells[2].changes}: ')


def test_changes_precede_defaults():
    """Catches a base that is resolved first, so that 'auto' would be the value in the base."""
    post, wide = expand_sweep(tiny_raw(), {'model.placement': ('post', 'wide')})
    assert post.recipe.model.final_norm == 'none' and wide.recipe.model.mlp == 'moe'
    stable, cosine = expand_sweep(
        tiny_raw(), {'optim.schedule': ('warmup_stable_decay', 'constant')}
    )
    assert (stable.recipe.optim.decay_fraction, cosine.recipe.optim.decay_fraction) == (0.2, None)


def test_list_gives_options_with_their_parts():
    stable = {'optim.schedule': 'warmup_stable_decay'}
    swept = expand_sweep(
        tiny_raw(), [{}, *({**stable, 'optim.decay_fraction': x} for x in (0.1, 0.3))]
    )
    assert [cell.recipe.optim.decay_fraction for cell in swept] == [None, 0.1, 0.3]


def split_and_expand(changes, sweep):
    """Returns the base and the cells of a config with these changes."""
    base, sweep, _ = split_sweep(tiny_raw(changes) | {'sweep': sweep})
    return resolve(base), expand_sweep(base, sweep)


def test_option_belongs_to_cells_reading_it():
    """The option is given as an axis. Cells that do not read it are one cell, and not one for each
    value.
    """
    axes = {'optim.name': ('adamw', 'muon'), 'optim.muon_steps': (3, 4)}
    cells = expand_sweep(tiny_raw(), axes)
    assert [cell.changes for cell in cells] == [
        {'optim.name': 'adamw'},
        {'optim.name': 'muon', 'optim.muon_steps': 3},
        {'optim.name': 'muon', 'optim.muon_steps': 4},
    ]
    assert [cell.recipe.optim.muon_steps for cell in cells] == [None, 3, 4]
    note = '2 of 3 cells read optim.muon_steps; the others leave it out'
    assert describe_ignored(cells) == [note]


@pytest.mark.parametrize(
    ('path', 'value', 'field', 'without', 'within'),
    [
        ('optim.muon_steps', 3, 'optim.name', 'adamw', 'muon'),
        ('scaling.base_width', 8, 'scaling.name', 'standard', 'mup'),
        ('scaling.base_heads', 1, 'scaling.name', 'standard', 'mup'),
    ],
)
def test_common_option_belongs_to_cells_reading_it(path, value, field, without, within):
    """Holds whether the base reads it or not."""
    needs = {'scaling.base_width': 8} if field == 'scaling.name' else {}
    for first in (without, within):
        changes = needs | {path: value, field: first}
        base, cells = split_and_expand(changes, {field: (without, within)})
        assert [flatten(cell.recipe)[path] for cell in cells] == [None, value]
        assert flatten(base)[path] == (value if first == within else None)
        assert f'1 of 2 cells read {path}' in ' '.join(describe_ignored(cells))
        single = tiny_config(needs | {path: value, field: within})
        assert cells[1].name == digest(single)


def test_base_option_replaced_by_axis_is_left_out():
    names = {'optim.name': ('adamw', 'muon')}
    _, cells = split_and_expand({'optim.muon_steps': 3}, names | {'optim.muon_steps': (4,)})
    assert [cell.recipe.optim.muon_steps for cell in cells] == [None, 4]
    listed = ({'optim.name': 'adamw'}, {'optim.name': 'muon', 'optim.muon_steps': 4})
    with pytest.raises(ValueError, match='muon_steps=3 is not used by'):
        split_and_expand({'optim.muon_steps': 3}, listed)


def test_unread_option_is_refused():
    with pytest.raises(ValueError, match='muon_steps=3 is not used by'):
        split_and_expand({'optim.muon_steps': 3}, {'optim.name': ('adamw', 'sgd')})
    with pytest.raises(ValueError, match='the same run'):
        split_and_expand({}, {'optim.name': ('muon',), 'list': ({}, {'optim.muon_steps': 5})})


def test_kv_heads_follow_heads_in_each_cell():
    raw = tiny_raw()
    del raw['model']['n_kv_heads']
    cells = expand_sweep(raw, {'model.n_heads': (1, 2, 4)})
    assert [cell.recipe.model.n_kv_heads for cell in cells] == [1, 2, 4]
    explicit = expand_sweep(tiny_raw(), {'model.n_heads': (2, 4)})
    assert [cell.recipe.model.n_kv_heads for cell in explicit] == [2, 2]


def test_sweep_expands_in_few_calls():
    """A cell takes 2.5 ms on an idle core, and 9,500 calls."""
    axes = {'optim.lr': tuple(np.geomspace(1e-4, 1e-1, 50)), 'train.seed': tuple(range(4))}
    expand_sweep(tiny_raw(), axes)  # fills caches
    profile = cProfile.Profile()
    assert len(profile.runcall(expand_sweep, tiny_raw(), axes)) == 200
    calls = pstats.Stats(profile).total_calls  # ty: ignore[unresolved-attribute]
    assert calls < 200 * 14_000


SCHEDULE = {'optim.schedule': 'warmup_stable_decay', 'model.mlp': 'moe'}  # which read the most
WITHIN = {
    'optim.lr': 0.1,
    'optim.weight_decay': 0.2,
    'loss.z_loss': 0.2,
    'loss.label_smoothing': 0.1,
    'loss.balance_loss': 0.1,
    'optim.b1': 0.5,
    'optim.b2': 0.5,
    'optim.eps': 0.1,
    'optim.clip_norm': 2.0,
    'scaling.init_scale': 2.0,
    'optim.warmup_steps': 3,
    'train.steps': 9,
    'optim.decay_fraction': 0.5,
    'optim.final_lr_fraction': 0.5,
    'train.seed': 1,
    'data.seed': 1,
}
BETWEEN = {
    'model.d_ff': 64,
    'model.norm': 'rmsnorm:eps=0.1',
    'norm.eps': 0.2,
    'mlp.n_experts': 8,
    'data.seq_len': 16,
    'train.on_divergence': 'rollback',
    'train.eval_every': 3,
    'train.checkpoint_every': 3,
    'train.log_every': 3,
}


def test_group_shares_one_program():
    """Only hyperparameters, seeds and lengths vary within a group."""
    assert WITHIN.keys() <= {*RUN_PATHS} and not BETWEEN.keys() & {*RUN_PATHS}
    listed = [{}, *({path: value} for path, value in (WITHIN | BETWEEN).items())]
    together, *single = group_by_program(expand_sweep(tiny_raw(SCHEDULE), listed))
    assert [cell.changes for cell in together] == listed[: 1 + len(WITHIN)]
    assert [[cell.changes for cell in group] for group in single] == [
        [cell] for cell in listed[1 + len(WITHIN) :]
    ]


def test_traced_formats_share_a_program():
    """Another number of bits, but not a wide operand; and only if they are traced."""
    listed = [{'kernels.x_format': name} for name in ('e4m3', 'e5m2', 'int8', 'wide')]
    for is_traced, sizes in ((True, [3, 1]), (False, [1, 1, 1, 1])):
        changes = {'kernels.matmul': 'simulated', 'kernels.traced_formats': is_traced}
        groups = group_by_program(expand_sweep(tiny_raw(changes), listed))
        assert [len(group) for group in groups] == sizes


def test_numeric_options_vary_within_a_group():
    """Each option is tested in a config that reads it. Catches a number that is compiled into
    programs.
    """
    varied = {*WITHIN}
    for field in ('loss.name', 'optim.name', 'optim.schedule', 'optim.average'):
        for name in CHOICES[field].table:
            changes = {field: name, 'train.steps': 50}
            if name == 'outer_nesterov':  # divided by both numbers of optim.outer_every
                changes['train.steps'] = 30 * 35
            if name == 'exponential':
                changes['optim.final_lr_fraction'] = 0.5
            config = tiny_config(changes)
            for path in sorted({*config.readers} & {*RUN_PATHS} - varied):
                varied.add(path)
                value = 0.5 if flatten(config)[path] is None else flatten(config)[path]
                listed = [{path: float(value)}, {path: another(FIELDS[path].option, value)}]
                listed = [
                    {p: FIELDS[p].types[0](x) for p, x in changes.items()} for changes in listed
                ]
                (group,) = group_by_program(expand_sweep(tiny_raw(changes), listed))
                assert len(group) == 2, path
    optional = (
        'update_clip',
        'update_clip_sigmas',
        'match_rms',
        'embedding_gradient_shrink',
        'ghost_radius',
    )
    optional = (*optional, 'match_norm', 'match_norm_floor', 'momentum_start')
    optional = (*optional, 'momentum_warmup_steps', 'weight_decay_end')
    optional = (*optional, *(f'{group}_{setting}' for group in GROUPS for setting in SETTINGS))
    optional = (*(f'optim.{name}' for name in optional), 'scaling.embedding_std')
    optional = (*optional, 'model.dropout', 'model.attention_dropout', 'model.embedding_dropout')
    raw = tiny_raw({'optim.schedule': 'warmup_stable_decay'})
    warmup = {'optim.momentum_start': 0.5, 'optim.momentum_warmup_steps': 5}
    for path in optional:
        varied.add(path)
        first, second = (0.1, 0.2) if float in FIELDS[path].types else (6, 7)
        needed = warmup | {'optim.name': 'muon'} if path in warmup else {}
        listed = [{}, needed | {path: first}, needed | {path: second}]
        assert [len(group) for group in group_by_program(expand_sweep(raw, listed))] == [1, 2]
    experts = {'model.mlp': 'moe', 'mlp.balance': 'bias', 'mlp.router_z_loss': True}
    for path in ('loss.router_z_loss', 'mlp.bias_rate'):
        varied.add(path)
        listed = [{path: 0.1}, {path: 0.2}]
        (group,) = group_by_program(expand_sweep(tiny_raw(experts), listed))
        assert len(group) == 2, path
    assert varied == {*RUN_PATHS}


def test_groups_keep_cell_order():
    swept = expand_sweep(
        tiny_raw(), {'optim.lr': (0.1, 0.2), 'model.norm': ('rmsnorm', 'layernorm')}
    )
    first, second = group_by_program(swept)
    assert first == [swept[0], swept[2]] and second == [swept[1], swept[3]]
