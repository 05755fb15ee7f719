"""The records of a run: what a resumption keeps."""

from types import SimpleNamespace

import pytest

from lm.data.tokenizers import ByteTokenizer
from lm.run.journal import Journal
from tests.helpers import checked_config


def make_journal(workdir, restored):
    """Returns a journal of data 'new', whose checkpoints give (state, meta)."""
    journal = object.__new__(Journal)
    journal.recipe, journal.workdir = checked_config({}), workdir
    dataset = SimpleNamespace(tokenizer=ByteTokenizer(), digest='new')
    journal.experiment = SimpleNamespace(dataset=dataset, texts={})
    journal.checkpoints = SimpleNamespace(restore=lambda template: restored)
    return journal


def test_refused_resumption_keeps_the_tokenizer(tmp_path):
    """Catches a tokenizer that is trained on changed text, and replaces that of the weights."""
    refused = make_journal(tmp_path / 'run', (SimpleNamespace(step=4), {'data': 'old'}))
    with pytest.raises(ValueError, match=r'was trained on data old, but .* is now new'):
        refused.restore(None)
    assert not (tmp_path / 'run').exists()
    assert make_journal(tmp_path / 'run', None).restore(None, start_over=True) is None
    assert (tmp_path / 'run' / 'tokenizer').is_dir()
