"""Reads an export back from its files, and compares its logits with the checkpoint's own.

The writer (`export_hf`) and the reader (`import_hf`) share the table of tensors of a family alone:
a tensor that was not written, is in another place, or is another one than was compared before
writing, changes the logits here.
"""

from pathlib import Path
from typing import NamedTuple

import jax
import numpy as np

from eval.convert.export_hf import MAX_LOGIT_TOKENS, TOLERANCE
from eval.convert.fold import ROWS, compute_logits
from eval.convert.hf_files import CONFIG
from eval.convert.import_hf import build_variables, import_folder, largest_difference
from eval.load import Checkpoint
from lm.config.fields import MeshConfig
from lm.config.resolve import to_dict
from lm.devices.mesh import make_mesh


class FileComparison(NamedTuple):
    """The logits of a checkpoint and of the files that were made of it.

    difference: the largest, relative to `largest`, the largest logit of the checkpoint. length:
    tokens of each row. n_bytes: of weights that were read.
    """

    difference: float
    largest: float
    length: int
    n_bytes: int

    def describe(self, folder: Path) -> str:
        """Returns a line on the two models that were compared, and by which numbers."""
        return (
            f'read back {self.n_bytes / 1e6:,.3f} MB of weights from {folder}: for {ROWS} rows of '
            f'{self.length} random tokens, logits of files and checkpoint differ by at most '
            f'{self.difference:.1e} of the largest, {self.largest:.3g} (float32; transformers was '
            'not run)'
        )


def compare_files(folder: Path, checkpoint: Checkpoint, expected: float) -> FileComparison:
    """Compares the files of an export with the checkpoint.

    Args:
      folder: of the export.
      checkpoint: that was exported.
      expected: the difference that the export computed before it wrote the files.

    Raises:
      ValueError: if the files are of another model. config.json is removed then, so that no program
        takes the folder for a model.
    """
    cpu = make_mesh(MeshConfig(data=1), jax.local_devices(backend='cpu')[:1])
    vocab_size, length = checkpoint.meta['vocab_size'], checkpoint.recipe.data.seq_len
    length = min(MAX_LOGIT_TOKENS, length)
    try:
        again = import_folder(folder, to_dict(checkpoint.recipe), folder, cpu)
    except (ValueError, OSError) as error:
        (folder / CONFIG).unlink(missing_ok=True)
        raise ValueError(
            f'{folder} was written but cannot be read back, so {CONFIG} was removed: {error}'
        ) from error
    variables = build_variables(jax.device_get(again.params))
    logits = compute_logits(again.recipe, vocab_size, variables, 'float32', length)
    before = jax.device_get(checkpoint.variables)
    checkpoint_logits = compute_logits(checkpoint.recipe, vocab_size, before, 'float32', length)
    difference = largest_difference(logits, checkpoint_logits)
    if not difference <= max(TOLERANCE, 2 * expected):
        (folder / CONFIG).unlink(missing_ok=True)
        raise ValueError(
            f'{folder} was written, but its files contain a different model: their logits differ '
            f'by {difference:.1e} of the largest; before writing, the difference was '
            f'{expected:.1e}. {CONFIG} was removed.'
        )
    largest = float(np.max(np.abs(checkpoint_logits)))
    return FileComparison(difference, largest, length, again.n_bytes_read)


def rounding_difference(checkpoint: Checkpoint) -> float:
    """Returns how much logits change because the run rounds the operands of its products, relative
    to the largest logit.
    """
    length = min(MAX_LOGIT_TOKENS, checkpoint.recipe.data.seq_len)
    variables = jax.device_get(checkpoint.variables)
    arguments = checkpoint.recipe, checkpoint.meta['vocab_size'], variables, 'float32', length
    rounded = compute_logits(*arguments, is_rounded=True)
    return largest_difference(rounded, compute_logits(*arguments))
