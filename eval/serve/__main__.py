"""Serves a checkpoint over HTTP, as OpenAI's clients ask: completions, chats, log-probabilities.

python -m eval.serve --checkpoint=WORKDIR [--port=8000] [--host=127.0.0.1] [--slots=16]
  [--capacity=TOKENS] [--queue=64] [--timeout=600] [--key=KEY|env]
"""

from lm.launch.before_jax import prepare_process

if __name__ == '__main__':
    prepare_process()  # before JAX is imported

import importlib.util
import os
import re
import signal
import sys
from pathlib import Path

from absl import app, flags

from eval.load import Checkpoint, define_checkpoint, load
from lm.launch.command import parse_flags, run_main
from lm.record.checkpoint import FOLDER
from lm.record.digests import of_record
from lm.storage.buckets import is_url

CHECKPOINT = define_checkpoint()
HOST = flags.DEFINE_string('host', '127.0.0.1', 'Address to listen at; 0.0.0.0: all of them.')
PORT = flags.DEFINE_integer(
    'port', 8000, 'Port to listen at; 0: any that is free.', lower_bound=0, upper_bound=65535
)
SLOTS = flags.DEFINE_integer('slots', 16, 'Texts that are continued together.', lower_bound=1)
CAPACITY = flags.DEFINE_integer(
    'capacity', None, 'Tokens of a prompt with its text; left out: data.seq_len.', lower_bound=2
)
QUEUE = flags.DEFINE_integer('queue', 64, 'Requests that may wait for a slot.', lower_bound=1)
TIMEOUT = flags.DEFINE_float(
    'timeout', 600, 'Seconds that a request may take, the wait for a slot included.', lower_bound=0
)
KEY = flags.DEFINE_string('key', None, 'Key that clients must send; env: that of EVENKEEL_KEY.')

KEY_VARIABLE = 'EVENKEEL_KEY'
PACKAGES = ('starlette', 'uvicorn')


def key_of(given: str | None) -> str | None:
    """Returns the key that clients must send. Raises ValueError where no header can hold it."""
    key = os.environ.get(KEY_VARIABLE, '') if given == 'env' else given
    if key is not None and not re.fullmatch('[!-~]+', key):
        what = f'the variable {KEY_VARIABLE}' if given == 'env' else '--key'
        words = 'is empty' if key == '' else 'has other characters'
        raise ValueError(f'{what} must be letters, digits or signs of ASCII; it {words}')
    return key


def serve(checkpoint: Checkpoint, sock, key: str | None) -> int | None:
    """Serves until a signal comes; returns which. Raises what the engine fails with."""
    from eval.serve.app import Limits, Service
    from eval.serve.chat import chat_of
    from eval.serve.connections import abort, server_of
    from eval.serve.prompts import Prompts
    from eval.serve.scheduler import Scheduler
    from lm.inference.engine import Engine

    engine, prompts = Engine(checkpoint, SLOTS.value, CAPACITY.value), Prompts(checkpoint)
    served = served_as(CHECKPOINT.value, checkpoint, engine.capacity)
    failures: list[BaseException] = []

    def fail(error: BaseException) -> None:
        failures.append(error)
        server.should_exit = True

    scheduler = Scheduler(engine, prompts, QUEUE.value, failed=fail)
    service = Service(
        served,
        checkpoint.tokenizer,
        chat_of(checkpoint.tokenizer, checkpoint.path.parent.parent / 'tokenizer'),
        scheduler,
        engine.check,
        Limits(TIMEOUT.value, prompts.longest),
        key,
        abort,
    )
    server = server_of(service.app(), service.end)
    host, port = sock.getsockname()[:2]
    shown = f'[{host}]' if ':' in host else host
    print(
        f'serving {served.name!r} (step {served.step}, {served.fingerprint}) at '
        f'http://{shown}:{port}/v1 with {SLOTS.value} slots of {served.capacity:,} tokens',
        flush=True,
    )
    server.run(sockets=[sock])
    if failures and server.ended_by is None:
        raise failures[0]
    return server.ended_by


def name_of(path: str, step: int) -> str:
    """Returns the name of a workdir, which a path or a URL of it or of its checkpoint has."""
    workdir = path.rstrip('/').removesuffix(f'/{FOLDER}/{step}')
    return workdir.rsplit('/', 1)[-1] if is_url(path) else Path(workdir).resolve().name


def served_as(path: str, checkpoint: Checkpoint, capacity: int):
    """Returns what clients are told of the checkpoint at a path."""
    from eval.serve.replies import Served

    meta = checkpoint.meta
    weights = meta['digests']['weights'] if 'digests' in meta else meta  # older ones lack them
    return Served(
        name_of(path, checkpoint.step),
        checkpoint.step,
        of_record(weights),
        int(checkpoint.path.stat().st_mtime),
        capacity,
    )


def main(_) -> None:
    if missing := [name for name in PACKAGES if importlib.util.find_spec(name) is None]:
        raise ValueError(f'{" and ".join(missing)} must be installed: uv sync --extra serve')
    from eval.serve import connections

    key = key_of(KEY.value)
    sock = connections.bind(HOST.value, PORT.value)  # before a checkpoint is loaded for nothing
    if key is None and not connections.is_loopback(HOST.value):
        print(
            f'WARNING: --host={HOST.value} without --key: whoever reaches this machine may ask',
            file=sys.stderr,
        )
    connections.allow_connections()
    ended_by = serve(load(CHECKPOINT.value), sock, key)
    if ended_by is not None:
        print(f'{signal.Signals(ended_by).name}: the server has ended', file=sys.stderr)
        sys.exit(128 + ended_by)


if __name__ == '__main__':
    flags.mark_flag_as_required('checkpoint')
    app.run(run_main(main), flags_parser=parse_flags)
