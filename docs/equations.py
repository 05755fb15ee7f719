"""Equations of docstrings as MathML, which browsers draw without a script.

The notation reads well in a terminal, and each rule below is an error if it is broken:

- A letter, a Greek name (`alpha`, `eps`) and a word of several letters (`rms`) are symbols.
  `x_t`, `x_(t - 1)` and `b1` have an index, `x_ts` has two, `m_hat` and `m_bar` have an accent,
  `x^2`, `W^T` and `x'` an exponent. Names of fields (`weight_decay`) stay code. Text in double
  quotes stands as it is.
- Factors stand side by side, `g x`, or have ` * ` or ` . ` between them. A fraction has the factors
  before ` / ` above its line and the one factor behind it below: `a b / c`. What follows must be
  bracketed: `(a / b) c` or `a / (b c)`, never `a / b c`.
- `sqrt(x)`, `|x|`, `||x||`, `sum_i x_i`, `max(0, x)`, `log x` and `W[:, o]` have their usual form.
- Relations are `=`, `<`, `<=`, `>`, `>=`, `!=`, `~` (has the distribution), `~=` (about), `in` and
  `<-` (is replaced by). The words `if`, `else`, `and`, `or`, `for`, `over` and `with` join clauses.
"""

import html
import itertools
import re
from collections.abc import Iterator, Sequence
from typing import NamedTuple, NoReturn

from eval.console.docstrings import FUNCTIONS, GREEK, LIMITS

ACCENTS = {'hat': '^', 'bar': '¯', 'tilde': '~'}
BIG = {'sum': '∑', 'prod': '∏'}
CLOSING = {'(': ')', '[': ']', '{': '}', '|': '|', '||': '||'}
CLAUSES = frozenset(('if', 'else', 'and', 'or', 'for', 'over', 'with'))
PRODUCTS = {'*': '⊙', '.': '⋅'}
RELATIONS = {
    **{'=': '=', '<': '<', '>': '>', '<=': '≤', '>=': '≥', '!=': '≠', '~': '∼', '~=': '≈'},
    **{'<-': '←', 'in': '∈'},
}
SHORT_WORDS = frozenset(('up', 'in', 'to'))  # all other pairs of letters are two indices
SEPARATORS = frozenset(',;:')
TOKENS = re.compile(
    r"""(?P<space>\s*)(?:
      (?P<number>\d+(?:\.\d+)?(?:e[+-]?\d+)?)
    | (?P<name>[A-Za-z]+\d*(?:_[A-Za-z0-9]+)*)
    | "(?P<text>[^"]+)"
    | (?P<operator><-|[<>!~]=|\|\||\.\.\.|[=<>+*/^_()\[\]{},;:|'.~-])
    )""",
    re.VERBOSE,
)


class Token(NamedTuple):
    kind: str
    text: str
    spaced: bool  # whether a space stands before it


class Node(NamedTuple):
    """An element of MathML: `text` in a leaf, `children` in any other."""

    tag: str
    text: str = ''
    attributes: str = ''
    children: tuple['Node', ...] = ()


def to_mathml(equation: str, display: bool = False) -> str:
    """Returns an equation as a <math> element.

    Args:
      equation: in the notation of this module.
      display: whether it stands on a line of its own, with fractions of two lines.

    Raises:
      ValueError: if the notation is not known.
    """
    node = Parser(equation, display).parse()
    source = html.escape(equation, quote=True)
    block = ' display="block"' if display else ''
    return f'<math{block} alttext="{source}">{render(node)}</math>'


def render(node: Node) -> str:
    """Returns the text of an element."""
    inner = html.escape(node.text) + ''.join(map(render, node.children))
    attributes = f' {node.attributes}' if node.attributes else ''
    return f'<{node.tag}{attributes}>{inner}</{node.tag}>'


def element(tag: str, *children: Node, attributes: str = '') -> Node:
    return Node(tag, '', attributes, children)


def row(nodes: Sequence[Node]) -> Node:
    return nodes[0] if len(nodes) == 1 else element('mrow', *nodes)


def operator(text: str, attributes: str = '') -> Node:
    return Node('mo', text, attributes)


def symbol(text: str) -> Node:
    """Returns a letter, Greek letter, number or word."""
    return Node('mn' if text.isdigit() else 'mi', GREEK.get(text, text))


def index(text: str) -> Node:
    """Returns an index or exponent: a symbol, or a row of two letters."""
    if len(text) == 2 and text.isalpha() and text not in GREEK.keys() | SHORT_WORDS:
        return row([symbol(letter) for letter in text])
    return symbol(text)


def is_word(node: Node) -> bool:
    """Returns whether a factor begins with a word, which needs space on both sides."""
    while node.children:
        node = node.children[0]
    return node.tag in ('mi', 'mtext', 'mo') and len(node.text) > 1


class Parser:
    """Parses one equation by recursive descent."""

    def __init__(self, text: str, display: bool):
        self.text, self.tokens, self.position = text, list(self.read_tokens(text)), 0
        self.stacked = display  # whether fractions have two lines
        self.display = display
        self.brackets: list[str] = []  # those open here

    def read_tokens(self, text: str) -> Iterator[Token]:
        """Yields the tokens. Raises ValueError for a character that begins none."""
        start = 0
        while text[start:].strip():
            match = TOKENS.match(text, start)
            if match is None:
                raise ValueError(f'equation {text!r}: unknown sign at {text[start:].strip()!r}')
            kind = str(match.lastgroup)
            yield Token(kind, match[kind], bool(match['space']) or not start)
            start = match.end()

    def fail(self, reason: str) -> NoReturn:
        rest = ' '.join(token.text for token in self.tokens[self.position :])
        raise ValueError(f'equation {self.text!r}: {reason} at {rest!r}')

    def next_is(self, *texts: str, spaced: bool | None = None) -> bool:
        """Returns whether the next token is one of these operators or words."""
        if self.position == len(self.tokens):
            return False
        token = self.tokens[self.position]
        return token.kind != 'text' and token.text in texts and spaced in (None, token.spaced)

    def take(self) -> Token:
        if self.position == len(self.tokens):
            self.fail('it ends too early')
        self.position += 1
        return self.tokens[self.position - 1]

    def expect(self, text: str) -> None:
        if not self.next_is(text):
            self.fail(f'expected {text!r}')
        self.take()

    def parse(self) -> Node:
        node = row(self.clauses())
        if self.position < len(self.tokens):
            self.fail('unexpected sign')
        return node

    def clauses(self) -> list[Node]:
        """Returns relations with commas and words between them."""
        nodes = []
        while True:
            if not (self.closes() or self.next_is(*SEPARATORS, *CLAUSES)):
                nodes += self.relation()
            if self.next_is(*CLAUSES):
                nodes.append(
                    Node('mtext', f'\N{NO-BREAK SPACE}{self.take().text}\N{NO-BREAK SPACE}')
                )
            elif self.next_is(*SEPARATORS):
                wide = '' if self.brackets else 'rspace="0.6em"'  # between whole equations
                nodes.append(operator(self.take().text, wide))
            else:
                return nodes or self.fail('expected a term')

    def relation(self) -> list[Node]:
        nodes = self.terms()
        while self.next_is(*RELATIONS):
            nodes.append(operator(RELATIONS[self.take().text]))
            nodes += self.terms()
        return nodes

    def terms(self) -> list[Node]:
        nodes = []
        while True:
            if self.next_is('+', '-'):
                nodes.append(operator(self.take().text.replace('-', '−')))
            nodes += self.product()
            if not self.next_is('+', '-'):
                return nodes

    def product(self) -> list[Node]:
        """Returns factors; a fraction takes all factors before it since the last ` * `."""
        done, factors = [], [self.factor()]
        while True:
            if self.next_is(*PRODUCTS):
                if not self.tokens[self.position].spaced:
                    self.fail('a product needs spaces')
                done += [*spread(factors), operator(PRODUCTS[self.take().text])]
                factors = [self.factor()]
            elif self.next_is('/'):
                self.take()
                factors = self.fraction(factors, self.factor())
                if self.next_is('/') or self.begins_factor():
                    self.fail('a fraction needs brackets: (a / b) c or a / (b c)')
            elif self.begins_factor():
                factors.append(self.factor())
            else:
                return done + spread(factors)

    def fraction(self, above: list[Node], below: Node) -> list[Node]:
        if not self.stacked:
            return [element('mrow', *spread(above), operator('/'), below)]
        top = strip_brackets(above[0]) if len(above) == 1 else row(spread(above))
        return [element('mfrac', top, strip_brackets(below))]

    def begins_factor(self) -> bool:
        if self.position == len(self.tokens):
            return False
        token = self.tokens[self.position]
        if token.kind != 'operator':
            return token.kind == 'text' or token.text not in CLAUSES | RELATIONS.keys()
        return token.text in (*CLOSING, '...') and not self.closes()

    def closes(self) -> bool:
        """Returns whether the next token closes the innermost bracket, or the equation ends."""
        if self.position == len(self.tokens):
            return True
        return bool(self.brackets) and self.next_is(CLOSING[self.brackets[-1]])

    def factor(self) -> Node:
        """Returns an atom with its indices, exponents, arguments."""
        token = self.take()
        if token.kind == 'number':
            node = Node('mn', token.text)
        elif token.kind == 'text':
            node = Node('mtext', token.text)
        elif token.kind == 'name':
            return self.named(token.text)
        elif token.text == '...':
            node = operator('…')
        elif token.text in CLOSING:
            node = self.bracketed(token.text)
            if not self.next_is('^', '_') and (inner := strip_brackets(node)).tag == 'mfrac':
                return inner
        else:
            self.position -= 1
            self.fail('expected a factor')
        return self.scripts(node)

    def named(self, text: str) -> Node:
        """Returns a name with its indices, exponents and arguments."""
        first, *indices = text.split('_')
        letters = first.rstrip('0123456789')
        is_symbol = len(letters) == 1 or letters in GREEK
        if indices and not is_symbol and first not in FUNCTIONS:
            return self.scripts(Node('mtext', text, 'class="name"'))
        if is_symbol and letters != first:
            first, indices = letters, [first[len(letters) :], *indices]
        node = operator(BIG[first]) if first in BIG else symbol(first)
        if first in LIMITS and first not in BIG:
            node = operator(first, 'lspace="0" rspace="0"')
        if indices and indices[0] in ACCENTS:
            accent = operator(ACCENTS[indices.pop(0)], 'stretchy="false"')
            node = element('mover', node, accent, attributes='accent="true"')
        if len(indices) > 1:
            self.fail(f'two indices in {text!r}')
        if first == 'sqrt':
            self.expect('(')
            return self.scripts(element('msqrt', row(self.inside('('))))
        node = self.scripts(node, [index(text) for text in indices], first in LIMITS)
        while self.next_is('(', '[', spaced=False):
            arguments = self.bracketed(self.take().text)
            node = element('mrow', node, operator('\N{FUNCTION APPLICATION}'), arguments)
        return self.scripts(node)

    def scripts(self, node: Node, below: list[Node] | None = None, limits: bool = False) -> Node:
        """Returns an atom with its indices and exponents.

        Args:
          node: the atom.
          below: the index that its name has.
          limits: whether they stand below and above it in a displayed equation.
        """
        below, above = below or [], []
        while self.next_is('^', '_', "'"):
            sign = self.take().text
            if sign == "'":
                above.append(operator('′'))
                continue
            scripts = below if sign == '_' else above
            if scripts and scripts[-1] != operator('′'):
                self.fail(f'a second {sign!r}')
            scripts.append(self.script())
        if not (below or above):
            return node
        over = limits and self.display
        tag = ('munder' if over else 'msub') if below else ('mover' if over else 'msup')
        tag = ('munderover' if over else 'msubsup') if below and above else tag
        return element(tag, node, *(row(scripts) for scripts in (below, above) if scripts))

    def script(self) -> Node:
        """Returns an index or exponent: a number, a name or a bracket, perhaps with a sign."""
        stacked, self.stacked = self.stacked, False
        nodes = [operator(self.take().text.replace('-', '−'))] if self.next_is('+', '-') else []
        if self.next_is('('):
            nodes += self.inside(self.take().text)
        elif self.next_is('T'):
            self.take()
            nodes.append(operator('⊤'))
        elif not nodes or self.is_touching():
            token = self.take()
            if token.kind not in ('number', 'name') or '_' in token.text:
                self.fail('expected an index')
            nodes.append(Node('mn', token.text) if token.kind == 'number' else index(token.text))
        self.stacked = stacked
        return row(nodes)

    def is_touching(self) -> bool:
        """Returns whether a token follows without a space."""
        is_end = self.position == len(self.tokens)
        return not is_end and not self.tokens[self.position].spaced

    def inside(self, opening: str) -> list[Node]:
        """Returns the content of a bracket that has been opened, and closes it."""
        self.brackets.append(opening)
        nodes = self.clauses()
        self.expect(CLOSING[opening])
        self.brackets.pop()
        return nodes

    def bracketed(self, opening: str) -> Node:
        nodes = self.inside(opening)
        fences = [opening, CLOSING[opening]]
        if opening == '||':
            fences = ['‖', '‖']
        form = ('form="prefix" stretchy="true"', 'form="postfix" stretchy="true"')
        first, last = (operator(sign, text) for sign, text in zip(fences, form, strict=True))
        return element('mrow', first, *nodes, last)


def spread(factors: list[Node]) -> list[Node]:
    """Returns factors with invisible signs of multiplication, and space around words."""
    nodes = factors[:1]
    for before, factor in itertools.pairwise(factors):
        is_apart = is_word(before) or is_word(factor)
        nodes.append(Node('mspace', '', 'width="0.17em"') if is_apart else operator('\u2062'))
        nodes.append(factor)
    return nodes


def strip_brackets(node: Node) -> Node:
    """Returns the content of round brackets that a line of a fraction replaces."""
    if node.tag == 'mrow' and node.children[0].text == '(':
        return row(node.children[1:-1])
    return node
