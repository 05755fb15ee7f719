"""Lists runs and sweeps with the question, the date and the verdicts of each.

    python -m eval.catalogue [--workdir='runs/*'] [--find=WORDS] [--out=index.html]

The question is the docstring of the config. --out also writes a page with a
search field, which links the reports.
"""

from lm.launch.before_jax import prepare_streams

if __name__ == '__main__':
    prepare_streams()  # before any file is opened

import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from absl import flags

from eval.charts import build_environment, format_now
from eval.runs import expand_patterns
from lm.launch.command import run_program
from lm.launch.path_flags import define_path
from lm.storage.files import write_text
from lm.study.tables.catalogue import COLUMNS, list_studies, search_studies
from lm.study.tables.text import FORMATS, format_count, format_table

TEMPLATES = Path(__file__).parent
REPORT = 'report.html'


def write_index(path: Path, studies: Sequence[dict[str, Any]]) -> None:
    """Writes the page.

    Args:
      path: of the HTML file.
      studies: rows of `lm.study.tables.catalogue.list_studies`. A study whose folder has a report
        links to it.
    """
    pages = [Path(study['workdir'], REPORT) for study in studies]
    links = [
        Path(os.path.relpath(page, path.absolute().parent)).as_posix() if page.exists() else ''
        for page in pages
    ]
    template = build_environment(TEMPLATES).get_template('catalogue.html.j2')
    text = template.render(
        title='Runs and sweeps',
        made=format_now(),
        count=format_count(len(studies), 'folder'),
        scripts='',
        studies=[study | {'page': link} for study, link in zip(studies, links, strict=True)],
    )
    write_text(path, text)


def format_studies(studies: Sequence[dict[str, Any]]) -> str:
    """Returns the studies as paragraphs for a terminal."""
    return '\n\n'.join(
        '\n'.join(
            [
                f'{study["workdir"]}  {study["began"][:10]}  {study["runs"]} runs done',
                *(f'  {study[name]}' for name in ('question', 'answer') if study[name]),
            ]
        )
        for study in studies
    )


def main(argv: list[str]) -> None:
    args = flags.FLAGS
    if len(argv) > 1:
        raise ValueError(f'words to search for belong into --find; got {" ".join(argv[1:])}')
    studies = search_studies(list_studies(expand_patterns(args.workdir)), args.find)
    if not studies:
        raise ValueError(f'no run or sweep contains all words of --find={args.find}')
    if args.format == 'table':
        print(format_studies(studies))
    else:
        print(format_table(studies, [*COLUMNS], args.format))
    if args.out:
        write_index(Path(args.out), studies)
        print(args.out, file=sys.stderr)


if __name__ == '__main__':
    text = 'Runs, sweeps, folders, patterns or URLs of them, separated by commas.'
    define_path('workdir', 'runs', text, is_list=True)
    flags.DEFINE_enum('format', 'table', FORMATS, 'Output format.')
    flags.DEFINE_string('find', '', 'Only those with all of these words.')
    define_path('out', '', 'HTML file to write.', is_local=True)
    run_program(main)
