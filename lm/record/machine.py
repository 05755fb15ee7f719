"""The machine and the software that a record was made with."""

import os
import platform
import resource
import subprocess
import tomllib
from importlib import metadata
from pathlib import Path

import jax
import psutil

ROOT = Path(__file__).parents[2]  # the checkout, or the folder that packages are installed in
UNKNOWN = 'unknown'  # a version, or a commit
PACKAGES = ('evenkeel', 'jax', 'jaxlib', 'flax', 'optax', 'orbax-checkpoint', 'grain', 'numpy')


def peak_memory_bytes() -> int:
    """Returns the peak of the first device if it counts, otherwise that of this process."""
    stats = jax.local_devices()[0].memory_stats() or {}
    if 'peak_bytes_in_use' in stats:
        return stats['peak_bytes_in_use']
    unit = 1 if platform.system() == 'Darwin' else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def device_memory_bytes() -> int:
    """Returns the limit of the first device; on a CPU nine tenths of the memory that is free."""
    stats = jax.local_devices()[0].memory_stats() or {}
    return stats.get('bytes_limit', psutil.virtual_memory().available * 9 // 10)


def versions() -> dict[str, str]:
    packages = {name: package_version(name) for name in PACKAGES}
    return {'python': platform.python_version()} | packages


def package_version(name: str) -> str:
    """Returns the version of a package, 'unknown' where it has no metadata; of this project, which
    may run from a checkout that is not installed, the one in pyproject.toml.
    """
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        pass
    try:
        project = tomllib.loads((ROOT / 'pyproject.toml').read_text())['project']
    except (OSError, ValueError, KeyError):
        return UNKNOWN
    return project['version'] if project.get('name') == name else UNKNOWN


def git_commit() -> str:
    """Returns the commit of this checkout, '-dirty' if files differ; 'unknown' without git."""
    command = ['git', 'describe', '--always', '--dirty', '--abbrev=40']
    how = {'cwd': Path(__file__).parent, 'timeout': 10, 'text': True}
    try:
        return subprocess.check_output(command, stderr=subprocess.DEVNULL, **how).strip()
    except (OSError, subprocess.SubprocessError):
        return UNKNOWN


def device_name() -> str:
    """Returns, for instance, '8 x TPU v5e' or '2-core x86_64 CPU'."""
    device, count = jax.devices()[0], jax.device_count()
    if device.platform == 'cpu':
        cores = len(os.sched_getaffinity(0)) if hasattr(os, 'sched_getaffinity') else os.cpu_count()
        return f'{cores}-core {platform.machine()} CPU' + (f' as {count} devices' * (count > 1))
    return f'{count} x {device.device_kind}'
