"""Pages of the Python API, written from `__all__` of each room and the docstrings behind it.

A docstring that omits a parameter, the return value or an error fails the build.
"""

import functools
import importlib
import inspect
import itertools
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType

from eval import load, runs
from lm.config.fields import CHOICES

ROOT = Path(__file__).parents[1]
ROOMS = [
    *(load.__name__, runs.__name__),
    *(
        '.'.join(path.parent.relative_to(ROOT).parts)
        for path in sorted((ROOT / 'modules').rglob('__init__.py'))
        if path.read_text()
    ),
]


def pages() -> dict[str, str]:
    """Returns {name of a page: text}. Raises ValueError if a docstring is incomplete."""
    modules = {room: importlib.import_module(room) for room in ROOMS}
    lacking = [fault for module in modules.values() for fault in faults(module)]
    if lacking:
        raise ValueError('incomplete docstrings of the Python API: ' + '; '.join(lacking))
    head = (
        '# Python API\n\n[Checkpoints and results in Python](../../guide/python.md) shows how to '
        'use these modules. Letters in shapes: B batch, T position, S key position, D model width, '
        'N heads, K key heads, H head width, V vocabulary, L layer, M tokens.\n\n'
    )
    index = '\n'.join(['```{toctree}', ':maxdepth: 1', '', *modules, '```', ''])
    return {'index.md': head + index} | {f'{room}.md': page(modules[room]) for room in modules}


def page(module: ModuleType) -> str:
    """Returns the page of a room: its docstring, and an entry for each public name."""
    entries = '\n'.join(entry(module, name) for name in public(module))
    text = f'# {module.__name__}\n\n{inspect.getdoc(module)}\n'
    return text + (f'\n```{{eval-rst}}\n{entries}```\n' if entries else '')


def entry(module: ModuleType, name: str) -> str:
    """Returns the directive that documents a public name."""
    value, full = getattr(module, name), f'{module.__name__}.{name}'
    if inspect.isclass(value):
        return f'.. autoclass:: {full}\n   :members:\n   :exclude-members: __init__, __new__\n'
    if inspect.isfunction(value):
        return f'.. autofunction:: {full}\n'
    return f'.. py:data:: {full}\n\n   {sentence(module, name)}\n'


def sentence(module: ModuleType, name: str) -> str:
    """Returns the line about a table of parts, with its cards, or the comment above a constant."""
    value = getattr(module, name)
    fields = [field for field, choice in CHOICES.items() if choice.table is value]
    if fields:
        names = ', '.join(f'``{field}``' for field in fields)
        return f'The parts that {names} can name; see their :doc:`cards <../parts/{fields[0]}>`.'
    comment = re.search(rf'((?:^#: .*\n)+){name}\b', inspect.getsource(module), re.MULTILINE)
    return ' '.join(comment[1].replace('#: ', '').split()) if comment else ''


def public(module: ModuleType) -> list[str]:
    return list(getattr(module, '__all__', []))


def faults(module: ModuleType) -> Iterator[str]:
    """Yields the faults in the docstrings of a room's public names."""
    names = [name for name, value in vars(module).items() if not name.startswith('_')]
    if not hasattr(module, '__all__') and any(
        not inspect.ismodule(getattr(module, name)) for name in names
    ):
        yield f'{module.__name__} has no __all__'
    for name in public(module):
        value, full = getattr(module, name), f'{module.__name__}.{name}'
        if inspect.isclass(value):
            text = inspect.getdoc(value) if value.__doc__ else None
            if not text or text.startswith(f'{value.__name__}('):  # what dataclasses write
                yield f'{full} has no docstring'
            for field in silent_fields(value):
                yield f'{full}.{field} has no comment "#: " beside or above it'
            for method, function in methods(value):
                yield from (f'{full}.{method} {fault}' for fault in lacks(function))
        elif inspect.isfunction(value):
            yield from (f'{full} {fault}' for fault in lacks(value))
        elif not sentence(module, name):
            yield f'{full} is neither a table of parts nor has a comment "#: " above it'


def silent_fields(cls: type) -> Iterator[str]:
    """Yields the fields of a class that no comment describes."""
    for above, line in itertools.pairwise(inspect.getsource(cls).splitlines()):
        field = re.match(r'    (\w+): ', line)
        is_field = field and field[1] in inspect.get_annotations(cls)  # others are words of text
        if is_field and '#: ' not in line and not above.startswith('    #: '):
            yield field[1]


def methods(cls: type) -> Iterator[tuple[str, Callable]]:
    """Yields the public methods and properties that a class defines itself."""
    package = cls.__module__.split('.')[0]
    for name, value in vars(cls).items():
        for kind, attribute in (
            (property, 'fget'),
            (functools.cached_property, 'func'),
            (classmethod | staticmethod, '__func__'),
        ):
            if isinstance(value, kind):
                value = getattr(value, attribute)
        is_defined = inspect.isfunction(value) and value.__module__.split('.')[0] == package
        if is_defined and not name.startswith('_'):
            yield name, value


def lacks(function: Callable) -> Iterator[str]:
    """Yields the faults in the docstring of a function."""
    text = inspect.getdoc(function) or ''
    if not text:
        yield 'has no docstring'
        return
    parts = re.split(r'^(Args|Returns|Yields|Raises):\n', text, flags=re.MULTILINE)
    sections = dict(zip(parts[1::2], parts[2::2], strict=True))
    signature = inspect.signature(function)
    parameters = [name for name in signature.parameters if name not in ('self', 'cls')]
    documented = re.findall(r'^  \**(\w+): \S', sections.get('Args', ''), re.MULTILINE)
    for name in parameters:
        if name not in documented:
            yield f'has no entry in Args for {name}'
    for name in documented:
        if name not in parameters:
            yield f'documents a parameter {name} that it does not have'
    first = text.split()[0]
    if signature.return_annotation not in (None, 'None') and not (
        {'Returns', 'Yields'} & {first, *sections}
    ):
        yield 'does not document its return value'
    raises = re.search(r'^\s+raise \w+Error\(', inspect.getsource(function), re.MULTILINE)
    if (raises or 'Raises' in parts[0]) and 'Raises' not in {first, *sections}:
        yield 'does not document in Raises what it raises'
