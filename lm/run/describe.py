"""What a run says of itself before it trains."""

import collections
import math
from collections.abc import Iterator, Sequence
from typing import Any

import jax

from lm import data
from lm.config.mixture import Mixed
from lm.config.recipe import Recipe
from lm.data import Rows
from lm.devices.check_mesh import notes_of_mesh
from lm.devices.mesh import mesh_words
from lm.run.experiment import Experiment
from lm.run.journal import Journal
from lm.run.parameter_table import as_table, optimizer_state_bytes, parameter_count, parameter_rows
from lm.run.program import Program
from modules.options import options


def describe(journal: Journal) -> None:
    """Says what is about to be trained, on what text, with which devices and kernels; and notes
    what may not be meant.
    """
    experiment, terminal = journal.experiment, journal.terminal
    learner = experiment.learner
    batch_size = journal.recipe.data.batch_size
    train, validation = experiment.dataset.train, experiment.dataset.validation
    epoch = 'before a source repeats' if isinstance(train, Mixed) else 'an epoch'
    terminal.say(
        f'text: {train.n_bytes:,} bytes, {train.n_tokens:,} tokens, '
        f'{data.steps_in_epoch(train, batch_size):,} steps {epoch}; validation: '
        f'{validation.n_bytes:,} bytes'
    )
    for line in of_sources(train, validation):
        terminal.say(line)
    terminal.console.print(as_table(parameter_rows(learner, experiment.mesh)))
    n, kept = parameter_count(learner), optimizer_state_bytes(experiment.state_shapes)
    terminal.say(
        f'{n:,} parameters, optimizer state {kept / 1e6:,.2f} MB ({kept / n:.2f} bytes a '
        f'parameter); mesh {mesh_words(experiment.mesh)}, kernels '
        f'{learner.model.kernels}; mfu is of {experiment.peak / 1e12:.3f} TFLOP/s '
        f'({experiment.peak_source})'
    )
    noted = notes_of_mesh(journal.recipe, experiment.mesh, experiment.vocab_size)
    for note in (*notes(journal), *noted):
        terminal.say(f'NOTE: {note}')


def memory_words(experiment: Experiment, program: Program) -> str:
    """What a device holds, by the shapes and by the compiler's own report. To be called when the
    step is compiled.
    """
    shapes = experiment.state_shapes
    weights = bytes_a_device(shapes.params)
    kept = bytes_a_device((shapes.opt_state, shapes.average))
    working = program.compiled(1).memory_analysis().temp_size_in_bytes
    return (
        f'a device holds {weights / 1e6:,.2f} MB of parameters, {kept / 1e6:,.2f} MB of optimizer '
        f'state and, in a step, {working / 1e6:,.2f} MB of activations and gradients'
    )


def bytes_a_device(shapes: Any) -> int:
    """Of arrays of these shapes, types and shardings."""
    return sum(
        math.prod(leaf.sharding.shard_shape(leaf.shape)) * leaf.dtype.itemsize
        for leaf in jax.tree.leaves(shapes)
    )


def of_sources(train: Rows | Mixed, validation: Rows | Mixed) -> Iterator[str]:
    """A line of each source of a mixture."""
    if not isinstance(train, Mixed):
        return
    for k, (name, share) in enumerate(zip(train.names, train.shares.of_each, strict=True)):
        yield (
            f'  {name}: {share:.4g} of the sequences; {train.parts[k].n_bytes:,} bytes, '
            f'{train.parts[k].n_tokens:,} tokens; validation: {validation.parts[k].n_bytes:,} bytes'
        )


def notes(journal: Journal) -> list[str]:
    """What is allowed and yet may not be meant."""
    recipe, found = journal.recipe, []
    rows, batch_size = journal.experiment.dataset.train, recipe.data.batch_size
    batches = journal.next_place().stop
    if isinstance(rows, Mixed):
        counts = rows.shares.counts(batches * batch_size)
        for name, count, own in zip(rows.names, counts, rows.parts, strict=True):
            if count > len(own):
                times = count / len(own)
                found.append(f'{batches} batches go over the text of {name} {times:.2f} times')
    elif batches > (epoch := data.steps_in_epoch(rows, batch_size)):
        found.append(f'{batches} batches go over the text {batches / epoch:.2f} times')
    return found + notes_of(recipe)


def notes_of(recipe: Recipe) -> list[str]:
    """What a config allows and yet may not be meant, whatever the text."""
    return [
        *_leaks(recipe),
        *_never_reached(recipe),
        *_never_trained(recipe),
        *recipe.average.row.notes(recipe, recipe.average),
    ]


def notes_of_all(recipes: Sequence[Recipe]) -> list[str]:
    """`notes_of` each of many runs, with how many each is of where it is not of all."""
    counts = collections.Counter(note for recipe in recipes for note in notes_of(recipe))
    return [
        note if n == len(recipes) else f'{n} of {len(recipes)} runs: {note}'
        for note, n in counts.items()
    ]


def _leaks(recipe: Recipe) -> Iterator[str]:
    leaks = {norm.name: norm.row.leaks for norm in recipe.norms.values()}
    for name, what in sorted(leaks.items()):
        if what:
            yield (
                f'in training {name} shows each token {what}, later ones included: the training '
                'loss is not that of a causal model. Evaluation uses running statistics; compare '
                'validation losses.'
            )


def _never_reached(recipe: Recipe) -> Iterator[str]:
    """Of each part that would take as long as the run or longer to get where it is as published.

    Options say what they are counted in; a row with several says by `lasts` what they make.
    """
    lengths = {
        'steps': recipe.train.steps,
        'updates': recipe.train.steps * recipe.train.microbatches,
    }
    found = {}  # a norm may stand at several places
    for part in recipe.parts:
        counted = {name: d for name, d in options(part.row).items() if d.option.counted_in}
        if not counted:
            continue
        values = {name: part.options[name] for name in counted}
        (unit,) = {declared.option.counted_in for declared in counted.values()}
        wanted, length = part.row.lasts(recipe.model.n_layers, **values), lengths[unit]
        if wanted >= length:
            why = ', '.join(f'{n}={v} ({counted[n].option.words})' for n, v in values.items())
            text = f'{part.name} needs more than {wanted} {unit} and the run has {length}: {why}'
            found.setdefault(text, f'{part.path}={text}')
    yield from found.values()


def _never_trained(recipe: Recipe) -> Iterator[str]:
    train = recipe.train
    if train.trainable != 'all' and not train.init_from:
        yield (
            f'train.trainable={train.trainable} without train.init_from: all other parameters stay '
            'as they were drawn'
        )
