"""What each linear operator refuses, in which order, and the forms in which it takes its arguments.

The table of faults is that of `test_contract`, with cases in the place of operators: the gradient's two modes are two.
"""

from __future__ import annotations

import inspect
import itertools
import logging
import tracemalloc
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from faults import (
    CODES,
    FOREIGN_DTYPES,
    INVALID,
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
from linear_samples import GRADIENT, LINEAR, LOSS, STATISTICS, WHOLE, Shape, accumulator, problem_of
from samples import DTYPES, assert_identical

import ascend_grad as ag
from ascend_grad import contract
from ascend_grad import errors as library_errors
from ascend_grad.backends import REGISTRY

CASES = {
    "recomputed": (GRADIENT, {"mode": "recomputed"}),
    "stored": (GRADIENT, {"mode": "stored"}),
    "statistics": (STATISTICS, {}),
    "loss": (LOSS, {}),
    "whole": (WHOLE, {}),
}

#: The order of the checks.
STAGES = {
    "recomputed": (
        *("settings", "mode", "null", "dtype", "label_smoothing", "shape"),
        *("output_mask", "workspace_bytes", "filter_eps", "target", "out"),
    ),
    "statistics": ("settings", "null", "dtype", "shape", "bounds", "return_logits"),
    "loss": ("settings", "null", "dtype", "shape", "label_smoothing", "out"),
    "whole": (
        *("settings", "null", "dtype", "shape", "reduction", "grad_loss", "ignore_index", "vocab_start_index"),
        *("return_grad", "output_mask", "workspace_bytes", "filter_eps", "target"),
    ),
}
STAGES["stored"] = STAGES["recomputed"]

BT, V, H = Shape(9, 6, 5)


def taken(backend: str) -> dict[str, Any]:
    """Settings of `good_call` that the backend takes: a device has 16-bit matrices alone, and many words or none."""
    return {"words": 130, "dtype": "bfloat16"} if backend == "npu" else {}


def good_call(case: str, *, empty: bool = False, words: int = V, dtype: str = "float32") -> dict[str, Any]:
    operator, how = CASES[case]
    problem = problem_of(operator, Shape(0 if empty else BT, words, H), dtype, **how)
    parameters = inspect.signature(getattr(ag, operator)).parameters
    arguments = {name: p.default for name, p in parameters.items() if p.default is not p.empty} | problem.arguments
    if operator == GRADIENT:
        arguments["grad"] = np.ones(len(arguments["grad"]), np.float32)
        arguments["out"] = tuple(np.full(problem.arguments[name].shape, 7, np.float32) for name in ("input", "weight"))
    if operator == LOSS:
        names = "logits_max", "vocab_parallel_logits"
        arguments["out"] = tuple(np.full(problem.arguments[name].shape, 7, np.float32) for name in names)
    return arguments


# ---- the faults ------------------------------------------------------------------------------------------------------

NOT_A_BOOL = {"number": 1, "text": "yes", "None": None, "array": np.array(True)}
NOT_TWO_BOOLS = {
    "one": (True,),
    "three": (True,) * 3,
    "numbers": (1, 0),
    "ones": (1, 1),
    "arrays in it": (np.array([True, False]), True),
    "array of numbers": np.array([1, 0]),
    "text": "ab",
    "bool": True,
    "None": None,
    "None in it": (True, None),
    "dict": {True: 1, False: 2},
    "array of rank 0": np.array(True),
    "array of rank 2": np.ones((2, 2), bool),
    "masked array": np.ma.array([True, True]),
}
#: The dimensions of each array, and the name that is blamed for one too many of them.
DIMS = {
    "grad": ("BT",),
    "input": ("BT", "H"),
    "weight": ("V", "H"),
    "target_mask": ("BT",),
    "masked_target": ("BT",),
    "logits_max": ("BT",),
    "sum_exp_logits": ("BT",),
    "softmax": ("BT", "V"),
    "target": ("BT",),
    "predicted_logits": ("BT",),
    "vocab_parallel_logits": ("BT", "V"),
}
INTEGERS = ("target", "masked_target")


def arrays_of(case: str) -> dict[str, np.ndarray]:
    """In the order in which they are checked."""
    operator, arguments = contract.OPERATORS[CASES[case][0]], good_call(case)
    names = (*operator.array_names, *operator.optional_names)
    return {name: arguments[name] for name in names if isinstance(arguments[name], np.ndarray)}


def each(stage: str, name: str, values: dict[str, Any], kind) -> Iterator[Fault]:
    for label, value in values.items():
        yield Fault(stage, name, label, constant(value), kind, name)


def shorter(x: np.ndarray) -> np.ndarray:
    return x[:-1]


def longer(x: np.ndarray) -> np.ndarray:
    return np.concatenate([x, x[:1] if len(x) else np.zeros((1, *x.shape[1:]), x.dtype)])


def faults_of_dtypes(case: str) -> Iterator[Fault]:
    operator, _ = CASES[case]
    for name in arrays_of(case):
        foreign = dict(FOREIGN_DTYPES)
        if name in INTEGERS:
            for fine in ("int32", "swapped int"):
                del foreign[fine]
            foreign |= {"float32": np.float32, "uint64": np.uint64, "int16": np.int16, "uint8": np.uint8}
        else:
            foreign |= {"int64": np.int64}
        if name == "target_mask":
            foreign |= {"int8": np.int8, "float32": np.float32}
        else:
            foreign |= {"bool": bool}
        if name in ("grad", "logits_max", "sum_exp_logits", "predicted_logits", "softmax"):
            foreign |= {"float16": np.float16, "bfloat16": DTYPES["bfloat16"]}
        for label, dtype in foreign.items():
            yield Fault("dtype", name, label, as_dtype(dtype), TYPE, name)
        more = {"string": "softmax", "dict": {}, "ragged": [[1.0], [2.0, 3.0]], "hostile": Hostile(), "set": {1.0}}
        yield from each("dtype", name, more, TYPE)
        for label, give in MEANINGS_IN_TWO_AXES.items():
            yield Fault("dtype", name, label, give, TYPE, name)
    # Of two dtypes that do not belong together, the later one is wrong.
    partners = {
        GRADIENT: {"weight": "weight", "input": "weight", "grad": "grad"},
        STATISTICS: {"weight": "weight", "input": "weight"},
        LOSS: {"logits_max": "sum_exp_logits", "predicted_logits": "predicted_logits"},
        WHOLE: {"weight": "weight", "input": "weight"},
    }[operator]
    for name, blamed in partners.items():
        yield Fault("dtype", name, "float64, unlike the others", as_dtype(np.float64), TYPE, blamed)
    if operator == LOSS:
        name = "vocab_parallel_logits"
        yield Fault("dtype", name, "float64, unlike the others", as_dtype(np.float64), TYPE, name)


def faults_of_shapes(case: str) -> Iterator[Fault]:
    names = list(arrays_of(case))
    seen: set[str] = set()
    for name in names:
        dims = DIMS[name]
        yield Fault("shape", name, "rank 0", lambda x: x.dtype.type(0), INVALID, name)
        yield Fault("shape", name, "one axis more", lambda x: x[None], INVALID, name)
        # The first array decides; another one that disagrees is blamed.
        others = [other for other in names if other != name and dims[0] in DIMS[other]]
        first = dims[0] not in seen
        if others:
            blamed = others[0] if first else name
            if name != "target_mask":
                yield Fault("shape", name, "shorter", shorter, INVALID, blamed)
            yield Fault("shape", name, "longer", longer, INVALID, blamed)
        seen.add(dims[0])
    for name in [name for name in ("input", "weight") if name in names]:
        yield Fault("shape", name, "other features", lambda x: x[:, 1:], INVALID, "weight")
    if "softmax" in names:
        yield Fault("shape", "softmax", "other words", lambda x: x[:, 1:], INVALID, "softmax")
    if case == "statistics":
        yield Fault("shape", "weight", "without words", lambda x: x[:0], INVALID, "weight")


def faults_of_results(case: str) -> Iterator[Fault]:
    yield Fault("out", "out", "array", constant(np.zeros((BT, H), np.float32)), TYPE, "out")
    yield Fault("out", "out", "text", constant("ab"), TYPE, "out")
    yield Fault("out", "out", "number", constant(7), TYPE, "out")
    yield Fault("out", "out", "one", lambda outs: outs[:1], INVALID, "out")
    yield Fault("out", "out", "three", lambda outs: (*outs, None), INVALID, "out")
    for which in range(2):

        def spoilt(function, which=which):
            return lambda outs: tuple(function(out) if i == which else out for i, out in enumerate(outs))

        name = f"out[{which}]"
        yield Fault("out", "out", f"{which}: list", spoilt(constant([0.0])), TYPE, name)
        for label, dtype in FOREIGN_DTYPES.items():
            yield Fault("out", "out", f"{which}: {label}", spoilt(as_dtype(dtype)), TYPE, name)
        for label, give in MEANINGS_IN_TWO_AXES.items():
            yield Fault("out", "out", f"{which}: {label}", spoilt(give), TYPE, name)
        yield Fault("out", "out", f"{which}: one element", spoilt(constant(np.zeros(1, np.float32))), INVALID, name)
        yield Fault("out", "out", f"{which}: one axis more", spoilt(lambda x: x[None]), INVALID, name)
        yield Fault("out", "out", f"{which}: read-only", spoilt(read_only), INVALID, name)
        if case != "loss" or which == 1:
            yield Fault("out", "out", f"{which}: overlapping itself", spoilt(self_overlapping), INVALID, name)

    def overlapping(outs):
        memory = np.zeros(2 * max(outs[0].size, outs[1].size), outs[0].dtype)
        return tuple(memory[: out.size].reshape(out.shape) for out in outs)

    yield Fault("out", "out", "overlapping each other", overlapping, INVALID, "out")


def faults_of(case: str) -> list[Fault]:
    operator, _ = CASES[case]
    faults = faults_of_settings()
    faults += [
        Fault("null", name, "None", constant(None), NULL, name) for name in contract.OPERATORS[operator].array_names
    ]
    faults += [*faults_of_dtypes(case), *faults_of_shapes(case)]
    if operator == GRADIENT:
        if case == "stored":
            faults += [Fault("mode", "softmax", "None", constant(None), NULL, "softmax")]
        else:
            faults += [
                Fault("mode", name, "None", constant(None), NULL, name) for name in ("logits_max", "sum_exp_logits")
            ]
        for label, value in {"minus one": -1, "not below V": V, "smallest": -(2**63), "largest": 2**63 - 1}.items():

            def spoil(x, value=value):
                return np.where(np.arange(len(x)) == 2, value, x)

            faults += [Fault("target", "masked_target", label, spoil, INVALID, "masked_target")]
        faults += [Fault("target", "weight", "fewer words", lambda x: x[:0], INVALID, "masked_target")] * (
            case == "recomputed"
        )
    if operator in (GRADIENT, LOSS):
        values = {"a little": 1e-300, "much": 1, "negative": -0.1, "NaN": np.nan, "infinite": np.inf}
        faults += each("label_smoothing", "label_smoothing", values, INVALID)
        faults += each("label_smoothing", "label_smoothing", NOT_A_NUMBER, TYPE)
        faults += faults_of_results(case)
    if operator in (GRADIENT, WHOLE):
        faults += each("output_mask", "output_mask", NOT_TWO_BOOLS, TYPE)
        values = {"zero": 0, "negative": -1, "too small": contract.MIN_WORKSPACE_BYTES - 1, "beyond 64 bits": 2**70}
        faults += each("workspace_bytes", "workspace_bytes", values, INVALID)
        faults += each("workspace_bytes", "workspace_bytes", {k: v for k, v in NOT_AN_INT.items() if k != "None"}, TYPE)
        values = {"negative": -1e-300, "NaN": np.nan, "infinite": np.inf, "beyond float64": 10**400}
        faults += each("filter_eps", "filter_eps", values, INVALID)
        faults += each("filter_eps", "filter_eps", NOT_A_NUMBER, TYPE)
    if operator == STATISTICS:
        for name in ("vocab_start_index", "vocab_end_index"):
            faults += each("bounds", name, NOT_AN_INT, TYPE)
            faults += each("bounds", name, {"negative": -1, "beyond 64 bits": 2**63}, INVALID)
        faults += [
            Fault("bounds", "vocab_end_index", "below the start", constant(999), INVALID, "vocab_end_index"),
            Fault("bounds", "vocab_end_index", "too many", constant(1000 + V + 1), INVALID, "vocab_end_index"),
            Fault("bounds", "vocab_start_index", "too many", constant(0), INVALID, "vocab_end_index"),
            Fault("bounds", "vocab_start_index", "beyond the end", constant(1000 + V), INVALID, "vocab_end_index"),
        ]
        faults += each("return_logits", "return_logits", NOT_A_BOOL, TYPE)
    if operator == WHOLE:
        faults += each("reduction", "reduction", {"None": None, "number": 1, "list": ["sum"]}, TYPE)
        faults += each("reduction", "reduction", {"unknown": "average", "empty": "", "capitals": "Mean"}, INVALID)
        faults += each("grad_loss", "grad_loss", {k: v for k, v in NOT_A_NUMBER.items() if k != "None"}, TYPE)
        rows = {f"rows, {label}": give(np.ones(BT)) for label, give in MEANINGS_IN_TWO_AXES.items()}
        faults += each("grad_loss", "grad_loss", rows, TYPE)
        faults += each("grad_loss", "grad_loss", {"beyond float64": 10**400}, INVALID)
        for name in ("ignore_index", "vocab_start_index"):
            faults += each(name, name, NOT_AN_INT, TYPE)
            faults += each(name, name, {"beyond 64 bits": 2**63, "far below": -(2**63) - 1}, INVALID)
        faults += each("vocab_start_index", "vocab_start_index", {"negative": -1}, INVALID)
        faults += each("return_grad", "return_grad", NOT_A_BOOL, TYPE)
        for label, value in {"below": 99, "not below V": 100 + V, "other sign": 7, "smallest": -(2**63)}.items():

            def spoil(x, value=value):
                return np.where(np.arange(len(x)) == 2, value, x)

            faults += [Fault("target", "target", label, spoil, INVALID, "target")]
        faults += [Fault("target", "ignore_index", "another", constant(-8), INVALID, "target")]
        faults += [Fault("target", "vocab_start_index", "another", constant(101), INVALID, "target")]
    return faults


def spoils_an_empty_call(fault: Fault) -> bool:
    """Without rows there is no target that could be wrong, and some arrays do not differ."""
    harmless = "shorter", "overlapping itself", "overlapping each other"
    return fault.stage != "target" and not fault.label.endswith(harmless)


FAULTS = [
    pytest.param(case, fault, empty, id=f"{case}-{fault}{', empty' * empty}")
    for case in CASES
    for fault in faults_of(case)
    for empty in (False, True)
    if not empty or spoils_an_empty_call(fault)
]


@pytest.mark.parametrize(("case", "fault", "empty"), FAULTS)
def test_faults(case, fault, empty, device):
    """The same exception from every backend, from `explain` and `workspace_size`; nothing is written."""
    operator, _ = CASES[case]
    arguments = good_call(case, empty=empty)
    outs = arguments.get("out") or ()
    arguments[fault.argument] = fault.spoil(arguments[fault.argument])
    messages = set()
    for backend in ("cpu", "reference", "npu", None, "auto"):
        if fault.argument != "backend":
            arguments["backend"] = backend
        error = outcome(getattr(ag, operator), **arguments)
        assert type(error) is fault.raises, error
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
    assert len(message) < 400
    assert all(np.all(out == 7) for out in outs)
    assert device.calls() == 0


@pytest.mark.parametrize("case", CASES)
def test_good_calls_are_good(case, backend):
    operator, _ = CASES[case]
    for empty in (False, True):
        getattr(ag, operator)(**good_call(case, empty=empty, **taken(backend)) | {"backend": backend})


@pytest.mark.parametrize("case", CASES)
def test_the_earlier_stage_decides(case, backend):
    """Two faults at once, one of each kind for every pair of stages."""
    operator, _ = CASES[case]
    order = STAGES[case].index
    few = {(fault.stage, fault.argument, fault.raises): fault for fault in faults_of(case)}
    for first, second in itertools.permutations(few.values(), 2):
        if order(first.stage) >= order(second.stage):
            continue
        arguments = good_call(case) | {"backend": backend}
        for fault in (second, first):
            arguments[fault.argument] = fault.spoil(arguments[fault.argument])
        error = outcome(getattr(ag, operator), **arguments)
        message = f"{first} decides before {second}, but: {error}"
        assert type(error) is first.raises, message
        assert f"{operator}: {first.blamed}: expected " in str(error), message


@pytest.mark.parametrize("case", CASES)
def test_every_stage_has_faults(case):
    assert {fault.stage for fault in faults_of(case)} == set(STAGES[case])


# ---- what messages say -----------------------------------------------------------------------------------------------


def test_no_mode_at_all(backend):
    """The mode is looked at before everything else."""
    error = outcome(ag.fused_linear_cross_entropy_loss_grad, None, None, None, None, None, backend=backend)
    assert type(error) is NULL
    assert str(error).startswith(f"{GRADIENT}: softmax: expected an array, or logits_max and sum_exp_logits instead")


def test_null_is_said_of_the_first(linear, backend):
    names = contract.OPERATORS[linear].array_names
    more = {"softmax": np.zeros(3)} if linear == GRADIENT else {}
    more |= {"vocab_start_index": 0, "vocab_end_index": 1} if linear == STATISTICS else {}
    error = outcome(getattr(ag, linear), *(None for _ in names), **more, backend=backend)
    assert type(error) is NULL
    assert str(error).startswith(f"{linear}: {names[0]}: ")


@pytest.mark.parametrize("case", ["recomputed", "stored"])
@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("bad", [-1, V, 2**31 - 1, -(2**31)])
def test_the_first_target_out_of_range_is_named(case, packed, bad, backend):
    arguments = good_call(case) | {"backend": backend}
    outs = arguments["out"]
    mask = np.array([True] * 3 + [False] * (BT - 3))
    target = np.array([bad] * 2 + [0] * (BT - 4) + [bad, 5], np.int32)
    arguments |= {"target_mask": np.packbits(mask, bitorder="little") if packed else mask, "masked_target": target}
    # A row without a gradient is absent from the sums, not from the checks.
    for grad in (np.ones(BT, np.float32), np.zeros(BT, np.float32)):
        error = outcome(ag.fused_linear_cross_entropy_loss_grad, **arguments | {"grad": grad})
        assert type(error) is INVALID
        expected = (
            f"{GRADIENT}: masked_target: expected values in [0, {V}) wherever target_mask is 0, got {bad} in row 7 "
        )
        assert str(error).startswith(expected)
        assert all(np.all(out == 7) for out in outs)
    mask = mask.copy()
    mask[7] = True
    arguments["target_mask"] = np.packbits(mask, bitorder="little") if packed else mask
    ag.fused_linear_cross_entropy_loss_grad(**arguments)


@pytest.mark.parametrize("dtype", [np.int32, np.int64, ">i4", ">i8"])
@pytest.mark.parametrize("layout", [slice(None), slice(None, None, -1), slice(None, None, 2)], ids=str)
def test_a_target_outside_of_the_vocabulary_is_named(dtype, layout, backend):
    x, w = np.ones((BT, H)), np.ones((V, H))
    target = np.array([10, -3, 15, 11, -3, 12, 16, 13, 10], dtype)
    seen = target[layout]
    row = int(np.flatnonzero(seen == 16)[0])
    error = outcome(
        *(ag.linear_cross_entropy, x[layout], w, seen),
        ignore_index=-3,
        vocab_start_index=10,
        backend=backend,
    )
    assert type(error) is INVALID
    assert str(error).startswith(f"{WHOLE}: target: expected values in [10, 16) or -3, got 16 in row {row} ")
    ag.linear_cross_entropy(
        x, w, np.where(target == 16, -3, target), ignore_index=-3, vocab_start_index=10, backend=backend
    )


def test_what_an_output_mask_skips_takes_no_out(backend):
    for case, which in itertools.product(("recomputed", "stored"), range(2)):
        arguments = good_call(case) | {"backend": backend}
        outs = arguments["out"]
        arguments["output_mask"] = (which == 1, which == 0)
        error = outcome(ag.fused_linear_cross_entropy_loss_grad, **arguments)
        assert type(error) is INVALID
        assert f"out[{which}]: expected None, as the call does not ask for this result" in str(error)
        assert all(np.all(out == 7) for out in outs)
        arguments["out"] = tuple(None if i == which else out for i, out in enumerate(outs))
        results = ag.fused_linear_cross_entropy_loss_grad(**arguments)
        assert results[which] is None
        assert results[1 - which] is outs[1 - which]
    arguments = good_call("loss") | {"vocab_parallel_logits": None, "backend": backend}
    error = outcome(ag.fused_cross_entropy_loss_with_max_sum, **arguments)
    assert type(error) is INVALID
    assert "out[1]: expected None" in str(error)


def test_where_softmax_is_given_the_rest_is_not_looked_at(backend):
    arguments = good_call("stored") | {"backend": backend}
    expected = ag.fused_linear_cross_entropy_loss_grad(**arguments | {"out": None})
    for junk in (None, "nonsense", Hostile(), np.zeros((3, 3), int), np.full(BT, np.nan, np.float32)):
        more = {"logits_max": junk, "sum_exp_logits": junk, "out": None}
        for result, right in zip(ag.fused_linear_cross_entropy_loss_grad(**arguments | more), expected, strict=True):
            assert_identical(result, right)


# ---- what is accepted ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("case", CASES)
def test_lists_are_arrays(case, backend):
    """Lists of floats are of float64, and so is everything beside them."""
    operator, how = CASES[case]
    problem = problem_of(operator, Shape(BT, V, H), "float64", **how)
    function = getattr(ag, operator)
    expected = function(**problem.arguments, backend=backend)
    results = function(**problem.mapped(lambda a: a.tolist()).arguments, backend=backend)
    for result, right in zip(results, expected, strict=True):
        assert_identical(result, right)


class Index:
    def __init__(self, value: int):
        self.value = value

    def __index__(self):
        return self.value


@pytest.mark.parametrize("case", CASES)
def test_subclasses_without_a_meaning_of_their_own(case, backend):
    arguments = good_call(case, **taken(backend)) | {"backend": backend}
    arguments.pop("out", None)
    expected = getattr(ag, CASES[case][0])(**arguments)
    arguments |= {name: value.view(Noted) for name, value in arguments.items() if isinstance(value, np.ndarray)}
    for result, right in zip(getattr(ag, CASES[case][0])(**arguments), expected, strict=True):
        assert type(result) is type(right)
        if right is not None:
            assert_identical(result, right)


@pytest.mark.parametrize("case", CASES)
def test_meanings_are_not_lost_in_lists(case, backend):
    operator, arguments = CASES[case][0], good_call(case) | {"backend": backend}
    if operator == WHOLE:
        arguments |= {"reduction": "none", "grad_loss": np.ones(BT, np.float32)}
    for name, value in arguments.items():
        if isinstance(value, np.ndarray):
            error = outcome(getattr(ag, operator), **arguments | {name: [np.ma.array(row) for row in value]})
            assert type(error) is TYPE
            assert str(error).startswith(f"{operator}: {name}: expected an array that computes as numpy.ndarray does")


def test_integers_of_any_kind(backend):
    arguments = good_call("statistics", **taken(backend)) | {"backend": backend}
    expected = ag.fused_linear_online_max_sum(**arguments)
    for kind in (np.int16, np.uint64, Index, np.array):
        more = {name: kind(arguments[name]) for name in ("vocab_start_index", "vocab_end_index")}
        for result, right in zip(ag.fused_linear_online_max_sum(**arguments | more)[:5], expected[:5], strict=True):
            assert_identical(result, right)
    arguments = good_call("whole", **taken(backend)) | {"backend": backend, "workspace_bytes": 2**23}
    expected = ag.linear_cross_entropy(**arguments)
    for kind in (np.int32, np.int64, Index, np.array):
        more = {name: kind(arguments[name]) for name in ("vocab_start_index", "ignore_index", "workspace_bytes")}
        for result, right in zip(ag.linear_cross_entropy(**arguments | more), expected, strict=True):
            assert_identical(result, right)


@pytest.mark.parametrize(("start", "end"), [(0, 0), (0, V), (3, 3), (2**62, 2**62 + V), (2**63 - 1 - V, 2**63 - 1)])
def test_bounds_of_the_vocabulary(start, end, backend):
    """An empty shard, a shard beyond 32 bits, the largest ids of all."""
    x, w = np.ones((4, H), np.float16), np.ones((V, H), np.float16)
    for dtype in (np.int32, np.int64):
        limits = np.iinfo(dtype)
        target = np.clip([start, end, limits.min, limits.max], limits.min, limits.max).astype(dtype)
        result = ag.fused_linear_online_max_sum(x, w, target, start, end, backend=backend)
        masked = [not start <= int(t) < end for t in target]
        assert result.target_mask.tolist() == [sum(m << i for i, m in enumerate(masked))]
        assert result.masked_target.tolist() == [
            0 if m else int(t) - start for m, t in zip(masked, target, strict=True)
        ]
        assert result.masked_target.dtype == dtype


def test_targets_beyond_32_bits(backend):
    x, w = np.ones((3, H), np.float16), np.arange(V * H, dtype=np.float16).reshape(V, H) / 10
    plain = ag.linear_cross_entropy(x, w, np.array([0, 5, -100]), backend=backend)
    far = np.array([2**40, 2**40 + 5, -(2**63)])
    results = ag.linear_cross_entropy(x, w, far, ignore_index=-(2**63), vocab_start_index=2**40, backend=backend)
    for result, right in zip(results, plain, strict=True):
        assert_identical(result, right)


def test_numbers_of_any_kind_are_upstream_gradients(backend):
    arguments = good_call("whole", **taken(backend)) | {"backend": backend, "grad_loss": 2.0}
    expected = ag.linear_cross_entropy(**arguments)
    for number in (2, np.float16(2), np.array(2.0), np.int64(2), DTYPES["bfloat16"].type(2)):
        for result, right in zip(ag.linear_cross_entropy(**arguments | {"grad_loss": number}), expected, strict=True):
            assert_identical(result, right)
    arguments |= {"reduction": "none"}
    expected = ag.linear_cross_entropy(**arguments)
    for dtype in DTYPES.values():
        more = {"grad_loss": np.full(BT, 2).astype(dtype)}
        for result, right in zip(ag.linear_cross_entropy(**arguments | more), expected, strict=True):
            assert_identical(result, right)


@pytest.mark.parametrize("value", [[1, 2], np.ones(BT - 1), np.ones((BT, 1)), np.ones(BT, int), ["x"] * BT, Hostile()])
def test_upstream_gradients_of_rows(value, backend):
    arguments = good_call("whole") | {"backend": backend, "grad_loss": value}
    for reduction in ("none", "sum", "mean"):
        error = outcome(ag.linear_cross_entropy, **arguments | {"reduction": reduction})
        assert isinstance(error, INVALID)
        assert str(error).startswith(f"{WHOLE}: grad_loss: expected ")


def test_outs_of_any_kind_of_sequence(backend):
    arguments = good_call("recomputed", **taken(backend)) | {"backend": backend}
    outs = arguments["out"]
    for given in (list(outs), (None, outs[1]), [outs[0], None], (None, None), None):
        results = ag.fused_linear_cross_entropy_loss_grad(**arguments | {"out": given})
        for result, out in zip(results, given or (None, None), strict=True):
            assert result is out or out is None


# ---- one contract for all --------------------------------------------------------------------------------------------


def test_linear_operators_are_described_and_public():
    assert {operator.name for operator in contract.LINEAR} == set(LINEAR)
    for operator in contract.LINEAR:
        assert operator.name in ag.__all__
        assert contract.OPERATORS[operator.name] is operator
        parameters = inspect.signature(getattr(ag, operator.name)).parameters
        required = [p.name for p in parameters.values() if p.default is p.empty]
        assert required[: len(operator.array_names)] == list(operator.array_names)
        assert all(parameters[name].default is None for name in operator.optional_names)
        assert list(parameters)[-2:] == ["backend", "num_threads"]
        takes_out = operator.name in (GRADIENT, LOSS)
        assert ("out" in parameters) == takes_out


def test_results_have_names(backend):
    for case, (operator, _) in CASES.items():
        results = getattr(ag, operator)(**good_call(case, **taken(backend)) | {"backend": backend})
        assert getattr(results, "_fields", contract.OPERATORS[operator].results) == contract.OPERATORS[operator].results
        assert isinstance(results, tuple)


def test_usable_backends_agree(dtype):
    for case, (operator, how) in CASES.items():
        problem = problem_of(operator, Shape(20, 30, 10), dtype, **how)
        results = {
            name: getattr(ag, operator)(**problem.arguments, backend=name)
            for name, status in ag.backends().items()
            if status.usable
        }
        assert {"cpu", "reference"} <= set(results), case
        tolerance = {"float16": 2**-8, "bfloat16": 2**-5, "float32": 1e-5, "float64": 1e-13}[dtype]
        for name in results:
            for result, right in zip(results[name], results["reference"], strict=True):
                result, right = (a.astype(np.float64) for a in (result, right))
                np.testing.assert_allclose(result, right, rtol=tolerance, atol=tolerance * np.abs(right).max(initial=0))


def test_explain(linear, backend):
    case = next(case for case, (operator, _) in CASES.items() if operator == linear)
    arguments = good_call(case)
    assert ag.explain(linear, **arguments | {"backend": backend}).backend == backend
    assert ag.explain(linear, **arguments).backend == ("npu" if backend == "npu" else "cpu")
    assert all(np.all(out == 7) for out in arguments.get("out") or ())
    if backend != "npu":  # then there is none
        with pytest.raises(ag.BackendUnavailableError):
            getattr(ag, linear)(**arguments | {"backend": "npu"})


def test_the_choice_computes(linear, monkeypatch):
    """The CPU must not answer in the place of another backend."""
    case = next(case for case, (operator, _) in CASES.items() if operator == linear)
    arguments = good_call(case) | ({"out": None} if "out" in good_call(case) else {})
    del arguments["backend"]
    called = []
    reference = REGISTRY["reference"]
    original = reference.run
    monkeypatch.setattr(reference, "run", lambda *args: called.append("reference") or original(*args))
    function = getattr(ag, linear)

    def by_reference(**settings) -> bool:
        called.clear()
        function(**arguments, **settings)
        return bool(called)

    assert not by_reference()
    assert by_reference(backend="reference")
    with ag.use_backend("reference"):
        assert by_reference()
        assert not by_reference(backend="cpu")
    with ag.use_backend("npu"):
        assert not by_reference(backend="cpu")
        with pytest.raises(ag.BackendUnavailableError):
            function(**arguments)


@pytest.mark.parametrize("case", CASES)
def test_every_call_is_logged(case, caplog):
    operator, arguments = CASES[case][0], good_call(case)
    arguments.pop("out", None)
    with caplog.at_level(logging.DEBUG, "ascend_grad"):
        getattr(ag, operator)(**arguments)
    (record,) = caplog.records
    assert record.getMessage().startswith(f"{operator} of float32(")
    assert ": cpu, automatic choice; not npu: " in record.getMessage()


def test_workspace_size_knows_shapes_alone(linear):
    """Values do not matter, nor that the memory could not be had."""
    case = next(case for case, (operator, _) in CASES.items() if operator == linear)
    assert isinstance(ag.workspace_size(linear, **good_call(case)), int)
    if linear == LOSS:
        return
    problem = problem_of(linear, Shape(BT, V, H), "float32")
    size = ag.workspace_size(linear, **problem.arguments)
    zeros = {name: np.zeros_like(problem.arguments[name]) for name in ("input", "weight")}
    assert ag.workspace_size(linear, **problem.replaced(**zeros).arguments) == size
    huge = problem.replaced(
        input=np.broadcast_to(np.float32(0), (BT, 2**31)), weight=np.broadcast_to(np.float32(0), (V, 2**31))
    )
    assert ag.workspace_size(linear, **huge.arguments) > 0


def test_a_workspace_is_kept_to():
    """Beside it there are sums of input's size, what additions to them lose, and some numbers for each row."""
    rows, hidden = 1000, 40
    for case in ("recomputed", "stored", "whole"):
        operator, how = CASES[case]
        for dtype in DTYPES:
            problem = problem_of(operator, Shape(rows, 500, hidden), dtype, **how)
            sums = accumulator(DTYPES[dtype]).itemsize * rows * hidden
            for nbytes in (2**22, 2**24, 2**27):
                size = ag.workspace_size(operator, **problem.arguments, workspace_bytes=nbytes)
                assert size <= nbytes + sums + min(sums, nbytes // 4) + 64 * rows
            default = ag.workspace_size(operator, **problem.arguments)
            assert default <= 2**26 + 2 * sums + 64 * rows


@pytest.mark.parametrize("rows", [60, 220, 280])
def test_workspace_size_covers_calls_with_ignored_rows(rows):
    """Where fewer rows count, plans differ: the logits of these, for one, can be kept."""
    arguments = {
        "input": np.ones((280, 8), np.float32),
        "weight": np.ones((3640, 8), np.float32),
        "target": np.where(np.arange(280) < rows, 0, -100),
        "workspace_bytes": 7 << 20,
    }
    size = ag.workspace_size(WHOLE, **arguments)
    ag.linear_cross_entropy(**arguments)
    tracemalloc.start()
    try:
        results = ag.linear_cross_entropy(**arguments)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak - sum(result.nbytes for result in results) <= size + 2**14


def test_the_default_workspace_is_a_share_of_large_problems():
    x, w = (np.broadcast_to(np.float32(1), (rows, 4096)) for rows in (8192, 10**5))
    target = np.zeros(8192, int)
    share = 2 * (x.nbytes + w.nbytes) // 4
    assert 2**26 < share <= ag.workspace_size(WHOLE, x, w, target) <= share + 64 * 8192
    assert ag.workspace_size(WHOLE, x, w, target, workspace_bytes=2**26) <= 2**26 + 64 * 8192
    one = ag.workspace_size(WHOLE, x, w, target, output_mask=(False, True))
    assert one <= (x.nbytes + 2 * w.nbytes) // 4 + 64 * 8192
    small = ag.workspace_size(WHOLE, x[:100], w[:1000], target[:100])
    assert small <= 2**26 + 64 * 100


def test_copies_of_overlapping_results_are_in_the_workspace():
    arguments = dict(problem_of(GRADIENT, Shape(100, 50, 40), "float32").arguments)
    x, w = (arguments[name].copy() for name in ("input", "weight"))
    arguments |= {"input": x, "weight": w}

    def size(*outs):
        return ag.workspace_size(GRADIENT, **arguments, out=outs)

    fresh = np.empty_like(x), np.empty_like(w)
    assert size(x, None) - size(fresh[0], None) == x.nbytes
    assert size(x, w) - size(*fresh) == x.nbytes + w.nbytes
    assert size(fresh[0], w) - size(*fresh) == w.nbytes


def test_a_wrong_size_is_not_what_is_expected():
    x, w, target = np.zeros((13, 8)), np.zeros((50, 8)), np.zeros(13, int)
    with pytest.raises(ag.ParamInvalidError, match=r"weight: expected shape \(V, H = 8\), got \(8, 50\)"):
        ag.linear_cross_entropy(x, w.T, target)


# ---- extremes --------------------------------------------------------------------------------------------------------


def test_sizes_near_the_end_of_integers():
    """Of rows of no stride there can be 2**58 elements."""
    x, w = (np.broadcast_to(np.float32(0), (rows, 2**58)) for rows in (3, 5))
    for nbytes in (2**22, 2**26):
        size = ag.workspace_size(WHOLE, x, w, np.zeros(3, int), return_grad=False, workspace_bytes=nbytes)
        assert nbytes // 8 < size < 2**26 + 2**10


@pytest.mark.parametrize("start", [2**63 - 10, 2**63 - 20, 2**63 - 40])
def test_the_last_words_of_all(start):
    x, w = np.eye(3, 4), np.random.default_rng(0).standard_normal((20, 4))
    target = np.array([start, start + 5, start])
    results = [
        ag.linear_cross_entropy(x, w, target, vocab_start_index=start, reduction="sum", backend=backend)
        for backend in ("cpu", "reference")
    ]
    for own, right in zip(*results, strict=True):
        np.testing.assert_allclose(own, right, rtol=1e-12, atol=1e-14)


def test_bytes_of_a_mask_behind_the_last_row_cost_nothing(backend):
    mask = np.broadcast_to(np.uint8(0), 2**44)
    ones = np.ones(4, np.float32)
    arguments = (ones, np.eye(4, dtype=np.float16), np.ones((5, 4), np.float16), mask, np.zeros(4, int))
    input_grad, _ = ag.fused_linear_cross_entropy_loss_grad(
        *arguments, logits_max=ones, sum_exp_logits=5 * ones, backend=backend
    )
    assert np.isfinite(input_grad).all()


def test_overflow_is_no_warning():
    """In any layout, whatever NumPy is set to."""
    x = np.zeros((200, 2), np.float32)
    x[:, 0] = 1e37
    w = np.array([[1, 0], [0, 0]], np.float32)
    with np.errstate(all="raise"):
        for rows in (x, x[::-1]):
            assert ag.linear_cross_entropy(rows, w, np.ones(200, int), reduction="sum").loss == np.inf


@pytest.mark.parametrize("changed", ["masked_target", "target_mask", "grad", "input", "weight", "sum_exp_logits"])
@pytest.mark.parametrize("argument", ["filter_eps", "workspace_bytes", "label_smoothing"])
def test_arrays_that_change_while_they_are_checked(changed, argument):
    """The conversion of one argument may shrink an array that was checked before: nothing is read beyond its end."""
    arguments = {name: value for name, value in good_call("recomputed").items() if name != "out"}
    arguments = {k: v.copy() if isinstance(v, np.ndarray) else v for k, v in arguments.items()}

    class Number:
        def __float__(self) -> float:
            arguments[changed].resize((1,) * arguments[changed].ndim, refcheck=False)
            return 0.0

        def __index__(self) -> int:
            return int(self.__float__()) + contract.MIN_WORKSPACE_BYTES

    with pytest.raises(ag.ParamInvalidError) as info:
        ag.fused_linear_cross_entropy_loss_grad(**arguments | {argument: Number()})
    assert info.value.code == 161002


def test_a_list_of_outs_may_change_while_it_is_looked_at():
    arguments = {name: value for name, value in good_call("recomputed").items() if name != "out"}
    outs = [np.empty_like(arguments["input"]), np.empty_like(arguments["weight"])]
    expected = ag.fused_linear_cross_entropy_loss_grad(**arguments)
    given: list[np.ndarray] = []

    class Clearing(type):
        def __getattribute__(cls, name):
            given.clear()
            return super().__getattribute__(name)

    class Kind(np.ndarray, metaclass=Clearing):
        pass

    given.extend([out.view(Kind) for out in outs])
    ag.fused_linear_cross_entropy_loss_grad(**arguments, out=given)
    for out, each in zip(outs, expected):
        assert_identical(out, each)


def test_strings_of_other_classes():
    class Reduction(str):
        def __eq__(self, other) -> bool:
            return self.lower() == other

        __hash__ = str.__hash__

    arguments = np.eye(3, 2), np.eye(4, 2), np.array([0, 3, 1])
    for reduction in (np.str_("sum"), Reduction("SUM")):
        result = ag.linear_cross_entropy(*arguments, reduction=reduction, backend=np.str_("cpu"))
        assert result.loss == ag.linear_cross_entropy(*arguments, reduction="sum").loss


@pytest.mark.parametrize(("rows", "nbytes"), [(1, 0), (70, 8), (72, 8)])
def test_how_many_bytes_of_bits_are_expected(rows, nbytes):
    x = np.zeros((rows, 2), np.float32)
    vector = x[:, 0]
    with pytest.raises(ag.ParamInvalidError, match=f"expected at least {-(-rows // 8)} bytes .*, got \\({nbytes},\\)"):
        ag.fused_linear_cross_entropy_loss_grad(
            vector, x, x[:1], np.zeros(nbytes, np.uint8), np.zeros(rows, int), logits_max=vector, sum_exp_logits=vector
        )


def test_workspace_size_of_extreme_calls():
    x = np.zeros((2, 0))
    size = ag.workspace_size("linear_cross_entropy", x, np.zeros((4, 0)), np.zeros(2, int), workspace_bytes=2**63 - 1)
    assert size >= 2**63 - 1
    vector = np.broadcast_to(np.float32(1), 2**58)
    assert ag.workspace_size("fused_cross_entropy_loss_with_max_sum", vector, vector, vector) >= 2**58
    # No vocabulary, and no row that counts.
    x, target = np.zeros((4, 6), np.float32), np.zeros(4, int)
    assert ag.workspace_size("linear_cross_entropy", x, x[:0], target, ignore_index=0) >= 0
    assert np.isnan(ag.linear_cross_entropy(x, x[:0], target, ignore_index=0).loss)


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_loss_of_any_totals(dtype):
    """Without a warning, whatever NumPy is set to, and the same bits in the other byte order."""
    random = np.random.default_rng(0)
    real = accumulator(DTYPES[dtype])
    logits = random.standard_normal((23, 37)).astype(DTYPES[dtype])
    largest, predicted = random.standard_normal((2, 23)).astype(real)
    total = random.uniform(1, 9, 23).astype(real)
    total[:4] = 0, -1, np.inf, np.nan
    swapped = [a.astype(a.dtype.newbyteorder()) for a in (largest, total, predicted)]
    for given in (None, logits):
        with np.errstate(all="raise"):
            loss, softmax = ag.fused_cross_entropy_loss_with_max_sum(
                largest, total, predicted, vocab_parallel_logits=given
            )
            apart, softmax_apart = ag.fused_cross_entropy_loss_with_max_sum(*swapped, vocab_parallel_logits=given)
        assert_identical(apart, loss)
        assert (softmax is None) == (softmax_apart is None) == (given is None)
        if given is not None:
            assert_identical(softmax_apart, softmax)
    with np.errstate(all="ignore"):
        expected = np.log(total.astype(np.float64)) - predicted
    np.testing.assert_allclose(loss, expected, rtol=4 * np.finfo(real).eps, atol=4 * np.finfo(real).eps)
