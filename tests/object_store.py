"""An S3 server on this machine (moto's, in a separate process), a connection to it that can be cut,
and the used part of Google's interface.

The programs under test make real requests, with real conditions and errors. The server keeps
objects in memory, and accepts any credentials.
"""

import contextlib
import http.server
import itertools
import os
import socket
import subprocess
import sys
import threading
import time
import urllib.parse
from collections.abc import Iterator
from typing import ClassVar

BUCKET = 'runs-of-tests'
CREDENTIALS = {
    'AWS_ACCESS_KEY_ID': 'testing',
    'AWS_SECRET_ACCESS_KEY': 'testing',
    'AWS_REGION': 'us-east-1',
}
QUICK = {  # in place of 15 s, 180 s and 60 s
    'EVENKEEL_BUCKET_PACE_SEC': '0.1',
    'EVENKEEL_BUCKET_RETRY_SEC': '2.5',
    'EVENKEEL_BUCKET_LEASE_SEC': '3.0',
}


def free_port() -> int:
    with socket.socket() as server:
        server.bind(('127.0.0.1', 0))
        return server.getsockname()[1]


@contextlib.contextmanager
def server() -> Iterator[int]:
    """Yields the port of a server with BUCKET in it."""
    port = free_port()
    command = [sys.executable, '-m', 'moto.server', '-H', '127.0.0.1', '-p', str(port)]
    quiet = {'stdout': subprocess.DEVNULL, 'stderr': subprocess.DEVNULL}
    process = subprocess.Popen(command, **quiet)
    try:
        deadline = time.monotonic() + 60
        while not _answers(port):
            assert process.poll() is None and time.monotonic() < deadline, 'no server'
            time.sleep(0.05)
        client(port).create_bucket(Bucket=BUCKET)
        yield port
    finally:
        process.kill()
        process.wait()


def _answers(port: int) -> bool:
    with contextlib.suppress(OSError), socket.create_connection(('127.0.0.1', port), 1):
        return True
    return False


def client(port: int):
    """Returns the AWS SDK's client, for administration."""
    import boto3

    keys = {'aws_access_key_id': 'testing', 'aws_secret_access_key': 'testing'}
    url = f'http://127.0.0.1:{port}'
    return boto3.client('s3', endpoint_url=url, region_name='us-east-1', **keys)


class Gcs(http.server.BaseHTTPRequestHandler):
    """The part of Google's XML interface that the library uses, in memory. Its conditions refer to
    an object's generation, where S3 has tags.
    """

    objects: ClassVar[dict[str, tuple[bytes, int]]] = {}
    generations = itertools.count(1)
    protocol_version = 'HTTP/1.1'

    @property
    def _name(self) -> str:
        """Returns NAME of /BUCKET/NAME."""
        return urllib.parse.unquote(urllib.parse.urlsplit(self.path).path)

    def do_GET(self):
        query = dict(urllib.parse.parse_qsl(urllib.parse.urlsplit(self.path).query))
        if 'list-type' in query:
            return self._list(self._name, query.get('prefix', ''))
        stored = self.objects.get(self._name)
        return self._answer(404, b'') if stored is None else self._answer(200, *stored)

    def _list(self, bucket: str, prefix: str) -> None:
        start = f'{bucket.rstrip("/")}/'
        rows = ''.join(
            f'<Contents><Key>{name.removeprefix(start)}</Key><Size>{len(content)}</Size>'
            f'<LastModified>2026-01-01T00:00:00Z</LastModified><ETag>"{n}"</ETag></Contents>'
            for name, (content, n) in sorted(self.objects.items())
            if name.startswith(start + prefix)
        )
        text = f'<ListBucketResult><IsTruncated>false</IsTruncated>{rows}</ListBucketResult>'
        self._answer(200, text.encode())

    def do_PUT(self):
        content = self.rfile.read(int(self.headers['Content-Length']))
        _, n = self.objects.get(self._name, (b'', 0))
        if self.headers.get('x-goog-if-generation-match', str(n)) != str(n):
            return self._answer(412, b'')
        self.objects[self._name] = content, next(self.generations)
        return self._answer(200, b'', self.objects[self._name][1])

    def do_DELETE(self):
        stored = self.objects.pop(self._name, None)
        self._answer(404 if stored is None else 204, b'')

    def _answer(self, status: int, body: bytes, generation: int = 0) -> None:
        self.send_response(status)
        self.send_header('Content-Length', str(len(body)))
        self.send_header('Last-Modified', 'Thu, 01 Jan 2026 00:00:00 GMT')
        self.send_header('ETag', f'"{generation}"')
        self.send_header('x-goog-generation', str(generation))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_):
        """Logs nothing."""


@contextlib.contextmanager
def serving(handler: type) -> Iterator[str]:
    """Yields its URL, served from a thread."""
    with http.server.ThreadingHTTPServer(('127.0.0.1', 0), handler) as running:
        threading.Thread(target=running.serve_forever, daemon=True).start()
        yield f'http://127.0.0.1:{running.server_port}'
        running.shutdown()


class Line:
    """Forwards connections to a port of this machine, until it is cut."""

    def __init__(self, to: int):
        self.port, self._to = free_port(), to
        self._open: list[socket.socket] = []
        self._listener: socket.socket | None = None
        self.mend()

    def mend(self) -> None:
        self._listener = socket.create_server(('127.0.0.1', self.port))
        threading.Thread(target=self._serve, args=(self._listener,), daemon=True).start()

    def cut(self) -> None:
        """Resets connections, and refuses new ones."""
        listener, self._listener = self._listener, None
        if listener is not None:
            with contextlib.suppress(OSError):
                listener.shutdown(socket.SHUT_RDWR)
            listener.close()
        for connection in self._open:
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)
            connection.close()
        self._open.clear()

    def _serve(self, listener: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while True:
                client, _ = listener.accept()
                server = socket.create_connection(('127.0.0.1', self._to))
                self._open += [client, server]
                for ends in ((client, server), (server, client)):
                    threading.Thread(target=self._pass_on, args=ends, daemon=True).start()

    @staticmethod
    def _pass_on(source: socket.socket, target: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while chunk := source.recv(1 << 16):
                target.sendall(chunk)
        with contextlib.suppress(OSError):
            target.shutdown(socket.SHUT_RDWR)


def environment(port: int, cache) -> dict[str, str]:
    """Returns variables for a program: the server's address, and a cache of its own."""
    return {
        **CREDENTIALS,
        **QUICK,
        'AWS_ENDPOINT_URL': f'http://127.0.0.1:{port}',
        'EVENKEEL_CACHE': str(cache),
    }


def variables() -> list[str]:
    """Returns the variables that are set here, and must not reach a test."""
    kinds = ('AWS_', 'GOOGLE_', 'EVENKEEL_BUCKET_', 'EVENKEEL_CACHE')
    return [name for name in os.environ if name.startswith(kinds)]
