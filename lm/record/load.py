"""A checkpoint as a model ready to run: a path is enough."""

import dataclasses
from pathlib import Path
from typing import Any

import jax
from jax.sharding import Mesh

from lm import data
from lm.config import Config
from lm.mesh import make_mesh
from lm.model import Transformer
from lm.record.checkpoint import FOLDER, read_meta, read_weights, steps_in
from lm.record.upgrade import stored_config
from lm.shardings import abstract_state
from lm.state import Hyper, Learner, Weights, build_learner, hyper_from


@dataclasses.dataclass(frozen=True)
class Checkpoint:
    """`weights` as stored; `variables` as the model takes them."""

    path: Path
    config: Config
    step: int
    meta: dict[str, Any]
    learner: Learner
    mesh: Mesh
    hyper: Hyper
    weights: Weights
    tokenizer: data.tokenizers.Tokenizer

    @property
    def variables(self) -> dict[str, Any]:
        return self.learner.variables(self.weights)

    @property
    def model(self) -> Transformer:
        return self.learner.model


def find(path: Path) -> tuple[Path, int]:
    """(folder of checkpoints, step) for a workdir, whose newest is meant, or for one checkpoint in
    it.

    Raises ValueError where there is none.
    """
    if path.parent.name == FOLDER and path.name.isdigit() and path.is_dir():
        return path.parent, int(path.name)
    folder = path / FOLDER
    steps = steps_in(folder) if folder.is_dir() else []
    if not steps:
        raise ValueError(
            f'{path} holds no checkpoint. Give the workdir of a run that has saved one, or '
            f'WORKDIR/{FOLDER}/STEP.'
        )
    return folder, steps[-1]


def load(path: str | Path) -> Checkpoint:
    """Reads weights, config and tokenizer; on the devices at hand, however many trained it.

    Raises ValueError where there is no checkpoint, or its weights do not fit its config.
    """
    folder, step = find(Path(path))
    meta = read_meta(folder, step)
    config = stored_config(meta['config'])
    # Whatever mesh it was trained on, one device holds any model that this can evaluate yet.
    mesh = make_mesh(dataclasses.replace(config.mesh, data=1))
    tokenizer = data.tokenizers.load(folder.parent / 'tokenizer')
    platform = jax.devices()[0].platform
    learner = build_learner(config, meta['vocab_size'], tokenizer.bos_id, platform)
    weights = read_weights(folder, step, abstract_state(learner, mesh))
    path = folder / str(step)
    return Checkpoint(
        path, config, step, meta, learner, mesh, hyper_from(config), weights, tokenizer
    )
