"""Which schedule, loss, average or decay lowers the loss, each at its own learning rate?

Question: with one change of the recipe at a time, each with a tuned learning rate and the same
          budget, which changes are better than AdamW with a cosine to 0, cross-entropy and a weight
          decay of 0.1?
Command:  uv run train.py --config=configs/studies/recipes_tuned.py --workdir=runs/recipes_tuned
Cost:     about 22 runs of 0.26 million parameters for each of twelve arms, in seven programs.
Result:   only a constant rate with a decay in its last fifth and a linear decay are better, by 0.05
          and 0.04 nats; no warm-up, no weight decay, smoothing and other comp-sum losses are worse;
          a z-loss changes nothing; the result for averages is withdrawn:
          configs/studies/results/recipes_tuned.md

Embeddings start at a standard deviation of 1, so that the first update does not drown them. All
models are compared by cross-entropy, whatever their training loss.
"""

from ml_collections import ConfigDict

from configs.studies import small

ARMS = (
    {'optim.schedule': 'warmup_cosine'},  # the baseline
    {'optim.schedule': 'linear'},
    {'optim.schedule': 'warmup_stable_decay'},
    {'optim.schedule': 'inverse_sqrt'},  # constant for 10,000 steps by default: a null
    {'optim.schedule': 'constant'},
    {'optim.schedule': 'constant', 'optim.average': 'ema'},
    {'optim.warmup_steps': 0},
    {'optim.weight_decay': 0.0},
    {'loss.z_loss': 0.0},  # which is 1e-4 in the baseline
    {'loss.label_smoothing': 0.1},
    {'loss.name': 'comp_sum', 'loss.tau': 0.5},
    {'loss.name': 'comp_sum', 'loss.tau': 1.5},
)


def get_config() -> ConfigDict:
    config = small.get_config()
    config.scaling.embedding_std = 1.0
    config.sweep = {'list': ARMS}
    config.tune = {'optim.lr': 1e-2, 'smallest_effect': 0.02}
    return config
