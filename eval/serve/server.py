"""A checkpoint made into a server: engine, scheduler, routes and connections put together."""

import os
import re
import socket
import sys
from collections.abc import Callable

from eval.serve.app import Limits, Service
from eval.serve.chat import chat_of
from eval.serve.connections import abort, server_of
from eval.serve.prompts import PromptScorer
from eval.serve.replies import Served
from eval.serve.scheduler import Scheduler
from lm.inference.engine import Engine
from lm.inference.load import Checkpoint
from lm.record.checkpoint import FOLDER
from lm.record.digests import of_record
from lm.storage.buckets import is_url
from lm.storage.files import first_line

KEY_VARIABLE = 'EVENKEEL_KEY'


def key_of(given: str | None) -> str | None:
    """Returns the key that clients must send; None where any may ask.

    Args:
      given: the key, or 'env' for that of KEY_VARIABLE.

    Raises:
      ValueError: where no header can hold it.
    """
    key = os.environ.get(KEY_VARIABLE, '') if given == 'env' else given
    if key is not None and not re.fullmatch('[!-~]+', key):
        what = f'the variable {KEY_VARIABLE}' if given == 'env' else '--key'
        words = 'is empty' if key == '' else 'has other characters'
        raise ValueError(f'{what} must be letters, digits or signs of ASCII; it {words}')
    return key


def name_of(path: str, step: int) -> str:
    """Returns the name of a workdir, which a path or a URL of it or of its checkpoint has."""
    workdir = path.rstrip('/').removesuffix(f'/{FOLDER}/{step}')
    return os.path.basename(workdir if is_url(path) else os.path.realpath(workdir))


def served_as(path: str, checkpoint: Checkpoint, capacity: int) -> Served:
    """Returns what clients are told of the checkpoint at a path."""
    meta = checkpoint.meta
    weights = meta['digests']['weights'] if 'digests' in meta else meta  # older ones lack them
    return Served(
        name_of(path, checkpoint.step),
        checkpoint.step,
        of_record(weights),
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
          path: as the user gave it; the model's name is that of its workdir.
          checkpoint: as `load` gives it.
          slots: texts that are continued together.
          capacity: tokens of each; None: data.seq_len.
          queue: requests that may wait.
          timeout_sec: from the arrival of a request to the end of its answer.
          key: that clients must send; None: any may ask.

        Raises:
          ValueError: where the positions of the model end before `capacity`, or its chat template
            cannot be read.
        """
        engine, prompts = Engine(checkpoint, slots, capacity), PromptScorer(checkpoint)
        self.served = served_as(path, checkpoint, engine.capacity)
        self._failures: list[BaseException] = []
        self.service = Service(
            self.served,
            checkpoint.tokenizer,
            chat_of(checkpoint.tokenizer, checkpoint.path.parent.parent / 'tokenizer'),
            Scheduler(engine, prompts, queue, self._fail),
            engine.check,
            Limits(timeout_sec, prompts.longest),
            key,
            abort,
        )
        self._server = server_of(self.service.app(), self.service.end)

    def _fail(self, error: BaseException) -> None:
        reason = f'{type(error).__name__}: {first_line(error)}'
        print(
            f'the engine has failed, and every text under way with it: {reason}. The server ends.',
            file=sys.stderr,
        )
        self._failures.append(error)
        self._server.should_exit = True

    def run(self, sock: socket.socket, began: Callable[[], None]) -> int | None:
        """Serves until a signal comes, and returns which. Raises what the engine fails with.

        Args:
          sock: bound to an address.
          began: called when clients may come.
        """
        self._server.began = began
        self._server.run(sockets=[sock])
        if self._failures and self._server.ended_by is None:
            raise self._failures[0]
        return self._server.ended_by
