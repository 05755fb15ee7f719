"""What a folder says: a run's config, results and recorded rows, and which cells a sweep has.

Each function raises ValueError, naming the file, where what lies there cannot be read.
"""

import contextlib
import functools
import json
from collections.abc import Iterator, Mapping
from dataclasses import MISSING
from pathlib import Path
from typing import Any

import pyarrow as pa

from lm.config import flatten
from lm.files import read_json
from lm.record.metrics import FILE, read_rows
from lm.record.upgrade import present_paths, stored_config
from lm.record.workdir import CONFIG, SUMMARY, SWEEP
from lm.sections import FIELDS
from lm.sweep import ledger

Row = dict[str, Any]
# What reading a record that was written over raises: it holds other things than it should.
DAMAGE = (ValueError, KeyError, TypeError, AttributeError, OSError, pa.ArrowException)


@contextlib.contextmanager
def naming(path: Path, advice: str = '') -> Iterator[None]:
    """Errors of reading `path` get its name, where they lack it, and what to do."""
    try:
        yield
    except DAMAGE as error:
        is_told = isinstance(error, ValueError | OSError)  # others say no more than a name
        text = str(error) if is_told else f'{type(error).__name__}: {error}'
        if str(path) not in text:
            text = f'{path} cannot be read ({text})'
        raise ValueError(f'{text}. {advice}' if advice else text) from error


def naming_sweep(folder: Path) -> contextlib.AbstractContextManager[None]:
    return naming(folder / SWEEP, 'The train.py command of the sweep writes it anew')


def sweep_of(folder: Path) -> dict[str, Any]:
    """The sweep.json of a sweep, in the present form (`lm.sweep.ledger`)."""
    with naming_sweep(folder):
        sweep = ledger.read_sweep(folder)
        _check_sweep(sweep)
        return sweep


def _check_sweep(sweep: Mapping[str, Any]) -> None:
    """Raises ValueError for what is no sweep, as of a file that was written over."""
    kinds = {'cell': str, 'group': int | None, 'changes': dict, 'differs': dict}
    if not isinstance(sweep['base'], dict) or not isinstance(sweep['axes'], dict):
        raise ValueError('its base and its axes must be objects')
    if not isinstance(flatten(sweep['base']).get('optim.lr'), int | float):
        raise ValueError('its base has no optim.lr')
    for path, values in sweep['axes'].items():
        if path not in FIELDS or not isinstance(values, list):
            raise ValueError(f'{path!r} is no axis: a field with a list of values')
    for cell in sweep['cells']:
        for name, kind in kinds.items():
            if not isinstance(cell[name], kind):
                raise ValueError(f'{name} of a cell is {cell[name]!r}')


def config_of(folder: Path) -> Mapping[str, Any]:
    """The config.json of a run by path, in the present form. One that is no config of this version
    has what is in it and the defaults of fields that were added since.
    """
    with naming(folder / CONFIG):
        return _flat_config(json.dumps(read_json(folder / CONFIG)))


@functools.lru_cache(maxsize=10_000)
def _flat_config(text: str) -> Mapping[str, Any]:
    raw = json.loads(text)
    try:
        return flatten(stored_config(raw))
    except ValueError:
        added = {path: f.default for path, f in FIELDS.items() if f.default is not MISSING}
        return added | present_paths(flatten(raw))


def results_of(folder: Path) -> Row:
    """By the names of summary.json. What is not in it is found from the rows so far."""
    if not folder.exists():
        return {'status': 'waiting'}
    summary = {'status': 'unfinished'}
    if (folder / SUMMARY).exists():
        summary = read_json(folder / SUMMARY)
        if not isinstance(summary.get('status'), str):
            raise ValueError(f'{folder / SUMMARY} cannot be read (it has no status)')
    if 'best_validation_ce' in summary:
        return summary
    with naming(folder / FILE):
        return results_so_far(rows_of(folder)) | summary


def rows_of(folder: Path) -> list[Row]:
    """The rows of metrics.jsonl that are whole: those with a step."""
    with naming(folder / FILE):
        rows = read_rows(folder / FILE)
    return [row for row in rows if isinstance(row, dict) and type(row.get('step')) is int]


def results_so_far(rows: list[Row]) -> Row:
    """What a summary would say of a run that has got as far as these rows."""
    found: Row = {'step': rows[-1]['step']} if rows else {}
    trained = [row for row in rows if 'ce' in row]
    validated = [row for row in rows if 'validation_ce' in row]
    if trained:
        rates = [row['tokens_per_sec'] for row in trained if row.get('tokens_per_sec')]
        found |= {'ce': trained[-1]['ce'], 'tokens': trained[-1].get('tokens')}
        found['tokens_per_sec_mean'] = sum(rates) / len(rates) if rates else None
    if validated:
        last = validated[-1]
        found |= {name: last.get(name) for name in ('validation_ce', 'bits_per_byte', 'perplexity')}
        found['validated_step'] = last['step']
    finite = [row for row in validated if row['validation_ce'] is not None]
    if finite:
        best = min(finite, key=lambda row: row['validation_ce'])
        found |= {'best_validation_ce': best['validation_ce'], 'best_step': best['step']}
        found['best_bits_per_byte'] = best.get('bits_per_byte')
    return found
