"""Test that arrays of other libraries give the results of NumPy's arrays, without a copy of the input."""

from __future__ import annotations

import gc
import re
from dataclasses import replace
from decimal import Decimal
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
import scipy.sparse
import strategies
from faults import INVALID, NULL, TYPE, outcome
from hypothesis import given
from hypothesis import strategies as st
from linear_samples import GRADIENT, LINEAR, WHOLE, problem_of
from producers import IS_COPIED, MAKERS, READ_ONLY, Exchanged, Old, Own, Plain, live
from samples import ARRAYS, DTYPES, MASKED, OPERATORS, UNMASKED, assert_identical, laid_out, random_problem

import ascend_grad as ag
from ascend_grad import arguments


@pytest.fixture(params=MAKERS.values(), ids=MAKERS)
def maker(request: pytest.FixtureRequest):
    return request.param


def plain(results: Any) -> Any:
    """Convert results from arrays of any library to NumPy's arrays."""
    if isinstance(results, tuple):
        return [plain(each) for each in results]
    return getattr(results, "array", results)


def assert_same(results: Any, expected: Any) -> None:
    results, expected = plain(results), plain(expected)
    if not isinstance(expected, list):
        results, expected = [results], [expected]
    for got, right in zip(results, expected, strict=True):
        assert (got is None) == (right is None)
        if right is not None:
            assert_identical(got, right)


# ---- accepted arrays -------------------------------------------------------------------------------------------------


def test_rowwise_operators(operator, dtype, maker, backend):
    problem = random_problem(operator, (2, 3, 5, 7), DTYPES[dtype])
    function = getattr(ag, operator)
    expected = function(*problem.arrays, **problem.settings, backend=backend)
    result = function(*map(maker, problem.arrays), **problem.settings, backend=backend)
    assert_same(result, expected)


@pytest.mark.parametrize("operator", LINEAR)
def test_linear_operators(operator, dtype, maker):
    hows: list[dict] = [{"mode": mode} for mode in ("recomputed", "stored")] if operator == GRADIENT else [{}]
    hows += [{"mask": "packed"}] if operator == GRADIENT else []
    hows += [{"reduction": "none"}] if operator == WHOLE else []
    for how in hows:
        problem = problem_of(operator, (19, 33, 21), dtype, **how)
        given = problem.mapped(maker)
        function = getattr(ag, operator)
        assert_same(function(**given.arguments), function(**problem.arguments))


@pytest.mark.parametrize("maker", [Plain, Old, Own, Exchanged])
@given(data=st.data())
def test_any_shape_and_layout(maker, data):
    operator = data.draw(st.sampled_from(OPERATORS))
    problem = data.draw(strategies.problems(operator))
    views = []
    for array in problem.arrays:
        layout = replace(data.draw(strategies.layouts(array.ndim)), swapped=False)
        view = laid_out(array, layout)
        if array.size and array.ndim and data.draw(st.booleans()):
            view = np.broadcast_to(view[:1], array.shape)
        views.append(view)
    function = getattr(ag, operator)
    assert_same(function(*map(maker, views), **problem.settings), function(*views, **problem.settings))
    assert not live


def test_memory_is_shared(maker):
    x = np.arange(24.0).reshape(2, 3, 4)[:, ::2].T
    view = arguments.converted(maker(x), "x")
    assert type(view) is np.ndarray
    assert np.shares_memory(view, x)
    assert (view.shape, view.strides, view.dtype) == (x.shape, x.strides, x.dtype)


def test_what_may_be_written(maker):
    view = arguments.converted(maker(np.zeros(3)), "x")
    # Capsules from before DLPack 1.0 cannot say that an array is read-only.
    assert view.flags.writeable == (maker is not Old)
    for flags in (READ_ONLY, IS_COPIED, READ_ONLY | IS_COPIED):
        if maker is not Old:
            assert not arguments.converted(maker(np.zeros(3), flags=flags), "x").flags.writeable


@pytest.mark.parametrize("shape", [(), (0,), (3, 0, 2), (1, 5), (2, 3, 4)], ids=str)
def test_strides_may_be_missing(shape, maker):
    x = np.arange(np.prod(shape, dtype=int), dtype=np.float32).reshape(shape)
    assert_identical(arguments.converted(maker(x, strides=None), "x"), x)


def test_numbers_of_rank_0_need_no_shape(maker):
    x = np.array(3, np.float32)
    assert_identical(arguments.converted(maker(x, shape=None, strides=None), "x"), x)


def test_arrays_without_elements_need_no_memory(maker):
    for shape in ((0,), (2, 0, 3)):
        view = arguments.converted(maker(np.empty(shape, np.float32), data=None), "x")
        assert_identical(view, np.empty(shape, np.float32))


def test_offsets(maker):
    x = np.arange(5.0)
    assert_identical(arguments.converted(maker(x, byte_offset=16, shape=(3,)), "x"), x[2:])


@pytest.mark.parametrize("device_type", [1, 3, 11])
def test_memory_of_the_host(device_type, maker):
    assert_identical(arguments.converted(maker(np.ones(2), device_type=device_type), "x"), np.ones(2))


def test_dtypes_keep_their_names(maker):
    for dtype in (np.int64, np.uint16, np.complex64, np.bool_):
        x = maker(np.zeros(3, dtype))
        error = outcome(ag.softmax_backward, x, x)
        assert type(error) is TYPE
        hint = "" if dtype == np.complex64 else "; grad_output.astype(numpy.float32) converts it"
        expected = f"grad_output: expected dtype float32, float16, bfloat16 or float64, got {np.dtype(dtype)}{hint}"
        assert str(error).endswith(expected)


def test_objects_of_no_library_go_with_any():
    x = np.linspace(0, 1, 6).reshape(2, 3)
    for pair in ((Plain(x), x), (x, Plain(x)), (Own(x), Plain(x)), (x.tolist(), Own(x)), (Own(x), x.tolist())):
        assert_same(ag.softmax_backward(*pair), ag.softmax_backward(x, x))


class Unwilling:
    """Represent an array whose DLPack functions refuse the export, but which NumPy converts."""

    def __dlpack__(self, **_):
        raise BufferError("not in this way")

    def __array__(self, dtype=None, copy=None):
        return np.array([0.0, 1.0])


def test_what_dlpack_refuses_may_convert():
    assert_identical(ag.softmax(Unwilling()), ag.softmax(np.array([0.0, 1.0])))


# ---- refused arrays --------------------------------------------------------------------------------------------------

SPOILED: dict[str, dict[str, Any]] = {
    "code": {"code": 7, "bits": 8},
    "bits": {"bits": 24},
    "lanes": {"lanes": 2},
    "rank": {"ndim": 65},
    "negative rank": {"ndim": -1},
    "negative length": {"shape": (2, -3)},
    "overflow": {"shape": (2**62, 2**62)},
    "no memory": {"data": None},
}


@pytest.mark.parametrize("spoiled", SPOILED.values(), ids=SPOILED)
def test_tensors_that_are_no_arrays(spoiled, maker):
    error = outcome(ag.softmax, maker(np.zeros((2, 3)), **spoiled))
    assert type(error) is TYPE
    assert f"softmax: input: expected an array, got {maker.__name__}, which cannot be converted: " in str(error)


#: Shapes, strides and offsets whose elements would lie beyond the address space. Products of these numbers overflow.
UNADDRESSABLE: dict[str, dict[str, Any]] = {
    "a stride that is 0 bytes modulo 2**64": {"strides": (2**62, 1)},
    "a negative one": {"strides": (-(2**62), 1)},
    "the most negative one": {"strides": (-(2**63), 1)},
    "a stride that is a few bytes modulo 2**64": {"strides": (2**61 + 1, 1)},
    "an axis that is 0 bytes long modulo 2**64": {"shape": (2**31 + 1, 3), "strides": (2**31, 1)},
    "axes that are too long together": {"shape": (2, 2, 2), "strides": (2**59, 2**59, 2**59), "ndim": 3},
    "beyond the end": {"strides": (2**60 - 3, 1), "byte_offset": 2**63 - 2**40},
    "before the beginning": {"strides": (-(2**59), 1)},
    "an offset that wraps around": {"byte_offset": 2**64 - 8},
    "a size of 0 modulo 2**64": {"shape": (2**62, 4), "strides": (0, 0)},
    "a size of 0 without strides": {"shape": (2**62, 4), "strides": None},
}


@pytest.mark.parametrize("spoiled", UNADDRESSABLE.values(), ids=UNADDRESSABLE)
def test_elements_beyond_the_address_space(spoiled, maker):
    error = outcome(ag.softmax, maker(np.zeros((2, 3)), **spoiled))
    assert type(error) is TYPE
    text = f"softmax: input: expected an array, got {maker.__name__}, which cannot be converted: expected "
    assert text in str(error)
    for name, value in spoiled.items():
        assert name == "ndim" or f"{name.replace('_', ' ')} {value}" in str(error)
    assert not live


@pytest.mark.parametrize("spoiled", UNADDRESSABLE.values(), ids=UNADDRESSABLE)
def test_nothing_is_written_beyond_the_address_space(spoiled, maker):
    """An `out` whose elements would lie beyond the address space is refused, as such an input is."""
    error = outcome(ag.softmax, np.zeros((2, 3)), out=maker(np.zeros((2, 3)), **spoiled))
    assert isinstance(error, INVALID)
    assert "softmax: out: " in str(error)


@pytest.mark.parametrize("stride", [2**62, 2**63 - 1, -(2**63)])
def test_strides_that_reach_no_element_may_be_anything(stride, maker):
    """Strides of an axis of length 1, and all strides of an array without elements, have no effect."""
    x = np.arange(3.0)
    row = maker(x[None], strides=(stride, 1))
    assert_identical(plain(ag.softmax(row, backend="cpu")), ag.softmax(x[None], backend="cpu"))
    empty = np.empty((0, 3))
    assert_identical(plain(ag.softmax(maker(empty, strides=(1, stride)))), empty)
    assert_identical(plain(ag.softmax(maker(empty, strides=(stride, stride), byte_offset=2**64 - 8))), empty)


def test_shapes_that_are_missing(maker):
    error = outcome(ag.softmax, maker(np.zeros((2, 3)), shape=None))
    assert type(error) is TYPE
    assert "which cannot be converted: its shape is missing" in str(error)


@pytest.mark.parametrize("maker", [Plain, Own, Exchanged])
def test_versions_to_come(maker):
    error = outcome(ag.softmax, maker(np.zeros((2, 3)), major=2))
    assert type(error) is TYPE
    assert "expected DLPack 1, got 2.1" in str(error)


@pytest.mark.parametrize(("device_type", "name"), [(2, "cuda:3"), (12, "ext_dev:3"), (77, "device type 77:3")])
def test_other_devices(device_type, name, maker):
    error = outcome(ag.softmax_backward, np.zeros(3), maker(np.zeros(3), device_type=device_type, device_id=3))
    assert type(error) is ag.BackendUnavailableError
    expected = f"softmax_backward: output: expected an array on the CPU, got one on device {name}"
    assert str(error).startswith(expected)


def test_an_exchange_api_that_gives_nothing():
    error = outcome(ag.softmax, Exchanged(np.zeros(3), missing=True))
    assert type(error) is TYPE
    assert "which cannot be converted: its exchange API returned no tensor" in str(error)


def failing(error: Exception) -> object:
    class Failing:
        def __dlpack__(self, **_):
            raise error

    return Failing()


def test_objects_that_are_no_arrays():
    for value, text in (({1: 2}, "dict {1: 2}"), ({3}, "set {3}"), ([1, None], "list [1, None]"), (iter("a"), "str_")):
        with pytest.raises(ag.ParamTypeError, match=re.escape(f"input: expected an array of numbers, got {text}")):
            ag.softmax(value)


class Sparse:
    """Imitate a sparse array that refuses to be made dense."""

    def __array__(self, *arguments, **settings):
        raise RuntimeError("cannot convert a sparse array to dense automatically")

    def todense(self):
        return np.eye(3)


class Table:
    """Imitate a table with a column of text."""

    def __array__(self, *arguments, **settings):
        return np.array([[1.0, "a"]], object)

    def to_numpy(self):
        return self.__array__()


@pytest.mark.parametrize("position", [0, 1, 2])
@pytest.mark.parametrize(
    ("value", "message"),
    [
        (scipy.sparse.csr_matrix(np.eye(3)), "expected a dense array, got csr_matrix; pass {}.toarray()"),
        (scipy.sparse.coo_array(np.eye(3)), "expected a dense array, got coo_array; pass {}.toarray()"),
        (Sparse(), "expected a dense array, got Sparse; pass {}.todense()"),
        (Table(), "expected numbers, got Table of objects; pass the numeric columns by to_numpy()"),
    ],
)
def test_sparse_arrays_and_tables(value, message, position):
    """The message names the call that makes an array."""
    arguments: list = [np.eye(3), np.eye(3), np.zeros(3, int), 0, 3]
    arguments[position] = value
    name = ("input", "weight", "target")[position]
    with pytest.raises(ag.ParamTypeError, match=re.escape(f"{name}: {message.format(name)}")):
        ag.fused_linear_online_max_sum(*arguments)


@pytest.mark.parametrize("half", [Fraction(1, 2), Decimal("0.5")])
@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_numbers_of_any_class(half, reduction):
    arguments = np.eye(2), np.ones((3, 2)), np.array([0, 2])
    expected = ag.linear_cross_entropy(*arguments, reduction=reduction, grad_loss=0.5)
    found = ag.linear_cross_entropy(*arguments, reduction=reduction, grad_loss=half)
    assert_identical(found.input_grad, expected.input_grad)


def test_errors_of_the_other_library_are_the_cause():
    for raised in (RuntimeError("not today"), TypeError("not today"), ValueError("not today")):
        error = outcome(ag.softmax, failing(raised))
        assert type(error) is TYPE
        assert error.__cause__ is raised
        assert "which cannot be converted: not today" in str(error)


@pytest.mark.parametrize("interruption", [KeyboardInterrupt, SystemExit, MemoryError])
def test_what_is_not_about_the_argument_passes_through(interruption):
    with pytest.raises(interruption):
        ag.softmax(failing(interruption()))


class Meta(type):
    def __getattr__(cls, name):
        if name == "__dlpack__":
            raise RuntimeError("nothing is told")
        raise AttributeError(name)


class Untold(metaclass=Meta):
    pass


def test_classes_that_raise():
    error = outcome(ag.softmax, Untold())
    assert type(error) is TYPE
    assert "input: expected an array, got Untold, whose type cannot be determined: nothing is told" in str(error)


@pytest.mark.parametrize("value", [None, 3, "dltensor"])
def test_what_is_no_capsule(value):
    class Strange:
        def __dlpack__(self, **_):
            return value

    assert type(outcome(ag.softmax, Strange())) is TYPE


def test_a_capsule_is_used_once():
    x = Plain(np.ones(3))
    capsule = x.__dlpack__(max_version=(1, 1))

    class Repeating:
        def __dlpack__(self, **_):
            return capsule

    assert_identical(ag.softmax(Repeating()), ag.softmax(np.ones(3)))
    assert type(outcome(ag.softmax, Repeating())) is TYPE
    assert not live


class Lazy:
    """Imitate an object with the methods of dask's collections."""

    def __init__(self, graph: dict | None):
        self.graph = graph

    def __dask_graph__(self):
        return self.graph

    def __array__(self, dtype=None, copy=None):
        return np.array([0.0, 1.0])

    def __float__(self):
        return 0.5

    def __index__(self):
        return 0


def test_dask_is_not_computed_unasked():
    error = outcome(ag.softmax, Lazy({}))
    assert type(error) is TYPE
    text = "dask has not computed it yet; use ascend_grad.dask, or pass its compute()"
    assert text in str(error)
    maybe_dasks = Lazy(None)
    assert_identical(ag.softmax(maybe_dasks), ag.softmax(np.array([0.0, 1.0])))


def test_numbers_of_dask_are_not_computed_unasked():
    assert "axis: expected an int, got Lazy" in str(outcome(ag.softmax, np.zeros(2), Lazy({})))
    arrays = np.zeros((1, 1, 1, 2)), np.zeros((1, 1, 1, 2), bool)
    error = outcome(ag.scaled_masked_softmax, *arrays, Lazy({}))
    assert type(error) is TYPE
    assert "scale: expected a real number, got Lazy" in str(error)
    assert_identical(ag.scaled_masked_softmax(*arrays, Lazy(None)), ag.scaled_masked_softmax(*arrays, 0.5))


class Failing:
    """Convert to numbers, and raise an error where an attribute is looked up."""

    def __float__(self):
        return 0.5

    def __index__(self):
        return 0

    def __getattr__(self, name):
        raise RuntimeError(f"there is no {name}")


def test_attributes_of_numbers_that_fail():
    arrays = np.zeros((1, 1, 1, 2)), np.zeros((1, 1, 1, 2), bool)
    for error, argument in (
        (outcome(ag.softmax, np.zeros(2), Failing()), "axis: expected an int"),
        (outcome(ag.scaled_masked_softmax, *arrays, Failing()), "scale: expected a real number"),
        (outcome(ag.cross_entropy, np.zeros(2), 0, label_smoothing=Failing()), "label_smoothing: expected"),
    ):
        assert type(error) is TYPE
        assert argument in str(error)


@pytest.mark.parametrize("operator", UNMASKED)
def test_the_earlier_check_decides(operator, maker):
    """Checks of arrays that come by DLPack also run in the documented order."""
    good, names = maker(np.zeros((2, 3))), ARRAYS[operator]
    function = getattr(ag, operator)
    assert type(outcome(function, *[None] * len(names), 7)) is NULL
    error = outcome(function, *[good] * len(names), 7)
    assert type(error) is INVALID
    assert "axis: expected a value in [-2, 1], got 7" in str(error)


@pytest.mark.parametrize("operator", MASKED)
def test_masks_are_of_bools(operator, maker):
    arrays = [np.zeros((1, 1, 2, 2))] * (len(ARRAYS[operator]) - 1)
    error = outcome(getattr(ag, operator), *map(maker, arrays), maker(np.zeros((1, 1, 2, 2), np.uint8)))
    assert type(error) is TYPE
    assert "mask: expected dtype bool, got uint8" in str(error)


@pytest.mark.parametrize(("shape", "text"), [((2, 1, 4, 6), "(2 or 1, 1, 4, 6)"), ((1, 3, 4, 6), "(1, 3 or 1, 4, 6)")])
def test_the_shapes_of_a_mask_are_told(shape, text):
    error = outcome(ag.scaled_masked_softmax, np.zeros(shape), np.zeros((4, 4, 4, 6), bool))
    assert type(error) is INVALID
    assert f"mask: expected shape {text}, got (4, 4, 4, 6)" in str(error)


@pytest.mark.parametrize("axis", [0, -1])
def test_log_softmax_asks_for_the_rank_first(axis, dtype, maker):
    """Only log_softmax checks axis before the dtype. Its results for other libraries' arrays equal NumPy's."""
    x = np.linspace(-1, 1, 6).reshape(2, 3).astype(DTYPES[dtype])
    assert_same(ag.log_softmax(maker(x), axis), ag.log_softmax(x, axis))


def test_upstream_gradients():
    problem = problem_of(WHOLE, (5, 7, 3), "float32", reduction="none")
    arguments = problem.arguments
    for maker in (Plain, Own, Exchanged):
        given = problem.mapped(maker).arguments
        assert_same(ag.linear_cross_entropy(**given), ag.linear_cross_entropy(**arguments))
    error = outcome(ag.linear_cross_entropy, **arguments | {"grad_loss": Own(arguments["grad_loss"])})
    assert "grad_loss: expected an array of numpy, like input, got one of own_arrays" in str(error)


def test_nothing_is_left():
    gc.collect()
    assert not live
