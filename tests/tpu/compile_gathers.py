"""Compiles the training step of a small model for TPUs of each kind, which need not be here, with
its parameters cut over four devices, and prints the waits for its all-gathers: one line of JSON
each.

It is a separate process, as libtpu is loaded once per process.
"""

import functools
import json

from lm.devices.run_axis import SINGLE
from lm.run.program import Program
from tests.lm.devices.compile_meshes import blueprint
from tpu.chips import open_topology
from tpu.collectives import collective_seconds, list_exchanges
from tpu.compiled_step import device_rates
from tpu.cost import operation_cost
from tpu.hlo import Module
from tpu.schedule import waiting_seconds

SLICES = {'v4': '2x2x2', 'v5e': '2x4', 'v5p': '2x2x2', 'v6e': '2x4', 'tpu7x': '2x2x1'}
MESH = {'data': 2, 'fsdp': 4}
# Heads of 128, as in large models: with narrower heads more gathers stand alone on a v5e.
SMALL = {'kernels.attention': 'reference', 'data.seq_len': 128, 'model.d_model': 512}
SMALL |= {'model.d_ff': 2048, 'model.n_heads': 4, 'model.n_kv_heads': 4}


def main() -> None:
    for kind, shape in SLICES.items():
        topology = open_topology(f'{kind}:{shape}')
        step_blueprint = blueprint(f'{kind}:{shape}', MESH, SMALL)
        module = Module(Program(step_blueprint, SINGLE).compile_step(1).as_text())
        devices, rates = list(step_blueprint.mesh.devices.flat), device_rates(topology)
        link = functools.partial(collective_seconds, topology=topology, devices=devices)

        def operation(computation, exchange, module=module, rates=rates):
            return operation_cost(module, computation, exchange, rates.flops, rates.bytes).seconds

        gathers = [
            exchange
            for counts in list_exchanges(module).values()
            for exchange in counts
            if exchange.collective.kind == 'all-gather'
        ]
        counts = {
            'kind': kind,
            'alone': sum(
                exchange.collective.rounds
                for exchange in gathers
                if exchange.start == exchange.done
            ),
            'beside': sum(
                exchange.collective.rounds
                for exchange in gathers
                if exchange.start != exchange.done
            ),
            'links': sum(
                exchange.collective.rounds * link(exchange.collective) for exchange in gathers
            ),
            'waits': waiting_seconds(module, operation, link)['all-gather'],
        }
        print(json.dumps(counts), flush=True)


if __name__ == '__main__':
    main()
