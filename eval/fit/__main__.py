"""Fits a scaling law, or a law of loss curves, and predicts the held-out largest runs.

    python -m eval.fit --workdir=runs/sizes --law=chinchilla [--hold_out=0.25] [--figures=DIR]
    python -m eval.fit --table=numbers.csv --law=annealing --hold_out_where="run = 'wsd'"

chinchilla, kaplan and data_constrained describe the final loss of runs by the columns parameters
and tokens (and unique_tokens). mixture describes the loss of a single domain, with a column share;
two_parts describes a loss by first_parameters and second_parameters. annealing and multi_power
describe the loss along runs of the same model; the learning rate comes from the config or, for a
table of run, step, lr and loss, from the rows. downstream describes a score by the loss. 95%
intervals come from a bootstrap over runs, and are widened if there are few runs.
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

WORKDIR = define_path('workdir', None, 'Sweep, or folder of runs, or its URL.')
TABLE = define_path('table', None, 'CSV or Parquet file, in place of a workdir.')
LAW = flags.DEFINE_enum('law', 'chinchilla', sorted(LAWS), 'What to fit.')
LOSS = flags.DEFINE_string(
    'loss', None, 'Its column: loss in a table; ce of runs, and validation_ce along them.'
)
SCORE = flags.DEFINE_string('score', 'score', 'Column that downstream predicts.')
WHERE = flags.DEFINE_string(
    'where', '', 'Condition in SQL on the columns of runs, or of the table.'
)
HOLD_OUT = flags.DEFINE_float('hold_out', 0.25, 'Share of the runs, the largest.', 0, 0.9)
HOLD_OUT_WHERE = flags.DEFINE_string('hold_out_where', '', 'Condition in SQL, in place of a share.')
MOMENTUM = flags.DEFINE_float(
    'annealing_momentum', MOMENTUM_OF_PAPER, 'lambda of annealing.', 0, 0.999999
)
STARTS = flags.DEFINE_integer('starts', 50, 'Starts of the grid to follow, best first.', 1)
BOOTSTRAP = flags.DEFINE_integer('bootstrap', 200, 'Resamples of the runs.', 0)
SEED = flags.DEFINE_integer('seed', 0, 'Of the bootstrap.')
FIGURES = define_path('figures', None, 'Folder for a page and figures.')
OUT = define_path('out', None, 'JSON file to write.')


def main(_) -> None:
    if bool(WORKDIR.value) == bool(TABLE.value):
        raise ValueError('give --workdir=SWEEP or --table=FILE, and not both')
    law = LAWS[LAW.value]
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
        print(f'left out {line}', file=sys.stderr)
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
