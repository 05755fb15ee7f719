"""The page of a run, a sweep, or several sweeps (`eval.report.page`).

python -m eval.report --workdir=DIR[,DIR] [--out=report.html] [--figures=DIR]
"""

from absl import app, flags

from lm.run.command import run_main
from eval.report.page import report

WORKDIR = flags.DEFINE_list(
    'workdir', None, 'Run or sweep; several with commas, the first with the baseline.'
)
OUT = flags.DEFINE_string('out', None, 'HTML file to write. Default: in the first WORKDIR.')
FIGURES = flags.DEFINE_string('figures', None, 'Folder for PNG and SVG figures; none without it.')


def main(_) -> None:
    print(report(WORKDIR.value, OUT.value, FIGURES.value))


if __name__ == '__main__':
    flags.mark_flag_as_required('workdir')
    app.run(run_main(main))
