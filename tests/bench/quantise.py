"""Losses of the runs of a sweep after quantising: methods, numbers of bits and calibration texts.

    uv run python -m tests.bench.quantise --sweep=WORKDIR [--text=NAME=SOURCE ...]
        [--bits=8,4,3,2] [--methods=rtn,gptq] [--rows=64] [--arm=FIELD] [--losses]

Each run is rounded in this process and scored on its own validation text. Methods that read a text
are calibrated on each SOURCE in turn. `broken` is GPTQ with the moments of its inputs in another
order, so that the errors are made up for by the wrong inputs. `activations` rounds no weight, but
the activations of all products in the blocks, with one scale for a tensor. `weights` rounds weights
at each product, as `kernels.matmul=simulated` does in training, with one scale for a row.

Prints the increase of the loss in nats per token (`--losses`: the loss): the mean over runs that
differ in nothing but the seed, with its 95% interval (t). Then, over all runs, each method minus
`rtn`, and each text minus the first one, both by run.
"""

import argparse
import collections
import itertools
from pathlib import Path

from lm.launch.before_jax import prepare_process

BROKEN = 'broken'
# Methods that round an operand of products instead of stored weights: the operand and its block.
OPERANDS = {'activations': ('x', 'tensor'), 'weights': ('w', 'row')}


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument('--sweep', type=Path, required=True)
    parser.add_argument('--text', action='append', default=[], metavar='NAME=SOURCE')
    parser.add_argument('--bits', default='8,4,3,2')
    parser.add_argument('--methods', default='')
    parser.add_argument('--rows', type=int, default=64, help='of each text')
    parser.add_argument('--arm', default='attention.gate', help='the field that runs differ in')
    parser.add_argument('--losses', action='store_true', help='print losses, not increases')
    return parser.parse_args()


def main() -> None:
    prepare_process()  # before JAX is imported
    args = parse_arguments()

    import numpy as np
    from scipy import stats

    from eval.convert.fold import build_cpu_learner
    from eval.convert.prune import ScoreReader, read_text_rows
    from eval.convert.quantise import METHODS, ROW_LENGTH, Quantisation, Quantiser
    from eval.load import load, open_data
    from lm.config.resolve import flatten, update_recipe

    methods = args.methods.split(',') if args.methods else [*METHODS, BROKEN, 'activations']
    texts = dict(text.split('=', 1) for text in args.text)
    changes = collections.defaultdict(list)
    for folder in sorted(path.parent for path in args.sweep.glob('*/checkpoints')):
        checkpoint = load(folder)
        validation = open_data(checkpoint).validation
        held_out_BT = np.stack([validation[i]['tokens'] for i in range(args.rows)])
        rows = {
            n: read_text_rows(checkpoint, s, '--text', ROW_LENGTH)[: args.rows]
            for n, s in texts.items()
        }
        quantisers = {'': Quantiser(checkpoint)}
        quantisers |= {name: Quantiser(checkpoint, rows_BT) for name, rows_BT in rows.items()}
        plain = quantisers[''].measure_loss({}, held_out_BT)
        base = 0.0 if args.losses else plain
        arm = flatten(checkpoint.recipe)[args.arm]

        def loss_with_rounded(operand, block, bits, checkpoint=checkpoint, held_out_BT=held_out_BT):
            formats = {f'kernels.{name}_format': 'wide' for name in 'xwg'}
            formats[f'kernels.{operand}_format'] = f'int{bits}'
            products = {'kernels.matmul': 'simulated', f'kernels.{operand}_block': block}
            recipe = update_recipe(checkpoint.recipe, {**products, **formats})
            learner = build_cpu_learner(recipe, checkpoint.meta['vocab_size'])
            reader = ScoreReader(learner, recipe.microbatch_size)
            return reader.compute_loss(checkpoint.weights, held_out_BT)

        for method, bits in itertools.product(methods, map(int, args.bits.split(','))):
            if method in OPERANDS:
                loss = loss_with_rounded(*OPERANDS[method], bits)
                changes[arm, method, '', bits].append(loss - base)
                continue
            row = 'gptq' if method == BROKEN else method
            for name in rows if METHODS[row].needs_moments else ['']:
                quantiser = quantisers[name]
                if method == BROKEN:
                    quantiser = Quantiser(checkpoint, rows[name])
                    quantiser.moments = {
                        path: moments[..., ::-1, ::-1]
                        for path, moments in quantisers[name].moments.items()
                    }
                quantised = quantiser.quantise(Quantisation(row, bits))
                loss = quantiser.measure_loss(quantised.params, held_out_BT)
                changes[arm, method, name, bits].append(loss - base)
        print(f'{folder.name}: {args.arm}={arm}, loss {plain:.4f}', flush=True)

    def format_mean(values, sign='+'):
        n = len(values)
        half = stats.sem(values) * stats.t.ppf(0.975, n - 1) if n > 1 else float('nan')
        return f'{np.mean(values):{sign}.4f} ± {half:.4f}'

    kind, sign = ('loss', '') if args.losses else ('increase', '+')
    print(f'| {args.arm} | method | text | bits | {kind} |\n|---|---|---|---|---|')
    pooled = collections.defaultdict(list)
    for (arm, method, name, bits), values in changes.items():
        print(f'| {arm} | {method} | {name} | {bits} | {format_mean(values, sign)} |')
        pooled[method, name, bits] += values
    print('\n| method | text | bits | minus rtn | minus the first text |\n|---|---|---|---|---|')
    for (method, name, bits), values in pooled.items():
        differences = [
            format_mean(np.subtract(values, pooled[key]))
            if key in pooled and key[:2] != (method, name)
            else ''
            for key in (('rtn', '', bits), (method, next(iter(texts), ''), bits))
        ]
        print(f'| {method} | {name} | {bits} | {" | ".join(differences)} |')


if __name__ == '__main__':
    main()
