"""Perplexity of a text that is no part of the run's data. Reference: log-softmax by hand, and the
loss of transformers on the same tokens.
"""

import json
import math
import types
from pathlib import Path
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tokenizers as library
from flax.traverse_util import unflatten_dict

from eval.suites import text_source
from eval.suites.perplexity import perplexity
from eval.suites.text_source import encode_conversations, find_tokenizer_spec
from lm.data.tokenizers import ByteTokenizer, SubwordTokenizer, TokenIds
from lm.training.state import Weights
from tests.eval.convert.test_hf import import_case, read_logits
from tests.eval.suites.checkpoints import checkpoint_from_recipe, make_checkpoint
from tests.fixtures.hf.seeded import tokens
from tests.helpers import checked_config, tiny_config

LENGTH = 32
TEXTS = ('a norm of a token', 'déjà vu: a layer that has more than one row of tokens in it')


@pytest.fixture
def source(tmp_path):
    for number, text in enumerate(TEXTS):
        (tmp_path / f'{number}.txt').write_text(text)
    return f'text:{tmp_path}/*.txt'


def nats_by_hand(checkpoint, text):
    """Sums over windows of LENGTH tokens that do not overlap, each with its own beginning."""
    tokenizer, nats = checkpoint.tokenizer, []
    ids = [tokenizer.bos_id, *tokenizer.encode(text), tokenizer.eos_id]
    for start in range(0, len(ids) - 1, LENGTH):
        window = ids[start : start + LENGTH + 1]
        padded = jnp.array([window[:-1] + [0] * (LENGTH + 1 - len(window))])
        logits_TV = np.float64(checkpoint.logits(padded)[0])
        log_p_TV = logits_TV - np.log(np.exp(logits_TV).sum(-1, keepdims=True))
        nats += [-log_p_TV[t, token] for t, token in enumerate(window[1:])]
    return nats


def test_text_is_scored_as_by_hand(source):
    """A run without data. Catches a text that is read through the run's own split, EOS left out,
    and bits that are divided by characters or tokens.
    """
    checkpoint = make_checkpoint({'data.seq_len': LENGTH})
    suite_result = perplexity(checkpoint, source=source, stride=LENGTH)
    expected = [nats_by_hand(checkpoint, text) for text in TEXTS]
    np.testing.assert_allclose(suite_result.items['nats'], [sum(n) for n in expected], rtol=1e-5)
    numbers, n_bytes = suite_result.numbers, sum(len(text.encode()) for text in TEXTS)
    nats, n_tokens = sum(map(sum, expected)), sum(map(len, expected))
    assert (numbers['tokens'], numbers['bytes']) == (n_tokens, n_bytes)
    assert numbers['ce'] == pytest.approx(nats / n_tokens, rel=1e-5)
    assert numbers['bits_per_byte'] == pytest.approx(nats / math.log(2) / n_bytes, rel=1e-5)
    assert numbers['perplexity'] == pytest.approx(math.exp(nats / n_tokens), rel=1e-5)
    assert numbers.keys() == {'ce', 'bits_per_byte', 'perplexity', 'tokens', 'bytes'}


def test_loss_equals_transformers(tmp_path):
    """The logits are those that transformers gave for this row, so that their loss is known."""
    model, ids = import_case('llama2'), tokens()[0]
    assert ids[0] not in ids[1:]
    tokenizer = TokenIds(64, int(ids[0]), int(ids[0]))  # BOS, which no target follows at the end
    weights = Weights(unflatten_dict(jax.device_get(model.params), sep='/'), (), {})
    checkpoint = checkpoint_from_recipe(model.recipe, tokenizer, weights=weights)
    file = Path(tmp_path / 'ids.txt')
    file.write_text(' '.join(map(str, ids[1:])))
    numbers = perplexity(checkpoint, source=f'text:{file}').numbers
    logits_TV = read_logits('llama2')[:-1].astype(np.float64)
    log_z_T = np.log(np.exp(logits_TV).sum(-1))
    expected = np.mean(log_z_T - logits_TV[np.arange(15), ids[1:]])
    assert numbers['tokens'] == 15 and numbers['ce'] == pytest.approx(expected, rel=1e-5)


def lossy_tokenizer():
    """One token for each letter of the first text; others are <unk>."""
    names = ['<s>', '</s>', '<unk>', *sorted({*TEXTS[0]})]
    vocabulary = {name: number for number, name in enumerate(names)}
    tokenizer = library.Tokenizer(library.models.BPE(vocabulary, [], unk_token='<unk>'))
    return SubwordTokenizer(tokenizer, len(names), 0, 1, cuttable=False)


def without_weights(tokenizer):
    """A checkpoint as far as texts need one."""
    return types.SimpleNamespace(recipe=tiny_config({'data.seq_len': LENGTH}), tokenizer=tokenizer)


def test_lost_bytes_are_said(source, monkeypatch):
    """Bits per byte count the bytes that the tokenizer loses. Catches a division by the bytes of
    the decoded text, and a loss that is only measured where training prepares data.
    """
    notes = []
    monkeypatch.setattr(text_source, 'to_stderr', notes.append)
    encoded = text_source.encode_source(without_weights(lossy_tokenizer()), source, '', 0)
    lost = sum(len(char.encode()) for char in '\n'.join(TEXTS) if char not in TEXTS[0])
    n_bytes = sum(len(text.encode()) for text in TEXTS)
    assert encoded.lost_share == pytest.approx(lost / (n_bytes + 1))
    assert encoded.rows.n_bytes == n_bytes and encoded.texts == [*TEXTS]
    first = text_source.encode_source(without_weights(lossy_tokenizer()), source, '', 1)
    assert first.texts == [TEXTS[0]] and first.rows.n_bytes == len(TEXTS[0])
    assert f'loses {encoded.lost_share:.2%} of the bytes of {source}' in ''.join(notes)


def test_unusable_text_is_refused(tmp_path):
    file, checkpoint = tmp_path / 'empty.txt', without_weights(TokenIds(64, 5, 6))
    file.touch()
    with pytest.raises(ValueError, match=r'--flag=text:.*empty.txt contains no text'):
        text_source.encode_source(checkpoint, f'text:{file}', '--flag', 0)
    file.write_text('1 2 5 3')
    with pytest.raises(
        ValueError,
        match=r'--flag=text:.* contains text that the tokenizer encodes as BOS \(token 5\)',
    ):
        text_source.encode_source(checkpoint, f'text:{file}', '--flag', 0)


@pytest.mark.parametrize(
    ('files', 'uses_copy'),
    [(('a', 'run/tokenizer/tokenizer_config.json'), True), (('a',), False), ((), True)],
)
def test_chat_template_is_the_runs_own(files, uses_copy, tmp_path):
    """Catches a chat template that was changed after the run, which would be scored in silence."""
    for name in files:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text('{}')
    recipe = SimpleNamespace(data=SimpleNamespace(tokenizer=f'hf:{tmp_path}/a'))
    checkpoint = SimpleNamespace(recipe=recipe, path=tmp_path / 'run' / 'checkpoints' / '4')
    expected = f'hf:{tmp_path}/run/tokenizer' if uses_copy else recipe.data.tokenizer
    assert find_tokenizer_spec(checkpoint) == expected


def test_one_conversation_is_enough(tmp_path, monkeypatch):
    """Catches a source that is divided into splits, and conversations lost in silence."""
    chats = [[('user', 'a'), ('assistant', 'b' * n)] for n in (2, 90)] + [[('user', 'c')]]
    lines = [
        json.dumps({'messages': [{'role': role, 'content': text} for role, text in chat]})
        for chat in chats
    ]
    fields = checked_config({'data.seq_len': 32, 'data.tokenizer': 'byte'}).data
    checkpoint = SimpleNamespace(
        recipe=SimpleNamespace(data=fields), tokenizer=ByteTokenizer(), path=tmp_path / 'r/c/1'
    )
    path, notes = tmp_path / 'chats.jsonl', []
    monkeypatch.setattr(text_source, 'to_stderr', notes.append)
    path.write_text('\n'.join(lines))
    rows, texts, *_ = encode_conversations(checkpoint, f'chat:{path}', '--source', 0)
    assert rows.n_documents == len(texts) == 1 and rows.targets.n_bytes.tolist() == [3]
    (note,) = notes
    assert note.endswith('1 are longer than data.seq_len + 1 = 33 tokens, 1 have no answer')
    path.write_text(lines[1])
    with pytest.raises(ValueError, match=r'--source=.* has no usable conversation: 1 are long'):
        encode_conversations(checkpoint, f'chat:{path}', '--source', 0)
