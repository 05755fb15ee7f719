"""Loads a checkpoint as a model that is ready to run. A path is enough."""

import dataclasses
import functools
import math
import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from lm import data
from lm.config.fields import MeshConfig
from lm.config.recipe import Recipe
from lm.config.resolve import AUTO, drop_unread_options, update_recipe
from lm.data.progress import report_periodically
from lm.devices.mesh import make_mesh
from lm.devices.shardings import abstract_weights
from lm.inference.decoding import Cache, extend, init_cache
from lm.inference.interventions import Intervention, build_collections
from lm.inference.probes import (
    Activations,
    forward_diagnostics,
    gradients,
    logit_lens,
    next_token_loss,
    observe,
)
from lm.inference.slots import Programs
from lm.model.kernels import select_kernels
from lm.model.transformer import Transformer
from lm.record.checkpoint import FOLDER, list_steps, name_checkpoint, read_meta, read_weights
from lm.record.digests import DamagedCheckpoint
from lm.record.foreign_weights import explain_foreign_weights
from lm.record.machine import device_memory_bytes
from lm.record.remote.local_copy import fetch_checkpoints, fetch_records, split_checkpoint_url
from lm.record.upgrade import resolve_stored
from lm.record.workdir import SWEEP
from lm.storage.buckets import is_url
from lm.storage.files import expand_home
from lm.storage.filling import check_complete
from lm.training.state import Hyper, Learner, Weights, build_learner, make_hyper
from modules.kernels import PLATFORM_BOUND

MAX_PROGRAMS = 32  # of functions and learners
MEMORY_SHARE = 0.25  # the rest is for activations, and for weights cast to another type
to_stderr = functools.partial(print, file=sys.stderr)


@dataclasses.dataclass(frozen=True)
class Checkpoint:
    """A model with the weights of a checkpoint.

    Methods compute as in evaluation and read each row of tokens [B, T] as one document, in a
    program that is compiled once for each shape.
    """

    path: Path  #: WORKDIR/checkpoints/STEP
    recipe: Recipe  #: the resolved config
    step: int  #: number of updates done
    meta: dict[str, Any]  #: metadata stored beside the weights
    learner: Learner  #: the functions of training and evaluation
    mesh: Mesh  #: the devices that hold the weights
    hyper: Hyper  #: numbers that may differ between the runs of a program
    #: The stored weights, or their average if the run has one (optim.average), as in validation.
    weights: Weights
    tokenizer: data.tokenizers.Tokenizer  #: the tokenizer of the run
    dataset: data.Dataset | None = None  #: its text, if it is open, as during training

    @functools.cached_property
    def variables(self) -> dict[str, Any]:
        """Returns the variables that `model.apply` takes, computed from the weights."""
        return self.learner.variables(self.weights)

    @property
    def model(self) -> Transformer:
        """Returns the Linen module, with the kernels selected for this machine."""
        return self.learner.model

    def encode(self, text: str) -> jax.Array:
        """Returns [1, T] int32: the token that begins a document, then the tokens of a text.

        Args:
          text: any string.
        """
        return jnp.array([[self.tokenizer.bos_id, *self.tokenizer.encode(text)]], jnp.int32)

    def decode(self, tokens: Iterable[int]) -> str:
        """Returns the text of token ids; the token that begins a document has none.

        Args:
          tokens: ids of one row, without batch dimension.
        """
        return self.tokenizer.decode([int(token) for token in tokens])

    def logits(self, tokens_BT: jax.Array, interventions: Sequence[Intervention] = ()) -> jax.Array:
        """Returns the logits of the token after each, [B, T, V] float32.

        Args:
          tokens_BT: token ids, each row one document.
          interventions: changes of activations on the way.
        """
        return self._observe(tokens_BT, interventions)[0]

    def activations(
        self,
        tokens_BT: jax.Array,
        interventions: Sequence[Intervention] = (),
        within: bool = False,
    ) -> Activations:
        """Returns the residual stream by name.

        `embedding` and `final` are [B, T, D]; `after_attention` and `after_mlp` of every block are
        [L, B, T, D].

        Args:
          tokens_BT: token ids, each row one document.
          interventions: changes of activations, which the returned ones have.
          within: whether to return `heads` [L, B, T, N, H], the outputs of attention heads, and
            `hidden` [L, B, T, F], the hidden units of MLPs, too.
        """
        return self._observe(tokens_BT, interventions, within)[1]

    def loss(self, tokens_BT: jax.Array, interventions: Sequence[Intervention] = ()) -> jax.Array:
        """Returns the mean loss of the next token, in nats per token: a scalar.

        Args:
          tokens_BT: token ids, each row one document; all but the first are predicted.
          interventions: changes of activations on the way.
        """
        return next_token_loss(self.logits(tokens_BT, interventions), tokens_BT)

    def _observe(
        self, tokens_BT: jax.Array, interventions: Sequence[Intervention], within: bool = False
    ) -> tuple[jax.Array, Activations]:
        """Returns (logits, activations) with interventions."""
        if not interventions and not within:
            return self.observe(self.weights, tokens_BT)
        shape = tokens_BT.shape[0], tokens_BT.shape[1]
        collections = build_collections(self.recipe, interventions, shape)
        function = jit_with_learner(observe_within if within else observe, self.learner)
        return function(self.weights, tokens_BT, collections=collections)

    def gradients(
        self,
        tokens_BT: jax.Array,
        scalar: Callable[[jax.Array, jax.Array], jax.Array] = next_token_loss,
    ) -> tuple[Any, Activations]:
        """Computes the gradients of a scalar of the logits, in the weights and in the activations.

        Args:
          tokens_BT: token ids, each row one document.
          scalar: maps (logits [B, T, V], tokens [B, T]) to a scalar; default the mean loss.

        Returns:
          (gradients with the structure of weights.params, gradients with the structure of
          `activations`).
        """
        return gradients(self.learner, self.weights, tokens_BT, scalar)

    def lens(self, tokens_BT: jax.Array) -> jax.Array:
        """Returns logits [L, B, T, V] from the residual stream after each block (the logit lens).

        The last norm and the readout map the stream to logits, float32; the last equal `logits`.

        Args:
          tokens_BT: token ids, each row one document.
        """
        return jit_with_learner(logit_lens, self.learner)(self.weights, tokens_BT)

    def measure(self, tokens_BT: jax.Array) -> dict[str, jax.Array]:
        """Returns the diagnostics of the forward pass that `train.diagnose_every` records, by name.

        Each is over layers [L] or layers and heads [L, N]: `attention_entropy` in nats,
        `residual_rms` (docs/guide/diagnostics.md).

        Args:
          tokens_BT: token ids, each row one document.
        """
        return jit_with_learner(forward_diagnostics, self.learner)(self.weights, tokens_BT)

    def intervened_variables(self, interventions: Sequence[Intervention]) -> dict[str, Any]:
        """Returns `variables` with interventions that hold for every row and position.

        Args:
          interventions: changes of activations, which select neither rows nor positions.
        """
        return self.variables | build_collections(self.recipe, interventions, None)

    def init_cache(self, batch: int, capacity: int) -> Cache:
        """Returns an empty cache, with which `extend` reads rows in parts.

        Args:
          batch: the number of rows.
          capacity: the most tokens that a row may have.

        Raises:
          ValueError: if the model has fewer positions than `capacity`.
        """
        return init_cache(self.learner, self.variables, batch, capacity)

    def extend(
        self,
        cache: Cache,
        tokens_BT: jax.Array,
        counts_B: jax.Array | None = None,
        interventions: Sequence[Intervention] = (),
    ) -> tuple[jax.Array, Cache]:
        """Reads further tokens of each row, each token once (`lm.inference.decoding.extend`).

        Args:
          cache: of the tokens read so far, from `init_cache` or the previous call.
          tokens_BT: the token ids that follow.
          counts_B: how many of the T columns are read, the others are padding; None: all.
          interventions: changes of activations, which select neither rows nor positions.

        Returns:
          (logits [B, T, V] of the token after each, the cache with these tokens).
        """
        variables = self.intervened_variables(interventions)
        return jit_with_learner(extend, self.learner)(variables, cache, tokens_BT, counts_B)

    @functools.cached_property
    def end_ids(self) -> tuple[int, ...]:
        """Returns the tokens that end a text: EOS, and those listed in generation_config.json."""
        folder, size = self.path.parent.parent / 'tokenizer', self.model.vocab_size
        listed = {i for i in data.tokenizers.read_end_tokens(folder) if i < size}
        return tuple(sorted(listed | {self.tokenizer.eos_id}))

    @functools.cached_property
    def programs(self) -> Programs:
        """Returns the functions that all engines of this checkpoint run, compiled once."""
        return Programs(self.learner)

    @property
    def observe(self) -> Callable[..., tuple[jax.Array, Activations]]:
        """Returns observe(weights, tokens [B, T], shifts=None) -> (logits, activations).

        The function is pure, and differentiable in the weights and in the shifts
        (`lm.inference.probes.observe`).
        """
        return jit_with_learner(observe, self.learner)


def observe_within(
    learner: Learner, weights: Weights, tokens_BT: jax.Array, collections: Any
) -> tuple[jax.Array, Activations]:
    """Returns `observe` with the activations within sublayers.

    Args:
      learner: the learner.
      weights: the weights.
      tokens_BT: token ids.
      collections: interventions.
    """
    return observe(learner, weights, tokens_BT, collections=collections, within=True)


@functools.lru_cache(MAX_PROGRAMS)
def jit_with_learner(function: Callable[..., Any], learner: Learner) -> Callable[..., Any]:
    """Returns the jitted function(learner, ...) with its first argument bound.

    Checkpoints that share a learner (`load_step`) share its programs.
    """
    return jax.jit(functools.partial(function, learner))


def find_checkpoint(path: str | Path) -> tuple[Path, int]:
    """Finds the checkpoint of a path; a checkpoint at a URL is fetched to a local folder.

    Args:
      path: a workdir, for its newest step; WORKDIR@STEP or WORKDIR/checkpoints/STEP; or a URL.

    Returns:
      (the folder of checkpoints, the step).

    Raises:
      ValueError: if there is no checkpoint, if the path is a sweep's, or if writing the workdir was
        interrupted.
    """
    path = name_checkpoint(path)
    if is_url(path):
        return _find_in_bucket(path)
    path = Path(expand_home(path))
    if path.parent.name == FOLDER and path.name.isdigit() and path.is_dir():
        check_complete(path.parent.parent)
        return path.parent, int(path.name)
    if path.parent.name == FOLDER and path.name.isdigit() and (steps := list_steps(path.parent)):
        raise ValueError(
            f'{path.parent.parent} has no checkpoint of step {path.name}; its steps are '
            f'{", ".join(map(str, steps))}.'
        )
    check_complete(path)
    folder = path / FOLDER
    steps = list_steps(folder)
    cells = sorted(str(place.parent) for place in path.glob(f'*/{FOLDER}') if list_steps(place))
    if cells and not steps and (path / SWEEP).exists():
        raise ValueError(
            f'{path} is a sweep. Give the workdir of one of its {len(cells)} cells with a '
            f'checkpoint, such as {", ".join(cells[:3])}. "python -m eval.runs --workdir={path}" '
            'lists the cells and how they ended.'
        )
    if not steps:
        raise ValueError(missing_checkpoint_message(path))
    return folder, steps[-1]


def _find_in_bucket(url: str) -> tuple[Path, int]:
    checkpoint = next(fetch_checkpoints(url), None)
    if checkpoint is not None:
        return checkpoint
    if (fetch_records(split_checkpoint_url(url)[0]) / SWEEP).exists():
        raise ValueError(
            f'{url} is a sweep. Give the workdir of one of its cells, {url}/CELL. "python -m '
            f'eval.runs --workdir={url}" lists the cells and how they ended.'
        )
    raise ValueError(missing_checkpoint_message(url))


def missing_checkpoint_message(path: str | Path) -> str:
    """Returns the error text for a path without a checkpoint."""
    if not is_url(path) and (explanation := explain_foreign_weights(path)):
        return f'{path} has no checkpoint of this project: {explanation}.'
    return (
        f'{path} has no checkpoint. Give the workdir of a run that has saved one, or '
        f'WORKDIR/{FOLDER}/STEP.'
    )


def load(
    path: str | Path, say: Callable[[str], None] = to_stderr, mesh: Mesh | None = None
) -> Checkpoint:
    """Loads weights, config and tokenizer, on any number of devices.

    Args:
      path: a workdir, whose newest readable checkpoint is loaded; or WORKDIR@STEP or
        WORKDIR/checkpoints/STEP; as a path or a URL (`lm.storage.buckets`).
      say: receives messages on unreadable checkpoints, and on kernels that are replaced because
        they do not run here.
      mesh: the devices; default one, or all of this machine if the weights are too large for one.

    Returns:
      The `Checkpoint`, its weights on the devices of the mesh.

    Raises:
      ValueError: if there is no checkpoint, or its weights do not fit its config.
    """
    path = name_checkpoint(path)
    path = path if is_url(path) else expand_home(path)
    folder, newest = find_checkpoint(path)
    # A path that names a step is loaded or fails; a workdir falls back to earlier steps.
    if (
        (split_checkpoint_url(str(path))[1] is not None)
        if is_url(path)
        else (folder == Path(path).parent)
    ):
        return _load_step(folder, newest, say, mesh)
    tried = []
    local_checkpoints = ((folder, step) for step in reversed(list_steps(folder)))
    for step_folder, step in fetch_checkpoints(str(path)) if is_url(path) else local_checkpoints:
        tried.append(step)
        try:
            return _load_step(step_folder, step, say, mesh)
        except DamagedCheckpoint as error:
            say(f'{error}; trying the previous checkpoint')
    raise ValueError(f'none of the checkpoints {sorted(tried)} in {folder} can be read')


def load_step(checkpoint: Checkpoint, step: int) -> Checkpoint:
    """Loads another checkpoint of a run, and reuses the functions that are compiled for this one.

    The config may differ between steps, for example by --continue_changed; the checkpoint is then
    loaded anew.

    Args:
      checkpoint: a checkpoint of the same run.
      step: a step with a checkpoint in the same folder.

    Returns:
      The `Checkpoint` of that step.

    Raises:
      ValueError: if it cannot be read, or its weights do not fit its config.
    """
    folder = checkpoint.path.parent
    meta = read_meta(folder, step)
    if any(meta[name] != checkpoint.meta[name] for name in ('config', 'vocab_size')):
        return _load_step(folder, step, to_stderr, checkpoint.mesh)
    path, weights = folder / str(step), load_weights(checkpoint, step)
    return dataclasses.replace(checkpoint, path=path, step=step, meta=meta, weights=weights)


def _load_step(
    folder: Path, step: int, say: Callable[[str], None], mesh: Mesh | None
) -> Checkpoint:
    meta = read_meta(folder, step)
    platform = jax.devices()[0].platform
    recipe = replace_kernels(platform, resolve_stored(meta['config']), say)
    tokenizer = data.tokenizers.load(folder.parent / 'tokenizer')
    learner = build_learner(recipe, meta['vocab_size'], tokenizer.bos_id, platform)
    mesh = mesh or make_default_mesh(learner)
    hyper, path = make_hyper(recipe), folder / str(step)
    with report_periodically(lambda: f'loading the weights of {path}'):
        stored, average = read_weights(folder, step, abstract_weights(learner, mesh))
    weights = learner.select_eval_weights(stored, average, hyper)
    return Checkpoint(path, recipe, step, meta, learner, mesh, hyper, weights, tokenizer)


def load_weights(checkpoint: Checkpoint, step: int) -> Weights:
    """Returns the weights of another step of a run, sharded and averaged as the checkpoint's own.

    Raises DamagedCheckpoint if they cannot be read.
    """
    shapes = abstract_weights(checkpoint.learner, checkpoint.mesh)
    stored, average = read_weights(checkpoint.path.parent, step, shapes)
    return checkpoint.learner.select_eval_weights(stored, average, checkpoint.hyper)


def make_default_mesh(learner: Learner) -> Mesh:
    """Returns a mesh of one device, or of several if the weights need more than MEMORY_SHARE of
    one.

    Several devices shard by `fsdp`, over as many as divide model.d_model.
    """
    weight_bytes = sum(
        math.prod(leaf.shape) * leaf.dtype.itemsize
        for leaf in jax.tree.leaves(learner.description.shapes)
    )
    devices = jax.local_devices()
    n_devices = 1 if weight_bytes <= MEMORY_SHARE * device_memory_bytes() else len(devices)
    fsdp = math.gcd(n_devices, learner.recipe.model.d_model)
    return make_mesh(MeshConfig(data=1, fsdp=fsdp), devices[:fsdp])


def replace_kernels(platform: str, recipe: Recipe, say: Callable[[str], None]) -> Recipe:
    """Replaces the kernels of a recipe if they do not run on a platform.

    Args:
      platform: 'cpu', 'gpu' or 'tpu'.
      recipe: the recipe.
      say: receives a message if kernels are replaced.

    Returns:
      The recipe, with automatic kernels if they are replaced.
    """
    try:
        select_kernels(recipe, platform)
    except ValueError as error:
        reason = str(error).removesuffix('.')
        say(f'{reason}. This program uses kernels.implementation=auto instead.')
        fields = ('implementation', *PLATFORM_BOUND)
        return drop_unread_options(
            update_recipe(recipe, {f'kernels.{name}': AUTO for name in fields})
        )
    return recipe
