"""Tests run on the CPU, seen as eight devices, whatever the machine has."""

import os

os.environ['JAX_PLATFORMS'] = 'cpu'
os.environ['XLA_FLAGS'] = (
    os.environ.get('XLA_FLAGS', '') + ' --xla_force_host_platform_device_count=8'
)

import jax

jax.config.update('jax_numpy_rank_promotion', 'raise')
