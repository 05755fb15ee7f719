"""Which hyperparameters a program reads, and the axes that would measure nothing.

Property: a field is read where a change of it can change what training does.
"""

import pytest

from lm.state import HYPER_PATHS
from lm.sweep.cells import cells, groups
from lm.sweep.unread import read_fields, refuse_unread
from modules.optim import SCHEDULES
from tests.helpers import tiny_config, tiny_raw

UNREAD = {
    'constant': {'decay_fraction', 'final_lr_fraction', 'steps'},
    'warmup_cosine': {'decay_fraction'},
    'warmup_stable_decay': set(),
}


def refuse(sweep, **changes) -> None:
    raw = tiny_raw({name.replace('_', '.', 1): value for name, value in changes.items()})
    for group in groups(cells(raw, sweep)):
        refuse_unread(group)


@pytest.mark.parametrize('schedule', SCHEDULES)
def test_a_schedule_reads_its_own_fields_alone(schedule):
    """All others are read whatever the schedule, the balance of experts where there are some."""
    read = read_fields(tiny_config({'optim.schedule': schedule, 'model.mlp': 'moe'}))
    assert set(HYPER_PATHS) - read == UNREAD[schedule]
    read = read_fields(tiny_config({'optim.schedule': schedule}))
    assert set(HYPER_PATHS) - read == UNREAD[schedule] | {'balance_loss'}


@pytest.mark.parametrize('layers', [1, 3])
@pytest.mark.parametrize('microbatches', [1, 2])
def test_what_is_read_does_not_depend_on_loops_of_the_program(layers, microbatches):
    changes = {'train.microbatches': microbatches, 'model.n_layers': layers}
    plain = read_fields(tiny_config({'model.remat': 'full', 'model.scan_layers': False} | changes))
    assert plain == read_fields(tiny_config(changes)) == read_fields(tiny_config())


@pytest.mark.parametrize(
    ('schedule', 'path'),
    [
        (schedule, HYPER_PATHS[name])
        for schedule, names in UNREAD.items()
        for name in sorted(names - {'steps'})
    ],
)
def test_an_unread_axis_is_refused_by_name(schedule, path):
    axes = {'optim.lr': (0.1, 0.2), path: (0.1, 0.2)}
    with pytest.raises(ValueError, match=f'{path} would measure nothing.*schedule={schedule}'):
        refuse(axes, optim_schedule=schedule)


def test_a_read_axis_is_not_refused():
    axes = {'optim.decay_fraction': (0.1, 0.2), 'optim.final_lr_fraction': (0.0, 0.1)}
    refuse(axes, optim_schedule='warmup_stable_decay')


def test_steps_are_never_refused():
    refuse({'train.steps': (10, 20)}, optim_schedule='constant')


def test_an_unread_field_that_is_not_swept_is_not_refused():
    refuse({'optim.lr': (0.1, 0.2)}, optim_schedule='constant', optim_decay_fraction=0.4)


def test_seeds_and_choices_of_the_program_are_not_refused():
    refuse({'train.seed': (1, 2), 'data.seed': (1, 2), 'model.norm': ('rmsnorm', 'layernorm')})


def test_an_axis_that_only_some_programs_read_is_refused():
    axes = {'optim.schedule': tuple(UNREAD), 'optim.decay_fraction': (0.1, 0.3)}
    with pytest.raises(ValueError, match=r'decay_fraction.*schedule=constant.*`list`'):
        refuse(axes)


def test_a_list_gives_the_field_with_the_choices_that_read_it():
    stable = {'optim.schedule': 'warmup_stable_decay'}
    refuse([{}, *({**stable, 'optim.decay_fraction': part} for part in (0.1, 0.3))])
