"""A server for a checkpoint: engine, scheduler, routes and connections put together."""

import os
import re
import socket
import sys
from collections.abc import Callable

from eval.serve.app import Limits, Service
from eval.serve.chat import build_chat
from eval.serve.connections import abort_connection, build_http_server
from eval.serve.prompts import PromptScorer
from eval.serve.replies import ServedModel
from eval.serve.scheduler import Scheduler
from lm.inference.engine import Engine
from lm.inference.load import Checkpoint
from lm.record.checkpoint import FOLDER
from lm.record.digests import hash_record
from lm.storage.buckets import is_url
from lm.storage.files import first_line

KEY_VARIABLE = 'EVENKEEL_KEY'


def read_key(flag_value: str | None) -> str | None:
    """Returns the key that clients must send, or None if no key is needed.

    Args:
      flag_value: the key, or 'env' for the variable KEY_VARIABLE.

    Raises:
      ValueError: if the key cannot stand in a header.
    """
    key = os.environ.get(KEY_VARIABLE, '') if flag_value == 'env' else flag_value
    if key is not None and not re.fullmatch('[!-~]+', key):
        subject = f'the variable {KEY_VARIABLE}' if flag_value == 'env' else '--key'
        problem = 'nothing' if key == '' else 'spaces or other characters'
        raise ValueError(f'{subject} must be printable ASCII without spaces; got {problem}')
    return key


def model_name(path: str, step: int) -> str:
    """Returns the name of a workdir. path: a path or URL of the workdir or its checkpoint."""
    workdir = path.rstrip('/').removesuffix(f'/{FOLDER}/{step}')
    return os.path.basename(workdir if is_url(path) else os.path.realpath(workdir))


def describe_model(path: str, checkpoint: Checkpoint, capacity: int) -> ServedModel:
    """Returns the public facts about a checkpoint.

    Args:
      path: the checkpoint or its workdir.
      checkpoint: the loaded checkpoint.
      capacity: tokens of a prompt with its completion.
    """
    meta = checkpoint.meta
    # Clients see the digest as the fingerprint: equal weights, equal fingerprint.
    weights = (
        meta['digests']['weights'] if 'digests' in meta else meta
    )  # older checkpoints lack digests
    return ServedModel(
        model_name(path, checkpoint.step),
        checkpoint.step,
        hash_record(weights),
        int(checkpoint.path.stat().st_mtime),
        capacity,
    )


class Server:
    """Serves a checkpoint at a socket."""

    def __init__(
        self,
        path: str,
        checkpoint: Checkpoint,
        slots: int,
        capacity: int | None,
        queue: int,
        timeout_sec: float,
        key: str | None,
    ):
        """Args:
          path: as the user gave it; the model is named after its workdir.
          checkpoint: as `load` returns it.
          slots: texts that are continued together.
          capacity: tokens of each; None: data.seq_len.
          queue: requests that may wait.
          timeout_sec: time limit from the arrival of a request to the end of its answer.
          key: the key that clients must send; None: no key is needed.

        Raises:
          ValueError: if the positions of the model end before `capacity`, or its chat template is
            invalid.
        """
        engine, prompts = Engine(checkpoint, slots, capacity), PromptScorer(checkpoint)
        self.model = describe_model(path, checkpoint, engine.capacity)
        self._failures: list[Exception] = []
        self.service = Service(
            self.model,
            checkpoint.tokenizer,
            build_chat(checkpoint.tokenizer, checkpoint.path.parent.parent / 'tokenizer'),
            Scheduler(engine, prompts, queue, self._fail),
            engine.check,
            Limits(timeout_sec, prompts.max_length),
            key,
            abort_connection,
        )
        self._server = build_http_server(self.service.app(), self.service.refuse_active)

    def _fail(self, error: Exception) -> None:
        reason = f'{type(error).__name__}: {first_line(error)}'
        print(
            f'the engine failed, with all unfinished texts: {reason}. The server is stopping.',
            file=sys.stderr,
        )
        self._failures.append(error)
        self._server.should_exit = True

    def run(self, sock: socket.socket, on_start: Callable[[], None]) -> int | None:
        """Serves until a signal comes, and returns the signal.

        Raises the engine's error if the engine fails.

        Args:
          sock: bound to an address.
          on_start: called when clients can connect.
        """
        self._server.on_start = on_start
        self._server.run(sockets=[sock])
        if self._failures and self._server.end_signal is None:
            raise self._failures[0]
        return self._server.end_signal
