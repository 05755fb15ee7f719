"""The sweep of every study in configs/studies: its cells, and that each can be trained."""

import importlib
import inspect
import itertools
from pathlib import Path

import pytest

from lm.model.check import check
from lm.study.plan.arms import ArmPlan
from lm.study.plan.cells import expand_sweep, split_sweep

FOLDER = Path(__file__).parent.parent / 'configs' / 'studies'
NAMES = sorted(path.stem for path in FOLDER.glob('[!_]*.py'))
VARIANTS = {  # what stands behind the colon
    'as_published': ('small_start', 'positions', 'positions_800', 'sinusoidal'),
    'formats': ('errors',),
    'groups_tuned': ('groups', 'adamw_decay', 'muon_decay'),
    'hybrids': ('8',),
    'ladder': ('search', '160x200', '320x200', '124m'),
    'losses': ('z_loss', 'forms'),
    'norm_placement_lr': ('fitted', 'longer', 'pod'),
    'nuisances': (
        *('norms_longer', 'blocks_longer'),
        *(f'{study}_start' for study in ('blocks', 'recipes', 'both')),
        *(f'{study}_text' for study in ('norms', 'blocks', 'recipes', 'both')),
    ),
    'optimizers': ('rates', 'equal_time'),
    'optimizers_tuned': ('half',),
    'streams': ('4',),
    'twins': ('blocks', 'equations', 'auon', 'optimizers', 'again', 'still'),
}

CHOSEN = {*VARIANTS, 'entropy_collapse'}  # studies with variants


def study(name):
    return importlib.import_module(f'configs.studies.{name}')


@pytest.mark.parametrize('name', NAMES)
def test_study_cells_resolve(name):
    """Catches a study with outdated options, names or checks."""
    for arguments in [(), *((variant,) for variant in VARIANTS.get(name, ()))]:
        base, sweep, tune = split_sweep(study(name).get_config(*arguments))
        cells = expand_sweep(base, sweep) if sweep else []
        cells = cells if tune is None else ArmPlan(base, sweep, tune).first_cells
        assert len({cell.name for cell in cells}) == len(cells)
        for cell in itertools.islice(cells, 0, None, max(1, len(cells) // 6)):
            check(cell.recipe)


@pytest.mark.parametrize('name', NAMES)
def test_unknown_variant_is_refused(name):
    """Another study must not be trained in its place."""
    get_config = study(name).get_config
    error, words = (ValueError, 'must be one of') if name in CHOSEN else (TypeError, 'takes 0')
    with pytest.raises(error, match=words):
        get_config('nonsense')


@pytest.mark.parametrize('name', NAMES)
def test_study_docstring_has_question_and_finding(name):
    text = inspect.getdoc(study(name))
    for heading in ('Question:', 'Command:', 'Cost:', 'Result:'):
        assert f'\n{heading}' in text
    page = FOLDER / 'results' / f'{name}.md'
    assert page.exists() == (f'configs/studies/results/{name}.md' in text)
    # The site takes the line of a page from this table.
    summary = (FOLDER.parents[1] / 'docs' / 'studies.md').read_text()
    assert page.exists() == (f'configs/studies/results/{name}.md)' in summary)
