"""What published rules say of learning rate, batch size and the allocation of compute.

    python -m eval.rules --parameters=124e6 --tokens=2.5e9 [--batch_tokens=5e5]
        [--base_lr=3e-3 --base_batch=1e5] [--loss=3.3] [--out=rules.json]

A row a rule: its value, the range of the experiments that it was fitted on, whether this size lies
within, and the paper; below, where the constants were read. With a batch, what it costs against the
critical one; with a learning rate that was found at another batch, that rate here.
"""

from lm.run.process import prepare_process

if __name__ == '__main__':
    prepare_process()  # before JAX is imported

from pathlib import Path

from absl import app, flags

from lm.run.command import run_main
from eval.rules.published import Given, as_text, published, write

PARAMETERS = flags.DEFINE_float('parameters', None, 'Parameters of the model, without embeddings.')
TOKENS = flags.DEFINE_float('tokens', None, 'Tokens to train on.')
BATCH = flags.DEFINE_float('batch_tokens', None, 'Tokens in a batch.')
BASE_LR = flags.DEFINE_float('base_lr', None, 'Learning rate that was found with --base_batch.')
BASE_BATCH = flags.DEFINE_float('base_batch', None, 'Tokens in the batch of --base_lr.')
LOSS = flags.DEFINE_float('loss', None, 'Loss in nats, for the critical batch; else by compute.')
OUT = flags.DEFINE_string('out', None, 'JSON file to write.')


def main(_) -> None:
    given = Given(
        parameters=PARAMETERS.value,
        tokens=TOKENS.value,
        batch_tokens=BATCH.value,
        base_lr=BASE_LR.value,
        base_batch=BASE_BATCH.value,
        loss=LOSS.value,
    )
    found = published(given)
    if OUT.value:
        write(Path(OUT.value), given, found)
    print(as_text(found))


if __name__ == '__main__':
    app.run(run_main(main))
