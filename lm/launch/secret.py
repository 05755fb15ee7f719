"""The secret of a job, which distinguishes its hosts from strangers. Standard library only.

The secret is the value of --job_secret_file or EVENKEEL_JOB_SECRET, the same on all hosts, or else
a file in the workdir, which process 0 writes anew for each job and the others read. A host proves
that it knows the secret s of the two nonces a and b of a connection by HMAC-SHA256(s, role a b)
(RFC 2104), so that s crosses no network.
"""

import contextlib
import hashlib
import hmac
import itertools
import os
import re
import secrets
import shutil
import subprocess
import tempfile
from collections.abc import Generator, Mapping, Sequence
from pathlib import Path

from lm.launch.exit_status import BAD_INPUT, JobEnded
from lm.launch.this_host import SECRET, Host, select_flags
from lm.storage.files import expand_home

MIN_CHARS, MAX_CHARS = 16, 4096  # characters of a secret
RUNS = 'runs'  # folder of workdirs without a name (`lm.launch.command`)
PEER = 'evenkeel://job/'  # beginning of the name in a job's certificate
DAYS = 365
MTLS = 'JAX_MTLS_{}'  # names of its variables


class Secret:
    """The secret of a job, or the path of its file.

    Raises JobEnded if the hosts have no common secret, and if it is too short.
    """

    def __init__(self, host: Host, arguments: Sequence[str], env: Mapping[str, str] = os.environ):
        self._text, self.path = '', None
        if host.secret_file:
            self._text = _check_length(_read_secret(Path(host.secret_file)), '--job_secret_file')
        elif SECRET in env:
            self._text = _check_length(env[SECRET].strip(), SECRET)
        elif '://' in (workdir := select_flags(arguments, ['workdir']).get('workdir', RUNS)):
            raise JobEnded(
                BAD_INPUT,
                f'hosts without a shared disk need a job secret, and {workdir} is not on a disk. '
                f'Pass --job_secret_file=FILE with the same {MIN_CHARS} or more characters on all '
                f'hosts, or set {SECRET} to them. `openssl rand -hex 16` makes such a text.',
            )
        else:
            try:
                folder = Path(expand_home(workdir))
            except ValueError as error:
                raise JobEnded(BAD_INPUT, f'--workdir={error}') from None
            self.path = folder / f'.job-{re.sub(r"[^\w.]", "-", host.coordinator)}.secret'

    def write(self) -> str:
        """Returns the secret, which process 0 makes unless it was given."""
        if self.path is None:
            return self._text
        self._text = secrets.token_hex(16)
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            # Other hosts read the file at any time: renaming lets it appear complete, and mode 0600
            # hides it from other users.
            temporary = self.path.with_suffix(f'.{os.getpid()}')
            temporary.unlink(missing_ok=True)
            descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
            with open(descriptor, 'w') as file:
                file.write(self._text)
            temporary.replace(self.path)
        except OSError as error:
            raise JobEnded(BAD_INPUT, f'the job secret cannot be written: {error}') from None
        return self._text

    def read(self) -> str:
        """Returns the secret, or '' until process 0 has written it."""
        if self.path is None:
            return self._text
        with contextlib.suppress(OSError, ValueError):
            return _read_secret(self.path)
        return ''

    def remove(self) -> None:
        """Removes the file of a job that has ended, unless another job has replaced it.

        Also removes the folder, if a failed start leaves it empty.
        """
        # The next job of this host may have written its own secret already.
        if self.path is not None and self.read() == self._text:
            self.path.unlink(missing_ok=True)
            with contextlib.suppress(OSError):
                self.path.parent.rmdir()


def _read_secret(path: Path) -> str:
    """Returns the content of a file of a secret."""
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK)  # a pipe holds nobody up
    with open(descriptor) as file:
        return file.read(MAX_CHARS).strip()


def _check_length(text: str, origin: str) -> str:
    """Returns the secret. Raises JobEnded if it is too short."""
    if len(text) < MIN_CHARS:
        raise JobEnded(
            BAD_INPUT,
            f'a job secret must have at least {MIN_CHARS} characters; {origin} has {len(text)}. '
            '`openssl rand -hex 16` makes one.',
        )
    return text


def proof(secret: str, *parts: str) -> str:
    """Returns HMAC-SHA256 of the parts in hexadecimal digits."""
    return hmac.new(secret.encode(), ' '.join(parts).encode(), hashlib.sha256).hexdigest()


def is_proof(text: str, secret: str, *parts: str) -> bool:
    """Whether `text` is the proof of the parts, compared in constant time."""
    return hmac.compare_digest(text.encode(), proof(secret, *parts).encode())


def seal(secret: str, text: str) -> str:
    """Encrypts a text for holders of the secret, who can `unseal` it.

    HMAC-SHA256 in counter mode under a fresh nonce, followed by the HMAC of both.
    """
    nonce = secrets.token_hex(16)
    data = _xor_stream(text.encode(), secret, nonce).hex()
    return f'{nonce} {data} {proof(secret, "seal", nonce, data)}'


def unseal(secret: str, text: str) -> str:
    """Returns the text of `seal`. Raises ValueError if it was sealed with another secret."""
    nonce, data, tag = text.split(' ')
    if not is_proof(tag, secret, 'seal', nonce, data):
        raise ValueError('it was sealed with another secret')
    return _xor_stream(bytes.fromhex(data), secret, nonce).decode()


def _xor_stream(data: bytes, secret: str, nonce: str) -> bytes:
    """Returns the data xor the key stream of a nonce."""
    blocks = (bytes.fromhex(proof(secret, 'stream', nonce, str(i))) for i in itertools.count())
    return bytes(a ^ b for a, b in zip(data, itertools.chain.from_iterable(blocks), strict=False))


def make_certificate() -> str:
    """Returns a private key and a self-signed certificate for one job, as PEM.

    Returns '' without openssl, and if the user has given certificates to JAX.
    """
    has_own = MTLS.format('CERT_FILE') in os.environ
    if has_own or not shutil.which('openssl'):
        return ''
    finished = subprocess.run(
        [
            *('openssl', 'req', '-x509', '-nodes', '-days', str(DAYS), '-subj', '/CN=evenkeel'),
            *('-newkey', 'ec', '-pkeyopt', 'ec_paramgen_curve:prime256v1', '-keyout', '-'),
            *('-addext', f'subjectAltName=URI:{PEER}{secrets.token_hex(8)}'),
        ],
        capture_output=True,
        text=True,
    )
    return finished.stdout if finished.returncode == 0 else ''


@contextlib.contextmanager
def mtls_env(pem: str) -> Generator[dict[str, str]]:
    """Yields the variables by which JAX's processes prove the certificate to each other; {} for ''.

    Until the block ends, the key is in a file that nobody else can read.
    """
    if not pem:
        yield {}
        return
    with tempfile.TemporaryDirectory(prefix='evenkeel-') as folder:  # mode 0700
        file = Path(folder) / 'job.pem'
        file.write_text(pem)
        names = dict.fromkeys(('CERT_FILE', 'KEY_FILE', 'CA_FILE'), str(file))
        names |= {'PEER_URI_PREFIX': PEER}
        yield {MTLS.format(name): value for name, value in names.items()}
