"""What runs of one program have in common: text, devices, model, and the speed to expect."""

from collections.abc import Callable

import jax

from lm import data
from lm.config.recipe import Recipe
from lm.devices.blueprint import Blueprint
from lm.devices.shardings import jit_init
from lm.launch.agreement import from_first, same_everywhere
from lm.model.objectives import evaluated, n_marks, training_mixture
from lm.record.machine import device_memory_bytes
from lm.training.flops import flops_per_token, peak_flops


def open_text(recipe: Recipe, say: Callable[[str], None]) -> data.Dataset:
    """The text of config.data as rows of tokens, prepared where that is not done yet.

    Raises ValueError where it is too short for config.train.steps, or processes have other text.
    """
    # Where the cache is shared, so is the work (`lm.data.pieces`).
    dataset = data.open_dataset(recipe.data, say=say)
    same_everywhere('the digest of the prepared data', dataset.digest)
    data.check_epochs(recipe.data, recipe.train.steps, dataset.train)
    return dataset


class Experiment(Blueprint):
    """The model and its text on the devices at hand; `runs` is how many will share it.

    mixture: what training makes of rows; evaluated: the validation split as other objectives have
    it, by name (`lm.model.objectives`). init: (key, hyper) -> the state of a run at step 0.
    """

    def __init__(
        self, recipe: Recipe, dataset: data.Dataset, say: Callable[[str], None], runs: int = 1
    ):
        self.dataset, tokenizer = dataset, dataset.tokenizer
        self.mixture = training_mixture(recipe, tokenizer)
        self.evaluated = evaluated(recipe, tokenizer, dataset.validation)
        vocab_size = tokenizer.vocab_size + n_marks(recipe)
        devices, bos_id = jax.devices(), tokenizer.bos_id
        super().__init__(recipe, vocab_size, bos_id, devices, _memory_of_device, say, runs)
        self.flops_per_token = flops_per_token(self.learner)
        self.peak, self.peak_source = peak_flops(self.mesh.size)
        self.init = jit_init(self.learner, self.mesh)


def _memory_of_device() -> int:
    """Bytes, as process 0 has them; devices of a CPU share its machine's."""
    shared_by = jax.device_count() if jax.devices()[0].platform == 'cpu' else 1
    return from_first(device_memory_bytes() // shared_by)
