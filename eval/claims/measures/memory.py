"""Memory of optimizers, counted from the shapes of their states: nothing is computed."""

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
    """A model whose weights are counted."""

    config: str
    changes: Mapping[str, Any]
    vocab_size: int


def _paper_size(width: int, layers: int, heads: int, hidden: int) -> Size:
    """A model of arXiv:2506.16659 and its predecessors: as many key heads as heads."""
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
    """Bytes: of the weights, of an optimizer's state, and of that of hidden matrices."""

    weights: int
    state: int
    hidden_state: int


def count_memory(recipe: Recipe, vocab_size: int) -> Memory:
    """Counts weights and optimizer state of a recipe, in the types in which they are stored."""
    learner = build_learner(recipe, vocab_size, 0, 'cpu')
    described = learner.description
    transform = build_optimizer(recipe, described, make_hyper(recipe))
    boxed = jax.eval_shape(transform.init, described.shapes)
    state = named_leaves(unbox_state(boxed))
    roles = {
        path: spec.role
        for path, spec in named_leaves(
            state_specs(boxed, described.shapes, described.specs)
        ).items()
    }
    hidden = {path: leaf for path, leaf in state.items() if roles[path] == 'hidden'}
    return Memory(
        *(_count_bytes(leaves) for leaves in (named_leaves(described.shapes), state, hidden))
    )


def _count_bytes(leaves: Mapping[str, Any]) -> int:
    return sum(math.prod(leaf.shape) * leaf.dtype.itemsize for leaf in leaves.values())


def optimizer_memory(size: Size, optimizers: Mapping[str, str]) -> Memory:
    """Returns the memory of a model of a size with other optimizers."""
    return count_memory(lab.read_recipe(size.changes | optimizers, size.config), size.vocab_size)


@measure(
    *(f'weights_and_state_with_scale_over_adamw_of_{size}' for size in OURS | PAPERS),
    *(f'state_of_lion_over_adamw_of_{size}' for size in OURS),
    *(f'state_of_muon_over_adamw_of_matrices_of_{size}' for size in OURS),
    trains=False,
)
def memory_of_optimizers() -> Iterator[float]:
    """Returns the memory of optimizers over that of AdamW.

    With SCALE: weights and state together, as arXiv:2506.16659 counts them, of its four models and
    of ours. With Lion (arXiv:2302.06675): the state. With Muon (arXiv:2502.16982): the state of
    hidden matrices, as AdamW has the others.
    """
    adam = {name: optimizer_memory(size, ADAM) for name, size in (OURS | PAPERS).items()}
    for name, size in (OURS | PAPERS).items():
        scale = optimizer_memory(size, SCALE)
        yield (scale.weights + scale.state) / (adam[name].weights + adam[name].state)
    yield from (optimizer_memory(OURS[name], LION).state / adam[name].state for name in OURS)
    for name in OURS:
        yield optimizer_memory(OURS[name], MUON).hidden_state / adam[name].hidden_state
