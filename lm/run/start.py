"""The state a run starts from: random weights, or those of a checkpoint (train.init_from)."""

import tempfile
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from lm import data
from lm.config.mixture import source_of
from lm.config.recipe import Recipe
from lm.data.tokenizers import Tokenizer
from lm.inference.load import Checkpoint, find, load
from lm.launch.agreement import from_first, is_first
from lm.model.check import check
from lm.record.checkpoint import (
    FOLDER,
    TreeMismatch,
    check_tree,
    fields_that_differ,
    tree_record,
)
from lm.record.remote.fetch import of_workdir
from lm.run.experiment import Experiment
from lm.storage.buckets import below, is_url
from lm.training.state import Learner, State, Weights, average_of, hyper_from
from modules.params import named_leaves

HELD = 1e-5  # of its largest element: how far rounding may move a weight that is stored anew


def check_run(recipe: Recipe) -> None:
    """`lm.model.check.check`, and the same of what a run reads from disk: its text and its start."""
    check(recipe)
    data.check(recipe.data)
    check_init_from(recipe)


def check_init_from(recipe: Recipe) -> None:
    """ValueError where train.init_from names no checkpoint, with what a run does that has begun."""
    if not recipe.train.init_from:
        return
    try:
        find(recipe.train.init_from)
    except ValueError as error:
        raise ValueError(
            f'train.init_from: {error} A run that has begun goes on without it: '
            '--config.train.init_from= --continue_changed'
        ) from error


def initial_state(recipe: Recipe, experiment: Experiment) -> State:
    """Step 0, laid out on the mesh.

    With train.init_from, the weights the model uses are those that the checkpoint's model used in
    evaluation, stored as the present model.reparam has them: as they are there, with what it
    carries, where it is the same. What layers carry is taken over where all of it fits and fresh
    otherwise; the optimizer, and an average of the weights, start anew. Raises ValueError where
    there is no checkpoint, a parameter has no counterpart of its shape, model.reparam cannot hold
    the weights, or the tokenizers differ.
    """
    source = fitting_source(recipe, experiment) if recipe.train.init_from else None
    state = experiment.init(jax.random.key(recipe.train.seed), hyper_from(recipe))
    if source is None:
        return state
    variables = source.variables
    stored, reparam = stored_for(experiment.learner, source, variables.pop('params'))
    stats = state.stats
    if tree_record(variables) == tree_record(stats):
        stats = variables
    params, reparam, stats = jax.tree.map(
        laid_out, (stored, reparam, stats), (state.params, state.reparam, state.stats)
    )
    average = average_of(recipe, hyper_from(recipe)).init(params)
    return state.replace(params=params, reparam=reparam, stats=stats, average=average)


def laid_out(new: jax.Array, old: jax.Array) -> jax.Array:
    """`new`, which each process has whole, on the devices of `old`."""
    if old.is_fully_addressable:
        return jax.device_put(new, old.sharding)
    host = np.asarray(new)
    return jax.make_array_from_callback(host.shape, old.sharding, lambda index: host[index])


def stored_for(learner: Learner, source: Checkpoint, used: Any) -> tuple[Any, Any]:
    """(stored, state) of the learner's reparametrisation for the weights that a source used.

    Raises ValueError where it cannot hold them, as one that fixes lengths cannot.
    """
    reparam, there = learner.described.reparam, source.weights
    stored, state = there.params, there.reparam
    if not same_reparam(learner, source):
        stored, state = reparam.init(used)
    found, _ = reparam.apply(stored, state, False)
    errors = {
        path: float(jnp.max(jnp.abs(now - before)) / jnp.max(jnp.abs(before)))
        for (path, now), before in zip(
            named_leaves(found).items(), jax.tree.leaves(used), strict=True
        )
        if not np.array_equal(now, before)
    }
    worst = max(errors, key=errors.get, default=None)
    if worst is not None and not errors[worst] <= HELD:
        names, options = reparam_of(learner.recipe)
        given = ''.join(f', reparam.{name}={value}' for name, value in options.items())
        raise ValueError(
            f'model.reparam={names}{given} cannot hold the weights of train.init_from='
            f'{source.path}, whose model.reparam is {source.recipe.model.reparam}: {worst} would '
            f'differ by {errors[worst]:.1e} of its largest element. Take the reparametrisation and '
            'its options from there, or one that any weights can be stored with: none, '
            'weight_norm, sigma with reparam.gamma_start=sigma.'
        )
    return stored, state


def same_reparam(learner: Learner, source: Checkpoint) -> bool:
    """Whether what is stored and carried there is the same here, and means the same."""
    here, there = learner.recipe, source.recipe
    shapes = jax.eval_shape(learner.described.reparam.init, learner.described.used_shapes)
    weights = source.weights.params, source.weights.reparam
    return (
        reparam_of(here) == reparam_of(there)
        and forward_of(here) == forward_of(there)
        and tree_record(shapes) == tree_record(weights)
    )


def forward_of(recipe: Recipe) -> tuple[Any, ...]:
    """What the factors of the forward pass follow from."""
    scaling = recipe.config.scaling
    return (
        *(part.row.family for part in recipe.optimizers.values()),
        *(scaling.name, scaling.base_width, scaling.base_depth, scaling.depth_alpha),
    )


def reparam_of(recipe: Recipe) -> tuple[str, dict[str, Any]]:
    """What is chosen of the reparametrisation: model.reparam, and its options."""
    options = {
        name: value for name, value in vars(recipe.config.reparam).items() if value is not None
    }
    return recipe.model.reparam, options


def fitting_source(recipe: Recipe, experiment: Experiment) -> Checkpoint:
    """The checkpoint of train.init_from; ValueError where its weights or tokenizer are others."""
    # Of process 0, as the run that it is from may be training still, and saving.
    source = load(recipe.train.init_from) if is_first() else None
    path = from_first(pinned(recipe.train.init_from, source) if source else None)
    source = source or load(path)
    if saved_files(source.tokenizer) != saved_files(experiment.dataset.tokenizer):
        raise ValueError(
            f'train.init_from={recipe.train.init_from} was trained with another tokenizer: '
            f'{source.recipe.data.tokenizer} of {source_of(source.recipe.data)}, where this run '
            f'has {recipe.data.tokenizer} of {source_of(recipe.data)}. A bpe is that of its '
            'corpus; byte, and an hf:PATH, are the same with any text.'
        )
    wanted = used_record(experiment.learner, experiment.state_shapes)
    try:
        check_tree(used_record(source.learner, source.weights), wanted, source.path)
    except TreeMismatch as error:
        raise TreeMismatch(fields_that_differ(source.recipe, recipe) + str(error)) from error
    return source


def pinned(path: str, source: Checkpoint) -> str:
    """The very checkpoint that was found at `path`, for another host to read."""
    if is_url(path):
        return below(of_workdir(path)[0], FOLDER, source.step)
    return str(source.path)


def used_record(learner: Learner, state: State | Weights) -> dict[str, str]:
    """Of the weights that a model uses."""
    reparam = learner.described.reparam

    def use(params, carried):
        return reparam.apply(params, carried, False)[0]

    return tree_record(jax.eval_shape(use, state.params, state.reparam))


def saved_files(tokenizer: Tokenizer) -> dict[str, bytes]:
    """What it writes: equal where two give the same ids to every text, BOS and EOS too."""
    with tempfile.TemporaryDirectory() as folder:
        tokenizer.save(folder)
        return {path.name: path.read_bytes() for path in Path(folder).iterdir()}
