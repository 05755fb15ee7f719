"""Bugs of one line in the board of claims."""

from tests.bugs.bug import Bug

CLAIM, DECIDE = (f'tests/eval/claims/test_{name}.py' for name in ('claim', 'decide'))

CLAIMS = {
    'a claim that holds by the value alone': Bug(
        'eval/claims/estimates.py',
        'if low <= self.low and self.high <= high:',
        'if low <= self.value <= high:',
        DECIDE,
    ),
    'a claim that fails where it is not known to hold': Bug(
        'eval/claims/estimates.py',
        'FAILS if self.low > high or self.high < low else UNDECIDED',
        'FAILS',
        DECIDE,
    ),
    'one condition that is enough': Bug(
        'eval/claims/decide.py', 'if FAILS not in said:', 'if HOLDS in said:', DECIDE
    ),
    'a verdict of an unfinished study': Bug(
        'eval/claims/decide.py',
        'UNFINISHED = (STALE, OPEN, OUT_OF_REACH)',
        'UNFINISHED = (STALE, OUT_OF_REACH)',
        DECIDE,
    ),
    'seeds for the further end of a range': Bug(
        'eval/claims/decide.py', 'nearest, end = min(', 'nearest, end = max(', DECIDE
    ),
    'conditions of which some bounds have no digest': Bug(
        'eval/claims/claim.py',
        'found = [self.studies, *(dataclasses.asdict(one) for one in self.conditions)]',
        'found = [self.studies, *(one.of for one in self.conditions)]',
        CLAIM,
    ),
    'a range that everything is in': Bug(
        'eval/claims/claim.py',
        'if not low < high or',
        'if not low <= math.inf or',
        CLAIM,
    ),
    'a diverged arm that is equal to one that is not': Bug(
        'eval/claims/evidence.py',
        'if dead != other_dead:',
        'if dead and other_dead:',
        DECIDE,
    ),
    'a measure that was changed since': Bug(
        'eval/claims/evidence.py',
        "if record['code'] != code_of(short):",
        "if record['code'] == '':",
        DECIDE,
    ),
    'a study on a pod that is trained here': Bug(
        'eval/claims/evidence.py',
        'return _planned(study) if topology else study',
        'return study',
        DECIDE,
    ),
    'a plan of another study': Bug(
        'eval/claims/evidence.py',
        'asked = json.dumps([cell.name for cell in self.arms.first] + [self.arms.record()])',
        "asked = ''",
        DECIDE,
    ),
    'what counts put on record again': Bug(
        'eval/claims/register.py',
        'return entries | new',
        'return new | {claim.name: {"asked": claim.asked, "day": day, "fresh_seeds": 0} for '
        'claim in claims}',
        DECIDE,
    ),
    'a study that counts for each of its claims': Bug(
        'eval/claims/board.py',
        'studies = {s.name: s for one in found for s in one.evidence.values()}.values()',
        'studies = [s for one in found for s in one.evidence.values()]',
        DECIDE,
    ),
}
