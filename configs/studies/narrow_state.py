"""Does state in bfloat16 cost loss in training: moments, and weights rounded either way?

Question: with a tuned learning rate, is a model whose momentum, second moments or weights are
          stored in bfloat16 as good as one with float32 state, and does stochastic rounding of
          weights matter?
Command:  uv run train.py --config=configs/studies/narrow_state.py --workdir=runs/narrow_state
Cost:     15 runs of 0.2 million parameters for each of seven arms.
Result:   configs/studies/results/narrow_state.md: no cost of state in bfloat16 is seen; weights
          that are rounded to nearest cost 0.04 nats.

The broken twin is weights that are rounded to nearest. The control has activations and weights of
three values in its products, which must cost loss.
"""

from ml_collections import ConfigDict

from configs.studies import few_bits

WEIGHTS, SECOND = 'optim.weight_dtype', 'optim.second_moment_dtype'
ARMS = (  # the baseline first
    {WEIGHTS: 'float32'},
    {'optim.momentum_dtype': 'bfloat16'},
    {SECOND: 'bfloat16'},
    {WEIGHTS: 'bfloat16'},
    {WEIGHTS: 'bfloat16', 'optim.momentum_dtype': 'bfloat16', SECOND: 'bfloat16'},
    {WEIGHTS: 'bfloat16', 'optim.weight_rounding': 'nearest'},
    {'kernels.matmul': 'simulated', **few_bits.TERNARY},
)


def get_config() -> ConfigDict:
    config = few_bits.get_config()
    config.optim.b2 = 0.999  # where second moments move least in a step
    config.sweep = {'list': ARMS}
    return config
