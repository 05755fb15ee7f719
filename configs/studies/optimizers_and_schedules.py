"""Which schedule of AdamW, and which optimizer of the hidden matrices, lowers the loss?

Question: at embeddings of initial deviation 1 and 400 steps, with broken methods among the arms and
          each at its own learning rate, what is better than AdamW with a cosine to 0?
Command:  uv run train.py --config=configs/studies/optimizers_and_schedules.py --workdir=runs/both
Cost:     15 runs of 0.26 million parameters for each of twelve arms, about 100 core-minutes.
Result:   linear decay is better by 0.04 nats and a constant rate worse by 0.11; Muon leads by 0.06,
          and broken methods lose 0.5: configs/studies/results/optimizers_and_schedules.md

At embeddings of 1/8, hidden matrices that only decay are better than AdamW
(configs/studies/results/twins.md), and at 200 steps a constant rate is not decidedly worse than a
cosine (recipes_tuned.md): the tests of claims told little there. The learning rate of AdamW is that
of all parameters. Other optimizers train the hidden matrices, and AdamW at 0.01 the rest, which
favours AdamW: only its rate for embeddings is tuned.
"""

from ml_collections import ConfigDict

from configs.studies import small

HIDDEN = {'optim.others': 'adamw', 'optim.others_lr': 1e-2}
ARMS = (  # the baseline first; centres are the best rates at 200 steps, where these are known
    {'optim.name': 'adamw', 'optim.lr': 2e-2},
    {'optim.schedule': 'linear', 'optim.lr': 2e-2},
    {'optim.schedule': 'warmup_stable_decay', 'optim.lr': 2e-2},
    {'optim.schedule': 'constant', 'optim.lr': 1e-2},
    {'optim.schedule': 'inverse_sqrt', 'optim.lr': 1e-2},  # constant here: its fall is lost
    {'optim.name': 'muon', 'optim.lr': 4e-2, **HIDDEN},
    {'optim.name': 'auon', 'optim.lr': 1.0, **HIDDEN},  # momentum that is not orthogonalised
    {'optim.name': 'soap', 'optim.lr': 1.7e-2, **HIDDEN},
    {'optim.name': 'shampoo', 'optim.lr': 1e-2, 'optim.shampoo_every': 10, **HIDDEN},
    {'optim.name': 'aro', 'optim.lr': 2e-2, **HIDDEN},
    # Singular vectors are renewed twenty times, as in the authors' runs.
    {'optim.name': 'conda', 'optim.lr': 2.6e-2, 'optim.conda_every': 20, **HIDDEN},
    # Its updates are lost, so that hidden matrices only decay.
    {'optim.name': 'conda', 'optim.lr': 1e-2, 'optim.conda_scale': 0.0, **HIDDEN},
)


def get_config() -> ConfigDict:
    config = small.get_config()
    config.scaling.embedding_std = 1.0
    config.optim.warmup_steps = 40
    config.train.steps = config.train.eval_every = 400
    config.train.eval_batches = 64
    config.sweep = {'list': ARMS}
    config.tune = {'optim.lr': None, 'smallest_effect': 0.02, 'budget': 15}
    return config
