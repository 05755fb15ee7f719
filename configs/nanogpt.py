"""nanoGPT's recipe for CPUs, `config/train_shakespeare_char.py` with the sizes of its README.

Question: is training here the same as there?
Command:  uv run train.py --config=configs/nanogpt.py --config.data.source=text:train.txt
Cost:     two minutes on two CPU cores.
Result:   1.54 nats per byte on 1 MB of Python sources, where nanoGPT itself ends at 1.55
          (tests/bench/RESULTS.md).

The model, initialization, optimizer and schedule are nanoGPT's. Different: tokens are bytes, and
each row of the text is used once per epoch, in random order, in place of random cuts.
"""

from ml_collections import ConfigDict

from configs import default


def get_config() -> ConfigDict:
    config = default.get_config()
    config.model.update(d_model=128, n_heads=4, n_layers=4, d_ff=512)
    config.model.norm = 'layernorm'
    config.norm.bias, config.norm.eps = False, 1e-5
    config.model.qk_norm = 'none'
    config.model.activation = 'gelu_exact'
    config.model.position = 'learned'
    config.model.tie_embeddings = True
    config.scaling.init = 'depth_scaled'
    config.scaling.embedding_std = 0.02
    config.loss.z_loss = 0.0
    config.optim.lr = 1e-3
    config.optim.b2 = 0.99
    config.optim.final_lr_fraction = 0.1
    config.data.tokenizer = 'byte'
    config.data.seq_len, config.data.batch_size = 64, 12
    config.data.epochs = 2
    config.train.steps, config.train.eval_every = 2000, 250
    return config
