"""Claims and conditions on the study of `conftest.py`."""

import dataclasses
import math

from eval.claims.claim import Claim, Condition


def condition(arm, low=-math.inf, high=math.inf, against=None, quantity='difference'):
    selection = {'arm': {'model.norm': arm}} | (
        {'against': {'model.norm': against}} if against else {}
    )
    return Condition('whole', quantity, selection, low, high)


def mistake(row):
    """Returns a condition with an arm that fails it: one that diverges, or the best."""
    arm = 'none' if math.isfinite(row.high) else 'layernorm'
    return dataclasses.replace(row, of={'arm': {'model.norm': arm}})


def claim(*conditions, studies=None):
    """Returns a claim; on the study of `conftest.py` it has a right control and twin."""
    texts = dict.fromkeys(('Paper', 'Says', 'Here', 'Counts'), 'some text.')
    control = dataclasses.replace(condition('layernorm', high=0.0), label='an effect')
    twins = [dataclasses.replace(mistake(row), label='a mistake') for row in conditions]
    guards = {} if studies else {'control': [control], 'twin': twins}
    studies = studies or {'whole': 'study.py'}
    return Claim('mine', 'It is so.', texts, 'norms', studies, conditions, {}, **guards)
