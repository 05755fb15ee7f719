"""Checkpoints that were never on a disk, for suites."""

import functools
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax

from lm.config.fields import MeshConfig
from lm.config.recipe import Recipe
from lm.data.tokenizers import ByteTokenizer, Tokenizer
from lm.devices.mesh import make_mesh
from lm.inference.load import Checkpoint
from lm.training.state import Learner, Weights, build_learner, hyper_from, init_state
from tests.helpers import tiny_config


@functools.cache
def learner_of(config: Recipe, tokenizer: Tokenizer) -> Learner:
    return build_learner(config, tokenizer.vocab_size, tokenizer.bos_id, 'cpu')


def a_checkpoint(
    changes: Mapping[str, Any],
    tokenizer: Tokenizer | None = None,
    n_devices: int = 1,
    weights: Weights | None = None,
) -> Checkpoint:
    """The tiny config with changes; weights: initial ones unless given."""
    tokenizer = tokenizer or ByteTokenizer()
    config = tiny_config(changes)
    learner, hyper = learner_of(config, tokenizer), hyper_from(config)
    if weights is None:
        key = jax.random.key(0)
        made = jax.jit(lambda key, hyper: init_state(learner, hyper, key))(key, hyper)
        weights = jax.device_get(made).weights
    mesh = make_mesh(MeshConfig(data=n_devices), jax.devices()[:n_devices])
    return Checkpoint(Path('x'), config, 1, {}, learner, mesh, hyper, weights, tokenizer)
