"""The subject of a page: a run, a sweep, or several of them side by side."""

import collections
import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from lm.record.remote.local_copy import fetch_records
from lm.record.workdir import CONFIG, SWEEP
from lm.study.arm import Ablation
from lm.study.plan.settings import PER_BYTE_FIELDS, select_metric
from lm.study.tables.ablation import make_variants, read_ablation
from lm.study.tables.results import Record, gather, has_runs, read_sweep
from lm.study.tables.text import format_number
from lm.study.tables.variants import Variant, find_base_differences, split_variants

BITS_PER_BYTE = 'bits_per_byte'


@dataclasses.dataclass(frozen=True)
class Subject:
    """The runs and variants that a page shows.

    sweep: the sweep.json; for several, the base of the first with the axes of all.
    base_differences: field -> values, if the bases of several differ, except learning rate and
    seeds. ablation: of a tuned sweep; its arms are the variants.
    """

    folders: list[Path]
    records: list[Record]
    sweep: dict[str, Any]
    variants: list[Variant]
    metric: str
    base_differences: dict[str, list[Any]]
    ablation: Ablation | None = None

    @property
    def is_sweep(self) -> bool:
        """Whether the page shows a sweep or several folders."""
        return len(self.folders) > 1 or (self.folders[0] / SWEEP).exists()

    @property
    def title(self) -> str:
        """Returns the names of the folders."""
        return ', '.join(folder.resolve().name for folder in self.folders)


def read_subject(workdirs: Sequence[str | Path]) -> Subject:
    """Reads the folders. The first gives the baseline.

    Raises:
      ValueError: if a folder has neither a run nor a sweep or is given twice, if losses per token
        are not comparable and there are no bits per byte, or if any of several is a tuned sweep.
    """
    folders = [fetch_records(workdir) for workdir in workdirs]
    for folder in folders:
        if not has_runs(folder):
            raise ValueError(
                f'{folder} must contain a run or a sweep, but has no {CONFIG} and no {SWEEP}. Set '
                '--workdir to the folder of one. To restore a lost sweep.json, run the train.py '
                'command of the sweep again'
            )
    duplicates = [
        folder
        for folder, count in collections.Counter(folder.resolve() for folder in folders).items()
        if count > 1
    ]
    if duplicates:
        raise ValueError(f'--workdir lists {duplicates[0]} twice; list each folder once')
    records_by_folder = [gather(folder) for folder in folders]
    sweeps = [read_sweep(folder) for folder in folders]
    records = [record for folder_records in records_by_folder for record in folder_records]
    if len(folders) == 1:
        (sweep,) = sweeps
        if ablation := read_ablation(sweep, records):
            arms = make_variants(ablation)
            return Subject(folders, records, sweep, arms, ablation.metric, {}, ablation)
        return Subject(
            folders,
            records,
            sweep,
            split_variants(records, sweep),
            select_metric(sweep['axes']),
            {},
        )
    if tuned := [folder for folder, sweep in zip(folders, sweeps, strict=True) if 'tune' in sweep]:
        raise ValueError(
            f'{tuned[0]} is a sweep with config.tune, whose arms are compared on fresh seeds that '
            'other runs do not have. Make its report alone, or add the other runs as arms to its '
            'config.sweep'
        )
    base_differences = find_base_differences(sweeps)
    axes: dict[str, list[Any]] = {}
    for path, values in (axis for sweep in sweeps for axis in sweep['axes'].items()):
        axis_values = axes.setdefault(path, [])
        axis_values += [value for value in values if value not in axis_values]
    sweep = {'base': sweeps[0]['base'], 'axes': axes, 'cells': []}
    metric = (
        BITS_PER_BYTE if PER_BYTE_FIELDS & base_differences.keys() else select_metric(sweep['axes'])
    )
    if metric == BITS_PER_BYTE:
        _check_bits_per_byte(folders, records_by_folder, base_differences)
    return Subject(
        folders,
        records,
        sweep,
        _join_variants(folders, records_by_folder, sweeps),
        metric,
        base_differences,
    )


def _check_bits_per_byte(
    folders: list[Path],
    records_by_folder: list[list[Record]],
    base_differences: dict[str, list[Any]],
) -> None:
    for folder, records in zip(folders, records_by_folder, strict=True):
        finished = [record for record in records if record['ce'] is not None]
        if finished and not any(record[BITS_PER_BYTE] for record in finished):
            values = [
                f'{path} ({", ".join(map(format_number, base_differences[path]))})'
                for path in sorted(PER_BYTE_FIELDS & base_differences.keys())
            ]
            raise ValueError(
                f'losses per token are not comparable because the sweeps differ in '
                f'{", ".join(values)}, and the runs in {folder} have no bits per byte. Choose '
                'sweeps with the same text and tokenizer, or make one report per sweep'
            )


def _join_variants(
    folders: list[Path], records_by_folder: list[list[Record]], sweeps: list[dict[str, Any]]
) -> list[Variant]:
    """Returns the variants of all sweeps; shared names get the name of the sweep."""
    names = [folder.resolve().name for folder in folders]
    if len(set(names)) < len(names):
        names = [str(folder) for folder in folders]
    variants = [
        dataclasses.replace(variant, sweep=name, is_baseline=variant.is_baseline and i == 0)
        for i, (name, records, sweep) in enumerate(
            zip(names, records_by_folder, sweeps, strict=True)
        )
        for variant in split_variants(records, sweep)
    ]
    counts = collections.Counter(variant.name for variant in variants)

    def name(variant: Variant) -> str:
        if not variant.values:
            return variant.sweep
        is_shared = counts[variant.name] > 1
        return f'{variant.name} ({variant.sweep})' if is_shared else variant.name

    return [dataclasses.replace(variant, name=name(variant)) for variant in variants]
