"""Shapes and shardings of a state and a batch over a mesh, and the jitted initial state."""

import functools
from collections.abc import Callable
from typing import cast

import jax
from jax.sharding import Mesh

from lm.config.recipe import Recipe
from lm.config.stages import BatchShape, config_shape
from lm.devices.mesh import param_sharding, replicated_sharding, trace_on_mesh
from lm.model.objectives import batch_fields
from lm.training.state import (
    Learner,
    State,
    init_state,
    init_watched,
    make_hyper,
    narrow_weights,
)
from lm.training.update import build_average, build_optimizer
from modules.optim import state_specs, unbox_state

# The initial state is computed once, in 5 ms. At the default level it takes longer to compile than
# the step: 4.2 s for four layers, and 1.8 s at this level.
INIT_ON_CPU = {'xla_backend_optimization_level': 1}
# Compiler options of the step, by kind of device. SparseCores of a v6e exchange parameters and
# gradients while its matrix unit computes; by default the matrix unit waits (libtpu 0.0.51).
OFFLOAD = 'xla_tpu_enable_sparse_core_collective_offload_'
ON_SPARSE_CORES = {f'{OFFLOAD}{k}': 'true' for k in ('all_gather', 'reduce_scatter', 'all_reduce')}
STEP_OPTIONS = {
    'TPU v6 lite': ON_SPARSE_CORES
    | {'xla_tpu_enable_async_collective_fusion_fuse_all_reduce': 'false'}
}
WHOLE = 'whole'  # in place of a ParamSpec: every device holds the whole array


def batch_shapes(
    recipe: Recipe, *leading: int, shape: BatchShape | None = None
) -> dict[str, jax.ShapeDtypeStruct]:
    """Returns shapes and types of a batch, stacked along `leading`.

    Args:
      recipe: names the arrays of a batch.
      *leading: sizes of leading axes.
      shape: the shape of a stage; None: that of the config's own fields.
    """
    shape = shape or config_shape(recipe.config)
    rows = jax.ShapeDtypeStruct((*leading, shape.batch_size, shape.seq_len + 1), jax.numpy.int32)
    return dict.fromkeys(batch_fields(recipe), rows)


def weights_layout(learner: Learner) -> tuple[State, State]:
    """Returns (shapes and types, specs) of a state for inference. Nothing is computed.

    Its step and the optimizer's state are None. The specs are a ParamSpec for parameters and their
    average, and WHOLE for the rest.
    """
    recipe, description = learner.recipe, learner.description
    _, reparam = jax.eval_shape(description.reparam.init, description.used_shapes)
    init_average = build_average(recipe, description, make_hyper(recipe)).init
    average = jax.eval_shape(init_average, description.shapes)
    no_step = cast(jax.Array, None)  # inference has no step
    shapes = State(no_step, description.shapes, reparam, description.stats, None, average)
    shapes = jax.eval_shape(functools.partial(narrow_weights, recipe), shapes)
    reparam, stats = jax.tree.map(lambda _: WHOLE, (reparam, description.stats))
    average_specs = state_specs(average, description.shapes, description.specs)
    return shapes, State(no_step, description.specs, reparam, stats, None, average_specs)


@functools.lru_cache(maxsize=8)  # a run needs it three times
def state_layout(learner: Learner) -> tuple[State, State]:
    """Returns `weights_layout` with the optimizer's state, and what is WHOLE: the step, and the
    watched metrics.
    """
    recipe, description = learner.recipe, learner.description
    transform = build_optimizer(recipe, description, make_hyper(recipe))
    boxed_state = jax.eval_shape(transform.init, description.shapes)
    shapes, specs = weights_layout(learner)
    step = jax.ShapeDtypeStruct((), jax.numpy.int32)
    opt_specs = state_specs(boxed_state, description.shapes, description.specs)
    watched = jax.eval_shape(lambda: init_watched(recipe.train))
    return (
        shapes.replace(step=step, opt_state=unbox_state(boxed_state), watched=watched),
        specs.replace(
            step=WHOLE, opt_state=opt_specs, watched=jax.tree.map(lambda _: WHOLE, watched)
        ),
    )


def add_shardings(shapes: State, specs: State, mesh: Mesh) -> State:
    """Returns shapes and types with shardings.

    Args:
      shapes: shapes and types of a state.
      specs: a ParamSpec or WHOLE for each array.
      mesh: the mesh.
    """

    def add_sharding(s, spec):
        sharding = (
            replicated_sharding(mesh) if spec is WHOLE else param_sharding(mesh, spec, s.shape)
        )
        return jax.ShapeDtypeStruct(s.shape, s.dtype, sharding=sharding)

    return jax.tree.map(add_sharding, shapes, specs)


def state_shardings(learner: Learner, mesh: Mesh) -> State:
    """Returns the sharding of each array of the state."""
    return jax.tree.map(lambda leaf: leaf.sharding, abstract_state(learner, mesh))


def abstract_state(learner: Learner, mesh: Mesh) -> State:
    """Returns shapes, types and shardings of the state, for reading checkpoints."""
    return add_shardings(*state_layout(learner), mesh)


def abstract_weights(learner: Learner, mesh: Mesh) -> State:
    """Returns `abstract_state` of the arrays for inference, without the optimizer's state."""
    return add_shardings(*weights_layout(learner), mesh)


def jit_init(learner: Learner, mesh: Mesh) -> Callable:
    """Returns `init(key, hyper) -> State`, with the shardings of the step."""
    on_cpu = mesh.devices.flat[0].platform == 'cpu'
    return jax.jit(
        trace_on_mesh(mesh, lambda key, hyper: init_state(learner, hyper, key)),
        out_shardings=state_shardings(learner, mesh),
        compiler_options=INIT_ON_CPU if on_cpu else None,
    )


def step_options(mesh: Mesh) -> dict[str, str] | None:
    """Returns the compiler options of a step on devices of this kind; None if there are none."""
    return STEP_OPTIONS.get(mesh.devices.flat[0].device_kind)
