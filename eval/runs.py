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
import re
import types
from collections.abc import Iterable, Mapping
from dataclasses import MISSING
from pathlib import Path
from typing import TYPE_CHECKING, Any

import duckdb
import pyarrow as pa
import pyarrow.parquet as pq
from absl import app, flags

from eval.program import run_main
from eval.text import FORMATS, number, render
from lm.config import FIELDS, flatten
from lm.files import read_json, replacing
from lm.record.metrics import FILE, read_rows
from lm.record.upgrade import present_paths, stored_config
from lm.record.workdir import CONFIG, SUMMARY, SWEEP
from lm.sweep import ledger
from modules.choices import nearest

if TYPE_CHECKING:
    import pandas as pd  # takes a second to import, which train.py need not wait

TABLE = 'cells.parquet'
Record = dict[str, Any]

IDENTITY = {
    'cell': str,  # the folder's name
    'workdir': str,
    'sweep': str,  # the sweep's folder
    'group': int,  # cells of one group run in one program
    'status': str,  # waiting, unfinished, or what summary.json says
    'reason': str,  # why it diverged or failed
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
    older version does not have. Raises ValueError where the folder holds neither.
    """
    folder = Path(workdir)
    if (folder / SWEEP).exists():
        return _gather_sweep(folder)
    if (folder / CONFIG).exists():
        return [_record(folder, _config_of(folder), sweep=None, group=None)]
    below = [path for path in sorted(folder.glob('*')) if _holds_runs(path)]
    if not below:
        raise ValueError(
            f'{folder} holds no run and no sweep: there is no {CONFIG} or {SWEEP} in it, nor in a '
            'folder below it. Give a --workdir that train.py wrote'
        )
    return [record for path in below for record in gather(path)]


def _holds_runs(folder: Path) -> bool:
    return any((folder / name).exists() for name in (SWEEP, CONFIG))


def read_sweep(workdir: str | Path) -> dict[str, Any]:
    """The sweep.json of a sweep; of a single run, one without axes or other cells."""
    folder = Path(workdir)
    if (folder / SWEEP).exists():
        return ledger.read_sweep(folder)
    own = {'cell': folder.name, 'group': 0, 'changes': {}, 'differs': {}}
    return {'base': _config_of(folder), 'axes': {}, 'cells': [own]}


def _gather_sweep(folder: Path) -> list[Record]:
    sweep = read_sweep(folder)
    begun = any((folder / cell['cell']).exists() for cell in sweep['cells'])
    if not begun and (folder / TABLE).exists():  # the runs were deleted, their table kept
        rows = pq.read_table(folder / TABLE).to_pylist()
        return [{name: row.get(name) for name in schema().names} for row in rows]
    base, records = flatten(sweep['base']), []
    for cell in sweep['cells']:
        path = folder / cell['cell']
        config = _config_of(path) if (path / CONFIG).exists() else base | cell['differs']
        records.append(_record(path, config, sweep=folder.name, group=cell['group']))
    return records


def _config_of(folder: Path) -> Mapping[str, Any]:
    return _flat_config((folder / CONFIG).read_text())


@functools.lru_cache(maxsize=10_000)
def _flat_config(text: str) -> Mapping[str, Any]:
    """A config.json by path, in the present form. One that is no config of this version has what is
    in it and the defaults of fields that were added since.
    """
    raw = json.loads(text)
    try:
        return flatten(stored_config(raw))
    except ValueError:
        added = {path: f.default for path, f in FIELDS.items() if f.default is not MISSING}
        return added | present_paths(flatten(raw))


def _record(path: Path, config: Mapping[str, Any], sweep: str | None, group: int | None) -> Record:
    results = _results(path)
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
    return {field.name: _typed(known[field.name], field.type) for field in schema()}


def _typed(value: Any, kind: pa.DataType) -> Any:
    if value is None:
        return None
    if kind == pa.int64():
        return int(value)
    if kind == pa.float64():
        return float(value)
    if kind == pa.string():
        return value if isinstance(value, str) else json.dumps(value)
    return value


def _results(path: Path) -> dict[str, Any]:
    """By the names of summary.json. What is not in it is found from the rows so far."""
    if not path.exists():
        return {'status': 'waiting'}
    summary = {'status': 'unfinished'}
    if (path / SUMMARY).exists():
        summary = read_json(path / SUMMARY)
    if 'best_validation_ce' in summary:
        return summary
    return _results_so_far(read_rows(path / FILE)) | summary


def _results_so_far(rows: list[dict[str, Any]]) -> dict[str, Any]:
    found: dict[str, Any] = {'step': rows[-1]['step']} if rows else {}
    trained = [row for row in rows if 'ce' in row]
    validated = [row for row in rows if 'validation_ce' in row]
    if trained:
        rates = [row['tokens_per_sec'] for row in trained if row.get('tokens_per_sec')]
        found |= {'ce': trained[-1]['ce'], 'tokens': trained[-1].get('tokens')}
        found['tokens_per_sec_mean'] = sum(rates) / len(rates) if rates else None
    if validated:
        last = validated[-1]
        found |= {name: last.get(name) for name in ('validation_ce', 'bits_per_byte', 'perplexity')}
        found['validated_step'] = last['step']
    finite = [row for row in validated if row['validation_ce'] is not None]
    if finite:
        best = min(finite, key=lambda row: row['validation_ce'])
        found |= {'best_validation_ce': best['validation_ce'], 'best_step': best['step']}
        found['best_bits_per_byte'] = best.get('bits_per_byte')
    return found


def as_arrow(records: Iterable[Record]) -> pa.Table:
    return pa.Table.from_pylist(list(records), schema=schema())


def write_table(workdir: str | Path) -> Path:
    """Writes what `gather` finds to WORKDIR/cells.parquet, all or nothing, and returns its path."""
    path = Path(workdir) / TABLE
    with replacing(path) as temporary:
        pq.write_table(as_arrow(gather(workdir)), temporary)
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
        for row in read_rows(Path(record['workdir']) / FILE):
            key = record['workdir'], row['step']
            at_step = merged.setdefault(key, {n: record[n] for n in ('cell', 'workdir')})
            at_step |= {name: v for name, v in row.items() if not isinstance(v, list | dict | str)}
    known = [('cell', pa.string()), ('workdir', pa.string()), ('step', pa.int64())]
    names = dict.fromkeys(name for row in merged.values() for name in row)
    scalars = [(name, pa.float64()) for name in names if name not in dict(known)]
    return pa.Table.from_pylist(list(merged.values()), schema=pa.schema(known + scalars))


def query(sql: str, *workdirs: str | Path) -> pa.Table:
    """The rows of a select over tables `runs` and `metrics` (see above).

    Raises ValueError with DuckDB's message in one line, and the nearest column for an unknown one.
    """
    records = [record for path in workdirs for record in gather(path)]
    connection = duckdb.connect(config={'enable_external_access': False})  # no files, no network
    connection.execute('set python_enable_replacements = false')  # no variables of ours either
    tables = {'runs': as_arrow(records)}
    if re.search(r'\bmetrics\b', sql, re.IGNORECASE):  # reads every metrics.jsonl
        tables['metrics'] = _metrics(records)
    for name, table in tables.items():
        connection.register(name, table)
    try:
        answer = connection.sql(sql)
        if answer is None:
            raise ValueError(f'{sql!r} asks for no rows; give a select')
        return answer.to_arrow_table()
    except duckdb.Error as error:
        names = [name for table in tables.values() for name in table.column_names]
        raise ValueError(explain(str(error), names)) from error


def explain(message: str, names: Iterable[str]) -> str:
    """DuckDB's message without its excerpt of the SQL, in one line, with what helps."""
    lines = message.split('\n\nLINE')[0].split('\n')
    text = ' '.join(line for line in lines if line and not line.startswith('Candidate bindings'))
    if 'FROM clause is missing' in text:
        return text + '; say "from runs" or "from metrics"'
    unknown = re.search(r'column "([^"]+)" not found|column named "([^"]+)"', text)
    return text + nearest(unknown[1] or unknown[2], names) if unknown else text


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
