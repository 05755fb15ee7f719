"""Which changes of the residual stream lower the loss, at two depths and equal parameters?

Question: with a tuned learning rate and as many parameters (wider MLPs), what do scalars of x0,
          value residuals, value embeddings, attention residuals and mHC gain over a plain stream,
          and does the gain grow or fall from 2 to 4 blocks?
Command:  uv run train.py --config=configs/studies/streams.py:2 --workdir=runs/streams_2
          uv run train.py --config=configs/studies/streams.py:4 --workdir=runs/streams_4
Cost:     15 runs of 0.2 or 0.3 million parameters for each of eight or seven arms.
Result:   configs/studies/results/streams.md: value embeddings gain 0.1 nats at both depths, value
          residuals 0.04 at 4 blocks; attention residuals and mHC are worse.

Muon is the control: a change that is known to lower the loss. The broken twin, with
2 blocks, has the scalars of x0 at the values of a plain stream, untrained.
"""

from ml_collections import ConfigDict

from configs.studies import small
from configs.studies._variants import choose

ARMS = (  # the baseline first
    {'model.stream': 'plain'},
    {'model.stream': 'x0_scalars'},
    {'attention.value_residual': 'learned'},
    {'attention.value_embeddings': True},
    {'model.stream': 'attention_residual'},
    {'model.stream': 'mhc'},
    {'optim.name': 'muon', 'optim.lr': 2e-2, 'optim.others_lr': 5e-3},
    {
        'model.stream': 'x0_scalars',
        'model.residual_first': 1.0,
        'model.residual_last': 1.0,
        'model.x0_first': 0.0,
        'model.x0_last': 0.0,
        'optim.stream_lr_factor': 0.0,
    },
)


def get_config(depth: str = '2') -> ConfigDict:
    """depth: the number of blocks."""
    config = small.get_config()
    config.scaling.embedding_std = 1.0
    config.model.embedding_norm = 'rmsnorm'
    config.model.n_layers = choose(depth, {'2': 2, '4': 4})
    config.data.seq_len = 64
    config.data.batch_size = 4
    config.optim.lr = 5e-3
    config.optim.warmup_steps = 100
    config.train.steps = config.train.eval_every = 2000
    config.train.eval_batches = 64
    config.train.log_every = 50
    arms = ARMS if depth == '2' else ARMS[:-1]  # the broken twin once
    config.sweep = {'list': arms, 'protocol': 'equal_parameters'}
    config.tune = {'optim.lr': None, 'smallest_effect': 0.02, 'budget': 15}
    return config
