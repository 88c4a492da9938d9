"""Test that the bits of results depend on the values alone, whatever the layouts of the arguments are."""

from __future__ import annotations

import dataclasses
import functools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from samples import (
    BFLOAT16,
    DTYPES,
    GUARD,
    LAYOUTS,
    MASKED,
    UNMASKED,
    Layout,
    Problem,
    allocated,
    assert_fresh,
    assert_guarded,
    assert_identical,
    laid_out,
    native_copy,
    random_problem,
)
from strategies import layouts, problems, views

import ascend_grad as ag


@given(data=st.data())
def test_any_layout(operator, engine, data):
    """Results are right for any layout of inputs and `out`. Bytes around `out` and the inputs are unchanged."""
    problem = data.draw(problems(operator))
    inputs = [data.draw(views(array)) for array in problem.arrays]
    strange = problem.replaced(*inputs)
    plain = problem.replaced(*(native_copy(array) for array in inputs))
    fresh = engine(strange)
    assert_fresh(fresh, problem.shape, problem.dtype, None if engine.backend == "npu" else inputs[0])
    assert_identical(fresh, engine(plain))
    out_dtype = DTYPES[data.draw(st.sampled_from(tuple(DTYPES)))]
    out, buffer = allocated(problem.shape, out_dtype, data.draw(layouts(len(problem.shape))))
    assert engine(strange, out=out) is out
    assert_guarded(out, buffer)
    ordinary = np.empty(problem.shape, out_dtype)
    engine(plain, out=ordinary)
    assert_identical(out, ordinary)
    engine.assert_right(plain, out)
    for array, copy in zip(inputs, plain.arrays, strict=True):
        assert_identical(array, copy)


@given(data=st.data())
def test_results_keep_the_axis_order(operator, engine, data):
    """The axis order of a new result depends only on its first input. A device's result is in C order."""
    problem = data.draw(problems(operator))
    rank = len(problem.shape)
    arrays = []
    for array in problem.arrays:
        backwards = tuple(slice(None, None, data.draw(st.sampled_from((1, 1, 1, -1)))) for _ in range(rank))
        turned = laid_out(array, Layout(tuple(data.draw(st.permutations(range(rank)))), (1,) * rank))
        turned[backwards] = array
        arrays.append(turned[backwards])
    result = engine(problem.replaced(*arrays))
    order = "C" if engine.backend == "npu" else "K"
    assert result.strides == np.empty_like(arrays[0], problem.dtype, order=order).strides
    assert_identical(result, engine(problem))


@given(data=st.data())
@pytest.mark.parametrize("operator", UNMASKED)
def test_any_dim_equals_the_last_one(operator, engine, data):
    problem = data.draw(problems(operator))
    if not problem.shape:
        return
    axis = problem.settings["axis"]
    turned = problem.replaced(*(np.moveaxis(a, axis, -1).copy() for a in problem.arrays), axis=-1)
    assert_identical(engine(problem), np.moveaxis(engine(turned), -1, axis))


@given(data=st.data())
def test_a_slice_of_the_problem_gives_the_slice_of_the_result(operator, engine, data):
    problem = data.draw(problems(operator))
    if not problem.shape:
        return
    index = [
        slice(*data.draw(st.sampled_from(((None,), (1, None), (None, None, 2), (None, None, -1), (0, 1)))))
        for _ in problem.shape
    ]
    index[problem.settings.get("axis", -1)] = slice(None)
    part = problem.replaced(*(a[tuple(index)] for a in problem.arrays))
    whole = engine(problem)
    assert_identical(engine(part), whole[tuple(index)])
    assert_identical(engine(part.replaced(*map(native_copy, part.arrays))), whole[tuple(index)])


#: Shapes and dims that are larger than those that hypothesis draws, with several blocks of rows and columns.
LARGE = {
    "rows": ((300, 1003), 1),
    "one long row": ((1, 200_003), 1),
    "narrow rows": ((40_001, 5), 1),
    "columns": ((301, 1100), 0),
    "narrow columns": ((40_001, 5), 0),
    "middle": ((7, 129, 150), 1),
}


@functools.lru_cache(maxsize=16)
def large_problem(operator: str, dtype: str, size: str) -> Problem:
    shape, axis = LARGE[size]
    return random_problem(operator, shape, DTYPES[dtype], axis)


@pytest.mark.parametrize("size", LARGE)
@pytest.mark.parametrize("operator", UNMASKED)
def test_large_arrays(operator, dtype, size, cpu_engine):
    problem = large_problem(operator, dtype, size)
    result = cpu_engine(problem)
    cpu_engine.assert_right(problem, result)
    if operator in ("softmax_backward", "log_softmax"):
        for layout in LAYOUTS:
            if len(problem.shape) == 3:
                layout = dataclasses.replace(layout, axes=(2, *layout.axes), steps=(*layout.steps, 1))
            assert_identical(
                cpu_engine(problem.replaced(*(laid_out(array, layout) for array in problem.arrays))), result
            )


@pytest.mark.parametrize("operator", UNMASKED)
def test_blocks_of_columns_beyond_the_cache(operator, dtype, cpu_engine):
    problem = random_problem(operator, (2311, 1061), DTYPES[dtype], 0)  # in 16 bits, each operand has 4.5 MiB
    rows = problem.replaced(*(np.ascontiguousarray(array.T) for array in problem.arrays), axis=-1)
    assert_identical(cpu_engine(problem), cpu_engine(rows).T)


@pytest.mark.parametrize("step", [-8, -5, -3, -2, 3, 4, 5, 6, 7, 8])
def test_steps(step, dtype, cpu_engines):
    """Elements at a distance of a few others are copied to the same bits, along the rows and across them."""
    for shape, axis in [((37, 70), 1), ((5, 3, 1000), 2), ((41, 90), 0), ((3000, 9), 1)]:
        problem = random_problem("softmax_backward", shape, DTYPES[dtype], axis)
        layout = Layout(tuple(range(len(shape))), (*(1,) * (len(shape) - 1), step))
        strided = [laid_out(array, layout) for array in problem.arrays]
        for engine in cpu_engines():
            assert_identical(engine(problem.replaced(*strided)), engine(problem))
            assert_identical(engine(problem.replaced(strided[0], problem.arrays[1])), engine(problem))


@pytest.mark.parametrize("operator", UNMASKED)
def test_inputs_that_repeat(operator, dtype, cpu_engines):
    """Inputs that are one element in each row, or one row for all rows, have the bits of their copies."""
    two, three = [((40, 70), 1), ((40, 70), 0), ((17, 6000), 1)], [((5, 6, 130), 2), ((5, 130, 6), 1), ((3, 50, 9), 0)]
    for shape, axis in two + three:
        problem = random_problem(operator, shape, DTYPES[dtype], axis)
        rest = tuple(i for i in range(len(shape)) if i != axis)
        for axes in ((axis,), rest, rest[:1], tuple(range(len(shape)))):
            for which in (slice(0, 1), slice(1, 2), slice(0, 2))[: 1 if len(problem.arrays) == 1 else 3]:
                for layout in ((1, False), (3, False), (-2, False), (1, True)):
                    check_repeats(problem, axes, which, *layout, cpu_engines)


def check_repeats(problem, axes, which, step, swapped, cpu_engines) -> None:
    arrays = list(problem.arrays)
    for i in range(len(arrays))[which]:
        small = arrays[i][tuple(slice(0, 1) if axis in axes else slice(None) for axis in range(arrays[i].ndim))]
        layout = Layout(tuple(range(small.ndim)), (*(1,) * (small.ndim - 1), step), swapped=swapped)
        arrays[i] = np.broadcast_to(laid_out(small, layout), problem.shape)
    repeated = problem.replaced(*arrays)
    copied = problem.replaced(*map(native_copy, arrays))
    for engine in cpu_engines():
        assert_identical(engine(repeated), engine(copied))
        wide, expected = np.empty(problem.shape), np.empty(problem.shape)
        engine(repeated, out=wide)
        engine(copied, out=expected)
        assert_identical(wide, expected)


def test_one_row_of_a_mask_for_all(cpu_engine):
    x, y = (np.random.default_rng(3).random((2, 3, 40, 70), np.float32) for _ in range(2))
    row = np.random.default_rng(4).random(140) < 0.3
    mask = np.broadcast_to(row[::2], (1, 1, 40, 70))
    problem = Problem("scaled_masked_softmax_backward", (x, y, mask), {"scale": 0.5})
    assert_identical(cpu_engine(problem), cpu_engine(problem.replaced(x, y, mask.copy())))


@pytest.mark.parametrize("heads", [(5, 3), (1, 3), (5, 1), (1, 1)])
@pytest.mark.parametrize("operator", MASKED)
def test_large_masked_arrays(operator, dtype, heads, cpu_engine):
    problem = random_problem(operator, (5, 3, 67, 131), DTYPES[dtype])
    *floats, mask = problem.arrays
    mask = mask[: heads[0], : heads[1]]
    problem = problem.replaced(*floats, native_copy(mask))
    plain = cpu_engine(problem)
    cpu_engine.assert_right(problem.replaced(*floats, np.broadcast_to(mask, problem.shape)), plain)
    for layout in (
        Layout((3, 1, 0, 2), (1, 1, 1, 1)),
        Layout((0, 1, 2, 3), (1, -1, 2, -2), shift=1, swapped=True),
        Layout((0, 1, 2, 3), (1, 1, 1, 1), shift=5),
    ):
        arrays = [laid_out(array, layout) for array in problem.arrays]
        assert_identical(cpu_engine(problem.replaced(*arrays)), plain)
        assert_identical(cpu_engine(problem.replaced(*floats, arrays[-1])), plain)


# ---- single facts ----------------------------------------------------------------------------------------------------


def test_bytes_at_odd_offsets(dtype, engine):
    problem = random_problem("softmax", (6, 11), DTYPES[dtype])
    for offset in (1, 2, 3, 5, 7):
        data = bytes(offset) + problem.arrays[0].tobytes()
        view = np.frombuffer(data, np.uint8)[offset:].view(DTYPES[dtype]).reshape(6, 11)
        assert not view.flags.writeable
        assert_identical(engine(problem.replaced(view)), engine(problem))


@pytest.mark.parametrize("operator", UNMASKED)
def test_rank_zero_is_a_row_of_one(operator, dtype, engine):
    problem = random_problem(operator, (), DTYPES[dtype])
    for axis in (-1, 0):
        result = engine(problem.replaced(axis=axis))
        assert_fresh(result, (), DTYPES[dtype])
        assert_identical(result, engine(problem.replaced(*(a.reshape(1) for a in problem.arrays))).reshape(()))


@pytest.mark.parametrize("operator", UNMASKED)
def test_empty_arrays_give_empty_results(operator, dtype, engine):
    for shape in ((0,), (0, 3), (3, 0), (2, 0, 4), (2**59, 0), (0,) * 8):
        for axis in range(-len(shape), len(shape)):
            problem = random_problem(operator, shape, DTYPES[dtype], axis)
            assert_fresh(engine(problem), shape, DTYPES[dtype])
            out, buffer = allocated(shape, DTYPES[dtype], Layout(tuple(range(len(shape))), (1,) * len(shape)))
            assert engine(problem, out=out) is out
            assert np.all(buffer == GUARD)


@pytest.mark.parametrize("operator", MASKED)
def test_empty_masked_arrays_give_empty_results(operator, dtype, engine):
    for shape in ((0, 1, 2, 3), (1, 0, 2, 3), (1, 2, 0, 3), (1, 2, 3, 0), (0, 0, 0, 0)):
        problem = random_problem(operator, shape, DTYPES[dtype])
        assert_fresh(engine(problem), shape, DTYPES[dtype])
        *floats, _ = problem.arrays
        one = np.ones((1, 1, *shape[2:]), bool)
        assert_fresh(engine(problem.replaced(*floats, one)), shape, DTYPES[dtype])


def test_byte_orders_count_as_equal(dtype, engine):
    problem = random_problem("softmax_backward", (5, 40), DTYPES[dtype])
    for swapped in ((True, False), (False, True), (True, True)):
        arrays = [
            laid_out(array, Layout((0, 1), (1, 1), swapped=swap))
            for array, swap in zip(problem.arrays, swapped, strict=True)
        ]
        result = engine(problem.replaced(*arrays))
        assert_fresh(result, problem.shape, DTYPES[dtype])
        assert_identical(result, engine(problem))


def test_swapped_bfloat16_is_swapped_memory(engine):
    """A bfloat16 array of the other byte order is read as such, though NumPy and ml_dtypes sometimes name it '>V2'."""
    values = np.array([1.0, 2.0, 3.0], np.float32).astype(BFLOAT16)
    swapped = values.view(np.uint16).byteswap().view(BFLOAT16.newbyteorder())
    assert_identical(engine(Problem("softmax", (swapped,), {})), engine(Problem("softmax", (values,), {})))


def test_read_only_memory_of_a_file(tmp_path, engine):
    problem = random_problem("softmax_backward", (30, 50), np.float32)
    for name, array in zip(("g", "y"), problem.arrays, strict=True):
        np.save(tmp_path / f"{name}.npy", array)
    mapped = [np.load(tmp_path / f"{name}.npy", mmap_mode="r") for name in ("g", "y")]
    result = engine(problem.replaced(*mapped))
    assert_fresh(result, problem.shape, np.float32)
    assert_identical(result, engine(problem))


def test_the_same_array_twice(dtype, engine):
    (x,) = random_problem("softmax", (9, 33), DTYPES[dtype]).arrays
    twice = Problem("softmax_backward", (x, x), {"axis": 0})
    assert_identical(engine(twice), engine(twice.replaced(x.copy(), x.copy())))


def test_subclasses_come_in_as_plain_arrays(backend):
    x = np.arange(6.0).reshape(2, 3)
    expected = ag.softmax(x, backend=backend)
    for other in (x.view(np.memmap), x.view(np.recarray)):
        result = ag.softmax(other, backend=backend)
        assert_fresh(result, (2, 3), np.dtype(np.float64))
        assert_identical(result, expected)
