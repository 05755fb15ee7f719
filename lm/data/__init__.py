"""Text in, batches out: `open_dataset(cfg.data)` prepares the text once, and opens it.

lm.inference, lm.run, lm.study and eval may call this room. It may call lm.config and lm.storage.
"""

from lm.data import tokenizers
from lm.data.dataset import Dataset, check, open_dataset
from lm.data.loader import (
    Batch,
    Cursor,
    Feed,
    batch_at,
    check_epochs,
    check_stage_epochs,
    count_evaluation_batches,
    count_stage_rows,
    evaluation_batches,
    steps_in_epoch,
)
from lm.data.rows import Rows

__all__ = [
    'Batch',
    'Cursor',
    'Dataset',
    'Feed',
    'Rows',
    'batch_at',
    'check',
    'check_epochs',
    'check_stage_epochs',
    'count_evaluation_batches',
    'count_stage_rows',
    'evaluation_batches',
    'open_dataset',
    'steps_in_epoch',
    'tokenizers',
]
