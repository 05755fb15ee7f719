"""Folds checkpoints: writes norms, or parts of norms, and reparametrisations into the matrices.

The conversion is computed and checked in float64 on the CPU, then stored in float32.
"""

import contextlib
import dataclasses
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax.traverse_util import unflatten_dict

from eval.load import Checkpoint
from lm.config.fields import FIELDS, KernelsConfig, MeshConfig
from lm.config.recipe import Recipe, build_recipe
from lm.config.resolve import NO_SOURCE, resolve_config, to_dict, update_config, update_recipe
from lm.data.tokenizers import Tokenizer
from lm.devices.mesh import make_mesh, replicated_sharding
from lm.launch.distributed import is_first, is_multiprocess, raise_on_all
from lm.model.check import check
from lm.model.kernels import widen_products
from lm.model.pattern import block_groups
from lm.model.transformer import build_model
from lm.record.checkpoint import check_tree, state_record
from lm.record.checkpoints import Checkpoints
from lm.record.machine import versions
from lm.record.workdir import CONFIG, check_path, check_shared, write_config
from lm.storage.filling import fill_folder
from lm.training.state import (
    Learner,
    State,
    Weights,
    build_learner,
    init_state,
    init_watched,
    make_hyper,
)
from lm.training.update import build_average, build_optimizer
from modules.choices import choose
from modules.norms import fold
from modules.norms.fold import Affine
from modules.norms.removal import removal_update
from modules.optim.storage import STOCHASTIC
from modules.params import NORM, ParamSpec, named_leaves
from modules.placements import PLACEMENTS
from modules.precision.codes import PackedWeight

TOLERANCE = 1e-10  # of float64 logits; the algebra itself costs about 1e-14
ROWS = 2  # sequences of random tokens that logits are compared on
Flat = dict[str, np.ndarray]  # {'layers/mlp/up': ..., ...}

# --to -> {model.norm: the affine map in that norm}. The rest of the norm is the norm --to.
TARGETS = {
    'crmsnorm': {'layernorm': fold.LEARNED_AFFINE['layernorm']},
    'none': fold.CONSTANT_AFFINE,
    'rmsnorm': fold.LEARNED_AFFINE,
}
FINE_TUNE = 'Fine-tune it with model.norm={}_removal and train.init_from to remove all norms.'
HINTS = {
    ('layernorm', 'none'): FINE_TUNE.format('layernorm'),
    ('powernorm', 'none'): 'A powernorm also divides each token by its rms.',
    ('rmsnorm', 'crmsnorm'): 'crmsnorm needs a stream without mean. If this model was folded from '
    'layernorm, fold the layernorm checkpoint with --to=crmsnorm.',
    ('rmsnorm', 'none'): FINE_TUNE.format('rmsnorm'),
}


@dataclasses.dataclass(frozen=True)
class FoldedModel:
    """A model with the same logits as its source.

    differences: {'float64': max |logit - source's| / max |source's|, 'float32': ...}.
    norm_obstacle: the reason why the norms could not be folded; '' if they were.
    """

    recipe: Recipe
    weights: Weights
    differences: dict[str, float]
    norm_obstacle: str = ''


def fold_checkpoint(checkpoint: Checkpoint, to: str, untie: bool = False) -> FoldedModel:
    """Returns the model of a checkpoint with model.norm = `to` and the same logits.

    rmsnorm: from layernorm, after recentring the matrices that write to the stream, or from
    rmsnorm. Gains and biases go into the matrices that follow, and the norm has scale=False.
    model.qk_norm does not change.
    crmsnorm: from layernorm. The stream loses its last coordinate.
    none: from norms that are affine maps in evaluation. A model with other norms keeps them, if it
    has a reparametrisation to fold.

    Biases that arise use model.bias and model.readout_bias. model.reparam becomes none: the stored
    weights are the effective weights of evaluation.

    Args:
      checkpoint: the source.
      to: a key of TARGETS.
      untie: whether to give tied embeddings a separate readout.

    Returns:
      The folded model.

    Raises:
      ValueError: for a model that cannot be folded, and if its logits change.
    """
    if obstacle := find_norm_obstacle(checkpoint, to):
        return fold_reparam(checkpoint, untie, obstacle)
    check_foldable(checkpoint, to, untie)
    source, vocab = checkpoint.recipe, checkpoint.meta['vocab_size']
    before = float64_variables(checkpoint)
    params = named_leaves(before['params'])
    # The readout absorbs the last norm, the embedding does not: they become two matrices.
    if source.model.tie_embeddings:
        params['readout'] = params['embedding'].T
    maps = affine_maps(TARGETS[to][source.norm.name], source, params, before)
    recipe = fold_config(source, to, biased=any(m.shift is not None for m in maps.values()))
    check(recipe)
    unfolded = update_recipe(source, reparam_removal() | {'model.tie_embeddings': False})
    specs = named_leaves(build_cpu_learner(unfolded, vocab).description.specs)
    params = fold_params(params, specs, maps, source, recipe)
    before_leaves = {name: named_leaves(tree) for name, tree in before.items()}
    # Drops the statistics of the norms that are folded.
    after = {
        n: {p: x for p, x in leaf_by_path.items() if parent_path(p) not in maps}
        for n, leaf_by_path in before_leaves.items()
    }
    after['params'] = params
    after = {name: unflatten_dict(leaves, sep='/') for name, leaves in after.items() if leaves}
    return build_folded(checkpoint, recipe, before, after)


def fold_reparam(checkpoint: Checkpoint, untie: bool, norm_obstacle: str) -> FoldedModel:
    """Returns the model of a checkpoint with model.reparam = none and no other change.

    Args:
      checkpoint: the source.
      untie: whether to give tied embeddings a separate readout.
      norm_obstacle: the reason to keep its norms.
    """
    source, before = checkpoint.recipe, float64_variables(checkpoint)
    after, changes = dict(before), reparam_removal() | NO_SOURCE
    if untie and source.model.tie_embeddings:
        after['params'] = before['params'] | {'readout': before['params']['embedding'].T}
        changes |= {'model.tie_embeddings': False}
    recipe = resolve_config(update_config(source.config, changes))
    check(recipe)
    return dataclasses.replace(
        build_folded(checkpoint, recipe, before, after), norm_obstacle=norm_obstacle
    )


def find_norm_obstacle(checkpoint: Checkpoint, to: str) -> str:
    """Returns the reason to keep the norms of a model while its reparametrisation is folded.

    Returns '' if the norms can be folded too, if there is no reparametrisation, or if `to` is a
    norm. Raises ValueError for a placement that is built on the reparametrisation.
    """
    source, obstacle = checkpoint.recipe, ''
    if to != 'none' or source.model.reparam == 'none':
        return obstacle
    try:
        check_norms_foldable(source, to)
        check_removal_finished(source, checkpoint.weights.stats)
    except ValueError as error:
        obstacle = str(error)
    if needed := source.placement.row.needs.get('reparam'):
        raise ValueError(
            f'a model with {source.placement} cannot be folded: this placement requires '
            f'model.reparam={needed}'
        )
    return obstacle


def check_foldable(checkpoint: Checkpoint, to: str, untie: bool) -> None:
    """Raises ValueError for a model that cannot be folded, with a remedy.

    Args:
      checkpoint: the source.
      to: a key of TARGETS.
      untie: whether tied embeddings get a separate readout.
    """
    recipe = checkpoint.recipe
    check_norms_foldable(recipe, to)
    if recipe.model.tie_embeddings and not untie:
        raise ValueError(
            'with model.tie_embeddings=True the readout cannot absorb a norm, because it is also '
            'the embedding. Add --untie to store it as a separate matrix.'
        )
    check_removal_finished(recipe, checkpoint.weights.stats)


def check_norms_foldable(recipe: Recipe, to: str) -> None:
    """Raises ValueError for norms that cannot be folded, with a remedy."""
    sources, norm, model = choose(TARGETS, to, '--to'), recipe.norm.name, recipe.model
    able = ', '.join(name for name, row in PLACEMENTS.items() if row.norms_before)
    placement = able if recipe.placement.row.norms_before else model.placement
    demands = {
        'model.pattern': (model.pattern, None, 'blocks are of several kinds'),
        'model.placement': (placement, able, 'not all of its norms feed only matrices'),
        'model.stream': (model.stream, 'plain', 'its parameters read the stream without that norm'),
        'model.mlp': (model.mlp, 'dense', 'no single matrix that reads the norm can absorb it'),
        'model.readout': (model.readout, 'learned', 'this readout cannot absorb the last norm'),
        'model.embedding_norm': (model.embedding_norm, 'none', 'no matrix follows that norm'),
        'model.final_norm': (model.final_norm, model.norm, 'all norms must be of the same kind'),
    }
    for path, (value, works, reason) in demands.items():
        if value != works:
            raise ValueError(
                f'a model with {path}={value} cannot be folded: {reason}. Supported: {works}.'
            )
    if norm not in sources:
        works = [name for name in TARGETS if norm in TARGETS[name]]
        hint = HINTS.get((norm, to), '')
        raise ValueError(
            f'--to={to} needs model.norm={" or ".join(sorted(sources))}; got {norm}, which '
            f'{"can be folded with --to=" + " or ".join(works) if works else "cannot be folded"}. '
            f'{hint}'.strip()
        )


def check_removal_finished(recipe: Recipe, stats: Any) -> None:
    """Raises ValueError if norms are still to be removed by training."""
    options = recipe.norm.options
    if 'removal_start' not in options:
        return
    start, gap = options['removal_start'], options['removal_gap']
    # All norms count the same updates.
    updates = int(stats['stats']['final_norm']['updates'])
    due = [removal_update(start, gap, order) for order in range(2 * recipe.model.n_layers + 1)]
    n_remaining = sum(updates < update for update in due)
    if n_remaining:
        raise ValueError(
            f'{n_remaining} of {len(due)} norms are not removed yet after {updates} updates. '
            f'Fine-tune for {due[-1] - updates} more, or remove them sooner '
            f'(norm.removal_start={start}, norm.removal_gap={gap}).'
        )


def affine_maps(
    kind: fold.AffineFunction, recipe: Recipe, params: Flat, carried: Any
) -> dict[str, Affine]:
    """Returns {'layers/mlp_norm_in': the affine map after the normalisation, ...} for all norms.

    Args:
      kind: computes the map of a norm from its parameters.
      recipe: of the model.
      params: by path, in float64.
      carried: all variables but the parameters, such as the statistics of norms.
    """
    (blocks,) = block_groups(recipe)
    eps: Any = recipe.norm.options.get('eps')  # None for norms without it, which do not read it
    before = recipe.placement.row.norms_before.values()
    sites = [*dict.fromkeys(f'{blocks.name}/{norm}' for norm in before), 'final_norm']
    stats = named_leaves(carried.get('stats', {}))

    def select_leaves(site: str, leaves: Mapping[str, Any]) -> Flat:
        site_leaves = {path: leaf for path, leaf in leaves.items() if parent_path(path) == site}
        return {path.rpartition('/')[2]: leaf for path, leaf in site_leaves.items()}

    return {
        site: kind(select_leaves(site, params), select_leaves(site, stats), eps) for site in sites
    }


def parent_path(path: str) -> str:
    """Returns the path of the module that has a leaf: 'layers/mlp' for 'layers/mlp/up'."""
    return path.rpartition('/')[0]


def fold_config(source: Recipe, to: str, biased: bool) -> Recipe:
    """Returns the source's recipe with norm `to`.

    Args:
      source: the recipe before folding.
      to: the new norm.
      biased: whether matrices get biases.
    """
    no_norm = {'model.norm': 'none', 'model.final_norm': 'none'}
    read_fields = build_recipe(
        update_config(source.config, no_norm)
    ).readers  # for example by model.qk_norm
    unread_fields = [
        path for path in FIELDS if path.startswith('norm.') and path not in read_fields
    ]
    config = update_config(source.config, dict.fromkeys(unread_fields) | reparam_removal())
    norm = fold_norm(source, to, build_recipe(update_config(config, no_norm | {'model.norm': to})))
    changes = {
        'model.norm': norm,
        'model.final_norm': norm,
        'model.bias': source.model.bias or biased,
        'model.qkv_bias': source.model.qkv_bias and not biased,  # model.bias includes these
        'model.mlp_bias': source.model.mlp_bias and not biased,
        'model.readout_bias': source.model.readout_bias or biased,
        'model.tie_embeddings': False,
        # The weights are complete, and the parameters of train.trainable may be gone.
        **NO_SOURCE,
        'train.trainable': 'all',
    }
    return resolve_config(update_config(config, changes))


def fold_norm(source: Recipe, to: str, unfolded_recipe: Recipe) -> str:
    """Returns model.norm with the options of the source's norm, such as 'rmsnorm:scale=False'.

    Only the gains are left out, as they are in the matrices.

    Args:
      source: the recipe before folding.
      to: the new norm.
      unfolded_recipe: has the norm `to` with the default options.
    """
    options, defaults = {**source.norm.options, 'scale': False}, unfolded_recipe.norm.options
    changes = {name: options.get(name) for name in defaults}
    changes = {n: value for n, value in changes.items() if value not in (None, defaults[n])}
    text = ','.join(f'{name}={value!r}' for name, value in changes.items())
    return f'{to}:{text}' if text else to


def fold_params(
    params: Flat,
    specs: Mapping[str, ParamSpec],
    maps: Mapping[str, Affine],
    source: Recipe,
    recipe: Recipe,
) -> Flat:
    """Returns the parameters of `recipe`'s model, computed from the parameters of `source`'s.

    Each matrix that reads the stream absorbs the affine map of its norm. Each matrix that writes
    to the stream is recentred if the norm subtracted the mean.

    Args:
      params: of the source, by path.
      specs: of the source's parameters.
      maps: the affine map of each norm.
      source: the recipe before folding.
      recipe: the recipe after folding.
    """
    drops = recipe.norm.row.dropped_coordinates
    folded = {path: weight for path, weight in params.items() if parent_path(path) not in maps}
    for path, spec in specs.items():
        if spec.part == NORM or 'embed' not in spec.axes:
            continue
        if 'embed' not in spec.fan_in:
            # Matrices that write to the stream take over the subtraction of the mean.
            if source.norm.name == 'layernorm':
                folded[path] = fold.recentre_writer(folded[path])
            if drops:
                folded[path] = fold.compress_writer(folded[path])
            if spec.role == 'hidden' and recipe.model.bias:
                # model.bias is a choice for the whole model: writers get biases of 0.
                layers, width = len(folded[path]), folded[path].shape[-1]
                folded.setdefault(f'{path}_bias', np.zeros((layers, width)))
            continue
        norm = norm_before(path, source)
        axis, bias, affine = spec.axes.index('embed'), f'{path}_bias', maps[norm]
        folded[path], folded_bias = fold_reader(folded[path], folded.get(bias), axis, affine, drops)
        if folded_bias is not None:
            folded[bias] = folded_bias
    return folded


def norm_before(path: str, recipe: Recipe) -> str:
    """Returns the norm before a matrix that reads the stream.

    For 'layers/mlp/up' it is 'layers/mlp_norm_in'.
    """
    if not parent_path(path):
        return 'final_norm'
    blocks, sublayer = path.split('/')[:2]
    return f'{blocks}/{recipe.placement.row.norms_before[sublayer]}'


def fold_reader(kernel: Any, bias: Any, axis: int, affine: Affine, drops: int) -> tuple[Any, Any]:
    """Returns the kernel and bias of a layer that reads the stream, with the norm folded in.

    Args:
      kernel: its outputs may have several axes.
      bias: of the layer, or None.
      axis: of the kernel that reads the stream.
      affine: the map of the norm before the layer.
      drops: coordinates that the stream loses.

    Returns:
      (kernel, bias or None).
    """
    shape = kernel.shape
    leading, output_shape = shape[:axis], shape[axis + 1 :]
    kernel = kernel.reshape(*shape[: axis + 1], -1)
    bias = None if bias is None else bias.reshape(*leading, -1)
    kernel, bias = fold.fold_into_reader(affine, kernel, bias)
    if drops:
        kernel = fold.compress_reader(kernel)
    bias = None if bias is None else bias.reshape(*leading, *output_shape)
    return kernel.reshape(*leading, -1, *output_shape), bias


def cast(tree: Any, dtype: Any) -> Any:
    """Returns the leaves as NumPy arrays, floats in `dtype`, without changing counters and keys."""

    def cast_leaf(leaf):
        leaf = np.asarray(leaf)
        return leaf.astype(dtype) if np.issubdtype(leaf.dtype, np.floating) else leaf

    return jax.tree.map(cast_leaf, tree)


def run_on_cpu(dtype: str, function: Callable[[], Any]) -> Any:
    """Returns function() computed on the CPU, which supports float64, as NumPy arrays.

    dtype: 'float64' enables float64 in JAX meanwhile.
    """
    cpu = jax.local_devices(backend='cpu')[0]
    with jax.enable_x64(dtype == 'float64'), jax.default_device(cpu):
        return jax.device_get(function())


def compute_logits(
    recipe: Recipe,
    vocab: int,
    variables: Any,
    dtype: str,
    length: int | None = None,
    is_rounded: bool = False,
) -> np.ndarray:
    """Returns the logits of fixed random tokens, computed in `dtype` by the reference kernels.

    Args:
      recipe: of the model; its model.dtype is replaced.
      vocab: size of the vocabulary.
      variables: of the model.
      dtype: 'float32' or 'float64'.
      length: tokens of a row; None: data.seq_len.
      is_rounded: whether products have the few bits of the run; otherwise the weights themselves
        are compared.
    """
    shape = (ROWS, length or recipe.data.seq_len)
    tokens_BT = np.random.default_rng(0).integers(0, vocab, shape, dtype=np.int32)
    recipe = recipe if is_rounded else widen_products(recipe)
    recipe = update_recipe(recipe, {'model.dtype': dtype})
    transformer = build_model(use_reference_kernels(recipe), vocab, 'cpu')
    return run_on_cpu(dtype, lambda: jax.jit(transformer.apply)(cast(variables, dtype), tokens_BT))


def use_reference_kernels(recipe: Recipe) -> Recipe:
    """Returns the recipe with the reference kernels, which run anywhere.

    Other kernels may need a GPU or TPU. The matmul product stays: it runs on a CPU, and may carry
    state.
    """
    matmul = recipe.kernels.get('matmul')
    options = {} if matmul is None else matmul.options
    kernels = vars(
        KernelsConfig(implementation='reference', matmul=recipe.config.kernels.matmul, **options)
    )
    return update_recipe(recipe, {f'kernels.{name}': value for name, value in kernels.items()})


def build_cpu_learner(recipe: Recipe, vocab: int) -> Learner:
    """Returns a learner that describes or initialises parameters. It is never trained."""
    return build_learner(use_reference_kernels(recipe), vocab, 0, 'cpu')


def float64_variables(checkpoint: Checkpoint) -> dict[str, Any]:
    """Returns the variables of the model, computed from the stored weights in float64."""
    exact = cast(jax.device_get(checkpoint.weights), np.float64)
    return run_on_cpu('float64', lambda: jax.jit(checkpoint.learner.variables)(exact))


def build_folded(checkpoint: Checkpoint, recipe: Recipe, before: Any, after: Any) -> FoldedModel:
    """Checks a folded model, and returns it with weights in float32.

    Args:
      checkpoint: the source.
      recipe: of the folded model.
      before: variables of the source, in float64.
      after: variables of the folded model, in float64.

    Raises:
      ValueError: if the variables do not fit the recipe, or if the logits in float64 differ by
        more than TOLERANCE.
    """
    vocab, differences = checkpoint.meta['vocab_size'], {}
    stored = cast(after, np.float32)
    weights = Weights(stored.pop('params'), (), stored)
    learner = build_cpu_learner(recipe, vocab)
    fresh = jax.eval_shape(lambda: init_state(learner, make_hyper(recipe), jax.random.key(0)))
    check_tree(state_record(weights), state_record(fresh.weights), checkpoint.path)
    for dtype, source in (('float64', before), ('float32', checkpoint.variables)):
        expected = compute_logits(checkpoint.recipe, vocab, jax.device_get(source), dtype)
        logits = compute_logits(recipe, vocab, after, dtype)  # rounds to float32 as storing does
        differences[dtype] = float(np.max(np.abs(logits - expected)) / np.max(np.abs(expected)))
    if not differences['float64'] <= TOLERANCE:
        raise ValueError(
            'folding changed the model: in float64 its logits differ by up to '
            f'{differences["float64"]:.1e} of the largest; rounding explains at most '
            f'{TOLERANCE:.0e}. Nothing was written. A part of this model does not compute in '
            'float64, or eval.convert.fold does not support it.'
        )
    return FoldedModel(recipe, weights, differences)


def reparam_removal() -> dict[str, Any]:
    """Returns the changes that remove the reparametrisation and its options, and train all."""
    reparam_options = [path for path in FIELDS if path.startswith('reparam.')]
    return {'model.reparam': 'none', 'train.trainable': 'all'} | dict.fromkeys(reparam_options)


def write_workdir(
    workdir: Path,
    recipe: Recipe,
    weights: Weights,
    tokenizer: Tokenizer,
    step: int,
    meta: dict,
) -> None:
    """Writes a workdir with a checkpoint; its optimizer state and averaged weights are new.

    All processes that hold parts of the weights must call it. The folder is marked as incomplete
    (`lm.storage.filling`) until everything is written.

    Args:
      workdir: an empty or new folder.
      recipe: its config.
      weights: its weights; parameters may be packed (`PackedWeight`).
      tokenizer: its tokenizer, which brings the files that belong to it.
      step: of the checkpoint.
      meta: metadata of a checkpoint (`lm.run.journal`).

    Raises:
      ValueError: if `workdir` is not empty, or if hosts do not see the same folder.
    """
    # Loading widens narrow weights, and a new run stores them as they are.
    wide = {'optim.weight_dtype': 'float32', 'optim.weight_rounding': STOCHASTIC}
    recipe = update_recipe(recipe, wide)
    with contextlib.ExitStack() as stack:
        with raise_on_all(ValueError, OSError):
            if is_first():
                check_path(workdir)
                stack.enter_context(fill_folder(workdir))
                tokenizer.save(workdir / 'tokenizer')
                write_config(workdir, recipe)
        check_shared(workdir / CONFIG, '--out')
        # A run resumes only from a complete state: moments of 0, and an average of the weights.
        params = weights.params
        weights = jax.tree.map(
            lambda x: jnp.asarray(x.values() if isinstance(x, PackedWeight) else x), weights
        )
        learner, hyper = build_cpu_learner(recipe, meta['vocab_size']), make_hyper(recipe)
        moments = build_optimizer(recipe, learner.description, hyper).init(weights.params)
        average = build_average(recipe, learner.description, hyper).init(weights.params)
        watched = init_watched(recipe.train)
        parts = weights.params, weights.reparam, weights.stats, moments, average, watched
        state = replicate_state(State(jnp.int32(step), *parts))
        checkpoints = Checkpoints(
            workdir, keep_last=1, keep_best=0, save_concurrent_gb=largest_shard_gb(state)
        )
        stored = jax.tree.map(
            lambda param, x: param if isinstance(param, PackedWeight) else x, params, state.params
        )
        state = state.replace(params=stored)
        checkpoints.save(state, meta | {'config': to_dict(recipe), 'versions': versions()}, None)
        checkpoints.wait()
        checkpoints.close()


def replicate_state(state: State) -> State:
    """Replicates process-local arrays over the devices of all processes, as checkpoints need."""
    if not is_multiprocess():
        return state
    everywhere = replicated_sharding(make_mesh(MeshConfig(data=-1)))

    def replicate(x):
        return jax.device_put(np.asarray(x), everywhere) if x.is_fully_addressable else x

    return jax.tree.map(replicate, state)


def largest_shard_gb(state: State) -> float:
    """Returns slightly more than the size of the largest shard in GB. Orbax writes shards whole."""
    sizes = [s.data.nbytes for x in jax.tree.leaves(state) for s in x.addressable_shards]
    return (max(sizes) + 1000) / 1e9
