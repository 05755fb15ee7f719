"""Meshes, remat policies and microbatches, compiled and ranked.

Too many to compile them all, they are ordered first by what can be computed without a compiler:
the bytes that a device holds and sends, by the formulas of `lm.auto_mesh`, and what a remat policy
computes again. The first of that order are compiled, and the config as it is given.
"""

import dataclasses
import itertools
import math
from collections.abc import Callable, Iterator
from typing import Any

from lm.auto_mesh import held_bytes, kept_bytes, moved_bytes
from lm.check import check
from lm.check_mesh import check_devices
from lm.config import replaced
from lm.flops import flops_per_token
from lm.mesh import make_mesh
from lm.sections import Config
from lm.shardings import state_layout
from lm.state import Learner, build_learner
from modules.numerics import REMAT_POLICIES
from tpu.compiled import memory_of, vocabulary_of
from tpu.estimate import rates_of
from tpu.topology import Topology
from tpu.trial import Trial, attempt

AXES = ('fsdp', 'tensor', 'context')
MICROBATCHES = (1, 2, 4)
# Of the operations of a step, 3 of which are one forward pass and the backward pass.
AGAIN = {'none': 3.0, 'dots': 3.1, 'full': 4.0}
FITS = 1.3  # the estimate of memory is one from above; what is further over is not compiled


@dataclasses.dataclass(frozen=True)
class Guess:
    """seconds, memory: as far as they are known without compiling."""

    changes: dict[str, Any]
    seconds: float
    memory: float


def search(
    config: Config,
    topology: Topology,
    say: Callable[[str], None],
    tries: int,
    price: float | None = None,
) -> list[Trial]:
    """The trials, the fastest first, then those that do not fit."""
    given = {f'mesh.{axis}': getattr(config.mesh, axis) for axis in ('data', *AXES)}
    given |= {'model.remat': config.model.remat, 'train.microbatches': config.train.microbatches}
    guesses = sorted(candidates(config, topology), key=lambda one: one.seconds)
    say(f'{len(guesses)} candidates may fit {topology.words}; {tries} are compiled')
    trials = [attempt(config, given, topology, say, price)]
    for guess in guesses[:tries]:
        if guess.changes != given:
            trials.append(attempt(config, guess.changes, topology, say, price))
    return sorted(trials, key=_rank)


def _rank(trial: Trial) -> tuple[float, float]:
    if trial.estimate is None:
        return math.inf, trial.needed or math.inf
    return trial.estimate.step_seconds, trial.estimate.step_seconds_exposed


def candidates(config: Config, topology: Topology) -> Iterator[Guess]:
    """All that cut batch and model evenly and may fit."""
    n, there = len(topology.devices), memory_of(topology)
    one = replaced(config, {'mesh.data': -1} | {f'mesh.{axis}': 1 for axis in AXES})
    sizes = [2**k for k in range(n.bit_length())]
    for remat, parts in itertools.product(REMAT_POLICIES, MICROBATCHES):
        own = replaced(one, {'model.remat': remat, 'train.microbatches': parts})
        try:
            check(own)
        except ValueError:  # microbatches that do not divide the batch
            continue
        vocab_size, bos_id = vocabulary_of(own)
        learner = build_learner(own, vocab_size, bos_id, topology.devices[0].platform)
        layout, kept = state_layout(learner), kept_bytes(learner)
        for of_axes in itertools.product(sizes, sizes, sizes):
            changes = dict(zip((f'mesh.{axis}' for axis in AXES), of_axes, strict=True))
            if math.prod(of_axes) > n:
                continue
            changed = replaced(own, changes)
            try:
                mesh = make_mesh(changed.mesh, list(topology.devices))
                check_devices(changed, mesh)
            except ValueError:
                continue
            memory = held_bytes(layout, mesh) + kept // (mesh.size // mesh.shape['tensor'])
            if memory > FITS * there:
                continue
            found = {'mesh.data': -1} | changes
            found |= {'model.remat': remat, 'train.microbatches': parts}
            yield Guess(found, _seconds(changed, learner, mesh, topology), memory)


def _seconds(config: Config, learner: Learner, mesh: Any, topology: Topology) -> float:
    rates, link = rates_of(topology), 2e9 * (topology.chip.link if topology.chip else 1.0)
    tokens = config.data.batch_size * config.data.seq_len
    products = flops_per_token(learner) * tokens / mesh.size * AGAIN[config.model.remat] / 3
    moved = moved_bytes(config, learner, mesh)
    # Parameters are gathered for each microbatch, and what tensor and context send waits.
    waits = mesh.shape['tensor'] * mesh.shape['context'] > 1
    sent = moved * (config.train.microbatches if mesh.shape['fsdp'] > 1 else 1) / link
    compute = products / rates.flops
    return compute + sent if waits else max(compute, sent) + 0.1 * sent
