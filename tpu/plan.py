"""What a pod that nobody holds would make of a config, by the compiler of its chips.

    python -m tpu.plan --config=configs/llama_8b.py --topology=v6e:16x16 [--slices=2]
        [--config.mesh.fsdp=16 ...] [--search] [--price=2.7] [--out=plan.json] [--figure=plan.png]

Compiles the very step that train.py runs, kernels and shardings included, for the topology: chips
of v4, v5e, v5p, v6e or tpu7x by the shape of a slice, h100:8 and other GPUs of one host, or `here`.
Says what a device holds, what devices send each other, and the shortest time that a step can take.
Where it does not fit, what would help is tried. --search tries meshes, remat policies and
microbatches, and ranks them. With config.sweep: how many runs fit a chip, and the chip-hours of
all. No text is read, nothing is trained, and no chip is looked for. Exit status 0 where the step
fits, 1 for bad input, 3 where it does not fit.
"""

import sys

from lm.run.process import prepare_process
from tpu.environment import HERE, prepare_environment

if __name__ == '__main__':
    # Before JAX is imported.
    if any(flag.lstrip('-') == f'topology={HERE}' for flag in sys.argv):
        prepare_process()
    else:
        prepare_environment()

from pathlib import Path

from absl import app, flags
from rich.console import Console

from lm.check import check
from lm.config import resolve
from lm.files import write_json
from lm.run.command import define_config, parse_flags, run_main
from lm.run.terminal import LOG_WIDTH
from lm.sweep.cells import split_sweep
from tpu.advice import tried
from tpu.compiled import DoesNotFit, blueprint_of, compile_step
from tpu.estimate import estimate
from tpu.search import search
from tpu.sweeps import plan_sweep
from tpu.topology import open_topology
from tpu.words import lines_of, picture, table_of

DOES_NOT_FIT = 3

CONFIG = define_config()
TOPOLOGY = flags.DEFINE_string('topology', None, 'Chips and their shape: v5p:4x4x4, h100:8, here.')
SLICES = flags.DEFINE_integer('slices', 1, 'So many slices of TPUs, which data crosses.')
SEARCH = flags.DEFINE_bool('search', False, 'Try meshes, remat policies and microbatches.')
TRIES = flags.DEFINE_integer('tries', 8, 'Programs that --search compiles.', lower_bound=1)
PRICE = flags.DEFINE_float('price', None, 'Of a chip-hour, in whatever currency.', lower_bound=0)
OUT = flags.DEFINE_string('out', None, 'JSON file to write.')
FIGURE = flags.DEFINE_string('figure', None, 'Picture of --search to write, .png or .svg.')


def main(_) -> None:
    base, sweep = split_sweep(CONFIG.value)
    recipe = resolve(base)
    check(recipe)
    topology = open_topology(TOPOLOGY.value, SLICES.value)
    console = Console(highlight=False, soft_wrap=True)
    say = Console(stderr=True, highlight=False, soft_wrap=True).print
    if sweep is not None:
        found = plan_sweep(base, sweep, topology, say, PRICE.value)
        for line in found.lines():
            console.print(line)
        _write(found.record())
        return
    if SEARCH.value:
        console.width = max(console.width, LOG_WIDTH)  # a narrow terminal wraps what it cannot show
        rows = search(recipe, topology, say, TRIES.value, PRICE.value)
        console.print(table_of(rows))
        _write({'tried': [row.record() for row in rows]})
        if FIGURE.value:
            picture(rows, Path(FIGURE.value))
        sys.exit(0 if any(row.estimate for row in rows) else DOES_NOT_FIT)
    try:
        made = blueprint_of(recipe, topology, say)
        found = estimate(compile_step(made, topology), topology, PRICE.value)
    except DoesNotFit as error:
        console.print(f'{topology.words}: does not fit. A step {error}.')
        helped = []
        for row in tried(recipe, topology, say):
            console.print(f'  {row.line()}')
            helped.append(row.record())
        _write({'fits': False, 'needed': error.needed, 'there': error.there, 'tried': helped})
        sys.exit(DOES_NOT_FIT)
    for line in lines_of(found):
        console.print(line)
    _write({'fits': True} | found.record())


def _write(record: dict) -> None:
    if OUT.value:
        write_json(Path(OUT.value), record)


if __name__ == '__main__':
    flags.mark_flags_as_required(['config', 'topology'])
    app.run(run_main(main), flags_parser=parse_flags)
