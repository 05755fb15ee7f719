"""Config files of other programs: which program a file is of, and its settings as flags."""

import ast
import json
import math
import os
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

SUFFIXES = ('.toml', '.yml', '.yaml', '.json')


def is_config_file(text: str) -> bool:
    """Returns whether a text names a config file of another program: by its suffix, or Python code
    that assigns values and defines no function.
    """
    path = Path(os.path.expanduser(text))
    if path.suffix in SUFFIXES:
        return True
    return path.suffix == '.py' and 'def ' not in _read_text(path) and bool(read_settings(text))


def is_foreign_config(text: str) -> bool:
    """Returns whether a value of --config is no Python file, such as llama3_8b or train.toml."""
    path = Path(os.path.expanduser(text.partition(':')[0]))
    is_name = not path.suffix and bool(path.name) and not path.exists()
    return is_name or is_config_file(text)


def read_settings(file: str) -> dict[str, str]:
    """Returns {'section.name': value} of a TOML, YAML, JSON or Python file; {} for a file that is
    missing, or that cannot be read as that.
    """
    path = Path(os.path.expanduser(file))
    readers = {'.toml': tomllib.loads, '.json': json.loads, '.py': _parse_assignments}
    try:
        tree = readers.get(path.suffix, _parse_yaml)(_read_text(path))
    except (ValueError, SyntaxError, RecursionError):
        return {}
    return flatten_settings(tree) if isinstance(tree, Mapping) else {}


def flatten_settings(tree: Mapping[str, Any], prefix: str = '') -> dict[str, str]:
    """Returns nested settings with dotted names, as texts. Those that are null are left out, and
    of a list of sections all but the first."""
    settings = {}
    for name, value in tree.items():
        if isinstance(value, Mapping):
            settings |= flatten_settings(value, f'{prefix}{name}.')
        elif isinstance(value, list) and value and isinstance(value[0], Mapping):
            settings |= flatten_settings(value[0], f'{prefix}{name}.')
        elif value is not None:
            settings[f'{prefix}{name}'] = str(value)
    return settings


def _read_text(path: Path) -> str:
    """Returns the text of a file; '' for one that cannot be read."""
    try:
        return path.read_text(encoding='utf-8', errors='replace')
    except OSError:
        return ''


def _parse_assignments(code: str) -> dict[str, Any]:
    """Returns {name: value} of the assignments of numbers and texts in Python code; sums and
    products of numbers are computed.
    """
    values = {}
    for node in ast.parse(code).body:
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
            value = _evaluate(node.value)
            values |= {} if value is None else {node.targets[0].id: value}
    return values


def _evaluate(node: ast.expr) -> Any:
    """Returns the value of a constant expression such as 5 * 8; None for any other."""
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Mult):
        factors = (_evaluate(node.left), _evaluate(node.right))
        are_numbers = all(isinstance(factor, int | float) for factor in factors)
        return math.prod(factors) if are_numbers else None
    return node.value if isinstance(node, ast.Constant) else None


def _parse_yaml(text: str) -> Any:
    """Returns the content of a YAML file; None without the library, or for another text."""
    try:
        import yaml
    except ImportError:  # it comes with ml_collections, which might drop it
        return None
    try:
        return yaml.safe_load(text)
    except yaml.YAMLError:
        return None
