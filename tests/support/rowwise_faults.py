"""List the ways to spoil a call of a row-wise operator, in the order of its checks."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
from faults import (
    CONVERTED,
    FOREIGN_DTYPES,
    INVALID,
    MEANINGS,
    MEANINGS_IN_TWO_AXES,
    NOT_A_NUMBER,
    NOT_AN_INT,
    NULL,
    TYPE,
    Case,
    Fault,
    as_dtype,
    constant,
    faults_of_settings,
    read_only,
    self_overlapping,
)
from samples import ARRAYS, DTYPES, MASKED, OPERATORS, random_problem

#: The stages of each operator's checks, in their order. Backend and number of threads are checked first.
STAGES = {
    "softmax_backward": ("settings", "null", "dtype", "axis", "shape", "out"),
    "log_softmax_backward": ("settings", "null", "dtype", "shape", "axis", "out"),
    "scaled_masked_softmax_backward": ("settings", "null", "dtype", "shape", "fix_triu_mask", "out"),
    "softmax": ("settings", "null", "dtype", "axis", "shape", "out"),
    "log_softmax": ("settings", "null", "axis", "dtype", "shape", "out"),
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
        foreign = FOREIGN_DTYPES | {"bool": bool}
        if not operator.endswith("backward"):
            foreign = {label: dtype for label, dtype in foreign.items() if label not in (*CONVERTED, "bool")}
        faults += [Fault("dtype", name, label, as_dtype(dtype), TYPE, name) for label, dtype in foreign.items()]
        faults += [
            Fault("dtype", name, "string", constant("softmax"), TYPE, name),
            Fault("dtype", name, "dict", constant({}), TYPE, name),
        ]
        if len(floats) == 2:
            # If two dtypes differ, the second one is wrong.
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
            Fault("axis", "axis", label, constant(value), kind, "axis")
            for label, value, kind in (
                ("behind the last axis", 2, INVALID),
                ("before the first axis", -3, INVALID),
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
    """Return whether the spoilt argument differs from the good one. For some empty shapes the two are equal."""
    spoilt = fault.spoil(good)
    return not (
        isinstance(good, np.ndarray)
        and type(spoilt) is np.ndarray
        and (spoilt.shape, spoilt.dtype, spoilt.flags.writeable, spoilt.size) == (good.shape, good.dtype, True, 0)
    )


def case(operator: str) -> Case:
    def faults(*, empty: bool = False) -> list[Fault]:
        good = good_call(operator, empty=empty)
        return [fault for fault in faults_of(operator) if is_fault(fault, good[fault.argument])]

    return Case(operator, partial(good_call, operator), faults, STAGES[operator])


CASES = {operator: case(operator) for operator in OPERATORS}
