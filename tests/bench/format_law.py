"""Fits the cost of few bits in the runs of configs/studies/format_law.py.

    uv run python -m tests.bench.format_law --sweep=WORKDIR

`L(width, E, M, B) - L(width) = a_width log2(B)^b / ((E + 0.5)^d (M + 0.5)^m)`, by least squares of
the losses' means over seeds. Prints the exponents, the error of the fit and that of formats which
the fit has not seen, and how much two seeds differ.
"""

import argparse
import collections
from pathlib import Path

from lm.launch.before_jax import prepare_process

NAMES = ('b', 'd', 'm')


def main() -> None:
    prepare_process()  # before JAX is imported
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument('--sweep', type=Path, required=True)
    args = parser.parse_args()

    import numpy as np
    from scipy import optimize

    from lm.study.tables.results import gather
    from modules.precision.formats import parse_format

    losses = collections.defaultdict(list)
    for record in gather(args.sweep):
        name, block = record['kernels_x_format'] or '', int(record['kernels_x_block'] or 0)
        losses[record['d_model'], block, name].append(record['ce'])
    spread = np.sqrt(np.mean([np.var(values, ddof=1) for values in losses.values()]))
    wide = {width: np.mean(values) for (width, _, name), values in losses.items() if not name}
    keys = sorted(key for key in losses if key[2])
    widths = sorted(wide)
    rows = []
    for width, block, name in keys:
        format = parse_format(name)
        cost = np.mean(losses[width, block, name]) - wide[width]
        index = widths.index(width)
        rows.append((index, np.log2(block), format.exponent_bits, format.mantissa_bits, cost))
    index, blocks, exponents, mantissas, costs = map(np.array, zip(*rows, strict=True))

    def predict(parameters, chosen):
        scales, (b, d, m) = np.exp(parameters[: len(widths)]), parameters[len(widths) :]
        return (
            scales[index[chosen]]
            * blocks[chosen] ** b
            / (exponents[chosen] + 0.5) ** d
            / (mantissas[chosen] + 0.5) ** m
        )

    def fit(chosen):
        start = np.array([0.0] * len(widths) + [1.0, 2.0, 2.0])
        return optimize.least_squares(lambda p: predict(p, chosen) - costs[chosen], start).x

    def error(parameters, chosen):
        return float(np.sqrt(np.mean((predict(parameters, chosen) - costs[chosen]) ** 2)))

    everything = np.ones(len(costs), bool)
    parameters = fit(everything)
    formats = sorted({name for _, _, name in keys})
    unseen = []
    for name in formats:
        is_held_out = np.array([key[2] == name for key in keys])
        predicted = predict(fit(~is_held_out), is_held_out)
        unseen += [*(predicted - costs[is_held_out])]
    print('| width | values that share a scale | format | cost | fit |\n|---|---|---|---|---|')
    for (width, block, name), cost, value in zip(
        keys, costs, predict(parameters, everything), strict=True
    ):
        print(f'| {width} | {block} | `{name}` | {cost:.3f} | {value:.3f} |')
    print({w: f'{s:.3g}' for w, s in zip(widths, np.exp(parameters[: len(widths)]), strict=True)})
    print({n: f'{p:.2f}' for n, p in zip(NAMES, parameters[len(widths) :], strict=True)})
    print(f'error of the fit {error(parameters, everything):.4f}')
    print(f'error of formats left out {np.sqrt(np.mean(np.square(unseen))):.4f}')
    print(f'costs deviate by {np.std(costs):.4f}, seeds by {spread:.4f}')


if __name__ == '__main__':
    main()
