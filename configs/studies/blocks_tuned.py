"""Which attention, activation, position or reparametrisation lowers the loss, each tuned?

Question: with one change of the block at a time, each with a tuned learning rate and the same
          budget, which changes are better than RMSNorm in pre-norm, GELU, RoPE and plain softmax
          attention?
Command:  uv run train.py --config=configs/studies/blocks_tuned.py --workdir=runs/blocks_tuned
Cost:     about 37 runs of 0.26 million parameters in each of sixteen programs.
Result:   only SwiGLU, by 0.04 nats, and sigmaReparam, by 0.02, are better; ReLU, ELU, linear
          attention, query-key norms and no positions are worse; the result for learned positions
          is withdrawn: configs/studies/results/blocks_tuned.md

Embeddings start at a standard deviation of 1, so that the first update does not drown them.
"""

from ml_collections import ConfigDict

from configs.studies import small

ARMS = (
    {'model.attention': 'softmax'},  # the baseline
    {'model.activation': 'swiglu', 'model.d_ff': 168},  # with nearly as many parameters
    {'model.activation': 'squared_relu'},
    {'model.activation': 'relu'},
    {'model.activation': 'elu'},
    {'attention.gate': 'elementwise'},
    {'attention.sinks': 'off_by_one'},
    {'attention.affine_scaled': True},
    {'model.attention': 'linear'},
    {'model.attention': 'nala'},
    {'model.attention': 'l2'},
    {'model.position': 'none'},
    {'model.position': 'alibi'},
    {'model.position': 'learned'},
    {'model.qk_norm': 'rmsnorm'},
    {'model.reparam': 'sigma'},
)


def get_config() -> ConfigDict:
    config = small.get_config()
    config.scaling.embedding_std = 1.0
    config.sweep = {'list': ARMS}
    config.tune = {'optim.lr': 1e-2, 'smallest_effect': 0.02}
    return config
