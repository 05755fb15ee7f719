"""Measures the seconds of a step of each program before a sweep trains.

WORKDIR/throughput.json: {'device': name, 'programs': {key: {'sec': seconds for each step and run,
'runs': concurrent runs}}}. A number is written once. The same command reads it again, also on
another device, since the number of steps may depend on it.
"""

import hashlib
import statistics
import time
from collections.abc import Sequence
from typing import Any, cast

import jax
import numpy as np

from lm import data
from lm.config.recipe import Recipe
from lm.devices.mesh import process_share
from lm.launch.distributed import broadcast_from_first, is_first, is_multiprocess
from lm.launch.signals import interruptible
from lm.record.machine import device_name
from lm.run.program import Experiment, Program
from lm.run.start import initial_state
from lm.storage.files import UnreadableFile, discard_line, read_json, seal_record, write_json
from lm.study.plan.cells import Cell, program_key
from lm.study.train.groups import Work, compile_program

FILE = 'throughput.json'
WARM_UP, STEPS = 1, 5


def program_digest(cell: Cell) -> str:
    """Returns the name of a cell's program, equal for all cells of one group."""
    return hashlib.blake2b(repr(program_key(cell)).encode(), digest_size=8).hexdigest()


def measure_throughput(groups: Sequence[Sequence[Cell]], work: Work) -> dict[str, float]:
    """Measures the programs that WORKDIR/throughput.json lacks.

    The programs are compiled for as many concurrent runs as the groups have, and kept in
    `work.programs`, so that later runs compile nothing. A program that cannot be compiled or run is
    left out, since its runs report the error. If several processes train each run together, all
    must call this.

    Args:
      groups: runs that will train together, by program.
      work: the work of the sweep.

    Returns:
      {`program_digest` of a cell: seconds of a step for one run}.
    """
    path, content = work.workdir / FILE, _read_measured(work)
    programs = dict(content['programs'])
    lacking = [group for group in groups if program_digest(group[0]) not in programs]
    for group in lacking:
        try:
            with interruptible(work.caught):
                program, slots = compile_program(group, work)
                sec = measure_step_sec(program, [cell.recipe for cell in group], slots)
        except Exception as error:  # of any kind: `train_group` meets it too, and records it
            if is_multiprocess():  # the others wait for this process
                raise
            work.say(f'NOTE: the steps of {program_digest(group[0])} could not be timed ({error})')
            continue
        programs[program_digest(group[0])] = {'sec': sec, 'runs': slots}
    if lacking and is_first():
        work.workdir.mkdir(parents=True, exist_ok=True)
        write_json(path, seal_record(content | {'programs': programs}))
    return {key: entry['sec'] for key, entry in programs.items()}


def read_throughput(work: Work) -> dict[str, float]:
    """Returns the measurements so far, in the form of `measure_throughput`."""
    return {key: entry['sec'] for key, entry in _read_measured(work)['programs'].items()}


def _read_measured(work: Work) -> dict[str, Any]:
    """Returns the content of throughput.json as process 0 reads it; no programs if it is
    damaged.
    """
    empty = {'device': device_name(), 'programs': {}}
    if not is_first():
        return broadcast_from_first(None)
    try:
        content = read_json(work.workdir / FILE)
    except FileNotFoundError:
        content = empty
    except UnreadableFile as error:
        work.say(f'NOTE: {error}. The steps will be timed again.')
        content = empty
    return broadcast_from_first(content)


def measure_step_sec(program: Program, recipes: Sequence[Recipe], slots: int) -> float:
    """Returns the median time of a step, divided by the number of concurrent runs.

    Reads and writes nothing but the text.

    Args:
      program: program that the recipes share.
      recipes: recipes of the runs; repeated if there are more slots.
      slots: runs of the compiled program; all of them are busy.

    Returns:
      Seconds of a step for one run.
    """
    experiment = cast(Experiment, program.experiment)  # a program that trains has text
    slot_recipes = [recipes[i % len(recipes)] for i in range(slots)]
    hypers, states = program.stack_hypers(slot_recipes), program.make_buffer(slots)
    # The states of all slots have the same shapes, so one serves for all.
    state = initial_state(slot_recipes[0], experiment, discard_line)
    for i in range(slots):
        states = program.put(states, state, i)
    batch = program.stack_batches(
        [_first_batch(program, recipe.data.seed) for recipe in slot_recipes]
    )
    # The median drops steps that other processes slow down; the first step warms up.
    step, active, times = program.compile_step(slots), np.ones(slots, bool), []
    for _ in range(WARM_UP + STEPS):
        start = time.perf_counter()
        # The step donates its states, so each call takes those of the call before.
        states, metrics = step(active, states, batch, hypers)
        # JAX dispatches asynchronously: the clock would otherwise stop before the step has run.
        jax.block_until_ready((states, metrics))
        times.append(time.perf_counter() - start)
    return broadcast_from_first(statistics.median(times[WARM_UP:]) / slots)


def _first_batch(program: Program, seed: int) -> data.Batch:
    """Returns this process's share of the first batch in the order of a seed."""
    experiment = cast(Experiment, program.experiment)
    index, count = process_share(experiment.mesh)
    return data.batch_at(
        experiment.dataset.train,
        0,
        batch_size=experiment.recipe.data.batch_size,
        seed=seed,
        transform=experiment.mixture,
        process_index=index,
        process_count=count,
    )
