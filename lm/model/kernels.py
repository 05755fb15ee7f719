"""The kernels of a recipe on a platform: those that it names, and the platform's own attention."""

from lm.config.recipe import Recipe
from lm.model.check import scores_of
from modules.kernels import ATTENTION_KERNELS, Kernels, kernels_for
from modules.kernels.attention import refuse_scores


def chosen_kernels(recipe: Recipe, platform: str) -> Kernels:
    """Returns the kernels of a platform. Raises ValueError for one that does not run there."""
    named = {operation: part.name for operation, part in recipe.kernels.items()}
    options = {operation: part.options for operation, part in recipe.kernels.items()}
    if fused := fused_attention(recipe, platform)[0]:
        named['attention'] = fused
    implementation = recipe.config.kernels.implementation
    return kernels_for(
        platform,
        implementation,
        matmul_options=options.get('matmul'),
        attention_options=options.get('attention'),
        **named,
    )


def fused_attention(recipe: Recipe, platform: str) -> tuple[str, str]:
    """Returns (the attention kernel that is made for a platform alone, '') where the config leaves
    the choice open, and ('', why not) where that does not serve what the model asks of it.
    """
    scores = scores_of(recipe)
    if scores is None or recipe.implementation is not None or 'attention' in recipe.kernels:
        return '', ''
    for name, row in ATTENTION_KERNELS.items():
        if platform in (row.platforms or ()):
            try:
                _refuse(recipe, name)
            except ValueError as error:
                return '', str(error)
            return name, ''
    return '', ''


def _refuse(recipe: Recipe, name: str) -> None:
    """Raises ValueError where a kernel does not serve the scores, the derivatives or the mesh."""
    kernel, parts = ATTENTION_KERNELS[name], recipe.mesh.context
    refuse_scores(name, scores_of(recipe), recipe.model.dtype, recipe.head_dim)
    for asker, what in recipe.in_forward_mode.items():
        if what not in kernel.forward_mode:
            raise ValueError(
                f'kernels.attention={name} has no derivative in forward mode of the {what}, which '
                f'{asker} needs'
            )
    if parts != 1 and kernel.refuse_cut is None:
        raise ValueError(f'kernels.attention={name} must have rows whole; mesh.context is {parts}')
    if parts > 1:
        kernel.refuse_cut(recipe.data.seq_len, parts)
