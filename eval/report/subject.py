"""What a page is about: a run, a sweep, or several of them side by side."""

import collections
import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from eval.compare import PER_BYTE_FIELDS, metric_of
from eval.runs import SWEEP, Record, gather, read_sweep
from eval.text import number
from eval.variants import LR, SEEDS, Variant, split
from lm.config import flatten
from lm.record.fetched import at_hand
from lm.record.workdir import CONFIG

BITS_PER_BYTE = 'bits_per_byte'


@dataclasses.dataclass(frozen=True)
class Subject:
    """`sweep` is the sweep.json, of several with the base of the first and the axes of all; `apart`
    says in which fields of their bases several differ: field -> values, learning rate and seeds
    aside.
    """

    folders: list[Path]
    records: list[Record]
    sweep: dict[str, Any]
    variants: list[Variant]
    metric: str
    apart: dict[str, list[Any]]

    @property
    def is_sweep(self) -> bool:
        return len(self.folders) > 1 or (self.folders[0] / SWEEP).exists()

    @property
    def title(self) -> str:
        return ', '.join(folder.resolve().name for folder in self.folders)


def read_subject(workdirs: Sequence[str | Path]) -> Subject:
    """What lies in the folders. The baseline is that of the first.

    Raises ValueError where one holds neither a run nor a sweep, where one is given twice, and where
    losses per token do not compare and there are no bits per byte.
    """
    folders = [at_hand(workdir) for workdir in workdirs]
    for folder in folders:
        if not any((folder / name).exists() for name in (SWEEP, CONFIG)):
            raise ValueError(
                f'{folder} holds no run and no sweep: there is no {SWEEP} or {CONFIG}. Give a '
                '--workdir of one; the train.py command of a sweep writes a lost sweep.json anew'
            )
    twice = [f for f, n in collections.Counter(f.resolve() for f in folders).items() if n > 1]
    if twice:
        raise ValueError(f'{twice[0]} is given twice; give each --workdir once')
    each = [gather(folder) for folder in folders]
    sweeps = [read_sweep(folder) for folder in folders]
    records = [record for own in each for record in own]
    if len(folders) == 1:
        (sweep,) = sweeps
        return Subject(folders, records, sweep, split(records, sweep), metric_of(sweep), {})
    apart = _apart([flatten(sweep['base']) for sweep in sweeps])
    sweep = {'base': sweeps[0]['base'], 'axes': _axes(sweeps), 'cells': []}
    metric = BITS_PER_BYTE if PER_BYTE_FIELDS & apart.keys() else metric_of(sweep)
    if metric == BITS_PER_BYTE:
        _check_bits_per_byte(folders, each, apart)
    return Subject(folders, records, sweep, _variants(folders, each, sweeps), metric, apart)


def _apart(bases: list[dict[str, Any]]) -> dict[str, list[Any]]:
    paths = dict.fromkeys(path for base in bases for path in base if path not in (LR, *SEEDS))
    values = {path: [base.get(path) for base in bases] for path in paths}
    return {path: own for path, own in values.items() if any(value != own[0] for value in own)}


def _axes(sweeps: list[dict[str, Any]]) -> dict[str, list[Any]]:
    axes: dict[str, list[Any]] = {}
    for sweep in sweeps:
        for path, values in sweep['axes'].items():
            known = axes.setdefault(path, [])
            known += [value for value in values if value not in known]
    return axes


def _check_bits_per_byte(
    folders: list[Path], each: list[list[Record]], apart: dict[str, list[Any]]
) -> None:
    for folder, records in zip(folders, each, strict=True):
        ended = [record for record in records if record['ce'] is not None]
        if ended and not any(record[BITS_PER_BYTE] for record in ended):
            values = [
                f'{path} ({", ".join(map(number, apart[path]))})'
                for path in sorted(PER_BYTE_FIELDS & apart.keys())
            ]
            raise ValueError(
                f'losses per token do not compare, since the sweeps differ in {", ".join(values)}, '
                f'and the runs of {folder} have no bits per byte. Give sweeps of one text and '
                'tokenizer, or make a page of each'
            )


def _variants(
    folders: list[Path], each: list[list[Record]], sweeps: list[dict[str, Any]]
) -> list[Variant]:
    """Those of all sweeps, with the name of their sweep where it takes one to tell them apart."""
    names = [folder.resolve().name for folder in folders]
    if len(set(names)) < len(names):
        names = [str(folder) for folder in folders]
    found = [
        dataclasses.replace(variant, sweep=name, is_baseline=variant.is_baseline and i == 0)
        for i, (name, own, sweep) in enumerate(zip(names, each, sweeps, strict=True))
        for variant in split(own, sweep)
    ]
    counts = collections.Counter(variant.name for variant in found)
    return [
        dataclasses.replace(variant, name=_name(variant, counts[variant.name] > 1))
        for variant in found
    ]


def _name(variant: Variant, is_shared: bool) -> str:
    if not variant.values:
        return variant.sweep
    return f'{variant.name} ({variant.sweep})' if is_shared else variant.name
