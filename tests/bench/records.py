"""Cost of digests and syncs in a run of the default config, on this machine and in one run.

    uv run python -m tests.bench.records

Each action is timed alone, several times; the median, times its count per run, is compared with the
time that the run trains meanwhile. Digests and syncs of rows happen between two steps; files of a
checkpoint are synced by the thread that writes them. The first digest of a process compiles.
"""

from lm.launch.before_jax import prepare_process

if __name__ == '__main__':
    prepare_process()

import contextlib
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import jax

from configs import default
from lm.config.resolve import resolve, to_dict
from lm.launch.terminal import Terminal
from lm.record import digests
from lm.record.checkpoints import Checkpoints
from lm.record.metrics import Recorder
from lm.run.program import Experiment, Program, open_text
from lm.run.runs import RunSpec
from lm.run.wave import Wave

TIMES, STEPS, WARMUP_STEPS = 15, 10, 5
ROW = dict.fromkeys(('loss', 'ce', 'z_loss', 'lr', 'grad_norm', 'update_norm', 'tokens'), 1.2345678)


def seconds(act: Callable[[], None]) -> float:
    """Returns the median of TIMES."""
    samples = []
    for _ in range(TIMES):
        start = time.perf_counter()
        act()
        samples.append(time.perf_counter() - start)
    return statistics.median(samples)


def step_seconds(wave: Wave) -> float:
    for _ in range(WARMUP_STEPS):
        wave.dispatch()
    wave.fetch_pending()
    start = time.perf_counter()
    for _ in range(STEPS):
        wave.dispatch()
    wave.fetch_pending()
    return (time.perf_counter() - start) / STEPS


def main() -> None:
    config = resolve(default.get_config())
    with tempfile.TemporaryDirectory() as folder:
        workdir = Path(folder)
        program = Program(Experiment(config, open_text(config, print), print))
        run = RunSpec(config, workdir / 'run', Terminal())
        run.folder.mkdir()
        with contextlib.closing(Wave(program, [run], size=1)) as wave:
            wave.compile()
            wave.slots[0].journal.open()
            step_sec = step_seconds(wave)
            state = wave.take_state(0)
            start = time.perf_counter()
            digests.hash_arrays(state)
            first = time.perf_counter() - start
            digest = seconds(lambda: digests.hash_arrays(state))
        recorder = Recorder(workdir, 0, None, print)
        row = seconds(lambda: recorder.write({'step': 1, **ROW}))

        def written_and_synced():
            recorder.write({'step': 1, **ROW})
            recorder.sync()

        sync_rows = seconds(written_and_synced) - row
        synced = []
        sync = Checkpoints._sync

        def timed_sync(checkpoints):
            start = time.perf_counter()
            sync(checkpoints)
            synced.append(time.perf_counter() - start)

        Checkpoints._sync = timed_sync
        checkpoints = Checkpoints(workdir / 'again', 1, 0)
        for _ in range(3):
            state = state.replace(step=state.step + 1)
            checkpoints.save(state, {'config': to_dict(config), 'counters': {}}, None)
            checkpoints.wait()
        checkpoints.close()
    n_bytes = sum(leaf.nbytes for leaf in jax.tree.leaves(state))
    between_saves = config.train.checkpoint_every * step_sec
    between_rows = config.train.log_every * step_sec
    print(f'step {step_sec * 1e3:.0f} ms; {n_bytes / 1e6:.0f} MB in a checkpoint')
    print('| act | ms | each | share of the time |\n|---|---|---|---|')
    for name, sec, interval in (
        ('digests of all arrays', digest, between_saves),
        ('rows synced before a checkpoint', sync_rows, between_saves),
        ('files of a checkpoint synced, in the background', max(synced), between_saves),
        ('a row written, with its TensorBoard event', row, between_rows),
    ):
        print(f'| {name} | {sec * 1e3:.2f} | {interval:.0f} s | {sec / interval:.4%} |')
    total = (digest + sync_rows) / between_saves + row / between_rows
    print(f'between steps, together: {total:.4%}; once a process: {first * 1e3:.0f} ms to compile')


if __name__ == '__main__':
    main()
