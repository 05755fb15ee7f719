"""The kernels of a recipe on a platform: those that it names, and the platform's own."""

from lm.config.recipe import Recipe
from lm.model.check import attention_scores
from modules.kernels import ATTENTION_KERNELS, CROSS_ENTROPY_KERNELS, Kernels, kernels_for
from modules.kernels.attention import check_scores


def select_kernels(recipe: Recipe, platform: str) -> Kernels:
    """Returns the kernels of a platform. Raises ValueError for one that does not run there."""
    named = {operation: part.name for operation, part in recipe.kernels.items()}
    options = {operation: part.options for operation, part in recipe.kernels.items()}
    scores, is_open = attention_scores(recipe), _is_attention_open(recipe)
    if fused := select_fused_attention(recipe, platform)[0]:
        named['attention'] = fused
    elif is_open and scores is not None and scores.dropout:
        serve = (name for name, row in ATTENTION_KERNELS.items() if 'dropout' in row.supports)
        named['attention'] = next(serve)
    if loss := select_loss_kernel(recipe, platform):
        named['cross_entropy'] = loss
    implementation = recipe.config.kernels.implementation
    return kernels_for(
        platform,
        implementation,
        matmul_options=options.get('matmul'),
        attention_options=options.get('attention'),
        **named,
    )


def select_fused_attention(recipe: Recipe, platform: str) -> tuple[str, str]:
    """Returns (the attention kernel that is made for a platform alone, '') where the config leaves
    the choice open, and ('', why not) where that does not serve what the model asks of it.
    """
    scores = attention_scores(recipe)
    if scores is None or not _is_attention_open(recipe):
        return '', ''
    for name, row in ATTENTION_KERNELS.items():
        if platform in (row.platforms or ()):
            try:
                _check_attention_kernel(recipe, name)
            except ValueError as error:
                return '', str(error)
            return name, ''
    return '', ''


def select_loss_kernel(recipe: Recipe, platform: str) -> str:
    """Returns the kernel of the loss that a platform has of its own where the config leaves the
    choice open; '' where there is none, or where a derivative in forward mode or a readout that is
    cut over `tensor`, of which a kernel would have rows whole, asks for plain operations.
    """
    is_open = recipe.implementation is None and 'cross_entropy' not in recipe.kernels
    if not (is_open and recipe.loss.row.has_kernels) or recipe.mesh.tensor != 1:
        return ''
    for name, row in CROSS_ENTROPY_KERNELS.items():
        if platform in row.default_platforms and (
            row.is_forward_mode or not recipe.forward_mode_targets
        ):
            return name
    return ''


def _is_attention_open(recipe: Recipe) -> bool:
    return recipe.implementation is None and 'attention' not in recipe.kernels


def _check_attention_kernel(recipe: Recipe, name: str) -> None:
    """Raises ValueError where a kernel does not serve the scores, the derivatives or the mesh."""
    kernel, parts = ATTENTION_KERNELS[name], recipe.mesh.context
    check_scores(name, attention_scores(recipe), recipe.model.dtype, recipe.head_dim)
    for asker, what in recipe.forward_mode_targets.items():
        if what not in kernel.forward_mode:
            raise ValueError(
                f'kernels.attention={name} has no derivative in forward mode of the {what}, which '
                f'{asker} needs'
            )
    if parts != 1 and kernel.check_context_axis is None:
        raise ValueError(f'kernels.attention={name} must have rows whole; mesh.context is {parts}')
    if parts > 1:
        kernel.check_context_axis(recipe.data.seq_len, parts)
