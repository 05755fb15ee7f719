"""Loads a checkpoint and the data that it was trained on, and defines the flag that names it."""

from lm.launch.before_jax import choose_platform

choose_platform()  # before a notebook's first device is looked for

import dataclasses
from pathlib import Path
from typing import Any

from absl import flags

from lm import data
from lm.config.mixture import source_flag
from lm.data.tokenizer_files import list_files_beside
from lm.inference.load import Checkpoint, find_checkpoint, load, load_step, to_stderr
from lm.launch.path_flags import define_path
from lm.storage.files import expand_home

__all__ = [
    'Checkpoint',
    'define_checkpoint',
    'find_checkpoint',
    'load',
    'load_step',
    'open_data',
    'open_source',
]

flags.disclaim_key_flags()  # those that are defined here are of the program that asks for them


def define_checkpoint() -> flags.FlagHolder[Any]:
    """Defines the flag --checkpoint of a program, which names a run.

    Returns:
      The flag's holder; its value is a path or a URL for `load`, or None.
    """
    text = 'Workdir, or WORKDIR/checkpoints/STEP; or a URL.'
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
    fields = checkpoint.recipe.data
    dataset = data.open_dataset(fields, say=to_stderr)
    trained_on = checkpoint.meta['data']  # None: nobody knows
    if trained_on is not None and dataset.digest != trained_on:
        has_file = fields.tokenizer.startswith('hf:')
        subject = source_flag(fields) + f' or data.tokenizer={fields.tokenizer}' * has_file
        raise ValueError(
            f'{subject} has changed since training: the data were {trained_on} and are '
            f'{dataset.digest}. Numbers would not compare.'
        )
    return dataset


def open_source(checkpoint: Checkpoint, source: str) -> data.Dataset:
    """Opens other text than that of a run, with the run's tokenizer.

    Args:
      checkpoint: as `load` returns it.
      source: as data.source.

    Returns:
      The dataset.
    """
    fields = checkpoint.recipe.data
    kind, _, path = fields.tokenizer.partition(':')
    folder = checkpoint.path.parent.parent / 'tokenizer'
    # A bpe is trained anew for each text, and a file or its template may be gone or changed: the
    # run has its copy. Runs of earlier versions have no copy of a template.
    is_gone = kind == 'hf' and not Path(expand_home(path)).exists()
    if kind == 'bpe' or is_gone or any(list_files_beside(folder)):
        fields = dataclasses.replace(fields, tokenizer=f'hf:{folder}')
    fields = dataclasses.replace(fields, source=source, mixture=None, validation_source='')
    return data.open_dataset(fields, say=to_stderr)
