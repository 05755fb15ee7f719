"""Train steps that a refactoring must not change, as StableHLO before any compiler sees them.

    python -m tests.golden          # compares with tests/golden.json
    python -m tests.golden --write  # records the present steps; say in the commit why they changed

Each step is recorded as the hash of its text, its lines and how often it has each operation, so
that a difference has names. The text depends on the version of JAX, which is recorded too.
"""

import collections
import hashlib
import json
import re
import sys
from pathlib import Path
from typing import Any

import jax

from configs import default
from lm.config.resolve import resolve
from lm.devices.blueprint import Blueprint
from lm.devices.run_axis import SINGLE
from lm.run.program import Program
from lm.storage.files import discard_line
from tpu.compiled_step import nominal_vocabulary

FILE = Path(__file__).with_suffix('.json')
SMALL = {
    'model.d_model': 32,
    'model.n_layers': 2,
    'model.n_heads': 2,
    'model.d_ff': 64,
    'data.tokenizer': 'byte',
    'data.seq_len': 32,
}
STEPS: dict[str, dict[str, Any]] = {  # the changes of each from a small default run
    'default': {},
    'sigma_reparam': {
        'model.placement': 'peri',
        'model.reparam': 'sigma',
        'loss.z_loss': 1e-4,
        'optim.name': 'muon',
        'scaling.name': 'mup',
    },
    'pattern': {
        'model.pattern': 'gated_delta:position=none+softmax/moe',
        'model.stream': 'x0_scalars',
        'mlp.balance': 'bias',
    },
    'eight_devices': {'mesh.fsdp': 4, 'mesh.tensor': 2, 'data.batch_size': 8},
    'four_runs': {},
}


def lower_step(name: str) -> str:
    """Returns the StableHLO of a step in STEPS."""
    config = default.get_config()
    config.update_from_flattened_dict(SMALL | STEPS[name])
    recipe, n_runs = resolve(config.to_dict()), 4 if name == 'four_runs' else 1
    (vocab_size, bos_id), n_devices = (
        nominal_vocabulary(recipe),
        8 if name == 'eight_devices' else 1,
    )
    devices = jax.devices()[:n_devices]
    blueprint = Blueprint(recipe, vocab_size, bos_id, devices, lambda: 2**34, discard_line, n_runs)
    axis = 'vmap' if n_runs > 1 else SINGLE
    return Program(blueprint, axis).lower_step(n_runs).as_text()


def describe_step(text: str) -> dict[str, Any]:
    """Returns the hash, the number of lines and the operations of a step."""
    operations = collections.Counter(re.findall(r'\b((?:stablehlo|chlo|sdy)\.\w+)', text))
    return {
        'sha256': hashlib.sha256(text.encode()).hexdigest(),
        'lines': text.count('\n'),
        'operations': dict(sorted(operations.items())),
    }


def list_differences(name: str, recorded: dict[str, Any], present: dict[str, Any]) -> list[str]:
    """Returns a line for each operation with another number; [] for equal steps.

    Args:
      name: of the step.
      recorded: as of `describe_step`.
      present: likewise.
    """
    if recorded == present:
        return []
    before, after = recorded['operations'], present['operations']
    lines = [
        f'{name}: {operation} {before.get(operation, 0)} -> {after.get(operation, 0)}'
        for operation in sorted(before.keys() | after.keys())
        if before.get(operation) != after.get(operation)
    ]
    return lines or [f'{name}: the same operations, in another order or on other values']


def main() -> int:
    """Compares the steps with the file, or writes it. Returns the exit status."""
    present = {name: describe_step(lower_step(name)) for name in STEPS}
    if '--write' in sys.argv[1:]:
        content = {'jax': jax.__version__, 'steps': present}
        FILE.write_text(json.dumps(content, indent=1) + '\n')
        return 0
    recorded = json.loads(FILE.read_text())
    lines = [
        line
        for name in STEPS
        for line in list_differences(name, recorded['steps'][name], present[name])
    ]
    print('\n'.join([f'recorded with jax {recorded["jax"]}, now {jax.__version__}', *lines]))
    return bool(lines)


if __name__ == '__main__':
    jax.config.update('jax_num_cpu_devices', 8)
    sys.exit(main())
