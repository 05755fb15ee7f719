"""Do products of few bits cost loss in training, at equal tokens?

Question: with a tuned learning rate, is a model that trains with the products of fp8_tensorwise,
          int8, nvfp4 or BitNet b1.58 as good as one with float32 products?
Command:  uv run train.py --config=configs/studies/few_bits.py --workdir=runs/few_bits
Cost:     15 runs of 0.2 million parameters for each of eight arms.
Result:   configs/studies/results/few_bits.md: nvfp4 costs 0.05 nats and BitNet 0.09; a cost of
          fp8_tensorwise and int8 is not shown.

The control has activations and weights of three values, which must cost loss. The broken twin is
BitNet without the scale of its weights, so that they round to 0.
"""

from ml_collections import ConfigDict

from configs.studies import small

TERNARY = {'kernels.x_format': 'int2', 'kernels.w_format': 'int2', 'kernels.g_format': 'wide'}
ARMS = (  # the baseline first
    {'kernels.matmul': 'auto'},
    {'kernels.matmul': 'fp8_tensorwise'},
    {'kernels.matmul': 'int8'},
    {'kernels.matmul': 'nvfp4'},
    {'kernels.matmul': 'bitnet'},
    {'kernels.matmul': 'bitnet', 'kernels.w_scale': 'median'},
    {'kernels.matmul': 'simulated', **TERNARY},
    {'kernels.matmul': 'bitnet', 'kernels.w_scale': 'none'},
)


def get_config() -> ConfigDict:
    config = small.get_config()
    config.scaling.embedding_std = 1.0
    config.model.n_layers = 2
    config.data.seq_len = 64
    config.data.batch_size = 4
    config.optim.lr = 5e-3
    config.optim.warmup_steps = 100
    config.train.steps = config.train.eval_every = 2000
    config.train.eval_batches = 64
    config.train.log_every = 50
    config.sweep = {'list': ARMS}
    config.tune = {'optim.lr': None, 'smallest_effect': 0.02, 'budget': 15}
    return config
