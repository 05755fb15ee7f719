"""What runs of one program have in common: devices, text, model, and the speed to expect."""

from collections.abc import Callable

import jax

from lm import data
from lm.auto_mesh import chosen
from lm.flops import flops_per_token, peak_flops
from lm.mesh import make_mesh
from lm.objectives import evaluated, n_marks, training_mixture
from lm.processes import from_first, same_everywhere
from lm.record.host import device_memory_bytes
from lm.sections import AUTO, Config, MeshConfig
from lm.shardings import abstract_state, jit_init
from lm.state import build_learner
from lm.updates import refuse_unserved


class Experiment:
    """Opening it prepares the text where that is not done; `runs` is how many will share it. Raises
    ValueError where processes have other text.

    vocab_size: the tokenizer's tokens and the marks of objectives. mixture: what training makes of
    rows; evaluated: the validation split as other objectives have it, by name (`lm.objectives`).
    state_shapes: shapes, types and shardings of one run's state; init: (key, hyper) -> that state
    at step 0.
    """

    def __init__(self, config: Config, say: Callable[[str], None], runs: int = 1):
        self.config = config
        # Where the cache is shared, so is the work (`lm.data.pieces`).
        self.dataset = data.open_dataset(config.data, say=say)
        same_everywhere('the digest of the prepared data', self.dataset.digest)
        data.check_epochs(config.data, config.train.steps, self.dataset.train)
        tokenizer = self.dataset.tokenizer
        self.vocab_size = tokenizer.vocab_size + n_marks(config)
        self.mixture = training_mixture(config, tokenizer)
        self.evaluated = evaluated(config, tokenizer, self.dataset.validation)
        self.platform = jax.devices()[0].platform
        self.learner = build_learner(config, self.vocab_size, tokenizer.bos_id, self.platform)
        refuse_unserved(self.learner)
        self.mesh = make_mesh(self._mesh_config(say, runs), runs=runs)
        self.flops_per_token = flops_per_token(self.learner)
        self.peak, self.peak_source = peak_flops(self.mesh.size)
        self.state_shapes = abstract_state(self.learner, self.mesh)
        self.init = jit_init(self.learner, self.mesh)

    def _mesh_config(self, say: Callable[[str], None], runs: int) -> MeshConfig:
        """As it is given, or chosen here."""
        if self.config.mesh.axes != AUTO:
            return self.config.mesh
        shared_by = jax.device_count() if self.platform == 'cpu' else 1
        memory = from_first(device_memory_bytes() // shared_by)
        mesh, why = chosen(self.config, self.learner, jax.devices(), memory, runs)
        for line in why:
            say(line)
        return mesh
