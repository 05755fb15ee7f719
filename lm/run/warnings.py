"""Detects what goes wrong in a run from its recorded rows: one warning of a kind for each layer.

Thresholds without a source are our own reading of recorded runs.
"""

import collections
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np

from lm.config.recipe import Recipe
from lm.run.remedies import list_remedies

# A head's entropy over its maximum. arXiv:2303.06296 calls it collapsed near 0 and names no number;
# a head at 0.05 attends to 1.3 of 256 tokens.
COLLAPSED_ENTROPY = 0.05
FALL, FALL_STEPS = 0.5, 100  # a layer's mean that halves within so many steps collapses
LARGEST_LOGIT = 1e4  # runs beyond it diverge (arXiv:2309.14322)
JUMP = 5.0  # relative to the median of the last UPDATES; noise stays within 2
UPDATES, FEWEST_UPDATES = 20, 10
# bfloat16 tells logits apart by 2^-8 of their size, which at 32 is 0.125 nats: more than most
# methods differ by. log Z starts at about log V, 12 at most.
LOG_Z, LOG_Z_GROWTH = 32.0, 2.0
# A branch's share of the stream's rms: below the rounding of float32, adding it changes nothing.
DEAD_SHARE = 1e-6
GRADIENT_ERROR = 'rounding_error_g_'  # columns of metrics.jsonl begin with it
# Relative error of a rounded gradient. In configs/studies/formats.py, runs that train stay below
# 0.4, and runs that stall later exceed 0.8.
LOST_GRADIENT = 0.5
# Relative to the start. Streams grow tenfold to a hundredfold in healthy runs, and single
# coordinates to some thousandfold (arXiv:2601.22966 has 6,000 in a healthy run).
EXPLOSION_FACTORS = {'residual_rms': 1e3, 'residual_largest': 1e4}

WarningRecord = dict[str, Any]


class Symptom(NamedTuple):
    """Something that went wrong. layer, head: from 1; None if it concerns all of them."""

    kind: str
    text: str
    layer: int | None = None
    head: int | None = None


class Detector:
    """Detects symptoms in the rows of metrics.jsonl, in their order.

    A warning is {'kind', 'step', 'layer', 'head', 'seen', 'help'}: layer and head as in Symptom;
    seen as text; help as a list of [config line, source].

    Args:
      recipe: the config of the run.
      previous: the warnings so far.
    """

    def __init__(self, recipe: Recipe, previous: list[WarningRecord]):
        self._config = recipe
        self._reported = {(warning['kind'], warning['layer']) for warning in previous}
        self._first: dict[str, np.ndarray] = {}
        self._entropies: list[tuple[int, np.ndarray]] = []  # of layers, over FALL_STEPS
        self._updates: collections.deque[float] = collections.deque(maxlen=UPDATES)

    def detect(self, row: dict[str, Any]) -> list[WarningRecord]:
        """Returns the warnings that this row gives rise to."""
        warnings = []
        for symptom in self._find_symptoms(row['step'], _to_arrays(row)):
            if (symptom.kind, symptom.layer) not in self._reported:
                self._reported.add((symptom.kind, symptom.layer))
                location = {'layer': symptom.layer, 'head': symptom.head}
                text = {'seen': symptom.text, 'help': list_remedies(symptom.kind, self._config)}
                warnings.append({'kind': symptom.kind, 'step': row['step'], **location, **text})
        self.observe(row)
        return warnings

    def observe(self, row: dict[str, Any]) -> None:
        """Adds a row that was recorded before, without a warning."""
        step, values = row['step'], _to_arrays(row)
        for name, value in values.items():
            self._first.setdefault(name, value)
        if 'update_norm' in values:
            self._updates.append(float(values['update_norm']))
        if 'attention_entropy_share' in values:
            self._entropies.append((step, values['attention_entropy_share'].mean(-1)))
            while self._entropies[0][0] < step - FALL_STEPS:
                self._entropies.pop(0)

    def _find_symptoms(self, step: int, values: dict[str, np.ndarray]) -> Iterator[Symptom]:
        with np.errstate(invalid='ignore'):
            yield from self._find_entropy_collapse(step, values)
            yield from _find_large_logits(step, values)
            yield from self._find_update_jump(step, values)
            yield from self._find_log_z_drift(step, values)
            if step > 0:  # a branch may start at 0
                yield from _find_dead_layers(step, values)
            yield from self._find_explosion(step, values)
            yield from self._find_lost_gradients(step, values)

    def _find_entropy_collapse(self, step: int, values: dict[str, np.ndarray]) -> Iterator[Symptom]:
        if (share_LN := values.get('attention_entropy_share')) is None:
            return
        first_LN = self._first.get('attention_entropy_share', share_LN)
        recent = [pair for pair in self._entropies if pair[0] >= step - FALL_STEPS]
        for layer, (share_N, first_N) in enumerate(zip(share_LN, first_LN, strict=True), start=1):
            low_N = np.where(
                (share_N < COLLAPSED_ENTROPY) & ~(first_N < COLLAPSED_ENTROPY), share_N, np.inf
            )
            before, peak_step = max(
                ((past_L[layer - 1], past) for past, past_L in recent),
                key=lambda pair: np.nan_to_num(pair[0]),
                default=(np.nan, step),
            )
            if np.isfinite(low_N).any():
                head = int(low_N.argmin())
                text = (
                    f'the attention of layer {layer}, head {head + 1}, has {share_N[head]:.3g} of '
                    f'its maximum entropy at step {step}, below {COLLAPSED_ENTROPY:g}; it started '
                    f'at {first_N[head]:.3g}'
                )
            elif before >= COLLAPSED_ENTROPY and share_N.mean() < FALL * before:
                head = int(share_N.argmin())
                text = (
                    f'the mean attention entropy of layer {layer} fell from {before:.3g} of its '
                    f'maximum at step {peak_step} to {share_N.mean():.3g} at step {step}; '
                    f'head {head + 1} is lowest, at {share_N[head]:.3g}'
                )
            else:
                continue
            yield Symptom('entropy_collapse', text, layer, head + 1)

    def _find_update_jump(self, step: int, values: dict[str, np.ndarray]) -> Iterator[Symptom]:
        if 'update_norm' not in values or len(self._updates) < FEWEST_UPDATES:
            return
        median, norm = float(np.median(self._updates)), float(values['update_norm'])
        if norm > JUMP * median > 0:
            text = (
                f'the update norm jumped to {norm:.3g} at step {step}, {norm / median:.3g} times '
                f'the median of the last {len(self._updates)} recorded'
            )
            yield Symptom('update_jump', text)

    def _find_log_z_drift(self, step: int, values: dict[str, np.ndarray]) -> Iterator[Symptom]:
        log_z = float(values.get('log_z_mean', 0.0))
        first = float(self._first.get('log_z_mean', log_z))
        if abs(log_z) > LOG_Z and abs(log_z) > LOG_Z_GROWTH * abs(first):
            text = (
                f'the mean log Z of the readout has drifted from {first:.3g} to {log_z:.3g} at '
                f'step {step}, beyond the limit of {LOG_Z:g}'
            )
            yield Symptom('log_z_drift', text)

    def _find_explosion(self, step: int, values: dict[str, np.ndarray]) -> Iterator[Symptom]:
        for name, factor in EXPLOSION_FACTORS.items():
            if (value_L := values.get(name)) is None:
                continue
            first_L = self._first.get(name, value_L)
            for layer, (value, first) in enumerate(zip(value_L, first_L, strict=True), start=1):
                subject = f'the {name.replace("_", " ")} of layer {layer}'
                if not np.isfinite(value):
                    text = f'{subject} is not finite at step {step}'
                    yield Symptom('exploding_layer', text, layer)
                elif value > factor * first > 0:
                    text = f'{subject} grew from {first:.3g} to {value:.3g} at step {step}'
                    yield Symptom('exploding_layer', f'{text}, more than {factor:g} times', layer)

    def _find_lost_gradients(self, step: int, values: dict[str, np.ndarray]) -> Iterator[Symptom]:
        matmul = self._config.kernels.get('matmul')
        if matmul is None or matmul.options.get('g_rounding') == 'stochastic':
            return  # stochastic rounding keeps the expectation of a gradient over steps
        errors = {
            name.removeprefix(GRADIENT_ERROR): value_L
            for name, value_L in values.items()
            if name.startswith(GRADIENT_ERROR)
        }
        for layer, errors_N in enumerate(zip(*errors.values(), strict=True), start=1):
            index = int(np.nan_to_num(errors_N).argmax())
            if errors_N[index] > LOST_GRADIENT:
                text = (
                    f'rounding changes the gradient of the output of {[*errors][index]} in layer '
                    f'{layer} by {errors_N[index]:.3g} of its norm at step {step}, above '
                    f'{LOST_GRADIENT:g}'
                )
                yield Symptom('lost_gradient', text, layer)


def _find_large_logits(step: int, values: dict[str, np.ndarray]) -> Iterator[Symptom]:
    for layer, logit_N in enumerate(values.get('attention_largest_logit', ()), start=1):
        head = int(np.nan_to_num(logit_N, nan=-np.inf).argmax())
        if logit_N[head] > LARGEST_LOGIT:
            text = (
                f'the largest attention logit of layer {layer}, head {head + 1}, is '
                f'{logit_N[head]:.3g} at step {step}, above {LARGEST_LOGIT:g}'
            )
            yield Symptom('largest_logit', text, layer, head + 1)


def _find_dead_layers(step: int, values: dict[str, np.ndarray]) -> Iterator[Symptom]:
    for name in ('attention_output_rms', 'mlp_output_rms'):
        if name not in values or 'residual_rms' not in values:
            continue
        rms_L = zip(values[name], values['residual_rms'], strict=True)
        for layer, (branch, stream) in enumerate(rms_L, start=1):
            if branch < DEAD_SHARE * stream:
                text = (
                    f'the {name.replace("_", " ")} of layer {layer} is {branch:.3g} at step '
                    f'{step}, less than {DEAD_SHARE:g} of the residual stream, {stream:.3g}'
                )
                yield Symptom('dead_layer', text, layer)
    for layer, norm in enumerate(values.get('layer_grad_norm', ()), start=1):
        if norm == 0:
            yield Symptom('dead_layer', f'layer {layer} has no gradient at step {step}', layer)


def _to_arrays(row: dict[str, Any]) -> dict[str, np.ndarray]:
    """Returns the values as arrays, with nan for None."""
    return {
        name: np.array(value, float)
        for name, value in row.items()
        if name != 'step' and isinstance(value, int | float | list | None)
    }


def format_warning(warning: WarningRecord) -> str:
    """Returns the warning in one line, for a log."""
    lines = [f'{line} ({source})' for line, source in warning['help']]
    return f'{warning["seen"]}. {format_help(lines)}'


def format_help(lines: list[str]) -> str:
    return f'Known to help: {", ".join(lines)}' if lines else 'No config line is known to help'
