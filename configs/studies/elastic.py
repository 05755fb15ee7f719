"""Is a model trained with several widths of its weights as good at each as one trained for it?

Question: a model whose weights have 2, 3, 4 or 8 bits, drawn at each product and update, can be
          rounded to any of them afterwards. What does each width cost, beside models trained for
          that width alone and a model trained in float32 (arXiv:2308.07650)?
Command:  uv run train.py --config=configs/studies/elastic.py --workdir=runs/elastic
          uv run python -m tests.bench.quantise --sweep=runs/elastic --methods=weights
          --bits=8,4,3,2 --arm=kernels.w_format --rows=256 --losses
Cost:     15 runs of 0.26 million parameters.
Result:   configs/studies/results/elastic.md: widths drawn at random cost 0.2 to 0.4 nats at three
          to eight bits, and at two bits less than rounding a model that was trained without.

The control is the model trained in float32, rounded to two bits, which must cost loss. The broken
twin is trained with eight bits alone, so that it must be as bad at two.
"""

from ml_collections import ConfigDict

from configs.studies import quantising

WIDTHS = ('int2|int3|int4|int8', 'int8', 'int4', 'int2')


def get_config() -> ConfigDict:
    config = quantising.get_config()
    rounded = {
        'kernels.matmul': 'simulated',
        'kernels.x_format': 'wide',
        'kernels.g_format': 'wide',
        'kernels.w_block': 'row',
    }
    arms = [{'kernels.matmul': 'auto'}, *({**rounded, 'kernels.w_format': w} for w in WIDTHS)]
    config.sweep = {'list': arms, 'train.seed': (0, 1, 2)}
    return config
