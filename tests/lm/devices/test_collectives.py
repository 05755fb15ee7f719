"""Contract: what TPUs send each other in a training step is what their mesh asks for, and no more;
read from programs of the real compiler.
"""

import functools

import pytest

from tests.lm.devices.compile_meshes import (
    CAPACITY,
    EXPERTS,
    LAYERS,
    PROGRAMS,
    ROWS,
    TOKENS,
    VOCAB,
    D,
    F,
)
from tests.programs import COMPILERS, printed_by
from tpu.collectives import Collective

# Programs are compiled for slices of TPUs, once: four minutes.
pytestmark = [pytest.mark.full, pytest.mark.xdist_group('collectives')]

BF16, F32 = 2, 4
OF_LAYER = (4 * D * D + 2 * D * F) * BF16  # parameters of a layer
SMALL = 16384  # bytes; sums of the loss and of norms


@pytest.fixture(scope='module', autouse=True)
def compiled():
    """Compiles before the first test; where that fails, it is not tried anew for each test."""
    pytest.importorskip(COMPILERS['tpu'])
    programs()


@functools.cache
def programs():
    found = printed_by('tests.lm.devices.compile_meshes', seconds=900)
    for one in found:
        one['sent'] = [Collective(*sent) for sent in one['sent']]
    return {one['program']: one for one in found}


def sent(program, kind, times=None, above=SMALL):
    """Bytes of each, of those that are larger than `above`, in order of size."""
    return sorted(
        one.bytes
        for one in programs()[program]['sent']
        if one.kind == kind and one.bytes > above and times in (None, one.times)
    )


def kinds(program):
    return {one.kind for one in programs()[program]['sent'] if one.bytes > SMALL}


def activations(rows, tokens=TOKENS):
    """Bytes of [rows, tokens, D]."""
    return rows * tokens * D * BF16


def test_slices_exchange_each_device_its_part_of_the_gradients():
    """Once in a step, in the layers' own rounds, of which the compiler takes one out; and those of
    the tables once.
    """
    found = [one for one in programs()['slices']['sent'] if one.kind == 'all-reduce between slices']
    of_layers = sum(one.bytes for one in found if one.times == LAYERS - 1 and one.bytes > SMALL)
    assert of_layers == OF_LAYER // 4
    of_tables = 2 * VOCAB * D * F32 // 4
    alone = sum(one.bytes for one in found if one.times == 1 and one.bytes > SMALL)
    assert of_tables <= alone - OF_LAYER // 4 < of_tables + SMALL


def test_parameters_are_gathered_and_their_gradients_scattered():
    """Catches an all-reduce of a whole gradient, which the compiler makes of one that is cut along
    its last axis, and that of a table which is looked up in.
    """
    sizes = PROGRAMS['parameters'][1]
    part = OF_LAYER // sizes['fsdp']
    assert sum(sent('parameters', 'all-gather', LAYERS)) == 2 * OF_LAYER  # forward and backward
    assert sum(sent('parameters', 'reduce-scatter', LAYERS)) == part
    assert sum(sent('parameters', 'all-reduce', LAYERS)) == part  # over `data`
    of_tables = [VOCAB * D * F32 // sizes['fsdp']] * 2
    assert sent('parameters', 'reduce-scatter', 1) == of_tables
    reduced = [one.largest for one in programs()['parameters']['sent'] if one.kind == 'all-reduce']
    assert max(reduced) <= of_tables[0]  # parts, over `data`


def test_a_v6e_exchanges_parameters_while_it_computes():
    """On its SparseCores. Catches a step that is compiled without the options for it."""
    waits = programs()['parameters']['waits']
    assert not {'all-gather', 'reduce-scatter'} & set(waits)  # sums of a few numbers are left


def test_weights_of_fewer_heads_of_keys_are_gathered_twice_a_layer():
    """Catches one in the order of axes of each product: three a layer that is computed again."""
    of_layer = (2 * D * D + 2 * D * D * 2 // 8 + 2 * D * F) * BF16
    assert sum(sent('grouped', 'all-gather', LAYERS)) == 2 * of_layer


def test_heads_and_hidden_features_are_summed_four_times_a_layer():
    """Behind attention and the MLP, forward and backward; nothing is gathered."""
    sizes = PROGRAMS['heads'][1]
    assert kinds('heads') == {'all-reduce'}
    own = activations(ROWS // sizes['data'])
    assert sent('heads', 'all-reduce', LAYERS) == [OF_LAYER // sizes['tensor'], *[own] * 4]


def test_keys_and_values_of_cut_rows_are_gathered_and_their_gradients_scattered():
    sizes = PROGRAMS['tokens'][1]
    own = activations(ROWS // sizes['data'])
    assert set(sent('tokens', 'all-gather')) == {own}  # in several computations, to run meanwhile
    assert sent('tokens', 'reduce-scatter') == [own // sizes['context']] * 2
    assert sum(sent('tokens', 'all-reduce', LAYERS)) == OF_LAYER


def test_queries_of_cut_rows_are_dealt_for_splash_attention():
    """Half of them, and of the results back, forward and backward; keys and values as without."""
    sizes = PROGRAMS['dealt'][1]
    own = activations(ROWS // sizes['data'])
    halves = sent('dealt', 'collective-permute', LAYERS)
    assert halves == [own // sizes['context'] // 2] * 4
    assert set(sent('dealt', 'all-gather')) == {own}
    assert sent('dealt', 'reduce-scatter') == [own // sizes['context']] * 2


def test_tokens_go_to_their_experts_and_back():
    """Forward and backward, as many as the experts take; nothing is gathered."""
    sizes = PROGRAMS['experts'][1]
    assert kinds('experts') == {'all-reduce', 'all-to-all'}
    chosen = 2 * CAPACITY / EXPERTS * TOKENS  # of a row, by each expert
    own = int(ROWS // (sizes['data'] * sizes['expert']) * EXPERTS * chosen) * D * BF16
    assert sent('experts', 'all-to-all', LAYERS) == [own] * 4


def test_matrices_are_exchanged_once_in_and_once_out():
    """For Muon's iterations: six matrices of each layer. Catches an exchange in each product, and
    state that lies where its matrix is not.
    """
    sizes = PROGRAMS['matrices'][1]
    exchanged = sent('matrices', 'all-to-all')
    of_each = [LAYERS * n * F32 // sizes['fsdp'] for n in [D * D] * 4 + [D * F] * 2]
    assert exchanged == sorted(of_each * 2)
    for kind in ('all-gather', 'reduce-scatter'):
        assert sent('matrices', kind) == sent('parameters', kind)
    # How many sums there are in one all-reduce is up to the compiler.
    assert sum(sent('matrices', 'all-reduce', LAYERS)) == OF_LAYER // sizes['fsdp']
    found, others = (sum(sent(name, 'all-reduce', 1)) for name in ('matrices', 'parameters'))
    assert found == others
