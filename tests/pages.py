"""The pages of the project, and the commands in them."""

import re
import shlex

from tests import ROOT

FENCED = re.compile(r'(^```.*?^```$)', re.DOTALL | re.MULTILINE)


def shrink_options(page: str) -> str:
    """Returns a page with its headings one level lower: it is a section then."""
    parts = FENCED.split(page)
    return ''.join(
        part if part.startswith('```') else re.sub(r'^#', '##', part, flags=re.MULTILINE)
        for part in parts
    )


FRONT_PAGE = (ROOT / 'README.md').read_text()
GUIDE = [path.read_text() for path in sorted((ROOT / 'docs' / 'guide').glob('*.md'))]
TEXT = '\n'.join([FRONT_PAGE, *map(shrink_options, GUIDE)])
TUTORIALS = {path.stem: path for path in sorted((ROOT / 'docs' / 'tutorials').glob('*.md'))}
SMALL = {  # flags of train.py, where the line has no value of its own
    'config.model.d_model': 16,
    'config.model.n_layers': 1,
    'config.model.d_ff': 32,
    'config.data.source': 'synthetic:markov',
    'config.data.tokenizer': 'byte',
    'config.data.seq_len': 16,
    'config.data.cache_dir': 'cache',
    'config.train.steps': 3,
    'config.train.eval_batches': 1,
}
MORE = {  # flags for the lines with these words
    # within so few steps
    'layernorm_removal': {'config.norm.removal_start': 1, 'config.norm.removal_gap': 0},
    'eval.generate': {'tokens': 3},
    # short rows are parts of rows, and each stage needs a step
    'train.stages=': {'config.data.seq_len': 256, 'config.train.steps': 20},
    'optim.schedule=stages': {'config.train.steps': 20, 'config.optim.warmup_steps': 0},
}


def arguments(line: str, small: bool = True) -> list[str]:
    """Returns [program, argument, ...] of a line; the program is a path or a module.

    small: whether to add the small sizes of tests.
    """
    words = shlex.split(line, comments=True)
    for word in ('uv', 'run', '--no-dev', 'python', '-m'):
        words = words[1:] if words[0] == word else words
    if not small:
        return words
    added = SMALL if words[0] == 'train.py' and '--config' in line else {}
    if 'config.data.source=chat:' in line:  # its model is imported, and has sizes and a tokenizer
        added = {'config.data.cache_dir': 'cache'}
    if 'train.branch_from' in line:  # the rest follows its parent
        added = {}
    for part, flags in MORE.items():
        added = added | (flags if part in line else {})
    names = {word.lstrip('-').split('=')[0] for word in words}
    return words + [f'--{name}={value}' for name, value in added.items() if name not in names]


def add_lines(text: str, diff: list[str]) -> str:
    """Returns a text with each line of + after the line without + before it; imports go to the
    top.
    """
    lines, at = text.splitlines(), 0
    for line in diff:
        if line.startswith('+from '):
            at = next(i for i, existing in enumerate(lines) if existing.startswith('from '))
            lines.insert(at, line[1:])
        elif line.startswith('+'):
            at += 1
            lines.insert(at, line[1:])
        else:
            at = next(i for i, existing in enumerate(lines) if existing.startswith(line[1:]))
    return '\n'.join(lines) + '\n'
