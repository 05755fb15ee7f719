"""Converts checkpoints.

python -m eval.convert fold --checkpoint=DIR --out=DIR --to=rmsnorm|crmsnorm|none [--untie]

fold: the same function with simpler norms, or none (`eval.fold`).
"""

from lm.startup import prepare_process

if __name__ == '__main__':
    prepare_process()  # before JAX is imported

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from absl import app, flags

from eval.converted import write
from eval.fold import TARGETS, fold_checkpoint
from eval.load import load
from eval.program import run_main
from modules.choices import choose


def fold(options: Mapping[str, Any]) -> None:
    checkpoint, out = load(options['checkpoint']), Path(options['out'])
    folded = fold_checkpoint(checkpoint, options['to'], options['untie'])
    meta = checkpoint.meta | {'folded_from': str(checkpoint.path)}
    write(out, folded.config, folded.weights, checkpoint.tokenizer, checkpoint.step, meta)
    of = ', '.join(f'{value:.1e} in {dtype}' for dtype, value in folded.differences.items())
    print(f'{out}: model.norm={checkpoint.config.model.norm} -> {folded.config.model.norm}')
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


def main(argv: list[str]) -> None:
    run(argv[1:], flags.FLAGS.flag_values_dict())


if __name__ == '__main__':  # only here, since other programs have flags of these names too
    flags.DEFINE_string('checkpoint', None, 'Workdir, or WORKDIR/checkpoints/STEP.')
    flags.DEFINE_string('out', None, 'Workdir to write; it must be empty or not exist.')
    flags.DEFINE_string('to', None, f'What model.norm becomes: {", ".join(TARGETS)}.')
    flags.DEFINE_bool('untie', False, 'Give tied embeddings a readout of their own.')
    app.run(run_main(main))
