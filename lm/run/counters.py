"""What is known of a run besides its arrays."""

import dataclasses
from pathlib import Path
from typing import Any

from lm.record.checkpoints import LOSS
from lm.record.metrics import FILE, read_rows


@dataclasses.dataclass
class Counters:
    """What a checkpoint holds beside arrays. batch_index is the next batch of the stream; it runs
    ahead of the step only where a rollback left batches out. best holds the lowest validation
    losses, with their step. rows counts those of metrics.jsonl; None: an older version did not.
    warnings: those given so far (`lm.run.warnings`).
    """

    batch_index: int = 0
    tokens: float = 0.0
    wall_sec: float = 0.0
    skipped_in_a_row: int = 0
    events: list[dict[str, Any]] = dataclasses.field(default_factory=list)
    best: dict[str, float] = dataclasses.field(default_factory=dict)
    rows: int | None = None
    warnings: list[dict[str, Any]] = dataclasses.field(default_factory=list)


def newest_values(workdir: Path, step: int) -> dict[str, Any]:
    """Of everything that was recorded up to `step`, the newest; with `validated_step`."""
    newest: dict[str, Any] = {}
    for row in read_rows(workdir / FILE):
        if row['step'] <= step:
            row = {name: value for name, value in row.items() if not isinstance(value, list)}
            newest |= row | ({'validated_step': row['step']} if LOSS in row else {})
    newest.pop('step', None)
    return newest
