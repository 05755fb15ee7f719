"""Checkpoints without the norms, or the parts of norms, that the matrices beside them take over,
and without reparametrisations.

The conversion is made and checked in float64 on the CPU, then stored in float32.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any

import numpy as np
from flax.traverse_util import unflatten_dict

from eval.convert.converted import (
    Folded,
    folded,
    learner_on_cpu,
    used_in_float64,
    without_reparam,
)
from eval.load import Checkpoint
from lm.config.fields import FIELDS
from lm.config.recipe import Recipe, recipe_of
from lm.config.resolve import changed, replaced, settle
from lm.model.check import check
from lm.model.transformer import groups_of_blocks
from modules.choices import choose
from modules.norms import fold
from modules.norms.fold import Affine
from modules.norms.removal import removal_update
from modules.params import NORM, ParamSpec, named_leaves

Flat = dict[str, np.ndarray]  # {'layers/mlp/up': ..., ...}

# --to -> {model.norm: what of that norm is an affine map}; what is left is the norm --to.
TARGETS = {
    'crmsnorm': {'layernorm': fold.LEARNED['layernorm']},
    'none': fold.CONSTANT,
    'rmsnorm': fold.LEARNED,
}
FINE_TUNE = 'Fine-tune it with model.norm={}_removal and train.init_from until all are removed.'
HINTS = {
    ('layernorm', 'none'): FINE_TUNE.format('layernorm'),
    ('powernorm', 'none'): 'It also divides each token by its own rms.',
    ('rmsnorm', 'crmsnorm'): 'Its stream has a mean, which crmsnorm has no room for; one folded '
    'from layernorm has none but for rounding, and the layernorm checkpoint itself can be folded.',
    ('rmsnorm', 'none'): FINE_TUNE.format('rmsnorm'),
}


def fold_checkpoint(checkpoint: Checkpoint, to: str, untie: bool = False) -> Folded:
    """The model of a checkpoint with model.norm = `to` and the same logits.

    rmsnorm: from layernorm, whose writers are recentred, or from rmsnorm. Gains and biases go into
    the matrices that follow, and the norm has scale=False; model.qk_norm stays as it is. crmsnorm:
    from layernorm; the stream loses its last coordinate. none: from norms that are affine maps in
    evaluation; of a model with other norms they stay, if it has a reparametrisation to fold. Biases
    that arise are those of model.bias and model.readout_bias. model.reparam becomes none: what is
    stored is what evaluation uses. `untie` gives a model with tied embeddings a readout of its own.

    Raises ValueError for a model that cannot be folded so, and where its logits change.
    """
    kept = why_norms_stay(checkpoint, to)
    if kept:
        return fold_reparam(checkpoint, untie, kept)
    refuse(checkpoint, to, untie)
    source, vocab = checkpoint.recipe, checkpoint.meta['vocab_size']
    before = used_in_float64(checkpoint)
    params = named_leaves(before['params'])
    if source.model.tie_embeddings:
        params['readout'] = params['embedding'].T
    maps = affine_maps(TARGETS[to][source.norm.name], source, params, before)
    recipe = folded_config(source, to, biased=any(m.shift is not None for m in maps.values()))
    check(recipe)
    params = folded_params(params, unfolded_specs(source, vocab), maps, source, recipe)
    carried = {name: without(maps, before[name]) for name in before if name != 'params'}
    carried = {name: tree for name, tree in carried.items() if tree}
    after = {'params': unflatten_dict(params, sep='/'), **carried}
    return folded(checkpoint, recipe, before, after)


def fold_reparam(checkpoint: Checkpoint, untie: bool, kept: str) -> Folded:
    """The model of a checkpoint with model.reparam = none and all else as it is."""
    source, before = checkpoint.recipe, used_in_float64(checkpoint)
    after, changes = dict(before), without_reparam() | {'train.init_from': ''}
    if untie and source.model.tie_embeddings:
        after['params'] = before['params'] | {'readout': before['params']['embedding'].T}
        changes |= {'model.tie_embeddings': False}
    recipe = settle(changed(source.config, changes))
    check(recipe)
    return dataclasses.replace(folded(checkpoint, recipe, before, after), kept=kept)


def why_norms_stay(checkpoint: Checkpoint, to: str) -> str:
    """What of a model keeps its norms from being folded, so that its reparametrisation is folded
    alone; '' where nothing does, or where there is no reparametrisation, or `to` is no norm's end.

    ValueError for a placement that is made of the reparametrisation.
    """
    source, kept = checkpoint.recipe, ''
    if to != 'none' or source.model.reparam == 'none':
        return ''
    try:
        refuse_model(source, to)
        refuse_unfinished(source, checkpoint.weights.stats)
    except ValueError as error:
        kept = str(error)
    needed = source.placement.row.needs.get('reparam')
    if needed:
        raise ValueError(
            f'a model with {source.placement} cannot be folded: it is made '
            f'of model.reparam={needed}'
        )
    return kept


def refuse(checkpoint: Checkpoint, to: str, untie: bool) -> None:
    """ValueError, with what would work, for a model that cannot be folded so."""
    recipe = checkpoint.recipe
    refuse_model(recipe, to)
    if recipe.model.tie_embeddings and not untie:
        raise ValueError(
            'model.tie_embeddings=True: the readout cannot take a norm up while it is the '
            'embedding too. --untie stores it as a matrix of its own.'
        )
    refuse_unfinished(recipe, checkpoint.weights.stats)


def refuse_model(recipe: Recipe, to: str) -> None:
    """ValueError, with what would work, for a model whose norms cannot be folded so."""
    sources, norm, model = choose(TARGETS, to, '--to'), recipe.norm.name, recipe.model
    wanted = {
        'model.placement': (model.placement, 'pre', 'its norms are not alone before a matrix'),
        'model.mlp': (model.mlp, 'dense', 'a router and experts read the norm'),
        'model.embedding_norm': (model.embedding_norm, 'none', 'no matrix follows that norm'),
        'model.final_norm': (model.final_norm, model.norm, 'all norms must be of one kind'),
    }
    for path, (found, works, why) in wanted.items():
        if found != works:
            raise ValueError(f'a model with {path}={found} cannot be folded: {why}; {works} can')
    if norm not in sources:
        works = [name for name in TARGETS if norm in TARGETS[name]]
        hint = HINTS.get((norm, to), '')
        raise ValueError(
            f'--to={to} folds a model whose model.norm is {" or ".join(sorted(sources))}; got '
            f'{norm}, which {"--to=" + " or ".join(works) if works else "nothing"} folds. '
            f'{hint}'.strip()
        )


def refuse_unfinished(recipe: Recipe, stats: Any) -> None:
    """ValueError where norms are left to remove."""
    given = recipe.norm.options
    if 'removal_start' not in given:
        return
    start, gap = given['removal_start'], given['removal_gap']
    updates = int(stats['stats']['final_norm']['updates'])
    due = [removal_update(start, gap, order) for order in range(2 * recipe.model.n_layers + 1)]
    left = sum(updates < update for update in due)
    if left:
        raise ValueError(
            f'{left} of {len(due)} norms are not removed yet: after {updates} updates, '
            f'{due[-1] - updates} are to go. Fine-tune on, or remove them sooner '
            f'(norm.removal_start={start}, norm.removal_gap={gap}).'
        )


def affine_maps(
    kind: fold.AffineOf, recipe: Recipe, params: Flat, before: Any
) -> dict[str, Affine]:
    """{'layers/mlp_norm_in': what it does after it has normalized, ...} of all norms."""
    (blocks,) = groups_of_blocks(recipe)
    eps = recipe.norm.options.get('eps')
    sites = [f'{blocks.name}/{part}_norm_in' for part in ('attention', 'mlp')] + ['final_norm']
    stats = named_leaves(before.get('stats', {}))

    def of(site: str, leaves: Mapping[str, Any]) -> Flat:
        return {path.rpartition('/')[2]: leaf for path, leaf in leaves.items() if at(site, path)}

    return {site: kind(of(site, params), of(site, stats), eps) for site in sites}


def at(site: str, path: str) -> bool:
    return path.rpartition('/')[0] == site


def read_from(path: str) -> str:
    """The norm before a matrix: of 'layers/mlp/up', 'layers/mlp_norm_in'."""
    part = path.rpartition('/')[0]
    return f'{part}_norm_in' if part else 'final_norm'


def without(maps: Mapping[str, Affine], tree: Any) -> Any:
    """What layers carry, without what those norms do."""
    kept = {
        path: leaf
        for path, leaf in named_leaves(tree).items()
        if not any(at(site, path) for site in maps)
    }
    return unflatten_dict(kept, sep='/')


def folded_config(source: Recipe, to: str, biased: bool) -> Recipe:
    """`biased`: whether matrices take biases up."""
    no_norm = {'model.norm': 'none', 'model.final_norm': 'none'}
    others = recipe_of(changed(source.config, no_norm)).readers  # as those of model.qk_norm
    unread = [path for path in FIELDS if path.startswith('norm.') and path not in others]
    config = changed(source.config, dict.fromkeys(unread) | without_reparam())
    norm = folded_norm(source, to, recipe_of(changed(config, no_norm | {'model.norm': to})))
    return settle(
        changed(
            config,
            {
                'model.norm': norm,
                'model.final_norm': norm,
                'model.bias': source.model.bias or biased,
                'model.readout_bias': source.model.readout_bias or biased,
                'model.tie_embeddings': False,
                # The weights are here now, and what was trained alone may be gone.
                'train.init_from': '',
                'train.trainable': 'all',
            },
        )
    )


def folded_norm(source: Recipe, to: str, folded: Recipe) -> str:
    """model.norm with the options of the source's norm, but for its gains: 'rmsnorm:scale=False'.

    folded: has the norm `to` with the options that do not stand behind its name.
    """
    before, after = source.norm.options, folded.norm.options
    behind = {}
    for name, value in after.items():
        wanted = False if name == 'scale' else before.get(name)
        if wanted is not None and wanted != value:
            behind[name] = wanted
    text = ','.join(f'{name}={value!r}' for name, value in behind.items())
    return f'{to}:{text}' if text else to


def unfolded_specs(source: Recipe, vocab: int) -> dict[str, ParamSpec]:
    """Of the weights that the source's model uses, with a readout of its own."""
    recipe = replaced(source, without_reparam() | {'model.tie_embeddings': False})
    return named_leaves(learner_on_cpu(recipe, vocab).described.specs)


def folded_params(
    params: Flat,
    specs: Mapping[str, ParamSpec],
    maps: Mapping[str, Affine],
    source: Recipe,
    recipe: Recipe,
) -> Flat:
    """What `recipe` uses, from what `source` did, in all that reads or writes the stream."""
    drops = recipe.norm.row.drops
    new = {path: w for path, w in params.items() if not any(at(site, path) for site in maps)}
    for path, spec in specs.items():
        if spec.part == NORM or 'embed' not in spec.axes:
            continue
        if 'embed' not in spec.fan_in:
            if source.norm.name == 'layernorm':
                new[path] = fold.recentre_writer(new[path])
            if drops:
                new[path] = fold.compress_writer(new[path])
            if spec.role == 'hidden' and recipe.model.bias:
                layers, width = len(new[path]), new[path].shape[-1]
                new.setdefault(f'{path}_bias', np.zeros((layers, width)))
            continue
        axis, bias = spec.axes.index('embed'), f'{path}_bias'
        new[path], folded_bias = folded_reader(
            new[path], new.get(bias), axis, maps[read_from(path)], drops
        )
        if folded_bias is not None:
            new[bias] = folded_bias
    return new


def folded_reader(kernel: Any, bias: Any, axis: int, affine: Affine, drops: int) -> tuple[Any, Any]:
    """The matrix and bias of whatever reads `axis` of the kernel; its outputs may have several."""
    shape = kernel.shape
    leading, outputs = shape[:axis], shape[axis + 1 :]
    kernel = kernel.reshape(*shape[: axis + 1], -1)
    bias = None if bias is None else bias.reshape(*leading, -1)
    kernel, bias = fold.fold_into_reader(affine, kernel, bias)
    if drops:
        kernel = fold.compress_reader(kernel)
    bias = None if bias is None else bias.reshape(*leading, *outputs)
    return kernel.reshape(*leading, -1, *outputs), bias
