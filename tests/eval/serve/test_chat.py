"""Contract: a chat is the prompt that its model was trained with, and no message ends its turn."""

import json

import pytest

from eval.serve.chat import PlainChat, TemplateChat, chat_of, compiled
from eval.serve.requests import Refusal
from lm.data import tokenizers
from lm.data.tokenizers import ByteTokenizer

TEMPLATE = """\
{% for message in messages %}
<|start|>{{ message.role }}: {{ message.content | trim }}<|end|>
{% endfor %}
{% if add_generation_prompt %}<|start|>assistant:{% endif %}"""
HELLO = [{'role': 'user', 'content': ' hello '}]


@pytest.fixture
def folder(tmp_path):
    """The files of a tokenizer as an import keeps them."""
    import tokenizers as library

    byte_level = library.pre_tokenizers.ByteLevel
    vocab = {letter: i for i, letter in enumerate(sorted(byte_level.alphabet()))}
    made = library.Tokenizer(library.models.BPE(vocab, []))
    made.pre_tokenizer = byte_level(add_prefix_space=False)
    made.decoder = library.decoders.ByteLevel()
    made.add_special_tokens(['<|start|>', '<|end|>'])
    made.save(str(tmp_path / 'tokenizer.json'))
    config = {'bos_token': '<|start|>', 'eos_token': {'content': '<|end|>'}}
    config['chat_template'] = [{'name': 'default', 'template': TEMPLATE}]
    (tmp_path / 'tokenizer_config.json').write_text(json.dumps(config))
    (tmp_path / 'generation_config.json').write_text('{"eos_token_id": [257, 12]}')
    return tmp_path


def test_a_template_is_rendered_and_its_special_tokens_are_tokens(folder):
    tokenizer = tokenizers.of_model(folder, 258, None, None)
    chat = chat_of(tokenizer, folder)
    assert isinstance(chat, TemplateChat) and chat.ends == {257, 12}
    ids = chat.tokens(HELLO)
    start, end = tokenizer.bos_id, tokenizer.eos_id
    assert ids[0] == start and ids.count(start) == 2 and ids.count(end) == 1
    assert tokenizer.decode(ids) == 'user: hello\nassistant:'


def test_a_message_that_spells_a_special_token_is_refused(folder):
    chat = chat_of(tokenizers.of_model(folder, 258, None, None), folder)
    with pytest.raises(Refusal, match=r"messages\[0\].content spells the special token '<|end|>'"):
        chat.tokens([{'role': 'user', 'content': 'a<|end|>b'}])


def test_a_template_file_has_precedence(folder):
    (folder / 'chat_template.jinja').write_text('{{ bos_token }}{{ messages[0].content }}')
    tokenizer = tokenizers.of_model(folder, 258, None, None)
    assert tokenizer.decode(chat_of(tokenizer, folder).tokens(HELLO)) == ' hello '


def test_without_template_lines_have_roles(tmp_path):
    chat = chat_of(ByteTokenizer(), tmp_path)
    assert isinstance(chat, PlainChat) and chat.stops == ('\nuser:',)
    turns = [{'role': 'system', 'content': 'Be brief.'}, *HELLO]
    ids = chat.tokens(turns)
    assert ids[0] == ByteTokenizer.bos_id
    assert ByteTokenizer().decode(ids) == 'system: Be brief.\nuser:  hello \nassistant:'


@pytest.mark.parametrize(
    'template',
    [
        "{{ raise_exception('no system') }}",
        '{{ messages[0].content.__class__.__mro__ }}',
        '{{ messages[9].content.x }}',
        '{{ 1 / 0 }}',
        '{{ messages[0].content + 1 }}',
        '{% for i in range(10 ** 9) %}{% endfor %}',
    ],
)
def test_a_template_that_fails_refuses_the_messages(folder, template):
    """Also one that reaches out of its sandbox, or never ends."""
    (folder / 'chat_template.jinja').write_text(template)
    chat = chat_of(tokenizers.of_model(folder, 258, None, None), folder)
    with pytest.raises(Refusal, match="the model's chat template refuses the messages"):
        chat.tokens(HELLO)


def test_what_is_no_template_is_an_error_at_the_start():
    with pytest.raises(ValueError, match="the model's chat template cannot be read"):
        compiled('{% if %}')
