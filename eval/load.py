"""Loads a checkpoint and the data that it was trained on, and defines the flag that names it."""

from lm.launch.before_jax import choose_platform

choose_platform()  # before a notebook's first device is looked for

from typing import Any

from absl import flags

from lm import data
from lm.config.mixture import source_flag
from lm.inference.interventions import Intervention
from lm.inference.load import Checkpoint, find_checkpoint, load, load_step, to_stderr
from lm.launch.path_flags import define_path

__all__ = [
    'Checkpoint',
    'Intervention',
    'define_checkpoint',
    'find_checkpoint',
    'load',
    'load_step',
    'open_data',
]

flags.disclaim_key_flags()  # those that are defined here are of the program that asks for them


def define_checkpoint() -> flags.FlagHolder[Any]:
    """Defines the flag --checkpoint of a program, which names a run.

    Returns:
      The flag's holder; its value is a path or a URL for `load`, or None.
    """
    text = 'Workdir, WORKDIR/checkpoints/STEP or URL of a run.'
    return define_path('checkpoint', None, text)


def open_data(checkpoint: Checkpoint) -> data.Dataset:
    """Opens the data that a checkpoint was trained on; for an import, the data of its config.

    Args:
      checkpoint: as `load` returns it.

    Returns:
      The dataset, with its training and validation rows.

    Raises:
      ValueError: if the data of the config has changed since training.
    """
    if checkpoint.dataset is not None:
        return checkpoint.dataset
    fields = checkpoint.recipe.data
    dataset = data.open_dataset(fields, say=to_stderr)
    trained_on = checkpoint.meta['data']  # None: nobody knows
    if trained_on is not None and dataset.digest != trained_on:
        has_file = fields.tokenizer.startswith('hf:')
        subject = source_flag(fields) + f' or data.tokenizer={fields.tokenizer}' * has_file
        raise ValueError(
            f'{subject} has changed since training: its digest was {trained_on} and is now '
            f'{dataset.digest}, so numbers would not be comparable. Restore the data that the run '
            'was trained on.'
        )
    return dataset
