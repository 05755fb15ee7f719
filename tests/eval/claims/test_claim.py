"""Contract: a file of a claim that says too little, or other than a claim does, is an error that
names it. Every claim of the project is one.
"""

import math

import pytest

from eval.claims.claim import FOLDER, read_claim, read_claims
from eval.claims.decide import decide
from eval.claims.evidence import open_evidence
from tests import ROOT

GOOD = '''"""Muon is better than AdamW.

Paper:    arXiv:2502.16982
Says:     half of the compute
          is enough.
Here:     a small model.
Counts:   a lower loss.
"""

PART = 'optimizers'
STUDIES = {'whole': 'configs/studies/optimizers_tuned.py', 'fixed': 'measure:self_normalizing'}
HOLDS = (
    {'study': 'whole', 'arm': {'optim.name': 'muon'}, 'difference': (None, 0.0)},
    {'study': 'fixed', 'value': 'slope', 'within': (0.5, 1.0)},
)
'''


def write(folder, text, name='mine'):
    path = folder / f'{name}.py'
    path.write_text(text)
    return path


def test_a_file_is_read(tmp_path):
    claim = read_claim(write(tmp_path, GOOD))
    assert (claim.name, claim.title, claim.part) == (
        'mine',
        'Muon is better than AdamW.',
        'optimizers',
    )
    assert claim.texts['Says'] == 'half of the compute is enough.'
    first, second = claim.conditions
    assert (first.low, first.high) == (-math.inf, 0.0) and first.range_text == 'at most 0'
    assert second.of == {'value': 'slope'} and second.range_text == 'between 0.5 and 1'


def test_a_file_may_withdraw_its_verdict_or_qualify_it(tmp_path):
    plain = read_claim(write(tmp_path, GOOD))
    assert plain.withdrawn == plain.caution == ''
    text = GOOD + "WITHDRAWN = 'It ran with another rate.'\nCAUTION = 'Small.'\n"
    claim = read_claim(write(tmp_path, text))
    assert (claim.withdrawn, claim.caution) == ('It ran with another rate.', 'Small.')
    assert claim.digest == plain.digest  # what counts is the same


def test_what_counts_has_a_digest(tmp_path):
    """Other words are the same claim; another bound, arm or study is not."""
    one = read_claim(write(tmp_path, GOOD)).digest
    assert read_claim(write(tmp_path, GOOD.replace('a small model', 'another'))).digest == one
    changes = {
        '(None, 0.0)': '(None, 0.1)',
        "'muon'": "'lion'",
        'optimizers_tuned.py': 'optimizers_tuned.py:half',
    }
    others = {
        read_claim(write(tmp_path, GOOD.replace(*change))).digest for change in changes.items()
    }
    assert len(others | {one}) == 4


WRONG = {  # what stands in GOOD: what stands there instead, and what is said of it
    'Says:     half': ('half', 'its docstring has no Says:'),
    "PART = 'optimizers'": ('', 'PART missing'),
    "'optimizers'\n": ("'optimisers'\n", 'PART must be one of'),
    'STUDIES = {': ('STUDIES = none | {', "name 'none' is not defined"),
    "'study': 'whole', ": ("'study': 'half', ", 'must name one of whole, fixed'),
    "'arm': {'optim.name': 'muon'}, ": ('', 'got study, difference'),
    "'difference': (None, 0.0)": ("'diference': (None, 0.0)", 'one of difference, speedup'),
    '(None, 0.0)': ('(None, "0")', 'of which one may be None'),
    '(0.5, 1.0)': ('(1.0, 0.5)', 'a range that some numbers are not in'),
    "'within'": ("'difference'", 'one of within'),
    'HOLDS = (': ("WITHDRAWN = ''\nHOLDS = (", 'WITHDRAWN must be a sentence that says why'),
    'PART = ': ('CAUTION = True\nPART = ', 'CAUTION must be a sentence'),
    'STUDIES = ': ("WITHDRAW = 'why'\nSTUDIES = ", "STUDIES, WITHDRAWN; got 'WITHDRAW'"),
    "    {'study': 'fixed'": ("    'fixed', {'study': 'fixed'", 'a condition must be a dict'),
    '"""Muon': ('Muon', 'unterminated triple-quoted string'),
}


@pytest.mark.parametrize('at', WRONG)
def test_a_file_that_is_no_claim_is_refused(tmp_path, at):
    instead, wanted = WRONG[at]
    assert at in GOOD
    path = write(tmp_path, GOOD.replace(at, instead, 1))
    with pytest.raises(ValueError) as error:
        read_claim(path)
    said = str(error.value)
    assert said.startswith(f'{path}: ') and '\n' not in said and wanted in said


def test_names_are_of_files(tmp_path):
    with pytest.raises(ValueError, match='holds no claims; give --claims=DIR'):
        read_claims(tmp_path)
    write(tmp_path, GOOD, 'muon')
    with pytest.raises(ValueError, match="no claim 'muom' Did you mean 'muon'"):
        read_claims(tmp_path, ['muom'])
    assert [one.name for one in read_claims(tmp_path, ['muon'])] == ['muon']


def test_every_claim_of_the_project_names_arms_and_values(tmp_path, monkeypatch):
    """Catches a claim that a study, or a measure, has left behind."""
    monkeypatch.chdir(ROOT)
    claims = read_claims(FOLDER)
    names = dict.fromkeys(which for claim in claims for which in claim.studies.values())
    evidence = {name: open_evidence(name, tmp_path) for name in names}
    for claim in claims:
        is_far = any(' on ' in which for which in claim.studies.values())
        state = 'out of reach here' if is_far else 'open'
        assert decide(claim, evidence).verdict == ('withdrawn' if claim.withdrawn else state)
    assert len(claims) > 20
