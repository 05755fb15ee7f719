"""What a record says of the machine and the software it was made with."""

import os
import platform
import resource
import subprocess
from importlib import metadata
from pathlib import Path

import jax
import psutil

PACKAGES = ('evenkeel', 'jax', 'jaxlib', 'flax', 'optax', 'orbax-checkpoint', 'grain', 'numpy')


def peak_memory_bytes() -> int:
    """Of the first device, where it counts; of this process otherwise."""
    stats = jax.local_devices()[0].memory_stats() or {}
    if 'peak_bytes_in_use' in stats:
        return stats['peak_bytes_in_use']
    unit = 1 if platform.system() == 'Darwin' else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def device_memory_bytes() -> int:
    """What a program may use of the first device, where it says so; on a CPU, of the memory that
    is free now, nine tenths.
    """
    stats = jax.local_devices()[0].memory_stats() or {}
    if 'bytes_limit' in stats:
        return stats['bytes_limit']
    return psutil.virtual_memory().available * 9 // 10


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
