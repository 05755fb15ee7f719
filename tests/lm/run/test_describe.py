"""What a run says of a config that is allowed and yet may not be meant."""

import pytest

from configs.studies import norm_placement_lr
from lm.config.fields import CHOICES, FIELDS
from lm.run.describe import list_config_notes, list_field_origins, list_sweep_notes
from lm.study.plan.cells import expand_sweep, split_sweep
from modules.options import declared_options
from tests.helpers import checked_config

STEPS = {'train.steps': 20}


def notes(changes):
    return [
        note for note in list_config_notes(checked_config(STEPS | changes)) if 'causal' not in note
    ]


@pytest.mark.parametrize(
    ('changes', 'said'),
    [
        (
            {'model.norm': 'powernorm'},
            'model.norm=powernorm needs more than 10000 updates and the run has 20: warmup=10000 '
            '(updates as a norm over the batch alone)',
        ),
        ({'model.norm': 'unified'}, 'model.norm=unified needs more than 4000 updates and'),
        ({'model.norm': 'unified:warmup=20'}, 'needs more than 20 updates and the run has 20'),
        (
            {'model.norm': 'powernorm:warmup=60', 'train.microbatches': 2},
            'needs more than 60 updates and the run has 40',
        ),
        (
            {'model.norm': 'layernorm_removal'},
            'model.norm=layernorm_removal needs more than 28 updates and the run has 20: '
            'removal_start=20 (updates before the first norm is removed), removal_gap=2 (',
        ),
        (
            {'optim.warmup_steps': 20},
            'optim.schedule=constant needs more than 20 steps and the run has 20: warmup_steps=20',
        ),
        (
            {'optim.schedule': 'inverse_sqrt'},
            'optim.schedule=inverse_sqrt needs more than 10000 steps and the run has 20: ',
        ),
        ({'train.trainable': 'norms'}, 'train.trainable=norms without train.init_from: all other'),
        (
            {'optim.average': 'schedule_free', 'optim.schedule': 'linear', 'optim.b1': 0.0},
            'optim.average=schedule_free takes the place of a decay: optim.schedule=linear',
        ),
        (
            {'optim.average': 'schedule_free', 'optim.name': 'muon', 'optim.b1': 0.0},
            'and optim.name=muon has its own, optim.momentum=0.95; published with 0',
        ),
    ],
)
def test_what_a_run_never_reaches_is_said_once(changes, said):
    (note,) = notes(changes)
    assert note.startswith(said) or said in note


@pytest.mark.parametrize(
    'changes',
    [
        {},
        {'model.norm': 'unified:warmup=19'},
        {'norm.warmup': 30, 'model.norm': 'powernorm', 'train.microbatches': 2},
        {'model.norm': 'layernorm_removal', 'norm.removal_start': 1, 'train.steps': 10},
        {'optim.warmup_steps': 19},
        {'train.trainable': 'norms', 'train.init_from': 'runs/x'},
    ],
)
def test_nothing_is_said_of_what_a_run_reaches(changes):
    assert notes(changes) == []


def test_the_notes_of_many_runs_say_how_many_each_is_of():
    configs = [checked_config({'optim.warmup_steps': 5, 'train.steps': n}) for n in (3, 4, 9)]
    said = list_sweep_notes(configs)
    assert len(said) == 2 and all(note.startswith('1 of 3 runs: optim.schedule') for note in said)
    assert list_sweep_notes(configs[:1]) == list_config_notes(configs[0])


def test_every_option_that_is_counted_says_so():
    """By its name or its words: a new one is not forgotten."""
    rows = [row for choice in CHOICES.values() for row in choice.table.values()]
    declared = {name: d for row in rows for name, d in declared_options(row).items()}
    counted = {name for name, d in declared.items() if d.option.time_unit}
    named = {
        name
        for name, d in declared.items()
        if int in d.types and {'steps', 'updates'} & set(f'{name} {d.option.description}'.split())
    }
    of_schedules = {'warmup_steps', 'inverse_sqrt_steps'}
    of_bases = {'conda_every', 'projection_every', 'shampoo_every', 'soap_every', 'sophia_every'}
    of_norms = {'warmup', 'removal_start', 'removal_gap'}
    assert counted == named == of_norms | of_schedules | of_bases
    assert {name for name in counted if f'norm.{name}' in FIELDS} == of_norms


@pytest.mark.full
def test_the_study_of_norms_reaches_their_warm_ups():
    """And the part of it to train again is the same runs, of the same names."""
    fitted = expand_sweep(*split_sweep(norm_placement_lr.get_config('fitted'))[:2])
    whole = expand_sweep(*split_sweep(norm_placement_lr.get_config())[:2])
    assert len(fitted) == 4 * 7 * 3 and len(whole) == 28 * 7 * 3
    assert {cell.name for cell in fitted} < {cell.name for cell in whole}
    assert not [
        note for cell in fitted for note in list_config_notes(cell.recipe) if 'causal' not in note
    ]


def test_where_fields_are_from_is_a_line_for_each_place():
    lines = [
        'not as in configs/default.py: optim.lr=1.0, train.steps=2',
        'from RUN: model.d_model=8',
    ]
    fields = {'optim.lr': 1.0, 'train.steps': 2}, {'model.d_model': 8}
    assert list_field_origins(*fields, 'RUN') == lines and list_field_origins({}, {}, '') == []
