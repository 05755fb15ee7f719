"""Small configs, batches and programs that several tests share."""

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from configs import default
from lm.config.fields import CHOICES, NO_RULE, RUN_PATHS, STAGE_RULES, Config, is_off
from lm.config.resolve import flatten, resolve, update_recipe
from lm.devices.mesh import batch_sharding, make_mesh, replicated_sharding, trace_on_mesh
from lm.devices.shardings import state_shardings, step_options
from lm.model.check import check
from lm.model.transformer import Transformer, build_model
from lm.training.state import Hyper, Learner, State, build_learner, init_state, make_hyper
from lm.training.step import make_eval_step, make_train_step
from modules.options import Option
from modules.scaling import PARAMETRIZATIONS
from modules.scaling.parametrization import RELATIVE

VOCAB, BOS = 16, 0
TINY = {
    'model.d_model': 16,
    'model.n_layers': 2,
    'model.n_heads': 2,
    'model.n_kv_heads': 2,
    'model.d_ff': 32,
    'model.qk_norm': 'none',
    'model.activation': 'gelu',
    'model.tie_embeddings': False,
    'model.scan_layers': True,  # compiles one layer
    'data.source': 'synthetic:markov',
    'data.tokenizer': 'byte',
    'data.seq_len': 8,
    'data.batch_size': 8,
    'optim.lr': 0.003,
    'optim.warmup_steps': 0,
    'optim.schedule': 'constant',
    'scaling.embedding_std': None,
    'optim.eps': 1e-3,  # Adam's direction is then smooth in the gradient, and comparable
    'train.steps': 20,
}


# Muon with relative updates of all matrices but embeddings, which keep their norm.
HYPERSPHERE = {
    'optim.name': 'muon',
    'optim.match_norm': 1.0,
    'optim.match_norm_roles': 'hidden+readout',
    'model.reparam': 'normalize_and_project',
    'reparam.roles': 'hidden+readout',
}

# Choices that ask for another one.
NEEDS = {
    ('attention.rope_scaling', 'linear'): {'attention.rope_factor': 2.0},
    ('attention.rope_scaling', 'llama3'): {'attention.rope_factor': 2.0},
    ('attention.rope_scaling', 'yarn'): {'attention.rope_factor': 2.0},
    ('attention.rope_scaling', 'longrope'): {
        'attention.rope_short_factor': '1,1,1,1.5',
        'attention.rope_long_factor': '1,1.5,2,4',
    },
    ('kernels.attention', 'cudnn'): {'model.dtype': 'bfloat16'},
    ('kernels.implementation', 'cudnn'): {'model.dtype': 'bfloat16'},
    ('kernels.linear_attention', 'chunked'): {'model.attention': 'linear'},
    ('kernels.linear_attention', 'quadratic'): {'model.attention': 'linear'},
    ('kernels.recurrence', 'chunked'): {'model.attention': 'gla'},
    ('kernels.recurrence', 'reference'): {'model.attention': 'gla'},
    ('kernels.softmax', 'pallas'): {'kernels.attention': 'reference'},
    ('kernels.softmax', 'reference'): {'kernels.attention': 'reference'},
    ('optim.match_norm_roles', 'hidden+readout'): {'optim.match_norm': 1.0},
    ('optim.weight_rounding', 'nearest'): {'optim.weight_dtype': 'bfloat16'},
    ('optim.average', 'outer_nesterov'): {'optim.outer_every': 10, 'train.steps': 30},
    ('model.placement', 'hybrid'): {'model.qk_norm': 'rmsnorm'},
    ('model.placement', 'hybrid_star'): {'model.qk_norm': 'rmsnorm'},
    ('attention.qk_norm_over', 'model'): {'model.qk_norm': 'rmsnorm'},
    ('attention.full_every', 2): {'attention.window': 3},
    ('attention.full_at', 1): {'attention.window': 3, 'attention.full_every': 2},
    **{
        ('train.stage_rule', rule): {'train.stages': '0.5: batch_size=4; 1:'}
        for rule in STAGE_RULES
        if rule != NO_RULE
    },
    **{
        ('scaling.name', name): {
            f'scaling.base_{size}': {'width': 8, 'depth': 1}[size] for size in row.grows
        }
        | (HYPERSPHERE if RELATIVE in row.families else {})
        for name, row in PARAMETRIZATIONS.items()
        if not row.is_absolute
    },
}


def with_needs(changes: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the changes, and the fields that their choices require."""
    needed = [NEEDS.get(change, {}) for change in changes.items()]
    return {path: value for needs in needed for path, value in needs.items()} | dict(changes)


def tiny_raw(changes: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """Returns the default config made tiny, as nested dicts, with {'model.norm': 'none', ...}
    changed.
    """
    raw = default.get_config().to_dict()
    for path, value in (TINY | dict(changes or {})).items():
        section, name = path.split('.')
        raw[section][name] = value
    return raw


def tiny_config(changes: Mapping[str, Any] | None = None) -> Config:
    return resolve(tiny_raw(changes))


def checked_config(changes: Mapping[str, Any] | None = None) -> Config:
    """Returns a config with required fields; refuses what train.py would refuse."""
    config = tiny_config(with_needs(changes or {}))
    check(config)
    return config


def tiny_model(config: Config) -> Transformer:
    return build_model(config, VOCAB, 'cpu')


@functools.cache
def tiny_learner(config: Config) -> Learner:
    return build_learner(config, VOCAB, BOS, 'cpu')


def tiny_batch(seed: int = 0, rows: int = 8, length: int = 8) -> dict[str, np.ndarray]:
    """Returns random tokens without BOS; every row is one document."""
    tokens = np.random.default_rng(seed).integers(1, VOCAB, (rows, length + 1), dtype=np.int32)
    return {'tokens': tokens, 'segments': np.ones_like(tokens)}


def packed_batch(seed: int = 0, rows: int = 8, length: int = 8) -> dict[str, np.ndarray]:
    """Returns rows with two documents, the second with different lengths, then padding."""
    batch = tiny_batch(seed, rows, length)
    for row in range(rows):
        first = 2 + row % 3
        end = 3 if row >= rows - 2 else length + 1 - row % 4
        batch['tokens'][row, 0] = batch['tokens'][row, first] = BOS
        batch['segments'][row, first:] = 2
        batch['segments'][row, end:] = 0
        batch['tokens'][row, end:] = BOS
    return batch


def program_config(config: Config) -> Config:
    """Returns a config that is the same for all configs of one program."""
    flat = flatten(config)
    return update_recipe(config, {p: flat[p] and 1 for p in RUN_PATHS if not is_off(p, flat[p])})


@functools.cache
def train_step(config: Config) -> Callable:
    """Returns a jitted step; it runs on one device and donates nothing."""
    return jax.jit(make_train_step(tiny_learner(config)))


@functools.cache
def _init(program: Config) -> Callable:
    learner = tiny_learner(program)
    return jax.jit(lambda key, hyper: init_state(learner, hyper, key))


def initial_state(config: Config, seed: int = 0) -> State:
    """Returns the state of `init_state` as NumPy arrays, which no test can change or donate.

    One program serves all numeric options.
    """
    state = _init(program_config(config))(jax.random.key(seed), make_hyper(config))
    return jax.device_get(state)


def make_training(learner: Learner, runs: int | None = None) -> Callable:
    """Returns losses(keys, hypers, batches [steps, ...]) -> (losses [steps], last state), as one
    program.

    runs: number of runs, mapped over a leading axis of keys and hypers, and over the second axis of
    batches; None: one run, without that axis.
    """
    step = make_train_step(learner)

    def run(key, hyper, batches):
        def scan_step(state, batch):
            state, metrics = step(state, batch, hyper)
            return state, metrics['loss']

        last, losses = jax.lax.scan(scan_step, init_state(learner, hyper, key), batches)
        return losses, last

    mapped = run if runs is None else jax.vmap(run, in_axes=(0, 0, 1), out_axes=(1, 0))
    return jax.jit(mapped)


def trained_on_all_devices(learner: Learner, batches: Any, hyper: Hyper) -> State:
    """Returns the state after a step with each of the batches [steps, B, ...], with rows over
    devices.
    """
    mesh, step = make_mesh(learner.recipe.mesh), make_train_step(learner)
    assert mesh.shape['data'] == len(jax.devices()) > 1

    def run(batches, hyper):
        state = init_state(learner, hyper, jax.random.key(0))
        return jax.lax.scan(
            lambda state, rows: (step(state, rows, hyper)[0], None), state, batches
        )[0]

    rows = NamedSharding(mesh, PartitionSpec(None, 'data'))
    sharded = jax.jit(
        run,
        in_shardings=(rows, replicated_sharding(mesh)),
        out_shardings=replicated_sharding(mesh),
    )
    return jax.device_get(sharded(batches, hyper))


def list_choices(paths: Sequence[str], config: Config) -> list[dict[str, Any]]:
    """Returns {field: name} for every name of the fields, except the names in `config`."""
    flat = flatten(config)
    return [{path: name} for path in paths for name in CHOICES[path].table if name != flat[path]]


def another(option: Option, value: float) -> float:
    """Returns a value within the bounds of an option, far enough from `value` to have an effect."""
    span = max(min(option.maximum, 1.0) - max(option.minimum, 0.0), 0.0) or option.minimum
    step = 0.1 * span if value >= 0.1 * span else 0.01 * span
    if int(value) == value and option.maximum == math.inf:  # a number of steps
        step = 5.0
    return value - step if value + step > option.maximum else value + step


def stack(trees: list[Any]) -> Any:
    """Stacks runs as one tree with a leading axis."""
    return jax.tree.map(lambda *leaves: np.stack(leaves), *trees)


def assert_trees_close(actual: Any, expected: Any, rtol: float, atol: float) -> None:
    """Compares every leaf, and names a leaf that differs."""
    jax.tree_util.tree_map_with_path(
        lambda path, a, b: np.testing.assert_allclose(
            np.asarray(a, np.float64),
            np.asarray(b, np.float64),
            rtol=rtol,
            atol=atol,
            err_msg=jax.tree_util.keystr(path),
        ),
        actual,
        expected,
    )


def jit_train_step(learner: Learner, mesh: Mesh) -> Callable:
    """Returns the jitted step: state donated, batch sharded by rows, metrics replicated."""
    state = state_shardings(learner, mesh)
    return jax.jit(
        trace_on_mesh(mesh, make_train_step(learner)),
        in_shardings=(state, batch_sharding(mesh), replicated_sharding(mesh)),
        out_shardings=(state, replicated_sharding(mesh)),
        donate_argnums=0,
        compiler_options=step_options(mesh),
    )


def jit_eval_step(learner: Learner, mesh: Mesh) -> Callable:
    """Returns the jitted evaluation step: batch sharded by rows, sums replicated."""
    return jax.jit(
        trace_on_mesh(mesh, make_eval_step(learner)),
        in_shardings=(
            state_shardings(learner, mesh).weights,
            batch_sharding(mesh),
            replicated_sharding(mesh),
        ),
        out_shardings=replicated_sharding(mesh),
    )
