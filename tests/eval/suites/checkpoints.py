"""Checkpoints in memory, for suites."""

import functools
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import jax

from lm.config.fields import MeshConfig
from lm.config.recipe import Recipe
from lm.data.tokenizers import ByteTokenizer, Tokenizer
from lm.devices.mesh import make_mesh
from lm.inference.load import Checkpoint
from lm.training.state import Learner, Weights, build_learner, init_state, make_hyper
from tests.helpers import tiny_config


@functools.cache
def make_learner(config: Recipe, tokenizer: Tokenizer) -> Learner:
    return build_learner(config, tokenizer.vocab_size, tokenizer.bos_id, 'cpu')


def make_checkpoint(
    changes: Mapping[str, Any],
    tokenizer: Tokenizer | None = None,
    n_devices: int = 1,
    weights: Weights | None = None,
) -> Checkpoint:
    """The tiny config with changes. weights: default: initial weights."""
    return checkpoint_from_recipe(
        tiny_config(changes), tokenizer or ByteTokenizer(), n_devices, weights
    )


def checkpoint_from_recipe(
    recipe: Recipe,
    tokenizer: Tokenizer,
    n_devices: int = 1,
    weights: Weights | None = None,
    meta: Mapping[str, Any] = MappingProxyType({}),
) -> Checkpoint:
    learner, hyper = make_learner(recipe, tokenizer), make_hyper(recipe)
    if weights is None:
        key = jax.random.key(0)
        state = jax.jit(lambda key, hyper: init_state(learner, hyper, key))(key, hyper)
        weights = jax.device_get(state).weights
    mesh = make_mesh(MeshConfig(data=n_devices), jax.devices()[:n_devices])
    return Checkpoint(Path('x/1'), recipe, 1, {**meta}, learner, mesh, hyper, weights, tokenizer)
