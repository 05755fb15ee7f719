"""The answer to flags and config files of other programs: the flags that work here, with the given
values, and a sentence for a name without counterpart.
"""

import math
import os
import re
import shlex
from collections.abc import Callable, Collection
from pathlib import Path

from lm.config.mixture import DEFAULT_SOURCE
from lm.config.other_files import is_config_file, is_foreign_config, read_settings
from lm.config.other_programs import (
    download_hint,
    elsewhere_hint,
    family_hint,
    find_preset,
    foreign_names,
    is_hub_name,
    is_multi_run,
    is_near,
    normalize_name,
    replacement_hint,
    select_preset,
    spell_value,
    suffixes,
)
from modules.choices import ROWS_BY_ALIAS, closest_names

BATCH, PARTS = 'config.data.batch_size', 'config.train.microbatches'
ROW = 'config.data.seq_len'
MAX_IN_A_LINE = 2  # sentences of an answer; more have a line each
# In a path of text, which has no `text:` before it.
TEXT_PATH = re.compile(r'[/*]|\.(txt|md|jsonl?|ndjson|csv|tsv|parquet|arrow|feather)\b')
TEXT_FIELDS = ('data.source', 'data.validation_source')
FALSE = ('false', 'no', 'off', '0')


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
        self._unknown: list[str] = []
        self._shares: list[tuple[str, str, str]] = []
        self._batches: dict[str, int] = {}  # {unit: batch size}
        self._devices: list[int] = []  # of a process, of a host, ...: their product counts all
        self._tokens: list[tuple[str, str, int]] = []  # (argument, name, number of tokens)
        self._config_files: set[str] = set()

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
        if self._add_special(argument, names, text):
            return
        last_name, foreign = names[-1], foreign_names()
        exact_paths = [n for n in names if n in self._fields]
        # With a section, such as profiling.run, the name of a run means another thing.
        whole_names = [n for n in names if n == names[0] or n not in ('run', 'name')]
        program_flags = [foreign.flags.get(n, n) for n in whole_names if not exact_paths]
        program_flag = next((flag for flag in program_flags if flag in self._flags), '')
        foreign_field = next((n for n in names if n in foreign.fields), '')
        share = next((n for n in names if n in foreign.shares), '')
        missing_name = next(
            filter(self._find_replacement, [*names, last_name.removeprefix('no_')]), ''
        )
        missing_group = next(filter(self._find_replacement, names[0].split('.')[:-1]), '')
        paths = exact_paths or [
            path for path in foreign.fields.get(foreign_field, ()) if path in self._fields
        ]
        paths = paths or [path for path in self._fields if path.split('.')[1] == last_name]
        value_hint = self._explain_value(paths, foreign_field, text) if paths and text else ''
        # The order matters: names that are certain come first, guesses last.
        if program_flag:
            self._add_program_flag(argument, program_flag, last_name, text)
        elif self._fields and not {*names}.isdisjoint(foreign.models):
            self._add_model(argument, last_name, text)
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
            self._add_same_name(argument, paths, last_name, text)
        elif hint := self._suggest_flag(last_name, text):
            self.add_sentence(f'{argument} is not a flag here.{hint}')
        else:
            self._unknown.append(argument)

    def _find_replacement(self, name: str) -> str:
        """Returns `replacement_hint`, or '' for one on fields that this program does not have."""
        hint = replacement_hint(name)
        return hint if self._fields or '--config.' not in hint else ''

    def _add_special(self, argument: str, names: list[str], text: str) -> bool:
        """Adds a list of settings, a config file, a batch in tokens, or a value with a meaning of
        its own. Returns whether it was one of these.
        """
        foreign, value = foreign_names(), text.lower()
        words = (value, 'false') if value in FALSE else (value,)
        exact = (foreign.exact.get(f'{name}={word}') for name in names for word in words)
        path, _, translated = (next(filter(None, exact), '')).partition('=')
        if not {*names}.isdisjoint(foreign.devices) and text.isdecimal():
            self._devices.append(int(text))
        if path in self._fields:
            self._add_flag(argument, f'config.{path}', translated)
        elif self._fields and not {*names}.isdisjoint(foreign.lists):
            for pair in filter(None, text.split(',')):
                name, _, setting = pair.partition('=')
                self.add(f'--{name}', setting)
        elif self._fields and not {*names}.isdisjoint(foreign.configs) and is_foreign_config(text):
            self.add_config_file(text, argument)
        elif self._fields and names[-1] in foreign.tokens and re.fullmatch(r'\d[\d_]*', text):
            self._tokens.append((argument, names[-1], int(text)))
        else:
            return False
        return True

    def add_config_file(self, file: str, argument: str = '') -> None:
        """Adds the settings of a config file of another program, or the flag of one of ours."""
        path = Path(os.path.expanduser(file))
        if not is_config_file(file):
            place = file if path.is_file() else f'configs/{select_preset(file)}.py'
            self.add_sentence(f'{file}: pass the config as --config={place}, a Python file.')
            self._values.setdefault('config', place)
            return
        settings = {} if file in self._config_files else read_settings(file)  # it may name itself
        self._config_files.add(file)
        sections = {name.partition('.')[0] for name in settings}
        programs = foreign_names().files.items()
        program = next((name for name, keys in programs if {*keys} <= sections), 'another program')
        self.add_sentence(
            f'{f"{argument}={file}" if argument else file} is a config of {program}. Configs here '
            'are Python files with get_config() (docs/guide/config.md), or flags '
            '(docs/coming_from.md).'
        )
        self._values.setdefault('config', f'configs/{select_preset(file)}.py')
        for name, text in settings.items():
            self.add(name if program == 'MaxText' else f'--{name}', text)

    def add_word(self, word: str) -> None:
        """Adds a word without a flag: a config file, or the name of a model."""
        if not self._fields:
            return
        if Path(word).suffix == '.py' or is_config_file(word):
            self.add_config_file(word)
        else:
            hint = elsewhere_hint('train.init_from', word.rstrip('/'))
            self._explain(word, hint or 'flags begin with --, and other words are not accepted')

    def _explain_value(self, paths: list[str], foreign_field: str, text: str) -> str:
        """Explains a value that a field cannot read; '' for any other."""
        foreign = foreign_names()
        if hint := elsewhere_hint(paths[0], text):
            return hint
        is_path = foreign.forms.get(foreign_field) == 'text:{}'
        is_dataset = is_hub_name(text) and not os.path.exists(text)
        spelled = (text if is_dataset else '') if is_path else spell_value(foreign_field, text)
        hint = replacement_hint(spelled)
        if foreign_field in foreign.hub and not hint:
            if is_hub_name(text):
                return download_hint(text, text.partition('/')[2])
            if (
                re.fullmatch(r'[\w-]+', text)
                and text != DEFAULT_SOURCE
                and not os.path.exists(text)
            ):
                return (
                    'use --config.data.source=hub:OWNER/NAME for a data set of the Hub, or '
                    '--config.data.source=text:GLOB for files'
                )
        return hint

    def _add_model(self, argument: str, name: str, text: str) -> None:
        """Adds the config of a model's size, or says that there is none."""
        is_hub_model = name != 'config_path' and is_hub_name(text)
        hint = family_hint(text) or (elsewhere_hint('train.init_from', text) * is_hub_model)
        preset = find_preset(text) or ('default' if name == 'config_path' or not text else '')
        if hint or not preset:
            sizes = ', '.join(f'configs/{config}.py' for config in foreign_names().presets)
            why = (
                f'the configs here are {sizes}; for another size, set --config.model.d_model, '
                '--config.model.n_layers and --config.model.n_heads'
            )
            self._explain(f'{argument}={text}', hint or replacement_hint(text) or why)
            return
        self._add_flag(argument, 'config', f'configs/{preset}.py')
        self.add_sentence(foreign_names().notes.get(name, ''))

    def _add_same_name(self, argument: str, paths: list[str], name: str, text: str) -> None:
        """Adds a flag whose name is that of one field, or of several."""
        accepting = [p for p in paths if not text or not self._explain_refusal(p, text)]
        if len(accepting or paths) == 1:
            self._add_field(argument, (accepting or paths)[0], name, text)
        elif argument.lstrip('-') == 'name' and not accepting:
            self._add_program_flag(argument, 'workdir', name, text)
        elif not accepting:
            self._unknown.append(argument)
        else:
            ending = f'={text}' if text else ''
            maybe = ' or '.join(f'--config.{path}{ending}' for path in accepting)
            self.add_sentence(f'{argument} may mean {maybe}.')

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
        run_name = before.removeprefix('runs') if before.startswith('runs/') else ''
        is_output = name in ('out_dir', 'output_dir', 'save_folder')
        if flag != 'workdir':
            self._add_flag(argument, flag, text)
        elif not text:
            self._unknown.append(argument)
        elif name in ('run_name', 'run', 'id', 'name'):
            self._add_flag(argument, flag, f'{before or "runs"}/{text}')
        elif before and not run_name and not is_output:  # such as that of a model to begin from
            self.add_sentence(f'{argument}: a run has one folder, --workdir.')
        else:
            self._add_flag(argument, flag, (text.rstrip('/') or text) + run_name)

    def _add_field(self, argument: str, path: str, name: str, text: str) -> None:
        translated = self._translate_value(path, name, text) or text
        reason = self._explain_refusal(path, translated) if translated else 'it needs a value'
        if reason:
            reason = reason.removesuffix('.')
            self.add_sentence(
                f'{argument} is not a flag here. Its counterpart is --config.{path}, but {reason}.'
            )
            return
        is_file = ':' not in translated and bool(TEXT_PATH.search(translated))
        if path in TEXT_FIELDS and is_file:
            translated = f'text:{translated}'
        if f'config.{path}' == BATCH and translated.isdecimal():
            kinds = (foreign_names().batches.get(n) for n in (*suffixes(argument), name))
            self._batches[next(filter(None, kinds), 'microbatch')] = int(translated)
        implied = foreign_names().implied.get(name) or foreign_names().implied.get(
            normalize_name(text), {}
        )
        implied = {} if translated == 'none' else implied  # a part that is off needs nothing
        implied_flags = {f'config.{field}': value for field, value in implied.items()}
        if argument == f'--config.{path}':
            self.add_sentence(f'{argument}={text} is not a value here.')
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
            is_other = nearest and normalize_name(nearest) != normalize_name(text)
            self.add_sentence(
                f'{path} has no {text}; the closest is {nearest}.' if is_other else ''
            )
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

    def _resolve_batches(self) -> None:
        """Converts the batch sizes to the sequences of a step, and the parts that it is done in."""
        batches, devices = self._batches, math.prod(self._devices)
        for axis in ('tensor', 'context'):  # devices that share sequences
            size = self._values.get(f'config.mesh.{axis}', '')
            is_share = size.isdecimal() and int(size) and devices % int(size) == 0
            devices //= int(size) if is_share else 1
        parts = int(text) if (text := self._values.get(PARTS, '')).isdecimal() else 0
        if self._resolve_tokens(BATCH, [ROW]):
            batches['step'] = int(self._values[BATCH])
        on_device = batches.get('device', 0)
        if step := batches.get('step', 0):
            self._values[BATCH] = str(step)
            at_once = on_device * devices
            if self._devices and at_once and not parts and step % at_once == 0:
                self._values[PARTS] = str(step // at_once)
        elif on_device:
            self._values[BATCH] = str(on_device * devices * (parts or 1))
        elif parts and 'microbatch' in batches:
            self._values[BATCH] = str(batches['microbatch'] * parts)
            if parts % devices == 0:  # nanoGPT deals them to its devices
                self._values[PARTS] = str(parts // devices)
        for flag in ('config.train.steps', 'config.train.eval_batches'):
            self._resolve_tokens(flag, [ROW, BATCH])

    def _resolve_tokens(self, flag: str, sizes: Collection[str]) -> bool:
        """Converts numbers of tokens to the value of a flag, or to sentences.

        Args:
          flag: the flag of a field.
          sizes: flags whose product is the tokens that the field counts as one.

        Returns:
          Whether the flag has such a value.
        """
        texts = [self._values.get(size, '') for size in sizes]
        tokens = math.prod(map(int, texts)) if all(map(str.isdecimal, texts)) else 0
        counts = [row for row in self._tokens if f'config.{foreign_names().tokens[row[1]]}' == flag]
        for argument, name, count in counts:
            if tokens:
                self._add_flag(argument, flag, str(max(count // tokens, 1)))
            else:
                self._explain(argument, replacement_hint(name))
        return bool(counts and tokens)

    def answer(self) -> str:
        """Returns the answer to all added flags, or '' if there are none. Several sentences have a
        line each.
        """
        self._resolve_shares()
        self._resolve_batches()
        # --config comes first: what follows it sets the fields of its file.
        values = {'config': self._values['config']} if 'config' in self._values else {}
        values |= self._values
        flags = [f'--{flag}' + (f'={text}' if text else '') for flag, text in values.items()]
        advice = f'Write {shlex.join(flags)}' if flags else ''
        explanations = [f'{", ".join(args)}: {why}.' for why, args in self._explanations.items()]
        lines = [
            *([_refuse(self._unknown)] if self._unknown else []),
            *explanations,
            *self._sentences,
            ' '.join([*([_refuse(self._foreign_flags)] if self._foreign_flags else []), advice]),
        ]
        lines = list(filter(None, map(str.strip, lines)))
        return ('\n' if len(lines) > MAX_IN_A_LINE else ' ').join(lines)


def _refuse(arguments: list[str]) -> str:
    """Returns that these are no flags."""
    return (
        f'{", ".join(arguments)} {"is not a flag" if len(arguments) == 1 else "are not flags"} '
        'here.'
    )
