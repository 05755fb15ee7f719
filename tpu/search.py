"""Meshes, remat policies and microbatches, compiled and ranked.

Too many to compile them all, they are ordered first by what can be computed without a compiler:
the bytes that a device holds and sends, by the formulas of `lm.auto_mesh`, and what a remat policy
computes again. The config as it is given is compiled first, then the others in that order; where
one does not fit, those that were thought to take as much are left out.
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
from lm.recipe import Recipe
from lm.sections import GIVEN
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
    recipe: Recipe,
    topology: Topology,
    say: Callable[[str], None],
    tries: int,
    price: float | None = None,
) -> list[Trial]:
    """The trials, the fastest first, then those that do not fit."""
    given = {f'mesh.{axis}': getattr(recipe.mesh, axis) for axis in ('data', *AXES)}
    given |= {'model.remat': recipe.model.remat, 'train.microbatches': recipe.train.microbatches}
    guesses = sorted(candidates(recipe, topology), key=lambda one: one.seconds)
    say(f'{len(guesses)} candidates for {topology.words}; up to {tries} are compiled')
    trials, too_much = [attempt(recipe, given, topology, say, price)], math.inf
    for guess in guesses:
        if len(trials) > tries:
            break
        if guess.changes == given or guess.memory >= too_much:
            continue
        trials.append(attempt(recipe, guess.changes, topology, say, price))
        if trials[-1].estimate is None:  # what is thought to take more is not tried any more
            too_much = guess.memory
    return sorted(trials, key=_rank)


def _rank(trial: Trial) -> tuple[float, float]:
    if trial.estimate is None:
        return math.inf, trial.needed or math.inf
    return trial.estimate.step_seconds, trial.estimate.step_seconds_exposed


def candidates(recipe: Recipe, topology: Topology) -> Iterator[Guess]:
    """All that cut batch and model evenly and may fit."""
    n, there = len(topology.devices), memory_of(topology)
    sizes = [2**k for k in range(n.bit_length())]
    whole = {'mesh.data': -1, 'mesh.axes': GIVEN, 'train.microbatches': 1}
    for remat in REMAT_POLICIES:
        own = replaced(recipe, whole | {'model.remat': remat})
        vocab_size, bos_id = vocabulary_of(own)
        learner = build_learner(own, vocab_size, bos_id, topology.devices[0].platform)
        layout, kept = state_layout(learner), kept_bytes(learner)
        for *of_axes, parts in itertools.product(sizes, sizes, sizes, MICROBATCHES):
            if math.prod(of_axes) > n:
                continue
            changes = dict(zip((f'mesh.{axis}' for axis in AXES), of_axes, strict=True))
            changes |= {'mesh.data': -1, 'model.remat': remat, 'train.microbatches': parts}
            changed = replaced(own, changes)
            try:
                mesh = make_mesh(changed.mesh, list(topology.devices))
                check(changed)
                check_devices(changed, mesh)
            except ValueError:
                continue
            activations = kept // parts // (mesh.size // mesh.shape['tensor'])
            memory = held_bytes(layout, mesh) + activations
            if memory <= FITS * there:
                yield Guess(changes, _seconds(changed, learner, mesh, topology), memory)


def _seconds(recipe: Recipe, learner: Learner, mesh: Any, topology: Topology) -> float:
    rates, link = rates_of(topology), 2e9 * (topology.chip.link if topology.chip else 1.0)
    tokens = recipe.data.batch_size * recipe.data.seq_len
    products = flops_per_token(learner) * tokens / mesh.size * AGAIN[recipe.model.remat] / 3
    moved = moved_bytes(recipe, learner, mesh)
    # Parameters are gathered for each microbatch, and what tensor and context send waits.
    waits = mesh.shape['tensor'] * mesh.shape['context'] > 1
    sent = moved * (recipe.train.microbatches if mesh.shape['fsdp'] > 1 else 1) / link
    compute = products / rates.flops
    return compute + sent if waits else max(compute, sent) + 0.1 * sent
