"""Contract: a chat becomes the prompt format of its model, and no message ends its turn."""

import datetime
import gc
import json
import subprocess
import sys
from pathlib import Path

import pytest

from eval.generate import build_requests
from eval.serve.chat import PlainChat, TemplateChat, build_chat, compile_template
from eval.serve.requests import Refusal
from lm.data import template_worker, tokenizers
from lm.data.templates import Template, TemplateFailure
from lm.data.tokenizers import ByteTokenizer, read_end_tokens
from lm.inference.sampling import Sampling
from tests import ROOT

TEMPLATE = """\
{% for message in messages %}
<|start|>{{ message.role }}: {{ message.content | trim }}<|end|>
{% endfor %}
{% if add_generation_prompt %}<|start|>assistant:{% endif %}"""
HELLO = [{'role': 'user', 'content': ' hello '}]


@pytest.fixture
def folder(tmp_path):
    """The files of a tokenizer, as an import keeps them."""
    import tokenizers as library

    byte_level = library.pre_tokenizers.ByteLevel
    vocab = {letter: i for i, letter in enumerate(sorted(byte_level.alphabet()))}
    tokenizer = library.Tokenizer(library.models.BPE(vocab, []))
    tokenizer.pre_tokenizer = byte_level(add_prefix_space=False)
    tokenizer.decoder = library.decoders.ByteLevel()
    tokenizer.add_special_tokens(['<|start|>', '<|end|>'])
    tokenizer.save(str(tmp_path / 'tokenizer.json'))
    config = {'bos_token': '<|start|>', 'eos_token': {'content': '<|end|>'}}
    config['chat_template'] = [{'name': 'default', 'template': TEMPLATE}]
    (tmp_path / 'tokenizer_config.json').write_text(json.dumps(config))
    (tmp_path / 'generation_config.json').write_text('{"eos_token_id": [257, 12]}')
    return tmp_path


def test_template_and_its_special_tokens(folder):
    tokenizer = tokenizers.load_for_model(folder, 258, None, None)
    chat = build_chat(tokenizer, folder)
    assert isinstance(chat, TemplateChat) and chat.end_tokens == {257, 12}
    ids = chat.encode(chat.format_prompt(HELLO))
    start, end = tokenizer.bos_id, tokenizer.eos_id
    assert ids[0] == start and ids.count(start) == 2 and ids.count(end) == 1
    assert tokenizer.decode(ids) == 'user: hello\nassistant:'


def test_answer_follows_the_templates_prompt(folder):
    """Catches special tokens spelled as text, and a second BOS, in `eval.generate --chat`."""
    tokenizer = tokenizers.load_for_model(folder, 258, None, None)
    chat = build_chat(tokenizer, folder)
    (request,) = build_requests(tokenizer, [' hello '], 3, Sampling(), chat)
    assert list(request.tokens) == chat.encode(chat.format_prompt(HELLO))
    with pytest.raises(ValueError, match='contains the special token'):
        build_requests(tokenizer, ['a<|end|>'], 3, Sampling(), chat)
    chat.close()


def test_special_token_in_message_is_refused(folder):
    chat = build_chat(tokenizers.load_for_model(folder, 258, None, None), folder)
    with pytest.raises(
        Refusal, match=r"messages\[0\].content contains the special token '<|end|>'"
    ):
        chat.format_prompt([{'role': 'user', 'content': 'a<|end|>b'}])


def test_template_with_token_without_row(folder):
    """A template may write tokens, such as one for images, that the model has no row for."""
    (folder / 'tokenizer_config.json').write_text(json.dumps({'chat_template': TEMPLATE}))
    chat = build_chat(tokenizers.load_for_model(folder, 257, None, None), folder)
    assert chat.encode('<|start|>a')[0] == 256
    with pytest.raises(ValueError, match=r"token '<\|end\|>', id 257, but the model has 257 emb"):
        chat.encode(chat.format_prompt(HELLO))


def test_template_file_has_precedence(folder):
    (folder / 'chat_template.jinja').write_text('{{ bos_token }}{{ messages[0].content }}')
    tokenizer = tokenizers.load_for_model(folder, 258, None, None)
    chat = build_chat(tokenizer, folder)
    assert tokenizer.decode(chat.encode(chat.format_prompt(HELLO))) == ' hello '


def test_prompt_without_template_has_roles(tmp_path):
    chat = build_chat(ByteTokenizer(), tmp_path)
    assert isinstance(chat, PlainChat) and chat.stops == ('\nuser:',)
    turns = [{'role': 'system', 'content': 'Be brief.'}, *HELLO]
    ids = chat.encode(chat.format_prompt(turns))
    assert ids[0] == ByteTokenizer.bos_id
    assert ByteTokenizer().decode(ids) == 'system: Be brief.\nuser:  hello \nassistant:'


RAISES = {
    'refuses': ("{{ raise_exception('no system') }}", 'no system'),
    'reaches out': ('{{ messages[0].content.__class__.__mro__ }}', '__class__'),
    'undefined': ('{{ messages[9].content.x }}', 'no element 9'),
    'divides': ('{{ 1 / 0 }}', 'division by zero'),
    'adds': ('{{ messages[0].content + 1 }}', 'can only concatenate'),
    'long range': ('{% for i in range(10 ** 9) %}{% endfor %}', 'Range too big'),
    'recursion': ('{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}', 'RecursionError'),
    'memory': ("{{ 'a' * messages | length * 2 ** 32 }}", 'more than 768 MiB of memory'),
    'long number': ("{{ '%1000000000d' % 5 }}", 'more than 768 MiB of memory'),
    'long text': ('{{ messages | tojson(indent=10 ** 7) }}', 'longer than 4,194,304 characters'),
    'half a character': ("{{ '\\ud800' }}", 'surrogates not allowed'),
    'no file': ("{% include '/etc/passwd' %}", 'no loader'),
}
LOOP = '{% for j in range(99999) %}' * 3 + '{% endfor %}' * 3


@pytest.mark.parametrize('name', RAISES)
def test_failing_template_refuses_the_messages(folder, name):
    """The templates include one that leaves its sandbox, or allocates all memory."""
    template, words = RAISES[name]
    (folder / 'chat_template.jinja').write_text(template)
    chat = build_chat(tokenizers.load_for_model(folder, 258, None, None), folder)
    with pytest.raises(Refusal, match="the model's chat template rejected the messages") as caught:
        chat.format_prompt(HELLO)
    assert words in caught.value.message and caught.value.status == 400
    chat.close()


def test_endless_template_is_ended():
    """The next prompt has a new process.

    The loop depends on the messages, as in a template that a stranger's message makes loop.
    """
    template = Template('{% if loops %}' + LOOP + '{% endif %}{{ text }}')
    first = template._idle[0]
    assert template.render(loops=False, text='a') == 'a' and template._idle[0] is first
    with pytest.raises(TemplateFailure, match=r'it takes more than [13] seconds'):
        template.render(loops=True, text='a')
    assert not first.is_alive()
    assert template.render(loops=False, text='b') == 'b'
    second = template._idle[0]
    second._process.kill()
    second._process.wait()
    assert template.render(loops=False, text='c') == 'c'
    third = template._idle[0]
    template.close()
    assert not third.is_alive()


@pytest.mark.full
def test_slow_template_is_an_error_at_the_start():
    """Jinja computes constants as it compiles."""
    with pytest.raises(ValueError, match=r'cannot be read: it takes more than [13] seconds'):
        compile_template('{{ 2 ** (2 ** 30) }}')


def test_processes_end_with_their_template():
    template = Template('a')
    process = template._idle[0]._process
    del template
    gc.collect()
    assert process.poll() is not None


def test_template_process_has_neither_jax_nor_keys(monkeypatch):
    """With JAX it would start in seconds; a template that escapes could read the environment."""
    monkeypatch.setenv('EVENKEEL_KEY', 'secret')
    path = Path(template_worker.__file__)
    code = f'import runpy, sys; runpy.run_path({str(path)!r}); print(*sys.modules)'
    process = subprocess.run([sys.executable, '-c', code], cwd=ROOT, capture_output=True, text=True)
    assert 'jinja2' in process.stdout.split() and not {'jax', 'numpy'} & {*process.stdout.split()}
    template = Template('a')
    variables = Path(f'/proc/{template._idle[0]._process.pid}/environ').read_bytes()
    template.close()
    assert b'PATH=' in variables and b'EVENKEEL_KEY' not in variables


PROMPTS = json.loads((ROOT / 'tests/fixtures/chat/prompts.json').read_text())


@pytest.mark.default_rows('smollm3', 'json', 'tokens')
@pytest.mark.parametrize('name', PROMPTS['templates'])
def test_prompts_match_transformers(name):
    """Recorded by tests/fixtures/chat/make.py; None: the template refuses the chat."""
    template = Template(PROMPTS['templates'][name])
    for chat, messages in PROMPTS['chats'].items():
        variables = {'messages': messages, 'add_generation_prompt': True} | PROMPTS['tokens']
        try:
            text = template.render(**variables, tools=None, documents=None)
        except TemplateFailure:
            text = None
        assert text == PROMPTS['prompts'][name][chat], chat
    template.close()


def test_template_knows_date_and_tokens(folder):
    names = ['bos_token', 'eos_token', 'pad_token', 'unk_token']
    words = ' '.join(f'{{{{ {name} if {name} is defined else "none" }}}}' for name in names)
    (folder / 'chat_template.jinja').write_text(words + "{{ strftime_now('%Y') }}")
    (folder / 'special_tokens_map.json').write_text('{"unk_token": {"content": "<unk>"}}')
    chat = build_chat(tokenizers.load_for_model(folder, 258, None, None), folder)
    years = {str(datetime.date.today().year)}
    text = chat.format_prompt(HELLO)
    years.add(str(datetime.date.today().year))
    assert text.startswith('<|start|> <|end|> none <unk>') and text[-4:] in years
    chat.close()


@pytest.mark.parametrize(
    'eos_token_id, end_tokens',
    [
        (0, {0}),
        ([0, 5], {0, 5}),
        ([[1]], set()),
        ({}, set()),
        ('x', set()),
        (-1, set()),
        ([None], set()),
        (True, set()),
        ([1, 'a'], {1}),
        (1.5, set()),
        (None, set()),
    ],
)
def test_end_tokens_are_the_listed_ids(tmp_path, eos_token_id, end_tokens):
    """Token 0 is a token like any other."""
    (tmp_path / 'generation_config.json').write_text(json.dumps({'eos_token_id': eos_token_id}))
    assert (
        read_end_tokens(tmp_path) == end_tokens == build_chat(ByteTokenizer(), tmp_path).end_tokens
    )


@pytest.mark.parametrize(
    'config',
    [
        [],
        {'chat_template': [1]},
        {'chat_template': {}},
        {'chat_template': 5},
        {'chat_template': '{% if'},
        {'chat_template': [{'name': [1], 'template': 'x'}]},
    ],
)
def test_malformed_config_is_an_error_at_the_start(folder, config):
    tokenizer = tokenizers.load_for_model(folder, 258, None, None)
    (folder / 'tokenizer_config.json').write_text(json.dumps(config))
    with pytest.raises(ValueError, match=r'chat.template|contains no object'):
        build_chat(tokenizer, folder)


def test_invalid_template_file_is_an_error_at_the_start(folder):
    tokenizer = tokenizers.load_for_model(folder, 258, None, None)
    (folder / 'chat_template.jinja').write_bytes(b'\xff')
    with pytest.raises(ValueError, match=r'chat_template\.jinja is not a chat template'):
        build_chat(tokenizer, folder)
    (folder / 'chat_template.jinja').write_bytes(b'a' * (1 << 20) + b'a')
    with pytest.raises(ValueError, match='more than 1,048,576 bytes'):
        build_chat(tokenizer, folder)


def test_invalid_template_is_an_error_at_the_start():
    with pytest.raises(ValueError, match="the model's chat template cannot be read"):
        compile_template('{% if %}')
