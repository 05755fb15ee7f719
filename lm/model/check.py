"""What can be wrong with a recipe, found before anything is traced or read.

What a part demands of the rest stands with the part (`modules.facts`). Here, and in the modules
that are called from here, is what concerns several.
"""

from lm.config.fields import FIELDS
from lm.config.recipe import Part, Recipe
from lm.config.resolve import flatten
from lm.model.check_model import check_model
from lm.model.check_scaling import check_parametrization
from modules.choices import nearest_divisor
from modules.losses import LOSSES
from modules.norms import NORMS
from modules.params import ROLES


def check(recipe: Recipe) -> None:
    """ValueError for the first number out of range, or for fields that do not fit each other.

    Names and types have been checked by `lm.config.resolve.resolve`. What is read from disk is not looked
    at: `lm.data.check` and `lm.run.start.check_init_from` do that.
    """
    for path, value in flatten(recipe).items():
        if FIELDS[path].option is not None and value is not None:
            FIELDS[path].option.check(path, value)
    check_model(recipe)
    for part in recipe.parts:
        if part.section:  # rows of other tables have no options, and no rules
            part.row.check(recipe, part)
    _check_init_scale(recipe)
    check_parametrization(recipe)
    _check_optimizers(recipe)
    _check_moved_weights(recipe)
    _check_loss(recipe)
    _check_batch(recipe)


def _check_init_scale(recipe: Recipe) -> None:
    scale = recipe.config.scaling.init_scale
    for part in recipe.reparam:
        if scale < part.row.least_init_scale:
            raise ValueError(
                f'{part} divides by the norms of the initial matrices, so that scaling.init_scale '
                f'must be at least {part.row.least_init_scale}; got {scale}'
            )


def _check_optimizers(recipe: Recipe) -> None:
    shrinks = recipe.optim.embedding_gradient_shrink is not None
    if shrinks and recipe.model.tie_embeddings:
        raise ValueError(
            'optim.embedding_gradient_shrink is of the embedding that words are looked up in; with '
            'model.tie_embeddings=True its gradient is that of the readout too, which is not '
            'meant. Leave one of them out.'
        )
    others = recipe.others
    if missing := sorted(set(ROLES) - {'hidden'} - set(others.row.roles)):
        raise ValueError(
            f'{others} is not for parameters of the roles {", ".join(missing)}, only '
            f'{", ".join(others.row.roles)}. Give it to the hidden matrices, optim.name='
            f'{others.name}, and the others another, such as optim.others=adamw.'
        )
    _check_forward_mode(recipe)
    for part in recipe.optimizers.values():
        _check_own_loss(recipe, part)
        if part.row.needs.convex_loss and not recipe.loss.row.convex:
            able = [name for name, row in LOSSES.items() if row.convex]
            raise ValueError(
                f'{part} needs a loss that is convex in the logits: loss.name={"|".join(able)}; '
                f'got {recipe.loss.name}'
            )


def _check_own_loss(recipe: Recipe, part: Part) -> None:
    """Raises ValueError for changes of the gradient beside an optimizer that measures the loss."""
    if not part.row.needs.own_loss:
        return
    if recipe.decay.row.in_gradient and recipe.optim.weight_decay:
        raise ValueError(
            f'{recipe.decay} adds weight decay to the gradient, and {part} measures the loss '
            'itself, without it. Choose optim.decay_rule=decoupled.'
        )
    if part is recipe.others and recipe.optim.embedding_gradient_shrink is not None:
        raise ValueError(
            f'optim.embedding_gradient_shrink makes a gradient smaller, and {part} measures the '
            'loss itself, which stays as it is. Leave one of them out.'
        )


def _check_moved_weights(recipe: Recipe) -> None:
    """Raises ValueError where weights would be mapped away from the points that an average is made
    of, or moved by more than was measured.
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


def _check_forward_mode(recipe: Recipe) -> None:
    """ValueError for norms without it; `lm.training.update` knows the kernel of the devices."""
    for asker, what in recipe.in_forward_mode.items():
        for norm in recipe.norms.values():
            if not norm.row.forward_mode:
                able = [name for name, row in NORMS.items() if row.forward_mode]
                raise ValueError(
                    f'{asker} differentiates the {what} in forward mode, and {norm} has a backward '
                    f'pass of its own; choose one of {", ".join(able)}'
                )


def _check_loss(recipe: Recipe) -> None:
    loss, kernel = recipe.loss, recipe.kernels.get('cross_entropy')
    if recipe.model.logit_softcap and loss.row.linear_readout:
        raise ValueError(
            f'{loss} is computed from sums of logits, which a softcap bends; it needs '
            f'model.logit_softcap=0, got {recipe.model.logit_softcap}'
        )
    if kernel and not loss.row.has_kernels:
        raise ValueError(f'{kernel} would change nothing: {loss} is another loss. Leave it out.')


def _check_batch(recipe: Recipe) -> None:
    rows, parts = recipe.data.batch_size, recipe.train.microbatches
    if rows % parts:
        raise ValueError(
            f'train.microbatches must divide data.batch_size; got {parts} for {rows} sequences. '
            f'Nearest that works: {nearest_divisor(rows, parts)}.'
        )
    for name, size in vars(recipe.mesh).items():
        if size == 0:
            raise ValueError(f'mesh.{name} must be a number of devices, or -1 for all; got 0')
