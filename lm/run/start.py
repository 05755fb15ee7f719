"""The state a run starts from: random weights, or those of a checkpoint (train.init_from)."""

import tempfile
from pathlib import Path

import jax

from lm import data
from lm.check import check
from lm.config import Config
from lm.data.tokenizers import Tokenizer
from lm.record.checkpoint import TreeMismatch, check_tree, fields_that_differ, tree_record
from lm.record.load import Checkpoint, find, load
from lm.run.experiment import Experiment
from lm.state import Learner, State, Weights, hyper_from


def check_run(config: Config) -> None:
    """`lm.check.check`, and the same of what a run reads from disk: its text and its start."""
    check(config)
    data.check(config.data)
    check_init_from(config)


def check_init_from(config: Config) -> None:
    """ValueError where train.init_from names no checkpoint, with what a run does that has begun."""
    if not config.train.init_from:
        return
    try:
        find(Path(config.train.init_from))
    except ValueError as error:
        raise ValueError(
            f'train.init_from: {error} A run that has begun goes on without it: '
            '--config.train.init_from= --continue_changed'
        ) from error


def initial_state(config: Config, experiment: Experiment) -> State:
    """Step 0, laid out on the mesh.

    With train.init_from, the weights the model uses are those that the checkpoint's model used,
    stored as the present model.reparam has them; what layers carry is taken over where all of it
    fits and fresh otherwise; the optimizer starts anew. Raises ValueError where there is no
    checkpoint, a parameter has no counterpart of its shape, or the tokenizers differ.
    """
    source = fitting_source(config, experiment) if config.train.init_from else None
    state = experiment.init(jax.random.key(config.train.seed), hyper_from(config))
    if source is None:
        return state
    variables = source.variables
    used = variables.pop('params')
    stored, reparam = experiment.learner.described.reparam.init(used)
    stats = state.stats
    if tree_record(variables) == tree_record(stats):
        stats = variables
    params, reparam, stats = jax.tree.map(
        lambda new, old: jax.device_put(new, old.sharding),
        (stored, reparam, stats),
        (state.params, state.reparam, state.stats),
    )
    return state.replace(params=params, reparam=reparam, stats=stats)


def fitting_source(config: Config, experiment: Experiment) -> Checkpoint:
    """The checkpoint of train.init_from; ValueError where its weights or tokenizer are others."""
    source = load(config.train.init_from)
    if saved_files(source.tokenizer) != saved_files(experiment.dataset.tokenizer):
        raise ValueError(
            f'train.init_from={config.train.init_from} was trained with another tokenizer: '
            f'{source.config.data.tokenizer} of data.source={source.config.data.source}, where '
            f'this run has {config.data.tokenizer} of {config.data.source}. A bpe is that of its '
            'corpus; byte, and an hf:PATH, are the same with any text.'
        )
    wanted = used_record(experiment.learner, experiment.state_shapes)
    try:
        check_tree(used_record(source.learner, source.weights), wanted, source.path)
    except TreeMismatch as error:
        raise TreeMismatch(fields_that_differ(source.config, config) + str(error)) from error
    return source


def used_record(learner: Learner, state: State | Weights) -> dict[str, str]:
    """Of the weights that a model uses."""
    reparam = learner.described.reparam

    def use(params, carried):
        return reparam.apply(params, carried, False)[0]

    return tree_record(jax.eval_shape(use, state.params, state.reparam))


def saved_files(tokenizer: Tokenizer) -> dict[str, bytes]:
    """What it writes: equal where two give the same ids to every text, BOS and EOS too."""
    with tempfile.TemporaryDirectory() as folder:
        tokenizer.save(folder)
        return {path.name: path.read_bytes() for path in Path(folder).iterdir()}
