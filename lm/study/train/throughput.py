"""Seconds that a step of each program takes, measured before a sweep trains.

WORKDIR/throughput.json: {'device': name, 'programs': {key: {'sec': seconds a step and run,
'runs': side by side}}}. A number is written once: the same command finds it again, on another
device too, as steps may follow from it.
"""

import hashlib
import statistics
import time
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from lm import data
from lm.config.recipe import Recipe
from lm.devices.mesh import process_share
from lm.launch.distributed import broadcast_from_first, is_first, is_multiprocess
from lm.launch.signals import interruptible
from lm.record.machine import device_name
from lm.run.program import Program
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
    """Measures the programs that WORKDIR/throughput.json lacks; returns {`key_of` a cell:
    seconds that a step takes of one run's time}.

    The programs are compiled for as many runs side by side as the groups have, and kept in
    `work.programs`, so that the runs which follow compile nothing. A program that cannot be
    compiled or run is left out: the error is that of its runs. Where several processes train each
    run together, all call this.

    Args:
      groups: runs that are about to train together, by program.
      work: where they train.
    """
    path, known = work.workdir / FILE, _read_measured(work)
    programs = dict(known['programs'])
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
        write_json(path, seal_record(known | {'programs': programs}))
    return {key: found['sec'] for key, found in programs.items()}


def read_throughput(work: Work) -> dict[str, float]:
    """Returns what has been measured so far, as `measure_throughput` does."""
    return {key: found['sec'] for key, found in _read_measured(work)['programs'].items()}


def _read_measured(work: Work) -> dict[str, Any]:
    """The content of throughput.json as process 0 reads it; nothing of a damaged one."""
    nothing = {'device': device_name(), 'programs': {}}
    if not is_first():
        return broadcast_from_first(None)
    try:
        found = read_json(work.workdir / FILE)
    except FileNotFoundError:
        found = nothing
    except UnreadableFile as error:
        work.say(f'NOTE: {error}. The steps are timed anew.')
        found = nothing
    return broadcast_from_first(found)


def measure_step_sec(program: Program, recipes: Sequence[Recipe], slots: int) -> float:
    """Returns the median time of a step, divided by the runs that make it side by side.

    program: that the recipes share. slots: runs of the compiled program; all of them are busy.
    Nothing is read or written but the text.
    """
    experiment = program.experiment
    used = [recipes[i % len(recipes)] for i in range(slots)]
    hypers, states = program.stack_hypers(used), program.make_buffer(slots)
    state = initial_state(used[0], experiment, discard_line)  # all have one of the same shapes
    for i in range(slots):
        states = program.put(states, state, i)
    batch = program.stack_batches([_first_batch(program, recipe.data.seed) for recipe in used])
    step, active, times = program.compile_step(slots), np.ones(slots, bool), []
    for _ in range(WARM_UP + STEPS):
        start = time.perf_counter()
        states, metrics = step(active, states, batch, hypers)
        jax.block_until_ready((states, metrics))
        times.append(time.perf_counter() - start)
    return broadcast_from_first(statistics.median(times[WARM_UP:]) / slots)


def _first_batch(program: Program, seed: int) -> data.Batch:
    """The share of this process of the first batch of an order."""
    experiment = program.experiment
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
