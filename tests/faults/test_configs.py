"""Random configs, most of them odd: each trains, diverges cleanly, or is refused by a
field's name.
"""

import contextlib
import math
import random
import re
import types
from typing import Any

import jax
import numpy as np
import pytest

from lm.config.fields import FIELDS, Config
from lm.config.resolve import build_config, resolve
from lm.devices.check_mesh import check_devices
from lm.devices.mesh import make_mesh
from lm.model.check import check
from lm.run.start import check_run
from lm.training.guard import MUST_BE_FINITE
from lm.training.state import check_learner, make_hyper
from modules.options import declared_options
from tests.helpers import initial_state, tiny_batch, tiny_learner, tiny_raw, train_step
from train import DIVERGED, DONE, train

FIXED = {  # what a draw leaves alone: text that is there, and what takes long
    'data.source': 'synthetic:markov',
    'data.mixture': None,
    'data.tokenizer': 'byte',
    'data.text_field': 'text',
    'data.epochs': 1000,
    'data.prefetch': 2,
    'train.steps': 2,
    'train.eval_batches': 1,
}
SMALL = {  # numbers that a run of two steps can have, and that go together
    'model.d_model': (8, 12, 16, 32),
    'model.n_layers': (1, 2, 3),
    'model.n_heads': (1, 2, 4),
    'model.n_kv_heads': (1, 2),
    'model.d_ff': (8, 16, 24),
    'data.seq_len': (4, 8, 15),
    'data.batch_size': (8, 16, 24),
    'train.microbatches': (1, 2, 3),
    'mesh.data': (1, 8, -1),
    'mesh.fsdp': (1, 1, 2, -1),
    'mesh.tensor': (1, 1, 2),
    'mesh.context': (1, 1, 4),
    'mesh.expert': (1, 1, 2),
    'mesh.run': (-1, 1),
    'mlp.n_experts': (2, 4),
    'mlp.experts_per_token': (1, 2),
    'norm.groups': (1, 2, 4),
    'norm.heads': (1, 2),
    'norm.rank': (1, 4),
    'norm.ghost_batches': (1, 2, 4),
    'norm.window': (1, 3),
    'optim.lr': (0.0, 1e-3, 0.1, 10.0),
    'optim.weight_decay': (0.0, 0.1, 10.0),
    'scaling.init_scale': (0.0, 0.5, 1.0, 30.0),
    'data.validation_fraction': (0.02, 0.5),
}
ODD = {
    int: (-1, 0, 1, 3, 7, 2**31, 10**9 + 7, 10**12, 10**30),
    float: (-1.0, 0.0, 1e-30, 0.5, 2.0, 1e30, 1e300, math.inf, -math.inf, math.nan, 1),
    str: ('', 'none', 'auto', 'qqq', 'a+b', 'rmsnorm:', 'rmsnorm:eps=', 'rmsnorm:eps=0',
          'unified:window=1,warmup=0', 'rmsnorm+layernorm', 'rmsnorm,layernorm', 'nowhere'),
    bool: (True, False),
    types.NoneType: (None,),
}  # fmt: skip


def draw_value(rng: random.Random, path: str) -> Any:
    """Returns a value that is valid for the field by itself."""
    field = FIELDS[path]
    if types.NoneType in field.types and rng.random() < 0.3:
        return None
    if path in SMALL:
        return rng.choice(SMALL[path])
    if field.choice:
        return draw_name(rng, path)
    if field.option and field.option.choices:
        return rng.choice(field.option.choices)
    if bool in field.types:
        return rng.random() < 0.5
    if str in field.types:
        return ''
    return draw_number(rng, field)


def draw_number(rng: random.Random, field: Any) -> int | float:
    """Returns a number within the bounds; the bounds themselves are likely."""
    minimum = field.option.minimum if field.option else 0
    maximum = field.option.maximum if field.option else 10
    if int in field.types:
        return rng.choice([int(minimum), int(minimum) + 1, int(min(maximum, 5))])
    return rng.choice([minimum, rng.uniform(minimum, min(maximum, 1.0)), min(maximum, 1e6)])


def draw_name(rng: random.Random, path: str) -> str:
    choice = FIELDS[path].choice
    name = rng.choice([*choice.table, *(['auto'] if choice.auto else [])])
    if choice.several and rng.random() < 0.3:
        return f'{name}+{rng.choice([*choice.table])}'
    part_options = declared_options(choice.table.get(name, {}))
    if choice.inline and part_options and rng.random() < 0.3:
        option = rng.choice([*part_options])
        return f'{name}:{option}={draw_value(rng, f"{choice.section}.{option}")}'
    return name


def draw(rng: random.Random, odd: float) -> dict[str, Any]:
    """Returns {path: value} for some fields; each is odd with probability `odd`."""
    paths = [path for path in FIELDS if path not in FIXED and path != 'data.cache_dir']
    of_parts = [path for path in paths if FIELDS[path].is_part_option]
    chosen = rng.sample([p for p in paths if p not in of_parts], rng.randrange(1, 14))
    chosen += rng.sample(of_parts, rng.choice([0, 0, 1, 2]))
    values = {path: draw_value(rng, path) for path in chosen}
    return {p: draw_odd(rng, p) if rng.random() < odd else v for p, v in values.items()}


def draw_odd(rng: random.Random, path: str) -> Any:
    """Returns a value that is mostly of the field's type."""
    kinds = FIELDS[path].types if rng.random() < 0.8 else ODD
    return rng.choice(ODD[rng.choice([*kinds])])


def refusal(changes: dict[str, Any]) -> str | Config:
    """Returns the config, or the ValueError that refuses it."""
    try:
        config = resolve(tiny_raw(FIXED | changes))
        check(config)
        check_run(config)
        check_devices(config, make_mesh(config.mesh))
        return config
    except ValueError as error:
        return str(error)


def names_a_field(message: str) -> bool:
    """Returns whether a message names a field, or a part that a section lacks."""
    return any(path in FIELDS for path in re.findall(r'[a-z]+\.\w+', message))


@pytest.mark.trials(short=2, long=50)
def test_configs_resolve_or_name_a_field(trial):
    """Three hundred configs per trial. Nothing is traced, and each takes little time."""
    rng, n_accepted = random.Random(trial), 0
    for _ in range(300):
        changes = draw(rng, odd=rng.choice([0.0, 0.1, 0.5]))
        resolved = refusal(changes)
        if isinstance(resolved, str):
            assert names_a_field(resolved), (changes, resolved)
        else:
            n_accepted += 1
            assert build_config(tiny_raw(FIXED | changes)), changes
    assert 10 < n_accepted < 290


def draw_accepted(rng: random.Random, cache_dir: str) -> tuple[dict[str, Any], Config]:
    """Returns the first accepted draw: (changes, config)."""
    while True:
        changes = draw(rng, odd=0.03) | {'data.cache_dir': cache_dir}
        if not isinstance(config := refusal(changes), str):
            return changes, config


@contextlib.contextmanager
def late_refusal(changes: dict[str, Any]):
    """Building may still raise a ValueError that names a field, and nothing else."""
    try:
        yield
    except ValueError as error:
        assert names_a_field(str(error)), (changes, str(error))
    except Exception as error:
        raise AssertionError(f'{changes}: {type(error).__name__}: {error}') from error


@pytest.mark.full
@pytest.mark.trials(short=2, long=100)
def test_accepted_configs_make_steps(trial, tmp_path):
    """Two steps on one device: finite, or with metrics that report otherwise."""
    changes, config = draw_accepted(random.Random(5000 + trial), str(tmp_path))
    with late_refusal(changes):
        check_learner(tiny_learner(config))
        state, hyper = initial_state(config), make_hyper(config)
        rows, length = config.data.batch_size, config.data.seq_len
        for seed in range(2):
            batch = tiny_batch(seed, rows, length)
            state, metrics = train_step(config)(state, batch, hyper)
        is_reported_finite = all(np.isfinite(metrics[name]) for name in MUST_BE_FINITE)
        held = all(np.isfinite(w).all() for w in jax.tree.leaves(state.params))
        assert held or not is_reported_finite, changes
    train_step.cache_clear()


@pytest.mark.full
@pytest.mark.trials(short=1, long=50)
def test_accepted_configs_train_or_diverge(trial, tmp_path):
    """Two steps of the program, on one device or eight."""
    changes, config = draw_accepted(random.Random(2000 + trial), str(tmp_path / 'cache'))
    with late_refusal(changes):
        assert train(config, tmp_path / 'run') in (DONE, DIVERGED), changes
    jax.clear_caches()
