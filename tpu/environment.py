"""Environment of a process that compiles for other devices, set before JAX. Standard library."""

import os

HERE = 'here'  # the devices at hand
# No device is looked for, and none is held.
COMPILE_ONLY_ENV = {
    'JAX_PLATFORMS': 'cpu',
    'TPU_SKIP_MDS_QUERY': '1',
    'ALLOW_MULTIPLE_LIBTPU_LOAD': 'true',  # others may compile meanwhile
    'CUDA_VISIBLE_DEVICES': '-1',
    'JAX_ENABLE_COMPILATION_CACHE': 'false',  # it cannot read such programs again
    # libtpu would ask the machine for these, and complain where it is no TPU's.
    'TPU_WORKER_HOSTNAMES': 'localhost',
    'TPU_ACCELERATOR_TYPE': 'v5p-8',
}


def prepare_environment() -> None:
    os.environ.update(COMPILE_ONLY_ENV)
