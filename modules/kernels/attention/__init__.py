"""Causal softmax attention. A new kernel is a file here and a row in `ATTENTION_KERNELS`.

A kernel takes q [B, N, T, H] and k, v [B, K, S, H] with S = T and K dividing N (grouped queries,
arXiv:2305.13245), `Scores`, and optionally segments [B, T]: a token attends to itself and to
earlier tokens of its own segment. It returns [B, N, T, H] in the type of v. `reference` is the
specification; the others equal it to rounding (tests/modules/test_kernels.py) and refuse by name
what they do not serve.
"""

import dataclasses
from collections.abc import Callable

import jax

from modules.choices import choose
from modules.kernels.attention.blocked import blocked
from modules.kernels.attention.reference import reference
from modules.kernels.attention.scores import Scores

ALL = frozenset(field.name for field in dataclasses.fields(Scores))


@dataclasses.dataclass(frozen=True)
class AttentionKernel:
    """compute(q, k, v, scores, segments_BT), with sinks_N, slopes_N and key_bias_BKS by name where
    it serves them.

    serves: the fields of `Scores` that `compute` reads.
    """

    compute: Callable[..., jax.Array]
    serves: frozenset[str]


ATTENTION_KERNELS = {
    'blocked': AttentionKernel(blocked, ALL),
    'reference': AttentionKernel(reference, ALL),
}


def refuse_unserved(name: str, scores: Scores) -> None:
    """ValueError where the kernel of that name does not serve what `scores` asks for."""
    kernel, asked = choose(ATTENTION_KERNELS, name, 'kernels.attention'), scores.asked()
    lacking = {field: value for field, value in asked.items() if field not in kernel.serves}
    if lacking:
        able = [other for other, row in ATTENTION_KERNELS.items() if row.serves >= asked.keys()]
        fields = ', '.join(f'{field}={value}' for field, value in lacking.items())
        raise ValueError(
            f'kernels.attention={name} does not serve {fields}; those that do: {", ".join(able)}'
        )


def attend(
    name: str,
    q_BNTH: jax.Array,
    k_BKSH: jax.Array,
    v_BKSH: jax.Array,
    scores: Scores,
    segments_BT: jax.Array | None = None,
    sinks_N: jax.Array | None = None,
    slopes_N: jax.Array | None = None,
    key_bias_BKS: jax.Array | None = None,
    is_full: jax.Array | None = None,
) -> jax.Array:
    """The kernel of that name. ValueError for what it does not serve, and for an array that comes
    without its field of `scores`, or does not come with it.

    is_full: a scalar that may be traced; where it is true, the window does not hold. The layers of
    a scan differ in it.
    """
    refuse_unserved(name, scores)
    arrays = {'sinks_N': sinks_N, 'slopes_N': slopes_N, 'key_bias_BKS': key_bias_BKS}
    given = scores.check_arrays(arrays)
    kernel = ATTENTION_KERNELS[name].compute

    def compute(scores):
        return kernel(q_BNTH, k_BKSH, v_BKSH, scores, segments_BT, **given)

    if scores.window is None or is_full is None:
        return compute(scores)
    unbounded = dataclasses.replace(scores, window=None)
    return jax.lax.cond(is_full, lambda: compute(unbounded), lambda: compute(scores))
