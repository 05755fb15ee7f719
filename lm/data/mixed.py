"""A mixture of sources: each is prepared alone, all with one tokenizer.

A `byte` or `hf:` tokenizer needs no text, so a source has the same digest here as alone, and is
prepared once for both. A `bpe:SIZE` is trained on the training splits of all sources, as much of
each as it holds: shares do not count, so that other shares prepare nothing anew.
"""

import contextlib
import dataclasses
import functools
import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from lm.config.fields import DataConfig
from lm.config.mixture import Ingredient, parse
from lm.data import cache, prepare, prepared, tokenizers
from lm.data.prepared import TOKENIZER
from lm.data.scan import scanned
from lm.data.shared import shared
from lm.data.sources import Source, open_source
from lm.data.split import SPLITS


class Part(NamedTuple):
    """cfg: the data section that has this source alone."""

    ingredient: Ingredient
    cfg: DataConfig
    source: Source


def parts(cfg: DataConfig) -> list[Part]:
    """The sources of cfg.mixture, opened. Raises ValueError, naming the one that cannot be."""
    found = []
    for one in parse(cfg.mixture):
        with named(one.name):
            alone = dataclasses.replace(cfg, source=one.source, mixture=None)
            found.append(Part(one, alone, open_source(one.source, cfg.text_field)))
    return found


@contextlib.contextmanager
def named(name: str) -> Iterator[None]:
    """What is wrong with a source says which of the mixture it is."""
    try:
        yield
    except ValueError as error:
        raise ValueError(f'{name!r} of data.mixture: {error}') from error


def shared_plan(plan: tokenizers.Plan, found: Sequence[Part], say: Callable) -> tokenizers.Plan:
    """A plan that needs no text any more: what it trains is trained here, once per content, and
    kept beside the prepared data. That reads each source once more than its preparation does.
    """
    if not plan.is_trained:
        return plan
    alone = {prepare.digest(p.source, plan, p.cfg): p for p in found}
    name = _digest('tokenizer of', *sorted(alone))
    cache_dir = found[0].cfg.cache_dir

    def damage(path: Path) -> str:
        return prepared.damage(path, (TOKENIZER,))

    def make() -> Path:
        train = functools.partial(_train, plan, alone, say=say)
        return cache.made_once(cache.root(cache_dir), name, make=train, damage=damage, say=say)

    folder = shared(cache_dir, name, make=make, damage=damage, say=say)
    tokenizer = tokenizers.load(folder / TOKENIZER)
    return tokenizers.Plan(plan.vocab_size, f'trained {name}'.encode(), lambda texts: tokenizer)


def _train(plan: tokenizers.Plan, alone: Mapping[str, Part], folder: Path, say: Callable) -> None:
    """In the order of digests, so that neither names nor order nor shares make another one."""
    spec = next(iter(alone.values())).cfg.tokenizer
    say(f'data: training {spec} on the training splits of {len(alone)} sources')

    def texts() -> Iterator[str]:
        for digest, part in sorted(alone.items()):
            with named(part.ingredient.name), scanned(part.source, part.cfg, folder) as found:
                prepare.check_unchanged(part.source, plan, part.cfg, digest)
                yield from prepare.training_texts(found, part.cfg.validation_fraction)

    plan.build(texts()).save(folder / TOKENIZER)
    prepared.seal(folder)


def digest(found: Sequence[Part], digests: Sequence[str]) -> str:
    """Of the mixture: names, weights, and what each source has as its own."""
    of_each = [
        f'{part.ingredient.name} {part.ingredient.weight!r} {own}'
        for part, own in zip(found, digests, strict=True)
    ]
    return _digest('mixture of', *of_each)


def _digest(*parts: str) -> str:
    state = hashlib.blake2b(digest_size=16)
    for part in (str(prepare.FORMAT), *parts):
        state.update(b'%d ' % len(part) + part.encode())
    return state.hexdigest()


def report(
    names: Sequence[str], shares: Sequence[float], digests: Sequence[str], reports: Sequence[dict]
) -> dict[str, Any]:
    """The counts of all sources together, as one has them, and of each under `sources`."""
    total = {split: _sum([of[split] for of in reports]) for split in SPLITS}
    total['empty_documents'] = sum(of['empty_documents'] for of in reports)
    total['invalid_utf8'] = _sum([of['invalid_utf8'] for of in reports])
    each = zip(names, shares, digests, reports, strict=True)
    return total | {
        'sources': {name: {'share': share, 'digest': own, **of} for name, share, own, of in each}
    }


def _sum(counts: Sequence[Mapping[str, int]]) -> dict[str, int]:
    return {name: sum(of[name] for of in counts) for name in counts[0]}
