"""A run in a bucket that is killed by SIGKILL at a moment of its own:

    python -m tests.victims URL SOURCE CACHE_DIR marking|marked STEP

when it is about to write the mark of the checkpoint of that step, whose data are all there, or once
it has.
"""

import os
import signal
import sys
import time

import jax

from lm.buckets import Bucket
from lm.run.mirrored import mirrored
from lm.run.wave import Wave
from tests.commands import tiny
from train import train


def main(url: str, source: str, cache_dir: str, when: str, step: str) -> None:
    write, dispatch = Bucket.write, Wave.dispatch
    mark = f'checkpoints/{step}/.whole'

    def killing(bucket, name, content):
        if name == mark and when == 'marking':
            os.kill(os.getpid(), signal.SIGKILL)
        found = write(bucket, name, content)
        if name == mark:
            os.kill(os.getpid(), signal.SIGKILL)
        return found

    def waiting(wave):
        """The bucket is slower than a tiny model: the next step comes after it."""
        while wave.slots[0].journal.step == int(step) + 1:
            time.sleep(0.05)
        dispatch(wave)

    Bucket.write, Wave.dispatch = killing, waiting
    with mirrored(url) as workdir:
        train(tiny({'data.source': source, 'data.cache_dir': cache_dir}), workdir)


if __name__ == '__main__':
    jax.config.update('jax_num_cpu_devices', 1)
    main(*sys.argv[1:])
