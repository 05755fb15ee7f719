"""Commands: how they start, parse their flags, and report errors."""

import atexit
import dataclasses
import functools
import gc
import logging as stdlib_logging
import math
import os
import re
import signal
import sys
import traceback
import types
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
from absl import app, flags
from ml_collections import ConfigDict, FieldReference, config_flags
from ml_collections.config_flags.config_flags import ConfigFileFlagParser

from lm.config.choice import AUTO
from lm.config.fields import FIELDS, Field
from lm.config.other_files import SUFFIXES, is_foreign_config
from lm.config.other_programs import parse_positional
from lm.config.recipe import Recipe
from lm.config.resolve import digest, flatten, single_run_config
from lm.config.suggestions import MULTI_RUN_SECTIONS, check_flags, field_hint, flag_type_error
from lm.config.translator import Translator
from lm.launch.compile_cache import enable_compile_cache
from lm.launch.distributed import leave
from lm.launch.exhausted import explain_memory_error, is_memory_error
from lm.launch.exit_status import BAD_INPUT, SIGNALLED
from lm.launch.path_flags import define_path
from lm.launch.program_help import print_program_help
from lm.launch.signals import raise_on_sigint
from lm.launch.terminal import quiet_libraries
from lm.launch.thread_limit import check_thread_limit
from lm.storage.files import FULL_MESSAGES, describe_full_disk, escape_controls, expand_home
from modules.choices import suggest_nearest
from modules.options import coerce_type

flags.disclaim_key_flags()  # flags that are defined here belong to the program that asks for them


DEFAULT = Path(__file__).parents[2] / 'configs' / 'default.py'
EXAMPLE = 'A config file defines get_config(), which returns a config, as in configs/default.py.'


def freeze_imports() -> None:
    """Exempts all that imports have made from garbage collection, which takes 0.4 s of a start."""
    gc.freeze()
    atexit.register(gc.unfreeze)  # or nanobind reports at the end what Python has not freed


def run_main(main: Callable[[list[str]], None]) -> Callable[[list[str]], None]:
    """Wraps `main` for absl's app.run: silences libraries, and reports bad input in one line."""

    def wrapper(argv: list[str]) -> None:
        quiet_libraries()
        raise_on_sigint()
        enable_compile_cache()
        freeze_imports()
        try:
            check_numbers(flags.FLAGS)
            main(argv)
            sys.stdout.flush()  # a broken pipe is handled here, but not at exit
        except KeyboardInterrupt:
            print('\nSIGINT', file=sys.stderr)
            sys.exit(128 + signal.SIGINT)
        except (ValueError, OSError) as error:
            print(f'error: {escape_controls(str(error))}', file=sys.stderr)
            leave(BAD_INPUT)

    return wrapper


def run_program(
    main: Callable[[list[str]], None], parser: Callable[[list[str]], list[str]] | None = None
) -> None:
    """Runs `main` of a program, or prints its help; the process exits.

    Args:
      main: the program; it gets the words of the command line that are no flags.
      parser: parses the flags; None: `parse_flags`, for a program that reads words.
    """
    print_program_help()
    parser = parser or functools.partial(parse_flags, has_arguments=True)
    app.run(run_main(main), flags_parser=parser)


def run_trainer(main: Callable[[], int]) -> Callable[[list[str]], None]:
    """Wraps `main` of a program that trains; the process exits with the status that `main`
    returns.
    """

    def wrapper(argv: list[str]) -> None:
        raise_on_sigint()
        quiet_libraries()
        enable_compile_cache()
        freeze_imports()
        if len(argv) > 1:
            raise app.UsageError(f'flags begin with --, as in --config=PATH; got {argv[1:]}')
        try:
            check_thread_limit()
            status = main()
        except (ValueError, OSError) as error:
            print(f'error: {escape_controls(_add_advice(error))}', file=sys.stderr)
            status = BAD_INPUT
        except jax.errors.JaxRuntimeError as error:
            if not is_memory_error(error):
                raise
            print(f'error: {explain_memory_error(error)}', file=sys.stderr)
            status = BAD_INPUT
        except KeyboardInterrupt as error:  # before training, which catches signals itself
            number = signal.Signals(error.args[0] if error.args else signal.SIGINT)
            message = 'stopped, and nothing is lost. Run the same command to resume.'
            print(f'\n{number.name}: {message}', file=sys.stderr, flush=True)
            os._exit(SIGNALLED + number)  # at once: no thread has anything to write
        leave(status)

    return wrapper


def _add_advice(error: ValueError | OSError) -> str:
    """Returns the text of an error; for a full disk with the folder and advice."""
    number, file = getattr(error, 'errno', None), getattr(error, 'filename', None)
    if number not in FULL_MESSAGES:
        return str(error)
    place = Path(os.fsdecode(file)).absolute().parent if file else 'the output'
    return (
        f'{describe_full_disk(error, place)} ({error}). Free some space, then run the same command '
        'to resume.'
    )


def define_config() -> flags.FlagHolder[ConfigDict]:
    """Defines --config=PATH, and --config.SECTION.FIELD=VALUE for all fields, also for fields that
    the file does not set.
    """
    holder = config_flags.DEFINE_config_file('config', None, 'Python file with get_config().')
    flags.FLAGS['config'].parser = ConfigParser('config')
    return holder


def define_run() -> tuple[flags.FlagHolder, flags.FlagHolder, flags.FlagHolder]:
    """Defines --workdir, --continue_changed and --start_over."""
    words = 'Folder of the run, or gs:// or s3://BUCKET/PATH; default: runs/NAME-HASH.'
    workdir = define_path('workdir', None, words)
    words = 'Continue the run in the workdir although its config or data has changed.'
    changed = flags.DEFINE_bool('continue_changed', False, words)
    words = 'Start again at step 1 if all checkpoints of the run are lost.'
    return workdir, changed, flags.DEFINE_bool('start_over', False, words)


def default_workdir(recipe: Recipe, suffix: str = '') -> Path:
    """Returns runs/default-1a2b3c4d, so that the same command finds the same folder again."""
    name = Path(config_flags.get_config_filename(flags.FLAGS['config'])).stem
    return Path('runs', f'{name}-{digest(recipe)}{suffix}')


def find_overrides(config: Mapping[str, Any]) -> dict[str, Any]:
    """Returns {path: value} of the fields that differ from configs/default.py."""
    default = flatten(ConfigParser('default').parse(str(DEFAULT)).to_dict())
    fields = flatten(single_run_config(config))
    return {p: v for p, v in fields.items() if p in FIELDS and v != default.get(p)}


def find_set_fields(config: Mapping[str, Any]) -> set[str]:
    """Returns the paths of fields that a flag sets, or that the file sets to another value than the
    default.
    """
    return {*config_flags.get_override_values(flags.FLAGS['config']), *find_overrides(config)}


class ConfigParser(ConfigFileFlagParser):
    """Reads a config file as ml_collections does, and adds the fields that it leaves out."""

    def parse(self, path: str) -> Any:
        path = expand_home(path)
        file, _, argument = path.partition(':')
        stdlib_logging.disable(stdlib_logging.WARNING)  # one line says what is wrong
        try:
            config = super().parse(path)
        except AttributeError as error:
            if error.name != 'get_config':
                raise
            raise flags.Error(f'{file} has no get_config(). {EXAMPLE}') from None
        except (TypeError, ValueError) as error:
            # ml_collections puts the traceback into the message; without an argument it is needed.
            if not argument or error.__context__ is None:
                raise
            raise flags.Error(_describe_argument(file, argument, error.__context__)) from None
        finally:
            stdlib_logging.disable(stdlib_logging.NOTSET)
        if config is None:
            raise flags.Error(f'get_config() of {file} returns nothing. {EXAMPLE}')
        if isinstance(config, ConfigDict):
            check_fields(config, file)
            add_fields(config)
        return config


def _describe_argument(file: str, argument: str, error: BaseException) -> str:
    """Returns why get_config() refused the name behind a colon, with the line of the file.

    Args:
      file: the config file.
      argument: what get_config() got.
      error: what it raised.
    """
    if isinstance(error, TypeError) and 'positional argument' in str(error):
        return f'--config={file} takes no name behind a colon; got :{argument}. Leave it out.'
    lines = [
        frame.lineno
        for frame in traceback.extract_tb(error.__traceback__)
        if Path(frame.filename).name == Path(file).name
    ]
    line = f':{lines[-1]}' if lines else ''
    return f'{file}{line}: get_config({argument!r}): {error}'


def check_fields(config: ConfigDict, file: str) -> None:
    """Raises flags.Error for an unknown field, with the line of the file that names it."""
    sections = {path.split('.')[0] for path in FIELDS}
    for section in set(config.keys()) & sections:
        for name in config[section].keys() if isinstance(config[section], ConfigDict) else ():
            if (path := f'{section}.{name}') not in FIELDS:
                lines = enumerate(Path(file).read_text().splitlines(), 1)
                location = next(
                    (f':{n}' for n, line in lines if re.search(rf'\b{name}\b', line)), ''
                )
                raise flags.Error(
                    f'{file}{location}: the config has no field {path}.{field_hint(path, FIELDS)}'
                )


def add_fields(config: ConfigDict) -> None:
    """Gives each field its place and its type, so that flags can set these fields and no others.

    A field without a value gets its default, which is None for the options of parts. A value of
    another type is left for `lm.config.resolve.build_config` to refuse.
    """
    config.unlock()
    for path, field in FIELDS.items():
        section, name = path.split('.')
        if section not in config:
            config[section] = ConfigDict()
        if isinstance(config[section], ConfigDict):
            _add_field(config[section], path, name, field)
    config.lock()


def _add_field(section: ConfigDict, path: str, name: str, field: Field) -> None:
    """Adds one field to a section, with the value of the file or its default."""
    value = dict(section.items(preserve_field_references=True)).get(name, field.default)
    if value is dataclasses.MISSING or isinstance(value, FieldReference):
        return
    try:
        value = coerce_type(path, value, field.types)
    except ValueError:
        return
    (kind,) = set(field.types) - {types.NoneType}
    if name in section:
        del section[name]  # it has the type of the value that the file gives it
    section[name] = FieldReference(value, field_type=kind)


def parse_flags(argv: list[str], has_arguments: bool = False) -> list[str]:
    """Parses flags as absl does; a mistake in a flag is reported in one line.

    has_arguments: whether the program reads words without a flag.
    """
    try:
        check_names(argv, has_arguments)
        check_flags(argv, FIELDS)
        return flags.FLAGS(argv)
    except flags.Error as error:
        match = re.match(r'flag --config\.([\w.]+)=(.*?): ', str(error), re.DOTALL)
        path, text = match.groups() if match else ('', '')
        message = flag_type_error(path, text, FIELDS[path].types) if path in FIELDS else str(error)
    except AttributeError as error:
        message = _explain_unknown_field(error)
        if not message:
            raise  # another mistake in the config file: its traceback helps
    except ValueError as error:
        message = str(error)
    print(f'error: {escape_controls(message)}', file=sys.stderr)
    sys.exit(BAD_INPUT)


def check_numbers(flag_values: flags.FlagValues) -> None:
    """Raises ValueError for a number that is not finite: the bounds of absl let NaN through.

    The fields of a config have their own checks (`lm.config.resolve`).
    """
    for name in flag_values:
        value = flag_values[name].value
        is_field = name.startswith('config.')
        if isinstance(value, float) and not math.isfinite(value) and not is_field:
            raise ValueError(f'--{name} must be a finite number; got {value}. Correct it.')


def check_names(argv: Sequence[str], has_arguments: bool = False) -> None:
    """Raises ValueError for unknown flags, with our names for flags of other programs.

    Words without a flag are refused unless the program `has_arguments`.
    """
    defined, fields = flags.FLAGS, {}
    if 'config' in defined:
        fields = {path: (field.types, choice_names(field)) for path, field in FIELDS.items()}
    translator = Translator(fields, _list_program_flags(), explain_refusal)
    words = list(argv[1 : argv.index('--') if '--' in argv else None])
    is_after_foreign = False  # further words may be more values: --target_modules q_proj v_proj
    while words:
        word = words.pop(0)
        flag, is_whole, text = word.partition('=')
        name = flag.lstrip('-')
        has_value = bool(words) and not is_whole and not words[0].startswith('--')
        value = words[0] if has_value else text
        is_config = bool(fields) and name.split('.')[0] in ('config', 'noconfig')
        is_ours = is_config or name in defined or name.removeprefix('no') in defined
        path = name.partition('.')[2]
        if not word.startswith('-'):
            if has_arguments:
                continue
            if fields and all(parse_positional(word)):
                translator.add(*parse_positional(word))
            elif not is_after_foreign or Path(word).suffix in ('.py', *SUFFIXES):
                translator.add_word(word)
            continue
        is_foreign_file = name == 'config' and is_foreign_config(value)
        is_foreign = not is_ours or (is_config and translator.is_foreign(path, value))
        is_after_foreign = is_foreign and not is_whole
        if is_foreign or is_foreign_file:
            if has_value:
                words.pop(0)
            translator.add(flag, value)
        elif has_value and not (_is_switch(name) or words[0].startswith('-')):
            words.pop(0)
    if message := translator.answer():
        raise ValueError(message)


def _list_program_flags() -> list[str]:
    """Returns the flags that other programs' may stand for: all but absl's own, as --log_dir."""
    modules = {flag: flags.FLAGS.find_module_defining_flag(flag) or '' for flag in flags.FLAGS}
    return [flag for flag, module in modules.items() if not module.startswith('absl.')]


def explain_refusal(path: str, text: str) -> str:
    """Returns why a field does not take the text of a flag; '' if it does."""
    field = FIELDS[path]
    (kind,) = set(field.types) - {types.NoneType}
    try:
        value = flags.BooleanParser().parse(text) if kind is bool else kind(text)
    except ValueError:
        return flag_type_error(path, text, field.types)
    try:
        if field.option:
            field.option.check(path, value)
        if field.choice:
            field.choice.parse_rows(path, text)
    except ValueError as error:
        return str(error)
    return ''


def choice_names(field: Field) -> Collection[str]:
    """Returns the names that a field may have; () if it is not a choice."""
    if field.choice:
        return [*field.choice.table, *([AUTO] if field.choice.auto else [])]
    return field.option.choices if field.option else ()


def _is_switch(name: str) -> bool:
    """Whether a flag of this program may stand alone."""
    path = name.partition('.')[2]
    return (
        bool in FIELDS[path].types
        if path in FIELDS
        else name not in flags.FLAGS or (flags.FLAGS[name].boolean)
    )


def _explain_unknown_field(error: AttributeError) -> str:
    """Returns an error on the unknown field that a config file sets or reads; '' for another
    error.
    """
    sections, names = ({path.split('.')[i] for path in FIELDS} for i in (0, 1))
    if key := re.search(r'Key "(\w+)" does not exist', str(error)):
        name, message = key[1], f'the config has no field {key[1]}.'
    elif isinstance(error.obj, ConfigDict):
        name, message = error.name or '', f'the config file reads {error.name}, which is not set.'
    else:
        return ''
    frames = traceback.extract_tb(error.__traceback__)
    frame = next(frame for frame in reversed(frames) if 'ml_collections' not in frame.filename)
    message = f'{frame.filename}:{frame.lineno}: {message}'
    if not key and name in names:
        return f'{message} Options at their published default are unset: use .get({name!r}).'
    return message + (
        suggest_nearest(name, [*MULTI_RUN_SECTIONS, *sections]) or field_hint(name, FIELDS)
    )
