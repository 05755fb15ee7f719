"""Pages of the reference, written from the tables and signatures that they describe.

Sphinx calls `write` before it reads the pages, so the reference cannot age. A part or an option
without a description is an error.
"""

import ast
import importlib
import inspect
from collections.abc import Iterator
from pathlib import Path

from configs import default
from docs import python_pages
from docs.cards import cards, tables
from docs.docstrings import table, to_markdown
from eval.console.listings import format_bounds, value_form
from eval.convert.exportable import describe_export
from lm.config.fields import CHOICES, FIELDS
from lm.config.groups import OPTIMIZER, SETTINGS
from lm.config.resolve import flatten, resolve, single_run_config, update_recipe
from lm.study.tables.columns import IDENTITY, RESULTS, columns
from modules.optim.groups import GROUPS
from modules.optim.stages import STAGES, stage_inputs
from tests.mistakes import ANSWERED, NOT_HERE
from tpu.launchers.base import is_resumable

ROOT = Path(__file__).parents[1]
# {config: {a field: its value}} of the page of exports: with one flag another family has the model.
EXPORTED_WITH = {'default': {'model.activation': 'swiglu'}}
COMMANDS = {
    'train.py': 'train.py',
    'python -m eval': 'eval/__main__.py',
    'python -m eval.compare': 'eval/compare.py',
    'python -m eval.generate': 'eval/generate.py',
    'python -m eval.serve': 'eval/serve/__main__.py',
    'python -m eval.runs': 'eval/runs.py',
    'python -m eval.report': 'eval/report/__main__.py',
    'python -m eval.fit': 'eval/fit/__main__.py',
    'python -m eval.coordinates': 'eval/coordinates.py',
    'python -m eval.rules': 'eval/rules.py',
    'python -m eval.convert': 'eval/convert/__main__.py',
    'python -m eval.claims': 'eval/claims/__main__.py',
    'python -m eval.sync': 'eval/sync/__main__.py',
    'python -m tpu.plan': 'tpu/plan.py',
    'python -m tpu.launch': 'tpu/launch.py',
}


def write(folder: Path) -> None:
    """Writes the pages into the folder and removes other pages from it."""
    pages = {
        'fields.md': fields(),
        'stages.md': stages(),
        'commands.md': commands(),
        'columns.md': run_columns(),
        'statuses.md': statuses(),
        'other_programs.md': coming_from(),
        'exports.md': exports(),
        **{f'python/{name}': text for name, text in python_pages.pages().items()},
        **{f'parts/{field}.md': '\n'.join(cards(field)) for field in tables()},
    }
    names = [name.removesuffix('.md') for name in pages if name.startswith('parts/')]
    pages['parts/index.md'] = (
        '# Parts\n\nEach table of parts has a page, and each part a card: its equations, its '
        'options with types, bounds and published defaults, its papers, the parts that it is '
        'incompatible with, the studies that compare it, and its tests.\n\n'
        + toctree(name.removeprefix('parts/') for name in names)
    )
    for stale in {*folder.rglob('*.md')} - {folder / name for name in pages}:
        stale.unlink()
    for name, text in pages.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        if not path.exists() or path.read_text() != text:  # Sphinx reads what has changed
            path.write_text(text)


def toctree(names: Iterator[str]) -> str:
    return '\n'.join(['```{toctree}', ':maxdepth: 1', '', *names, '```', ''])


def fields() -> str:
    """Returns the page of all fields of a config."""
    defaults = flatten(default.get_config().to_dict())
    parts = [
        '# Config fields\n',
        'Set a field with `--config.SECTION.FIELD=VALUE`. Defaults are those of '
        '`configs/default.py`. If the default of an option is None, the published default of the '
        'part applies.\n',
    ]
    pages = {id(CHOICES[field].table): field for field in reversed(tables())}
    section = ''
    rows: list[list[str]] = []

    def flush() -> None:
        if rows:
            parts.append(f'## {section}\n')
            parts.append(table(['field', 'default', 'values', 'description'], rows) + '\n')
            rows.clear()

    group_paths = {f'optim.{g}_{s}' for g in GROUPS for s in (*SETTINGS, OPTIMIZER)}
    for path, field in FIELDS.items():
        if path.split('.')[0] != section:
            flush()
            parts += [group_fields()] * (section == 'optim')
            section = path.split('.')[0]
        if path in group_paths:
            continue
        if field.choice:
            page = pages[id(field.choice.table)]
            values = f'[{value_form(field.choice)}](parts/{page}.md)'
        else:
            values = ' or '.join(t.__name__.replace('NoneType', 'None') for t in field.types)
            bounds = format_bounds(field.option) if field.option else ''
            values += f', {bounds}' if bounds else ''
        words = field.description
        rows.append([f'`{path}`', f'`{defaults.get(path)}`', values, words])
    flush()
    return '\n'.join(parts)


def describe_setting(name: str) -> str:
    """Returns the description of a field of groups."""
    description = SETTINGS[name].description
    return f'in place of `optim.{name}`' if description == name else description


def group_fields() -> str:
    """Returns the fields of groups of parameters, which are the same for all groups."""
    settings = {
        OPTIMIZER: ('str or None', 'name of the optimizer, with or without options'),
        **{
            name: (f'float or None, {format_bounds(option)}', describe_setting(name))
            for name, option in SETTINGS.items()
        },
    }
    groups = [
        [f'`{group}`', parameters, f'`{parent}`'] for group, (parameters, parent) in GROUPS.items()
    ]
    rows = [[f'`optim.GROUP_{name}`', *cells] for name, cells in settings.items()]
    return '\n'.join(
        [
            '### Groups of parameters\n',
            'Each group of parameters has the fields below, such as `optim.embedding_lr`; `others` '
            'has no `optim.others_optimizer`, because `optim.others` names its optimizer. All are '
            'None by default: the setting is then that of the parent group. The settings of '
            '`hidden` are `optim.name`, `optim.lr`, `optim.weight_decay` and so on. [An example]'
            '(../guide/losses_optimizers.md#groups-of-parameters)\n',
            table(['group', 'parameters', 'parent'], groups) + '\n',
            table(['field', 'values', 'description'], rows) + '\n',
        ]
    )


def stages() -> str:
    """Returns the page of the stages of an update, in their order, with the fields of each."""
    sections = [
        '# Stages of an update\n',
        'A gradient passes through these stages, in this order, before it changes the weights. A '
        'stage with fields is used only if one of them is set.\n',
    ]
    for name, stage in STAGES.items():
        fields = [f'optim.{option}' for option in stage_inputs(stage)[1]]
        rows = [
            [f'`{path}`', format_bounds(FIELDS[path].option), FIELDS[path].description]
            for path in fields
        ]
        head = table(['field', 'values', 'description'], rows) + '\n\n' if rows else ''
        sections.append(f'## {name}\n\n{head}{to_markdown(inspect.getdoc(stage))}\n')
    return '\n'.join(sections)


def commands() -> str:
    """Returns the page of commands, each with the docstring of its module."""
    sections = ['# Commands\n', 'Each command lists its flags with `--help`.\n']
    for command, path in COMMANDS.items():
        text = ast.get_docstring(ast.parse((ROOT / path).read_text()))
        sections.append(f'## {command}\n\n```text\n{text}\n```\n')
    return '\n'.join(sections)


def run_columns() -> str:
    """Returns the page of the columns of a table of runs."""
    rows = [[f'`{name}`', kind.__name__, ''] for name, kind in IDENTITY.items()]
    rows += [
        [f'`{name}`', kind.__name__, f'`{path}` of summary.json']
        for name, (path, kind) in RESULTS.items()
    ]
    rows += [[f'`{name}`', '', f'`{path}` of the config'] for path, name in columns().items()]
    return (
        '# Columns of the table of runs\n\n'
        'The table `runs` of `eval.runs`, the file `cells.parquet` of a sweep and '
        '`eval.runs.frame` have one row per run, with these columns.\n\n'
        + table(['column', 'type', 'source'], rows)
    )


def exports() -> str:
    """Returns the page of configs, each with the family of transformers that its model goes to."""
    rows = []
    for path in sorted((ROOT / 'configs').glob('*.py')):
        config = importlib.import_module(f'configs.{path.stem}').get_config().to_dict()
        for name, value in {'': '', **EXPORTED_WITH.get(path.stem, {})}.items():
            changes = {name: value} if name else {}
            recipe = update_recipe(resolve(single_run_config(config)), changes)
            command = f'configs/{path.name}' + (f' --config.{name}={value}' if name else '')
            rows.append([f'`{command}`', describe_export(recipe)])
    return (
        '# Exports to Hugging Face\n\n'
        '`python -m eval.convert export-hf` writes a model as one of the classes of '
        'transformers. The table gives this class for each config, or the features that the '
        'nearest class lacks. `--print_config` prints this for any config.\n\n'
        + table(['config', 'export'], rows)
    )


def coming_from() -> str:
    """Returns the tables of flags and names of other programs, which tests hold."""
    sections = []
    for program in dict.fromkeys([*ANSWERED, *NOT_HERE]):
        rows = [[f'`{name}`', f'`{ours}`'] for name, ours in ANSWERED.get(program, {}).items()]
        rows += [
            [f'`{name}`', f'{words[0].upper()}{words[1:]}' + (f': `{ours}`' if ours else '')]
            for name, (words, ours) in NOT_HERE.get(program, {}).items()
        ]
        sections.append(f'### {program} flags\n\n{table([program, "Evenkeel"], rows)}\n')
    return '\n'.join(sections)


RESUME_IT = 'Run the same command again. It resumes from the newest checkpoint'
STATUSES = {  # file: {status: (when a process exits with it, the next action of a person)}
    'lm/launch/exit_status.py': {
        'DONE': (
            'The last step is trained. A sweep: every cell has ended, even if it diverged',
            'Read the results',
        ),
        'BAD_INPUT': (
            'A flag, config, text or folder was refused or differs between hosts, a cell of a '
            'sweep failed, or a disk or bucket cannot be written. The last line gives the reason. '
            '`eval.coordinates` also exits with it if a slope fails',
            'Do what the last line says and run the command again',
        ),
        'DIVERGED': (
            'The loss of a single run diverged. The last good checkpoint is printed',
            'Change the config: the same command would diverge again',
        ),
        'RESUME': (
            'Another host did not join, died or stopped responding, or a JobSet was deleted',
            RESUME_IT,
        ),
        'SIGNALLED': (
            'Signal n. The process first saves a checkpoint after SIGTERM (143) and Ctrl-C (130), '
            'and ends at once after other signals',
            RESUME_IT,
        ),
    },
    'tpu/plan.py': {
        'DOES_NOT_FIT': (
            'The step that `tpu.plan` compiles does not fit the memory of a device; with '
            '`--search`, no candidate fits',
            'Apply a change that the plan prints, or use more chips',
        ),
    },
}


def statuses() -> str:
    """Returns the page of exit statuses, with the numbers of their modules.

    Raises ValueError for a status without a description, and for a description without a status.
    """
    rows = []
    for path, words in STATUSES.items():
        numbers = integers(ROOT / path)
        if numbers.keys() != words.keys():
            wrong = ', '.join(sorted(numbers.keys() ^ words.keys()))
            raise ValueError(f'{path}: statuses and descriptions differ: {wrong}')
        for name, number in numbers.items():
            is_signal = name == 'SIGNALLED'
            when, action = words[name]
            again = is_resumable(number + is_signal)
            launcher = 'restarts the command' if again else 'stops'
            status = f'{number} + n' if is_signal else str(number)
            rows.append([number, [status, f'`{name}`', when, launcher, action]])
    head = ['status', 'name', 'meaning', 'launcher', 'next step']
    in_order = [row for _, row in sorted(rows, key=lambda numbered: numbered[0])]
    return (
        '# Exit statuses\n\nA launcher is `tpu.launch`, or the system that it uses (SLURM, JobSet, '
        'Ray). It restarts a command at most `--max_restarts` times. If a job trains on several '
        'hosts, all its processes exit with the status of the job. The names are defined in '
        f'{" and ".join(f"`{path}`" for path in STATUSES)}. All other commands exit with 0 or 1.'
        f'\n\n{table(head, in_order)}\n'
    )


def integers(path: Path) -> dict[str, int]:
    """Returns {name: value} of the integer constants of a module, without importing it."""
    constants = {}
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.Assign):
            (target,) = node.targets
            many = isinstance(target, ast.Tuple)
            values = getattr(node.value, 'elts', [node.value]) if many else [node.value]
            for name, value in zip(target.elts if many else [target], values, strict=True):
                if isinstance(value, ast.Constant) and type(value.value) is int:
                    constants[name.id] = value.value
    return constants
