"""Checks that the parts of a recipe fit together, before anything is traced or read.

Each part checks its own demands on the rest of a recipe (`modules.facts`).
"""

import dataclasses
from collections.abc import Callable

from lm.config.checkpoint_steps import list_checkpoint_steps
from lm.config.fields import FIELDS
from lm.config.mixture import reads_chats, source_flag
from lm.config.pattern import PATTERN
from lm.config.recipe import Part, Recipe
from lm.config.resolve import flatten
from lm.config.stages import STAGES, check_stages
from lm.config.traced_steps import parse_traced_steps
from lm.model.base_size import base_head_dim, check_base
from lm.model.objectives import check_chats
from modules.attention import ATTENTIONS
from modules.choices import check_divides
from modules.kernels.attention import ATTENTION_KERNELS, Scores, check_scores
from modules.losses import LOSSES
from modules.norms import NORMS
from modules.optim.groups import ROLE_OF
from modules.optim.storage import STOCHASTIC
from modules.options import declared_options
from modules.params import ParamSpec
from modules.placements import PLACEMENTS
from modules.reparam import check_order
from modules.reparam.base import MIN_NORM
from modules.scaling import PARAMETRIZATIONS, Growth
from modules.scaling.parametrization import RELATIVE


def check(recipe: Recipe) -> None:
    """Raises ValueError for the first number out of range, or for fields that conflict.

    `lm.config.resolve.resolve` has already checked names and types. `lm.data.check` and
    `lm.run.start.check_init_from` check files.
    """
    for path, value in flatten(recipe).items():
        option = FIELDS[path].option
        if option is not None and value is not None:
            option.check(path, value)
    parse_traced_steps(recipe)
    list_checkpoint_steps(recipe)
    _check_sizes(recipe)
    _check_pattern(recipe)
    check_kinds(recipe, _check_parts)
    _check_loss_on(recipe)
    check_chats(recipe)
    _check_token_weights(recipe)
    _check_kernels(recipe)
    _check_forward_mode(recipe)
    check_base(recipe)
    _check_scaled_updates(recipe)
    _check_matched_norms(recipe)
    _check_cautious(recipe)
    _check_weight_dtype(recipe)
    _check_numbers_over_steps(recipe)
    _check_spikes(recipe)
    _check_evaluations(recipe)
    _check_tied_embeddings(recipe)
    check_order([part.name for part in recipe.reparam])
    _check_moved_weights(recipe)
    check_stages(recipe)
    check_each_stage(recipe, check)
    _check_stage_rows(recipe)


def check_each_stage(recipe: Recipe, check_stage: Callable[[Recipe], None]) -> None:
    """Calls a check with the recipe of each stage of the run; without stages it calls nothing.

    Raises its ValueError, with the number of the stage.
    """
    for number, stage_recipe in enumerate(recipe.stage_recipes, start=1):
        if stage_recipe is not recipe:
            try:
                check_stage(stage_recipe)
            except ValueError as error:
                raise ValueError(f'{STAGES}, stage {number}: {error}') from None


def _check_stage_rows(recipe: Recipe) -> None:
    """Raises ValueError if conversations would be cut into the rows of a stage."""
    shortest = min(stage.shape.seq_len for stage in recipe.stages)
    if shortest < recipe.data.seq_len and reads_chats(recipe.data):
        raise ValueError(
            f'a stage of {STAGES} has seq_len={shortest}, which cuts rows of data.seq_len='
            f'{recipe.data.seq_len} into parts, but {source_flag(recipe.data)} has conversations, '
            'which stay whole. Leave seq_len out of the stages.'
        )


def _check_parts(recipe: Recipe) -> None:
    """Raises ValueError as the checks of the parts do."""
    for part in recipe.parts:
        if part.section:  # rows of other tables have no options, and no rules
            part.row.check(recipe, part)


def check_kinds(recipe: Recipe, check_kind: Callable[[Recipe], None]) -> None:
    """Calls a check with the recipe of each kind of block, which without a pattern is the recipe.

    Raises its ValueError, with the item of model.pattern if it does not concern all of them.
    """
    errors = {}
    for entry, kind in recipe.kinds.items():
        try:
            check_kind(kind)
        except ValueError as error:
            errors[entry] = error
    if not errors:
        return
    entry, error = next(iter(errors.items()))
    if len(errors) == len(recipe.kinds) and len({*map(str, errors.values())}) == 1:
        raise error
    raise ValueError(f'{PATTERN}, item {entry}: {error}') from None


def _check_pattern(recipe: Recipe) -> None:
    """Raises ValueError for a pattern that the rest of the model does not allow."""
    _ = recipe.tiles  # raises ValueError if it is longer than the model
    if not recipe.is_mixed:
        return
    placement, pattern = recipe.placement, f'{PATTERN}={recipe.model.pattern}'
    if len(placement.row.blocks(recipe.model.n_layers, **placement.options)) > 1:
        raise ValueError(
            f'{placement} places its norms by depth in groups of blocks of its own, but {pattern} '
            'groups blocks by kind. Choose another placement, or leave the pattern out.'
        )
    for part in recipe.reparam:
        if part.row.shares_blocks:
            raise ValueError(
                f'{part} stores one matrix for all blocks, but the blocks of {pattern} have '
                'matrices of their own kinds. Leave one of them out.'
            )
    for entry, kind in recipe.kinds.items():
        options = kind.attention.options
        for option, off in (('value_residual', 'none'), ('value_embeddings', False)):
            if options.get(option, off) != off:
                raise ValueError(
                    f'attention.{option}={options[option]} gives all blocks values of the first or '
                    f'of tables, but the blocks of {pattern} differ (item {entry}). Leave one of '
                    'them out.'
                )
    placements = {kind.placement.row: kind.placement for kind in recipe.kinds.values()}
    for part in (*placements.values(), placement) if len({*placements, placement.row}) > 1 else ():
        if part.row.branch is None or part.row.needs or part.options:
            able = [n for n, row in PLACEMENTS.items() if row.branch and not row.needs]
            raise ValueError(
                f'the blocks of {pattern} have several placements, so that each must add to the '
                f'stream, but {part} does not. Choose {"|".join(able)}, or one placement for all.'
            )
    tables = {kind.position.row.table for kind in recipe.kinds.values()}
    if len(tables) > 1:
        (entry,) = [i for i, k in recipe.kinds.items() if k.position.row.table][:1]
        kind = recipe.kinds[entry]
        raise ValueError(
            f'{kind.position} is added to the embeddings, so that all blocks have it, but in '
            f'{pattern} only some have. Choose it for all items or for none.'
        )


def _check_sizes(recipe: Recipe) -> None:
    """Raises ValueError if heads or microbatches do not divide evenly, or if a mesh axis is 0."""
    flat = flatten(recipe)
    if recipe.model.head_dim is None:  # it follows from these
        check_divides(
            'without model.head_dim, model.n_heads',
            recipe.model.n_heads,
            'model.d_model',
            recipe.model.d_model,
        )
    for field, matrices in (('qkv_bias', 'queries, keys and values'), ('mlp_bias', 'MLPs')):
        if recipe.model.bias and getattr(recipe.model, field):
            raise ValueError(
                f'model.bias already adds biases to {matrices}. Leave model.{field} out.'
            )
    for field, whole in (
        ('model.n_kv_heads', 'model.n_heads'),
        ('train.microbatches', 'data.batch_size'),
    ):
        check_divides(field, flat[field], whole, flat[whole])
    for name, size in vars(recipe.mesh).items():
        if size == 0:
            raise ValueError(f'mesh.{name} must be a number of devices, or -1 for all; got 0')


def _check_spikes(recipe: Recipe) -> None:
    """Raises ValueError if the window of recent steps never has enough of them."""
    train = recipe.train
    if train.spike_from > train.spike_window:
        raise ValueError(
            'train.spike_from must be at most train.spike_window, which never holds more steps; '
            f'got {train.spike_from} and {train.spike_window}. Set train.spike_from to half of the '
            'window.'
        )


def _check_evaluations(recipe: Recipe) -> None:
    """Raises ValueError for an option of evaluations that are not requested."""
    readers = {
        'eval.texts_every': 'eval.texts',
        'eval.texts_tokens': 'eval.texts',
        'eval.suites_every': 'eval.suites',
        'eval.suite_options': 'eval.suites',
    }
    flat = flatten(recipe)
    for path, reader in readers.items():
        if flat[reader] is None and flat[path] != FIELDS[path].default:
            raise ValueError(
                f'{path}={flat[path]} has no effect without {reader}. Set {reader}, or leave '
                f'{path} out.'
            )


def _check_loss_on(recipe: Recipe) -> None:
    """Raises ValueError if data.loss_on is set and no training objective has holes.

    Evaluation always counts the tokens that fill holes, so there the option would do nothing.
    """
    readers = [part for part in recipe.objectives if 'loss_on' in part.options]
    defaults = {declared_options(part.row)['loss_on'].default for part in readers}
    in_training = any(part in recipe.objective for part in readers)
    loss_on = recipe.data.loss_on  # ty: ignore[missing-attribute]  # an objective's option
    if loss_on not in (None, *defaults) and not in_training:
        raise ValueError(
            f'data.loss_on={loss_on} applies to training, but '
            f'data.objective={recipe.data.objective} has no holes. Evaluation always counts only '
            'the contents of holes. Leave data.loss_on out, or set it to None.'
        )


def _check_token_weights(recipe: Recipe) -> None:
    """Raises ValueError if a loss of several next tokens has no meaning or no logits."""
    if (stages := recipe.token_weights) is None:
        return
    field, count = f'loss.token_weights={recipe.config.loss.token_weights}', len(stages[0])
    if changed := [part.name for part in recipe.objective if not part.row.leaves_rows]:
        raise ValueError(
            f'{field} predicts the tokens after each token of a text, but data.objective has '
            f'{changed[0]}, which changes texts. Choose data.objective=causal, or leave it out.'
        )
    if recipe.loss.row.linear_readout:
        able = [name for name, row in LOSSES.items() if not row.linear_readout]
        raise ValueError(
            f'{field} needs a loss of logits, but {recipe.loss} is computed from sums of logits. '
            f'Choose loss.name={"|".join(able)}, or leave it out.'
        )
    if count > recipe.data.seq_len:
        raise ValueError(
            f'{field} names the weights of {count} next tokens, but rows have data.seq_len='
            f'{recipe.data.seq_len}. Name fewer.'
        )


def attention_scores(recipe: Recipe) -> Scores | None:
    """Returns the scores that the attention kernel must support; None if the layer has no scores.

    They cover every objective: `prefix` is set if any objective has prefixes.
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
    """Raises ValueError for a kernel that would not be used, or that does not support the layer."""
    constant = {
        'blocks of several kinds (model.pattern)': recipe.is_mixed,
        'suites in training (eval.suites)': recipe.eval.suites is not None,
    }
    for reason, applies in constant.items() if recipe.traced_formats else ():
        if applies:
            raise ValueError(
                f'kernels.traced_formats=True cannot be combined with {reason}, whose formats are '
                'constants. Leave it out.'
            )
    kinds = [*recipe.kinds.values()]
    has_scores = {kind.attention.row.has_scores for kind in kinds}
    name = _named_attention_kernel(recipe)  # None: the platform decides
    layers = ' and '.join(dict.fromkeys(str(kind.attention) for kind in kinds))
    operations = {row.operation for row in ATTENTIONS.values()}
    operations -= {kind.attention.row.operation for kind in kinds}
    unused = dict.fromkeys(sorted(operations), f'{layers} uses another kind of kernel')
    norms = recipe.norms.values()
    if not any(norm.row.divides_by_rms for norm in norms):
        able = ', '.join(name for name, row in NORMS.items() if row.divides_by_rms)
        unused['rms_norm'] = (
            f'none of {", ".join(map(str, norms))} divides by the root mean square (these norms '
            f'do: {able})'
        )
    holds_scores = True in has_scores and name is not None and ATTENTION_KERNELS[name].holds_scores
    gates = {kind.mlp.options.get('gates', 'sigmoid') for kind in kinds}
    if not holds_scores and gates == {'sigmoid'}:
        unused['softmax'] = (
            'it is used by attention that stores all scores (kernels.attention=reference) and by '
            'routers (model.mlp=moe, without mlp.gates=sigmoid)'
        )
    if not recipe.loss.row.has_kernels:
        unused['cross_entropy'] = f'{recipe.loss} does not use it'
    for operation, why in unused.items():
        if kernel := recipe.kernels.get(operation):
            raise ValueError(f'{kernel} would have no effect: {why}. Leave it out.')
    check_kinds(recipe, _check_attention_kernel)


def _named_attention_kernel(recipe: Recipe) -> str | None:
    """Returns the attention kernel that the config names; None: the platform decides."""
    chosen = recipe.kernels.get('attention')
    defaults = recipe.implementation.row if recipe.implementation else {}
    return chosen.name if chosen else defaults.get('attention')


def _check_attention_kernel(recipe: Recipe) -> None:
    """Raises ValueError if the named kernel does not support the dropout or scores of attention."""
    layer, scores, name = (
        recipe.attention,
        attention_scores(recipe),
        _named_attention_kernel(recipe),
    )
    if 'attention' in recipe.dropout:
        rate = f'model.attention_dropout={recipe.model.attention_dropout}'
        if scores is None:
            raise ValueError(
                f'{layer} has no attention probabilities to drop, but {rate}. Set it to 0.'
            )
        able = [row for row, kernel in ATTENTION_KERNELS.items() if 'dropout' in kernel.supports]
        if name is not None and name not in able:
            raise ValueError(
                f'kernels.attention={name} does not support dropout, but {rate}. Choose '
                f'kernels.attention={"|".join(able)}, or model.attention_dropout=0.'
            )
    if scores is not None and name is not None:
        check_scores(name, scores, recipe.model.dtype, recipe.head_dim)


def _check_forward_mode(recipe: Recipe) -> None:
    """Raises ValueError for a norm without a forward-mode derivative if an option needs one.

    `lm.training.state.check_learner` checks kernels, which depend on the devices.
    """
    for asker, what in recipe.forward_mode_targets.items():
        for norm in recipe.norms.values():
            if not norm.row.forward_mode:
                able = [name for name, row in NORMS.items() if row.forward_mode]
                raise ValueError(
                    f'{asker} needs a forward-mode derivative of the {what}, which {norm} does not '
                    f'have. Choose one of {", ".join(able)}.'
                )


def _check_scaled_updates(recipe: Recipe) -> None:
    """Raises ValueError for optimizers whose updates the parametrisation does not scale."""
    part, rule = recipe.scaling, recipe.scaling.row
    for optimizer, family in _update_families(recipe):
        if family not in (*rule.families, RELATIVE):
            able = [name for name, row in PARAMETRIZATIONS.items() if family in row.families]
            raise ValueError(
                f'{part} has no rules for {optimizer}, a {family}-like optimizer. It supports '
                f'{" and ".join(name for name in rule.families if name != RELATIVE)}-like '
                f'optimizers. Choose scaling.name={"|".join(able)}, or another optimizer.'
            )
        reasons = [
            (
                f'with optim.{option}={value} they have another size. Choose another value, or '
                'scaling.name=standard.'
            )
            for option, value in optimizer.row.other_sizes.items()
            if optimizer.options.get(option) == value and family != RELATIVE
        ]
        if (
            optimizer is recipe.optimizer
            and recipe.optim.match_rms is not None
            and family != 'adam'
        ):
            reasons.append(
                'optim.match_rms rescales them to the size of adam-like updates. Leave it out.'
            )
        is_floored = recipe.optim.match_norm_floor is not None and any(
            ROLE_OF[group] in recipe.matched_roles and recipe.group_optimizers[group] is optimizer
            for group in ROLE_OF
        )
        if family == RELATIVE and family not in rule.families:
            reasons.append(
                'optim.match_norm sizes them relative to their matrices, so that their learning '
                'rate does not follow the width. Choose scaling.name=hyper_p|standard, or leave it '
                'out.'
            )
        if is_floored:
            reasons.append(
                'optim.match_norm_floor sizes them relative to their matrices, so that their '
                'learning rate does not follow the width. Choose scaling.name=standard, or leave '
                'it out.'
            )
        if rule.grows and reasons:
            raise ValueError(
                f'{part} scales the updates of {optimizer} as {optimizer.row.family}-like updates, '
                f'but {reasons[0]}'
            )


def _update_families(recipe: Recipe) -> list[tuple[Part, str]]:
    """Returns the pairs of an optimizer and a family of its updates (`Recipe.find_family`)."""
    is_matched = {
        group: recipe.optim.match_norm is not None and role in recipe.matched_roles
        for group, role in ROLE_OF.items()
    }
    optimizers = {group: recipe.group_optimizers[group] for group in ROLE_OF}
    return [
        (optimizer, family)
        for optimizer in recipe.optimizers.values()
        for family in dict.fromkeys(
            RELATIVE if is_matched[group] else optimizer.row.family
            for group in ROLE_OF
            if optimizers[group] is optimizer
        )
    ]


def relative_sizes(recipe: Recipe) -> dict[str, float | None]:
    """Returns the options that size updates relative to their matrices, by name."""
    optim = recipe.optim
    return {'match_norm': optim.match_norm, 'match_norm_floor': optim.match_norm_floor}


def _check_matched_norms(recipe: Recipe) -> None:
    """Raises ValueError if several options set the size of updates, or if it would be 0."""
    optim = recipe.optim
    relative = relative_sizes(recipe)
    sizes = [
        n for n, size in ({'match_rms': optim.match_rms} | relative).items() if size is not None
    ]
    if len(sizes) > 1:
        raise ValueError(
            f'{" and ".join(f"optim.{name}" for name in sizes)} each set the size of the same '
            'updates. Choose one of them.'
        )
    if optim.match_norm_roles != 'hidden' and not {*sizes} & relative.keys():
        raise ValueError(
            f'optim.match_norm_roles={optim.match_norm_roles} would have no effect without '
            'optim.match_norm or optim.match_norm_floor. Set one of them, or leave it out.'
        )
    if optim.match_norm is None:
        return
    roles = optim.match_norm_roles.split('+')
    zeros = [
        name for name in recipe.zero_starts if ('hidden' if name == 'query' else name) in roles
    ]
    why = None
    if zeros:
        why = (
            f'{sorted(zeros)[0]} starts at 0 (scaling.zero_init={recipe.config.scaling.zero_init}, '
            f'{recipe.scaling})'
        )
    elif factored := [str(part) for part in recipe.reparam if part.row.starts_at_zero]:
        why = f'a factor of {factored[0]} starts at 0'
    elif recipe.config.scaling.init_scale < MIN_NORM:
        why = f'matrices start at 0 (scaling.init_scale={recipe.config.scaling.init_scale})'
    if why:
        raise ValueError(
            f'optim.match_norm gives updates the norm of their matrix, so that a matrix of zeros '
            f'never changes, but {why}. Leave one of them out, or choose optim.match_norm_floor.'
        )


def _check_numbers_over_steps(recipe: Recipe) -> None:
    """Raises ValueError for a momentum or a weight decay over the run without an effect."""
    optim = recipe.optim
    if (optim.momentum_start is None) != (optim.momentum_warmup_steps is None):
        raise ValueError(
            'optim.momentum_start and optim.momentum_warmup_steps describe one warm-up of the '
            f'momentum; got {optim.momentum_start} and {optim.momentum_warmup_steps}. Set both, or '
            'leave both out.'
        )
    if optim.momentum_start is not None and 'optim.momentum' not in recipe.readers:
        raise ValueError(
            f'optim.momentum_start={optim.momentum_start} has no effect, because no optimizer of '
            'this config has the option momentum. Leave it out, or choose another optim.name.'
        )
    if optim.weight_decay_end is not None and not recipe.decay.row.reads_strength:
        raise ValueError(
            f'optim.weight_decay_end={optim.weight_decay_end} has no effect, because '
            f'{recipe.decay} does not depend on the strength of weight decay. Leave it out, or '
            'choose optim.decay_rule=decoupled.'
        )


def _check_weight_dtype(recipe: Recipe) -> None:
    """Raises ValueError for a rounding of weights that are not rounded."""
    dtype, rounding = recipe.optim.weight_dtype, recipe.optim.weight_rounding
    if dtype == 'float32' and rounding != STOCHASTIC:
        raise ValueError(
            f'optim.weight_rounding={rounding} has no effect with optim.weight_dtype={dtype}. '
            'Leave it out, or set optim.weight_dtype=bfloat16.'
        )


def _check_cautious(recipe: Recipe) -> None:
    """Raises ValueError if a mask of cautious decay or updates has nothing to read or to act on."""
    if recipe.optim.cautious_decay and recipe.decay.row.in_gradient:
        raise ValueError(
            f'optim.cautious_decay decays the weights that agree with the direction of their '
            f'update, but {recipe.decay} adds decay to the gradient, before there is a direction. '
            'Choose optim.decay_rule=decoupled, or leave optim.cautious_decay out.'
        )
    for optimizer in recipe.optimizers.values() if recipe.optim.cautious_updates else ():
        if not optimizer.row.needs.gradient:
            raise ValueError(
                f'optim.cautious_updates compares directions with gradients, but {optimizer} has '
                'none. Leave one of them out.'
            )


def _check_tied_embeddings(recipe: Recipe) -> None:
    """Raises ValueError if one table cannot be both embedding and readout.

    The readout may have another factor in the forward pass (`lm.model.transformer`), but has the
    embedding's standard deviation and learning rate.
    """
    if not recipe.model.tie_embeddings:
        return
    if recipe.optim.embedding_gradient_shrink is not None:
        raise ValueError(
            'optim.embedding_gradient_shrink needs an embedding that is only looked up, but with '
            'model.tie_embeddings=True it is also the readout. Leave one of them out.'
        )
    part = recipe.scaling
    if not part.row.grows:
        return
    readout = ParamSpec('readout', ('embed', 'vocab'), ('embed',))
    embedding = ParamSpec('embedding', ('vocab', 'embed'))
    family = recipe.find_family(embedding)
    as_readout = part.row(readout, Growth(2.0, 1.0, 2.0, 2.0), family)
    as_input = part.row(embedding, Growth(1.0, 2.0, 2.0, 2.0), family)
    if (as_readout.init, as_readout.lr) != (as_input.init, as_input.lr):
        raise ValueError(
            f'{part} has different standard deviations or learning rates for readout and '
            'embeddings, but model.tie_embeddings=True makes them one matrix. Choose '
            'scaling.name=mup, which scales the readout when it is used, or set '
            'model.tie_embeddings=False.'
        )


def _check_moved_weights(recipe: Recipe) -> None:
    """Raises ValueError if two parts of the recipe would both move weights after an update.

    An average that steers weights keeps two points, and a map after the update would separate them.
    `optim.ghost_radius` limits the change of the logits before such a move.
    """
    average = recipe.average
    mappers = [part for part in recipe.reparam if part.row.maps_after_update]
    movers = [*mappers, *([average] if average.row.moves_weights else [])]
    if movers and recipe.optim.ghost_radius is not None:
        raise ValueError(
            f'optim.ghost_radius limits the effect of an update on the logits, but {movers[0]} '
            'moves the weights after it. Leave one of them out.'
        )
    if mappers and average.row.moves_weights:
        raise ValueError(
            f'{average} keeps two points and moves the weights between them, but {mappers[0]} maps '
            'the weights after each update, which would separate the points. Choose '
            'optim.average=ema, or another reparametrisation.'
        )
