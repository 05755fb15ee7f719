"""The notes of a run on settings that are legal but suspicious."""

from types import SimpleNamespace

import pytest

from configs.studies import norm_placement_lr
from lm.config.fields import CHOICES, FIELDS
from lm.run.describe import (
    list_config_notes,
    list_field_origins,
    list_run_notes,
    list_sweep_notes,
)
from lm.study.plan.cells import expand_sweep, split_sweep
from modules.options import declared_options
from tests.helpers import checked_config

STEPS = {'train.steps': 20}


def list_notes(changes):
    return [
        note for note in list_config_notes(checked_config(STEPS | changes)) if 'causal' not in note
    ]


@pytest.mark.parametrize(
    ('changes', 'text'),
    [
        (
            {'model.norm': 'powernorm'},
            'model.norm=powernorm needs more than 10000 updates, but the run has 20: warmup=10000 '
            '(first updates with statistics of the current batch only)',
        ),
        ({'model.norm': 'unified'}, 'model.norm=unified needs more than 4000 updates, but'),
        ({'model.norm': 'unified:warmup=20'}, 'needs more than 20 updates, but the run has 20'),
        (
            {'model.norm': 'powernorm:warmup=60', 'train.microbatches': 2},
            'needs more than 60 updates, but the run has 40',
        ),
        (
            {'model.norm': 'layernorm_removal'},
            'model.norm=layernorm_removal needs more than 28 updates, but the run has 20: '
            'removal_start=20 (updates before the first norm is removed), removal_gap=2 (',
        ),
        (
            {'optim.warmup_steps': 20},
            'optim.schedule=constant needs more than 20 steps, but the run has 20: warmup_steps=20',
        ),
        (
            {'optim.schedule': 'inverse_sqrt'},
            'optim.schedule=inverse_sqrt needs more than 10000 steps, but the run has 20: ',
        ),
        ({'train.trainable': 'norms'}, 'train.trainable=norms without train.init_from: all other'),
        (
            {'optim.average': 'schedule_free', 'optim.schedule': 'linear', 'optim.b1': 0.0},
            'optim.average=schedule_free replaces a learning-rate decay, but optim.schedule=linear',
        ),
        (
            {'optim.average': 'schedule_free', 'optim.name': 'muon', 'optim.b1': 0.0},
            'but optim.name=muon also has momentum, optim.momentum=0.95',
        ),
    ],
)
def test_unreached_setting_is_noted_once(changes, text):
    (note,) = list_notes(changes)
    assert note.startswith(text) or text in note


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
def test_reached_setting_is_not_noted(changes):
    assert list_notes(changes) == []


def test_text_smaller_than_a_batch_is_repeated():
    """Catches a division by the steps of an epoch, which are none."""
    recipe = checked_config(STEPS | {'data.batch_size': 8, 'data.epochs': 6})
    journal = SimpleNamespace(
        recipe=recipe,
        experiment=SimpleNamespace(dataset=SimpleNamespace(train=range(4))),
        next_place=lambda: SimpleNamespace(stop=3),
    )
    assert 'the run reads the text 6.00 times (3 batches)' in list_run_notes(journal)


def test_sweep_notes_count_their_runs():
    configs = [checked_config({'optim.warmup_steps': 5, 'train.steps': n}) for n in (3, 4, 9)]
    list_notes = list_sweep_notes(configs)
    assert len(list_notes) == 2 and all(
        note.startswith('1 of 3 runs: optim.schedule') for note in list_notes
    )
    assert list_sweep_notes(configs[:1]) == list_config_notes(configs[0])


def test_warm_up_over_the_whole_run_is_as_published():
    """A longer one never ends. Catches a note on AdEMAMix as its authors use it."""
    fields = {'optim.name': 'ademamix', 'optim.others': 'ademamix', 'train.steps': 9}
    assert not list_config_notes(checked_config(fields | {'optim.ademamix_warmup': 9}))
    (note,) = list_config_notes(checked_config(fields | {'optim.ademamix_warmup': 10}))
    assert 'ademamix needs more than 9 steps' in note


def test_options_counted_in_steps_declare_it():
    """Such options are found by name or description, so that a new option is not forgotten."""
    rows = [row for choice in CHOICES.values() for row in choice.table.values()]
    declared = {name: d for row in rows for name, d in declared_options(row).items()}
    counted = {name for name, d in declared.items() if d.option.time_unit}
    named = {
        name
        for name, d in declared.items()
        if int in d.types and {'steps', 'updates'} & set(f'{name} {d.option.description}'.split())
    }
    schedule_options = {'warmup_steps', 'inverse_sqrt_steps'}
    basis_options = {
        'conda_every',
        'projection_every',
        'shampoo_every',
        'soap_every',
        'sophia_every',
    }
    period_options = {'ademamix_warmup', 'outer_every'}
    norm_options = {'warmup', 'removal_start', 'removal_gap'}
    assert counted == named == norm_options | schedule_options | basis_options | period_options
    assert {name for name in counted if f'norm.{name}' in FIELDS} == norm_options


@pytest.mark.full
def test_norm_study_reaches_warmups():
    """The part of the study to train again has the same runs, with the same names."""
    fitted = expand_sweep(*split_sweep(norm_placement_lr.get_config('fitted'))[:2])
    whole = expand_sweep(*split_sweep(norm_placement_lr.get_config())[:2])
    assert len(fitted) == 4 * 7 * 3 and len(whole) == 28 * 7 * 3
    assert {cell.name for cell in fitted} < {cell.name for cell in whole}
    assert not [
        note for cell in fitted for note in list_config_notes(cell.recipe) if 'causal' not in note
    ]


def test_field_origins_have_a_line_each():
    lines = [
        'changed from configs/default.py: optim.lr=1.0, train.steps=2',
        'from RUN: model.d_model=8',
    ]
    fields = {'optim.lr': 1.0, 'train.steps': 2}, {'model.d_model': 8}
    assert list_field_origins(*fields, 'RUN') == lines and list_field_origins({}, {}, '') == []
