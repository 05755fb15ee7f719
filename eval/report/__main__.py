"""The page of a run, a sweep, or several sweeps (`eval.report.page`).

python -m eval.report --workdir=DIR[,DIR] [--out=report.html] [--figures=DIR] [--baseline=VARIANT]
"""

from lm.launch.before_jax import prepare_streams

if __name__ == '__main__':
    prepare_streams()  # before any file is opened

from absl import flags

from eval.report.page import write_report
from lm.launch.command import run_program
from lm.launch.path_flags import define_path


def main(_) -> None:
    args = flags.FLAGS
    print(write_report(args.workdir, args.out, args.figures, args.baseline, say=print))


if __name__ == '__main__':
    text = 'Run or sweep; several with commas, the first with the baseline.'
    define_path('workdir', None, text, is_list=True)
    flags.mark_flag_as_required('workdir')
    define_path('out', None, 'HTML file to write. Default: in the first WORKDIR.')
    define_path('figures', None, 'Folder for PNG and SVG figures; none without it.')
    text = 'Variant, or one of its cells, that others are compared with; the first by default.'
    flags.DEFINE_string('baseline', '', text)
    run_program(main)
