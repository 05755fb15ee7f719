"""What train.py prints where it does not train: the parts there are, a config, a schedule."""

import sys
from typing import Any

from absl import flags

from eval.choices import listing
from lm.check import check
from lm.config import to_json
from lm.recipe import Recipe
from lm.run.schedule import schedule_listing
from lm.run.start import check_run
from lm.sweep.cells import cells

flags.disclaim_key_flags()  # those that are defined here are of the program that asks for them


def define_flags() -> None:
    """Flags that ask for something to read."""
    flags.DEFINE_flag(
        flags.Flag(  # boolean, so that it may stand alone: it is 'true' then
            flags.ArgumentParser(),
            None,
            'choices',
            None,
            'List all parts, or the options of some: --choices=model.norm.',
            boolean=True,
        )
    )
    flags.DEFINE_bool('print_config', False, 'Print the resolved config and stop.')
    flags.DEFINE_bool('print_schedule', False, 'Print the learning rate over the run and stop.')


def print_parts() -> bool:
    """Prints what --choices asks for; whether it does."""
    asked = flags.FLAGS.choices
    if asked is not None:
        print(listing(None if asked == 'true' else asked), end='')
    return asked is not None


def print_config(recipe: Recipe, base: dict[str, Any], sweep: Any) -> bool:
    """Prints what --print_config and --print_schedule ask for; whether one does.

    The config is checked first, and so is every cell of its sweep, which start from `base`.
    """
    of_config, of_schedule = flags.FLAGS.print_config, flags.FLAGS.print_schedule
    if not of_config and not of_schedule:
        return False
    (check_run if of_config else check)(recipe)
    found = [] if sweep is None else cells(base, sweep)
    if of_config:
        print(to_json(recipe), end='')
    if of_schedule:
        print(schedule_listing(recipe), end='')
    if found:
        print(f'{len(found)} cells start from this', file=sys.stderr)
    return True
