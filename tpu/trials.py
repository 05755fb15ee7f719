"""Changes to a config, compiled for a topology: some that may help a step that does not fit, and a
search of meshes, remat policies and microbatches.

A search cannot compile all candidates. It orders them by estimates without a compiler: the bytes
that a device holds and sends, by the formulas of `lm.devices.auto_mesh`, and what a remat policy
computes again. It compiles the config as given first, then candidates in that order; after one that
does not fit, it leaves out those with a larger estimate of memory.
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
    'products': 'compute_seconds',
    'operations': 'operation_seconds',
    'links': 'link_seconds',
}
TIME_COLUMNS |= {
    'waits': 'waiting_seconds',
    'step': 'step_seconds',
    'exposed': 'step_seconds_exposed',
}
TIME_COLUMNS |= {'bound': 'bound_seconds'}
SHORT_NAMES = {'model.remat': 'remat', 'train.microbatches': 'microbatches'}
MAX_FITTING = 2  # helpful changes that fit
AXES = ('fsdp', 'tensor', 'context')
MICROBATCHES = (1, 2, 4)
# Forward passes' worth of operations in a step, about; a backward pass is two.
PASSES = {'none': 3.0, 'dots': 3.1, 'mlp': 3.4, 'attention': 3.7, 'offload': 3.75}
PASSES |= {'attended': 3.9, 'full': 4.0}
FLOPS = {'forward': 1 / 3, 'backward': 2 / 3}  # of a step, before what it computes again
MEMORY_MARGIN = (
    1.3  # estimates of memory are upper bounds; candidates above this share are not compiled
)


@dataclasses.dataclass(frozen=True)
class Trial:
    """A change to a config, tried. changes: fields of the config, {'mesh.fsdp': 16}. estimate: None
    where the step does not fit. needed, there: bytes of a device. refused: why it was not compiled.
    """

    changes: Mapping[str, Any]
    estimate: StepEstimate | None = None
    needed: int = 0
    available: int = 0
    refusal: str = ''

    @classmethod
    def from_estimate(cls, changes: Mapping[str, Any], found: StepEstimate) -> 'Trial':
        return cls(changes, found, found.memory_needed, found.memory_there)

    @property
    def label(self) -> str:
        """The changes in short, as 'fsdp=16 remat=dots'."""
        parts = []
        for path, value in self.changes.items():
            name = SHORT_NAMES.get(path, path.removeprefix('mesh.'))
            if path not in ('mesh.data', 'mesh.axes') and (value != 1 or path in SHORT_NAMES):
                parts.append(f'{name}={value}')
        return ' '.join(parts) or 'data alone'

    def format_line(self) -> str:
        flags = ' '.join(f'--config.{path}={value}' for path, value in self.changes.items())
        if self.refusal:
            return f'{flags}: {self.refusal}'
        if self.estimate is None:
            over = self.needed - self.available
            return f'{flags}: {format_gib(self.needed)} GiB, still {format_gib(over)} GiB too many'
        return f'{flags}: fits, {format_summary(self.estimate)}'

    def table_row(self) -> dict[str, str]:
        found, memory = self.estimate, format_gib(self.needed) if self.needed else '-'
        row = {'': self.label, 'GiB': memory}
        for name, seconds in TIME_COLUMNS.items():
            row[f'{name}, ms'] = format_ms(getattr(found, seconds)) if found else '-'
        row['mfu'] = f'{found.mfu:.1%}' if found else '-'
        row['mfu bound'] = f'{found.mfu_bound:.1%}' if found else '-'
        row['bound by'] = found.bound_by if found else self.refusal or 'does not fit'
        return row

    def record(self) -> dict[str, Any]:
        found = {'changes': dict(self.changes), 'refused': self.refusal, 'needed': self.needed}
        return found | {'estimate': self.estimate and self.estimate.record()}


def run_trial(
    recipe: Recipe, changes: Mapping[str, Any], topology: Topology, price: float | None = None
) -> Trial:
    """Compiles a changed config; refuses one that the devices do not allow, with the reason."""
    try:
        changed = update_recipe(recipe, changes)
        check(changed)
        made = build_blueprint(changed, topology, lambda _: None)
        found = estimate_step(compile_step(made, topology), topology, price)
    except DoesNotFit as error:
        return Trial(changes, needed=error.needed, available=error.available)
    except ValueError as error:
        return Trial(changes, refusal=str(error))
    return Trial.from_estimate(changes, found)


def try_changes(recipe: Recipe, topology: Topology, say: Say) -> Iterator[Trial]:
    """Tries changes that may help a step that does not fit, until ENOUGH of them fit."""
    found = 0
    for changes in helpful_changes(recipe, topology):
        trial = run_trial(recipe, changes, topology)
        yield trial
        found += trial.estimate is not None
        if found == MAX_FITTING:
            return
    if not found:
        say(f'Nothing that was tried fits {topology.label}: more chips, or a smaller model.')


def helpful_changes(recipe: Recipe, topology: Topology) -> list[dict[str, Any]]:
    """Returns changes that may help and that the devices allow: full remat, more fsdp,
    microbatches, then all together. Those that the config has already are left out.
    """
    remat = [] if recipe.model.remat == 'full' else [{'model.remat': 'full'}]
    n, now = len(topology.devices), max(1, recipe.mesh.fsdp)
    sizes = [] if recipe.mesh.axes == AUTO else [2**k for k in range(20) if now < 2**k <= n]
    cut = [{'mesh.data': -1, 'mesh.fsdp': size} for size in sizes]
    parts = [{'train.microbatches': k * recipe.train.microbatches} for k in (2, 4, 8)]
    cut, parts = (
        [one for one in some if _is_allowed(recipe, one, topology)] for some in (cut, parts)
    )
    together = {key: value for one in (remat[:1] + cut[-1:]) for key, value in one.items()}
    found = [*remat, *cut[:2], *parts[:1], together]
    found += [together | more for more in (parts[-1:] or [{}])]
    return [one for i, one in enumerate(found) if one and one not in found[:i]]


def _is_allowed(recipe: Recipe, changes: dict[str, Any], topology: Topology) -> bool:
    changed = update_recipe(recipe, changes)
    return changed.mesh.axes == AUTO or _find_mesh(changed, topology) is not None


def _find_mesh(recipe: Recipe, topology: Topology) -> Mesh | None:
    """Returns the mesh of a config; None where the devices or the config do not allow it."""
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
    """Returns the trials, fastest first, then those that do not fit."""
    given = {f'mesh.{axis}': getattr(recipe.mesh, axis) for axis in ('data', *AXES)}
    given |= {'model.remat': recipe.model.remat, 'train.microbatches': recipe.train.microbatches}
    ordered = sorted(generate_candidates(recipe, topology), key=lambda one: one.seconds)
    say(f'{len(ordered)} candidates for {topology.label}; up to {tries} are compiled')
    trials, too_much = [], math.inf

    def compile_with(changes: Mapping[str, Any]) -> Trial:
        trials.append(run_trial(recipe, changes, topology, price))
        best, number = min(trials, key=_rank_key), min(tries, len(ordered)) + 1
        said = f'; best so far: {best.label}' if best.estimate else ''
        say(f'{len(trials)} of at most {number}: {trials[-1].format_line()}{said}')
        return trials[-1]

    compile_with(given)
    for candidate in ordered:
        if len(trials) > tries:
            break
        if candidate.changes == given or candidate.memory >= too_much:
            continue
        if compile_with(candidate.changes).estimate is None:
            too_much = candidate.memory
    return sorted(trials, key=_rank_key)


def _rank_key(trial: Trial) -> tuple[float, float]:
    if trial.estimate is None:
        return math.inf, trial.needed or math.inf
    return trial.estimate.step_seconds, trial.estimate.step_seconds_exposed


def generate_candidates(recipe: Recipe, topology: Topology) -> Iterator[SearchCandidate]:
    """Yields all changes that divide batch and model evenly and may fit."""
    n, there = len(topology.devices), device_memory(topology)
    sizes = [2**k for k in range(n.bit_length())]
    whole = {'mesh.data': -1, 'mesh.axes': GIVEN, 'train.microbatches': 1}
    for remat in REMAT_POLICIES:
        own = update_recipe(recipe, whole | {'model.remat': remat})
        learner = build_learner(own, *nominal_vocabulary(own), topology.devices[0].platform)
        layout, kept = state_layout(learner), estimate_residual_bytes(learner)
        for *of_axes, parts in itertools.product(sizes, sizes, sizes, MICROBATCHES):
            if math.prod(of_axes) > n:
                continue
            changes = dict(zip((f'mesh.{axis}' for axis in AXES), of_axes, strict=True))
            changes |= {'mesh.data': -1, 'model.remat': remat, 'train.microbatches': parts}
            changed = update_recipe(own, changes)
            if (mesh := _find_mesh(changed, topology)) is None:
                continue
            activations = kept // parts // (mesh.size // mesh.shape['tensor'])
            memory = estimate_state_bytes(layout, mesh) + activations
            if memory <= MEMORY_MARGIN * there:
                yield SearchCandidate(
                    changes, _estimate_seconds(changed, learner, mesh, topology), memory
                )


def _estimate_seconds(recipe: Recipe, learner: Learner, mesh: Mesh, topology: Topology) -> float:
    rates, link = device_rates(topology), 2e9 * (topology.chip.link if topology.chip else 1.0)
    tokens = recipe.data.batch_size * recipe.data.seq_len
    each = _flops_at_peak(learner, rates.kind)
    products = each * tokens / mesh.size * PASSES[recipe.model.remat] / 3
    moved = estimate_sent_bytes(recipe, learner, mesh)
    # Parameters are gathered for each microbatch; what tensor and context send is not hidden.
    waits = mesh.shape['tensor'] * mesh.shape['context'] > 1
    sent = moved * (recipe.train.microbatches if mesh.shape['fsdp'] > 1 else 1) / link
    compute = products / rates.flops
    return compute + sent if waits else max(compute, sent) + 0.1 * sent


def _flops_at_peak(learner: Learner, kind: str) -> float:
    """Returns `flops_per_token`, of attention those that the peak does in the time of a kernel."""
    attended, head_dim = attention_flops(learner.recipe), learner.recipe.head_dim
    took = sum(part / attention_share(kind, head_dim, phase) for phase, part in FLOPS.items())
    return flops_per_token(learner) + (took - 1) * attended
