"""Do verdicts on small models hold at another start of the embeddings, for longer training, and on
another text?

Question: the verdicts of norms_tuned.py, blocks_tuned.py, recipes_tuned.py and
          optimizers_and_schedules.py were found at embeddings of initial deviation 1. Does each
          condition have the same outcome at 1/8, which scaling.init gives at this width? Do those
          of norms, found at 200 steps, have it at 800, and those of blocks at 400? Do those found
          on Python sources have it on English, their docstrings?
Command:  uv run train.py --config=configs/studies/nuisances.py:norms_start --workdir=runs/norms
          uv run train.py --config=configs/studies/nuisances.py:blocks_start --workdir=runs/blocks
          uv run train.py --config=configs/studies/nuisances.py:recipes_start --workdir=runs/recipes
          uv run train.py --config=configs/studies/nuisances.py:both_start --workdir=runs/both
          uv run train.py --config=configs/studies/nuisances.py:norms_longer --workdir=runs/norms4
          uv run train.py --config=configs/studies/nuisances.py:blocks_longer --workdir=runs/blocks2
          uv run train.py --config=configs/studies/nuisances.py:norms_text --workdir=runs/text1
          uv run train.py --config=configs/studies/nuisances.py:blocks_text --workdir=runs/text2
          uv run train.py --config=configs/studies/nuisances.py:recipes_text --workdir=runs/text3
          uv run train.py --config=configs/studies/nuisances.py:both_text --workdir=runs/text4
Cost:     15 runs of 0.26 million parameters for each of 34 arms at 1/8 and on the other text, and
          of 18 for longer runs.
Result:   two of 24 verdicts depend on the start, five are the same, the others are undecided or
          cannot tell; of 14 ten are the same for longer training, and of 24 fifteen on English,
          and none is reversed:
          configs/studies/results/nuisances.md

The arms are those of the claims that are decided at 1 and 200 steps, of their controls, and of the
broken methods in the same studies.
"""

from ml_collections import ConfigDict

from configs.studies import blocks_tuned, norms_tuned, optimizers_and_schedules, recipes_tuned
from configs.studies._variants import check_variant

START = 1 / 8  # initial deviation of the embeddings
LONGER = {'norms': 4, 'blocks': 2}  # times the steps, and the tokens
ARMS = {  # by study; the baseline first
    'norms': (
        {'model.norm': 'rmsnorm', 'model.placement': 'pre'},
        {'model.norm': 'seednorm', 'model.placement': 'pre'},
        {'model.norm': 'gated_rmsnorm', 'model.placement': 'pre'},
        {'model.norm': 'none', 'model.placement': 'pre'},
        {'model.norm': 'rmsnorm', 'model.placement': 'post'},
        {'model.norm': 'rmsnorm', 'model.placement': 'peri'},
        {'model.norm': 'rmsnorm', 'model.placement': 'mix'},
        {'model.norm': 'rmsnorm', 'model.placement': 'deepnorm'},
        {'model.norm': 'rmsnorm', 'model.placement': 'resi_dual'},
    ),
    'blocks': (
        {'model.attention': 'softmax'},
        {'model.activation': 'swiglu', 'model.d_ff': 168},
        {'model.activation': 'relu'},
        {'model.activation': 'elu'},
        {'model.attention': 'linear'},
        {'model.attention': 'nala'},
        {'model.attention': 'l2'},
        {'model.position': 'none'},
        {'model.position': 'alibi'},
    ),
    'recipes': (
        {'optim.schedule': 'warmup_cosine'},
        {'optim.warmup_steps': 0},
        {'optim.weight_decay': 0.0},
        {'loss.z_loss': 0.0},
        {'loss.label_smoothing': 0.1},
        {'loss.label_smoothing': 0.001},
        {'loss.name': 'comp_sum', 'loss.tau': 0.5},
        {'loss.name': 'comp_sum', 'loss.tau': 1.5},
    ),
    'both': tuple(
        arm
        for arm in optimizers_and_schedules.ARMS
        if arm.get('optim.name') not in ('soap', 'shampoo', 'aro')
        and 'optim.conda_every' not in arm
    ),
}
BASES = {
    'norms': norms_tuned,
    'blocks': blocks_tuned,
    'recipes': recipes_tuned,
    'both': optimizers_and_schedules,
}


def get_config(which: str = 'norms_start') -> ConfigDict:
    """which: STUDY_start or STUDY_text, STUDY of norms, blocks, recipes, both; or norms_longer or
    blocks_longer.
    """
    choices = [f'{study}_{setting}' for setting in ('start', 'text') for study in ARMS]
    check_variant(which, (*choices, *(f'{study}_longer' for study in LONGER)))
    study, _, setting = which.partition('_')
    config = BASES[study].get_config()
    if setting == 'start':
        config.scaling.embedding_std = START
    elif setting == 'text':
        config.data.source = 'docstrings'
    else:
        config.train.steps = config.train.eval_every = LONGER[study] * config.train.steps
        config.optim.warmup_steps *= LONGER[study]
    config.sweep = {'list': ARMS[study]}
    config.tune = {**config.tune, 'budget': 15}
    return config
