"""Checks of a recipe, before anything is traced or read: whether its parts go together.

A demand of one part on the rest stands beside that part (`modules.facts`).
"""

import dataclasses

from lm.config.fields import FIELDS
from lm.config.recipe import Recipe
from lm.config.resolve import flatten
from lm.config.traced_steps import parse_traced_steps
from lm.model.base_size import base_head_dim, check_base
from modules.choices import check_divides
from modules.kernels.attention import ATTENTION_KERNELS, Scores, check_scores
from modules.norms import NORMS
from modules.options import declared_options
from modules.params import ParamSpec
from modules.reparam import check_order
from modules.scaling import PARAMETRIZATIONS, Growth


def check(recipe: Recipe) -> None:
    """Raises ValueError for the first number out of range, or fields that do not go together.

    `lm.config.resolve.resolve` has checked names and types before; `lm.data.check` and
    `lm.run.start.check_init_from` check what is read from disk.
    """
    for path, value in flatten(recipe).items():
        if FIELDS[path].option is not None and value is not None:
            FIELDS[path].option.check(path, value)
    parse_traced_steps(recipe)
    _check_sizes(recipe)
    for part in recipe.parts:
        if part.section:  # rows of other tables have no options, and no rules
            part.row.check(recipe, part)
    _check_loss_on(recipe)
    _check_kernels(recipe)
    _check_forward_mode(recipe)
    check_base(recipe)
    _check_scaled_updates(recipe)
    _check_tied_embeddings(recipe)
    check_order([part.name for part in recipe.reparam])
    _check_moved_weights(recipe)


def _check_sizes(recipe: Recipe) -> None:
    """Raises ValueError for heads or microbatches that do not divide evenly, or an axis of 0."""
    flat = flatten(recipe)
    if recipe.model.head_dim is None:  # it follows from these
        check_divides(
            'without model.head_dim, model.n_heads',
            recipe.model.n_heads,
            'model.d_model',
            recipe.model.d_model,
        )
    if recipe.model.bias and recipe.model.qkv_bias:
        raise ValueError(
            'model.bias gives queries, keys and values their biases too; leave model.qkv_bias out'
        )
    for field, whole in (
        ('model.n_kv_heads', 'model.n_heads'),
        ('train.microbatches', 'data.batch_size'),
    ):
        check_divides(field, flat[field], whole, flat[whole])
    for name, size in vars(recipe.mesh).items():
        if size == 0:
            raise ValueError(f'mesh.{name} must be a number of devices, or -1 for all; got 0')


def _check_loss_on(recipe: Recipe) -> None:
    """Raises ValueError where evaluation alone has holes, whose fillings it always counts."""
    readers = [part for part in recipe.objectives if 'loss_on' in part.options]
    defaults = {declared_options(part.row)['loss_on'].default for part in readers}
    in_training = any(part in recipe.objective for part in readers)
    if recipe.data.loss_on not in (None, *defaults) and not in_training:
        raise ValueError(
            f'data.loss_on={recipe.data.loss_on} is for training, and data.objective='
            f'{recipe.data.objective} has no holes; evaluation always counts what fills them. '
            'Leave it out, or None.'
        )


def attention_scores(recipe: Recipe) -> Scores | None:
    """Returns what the attention layer asks of its kernel, on all rows of text that it may have;
    None where it has no such scores.
    """
    layer = recipe.attention
    if not layer.row.has_scores:
        return None
    wiring = dict.fromkeys(('n_heads', 'n_kv_heads', 'qk_norm', 'rotate', 'kernels', 'dtype'))
    scores = layer.build(
        **wiring,
        head_dim=recipe.head_dim,
        slopes=recipe.position.row.slopes,
        base_head_dim=base_head_dim(recipe),
    ).scores()
    has_prefix = any(part.row.has_prefix for part in recipe.objectives)
    return dataclasses.replace(scores, prefix=has_prefix, dropout='attention' in recipe.dropout)


def _check_kernels(recipe: Recipe) -> None:
    """Raises ValueError for a kernel of an operation that the model does not have, and for one of
    attention that does not serve the scores of the layer.
    """
    layer, scores, named = (
        recipe.attention,
        attention_scores(recipe),
        recipe.kernels.get('attention'),
    )
    of_all = recipe.implementation.row if recipe.implementation else {}
    name = named.name if named else of_all.get('attention')  # None: the platform decides
    other = 'attention' if scores is None else 'linear_attention'
    unused = {other: f'{layer} has another kind of kernel'}
    norms = recipe.norms.values()
    if not any(norm.row.divides_by_rms for norm in norms):
        able = ', '.join(name for name, row in NORMS.items() if row.divides_by_rms)
        unused['rms_norm'] = (
            f'of {", ".join(map(str, norms))} none divides by the root mean square; those that do '
            f'are {able}'
        )
    holds_scores = scores is not None and name is not None and ATTENTION_KERNELS[name].holds_scores
    if not holds_scores and 'n_experts' not in recipe.mlp.options:
        unused['softmax'] = (
            'it is for attention that has all of its scores at once, kernels.attention=reference, '
            'and for routers, model.mlp=moe'
        )
    if not recipe.loss.row.has_kernels:
        unused['cross_entropy'] = f'{recipe.loss} is another loss'
    for operation, why in unused.items():
        if kernel := recipe.kernels.get(operation):
            raise ValueError(f'{kernel} would change nothing: {why}. Leave it out.')
    if 'attention' in recipe.dropout:
        rate = f'model.attention_dropout={recipe.model.attention_dropout}'
        if scores is None:
            raise ValueError(
                f'{layer} has no probabilities, so that {rate} would drop none. Set it to 0.'
            )
        able = [row for row, kernel in ATTENTION_KERNELS.items() if 'dropout' in kernel.supports]
        if name is not None and name not in able:
            raise ValueError(
                f'kernels.attention={name} drops no probabilities, which {rate} asks for. Choose '
                f'kernels.attention={"|".join(able)}, or model.attention_dropout=0.'
            )
    if scores is not None and name is not None:
        check_scores(name, scores, recipe.model.dtype, recipe.head_dim)


def _check_forward_mode(recipe: Recipe) -> None:
    """Raises ValueError for norms without a derivative in forward mode where one is needed.

    `lm.training.state.check_learner` asks the same of kernels, which depend on the devices.
    """
    for asker, what in recipe.forward_mode_targets.items():
        for norm in recipe.norms.values():
            if not norm.row.forward_mode:
                able = [name for name, row in NORMS.items() if row.forward_mode]
                raise ValueError(
                    f'{asker} differentiates the {what} in forward mode, and {norm} has a backward '
                    f'pass of its own; choose one of {", ".join(able)}'
                )


def _check_scaled_updates(recipe: Recipe) -> None:
    """Raises ValueError for optimizers whose updates do not have the size that is scaled."""
    part, row = recipe.scaling, recipe.scaling.row
    for chosen in recipe.optimizers.values():
        family = chosen.row.family
        if family not in row.families:
            able = [name for name, one in PARAMETRIZATIONS.items() if family in one.families]
            raise ValueError(
                f'{part} has no table for {chosen}, a {family}-like optimizer, only for those like '
                f'{" and ".join(row.families)}. Choose scaling.name={"|".join(able)}, or '
                'another optimizer.'
            )
        why = [
            f'with optim.{option}={value} they are of another size. Choose another value, or '
            'scaling.name=standard.'
            for option, value in chosen.row.other_sizes.items()
            if chosen.options.get(option) == value
        ]
        if chosen is recipe.optimizer and recipe.optim.match_rms is not None and family != 'adam':
            why.append(
                'optim.match_rms gives them one root mean square, as those of an adam-like one '
                'have. Leave it out.'
            )
        if row.grows and why:
            raise ValueError(
                f'{part} scales updates of {chosen} as those of a {family}-like optimizer, and '
                f'{why[0]}'
            )


def _check_tied_embeddings(recipe: Recipe) -> None:
    """Raises ValueError where one table cannot be both embedding and readout.

    As the readout it may have another factor in the forward pass (`lm.model.transformer`); its
    deviation and its rate are those of an embedding.
    """
    if not recipe.model.tie_embeddings:
        return
    if recipe.optim.embedding_gradient_shrink is not None:
        raise ValueError(
            'optim.embedding_gradient_shrink is for an embedding that is only looked up; with '
            "model.tie_embeddings=True its gradient is the readout's too. Leave one of them out."
        )
    part, family = recipe.scaling, recipe.others.row.family
    if not part.row.grows:
        return
    readout = ParamSpec('readout', ('embed', 'vocab'), ('embed',))
    embedding = ParamSpec('embedding', ('vocab', 'embed'))
    as_readout = part.row(readout, Growth(2.0, 1.0, 2.0, 2.0), family)
    as_input = part.row(embedding, Growth(1.0, 2.0, 2.0, 2.0), family)
    if (as_readout.init, as_readout.lr) != (as_input.init, as_input.lr):
        raise ValueError(
            f'{part} has other deviations or rates for a readout than for '
            'embeddings, which are one with model.tie_embeddings=True. Choose scaling.name=mup, '
            'which scales the readout where it is used, or leave the embeddings untied.'
        )


def _check_moved_weights(recipe: Recipe) -> None:
    """Raises ValueError where weights would be mapped away from the points of an average, or moved
    farther than was measured.
    """
    average = recipe.average
    mapped = [part for part in recipe.reparam if part.row.maps_after_update]
    moved = [*mapped, *([average] if average.row.moves_weights else [])]
    if moved and recipe.optim.ghost_radius is not None:
        raise ValueError(
            f'optim.ghost_radius limits what an update does to the logits, and {moved[0]} moves '
            'the weights after it. Leave one of them out.'
        )
    if mapped and average.row.moves_weights:
        raise ValueError(
            f'{average} steers the weights between two points that it keeps and {mapped[0]} maps '
            'them after each update: they would part. Choose optim.average=ema, which is mapped '
            'where it is used, or another reparametrisation.'
        )
