"""Rules of transfer (`modules.scaling.transfer`) against the tuned learning rates of a sweep."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

from lm.config.resolve import flatten
from lm.study.arm import Ablation
from modules.scaling.transfer import TRANSFERS, TunedSettings, transfer_settings

LR = 'optim.lr'
WITHIN, TOO_LOW, TOO_HIGH, UNTESTED = 'within', 'too low', 'too high', 'not tested'
SAME = 0.01  # relative difference up to which an arm has the setting of a rule


def compare_predictions(sweep: Mapping[str, Any], ablation: Ablation) -> list[dict[str, Any]]:
    """Returns a row for each rule and each arm that has another batch or another number of tokens.

    The first arm is the size that the settings were tuned for. A prediction is `within` if it lies
    in the range of rates that are not worse than the tuned one. A rule is `not tested` by an arm
    with another weight decay, b2 or eps than the rule has.

    Args:
      sweep: the record of the sweep.
      ablation: its arms; optim.lr must be the tuned field.

    Raises:
      ValueError: if the learning rate is not tuned alone, if the baseline has no tuned rate, or if
        no other arm has another size.
    """
    if list(ablation.tune.fields) != [LR]:
        raise ValueError(
            f'the sweep must tune {LR} alone; it tunes {", ".join(ablation.tune.fields)}'
        )
    base = flatten(sweep['base'])
    configs = [base | arm.changes for arm in ablation.arms]
    sizes = [(_batch_tokens(c), _batch_tokens(c) * c['train.steps']) for c in configs]
    if not ablation.values(0):
        raise ValueError(f'{ablation.arms[0].name}, the first arm, has no tuned rate yet')
    tuned = TunedSettings(
        ablation.values(0)[LR],
        *(configs[0][f'optim.{name}'] for name in ('weight_decay', 'b2', 'eps')),
    )
    rows = []
    for i, arm in enumerate(ablation.arms):
        if arm.length != 1 or sizes[i] == sizes[0] or not ablation.values(i):
            continue
        ratios = sizes[i][0] / sizes[0][0], sizes[i][1] / sizes[0][1]
        for name, transfer in TRANSFERS.items():
            if transfer.is_relative and configs[i].get('optim.match_norm') is None:
                continue
            predicted = transfer_settings(name, tuned, *ratios)
            settings = {name: vars(predicted)[name] for name in ('weight_decay', 'b2', 'eps')}
            differing = [
                f'{setting}={value:.3g}'
                for setting, value in settings.items()
                if value and abs(configs[i][f'optim.{setting}'] / value - 1) > SAME
            ]
            rows.append(_make_row(ablation, i, ratios, name, predicted.lr, differing))
    if not rows:
        raise ValueError(
            'no arm with a tuned rate has another data.batch_size, data.seq_len or train.steps '
            'than the first arm: there is nothing to predict'
        )
    return rows


def _make_row(
    ablation: Ablation,
    arm: int,
    ratios: tuple[float, float],
    rule: str,
    predicted: float,
    differing: Sequence[str],
) -> dict[str, Any]:
    """Returns the row of a rule and an arm.

    Args:
      ablation: the arms.
      arm: position of the arm.
      ratios: batch and tokens of the arm, over those of the first.
      rule: name of the rule.
      predicted: the rate that it predicts.
      differing: settings of the rule that the arm does not have.
    """
    near_best = ablation.near_best_values(arm)
    assert near_best is not None  # the caller has asked for the values
    tuned = ablation.values(arm)[LR]
    verdict = WITHIN
    if differing:
        verdict = f'{UNTESTED}: it has {", ".join(differing)}'
    elif predicted < near_best[0]:
        verdict = TOO_LOW
    elif predicted > near_best[1]:
        verdict = TOO_HIGH
    return {
        'arm': ablation.arms[arm].name,
        'batch': f'x {ratios[0]:g}',
        'tokens': f'x {ratios[1]:g}',
        'rule': rule,
        'predicted': predicted,
        'tuned': tuned,
        'as good': f'{near_best[0]:.3g} to {near_best[1]:.3g}',
        'octaves off': math.log2(predicted / tuned),
        'verdict': verdict,
    }


def summarise_predictions(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """Returns a line per rule: in how many of the tested arms its prediction is as good.

    rows: from `compare_predictions`.
    """
    lines = []
    for rule in dict.fromkeys(row['rule'] for row in rows):
        tested = [
            row
            for row in rows
            if row['rule'] == rule and not str(row['verdict']).startswith(UNTESTED)
        ]
        within = sum(row['verdict'] == WITHIN for row in tested)
        worst = max((abs(row['octaves off']) for row in tested), default=math.nan)
        lines.append(
            f'{rule}: {within} of {len(tested)} within the rates that are as good as the tuned one,'
            f' at most {worst:.2f} octaves off'
            if tested
            else f'{rule}: not tested, because no arm has its other settings'
        )
    return lines


def _batch_tokens(config: Mapping[str, Any]) -> int:
    """Returns the tokens of a batch. Raises ValueError if it changes during the run."""
    if config.get('train.stages') is not None:
        raise ValueError(
            f'rules are for batches of one size, but an arm has train.stages='
            f'{config["train.stages"]}'
        )
    return config['data.batch_size'] * config['data.seq_len']
