"""Measurements on this machine for the protocols of a sweep: its text, devices and step times."""

import time

import jax

from lm.data import open_dataset
from lm.record.machine import device_name
from lm.record.remote.mirror import mirror_sweep_records
from lm.record.workdir import check_no_links
from lm.storage.files import read_json
from lm.study.plan.terms import Groups, Measurements
from lm.study.train.groups import Work
from lm.study.train.throughput import (
    FILE,
    ProgramCost,
    measure_throughput,
    program_digest,
    read_throughput,
)

# Host 0 compiles every program before it writes the first time, hence an hour.
POLL_SEC, PATIENCE_SEC = 0.5, 3600.0


def local_measurements(work: Work, engine: str, host: int) -> Measurements:
    """Returns the measurements of this machine.

    Args:
      work: the work of the sweep; timed programs stay compiled in it.
      engine: engine that trains the sweep; only this process is timed.
      host: number of this host; host 0 times the steps for all hosts.

    Returns:
      The measurements, which are made on demand.
    """
    rows: dict = {}

    def read_rows(recipe):
        if recipe.data not in rows:
            rows[recipe.data] = open_dataset(recipe.data, say=work.say).train
        return rows[recipe.data]

    def measure_seconds(programs: Groups) -> list[float]:
        check_device_kinds([device.device_kind for device in jax.devices()], engine)
        check_no_links(work.workdir)
        with mirror_sweep_records(work.url, work.say):  # a bucket lets one host in after the other
            _check_device(work)
            if host == 0 or work.url is not None:
                cost_by_program = measure_throughput(programs, work)
            else:
                cost_by_program = _await_throughput(programs, work)
            # Again, as host 0 may have written times of another device than this host's.
            _check_device(work)
        for group in programs:
            if program_digest(group[0]) not in cost_by_program:
                raise ValueError(
                    f'equal_time: the steps of sweep cell {group[0].changes} could not be timed, '
                    'for the reason printed above'
                )
        return [cost_by_program[program_digest(group[0])].step_sec for group in programs]

    return Measurements(jax.devices()[0].platform, read_rows, measure_seconds)


def check_device_kinds(kinds: list[str], engine: str) -> None:
    """Raises ValueError if times measured here do not apply to the devices that train."""
    if len({*kinds}) > 1:
        raise ValueError(
            f'equal_time needs devices of one kind, but there are {", ".join(sorted({*kinds}))}; '
            'make only one kind visible'
        )
    if engine != 'local':
        raise ValueError(
            f'equal_time times steps in this process, but --engine={engine} trains in others; use '
            '--engine=local, or equal_flops'
        )


def _check_device(work: Work) -> None:
    """Raises ValueError if the folder holds times of another device."""
    path, present = work.workdir / FILE, device_name()
    if path.exists() and (recorded := read_json(path).get('device')) != present:
        raise ValueError(
            f'equal_time: {path} has step times of {recorded}, but this is {present}, and times of '
            'different devices are not comparable. Resume where it began, or use another --workdir'
        )


def _await_throughput(programs: Groups, work: Work) -> dict[str, ProgramCost]:
    """Waits for the times of host 0."""
    deadline = time.monotonic() + PATIENCE_SEC
    while time.monotonic() < deadline:
        cost_by_program = read_throughput(work)
        if all(program_digest(group[0]) in cost_by_program for group in programs):
            return cost_by_program
        time.sleep(POLL_SEC)
    raise ValueError(f'equal_time: host 0 did not write step times to {work.workdir / FILE}')
