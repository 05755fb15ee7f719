"""Random combinations of parts: each trains, resumes, shards, decodes and converts.

A trial draws parts that may go together, adds the fields that they need, and draws again while the
config is refused by the name of a field. An accepted config trains twelve steps on one device, then

- is killed halfway and resumed, with the same bits;
- on eight devices, in another layout, has the same losses, up to rounding and to estimates that
  depend on the devices;
- gives in decoding with a cache the logits of its forward pass;
- folds and exports, or is refused by the name of a field.
"""

import functools
import math
import random
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from eval.convert.export_hf import export_checkpoint
from eval.convert.fold import fold_checkpoint
from lm.config.fields import Config
from lm.inference.decoding import extend, init_cache
from lm.inference.load import Checkpoint, load
from lm.model.kernels import rounds_products
from lm.record.metrics import read_rows
from tests.faults.test_configs import FIXED, draw_value, late_refusal, names_a_field, refusal
from tests.helpers import with_needs
from tests.killed import KilledBeforeStep
from tests.sweep_helpers import before_step, timeless
from train import DIVERGED, DONE, train

STEPS, KILLED_AT = 12, 8
KEPT = FIXED | {
    'train.steps': STEPS,
    'train.checkpoint_every': 4,
    'train.eval_every': 6,
    'train.log_every': 1,
    'train.keep_last': 3,
    'data.batch_size': 8,
    'data.seq_len': 8,
    'mesh.data': 1,
}
PARTS = (  # fields that a draw may set
    *('model.norm', 'model.placement', 'model.attention', 'model.qk_norm', 'model.activation'),
    *('model.position', 'model.reparam', 'model.mlp', 'model.stream', 'model.readout'),
    *('model.tie_embeddings', 'model.final_norm', 'model.embedding_norm', 'model.bias'),
    *('model.remat', 'model.dtype', 'model.scan_layers', 'model.n_kv_heads', 'model.n_layers'),
    *('loss.name', 'loss.chunk', 'optim.name', 'optim.others', 'optim.schedule', 'optim.average'),
    *('optim.decay_rule', 'optim.weight_dtype', 'optim.momentum_dtype', 'optim.cautious_decay'),
    *('optim.readout_optimizer', 'optim.embedding_lr_factor', 'optim.norm_weight_decay'),
    *('scaling.name', 'scaling.init', 'scaling.zero_init', 'data.objective', 'data.packing'),
    *('kernels.matmul', 'kernels.attention', 'kernels.linear_attention', 'kernels.recurrence'),
    *('attention.gate', 'attention.window', 'attention.sinks', 'train.microbatches'),
    *('model.pattern', 'train.stages'),
)
VALUES: dict[str, tuple[Any, ...]] = {  # in place of any valid value
    'model.n_layers': (2, 3, 4),
    'model.n_kv_heads': (1, 2),
    'model.pattern': (
        'linear+softmax',
        'softmax:window=4*2+softmax',
        'gated_delta+softmax',
        'gla/moe+softmax',
        'softmax:position=none+softmax',
        'softmax:placement=output+softmax',
        'softmax+linear|softmax',
    ),
    'train.stages': ('0.5: seq_len=4; 1:', '0.5: batch_size=4; 1:'),
    'optim.embedding_lr_factor': (0.1, 3.0),
    'optim.norm_weight_decay': (0.0, 0.1),
    'attention.window': (3, 5),
    'loss.chunk': (16, 64),
    'train.microbatches': (1, 2, 4),
}
MESHES = (
    {'mesh.data': -1},
    {'mesh.fsdp': 8},
    {'mesh.fsdp': 4, 'mesh.tensor': 2},
    {'mesh.data': 4, 'mesh.tensor': 2},
    {'mesh.data': 2, 'mesh.context': 4},
)


def draw_parts(rng: random.Random) -> dict[str, Any]:
    """Returns {path: value} of three to nine parts, with the fields that they need."""
    paths = rng.sample(PARTS, rng.randrange(3, 10))
    values = {
        path: rng.choice(VALUES[path]) if path in VALUES else draw_value(rng, path)
        for path in paths
    }
    return KEPT | with_needs(values)


def draw_valid(rng: random.Random, cache_dir: str) -> tuple[dict[str, Any], Config]:
    """Returns the first accepted draw, as (changes, config)."""
    while True:
        changes = draw_parts(rng) | {'data.cache_dir': cache_dir}
        if not isinstance(config := refusal(changes), str):
            return changes, config
        assert names_a_field(config), (changes, config)


def train_killed(config: Config, workdir: Path) -> int:
    """Trains a run that is killed before a step, and resumed; returns its status."""

    def act(wave):
        if wave.slots[0].journal.step == KILLED_AT - 1:
            wave.slots[0].journal.checkpoints.wait()
            raise KilledBeforeStep

    with pytest.MonkeyPatch.context() as patch, pytest.raises(KilledBeforeStep):
        before_step(patch, act)
        train(config, workdir)
    return train(config, workdir)


def losses(workdir: Path) -> list[float]:
    return [row['loss'] for row in read_rows(workdir / 'metrics.jsonl') if 'loss' in row]


def check_decoding(checkpoint: Checkpoint, tolerance: float) -> None:
    """Compares the logits of decoding, token by token, with the logits of the forward pass."""
    learner, variables = checkpoint.learner, checkpoint.variables
    tokens_1T = jnp.array([[checkpoint.tokenizer.bos_id, 3, 1, 4, 1, 5]], jnp.int32)
    expected_1TV = checkpoint.model.apply(variables, tokens_1T)
    cache = init_cache(learner, variables, 1, tokens_1T.shape[1])
    step, decoded = jax.jit(functools.partial(extend, learner)), []
    for i in range(tokens_1T.shape[1]):
        logits_11V, cache = step(variables, cache, tokens_1T[:, i : i + 1])
        decoded.append(logits_11V[:, 0])
    assert np.isfinite(decoded).all()
    atol = tolerance * float(jnp.abs(expected_1TV).max())
    np.testing.assert_allclose(jnp.stack(decoded, 1), expected_1TV, rtol=0, atol=atol)


def check_conversions(checkpoint: Checkpoint) -> None:
    """Folds and exports; both may be refused by the name of a field."""
    for convert in (functools.partial(fold_checkpoint, to='none'), export_checkpoint):
        try:
            convert(checkpoint)
        except ValueError as error:
            assert names_a_field(str(error)), error


@pytest.mark.full
@pytest.mark.timeout(900)
@pytest.mark.trials(short=1, long=500)
def test_valid_configs_hold(trial, tmp_path):
    rng = random.Random(9000 + trial)
    changes, config = draw_valid(rng, str(tmp_path / 'cache'))
    parts = {path: value for path, value in changes.items() if KEPT.get(path) != value}
    whole, killed, sharded = (tmp_path / name for name in ('whole', 'killed', 'sharded'))
    with late_refusal(parts):
        status = train(config, whole)
        if status == DIVERGED:
            return
        assert status == DONE and np.isfinite(losses(whole)).all()
        assert train_killed(config, killed) == DONE
        assert timeless(killed) == timeless(whole)
        saved = [load(workdir).weights for workdir in (whole, killed)]
        jax.tree.map(np.testing.assert_array_equal, *map(jax.device_get, saved))
        is_rounded = rounds_products(config)  # with scales that depend on the whole operand
        is_narrow = config.model.dtype == 'bfloat16' or is_rounded
        checkpoint = load(whole)
        check_decoding(checkpoint, math.inf if is_rounded else 0.1 if is_narrow else 2e-3)
        check_conversions(checkpoint)
        mesh = refusal(changes | {'mesh.data': 1} | rng.choice(MESHES))
        if isinstance(mesh, str):
            assert names_a_field(mesh)
            return
        assert train(mesh, sharded) == DONE
        expected, actual = losses(whole), losses(sharded)
        # Each device draws its own tokens, so that the first update differs.
        n_close = 1 if config.kernels.get('matmul') == 'wta_crs' else 3
        np.testing.assert_allclose(
            actual[:n_close], expected[:n_close], rtol=3e-2 if is_narrow else 2e-3
        )
        np.testing.assert_allclose(actual, expected, rtol=0.15 if is_narrow else 0.05)
    jax.clear_caches()
