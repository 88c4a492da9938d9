"""Test the forms of arguments that row-wise operators take, and the forms that they refuse."""

from __future__ import annotations

import array
import collections
import enum
import re
from typing import Any

import numpy as np
import pytest
from faults import INVALID, TYPE, Hostile, Noted, outcome
from rowwise_faults import good_call
from samples import ARRAYS, BFLOAT16, DTYPES, MASKED, UNMASKED, assert_fresh, assert_identical, random_problem

import ascend_grad as ag


@pytest.mark.parametrize(
    ("shape", "strides"),
    [
        ((2, 3), (12, 4)),
        ((2, 3), (4, 8)),
        ((2, 3), (-4, 8)),
        ((3, 2), (8, 12)),
        ((4, 2), (8, 24)),
        ((3, 2), (8, 20)),
        ((3, 2), (-8, 20)),
        ((2, 2), (4, -4)),
        ((2, 2, 2), (4, 8, 12)),
        ((2, 2, 2), (4, 8, 16)),
        ((3, 3), (0, 4)),
        ((1, 3), (0, 4)),
        ((3, 3), (2, 8)),
        ((3, 2), (6, 2)),
        ((3,), (3,)),
        ((3,), (5,)),
        ((), ()),
        ((0, 3), (0, 0)),
    ],
)
def test_which_results_overlap_themselves(shape, strides, backend):
    out = np.ndarray(shape, np.float32, np.zeros(200, np.uint8), 80, strides)
    starts = [sum(i * stride for i, stride in zip(index, strides, strict=True)) for index in np.ndindex(shape)]
    addresses = [start + byte for start in starts for byte in range(4)]
    x = np.zeros(shape, np.float32)
    if len(set(addresses)) < len(addresses):
        error = outcome(ag.softmax, x, out=out, backend=backend)
        assert type(error) is INVALID
        assert str(error).startswith("softmax: out: expected an array whose elements do not overlap, got ")
        assert not np.any(out)
    else:
        assert_identical(ag.softmax(x, out=out, backend=backend), ag.softmax(x, backend=backend))


class Convertible:
    def __array__(self, dtype=None, copy=None):
        return np.array([0.0, 1.0], np.float32)


ACCEPTED = {
    "list": [0.0, 1.0, 2.0],
    "nested lists": [[0.0, 1.0], [2.0, 3.0]],
    "tuple of scalars": (np.float32(1), np.float32(2)),
    "number": 1.5,
    "numpy scalar": np.float16(1.5),
    "bfloat16 scalar": BFLOAT16.type(1.5),
    "empty list": [],
    "buffer": array.array("f", [1, 2, 3]),
    "memoryview": memoryview(np.arange(3.0)),
    "convertible": Convertible(),
    "swapped": np.arange(3, dtype=">f8"),
}


@pytest.mark.parametrize("value", ACCEPTED.values(), ids=ACCEPTED)
def test_whatever_numpy_takes_is_accepted(value, backend):
    plain = np.array(np.asarray(value))
    plain = plain.astype(plain.dtype.newbyteorder("="))
    result = ag.softmax(value, backend=backend)
    assert_fresh(result, plain.shape, plain.dtype)
    assert_identical(result, ag.softmax(plain, backend=backend))
    if not isinstance(value, Convertible):
        assert_identical(ag.softmax_backward(value, value, backend=backend), ag.softmax_backward(plain, plain))


#: What forward functions convert to float64, and gradients refuse.
INTEGERS = {"list of ints": [1, 2, 3], "int": 3, "bool": True}
REFUSED = {
    "ragged list": [[1.0], [2.0, 3.0]],
    "list of text": ["1.0"],
    "list with None": [1.0, None],
    "object": object(),
    "hostile": Hostile(),
    "function": len,
    "set": {1.0},
    "type": np.float32,
    "bytes": b"\0\0\0\0",
    "deep list": (lambda x: [x := [x] for _ in range(100)][-1])(1.0),
}


@pytest.mark.parametrize("value", [*REFUSED.values(), *INTEGERS.values()], ids=[*REFUSED, *INTEGERS])
@pytest.mark.parametrize("operator", UNMASKED)
def test_objects_that_are_no_floating_arrays(operator, value, backend):
    function = getattr(ag, operator)
    if not operator.endswith("backward") and any(value is each for each in INTEGERS.values()):
        assert_identical(function(value, backend=backend), function(np.array(value, np.float64), backend=backend))
        return
    good = np.zeros(2)
    for position in range(len(ARRAYS[operator])):
        arguments: list[Any] = [good] * len(ARRAYS[operator])
        arguments[position] = value
        error = outcome(function, *arguments, backend=backend)
        assert type(error) is TYPE
        assert f"{operator}: {ARRAYS[operator][position]}: expected " in str(error)


@pytest.mark.parametrize("value", INTEGERS.values(), ids=INTEGERS)
@pytest.mark.parametrize("operator", ["softmax", "log_softmax"])
def test_integers_become_float64(operator, value, backend):
    result = getattr(ag, operator)(value, backend=backend)
    assert_identical(result, getattr(ag, operator)(np.asarray(value, np.float64), backend=backend))


@pytest.mark.parametrize("kind", [np.memmap, np.recarray, Noted])
def test_subclasses_without_a_meaning_of_their_own(operator, kind, backend, tmp_path):
    arguments = good_call(operator) | {"out": None, "backend": backend}
    expected = getattr(ag, operator)(**arguments)
    for name in ARRAYS[operator]:
        values = arguments[name]
        if kind is np.memmap:
            values.tofile(tmp_path / name)
            arguments[name] = np.memmap(tmp_path / name, values.dtype, "r", shape=values.shape)
        else:
            arguments[name] = values.view(kind)
        assert type(arguments[name]) is kind
    result = getattr(ag, operator)(**arguments)
    assert type(result) is np.ndarray
    assert_identical(result, expected)


class Wraps:
    """Return the given value, whatever it is, when NumPy converts the object to an array."""

    def __init__(self, value):
        self.value = value

    def __array__(self, dtype=None, copy=None):
        return self.value


ROWS = np.linspace(0, 1, 6).reshape(2, 3)


@pytest.mark.parametrize(
    "value",
    [
        [np.ma.array(row) for row in ROWS],
        (ROWS[0], np.ma.array(ROWS[1], mask=True)),
        [[np.ma.array(1.0), 2.0]],
        collections.deque([np.ma.array(ROWS[0]), ROWS[1]]),
        [[[[1.0]]], (np.ones((1, 1)).view(np.matrix),)],
        Wraps(np.ma.array(ROWS)),
        Wraps(ROWS.view(np.matrix)),
    ],
    ids=["list", "tuple", "numbers", "deque", "deep", "convertible", "convertible to a matrix"],
)
def test_meanings_are_not_lost_on_the_way_to_an_array(value, operator, backend):
    for name in ARRAYS[operator]:
        error = outcome(getattr(ag, operator), **good_call(operator) | {name: value, "out": None, "backend": backend})
        assert type(error) is TYPE
        expected = "(without a mask|whose class has the arithmetic of numpy.ndarray)"
        assert re.search(rf"{operator}: {name}: expected an array {expected}, got ", str(error))


def test_messages_name_the_class(backend):
    error = outcome(ag.softmax, np.ma.array([1.0]), backend=backend)
    got = f"{np.ma.MaskedArray.__module__}.MaskedArray"
    assert f"input: expected an array without a mask, got {got}; pass input.filled(value)" in str(error)
    error = outcome(ag.softmax, np.ones(2), out=np.ma.array([1.0, 2.0]), backend=backend)
    assert f"out: expected an array without a mask, got {got}; pass out.filled(value)" in str(error)
    error = outcome(ag.softmax, np.ones(2).view(np.matrix), backend=backend)
    assert "got numpy.matrix; pass numpy.asarray(input)" in str(error)
    for name, error in {
        "axis": outcome(ag.softmax, [1.0], True, backend=backend),
        "num_threads": outcome(ag.softmax, [1.0], num_threads=True, backend=backend),
    }.items():
        assert f"{name}: expected " in str(error)
        assert ", got bool True" in str(error)


class Index:
    def __index__(self):
        return 1

    def __repr__(self):
        return "Index"


class Axis(enum.IntEnum):
    LAST = 1


@pytest.mark.parametrize("axis", [1, -1, np.int8(1), np.uint64(1), np.array(1), Index(), Axis.LAST], ids=repr)
def test_integers_of_any_kind_are_dims(axis, backend):
    x = np.arange(6.0).reshape(2, 3)
    assert_identical(ag.softmax(x, axis, backend=backend), ag.softmax(x, 1, backend=backend))


@pytest.mark.parametrize("num_threads", [1, 2, np.int64(2), Index(), 64], ids=repr)
def test_integers_of_any_kind_are_thread_numbers(num_threads, backend):
    x = np.arange(6.0).reshape(2, 3)
    assert_identical(ag.softmax(x, num_threads=num_threads, backend=backend), ag.softmax(x, backend=backend))


class Number:
    def __float__(self):
        return 2.0

    def __repr__(self):
        return "Number"


@pytest.mark.parametrize("scale", [2, 2.0, np.float16(2), np.array(2), BFLOAT16.type(2), Number(), Index()], ids=repr)
@pytest.mark.parametrize("operator", MASKED)
def test_real_numbers_of_any_kind_are_scales(operator, scale, backend):
    problem = random_problem(operator, (1, 2, 3, 4), np.float32)
    function = getattr(ag, operator)
    expected = function(*problem.arrays, 1.0 if isinstance(scale, Index) else 2.0, backend=backend)
    assert_identical(function(*problem.arrays, scale, backend=backend), expected)


@pytest.mark.parametrize("operator", MASKED)
def test_the_scale_is_rounded_to_float32(operator, dtype, backend):
    problem = random_problem(operator, (1, 2, 3, 40), DTYPES[dtype])
    scale = 1 + 2.0**-25
    exact, rounded = (problem.replaced(scale=value) for value in (scale, float(np.float32(scale))))
    results = [
        getattr(ag, operator)(*each.arrays, **each.settings, backend=backend).astype(np.float64)
        for each in (exact, rounded)
    ]
    assert np.array_equal(*results) == (dtype != "float64")


def test_ranks_that_change_while_they_are_checked():
    x = np.zeros((2, 3))

    class Dim:
        def __index__(self) -> int:
            x.shape = (1,) * 40 + (2, 3)
            return 0

    with pytest.raises(ag.ParamInvalidError):
        ag.log_softmax_backward(x, x, Dim())


class _RaisingIndex:
    def __index__(self):
        raise ValueError("no")


@pytest.mark.parametrize(
    "arguments", [{"axis": _RaisingIndex()}, {"num_threads": _RaisingIndex()}], ids=["axis", "num_threads"]
)
def test_errors_of_an_objects_own_conversion_become_type_errors(arguments):
    with pytest.raises(ag.ParamTypeError):
        ag.softmax(np.zeros(3), **arguments)


@pytest.mark.skipif(not hasattr(np.dtypes, "StringDType"), reason="this NumPy has no StringDType")
@pytest.mark.parametrize("backend", ["cpu", "reference"])
def test_text_of_variable_width_is_a_type_error(backend):
    text = np.array(["a"], dtype=np.dtypes.StringDType())
    with pytest.raises(ag.ParamTypeError):
        ag.softmax(text, backend=backend)
    with pytest.raises(ag.ParamTypeError):
        ag.softmax(np.zeros(1), out=text, backend=backend)


def test_fresh_results_carry_no_metadata_of_the_dtype():
    x = np.zeros(3, np.dtype("f4", metadata={"a": 1}))
    for backend in ("cpu", "reference"):
        assert ag.softmax(x, backend=backend).dtype.metadata is None
