"""Traces the steps that train.profile names, and summarizes their time.

`WORKDIR/profile` gets the files of `jax.profiler`, for xprof and Perfetto, and summary.json. Runs
of a sweep that share a program are traced together, once, in the folder of the first run. Of
several processes, process 0 traces.
"""

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax

from lm.config.recipe import Recipe
from lm.config.traced_steps import parse_traced_steps
from lm.launch.distributed import is_first
from lm.record.machine import device_name
from lm.record.names import PROFILE, SUMMARY
from lm.run import trace
from lm.storage.files import first_line, write_json

FAILURES = OSError, RuntimeError, ValueError  # of the profiler, or of writing
PRINTED_OPERATIONS = 5  # in the terminal


class Tracer:
    """The trace of one program: begun and ended between steps, while nothing is in flight.

    A failing trace ends no run: its error is among the lines for a terminal. All processes make the
    same calls, as they have to wait for their devices at the same steps.
    """

    def __init__(self, recipe: Recipe):
        self._traced_steps = parse_traced_steps(recipe)
        self._steps_left = 0 if self._traced_steps is None else self._traced_steps.count
        self._folder: Path | None = None  # while steps are traced
        self._error: Exception | None = None

    @property
    def is_tracing(self) -> bool:
        return self._folder is not None

    @property
    def is_complete(self) -> bool:
        """Whether the last step of the trace has started."""
        return self.is_tracing and self._steps_left == 0

    def is_first_step(self, step: int) -> bool:
        """Returns whether the trace begins with this step."""
        return (
            self._traced_steps is not None
            and not self.is_tracing
            and step == self._traced_steps.first
        )

    def list_missed_notes(self, step: int, workdir: Path) -> list[str]:
        """Returns a note if a run resumes after the first step to trace and has no trace."""
        if (
            self._traced_steps is None
            or step < self._traced_steps.first
            or (workdir / PROFILE / SUMMARY).exists()
        ):
            return []
        return [
            f'NOTE: train.profile: step {self._traced_steps.first} is over, so no step is traced'
        ]

    def begin(self, workdir: Path) -> None:
        """Begins the trace, in place of an earlier one."""
        self._folder = workdir / PROFILE
        if not is_first():
            return
        options = jax.profiler.ProfileOptions()
        options.python_tracer_level = 0  # otherwise each Python call is an event
        try:
            shutil.rmtree(self._folder, ignore_errors=True)
            jax.profiler.start_trace(str(self._folder), profiler_options=options)
        except FAILURES as error:
            self._error = error

    def count_step(self) -> None:
        """Counts a step that was started."""
        self._steps_left -= self.is_tracing

    def end(self, program_text: Callable[[], str], runs: int) -> list[str]:
        """Ends the trace, writes its summary, and returns lines for a terminal.

        program_text: returns the HLO of the step, which maps operations to parts of the model.
        runs: number of runs that share the program.
        """
        folder = self._folder
        assert folder is not None  # set by `begin`
        self.abandon()
        if not is_first():
            return []
        try:
            if self._error is not None:
                raise self._error
            (file, *_) = sorted(folder.rglob('*.xplane.pb'))
            summary = trace.summarize(trace.read_trace(file), trace.parse_sources(program_text()))
            summary |= {'runs': runs, 'device': device_name()}
            write_json(folder / SUMMARY, summary)
        except FAILURES as error:
            return [f'NOTE: train.profile: {folder} has no summary ({first_line(error)})']
        return format_summary(summary, folder)

    def abandon(self) -> None:
        """Ends a trace without a summary, for instance after an error."""
        if self.is_tracing and is_first() and self._error is None:
            try:
                jax.profiler.stop_trace()
            except FAILURES as error:
                self._error = error
        # Traced once per program: later waves of the same program are not.
        self._folder = self._traced_steps = None


def format_summary(summary: dict[str, Any], folder: Path) -> list[str]:
    """Returns the main numbers of a summary, one line each."""
    steps = summary['steps']
    lines = [
        f'profile: steps {steps[0]["step"]} to {steps[-1]["step"]}, {summary["step_ms"]:.2f} ms '
        f'each; devices idle {summary["idle_share"]:.1%}, waiting for data '
        f'{summary["data_wait_share"]:.1%}; trace in {folder}'
    ]
    for op in summary['operations'][:PRINTED_OPERATIONS]:
        part = ', '.join(filter(None, (op['part'], op['pass'])))
        lines.append(f'  {op["share"]:6.1%}  {op["name"]}' + (f'  ({part})' if part else ''))
    return lines
