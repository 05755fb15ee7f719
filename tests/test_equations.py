"""Reference and contract: equations of docstrings, in a terminal and on the site."""

import inspect

import pytest

from docs import docstrings
from docs.cards import tables
from docs.equations import to_mathml
from eval.console.docstrings import format_docstring, is_equation, strip_marks
from eval.console.listings import SYMBOLS, part_rows
from modules.optim.stages import STAGES


def markup(equation, display=True):
    """Returns the inside of <math>, with {} in place of the signs that nothing shows."""
    text = to_mathml(equation, display).partition('>')[2].removesuffix('</math>')
    text = text.replace('<mo>\u2062</mo>', '{times}').replace('<mo>\u2061</mo>', '{of}')
    stretchy = ' form="{}" stretchy="true"'
    return text.replace(stretchy.format('prefix'), '').replace(stretchy.format('postfix'), '')


@pytest.mark.parametrize(
    ('equation', 'expected'),
    [
        ('x', '<mi>x</mi>'),
        ('-eps', '<mrow><mo>−</mo><mi>ε</mi></mrow>'),
        ('1e-7', '<mn>1e-7</mn>'),
        ('g x', '<mrow><mi>g</mi>{times}<mi>x</mi></mrow>'),
        ('W_up', '<msub><mi>W</mi><mi>up</mi></msub>'),
        ('ce', '<mi>ce</mi>'),
        ('p_ts', '<msub><mi>p</mi><mrow><mi>t</mi><mi>s</mi></mrow></msub>'),
        ('a, b', '<mrow><mi>a</mi><mo rspace="0.6em">,</mo><mi>b</mi></mrow>'),
        ('b1^t', '<msubsup><mi>b</mi><mn>1</mn><mi>t</mi></msubsup>'),
        ('m_hat', '<mover accent="true"><mi>m</mi><mo stretchy="false">^</mo></mover>'),
        ("x'", '<msup><mi>x</mi><mo>′</mo></msup>'),
        ('G^T', '<msup><mi>G</mi><mo>⊤</mo></msup>'),
        ('J^+', '<msup><mi>J</mi><mo>+</mo></msup>'),
        ('l^-a', '<msup><mi>l</mi><mrow><mo>−</mo><mi>a</mi></mrow></msup>'),
        ('a b / c', '<mfrac><mrow><mi>a</mi>{times}<mi>b</mi></mrow><mi>c</mi></mfrac>'),
        (
            '1 + a / (b c)',
            '<mrow><mn>1</mn><mo>+</mo><mfrac><mi>a</mi><mrow><mi>b</mi>{times}<mi>c</mi></mrow>'
            '</mfrac></mrow>',
        ),
        (
            '(a / b) c',
            '<mrow><mfrac><mi>a</mi><mi>b</mi></mfrac>{times}<mi>c</mi></mrow>',
        ),
        ('sqrt(x)', '<msqrt><mi>x</mi></msqrt>'),
        ('f(x)', '<mrow><mi>f</mi>{of}<mrow><mo>(</mo><mi>x</mi><mo>)</mo></mrow></mrow>'),
        (
            'f (x)',
            '<mrow><mi>f</mi>{times}<mrow><mo>(</mo><mi>x</mi><mo>)</mo></mrow></mrow>',
        ),
        ('log Z', '<mrow><mi>log</mi><mspace width="0.17em"></mspace><mi>Z</mi></mrow>'),
        ('||x||_2', '<msub><mrow><mo>‖</mo><mi>x</mi><mo>‖</mo></mrow><mn>2</mn></msub>'),
        (
            '|x| |y|',
            '<mrow><mrow><mo>|</mo><mi>x</mi><mo>|</mo></mrow>{times}'
            '<mrow><mo>|</mo><mi>y</mi><mo>|</mo></mrow></mrow>',
        ),
        ('sum_i x', '<mrow><munder><mo>∑</mo><mi>i</mi></munder>{times}<mi>x</mi></mrow>'),
        (
            'x_(t - 1)',
            '<msub><mi>x</mi><mrow><mi>t</mi><mo>−</mo><mn>1</mn></mrow></msub>',
        ),
        (
            'a <= b if "no norm"',
            '<mrow><mi>a</mi><mo>≤</mo><mi>b</mi><mtext>\xa0if\xa0</mtext><mtext>no norm</mtext>'
            '</mrow>',
        ),
        ('weight_decay', '<mtext class="name">weight_decay</mtext>'),
    ],
)
def test_equation_as_mathml(equation, expected):
    assert markup(equation) == expected


def test_fractions_and_sums_in_a_line_are_flat():
    assert 'mfrac' not in markup('a / b', display=False)
    assert markup('(a + b) / c', display=False).count('<mo>(</mo>') == 1
    assert markup('sum_i x', display=False).startswith('<mrow><msub>')


def test_source_is_the_alternative_text():
    assert to_mathml('a < "b"').startswith('<math alttext="a &lt; &quot;b&quot;"><mrow>')
    assert to_mathml('x', display=True).startswith('<math display="block" alttext="x">')


@pytest.mark.parametrize(
    ('equation', 'reason'),
    [
        ('a / b c', 'a fraction needs brackets'),
        ('a / b / c', 'a fraction needs brackets'),
        ('x @ y', "unknown sign at '@ y'"),
        ('x.y', 'a product needs spaces'),
        ('(x', r"expected '\)'"),
        ('x)', 'unexpected sign'),
        ('|x', r"expected '\|'"),
        ('a +', 'it ends too early'),
        ('a = * b', 'expected a factor'),
        ('x^^2', 'expected an index'),
        ('x^2^3', r"a second '\^'"),
        ('x_a_b', 'two indices'),
        ('f()', 'expected a term'),
    ],
)
def test_unknown_notation_is_an_error(equation, reason):
    with pytest.raises(ValueError, match=reason):
        to_mathml(equation)


@pytest.mark.parametrize(
    'text',
    [
        'y = x',
        'a - b',
        'x^2',
        '|x|',
        'x',
        'eps',
        'x_ti',
        'W_up',
        'Q_L',
        "x'",
        'sigma(W)',
        'log Z',
        '-2 log p',
        'g x',
        'tau T',
    ],
)
def test_mathematics_in_backticks(text):
    assert is_equation(text)


@pytest.mark.parametrize(
    'text',
    [
        *('groups', 'rms_norm', 'n_heads', 'x_BTD', 'N_UNNUMBERED', 'a.b', 'table[name]'),
        *('scaling.name=mup', 'lm/data/rows.py', '--choices', 'python -m eval'),
        'check(recipe, part)',
    ],
)
def test_code_in_backticks(text):
    assert not is_equation(text)


@pytest.mark.parametrize('field', tables())
def test_card_equations_can_be_drawn(field):
    for row in part_rows(field):
        for equation in docstrings.list_equations(row.text):
            to_mathml(equation, display=True)


@pytest.mark.parametrize('stage', STAGES)
def test_stage_equations_can_be_drawn(stage):
    for equation in docstrings.list_equations(inspect.getdoc(STAGES[stage])):
        to_mathml(equation, display=True)


DOCSTRING = """\
Scales (arXiv:1111.11111, section 2): `y = g x`.

The gain `g` [D] starts at 1;
``alpha`` is `norm.alpha`, not * or <b>. See https://a.b/c_d.

`u = a / b`.
`v = sum_i u_i`

- `x`: the
  input.
- `g`: the gain.

    left   a_b

Args:
  x_BTD: activations of
    a layer, `x <= 1`.

Returns:
  [B, T].
"""


def test_docstring_in_a_terminal():
    assert (
        format_docstring(DOCSTRING, 40)
        == """\
Scales (arXiv:1111.11111, section 2):
y = g x.

The gain g [D] starts at 1; `alpha` is
`norm.alpha`, not * or <b>. See
https://a.b/c_d.

    u = a / b
    v = sum_i u_i

- x: the input.
- g: the gain.

left   a_b

Args:
  x_BTD: activations of
    a layer, x <= 1.

Returns:
  [B, T]."""
    )
    assert strip_marks('`g x^2` of ``x``') == 'g x^2 of `x`'


def test_short_equation_stays_on_its_line():
    text = 'Nine letters, `a + b + c + d`.'
    assert format_docstring(text, 20) == 'Nine letters,\na + b + c + d.'


def test_docstring_in_markdown():
    assert (
        docstrings.to_markdown(DOCSTRING)
        == """\
Scales ([arXiv:1111.11111](https://arxiv.org/abs/1111.11111), section 2):

```{equation}
y = g x
```

The gain {equation}`g` \\[D\\] starts at 1; `alpha` is `norm.alpha`, not \\* or \\<b\\>. See \
<https://a.b/c_d>.

```{equation}
u = a / b
v = sum_i u_i
```

- {equation}`x`: the input.
- {equation}`g`: the gain.

```text
left   a_b
```

**Arguments**

- `x_BTD`: activations of a layer, {equation}`x <= 1`.

**Returns**

\\[B, T\\]."""
    )


def test_docstring_for_autodoc():
    """Only what reStructuredText does not know is changed."""
    text = docstrings.to_rest(DOCSTRING)
    assert 'section 2):\n\n.. equation::\n\n   y = g x\n\nThe gain `g`' in text
    assert '.. equation::\n\n   u = a / b\n   v = sum_i u_i\n' in text
    assert '.. code-block:: text\n\n   left   a_b\n' in text
    assert text.endswith(
        'Args:\n  x_BTD: activations of\n    a layer, `x <= 1`.\n\nReturns:\n  [B, T].'
    )


TABLE = """\
    kind    factor, Adam
    input   `1 / m`
    hidden  1
"""


def test_tables():
    """Columns are aligned without the backticks in a terminal, and cells on the site."""
    expected = ['    kind     factor, Adam', '    input    1 / m', '    hidden   1']
    assert format_docstring(TABLE, 80).splitlines() == expected
    assert docstrings.to_markdown(TABLE).splitlines() == [
        '| kind | factor, Adam |',
        '| --- | --- |',
        '| input | {equation}`1 / m` |',
        '| hidden | 1 |',
    ]
    assert docstrings.to_rest(TABLE).startswith('.. code-block:: text\n\n       kind     factor')


def test_symbols_are_tables_and_can_be_drawn():
    assert {*SYMBOLS} <= {*tables()}
    for symbols in SYMBOLS.values():
        for equation in docstrings.list_equations(symbols):
            to_mathml(equation)


def test_equations_are_listed():
    """Those of prose, lists, sections and lines of their own."""
    expected = ['y = g x', 'g', 'u = a / b', 'v = sum_i u_i', 'x', 'g', 'x <= 1']
    assert docstrings.list_equations(DOCSTRING) == expected
