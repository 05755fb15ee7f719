"""Contract: each measure, at a size of seconds, yields as many numbers as it names. Reference:
measures that take seconds reproduce the numbers of the published board, which they would not if a
part of the product beneath them computed something else.
"""

import dataclasses
import math

import pytest

from eval.claims.claim import read_claims
from eval.claims.evidence import measure_digest
from eval.claims.lab import TUNING_SEEDS, Task, measure
from eval.claims.measures import classifiers
from eval.claims.measures.rows import MEASURES, MODULES
from lm.storage.files import read_json
from tests import ROOT

BOARD = ROOT / 'docs' / 'claims' / 'board.json'
TINY = Task(4, 8, 0.7, n_train=128, n_held_out=128)
TUNED = {'SEEDS': TUNING_SEEDS + 2}  # two are left after those that choose the rate
CLASSIFIER = {'RATES': (1e-3, 1e-2), 'WIDTH': 8} | TUNED
SIZES = {  # for measures with training loops; others have their own tests, or no size
    'wrong_labels': CLASSIFIER,
    'ranks': CLASSIFIER,
    'tries': CLASSIFIER,
    'rare_class': CLASSIFIER,
    'any_order_marginals': {'STEPS': (30, 3), 'COMPARED': 32},
    'balance_of_teachers': {'STEPS': 4, 'TEACHER': 8, 'STUDENT': 4},
    'bigrams': {'STEPS': 4, 'PAIRS': 64, 'BATCH': 4} | TUNED,
    'binary_accuracy': {'EPOCHS': 2, 'PERIOD': 1, 'WIDTH': 4, 'BATCH': 512} | TUNED,
    'forgetting': {'STEPS': 2, 'RATES': (1e-3,)} | TUNED,  # nothing is memorised, at no cost: 0 / 0
    'heads_of_students': {'STEPS': 4, 'LOOKS': 2, 'TEACHER': 8, 'STUDENT': 4},
    'imbalanced_collapse': {'STEPS': 30},
    'large_batches': {'TASK': TINY, 'WIDTH': 8} | TUNED,
    'norms_alone': {'TASK': TINY, 'RATES': (1e-3, 1e-2), 'HIDDEN': 2, 'WIDTH': 8} | TUNED,
    'one_step': {'STEPS': 4, 'PROMPTS': 16},
    'rescaled_rows': {'STEPS': 8, 'RATES': (1e-3,), 'TASK': Task(10, 30, 0.7, 64, 64), 'WIDTH': 8}
    | TUNED,
    'unlearned_points': {'HALVES': 200, 'MODELS': 4, 'AT_ONCE': 4, 'STEPS': 30} | TUNED,
}
SECONDS = ('attention_entropy', 'memory_of_optimizers', 'imbalanced_collapse')
SLOWER = ('self_normalizing', 'invariances', 'random_features')


def find_module(name):
    return next(
        module for module in MODULES if module.__name__ == MEASURES[name].function.__module__
    )


@pytest.mark.full
@pytest.mark.parametrize('name', SIZES)
def test_measure_yields_named_values(name, monkeypatch):
    module = find_module(name)
    for size, value in ({'SEEDS': 2} | SIZES[name]).items():
        monkeypatch.setattr(module, size, value)
    if module is classifiers:
        for training in ('WRONG_LABELS', 'A_RARE_CLASS', 'RANKS', 'SOME_TRIES'):
            original = getattr(module, training)
            task = dataclasses.replace(original.task, n_train=128, n_held_out=128)
            task = dataclasses.replace(task, rare=0.3 * bool(task.rare))
            tiny = dataclasses.replace(original, task=task, passes=4, batch=32)
            monkeypatch.setattr(module, training, tiny)
    estimates = MEASURES[name].compute()
    assert {estimate.n for estimate in estimates.values()} == {2}
    assert name == 'forgetting' or all(
        math.isfinite(estimate.value) for estimate in estimates.values()
    )


def test_claims_use_every_value(monkeypatch):
    """Catches a value that no claim uses. A value that no measure has is an error of its claim."""
    monkeypatch.chdir(ROOT)
    claimed = {
        (claim.studies[condition.study].removeprefix('measure:'), condition.of['value'])
        for claim in read_claims()
        for condition in (*claim.conditions, *claim.control, *claim.twin)
        if 'value' in condition.of
    }
    assert claimed == {
        (name, value) for name, measured in MEASURES.items() for value in measured.values
    }


def test_wrong_value_count_raises():
    @measure('one', 'two')
    def three():
        return 1.0, [1.0, 3.0], 2.0

    with pytest.raises(ValueError, match=r'three must return the 2 values .* returned 3'):
        three.compute()
    estimates = dataclasses.replace(three, values=('one', 'two', 'three')).compute()
    assert [(estimate.value, estimate.n) for estimate in estimates.values()] == [
        (1.0, 1),
        (2.0, 2),
        (2.0, 1),
    ]


def test_published_digests_are_current():
    """If this fails a measure has changed: run it again, and write the pages of its record."""
    rows = read_json(BOARD)['evidence']
    codes = {name: row['code'] for name, row in rows.items() if name.startswith('measure:')}
    assert codes == {f'measure:{name}': measure_digest(name) for name in MEASURES}


@pytest.mark.parametrize(
    'name', [*SECONDS, *(pytest.param(name, marks=pytest.mark.full) for name in SLOWER)]
)
def test_numbers_match_published_board(name, monkeypatch):
    """The product beneath a measure is not in its digest. The board has three digits."""
    monkeypatch.chdir(ROOT)
    estimates = MEASURES[name].compute()
    rows = read_json(BOARD)['claims']
    n_compared = 0
    for claim in read_claims():
        if f'measure:{name}' not in claim.studies.values():
            continue
        conditions = *claim.conditions, *claim.control, *claim.twin
        recorded = *rows[claim.name]['conditions'], *rows[claim.name]['guards']
        for condition, row in zip(conditions, recorded, strict=True):
            estimate = estimates[condition.of['value']]
            expected = [float(row['estimate'][key]) for key in ('value', 'low', 'high')]
            assert [estimate.value, estimate.low, estimate.high] == pytest.approx(
                expected, rel=1e-3, abs=6e-4
            )
            n_compared += 1
    assert n_compared >= len(MEASURES[name].values)
