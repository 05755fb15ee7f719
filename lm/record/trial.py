"""A tiny checkpoint that is written before training, to find out whether real ones can be.

It goes through the library, to the folder and with the kind of metadata of a real one, in some
hundred file operations (30 ms of CPU time) and without a program to compile. Its name is no step:
nothing takes it for a checkpoint, and the next start removes what a killed process leaves of it.
"""

import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from lm.launch.distributed import broadcast_from_first, gather_values, has_private_disks, is_first
from lm.record.checkpoint import FOLDER, MAX_ERROR_CHARS, read_items
from lm.record.checkpoints import ALL_PROCESSES, PROCESS_0_ONLY
from lm.storage.files import first_line

NAME = 'trial'


def try_checkpoint(workdir: Path, meta: Mapping[str, Any]) -> None:
    """Writes a tiny checkpoint with this metadata, reads it back and removes it; called by all.

    Several processes each write a part, unless process 0 writes for all. Raises OSError, with the
    reason and before anything is compiled, if it cannot be written or read.
    """
    alone = has_private_disks()
    if alone and not is_first():
        return
    folder = workdir.absolute() / FOLDER
    path, options = folder / NAME, PROCESS_0_ONLY if alone else ALL_PROCESSES
    try:
        if is_first():
            folder.mkdir(parents=True, exist_ok=True)
            _remove(folder)
        if not alone:
            broadcast_from_first(None)
        # Process 0 writes NumPy arrays for all, and otherwise each the part of its devices.
        weights = {'zeros': np.zeros(1, np.float32) if alone else _zeros()}
        items = ocp.args.Composite(
            weights=ocp.args.StandardSave(weights), meta=ocp.args.JsonSave(dict(meta))
        )
        handler = ocp.CompositeCheckpointHandler(
            composite_options=ocp.CompositeOptions(multiprocessing_options=options)
        )
        with ocp.Checkpointer(handler, multiprocessing_options=options) as writer:
            writer.save(path, args=items)
        read_items(path, weights=ocp.args.StandardRestore(weights), meta=ocp.args.JsonRestore())
        if not alone:
            gather_values(None)  # all have read it
        if is_first():
            _remove(folder)
    except Exception as error:  # of whatever type a library gives it
        reason = f'{type(error).__name__}: {first_line(error, MAX_ERROR_CHARS)}'
        raise OSError(
            f'{workdir} cannot hold checkpoints: a tiny one could not be written there and read '
            f'back ({reason}). Nothing has been trained. Give another --workdir, or mend this one.'
        ) from error


def _remove(folder: Path) -> None:
    for path in folder.glob(f'{NAME}*'):
        shutil.rmtree(path)


def _zeros() -> jax.Array:
    """Returns a vector of which each device has an element, so that each process writes a part."""
    mesh = Mesh(np.array(jax.devices()), ('devices',))
    along = NamedSharding(mesh, PartitionSpec('devices'))
    return jax.make_array_from_callback((mesh.size,), along, lambda _: np.zeros(1, np.float32))
