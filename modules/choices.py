"""One lookup for every table of named parts."""

import difflib
import math
import re
from collections.abc import Iterable, Mapping

# What others call a row, letters and digits alone. Hints: such a name is refused too.
USUAL_NAMES = {
    'adam': 'adamw',
    'adaptivelyrotatedoptimization': 'aro',
    'advcompsum': 'adversarial_comp_sum',
    'albert': 'shared',
    'apollomini': 'apollo',
    'attentionwithlinearbiases': 'alibi',
    'autoregressive': 'causal',
    'bf16': 'bfloat16',
    'bn': 'batchnorm',
    'causallm': 'causal',
    'clm': 'causal',
    'columnrowsampling': 'wta_crs',
    'compander': 'weight_compander',
    'coordinatewisegradientestimation': 'cge',
    'cosine': 'warmup_cosine',
    'cosinerestarts': 'cyclic',
    'cosinewithrestarts': 'cyclic',
    'deepzero': 'cge',
    'denoising': 'span_corruption',
    'distributedshampoo': 'shampoo',
    'dynamictanh': 'dyt',
    'exactgelu': 'gelu_exact',
    'exponentialmovingaverage': 'ema',
    'fillinthemiddle': 'infill',
    'fim': 'infill',
    'firaadamw': 'fira',
    'fp16': 'bfloat16',
    'fp32': 'float32',
    'galoreadamw': 'galore',
    'geluerf': 'gelu_exact',
    'gelutanh': 'gelu',
    'gradientnormalizedsmoothness': 'gauss_newton',
    'gradnormlorp': 'galore',
    'half': 'bfloat16',
    'identity': 'none',
    'lefttoright': 'causal',
    'linearattention': 'linear',
    'llama31': 'llama3',
    'ln': 'layernorm',
    'lnscaling': 'layernorm_scaling',
    'mixtureofexperts': 'moe',
    'moonlight': 'muon',
    'nalaformer': 'nala',
    'nap': 'normalize_and_project',
    'normalizedgradientdescent': 'normalized_gd',
    'normalizeandproject': 'normalize_and_project',
    'normawarelinearattention': 'nala',
    'olmo2': 'output',
    'perilayernorm': 'peri',
    'poly': 'power',
    'polynomial': 'power',
    'postlayernorm': 'post',
    'prefixlm': 'prefix',
    'prelayernorm': 'pre',
    'psm': 'infill',
    'relu2': 'squared_relu',
    'rotary': 'rope',
    'rsqrt': 'inverse_sqrt',
    'sandwich': 'peri',
    'sandwichln': 'peri',
    'schedulefree': 'schedule_free',
    'sgdr': 'cyclic',
    'sigmareparam': 'sigma',
    'sn': 'spectral_norm',
    'smoothadversarialcompsum': 'adversarial_comp_sum',
    'sophiag': 'sophia',
    'sophiah': 'sophia',
    'spandenoising': 'span_corruption',
    'spectralclip': 'spectral_cap',
    'spectralmuon': 'muon_spectral',
    'spectralnorm': 'spectral_norm',
    'spectralnormalization': 'spectral_norm',
    'sqrtdecay': 'warmup_stable_decay',
    'swish': 'silu',
    't5': 'span_corruption',
    'unifiednorm': 'unified',
    'weightnorm': 'weight_norm',
    'weightnormalization': 'weight_norm',
    'wn': 'weight_norm',
    'ws': 'weight_standardization',
    'wsd': 'warmup_stable_decay',
    'wtacrs': 'wta_crs',
}


def closest(name: str, names: Iterable[str]) -> list[str]:
    """The closest of `names`, if one is close at all."""
    return difflib.get_close_matches(str(name).lower(), list(names), n=1, cutoff=0.5)


def did_you_mean(names: Iterable[str]) -> str:
    """' Did you mean X or Y?', or '' where there is no name."""
    quoted = ' or '.join(map(repr, names))
    return f' Did you mean {quoted}?' if quoted else ''


def nearest(name: str, names: Iterable[str]) -> str:
    """' Did you mean X?' for the closest of `names`, or '' where none is close."""
    return did_you_mean(closest(name, names))


def choose[T](table: Mapping[str, T], name: str, what: str) -> T:
    """`table[name]`; a ValueError that lists the choices and the nearest one otherwise.

    `what` is the config field the name came from, such as 'model.norm'.
    """
    if name not in table:
        raise ValueError(
            f'{what} must be one of {", ".join(sorted(table))}; got {name!r}.{_meant(name, table)}'
        )
    return table[name]


def _meant(name: str, table: Mapping[str, object]) -> str:
    usual = USUAL_NAMES.get(re.sub(r'[^a-z0-9]', '', str(name).lower()))
    return did_you_mean([usual]) if usual in table else nearest(name, table)


def nearest_divisor(n: int, wanted: int) -> int:
    """The divisor of n that is nearest to `wanted`; of the first million and their partners."""
    small = [d for d in range(1, min(math.isqrt(n), 10**6) + 1) if n % d == 0]
    return min(sorted([*small, *(n // d for d in small)]), key=lambda d: abs(d - wanted))
