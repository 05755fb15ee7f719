"""A change to a config, compiled for a topology: does it fit, and how fast is it?"""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

from lm.check import check
from lm.config import replaced
from lm.recipe import Recipe
from tpu.compiled import DoesNotFit, blueprint_of, compile_step
from tpu.estimate import Estimate, estimate
from tpu.topology import Topology

GIB = 2**30
COLUMNS = ('products, ms', 'operations, ms', 'links, ms', 'step, ms', 'exposed, ms', 'mfu')
WORDS = {'model.remat': 'remat', 'train.microbatches': 'microbatches'}


@dataclasses.dataclass(frozen=True)
class Trial:
    """changes: fields of the config, {'mesh.fsdp': 16}. estimate: None where it does not fit;
    needed: bytes of a device; refused: why it was not compiled.
    """

    changes: Mapping[str, Any]
    estimate: Estimate | None = None
    needed: int = 0
    there: int = 0
    refused: str = ''

    @property
    def words(self) -> str:
        """'fsdp=16 remat=dots'."""
        parts = []
        for path, value in self.changes.items():
            name = WORDS.get(path, path.removeprefix('mesh.'))
            if path not in ('mesh.data', 'mesh.axes') and (value != 1 or path in WORDS):
                parts.append(f'{name}={value}')
        return ' '.join(parts) or 'data alone'

    @property
    def flags(self) -> str:
        return ' '.join(f'--config.{path}={value}' for path, value in self.changes.items())

    def line(self) -> str:
        if self.refused:
            return f'{self.flags}: {self.refused}'
        if self.estimate is None:
            over = (self.needed - self.there) / GIB
            return f'{self.flags}: {self.needed / GIB:.2f} GiB, still {over:.2f} GiB too many'
        found = self.estimate
        return (
            f'{self.flags}: fits, {found.memory_needed / GIB:.2f} GiB of '
            f'{found.memory_there / GIB:.2f}; a step takes at least '
            f'{1e3 * found.step_seconds:,.1f} ms, utilisation at most {found.mfu:.1%}'
        )

    def columns(self) -> dict[str, str]:
        found = self.estimate
        if found is None:
            memory = f'{self.needed / GIB:.2f}' if self.needed else '-'
            rest = dict.fromkeys(COLUMNS, '-')
            said = self.refused or 'does not fit'
            return {'': self.words, 'GiB': memory} | rest | {'bound by': said}
        return {
            '': self.words,
            'GiB': f'{found.memory_needed / GIB:.2f}',
            'products, ms': f'{1e3 * found.compute_seconds:,.1f}',
            'operations, ms': f'{1e3 * found.operation_seconds:,.1f}',
            'links, ms': f'{1e3 * found.link_seconds:,.1f}',
            'step, ms': f'{1e3 * found.step_seconds:,.1f}',
            'exposed, ms': f'{1e3 * found.step_seconds_exposed:,.1f}',
            'mfu': f'{found.mfu:.1%}',
            'bound by': found.bound_by,
        }

    def record(self) -> dict[str, Any]:
        found = {'changes': dict(self.changes), 'refused': self.refused, 'needed': self.needed}
        return found | {'estimate': self.estimate and self.estimate.record()}


def attempt(
    recipe: Recipe,
    changes: Mapping[str, Any],
    topology: Topology,
    say: Callable[[str], None],
    price: float | None = None,
) -> Trial:
    """Compiles it; what cannot be laid over the devices is refused, with the reason."""
    try:
        changed = replaced(recipe, changes)
        check(changed)
        made = blueprint_of(changed, topology, lambda _: None)
        found = estimate(compile_step(made, topology), topology, price)
    except DoesNotFit as error:
        trial = Trial(changes, needed=error.needed, there=error.there)
    except ValueError as error:
        trial = Trial(changes, refused=str(error))
    else:
        trial = Trial(changes, found, found.memory_needed, found.memory_there)
    say(trial.line())
    return trial
