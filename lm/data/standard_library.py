"""Two texts that every interpreter has: sources of its standard library, and their docstrings."""

import ast
import os
import sysconfig
import warnings
from collections.abc import Iterator
from pathlib import Path

# Tests are two thirds of the library, and largely tables; packages differ between machines.
EXCLUDED_DIRS = {'site-packages', 'dist-packages', 'test', 'tests', 'idle_test'}
# Written by the build of one interpreter: without them, equal versions hold equal corpora.
EXCLUDED_PREFIXES = ('_sysconfigdata', 'config-')


def list_modules() -> dict[str, Path]:
    """Returns {path below the library: file}, sorted.

    Raises:
      ValueError: if this interpreter has no sources.
    """
    root = Path(sysconfig.get_path('stdlib'))
    if names := sorted(_list_names(root)):
        return {name: root / name for name in names}
    raise ValueError(
        f'this interpreter has no .py files in {root} (it may be frozen or zipped). Use your own '
        'text: data.source=text:GLOB.'
    )


def _list_names(root: Path) -> Iterator[str]:
    for folder, dirs, names in os.walk(root):
        candidates = [name for name in dirs if not name.startswith(EXCLUDED_PREFIXES)]
        dirs[:] = [name for name in candidates if name not in EXCLUDED_DIRS]
        for name in names:
            if name.endswith('.py') and not name.startswith(EXCLUDED_PREFIXES):
                yield (Path(folder) / name).relative_to(root).as_posix()


def read_docstrings(code: bytes) -> str:
    """Returns the docstrings of a module, its classes and its functions, with blank lines between.

    Args:
      code: source of the module.

    Returns:
      The text, '' if there are none; in the order of the source, without common indentation.
    """
    documented = ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef
    with warnings.catch_warnings(action='ignore', category=SyntaxWarning):  # of invalid escapes
        module = ast.parse(code)
    nodes = [node for node in ast.walk(module) if isinstance(node, documented)]
    nodes.sort(key=lambda node: node.lineno)
    docstrings = [ast.get_docstring(node) for node in (module, *nodes)]
    return ''.join(f'{docstring}\n\n' for docstring in docstrings if docstring)
