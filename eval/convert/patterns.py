"""Models with model.pattern, for families whose blocks are of one kind.

A family may have full layers between layers with a window, another base of RoPE in these, or no
RoPE in every n-th layer. Blocks that differ in no other way are one kind with such options.
"""

from collections.abc import Mapping
from typing import Any

import numpy as np

from lm.config.pattern import PATTERN
from lm.config.recipe import Recipe, build_recipe, update_config
from lm.config.resolve import drop_unread_options
from lm.model.pattern import block_groups, block_stacks
from modules.attention.softmax import is_full
from modules.positions import SCALINGS_BY_OPTION

WINDOW, BASE = 'attention.window', 'attention.rope_base'
# Options that say which layers have another window, base or none.
LAYER_OPTIONS = ('window', 'full_every', 'full_at', 'rope_base', 'rope_local_base', 'no_rope_every')


def merge_kinds(recipe: Recipe) -> Recipe:
    """Returns the recipe of the same model without pattern, whose blocks are of one kind.

    Raises ValueError if the kinds of its blocks differ in other ways than the layers of a family.
    """
    if not recipe.is_mixed:
        return recipe
    layers = recipe.layers
    effects = [_describe(kind, number) for number, kind in enumerate(layers, 1)]
    is_full_L = [effect[WINDOW] is None for effect in effects]
    turns_L = [effect[BASE] is not None for effect in effects]
    changes: dict[str, Any] = dict.fromkeys(f'attention.{name}' for name in LAYER_OPTIONS) | {
        PATTERN: None
    }
    windows = [effect[WINDOW] for effect in effects if effect[WINDOW] is not None]
    if windows:
        changes[WINDOW] = windows[0]
    if windows and any(is_full_L):
        n, place = _find_period(is_full_L)
        changes |= {'attention.full_every': n, 'attention.full_at': place}
    if any(turns_L) and not all(turns_L):
        changes['attention.no_rope_every'] = _find_period([not turns for turns in turns_L])[0]
    bases = {full: e[BASE] for full, e in zip(is_full_L, effects, strict=True) if e[BASE]}
    changes[BASE] = bases.get(True, bases.get(False))
    if len({*bases.values()}) > 1:
        changes['attention.rope_local_base'] = bases[False]
    # Scaled frequencies are those of full layers.
    turning = [kind for kind, turns in zip(layers, turns_L, strict=True) if turns]
    full = [kind for kind in turning if kind.attention.options.get('window') is None]
    source = (full or turning or layers)[0]
    merged = drop_unread_options(build_recipe(update_config(source.config, changes)))
    for number, effect in enumerate(effects, 1):
        same = _describe(merged, number)
        differing = [path for path in same | effect if same.get(path) != effect.get(path)]
        if differing:
            raise ValueError(
                f'no family of transformers has the blocks of {PATTERN}={recipe.model.pattern}: '
                f'in block {number}, {" and ".join(differing[:3])} would differ. The layers of a '
                'family are equal except for a window in all but every n-th, another base of rope '
                'where there is a window, and no rope in every n-th.'
            )
    return merged


def merge_if_alike(recipe: Recipe) -> Recipe:
    """Returns `merge_kinds(recipe)`, or the recipe itself if its blocks differ in other ways."""
    try:
        return merge_kinds(recipe)
    except ValueError:
        return recipe


def _describe(kind: Recipe, number: int) -> dict[str, Any]:
    """Returns what block `number` of a kind computes: rows and options, as they apply to it."""
    described: dict[str, Any] = {}
    attention, position = kind.attention.options, kind.position.options
    for part in (kind.attention, kind.mlp, kind.position, kind.placement):
        described[part.path] = part.name
        options = {name: value for name, value in part.options.items() if name not in LAYER_OPTIONS}
        described |= {f'{part.section}.{name}': value for name, value in options.items()}
    full = is_full(number, **attention)
    described[WINDOW] = None if full else attention.get('window')
    base, period = position.get('rope_base'), position.get('no_rope_every')
    if position.get('rope_local_base') is not None and not full:
        base, described['attention.rope_scaling'] = position['rope_local_base'], 'none'
    if described.get('attention.rope_scaling') == 'none':
        unread = {f'attention.{name}' for name in SCALINGS_BY_OPTION}
        described = {path: value for path, value in described.items() if path not in unread}
    if period and number % period == 0:  # without rope, its options do nothing
        position_paths = {f'{kind.position.section}.{name}' for name in position}
        described = {path: value for path, value in described.items() if path not in position_paths}
        base, described['model.position'] = None, 'none'
    return described | {BASE: base}


def _find_period(chosen: list[bool]) -> tuple[int | None, int | None]:
    """Returns (n, place) if every n-th entry is chosen, counted from 1; place is 0 for the last."""
    for n in range(2, len(chosen) + 1):
        for place in range(n):
            if chosen == [i % n == place for i in range(1, len(chosen) + 1)]:
                return n, place
    return None, None


def stack_layers(params: Mapping[str, np.ndarray], recipe: Recipe) -> dict[str, np.ndarray]:
    """Returns parameters by path with those of all blocks stacked in their order.

    Args:
      params: of a model, by path.
      recipe: of the model; `merge_kinds` accepts it.
    """
    stacks, name = block_stacks(recipe), block_groups(recipe)[0].name
    order = np.argsort([number for stack in stacks for number in stack.numbers])
    parts: dict[str, list[np.ndarray]] = {}
    for stack in stacks:
        for path, array in params.items():
            if path.startswith(f'{stack.path}/'):
                parts.setdefault(path.removeprefix(f'{stack.path}/'), []).append(array)
    joined = {f'{name}/{path}': np.concatenate(p)[order] for path, p in parts.items()}
    prefixes = tuple(f'{stack.path}/' for stack in stacks)
    return {p: x for p, x in params.items() if not p.startswith(prefixes)} | joined
