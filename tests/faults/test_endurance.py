"""Long runs: memory, files and threads stay as they are, and checkpoints follow their rules."""

import math
import random
import time

import numpy as np
import psutil
import pytest
from scipy import stats

from lm.record.checkpoints import Checkpoints
from tests.commands import start_run, wait_for_command, wait_for_step
from tests.lm.record.test_checkpoints import META, state
from tests.sweep_helpers import write_corpus
from train import DONE

GROWTH_MB = 20  # of memory, after the first steps
WARM_SHARE = 0.3  # of steps, after which memory should stay level


@pytest.mark.full
@pytest.mark.timeout(7200)
def test_memory_stays_level(is_long, tmp_path):
    """The long form makes 200,000 steps, otherwise 3,000. Catches a list that grows with steps."""
    steps = 200_000 if is_long else 3_000
    process = start_run(
        tmp_path / 'run',
        write_corpus(tmp_path),
        train_steps=steps,
        train_log_every=steps // 200,
        train_eval_every=steps // 20,
        train_checkpoint_every=steps // 20,
        data_epochs=10**6,
        model_n_layers=1,
    )
    wait_for_step(tmp_path / 'run', int(WARM_SHARE * steps), process)
    samples, program = [], psutil.Process(process.pid)
    while process.poll() is None:
        try:
            samples.append(
                (program.memory_info().rss / 1e6, program.num_fds(), program.num_threads())
            )
        except psutil.NoSuchProcess:
            break
        time.sleep(0.1)
    code, stdout = wait_for_command(process)
    assert code == DONE, stdout
    rss, files, threads = np.array(samples[:-2], float).T
    fit = stats.linregress(range(len(rss)), rss)
    growth_mb, error_mb = (len(rss) * x for x in (fit.slope, fit.stderr))
    print(
        f'{steps} steps: {growth_mb:+.1f} MB (standard error {error_mb:.1f}) of '
        f'{rss.mean():.0f}, {files.min():.0f} to {files.max():.0f} files, '
        f'{threads.min():.0f} to {threads.max():.0f} threads'
    )
    assert growth_mb < GROWTH_MB
    quarter = len(files) // 4
    for counts in (files, threads):
        # Not the most: a checkpoint that is being written opens some twenty files for a moment.
        assert np.median(counts[-quarter:]) <= np.median(counts[:quarter]) + 2


@pytest.mark.full
@pytest.mark.timeout(7200)
def test_many_checkpoints_follow_rules(is_long, tmp_path):
    """The newest two, the three best by finite loss, and the permanent ones stay."""
    n, rng, losses = 1000 if is_long else 30, random.Random(0), {}
    permanent = set(range(0, n, 50 if is_long else 7))
    checkpoints = Checkpoints(tmp_path, 2, 3, permanent_steps=permanent)
    for step in range(1, n + 1):
        losses[step] = rng.choice((None, math.nan, rng.gauss(3, 1)))
        checkpoints.save(state(step), META, losses[step])
        if step % 10 == 0:
            checkpoints.wait()
            finite = [s for s in losses if losses[s] is not None and math.isfinite(losses[s])]
            best = sorted(finite, key=losses.__getitem__)[:3]
            expected = {step - 1, step, *best, *(permanent & losses.keys())}
            assert set(checkpoints.steps()) == expected, step
    checkpoints.close()
