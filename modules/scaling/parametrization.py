"""Parametrisations: what follows for a parameter from how it has grown against a base model.

A row maps (ParamSpec, Growth, family of its optimizer) to `Factors`; at the sizes of the base model
all of them are 1. (`unit` has no base model.) What a parameter is follows from its growth: m is
that of a sum's terms (fan_in), n that of the outputs (fan_out).

    hidden     both sides grow: m and n are beyond 1
    input      the outputs alone: embeddings, gains, biases, the second of two low-rank matrices
    output     the terms alone: readout, router, the first of two low-rank matrices

Weight decay has the factor 1 / lr factor where not said otherwise, so that `decoupled` takes the
same share of a weight at each width, as the authors' code of muP does.
"""

import dataclasses
import math
from collections.abc import Callable
from typing import Annotated, Any

from modules.facts import demands_nothing
from modules.options import Option
from modules.params import ParamSpec
from modules.scaling.growth import Factors, Growth, Scaling, in_blocks, writes_to_stream

WIDTH, DEPTH = 'width', 'depth'


def parametrization(
    families: tuple[str, ...],
    grows: tuple[str, ...] = (WIDTH,),
    logits_per_width: bool = False,
    zero: tuple[str, ...] = (),
    against_one: bool = False,
    check: Callable[[Any, Any], None] = demands_nothing,
) -> Callable[[Callable], Callable]:
    """Marks a row with the families of optimizers that it has a table for, the sizes that its
    factors follow, whether attention's logits are q k / H and not q k / sqrt(H), each equal to
    the other at the base model's head width, and the matrices that are 0 at the start.

    against_one: there is no base model, or one of a single block and channel: growths are sizes.
    """

    def mark(row):
        row.families, row.grows = families, grows
        row.logits_per_width, row.zero = logits_per_width, zero
        row.against_one, row.check = against_one, check
        return row

    return mark


def kind(growth: Growth) -> str:
    """Of a parameter: hidden, input, output, or fixed, where neither side has grown."""
    if growth.fan_in != 1 and growth.fan_out != 1:
        return 'hidden'
    if growth.fan_in != 1:
        return 'output'
    return 'input' if growth.fan_out != 1 else 'fixed'


def at_one_rate(**factors: float) -> Factors:
    """With the decay that leaves its share of a weight as it is."""
    return Factors(decay=1 / factors.get('lr', 1.0), **factors)


@parametrization(('adam', 'sgd', 'spectral'), grows=())
def standard(spec: ParamSpec, growth: Growth, family: str) -> Factors:
    """One learning rate for all, deviations by each matrix's own size (`modules.scaling.init`).

    There is no base model. Source: the baseline of arXiv:2309.14322, section 2.
    """
    del spec, growth, family
    return Factors(init_of_own_size=True)


@parametrization(('adam', 'sgd'))
def ntk(spec: ParamSpec, growth: Growth, family: str) -> Factors:
    """Hidden and output: W / sqrt(m), drawn as in the base model; rate 1, of Adam 1 / sqrt(m).

    With SGD features do not move as width grows (arXiv:2011.14522, table 1: a = 1/2, b = 0, c = 0);
    with Adam these are the largest rates that stay finite (arXiv:2407.05872, table 1), and they do.
    """
    del spec
    if growth.fan_in == 1:
        return Factors()
    root = 1 / math.sqrt(growth.fan_in)
    return at_one_rate(forward=root, lr=root if family == 'adam' else 1.0)


@parametrization(('adam', 'sgd'))
def mean_field(spec: ParamSpec, growth: Growth, family: str) -> Factors:
    """Output: W / m, hidden: W / sqrt(m), drawn as in the base model; SGD's rates times the width.

    Adam's rate is 1 / sqrt(m) for hidden matrices and 1 for the others. Sources: arXiv:2011.14522,
    table 1, for one hidden layer (c = -1); arXiv:2407.05872, table 1.
    """
    del spec
    of = kind(growth)
    forward = {'hidden': growth.fan_in**-0.5, 'output': 1 / growth.fan_in}.get(of, 1.0)
    if family == 'sgd':
        return at_one_rate(forward=forward, lr=max(growth.fan_in, growth.fan_out))
    return at_one_rate(forward=forward, lr=forward if of == 'hidden' else 1.0)


@parametrization(('adam', 'sgd', 'spectral'), logits_per_width=True)
def mup(spec: ParamSpec, growth: Growth, family: str) -> Factors:
    """Maximal update (arXiv:2203.03466, table 8, as in the authors' package mup).

              forward   drawn with            Adam    SGD     spectral
    input     1         the base's            1       n       -
    hidden    1         the base's / sqrt(m)  1 / m   n / m   1, which n = m needs
    output    1 / m     the base's            1       m       -

    Attention's logits are q k / H. A spectral update has singular values of one size, which
    the row itself scales by a shape that does not change: it needs no factor.
    """
    del spec
    m, n, of = growth.fan_in, growth.fan_out, kind(growth)
    rates = {
        'hidden': {'adam': 1 / m, 'sgd': n / m, 'spectral': 1.0},
        'input': {'adam': 1.0, 'sgd': n},
        'output': {'adam': 1.0, 'sgd': m},
        'fixed': {},
    }
    forward, init = 1.0, 1.0
    if of == 'output':
        forward = 1 / m
    if of == 'hidden':
        init = m**-0.5
    return at_one_rate(forward=forward, init=init, lr=rates[of].get(family, 1.0))


@parametrization(('adam', 'sgd', 'spectral'), logits_per_width=True)
def spectral(spec: ParamSpec, growth: Growth, family: str) -> Factors:
    """The spectral condition: |W| and |dW| as sqrt(fan_out / fan_in) (arXiv:2310.17813).

    `mup` with the output's factor in its deviation, 1 / m of the base's, and in its rate, 1 / m
    with Adam and SGD: the same functions, with no factor in the forward pass.
    """
    found = mup(spec, growth, family)
    if kind(growth) != 'output':
        return found
    return at_one_rate(init=1 / growth.fan_in, lr=1 / growth.fan_in)


@parametrization(('adam',))
def mup_simple(spec: ParamSpec, growth: Growth, family: str) -> Factors:
    """Learning rates of hidden and output matrices / m, nothing else (arXiv:2309.14322, app. D).

    Decay is left as it is; the paper's is `independent`.
    """
    del spec, family
    return Factors(lr=1 / growth.fan_in, init_of_own_size=True)


@parametrization(('adam',))
def mup_intermediate(spec: ParamSpec, growth: Growth, family: str) -> Factors:
    """`mup_simple`, and the readout drawn with 1 / sqrt(m) of its deviation (arXiv:2309.14322)."""
    found = mup_simple(spec, growth, family)
    if spec.role != 'readout':
        return found
    return dataclasses.replace(found, init=growth.fan_in**-0.5)


@parametrization(('adam',), logits_per_width=True, zero=('query',))
def mup_full(spec: ParamSpec, growth: Growth, family: str) -> Factors:
    """`mup_intermediate`, logits q k / H, and query matrices 0 at the start (arXiv:2309.14322)."""
    return mup_intermediate(spec, growth, family)


def by_depth(spec: ParamSpec, growth: Growth, alpha: float) -> Factors:
    """`mup` for Adam, with x + l^-alpha F(x) and rates l^(alpha - 1), l the growth in depth."""
    found = mup(spec, growth, 'adam')
    branch = growth.depth**-alpha
    return dataclasses.replace(
        found,
        forward=found.forward * (branch if writes_to_stream(spec) else 1.0),
        lr=found.lr * (growth.depth ** (alpha - 1) if in_blocks(spec) else 1.0),
        eps=branch / growth.width,
    )


@parametrization(('adam',), grows=(WIDTH, DEPTH), logits_per_width=True)
def complete_p(
    spec: ParamSpec,
    growth: Growth,
    family: str,
    *,
    depth_alpha: Annotated[
        float, Option('a: blocks add l^-a of what they compute, at l times the depth', 0.5, 1)
    ] = 1.0,
) -> Factors:
    """`mup`, and at l times the depth blocks add l^-a F(x) (CompleteP, arXiv:2505.01618, table 1).

    Their rates are times l^(a - 1), and epsilons times l^-a / m. l^-a multiplies the last matrix of
    each sublayer and its bias. As in the authors' minimal code (EleutherAI/nanoGPT-mup, branch
    completep) every epsilon has the factor, and the decay's is that of `mup`: m.
    """
    del family
    return by_depth(spec, growth, depth_alpha)


@parametrization(('adam',), grows=(WIDTH, DEPTH), logits_per_width=True)
def depth_mup(spec: ParamSpec, growth: Growth, family: str) -> Factors:
    """`complete_p` with a = 1/2 (Depth-muP, arXiv:2310.02244)."""
    del family
    return by_depth(spec, growth, 0.5)


@parametrization(('adam',), grows=(WIDTH, DEPTH), logits_per_width=True, against_one=True)
def unit(spec: ParamSpec, growth: Growth, family: str) -> Factors:
    """Weights drawn with deviation 1, whatever their size (u-muP, arXiv:2407.17465, table 2).

              forward        Adam
    input     1              1 for gains and biases, 1 / sqrt(n) for embeddings
    hidden    1 / sqrt(m)    1 / sqrt(m)
    output    1 / m          1

    m and n are sizes, not growths: there is no base model. Each of L blocks adds
    F(x) / sqrt(L), and rates in blocks are times 1 / sqrt(L): with an embedding, attention and MLPs
    that contribute alike, the authors' residual rule is that (graphcore-research/unit-scaling,
    transformer_residual_scaling_rule). Their constants for activations, the softmax's output and
    backward passes in narrow types are not taken; gains do not depend on them, what a block adds
    does, by a constant.
    """
    del family
    of, m = kind(growth), growth.fan_in
    forward = {'hidden': m**-0.5, 'output': 1 / m}.get(of, 1.0)
    rate = m**-0.5 if of == 'hidden' else 1.0
    if spec.role == 'embedding':
        rate = growth.fan_out**-0.5
    branch = growth.depth**-0.5
    return at_one_rate(
        forward=forward * (branch if writes_to_stream(spec) else 1.0),
        lr=rate * (branch if in_blocks(spec) else 1.0),
    )


PARAMETRIZATIONS = {
    'standard': standard,
    'complete_p': complete_p,
    'depth_mup': depth_mup,
    'mean_field': mean_field,
    'mup': mup,
    'mup_full': mup_full,
    'mup_intermediate': mup_intermediate,
    'mup_simple': mup_simple,
    'ntk': ntk,
    'spectral': spectral,
    'unit': unit,
}


def scaling_of(
    row: Callable[..., Factors],
    init: Callable[[ParamSpec, tuple[int, ...], int], float],
    spec: ParamSpec,
    shapes: tuple[tuple[int, ...], tuple[int, ...]],
    blocks: tuple[int, int],
    growth: Growth,
    family: str,
    **options: Any,
) -> Scaling:
    """`row` for one parameter: `shapes` and `blocks` are (its own, those of the base model).

    The description's init_gain multiplies the deviation. Vectors keep their declared value and do
    not decay, but for those described as decayed.
    """
    factors = row(spec, growth, family, **options)
    std, decays = None, True
    if spec.role == 'vector':
        decays = spec.decayed
    else:
        which = 0 if factors.init_of_own_size else 1
        std = factors.init * init(spec, shapes[which], blocks[which]) * spec.init_gain
    return Scaling(
        init_std=std,
        forward_factor=factors.forward,
        lr_factor=factors.lr,
        decay_factor=factors.decay * decays,
        eps_factor=factors.eps,
    )
