"""The contract of every operator, in one place: what it takes, in which order that is checked, what it returns.

Every backend receives calls that passed these checks, so that a bad call fails the same way everywhere. An operator
is described by its name, its arrays and a sequence of checks; a check is a function of the `Call` that raises.
"""

from __future__ import annotations

import math
import operator as _operator
import os
import reprlib
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple, NoReturn, cast

import numpy as np

from . import arrays
from .device.array import DeviceArray, check_same_place, is_trusted, values_of
from .errors import AscendGradError, ParamInvalidError, ParamNullptrError, ParamTypeError
from .results import LinearCrossEntropy, OnlineMaxSum

MAX_RANK = 8
#: More threads than this are refused: a runtime that cannot create them ends the process.
MAX_THREADS = max(256, os.cpu_count() or 1)
#: The least that a linear call can be told to work in.
MIN_WORKSPACE_BYTES = 4 << 20
MASK_DTYPES = (np.dtype(np.bool_), np.dtype(np.uint8))
INDEX_DTYPES = (np.dtype(np.int64), np.dtype(np.int32))
#: Integers beyond this fit no index of the compiled code.
MAX_INDEX = sys.maxsize

Check = Callable[["Call"], None]


def shown(value: object) -> str:
    """What a message says of a value: its type, and the beginning of its text."""
    try:
        text = reprlib.repr(value)
    except ValueError:  # an int of more digits than Python converts
        text = "of many digits"
    return text if value is None or (type(value) is int and abs(value) < 2**64) else f"{type(value).__name__} {text}"


class ResultSpec(NamedTuple):
    """What a fresh result is: its shape, and its dtype in native byte order."""

    shape: tuple[int, ...]
    dtype: np.dtype


def _like_the_first(call: Call) -> tuple[ResultSpec | None, ...]:
    """One result, of the shape and dtype of the first array."""
    return (ResultSpec(call.arrays[0].shape, arrays.native(call.arrays[0].dtype)),)


@dataclass(frozen=True, slots=True)
class Operator:
    """One public operator.

    Attributes
    ----------
    name : str
        The public function.
    device_name : str or None
        The operator of the device library that computes the same; None for a chain of several.
    array_names : tuple of str
        The required array arguments, in order.
    checks : tuple of callables
        Everything that is checked, in the order in which a failure decides.
    optional_names : tuple of str
        The array arguments that may be None.
    results : tuple of str
        The names of the results.
    result_specs : callable
        A function of the checked call: what its results are, None for those that it does not ask for.
    """

    name: str
    device_name: str | None
    array_names: tuple[str, ...]
    checks: tuple[Check, ...]
    optional_names: tuple[str, ...] = ()
    results: tuple[str, ...] = ("result",)
    result_specs: Callable[[Call], tuple[ResultSpec | None, ...]] = _like_the_first


@dataclass(slots=True)
class Call:
    """One call of an operator: its arguments, after `validate` in the form that backends take.

    Attributes
    ----------
    operator : Operator
        What is called.
    arguments : dict
        Every argument by name: arrays as they lie in memory, scalars converted.
    arrays : list of ndarray
        The required arrays, in the order of ``operator.array_names``.
    specs : tuple of ResultSpec or None
        What the results are, one entry for each of ``operator.results``; None: not asked for.
    outs : tuple of ndarray or None
        Where the results go, one entry for each; None: into a fresh array, or the result is not asked for.
    dims : dict
        The sizes that the shapes of a linear operator's arrays agree on: ``BT``, ``H``, ``V``.
    device : int or None
        The card that all arrays live on, None for the host.
    """

    operator: Operator
    arguments: dict[str, Any]
    arrays: list[np.ndarray] = field(default_factory=list)
    specs: tuple[ResultSpec | None, ...] = ()
    outs: tuple[np.ndarray | None, ...] = ()
    dims: dict[str, int] = field(default_factory=dict)
    device: int | None = None

    @property
    def inputs(self) -> list[np.ndarray]:
        """All arrays that the call reads, the optional ones that were given included."""
        optional = (self.arguments[name] for name in self.operator.optional_names)
        return [*self.arrays, *(array for array in optional if isinstance(array, np.ndarray))]

    def fail(
        self, argument: str, expected: str, got: object, kind: type[AscendGradError] = ParamInvalidError
    ) -> NoReturn:
        raise kind(f"{argument}: expected {expected}, got {got}", operator=self.operator.name)


# ---- checks ----------------------------------------------------------------------------------------------------------


def not_none(call: Call) -> None:
    for name in call.operator.array_names:
        if call.arguments[name] is None:
            call.fail(name, "an array", None, ParamNullptrError)


def _any_array(value: object, name: str, operator: str | None) -> np.ndarray:
    """An argument as an array of the host, of whichever class."""
    try:
        return np.asanyarray(value)
    except MemoryError:
        raise
    except Exception as error:  # whatever an object's own conversion raises
        raise ParamTypeError(
            f"{name}: expected an array, got {type(value).__name__}, which does not convert: {error}", operator=operator
        ) from error


def _check_class(kind: type, name: str, operator: str | None) -> None:
    """Arrays that are more than their elements are refused: the rest of them would be lost."""
    if arrays.has_own_arithmetic(kind):
        expected = "an array that computes as numpy.ndarray does (numpy.asarray makes one of its elements)"
        got = f"{kind.__module__}.{kind.__qualname__}"
        raise ParamTypeError(f"{name}: expected {expected}, got {got}", operator=operator)


def converted(value: object, name: str, operator: str | None = None) -> np.ndarray:
    """An argument as a plain array of the host."""
    if type(value) is np.ndarray:
        return value
    array = _any_array(value, name, operator)
    _check_class(type(array), name, operator)
    if array.dtype != object:  # else it may be a list within itself, and no check of dtypes takes it
        for kind in arrays.classes_within(value):
            _check_class(kind, name, operator)
    return np.asarray(array)


def _as_array(call: Call, name: str) -> np.ndarray:
    value = call.arguments[name]
    if isinstance(value, DeviceArray):  # it has a shape and a dtype as arrays of the host have: that is all we look at
        call.device = value.device
        return cast(np.ndarray, value)
    array = call.arguments[name] = converted(value, name, call.operator.name)
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


def integer(value: object, name: str, operator: str | None = None, expected: str = "an int") -> int:
    """An argument as an int. Truth values are none, though Python counts with them."""
    try:
        if isinstance(value, (bool, np.bool_)) or arrays.has_own_arithmetic(type(value)):
            raise TypeError("not an integer")
        return _operator.index(value)  # type: ignore[arg-type]
    except MemoryError:
        raise
    except Exception as error:  # whatever an object's own conversion raises
        raise ParamTypeError(f"{name}: expected {expected}, got {shown(value)}", operator=operator) from error


def real_number(name: str) -> Check:
    """The argument is one real number (NaN and infinities are; truth values are not)."""

    def check(call: Call) -> None:
        value = call.arguments[name]
        scalar = value[()] if isinstance(value, np.ndarray) else value
        # NumPy's scalars and arrays would convert more than numbers: text, and half of a complex number.
        if (
            isinstance(scalar, (np.ndarray, str, bytes, bool, np.bool_, np.complexfloating))
            or arrays.has_own_arithmetic(type(value))
            or not (hasattr(type(scalar), "__float__") or hasattr(type(scalar), "__index__"))
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
    name = call.operator.array_names[0]
    first = call.arguments[name]
    # The one check that may come before the dtypes are looked at, so the rank is asked of whatever came.
    if not isinstance(first, DeviceArray):
        first = _any_array(first, name, call.operator.name)
    rank = max(first.ndim, 1)
    index = integer(call.arguments["dim"], "dim", call.operator.name)
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


# ---- checks of the linear operators ----------------------------------------------------------------------------------


def one_mode(call: Call) -> None:
    """The probabilities are given, or what they are recomputed from; if they are, the rest is not looked at."""
    softmax, logits_max, sum_exp = (call.arguments[name] for name in ("softmax", "logits_max", "sum_exp_logits"))
    if softmax is not None:
        call.arguments["logits_max"] = call.arguments["sum_exp_logits"] = None
    elif logits_max is None and sum_exp is None:
        call.fail("softmax", "an array, or logits_max and sum_exp_logits instead of it", None, ParamNullptrError)
    elif logits_max is None:
        call.fail("logits_max", "an array, as sum_exp_logits is given and softmax is not", None, ParamNullptrError)
    elif sum_exp is None:
        call.fail("sum_exp_logits", "an array, as logits_max is given and softmax is not", None, ParamNullptrError)


def accumulator_of(name: str, *others: str) -> Check:
    """The other arrays, where given, are float64 where the named one is, else float32."""

    def check(call: Call) -> None:
        dtype = arrays.native(call.arguments[name].dtype)
        expected = arrays.accumulator_dtype(dtype)
        for other in others:
            if call.arguments[other] is None:
                continue
            array = _as_array(call, other)
            if arrays.native(array.dtype) != expected:
                call.fail(other, f"dtype {expected}, as {name} has dtype {dtype}", array.dtype, ParamTypeError)

    return check


def float32_or_float64(name: str) -> Check:
    def check(call: Call) -> None:
        array = _as_array(call, name)
        if arrays.native(array.dtype) not in (np.float32, np.float64):
            call.fail(name, "dtype float32 or float64", array.dtype, ParamTypeError)

    return check


def logits_beside(name: str) -> Check:
    """The optional logits have a dtype whose accumulator is the named array's dtype."""

    def check(call: Call) -> None:
        if call.arguments["vocab_parallel_logits"] is None:
            return
        array = _as_array(call, "vocab_parallel_logits")
        dtype = arrays.native(call.arguments[name].dtype)
        if not arrays.is_floating(array.dtype) or arrays.accumulator_dtype(array.dtype) != dtype:
            expected = "float64" if dtype == np.float64 else "float32, float16 or bfloat16"
            expected = f"dtype {expected}, as {name} has dtype {dtype}"
            call.fail("vocab_parallel_logits", expected, array.dtype, ParamTypeError)

    return check


def bits_or_booleans(name: str) -> Check:
    def check(call: Call) -> None:
        array = _as_array(call, name)
        if array.dtype not in MASK_DTYPES:
            call.fail(name, "dtype bool, or uint8 with eight rows to a byte", array.dtype, ParamTypeError)

    return check


def int32_or_int64(name: str) -> Check:
    def check(call: Call) -> None:
        array = _as_array(call, name)
        if arrays.native(array.dtype) not in INDEX_DTYPES:
            call.fail(name, "dtype int32 or int64", array.dtype, ParamTypeError)

    return check


def shape(name: str, *dims: str) -> Check:
    """The array, where given, has these dimensions; each has the size that earlier arrays gave it, if they did."""

    def check(call: Call) -> None:
        array = call.arguments[name]
        if array is None:
            return
        got, known = array.shape, call.dims
        if len(got) == len(dims) and all(known.get(dim, size) == size for dim, size in zip(dims, got)):
            known.update(zip(dims, got))
            return
        expected = ", ".join(f"{dim} = {known[dim]}" if dim in known else dim for dim in dims)
        call.fail(name, f"shape ({expected})", got)

    return check


def mask_has_rows(call: Call) -> None:
    """``target_mask`` has an element for every row, or, as bits, at least one."""
    array, rows = call.arguments["target_mask"], call.dims["BT"]
    if array.dtype == np.bool_:
        shape("target_mask", "BT")(call)
    elif array.ndim != 1 or array.shape[0] * 8 < rows:
        call.fail("target_mask", f"at least {-(-rows // 8)} bytes in one dimension, a bit for each row", array.shape)


def a_vocabulary(call: Call) -> None:
    if call.dims["V"] == 0:
        call.fail("weight", "at least one row", call.arguments["weight"].shape)


def no_label_smoothing(call: Call) -> None:
    real_number("label_smoothing")(call)
    if call.arguments["label_smoothing"] != 0:
        call.fail("label_smoothing", "0 (smoothing is not supported)", call.arguments["label_smoothing"])


def true_or_false(name: str) -> Check:
    def check(call: Call) -> None:
        value = call.arguments[name]
        if not isinstance(value, (bool, np.bool_)):
            call.fail(name, "True or False", shown(value), ParamTypeError)
        call.arguments[name] = bool(value)

    return check


def an_integer(call: Call, name: str, low: int, high: int) -> int:
    """The argument as an int from low to high."""
    index = integer(call.arguments[name], name, call.operator.name)
    if not low <= index <= high:
        call.fail(name, f"an int in [{low}, {high}]", shown(index))
    call.arguments[name] = index
    return index


def an_integer_from(name: str, low: int) -> Check:
    def check(call: Call) -> None:
        an_integer(call, name, low, MAX_INDEX)

    return check


def vocabulary_bounds(call: Call) -> None:
    """``0 <= start <= end``, and no more ids than weight has rows; the end is exclusive."""
    start = an_integer(call, "vocab_start_index", 0, MAX_INDEX)
    end = an_integer(call, "vocab_end_index", start, MAX_INDEX)
    if end - start > call.dims["V"]:
        call.fail("vocab_end_index", f"at most {call.dims['V']} (rows of weight) beyond vocab_start_index {start}", end)


def chosen_results(call: Call) -> None:
    value = call.arguments["output_mask"]
    is_vector = isinstance(value, np.ndarray) and value.ndim and not arrays.has_own_arithmetic(type(value))
    entries = tuple(value) if isinstance(value, (tuple, list)) or is_vector else ()
    if len(entries) != 2 or not all(type(entry) in (bool, np.bool_) for entry in entries):
        call.fail("output_mask", "two of True or False", shown(value), ParamTypeError)
    call.arguments["output_mask"] = tuple(map(bool, entries))


def workspace_and_filter(call: Call) -> None:
    if call.arguments["workspace_bytes"] is not None:
        an_integer(call, "workspace_bytes", MIN_WORKSPACE_BYTES, MAX_INDEX)
    real_number("filter_eps")(call)
    if not 0 <= call.arguments["filter_eps"] < math.inf:
        call.fail("filter_eps", "a finite number that is not negative", call.arguments["filter_eps"])


def reduction_and_its_gradient(call: Call) -> None:
    """``grad_loss`` is one number, ones by default; without a reduction it may be an array of one for every row."""
    reduction, grad_loss = call.arguments["reduction"], call.arguments["grad_loss"]
    if not isinstance(reduction, str):
        call.fail("reduction", "'mean', 'sum' or 'none'", shown(reduction), ParamTypeError)
    if reduction not in ("mean", "sum", "none"):
        call.fail("reduction", "'mean', 'sum' or 'none'", shown(reduction))
    if grad_loss is None:
        call.arguments["grad_loss"] = 1.0
        return
    if reduction == "none" and not isinstance(grad_loss, (str, bytes)) and _as_array(call, "grad_loss").ndim:
        floating("grad_loss")(call)
        shape("grad_loss", "BT")(call)
        return
    call.arguments["grad_loss"] = grad_loss
    real_number("grad_loss")(call)


def _first_beyond(target: np.ndarray, low: int, high: int, exempt: Callable[[], np.ndarray]) -> int | None:
    """The first row whose target is not in [low, high), of those that are not exempt."""
    # Two reductions decide nearly every call; only what they find makes arrays (of the target's size).
    if not target.size or (low <= np.minimum.reduce(target) and np.maximum.reduce(target) < high):
        return None
    wrong = np.flatnonzero(((target < low) | (target >= high)) & ~exempt())
    return int(wrong[0]) if wrong.size else None


def targets_in_range(call: Call) -> None:
    """``masked_target`` is a row of weight wherever the mask's bit is 0. Checked last, for it reads values."""
    target, mask = call.arguments["masked_target"], call.arguments["target_mask"]
    if is_trusted(target, mask, call.dims["V"]):
        return
    target = values_of(target)
    row = _first_beyond(target, 0, call.dims["V"], lambda: arrays.unpacked(values_of(mask), target.size))
    if row is not None:
        expected = f"values in [0, {call.dims['V']}) wherever target_mask is 0"
        call.fail("masked_target", expected, f"{target[row]} in row {row}")


def targets_in_the_vocabulary(call: Call) -> None:
    """``target`` less ``vocab_start_index`` is a row of weight, or target is ``ignore_index``."""
    target, start, ignored = (call.arguments[name] for name in ("target", "vocab_start_index", "ignore_index"))
    end = start + call.dims["V"]
    target = values_of(target)
    row = _first_beyond(target, start, end, lambda: target == ignored)
    if row is not None:
        call.fail("target", f"values in [{start}, {end}) or {ignored}", f"{target[row]} in row {row}")


# ---- results ---------------------------------------------------------------------------------------------------------


def writable_result(call: Call, name: str, out: object, spec: ResultSpec | None) -> np.ndarray | None:
    """``out`` is None or an array that can take the result."""
    if out is None:
        return None
    if spec is None:
        call.fail(name, "None, as the call does not ask for this result", shown(out))
    if not isinstance(out, np.ndarray):
        call.fail(name, "a numpy.ndarray", type(out).__name__, ParamTypeError)
    _check_class(type(out), name, call.operator.name)
    if not arrays.is_floating(out.dtype):
        call.fail(name, f"dtype {arrays.FLOATING_NAMES}", out.dtype, ParamTypeError)
    if out.shape != spec.shape:
        call.fail(name, f"shape {spec.shape}", out.shape)
    if not out.flags.writeable:
        call.fail(name, "a writable array", "a read-only one")
    if arrays.overlaps_itself(out):
        call.fail(name, "an array whose elements do not share memory", f"strides {out.strides}")
    return out


def writable_results(call: Call, out: object) -> tuple[np.ndarray | None, ...]:
    """One entry of ``out`` for every result. Checked last, for every operator."""
    names = call.operator.results
    if out is None:
        return (None,) * len(names)
    if len(names) == 1:
        return (writable_result(call, "out", out, call.specs[0]),)
    expected = f"a tuple ({', '.join(names)}) of arrays or None"
    if not isinstance(out, (tuple, list)):
        call.fail("out", expected, type(out).__name__, ParamTypeError)
    if len(out) != len(names):
        call.fail("out", expected, f"{len(out)} entries")
    outs = tuple(writable_result(call, f"out[{i}]", each, call.specs[i]) for i, each in enumerate(out))
    given = [each for each in outs if each is not None]
    if len(given) > 1 and arrays.may_overlap(given[0], given[1]):
        call.fail("out", "arrays that do not share memory", "two that do")
    return outs


def validate(operator: Operator, arguments: dict[str, Any], out: object = None) -> Call:
    """Check one call against its contract and return it in the form that backends take."""
    call = Call(operator, arguments)
    for check in operator.checks:
        check(call)
    call.arrays = [call.arguments[name] for name in operator.array_names]
    call.specs = operator.result_specs(call)
    if call.device is not None:
        optional = {name: call.arguments[name] for name in operator.optional_names}
        given = {name: array for name, array in optional.items() if isinstance(array, (np.ndarray, DeviceArray))}
        check_same_place({**dict(zip(operator.array_names, call.arrays)), **given}, out, operator.name)
    call.outs = writable_results(call, out)
    return call


def checked_num_threads(num_threads: Any, operator: str | None = None) -> int | None:
    """The number of threads that a caller asked for, or None for the default."""
    if num_threads is None:
        return None
    expected = f"None or an int in [1, {MAX_THREADS}]"
    count = integer(num_threads, "num_threads", operator, expected)
    if not 1 <= count <= MAX_THREADS:
        raise ParamInvalidError(f"num_threads: expected {expected}, got {shown(count)}", operator=operator)
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

ROWWISE = (
    SOFTMAX_BACKWARD,
    LOG_SOFTMAX_BACKWARD,
    SCALED_MASKED_SOFTMAX_BACKWARD,
    SOFTMAX,
    LOG_SOFTMAX,
    SCALED_MASKED_SOFTMAX,
)

_LINEAR = floating("input", "weight")
_LINEAR_SHAPE = (shape("input", "BT", "H"), shape("weight", "V", "H"))


def _spec(call: Call, name: str) -> ResultSpec:
    """A result like the named argument."""
    array = call.arguments[name]
    return ResultSpec(array.shape, arrays.native(array.dtype))


def _gradients(call: Call) -> tuple[ResultSpec | None, ResultSpec | None]:
    first, second = call.arguments["output_mask"]
    return _spec(call, "input") if first else None, _spec(call, "weight") if second else None


FUSED_LINEAR_CROSS_ENTROPY_LOSS_GRAD = Operator(
    "fused_linear_cross_entropy_loss_grad",
    "aclnnFusedLinearCrossEntropyLossGrad",
    ("grad", "input", "weight", "target_mask", "masked_target"),
    (
        one_mode,
        not_none,
        _LINEAR,
        accumulator_of("input", "grad", "logits_max", "sum_exp_logits", "softmax"),
        bits_or_booleans("target_mask"),
        int32_or_int64("masked_target"),
        no_label_smoothing,
        shape("grad", "BT"),
        *_LINEAR_SHAPE,
        mask_has_rows,
        shape("masked_target", "BT"),
        shape("logits_max", "BT"),
        shape("sum_exp_logits", "BT"),
        shape("softmax", "BT", "V"),
        chosen_results,
        workspace_and_filter,
        targets_in_range,
    ),
    optional_names=("logits_max", "sum_exp_logits", "softmax"),
    results=("input_grad", "weight_grad"),
    result_specs=_gradients,
)


def _statistics(call: Call) -> tuple[ResultSpec | None, ...]:
    rows, vocabulary = call.dims["BT"], call.dims["V"]
    dtype = arrays.native(call.arguments["input"].dtype)
    number = ResultSpec((rows,), arrays.accumulator_dtype(dtype))
    mask = ResultSpec((-(-rows // 8),), np.dtype(np.uint8))
    logits = ResultSpec((rows, vocabulary), dtype) if call.arguments["return_logits"] else None
    return number, number, number, mask, _spec(call, "target"), logits


FUSED_LINEAR_ONLINE_MAX_SUM = Operator(
    "fused_linear_online_max_sum",
    "aclnnFusedLinearOnlineMaxSum",
    ("input", "weight", "target"),
    (
        not_none,
        _LINEAR,
        int32_or_int64("target"),
        *_LINEAR_SHAPE,
        a_vocabulary,
        shape("target", "BT"),
        vocabulary_bounds,
        true_or_false("return_logits"),
    ),
    results=OnlineMaxSum._fields,
    result_specs=_statistics,
)


def _loss_and_softmax(call: Call) -> tuple[ResultSpec | None, ...]:
    loss = _spec(call, "logits_max")
    logits = call.arguments["vocab_parallel_logits"]
    return loss, None if logits is None else ResultSpec(logits.shape, loss.dtype)


FUSED_CROSS_ENTROPY_LOSS_WITH_MAX_SUM = Operator(
    "fused_cross_entropy_loss_with_max_sum",
    "aclnnFusedCrossEntropyLossWithMaxSum",
    ("logits_max", "sum_exp_logits", "predicted_logits"),
    (
        not_none,
        float32_or_float64("logits_max"),
        accumulator_of("logits_max", "sum_exp_logits", "predicted_logits"),
        logits_beside("logits_max"),
        shape("logits_max", "BT"),
        shape("sum_exp_logits", "BT"),
        shape("predicted_logits", "BT"),
        shape("vocab_parallel_logits", "BT", "V"),
        no_label_smoothing,
    ),
    optional_names=("vocab_parallel_logits",),
    results=("loss", "softmax"),
    result_specs=_loss_and_softmax,
)


def _loss_and_gradients(call: Call) -> tuple[ResultSpec | None, ...]:
    shape = (call.dims["BT"],) if call.arguments["reduction"] == "none" else ()
    loss = ResultSpec(shape, arrays.accumulator_dtype(call.arguments["input"].dtype))
    return loss, *(_gradients(call) if call.arguments["return_grad"] else (None, None))


LINEAR_CROSS_ENTROPY = Operator(
    "linear_cross_entropy",
    None,
    ("input", "weight", "target"),
    (
        not_none,
        _LINEAR,
        int32_or_int64("target"),
        *_LINEAR_SHAPE,
        shape("target", "BT"),
        reduction_and_its_gradient,
        an_integer_from("ignore_index", -MAX_INDEX - 1),
        an_integer_from("vocab_start_index", 0),
        true_or_false("return_grad"),
        chosen_results,
        workspace_and_filter,
        targets_in_the_vocabulary,
    ),
    optional_names=("grad_loss",),
    results=LinearCrossEntropy._fields,
    result_specs=_loss_and_gradients,
)

LINEAR = (
    FUSED_LINEAR_CROSS_ENTROPY_LOSS_GRAD,
    FUSED_LINEAR_ONLINE_MAX_SUM,
    FUSED_CROSS_ENTROPY_LOSS_WITH_MAX_SUM,
    LINEAR_CROSS_ENTROPY,
)

OPERATORS = {operator.name: operator for operator in (*ROWWISE, *LINEAR)}
