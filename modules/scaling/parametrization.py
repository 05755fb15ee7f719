"""Parametrisations: factors of a parameter from its growth against a base model.

A row maps (ParamSpec, Growth, family of its updates) to `Factors`; at the sizes of the base model
all of them are 1. (`unit` has no base model.) The growth of a parameter determines its kind; m is
the growth of a sum's terms (fan_in), n that of the outputs (fan_out).

    hidden     both grow: m and n are not 1
    input      only outputs grow: embeddings, gains, biases, the second of two low-rank matrices
    output     only terms grow: readout, router, the first of two low-rank matrices

The factor of weight decay is 1 / lr factor unless a row sets another, so that `decoupled` removes
the same share of a weight at each width, as in the authors' code of muP.
"""

import dataclasses
import math
from collections.abc import Callable
from typing import Annotated, Any

from modules.facts import accept_any, row_decorator
from modules.options import Option
from modules.params import LAYER, NORM, STREAM, ParamSpec

WIDTH, DEPTH = 'width', 'depth'
# The family of updates with the norm of their matrix (optim.match_norm), whatever the optimizer:
# their learning rate is a share of the matrix.
RELATIVE = 'relative'
WIDTH_AXES = ('embed', 'head_dim', 'heads', 'kv_features', 'kv_heads', 'mlp', 'qk_features')


@dataclasses.dataclass(frozen=True)
class Growth:
    """Sizes of a parameter and of its model, over the sizes in the base model."""

    fan_in: float = 1.0  #: terms of each sum
    fan_out: float = 1.0  #: outputs
    depth: float = 1.0  #: blocks
    width: float = 1.0  #: of the residual stream


def compute_growth(
    spec: ParamSpec,
    shape: tuple[int, ...],
    base: tuple[int, ...],
    depth: float = 1.0,
    width: float = 1.0,
) -> Growth:
    """Returns the `Growth` of a parameter.

    Args:
      spec: describes the parameter.
      shape: its shape.
      base: its shape in the base model.
      depth: blocks, over the blocks of the base model.
      width: of the residual stream, over the width of the base model.
    """
    size_pairs = zip(fan_sizes(spec, shape), fan_sizes(spec, base), strict=True)
    fan_in, fan_out = (size / base_size for size, base_size in size_pairs)
    return Growth(fan_in, fan_out, depth, width)


def fan_sizes(spec: ParamSpec, shape: tuple[int, ...]) -> tuple[int, int]:
    """Returns (terms of each sum, the number of other entries of a layer)."""

    def count(is_summed):
        named = zip(shape, spec.axes, strict=True)
        return math.prod(n for n, a in named if a != LAYER and (a in spec.fan_in) == is_summed)

    return count(True), count(False)


def one_channel_shape(spec: ParamSpec, shape: tuple[int, ...]) -> tuple[int, ...]:
    """Returns the shape in a model of one channel: sizes that grow with the width are 1.

    Args:
      spec: names the axes.
      shape: of the parameter.
    """
    named = zip(shape, spec.axes, strict=True)
    return tuple(1 if axis in WIDTH_AXES else n for n, axis in named)


@dataclasses.dataclass(frozen=True)
class Factors:
    """Factors that a parametrisation gives a parameter."""

    forward: float = 1.0  #: of the used weight
    init: float = 1.0  #: of the initial deviation
    lr: float = 1.0  #: of the learning rate
    decay: float = 1.0  #: of the weight decay, if the decay rule reads it
    eps: float = 1.0  #: of the optimizer's epsilon
    has_own_init: bool = False  #: the deviation is for the parameter's size, not the base model's


@dataclasses.dataclass(frozen=True)
class Scaling:
    """Initial deviation of a stored parameter, and the `Factors` that training applies to it."""

    init_std: float | None  #: None: the declared value
    forward_factor: float = 1.0  #: of the used weight
    lr_factor: float = 1.0  #: of the learning rate
    decay_factor: float = 1.0  #: 0: the parameter does not decay
    eps_factor: float = 1.0  #: of the optimizer's epsilon


def writes_to_stream(spec: ParamSpec) -> bool:
    """Whether it is the last matrix of attention or of an MLP, or its bias."""
    if spec.part in (NORM, STREAM) or spec.axes[-1:] != ('embed',) or LAYER not in spec.axes:
        return False
    return spec.role == 'vector' or (spec.role == 'hidden' and 'embed' not in spec.fan_in)


_parametrization_row = row_decorator(
    families=(), grows=(), logits_per_width=False, zero=(), is_absolute=False, check=accept_any
)


def parametrization(
    families: tuple[str, ...], grows: tuple[str, ...] = (WIDTH,), **facts: Any
) -> Callable[[Callable], Callable]:
    """Makes the decorator of a row, which sets facts that other code reads.

    logits_per_width: whether attention's logits are q k / H instead of q k / sqrt(H), both equal at
    the base model's head width. zero: the matrices that are 0 at the start. is_absolute: whether
    there is no base model, or one of a single block and channel, so that growths are sizes.

    Args:
      families: of optimizers that the row has rates for.
      grows: the sizes that its factors follow.
      **facts: other facts.

    Returns:
      The decorator.
    """
    return _parametrization_row(families=families, grows=grows, **facts)


def growth_kind(growth: Growth) -> str:
    """Returns 'hidden', 'input', 'output', or 'fixed' if neither side has grown."""
    if growth.fan_in != 1:
        return 'hidden' if growth.fan_out != 1 else 'output'
    return 'input' if growth.fan_out != 1 else 'fixed'


def equal_decay_factors(**factors: Any) -> Factors:
    """Returns Factors with decay 1 / lr: the same share of a weight decays at each width."""
    return Factors(decay=1 / factors.get('lr', 1.0), **factors)


@parametrization(('adam', 'sgd', 'spectral'), grows=())
def standard(spec: ParamSpec, growth: Growth, family: str) -> Factors:
    """Standard: one learning rate for all parameters; initial deviations by the size of each
    matrix.

    There is no base model. The deviations are those of `scaling.init`. Source: the baseline of
    arXiv:2309.14322, section 2.
    """
    return Factors(has_own_init=True)


@parametrization(('adam', 'sgd'))
def ntk(spec: ParamSpec, growth: Growth, family: str) -> Factors:
    """NTK (arXiv:2011.14522): used weights fall with the root of the width.

        kind     forward         learning rate, Adam   SGD
        input    1               1                     1
        hidden   `1 / sqrt(m)`   `1 / sqrt(m)`         1
        output   `1 / sqrt(m)`   `1 / sqrt(m)`         1

    Weights are drawn as in the base model. With SGD, features do not move as width grows (table 1:
    a = 1/2, b = 0, c = 0). With Adam these are the largest rates that stay finite
    (arXiv:2407.05872, table 1), and features do move.
    """
    if growth.fan_in == 1:
        return Factors()
    root = 1 / math.sqrt(growth.fan_in)
    return equal_decay_factors(forward=root, lr=root if family == 'adam' else 1.0)


@parametrization(('adam', 'sgd'))
def mean_field(spec: ParamSpec, growth: Growth, family: str) -> Factors:
    """Mean field (arXiv:2011.14522): used weights of the output fall with the width.

        kind     forward         learning rate, Adam   SGD
        input    1               1                     `n`
        hidden   `1 / sqrt(m)`   `1 / sqrt(m)`         `max(m, n)`
        output   `1 / m`         1                     `m`

    Weights are drawn as in the base model. Sources: table 1, for one hidden layer (c = -1);
    arXiv:2407.05872, table 1.
    """
    kind = growth_kind(growth)
    forward = {'hidden': growth.fan_in**-0.5, 'output': 1 / growth.fan_in}.get(kind, 1.0)
    if family == 'sgd':
        return equal_decay_factors(forward=forward, lr=max(growth.fan_in, growth.fan_out))
    return equal_decay_factors(forward=forward, lr=forward if kind == 'hidden' else 1.0)


@parametrization(('adam', 'sgd', 'spectral'), logits_per_width=True)
def mup(spec: ParamSpec, growth: Growth, family: str) -> Factors:
    """Maximal update, muP (arXiv:2203.03466): table 8, as in the authors' package mup.

        kind    forward  initial deviation  learning rate, Adam  SGD      spectral
        input   1        1                  1                    `n`      -
        hidden  1        `1 / sqrt(m)`      `1 / m`              `n / m`  1, which requires `n = m`
        output  `1 / m`  1                  1                    `m`      -

    The logits of attention are `q^T k / H`. A spectral update has equal singular values, which its
    optimizer scales by `fan_out / fan_in`, the same at each width: it needs no factor.
    """
    m, n, kind = growth.fan_in, growth.fan_out, growth_kind(growth)
    rates = {
        'hidden': {'adam': 1 / m, 'sgd': n / m, 'spectral': 1.0},
        'input': {'adam': 1.0, 'sgd': n},
        'output': {'adam': 1.0, 'sgd': m},
        'fixed': {},
    }
    forward = 1 / m if kind == 'output' else 1.0
    init = m**-0.5 if kind == 'hidden' else 1.0
    return equal_decay_factors(forward=forward, init=init, lr=rates[kind].get(family, 1.0))


@parametrization(('adam', 'sgd', 'spectral'), logits_per_width=True)
def spectral(spec: ParamSpec, growth: Growth, family: str) -> Factors:
    """Spectral condition (arXiv:2310.17813): `sigma` of weights and updates as
    `sqrt(fan_out / fan_in)`.

    This is `mup` with the factor of the output in its initial deviation, which is multiplied by
    `1 / m`, and in its learning rate, `1 / m` with Adam and SGD. The functions are the same,
    without a factor in the forward pass. `sigma` is the largest singular value.
    """
    factors = mup(spec, growth, family)
    if growth_kind(growth) != 'output':
        return factors
    return equal_decay_factors(init=1 / growth.fan_in, lr=1 / growth.fan_in)


@parametrization(('adam',))
def mup_simple(spec: ParamSpec, growth: Growth, family: str) -> Factors:
    """muP (simple): only learning rates scale (arXiv:2309.14322), those of hidden and output by
    `1 / m`.

    The factor of weight decay is 1; the paper's decay is `independent`. Source: appendix D.
    """
    return Factors(lr=1 / growth.fan_in, has_own_init=True)


@parametrization(('adam',))
def mup_intermediate(spec: ParamSpec, growth: Growth, family: str) -> Factors:
    """muP (intermediate) (arXiv:2309.14322): `mup_simple`, with the readout drawn smaller.

    The initial deviation of the readout is multiplied by `1 / sqrt(m)`.
    """
    factors = mup_simple(spec, growth, family)
    if spec.role != 'readout':
        return factors
    return dataclasses.replace(factors, init=growth.fan_in**-0.5)


@parametrization(('adam',), logits_per_width=True, zero=('query',))
def mup_full(spec: ParamSpec, growth: Growth, family: str) -> Factors:
    """muP (full) (arXiv:2309.14322): `mup_intermediate`, with two changes to attention.

    The logits of attention are `q^T k / H`, and query matrices start at 0.
    """
    return mup_intermediate(spec, growth, family)


def check_block_scaling(recipe: Any, part: Any) -> None:
    """Raises ValueError if a norm would undo factors of blocks, or blocks are shared."""
    if recipe.placement.row.norms_updates:
        raise ValueError(
            f'{part} scales the outputs of blocks, but {recipe.placement} normalizes them '
            'afterwards, which undoes the scaling. Choose another placement, such as pre.'
        )
    if any(reparam.row.shares_blocks for reparam in recipe.reparam):
        raise ValueError(
            f'{part} has a learning rate for each block, but model.reparam={recipe.model.reparam} '
            'shares one matrix between all blocks. Leave one of them out.'
        )


def check_eps_scaling(recipe: Any, part: Any) -> None:
    """Raises ValueError as `check_block_scaling`, and for optimizers that evaluate the loss."""
    check_block_scaling(recipe, part)
    for optimizer in recipe.optimizers.values():
        if optimizer.row.needs.evaluates_loss:
            raise ValueError(
                f'{part} scales epsilons, which does not work with {optimizer}, because it '
                'evaluates the loss itself. Choose another optimizer, or another parametrisation, '
                'such as mup.'
            )


def check_unit_init(recipe: Any, part: Any) -> None:
    """Raises ValueError as `check_block_scaling`, and for initial scales other than 1."""
    check_block_scaling(recipe, part)
    matrix = ParamSpec('hidden', ('layer', 'embed', 'mlp'), ('embed',))
    if recipe.init.row(matrix, (1, 1, 1), 1) != 1:
        raise ValueError(
            f'{part} draws weights with standard deviation 1 and scales them when they are used, '
            f'but {recipe.init} has its own standard deviation. Leave scaling.init=fan_in.'
        )


def depth_factors(spec: ParamSpec, growth: Growth, alpha: float) -> Factors:
    """`mup` for Adam, with x + l^-alpha F(x) and rates l^(alpha - 1), l the growth in depth.

    Args:
      spec: describes the parameter.
      growth: of the parameter.
      alpha: the exponent.
    """
    factors = mup(spec, growth, 'adam')
    branch = growth.depth**-alpha
    return dataclasses.replace(
        factors,
        forward=factors.forward * (branch if writes_to_stream(spec) else 1.0),
        lr=factors.lr * (growth.depth ** (alpha - 1) if LAYER in spec.axes else 1.0),
        eps=branch / growth.width,
    )


@parametrization(('adam',), grows=(WIDTH, DEPTH), logits_per_width=True, check=check_eps_scaling)
def complete_p(
    spec: ParamSpec,
    growth: Growth,
    family: str,
    *,
    depth_alpha: Annotated[
        float, Option('a: at l times the depth, each block is scaled by l^-a', 0.5, 1)
    ] = 1.0,
) -> Factors:
    """CompleteP (arXiv:2505.01618): `mup` in width, with blocks that fall with depth,
    `x + l^-a F(x)`.

    `l` is the growth in depth, and `a` is `depth_alpha`. `l^-a` multiplies the last matrix of each
    sublayer and its bias. Learning rates in blocks have the factor `l^(a - 1)`, and epsilons the
    factor `l^-a / m`. As in the authors' minimal code (EleutherAI/nanoGPT-mup, branch completep),
    every epsilon has this factor, and the factor of decay is `m`, as in `mup`. Source: table 1.
    """
    return depth_factors(spec, growth, depth_alpha)


@parametrization(('adam',), grows=(WIDTH, DEPTH), logits_per_width=True, check=check_eps_scaling)
def depth_mup(spec: ParamSpec, growth: Growth, family: str) -> Factors:
    """Depth-muP (arXiv:2310.02244): `complete_p` with an exponent of 1/2, `x + l^(-1/2) F(x)`."""
    return depth_factors(spec, growth, 0.5)


def check_hypersphere(recipe: Any, part: Any) -> None:
    """Raises ValueError as `check_block_scaling`, and unless matrices stay on their spheres.

    Hidden matrices, and a readout that is not the embedding's table, need relative updates and a
    projection to their initial norm, hidden matrices also equal singular values of updates.
    """
    check_block_scaling(recipe, part)
    if recipe.optimizer.row.family != 'spectral':
        raise ValueError(
            f'{part} has no factor of width, which is right if the singular values of updates are '
            f'equal, but those of {recipe.optimizer} are not. Choose optim.name=muon or normuon.'
        )
    roles = {'hidden'} | (set() if recipe.model.tie_embeddings else {'readout'})
    projected = {
        role
        for reparam in recipe.reparam
        if reparam.row.maps_after_update and 'roles' in reparam.options
        for role in str(reparam.options['roles']).split('+')
    }
    matched = set() if recipe.optim.match_norm is None else set(recipe.matched_roles)
    if roles <= projected & matched:
        return
    names = '+'.join(sorted(roles))
    projection = '+'.join(sorted(projected)) or None
    raise ValueError(
        f'{part} trains matrices of constant norm: it needs optim.match_norm=1, '
        f'optim.match_norm_roles={names}, model.reparam=normalize_and_project and '
        f'reparam.roles={names}; got match_norm={recipe.optim.match_norm} for '
        f'{"+".join(recipe.matched_roles)} and a projection of {projection}.'
    )


@parametrization(
    (RELATIVE, 'adam'),
    grows=(WIDTH, DEPTH),
    logits_per_width=True,
    check=check_hypersphere,
)
def hyper_p(
    spec: ParamSpec,
    growth: Growth,
    family: str,
    *,
    readout_factor: Annotated[
        str,
        Option(
            'factor of the used readout: none, as published, or 1 / m', choices=('none', 'width')
        ),
    ] = 'none',
) -> Factors:
    """HyperP (arXiv:2603.28743): matrices on spheres, `x + l^(-1/2) F(x)` and rates `l^(-1/2)`.

    A step turns a matrix by an angle, which has no factor of width: hidden matrices and readout
    have updates as large as themselves (`optim.match_norm`) and keep their initial norm
    (`model.reparam=normalize_and_project`). Hidden matrices start with the deviation of `mup`,
    `1 / sqrt(m)`, embeddings and readout with that of the base model. `l` is the growth in depth;
    the rates of all parameters have the factor `l^(-1/2)`, and `l^(-1/2)` multiplies the last
    matrix of each sublayer when it is used. The logits of attention are `q^T k / H`.

    As in the authors' code (github microsoft/ArchScale), where each of `L` blocks adds
    `F(x) / sqrt(2 L)`: that is this row with a factor `1 / sqrt(2 L)` in the base model. There,
    neither weight decay nor warm-up is used. The factors of batch and tokens,
    `sqrt(B / B_0) (T / T_0)^-0.32`, are rules of `eval.rules`.

    Without equal singular values, an update of the norm of its matrix has a largest singular value
    that grows with the width, so the row is for Muon and its kin (family `spectral`). Their updates
    have as many directions as the gradient: fewer than the width if a batch has fewer tokens.

    With a readout of constant deviation, as in that code, logits grow with the root of the width
    and their changes faster. `readout_factor=width` multiplies the used readout by `1 / m`, as
    `mup` does; then all activations and their changes keep their size.
    """
    branch, forward = growth.depth**-0.5, 1.0
    if writes_to_stream(spec):
        forward = branch
    elif readout_factor == 'width' and growth_kind(growth) == 'output':
        forward = 1 / growth.fan_in
    return Factors(
        forward=forward,
        init=growth.fan_in**-0.5 if growth_kind(growth) == 'hidden' else 1.0,
        lr=branch,
    )


@parametrization(
    ('adam',),
    grows=(WIDTH, DEPTH),
    logits_per_width=True,
    is_absolute=True,
    check=check_unit_init,
)
def unit(spec: ParamSpec, growth: Growth, family: str) -> Factors:
    """Unit scaling, u-muP (arXiv:2407.17465): weights of standard deviation 1, whatever their size.

        kind     forward         learning rate, Adam
        input    1               1 for gains and biases, `1 / sqrt(n)` for embeddings
        hidden   `1 / sqrt(m)`   `1 / sqrt(m)`
        output   `1 / m`         1

    Here `m` and `n` are sizes, not growths: there is no base model. Each of `L` blocks adds
    `F(x) / sqrt(L)`, and learning rates in blocks have the factor `1 / sqrt(L)`. The authors'
    residual rule gives the same if embedding, attention and MLPs contribute alike
    (graphcore-research/unit-scaling, transformer_residual_scaling_rule). Their constants for
    activations, for the output of the softmax and for backward passes in narrow types are left out.
    Gains do not depend on these, and outputs of blocks differ by a constant. Source: table 2.
    """
    kind, m = growth_kind(growth), growth.fan_in
    forward = {'hidden': m**-0.5, 'output': 1 / m}.get(kind, 1.0)
    rate = m**-0.5 if kind == 'hidden' else 1.0
    if spec.role == 'embedding':
        rate = growth.fan_out**-0.5
    branch = growth.depth**-0.5
    return equal_decay_factors(
        forward=forward * (branch if writes_to_stream(spec) else 1.0),
        lr=rate * (branch if LAYER in spec.axes else 1.0),
    )


PARAMETRIZATIONS: dict[str, Any] = {  # functions with facts: `_parametrization_row`
    'standard': standard,
    'complete_p': complete_p,
    'depth_mup': depth_mup,
    'hyper_p': hyper_p,
    'mean_field': mean_field,
    'mup': mup,
    'mup_full': mup_full,
    'mup_intermediate': mup_intermediate,
    'mup_simple': mup_simple,
    'ntk': ntk,
    'spectral': spectral,
    'unit': unit,
}


def compute_scaling(
    row: Callable[..., Factors],
    init: Callable[[ParamSpec, tuple[int, ...], int], float],
    spec: ParamSpec,
    shapes: tuple[tuple[int, ...], tuple[int, ...]],
    blocks: tuple[int, int],
    growth: Growth,
    family: str,
    **options: Any,
) -> Scaling:
    """Applies a row to a parameter.

    The spec's init_gain multiplies the deviation. Vectors keep their declared value, and decay only
    if their spec sets it.

    Args:
      row: a row of `PARAMETRIZATIONS`.
      init: a row of `INITS`, which maps (spec, shape, blocks) to a deviation.
      spec: describes the parameter.
      shapes: (of the parameter, in the base model).
      blocks: numbers of blocks of both models.
      growth: of the parameter.
      family: of its updates: 'adam', 'sgd', 'spectral' or RELATIVE.
      **options: of the row.

    Returns:
      The `Scaling`.
    """
    factors = row(spec, growth, family, **options)
    std, decays = None, True
    if spec.role == 'vector':
        decays = spec.decayed
    else:
        model = 0 if factors.has_own_init else 1
        std = factors.init * init(spec, shapes[model], blocks[model]) * spec.init_gain
    return Scaling(std, factors.forward, factors.lr, factors.decay * decays, factors.eps)
