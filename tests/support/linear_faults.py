"""List the ways to spoil a call of a linear operator, in the order of its checks."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from functools import partial
from typing import Any

import numpy as np
from faults import (
    CONVERTED,
    FOREIGN_DTYPES,
    INVALID,
    MEANINGS_IN_TWO_AXES,
    NOT_A_NUMBER,
    NOT_AN_INT,
    NULL,
    TYPE,
    Case,
    Fault,
    Hostile,
    as_dtype,
    constant,
    faults_of_settings,
    read_only,
    self_overlapping,
)
from linear_samples import GRADIENT, LOSS, STATISTICS, TOP_K, WHOLE, Shape, problem_of
from samples import DTYPES

import ascend_grad as ag
from ascend_grad.operators import table

CALLS = {
    "recomputed": (GRADIENT, {"mode": "recomputed"}),
    "stored": (GRADIENT, {"mode": "stored"}),
    "statistics": (STATISTICS, {}),
    "loss": (LOSS, {}),
    "whole": (WHOLE, {}),
    "top_k": (TOP_K, {}),
}


#: The stages of each case's checks, in their order.
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
    "top_k": ("settings", "null", "dtype", "shape", "k", "temperature", "logit_scale", "softcap", "workspace_bytes"),
}
STAGES["stored"] = STAGES["recomputed"]


BT, V, H = Shape(9, 6, 5)


def taken(backend: str) -> dict[str, Any]:
    """Return settings of `good_call` that the backend takes.

    A device needs matrices of 16 bits, and at least 128 vocabulary entries if the softmax is given.
    """
    return {"words": 130, "dtype": "bfloat16"} if backend == "npu" else {}


def good_call(case: str, *, empty: bool = False, words: int = V, dtype: str = "float32") -> dict[str, Any]:
    operator, how = CALLS[case]
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


#: The dimensions of each array.
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
    """Return the arrays of a good call in the order in which they are checked."""
    operator, arguments = table.OPERATORS[CALLS[case][0]], good_call(case)
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
    operator, _ = CALLS[case]
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
        if case in ("whole", "top_k") and name in ("input", "weight"):
            foreign = {label: dtype for label, dtype in foreign.items() if label not in (*CONVERTED, "int64", "bool")}
        if case in ("whole", "top_k") and name == "target":
            foreign = {label: dtype for label, dtype in foreign.items() if "int" not in label}
        for label, dtype in foreign.items():
            yield Fault("dtype", name, label, as_dtype(dtype), TYPE, name)
        more = {"string": "softmax", "dict": {}, "ragged": [[1.0], [2.0, 3.0]], "hostile": Hostile(), "set": {1.0}}
        yield from each("dtype", name, more, TYPE)
        for label, give in MEANINGS_IN_TWO_AXES.items():
            yield Fault("dtype", name, label, give, TYPE, name)
    # If two dtypes do not fit, the error names the later array.
    partners = {
        GRADIENT: {"weight": "weight", "input": "weight", "grad": "grad"},
        STATISTICS: {"weight": "weight", "input": "weight"},
        LOSS: {"logits_max": "sum_exp_logits", "predicted_logits": "predicted_logits"},
        WHOLE: {"weight": "weight", "input": "weight"},
        TOP_K: {"weight": "weight", "input": "weight"},
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
        if case not in ("whole", "top_k") or name != "input":  # these take leading dimensions
            yield Fault("shape", name, "one axis more", lambda x: x[None], INVALID, name)
        # The first array defines a dimension. The error names a later array that disagrees.
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
    if case in ("statistics", "top_k"):
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
    operator, _ = CALLS[case]
    faults = faults_of_settings()
    faults += [
        Fault("null", name, "None", constant(None), NULL, name) for name in table.OPERATORS[operator].array_names
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
    if operator in (GRADIENT, WHOLE, TOP_K):
        values = {"one": 1, "negative": -1, "too small": table.MIN_WORKSPACE_BYTES - 1, "beyond 64 bits": 2**70}
        faults += each("workspace_bytes", "workspace_bytes", values, INVALID)
        faults += each("workspace_bytes", "workspace_bytes", {k: v for k, v in NOT_AN_INT.items() if k != "None"}, TYPE)
    if operator in (GRADIENT, WHOLE):
        faults += each("output_mask", "output_mask", NOT_TWO_BOOLS, TYPE)
        values = {"negative": -1e-300, "NaN": np.nan, "infinite": np.inf, "beyond float64": 10**400}
        faults += each("filter_eps", "filter_eps", values, INVALID)
        faults += each("filter_eps", "filter_eps", NOT_A_NUMBER, TYPE)
    if operator == TOP_K:
        faults += each("k", "k", {"zero": 0, "negative": -3, "too many": 129, "beyond 64 bits": 2**70}, INVALID)
        faults += each("k", "k", NOT_AN_INT, TYPE)
        values = {"zero": 0, "negative": -1e-300, "NaN": np.nan, "infinite": np.inf, "beyond float64": 10**400}
        faults += each("temperature", "temperature", values, INVALID)
        vectors = "array", "array of one", "list"  # which may be one number for each row
        numbers = {label: value for label, value in NOT_A_NUMBER.items() if label not in vectors}
        faults += each("temperature", "temperature", numbers, TYPE)
        faults += each("logit_scale", "logit_scale", {"NaN": np.nan, "infinite": -np.inf}, INVALID)
        faults += each("logit_scale", "logit_scale", NOT_A_NUMBER, TYPE)
        faults += each("softcap", "softcap", {"zero": 0, "negative": -1.0, "NaN": np.nan, "infinite": np.inf}, INVALID)
        faults += each("softcap", "softcap", {k: v for k, v in NOT_A_NUMBER.items() if k != "None"}, TYPE)
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
    """Return whether a fault also spoils a call without rows. Such a call has no targets."""
    harmless = "shorter", "overlapping itself", "overlapping each other"
    return fault.stage != "target" and not fault.label.endswith(harmless)


def case(name: str) -> Case:
    def faults(*, empty: bool = False) -> list[Fault]:
        return [fault for fault in faults_of(name) if not empty or spoils_an_empty_call(fault)]

    return Case(CALLS[name][0], partial(good_call, name), faults, STAGES[name])


CASES = {name: case(name) for name in CALLS}
