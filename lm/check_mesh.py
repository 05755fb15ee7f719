"""Whether a config can be laid over the devices at hand, found before anything is compiled."""

import math
from collections.abc import Iterator

import jax
from jax.sharding import Mesh

from lm.check import asks_forward_mode
from lm.config import option_of, part_at
from lm.mesh import batch_parts, make_mesh, refuse_idle, torus_of
from lm.model import chosen_kernels
from lm.sections import AUTO, Config
from modules.attention.softmax import SoftmaxAttention
from modules.choices import nearest_divisor
from modules.devices import BATCH
from modules.kernels import OF_CUT_ROWS
from modules.kernels.attention.splash import BLOCKS, block_of
from modules.mlp import MLPS

# Mesh axis -> the sizes of the model that it cuts, and must divide.
WIDTHS = {
    'fsdp': ('model.d_model',),
    'context': ('data.seq_len',),
    'tensor': ('model.n_heads', 'model.d_ff'),
}


def check_single(config: Config) -> None:
    """`check_devices` of a run alone, on the devices at hand; ValueError where it would leave some
    of them idle. With mesh.axes=auto it is asked when the mesh is chosen (`lm.auto_mesh`).
    """
    if config.mesh.axes == AUTO:
        return
    mesh = make_mesh(config.mesh)
    refuse_idle(config.mesh, mesh, jax.device_count())
    check_devices(config, mesh, jax.process_count())


def check_devices(config: Config, mesh: Mesh, n_processes: int = 1) -> None:
    """ValueError where a microbatch, or a width of the model, cannot be cut evenly over the mesh,
    or where the model has nothing that an axis of it could cut.
    """
    _check_rows(config, mesh)
    for axis, fields in WIDTHS.items():
        for field in fields:
            section, name = field.split('.')
            _check_width(mesh, axis, field, getattr(getattr(config, section), name))
    for asker in asks_forward_mode(config) if mesh.shape['fsdp'] > 1 else ():
        raise ValueError(
            f'{asker} differentiates in forward mode, which the table of embeddings has not where '
            f'it is cut: mesh.fsdp={mesh.shape["fsdp"]}. Lay these devices along mesh.data.'
        )
    _check_experts(config, mesh)
    _check_context(config, mesh)
    if mesh.size % n_processes:
        raise ValueError(f'{mesh.size} devices do not spread evenly over {n_processes} processes')


def _check_rows(config: Config, mesh: Mesh) -> None:
    rows, parts, n = config.data.batch_size, config.train.microbatches, batch_parts(mesh)
    if rows % (parts * n):
        fitting = max(1, round(rows / (parts * n))) * parts * n
        over = [f'mesh.{axis}' for axis in BATCH if mesh.shape[axis] > 1] or ['devices']
        raise ValueError(
            f'data.batch_size must be a multiple of train.microbatches * {" * ".join(over)} = '
            f'{parts} * {n}; got {rows}. Nearest that works: {fitting}.'
        )


def _check_width(mesh: Mesh, axis: str, field: str, width: int) -> None:
    n = mesh.shape[axis]
    if width % n:
        raise ValueError(
            f'mesh.{axis} must divide {field}; got {n} for {width}. Nearest that works: '
            f'mesh.{axis}={nearest_divisor(width, n)} or {field}={max(1, round(width / n)) * n}.'
        )


def _check_experts(config: Config, mesh: Mesh) -> None:
    if mesh.shape['expert'] == 1:
        return
    part = part_at(config, 'model.mlp')
    n_experts = option_of(config, part, 'n_experts')
    if n_experts is None:
        able = [name for name, row in MLPS.items() if hasattr(row, 'n_experts')]
        raise ValueError(
            f'mesh.expert={mesh.shape["expert"]} cuts experts, and model.mlp={part.name} has none; '
            f'choose one of {", ".join(able)}, or lay these devices along mesh.data.'
        )
    _check_width(mesh, 'expert', 'mlp.n_experts', n_experts)


def _check_context(config: Config, mesh: Mesh) -> None:
    """Tokens of a row on several devices: softmax attention gathers the keys and values of all."""
    if mesh.shape['context'] == 1:
        return
    part = part_at(config, 'model.attention')
    if not issubclass(part.row, SoftmaxAttention):
        raise ValueError(
            f'mesh.context={mesh.shape["context"]} cuts rows of tokens, which model.attention='
            f'{part.name} reads in order; choose softmax, or mesh.context=1.'
        )
    name = chosen_kernels(config, mesh.devices.flat[0].platform).attention_name
    if name not in OF_CUT_ROWS:
        raise ValueError(
            f'mesh.context={mesh.shape["context"]} cuts rows of tokens, which kernels.attention='
            f'{name} must have whole; choose one of {", ".join(OF_CUT_ROWS)}.'
        )
    n, length = mesh.shape['context'], config.data.seq_len
    if name == 'splash' and block_of(length, n) is None:
        multiple = 2 * n * BLOCKS[-1]
        nearest = max(1, round(length / multiple)) * multiple
        raise ValueError(
            f'kernels.attention=splash computes two pieces of a row on each of mesh.context={n} '
            f'devices, in blocks of {BLOCKS[-1]} tokens: data.seq_len must be a multiple of '
            f'{multiple}; got {length}. Nearest that works: {nearest}.'
        )


def notes_of_mesh(config: Config, mesh: Mesh, vocab_size: int) -> Iterator[str]:
    """What stays whole on every device although an axis of the mesh could cut it, and devices that
    are left without work.
    """
    if mesh.size < (n := jax.device_count()):
        yield f'{n - mesh.size} of {n} devices are idle: mesh.data=-1 is for all of them.'
    torus = torus_of(mesh.devices.flat)
    if len(torus) > 1 and mesh.shape['fsdp'] == math.prod(torus):
        yield (
            f'mesh.fsdp={mesh.shape["fsdp"]} lies over a whole torus of '
            f'{" x ".join(map(str, torus))}, for which XLA sums gradients whole: twice the bytes. '
            f'mesh.fsdp={max(torus)} with mesh.data=-1 has them scattered.'
        )
    tensor = mesh.shape['tensor']
    for what, size, name in (
        ('keys and values', config.model.n_kv_heads, 'model.n_kv_heads'),
        ('embeddings and logits', vocab_size, 'the vocabulary'),
    ):
        if size % tensor:
            yield (
                f'{what} are whole on every device: mesh.tensor={tensor} does not divide {name}, '
                f'{size}. {-(-size // tensor) * tensor} would be cut.'
            )
