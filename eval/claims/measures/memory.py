"""Memory of optimizers, counted from the shapes of their states without computing anything."""

import math
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import jax

from eval.claims import lab
from eval.claims.lab import measure
from lm.config.recipe import Recipe
from lm.training.state import build_learner, make_hyper
from lm.training.update import build_optimizer
from modules.optim import state_specs, unbox_state
from modules.params import named_leaves

BASE = 'configs/llama_124m.py'
ADAM, SCALE, LION = (
    {'optim.name': name, 'optim.others': name} for name in ('adamw', 'scale', 'lion')
)
MUON = {'optim.name': 'muon', 'optim.others': 'adamw'}


class Size(NamedTuple):
    """A model size: config, changes by path, and vocabulary."""

    config: str
    changes: dict[str, Any]
    vocab_size: int


def _paper_size(width: int, layers: int, heads: int, hidden: int) -> Size:
    """Returns a model size of arXiv:2506.16659 and its predecessors, without grouped queries."""
    changes = {
        'model.d_model': width,
        'model.n_layers': layers,
        'model.n_heads': heads,
        'model.n_kv_heads': heads,
        'model.d_ff': hidden,
    }
    return Size(BASE, changes, 32_000)


OURS = {'llama_124m': Size(BASE, {}, 32_768), 'llama_1b': Size('configs/llama_1b.py', {}, 32_768)}
PAPERS = {
    '60m': _paper_size(512, 8, 8, 1376),
    '130m': _paper_size(768, 12, 12, 2048),
    '350m': _paper_size(1024, 24, 16, 2736),
    '1b': _paper_size(2048, 24, 32, 5461),
}


class Memory(NamedTuple):
    """Bytes of the weights, of an optimizer's state, and of its state for hidden matrices."""

    weights: int
    state: int
    hidden_state: int


def count_memory(recipe: Recipe, vocab_size: int) -> Memory:
    """Counts the bytes of weights and optimizer state of a recipe, in their stored dtypes."""
    learner = build_learner(recipe, vocab_size, 0, 'cpu')
    description = learner.description
    transform = build_optimizer(recipe, description, make_hyper(recipe))
    boxed = jax.eval_shape(transform.init, description.shapes)
    state = named_leaves(unbox_state(boxed))
    roles = {
        path: spec.role
        for path, spec in named_leaves(
            state_specs(boxed, description.shapes, description.specs)
        ).items()
    }
    hidden = {path: leaf for path, leaf in state.items() if roles[path] == 'hidden'}
    return Memory(
        *(_count_bytes(leaves) for leaves in (named_leaves(description.shapes), state, hidden))
    )


def _count_bytes(leaves: Mapping[str, Any]) -> int:
    return sum(math.prod(leaf.shape) * leaf.dtype.itemsize for leaf in leaves.values())


def optimizer_memory(size: Size, optimizers: dict[str, str]) -> Memory:
    """Returns the memory of a model size with other optimizers, given as changes of the config."""
    return count_memory(lab.read_recipe(size.changes | optimizers, size.config), size.vocab_size)


@measure(
    *(f'weights_and_state_with_scale_over_adamw_of_{size}' for size in OURS | PAPERS),
    *(f'state_of_lion_over_adamw_of_{size}' for size in OURS),
    *(f'state_of_muon_over_adamw_of_matrices_of_{size}' for size in OURS),
    trains=False,
)
def memory_of_optimizers() -> Iterator[float]:
    """Yields the memory of optimizers over the memory of AdamW.

    SCALE: weights and state together, as arXiv:2506.16659 counts them, for its four models and for
    ours. Lion (arXiv:2302.06675): the state. Muon (arXiv:2502.16982): the state of hidden matrices,
    as AdamW updates the others.
    """
    adam = {name: optimizer_memory(size, ADAM) for name, size in (OURS | PAPERS).items()}
    for name, size in (OURS | PAPERS).items():
        scale = optimizer_memory(size, SCALE)
        yield (scale.weights + scale.state) / (adam[name].weights + adam[name].state)
    yield from (optimizer_memory(OURS[name], LION).state / adam[name].state for name in OURS)
    for name in OURS:
        yield optimizer_memory(OURS[name], MUON).hidden_state / adam[name].hidden_state
