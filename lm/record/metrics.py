"""Where the numbers of a run go: metrics.jsonl and TensorBoard; and how fast it is."""

import json
import math
import time
from pathlib import Path
from typing import Any

from tensorboardX import SummaryWriter

from lm.record.workdir import write_text

FILE = 'metrics.jsonl'
TIME_FIELDS = ('tokens_per_sec', 'mfu', 'step_sec', 'data_wait_sec')  # differ from run to run


class Recorder:
    """Writes rows of a run that resumes after `step`: rows beyond it are dropped first, since the
    steps they tell of will be done again.
    """

    def __init__(self, workdir: Path, step: int):
        path = workdir / FILE
        kept = [row for row in read_rows(path) if row['step'] <= step]
        write_text(path, ''.join(json.dumps(row) + '\n' for row in kept))
        self._file = path.open('a')
        self._board = SummaryWriter(str(workdir / 'tensorboard'), purge_step=step + 1)

    def write(self, row: dict[str, Any]) -> None:
        finite = without_nan(row)
        self._file.write(json.dumps(finite) + '\n')
        self._file.flush()
        for name, value in finite.items():
            layers = value if isinstance(value, list) else [value]
            for layer, number in enumerate(layers):
                if name != 'step' and number is not None:
                    tag = f'{name}/layer_{layer}' if isinstance(value, list) else name
                    self._board.add_scalar(tag, number, row['step'])

    def close(self) -> None:
        self._file.close()
        self._board.close()


def without_nan(row: dict[str, Any]) -> dict[str, Any]:
    """None for numbers that are not finite, which JSON has no word for."""
    return {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in row.items()}


def read_rows(path: Path) -> list[dict[str, Any]]:
    """The rows of a metrics.jsonl, without a last line cut short; [] where there is no file."""
    if not path.exists():
        return []
    rows = []
    for line in path.read_text().splitlines():
        try:
            rows.append(json.loads(line))
        except json.JSONDecodeError:
            break
    return rows


class Throughput:
    """Rates since the last `read`, without the time between `pause` and `go_on`.

    `tokens` and `steps` are added to by the loop.
    """

    def __init__(self, flops_per_token: float, peak_flops: float):
        self._flops_per_token, self._peak_flops = flops_per_token, peak_flops
        self.total_seconds = self.total_tokens = self.total_waited = 0.0
        self.reset()

    def reset(self) -> None:
        self.tokens = self.waited = self.seconds = 0.0
        self.steps = 0
        self.go_on()

    def go_on(self) -> None:
        self._start = time.perf_counter()

    def pause(self) -> None:
        self.seconds += time.perf_counter() - self._start

    def wait(self, seconds: float) -> None:
        """Counts seconds that were spent waiting for data."""
        self.waited += seconds

    def read(self) -> dict[str, float]:
        """The row of `TIME_FIELDS`: tokens per second, model FLOP utilisation, and per step the
        seconds it took and those in which it waited for data.
        """
        self.pause()
        rate = self.tokens / self.seconds
        mfu = rate * self._flops_per_token / self._peak_flops
        values = (rate, mfu, self.seconds / self.steps, self.waited / self.steps)
        self.total_seconds += self.seconds
        self.total_tokens += self.tokens
        self.total_waited += self.waited
        self.reset()
        return dict(zip(TIME_FIELDS, values, strict=True))
