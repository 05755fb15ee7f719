"""Runs as a table: one row a run, its config and its results as columns, asked in SQL.

python -m eval.runs [--workdir=DIR[,DIR]] [--format=table|csv|markdown|json] [SQL]

    python -m eval.runs "select norm, avg(ce) from runs where status = 'done' group by norm"

Table `runs` has a row for each run or cell: what it is (`IDENTITY`), its config (`columns`) and its
results (`RESULTS`). A run of an older version has its config in the present form. Table `metrics`
has a row for each cell and recorded step, with every scalar of metrics.jsonl; join it `using
(cell)`, or `using (workdir)` where two sweeps share a cell. `ce` is the final validation loss in
`runs`, and the training batch's loss in `metrics`.
"""

import collections
import functools
import json
import math
import types
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.parquet as pq
from absl import app, flags

from eval import sql
from eval.program import run_main
from eval.results import config_of, naming, naming_sweep, results_of, rows_of, sweep_of
from eval.text import FORMATS, number, render
from lm.config import FIELDS, flatten
from lm.files import replacing
from lm.record.workdir import CONFIG, SWEEP

if TYPE_CHECKING:
    import pandas as pd  # takes a second to import, which train.py need not wait

TABLE = 'cells.parquet'
UNREADABLE = 'unreadable'
Record = dict[str, Any]

IDENTITY = {
    'cell': str,  # the folder's name
    'workdir': str,
    'sweep': str,  # the sweep's folder
    'group': int,  # cells of one group run in one program
    'status': str,  # waiting, unfinished, unreadable, or what summary.json says
    'reason': str,  # why it diverged or failed, or which file cannot be read
}
RESULTS = {  # column: (name in summary.json, type)
    'step': ('step', int),
    'ce': ('validation_ce', float),  # nats per token, as all losses here
    'best_ce': ('best_validation_ce', float),
    'best_step': ('best_step', int),
    'validated_step': ('validated_step', int),  # of ce; before `step` where the run diverged
    'train_ce': ('ce', float),  # of the last logged batch
    'bits_per_byte': ('bits_per_byte', float),
    'best_bits_per_byte': ('best_bits_per_byte', float),
    'perplexity': ('perplexity', float),
    'diverged_step': ('diverged_step', int),
    'tokens': ('tokens', int),
    'tokens_per_sec': ('tokens_per_sec_mean', float),
    'wall_sec': ('wall_sec', float),  # from opened to ended; runs beside each other share it
    'compile_sec': ('compile_sec', float),
    'parameters': ('parameters', int),
    'git_commit': ('git_commit', str),
    'device': ('device', str),
}
OVERVIEW = ('status', 'ce', 'bits_per_byte', 'best_ce', 'tokens_per_sec')
ARROW = {int: pa.int64(), float: pa.float64(), str: pa.string(), bool: pa.bool_()}


# The names of columns that are not the whole path of their field. Stored queries rely on them: the
# list does not change, whatever fields there will be.
SHORT = {
    'model.d_model': 'd_model',
    'model.n_layers': 'n_layers',
    'model.n_heads': 'n_heads',
    'model.n_kv_heads': 'n_kv_heads',
    'model.d_ff': 'd_ff',
    'model.norm': 'norm',
    'model.placement': 'placement',
    'model.attention': 'attention',
    'model.qk_norm': 'qk_norm',
    'model.activation': 'activation',
    'model.position': 'position',
    'model.reparam': 'reparam',
    'model.tie_embeddings': 'tie_embeddings',
    'model.logit_softcap': 'logit_softcap',
    'model.dtype': 'dtype',
    'model.remat': 'remat',
    'model.scan_layers': 'scan_layers',
    'model.mix_fraction': 'mix_fraction',
    'model.embedding_norm': 'embedding_norm',
    'model.final_norm': 'final_norm',
    'model.embedding_scale': 'embedding_scale',
    'model.mlp': 'mlp',
    'model.readout_bias': 'readout_bias',
    'mlp.n_experts': 'n_experts',
    'mlp.experts_per_token': 'experts_per_token',
    'mlp.expert_capacity': 'expert_capacity',
    'loss.z_loss': 'z_loss',
    'loss.label_smoothing': 'label_smoothing',
    'loss.balance_loss': 'balance_loss',
    'optim.lr': 'lr',
    'optim.schedule': 'schedule',
    'optim.warmup_steps': 'warmup_steps',
    'optim.decay_fraction': 'decay_fraction',
    'optim.final_lr_fraction': 'final_lr_fraction',
    'optim.b1': 'b1',
    'optim.b2': 'b2',
    'optim.eps': 'eps',
    'optim.weight_decay': 'weight_decay',
    'optim.decay_rule': 'decay_rule',
    'optim.clip_norm': 'clip_norm',
    'scaling.init_scale': 'init_scale',
    'data.source': 'source',
    'data.tokenizer': 'tokenizer',
    'data.text_field': 'text_field',
    'data.seq_len': 'seq_len',
    'data.batch_size': 'batch_size',
    'data.packing': 'packing',
    'data.mask_documents': 'mask_documents',
    'data.epochs': 'epochs',
    'data.validation_fraction': 'validation_fraction',
    'data.invalid_utf8': 'invalid_utf8',
    'data.prefetch': 'prefetch',
    'data.cache_dir': 'cache_dir',
    'train.steps': 'steps',
    'train.microbatches': 'microbatches',
    'train.eval_every': 'eval_every',
    'train.eval_batches': 'eval_batches',
    'train.checkpoint_every': 'checkpoint_every',
    'train.keep_last': 'keep_last',
    'train.keep_best': 'keep_best',
    'train.log_every': 'log_every',
    'train.on_divergence': 'on_divergence',
    'train.diagnose_every': 'diagnose_every',
    'train.init_from': 'init_from',
    'train.trainable': 'trainable',
    'mesh.run': 'run',
    'kernels.implementation': 'implementation',
    'kernels.run_axis': 'run_axis',
}


@functools.cache
def columns() -> Mapping[str, str]:
    """{'model.norm': 'norm', 'train.seed': 'train_seed', ...}: the column of each config field.

    It is that of `SHORT`, or else the whole path: `norm` is model.norm, and `norm_groups` is an
    option of norms.
    """
    return {path: SHORT.get(path, path.replace('.', '_')) for path in FIELDS}


@functools.cache
def schema() -> pa.Schema:
    """Of `cells.parquet`: typed also where a column has no value yet."""
    kinds = IDENTITY | {name: _type_of(path) for path, name in columns().items()}
    kinds |= {column: kind for column, (_, kind) in RESULTS.items()}
    return pa.schema([(column, ARROW.get(kind, pa.string())) for column, kind in kinds.items()])


def _type_of(path: str) -> type:
    return next(kind for kind in FIELDS[path].types if kind is not types.NoneType)


def gather(workdir: str | Path) -> list[Record]:
    """One record a cell of a sweep, one for a run, or those of all runs and sweeps directly below.

    Numbers that are not known yet, or not finite, are None; so is a config field that a run of an
    older version does not have. A cell, or what lies below the folder, whose files cannot be read
    is `UNREADABLE`, with a reason that names the file. Raises ValueError where the folder holds
    neither run nor sweep, or where its own config.json or sweep.json cannot be read.
    """
    folder = Path(workdir)
    if (folder / SWEEP).exists():
        return _gather_sweep(folder)
    if (folder / CONFIG).exists():
        return [_gather_run(folder)]
    below = [path for path in sorted(folder.glob('*')) if _holds_runs(path)]
    if not below:
        raise ValueError(
            f'{folder} holds no run and no sweep: there is no {CONFIG} or {SWEEP} in it, nor in a '
            'folder below it. Give a --workdir that train.py wrote'
        )
    return [record for path in below for record in _gather_below(path)]


def _holds_runs(folder: Path) -> bool:
    return any((folder / name).exists() for name in (SWEEP, CONFIG))


def _gather_below(folder: Path) -> list[Record]:
    try:
        return gather(folder)
    except (ValueError, OSError) as error:
        return [_record(folder, {}, _unreadable(error))]


def _gather_run(folder: Path) -> Record:
    config = _config_of_run(folder)
    try:
        return _record(folder, config, results_of(folder))
    except (ValueError, OSError) as error:
        return _record(folder, config, _unreadable(error))


def _config_of_run(folder: Path) -> Mapping[str, Any]:
    with naming(folder / CONFIG, 'Delete it, and the train.py command of the run writes it anew'):
        config = config_of(folder)
        _record(folder, config, {'status': ''})  # each value is of the type of its column
        return config


def _unreadable(error: Exception) -> dict[str, Any]:
    return {'status': UNREADABLE, 'reason': str(error)}


def read_sweep(workdir: str | Path) -> dict[str, Any]:
    """The sweep.json of a sweep; of a single run, one without axes or other cells.

    Raises ValueError, naming the file, where it cannot be read or holds no sweep.
    """
    folder = Path(workdir)
    if (folder / SWEEP).exists():
        return sweep_of(folder)
    own = {'cell': folder.name, 'group': 0, 'changes': {}, 'differs': {}}
    return {'base': _config_of_run(folder), 'axes': {}, 'cells': [own]}


def _gather_sweep(folder: Path) -> list[Record]:
    sweep = read_sweep(folder)
    begun = any((folder / cell['cell']).exists() for cell in sweep['cells'])
    if not begun and (folder / TABLE).exists():  # the runs were deleted, their table kept
        return _read_table(folder / TABLE)
    base = flatten(sweep['base'])
    return [_gather_cell(folder, cell, base | cell['differs']) for cell in sweep['cells']]


def _gather_cell(folder: Path, cell: Mapping[str, Any], known: Mapping[str, Any]) -> Record:
    """`known`: the config by what sweep.json says, for a cell whose own cannot be read."""
    path = folder / cell['cell']
    place = {'sweep': folder.name, 'group': cell['group']}
    try:
        config = config_of(path) if (path / CONFIG).exists() else known
        if lost := sorted(known.keys() & FIELDS.keys() - config.keys()):
            raise ValueError(f'{path / CONFIG} cannot be read (it lacks {", ".join(lost)})')
        return _record(path, config, results_of(path), **place)
    except (ValueError, OSError) as error:
        with naming_sweep(folder):
            return _record(path, known, _unreadable(error), **place)


def _read_table(path: Path) -> list[Record]:
    with naming(path, 'The runs that it was made of are gone; delete it to train them again'):
        rows = pq.read_table(path, page_checksum_verification=True).to_pylist()
        records = [{name: row.get(name) for name in schema().names} for row in rows]
        return as_arrow(records).to_pylist()


def _record(
    path: Path,
    config: Mapping[str, Any],
    results: Mapping[str, Any],
    sweep: str | None = None,
    group: int | None = None,
) -> Record:
    known = {
        'cell': path.name,
        'workdir': str(path),
        'sweep': sweep,
        'group': group,
        'status': results['status'],
        'reason': results.get('reason'),
        **{column: config.get(name) for name, column in columns().items()},
        **{column: results.get(name) for column, (name, _) in RESULTS.items()},
    }
    return {name: _typed(path, name, known[name], kind) for name, kind in _kinds()}


@functools.cache
def _kinds() -> list[tuple[str, pa.DataType]]:
    return [(field.name, field.type) for field in schema()]


def _typed(path: Path, name: str, value: Any, kind: pa.DataType) -> Any:
    """Raises ValueError for a value that the column `name` cannot hold."""
    if value is None or (isinstance(value, float) and not math.isfinite(value)):
        return None
    if kind == pa.string() and not isinstance(value, str):
        return json.dumps(value)
    try:
        return pa.scalar(value, kind).as_py()
    except (pa.ArrowException, ValueError, TypeError, OverflowError) as error:
        raise ValueError(f'{path} cannot be read (its {name} is {value!r}: {error})') from error


def as_arrow(records: Iterable[Record]) -> pa.Table:
    return pa.Table.from_pylist(list(records), schema=schema())


def write_table(workdir: str | Path) -> Path:
    """Writes what `gather` finds to WORKDIR/cells.parquet, all or nothing, and returns its path."""
    path = Path(workdir) / TABLE
    with replacing(path) as temporary:
        pq.write_table(as_arrow(gather(workdir)), temporary, write_page_checksum=True)
    return path


def frame(*workdirs: str | Path) -> 'pd.DataFrame':
    """What `gather` finds, one row a run; a column of integers with gaps is float."""
    return as_arrow(record for path in workdirs for record in gather(path)).to_pandas()


def metrics_frame(*workdirs: str | Path) -> 'pd.DataFrame':
    """cell, workdir, step, and every scalar of metrics.jsonl; one row a cell and step."""
    return _metrics([record for path in workdirs for record in gather(path)]).to_pandas()


def _metrics(records: list[Record]) -> pa.Table:
    merged: dict[tuple[str, int], dict[str, Any]] = {}
    for record in records:
        for row in rows_of(Path(record['workdir'])):
            key = record['workdir'], row['step']
            at_step = merged.setdefault(key, {n: record[n] for n in ('cell', 'workdir')})
            at_step |= {name: v for name, v in row.items() if not isinstance(v, list | dict | str)}
    known = [('cell', pa.string()), ('workdir', pa.string()), ('step', pa.int64())]
    names = dict.fromkeys(name for row in merged.values() for name in row)
    scalars = [(name, pa.float64()) for name in names if name not in dict(known)]
    return pa.Table.from_pylist(list(merged.values()), schema=pa.schema(known + scalars))


def query(select: str, *workdirs: str | Path) -> pa.Table:
    """The rows of a select over tables `runs` and `metrics` (see above).

    Raises ValueError with DuckDB's message in one line, and the nearest column for an unknown one.
    """
    records = [record for path in workdirs for record in gather(path)]
    tables = {'runs': as_arrow(records)}
    if sql.mentions(select, 'metrics'):  # reads every metrics.jsonl
        tables['metrics'] = _metrics(records)
    return sql.answer(select, tables)


def swept_columns(records: Iterable[Record]) -> list[str]:
    """The config columns in which the records differ."""
    rows = list(records)
    return [name for name in columns().values() if len({repr(row[name]) for row in rows}) > 1]


def overview(records: list[Record]) -> list[Record]:
    """Of each record: its cell, in what it differs from the others of its sweep, and the main
    results.
    """
    by_sweep = collections.defaultdict(list)
    for record in records:
        by_sweep[str(Path(record['workdir']).parent)].append(record)
    rows = []
    for siblings in by_sweep.values():
        swept = swept_columns(siblings) if siblings[0]['sweep'] else []
        for row in siblings:
            caption = ' '.join(f'{name}={number(row[name])}' for name in swept)
            results = {name: row[name] for name in OVERVIEW}
            rows.append({'cell': row['cell'], 'swept': caption} | results)
    return rows


def main(argv: list[str]) -> None:
    workdirs = flags.FLAGS.workdir
    if len(argv) > 2:
        raise ValueError(f'give the SQL as one argument, in quotes; got {argv[1:]}')
    if len(argv) == 2:
        table = query(argv[1], *workdirs)
        rows, names = table.to_pylist(), table.column_names
    else:
        rows = overview([record for path in workdirs for record in gather(path)])
        names = ['cell', 'swept', *OVERVIEW]
    print(render(rows, names, flags.FLAGS.format))


if __name__ == '__main__':  # only here, since train.py imports this module and has a --workdir too
    flags.DEFINE_list('workdir', ['runs'], 'Run, sweep, or folder of them; several with commas.')
    flags.DEFINE_enum('format', 'table', FORMATS, 'How to print what was asked.')
    app.run(run_main(main))
