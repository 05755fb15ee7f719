"""The page of a run or a sweep (`eval.report.page`).

python -m eval.report --workdir=DIR [--out=report.html] [--figures=DIR]
"""

from absl import app, flags

from eval.program import run_main
from eval.report.page import report

WORKDIR = flags.DEFINE_string('workdir', None, 'Of a run or of a sweep.')
OUT = flags.DEFINE_string('out', None, 'HTML file to write. Default: WORKDIR/report.html.')
FIGURES = flags.DEFINE_string('figures', None, 'Folder for PNG and SVG figures; none without it.')


def main(_) -> None:
    print(report(WORKDIR.value, OUT.value, FIGURES.value))


if __name__ == '__main__':
    flags.mark_flag_as_required('workdir')
    app.run(run_main(main))
