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


def get_config(which: str = 'optimizers') -> ConfigDict:
    """which: 'optimizers' with embeddings of deviation 1; 'small_start' with 1/8 and without the
    twins; 'positions', or 'positions_800' with 800 steps; 'sinusoidal' with 800 steps.
    """
    config = small.get_config()
    config.scaling.embedding_std = 1.0
    config.sweep = {'list': OPTIMIZERS + TWINS}
    config.tune = {'optim.lr': None, 'smallest_effect': 0.02, 'budget': 15}
    if which == 'small_start':
        config.scaling.embedding_std = 1 / 8
        config.sweep = {'list': OPTIMIZERS}
    if which in ('positions', 'positions_800', 'sinusoidal'):
        config.scaling.embedding_std = 1.0 if which == 'sinusoidal' else 0.02
        config.sweep = {'list': SINUSOIDAL if which == 'sinusoidal' else POSITIONS}
        config.tune = {'optim.lr': 1e-2, 'smallest_effect': 0.02, 'budget': 15}
    if which in ('positions_800', 'sinusoidal'):
        # At 200 steps a model without positions is as good as one with RoPE.
        config.train.steps = config.train.eval_every = 800
        config.optim.warmup_steps = 80
        config.tune = {**config.tune, 'budget': 20 if which == 'positions_800' else 15}
    return config
