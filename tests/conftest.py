"""Tests run on the CPU, seen as eight devices, whatever the machine has.

Programs are compiled once: all tests, their subprocesses and later sessions share a cache, in
.pytest_cache. Compilation is most of the cost of a test, so nothing is optimised.
"""

import atexit
import collections
import gc
import os
import shutil
import signal
import sys
import zlib
from pathlib import Path

# Containers often ask for no bytecode. Then every process compiles all that it imports, in 3 s.
os.environ.pop('PYTHONDONTWRITEBYTECODE', None)
sys.dont_write_bytecode = False

# What is started in the background of a script inherits that SIGINT is ignored: what a test
# interrupts would go on for ever.
signal.signal(signal.SIGINT, signal.default_int_handler)

from lm.launch.before_jax import add_threads_for_collectives
from tests import crashes
from tests.costs import Meter
from tests.xla import EIGHT_DEVICES

PROGRAMS = Path(__file__).parent.parent / '.pytest_cache' / 'programs'
MOST_BYTES = 4e9  # of programs that no code wants any more, too; a session leaves a tenth of it

os.environ |= {
    'JAX_PLATFORMS': 'cpu',
    'XLA_FLAGS': f'{os.environ.get("XLA_FLAGS", "")} {EIGHT_DEVICES}',
    'JAX_COMPILATION_CACHE_DIR': os.environ.get('JAX_COMPILATION_CACHE_DIR', str(PROGRAMS)),
    'JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS': '0.1',
    'JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES': '-1',
    'RAY_USAGE_STATS_ENABLED': '0',
    'RAY_worker_niceness': '0',  # 15 by default, behind all other tests
}
add_threads_for_collectives()  # after XLA_FLAGS, before JAX starts

import jax
import pytest

jax.config.update('jax_numpy_rank_promotion', 'raise')

MAPS = Path('/proc/self/maps')
MOST_MAPS = 30_000  # of the 65,530 that Linux gives a process by default; without one it dies
PROGRAMS_BETWEEN_LOOKS = 25  # some map hundreds; to read the list takes 10 ms

gc.disable()  # until all tests are collected: nothing of what imports make is garbage


def pytest_addoption(parser):
    parser.addoption('--long', action='store_true', help='tests/faults at length')
    parser.addoption('--costs', metavar='FILE', help='writes the CPU-seconds of each test')
    parser.addoption('--share', metavar='I/N', help='the I-th of N shares of the tests')


def pytest_generate_tests(metafunc):
    if marker := metafunc.definition.get_closest_marker('trials'):
        trials = marker.kwargs['long' if metafunc.config.getoption('long') else 'short']
        metafunc.parametrize('trial', range(trials))


@pytest.fixture
def is_long(request) -> bool:
    """Returns whether tests/faults run at length."""
    return request.config.getoption('long')


@pytest.fixture(scope='session')
def corpus(tmp_path_factory) -> dict[str, str]:
    """Returns a folder of small documents, and its own cache."""
    from tests.corpora import write_corpus

    return write_corpus(tmp_path_factory.mktemp('corpus'))


@pytest.fixture(scope='session')
def whole(corpus, tmp_path_factory) -> Path:
    """Returns the workdir of an uninterrupted run of `tests.commands.tiny`, which must not be
    changed.
    """
    from tests.commands import tiny
    from train import DONE, train

    workdir = tmp_path_factory.mktemp('whole') / 'run'
    assert train(tiny(corpus), workdir) == DONE
    return workdir


@pytest.fixture
def edited_sources(monkeypatch):
    """Lets this process run other sources from now on; returns their name from `describe_code`."""
    from lm.record import code

    monkeypatch.setattr(code, 'sources_digest', lambda root: 'e' * 16)
    monkeypatch.setattr(code, 'git_commit', lambda: 'd' * 40 + '-dirty')
    code.running_code.cache_clear()
    yield code.describe_code(code.running_code())
    code.running_code.cache_clear()


@pytest.fixture(scope='module')
def programs_once():
    """Runs of the module that train in this process build the program of a config once."""
    from tests.programs_once import programs_once

    with programs_once():
        yield


@pytest.fixture(scope='session')
def s3_port():
    """Returns the port of an object storage server."""
    from tests.object_store import server

    with server() as port:
        yield port


@pytest.fixture
def bucket_url(s3_port, tmp_path, monkeypatch) -> str:
    """Returns the URL of an empty path in a bucket, which this process may use."""
    from tests import object_store

    for name in object_store.variables():
        monkeypatch.delenv(name)
    for name, value in object_store.environment(s3_port, tmp_path / 'cache').items():
        monkeypatch.setenv(name, value)
    return f's3://{object_store.BUCKET}/{tmp_path.parent.name}/{tmp_path.name}'


@pytest.fixture
def gs_url(bucket_url, tmp_path, monkeypatch) -> str:
    """Returns the same for Google's storage, without asking a server of Google."""
    from tests import object_store

    with object_store.serving(object_store.Gcs) as address:
        monkeypatch.setenv('GOOGLE_BASE_URL', address)
        monkeypatch.setenv('GOOGLE_BEARER_TOKEN', 'any')
        yield bucket_url.replace('s3://', 'gs://')


@pytest.fixture
def nothing_is_traced():
    """Fails the test if JAX traces or compiles anything."""
    events = []

    def listen(event, duration, **_):
        del duration
        events.append(event)

    jax.monitoring.register_event_duration_secs_listener(listen)
    yield
    jax.monitoring.unregister_event_duration_listener(listen)
    assert not [event for event in events if 'compile' in event or 'trace' in event]


def pytest_configure(config):
    is_worker = hasattr(config, 'workerinput')
    written = None if is_worker else config.getoption('costs')
    config.pluginmanager.register(Meter(written), 'costs')
    config.pluginmanager.register(crashes)
    if share := config.getoption('share'):
        config.pluginmanager.register(Share(share), 'share')
    programs = [] if is_worker or not PROGRAMS.exists() else PROGRAMS.iterdir()
    if sum(path.stat().st_size for path in programs) > MOST_BYTES:
        shutil.rmtree(PROGRAMS)


# They take half a minute and more, most of it waiting, or minutes of one process: begun first, they
# end while others run.
LONGEST = (
    'kill_9',
    'killed_',
    'sigterm_ends_workers',
    'fine_tuned_then_folded',
    'every_command_works',
    'slices_exchange_each_device',
    'tutorial_works',
)


class Share:
    """Deselects the tests of other shares.

    The rows of a test go to each share in turn, from one that its name decides, so that no other
    test that comes or goes moves them. Tests that one process has to run stay together.
    """

    def __init__(self, share: str):
        numbers = share.split('/')
        if len(numbers) != 2 or not all(map(str.isdecimal, numbers)):
            raise pytest.UsageError(f'--share must be such as 1/2; got {share}')
        self.i, self.n = map(int, numbers)
        if not 1 <= self.i <= self.n:
            raise pytest.UsageError(f'--share=I/N has I from 1 to N; got {share}')

    @pytest.hookimpl(trylast=True)  # the marks have left out what is of another tier
    def pytest_collection_modifyitems(self, config, items):
        whole = {item: item.get_closest_marker('xdist_group') for item in items}
        names = {item: group.args[0] if group else item.nodeid for item, group in whole.items()}
        rows = collections.defaultdict(set)
        for name in names.values():
            rows[name.split('[')[0]].add(name)
        chosen = set()
        for test, names_of_rows in rows.items():
            first = (self.i - 1 - zlib.crc32(test.encode())) % self.n
            chosen.update(sorted(names_of_rows)[first :: self.n])
        deselected = [item for item in items if names[item] not in chosen]
        items[:] = [item for item in items if names[item] in chosen]
        config.hook.pytest_deselected(items=deselected)


@pytest.hookimpl(tryfirst=True)  # before pytest reads the marks, and xdist the groups
def pytest_collection_modifyitems(config, items):
    items.sort(key=lambda item: not any(name in item.name for name in LONGEST))
    rows = collections.defaultdict(set)
    for item in items:
        if shared := shared_by(item):
            item.add_marker(pytest.mark.xdist_group(shared))
        if marker := item.get_closest_marker('default_rows'):
            rows[item.function, marker.args].add(item.callspec.id)
            if item.callspec.id not in marker.args and not item.get_closest_marker('product'):
                item.add_marker(pytest.mark.full)
    for (function, default_ids), ids in rows.items():
        unknown = set(default_ids) - ids
        if unknown and not any('::' in argument for argument in config.args):
            name = f'{function.__module__}.{function.__qualname__}'
            raise pytest.UsageError(
                f'{name} has no rows {sorted(unknown)}, which its default_rows name; it has '
                f'{sorted(ids)}.'
            )


def shared_by(item) -> str | None:
    """Returns the group of tests that one process has to run, so that shared fixtures are made
    once.

    A group has the tests of a module or class with a common fixture of it, or the tests of the run
    `whole`.
    """
    if item.get_closest_marker('xdist_group'):
        return None
    scopes = {name: f[-1].scope for name, f in item._fixtureinfo.name2fixturedefs.items()}
    if scopes.get('whole') == 'session':
        return 'whole'
    return item.module.__name__ if {'module', 'class'} & set(scopes.values()) else None


def pytest_collection_finish(session):
    """Exempts modules, tests and parameters from garbage collection.

    Raises UsageError if this version of pytest-xdist groups no tests, which it does not report:
    fixtures would be made twice.
    """
    grouped = [item for item in session.items if item.get_closest_marker('xdist_group')]
    is_worker = getattr(session.config.option, 'loadgroup', False)
    if is_worker and not all('@' in item.nodeid for item in grouped):
        raise pytest.UsageError(
            'pytest-xdist does not group tests under this version of pytest; run `uv sync`.'
        )
    gc.freeze()  # with the little garbage there is: to look for it is a tenth of collecting tests
    gc.enable()
    atexit.register(gc.unfreeze)  # pytest collects five times before; nanobind misses what is left


@pytest.fixture(scope='session')
def programs_compiled() -> list[int]:
    """Returns the number of programs that this process has compiled since the number was last set
    to 0.
    """
    count = [0]

    def listen(event, duration, **_):
        del duration
        count[0] += event == '/jax/core/compile/backend_compile_duration'

    jax.monitoring.register_event_duration_secs_listener(listen)
    return count


@pytest.fixture(autouse=True)
def room_for_programs(programs_compiled):
    """Frees compiled programs: each maps memory, and hundreds of them exceed a process's limit."""
    yield
    if programs_compiled[0] < PROGRAMS_BETWEEN_LOOKS:
        return
    programs_compiled[0] = 0
    if MAPS.exists() and MAPS.read_bytes().count(b'\n') > MOST_MAPS:
        jax.clear_caches()
