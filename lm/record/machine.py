"""The machine and the software that made a record."""

import platform
import resource
import subprocess
import tomllib
from importlib import metadata
from pathlib import Path
from typing import Any

import jax
import psutil

from lm.launch.thread_limit import count_cores

ROOT = Path(__file__).parents[2]  # the checkout, or the folder of installed packages
UNKNOWN = 'unknown'  # a version, or a commit
PACKAGES = ('evenkeel', 'jax', 'jaxlib', 'flax', 'optax', 'orbax-checkpoint', 'grain', 'numpy')


def peak_memory_bytes() -> int:
    """Returns the peak memory of the first device, or of this process if it is not counted."""
    stats = jax.local_devices()[0].memory_stats() or {}
    if 'peak_bytes_in_use' in stats:
        return stats['peak_bytes_in_use']
    unit = 1 if platform.system() == 'Darwin' else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def device_memory_bytes() -> int:
    """Returns the memory limit of the first device; on a CPU, nine tenths of the free memory."""
    stats = jax.local_devices()[0].memory_stats() or {}
    return stats.get('bytes_limit', psutil.virtual_memory().available * 9 // 10)


def versions() -> dict[str, str]:
    """Returns the versions of Python and of `PACKAGES`, by name."""
    packages = {name: package_version(name) for name in PACKAGES}
    return {'python': platform.python_version()} | packages


def package_version(name: str) -> str:
    """Returns the version of a package; 'unknown' if it has no metadata.

    This project may run from a checkout that is not installed; its version is then read from
    pyproject.toml.
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
    """Returns the commit of this checkout, with '-dirty' if files differ; 'unknown' without git."""
    command = ['git', 'describe', '--always', '--dirty', '--abbrev=40']
    options: dict[str, Any] = {'cwd': Path(__file__).parent, 'timeout': 10, 'text': True}
    try:
        return subprocess.check_output(command, stderr=subprocess.DEVNULL, **options).strip()
    except (OSError, subprocess.SubprocessError):
        return UNKNOWN


def device_name() -> str:
    """Returns a name such as '8 x TPU v5e' or '2-core x86_64 CPU'."""
    device, count = jax.devices()[0], jax.device_count()
    if device.platform == 'cpu':
        return f'{count_cores()}-core {platform.machine()} CPU' + (
            f' as {count} devices' * (count > 1)
        )
    return f'{count} x {device.device_kind}'
