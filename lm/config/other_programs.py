"""Names that nanoGPT, torchtitan, Hugging Face, MaxText, Levanter and NanoDO have for what is here,
and for what is not. They are refused; the answer has the flags that work, with the values given.
"""

import functools
import math
import re
import shlex
import tomllib
from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from modules.choices import USUAL_NAMES, closest


class ForeignNames(NamedTuple):
    """The content of other_programs.toml, by the names of other programs.

    Attributes:
      fields: {name: fields here}.
      shares: {name: (field here, field whose value it is a share of)}.
      flags: {name: flag of a program here}.
      values: {name, or field: {word of the value there: value here}}.
      also: {name, or word of a value: {field that is set as well: value}}.
      forms: {name: form of the value here}.
      notes: {name: sentence}.
      absent: {word: what is said of it}.
      presets: {name of a config: words of sizes}.
      corpora: {word: OWNER/NAME of a data set}.
      batches_of_a_step: names of batches that microbatches are parts of.
      models: names whose values name models.
      hub: names whose values are OWNER/NAME of data sets.
    """

    fields: Mapping[str, Sequence[str]]
    shares: Mapping[str, tuple[str, str]]
    flags: Mapping[str, str]
    values: Mapping[str, Mapping[str, str]]
    also: Mapping[str, Mapping[str, str]]
    forms: Mapping[str, str]
    notes: Mapping[str, str]
    absent: Mapping[str, str]
    presets: Mapping[str, Sequence[str]]
    corpora: Mapping[str, str]
    batches_of_a_step: Sequence[str]
    models: Sequence[str]
    hub: Sequence[str]


@functools.cache
def foreign() -> ForeignNames:
    """Returns the names of other programs; they are read when the first one is looked up."""
    data = tomllib.loads(Path(__file__).with_suffix('.toml').read_text(encoding='utf-8'))
    fields = by_name(data['fields'].items())
    return ForeignNames(
        fields={name: path.split() for name, path in fields.items()},
        shares={name: (row['field'], row['whole']) for name, row in data['shares'].items()},
        flags=by_name(data['flags'].items()),
        values=by_name((row['values'], row['names']) for row in data['values']),
        also=by_name((row['values'], row['names']) for row in data['also']),
        forms=by_name(data['forms'].items()),
        notes=by_name((row['say'], row['names']) for row in data['notes']),
        absent=by_name((row['say'], row['words']) for row in data['absent']),
        presets={config: sizes.split() for config, sizes in data['presets'].items()},
        corpora=data['corpora'],
        batches_of_a_step=data['batches_of_a_step'].split(),
        models=data['models'].split(),
        hub=data['hub'].split(),
    )


def by_name(rows: Iterable[tuple[Any, str]]) -> dict[str, Any]:
    """Returns {name: meaning} of rows (meaning, 'name name ...')."""
    return {name: meaning for meaning, names in rows for name in names.split()}


def preset(text: str) -> str:
    """Returns the config here for a model that is called `text` elsewhere."""
    presets = foreign().presets.items()
    return next((name for name, sizes in presets if any(s in word(text) for s in sizes)), 'default')


def word(name: str) -> str:
    """Returns a name in lower-case letters and digits, without what tells spellings apart."""
    return re.sub(r'[^a-z0-9]', '', str(name).lower())


def to_download(place: str, folder: str) -> str:
    """Says how the text of a data set OWNER/NAME is read, from the hub or from a folder."""
    source = shlex.quote(f'--config.data.source=text:{folder}/**/*.parquet')
    return (
        f'--config.data.source=hub:{place} is the parquet files of that data set, fetched with the '
        f'extra hub; files of your own are {source} (or .txt, .jsonl)'
    )


def suffixes(flag: str) -> list[str]:
    """Returns ['a.b.c', 'b.c', 'c'] for --a.b.c, in lower case and with underscores."""
    parts = flag.lstrip('-').lower().replace('-', '_').split('.')
    return ['.'.join(parts[at:]) for at in range(len(parts))]


def spelt(name: str, text: str) -> str:
    """Returns the value of a name as it is written here, unless it is written so already."""
    is_here = text.partition(':')[0] in ('bpe', 'byte', 'hf', 'hub', 'text', 'tfds')
    if is_here or not text:
        return text
    return foreign().forms.get(name, '{}').format(text.strip('[]"'))


def absent(name: str) -> str:
    """Says what there is instead of a name that stands for nothing here; '' for another name."""
    for corpus, place in foreign().corpora.items():
        if word(str(name).rpartition('/')[2]).startswith(corpus):
            return to_download(name if '/' in name else place, corpus)
    return foreign().absent.get(word(name), '')


def is_of_many_runs(path: str) -> bool:
    """Whether a path of a config is sweep or tune, or one of them misspelt."""
    return path.startswith(('sweep', 'tune', 'tuning'))


class Translator:
    """Turns flags of other programs into one answer.

    fields: {path: (its types, the names that it may have)} of the config; empty for a program
    without one. flags: the flags of the program at hand.
    """

    def __init__(self, fields: Mapping[str, tuple], flags: Collection[str]):
        self._fields, self._flags = fields, flags
        self._foreign: list[str] = []
        self._here: dict[str, str] = {}  # {flag: its value}
        self._words: list[str] = []
        self._shares: list[tuple[str, str, str]] = []
        self._is_of_a_step = False

    def is_foreign(self, path: str, text: str) -> bool:
        """Whether --config.PATH=TEXT is out of another program, which has a config too."""
        if path in self._fields:
            _, names = self._fields[path]
            is_no_name = bool(names and text) and text not in names
            return is_no_name and word(text) in foreign().values.get(path, {})
        section = path.split('.')[0]
        if not section or is_of_many_runs(section):
            return False
        known = foreign().fields.keys() | foreign().shares.keys()
        is_named = not known.isdisjoint(suffixes(f'config.{path}'))
        return is_named or not any(field.startswith(f'{section}.') for field in self._fields)

    def add(self, given: str, text: str) -> None:
        """Takes a flag that there is not, such as --learning_rate, and its value, '' for none."""
        names = suffixes(given if given.startswith('-') else f'maxtext.{given}')
        last, there = names[-1], foreign()
        own = next((flag for n in names if (flag := there.flags.get(n, n)) in self._flags), '')
        known = next((n for n in names if n in there.fields), '')
        share = next((n for n in names if n in there.shares), '')
        missing = next(filter(absent, names), '')
        group = next(filter(absent, names[0].split('.')[:-1]), '')
        paths = [n for n in names if n in self._fields]
        paths = paths or [path for path in there.fields.get(known, ()) if path in self._fields]
        paths = paths or [path for path in self._fields if path.split('.')[1] == last]
        is_missing_value = absent(spelt(known, text)) if paths and text else ''
        if known in there.hub and re.fullmatch(r'[\w-]+/[\w.-]+', text):
            is_missing_value = is_missing_value or to_download(text, text.partition('/')[2])
        self._is_of_a_step |= any(n in there.batches_of_a_step for n in names)
        if own:
            self._add_own(given, own, last, text)
        elif self._fields and not {*names}.isdisjoint(there.models):
            self._add(given, 'config', f'configs/{preset(text)}.py')
            self.say(there.notes.get(last, ''))
        elif share and self._fields:
            self._shares.append((given, share, text))
        elif len(missing) > len(known):
            self.say(f'{given}: {absent(missing)}.')
        elif group and not known:
            self.say(f'{given}: {absent(group)}.')
        elif is_missing_value:
            self.say(f'{given}={text}: {is_missing_value}.')
        elif known and paths:
            self._add_field(given, paths[0], known, text)
        elif len(paths) == 1:
            self._add_field(given, paths[0], last, text)
        elif paths:
            maybe = ' or '.join(f'--config.{path}={text or "..."}' for path in paths)
            self.say(f'{given} is {maybe}.')
        else:
            self.say(f'{given} is no flag here.{self._nearest(last, text)}')

    def _nearest(self, name: str, text: str) -> str:
        """Suggests a flag for a misspelt name."""
        fields = {path.split('.')[1]: path for path in reversed(self._fields)}
        there = foreign().fields.items()
        fields |= {n: paths[0] for n, paths in there if paths[0] in self._fields}
        near = ''.join(closest(name, [*self._flags, *fields])) if len(name) > 1 else ''
        flag = f'config.{fields[near]}' if near in fields else near
        return f' Did you mean --{flag}{"=" if text else ""}{text}?' if near else ''

    def say(self, text: str) -> None:
        """Adds a sentence to the answer."""
        if text and text not in self._words:
            self._words.append(text)

    def _add(self, given: str, flag: str, text: str) -> None:
        self._foreign.append(given)
        self._here[flag] = text

    def _add_own(self, given: str, flag: str, name: str, text: str) -> None:
        """Takes a flag; --workdir joins the folder of all runs and the name of one."""
        before = self._here.get(flag, '')
        if name in ('run_name', 'id'):
            text = f'{before or "runs"}/{text}'
        elif flag == 'workdir':
            text = text.rstrip('/') + before.removeprefix('runs')
        self._add(given, flag, text)

    def _add_field(self, given: str, path: str, name: str, text: str) -> None:
        here = self._carried(path, name, text)
        others = foreign().also.get(name) or foreign().also.get(word(text), {})
        others = {} if here == 'none' else others  # what is turned off needs nothing
        also = {f'config.{other}': value for other, value in others.items()}
        if given == f'--config.{path}':
            self.say(f'{given}={text} is no value here.')
            self._here[f'config.{path}'] = here
        else:
            self._add(given, f'config.{path}', here or '...')
        if path.startswith('mesh.') and here == '-1':  # one axis alone takes what the others leave
            also = {'config.mesh.data': '1', f'config.{path}': '-1'}
        self._here |= also
        notes = (foreign().notes.get(n, '') for n in (*suffixes(given), name))
        self.say(next(filter(None, notes), ''))

    def _carried(self, path: str, name: str, text: str) -> str:
        """Returns the value as the field spells it; '' where it is none that the field takes."""
        types, names = self._fields[path]
        values = foreign().values
        tables = [values[n] for n in (name, path) if word(text) in values.get(n, {})]
        text = tables[0][word(text)] if tables else spelt(name, text)
        if names and text and text not in names:
            usual = USUAL_NAMES.get(word(text))
            if usual in names:
                return usual
            near = ''.join(closest(text, names))
            self.say(f'{path} has no {text}; {near} is nearest.' if near else '')
            return near
        if bool in types:
            return text or 'True'
        if int in types or float in types:
            try:
                number = float(text)
            except ValueError:
                return ''
            return str(int(number)) if int in types and number.is_integer() else text
        return text

    def _settle_shares(self) -> None:
        """Turns shares into values where what they are shares of is given too, else into words."""
        for given, name, text in self._shares:
            path, of = foreign().shares[name]
            try:
                share, whole = float(text), float(self._here.get(f'config.{of}', 'nan'))
            except ValueError:
                share = whole = math.nan
            value = share / whole if path == 'optim.final_lr_fraction' and whole else share * whole
            if path == 'optim.warmup_steps' and (share > 1 or not share):
                value = share  # steps
            if not math.isfinite(value):
                self.say(f'{given}: {absent(name)}.')
            elif path == 'optim.warmup_steps':
                self._add(given, f'config.{path}', str(round(value)))
            else:
                self._add(given, f'config.{path}', f'{value:.6g}')
        self._shares.clear()

    def answer(self) -> str:
        """Returns one line for all flags that were added; '' for none."""
        self._settle_shares()
        sizes = [self._here.get(f'config.{path}', '') for path in BATCHES]
        if all(map(str.isdecimal, sizes)) and not self._is_of_a_step:
            self._here[f'config.{BATCHES[0]}'] = str(int(sizes[0]) * int(sizes[1]))
        flags = [f'--{flag}' + (f'={text}' if text else '') for flag, text in self._here.items()]
        said = 'is no flag' if len(self._foreign) == 1 else 'are no flags'
        first = f'{", ".join(self._foreign)} {said} here.' if self._foreign else ''
        last = f'Write {shlex.join(flags)}' if flags else ''
        return ' '.join(filter(None, [first, *self._words, last]))


BATCHES = ('data.batch_size', 'train.microbatches')


def positional(argument: str) -> tuple[str, str]:
    """Returns (name, value) of NAME=VALUE, which MaxText takes without --, else ('', '')."""
    match = re.fullmatch(r'([A-Za-z]\w*)=(.*)', argument, re.DOTALL)
    return (match[1], match[2]) if match else ('', '')


def file_advice(argument: str) -> str:
    """Says how a config is given, for a path that stands alone; '' for what is no such path."""
    if Path(argument).suffix not in ('.py', '.toml', '.yml', '.yaml', '.json'):
        return ''
    file = argument if argument.endswith('.py') and Path(argument).is_file() else ''
    return (
        f'{argument}: a config is given as --config={file or "configs/default.py"}, a Python file.'
    )
