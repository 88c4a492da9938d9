"""Test that results go to ``out``, that no other memory is written, and that results are rounded once."""

from __future__ import annotations

import itertools

import ml_dtypes
import numpy as np
import oracles
import pytest
from faults import Noted
from samples import (
    BACKWARD,
    DTYPES,
    MASKED,
    OPERATORS,
    UNMASKED,
    Layout,
    Problem,
    allocated,
    assert_guarded,
    assert_identical,
    laid_out,
    random_problem,
)

import ascend_grad as ag
from ascend_grad import arrays

# ---- alignment -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", [(3, 5), (7, 64), (2, 300)])
def test_every_misalignment(operator, dtype, shape, cpu_engine):
    shape = (1, 1, *shape) if operator in MASKED else shape
    itemsize = DTYPES[dtype].itemsize
    for axis in (-1, 0) if operator in UNMASKED else (-1,):
        problem = random_problem(operator, shape, DTYPES[dtype], axis)
        fresh = cpu_engine(problem)
        for shift in (*range(0, 64 + itemsize, itemsize), 1, itemsize + 1, 63):
            layout = Layout(tuple(range(len(shape))), (1,) * len(shape), shift)
            out, buffer = allocated(shape, DTYPES[dtype], layout)
            cpu_engine(problem, out=out)
            assert_guarded(out, buffer)
            assert_identical(out, fresh)


def test_misaligned_results_beyond_the_cache(dtype, cpu_engine):
    """Misaligned results that are large enough for non-temporal stores are right. Rows end anywhere in a vector."""
    itemsize = DTYPES[dtype].itemsize
    row = random_problem("softmax_backward", (1021,), DTYPES[dtype])
    rows = 40 * 2**20 // itemsize // 1021
    # The gradients are broadcast, but every row of y has separate memory.
    g, y = np.broadcast_to(row.arrays[0], (rows, 1021)), np.tile(row.arrays[1], (rows, 1))
    expected = cpu_engine(row)
    for shift in (0, itemsize, 32 + itemsize, 1):
        out, buffer = allocated(y.shape, y.dtype, Layout((0, 1), (1, 1), shift))
        cpu_engine(row.replaced(g, y), out=out)
        assert_guarded(out, buffer)
        assert_identical(out, np.broadcast_to(expected, out.shape))


# ---- other dtypes: rounded once --------------------------------------------------------------------------------------


def test_results_of_another_dtype(operator, dtype, engine):
    shape = (1, 2, 19, 70) if operator in MASKED else (19, 70)
    for axis in (-1, 0) if operator in UNMASKED else (-1,):
        problem = random_problem(operator, shape, DTYPES[dtype], axis)
        for out_dtype in DTYPES.values():
            out = np.empty(shape, out_dtype)
            assert engine(problem, out=out) is out
            engine.assert_right(problem, out)
            if out_dtype == problem.dtype:
                assert_identical(out, engine(problem))


def test_the_accumulator_is_rounded_once(operator, dtype, cpu_engine):
    """The unrounded accumulator is rounded directly to the dtype of `out`."""
    shape = (1, 1, 40, 97) if operator in MASKED else (40, 97)
    for axis in (-1, 0) if operator in UNMASKED else (-1,):
        problem = random_problem(operator, shape, DTYPES[dtype], axis)
        accumulator = np.empty(shape, arrays.accumulator_dtype(DTYPES[dtype]))
        cpu_engine(problem, out=accumulator)
        assert_identical(cpu_engine(problem), oracles.rounded(accumulator, DTYPES[dtype]))
        for out_dtype in DTYPES.values():
            out = np.empty(shape, out_dtype)
            cpu_engine(problem, out=out)
            assert_identical(out, oracles.rounded(accumulator, out_dtype))


def nearly_ties(dtype) -> np.ndarray:
    """Make float64 values just beyond the middle of two neighbours of a 16-bit dtype, which are ties in float32."""
    info = ml_dtypes.finfo(dtype)
    ulps = 2.0**-info.nmant
    values = 1 + ulps * (np.arange(64) + 0.5)
    hair = 2.0**-40
    subnormal = float(info.smallest_subnormal) * (np.arange(8) + 0.5)
    values = np.concatenate([values, values + hair, values - hair, subnormal * (1 + hair), subnormal * (1 - hair)])
    return np.concatenate([values, -values, [float(info.max) * (1 + ulps / 4), float(info.max) * (1 + ulps)]])


@pytest.mark.parametrize("out_dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("axis", [-1, 0])
def test_float64_is_not_rounded_twice(out_dtype, axis, engine):
    """A float64 result is rounded to 16 bits directly, and not by way of float32.

    If y = 1 in a row whose gradients sum to 0, the result is the gradient itself.
    """
    values = nearly_ties(DTYPES[out_dtype])
    g = np.stack([values, -values], -1)
    problem = Problem("softmax_backward", (g, np.ones_like(g)), {"axis": -1})
    out = np.empty(g.shape, DTYPES[out_dtype])
    if axis == 0:
        problem = problem.replaced(*(np.ascontiguousarray(a.T) for a in problem.arrays), axis=0)
        out = np.empty(g.T.shape, DTYPES[out_dtype])
    engine(problem, out=out)
    engine.assert_right(problem, out)
    pairs = out if axis else out.T
    assert_identical(pairs[:, 1], -pairs[:, 0])
    # The rounding is checked independently: the result is the neighbour that is nearer in exact arithmetic.
    finite = np.isfinite(pairs[:, 0].astype(np.float64))
    got = pairs[finite, 0].astype(np.float64)
    assert np.all(np.abs(got - values[finite]) <= oracles.half_ulp(np.abs(values[finite]), DTYPES[out_dtype]))


# ---- out and the inputs share memory ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("operator", "which", "axis"),
    [
        (name, which, axis)
        for name in OPERATORS
        for which in range(1 + (name in BACKWARD))
        for axis in ((-1, 0) if name in UNMASKED else (-1,))
    ],
)
def test_in_place(operator, dtype, which, axis, engine):
    shape = (2, 3, 17, 33) if operator in MASKED else (102, 33)
    problem = random_problem(operator, shape, DTYPES[dtype], axis)
    expected = engine(problem)
    untouched = [a.copy() for a in problem.arrays]
    out = problem.arrays[which]
    assert engine(problem, out=out) is out
    assert_identical(out, expected)
    for other, (array, copy) in enumerate(zip(problem.arrays, untouched, strict=True)):
        if other != which:
            assert_identical(array, copy)


@pytest.mark.parametrize("axis", [0, 1])
@pytest.mark.parametrize("operator", UNMASKED)
def test_in_place_in_any_layout(operator, dtype, axis, engine):
    problem = random_problem(operator, (70, 35), DTYPES[dtype], axis)
    expected = engine(problem)
    first, *rest = problem.arrays
    for layout in (Layout((1, 0), (1, -2)), Layout((0, 1), (1, 1), shift=3, swapped=True)):
        out, buffer = allocated(first.shape, first.dtype, layout)
        out[...] = first
        engine(problem.replaced(out, *rest), out=out)
        assert_identical(out, expected)
        assert_guarded(out, buffer)


@pytest.mark.parametrize(("shape", "axis"), [((3, 70_001), 1), ((500, 301), 1), ((70_001, 3), 0), ((301, 700), 0)])
@pytest.mark.parametrize("operator", OPERATORS)
def test_in_place_with_threads(operator, dtype, shape, axis):
    """In-place results with several threads are right, although they overwrite inputs.

    Other threads, or later splits of the same row, may still have to read these inputs.
    """
    layouts = Layout((0, 1), (1, 1)), Layout((1, 0), (1, 1)), Layout((0, 1), (1, 2), swapped=True)
    if operator in MASKED:
        shape, axis = (1, 1, *shape), -1
        layouts = tuple(Layout((0, 1, *(a + 2 for a in x.axes)), (1, 1, *x.steps), swapped=x.swapped) for x in layouts)
    problem = random_problem(operator, shape, DTYPES[dtype], axis)
    function = getattr(ag, operator)
    expected = function(*problem.arrays, **problem.settings, num_threads=1)
    for which, layout in itertools.product(range(1 + (operator in BACKWARD)), layouts):
        inputs = [laid_out(array, layout) for array in problem.arrays]
        function(*inputs, **problem.settings, out=inputs[which], num_threads=2)
        assert_identical(inputs[which], expected)


def test_all_arguments_are_one_array(dtype, engine):
    (x,) = random_problem("softmax", (40, 41), DTYPES[dtype]).arrays
    expected = engine(Problem("softmax_backward", (x.copy(), x.copy()), {}))
    assert_identical(engine(Problem("softmax_backward", (x, x), {}), out=x), expected)


@pytest.mark.parametrize("axis", [0, 1])
@pytest.mark.parametrize("operator", ["softmax_backward", "log_softmax"])
def test_partial_overlap(operator, dtype, axis, engine):
    problem = random_problem(operator, (40, 40), DTYPES[dtype], axis)
    expected = engine(problem)
    first, *rest = problem.arrays
    for offset in (1, -1, 40, -40, 41, 500, 1599):
        memory = np.zeros(first.size + abs(offset), first.dtype)
        start = max(-offset, 0)
        shared = memory[start:][: first.size].reshape(first.shape)
        shared[...] = first
        out = memory[start + offset :][: first.size].reshape(first.shape)
        assert engine(problem.replaced(shared, *rest), out=out) is out
        assert_identical(out, expected)


@pytest.mark.parametrize("axis", [0, 1])
def test_out_is_another_view_of_an_input(dtype, axis, engine):
    problem = random_problem("softmax_backward", (33, 33), DTYPES[dtype], axis)
    g, y = problem.arrays
    expected = engine(problem)
    backwards = slice(None, None, -1)
    for view in (np.transpose, lambda x: x[backwards], lambda x: x[:, backwards], lambda x: x[backwards, backwards]):
        shared = y.copy()
        out = view(shared)
        assert engine(problem.replaced(g, shared), out=out) is out
        assert_identical(out, expected)


def test_out_is_an_input_read_as_another_dtype(dtype, engine):
    problem = random_problem("softmax", (16, 24), DTYPES[dtype])
    for out_dtype in DTYPES.values():
        expected = np.empty(problem.shape, out_dtype)
        engine(problem, out=expected)
        memory = np.zeros(problem.arrays[0].size * 8 + 8, np.uint8)
        for at in (0, 8):
            x = memory[: problem.arrays[0].nbytes].view(DTYPES[dtype]).reshape(problem.shape)
            x[...] = problem.arrays[0]
            out = memory[at:][: expected.nbytes].view(out_dtype).reshape(problem.shape)
            engine(problem.replaced(x), out=out)
            assert_identical(out, expected)


def test_out_shares_the_masks_memory(dtype, engine):
    problem = random_problem("scaled_masked_softmax_backward", (1, 2, 9, 16), DTYPES[dtype])
    expected = engine(problem)
    g, y, mask = problem.arrays
    out = np.zeros(problem.shape, DTYPES[dtype])
    shared = out.reshape(-1).view(np.uint8)[: mask.size].view(bool).reshape(mask.shape)
    shared[...] = mask
    engine(problem.replaced(g, y, shared), out=out)
    assert_identical(out, expected)


# ---- kinds of out ----------------------------------------------------------------------------------------------------


def test_subclasses_are_filled_and_returned(backend):
    x = np.arange(12.0).reshape(3, 4)
    out = np.empty((3, 4)).view(Noted)
    assert ag.softmax(x, out=out, backend=backend) is out
    assert_identical(np.asarray(out), ag.softmax(x, backend=backend))


def test_out_is_a_file(tmp_path, backend):
    x = np.arange(12.0, dtype=np.float32).reshape(3, 4)
    out = np.memmap(tmp_path / "out", np.float32, "w+", shape=x.shape)
    assert ag.softmax(x, out=out, backend=backend) is out
    out.flush()
    assert_identical(np.fromfile(tmp_path / "out", np.float32).reshape(3, 4), ag.softmax(x, backend=backend))


def test_rank_zero(dtype, engine):
    problem = random_problem("log_softmax", (), DTYPES[dtype])
    for swapped in (False, True):
        out, buffer = allocated((), DTYPES[dtype], Layout((), (), shift=1, swapped=swapped))
        assert engine(problem, out=out) is out
        assert_identical(out, engine(problem))
        assert_guarded(out, buffer)


def test_a_result_that_does_not_fit_raises_memory_error(backend):
    x = np.broadcast_to(np.float32(1), (2**60,))
    with pytest.raises(MemoryError):
        ag.softmax(x, backend=backend)
