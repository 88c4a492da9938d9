"""Cutting an array into boxes that an operator along one axis can take one by one."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator

#: Elements of a box if the lengths allow it: little memory, and much work compared with the cost of a call.
BOX_ELEMENTS = 2**20
#: Minimum number of consecutive elements in a box: with fewer, several boxes would share every page of the file.
RUN_ELEMENTS = 2**13


def boxes(
    shape: tuple[int, ...], dim: int, fortran_order: bool, largest: int | None = None
) -> Iterator[tuple[slice, ...]]:
    """Yield boxes that cover an array, each of them whole along ``dim``, in the order of the array's memory.

    Parameters
    ----------
    shape : tuple of int
        The array's shape.
    dim : int
        The axis that is not cut, not negative.
    fortran_order : bool
        Whether the first axis is the one of consecutive elements, and not the last.
    largest : int, optional
        Elements from which a box has fewer consecutive elements. Only a box of one element in each other axis has more.

    Yields
    ------
    tuple of slice
        One slice per axis.
    """
    if math.prod(shape) == 0 or not shape:
        yield (slice(None),) * len(shape)
        return
    outwards = range(len(shape)) if fortran_order else range(len(shape) - 1, -1, -1)
    lengths = list(shape)
    elements, run = shape[dim], 1
    least_run = RUN_ELEMENTS if largest is None else max(1, min(RUN_ELEMENTS, largest // max(elements, 1)))
    for axis in outwards:
        if axis == dim:
            run = least_run  # further out, nothing is consecutive any more
            continue
        lengths[axis] = min(shape[axis], max(BOX_ELEMENTS // elements, -(-least_run // run)))
        elements *= lengths[axis]
        run *= lengths[axis]
    steps = {axis: range(0, shape[axis], lengths[axis]) for axis in reversed(outwards)}
    for starts in itertools.product(*steps.values()):
        corner = dict(zip(steps, starts))
        yield tuple(slice(corner[axis], corner[axis] + lengths[axis]) for axis in range(len(shape)))
