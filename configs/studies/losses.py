"""What do z-loss at high learning rates, label smoothing and comp-sum's tau change?

Question: without z-loss and weight decay log Z drifts at high learning rates and the loss suffers.
          Does a z-loss of 1e-4 prevent this, and is a larger weight better (arXiv:2309.14322,
          section 3.1.2)? losses.py:forms compares label smoothing and tau, which weights tokens by
          p^(tau - 1), with cross-entropy (arXiv:2304.07288 finds tau = 1 best on clean labels).
Command:  uv run train.py --config=configs/studies/losses.py --workdir=runs/z_loss
          uv run train.py --config=configs/studies/losses.py:forms --workdir=runs/losses
          uv run python -m eval.report --workdir=runs/z_loss --figures=figures
Cost:     36 and 54 runs of 200 steps, 0.26 million parameters each: three and seven minutes on
          two CPU cores.
Result:   no drift in such short runs; tau = 1 is better than larger and smaller values, smoothing
          of 0.1 costs 0.06 nats: configs/studies/results/losses.md

Models are compared on `ce`, which every loss records, and not on their objectives.
"""

from ml_collections import ConfigDict

from configs.studies import small
from configs.studies._variants import choose

FORMS = (
    {'loss.name': 'cross_entropy', 'loss.label_smoothing': 0.0},
    {'loss.name': 'cross_entropy', 'loss.label_smoothing': 0.01},
    {'loss.name': 'cross_entropy', 'loss.label_smoothing': 0.1},
    {'loss.name': 'comp_sum', 'loss.tau': 0.0},
    {'loss.name': 'comp_sum', 'loss.tau': 0.5},
    {'loss.name': 'comp_sum', 'loss.tau': 1.0},
    {'loss.name': 'comp_sum', 'loss.tau': 1.25},
    {'loss.name': 'comp_sum', 'loss.tau': 1.5},
    {'loss.name': 'comp_sum', 'loss.tau': 2.0},
)


def get_config(which: str = 'z_loss') -> ConfigDict:
    """which: 'z_loss', its weights at several learning rates, or 'forms' of the loss."""
    config = small.get_config()
    sweeps = {
        'z_loss': {
            'loss.z_loss': (0.0, 1e-4, 1e-2),
            'optim.lr': (1e-2, 3e-2, 1e-1, 3e-1),
        },
        'forms': {'list': FORMS, 'optim.lr': (3e-3, 1e-2)},
    }
    if which == 'z_loss':
        config.model.qk_norm = 'rmsnorm'  # so that attention does not fail first
        config.optim.weight_decay = 0.0
        config.train.diagnose_every = 20
    config.sweep = choose(which, sweeps) | {'train.seed': (0, 1, 2)}
    return config
