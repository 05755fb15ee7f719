"""Estimates memory, speed and cost of a training on chips that you do not have.

    python -m tpu.plan --config=configs/llama_8b.py --topology=v6e:16x16 [--slices=2]
        [--config.mesh.fsdp=16 ...] [--search] [--price=2.7] [--out=plan.json] [--figure=plan.html]

Compiles the training step of train.py, with its kernels and shardings, for a topology: a slice of
v4, v5e, v5p, v6e or tpu7x with its shape in chips; the GPUs of one host, such as h100:8; or `here`,
the devices of this machine. Prints the memory per device, the communication between devices, the
step time and its lower bound. If the step does not fit, compiles changes that may help. --search
compiles meshes, remat policies and microbatches, and ranks them. With config.train.stages, compiles
and prints the step of each stage.

With config.sweep, prints how many runs fit a chip, and the total chip-hours. With config.tune,
prints the chip-hours of one wave and of the whole search.

Reads no text, trains nothing, and needs no chip. Exit status: 0 if the step fits, 1 for bad input,
3 if the step does not fit.
"""

import sys

from lm.launch.before_jax import default_dtype, prepare_process
from tpu.environment import HERE, prepare_environment

if __name__ == '__main__':
    # Before JAX is imported.
    if any(flag.lstrip('-') == f'topology={HERE}' for flag in sys.argv):
        prepare_process()
    else:
        prepare_environment()

import textwrap
from collections.abc import Sequence
from pathlib import Path

from absl import flags
from ml_collections import config_flags
from rich.console import Console

from lm.config.recipe import Recipe
from lm.config.resolve import resolve, with_dtype
from lm.launch.command import define_config, parse_flags, run_program
from lm.launch.path_flags import define_path
from lm.model.check import check
from lm.run.describe import describe_unfitted
from lm.run.stage_table import stage_rows
from lm.run.tables import make_table
from lm.storage.files import check_output, write_json
from lm.study.plan.cells import split_sweep
from tpu.chips import open_topology
from tpu.compiled_step import (
    DoesNotFit,
    StepEstimate,
    build_blueprint,
    compile_step,
    estimate_step,
    format_summary,
    split_stages,
)
from tpu.sweep_plan import plan_sweep
from tpu.trials import Trial, search, try_changes

DOES_NOT_FIT = 3
# Columns of --search for terminals that cannot show all.
NARROW_COLUMNS = ('', 'GiB', 'step, ms', 'MFU')
ENDINGS = ('.html', '.png', '.svg')  # of --figure
CONFIGURED = 'the config'

CONFIG = define_config()
TOPOLOGY = flags.DEFINE_string(
    'topology', None, 'Chips and shape, such as v5p:4x4x4 or h100:8; or here.'
)
SLICES = flags.DEFINE_integer('slices', 1, 'Number of TPU slices; mesh.data spans them.')
SEARCH = flags.DEFINE_bool(
    'search', False, 'Compile and rank meshes, remat policies and microbatches.'
)
TRIES = flags.DEFINE_integer(
    'tries', 8, 'Number of programs that --search compiles.', lower_bound=1
)
PRICE = flags.DEFINE_float('price', None, 'Price per chip-hour, in any currency.', lower_bound=0)
OUT = define_path('out', None, 'Write all numbers to this JSON file.', is_local=True)
FIGURE = define_path(
    'figure',
    None,
    'Write a page (.html) or its figure (.png, .svg) to this file.',
    is_local=True,
    endings=ENDINGS,
)


def main(_) -> None:
    """Prints the plan, and writes it to files. Exits with DOES_NOT_FIT if nothing fits."""
    figure = FIGURE.value and Path(FIGURE.value)
    if OUT.value:
        check_output(Path(OUT.value), '--out')
    dtype = default_dtype() if TOPOLOGY.value == HERE else 'bfloat16'
    base, sweep, tune = split_sweep(with_dtype(CONFIG.value.to_dict(), dtype))
    if SEARCH.value and (sweep, tune) != (None, None):
        section = 'config.sweep' if sweep is not None else 'config.tune'
        raise ValueError(
            f'--search plans a single run, but the config has {section}. Leave --search out, or '
            f'leave {section} out of the config.'
        )
    recipe = resolve(base)
    check(recipe)
    if recipe.train.stages is not None and (SEARCH.value or (sweep, tune) != (None, None)):
        raise ValueError(
            f'--search and sweeps plan one step, but the steps of train.stages='
            f'{recipe.train.stages} differ. Plan the run alone, or leave train.stages out.'
        )
    assert TOPOLOGY.value is not None  # a required flag
    topology = open_topology(TOPOLOGY.value, SLICES.value)
    console = Console(highlight=False, soft_wrap=True)
    say = Console(stderr=True, highlight=False, soft_wrap=True).print
    if (sweep, tune) == (None, None):  # `plan_sweep` says it of a sweep
        for line in describe_unfitted(recipe):
            say(line)
    config, fits, notes = config_flags.get_config_filename(flags.FLAGS['config']), True, []
    if (sweep, tune) != (None, None):
        plan = plan_sweep(base, sweep, topology, say, PRICE.value, tune)
        lines, record = list(plan.format_lines()), plan.record()
        *notes, verdict = lines
        trials = {group.name: Trial.from_estimate({}, group.estimate) for group in plan.groups}
    elif SEARCH.value:
        ranked = search(recipe, topology, say, TRIES.value, PRICE.value)
        lines = []
        print_trials(console, ranked)
        record = {'tried': [trial.record() for trial in ranked]}
        trials = {trial.label: trial for trial in ranked}
        n_fitting = sum(trial.estimate is not None for trial in ranked)
        fits, verdict = n_fitting > 0, f'{n_fitting} of {len(ranked)} fit'
        if fits:
            fastest = ranked[0].estimate
            assert fastest is not None  # trials that fit are ranked first
            verdict += f'. Fastest: {ranked[0].label}; {format_summary(fastest)}'
            notes = lines = [fastest.format_kernels()]
    else:
        try:
            plans = [
                estimate_step(compile_step(b, topology, program=config), topology, PRICE.value)
                for b in split_stages(build_blueprint(recipe, topology, say))
            ]
            plan = max(plans, key=lambda plan: plan.memory_needed)
            lines, record = list(plan.format_lines()), {'fits': True} | plan.record()
            if recipe.train.stages is not None:
                lines = describe_stages(recipe, plans)
                record = {'fits': True, 'stages': [plan.record() for plan in plans]}
            notes, verdict = lines, f'Fits: {format_summary(plan)}'
            trials = {CONFIGURED: Trial.from_estimate({}, plan)}
        except DoesNotFit as error:
            fits, lines, verdict = False, [], f'Does not fit: a step {error}'
            print_line(console, f'{topology.label}: does not fit. A step {error}.')
            trials = {CONFIGURED: Trial({}, needed=error.needed, available=error.available)}
            for trial in try_changes(recipe, topology, say):
                notes.append(trial.format_line())
                print_line(console, f'  {notes[-1]}')
                trials[trial.label] = trial
            records = [trial.record() for trial in list(trials.values())[1:]]
            record = {
                'fits': False,
                'needed': error.needed,
                'there': error.available,
                'tried': records,
            }
    for line in lines:
        print_line(console, line)
    if OUT.value:
        write_json(Path(OUT.value), record)
    if figure:
        from tpu.figures import write_plan  # it brings Altair

        write_plan(figure, f'{config} on {topology.label}', trials, verdict, not fits, notes)
    if not fits:
        sys.exit(DOES_NOT_FIT)


def describe_stages(recipe: Recipe, plans: Sequence[StepEstimate]) -> list[str]:
    """Returns the lines of the plan of each stage of a run, and of the whole run."""
    lines, seconds = [], 0.0
    for row, plan in zip(stage_rows(recipe), plans, strict=True):
        lines += [f'stage {row["stage"]}: steps {row["steps"]}, batches of {row["batch"]} tokens']
        lines += [f'  {line}' for line in plan.format_lines()]
        seconds += plan.steps * plan.step_seconds
    return [*lines, f'all stages: {recipe.train.steps:,} steps, {seconds / 3600:,.1f} hours']


def print_line(console: Console, line: str) -> None:
    """Prints a line, on a terminal with its continuation indented."""
    if console.is_terminal:
        indent = ' ' * (len(line) - len(line.lstrip()) + 2)
        wrapper = textwrap.TextWrapper(
            console.width, '', indent, break_long_words=False, break_on_hyphens=False
        )
        line = wrapper.fill(line)
    console.print(line, markup=False)


def print_trials(console: Console, trials: list[Trial]) -> None:
    """Prints the table of a search; a narrow terminal gets fewer columns."""
    rows = []
    for trial in trials:
        outcome = 'refused' if trial.refusal else 'does not fit'
        rows.append(trial.table_row() | ({} if trial.estimate else {'limited by': outcome}))
    table, unlimited = (
        make_table(rows),
        console.options.update(width=1000),
    )  # no limit in a file or pipe
    width = console.measure(table, options=unlimited).maximum
    if console.is_terminal and width > console.width:
        for row in rows:
            row['step, ms'] = row['limited by'] if row['step, ms'] == '-' else row['step, ms']
        table = make_table([{name: row[name] for name in NARROW_COLUMNS} for row in rows])
    else:
        console.width = max(console.width, width)
    console.print(table)


if __name__ == '__main__':
    flags.mark_flags_as_required(['config', 'topology'])
    run_program(main, parse_flags)
