"""Positions: how a transformer learns the order of its tokens.

A row of `POSITIONS` has a table that is added to the embeddings, a rotation of queries and keys, or
slopes by which the logits of a pair fall with its distance.
"""

import dataclasses
import math
import sys
from collections.abc import Callable, Mapping
from typing import Annotated, Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import linen as nn

from modules.attention import ATTENTIONS
from modules.facts import accept_any
from modules.options import Option, declared_options
from modules.params import declare
from modules.statistics import at_least_float32

FINITE = sys.float_info.max
ABOVE_0 = 1e-37


def no_rotation(x_BNTH: jax.Array, positions_BT: jax.Array, **layer: Any) -> jax.Array:
    """Returns x: the rotation of positions that leave queries and keys unchanged."""
    return x_BNTH


def rope(
    x_BNTH: jax.Array,
    positions_BT: jax.Array,
    block: jax.Array | float = 1.0,
    is_full: Any = None,
    capacity: int | None = None,
    rope_base: Annotated[
        float, Option('base b of the frequencies b^(-2i/R), with R rotated features', 1, FINITE)
    ] = 10_000.0,
    rope_local_base: Annotated[
        float | None,
        Option('base in layers with a window, without scaling; None: rope_base', 1, FINITE),
    ] = None,
    no_rope_every: Annotated[
        int, Option('every n-th layer has no rotation; 0: all layers have it', 0)
    ] = 0,
    rope_scaling: Annotated[
        str,
        Option(
            'scaling of the frequencies for longer rows',
            choices=('none', 'linear', 'dynamic', 'llama3', 'yarn', 'longrope'),
        ),
    ] = 'none',
    rope_factor: Annotated[
        float,
        Option('s: how many times longer rows are; it divides frequencies', 1, FINITE),
    ] = 1.0,
    rope_original_length: Annotated[
        int, Option('row length of the earlier training, in tokens', 1)
    ] = 8192,
    rope_low_frequency_factor: Annotated[
        float,
        Option('llama3 divides frequencies below this many turns per original row by s', 0, FINITE),
    ] = 1.0,
    rope_high_frequency_factor: Annotated[
        float,
        Option('llama3 keeps frequencies above this many turns per original row', ABOVE_0, FINITE),
    ] = 4.0,
    rope_beta_fast: Annotated[
        float, Option('yarn keeps frequencies above this many turns per original row', 1, FINITE)
    ] = 32.0,
    rope_beta_slow: Annotated[
        float,
        Option(
            'yarn divides frequencies below this many turns per original row by s', ABOVE_0, FINITE
        ),
    ] = 1.0,
    rope_truncate: Annotated[
        bool, Option('whether yarn rounds the ends of its interpolation to whole pairs')
    ] = True,
    rope_attention_factor: Annotated[
        float | None,
        Option(
            'factor of rotated features for yarn and longrope; None: as published', ABOVE_0, FINITE
        ),
    ] = None,
    rope_short_factor: Annotated[
        str, Option('divisors of longrope up to the original length: R/2 numbers, by commas')
    ] = '',
    rope_long_factor: Annotated[
        str, Option('divisors of longrope beyond the original length: R/2 numbers, by commas')
    ] = '',
    rope_fraction: Annotated[
        float, Option('share of the features of a head that is rotated, from the first', 0.01, 1)
    ] = 1.0,
    platform: str = 'cpu',
) -> jax.Array:
    """RoPE, rotations of pairs of features (arXiv:2104.09864): `theta_ti = t b^(-2 i / R)`.

    At position `t`, the features `(x_i, x_(i + R/2))` of each query and key are rotated by the
    angle `theta_ti`. `b` is `rope_base`. The first `R` features of a head are rotated, a share
    `rope_fraction` of its width; `R` is even. Angles are float32, or float64 if x is.

    `rope_scaling` changes the frequencies `f_i = b^(-2 i / R)` for rows that are longer than in
    training. `s` is `rope_factor`, and `L` is `rope_original_length`:

    - `linear` and `llama3`: see `scale_frequencies`.
    - `yarn`: see `yarn_ramp`.
    - `dynamic`: rows of more than `L` tokens have another base (`scale_base`).
    - `longrope` (arXiv:2402.13753), as in Phi-3: `f_i` is divided by the i-th number of
      `rope_long_factor` if the row, or the capacity of a cache, exceeds `L` tokens, and else by the
      i-th number of `rope_short_factor`.

    `yarn` and `longrope` also multiply the rotated features by `m`, so that logits get a factor
    `m^2`. For `longrope`, `m = sqrt(1 + log(s) / log(L))`.

    Sources: equation 34, in the half-split layout (rotate_half); rotation of a part of the features
    as in GPT-NeoX (arXiv:2204.06745); another base in layers with a window as in Gemma 3
    (arXiv:2503.19786); layers without rotation, every 4th one, as in SmolLM3 (arXiv:2501.18795).

    Args:
      x_BNTH: queries or keys.
      positions_BT: int32; its batch may be 1.
      block: the number of the layer, from 1.
      is_full: whether the layer has no window; None if no layer or every layer has one.
      capacity: the tokens that the cache of the layer has room for; None without a cache.
      platform: of the devices. TPUs rotate 16-bit types by a matmul (`rotate_by_matmul`).
      rope_*, no_rope_every: options, described by their annotations.

    Returns:
      The rotated x, [B, N, T, H], in its type.
    """
    features = rotated_features(x_BNTH.shape[-1], rope_fraction)
    first, second = jnp.split(at_least_float32(x_BNTH[..., :features]), 2, axis=-1)
    half, exact = first.shape[-1], first.dtype

    def base_frequencies(base):
        return base ** (-jnp.arange(half, dtype=exact) / half)

    length = capacity or x_BNTH.shape[2]
    if rope_scaling == 'dynamic':
        rope_base = scale_base(rope_base, features, length, rope_factor, rope_original_length)
    frequency_H, m = base_frequencies(rope_base), 1.0
    if rope_scaling == 'yarn':
        betas = rope_beta_fast, rope_beta_slow
        ramp_H = yarn_ramp(half, rope_base, rope_original_length, *betas, truncate=rope_truncate)
        ramp_H = jnp.asarray(ramp_H, exact)
        frequency_H = (1 - ramp_H) * frequency_H / rope_factor + ramp_H * frequency_H
        m = 0.1 * math.log(rope_factor) + 1
    elif rope_scaling == 'longrope':
        is_long = length > rope_original_length
        factors = rope_long_factor if is_long else rope_short_factor
        frequency_H = frequency_H / jnp.asarray(parse_numbers(factors), exact)
        m = math.sqrt(1 + math.log(rope_factor) / math.log(rope_original_length))
    elif rope_scaling in ('linear', 'llama3'):
        turns = rope_low_frequency_factor, rope_high_frequency_factor
        frequency_H = scale_frequencies(
            frequency_H, rope_scaling, rope_factor, rope_original_length, *turns
        )
    m = m if rope_attention_factor is None else rope_attention_factor
    has_m: Any = True  # whether m applies to this layer; traced if blocks are scanned
    if rope_local_base is not None:
        frequency_H = jnp.where(is_full, frequency_H, base_frequencies(rope_local_base))
        has_m = is_full
    if no_rope_every:
        is_turned = jnp.mod(block, no_rope_every) != 0
        frequency_H = jnp.where(is_turned, frequency_H, 0.0)
        has_m = has_m & is_turned
    angle_BTH = jnp.einsum('bt,h->bth', positions_BT.astype(exact), frequency_H)
    cos, sin = jnp.cos(angle_BTH)[:, None], jnp.sin(angle_BTH)[:, None]
    if m != 1:
        m = m if has_m is True else jnp.where(has_m, m, 1.0)
        cos, sin = m * cos, m * sin
    if platform == 'tpu' and x_BNTH.dtype.itemsize == 2:
        return rotate_by_matmul(x_BNTH, cos, sin)
    turned = jnp.concatenate([first * cos - second * sin, first * sin + second * cos], axis=-1)
    turned = turned.astype(x_BNTH.dtype)
    if features == x_BNTH.shape[-1]:
        return turned
    return jnp.concatenate([turned, x_BNTH[..., features:]], axis=-1)


def rotate_by_matmul(x_BNTH: jax.Array, cos_B1TH: jax.Array, sin_B1TH: jax.Array) -> jax.Array:
    """Computes x cos + (x P) sin, with P x = (-second half, first half) of the rotated features.

    Each sum of x P has one term, so it is exact. TPUs hold features along lanes: moving half of
    them costs passes over memory and copies around them, and a matmul fuses with all of this. The
    gradient of x P is in the type of x; all other products are float32.

    Args:
      x_BNTH: queries or keys.
      cos_B1TH: float32, over half of the rotated features.
      sin_B1TH: likewise.

    Returns:
      The rotated x, [B, N, T, H], in its type.
    """
    half, width = cos_B1TH.shape[-1], x_BNTH.shape[-1]
    swap_HH = np.zeros((width, width), x_BNTH.dtype)
    pairs = np.arange(half)
    swap_HH[pairs + half, pairs], swap_HH[pairs, pairs + half] = -1, 1
    # The batch axis `o` of size 1: remat policies save no products that have a batch axis.
    swapped_BNTH = jnp.einsum('obnth,ohi->obnti', x_BNTH[None], swap_HH[None])[0]
    padding = [(0, 0)] * 3 + [(0, width - 2 * half)]  # features that are not rotated
    cos_B1TH = jnp.pad(jnp.concatenate([cos_B1TH] * 2, -1), padding, constant_values=1)
    sin_B1TH = jnp.pad(jnp.concatenate([sin_B1TH] * 2, -1), padding)
    x32_BNTH, swapped_BNTH = x_BNTH.astype(jnp.float32), swapped_BNTH.astype(jnp.float32)
    return (x32_BNTH * cos_B1TH + swapped_BNTH * sin_B1TH).astype(x_BNTH.dtype)


def scale_frequencies(
    frequency_H: jax.Array,
    scaling: str,
    factor: float,
    original_length: int,
    low: float,
    high: float,
) -> jax.Array:
    """Scales frequencies for rows `factor` times as long as in training.

    linear: f / factor (arXiv:2306.15595). llama3: f makes n = f original_length / 2 pi turns in a
    row; it becomes f / factor for n below `low`, stays f for n above `high`, and is interpolated
    linearly in n between (arXiv:2407.21783; the rule is in its code,
    https://github.com/meta-llama/llama-models).

    Args:
      frequency_H: f, in radians per token.
      scaling: 'linear' or 'llama3'.
      factor: the growth of the length.
      original_length: tokens of a row in training.
      low: turns.
      high: turns.

    Returns:
      The scaled frequencies.
    """
    if scaling == 'linear':
        return frequency_H / factor
    turns_H = frequency_H * (original_length / (2 * math.pi))
    ramp_H = jnp.clip((turns_H - low) / (high - low), 0, 1)
    return (1 - ramp_H) * frequency_H / factor + ramp_H * frequency_H


def scale_base(
    base: float, features: int, length: int, factor: float, original_length: int
) -> float:
    """Returns base * (s T / L - s + 1)^(R / (R - 2)) for rows of T > L tokens, else `base`.

    The dynamic NTK scaling of https://github.com/jquesnelle/yarn, as in transformers: the lowest
    frequency falls by s T / L - s + 1, which is 1 for T = L, and the highest stays.

    Args:
      base: of the frequencies.
      features: R, the rotated features of a head.
      length: T, tokens of a row, or of the room of a cache.
      factor: s.
      original_length: L, the longest rows in training.

    Returns:
      The base.
    """
    growth = factor * max(length, original_length) / original_length - (factor - 1)
    return base * growth ** (features / (features - 2)) if growth > 1 else base


def yarn_ramp(
    half: int, base: float, original_length: int, fast: float, slow: float, *, truncate: bool
) -> np.ndarray:
    """Returns the share of each frequency, [R/2], that YaRN keeps; the rest is divided by s.

    Pair d(r) = R ln(original_length / 2 pi r) / (2 ln base) makes r turns. The share is 1 up to
    d(fast), 0 from d(slow) on, and linear in the index of the pair between. Cos and sin are
    multiplied by m = 0.1 ln s + 1. Source: arXiv:2309.00071, and its code, which rounds; gpt-oss
    does not.

    Args:
      half: R / 2, the number of pairs.
      base: of the frequencies.
      original_length: tokens of a row in training.
      fast: turns.
      slow: turns.
      truncate: whether both ends of the ramp are rounded outwards.

    Returns:
      The shares.
    """
    low, high = (
        half * math.log(original_length / (2 * math.pi * turns)) / math.log(base)
        for turns in (fast, slow)
    )
    if truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, 2 * half - 1)
    width = high - low or 0.001  # as in the code, if both ends are the same pair
    return 1 - np.clip((np.arange(half) - low) / width, 0, 1)


def parse_numbers(text: str) -> list[float]:
    """Returns [1.0, 1.5] for '1.0,1.5'. Raises ValueError for text that is no number."""
    return [float(number) for number in text.split(',')]


# Options of a scaling -> the scalings that read them.
SCALINGS_BY_OPTION = {
    'rope_factor': ('linear', 'dynamic', 'llama3', 'yarn', 'longrope'),
    'rope_original_length': ('dynamic', 'llama3', 'yarn', 'longrope'),
    'rope_low_frequency_factor': ('llama3',),
    'rope_high_frequency_factor': ('llama3',),
    'rope_beta_fast': ('yarn',),
    'rope_beta_slow': ('yarn',),
    'rope_truncate': ('yarn',),
    'rope_attention_factor': ('yarn', 'longrope'),
    'rope_short_factor': ('longrope',),
    'rope_long_factor': ('longrope',),
}


def check_rope(recipe: Any, part: Any) -> None:
    """Raises ValueError if features make no pairs, or a scaling lacks some of its options."""
    head_dim, option_values = recipe.head_dim, part.options
    if option_values['rope_fraction'] == 1 and head_dim % 2:
        raise ValueError(
            f'{part} rotates pairs of features, so the head width, model.head_dim, must be even; '
            f'got {head_dim}. Set model.head_dim, change model.n_heads, or use '
            'model.position=learned.'
        )
    features = rotated_features(head_dim, option_values['rope_fraction'])
    scaling, declared = option_values['rope_scaling'], declared_options(rope)
    for name, scalings in SCALINGS_BY_OPTION.items():
        if scaling not in scalings and option_values[name] != declared[name].default:
            raise ValueError(
                f'attention.{name}={option_values[name]} has no effect with '
                f'attention.rope_scaling={scaling}; it is used with {"|".join(scalings)}. Leave it '
                'out, or set it to None.'
            )
    if scaling not in ('none', 'dynamic', 'longrope') and option_values['rope_factor'] == 1:
        raise ValueError(
            f'attention.rope_scaling={scaling} divides frequencies by attention.rope_factor, which '
            'is 1, so it would have no effect. Set rope_factor to how many times longer rows are, '
            'or leave both out.'
        )
    for rule, low, high in (
        ('llama3', 'rope_low_frequency_factor', 'rope_high_frequency_factor'),
        ('yarn', 'rope_beta_slow', 'rope_beta_fast'),
    ):
        if scaling == rule and option_values[low] >= option_values[high]:
            raise ValueError(
                f'attention.{low} must be below attention.{high}; got {option_values[low]} and '
                f'{option_values[high]}'
            )
    if scaling == 'yarn' and option_values['rope_base'] == 1:
        raise ValueError('attention.rope_scaling=yarn needs attention.rope_base above 1; got 1')
    if scaling == 'dynamic' and features == 2:
        raise ValueError(
            'attention.rope_scaling=dynamic needs at least 4 rotated features per head; got 2 of '
            f'{head_dim}'
        )
    if scaling == 'longrope':
        _check_longrope(option_values, features)
    _check_layer_rope(recipe, part)


def _check_longrope(option_values: Mapping[str, Any], features: int) -> None:
    """Raises ValueError if a list of factors does not have a positive number for each pair."""
    for name in ('rope_short_factor', 'rope_long_factor'):
        try:
            numbers = parse_numbers(option_values[name])
        except ValueError:
            numbers = []
        if len(numbers) != features // 2 or not all(0 < n < math.inf for n in numbers):
            raise ValueError(
                f'attention.{name} must have {features // 2} positive numbers separated by commas, '
                f'one per pair of rotated features; got {option_values[name]!r}, which has '
                f'{len(numbers)}'
            )
    if option_values['rope_original_length'] == 1:
        raise ValueError('attention.rope_original_length must be above 1 for longrope; got 1')


def _check_layer_rope(recipe: Any, part: Any) -> None:
    """Raises ValueError if an option for some layers would apply to all of them, or to none."""
    values, attention = part.options, recipe.attention.options
    if values['rope_local_base'] is not None and not attention.get('full_every'):
        raise ValueError(
            f'attention.rope_local_base={values["rope_local_base"]:g} needs layers with a window '
            'and layers without: set attention.window and attention.full_every. To change the '
            'base of all layers, set attention.rope_base.'
        )
    if values['no_rope_every'] == 1:
        raise ValueError(
            'attention.no_rope_every=1 removes the rotation from every layer, which is '
            'model.position=none. Leave it out, or choose 2 or more.'
        )


def rotated_features(head_dim: int, fraction: float) -> int:
    """Returns fraction * head_dim. Raises ValueError unless that is even and not 0."""
    features = fraction * head_dim
    if head_dim < 2:
        raise ValueError(
            f'rope rotates pairs of features, so a head needs at least 2; got {head_dim}'
        )
    if abs(features - round(features)) > 1e-6 or round(features) % 2 or round(features) < 2:
        nearest = min(max(2, 2 * round(features / 2)), head_dim // 2 * 2)
        raise ValueError(
            f'attention.rope_fraction={fraction:g} of the head width, model.head_dim = {head_dim}, '
            f'is {features:g} features. rope rotates pairs, so this must be an even number, at '
            f'least 2. Nearest that works: {nearest / head_dim!r} ({nearest} features).'
        )
    return round(features)


def alibi_slopes(n_heads: int) -> jax.Array:
    """2^(-8 n / N), [N], for the heads n = 1 to N if N is a power of two.

    Otherwise: the slopes of the power P below N, then the first, third, ... of the slopes of 2 P,
    as in the code of arXiv:2108.12409.
    """
    power = 2 ** (n_heads.bit_length() - 1)
    slopes = [2.0 ** (-8 * n / power) for n in range(1, power + 1)]
    slopes += [2.0 ** (-4 * n / power) for n in range(1, 2 * (n_heads - power), 2)]
    return jnp.array(slopes, jnp.float32)


def check_takes_slopes(recipe: Any, part: Any) -> None:
    """Raises ValueError for attention without logits to which slopes can be added."""
    if not recipe.attention.row.takes_slopes:
        supported = [name for name, row in ATTENTIONS.items() if row.takes_slopes]
        raise ValueError(
            f'{part} adds to the logits of softmax attention, but {recipe.attention} has no such '
            f'logits. Choose model.attention={"|".join(supported)}, or another position.'
        )


class LearnedPositions(nn.Module):
    """A table of `length` vectors, added to the embeddings (arXiv:1706.03762, section 3.5)."""

    length: int
    features: int

    @nn.compact
    def __call__(self, positions_BT: jax.Array) -> jax.Array:
        init = declare(nn.initializers.normal(1.0), role='embedding', axes=('position', 'embed'))
        table_TD = self.param('table', init, (self.length, self.features))
        return table_TD[positions_BT]


class SinusoidalPositions(nn.Module):
    """Sines and cosines that are added to the embeddings (arXiv:1706.03762, section 3.5):
    `p_(t, 2 i) = sin(t / 10000^(2 i / D))` and `p_(t, 2 i + 1) = cos(t / 10000^(2 i / D))`.

    Positions are not limited by `length`. Their root mean square is about `sqrt(1/2)`, as in the
    paper, where embeddings have a deviation of 1 (scaling.embedding_std).
    """

    length: int
    features: int

    @nn.compact
    def __call__(self, positions_BT: jax.Array) -> jax.Array:
        frequencies_P = 10_000.0 ** (-np.arange(0, self.features, 2) / self.features)
        angles_BTP = positions_BT[..., None] * np.float32(frequencies_P)[None, None]
        pairs_BTP2 = jnp.stack([jnp.sin(angles_BTP), jnp.cos(angles_BTP)], axis=-1)
        return pairs_BTP2.reshape(*positions_BT.shape, -1)[..., : self.features]


@dataclasses.dataclass(frozen=True)
class Position:
    """A row of `POSITIONS`: a description with its source, and the functions of the method.

    summary: '' if the docstring of `rotate` is the description.
    """

    summary: str = ''
    rotate: Callable[..., jax.Array] = no_rotation  # called as `rope` is
    table: type[nn.Module] | None = None  # added to the embeddings
    is_limited: bool = False  # whether `table` has no positions after its length
    slopes: Callable[[int], jax.Array] | None = None  # N -> [N], by which logits fall with distance
    check: Callable[[Any, Any], None] = accept_any  # of a config (`modules.facts`)


POSITIONS = {
    'alibi': Position(
        'ALiBi, a penalty for distance (arXiv:2108.12409): `s_ts <- s_ts - a_n (t - s)`.\n\n'
        'The slope of head `n` of `N` is `a_n = 2^(-8 n / N)` if `N` is a power of two; see '
        '`alibi_slopes` for other numbers of heads.',
        slopes=alibi_slopes,
        check=check_takes_slopes,
    ),
    'learned': Position(
        'Learned vectors, added to the embeddings (arXiv:1706.03762)',
        table=LearnedPositions,
        is_limited=True,
    ),
    'none': Position('No positions: only the causal mask conveys the order of tokens'),
    'rope': Position(rotate=rope, check=check_rope),
    'sinusoidal': Position(
        'Sines and cosines, added to the embeddings (arXiv:1706.03762)', table=SinusoidalPositions
    ),
}
