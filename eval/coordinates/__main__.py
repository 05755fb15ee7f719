"""Whether activations and their changes keep their size as a model grows.

    python -m eval.coordinates --config=configs/default.py --config.scaling.name=mup
        --config.scaling.base_width=64 --widths=64,128,256,512 [--depths=2,4,8] [--out=page.html]

Trains a few steps on one random batch at each width, from several seeds, at the peak of the
learning rate, and fits the slope of log size against log width for each activation and for its
change since the start. A parametrisation that keeps its learning rate has slopes near 0
(arXiv:2203.03466, appendix D.1). Exit status 1 where an activation or its change grows, shrinks or
is no number; logits may shrink as the noise in a mean does, and with depth so may sizes.
"""

from lm.run.process import prepare_process

if __name__ == '__main__':
    prepare_process()  # before JAX is imported

import sys
from pathlib import Path

from absl import app, flags
from rich.console import Console

from eval.coordinates.slopes import figure, rows_of, slopes, write
from lm.run.command import define_config, parse_flags, run_main
from lm.config import resolve
from lm.run.table import as_table

CONFIG = define_config()
WIDTHS = flags.DEFINE_list('widths', [], 'Values of model.d_model, smallest first.')
DEPTHS = flags.DEFINE_list('depths', [], 'Values of model.n_layers, in place of widths.')
SEEDS = flags.DEFINE_integer('seeds', 4, 'Initial weights at each size.', lower_bound=1)
STEPS = flags.DEFINE_integer('steps', 4, 'Training steps.', lower_bound=1)
TOLERANCE = flags.DEFINE_float('tolerance', 0.05, 'The slope that counts as none.')
OUT = flags.DEFINE_string('out', None, 'Page (.html) or figure (.png, .svg) to write.')


def main(_) -> None:
    recipe = resolve(CONFIG.value)
    if bool(WIDTHS.value) == bool(DEPTHS.value):
        raise ValueError('give --widths=64,128,256,512 or --depths=2,4,8, and not both')
    along = 'width' if WIDTHS.value else 'depth'
    values = [int(value) for value in WIDTHS.value or DEPTHS.value]
    console = Console(stderr=True, highlight=False)
    found = slopes(recipe, along, values, SEEDS.value, STEPS.value, console.print)
    rows = rows_of(found, TOLERANCE.value)
    Console(highlight=False).print(as_table(rows))
    title = f'{recipe.scaling}, {along} {values[0]} to {values[-1]}'
    if OUT.value:
        write(Path(OUT.value), title, figure(found, along, values), rows)
    failed = sum(slope.fails(TOLERANCE.value) for slope in found)
    print(f'{title}: {failed} of {len(found)} fail')
    sys.exit(1 if failed else 0)


if __name__ == '__main__':
    flags.mark_flags_as_required(['config'])
    app.run(run_main(main), flags_parser=parse_flags)
