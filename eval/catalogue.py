"""The page of a catalogue: every study with its question and its answer, and a field to search."""

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from eval.charts import build_environment, format_now
from lm.storage.files import write_text
from lm.study.tables.text import format_count

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
