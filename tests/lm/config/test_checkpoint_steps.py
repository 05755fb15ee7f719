"""Reference tests of train.checkpoint_steps: the steps by hand, and against the schedule itself."""

import numpy as np
import pytest

from lm.config.checkpoint_steps import find_unreached, list_checkpoint_steps
from lm.model.check import check
from lm.run.tables import schedule_fractions
from tests.helpers import tiny_config

WSD_S = 'rest constant, 10% linear to 0, rest constant 1, 10% linear to 0'


def list_steps(text: str, steps: int = 20, **optim) -> list[int]:
    changes = {f'optim.{name}': value for name, value in optim.items()}
    recipe = tiny_config({'train.checkpoint_steps': text, 'train.steps': steps} | changes)
    return sorted(list_checkpoint_steps(recipe))


@pytest.mark.parametrize(
    ('text', 'steps', 'expected'),
    [
        ('', 20, []),
        ('log', 20, [0, 1, 2, 4, 8, 16]),
        ('log', 2500, [0, *(2**i for i in range(10)), 1000, 2000]),
        ('log', 1000, [0, *(2**i for i in range(10)), 1000]),
        ('7,3', 20, [3, 7]),
        ('0 + 3, 400', 20, [0, 3]),
        ('every:8+1', 20, [1, 8, 16]),
    ],
)
def test_steps_are_listed(text, steps, expected):
    assert list_steps(text, steps) == expected


@pytest.mark.parametrize(
    ('steps', 'optim', 'expected'),
    [
        (50, {'schedule': 'warmup_stable_decay', 'decay_fraction': 0.2}, [40]),
        (10, {'schedule': 'warmup_stable_decay', 'decay_fraction': 0.3}, [7]),
        (600, {'schedule': 'warmup_stable_decay', 'decay_fraction': 0.333333}, [400]),
        (105, {'schedule': 'stages', 'stages': WSD_S, 'warmup_steps': 5}, [45, 95]),
        (
            100,
            {'schedule': 'stages', 'stages': 'rest constant, 10% linear to 0.5, 10% sqrt to 0'},
            [80],
        ),
        (
            30,
            {'schedule': 'stages', 'stages': '10 linear 0 to 1, 10 constant, 10 constant 0.1'},
            [20],
        ),
    ],
)
def test_decays_begin_after_their_checkpoint(steps, optim, expected):
    """The rate of the next step is lower, and that of the step before is not: by the schedule."""
    assert list_steps('before_decay', steps, **optim) == expected
    changes = {f'optim.{name}': value for name, value in optim.items()}
    rates = schedule_fractions(tiny_config({'train.steps': steps} | changes), np.arange(1, steps))
    falls = rates[1:] < rates[:-1] - 1e-4  # at [n - 1]: update n + 1 is smaller than update n
    begins = falls & ~np.concatenate([[False], falls[:-1]])
    assert [int(n) for n in np.flatnonzero(begins) + 1] == expected


def test_schedules_and_steps_are_joined():
    wsd = {'schedule': 'warmup_stable_decay', 'decay_fraction': 0.25}
    assert list_steps('log+before_decay+19', 20, **wsd) == [0, 1, 2, 4, 8, 15, 16, 19]
    assert find_unreached(tiny_config({'train.checkpoint_steps': 'log,9,30'})) == [30]


@pytest.mark.parametrize(
    ('text', 'reason'),
    [
        ('lgo', "Did you mean 'log'"),
        ('-3', 'steps from 0 on'),
        ('1.5', 'steps from 0 on'),
        ('5,', "got ''"),
        ('every:0', 'every needs a number of steps above 0'),
        ('every', "got 'every'"),
        ('before_decay', r'constant stage before a decay.*stages or warmup_stable_decay'),
    ],
)
def test_other_texts_are_refused(text, reason):
    with pytest.raises(ValueError, match=f'train.checkpoint_steps.*{reason}'):
        check(tiny_config({'train.checkpoint_steps': text, 'optim.schedule': 'linear'}))
