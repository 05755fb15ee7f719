"""Reads a trace of `jax.profiler`, without xprof, and summarizes the time of its steps.

Times of a trace are in nanoseconds. A step lasts from the arrival of the previous step's metrics in
this process until its own have arrived.
"""

import bisect
import collections
import dataclasses
import itertools
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax

from lm.model.pattern import BLOCK_NAME

# Names of the spans that `lm.run.wave` records.
STEP, DATA_WAIT, FETCH, ASIDE = 'step', 'data_wait', 'fetch', 'aside'
MAX_OPERATIONS = 30
MAX_PARTS = 20
# Operations that contain others, which may be on other lines; only the rest of the time is theirs.
CONTAINER_OPS = re.compile(r'(while|call|conditional)(\.\d+)?$')
INSTRUCTION = re.compile(r'^\s*(?:ROOT )?%?([\w.\-]+) = .*metadata=\{op_name="([^"]+)"', re.M)
# Scopes that JAX adds to the names of modules in an instruction's source.
JAX_SCOPES = {
    'while',
    'body',
    'cond',
    'eval_jaxpr',
    'closed_call',
    'checkpoint',
    'Transformer.forward',
}
JAX_SCOPES |= {'rematted_computation', 'Transformer.activations'}
FORWARD, BACKWARD, UPDATE = 'forward', 'backward', 'update'


class TracedSpan(NamedTuple):
    """An activity that took from `start` to `end`. step: of the run, if it belongs to a step."""

    name: str
    start: float
    end: float
    step: int = 0


class Op(NamedTuple):
    """An operation on a device. Operations of the same `line` follow or contain each other."""

    name: str
    line: str
    start: float
    end: float
    module: str = ''


@dataclasses.dataclass(frozen=True)
class Trace:
    """Operations by device, and the process's activities by name."""

    devices: Mapping[str, Sequence[Op]]
    spans: Mapping[str, Sequence[TracedSpan]]


class Sources(NamedTuple):
    """A compiled program: its name, and the source of each instruction in the code."""

    module: str
    source_names: Mapping[str, str]


def parse_sources(program_text: str) -> Sources:
    """Parses the text of a compiled program."""
    name = re.match(r'HloModule ([\w.\-]+)', program_text)
    return Sources(name[1] if name else '', dict(INSTRUCTION.findall(program_text)))


def read_trace(file: Path) -> Trace:
    """Reads an .xplane.pb file."""
    return extract_trace(jax.profiler.ProfileData.from_file(str(file)))


def extract_trace(profile: jax.profiler.ProfileData) -> Trace:
    """Extracts the operations of devices and our own spans from a profile.

    On a CPU, operations are on lines of the host's plane, one per thread, and are marked as such. A
    TPU's plane has a line 'XLA Ops', a GPU's a line for each stream.
    """
    devices, spans = collections.defaultdict(list), collections.defaultdict(list)
    for plane in profile.planes:
        if plane.name.startswith('/device:') and 'CUSTOM' not in plane.name:
            lines = list(plane.lines)
            op_lines = [line for line in lines if line.name == 'XLA Ops']
            for line in op_lines or [line for line in lines if line.name.startswith('Stream')]:
                devices[plane.name] += (op for _, op in _ops(line, all_events=True))
        elif plane.name.startswith('/host:'):
            for line in plane.lines:
                for device, op in _ops(line, all_events=False):
                    devices[f'{plane.name}:{device}'].append(op)
                for event in line.events:
                    if event.name in (STEP, DATA_WAIT, FETCH, ASIDE):
                        stats = dict(event.stats)
                        step = int(stats.get('step_num', stats.get('step', 0)))
                        spans[event.name].append(
                            TracedSpan(event.name, event.start_ns, event.end_ns, step)
                        )
    return Trace(devices, spans)


def _ops(line: Any, all_events: bool) -> Iterator[tuple[int, Op]]:
    """Yields (device ordinal, operation). all_events: also events that name no instruction."""
    for event in line.events:
        stats = dict(event.stats)
        if 'hlo_op' in stats or all_events:
            name = str(stats.get('hlo_op', event.name)).partition(' = ')[0].lstrip('%')
            module = str(stats.get('hlo_module', ''))
            op = Op(name, line.name, event.start_ns, event.end_ns, module)
            yield int(stats.get('device_ordinal', 0)), op


def summarize(trace: Trace, program_sources: Sources) -> dict[str, Any]:
    """Returns the time of the traced steps by operation and by part, in types of JSON.

    `steps` has for each step its wall time, the time that a device is busy (the mean over devices)
    and the time that the process waits for data, in ms. `operations` are sorted by self time, which
    excludes operations inside; it is summed over devices and threads, and the shares add up to 1.
    `parts` has the same by part of the model and pass. Anything between steps, such as an
    evaluation, is left out.

    Raises ValueError if there is no whole step.
    """
    steps = _find_steps(trace)
    if not steps or not trace.devices:
        raise ValueError('the trace contains no complete step, or no device operation')
    aside = merge_intervals((span.start, span.end) for span in trace.spans.get(ASIDE, ()))
    inside = {
        device: [
            op
            for op in ops
            if steps[0].start <= op.start < steps[-1].end
            and not overlap_time(aside, op.start, op.start + 1)
        ]
        for device, ops in trace.devices.items()
    }
    busy = {
        device: merge_intervals((op.start, op.end) for op in ops) for device, ops in inside.items()
    }
    waits = merge_intervals((span.start, span.end) for span in trace.spans.get(DATA_WAIT, ()))
    rows = [
        {
            'step': step.step,
            'wall_ms': (step.end - step.start - overlap_time(aside, step.start, step.end)) / 1e6,
            'busy_ms': _mean(
                overlap_time(device_intervals, step.start, step.end)
                for device_intervals in busy.values()
            )
            / 1e6,
            'data_wait_ms': overlap_time(waits, step.start, step.end) / 1e6,
        }
        for step in steps
    ]
    totals = {name: sum(row[name] for row in rows) for name in rows[0]}
    operations, parts = _build_tables(inside, program_sources)
    return {
        'devices': len(inside),
        'step_ms': totals['wall_ms'] / len(rows),
        'idle_share': max(0.0, 1 - totals['busy_ms'] / totals['wall_ms']),
        'data_wait_share': totals['data_wait_ms'] / totals['wall_ms'],
        'steps': rows,
        'operations': operations[:MAX_OPERATIONS],
        'operations_left_out': max(0, len(operations) - MAX_OPERATIONS),
        'parts': parts[:MAX_PARTS],
    }


def _find_steps(trace: Trace) -> list[TracedSpan]:
    """Returns the traced steps one after another, from the first one's start."""
    starts = {span.step: span.start for span in trace.spans.get(STEP, ())}
    fetched = [(span.end, span.step) for span in trace.spans.get(FETCH, ()) if span.step in starts]
    steps, start = [], min(starts.values(), default=0.0)
    for end, step in sorted(fetched):
        steps.append(TracedSpan(STEP, start, end, step))
        start = end
    return steps


def _build_tables(
    inside: Mapping[str, Sequence[Op]], program_sources: Sources
) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Returns the operations, and the parts of the model, by self time."""
    by_name: dict[tuple[str, str], list[float]] = {}
    for ops in inside.values():
        for op, self_time in zip(ops, self_times(ops), strict=True):
            row = by_name.setdefault((op.name, op.module), [0, 0.0, 0.0])
            row[0] += 1
            row[1] += op.end - op.start
            row[2] += self_time
    total_self_time = sum(self_time for *_, self_time in by_name.values()) or 1.0
    operations, by_part = [], collections.Counter()
    for (name, module), (count, total, self_time) in by_name.items():
        has_source = module in ('', program_sources.module) and name in program_sources.source_names
        part, direction = (
            parse_source(program_sources.source_names[name]) if has_source else ('', '')
        )
        by_part[part, direction] += self_time  # ty: ignore[invalid-assignment] - typed for integers
        operations.append(
            {
                'name': name,
                'part': part,
                'pass': direction,
                'count': count,
                'total_ms': total / 1e6,
                'self_ms': self_time / 1e6,
                'share': self_time / total_self_time,
            }
        )
    parts = [
        {
            'part': part,
            'pass': direction,
            'self_ms': self_time / 1e6,
            'share': self_time / total_self_time,
        }
        for (part, direction), self_time in by_part.most_common()
    ]
    return sorted(operations, key=lambda op: -op['self_ms']), parts


def self_times(ops: Sequence[Op]) -> list[float]:
    """Returns the time of each operation of a device, without the operations inside it.

    Operations of a line are nested or disjoint. Operations of a loop may be on other lines than the
    loop, such as the threads of a CPU.
    """
    times = [op.end - op.start for op in ops]
    # A stack of the open operations of a line: each takes its time from the one that contains it.
    order = sorted(range(len(ops)), key=lambda i: (ops[i].line, ops[i].start, -ops[i].end))
    open_: list[int] = []
    for i in order:
        while open_ and (ops[open_[-1]].line != ops[i].line or ops[open_[-1]].end <= ops[i].start):
            open_.pop()
        if open_:
            times[open_[-1]] -= ops[i].end - ops[i].start
        open_.append(i)
    # The stack does not see operations of a loop on other lines.
    by_start = sorted(ops, key=lambda op: op.start)
    starts = [op.start for op in by_start]
    for i, op in enumerate(ops):
        if CONTAINER_OPS.match(op.name):
            within = by_start[bisect.bisect_left(starts, op.start) : bisect.bisect(starts, op.end)]
            inner_intervals = merge_intervals(
                (o.start, o.end) for o in within if o is not op and o.end <= op.end
            )
            times[i] = op.end - op.start - overlap_time(inner_intervals, op.start, op.end)
    return [max(0.0, time) for time in times]


def parse_source(source: str) -> tuple[str, str]:
    """Returns (part of the model, pass) of an instruction's source.

    'jit(step)/transpose(jvp(Transformer.activations))/.../layers/mlp/dot_general' is ('mlp',
    'backward'). Instructions outside of modules belong to the loss if they are differentiated, else
    to the update of the weights.
    """
    path = source.split(';')[0].split('/')
    modules = [
        scope
        for scope in path[1:-1]
        if re.fullmatch(r'[A-Za-z_][\w.]*', scope) and scope not in JAX_SCOPES
    ]
    direction = FORWARD if modules or 'jvp(' in source else UPDATE
    direction = BACKWARD if 'transpose(' in source else direction
    if modules and modules[0].startswith('layers'):
        # Methods of a module, such as layers.place, are scopes too.
        parts = [s for s in modules[1:] if '.' not in s and not re.fullmatch(BLOCK_NAME, s)]
        return (parts[0] if parts else 'residual stream'), direction
    if modules:
        return modules[0].rpartition('.')[2], direction
    return ('update' if direction == UPDATE else 'readout and loss'), direction


Intervals = Sequence[tuple[float, float]]


def merge_intervals(intervals: Iterable[tuple[float, float]]) -> list[tuple[float, float]]:
    """Returns the union of intervals as disjoint intervals, in order."""
    union: list[tuple[float, float]] = []
    for start, end in sorted(intervals):
        if union and start <= union[-1][1]:
            union[-1] = union[-1][0], max(union[-1][1], end)
        else:
            union.append((start, end))
    return union


def overlap_time(intervals: Intervals, start: float, end: float) -> float:
    """Returns how much of [start, end] lies in intervals.

    Args:
      intervals: disjoint intervals in order, from `merge_intervals`.
      start: start of the range.
      end: end of the range.
    """
    first = max(0, bisect.bisect(intervals, (start, start)) - 1)
    total = 0.0
    for low, high in itertools.islice(intervals, first, None):
        if low >= end:
            break
        total += max(0.0, min(high, end) - max(low, start))
    return total


def _mean(values: Iterable[float]) -> float:
    numbers = list(values)
    return sum(numbers) / len(numbers)
