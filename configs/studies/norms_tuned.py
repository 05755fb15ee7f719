"""Which norm layer and which placement reach the lowest loss, each at its own learning rate?

Question: which norm layers, and which placements of RMSNorm, are better than RMSNorm in pre-norm?
          Each has a tuned learning rate with the same budget. Embeddings start at a standard
          deviation of 1, so that the first update does not drown them.
Command:  uv run train.py --config=configs/studies/norms_tuned.py --workdir=runs/norms_tuned
Cost:     about thirty runs of 0.26 million parameters in each of twelve programs.
Result:   only DeepNorm is better, by 0.04 nats; most variants that led with small embeddings are
          worse with these: configs/studies/results/norms_tuned.md

configs/studies/norm_placement_lr.py compares more variants over a shared grid of rates.
"""

from ml_collections import ConfigDict

from configs.studies import small

ARMS = (  # norm, placement; the baseline first
    ('rmsnorm', 'pre'),
    ('layernorm', 'pre'),
    ('seednorm', 'pre'),
    ('gated_rmsnorm', 'pre'),
    ('dyt', 'pre'),
    ('none', 'pre'),
    ('rmsnorm', 'post'),
    ('rmsnorm', 'peri'),
    ('rmsnorm', 'mix'),
    ('rmsnorm', 'deepnorm'),
    ('rmsnorm', 'resi_dual'),
    ('rmsnorm', 'layernorm_scaling'),
)


def get_config() -> ConfigDict:
    config = small.get_config()
    config.scaling.embedding_std = 1.0
    arms = tuple({'model.norm': norm, 'model.placement': place} for norm, place in ARMS)
    config.sweep = {'list': arms}
    config.tune = {'optim.lr': 1e-2, 'smallest_effect': 0.02}
    return config
