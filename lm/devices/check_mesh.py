"""Checks, before anything is compiled, that a config can be laid over the available devices."""

import math
from collections.abc import Iterator
from typing import cast

import jax
from jax.sharding import Mesh

from lm.config.fields import AUTO
from lm.config.recipe import Recipe
from lm.devices.mesh import batch_parts, check_idle_devices, make_mesh, torus_shape
from lm.model.check import check_each_stage, check_kinds
from lm.model.kernels import select_kernels
from modules.attention import ATTENTIONS
from modules.choices import nearest_divisor
from modules.kernels.attention import ATTENTION_KERNELS
from modules.mlp import MLPS
from modules.options import declared_options
from modules.parallel.axes import BATCH


def check_single_run(recipe: Recipe) -> None:
    """Raises ValueError as `check_devices` does, and if a single run would leave devices idle.

    With mesh.axes=auto, `lm.devices.auto_mesh` checks when it selects the mesh.
    """
    if recipe.mesh.axes == AUTO:
        return
    mesh = make_mesh(recipe.mesh)
    check_idle_devices(recipe.mesh, mesh, jax.device_count())
    check_devices(recipe, mesh, jax.process_count())


def check_devices(recipe: Recipe, mesh: Mesh, n_processes: int = 1) -> None:
    """Checks that a config fits a mesh.

    Args:
      recipe: the config.
      mesh: the mesh of its devices.
      n_processes: number of processes that hold the devices.

    Raises:
      ValueError: if a microbatch or a width of the model cannot be cut evenly over the mesh, or if
        the model has nothing that one of its axes could cut, in any stage of the run.
    """
    check_each_stage(recipe, lambda stage: check_devices(stage, mesh, n_processes))
    _check_rows(recipe, mesh)
    _check_width(mesh, 'fsdp', 'model.d_model', recipe.model.d_model)
    _check_width(mesh, 'context', 'data.seq_len', recipe.data.seq_len)
    _check_width(mesh, 'tensor', 'model.n_heads', recipe.model.n_heads)
    _check_width(mesh, 'tensor', 'model.d_ff', recipe.model.d_ff)
    for part in recipe.forward_mode_targets if mesh.shape['fsdp'] > 1 else ():
        raise ValueError(
            f'{part} needs a forward-mode derivative, which sharded embeddings do not have; got '
            f'mesh.fsdp={mesh.shape["fsdp"]}. Use these devices for mesh.data.'
        )
    _check_experts(recipe, mesh)
    check_kinds(recipe, lambda kind: _check_context(kind, mesh))
    if mesh.size % n_processes:
        raise ValueError(
            f'{mesh.size} devices cannot be divided evenly among {n_processes} processes'
        )


def _check_rows(recipe: Recipe, mesh: Mesh) -> None:
    rows, parts, n = recipe.data.batch_size, recipe.train.microbatches, batch_parts(mesh)
    if rows % (parts * n):
        fitting = max(1, round(rows / (parts * n))) * parts * n
        axes = [f'mesh.{axis}' for axis in BATCH if mesh.shape[axis] > 1] or ['devices']
        raise ValueError(
            f'data.batch_size must be a multiple of train.microbatches * {" * ".join(axes)} = '
            f'{parts} * {n}; got {rows}. Nearest that works: {fitting}.'
        )


def _check_width(mesh: Mesh, axis: str, field: str, width: int) -> None:
    n = mesh.shape[axis]
    if width % n:
        raise ValueError(
            f'mesh.{axis} must divide {field}; got {n} for {width}. Nearest that works: '
            f'mesh.{axis}={nearest_divisor(width, n)} or {field}={max(1, round(width / n)) * n}.'
        )


def _check_experts(recipe: Recipe, mesh: Mesh) -> None:
    for kind in recipe.kinds.values():
        if (granularity := kind.mlp.options.get('granularity', 1)) > 1:
            width = recipe.model.d_ff // granularity
            _check_width(mesh, 'tensor', 'model.d_ff / mlp.granularity', width)
        for part, name in ((kind.mlp, 'expert_width'), (kind.attention, 'key_heads')):
            if (size := part.options.get(name)) is not None:
                _check_width(mesh, 'tensor', part.option_path(name), size)
    if mesh.shape['expert'] == 1:
        return
    sizes = [kind.mlp.options.get('n_experts') for kind in recipe.kinds.values()]
    if not any(sizes):
        choices = [name for name, row in MLPS.items() if 'n_experts' in declared_options(row)]
        raise ValueError(
            f'mesh.expert={mesh.shape["expert"]} shards experts, but {recipe.mlp} has none. Choose '
            f'model.mlp={"|".join(choices)}, or use these devices for mesh.data.'
        )
    for n_experts in filter(None, sizes):
        _check_width(mesh, 'expert', 'mlp.n_experts', n_experts)
    if any(kind.mlp.options.get('dispatch') == 'ragged' for kind in recipe.kinds.values()):
        raise ValueError(
            'mlp.dispatch=ragged computes all experts on each device, for the tokens of the '
            f'device; got mesh.expert={mesh.shape["expert"]}. Use these devices for mesh.fsdp, or '
            'choose mlp.dispatch=capacity.'
        )


def _check_context(recipe: Recipe, mesh: Mesh) -> None:
    """Checks that attention supports rows with tokens on several devices."""
    n = mesh.shape['context']
    if n == 1:
        return
    if not recipe.attention.row.supports_context_axis:
        choices = [name for name, row in ATTENTIONS.items() if row.supports_context_axis]
        raise ValueError(
            f'mesh.context={n} shards the tokens of a row, but {recipe.attention} reads them in '
            f'order. Choose model.attention={"|".join(choices)}, or mesh.context=1.'
        )
    name = select_kernels(recipe, mesh.devices.flat[0].platform).kernel_name('attention')
    refuse_cut = ATTENTION_KERNELS[name].check_context_axis
    if refuse_cut is None:
        choices = [
            candidate for candidate, row in ATTENTION_KERNELS.items() if row.check_context_axis
        ]
        raise ValueError(
            f'mesh.context={n} shards the tokens of a row, but kernels.attention={name} needs '
            f'whole rows. Choose kernels.attention={"|".join(choices)}.'
        )
    refuse_cut(recipe.data.seq_len, n)


def list_mesh_notes(recipe: Recipe, mesh: Mesh, vocab_size: int) -> Iterator[str]:
    """Yields a note for each array that an axis fails to cut, and for idle devices.

    Args:
      recipe: the config.
      mesh: the mesh of its devices.
      vocab_size: number of tokens with an embedding.
    """
    if mesh.size < (n := jax.device_count()):
        yield f'{n - mesh.size} of {n} devices are idle. Set mesh.data=-1 to use all of them.'
    torus = torus_shape(mesh.devices.flat)
    if len(torus) > 1 and mesh.shape['fsdp'] == math.prod(torus):
        yield (
            f'mesh.fsdp={mesh.shape["fsdp"]} covers a whole torus of '
            f'{" x ".join(map(str, torus))}, over which XLA has no reduce-scatter: it sums whole '
            f'gradients and sends twice the bytes. Set mesh.fsdp={max(torus)} and mesh.data=-1 to '
            'avoid this.'
        )
    tensor = mesh.shape['tensor']
    for arrays, size, name in (
        ('keys and values', cast(int, recipe.model.n_kv_heads), 'model.n_kv_heads'),
        ('embeddings and logits', vocab_size, 'the vocabulary'),
    ):
        if size % tensor:
            yield (
                f'{arrays} are whole on every device, because mesh.tensor={tensor} does not divide '
                f'{name}, {size}. {-(-size // tensor) * tensor} would be sharded.'
            )
