"""Computes the values of a measure and writes them to a file, for the claims board.

python -m eval.claims.measures NAME FILE
"""

from lm.launch.before_jax import prepare_process

if __name__ == '__main__':
    prepare_process()  # before JAX is imported

from pathlib import Path

from eval.claims.evidence import compute_measure
from lm.launch.command import run_program


def main(argv: list[str]) -> None:
    if len(argv) != 3:
        raise ValueError(
            'The command needs a measure and a file for its values, as in '
            'python -m eval.claims.measures NAME FILE'
        )
    compute_measure(argv[1], Path(argv[2]))


if __name__ == '__main__':
    run_program(main)
