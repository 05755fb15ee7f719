"""The environment of a process that compiles for other devices, set before JAX is imported.

This module needs only the standard library.
"""

import os

HERE = 'here'  # the topology of the local devices
# With these, JAX neither searches for devices nor holds any.
COMPILE_ONLY_ENV = {
    'JAX_PLATFORMS': 'cpu',
    'TPU_SKIP_MDS_QUERY': '1',
    'ALLOW_MULTIPLE_LIBTPU_LOAD': 'true',  # other processes may compile at the same time
    'CUDA_VISIBLE_DEVICES': '-1',
    'JAX_ENABLE_COMPILATION_CACHE': 'false',  # the cache cannot load programs for absent devices
    # Otherwise libtpu queries the machine for these, and complains if it has no TPU.
    'TPU_WORKER_HOSTNAMES': 'localhost',
    'TPU_ACCELERATOR_TYPE': 'v5p-8',
}


def prepare_environment() -> None:
    """Sets the variables of COMPILE_ONLY_ENV."""
    os.environ.update(COMPILE_ONLY_ENV)
