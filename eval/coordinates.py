"""Whether activations and their changes keep their size as a model grows.

    python -m eval.coordinates --config=configs/default.py --config.scaling.name=mup
        --config.scaling.base_width=64 --widths=64,128,256,512 [--depths=2,4,8] [--out=page.html]

Trains a few steps on one random batch at each width, from several seeds, and fits the slope of log
size against log width for each activation and for its change since the start. A parametrisation
that keeps its learning rate has slopes near 0 (arXiv:2203.03466, appendix D.1). Exit status 1 where
an activation or its change grows or shrinks, but for logits, which may shrink.
"""

from lm.run.process import prepare_process

if __name__ == '__main__':
    prepare_process()  # before JAX is imported

import base64
import io
import math
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from absl import app, flags
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from ml_collections import config_flags
from rich.console import Console

from eval.program import run_main
from lm.activations import observe
from lm.base_model import resized
from lm.check import check
from lm.config import replaced, resolve
from lm.run.table import as_table
from lm.sections import Config
from lm.state import build_learner, hyper_from, init_state
from lm.step import make_train_step

CONFIG = config_flags.DEFINE_config_file('config', None, 'Python file with get_config().')
WIDTHS = flags.DEFINE_list('widths', [], 'Values of model.d_model, smallest first.')
DEPTHS = flags.DEFINE_list('depths', [], 'Values of model.n_layers, in place of widths.')
SEEDS = flags.DEFINE_integer('seeds', 3, 'Initial weights at each size.', lower_bound=1)
STEPS = flags.DEFINE_integer('steps', 4, 'Training steps.', lower_bound=1)
TOLERANCE = flags.DEFINE_float('tolerance', 0.05, 'The slope that counts as none.')
OUT = flags.DEFINE_string('out', None, 'Page (.html) or figure (.png, .svg) to write.')

VOCAB, BOS = 32, 0
SIZE, CHANGE = 'size', 'change'
GROWS, SHRINKS, FLAT = 'grows', 'shrinks', 'flat'
# The readout is drawn to vanish with width, and the noise of a few steps' updates does so too.
MAY_SHRINK = {'logits'}


class Slope(NamedTuple):
    """Of log size against log width (or depth): value, and half of its 95% interval over seeds."""

    activation: str
    of: str
    value: float
    spread: float
    sizes: np.ndarray  # [seeds, widths]

    def verdict(self, tolerance: float) -> str:
        """Flat unless the whole interval is outside of +-tolerance."""
        if self.value - self.spread > tolerance:
            return GROWS
        return SHRINKS if self.value + self.spread < -tolerance else FLAT

    def fails(self, tolerance: float) -> bool:
        found = self.verdict(tolerance)
        return found == GROWS or (found == SHRINKS and self.activation not in MAY_SHRINK)


def sized(config: Config, along: str, value: int) -> Config:
    """The config with another width or depth; ValueError where it cannot have that.

    Heads grow in number, or, where scaling.base_heads is given, in width.
    """
    if along == 'depth':
        found = replaced(config, {'model.n_layers': value})
    else:
        heads = config.model.n_heads if config.scaling.base_heads else None
        found = resized(config, value, heads)
    check(found)
    return found


def batch_of(config: Config) -> dict[str, jax.Array]:
    """Random tokens, frequent and rare ones, each row one document: the same at every size."""
    rows, length = config.data.batch_size, config.data.seq_len
    shares = 1 / np.arange(1, VOCAB)
    tokens = np.random.default_rng(0).choice(VOCAB - 1, (rows, length + 1), p=shares / sum(shares))
    tokens = jnp.asarray(tokens + 1, jnp.int32)
    return {'tokens': tokens, 'segments': jnp.ones_like(tokens)}


def sizes_of(config: Config, seeds: int, steps: int) -> dict[tuple[str, str], np.ndarray]:
    """{(activation, size or change): [seeds]}: mean |x| after the steps, or of what they changed.

    The stream behind each sublayer is one activation a block, named from 1.
    """
    learner = build_learner(config, VOCAB, BOS, jax.default_backend())
    train_step, hyper, batch = make_train_step(learner), hyper_from(config), batch_of(config)
    inputs_BT = batch['tokens'][:, :-1]

    def activations(weights):
        logits_BTV, found = observe(learner, weights, inputs_BT)
        named = {name: x for name, x in found.items() if x.ndim == 3}
        for name, x_LBTD in found.items():
            if x_LBTD.ndim == 4:
                named |= {f'{name} {i + 1}': x_LBTD[i] for i in range(len(x_LBTD))}
        return named | {'logits': logits_BTV}

    def run(key):
        state = init_state(learner, hyper, key)
        first = activations(state.weights)
        state, _ = jax.lax.scan(
            lambda state, _: (train_step(state, batch, hyper)[0], None), state, length=steps
        )
        last = activations(state.weights)
        found = {(name, SIZE): jnp.mean(jnp.abs(x)) for name, x in last.items()}
        return found | {
            (name, CHANGE): jnp.mean(jnp.abs(x - first[name])) for name, x in last.items()
        }

    keys = jax.vmap(jax.random.key)(jnp.arange(seeds))
    return jax.device_get(jax.jit(lambda keys: jax.lax.map(run, keys))(keys))


def slopes(
    config: Config,
    along: str,
    values: Sequence[int],
    seeds: int,
    steps: int,
    said: Callable[[str], None] = lambda line: None,
) -> list[Slope]:
    """Of each activation that all sizes have; ValueError for fewer than two sizes."""
    if len(set(values)) < 2:
        raise ValueError(f'a slope needs two {along}s and better four; got {list(values)}')
    at = [sized(config, along, value) for value in values]
    each = []
    for value, one in zip(values, at, strict=True):
        each.append(sizes_of(one, seeds, steps))
        said(f'{along} {value}')
    found, logs = [], np.log(values)
    for name, of in sorted(set.intersection(*map(set, each))):
        sizes = np.stack([one[name, of] for one in each], axis=1)
        by_seed = np.polyfit(logs, np.log(np.maximum(sizes, 1e-30)).T, 1)[0]
        error = by_seed.std(ddof=1) / math.sqrt(seeds) if seeds > 1 else 0.0
        found.append(Slope(name, of, float(by_seed.mean()), float(2 * error), sizes))
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


def main(_) -> None:
    config = resolve(CONFIG.value)
    if bool(WIDTHS.value) == bool(DEPTHS.value):
        raise ValueError('give --widths=64,128,256,512 or --depths=2,4,8, and not both')
    along = 'width' if WIDTHS.value else 'depth'
    values = [int(value) for value in WIDTHS.value or DEPTHS.value]
    console = Console(stderr=True, highlight=False)
    found = slopes(config, along, values, SEEDS.value, STEPS.value, console.print)
    rows = rows_of(found, TOLERANCE.value)
    Console(highlight=False).print(as_table(rows))
    title = f'scaling.name={config.scaling.name}, {along} {values[0]} to {values[-1]}'
    if OUT.value:
        write(Path(OUT.value), title, figure(found, along, values), rows)
    failed = sum(slope.fails(TOLERANCE.value) for slope in found)
    print(f'{title}: {failed} of {len(found)} fail')
    sys.exit(1 if failed else 0)


if __name__ == '__main__':
    flags.mark_flags_as_required(['config'])
    app.run(run_main(main))
