"""Positions: how a transformer learns the order of its tokens.

A row of `POSITIONS` says what is added to the embeddings, how queries and keys are turned, and how
the logits of a pair fall with its distance.
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
    """Returns x: what positions that turn nothing do to queries and keys."""
    return x_BNTH


def rope(
    x_BNTH: jax.Array,
    positions_BT: jax.Array,
    block: jax.Array | float = 1.0,
    is_full: jax.Array | None = None,
    capacity: int | None = None,
    rope_base: Annotated[
        float, Option('b of the frequencies b^(-2i/R), R being the features turned', 1, FINITE)
    ] = 10_000.0,
    rope_local_base: Annotated[
        float | None,
        Option('b of layers with a window, which are not scaled; None: as of others', 1, FINITE),
    ] = None,
    no_rope_every: Annotated[int, Option('each n-th layer is not turned; 0: all are', 0)] = 0,
    rope_scaling: Annotated[
        str,
        Option(
            'of all frequencies, as in Llama 3.1, YaRN or LongRoPE',
            choices=('none', 'linear', 'llama3', 'yarn', 'longrope'),
        ),
    ] = 'none',
    rope_factor: Annotated[
        float,
        Option('s, how much longer rows are than before: it divides frequencies', 1, FINITE),
    ] = 1.0,
    rope_original_length: Annotated[
        int, Option('tokens that turns are counted in: the longest rows trained on before', 1)
    ] = 8192,
    rope_low_frequency_factor: Annotated[
        float, Option('turns below which llama3 divides by all of it', 0, FINITE)
    ] = 1.0,
    rope_high_frequency_factor: Annotated[
        float, Option('turns above which llama3 leaves a frequency', ABOVE_0, FINITE)
    ] = 4.0,
    rope_beta_fast: Annotated[
        float, Option('turns above which yarn leaves a frequency', 1, FINITE)
    ] = 32.0,
    rope_beta_slow: Annotated[
        float, Option('turns below which yarn divides by all of it', ABOVE_0, FINITE)
    ] = 1.0,
    rope_truncate: Annotated[
        bool, Option('whether yarn rounds the pairs between which it interpolates')
    ] = True,
    rope_attention_factor: Annotated[
        float | None,
        Option('m of yarn and longrope; None: the published one', ABOVE_0, FINITE),
    ] = None,
    rope_short_factor: Annotated[
        str, Option('what longrope divides by up to the original length: R/2 numbers, by commas')
    ] = '',
    rope_long_factor: Annotated[
        str, Option('what longrope divides by in longer rows: R/2 numbers, by commas')
    ] = '',
    rope_fraction: Annotated[
        float, Option('share of the features of a head that is turned, the first ones', 0.01, 1)
    ] = 1.0,
    platform: str = 'cpu',
) -> jax.Array:
    """Rotary embedding: of the first R features, pairs (x_i, x_{i+R/2}) turned by position * f_i.

    f_i = rope_base^(-2i/R), then `scaled`, or as of YaRN (`yarn_ramp`) or LongRoPE, which multiply
    what is turned by m, so that logits have a factor m^2. x_BNTH is [B, N, T, H], and
    R = rope_fraction * H is even; positions_BT is int32 and may have a batch of 1. The angles are
    float32, float64 where x is. `block` is the number of the layer, from 1; is_full: whether it has
    no window, None where all layers are alike in that; capacity: tokens that its cache has room
    for, None without one. platform: of the devices; TPUs turn 16-bit types by a product
    (`rotate_by_matmul`).

    Sources: arXiv:2104.09864, equation 34, in the half-split layout (rotate_half); a part of the
    features as in GPT-NeoX (arXiv:2204.06745); another base in windows as in Gemma 3
    (arXiv:2503.19786); layers that are not turned as in SmolLM3, with 4 (arXiv:2501.18795).
    LongRoPE (arXiv:2402.13753), as Phi-3 has it: f_i over the i-th of `rope_short_factor`, or of
    `rope_long_factor` in rows, or for a cache, of more than rope_original_length tokens; with m =
    sqrt(1 + ln s / ln rope_original_length), s = rope_factor.
    """
    features = rotated_features(x_BNTH.shape[-1], rope_fraction)
    first, second = jnp.split(at_least_float32(x_BNTH[..., :features]), 2, axis=-1)
    half, exact = first.shape[-1], first.dtype

    def plain(base):
        return base ** (-jnp.arange(half, dtype=exact) / half)

    frequency_H, m = plain(rope_base), 1.0
    if rope_scaling == 'yarn':
        betas = rope_beta_fast, rope_beta_slow
        kept_H = yarn_ramp(half, rope_base, rope_original_length, *betas, truncate=rope_truncate)
        kept_H = jnp.asarray(kept_H, exact)
        frequency_H = (1 - kept_H) * frequency_H / rope_factor + kept_H * frequency_H
        m = 0.1 * math.log(rope_factor) + 1
    elif rope_scaling == 'longrope':
        is_long = (capacity or x_BNTH.shape[2]) > rope_original_length
        factors = rope_long_factor if is_long else rope_short_factor
        frequency_H = frequency_H / jnp.asarray(parse_numbers(factors), exact)
        m = math.sqrt(1 + math.log(rope_factor) / math.log(rope_original_length))
    elif rope_scaling != 'none':
        turns = rope_low_frequency_factor, rope_high_frequency_factor
        frequency_H = scale_frequencies(
            frequency_H, rope_scaling, rope_factor, rope_original_length, *turns
        )
    m = m if rope_attention_factor is None else rope_attention_factor
    has_m = True  # whether this layer does; traced where blocks are scanned
    if rope_local_base is not None:
        frequency_H = jnp.where(is_full, frequency_H, plain(rope_local_base))
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
    """Computes x cos + (x P) sin, with P x = (-second half, first half) of what is turned.

    cos, sin: float32, of half of the features that are turned. x P has one input in each sum, so
    it is exact. TPUs hold features along lanes: moving half of them costs passes over memory and
    copies around them, and a product fuses with all of this. The gradient of x P is in the type of
    x; all other products are float32.
    """
    half, width = cos_B1TH.shape[-1], x_BNTH.shape[-1]
    swap_HH = np.zeros((width, width), x_BNTH.dtype)
    places = np.arange(half)
    swap_HH[places + half, places], swap_HH[places, places + half] = -1, 1
    # An axis `o` of one: of products with a batch axis remat policies keep nothing.
    swapped_BNTH = jnp.einsum('obnth,ohi->obnti', x_BNTH[None], swap_HH[None])[0]
    rest = [(0, 0)] * 3 + [(0, width - 2 * half)]  # not turned
    cos_B1TH = jnp.pad(jnp.concatenate([cos_B1TH] * 2, -1), rest, constant_values=1)
    sin_B1TH = jnp.pad(jnp.concatenate([sin_B1TH] * 2, -1), rest)
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
    """Scales frequencies, in radians a token, for rows `factor` times as long as in training.

    linear: f / factor (arXiv:2306.15595). llama3: f makes n = f original_length / 2 pi turns; it is
    f / factor for n below `low`, f for n above `high`, and interpolated linearly in n between
    (arXiv:2407.21783; the rule is in its code, https://github.com/meta-llama/llama-models).
    """
    if scaling == 'linear':
        return frequency_H / factor
    turns_H = frequency_H * (original_length / (2 * math.pi))
    kept_H = jnp.clip((turns_H - low) / (high - low), 0, 1)
    return (1 - kept_H) * frequency_H / factor + kept_H * frequency_H


def yarn_ramp(
    half: int, base: float, original_length: int, fast: float, slow: float, *, truncate: bool
) -> np.ndarray:
    """Returns the share of each frequency, [R/2], that YaRN keeps; the rest is divided by s.

    Pair d(r) = R ln(original_length / 2 pi r) / (2 ln base) makes r turns. The share is 1 up to
    d(fast), 0 from d(slow) on, and linear in the number of the pair between; with `truncate` both
    ends are rounded outwards. Cos and sin are multiplied by m = 0.1 ln s + 1. Source:
    arXiv:2309.00071, and its code, which rounds; gpt-oss does not.
    """
    low, high = (
        half * math.log(original_length / (2 * math.pi * turns)) / math.log(base)
        for turns in (fast, slow)
    )
    if truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, 2 * half - 1)
    width = high - low or 0.001  # as the code has it where both are one pair
    return 1 - np.clip((np.arange(half) - low) / width, 0, 1)


def parse_numbers(text: str) -> list[float]:
    """Returns [1.0, 1.5] for '1.0,1.5'; raises ValueError for what is no number."""
    return [float(number) for number in text.split(',')]


# Options of a scaling -> the scalings that read them.
SCALINGS_BY_OPTION = {
    'rope_factor': ('linear', 'llama3', 'yarn', 'longrope'),
    'rope_original_length': ('llama3', 'yarn', 'longrope'),
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
    """Raises ValueError where turned features make no pairs, or a scaling is half given."""
    head_dim, given = recipe.head_dim, part.options
    if given['rope_fraction'] == 1 and head_dim % 2:
        raise ValueError(
            f'{part} turns pairs: the head width, model.head_dim, must be even; got {head_dim}. '
            'Set it, change n_heads, or use position=learned.'
        )
    features = rotated_features(head_dim, given['rope_fraction'])
    scaling, published = given['rope_scaling'], declared_options(rope)
    for name, scalings in SCALINGS_BY_OPTION.items():
        if scaling not in scalings and given[name] != published[name].default:
            raise ValueError(
                f'attention.{name}={given[name]} is read with attention.rope_scaling='
                f'{"|".join(scalings)} alone, and that is {scaling}. Leave it out, or None.'
            )
    if scaling not in ('none', 'longrope') and given['rope_factor'] == 1:
        raise ValueError(
            f'attention.rope_scaling={scaling} divides frequencies by attention.rope_factor, which '
            'is 1: nothing would change. Set it to how much longer rows are, or leave both out.'
        )
    for rule, low, high in (
        ('llama3', 'rope_low_frequency_factor', 'rope_high_frequency_factor'),
        ('yarn', 'rope_beta_slow', 'rope_beta_fast'),
    ):
        if scaling == rule and given[low] >= given[high]:
            raise ValueError(
                f'attention.{low} must be below attention.{high}; got {given[low]} and '
                f'{given[high]}'
            )
    if scaling == 'yarn' and given['rope_base'] == 1:
        raise ValueError('attention.rope_scaling=yarn needs attention.rope_base above 1; got 1')
    if scaling == 'longrope':
        _check_longrope(given, features)
    _check_layer_rope(recipe, part)


def _check_longrope(option_values: Mapping[str, Any], features: int) -> None:
    """Raises ValueError for lists of factors that do not have one above 0 for each pair."""
    for name in ('rope_short_factor', 'rope_long_factor'):
        try:
            numbers = parse_numbers(option_values[name])
        except ValueError:
            numbers = []
        if len(numbers) != features // 2 or not all(0 < n < math.inf for n in numbers):
            raise ValueError(
                f'attention.{name} has a number above 0 for each of the {features // 2} pairs that '
                f'are turned, joined by commas; got {option_values[name]!r}, from which {len(numbers)} are '
                'read'
            )
    if option_values['rope_original_length'] == 1:
        raise ValueError('attention.rope_original_length must be above 1 for longrope; got 1')


def _check_layer_rope(recipe: Any, part: Any) -> None:
    """Raises ValueError where a rule for some layers would be one for all, or for none."""
    given, attention = part.options, recipe.attention.options
    if given['rope_local_base'] is not None and not attention.get('full_every'):
        raise ValueError(
            f'attention.rope_local_base={given["rope_local_base"]:g} is for layers with a window '
            'among layers without: set attention.window and attention.full_every. For all layers '
            'there is attention.rope_base.'
        )
    if given['no_rope_every'] == 1:
        raise ValueError(
            'attention.no_rope_every=1 turns no layer: that is model.position=none. Leave it out, '
            'or choose 2 or more.'
        )


def rotated_features(head_dim: int, fraction: float) -> int:
    """Returns fraction * head_dim; raises ValueError unless that is even and not 0."""
    features = fraction * head_dim
    if head_dim < 2:
        raise ValueError(f'rope turns pairs of features, and a head has {head_dim}')
    if abs(features - round(features)) > 1e-6 or round(features) % 2 or round(features) < 2:
        near = min(max(2, 2 * round(features / 2)), head_dim // 2 * 2)
        raise ValueError(
            f'attention.rope_fraction={fraction:g} of the head width, model.head_dim = '
            f'{head_dim}, is {features:g} features, and rope turns pairs: it must be an even '
            f'number, 2 at least. Nearest that works: {near / head_dim!r} ({near} features).'
        )
    return round(features)


def alibi_slopes(n_heads: int) -> jax.Array:
    """2^(-8 n / N), [N], for the heads n = 1 to N where N is a power of two.

    Otherwise these are the slopes of the power P below N, then the first, third, ... of the slopes
    of 2 P, as in the code of arXiv:2108.12409.
    """
    power = 2 ** (n_heads.bit_length() - 1)
    slopes = [2.0 ** (-8 * n / power) for n in range(1, power + 1)]
    slopes += [2.0 ** (-4 * n / power) for n in range(1, 2 * (n_heads - power), 2)]
    return jnp.array(slopes, jnp.float32)


def check_takes_slopes(recipe: Any, part: Any) -> None:
    """Raises ValueError for attention without logits to add slopes to."""
    if not recipe.attention.row.takes_slopes:
        able = [name for name, row in ATTENTIONS.items() if row.takes_slopes]
        raise ValueError(
            f'{part} adds to the logits of softmax attention, and {recipe.attention} has none. '
            f'Choose model.attention={"|".join(able)}, or another position.'
        )


class LearnedPositions(nn.Module):
    """A table of `length` vectors, added to the embeddings (arXiv:1706.03762, section 3.5)."""

    length: int
    features: int

    @nn.compact
    def __call__(self, positions_BT):
        init = declare(nn.initializers.normal(1.0), role='embedding', axes=('position', 'embed'))
        table_TD = self.param('table', init, (self.length, self.features))
        return table_TD[positions_BT]


@dataclasses.dataclass(frozen=True)
class Position:
    """A row of `POSITIONS`: one line of what it is with its source, and what it does."""

    summary: str
    rotate: Callable[..., jax.Array] = no_rotation  # called as `rope` is
    table: type[nn.Module] | None = None  # added to the embeddings
    slopes: Callable[[int], jax.Array] | None = None  # N -> [N], by which logits fall with distance
    check: Callable[[Any, Any], None] = accept_any  # its own rule (`modules.facts`)


POSITIONS = {
    'alibi': Position(
        'logits that fall with the distance, in each head by a slope of its own: ALiBi '
        '(arXiv:2108.12409)',
        slopes=alibi_slopes,
        check=check_takes_slopes,
    ),
    'learned': Position(
        'a table of vectors, added to the embeddings (arXiv:1706.03762)', table=LearnedPositions
    ),
    'none': Position('the causal mask alone tells the order'),
    'rope': Position(
        'queries and keys turned by angles: RoPE (arXiv:2104.09864)', rotate=rope, check=check_rope
    ),
}
