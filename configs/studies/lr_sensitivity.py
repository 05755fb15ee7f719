"""What makes a model tolerate a wrong learning rate, and does it hold as models grow?

Question: over three decades of learning rates and at two widths, how do normalized queries and
          keys, a z-loss, warm-up and three muP variants change the learning rate sensitivity, which
          is the mean over rates of the loss minus the best loss? The protocol is that of
          arXiv:2309.14322, scaled down.
Command:  uv run train.py --config=configs/studies/lr_sensitivity.py --workdir=runs/lr_sensitivity
          uv run python -m eval.report --workdir=runs/lr_sensitivity --figures=figures
Cost:     336 runs of two blocks in sixteen programs, twenty minutes on two CPU cores.
Result:   qk-norm tolerates large rates; muP variants keep the best rate, not the sensitivity:
          configs/studies/results/lr_sensitivity.md

As in the paper, decay is independent of the learning rate, and the muP variants are compared with a
baseline that has normalized queries and keys and the z-loss. A diverged run counts with its initial
loss.
"""

from ml_collections import ConfigDict

from configs.studies import small
from configs.studies.mup_transfer import at_width

WIDTHS = (32, 128)
LEARNING_RATES = tuple(10.0 ** (power / 2) for power in range(-6, 1))
STABILISERS = {'model.qk_norm': 'rmsnorm', 'loss.z_loss': 1e-4}
VARIANTS = (
    STABILISERS,
    {'model.qk_norm': 'none', 'loss.z_loss': 0.0},
    {'model.qk_norm': 'rmsnorm', 'loss.z_loss': 0.0},
    {'model.qk_norm': 'none', 'loss.z_loss': 1e-4},
    STABILISERS | {'optim.warmup_steps': 2},
    *(
        STABILISERS | {'scaling.name': name, 'scaling.base_width': WIDTHS[0]}
        for name in ('mup_simple', 'mup_intermediate', 'mup_full')
    ),
)


def get_config() -> ConfigDict:
    config = small.get_config()
    config.model.n_layers = 2
    config.data.seq_len = 64
    config.optim.decay_rule = 'independent'
    config.optim.weight_decay = 1e-4
    config.train.steps = 150
    config.train.eval_every = 150
    config.sweep = {
        'list': tuple(at_width(width) | variant for width in WIDTHS for variant in VARIANTS),
        'optim.lr': LEARNING_RATES,
        'train.seed': (0, 1, 2),
    }
    return config
