"""Whether activations and their changes keep their size as a model grows.

    python -m eval.coordinates --config=configs/default.py --config.scaling.name=mup
        --config.scaling.base_width=64 --widths=64,128,256,512 [--depths=2,4,8] [--out=page.html]

Trains a few steps on one random batch at each width, from several seeds, at the peak of the
learning rate, and fits the slope of log size against log width for each activation and for its
change since the start. A parametrisation that keeps its learning rate has slopes near 0
(arXiv:2203.03466, appendix D.1). Exit status 1 where an activation or its change grows, shrinks or
is no number; logits may shrink as the noise in a mean does, and with depth so may sizes.
"""

from lm.launch.before_jax import default_dtype, prepare_process

if __name__ == '__main__':
    prepare_process()  # before JAX is imported

import math
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import altair as alt
import jax
import jax.numpy as jnp
import numpy as np
from absl import app, flags
from rich.console import Console

from eval.charts import FAIL_COLOUR, PASS_COLOUR, Chart, save_chart, write_page
from lm.config.recipe import Recipe
from lm.config.resolve import resolve, update_recipe, with_dtype
from lm.inference.probes import join_blocks
from lm.launch.command import define_config, parse_flags, run_main
from lm.launch.path_flags import define_path
from lm.model.check import check
from lm.model.transformer import ACTIVATIONS
from lm.run.tables import make_table
from lm.study.plan.cells import split_sweep
from lm.study.statistics import t_interval
from lm.training.diagnostics import join_sown
from lm.training.state import build_learner, init_state, make_hyper
from lm.training.step import make_train_step
from modules.optim import SCHEDULES
from modules.options import declared_options
from modules.statistics import DIAGNOSTICS

VOCAB, BOS = 32, 0
SIZE, CHANGE = 'size', 'change'
GROWS, SHRINKS, FLAT, NOT_FINITE = 'grows', 'shrinks', 'flat', 'not finite'
LOGITS, ATTENTION_LOGITS = 'logits', 'attention logits'
MIN_SIZES, MIN_SPAN = 3, 4  # below, a line through two points, or through noise
NOISE_SLOPE = -0.5  # the slope of a sum of as many independent terms as the width, over it


class Slope(NamedTuple):
    """The slope of log size against log width (or depth), and half of its 95% interval over seeds.

    least: as far as it may shrink, where that is no sign of a rule that is wrong.
    """

    activation: str
    quantity: str
    value: float
    spread: float
    sizes: np.ndarray  # [seeds, widths]
    lower_limit: float = 0.0

    def verdict(self, tolerance: float) -> str:
        """Flat unless the whole interval is outside of +-tolerance."""
        if not math.isfinite(self.value):
            return NOT_FINITE
        if self.value - self.spread > tolerance:
            return GROWS
        return SHRINKS if self.value + self.spread < -tolerance else FLAT

    def is_failure(self, tolerance: float) -> bool:
        found = self.verdict(tolerance)
        too_small = found == SHRINKS and self.value + self.spread < self.lower_limit - tolerance
        return found in (GROWS, NOT_FINITE) or too_small


def lower_slope_limit(dimension: str, activation: str, quantity: str) -> float:
    """The least slope that is no failure. Logits, of the model and of attention, may fall as sums
    of independent terms over their number do; with depth so may all sizes, since what blocks add
    at the start is independent too.
    """
    is_logits = activation == LOGITS or activation.startswith(ATTENTION_LOGITS)
    return NOISE_SLOPE if is_logits or (dimension == 'depth' and quantity == SIZE) else 0.0


def resize_recipe(recipe: Recipe, dimension: str, value: int) -> Recipe:
    """The recipe with another width or depth, at the peak of its rates from the first step on.

    Heads grow in number, or, where scaling.base_heads is given, in width. Raises ValueError where
    the recipe cannot have that size.
    """
    of_schedules = {
        f'optim.{name}': None for row in SCHEDULES.values() for name in declared_options(row)
    }
    at_peak = {'optim.schedule': 'constant', 'optim.warmup_steps': 0}
    recipe = update_recipe(recipe, of_schedules | at_peak)
    if dimension == 'depth':
        found = update_recipe(recipe, {'model.n_layers': value})
    else:
        heads = recipe.model.n_heads if recipe.config.scaling.base_heads else None
        found = update_recipe(recipe, recipe.sizes_at(value, heads))
    check(found)
    return found


def make_batch(recipe: Recipe) -> dict[str, jax.Array]:
    """Random tokens, frequent and rare ones, each row one document; the same at every size."""
    rows, length = recipe.data.batch_size, recipe.data.seq_len
    shares = 1 / np.arange(1, VOCAB)
    tokens = np.random.default_rng(0).choice(VOCAB - 1, (rows, length + 1), p=shares / sum(shares))
    tokens = jnp.asarray(tokens + 1, jnp.int32)
    return {'tokens': tokens, 'segments': jnp.ones_like(tokens)}


def measure_sizes(
    recipe: Recipe, seeds: int, steps: int, n_positions: int
) -> dict[tuple[str, str], np.ndarray]:
    """{(activation, size or change): [seeds]}: mean |x| after the steps, or of what they changed.

    The stream behind each sublayer is one activation at each of `places` evenly spaced blocks, the
    last block among them; so are the logits of attention, which have a size alone.
    """
    learner = build_learner(recipe, VOCAB, BOS, jax.default_backend())
    train_step, hyper, batch = make_train_step(learner), make_hyper(recipe), make_batch(recipe)
    inputs_BT = batch['tokens'][:, :-1]

    def select_blocks(name, x_L):
        blocks = [len(x_L) * (i + 1) // n_positions - 1 for i in range(n_positions)]
        return {f'{name} {i + 1}/{n_positions}': x_L[block] for i, block in enumerate(blocks)}

    def compute_activations(weights):
        logits_BTV, filled = learner.model.apply(
            learner.variables(weights), inputs_BT, mutable=(ACTIVATIONS, DIAGNOSTICS)
        )
        found = join_blocks(recipe, filled[ACTIVATIONS])
        named = {name: x for name, x in found.items() if x.ndim == 3}
        for name, x_LBTD in found.items():
            if x_LBTD.ndim == 4:
                named |= select_blocks(name, x_LBTD)
        size_LN = join_sown(learner, filled[DIAGNOSTICS]).get('attention_logit_size')
        of_attention = {} if size_LN is None else select_blocks(ATTENTION_LOGITS, size_LN)
        return named | {LOGITS: logits_BTV}, of_attention

    def train_seed(key):
        state = init_state(learner, hyper, key)
        first, _ = compute_activations(state.weights)
        state, _ = jax.lax.scan(
            lambda state, _: (train_step(state, batch, hyper)[0], None), state, length=steps
        )
        last, of_attention = compute_activations(state.weights)
        each = {(name, SIZE): x for name, x in (last | of_attention).items()}
        each |= {(name, CHANGE): x - first[name] for name, x in last.items()}
        return {key: jnp.mean(jnp.abs(x)) for key, x in each.items()}

    keys = jax.vmap(jax.random.key)(jnp.arange(seeds))
    return jax.device_get(jax.jit(lambda keys: jax.lax.map(train_seed, keys))(keys))


def fit_slopes(
    recipe: Recipe,
    dimension: str,
    values: Sequence[int],
    seeds: int,
    steps: int,
    say: Callable[[str], None] = lambda line: None,
) -> list[Slope]:
    """The slope of each activation that all sizes have; ValueError for fewer than two sizes."""
    if len(set(values)) < 2:
        raise ValueError(f'a slope needs two {dimension}s and better four; got {list(values)}')
    at = [resize_recipe(recipe, dimension, value) for value in values]
    each, places = [], min(one.model.n_layers for one in at)
    for value, one in zip(values, at, strict=True):
        each.append(measure_sizes(one, seeds, steps, places))
        say(f'{dimension} {value}')
    found, logs = [], np.log(values)
    for name, of in sorted(set.intersection(*map(set, each))):
        sizes = np.stack([one[name, of] for one in each], axis=1)
        by_seed = np.full(seeds, math.nan)
        if np.isfinite(sizes).all():
            by_seed = np.polyfit(logs, np.log(np.maximum(sizes, 1e-30)).T, 1)[0]
        over = t_interval(by_seed)
        spread = over.half_width if seeds > 1 else 0.0
        found.append(
            Slope(name, of, over.mean, spread, sizes, lower_slope_limit(dimension, name, of))
        )
    return found


def size_warnings(dimension: str, values: Sequence[int]) -> list[str]:
    """Says where sizes are too few, or too near, for a slope to mean much; [] if they are not."""
    span = max(values) / min(values)
    if len(set(values)) >= MIN_SIZES and span >= MIN_SPAN:
        return []
    return [
        f'{len(set(values))} {dimension}s over a factor of {span:.3g} tell little: give at least '
        f'{MIN_SIZES} over a factor of at least {MIN_SPAN}, such as 64,128,256,512.'
    ]


def format_rows(fits: Sequence[Slope], tolerance: float) -> list[dict[str, str]]:
    return [
        {
            'activation': slope.activation,
            'of': slope.quantity,
            'slope': f'{slope.value:+.3f} +- {slope.spread:.3f}',
            'verdict': slope.verdict(tolerance)
            + (' (fails)' if slope.is_failure(tolerance) else ''),
        }
        for slope in fits
    ]


def build_panels(
    fits: Sequence[Slope], dimension: str, values: Sequence[int], tolerance: float
) -> dict[str, Chart]:
    """Sizes and changes against width or depth, both axes logarithmic: a line an activation, the
    mean over seeds, each of which is a dot; those that fail in colour and named.
    """
    titles = {SIZE: 'mean |x| after the steps', CHANGE: 'mean |change of x|'}
    return {
        of: _build_panel(
            title, [one for one in fits if one.quantity == of], dimension, values, tolerance
        )
        for of, title in titles.items()
    }


def _build_panel(
    title: str, fits: Sequence[Slope], dimension: str, values: Sequence[int], tolerance: float
) -> Chart:
    rows = [
        {
            'activation': slope.activation,
            'fails': slope.is_failure(tolerance),
            dimension: value,
            'size': float(size),
            'seed': seed,
        }
        for slope in fits
        for seed, sizes in enumerate(slope.sizes)
        for value, size in zip(values, sizes, strict=True)
        if np.isfinite(size) and size > 0
    ]
    log = alt.Scale(type='log', nice=False, zero=False)
    x = alt.X(f'{dimension}:Q', scale=log, axis=alt.Axis(values=list(values), grid=False))
    y = alt.Y('size:Q', scale=log, title=None)
    by_verdict = alt.Scale(domain=[False, True], range=[PASS_COLOUR, FAIL_COLOUR])
    color = alt.Color('fails:N', scale=by_verdict, legend=None)
    base = alt.Chart(alt.Data(values=rows)).encode(x=x, detail='activation:N', color=color)
    lines = base.mark_line().encode(y=alt.Y('mean(size):Q', scale=log, title=None))
    told = [alt.Tooltip(f'{name}:N') for name in ('activation', dimension, 'size', 'seed')]
    dots = base.mark_point(filled=True, size=14, opacity=0.5).encode(y=y, tooltip=told)
    ends = base.transform_filter(
        f'datum.fails && datum.{dimension} == {max(values)} && !datum.seed'
    )
    names = ends.mark_text(align='left', dx=6).encode(y=y, text='activation:N')
    return alt.layer(lines, dots, names).properties(width=340, height=280, title=title)


def write_figures(
    path: Path,
    title: str,
    about: str,
    fits: Sequence[Slope],
    dimension: str,
    values: Sequence[int],
    tolerance: float,
) -> None:
    """Writes a page with the figure and the table, or the figure alone, by the path's ending."""
    charts = build_panels(fits, dimension, values, tolerance)
    if path.suffix != '.html':
        save_chart(alt.hconcat(*charts.values()), path)
        return
    ordered = sorted(fits, key=lambda slope: not slope.is_failure(tolerance))
    failed = sum(slope.is_failure(tolerance) for slope in fits)
    names = ', '.join(f'{slope.activation} ({slope.quantity})' for slope in ordered[:failed])
    write_page(
        path,
        charts,
        title=title,
        about=about,
        verdict=f'{failed} of {len(fits)} fail: {names}' if failed else f'All {len(fits)} pass',
        is_bad=failed > 0,
        notes=[
            *size_warnings(dimension, values),
            f'A slope within {tolerance:g} of 0 counts as none.',
        ],
        rows=format_rows(ordered, tolerance),
        failed=failed,
    )


def main(_) -> None:
    given = flags.FLAGS
    base, sweep, tune = split_sweep(with_dtype(given.config.to_dict(), default_dtype()))
    recipe = resolve(base)
    if bool(given.widths) == bool(given.depths):
        raise ValueError('give --widths=64,128,256,512 or --depths=2,4,8, and not both')
    along = 'width' if given.widths else 'depth'
    values = [int(value) for value in given.widths or given.depths]
    console = Console(stderr=True, highlight=False)
    if sweep or tune:
        console.print('the config has many runs: their base is checked')
    for line in size_warnings(along, values):
        console.print(f'NOTE: {line}')
    found = fit_slopes(recipe, along, values, given.seeds, given.steps, console.print)
    rows = format_rows(found, given.tolerance)
    Console(highlight=False).print(make_table(rows))
    title = f'{recipe.scaling}, {along} {values[0]} to {values[-1]}'
    if given.out:
        about = f'coordinate check, {given.seeds} seeds, {given.steps} steps'
        write_figures(Path(given.out), title, about, found, along, values, given.tolerance)
    failed = sum(slope.is_failure(given.tolerance) for slope in found)
    print(f'{title}: {failed} of {len(found)} fail')
    sys.exit(1 if failed else 0)


if __name__ == '__main__':  # only here: train.py has a --config too
    define_config()
    flags.DEFINE_list('widths', [], 'Values of model.d_model, smallest first.')
    flags.DEFINE_list('depths', [], 'Values of model.n_layers, in place of widths.')
    flags.DEFINE_integer('seeds', 4, 'Initial weights at each size.', lower_bound=1)
    flags.DEFINE_integer('steps', 4, 'Training steps.', lower_bound=1)
    flags.DEFINE_float('tolerance', 0.05, 'The slope that counts as none.')
    define_path('out', None, 'Page (.html) or figure (.png, .svg) to write.')
    flags.mark_flags_as_required(['config'])
    app.run(run_main(main), flags_parser=parse_flags)
