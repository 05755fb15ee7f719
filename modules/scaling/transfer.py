"""Published rules that carry tuned settings to another batch size and another number of tokens.

A row of `TRANSFERS` maps the settings that were tuned for a batch `B_0` and `D_0` tokens to those
for `B` and `D`. Below, `r = B / B_0` and `t = D / D_0`. Each is a prediction: a sweep that tunes
the learning rate at several sizes tests it (`eval.rules --workdir`).
"""

import dataclasses
import math
from collections.abc import Callable

from modules.scaling.rules import Origin, check_positive


@dataclasses.dataclass(frozen=True)
class SettingFactors:
    """Factors of the settings of an optimizer.

    Attributes:
      lr: of the learning rate.
      weight_decay: of the weight decay.
      memory: of 1 - b2.
      eps: of eps.
    """

    lr: float = 1.0
    weight_decay: float = 1.0
    memory: float = 1.0
    eps: float = 1.0


@dataclasses.dataclass(frozen=True)
class TunedSettings:
    """Settings of an optimizer, by the names of their fields in the section optim."""

    lr: float
    weight_decay: float = 0.0
    b2: float | None = None
    eps: float | None = None

    def scale(self, factors: SettingFactors) -> 'TunedSettings':
        """Returns the settings times factors. What is not set stays so.

        Raises ValueError if b2 would be negative.
        """
        b2 = None if self.b2 is None else 1 - (1 - self.b2) * factors.memory
        if b2 is not None and b2 < 0:
            raise ValueError(
                f'b2={self.b2:g} would become {b2:g} at {factors.memory:g} times 1 - b2. Choose a '
                'larger b2 for the tuned batch, or a smaller ratio of the batches.'
            )
        return TunedSettings(
            self.lr * factors.lr,
            self.weight_decay * factors.weight_decay,
            b2,
            None if self.eps is None else self.eps * factors.eps,
        )


@dataclasses.dataclass(frozen=True)
class TransferRule:
    """A row of `TRANSFERS`.

    Attributes:
      factors: (r, t) -> factors of the settings.
      summary: the rule as equations.
      origin: its source.
      reads: the settings of the result that the rule sets, by name.
      is_relative: whether the rule is for relative updates alone (optim.match_norm).
    """

    factors: Callable[[float, float], SettingFactors]
    summary: str
    origin: Origin
    reads: tuple[str, ...]
    is_relative: bool = False


def square_root(r: float, t: float) -> SettingFactors:
    return SettingFactors(lr=math.sqrt(r))


def sde(r: float, t: float) -> SettingFactors:
    return SettingFactors(lr=math.sqrt(r), memory=r, eps=1 / math.sqrt(r))


def sdew(r: float, t: float) -> SettingFactors:
    root = math.sqrt(r)
    return SettingFactors(weight_decay=root, memory=root, eps=1 / root)


def timescale(r: float, t: float) -> SettingFactors:
    return SettingFactors(weight_decay=r / t)


def nanochat(r: float, t: float) -> SettingFactors:
    return SettingFactors(lr=math.sqrt(r), weight_decay=math.sqrt(r) / t)


def hyper_p(r: float, t: float) -> SettingFactors:
    return SettingFactors(lr=math.sqrt(r) * t**-0.32)


ARCHSCALE = 'github microsoft/ArchScale'
TRANSFERS = {
    'sqrt': TransferRule(
        square_root,
        'lr sqrt(r)',
        Origin('arXiv:2205.10287', f'the abstract, and {ARCHSCALE}, pretrain.py'),
        ('lr',),
    ),
    'sde': TransferRule(
        sde,
        'lr sqrt(r), (1 - b2) r, eps / sqrt(r)',
        Origin('arXiv:2205.10287', f'{ARCHSCALE}, pretrain.py, which keeps b1'),
        ('lr', 'b2', 'eps'),
    ),
    'sdew': TransferRule(
        sdew,
        'lr unchanged, (1 - b2) sqrt(r), eps / sqrt(r), weight_decay sqrt(r)',
        Origin('arXiv:2411.15958', f'{ARCHSCALE}, pretrain.py'),
        ('lr', 'b2', 'eps', 'weight_decay'),
    ),
    'timescale': TransferRule(
        timescale,
        'lr unchanged, weight_decay r / t: B / (lr weight_decay D) stays the same',
        Origin('arXiv:2405.13698', "the paper's abstract, for AdamW"),
        ('lr', 'weight_decay'),
    ),
    'nanochat': TransferRule(
        nanochat,
        'lr sqrt(r), weight_decay sqrt(r) / t',
        Origin('github karpathy/nanochat', 'its base_train.py'),
        ('lr', 'weight_decay'),
    ),
    'hyper_p': TransferRule(
        hyper_p,
        'lr sqrt(r) t^-0.32, for relative updates (scaling.name=hyper_p)',
        Origin('arXiv:2603.28743', f'{ARCHSCALE}, pretrain.py'),
        ('lr',),
        is_relative=True,
    ),
}


def transfer_settings(
    name: str, tuned: TunedSettings, batch_ratio: float, token_ratio: float = 1.0
) -> TunedSettings:
    """Applies a row of `TRANSFERS`.

    Args:
      name: of the row.
      tuned: settings that were tuned for another size.
      batch_ratio: tokens per batch, over those of the tuned size.
      token_ratio: training tokens, over those of the tuned size.

    Returns:
      The settings for this size.

    Raises:
      ValueError: for a ratio that is not positive, or a negative b2.
    """
    check_positive(batch_ratio=batch_ratio, token_ratio=token_ratio)
    return tuned.scale(TRANSFERS[name].factors(batch_ratio, token_ratio))
