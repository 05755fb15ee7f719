"""Compiles training steps on meshes of TPUs, and prints their traffic: a line of JSON for each.

The TPUs need not be here. It runs in its own process, as libtpu can be loaded only once in a
process.
"""

import json
from typing import Any

from lm.devices.blueprint import Blueprint
from lm.devices.check_mesh import check_devices
from lm.devices.run_axis import SINGLE
from lm.model.check import check
from lm.run.program import Program
from tests.helpers import BOS, tiny_config
from tpu.chips import open_topology
from tpu.collectives import OPCODE, list_collectives
from tpu.hlo import Module

VOCAB, D, F, LAYERS, ROWS, TOKENS, EXPERTS, CAPACITY = 1024, 256, 1024, 4, 32, 256, 8, 1.0
COMMON = {
    'model.d_model': D,
    'model.d_ff': F,
    'model.n_heads': 8,
    'model.n_kv_heads': 8,
    'model.n_layers': LAYERS,
    'model.dtype': 'bfloat16',
    'kernels.attention': 'blocked',
    'data.batch_size': ROWS,
    'data.seq_len': TOKENS,
    'data.mask_documents': True,
}
EXPERT = {
    'model.mlp': 'moe',
    'mlp.n_experts': EXPERTS,
    'mlp.expert_capacity': CAPACITY,
    'mlp.capacity_over': 'row',
}
LONG = {'data.seq_len': 4 * TOKENS, 'data.batch_size': ROWS // 4}
# name: TPUs, their mesh, changes. One axis over a whole torus has no reduce-scatter. Each takes 30
# CPU-seconds: what SOAP and Shampoo exchange, tests/modules/test_optim_whole.py sees on CPUs.
PROGRAMS = {
    'slices': ('v5e:2x2 x 2', {'data': 8}, {}),
    'parameters': ('v6e:4x4', {'data': 4, 'fsdp': 4}, {}),
    'grouped': ('v6e:4x4', {'data': 4, 'fsdp': 4}, {'model.n_kv_heads': 2, 'model.remat': 'full'}),
    'heads': ('v5e:2x4', {'data': 2, 'tensor': 4}, {}),
    'tokens': ('v5e:2x4', {'data': 2, 'context': 4}, {}),
    'dealt': ('v5e:2x4', {'data': 2, 'context': 4}, {'kernels.attention': 'splash', **LONG}),
    'experts': ('v5e:2x4', {'data': 2, 'expert': 4}, EXPERT),
    'matrices': ('v6e:4x4', {'data': 4, 'fsdp': 4}, {'optim.name': 'muon'}),
}


def blueprint(topology: str, sizes: dict[str, int], changes: dict[str, Any]) -> Blueprint:
    """Returns the blueprint of a training step.

    Args:
      topology: TPUs, such as 'v5e:2x2 x 2'.
      sizes: sizes of the mesh's axes.
      changes: changed fields of the config.
    """
    mesh = {f'mesh.{axis}': n for axis, n in sizes.items()}
    config = tiny_config(COMMON | changes | mesh)
    check(config)
    name, _, slices = topology.partition(' x ')
    devices = open_topology(name, int(slices or 1)).devices
    plan = Blueprint(config, VOCAB, BOS, devices, memory=lambda: 0)
    check_devices(config, plan.mesh)
    return plan


def main() -> None:
    for name, arguments in PROGRAMS.items():
        program = Program(blueprint(*arguments), SINGLE).compile_step(1)
        module = Module(program.as_text())
        waits = [
            instruction.opcode
            for _, instruction, _ in module.instructions()
            if OPCODE.match(instruction.opcode)
        ]
        record = {'program': name, 'sent': list_collectives(module), 'waits': waits}
        print(json.dumps(record), flush=True)


if __name__ == '__main__':
    main()
