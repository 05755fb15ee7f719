"""A LLaMA-like decoder of 124 million parameters, for pods; the base of llama_1b and llama_8b.

Question: how does it fit and perform on a pod? `tpu.plan` answers without a pod (tpu/PLANS.md).
Command:  uv run python -m tpu.plan --config=configs/llama_124m.py --topology=v5e:4x4
          uv run train.py --config=configs/llama_124m.py --config.data.source='text:corpus/*.jsonl'
Cost:     2.5 billion tokens, 20 per parameter; tpu/PLANS.md has the hours.
Result:   not trained; planned.

RMSNorm, SwiGLU, rotary positions, grouped queries, no biases, rows of 8,192 tokens; attention is
splash on TPUs and cudnn on GPUs, by `kernels.attention=auto`.
"""

from ml_collections import ConfigDict

from configs import default

ROWS = 256  # of 8,192 tokens: two million per step


def get_config() -> ConfigDict:
    config = default.get_config()
    model = config.model
    model.d_model, model.d_ff, model.n_layers = 768, 2048, 12
    model.n_heads, model.n_kv_heads = 12, 4
    model.activation = 'swiglu'
    model.qk_norm = 'none'
    model.dtype = 'bfloat16'
    model.scan_layers = True
    model.remat = 'dots'
    config.attention.rope_base = 500_000.0
    config.data.tokenizer = 'bpe:32768'
    config.data.seq_len = 8192
    config.data.batch_size = ROWS
    config.data.mask_documents = True
    config.scaling.init = 'small'
    config.scaling.embedding_std = None
    config.optim.lr = 3e-3
    config.optim.b2 = 0.95
    config.optim.warmup_steps = 100
    config.optim.final_lr_fraction = 0.1
    config.train.steps = 1200
    config.train.eval_batches = 16
    config.train.checkpoint_every = 500
    config.train.log_every = 10
    return config
