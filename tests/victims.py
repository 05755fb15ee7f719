"""A run in a bucket that is killed by SIGKILL when it is about to write the mark of the checkpoint
of that step, whose data are all there:

    python -m tests.victims URL SOURCE CACHE_DIR STEP
"""

import os
import signal
import sys

import jax

from lm.buckets import Bucket
from lm.run.mirrored import mirrored
from lm.whole import MARK
from tests.commands import tiny
from train import train


def main(url: str, source: str, cache_dir: str, step: str) -> None:
    write = Bucket.write

    def killing(bucket, name, content):
        if name == f'checkpoints/{step}/{MARK}':
            os.kill(os.getpid(), signal.SIGKILL)
        return write(bucket, name, content)

    Bucket.write = killing
    with mirrored(url) as workdir:
        train(tiny({'data.source': source, 'data.cache_dir': cache_dir}), workdir)


if __name__ == '__main__':
    jax.config.update('jax_num_cpu_devices', 1)
    main(*sys.argv[1:])
