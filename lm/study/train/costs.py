"""Estimates the time of a tuned sweep, from its measured programs and the waves that have ended."""

from collections.abc import Container, Iterable, Sequence

from lm.study.plan.cells import Cell, program_key
from lm.study.train.throughput import ProgramCost, program_digest


class StudyCosts:
    """The time of the runs of a tuned sweep.

    A program's cost has steps, evaluations and compilation. Starting and saving runs takes time
    too. It is known only from the waves so far, whose measured time may exceed their estimate;
    later estimates are larger by the same factor.

    Args:
      cells: a cell of each arm.

    Attributes:
      by_program: the measured programs, by `program_digest`; {} if none was measured.
      factor: measured time over estimated time of the waves so far.
    """

    def __init__(self, cells: Sequence[Cell]):
        self.cells = cells
        self.by_program: dict[str, ProgramCost] = {}
        self.factor = 1.0
        self._estimated_sec = self._measured_sec = 0.0

    @property
    def run_sec(self) -> list[float | None]:
        """Returns the seconds of a run of each arm; None for an arm that was not measured."""
        times = [self._estimate_run_sec(cell) for cell in self.cells]
        return [None if sec is None else self.factor * sec for sec in times]

    def _estimate_run_sec(self, cell: Cell) -> float | None:
        cost = self.by_program.get(program_digest(cell))
        return None if cost is None else cost.estimate_run_sec(cell.recipe)

    def estimate_compile_sec(
        self, cells: Iterable[Cell], compiled: Container[tuple] = ()
    ) -> float | None:
        """Returns the seconds of compiling the programs of cells; None if not all were measured.

        Args:
          cells: the cells.
          compiled: programs that are compiled already, by `program_key`.
        """
        digests = {program_digest(cell) for cell in cells if program_key(cell) not in compiled}
        costs = [self.by_program.get(digest) for digest in digests]
        times = [cost.compile_sec for cost in costs if cost and cost.compile_sec is not None]
        return sum(times) if len(times) == len(costs) else None

    def record_wave(
        self, shares: Sequence[tuple[Cell, float]], compile_sec: float, sec: float
    ) -> None:
        """Records the time of a wave.

        If no program was measured, all programs count as equally fast from now on.

        Args:
          shares: the cells that the wave trained, and the share of its steps that each completed.
          compile_sec: estimated seconds of compilation in the wave.
          sec: seconds that the wave took.
        """
        steps = sum(cell.recipe.train.steps * share for cell, share in shares)
        if steps and not self.by_program:
            self.by_program = {
                program_digest(cell): ProgramCost(sec / steps) for cell in self.cells
            }
            return
        pairs = [(self._estimate_run_sec(cell), share) for cell, share in shares]
        times = [run_sec * share for run_sec, share in pairs if run_sec is not None]
        if not steps or len(times) < len(pairs):
            return
        self._estimated_sec += compile_sec + sum(times)
        self._measured_sec += sec
        self.factor = self._measured_sec / self._estimated_sec
