"""Draw random calls with faults, and the error that the contract demands.

Each fault belongs to a stage of the operator's checks. If a call has several faults, the fault of the earliest stage
decides which error is raised. Faults that do not depend on the call come from the lists of the tests (`rowwise_faults`,
`linear_faults`). Faults that depend on shapes or values are made here.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

import fuzzed_loss_faults
import linear_faults
import numpy as np
import rowwise_faults
from faults import (
    FOREIGN_DTYPES,
    INVALID,
    MEANINGS,
    NULL,
    TYPE,
    Fault,
    Noted,
    as_dtype,
    constant,
    read_only,
    self_overlapping,
)
from fuzzed_arrays import NUMPY, Draw
from fuzzed_calls import MIXES, Sample, first_array, result_shapes
from linear_samples import GRADIENT, STATISTICS, TOP_K, WHOLE
from producers import Own
from samples import DTYPES, MASKED

from ascend_grad.operators import table

CASES = rowwise_faults.CASES | linear_faults.CASES

#: Stages whose faults depend on the call.
OF_THE_CALL = ("axis", "shape", "bounds", "target", "out")


def listed(case: str) -> dict[str, list[Fault]]:
    """Return the faults that do not depend on the call, by stage."""
    found: dict[str, list[Fault]] = {}
    for fault in CASES[case].faults():
        depends = fault.stage in OF_THE_CALL and fault.raises is not TYPE
        if not (depends or fault.stage in ("shape", "out", "target") or "unlike" in fault.label):
            found.setdefault(fault.stage, []).append(fault)
    return found


LISTED = {case: listed(case) for case in CASES}
#: The stages of each case's checks, in their order.
STAGES = {case: each.stages for case, each in CASES.items()} | fuzzed_loss_faults.STAGES


def stages_of(sample: Sample) -> tuple[str, ...]:
    """Return the stages in order. Libraries are compared after all arguments and before what comes last."""
    every = STAGES[sample.case]
    last = [stage for stage in every if stage in ("out", "structure")]
    stages = [stage for stage in every if stage not in last]
    if sample.library.owns is not np.ndarray and len(sample.arrays) > 1:
        stages.append("library")
    return (*stages, *last)


# ---- faults that depend on the call ----------------------------------------------------------------------------------


def other_length(draw: Draw, array: np.ndarray) -> np.ndarray:
    """Return an array with one axis longer or shorter."""
    shape = list(array.shape)
    axis = draw.randrange(len(shape))
    shape[axis] = max(shape[axis] + draw.choice((-1, 1, 1, 7)), 0)
    return np.zeros(shape, array.dtype)


def other_shape(draw: Draw, array: np.ndarray) -> np.ndarray:
    how: list[Callable[[np.ndarray], np.ndarray]] = [lambda x: x[None]]
    if array.ndim:
        how += [lambda x: np.zeros(x.shape[1:], x.dtype), np.transpose, *[lambda x: other_length(draw, x)] * 3]
    return draw.choice(how)(array)


def misfit(sample: Sample, arrays: dict[str, np.ndarray]) -> str | None:
    """Return the first array of a linear operator whose shape disagrees with earlier ones, or None if all fit."""
    sizes: dict[str, int] = {}
    if sample.operator in (WHOLE, TOP_K) and arrays["input"].ndim not in (0, 2):  # several dimensions of rows, or none
        *rows, features = arrays["input"].shape
        if "target" in arrays and arrays["target"].shape != tuple(rows):
            return "target"
        merged = {name: arrays[name].reshape(math.prod(rows)) for name in ("target",) if name in arrays}
        arrays = arrays | merged | {"input": arrays["input"].reshape(math.prod(rows), features)}
    order = [name for name in linear_faults.arrays_of(sample.case) if name in arrays]
    for name in order:
        dims, shape = linear_faults.DIMS[name], arrays[name].shape
        if name == "target_mask" and arrays[name].dtype == np.uint8:
            if len(shape) != 1 or shape[0] < -(-sizes["BT"] // 8):
                return name
            continue
        if len(shape) != len(dims) or any(sizes.get(axis, n) != n for axis, n in zip(dims, shape)):
            return name
        sizes |= zip(dims, shape)
        if sample.operator in (STATISTICS, TOP_K) and name == "weight" and sizes["V"] == 0:
            return name
    return None


def faults_of_shapes(draw: Draw, sample: Sample) -> Iterator[Fault]:
    arrays = sample.arrays
    arrays.pop("grad_loss", None)
    first = first_array(sample.operator)
    if not sample.is_rowwise:
        for name in arrays:
            changed = other_shape(draw, arrays[name])
            blamed = misfit(sample, arrays | {name: changed})
            if blamed is not None:
                yield Fault("shape", name, f"shape {changed.shape}", constant(changed), INVALID, blamed)
        if sample.operator in (STATISTICS, TOP_K):
            yield Fault("shape", "weight", "without words", lambda x: x[:0], INVALID, "weight")
        return
    shape = arrays[first].shape
    for name in arrays:
        changed = other_shape(draw, arrays[name])
        if name == first:
            if sample.operator not in MASKED:
                changed = np.zeros(shape + (1,) * (9 - len(shape)), changed.dtype)
                yield Fault("shape", name, "rank 9", constant(changed), INVALID, name)
            elif changed.ndim != 4:
                yield Fault("shape", name, f"rank {changed.ndim}", constant(changed), INVALID, name)
        elif name != "mask":
            if changed.shape != shape:
                yield Fault("shape", name, f"shape {changed.shape}", constant(changed), INVALID, name)
        elif changed.ndim != 4 or any(
            n != size and (axis > 1 or n != 1) for axis, (n, size) in enumerate(zip(changed.shape, shape))
        ):
            yield Fault("shape", name, f"shape {changed.shape}", constant(changed), INVALID, name)


def faults_of_dims(draw: Draw, sample: Sample) -> Iterator[Fault]:
    rank = max(sample.arrays[first_array(sample.operator)].ndim, 1)
    value = draw.choice((rank, -rank - 1, 9, -10, 2**70, -(2**70), np.int64(rank), 2**31, -(2**63)))
    yield Fault("axis", "axis", str(value), constant(value), INVALID, "axis")


def faults_of_bounds(draw: Draw, sample: Sample) -> Iterator[Fault]:
    start, words = sample.arguments["vocab_start_index"], len(sample.arrays["weight"])
    for name in ("vocab_start_index", "vocab_end_index"):
        for value in (-1, -(2**63), 2**63, 2**70):
            yield Fault("bounds", name, str(value), constant(value), INVALID, name)
    for value in (start - 1, start + words + 1, 2**62):
        yield Fault("bounds", "vocab_end_index", str(value), constant(value), INVALID, "vocab_end_index")


def faults_of_targets(draw: Draw, sample: Sample) -> Iterator[Fault]:
    """Move the target of a row that is not ignored out of the vocabulary."""
    arguments, words = sample.arguments, len(sample.arrays["weight"])
    name = "masked_target" if sample.operator == GRADIENT else "target"
    targets = sample.values[name]
    start = arguments.get("vocab_start_index", 0)
    rows = np.arange(len(targets))
    if sample.operator == GRADIENT:
        mask = sample.values["target_mask"]
        elsewhere = mask if mask.dtype == bool else (mask[rows // 8] >> (rows % 8).astype(np.uint8)) & 1
        rows = rows[elsewhere == 0]
    if rows.size:
        info = np.iinfo(targets.dtype)
        targets = targets.copy()
        value = draw.choice((start - 1, start + words, start + words + 1000, int(info.min), int(info.max)))
        targets[draw.choice(rows.tolist())] = value
        if value != arguments.get("ignore_index"):
            yield Fault("target", name, f"target {value}", constant(targets), INVALID, name)


def faults_of_one_result(draw: Draw, name: str, shape: tuple[int, ...], library) -> Iterator[Fault]:
    """Spoil an array for a result. In a call on another library's arrays, any NumPy array is a fault."""
    own = library is NUMPY

    def fault(label: str, spoil: Callable, kind=INVALID) -> Fault:
        return Fault("out", "out", f"{name}: {label}", spoil, kind, name)

    yield from (fault(label, constant(value), TYPE) for label, value in {"list": [0.0], "number": 1.5}.items())
    if shape != (1,):
        yield fault("one element", lambda x: np.zeros(1, x.dtype))
    yield fault("one axis more", lambda x: x[None])
    if library.owns is not np.ndarray:
        yield fault("of another library", lambda x: x.astype(">f4"), TYPE)
    if own:
        yield from (fault(label, as_dtype(dtype), TYPE) for label, dtype in FOREIGN_DTYPES.items())
        yield from (fault(label, give, TYPE) for label, give in MEANINGS.items())
        yield fault("read-only", read_only)
        if sum(n > 1 for n in shape) > 1 and 0 not in shape:
            yield fault("overlapping itself", self_overlapping)


def faults_of_results(draw: Draw, sample: Sample) -> Iterator[Fault]:
    """Replace `out` of the call by good results, one of which is spoilt."""
    shapes = result_shapes(sample)
    dtype = DTYPES[draw.choice(tuple(DTYPES))]
    good = [None if shape is None else np.full(shape, 7, dtype) for shape in shapes]
    if not sample.library.takes_out:
        return
    if not sample.takes_pair:
        for fault in faults_of_one_result(draw, "out", shapes[0], sample.library) if shapes else ():
            yield fault._replace(spoil=constant(fault.spoil(good[0])))
        return

    def whole(label: str, value: Any, kind, blamed: str = "out") -> Fault:
        return Fault("out", "out", label, constant(value), kind, blamed)

    for i, shape in enumerate(shapes):
        others = list(good)
        name = f"out[{i}]"
        if shape is None:
            others[i] = np.zeros(3, dtype)
            yield whole(f"{name}: not asked for", tuple(others), INVALID, name)
            continue
        for fault in faults_of_one_result(draw, name, shape, sample.library):
            others[i] = fault.spoil(good[i])
            yield whole(fault.label, tuple(others), fault.raises, name)
    yield whole("an array", np.zeros((2, 3), dtype), TYPE)
    yield whole("text", "ab", TYPE)
    yield whole("one entry", tuple(good[:1]), INVALID)
    yield whole("three entries", (*good, None), INVALID)
    if all(each is not None and each.size for each in good):
        memory = np.zeros(sum(each.size for each in good), dtype)
        yield whole("overlapping each other", tuple(memory[: each.size].reshape(each.shape) for each in good), INVALID)


def faults_of_libraries(draw: Draw, sample: Sample) -> Iterator[Fault]:
    """Replace one array by an array of a library other than the first array's."""
    names = list(sample.arrays)
    name = draw.choice(names[2 if sample.sparse is not None else 1 :])  # a sparse array has no library
    # Only `linear_cross_entropy` and its backward compare the library of `grad_loss`.
    if name not in MIXES and (name != "grad_loss" or sample.operator in (WHOLE, f"{WHOLE}_backward")):
        yield Fault("library", name, "of NumPy", lambda x: x.view(Noted), TYPE, name)
        if sample.library.owns is not Own:
            yield Fault("library", name, "of a third library", lambda x: Own(np.array(x)), TYPE, name)


def unequal_dtypes(draw: Draw, sample: Sample) -> Iterator[Fault]:
    """Give an array a floating dtype that does not fit the first array's dtype."""
    names = [name for name, array in sample.arrays.items() if array.dtype in DTYPES.values() and name != "grad_loss"]
    order = [name for name in ALL_ARRAYS[sample.case] if name in names]
    for name in order[1:]:
        accumulators = not sample.is_rowwise and name != "weight"
        dtypes = ["float16", "bfloat16"] if accumulators and name != "vocab_parallel_logits" else []
        if sample.dtype == np.float64:
            dtypes.append("float32")
        else:
            dtypes.append("float64")
        if not accumulators:
            dtypes = [each for each in DTYPES if DTYPES[each] != sample.dtype]
        dtype = draw.choice(dtypes)
        yield Fault("dtype", name, f"{dtype}, unlike the others", as_dtype(DTYPES[dtype]), TYPE, name)


#: The arrays of each case. The array whose dtype is the dtype of the problem comes first.
ALL_ARRAYS = {
    case: sorted(table.OPERATORS[each.operator].array_names, key=lambda name: name != "input")
    + list(table.OPERATORS[each.operator].optional_names)
    for case, each in CASES.items()
}


def faults_of_nothing(draw: Draw, sample: Sample) -> Iterator[Fault]:
    for name in table.OPERATORS[sample.operator].array_names:
        yield Fault("null", name, "None", constant(None), NULL, name)


def faults_of_grad_loss(draw: Draw, sample: Sample) -> Iterator[Fault]:
    """Spoil the upstream gradient of a call without a reduction. Such a gradient may be an array."""
    rows = len(sample.arrays["input"])
    if sample.arguments["reduction"] == "none":
        values: dict[str, tuple[Any, Any]] = {
            "integers": (np.ones(rows, np.int64), TYPE),
            "another length": (np.ones(rows + 1), INVALID),
            "two axes": (np.ones((rows, 1)), INVALID),
            "text": ("1", TYPE),
        }
        for label, (value, kind) in values.items():
            yield Fault("grad_loss", "grad_loss", label, constant(value), kind, "grad_loss")


MADE: dict[str, Callable[[Draw, Sample], Iterator[Fault]]] = {
    "null": faults_of_nothing,
    "dtype": unequal_dtypes,
    "shape": faults_of_shapes,
    "axis": faults_of_dims,
    "bounds": faults_of_bounds,
    "target": faults_of_targets,
    "out": faults_of_results,
    "library": faults_of_libraries,
    "grad_loss": faults_of_grad_loss,
}


# ---- a call with faults ----------------------------------------------------------------------------------------------


def applies(fault: Fault, sample: Sample) -> bool:
    """Return whether a listed fault is a fault in this call."""
    value = sample.arguments.get(fault.argument)
    if fault.stage == "dtype" and fault.argument in ALL_ARRAYS[sample.case] and value is None:
        return False  # the call omits this optional array
    if fault.stage == "mode" and sample.case == "stored":
        return "logits_max" not in sample.arguments
    if fault.label == "matrix":
        return isinstance(value, np.ndarray) and value.ndim == 2
    if fault.stage == "grad_loss":
        return sample.arguments["reduction"] != "none"
    return True


def faults_at(draw: Draw, sample: Sample, stage: str) -> list[Fault]:
    """Return faults of the stage: faults made for the call or faults from the lists, with equal probability."""
    if sample.is_loss and stage not in ("library", "out"):
        return fuzzed_loss_faults.faults_at(draw, sample, stage)
    made = list(MADE[stage](draw, sample)) if stage in MADE else []
    listed = {} if sample.is_loss else LISTED[sample.case]
    fixed = [fault for fault in listed.get(stage, ()) if applies(fault, sample)]
    return made if made and (not fixed or draw.chance(0.5)) else fixed


def as_decided(fault: Fault, spoilt: Any, axis: int) -> Fault:
    """Return a fault of log_softmax's input as log_softmax reports it, since it checks `axis` before dtypes."""
    rank = max(getattr(spoilt, "ndim", 0), 1)
    return fault if -rank <= axis < rank else fault._replace(stage="axis", raises=INVALID, blamed="axis")


def broken(draw: Draw, sample: Sample) -> list[Fault]:
    """Spoil arguments of the call, and return the faults, which may be none. The fault that is reported comes first."""
    stages, axis = stages_of(sample), int(sample.arguments.get("axis", -1))
    found: list[Fault] = []
    for stage in draw.sample(stages, draw.choice((1, 1, 1, 2, 3))):
        taken = {fault.argument for fault in found}
        fresh = [fault for fault in faults_at(draw, sample, stage) if fault.argument not in taken]
        if fresh:
            found.append(draw.choice(fresh))
    spoils_dim = any(fault.stage == "axis" for fault in found)
    if spoils_dim:
        found = [fault for fault in found if fault.label != "rank 9"]  # log_softmax might accept the axis
    if any(fault.argument == "bias" for fault in found):
        found = [fault for fault in found if fault.label != fuzzed_loss_faults.WITHOUT_BIAS]
    for i, fault in enumerate(found):
        spoilt = fault.spoil(sample.arguments.get(fault.argument))
        if sample.operator == "log_softmax" and (fault.stage, fault.argument) == ("dtype", "input") and not spoils_dim:
            found[i] = as_decided(fault, spoilt, axis)
        sample.arguments[fault.argument] = spoilt
        if fault.argument == "input":
            sample.sparse = None
    return sorted(found, key=lambda fault: stages.index(fault.stage))
