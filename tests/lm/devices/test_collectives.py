"""Contract: in a training step TPUs send each other exactly the traffic that their mesh implies.

The traffic is read from programs of the real compiler.
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
LAYER_BYTES = (4 * D * D + 2 * D * F) * BF16  # parameters of a layer
SMALL = 16384  # bytes; sums of the loss and of norms


@pytest.fixture(scope='module', autouse=True)
def compile_programs():
    """Compiles before the first test; if that fails, the other tests do not try again."""
    pytest.importorskip(COMPILERS['tpu'])
    programs()


@functools.cache
def programs():
    records = printed_by('tests.lm.devices.compile_meshes', seconds=900)
    for record in records:
        record['sent'] = [Collective(*fields) for fields in record['sent']]
    return {record['program']: record for record in records}


def sent(program, kind, times=None, above=SMALL):
    """Returns the bytes of each collective larger than `above`, in ascending order."""
    return sorted(
        collective.bytes
        for collective in programs()[program]['sent']
        if collective.kind == kind
        and collective.bytes > above
        and times in (None, collective.rounds)
    )


def kinds(program):
    return {
        collective.kind for collective in programs()[program]['sent'] if collective.bytes > SMALL
    }


def activations(rows, tokens=TOKENS):
    """Returns the bytes of [rows, tokens, D]."""
    return rows * tokens * D * BF16


def test_slices_exchange_gradient_parts():
    """Gradients are exchanged once per step in the loop over layers (the compiler peels off one
    round); the tables are exchanged once.
    """
    collectives = [
        collective
        for collective in programs()['slices']['sent']
        if collective.kind == 'all-reduce between slices'
    ]
    layer_bytes = sum(
        collective.bytes
        for collective in collectives
        if collective.rounds == LAYERS - 1 and collective.bytes > SMALL
    )
    assert layer_bytes == LAYER_BYTES // 4
    table_bytes = 2 * VOCAB * D * F32 // 4
    single_bytes = sum(
        collective.bytes
        for collective in collectives
        if collective.rounds == 1 and collective.bytes > SMALL
    )
    assert table_bytes <= single_bytes - LAYER_BYTES // 4 < table_bytes + SMALL


def test_parameters_are_gathered_and_their_gradients_scattered():
    """Catches an all-reduce of a whole gradient: the compiler makes one of a gradient that is cut
    along its last axis, and of a table with lookups.
    """
    sizes = PROGRAMS['parameters'][1]
    part = LAYER_BYTES // sizes['fsdp']
    assert sum(sent('parameters', 'all-gather', LAYERS)) == 2 * LAYER_BYTES  # forward and backward
    assert sum(sent('parameters', 'reduce-scatter', LAYERS)) == part
    assert sum(sent('parameters', 'all-reduce', LAYERS)) == part  # over `data`
    table_parts = [VOCAB * D * F32 // sizes['fsdp']] * 2
    assert sent('parameters', 'reduce-scatter', 1) == table_parts
    reduced = [
        collective.largest
        for collective in programs()['parameters']['sent']
        if collective.kind == 'all-reduce'
    ]
    assert max(reduced) <= table_parts[0]  # parts, over `data`


def test_v6e_overlaps_exchange_with_computation():
    """The SparseCores exchange parameters. Catches a step that is compiled without the options for
    it.
    """
    waits = programs()['parameters']['waits']
    assert not {'all-gather', 'reduce-scatter'} & set(waits)  # sums of a few numbers are left


def test_grouped_query_weights_are_gathered_twice_per_layer():
    """Catches a gather for each product's order of axes: three in a recomputed layer."""
    layer_bytes = (2 * D * D + 2 * D * D * 2 // 8 + 2 * D * F) * BF16
    assert sum(sent('grouped', 'all-gather', LAYERS)) == 2 * layer_bytes


def test_heads_and_features_are_reduced_four_times_per_layer():
    """Sums follow attention and the MLP, forward and backward; nothing is gathered."""
    sizes = PROGRAMS['heads'][1]
    assert kinds('heads') == {'all-reduce'}
    activation_bytes = activations(ROWS // sizes['data'])
    assert sent('heads', 'all-reduce', LAYERS) == [
        LAYER_BYTES // sizes['tensor'],
        *[activation_bytes] * 4,
    ]


def test_context_gathers_keys_and_values():
    sizes = PROGRAMS['tokens'][1]
    activation_bytes = activations(ROWS // sizes['data'])
    assert set(sent('tokens', 'all-gather')) == {
        activation_bytes
    }  # in several computations, to run meanwhile
    assert sent('tokens', 'reduce-scatter') == [activation_bytes // sizes['context']] * 2
    assert sum(sent('tokens', 'all-reduce', LAYERS)) == LAYER_BYTES


def test_context_deals_queries_for_splash_attention():
    """Half of the queries, and half of the results back, forward and backward; keys and values as
    without.
    """
    sizes = PROGRAMS['dealt'][1]
    activation_bytes = activations(ROWS // sizes['data'])
    halves = sent('dealt', 'collective-permute', LAYERS)
    assert halves == [activation_bytes // sizes['context'] // 2] * 4
    assert set(sent('dealt', 'all-gather')) == {activation_bytes}
    assert sent('dealt', 'reduce-scatter') == [activation_bytes // sizes['context']] * 2


def test_tokens_go_to_their_experts_and_back():
    """Forward and backward, up to the capacity of the experts; nothing is gathered."""
    sizes = PROGRAMS['experts'][1]
    assert kinds('experts') == {'all-reduce', 'all-to-all'}
    chosen = 2 * CAPACITY / EXPERTS * TOKENS  # of a row, by each expert
    token_bytes = int(ROWS // (sizes['data'] * sizes['expert']) * EXPERTS * chosen) * D * BF16
    assert sent('experts', 'all-to-all', LAYERS) == [token_bytes] * 4


def test_matrices_are_exchanged_once_in_and_once_out():
    """Muon's iterations exchange six matrices of each layer. Catches an exchange in each product,
    and state that is sharded differently from its matrix.
    """
    sizes = PROGRAMS['matrices'][1]
    exchanged = sent('matrices', 'all-to-all')
    matrix_bytes = [LAYERS * n * F32 // sizes['fsdp'] for n in [D * D] * 4 + [D * F] * 2]
    assert exchanged == sorted(matrix_bytes * 2)
    for kind in ('all-gather', 'reduce-scatter'):
        assert sent('matrices', kind) == sent('parameters', kind)
    # How many sums there are in one all-reduce is up to the compiler.
    assert sum(sent('matrices', 'all-reduce', LAYERS)) == LAYER_BYTES // sizes['fsdp']
    sums_of_matrices, sums_of_parameters = (
        sum(sent(name, 'all-reduce', 1)) for name in ('matrices', 'parameters')
    )
    assert sums_of_matrices == sums_of_parameters
