"""What helps a step that does not fit: each change is compiled."""

from collections.abc import Callable, Iterator
from typing import Any

from lm.check_mesh import check_devices
from lm.config import replaced
from lm.mesh import make_mesh
from lm.recipe import Recipe
from lm.sections import AUTO
from tpu.topology import Topology
from tpu.trial import Trial, attempt

ENOUGH = 2  # ways that fit


def tried(recipe: Recipe, topology: Topology, say: Callable[[str], None]) -> Iterator[Trial]:
    """The changes one by one, then together, until ENOUGH fit."""
    found = 0
    for changes in ways(recipe, topology):
        trial = attempt(recipe, changes, topology, lambda _: None)
        yield trial
        found += trial.estimate is not None
        if found == ENOUGH:
            return
    if not found:
        say(f'Nothing that was tried fits {topology.words}: more chips, or a smaller model.')


def ways(recipe: Recipe, topology: Topology) -> list[dict[str, Any]]:
    """Remat, parameters cut further, microbatches, and all of them; what the config has is left
    out, and so is what the devices do not allow.
    """
    remat = [] if recipe.model.remat == 'full' else [{'model.remat': 'full'}]
    cut = [{'mesh.data': -1, 'mesh.fsdp': n} for n in _more_fsdp(recipe, topology)]
    parts = []
    for factor in (2, 4, 8):
        count = factor * recipe.train.microbatches
        if _allowed(recipe, {'train.microbatches': count}, topology):
            parts.append({'train.microbatches': count})
    together = {key: value for one in (remat[:1] + cut[-1:]) for key, value in one.items()}
    found = [*remat, *cut[:2], *parts[:1], together]
    found += [together | more for more in (parts[-1:] or [{}])]
    return [one for i, one in enumerate(found) if one and one not in found[:i]]


def _more_fsdp(recipe: Recipe, topology: Topology) -> list[int]:
    if recipe.mesh.axes == AUTO:
        return []
    n, now = len(topology.devices), max(1, recipe.mesh.fsdp)
    sizes = [size for size in (2**k for k in range(20)) if now < size <= n]
    return [s for s in sizes if _allowed(recipe, {'mesh.data': -1, 'mesh.fsdp': s}, topology)]


def _allowed(recipe: Recipe, changes: dict[str, Any], topology: Topology) -> bool:
    changed = replaced(recipe, changes)
    if changed.mesh.axes == AUTO:
        return True
    try:
        check_devices(changed, make_mesh(changed.mesh, list(topology.devices)))
    except ValueError:
        return False
    return True
