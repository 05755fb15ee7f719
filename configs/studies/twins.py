"""Do the tests of claims reject broken methods?

Question: with an equation broken, does a method still meet the conditions of its claim?
Command:  uv run train.py --config=configs/studies/twins.py:recipes --workdir=runs/recipes_twins
          uv run train.py --config=configs/studies/twins.py:blocks --workdir=runs/blocks_twins
          uv run train.py --config=configs/studies/twins.py:equations --workdir=runs/equations
          uv run train.py --config=configs/studies/twins.py:auon --workdir=runs/auon_twins
          uv run train.py --config=configs/studies/twins.py:optimizers --workdir=runs/optim_twins
          uv run train.py --config=configs/studies/twins.py:again --workdir=runs/again_twins
          uv run train.py --config=configs/studies/twins.py:still --workdir=runs/still_twins
Cost:     15 runs of 0.26 million parameters for each of 28 arms.
Result:   six of twelve tests reject the mistake; at embeddings of 1/8, hidden matrices that
          only decay are better than AdamW by 0.26 nats: configs/studies/results/twins.md

Each mistake is an option that a config can set: a factor or a term that is left out, or a constant
that is wrong. Models, texts and baselines are those of configs/studies/recipes_tuned.py,
blocks_tuned.py and optimizers_tuned.py.
"""

from ml_collections import ConfigDict

from configs.studies import small
from configs.studies._variants import choose

RECIPES = (
    {'optim.weight_decay': 0.1},  # the baseline
    {'optim.weight_decay': 0.0},
    {'optim.decay_rule': 'independent'},  # the factor of the learning rate is left out
    {'loss.z_loss': 0.0},
    {'loss.z_loss': 1.0},  # the factor of 1e-4 is left out
    {'loss.name': 'comp_sum', 'loss.tau': 0.5},
    {'loss.name': 'comp_sum', 'loss.tau': 1.5},
)
BLOCKS = (
    {'model.activation': 'gelu'},  # the baseline
    {'model.activation': 'silu', 'model.d_ff': 168},  # SwiGLU without its product
    {'model.reparam': 'spectral_norm'},  # sigmaReparam without its learned factor
)
EQUATIONS = (
    {'model.activation': 'gelu'},  # the baseline
    {'model.activation': 'relu'},
    {'model.activation': 'elu'},
    {'model.activation': 'silu'},  # 1.702, with which a sigmoid is near GELU's factor, is left out
    {'model.attention': 'l2', 'model.position': 'none'},  # queries and keys are not rotated
    {'loss.label_smoothing': 0.1},
    {'loss.label_smoothing': 0.001},  # a tenth of a percent
)
AUON = (
    {'optim.name': 'muon', 'optim.lr': 4e-2},  # the baseline
    {'optim.name': 'conda', 'optim.lr': 1e-1, 'optim.conda_scale': 0.0},  # updates are lost
)
OPTIMIZERS = (
    {'optim.name': 'adamw', 'optim.lr': 8e-3},  # the baseline
    {'optim.name': 'aro', 'optim.lr': 2e-2, 'optim.momentum': 0.0},
    # The squares are not averaged.
    {'optim.name': 'conda', 'optim.lr': 2e-2, 'optim.b2': 0.0},
    # As much is added to each eigenvalue as the largest one has.
    {
        'optim.name': 'shampoo',
        'optim.lr': 1e-2,
        'optim.shampoo_every': 10,
        'optim.shampoo_eps': 1.0,
    },
)

AGAIN = (  # without an average of its squares Conda diverges, and Shampoo's best rate was an edge
    {'optim.name': 'adamw', 'optim.lr': 4e-3},
    {'optim.name': 'conda', 'optim.lr': 1.0, 'optim.eps': 1.0},  # hardly divided by sqrt(v)
    {
        'optim.name': 'shampoo',
        'optim.lr': 3e-3,
        'optim.shampoo_every': 10,
        'optim.shampoo_eps': 1.0,
    },
)
STILL = (  # with eps 1, tuning Conda ended at a rate that is worse than no updates at all
    {'optim.name': 'adamw', 'optim.lr': 4e-3},
    {'optim.name': 'conda', 'optim.lr': 1e-2, 'optim.conda_scale': 0.0},  # its updates are lost
)
ARMS = {
    'recipes': RECIPES,
    'blocks': BLOCKS,
    'equations': EQUATIONS,
    'auon': AUON,
    'optimizers': OPTIMIZERS,
    'again': AGAIN,
    'still': STILL,
}


def get_config(which: str = 'recipes') -> ConfigDict:
    """which: a key of ARMS."""
    config = small.get_config()
    config.scaling.embedding_std = 1.0
    config.sweep = {'list': choose(which, ARMS)}
    config.tune = {'optim.lr': 1e-2, 'smallest_effect': 0.02, 'budget': 15}
    if which in ('auon', 'optimizers', 'again', 'still'):
        config.scaling.embedding_std = None  # 1 / 8
        config.optim.others, config.optim.others_lr = 'adamw', 1e-2
        config.tune = {'optim.lr': None, 'smallest_effect': 0.02, 'budget': 15}
    if which == 'auon':
        config.optim.weight_decay = 0.01  # as in configs/studies/as_published.py
    return config
