"""How do activations and gradients change with depth under each placement of the norms?

Question: how do the variance of the residual stream after each block and the gradient norm of each
          block change, before and after training, for every placement at 6, 12 and 24 layers? Does
          pre-norm grow with depth, do peri and layernorm_scaling grow at most linearly, does
          post-norm stay at 1 while its gradients vanish, and are the gradients of mix flatter?
Command:  uv run train.py --config=configs/studies/depth_variance.py --workdir=runs/depth
          uv run python -m eval.report --workdir=runs/depth --figures=figures
Cost:     66 runs of 0.3 to 1.3 million parameters, half an hour on two CPU cores.
Result:   as theory predicts at initialization; in training peri grows quadratically like pre, and
          post-norm's gradients vanish: configs/studies/results/depth_variance.md

Matrices start at a standard deviation of 1/sqrt(fan_in), as everywhere here, without published
depth factors except deepnorm's. Embeddings at 1/sqrt(d_model) have a variance of 1/64, which the
first block alone would raise by 33 times. Theory assumes a variance of 1 before the first block,
and embedding_norm provides it for all placements. Queries and keys are normalized for all, since
hybrid requires it. All share a learning rate at which post-norm trains at 6 layers. At 24 it does
not.
"""

from ml_collections import ConfigDict

from configs import default

PLACEMENTS = (  # all placements with blocks of two steps of depth
    'pre',
    'post',
    'peri',
    'output',
    'mix',
    'layernorm_scaling',
    'deepnorm',
    'resi_dual',
    'hybrid',
    'hybrid_star',
    'wide',
)


def get_config() -> ConfigDict:
    config = default.get_config()
    config.model.d_model = 64
    config.model.n_layers = 6
    config.model.d_ff = 256
    config.model.embedding_norm = 'rmsnorm'
    config.model.scan_layers = True
    config.scaling.embedding_std = None  # 1 / sqrt(d_model), by scaling.init
    config.data.tokenizer = 'bpe:1024'
    config.data.seq_len = 128
    config.data.batch_size = 8
    config.optim.lr = 1e-3
    config.optim.warmup_steps = 50
    config.train.steps = 200
    config.train.eval_every = 200
    config.train.eval_batches = 8
    config.train.diagnose_every = 50
    config.train.checkpoint_every = 0
    config.train.log_every = 10
    config.sweep = {
        'model.placement': PLACEMENTS,
        'model.n_layers': (6, 12, 24),
        'train.seed': (0, 1),
    }
    return config
