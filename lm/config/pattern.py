"""Patterns of blocks over depth: the syntax of model.pattern.

    pattern = ITEM+ITEM+...              repeated over the depth
            | ITEM+...|ITEM+...          those behind the bar are the last blocks, once
            | ITEM+...|ITEM+...|ITEM+... those before two bars are the first blocks, once
    ITEM    = ATTENTION:OPTION=VALUE,.../MLP:OPTION=VALUE,...*COUNT

Only ATTENTION is needed. Its options are those of the attention and of its position,
`position=NAME`, `placement=NAME` and `matmul=NAME`. Behind two bars there may be nothing. All that
an item leaves out follows the fields of the config.
"""

import dataclasses
import itertools
import re
from collections.abc import Mapping, Sequence
from typing import Any

from lm.config.choice import AUTO
from lm.config.suggestions import sweep_flag
from modules.attention import ATTENTIONS
from modules.choices import choose
from modules.kernels.matmul import MATMUL_KERNELS
from modules.mlp import MLPS
from modules.options import check_inline_options, declared_options, parse_part
from modules.placements import PLACEMENTS
from modules.positions import POSITIONS

PATTERN, POSITION, PLACEMENT, MATMUL = 'model.pattern', 'position', 'placement', 'matmul'
#: Fields whose rows an item chooses, and which the recipe of its blocks has in place of a pattern.
ITEM_FIELDS = ('model.attention', 'model.mlp', 'model.position')
#: An item has no options of a matmul, so that it cannot choose one with options.
ITEM_MATMULS = {
    AUTO: None,
    **{name: row for name, row in MATMUL_KERNELS.items() if not declared_options(row)},
}
MAX_COUNT = 10_000
MAX_PARTS = 3  # the first blocks, the period, and the last blocks
FORM = (
    'Items are ATTENTION:OPTION=VALUE,.../MLP:OPTION=VALUE,...*COUNT, joined by +; the last blocks '
    'may follow a bar, and with two bars the first blocks come before the first bar. For example: '
    f'{PATTERN}=linear/moe*3+softmax:window=1024|softmax'
)


@dataclasses.dataclass(frozen=True)
class Item:
    """Blocks of the same kind in a pattern.

    Attributes:
      text: the item, without its count.
      attention: its attention.
      options: the options behind the attention, without position, placement and matmul.
      position: its position; None: that of the model.
      placement: the placement of its norms; None: that of the model.
      matmul: the kernel of its products with weights; None: that of the model.
      mlp: its MLP; None: that of the model.
      mlp_options: the options behind the MLP.
    """

    text: str
    attention: str
    options: Mapping[str, Any]
    position: str | None
    placement: str | None
    matmul: str | None
    mlp: str | None
    mlp_options: Mapping[str, Any]

    def changes(self, model: Any) -> dict[str, Any]:
        """Returns {path: value} that make a config without pattern have blocks of this kind.

        An option that is None gets its published default, whatever the section has.

        Args:
          model: the section `model`, for what the item leaves out.

        Raises:
          ValueError: for an option that neither attention nor position have, or a wrong value.
        """
        position = self.position or model.position
        attention_row, position_row = ATTENTIONS[self.attention], POSITIONS.get(position)
        rotates = {} if position_row is None else declared_options(position_row)
        of_position = {n: v for n, v in self.options.items() if n in rotates}
        of_attention = {n: v for n, v in self.options.items() if n not in rotates}
        for name, value in of_attention.items():
            if name not in declared_options(attention_row) and any(
                name in declared_options(row) for row in POSITIONS.values()
            ):
                readers = [n for n, row in POSITIONS.items() if name in declared_options(row)]
                raise ValueError(
                    f'{PATTERN}: the item {self.text} sets {name}={value}, an option of position='
                    f'{"|".join(readers)}, but its position is {position}. Leave it out.'
                )
        changes = {PATTERN: None, 'model.attention': self.attention, 'model.position': position}
        if self.placement is not None:
            changes['model.placement'] = self.placement
        if self.matmul is not None:
            changes['kernels.matmul'] = self.matmul
        changes |= _check_options('attention', attention_row, self.attention, of_attention)
        changes |= _check_options('attention', position_row, position, of_position)
        if self.mlp is not None:
            changes['model.mlp'] = self.mlp
            changes |= _check_options('mlp', MLPS[self.mlp], self.mlp, self.mlp_options)
        return changes


def _check_options(section: str, row: Any, name: str, options: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the options by path; `row` may be None if there are none."""
    declared = declared_options(row) if options else {}
    values = {n: v for n, v in options.items() if v is not None or n not in declared}
    checked = check_inline_options(PATTERN, row, name, values)
    return {f'{section}.{option}': checked.get(option) for option in options}


@dataclasses.dataclass(frozen=True)
class BlockPattern:
    """The items that are repeated over the depth, and the last and the first ones.

    Each stands for one block.
    """

    period: tuple[Item, ...]
    last: tuple[Item, ...] = ()
    first: tuple[Item, ...] = ()

    @property
    def items(self) -> tuple[Item, ...]:
        """All items, in the order of the text."""
        return self.first + self.period + self.last


def parse_pattern(text: str) -> BlockPattern:
    """Parses model.pattern; spaces do not matter.

    Raises ValueError for another form, and for unknown names, with the nearest.
    """
    parts = ''.join(text.split()).split('|')
    if len(parts) > MAX_PARTS:
        raise ValueError(f'{PATTERN} may have two bars; got {text!r}. {FORM}.')
    if '(' in text or '[' in text:
        raise ValueError(
            f'{PATTERN} is one text; got {text!r}. {FORM}. To try several patterns, use a sweep: '
            f'{sweep_flag({PATTERN: ("linear*3+softmax", "linear+softmax")})}'
        )
    if len(parts) == MAX_PARTS and not parts[-1]:
        parts.pop()
        first, period, last = *map(_parse_items, parts), ()
    elif len(parts) == MAX_PARTS:
        first, period, last = map(_parse_items, parts)
    else:
        first, period, last = (), *map(_parse_items, parts), *[()] * (len(parts) < 2)
    return BlockPattern(period, last, first)


def _parse_items(text: str) -> tuple[Item, ...]:
    """Parses items joined by +."""
    return tuple(entry for part in text.split('+') for entry in _parse_item(part))


def _parse_item(text: str) -> list[Item]:
    """Parses an item, once for each of its blocks."""
    match = re.fullmatch(r'([^*]+)(?:\*([0-9]+))?', text)
    count = int(match[2] or 1) if match else 0
    if match is None or not 1 <= count <= MAX_COUNT:
        raise ValueError(
            f'{PATTERN}: {text!r} is no item. A count is a number from 1 to {MAX_COUNT} behind the '
            f'item. {FORM}.'
        )
    attention_text, slash, mlp_text = match[1].partition('/')
    if '/' in mlp_text:
        raise ValueError(
            f'{PATTERN}: {text!r} has two slashes. A position is written behind the attention, as '
            f'in softmax:position=none/dense. {FORM}.'
        )
    attention, options = _parse_part(attention_text, ATTENTIONS, 'an attention')
    mlp, mlp_options = _parse_part(mlp_text, MLPS, 'an MLP') if slash else (None, {})
    position, placement, matmul = (options.pop(n, None) for n in (POSITION, PLACEMENT, MATMUL))
    if position is not None:
        choose(POSITIONS, position, f'a position in {PATTERN}')
    if placement is not None:
        choose(PLACEMENTS, placement, f'a placement in {PATTERN}')
    if matmul is not None:
        choose(ITEM_MATMULS, matmul, f'a matmul in {PATTERN}')
    placed = attention, options, position, placement, matmul
    return [Item(match[1], *placed, mlp, mlp_options)] * count


def _parse_part(text: str, table: Mapping[str, Any], kind: str) -> tuple[str, dict[str, Any]]:
    """Parses 'softmax:window=3'; `kind` names the table for the error."""
    name, options = parse_part(PATTERN, text)
    choose(table, name, f'{kind} in {PATTERN}')
    return name, options


def tile[T](
    period: Sequence[T], last: Sequence[T], length: int, n_first: int = 0
) -> tuple[tuple[T, ...], int, tuple[T, ...]]:
    """Repeats a period over a length, with the last entries replaced.

    Args:
      period: the entries that are repeated.
      last: the last entries.
      length: the number of all entries.
      n_first: the number of first entries, which are not repeated and not returned.

    Returns:
      (the shortest period with the same repetition, how often it fits as a whole, the rest). The
      rest is a prefix of the period, except for the last entries; it is shorter than the period
      plus `last`.

    Raises:
      ValueError: if a period and the last entries do not fit.
    """
    shortest = next(
        n
        for n in range(1, len(period) + 1)
        if len(period) % n == 0 and all(e == period[i % n] for i, e in enumerate(period))
    )
    period, needed = tuple(period[:shortest]), n_first + shortest + len(last)
    if length < needed:
        raise ValueError(
            f'{PATTERN} has {shortest} blocks'
            + f' and {n_first} first ones' * bool(n_first)
            + f' and {len(last)} last ones' * bool(last)
            + f', but model.n_layers={length}. Set model.n_layers to at least {needed}, or shorten '
            'the pattern.'
        )
    length -= n_first
    entries = [period[i % shortest] for i in range(length - len(last))] + list(last)
    count = next(
        n
        for n in range(length // shortest, 0, -1)
        if all(e == period[i % shortest] for i, e in enumerate(entries[: n * shortest]))
    )
    return period, count, tuple(entries[count * shortest :])


def format_pattern(texts: Sequence[str]) -> str:
    """Returns the shortest pattern for a sequence of blocks, each given as an item.

    The first blocks that are no part of a repetition come before two bars.
    """
    n_blocks = len(texts)

    def find_period(first: int) -> int:
        repeated = texts[first:]
        return next(
            n
            for n in range(1, len(repeated) + 1)
            if all(text == repeated[i % n] for i, text in enumerate(repeated))
        )

    first = min(range(n_blocks), key=lambda first: (first + find_period(first), first))
    period = texts[first : first + find_period(first)]
    if not first:
        return _join_items(period)
    return f'{_join_items(texts[:first])}|{_join_items(period)}|'


def _join_items(texts: Sequence[str]) -> str:
    """Returns items joined by +, with equal neighbours counted."""
    groups = [(text, len([*group])) for text, group in itertools.groupby(texts)]
    return '+'.join(text if n == 1 else f'{text}*{n}' for text, n in groups)
