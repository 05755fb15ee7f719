"""How much do methods of quantising after training cost, at 8, 4, 3 and 2 bits?

Question: which method loses least at each number of bits, does it matter whether the calibration
          text is of the same kind as the training text, and do attention gates change the answer?
Command:  uv run train.py --config=configs/studies/quantising.py --workdir=runs/quantising
          uv run python -m tests.bench.quantise --sweep=runs/quantising --text=code=text:CODE
          --text=prose=text:PROSE
Cost:     six runs of 0.26 million parameters, then a few seconds for each rounded model.
Result:   configs/studies/results/quantising.md: eight bits cost nothing; at three bits GPTQ and
          AdaRound lose less than nearest, and prose as calibration text takes away most of it.
"""

from ml_collections import ConfigDict

from configs.studies import small


def get_config() -> ConfigDict:
    config = small.get_config()
    config.scaling.embedding_std = 1.0
    config.optim.lr = 5e-3
    config.optim.warmup_steps = 100
    config.train.steps = config.train.eval_every = 2000
    config.train.checkpoint_every = 2000
    config.sweep = {'attention.gate': ('none', 'elementwise'), 'train.seed': (0, 1, 2)}
    return config
