"""Spikes of a run: steps with a loss or gradient norm far above those of the steps before."""

import math
from collections import deque
from typing import Any

import numpy as np

from lm.config.fields import TrainConfig
from lm.training.state import WATCHED
from modules.recent import MIN_DEVIATION


class SpikeCounter:
    """Counts the spikes of a run from the metrics of every step.

    A spike is a step with a loss or a gradient norm more than train.spike_sigmas standard
    deviations above the mean of the last train.spike_window steps, itself excluded. Both are of the
    whole batch; the loss is the objective, and the norm is taken before clipping. Steps whose loss
    or norm is not finite are neither judged nor part of the window; spikes are part of it. A step
    is judged if the window has at least train.spike_from steps. `train.log_every` has no effect:
    the metrics of every step reach the host, whether or not they become a row.

    Args:
      train: the section with the limits.
      counts: the counts so far, from `counts`; empty at the start.
    """

    def __init__(self, train: TrainConfig, counts: dict[str, Any] | None = None):
        counts = counts or {}
        self._train = train
        self.n_judged = counts.get('judged', 0)
        self.n_spikes = counts.get('spikes', 0)
        self.n_skipped = counts.get('skipped', 0)
        self._recent = {
            name: deque(counts.get(name, ()), maxlen=train.spike_window) for name in WATCHED
        }

    @property
    def counts(self) -> dict[str, Any]:
        """The numbers of this counter, as JSON can hold them exactly."""
        numbers = {'judged': self.n_judged, 'spikes': self.n_spikes, 'skipped': self.n_skipped}
        return numbers | {name: list(values) for name, values in self._recent.items()}

    @property
    def score(self) -> dict[str, float]:
        """The share of spikes among the judged steps, by its name in records; {} if there are no
        such steps yet.
        """
        return {'spike_score': self.n_spikes / self.n_judged} if self.n_judged else {}

    def observe(self, row: dict[str, float]) -> str:
        """Adds the metrics of a step. Returns a description of its spike, '' if it is none.

        row: of the step. If it has `spiked`, the devices have decided.
        """
        self.n_skipped += bool(row.get('skipped'))
        if not all(math.isfinite(row[name]) for name in WATCHED):
            return ''
        recent = self._recent
        is_judged = len(recent[WATCHED[0]]) >= self._train.spike_from
        parts = [self._describe(name, row[name]) for name in WATCHED] if is_judged else []
        text = '; '.join(part for part, is_spike in parts if is_spike)
        if is_judged and 'spiked' in row:
            # A number at the limit may round to its other side there.
            text = (text or '; '.join(part for part, _ in parts)) if row['spiked'] else ''
        self.n_judged += is_judged
        self.n_spikes += bool(text)
        for name in WATCHED:
            recent[name].append(row[name])
        return text

    def _describe(self, name: str, value: float) -> tuple[str, bool]:
        """Returns a description of a value, and whether it is a spike."""
        values = np.array(self._recent[name])
        mean, deviation = values.mean(), max(values.std(), MIN_DEVIATION)
        sigmas = (value - mean) / deviation
        text = (
            f'{name} {value:.4g} is {sigmas:.3g} standard deviations above the mean {mean:.4g} of '
            f'the last {len(values)} steps'
        )
        return text, bool(sigmas > self._train.spike_sigmas)
