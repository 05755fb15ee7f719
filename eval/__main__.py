"""Evaluates a checkpoint.

python -m eval --checkpoint=DIR --suite=NAME[,NAME] [--out=FILE.json]
"""

from lm.launch.before_jax import prepare_process

if __name__ == '__main__':
    prepare_process()  # before JAX is imported

import json

from absl import app, flags

from eval.console.listings import first_sentence
from eval.load import define_checkpoint, load
from eval.suites import SUITES
from lm.launch.command import parse_flags, run_main
from lm.record.workdir import write_json
from lm.storage.buckets import local_path
from modules.choices import choose

CHECKPOINT = define_checkpoint()
SUITE = flags.DEFINE_list('suite', [], f'Of {", ".join(SUITES)}; several with commas.')
OUT = flags.DEFINE_string('out', None, 'JSON file to write the results to.')


def main(_) -> None:
    if not CHECKPOINT.value or not SUITE.value:
        suites = '; '.join(
            f'{name}: {first_sentence(suite.function.__doc__)}' for name, suite in SUITES.items()
        )
        raise ValueError(
            f'--checkpoint=WORKDIR and --suite=NAME[,NAME] are needed. Suites: {suites}.'
        )
    out = local_path(OUT.value, '--out') if OUT.value else None
    suites = {name: choose(SUITES, name, '--suite') for name in SUITE.value}
    checkpoint = load(CHECKPOINT.value)
    results = {name: dict(suite.function(checkpoint).numbers) for name, suite in suites.items()}
    record = {'checkpoint': CHECKPOINT.value, 'step': checkpoint.step, **results}
    print(json.dumps(record, indent=2))
    if out:
        write_json(out, record)


if __name__ == '__main__':
    app.run(run_main(main), flags_parser=parse_flags)
