"""What conversions have in common: the weights used, comparing two models, writing a workdir."""

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from eval.load import Checkpoint
from lm.config import replaced, to_dict
from lm.data.tokenizers import Tokenizer
from lm.model import build_model
from lm.recipe import Recipe
from lm.record.checkpoint import check_tree, state_record
from lm.record.host import versions
from lm.record.series import Checkpoints
from lm.record.workdir import write_config
from lm.sections import FIELDS, KernelsConfig
from lm.state import (
    Learner,
    State,
    Weights,
    average_of,
    build_learner,
    hyper_from,
    init_state,
    optimizer,
)

TOLERANCE = 1e-10  # of logits in float64, where the algebra itself costs about 1e-14
ROWS = 2  # sequences of random tokens that logits are compared on


@dataclasses.dataclass(frozen=True)
class Folded:
    """`differences`: {'float64': of any logit from the source's, over its largest logit, ...}.
    `kept`: why the norms are those of the source, where they are; '' where they are not.
    """

    recipe: Recipe
    weights: Weights
    differences: dict[str, float]
    kept: str = ''


def cast(tree: Any, dtype: Any) -> Any:
    """numpy arrays: floats in `dtype`, counters and keys as they are."""

    def one(leaf):
        leaf = np.asarray(leaf)
        return leaf.astype(dtype) if np.issubdtype(leaf.dtype, np.floating) else leaf

    return jax.tree.map(one, tree)


def on_cpu(dtype: str, function: Callable[[], Any]) -> Any:
    """function() on the CPU, where it can compute in `dtype`, as numpy arrays."""
    cpu = jax.local_devices(backend='cpu')[0]
    with jax.enable_x64(dtype == 'float64'), jax.default_device(cpu):
        return jax.device_get(function())


def logits_of(recipe: Recipe, vocab: int, variables: Any, dtype: str) -> np.ndarray:
    """Of random tokens, always the same; all in `dtype`, whatever model.dtype is, by the reference
    kernels.
    """
    shape = (ROWS, recipe.data.seq_len)
    tokens_BT = np.random.default_rng(0).integers(0, vocab, shape, dtype=np.int32)
    recipe = by_reference(replaced(recipe, {'model.dtype': dtype}))
    transformer = build_model(recipe, vocab, 'cpu')
    return on_cpu(dtype, lambda: jax.jit(transformer.apply)(cast(variables, dtype), tokens_BT))


def by_reference(recipe: Recipe) -> Recipe:
    """The recipe with the reference kernels, which run anywhere: its own may not run on a CPU. Its
    product does, and may carry something.
    """
    kernels = vars(KernelsConfig(implementation='reference', matmul=recipe.config.kernels.matmul))
    return replaced(recipe, {f'kernels.{name}': value for name, value in kernels.items()})


def learner_on_cpu(recipe: Recipe, vocab: int) -> Learner:
    """To describe parameters or to make them: it is never trained."""
    return build_learner(by_reference(recipe), vocab, 0, 'cpu')


def difference(found: np.ndarray, wanted: np.ndarray) -> float:
    """max |found - wanted| / max |wanted|."""
    return float(np.max(np.abs(found - wanted)) / np.max(np.abs(wanted)))


def used_in_float64(checkpoint: Checkpoint) -> dict[str, Any]:
    """The variables of its model, computed from the stored weights in float64."""
    exact = cast(jax.device_get(checkpoint.weights), np.float64)
    return on_cpu('float64', lambda: jax.jit(checkpoint.learner.variables)(exact))


def folded(checkpoint: Checkpoint, recipe: Recipe, before: Any, after: Any) -> Folded:
    """With the variables `after`, in float64, stored in float32; those of the source are `before`.

    ValueError where they are not those of the config, or compute something else.
    """
    stored = cast(after, np.float32)
    weights = Weights(stored.pop('params'), (), stored)
    fresh = jax.eval_shape(lambda: fresh_state(recipe, checkpoint.meta['vocab_size']))
    check_tree(state_record(weights), state_record(fresh.weights), checkpoint.path)
    return Folded(recipe, weights, compare(checkpoint, recipe, before, after))


def compare(checkpoint: Checkpoint, recipe: Recipe, before: Any, after: Any) -> dict[str, float]:
    """Folded.differences, of variables in float64 and of those in float32; ValueError where the
    former are more than TOLERANCE.
    """
    source, vocab = checkpoint.recipe, checkpoint.meta['vocab_size']
    differences = {}
    for dtype, wanted in (('float64', before), ('float32', checkpoint.variables)):
        wanted = logits_of(source, vocab, jax.device_get(wanted), dtype)
        found = logits_of(recipe, vocab, after, dtype)  # which rounds to float32 as storing does
        differences[dtype] = difference(found, wanted)
    if not differences['float64'] <= TOLERANCE:
        raise ValueError(
            f'the folded model is another one: in float64 its logits differ by up to '
            f'{differences["float64"]:.1e} of the largest, and rounding explains '
            f'{TOLERANCE:.0e} at most. Nothing was written: a part of this model does not compute '
            'in float64, or is unknown to eval.convert.fold.'
        )
    return differences


def without_reparam() -> dict[str, Any]:
    """The changes that leave a config without reparametrisation, and without its options."""
    options_of_it = [path for path in FIELDS if path.startswith('reparam.')]
    return {'model.reparam': 'none'} | dict.fromkeys(options_of_it)


def fresh_state(recipe: Recipe, vocab: int) -> State:
    learner = learner_on_cpu(recipe, vocab)
    return init_state(learner, hyper_from(recipe), jax.random.key(0))


def write(
    out: Path, recipe: Recipe, weights: Weights, tokenizer: Tokenizer, step: int, meta: dict
) -> None:
    """A workdir with one checkpoint, whose optimizer and average of the weights are new. `meta` is
    that of another checkpoint, or its like (`lm.run.journal`).

    ValueError where `out` holds something.
    """
    if out.exists() and any(out.iterdir()):
        raise ValueError(f'--out={out} is not empty; give a new folder')
    weights = jax.tree.map(jnp.asarray, weights)
    described, hyper = learner_on_cpu(recipe, meta['vocab_size']).described, hyper_from(recipe)
    moments = optimizer(recipe, described, hyper).init(weights.params)
    average = average_of(recipe, hyper).init(weights.params)
    state = State(jnp.int32(step), weights.params, weights.reparam, weights.stats, moments, average)
    tokenizer.save(out / 'tokenizer')
    write_config(out, recipe)
    checkpoints = Checkpoints(out, keep_last=1, keep_best=0)
    checkpoints.save(state, meta | {'config': to_dict(recipe), 'versions': versions()}, None)
    checkpoints.wait()
    checkpoints.close()
