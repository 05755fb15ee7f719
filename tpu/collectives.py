"""The collectives of a compiled program, and the time that links between devices take for them."""

import collections
import itertools
import math
import re
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import jax
import numpy as np

from tpu.chips import Topology
from tpu.hlo import Array, Computation, Instruction, Module
from tpu.integers import find_root

KINDS = ('all-gather', 'all-reduce', 'reduce-scatter', 'all-to-all', 'collective-permute')
OPCODE = re.compile(rf'(?:ragged-)?({"|".join(KINDS)})(-start)?$')
CHANNEL = re.compile(r'channel_id=(\d+)')
GROUP_LIST = re.compile(r'replica_groups=\{\{([\d,]+)\}')
GROUP_IOTA = re.compile(r'replica_groups=\[([\d,]+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?')
GROUP_MESH = re.compile(r'replica_groups=mesh\[(.*?)\] \{(.*?)\}')
PAIRS = re.compile(r'source_target_pairs=\{([{},\d]+)\}')
# Hosts send over the network what TPUs of several slices exchange: the compiler takes it out of the
# collective, which is then one within a slice.
BETWEEN_SLICES = ' between slices'
# A SparseCore sends in a computation of its own, while others go on.
OFFLOADED = re.compile(r'async_execution_thread="sparsecore".* called_computations=\{%([\w.\-]+)\}')
TRANSFER_TYPE = re.compile(r'_xla_megascale_transfer_type="(\w+)"')
# A TPU's reduce-scatter is an all-reduce in a computation of this name, whose caller returns the
# device's part.
SCATTER_PREFIX = 'all-reduce-scatter'


class Collective(NamedTuple):
    """One collective operation. kind: one of KINDS, and BETWEEN for a part that goes over the
    network. bytes: of the result on a device. largest: bytes of the largest array of a combined
    result. times: rounds of the loops around it. group: places in the mesh of the devices of one
    group, () for all devices; for a collective-permute all pairs, each sender before its receiver.
    """

    kind: str
    bytes: int
    largest: int
    rounds: int
    group: tuple[int, ...] = ()


class Exchange(NamedTuple):
    """A collective in the order of its computation: links are busy from instruction `start` on, and
    `done` waits for them. Both are one instruction where nothing else runs meanwhile.
    """

    collective: Collective
    start: str
    done: str


def list_collectives(module: Module) -> list[Collective]:
    """Returns the collectives of a program for TPUs, GPUs or CPUs."""
    return [one.collective for found in list_exchanges(module).values() for one in found]


def list_exchanges(module: Module) -> dict[str, list[Exchange]]:
    """Returns the collectives of each computation that is scheduled, in the order of their start.
    One that a computation of its own makes, beside others, belongs to where that one is started.
    """
    begun = {one.callee for _, one, _ in module.instructions() if one.opcode == 'async-start'}
    return {
        name: _computation_exchanges(module, module.computations[name], times)
        for name, times in module.rounds.items()
        if name not in begun
    }


def _computation_exchanges(module: Module, computation: Computation, rounds: int) -> list[Exchange]:
    found, fused = [], {}
    for one in computation.values():
        for key, sent in _find_collectives(module, one, rounds):
            if key is None:
                found.append(Exchange(sent, *_start_and_done(computation, one)))
            else:
                fused.setdefault(key, {}).setdefault(one.name, []).append(sent)
    # A collective that is fused with other work, to run meanwhile, stands in several fusions: in
    # one that starts it, in those that it runs beside, and in one that waits for it.
    for fusions in fused.values():
        names = list(fusions)
        sends = max(fusions.values(), key=len)
        found += [Exchange(sent, names[0], names[-1]) for sent in sends]
    return found


def _find_collectives(
    module: Module, instruction: Instruction, rounds: int
) -> Iterator[tuple[tuple | None, Collective]]:
    """Yields the collectives of an instruction, each with what tells it from others of its
    computation where it may stand in several fusions; None where it stands in no other.
    """
    fused = instruction.opcode == 'fusion'
    if fused and (instruction.callee or '').startswith(SCATTER_PREFIX):
        parts = module.computations[instruction.callee].values()
        (inner,) = (part for part in parts if OPCODE.match(part.opcode))
        yield None, _make_collective('reduce-scatter', instruction.arrays, rounds, inner)
        return
    if instruction.opcode == 'recv' and (sent := TRANSFER_TYPE.search(instruction.attributes)):
        kind = sent[1].lower().replace('_', '-')
        kind = (kind if kind in KINDS else 'collective-permute') + BETWEEN_SLICES
        yield None, _make_collective(kind, instruction.arrays[:1], rounds, instruction)
        return
    parts = [part for _, part in module.fused_instructions(instruction)] if fused else [instruction]
    if offloaded := OFFLOADED.search(instruction.attributes):
        parts = module.computations[offloaded[1]].values()
    elif instruction.opcode == 'async-start' and instruction.callee in module.computations:
        parts = module.computations[instruction.callee].values()
    for part in parts:
        if not (kind := OPCODE.match(part.opcode)):
            continue
        arrays = part.arrays
        if kind[2] and kind[1] != 'all-reduce':  # (operands, results, contexts)
            arrays = [array for array in arrays if array.shape]
            arrays = arrays[len(arrays) // 2 :]
        channel = CHANNEL.search(part.attributes)
        key = kind[1], channel and channel[1], tuple(a[:2] for a in arrays)
        yield key if fused else None, _make_collective(kind[1], arrays, rounds, part)


def _start_and_done(computation: Computation, instruction: Instruction) -> tuple[str, str]:
    """Returns the instruction from which a collective runs and the one that waits for it, which is
    the last of the computation where none does.
    """
    if instruction.opcode != 'recv' and not instruction.opcode.endswith('-start'):
        return instruction.name, instruction.name
    start, last = instruction.name if instruction.operands else None, instruction.name
    for user in computation.values():
        if last in user.operands and user.opcode.endswith(('-update', '-done')):
            if user.opcode.endswith('-done'):
                return start or last, user.name
            start, last = start or user.name, user.name  # what is sent may come with the update
    return start or last, find_root(computation).name


def _make_collective(
    kind: str, arrays: Sequence[Array], rounds: int, instruction: Instruction
) -> Collective:
    sizes = [array.bytes for array in arrays]
    return Collective(
        kind, sum(sizes), max(sizes, default=0), rounds, _parse_group(instruction.attributes)
    )


def _parse_group(text: str) -> tuple[int, ...]:
    """Parses the first of the groups, which are alike, or all pairs."""
    if found := GROUP_LIST.search(text):
        return tuple(map(int, found[1].split(',')))
    if found := PAIRS.search(text):
        return tuple(map(int, re.findall(r'\d+', found[1])))
    if found := GROUP_IOTA.search(text):
        shape, dims = ([int(n) for n in found[i].split(',')] for i in (1, 2))
        places = np.arange(math.prod(dims)).reshape(dims)
        if found[3]:
            places = places.transpose([int(n) for n in found[3].split(',')])
        return tuple(int(n) for n in places.reshape(shape)[0])
    if found := GROUP_MESH.search(text):
        return _parse_mesh_group(found[1], found[2])
    return ()


def _parse_mesh_group(axes: str, group_axes: str) -> tuple[int, ...]:
    """Returns the places of a mesh "'data'=2,'fsdp'=4" along axes "'fsdp'", or along a part of one:
    "'fsdp':(2)2" is the part of length 2 behind the first 2.
    """
    lengths = {name: int(n) for name, n in re.findall(r"'(\w+)'=(\d+)", axes)}
    places = np.arange(math.prod(lengths.values())).reshape(list(lengths.values()))
    index = dict.fromkeys(lengths, np.array([0]))
    for name, before, length in re.findall(r"'(\w+)'(?::\((\d+)\)(\d+))?", group_axes):
        stride = lengths[name] // (int(before) * int(length)) if length else 1
        part = np.arange(int(length or lengths[name])) * stride
        index[name] = (index[name][:, None] + part).ravel()
    return tuple(int(n) for n in places[np.ix_(*index.values())].ravel())


class LinkSpeed(NamedTuple):
    """The connection of a group of n devices of one slice.

    rate: bytes a second that a device sends and receives at once in a ring, over all dimensions.
    far: the factor by which an all-to-all is slower, as its bytes cross several links.
    """

    n: int
    rate: float
    hop_factor: float


def collective_seconds(
    collective: Collective, topology: Topology, devices: Sequence[jax.Device]
) -> float:
    """Returns the seconds of one round on links that nothing else uses (jax-ml/scaling-book,
    sharding.md): with s bytes of result on a device of a group of n, and W = `LinkSpeed.rate`,

        all-gather s (n - 1) / n / W, reduce-scatter s (n - 1) / W, all-reduce 2 s (n - 1) / n / W

    Between slices n is their number and W a device's share of the network. A collective-permute
    takes s for each transfer over the link that most transfers share. devices: in the order of the
    mesh.
    """
    if collective.kind.endswith(BETWEEN_SLICES):
        size = _ring_bytes(
            collective.kind.removesuffix(BETWEEN_SLICES), collective.bytes, topology.slices
        )
        return size / (1e9 * topology.chip.network)
    group = [devices[i] for i in collective.group or range(len(devices) // topology.slices)]
    if collective.kind == 'collective-permute' and collective.group:
        pairs = list(itertools.batched(group, 2))
        return max_link_transfers(pairs, topology) * collective.bytes / (1e9 * topology.chip.link)
    link = link_speed(group, topology)
    seconds = (
        _ring_bytes(collective.kind, collective.bytes, link.n) / link.rate if link.n > 1 else 0.0
    )
    return seconds * link.hop_factor if collective.kind == 'all-to-all' else seconds


def _ring_bytes(kind: str, size: float, n: int) -> float:
    """Returns the bytes that a device sends, and receives, for a result of `size` bytes."""
    match kind:
        case 'all-reduce':
            return 2 * size * (n - 1) / n
        case 'reduce-scatter':
            return size * (n - 1)
        case 'collective-permute':
            return size
    return size * (n - 1) / n


def link_speed(group: Sequence[jax.Device], topology: Topology) -> LinkSpeed:
    """Returns the connection of a group of devices, by their places in the torus.

    Along a whole ring both directions carry data; along a part of a ring, or a line, one does.
    Devices that lie k apart share their links with k - 1 other groups.
    """
    chip = topology.chip
    if chip.platform != 'tpu':
        return LinkSpeed(len(group), 1e9 * chip.link, 1.0)
    rates, far = [], 1.0
    for dimension, length in enumerate(topology.shape):
        along = sorted({device.coords[dimension] for device in group})
        if len(along) == 1:
            continue
        apart = min(b - a for a, b in itertools.pairwise(along))
        ring = topology.is_ring(dimension) and len(along) * apart == length
        rates.append(1e9 * chip.link * (2 if ring else 1) / apart)
        far = max(far, len(along) / (4 if ring else 2))
    # The two devices of a chip exchange at least as fast as with others.
    return LinkSpeed(len(group), sum(rates) or 1e9 * chip.link * 2, far)


def max_link_transfers(pairs: Sequence[tuple[jax.Device, jax.Device]], topology: Topology) -> float:
    """Returns the number of transfers over the link that most of them share. Each pair is one from
    a device to another, along one dimension of the torus after the other, the shorter way around.
    """
    moving = [(a, b) for a, b in pairs if a != b]
    if topology.chip.platform != 'tpu':
        return float(bool(moving))
    loads = collections.Counter()
    for source, target in moving:
        place = list(source.coords)
        for dimension, length in enumerate(topology.shape):
            way = target.coords[dimension] - place[dimension]
            if topology.is_ring(dimension) and abs(way) > length / 2:
                way -= int(math.copysign(length, way))
            step = 1 if way > 0 else -1
            for _ in range(abs(way)):
                loads[dimension, step, tuple(place)] += 1
                place[dimension] = (place[dimension] + step) % length
    # The two devices of a chip exchange at least as fast as with others.
    return max(loads.values(), default=0.5 * bool(moving))


def count_by_kind(found: Sequence[Collective]) -> Iterator[tuple[str, int, int]]:
    """Yields (kind, number in a step, bytes of the results on a device) for each kind there is."""
    for kind in (*KINDS, *(kind + BETWEEN_SLICES for kind in KINDS)):
        own = [one for one in found if one.kind == kind]
        if own:
            yield kind, sum(c.rounds for c in own), sum(c.rounds * c.bytes for c in own)
