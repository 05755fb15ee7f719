"""Plans a training on chips that are not at hand, with their compiler.

    python -m tpu.plan --config=configs/llama_8b.py --topology=v6e:16x16 [--slices=2]
        [--config.mesh.fsdp=16 ...] [--search] [--price=2.7] [--out=plan.json] [--figure=plan.html]

Compiles the step that train.py runs, with its kernels and shardings, for a topology: a slice of
v4, v5e, v5p, v6e or tpu7x, given by its shape; the GPUs of one host, such as h100:8; or `here`.
Prints the memory per device, the traffic between devices, and the step time with its lower bound.
If the step does not fit, compiles changes that may help. --search compiles meshes, remat policies
and microbatches, and ranks them.

With config.sweep, prints how many runs fit a chip, and the total chip-hours. With config.tune,
prints the chip-hours of a wave, and of all waves that the search takes.

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

from pathlib import Path

from absl import flags
from ml_collections import config_flags
from rich.console import Console

from lm.config.resolve import resolve, with_dtype
from lm.launch.command import define_config, parse_flags, run_program
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
    """Prints the plan, and writes it to files. Exits with DOES_NOT_FIT if nothing fits."""
    figure = FIGURE.value and Path(FIGURE.value)
    if figure and figure.suffix not in ENDINGS:
        raise ValueError(f'--figure ends in {", ".join(ENDINGS)}; got {figure}')
    dtype = default_dtype() if TOPOLOGY.value == HERE else 'bfloat16'
    base, sweep, tune = split_sweep(with_dtype(CONFIG.value.to_dict(), dtype))
    recipe = resolve(base)
    check(recipe)
    assert TOPOLOGY.value is not None  # a required flag
    topology = open_topology(TOPOLOGY.value, SLICES.value)
    console = Console(highlight=False, soft_wrap=True)
    say = Console(stderr=True, highlight=False, soft_wrap=True).print
    fits, notes = True, []
    if (sweep, tune) != (None, None):
        plan = plan_sweep(base, sweep, topology, say, PRICE.value, tune)
        lines, record = list(plan.format_lines()), plan.record()
        *notes, verdict = lines
        trials = {group.name: Trial.from_estimate({}, group.estimate) for group in plan.groups}
    elif SEARCH.value:
        console.width = max(console.width, LOG_WIDTH)  # a narrow terminal wraps what it cannot show
        ranked = search(recipe, topology, say, TRIES.value, PRICE.value)
        lines = [make_table([trial.table_row() for trial in ranked])]
        record = {'tried': [trial.record() for trial in ranked]}
        trials = {trial.label: trial for trial in ranked}
        n_fitting = sum(trial.estimate is not None for trial in ranked)
        fits, verdict = n_fitting > 0, f'{n_fitting} of {len(ranked)} fit'
        if fits:
            fastest = ranked[0].estimate
            assert fastest is not None  # trials that fit are ranked first
            verdict += f'; the fastest is {ranked[0].label}: {format_summary(fastest)}'
    else:
        try:
            blueprint = build_blueprint(recipe, topology, say)
            plan = estimate_step(compile_step(blueprint, topology), topology, PRICE.value)
            lines, record = list(plan.format_lines()), {'fits': True} | plan.record()
            notes, verdict = lines, f'Fits: {format_summary(plan)}'
            trials = {GIVEN: Trial.from_estimate({}, plan)}
        except DoesNotFit as error:
            fits, lines, verdict = False, [], f'Does not fit: a step {error}'
            console.print(f'{topology.label}: does not fit. A step {error}.')
            trials = {GIVEN: Trial({}, needed=error.needed, available=error.available)}
            for trial in try_changes(recipe, topology, say):
                notes.append(trial.format_line())
                console.print(f'  {notes[-1]}')
                trials[trial.label] = trial
            records = [trial.record() for trial in list(trials.values())[1:]]
            record = {
                'fits': False,
                'needed': error.needed,
                'there': error.available,
                'tried': records,
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
    run_program(main, parse_flags)
