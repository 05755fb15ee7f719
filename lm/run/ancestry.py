"""The text of a branch (train.branch_from): where it begins to read, and how much it reads."""

from pathlib import Path

from lm.config.recipe import Recipe
from lm.config.resolve import flatten
from lm.inference.load import find_checkpoint
from lm.record.names import BRANCH
from lm.record.run import Run
from lm.storage.files import UnreadableFile, read_json

FIELD = 'train.branch_from'
# With another value of one of these, the rows of the text are others or in another order.
ORDER_FIELDS = (
    'data.source',
    'data.mixture',
    'data.text_field',
    'data.seq_len',
    'data.packing',
    'data.validation_fraction',
    'data.validation_source',
    'data.invalid_utf8',
    'data.missing_text',
    'data.seed',
)


def restarts_text(parent: Recipe, recipe: Recipe) -> bool:
    """Returns whether a branch reads its text from the first row: rows or their order differ."""
    before, after = flatten(parent), flatten(recipe)
    return any(before[path] != after[path] for path in ORDER_FIELDS)


def reads_same_batches(parent: Recipe, recipe: Recipe, steps: int) -> bool:
    """Returns whether both runs have the same batches in their first `steps` steps.

    Args:
      parent: the config of one run.
      recipe: the config of the other.
      steps: number of steps.
    """

    def batches(recipe):
        return [
            (stage.start, min(stage.stop, steps), stage.shape, stage.weights)
            for stage in recipe.stages
            if stage.start < steps
        ]

    return not restarts_text(parent, recipe) and batches(parent) == batches(recipe)


def has_stages(*recipes: Recipe) -> bool:
    """Returns whether any of the runs has train.stages."""
    return any(recipe.train.stages is not None for recipe in recipes)


def convert_batch_index(parent: Recipe, recipe: Recipe, index: int) -> int:
    """Returns the index of the first batch of a branch.

    With another batch size it is the first batch without a row that the parent has read. With
    train.stages both have the same batches so far (`lm.run.branch.check_stages`).

    Args:
      parent: the config of the parent.
      recipe: the config of the branch.
      index: that of the parent's next batch.
    """
    if has_stages(parent, recipe):
        return index
    if restarts_text(parent, recipe):
        return 0
    return -(-index * parent.data.batch_size // recipe.data.batch_size)


def count_batches(recipe: Recipe, workdir: Path | None) -> int:
    """Returns the number of batches up to a run's last, counted from the first row of its text.

    Of a branch these follow from its record, or from the parent's config before it has begun.

    Args:
      recipe: the config.
      workdir: the folder of the run, which may have begun.
    """
    steps = recipe.train.steps
    if not recipe.train.branch_from:
        return steps
    try:
        record = read_json((workdir or Path()) / BRANCH)
        return record['batch_index'] + steps - record['ancestors'][-1]['step']
    except (OSError, UnreadableFile, KeyError, IndexError):
        pass
    try:
        folder, step = find_checkpoint(recipe.train.branch_from)
        parent = Run(folder.parent).read_recipe()
    except ValueError:  # it is gone, and the branch resumes without its record
        return steps
    return convert_batch_index(parent, recipe, step) + steps - step
