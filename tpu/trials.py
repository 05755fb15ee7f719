"""Compiles changes to a config for a topology.

`try_changes` looks for changes that make a step fit; `search` tries meshes, remat policies and
microbatches. A search cannot compile all candidates. It orders them by estimates without a
compiler: the bytes that a device holds and sends, by the formulas of `lm.devices.auto_mesh`, and
the operations that a remat policy repeats. It compiles the given config first, then candidates in
that order. If a candidate does not fit, the search skips all with a larger estimate of memory.
"""

import dataclasses
import itertools
import math
from collections.abc import Iterator, Mapping
from typing import Any

from jax.sharding import Mesh

from lm.config.fields import AUTO, GIVEN
from lm.config.recipe import Recipe
from lm.config.resolve import update_recipe
from lm.devices.auto_mesh import estimate_residual_bytes, estimate_sent_bytes, estimate_state_bytes
from lm.devices.check_mesh import check_devices
from lm.devices.mesh import make_mesh
from lm.devices.shardings import state_layout
from lm.model.check import check
from lm.training.flops import attention_flops, flops_per_token
from lm.training.state import Learner, build_learner
from modules.numerics import REMAT_POLICIES
from tpu.chips import Topology
from tpu.compiled_step import (
    DoesNotFit,
    Say,
    StepEstimate,
    build_blueprint,
    compile_step,
    device_memory,
    device_rates,
    estimate_step,
    format_gib,
    format_ms,
    format_summary,
    nominal_vocabulary,
)
from tpu.rates import attention_share

TIME_COLUMNS = {
    'matmuls': 'compute_seconds',
    'operations': 'operation_seconds',
    'links': 'link_seconds',
    'waiting': 'waiting_seconds',
    'step': 'step_seconds',
    'exposed': 'step_seconds_exposed',
    'bound': 'bound_seconds',
}
SHORT_NAMES = {'model.remat': 'remat', 'train.microbatches': 'microbatches'}
MAX_FITTING = 2  # `try_changes` stops after this many changes that fit
AXES = ('fsdp', 'tensor', 'context')
MICROBATCHES = (1, 2, 4)
# Approximate operations of a step in forward passes; a backward pass counts two.
PASSES = {'none': 3.0, 'dots': 3.1, 'mlp': 3.4, 'attention': 3.7, 'offload': 3.75}
PASSES |= {'attended': 3.9, 'full': 4.0}
FLOPS = {'forward': 1 / 3, 'backward': 2 / 3}  # shares of a step without recomputation
# Estimates of memory are upper bounds; candidates above this share of it are not compiled.
MEMORY_MARGIN = 1.3


@dataclasses.dataclass(frozen=True)
class Trial:
    """A change to a config, tried.

    changes: fields of the config, {'mesh.fsdp': 16}. estimate: None if the step does not fit.
    needed, available: bytes of a device. refusal: why it was not compiled.
    """

    changes: Mapping[str, Any]
    estimate: StepEstimate | None = None
    needed: int = 0
    available: int = 0
    refusal: str = ''

    @classmethod
    def from_estimate(cls, changes: Mapping[str, Any], estimate: StepEstimate) -> 'Trial':
        """Returns the trial of a step that fits."""
        return cls(changes, estimate, estimate.memory_needed, estimate.memory_there)

    @property
    def label(self) -> str:
        """Returns the changes in short, such as 'fsdp=16 remat=dots'."""
        parts = []
        for path, value in self.changes.items():
            name = SHORT_NAMES.get(path, path.removeprefix('mesh.'))
            if path not in ('mesh.data', 'mesh.axes') and (value != 1 or path in SHORT_NAMES):
                parts.append(f'{name}={value}')
        return ' '.join(parts) or 'data only'

    def format_line(self) -> str:
        """Returns the flags of the changes with the outcome."""
        flags = ' '.join(f'--config.{path}={value}' for path, value in self.changes.items())
        if self.refusal:
            return f'{flags}: {self.refusal}'
        if self.estimate is None:
            excess = format_gib(self.needed - self.available)
            return f'{flags}: {format_gib(self.needed)} GiB per device, {excess} GiB too much'
        return f'{flags}: fits, {format_summary(self.estimate)}'

    @property
    def outcome(self) -> str:
        """Returns the outcome in a few words."""
        if self.estimate is None:
            return self.refusal or 'does not fit'
        step_ms = format_ms(self.estimate.step_seconds)
        return f'fits, {format_gib(self.needed)} GiB, {step_ms} ms per step'

    def table_row(self) -> dict[str, str]:
        """Returns the columns of the table of a search."""
        estimate, memory = self.estimate, format_gib(self.needed) if self.needed else '-'
        row = {'': self.label, 'GiB': memory}
        for name, seconds in TIME_COLUMNS.items():
            row[f'{name}, ms'] = format_ms(getattr(estimate, seconds)) if estimate else '-'
        row['MFU'] = f'{estimate.mfu:.1%}' if estimate else '-'
        row['MFU bound'] = f'{estimate.mfu_bound:.1%}' if estimate else '-'
        row['limited by'] = estimate.limit if estimate else self.outcome
        return row

    def record(self) -> dict[str, Any]:
        """Returns the trial for JSON."""
        fields = {'changes': dict(self.changes), 'refused': self.refusal, 'needed': self.needed}
        return fields | {'estimate': self.estimate and self.estimate.record()}


def run_trial(
    recipe: Recipe,
    changes: Mapping[str, Any],
    topology: Topology,
    price: float | None = None,
    position: str = '',
) -> Trial:
    """Compiles a changed config.

    Args:
      recipe: the recipe.
      changes: fields to change.
      topology: the devices.
      price: price of a chip-hour, in any currency.
      position: position of the trial among others, such as '2 of 9', for progress.

    Returns:
      The trial; with a refusal if the devices do not allow the config.
    """
    try:
        changed = update_recipe(recipe, changes)
        check(changed)
        blueprint = build_blueprint(changed, topology, lambda _: None)
        program = ', '.join(filter(None, [position, Trial(changes).label]))
        step = compile_step(blueprint, topology, program=program)
        estimate = estimate_step(step, topology, price)
    except DoesNotFit as error:
        return Trial(changes, needed=error.needed, available=error.available)
    except ValueError as error:
        return Trial(changes, refusal=str(error))
    return Trial.from_estimate(changes, estimate)


def try_changes(recipe: Recipe, topology: Topology, say: Say) -> Iterator[Trial]:
    """Tries changes that may help a step that does not fit, until MAX_FITTING of them fit.

    Args:
      recipe: the recipe.
      topology: the devices.
      say: receives a message if no change fits.

    Yields:
      The trials.
    """
    n_fitting, changes_list = 0, helpful_changes(recipe, topology)
    for i, changes in enumerate(changes_list, start=1):
        position = f'change {i} of at most {len(changes_list)}'
        trial = run_trial(recipe, changes, topology, position=position)
        yield trial
        n_fitting += trial.estimate is not None
        if n_fitting == MAX_FITTING:
            return
    if not n_fitting:
        say(f'No change fits {topology.label}. Use more chips or a smaller model.')


def helpful_changes(recipe: Recipe, topology: Topology) -> list[dict[str, Any]]:
    """Returns changes that may help and that the devices allow.

    These are full remat, more fsdp, microbatches, and then all together; changes that the config
    already has are left out.
    """
    remat = [] if recipe.model.remat == 'full' else [{'model.remat': 'full'}]
    n_devices, fsdp = len(topology.devices), max(1, recipe.mesh.fsdp)
    sizes = (
        [] if recipe.mesh.axes == AUTO else [2**k for k in range(20) if fsdp < 2**k <= n_devices]
    )
    sharded = [{'mesh.data': -1, 'mesh.fsdp': size} for size in sizes]
    microbatched = [{'train.microbatches': k * recipe.train.microbatches} for k in (2, 4, 8)]
    sharded, microbatched = (
        [change for change in changes if _is_allowed(recipe, change, topology)]
        for changes in (sharded, microbatched)
    )
    together = {
        key: value for change in (remat[:1] + sharded[-1:]) for key, value in change.items()
    }
    tries = [*remat, *sharded[:2], *microbatched[:1], together]
    tries += [together | split for split in (microbatched[-1:] or [{}])]
    return [change for i, change in enumerate(tries) if change and change not in tries[:i]]


def _is_allowed(recipe: Recipe, changes: dict[str, Any], topology: Topology) -> bool:
    """Whether the devices and the config allow a change."""
    changed = update_recipe(recipe, changes)
    return changed.mesh.axes == AUTO or _find_mesh(changed, topology) is not None


def _find_mesh(recipe: Recipe, topology: Topology) -> Mesh | None:
    """Returns the mesh of a config, or None if the devices or the config do not allow it."""
    try:
        mesh = make_mesh(recipe.mesh, list(topology.devices))
        check(recipe)
        check_devices(recipe, mesh)
    except ValueError:
        return None
    return mesh


@dataclasses.dataclass(frozen=True)
class SearchCandidate:
    """A change to be searched; seconds and memory are estimates without a compiler."""

    changes: dict[str, Any]
    seconds: float
    memory: float


def search(
    recipe: Recipe, topology: Topology, say: Say, tries: int, price: float | None = None
) -> list[Trial]:
    """Searches meshes, remat policies and microbatches.

    Args:
      recipe: the recipe.
      topology: the devices.
      say: receives progress.
      tries: number of candidates to compile.
      price: price of a chip-hour, in any currency.

    Returns:
      The trials, fastest first; trials that do not fit come last.
    """
    current = {f'mesh.{axis}': getattr(recipe.mesh, axis) for axis in ('data', *AXES)}
    current |= {'model.remat': recipe.model.remat, 'train.microbatches': recipe.train.microbatches}
    ordered = sorted(generate_candidates(recipe, topology), key=lambda candidate: candidate.seconds)
    say(f'compiling the config and {min(tries, len(ordered))} of {len(ordered):,} candidates')
    trials, memory_limit = [], math.inf

    def compile_with(changes: Mapping[str, Any]) -> Trial:
        n_trials = min(tries, len(ordered)) + 1
        position = f'{len(trials) + 1} of at most {n_trials}'
        trials.append(trial := run_trial(recipe, changes, topology, price, position))
        is_best = trial.estimate is not None and min(trials, key=_rank_key) is trial
        say(f'{position}: {trial.label}: {trial.outcome}{" (best so far)" if is_best else ""}')
        return trial

    compile_with(current)
    for candidate in ordered:
        if len(trials) > tries:
            break
        if candidate.changes == current or candidate.memory >= memory_limit:
            continue
        if compile_with(candidate.changes).estimate is None:
            memory_limit = candidate.memory
    return sorted(trials, key=_rank_key)


def _rank_key(trial: Trial) -> tuple[float, float]:
    """Orders trials by step time; trials that do not fit come last, by memory."""
    if trial.estimate is None:
        return math.inf, trial.needed or math.inf
    return trial.estimate.step_seconds, trial.estimate.step_seconds_exposed


def generate_candidates(recipe: Recipe, topology: Topology) -> Iterator[SearchCandidate]:
    """Yields all changes that divide batch and model evenly and may fit."""
    n_devices, available = len(topology.devices), device_memory(topology)
    sizes = [2**k for k in range(n_devices.bit_length())]
    common = {'mesh.data': -1, 'mesh.axes': GIVEN, 'train.microbatches': 1}
    for remat in REMAT_POLICIES:
        remat_recipe = update_recipe(recipe, common | {'model.remat': remat})
        learner = build_learner(
            remat_recipe, *nominal_vocabulary(remat_recipe), topology.devices[0].platform
        )
        layout, residual_bytes = state_layout(learner), estimate_residual_bytes(learner)
        for *axis_sizes, microbatches in itertools.product(sizes, sizes, sizes, MICROBATCHES):
            if math.prod(axis_sizes) > n_devices:
                continue
            # mesh.data=-1 takes the remaining devices.
            changes = dict(zip((f'mesh.{axis}' for axis in AXES), axis_sizes, strict=True))
            changes |= {'mesh.data': -1, 'model.remat': remat, 'train.microbatches': microbatches}
            changed = update_recipe(remat_recipe, changes)
            if (mesh := _find_mesh(changed, topology)) is None:
                continue
            device_residuals = residual_bytes // microbatches // (mesh.size // mesh.shape['tensor'])
            memory = estimate_state_bytes(layout, mesh) + device_residuals
            if memory <= MEMORY_MARGIN * available:
                yield SearchCandidate(
                    changes, _estimate_seconds(changed, learner, mesh, topology), memory
                )


def _estimate_seconds(recipe: Recipe, learner: Learner, mesh: Mesh, topology: Topology) -> float:
    """Estimates the seconds of a step without a compiler."""
    rates, link = device_rates(topology), 2e9 * (topology.chip.link if topology.chip else 1.0)
    tokens = recipe.data.batch_size * recipe.data.seq_len
    token_flops = _flops_at_peak(learner, rates.kind)
    products = token_flops * tokens / mesh.size * PASSES[recipe.model.remat] / 3
    sent_bytes = estimate_sent_bytes(recipe, learner, mesh)
    # Parameters are gathered for each microbatch. Traffic over tensor and context is not hidden.
    is_exposed = mesh.shape['tensor'] * mesh.shape['context'] > 1
    send_seconds = sent_bytes * (recipe.train.microbatches if mesh.shape['fsdp'] > 1 else 1) / link
    compute_seconds = products / rates.flops
    return (
        compute_seconds + send_seconds
        if is_exposed
        else max(compute_seconds, send_seconds) + 0.1 * send_seconds
    )


def _flops_at_peak(learner: Learner, kind: str) -> float:
    """Returns `flops_per_token`, with attention's operations divided by their share of the peak."""
    attended, head_dim = attention_flops(learner.recipe), learner.recipe.head_dim
    slowdown = sum(share / attention_share(kind, head_dim, phase) for phase, share in FLOPS.items())
    return flops_per_token(learner) + (slowdown - 1) * attended
