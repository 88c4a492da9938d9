"""Test `ascend_grad.rowwise` from Cython: it gives the Python functions' bits, and statuses instead of exceptions."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from samples import (
    BACKWARD,
    DTYPES,
    MASKED,
    OPERATORS,
    Layout,
    Problem,
    allocated,
    assert_guarded,
    assert_identical,
    laid_out,
    random_problem,
)

import ascend_grad as ag
from ascend_grad.errors import STATUS_NAMES

SUCCESS, NULLPTR, INVALID, BAD_ALLOC = 0, 161001, 161002, 200000
TESTS = Path(__file__).parents[1] / "support"


def matrices(operator: str, shape: tuple[int, int], dtype) -> Problem:
    """Make a problem whose arrays have two dimensions."""
    problem = random_problem(operator, (1, 1, *shape) if operator in MASKED else shape, DTYPES[str(dtype)])
    return problem.replaced(*(array.reshape(shape) for array in problem.arrays))


def right(problem: Problem, num_threads: int = 1) -> np.ndarray:
    """Return the result of the Python function."""
    arrays, shape = problem.arrays, problem.shape
    if problem.operator in MASKED:
        arrays = tuple(array[None, None] for array in arrays)
    function = getattr(ag, problem.operator)
    return function(*arrays, **problem.settings, num_threads=num_threads, backend="cpu").reshape(shape)


def call(calls, problem: Problem, out: np.ndarray | None, num_threads: int = 1) -> int:
    """Call the `cdef` function, and return its status. Arrays that the operator does not take are None."""
    inputs = list(problem.arrays)
    mask = inputs.pop() if problem.operator in MASKED else None
    a, b = inputs if problem.operator in BACKWARD else (inputs[0], None)
    scale = problem.settings.get("scale", 1.0)
    number = OPERATORS.index(problem.operator)
    dtype = next(str(array.dtype) for array in (a, b, out) if array is not None)
    if dtype in calls.DTYPES_16:
        a, b, out = (None if array is None else array.view(np.uint16) for array in (a, b, out))
        return calls.bits16(number, a, b, mask, out, calls.DTYPES_16[dtype], scale, num_threads)
    return getattr(calls, dtype)(number, a, b, mask, out, scale, num_threads)


def test_the_page(heads):
    random = np.random.default_rng(14)
    logits, grad = random.standard_normal((2, 70, 300), np.float32)
    wide = logits.astype(np.float64)
    y = np.exp(wide - wide.max(-1, keepdims=True))
    y /= y.sum(-1, keepdims=True)
    expected = (grad - (grad * y).sum(-1, keepdims=True)) * y
    out = np.empty_like(logits)
    for num_threads in (0, 1, 2):
        out[...] = np.nan
        heads.logits_grad(logits, grad, out, num_threads)
        np.testing.assert_allclose(out, expected, rtol=1e-5, atol=1e-7)
    out[...] = np.nan
    heads.logits_grad(logits.T, grad.T, out.T)
    assert np.isfinite(out).all()
    with pytest.raises(ValueError, match="status 161002"):
        heads.logits_grad(logits, grad[:-1], out)
    cube = logits.reshape(7, 10, 300).copy()
    heads.softmax_heads(cube)
    np.testing.assert_allclose(cube.reshape(70, 300), y, rtol=1e-5, atol=1e-7)


def test_numbers_of_statuses(calls):
    names = {STATUS_NAMES[code].removeprefix("ACLNN_ERR_").removeprefix("ACL_ERROR_"): code for code in STATUS_NAMES}
    assert {name: names[name] for name in calls.STATUS if name != "SUCCESS"} | {"SUCCESS": 0} == calls.STATUS


# Shapes of problems that are computed serially, as whole blocks, as splits of rows, or as splits of gathered tiles.
SHAPES = [(1, 1), (3, 17), (64, 700), (5, 9000), (2, 40_000), (700, 3)]
LAYOUTS = {
    "rows": Layout((0, 1), (1, 1)),
    "transposed": Layout((1, 0), (1, 1)),
    "backwards": Layout((0, 1), (-1, -1)),
    "gaps": Layout((0, 1), (2, 3)),
}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("num_threads", [1, 2])
def test_same_bits_as_from_python(operator, dtype, shape, layout, num_threads, calls):
    problem = matrices(operator, shape, dtype)
    expected = right(problem, num_threads)
    out, buffer = allocated(shape, problem.dtype, LAYOUTS[layout])
    strided = problem.replaced(*(laid_out(array, LAYOUTS[layout], readonly=True) for array in problem.arrays))
    assert call(calls, strided, out, num_threads) == SUCCESS
    assert_identical(out, expected)
    assert_guarded(out, buffer)


@given(data=st.data())
def test_any_matrices(operator, dtype, data, calls):
    """Results on matrices of any size are right, if each operand has a different layout or is broadcast."""
    shape = tuple(data.draw(st.sampled_from((0, 1, 2, 3, 8, 33, 130))) for _ in range(2))
    problem = matrices(operator, shape, dtype)
    step, order = st.sampled_from((1, 1, -1, 2, -3)), st.permutations((0, 1))
    chosen = st.builds(Layout, order.map(tuple), st.tuples(step, step))
    inputs = [laid_out(array, data.draw(chosen)) for array in problem.arrays]
    if data.draw(st.booleans()) and shape[0]:
        inputs[0] = np.broadcast_to(inputs[0][:1], shape)
    problem = problem.replaced(*inputs)
    expected = right(problem)
    out, buffer = allocated(shape, problem.dtype, data.draw(chosen))
    assert call(calls, problem, out, data.draw(st.sampled_from((0, 1, 2)))) == SUCCESS
    assert_identical(out, expected)
    assert_guarded(out, buffer)


@pytest.mark.parametrize("num_threads", [0, 1, 2])
def test_from_threads_of_the_caller(operator, num_threads, calls):
    """Calls from a prange of two threads are right, also if they ask for separate thread teams."""
    problems = [matrices(operator, (40, 2500), "float32")] * 9
    expected = right(problems[0])
    inputs = [np.stack(arrays) for arrays in zip(*(problem.arrays for problem in problems), strict=True)]
    mask = inputs.pop() if operator in MASKED else np.zeros((9, 1, 1), bool)
    out = np.empty_like(inputs[0])
    scale = problems[0].settings.get("scale", 1.0)
    assert calls.float32_in_prange(OPERATORS.index(operator), inputs[0], inputs[-1], mask, out, scale, num_threads) == 0
    assert_identical(out, np.broadcast_to(expected, out.shape))


# ---- one array twice -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", [(3, 17), (5, 9000)])
def test_in_place(operator, dtype, shape, calls):
    problem = matrices(operator, shape, dtype)
    expected = right(problem)
    for i in range(1 + (operator in BACKWARD)):
        for layout in LAYOUTS.values():
            inputs = [laid_out(array, layout) for array in problem.arrays]
            assert call(calls, problem.replaced(*inputs), inputs[i], 2) == SUCCESS
            assert_identical(inputs[i], expected)


@pytest.mark.parametrize(
    ("of_input", "of_out"),
    [
        (np.s_[:, :20], np.s_[:, 20:]),
        (np.s_[:, 20:], np.s_[:, :20]),
        (np.s_[:, ::2], np.s_[:, 1::2]),
        (np.s_[::2, :20], np.s_[1::2, :20]),
        (np.s_[:5, :20], np.s_[5:, :20]),
        (np.s_[::-2, 19::-1], np.s_[::2, 20:]),
    ],
)
def test_halves_of_one_array(of_input, of_out, calls):
    for transposed in (False, True):
        whole = np.zeros((10, 40), np.float32)
        x, out = whole[of_input], whole[of_out]
        problem = matrices("softmax", x.shape, "float32")
        x[...] = problem.arrays[0]
        expected = right(problem.replaced(x.T.copy()) if transposed else problem)
        x, out = (x.T, out.T) if transposed else (x, out)
        assert call(calls, problem.replaced(x), out) == SUCCESS
        assert_identical(out, expected)


@pytest.mark.parametrize(
    ("of_input", "of_out"),
    [
        (np.s_[:5, :20], np.s_[1:6, :20]),
        (np.s_[:5, :20], np.s_[:5, 1:21]),
        (np.s_[:5, :20], np.s_[4::-1, :20]),
        (np.s_[:5, :20], np.s_[:5, 19::-1]),
        (np.s_[:5, :20], np.s_[:5, :40:2]),
        (np.s_[:5, :5], (slice(0, 5), slice(0, 5), "T")),
    ],
)
def test_partial_overlap_is_refused(operator, of_input, of_out, calls):
    whole = np.zeros((10, 40), np.float32)
    x = whole[of_input]
    out = whole[of_out[:2]].T if len(of_out) == 3 else whole[of_out]
    problem = matrices(operator, x.shape, "float32")
    for i in range(1 + (operator in BACKWARD)):
        inputs = list(problem.arrays)
        x[...] = inputs[i]
        before = whole.copy()
        inputs[i] = x
        assert call(calls, problem.replaced(*inputs), out) == INVALID
        assert_identical(whole, before)


def test_a_mask_in_the_result(calls):
    x = matrices("scaled_masked_softmax", (4, 16), "float32")
    out = np.zeros((4, 16), np.float32)
    mask = out.view(bool)[:, ::4]
    assert call(calls, x.replaced(x.arrays[0], mask), out) == INVALID
    assert not out.any()


@pytest.mark.parametrize("strides", [(0, 4), (4, 4), (16, 0), (8, 4), (-8, 4)])
def test_results_that_overlap_themselves(operator, strides, calls):
    problem = matrices(operator, (3, 5), "float32")
    memory = np.zeros(64, np.float32)
    out = np.lib.stride_tricks.as_strided(memory[20:], (3, 5), strides)
    assert call(calls, problem, out) == INVALID
    assert not memory.any()


# ---- refused arguments -----------------------------------------------------------------------------------------------


def test_shapes_that_differ(operator, dtype, calls):
    problem = matrices(operator, (3, 5), dtype)
    for i in range(len(problem.arrays) + 1):
        for spoilt in (np.s_[:2], np.s_[:, :4], np.s_[:0], np.s_[:, :0]):
            inputs, out = list(problem.arrays), np.zeros((3, 5), problem.dtype)
            if i < len(inputs):
                inputs[i] = inputs[i][spoilt]
                given = out
            else:
                given = out[spoilt]
            assert call(calls, problem.replaced(*inputs), given) == INVALID
            assert not out.astype(float).any()


@pytest.mark.parametrize("strides", [(2**62, 4), (-(2**62), 4), (4, 2**61), (-(2**63), 4)])
def test_strides_beyond_the_address_space(operator, strides, calls):
    """Strides whose products with the axes' lengths overflow are refused."""
    problem = matrices(operator, (3, 5), "float32")
    for i in range(len(problem.arrays) + 1):
        inputs, out = list(problem.arrays), np.zeros((3, 5), np.float32)
        spoilt = [*inputs, out]
        spoilt[i] = np.lib.stride_tricks.as_strided(spoilt[i], strides=strides)
        assert call(calls, problem.replaced(*spoilt[:-1]), spoilt[-1]) == INVALID
        assert not out.any()


def test_strides_that_lead_to_no_element_may_be_anything(operator, calls):
    problem = matrices(operator, (1, 5), "float32")
    inputs = [np.lib.stride_tricks.as_strided(each, strides=(2**62, each.itemsize)) for each in problem.arrays]
    out = np.zeros((1, 5), np.float32)
    assert call(calls, problem.replaced(*inputs), out) == SUCCESS
    assert_identical(out, right(problem))


@pytest.mark.parametrize("shape", [(0, 0), (0, 3), (3, 0)])
@pytest.mark.parametrize("num_threads", [0, 1, 2])
def test_empty(operator, dtype, shape, num_threads, calls):
    problem = matrices(operator, shape, dtype)
    assert call(calls, problem, np.empty(shape, problem.dtype), num_threads) == SUCCESS


def test_views_of_nothing(operator, dtype, calls):
    problem = matrices(operator, (3, 5), dtype)
    out = np.zeros((3, 5), problem.dtype)
    for i in range(len(problem.arrays)):
        inputs = [None if i == j else array for j, array in enumerate(problem.arrays)]
        assert call(calls, problem.replaced(*inputs), out) == NULLPTR
    assert not out.astype(float).any()
    assert call(calls, problem, None) == NULLPTR


@pytest.mark.parametrize("num_threads", [-1, -(2**31), 2**31 - 1])
def test_numbers_of_threads(operator, dtype, num_threads, calls):
    problem = matrices(operator, (3, 5), dtype)
    out = np.full((3, 5), 7, problem.dtype)
    assert call(calls, problem, out, num_threads) == INVALID
    assert (out == 7).all()


@pytest.mark.parametrize("dtype_16", [-1, 0, 3, 4])
def test_dtypes_that_do_not_exist(operator, dtype_16, calls):
    x, mask = np.zeros((3, 5), np.uint16), np.zeros((3, 5), bool)
    out = np.full((3, 5), 7, np.uint16)
    assert calls.bits16(OPERATORS.index(operator), x, x, mask, out, dtype_16, 1.0, 1) == INVALID
    assert (out == 7).all()


NO_MEMORY = """
    import importlib.util, sys
    sys.path[:0] = [{tests!r}, {here!r}]
    import numpy as np
    from failing_malloc import ended, fail_at
    from samples import DTYPES, assert_identical
    from test_rowwise import BAD_ALLOC, SUCCESS, call, matrices, right
    spec = importlib.util.spec_from_file_location("calls", {module!r})
    calls = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(calls)
    failures = 0
    for dtype in DTYPES:
        for shape in ((30, 41), (2, 40_000)):
            problem = matrices({operator!r}, shape, dtype)
            columns = problem.replaced(*(np.asfortranarray(array) for array in problem.arrays))
            for given in (problem, columns):
                expected = right(given)
                for num_threads in (1, 2):
                    n, status, failed = 0, None, True
                    while failed or status != SUCCESS:
                        n += 1
                        out = np.full(shape[::-1], 7, given.dtype).T
                        arguments = (calls, given, out, num_threads)
                        status = None  # where Python itself gets no memory
                        try:
                            fail_at(n)
                            status = call(*arguments)
                        except MemoryError:
                            pass
                        failed = ended()
                        if status != SUCCESS:
                            assert status in (None, BAD_ALLOC), status
                            assert (out == 7).all()
                            failures += status == BAD_ALLOC
                        else:
                            assert_identical(out, expected)
    assert failures
"""


def test_no_memory(operator, calls, failing_malloc, run_script):
    """If an allocation fails, the status reports it, and nothing is written. Each allocation fails once."""
    script = NO_MEMORY.format(
        tests=str(TESTS), here=str(Path(__file__).parent), module=calls.__file__, operator=operator
    )
    run_script(script, LD_PRELOAD=failing_malloc, PYTHONMALLOC="malloc")
