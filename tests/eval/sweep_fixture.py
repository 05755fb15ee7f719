"""Writes the files that train.py leaves of a sweep, in closed form, so that tests know every
number.

    python -m tests.eval.sweep_fixture DIR     writes a large one, to look at its report

Final losses are `final_ce`, a parabola in log10(lr) with a known best learning rate. Some cells end
otherwise: `FATES`.
"""

import copy
import hashlib
import itertools
import json
import math
import sys
from pathlib import Path
from typing import Any

from configs import default
from lm.config.resolve import resolve, to_dict
from lm.study.tables.comparison import Comparison, compare
from lm.study.tables.results import gather, read_sweep

NORMS = ('rmsnorm', 'layernorm')
LRS = (0.001, 0.003, 0.01, 0.03)
SEEDS = (0, 1, 2)
STEPS, LAYERS = 200, 4
INITIAL_CE, BYTES_PER_TOKEN = 8.25, 3.0
AXES = {'model.norm': NORMS, 'optim.lr': LRS, 'train.seed': SEEDS}
FATES = {  # (norm, lr, seed): how that cell ends, in a sweep of AXES
    ('layernorm', 0.03, 0): 'diverged',
    ('rmsnorm', 0.03, 2): 'failed',
    ('layernorm', 0.01, 2): 'unfinished',
    ('layernorm', 0.03, 2): 'waiting',
}
BY_LAYER = {'activation_rms': 1.0, 'attention_logit_max': 4.0, 'update_rms_ratio': 1e-3}


def base_config() -> dict[str, Any]:
    """Returns the baseline: the default config with the first value of each axis."""
    base = to_dict(resolve(default.get_config()))
    return update_config(base, {path: values[0] for path, values in AXES.items()})


def update_config(base: dict[str, Any], changes: dict[str, Any]) -> dict[str, Any]:
    config = copy.deepcopy(base)
    for path, value in changes.items():
        section, name = path.split('.')
        config[section][name] = value
    config['train']['steps'] = STEPS
    return config


def final_ce(config: dict[str, Any]) -> float:
    """Returns the final validation loss.

    It is lowest at lr 0.003, 0.08 higher with layernorm, 0.01 lower per seed, and 0.002 higher for
    seed 2, so that differences between seeds differ.
    """
    seed, norm = config['train']['seed'], config['model']['norm']
    decades = math.log10(config['optim']['lr'] / 0.003)
    penalty = 0.08 * (norm == 'layernorm') + 0.03 * (config['model']['placement'] == 'post')
    jitter = 0.002 * (seed == 2) * (norm == 'layernorm')
    return 2.9 + 0.2 * decades**2 + penalty - 0.01 * seed + jitter


def training_ce(config: dict[str, Any], step: int) -> float:
    """Returns a loss that falls from INITIAL_CE at step 1 to `final_ce`, with a ripple."""
    final = final_ce(config)
    ripple = 0.03 * math.sin(1.7 * step + config['train']['seed']) * (step > 1)
    return final + (INITIAL_CE - final) * math.exp(-(step - 1) / (0.12 * STEPS)) + ripple


def rows(config: dict[str, Any], until: int, broken: bool) -> list[dict[str, Any]]:
    """Returns training rows every 5 steps, validation and per-layer rows every 40."""
    records = []
    for step in [1, *range(5, until + 1, 5)]:
        ce = None if broken and step == until else training_ce(config, step)
        row = {'step': step, 'loss': ce, 'ce': ce, 'z_loss': 0.001, 'lr': config['optim']['lr']}
        row |= {'grad_norm': 1.0, 'update_norm': 0.1, 'tokens': 2048 * step}
        row |= {'tokens_per_sec': 13000.0 + 100 * config['train']['seed'], 'mfu': 0.5}
        records.append(row | {'step_sec': 0.16, 'data_wait_sec': 0.001})
        if step % 40 == 0 and not (broken and step == until):
            records.append({'step': step} | validation(config, step))
        if step == 1 or step % 40 == 0:
            records.append({'step': step} | by_layer(config, step))
    return records


def validation(config: dict[str, Any], step: int) -> dict[str, float]:
    excess = (INITIAL_CE - final_ce(config)) * math.exp(-step / (0.12 * STEPS))
    ce = final_ce(config) + (excess if step < STEPS else 0.0)
    per_byte = ce / math.log(2) / BYTES_PER_TOKEN
    return {'validation_ce': ce, 'bits_per_byte': per_byte, 'perplexity': math.exp(ce)}


def by_layer(config: dict[str, Any], step: int) -> dict[str, list[float]]:
    """Returns values that grow with depth and with time, faster with layernorm."""
    speed = 0.6 if config['model']['norm'] == 'layernorm' else 0.3
    depths = range(LAYERS)
    return {
        name: [scale * (1 + speed * i * step / STEPS + 0.1 * i) for i in depths]
        for name, scale in BY_LAYER.items()
    }


def summary(config: dict[str, Any], fate: str, until: int) -> dict[str, Any]:
    record = {
        'status': fate,
        'step': until,
        'tokens': 2048 * until,
        'parameters': 4_458_624,
        'optimizer_state_bytes': 35_668_996,
        'compile_sec': 2.7,
        'wall_sec': 33.25,
        'git_commit': 'f92bf91',
        'device': '2-core x86_64 CPU',
        'versions': {'jax': '0.12'},
    }
    if fate == 'failed':
        return record | {'step': 0, 'tokens': 0, 'reason': "<b>out of memory</b> at 'step' 1 | oom"}
    record['tokens_per_sec_mean'] = 13000.0 + 100 * config['train']['seed']
    if fate == 'diverged':
        return record | {'diverged_step': until, 'reason': f'step {until}: loss nan', 'ce': None}
    last = validation(config, until)
    best = {'best_validation_ce': last['validation_ce'], 'best_step': until}
    best['best_bits_per_byte'] = last['bits_per_byte']
    train_ce = training_ce(config, until)
    return record | last | best | {'ce': train_ce, 'validated_step': until}


def write_run(folder: Path, config: dict[str, Any], fate: str = 'done') -> None:
    folder.mkdir(parents=True)
    (folder / 'config.json').write_text(json.dumps(config))
    until = {'done': STEPS, 'diverged': 60, 'unfinished': 120, 'failed': 0}[fate]
    lines = [json.dumps(row) for row in rows(config, until, fate == 'diverged') if until]
    text = ''.join(line + '\n' for line in lines)
    if fate == 'unfinished':
        text += '{"step": 125, "loss": 3.1'  # the machine writes while we read
    (folder / 'metrics.jsonl').write_text(text)
    if fate != 'unfinished':
        (folder / 'summary.json').write_text(json.dumps(summary(config, fate, until)))


def write_sweep(
    folder: Path, axes: dict[str, tuple] = AXES, fates: dict[tuple, str] = FATES
) -> list[dict[str, Any]]:
    """Writes the sweep and returns its cells, as in sweep.json."""
    folder.mkdir(parents=True)
    base, cells = base_config(), []
    for values in itertools.product(*axes.values()):
        changes = dict(zip(axes, values, strict=True))
        config = update_config(base, changes)
        name = hashlib.sha256(json.dumps(config).encode()).hexdigest()[:8]
        cells.append({'cell': name, 'group': 0, 'changes': changes, 'differs': changes})
        fate = fates.get(values, 'done')
        if fate != 'waiting':
            write_run(folder / name, config, fate)
    sweep = {'base': base, 'axes': {k: list(v) for k, v in axes.items()}, 'cells': cells}
    (folder / 'sweep.json').write_text(json.dumps(sweep))
    return cells


def compare_sweep(folder: Path) -> list[Comparison]:
    return compare(gather(folder), read_sweep(folder))


if __name__ == '__main__':
    large = {'model.norm': NORMS, 'model.placement': ('pre', 'peri', 'post')}
    large |= {'optim.lr': (0.001, 0.002, 0.004, 0.008, 0.016, 0.032), 'train.seed': (0, 1, 2, 3)}
    ends = {('rmsnorm', 'post', 0.032, seed): 'diverged' for seed in range(4)}
    ends |= {('layernorm', 'post', 0.032, seed): 'diverged' for seed in range(2)}
    ends |= {('layernorm', 'post', 0.016, 3): 'failed', ('layernorm', 'peri', 0.004, 3): 'waiting'}
    ends[('layernorm', 'peri', 0.032, 2)] = 'unfinished'
    write_sweep(Path(sys.argv[1]), large, ends)
