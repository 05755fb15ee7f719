"""Writes a report of a run, a sweep, or several sweeps as a web page (`eval.report.page`).

python -m eval.report --workdir=DIR[,DIR] [--out=report.html] [--figures=DIR] [--baseline=VARIANT]
    [--json]
"""

from lm.launch.before_jax import prepare_streams

if __name__ == '__main__':
    prepare_streams()  # before any file is opened

from absl import flags

from eval.console.json_line import define_json, print_json
from eval.report.page import list_verdicts, write_report
from eval.runs import summarize_runs
from lm.launch.command import run_program
from lm.launch.path_flags import define_path


def main(_) -> None:
    args = flags.FLAGS
    page = write_report(args.workdir, args.out, args.figures, args.baseline, say=print)
    print(page)
    if args.json:
        verdicts = list_verdicts(args.workdir, args.baseline)
        print_json({'page': str(page), 'verdicts': verdicts, 'runs': summarize_runs(*args.workdir)})


if __name__ == '__main__':
    text = 'Run or sweep, or several separated by commas. The first has the baseline.'
    define_path('workdir', None, text, is_list=True)
    flags.mark_flag_as_required('workdir')
    define_path('out', None, 'HTML file to write. Default: report.html in the first WORKDIR.')
    define_path('figures', None, 'Folder for the charts as PNG and SVG. Default: no such files.')
    text = 'Baseline: a variant, or one of its cells. Default: the first variant.'
    flags.DEFINE_string('baseline', '', text)
    define_json()
    run_program(main)
