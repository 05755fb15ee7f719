"""Serves a checkpoint over OpenAI's HTTP interface.

python -m eval.serve --checkpoint=WORKDIR [--port=8000] [--host=127.0.0.1]
    [--slots=16] [--capacity=TOKENS] [--key=KEY|env]
"""

from lm.launch.before_jax import prepare_process

if __name__ == '__main__':
    prepare_process()  # before JAX is imported

import importlib.util
import signal
import sys

from absl import flags

from eval.load import define_checkpoint, load
from lm.launch import streams
from lm.launch.command import parse_flags, run_program

CHECKPOINT = define_checkpoint()
HOST = flags.DEFINE_string('host', '127.0.0.1', 'Address to listen on; 0.0.0.0: all addresses.')
PORT = flags.DEFINE_integer(
    'port', 8000, 'Port to listen on; 0: any free port.', lower_bound=0, upper_bound=65535
)
SLOTS = flags.DEFINE_integer('slots', 16, 'Texts that are generated together.', lower_bound=1)
CAPACITY = flags.DEFINE_integer(
    'capacity', None, 'Tokens of a prompt plus its text; default: data.seq_len.', lower_bound=2
)
QUEUE = flags.DEFINE_integer('queue', 64, 'Requests that may wait for a slot.', lower_bound=1)
TIMEOUT = flags.DEFINE_float(
    'timeout', 600, 'Seconds per request, including the wait for a slot.', lower_bound=1
)
KEY = flags.DEFINE_string('key', None, 'Key that clients must send; env: read EVENKEEL_KEY.')

PACKAGES = ('pydantic', 'starlette', 'uvicorn')


def main(_) -> None:
    streams.ignore_output_loss()
    if not CHECKPOINT.value:
        raise ValueError('--checkpoint=WORKDIR is required: the workdir of a run')
    if missing_packages := [name for name in PACKAGES if importlib.util.find_spec(name) is None]:
        raise ValueError(
            f'eval.serve needs {" and ".join(missing_packages)}. Install with uv sync --extra serve'
        )
    from eval.serve import connections
    from eval.serve.server import Server, read_key

    key = read_key(KEY.value)
    # Before the checkpoint is loaded, which would be in vain if the address is in use.
    sock = connections.bind_socket(HOST.value, PORT.value)
    if key is None and not connections.is_loopback(HOST.value):
        print(
            f'WARNING: --host={HOST.value} without --key: anyone who can reach this machine can '
            'use the server',
            file=sys.stderr,
        )
    connections.raise_file_limit()
    server = Server(
        CHECKPOINT.value,
        load(CHECKPOINT.value),
        SLOTS.value,
        CAPACITY.value,
        QUEUE.value,
        TIMEOUT.value,
        key,
    )
    model, (host, port) = server.model, sock.getsockname()[:2]
    message = (
        f'serving {model.name!r} (step {model.step}, {model.fingerprint}) on '
        f'http://{f"[{host}]" if ":" in host else host}:{port}/v1, {SLOTS.value} slots of '
        f'{model.capacity:,} tokens'
    )
    end_signal = server.run(sock, lambda: print(message, flush=True))
    if end_signal is not None:
        print(f'{signal.Signals(end_signal).name}: the server has stopped', file=sys.stderr)
        sys.exit(128 + end_signal)


if __name__ == '__main__':
    run_program(main, parse_flags)
