"""Keeps the rounded parameters of a command, so that an interrupted one goes on where it was."""

import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from lm.storage.files import replace_file
from modules.precision.codes import PackedWeight, unpack_weight

RECORD = 'record'  # beside the arrays of a file


class Parts:
    """Packed weights in files, each named by a digest of all that it follows from.

    Attributes:
      n_found: weights that were read instead of computed.

    Args:
      folder: of the files; None: nothing is kept.
    """

    def __init__(self, folder: Path | None):
        self.n_found = 0
        self._folder = folder

    def compute(
        self, source: Callable[[], Any], compute: Callable[[], PackedWeight]
    ) -> PackedWeight:
        """Returns a weight, from its file or else from `compute`.

        Args:
          source: returns the facts that determine the weight, told apart by their `repr`.
          compute: returns the weight.
        """
        if self._folder is None:
            return compute()
        name = hashlib.sha256(repr(source()).encode()).hexdigest()[:32]
        path = self._folder / f'{name}.npz'
        if path.exists():
            self.n_found += 1
            with np.load(path) as file:
                arrays = {name: file[name] for name in file.files}
            return unpack_weight(arrays, json.loads(arrays.pop(RECORD).item()))
        weight = compute()
        with replace_file(path) as new, new.open('wb') as file:
            record = np.array(json.dumps(weight.record()))
            np.savez(file, allow_pickle=False, **weight.arrays, **{RECORD: record})
        return weight


NO_PARTS = Parts(None)
