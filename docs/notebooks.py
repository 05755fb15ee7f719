"""Notebooks of tutorials, made from their pages: text, code and its output."""

import json
import re
from pathlib import Path
from typing import Any

from tests.pages import TUTORIALS
from tests.tutorials import PRINTED, STEP

NAMES = ('inside_a_checkpoint',)  # pages whose steps are commands and Python alone


def write(folder: Path) -> None:
    """Writes a notebook into the folder for each of NAMES."""
    folder.mkdir(parents=True, exist_ok=True)
    for name in NAMES:
        text = json.dumps(notebook(TUTORIALS[name].read_text()), indent=1)
        (folder / f'{name}.ipynb').write_text(text + '\n')


def notebook(page: str) -> dict[str, Any]:
    """Returns a page as a notebook of format 4.5; commands begin with !."""
    cells, at = [], 0
    for step in STEP.finditer(page):
        cells += text_cell(page[at : step.start()])
        at = step.end()
        source = step['code'] or re.sub(r'^    ', '!', step['commands'], flags=re.MULTILINE)
        printed = []
        if block := PRINTED.match(page, at):
            printed = [{'output_type': 'stream', 'name': 'stdout', 'text': block['text']}]
            at = block.end()
        cells.append(
            {'cell_type': 'code', 'execution_count': None, 'metadata': {}, 'outputs': printed}
            | {'source': source.strip('\n')}
        )
    cells += text_cell(page[at:])
    for number, cell in enumerate(cells):
        cell['id'] = f'cell-{number}'
    kernel = {'display_name': 'Python 3', 'language': 'python', 'name': 'python3'}
    return {'cells': cells, 'metadata': {'kernelspec': kernel}, 'nbformat': 4, 'nbformat_minor': 5}


def text_cell(text: str) -> list[dict[str, Any]]:
    """Returns a cell of a text, without pictures and files to download: only pages have those."""
    text = re.sub(r'!\[[^\]]*\]\([^)]*\)|\s*\{download\}`[^`]*`\.?', '', text)
    text = re.sub(r'\[([^\]]+)\]\(\.\.[^)]*\)', r'\1', text).strip()
    return [{'cell_type': 'markdown', 'metadata': {}, 'source': text}] if text else []
