"""Converts checkpoints.

python -m eval.convert fold --checkpoint=DIR --out=DIR --to=rmsnorm|crmsnorm|none [--untie]

fold: the same function with simpler norms, or none, and without reparametrisation
(`eval.convert.fold`).
"""

from collections.abc import Mapping, Sequence
from typing import Any

from eval.convert.converted import write
from eval.convert.fold import fold_checkpoint
from eval.load import load
from lm.buckets import local_path
from modules.choices import choose


def fold(options: Mapping[str, Any]) -> None:
    out = local_path(options['out'], '--out')
    checkpoint = load(options['checkpoint'])
    folded = fold_checkpoint(checkpoint, options['to'], options['untie'])
    meta = checkpoint.meta | {'folded_from': str(checkpoint.path)}
    write(out, folded.recipe, folded.weights, checkpoint.tokenizer, checkpoint.step, meta)
    of = ', '.join(f'{value:.1e} in {dtype}' for dtype, value in folded.differences.items())
    before, after = checkpoint.recipe.model, folded.recipe.model
    print(f'{out}: model.norm={before.norm} -> {after.norm}')
    if before.reparam != after.reparam:
        print(f'model.reparam={before.reparam} -> {after.reparam}')
    if folded.kept:
        print(f'the norms stay: {folded.kept}')
    print(f'largest difference of logits, relative to the largest logit: {of}')


COMMANDS = {'fold': (fold, ('checkpoint', 'out', 'to'))}  # and the flags it needs


def run(arguments: Sequence[str], options: Mapping[str, Any]) -> None:
    """The command that `arguments` names; ValueError where it is none, or lacks a flag."""
    if len(arguments) != 1:
        raise ValueError(
            f'eval.convert takes one command ({", ".join(COMMANDS)}), then flags; got '
            f'{" ".join(arguments) or "none"}'
        )
    command, needed = choose(COMMANDS, arguments[0], 'the command of eval.convert')
    missing = [f'--{name}' for name in needed if options[name] is None]
    if missing:
        raise ValueError(f'eval.convert {arguments[0]} needs {", ".join(missing)} too')
    command(options)
