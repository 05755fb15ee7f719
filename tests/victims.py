"""A run in a bucket that is killed by SIGKILL before it writes the mark of the checkpoint of step
8, with all its data written, and with the checkpoint of step 4 complete:

    python -m tests.victims URL SOURCE CACHE_DIR
"""

import os
import signal
import sys
import time

from lm.record.remote.mirror import mirror_workdir
from lm.run.wave import Wave
from lm.storage.buckets import Bucket
from lm.storage.complete_folders import MARK
from tests.commands import tiny
from train import train


def main(url: str, source: str, cache_dir: str) -> None:
    write, dispatch, written = Bucket.write, Wave.dispatch, []

    def killing(bucket, name, content):
        if name == f'checkpoints/8/{MARK}':
            os.kill(os.getpid(), signal.SIGKILL)
        stored = write(bucket, name, content)
        written.append(name)
        return stored

    def waiting(wave):
        """Waits, since a tiny model is faster than the bucket."""
        for step in (4, 8):
            mark = f'checkpoints/{step}/{MARK}'
            while wave.slots[0].journal.step == step + 1 and mark not in written:
                time.sleep(0.02)
        dispatch(wave)

    Bucket.write, Wave.dispatch = killing, waiting
    with mirror_workdir(url) as workdir:
        train(tiny({'data.source': source, 'data.cache_dir': cache_dir}), workdir)


if __name__ == '__main__':
    main(*sys.argv[1:])
