"""Reference: the learning rate over a run as text, against the schedule's closed form."""

import numpy as np
import pytest

from lm.run.tables import ROWS, find_corners, format_schedule, schedule_fractions
from tests.helpers import checked_config

STABLE = {'optim.schedule': 'warmup_stable_decay', 'optim.warmup_steps': 10, 'optim.lr': 0.04}


def table(changes):
    """Returns (names of the columns, rows of numbers, lengths of the bars)."""
    _, head, *lines = format_schedule(checked_config(changes)).splitlines()
    names = head.split()
    cells = [line.replace(',', '').split() for line in lines]
    numbers = np.array([line[: len(names)] for line in cells], float)
    return names, numbers, [line.count('#') for line in lines]


def test_rates_step_by_step():
    """Steps count from 1 to the last. Catches a rate that is a step off, or has another peak."""
    changes = {'optim.schedule': 'linear', 'train.steps': 5, 'optim.lr': 0.04}
    names, numbers, bars = table(changes | {'optim.others_lr': 0.01})
    assert names == ['step', 'lr', 'others_lr']
    np.testing.assert_array_equal(numbers[:, 0], [1, 2, 3, 4, 5])
    np.testing.assert_allclose(numbers[:, 1], [0.032, 0.024, 0.016, 0.008, 0], rtol=1e-3)
    np.testing.assert_allclose(numbers[:, 2], numbers[:, 1] / 4, rtol=1e-3)
    assert bars == [32, 24, 16, 8, 0]


@pytest.mark.parametrize('steps', [1000, 3_000_000])
def test_long_run_has_few_rows(steps):
    names, numbers, _ = table(STABLE | {'train.steps': steps})
    assert names == ['step', 'lr'] and ROWS <= len(numbers) <= ROWS + 3
    assert (numbers[0, 0], numbers[-1, 0]) == (1, steps)
    np.testing.assert_allclose(numbers[[0, -1], 1], [0.004, 0], rtol=1e-3)


def test_corners_are_listed():
    """The last step of the warmup and the last at the peak; a curve has no corners."""
    config = checked_config(STABLE | {'train.steps': 1000})
    assert list(find_corners(schedule_fractions(config, np.arange(1, 1001)))) == [10, 800]
    assert {10, 800} <= set(table(STABLE | {'train.steps': 1000})[1][:, 0])
    t = np.linspace(0, 1, 1000)
    for curve in (t, t**2, np.cos(np.pi * t), np.exp(-t), np.ones(1000)):
        assert len(find_corners(curve)) == 0
    assert len(find_corners(np.arange(1000) % 2)) == 0  # too many to list
    assert len(find_corners(np.ones(1))) == len(find_corners(np.ones(2))) == 0
