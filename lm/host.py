"""What the process asks of the machine it runs on, before JAX starts."""

import ctypes
import glob
import os
import platform
import resource
import subprocess
from importlib import metadata
from pathlib import Path

import jax

PACKAGES = ('evenkeel', 'jax', 'jaxlib', 'flax', 'optax', 'orbax-checkpoint', 'grain', 'numpy')

# glibc's mallopt parameters (malloc.h)
_M_TRIM_THRESHOLD, _M_MMAP_MAX, _M_ARENA_MAX = -1, -4, -8


def prepare_host() -> None:
    """To be called before the first JAX computation: picks the CPU where there is nothing else, and
    keeps freed memory.
    """
    if 'JAX_PLATFORMS' not in os.environ and not _has_accelerator():
        # Otherwise an installed libtpu or CUDA plugin looks for its device and warns at length.
        jax.config.update('jax_platforms', 'cpu')
    keep_freed_memory()


def keep_freed_memory() -> bool:
    """Has malloc keep what is freed, for the next step to use again; whether it could.

    XLA:CPU allocates its temporaries anew in every step. By default glibc returns blocks that large
    to the kernel, which hands them back page by page, zeroed: 190,000 page faults a step at width
    256, a third of its time. Peak memory stays the same. Only glibc has this; elsewhere it does
    nothing.
    """
    if platform.libc_ver()[0] != 'glibc':
        return False
    mallopt = ctypes.CDLL(None).mallopt
    never = 2**31 - 1
    return all(
        [mallopt(_M_MMAP_MAX, 0), mallopt(_M_TRIM_THRESHOLD, never), mallopt(_M_ARENA_MAX, 1)]
    )


def _has_accelerator() -> bool:
    files = ('/dev/accel*', '/dev/vfio/[0-9]*', '/dev/nvidia[0-9]*', '/dev/kfd')
    return any(glob.glob(pattern) for pattern in files) or platform.system() == 'Darwin'


def peak_memory_bytes() -> int:
    """Of the first device, where it counts; of this process otherwise."""
    stats = jax.local_devices()[0].memory_stats() or {}
    if 'peak_bytes_in_use' in stats:
        return stats['peak_bytes_in_use']
    unit = 1 if platform.system() == 'Darwin' else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def versions() -> dict[str, str]:
    return {'python': platform.python_version()} | {
        name: metadata.version(name) for name in PACKAGES
    }


def git_commit() -> str:
    """The commit of this checkout, '-dirty' where files differ from it; 'unknown' without git."""
    command = [
        'git',
        '-C',
        str(Path(__file__).parent),
        'describe',
        '--always',
        '--dirty',
        '--abbrev=40',
    ]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=10, check=True)
    except (OSError, subprocess.SubprocessError):
        return 'unknown'
    return done.stdout.strip()


def device_name() -> str:
    """Such as '8 x TPU v5e' or '2-core x86_64 CPU'."""
    device, count = jax.devices()[0], jax.device_count()
    if device.platform == 'cpu':
        cores = len(os.sched_getaffinity(0)) if hasattr(os, 'sched_getaffinity') else os.cpu_count()
        return f'{cores}-core {platform.machine()} CPU' + (f' as {count} devices' * (count > 1))
    return f'{count} x {device.device_kind}'
