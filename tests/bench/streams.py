"""Memory and FLOPs of residual streams: python -m tests.bench.streams

Prints the table of docs/guide/norms.md: the memory that XLA plans for a forward and backward pass
on this platform, in activations [B, T, D] per block, and the growth of the FLOPs. Nothing runs.
"""

import jax
import jax.numpy as jnp
import numpy as np

from lm.training.flops import flops_per_token
from tests.helpers import checked_config, tiny_learner, tiny_model

LAYERS, WIDTH, ROWS, LENGTH = 12, 128, 4, 128
SIZES = {
    'model.n_layers': LAYERS,
    'model.d_model': WIDTH,
    'model.d_ff': 4 * WIDTH,
    'model.n_heads': 2,
    'model.n_kv_heads': 2,
    'data.seq_len': LENGTH,
    'data.batch_size': ROWS,
}
STREAMS = (
    {},
    {'model.stream': 'x0_scalars'},
    {'model.stream': 'attention_residual'},
    {'model.stream': 'attention_residual', 'model.depth_sums': 8},
    {'model.stream': 'dense_former'},
    {'model.stream': 'hyper_connections'},
    {'model.stream': 'mhc'},
    {'attention.value_residual': 'learned'},
)


def measure(changes: dict) -> tuple[float, float]:
    """Returns (activations per block that a pass keeps, FLOPs per token)."""
    config = checked_config(SIZES | changes)
    model, learner = tiny_model(config), tiny_learner(config)
    tokens_BT = np.ones((ROWS, LENGTH), np.int32)

    def loss(params):
        x_BTD, _ = model.apply({'params': params}, tokens_BT, method='activations')
        return jnp.sum(jnp.cos(x_BTD))

    program = jax.jit(jax.grad(loss)).lower(learner.description.shapes).compile()
    size = np.float32().itemsize * ROWS * LENGTH * WIDTH * LAYERS
    return program.memory_analysis().temp_size_in_bytes / size, flops_per_token(learner)


def main() -> None:
    print('| stream | `remat=none` | `remat=full` | FLOPs |\n|---|---|---|---|')
    _, plain_flops = measure({})
    for changes in STREAMS:
        activations, flops = measure(changes)
        recomputed, _ = measure(changes | {'model.remat': 'full'})
        name = ', '.join(f'{path}={value}' for path, value in changes.items()) or 'plain'
        print(
            f'| {name} | {activations:.1f} | {recomputed:.1f} | {flops / plain_flops - 1:+.1%} |',
            flush=True,
        )


if __name__ == '__main__':
    main()
