"""Words of a run before it trains: its text, parameters and devices, and notes."""

import collections
import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax

from lm import data
from lm.config.mixture import MixedRows
from lm.config.recipe import Recipe
from lm.devices.check_mesh import list_mesh_notes
from lm.devices.mesh import format_mesh
from lm.model.kernels import select_fused_attention
from lm.record.code import describe_code, running_code
from lm.run.journal import Journal
from lm.run.program import Experiment, Program
from lm.run.tables import (
    make_table,
    optimizer_state_bytes,
    parameter_count,
    parameter_rows,
    trained_count,
)
from modules.options import declared_options


def print_description(journal: Journal) -> None:
    """Says what is about to be trained, on what text, devices and kernels; with notes."""
    experiment, terminal = journal.experiment, journal.terminal
    learner = experiment.learner
    train, validation = experiment.dataset.train, experiment.dataset.validation
    steps = data.steps_in_epoch(train, journal.recipe.data.batch_size)
    epoch = 'before a source repeats' if isinstance(train, MixedRows) else 'an epoch'
    terminal.say(
        f'text: {train.n_bytes:,} bytes, {train.n_tokens:,} tokens, {steps:,} steps {epoch}; '
        f'validation: {validation.n_bytes:,} bytes'
    )
    for k, name in enumerate(train.names if isinstance(train, MixedRows) else ()):
        own = train.sources[k]
        terminal.say(
            f'  {name}: {train.shares.fractions[k]:.4g} of the sequences; {own.n_bytes:,} bytes, '
            f'{own.n_tokens:,} tokens; validation: {validation.sources[k].n_bytes:,} bytes'
        )
    terminal.console.print(make_table(parameter_rows(learner, experiment.mesh)))
    n, kept = parameter_count(learner), optimizer_state_bytes(experiment.state_shapes)
    trained = trained_count(learner)
    share = '' if trained == n else f', {trained:,} of them trained ({trained / n:.2%})'
    terminal.say(
        f'{n:,} parameters{share}, optimizer state {kept / 1e6:,.2f} MB ({kept / n:.2f} bytes a '
        f'parameter); mesh {format_mesh(experiment.mesh)}, kernels {learner.model.kernels}, '
        f'products in {journal.recipe.model.dtype}; mfu is of {experiment.peak / 1e12:.3f} '
        f'TFLOP/s ({experiment.peak_source})'
    )
    if why := select_fused_attention(journal.recipe, experiment.platform)[1]:
        name = learner.model.kernels.kernel_name('attention')
        terminal.say(f'NOTE: kernels.attention=auto is {name} here: {why}')
    of_mesh = list_mesh_notes(journal.recipe, experiment.mesh, experiment.vocab_size)
    for note in (*list_code_notes(journal), *list_run_notes(journal), *of_mesh):
        terminal.say(f'NOTE: {note}')


def list_field_origins(
    overridden: Mapping[str, Any], inherited: Mapping[str, Any], source: str
) -> list[str]:
    """Says which fields are not as in configs/default.py, and which a checkpoint gives."""
    lines = {'not as in configs/default.py': overridden, f'from {source}': inherited}
    return [
        f'{where}: {", ".join(f"{p}={v}" for p, v in fields.items())}'
        for where, fields in lines.items()
        if fields
    ]


def format_memory(experiment: Experiment, program: Program) -> str:
    """Says what a device holds, from the shapes and, once compiled, the compiler's own report."""
    shapes = experiment.state_shapes
    weights = bytes_per_device(shapes.params)
    kept = bytes_per_device((shapes.opt_state, shapes.average))
    working = program.compile_step(1).memory_analysis().temp_size_in_bytes
    return (
        f'a device holds {weights / 1e6:,.2f} MB of parameters, {kept / 1e6:,.2f} MB of optimizer '
        f'state and, in a step, {working / 1e6:,.2f} MB of activations and gradients'
    )


def bytes_per_device(shapes: Any) -> int:
    """Bytes that one device holds of arrays of these shapes, types and shardings."""
    return sum(
        math.prod(leaf.sharding.shard_shape(leaf.shape)) * leaf.dtype.itemsize
        for leaf in jax.tree.leaves(shapes)
    )


def list_code_notes(journal: Journal) -> list[str]:
    """Notes on a run that other code has begun, or trained to its end."""
    if journal.other_code is None:
        return []
    then, now = describe_code(journal.other_code), describe_code(running_code())
    if journal.is_finished:
        return [
            f'other code has trained this run: {then}; this is {now}. To train with this code, '
            'give another --workdir'
        ]
    return [
        f'other code has trained up to step {journal.step}: {then}; from there on it is {now}. To '
        'train all steps with this code, give another --workdir'
    ]


def list_run_notes(journal: Journal) -> list[str]:
    """Notes on what is allowed and may yet be a mistake, given the text of the run."""
    recipe, found = journal.recipe, []
    rows, batch_size = journal.experiment.dataset.train, recipe.data.batch_size
    batches = journal.next_place().stop
    if isinstance(rows, MixedRows):
        counts = rows.shares.count_rows(batches * batch_size)
        for name, count, own in zip(rows.names, counts, rows.sources, strict=True):
            if count > len(own):
                times = count / len(own)
                found.append(f'{batches} batches go over the text of {name} {times:.2f} times')
    elif batches > (epoch := data.steps_in_epoch(rows, batch_size)):
        found.append(f'{batches} batches go over the text {batches / epoch:.2f} times')
    return found + list_config_notes(recipe)


def list_config_notes(recipe: Recipe) -> list[str]:
    """Notes on what a config allows and may yet be a mistake, whatever the text."""
    leaks = {norm.name: norm.row.leaks for norm in recipe.norms.values() if norm.row.leaks}
    found = [
        f'in training {name} shows each token {what}, later ones included: the training loss is '
        'not that of a causal model. Evaluation uses running statistics; compare validation losses.'
        for name, what in sorted(leaks.items())
    ]
    found += _list_unreached(recipe)
    if recipe.train.trainable != 'all' and not recipe.train.init_from:
        found.append(
            f'train.trainable={recipe.train.trainable} without train.init_from: all other '
            'parameters stay as they were drawn'
        )
    return [*found, *recipe.average.row.notes(recipe, recipe.average)]


def list_sweep_notes(recipes: Sequence[Recipe]) -> list[str]:
    """`notes_of` of many runs, each with the number of runs that it concerns unless that is all."""
    runs, counts = (
        len(recipes),
        collections.Counter(itertools.chain(*map(list_config_notes, recipes))),
    )
    return [note if n == runs else f'{n} of {runs} runs: {note}' for note, n in counts.items()]


def _list_unreached(recipe: Recipe) -> Iterator[str]:
    """Notes on parts that need as long as the run, or longer, to get where they are as published.

    Options say what they are counted in; a row with several combines them by `lasts`.
    """
    steps = recipe.train.steps
    lengths = {'steps': steps, 'updates': steps * recipe.train.microbatches}
    found = {}  # a norm may stand at several places
    for part in recipe.parts:
        counted = {name: d for name, d in declared_options(part.row).items() if d.option.time_unit}
        if not counted:
            continue
        values = {name: part.options[name] for name in counted}
        (unit,) = {declared.option.time_unit for declared in counted.values()}
        wanted, length = part.row.lasts(recipe.model.n_layers, **values), lengths[unit]
        if wanted >= length:
            why = ', '.join(f'{n}={v} ({counted[n].option.description})' for n, v in values.items())
            text = f'{part.name} needs more than {wanted} {unit} and the run has {length}: {why}'
            found.setdefault(text, f'{part.path}={text}')
    yield from found.values()
