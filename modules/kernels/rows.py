"""What kernels over the rows of a matrix ask of their arrays, wherever they run."""

from typing import Any

import jax

TYPES = ('bfloat16', 'float32')


def refuse_types(name: str, *arrays: jax.Array | None) -> None:
    """ValueError for arrays of a type that these kernels do not take; None has none."""
    for array in arrays:
        if array is not None and array.dtype.name not in TYPES:
            raise ValueError(
                f'{name} takes {" and ".join(TYPES)}; got {array.dtype.name}. Choose reference.'
            )


def refuse_width(name: str, where: str, width: int, longest: int) -> None:
    """ValueError for rows of more than `longest` entries, all of which are to be `where`."""
    if width > longest:
        raise ValueError(
            f'{name} has whole rows in {where}, at most {longest:,} entries of this type; got '
            f'{width:,}. Choose reference.'
        )


def flat(x: jax.Array | None) -> jax.Array | None:
    """[..., D] as rows [N, D]; None stays."""
    return None if x is None else x.reshape(-1, x.shape[-1])


def itemsize(*arrays: Any) -> int:
    """Bytes of an entry of each, together; None has none."""
    return sum(array.dtype.itemsize for array in arrays if array is not None)
