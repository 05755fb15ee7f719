"""Reference: what a device waits for, by hand; and what the compiler of each kind of TPU hides."""

import functools

import pytest

from tests.programs import COMPILERS, printed_by
from tpu.hlo import Module
from tpu.schedule import waiting_seconds

WORK, GATHER, NETWORK = 2, 5, 3  # seconds of a fusion, an all-gather, a sum between slices

PROGRAM = """HloModule step, is_scheduled=true

%condition (c: (s32[], f32[8])) -> pred[] {
  %limit = s32[] constant(7)
  %c = (s32[], f32[8]{0}) parameter(0)
  %count = s32[] get-tuple-element(%c), index=0
  ROOT %less = pred[] compare(%count, %limit), direction=LT
}

%body (d: (s32[], f32[8])) -> (s32[], f32[8]) {
  %d = (s32[], f32[8]{0}) parameter(0)
  %count.1 = s32[] get-tuple-element(%d), index=0
  %x = f32[8]{0} get-tuple-element(%d), index=1
  %one = s32[] constant(1)
  %more = s32[] add(%count.1, %one)
BODY
  ROOT %next = (s32[], f32[8]{0}) tuple(%more, %x)
}

%first (p: f32[8]) -> f32[32] {
  %p = f32[8]{0} parameter(0)
  ROOT %all-gather.1 = f32[32]{0} all-gather(%p), channel_id=7, replica_groups={{0,1,2,3}}
}

%second (q: f32[8]) -> f32[32] {
  %q = f32[8]{0} parameter(0)
  ROOT %all-gather.2 = f32[32]{0} all-gather(%q), channel_id=7, replica_groups={{0,1,2,3}}
}

%third (r: f32[8]) -> f32[32] {
  %r = f32[8]{0} parameter(0)
  ROOT %all-gather.3 = f32[32]{0} all-gather(%r), channel_id=7, replica_groups={{0,1,2,3}}
}

%sent (t: f32[8]) -> f32[32] {
  %t = f32[8]{0} parameter(0)
  ROOT %all-gather.4 = f32[32]{0} all-gather(%t), channel_id=8, replica_groups={{0,1,2,3}}
}

ENTRY %main (a: (s32[], f32[8])) -> (s32[], f32[8]) {
  %a = (s32[], f32[8]{0}) parameter(0)
  %x = f32[8]{0} get-tuple-element(%a), index=1
MAIN
}
"""
# Lines of a schedule by a word; {n} is the place of one in it, and {o} that of the one it ends.
LINES = {
    'work': '%at.{n} = f32[8]{0} fusion(%x), kind=kLoop, calls=%work',
    'gather': '%at.{n} = f32[32]{0} all-gather(%x), replica_groups={{0,1,2,3}}',
    'start': '%at.{n} = (f32[8]{0}, f32[32]{0}) all-gather-start(%x)',
    'done': '%at.{n} = f32[32]{0} all-gather-done(%at.{o})',
    'async': '%at.{n} = ((f32[8]{0}), f32[32]{0}) async-start(%x), calls=%sent',
    'ended': '%at.{n} = f32[32]{0} async-done(%at.{o})',
    'reserve': '%at.{n} = ((), (), s32[9]{0}) custom-call-start(), SPARSE={%sent}',
    'update': '%at.{n} = ((f32[8]{0}), f32[32]{0}) custom-call-update(%at.{o}, %x)',
    'called': '%at.{n} = f32[32]{0} custom-call-done(%at.{o})',
    'first': '%at.{n} = f32[32]{0} fusion(%x), kind=kCustom, calls=%first',
    'second': '%at.{n} = f32[32]{0} fusion(%x), kind=kOutput, calls=%second',
    'third': '%at.{n} = f32[32]{0} fusion(%x), kind=kCustom, calls=%third',
    'recv': '%at.{n} = (f32[8]{0}, u32[], token[]) recv(%x), MEGASCALE="ALL_REDUCE"',
    'received': '%at.{n} = (f32[8]{0}, token[]) recv-done(%at.{o})',
    'loop': '%at.{n} = (s32[], f32[8]{0}) while(%a), condition=%condition, body=%body',
}
SPARSE = 'async_execution_thread="sparsecore", called_computations'


def waits(main, body=''):
    """Seconds by kind of the schedules in words, as "start work done-0"."""

    def text(words):
        found = []
        for n, word in enumerate(words.split()):
            name, _, other = word.partition('-')
            found.append(LINES[name].replace('{n}', str(n)).replace('{o}', other))
        return '\n'.join(f'  {line}' for line in found)

    program = PROGRAM.replace('BODY', text(body)).replace('MAIN', text(main))
    program = program.replace('SPARSE', SPARSE).replace('MEGASCALE', '_xla_megascale_transfer_type')

    def operation(computation, one):
        return WORK if one.opcode == 'fusion' and one.callee in ('work', 'second') else 0

    def link(sent):
        return NETWORK if sent.kind.endswith('slices') else GATHER

    return dict(waiting_seconds(Module(program), operation, link))


@pytest.mark.parametrize(
    'main, left',
    [
        ('gather work', 5),  # nothing runs beside it
        ('start work work done-0 work', 1),
        ('start work work work done-0', 0),
        ('work start done-1 work', 5),
        ('start start work work work done-0 done-1', 4),  # on the same links: until 10
        ('start gather work done-0', 10),
        ('async work work ended-0', 1),
        # What a SparseCore sends comes with the update; before it there is nothing to send.
        ('reserve work update-0 work called-2', 3),
        # A fused one runs from its first fusion to its last, beside what they compute.
        ('first second work third work', 1),
        ('first third work', 5),
    ],
)
def test_what_is_left_of_a_collective_is_waited_for(main, left):
    """Catches one that hides behind what runs before its start or after its end, two that have the
    links at once, and one on SparseCores that begins with the reservation of memory.
    """
    assert sum(waits(main).values()) == left


def test_the_network_is_other_links_than_those_of_a_slice():
    """Work of 4 seconds stands beside both, which would take 8 one after the other."""
    found = waits('start recv work work received-1 done-0')
    assert found == {'all-gather': 1}


def test_a_loop_waits_in_each_of_its_rounds_and_hides_what_runs_beside_it():
    """Beside a loop of 7 x 2 seconds 5 are hidden. Where its own gathers, 7 x 5, are all that
    it does, the links are free for another only when it is over; with work, 7 x 2 seconds before.
    """
    assert waits('loop', 'start work done-0') == {'all-gather': 7 * 3}
    assert waits('start loop done-0', 'work') == {}
    assert waits('start loop done-0', 'gather') == {'all-gather': 7 * 5 + 5}
    assert waits('start loop done-0', 'gather work') == {'all-gather': 7 * 5}


@functools.cache
def gathers():
    """Compiles five small programs, once; what they wait for, by kind of TPU."""
    pytest.importorskip(COMPILERS['tpu'])
    found = printed_by('tests.tpu.compile_gathers', seconds=900)
    return {one.pop('kind'): one for one in found}


@pytest.mark.full
@pytest.mark.xdist_group('gathers')
@pytest.mark.parametrize('kind', ['v4', 'v5e', 'v5p', 'v6e', 'tpu7x'])
def test_what_the_compiler_hides_of_the_gathers_of_a_small_model(kind):
    """All are waited for on v4 and v5p; on v5e most run inside other operations, on v6e and TPU7x
    all on SparseCores. Catches one form of them that is read as another, and a step that is
    compiled without the options for it.
    """
    found = gathers()[kind]
    of_layers = 4 * 6 * 2  # six matrices, forward and backward
    assert found['alone'] + found['beside'] == 2 + of_layers
    if kind in ('v4', 'v5p'):
        assert found['beside'] == 0 and found['waits'] == pytest.approx(found['links'])
    else:
        assert found['alone'] <= (10 if kind == 'v5e' else 0)
        assert found['waits'] < 0.8 * found['links']
