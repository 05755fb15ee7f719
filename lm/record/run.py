"""The record of a run: what its folder holds, read when it is asked for.

Every reader of a run goes through it: sweeps, tables, reports, fits, trackers. A run that trains
changes its files, so that nothing is kept between two questions. Needs no JAX, but for
`read_recipe` and `config`.
"""

import contextlib
import dataclasses
import functools
import json
import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lm.record.metrics import FILE, Tail, read_rows
from lm.record.names import CONFIG, EVALUATIONS, FINAL, PROFILE, SUMMARY, SWEEP
from lm.storage.files import UnreadableFile, read_json

if TYPE_CHECKING:
    from lm.config.recipe import Recipe

Row = dict[str, Any]  # of metrics.jsonl, or by the names of summary.json
METRICS = {'ce': 'validation_ce', 'bits_per_byte': 'bits_per_byte'}  # column: in summary.json
# Errors of reading a record that was written over: it holds other things than it should.
READ_ERRORS = (ValueError, KeyError, TypeError, AttributeError, OSError)


@dataclasses.dataclass(frozen=True)
class Run:
    """The folder of a run, of a cell of a sweep too; it need not exist yet."""

    folder: Path

    @property
    def name(self) -> str:
        return self.folder.absolute().name

    @property
    def sweep(self) -> str | None:
        """The name of the sweep that the run is a cell of; None for a run alone."""
        parent = self.folder.absolute().parent
        return parent.name if (parent / SWEEP).exists() else None

    @property
    def has_begun(self) -> bool:
        """Whether there is a config.json, which the first step writes."""
        return (self.folder / CONFIG).exists()

    def read_config(self) -> dict[str, Any]:
        """Returns config.json as nested sections. Raises Unreadable if damaged, OSError if there is
        none.
        """
        return read_json(self.folder / CONFIG)

    def read_recipe(self) -> 'Recipe':
        """Returns the config in the present form. Raises ValueError without one, Unreadable if
        it is damaged.
        """
        from lm.record.upgrade import resolve_stored

        try:
            raw = self.read_config()
        except FileNotFoundError as error:
            path = self.folder / CONFIG
            raise ValueError(f'{self.folder} holds no run: there is no {path}') from error
        try:
            return resolve_stored(raw)
        except ValueError as error:
            raise ValueError(f'{self.folder / CONFIG}: {error}') from error

    @property
    def config(self) -> Mapping[str, Any]:
        """The config by path, in the present form; of one that is no config of this version what is
        in it, and the defaults of fields that were added since. Raises ValueError, naming the file.
        """
        with annotate_errors(self.folder / CONFIG):
            return _flat_config(json.dumps(self.read_config()))

    @property
    def summary(self) -> Row:
        """The summary; an empty one if there is none that can be read."""
        try:
            return read_json(self.folder / SUMMARY)
        except (FileNotFoundError, NotADirectoryError, UnreadableFile):
            return {}

    @property
    def status(self) -> str | None:
        """The status in the summary; None before there is one that can be read."""
        return self.summary.get('status')

    @property
    def is_final(self) -> bool:
        """Whether the run has ended for good; one with a damaged summary goes on."""
        return self.status in FINAL

    def loss(self, metric: str) -> float | None:
        """Returns the last validation loss, by the names of METRICS, once the run has ended for
        good: inf if it diverged. None before.
        """
        summary = self.summary
        return final_loss(summary.get('status'), summary.get(METRICS[metric]))

    def rows(self) -> list[Row]:
        """Returns the intact rows of metrics.jsonl so far, None for numbers that are not finite.
        Raises ValueError, naming the file, where it cannot be read.
        """
        with annotate_errors(self.folder / FILE):
            rows = read_rows(self.folder / FILE)
        return [row for row in rows if type(row['step']) is int]

    def tail(self) -> Tail:
        """Returns a reader of the rows that are appended while the run trains."""
        return Tail(self.folder / FILE)

    def results(self) -> Row:
        """Returns results by the names of summary.json; what is not in it is found from the rows so
        far. Raises ValueError for a file that cannot be read.
        """
        if not self.folder.exists():
            return {'status': 'waiting'}
        summary = {'status': 'unfinished'}
        path = self.folder / SUMMARY
        if path.exists():
            summary = read_json(path)
            if not isinstance(summary.get('status'), str):
                raise ValueError(f'{path} cannot be read (it has no status)')
            if not is_warning_list(summary.get('warnings', [])):
                raise ValueError(f'{path} cannot be read (its warnings are none of ours)')
        if 'best_validation_ce' in summary:
            return summary
        with annotate_errors(self.folder / FILE):
            return _summarize_rows(self.rows()) | summary

    @property
    def profile(self) -> Row | None:
        """The summary of traced steps (`lm.run.profile`); None without one that can be read."""
        try:
            return read_json(self.folder / PROFILE / SUMMARY)
        except (OSError, UnreadableFile):
            return None

    @property
    def evaluations(self) -> list[Path]:
        """The kept results of suites, by step (`eval.evaluation.kept`)."""
        found = (self.folder / EVALUATIONS).glob('*/*.json')
        return sorted(found, key=lambda path: (len(path.parent.name), path))


def list_runs(workdir: Path) -> list[Run]:
    """Returns the run of a folder, or all cells of a sweep that have begun."""
    if Run(workdir).has_begun:
        return [Run(workdir)]
    return [Run(path.parent) for path in sorted(workdir.glob(f'*/{CONFIG}'))]


def final_loss(status: str | None, loss: float | None) -> float | None:
    """Returns the loss of a run that has ended for good: inf if it diverged, or has none that is a
    number. None for one that has not ended.
    """
    if status not in FINAL:
        return None
    return loss if status == 'done' and loss is not None else math.inf


def run_seconds(summary: Mapping[str, Any]) -> float:
    """Returns the seconds of a run, divided by the runs that trained beside it in its program."""
    return (summary.get('wall_sec') or 0.0) / (summary.get('side_by_side') or 1)


@contextlib.contextmanager
def annotate_errors(
    path: Path, advice: str = '', errors: tuple[type[Exception], ...] = READ_ERRORS
) -> Iterator[None]:
    """Adds the name of `path`, where it lacks, and advice to errors of reading it."""
    try:
        yield
    except errors as error:
        is_told = isinstance(error, ValueError | OSError)  # others say no more than a name
        text = str(error) if is_told else f'{type(error).__name__}: {error}'
        if str(path) not in text:
            text = f'{path} cannot be read ({text})'
        raise ValueError(f'{text}. {advice}' if advice else text) from error


def is_warning_list(value: Any) -> bool:
    """Whether it is a list of warnings, as `lm.run.warnings` gives them and JSON holds them."""
    return isinstance(value, list) and all(map(_is_warning, value))


def _is_warning(value: Any) -> bool:
    match value:
        case {'kind': str(), 'step': int(), 'layer': layer, 'head': head, 'seen': str(), 'help': h}:
            places = all(one is None or isinstance(one, int) for one in (layer, head))
            lines = isinstance(h, list) and all(isinstance(one, list | tuple) for one in h)
            return places and lines and all(list(map(type, one)) == [str, str] for one in h)
    return False


@functools.lru_cache(maxsize=10_000)
def _flat_config(text: str) -> Mapping[str, Any]:
    from lm.config.fields import FIELDS
    from lm.config.resolve import flatten
    from lm.record.upgrade import rename_fields, resolve_stored

    raw = json.loads(text)
    try:
        return flatten(resolve_stored(raw))
    except ValueError:
        missing = dataclasses.MISSING
        added = {path: f.default for path, f in FIELDS.items() if f.default is not missing}
        return added | rename_fields(flatten(raw))


def _summarize_rows(rows: list[Row]) -> Row:
    """The summary of a run that has got as far as these rows."""
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
    finite = [row for row in validated if row['validation_ce'] is not None]
    if finite:
        best = min(finite, key=lambda row: row['validation_ce'])
        results |= {'best_validation_ce': best['validation_ce'], 'best_step': best['step']}
        results['best_bits_per_byte'] = best.get('bits_per_byte')
    return results
