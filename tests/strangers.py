"""Messages that strangers send to a port: fifty kinds, none from a host of the job."""

import contextlib
import itertools
import json
import random
import socket
import struct
from collections.abc import Iterator

HELLO = {'process_id': 1, 'num_processes': 2, 'name': 'x', 'arguments': []}
NONCE, PROOF = 'ab' * 16, 'cd' * 32


def _json(value) -> bytes:
    return json.dumps(value).encode() + b'\n'


KINDS = {
    'nothing': b'',
    'a line break': b'\n',
    'line breaks': b'\n' * 4000,
    'zeros': b'\0' * 4000,
    'zeros in lines': b'\0\n' * 2000,
    'no line break': b'x' * 100_000,
    'HTTP': b'GET / HTTP/1.1\r\nHost: a\r\n\r\n',
    'HTTP POST': b'POST /x HTTP/1.1\r\nContent-Length: 99999999\r\n\r\n' + b'y' * 500,
    'HTTP/2': b'PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\0\0\0\4\0\0\0\0\0',
    'TLS': bytes.fromhex('16030100c8010000c40303') + bytes(range(200)),
    'SSH': b'SSH-2.0-OpenSSH_9.6\r\n',
    'SMTP': b'EHLO mail\r\nMAIL FROM:<a@b>\r\n',
    'Redis': b'*1\r\n$4\r\nPING\r\n',
    'Memcached': b'stats\r\n',
    'PostgreSQL': struct.pack('>ii', 8, 80877103),
    'MySQL': b'\x20\0\0\1\x85\xa6\xff\1\0\0\0\1\x21' + b'\0' * 23,
    'RDP': bytes.fromhex('030000130ee000000000000100080003000000'),
    'SMB': b'\0\0\0\x85\xffSMB' + b'r' * 129,
    'DNS over TCP': b'\0\x1d' + bytes(29),
    'SOCKS': b'\5\1\0',
    'VNC': b'RFB 003.008\n',
    'telnet': b'\xff\xfd\x18\xff\xfd\x20\xff\xfd\x23\xff\xfd\x27',
    'nesting': b'[' * 200_000 + b'\n',
    'nesting of objects': b'{"a":' * 20_000 + b'\n',
    'closed nesting': b'[' * 60 + b']' * 60 + b'\n',
    'no object': b'[]\n',
    'null': b'null\n',
    'NaN': b'{"ended": NaN}\n',
    'a number': b'1' * 5000 + b'\n',
    'a hello': _json({'hello': HELLO}),
    'a hello of process 0': _json({'hello': HELLO | {'process_id': 0}}),
    'a hello of process 77': _json({'hello': HELLO | {'process_id': 77}}),
    'a hello of process -1': _json({'hello': HELLO | {'process_id': -1}}),
    'a hello of another job': _json({'hello': HELLO | {'num_processes': 9}}),
    'a hello of wrong types': _json({'hello': {'process_id': '1', 'num_processes': None}}),
    'a hello with arguments': _json({'hello': HELLO | {'arguments': ['--x'] * 9000}}),
    'a hello in pieces': b'{"hello": {"process_id": 1, ',
    'an end': _json({'ended': 0}),
    'an end of another type': _json({'ended': 'x'}),
    'an end without text': _json({'ended': 1}),
    'a start': _json({'start': {'0': 'a', '1': 'b'}, 'job': 'x', 'certificate': ''}),
    'a ping': _json({'ping': True}),
    'busy': _json({'busy': True}),
    'escapes': b'\x1b[2J\x1b[31mroot\x1b]0;title\7\n',
    'a name of escapes': _json({'hello': HELLO | {'name': '\x1b[2J\nhost 0: done'}}),
    'another proof': f'{NONCE} {PROOF}\n'.encode(),
    'a proof alone': f'{PROOF}\n'.encode(),
    'a proof of three words': f'{NONCE} {PROOF} {PROOF}\n'.encode(),
    'a long proof': f'{NONCE} {"c" * 4000}\n'.encode(),
    'no UTF-8': b'\xff\xfe\xc3\x28\n',
    'no ASCII': 'ключ ключ\n'.encode(),
}


def send(address: tuple[str, int], kinds: Iterator[str], rng: random.Random) -> int:
    """Connects once for each kind and sends it; some stay, some hang up, and some reset the
    connection.

    Returns the number of accepted connections.
    """
    stay: list[socket.socket] = []
    accepted = 0
    for kind in kinds:
        with contextlib.suppress(OSError):
            stranger = socket.create_connection(address, timeout=5.0)
            accepted += 1
            stay.append(stranger)
            stranger.sendall(KINDS[kind])
            if rng.random() < 0.1:  # a reset in place of an end
                stranger.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack('ii', 1, 0))
            if rng.random() < 0.3:
                stay.pop().close()
        while len(stay) > 100:
            stay.pop(rng.randrange(len(stay))).close()
    for stranger in stay:
        stranger.close()
    return accepted


def kinds(count: int) -> Iterator[str]:
    return itertools.islice(itertools.cycle(KINDS), count)
