"""Names that nanoGPT, nanochat, torchtitan, Hugging Face, MaxText, Levanter, NanoDO and LitGPT use.

Flags with these names are refused; the answer lists the flags that work here, with the given
values.
"""

import difflib
import functools
import math
import os
import re
import shlex
import tomllib
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from modules.choices import ROWS_BY_ALIAS, closest_names


class ForeignNames(NamedTuple):
    """The content of other_programs.toml, keyed by the names of other programs.

    Attributes:
      fields: {name: fields here}.
      shares: {name: (field here, field that the value is a share of)}.
      flags: {name: flag of a program here}.
      values: {name, or field: {word of the value there: value here}}.
      implied: {name, or word of a value: {field that is set as well: value}}.
      forms: {name: form of the value here}.
      notes: {name: sentence}.
      absent: {word: explanation}.
      elsewhere: {field here: ((pattern of values that it cannot read, explanation), ...)}.
      presets: {name of a config: words of sizes}.
      corpora: {word: OWNER/NAME of a data set}.
      step_batches: names of batch sizes that include gradient accumulation.
      models: names with a model as value.
      hub: names with OWNER/NAME of a data set as value.
    """

    fields: Mapping[str, Sequence[str]]
    shares: Mapping[str, tuple[str, str]]
    flags: Mapping[str, str]
    values: Mapping[str, Mapping[str, str]]
    implied: Mapping[str, Mapping[str, str]]
    forms: Mapping[str, str]
    notes: Mapping[str, str]
    absent: Mapping[str, str]
    elsewhere: Mapping[str, Sequence[tuple[str, str]]]
    presets: Mapping[str, Sequence[str]]
    corpora: Mapping[str, str]
    step_batches: Sequence[str]
    models: Sequence[str]
    hub: Sequence[str]


@functools.cache
def foreign_names() -> ForeignNames:
    """Returns the names of other programs, read from the file at the first call."""
    table = tomllib.loads(Path(__file__).with_suffix('.toml').read_text(encoding='utf-8'))
    fields = index_by_name(table['fields'].items())
    elsewhere: dict[str, list[tuple[str, str]]] = {}
    for row in table['elsewhere']:
        for field in row['field'].split():
            elsewhere.setdefault(field, []).append((row['pattern'], row['say']))
    return ForeignNames(
        fields={name: path.split() for name, path in fields.items()},
        shares={name: (row['field'], row['whole']) for name, row in table['shares'].items()},
        flags=index_by_name(table['flags'].items()),
        values=index_by_name((row['values'], row['names']) for row in table['values']),
        implied=index_by_name((row['values'], row['names']) for row in table['also']),
        forms=index_by_name(table['forms'].items()),
        notes=index_by_name((row['say'], row['names']) for row in table['notes']),
        absent=index_by_name((row['say'], row['words']) for row in table['absent']),
        elsewhere=elsewhere,
        presets={config: sizes.split() for config, sizes in table['presets'].items()},
        corpora=table['corpora'],
        step_batches=table['batches_of_a_step'].split(),
        models=table['models'].split(),
        hub=table['hub'].split(),
    )


def index_by_name(rows: Iterable[tuple[Any, str]]) -> dict[str, Any]:
    """Returns {name: meaning} for rows (meaning, 'name name ...')."""
    return {name: meaning for meaning, names in rows for name in names.split()}


def select_preset(text: str) -> str:
    """Returns the config here for a model that is called `text` elsewhere."""
    presets = foreign_names().presets.items()
    return next(
        (name for name, sizes in presets if any(s in normalize_name(text) for s in sizes)),
        'default',
    )


def normalize_name(name: str) -> str:
    """Returns a name in lower-case letters and digits, without separators."""
    return re.sub(r'[^a-z0-9]', '', str(name).lower())


def download_hint(dataset: str, folder: str) -> str:
    """Returns the flags that read a data set OWNER/NAME, from the hub or from a folder."""
    files_flag = shlex.quote(f'--config.data.source=text:{folder}/**/*.parquet')
    return (
        f'--config.data.source=hub:{dataset} is the parquet files of that data set, fetched with '
        f'the extra hub; files of your own are {files_flag} (or .txt, .jsonl)'
    )


def elsewhere_hint(path: str, text: str) -> str:
    """Explains how a field gets a value that it cannot read where it is, such as a model of the
    Hub; '' for any other value.
    """
    text = text.strip('[]"\'')
    rows = foreign_names().elsewhere.get(path, ())
    matches = (say for pattern, say in rows if re.fullmatch(pattern, text, re.IGNORECASE))
    return '' if os.path.exists(text) else next(matches, '')


def suffixes(flag: str) -> list[str]:
    """Returns ['a.b.c', 'b.c', 'c'] for --a.b.c, in lower case and with underscores."""
    parts = flag.lstrip('-').lower().replace('-', '_').split('.')
    return ['.'.join(parts[at:]) for at in range(len(parts))]


def spell_value(name: str, text: str) -> str:
    """Returns the value of a flag in the spelling of this program."""
    is_native = text.partition(':')[0] in ('bpe', 'byte', 'hf', 'hub', 'text', 'tfds')
    if is_native or not text:
        return text
    return foreign_names().forms.get(name, '{}').format(text.strip('[]"'))


def replacement_hint(name: str) -> str:
    """Explains the alternative to a name without counterpart here; '' for any other name."""
    for corpus, dataset in foreign_names().corpora.items():
        if normalize_name(str(name).rpartition('/')[2]).startswith(corpus):
            return download_hint(name if is_hub_name(name) else dataset, corpus)
    return foreign_names().absent.get(normalize_name(name), '')


def is_hub_name(text: str) -> bool:
    """Returns whether a text is OWNER/NAME, as the Hugging Face Hub has it."""
    return bool(re.fullmatch(r'[\w-]+/[\w.-]+', str(text)))


def is_near(name: str, candidate: str, is_part: bool = False) -> bool:
    """Returns whether each word of a name is one of `candidate`, or a misspelling of it.

    Args:
      name: the name that came.
      candidate: the name that may be meant.
      is_part: whether `candidate` may have further words, if the names share a word as it is.
    """
    words, candidate_words = (
        [w.removesuffix('s') for w in n.split('_')] for n in (name, candidate)
    )
    if is_part:
        shares_word = bool({*words} & {*candidate_words} - {''})
        has_words = all(any(_is_misspelt(word, w) for w in candidate_words) for word in words)
        return normalize_name(name) == normalize_name(candidate) or (shares_word and has_words)
    return len(words) == len(candidate_words) and all(map(_is_misspelt, words, candidate_words))


def _is_misspelt(word: str, candidate: str) -> bool:
    """Returns whether two words are alike: nrom and norm (0.75), or l and lr (0.67)."""
    ratio = difflib.SequenceMatcher(None, word, candidate).ratio()
    is_prefix = word.startswith(candidate) or candidate.startswith(word)
    return ratio >= (0.65 if is_prefix else 0.75)


def is_multi_run(path: str) -> bool:
    """Returns whether a config path is sweep or tune, or a misspelling of one."""
    return path.startswith(('sweep', 'tune', 'tuning'))


class Translator:
    """Collects flags of other programs, and answers with the flags of this one."""

    def __init__(
        self,
        fields: dict[str, tuple],
        flags: Collection[str],
        explain_refusal: Callable[[str, str], str],
    ):
        """Args:
        fields: {path: (its types, the names that it may have)} of the config; empty for a program
          without config.
        flags: the flags of this program.
        explain_refusal: returns why a field does not take the text of a value, or ''.
        """
        self._fields, self._flags, self._explain_refusal = fields, flags, explain_refusal
        self._foreign_flags: list[str] = []
        self._values: dict[str, str] = {}  # {flag: its value}
        self._sentences: list[str] = []
        self._explanations: dict[str, list[str]] = {}  # {explanation: arguments}
        self._shares: list[tuple[str, str, str]] = []
        self._has_step_batch = False

    def is_foreign(self, path: str, text: str) -> bool:
        """Returns whether --config.PATH=TEXT belongs to another program that also has a config."""
        if path in self._fields:
            _, names = self._fields[path]
            is_no_name = bool(names and text) and text not in names
            return is_no_name and normalize_name(text) in foreign_names().values.get(path, {})
        section = path.split('.')[0]
        if not section or is_multi_run(section):
            return False
        field_names = foreign_names().fields.keys() | foreign_names().shares.keys()
        is_named = not field_names.isdisjoint(suffixes(f'config.{path}'))
        return is_named or not any(field.startswith(f'{section}.') for field in self._fields)

    def add(self, argument: str, text: str) -> None:
        """Adds an unknown flag, such as --learning_rate, with its value ('' if it has none)."""
        names = suffixes(argument if argument.startswith('-') else f'maxtext.{argument}')
        last_name, foreign = names[-1], foreign_names()
        exact_paths = [n for n in names if n in self._fields]
        program_flags = [foreign.flags.get(n, n) for n in names if not exact_paths]
        program_flag = next((flag for flag in program_flags if flag in self._flags), '')
        foreign_field = next((n for n in names if n in foreign.fields), '')
        share = next((n for n in names if n in foreign.shares), '')
        missing_name = next(filter(replacement_hint, names), '')
        missing_group = next(filter(replacement_hint, names[0].split('.')[:-1]), '')
        paths = exact_paths or [
            path for path in foreign.fields.get(foreign_field, ()) if path in self._fields
        ]
        paths = paths or [path for path in self._fields if path.split('.')[1] == last_name]
        value_hint = elsewhere_hint(paths[0], text) if paths and text else ''
        if paths and text and not value_hint:
            is_path = foreign.forms.get(foreign_field) == 'text:{}'
            is_dataset = is_hub_name(text) and not os.path.exists(text)
            spelled = (text if is_dataset else '') if is_path else spell_value(foreign_field, text)
            value_hint = replacement_hint(spelled)
        if foreign_field in foreign.hub and is_hub_name(text):
            value_hint = value_hint or download_hint(text, text.partition('/')[2])
        self._has_step_batch |= any(n in foreign.step_batches for n in names)
        # The order matters: names that are certain come first, guesses last.
        if program_flag:
            self._add_program_flag(argument, program_flag, last_name, text)
        elif self._fields and not {*names}.isdisjoint(foreign.models):
            self._add_flag(argument, 'config', f'configs/{select_preset(text)}.py')
            self.add_sentence(foreign.notes.get(last_name, ''))
        elif share and self._fields:
            self._shares.append((argument, share, text))
        elif len(missing_name) > len(foreign_field) and not exact_paths:
            self._explain(argument, replacement_hint(missing_name))
        elif missing_group and not foreign_field and not exact_paths:
            self._explain(argument, replacement_hint(missing_group))
        elif value_hint:
            self._explain(f'{argument}={text}', value_hint)
        elif foreign_field and paths:
            self._add_field(argument, paths[0], foreign_field, text)
        elif paths:
            accepting = [p for p in paths if not text or not self._explain_refusal(p, text)]
            if len(accepting or paths) == 1:
                self._add_field(argument, (accepting or paths)[0], last_name, text)
            else:
                ending = f'={text}' if accepting and text else ''
                maybe = ' or '.join(f'--config.{path}{ending}' for path in accepting or paths)
                self.add_sentence(f'{argument} is {maybe}.')
        else:
            self.add_sentence(f'{argument} is no flag here.{self._suggest_flag(last_name, text)}')

    def _suggest_flag(self, name: str, text: str) -> str:
        """Suggests a flag for a misspelt or shortened name, with the value if it takes that."""
        flags = {flag: [flag] for flag in self._flags}
        for path in self._fields:
            flags.setdefault(path.split('.')[1], []).append(f'config.{path}')
        native_names = list(flags)
        for foreign_name, paths in foreign_names().fields.items():
            native_flags = [f'config.{path}' for path in paths if path in self._fields]
            flags.setdefault(foreign_name, native_flags)
        accepting = {n: [f for f in flags[n] if self._accepts(f, text)] for n in flags}
        likely = [n for n in flags if is_near(name, n, is_part=n not in self._flags)]
        for near in closest_names(name, likely) if len(name) > 1 else ():
            if len(accepting[near]) == 1:
                return f' Did you mean --{accepting[near][0]}{"=" if text else ""}{text}?'
        # `second_lr` may be another thing than `lr`: such a field is named without the value. Names
        # of other programs are not: `mup` is no misspelling of `mp`.
        similar = [n for n in native_names if is_near(name, n) or name.endswith(f'_{n}')]
        names = [f'--{flag}' for flag in dict.fromkeys(f for n in similar for f in accepting[n])]
        listed = ' or '.join(names) if len(names) <= 3 else ''
        return f' A similar name is {listed}.' if listed else ''

    def _accepts(self, flag: str, text: str) -> bool:
        """Returns whether a flag, such as config.optim.lr, takes a value; any flag takes none."""
        path = flag.removeprefix('config.')
        return path not in self._fields or not text or not self._explain_refusal(path, text)

    def add_sentence(self, text: str) -> None:
        """Adds a sentence to the answer."""
        if text and text not in self._sentences:
            self._sentences.append(text)

    def _explain(self, argument: str, explanation: str) -> None:
        """Adds a flag to those that an explanation answers."""
        self._explanations.setdefault(explanation, []).append(argument)

    def _add_flag(self, argument: str, flag: str, text: str) -> None:
        self._foreign_flags.append(argument)
        self._values[flag] = text

    def _add_program_flag(self, argument: str, flag: str, name: str, text: str) -> None:
        """Adds a flag of the program. --workdir joins the folder of all runs and a run's name."""
        before = self._values.get(flag, '')
        if name in ('run_name', 'run', 'id'):
            text = f'{before or "runs"}/{text}'
        elif flag == 'workdir':
            text = text.rstrip('/') + before.removeprefix('runs')
        self._add_flag(argument, flag, text)

    def _add_field(self, argument: str, path: str, name: str, text: str) -> None:
        translated = self._translate_value(path, name, text) or text
        reason = self._explain_refusal(path, translated) if translated else 'it needs a value'
        if reason:
            reason = reason.removesuffix('.')
            self.add_sentence(f'{argument} is no flag here; --config.{path} is, but {reason}.')
            return
        implied = foreign_names().implied.get(name) or foreign_names().implied.get(
            normalize_name(text), {}
        )
        implied = {} if translated == 'none' else implied  # a part that is off needs nothing
        implied_flags = {f'config.{field}': value for field, value in implied.items()}
        if argument == f'--config.{path}':
            self.add_sentence(f'{argument}={text} is no value here.')
            self._values[f'config.{path}'] = translated
        else:
            self._add_flag(argument, f'config.{path}', translated)
        if (
            path.startswith('mesh.') and translated == '-1'
        ):  # one axis alone takes what the others leave
            implied_flags = {'config.mesh.data': '1', f'config.{path}': '-1'}
        self._values |= implied_flags
        notes = (foreign_names().notes.get(n, '') for n in (*suffixes(argument), name))
        self.add_sentence(next(filter(None, notes), ''))

    def _translate_value(self, path: str, name: str, text: str) -> str:
        """Returns the value in the field's spelling, or '' for a name that is like none of its
        names.
        """
        types, names = self._fields[path]
        values = foreign_names().values
        tables = [values[n] for n in (name, path) if normalize_name(text) in values.get(n, {})]
        text = tables[0][normalize_name(text)] if tables else spell_value(name, text)
        if names and text and text not in names:
            alias = ROWS_BY_ALIAS.get(normalize_name(text))
            if alias is not None and alias in names:
                return alias
            nearest = ''.join(closest_names(text, names))
            self.add_sentence(f'{path} has no {text}; {nearest} is nearest.' if nearest else '')
            return nearest
        if bool in types:
            return text or 'True'
        if int in types or float in types:
            try:
                number = float(text)
            except ValueError:
                return text
            return str(int(number)) if int in types and number.is_integer() else text
        return text

    def _resolve_shares(self) -> None:
        """Converts shares to values if the whole is given too, otherwise to sentences."""
        for argument, name, text in self._shares:
            path, whole_path = foreign_names().shares[name]
            try:
                share, whole = float(text), float(self._values.get(f'config.{whole_path}', 'nan'))
            except ValueError:
                share = whole = math.nan
            value = share / whole if path == 'optim.final_lr_fraction' and whole else share * whole
            if path == 'optim.warmup_steps' and (share > 1 or not share):
                value = share  # steps
            is_steps = path == 'optim.warmup_steps' and math.isfinite(value)
            value_text = str(round(value)) if is_steps else f'{value:.6g}'
            if not math.isfinite(value) or self._explain_refusal(path, value_text):
                self._explain(argument, replacement_hint(name))
            else:
                self._add_flag(argument, f'config.{path}', value_text)
        self._shares.clear()

    def answer(self) -> str:
        """Returns one line for all added flags, or '' if there are none."""
        self._resolve_shares()
        sizes = [self._values.get(f'config.{path}', '') for path in BATCHES]
        if all(map(str.isdecimal, sizes)) and not self._has_step_batch:
            self._values[f'config.{BATCHES[0]}'] = str(int(sizes[0]) * int(sizes[1]))
        flags = [f'--{flag}' + (f'={text}' if text else '') for flag, text in self._values.items()]
        predicate = 'is no flag' if len(self._foreign_flags) == 1 else 'are no flags'
        opening = (
            f'{", ".join(self._foreign_flags)} {predicate} here.' if self._foreign_flags else ''
        )
        advice = f'Write {shlex.join(flags)}' if flags else ''
        explanations = [f'{", ".join(args)}: {why}.' for why, args in self._explanations.items()]
        return ' '.join(filter(None, [opening, *explanations, *self._sentences, advice]))


BATCHES = ('data.batch_size', 'train.microbatches')


def parse_positional(argument: str) -> tuple[str, str]:
    """Returns (name, value) of NAME=VALUE, which MaxText accepts without --, else ('', '')."""
    match = re.fullmatch(r'([A-Za-z]\w*)=(.*)', argument, re.DOTALL)
    return (match[1], match[2]) if match else ('', '')


def config_file_hint(argument: str) -> str:
    """Explains --config for a config path that was given without it; '' for any other argument."""
    if Path(argument).suffix not in ('.py', '.toml', '.yml', '.yaml', '.json'):
        return ''
    file = argument if argument.endswith('.py') and Path(argument).is_file() else ''
    return (
        f'{argument}: a config is given as --config={file or "configs/default.py"}, a Python file.'
    )
