"""The shared model of studies with many runs: 0.26 million parameters.

Question: none; studies start from it.
Command:  uv run train.py --config=configs/studies/small.py
Cost:     200 steps, a few seconds on two CPU cores.
Result:   see the studies.
"""

from ml_collections import ConfigDict

from configs import default


def get_config() -> ConfigDict:
    config = default.get_config()
    config.model.d_model = 64
    config.model.n_layers = 4
    config.model.d_ff = 256
    config.model.qk_norm = 'none'
    config.scaling.embedding_std = None  # 1 / sqrt(d_model), by scaling.init
    config.data.tokenizer = 'bpe:512'
    config.data.seq_len = 128
    config.data.batch_size = 8
    config.optim.warmup_steps = 20
    config.train.steps = 200
    config.train.eval_every = 200
    config.train.eval_batches = 16
    config.train.checkpoint_every = 0
    config.train.log_every = 10
    return config
