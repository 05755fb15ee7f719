"""What does a model lose whose readout, or half of whose MLPs, stays as it is drawn?

Question: one frozen part at a time, each with a learning rate of its own at equal budgets: are
          equiangular rows of the readout as good as learned ones, and better than random ones? Do
          MLPs on random features need fewer parameters that are trained?
Command:  uv run train.py --config=configs/studies/frozen_tuned.py --workdir=runs/frozen_tuned
Cost:     seven programs, some twenty-five runs of 0.26 million parameters and 1,000 steps each: an
          hour or two on two CPU cores.
Result:   not trained to its end yet

Cosines with learned rows tell what is of the cosine from what is of rows that are frozen. An MLP
of 51 hidden units has as many trained parameters as one on 102 random features, a fifth of all that
the baseline trains there. Embeddings start at a deviation of 1, so that no first update drowns
them.
"""

from ml_collections import ConfigDict

from configs.studies import small

ARMS = (
    {'model.readout': 'learned'},  # the baseline
    {'model.readout': 'cosines'},
    {'model.readout': 'random'},
    {'model.readout': 'equiangular'},
    {'model.mlp': 'random_features'},
    {'model.mlp': 'random_features', 'model.d_ff': 102},
    {'model.d_ff': 51},
)


def get_config() -> ConfigDict:
    config = small.get_config()
    config.model.activation = 'relu'
    config.scaling.embedding_std = 1.0
    config.optim.warmup_steps = 50
    config.train.steps = 1000
    config.train.eval_every = 1000
    config.sweep = {'list': ARMS}
    config.tune = {'optim.lr': 1e-2, 'smallest_effect': 0.02}
    return config
