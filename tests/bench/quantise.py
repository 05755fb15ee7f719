"""Losses of the runs of a sweep after quantising: methods, numbers of bits and calibration texts.

    uv run python -m tests.bench.quantise --sweep=WORKDIR --text=NAME=SOURCE [--text=...]
        [--bits=8,4,3,2] [--methods=rtn,gptq] [--rows=64]

Each run is rounded in this process and scored on its own validation text. Methods that read a text
are calibrated on each SOURCE in turn. `broken` is GPTQ with the moments of its inputs in another
order, so that the errors are made up for by the wrong inputs. `activations` rounds no weight, but
the activations of all products in the blocks, with one scale for a tensor.

Prints the increase of the loss in nats per token: the mean over runs that differ in nothing but the
seed, with its 95% interval (t). Then, over all runs, each method minus `rtn`, and each text minus
the first one, both by run.
"""

import argparse
import collections
import itertools
from pathlib import Path

from lm.launch.before_jax import prepare_process

BROKEN, ACTIVATIONS = 'broken', 'activations'


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument('--sweep', type=Path, required=True)
    parser.add_argument('--text', action='append', default=[], metavar='NAME=SOURCE')
    parser.add_argument('--bits', default='8,4,3,2')
    parser.add_argument('--methods', default='')
    parser.add_argument('--rows', type=int, default=64, help='of each text')
    parser.add_argument('--arm', default='attention.gate', help='the field that runs differ in')
    return parser.parse_args()


def main() -> None:
    prepare_process()  # before JAX is imported
    args = parse_arguments()

    import numpy as np
    from scipy import stats

    from eval.convert.fold import build_cpu_learner
    from eval.convert.prune import ScoreReader, read_text_rows
    from eval.convert.quantise import METHODS, Quantisation, Quantiser
    from eval.load import load, open_data
    from lm.config.resolve import flatten, update_recipe

    methods = args.methods.split(',') if args.methods else [*METHODS, BROKEN, ACTIVATIONS]
    texts = dict(text.split('=', 1) for text in args.text)
    increases = collections.defaultdict(list)
    for folder in sorted(path.parent for path in args.sweep.glob('*/checkpoints')):
        checkpoint = load(folder)
        validation = open_data(checkpoint).validation
        held_out_BT = np.stack([validation[i]['tokens'] for i in range(args.rows)])
        rows = {n: read_text_rows(checkpoint, s, '--text')[: args.rows] for n, s in texts.items()}
        quantisers = {'': Quantiser(checkpoint)}
        quantisers |= {name: Quantiser(checkpoint, rows_BT) for name, rows_BT in rows.items()}
        plain = quantisers[''].measure_loss({}, held_out_BT)
        arm = flatten(checkpoint.recipe)[args.arm]

        def loss_with_rounded_activations(bits, checkpoint=checkpoint, held_out_BT=held_out_BT):
            changes = {'kernels.matmul': 'simulated', 'kernels.x_format': f'int{bits}'}
            recipe = update_recipe(
                checkpoint.recipe,
                {**changes, 'kernels.w_format': 'wide', 'kernels.g_format': 'wide'},
            )
            learner = build_cpu_learner(recipe, checkpoint.meta['vocab_size'])
            reader = ScoreReader(learner, recipe.microbatch_size)
            return reader.compute_loss(checkpoint.weights, held_out_BT)

        for method, bits in itertools.product(methods, map(int, args.bits.split(','))):
            if method == ACTIVATIONS:
                loss = loss_with_rounded_activations(bits)
                increases[arm, method, '', bits].append(loss - plain)
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
                increases[arm, method, name, bits].append(loss - plain)
        print(f'{folder.name}: {args.arm}={arm}, loss {plain:.4f}', flush=True)

    def format_mean(values):
        n = len(values)
        half = stats.sem(values) * stats.t.ppf(0.975, n - 1) if n > 1 else float('nan')
        return f'{np.mean(values):+.4f} ± {half:.4f}'

    print(f'| {args.arm} | method | text | bits | increase |\n|---|---|---|---|---|')
    pooled = collections.defaultdict(list)
    for (arm, method, name, bits), values in increases.items():
        print(f'| {arm} | {method} | {name} | {bits} | {format_mean(values)} |')
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
