"""Compiles training steps with kernels for chips of a platform, and prints a line of JSON for each.

The platform is the argument; its chips need not be here. It runs in its own process, as libtpu can
be loaded only once in a process.
"""

import json
import re
import sys

import jax

from lm.devices.blueprint import Blueprint
from lm.devices.run_axis import SINGLE
from lm.devices.shardings import jit_init
from lm.model.check import check
from lm.run.program import Program
from lm.training.state import make_hyper
from tests.helpers import BOS, VOCAB, tiny_config
from tests.program_text import hidden
from tests.programs import kernels_compiled
from tpu.chips import CHIPS

CHANGES = {
    'kernels.rms_norm': 'pallas',
    'kernels.cross_entropy': 'pallas',
    'model.qk_norm': 'rmsnorm',
    'model.dtype': 'bfloat16',
    'model.d_model': 32,
    'model.n_kv_heads': 1,
    'data.seq_len': 128,
    'data.mask_documents': True,
}
OF_PLATFORM = {
    'tpu': {'kernels.implementation': 'splash'},
    'gpu': {'kernels.attention': 'reference', 'kernels.softmax': 'pallas'},
}
# name: chip, number of chips, run axis, number of runs, changes.
PROGRAMS = {
    'one chip': ('v5e', 1, SINGLE, 1, {}),
    'four chips': (
        'v6e',
        4,
        SINGLE,
        1,
        {
            'attention.window': 64,
            'attention.full_every': 2,
            'attention.sinks': 'learned',
            'attention.softcap': 30.0,
            'model.norm': 'seednorm',
        },
    ),
    'four runs on four chips': ('v5p', 4, 'vmap', 4, {'mesh.data': 2}),
    'two halves of a chip': ('tpu7x', 2, SINGLE, 1, {'model.norm': 'gated_rmsnorm'}),
    'one GPU': ('h200', 1, SINGLE, 1, {'attention.softcap': 30.0, 'loss.chunk': 64}),
    'four runs on four GPUs': ('h200', 4, 'vmap', 4, {'mesh.data': 2}),
    'parameters on four GPUs': ('h200', 4, SINGLE, 1, {'mesh.data': 1, 'mesh.fsdp': 4}),
}


def main(platform: str) -> None:
    for name, (chip, chips, axis_name, runs, changes) in PROGRAMS.items():
        if CHIPS[chip].platform != platform:
            continue
        config = tiny_config(CHANGES | OF_PLATFORM[platform] | changes)
        check(config)
        devices = list(CHIPS[chip].make_host_devices(chips)[:chips])
        blueprint = Blueprint(config, VOCAB, BOS, devices, memory=lambda: 0, runs=runs)
        program = Program(blueprint, axis_name).compile_step(runs)
        text = program.as_text()
        key, hyper = jax.eval_shape(lambda: jax.random.key(0)), make_hyper(config)
        jit_init(blueprint.learner, blueprint.mesh).lower(key, hyper)
        queries = r'%\S*splash_mha\S* = \(?bf16\[([\d,]+)\].*tpu_custom_call'
        rows = r'%\w*?((?:rms_norm|cross_entropy)(?:_backward)?)_*[.\d]* = .*tpu_custom_call'
        # The program does not name the kernels of a GPU.
        compiled = kernels_compiled()
        row_kernels = re.findall(rows, text) + [
            re.sub(r'_\d+$', '', kernel.kernel) for kernel in compiled
        ]
        record = {
            'program': name,
            'mesh': {axis: n for axis, n in blueprint.mesh.shape.items() if n > 1},
            'kernels': sorted(set(re.findall(r'splash_mha_\w+', text))),
            'of rows': sorted(set(row_kernels)),
            'of queries': sorted(set(re.findall(queries, text)))[-1:],
            'all-gathers': text.count(' all-gather('),
            'hidden': hidden(program),
            'spilled': sum(kernel.spilled for kernel in compiled),
        }
        print(json.dumps(record), flush=True)


if __name__ == '__main__':
    main(*sys.argv[1:])
