"""Which of several processes this one is: by flags, or by what a launcher has set. Standard library
only, as it is asked before JAX is imported.
"""

import dataclasses
import json
import os
import re
from collections.abc import Mapping, Sequence

from lm.launch.launchers import detected

FLAGS = ('coordinator', 'num_processes', 'process_id', 'watch_port', 'host_timeout')
HOST_TIMEOUT_SEC = 300.0  # hosts of one job start minutes apart: JAX itself waits as long
CHILD = 'EVENKEEL_HOST'  # what a parent tells its child
JOB = 'EVENKEEL_JOB'  # the same for all children of a job, and of no other
TELL = 'EVENKEEL_TELL'  # the descriptor by which a child tells it that it needs no other host


@dataclasses.dataclass(frozen=True)
class Host:
    """coordinator: HOST:PORT of process 0, where JAX's processes meet; watch_port: where their
    parents do. names: of all hosts, where the launcher lists them. local_devices: those that this
    process uses, where it shares a machine with others; None: all.
    """

    coordinator: str
    num_processes: int
    process_id: int
    watch_port: int
    timeout: float = HOST_TIMEOUT_SEC
    names: tuple[str, ...] = ()
    local_devices: tuple[int, ...] | None = None

    @property
    def watch_address(self) -> tuple[str, int]:
        return self.coordinator.rpartition(':')[0].strip('[]'), self.watch_port

    def name_of(self, process_id: int) -> str:
        """Such as 'host 1 (node002)', or 'host 1' where the launcher says no more."""
        known = len(self.names) == self.num_processes
        return f'host {process_id}' + (f' ({self.names[process_id]})' if known else '')


def child_host(env: Mapping[str, str] = os.environ) -> Host | None:
    """What the parent of this process has told it; None where there is none."""
    if CHILD not in env:
        return None
    record = json.loads(env[CHILD])
    return Host(**{k: tuple(v) if isinstance(v, list) else v for k, v in record.items()})


def this_host(argv: Sequence[str], env: Mapping[str, str] = os.environ) -> Host | None:
    """Which process this is; None where it is alone.

    Flags come before the environment, and --num_processes=1 is alone whatever that says. Raises
    ValueError for what cannot be.
    """
    given = flags_of(argv)
    if 'num_processes' in given and _number(given, 'num_processes') == 1:
        return None
    complete = {'coordinator', 'num_processes', 'process_id'} <= given.keys()
    found = None if complete else detected(env)
    if found is None and not complete:
        stray = sorted(given.keys() & {'coordinator', 'num_processes', 'process_id'})
        if stray:
            raise ValueError(
                f'--{stray[0]} is of a job of several processes, of which nothing is known here: '
                'give --coordinator=HOST:PORT, --num_processes=N and --process_id=I.'
            )
        return None
    count = _number(given, 'num_processes', found and found.num_processes)
    mine = _number(given, 'process_id', found and found.process_id)
    if count < 1:
        raise ValueError(f'--num_processes must be at least 1; got {count}.')
    if count == 1:
        return None
    if not 0 <= mine < count:
        raise ValueError(f'--process_id must be from 0 to {count - 1}; got {mine}.')
    coordinator = given.get('coordinator') or found.coordinator
    if not re.fullmatch(r'(\[[^\]]+\]|[^:\[\]]+):\d{1,5}', coordinator):
        raise ValueError(
            f'--coordinator=HOST:PORT must name process 0 and a free port of it; got '
            f'{coordinator!r}' + (f' in {found.launcher}.' if found and not given else '.')
        )
    port = int(coordinator.rpartition(':')[2])
    by_launcher = found.watch_port if found and 'coordinator' not in given else None
    watch_port = _number(given, 'watch_port', by_launcher or port + 1)
    if not (0 < port <= 65535 and 0 < watch_port <= 65535 and port != watch_port):
        raise ValueError(
            f'ports must be from 1 to 65535, and two: got {port} of --coordinator and '
            f'{watch_port} of --watch_port, which is the one after it unless it is given.'
        )
    return Host(
        coordinator=coordinator,
        num_processes=count,
        process_id=mine,
        watch_port=watch_port,
        timeout=_number(given, 'host_timeout', HOST_TIMEOUT_SEC, float),
        names=found.names if found else (),
        local_devices=found.local_devices if found else None,
    )


def flags_of(argv: Sequence[str]) -> dict[str, str]:
    """Those of FLAGS that are given, as --name=value or --name value, with one dash or two."""
    return _taken(argv)[0]


def shared_arguments(argv: Sequence[str]) -> list[str]:
    """Without FLAGS: what the command must have the same on every host."""
    return _taken(argv)[1]


def _taken(argv: Sequence[str]) -> tuple[dict[str, str], list[str]]:
    found, others, rest = {}, [], list(argv)
    while rest:
        argument = rest.pop(0)
        match = re.fullmatch(rf'--?({"|".join(FLAGS)})(?:=(.*))?', argument, re.DOTALL)
        if argument == '--':
            others += [argument, *rest]
            break
        if match is None:
            others.append(argument)
        elif match[2] is not None:
            found[match[1]] = match[2]
        elif rest:
            found[match[1]] = rest.pop(0)
        else:
            raise ValueError(f'{argument} needs a value')
    return found, others


def _number(
    given: Mapping[str, str], name: str, default: float | None = None, kind: type = int
) -> float:
    if name not in given:
        return default
    try:
        return kind(given[name])
    except ValueError:
        raise ValueError(f'--{name} must be a number; got {given[name]!r}') from None
