"""A training run whose validation text is a source of its own.

Equivalence: evaluated later = recorded.
"""

import json

import pytest

from eval.load import load
from eval.suites.perplexity import perplexity
from lm.config.resolve import update_recipe
from lm.record.metrics import read_rows
from tests.commands import tiny
from tests.corpora import write_corpus
from train import DONE, train

pytestmark = pytest.mark.full  # a run is compiled; tests/lm/data/test_splits.py has the rows


@pytest.fixture(scope='module')
def corpus(tmp_path_factory):
    """Returns the fields of config.data that name a text, another to validate on, and a cache."""
    folder = tmp_path_factory.mktemp('corpus')
    (folder / 'apart').mkdir()
    (folder / 'apart' / 'a.txt').write_text('depth width loss ' * 40)
    fields = write_corpus(folder)
    return fields | {'data.validation_source': f'text:{folder}/apart/*.txt'}


def test_run_validates_on_its_source(corpus, tmp_path):
    """Catches a validation text that is forgotten in the record, the digest or the evaluation."""
    recipe = tiny(corpus, data_validation_fraction=0.02)
    assert train(recipe, tmp_path / 'whole') == DONE
    summary = json.loads((tmp_path / 'whole' / 'summary.json').read_text())
    counts = summary['data']
    assert counts['train']['documents'] == 30 and counts['validation']['documents'] == 1
    assert counts['shared_documents'] == 0
    assert counts['validation']['bytes'] == len('depth width loss ' * 40)
    losses = [
        row for row in read_rows(tmp_path / 'whole' / 'metrics.jsonl') if 'validation_ce' in row
    ]
    assert [row['step'] for row in losses] == [4, 8, 12]
    evaluated = perplexity(load(tmp_path / 'whole')).numbers
    assert evaluated['validation_ce'] == pytest.approx(summary['validation_ce'], rel=1e-6)
    changed = update_recipe(recipe, {'data.validation_source': corpus['data.source']})
    with pytest.raises(ValueError, match=r'data\.validation_source: .* -> '):
        train(changed, tmp_path / 'whole')
