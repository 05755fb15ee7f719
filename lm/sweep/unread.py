"""Hyperparameters that a program never reads: sweeping one would measure nothing."""

import dataclasses

import jax
from jax.interpreters import partial_eval

from lm.config import Config
from lm.model import mlp_kind
from lm.shardings import batch_shapes
from lm.state import HYPER_PATHS, Hyper, build_learner, hyper_from, init_state
from lm.step import make_train_step
from lm.sweep.cells import Cell

VOCAB = 8  # which numbers are read does not depend on it


def read_fields(config: Config) -> set[str]:
    """The fields of Hyper that the initial parameters or a step depend on.

    Found by tracing both and leaving out what no result needs, so that no rule has to list them.
    """
    one_layer = dataclasses.replace(config.model, n_layers=1)
    config = dataclasses.replace(config, model=one_layer)
    learner = build_learner(config, VOCAB, -1, jax.default_backend())
    step = make_train_step(learner)

    def run(hyper: Hyper, batch):
        return step(init_state(learner, hyper, jax.random.key(0)), batch, hyper)

    hyper = jax.eval_shape(lambda: hyper_from(config))
    jaxpr = jax.make_jaxpr(run)(hyper, batch_shapes(config)).jaxpr
    _, used = partial_eval.dce_jaxpr(jaxpr, [True] * len(jaxpr.outvars))
    names = [field.name for field in dataclasses.fields(Hyper)]
    return {name for name, is_used in zip(names, used, strict=False) if is_used}


def refuse_unread(group: list[Cell]) -> None:
    """ValueError for a Hyper axis within a group that its program does not read.

    train.steps needs no reader: it also says how long a run is.
    """
    hypers = {name: path for name, path in HYPER_PATHS.items() if path != 'train.steps'}
    varied = {
        name for name, path in hypers.items() if len({cell.changes.get(path) for cell in group}) > 1
    }
    if not varied:
        return
    config = group[0].config
    for name in sorted(varied - read_fields(config)):
        raise ValueError(
            f'sweep axis {hypers[name]} would measure nothing: with optim.name='
            f'{config.optim.name}, optim.schedule={config.optim.schedule}, model.mlp='
            f'{mlp_kind(config.model)}, loss.name={config.loss.name} and scaling.name='
            f'{config.scaling.name} the program never reads it, and these {len(group)} runs would '
            'be equal. Leave the axis out, or give it in a '
            '`list` with the choices that read it.'
        )
