"""The table of measures: what each module here has, by the names of the functions.

A measure is a function without arguments under `eval.claims.lab.measure`; its docstring says what
is computed, and of whom.
"""

import importlib
import pkgutil

from eval.claims import measures
from eval.claims.lab import Measure

MODULES = [
    importlib.import_module(one.name)
    for one in pkgutil.iter_modules(measures.__path__, f'{measures.__name__}.')
    if not one.name.endswith(('.__main__', '.rows'))
]
MEASURES = {
    name: one
    for module in MODULES
    for name, one in vars(module).items()
    if isinstance(one, Measure)
}
