"""Converts checkpoints.

python -m eval.convert fold --checkpoint=DIR --out=DIR --to=rmsnorm|crmsnorm|none [--untie]

fold: the same function with simpler norms, or none, and without reparametrisation
(`eval.convert.fold`).
"""

from lm.launch.before_jax import prepare_process

if __name__ == '__main__':
    prepare_process()  # before JAX is imported

from collections.abc import Mapping, Sequence
from typing import Any

from absl import app, flags

from eval.convert.fold import TARGETS, fold_checkpoint, write
from eval.load import define_checkpoint, load
from lm.launch.command import run_main
from lm.storage.buckets import local_path


def run(arguments: Sequence[str], options: Mapping[str, Any]) -> None:
    """Folds as the flags say; ValueError for another command, or where a flag is missing."""
    if list(arguments) != ['fold']:
        raise ValueError(
            'eval.convert takes one command (fold), then flags; got '
            f'{" ".join(arguments) or "none"}'
        )
    if missing := [f'--{name}' for name in ('checkpoint', 'out', 'to') if options[name] is None]:
        raise ValueError(f'eval.convert fold needs {", ".join(missing)} too')
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


def main(argv: list[str]) -> None:
    run(argv[1:], flags.FLAGS.flag_values_dict())


if __name__ == '__main__':  # only here: other programs have flags of these names
    define_checkpoint()
    flags.DEFINE_string('out', None, 'Workdir to write; it must be empty or not exist.')
    flags.DEFINE_string('to', None, f'What model.norm becomes: {", ".join(TARGETS)}.')
    flags.DEFINE_bool('untie', False, 'Give tied embeddings a readout of their own.')
    app.run(run_main(main))
