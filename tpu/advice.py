"""What helps a step that does not fit: each change is compiled."""

from collections.abc import Callable, Iterator
from typing import Any

from lm.check_mesh import check_devices
from lm.config import replaced
from lm.mesh import make_mesh
from lm.sections import AUTO, Config
from tpu.topology import Topology
from tpu.trial import Trial, attempt

ENOUGH = 2  # ways that fit


def tried(config: Config, topology: Topology, say: Callable[[str], None]) -> Iterator[Trial]:
    """The changes one by one, then together, until ENOUGH fit."""
    found = 0
    for changes in ways(config, topology):
        trial = attempt(config, changes, topology, lambda _: None)
        yield trial
        found += trial.estimate is not None
        if found == ENOUGH:
            return
    if not found:
        say(f'Nothing that was tried fits {topology.words}: more chips, or a smaller model.')


def ways(config: Config, topology: Topology) -> list[dict[str, Any]]:
    """Remat, parameters cut further, microbatches, and all of them; what the config has is left
    out, and so is what the devices do not allow.
    """
    remat = [] if config.model.remat == 'full' else [{'model.remat': 'full'}]
    cut = [{'mesh.data': -1, 'mesh.fsdp': n} for n in _more_fsdp(config, topology)]
    parts = []
    for factor in (2, 4, 8):
        count = factor * config.train.microbatches
        if _allowed(config, {'train.microbatches': count}, topology):
            parts.append({'train.microbatches': count})
    together = {key: value for one in (remat[:1] + cut[-1:]) for key, value in one.items()}
    found = [*remat, *cut[:2], *parts[:1], together]
    found += [together | more for more in (parts[-1:] or [{}])]
    return [one for i, one in enumerate(found) if one and one not in found[:i]]


def _more_fsdp(config: Config, topology: Topology) -> list[int]:
    if config.mesh.axes == AUTO:
        return []
    n, now = len(topology.devices), max(1, config.mesh.fsdp)
    sizes = [size for size in (2**k for k in range(20)) if now < size <= n]
    return [s for s in sizes if _allowed(config, {'mesh.data': -1, 'mesh.fsdp': s}, topology)]


def _allowed(config: Config, changes: dict[str, Any], topology: Topology) -> bool:
    changed = replaced(config, changes)
    if changed.mesh.axes == AUTO:
        return True
    try:
        check_devices(changed, make_mesh(changed.mesh, list(topology.devices)))
    except ValueError:
        return False
    return True
