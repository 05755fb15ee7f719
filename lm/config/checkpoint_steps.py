"""The steps of train.checkpoint_steps: checkpoints that stay until somebody deletes them.

    log            0, 1, 2, 4, ..., 512, then every 1000 steps, as Pythia (arXiv:2304.01373)
    before_decay   the last step before each decay of the schedule, as WSD-S (arXiv:2410.05192)
    every:N        every N steps, from N on
    100            one step; 0 is the state before the first step

They are joined by + or commas: 'log+before_decay+1500'.
"""

import re

from lm.config.fields import SCHEDULES
from lm.config.recipe import Recipe
from modules.choices import suggest_nearest

FIELD = 'train.checkpoint_steps'
LOG, BEFORE_DECAY, EVERY = 'log', 'before_decay', 'every'
LAST_POWER = 9  # of two, in `log`: 512
LOG_INTERVAL = 1000  # from there on
EXAMPLE = 'log+before_decay+1500'


def list_checkpoint_steps(recipe: Recipe) -> frozenset[int]:
    """Returns the steps up to train.steps at which the run keeps a checkpoint for good.

    Raises ValueError for text of another form, and for `before_decay` with a schedule that has no
    constant stage before its decay.
    """
    text, steps = recipe.train.checkpoint_steps, recipe.train.steps
    if not text:
        return frozenset()
    listed: set[int] = set()
    for entry in re.split(r'[+,]', text):
        listed |= _parse_entry(entry.strip(), recipe)
    return frozenset(step for step in listed if step <= steps)


def find_unreached(recipe: Recipe) -> list[int]:
    """Returns the single steps of train.checkpoint_steps that lie beyond the run."""
    entries = re.split(r'[+,]', recipe.train.checkpoint_steps)
    numbers = sorted({int(entry) for entry in entries if entry.strip().isdecimal()})
    return [step for step in numbers if step > recipe.train.steps]


def _parse_entry(entry: str, recipe: Recipe) -> set[int]:
    steps = recipe.train.steps
    if entry == LOG:
        powers = {2**power for power in range(LAST_POWER + 1)}
        return {0, *powers, *range(LOG_INTERVAL, steps + 1, LOG_INTERVAL)}
    if entry == BEFORE_DECAY:
        return _list_decay_starts(recipe)
    if entry.isdecimal():
        return {int(entry)}
    name, _, interval = entry.partition(':')
    if name == EVERY and interval.isdecimal() and int(interval) > 0:
        return {*range(int(interval), steps + 1, int(interval))}
    if name == EVERY:
        raise ValueError(
            f'{FIELD}: {EVERY} needs a number of steps above 0, as in {EVERY}:500; got {entry!r}.'
        )
    hint = suggest_nearest(entry, (LOG, BEFORE_DECAY)) if entry else ''
    raise ValueError(
        f'{FIELD} must be steps from 0 on, {LOG}, {BEFORE_DECAY} or {EVERY}:N, joined by + or '
        f'commas, such as {EXAMPLE}; got {entry!r} in {recipe.train.checkpoint_steps!r}.{hint}'
    )


def _list_decay_starts(recipe: Recipe) -> set[int]:
    schedule = recipe.schedule
    if schedule.row.decay_starts is None:
        names = ' or '.join(name for name, row in SCHEDULES.items() if row.decay_starts)
        raise ValueError(
            f'{FIELD}={recipe.train.checkpoint_steps}: {schedule} has no constant stage before a '
            f'decay, and {BEFORE_DECAY} needs one. Choose optim.schedule={names}, or name the '
            'steps.'
        )
    return {*schedule.row.decay_starts(recipe.train.steps, **schedule.options)}
