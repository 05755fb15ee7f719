"""Measures everything that needs a GPU or TPU, in slices: kernels, steps, sweeps, plans, peers.

    python -m tests.bench.accelerator --out=DIR [--minutes=9] [--tiny]
    python -m tests.bench.accelerator --out=DIR --table

Needs no network, and only JAX (with its plugin for the device), Flax, Optax, Orbax, NumPy and
ml_collections; PyTorch, Liger and tokamax are measured if installed. A call resumes where the last
one ended, and ends by itself within its minutes. Rows are measured in child processes, so that a
row that crashes, hangs or runs out of memory is recorded with its reason. DIR/rows.jsonl gets each
row as it is measured, DIR/log.txt all other output of the children. --table prints the rows for
RESULTS.md. --tiny, and any machine without a chip, rehearses all of it at sizes of a CPU.
"""

import argparse
import contextlib
import json
import os
import queue
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROW_SECONDS = 240  # that a row may take
MORE = 3  # exit status of a child that leaves rows to the next one
ONE_A_PROCESS = ('steps', 'decoders', 'profile')  # their peaks of memory, and traces, are their own
BESIDE_OTHERS = ('decoders', 'peers')  # other libraries need some of the memory
MACHINE = 'machine'
CHILD = [sys.executable, '-m', 'tests.bench.accelerator']


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split('\n\n')[0])
    parser.add_argument('--out', type=Path, required=True)
    parser.add_argument('--minutes', type=float, default=9)
    parser.add_argument('--tiny', action='store_true', help='rehearse on CPU, at tiny sizes')
    parser.add_argument('--table', action='store_true', help='print the rows as Markdown')
    parser.add_argument('--groups', help='comma-separated beginnings of names; default all')
    parser.add_argument('--child', help=argparse.SUPPRESS)
    flags = parser.parse_args()
    if flags.child:
        sys.exit(measure(flags.child, flags.tiny, set(json.load(sys.stdin))))
    if flags.table:
        print('\n'.join(table(Journal(flags.out).entries)))
        return
    flags.out.mkdir(parents=True, exist_ok=True)
    sys.exit(Command(flags.out, flags.minutes, flags.tiny, flags.groups).run())


class Journal:
    """DIR/rows.jsonl: a line for each call's machine, each row that began, and each that ended."""

    def __init__(self, folder: Path):
        self.path = folder / 'rows.jsonl'
        self.entries: list[dict[str, Any]] = []
        for line in self.path.read_text().splitlines() if self.path.exists() else ():
            with contextlib.suppress(ValueError):  # a line that was cut short
                self.entries.append(json.loads(line))

    def add(self, entry: dict[str, Any]) -> None:
        self.entries.append(entry)
        with self.path.open('a') as file:
            file.write(f'\n{json.dumps(entry)}' if file.tell() else json.dumps(entry))
            file.flush()
            os.fsync(file.fileno())

    def ended_rows(self) -> set[str]:
        """Returns 'group: row' of each row that has ended."""
        return {f'{e["group"]}: {e["row"]}' for e in self.entries if e.get('ended')}

    def stuck(self) -> set[tuple[str, str]]:
        """Returns (group, row) of each row that began in two calls, and ended in none."""
        begun = [(e['group'], e['row']) for e in self.entries if 'row' in e and not e['ended']]
        ended = self.ended_rows()
        return {row for row in begun if begun.count(row) > 1 and ': '.join(row) not in ended}


def say_error(text: str) -> int:
    print(f'error: {text}', file=sys.stderr)
    return 1


class Command:
    def __init__(self, folder: Path, minutes: float, tiny: bool, groups: str | None):
        self.journal, self.log = Journal(folder), folder / 'log.txt'
        self.tiny, self.deadline = tiny, time.monotonic() + 60 * minutes
        self.group_prefixes = tuple((groups or '').split(','))

    def run(self) -> int:
        """Returns 0 if all rows are measured, MORE if the time is over before."""
        for group, row in self.journal.stuck():
            self.record_failure(group, row, 'it began in two calls, and ended in none')
        description, *_ = [*self.child_entries(MACHINE)]
        if 'device' not in description:
            return say_error(f'no device: {description["reason"]}; {self.log} has more')
        other_devices = {e['device'] for e in self.journal.entries if 'device' in e} - {
            description['device']
        }
        if other_devices:
            return say_error(
                f'the rows of {self.journal.path} are of {", ".join(other_devices)}, and this is '
                f'{description["device"]}: give another --out'
            )
        groups = [group for group in description['groups'] if group.startswith(self.group_prefixes)]
        if not groups:
            return say_error(f'--groups begin as one of {"; ".join(description["groups"])}')
        self.journal.add(description)
        self.tiny = self.tiny or description['platform'] == 'cpu'
        for group in groups:
            if not self.measure(group):
                print(f'the time is over in {group!r}; the same command goes on')
                return MORE
        return 0

    def measure(self, group: str) -> bool:
        """Returns whether all rows of the group have ended, with as many children as needed."""
        while time.monotonic() < self.deadline:
            begun = None
            for line in self.child_entries(group):
                if 'row' not in line:
                    status, reason = line['status'], line['reason']
                    break
                self.journal.add({'group': group} | line)
                begun = None if line['ended'] else line['row']
                if line['ended']:
                    print(f'{group}: {line["row"]}: {cells(line)}', flush=True)
            if status in (0, MORE) and begun is None:
                if status == 0:
                    return True
            elif time.monotonic() >= self.deadline:
                return False
            else:
                self.record_failure(group, begun or 'start', reason)
                if begun is None:
                    return True
        return False

    def record_failure(self, group: str, row: str, reason: str) -> None:
        self.journal.add({'group': group, 'row': row, 'ended': True, 'failed': reason})
        print(f'{group}: {row}: {reason}', flush=True)

    def child_entries(self, group: str) -> Iterator[dict[str, Any]]:
        """Yields the entries that a child prints, each within ROW_SECONDS; at last its status."""
        command = [*CHILD, f'--child={group}', f'--out={self.log.parent}']
        command += ['--tiny'] if self.tiny else []
        lines: queue.Queue[str | None] = queue.Queue()
        with (
            self.log.open('ab') as log,
            subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                env=os.environ | self.environment(group),
                start_new_session=True,
            ) as child,
        ):

            def listen():
                for line in child.stdout:
                    lines.put(line)
                lines.put(None)

            threading.Thread(target=listen, daemon=True).start()
            with contextlib.suppress(BrokenPipeError):  # it says why it ended
                child.stdin.write(json.dumps(sorted(self.journal.ended_rows())))
                child.stdin.close()
            reason = ''
            try:
                remaining = self.deadline - time.monotonic()
                while line := lines.get(timeout=max(0, min(ROW_SECONDS, remaining))):
                    yield json.loads(line)
                    remaining = self.deadline - time.monotonic()
            except queue.Empty:
                reason = f'it took longer than {min(ROW_SECONDS, remaining):.0f} s'
            finally:
                if child.poll() is None and (reason or sys.exc_info()[0]):
                    os.killpg(child.pid, signal.SIGKILL)
        last = self.log.read_bytes()[-300:].decode(errors='replace').strip().splitlines() or ['']
        status = f'its process ended with status {child.returncode}: {last[-1]}'
        yield {'status': child.returncode, 'reason': reason or status}

    def environment(self, group: str) -> dict[str, str]:
        """Returns variables of a child. Some exact results come from the CPU: it is always a
        platform.
        """
        variables = {'XLA_PYTHON_CLIENT_MEM_FRACTION': '0.92'}
        if self.tiny:
            variables['JAX_PLATFORMS'] = 'cpu'
        elif platforms := os.environ.get('JAX_PLATFORMS'):
            variables['JAX_PLATFORMS'] = f'{platforms},cpu'
        if group in BESIDE_OTHERS:
            variables['XLA_PYTHON_CLIENT_PREALLOCATE'] = 'false'
        return variables


def measure(group: str, tiny: bool, ended: set[str]) -> int:
    """Measures the rows of a group that have not ended, in a child process.

    It reports them on its stdout, where nothing else is printed. Returns its exit status.
    """
    stdout = os.fdopen(os.dup(1), 'w')
    os.dup2(2, 1)

    def tell(entry: dict[str, Any]) -> None:
        print(json.dumps(entry), file=stdout, flush=True)

    if group == MACHINE:
        tell(machine())
        return 0
    import jax

    from tests.bench.accelerator_rows import list_rows

    for row in list_rows(group, tiny):
        if f'{group}: {row.name}' in ended:
            continue
        tell({'row': row.name, 'ended': False})
        start, broken = time.perf_counter(), False
        try:
            report = row.measure()
        except Exception as error:
            # After running out of memory the device may still hold some of it.
            broken = isinstance(error, jax.errors.JaxRuntimeError)
            report = {'failed': f'{type(error).__name__}: {" ".join(str(error).split())[:300]}'}
        seconds = round(time.perf_counter() - start, 1)
        tell({'row': row.name, 'ended': True, 'seconds': seconds} | report)
        if broken or group in ONE_A_PROCESS:
            return MORE
    return 0


def machine() -> dict[str, Any]:
    """Returns the device, its driver, versions, and the groups to measure."""
    from importlib import metadata

    import jax

    from lm.record.machine import device_name
    from tests.bench.accelerator_rows import GROUPS

    names = ('jax', 'jaxlib', 'libtpu', 'jax-cuda13-plugin', 'nvidia-cudnn-cu13', 'flax', 'optax')
    names += ('orbax-checkpoint', 'torch', 'triton', 'liger-kernel', 'tokamax')
    installed = {(d.metadata['Name'] or '').lower(): d.version for d in metadata.distributions()}
    device = jax.devices()[0]
    return {
        'device': device_name(),
        'platform': device.platform,
        'driver': driver() or ' '.join(device.client.platform_version.split()),
        'versions': {name: installed[name] for name in names if name in installed},
        'python': sys.version.split()[0],
        'begun': time.strftime('%Y-%m-%d %H:%M'),
        'groups': list(GROUPS),
    }


def driver() -> str:
    """Returns the NVIDIA driver's version; '' without a driver."""
    query = ['nvidia-smi', '--query-gpu=driver_version', '--format=csv,noheader']
    try:
        return subprocess.check_output(query, text=True, timeout=30).split()[0]
    except (OSError, subprocess.SubprocessError, IndexError):
        return ''


def table(entries: list[dict[str, Any]]) -> Iterator[str]:
    """Yields lines of Markdown: the machines, the rows of each group, and failures with reasons."""
    machines = {json.dumps(e | {'begun': ''}): e for e in entries if 'device' in e}
    for entry in machines.values():
        versions = ', '.join(f'{name} {version}' for name, version in entry['versions'].items())
        yield f'{entry["device"]}, driver {entry["driver"]}, Python {entry["python"]}, {versions}'
    rows = [entry for entry in entries if entry.get('ended')]
    for group in dict.fromkeys(row['group'] for row in rows):
        good = [row for row in rows if row['group'] == group and 'failed' not in row]
        columns = dict.fromkeys(key for row in good for key in row if key not in HIDDEN)
        yield from ('', f'### {group[0].upper()}{group[1:]}', '')
        if columns:
            yield f'| row | {" | ".join(columns)} |'
            yield '|---' * (1 + len(columns)) + '|'
        for row in good:
            values = ' | '.join(format_value(row.get(key, '')) for key in columns)
            yield f'| {row["row"]} | {values} |'
        for row in good:
            if top := row.get('top'):
                yield from ('', f'{row["row"]}:', '', '| operation | share | ms | calls |')
                yield '|---|---|---|---|'
                yield from (f'| {" | ".join(map(format_value, op.values()))} |' for op in top)
        failed: dict[str, list[str]] = {}
        for row in rows:
            if row['group'] == group and 'failed' in row:
                failed.setdefault(row['failed'], []).append(row['row'])
        if failed:
            yield from ('', 'Not measured:', '')
            yield from (f'- {reason}: {"; ".join(names)}' for reason, names in failed.items())


HIDDEN = ('group', 'row', 'ended', 'seconds', 'top')


def cells(row: dict[str, Any]) -> str:
    return ', '.join(
        f'{key} {format_value(value)}' for key, value in row.items() if key not in HIDDEN
    )


def format_value(value: Any) -> str:
    """Formats a number with its significant digits."""
    if isinstance(value, bool):
        return 'yes' if value else '**no**'
    if not isinstance(value, float):
        return str(value)
    if abs(value) >= 1000:
        return f'{value:,.0f}'
    return f'{value:.3g}'


if __name__ == '__main__':
    main()
