"""What conversions have in common: comparing two models, and writing a workdir."""

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from lm.config import Config, KernelsConfig, to_dict
from lm.data.tokenizers import Tokenizer
from lm.model import build_model
from lm.record.host import versions
from lm.record.series import Checkpoints
from lm.record.workdir import write_config
from lm.state import Learner, State, Weights, build_learner, hyper_from, optimizer

ROWS = 2  # sequences of random tokens that logits are compared on


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


def logits_of(config: Config, vocab: int, variables: Any, dtype: str) -> np.ndarray:
    """Of random tokens, always the same; all in `dtype`, whatever model.dtype is, by the reference
    kernels.
    """
    shape = (ROWS, config.data.seq_len)
    tokens_BT = np.random.default_rng(0).integers(0, vocab, shape, dtype=np.int32)
    model = dataclasses.replace(config.model, dtype=dtype)
    config = by_reference(dataclasses.replace(config, model=model))
    transformer = build_model(config, vocab, 'cpu')
    return on_cpu(dtype, lambda: jax.jit(transformer.apply)(cast(variables, dtype), tokens_BT))


def by_reference(config: Config) -> Config:
    """`config` with the reference kernels, which run anywhere: its own may not run on a CPU."""
    return dataclasses.replace(config, kernels=KernelsConfig(implementation='reference'))


def learner_on_cpu(config: Config, vocab: int) -> Learner:
    """To describe parameters or to make them: it is never trained."""
    return build_learner(by_reference(config), vocab, 0, 'cpu')


def difference(found: np.ndarray, wanted: np.ndarray) -> float:
    """max |found - wanted| / max |wanted|."""
    return float(np.max(np.abs(found - wanted)) / np.max(np.abs(wanted)))


def write(
    out: Path, config: Config, weights: Weights, tokenizer: Tokenizer, step: int, meta: dict
) -> None:
    """A workdir with one checkpoint, whose optimizer is new. `meta` is that of another checkpoint,
    or its like (`lm.run.journal`).

    ValueError where `out` holds something.
    """
    if out.exists() and any(out.iterdir()):
        raise ValueError(f'--out={out} is not empty; give a new folder')
    weights = jax.tree.map(jnp.asarray, weights)
    described = learner_on_cpu(config, meta['vocab_size']).described
    moments = optimizer(config, described, hyper_from(config)).init(weights.params)
    state = State(jnp.int32(step), weights.params, weights.reparam, weights.stats, moments)
    tokenizer.save(out / 'tokenizer')
    write_config(out, config)
    checkpoints = Checkpoints(out, keep_last=1, keep_best=0)
    checkpoints.save(state, meta | {'config': to_dict(config), 'versions': versions()}, None)
    checkpoints.wait()
    checkpoints.close()
