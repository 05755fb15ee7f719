"""Property: offered topologies can be named, and others are answered with the nearest."""

import math

import pytest

from tpu.chips import CHIPS, GPUS, TPUS, Chip, Topology, canonical_slice, list_shapes, open_topology


def test_chips_have_published_peak_and_slices():
    for name, chip in CHIPS.items():
        assert chip.peak > 1e14, name
        sizes = [math.prod(map(int, shape.split('x'))) for shape in list_shapes(chip)]
        assert sizes == sorted(sizes) and max(sizes) <= chip.largest, name
    assert set(TPUS) == {'v4', 'v5e', 'v5p', 'v6e', 'tpu7x'}
    assert all(chip.platform == 'gpu' for chip in GPUS.values())


@pytest.mark.parametrize(
    'name, message',
    [
        ('v5e:3x4', 'Nearest that is offered: v5e:4x4'),
        ('v6e:32x16', 'Nearest that is offered: v6e:16x16'),
        ('v5p:4x4x5', 'Nearest that is offered: v5p:4x4x4'),
        ('v5p:64', 'Nearest that is offered: v5p:4x4x4'),
        ('v5p', "has no 'empty shape'"),
        ('v5litepod', 'Did you mean v5e:16x16'),
        ('v5e-12', "v5e has no '12'. Nearest that is offered: v5e:"),
        ('v5p-9', 'Nearest that is offered: v5p:2x2x1'),
        ('v5p-x', 'Did you mean v5p:4x4x4'),
        ('h100:3', 'Nearest that is offered: h100:'),
        ('v9:4x4', 'must name one of v4, v5e'),
        ('v6e:²x2', "v6e has no '²x2'. Nearest that is offered: v6e:1x1"),
        ('v6e:٤x٤', 'Nearest that is offered: v6e:1x1'),
        ('v6e-٤', 'must name one of v4, v5e, v5p, v6e'),
        (f'v6e:{"9" * 400}', 'Nearest that is offered: v6e:16x16'),
        (f'v6e-{"9" * 400}', 'Nearest that is offered: v6e:16x16'),
        (f'v5p-{"9" * 5000}', 'Nearest that is offered: v5p:'),
        (f'v6e:{"x".join(["9" * 6] * 99)}', 'Nearest that is offered: v6e:16x16'),
        (f'h100:{"9" * 400}', 'Nearest that is offered: h100:8'),
    ],
    ids=lambda text: text[:40],
)
def test_unknown_topology_suggests_nearest(name, message):
    with pytest.raises(ValueError, match='--topology') as error:
        open_topology(name)
    assert message in str(error.value)


@pytest.mark.parametrize(
    'name, shape',
    [
        ('v5e-16', 'v5e:4x4'),
        ('v5litepod-256', 'v5e:16x16'),
        ('v6e-16', 'v6e:4x4'),
        ('v4-32', 'v4:2x2x4'),
        ('v5p-32', 'v5p:2x2x4'),
        ('v5p-8', 'v5p:2x2x1'),
        ('v5p:4x4x4', 'v5p:4x4x4'),
        ('here', 'here'),
    ],
)
def test_google_slice_names_are_parsed(name, shape):
    """Sizes count chips, or TensorCores if a chip has two (tables of axlearn, MaxText)."""
    assert canonical_slice(name) == shape


def test_topology_opens_by_google_name(monkeypatch):
    monkeypatch.setattr('importlib.util.find_spec', lambda module: True)
    monkeypatch.setattr(Chip, 'make_slice_devices', lambda chip, shape, number: [shape])
    opened = open_topology('v5e-16')
    assert (opened.name, opened.shape, opened.devices) == ('v5e:4x4', (4, 4), ['4x4'])


@pytest.mark.parametrize('name, extra', [('v5e:4x4', 'tpu'), ('h100:8', 'cuda-compiler')])
def test_missing_compiler_names_its_extra(name, extra, monkeypatch):
    monkeypatch.setattr('importlib.util.find_spec', lambda module: None)
    with pytest.raises(ValueError, match=f'uv sync --extra {extra}$'):
        open_topology(name)


def test_slices_need_tpus():
    with pytest.raises(ValueError, match='has no slices'):
        open_topology('here', 2)
    with pytest.raises(ValueError, match='must be 1 or more'):
        open_topology('v5e:4x4', 0)


def test_whole_dimensions_are_rings():
    """v5e and v6e at 16 chips, the others in whole cubes (Google's pages, jax-ml/scaling-book)."""
    rings = {'v6e:16x16': [True, True], 'v5e:8x16': [False, True], 'v5p:2x4x4': [False, True, True]}
    for name, expected in rings.items():
        kind, _, shape = name.partition(':')
        lengths = tuple(map(int, shape.split('x')))
        topology = Topology(name, CHIPS[kind], [], lengths)
        assert [topology.is_ring(i) for i in range(len(lengths))] == expected, name
