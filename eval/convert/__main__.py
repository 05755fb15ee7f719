"""Converts checkpoints.

python -m eval.convert fold --checkpoint=DIR --out=DIR --to=rmsnorm|crmsnorm|none [--untie]
"""

from lm.run.process import prepare_process

if __name__ == '__main__':
    prepare_process()  # before JAX is imported

from absl import app, flags

from eval.convert.commands import run
from eval.convert.fold import TARGETS
from lm.run.command import run_main

flags.DEFINE_string('checkpoint', None, 'Workdir, or WORKDIR/checkpoints/STEP; or a URL.')
flags.DEFINE_string('out', None, 'Workdir to write; it must be empty or not exist.')
flags.DEFINE_string('to', None, f'What model.norm becomes: {", ".join(TARGETS)}.')
flags.DEFINE_bool('untie', False, 'Give tied embeddings a readout of their own.')


def main(argv: list[str]) -> None:
    run(argv[1:], flags.FLAGS.flag_values_dict())


if __name__ == '__main__':
    app.run(run_main(main))
