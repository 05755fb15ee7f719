"""A tuned study on disk, with losses in closed form, as evidence of a claim."""

from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from eval.claims.evidence import StudyEvidence
from lm.study.tables.ablation import read_ablation
from lm.study.tables.results import gather, read_sweep
from tests.eval import tuned_fixture as tuned
from tests.eval.tuned_fixture import bowl, diverging

LOSSES = {
    'rmsnorm': bowl(3.0, noise=0.005),
    'layernorm': bowl(2.9, noise=0.005, number=1),
    'none': diverging(-99.0, bowl(3.0)),
    'dyt': bowl(3.05, best=30.0, noise=0.005, number=2),
}
TUNE = {'optim.lr': None, 'smallest_effect': 0.02}


def write_study(folder: Path, losses: Mapping[str, Any] = LOSSES) -> StudyEvidence:
    """Writes four arms: one is better by 0.1, one diverges, and one has its best rate far out."""
    tuned.write_tuned(folder, losses, TUNE)
    ablation = read_ablation(read_sweep(folder), gather(folder))
    arms = [
        SimpleNamespace(changes=arm.changes, name=arm.name, is_judged=True) for arm in ablation.arms
    ]
    return StudyEvidence('study.py', folder, SimpleNamespace(arms=arms), '', '', ablation)
