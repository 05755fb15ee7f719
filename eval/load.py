"""A checkpoint, and the data it was trained on."""

from lm import data
from lm.mixture import source_of
from lm.record.load import Checkpoint, find, load

__all__ = ['Checkpoint', 'find', 'load', 'open_data']


def open_data(checkpoint: Checkpoint) -> data.Dataset:
    """The data it was trained on; ValueError where that is no longer what the config names."""
    fields = checkpoint.recipe.data
    dataset = data.open_dataset(fields)
    if dataset.digest != checkpoint.meta['data']:
        raise ValueError(
            f'{source_of(fields)} has changed since training: it was '
            f'{checkpoint.meta["data"]} and is {dataset.digest}. Numbers would not compare.'
        )
    return dataset
