"""Do fewer bits of exponent or fewer bits of mantissa harm training first, and at which rates?

Question: of two formats without scales that have as many bits, one with fewer bits of exponent and
          one with fewer bits of mantissa than bfloat16, which loses more, and does the loss depend
          on the learning rate (arXiv:2405.18710)? Does the sharpness of the logits differ?
Command:  uv run train.py --config=configs/studies/formats.py --workdir=runs/formats
          uv run train.py --config=configs/studies/formats.py:errors --workdir=runs/errors
Cost:     160 runs of 0.2 million parameters, 1,000 steps each.
Result:   configs/studies/results/formats.md: four bits of mantissa cost nothing; with four bits of
          exponent training stalls at large rates.

Activations, weights and gradients have the same format, and are rounded to nearest. The control has
fewer bits of mantissa than the format that stalls, which must not help. The twin is that format
with a scale for each tensor, which must train if the range of exponents does the harm.
"""

from ml_collections import ConfigDict

from configs.studies import small
from configs.studies._variants import choose

#: bfloat16, then pairs of as many bits.
FORMATS = ('e8m7', 'e8m5', 'e6m7', 'e8m4', 'e5m7', 'e8m3', 'e4m7')
#: Without scales this must stall. With scales, the range of exponents does not matter.
CONTROL, TWIN = 'e4m3', 'e4m7'
UNSCALED = {f'kernels.{operand}_scale': 'none' for operand in 'xwg'}


#: Formats whose gradients are measured early, with the argument `errors`.
MEASURED = ('e8m7', 'e5m7', 'e5m2', 'e4m7', 'e4m3')


def round_all(name: str, options: dict) -> dict:
    """Returns the fields of products whose operands all have a format.

    Args:
      name: the format.
      options: other fields, such as those of their scales.
    """
    formats = {f'kernels.{operand}_format': name for operand in 'xwg'}
    return {'kernels.matmul': 'simulated', **options, **formats}


def get_config(part: str = 'losses') -> ConfigDict:
    """part: 'losses' in each format, or the 'errors' of its products."""
    config = small.get_config()
    config.scaling.embedding_std = 1.0
    config.model.n_layers = 2
    config.data.seq_len = 64
    config.data.batch_size = 4
    config.optim.warmup_steps = 50
    config.train.steps = config.train.eval_every = 1000
    config.train.eval_batches = 64
    config.train.diagnose_every = choose(part, {'losses': 50, 'errors': 25})
    if part == 'errors':
        arms = [round_all(name, UNSCALED) for name in MEASURED]
        config.sweep = {'list': arms, 'optim.lr': (5e-3, 1e-2)}
        return config
    arms = [{'kernels.matmul': 'auto'}, *(round_all(name, UNSCALED) for name in FORMATS)]
    config.sweep = {
        'list': [*arms, round_all(CONTROL, UNSCALED), round_all(TWIN, {})],
        'optim.lr': (2.5e-3, 5e-3, 1e-2, 2e-2, 4e-2),
        'train.seed': (0, 1, 2),
    }
    return config
