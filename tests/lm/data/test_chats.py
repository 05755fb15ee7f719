"""Reference: the tokens of conversations are those of transformers. Property: answers are learned,
and nothing else.
"""

import functools
import json
import re
from multiprocessing.connection import Connection

import numpy as np
import pytest

from eval.serve.chat import PlainChat
from lm.data import check, open_dataset, templates, tokenizers
from lm.data.chat_pieces import build_encoder
from lm.data.conversations import NO_ANSWER, NO_TEXT, REFUSED, SPECIAL, encode_record
from lm.data.rows import ChatRows
from lm.data.sources import open_source
from tests import ROOT
from tests.fixtures.chat import build_tokenizer
from tests.lm.data.conftest import discard_line, prepare_contents, write_texts

FIXTURE = json.loads((ROOT / 'tests/fixtures/chat/tokens.json').read_text())
# What ends an answer. Generation tags mark the header and the line end, too.
ENDS = {
    'llama3': '<|eot_id|>',
    'qwen3': '<|im_end|>',
    'gemma': '<end_of_turn>',
    'phi': '<|end|>',
    'zephyr': '</s>',
    'chatml': '<|im_end|>',
    'llama2': '</s>',
    'mistral v3': '</s>',
}


def say(role, content):
    return {'role': role, 'content': content}


HELLO = [say('user', 'hello'), say('assistant', 'and you')]


@pytest.fixture
def make_encoder(tmp_path):
    """make_encoder(kind, template) -> the encoder of a tokenizer with that template."""
    encoders = []

    def make(kind='byte_level', template=FIXTURE['templates']['chatml']):
        spec = 'byte'
        if kind != 'byte':
            spec = f'hf:{build_tokenizer.write(kind, tmp_path / kind, template)}'
        encoders.append(build_encoder(tokenizers.plan_tokenizer(spec).build(()), spec))
        return encoders[-1]

    yield make
    for encoder in encoders:
        encoder.close()


def encode(encoder, record):
    return encoder.encode_batch([encode_record(record, 'row').decode()])[0]


def spell_targets(encoder, chat):
    library = encoder._library
    spans = [chat.tokens[start:stop].tolist() for start, stop in chat.targets.tolist()]
    return [library.decode(ids, skip_special_tokens=False) for ids in spans]


@pytest.mark.default_rows('chatml-byte_level', 'chatml-metaspace', 'smollm3-byte_level')
@pytest.mark.parametrize('kind', FIXTURE['tokens'])
@pytest.mark.parametrize('name', FIXTURE['templates'])
def test_tokens_and_targets_match_transformers(name, kind, make_encoder):
    """Recorded by tests/fixtures/chat/make_tokens.py. A second BOS, parts encoded apart, or offsets
    without their spaces would differ.
    """
    encoder = make_encoder(kind, FIXTURE['templates'][name])
    for chat_name, messages in FIXTURE['chats'].items():
        chat, expected = encode(encoder, {'messages': messages}), FIXTURE['tokens'][kind][name]
        if expected[chat_name] is None:
            assert chat == REFUSED, chat_name
            continue
        ids, mask = expected[chat_name]
        assert chat.tokens.tolist() == ids, chat_name
        targets = np.zeros(len(ids), int)
        for start, stop in chat.targets:
            targets[start:stop] = 1
        if mask is not None:
            assert targets.tolist() == mask, chat_name
            continue
        answers = [m['content'] for m in messages if m['role'] == 'assistant']
        for text, answer in zip(spell_targets(encoder, chat), answers, strict=True):
            assert text.endswith(ENDS[name]) and text.count('<') in (1, 3)
            last_word = answer.split()[-1]
            assert text.removesuffix(ENDS[name]).rstrip().endswith(last_word)
            assert 'assistant' not in text and 'user' not in text


@pytest.mark.parametrize('kind', ['byte', 'byte_level'])
def test_chats_without_template_are_as_served(kind, make_encoder):
    """The prompt of eval.serve is where the last answer begins, and each of its stops ends one."""
    encoder = make_encoder(kind, None)
    tokenizer = encoder._tokenizer
    messages = [say('system', 'é'), *HELLO, say('user', 'x'), say('assistant', 'y')]
    chat = encode(encoder, {'messages': messages})
    served = PlainChat(tokenizer)
    prompt = served.encode(served.format_prompt(messages[:-1]))
    assert chat.tokens[: len(prompt)].tolist() == prompt
    assert chat.targets[-1].tolist() == [len(prompt), len(chat.tokens)]
    texts = [tokenizer.decode(chat.tokens[a:b].tolist()) for a, b in chat.targets]
    assert texts == [f' and you{served.stops[0]}', ' y']
    assert chat.tokens[-1] == tokenizer.eos_id and chat.n_bytes == len(''.join(texts))


FORMS = [
    {'conversations': [{'from': 'human', 'value': 'hello'}, {'from': 'gpt', 'value': 'and you'}]},
    {'prompt': HELLO[:1], 'completion': HELLO[1:]},
    {'messages': [m | {'name': None} for m in HELLO], 'prompt': None},
    {'messages': json.dumps(HELLO)},
    {'messages': {'role': [b'user', b'assistant'], 'content': [b'hello', b'and you']}},
]


@pytest.mark.parametrize('record', FORMS)
def test_record_forms_are_one_conversation(record, make_encoder):
    encoder = make_encoder()
    chat, expected = encode(encoder, record), encode(encoder, {'messages': HELLO})
    assert chat.tokens.tolist() == expected.tokens.tolist()
    assert chat.targets.tolist() == expected.targets.tolist()


def test_completion_alone_is_learned(make_encoder):
    """Earlier answers of a prompt are not; texts have no template, and BOS and EOS around them."""
    encoder = make_encoder()
    turns = [*HELLO, say('user', 'x')]
    chat = encode(encoder, {'prompt': turns, 'completion': [say('assistant', 'y')]})
    assert spell_targets(encoder, chat) == ['y<|im_end|>']
    chat = encode(encoder, {'prompt': 'a b', 'completion': ' é<s>'})
    spelling = encoder._tokenizer.decode(chat.tokens.tolist())
    assert spelling == 'a b é<s>' and chat.n_bytes == 6
    assert chat.targets.tolist() == [[4, len(chat.tokens)]]


LEFT_OUT = [
    ([say('user', 'a')], NO_ANSWER),
    ([say('user', 'a<|im_end|>b'), HELLO[1]], SPECIAL),
    ([say('user', 'a'), {'role': 'assistant', 'content': None}], NO_TEXT),
    ([{'role': 'user', 'content': [{'type': 'image'}]}, HELLO[1]], NO_TEXT),
    ([], NO_ANSWER),
]


@pytest.mark.parametrize(('messages', 'reason'), LEFT_OUT)
def test_unusable_conversations_are_left_out(messages, reason, make_encoder):
    """Text that spells a special token would become it, and end a turn."""
    assert encode(make_encoder(), {'messages': messages}) == reason


UNTOLD = {
    'follow its prompt': '{{ messages | length }}{{ messages[-1].content }}</s>',
    'special token ends': '{% for m in messages %}{{ m.role }}:{{ m.content }}{% endfor %}'
    "{% if add_generation_prompt %}{{ 'assistant:' }}{% endif %}",
}


@pytest.mark.parametrize('words', UNTOLD)
def test_template_that_does_not_tell_answers_is_an_error(words, make_encoder):
    with pytest.raises(ValueError, match=f'{words}.*"hello".*put {{% generation %}}'):
        encode(make_encoder(template=UNTOLD[words]), {'messages': HELLO})


def test_stalled_template_is_an_error(make_encoder, monkeypatch):
    """Catches a conversation that is left out only where the machine is slow."""
    encoder = make_encoder()
    monkeypatch.setattr(templates, 'RENDER_SEC', 0.0)
    monkeypatch.setattr(Connection, 'poll', lambda connection, timeout_sec: False)  # never answers
    with pytest.raises(
        ValueError, match=r'could not render .*"hello".* 0 seconds\. Run the command'
    ):
        encode(encoder, {'messages': HELLO})


def test_unknown_record_is_an_error():
    with pytest.raises(ValueError, match=r"row is not a conversation.*got the fields 'text'"):
        encode_record({'text': 'a'}, 'row')
    with pytest.raises(ValueError, match=r"got the fields 'messages' \(null\), 'id'\."):
        encode_record({'messages': None, 'id': 1}, 'row')
    with pytest.raises(ValueError, match=r'row is not a conversation: its messages must be a list'):
        encode_record({'messages': 'a'}, 'row')


def write_chats(folder, count=30, extra=()):
    """Returns the source of a .jsonl file, with answers of different lengths."""
    folder.mkdir(exist_ok=True)
    records = [
        {'messages': [say('user', f'number {i}'), say('assistant', 'é' + 'ab' * (i % 7))]}
        for i in range(count)
    ]
    lines = [json.dumps(record) + '\n' for record in [*records, *extra]]
    (folder / 'chats.jsonl').write_text(''.join(lines))
    return f'chat:{folder}/chats.jsonl'


@pytest.fixture
def chat_cfg(cfg, tmp_path):
    """chat_cfg(field=value, ...) -> the data section of conversations of the bytes tokenizer."""

    def make(count=30, extra=(), **fields):
        source = write_chats(tmp_path / 'chats', count, extra)
        return cfg(**{'source': source, 'seq_len': 64} | fields)

    return make


@pytest.mark.parametrize('packing', ['concat', 'best_fit'])
def test_rows_hold_whole_conversations(packing, chat_cfg):
    """Each lies in one row, and its answer counts once, in tokens and bytes."""
    dataset = open_dataset(chat_cfg(packing=packing), say=discard_line)
    answers = ['é' + 'ab' * (i % 7) for i in range(30)]
    texts = []
    for split in (dataset.train, dataset.validation):
        assert isinstance(split, ChatRows)
        spelled = []
        for row in split:
            for segment in range(1, row['segments'].max() + 1):
                place = row['segments'] == segment
                tokens, is_target = row['tokens'][place], row['targets'][place] == 1
                assert tokens[0] == dataset.tokenizer.bos_id and tokens[-1] == 257
                assert is_target[-1] and not is_target[0]
                spelled.append(dataset.tokenizer.decode(tokens[is_target].tolist()).strip())
            assert not row['targets'][row['segments'] == 0].any()
        assert split.n_bytes == sum(len(f' {text}'.encode()) for text in spelled)
        assert split.n_tokens == split.n_bytes + len(spelled)
        assert split.n_tokens == sum(int(row['targets'].sum()) for row in split)
        texts += spelled
    assert sorted(texts) == sorted(answers)


def test_long_conversations_are_left_out(chat_cfg):
    long = {'messages': [say('user', 'x' * 100), say('assistant', 'y')]}
    notes = []
    dataset = open_dataset(chat_cfg(extra=[long, {'messages': []}]), say=notes.append)
    assert 'NOTE: conversations are left out: 1 have no answer' in notes
    (note,) = [note for note in notes if 'are longer than' in note]
    length = int(re.findall(r'data.seq_len=(\d+)', note)[0])
    again = open_dataset(chat_cfg(extra=[long, {'messages': []}], seq_len=length), say=discard_line)
    count = dataset.train.n_documents + dataset.validation.n_documents
    assert again.train.n_documents + again.validation.n_documents == count + 1 == 31
    n_bytes = dataset.train.n_bytes + dataset.validation.n_bytes
    assert again.train.n_bytes + again.validation.n_bytes == n_bytes + len(' y')
    with pytest.raises(ValueError, match=r'longer than data.seq_len.*Set data.seq_len to \d+'):
        open_dataset(chat_cfg(seq_len=8), say=discard_line)


def test_equivalence_pieces_and_one_piece(chat_cfg, monkeypatch, small_pieces, tmp_path):
    """Spans of a later piece would else begin at the start of the stream."""
    pieces = prepare_contents(chat_cfg(count=80))
    monkeypatch.undo()
    whole = prepare_contents(chat_cfg(count=80, cache_dir=str(tmp_path / 'whole')))
    assert pieces == whole and b'targets' in whole['index.npz']


def test_mixture_has_targets_in_every_row(chat_cfg, cfg, tmp_path):
    """Every row has targets; those of text are all tokens but BOS."""
    texts = write_texts(tmp_path / 'texts', [f'some text {i} ' * 9 for i in range(20)])
    mixture = {'chats': (0.5, chat_cfg().source), 'texts': (0.5, texts)}
    dataset = open_dataset(cfg(source='', mixture=repr(mixture), seq_len=64), say=discard_line)
    chats, text_rows = dataset.train.sources
    plain = open_dataset(cfg(source=texts, seq_len=64), say=discard_line).train
    assert text_rows.n_tokens == plain.n_tokens and 'targets' not in plain[0]
    row = text_rows[0]
    is_bos = row['tokens'] == dataset.tokenizer.bos_id
    np.testing.assert_array_equal(row['targets'], (row['segments'] > 0) & ~is_bos)
    assert dataset.train[0].keys() == chats[0].keys() == row.keys()


def test_template_determines_the_digest(cfg, tmp_path, chat_cfg):
    """A template beside the same tokenizer.json makes other tokens, which must not be cached."""
    digests = set()
    for template in (None, FIXTURE['templates']['chatml'], FIXTURE['templates']['zephyr']):
        build_tokenizer.write('byte_level', tmp_path / 'tokenizer', template)
        fields = chat_cfg(tokenizer=f'hf:{tmp_path / "tokenizer"}', seq_len=256)
        digests.add(open_dataset(fields, say=discard_line).digest)
    assert len(digests) == 3


def test_invalid_chat_sources(chat_cfg, cfg, tmp_path):
    with pytest.raises(ValueError, match=r'data.tokenizer=ids:9,0,1 cannot encode text'):
        check(chat_cfg(tokenizer='ids:9,0,1'))
    with pytest.raises(ValueError, match='has a single conversation'):
        open_dataset(chat_cfg(count=1), say=discard_line)
    with pytest.raises(ValueError, match=r'no file matches data.source=chat:nothing'):
        check(cfg(source='chat:nothing.jsonl'))
    with pytest.raises(ValueError, match=r'train split: 2 have no answer'):
        extra = [{'messages': [say('user', name)]} for name in 'ab']
        open_dataset(chat_cfg(count=0, extra=extra), say=discard_line)
    make = functools.partial(chat_cfg, validation_fraction=0.02)
    silent, long = tmp_path / 'silent.jsonl', tmp_path / 'long.jsonl'
    silent.write_text(json.dumps({'messages': [say('user', 'a')]}))
    long.write_text(json.dumps({'messages': [say('user', 'a' * 999), say('assistant', 'b')]}))
    with pytest.raises(ValueError, match=r'silent.jsonl can be used in the validation split'):
        open_dataset(make(validation_source=f'chat:{silent}'), say=discard_line)
    with pytest.raises(ValueError, match=r'the validation split of chat:\S+/long.jsonl is longer'):
        open_dataset(make(validation_source=f'chat:{long}'), say=discard_line)


def test_chat_folder_may_hold_texts(tmp_path):
    write_chats(tmp_path, 2, ())
    (tmp_path / 'convert.py').write_text('print(1)')
    source = open_source(f'chat:{tmp_path}', 'text')
    assert len([*source.documents()]) == 2 and 'leaves out' in source.notes[-1]
    assert source.notes[-1].endswith('convert.py')


def test_parquet_conversations(cfg, tmp_path):
    """A struct has every field in every message, and null where a record has none."""
    import pyarrow
    import pyarrow.parquet

    records = [{'messages': [say('user', f'{i}'), say('assistant', 'a')]} for i in range(9)]
    records[0]['messages'][0]['name'] = 'me'
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(records), tmp_path / 'a.parquet')
    dataset = open_dataset(cfg(source=f'chat:{tmp_path}/*.parquet'), say=discard_line)
    assert dataset.report['train']['documents'] + dataset.report['validation']['documents'] == 9
