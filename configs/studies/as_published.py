"""Do verdicts change when methods run in the settings of their authors?

Question: does Schedule-Free AdamW (b1 = 0), SCALE (all parameters, momentum of the readout) or AuON
          reach the loss of AdamW or Muon, at embeddings of initial deviation 1 and 1/8? Is RoPE
          better than learned positions that start at 0.02, as the tokens do, or than sinusoidal
          ones beside tokens of deviation 1?
Command:  uv run train.py --config=configs/studies/as_published.py:optimizers --workdir=runs/unit
          uv run train.py --config=configs/studies/as_published.py:small_start --workdir=runs/small
          uv run train.py --config=configs/studies/as_published.py:positions --workdir=runs/start
          uv run train.py --config=configs/studies/as_published.py:positions_800 --workdir=runs/800
          uv run train.py --config=configs/studies/as_published.py:sinusoidal --workdir=runs/sines
Cost:     15 runs of 0.26 million parameters for each arm, of 800 steps in the last two.
Result:   Schedule-Free is better than AdamW at both starts; SCALE, AuON and Muon's lead depend on
          the start; RoPE is 0.31 nats better than sinusoidal positions after 800 steps, and learned
          ones are worse than none: configs/studies/results/as_published.md

The arms of configs/studies/optimizers_tuned.py and blocks_tuned.py that were not the published
methods are here as published, two with a broken twin. A single learning rate is
tuned for all parameters of AdamW, Schedule-Free and SCALE, as in their papers. Muon and AuON train
hidden matrices, and AdamW at 0.01 the rest.
"""

from ml_collections import ConfigDict

from configs.studies import small
from configs.studies._variants import choose

SCHEDULE_FREE = {
    'optim.average': 'schedule_free',
    'optim.b1': 0.0,
    'optim.schedule': 'constant',
}
SCALE = {  # no weight decay, no clipping, cosine to a tenth
    'optim.weight_decay': 0.0,
    'optim.clip_norm': float('inf'),
    'optim.final_lr_fraction': 0.1,
}
HIDDEN = {'optim.weight_decay': 0.01, 'optim.others': 'adamw', 'optim.others_lr': 1e-2}
OPTIMIZERS = (  # the baseline first
    {'optim.name': 'adamw', 'optim.lr': 1e-2},
    {'optim.name': 'adamw', 'optim.lr': 2e-2, **SCHEDULE_FREE},
    {'optim.name': 'scale', 'optim.others': 'scale', 'optim.lr': 4e-3, **SCALE},
    {'optim.name': 'muon', 'optim.lr': 4e-2, **HIDDEN},
    {'optim.name': 'auon', 'optim.lr': 1e-1, **HIDDEN},
)
TWINS = (
    # The weights of the mean and of the iterate are exchanged.
    {'optim.name': 'adamw', 'optim.lr': 2e-2, **SCHEDULE_FREE, 'optim.schedule_free_beta': 0.1},
    # Columns are not divided by their norms.
    {'optim.name': 'sgd', 'optim.others': 'sgd', 'optim.momentum': 0.0, 'optim.lr': 1.0, **SCALE},
)
POSITIONS = (
    {'model.position': 'rope'},
    {'model.position': 'learned'},
    {'model.position': 'none'},
)
SINUSOIDAL = (
    {'model.position': 'rope'},
    {'model.position': 'sinusoidal'},
    {'model.position': 'none'},
)


VARIANTS = {  # arms, initial deviation of the embeddings, steps, and runs per arm
    'optimizers': (OPTIMIZERS + TWINS, 1.0, 200, 15),
    'small_start': (OPTIMIZERS, 1 / 8, 200, 15),
    'positions': (POSITIONS, 0.02, 200, 15),
    # At 200 steps no difference between RoPE and no positions is decided.
    'positions_800': (POSITIONS, 0.02, 800, 20),
    'sinusoidal': (SINUSOIDAL, 1.0, 800, 15),
}


def get_config(which: str = 'optimizers') -> ConfigDict:
    """which: a key of VARIANTS."""
    config = small.get_config()
    arms, config.scaling.embedding_std, steps, budget = choose(which, VARIANTS)
    config.train.steps = config.train.eval_every = steps
    config.optim.warmup_steps = steps // 10
    config.sweep = {'list': arms}
    # Optimizers have rates of their own, and positions one.
    rate = 1e-2 if arms in (POSITIONS, SINUSOIDAL) else None
    config.tune = {'optim.lr': rate, 'smallest_effect': 0.02, 'budget': budget}
    return config
