"""Does Muon need half the tokens of AdamW at 124 million parameters?

Question: each at its best learning rate, how many tokens does AdamW need for the loss that Muon
          reaches after 20 tokens per parameter?
Command:  uv run train.py --config=configs/studies/muon_124m.py --workdir=gs://BUCKET/muon_124m
Cost:     uv run python -m tpu.plan --config=configs/studies/muon_124m.py --topology=v5e:4x4
Result:   not trained, because it needs a pod; only its cost is planned.

Each run has one chip: rows of 2,048 tokens, 262,144 tokens per step, 2.5 billion tokens of
FineWeb-Edu in total. AdamW is also trained for 1.5 and 2 times as long, so that its tokens for
Muon's loss can be interpolated between lengths.
"""

from ml_collections import ConfigDict

from configs import llama_124m

ARMS = (  # the baseline first
    {'optim.name': 'adamw', 'optim.lr': 3e-3},
    {'optim.name': 'muon', 'optim.lr': 2e-2},
)


def get_config() -> ConfigDict:
    config = llama_124m.get_config()
    config.data.source = 'hub:HuggingFaceFW/fineweb-edu:sample-10BT'
    config.data.seq_len, config.data.batch_size = 2048, 128
    config.train.microbatches = 16
    config.train.steps = 9600
    config.optim.others, config.optim.others_lr = 'adamw', 3e-3
    config.optim.warmup_steps = 500
    config.sweep = {'list': ARMS}
    config.tune = {'optim.lr': None, 'smallest_effect': 0.01, 'lengths': (1.5, 2.0)}
    return config
