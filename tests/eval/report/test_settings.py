"""Differences between the parameter tables of two runs."""

import types

from eval.report.tables import settings_rows
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


def test_report_lists_settings(tmp_path):
    """From the runs' records; runs without a table have no rows."""
    comparisons = []
    for name, changes in {'plain': {}, 'other rate': {'optim.embedding_lr': 0.01}}.items():
        config, folder = checked_config(BASE | changes), tmp_path / name
        folder.mkdir()
        write_config(folder, config)
        rows = parameter_rows(tiny_learner(config), make_mesh(config.mesh))
        write_parameters(folder, rows)
        variant = types.SimpleNamespace(name=name)
        comparisons.append(types.SimpleNamespace(variant=variant, display_workdirs=[str(folder)]))
    listed = settings_rows(comparisons)
    assert [(row['variant'], row['group'], row['column']) for row in listed] == [
        ('other rate', 'embedding', 'lr'),
        ('other rate', 'embedding', 'decay/step'),
    ]
    (tmp_path / 'plain' / 'parameters.json').unlink()
    assert settings_rows(comparisons) == settings_rows([]) == []
