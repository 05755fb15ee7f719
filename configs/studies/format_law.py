"""How does the cost of few bits depend on exponent, mantissa, block and size of the model?

Question: does the increase of the loss follow the form `log2(B) / ((E + 0.5)^d (M + 0.5)^m)` over
          bits of exponent E, bits of mantissa M and values B that share a scale, and how does it
          change with the size of the model (arXiv:2501.02423)?
Command:  uv run train.py --config=configs/studies/format_law.py --workdir=runs/format_law
          uv run python -m tests.bench.format_law --sweep=runs/format_law
Cost:     78 runs of 0.05 to 0.5 million parameters, 1,000 steps each.
Result:   configs/studies/results/format_law.md: the form predicts unseen formats; the second bit
          of mantissa divides the cost by 4.6, and exponents of 2 to 4 bits cost nearly the same.

Activations, weights and gradients of all products in the blocks have the same format and blocks,
and are rounded to nearest. Formats are numbers of the program, so that there are 7 programs.
"""

from ml_collections import ConfigDict

from configs.studies import formats

FORMATS = tuple(f'e{exponent}m{mantissa}' for exponent in (2, 3, 4) for mantissa in (1, 2, 3))
#: (width, values that share a scale).
BLOCKS = ((32, 16), (64, 16), (64, 64), (128, 16))


def get_config() -> ConfigDict:
    config = formats.get_config()
    config.optim.lr = 5e-3
    config.train.diagnose_every = 0
    arms = []
    for width in dict.fromkeys(width for width, _ in BLOCKS):
        size = {'model.d_model': width, 'model.d_ff': 4 * width}
        arms.append({'kernels.matmul': 'auto', **size})
        for block in (block for w, block in BLOCKS if w == width):
            for name in FORMATS:
                blocks = {f'kernels.{operand}_block': str(block) for operand in 'xwg'}
                kernel = formats.round_all(name, {'kernels.traced_formats': True})
                arms.append(kernel | blocks | size)
    config.sweep = {'list': arms, 'train.seed': (0, 1)}
    return config
