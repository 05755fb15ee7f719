"""The table of the stages of a run that is printed before it trains, and notes on them."""

from collections.abc import Iterator

import numpy as np

from lm.config.recipe import Recipe
from lm.config.stages import token_steps
from modules.options import declared_options
from modules.scaling.transfer import SettingFactors


def stage_rows(recipe: Recipe) -> list[dict[str, str]]:
    """Returns a row for each stage of the run: steps, tokens, batch, mixture and factors."""
    rows = []
    for number, stage in enumerate(recipe.stages, start=1):
        shape, factors = stage.shape, stage.factors
        row = {
            'stage': str(number),
            'steps': f'{stage.start + 1:,} to {stage.stop:,}',
            'tokens': f'{stage.start_tokens:,} to {stage.stop_tokens:,}',
            'batch': f'{shape.batch_size:,} x {shape.seq_len:,}',
            'parts': str(shape.microbatches),
        }
        if recipe.data.mixture is not None:
            weights = stage.weights or {}
            total = sum(weights.values())
            shares = [f'{name} {weight / total:.3g}' for name, weight in weights.items()]
            row['mixture'] = ', '.join(shares) or 'data.mixture'
        rows.append(row | {'lr': f'x {factors.lr:.4g}'} | _other_factors(recipe, factors))
    return rows


def _other_factors(recipe: Recipe, factors: SettingFactors) -> dict[str, str]:
    """Returns the factors other than that of the learning rate, if a stage has them."""
    by_stage = [stage.factors for stage in recipe.stages]
    columns = {
        'weight decay': (factors.weight_decay, any(f.weight_decay != 1 for f in by_stage)),
        '1 - b2': (factors.memory, any(f.memory != 1 for f in by_stage)),
        'eps': (factors.eps, any(f.eps != 1 for f in by_stage)),
    }
    return {title: f'x {x:.4g}' for title, (x, is_changed) in columns.items() if is_changed}


def list_stage_notes(recipe: Recipe) -> Iterator[str]:
    """Yields notes on lengths in steps of schedules, which count tokens if batches differ."""
    stages = recipe.stages
    if len({stage.shape.tokens for stage in stages}) == 1:
        return
    counted = np.asarray(token_steps(stages, np.arange(recipe.train.steps + 1)))
    lengths = {
        recipe.schedule.option_path(name): recipe.schedule.options[name]
        for name, declared in declared_options(recipe.schedule.row).items()
        if declared.option.time_unit == 'steps'
    }
    lengths['optim.momentum_warmup_steps'] = recipe.optim.momentum_warmup_steps
    for path, length in lengths.items():
        if length and length <= recipe.train.steps:
            last = int(np.searchsorted(counted, length))
            tokens = length * recipe.mean_batch_tokens
            yield (
                f'train.stages: {path}={length} is {tokens:,.0f} tokens, '
                f'which end in step {last:,}: schedules count tokens, in steps of the mean batch'
            )
