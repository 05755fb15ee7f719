"""The table of measures: the measures of every module here, by the names of their functions.

A measure is a function without arguments, decorated by `eval.claims.lab.measure`; its docstring
states the quantities and their source.
"""

import importlib
import pkgutil

from eval.claims import measures
from eval.claims.lab import Measure

MODULES = [
    importlib.import_module(module_info.name)
    for module_info in pkgutil.iter_modules(measures.__path__, f'{measures.__name__}.')
    if not module_info.name.endswith(('.__main__', '.rows'))
]
MEASURES = {
    name: member
    for module in MODULES
    for name, member in vars(module).items()
    if isinstance(member, Measure)
}
