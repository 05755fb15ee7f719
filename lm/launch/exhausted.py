"""Errors of a device, or of this machine, with too little memory for a run."""

import jax

from lm.storage.files import first_line

MAX_CHARS = 200  # characters of XLA's error


def is_memory_error(error: BaseException) -> bool:
    """Whether XLA found too little memory.

    TensorStore uses the same word for a full disk, with other types of errors.
    """
    return isinstance(error, jax.errors.JaxRuntimeError) and 'RESOURCE_EXHAUSTED' in str(error)


def explain_memory_error(error: Exception) -> str:
    """Returns the meaning of an `is_memory_error`, and what to try."""
    return (
        f'the run does not fit in device memory ({first_line(error, MAX_CHARS)}). Try, in this '
        'order: a larger train.microbatches, which keeps the batch; model.remat; a smaller '
        'data.batch_size; mesh.axes=auto on several devices. To resume a run with such a change, '
        'pass its --workdir and --continue_changed.'
    )
