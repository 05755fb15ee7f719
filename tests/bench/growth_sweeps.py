"""Records of sweeps with many cells, written by the functions that training writes them with.

One cell is trained, and the others get its rows and its summary, with other losses.
"""

import itertools
import json
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from lm.config.resolve import resolve
from lm.record.metrics import FILE, Recorder
from lm.record.names import SUMMARY
from lm.record.workdir import write_config
from lm.storage.files import read_json, seal_record, write_json
from lm.study.plan.cells import Cell, group_by_program
from lm.study.train import ledger

SEEDS, RATES = 2, (1e-3, 3e-3, 1e-2, 3e-2)
LAYERS = {'residual_rms': [1.0, 2.0], 'attention_entropy_share': [[0.5, 0.25], [0.75, 0.5]]}


def many_variants(n: int) -> dict[str, Any]:
    """Returns a sweep of n cells: widths, four learning rates and two seeds of each."""
    widths = tuple(range(16, 16 + max(2, n // (SEEDS * len(RATES)))))
    return {'model.d_ff': widths, 'optim.lr': RATES, 'train.seed': tuple(range(SEEDS))}


def many_rates(n: int) -> dict[str, Any]:
    """Returns a sweep of n cells: learning rates, and two seeds of each."""
    rates = tuple(1e-4 * 1000 ** (i / n) for i in range(n // SEEDS))
    return {'optim.lr': rates, 'train.seed': tuple(range(SEEDS))}


def make_tree(corpus: dict[str, Any]) -> dict[str, Any]:
    """Returns the config of a tiny run, as nested dicts."""
    from tests.sweep_helpers import base

    return base(corpus, train_steps=8)


def train_cell(folder: Path) -> tuple[dict[str, Any], Path]:
    """Trains a tiny run; returns its config and its folder."""
    from tests.corpora import write_corpus
    from train import train

    (folder / 'text').mkdir()
    tree = make_tree(write_corpus(folder / 'text'))
    train(resolve(tree), folder / 'template')
    return tree, folder / 'template'


def write_sweep(
    workdir: Path,
    cells: Sequence[Cell],
    template: Path,
    tree: dict[str, Any] | None = None,
    begun: float = 1.0,
    steps: int = 0,
) -> None:
    """Writes the records of a sweep.

    Args:
      workdir: folder of the sweep.
      cells: its cells.
      template: folder of a run, whose summary and rows all cells get, with other losses.
      tree: config of the base, to write sweep.json too.
      begun: share of the cells that have ended; the others have no folder.
      steps: number of steps with a row of training and a row of layers; 0: the rows of `template`.
    """
    if tree is not None:
        ledger.open_sweep(workdir, resolve(tree), group_by_program(list(cells)), False)
    rng, summary = random.Random(0), read_json(template / SUMMARY)
    rows = [json.loads(line) for line in (template / FILE).read_text().splitlines()]
    if steps:
        training = next(row for row in rows if 'lr' in row)
        pairs = ((training, {'step': step}) for step in range(1, steps + 1))
        rows = list(itertools.chain(*((row | step, step | LAYERS) for row, step in pairs)))
    for cell in cells[: max(1, round(begun * len(cells)))]:
        folder = workdir / cell.name
        folder.mkdir(parents=True, exist_ok=True)
        write_config(folder, cell.recipe)
        recorder = Recorder(folder, 0, None, lambda line: None)
        for row in rows:
            recorder.write(row)
        loss = summary['validation_ce'] + rng.gauss(0, 0.01)
        losses = {'validation_ce': loss, 'best_validation_ce': loss}
        write_json(folder / SUMMARY, seal_record(summary | losses))
