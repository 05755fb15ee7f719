"""Trains the run or the sweep that a config describes. The same command resumes it.

    python train.py --config=configs/default.py [--config.SECTION.FIELD=VALUE ...] [--workdir=DIR]
    python train.py --config=configs/default.py --config.sweep="{'optim.lr': (1e-3, 3e-3)}"

--workdir=DIR               folder of the run, or gs:// or s3://BUCKET/PATH; default: runs/NAME-HASH
--choices[=FIELD[=NAME]]    list all parts, the parts and options of one field, or one part
--print_config              print all fields and their values; --print_schedule: the learning rates;
    --print_parameters: the shape, learning rate, decay and sharding of each parameter
--continue_changed          continue the run in the workdir although its config or data has changed
--start_over                start again at step 1 if all checkpoints of the run are lost
--track=mlflow[,wandb]      also send the metrics to these trackers
--json                      print the outcome as JSON in the last line
--engine=local|ray          where a sweep trains; --runs_at_once=N: maximum runs at once;
    --resources=CPU=2: resources of each Ray task
--coordinator=HOST:PORT --num_processes=N --process_id=I    train on several hosts: run the same
    command on each with its own process_id. Leave these out under SLURM, Open MPI or on a TPU pod.
    --host_timeout=SECONDS: how long to wait for all hosts; --watch_port=PORT: if the port after
    that of --coordinator is taken; --job_secret_file=FILE: for hosts without a shared disk

Exit status: 0 done; 1 bad input or a failed cell; 2 diverged (in a sweep this is a result, and no
error); 128 + n stopped by signal n after a checkpoint; 42 another host was lost or did not start:
run the same command again.
"""

from lm.launch import before_jax
from lm.launch.supervisor import supervise_if_several

if __name__ == '__main__':
    before_jax.prepare_streams()  # all of this before JAX is imported
    before_jax.print_help()
    supervise_if_several()
    before_jax.prepare_process()

import contextlib
import functools
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from absl import app

from eval.console import json_line, listings
from lm.config.recipe import Recipe
from lm.config.resolve import digest, resolve, with_dtype
from lm.launch import command, distributed, signals, streams, tracking
from lm.launch.exit_status import BAD_INPUT, DIVERGED, DONE, SIGNALLED  # noqa: F401
from lm.record.remote.mirror import mirror_workdir
from lm.record.time_use import DATA, Preparation, process_start
from lm.record.workdir import open_workdir
from lm.run import runs, start, suites, time_budget
from lm.run.describe import format_memory, list_field_origins, print_description
from lm.run.program import Experiment, Program, open_text
from lm.run.wave import Wave, closing
from lm.study.plan import branches, cells
from lm.study.train import engines

CONFIG = command.define_config()
WORKDIR, CONTINUE_CHANGED, START_OVER = command.define_run()
listings.define_flags()  # to print, and not to train: --choices, --print_config, ...
engines.define_flags()  # of sweeps: --engine, --runs_at_once, --resources
distributed.define_flags()  # of several hosts: --coordinator, --num_processes, --process_id, ...
tracking.define_flags()  # --track
JSON = json_line.define_json()


def check_suites(recipe: Recipe) -> None:
    """Raises ValueError if a suite of eval.suites, or an option of it, is wrong."""
    # Imported only for runs that have suites, because SciPy takes time to import.
    from eval.evaluation import during_training

    during_training.check(recipe)


def open_suites(experiment: Experiment) -> Mapping[str, suites.Evaluate]:
    """Returns the suites of eval.suites with their data, by their names in records."""
    from eval.evaluation import during_training

    return during_training.open_suites(experiment)


SUITES = suites.SuiteLoader(check_suites, open_suites)


def main() -> int:
    """Reads the config of the flags, and trains it, or prints what the flags ask for."""
    if listings.print_parts():
        return DONE
    if CONFIG.value is None:
        raise app.UsageError('--config=PATH is needed, such as --config=configs/default.py')
    config_dict = CONFIG.value.to_dict()
    set_fields = command.find_set_fields(config_dict)
    merged, followed = start.merge_source_model(config_dict, set_fields, WORKDIR.value)
    merged = branches.follow_parents(merged, set_fields, WORKDIR.value)
    base, sweep, tune = cells.split_sweep(with_dtype(merged, engines.worker_dtype()))
    recipe, is_sweep = resolve(base), (sweep, tune) != (None, None)
    if listings.print_config(recipe, base, sweep, tune):
        return DONE
    if advice := before_jax.missing_plugin_advice():
        raise ValueError(advice)
    streams.ignore_output_loss()
    place = WORKDIR.value or command.default_workdir(recipe, '-sweep' * is_sweep)
    options = engines.read_sweep_flags(is_sweep)
    trackers = tracking.read_track_flag()
    options |= {'trackers': trackers, 'tune': tune}
    again = CONTINUE_CHANGED.value, START_OVER.value
    source = recipe.train.branch_from or recipe.train.init_from
    notes = list_field_origins(command.find_overrides(config_dict), followed, source)
    if is_sweep:
        status = train_sweep(base, sweep, place, again[0], notes, start_over=again[1], **options)
        return report_json(place, status)
    distributed.join(digest(recipe))
    # A bucket is complete only when its block ends; `ending` prints the run's last line after that.
    with contextlib.ExitStack() as ending, mirror_workdir(place) as workdir:
        options = {'trackers': trackers, 'ending': ending, 'began': process_start()}
        status = train(recipe, workdir, *again, notes, **options)
    return report_json(place, status)


def report_json(place: str | Path, status: int) -> int:
    """Prints the results of --json, if it is set, and returns the exit status."""
    if JSON.value and distributed.is_first():
        from eval.runs import summarize_runs  # imports Arrow

        runs_here = summarize_runs(place)
        record = {'workdir': str(place), 'exit_status': status, 'runs': runs_here}
        json_line.print_json(record)
    return status


def train(
    recipe: Recipe,
    workdir: Path,
    continue_changed: bool = False,
    start_over: bool = False,
    notes: Sequence[str] = (),
    trackers: Sequence[str] = (),
    ending: contextlib.ExitStack | None = None,
    began: float | None = None,
) -> int:
    """Trains to config.train.steps, from the newest checkpoint if there is one.

    With config.train.seconds, the time of a step determines train.steps before the first one.

    Args:
      recipe: the resolved config.
      workdir: folder of the run.
      continue_changed: whether to continue a run that had another config or other data.
      start_over: whether to begin at step 1 if all checkpoints of the run are lost.
      notes: lines to print first.
      trackers: trackers that receive the rows.
      ending: prints the last line when it closes; by default it is printed at once.
      began: when the command began, in seconds since the epoch; by default now.

    Returns:
      The exit status.
    """
    preparation = Preparation(began)
    runs.check(recipe, workdir)
    recipe = time_budget.follow_begun(recipe, workdir)
    suites.check_suites(recipe, SUITES)
    terminal = runs.open_terminal()
    say_last = functools.partial(ending.callback, terminal.say) if ending else terminal.say
    with open_workdir(workdir, recipe, continue_changed, terminal.say):
        for line in (runs.format_header(workdir), *notes):
            terminal.say(line)
        # Data: the text as rows of tokens, prepared once, if there is a place for checkpoints.
        runs.try_storage(recipe, workdir)
        with preparation.time_part(DATA):
            dataset = open_text(recipe, terminal.say, workdir)
        # Mesh: the model and its optimizer laid over the devices, and the step that trains it.
        experiment = Experiment(recipe, dataset, terminal.say, suite_loader=SUITES)
        program = Program(experiment, say=terminal.say)
        recipe = time_budget.fit_steps(recipe, program, workdir, terminal.say)
        # State: of the newest checkpoint, or of step 0. A run alone is a wave of one.
        run = runs.RunSpec(recipe, workdir, terminal, continue_changed, start_over, preparation)
        with closing(Wave(program, [run], size=1)) as wave:
            (slot,) = wave.slots
            print_description(slot.journal)
            if slot.journal.is_finished:
                return runs.report_finished(slot, say_last)
            wave.compile()
            terminal.say(format_memory(experiment, program))
            with (
                tracking.send_to_trackers(workdir, trackers, terminal.say),
                terminal.show_progress(recipe.train.steps, slot.journal.step),
                signals.catch_signals() as caught,
            ):
                # Steps, with evaluations, diagnoses and checkpoints where they are due.
                wave.train(caught)
            # Only now, after the trackers' last lines: how it ended must be the last line.
            return runs.report_exit(slot, caught, say_last)


def train_sweep(
    base: dict[str, Any],
    sweep: Any,
    workdir: str | Path,
    continue_changed: bool = False,
    notes: Sequence[str] = (),
    engine: str = 'local',
    **work_options: Any,
) -> int:
    """Trains the cells that have not ended yet.

    Args:
      base: the config that all cells start from, as nested dicts.
      sweep: config.sweep.
      workdir: folder of the sweep, or its URL in a bucket.
      continue_changed: whether to continue a sweep from another base in the folder.
      notes: lines to print first.
      engine: a name of `engines.ENGINES`.
      **work_options: further arguments of `engines.train_sweep`.

    Returns:
      The exit status.
    """

    def report(folder: Path) -> str:
        # Imported at the end, because Altair and SciPy take time to import.
        from eval.report.page import write_report

        lines: list[str] = []
        page = write_report(folder, say=lines.append)
        return '\n'.join([*lines, str(page)])

    arguments = base, sweep, workdir, continue_changed, engine, report, notes
    return engines.train_sweep(*arguments, suite_loader=SUITES, **work_options)


if __name__ == '__main__':
    app.run(command.run_trainer(main), flags_parser=command.parse_flags)
