"""Does a batch that grows during training lower the loss, at equal tokens?

Question: batches of 4, 8 and 12 rows, each for a third of the tokens, are compared with 8 rows
          throughout, with one learning rate and with one that grows with the batch.
Command:  uv run train.py --config=configs/studies/batch_ramps.py --workdir=runs/batch_ramps
Cost:     15 runs of 0.26 million parameters for each of five arms, about 20 core-minutes.
Result:   no gain is seen: configs/studies/results/batch_ramps.md

The control is a batch of 4 throughout, which makes twice as many updates and must win. The twin is
the ramp backwards, which makes as many updates as the ramp.
"""

from ml_collections import ConfigDict

from configs.studies import small

ROWS, STEPS, RAMP_STEPS = 8, 200, 244  # with equal tokens
BATCHES, FACTORS = (4, 8, 12), (1.0, 1.52, 1.73)  # 2^0.6 and 3^0.5, as in modded-nanogpt


def make_arm(steps: int, **changes: str | int) -> dict[str, str | int]:
    lengths = {'train.steps': steps, 'train.eval_every': steps}
    return lengths | {path.replace('_', '.', 1): value for path, value in changes.items()}


def make_stages(batches: tuple[int, ...], factors: tuple[float, ...] = (1.0, 1.0, 1.0)) -> str:
    """Returns stages of a third of the tokens each."""
    return '; '.join(
        f'{until}: batch_size={rows} lr_factor={factor}'
        for until, rows, factor in zip(('0.3333', '0.6667', '1'), batches, factors, strict=True)
    )


def get_config() -> ConfigDict:
    config = small.get_config()
    config.scaling.embedding_std = 1.0
    config.data.batch_size = ROWS
    config.train.eval_batches = 64
    config.sweep = {
        'list': (
            make_arm(STEPS),
            make_arm(RAMP_STEPS, train_stages=make_stages(BATCHES)),
            make_arm(RAMP_STEPS, train_stages=make_stages(BATCHES, FACTORS)),
            make_arm(RAMP_STEPS, train_stages=make_stages(BATCHES[::-1])),  # the twin
            make_arm(2 * STEPS, data_batch_size=ROWS // 2),  # the control
        )
    }
    config.tune = {'optim.lr': 1e-2, 'smallest_effect': 0.02, 'budget': 15}
    return config
