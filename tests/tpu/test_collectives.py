"""Reference: traffic between devices, and its time by closed forms."""

import itertools
from typing import NamedTuple

import pytest

from tpu.chips import CHIPS, Topology
from tpu.collectives import (
    Collective,
    _parse_group,
    collective_seconds,
    count_by_kind,
    link_speed,
    list_collectives,
)
from tpu.hlo import Module


class TopologyDevice(NamedTuple):
    coords: tuple[int, ...]
    slice_index: int = 0


def make_topology(name, slices=1):
    kind, _, shape = name.partition(':')
    lengths = tuple(map(int, shape.split('x')))
    devices = [
        TopologyDevice((*place, 0, 0)[:3], number)
        for number in range(slices)
        for place in itertools.product(*map(range, lengths))
    ]
    return Topology(name, CHIPS[kind], devices, lengths, slices)


@pytest.mark.parametrize(
    'text, group',
    [
        ('replica_groups={{0,2},{1,3}}, use', (0, 2)),
        ('replica_groups=[2,4]<=[8], use', (0, 1, 2, 3)),
        ('replica_groups=[4,2]<=[2,4]T(1,0), use', (0, 4)),
        ("replica_groups=mesh['run'=1,'data'=2,'fsdp'=4] {'data'}, use", (0, 4)),
        ("replica_groups=mesh['data'=2,'fsdp'=4,'tensor'=2] {'data','tensor'}, use", (0, 1, 8, 9)),
        ("replica_groups=mesh['data'=2,'fsdp'=4] {'fsdp':(1)2}, use", (0, 2)),
        ("replica_groups=mesh['data'=2,'fsdp'=4] {'fsdp':(2)2}, use", (0, 1)),
        ('source_target_pairs={{3,1},{1,0}}, use', (3, 1, 1, 0)),
        ('to_apply=%add', ()),
    ],
    ids=str,
)
def test_group_forms_are_parsed(text, group):
    assert _parse_group(text) == group


PROGRAM = """HloModule step

%scatter (p: f32[8,4]) -> f32[2,4] {
  %p = f32[8,4]{1,0} parameter(0)
  %sum = f32[8,4]{1,0} all-reduce(%p), channel_id=3, replica_groups={{0,1,2,3}}, to_apply=%add
  ROOT %part = f32[2,4]{1,0} dynamic-slice(%sum), dynamic_slice_sizes={2,4}
}

%started (q: f32[4]) -> f32[8] {
  %q = f32[4]{0} parameter(0)
  ROOT %all-gather.9 = f32[8]{0:S(1)} all-gather(%q), channel_id=9, replica_groups={{0,1}}
}

%ended (r: f32[4]) -> f32[8] {
  %r = f32[4]{0} parameter(0)
  ROOT %all-gather.10 = f32[8]{0} all-gather(%r), channel_id=9, replica_groups={{0,1}}
}

%sent (t: f32[4]) -> f32[12] {
  %t = f32[4]{0} parameter(0)
  ROOT %all-gather.11 = f32[12]{0} all-gather(%t), channel_id=11, replica_groups={{0,1,2}}
}, execution_thread="sparsecore"

ENTRY %main (a: f32[8,4], b: f32[4]) -> f32[2,4] {
  %a = f32[8,4]{1,0} parameter(0)
  %b = f32[4]{0} parameter(1)
  %begun = f32[8]{0} fusion(%b), kind=kCustom, calls=%started
  %done = f32[8]{0} fusion(%b), kind=kCustom, calls=%ended
  %gather = (f32[4]{0}, f32[16]{0}) all-gather-start(%b), channel_id=1, replica_groups={{0,1,2,3}}
  %whole = f32[16]{0} all-gather-done(%gather)
  %call-start = ((), (), (s32[9]{0})) custom-call-start(), SPARSE, called_computations={%sent}
  %call-update = ((f32[4]{0}), f32[12]{0}) custom-call-update(%call-start, %b)
  %call-done = f32[12]{0} custom-call-done(%call-update)
  %both = (f32[4]{0}, f32[]) all-reduce(%b, %b), channel_id=2, replica_groups={{0,1}}, to_apply=%k
  %more = (f32[4]{0}, f32[]) all-reduce(%b, %b), channel_id=2, replica_groups={{0,1}}, to_apply=%v
  %after = token[] after-all()
  %out = (f32[4]{0}, u32[], token[]) send(%b, %after), frontend_attributes={MEGASCALE}
  %in = (f32[4]{0:T(8)}, u32[]{:S(2)}, token[]) recv(%after), frontend_attributes={MEGASCALE}
  %ended = (f32[4]{0}, token[]) recv-done(%in), frontend_attributes={MEGASCALE}
  %host = (f32[4]{0}, u32[], token[]) recv(%after), is_host_transfer=true
  ROOT %own = f32[2,4]{1,0} fusion(%a), kind=kCustom, calls=%scatter
}
"""
PROGRAM = (
    PROGRAM.replace('calls=%scatter', 'calls=%all-reduce-scatter.1')
    .replace('%scatter (', '%all-reduce-scatter.1 (')
    .replace('SPARSE', 'async_execution_thread="sparsecore"')
    .replace('MEGASCALE', '_xla_megascale_transfer_type="ALL_REDUCE"')
)


def test_collectives_count_once_by_result():
    """Catches a TPU's reduce-scatter counted as an all-reduce of the whole, a fused collective
    counted twice, a start whose operands count, two collectives of one channel counted as one, and
    a missing collective of a SparseCore.
    """
    collectives = list_collectives(Module(PROGRAM))
    assert sorted(collectives) == [
        Collective('all-gather', 32, 32, 1, (0, 1)),
        Collective('all-gather', 48, 48, 1, (0, 1, 2)),
        Collective('all-gather', 64, 64, 1, (0, 1, 2, 3)),
        *[Collective('all-reduce', 20, 16, 1, (0, 1))] * 2,
        Collective('all-reduce between slices', 16, 16, 1),
        Collective('reduce-scatter', 32, 32, 1, (0, 1, 2, 3)),
    ]
    assert list(count_by_kind(collectives)) == [
        ('all-gather', 3, 144),
        ('all-reduce', 2, 40),
        ('reduce-scatter', 1, 32),
        ('all-reduce between slices', 1, 16),
    ]


def test_ring_rate_is_twice_line_rate():
    """A row of v6e:16x16 is a ring, a row of v6e:8x8 a line, and every third chip shares
    its links.
    """
    pod, part = make_topology('v6e:16x16'), make_topology('v6e:8x8')
    assert link_speed(pod.devices[:16], pod).rate == 2 * 90e9
    assert link_speed(part.devices[:8], part).rate == 90e9
    assert link_speed(pod.devices[:4], pod).rate == 90e9  # a part of the ring
    assert link_speed(pod.devices[:16:4], pod).rate == 2 * 90e9 / 4
    assert link_speed(pod.devices, pod).rate == 2 * 2 * 90e9  # both dimensions
    cube = make_topology('v5p:4x4x4')
    assert link_speed(cube.devices, cube).rate == 3 * 2 * 90e9


def test_seconds_match_ring_formulas():
    """jax-ml/scaling-book, sharding.md: an all-gather of V bytes takes V / W, an all-reduce twice
    that, an all-to-all a quarter.
    """
    pod = make_topology('v6e:16x16')
    row, n_bytes, rate = tuple(range(16)), 1.6e9, 180e9

    def seconds(kind, size, group=row):
        return collective_seconds(Collective(kind, size, size, 1, group), pod, pod.devices)

    assert seconds('all-gather', n_bytes) == pytest.approx(n_bytes / rate * 15 / 16)
    assert seconds('reduce-scatter', n_bytes / 16) == pytest.approx(n_bytes / rate * 15 / 16)
    assert seconds('all-reduce', n_bytes) == pytest.approx(2 * n_bytes / rate * 15 / 16)
    assert seconds('all-to-all', n_bytes / 16) == pytest.approx(n_bytes / rate / 4 * 15 / 16)
    all_devices = seconds('all-gather', n_bytes, ())
    assert all_devices == pytest.approx(n_bytes / (2 * rate) * 255 / 256)


def test_local_links_take_no_time():
    """Catches a plan of several local devices that fails, as no rate of their links is known."""
    local = Topology('here', None, [TopologyDevice((0,))], (), 1)
    collective = Collective('all-reduce', 8, 8, 1, (0,))
    assert collective_seconds(collective, local, local.devices) == 0.0


def test_permutation_takes_its_busiest_link():
    """Catches the distance of the first pair, which may be 0, used for all; and the long way around
    a ring.
    """
    pod, part = make_topology('v6e:16x16'), make_topology('v6e:8x8')

    def seconds(moves, on, size=9e8):
        group = tuple(itertools.chain.from_iterable(moves))
        collective = Collective('collective-permute', size, size, 1, group)
        return collective_seconds(collective, on, on.devices)

    def rotation(n, by, stride=1):
        return [(stride * i, stride * ((i + by) % n)) for i in range(n)]

    assert seconds(rotation(16, 1), pod) == pytest.approx(0.01)
    assert seconds(rotation(16, -3, 16), pod) == pytest.approx(0.03)
    assert seconds([(0, 0), (1, 2), (2, 1)], pod) == pytest.approx(0.01)  # each link both ways
    assert seconds([(0, 15), (1, 2)], pod) == pytest.approx(0.01)  # around the end, past neither
    assert seconds([(i, i) for i in range(16)], pod) == 0.0
    # Along a line of 8 each link carries one transfer, and the last returns all the way.
    assert seconds(rotation(8, 1), part) == pytest.approx(0.01)
    assert seconds(rotation(8, 3), part) == pytest.approx(0.03)
    assert seconds([(0, 9), (9, 0)], part) == pytest.approx(0.01)  # along both dimensions


@pytest.mark.full
def test_slices_share_the_network():
    """Catches traffic through the hosts, which is no collective in the program."""
    pods = make_topology('v6e:4x4', slices=4)
    collective = Collective('all-reduce between slices', 1e8, 1e8, 1)
    assert collective_seconds(collective, pods, pods.devices) == pytest.approx(
        2 * 1e8 * 3 / 4 / 12.5e9
    )
