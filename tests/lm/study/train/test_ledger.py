"""Content of sweep.json; and a sweep resumes with its cells after an upgrade."""

import itertools
import json
import shutil

import pytest

from configs import default
from lm.config.fields import FIELDS
from lm.config.resolve import resolve, to_dict
from lm.record.run import Run
from lm.record.upgrade import resolve_stored
from lm.record.workdir import write_config
from lm.storage.files import read_json, write_json
from lm.study.plan.cells import expand_sweep, group_by_program
from lm.study.train.ledger import open_sweep, read_sweep
from lm.study.train.waves import WavePlan
from tests.helpers import tiny_raw
from tests.lm.record.test_upgrade import V0

SWEPT = {'optim.lr': (1e-3, 3e-3), 'train.seed': (0, 1), 'model.norm': ('rmsnorm', 'layernorm')}
OLD_NAMES = json.loads((V0 / 'expected.json').read_text())['sweep']['cells']


@pytest.fixture
def sweep(tmp_path):
    """Returns (folder of a sweep from commit 0447279, its base in the present form)."""
    folder = shutil.copytree(V0 / 'sweep', tmp_path / 'sweep')
    raw, base = default.get_config().to_dict(), read_json(folder / 'sweep.json')['base']
    for section in ('model', 'data', 'train'):
        fields = [name for name in base[section] if f'{section}.{name}' in FIELDS]
        left_open = ('mlp', 'final_norm')
        raw[section] |= {name: base[section][name] for name in fields if name not in left_open}
    raw['model']['reparam'] = 'auto'
    raw['scaling']['embedding_std'] = None
    return folder, raw


def names(grouped):
    return {
        json.dumps(cell.changes, sort_keys=True): cell.name for group in grouped for cell in group
    }


def open_cells(folder, raw, swept, continue_changed=False):
    """Returns the groups, with the names of the cells' folders."""
    plan = WavePlan(raw, swept)
    while names := open_sweep(
        folder, resolve(raw), plan.plan_wave(folder).all_groups, continue_changed
    ):
        plan.folder_names |= names
    return plan.plan_wave(folder).all_groups


def begin(folder, cell):
    (folder / cell.name).mkdir()
    write_config(folder / cell.name, cell.recipe)


def test_cells_from_older_version_keep_names(sweep):
    """The cells also keep their results. Cells that had not begun get their present names."""
    folder, raw = sweep
    fresh = names(group_by_program(expand_sweep(raw, SWEPT)))
    kept_names = names(open_cells(folder, raw, SWEPT))
    assert kept_names.keys() == OLD_NAMES.keys() == fresh.keys()
    for changes, name in kept_names.items():
        begun = 'layernorm' not in changes
        assert name == (OLD_NAMES if begun else fresh)[changes]
        assert Run(folder / name).is_final == begun and fresh[changes] != OLD_NAMES[changes]
    assert (
        names(open_cells(folder, raw, SWEPT)) == kept_names
    )  # sweep.json has the present form now
    assert {cell['cell'] for cell in read_json(folder / 'sweep.json')['cells']} == {
        *kept_names.values()
    }


def test_cell_with_other_config_is_new(sweep):
    """Holds also for equal changes. Catches matching by changes."""
    folder, raw = sweep
    raw['optim']['weight_decay'] = 0.2
    with pytest.raises(ValueError, match=r'optim\.weight_decay: 0\.1 -> 0\.2'):
        open_cells(folder, raw, SWEPT)
    new_names = names(open_cells(folder, raw, SWEPT, continue_changed=True))
    assert not {*new_names.values()} & {*OLD_NAMES.values()}
    listed = read_sweep(folder)['cells']
    assert [c['group'] for c in listed if c['cell'] in OLD_NAMES.values()] == [None] * 4


def test_present_folder_name_takes_precedence(sweep):
    folder, raw = sweep
    cell = group_by_program(expand_sweep(raw, SWEPT))[0][0]
    (folder / cell.name).mkdir()
    assert open_cells(folder, raw, SWEPT)[0][0].name == cell.name


def test_folders_without_config_are_no_cells(sweep):
    folder, raw = sweep
    for name, text in zip(OLD_NAMES.values(), ('{', '{"model": {}}'), strict=False):
        (folder / name / 'config.json').write_text(text)
    folder_names = {*names(open_cells(folder, raw, SWEPT)).values()}
    assert len(folder_names & {*OLD_NAMES.values()}) == 2


def test_old_record_is_read_in_present_form(sweep):
    folder, _ = sweep
    old_sweep, present = read_json(folder / 'sweep.json'), read_sweep(folder)
    assert present['axes'] == old_sweep['axes'] and present['base'] == to_dict(
        resolve_stored(old_sweep['base'])
    )
    assert [cell['changes'] for cell in present['cells']] == [
        cell['changes'] for cell in old_sweep['cells']
    ]
    assert present['cells'][-1]['differs'] == present['cells'][-1]['changes'] | {
        'model.final_norm': 'layernorm'
    }
    old_sweep['cells'][0]['changes']['model.norm_eps'] = 0.1
    write_json(folder / 'sweep.json', old_sweep)
    present = read_sweep(folder)
    assert (
        present['axes']['norm.eps'] == [0.1] and present['cells'][0]['differs']['norm.eps'] == 0.1
    )


def test_cells_record_differences_from_base(tmp_path):
    """Includes fields that follow from the changes."""
    raw = tiny_raw()
    open_cells(tmp_path, raw, {'model.placement': ('pre', 'wide')})
    record = read_sweep(tmp_path)
    assert record['base'] == to_dict(resolve(raw)) and record['axes'] == {
        'model.placement': ['pre', 'wide']
    }
    plain, wide = record['cells']
    assert (
        plain['differs'] == {}
        and wide['differs'].items()
        >= {
            'model.placement': 'wide',
            'model.mlp': 'moe',
            'model.reparam': 'shared',
            'mlp.n_experts': 4,
        }.items()
    )


def test_cells_from_other_axes_stay_on_record(tmp_path):
    raw = tiny_raw()
    ((first,),) = open_cells(tmp_path, raw, {'optim.lr': (0.1,)})
    open_cells(tmp_path, raw, {'optim.lr': (0.2,)})
    assert [c['changes'] for c in read_sweep(tmp_path)['cells']] == [{'optim.lr': 0.2}]
    begin(tmp_path, first)
    open_cells(tmp_path, raw, {'optim.lr': (0.1,)})
    open_cells(tmp_path, raw, {'optim.lr': (0.2,)})
    cells_now = read_sweep(tmp_path)['cells']
    assert [(c['changes'], c['group']) for c in cells_now] == [
        ({'optim.lr': 0.2}, 0),
        ({'optim.lr': 0.1}, None),
    ]


@pytest.mark.parametrize('text', ['', '{"base": {}}', '{"base": {}, "cells": 3}', '[', 'null'])
def test_damaged_record_is_rebuilt_from_folders(tmp_path, text):
    """Cells that are no longer part of the axes stay on record, and finished cells are not run
    again.
    """
    raw, lines = tiny_raw(), []
    cell, *_ = expand_sweep(raw, {'optim.lr': (0.1, 0.2, 0.3)})
    begin(tmp_path, cell)
    (tmp_path / 'sweep.json').write_text(text)
    groups = group_by_program(expand_sweep(raw, {'optim.lr': (0.2, 0.3)}))
    open_sweep(tmp_path, resolve(raw), groups, False, lines.append)
    (line,) = lines
    assert f'{tmp_path}/sweep.json' in line and 'the 1 cells that have a folder' in line
    changes = {
        cell_record['cell']: cell_record['changes'] for cell_record in read_sweep(tmp_path)['cells']
    }
    assert changes[cell.name] == {'optim.lr': 0.1} and len(changes) == 3


def test_sweep_resumes_with_another_mesh(tmp_path):
    """The sweep keeps its folders; if cells differ in their meshes, each has its own folder."""
    raw, swept = tiny_raw(), {'optim.lr': (1e-3, 3e-3)}
    groups = open_cells(tmp_path, raw, swept)
    for cell in itertools.chain(*groups):
        begin(tmp_path, cell)
    wider = raw | {'mesh': raw['mesh'] | {'fsdp': 2}}
    assert names(group_by_program(expand_sweep(wider, swept))) != names(groups)
    assert names(open_cells(tmp_path, wider, swept)) == names(groups)
    meshes = open_cells(tmp_path, raw, swept | {'mesh.fsdp': (1, 2)})
    assert len({cell.name for group in meshes for cell in group}) == 4
    assert {*names(groups).values()} < {cell.name for group in meshes for cell in group}
