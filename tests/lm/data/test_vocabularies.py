"""Reference: ids of tiny vocabularies by SentencePiece and tiktoken; and the refusals."""

import base64
import dataclasses
import json
import shlex
import shutil
import struct
from pathlib import Path

import pytest
import tokenizers as library

from lm.data import byte_ranks, sentencepiece_model, tokenizers
from lm.data.byte_ranks import build_tokenizer, parse_ranks
from lm.data.vocabularies import find_vocabulary, read_vocabulary
from tests.hard_texts import HARD_TEXTS

FOLDER = Path(__file__).parents[2] / 'fixtures' / 'vocabularies'
IDS = json.loads((FOLDER / 'ids.json').read_text())
RANKS = parse_ranks((FOLDER / 'ranks.tiktoken').read_bytes())
# Of LLaMA's kind nothing is lost; the others normalize, or have no piece for some characters.
LOSSLESS = ('llama.model', 'gemma.model')


def find_differences(tokenizer, expected):
    encoded = tokenizer.encode_batch(HARD_TEXTS, add_special_tokens=False)
    return [
        (text, encoding.ids, ids)
        for text, encoding, ids in zip(HARD_TEXTS, encoded, expected, strict=True)
        if encoding.ids != ids
    ]


def load_plan(path):
    return tokenizers.plan_tokenizer(f'hf:{path}').build([])


@pytest.mark.parametrize('name', ['llama', 'gemma', 'unigram', 'characters'])
def test_reference_sentencepiece(name):
    """A prefix space that is lost, a symbol that merges, a control piece that text can spell."""
    tokenizer = load_plan(FOLDER / f'{name}.model')
    differences = find_differences(tokenizer.library, IDS[f'{name}.model'])
    if name == 'unigram':  # splits of a run score the same, up to the rounding of sums
        differences = [d for d in differences if set(d[0]) != {'a'} or sorted(d[1]) != sorted(d[2])]
    assert not differences
    model = sentencepiece_model.parse_model((FOLDER / f'{name}.model').read_bytes())
    assert tokenizer.vocab_size == len(model.pieces) and (tokenizer.bos_id, tokenizer.eos_id) == (
        model.bos_id,
        model.eos_id,
    )
    if f'{name}.model' in LOSSLESS:
        texts = [text for text in HARD_TEXTS if sentencepiece_model.SPACE not in text]
        assert [tokenizer.decode(tokenizer.encode(text)) for text in texts] == texts


@pytest.mark.full
@pytest.mark.parametrize('rules', ['nmt_nfkc', 'nfkc', 'nmt_nfkc_cf'])
def test_reference_normalization(rules, tmp_path):
    """Marks that follow a character with a rule of its own, which the library drops."""
    sentencepiece = pytest.importorskip('sentencepiece')
    lines = [line for text in HARD_TEXTS for line in text.split('\n') if '\0' not in line]
    with open(tmp_path / 'm.model', 'wb') as file:
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=iter(lines * 4),
            model_writer=file,
            model_type='bpe',
            vocab_size=520,
            hard_vocab_limit=False,
            byte_fallback=True,
            normalization_rule_name=rules,
            minloglevel=2,
        )
    expected = sentencepiece.SentencePieceProcessor(str(tmp_path / 'm.model')).encode([*HARD_TEXTS])
    assert not find_differences(load_plan(tmp_path / 'm.model').library, expected)


PATTERNS = {
    'cl100k': byte_ranks.CL100K_PATTERN,
    'o200k': byte_ranks.O200K_PATTERN,
    'qwen': byte_ranks.QWEN_PATTERN,
}


@pytest.mark.parametrize('name', PATTERNS)
def test_reference_tiktoken(name):
    """A pattern that cuts words elsewhere, and pairs that join to a token in a second way."""
    tokenizer = build_tokenizer(RANKS, PATTERNS[name], {len(RANKS): '<|endoftext|>'})
    tokenizer.encode_special_tokens = True
    assert not find_differences(tokenizer, IDS[name])
    assert tokenizer.token_to_id('<|endoftext|>') == len(RANKS)
    assert tokenizer.decode(tokenizer.encode('<|endoftext|> é').ids) == '<|endoftext|> é'


def test_word_that_is_a_token_is_not_merged():
    """As in tiktoken, where some tokens of public vocabularies have no pair that makes them."""
    ranks = {bytes([byte]): byte for byte in range(256)} | {b'abc': 256}
    tokenizer = build_tokenizer(ranks, byte_ranks.GPT2_PATTERN, {})
    assert tokenizer.encode('abc').ids == [256] and tokenizer.encode('abcd').ids == [*b'abcd']
    with pytest.raises(ValueError, match='a special token is already an ordinary token: abc'):
        build_tokenizer(ranks, byte_ranks.GPT2_PATTERN, {300: 'abc'})


def test_public_ranks_are_known_by_their_content(tmp_path, monkeypatch):
    """Whatever the file is called, as tokenizer.model of Llama 3 is one."""
    public = byte_ranks.PublicRanks(
        'ours', byte_ranks.CL100K_PATTERN, lambda: {len(RANKS): '<|end|>'}, '<|end|>', '<|end|>'
    )
    digest = byte_ranks.digest_ranks(RANKS)
    monkeypatch.setitem(byte_ranks.PUBLIC_RANKS, digest, public)
    lines = (FOLDER / 'ranks.tiktoken').read_text().splitlines()
    (tmp_path / 'tokenizer.model').write_text('\r\n'.join(lines) + '\r\n')  # the order of lines
    tokenizer = load_plan(tmp_path)
    assert [array.tolist() for array in tokenizer.encode_batch(HARD_TEXTS)] == IDS['cl100k']
    assert tokenizer.encode('e\u0301') != tokenizer.encode('é')
    composed = dataclasses.replace(public, is_composed=True)
    monkeypatch.setitem(byte_ranks.PUBLIC_RANKS, digest, composed)
    shutil.copyfile(tmp_path / 'tokenizer.model', tmp_path / 'qwen.tiktoken')
    assert load_plan(tmp_path / 'qwen.tiktoken').encode('e\u0301') == tokenizer.encode('é')
    # One token for both is EOS, and BOS a new one.
    assert (tokenizer.eos_id, tokenizer.bos_id) == (len(RANKS), len(RANKS) + 1)


@pytest.mark.parametrize(
    'name, size, spelled',
    [
        ('r50k_base', 50257, {50256: '<|endoftext|>'}),
        ('p50k_base', 50257, {50256: '<|endoftext|>'}),
        ('cl100k_base', 100277, {100257: '<|endoftext|>', 100276: '<|endofprompt|>'}),
        ('o200k_base', 200019, {199999: '<|endoftext|>', 200018: '<|endofprompt|>'}),
        (
            'Llama 3',
            128256,
            {
                128000: '<|begin_of_text|>',
                128002: '<|reserved_special_token_0|>',
                128009: '<|eot_id|>',
                128011: '<|reserved_special_token_2|>',
                128255: '<|reserved_special_token_246|>',
            },
        ),
        ('Qwen', 151851, {151643: '<|endoftext|>', 151645: '<|im_end|>', 151850: '<|extra_204|>'}),
    ],
)
def test_reference_special_tokens(name, size, spelled):
    (public,) = [entry for entry in byte_ranks.PUBLIC_RANKS.values() if entry.name == name]
    specials = public.specials()
    assert max(specials) + 1 == size and specials.items() >= spelled.items()
    assert len({*specials.values()}) == len(specials)


def write_tekken(path, specials=None, **changes):
    entries = [
        {'rank': rank, 'token_bytes': base64.b64encode(token).decode(), 'token_str': None}
        for token, rank in RANKS.items()
    ]
    config = {'pattern': byte_ranks.O200K_PATTERN, 'default_num_special_tokens': 30}
    config |= {'default_vocab_size': len(RANKS) + 30} | changes
    extra = {} if specials is None else {'special_tokens': specials}
    path.write_text(json.dumps({'config': config, 'vocab': entries} | extra))


def test_reference_tekken(tmp_path):
    """Ids of text follow those of the special tokens; the file may list fewer than it counts."""
    write_tekken(tmp_path / 'tekken.json')
    tokenizer = load_plan(tmp_path)
    expected = [[i + 30 for i in ids] for ids in IDS['o200k']]
    assert [array.tolist() for array in tokenizer.encode_batch(HARD_TEXTS)] == expected
    assert (tokenizer.bos_id, tokenizer.eos_id) == (1, 2)
    names = [tokenizer.library.id_to_token(i) for i in (3, 19, 20)]
    assert names == ['[INST]', '[TOOL_CONTENT]', '<SPECIAL_20>']
    listed = [{'rank': 1, 'token_str': '<s>', 'is_control': True}]
    write_tekken(tmp_path / 'tekken.json', listed, default_vocab_size=290)
    tokenizer = load_plan(tmp_path)
    assert tokenizer.library.id_to_token(3) == '<SPECIAL_3>' and tokenizer.vocab_size == 291
    write_tekken(tmp_path / 'tekken.json', default_vocab_size=30)
    with pytest.raises(
        ValueError, match='not a vocabulary of tekken that can be read: it must have'
    ):
        load_plan(tmp_path)


def test_distant_id_is_refused(tmp_path):
    """Catches gigabytes of missing ids, which the library lists when it writes the tokenizer."""
    write_tekken(tmp_path / 'tekken.json')
    content = (tmp_path / 'tekken.json').read_text()
    distant = content.replace('"rank": 20,', '"rank": 2147483648,')
    assert distant != content
    (tmp_path / 'tekken.json').write_text(distant)
    with pytest.raises(ValueError, match=r'ids must be below 4,194,304; got 2,147,483,678'):
        load_plan(tmp_path)


@pytest.fixture
def gpt2_folder(tmp_path):
    """A vocab.json with its merges.txt, and the ids of the library that wrote them."""
    trained = library.ByteLevelBPETokenizer()
    trained.train_from_iterator(
        HARD_TEXTS, vocab_size=400, special_tokens=['<|endoftext|>'], show_progress=False
    )
    trained.save_model(str(tmp_path))
    return tmp_path, [trained.encode(text).ids for text in HARD_TEXTS]


def test_reference_gpt2(gpt2_folder):
    folder, expected = gpt2_folder
    tokenizer = load_plan(folder)
    spelling = HARD_TEXTS.index(next(text for text in HARD_TEXTS if '<|endoftext|>' in text))
    ids = [array.tolist() for array in tokenizer.encode_batch(HARD_TEXTS)]
    # The library that wrote the files takes the spelling in a text for the token.
    assert [i for i in range(40) if ids[i] != expected[i]] in ([], [spelling])
    assert tokenizer.eos_id == 0 and 0 not in ids[spelling]
    assert [tokenizer.decode(i) for i in ids] == [*HARD_TEXTS]


def test_vocab_json_that_other_programs_cut(gpt2_folder):
    """Is not cut as GPT-2's: the error has a command that Python can read. Qwen's composes text."""
    folder, _ = gpt2_folder
    (folder / 'tokenizer_config.json').write_text('{"tokenizer_class": "CLIPTokenizer"}')
    with pytest.raises(ValueError, match='CLIP cuts text differently from GPT-2') as caught:
        load_plan(folder)
    *_, code, argument = shlex.split(str(caught.value).partition('of it, run: ')[2])
    compile(code, 'the command', 'exec')
    assert argument == str(folder)
    (folder / 'tokenizer_config.json').write_text('{"tokenizer_class": "Qwen2TokenizerFast"}')
    tokenizer = load_plan(folder)
    assert tokenizer.encode('e\u0301') == tokenizer.encode('é')
    assert len(tokenizer.encode('12')) == 2
    (folder / 'merges.txt').unlink()  # no command makes a tokenizer.json without it
    with pytest.raises(ValueError, match=r'there is no merges.txt beside it\.$'):
        load_plan(folder)


def test_listed_tokens_have_their_ids(gpt2_folder):
    """Tokens that a fine-tuned model added, which are in no vocab.json."""
    folder, _ = gpt2_folder
    (folder / 'added_tokens.json').write_text('{"<b>": 401, "<a>": 400}')
    assert load_plan(folder).library.id_to_token(401) == '<b>'
    config = {'eos_token': '<b>', 'added_tokens_decoder': {'400': {'content': '<b>'}}}
    (folder / 'tokenizer_config.json').write_text(json.dumps(config))
    assert load_plan(folder).eos_id == 400  # and not that of the file that was read before
    (folder / 'tokenizer_config.json').unlink()
    (folder / 'added_tokens.json').write_text('{"<a>": 500}')
    with pytest.raises(ValueError, match="lists the token '<a>' with id 500, but it gets 400"):
        load_plan(folder)


def test_unknown_ranks_are_explained():
    with pytest.raises(
        ValueError, match=r'ranks are not those of r50k_base, .* special tokens'
    ) as e:
        load_plan(FOLDER / 'ranks.tiktoken')
    command = shlex.split(str(e.value).partition('of it, run: ')[2])
    compile(command[command.index('-c') + 1], 'the command', 'exec')
    assert command[-5:-3] == [str(FOLDER / 'ranks.tiktoken'), 'PATTERN']


def encode_field(number, content):
    return bytes([number << 3 | 2, len(content)]) + content


def encode_piece(text, score, kind):
    packed = struct.pack('<f', score)
    return encode_field(1, encode_field(1, text.encode()) + b'\x15' + packed + bytes([24, kind]))


def read_pieces(pieces, model_type, **options):
    """Returns the tokenizer of a model that normalizes nothing."""
    content = b''.join(encode_piece(*piece) for piece in [('<unk>', 0, 2), *pieces])
    rules = bytes([24, 0, 32, 0, 40, 0])  # no space is added, removed or escaped
    content += encode_field(2, bytes([24, model_type])) + encode_field(3, rules)
    tokenizer = sentencepiece_model.read_sentencepiece(content).library
    tokenizer.encode_special_tokens = True
    return tokenizer


def test_reference_runs_with_equal_scores():
    """LLaMA's runs of spaces: SentencePiece joins the leftmost pair, and not all pairs first."""
    runs = [('a', -3, 1), ('aa', -9, 1), ('aaa', -9, 1), ('b', -4, 1)]
    tokenizer = read_pieces(runs, sentencepiece_model.BPE)
    assert tokenizer.encode('aaaabaaaaa').tokens == ['aaa', 'a', 'b', 'aaa', 'aa']


def test_text_makes_no_control_piece():
    """Not even where its first character has no piece: a unigram model would prefer the token."""
    pieces = [('<s>', 0, 3), ('s', -3, 1), ('>', -4, 1), ('s>', -5, 1)]
    tokenizer = read_pieces(pieces, sentencepiece_model.UNIGRAM)
    assert tokenizer.encode('s<s>').ids == [2, 0, 4]


@pytest.mark.parametrize(
    'pieces, trainer, says',
    [
        ([('ab', -1, 1), ('bc', -1, 1)], b'\x18\x02', "'ab' and 'bc' have the same score"),
        ([('az', -1, 1)], b'\x18\x02', "'z' is in a piece but is not a piece"),
        ([('ab', -1, 5)], b'\x18\x01', 'it has unused pieces'),
        ([], b'\x18\x03', 'model_type word'),
        ([], b'\x18\x01\xc0\x01\x01', 'a space after the text'),
        ([('<m>', 0, 4), ('<m><m>', 0, 4)], b'\x18\x01', 'user-defined symbols is part of another'),
    ],
)
def test_model_that_no_tokenizer_json_can_follow(pieces, trainer, says, tmp_path):
    """Is refused, with the command that encodes a text with SentencePiece itself."""
    alphabet = [(character, -9, 1) for character in 'abc']
    content = b''.join(
        encode_piece(*piece) for piece in [('<unk>', 0, 2), ('<s>', 0, 3), *alphabet, *pieces]
    )
    path = tmp_path / 'odd.model'
    path.write_bytes(content + encode_field(2, trainer))
    with pytest.raises(ValueError, match=says) as caught:
        load_plan(path)
    command = str(caught.value).partition('per line, run: ')[2].partition(' <TEXT')[0]
    *_, code, argument = shlex.split(command)
    compile(code, 'the command', 'exec')
    assert argument == str(path) and f'ids:{5 + len(pieces)},1,2.' in str(caught.value)


def test_damaged_files_are_named(tmp_path):
    whole = (FOLDER / 'llama.model').read_bytes()
    for content in (b'', b'\n\x0b\n\x05<unk>', whole[:-3], b'\xff' * 40):
        (tmp_path / 'tokenizer.model').write_bytes(content)
        with pytest.raises(ValueError, match=r'tokenizer\.model is not a model of SentencePiece'):
            load_plan(tmp_path)
    (tmp_path / 'x.tiktoken').write_bytes(b'IQ== 0\nIg== one\n')
    with pytest.raises(ValueError, match='line 2 is not "TOKEN RANK"'):
        load_plan(tmp_path / 'x.tiktoken')


def test_one_vocabulary_is_taken(tmp_path):
    """A tokenizer.json before all; of two others none, as nobody could tell which was meant."""
    for name in ('a.model', 'b.model'):
        shutil.copyfile(FOLDER / 'llama.model', tmp_path / name)
    assert find_vocabulary(tmp_path) is None
    with pytest.raises(ValueError, match='has none, or several'):
        load_plan(tmp_path)
    (tmp_path / 'b.model').rename(tmp_path / 'spiece.model.v3')
    assert find_vocabulary(tmp_path) == tmp_path / 'a.model'
    saved = load_plan(tmp_path)
    saved.save(tmp_path)
    assert find_vocabulary(tmp_path) == tmp_path / 'tokenizer.json'
    assert read_vocabulary(tmp_path / 'tokenizer.json').library.to_str() == saved.library.to_str()
    again = load_plan(tmp_path)
    assert (again.bos_id, again.eos_id) == (saved.bos_id, saved.eos_id)
    assert not find_differences(again.library, IDS['llama.model'])
