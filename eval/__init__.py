"""Evaluation: reads checkpoints and run records. `from eval import perplexity` hides no builtin."""

import importlib
from pathlib import Path
from typing import Any


def __getattr__(name: str) -> Any:
    """Imports the suites, and JAX with them, on first use.

    `python -m eval.X` imports this package before it prepares its process. The process must be
    prepared before JAX is imported.
    """
    if name == 'SUITES' or (Path(__file__).parent / 'suites' / f'{name}.py').exists():
        return getattr(importlib.import_module('eval.suites'), name)
    raise AttributeError(f'module {__name__!r} has no attribute {name!r}')
