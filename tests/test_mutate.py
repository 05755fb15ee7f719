"""Property: the faults that are put into a text, and their outcomes in an invented project."""

import subprocess

import pytest

from tests import mutate

SOURCE = '''"""Some words."""


def share(part: int = 3, *, whole: int | None = None) -> float:
    """Of a whole."""
    if part < 0 and whole:  # a comment
        raise ValueError(f'{part - 1} is less than 0')
    part = max(part, 1) / float(-part)
    self.known = [x for x in whole if x]
    say('ab' + 'c', end='')
    return part % 2 if part else None
'''
FAULTS = {
    4: ['constant def share(part: int = 4, *, whole: int | None = None) -> float:'],
    6: [
        'boolean if (part < 0 or whole):  # a comment',
        'comparison if (part <= 0) and whole:  # a comment',
        'condition if (not (part < 0 and whole)):  # a comment',
        'constant if part < 1 and whole:  # a comment',
        'guard if False:  # a comment',
        'term if (part < 0):  # a comment',
    ],
    7: ['statement pass'],
    8: [
        'arguments part = max(1, part) / float(-part)',
        'arithmetic part = (max(part, 1) * float(-part))',
        'call part = max(part, 1) / (-part)',
        'constant part = max(part, 2) / float(-part)',
        'sign part = max(part, 1) / float(part)',
        'term part = max(part, 1)',
    ],
    9: ['filter self.known = [x for x in whole if True]', 'statement pass'],
    10: ["keyword say('ab' + 'c')", 'statement pass'],
    11: [
        'arithmetic return (part * 2) if part else None',
        'condition return part % 2 if (not part) else None',
        'constant return part % 3 if part else None',
        'guard return part % 2 if False else None',
        'return return None',
        'term return part if part else None',
    ],
}
HALF = 'def half(n):\n    return n / 2\n'


def test_mutants_cover_every_fault():
    """There are no faults in annotations, docstrings, words of errors, and concatenated strings."""
    faults = {}
    for mutant in mutate.mutants(SOURCE):
        _, after = mutant.diff(SOURCE)
        faults.setdefault(mutant.line, []).append(f'{mutant.kind} {after[1:].strip()}')
    assert {line: sorted(texts) for line, texts in faults.items()} == FAULTS
    assert [mutant.line for mutant in mutate.mutants(SOURCE, {9})] == [9, 9]


def test_sample_depends_on_seed():
    mutants = mutate.mutants(SOURCE)
    some = mutate.sample_mutants(mutants, 5, '0')
    assert some == mutate.sample_mutants(mutants, 5, '0') != mutate.sample_mutants(mutants, 5, '1')
    assert mutate.sample_mutants(mutants, 99, '0') == mutants


@pytest.fixture
def project(tmp_path):
    """Returns a project of a function, and of a test that checks little."""
    root = tmp_path / 'invented'
    root.mkdir()
    (root / 'half.py').write_text(HALF)
    (root / 'test_half.py').write_text(
        'from half import half\ndef test_half():\n    assert half(0) == 0\n'
    )
    return root


def test_mutant_outcomes(project, capsys, monkeypatch):
    monkeypatch.setattr(mutate, 'SECONDS', 2)  # and five times what the tests take
    texts = ['    return n / 3\n', '    return 1\n', "    __import__('time').sleep(600)\n"]
    faulty = [mutate.Mutant('any', 2, f'def half(n):\n{text}') for text in texts]
    chosen = {'half.py': (['test_half.py'], faulty)}
    assert mutate.run(project, chosen, jobs=2, full=False) == 1
    lines = capsys.readouterr().out.splitlines()
    assert lines[:3] == ['half.py:2: any', '-    return n / 2', '+    return n / 3']
    assert '| half.py | 3 | 2 | 1 | 1 |' in lines
    assert (project / 'half.py').read_text() == HALF


def test_failing_tests_without_fault_raise(project):
    (project / 'half.py').write_text('def half(n):\n    return n + 1\n')
    with pytest.raises(SystemExit, match=r'^half.py: tests fail without a fault: .* test_half.py$'):
        mutate.run(project, {'half.py': (['test_half.py'], [])}, jobs=1, full=False)


def test_differing_lines_from_commit(project):
    git = ['git', '-c', 'user.name=A', '-c', 'user.email=a@b', '-C', str(project)]
    for words in (['init', '--quiet'], ['add', '.'], ['commit', '--quiet', '-m', 'Begins']):
        subprocess.run([*git, *words], check=True)
    (project / 'half.py').write_text(f'# Of\n# any.\n{HALF}'.replace('2', '3'))
    (project / 'new.py').write_text(HALF)
    assert mutate.differing_lines(project, 'half.py', 'HEAD') == {1, 2, 4}
    assert mutate.differing_lines(project, 'test_half.py', 'HEAD') == set()
    assert mutate.differing_lines(project, 'new.py', 'HEAD') is None
