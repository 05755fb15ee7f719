"""The curves of `tests.bench.growth`: each part of the project over the size of its input.

Sizes are chosen so that a curve takes a minute or two on two cores, and that its last sizes show
how it grows in the limit. Sweeps of many cells are not trained: their records are written by the
functions that training writes them with (`write_sweep`).
"""

import asyncio
import contextlib
import dataclasses
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from tests.bench.growth_sweeps import make_tree, many_rates, many_variants, train_cell, write_sweep

STEPS, WARMUP_STEPS = 5, 2
WIDTH, HEAD_DIM, LENGTH, VOCAB = 256, 64, 256, 1024


@dataclasses.dataclass(frozen=True)
class Point:
    """A measurement.

    seconds: by part. work: of parts, in any unit that is the same over a curve; that of the others
    is the size.
    """

    size: int
    seconds: dict[str, float]
    work: dict[str, float] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True)
class Curve:
    """Sizes, and a function that yields a `Point` for each."""

    sizes: tuple[int, ...]
    measure: Callable[[Sequence[int]], Iterator[Point]]


class Stopwatch:
    """Measures blocks by name: with stopwatch('part'): ..."""

    def __init__(self):
        self.seconds: dict[str, float] = {}

    @contextlib.contextmanager
    def __call__(self, part: str) -> Iterator[None]:
        start = time.perf_counter()
        yield
        self.seconds[part] = time.perf_counter() - start


@contextlib.contextmanager
def scratch() -> Iterator[Path]:
    with tempfile.TemporaryDirectory() as name:
        yield Path(name)


def build_shape(**sizes: int) -> tuple[int, ...]:
    """Returns (width, heads, layers, MLP width, row length, vocabulary, rows) of a model."""
    width = sizes.get('width', WIDTH)
    layers, length = sizes.get('layers', 2), sizes.get('length', LENGTH)
    last = sizes.get('vocabulary', VOCAB), sizes.get('rows', 4)
    return width, max(1, width // HEAD_DIM), layers, 4 * width, length, *last


def time_steps(shape: tuple[int, ...], changes: dict | None = None) -> tuple[float, float, float]:
    """Returns (FLOPs of a step, median seconds of a step, seconds to trace and compile it)."""
    import jax

    from lm.training.flops import flops_per_token
    from tests.bench.step import bench_learner, evenkeel_step

    state, step, compile_sec = evenkeel_step(shape, changes)
    seconds = []
    for _ in range(WARMUP_STEPS + STEPS):
        start = time.perf_counter()
        state, metrics = step(state)
        jax.block_until_ready((state, metrics))
        seconds.append(time.perf_counter() - start)
    flops = flops_per_token(bench_learner(shape, changes)) * shape[4] * shape[6]
    return flops, statistics.median(seconds[WARMUP_STEPS:]), compile_sec


def measure_steps(field: str) -> Callable[[Sequence[int]], Iterator[Point]]:
    """Returns the measurement of a training step over a size of `build_shape`."""

    def measure(sizes: Sequence[int]) -> Iterator[Point]:
        for size in sizes:
            flops, step_sec, _ = time_steps(build_shape(**{field: size}))
            yield Point(size, {'step': step_sec}, {'step': flops})

    return measure


def measure_depth(sizes: Sequence[int]) -> Iterator[Point]:
    """Measures steps of layers in a scan, and unrolled. Compiling a scan is no work of the depth,
    and may take no longer than unrolled layers.
    """
    for layers in sizes:
        shape, seconds, work = build_shape(layers=layers, width=128), {}, {'compile, scanned': 1.0}
        for name, is_scanned in (('scanned', True), ('unrolled', False)):
            changes = {'model.scan_layers': is_scanned}
            flops, seconds[f'step, {name}'], compile_sec = time_steps(shape, changes)
            seconds[f'compile, {name}'], work[f'step, {name}'] = compile_sec, flops
        yield Point(layers, seconds, work)


def measure_kinds(sizes: Sequence[int]) -> Iterator[Point]:
    """Measures compiling blocks that all differ in the window of their attention."""
    for kinds in sizes:
        blocks = [f'softmax:window={16 + i}' for i in range(kinds)]
        changes = {'model.pattern': '+'.join(blocks), 'model.scan_layers': True}
        shape = build_shape(layers=2 * kinds, width=128)
        _, _, compile_sec = time_steps(shape, changes if kinds > 1 else None)
        yield Point(kinds, {'compile': compile_sec})


def measure_runs(sizes: Sequence[int]) -> Iterator[Point]:
    """Measures a sweep of runs that train side by side, of a tiny model."""
    from lm.launch.terminal import CellTerminal
    from lm.run.runs import RunSpec
    from lm.run.wave import Wave, closing
    from lm.study.plan.cells import expand_sweep
    from lm.study.train.groups import Work, compile_program
    from tests.corpora import write_corpus

    def discard(text: str) -> None:
        del text

    for runs in sizes:
        with scratch() as folder:
            (folder / 'text').mkdir()
            tree = make_tree(write_corpus(folder / 'text'))
            cells = expand_sweep(tree, many_rates(runs))
            work, watch = Work([cells], folder / 'sweep', [], discard), Stopwatch()
            with watch('compile'):
                program, slots = compile_program(cells, work)
            specs = []
            for cell in cells:
                work.folder(cell).mkdir(parents=True)
                terminal = CellTerminal(cell.name, discard)
                specs.append(RunSpec(cell.recipe, work.folder(cell), terminal))
            start = time.perf_counter()
            with closing(Wave(program, specs, slots)) as wave:
                wave.compile()
                for slot in wave.slots:
                    slot.journal.open()
                watch.seconds['open'] = time.perf_counter() - start
                for _ in range(WARMUP_STEPS):
                    wave.dispatch()
                with watch('step of all'):
                    for _ in range(STEPS):
                        wave.dispatch()
                    wave.fetch_pending()
                watch.seconds['step of all'] /= STEPS
                with watch('save all'):
                    for i in range(len(wave.slots)):
                        wave.save_run(i)
            yield Point(runs, watch.seconds, {'compile': 1.0})


def measure_cells(sizes: Sequence[int]) -> Iterator[Point]:
    """Measures planning and gathering a sweep that is not trained."""
    from lm.config.resolve import resolve
    from lm.study.plan.cells import expand_sweep, group_by_program
    from lm.study.tables.results import gather, write_table
    from lm.study.train import ledger

    with scratch() as folder:
        tree, template = train_cell(folder)
        for n in sizes:
            workdir, watch, cells = folder / str(n), Stopwatch(), []
            with watch('plan'):
                cells = expand_sweep(tree, many_rates(n))
                groups = group_by_program(cells)
            with watch('open'):
                ledger.open_sweep(workdir, resolve(tree), groups, False)
            write_sweep(workdir, cells, template)
            with watch('open again'):
                ledger.open_sweep(workdir, resolve(tree), groups, False)
            with watch('gather'):
                gather(workdir)
            with watch('table'):
                write_table(workdir)
            yield Point(n, watch.seconds)


def measure_reading(
    make_sweep: Callable[[int], dict[str, Any]], begun: float = 1.0
) -> Callable[[Sequence[int]], Iterator[Point]]:
    """Returns the measurement of queries, overview and report of a sweep.

    Args:
      make_sweep: returns config.sweep with so many cells.
      begun: share of the cells that have records.
    """

    def measure(sizes: Sequence[int]) -> Iterator[Point]:
        from eval.report.page import write_report
        from eval.runs import overview, query
        from lm.study.plan.cells import expand_sweep
        from lm.study.tables.results import gather

        with scratch() as folder:
            tree, template = train_cell(folder)
            for i, n in enumerate([sizes[0], *sizes]):  # the first time imports
                cells, workdir = expand_sweep(tree, make_sweep(n)), folder / f'sweep-{i}'
                write_sweep(workdir, cells, template, tree, begun)
                watch = Stopwatch()
                with watch('SQL of runs'):
                    query('select count(*), avg(ce) from runs group by lr', workdir)
                with watch('SQL of metrics'):
                    query('select avg(loss) from runs join metrics using (cell)', workdir)
                with watch('listing'):
                    overview(gather(workdir))
                with watch('report'):
                    write_report(workdir)
                if i:
                    yield Point(n, watch.seconds)

    return measure


def measure_rows(sizes: Sequence[int]) -> Iterator[Point]:
    """Measures the report of two seeds with so many rows, half of them of layers."""
    from eval.report.page import write_report
    from lm.study.plan.cells import expand_sweep
    from lm.study.tables.results import gather

    with scratch() as folder:
        tree, template = train_cell(folder)
        cells = expand_sweep(tree, {'train.seed': (0, 1)})
        for i, n in enumerate([sizes[0], *sizes]):
            workdir, watch = folder / f'sweep-{i}', Stopwatch()
            write_sweep(workdir, cells, template, tree, steps=n // 2)
            with watch('gather'):
                gather(workdir)
            with watch('report'):
                write_report(workdir)
            if i:
                yield Point(n, watch.seconds)


def prepare_texts(folder: Path, tokenizers: Sequence[str], pattern: str) -> dict[str, float]:
    """Returns the seconds to prepare the texts with each tokenizer."""
    from configs import default
    from lm.config.resolve import resolve
    from lm.data import open_dataset

    watch = Stopwatch()
    for tokenizer in tokenizers:
        fields = dataclasses.replace(
            resolve(default.get_config()).data,
            source=f'text:{folder}/{pattern}',
            tokenizer=tokenizer,
            cache_dir=str(folder / 'cache'),
        )
        with watch(tokenizer):
            open_dataset(fields, say=lambda line: None)
    return watch.seconds


def measure_bytes(sizes: Sequence[int]) -> Iterator[Point]:
    """Measures preparing a text file of so many megabytes, which is one document."""
    from tests.bench.prepare import make_text

    for i, megabytes in enumerate([1, *sizes]):  # the first time imports
        with scratch() as folder:
            make_text(folder / 'text.txt', megabytes)
            seconds = prepare_texts(folder, ('byte', 'bpe:1024'), '*.txt')
            if i:
                yield Point(megabytes, seconds)


def measure_documents(sizes: Sequence[int]) -> Iterator[Point]:
    """Measures preparing so many documents of a line, in one file."""
    for i, documents in enumerate([1000, *sizes]):
        with scratch() as folder:
            with open(folder / 'texts.jsonl', 'w') as file:
                lines = (f'{{"text": "document {n} of a line"}}\n' for n in range(documents))
                file.writelines(lines)
            seconds = prepare_texts(folder, ('byte',), '*.jsonl')
            if i:
                yield Point(documents, seconds)


def measure_files(sizes: Sequence[int]) -> Iterator[Point]:
    """Measures preparing so many files, each one document."""
    for i, files in enumerate([100, *sizes]):
        with scratch() as folder:
            for n in range(files):
                (folder / f'{n}.txt').write_text(f'document {n} of a line\n' * 20)
            seconds = prepare_texts(folder, ('byte',), '*.txt')
            if i:
                yield Point(files, seconds)


def measure_checkpoints(sizes: Sequence[int]) -> Iterator[Point]:
    """Measures saving and restoring the state of a model of so many parameters, about."""
    import jax

    from lm.devices.mesh import make_mesh
    from lm.devices.shardings import abstract_state, jit_init
    from lm.record.checkpoints import Checkpoints
    from lm.training.state import make_hyper
    from tests.bench.step import bench_learner

    for i, millions in enumerate([1, *sizes]):
        # 12 width^2 parameters in each of two layers, and those of the embeddings.
        width = round((millions * 1e6 / 24) ** 0.5 / HEAD_DIM) * HEAD_DIM
        learner, watch = bench_learner(build_shape(width=width)), Stopwatch()
        mesh = make_mesh(learner.recipe.mesh)
        state = jit_init(learner, mesh)(jax.random.key(0), make_hyper(learner.recipe))
        shapes, meta = abstract_state(learner, mesh), {'config': {}, 'counters': {}}
        n_bytes = sum(leaf.nbytes for leaf in jax.tree.leaves(state))
        with scratch() as folder, contextlib.closing(Checkpoints(folder, 1, 0)) as checkpoints:
            checkpoints.save(state, meta, None)  # compiles the digests
            checkpoints.wait()
            state = state.replace(step=state.step + 1)
            with watch('until steps go on'):
                checkpoints.save(state, meta, None)
            start = time.perf_counter()
            checkpoints.wait()
            watch.seconds['until on disk'] = (
                watch.seconds['until steps go on'] + time.perf_counter() - start
            )
            with watch('restore'):
                jax.block_until_ready(checkpoints.restore(shapes))
        if i:
            yield Point(millions, watch.seconds, dict.fromkeys(watch.seconds, n_bytes))


def measure_permanent(sizes: Sequence[int]) -> Iterator[Point]:
    """Measures one more save beside so many checkpoints that stay, and opening them again.

    The work of a save is the same beside any number of them.
    """
    import jax

    from lm.devices.mesh import make_mesh
    from lm.devices.shardings import jit_init
    from lm.record.checkpoints import Checkpoints
    from lm.training.state import make_hyper
    from tests.bench.step import bench_learner

    learner = bench_learner((16, 1, 1, 16, 16, 64, 1))
    init = jit_init(learner, make_mesh(learner.recipe.mesh))
    state = init(jax.random.key(0), make_hyper(learner.recipe))
    meta, step, rounds = {'config': {}, 'counters': {}}, 0, 4
    with scratch() as folder:
        arguments = folder, 1, 1, print, None, range(max(sizes) + 2 * rounds)
        with contextlib.closing(Checkpoints(*arguments)) as checkpoints:
            for n in sizes:
                seconds = []
                while step < n + rounds:
                    start, step = time.perf_counter(), step + 1
                    checkpoints.save(state.replace(step=state.step + step), meta, 1.0 / step)
                    checkpoints.wait()
                    seconds.append(time.perf_counter() - start)
                yield Point(n, {'save': statistics.median(seconds[-rounds:])}, {'save': 1.0})


def measure_clients(sizes: Sequence[int]) -> Iterator[Point]:
    """Measures the seconds per answer of a server with so many clients that never pause.

    The work of an answer is the same for any number of clients.
    """
    from tests.bench.serve_load import load, server, tiny_checkpoint

    with scratch() as folder:
        checkpoint = tiny_checkpoint(folder)
        with server(checkpoint, 16, folder / 'stderr') as (_, port):
            asyncio.run(load(port, max(sizes), 0, 5, think_sec=0.1))  # compiles
            for clients in sizes:
                start = time.perf_counter()
                waits = asyncio.run(load(port, clients, 0, 8, think_sec=1e-3))
                answer_sec = (time.perf_counter() - start) / len(waits.whole)
                per_client = statistics.median(waits.whole) / clients
                seconds = {'answer': answer_sec, 'median wait / clients': per_client}
                yield Point(clients, seconds, dict.fromkeys(seconds, 1.0))


CURVES = {
    'width': Curve((128, 256, 512, 1024), measure_steps('width')),
    'row length': Curve((256, 512, 1024, 2048, 4096), measure_steps('length')),
    'vocabulary': Curve((1024, 4096, 16384, 65536), measure_steps('vocabulary')),
    'rows': Curve((2, 4, 8, 16, 32), measure_steps('rows')),
    'depth': Curve((2, 4, 8, 16, 32), measure_depth),
    'kinds of blocks': Curve((1, 2, 4, 8, 16), measure_kinds),
    'runs': Curve((16, 64, 256), measure_runs),
    'cells': Curve((125, 250, 500, 1000, 2000), measure_cells),
    'cells of variants': Curve((16, 64, 256, 1024), measure_reading(many_variants)),
    'cells of rates': Curve((16, 64, 256, 1024), measure_reading(many_rates)),
    'cells, few begun': Curve((64, 256, 1024, 4096), measure_reading(many_variants, 0.25)),
    'rows of layers': Curve((250, 1000, 4000, 16000), measure_rows),
    'megabytes of text': Curve((2, 8, 32), measure_bytes),
    'documents': Curve((10_000, 40_000, 160_000, 640_000), measure_documents),
    'files': Curve((100, 400, 1600, 6400), measure_files),
    'millions of weights': Curve((4, 16, 64), measure_checkpoints),
    'checkpoints that stay': Curve((8, 16, 32, 64, 128), measure_permanent),
    'clients': Curve((1, 4, 16, 64), measure_clients),
}
GROUPS = {  # of a picture
    'training': ('width', 'row length', 'vocabulary', 'rows', 'depth', 'kinds of blocks'),
    'sweeps': (
        *('runs', 'cells', 'cells of variants', 'cells of rates', 'cells, few begun'),
        'rows of layers',
    ),
    'files': (
        *('megabytes of text', 'documents', 'files', 'millions of weights'),
        *('checkpoints that stay', 'clients'),
    ),
}
