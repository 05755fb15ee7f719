"""Which rule keeps the best weight decay, and the size of matrices, the same at every width?

Question: with muP's rates of 1 / m at m times the width, is the best decay constant, or does it
          grow as sqrt(m) (arXiv:2510.15262) or as m? Under which rule do the largest singular
          values in steady state equal the base model's?
Command:  uv run train.py --config=configs/studies/decay_transfer.py --workdir=runs/decay_transfer
          uv run python -m eval.runs --workdir=runs/decay_transfer "select d_model, weight_decay,
          avg(ce), count(*) from runs group by all order by all"
Cost:     108 runs of two blocks in four programs, half an hour on two CPU cores.
Result:   the best decay moves least under linear_width and sqrt_width, where it hardly matters;
          matrices keep their size between the two: configs/studies/results/decay_transfer.md

Only one rule is swept, because the others follow from it: for hidden matrices `linear_width` at a
decay of x is `sqrt_width` at x sqrt(m) and `constant` at x m. For embeddings and readout the decay
is x itself. The learning rate is large and constant after the warm-up, so that 400 steps reach the
steady state, which takes a few times 1 / (rate decay) steps.
"""

from ml_collections import ConfigDict

from configs.studies import small
from configs.studies.mup_transfer import WIDTHS, at_width

WEIGHT_DECAYS = tuple(2.0**power for power in range(-7, 2))


def get_config() -> ConfigDict:
    config = small.get_config()
    config.model.n_layers = 2
    config.data.seq_len = 64
    config.optim.lr = 2.0**-5
    config.optim.schedule = 'constant'
    config.optim.decay_rule = 'linear_width'
    config.scaling.name = 'mup'
    config.scaling.base_width = WIDTHS[0]
    config.train.steps = 400
    config.train.eval_every = 400
    config.train.diagnose_every = 50
    config.sweep = {
        'list': tuple(at_width(width) for width in WIDTHS),
        'optim.weight_decay': WEIGHT_DECAYS,
        'train.seed': (0, 1, 2),
    }
    return config
