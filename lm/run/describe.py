"""Texts about a run before it trains: its data, parameters and devices, and notes."""

import collections
import itertools
import math
import shutil
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax

from lm import data
from lm.config.checkpoint_steps import find_unreached, list_checkpoint_steps
from lm.config.mixture import MixedRows, reads_chats, split_by_source
from lm.config.recipe import Recipe
from lm.devices.check_mesh import list_mesh_notes
from lm.devices.mesh import format_mesh
from lm.model.kernels import (
    format_kernels,
    list_attention_kernels,
    list_kernels,
    select_fused_attention,
)
from lm.record.code import describe_code, running_code
from lm.run.journal import Journal
from lm.run.program import Experiment, Program
from lm.run.stage_table import list_stage_notes, stage_rows
from lm.run.tables import (
    group_parameters,
    make_table,
    optimizer_state_bytes,
    parameter_count,
    parameter_rows,
    trained_count,
)
from modules.options import declared_options


def print_description(journal: Journal) -> None:
    """Prints the text, parameters, devices and kernels of a run before it trains, with notes."""
    experiment, terminal = journal.experiment, journal.terminal
    learner = experiment.learner
    train, validation = experiment.dataset.train, experiment.dataset.validation
    steps = data.steps_in_epoch(train, journal.recipe.data.batch_size)
    epoch = 'before a source repeats' if isinstance(train, MixedRows) else 'per epoch'
    epoch += f' at batches of {journal.recipe.data.batch_size}' * bool(journal.recipe.train.stages)
    # Of conversations, only the answers are counted.
    label = 'text and answers' if isinstance(train, MixedRows) else 'answers'
    label = label if reads_chats(journal.recipe.data) else 'text'
    counts = f'{train.n_tokens:,} tokens, {train.n_bytes / 1e6:,.2f} MB'
    terminal.say(
        f'{label}: {counts}, {steps:,} steps {epoch}; '
        f'validation {validation.n_tokens:,} tokens, {validation.n_bytes / 1e6:,.2f} MB'
    )
    if isinstance(train, MixedRows):
        validation_parts = split_by_source(validation)
        for i, name in enumerate(train.names):
            part = train.sources[i]
            line = f'  {name}: {train.shares.fractions[i]:.4g} of the sequences; '
            line += f'{part.n_tokens:,} tokens, {part.n_bytes / 1e6:,.2f} MB'
            if name in validation_parts:
                line += f'; validation {validation_parts[name].n_tokens:,} tokens'
            terminal.say(line)
    rows = parameter_rows(learner, experiment.mesh)
    groups, common = group_parameters(rows)
    n, state_bytes = parameter_count(learner), optimizer_state_bytes(experiment.state_shapes)
    trained = trained_count(learner)
    share = '' if trained == n else f', {trained:,} of them trained ({trained / n:.2%})'
    terminal.say(
        f'model: {n:,} parameters{share}; optimizer state {state_bytes / 1e6:,.2f} MB '
        f'({state_bytes / n:.2f} bytes per parameter)'
    )
    terminal.console.print(make_table(groups))
    settings = ', '.join(f'{name} {value}' for name, value in common.items())
    if common:
        terminal.say(f'all: {settings}')
    kernels = list_kernels(learner.recipe, learner.model.kernels)
    terminal.say(f'kernels: {format_kernels(kernels)}')
    terminal.say(
        f'mesh {format_mesh(experiment.mesh)}, {journal.recipe.model.dtype} matmuls; mfu is '
        f'relative to {experiment.peak / 1e12:.3f} TFLOP/s ({experiment.peak_source})'
    )
    ancestors = journal.counters.ancestors
    first_step = ancestors[-1]['step'] if ancestors else 0
    shapes, folder = experiment.state_shapes, journal.workdir
    for line in list_disk_use([journal.recipe], shapes, folder, first_step):
        terminal.say(line)
    if journal.recipe.train.stages is not None:
        terminal.console.print(make_table(stage_rows(journal.recipe)))
    names = list_attention_kernels(journal.recipe, learner.model.kernels)
    for entry, kind in journal.recipe.kinds.items():
        if reason := select_fused_attention(kind, experiment.platform)[1]:
            place = f' in the blocks {entry}' * bool(entry)
            terminal.say(f'NOTE: kernels.attention=auto is {names[entry]} here{place}: {reason}')
    mesh_notes = list_mesh_notes(journal.recipe, experiment.mesh, experiment.vocab_size)
    for note in (*list_code_notes(journal), *list_run_notes(journal), *mesh_notes):
        terminal.say(f'NOTE: {note}')


def list_disk_use(
    recipes: Sequence[Recipe], shapes: Any, folder: Path, first_step: int = 0
) -> list[str]:
    """Returns lines on the disk that permanent checkpoints need; [] without train.checkpoint_steps.

    Args:
      recipes: the runs of a program.
      shapes: the state of one of them.
      folder: where they are stored; it need not exist yet.
      first_step: the step at which a branch begins.
    """
    counts = []
    for recipe in recipes:
        n_listed = sum(step >= first_step for step in list_checkpoint_steps(recipe))
        counts.append((n_listed, n_listed + recipe.train.keep_last + recipe.train.keep_best))
    n_listed, n_most = (sum(column) for column in zip(*counts, strict=True))
    if not n_listed:
        return []
    n_bytes = sum(math.prod(x.shape) * x.dtype.itemsize for x in jax.tree.leaves(shapes))
    place = next(path for path in (folder.absolute(), *folder.absolute().parents) if path.exists())
    free = shutil.disk_usage(place).free
    line = (
        f'checkpoints: {n_listed} stay by train.checkpoint_steps, and the newest and best beside '
        f'them make at most {n_most}, of {format_bytes(n_bytes)} each: '
        f'{format_bytes(n_most * n_bytes)}; {format_bytes(free)} are free'
    )
    too_large = f'NOTE: {folder} has not enough space for these checkpoints'
    return [line, *[too_large] * (n_most * n_bytes > free)]


def format_bytes(n_bytes: float) -> str:
    """Returns a number of bytes in MB, or in GB from 10 GB on."""
    return f'{n_bytes / 1e9:,.1f} GB' if n_bytes >= 1e10 else f'{n_bytes / 1e6:,.2f} MB'


def list_field_origins(
    overridden: Mapping[str, Any], inherited: Mapping[str, Any], source: str
) -> list[str]:
    """Returns lines with the fields that differ from configs/default.py or come from a checkpoint.

    Args:
      overridden: fields that differ from configs/default.py.
      inherited: fields that a checkpoint gives.
      source: name of that checkpoint.
    """
    lines = {'changed from configs/default.py': overridden, f'from {source}': inherited}
    return [
        f'{origin}: {", ".join(f"{path}={value}" for path, value in fields.items())}'
        for origin, fields in lines.items()
        if fields
    ]


def format_memory(experiment: Experiment, program: Program) -> str:
    """Returns a line with the memory per device, from the shapes and the compiler's own report."""
    shapes = experiment.state_shapes
    weights = bytes_per_device(shapes.params)
    state = bytes_per_device((shapes.opt_state, shapes.average))
    temporaries = max(
        step.memory_analysis().temp_size_in_bytes for step in program.compiled.values()
    )
    return (
        f'memory per device: {weights / 1e6:,.2f} MB parameters, {state / 1e6:,.2f} MB optimizer '
        f'state, {temporaries / 1e6:,.2f} MB activations and gradients'
    )


def bytes_per_device(shapes: Any) -> int:
    """Returns the bytes that one device holds of arrays of these shapes, types and shardings."""
    return sum(
        math.prod(leaf.sharding.shard_shape(leaf.shape)) * leaf.dtype.itemsize
        for leaf in jax.tree.leaves(shapes)
    )


def list_code_notes(journal: Journal) -> list[str]:
    """Returns notes about a run that other code has begun, or trained to its end."""
    if journal.other_code is None:
        return []
    previous, current = describe_code(journal.other_code), describe_code(running_code())
    if journal.is_finished:
        return [
            f'this run was trained with {previous}; the code is now {current}. To train with this '
            'code, use another --workdir'
        ]
    return [
        f'steps up to {journal.step} were trained with {previous}; later steps use {current}. To '
        'train all steps with this code, use another --workdir'
    ]


def list_run_notes(journal: Journal) -> list[str]:
    """Returns notes on settings that are legal but suspicious, given the text of the run."""
    recipe, notes = journal.recipe, []
    rows, batch_size = journal.experiment.dataset.train, recipe.data.batch_size
    batches = journal.next_place().stop
    if recipe.train.stages is not None:
        counts = data.count_stage_rows(rows, recipe.stages)
        for (name, part), count in zip(split_by_source(rows).items(), counts, strict=True):
            if count > len(part):
                text = f'the text of {name}' if name else 'the text'
                notes.append(f'the run reads {text} {count / len(part):.2f} times')
    elif isinstance(rows, MixedRows):
        counts = rows.shares.count_rows(batches * batch_size)
        for name, count, part in zip(rows.names, counts, rows.sources, strict=True):
            if count > len(part):
                n_epochs = count / len(part)
                notes.append(
                    f'the run reads the text of {name} {n_epochs:.2f} times ({batches:,} batches)'
                )
    elif (n_epochs := batches * batch_size / len(rows)) > 1:
        notes.append(f'the run reads the text {n_epochs:.2f} times ({batches:,} batches)')
    return notes + list_config_notes(recipe)


def list_config_notes(recipe: Recipe) -> list[str]:
    """Returns notes on settings of a config that are legal but suspicious, for any text."""
    leaks = {norm.name: norm.row.leaks for norm in recipe.norms.values() if norm.row.leaks}
    notes = [
        f'during training, {name} shows each token {leak}, including later tokens, so the training '
        'loss is not that of a causal model. Compare validation losses: evaluation uses running '
        'statistics.'
        for name, leak in sorted(leaks.items())
    ]
    notes += [*_list_remainder(recipe), *list_stage_notes(recipe)]
    notes += _list_unreached(recipe)
    if unreached := find_unreached(recipe):
        notes.append(
            f'train.checkpoint_steps: {", ".join(map(str, unreached))} beyond train.steps='
            f'{recipe.train.steps}'
        )
    has_source = recipe.train.init_from or recipe.train.branch_from
    if recipe.train.trainable != 'all' and not has_source:
        notes.append(
            f'train.trainable={recipe.train.trainable} without train.init_from: all other '
            'parameters keep their random initial values'
        )
    return [*notes, *recipe.average.row.notes(recipe, recipe.average)]


def list_sweep_notes(recipes: Sequence[Recipe]) -> list[str]:
    """Returns `list_config_notes` of many runs.

    A note that does not concern all runs begins with the number of its runs.
    """
    runs, counts = (
        len(recipes),
        collections.Counter(itertools.chain(*map(list_config_notes, recipes))),
    )
    return [note if n == runs else f'{n} of {runs} runs: {note}' for note, n in counts.items()]


def _list_remainder(recipe: Recipe) -> Iterator[str]:
    """Yields a note on blocks behind the last whole period of model.pattern."""
    period, count, remainder = recipe.tiles
    if remainder:
        entries = {kind: entry for entry, kind in recipe.kinds.items()}
        n, first = recipe.model.n_layers, recipe.model.n_layers - len(remainder) + 1
        places = f'block {n} is' if first == n else f'blocks {first} to {n} are'
        yield (
            f'model.pattern: {count} times {len(period)} blocks, and {places} '
            f'{"+".join(entries[kind] for kind in remainder)}'
        )


def _list_unreached(recipe: Recipe) -> Iterator[str]:
    """Yields notes on parts that need the whole run, or longer, to reach their published setting.

    The time unit is declared by their options; a row with several such options combines them by
    `lasts`.
    """
    steps = recipe.train.steps
    lengths = {'steps': steps, 'updates': steps * recipe.train.microbatches}
    notes = {}  # by text, as a norm may be used in several places
    for part in recipe.parts:
        counted = {name: d for name, d in declared_options(part.row).items() if d.option.time_unit}
        if not counted:
            continue
        values = {name: part.options[name] for name in counted}
        (unit,) = {declared.option.time_unit for declared in counted.values()}
        n_needed, length = part.row.lasts(recipe.model.n_layers, **values), lengths[unit]
        if n_needed >= length:
            options = ' and '.join(values)
            reason = ', '.join(
                f'{option}={value} ({counted[option].option.description})'
                for option, value in values.items()
            )
            text = (
                f'{part.name} needs more than {n_needed} {unit}, but the run has {length}: '
                f'{reason}. The run ends before that. Set train.steps higher, or {options} lower.'
            )
            notes.setdefault(text, f'{part.path}={text}')
    yield from notes.values()


def describe_unfitted(recipe: Recipe) -> list[str]:
    """Returns a note that train.seconds will change the steps; [] without it."""
    if recipe.train.seconds is None:
        return []
    return [
        f'NOTE: train.seconds={recipe.train.seconds:g} sets train.steps when training starts; '
        f'this has the configured {recipe.train.steps:,} steps'
    ]
