"""Contract: who may import whom, and that every config field is read (`ast`; nothing is run)."""

import ast
import functools
import graphlib
from collections.abc import Mapping
from pathlib import Path

import pytest

from lm.config.fields import CHOICES, FIELDS
from lm.config.groups import OPTIMIZER, SETTINGS
from lm.config.recipe import ATTRIBUTES
from modules.kernels import OPERATIONS
from modules.optim.groups import GROUPS
from modules.optim.stages import STAGES, stage_inputs
from tests import ROOT

pytestmark = pytest.mark.xdist_group('layering')  # one process parses the files

MAY_IMPORT = {  # of the project's own rooms
    'modules': {'modules'},
    'configs': {'configs'},
    'lm': {'modules', 'lm'},
    'eval': {'modules', 'lm', 'eval'},
    'train.py': {'modules', 'lm', 'eval'},
    'tpu': {'modules', 'lm', 'tpu'},
    'tests': {'modules', 'configs', 'lm', 'eval', 'tpu', 'train', 'tests'},
}
# Plans are drawn as all else is, by a file of `eval` that needs no other of the project.
ONE_LOOK = {('tpu/figures.py', 'eval.charts.')}
FILES = sorted(p for room in MAY_IMPORT for p in [ROOT / room, *(ROOT / room).rglob('*.py')])


class Trees(Mapping):
    """Syntax trees by path. Each is parsed at its first use, since collection uses none."""

    def __init__(self, paths):
        self.paths = tuple(paths)

    def __iter__(self):
        return iter(self.paths)

    def __len__(self):
        return len(self.paths)

    def __getitem__(self, path):
        return parse_file(path)


@functools.cache
def parse_file(path):
    return ast.parse((ROOT / path).read_text())


@functools.cache
def nodes(path) -> tuple[ast.AST, ...]:
    """Returns all nodes of a file, cached: walking a tree takes longer than parsing it."""
    return tuple(ast.walk(parse_file(path)))


TREES = Trees(p.relative_to(ROOT) for p in FILES if p.is_file())
NO_READERS = (
    'lm/config/resolve.py',
    'lm/config/fields.py',
    'lm/model/check.py',
    'lm/config/other_programs.py',
    'lm/config/suggestions.py',
    'lm/study/tables/columns.py',
    'lm/record/upgrade.py',
)
LM = [path for path in TREES if path.parts[0] == 'lm']
PRODUCT = Trees(path for path in TREES if path.parts[0] != 'tests')


def imports(tree_nodes):
    """Yields the dotted names of nodes: `from a import b` gives a.b."""
    for node in tree_nodes:
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert not node.level, 'imports are absolute'
            yield from (f'{node.module}.{alias.name}' for alias in node.names)


def test_imports_follow_the_arrows():
    """All files are in one test: separate tests would cost 8 CPU-seconds more."""
    ours = {Path(room).stem for room in MAY_IMPORT}
    for path in TREES:
        names = [name for name in imports(nodes(path)) if (str(path), name[:12]) not in ONE_LOOK]
        rooms = {name.split('.')[0] for name in names}
        assert rooms & ours <= MAY_IMPORT[path.parts[0]], path
        if path.parts[0] == 'configs':
            assert rooms <= {'configs', 'ml_collections'}, path
        if str(path) == 'eval/charts.py':
            assert not rooms & ours


# Rooms of lm/, and which of the others each may import.
ROOMS = {
    'config': set(),
    'storage': set(),
    'launch': {'config', 'storage'},
    'data': {'config', 'storage'},
    'model': {'config'},
    'training': {'config', 'model'},
    'devices': {'config', 'model', 'training'},
    'record': {'config', 'storage', 'launch', 'training'},
    'inference': {'config', 'storage', 'data', 'model', 'training', 'devices', 'record'},
    'run': {'config', 'storage', 'launch', 'data', 'model', 'training', 'devices', 'record'}
    | {'inference'},
    'study': {'config', 'storage', 'launch', 'data', 'model', 'devices', 'record', 'run'},
}


def imported_rooms() -> dict[str, set[str]]:
    """Returns {package of lm/: the other packages that its files import}; '' for files at its
    root.
    """
    imported = {path.parts[1] if len(path.parts) > 2 else '': set() for path in LM}
    for path in LM:
        room = path.parts[1] if len(path.parts) > 2 else ''
        names = [name.split('.') for name in imports(nodes(path)) if name.startswith('lm.')]
        imported[room] |= {name[1] for name in names} - {room}
    return imported


def test_lm_packages_import_downwards():
    """Prints sizes for a reader, with -s."""
    arrows = imported_rooms()
    assert arrows.pop('') == set()  # __init__ alone
    assert arrows.keys() == ROOMS.keys()
    floors = {}
    for room in graphlib.TopologicalSorter(arrows).static_order():  # CycleError for a circle
        floors[room] = 1 + max((floors[below] for below in arrows[room]), default=0)
        print(floors[room], room, *sorted(arrows[room]))
        assert arrows[room] <= ROOMS[room], room
    n_arrows = sum(map(len, arrows.values()))
    print(f'{len(arrows)} rooms, {max(floors.values())} floors, {n_arrows} arrows')
    print(f'train.py: {len((ROOT / "train.py").read_text().splitlines())} lines')


def test_record_does_not_import_buckets():
    for path in LM:
        if path.parts[1] == 'record' and path.parts[2] != 'remote':
            assert not any(n.startswith('lm.record.remote') for n in imports(nodes(path))), path


def test_lm_packages_have_docstrings():
    for room in ROOMS:
        assert ast.get_docstring(TREES[Path('lm') / room / '__init__.py']), room


def test_linen_is_imported_only_by_modules_and_model():
    users = {p for p in PRODUCT if any('flax.linen' in name for name in imports(nodes(p)))}
    assert users  # the scan sees what it looks for
    model = {Path(f'lm/model/{name}.py') for name in ('block', 'pattern', 'transformer')}
    assert not {p for p in users if p.parts[0] != 'modules'} - model


def imported_at_the_top(tree):
    """Returns the dotted names of a module's imports outside functions."""
    return imports(tree.body)


def test_train_imports_no_table_or_figure_library():
    """Arrow and DuckDB took 0.4 s of the 1.6 s of imports; only sweeps use them."""
    ours, libraries = imports_at_start('train')
    assert {'jax', 'flax', 'absl'} <= libraries and {
        'lm.run.wave',
        'lm.study.train.engines',
    } <= ours
    slow = {'altair', 'duckdb', 'jinja2', 'pandas', 'pyarrow', 'scipy', 'vl_convert'}
    assert not libraries & slow


def test_suite_flags_import_no_suite_packages():
    """`python -m eval --help` lists the options of all suites."""
    ours, libraries = imports_at_start('eval.__main__')
    assert 'jax' in libraries and {'eval.suites.perplexity', 'eval.evaluation.suite_flags'} <= ours
    assert not libraries & {'altair', 'datasets', 'lm_eval', 'pyarrow', 'torch'}


def imports_at_start(module: str) -> tuple[set[str], set[str]]:
    """Returns (the project's modules, other packages) that importing a module imports."""
    modules = {
        '.'.join(path.with_suffix('').parts).removesuffix('.__init__'): path for path in TREES
    }
    frontier, visited, libraries = {module}, set(), set()
    while frontier:
        visited |= frontier
        names = {
            name for module in frontier for name in imported_at_the_top(TREES[modules[module]])
        }
        parts = [name.split('.') for name in names]
        ours = {'.'.join(part[:n]) for part in parts for n in range(1, len(part) + 1)}
        frontier = (ours & modules.keys()) - visited
        libraries |= {part[0] for part in parts}
    return visited, libraries


def test_sys_path_and_eval_are_untouched():
    for path in TREES:
        assert 'sys.path' not in imports(nodes(path)), path
        for node in nodes(path):
            if isinstance(node, ast.Attribute) and node.attr == 'path':
                assert ast.unparse(node) != 'sys.path', path
            if isinstance(node, ast.Import):
                bound = {a.asname or a.name.split('.')[0] for a in node.names}
                assert 'eval' not in bound, path


# Files of lm/ that know rows: defaults of fields, records of older versions, advice.
KNOW_ROWS = (
    'lm/config/fields.py',
    'lm/config/other_programs.py',
    'lm/config/resolve.py',
    'lm/record/upgrade.py',
    'lm/run/remedies.py',
    'lm/study/tables/columns.py',
)
# Names of rows that mean something else too: an operation, a family, an array of a batch, nothing.
ALSO_WORDS = {*OPERATIONS, 'mlp', 'spectral', 'prefix', 'none'}


def test_parts_are_named_only_in_tables():
    """The language model decides by the fields of a row. A row that is treated by its name would
    have to be known there, and so would the next row like it.
    """
    rows = {name for choice in CHOICES.values() for name in choice.table} - ALSO_WORDS
    assert len(rows) > 100
    names = {
        (str(path), node.value)
        for path in LM
        if str(path) not in KNOW_ROWS
        for node in nodes(path)
        if isinstance(node, ast.Constant) and node.value in rows
    }
    assert not names


def test_rows_are_not_probed():
    """`getattr(part.row, ...)` has a default that no table knows."""
    for path in PRODUCT:
        for node in nodes(path):
            is_call = isinstance(node, ast.Call) and isinstance(node.func, ast.Name)
            if is_call and node.func.id in ('getattr', 'hasattr'):
                assert 'row' not in ast.unparse(node.args[0]).split('.'), (path, node.lineno)


# The attribute of a Recipe that has what a field names.
PARTS = {path: ATTRIBUTES.get(path, path.split('.')[1]) for path in CHOICES} | {
    f'kernels.{operation}': 'kernels' for operation in OPERATIONS
}


def test_every_config_field_is_read():
    """Fields are read as attributes of something called like their section, or by path; a field
    that names a row as the part of a recipe; one of a stage of an update as its keyword. The files
    that declare and check fields do not count, nor the columns of a table. Options of parts are
    handed on by name, and refused where no part reads them.
    """
    read_attributes, paths = set(), set()
    for path in PRODUCT:
        if path.parts[0] == 'configs' or str(path) in NO_READERS:
            continue
        for node in nodes(path):
            if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Attribute | ast.Name):
                owner = node.value.attr if isinstance(node.value, ast.Attribute) else node.value.id
                read_attributes.add((owner, node.attr))
            if isinstance(node, ast.Constant):
                paths.add(node.value)
    paths |= {f'optim.{option}' for stage in STAGES.values() for option in stage_inputs(stage)[1]}
    # `lm.config.groups` reads these by path; tests/lm/training/test_groups.py has their effects.
    paths |= {f'optim.{group}_{s}' for group in GROUPS for s in (*SETTINGS, OPTIMIZER)}
    assert len(FIELDS) > 50
    for path, field in FIELDS.items():
        section, name = path.split('.')
        owners = (section, 'config', 'cfg', 'every', 'fields', 'names')
        by_attribute = any((owner, name) in read_attributes for owner in owners)
        as_part = ('recipe', PARTS.get(path)) in read_attributes
        assert field.is_part_option or path in paths or by_attribute or as_part, path


# A docstring says first what something is or does; that of a study asks its question.
NO_BEGINNINGS = {
    *('Of', 'Those', 'As', 'By', 'Its', 'Into', 'Until', 'That', 'For'),
    *('Which', 'What', 'Where', 'How', 'Who'),
}


def test_docstrings_begin_with_a_verb_or_a_noun():
    documented = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    for path in PRODUCT:
        if path.parts[0] == 'configs':
            continue
        docstrings = [ast.get_docstring(n) for n in nodes(path) if isinstance(n, documented)]
        assert not [text for text in docstrings if text and text.split()[0] in NO_BEGINNINGS], path
