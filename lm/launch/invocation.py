"""Description of the running command, for the record of a run's starts."""

import ast
import contextlib
import inspect
import shlex
import sys
from pathlib import Path

from absl import flags
from ml_collections.config_flags import config_flags

from lm.storage.files import expand_home

PROGRAM = 'train.py'


def describe_invocation() -> dict[str, str | None]:
    """Returns `command`, the command line, and `question`, the docstring of the config file.

    Both are None in a process with another program, such as a worker of Ray, whose command line is
    not the user's.
    """
    if Path(sys.argv[0]).name != PROGRAM:
        return {'command': None, 'question': None}
    return {'command': shlex.join(sys.argv), 'question': _read_question()}


def _read_question() -> str | None:
    with contextlib.suppress(OSError, ValueError, SyntaxError, KeyError, AttributeError):
        path = config_flags.get_config_filename(flags.FLAGS['config'])
        text = Path(expand_home(path.partition(':')[0])).read_text()
        docstring = ast.get_docstring(ast.parse(text))
        return inspect.cleandoc(docstring) if docstring else None
    return None
