"""How do activations and gradients change with depth under each placement of the norms?

Question: the variance of the residual stream behind each block and the gradient norm of each block,
          before and after training, for every placement at 6, 12 and 24 layers: does pre-norm grow
          with depth, do peri and layernorm_scaling grow no faster than linearly, does post-norm
          keep to 1 while its gradients fade, and are mix's gradients flatter than both?
Command:  uv run train.py --config=configs/studies/depth_variance.py --workdir=runs/depth
          uv run python -m eval.report --workdir=runs/depth --figures=figures
Cost:     66 runs of 0.3 to 1.3 million parameters, half an hour on two CPU cores.
Result:   as theory has it at the start; in training peri grows quadratically as pre does, and
          post-norm's gradients fade: configs/studies/results/depth_variance.md

Matrices start at a deviation of 1/sqrt(fan_in), as anywhere here, without published depth factors
but deepnorm's own. Embeddings start at 1/sqrt(d_model): a variance of 1/64, small against what a
branch adds, so that the first block alone would take the stream to 33 times that. Theory takes a
variance of 1 in front of the first block, and embedding_norm gives all that. Queries and keys are
normalized for all, since hybrid must. One learning rate for all, at which post-norm trains at 6
layers. At 24 it does not.
"""

from ml_collections import ConfigDict

from configs import default

PLACEMENTS = (  # all whose blocks are two steps of depth
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
    config.scaling.embedding_std = None  # 1 / sqrt(d_model), as scaling.init has it
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
