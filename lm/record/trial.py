"""A tiny checkpoint that is written before training, to test whether the folder can hold real ones.

It goes through the same library, folder and kind of metadata as a real checkpoint, in about a
hundred file operations (30 ms of CPU time), and compiles no program. Its name is not a step, so
that nothing takes it for a checkpoint. The next start removes the files of a killed process.
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

    Several processes each write a part, unless process 0 writes for all. Raises OSError with the
    reason, before anything is compiled, if it cannot be written or read.
    """
    first_only = has_private_disks()
    if first_only and not is_first():
        return
    folder = workdir.absolute() / FOLDER
    path, options = folder / NAME, PROCESS_0_ONLY if first_only else ALL_PROCESSES
    try:
        if is_first():
            folder.mkdir(parents=True, exist_ok=True)
            _remove(folder)
        if not first_only:
            broadcast_from_first(None)
        # If process 0 writes for all, it writes NumPy arrays; else each writes its devices' part.
        weights = {'zeros': np.zeros(1, np.float32) if first_only else _zeros()}
        items = ocp.args.Composite(
            weights=ocp.args.StandardSave(weights), meta=ocp.args.JsonSave(dict(meta))
        )
        handler = ocp.CompositeCheckpointHandler(
            composite_options=ocp.CompositeOptions(multiprocessing_options=options)
        )
        with ocp.Checkpointer(handler, multiprocessing_options=options) as writer:
            writer.save(path, args=items)
        read_items(path, weights=ocp.args.StandardRestore(weights), meta=ocp.args.JsonRestore())
        if not first_only:
            gather_values(None)  # all have read it
        if is_first():
            _remove(folder)
    except Exception as error:  # libraries raise any type
        reason = f'{type(error).__name__}: {first_line(error, MAX_ERROR_CHARS)}'
        raise OSError(
            f'{workdir} cannot store checkpoints: a tiny one could not be written there and read '
            f'back ({reason}). Nothing was trained. Use another --workdir, or repair this one.'
        ) from error


def _remove(folder: Path) -> None:
    for path in folder.glob(f'{NAME}*'):
        shutil.rmtree(path)


def _zeros() -> jax.Array:
    """Returns a vector with one element for each device, so that each process writes a part."""
    mesh = Mesh(np.array(jax.devices()), ('devices',))
    sharding = NamedSharding(mesh, PartitionSpec('devices'))
    return jax.make_array_from_callback((mesh.size,), sharding, lambda _: np.zeros(1, np.float32))
