import json
import os
import shutil
import signal
import threading

import pytest

from configs import default
from lm.config.resolve import resolve
from lm.data import open_dataset, tokenizers

TEXTS = [
    '',
    'plain ascii\n',
    'CRLF\r\n, tab\t, NUL \x00, bell \x07, escape \x1b[0m, delete \x7f',
    'é 日本語 🙂 👩‍👩‍👧 ﷽ \u2028 \ufffd \ufeff',
    'the specials by name: <s> </s> <|endoftext|> <bos> [EOS] <unk> <pad>',
    ' leading and trailing   ',
    '\n\n\n    indented\n\n',
]


@pytest.fixture(scope='module')
def bpe():
    return tokenizers.plan_tokenizer('bpe:300').build(TEXTS * 3)


@pytest.fixture
def hf_folder(tmp_path):
    """A tokenizer.json with `<s>` and `</s>` as special tokens of the library."""
    import tokenizers as library

    tokenizer = library.Tokenizer(library.models.BPE())
    tokenizer.pre_tokenizer = library.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = library.decoders.ByteLevel()
    trainer = library.trainers.BpeTrainer(
        vocab_size=280,
        special_tokens=['<s>', '</s>'],
        initial_alphabet=library.pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(TEXTS, trainer)
    tokenizer.enable_truncation(4)
    tokenizer.save(str(tmp_path / 'tokenizer.json'))
    declared = {'bos_token': {'content': '<s>'}, 'eos_token': '</s>'}
    (tmp_path / 'tokenizer_config.json').write_text(json.dumps(declared))
    return tmp_path


@pytest.mark.parametrize('text', TEXTS)
@pytest.mark.parametrize('kind', ['byte', 'bpe', 'hf'])
def test_property_round_trip(kind, text, bpe, hf_folder):
    makers = {
        'byte': lambda: tokenizers.plan_tokenizer('byte').build([]),
        'bpe': lambda: bpe,
        'hf': lambda: tokenizers.plan_tokenizer(f'hf:{hf_folder}').build([]),
    }
    tokenizer = makers[kind]()
    ids = tokenizer.encode(text)
    assert isinstance(ids, list)
    assert tokenizer.decode(ids) == text
    assert tokenizer.decode([tokenizer.bos_id, *ids, tokenizer.eos_id]) == text
    assert tokenizer.encode(text.encode()) == ids
    assert not {tokenizer.bos_id, tokenizer.eos_id} & set(ids)
    assert all(0 <= i < tokenizer.vocab_size for i in ids)


def test_reference_byte_ids():
    tokenizer = tokenizers.plan_tokenizer('byte').build([])
    assert tokenizer.encode('aé') == [97, 195, 169]
    assert (tokenizer.bos_id, tokenizer.eos_id, tokenizer.vocab_size) == (256, 257, 258)


def test_property_bpe_compresses(bpe):
    text = 'the specials by name: '
    assert len(bpe.encode(text)) < len(text)
    assert tokenizers.plan_tokenizer('bpe:5000').build(TEXTS).vocab_size == 5000
    assert len(tokenizers.plan_tokenizer('bpe:258').build(TEXTS).encode('abc')) == 3


def test_property_bpe_training_is_deterministic(bpe):
    again = tokenizers.plan_tokenizer('bpe:300').build(TEXTS * 3)
    assert again.library.to_str() == bpe.library.to_str()


def test_equivalence_long_texts_in_parts(monkeypatch):
    text = 'def f(x):\n    return x\n\n\nclass A:\n\tpass \n end\nshort\nlines\r\nhere\n' * 50
    tokenizer = tokenizers.plan_tokenizer('bpe:400').build([text])
    whole = tokenizer.encode(text)
    monkeypatch.setattr(tokenizers, 'PART', 40)
    assert len(list(tokenizers.split_text([text], 'name'))) > 20
    assert tokenizer.encode(text) == whole


@pytest.mark.parametrize('kind', ['byte', 'bpe'])
def test_equivalence_saved_and_loaded(kind, bpe, tmp_path):
    tokenizer = bpe if kind == 'bpe' else tokenizers.plan_tokenizer('byte').build([])
    tokenizer.save(tmp_path / 'there')
    loaded = tokenizers.load(tmp_path / 'there')
    for name in ('vocab_size', 'bos_id', 'eos_id'):
        assert getattr(loaded, name) == getattr(tokenizer, name)
    assert [loaded.encode(text) for text in TEXTS] == [tokenizer.encode(text) for text in TEXTS]


def test_equivalence_hf_loads_saved_tokenizers(bpe, tmp_path):
    """Keeps the ids of BOS and EOS; the identity depends on the content alone."""
    for folder in ('a', 'b'):
        bpe.save(tmp_path / folder)
    plan, other_plan = (tokenizers.plan_tokenizer(f'hf:{tmp_path}/{folder}') for folder in 'ab')
    (loaded, ids) = plan.build([]), ('vocab_size', 'bos_id', 'eos_id')
    assert [getattr(loaded, name) for name in ids] == [getattr(bpe, name) for name in ids]
    assert plan.vocab_size == bpe.vocab_size and plan.identity == other_plan.identity
    assert loaded.cuttable and loaded.encode(TEXTS[1]) == bpe.encode(TEXTS[1])


def test_reference_declared_special_tokens(hf_folder):
    declared = tokenizers.plan_tokenizer(f'hf:{hf_folder}').build([])
    assert (declared.bos_id, declared.eos_id, declared.vocab_size) == (0, 1, 280)
    (hf_folder / 'tokenizer_config.json').write_text('{}')
    bare = tokenizers.plan_tokenizer(f'hf:{hf_folder}/tokenizer.json').build([])
    assert (bare.eos_id, bare.bos_id, bare.vocab_size) == (280, 281, 282)
    (hf_folder / 'tokenizer_config.json').write_text('{"bos_token": "</s>", "eos_token": "</s>"}')
    shared = tokenizers.plan_tokenizer(f'hf:{hf_folder}').build([])
    assert (shared.eos_id, shared.bos_id, shared.vocab_size) == (1, 280, 281)


@pytest.fixture
def image_folder(hf_folder):
    """The tokenizer of `hf_folder` with an added token, 280, which its model has no row for."""
    import tokenizers as library

    tokenizer = library.Tokenizer.from_file(str(hf_folder / 'tokenizer.json'))
    tokenizer.add_tokens(['<image>'])
    tokenizer.save(str(hf_folder / 'tokenizer.json'))
    return hf_folder


def test_token_without_row_is_refused(image_folder, tmp_path):
    """An index out of the bounds of the embedding is clamped by JAX, and wraps in uint16 at 65536
    rows.
    """
    tokenizers.load_for_model(image_folder, 280, None, None).save(tmp_path / 'saved')
    tokenizer = tokenizers.plan_tokenizer(f'hf:{tmp_path}/saved').build([])
    assert tokenizer.vocab_size == 280
    assert tokenizer.list_tokens_without_row() == {280: '<image>'}
    assert max(tokenizer.encode('an image')) < 280
    for encode in (tokenizer.encode, lambda text: tokenizer.encode_batch(['a', text])):
        with pytest.raises(ValueError, match="token '<image>', id 280, but the model has 280 emb"):
            encode('an <image> here')
    larger = tokenizers.load_for_model(image_folder, 281, None, None)
    assert larger.encode('<image>') == [280] and not larger.list_tokens_without_row()


def test_bos_without_row_is_refused(image_folder):
    (image_folder / 'tokenizer_config.json').write_text('{"bos_token": "<image>"}')
    with pytest.raises(
        ValueError, match=r"the bos_token of .* is '<image>', id 280, but the model"
    ):
        tokenizers.load_for_model(image_folder, 280, 0, 1)


TEMPLATES = {
    'chat_template.jinja': b'{{ messages }}\n',
    'additional_chat_templates/tool.jinja': b'{{ tools }}',
    'special_tokens_map.json': b'{"pad_token": "<s>"}',
    'added_tokens.json': b'{ }',
    'generation_config.json': b'{"eos_token_id": [1, 5]}',
}


def write_beside(folder, contents):
    for name, content in contents.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(content)


def test_equivalence_files_beside_a_tokenizer(hf_folder, tmp_path):
    """Are saved with it, byte for byte; tokens and prepared data do not depend on them."""
    bare = tokenizers.plan_tokenizer(f'hf:{hf_folder}')
    write_beside(hf_folder, TEMPLATES | {'README.md': b'no file of a tokenizer'})
    plan = tokenizers.plan_tokenizer(f'hf:{hf_folder}')
    assert plan.identity == bare.identity and not plan.build([]).beside
    tokenizer = plan.add_files(plan.build([]))
    assert tokenizer.beside.items() >= TEMPLATES.items() and 'README.md' not in tokenizer.beside
    tokenizer.save(tmp_path / 'a')
    tokenizers.load(tmp_path / 'a').save(tmp_path / 'b')
    again = tokenizers.plan_tokenizer(f'hf:{tmp_path}/b')
    assert not again.build([]).beside
    again.add_files(again.build([])).save(tmp_path / 'c')
    for folder in 'abc':
        for name, content in tokenizer.beside.items():
            assert (tmp_path / folder / name).read_bytes() == content
    ids = tokenizers.TokenIds(64, 1, 2, {'generation_config.json': b'{}'})
    ids.save(tmp_path / 'ids')
    loaded = tokenizers.plan_tokenizer(f'hf:{tmp_path}/ids')
    assert loaded.add_files(loaded.build([])).beside == ids.beside and loaded.vocab_size == 64


def test_equal_tokenizers_share_data_and_keep_their_templates(hf_folder, tmp_path):
    """The second run would get the templates of the first, from the cache."""
    (tmp_path / 'text.txt').write_text('plain ascii\n' * 200)
    twin = shutil.copytree(hf_folder, tmp_path / 'twin')
    datasets = []
    for folder, template in ((hf_folder, b'one'), (twin, b'two')):
        (folder / 'chat_template.jinja').write_bytes(template)
        config = default.get_config()
        config.data.source, config.data.tokenizer = f'text:{tmp_path}/text.txt', f'hf:{folder}'
        config.data.seq_len, config.data.cache_dir = 8, str(tmp_path / 'cache')
        datasets.append(open_dataset(resolve(config.to_dict()).data, say=lambda line: None))
    assert datasets[0].digest == datasets[1].digest
    templates = [dataset.tokenizer.beside['chat_template.jinja'] for dataset in datasets]
    assert templates == [b'one', b'two']
    assert not list((tmp_path / 'cache').rglob('*.jinja'))


def test_reference_vocab_size_needs_no_corpus(hf_folder):
    assert tokenizers.vocab_size('byte') == 258
    assert tokenizers.vocab_size('bpe:4096') == 4096
    assert tokenizers.vocab_size(f'hf:{hf_folder}') == 280


@pytest.mark.parametrize(
    'spec, says',
    [
        ('bite', "one of bpe, byte, hf, ids; got 'bite'. Did you mean 'byte'"),
        ('gpt2', 'Nothing is downloaded: bpe:4096 is trained on the text, and hf:PATH'),
        ('lm/data', 'set data.tokenizer=hf:lm/data.'),
        ('hf:lm/data', 'has none, or several'),
        ('byte:3', 'takes no argument'),
        ('bpe', 'size of at least 258'),
        ('bpe:257', 'size of at least 258'),
        ('bpe:-5', 'size of at least 258'),
        ('hf:nowhere/at/all', 'is not a file'),
        ('hf:', 'needs the path'),
        ('ids:64', 'needs the size of the vocabulary'),
        ('ids:64,1,64', 'ids must be below 64'),
    ],
)
def test_invalid_specs_raise(spec, says):
    with pytest.raises(ValueError, match=says.replace('.', r'\.')):
        tokenizers.plan_tokenizer(spec)


def test_errors_invalid_files(tmp_path):
    (tmp_path / 'tokenizer.json').write_text('{}')
    with pytest.raises(ValueError, match='is not a tokenizer'):
        tokenizers.plan_tokenizer(f'hf:{tmp_path}')
    with pytest.raises(ValueError, match='has no tokenizer'):
        tokenizers.load(tmp_path)


def test_property_training_can_be_interrupted():
    """The library returns only when it is done: Ctrl-C would wait that long."""

    def texts():
        yield 'some text'
        os.kill(os.getpid(), signal.SIGINT)
        while True:
            yield 'more text'

    before = set(threading.enumerate())
    with pytest.raises(KeyboardInterrupt):
        tokenizers.plan_tokenizer('bpe:300').build(texts())
    for thread in set(threading.enumerate()) - before:
        thread.join(1)
        assert not thread.is_alive()


def test_errors_in_texts_are_raised():
    def texts():
        yield 'some text'
        raise ValueError('no more text')

    with pytest.raises(ValueError, match='no more text'):
        tokenizers.plan_tokenizer('bpe:300').build(texts())
