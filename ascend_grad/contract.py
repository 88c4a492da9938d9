"""The contract of every operator, in one place: what it takes, in which order that is checked, what it returns.

Every backend receives calls that passed these checks, so that a bad call fails the same way everywhere. An operator
is described by its name, its arrays and a sequence of checks; a check is a function of the `Call` that raises.
"""

from __future__ import annotations

import operator as _operator
import os
import reprlib
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NoReturn

import numpy as np

from . import arrays
from .errors import AscendGradError, ParamInvalidError, ParamNullptrError, ParamTypeError

MAX_RANK = 8
#: More threads than this are refused: a runtime that cannot create them ends the process.
MAX_THREADS = max(256, os.cpu_count() or 1)

Check = Callable[["Call"], None]


def shown(value: object) -> str:
    """What a message says of a value: its type, and the beginning of its text."""
    try:
        text = reprlib.repr(value)
    except ValueError:  # an int of more digits than Python converts
        text = "of many digits"
    return text if value is None or (type(value) is int and abs(value) < 2**64) else f"{type(value).__name__} {text}"


@dataclass(frozen=True, slots=True)
class Operator:
    """One public operator.

    Attributes
    ----------
    name : str
        The public function.
    device_name : str
        The operator of the device library that computes the same.
    array_names : tuple of str
        The required array arguments, in order; the result has the shape and dtype of the first.
    checks : tuple of callables
        Everything that is checked, in the order in which a failure decides.
    """

    name: str
    device_name: str
    array_names: tuple[str, ...]
    checks: tuple[Check, ...]


@dataclass(slots=True)
class Call:
    """One call of an operator: its arguments, after `validate` in the form that backends take."""

    operator: Operator
    arguments: dict[str, Any]
    out: np.ndarray | None = None
    arrays: list[np.ndarray] = field(default_factory=list)

    def fail(
        self, argument: str, expected: str, got: object, kind: type[AscendGradError] = ParamInvalidError
    ) -> NoReturn:
        raise kind(f"{argument}: expected {expected}, got {got}", operator=self.operator.name)


# ---- checks ----------------------------------------------------------------------------------------------------------


def not_none(call: Call) -> None:
    for name in call.operator.array_names:
        if call.arguments[name] is None:
            call.fail(name, "an array", None, ParamNullptrError)


def _as_array(call: Call, name: str) -> np.ndarray:
    value = call.arguments[name]
    try:
        array = np.asarray(value)
    except MemoryError:
        raise
    except Exception as error:  # whatever an object's own conversion raises
        raise ParamTypeError(
            f"{name}: expected an array, got {type(value).__name__}, which does not convert: {error}",
            operator=call.operator.name,
        ) from error
    call.arguments[name] = array
    return array


def floating(*names: str) -> Check:
    """The named arrays have one of the floating dtypes, the same one (byte orders aside)."""

    def check(call: Call) -> None:
        first = None
        for name in names:
            array = _as_array(call, name)
            if not arrays.is_floating(array.dtype):
                call.fail(name, f"dtype {arrays.FLOATING_NAMES}", array.dtype, ParamTypeError)
            if first is None:
                first = arrays.native(array.dtype)
            elif arrays.native(array.dtype) != first:
                call.fail(name, f"dtype {first} as {names[0]} has", array.dtype, ParamTypeError)

    return check


def boolean(name: str) -> Check:
    def check(call: Call) -> None:
        array = _as_array(call, name)
        if array.dtype != np.bool_:
            call.fail(name, "dtype bool", array.dtype, ParamTypeError)

    return check


def real_number(name: str) -> Check:
    """The argument is one real number (NaN and infinities are)."""

    def check(call: Call) -> None:
        value = call.arguments[name]
        scalar = value[()] if isinstance(value, np.ndarray) else value
        # NumPy's scalars and arrays would convert more than numbers: text, and half of a complex number.
        if isinstance(scalar, (np.ndarray, str, bytes, np.complexfloating)) or not (
            hasattr(type(scalar), "__float__") or hasattr(type(scalar), "__index__")
        ):
            call.fail(name, "a real number", shown(value), ParamTypeError)
        try:
            call.arguments[name] = float(scalar)
        except OverflowError:
            call.fail(name, "a number that float64 can hold", "a larger one")
        except Exception as error:  # whatever an object's own conversion raises
            raise ParamTypeError(
                f"{name}: expected a real number, got {shown(value)}: {error}", operator=call.operator.name
            ) from error

    return check


def dim_in_range(call: Call) -> None:
    """``dim`` is an axis of the first array; it becomes non-negative. Rank 0 counts as rank 1."""
    dim, first = call.arguments["dim"], call.operator.array_names[0]
    # The one check that may come before the dtypes are looked at, so the rank is asked of whatever came.
    rank = max(_as_array(call, first).ndim, 1)
    try:
        index = _operator.index(dim)
    except Exception:  # whatever an object's own conversion raises
        call.fail("dim", "an int", shown(dim), ParamTypeError)
    if not -rank <= index < rank:
        call.fail("dim", f"a value in [{-rank}, {rank - 1}]", shown(index))
    call.arguments["dim"] = index % rank


def same_shape(first: str, second: str) -> Check:
    def check(call: Call) -> None:
        expected, got = call.arguments[first].shape, call.arguments[second].shape
        if got != expected:
            call.fail(second, f"shape {expected} as {first} has", got)

    return check


def rank_at_most(name: str, limit: int) -> Check:
    def check(call: Call) -> None:
        array = call.arguments[name]
        if array.ndim > limit:
            call.fail(name, f"rank 0 to {limit}", f"rank {array.ndim}")

    return check


def rank_exactly(name: str, rank: int) -> Check:
    def check(call: Call) -> None:
        array = call.arguments[name]
        if array.ndim != rank:
            call.fail(name, f"rank {rank}", f"rank {array.ndim}")

    return check


def mask_covers(name: str, mask: str) -> Check:
    """A (B, N, S1, S2) array takes masks (B or 1, N or 1, S1, S2), nothing else."""

    def check(call: Call) -> None:
        shape, got = call.arguments[name].shape, call.arguments[mask].shape
        if got[2:] != shape[2:] or any(m not in (1, n) for m, n in zip(got[:2], shape[:2])):
            b, n, s1, s2 = shape
            call.fail(mask, f"shape ({b} or 1, {n} or 1, {s1}, {s2})", got)

    return check


def no_triu_mask(call: Call) -> None:
    value = call.arguments["fix_triu_mask"]
    if not isinstance(value, (bool, np.bool_)):
        call.fail("fix_triu_mask", "False", shown(value), ParamTypeError)
    if value:
        call.fail("fix_triu_mask", "False (a generated triangular mask is not supported)", True)


def writable_result(call: Call, out: object) -> np.ndarray | None:
    """``out`` is None or an array that can take the result. Checked last, for every operator."""
    if out is None:
        return None
    if not isinstance(out, np.ndarray):
        call.fail("out", "a numpy.ndarray", type(out).__name__, ParamTypeError)
    if not arrays.is_floating(out.dtype):
        call.fail("out", f"dtype {arrays.FLOATING_NAMES}", out.dtype, ParamTypeError)
    shape = call.arrays[0].shape
    if out.shape != shape:
        call.fail("out", f"shape {shape}", out.shape)
    if not out.flags.writeable:
        call.fail("out", "a writable array", "a read-only one")
    if arrays.overlaps_itself(out):
        call.fail("out", "an array whose elements do not share memory", f"strides {out.strides}")
    return out


def validate(operator: Operator, arguments: dict[str, Any], out: object = None) -> Call:
    """Check one call against its contract and return it in the form that backends take."""
    call = Call(operator, arguments)
    for check in operator.checks:
        check(call)
    call.arrays = [call.arguments[name] for name in operator.array_names]
    call.out = writable_result(call, out)
    return call


def checked_num_threads(num_threads: Any, operator: str | None = None) -> int | None:
    """The number of threads that a caller asked for, or None for the default."""
    if num_threads is None:
        return None
    expected = f"num_threads: expected None or an int in [1, {MAX_THREADS}], got "
    try:
        count = _operator.index(num_threads)
    except Exception as error:  # whatever an object's own conversion raises
        raise ParamTypeError(f"{expected}{shown(num_threads)}", operator=operator) from error
    if not 1 <= count <= MAX_THREADS:
        raise ParamInvalidError(f"{expected}{shown(count)}", operator=operator)
    return count


# ---- the operators ---------------------------------------------------------------------------------------------------

_PAIR = floating("grad_output", "output")
_PAIR_SHAPE = (rank_at_most("grad_output", MAX_RANK), same_shape("grad_output", "output"))
_INPUT = floating("input")
_INPUT_RANK = rank_at_most("input", MAX_RANK)

SOFTMAX_BACKWARD = Operator(
    "softmax_backward", "aclnnSoftmaxBackward", ("grad_output", "output"), (not_none, _PAIR, dim_in_range, *_PAIR_SHAPE)
)
LOG_SOFTMAX_BACKWARD = Operator(
    "log_softmax_backward",
    "aclnnLogSoftmaxBackward",
    ("grad_output", "output"),
    (not_none, _PAIR, *_PAIR_SHAPE, dim_in_range),
)
SCALED_MASKED_SOFTMAX_BACKWARD = Operator(
    "scaled_masked_softmax_backward",
    "aclnnScaledMaskedSoftmaxBackward",
    ("grad_output", "y", "mask"),
    (
        not_none,
        floating("grad_output", "y"),
        boolean("mask"),
        real_number("scale"),
        rank_exactly("grad_output", 4),
        same_shape("grad_output", "y"),
        rank_exactly("mask", 4),
        mask_covers("grad_output", "mask"),
        no_triu_mask,
    ),
)
SOFTMAX = Operator("softmax", "aclnnSoftmax", ("input",), (not_none, _INPUT, dim_in_range, _INPUT_RANK))
LOG_SOFTMAX = Operator("log_softmax", "aclnnLogSoftmax", ("input",), (not_none, dim_in_range, _INPUT, _INPUT_RANK))
SCALED_MASKED_SOFTMAX = Operator(
    "scaled_masked_softmax",
    "aclnnScaledMaskedSoftmax",
    ("x", "mask"),
    (
        not_none,
        floating("x"),
        boolean("mask"),
        real_number("scale"),
        rank_exactly("x", 4),
        rank_exactly("mask", 4),
        mask_covers("x", "mask"),
        no_triu_mask,
    ),
)

OPERATORS = {
    operator.name: operator
    for operator in (
        SOFTMAX_BACKWARD,
        LOG_SOFTMAX_BACKWARD,
        SCALED_MASKED_SOFTMAX_BACKWARD,
        SOFTMAX,
        LOG_SOFTMAX,
        SCALED_MASKED_SOFTMAX,
    )
}
