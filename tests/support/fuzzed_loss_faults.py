"""Draw faults of the losses with options, by the stages of their checks."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import fuzzed_sparse
import numpy as np
from faults import (
    CONVERTED,
    FOREIGN_DTYPES,
    INVALID,
    MEANINGS,
    NOT_A_NUMBER,
    NOT_AN_INT,
    NULL,
    TYPE,
    Fault,
    as_dtype,
    constant,
    faults_of_settings,
)
from fuzzed_arrays import Draw
from fuzzed_calls import Sample
from fuzzed_losses import DEFAULTS, LAYER_HVP, SPARSE, UPSTREAM
from linear_faults import NOT_A_BOOL, NOT_TWO_BOOLS

from ascend_grad.operators import table

_OPTIONS = (
    *("token_weight", "class_weight", "label_smoothing", "lse_square_scale", "temperature", "denominator", "bias"),
    *("logit_scale", "softcap"),
)
_LINEAR = ("settings", "null", "dtype", "shape", "targets")
_NUMBERS = ("output_mask", "workspace_bytes", "filter_eps")
_REDUCTION = ("reduction", "grad_loss", "ignore_index", "vocab_start_index")
_VALUES = ("target", "temperature values")
_ROWS = ("settings", "null", "dtype", "axis", "rank", "shape")
_OPTIONS_OF_ROWS = (
    *("reduction", "grad_loss", "ignore_index", "class_weight", "token_weight", "label_smoothing", "lse_square_scale"),
    *("temperature", "denominator", "logit_scale", "softcap"),
)
#: The stages of each case's checks, in their order.
STAGES = {
    "options": (*_LINEAR, *_REDUCTION, "return_grad", *_NUMBERS, *_OPTIONS, "outputs", *_VALUES),
    "loss_gradient": (
        *(*_LINEAR, "lse", "entropy", *UPSTREAM, "statistics", "upstream"),
        *(*_REDUCTION, *_NUMBERS, *_OPTIONS, *_VALUES),
    ),
    "rows": (
        *(*_ROWS, *_OPTIONS_OF_ROWS, *UPSTREAM, "outputs", "hessian_diag", "return_grad", "temperature values"),
        *("target", "out"),
    ),
    "rows_hvp": (*_ROWS, "vector", *_OPTIONS_OF_ROWS, "temperature values", "target"),
    "layer_hvp": (*_LINEAR, "vector", "vector_bias", *_REDUCTION, *_OPTIONS, *_VALUES),
    "hessian": (*_LINEAR, *_REDUCTION, *_OPTIONS, *_VALUES),
}
STAGES |= {
    case: (*STAGES[dense], "structure") for case, dense in zip(SPARSE, ("options", "loss_gradient", "layer_hvp"))
}

_NO_NUMBER = {label: value for label, value in NOT_A_NUMBER.items() if label != "None"}
#: Values that are refused where a number or an array is expected.
_NEITHER = {label: NOT_A_NUMBER[label] for label in ("text", "bytes", "complex", "bool", "numpy bool")}
_NOT_FINITE = {"NaN": np.nan, "infinite": np.inf, "beyond float64": 10**400}
_NOT_POSITIVE = _NOT_FINITE | {"zero": 0, "negative": -1e-300}
#: Numbers that are refused as values of an argument, and objects that are refused as they are no such number.
NUMBERS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "label_smoothing": ({"NaN": np.nan, "negative": -1e-9, "too much": 1.001}, NOT_A_NUMBER),
    "lse_square_scale": (_NOT_FINITE, NOT_A_NUMBER),
    "logit_scale": (_NOT_FINITE, NOT_A_NUMBER),
    "denominator": (_NOT_POSITIVE, _NO_NUMBER),
    "softcap": (_NOT_POSITIVE, _NO_NUMBER),
    "filter_eps": (_NOT_FINITE | {"negative": -1e-300}, NOT_A_NUMBER),
    "workspace_bytes": (
        {"one": 1, "negative": -1, "beyond 64 bits": 2**70},
        {label: value for label, value in NOT_AN_INT.items() if label != "None"},
    ),
    "ignore_index": ({"beyond 64 bits": 2**63}, NOT_AN_INT),
    "vocab_start_index": ({"beyond 64 bits": 2**63, "negative": -1}, NOT_AN_INT),
    "output_mask": ({}, NOT_TWO_BOOLS),
    "return_grad": ({}, NOT_A_BOOL),
    "reduction": ({"unknown": "average", "empty": ""}, {"None": None, "number": 1, "list": ["sum"]}),
    "outputs": (
        {"unknown": ("loss",), "twice": ("lse", "lse")},
        {"text": "lse", "None": None, "number": 3, "a number in it": (1,)},
    ),
}
#: The axes of the arrays that have a number for each row or for each entry of the vocabulary.
OF_ROWS = ("token_weight", "temperature", "grad_loss", "lse", "entropy", *UPSTREAM)
_IF_GIVEN = ("token_weight", "class_weight", "bias", "lse", "entropy", *UPSTREAM)
#: The label of a fault that is none if a bias is given.
WITHOUT_BIAS = "without bias"


def _each(stage: str, name: str, values: dict[str, Any], kind: type) -> Iterator[Fault]:
    for label, value in values.items():
        yield Fault(stage, name, label, constant(value), kind, name)


def _is_dense(sample: Sample) -> bool:
    return sample.arrays["target"].dtype.kind not in "iu"


def _has_several(sample: Sample) -> bool:
    return sample.arguments.get("target_prob") is not None or _is_dense(sample)


def _rows_of(sample: Sample) -> tuple[int, ...]:
    shape = sample.arrays["target"].shape
    if _is_dense(sample) and shape:
        return tuple(np.delete(shape, int(sample.arguments.get("axis", -1))).tolist())
    return shape[:-1] if _has_several(sample) else shape


def _foreign(stage: str, name: str, *, fine: tuple[str, ...] = ()) -> Iterator[Fault]:
    """Yield arrays of other dtypes and kinds."""
    for label, dtype in FOREIGN_DTYPES.items():
        if label not in fine:
            yield Fault(stage, name, label, as_dtype(dtype), TYPE, name)
    for label, give in MEANINGS.items():
        yield Fault(stage, name, label, give, TYPE, name)


def _of_array(draw: Draw, sample: Sample, stage: str, name: str) -> Iterator[Fault]:
    """Yield faults of an array with a number for each row or entry, whether or not the call has it."""
    rows = sample.arrays["target"].shape if name == "grad_log_prob" else _rows_of(sample)
    if name not in OF_ROWS:
        array = sample.arrays["input"]
        axis = int(sample.arguments.get("axis", -1))
        rows = ((array.shape or (1,))[axis],) if sample.is_of_logits else (len(sample.arrays["weight"]),)
    yield Fault(stage, name, "integers", constant(np.ones(rows, np.int64)), TYPE, name)
    yield Fault(stage, name, "one axis more", constant(np.ones((1, *rows))), INVALID, name)
    if rows:
        longer = (*rows[:-1], rows[-1] + draw.choice((1, 5)))
        yield Fault(stage, name, f"shape {longer}", constant(np.ones(longer)), INVALID, name)


def _dtypes(draw: Draw, sample: Sample) -> Iterator[Fault]:
    if sample.sparse is not None:
        yield from fuzzed_sparse.faults_of_conversion(draw, sample.sparse[0])
    yield from _foreign("dtype", "input", fine=CONVERTED)
    if "weight" in sample.arrays:
        yield from _foreign("dtype", "weight", fine=CONVERTED)
        other = np.float32 if sample.dtype != np.float32 else np.float64
        if sample.sparse is None or sample.sparse[0].dtype.kind == "f":  # integers take the dtype of the weight
            yield Fault("dtype", "weight", "unlike input", as_dtype(other), TYPE, "weight")
    if not _is_dense(sample):
        yield from _foreign("dtype", "target", fine=CONVERTED)
    # One number is the probability of the only class.
    if sample.arrays["input"].ndim and not _is_dense(sample):
        yield Fault("dtype", "target", "floats", as_dtype(np.float32), TYPE, "target")
    if sample.is_of_logits and "target_prob" in sample.arrays:
        yield Fault("dtype", "target_prob", "integers", as_dtype(np.int32), TYPE, "target_prob")


def _shapes(draw: Draw, sample: Sample) -> Iterator[Fault]:
    if not sample.is_of_logits:
        if "target" in sample.arrays and not _is_dense(sample):
            # The targets of the same call may be given one axis more.
            yield Fault("shape", "input", "two axes more", lambda x: x[None, None], INVALID, "target")
        yield Fault("shape", "weight", "one axis less", lambda x: np.zeros(x.shape[1:], x.dtype), INVALID, "weight")
        width = sample.arrays["weight"].shape[1] + draw.choice((1, 3))
        yield Fault("shape", "weight", "features", lambda x: np.zeros((len(x), width), x.dtype), INVALID, "weight")
        return
    yield from _targets(draw, sample, "shape")
    array, axis = sample.arrays["input"], int(sample.arguments["axis"])
    rows = _rows_of(sample)
    if array.ndim and 0 not in rows and not _is_dense(sample):
        shape = list(array.shape)
        shape[axis] = 0
        empty = np.zeros(shape, array.dtype)
        yield Fault("shape", "input", "rows of nothing", constant(empty), INVALID, "input")


def _targets(draw: Draw, sample: Sample, stage: str = "targets") -> Iterator[Fault]:
    if _is_dense(sample):
        yield Fault(stage, "target", "longer", lambda x: np.zeros((*x.shape, 2), np.int64), INVALID, "target")
        return
    yield Fault(stage, "target", "one axis more", lambda x: x[None], INVALID, "target")
    shape = sample.arrays["target"].shape
    several = sample.arguments.get("target_prob") is not None
    if shape and not (several and len(shape) == 1):
        longer = (shape[0] + 1, *shape[1:])
        yield Fault(stage, "target", "longer", lambda x: np.zeros(longer, x.dtype), INVALID, "target")
    if several:
        wider = (*shape[:-1], shape[-1] + 1)
        yield Fault(stage, "target_prob", "more targets", lambda x: np.zeros(wider, x.dtype), INVALID, "target_prob")
        none = (*shape[:-1], 0)
        yield Fault(stage, "target", "no targets", lambda x: np.zeros(none, x.dtype), INVALID, "target")
        if not sample.is_of_logits:
            yield Fault(stage, "target_prob", "integers", as_dtype(np.int32), TYPE, "target_prob")


def _grad_loss(draw: Draw, sample: Sample) -> Iterator[Fault]:
    if sample.arguments["reduction"] == "none":
        if _rows_of(sample):  # otherwise integers without axes are one number
            yield from _of_array(draw, sample, "grad_loss", "grad_loss")
        yield from _each("grad_loss", "grad_loss", {"text": "1"}, TYPE)
    else:  # a tensor of one element is a number
        wrong = {label: value for label, value in _NO_NUMBER.items() if label != "array of one"}
        yield from _each("grad_loss", "grad_loss", wrong, TYPE)


def _temperature(draw: Draw, sample: Sample) -> Iterator[Fault]:
    yield from _each("temperature", "temperature", _NEITHER, TYPE)
    if _rows_of(sample):
        yield from _of_array(draw, sample, "temperature", "temperature")
    if not sample.is_of_logits:
        yield from _each("temperature", "temperature", _NOT_POSITIVE, INVALID)


def _temperature_values(draw: Draw, sample: Sample) -> Iterator[Fault]:
    stage = "temperature values"
    if sample.is_of_logits:
        numbers = {"zero": 0, "negative": -1e-300, "NaN": np.nan, "infinite": np.inf}
        yield from _each(stage, "temperature", numbers, INVALID)
    array = sample.values.get("temperature")
    if array is not None and array.size:
        values = array.copy()
        values.reshape(-1)[draw.randrange(values.size)] = draw.choice((0, -1, np.nan, np.inf))
        yield Fault(stage, "temperature", "an element", constant(values), INVALID, "temperature")


def _statistics(draw: Draw, sample: Sample) -> Iterator[Fault]:
    if sample.arguments.get("grad_entropy") is not None:
        yield Fault("statistics", "entropy", "None", constant(None), NULL, "entropy")
    if _is_dense(sample):
        of_rows = np.ones(_rows_of(sample))
        yield Fault("grad_log_prob", "grad_log_prob", "of no target", constant(of_rows), INVALID, "grad_log_prob")


def _upstream(draw: Draw, sample: Sample) -> Iterator[Fault]:
    if all(sample.arguments.get(name) is None for name in UPSTREAM):
        yield Fault("upstream", "grad_loss", "None", constant(None), INVALID, "grad_loss")


def _vector(draw: Draw, sample: Sample) -> Iterator[Fault]:
    """Yield faults of a vector, whether or not the call has one."""
    shape = sample.arrays["input" if sample.is_of_logits else "weight"].shape
    yield from (fault._replace(spoil=constant(fault.spoil(np.ones(shape)))) for fault in _foreign("vector", "vector"))
    yield Fault("vector", "vector", "one axis more", constant(np.ones((1, *shape))), INVALID, "vector")
    if shape:
        longer = (shape[0] + draw.choice((1, 5)), *shape[1:])
        yield Fault("vector", "vector", f"shape {longer}", constant(np.ones(longer)), INVALID, "vector")
    if sample.sparse is not None:
        value = np.ones(sample.arrays["input"].shape)
        yield Fault("vector", "vector_input", "of a sparse input", constant(value), INVALID, "input")
    elif sample.arguments.get("vector_input") is not None:
        shape = sample.arrays["input"].shape
        longer = (shape[0] + 1, shape[1])
        yield Fault("vector", "vector_input", "longer", constant(np.ones(longer)), INVALID, "vector_input")
        yield from _foreign("vector", "vector_input")


def _vector_bias(draw: Draw, sample: Sample) -> Iterator[Fault]:
    if sample.arguments.get("bias") is None:
        value = np.ones(len(sample.arrays["weight"]))
        yield Fault("vector_bias", "vector_bias", WITHOUT_BIAS, constant(value), INVALID, "vector_bias")
    else:
        yield from _foreign("vector_bias", "vector_bias")
        yield from _of_array(draw, sample, "vector_bias", "vector_bias")


def _output_mask(draw: Draw, sample: Sample) -> Iterator[Fault]:
    wrong, foreign = NUMBERS["output_mask"]
    if sample.sparse is not None:
        wrong = wrong | {"a sparse input's gradient alone": (True, False)}
    yield from _each("output_mask", "output_mask", wrong, INVALID)
    yield from _each("output_mask", "output_mask", foreign, TYPE)


def _hessian_diag(draw: Draw, sample: Sample) -> Iterator[Fault]:
    if any(sample.arguments.get(name) is not None for name in UPSTREAM):
        value = ("entropy", "hessian_diag")
        yield Fault("hessian_diag", "outputs", "with upstream gradients", constant(value), INVALID, "outputs")


def _structure(draw: Draw, sample: Sample) -> Iterator[Fault]:
    if sample.sparse is not None:
        yield from fuzzed_sparse.faults_of_structure(draw, sample.sparse[0])


def _outputs(draw: Draw, sample: Sample) -> Iterator[Fault]:
    wrong, foreign = NUMBERS["outputs"]
    yield from _each("outputs", "outputs", wrong, INVALID)
    yield from _each("outputs", "outputs", foreign, TYPE)
    if _has_several(sample):
        yield from _each("outputs", "outputs", {"counts": ("entropy", "correct")}, INVALID)
    if _is_dense(sample):
        yield from _each("outputs", "outputs", {"of no target": ("log_prob",)}, INVALID)


def _target_values(draw: Draw, sample: Sample) -> Iterator[Fault]:
    """Move a target that is not ignored out of the classes."""
    arguments, targets = DEFAULTS | sample.arguments, sample.values["target"]
    places = np.flatnonzero(targets.reshape(-1) != arguments["ignore_index"])
    if not places.size or _is_dense(sample):
        return
    if sample.is_of_logits:
        start, classes = 0, (sample.arrays["input"].shape or (1,))[int(arguments["axis"])]
    else:
        start, classes = arguments["vocab_start_index"], len(sample.arrays["weight"])
    info = np.iinfo(targets.dtype)
    value = draw.choice((start - 1, start + classes, start + classes + 1000, int(info.min), int(info.max)))
    if value != arguments["ignore_index"]:
        values = targets.copy()
        values.reshape(-1)[draw.choice(places.tolist())] = value
        yield Fault("target", "target", f"target {value}", constant(values), INVALID, "target")


def _nothing(draw: Draw, sample: Sample) -> Iterator[Fault]:
    names = table.OPERATORS[sample.operator].array_names
    if sample.operator == LAYER_HVP and sample.arguments.get("vector_input") is None:
        names = ("vector", *names)
    for name in names:
        yield Fault("null", name, "None", constant(None), NULL, name)


def _dims(draw: Draw, sample: Sample) -> Iterator[Fault]:
    rank = max(sample.arrays["input"].ndim, 1)
    yield from _each("axis", "axis", {"end": rank, "below": -rank - 1, "far": 2**70}, INVALID)
    yield from _each("axis", "axis", NOT_AN_INT, TYPE)


def _rank(draw: Draw, sample: Sample) -> Iterator[Fault]:
    shape = sample.arrays["input"].shape
    whole = np.zeros(shape + (1,) * (9 - len(shape)), sample.dtype)
    if not _is_dense(sample):  # dense targets have the rank of the logits
        yield Fault("rank", "input", "rank 9", constant(whole), INVALID, "input")


_SETTINGS = faults_of_settings()
_MADE: dict[str, Callable[[Draw, Sample], Iterator[Fault]]] = {
    "settings": lambda draw, sample: iter(_SETTINGS),
    "null": _nothing,
    "dtype": _dtypes,
    "axis": _dims,
    "rank": _rank,
    "shape": _shapes,
    "targets": _targets,
    "grad_loss": _grad_loss,
    "temperature": _temperature,
    "temperature values": _temperature_values,
    "statistics": _statistics,
    "vector": _vector,
    "vector_bias": _vector_bias,
    "output_mask": _output_mask,
    "hessian_diag": _hessian_diag,
    "structure": _structure,
    "upstream": _upstream,
    "outputs": _outputs,
    "target": _target_values,
}


def faults_at(draw: Draw, sample: Sample, stage: str) -> list[Fault]:
    """Return faults of a stage but of the results, which `fuzzed_faults` has."""
    if stage in _MADE:
        return list(_MADE[stage](draw, sample))
    if stage in _IF_GIVEN:
        return list(_of_array(draw, sample, stage, stage))
    wrong, foreign = NUMBERS[stage]
    return [*_each(stage, stage, wrong, INVALID), *_each(stage, stage, foreign, TYPE)]
