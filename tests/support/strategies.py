"""Draw problems of any shape and values in any layout, by hypothesis."""

from __future__ import annotations

import numpy as np
from hypothesis import strategies as st
from samples import DTYPES, MASKED, Layout, Problem, laid_out, random_problem


@st.composite
def layouts(draw, rank: int) -> Layout:
    return Layout(
        axes=tuple(draw(st.permutations(range(rank)))),
        steps=tuple(draw(st.lists(st.sampled_from((1, 1, 1, -1, 2, -2, 3)), min_size=rank, max_size=rank))),
        shift=draw(st.sampled_from((0, 0, 1, 2, 3, 4, 8, 13))),
        swapped=draw(st.booleans()),
    )


@st.composite
def shapes(draw, operator: str) -> tuple[int, ...]:
    """Draw a shape of any rank that the operator takes. Most axes are short, some are long or empty."""
    rank = 4 if operator in MASKED else draw(st.integers(0, 8))
    shape = draw(st.lists(st.sampled_from((1, 2, 3, 3, 4)), min_size=rank, max_size=rank))
    if rank:
        axis = draw(st.integers(0, rank - 1))
        shape[axis] = draw(st.sampled_from((0, 1, 2, 5, 7, 16, 33, 70) + (300,) * (rank < 4)))
    return tuple(shape)


@st.composite
def problems(draw, operator: str) -> Problem:
    shape = draw(shapes(operator))
    axis = -1 if operator in MASKED else draw(st.integers(-max(len(shape), 1), max(len(shape), 1) - 1))
    return random_problem(operator, shape, DTYPES[draw(st.sampled_from(tuple(DTYPES)))], axis)


@st.composite
def views(draw, array: np.ndarray) -> np.ndarray:
    """Draw a layout of the values. Some axes may repeat their first element with stride 0."""
    repeated = draw(st.lists(st.integers(0, array.ndim - 1), max_size=2)) if array.size and array.ndim else []
    core = array[tuple(slice(0, 1) if axis in repeated else slice(None) for axis in range(array.ndim))]
    view = laid_out(core, draw(layouts(array.ndim)), readonly=draw(st.booleans()))
    return np.broadcast_to(view, array.shape) if repeated else view
