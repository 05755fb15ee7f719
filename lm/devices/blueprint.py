"""A Blueprint: everything that a program is compiled from. Its devices may be elsewhere.

`lm.run.program` adds the text and the compiled functions; `tpu.plan` compiles it for pods.
"""

from collections.abc import Callable, Sequence

import jax

from lm.config.fields import AUTO
from lm.config.recipe import Recipe
from lm.config.resolve import update_recipe
from lm.devices.auto_mesh import select_mesh
from lm.devices.mesh import make_mesh
from lm.devices.shardings import abstract_state
from lm.training.state import build_learner, check_learner


class Blueprint:
    """A config, a vocabulary and devices, with the learner, mesh and state shapes that follow.

    `state_shapes` are shapes, types and shardings of one run's state.

    Args:
      recipe: the config.
      vocab_size: number of the tokenizer's tokens and the marks of objectives.
      bos_id: the token that begins a document.
      devices: the devices to compile for.
      memory: returns the bytes of a device, for mesh.axes=auto.
      say: prints a line.
      runs: number of runs that will share the program.

    Raises:
      ValueError: if the devices do not fill the mesh, or no mesh suits the config.
    """

    def __init__(
        self,
        recipe: Recipe,
        vocab_size: int,
        bos_id: int,
        devices: Sequence[jax.Device],
        memory: Callable[[], int],
        say: Callable[[str], None] = print,
        runs: int = 1,
    ):
        self.recipe, self.vocab_size = recipe, vocab_size
        self.platform = devices[0].platform
        self.learner = build_learner(recipe, vocab_size, bos_id, self.platform)
        check_learner(self.learner)
        axes = recipe.mesh
        if axes.axes == AUTO:
            axes, reasons = select_mesh(recipe, self.learner, list(devices), memory(), runs)
            for line in reasons:
                say(line)
            # The kernels of the model and its loss depend on mesh.tensor.
            if axes.tensor != recipe.mesh.tensor:
                with_tensor = update_recipe(recipe, {'mesh.tensor': axes.tensor})
                self.learner = build_learner(with_tensor, vocab_size, bos_id, self.platform)
        self.mesh = make_mesh(axes, list(devices), runs)
        self.state_shapes = abstract_state(self.learner, self.mesh)
