"""Reference tests of the run table, with the closed forms of `sweep_fixture`."""

import datetime
import decimal
import json
import math
import shutil
import subprocess
import sys
from pathlib import Path

import duckdb
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from eval import runs
from lm.config.fields import FIELDS
from lm.config.resolve import resolve
from lm.record.metrics import read_rows
from lm.study.plan.cells import expand_sweep, group_by_program
from lm.study.tables import results
from lm.study.tables.columns import IDENTITY, RESULTS, SHORT, columns, schema
from lm.study.tables.sql import list_rows
from lm.study.tables.text import format_table
from lm.study.train.ledger import open_sweep
from modules.params import USES
from tests.eval import sweep_fixture as fixture
from tests.eval.programs import run_module
from tests.helpers import tiny_raw


@pytest.fixture(scope='module')
def sweep(tmp_path_factory):
    folder = tmp_path_factory.mktemp('runs') / 'norms'
    fixture.write_sweep(folder)
    fixture.write_run(folder.parent / 'single', fixture.base_config())
    return folder


def cell(records, norm, lr, seed):
    key = (norm, lr, seed)
    return next(
        record for record in records if (record['norm'], record['lr'], record['train_seed']) == key
    )


V0 = Path(__file__).parents[1] / 'fixtures' / 'v0'
# Options that no part reads are None now, and 'auto' is replaced by its choice.
UPGRADED = {
    'n_experts': None,
    'experts_per_token': None,
    'expert_capacity': None,
    'balance_loss': None,
    'decay_fraction': None,
    'mlp': 'dense',
    'embedding_scale': False,
}


def v0_table():
    """Returns (types by column, rows) of the sweep at commit 0447279, without times and workdir."""
    expected = json.loads((V0 / 'expected.json').read_text())['sweep']
    rows = [dict(zip(expected['columns'], row, strict=True)) for row in expected['rows']]
    return expected['types'], rows


def test_no_two_columns_share_a_name():
    everything = [*IDENTITY, *columns().values(), *RESULTS]
    assert len(set(everything)) == len(everything) == len(schema())
    assert SHORT.keys() <= FIELDS.keys()


def test_v0_columns_keep_name_and_type():
    """Stored queries name them. Catches a lost short name."""
    kinds = {field.name: str(field.type) for field in schema()}
    types, _ = v0_table()
    assert kinds.items() >= types.items()
    objective_columns = {'prefix_ce', 'span_corruption_ce', 'infill_ce'}
    cost_columns = {f'{use}_parameters' for use in USES} | {'flops_per_token'}
    summary_columns = {'optimizer_state_bytes', 'side_by_side', *objective_columns, *cost_columns}
    summary_columns |= {'texts_ce', 'texts_bits_per_byte', 'texts', 'suites'}
    summary_columns |= {'spike_score', 'skipped_steps'}
    summary_columns |= {'goodput', 'elapsed_sec', 'starts', 'seconds'}
    tuned_columns = {'arm', 'stage'}
    origin_columns = {'parent', 'branch_step', 'checkpoints'}
    added = {name for name in kinds if name not in types} - summary_columns - tuned_columns
    added -= origin_columns
    assert all(name in columns().values() for name in added)


def test_unlisted_fields_use_their_whole_path():
    """Regardless of fields with the same name in other sections."""
    names = columns()
    assert names['model.norm'] == 'norm' and names['optim.eps'] == 'eps'
    for path in FIELDS.keys() - SHORT.keys():
        assert names[path] == path.replace('.', '_')
    assert names['norm.eps'] == 'norm_eps' and names['mesh.data'] == 'mesh_data'


def test_v0_sweep_is_upgraded(tmp_path):
    """Every old column has its old value, except `UPGRADED`."""
    records = runs.gather(shutil.copytree(V0 / 'sweep', tmp_path / 'sweep'))
    _, rows = v0_table()
    for record, row in zip(records, rows, strict=True):
        expected = row | UPGRADED | {'final_norm': row['norm']}
        assert {name: record[name] for name in expected} == expected


def test_v0_table_outlives_its_cells(tmp_path):
    """Missing columns are NULL, and obsolete columns are left out."""
    folder = tmp_path / 'sweep'
    folder.mkdir()
    shutil.copy(V0 / 'sweep' / 'sweep.json', folder)
    table = pq.read_table(V0 / 'sweep' / 'cells.parquet')
    table = table.append_column('gone', pa.array([1] * len(table)))
    pq.write_table(table, folder / 'cells.parquet')
    records, (_, rows) = runs.gather(folder), v0_table()
    for record, row in zip(records, rows, strict=True):
        assert record.keys() == {*schema().names}
        assert {name: record[name] for name in row} == row
        assert record['attention_norm_values'] is None
    assert len(runs.query('select norm_ema_decay from runs', folder)) == len(rows)


def test_columns_need_no_quotes(sweep):
    """No column but `group` is a keyword of SQL."""
    names = [name for name in schema().names if name != 'group']
    assert runs.query(f'select {", ".join(names)} from runs', sweep).column_names == names


def test_finished_cell_is_listed(sweep):
    record = cell(runs.gather(sweep), 'layernorm', 0.01, 1)
    config = fixture.update_config(
        fixture.base_config(), {'model.norm': 'layernorm', 'optim.lr': 0.01, 'train.seed': 1}
    )
    assert record['status'] == 'done' and record['sweep'] == 'norms' and record['group'] == 0
    assert record['ce'] == record['best_ce'] == pytest.approx(fixture.final_ce(config))
    assert record['train_ce'] == pytest.approx(fixture.training_ce(config, fixture.STEPS))
    assert record['tokens_per_sec'] == 13100 and record['parameters'] == 4_458_624
    assert record['optimizer_state_bytes'] == 8 * record['parameters'] + 4
    assert record['step'] == record['best_step'] == record['steps'] == fixture.STEPS
    assert (sweep / record['cell']).samefile(record['workdir'])


def test_failed_and_unfinished_cells(sweep):
    records = runs.gather(sweep)
    ends = {key: cell(records, *key) for key in fixture.FATES}
    assert {key: end['status'] for key, end in ends.items()} == fixture.FATES
    by_status = {end['status']: end for end in ends.values()}
    diverged, failed = by_status['diverged'], by_status['failed']
    assert (diverged['diverged_step'], diverged['reason']) == (60, 'step 60: loss nan')
    assert diverged['validated_step'] == 40 and diverged['train_ce'] is None
    assert 'out of memory' in failed['reason'] and failed['ce'] is failed['best_ce'] is None
    unfinished, waiting = by_status['unfinished'], by_status['waiting']
    assert unfinished['step'] == unfinished['validated_step'] == 120
    assert unfinished['ce'] == pytest.approx(unfinished['best_ce']) and unfinished['tokens'] > 0
    assert waiting['step'] is waiting['ce'] is None and waiting['lr'] == 0.03


def test_best_row_is_not_the_last(tmp_path):
    fixture.write_run(tmp_path / 'run', fixture.base_config(), 'unfinished')
    lines = (tmp_path / 'run' / 'metrics.jsonl').read_text().splitlines()[:-1]
    worse_row = {'step': 125, 'validation_ce': 7.0, 'bits_per_byte': 3.0, 'perplexity': 1096.0}
    broken_row = {'step': 130, 'validation_ce': None, 'bits_per_byte': None, 'perplexity': None}
    for row, last in ((worse_row, 7.0), (broken_row, None)):
        lines.append(json.dumps(row))
        (tmp_path / 'run' / 'metrics.jsonl').write_text('\n'.join(lines) + '\n')
        [record] = runs.gather(tmp_path / 'run')
        assert record['ce'] == last and record['best_step'] == 120 and record['best_ce'] < 4


def test_run_with_unknown_fields_keeps_the_known(tmp_path):
    config = fixture.base_config()
    del config['model']['activation'], config['mesh']
    fixture.write_run(tmp_path / 'run', config | {'gone': {'field': 1}})
    [record] = runs.gather(tmp_path / 'run')
    assert (
        record['activation'] is record['mesh_data'] is None and record['run'] == -1
    )  # has a default
    assert record['cell'] == 'run' and record['sweep'] is None and record['ce'] is not None


def test_waiting_cell_has_its_resolved_config(tmp_path):
    """Instead of the values of its sweep's base."""
    raw = tiny_raw()
    grouped = group_by_program(expand_sweep(raw, {'model.placement': ('pre', 'post', 'wide')}))
    open_sweep(tmp_path, resolve(raw), grouped, False)
    by_placement = {record['placement']: record for record in runs.gather(tmp_path)}
    assert {record['status'] for record in by_placement.values()} == {'waiting'}
    assert [by_placement[name]['final_norm'] for name in ('pre', 'post')] == ['rmsnorm', 'none']
    assert (by_placement['wide']['mlp'], by_placement['wide']['reparam']) == ('moe', 'shared')


def test_gather_reads_runs_and_sweeps(sweep):
    records = runs.gather(sweep.parent)
    assert len(records) == 25 and records[-1]['cell'] == 'single'
    assert len(runs.frame(sweep, sweep.parent / 'single')) == 25


def test_errors_neither_run_nor_sweep(tmp_path):
    with pytest.raises(ValueError, match='contains no run and no sweep'):
        runs.gather(tmp_path)


def test_parquet_round_trip_through_duckdb(sweep):
    path = results.write_table(sweep)
    assert path == sweep / 'cells.parquet' and not list(sweep.glob('*.tmp'))
    stored = duckdb.sql(f"select * from '{path}'").to_arrow_table()
    assert stored.to_pylist() == runs.gather(sweep)
    [[mean]] = duckdb.sql(
        f"select avg(ce) from '{path}' where status = 'done' and norm = 'rmsnorm' and lr = 0.003"
    ).fetchall()
    assert mean == pytest.approx(2.89)  # 2.9 - 0.01 * (0, 1, 2)


def test_columns_are_typed_before_any_run(tmp_path):
    fates = dict.fromkeys([(n, lr, s) for n in fixture.NORMS for lr in fixture.LRS for s in (0, 1)])
    waiting = dict.fromkeys(fates, 'waiting')
    fixture.write_sweep(tmp_path / 'sweep', fixture.AXES | {'train.seed': (0, 1)}, waiting)
    stored = pq.read_schema(results.write_table(tmp_path / 'sweep'))
    assert stored.field('ce').type == pa.float64() and stored.field('lr').type == pa.float64()
    assert stored.field('step').type == pa.int64() and stored.field('reason').type == pa.string()
    assert stored.field('tie_embeddings').type == pa.bool_()


def test_table_outlives_the_cells(sweep, tmp_path):
    copy = tmp_path / 'norms'
    shutil.copytree(sweep, copy)
    before = runs.gather(copy)
    results.write_table(copy)
    for path in copy.iterdir():
        if path.is_dir():
            shutil.rmtree(path)
    assert runs.gather(copy) == before


def test_metrics_join_runs(sweep):
    table = runs.query(
        'select norm, count(validation_ce) n, min(metrics.step) first '
        "from metrics join runs using (cell) where status = 'done' group by norm order by norm",
        sweep,
    )
    done = {'layernorm': 12 - 3, 'rmsnorm': 12 - 1}
    assert table.to_pylist() == [{'norm': k, 'n': 5 * v, 'first': 1} for k, v in done.items()]
    frame = runs.metrics_frame(sweep)
    assert frame['ce'].isna().sum() == 1  # the diverged
    assert not frame.duplicated(['cell', 'step']).any()


def test_quantity_in_two_forms_is_refused(sweep, tmp_path):
    """Catches an error of pyarrow without advice."""
    copy = tmp_path / 'run'
    shutil.copytree(next(path.parent for path in sorted(sweep.glob('*/metrics.jsonl'))), copy)
    with (copy / 'metrics.jsonl').open('a') as file:
        file.write('{"step": 900, "ce": [1.0]}\n')
    with pytest.raises(
        ValueError, match=r'must be a double in all rows.*Correct that row'
    ) as error:
        runs.metrics_frame(copy)
    assert '\n' not in str(error.value)


def test_layer_quantities_are_lists(sweep):
    """Catches numbers of layers that a query cannot reach."""
    select = 'select max(list_max(activation_rms)) most, max(len(activation_rms)) n from metrics'
    [summary] = runs.query(select, sweep).to_pylist()
    rows = [row for path in sweep.glob('*/metrics.jsonl') for row in read_rows(path)]
    rms_by_layer = [row['activation_rms'] for row in rows if 'activation_rms' in row]
    assert summary == {'most': max(map(max, rms_by_layer)), 'n': len(rms_by_layer[0])}


@pytest.mark.parametrize(
    ('sql', 'message'),
    [
        ('select nrom from runs', "Did you mean 'norm'?"),
        ('select r.nrom from runs r', "Did you mean 'norm'?"),
        ('select seed from runs', "Did you mean 'data_seed' or 'train_seed'?"),
        ('select norm, avg(ce) group by norm', 'add "from runs"'),
        ('select * from rums', 'Did you mean "runs"?'),
        ('selec 1', 'syntax error at or near "selec"'),
        ('', 'returns no rows'),
        ('select 1; select 2', 'must be one statement; got 2'),
        ('select a.cell, b.cell from runs a, runs b', 'two columns of the query are named cell'),
        ('select * from runs join metrics using (cell)', 'two columns of the query are named'),
        ("copy runs to 'stolen.csv'", 'disabled by configuration'),
        ("select * from read_csv('/etc/passwd')", 'disabled by configuration'),
        ('select * from records', 'Table with name records does not exist'),  # a Python variable
    ],
)
def test_errors_invalid_sql(sweep, sql, message):
    with pytest.raises(ValueError) as error:
        runs.query(sql, sweep)
    assert message in str(error.value) and '\n' not in str(error.value)


def test_final_semicolon_is_allowed(sweep):
    assert runs.query("select ';' mark from runs limit 1; -- done", sweep).num_rows == 1


@pytest.mark.parametrize('kind', ['date', 'timestamp', 'timestamptz'])
def test_dates_beyond_python_are_refused(sweep, kind):
    table = runs.query(f"select 'infinity'::{kind} ends, current_date today from runs", sweep)
    with pytest.raises(ValueError, match=r'^a date or time must be .* cast ends, today to varchar'):
        list_rows(table)


@pytest.mark.full
def test_program_refuses_empty_workdir():
    process = run_module('eval.runs', '--workdir=')
    assert process.returncode == 1 and process.stderr.count('\n') == 1 and not process.stdout
    assert process.stderr.startswith('error: flag --workdir=: must list at least one path')


@pytest.mark.full
def test_program_prints_csv(sweep):
    sql = 'select norm, count(*) n, sum(train_seed) s from runs group by norm order by norm'
    process = run_module('eval.runs', f'--workdir={sweep},{sweep.parent}', '--format=csv', sql)
    assert process.stdout == 'norm,n,s\nlayernorm,24,24\nrmsnorm,25,24\n', process.stderr


def test_overview_distinguishes_cells(sweep):
    rows = runs.overview(runs.gather(sweep.parent))
    assert len(rows) == 25 and list(rows[0]) == ['cell', 'swept', *runs.OVERVIEW]
    by_caption = {row['swept']: row for row in rows}
    assert by_caption['norm=rmsnorm lr=0.003 train_seed=1']['ce'] == pytest.approx(2.89)
    assert rows[-1]['cell'] == 'single' and rows[-1]['swept'] == ''


@pytest.mark.full
def test_list_imports_neither_orbax_nor_pandas(sweep):
    """Each takes half a second to import."""
    program = (
        'import sys; from eval import runs; runs.overview(runs.gather(sys.argv[1])); '
        "assert not {'orbax', 'pandas'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, '-c', program, sweep], check=True)


@pytest.mark.full
def test_program_fails_in_one_line(sweep):
    process = run_module('eval.runs', f'--workdir={sweep}', 'select nrom from runs')
    assert process.returncode == 1 and process.stderr.count('\n') == 1
    assert process.stderr.startswith('error: Binder Error') and "mean 'norm'" in process.stderr


def test_table_formats_rows_as_text():
    rows = [{'norm': 'a|b', 'ce': 2.123456789}, {'norm': None, 'ce': None}]
    assert json.loads(format_table(rows, ['norm', 'ce'], 'json')) == rows
    values = {
        'day': (datetime.date(2026, 1, 2), '2026-01-02'),
        'sum': (decimal.Decimal(7), 7.0),
        'loss': (math.nan, None),
        'layers': ([1.0, math.inf], [1.0, None]),
        'map': ([('a', math.nan)], [['a', None]]),
        'blob': (b'a', "b'a'"),
    }
    text = format_table([{name: value for name, (value, _) in values.items()}], [*values], 'json')
    assert json.loads(text, parse_constant=pytest.fail) == [
        {name: expected for name, (_, expected) in values.items()}
    ]
    table = format_table(rows, ['norm', 'ce'], 'markdown').splitlines()
    assert table == ['| norm | ce |', '| --- | --- |', '| a\\|b | 2.1235 |', '|  |  |']
    assert format_table(rows, ['ce', 'norm'], 'table') == 'ce      norm\n2.1235  a|b\n'


def test_optional_options_keep_their_type():
    """A column of text could not be averaged, and could not store 4."""
    kinds = {field.name: field.type for field in schema()}
    assert kinds['norm_eps'] == kinds['mix_fraction'] == pa.float64()
    assert kinds['norm_groups'] == pa.int64()
    assert kinds['norm_filter_outliers'] == pa.bool_()
    assert kinds['norm'] == pa.string()
