"""A decoder of the shape of LLaMA 3's with 8 billion parameters (arXiv:2407.21783), for pods.

Question: what does a pod make of it? `tpu.plan` says so without one (tpu/PLANS.md).
Command:  uv run python -m tpu.plan --config=configs/llama_8b.py --topology=v6e:16x16
          uv run train.py --config=configs/llama_8b.py --config.data.source='text:corpus/*.jsonl'
Cost:     160 billion tokens, 20 a parameter; tpu/PLANS.md has the hours.
Result:   not trained; planned.
"""

from ml_collections import ConfigDict

from configs import llama_1b

ROWS = 512  # of 8,192 tokens: four millions a step


def get_config() -> ConfigDict:
    config = llama_1b.get_config()
    model = config.model
    model.d_model, model.d_ff, model.n_layers = 4096, 14_336, 32
    model.n_heads, model.n_kv_heads = 32, 8
    config.data.tokenizer = 'bpe:128256'
    config.data.batch_size = ROWS
    config.optim.lr = 3e-4
    config.optim.warmup_steps = 2000
    config.train.steps = 38_300
    config.mesh.data, config.mesh.fsdp = -1, 16
    return config
