"""Property: every bug made by hand can still be made, and the tests beside it are there."""

import ast
import re
import shlex

from tests import ROOT
from tests.bugs import BUGS
from tests.bugs.__main__ import broken


def test_every_bug_can_be_made():
    for bug in BUGS.values():
        changed = broken(bug)
        if bug.file.endswith('.py'):
            ast.parse(changed)


def test_the_tests_beside_a_bug_are_there():
    """The words of -k stand in the files that are named, or in their names."""
    for name, bug in BUGS.items():
        paths, _, chosen = bug.tests.partition(' -k ')
        files = [ROOT / path.partition('::')[0] for path in shlex.split(paths)]
        assert all(file.exists() for file in files), name
        sources = {
            one for file in files for one in (file.rglob('*.py') if file.is_dir() else [file])
        }
        text = '\n'.join(source.read_text() for source in sources).lower()
        wanted = {*re.findall(r'\.py::(\w+)', paths), *re.findall(r'\w+', chosen)}
        missing = {word for word in wanted - {'and', 'or', 'not'} if word.lower() not in text}
        assert not missing, name
