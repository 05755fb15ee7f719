"""The time that a run still needs: its steps, and the work between steps."""

from lm.config.checkpoint_steps import list_checkpoint_steps
from lm.config.recipe import Recipe
from lm.config.stages import count_tokens, find_stage
from lm.record.time_use import DIAGNOSIS, EVALUATION, SAVING, Seconds

TEXTS, SUITES = 'texts', 'suites'


def count_due(interval: int, step: int, steps: int) -> int:
    """Returns how often work of an interval is due after `step`; the last step counts in any case.

    Args:
      interval: steps from one time to the next; 0: only at the last step.
      step: the present step.
      steps: the steps of the run.
    """
    if step >= steps:
        return 0
    return ((steps - 1) // interval - step // interval if interval else 0) + 1


class RemainingTime:
    """Estimates the seconds until a run ends.

    Evaluation, diagnosis and saving count with the time that they took last. Their first time does
    not count, because it includes compilation. A step of another stage of the run counts in
    proportion to its tokens.

    `total_sec` are the seconds of evaluation, diagnosis and saving by this process so far.
    """

    def __init__(self, recipe: Recipe):
        train = recipe.train
        self.steps, self._stages = train.steps, recipe.stages
        self.intervals = {EVALUATION: train.eval_every, SAVING: train.checkpoint_every}
        if train.diagnose_every:
            self.intervals[DIAGNOSIS] = train.diagnose_every
        if recipe.texts:
            self.intervals[TEXTS] = recipe.texts_every
        if recipe.eval.suites is not None:
            self.intervals[SUITES] = recipe.suites_every
        interval = train.checkpoint_every
        self._further_saves = [
            step
            for step in list_checkpoint_steps(recipe) - {0, self.steps}
            if not interval or step % interval
        ]
        self._last_sec: dict[str, float | None] = {}
        self.total_sec = Seconds(float)

    def record(self, work: str, sec: float) -> None:
        """Records that evaluation, diagnosis or saving took `sec` seconds."""
        self.total_sec[work] += sec
        self._last_sec[work] = sec if work in self._last_sec else None

    def estimate(self, step: int, step_sec: float) -> float:
        """Returns the seconds after `step`, at `step_sec` seconds per step.

        Work that is due at `step` is still to come.
        """
        work_sec = sum(
            count_due(interval, step - 1, self.steps) * (self._last_sec.get(work) or 0.0)
            for work, interval in self.intervals.items()
        )
        n_further = sum(at >= step for at in self._further_saves)
        work_sec += n_further * (self._last_sec.get(SAVING) or 0.0)
        return self._steps_left(step) * step_sec + work_sec

    def _steps_left(self, step: int) -> float:
        """Returns the steps after `step`, as steps with the tokens of this one."""
        if len(self._stages) < 2:
            return self.steps - step
        tokens = self._stages[-1].stop_tokens - count_tokens(self._stages, step)
        return tokens / self._stages[find_stage(self._stages, max(step - 1, 0))].shape.tokens
