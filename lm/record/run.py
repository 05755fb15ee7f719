"""The record of a run: the content of its folder, read on demand.

All readers of runs use it: sweeps, tables, reports, fits, trackers. Files are read anew in each
call, as a run changes them while it trains. It needs no JAX, except for `read_recipe` and `config`.
"""

import contextlib
import dataclasses
import math
import os
from collections.abc import Generator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lm.record.metrics import FILE, Tail, read_rows
from lm.record.names import (
    BRANCH,
    CHECKPOINTS,
    CONFIG,
    EVALUATIONS,
    FINAL,
    PROFILE,
    STARTS,
    SUMMARY,
    SWEEP,
)
from lm.record.time_use import estimate_goodput
from lm.storage.files import UnreadableFile, read_json

if TYPE_CHECKING:
    from lm.config.recipe import Recipe

Row = dict[str, Any]  # of metrics.jsonl, or by the names of summary.json
TEXT, SUITE = 'text_', 'suite_'  # begin the names of numbers of eval.texts and eval.suites
READ_BY_RESULTS = (CONFIG, SUMMARY, BRANCH, FILE, STARTS, CHECKPOINTS)
METRICS = {'ce': 'validation_ce', 'bits_per_byte': 'bits_per_byte'}  # column: in summary.json
# A record that something has written over may parse, with other types than expected.
READ_ERRORS = (ValueError, KeyError, TypeError, AttributeError, OSError)


@dataclasses.dataclass(frozen=True)
class Run:
    """The folder of a run or of a sweep's cell; it need not exist yet."""

    folder: Path

    @property
    def name(self) -> str:
        return self.folder.absolute().name

    @property
    def sweep(self) -> str | None:
        """The name of the sweep to which the run belongs as a cell; None for a single run."""
        parent = self.folder.absolute().parent
        return parent.name if (parent / SWEEP).exists() else None

    @property
    def has_begun(self) -> bool:
        """Whether there is a config.json, which the first step writes."""
        return (self.folder / CONFIG).exists()

    def read_config(self) -> dict[str, Any]:
        """Returns config.json as nested sections.

        Raises UnreadableFile if it is damaged, OSError if it does not exist.
        """
        return read_json(self.folder / CONFIG)

    def read_recipe(self) -> 'Recipe':
        """Returns the config in its present form.

        Raises ValueError if there is none, UnreadableFile if it is damaged.
        """
        from lm.record.upgrade import resolve_stored

        try:
            raw = self.read_config()
        except FileNotFoundError as error:
            path = self.folder / CONFIG
            raise ValueError(f'{self.folder} contains no run: there is no {path}') from error
        try:
            return resolve_stored(raw)
        except ValueError as error:
            raise ValueError(f'{self.folder / CONFIG}: {error}') from error

    @property
    def config(self) -> Mapping[str, Any]:
        """The config by path, in its present form.

        For a config that this version does not accept: its own fields, and the defaults of fields
        that were added since. Raises ValueError, naming the file.
        """
        path = self.folder / CONFIG
        with annotate_errors(path):
            return _read_flat_config(path)

    @property
    def summary(self) -> Row:
        """The summary; empty if it does not exist or cannot be read."""
        try:
            return read_json(self.folder / SUMMARY)
        except (FileNotFoundError, NotADirectoryError, UnreadableFile):
            return {}

    @property
    def status(self) -> str | None:
        """The status in the summary; None if there is no readable summary yet."""
        return self.summary.get('status')

    @property
    def is_final(self) -> bool:
        """Whether the run has ended for good. A run with a damaged summary is resumed."""
        return self.status in FINAL

    def loss(self, metric: str) -> float | None:
        """Returns the last validation loss of a run that has ended for good; None before.

        The loss is inf if the run diverged. metric: a key of METRICS.
        """
        summary = self.summary
        return final_loss(summary.get('status'), summary.get(METRICS[metric]))

    def rows(self) -> list[Row]:
        """Returns the intact rows of metrics.jsonl so far; numbers that are not finite are None.

        Raises ValueError, naming the file, if it cannot be read.
        """
        with annotate_errors(self.folder / FILE):
            return read_rows(self.folder / FILE)

    @property
    def branch(self) -> Row:
        """The record of a branch (`lm.run.branch`); empty if the run is none, or it is damaged."""
        try:
            return read_json(self.folder / BRANCH)
        except (FileNotFoundError, NotADirectoryError, UnreadableFile):
            return {}

    @property
    def ancestor_rows(self) -> list[Row]:
        """The losses of a branch's ancestors up to the step where it begins, thinned."""
        return self.branch.get('rows', [])

    @property
    def checkpoint_steps(self) -> list[int]:
        """The steps of the complete checkpoints in the folder, ascending."""
        paths = (self.folder / CHECKPOINTS).glob('*')
        return sorted(int(path.name) for path in paths if path.name.isdecimal())

    def stamp(self) -> tuple[tuple[int, ...] | None, ...]:
        """Returns a value that differs once a file has changed that `config` or `results` reads."""
        return tuple(_file_stamp(f'{self.folder}/{name}') for name in READ_BY_RESULTS)

    def tail(self) -> Tail:
        """Returns a reader of the rows that are appended while the run trains."""
        return Tail(self.folder / FILE)

    def results(self) -> Row:
        """Returns results by the names of summary.json, or derived from the rows so far.

        Of a branch also `parent`, WORKDIR@STEP, and `branch_step`. `checkpoints` are those that
        the summary names, or those in the folder before it is written. Raises ValueError if a
        file cannot be read.
        """
        if not self.folder.exists():
            return {'status': 'waiting'}
        summary: Mapping[str, Any] = {'status': 'unfinished'}
        path = self.folder / SUMMARY
        if path.exists():
            summary = _read_summary(path)
        summary = {**summary, **self._describe_origin(summary)}
        if 'best_validation_ce' in summary:
            return group_evaluations(summary) | summary
        with annotate_errors(self.folder / FILE):
            rows = self.rows()
            numbers = _summarize_rows(rows) | estimate_goodput(self.folder, rows) | summary
            return group_evaluations(numbers) | numbers

    def _describe_origin(self, summary: Mapping[str, Any]) -> Row:
        """Returns the parent of a branch, and the steps of the checkpoints of a run."""
        # A local copy of records has only the checkpoints that somebody has read.
        steps = summary.get('checkpoints') or self.checkpoint_steps
        described: Row = {'checkpoints': steps} if steps else {}
        match self.branch.get('ancestors') or summary.get('ancestors'):
            case [*_, {'workdir': str(parent), 'step': int(step)}]:
                described |= {'parent': f'{parent}@{step}', 'branch_step': step}
        return described

    @property
    def profile(self) -> Row | None:
        """The summary of traced steps (`lm.run.profile`); None if there is no readable one."""
        try:
            return read_json(self.folder / PROFILE / SUMMARY)
        except (OSError, UnreadableFile):
            return None

    @property
    def evaluations(self) -> list[Path]:
        """The stored results of suites, ordered by step (`eval.evaluation.kept`)."""
        paths = (self.folder / EVALUATIONS).glob('*/*.json')
        return sorted(paths, key=lambda path: (len(path.parent.name), path))


def list_runs(workdir: Path) -> list[Run]:
    """Returns the run of a folder, or all cells of a sweep that have begun."""
    if Run(workdir).has_begun:
        return [Run(workdir)]
    return [Run(path.parent) for path in sorted(workdir.glob(f'*/{CONFIG}'))]


def final_loss(status: str | None, loss: float | None) -> float | None:
    """Returns the loss of a run that has ended for good, or None if it has not.

    The loss is inf if the run diverged, or has no number as its loss.
    """
    if status not in FINAL:
        return None
    return loss if status == 'done' and loss is not None else math.inf


def run_seconds(summary: Mapping[str, Any]) -> float:
    """Returns the seconds of a run, divided by the number of runs that shared its program."""
    return (summary.get('wall_sec') or 0.0) / (summary.get('side_by_side') or 1)


@contextlib.contextmanager
def annotate_errors(
    path: Path, advice: str = '', errors: tuple[type[Exception], ...] = READ_ERRORS
) -> Generator[None]:
    """Raises errors of reading a file as ValueError, with the path and advice.

    Args:
      path: the file that is read in the block.
      advice: a sentence that is appended to the error.
      errors: the exceptions to catch.
    """
    try:
        yield
    except errors as error:
        has_text = isinstance(error, ValueError | OSError)  # messages of other types are mere names
        text = str(error) if has_text else f'{type(error).__name__}: {error}'
        if str(path) not in text:
            text = f'{path} cannot be read ({text})'
        raise ValueError(f'{text}. {advice}' if advice else text) from error


def is_warning_list(value: Any) -> bool:
    """Returns whether a value read from JSON is a list of warnings of `lm.run.warnings`."""
    return isinstance(value, list) and all(map(_is_warning, value))


def _is_warning(value: Any) -> bool:
    match value:
        case {'kind': str(), 'step': int(), 'layer': layer, 'head': head, 'seen': str(), 'help': h}:
            has_places = all(entry is None or isinstance(entry, int) for entry in (layer, head))
            has_lines = isinstance(h, list) and all(isinstance(entry, list | tuple) for entry in h)
            return (
                has_places
                and has_lines
                and all(list(map(type, entry)) == [str, str] for entry in h)
            )
    return False


def _file_stamp(path: str) -> tuple[int, ...] | None:
    """Returns the inode, size and times of a file or folder; None if there is none."""
    try:
        status = os.stat(path)
    except OSError:
        return None
    return status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns


def _read_summary(path: Path) -> Mapping[str, Any]:
    summary = read_json(path)
    if not isinstance(summary.get('status'), str):
        raise ValueError(f'{path} cannot be read (it has no status)')
    if not is_warning_list(summary.get('warnings', [])):
        raise ValueError(f'{path} cannot be read (its warnings have another format)')
    return summary


def _read_flat_config(path: Path) -> Mapping[str, Any]:
    from lm.config.fields import FIELDS
    from lm.config.resolve import flatten
    from lm.record.upgrade import rename_fields, resolve_stored

    raw = read_json(path)
    flat = flatten(raw)
    if flat.keys() == FIELDS.keys() and {list, dict}.isdisjoint(map(type, flat.values())):
        return flat  # as this version wrote it; resolving it again takes most of the time of a row
    try:
        return flatten(resolve_stored(raw))
    except ValueError:
        missing = dataclasses.MISSING
        added = {path: f.default for path, f in FIELDS.items() if f.default is not missing}
        return added | rename_fields(flat)


def group_evaluations(values: Row) -> Row:
    """Returns the numbers of `values` that belong to held-out texts and suites, by their names.

    values: by the names of summary.json. `texts` has the bits per byte of each text, `suites` the
    numbers of suites as SUITE_NUMBER. Either is left out if there are none.
    """
    ending = '_bits_per_byte'
    texts = {
        name.removeprefix(TEXT).removesuffix(ending): value
        for name, value in values.items()
        if name.startswith(TEXT) and name.endswith(ending)
    }
    suites = {n.removeprefix(SUITE): value for n, value in values.items() if n.startswith(SUITE)}
    return {key: group for key, group in (('texts', texts), ('suites', suites)) if group}


def _summarize_rows(rows: list[Row]) -> Row:
    """Returns the summary of a run that has progressed as far as these rows."""
    results: Row = {'step': rows[-1]['step']} if rows else {}
    trained = [row for row in rows if 'ce' in row]
    validated = [row for row in rows if 'validation_ce' in row]
    if trained:
        rates = [row['tokens_per_sec'] for row in trained if row.get('tokens_per_sec')]
        results |= {'ce': trained[-1]['ce'], 'tokens': trained[-1].get('tokens')}
        results['tokens_per_sec_mean'] = sum(rates) / len(rates) if rates else None
    if validated:
        last = validated[-1]
        names = ('validation_ce', 'bits_per_byte', 'perplexity')
        results |= {name: last.get(name) for name in names}
        results['validated_step'] = last['step']
    for row in rows:
        results |= {n: v for n, v in row.items() if n.startswith((TEXT, 'texts_', SUITE))}
    finite = [row for row in validated if row['validation_ce'] is not None]
    if finite:
        best = min(finite, key=lambda row: row['validation_ce'])
        results |= {'best_validation_ce': best['validation_ce'], 'best_step': best['step']}
        results['best_bits_per_byte'] = best.get('bits_per_byte')
    return results
