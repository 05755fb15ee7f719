"""Prepares a process before it imports JAX. Uses only the standard library, so that importing it is
cheap.
"""

import ast
import codecs
import contextlib
import glob
import importlib.util
import inspect
import locale
import os
import platform
import re
import signal
import sys
import textwrap
from typing import Any

from lm.launch.streams import open_streams

# glibc's malloc returns large blocks to the kernel as soon as they are freed, and gets them back
# page by page, zeroed. XLA:CPU frees and allocates all its temporaries in every step: 190,000 page
# faults per step at width 256, a third of its time. With these settings freed memory is kept, in
# pages of 2 MiB. They are read once, when a process starts.
TUNABLES = (
    'glibc.malloc.hugetlb=1',
    'glibc.malloc.mmap_max=0',
    f'glibc.malloc.trim_threshold={2**62}',
    'glibc.malloc.arena_max=1',
)
THREADS_PER_DEVICE = 16  # of virtual devices; with 4, one of 13 test runs still ended
ACCELERATORS = (  # name, device files, packages of which JAX needs at least one, our extra
    ('an NVIDIA GPU', '/dev/nvidia[0-9]*', ('jax_cuda13_plugin', 'jax_cuda12_plugin'), 'cuda'),
    ('a TPU', '/dev/accel[0-9]*', ('libtpu',), 'tpu'),
)


def print_help() -> None:
    """Prints the docstring of the program and exits, if --help is given."""
    if {'-h', '-help', '--help'} & {*sys.argv[1:]}:
        print(docstring(sys.modules['__main__']))
        sys.exit()


def prepare_process() -> None:
    """Selects JAX's CPU platform on a machine without accelerator, and suits malloc to XLA:CPU.

    The settings of malloc (`TUNABLES`) are read when a process starts, so the process restarts
    itself in place. JAX_PLATFORMS and GLIBC_TUNABLES keep values that the user has set. Calls
    `prepare_streams`. SIGINT ends the process with one line, until the caller sets another handler.
    """
    prepare_streams()
    signal.signal(signal.SIGINT, _exit_on_sigint)
    choose_platform()
    add_threads_for_collectives()
    if os.environ.get('JAX_PLATFORMS') != 'cpu' or platform.libc_ver()[0] != 'glibc':
        return
    if 'GLIBC_TUNABLES' not in os.environ:
        os.environ['GLIBC_TUNABLES'] = ':'.join(TUNABLES)
        _restart()


def prepare_streams() -> None:
    """Gives the process standard streams that never fail, and Python's UTF-8 mode.

    If the locale has another encoding, the process restarts itself in place in UTF-8 mode, because
    our files are UTF-8 and training text is in all languages. Printed text keeps the encoding of
    the locale.
    """
    open_streams()
    is_utf8 = codecs.lookup(locale.getencoding()).name == 'utf-8' or sys.flags.utf8_mode
    if not is_utf8 and os.environ.get('PYTHONUTF8') != '1':  # python -E would restart for ever
        os.environ['PYTHONUTF8'] = '1'
        os.environ.setdefault('PYTHONIOENCODING', sys.stdout.encoding)
        _restart()


def _restart() -> None:
    """Replaces this process by the same command, which keeps its process id."""
    os.execv(sys.executable, [sys.executable, *sys.orig_argv[1:]])


def docstring(owner: Any) -> str:
    """Returns the docstring of a module, class or function without its indentation; '' without one.

    Under `python -OO`, which strips docstrings, it comes from the source. A class does not inherit
    a docstring.
    """
    text = owner.__dict__.get('__doc__') if isinstance(owner, type) else owner.__doc__
    if sys.flags.optimize >= 2:  # a dataclass without docstring has its signature there
        with contextlib.suppress(OSError, TypeError):  # objects that have no source
            parsed = ast.parse(textwrap.dedent(inspect.getsource(owner)))
            node: Any = parsed if inspect.ismodule(owner) else parsed.body[0]
            text = ast.get_docstring(node)
    return inspect.cleandoc(text or '')


def choose_platform() -> None:
    """Selects JAX's CPU platform on a machine without accelerator, unless the user has chosen a
    platform.

    Otherwise an installed libtpu or CUDA plugin looks for its device and prints long warnings.
    """
    if not has_accelerator():
        platforms, jax = os.environ.setdefault('JAX_PLATFORMS', 'cpu'), sys.modules.get('jax')
        if jax and not jax.config.jax_platforms:  # JAX reads the environment only when imported
            jax.config.update('jax_platforms', platforms)


def add_threads_for_collectives() -> None:
    """Gives XLA:CPU enough threads for virtual devices, unless the user has set NPROC.

    XLA:CPU has one thread per device, or per core if there are more. A collective blocks its
    thread, and a program that comes from the compile cache begins independent collectives at once.
    They may take all threads while they wait for another device, which then finds none: XLA ends
    the process after 40 seconds.
    """
    threads = THREADS_PER_DEVICE * count_virtual_devices()
    if threads > THREADS_PER_DEVICE:
        os.environ.setdefault('NPROC', str(max(threads, os.cpu_count() or 1)))


def count_virtual_devices() -> int:
    """Returns the number of devices as which the user has asked to see the CPU, or 1."""
    pattern = r'--xla_force_host_platform_device_count=(\d+)'
    counts = re.findall(pattern, os.environ.get('XLA_FLAGS', ''))
    counts += re.findall(r'^\d+$', os.environ.get('JAX_NUM_CPU_DEVICES', ''))
    return max(map(int, counts), default=1)


def missing_plugin_advice() -> str:
    """Returns what to install if JAX lacks the plugin for a GPU or TPU of this machine.

    Returns '' if no plugin is missing, and if the user has set JAX_PLATFORMS.
    """
    if os.environ.get('JAX_PLATFORMS'):
        return ''
    for name, files, packages, extra in ACCELERATORS:
        if glob.glob(files) and not any(map(importlib.util.find_spec, packages)):
            return (
                f'this machine has {name}, but JAX has no plugin for it. Install it with `uv sync '
                f'--extra {extra}`. To train on the CPU, put JAX_PLATFORMS=cpu before the command.'
            )
    return ''


def default_dtype() -> str:
    """Returns the dtype of matrix products if the config leaves it open.

    It is bfloat16 on a machine with a TPU or GPU that JAX will use, and float32 on CPUs, which have
    no units for bfloat16.
    """
    platforms = os.environ.get('JAX_PLATFORMS')
    needed = [name for _, _, packages, _ in ACCELERATORS for name in packages]
    # Only looked for, not imported: JAX must not start before the process is prepared.
    is_fast = has_accelerator() and any(map(importlib.util.find_spec, needed))
    is_fast = is_fast and not missing_plugin_advice()  # libtpu is of no use to a GPU
    if platforms:
        is_fast = not platforms.startswith('cpu')
    return 'bfloat16' if is_fast else 'float32'


def _exit_on_sigint(number, _) -> None:
    """Handles SIGINT before anything has begun."""
    os.write(2, b'\nSIGINT: stopped before the start. Run the same command to start again.\n')
    os._exit(128 + number)


def has_accelerator() -> bool:
    """Whether there is a device file of a TPU or GPU."""
    files = ('/dev/accel*', '/dev/vfio/[0-9]*', '/dev/nvidia[0-9]*', '/dev/kfd', '/dev/dxg')
    return any(glob.glob(pattern) for pattern in files) or platform.system() == 'Darwin'
