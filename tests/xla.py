"""XLA's flags in tests. Importing this imports nothing: JAX reads the flags when it starts.

Nothing is optimised, as nearly every program runs once. All processes of a test have the same
level, so that their numbers are bitwise equal.
"""

ONE_DEVICE = '--xla_backend_optimization_level=0'
EIGHT_DEVICES = f'{ONE_DEVICE} --xla_force_host_platform_device_count=8'
