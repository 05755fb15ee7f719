"""Selects the kernels of a recipe: the kernels that it names, else the platform's defaults."""

from collections.abc import Mapping

from lm.config.recipe import Recipe
from lm.config.resolve import update_recipe
from lm.model.check import attention_scores
from modules.attention import ATTENTIONS
from modules.kernels import ATTENTION_KERNELS, CROSS_ENTROPY_KERNELS, Kernels, kernels_for
from modules.kernels.attention import check_scores
from modules.kernels.matmul.low_precision import LAYERS, Simulated


def select_kernels(recipe: Recipe, platform: str) -> Kernels:
    """Returns the kernels of a platform. Raises ValueError for a kernel that does not run there.

    With model.pattern, the kernel for attention is that of the first block; see `kind_kernels`.
    """
    names = {operation: part.name for operation, part in recipe.kernels.items()}
    options = {operation: part.options for operation, part in recipe.kernels.items()}
    scores, is_open = attention_scores(recipe), _is_attention_open(recipe)
    if fused := select_fused_attention(recipe, platform)[0]:
        names['attention'] = fused
    elif is_open and scores is not None and scores.dropout:
        supporting = (name for name, row in ATTENTION_KERNELS.items() if 'dropout' in row.supports)
        names['attention'] = next(supporting)
    if loss_kernel := select_loss_kernel(recipe, platform):
        names['cross_entropy'] = loss_kernel
    implementation = recipe.config.kernels.implementation
    return kernels_for(
        platform,
        implementation,
        matmul_options=options.get('matmul'),
        attention_options=options.get('attention'),
        recurrence_options=options.get('recurrence'),
        **names,
    )


def kind_kernels(recipe: Recipe, kind: Recipe, kernels: Kernels) -> Kernels:
    """Returns the kernels of the blocks of one kind (`Recipe.kinds`).

    Args:
      recipe: of the model.
      kind: of the blocks.
      kernels: of the model, which blocks have if there is no pattern.
    """
    return kernels if kind == recipe else select_kernels(kind, kernels.platform)


def list_kernels(recipe: Recipe, kernels: Kernels) -> dict[str, str]:
    """Returns {operation: kernel}, without operations of other kinds of attention.

    Args:
      recipe: of the model.
      kernels: of the model.
    """
    used = {kind.attention.row.operation for kind in recipe.kinds.values()}
    unused = {row.operation for row in ATTENTIONS.values()} - used
    return {name: kernel for name, kernel in kernels.names if name not in unused}


def format_kernels(names: Mapping[str, str]) -> str:
    """Returns `operation=kernel ...` of `list_kernels`."""
    return ' '.join(f'{operation}={kernel}' for operation, kernel in names.items())


def list_attention_kernels(recipe: Recipe, kernels: Kernels) -> dict[str, str]:
    """Returns {item of model.pattern: its attention kernel} of the kinds of blocks with scores.

    Without a pattern, the item is ''. `kernels` are those of the model.
    """
    return {
        entry: kind_kernels(recipe, kind, kernels).kernel_name('attention')
        for entry, kind in recipe.kinds.items()
        if kind.attention.row.has_scores
    }


def rounds_products(recipe: Recipe) -> bool:
    """Whether blocks or the readout round the operands of their products to few bits."""
    matmul = recipe.kernels.get('matmul')
    # The row of a product without options is a plain function.
    return matmul is not None and isinstance(matmul.row, type) and issubclass(matmul.row, Simulated)


def widen_products(recipe: Recipe) -> Recipe:
    """Returns the recipe of the same model without rounded products; stacks of blocks stay."""
    if not rounds_products(recipe):
        return recipe
    return update_recipe(recipe, {'kernels.wide_layers': '+'.join(LAYERS)})


def select_fused_attention(recipe: Recipe, platform: str) -> tuple[str, str]:
    """Returns (kernel name, reason) for the attention kernel that is specific to a platform.

    The name is '' if the recipe chooses attention itself, if the platform has no such kernel, or if
    that kernel does not support the model; the reason is then its error, or ''.
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
    """Returns the platform's own cross-entropy kernel, or '' if plain operations are used.

    Plain operations are used if the recipe chooses the kernel itself, if a derivative in forward
    mode is needed, or if the readout is cut over `tensor`: a kernel needs whole rows of logits.
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
    """Whether the config leaves the choice of the attention kernel to the platform."""
    return recipe.implementation is None and 'attention' not in recipe.kernels


def _check_attention_kernel(recipe: Recipe, name: str) -> None:
    """Raises ValueError if a kernel does not support the scores, derivatives or mesh."""
    kernel, parts = ATTENTION_KERNELS[name], recipe.mesh.context
    scores = attention_scores(recipe)
    assert scores is not None  # `select_fused_attention` has checked it
    check_scores(name, scores, recipe.model.dtype, recipe.head_dim)
    for asker, what in recipe.forward_mode_targets.items():
        if what not in kernel.forward_mode:
            raise ValueError(
                f'kernels.attention={name} has no forward-mode derivative of the {what}, which '
                f'{asker} needs'
            )
    if parts != 1:
        if kernel.check_context_axis is None:
            raise ValueError(f'kernels.attention={name} needs whole rows; got mesh.context={parts}')
        if parts > 1:
            kernel.check_context_axis(recipe.data.seq_len, parts)
