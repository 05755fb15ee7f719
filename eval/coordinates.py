"""Checks that activations and their changes keep their size as a model grows.

    python -m eval.coordinates --config=configs/default.py
        --config.scaling.name=mup --config.scaling.base_width=64
        --widths=64,128,256,512 [--out=page.html]

Trains a few steps on a random batch at each width, from several seeds, at the
peak learning rate. Fits the slope of log size against log width for each
activation and for its change since the start. A parametrisation that transfers
the learning rate has slopes near 0 (arXiv:2203.03466, appendix D.1). The exit
status is 1 if an activation or its change grows, shrinks or is not finite.
Logits, and with --depths all sizes, may shrink as n^-1/2, like the mean of
independent terms.

--by_group adds, for each group of parameters (hidden, embedding, readout, ...),
the change of the logits by the training of that group alone, with the initial
weights of all others. It tells whose learning rate has the wrong factor.
"""

from lm.launch.before_jax import default_dtype, prepare_process

if __name__ == '__main__':
    prepare_process()  # before JAX is imported

import math
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple, cast

import altair as alt
import jax
import jax.numpy as jnp
import numpy as np
from absl import flags
from rich.console import Console

from eval.charts import FAIL_COLOUR, PASS_COLOUR, save_chart, write_page
from lm.config.recipe import Recipe
from lm.config.resolve import resolve, update_recipe, with_dtype
from lm.inference.probes import join_blocks
from lm.launch.command import define_config, parse_flags, run_program
from lm.launch.path_flags import define_path
from lm.model.block import ACTIVATIONS
from lm.model.check import check
from lm.run.tables import make_table
from lm.study.plan.cells import split_sweep
from lm.study.statistics import t_interval
from lm.training.diagnostics import join_sown
from lm.training.state import build_learner, init_state, make_hyper
from lm.training.step import make_train_step
from modules.optim import SCHEDULES
from modules.optim.groups import find_group
from modules.options import declared_options
from modules.statistics import DIAGNOSTICS

VOCAB, BOS = 32, 0
SIZE, CHANGE = 'size', 'change'
GROWS, SHRINKS, FLAT, NOT_FINITE = 'grows', 'shrinks', 'flat', 'not finite'
LOGITS, ATTENTION_LOGITS = 'logits', 'attention logits'
EXAMPLE_SIZES = {'widths': '64,128,256,512', 'depths': '2,4,8'}
MIN_SIZES, MIN_SPAN = 3, 4  # with less, the line goes through two points, or through noise
ENDINGS = ('.html', '.png', '.svg')  # of --out
NOISE_SLOPE = -0.5  # of the mean of n independent terms, which shrinks as n^-1/2


class Slope(NamedTuple):
    """The slope of log size against log width or depth.

    Attributes:
      quantity: SIZE or CHANGE.
      value: mean over seeds.
      spread: half the width of its 95% interval over seeds.
      lower_limit: slopes down to this value are no sign of a wrong rule.
    """

    activation: str
    quantity: str
    value: float
    spread: float
    sizes: np.ndarray  # [seeds, widths]
    lower_limit: float = 0.0

    def verdict(self, tolerance: float) -> str:
        """Returns FLAT unless the whole interval is outside of +-tolerance."""
        if not math.isfinite(self.value):
            return NOT_FINITE
        if self.value - self.spread > tolerance:
            return GROWS
        return SHRINKS if self.value + self.spread < -tolerance else FLAT

    def is_failure(self, tolerance: float) -> bool:
        """Returns whether the size grows, shrinks below its limit, or is not finite."""
        verdict = self.verdict(tolerance)
        too_small = verdict == SHRINKS and self.value + self.spread < self.lower_limit - tolerance
        return verdict in (GROWS, NOT_FINITE) or too_small


def lower_slope_limit(dimension: str, activation: str, quantity: str) -> float:
    """Returns the smallest slope that is no failure.

    Logits of the model and of attention may shrink like the mean of independent terms. With depth
    all sizes may shrink, since the additions of blocks are independent at the start.

    Args:
      dimension: 'width' or 'depth'.
      activation: its name.
      quantity: SIZE or CHANGE.
    """
    is_logits = activation.startswith((LOGITS, ATTENTION_LOGITS))
    return NOISE_SLOPE if is_logits or (dimension == 'depth' and quantity == SIZE) else 0.0


def resize_recipe(recipe: Recipe, dimension: str, value: int) -> Recipe:
    """Returns the recipe with another width or depth, at its peak learning rate at every step.

    Args:
      recipe: the recipe to resize.
      dimension: 'depth', or 'width'. With the width the number of heads grows, or the head width if
        scaling.base_heads is set.
      value: the new size.

    Raises:
      ValueError: if the recipe cannot have that size.
    """
    no_schedule_options = {
        f'optim.{name}': None for row in SCHEDULES.values() for name in declared_options(row)
    }
    constant_peak = {'optim.schedule': 'constant', 'optim.warmup_steps': 0}
    recipe = update_recipe(recipe, no_schedule_options | constant_peak)
    if dimension == 'depth':
        resized = update_recipe(recipe, {'model.n_layers': value})
    else:
        heads = recipe.model.n_heads if recipe.config.scaling.base_heads else None
        resized = update_recipe(recipe, recipe.sizes_at(value, heads))
    check(resized)
    return resized


def make_batch(recipe: Recipe) -> dict[str, jax.Array]:
    """Returns random tokens, frequent and rare, with a document per row; the same at every size."""
    rows, length = recipe.data.batch_size, recipe.data.seq_len
    shares = 1 / np.arange(1, VOCAB)
    tokens = np.random.default_rng(0).choice(VOCAB - 1, (rows, length + 1), p=shares / sum(shares))
    tokens = jnp.asarray(tokens + 1, jnp.int32)
    return {'tokens': tokens, 'segments': jnp.ones_like(tokens)}


def measure_sizes(
    recipe: Recipe, seeds: int, steps: int, n_positions: int, by_group: bool = False
) -> dict[tuple[str, str], np.ndarray]:
    """Measures mean |x| after training, and mean |change of x| since the start.

    Activations are the stream after each sublayer, and attention logits, at `n_positions` evenly
    spaced blocks including the last. Attention logits have a size only.

    All groups are trained together; the change by a group has its trained weights, and the initial
    weights of the other groups.

    Args:
      recipe: the recipe to train.
      seeds: number of initializations.
      steps: number of training steps.
      n_positions: number of blocks to measure.
      by_group: whether to measure the change of the logits by each group of parameters.

    Returns:
      {(activation, SIZE or CHANGE): [seeds]}.
    """
    learner = build_learner(recipe, VOCAB, BOS, jax.default_backend())
    train_step, hyper, batch = make_train_step(learner), make_hyper(recipe), make_batch(recipe)
    inputs_BT, specs = batch['tokens'][:, :-1], learner.description.specs

    def select_blocks(name, x_L):
        blocks = [len(x_L) * (i + 1) // n_positions - 1 for i in range(n_positions)]
        return {f'{name} {i + 1}/{n_positions}': x_L[block] for i, block in enumerate(blocks)}

    def compute_activations(weights):
        logits_BTV, collections = learner.model.apply(
            learner.variables(weights), inputs_BT, mutable=(ACTIVATIONS, DIAGNOSTICS)
        )
        activations = join_blocks(recipe, collections[ACTIVATIONS])
        sizes_by_name = {name: x for name, x in activations.items() if x.ndim == 3}
        for name, x_LBTD in activations.items():
            if x_LBTD.ndim == 4:
                sizes_by_name |= select_blocks(name, x_LBTD)
        size_LN = join_sown(learner, collections[DIAGNOSTICS]).get('attention_logit_size')
        attention_sizes = {} if size_LN is None else select_blocks(ATTENTION_LOGITS, size_LN)
        return sizes_by_name | {LOGITS: logits_BTV}, attention_sizes

    def compute_logits(weights) -> jax.Array:
        return cast(jax.Array, learner.model.apply(learner.variables(weights), inputs_BT))

    def change_by_group(start, end):
        initial_logits, groups = compute_logits(start), {}
        for group in sorted({find_group(spec) for spec in jax.tree.leaves(specs)}):
            params = jax.tree.map(
                lambda spec, before, after, group=group: (
                    after if find_group(spec) == group else before
                ),
                specs,
                start.params,
                end.params,
            )
            logits = compute_logits(start.replace(params=params))
            groups[f'{LOGITS} by {group}', CHANGE] = logits - initial_logits
        return groups

    def train_seed(key):
        state = init_state(learner, hyper, key)
        start = state.weights
        initial, _ = compute_activations(start)
        state, _ = jax.lax.scan(
            lambda state, _: (train_step(state, batch, hyper)[0], None), state, length=steps
        )
        final, attention_sizes = compute_activations(state.weights)
        activations = {(name, SIZE): x for name, x in (final | attention_sizes).items()}
        activations |= {(name, CHANGE): x - initial[name] for name, x in final.items()}
        if by_group:
            activations |= change_by_group(start, state.weights)
        return {key: jnp.mean(jnp.abs(x)) for key, x in activations.items()}

    keys = jax.vmap(jax.random.key)(jnp.arange(seeds))
    # One program trains the seeds one after another, with the memory of one.
    return jax.device_get(jax.jit(lambda keys: jax.lax.map(train_seed, keys))(keys))


def fit_slopes(
    recipe: Recipe,
    dimension: str,
    values: Sequence[int],
    seeds: int,
    steps: int,
    say: Callable[[str], None] = lambda line: None,
    by_group: bool = False,
) -> list[Slope]:
    """Fits the slope of each activation that exists at all sizes.

    Args:
      recipe: the recipe to resize.
      dimension: 'width' or 'depth'.
      values: the sizes.
      seeds: initializations at each size.
      steps: number of training steps.
      say: receives a line after each size.
      by_group: whether to measure the change of the logits by each group of parameters.

    Raises:
      ValueError: for fewer than two sizes.
    """
    if len(set(values)) < 2:
        raise ValueError(
            f'a slope needs at least two {dimension}s, better four; got {list(values)}'
        )
    recipes = [resize_recipe(recipe, dimension, value) for value in values]
    sizes_by_value, n_positions = [], min(resized.model.n_layers for resized in recipes)
    for value, resized in zip(values, recipes, strict=True):
        sizes_by_value.append(measure_sizes(resized, seeds, steps, n_positions, by_group))
        say(f'measured {dimension} {value}')
    slopes, logs = [], np.log(values)
    for name, quantity in sorted(set.intersection(*map(set, sizes_by_value))):
        sizes = np.stack([resized[name, quantity] for resized in sizes_by_value], axis=1)
        by_seed = np.full(seeds, math.nan)
        if np.isfinite(sizes).all():
            by_seed = np.polyfit(logs, np.log(np.maximum(sizes, 1e-30)).T, 1)[0]
        interval = t_interval(by_seed)
        spread = interval.half_width if seeds > 1 else 0.0
        slopes.append(
            Slope(
                name,
                quantity,
                interval.mean,
                spread,
                sizes,
                lower_slope_limit(dimension, name, quantity),
            )
        )
    return slopes


def parse_sizes(name: str, words: Sequence[str]) -> list[int]:
    """Returns the widths or depths of a flag. Raises ValueError unless each is at least 1."""
    sizes = [int(word) if word.isascii() and word.isdigit() else 0 for word in words]
    if not all(sizes):
        raise ValueError(
            f'--{name} must be whole numbers from 1, such as '
            f'{EXAMPLE_SIZES[name]}; got {",".join(words)}'
        )
    return sizes


def size_warnings(dimension: str, values: Sequence[int]) -> list[str]:
    """Returns a warning if the sizes are too few, or too close, for a meaningful slope; else []."""
    span = max(values) / min(values)
    if len(set(values)) >= MIN_SIZES and span >= MIN_SPAN:
        return []
    return [
        f'{len(set(values))} {dimension}s over a factor of {span:.3g} are too few for a reliable '
        f'slope: use at least {MIN_SIZES} over a factor of at least {MIN_SPAN}, such as '
        f'{EXAMPLE_SIZES[dimension + "s"]}.'
    ]


def format_rows(fits: Sequence[Slope], tolerance: float) -> list[dict[str, str]]:
    """Returns the rows of the table."""
    return [
        {
            'activation': slope.activation,
            'quantity': slope.quantity,
            'slope': f'{slope.value:+.3f} +- {slope.spread:.3f}',
            'verdict': slope.verdict(tolerance)
            + (' (fails)' if slope.is_failure(tolerance) else ''),
        }
        for slope in fits
    ]


def build_panels(
    fits: Sequence[Slope], dimension: str, values: Sequence[int], tolerance: float
) -> dict[str, alt.LayerChart | alt.FacetChart]:
    """Builds log-log charts of sizes and of changes against width or depth.

    Each activation is a line through the means over seeds, and each seed is a dot. Failures are
    coloured and named.

    Args:
      fits: the slopes.
      dimension: 'width' or 'depth'.
      values: the sizes.
      tolerance: largest slope that counts as flat.

    Returns:
      {SIZE: chart, CHANGE: chart}.
    """
    titles = {SIZE: 'size: mean |x| after the steps', CHANGE: 'change: mean |x - x at the start|'}
    return {
        quantity: _build_panel(
            title,
            [slope for slope in fits if slope.quantity == quantity],
            dimension,
            values,
            tolerance,
        )
        for quantity, title in titles.items()
    }


def _build_panel(
    title: str, fits: Sequence[Slope], dimension: str, values: Sequence[int], tolerance: float
) -> alt.LayerChart | alt.FacetChart:
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
    base: Any = alt.Chart(alt.Data(values=rows)).encode(x=x, detail='activation:N', color=color)
    lines = base.mark_line().encode(y=alt.Y('mean(size):Q', scale=log, title=None))
    tooltip = [alt.Tooltip(f'{name}:N') for name in ('activation', dimension, 'size', 'seed')]
    dots = base.mark_point(filled=True, size=14, opacity=0.5).encode(y=y, tooltip=tooltip)
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
    """Writes a page with charts and table, or only the charts, by the suffix of `path`.

    Args:
      path: .html, .png or .svg.
      title: title of the page.
      about: a line about the experiment.
      fits: the slopes.
      dimension: 'width' or 'depth'.
      values: the sizes.
      tolerance: largest slope that counts as flat.
    """
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
            f'A slope within {tolerance:g} of 0 counts as flat.',
        ],
        rows=format_rows(ordered, tolerance),
        failed=failed,
    )


def main(_) -> None:
    args = flags.FLAGS
    if args.config is None:
        raise ValueError('--config=FILE is required, such as --config=configs/default.py')
    base, sweep, tune = split_sweep(with_dtype(args.config.to_dict(), default_dtype()))
    recipe = resolve(base)
    if bool(args.widths) == bool(args.depths):
        examples = ' and '.join(f'--{name}={sizes}' for name, sizes in EXAMPLE_SIZES.items())
        raise ValueError(f'set exactly one of {examples}')
    along = 'width' if args.widths else 'depth'
    values = parse_sizes(f'{along}s', args.widths or args.depths)
    console = Console(stderr=True, highlight=False)
    if sweep or tune:
        console.print('NOTE: config.sweep and config.tune are ignored; their base is checked')
    for line in size_warnings(along, values):
        console.print(f'NOTE: {line}')
    options = args.seeds, args.steps, console.print, args.by_group
    slopes = fit_slopes(recipe, along, values, *options)
    rows = format_rows(slopes, args.tolerance)
    Console(highlight=False).print(make_table(rows))
    title = f'{recipe.scaling}, {along} {values[0]} to {values[-1]}'
    if args.out:
        about = f'Coordinate check with {args.seeds} seeds and {args.steps} steps'
        write_figures(Path(args.out), title, about, slopes, along, values, args.tolerance)
    failed = sum(slope.is_failure(args.tolerance) for slope in slopes)
    print(f'{title}: {failed} of {len(slopes)} fail')
    sys.exit(1 if failed else 0)


if __name__ == '__main__':  # only here: train.py has a --config too
    define_config()
    flags.DEFINE_list('widths', [], 'Values of model.d_model, smallest first.')
    flags.DEFINE_list('depths', [], 'Values of model.n_layers, instead of --widths.')
    flags.DEFINE_integer('seeds', 4, 'Number of initialisations at each size.', lower_bound=1)
    flags.DEFINE_integer('steps', 4, 'Training steps.', lower_bound=1)
    flags.DEFINE_boolean('by_group', False, 'Also measure the change by each group of parameters.')
    flags.DEFINE_float('tolerance', 0.05, 'Largest slope that counts as flat.', lower_bound=0)
    text = 'Page (.html) or figure (.png, .svg) to write.'
    define_path('out', None, text, is_local=True, endings=ENDINGS)
    run_program(main, parse_flags)
