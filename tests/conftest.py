"""Tests run on the CPU, seen as eight devices, whatever the machine has."""

import os
from pathlib import Path

os.environ['JAX_PLATFORMS'] = 'cpu'
os.environ['XLA_FLAGS'] = (
    os.environ.get('XLA_FLAGS', '') + ' --xla_force_host_platform_device_count=8'
)

import jax
import pytest

jax.config.update('jax_numpy_rank_promotion', 'raise')

MAPS = Path('/proc/self/maps')
MOST_MAPS = 20_000  # of the 65,530 that Linux gives a process by default


@pytest.fixture(autouse=True)
def room_for_programs():
    """Each compiled program maps memory: hundreds of them are more than a process may."""
    yield
    if MAPS.exists() and MAPS.read_bytes().count(b'\n') > MOST_MAPS:
        jax.clear_caches()
