"""The tokenizer of a text that is not the run's own."""

from types import SimpleNamespace

import pytest

from eval import load
from tests.helpers import checked_config


@pytest.mark.parametrize(
    ('files', 'uses_copy'),
    [(('a', 'run/tokenizer/tokenizer_config.json'), True), (('a',), False), ((), True)],
)
def test_other_text_has_the_runs_tokenizer(files, uses_copy, tmp_path, monkeypatch):
    """Catches a chat template that was changed after the run, which would be scored in silence."""
    monkeypatch.setattr(load.data, 'open_dataset', lambda fields, say: fields)
    for name in files:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text('{}')
    recipe = SimpleNamespace(data=checked_config({}).data)
    tokenizer = f'hf:{tmp_path}/a'
    recipe.data = load.dataclasses.replace(recipe.data, tokenizer=tokenizer)
    checkpoint = SimpleNamespace(recipe=recipe, path=tmp_path / 'run' / 'checkpoints' / '4')
    copy = f'hf:{tmp_path}/run/tokenizer'
    opened = load.open_source(checkpoint, 'chat:x.jsonl')
    assert opened.tokenizer == (copy if uses_copy else tokenizer)
