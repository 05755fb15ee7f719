"""Flags of suites. Contract: names, values after names, and invalid requests."""

from typing import Annotated

import pytest
from absl import flags

from eval.evaluation import suite_flags as module
from eval.evaluation.suite_flags import check_options, format_suites, parse_value, read_suites
from eval.suites import SUITES
from eval.suites.base import Suite, SuiteResult
from modules.options import Option, declared_options


def tasks(
    checkpoint,
    *,
    names: Annotated[str, Option('of tasks, with commas')] = 'all',
    shots: Annotated[int, Option('examples before a question', 0, 32)] = 0,
    rate: Annotated[float | None, Option('share of the items', 0, 1)] = None,
    fast: Annotated[bool, Option('whether it skips')] = False,
) -> SuiteResult:
    """Counts tasks. A second sentence."""
    del checkpoint
    return SuiteResult({'n': float(len(names.split(','))) + shots + (rate or 0) + fast})


@pytest.fixture(autouse=True)
def with_tasks(monkeypatch):
    monkeypatch.setitem(SUITES, 'tasks', Suite(tasks, argument='names'))


def test_text_after_comma_belongs_to_value():
    requests = read_suites('tasks:arc_easy,piqa,perplexity', {})
    assert [(request.name, request.label) for request in requests] == [
        ('tasks', 'tasks:arc_easy,piqa'),
        ('perplexity', 'perplexity'),
    ]
    defaults = {'shots': 0, 'rate': None, 'fast': False}
    assert requests[0].options == {'names': 'arc_easy,piqa'} | defaults
    assert requests[1].options == {'stride': 0, 'documents': 0, 'source': ''}
    ngram, windows = read_suites('ngram, perplexity:64', {'perplexity.documents': 3})
    assert (ngram.options, windows.options) == (
        {},
        {'stride': 64, 'documents': 3, 'source': ''},
    )


def test_digest_covers_all_options():
    texts = ('perplexity', 'perplexity:0', 'perplexity:1')
    first, same, different = (read_suites(text, {})[0].digest for text in texts)
    assert first == same != different
    assert read_suites('perplexity', {'perplexity.documents': 1})[0].digest not in (
        first,
        different,
    )


@pytest.mark.parametrize(
    ('text', 'option_values', 'message'),
    [
        ('perplexty', {}, "--suite must be one of .* got 'perplexty'. Did you mean 'perplexity'"),
        ('ngram:5', {}, 'ngram takes no value after a colon. Its options: none'),
        ('perplexity:-1', {}, '--perplexity.stride must be at least 0; got -1'),
        ('perplexity:many', {}, '--perplexity.stride must be int; got .many. of type str'),
        ('perplexity:4', {'perplexity.stride': 4}, 'both set perplexity.stride'),
        ('ngram,ngram', {}, '--suite names ngram twice'),
        ('ngram', {'perplexity.stride': 4}, '--perplexity.stride belongs to a suite that'),
    ],
)
def test_invalid_requests_are_refused(text, option_values, message):
    with pytest.raises(ValueError, match=message):
        read_suites(text, option_values)


@pytest.mark.parametrize(
    ('flag', 'message'),
    [
        ('--perplexity.strid=4', "perplexity has no option 'strid'.* Did you mean 'stride'"),
        ('--perplxity.stride', "no suite is named 'perplxity'. Did you mean 'perplexity'"),
        ('--ngram.order=4', "ngram has no option 'order'. Its options: none"),
    ],
)
def test_unknown_options_are_refused(flag, message):
    with pytest.raises(ValueError, match=message):
        check_options(['eval', '--suite=perplexity', flag])
    check_options(['eval', '--suite=tasks', '--tasks.shots=2', '--notasks.fast', '--', flag])


@pytest.mark.parametrize(
    ('option', 'text', 'value'),
    [
        ('names', '1,2', '1,2'),
        ('shots', '5', 5),
        ('rate', '1', 1.0),
        ('rate', 'None', None),
        ('fast', 'true', True),
    ],
)
def test_values_have_option_types(option, text, value):
    parsed = parse_value(f'tasks.{option}', text, declared_options(tasks)[option])
    assert parsed == value and type(parsed) is type(value)


def test_options_are_flags(monkeypatch):
    """absl parses the flags, in separate flag values."""
    flag_values = flags.FlagValues()
    monkeypatch.setattr(module.flags, 'FLAGS', flag_values)
    for define in ('DEFINE_string', 'DEFINE_flag'):
        original = getattr(flags, define)
        monkeypatch.setattr(
            module.flags,
            define,
            lambda *a, original=original: original(*a, flag_values=flag_values),
        )
    module.define_suites()
    words = '--suite=tasks --tasks.shots=3 --tasks.rate=0.5 --tasks.fast'
    flag_values(['eval', *words.split()])
    assert module.read_option_flags() == {'tasks.shots': 3, 'tasks.rate': 0.5, 'tasks.fast': True}
    text = flag_values.get_help()
    assert 'examples before a question' in text and '0 to 32' in text
    assert '(NAME:VALUE)' in text
    with pytest.raises(flags.Error, match='shots must be between 0 and 32'):
        flag_values(['eval', '--tasks.shots=33'])


def test_suite_listing():
    lines = format_suites().splitlines()
    assert len(lines) == len(SUITES)
    assert any(line.split() == ['tasks', 'Counts', 'tasks'] for line in lines)
