"""Lookup of a row in a table of named parts, with suggestions for unknown names."""

import difflib
import math
import re
from collections.abc import Iterable, Mapping

# {row: other names for it}, letters and digits only, for names that `suggest_nearest` would not
# match with the row. An alias is refused too; the error suggests the row.
_ALIASES = {
    'adversarial_comp_sum': 'advcompsum',
    'alibi': 'attentionwithlinearbiases',
    'aro': 'adaptivelyrotatedoptimization',
    'batchnorm': 'bn',
    'bfloat16': 'fp16 half',
    'causal': 'autoregressive clm lefttoright',
    'cge': 'coordinatewisegradientestimation deepzero',
    'cyclic': 'cosinerestarts cosinewithrestarts sgdr',
    'dyt': 'dynamictanh',
    'ema': 'exponentialmovingaverage',
    'fira': 'firaadamw',
    'galore': 'gradnormlorp',
    'gated_delta': 'deltanet gateddeltanet gdn',
    'gauss_newton': 'gradientnormalizedsmoothness',
    'gelu_exact': 'exactgelu geluerf',
    'infill': 'fillinthemiddle fim psm',
    'gla': 'gatedlinearattention simplegla',
    'inverse_sqrt': 'rsqrt',
    'layernorm': 'ln',
    'moe': 'mixtureofexperts',
    'muon': 'moonlight',
    'muon_spectral': 'spectralmuon',
    'nala': 'normawarelinearattention',
    'none': 'identity',
    'normalize_and_project': 'nap',
    'output': 'olmo2',
    'peri': 'perilayernorm sandwich sandwichln',
    'post': 'postlayernorm',
    'power': 'poly polynomial',
    'pre': 'prelayernorm',
    'rope': 'rotary',
    'shared': 'albert',
    'silu': 'swish',
    'sinusoidal': 'sincos',
    'span_corruption': 'denoising t5',
    'spectral_cap': 'spectralclip',
    'spectral_norm': 'sn',
    'squared_relu': 'relu2',
    'stages': 'piecewise powercool trapezoid trapezoidal wsds',
    'warmup_cosine': 'cosine',
    'warmup_stable_decay': 'sqrtdecay wsd',
    'weight_norm': 'weightnormalization wn',
    'weight_standardization': 'ws',
    'wta_crs': 'columnrowsampling',
}
ROWS_BY_ALIAS = {alias: row for row, names in _ALIASES.items() for alias in names.split()}


def closest_names(name: str, names: Iterable[str]) -> list[str]:
    """Returns the closest of `names` in a list, which is empty if none is close."""
    return difflib.get_close_matches(str(name).lower(), list(names), n=1, cutoff=0.5)


def format_suggestion(names: Iterable[str]) -> str:
    """Returns ' Did you mean X or Y?', or '' without names."""
    quoted = ' or '.join(map(repr, names))
    return f' Did you mean {quoted}?' if quoted else ''


def suggest_nearest(name: str, names: Iterable[str]) -> str:
    """Returns ' Did you mean X?' for the closest of `names`, or '' if none is close."""
    return format_suggestion(closest_names(name, names))


def choose[T](table: Mapping[str, T], name: str, field: str) -> T:
    """Looks up `table[name]`.

    Args:
      table: the rows by name.
      name: the name to look up.
      field: the config field that has the name, such as 'model.norm'; for the error.

    Returns:
      The row.

    Raises:
      ValueError: for an unknown name, with the choices and the likeliest of them.
    """
    if name in table:
        return table[name]
    row = ROWS_BY_ALIAS.get(re.sub(r'[^a-z0-9]', '', str(name).lower()), '')
    hint = format_suggestion([row]) if row in table else suggest_nearest(name, table)
    raise ValueError(f'{field} must be one of {", ".join(sorted(table))}; got {name!r}.{hint}')


def nearest_divisor(n: int, target: int) -> int:
    """Returns the divisor d of n nearest to `target`, among d or n / d up to a million."""
    small = [d for d in range(1, min(math.isqrt(n), 10**6) + 1) if n % d == 0]
    return min(sorted([*small, *(n // d for d in small)]), key=lambda d: abs(d - target))


def check_divides(field: str, size: int, whole_name: str, whole: int) -> None:
    """Raises ValueError, with the nearest size that works, if a size does not divide the whole.

    Args:
      field: the name of the size.
      size: the divisor.
      whole_name: the name of the whole.
      whole: the number to divide.
    """
    if whole % size:
        raise ValueError(
            f'{field} must divide {whole_name}; got {size} for {whole}. Nearest that works: '
            f'{nearest_divisor(whole, size)}.'
        )
