"""How the sizes of activations, and of their changes, follow from the size of the model."""

import base64
import io
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from eval.stats import t_interval
from lm.activations import by_name
from lm.base_model import resized
from lm.check import check
from lm.config import replaced
from lm.diagnostics import sown_by_layers
from lm.model import ACTIVATIONS
from lm.recipe import Recipe
from lm.state import build_learner, hyper_from, init_state
from lm.step import make_train_step
from modules.optim import SCHEDULES
from modules.options import options
from modules.statistics import DIAGNOSTICS

VOCAB, BOS = 32, 0
SIZE, CHANGE = 'size', 'change'
GROWS, SHRINKS, FLAT, NOT_FINITE = 'grows', 'shrinks', 'flat', 'not finite'
LOGITS, ATTENTION_LOGITS = 'logits', 'attention logits'
LEAST_OF_NOISE = -0.5  # the slope of a sum of as many independent terms as the width, over it


class Slope(NamedTuple):
    """Of log size against log width (or depth): value, and half of its 95% interval over seeds.

    least: as far as it may shrink, where that is no sign of a rule that is wrong.
    """

    activation: str
    of: str
    value: float
    spread: float
    sizes: np.ndarray  # [seeds, widths]
    least: float = 0.0

    def verdict(self, tolerance: float) -> str:
        """Flat unless the whole interval is outside of +-tolerance."""
        if not math.isfinite(self.value):
            return NOT_FINITE
        if self.value - self.spread > tolerance:
            return GROWS
        return SHRINKS if self.value + self.spread < -tolerance else FLAT

    def fails(self, tolerance: float) -> bool:
        found = self.verdict(tolerance)
        too_small = found == SHRINKS and self.value + self.spread < self.least - tolerance
        return found in (GROWS, NOT_FINITE) or too_small


def least_slope(along: str, activation: str, of: str) -> float:
    """How far it may fall: logits, of the model and of attention, as sums of independent terms over
    their number do; with depth all sizes, since what blocks add at the start is independent too.
    """
    is_logits = activation == LOGITS or activation.startswith(ATTENTION_LOGITS)
    return LEAST_OF_NOISE if is_logits or (along == 'depth' and of == SIZE) else 0.0


def sized(recipe: Recipe, along: str, value: int) -> Recipe:
    """The config with another width or depth, at the peak of its rates from the first step on;
    ValueError where it cannot have that.

    Heads grow in number, or, where scaling.base_heads is given, in width.
    """
    of_schedules = {f'optim.{name}': None for row in SCHEDULES.values() for name in options(row)}
    at_peak = {'optim.schedule': 'constant', 'optim.warmup_steps': 0}
    recipe = replaced(recipe, of_schedules | at_peak)
    if along == 'depth':
        found = replaced(recipe, {'model.n_layers': value})
    else:
        heads = recipe.model.n_heads if recipe.config.scaling.base_heads else None
        found = resized(recipe, value, heads)
    check(found)
    return found


def batch_of(recipe: Recipe) -> dict[str, jax.Array]:
    """Random tokens, frequent and rare ones, each row one document: the same at every size."""
    rows, length = recipe.data.batch_size, recipe.data.seq_len
    shares = 1 / np.arange(1, VOCAB)
    tokens = np.random.default_rng(0).choice(VOCAB - 1, (rows, length + 1), p=shares / sum(shares))
    tokens = jnp.asarray(tokens + 1, jnp.int32)
    return {'tokens': tokens, 'segments': jnp.ones_like(tokens)}


def sizes_of(
    recipe: Recipe, seeds: int, steps: int, places: int
) -> dict[tuple[str, str], np.ndarray]:
    """{(activation, size or change): [seeds]}: mean |x| after the steps, or of what they changed.

    The stream behind each sublayer is one activation at each of `places` evenly spaced blocks, the
    last of which is the last block; so are the logits of attention, of which there is the size
    alone.
    """
    learner = build_learner(recipe, VOCAB, BOS, jax.default_backend())
    train_step, hyper, batch = make_train_step(learner), hyper_from(recipe), batch_of(recipe)
    inputs_BT = batch['tokens'][:, :-1]

    def at_places(name, x_L):
        blocks = [len(x_L) * (i + 1) // places - 1 for i in range(places)]
        return {f'{name} {i + 1}/{places}': x_L[block] for i, block in enumerate(blocks)}

    def activations(weights):
        logits_BTV, filled = learner.model.apply(
            learner.variables(weights), inputs_BT, mutable=(ACTIVATIONS, DIAGNOSTICS)
        )
        found = by_name(recipe, filled[ACTIVATIONS])
        named = {name: x for name, x in found.items() if x.ndim == 3}
        for name, x_LBTD in found.items():
            if x_LBTD.ndim == 4:
                named |= at_places(name, x_LBTD)
        sown = sown_by_layers(learner, filled[DIAGNOSTICS])
        size_LN = sown.get('attention_logit_size')
        of_attention = {} if size_LN is None else at_places(ATTENTION_LOGITS, size_LN)
        return named | {LOGITS: logits_BTV}, of_attention

    def run(key):
        state = init_state(learner, hyper, key)
        first, _ = activations(state.weights)
        state, _ = jax.lax.scan(
            lambda state, _: (train_step(state, batch, hyper)[0], None), state, length=steps
        )
        last, of_attention = activations(state.weights)
        found = {(name, SIZE): jnp.mean(jnp.abs(x)) for name, x in (last | of_attention).items()}
        return found | {
            (name, CHANGE): jnp.mean(jnp.abs(x - first[name])) for name, x in last.items()
        }

    keys = jax.vmap(jax.random.key)(jnp.arange(seeds))
    return jax.device_get(jax.jit(lambda keys: jax.lax.map(run, keys))(keys))


def slopes(
    recipe: Recipe,
    along: str,
    values: Sequence[int],
    seeds: int,
    steps: int,
    said: Callable[[str], None] = lambda line: None,
) -> list[Slope]:
    """Of each activation that all sizes have; ValueError for fewer than two sizes."""
    if len(set(values)) < 2:
        raise ValueError(f'a slope needs two {along}s and better four; got {list(values)}')
    at = [sized(recipe, along, value) for value in values]
    each, places = [], min(one.model.n_layers for one in at)
    for value, one in zip(values, at, strict=True):
        each.append(sizes_of(one, seeds, steps, places))
        said(f'{along} {value}')
    found, logs = [], np.log(values)
    for name, of in sorted(set.intersection(*map(set, each))):
        sizes = np.stack([one[name, of] for one in each], axis=1)
        by_seed = np.full(seeds, math.nan)
        if np.isfinite(sizes).all():
            by_seed = np.polyfit(logs, np.log(np.maximum(sizes, 1e-30)).T, 1)[0]
        over = t_interval(by_seed)
        spread = over.half if seeds > 1 else 0.0
        found.append(Slope(name, of, over.mean, spread, sizes, least_slope(along, name, of)))
    return found


def rows_of(found: Sequence[Slope], tolerance: float) -> list[dict[str, str]]:
    return [
        {
            'activation': slope.activation,
            'of': slope.of,
            'slope': f'{slope.value:+.3f} +- {slope.spread:.3f}',
            'verdict': slope.verdict(tolerance) + (' (fails)' if slope.fails(tolerance) else ''),
        }
        for slope in found
    ]


def figure(found: Sequence[Slope], along: str, values: Sequence[int]) -> Figure:
    """Sizes and changes against width or depth, both axes logarithmic, a line an activation."""
    drawn = Figure(figsize=(12, 4), layout='constrained')
    for axes, of in zip(drawn.subplots(1, 2), (SIZE, CHANGE), strict=True):
        for slope in (one for one in found if one.of == of):
            means = slope.sizes.mean(axis=0)
            axes.loglog(values, means, marker='.', label=f'{slope.activation} {slope.value:+.2f}')
        axes.set_xlabel(along)
        axes.set_title('mean |x| after the steps' if of == SIZE else 'mean |change of x|')
        axes.set_xticks(values, map(str, values))
        axes.minorticks_off()
        axes.legend(fontsize=6, frameon=False, loc='upper left', bbox_to_anchor=(1, 1))
    return drawn


def write(path: Path, title: str, drawn: Figure, rows: Sequence[Mapping[str, str]]) -> None:
    """A page with the figure and the table, or the figure alone, by the ending of the path."""
    FigureCanvasAgg(drawn)
    if path.suffix != '.html':
        drawn.savefig(path)
        return
    image = io.BytesIO()
    drawn.savefig(image, format='png', dpi=160)
    head = ''.join(f'<th>{name}</th>' for name in rows[0])
    body = ''.join(
        '<tr>' + ''.join(f'<td>{cell}</td>' for cell in row.values()) + '</tr>' for row in rows
    )
    style = 'body{font:14px sans-serif;margin:2em}td,th{padding:2px 12px;text-align:left}'
    data = base64.b64encode(image.getvalue()).decode()
    path.write_text(
        f'<!doctype html><meta charset="utf-8"><title>{title}</title><style>{style}</style>'
        f'<h1>{title}</h1><img width="1100" src="data:image/png;base64,{data}">'
        f'<table><tr>{head}</tr>{body}</table>'
    )
