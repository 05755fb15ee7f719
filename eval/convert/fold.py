"""Folds checkpoints: without the norms, or the parts of norms, that the matrices beside them take
over, and without reparametrisations.

The conversion is made and checked in float64 on the CPU, then stored in float32.
"""

import contextlib
import dataclasses
import shutil
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax.traverse_util import unflatten_dict

from eval.load import Checkpoint
from lm.config.fields import FIELDS, KernelsConfig, MeshConfig
from lm.config.recipe import Recipe, build_recipe
from lm.config.resolve import resolve_config, to_dict, update_config, update_recipe
from lm.data.tokenizers import Tokenizer
from lm.devices.mesh import make_mesh, replicated_sharding
from lm.launch.distributed import is_first, is_multiprocess, raise_on_all
from lm.model.check import check
from lm.model.transformer import block_groups, build_model
from lm.record.checkpoint import check_path, check_tree, state_record
from lm.record.checkpoints import Checkpoints
from lm.record.machine import versions
from lm.record.workdir import CONFIG, check_shared, write_config
from lm.storage.filling import fill_folder
from lm.training.state import Learner, State, Weights, build_learner, init_state, make_hyper
from lm.training.update import build_average, build_optimizer
from modules.choices import choose
from modules.norms import fold
from modules.norms.fold import Affine
from modules.norms.removal import removal_update
from modules.params import NORM, ParamSpec, named_leaves
from modules.placements import PLACEMENTS

TOLERANCE = 1e-10  # of logits in float64, where the algebra itself costs about 1e-14
ROWS = 2  # sequences of random tokens that logits are compared on
Flat = dict[str, np.ndarray]  # {'layers/mlp/up': ..., ...}

# --to -> {model.norm: what of that norm is an affine map}; what is left is the norm --to.
TARGETS = {
    'crmsnorm': {'layernorm': fold.LEARNED_AFFINE['layernorm']},
    'none': fold.CONSTANT_AFFINE,
    'rmsnorm': fold.LEARNED_AFFINE,
}
FINE_TUNE = 'Fine-tune it with model.norm={}_removal and train.init_from until all are removed.'
HINTS = {
    ('layernorm', 'none'): FINE_TUNE.format('layernorm'),
    ('powernorm', 'none'): 'It also divides each token by its own rms.',
    ('rmsnorm', 'crmsnorm'): 'Its stream has a mean, which crmsnorm has no room for; one folded '
    'from layernorm has none but for rounding, and the layernorm checkpoint itself can be folded.',
    ('rmsnorm', 'none'): FINE_TUNE.format('rmsnorm'),
}


@dataclasses.dataclass(frozen=True)
class FoldedModel:
    """A model whose logits are those of another one.

    differences: {'float64': max |logit - source's| / max |source's|, 'float32': ...}.
    kept: why the norms are those of the source, where they are; '' where they are not.
    """

    recipe: Recipe
    weights: Weights
    differences: dict[str, float]
    norm_obstacle: str = ''


def fold_checkpoint(checkpoint: Checkpoint, to: str, untie: bool = False) -> FoldedModel:
    """The model of a checkpoint with model.norm = `to` and the same logits.

    rmsnorm: from layernorm, whose writers are recentred, or from rmsnorm. Gains and biases go into
    the matrices that follow, and the norm has scale=False; model.qk_norm stays as it is. crmsnorm:
    from layernorm; the stream loses its last coordinate. none: from norms that are affine maps in
    evaluation; of a model with other norms they stay, if it has a reparametrisation to fold. Biases
    that arise are those of model.bias and model.readout_bias. model.reparam becomes none: what is
    stored is what evaluation uses. `untie` gives a model with tied embeddings a readout of its own.

    Raises ValueError for a model that cannot be folded so, and where its logits change.
    """
    if kept := find_norm_obstacle(checkpoint, to):
        return fold_reparam(checkpoint, untie, kept)
    check_foldable(checkpoint, to, untie)
    source, vocab = checkpoint.recipe, checkpoint.meta['vocab_size']
    before = float64_variables(checkpoint)
    params = named_leaves(before['params'])
    if source.model.tie_embeddings:
        params['readout'] = params['embedding'].T
    maps = affine_maps(TARGETS[to][source.norm.name], source, params, before)
    recipe = fold_config(source, to, biased=any(m.shift is not None for m in maps.values()))
    check(recipe)
    unfolded = update_recipe(source, reparam_removal() | {'model.tie_embeddings': False})
    specs = named_leaves(build_cpu_learner(unfolded, vocab).description.specs)
    params = fold_params(params, specs, maps, source, recipe)
    carried = {name: named_leaves(tree) for name, tree in before.items()}  # what layers carry
    after = {
        n: {p: x for p, x in own.items() if parent_path(p) not in maps}
        for n, own in carried.items()
    }
    after['params'] = params
    after = {name: unflatten_dict(leaves, sep='/') for name, leaves in after.items() if leaves}
    return build_folded(checkpoint, recipe, before, after)


def fold_reparam(checkpoint: Checkpoint, untie: bool, norm_obstacle: str) -> FoldedModel:
    """The model of a checkpoint with model.reparam = none and all else as it is."""
    source, before = checkpoint.recipe, float64_variables(checkpoint)
    after, changes = dict(before), reparam_removal() | {'train.init_from': ''}
    if untie and source.model.tie_embeddings:
        after['params'] = before['params'] | {'readout': before['params']['embedding'].T}
        changes |= {'model.tie_embeddings': False}
    recipe = resolve_config(update_config(source.config, changes))
    check(recipe)
    return dataclasses.replace(
        build_folded(checkpoint, recipe, before, after), norm_obstacle=norm_obstacle
    )


def find_norm_obstacle(checkpoint: Checkpoint, to: str) -> str:
    """The reason why only the reparametrisation of a model can be folded, and its norms stay.

    '' where the norms can be folded too, there is no reparametrisation, or `to` is a norm. Raises
    ValueError for a placement that is made of the reparametrisation.
    """
    source, kept = checkpoint.recipe, ''
    if to != 'none' or source.model.reparam == 'none':
        return kept
    try:
        check_norms_foldable(source, to)
        check_removal_finished(source, checkpoint.weights.stats)
    except ValueError as error:
        kept = str(error)
    if needed := source.placement.row.needs.get('reparam'):
        raise ValueError(
            f'a model with {source.placement} cannot be folded: it is made of model.reparam='
            f'{needed}'
        )
    return kept


def check_foldable(checkpoint: Checkpoint, to: str, untie: bool) -> None:
    """Raises ValueError, with what would work, for a model that cannot be folded so."""
    recipe = checkpoint.recipe
    check_norms_foldable(recipe, to)
    if recipe.model.tie_embeddings and not untie:
        raise ValueError(
            'model.tie_embeddings=True: the readout cannot take a norm up while it is the '
            'embedding too. --untie stores it as a matrix of its own.'
        )
    check_removal_finished(recipe, checkpoint.weights.stats)


def check_norms_foldable(recipe: Recipe, to: str) -> None:
    """Raises ValueError, with what would work, for norms that cannot be folded so."""
    sources, norm, model = choose(TARGETS, to, '--to'), recipe.norm.name, recipe.model
    able = ', '.join(name for name, row in PLACEMENTS.items() if row.norms_before)
    found = able if recipe.placement.row.norms_before else model.placement
    wanted = {
        'model.placement': (found, able, 'its norms are not alone before a matrix'),
        'model.mlp': (model.mlp, 'dense', 'what reads the norm is not one matrix that may change'),
        'model.readout': (model.readout, 'learned', 'it reads directions, and not products'),
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


def check_removal_finished(recipe: Recipe, stats: Any) -> None:
    """Raises ValueError where norms are left to remove."""
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
    kind: fold.AffineFunction, recipe: Recipe, params: Flat, carried: Any
) -> dict[str, Affine]:
    """{'layers/mlp_norm_in': the affine map behind its normalisation, ...} of all norms."""
    (blocks,) = block_groups(recipe)
    eps = recipe.norm.options.get('eps')
    before = recipe.placement.row.norms_before.values()
    sites = [*dict.fromkeys(f'{blocks.name}/{norm}' for norm in before), 'final_norm']
    stats = named_leaves(carried.get('stats', {}))

    def of(site: str, leaves: Mapping[str, Any]) -> Flat:
        own = {path: leaf for path, leaf in leaves.items() if parent_path(path) == site}
        return {path.rpartition('/')[2]: leaf for path, leaf in own.items()}

    return {site: kind(of(site, params), of(site, stats), eps) for site in sites}


def parent_path(path: str) -> str:
    """The part that has a leaf: 'layers/mlp' has 'layers/mlp/up'."""
    return path.rpartition('/')[0]


def fold_config(source: Recipe, to: str, biased: bool) -> Recipe:
    """The source's config with norm `to`. biased: whether matrices take biases up."""
    no_norm = {'model.norm': 'none', 'model.final_norm': 'none'}
    others = build_recipe(
        update_config(source.config, no_norm)
    ).readers  # as those of model.qk_norm
    unread = [path for path in FIELDS if path.startswith('norm.') and path not in others]
    config = update_config(source.config, dict.fromkeys(unread) | reparam_removal())
    norm = fold_norm(source, to, build_recipe(update_config(config, no_norm | {'model.norm': to})))
    changes = {
        'model.norm': norm,
        'model.final_norm': norm,
        'model.bias': source.model.bias or biased,
        'model.qkv_bias': source.model.qkv_bias and not biased,
        'model.readout_bias': source.model.readout_bias or biased,
        'model.tie_embeddings': False,
        # The weights are here now, and what was trained alone may be gone.
        'train.init_from': '',
        'train.trainable': 'all',
    }
    return resolve_config(update_config(config, changes))


def fold_norm(source: Recipe, to: str, unfolded_recipe: Recipe) -> str:
    """model.norm with the options of the source's norm, but for its gains: 'rmsnorm:scale=False'.

    folded: has the norm `to` with the options that do not stand behind its name.
    """
    wanted, usual = {**source.norm.options, 'scale': False}, unfolded_recipe.norm.options
    behind = {name: wanted.get(name) for name in usual}
    behind = {n: value for n, value in behind.items() if value not in (None, usual[n])}
    text = ','.join(f'{name}={value!r}' for name, value in behind.items())
    return f'{to}:{text}' if text else to


def fold_params(
    params: Flat,
    specs: Mapping[str, ParamSpec],
    maps: Mapping[str, Affine],
    source: Recipe,
    recipe: Recipe,
) -> Flat:
    """The parameters of `recipe`'s model, from those of `source`'s: each matrix that reads the
    stream takes a norm's map up, and each that writes it is recentred where the norm was centred.
    """
    drops = recipe.norm.row.dropped_coordinates
    new = {path: weight for path, weight in params.items() if parent_path(path) not in maps}
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
        norm = norm_before(path, source)
        axis, bias, affine = spec.axes.index('embed'), f'{path}_bias', maps[norm]
        new[path], taken_up = fold_reader(new[path], new.get(bias), axis, affine, drops)
        if taken_up is not None:
            new[bias] = taken_up
    return new


def norm_before(path: str, recipe: Recipe) -> str:
    """The norm before a matrix that reads the stream: 'layers/mlp_norm_in' of 'layers/mlp/up'."""
    if not parent_path(path):
        return 'final_norm'
    blocks, sublayer = path.split('/')[:2]
    return f'{blocks}/{recipe.placement.row.norms_before[sublayer]}'


def fold_reader(kernel: Any, bias: Any, axis: int, affine: Affine, drops: int) -> tuple[Any, Any]:
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


def cast(tree: Any, dtype: Any) -> Any:
    """Returns numpy arrays: floats in `dtype`, counters and keys as they are."""

    def one(leaf):
        leaf = np.asarray(leaf)
        return leaf.astype(dtype) if np.issubdtype(leaf.dtype, np.floating) else leaf

    return jax.tree.map(one, tree)


def run_on_cpu(dtype: str, function: Callable[[], Any]) -> Any:
    """function() on the CPU, where it can compute in `dtype`, as numpy arrays."""
    cpu = jax.local_devices(backend='cpu')[0]
    with jax.enable_x64(dtype == 'float64'), jax.default_device(cpu):
        return jax.device_get(function())


def compute_logits(
    recipe: Recipe, vocab: int, variables: Any, dtype: str, length: int | None = None
) -> np.ndarray:
    """Logits of fixed random tokens, all in `dtype`, whatever model.dtype is, by the reference
    kernels. length: of the rows; None: data.seq_len.
    """
    shape = (ROWS, length or recipe.data.seq_len)
    tokens_BT = np.random.default_rng(0).integers(0, vocab, shape, dtype=np.int32)
    recipe = use_reference_kernels(update_recipe(recipe, {'model.dtype': dtype}))
    transformer = build_model(recipe, vocab, 'cpu')
    return run_on_cpu(dtype, lambda: jax.jit(transformer.apply)(cast(variables, dtype), tokens_BT))


def use_reference_kernels(recipe: Recipe) -> Recipe:
    """The recipe with the reference kernels, which run anywhere: its own may not run on a CPU. Its
    matmul product stays: it runs on a CPU, and may carry state.
    """
    kernels = vars(KernelsConfig(implementation='reference', matmul=recipe.config.kernels.matmul))
    return update_recipe(recipe, {f'kernels.{name}': value for name, value in kernels.items()})


def build_cpu_learner(recipe: Recipe, vocab: int) -> Learner:
    """Describes parameters or makes them; it is never trained."""
    return build_learner(use_reference_kernels(recipe), vocab, 0, 'cpu')


def float64_variables(checkpoint: Checkpoint) -> dict[str, Any]:
    """The variables of its model, computed from the stored weights in float64."""
    exact = cast(jax.device_get(checkpoint.weights), np.float64)
    return run_on_cpu('float64', lambda: jax.jit(checkpoint.learner.variables)(exact))


def build_folded(checkpoint: Checkpoint, recipe: Recipe, before: Any, after: Any) -> FoldedModel:
    """The folded model with the variables `after`, in float64, stored in float32; those of the
    source are `before`.

    ValueError where they are not those of the recipe, or where the logits in float64 differ by more
    than TOLERANCE.
    """
    vocab, differences = checkpoint.meta['vocab_size'], {}
    stored = cast(after, np.float32)
    weights = Weights(stored.pop('params'), (), stored)
    learner = build_cpu_learner(recipe, vocab)
    fresh = jax.eval_shape(lambda: init_state(learner, make_hyper(recipe), jax.random.key(0)))
    check_tree(state_record(weights), state_record(fresh.weights), checkpoint.path)
    for dtype, source in (('float64', before), ('float32', checkpoint.variables)):
        wanted = compute_logits(checkpoint.recipe, vocab, jax.device_get(source), dtype)
        found = compute_logits(
            recipe, vocab, after, dtype
        )  # which rounds to float32 as storing does
        differences[dtype] = float(np.max(np.abs(found - wanted)) / np.max(np.abs(wanted)))
    if not differences['float64'] <= TOLERANCE:
        raise ValueError(
            f'the folded model is another one: in float64 its logits differ by up to '
            f'{differences["float64"]:.1e} of the largest, and rounding explains '
            f'{TOLERANCE:.0e} at most. Nothing was written: a part of this model does not compute '
            'in float64, or is unknown to eval.convert.fold.'
        )
    return FoldedModel(recipe, weights, differences)


def reparam_removal() -> dict[str, Any]:
    """The changes that leave a config without reparametrisation, its options, and what is trained
    of it alone.
    """
    options_of_it = [path for path in FIELDS if path.startswith('reparam.')]
    return {'model.reparam': 'none', 'train.trainable': 'all'} | dict.fromkeys(options_of_it)


def write_workdir(
    workdir: Path,
    recipe: Recipe,
    weights: Weights,
    tokenizer: Tokenizer,
    step: int,
    meta: dict,
    tokenizer_files: Sequence[Path] = (),
) -> None:
    """Writes a workdir with one checkpoint, whose optimizer state and average of the weights are
    new; all processes that hold parts of the weights must call it. It is marked as incomplete
    (`lm.storage.fill_folder`) until all of it is there.

    Args:
      out: the workdir, a folder that is empty or not there.
      recipe: its config.
      weights: its weights.
      tokenizer: its tokenizer.
      step: of the checkpoint.
      meta: that of another checkpoint, or its like (`lm.run.journal`).
      beside: files to be copied into the folder of the tokenizer.

    Raises:
      ValueError: where `out` holds something, or hosts do not see the same folder.
    """
    with contextlib.ExitStack() as held:
        with raise_on_all(ValueError, OSError):
            if is_first():
                check_path(workdir)
                held.enter_context(fill_folder(workdir))
                tokenizer.save(workdir / 'tokenizer')
                for file in tokenizer_files:
                    shutil.copyfile(file, workdir / 'tokenizer' / file.name)
                write_config(workdir, recipe)
        check_shared(workdir / CONFIG, '--out')
        weights = jax.tree.map(jnp.asarray, weights)
        learner, hyper = build_cpu_learner(recipe, meta['vocab_size']), make_hyper(recipe)
        moments = build_optimizer(recipe, learner.description, hyper).init(weights.params)
        average = build_average(recipe, learner.description, hyper).init(weights.params)
        parts = weights.params, weights.reparam, weights.stats, moments, average
        state = replicate_state(State(jnp.int32(step), *parts))
        checkpoints = Checkpoints(
            workdir, keep_last=1, keep_best=0, save_concurrent_gb=largest_shard_gb(state)
        )
        checkpoints.save(state, meta | {'config': to_dict(recipe), 'versions': versions()}, None)
        checkpoints.wait()
        checkpoints.close()


def replicate_state(state: State) -> State:
    """Lays arrays that each process has by itself over the devices of all, as they are saved."""
    if not is_multiprocess():
        return state
    everywhere = replicated_sharding(make_mesh(MeshConfig(data=-1)))

    def laid(x):
        return jax.device_put(np.asarray(x), everywhere) if x.is_fully_addressable else x

    return jax.tree.map(laid, state)


def largest_shard_gb(state: State) -> float:
    """Returns just more than the largest part of an array on a device, which Orbax writes whole."""
    sizes = [s.data.nbytes for x in jax.tree.leaves(state) for s in x.addressable_shards]
    return (max(sizes) + 1000) / 1e9
