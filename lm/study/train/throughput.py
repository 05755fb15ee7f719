"""Measures the time of a step, an evaluation and the compilation of each program before a sweep
trains.

WORKDIR/throughput.json: {'device': name, 'programs': {key: {'sec': seconds for each step and run,
'evaluation_sec': seconds for each evaluation and run, 'compile_sec': seconds of compilation,
'runs': concurrent runs}}}. A number is written once. The same command reads it again, also on
another device, since the number of steps may depend on it.
"""

import dataclasses
import hashlib
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any, cast

import jax
import numpy as np

from lm import data
from lm.config.recipe import Recipe
from lm.devices.mesh import process_share
from lm.launch.distributed import broadcast_from_first, is_first, is_multiprocess
from lm.launch.signals import interruptible
from lm.record.machine import device_name
from lm.run.evaluate import count_validation_batches, validation_batches
from lm.run.program import Experiment, Program
from lm.run.remaining import count_due
from lm.run.start import initial_state
from lm.storage.files import UnreadableFile, discard_line, read_json, seal_record, write_json
from lm.study.plan.cells import Cell, program_key
from lm.study.train.groups import Work, compile_program

FILE = 'throughput.json'
WARM_UP, STEPS = 1, 5


@dataclasses.dataclass(frozen=True)
class ProgramCost:
    """Measured times of a program, in seconds.

    Attributes:
      step_sec: a step of one run.
      evaluation_sec: an evaluation of one run; None if it was not measured.
      compile_sec: compiling the step and the evaluation; None if it was not measured.
    """

    step_sec: float
    evaluation_sec: float | None = None
    compile_sec: float | None = None

    def estimate_run_sec(self, recipe: Recipe) -> float:
        """Returns the seconds of a run with its evaluations, without compilation."""
        steps, interval = recipe.train.steps, recipe.train.eval_every
        evaluations = count_due(interval, 0, steps)
        # Steps of other stages take time in proportion to their tokens.
        share = recipe.mean_batch_tokens / (recipe.data.batch_size * recipe.data.seq_len)
        return self.step_sec * steps * share + (self.evaluation_sec or 0.0) * evaluations


def program_digest(cell: Cell) -> str:
    """Returns the name of a cell's program, equal for all cells of one group."""
    return hashlib.blake2b(repr(program_key(cell)).encode(), digest_size=8).hexdigest()


def measure_throughput(groups: Sequence[Sequence[Cell]], work: Work) -> dict[str, ProgramCost]:
    """Measures the programs that WORKDIR/throughput.json lacks.

    The programs are compiled for as many concurrent runs as the groups have, and kept in
    `work.programs`, so that later runs compile nothing. A program that cannot be compiled or run is
    left out, since its runs report the error. If several processes train each run together, all
    must call this.

    Args:
      groups: runs that will train together, by program.
      work: the work of the sweep.

    Returns:
      {`program_digest` of a cell: times of its program}.
    """
    path, content = work.workdir / FILE, _read_measured(work)
    programs = dict(content['programs'])
    lacking = [group for group in groups if program_digest(group[0]) not in programs]
    for group in lacking:
        try:
            with interruptible(work.caught):
                program, slots = compile_program(group, work)
                cost = measure_cost(program, [cell.recipe for cell in group], slots)
        except Exception as error:  # of any kind: `train_group` meets it too, and records it
            if is_multiprocess():  # the others wait for this process
                raise
            work.say(f'NOTE: the steps of {program_digest(group[0])} could not be timed ({error})')
            continue
        programs[program_digest(group[0])] = {
            'sec': cost.step_sec,
            'evaluation_sec': cost.evaluation_sec,
            'compile_sec': cost.compile_sec,
            'runs': slots,
        }
    if lacking and is_first():
        work.workdir.mkdir(parents=True, exist_ok=True)
        write_json(path, seal_record(content | {'programs': programs}))
    return _parse_costs(programs)


def read_throughput(work: Work) -> dict[str, ProgramCost]:
    """Returns the measurements so far, in the form of `measure_throughput`."""
    return _parse_costs(_read_measured(work)['programs'])


def _parse_costs(programs: dict[str, Any]) -> dict[str, ProgramCost]:
    # Files of an older version hold only the time of a step.
    return {
        key: ProgramCost(entry['sec'], entry.get('evaluation_sec'), entry.get('compile_sec'))
        for key, entry in programs.items()
    }


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


def measure_cost(program: Program, recipes: Sequence[Recipe], slots: int) -> ProgramCost:
    """Measures a step and a validation batch, and the compilation of both.

    Reads and writes nothing but the text.

    Args:
      program: program that the recipes share.
      recipes: recipes of the runs; repeated if there are more slots.
      slots: runs of the compiled program; all of them are busy.

    Returns:
      The times for one run.
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
    step, active = program.compile_step(slots), np.ones(slots, bool)
    validation_batch = next(validation_batches(experiment, experiment.dataset.validation))

    def train() -> Any:
        nonlocal states
        # The step donates its states, so each call takes those of the call before.
        states, metrics = step(active, states, batch, hypers)
        return states, metrics

    def evaluate() -> Any:
        return program.evaluate(validation_batch, active, states, hypers)

    _, step_sec = time_calls(train)
    first_sec, batch_sec = time_calls(evaluate)
    return broadcast_from_first(
        ProgramCost(
            step_sec / slots,
            batch_sec * count_validation_batches(experiment) / slots,
            program.compile_sec + first_sec - batch_sec,
        )
    )


def time_calls(function: Callable[[], Any]) -> tuple[float, float]:
    """Returns the seconds of the first call, which may compile, and the median of later calls.

    The median drops calls that other processes slow down.
    """
    times = []
    for _ in range(WARM_UP + STEPS):
        start = time.perf_counter()
        # JAX dispatches asynchronously: the clock would otherwise stop before the work is done.
        jax.block_until_ready(function())
        times.append(time.perf_counter() - start)
    return times[0], statistics.median(times[WARM_UP:])


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
