"""The state a run starts from: random weights, or the weights of a checkpoint (train.init_from)."""

import contextlib
import functools
import tempfile
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax.traverse_util import unflatten_dict

from lm import data
from lm.config.fields import Config, TrainConfig
from lm.config.mixture import source_flag
from lm.config.other_programs import elsewhere_hint, foreign_names, normalize_name
from lm.config.recipe import Recipe
from lm.config.resolve import (
    build_config,
    flatten,
    single_run_config,
    to_dict,
    unresolve_fields,
    update_config,
)
from lm.config.suggestions import MULTI_RUN_SECTIONS
from lm.data.in_memory import check_held_out_texts
from lm.data.tokenizers import LIBRARY_FILE, TOKENIZER_FILE, Tokenizer
from lm.inference.load import Checkpoint, find_checkpoint, load, to_stderr
from lm.launch.distributed import broadcast_from_first, is_first, is_multiprocess
from lm.model.base_size import unused_fields
from lm.model.check import check
from lm.record.checkpoint import (
    FOLDER,
    WEIGHT_SECTIONS,
    TreeMismatch,
    check_tree,
    format_differences,
    list_steps,
    name_checkpoint,
    read_config,
    tree_record,
)
from lm.record.digests import DamagedCheckpoint
from lm.record.names import SWEEP
from lm.record.remote.local_copy import fetch_records, split_checkpoint_url
from lm.record.run import Run, list_runs
from lm.record.upgrade import resolve_stored
from lm.run.program import TOKENIZER, Experiment, locate_data
from lm.storage.buckets import is_url, join_url
from lm.storage.files import expand_home, read_json
from lm.training.state import (
    Learner,
    State,
    Weights,
    make_hyper,
    narrow_weights,
    widen_weights,
)
from lm.training.update import build_average
from modules.dropout import KEY_NAME
from modules.params import named_leaves

# These fields determine the function that a model computes from its weights, and its context.
MODEL_FIELDS = (*(f'{section}.' for section in (*WEIGHT_SECTIONS, 'scaling')), 'data.seq_len')
# A branch takes these from its own config.
NOT_FOLLOWED = ('train.branch_from', 'train.init_from', 'train.profile', 'train.seconds')
TEXT_FIELDS = {'data.source', 'data.mixture'}
# Rounding may change a weight that is stored in another form by this share of its largest element.
MAX_STORED_ERROR = 1e-5


def check_run(recipe: Recipe, workdir: Path | None = None) -> None:
    """Raises ValueError for a config that cannot be trained, or if its text or start is missing.

    workdir: the folder of the run, which may have begun.
    """
    check(recipe)
    check_one_source(recipe.train)
    check_time_budget(recipe.train)
    data.check(recipe.data if workdir is None else locate_data(recipe, workdir))
    check_held_out_texts(recipe)
    check_init_from(recipe, workdir)


def check_one_source(train: TrainConfig) -> None:
    """Raises ValueError if a run would begin from two checkpoints."""
    if train.init_from and train.branch_from:
        raise ValueError(
            f'train.init_from={train.init_from} and train.branch_from={train.branch_from} name two '
            'beginnings. branch_from continues optimizer state, step and config; init_from takes '
            'the weights alone. Leave one of them out.'
        )


def check_time_budget(train: TrainConfig) -> None:
    """Raises ValueError if train.seconds cannot determine the steps of a run."""
    if train.seconds is not None and train.stages is not None:
        raise ValueError(
            f'train.seconds={train.seconds:g} needs steps that all take the same time, but '
            f'train.stages={train.stages!r} changes them. Set train.steps, or leave out the stages.'
        )
    if train.seconds is not None and train.branch_from:
        raise ValueError(
            f'train.seconds={train.seconds:g} counts a whole run, but '
            f'train.branch_from={train.branch_from} continues one. Set train.steps to the step at '
            'which the branch ends.'
        )


def check_init_from(recipe: Recipe, workdir: Path | None = None) -> None:
    """Raises ValueError if train.init_from names no checkpoint.

    A run with checkpoints resumes from these and needs no other.
    """
    if not recipe.train.init_from:
        return
    # If hosts share no disk, only the first has the run's folder.
    has_checkpoint = workdir is not None and broadcast_from_first(
        bool(list_steps(workdir / FOLDER))
    )
    if not has_checkpoint:
        find_source(recipe.train.init_from)


def find_source(path: str, field: str = 'train.init_from') -> tuple[Path, int]:
    """Returns (folder of checkpoints, step) of a checkpoint to begin from.

    Args:
      path: the value of `field`.
      field: train.init_from or train.branch_from, for the error.

    Raises:
      ValueError: with advice, if there is no checkpoint.
    """
    try:
        return find_checkpoint(path)
    except ValueError as error:
        absent = elsewhere_hint('train.init_from', path)
        absent = absent or foreign_names().absent.get(normalize_name(path))
        reason = f'{absent}.' if absent else error
        raise ValueError(
            f'{field}={path}: {reason} A run that has already begun does not need it: pass '
            'its folder as --workdir to resume.'
        ) from error


def merge_source_model(
    raw: Mapping[str, Any], explicit_paths: Collection[str], workdir: str | Path | None = None
) -> tuple[Mapping[str, Any], dict[str, Any]]:
    """Takes the model of train.init_from, or all of train.branch_from, over into a config.

    Of train.init_from the fields of MODEL_FIELDS are copied, and data.tokenizer: the tokenizer
    beside the checkpoint if it comes from a file or another text. If that checkpoint is gone, the
    fields of the run in `workdir` that began from it are used. Of train.branch_from the fields of
    its config are copied (`read_parent_fields`).

    Args:
      raw: the config as nested dicts.
      explicit_paths: paths that keep their value in `raw`.
      workdir: the folder of the run.

    Returns:
      (config, {path: value} of the changed fields).

    Raises:
      ValueError: if neither the checkpoint nor such a run exists.
    """
    start = build_config(single_run_config(raw))
    check_one_source(start.train)
    if not start.train.init_from and not start.train.branch_from:
        return raw, {}
    if start.train.branch_from:
        fields = read_parent_fields(start, explicit_paths, workdir)
    else:
        fields = _read_model_fields(start, workdir)
    fields = {path: value for path, value in fields.items() if path not in explicit_paths}
    # An option that no chosen part reads would be refused; None leaves it out.
    fields |= dict.fromkeys(fields.keys() & {*unused_fields(update_config(start, fields))})
    current, config = flatten(start), to_dict(update_config(start, fields))
    changes = {path: value for path, value in fields.items() if value != current[path]}
    return config | {name: raw.get(name) for name in MULTI_RUN_SECTIONS}, changes


def _read_model_fields(start: Config, workdir: str | Path | None) -> dict[str, Any]:
    """Returns the fields that a run takes over from train.init_from."""
    # From config.json, as reading a checkpoint would start JAX before the hosts have joined.
    try:
        folder, _ = find_source(start.train.init_from)
        source = Run(folder.parent).read_recipe()
        tokenizer = _choose_tokenizer(folder.parent, source, start)
    except ValueError:
        source = None if workdir is None else _read_begun_run(start.train.init_from, workdir)
        if source is None:
            raise
        tokenizer = source.data.tokenizer
    fields = {p: v for p, v in unresolve_fields(source).items() if p.startswith(MODEL_FIELDS)}
    return fields | {'data.tokenizer': tokenizer}


def read_parent_fields(
    start: Config, explicit_paths: Collection[str], workdir: str | Path | None
) -> dict[str, Any]:
    """Returns the fields that a branch takes over from train.branch_from: all but NOT_FOLLOWED.

    They are those of the run or cell in `workdir` that has begun from it, if there is one: the
    parent may have changed since, or be gone. Else they are the config of the checkpoint. If the
    branch reads another text, a tokenizer that depends on the text is that beside the checkpoint.

    Args:
      start: the config of the branch, before the fields are taken over.
      explicit_paths: the fields that the branch sets.
      workdir: its folder.
    """
    source, sets_text = start.train.branch_from, not TEXT_FIELDS.isdisjoint(explicit_paths)
    parent = None if workdir is None else _find_begun_branch(source, workdir)
    fields = {}
    if parent is None:
        folder, step = find_source(source, 'train.branch_from')
        parent = resolve_stored(read_config(folder, step))
        path = parent.data.tokenizer.removeprefix('hf:')
        is_gone = path != parent.data.tokenizer and not Path(expand_home(path)).exists()
        if sets_text or is_gone:
            fields['data.tokenizer'] = _choose_tokenizer(folder.parent, parent, start)
    fields = unresolve_fields(parent) | fields
    # data.source and data.mixture replace each other.
    left_out = {*NOT_FOLLOWED, *(TEXT_FIELDS if sets_text else ())}
    return {path: value for path, value in fields.items() if path not in left_out}


def _find_begun_branch(source: str, workdir: str | Path) -> Recipe | None:
    """Returns the config of a run, sweep or cell in `workdir` that branches from `source`."""
    with contextlib.suppress(ValueError, OSError, KeyError):
        folder = fetch_records(workdir)
        if (folder / SWEEP).exists():
            recipe = resolve_stored(read_json(folder / SWEEP)['base'])  # without the axes
            if recipe.train.branch_from == source:
                return recipe
        for run in list_runs(folder):
            recipe = run.read_recipe()
            if recipe.train.branch_from == source:
                return recipe
    return None


def _choose_tokenizer(folder: Path, source_recipe: Recipe, start: Config) -> str:
    """Returns the data.tokenizer of a run that starts from the run in a folder."""
    tokenizer, is_other_text = (
        source_recipe.data.tokenizer,
        source_flag(source_recipe.data) != source_flag(start.data),
    )
    if tokenizer.startswith('hf:') or (tokenizer.startswith('bpe:') and is_other_text):
        return f'hf:{folder / TOKENIZER}'
    return tokenizer


def _read_begun_run(source: str, workdir: str | Path) -> Recipe | None:
    """Returns the config of a run that began from `source` and has saved a checkpoint since.

    None if the workdir holds no such run.
    """
    try:
        folder, _ = find_checkpoint(workdir)
        recipe = Run(folder.parent).read_recipe()
    except ValueError:
        return None
    return recipe if recipe.train.init_from == source else None


def initial_state(
    recipe: Recipe, experiment: Experiment, say: Callable[[str], None] = print
) -> State:
    """Returns the state of step 0, sharded over the mesh.

    With train.init_from the model uses the weights that the checkpoint's model used in evaluation,
    stored in the form of the present model.reparam. Under the same model.reparam they are copied
    together with its state. The state of layers is copied if all of it fits, and fresh otherwise.
    The optimizer and an average of the weights start anew.

    Args:
      recipe: the config of the run.
      experiment: the model and its devices.
      say: prints a line.

    Raises:
      ValueError: if there is no checkpoint, a parameter has no counterpart of its shape,
        model.reparam cannot hold the weights, or the tokenizers differ.
    """
    source = _load_source(recipe, experiment) if recipe.train.init_from else None
    state = experiment.init(jax.random.key(recipe.train.seed), make_hyper(recipe))
    if source is None:
        return state
    if (source_dtype := source.recipe.model.dtype) != recipe.model.dtype:
        say(
            f'NOTE: matmuls use {recipe.model.dtype}; {source.path} was trained with {source_dtype}'
        )
    variables = dict(_jit_if_distributed(source.learner.variables)(source.weights))
    stored, reparam = store_weights(experiment.learner, source, variables.pop('params'))
    stats = carry_over(variables, state.stats)
    fresh = widen_weights(state).params, state.reparam, state.stats
    params, reparam, stats = _place_like((stored, reparam, stats), fresh)
    # The average in `state` began at random weights; it has to begin at the loaded weights.
    average = build_average(recipe, experiment.learner.description, make_hyper(recipe))
    average = _place_like(_jit_if_distributed(average.init)(params), state.average)
    return narrow_weights(
        recipe, state.replace(params=params, reparam=reparam, stats=stats, average=average)
    )


def _jit_if_distributed(function: Callable) -> Callable:
    """Returns the function as one program if several processes hold the arrays.

    Computed one operation at a time, arrays would belong to one process, and could not be combined
    with global arrays.
    """
    return jax.jit(function) if is_multiprocess() else function


def carry_over(source: Any, fresh: Any) -> Any:
    """Returns the state of layers: the source's if all of it fits, else `fresh`.

    Dropout keys are ignored in the comparison: a run with dropout that starts from a run without
    it, or the reverse, has fresh keys or none, and the rest of the source's state.
    """
    source_leaves, fresh_leaves = named_leaves(source), named_leaves(fresh)
    if tree_record(source) == tree_record(fresh):
        return source

    def without_keys(leaves):
        return {p: leaf for p, leaf in leaves.items() if p.rpartition('/')[2] != KEY_NAME}

    if tree_record(without_keys(source_leaves)) != tree_record(without_keys(fresh_leaves)):
        return fresh
    return unflatten_dict(fresh_leaves | without_keys(source_leaves), sep='/')


def _place_like(arrays: Any, like: Any) -> Any:
    """Puts arrays, which each process has whole or in part, on the devices of `like`."""
    leaves, tree = jax.tree.flatten(arrays)
    shardings = [leaf.sharding for leaf in jax.tree.leaves(like)]
    if not is_multiprocess():
        return tree.unflatten(jax.device_put(leaves, shardings))
    for i, leaf in enumerate(leaves):
        if leaf.is_fully_addressable:
            host = np.asarray(leaf)
            at_index = functools.partial(np.ndarray.__getitem__, host)
            leaves[i] = jax.make_array_from_callback(host.shape, shardings[i], at_index)
    # In one program, since every program sets up its own links between the hosts.
    moved = [
        i for i, x in enumerate(leaves) if not x.sharding.is_equivalent_to(shardings[i], x.ndim)
    ]
    targets = [shardings[i] for i in moved]
    moved_leaves = (
        jax.jit(lambda x: x, out_shardings=targets)([leaves[i] for i in moved]) if moved else []
    )
    for i, leaf in zip(moved, moved_leaves, strict=True):
        leaves[i] = leaf
    return tree.unflatten(leaves)


def store_weights(learner: Learner, source: Checkpoint, used: Any) -> tuple[Any, Any]:
    """Stores a source's weights in the form of the learner's reparametrisation.

    Args:
      learner: the learner that will train them.
      source: the checkpoint.
      used: the weights that its model used.

    Returns:
      (stored, state) of the reparametrisation.

    Raises:
      ValueError: if the reparametrisation cannot hold the weights, for example because it fixes
        lengths.
    """
    reparam, weights = learner.description.reparam, source.weights
    stored, state = weights.params, weights.reparam
    if not _has_same_reparam(learner, source):

        def store(used, key):
            stored, state = reparam.init(used)
            return reparam.draw(stored, key), state

        stored, state = _jit_if_distributed(store)(used, jax.random.key(learner.recipe.train.seed))
    restored, _ = _jit_if_distributed(lambda *arrays: reparam.apply(*arrays, False))(stored, state)
    errors = _relative_errors(restored, used)
    worst = max(errors, key=errors.__getitem__, default=None)
    # `not <=` instead of `>`, so that NaN is an error too.
    if worst is not None and not errors[worst] <= MAX_STORED_ERROR:
        reparam_options = vars(learner.recipe.config.reparam).items()
        options_text = ''.join(
            f', reparam.{name}={v}' for name, v in reparam_options if v is not None
        )
        raise ValueError(
            f'model.reparam={learner.recipe.model.reparam}{options_text} cannot represent the '
            f'weights of train.init_from={source.path} (model.reparam='
            f'{source.recipe.model.reparam}): {worst} would change by {errors[worst]:.1e} of its '
            'largest element. Use the same reparametrisation and options as there, or one that can '
            'represent any weights: none, lora, weight_norm, or sigma with '
            'reparam.gamma_start=sigma.'
        )
    return stored, state


def _relative_errors(actual: Any, expected: Any) -> dict[str, float]:
    """Returns {path: largest difference / largest element} of the arrays that differ."""

    def error(x, y):
        return jnp.max(jnp.abs(x - y)) / jnp.max(jnp.abs(y))

    if is_multiprocess():
        # Equal arrays are told apart first: for arrays of zeros the error would be 0 / 0.
        compare = jax.jit(
            lambda *trees: jax.tree.map(
                lambda x, y: jnp.where(jnp.all(x == y), 0, error(x, y)), *trees
            )
        )
        actual = named_leaves(jax.device_get(compare(actual, expected)))
        return {path: float(difference) for path, difference in actual.items() if difference != 0}
    pairs = zip(named_leaves(actual).items(), jax.tree.leaves(expected), strict=True)
    return {path: float(error(x, y)) for (path, x), y in pairs if not np.array_equal(x, y)}


def _has_same_reparam(learner: Learner, source: Checkpoint) -> bool:
    """Returns whether the source's stored weights and reparametrisation state are valid here."""

    def reparam_settings(recipe):  # by model.reparam, and by the factors of the forward pass
        scaling = recipe.config.scaling
        forward = scaling.name, scaling.base_width, scaling.base_depth, scaling.depth_alpha
        families = [part.row.family for part in recipe.optimizers.values()]
        return recipe.model.reparam, recipe.config.reparam, forward, families

    shapes = jax.eval_shape(learner.description.reparam.init, learner.description.used_shapes)
    weights = source.weights.params, source.weights.reparam
    has_same_settings = reparam_settings(learner.recipe) == reparam_settings(source.recipe)
    return has_same_settings and tree_record(shapes) == tree_record(weights)


def _load_source(recipe: Recipe, experiment: Experiment) -> Checkpoint:
    """Returns the checkpoint of train.init_from. Raises ValueError for other weights or tokens."""
    source = (
        _load_source_distributed(recipe, experiment)
        if is_multiprocess()
        else load(recipe.train.init_from)
    )
    if read_tokenizer_files(source.tokenizer) != read_tokenizer_files(experiment.dataset.tokenizer):
        raise ValueError(
            f'train.init_from={recipe.train.init_from} was trained with another tokenizer: '
            f'{source.recipe.data.tokenizer} on {source_flag(source.recipe.data)}. This run uses '
            f'{recipe.data.tokenizer} on {source_flag(recipe.data)}. A bpe tokenizer depends on '
            'its text; byte and hf:PATH do not.'
        )
    expected = _used_record(experiment.learner, experiment.state_shapes)
    try:
        check_tree(_used_record(source.learner, source.weights), expected, source.path)
    except TreeMismatch as error:
        fields = format_differences(source.recipe, recipe, WEIGHT_SECTIONS)
        raise TreeMismatch(fields + str(error)) from error
    return source


def _load_source_distributed(recipe: Recipe, experiment: Experiment) -> Checkpoint:
    """Returns the checkpoint of train.init_from; each process reads the parts of its devices.

    Process 0 lists the candidates, as their run may still train and save.
    """
    path = recipe.train.init_from
    for checkpoint in broadcast_from_first(list_candidates(path) if is_first() else None):
        try:
            return load(checkpoint, mesh=experiment.mesh)
        except DamagedCheckpoint as error:
            to_stderr(f'{error}; using the checkpoint before it')
    raise ValueError(f'none of the checkpoints of train.init_from={path} can be read')


def list_candidates(path: str) -> list[str]:
    """Returns the checkpoints that `path` stands for, the newest first.

    For a bucket it is only the newest.
    """
    path = name_checkpoint(path)
    path = path if is_url(path) else expand_home(path)
    folder, newest = find_checkpoint(path)
    if is_url(path):
        return [join_url(split_checkpoint_url(path)[0], FOLDER, newest)]
    # The path of one checkpoint means this checkpoint; a damaged one then has no substitute.
    steps = [newest] if folder == Path(path).parent else reversed(list_steps(folder))
    return [str(folder / str(step)) for step in steps]


def _used_record(learner: Learner, state: State | Weights) -> dict[str, str]:
    """Returns the tree record of the weights that a model computes with."""
    apply = learner.description.reparam.apply

    def apply_reparam(state):
        return apply(widen_weights(state).params, state.reparam, False)[0]

    return tree_record(jax.eval_shape(apply_reparam, state))


def read_tokenizer_files(tokenizer: Tokenizer) -> dict[str, bytes]:
    """Returns the files that determine the ids of a tokenizer; equal files mean equal ids.

    Settings and chat templates beside it are left out: they may differ.
    """
    with tempfile.TemporaryDirectory() as folder:
        tokenizer.save(folder)
        names = (TOKENIZER_FILE, LIBRARY_FILE)
        return {n: (Path(folder) / n).read_bytes() for n in names if (Path(folder) / n).is_file()}
