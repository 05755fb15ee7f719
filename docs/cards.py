"""Cards of parts, from their tables: what each is, its options, what it does not go with, the
studies that tried it, and the tests that hold it.
"""

import functools
import importlib
import inspect
import itertools
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from configs import default
from eval.console.listings import option_type, part_rows, value_form
from lm.config.fields import CHOICES
from lm.config.resolve import resolve
from lm.model.check import check
from modules.options import OptionDeclaration

ROOT = Path(__file__).parents[1]
PAPER = re.compile(r'arXiv:(\d{4}\.\d{4,5})')
STUDIES = ROOT / 'configs' / 'studies'
SUMMARY = (ROOT / 'docs' / 'studies.md').read_text()
TESTS = {  # where the rows of a field are held: patterns of files in tests/
    'model.norm': ('modules/norm_references.py', 'modules/test_running_norms.py'),
    'model.placement': ('modules/test_placements.py',),
    'model.attention': ('modules/test_attention.py', 'modules/test_linear_attention.py'),
    'model.activation': ('modules/test_activations.py',),
    'model.position': ('modules/test_positions.py',),
    'model.reparam': ('modules/test_reparam*.py',),
    'model.remat': ('lm/model/test_transformer.py',),
    'model.mlp': ('modules/test_mlp.py',),
    'model.readout': ('modules/test_readouts.py',),
    'loss.name': ('modules/test_losses.py', 'modules/test_adversarial_loss.py'),
    'optim.name': ('modules/test_optim*.py', 'lm/training/test_optimizers.py'),
    'optim.schedule': ('modules/test_optim.py',),
    'optim.decay_rule': ('modules/test_init_and_decay.py',),
    'optim.average': ('modules/test_optim_averages.py',),
    'scaling.name': ('modules/test_scaling.py',),
    'scaling.init': ('modules/test_init_and_decay.py',),
    'data.objective': ('modules/test_objectives.py',),
    'kernels.implementation': ('modules/test_kernels.py', 'modules/test_fused_attention.py'),
    'kernels.attention': (
        'modules/test_attention_kernels.py',
        'modules/test_fused_attention.py',
    ),
    'kernels.linear_attention': ('modules/test_linear_attention_kernels.py',),
    'kernels.matmul': ('modules/test_kernels.py', 'modules/test_wta_crs.py'),
    'kernels.rms_norm': ('modules/test_rms_norm_kernels.py', 'modules/test_gpu_kernels.py'),
    'kernels.softmax': ('modules/test_softmax_kernels.py',),
    'kernels.cross_entropy': (
        'modules/test_cross_entropy_kernels.py',
        'modules/test_gpu_kernels.py',
    ),
}


def table(head: list[str], rows: list[list[str]]) -> str:
    """Returns a table in Markdown."""
    lines = [head, ['---'] * len(head), *rows]
    return '\n'.join(
        '| ' + ' | '.join(' '.join(cell.replace('|', r'\|').split()) for cell in line) + ' |'
        for line in lines
    )


def tables() -> list[str]:
    """Returns the first field of each table of parts."""
    first: dict[int, str] = {}
    for field, choice in CHOICES.items():
        first.setdefault(id(choice.table), field)
    return list(first.values())


def cards(field: str) -> Iterator[str]:
    """Yields the page of the table that a field names a row of. Raises ValueError for a part
    without a description or a test, and for an option without words.
    """
    others = [f for f in CHOICES if CHOICES[f].table is CHOICES[field].table and f != field]
    yield f'# {field}\n'
    yield f'`{field}={value_form(CHOICES[field])}`' + (
        f', and so for {", ".join(f"`{name}`" for name in others)}.\n' if others else '\n'
    )
    for row in part_rows(field):
        if not row.text or not all(one.option.description for one in row.options.values()):
            raise ValueError(f'{field}={row.name} has no description, or an option without words')
        yield f'## {row.name}\n'
        papers = dict.fromkeys(PAPER.findall(row.text))
        if papers:
            yield ', '.join(f'[arXiv:{one}](https://arxiv.org/abs/{one})' for one in papers) + '\n'
        yield f'```text\n{row.text}\n```\n'
        if row.options:
            yield table(['option', 'default', 'type and bounds', 'what'], options(row.options))
            yield ''
        if words := refusals().get((field, row.name)):
            yield 'It does not go with everything:\n'
            yield '\n'.join(f'- {line}' for line in words) + '\n'
        if found := studies().get((field, row.name)):
            yield 'Tried here:\n'
            yield '\n'.join(f'- {line}' for line in found) + '\n'
        yield f'Held by {", ".join(f"`{path}`" for path in tests_of(field, row.name))}.\n'


def options(declared: dict[str, OptionDeclaration]) -> list[list[str]]:
    return [
        [f'`{path}`', f'`{one.default}`', option_type(one), one.option.description]
        for path, one in declared.items()
    ]


def refused(*chosen: tuple[str, str]) -> str:
    """Returns why the default config with these rows cannot be trained; '' where it can."""
    config = default.get_config()
    try:
        for field, name in chosen:
            section, key = field.split('.')
            config[section][key] = name
        check(resolve(config))
    except ValueError as error:
        return str(error)
    return ''


@functools.cache
def refusals() -> dict[tuple[str, str], list[str]]:
    """Returns (field, row) -> what the checks of a config say of it beside the default's rows, or
    else beside each row of every other table.
    """
    rows = [(field, name) for field in tables() for name in CHOICES[field].table]
    alone = {row: refused(row) for row in rows}
    found = {row: [f'By itself in the default config: {words}'] for row, words in alone.items()}
    found = {row: lines for row, lines in found.items() if alone[row]}
    for one, other in itertools.combinations([row for row in rows if not alone[row]], 2):
        if one[0] != other[0] and (words := refused(one, other)):
            found.setdefault(one, []).append(f'`{"=".join(other)}`: {words}')
            found.setdefault(other, []).append(f'`{"=".join(one)}`: {words}')
    return {row: [escaped(line) for line in lines] for row, lines in found.items()}


def escaped(words: str) -> str:
    """Returns words in which nothing is Markdown but what stands in backticks."""
    parts = re.split(r'(`[^`]*`)', words)
    return ''.join(p if p.startswith('`') else re.sub(r'([*_<>|\[\]])', r'\\\1', p) for p in parts)


@functools.cache
def studies() -> dict[tuple[str, str], list[str]]:
    """Returns (field, row) -> what the studies were of, and found, whose sweeps have the row."""
    found: dict[tuple[str, str], list[str]] = {}
    of_table = {id(CHOICES[field].table): field for field in reversed(tables())}
    for page in sorted(STUDIES.glob('results/*.md')):
        module = importlib.import_module(f'configs.studies.{page.stem}')
        kinds = dict.fromkeys(re.findall(rf'{page.stem}\.py:(\w+)', module.__doc__))
        configs = [module.get_config(), *map(module.get_config, kinds)]
        row = re.search(rf'\| (.*{page.name}.*) \| (.*) \|', SUMMARY)
        # Links of studies.md start from docs; the page of a part lies two folders below.
        line = ': '.join(row.groups()).replace('](', '](../../')
        for path, value in itertools.chain.from_iterable(swept(c.get('sweep')) for c in configs):
            if path in CHOICES and isinstance(value, str):
                for name in CHOICES[path].table.keys() & set(re.split(r'[+:]', value)):
                    lines = found.setdefault((of_table[id(CHOICES[path].table)], name), [])
                    lines += [line] * (line not in lines)
    return found


def swept(sweep: Any) -> Iterator[tuple[str, Any]]:
    """Yields (path, value) of everything that a sweep sets."""
    if isinstance(sweep, dict):
        for path, value in sweep.items():
            several = value if isinstance(value, tuple | list) else (value,)
            yield from ((path, one) for one in several) if '.' in path else swept(value)
    elif isinstance(sweep, tuple | list):
        for one in sweep:
            yield from swept(one)


def tests_of(field: str, name: str) -> list[str]:
    """Returns the files of TESTS that name a row. Raises ValueError where none does."""
    patterns, row = TESTS.get(field, ()), CHOICES[field].table[name]
    files = dict.fromkeys(path for p in patterns for path in sorted((ROOT / 'tests').glob(p)))
    own = row.__name__ if inspect.isclass(row) or inspect.isfunction(row) else name
    named = re.compile(rf'\b{own}\b|[\'"=+]{name}[\'":+_]')
    found = [path for path in files if named.search(path.read_text())]
    if not found:
        raise ValueError(f'no file of TESTS in docs/cards.py names {field}={name}')
    return [str(path.relative_to(ROOT)) for path in found]
