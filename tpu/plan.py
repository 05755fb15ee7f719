"""Plans a training on a pod that nobody holds, with the compiler of its chips.

    python -m tpu.plan --config=configs/llama_8b.py --topology=v6e:16x16 [--slices=2]
        [--config.mesh.fsdp=16 ...] [--search] [--price=2.7] [--out=plan.json] [--figure=plan.html]

Compiles the very step that train.py runs, kernels and shardings included, for the topology: chips
of v4, v5e, v5p, v6e or tpu7x by the shape of a slice, h100:8 and other GPUs of one host, or `here`.
Prints what a device holds, what devices send each other, and how long a step takes, beside the
shortest that it can. Where the step does not fit, changes that may help are compiled. --search
compiles meshes, remat policies and microbatches, and ranks them. With config.sweep: how many runs
fit a chip, and the chip-hours of all; with config.tune those of a wave, and of the waves that it
takes. No text is read, nothing is trained, and no chip is looked
for. Exit status 0 where the step fits, 1 for bad input, 3 where it does not fit.
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

from pathlib import Path

from absl import app, flags
from ml_collections import config_flags
from rich.console import Console

from lm.config.resolve import resolve, with_dtype
from lm.launch.command import define_config, parse_flags, run_main
from lm.launch.path_flags import define_path
from lm.launch.terminal import LOG_WIDTH
from lm.model.check import check
from lm.run.tables import make_table
from lm.storage.files import write_json
from lm.study.plan.cells import split_sweep
from tpu.chips import open_topology
from tpu.compiled_step import (
    DoesNotFit,
    build_blueprint,
    compile_step,
    estimate_step,
    format_summary,
)
from tpu.sweep_plan import plan_sweep
from tpu.trials import Trial, search, try_changes

DOES_NOT_FIT = 3
ENDINGS = ('.html', '.png', '.svg')  # of --figure
GIVEN = 'as given'

CONFIG = define_config()
TOPOLOGY = flags.DEFINE_string('topology', None, 'Chips and their shape: v5p:4x4x4, h100:8, here.')
SLICES = flags.DEFINE_integer('slices', 1, 'Number of slices of TPUs, which data crosses.')
SEARCH = flags.DEFINE_bool('search', False, 'Try meshes, remat policies and microbatches.')
TRIES = flags.DEFINE_integer('tries', 8, 'Programs that --search compiles.', lower_bound=1)
PRICE = flags.DEFINE_float('price', None, 'Price of a chip-hour, in any currency.', lower_bound=0)
OUT = define_path('out', None, 'JSON file to write.')
FIGURE = define_path('figure', None, 'Page (.html) or figure (.png, .svg) to write.')


def main(_) -> None:
    figure = FIGURE.value and Path(FIGURE.value)
    if figure and figure.suffix not in ENDINGS:
        raise ValueError(f'--figure ends in {", ".join(ENDINGS)}; got {figure}')
    dtype = default_dtype() if TOPOLOGY.value == HERE else 'bfloat16'
    base, sweep, tune = split_sweep(with_dtype(CONFIG.value.to_dict(), dtype))
    recipe = resolve(base)
    check(recipe)
    topology = open_topology(TOPOLOGY.value, SLICES.value)
    console = Console(highlight=False, soft_wrap=True)
    say = Console(stderr=True, highlight=False, soft_wrap=True).print
    fits, notes = True, []
    if (sweep, tune) != (None, None):
        found = plan_sweep(base, sweep, topology, say, PRICE.value, tune)
        lines, record = list(found.format_lines()), found.record()
        *notes, verdict = lines
        trials = {group.name: Trial.from_estimate({}, group.estimate) for group in found.groups}
    elif SEARCH.value:
        console.width = max(console.width, LOG_WIDTH)  # a narrow terminal wraps what it cannot show
        rows = search(recipe, topology, say, TRIES.value, PRICE.value)
        lines = [make_table([row.table_row() for row in rows])]
        record = {'tried': [row.record() for row in rows]}
        trials = {row.label: row for row in rows}
        number = sum(row.estimate is not None for row in rows)
        fits, verdict = number > 0, f'{number} of {len(rows)} fit'
        if fits:
            verdict += f'; the fastest is {rows[0].label}: {format_summary(rows[0].estimate)}'
    else:
        try:
            made = build_blueprint(recipe, topology, say)
            found = estimate_step(compile_step(made, topology), topology, PRICE.value)
            lines, record = list(found.format_lines()), {'fits': True} | found.record()
            notes, verdict = lines, f'Fits: {format_summary(found)}'
            trials = {GIVEN: Trial.from_estimate({}, found)}
        except DoesNotFit as error:
            fits, lines, verdict = False, [], f'Does not fit: a step {error}'
            console.print(f'{topology.label}: does not fit. A step {error}.')
            trials = {GIVEN: Trial({}, needed=error.needed, available=error.available)}
            for row in try_changes(recipe, topology, say):
                notes.append(row.format_line())
                console.print(f'  {notes[-1]}')
                trials[row.label] = row
            tried = [row.record() for row in list(trials.values())[1:]]
            record = {
                'fits': False,
                'needed': error.needed,
                'there': error.available,
                'tried': tried,
            }
    for line in lines:
        console.print(line)
    if OUT.value:
        write_json(Path(OUT.value), record)
    if figure:
        from tpu.figures import write_plan  # it brings Altair

        config = config_flags.get_config_filename(flags.FLAGS['config'])
        write_plan(figure, f'{config} on {topology.label}', trials, verdict, not fits, notes)
    if not fits:
        sys.exit(DOES_NOT_FIT)


if __name__ == '__main__':
    flags.mark_flags_as_required(['config', 'topology'])
    app.run(run_main(main), flags_parser=parse_flags)
