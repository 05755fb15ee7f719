"""Carries out tutorials as they are written: python -m tests.tutorials [NAME...]

Each page of docs/tutorials is done in a copy of the project. A Python block that begins with a path
is a file and a diff changes files; other Python runs in one process, as in a notebook; indented
lines are commands. Their output replaces the block of text that follows; a comment above the block,
`<!-- shows: PATTERN -->`, selects its lines. Pictures come from runs/; a page's first lines state
its minutes. The pages of MODELS need a model of their reader. All pages take about 30 minutes
on two cores.
"""

import contextlib
import io
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from tests import ROOT
from tests.fixtures.chat import tiny_model
from tests.pages import TUTORIALS, add_lines, arguments
from tests.xla import ONE_DEVICE

STEP = re.compile(
    r'^```(?P<language>python|diff)\n(?P<code>.*?)^```$|(?P<commands>(?:^    uv run [^\n]*\n)+)',
    re.DOTALL | re.MULTILINE,
)
PRINTED = re.compile(
    r'\n*(?:<!-- status: (?P<status>\d+) -->\n)?(?:<!-- shows: (?P<shows>[^\n]*) -->\n)?'
    r'```text\n(?P<text>.*?)^```$',
    re.DOTALL | re.MULTILINE,
)
MINUTES = re.compile(r'^\*Takes .* on two CPU cores\.\*$', re.MULTILINE)
PICTURES = ROOT / 'docs' / '_static' / 'tutorials'
PICTURE = re.compile(r'\]\(\.\./_static/tutorials/([^)]+)\)')
MODELS = {'own_conversations': 'model'}  # page: folder of a model, which must be in this one
HERE = '--here'  # in this copy
SMALLER = {  # axes of sweeps, in a small way: one program of a kind
    r"'train.seed': [^\n]*": "'train.seed': (0, 1),",
    r"'optim.lr': [^\n]*": "'optim.lr': (1e-3, 1e-2),",
    r"\n *'power_mean:power=[28]\.0',": '',
    r"\n *\{'model\.reparam': 'none', 'model\.qk_norm': 'rmsnorm'\},": '',
}
FILES = [  # that pytest is asked for in a small way: to collect all tests takes 10 s
    'tests/modules/test_norms.py',
    'tests/modules/test_options.py',
    'tests/modules/test_params.py',
    'tests/test_layering.py',
]
LEFT_OUT = {  # of a small way: why
    'tpu.plan': 'minutes; test_tutorials.py compares the lines, tests/tpu/test_plan.py is smaller',
    'eval.coordinates': 'tests/eval/test_coordinates.py has smaller models',
}


def copy_project(folder: Path) -> None:
    """Copies the files of the project, except those that git ignores."""
    command = ['git', 'ls-files', '--cached', '--others', '--exclude-standard', '-z']
    listed = subprocess.check_output(command, cwd=ROOT, text=True)
    for name in filter(None, listed.split('\0')):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, folder / name)


def command(words: list[str], folder: Path, status: int) -> str:
    """Runs a program in the copy; returns its output and errors."""
    program = words if words[0].endswith('.py') else ['-m', *words]
    done = subprocess.run(
        [sys.executable, *program],
        cwd=folder,
        env=os.environ | {'PYTHONPATH': str(folder)},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    if done.returncode != status:
        raise RuntimeError(f'{" ".join(words)} ended with {done.returncode}:\n{done.stdout}')
    return done.stdout


def python(code: str, names: dict) -> str:
    """Runs a block with the names of earlier blocks; returns its output."""
    stdout = io.StringIO()
    with contextlib.redirect_stdout(stdout):
        exec(compile(code, 'tutorial', 'exec'), names)
    return stdout.getvalue()


def change(folder: Path, language: str, code: str) -> None:
    """Writes the file of a Python block, or changes the files of a diff."""
    if language == 'python':
        path, text = code.split('\n', 1)
        (folder / path.removeprefix('# ')).write_text(text)
        return
    for path, lines in re.findall(r'# (\S+)\n((?:[+ ].*\n)+)', code):
        (folder / path).write_text(add_lines((folder / path).read_text(), lines.splitlines()))


def select_lines(printed: str, pattern: str | None) -> str:
    """Returns the printed lines that match a pattern, with ... for others."""
    if pattern is None:
        return printed
    lines = []
    for line in printed.splitlines():
        shown_line = line if re.search(pattern, line) else '...'
        if shown_line != '...' or lines[-1:] != ['...']:
            lines.append(shown_line)
    return '\n'.join(lines) + '\n'


def carry_out(page: str, folder: Path, small: bool = False) -> str:
    """Carries out a page in a copy of the project. small: whether to use the sizes of tests.

    Returns the page with the new output. Raises RuntimeError with the output of a command that
    fails, AssertionError if no line matches a pattern of the page, and any error of a Python block.
    """
    names, parts, at = {'__name__': 'tutorial'}, [], 0
    for step in STEP.finditer(page):
        language, code, commands = step.group('language', 'code', 'commands')
        block, printed = PRINTED.match(page, step.end()), ''
        if commands:
            for line in commands.splitlines():
                if not (small and any(word in line for word in LEFT_OUT)):
                    status = int((block and block['status']) or 0)
                    words = arguments(line.strip(), small)
                    words += FILES if small and words[0] == 'pytest' else []
                    printed += command(words, folder, status)
        elif language == 'diff' or re.match(r'# \w+/', code):
            for axis, fewer in SMALLER.items() if small else ():
                code = re.sub(axis, fewer, code)
            change(folder, language, code)
        else:
            printed = python(code, names)
        if block and printed:
            text = select_lines(printed.rstrip('\n') + '\n', block['shows'])
            assert small or text.strip('.\n'), f'{block["shows"]} finds no line of\n{printed}'
            parts += [page[at : block.start('text')], text]
            at = block.end('text')
    return ''.join([*parts, page[at:]])


def bring_model(model: str, folder: Path, small: bool) -> None:
    """Links the model of a reader into a copy of the project, or writes a tiny random one there."""
    if small:
        tiny_model.write(folder / model)
    elif (ROOT / model).is_dir():
        (folder / model).symlink_to(ROOT / model)
    else:
        raise FileNotFoundError(f'{ROOT / model} must hold the model that the page begins with')


def renew(name: str, small: bool = False) -> None:
    """Carries out a page in a copy of the project, and writes the page with its output here.

    small: whether to use small sizes, to test whether it works.
    """
    with tempfile.TemporaryDirectory() as scratch:
        folder, started = Path(scratch), time.monotonic()
        copy_project(folder)
        if name in MODELS:
            bring_model(MODELS[name], folder, small)
        subprocess.run(
            [sys.executable, '-m', 'tests.tutorials', HERE, name, *['small'] * small],
            cwd=folder,
            env=os.environ | {'PYTHONPATH': scratch} | ({'XLA_FLAGS': ONE_DEVICE} if small else {}),
            check=True,
        )
        if small:
            return
        minutes = max(1, round((time.monotonic() - started) / 60))
        page = (folder / TUTORIALS[name].relative_to(ROOT)).read_text()
        note = f'*Takes {minutes} minute{"s" * (minutes > 1)} on two CPU cores.*'
        TUTORIALS[name].write_text(MINUTES.sub(note, page))
        PICTURES.mkdir(parents=True, exist_ok=True)
        for picture in PICTURE.findall(page):
            shutil.copy(next(folder.glob(f'runs/**/{picture}')), PICTURES)
    print(f'{name}: {note}', flush=True)


def main(arguments: list[str]) -> None:
    if arguments[:1] == [HERE]:
        path = TUTORIALS[arguments[1]]
        path.write_text(carry_out(path.read_text(), ROOT, small='small' in arguments))
        return
    for name in arguments or TUTORIALS:
        if not arguments and name in MODELS and not (ROOT / MODELS[name]).is_dir():
            print(f'{name}: left out, as {ROOT / MODELS[name]} has no model', flush=True)
            continue
        renew(name)


if __name__ == '__main__':
    main(sys.argv[1:])
