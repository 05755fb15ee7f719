"""A branch: a run that continues the state of a checkpoint of another run (train.branch_from).

Parameters, optimizer, averages, counters and the place in the text continue; the config may change,
except what the arrays are and mean. Fields that are not set follow the config of the checkpoint
(`lm.run.start.merge_source_model`). A branch saves its state before its first step, so that it
never needs its parent again.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from lm.config.fields import CHOICES, FIELDS
from lm.config.groups import OPTIMIZER
from lm.config.mixture import source_flag
from lm.config.recipe import Recipe
from lm.config.resolve import differences, digest, flatten
from lm.data import tokenizers
from lm.devices.shardings import state_layout
from lm.inference.load import find_checkpoint
from lm.launch.distributed import broadcast_from_first, has_private_disks, is_first, raise_on_all
from lm.record.checkpoint import (
    STATE_SECTIONS,
    WEIGHT_SECTIONS,
    TreeMismatch,
    check_tree,
    list_steps,
    read_meta,
    read_state,
    state_record,
    training_record,
)
from lm.record.code import find_other_code
from lm.record.digests import DamagedCheckpoint
from lm.record.names import CHECKPOINTS
from lm.record.run import Run
from lm.record.upgrade import resolve_stored
from lm.run.ancestry import (
    FIELD,
    convert_batch_index,
    has_stages,
    reads_same_batches,
    restarts_text,
)
from lm.run.journal import Counters, Journal
from lm.run.program import TOKENIZER
from lm.run.start import find_source, list_candidates, read_tokenizer_files
from lm.run.tables import schedule_fractions
from lm.storage.buckets import is_url
from lm.training.state import Learner, State
from lm.training.update import peak_lrs
from modules.optim.groups import HIDDEN

# Parts whose state the checkpoint holds, beside those of WEIGHT_SECTIONS.
STATE_CHOICES = ('optim.name', 'optim.others', 'optim.average', 'scaling.name')
# Other fields of these sections change no array of a state.
SHAPE_SECTIONS = (*STATE_SECTIONS, 'scaling')
SHAPE_FIELDS = (
    *('data.seq_len', 'data.tokenizer', 'data.objective', 'train.trainable'),
    *('train.on_spike', 'train.spike_window'),
)
MAX_CURVE_ROWS = 1000  # of the parent, of each kind, that a branch keeps for its report


def check_branch(recipe: Recipe, learner: Learner, workdir: Path) -> None:
    """Raises ValueError if a run cannot continue the state of train.branch_from; all call it.

    Nothing is compiled, and no array is read. A run with checkpoints resumes from these.

    Args:
      recipe: the config of the run.
      learner: its learner.
      workdir: its folder, which may not exist yet.
    """
    source = recipe.train.branch_from
    if not source:
        return
    with raise_on_all(ValueError):
        if is_first() and not list_steps(workdir / CHECKPOINTS):
            folder, _ = find_source(source, FIELD)
            if folder.parent.resolve() == workdir.resolve():
                raise ValueError(
                    f'{FIELD}={source} is the --workdir of this run itself. Give the branch a '
                    '--workdir of its own.'
                )
            step, meta = _read_newest_meta(source)
            check_state(recipe, learner, meta, source)
            _check_steps(recipe, step, source)
            check_stages(resolve_stored(meta['config']), recipe, step)


def _read_newest_meta(source: str) -> tuple[int, Mapping[str, Any]]:
    """Returns (step, record) of the first of the checkpoints `source` stands for that is intact."""
    damage = ''
    for candidate in list_candidates(source):
        folder, step = find_checkpoint(candidate)
        try:
            return step, read_meta(folder, step)
        except DamagedCheckpoint as error:
            damage = str(error)
    raise ValueError(f'{FIELD}={source}: {damage}')


def _check_steps(recipe: Recipe, step: int, source: str) -> None:
    if step >= recipe.train.steps:
        raise ValueError(
            f'{FIELD}={source} is a state after {step} steps, but train.steps='
            f'{recipe.train.steps} counts them too, so that no step is left. Set train.steps to '
            'the last step of the branch.'
        )


def check_stages(parent: Recipe, recipe: Recipe, step: int) -> None:
    """Raises ValueError if either run has stages, and their first `step` steps other batches.

    The stage of a step says which rows of the text it reads, so that a branch with another history
    would have no place in the text.

    Args:
      parent: the config of the parent.
      recipe: the config of the branch.
      step: the step of the checkpoint.
    """
    if has_stages(parent, recipe) and not reads_same_batches(parent, recipe, step):
        raise ValueError(
            f'{FIELD}={recipe.train.branch_from}: with train.stages, the batches of the first '
            f'{step} steps must be those of that run; train.stages is {parent.train.stages!r} '
            f'there and {recipe.train.stages!r} here, and ends count as shares of train.steps='
            f'{parent.train.steps} there and {recipe.train.steps} here. Let the stages first '
            f'differ after step {step}, under the same text and row length.'
        )


def check_state(recipe: Recipe, learner: Learner, meta: Mapping[str, Any], source: str) -> None:
    """Raises ValueError, with the fields, if a checkpoint's arrays have another shape or meaning.

    Args:
      recipe: the config of the branch.
      learner: its learner.
      meta: the record of the checkpoint.
      source: train.branch_from, for the error.
    """
    parent = resolve_stored(meta['config'])
    changed = list_state_changes(parent, recipe)
    shapes, _ = state_layout(learner)
    mismatch = ''
    try:
        path = Path(source)
        check_tree(meta['tree'], state_record(shapes), path)
        training_tree = training_record(shapes)  # records of older versions lack it
        check_tree(meta.get('training_tree', training_tree), training_tree, path, 'optimizer')
    except TreeMismatch as error:
        mismatch = str(error)
        changes = differences(parent, recipe).items()
        changed |= {path: values for path, values in changes if _may_shape(path, values)}
    if not changed and not mismatch:
        return
    lines = ''.join(f'\n  {path}: {a!r} -> {b!r}' for path, (a, b) in changed.items())
    reason = f'which these fields change (there -> here):{lines}\n' if changed else f'{mismatch}\n'
    raise ValueError(
        f'{FIELD}={source} continues parameters, optimizer state and averages, {reason}'
        'Leave these fields out to follow that run. To start from its weights alone, with another '
        'optimizer or reparametrisation and from step 1, set train.init_from in place of '
        f'{FIELD}.'
    )


def _may_shape(path: str, values: tuple[Any, Any]) -> bool:
    """Returns whether a field may determine which arrays a state has.

    Traced numbers do not, and options that only one of the configs has follow from its parts.
    """
    field = FIELDS[path]
    is_traced = field.option is not None and field.option.traced
    if field.is_part_option and None in values:
        return False
    return path in SHAPE_FIELDS or (path.split('.')[0] in SHAPE_SECTIONS and not is_traced)


def list_state_changes(parent: Recipe, recipe: Recipe) -> dict[str, tuple[Any, Any]]:
    """Returns {field: (there, here)} of the parts that give a state its meaning; None: unset."""

    def name_parts(recipe):
        names: dict[str, list[str]] = {}
        for part in recipe.parts:
            is_weights = part.path.split('.')[0] in WEIGHT_SECTIONS and part.path != 'model.remat'
            is_group = part.path not in CHOICES and part.path.endswith(f'_{OPTIMIZER}')
            if is_weights or is_group or part.path in STATE_CHOICES:
                names.setdefault(part.path, []).append(part.name)
        return {path: '+'.join(listed) for path, listed in names.items()}

    before, after = name_parts(parent), name_parts(recipe)
    return {
        path: (before.get(path), after.get(path))
        for path in {**before, **after}
        if before.get(path) != after.get(path)
    }


def start_branch(journal: Journal, template: State, continue_changed: bool) -> State:
    """Returns the state of train.branch_from, and gives the journal its counters.

    All processes call it; each reads the parts of its devices.

    Args:
      journal: of the run, which has no checkpoint yet.
      template: shapes, types and shardings of the state.
      continue_changed: accept text that has changed on the disk since.

    Raises:
      ValueError: if the checkpoint cannot be read, was trained on other text under the same config,
        or has another tokenizer or other arrays.
    """
    recipe, source = journal.recipe, journal.recipe.train.branch_from
    with raise_on_all(ValueError):
        candidates = list_candidates(source) if is_first() else None
    candidates = broadcast_from_first(candidates)
    for candidate in candidates:
        folder, step = _locate(candidate)
        try:
            state, meta = read_state(folder, step, template)
        except DamagedCheckpoint as error:
            if candidate == candidates[-1]:
                raise ValueError(f'{FIELD}={source}: {error}') from error
            journal.terminal.say(f'{error}; using the checkpoint before it')
            continue
        _check_steps(recipe, step, source)
        parent = resolve_stored(meta['config'])
        with raise_on_all(ValueError):
            if is_first():
                _check_tokenizer(journal, folder.parent, parent)
        _check_text(journal, meta, parent, continue_changed)
        counters = Counters(**meta['counters'])
        batch_index = convert_batch_index(parent, recipe, counters.batch_index)
        ancestor = {
            'workdir': split_workdir(candidate),
            'step': step,
            'tokens': counters.tokens,
            'config': digest(parent),
            'code': counters.code[-1] if counters.code else None,
        }
        journal.counters = Counters(
            batch_index=batch_index,
            tokens=counters.tokens,
            skipped_in_a_row=counters.skipped_in_a_row,
            code=counters.code,
            ancestors=[*counters.ancestors, ancestor],
        )
        journal.step = step
        journal.other_code = find_other_code(counters.code, Run(folder.parent).summary)
        changes = list_changes(parent, recipe)
        rates = compare_rates(parent, recipe, step)
        for line in describe_branch(ancestor, changes, rates, parent, recipe):
            journal.terminal.say(line)
        journal.branch_record = {
            'ancestors': journal.counters.ancestors,
            'changes': {path: list(values) for path, values in changes.items()},
            'rates': rates,
            'batch_index': batch_index,
            'rows': _read_curve(folder.parent, step) if is_first() else [],
        }
        return state
    raise ValueError(f'{FIELD}={source} has no checkpoint')


def _locate(checkpoint: str) -> tuple[Path, int]:
    """Returns (folder, step); a checkpoint in a bucket is fetched by each process that reads it."""
    if is_first() or not has_private_disks():
        return find_checkpoint(checkpoint)
    return Path(checkpoint).parent, int(Path(checkpoint).name)


def split_workdir(checkpoint: str) -> str:
    """Returns the workdir, a URL or an absolute path, of WORKDIR/checkpoints/STEP."""
    workdir = checkpoint.rstrip('/').rsplit('/', 2)[0]
    return workdir if is_url(checkpoint) else str(Path(workdir).absolute())


def _check_tokenizer(journal: Journal, folder: Path, parent: Recipe) -> None:
    recipe = journal.recipe
    files = read_tokenizer_files(journal.experiment.dataset.tokenizer)
    if read_tokenizer_files(tokenizers.load(folder / TOKENIZER)) != files:
        raise ValueError(
            f'{FIELD}={recipe.train.branch_from} was trained with another tokenizer: '
            f'{parent.data.tokenizer} on {source_flag(parent.data)}. This run uses '
            f'{recipe.data.tokenizer} on {source_flag(recipe.data)}. Leave data.tokenizer out to '
            'use that of the checkpoint.'
        )


def _check_text(
    journal: Journal, meta: Mapping[str, Any], parent: Recipe, continue_changed: bool
) -> None:
    recipe, text = journal.recipe, journal.experiment.dataset.digest
    if meta['data'] != text and not restarts_text(parent, recipe) and not continue_changed:
        raise ValueError(
            f'{FIELD}={recipe.train.branch_from} was trained on data {meta["data"]}, but '
            f'{source_flag(recipe.data)} is now {text}, though the config names the same text. '
            'Restore it, name another data.source, or pass --continue_changed to read on in the '
            'new text.'
        )


def list_changes(parent: Recipe, recipe: Recipe) -> dict[str, tuple[Any, Any]]:
    """Returns {field: (there, here)} of what a branch changes, except where the runs came from."""
    sources = (FIELD, 'train.init_from')
    changed = differences(parent, recipe).items()
    return {path: values for path, values in changed if path not in sources}


def compare_rates(parent: Recipe, recipe: Recipe, step: int) -> list[float | None]:
    """Returns the rates of the parent's last step, of its next one, and of the branch's first.

    The first is None at step 0, the second at the end of the parent's schedule.

    Args:
      parent: the config of the parent.
      recipe: the config of the branch.
      step: the step of the checkpoint.
    """

    def rate(recipe, number):
        if not 0 < number <= recipe.train.steps:
            return None
        fraction = schedule_fractions(recipe, np.array([number]))[0]
        return float(peak_lrs(flatten(recipe))[HIDDEN] * fraction)

    return [rate(parent, step), rate(parent, step + 1), rate(recipe, step + 1)]


def describe_branch(
    ancestor: Mapping[str, Any],
    changes: Mapping[str, Sequence[Any]],
    rates: Sequence[float | None],
    parent: Recipe,
    recipe: Recipe,
) -> list[str]:
    """Returns lines on the start of a branch: its parent, its changes and its learning rate.

    Args:
      ancestor: the record of the parent.
      changes: `list_changes`.
      rates: `compare_rates`.
      parent: the config of the parent.
      recipe: the config of the branch.
    """
    step = ancestor['step']
    changed = ', '.join(f'{path} {a!r} -> {b!r}' for path, (a, b) in changes.items())
    before, parents_next, first = rates
    rate = f'{first:.4g} in step {step + 1}'
    if before is not None:
        rate = f'{before:.4g} in step {step} -> {rate}'
    if parents_next is not None and parents_next != first:
        rate += f' ({parents_next:.4g} in the parent)'
    if restarts_text(parent, recipe):
        text = 'its text has other rows or another order, and is read from the first row'
    elif parent.data.batch_size != recipe.data.batch_size:
        text = 'the text is read on, from the first whole batch of the new size'
    else:
        text = 'the text is read on'
    return [
        f'branch of {ancestor["workdir"]} after step {step} and {ancestor["tokens"]:,.0f} tokens: '
        f'optimizer state and averages continue; {text}',
        f'changed from the parent: {changed or "nothing"}',
        f'learning rate: {rate}',
    ]


def _read_curve(folder: Path, step: int) -> list[dict[str, Any]]:
    """Returns the losses of a run, and of its own ancestors, up to a step, thinned."""
    rows = [*Run(folder).ancestor_rows, *Run(folder).rows()]
    curve: list[dict[str, Any]] = []
    for names in (('ce', 'lr'), ('validation_ce', 'bits_per_byte')):
        losses = [row for row in rows if row['step'] <= step and names[0] in row]
        stride = -(-len(losses) // MAX_CURVE_ROWS) or 1
        for row in losses[::-1][::stride]:  # with the last
            curve.append({'step': row['step']} | {n: row[n] for n in names if n in row})
    return sorted(curve, key=lambda row: row['step'])
