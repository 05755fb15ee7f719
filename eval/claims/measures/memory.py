"""Memory of optimizers, counted from the shapes of their states without computing anything."""

import math
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import jax
import optax

from eval.claims import lab
from eval.claims.lab import measure
from lm.config.recipe import Recipe
from lm.training.state import build_learner, make_hyper
from lm.training.update import build_optimizer
from modules.optim import state_specs, unbox_state
from modules.params import named_leaves

BASE = 'configs/llama_124m.py'
ADAM, SCALE, LION, ADEMAMIX, STATELESS = (
    {'optim.name': name, 'optim.others': name}
    for name in ('adamw', 'scale', 'lion', 'ademamix', 'normalized_gd')
)
MUON, HIDDEN_LION, HIDDEN_SCALE = (
    {'optim.name': name, 'optim.others': 'adamw'} for name in ('muon', 'lion', 'scale')
)


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


def count_memory(recipe: Recipe, vocab_size: int, momentum_role: str = '') -> Memory:
    """Counts the bytes of weights and optimizer state of a recipe, in their stored dtypes.

    Args:
      recipe: the recipe.
      vocab_size: size of the vocabulary.
      momentum_role: the role of parameters with a momentum before the optimizer, beside its state.
    """
    learner = build_learner(recipe, vocab_size, 0, 'cpu')
    description = learner.description
    has_momentum = jax.tree.map(lambda spec: spec.role == momentum_role, description.specs)
    transform = optax.chain(
        optax.masked(optax.trace(0.9), has_momentum),
        build_optimizer(recipe, description, make_hyper(recipe)),
    )
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


def optimizer_memory(size: Size, optimizers: dict[str, str], momentum_role: str = '') -> Memory:
    """Returns the memory of a model size with other optimizers.

    Args:
      size: the model size.
      optimizers: changes of the config.
      momentum_role: as in `count_memory`.
    """
    recipe = lab.read_recipe(size.changes | optimizers, size.config)
    return count_memory(recipe, size.vocab_size, momentum_role)


@measure(
    *(f'weights_and_state_with_scale_over_adamw_of_{size}' for size in OURS | PAPERS),
    *(f'state_of_lion_over_adamw_of_{size}' for size in OURS),
    *(f'state_of_muon_over_adamw_of_matrices_of_{size}' for size in OURS),
    'weights_and_state_without_momentum_over_adamw_of_1b',
    'weights_and_state_with_hidden_scale_over_adamw_of_60m',
    'weights_and_state_with_scale_and_momentum_of_embeddings_over_adamw_of_60m',
    'weights_and_state_with_scale_and_momentum_of_embeddings_over_adamw_of_1b',
    'state_of_ademamix_over_adamw_of_llama_124m',
    'state_of_ademamix_over_adamw_of_matrices_of_llama_124m',
    *(f'state_of_hidden_lion_over_adamw_of_{size}' for size in OURS),
    'state_of_muon_with_another_momentum_over_adamw_of_matrices_of_llama_124m',
    trains=False,
)
def memory_of_optimizers() -> Iterator[float]:
    """Yields the memory of optimizers over the memory of AdamW.

    SCALE: weights and state together, as arXiv:2506.16659 counts them, for its four models and for
    ours. Lion (arXiv:2302.06675): the state. Muon (arXiv:2502.16982): the state of hidden matrices,
    as AdamW updates the others.

    Controls and optimizers that keep too much. For SCALE: an optimizer without state at 1,300
    million parameters; SCALE for hidden matrices only, beside AdamW; SCALE with momentum of
    embeddings too, at 60 and 1,300 million parameters. For Lion and Muon: AdEMAMix, which has three
    moments; then Lion for hidden matrices only, beside AdamW; Muon behind another momentum.
    """
    adam = {name: optimizer_memory(size, ADAM) for name, size in (OURS | PAPERS).items()}

    def total_ratio(name, optimizers, momentum_role=''):
        counted = optimizer_memory((OURS | PAPERS)[name], optimizers, momentum_role)
        return (counted.weights + counted.state) / (adam[name].weights + adam[name].state)

    yield from (total_ratio(name, SCALE) for name in OURS | PAPERS)
    yield from (optimizer_memory(OURS[name], LION).state / adam[name].state for name in OURS)
    for name in OURS:
        yield optimizer_memory(OURS[name], MUON).hidden_state / adam[name].hidden_state
    yield total_ratio('1b', STATELESS)
    yield total_ratio('60m', HIDDEN_SCALE)
    yield from (total_ratio(name, SCALE, 'embedding') for name in ('60m', '1b'))
    name = 'llama_124m'
    ademamix = optimizer_memory(OURS[name], ADEMAMIX)
    yield from (ademamix.state / adam[name].state, ademamix.hidden_state / adam[name].hidden_state)
    yield from (optimizer_memory(OURS[n], HIDDEN_LION).state / adam[n].state for n in OURS)
    muon = optimizer_memory(OURS[name], MUON, 'hidden')
    yield muon.hidden_state / adam[name].hidden_state
