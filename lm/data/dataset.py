"""Opens the data of a config: one source, or a mixture of sources with one tokenizer.

The validation split is a part of each source, or data.validation_source.

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
from lm.data import cache, chat_pieces, prepare, prepared, round_trip, tokenizers
from lm.data.prepared import LEFT_OUT, ROUND_TRIP, SHARED, TOKENIZER
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
# configs/default.py has this fraction, so that it cannot be told from none given.
DEFAULT_FRACTION = 0.02


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
        _open_source(cfg)
    else:
        _open_sources(cfg)


def _check_fields(cfg: DataConfig) -> TokenizerPlan:
    for name, lower_bound in LOWER_BOUNDS.items():
        if not lower_bound <= (value := getattr(cfg, name)) <= UPPER_BOUND:
            bound = f'at least {lower_bound}' if value < lower_bound else f'at most {UPPER_BOUND}'
            raise ValueError(f'data.{name} must be {bound}; got {value}.')
    if not 0 <= cfg.validation_fraction < 1:
        raise ValueError(
            'data.validation_fraction must be at least 0 and less than 1; got '
            f'{cfg.validation_fraction}.'
        )
    if cfg.validation_source and cfg.validation_fraction != DEFAULT_FRACTION:
        raise ValueError(
            f'data.validation_fraction={cfg.validation_fraction} has no effect with '
            f'data.validation_source={cfg.validation_source}, which is the whole validation split. '
            f'Leave one of them out (the default fraction is {DEFAULT_FRACTION}).'
        )
    if is_url(cfg.cache_dir):
        open_bucket(cfg.cache_dir)
    try:
        str(folder := cache.root(cfg.cache_dir)).encode()
    except UnicodeEncodeError as error:
        raise ValueError(
            f'prepared data cannot be stored in {os.fsencode(folder)!r}: its name, or this locale, '
            'is not UTF-8. Set data.cache_dir to another folder, or the environment variable '
            'PYTHONUTF8=1.'
        ) from error
    choose(PACKINGS, cfg.packing, 'data.packing')
    choose(INVALID_UTF8, cfg.invalid_utf8, 'data.invalid_utf8')
    return tokenizers.plan_tokenizer(cfg.tokenizer)


def _open_sources(cfg: DataConfig) -> list[MixtureSource]:
    """Opens the sources of cfg.mixture. Raises ValueError, with the name of the invalid source."""
    sources, validation = [], _open_validation(cfg)
    assert cfg.mixture is not None
    for ingredient in parse_mixture(cfg.mixture):
        with _prefix_errors(ingredient.name):
            source_cfg = dataclasses.replace(cfg, source=ingredient.source, mixture=None)
            source = dataclasses.replace(_open_text(source_cfg), validation=validation)
            _check_kinds(source_cfg, source)
            sources.append(MixtureSource(ingredient, source_cfg, source))
    return sources


def _open_source(cfg: DataConfig) -> Source:
    """Opens the source of a config, with its validation source if it has one."""
    source = dataclasses.replace(_open_text(cfg), validation=_open_validation(cfg))
    _check_kinds(cfg, source)
    return source


def _open_text(cfg: DataConfig) -> Source:
    """Opens cfg.source. Raises ValueError also if the tokenizer cannot encode conversations."""
    source = open_source(cfg.source, cfg.text_field)
    if source.is_chat and cfg.tokenizer.startswith('ids:'):
        raise ValueError(
            f'data.source={cfg.source} has conversations, but data.tokenizer={cfg.tokenizer} '
            "cannot encode text. Set data.tokenizer to the model's tokenizer, hf:FOLDER."
        )
    return source


def _check_kinds(cfg: DataConfig, source: Source) -> None:
    """Raises ValueError if one of a source and its validation source holds conversations."""
    if source.validation is not None and source.validation.is_chat != source.is_chat:
        raise ValueError(
            f'data.source={cfg.source} and data.validation_source={cfg.validation_source} must '
            'both be text, or both be conversations (chat:).'
        )


def _open_validation(cfg: DataConfig) -> Source | None:
    """Opens data.validation_source; None if it is empty. Its errors name this field."""
    if not cfg.validation_source:
        return None
    try:
        return open_source(cfg.validation_source, cfg.text_field)
    except ValueError as error:
        raise ValueError(str(error).replace('data.source', 'data.validation_source')) from error


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
        dataset = _open_single(cfg, _open_source(cfg), plan, say)
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
    return _mix_datasets(
        sources, [datasets[part.ingredient.name] for part in sources], bool(cfg.validation_source)
    )


def _open_single(
    cfg: DataConfig, source: Source, plan: TokenizerPlan, say: Callable, wait: bool = True
) -> Dataset:
    digest = prepare.digest(source, plan, cfg)
    origins = _report_origins(cfg, source, say)
    prepare_folder = functools.partial(prepare.prepare, source, plan, cfg, digest, say, wait)
    find_damage = prepared.find_damage
    folder = cache.fetch_or_make(
        cfg.cache_dir, digest, make=prepare_folder, find_damage=find_damage, say=say, wait=wait
    )
    tokenizer, report, rows = prepared.load(folder, cfg.packing, cfg.seq_len)
    n_tokens = report['train']['tokens']
    if source.is_chat:
        _check_chats(cfg, rows, report, say)
    elif n_tokens < cfg.seq_len + 1:
        raise ValueError(
            f'the training split of {cfg.source}{source.contents} has {n_tokens} tokens, but one '
            f'row needs data.seq_len + 1 = {cfg.seq_len + 1}. Add text, or set data.seq_len to at '
            f'most {n_tokens - 1}.'
        )
    loss = report.get(ROUND_TRIP)
    if loss is None and source.files:  # prepared by a version that did not measure it
        samples = round_trip.sample_documents(source.documents())
        loss = round_trip.measure_loss(tokenizer, samples)
    if note := round_trip.describe_loss(loss, cfg.tokenizer, cfg.source):
        say(note)
    for note in _list_split_notes(cfg, report):
        say(note)
    return Dataset(tokenizer, **rows, digest=digest, report=report | origins)


def _report_origins(cfg: DataConfig, source: Source, say: Callable) -> dict[str, str]:
    """Reports the origin and notes of the source, and of the validation source if it has one.

    Args:
      cfg: the data section.
      source: the text.
      say: gets the lines.

    Returns:
      The origins, by their fields of the report.
    """
    origins = {}
    sources = [('origin', cfg.source, source)]
    if source.validation is not None:
        sources.append(('validation_origin', cfg.validation_source, source.validation))
    for field, name, part in sources:
        if part.origin:
            say(f'data: {name} is {part.origin}')
            origins[field] = part.origin
        for note in part.notes:
            say(note)
    return origins


def _list_split_notes(cfg: DataConfig, report: Mapping[str, Any]) -> list[str]:
    """Returns notes on a validation split of another size than expected, or of training text.

    Args:
      cfg: the data section.
      report: counts of both splits.
    """
    notes, counts = [], report['validation']
    share = counts['bytes'] / (counts['bytes'] + report['train']['bytes'])
    if n_shared := report.get(SHARED, 0):
        notes.append(
            f'NOTE: {n_shared:,} documents of the validation text, {cfg.validation_source}, are '
            f'also in the training text, {cfg.source}'
        )
    elif not cfg.validation_source and share > 2 * cfg.validation_fraction:
        reason = (
            'there are too few documents, or their lengths differ too much'
            if cfg.validation_fraction
            else 'validation needs at least one document'
        )
        notes.append(
            f'NOTE: {share:.2%} of {cfg.source} is held out for validation, instead of '
            f'{cfg.validation_fraction:.2%} '
            f'(data.validation_fraction={cfg.validation_fraction:g}): {reason}. To use separate '
            'validation text, set data.validation_source.'
        )
    if counts['tokens'] < cfg.seq_len + 1:
        notes.append(
            f'NOTE: the validation split of {cfg.validation_source or cfg.source} has '
            f'{counts["tokens"]} tokens, less than one row of data.seq_len + 1 = {cfg.seq_len + 1}'
        )
    return notes


def _check_chats(
    cfg: DataConfig, rows: Mapping[str, Rows], report: Mapping[str, Any], say: Callable
) -> None:
    """Reports the conversations that are left out. Raises ValueError if a split has no other."""
    for split, source in chat_pieces.list_split_sources(cfg).items():
        if not len(rows[split]):
            raise ValueError(
                f'every conversation of the {split} split of {source} is longer than data.seq_len '
                f'+ 1 = {cfg.seq_len + 1} tokens; the longest has {rows[split].longest}. Set '
                f'data.seq_len to {rows[split].longest - 1}.'
            )
    chat_pieces.describe_rows(rows, report[LEFT_OUT], say)
    if not cfg.mask_documents:
        say(
            'NOTE: conversations in the same row attend to each other. Set '
            'data.mask_documents=True to separate them.'
        )


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
                yield from prepare.training_texts(corpus, cfg.validation_fraction, source.is_chat)

    scans.mkdir(exist_ok=True)
    plan.build(texts()).save(folder / TOKENIZER)
    prepared.seal(folder)
    cache.discard(scans.parent, scans.name)


def _digest_parts(*parts: str) -> str:
    return cache.digest_bytes(*(part.encode() for part in (str(prepared.FORMAT), *parts)))


def _mix_datasets(
    sources: Sequence[MixtureSource], datasets: Sequence[Dataset], is_validation_shared: bool
) -> Dataset:
    """Joins the datasets of all sources. Their own reports are under `sources` in the new one.

    is_validation_shared: whether all of them have the validation split of the first.
    """
    names = tuple(source.ingredient.name for source in sources)
    shares = Shares([source.ingredient.weight for source in sources])
    reports = [dataset.report for dataset in datasets]
    report: dict[str, Any] = {
        split: _sum_counts([source_report[split] for source_report in reports]) for split in SPLITS
    }
    if is_validation_shared:
        report['validation'] = reports[0]['validation']
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
    train, validation = (tuple(getattr(dataset, s) for dataset in datasets) for s in SPLITS)
    if any(source.source.is_chat for source in sources):  # a batch has the same arrays throughout
        bos_id = datasets[0].tokenizer.bos_id
        train, validation = ([r.with_targets(bos_id) for r in rows] for rows in (train, validation))
    train = MixedRows(names, shares, tuple(train))
    validation = (
        validation[0] if is_validation_shared else MixedRows(names, shares, tuple(validation))
    )
    digest = _digest_parts('mixture of', *identities)
    return Dataset(datasets[0].tokenizer, train, validation, digest, report)


def _sum_counts(counts: Sequence[Mapping[str, int]]) -> dict[str, int]:
    return {name: sum(source_counts[name] for source_counts in counts) for name in counts[0]}
