"""Do rows with holes cost a causal model anything, at each mixture's own learning rate?

Question: is the loss on unchanged text as low if half of the rows have a hole, which is moved to
          their end (arXiv:2207.14255), or if half of them have corrupted spans (arXiv:2305.02309)?
          What do all rows with holes cost?
Command:  uv run train.py --config=configs/studies/objectives_tuned.py --workdir=runs/mixtures
Cost:     15 runs of 0.26 million parameters for each of five arms.
Result:   corrupted spans in half of the rows cost 0.18 nats; a hole costs at most 0.04 in half of
          the rows and 0.05 in all: configs/studies/results/objectives_tuned.md

configs/studies/objectives.py compares more mixtures, and the losses on holes, at one learning rate
and smaller embeddings. There every vocabulary has the special tokens; here only those of models
that train with holes have them.
"""

from ml_collections import ConfigDict

from configs.studies import small

OBJECTIVES = (
    'causal',  # the baseline
    'causal:0.5+infill:0.5',
    'infill',
    'causal:0.5+span_corruption:0.5',
    'span_corruption',
)


def get_config() -> ConfigDict:
    config = small.get_config()
    config.data.masks = 8
    config.scaling.embedding_std = 1.0
    config.optim.warmup_steps = 40
    config.train.steps = config.train.eval_every = 400
    config.train.eval_batches = 64
    config.sweep = {'list': tuple({'data.objective': objective} for objective in OBJECTIVES)}
    config.tune = {'optim.lr': 2e-2, 'smallest_effect': 0.02, 'budget': 15}
    return config
