"""Test results as arrays of the caller's library, over memory that lives as long as either library uses it."""

from __future__ import annotations

import gc
import types
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from faults import INVALID, TYPE, outcome
from linear_samples import GRADIENT, LINEAR, LOSS, STATISTICS, WHOLE, problem_of
from parallel_samples import options_of, whole
from processes import with_resident
from producers import LIBRARIES, READ_ONLY, Exchanged, Newer, Old, Plain, live
from python_threads import empty_on_threads
from samples import DTYPES, assert_identical, random_problem

import ascend_grad as ag
from ascend_grad import parallel

TESTS = Path(__file__).parents[1] / "support"


@pytest.fixture(params=LIBRARIES)
def library(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture
def own(library):
    return LIBRARIES[library]


# ---- types of results ------------------------------------------------------------------------------------------------


def test_rowwise_results(operator, dtype, own, backend):
    problem = random_problem(operator, (2, 3, 4, 5), DTYPES[dtype])
    result = getattr(ag, operator)(*map(own, problem.arrays), **problem.settings, backend=backend)
    assert type(result) is own
    assert result.came_by_dlpack
    assert_identical(result.array, getattr(ag, operator)(*problem.arrays, **problem.settings, backend=backend))


@pytest.mark.parametrize("operator", LINEAR)
def test_linear_results(operator, dtype, own):
    problem = problem_of(operator, (9, 17, 5), dtype)
    results = getattr(ag, operator)(**problem.mapped(own).arguments)
    expected = getattr(ag, operator)(**problem.arguments)
    assert type(results) is type(expected)
    for result, right in zip(results, expected, strict=True):
        assert type(result) is own
        assert_identical(result.array, right)


def test_results_that_are_not_asked_for_are_none(own):
    x, w, target = own(np.eye(2)), own(np.ones((3, 2))), own(np.array([0, 2]))
    results = ag.linear_cross_entropy(x, w, target, output_mask=(False, True))
    assert results.input_grad is None
    assert type(results.loss) is type(results.weight_grad) is own
    assert results.loss.array.shape == ()
    assert ag.fused_linear_online_max_sum(x, w, target, 0, 3).vocab_parallel_logits is None


@pytest.mark.parametrize("function", [parallel.linear_cross_entropy, parallel.data_parallel_linear_cross_entropy])
def test_results_over_ranks(function, dtype, own):
    problem = whole((9, 17, 5), dtype)
    arrays = [problem.arguments[name] for name in ("input", "weight", "target")]
    options = options_of(problem) | {"comm": None}
    for mask in ((True, True), (False, True)):
        results = function(*map(own, arrays), **options, output_mask=mask)
        for result, right in zip(results, function(*arrays, **options, output_mask=mask), strict=True):
            if right is None:
                assert result is None
            else:
                assert type(result) is own
                assert_identical(result.array, right)


def test_results_of_no_library_are_numpys():
    x = np.linspace(0, 1, 6)
    for kind in (Plain, Old):
        assert type(ag.softmax(kind(x))) is np.ndarray
    assert type(ag.softmax(x.tolist())) is np.ndarray


def test_the_first_array_decides(own):
    x = np.linspace(0, 1, 6)
    for pair in ((own(x), x.tolist()), (x.tolist(), own(x)), (Plain(x), own(x)), (own(x), Plain(x))):
        assert type(ag.softmax_backward(*pair)) is own


def test_an_older_version_of_the_exchange_api():
    result = ag.softmax(Newer(np.zeros(4)))
    assert type(result) is Exchanged
    assert_identical(result.array, np.full(4, 0.25))


def test_namespaces_that_are_numpys():
    class Wrapper(Plain):
        def __array_namespace__(self, api_version=None):
            return np

    x = np.zeros((2, 2), ml_dtypes.bfloat16)
    result = ag.softmax_backward(Wrapper(x), x)
    assert type(result) is np.ndarray


def of_namespace(from_dlpack) -> type:
    """Return an array type whose library imports DLPack with the given function."""
    namespace = types.ModuleType("strict_arrays")
    namespace.from_dlpack = from_dlpack  # type: ignore[attr-defined]

    class Strict(Plain):
        def __array_namespace__(self, api_version=None):
            return namespace

    return Strict


@pytest.mark.parametrize("shape", [(), (0,), (2, 0, 3), (2, 3, 4)], ids=str)
def test_numpy_reads_what_is_handed_out(shape):
    """`numpy.from_dlpack` reads exported arrays, from capsules of DLPack 1.0 and of earlier versions."""
    x = np.linspace(0, 1, int(np.prod(shape))).reshape(shape)
    expected = ag.softmax(x)
    result = ag.softmax(of_namespace(np.from_dlpack)(x))
    assert_identical(result, expected)

    class Older:
        """Represent an array whose consumer requests no DLPack version, as consumers from before DLPack 1.0 do."""

        def __init__(self, value):
            self.value = value

        def __dlpack_device__(self):
            return self.value.__dlpack_device__()

        def __dlpack__(self, **_):
            return self.value.__dlpack__()

    assert_identical(ag.softmax(of_namespace(lambda value: np.from_dlpack(Older(value)))(x)), expected)


@pytest.mark.parametrize("settings", [{}, {"max_version": (1, 0)}], ids=["older", "newer"])
def test_capsules_that_nobody_reads(settings):
    def reader(value):
        capsules.extend(value.__dlpack__(**settings) for _ in range(3))
        return value

    capsules: list[object] = []
    exported = ag.softmax(of_namespace(reader)(np.zeros(4)))
    assert_identical(np.from_dlpack(exported), np.full(4, 0.25))
    del capsules[1:]
    assert_identical(np.from_dlpack(exported), np.full(4, 0.25))


@pytest.mark.parametrize("request_", [{"copy": True}, {"dl_device": (2, 0)}])
def test_copies_are_not_handed_out(request_):
    exported = ag.softmax(of_namespace(lambda value: value)(np.zeros(4)))
    assert exported.__dlpack__(copy=False, dl_device=(1, 0)) is not None
    with pytest.raises(BufferError):
        exported.__dlpack__(**request_)


@pytest.mark.parametrize("shape", [(), (0,), (2, 0, 3), (1,), (3, 1, 2)], ids=str)
def test_shapes(shape, dtype, own):
    x = np.zeros(shape, DTYPES[dtype])
    assert_identical(ag.softmax(own(x)).array, ag.softmax(x))


# ---- several libraries in one call -----------------------------------------------------------------------------------


def test_libraries_do_not_mix(own, library):
    x = np.linspace(0, 1, 6)
    (other,) = (kind for kind in LIBRARIES.values() if kind is not own)
    for stranger, name in (
        (x, "numpy"),
        (other(x), other.__module__.partition(".")[0].replace("producers", "own_arrays")),
    ):
        error = outcome(ag.softmax_backward, own(x), stranger)
        assert type(error) is TYPE
        assert f"output: expected an array of {library}, like grad_output, got one of {name}" in str(error)
        error = outcome(ag.softmax_backward, stranger, own(x))
        assert f"output: expected an array of {name}, like grad_output, got one of {library}" in str(error)


def test_matrices_of_numpy_are_of_numpy(own):
    """An array of a subclass of NumPy's array type counts as NumPy's, and does not mix with other libraries' arrays."""
    error = outcome(ag.softmax_backward, own(np.zeros(3)), np.zeros(3).view(np.recarray))
    assert "output: expected an array of " in str(error)


@pytest.mark.parametrize("operator", [GRADIENT, STATISTICS, WHOLE])
def test_vectors_of_targets_and_masks_may_be_numpys(operator, own, library):
    problem = problem_of(operator, (9, 17, 5), "float32")
    function = getattr(ag, operator)
    expected = function(**problem.arguments)
    mixed = {"target", "masked_target", "target_mask"} & set(problem.arrays)
    assert mixed
    for ours in (True, False):  # matrices, then vectors, are arrays of the caller's library
        arguments = {
            name: own(value) if name in problem.arrays and (name in mixed) is not ours else value
            for name, value in problem.arguments.items()
        }
        for result, right in zip(function(**arguments), expected, strict=True):
            is_number = isinstance(right, np.generic)
            assert type(result) is (own if ours else type(right) if is_number else np.ndarray)
            assert_identical(getattr(result, "array", result), right)
    (other,) = (kind for kind in LIBRARIES.values() if kind is not own)
    for name in problem.arrays:
        arguments = problem.mapped(own).arguments
        if name not in mixed and name != next(iter(problem.arrays)):
            error = outcome(function, **arguments | {name: problem.arguments[name]})
            assert type(error) is TYPE
            assert f"{name}: expected an array of {library}" in str(error)
        error = outcome(function, **arguments | {name: other(problem.arguments[name])})
        assert type(error) is TYPE
        assert "expected an array of " in str(error)


def test_arrays_on_a_device_do_not_mix(own, device):
    x = np.zeros((2, 3), np.float32)
    for pair in ((ag.npu.asarray(x), own(x)), (own(x), ag.npu.asarray(x))):
        assert type(outcome(ag.softmax_backward, *pair)) is TYPE


def test_arrays_go_to_the_device(own, dtype, device):
    if dtype != "float64":
        x = np.linspace(0, 1, 6).reshape(2, 3).astype(DTYPES[dtype])
        assert_identical(ag.npu.asarray(own(x)).numpy(), x)


def test_calls_on_the_device_give_the_callers_arrays(own, device):
    x = np.linspace(0, 1, 6, dtype=np.float32).reshape(2, 3)
    result = ag.softmax(own(x), backend="npu")
    assert type(result) is own
    assert_identical(result.array, ag.softmax(x, backend="npu"))


# ---- out -------------------------------------------------------------------------------------------------------------


def test_out_is_filled_and_returned(operator, dtype, own, backend):
    problem = random_problem(operator, (2, 3, 4, 5), DTYPES[dtype])
    expected = getattr(ag, operator)(*problem.arrays, **problem.settings, backend=backend)
    memory = np.zeros((2, 3, 4, 10), DTYPES[dtype])
    for kind in (own, Plain):
        out = kind(memory[..., ::-2])
        result = getattr(ag, operator)(*map(own, problem.arrays), **problem.settings, out=out, backend=backend)
        assert result is out
        assert_identical(out.array, expected)
        assert not np.any(memory[..., ::2])


def test_pairs_of_outs(own):
    problem = problem_of(LOSS, (9, 17, 5), "float32")
    expected = ag.fused_cross_entropy_loss_with_max_sum(**problem.arguments)
    given = problem.mapped(own).arguments
    loss, softmax = own(np.zeros(9, np.float32)), own(np.zeros((9, 17), np.float32))
    for out in ((loss, softmax), [loss, None], (None, softmax)):
        results = ag.fused_cross_entropy_loss_with_max_sum(**given, out=out)
        for result, right, entry in zip(results, expected, out, strict=True):
            assert type(result) is own
            assert entry is None or result is entry
            assert_identical(result.array, right)


def test_in_place(own):
    x = np.linspace(0, 1, 12).reshape(3, 4)
    expected = ag.softmax(x)
    given = own(x)
    assert ag.softmax(given, out=given) is given
    assert_identical(x, expected)


def test_partial_overlap(own):
    memory = np.linspace(0, 1, 20)
    expected = ag.softmax(memory[:16])
    out = own(memory[4:])
    ag.softmax(own(memory[:16]), out=out)
    assert_identical(out.array, expected)


def test_outs_that_are_refused(own, library):
    x, given = np.zeros((2, 3)), own(np.zeros((2, 3)))
    before = own(np.full((2, 3), 7.0), flags=READ_ONLY)
    cases = {
        "out: expected a writable array, got a read-only one": (before, INVALID),
        f"out: expected an array of {library}, as the inputs are, got one of numpy": (np.zeros((2, 3)), TYPE),
        "out: expected shape (2, 3), got (3, 2)": (own(np.zeros((3, 2))), INVALID),
        "out: expected dtype float32, float16, bfloat16 or float64, got int64": (own(np.zeros((2, 3), int)), TYPE),
        "out: expected an array whose elements do not overlap, got strides": (
            own(np.broadcast_to(np.zeros(3), (2, 3))),
            INVALID,
        ),
        "out: expected a writable array, got list": ([[0.0] * 3] * 2, TYPE),
    }
    for message, (out, kind) in cases.items():
        error = outcome(ag.softmax, given, out=out)
        assert type(error) is kind
        assert message in str(error)
    assert np.all(before.array == 7)
    error = outcome(ag.softmax, x, out=own(np.zeros((2, 3))))
    assert type(error) is TYPE
    assert f"out: expected an array of numpy, as the inputs are, got one of {library}" in str(error)
    assert ag.softmax(x.tolist(), out=given) is given


def test_outs_on_other_devices(own):
    out = own(np.zeros(3), device_type=2)
    error = outcome(ag.softmax, own(np.zeros(3)), out=out)
    assert type(error) is ag.BackendUnavailableError
    assert "out: expected an array on the CPU, got one on device cuda:0" in str(error)


def test_an_out_that_changes_the_inputs_while_it_is_looked_at():
    x = np.zeros((4, 4))

    class Shrinking(Plain):
        def __dlpack__(self, **_):
            x.resize((1, 1), refcheck=False)
            return super().__dlpack__(**_)

    error = outcome(ag.softmax, x, out=Shrinking(np.zeros((4, 4))))
    assert type(error) is INVALID


def test_questions_about_calls(own):
    x = own(np.zeros((2, 3)))
    assert ag.explain("softmax", x, backend="cpu").backend == "cpu"
    assert ag.workspace_size("softmax", x) == ag.workspace_size("softmax", np.zeros((2, 3)))


# ---- lifetime of results ---------------------------------------------------------------------------------------------


def test_inputs_are_given_back_after_the_call(own, no_garbage_collection):
    x = np.linspace(0, 1, 6).reshape(2, 3)
    for _ in range(3):
        result = ag.softmax_backward(own(x), own(x))
        assert not live
        del result
    for bad in ({"axis": 5}, {"out": 3}, {"out": own(np.zeros(2))}, {"num_threads": 2, "out": x}):
        assert isinstance(outcome(ag.softmax, own(x), **bad), ag.ParamInvalidError)
    gc.collect()  # tracebacks hold arrays until they are collected
    assert not live


def test_a_result_outlives_everything_else(own):
    result = ag.softmax(own(np.zeros((300, 4))))
    gc.collect()
    np.full((300, 4), 7.0)  # this array would overwrite the result if its memory were free
    assert np.all(result.array == 0.25)


@pytest.mark.parametrize("elements", [16, 5 << 20])
def test_a_result_is_freed_once_on_any_thread(elements, own):
    """Small results, and large results with a separate memory mapping, are freed exactly once."""
    results = [ag.softmax(own(np.zeros(elements))) for _ in range(4)]
    empty_on_threads(results)


RESIDENT = """
import numpy as np
import ascend_grad as ag
from producers import LIBRARIES, live, wrongly_deleted
make = LIBRARIES[{library!r}]
x, y = np.zeros((64, 128), np.float32), np.zeros((64, 128), np.float32)
out = make(np.zeros_like(x))

def calls(count):
    for _ in range(count):
        ag.softmax_backward(make(x), make(y))
        ag.softmax_backward(make(x), make(y), out=out)

leave_nothing(calls, 2000, 3000, 8 << 20)
assert not live and not wrongly_deleted
"""


def test_calls_leave_nothing_behind(library, run_script):
    """The memory of the process hardly grows. A call that leaked a result would add 32 KiB."""
    run_script(with_resident(RESIDENT.format(library=library)), PYTHONPATH=str(TESTS))


ENDING = """
import atexit, sys, threading
import numpy as np
import ascend_grad as ag
from producers import Exchanged, Own
kept = [ag.softmax(make(np.zeros(elements))) for make in (Own, Exchanged) for elements in (16, 5 << 20)]
kept.append(kept)
sys.kept = ag.softmax(Exchanged(np.zeros(16)))
exported = ag.softmax(np.zeros(4))
atexit.register(lambda: ag.softmax(Exchanged(np.zeros(3))))
threading.Thread(target=lambda: kept.append(ag.softmax(Own(np.zeros(3)))), daemon=True).start()
print("done")
"""


def test_the_interpreter_ends_while_results_live(run_script):
    result = run_script(ENDING, PYTHONPATH=str(TESTS))
    assert result.stdout == "done\n"


@pytest.mark.parametrize("name", ["jax", "torch"])
def test_libraries_are_never_imported(name, run_script):
    script = f"""
    import sys
    import numpy as np
    import ascend_grad as ag
    ag.softmax(np.zeros(3), out=np.zeros(3))
    ag.softmax([1.0])
    print("{name}" in sys.modules)
    """
    assert run_script(script).stdout == "False\n"
