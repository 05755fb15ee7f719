"""How do norm layers and their placement change the loss, and how much it depends on the learning
rate?

Question: each norm layer at each placement, over three decades of learning rates: which reaches the
          lowest loss, and which forgives a learning rate that is off by a factor of ten?
Command:  uv run train.py --config=configs/studies/norm_placement_lr.py --workdir=runs/norms
          uv run python -m eval.report --workdir=runs/norms
Cost:     126 runs of 0.43 million parameters, about half an hour on two CPU cores.
Result:   pre and peri within noise at their best, peri far less hurt by large rates, post worse:
          configs/studies/results/norm_placement_lr.md

Every cell sees the same text in the same order; the seeds draw other initial parameters.
"""

from ml_collections import ConfigDict

from configs import default

DECADES = (-4.0, -3.5, -3.0, -2.5, -2.0, -1.5, -1.0)


def get_config() -> ConfigDict:
    config = default.get_config()
    config.model.d_model = 64
    config.model.n_layers = 6
    config.model.d_ff = 256
    config.model.qk_norm = 'none'  # it would hide much of what the placement does
    config.data.tokenizer = 'bpe:1024'
    config.data.seq_len = 128
    config.data.batch_size = 8
    config.optim.warmup_steps = 50
    config.train.steps = 400
    config.train.eval_every = 200
    config.train.diagnose_every = 100
    config.train.checkpoint_every = 0
    config.train.log_every = 10
    config.sweep = {
        'model.norm': ('rmsnorm', 'layernorm'),
        'model.placement': ('pre', 'post', 'peri'),
        'optim.lr': tuple(10**exponent for exponent in DECADES),
        'train.seed': (0, 1, 2),
    }
    return config
