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
# TPUs of several slices exchange data through their hosts' network. The compiler takes this part
# out of the collective, which then stays within a slice.
BETWEEN_SLICES = ' between slices'
# A SparseCore runs collectives in a separate computation, beside other work.
OFFLOADED = re.compile(r'async_execution_thread="sparsecore".* called_computations=\{%([\w.\-]+)\}')
TRANSFER_TYPE = re.compile(r'_xla_megascale_transfer_type="(\w+)"')
# A TPU's reduce-scatter is an all-reduce in a computation with this prefix; the caller returns the
# device's part of its result.
SCATTER_PREFIX = 'all-reduce-scatter'


class Collective(NamedTuple):
    """A collective operation.

    kind: a kind of KINDS, with BETWEEN_SLICES appended for a part that uses the network. bytes: of
    the result on a device. largest: bytes of the largest array of a combined result. rounds: rounds
    of the loops around it. group: positions in the mesh of the devices of one group, () for all
    devices; for a collective-permute all pairs, each sender before its receiver.
    """

    kind: str
    bytes: int
    largest: int
    rounds: int
    group: tuple[int, ...] = ()


class Exchange(NamedTuple):
    """A collective in the order of its computation.

    Instruction `start` begins the transfer, and `done` waits for its end. A synchronous collective
    is both.
    """

    collective: Collective
    start: str
    done: str


def list_collectives(module: Module) -> list[Collective]:
    """Returns the collectives of a program for TPUs, GPUs or CPUs."""
    return [
        exchange.collective
        for computation_exchanges in list_exchanges(module).values()
        for exchange in computation_exchanges
    ]


def list_exchanges(module: Module) -> dict[str, list[Exchange]]:
    """Returns the collectives of each scheduled computation, in the order of their start.

    A collective in a computation that runs asynchronously is listed where that computation starts.
    """
    started = {
        instruction.callee
        for _, instruction, _ in module.instructions()
        if instruction.opcode == 'async-start'
    }
    return {
        name: _computation_exchanges(module, module.computations[name], rounds)
        for name, rounds in module.rounds.items()
        if name not in started
    }


def _computation_exchanges(module: Module, computation: Computation, rounds: int) -> list[Exchange]:
    exchanges: list[Exchange] = []
    fusions_by_key: dict[tuple, dict[str, list[Collective]]] = {}
    for instruction in computation.values():
        for key, collective in _find_collectives(module, instruction, rounds):
            if key is None:
                exchanges.append(Exchange(collective, *_start_and_done(computation, instruction)))
            else:
                fusions_by_key.setdefault(key, {}).setdefault(instruction.name, []).append(
                    collective
                )
    # A collective that overlaps with other work by fusion appears in several fusions: the first
    # starts it, others run beside it, and the last waits for it.
    for fusions in fusions_by_key.values():
        names = list(fusions)
        # A fusion may hold only a part of them; the fullest names each collective once.
        fused = max(fusions.values(), key=len)
        exchanges += [Exchange(collective, names[0], names[-1]) for collective in fused]
    return exchanges


def _find_collectives(
    module: Module, instruction: Instruction, rounds: int
) -> Iterator[tuple[tuple | None, Collective]]:
    """Yields (key, collective) for the collectives of an instruction.

    Several fusions of a computation may hold parts of one collective, with equal keys. The key of
    an unfused collective is None.
    """
    is_fusion = instruction.opcode == 'fusion'
    if is_fusion and (instruction.callee or '').startswith(SCATTER_PREFIX):
        parts = module.computations[instruction.callee].values()
        (all_reduce,) = (part for part in parts if OPCODE.match(part.opcode))
        yield None, _make_collective('reduce-scatter', instruction.arrays, rounds, all_reduce)
        return
    if instruction.opcode == 'recv' and (
        transfer_type := TRANSFER_TYPE.search(instruction.attributes)
    ):
        kind = transfer_type[1].lower().replace('_', '-')
        kind = (kind if kind in KINDS else 'collective-permute') + BETWEEN_SLICES
        yield None, _make_collective(kind, instruction.arrays[:1], rounds, instruction)
        return
    parts = (
        [part for _, part in module.fused_instructions(instruction)] if is_fusion else [instruction]
    )
    if offloaded := OFFLOADED.search(instruction.attributes):
        parts = module.computations[offloaded[1]].values()
    elif instruction.opcode == 'async-start' and instruction.callee in module.computations:
        parts = module.computations[instruction.callee].values()
    for part in parts:
        if not (kind := OPCODE.match(part.opcode)):
            continue
        arrays = part.arrays
        if kind[2] and kind[1] != 'all-reduce':  # arrays are (operands, results, contexts)
            arrays = [array for array in arrays if array.shape]
            arrays = arrays[len(arrays) // 2 :]
        # The parts of one collective in several fusions share its channel and its arrays.
        channel = CHANNEL.search(part.attributes)
        key = kind[1], channel and channel[1], tuple(a[:2] for a in arrays)
        yield key if is_fusion else None, _make_collective(kind[1], arrays, rounds, part)


def _start_and_done(computation: Computation, instruction: Instruction) -> tuple[str, str]:
    """Returns the names of the instructions that start a collective and wait for it.

    If none waits, the second is the root of the computation.
    """
    if instruction.opcode != 'recv' and not instruction.opcode.endswith('-start'):
        return instruction.name, instruction.name
    start, last = instruction.name if instruction.operands else None, instruction.name
    for user in computation.values():
        if last in user.operands and user.opcode.endswith(('-update', '-done')):
            if user.opcode.endswith('-done'):
                return start or last, user.name
            start, last = start or user.name, user.name  # the data to send may come with the update
    return start or last, find_root(computation).name


def _make_collective(
    kind: str, arrays: Sequence[Array], rounds: int, instruction: Instruction
) -> Collective:
    """Returns a Collective with the sizes of the arrays."""
    sizes = [array.bytes for array in arrays]
    return Collective(
        kind, sum(sizes), max(sizes, default=0), rounds, _parse_group(instruction.attributes)
    )


def _parse_group(text: str) -> tuple[int, ...]:
    """Parses the first group, as all groups are alike; for a permute all pairs."""
    if match := GROUP_LIST.search(text):
        return tuple(map(int, match[1].split(',')))
    if match := PAIRS.search(text):
        return tuple(map(int, re.findall(r'\d+', match[1])))
    if match := GROUP_IOTA.search(text):
        shape, dims = ([int(n) for n in match[i].split(',')] for i in (1, 2))
        positions = np.arange(math.prod(dims)).reshape(dims)
        if match[3]:
            positions = positions.transpose([int(n) for n in match[3].split(',')])
        return tuple(int(n) for n in positions.reshape(shape)[0])
    if match := GROUP_MESH.search(text):
        return _parse_mesh_group(match[1], match[2])
    return ()


def _parse_mesh_group(axes: str, group_axes: str) -> tuple[int, ...]:
    """Returns positions in a mesh "'data'=2,'fsdp'=4" along axes such as "'fsdp'".

    An axis may be split, with the group along a part of it:
    "'fsdp':(2)2" is the part of length 2 after the first 2.
    """
    lengths = {name: int(n) for name, n in re.findall(r"'(\w+)'=(\d+)", axes)}
    positions = np.arange(math.prod(lengths.values())).reshape(list(lengths.values()))
    index = dict.fromkeys(lengths, np.array([0]))
    for name, n_before, length in re.findall(r"'(\w+)'(?::\((\d+)\)(\d+))?", group_axes):
        stride = lengths[name] // (int(n_before) * int(length)) if length else 1
        offsets = np.arange(int(length or lengths[name])) * stride
        index[name] = (index[name][:, None] + offsets).ravel()
    return tuple(int(n) for n in positions[np.ix_(*index.values())].ravel())


class LinkSpeed(NamedTuple):
    """The connection of a group of n devices of one slice.

    rate: bytes per second that a device sends and receives simultaneously in a ring, over all
    dimensions. hop_factor: slowdown of an all-to-all, as its bytes cross several links.
    """

    n: int
    rate: float
    hop_factor: float


def collective_seconds(
    collective: Collective, topology: Topology, devices: Sequence[jax.Device]
) -> float:
    """Returns the seconds of one round on otherwise idle links (jax-ml/scaling-book, sharding.md).

    With s bytes of result on a device of a group of n, and W = `LinkSpeed.rate`:

        all-gather s (n - 1) / n / W, reduce-scatter s (n - 1) / W, all-reduce 2 s (n - 1) / n / W

    Between slices n is the number of slices and W a device's share of the network. A
    collective-permute takes s for each transfer over the most loaded link. The links of the local
    devices are unknown, and take 0 seconds (`StepEstimate.are_links_known`).

    Args:
      collective: the collective.
      topology: the chips and their links.
      devices: in the order of the mesh.
    """
    chip = topology.chip
    if chip is None:
        return 0.0
    if collective.kind.endswith(BETWEEN_SLICES):
        size = _ring_bytes(
            collective.kind.removesuffix(BETWEEN_SLICES), collective.bytes, topology.slices
        )
        return size / (1e9 * chip.network)
    group = [devices[i] for i in collective.group or range(len(devices) // topology.slices)]
    if collective.kind == 'collective-permute' and collective.group:
        pairs = list(itertools.batched(group, 2))
        return max_link_transfers(pairs, topology) * collective.bytes / (1e9 * chip.link)
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
    """Returns the connection of a group of devices, by their positions in the torus.

    Along a whole ring both directions carry data; along a line or a part of a ring, only one.
    Devices at a distance of k share their links with k - 1 other groups.
    """
    chip = topology.chip
    assert chip is not None  # links of the local devices are not published
    if chip.platform != 'tpu':
        return LinkSpeed(len(group), 1e9 * chip.link, 1.0)
    rates, hop_factor = [], 1.0
    for dimension, length in enumerate(topology.shape):
        coordinates = sorted({device.coords[dimension] for device in group})
        if len(coordinates) == 1:
            continue
        stride = min(b - a for a, b in itertools.pairwise(coordinates))
        is_ring = topology.is_ring(dimension) and len(coordinates) * stride == length
        rates.append(1e9 * chip.link * (2 if is_ring else 1) / stride)
        # A byte takes the shorter way around a ring, n / 4 links on average. A line, which has no
        # second way, counts double.
        hop_factor = max(hop_factor, len(coordinates) / (4 if is_ring else 2))
    # The two devices of a chip exchange at least as fast as with others.
    return LinkSpeed(len(group), sum(rates) or 1e9 * chip.link * 2, hop_factor)


def max_link_transfers(pairs: Sequence[tuple[jax.Device, jax.Device]], topology: Topology) -> float:
    """Returns the number of transfers over the most loaded link.

    Each pair is a transfer between two devices. It follows one dimension of the torus after the
    other, the shorter way around.
    """
    transfers = [(a, b) for a, b in pairs if a != b]
    assert topology.chip is not None  # links of the local devices are not published
    if topology.chip.platform != 'tpu':
        return float(bool(transfers))
    loads = collections.Counter()
    for source, target in transfers:
        position = list(source.coords)
        for dimension, length in enumerate(topology.shape):
            offset = target.coords[dimension] - position[dimension]
            # Around a ring, the other way is shorter beyond half of its length.
            if topology.is_ring(dimension) and abs(offset) > length / 2:
                offset -= int(math.copysign(length, offset))
            step = 1 if offset > 0 else -1
            for _ in range(abs(offset)):
                loads[dimension, step, tuple(position)] += 1
                position[dimension] = (position[dimension] + step) % length
    # The two devices of a chip exchange at least as fast as with others.
    return max(loads.values(), default=0.5 * bool(transfers))


def count_by_kind(collectives: Sequence[Collective]) -> Iterator[tuple[str, int, int]]:
    """Yields (kind, number per step, bytes of results per device) for each kind that occurs."""
    for kind in (*KINDS, *(kind + BETWEEN_SLICES for kind in KINDS)):
        same_kind = [collective for collective in collectives if collective.kind == kind]
        if same_kind:
            yield (
                kind,
                sum(collective.rounds for collective in same_kind),
                sum(collective.rounds * collective.bytes for collective in same_kind),
            )
