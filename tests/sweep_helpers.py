"""Tiny runs and sweeps that several tests train, and the parts of their records that must not
differ.
"""

import json
import os
import shutil
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from configs import default
from eval.runs import gather
from lm.config.fields import Config
from lm.config.resolve import build_config, flatten, resolve, to_dict
from lm.record.metrics import TIME_FIELDS, read_rows
from lm.run.program import Experiment, open_text
from lm.run.wave import Wave
from lm.storage.files import read_json
from tests.corpora import write_corpus as write_corpus

TINY = {
    'model.d_model': 16,
    'model.n_layers': 2,
    'model.n_heads': 2,
    'model.n_kv_heads': 1,
    'model.d_ff': 32,
    'model.qk_norm': 'none',
    'model.tie_embeddings': False,
    'model.scan_layers': True,
    'mesh.data': 1,
    'mesh.run': 1,
    'kernels.run_axis': 'loop',
    'data.tokenizer': 'byte',
    'data.seq_len': 16,
    'data.batch_size': 8,
    'data.epochs': 1000,
    'data.validation_fraction': 0.1,
    'optim.lr': 0.003,
    'optim.warmup_steps': 2,
    'train.steps': 8,
    'train.eval_every': 4,
    'train.checkpoint_every': 4,
    'train.log_every': 1,
}
MODES = ('loop', 'vmap')
# Runs that were killed go on beside fewer others.
TIMES = (
    *('tokens_per_sec', 'wall_sec', 'side_by_side', 'compile_sec', 'workdir', 'sweep'),
    *('goodput', 'elapsed_sec', 'starts', 'seconds'),
)
RTOL = 1e-5  # of float32 sums in another order, over some steps


def settings(corpus: dict, **changes) -> dict[str, Any]:
    """Returns {'train.steps': 8, ...}; changes are given as train_steps=8."""
    return TINY | corpus | {k.replace('_', '.', 1): v for k, v in changes.items()}


def base(corpus: dict, **changes) -> dict[str, Any]:
    config = default.get_config()
    config.update_from_flattened_dict(settings(corpus, **changes))
    return to_dict(build_config(config))


def cell_config(tree: dict[str, Any], changes: dict[str, Any]) -> Config:
    """Returns the config of a cell."""
    flat = flatten(tree) | changes
    nested: dict[str, dict] = {}
    for path, value in flat.items():
        section, name = path.split('.')
        nested.setdefault(section, {})[name] = value
    return resolve(nested)


def silent_experiment(config: Config, runs: int = 1) -> Experiment:
    """Returns the experiment of a run, with its text, without printing."""
    return Experiment(config, open_text(config, lambda text: None), lambda text: None, runs)


def timeless(workdir: Path) -> list[dict[str, Any]]:
    """Returns the rows of a run without the fields that are times."""
    rows = read_rows(workdir / 'metrics.jsonl')
    return [{k: v for k, v in row.items() if k not in TIME_FIELDS} for row in rows]


def cell_folders(workdir: Path) -> dict[str, Path]:
    """Returns the folders by the changes of the cell, as text."""
    listed = read_json(workdir / 'sweep.json')['cells']
    return {json.dumps(cell['changes']): workdir / cell['cell'] for cell in listed}


def curves(workdir: Path) -> dict[str, list[dict[str, Any]]]:
    """Returns the records of every cell, without times."""
    return {changes: timeless(folder) for changes, folder in cell_folders(workdir).items()}


def table(workdir: Path) -> list[dict[str, Any]]:
    """Returns the results of a sweep without times and commit."""
    left_out = {*TIMES, 'git_commit'}
    return [{k: v for k, v in record.items() if k not in left_out} for record in gather(workdir)]


def statuses(workdir: Path) -> list[str]:
    return [record['status'] for record in gather(workdir)]


def summary(workdir: Path, changes: dict[str, Any]) -> dict[str, Any]:
    return read_json(cell_folders(workdir)[json.dumps(changes)] / 'summary.json')


def assert_close(actual: list[dict], expected: list[dict], rtol: float = RTOL) -> None:
    """Asserts rows with the same fields, and numbers equal up to rounding."""
    assert [list(row) for row in actual] == [list(row) for row in expected]
    for got, row in zip(actual, expected, strict=True):
        for name, value in row.items():
            np.testing.assert_allclose(got[name], value, rtol, err_msg=f'{name} of {row["step"]}')


def assert_same_curves(actual: Path, expected_workdir: Path, rtol: float = 0.0) -> None:
    """Asserts exact equality, or equality up to `rtol`."""
    got, expected = curves(actual), curves(expected_workdir)
    assert got.keys() == expected.keys()
    for changes, rows in expected.items():
        assert rows, changes
        assert_close(got[changes], rows, rtol)


def before_step(monkeypatch: pytest.MonkeyPatch, act: Callable[[Wave], None]) -> None:
    """Calls `act` before each step that a wave dispatches."""
    original = Wave.dispatch

    def dispatch(wave):
        act(wave)
        original(wave)

    monkeypatch.setattr(Wave, 'dispatch', dispatch)


def terminate_at(step: int) -> Callable[[Wave], None]:
    """Sends SIGTERM while the first run makes that step, for `before_step`."""

    def act(wave):
        if wave.slots[0].journal.step == step - 1:
            os.kill(os.getpid(), signal.SIGTERM)

    return act


def poison_at(step: int, slot: int = 0, times: int = 1) -> Callable[[Wave], None]:
    """Makes the parameters of one run infinite before that step, the first `times`, for
    `before_step`.
    """
    remaining = [times]

    def act(wave):
        if remaining[0] and wave.slots[slot].journal.step == step - 1:
            remaining[0] -= 1
            state = wave.take_state(slot)
            infinite = jax.tree.map(lambda weight: weight * np.inf, state.params)
            spoilt = state.replace(params=infinite)
            wave.states = wave.program.put(wave.states, spoilt, slot)

    return act


def copy_workdir(workdir: Path, to: Path) -> Path:
    return Path(shutil.copytree(workdir, to))
