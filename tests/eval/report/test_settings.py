"""Differences between the parameter tables of two runs."""

import re
import types

from eval.compare import print_parameters
from eval.evaluation.targets import Target
from eval.report.tables import cost_rows, settings_rows
from lm.config.resolve import flatten
from lm.devices.mesh import make_mesh
from lm.record.workdir import write_config
from lm.run.tables import parameter_rows, write_parameters
from lm.study.tables.parameters import compare_parameters, read_parameters
from tests.helpers import checked_config, tiny_learner

BASE = {'optim.name': 'adamw', 'optim.others': 'adamw'}


def differences(changes):
    """Returns {(group, column): (value of the baseline, of the run, note)}."""
    configs = [checked_config(BASE | settings) for settings in ({}, changes)]
    tables = [parameter_rows(tiny_learner(config), make_mesh(config.mesh)) for config in configs]
    rows = compare_parameters(*tables, *map(flatten, configs))
    return {(row['group'], row['column']): tuple(row.values())[2:] for row in rows}


def test_equal_runs_do_not_differ():
    assert differences({}) == differences({'train.seed': 3}) == {}


def test_group_setting_has_no_note():
    """A field of the group itself has no note."""
    differing = differences({'optim.embedding_lr': 0.01, 'optim.norm_b1': 0.5})
    assert {key: row[2] for key, row in differing.items()} == {
        ('embedding', 'lr'): '',
        ('embedding', 'decay/step'): '',
        ('norm', 'options'): '',
    }
    assert differing['embedding', 'lr'][:2] == ('0.003', '0.01')


def test_inherited_setting_is_marked():
    """Another rate for Muon also reaches the embedding, which is the usual confounded arm."""
    differing = differences({'optim.name': 'muon', 'optim.lr': 0.02})
    assert differing['hidden', 'optimizer'][:2] == ('adamw', 'muon')
    assert differing['hidden', 'lr'] == ('0.003', '0.02', '')
    assert differing['embedding', 'lr'] == ('0.003', '0.02', 'inherits optim.lr')
    decay = {'optim.lr': 0.02, 'optim.others_lr': 0.003, 'optim.readout_weight_decay': 0.0}
    assert differences(decay)['readout', 'decay/step'] == ('0.0003', '0', '')
    held = differences({'optim.name': 'muon', 'optim.lr': 0.02, 'optim.others_lr': 0.003})
    assert {group for group, _ in held} == {'hidden'}


def test_other_parameters_are_counted():
    differing = differences({'model.position': 'learned'})
    assert differing['tables', 'parameters'] == ('0', '1', 'other names')


def test_table_is_read_as_written(tmp_path):
    config = checked_config(BASE)
    rows = parameter_rows(tiny_learner(config), make_mesh(config.mesh))
    assert read_parameters(tmp_path) == []
    write_parameters(tmp_path, rows)
    assert read_parameters(tmp_path) == rows


def write_runs(tmp_path, changes_by_name):
    """Writes the records of runs that tables of parameters are read from."""
    for name, changes in changes_by_name.items():
        config, folder = checked_config(BASE | changes), tmp_path / name
        folder.mkdir()
        write_config(folder, config)
        rows = parameter_rows(tiny_learner(config), make_mesh(config.mesh))
        write_parameters(folder, rows)


def test_program_prints_inherited_settings(tmp_path, capsys):
    """With the field that would hold them; a run without a table has a note in their place."""
    write_runs(tmp_path, {'adamw': {}, 'muon': {'optim.name': 'muon', 'optim.lr': 0.02}})
    targets, notes = [Target(n, tmp_path / n / 'checkpoints', (1,)) for n in ('adamw', 'muon')], []
    print_parameters(*targets, notes.append)
    printed = capsys.readouterr().out
    assert 'parameters of muon that differ from adamw:' in printed and not notes
    assert re.search(r'^embedding +lr +0.003 +0.02 +inherits optim.lr$', printed, re.MULTILINE)
    assert printed.splitlines()[-1].endswith('such as optim.others_lr.')
    (tmp_path / 'muon' / 'parameters.json').unlink()
    print_parameters(*targets, notes.append)
    assert not capsys.readouterr().out and 'muon has no parameters.json' in notes[0]


def test_report_lists_settings(tmp_path):
    """From the runs' records; runs without a table have no rows."""
    runs = {'plain': {}, 'higher rate': {'optim.embedding_lr': 0.01}}
    write_runs(tmp_path, runs)
    comparisons = [
        types.SimpleNamespace(
            variant=types.SimpleNamespace(name=name), display_workdirs=[str(tmp_path / name)]
        )
        for name in runs
    ]
    listed = settings_rows(comparisons)
    assert [(row['variant'], row['group'], row['column']) for row in listed] == [
        ('higher rate', 'embedding', 'lr'),
        ('higher rate', 'embedding', 'decay/step'),
    ]
    (tmp_path / 'plain' / 'parameters.json').unlink()
    assert settings_rows(comparisons) == settings_rows([]) == []


def test_costs_split_parameters_by_use():
    """The time of a step is its tokens over the speed. Runs without the columns have no rows."""
    record = {
        'lookup_parameters': 1024,
        'matmul_parameters': 20_000,
        'vector_parameters': 64,
        'flops_per_token': 1.2e5,
        'batch_size': 4,
        'seq_len': 8,
    }

    def comparison(name, record):
        variant = types.SimpleNamespace(name=name, records=[record])
        loss = types.SimpleNamespace(mean=2.5)
        return types.SimpleNamespace(variant=variant, tokens_per_sec=640.0, loss=loss)

    rows = cost_rows([comparison('base', record), comparison('wide', record)])
    assert [row['variant'] for row in rows] == ['base', 'wide']
    assert list(rows[0].values())[1:] == ['1,024', '20,000', '64', '0.12', '50.0', '2.5000']
    assert cost_rows([comparison('base', record), comparison('older', {})]) == []
