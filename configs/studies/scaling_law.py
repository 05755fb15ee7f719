"""How does the loss fall with parameters and tokens, and can it be predicted?

Question: of sixteen runs, at four widths and four lengths, does a law fitted to the twelve smallest
          (arXiv:2203.15556, approach 3) predict the four largest?
Command:  uv run train.py --config=configs/studies/scaling_law.py --workdir=runs/scaling_law
          uv run python -m eval.fit --workdir=runs/scaling_law --law=chinchilla --hold_out=0.25
Cost:     seven minutes on two CPU cores: 16 runs in four programs.
Result:   fitted to 0.3%, held-out runs predicted 1.6 to 5% too high:
          configs/studies/results/scaling_law.md

muP transfers the learning rate of the narrowest model to all widths. Each length has its own
cosine.
"""

from ml_collections import ConfigDict

from configs.studies import small
from configs.studies.mup_transfer import at_width

WIDTHS = (32, 64, 96, 128)
LENGTHS = (200, 400, 800, 1600)


def get_config() -> ConfigDict:
    config = small.get_config()
    config.model.n_layers = 2
    config.optim.lr = 2.0**-5
    config.scaling.name = 'mup'
    config.scaling.base_width = WIDTHS[0]
    config.train.eval_every = 200
    config.train.eval_batches = 64
    config.sweep = {
        'list': tuple(at_width(width) for width in WIDTHS),
        'train.steps': LENGTHS,
    }
    return config
