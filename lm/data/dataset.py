"""Opens the data of a config: one source, or a mixture of sources with one tokenizer.

A `byte` or `hf:` tokenizer needs no text, so a source in a mixture has the same digest as on its
own, and is prepared once for both. `bpe:SIZE` is trained on the training splits of all sources,
with all the text of each. Shares do not matter, so changing them prepares nothing anew.
"""

import contextlib
import dataclasses
import functools
import os
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from lm.config.fields import DataConfig
from lm.config.mixture import Ingredient, MixedRows, Shares, parse_mixture
from lm.data import cache, prepare, prepared, round_trip, tokenizers
from lm.data.prepared import ROUND_TRIP, TOKENIZER
from lm.data.rows import PACKINGS, Rows
from lm.data.scan import INVALID_UTF8, SPLITS, open_scan, scan_source
from lm.data.sources import Source, open_source
from lm.data.tokenizers import TokenizerPlan
from lm.storage.buckets import is_url, open_bucket
from lm.storage.files import InUseError
from modules.choices import choose

# Of the fields with an integer value.
LOWER_BOUNDS = {'seq_len': 1, 'batch_size': 1, 'epochs': 1, 'seed': 0, 'prefetch': 0}
UPPER_BOUND = 2**31 - 1  # devices count with 32 bits


@dataclasses.dataclass(frozen=True)
class Dataset:
    """A tokenizer and the rows of both splits.

    Attributes:
      digest: identifies the prepared data.
      report: counts of its content and of the repairs to the text.
    """

    tokenizer: tokenizers.Tokenizer
    train: Rows | MixedRows
    validation: Rows | MixedRows
    digest: str
    report: dict


class MixtureSource(NamedTuple):
    """A source of a mixture. cfg: the data section with this source alone."""

    ingredient: Ingredient
    cfg: DataConfig
    source: Source


def check(cfg: DataConfig) -> None:
    """Raises ValueError, with the nearest name, for everything that `open_dataset` cannot use."""
    _check_fields(cfg)
    if cfg.mixture is None:
        open_source(cfg.source, cfg.text_field)
    else:
        _open_sources(cfg)


def _check_fields(cfg: DataConfig) -> TokenizerPlan:
    for name, lower_bound in LOWER_BOUNDS.items():
        if not lower_bound <= (value := getattr(cfg, name)) <= UPPER_BOUND:
            bound = f'at least {lower_bound}' if value < lower_bound else f'at most {UPPER_BOUND}'
            raise ValueError(f'data.{name} must be {bound}; got {value}.')
    if not 0 <= cfg.validation_fraction < 1:
        raise ValueError(
            'data.validation_fraction must be at least 0 and less than 1; '
            f'got {cfg.validation_fraction}.'
        )
    if is_url(cfg.cache_dir):
        open_bucket(cfg.cache_dir)
    try:
        str(folder := cache.root(cfg.cache_dir)).encode()
    except UnicodeEncodeError as error:
        raise ValueError(
            f'prepared data cannot be kept in {os.fsencode(folder)!r}: its name is not UTF-8, or '
            'this locale is not. Set data.cache_dir to another folder, or PYTHONUTF8=1.'
        ) from error
    choose(PACKINGS, cfg.packing, 'data.packing')
    choose(INVALID_UTF8, cfg.invalid_utf8, 'data.invalid_utf8')
    return tokenizers.plan_tokenizer(cfg.tokenizer)


def _open_sources(cfg: DataConfig) -> list[MixtureSource]:
    """Opens the sources of cfg.mixture. Raises ValueError, with the name of the invalid source."""
    sources = []
    assert cfg.mixture is not None
    for ingredient in parse_mixture(cfg.mixture):
        with _prefix_errors(ingredient.name):
            source_cfg = dataclasses.replace(cfg, source=ingredient.source, mixture=None)
            sources.append(
                MixtureSource(
                    ingredient, source_cfg, open_source(ingredient.source, cfg.text_field)
                )
            )
    return sources


@contextlib.contextmanager
def _prefix_errors(name: str) -> Generator[None]:
    """Puts the name of a mixture's source before its ValueErrors."""
    try:
        yield
    except ValueError as error:
        raise ValueError(f'{name!r} of data.mixture: {error}') from error


def open_dataset(cfg: DataConfig, *, say: Callable[[str], None] = print) -> Dataset:
    """Opens the data of a config, and prepares it first unless the cache holds it.

    Args:
      cfg: the data section.
      say: gets lines of progress.

    Raises:
      ValueError: for invalid names and numbers, and for a corpus that is empty or shorter than one
        row.
      OSError: if the cache cannot be written, or its content is damaged.
    """
    plan = _check_fields(cfg)
    if cfg.mixture is None:
        dataset = _open_single(cfg, open_source(cfg.source, cfg.text_field), plan, say)
    else:
        dataset = _open_mixture(cfg, plan, say)
    # Not from the cache: folders whose tokenizer.json is equal share prepared data.
    return dataclasses.replace(dataset, tokenizer=plan.add_files(dataset.tokenizer))


def _open_mixture(cfg: DataConfig, plan: TokenizerPlan, say: Callable[[str], None]) -> Dataset:
    sources = _open_sources(cfg)
    plan = _shared_plan(plan, sources, say)
    datasets: dict[str, Dataset] = {}
    for wait in (False, True):  # sources that another process prepares come last
        for part in sources:
            if (name := part.ingredient.name) not in datasets:
                with _prefix_errors(name), contextlib.suppress(InUseError):
                    datasets[name] = _open_single(part.cfg, part.source, plan, say, wait)
    return _mix_datasets(sources, [datasets[part.ingredient.name] for part in sources])


def _open_single(
    cfg: DataConfig, source: Source, plan: TokenizerPlan, say: Callable, wait: bool = True
) -> Dataset:
    digest = prepare.digest(source, plan, cfg)
    if source.origin:
        say(f'data: {cfg.source} is {source.origin}')
    for note in source.notes:
        say(note)
    prepare_folder = functools.partial(prepare.prepare, source, plan, cfg, digest, say, wait)
    find_damage = prepared.find_damage
    folder = cache.fetch_or_make(
        cfg.cache_dir, digest, make=prepare_folder, find_damage=find_damage, say=say, wait=wait
    )
    tokenizer, report, rows = prepared.load(folder, PACKINGS[cfg.packing], cfg.seq_len)
    n_tokens = report['train']['tokens']
    if n_tokens < cfg.seq_len + 1:
        raise ValueError(
            f'the training split of {cfg.source} holds {n_tokens} tokens, less than one row of '
            f'data.seq_len + 1 = {cfg.seq_len + 1}. Name more text, or set data.seq_len to '
            f'{n_tokens - 1} at most.'
        )
    loss = report.get(ROUND_TRIP)
    if loss is None and source.files:  # prepared by a version that did not measure it
        samples = round_trip.sample_documents(source.documents())
        loss = round_trip.measure_loss(tokenizer, samples)
    if note := round_trip.describe_loss(loss, cfg.tokenizer, cfg.source):
        say(note)
    report |= {'origin': source.origin} if source.origin else {}
    return Dataset(tokenizer, **rows, digest=digest, report=report)


def _shared_plan(
    plan: TokenizerPlan, sources: Sequence[MixtureSource], say: Callable
) -> TokenizerPlan:
    """Returns a plan whose tokenizer exists: trained once per content, and kept in the cache."""
    if not plan.is_trained:
        return plan
    sources_by_digest = {prepare.digest(p.source, plan, p.cfg): p for p in sources}
    name, cache_dir = (
        _digest_parts('tokenizer of', *sorted(sources_by_digest)),
        sources[0].cfg.cache_dir,
    )
    path = cache.root(cache_dir) / name
    train = functools.partial(
        _train_tokenizer, plan, sources_by_digest, path.with_name(f'{name}.pieces'), say=say
    )
    find_damage = functools.partial(prepared.find_damage, names=(TOKENIZER,))
    make_folder = functools.partial(cache.make_once, path, train, find_damage, say)
    folder = cache.fetch_or_make(
        cache_dir, name, make=make_folder, find_damage=find_damage, say=say
    )
    tokenizer = tokenizers.load(folder / TOKENIZER)
    return TokenizerPlan(plan.vocab_size, f'trained {name}'.encode(), lambda texts: tokenizer)


def _train_tokenizer(
    plan: TokenizerPlan,
    sources_by_digest: Mapping[str, MixtureSource],
    scans: Path,
    folder: Path,
    say: Callable,
) -> None:
    """Trains on the sources in order of digests, so that names, order and shares do not matter.

    scans: a folder that keeps the scan of each source. A killed process loses at most one.
    """
    spec = next(iter(sources_by_digest.values())).cfg.tokenizer
    say(f'data: training {spec} on the training splits of {len(sources_by_digest)} sources')

    def texts() -> Iterator[str]:
        for digest, (ingredient, cfg, source) in sorted(sources_by_digest.items()):
            with _prefix_errors(ingredient.name):
                make_scan = functools.partial(scan_source, source, cfg)
                cache.fill(scans / digest, make_scan, prepare.find_scan_damage, say, is_locked=True)
                prepare.check_unchanged(source, plan, cfg, digest)
            with _prefix_errors(ingredient.name), open_scan(scans / digest) as corpus:
                yield from prepare.training_texts(corpus, cfg.validation_fraction)

    scans.mkdir(exist_ok=True)
    plan.build(texts()).save(folder / TOKENIZER)
    prepared.seal(folder)
    cache.discard(scans.parent, scans.name)


def _digest_parts(*parts: str) -> str:
    return cache.digest_bytes(*(part.encode() for part in (str(prepared.FORMAT), *parts)))


def _mix_datasets(sources: Sequence[MixtureSource], datasets: Sequence[Dataset]) -> Dataset:
    """Joins the datasets of all sources. Their own reports are under `sources` in the new one."""
    names = tuple(source.ingredient.name for source in sources)
    shares = Shares([source.ingredient.weight for source in sources])
    reports = [dataset.report for dataset in datasets]
    report: dict[str, Any] = {
        split: _sum_counts([source_report[split] for source_report in reports]) for split in SPLITS
    }
    report['empty_documents'] = sum(source_report['empty_documents'] for source_report in reports)
    report['invalid_utf8'] = _sum_counts(
        [source_report['invalid_utf8'] for source_report in reports]
    )
    report['sources'] = {
        name: {'share': share, 'digest': dataset.digest, **dataset.report}
        for name, share, dataset in zip(names, shares.fractions, datasets, strict=True)
    }
    identities = [
        f'{source.ingredient.name} {source.ingredient.weight!r} {dataset.digest}'
        for source, dataset in zip(sources, datasets, strict=True)
    ]
    train = MixedRows(names, shares, tuple(dataset.train for dataset in datasets))
    validation = MixedRows(names, shares, tuple(dataset.validation for dataset in datasets))
    digest = _digest_parts('mixture of', *identities)
    return Dataset(datasets[0].tokenizer, train, validation, digest, report)


def _sum_counts(counts: Sequence[Mapping[str, int]]) -> dict[str, int]:
    return {name: sum(source_counts[name] for source_counts in counts) for name in counts[0]}
