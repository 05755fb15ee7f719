"""A LLaMA-like decoder of 1.3 billion parameters, for pods.

Question: how does it fit and perform on a pod? `tpu.plan` answers without a pod (tpu/PLANS.md).
Command:  uv run python -m tpu.plan --config=configs/llama_1b.py --topology=v5p:4x4x4
          uv run train.py --config=configs/llama_1b.py --config.data.source='text:corpus/*.jsonl'
Cost:     26 billion tokens, 20 per parameter; tpu/PLANS.md has the hours.
Result:   not trained; planned.
"""

from ml_collections import ConfigDict

from configs import llama_124m

ROWS = 256  # of 8,192 tokens: two million per step


def get_config() -> ConfigDict:
    config = llama_124m.get_config()
    model = config.model
    model.d_model, model.d_ff, model.n_layers = 2048, 6144, 24
    model.n_heads, model.n_kv_heads = 16, 4
    model.remat = 'full'
    config.data.batch_size = ROWS
    config.optim.lr = 1e-3
    config.optim.warmup_steps = 1000
    config.train.steps = 12_400
    config.mesh.data, config.mesh.fsdp = -1, 4
    return config
