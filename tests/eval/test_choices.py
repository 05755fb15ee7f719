"""Contract: the listing describes each part, its source and its options."""

import math

import pytest

from eval.console.listings import (
    MIN_WIDTH,
    WIDTH,
    find_sources,
    first_sentence,
    format_bounds,
    format_listing,
    option_type,
    part_rows,
    summarize_text,
)
from lm.config.fields import CHOICES, FIELDS
from modules.numerics import DTYPES
from modules.options import Option, OptionDeclaration, coerce_type

ROWS = [(field, row) for field in CHOICES for row in part_rows(field)]
LONGEST_LINE = 100
FINAL_NORM = FIELDS['model.final_norm'].description
# Common knowledge, and implementations without an idea to cite.
WITHOUT_SOURCE = {
    ('data.objective', 'causal'),
    ('model.activation', 'relu'),
    ('model.readout', 'learned'),
    ('model.stream', 'plain'),
    ('optim.schedule', 'constant'),
    ('train.eval_objectives', 'causal'),
    *((field, 'none') for field in CHOICES),
    *((field, row.name) for field, row in ROWS if field == 'model.remat'),
    *((field, row.name) for field, row in ROWS if field.startswith('kernels.')),
}


@pytest.mark.parametrize(('field', 'row'), ROWS, ids=lambda value: getattr(value, 'name', value))
def test_every_row_is_described(field, row):
    assert len(row.summary) > 5
    assert len(row.summary) <= LONGEST_LINE
    assert '\n' not in row.summary
    assert not row.summary.startswith(f'{row.name}(')  # the docstring that dataclasses make
    assert row.source or (field, row.name) in WITHOUT_SOURCE, 'name the paper, or the code'


@pytest.mark.parametrize(('field', 'row'), ROWS, ids=lambda value: getattr(value, 'name', value))
def test_every_option_is_described_and_valid(field, row):
    for path, declared in row.options.items():
        assert declared.option.description, path
        assert FIELDS[path].is_part_option, path
        coerce_type(path, declared.default, declared.types)
        if declared.default is not None:
            declared.option.check(path, declared.default)


def test_row_summaries_differ():
    """Catches a line from a class with several rows as instances."""
    for field in CHOICES:
        words = [row.summary for row in part_rows(field)]
        assert len(set(words)) == len(words), field


def block(text, name):
    """Returns the lines of one row of a listing, to the empty line."""
    lines = text.splitlines()
    start = next(i for i, line in enumerate(lines) if line.split(' (')[0] == name)
    return lines[start : [*lines, ''].index('', start)]


def test_listing_has_options_defaults_and_bounds():
    text = format_listing('model.norm')
    assert text.startswith('model.norm=NAME or NAME:OPTION=VALUE,...: norm in the blocks\n')
    lines = block(text, 'powernorm')
    assert lines[0] == 'powernorm (arXiv:2003.07845, code)'
    options = ' '.join(' '.join(lines[1:]).split())
    eps = FIELDS['norm.eps'].description
    assert f'norm.eps=1e-05 {eps} [float, 0 to 1] norm.groups=1 ' in options
    assert '[int or None, at least 1] norm.warmup=10000 ' in options
    assert [word.split('=')[0] for word in options.split() if word.startswith('norm.')] == [
        'norm.eps',
        'norm.groups',
        'norm.warmup',
        'norm.ema_decay',
    ]
    assert block(text, 'none') == ['none', '  The identity']


def test_layer_options_weight_auxiliary_losses():
    words = ' '.join(' '.join(block(format_listing('model.mlp'), 'moe')).split())
    assert '[float, at least 0 and finite, traced]' in words.split('loss.balance_loss=0.01')[1]


def test_paper_follows_the_name_once():
    assert block(format_listing('model.placement'), 'pre') == [
        'pre (arXiv:2002.04745)',
        '  Pre-norm: x <- x + F(N(x))',
    ]
    text = 'Adds (arXiv:1111.11111): `y = x + F(x)`, after arXiv:2222.22222. More.'
    assert summarize_text(text) == 'Adds (arXiv:1111.11111): y = x + F(x), after arXiv:2222.22222'


def test_listing_has_all_fields():
    text = format_listing()
    for field in CHOICES:
        assert f'\n{field}=NAME' in f'\n{text}'
    for field, row in ROWS:
        # A line with a name alone is the end of a description.
        words = (line.split(None, 1) for line in text.splitlines() if len(line.split()) > 1)
        summaries = [summary for name, summary in words if name == row.name]
        assert any(row.summary.startswith(summary) for summary in summaries), (field, row)
    words = ' '.join(text.split())
    assert f'model.final_norm=NAME or NAME:OPTION=VALUE,... or auto: {FINAL_NORM}' in words
    assert '(the names of model.norm)' in words.split(FINAL_NORM)[1][:30]
    assert 'model.reparam=NAME or NAME+NAME or auto: ' in words
    assert '--choices=model.norm lists' in ' '.join(text.splitlines()[-2:])


@pytest.mark.parametrize('width', [MIN_WIDTH, WIDTH])
@pytest.mark.parametrize('field', [None, *CHOICES])
def test_lines_fit_a_terminal(field, width):
    text = format_listing(field, width)
    assert max(map(len, text.splitlines())) <= width
    assert text.endswith('\n') and not text.endswith('\n\n')


def test_card_wraps_prose_and_keeps_equations():
    equation = 'l = l_0 (1 - KL(softmax(s / l_0), uniform) / (alpha log(V)))'
    lines = format_listing('loss.name=aldr_kl', WIDTH).splitlines()
    assert f'{" " * 6}{equation}' in lines
    narrow = format_listing('loss.name=aldr_kl', 80).splitlines()
    assert f'{" " * 6}{equation[:60]}' in {line[:66] for line in narrow}
    prose = [line for line in narrow if line.startswith('  l is ')]
    assert prose and all(len(line) > 60 for line in prose)


def test_every_field_is_described():
    for path, field in FIELDS.items():
        assert 0 < len(field.description) <= 90, path


def test_unknown_field_error_names_the_nearest():
    for ask in (format_listing, part_rows):
        with pytest.raises(ValueError, match=r"--choices must be .* Did you mean 'model.norm'\?"):
            ask('model.nrom')


@pytest.mark.parametrize(
    ('option', 'expected'),
    [
        (Option(), ''),
        (Option('', 0, 1), '0 to 1'),
        (Option('', 1), 'at least 1'),
        (Option('', maximum=5), 'at most 5'),
        (Option('', 0, 1.7976931348623157e308), 'at least 0 and finite'),
        (Option('', 1e-37, 1), 'above 0 and at most 1'),
        (Option('', 0, 1 - 1e-7), 'at least 0 and below 1'),
        (Option('', -1.7976931348623157e308, 1.7976931348623157e308), 'finite'),
        (Option(choices=('a', 'b')), 'a|b'),
    ],
)
def test_bounds_are_formatted(option, expected):
    assert format_bounds(option) == expected


def test_option_type_is_named():
    several = OptionDeclaration((int, type(None)), Option('', 1, math.inf, traced=True), None)
    assert option_type(several) == 'int or None, at least 1, traced'
    assert option_type(OptionDeclaration((bool,), Option(), False)) == 'bool'


def test_card_has_first_sentence_and_sources():
    text = 'x +\n    F(x) (arXiv:1111.11111, alg. 2). More of\nit.\n\nSource: arXiv:2222.22222.'
    assert first_sentence(text) == 'x + F(x) (arXiv:1111.11111, alg. 2)'
    assert find_sources(text) == 'arXiv:1111.11111, arXiv:2222.22222'
    assert find_sources('arXiv:2222.22222 and the code\nbeside it') == 'arXiv:2222.22222, code'
    assert find_sources('no source code') == ''
    text = 'Rates / m (arXiv:2309.14322, app. E.2). More.'
    assert first_sentence(text) == 'Rates / m (arXiv:2309.14322, app. E.2)'


def test_option_choices_match_their_tables():
    from lm.devices.run_axis import RUN_AXES
    from lm.model.parameters import TRAINABLE

    def option_choices(path):
        return set(FIELDS[path].option.choices)

    assert option_choices('model.dtype') - {'auto'} == DTYPES.keys() - {
        'float64'
    }  # nothing trains in it
    # The way of a single run is not chosen: it follows.
    assert option_choices('kernels.run_axis') - {'auto'} == RUN_AXES.keys() - {'single'}
    assert option_choices('train.trainable') == TRAINABLE.keys()


def test_card_has_the_whole_docstring():
    """Catches a card of all rows, or of a first sentence."""
    card = format_listing('model.norm=dyt')
    assert 'y = g tanh(a x) + b' in card and "authors'" in card and 'norm.alpha=0.5' in card
    assert 'rmsnorm' not in card and max(map(len, card.splitlines())) <= WIDTH
    with pytest.raises(ValueError, match="Did you mean 'dyt'"):
        format_listing('model.norm=dytt')


@pytest.mark.parametrize('field', CHOICES)
def test_every_row_has_a_card(field):
    for row in part_rows(field):
        card = format_listing(f'{field}={row.name}')
        assert row.text and all(path in card for path in row.options)
        assert max(map(len, card.splitlines())) <= WIDTH and '``' not in card
