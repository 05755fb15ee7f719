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

from modules.choices import ROWS_BY_ALIAS, closest_names


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
    implied: Mapping[str, Mapping[str, str]]
    forms: Mapping[str, str]
    notes: Mapping[str, str]
    absent: Mapping[str, str]
    presets: Mapping[str, Sequence[str]]
    corpora: Mapping[str, str]
    step_batches: Sequence[str]
    models: Sequence[str]
    hub: Sequence[str]


@functools.cache
def foreign_names() -> ForeignNames:
    """Returns the names of other programs; they are read when the first one is looked up."""
    data = tomllib.loads(Path(__file__).with_suffix('.toml').read_text(encoding='utf-8'))
    fields = index_by_name(data['fields'].items())
    return ForeignNames(
        fields={name: path.split() for name, path in fields.items()},
        shares={name: (row['field'], row['whole']) for name, row in data['shares'].items()},
        flags=index_by_name(data['flags'].items()),
        values=index_by_name((row['values'], row['names']) for row in data['values']),
        implied=index_by_name((row['values'], row['names']) for row in data['also']),
        forms=index_by_name(data['forms'].items()),
        notes=index_by_name((row['say'], row['names']) for row in data['notes']),
        absent=index_by_name((row['say'], row['words']) for row in data['absent']),
        presets={config: sizes.split() for config, sizes in data['presets'].items()},
        corpora=data['corpora'],
        step_batches=data['batches_of_a_step'].split(),
        models=data['models'].split(),
        hub=data['hub'].split(),
    )


def index_by_name(rows: Iterable[tuple[Any, str]]) -> dict[str, Any]:
    """Returns {name: meaning} of rows (meaning, 'name name ...')."""
    return {name: meaning for meaning, names in rows for name in names.split()}


def select_preset(text: str) -> str:
    """Returns the config here for a model that is called `text` elsewhere."""
    presets = foreign_names().presets.items()
    return next(
        (name for name, sizes in presets if any(s in normalize_name(text) for s in sizes)),
        'default',
    )


def normalize_name(name: str) -> str:
    """Returns a name in lower-case letters and digits, without what tells spellings apart."""
    return re.sub(r'[^a-z0-9]', '', str(name).lower())


def download_hint(dataset: str, folder: str) -> str:
    """Says how the text of a data set OWNER/NAME is read, from the hub or from a folder."""
    source = shlex.quote(f'--config.data.source=text:{folder}/**/*.parquet')
    return (
        f'--config.data.source=hub:{dataset} is the parquet files of that data set, fetched with the '
        f'extra hub; files of your own are {source} (or .txt, .jsonl)'
    )


def suffixes(flag: str) -> list[str]:
    """Returns ['a.b.c', 'b.c', 'c'] for --a.b.c, in lower case and with underscores."""
    parts = flag.lstrip('-').lower().replace('-', '_').split('.')
    return ['.'.join(parts[at:]) for at in range(len(parts))]


def spell_value(name: str, text: str) -> str:
    """Returns the value of a name as it is written here, unless it is written so already."""
    is_here = text.partition(':')[0] in ('bpe', 'byte', 'hf', 'hub', 'text', 'tfds')
    if is_here or not text:
        return text
    return foreign_names().forms.get(name, '{}').format(text.strip('[]"'))


def replacement_hint(name: str) -> str:
    """Says what there is instead of a name that stands for nothing here; '' for another name."""
    for corpus, place in foreign_names().corpora.items():
        if normalize_name(str(name).rpartition('/')[2]).startswith(corpus):
            return download_hint(name if '/' in name else place, corpus)
    return foreign_names().absent.get(normalize_name(name), '')


def is_multi_run(path: str) -> bool:
    """Whether a path of a config is sweep or tune, or one of them misspelt."""
    return path.startswith(('sweep', 'tune', 'tuning'))


class Translator:
    """Turns flags of other programs into one answer.

    fields: {path: (its types, the names that it may have)} of the config; empty for a program
    without one. flags: the flags of the program at hand.
    """

    def __init__(self, fields: Mapping[str, tuple], flags: Collection[str]):
        self._fields, self._flags = fields, flags
        self._foreign_flags: list[str] = []
        self._values: dict[str, str] = {}  # {flag: its value}
        self._sentences: list[str] = []
        self._shares: list[tuple[str, str, str]] = []
        self._has_step_batch = False

    def is_foreign(self, path: str, text: str) -> bool:
        """Whether --config.PATH=TEXT is out of another program, which has a config too."""
        if path in self._fields:
            _, names = self._fields[path]
            is_no_name = bool(names and text) and text not in names
            return is_no_name and normalize_name(text) in foreign_names().values.get(path, {})
        section = path.split('.')[0]
        if not section or is_multi_run(section):
            return False
        known = foreign_names().fields.keys() | foreign_names().shares.keys()
        is_named = not known.isdisjoint(suffixes(f'config.{path}'))
        return is_named or not any(field.startswith(f'{section}.') for field in self._fields)

    def add(self, argument: str, text: str) -> None:
        """Takes a flag that there is not, such as --learning_rate, and its value, '' for none."""
        names = suffixes(argument if argument.startswith('-') else f'maxtext.{argument}')
        last, there = names[-1], foreign_names()
        own = next((flag for n in names if (flag := there.flags.get(n, n)) in self._flags), '')
        known = next((n for n in names if n in there.fields), '')
        share = next((n for n in names if n in there.shares), '')
        missing = next(filter(replacement_hint, names), '')
        group = next(filter(replacement_hint, names[0].split('.')[:-1]), '')
        paths = [n for n in names if n in self._fields]
        paths = paths or [path for path in there.fields.get(known, ()) if path in self._fields]
        paths = paths or [path for path in self._fields if path.split('.')[1] == last]
        is_missing_value = replacement_hint(spell_value(known, text)) if paths and text else ''
        if known in there.hub and re.fullmatch(r'[\w-]+/[\w.-]+', text):
            is_missing_value = is_missing_value or download_hint(text, text.partition('/')[2])
        self._has_step_batch |= any(n in there.step_batches for n in names)
        if own:
            self._add_program_flag(argument, own, last, text)
        elif self._fields and not {*names}.isdisjoint(there.models):
            self._add_flag(argument, 'config', f'configs/{select_preset(text)}.py')
            self.add_sentence(there.notes.get(last, ''))
        elif share and self._fields:
            self._shares.append((argument, share, text))
        elif len(missing) > len(known):
            self.add_sentence(f'{argument}: {replacement_hint(missing)}.')
        elif group and not known:
            self.add_sentence(f'{argument}: {replacement_hint(group)}.')
        elif is_missing_value:
            self.add_sentence(f'{argument}={text}: {is_missing_value}.')
        elif known and paths:
            self._add_field(argument, paths[0], known, text)
        elif len(paths) == 1:
            self._add_field(argument, paths[0], last, text)
        elif paths:
            maybe = ' or '.join(f'--config.{path}={text or "..."}' for path in paths)
            self.add_sentence(f'{argument} is {maybe}.')
        else:
            self.add_sentence(f'{argument} is no flag here.{self._suggest_flag(last, text)}')

    def _suggest_flag(self, name: str, text: str) -> str:
        """Suggests a flag for a misspelt name."""
        fields = {path.split('.')[1]: path for path in reversed(self._fields)}
        there = foreign_names().fields.items()
        fields |= {n: paths[0] for n, paths in there if paths[0] in self._fields}
        near = ''.join(closest_names(name, [*self._flags, *fields])) if len(name) > 1 else ''
        flag = f'config.{fields[near]}' if near in fields else near
        return f' Did you mean --{flag}{"=" if text else ""}{text}?' if near else ''

    def add_sentence(self, text: str) -> None:
        """Adds a sentence to the answer."""
        if text and text not in self._sentences:
            self._sentences.append(text)

    def _add_flag(self, argument: str, flag: str, text: str) -> None:
        self._foreign_flags.append(argument)
        self._values[flag] = text

    def _add_program_flag(self, argument: str, flag: str, name: str, text: str) -> None:
        """Takes a flag; --workdir joins the folder of all runs and the name of one."""
        before = self._values.get(flag, '')
        if name in ('run_name', 'id'):
            text = f'{before or "runs"}/{text}'
        elif flag == 'workdir':
            text = text.rstrip('/') + before.removeprefix('runs')
        self._add_flag(argument, flag, text)

    def _add_field(self, argument: str, path: str, name: str, text: str) -> None:
        here = self._translate_value(path, name, text)
        others = foreign_names().implied.get(name) or foreign_names().implied.get(
            normalize_name(text), {}
        )
        others = {} if here == 'none' else others  # what is turned off needs nothing
        also = {f'config.{other}': value for other, value in others.items()}
        if argument == f'--config.{path}':
            self.add_sentence(f'{argument}={text} is no value here.')
            self._values[f'config.{path}'] = here
        else:
            self._add_flag(argument, f'config.{path}', here or '...')
        if path.startswith('mesh.') and here == '-1':  # one axis alone takes what the others leave
            also = {'config.mesh.data': '1', f'config.{path}': '-1'}
        self._values |= also
        notes = (foreign_names().notes.get(n, '') for n in (*suffixes(argument), name))
        self.add_sentence(next(filter(None, notes), ''))

    def _translate_value(self, path: str, name: str, text: str) -> str:
        """Returns the value as the field spells it; '' where it is none that the field takes."""
        types, names = self._fields[path]
        values = foreign_names().values
        tables = [values[n] for n in (name, path) if normalize_name(text) in values.get(n, {})]
        text = tables[0][normalize_name(text)] if tables else spell_value(name, text)
        if names and text and text not in names:
            usual = ROWS_BY_ALIAS.get(normalize_name(text))
            if usual in names:
                return usual
            near = ''.join(closest_names(text, names))
            self.add_sentence(f'{path} has no {text}; {near} is nearest.' if near else '')
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

    def _resolve_shares(self) -> None:
        """Turns shares into values where what they are shares of is given too, else into words."""
        for given, name, text in self._shares:
            path, of = foreign_names().shares[name]
            try:
                share, whole = float(text), float(self._values.get(f'config.{of}', 'nan'))
            except ValueError:
                share = whole = math.nan
            value = share / whole if path == 'optim.final_lr_fraction' and whole else share * whole
            if path == 'optim.warmup_steps' and (share > 1 or not share):
                value = share  # steps
            if not math.isfinite(value):
                self.add_sentence(f'{given}: {replacement_hint(name)}.')
            elif path == 'optim.warmup_steps':
                self._add_flag(given, f'config.{path}', str(round(value)))
            else:
                self._add_flag(given, f'config.{path}', f'{value:.6g}')
        self._shares.clear()

    def answer(self) -> str:
        """Returns one line for all flags that were added; '' for none."""
        self._resolve_shares()
        sizes = [self._values.get(f'config.{path}', '') for path in BATCHES]
        if all(map(str.isdecimal, sizes)) and not self._has_step_batch:
            self._values[f'config.{BATCHES[0]}'] = str(int(sizes[0]) * int(sizes[1]))
        flags = [f'--{flag}' + (f'={text}' if text else '') for flag, text in self._values.items()]
        said = 'is no flag' if len(self._foreign_flags) == 1 else 'are no flags'
        first = f'{", ".join(self._foreign_flags)} {said} here.' if self._foreign_flags else ''
        last = f'Write {shlex.join(flags)}' if flags else ''
        return ' '.join(filter(None, [first, *self._sentences, last]))


BATCHES = ('data.batch_size', 'train.microbatches')


def parse_positional(argument: str) -> tuple[str, str]:
    """Returns (name, value) of NAME=VALUE, which MaxText takes without --, else ('', '')."""
    match = re.fullmatch(r'([A-Za-z]\w*)=(.*)', argument, re.DOTALL)
    return (match[1], match[2]) if match else ('', '')


def config_file_hint(argument: str) -> str:
    """Says how a config is given, for a path that stands alone; '' for what is no such path."""
    if Path(argument).suffix not in ('.py', '.toml', '.yml', '.yaml', '.json'):
        return ''
    file = argument if argument.endswith('.py') and Path(argument).is_file() else ''
    return (
        f'{argument}: a config is given as --config={file or "configs/default.py"}, a Python file.'
    )
