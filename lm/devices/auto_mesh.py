"""Selects the mesh for mesh.axes=auto: of the meshes that fit in memory, the mesh that sends least.

`tensor` and `context` are cut only if rows and parameters cannot be cut enough: their traffic lies
between matrix products and is not overlapped.

A device holds parameters, gradients, optimizer state and averages, by the table that shards them
(`lm.devices.shardings`), and the residuals of the forward pass that the backward pass needs. The
residuals are found by tracing a vector-Jacobian product, before XLA fuses anything and not cut over
`tensor`: an upper estimate.

In a step a device sends and receives, with n the size of the axis, P and G the bytes of parameters
(in the type of computation) and gradients, and A the bytes of one activation [B, T, D] on the
device (1910.02054, 1909.08053):

    data and context    2 G (n - 1) / n            the sum of gradients
    fsdp                (2 P + G) (n - 1) / n      gathered twice, gradients scattered
    tensor              8 A (n - 1) / n a layer    four sums
    context             6 C (n - 1) a layer        keys and values, of C bytes each, gathered
                                                   twice, and back

On a TPU slice of two or more torus dimensions, `fsdp` over all of it costs twice that: XLA has no
reduce-scatter over a whole torus.
"""

import dataclasses
import itertools
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from lm.config.fields import MeshConfig
from lm.config.recipe import Recipe
from lm.config.resolve import update_recipe
from lm.devices.check_mesh import check_devices
from lm.devices.mesh import check_idle_devices, format_mesh, make_mesh, process_share, torus_shape
from lm.devices.shardings import add_shardings, batch_shapes, state_layout
from lm.training.state import Learner, build_learner, make_hyper
from lm.training.step import TRAINING, apply_loss
from modules.numerics import DEVICE_POLICIES

CHOSEN_AXES = ('fsdp', 'tensor', 'context')  # `data` gets the remaining devices
USABLE_SHARE = 0.9  # share of memory; the rest is for programs, batches and XLA's own buffers


@dataclasses.dataclass(frozen=True)
class MeshCandidate:
    """A mesh, with the bytes that a device holds and sends on it.

    axes: the mesh as text. state_bytes: bytes of the state with its gradient. residual_bytes: bytes
    of the forward pass that the backward pass needs. sent_bytes: bytes sent in a step.
    """

    mesh: MeshConfig
    axes: str
    state_bytes: int
    residual_bytes: int
    sent_bytes: float

    @property
    def total_bytes(self) -> int:
        """Bytes that a device holds."""
        return self.state_bytes + self.residual_bytes

    @property
    def n_blocking(self) -> int:
        """Number of devices that sum or gather between matrix products, without overlap."""
        return self.mesh.tensor * self.mesh.context

    @property
    def n_parts(self) -> int:
        """Number of parts into which the model, or a row of tokens, is cut."""
        return math.prod(getattr(self.mesh, axis) for axis in CHOSEN_AXES)

    def format(self) -> str:
        """Returns a line with the axes and the bytes."""
        return (
            f'{self.axes}: {self.state_bytes / 1e9:,.3g} GB per device for parameters, gradients '
            f'and optimizer state, about {self.residual_bytes / 1e9:,.3g} GB for activations, and '
            f'{self.sent_bytes / 1e9:,.3g} GB sent per step'
        )


def select_mesh(
    recipe: Recipe, learner: Learner, devices: list[jax.Device], memory: int, runs: int = 1
) -> tuple[MeshConfig, list[str]]:
    """Selects a mesh by estimated memory and traffic.

    Axes with a size in the config keep it. With many runs side by side (`mesh.run`), each gets as
    few devices as it fits on. If the run fits on no mesh, the mesh that needs least memory is
    selected and a line says so, as the estimate may be too high.

    Args:
      recipe: the config of the run.
      learner: its learner, for the shapes.
      devices: the devices to use.
      memory: bytes of a device.
      runs: the number of runs that will share the program.

    Returns:
      (mesh, lines): the mesh, and lines that explain the choice.

    Raises:
      ValueError: if no mesh cuts batch and model evenly.
    """
    candidates = _list_candidates(recipe, learner, devices, runs)
    fitting = [
        candidate for candidate in candidates if candidate.total_bytes <= USABLE_SHARE * memory
    ]
    simplest = min(
        candidates,
        key=lambda candidate: (candidate.n_parts, candidate.n_blocking, candidate.sent_bytes),
    )
    # A single run avoids blocking traffic first, then sends least. Many runs need no communication
    # among each other, so that each gets as few devices as possible.
    if not fitting:
        best = min(candidates, key=lambda candidate: candidate.total_bytes)
    elif runs > 1:
        best = min(
            fitting,
            key=lambda candidate: (candidate.n_parts, candidate.n_blocking, candidate.sent_bytes),
        )
    else:
        best = min(fitting, key=lambda candidate: (candidate.n_blocking, candidate.sent_bytes))
    lines, available = (
        [f'mesh.axes=auto: {best.format()}'],
        f'the {memory / 1e9:,.3g} GB of a device',
    )
    if best is not simplest:
        reason = 'more communication' if simplest in fitting else f'does not fit in {available}'
        lines.append(f'  instead of {simplest.format()}: {reason}')
    if not fitting:
        lines.append(
            f'NOTE: {best.total_bytes / 1e9:,.3g} GB may not fit in {available}, and every other '
            'mesh needs more. More devices, a higher train.microbatches, or model.remat=full may '
            'help.'
        )
    return best.mesh, lines


def _list_candidates(
    recipe: Recipe, learner: Learner, devices: list[jax.Device], runs: int
) -> list[MeshCandidate]:
    """Returns the meshes that model, batch and hosts allow, with their costs."""
    n, layout, stages = len(devices), state_layout(learner), recipe.stage_recipes
    largest = max(stages, key=lambda stage: stage.microbatch_size * stage.data.seq_len)
    residual_bytes = estimate_residual_bytes(dataclasses.replace(learner, recipe=largest))
    divisors = [size for size in range(1, n + 1) if n % size == 0]
    configured = {axis: getattr(recipe.mesh, axis) for axis in CHOSEN_AXES}
    sizes = [[configured[axis]] if configured[axis] > 1 else divisors for axis in CHOSEN_AXES]
    candidates, refusals = [], []
    for axis_sizes in itertools.product(*sizes):
        config = dataclasses.replace(recipe.mesh, **dict(zip(CHOSEN_AXES, axis_sizes, strict=True)))
        try:
            mesh = make_mesh(config, devices, runs)
            if runs == 1:
                check_idle_devices(config, mesh, n)
            check_devices(recipe, mesh, jax.process_count())
            process_share(mesh)
        except ValueError as error:
            refusals.append(error)
            continue
        parts = mesh.size // (mesh.shape['run'] * mesh.shape['tensor'])
        sent_bytes = estimate_sent_bytes(recipe, learner, mesh)
        state_bytes = estimate_state_bytes(layout, mesh)
        candidates.append(
            MeshCandidate(
                config, format_mesh(mesh), state_bytes, residual_bytes // parts, sent_bytes
            )
        )
    if not candidates:
        raise ValueError(f'mesh.axes=auto finds no valid mesh for {n} devices: {refusals[0]}')
    return candidates


def estimate_state_bytes(layout: Any, mesh: Mesh) -> int:
    """Returns the bytes of the state and the gradients on a device."""
    shapes, specs = layout
    state = add_shardings(shapes, specs, mesh)
    return sum(
        math.prod(leaf.sharding.shard_shape(leaf.shape)) * leaf.dtype.itemsize
        for tree in (state, state.params)
        for leaf in jax.tree.leaves(tree)
    )


def estimate_residual_bytes(learner: Learner) -> int:
    """Returns the bytes of residuals of a microbatch, summed over all devices.

    With model.remat they include the layer that is computed again, and exclude residuals on the
    host.
    """
    recipe, model = learner.recipe, learner.model
    rows = recipe.data.batch_size // recipe.train.microbatches

    def residual_bytes_with(remat):
        config = update_recipe(recipe, {'model.remat': remat})
        traced = build_learner(config, model.vocab_size, learner.bos_id, model.kernels.platform)
        # Parameters are residuals too, and cancel in the difference.
        return _trace_residual_bytes(traced, 2 * rows) - _trace_residual_bytes(traced, rows)

    remat = recipe.model.remat
    if remat == 'none':
        return residual_bytes_with(remat)
    total = residual_bytes_with(DEVICE_POLICIES.get(remat, remat))
    return total + residual_bytes_with('none') // recipe.model.n_layers


def _trace_residual_bytes(learner: Learner, rows: int) -> int:
    shapes, _ = state_layout(learner)
    recipe = learner.recipe
    hyper = jax.eval_shape(lambda: make_hyper(recipe))
    batch = batch_shapes(update_recipe(recipe, {'data.batch_size': rows, 'train.microbatches': 1}))

    def backward(state, batch, hyper):
        weights, _ = learner.description.reparam.apply(state.params, state.reparam, True)

        def loss(weights):
            variables = {'params': weights, **state.stats}
            return apply_loss(learner, variables, batch, hyper, TRAINING)[0]['objective']

        return jax.vjp(loss, weights)[1]

    residuals = jax.tree.leaves(jax.eval_shape(backward, shapes, batch, hyper))
    return sum(math.prod(leaf.shape) * leaf.dtype.itemsize for leaf in residuals)


def estimate_sent_bytes(recipe: Recipe, learner: Learner, mesh: Mesh) -> float:
    """Returns the bytes that a device sends in a step, by the formulas above.

    Args:
      recipe: the config.
      learner: its learner.
      mesh: the mesh.
    """
    n, model = mesh.shape, recipe.model
    shapes = jax.tree.leaves(learner.description.shapes)
    elements = sum(math.prod(leaf.shape) for leaf in shapes) / n['tensor']
    itemsize = jnp.dtype(model.dtype).itemsize
    gradients = 4 * elements
    gathered = (2 * itemsize + 4) * elements * missing_share(n['fsdp'])
    torus = torus_shape(mesh.devices.flat)
    if len(torus) > 1 and n['fsdp'] == math.prod(torus):
        gathered *= 2
    rows = recipe.data.batch_size / (n['data'] * n['fsdp'] * n['expert'])
    feature = itemsize * rows * recipe.data.seq_len / n['context']
    activation = feature * model.d_model
    keys = 6 * feature * model.n_kv_heads * model.head_dim * (n['context'] - 1)
    return (
        2 * gradients / n['fsdp'] * missing_share(n['data'] * n['context'])
        + gathered
        + 8 * activation * missing_share(n['tensor']) * model.n_layers
        + keys * model.n_layers
    )


def missing_share(n: int) -> float:
    """Returns (n - 1) / n, the share of an array cut into n parts that a device lacks."""
    return (n - 1) / n
