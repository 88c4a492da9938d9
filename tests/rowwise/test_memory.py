"""Test that calls need little extra memory, that large results are ordinary arrays, and that nothing leaks."""

from __future__ import annotations

import contextlib
import pickle
import sys

import numpy as np
import pytest
from processes import SLACK, with_resident
from samples import DTYPES, MASKED, assert_fresh, assert_identical, random_problem

import ascend_grad as ag
from ascend_grad import _memory

# ---- growth ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("g", "y"),
    [
        pytest.param("memory[:, 0::2]", "memory[:, ::-2]", id="every second column"),
        pytest.param("memory[:4096, :4096].T", "memory[4096:, :4096].T", id="transposed"),
        pytest.param("memory.view('>f4')[0::2]", "memory.view('>f4')[1::2]", id="byte-swapped"),
        pytest.param("memory[0::2]", "np.broadcast_to(memory[1], memory[0::2].shape)", id="repeated"),
    ],
)
def test_large_inputs_are_not_copied(g, y, run_script, needs_memory):
    """Calls on large inputs of any layout make no copy of an input, which would take at least 64 MiB."""
    needs_memory(1)
    script = f"""
        import numpy as np
        import ascend_grad as ag
        memory = np.empty((2**13, 2**13), np.float32)
        memory[:] = np.linspace(0, 1, 2**13, dtype=np.float32)
        g, y = {g}, {y}
        out = np.zeros(g.shape, np.float32)
        out.fill(0)
        for axis in (-1, 0):
            ag.softmax_backward(g[:2000, :2000], y[:2000, :2000], axis)  # libraries and threads have started
        grown = {{}}
        for axis in (-1, 0):
            before = resident("VmHWM")
            ag.softmax_backward(g, y, axis, out=out)
            grown["backward", axis] = resident("VmHWM") - before
            ag.log_softmax(g, axis, out=out)
            grown["forward", axis] = resident("VmHWM") - before
        assert max(grown.values()) < {SLACK}, grown
    """
    run_script(with_resident(script))


@pytest.mark.parametrize("name", ["float32", "float16", "bfloat16"])
def test_results_of_another_dtype_and_in_place_take_nothing(name, run_script, needs_memory):
    needs_memory(1)
    script = f"""
        import numpy as np, ml_dtypes
        import ascend_grad as ag
        x = np.zeros((2**13, 2**12), np.dtype("{name}"))
        x.fill(0)
        out = np.zeros(x.shape, np.float32)
        out.fill(0)
        mask = np.zeros((1, 1, *x.shape), bool)
        ag.softmax(x[:1000, :1000], out=out[:1000, :1000])
        before = resident("VmHWM")
        for axis in (-1, 0):
            ag.softmax_backward(x, x, axis, out=out)
            ag.softmax_backward(x, x, axis, out=x)
            ag.log_softmax(x, axis, out=out)
        x = x[None, None]
        ag.scaled_masked_softmax_backward(x, x, mask[:, :, :1].repeat(x.shape[2], 2), out=out[None, None])
        grown = resident("VmHWM") - before - mask.nbytes
        assert grown < {SLACK}, grown
    """
    run_script(with_resident(script))


def test_workspace_size_is_an_upper_bound(run_script, needs_memory):
    """`workspace_size` is at least the memory that a call uses beyond arguments and result.

    The shapes cover every schedule. Some results overlap the input.
    """
    needs_memory(1)
    script = """
        import numpy as np
        import ascend_grad as ag
        memory = np.zeros(2**26, np.float32)
        memory.fill(0)
        out = np.zeros(2**25, np.float32)
        out.fill(0)
        ag.softmax(memory[:10**6], num_threads=2)
        for shape in ((1, 2**25), (2**25, 1), (2**12, 2**13), (2**22, 8), (8, 2**22)):
            for axis in (0, 1):
                x = memory[::2].reshape(shape)
                for result, copied in ((out.reshape(shape), 0), (memory[1 : 2**25 + 1].reshape(shape), out.nbytes)):
                    bound = ag.workspace_size("softmax", x, axis, out=result, num_threads=2)
                    before = resident("Rss")
                    with open("/proc/self/clear_refs", "w") as file:
                        file.write("5")  # VmHWM starts again
                    ag.softmax(x, axis, out=result, num_threads=2)
                    grown = resident("VmHWM") - before
                    assert grown <= bound + (4 << 20), (shape, axis, grown, bound)
                    assert bound < copied + (64 << 20), (shape, axis, bound)
    """
    run_script(with_resident(script))


@pytest.mark.parametrize("backward", [False, True])
def test_workspace_size_of_masked_operators(backward):
    """Masked operators, which have no `axis`, need the same workspace as a softmax over the last axis, and little more
    if they expand the mask."""
    x = np.ones((2, 1, 5, 7), np.float32)
    mask = np.zeros((2, 1, 5, 7), bool)
    operator, arrays = ("scaled_masked_softmax_backward", (x, x)) if backward else ("scaled_masked_softmax", (x,))
    expected = ag.workspace_size("softmax", x, num_threads=2)
    assert ag.workspace_size(operator, *arrays, mask, num_threads=2) == expected
    expanded = ag.workspace_size(operator, *arrays, mask[:1], num_threads=2)
    assert expected <= expanded <= expected + 2 * mask.nbytes + 256


# ---- large results ---------------------------------------------------------------------------------------------------


@pytest.fixture
def large(dtype) -> np.ndarray:
    """Return a newly allocated result just above the size from which the library maps memory itself."""
    shape = (_memory.HUGE_THRESHOLD // DTYPES[dtype].itemsize // 1000 + 1, 1000)
    x = np.broadcast_to(np.arange(1000).astype(DTYPES[dtype]), shape)
    return ag.log_softmax(x)


def test_large_results_are_ordinary_arrays(large, dtype):
    assert_fresh(large, large.shape, DTYPES[dtype])
    assert large.ctypes.data % 2**21 == 0
    assert_identical(large[-1], ag.log_softmax(np.arange(1000).astype(DTYPES[dtype])))
    copy = large.copy()
    assert copy.flags.owndata
    large[0] = 1
    assert not np.array_equal(large[0], copy[0])
    large.shape = (-1,)
    large.shape = copy.shape
    twin = pickle.loads(pickle.dumps(large, protocol=5))
    assert_identical(twin, large)
    assert twin.flags.writeable


def test_large_results_are_never_cut_from_under_a_view(large):
    """Views keep the memory alive. Resizing works or is refused, as for any array that does not own its memory."""
    last, at = large[-1].copy(), large.shape[0] - 1
    try:
        large.resize((at + 2, 1000), refcheck=False)
    except ValueError:
        assert not large.flags.owndata
    assert_identical(large[at], last)
    view = large[at, ::-1]
    del large
    np.empty(2**23).fill(1)
    assert view.base is not None


def test_views_keep_large_results_alive(dtype):
    row = np.arange(1000).astype(DTYPES[dtype])
    view = ag.softmax(np.broadcast_to(row, (_memory.HUGE_THRESHOLD // 1000, 1000)))[-1, ::-1]
    np.empty(2**24).fill(1)
    assert_identical(view[::-1].copy(), ag.softmax(row))


@pytest.mark.parametrize("nbytes", [-1, 0, 1])
def test_the_threshold_of_large_results(nbytes, dtype):
    n = _memory.HUGE_THRESHOLD // DTYPES[dtype].itemsize + nbytes
    row = np.zeros(1, DTYPES[dtype])
    result = ag.softmax(np.broadcast_to(row, (n, 1)))
    assert_fresh(result, (n, 1), DTYPES[dtype])
    assert np.all(result == 1)


def test_large_results_go_back_to_the_system(run_script, needs_memory):
    needs_memory(1)
    script = f"""
        import numpy as np
        import ascend_grad as ag
        x = np.broadcast_to(np.float32(1), (2**16, 1024))
        ag.softmax(x[:100])
        before = resident("Anonymous")
        for axis in (-1, 0):
            result = ag.softmax(x, axis)
            assert resident("Anonymous") - before >= result.nbytes
            view = result[5:]
            del result
            assert resident("Anonymous") - before >= view.nbytes
            del view
            assert resident("Anonymous") - before < {SLACK}, axis
        # An exception in the middle of a call loses nothing either.
        for _ in range(20):
            try:
                ag.softmax(x, 5)
            except ag.ParamInvalidError:
                pass
            try:
                ag.softmax(np.broadcast_to(np.float32(1), (2**60,)))
            except MemoryError:
                pass
        assert resident("Anonymous") - before < {SLACK}
    """
    run_script(with_resident(script))


# ---- leaks -----------------------------------------------------------------------------------------------------------


def test_thousands_of_calls_leave_nothing_behind(run_script):
    script = """
        import numpy as np, ml_dtypes
        import ascend_grad as ag

        def calls(count):
            for dtype in count * (np.float32, np.float16, ml_dtypes.bfloat16, np.float64):
                for shape in ((3, 5), (40, 700)):
                    x = np.ones(shape, dtype)
                    four, mask = x[None, None], np.zeros((1, 1, *shape), bool)
                    for backend in ("cpu", "reference"):
                        for out in (None, np.empty(shape, dtype), np.empty(shape[::-1], np.float32).T, x):
                            ag.softmax_backward(x, x, 0, out=out, backend=backend)
                            ag.log_softmax_backward(x.T, x.T, out=None if out is None else out.T, backend=backend)
                            ag.softmax(x[:, ::-1], out=out, backend=backend, num_threads=2)
                            ag.log_softmax(x[1:2], 0, backend=backend)
                        ag.scaled_masked_softmax_backward(four, four, mask, 2.0, backend=backend)
                        ag.scaled_masked_softmax(four, mask[..., :], 2, backend=backend)
                        for bad in (None, [1], "x", x[0], x.astype(int)):
                            try:
                                ag.softmax_backward(x, bad, backend=backend)
                            except ag.AscendGradError:
                                pass
                    ag.explain("softmax", x)
                    ag.workspace_size("softmax_backward", x, x, out=x)

        leave_nothing(calls, 5, 20, 1 << 20)
    """
    run_script(with_resident(script))


def test_reference_counts_stay(operator, backend, assert_references_stay):
    shape = (1, 2, 3, 50) if operator in MASKED else (6, 50)
    function = getattr(ag, operator)
    for dtype in DTYPES.values():
        problem = random_problem(operator, shape, dtype)
        out = np.empty(shape, dtype)
        strided = [np.repeat(a, 2, -1)[..., ::2] for a in problem.arrays]
        counted = (*problem.arrays, *strided, out, dtype, *DTYPES.values(), None, True, shape, ag.AscendGradError)

        def calls(problem=problem, strided=strided, out=out):
            for arrays in (problem.arrays, strided):
                function(*arrays, **problem.settings, backend=backend)
                function(*arrays, **problem.settings, backend=backend, out=out, num_threads=1)
                with contextlib.suppress(ag.ParamTypeError):
                    function(*arrays[:-1], [1], **problem.settings, backend=backend)
                with contextlib.suppress(ag.ParamInvalidError):
                    function(*arrays, **problem.settings, backend=backend, out=out[0])

        assert_references_stay(calls, counted, 100)


def test_references_to_large_results_stay():
    x = np.broadcast_to(np.float32(1), (_memory.HUGE_THRESHOLD // 4000 + 1, 1000))
    before = sys.getrefcount(x.dtype)
    for _ in range(20):
        result = ag.softmax(x)
    del result
    assert abs(sys.getrefcount(x.dtype) - before) < 10


# ---- more than 2**31 elements ----------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def two_billion(needs_memory) -> np.ndarray:
    needs_memory(4.8)
    return np.empty(2**31 + 2**16, np.float16)


@pytest.mark.parametrize(
    ("shape", "axis", "y"),
    [((-1, 2**16), 1, "itself"), ((-1, 2**16), 0, "itself"), ((1, -1), 1, "itself"), ((1, -1), 1, "repeated")],
)
def test_more_than_two_billion_elements(two_billion, shape, axis, y):
    """An in-place call on more than 2**31 elements of 16 bits is right.

    All elements are 0 except for the ends of the first and the last row (or column). Their results are exact.
    """
    g = two_billion.reshape(shape)
    g.fill(0)
    rows = g if axis == 1 else g.T
    values = np.arange(-5, 9).astype(np.float16) / 4
    for row in (rows[0], rows[-1]):
        row[:7], row[-7:] = values[:7], values[7:]
    other = g if y == "itself" else np.broadcast_to(np.float16(0.25), g.shape)
    assert ag.softmax_backward(g, other, axis, out=g) is g
    y_values = values if y == "itself" else np.full_like(values, 0.25)
    expected = ((values - np.sum(values * y_values, dtype=np.float64)) * y_values).astype(np.float16)
    for row in (rows[0], rows[-1]):
        np.testing.assert_array_equal(np.concatenate([row[:7], row[-7:]]), expected)
    if len(rows) > 1:
        assert not np.any(rows[len(rows) // 2])
        assert not np.any(rows[:, rows.shape[1] // 2])
