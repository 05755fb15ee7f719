"""What a run says of itself before it trains."""

from lm import data
from lm.config import parts_of
from lm.run.journal import Journal
from lm.run.table import as_table, parameter_count, parameter_rows


def describe(journal: Journal) -> None:
    """Says what is about to be trained, on what text, with which devices and kernels; and notes
    what may not be meant.
    """
    experiment, terminal = journal.experiment, journal.terminal
    learner = experiment.learner
    batch_size = journal.config.data.batch_size
    train, validation = experiment.dataset.train, experiment.dataset.validation
    terminal.say(
        f'text: {train.n_bytes:,} bytes, {train.n_tokens:,} tokens, '
        f'{data.steps_in_epoch(train, batch_size):,} steps an epoch; validation: '
        f'{validation.n_bytes:,} bytes'
    )
    terminal.console.print(as_table(parameter_rows(learner, experiment.mesh)))
    terminal.say(
        f'{parameter_count(learner):,} parameters; mesh {dict(experiment.mesh.shape)}, kernels '
        f'{learner.model.kernels}; mfu is of {experiment.peak / 1e12:.3f} TFLOP/s '
        f'({experiment.peak_source})'
    )
    for note in notes(journal):
        terminal.say(f'NOTE: {note}')


def notes(journal: Journal) -> list[str]:
    """What is allowed and yet may not be meant."""
    config, found = journal.config, []
    epoch = data.steps_in_epoch(journal.experiment.dataset.train, config.data.batch_size)
    batches = journal.next_place().stop
    if batches > epoch:
        found.append(f'{batches} batches go over the text {batches / epoch:.2f} times')
    leaks = {part.name: part.row.leaks for part in parts_of(config) if part.section == 'norm'}
    for name, what in sorted(leaks.items()):
        if what:
            found.append(
                f'in training {name} shows each token {what}, later ones '
                'included: the training loss is not that of a causal model. Evaluation uses '
                'running statistics; compare validation losses.'
            )
    warmup, steps = config.optim.warmup_steps, config.train.steps
    if warmup > steps:
        found.append(
            f'warm-up takes {warmup} steps and the run has {steps}: the learning rate '
            'never reaches its peak'
        )
    return found
