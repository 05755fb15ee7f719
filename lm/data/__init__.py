"""Text in, batches out: `open_dataset(cfg.data)` prepares what it names, once, and opens it."""

import contextlib
import dataclasses
from collections.abc import Callable

from lm.config.fields import DataConfig
from lm.config.mixture import Mixed, Shares
from lm.data import mixed, pieces, prepare, prepared, tokenizers
from lm.data.loader import (
    Batch,
    Feed,
    Place,
    batch_at,
    check_epochs,
    evaluation_batches,
    steps_in_epoch,
)
from lm.data.packing import PACKINGS
from lm.data.rows import Rows
from lm.data.shared import shared
from lm.data.sources import SOURCES, Source, open_source
from lm.data.split import SPLITS
from lm.data.tokenizers import TOKENIZERS
from lm.data.utf8 import INVALID_UTF8
from lm.storage.buckets import is_url, open_bucket
from lm.storage.files import InUse
from modules.choices import choose

__all__ = [
    'INVALID_UTF8',
    'PACKINGS',
    'SOURCES',
    'TOKENIZERS',
    'Batch',
    'Dataset',
    'Feed',
    'Place',
    'Rows',
    'batch_at',
    'check',
    'check_epochs',
    'evaluation_batches',
    'open_dataset',
    'steps_in_epoch',
    'tokenizers',
]

LEAST = {'seq_len': 1, 'batch_size': 1, 'epochs': 1, 'seed': 0, 'prefetch': 0}
MOST = 2**31 - 1  # devices count with 32 bits


@dataclasses.dataclass(frozen=True)
class Dataset:
    """`digest` identifies the prepared data; `report` counts what is in it, and what was fixed."""

    tokenizer: tokenizers.Tokenizer
    train: Rows | Mixed
    validation: Rows | Mixed
    digest: str
    report: dict


def check(cfg: DataConfig) -> None:
    """Every name and number of the section, before any work.

    Raises ValueError, with the nearest name, for whatever `open_dataset` could not use.
    """
    _check(cfg)
    if cfg.mixture is None:
        open_source(cfg.source, cfg.text_field)
    else:
        mixed.parts(cfg)


def _check(cfg: DataConfig) -> tokenizers.Plan:
    for name, least in LEAST.items():
        if not least <= (value := getattr(cfg, name)) <= MOST:
            bound = f'at least {least}' if value < least else f'at most {MOST}'
            raise ValueError(f'data.{name} must be {bound}; got {value}.')
    if not 0 <= cfg.validation_fraction < 1:
        raise ValueError(
            'data.validation_fraction must be at least 0 and less than 1; '
            f'got {cfg.validation_fraction}.'
        )
    if is_url(cfg.cache_dir):
        open_bucket(cfg.cache_dir)
    choose(PACKINGS, cfg.packing, 'data.packing')
    choose(INVALID_UTF8, cfg.invalid_utf8, 'data.invalid_utf8')
    return tokenizers.plan(cfg.tokenizer)


def open_dataset(cfg: DataConfig, *, say: Callable[[str], None] = print) -> Dataset:
    """The data of a config, prepared now unless the cache holds it; `say` is told what is done.

    Raises ValueError for names and numbers that cannot be, a corpus that is empty or shorter than
    one row; OSError where the cache cannot be written, or what it holds is damaged.
    """
    plan = _check(cfg)
    if cfg.mixture is None:
        return _open(cfg, open_source(cfg.source, cfg.text_field), plan, say)
    parts = mixed.parts(cfg)
    plan = mixed.shared_plan(plan, parts, say)
    return _mixture(parts, _open_all(parts, plan, say))


def _open_all(parts: list[mixed.Part], plan: tokenizers.Plan, say: Callable) -> list[Dataset]:
    """Those that another process prepares come last, so that several prepare different ones."""
    opened: dict[str, Dataset] = {}
    for wait in (False, True):
        for name, cfg, source in [(p.ingredient.name, p.cfg, p.source) for p in parts]:
            if name in opened:
                continue
            with mixed.named(name), contextlib.suppress(InUse):
                opened[name] = _open(cfg, source, plan, say, wait)
    return [opened[part.ingredient.name] for part in parts]


def _open(
    cfg: DataConfig, source: Source, plan: tokenizers.Plan, say: Callable, wait: bool = True
) -> Dataset:
    name = prepare.digest(source, plan, cfg)
    found = prepared.load(
        shared(
            cfg.cache_dir,
            name,
            make=lambda: pieces.made_together(source, plan, cfg, name, say, wait),
            damage=prepared.damage,
            say=say,
            wait=wait,
        )
    )
    held = found.report['train']['tokens']
    if held < cfg.seq_len + 1:
        raise ValueError(
            f'the training split of {cfg.source} holds {held} tokens, less than one row of '
            f'data.seq_len + 1 = {cfg.seq_len + 1}. Name more text, or set data.seq_len to '
            f'{held - 1} at most.'
        )
    train, validation = (_rows(found, split, cfg) for split in SPLITS)
    return Dataset(found.tokenizer, train, validation, name, found.report)


def _mixture(parts: list[mixed.Part], datasets: list[Dataset]) -> Dataset:
    names = tuple(part.ingredient.name for part in parts)
    shares = Shares([part.ingredient.weight for part in parts])
    digests = [dataset.digest for dataset in datasets]
    return Dataset(
        datasets[0].tokenizer,
        Mixed(names, shares, tuple(dataset.train for dataset in datasets)),
        Mixed(names, shares, tuple(dataset.validation for dataset in datasets)),
        mixed.digest(parts, digests),
        mixed.report(names, shares.of_each, digests, [dataset.report for dataset in datasets]),
    )


def _rows(found: prepared.Prepared, split: str, cfg: DataConfig) -> Rows:
    documents = found.documents[split]
    layout = PACKINGS[cfg.packing](documents, cfg.seq_len)
    n_bytes = found.report[split]['bytes']
    return Rows(found.chunks[split], documents, layout, cfg.seq_len, n_bytes)
