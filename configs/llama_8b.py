"""A decoder of 8 billion parameters, shaped like LLaMA 3 (arXiv:2407.21783), for pods.

Question: how does it fit and perform on a pod? `tpu.plan` answers without a pod (tpu/PLANS.md).
Command:  uv run python -m tpu.plan --config=configs/llama_8b.py --topology=v6e:16x16
          uv run train.py --config=configs/llama_8b.py --config.data.source='text:corpus/*.jsonl'
Cost:     160 billion tokens, 20 per parameter; tpu/PLANS.md has the hours.
Result:   not trained; planned.
"""

from ml_collections import ConfigDict

from configs import llama_1b

ROWS = 512  # of 8,192 tokens: four million per step


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
