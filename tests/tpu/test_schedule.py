"""Reference: waits for collectives, by hand; and which collectives the compiler of each TPU
hides.
"""

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
# Lines of a schedule by a word; {n} is the line's position, {o} that of the line it ends.
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


def wait_seconds(main, body=''):
    """Seconds by kind for schedules in words, such as "start work done-0"."""

    def text(words):
        lines = []
        for n, word in enumerate(words.split()):
            name, _, started = word.partition('-')
            lines.append(LINES[name].replace('{n}', str(n)).replace('{o}', started))
        return '\n'.join(f'  {line}' for line in lines)

    program = PROGRAM.replace('BODY', text(body)).replace('MAIN', text(main))
    program = program.replace('SPARSE', SPARSE).replace('MEGASCALE', '_xla_megascale_transfer_type')

    def operation(computation, instruction):
        return (
            WORK
            if instruction.opcode == 'fusion' and instruction.callee in ('work', 'second')
            else 0
        )

    def link(collective):
        return NETWORK if collective.kind.endswith('slices') else GATHER

    return dict(waiting_seconds(Module(program), operation, link))


@pytest.mark.parametrize(
    'main, remainder',
    [
        ('gather work', 5),  # nothing runs beside it
        ('start work work done-0 work', 1),
        ('start work work work done-0', 0),
        ('work start done-1 work', 5),
        ('start start work work work done-0 done-1', 4),  # on the same links: until 10
        ('start gather work done-0', 10),
        ('async work work ended-0', 1),
        # A SparseCore gets its data with the update; before it there is nothing to send.
        ('reserve work update-0 work called-2', 3),
        # A fused collective runs from its first fusion to its last, beside their work.
        ('first second work third work', 1),
        ('first third work', 5),
    ],
)
def test_collective_remainder_is_waited_for(main, remainder):
    """Catches overlap with work before the start or after the end, two collectives that use the
    links at once, and a SparseCore collective that begins when its memory is reserved.
    """
    assert sum(wait_seconds(main).values()) == remainder


def test_network_and_slice_links_are_separate():
    """Work of 4 seconds runs beside both, which would take 8 in sequence."""
    waits = wait_seconds('start recv work work received-1 done-0')
    assert waits == {'all-gather': 1}


def test_loop_waits_each_round_and_hides_collectives():
    """Beside a loop of 7 x 2 seconds, 5 are hidden.

    If the loop only does its own gathers, 7 x 5, the links are free for another one when it is
    over; with work, 7 x 2 seconds earlier.
    """
    assert wait_seconds('loop', 'start work done-0') == {'all-gather': 7 * 3}
    assert wait_seconds('start loop done-0', 'work') == {}
    assert wait_seconds('start loop done-0', 'gather') == {'all-gather': 7 * 5 + 5}
    assert wait_seconds('start loop done-0', 'gather work') == {'all-gather': 7 * 5}


@functools.cache
def compile_gathers():
    """Compiles five small programs, once; their waits by kind of TPU."""
    pytest.importorskip(COMPILERS['tpu'])
    rows = printed_by('tests.tpu.compile_gathers', seconds=900)
    return {row.pop('kind'): row for row in rows}


@pytest.mark.full
@pytest.mark.xdist_group('gathers')
@pytest.mark.parametrize('kind', ['v4', 'v5e', 'v5p', 'v6e', 'tpu7x'])
def test_compiler_hides_gathers_by_kind(kind):
    """v4 and v5p wait for all gathers; v5e runs most inside other operations; v6e and TPU7x run all
    on SparseCores.

    Catches one form that is parsed as another, and a step compiled without the options for it.
    """
    counts = compile_gathers()[kind]
    n_layer_gathers = 4 * 6 * 2  # six matrices, forward and backward
    assert counts['alone'] + counts['beside'] == 2 + n_layer_gathers
    if kind in ('v4', 'v5p'):
        assert counts['beside'] == 0 and counts['waits'] == pytest.approx(counts['links'])
    else:
        assert counts['alone'] <= (10 if kind == 'v5e' else 0)
        assert counts['waits'] < 0.8 * counts['links']
