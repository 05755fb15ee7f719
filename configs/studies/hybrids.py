"""Does a gated delta net in three of four blocks lower the loss, at equal parameters?

Question: with a tuned learning rate and as many parameters (wider MLPs), is a model with a linear
          recurrence in three of four blocks as good as one with softmax attention in all, at 4 and
          at 8 blocks?
Command:  uv run train.py --config=configs/studies/hybrids.py:4 --workdir=runs/hybrids_4
          uv run train.py --config=configs/studies/hybrids.py:8 --workdir=runs/hybrids_8
Cost:     15 runs of 0.3 or 0.6 million parameters for each of three arms, at each depth.
Result:   configs/studies/results/hybrids.md: both hybrids are better at both depths.
"""

from ml_collections import ConfigDict

from configs.studies import small
from configs.studies._variants import choose

ARMS = (  # the baseline first
    {'model.pattern': 'softmax'},
    {'model.pattern': 'gated_delta:position=none*3+softmax'},
    {'model.pattern': 'gla:position=none*3+softmax'},
)


def get_config(depth: str = '4') -> ConfigDict:
    """depth: the number of blocks."""
    config = small.get_config()
    config.scaling.embedding_std = 1.0
    config.model.n_layers = choose(depth, {'4': 4, '8': 8})
    config.data.batch_size = 2
    config.optim.lr = 5e-3
    config.optim.warmup_steps = 100
    config.train.steps = config.train.eval_every = 2000
    config.train.eval_batches = 64
    config.train.log_every = 50
    config.sweep = {'list': ARMS, 'protocol': 'equal_parameters'}
    config.tune = {'optim.lr': None, 'smallest_effect': 0.02, 'budget': 15}
    return config
