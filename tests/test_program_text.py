"""Reference: traffic of programs that can be counted by hand, as XLA compiles them for CPUs."""

import jax
import jax.numpy as jnp

from tests.program_text import SMALL, moves

ROWS, WIDTH = 16, SMALL
ARRAY = 4 * ROWS * WIDTH  # bytes


def count_moved_bytes(function, *shapes):
    arguments = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes]
    return sum(move.bytes for move in moves(jax.jit(function).lower(*arguments).compile()))


def test_each_array_counts_once():
    """The program's text without a comment has more operands than fit in a line."""
    assert count_moved_bytes(lambda *arrays: sum(arrays), *[(ROWS, WIDTH)] * 8) == 9 * ARRAY


def test_loop_iterations_move_their_rows():
    """Each row is read and written at least once, and at most between three operations. Catches a
    loop that counts once, and iterations that count the whole arrays.
    """
    bytes_moved = count_moved_bytes(
        lambda x: jax.lax.map(lambda row: jnp.sort(2 * row), x), (ROWS, WIDTH)
    )
    assert 2 * ARRAY <= bytes_moved <= 8 * ARRAY < ROWS * ARRAY
