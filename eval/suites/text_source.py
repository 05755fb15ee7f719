"""A text that is no part of a run's own data, as rows for a suite."""

from pathlib import Path

from eval.load import Checkpoint
from lm.data import in_memory
from lm.data.in_memory import EncodedText, TextRequest, encode_text
from lm.data.tokenizer_files import list_files_beside
from lm.inference.load import to_stderr
from lm.storage.files import expand_home


def encode_source(checkpoint: Checkpoint, source: str, flag: str, documents: int) -> EncodedText:
    """Returns the documents of a text under the tokenizer of a checkpoint, in memory.

    Args:
      checkpoint: gives the tokenizer, the length and the packing of rows.
      source: of the text, such as text:FILE.
      flag: names the source in errors.
      documents: how many to read, from the first; 0: all.

    Raises:
      ValueError: as `encode_text` does.
    """
    request = TextRequest(source, flag, documents)
    return encode_text(request, checkpoint.tokenizer, checkpoint.recipe.data, to_stderr)


def encode_conversations(
    checkpoint: Checkpoint, source: str, flag: str, documents: int
) -> EncodedText:
    """Returns the conversations of a source, with their answers as targets, in memory.

    Args:
      checkpoint: gives the tokenizer, its chat template, the length and the packing of rows.
      source: of the conversations, chat:FILE.
      flag: names the source in errors.
      documents: how many to read, from the first; 0: all.

    Raises:
      ValueError: as `lm.data.in_memory.encode_conversations` does.
    """
    request, spec = TextRequest(source, flag, documents), find_tokenizer_spec(checkpoint)
    fields = checkpoint.recipe.data
    return in_memory.encode_conversations(request, checkpoint.tokenizer, fields, spec, to_stderr)


def find_tokenizer_spec(checkpoint: Checkpoint) -> str:
    """Returns the data.tokenizer beside which the chat template of a run lies."""
    spec = checkpoint.recipe.data.tokenizer
    kind, _, path = spec.partition(':')
    folder = checkpoint.path.parent.parent / 'tokenizer'
    # The original may be gone or changed: the run has its copy. Runs of earlier versions have no
    # copy of a template.
    is_gone = kind == 'hf' and not Path(expand_home(path)).exists()
    return f'hf:{folder}' if is_gone or any(list_files_beside(folder)) else spec
