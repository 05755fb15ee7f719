"""Contract: pages that are not of the guide say what there is."""

import importlib.util

import pytest

from lm.launch import exit_status
from tests import ROOT


@pytest.fixture(scope='module')
def generate():
    """The module that writes the reference; docs/ is no package."""
    spec = importlib.util.spec_from_file_location('generate', ROOT / 'docs' / 'generate.py')
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


class TestStatuses:
    def test_are_listed_by_number_with_what_a_launcher_does(self, generate):
        lines = generate.statuses().splitlines()
        rows = [[cell.strip() for cell in line.split('|')[1:-1]] for line in lines if '`' in line]
        found = {name.strip('`'): (number, does) for number, name, _, does, _ in rows[1:]}
        again, final = 'starts the command again', 'ends with it'
        assert found == {
            'DONE': (str(exit_status.DONE), final),
            'BAD_INPUT': (str(exit_status.BAD_INPUT), final),
            'DIVERGED': (str(exit_status.DIVERGED), final),
            'DOES_NOT_FIT': ('3', final),
            'RESUME': (str(exit_status.RESUME), again),
            'SIGNALLED': (f'{exit_status.SIGNALLED} + n', again),
        }

    def test_without_words_is_an_error(self, generate, monkeypatch):
        path = 'lm/launch/exit_status.py'
        words = {k: v for k, v in generate.STATUSES[path].items() if k != 'RESUME'}
        monkeypatch.setitem(generate.STATUSES, path, words)
        with pytest.raises(ValueError, match=r'exit_status\.py: .*: RESUME'):
            generate.statuses()
