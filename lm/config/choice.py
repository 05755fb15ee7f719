"""Config fields that name rows of tables of parts."""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any

from lm.config.suggestions import parse_values, sweep_flag
from modules.choices import choose
from modules.options import check_inline_options, parse_part

AUTO = 'auto'


@dataclasses.dataclass(frozen=True)
class Choice:
    """A field that names a row of `table`; the options of the row are fields of `section`.

    Attributes:
      table: {name: row}.
      section: the config section of the row's options; '' if it has none.
      inline: options for this use alone may follow the name, as in 'rmsnorm:scale=False'.
      several: the value may join several rows by '+'.
      shares: each row has a share, as in 'causal:0.5+infill:0.5'.
      auto: the value may be 'auto'.
      sows: the rows name auxiliary losses, whose options are in section `loss`.
    """

    table: Mapping[str, Any]
    section: str = ''
    inline: bool = False
    several: bool = False
    shares: bool = False
    auto: bool = False
    sows: bool = False

    def parse_rows(self, path: str, value: str) -> list[tuple[str, Any, dict[str, Any]]]:
        """Returns (name, row, inline options) for each row that `value` names.

        Raises ValueError for an unknown name or option.
        """
        parsed = []
        if self.shares:
            value = '+'.join(parse_shares(path, value))
        for text in value.split('+') if self.several else [value]:
            name, inline_options = parse_part(path, text) if self.inline else (text, {})
            rows = {**({AUTO: None} if self.auto else {}), **self.table}
            if name not in rows:
                self._refuse_list(path, value, name, rows)
            part = choose(rows, name, path)
            parsed.append(
                (
                    name,
                    part,
                    check_inline_options(path, part, name, inline_options)
                    if inline_options
                    else {},
                )
            )
        names = [name for name, *_ in parsed]
        if len(set(names)) < len(names):
            raise ValueError(f'{path}={value} names the same part twice')
        if len(names) > 1 and {'none', AUTO} & set(names):
            raise ValueError(f'{path}={value}: none and auto cannot be joined with other names')
        return parsed

    def _refuse_list(self, path: str, value: str, text: str, table_rows: Mapping[str, Any]) -> None:
        """Raises ValueError for several names with commas between them."""
        names = parse_values(text.strip('()[]') if self.several else text)
        if self.several and len(names) > 1:
            raise ValueError(join_hint(path, names))
        if set(names) <= table_rows.keys() and len(names) > 1:
            raise ValueError(
                f'{path} must be one name; got {value!r}. To try several, use a sweep: '
                f'{sweep_flag({path: names})}'
            )


def parse_shares(path: str, value: str) -> dict[str, float]:
    """Returns {'causal': 0.5, 'infill': 0.5} for 'causal:0.5+infill:0.5', {'causal': 1.0} for
    'causal'.

    Raises ValueError unless all shares are positive numbers that sum to 1.
    """
    if '+' not in value and ':' not in value:
        return {value: 1.0}
    example = f'For example: {path}=causal:0.5+infill:0.5.'
    shares: dict[str, float] = {}
    for text in value.split('+'):
        name, _, share = text.partition(':')
        if name in shares:
            raise ValueError(f'{path}={value} names the same part twice. {example}')
        try:
            shares[name] = float(share)
        except ValueError:
            raise ValueError(
                f'{path}: each name in a mixture needs a share, which is a number after a colon; '
                f'got {text!r} in {value!r}. {example}'
            ) from None
    total = sum(shares.values())
    if not all(share > 0 for share in shares.values()) or not math.isclose(total, 1, abs_tol=1e-6):
        raise ValueError(
            f'the shares of {path} must be above 0 and sum to 1; got {value!r}, which sums to '
            f'{total:g}. {example}'
        )
    return shares


def join_hint(path: str, names: Sequence[Any]) -> str:
    """Returns the spelling of several rows, for an error about a list."""
    joined = '+'.join(map(str, names))
    return (
        f'{path}: join several names with + into one text, the nearest to the model first: '
        f'{joined!r}. To compare them in separate runs, use a sweep: '
        f'{sweep_flag({path: tuple(names)})}'
    )
