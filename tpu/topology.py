"""What a plan is for: 'v5p:4x4x4', several slices of such, 'h100:8', or 'here'."""

import dataclasses
import importlib.util
import itertools
import math
from collections.abc import Sequence

import jax

from modules.choices import nearest
from tpu.chips import CHIPS, Chip
from tpu.environment import HERE

# Slices of TPUs that lie in a plane: those that Google offers (its pages on v5e and v6e).
FLAT = ('1x1', '2x2', '2x4', '4x4', '4x8', '8x8', '8x16', '16x16')
# Of three dimensions: within one cube of 4 x 4 x 4, and then whole cubes.
WITHIN_A_CUBE = ('2x2x1', '2x2x2', '2x2x4', '2x4x4')
CUBE, LONGEST = 4, 24
WRAPS_FLAT = 16  # a dimension of so many chips is a ring, a shorter one a line
EXTRAS = {'tpu': ('libtpu', 'tpu'), 'gpu': ('jax_cuda13_plugin', 'cuda-compiler')}


@dataclasses.dataclass(frozen=True)
class Topology:
    """name: as it was asked for. chip: None of the devices at hand. shape: chips of a slice, by
    dimension; (n,) of GPUs.
    """

    name: str
    chip: Chip | None
    devices: Sequence[jax.Device]
    shape: tuple[int, ...] = ()
    slices: int = 1

    @property
    def chips(self) -> int:
        return math.prod(self.shape) * self.slices if self.chip else 1

    @property
    def words(self) -> str:
        return f'{self.slices} slices of {self.name}' if self.slices > 1 else self.name

    def wraps(self, dimension: int) -> bool:
        """Whether the chips along it form a ring."""
        length = self.shape[dimension]
        return length % CUBE == 0 if self.chip.cubes else length == WRAPS_FLAT


def open_topology(name: str, slices: int = 1) -> Topology:
    """Its devices, to compile for.

    Raises ValueError for a topology that is not offered, with the nearest that is; for several
    slices of what has none; and, where the compiler is not installed, with the extra that brings
    it.
    """
    if name == HERE:
        _refuse_slices(name, slices)
        return Topology(name, None, jax.devices())
    kind, _, shape = name.partition(':')
    if kind not in CHIPS:
        raise ValueError(
            f'--topology must name one of {", ".join(CHIPS)} and its shape, such as v5p:4x4x4 or '
            f'h100:8, or be {HERE}; got {name!r}.{_meant(kind, CHIPS)}'
        )
    chip = CHIPS[kind]
    if shape not in (offered := shapes_of(chip)):
        raise ValueError(
            f'--topology={name}: {kind} has no {shape or "empty shape"!r}.'
            f' Nearest that is offered: {kind}:{_nearest_shape(shape, offered)}.'
        )
    if slices < 1:
        raise ValueError(f'--slices must be 1 or more; got {slices}')
    _require_compiler(chip, name)
    lengths = tuple(map(int, shape.split('x')))
    if chip.platform == 'gpu':
        _refuse_slices(name, slices)
        return Topology(name, chip, chip.devices(math.prod(lengths)), lengths)
    return Topology(name, chip, chip.slices(shape, slices), lengths, slices)


def shapes_of(chip: Chip) -> list[str]:
    """The slices, or numbers of GPUs of a host, that are offered, smallest first."""
    if chip.platform == 'gpu':
        return [str(2**k) for k in range(chip.largest.bit_length())]
    if not chip.cubes:
        return list(FLAT)
    lengths = range(CUBE, LONGEST + 1, CUBE)
    whole = (
        one
        for one in itertools.combinations_with_replacement(lengths, 3)
        if math.prod(one) <= chip.largest
    )
    ordered = sorted(whole, key=lambda one: (math.prod(one), max(one)))
    return [*WITHIN_A_CUBE, *('x'.join(map(str, one)) for one in ordered)]


def _nearest_shape(shape: str, offered: Sequence[str]) -> str:
    """By the number of chips, then by the name."""
    lengths = shape.replace('X', 'x').split('x')
    if not all(part.isdigit() for part in lengths):
        return offered[0]
    chips = math.prod(map(int, lengths))

    def distance(other):
        n = math.prod(map(int, other.split('x')))
        same = sum(part in other.split('x') for part in lengths)
        return abs(math.log(max(chips, 1) / n)), -same

    return min(offered, key=distance)


def _meant(kind: str, known: Sequence[str]) -> str:
    """Other names of the same chips, as machines and instance types have them."""
    others = {'v5litepod': 'v5e', 'v5lite': 'v5e', 'v5': 'v5p', 'v7x': 'tpu7x', 'tpu7': 'tpu7x'}
    first = kind.lower().split('-')[0]
    guess = others.get(first, first)
    if guess not in known:
        return nearest(guess, known)
    example = '4x4x4' if CHIPS[guess].cubes else shapes_of(CHIPS[guess])[-1]
    return f' Did you mean {guess}:{example}?'


def _refuse_slices(name: str, slices: int) -> None:
    if slices != 1:
        raise ValueError(f'--slices={slices} is for TPUs; --topology={name} has no slices')


def _require_compiler(chip: Chip, name: str) -> None:
    module, extra = EXTRAS[chip.platform]
    if importlib.util.find_spec(module) is None:
        raise ValueError(
            f'--topology={name} is compiled by {module}, which is not installed: '
            f'uv sync --extra {extra}'
        )
