"""Names that nanoGPT, nanochat, torchtitan, Hugging Face, MaxText, Levanter, NanoDO, LitGPT,
OLMo-core and axolotl use, with the fields and explanations that answer them.

Flags with these names are refused; `lm.config.translator` makes the answer.
"""

import difflib
import functools
import os
import re
import shlex
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple


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
      exact: {'name=value': 'field here=its value'}.
      files: {program: names that all are at the top of its config files}.
      presets: {name of a config: words of sizes}.
      corpora: {word: OWNER/NAME of a data set}.
      batches: {name of a batch size: step or device, whose sequences it counts}.
      tokens: {name of a number of tokens: field here that counts the same}.
      devices: names of numbers whose product is the number of devices.
      lists: names whose value is settings with commas between them.
      configs: names with a config file as value.
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
    exact: Mapping[str, str]
    files: Mapping[str, Sequence[str]]
    presets: Mapping[str, Sequence[str]]
    corpora: Mapping[str, str]
    batches: Mapping[str, str]
    tokens: Mapping[str, str]
    devices: Sequence[str]
    lists: Sequence[str]
    configs: Sequence[str]
    models: Sequence[str]
    hub: Sequence[str]


@functools.cache
def foreign_names() -> ForeignNames:
    """Returns the names of other programs, read from the file at the first call."""
    table = tomllib.loads(Path(__file__).with_suffix('.toml').read_text(encoding='utf-8'))
    fields = index_by_name(table['fields'].items())
    elsewhere: dict[str, list[tuple[str, str]]] = {}
    for row in table['elsewhere']:
        pattern = row['pattern'].replace('MODEL', '|'.join(table['model_words'].split()))
        for field in row['field'].split():
            elsewhere.setdefault(field, []).append((pattern, row['say']))
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
        exact=index_by_name(table['exact'].items()),
        files={program: names.split() for program, names in table['files'].items()},
        presets={config: sizes.split() for config, sizes in table['presets'].items()},
        corpora=table['corpora'],
        batches=index_by_name(table['batches'].items()),
        tokens=index_by_name(table['tokens'].items()),
        devices=table['devices'].split(),
        lists=table['lists'].split(),
        configs=table['configs'].split(),
        models=table['models'].split(),
        hub=table['hub'].split(),
    )


def index_by_name(rows: Iterable[tuple[Any, str]]) -> dict[str, Any]:
    """Returns {name: meaning} for rows (meaning, 'name name ...')."""
    return {name: meaning for meaning, names in rows for name in names.split()}


def find_preset(text: str) -> str:
    """Returns the config here of a model's size, by its name or its file elsewhere; '' if there is
    none of that size.
    """
    name = re.sub(r'\.(py|toml|ya?ml|json)$', '', text.lower()).rpartition('/')[2]
    sizes = re.findall(r'(?<![\dx.])\d+(?:\.\d+)?[mb](?![a-z\d])', name)
    words = sizes or [normalize_name(name), *re.split(r'[^a-z\d]+', name)[1:]]
    presets = foreign_names().presets.items()
    return next((config for config, names in presets if not {*names}.isdisjoint(words)), '')


def select_preset(text: str) -> str:
    """Returns the config here for a model that is called `text` elsewhere."""
    return find_preset(text) or 'default'


def family_hint(text: str) -> str:
    """Explains that models of a family, such as mamba-130m, are not here; '' for any other."""
    match = re.match(r'[a-z]+\d*', text.lower().rpartition('/')[2])
    words = (match[0], match[0].rstrip('0123456789')) if match else ()
    presets = {word for words in foreign_names().presets.values() for word in words}
    absent = foreign_names().absent
    return next((absent[word] for word in words if word in absent and word not in presets), '')


def normalize_name(name: str) -> str:
    """Returns a name in lower-case letters and digits, without separators."""
    return re.sub(r'[^a-z0-9]', '', str(name).lower())


def download_hint(dataset: str, folder: str) -> str:
    """Returns the flags that read a data set OWNER/NAME, from the hub or from a folder."""
    files_flag = shlex.quote(f'--config.data.source=text:{folder}/**/*.parquet')
    return (
        f'--config.data.source=hub:{dataset} reads the parquet files of this data set and needs '
        f'the extra hub; for your own files, use {files_flag} (or .txt, .jsonl)'
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
    whole = str(name)
    for corpus, dataset in foreign_names().corpora.items():
        is_versioned = bool(re.fullmatch(rf'{corpus}/\w+:[\d.]+', whole))  # of TFDS
        if is_versioned or normalize_name(whole.rpartition('/')[2]).startswith(corpus):
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
        # One word of several may stand for another thing: a temperature is not readout_temperature.
        is_same = len(words) > 1 or len(candidate_words) == 1
        is_respelt = normalize_name(name) == normalize_name(candidate)
        return is_respelt or (shares_word and has_words and is_same)
    return len(words) == len(candidate_words) and all(map(_is_misspelt, words, candidate_words))


def _is_misspelt(word: str, candidate: str) -> bool:
    """Returns whether two words are alike: nrom and norm (0.75), or l and lr (0.67)."""
    ratio = difflib.SequenceMatcher(None, word, candidate).ratio()
    is_prefix = word.startswith(candidate) or candidate.startswith(word)
    return ratio >= (0.65 if is_prefix else 0.75)


def is_multi_run(path: str) -> bool:
    """Returns whether a config path is sweep or tune, or a misspelling of one."""
    return path.startswith(('sweep', 'tune', 'tuning'))


def parse_positional(argument: str) -> tuple[str, str]:
    """Returns (name, value) of NAME=VALUE, which MaxText accepts without --, else ('', '')."""
    match = re.fullmatch(r'([A-Za-z][\w.-]*)=(.*)', argument, re.DOTALL)
    return (match[1], match[2]) if match else ('', '')
