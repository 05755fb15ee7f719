"""Contract: the listing describes each part, its source and its options."""

import math

import pytest

from eval.console.listings import (
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
# Common knowledge, and implementations without an idea to cite.
WITHOUT_SOURCE = {
    ('data.objective', 'causal'),
    ('model.activation', 'relu'),
    ('model.readout', 'learned'),
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
    assert text.startswith('model.norm=NAME or NAME:OPTION=VALUE,...\n')
    lines = [' '.join(line.split()) for line in block(text, 'powernorm')]
    assert lines[0] == 'powernorm (arXiv:2003.07845, code)'
    assert 'norm.eps=1e-05 float, 0 to 1 added under the root' in lines
    groups = 'norm.groups=1 int or None, 1 to any of features, each with statistics of its own'
    assert groups in lines
    assert [line.split()[0] for line in lines[2:]] == [
        'norm.eps=1e-05',
        'norm.groups=1',
        'norm.warmup=10000',
        'norm.ema_decay=0.9',
    ]
    assert block(text, 'none') == ['none', '  The identity']


def test_layer_options_weight_auxiliary_losses():
    (line,) = [line for line in block(format_listing('model.mlp'), 'moe') if 'balance' in line]
    assert line.split()[:6] == ['loss.balance_loss=0.01', 'float,', '0', 'to', 'any', 'finite,']
    assert 'traced' in line


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
        lines = [line for line in text.splitlines() if line.split()[:1] == [row.name]]
        assert any(row.summary.startswith(line.split(None, 1)[1]) for line in lines), (field, row)
    assert 'model.final_norm=NAME or NAME:OPTION=VALUE,... or auto: the names of model.norm' in text
    assert 'model.reparam=NAME or NAME+NAME or auto\n' in text
    assert '--choices=model.norm' in text.splitlines()[-1]


@pytest.mark.parametrize('field', [None, *CHOICES])
def test_lines_fit_a_terminal(field):
    assert max(map(len, format_listing(field).splitlines())) <= WIDTH
    assert format_listing(field).endswith('\n') and not format_listing(field).endswith('\n\n')


def test_unknown_field_error_names_the_nearest():
    for ask in (format_listing, part_rows):
        with pytest.raises(ValueError, match=r"--choices must be .* Did you mean 'model.norm'\?"):
            ask('model.nrom')


@pytest.mark.parametrize(
    ('option', 'expected'),
    [
        (Option(), ''),
        (Option('', 0, 1), '0 to 1'),
        (Option('', 1), '1 to any'),
        (Option('', maximum=5), 'any to 5'),
        (Option('', 0, 1.7976931348623157e308), '0 to any finite'),
        (Option('', -1.7976931348623157e308, 1.7976931348623157e308), 'any finite'),
        (Option(choices=('a', 'b')), 'a|b'),
    ],
)
def test_bounds_are_formatted(option, expected):
    assert format_bounds(option) == expected


def test_option_type_is_named():
    several = OptionDeclaration((int, type(None)), Option('', 1, math.inf, traced=True), None)
    assert option_type(several) == 'int or None, 1 to any, traced'
    assert option_type(OptionDeclaration((bool,), Option(), False)) == 'bool'


def test_card_has_first_sentence_and_sources():
    text = 'x +\n    F(x) (arXiv:1111.11111, alg. 2). More of\nit.\n\nSource: arXiv:2222.22222.'
    assert first_sentence(text) == 'x + F(x) (arXiv:1111.11111, alg. 2)'
    assert find_sources(text) == 'arXiv:1111.11111, arXiv:2222.22222'
    assert find_sources('arXiv:2222.22222 and the code\nbeside it') == 'arXiv:2222.22222, code'
    assert find_sources('no source code') == ''


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
