"""Does the best learning rate of a shallow model hold for a model eight times as deep?

Question: where is the best learning rate at each of four depths, with blocks that add their full
          output, with CompleteP (arXiv:2505.01618), whose blocks add 1 / L of it, and with
          Depth-muP, whose blocks add 1 / sqrt(L) and whose rates fall as 1 / sqrt(L)?
Command:  uv run train.py --config=configs/studies/depth_transfer.py --workdir=runs/depth_transfer
          uv run python -m eval.report --workdir=runs/depth_transfer --figures=figures
Cost:     216 runs of width 32 in twelve programs, a quarter of an hour on two CPU cores.
Result:   all transfer within one grid step; only CompleteP improves with depth:
          configs/studies/results/depth_transfer.md

The width is that of the base model, so that the three differ only in their rule for depth. At two
blocks they are the same model.
"""

from ml_collections import ConfigDict

from configs.studies import small
from configs.studies.mup_transfer import at_width

DEPTHS = (2, 4, 8, 16)
LEARNING_RATES = tuple(2.0**power for power in range(-9, -3))


def get_config() -> ConfigDict:
    config = small.get_config()
    config.update_from_flattened_dict(at_width(32))
    config.data.seq_len = 64
    config.train.steps = 150
    config.train.eval_every = 150
    base = {'scaling.base_width': 32, 'scaling.base_depth': DEPTHS[0]}
    config.sweep = {
        'list': tuple(
            {'model.n_layers': depth, 'scaling.name': name} | (base if name != 'standard' else {})
            for name in ('standard', 'depth_mup', 'complete_p')
            for depth in DEPTHS
        ),
        'optim.lr': LEARNING_RATES,
        'train.seed': (0, 1, 2),
    }
    return config
