"""What each operator refuses: one table of faults drives every operator and backend.

A fault spoils one argument of a good call. It belongs to a stage of the operator's checks; of two faults at once, that
of the earlier stage decides.
"""

from __future__ import annotations

import array
import collections
import copy
import enum
import inspect
import itertools
import pickle
from typing import Any

import numpy as np
import pytest
from faults import (
    CODES,
    FOREIGN_DTYPES,
    INVALID,
    MEANINGS,
    MEANINGS_IN_TWO_AXES,
    NOT_A_NUMBER,
    NOT_AN_INT,
    NULL,
    TYPE,
    Fault,
    Hostile,
    Noted,
    as_dtype,
    constant,
    faults_of_settings,
    outcome,
    read_only,
    self_overlapping,
)
from samples import (
    ARRAYS,
    BFLOAT16,
    DTYPES,
    MASKED,
    OPERATORS,
    UNMASKED,
    assert_fresh,
    assert_identical,
    random_problem,
)

import ascend_grad as ag
from ascend_grad import contract
from ascend_grad import errors as library_errors
from ascend_grad.backends import REGISTRY

#: The order of the checks. How to compute is looked at before what.
STAGES = {
    "softmax_backward": ("settings", "null", "dtype", "dim", "shape", "out"),
    "log_softmax_backward": ("settings", "null", "dtype", "shape", "dim", "out"),
    "scaled_masked_softmax_backward": ("settings", "null", "dtype", "shape", "fix_triu_mask", "out"),
    "softmax": ("settings", "null", "dtype", "dim", "shape", "out"),
    "log_softmax": ("settings", "null", "dim", "dtype", "shape", "out"),
    "scaled_masked_softmax": ("settings", "null", "dtype", "shape", "fix_triu_mask", "out"),
}


def faults_of(operator: str) -> list[Fault]:
    floats = [name for name in ARRAYS[operator] if name != "mask"]
    first = floats[0]
    meanings = MEANINGS if operator in MASKED else MEANINGS_IN_TWO_AXES
    faults = faults_of_settings()
    faults += [Fault("null", name, "None", constant(None), NULL, name) for name in ARRAYS[operator]]
    faults += [
        Fault("dtype", name, how, give, TYPE, name) for name in ARRAYS[operator] for how, give in meanings.items()
    ]
    for name in floats:
        faults += [Fault("dtype", name, label, as_dtype(dtype), TYPE, name) for label, dtype in FOREIGN_DTYPES.items()]
        faults += [
            Fault("dtype", name, "bool", as_dtype(bool), TYPE, name),
            Fault("dtype", name, "string", constant("softmax"), TYPE, name),
            Fault("dtype", name, "dict", constant({}), TYPE, name),
        ]
        if len(floats) == 2:
            # Which of two unequal dtypes is the wrong one? The second's.
            faults += [
                Fault("dtype", name, f"{other}, unlike the other", as_dtype(dtype), TYPE, floats[1])
                for other, dtype in DTYPES.items()
                if other != "float32"
            ]
    faults += [
        Fault("out", "out", "list", constant([0.0]), TYPE, "out"),
        Fault("out", "out", "scalar", constant(np.float32(0)), TYPE, "out"),
        Fault("out", "out", "text", constant("out"), TYPE, "out"),
        *(Fault("out", "out", label, as_dtype(dtype), TYPE, "out") for label, dtype in FOREIGN_DTYPES.items()),
        *(Fault("out", "out", label, give, TYPE, "out") for label, give in meanings.items()),
        Fault("out", "out", "one element", lambda x: np.zeros(1, x.dtype), INVALID, "out"),
        Fault("out", "out", "one axis more", lambda x: x[None], INVALID, "out"),
        Fault("out", "out", "read-only", read_only, INVALID, "out"),
        Fault("out", "out", "overlapping itself", self_overlapping, INVALID, "out"),
    ]
    if operator in MASKED:
        faults += [
            Fault("dtype", "mask", label, as_dtype(dtype), TYPE, "mask")
            for label, dtype in (("uint8", np.uint8), ("int64", np.int64), ("float32", np.float32), ("object", object))
        ]
        faults += [
            Fault("dtype", "scale", label, constant(value), TYPE, "scale") for label, value in NOT_A_NUMBER.items()
        ]
        faults += [Fault("dtype", "scale", "beyond float64", constant(10**400), INVALID, "scale")]
        for name in ARRAYS[operator]:
            faults += [
                Fault("shape", name, "rank 3", lambda x: x[0], INVALID, first if name == first else name),
                Fault("shape", name, "rank 5", lambda x: x[None], INVALID, first if name == first else name),
                Fault("shape", name, "rank 0", lambda x: x.dtype.type(0), INVALID, name),
            ]
        if len(floats) == 2:
            faults += [
                Fault("shape", "y", "broadcastable", lambda x: x[:1], INVALID, "y"),
                Fault("shape", "y", "transposed", lambda x: x.swapaxes(2, 3), INVALID, "y"),
            ]
        faults += [
            Fault("shape", "mask", "one row", lambda x: x[:, :, :1], INVALID, "mask"),
            Fault("shape", "mask", "one column", lambda x: x[..., :1], INVALID, "mask"),
            Fault("shape", "mask", "other batch", lambda x: np.concatenate([x, x]), INVALID, "mask"),
            Fault("shape", "mask", "other heads", lambda x: np.concatenate([x, x], 1), INVALID, "mask"),
            Fault("shape", "mask", "no heads", lambda x: x[:, :0], INVALID, "mask"),
            Fault("fix_triu_mask", "fix_triu_mask", "True", constant(True), INVALID, "fix_triu_mask"),
            Fault("fix_triu_mask", "fix_triu_mask", "numpy True", constant(np.True_), INVALID, "fix_triu_mask"),
            Fault("fix_triu_mask", "fix_triu_mask", "number", constant(1), TYPE, "fix_triu_mask"),
            Fault("fix_triu_mask", "fix_triu_mask", "text", constant("no"), TYPE, "fix_triu_mask"),
            Fault("fix_triu_mask", "fix_triu_mask", "None", constant(None), TYPE, "fix_triu_mask"),
        ]
    else:
        faults += [
            Fault("dim", "dim", label, constant(value), kind, "dim")
            for label, value, kind in (
                ("too large", 10, INVALID),
                ("too small", -10, INVALID),
                ("huge", 2**70, INVALID),
                *((label, value, TYPE) for label, value in NOT_AN_INT.items()),
                ("tuple", (0,), TYPE),
            )
        ]
        faults += [Fault("shape", first, "rank 9", lambda x: x.reshape(x.shape + (1,) * 7), INVALID, first)]
        if len(floats) == 2:
            faults += [
                Fault("shape", "output", "rank 9", lambda x: x.reshape(x.shape + (1,) * 7), INVALID, "output"),
                Fault("shape", "output", "transposed", lambda x: x.T, INVALID, "output"),
                Fault("shape", "output", "flat", lambda x: x.reshape(-1), INVALID, "output"),
                Fault("shape", "output", "broadcastable", lambda x: x[..., :1], INVALID, "output"),
                Fault("shape", first, "other length", lambda x: np.concatenate([x, x], -1), INVALID, "output"),
            ]
    return faults


def good_call(operator: str, *, empty: bool = False) -> dict[str, Any]:
    shape = (3, 2, 4, 5) if operator in MASKED else (4, 5)
    if empty:
        shape = (*shape[:-2], 0, shape[-1])
    problem = random_problem(operator, shape, np.float32)
    arguments = dict(zip(ARRAYS[operator], problem.arrays, strict=True)) | problem.settings
    if operator in MASKED:
        arguments["fix_triu_mask"] = False
    return arguments | {"out": np.full(shape, 7, np.float32), "num_threads": None, "backend": None}


def is_fault(fault: Fault, good: Any) -> bool:
    """Whether the spoilt argument differs at all: some shapes of nothing do not."""
    spoilt = fault.spoil(good)
    return not (
        isinstance(good, np.ndarray)
        and type(spoilt) is np.ndarray
        and (spoilt.shape, spoilt.dtype, spoilt.flags.writeable, spoilt.size) == (good.shape, good.dtype, True, 0)
    )


FAULTS = [
    pytest.param(operator, fault, empty, id=f"{operator}-{fault}{', empty' * empty}")
    for operator in OPERATORS
    for fault in faults_of(operator)
    for empty in (False, True)
    if is_fault(fault, good_call(operator, empty=empty)[fault.argument])
]


@pytest.mark.parametrize(("operator", "fault", "empty"), FAULTS)
def test_faults(operator, fault, empty, device):
    """The same exception from every backend, from `explain` and `workspace_size`; nothing is written."""
    arguments = good_call(operator, empty=empty)
    out = arguments["out"]
    arguments[fault.argument] = fault.spoil(arguments[fault.argument])
    messages = set()
    for backend in ("cpu", "reference", "npu", None, "auto"):
        if fault.argument != "backend":
            arguments["backend"] = backend
        error = outcome(getattr(ag, operator), **arguments)
        assert type(error) is fault.raises
        assert error.code == CODES[fault.raises]
        assert error.operator == operator
        messages.add(str(error))
    for question in (ag.explain, ag.workspace_size):
        error = outcome(question, operator, **arguments)
        assert type(error) is fault.raises
        messages.add(str(error))
    (message,) = messages
    assert message.startswith(f"{operator}: {fault.blamed}: expected ")
    assert ", got " in message
    assert message.endswith(f"[{error.code} {library_errors.STATUS_NAMES[error.code]}]")
    assert np.all(out == 7)
    assert device.calls() == 0


def test_the_earlier_stage_decides(operator, backend):
    """Two faults at once, for every pair of stages."""
    faults = faults_of(operator)
    order = STAGES[operator].index
    for first, second in itertools.permutations(faults, 2):
        if order(first.stage) >= order(second.stage):
            continue
        arguments = good_call(operator) | {"backend": backend}
        for fault in (second, first):
            arguments[fault.argument] = fault.spoil(arguments[fault.argument])
        error = outcome(getattr(ag, operator), **arguments)
        message = f"{first} decides before {second}, but: {error}"
        assert type(error) is first.raises, message
        assert f"{operator}: {first.blamed}: expected " in str(error), message


def test_every_stage_has_faults(operator):
    assert {fault.stage for fault in faults_of(operator)} == set(STAGES[operator])


def test_null_is_said_of_the_first(operator, backend):
    error = outcome(getattr(ag, operator), *(None for _ in ARRAYS[operator]), backend=backend)
    assert type(error) is NULL
    assert str(error).startswith(f"{operator}: {ARRAYS[operator][0]}: ")


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
        assert str(error).startswith("softmax: out: expected an array whose elements do not share memory, got ")
        assert not np.any(out)
    else:
        assert_identical(ag.softmax(x, out=out, backend=backend), ag.softmax(x, backend=backend))


# ---- what is accepted ------------------------------------------------------------------------------------------------


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


REFUSED = {
    "list of ints": [1, 2, 3],
    "ragged list": [[1.0], [2.0, 3.0]],
    "list of text": ["1.0"],
    "list with None": [1.0, None],
    "int": 3,
    "bool": True,
    "object": object(),
    "hostile": Hostile(),
    "function": len,
    "set": {1.0},
    "type": np.float32,
    "bytes": b"\0\0\0\0",
    "deep list": (lambda x: [x := [x] for _ in range(100)][-1])(1.0),
}


@pytest.mark.parametrize("value", REFUSED.values(), ids=REFUSED)
@pytest.mark.parametrize("operator", UNMASKED)
def test_objects_that_are_no_floating_arrays(operator, value, backend):
    good = np.zeros(2)
    for position in range(len(ARRAYS[operator])):
        arguments: list[Any] = [good] * len(ARRAYS[operator])
        arguments[position] = value
        error = outcome(getattr(ag, operator), *arguments, backend=backend)
        assert type(error) is TYPE
        assert f"{operator}: {ARRAYS[operator][position]}: expected " in str(error)


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
    """An object that converts to whatever it was given."""

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
        assert f"{operator}: {name}: expected an array that computes as numpy.ndarray does" in str(error)


def test_messages_name_the_class(backend):
    error = outcome(ag.softmax, np.ma.array([1.0]), backend=backend)
    expected = "an array that computes as numpy.ndarray does (numpy.asarray makes one of its elements)"
    assert f"input: expected {expected}, got {np.ma.MaskedArray.__module__}.MaskedArray [161002 " in str(error)
    error = outcome(ag.softmax, np.ones(2), out=np.ma.array([1.0, 2.0]), backend=backend)
    assert f"out: expected {expected}, got {np.ma.MaskedArray.__module__}.MaskedArray [161002 " in str(error)
    for name, error in {
        "dim": outcome(ag.softmax, [1.0], True, backend=backend),
        "num_threads": outcome(ag.softmax, [1.0], num_threads=True, backend=backend),
    }.items():
        assert f"{name}: expected " in str(error)
        assert ", got bool True [161002 " in str(error)


class Index:
    def __index__(self):
        return 1

    def __repr__(self):
        return "Index"


class Axis(enum.IntEnum):
    LAST = 1


@pytest.mark.parametrize("dim", [1, -1, np.int8(1), np.uint64(1), np.array(1), Index(), Axis.LAST], ids=repr)
def test_integers_of_any_kind_are_dims(dim, backend):
    x = np.arange(6.0).reshape(2, 3)
    assert_identical(ag.softmax(x, dim, backend=backend), ag.softmax(x, 1, backend=backend))


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


# ---- exceptions ------------------------------------------------------------------------------------------------------


def test_classes_of_exceptions():
    assert issubclass(NULL, (ag.AscendGradError, ValueError))
    assert issubclass(INVALID, ag.AscendGradError)
    assert issubclass(INVALID, ValueError)
    assert issubclass(TYPE, INVALID)
    assert issubclass(TYPE, TypeError)
    for other in (ag.UnsupportedDeviceError, ag.BackendUnavailableError):
        assert issubclass(other, ag.AscendGradError)
        assert issubclass(other, RuntimeError)
    assert (NULL.code, INVALID.code, TYPE.code) == (161001, 161002, 161002)
    assert ag.UnsupportedDeviceError.code == 361001


@pytest.mark.parametrize("kind", [NULL, INVALID, TYPE, ag.UnsupportedDeviceError, ag.BackendUnavailableError])
def test_exceptions_survive_pickling(kind):
    error = kind("dim: expected this, got that", operator="softmax")
    for twin in (pickle.loads(pickle.dumps(error)), copy.copy(error), copy.deepcopy(error)):
        assert type(twin) is kind
        assert (str(twin), twin.code, twin.operator) == (str(error), error.code, "softmax")
        assert twin.args == error.args


def test_raised_exceptions_survive_pickling(backend):
    error = outcome(ag.softmax_backward, np.zeros(3), np.zeros(4), backend=backend)
    twin = pickle.loads(pickle.dumps(error))
    assert (type(twin), str(twin), twin.code, twin.operator) == (INVALID, str(error), 161002, "softmax_backward")


def test_a_conversion_that_fails_is_the_cause(backend):
    error = outcome(ag.softmax, Hostile(), backend=backend)
    assert isinstance(error.__cause__, RuntimeError)
    assert "not today" in str(error)


@pytest.mark.parametrize("interruption", [KeyboardInterrupt, SystemExit, MemoryError])
def test_what_is_not_about_the_argument_passes_through(interruption, backend):
    class Interrupting:
        def __array__(self, dtype=None, copy=None):
            raise interruption

    with pytest.raises(interruption):
        ag.softmax(Interrupting(), backend=backend)


def test_messages_are_short(backend):
    """A large argument does not come out as a large message."""
    many = list(range(100_000))
    for arguments in (
        {"dim": many},
        {"dim": 10**5000},
        {"num_threads": many},
        {"num_threads": -(10**5000)},
        {"backend": str(many)},
        {"input": str(many)},
    ):
        error = outcome(ag.softmax, **({"input": np.zeros(3), "backend": backend} | arguments))
        assert len(str(error)) < 300


# ---- one contract for all --------------------------------------------------------------------------------------------


def test_operators_are_described_and_public():
    assert {operator.name for operator in contract.ROWWISE} == set(OPERATORS)
    for operator in contract.ROWWISE:
        name = operator.name
        assert name in ag.__all__
        assert contract.OPERATORS[name] is operator
        assert operator.array_names == ARRAYS[name]
        parameters = inspect.signature(getattr(ag, name)).parameters
        assert tuple(parameters)[: len(ARRAYS[name])] == ARRAYS[name]
        keyword_only = [p.name for p in parameters.values() if p.kind is p.KEYWORD_ONLY]
        assert keyword_only == ["out", "backend", "num_threads"]
        assert all(parameters[name].default is None for name in keyword_only)


def test_ranks_that_change_while_they_are_checked():
    x = np.zeros((2, 3))

    class Dim:
        def __index__(self) -> int:
            x.shape = (1,) * 40 + (2, 3)
            return 0

    with pytest.raises(ag.ParamInvalidError):
        ag.log_softmax_backward(x, x, Dim())


def test_names_of_backends_of_other_classes():
    assert_identical(ag.softmax([0.0, 1.0], backend=np.str_("cpu")), ag.softmax([0.0, 1.0]))
    with ag.use_backend(np.str_("reference")):
        assert ag.explain("softmax", [0.0]) == ("reference", "asked for by use_backend")


def test_backends_have_one_interface():
    signatures = []
    for backend in REGISTRY.values():
        assert REGISTRY[backend.NAME] is backend
        usable, reason = backend.status()
        assert isinstance(usable, bool)
        assert reason
        functions = backend.status, backend.run
        signatures.append([list(inspect.signature(function).parameters) for function in functions])
    assert all(signature == signatures[0] for signature in signatures)


def test_usable_backends_agree(operator, dtype):
    problem = random_problem(operator, (2, 3, 5, 7), DTYPES[dtype])
    results = {
        name: getattr(ag, operator)(*problem.arrays, **problem.settings, backend=name).astype(np.float64)
        for name, status in ag.backends().items()
        if status.usable
    }
    assert {"cpu", "reference"} <= set(results)
    tolerance = {"float16": 2**-9, "bfloat16": 2**-6, "float32": 1e-5, "float64": 1e-13}[dtype]
    for result in results.values():
        np.testing.assert_allclose(result, results["reference"], rtol=tolerance, atol=tolerance / 16)


class _RaisingIndex:
    def __index__(self):
        raise ValueError("no")


@pytest.mark.parametrize(
    "arguments", [{"dim": _RaisingIndex()}, {"num_threads": _RaisingIndex()}], ids=["dim", "num_threads"]
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
