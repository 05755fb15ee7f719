"""Cards of parts, written from their tables: description, options, incompatible parts, studies and
tests.
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
from docs.docstrings import table, to_markdown
from eval.console.listings import SYMBOLS, option_type, part_rows, value_form
from lm.config.fields import CHOICES
from lm.config.resolve import resolve
from lm.model.check import check
from modules.options import OptionDeclaration

ROOT = Path(__file__).parents[1]
STUDIES = ROOT / 'configs' / 'studies'
SUMMARY = (ROOT / 'docs' / 'studies.md').read_text()
TESTS = {  # patterns of the files in tests/ that hold the rows of a field
    'model.norm': ('modules/norm_references.py', 'modules/test_running_norms.py'),
    'model.placement': ('modules/test_placements.py',),
    'model.stream': ('modules/test_residual.py', 'lm/model/test_streams.py'),
    'model.attention': (
        'modules/test_attention.py',
        'modules/test_linear_attention.py',
        'modules/test_recurrent_attention.py',
    ),
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
    'kernels.recurrence': ('modules/test_recurrence_kernels.py',),
    'kernels.matmul': (
        'modules/test_kernels.py',
        'modules/test_wta_crs.py',
        'modules/test_low_precision.py',
    ),
    'kernels.rms_norm': ('modules/test_rms_norm_kernels.py', 'modules/test_gpu_kernels.py'),
    'kernels.softmax': ('modules/test_softmax_kernels.py',),
    'kernels.cross_entropy': (
        'modules/test_cross_entropy_kernels.py',
        'modules/test_gpu_kernels.py',
    ),
}


def tables() -> list[str]:
    """Returns the first field of each table of parts."""
    first: dict[int, str] = {}
    for field, choice in CHOICES.items():
        first.setdefault(id(choice.table), field)
    return list(first.values())


def cards(field: str) -> Iterator[str]:
    """Yields the lines of the page on the table that a field chooses from.

    Raises ValueError for a part without a description or a test, and for an option without a
    description.
    """
    shared = [f for f in CHOICES if CHOICES[f].table is CHOICES[field].table and f != field]
    yield f'# {field}\n'
    same = ', '.join(f'`{name}`' for name in shared)
    yield f'`{field}={value_form(CHOICES[field])}`' + (
        f'. The same names are valid for {same}.\n' if shared else '\n'
    )
    if field in SYMBOLS:
        yield to_markdown(SYMBOLS[field]) + '\n'
    for row in part_rows(field):
        if not row.text or not all(option.option.description for option in row.options.values()):
            raise ValueError(f'{field}={row.name} or one of its options has no description')
        yield f'## {row.name}\n'
        yield to_markdown(row.text) + '\n'
        if row.options:
            yield table(
                ['option', 'default', 'type and bounds', 'description'], options(row.options)
            )
            yield ''
        if lines := refusals().get((field, row.name)):
            yield '**Incompatible with**\n'
            yield '\n'.join(f'- {line}' for line in lines) + '\n'
        if lines := studies().get((field, row.name)):
            yield '**Studies**\n'
            yield '\n'.join(f'- {line}' for line in lines) + '\n'
        yield f'**Tests:** {", ".join(f"`{path}`" for path in find_tests(field, row.name))}\n'


def options(declared: dict[str, OptionDeclaration]) -> list[list[str]]:
    """Returns the rows of the table of a part's options."""
    return [
        [f'`{path}`', f'`{option.default}`', option_type(option), option.option.description]
        for path, option in declared.items()
    ]


def find_refusal(*chosen: tuple[str, str]) -> str:
    """Returns why the default config with these rows cannot be trained, or '' if it can."""
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
    """Returns {(field, row): errors} of the checks of a config.

    A row is tried beside the rows of the default config. If that passes, it is tried beside each
    row of every other table.
    """
    rows = [(field, name) for field in tables() for name in CHOICES[field].table]
    by_itself = {row: find_refusal(row) for row in rows}
    errors = {row: [f'the default config: {error}'] for row, error in by_itself.items() if error}
    trained = [row for row in rows if not by_itself[row]]
    for first, second in itertools.combinations(trained, 2):
        if first[0] != second[0] and (error := find_refusal(first, second)):
            errors.setdefault(first, []).append(f'`{"=".join(second)}`: {error}')
            errors.setdefault(second, []).append(f'`{"=".join(first)}`: {error}')
    return {row: [escape_markdown(line) for line in lines] for row, lines in errors.items()}


def escape_markdown(text: str) -> str:
    """Escapes Markdown outside backticks."""
    parts = re.split(r'(`[^`]*`)', text)
    return ''.join(p if p.startswith('`') else re.sub(r'([*_<>|\[\]])', r'\\\1', p) for p in parts)


@functools.cache
def studies() -> dict[tuple[str, str], list[str]]:
    """Returns {(field, row): lines of docs/studies.md}, for the studies that sweep over the row."""
    lines_by_row: dict[tuple[str, str], list[str]] = {}
    first_field = {id(CHOICES[field].table): field for field in reversed(tables())}
    for page in sorted(STUDIES.glob('results/*.md')):
        module = importlib.import_module(f'configs.studies.{page.stem}')
        kinds = dict.fromkeys(re.findall(rf'{page.stem}\.py:(\w+)', module.__doc__))
        configs = [module.get_config(), *map(module.get_config, kinds)]
        row = re.search(rf'\| (.*{page.name}.*) \| (.*) \|', SUMMARY)
        # Links of studies.md start from docs; the page of a part lies two folders below.
        line = ': '.join(row.groups()).replace('](', '](../../')
        for path, value in itertools.chain.from_iterable(
            swept_values(c.get('sweep')) for c in configs
        ):
            if path in CHOICES and isinstance(value, str):
                for name in CHOICES[path].table.keys() & set(re.split(r'[+:]', value)):
                    row_key = first_field[id(CHOICES[path].table)], name
                    lines = lines_by_row.setdefault(row_key, [])
                    lines += [line] * (line not in lines)
    return lines_by_row


def swept_values(sweep: Any) -> Iterator[tuple[str, Any]]:
    """Yields (path, value) of everything that a sweep sets."""
    if isinstance(sweep, dict):
        for path, value in sweep.items():
            several = value if isinstance(value, tuple | list) else (value,)
            yield from ((path, v) for v in several) if '.' in path else swept_values(value)
    elif isinstance(sweep, tuple | list):
        for part in sweep:
            yield from swept_values(part)


def find_tests(field: str, name: str) -> list[str]:
    """Returns the files of TESTS that name a row. Raises ValueError if none does."""
    patterns, row = TESTS.get(field, ()), CHOICES[field].table[name]
    files = dict.fromkeys(path for p in patterns for path in sorted((ROOT / 'tests').glob(p)))
    symbol = row.__name__ if inspect.isclass(row) or inspect.isfunction(row) else name
    mention = re.compile(rf'\b{symbol}\b|[\'"=+]{name}[\'":+_]')
    paths = [path for path in files if mention.search(path.read_text())]
    if not paths:
        raise ValueError(f'no file of TESTS in docs/cards.py names {field}={name}')
    return [str(path.relative_to(ROOT)) for path in paths]
