"""Fits a scaling law or a law of loss curves, and tests it on held-out runs.

    python -m eval.fit --workdir=runs/sizes --law=chinchilla [--hold_out=0.25]
    python -m eval.fit --table=t.csv --law=annealing --hold_out_where="run='wsd'"

chinchilla, kaplan and data_constrained predict the final loss from the columns
parameters and tokens (data_constrained: also unique_tokens); mixture, that of
one domain, also from its share; two_parts from first_parameters and
second_parameters. annealing and multi_power predict the loss along runs of one
model; the learning rate comes from the config or, in a table of run, step, lr
and loss, from its rows. downstream predicts a score from the loss. 95%
intervals come from a bootstrap over runs, and are wider if there are few runs.
"""

from lm.launch.before_jax import prepare_process

if __name__ == '__main__':
    prepare_process()  # before JAX is imported

import json
import sys
from pathlib import Path

from absl import flags

from eval.fit.fitting import fit_points, format_report, report_record
from eval.fit.laws import LAWS
from eval.fit.laws import MOMENTUM as MOMENTUM_OF_PAPER
from eval.fit.points import PointOptions, points_from_table, points_from_workdir
from lm.launch.command import run_program
from lm.launch.path_flags import define_path
from lm.storage.files import replace_file
from modules.choices import choose

WORKDIR = define_path('workdir', None, 'Sweep, folder of runs, or URL.')
TABLE = define_path('table', None, 'CSV or Parquet file, instead of --workdir.')
LAW = flags.DEFINE_string('law', 'chinchilla', f'Law to fit: {", ".join(sorted(LAWS))}.')
LOSS = flags.DEFINE_string(
    'loss', None, 'Loss column; default: loss (table), ce (final), validation_ce (curves).'
)
SCORE = flags.DEFINE_string('score', 'score', 'Score column, for the law downstream.')
WHERE = flags.DEFINE_string('where', '', 'SQL condition that selects runs, or rows of the table.')
HOLD_OUT = flags.DEFINE_float('hold_out', 0.25, 'Share of the largest runs to hold out.', 0, 0.9)
HOLD_OUT_WHERE = flags.DEFINE_string(
    'hold_out_where', '', 'SQL condition that selects the held-out runs, instead of --hold_out.'
)
MOMENTUM = flags.DEFINE_float(
    'annealing_momentum', MOMENTUM_OF_PAPER, 'Constant lambda of the law annealing.', 0, 0.999999
)
STARTS = flags.DEFINE_integer('starts', 50, 'Number of grid points to descend from, best first.', 1)
BOOTSTRAP = flags.DEFINE_integer('bootstrap', 200, 'Bootstrap resamples; 0: no intervals.', 0)
SEED = flags.DEFINE_integer('seed', 0, 'Seed of the bootstrap.')
FIGURES = define_path('figures', None, 'Folder to write a page and figures to.', is_local=True)
OUT = define_path('out', None, 'JSON file to write the fit to.', is_local=True)


def main(_) -> None:
    if bool(WORKDIR.value) == bool(TABLE.value):
        raise ValueError('set exactly one of --workdir=SWEEP and --table=FILE')
    law = choose(LAWS, LAW.value, '--law')
    default_column = 'loss' if TABLE.value else 'ce' if law.curve is None else 'validation_ce'
    column = LOSS.value or default_column
    options = PointOptions(column, SCORE.value, WHERE.value, HOLD_OUT_WHERE.value, MOMENTUM.value)
    if TABLE.value:
        points = points_from_table(law, Path(TABLE.value), options)
    else:
        points = points_from_workdir(law, WORKDIR.value, options)
    share = None if HOLD_OUT_WHERE.value else HOLD_OUT.value
    report = fit_points(law, points, share, STARTS.value, BOOTSTRAP.value, SEED.value)
    for line in points.left_out:
        print(f'NOTE: skipped {line}', file=sys.stderr)
    print(format_report(report))
    if OUT.value:
        with replace_file(Path(OUT.value)) as temporary:
            temporary.write_text(json.dumps(report_record(report), indent=2) + '\n')
    if FIGURES.value:
        from eval.fit.figures import write_figures

        for path in write_figures(Path(FIGURES.value), report):
            print(path, file=sys.stderr)


if __name__ == '__main__':
    run_program(main)
