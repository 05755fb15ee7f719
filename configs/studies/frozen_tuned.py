"""How much worse is a model with a frozen readout, or with half of each MLP frozen?

Question: with one frozen part at a time, each with a tuned learning rate and the same budget, are
          equiangular rows of the readout as good as learned rows, and better than random rows? Do
          MLPs on random features need fewer trained parameters?
Command:  uv run train.py --config=configs/studies/frozen_tuned.py --workdir=runs/frozen_tuned
Cost:     15 runs of 0.26 million parameters and 1,000 steps in each of eight programs, 1.7
          core-hours.
Result:   fixed rows cost 1.2 nats, at equal or at random angles, though the cosine alone costs
          nothing that is seen; random features cost 0.11 nats, and a plain MLP with as few trained
          parameters 0.07: configs/studies/results/frozen_tuned.md

Cosines with learned rows separate the effect of the cosine from that of frozen rows. An MLP with 51
hidden units has as many trained parameters as an MLP on 102 random features: a fifth of the
baseline's. Embeddings start at a standard deviation of 1, so that the first update does not drown
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
    # All features are the same one, as if each were drawn from the same key.
    {'model.mlp': 'random_features', 'model.d_ff': 1},
)


def get_config() -> ConfigDict:
    config = small.get_config()
    config.model.activation = 'relu'
    config.scaling.embedding_std = 1.0
    config.optim.warmup_steps = 50
    config.train.steps = 1000
    config.train.eval_every = 1000
    config.sweep = {'list': ARMS}
    config.tune = {'optim.lr': 1e-2, 'smallest_effect': 0.02, 'budget': 15}
    return config
