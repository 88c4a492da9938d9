"""Checks of the linear operators and of losses, compiled as they are part of every call (see `_checks`)."""

import warnings

import numpy as np

cimport numpy as cnp
from libc.stdint cimport int32_t, int64_t, uint8_t, uint64_t

from ascend_grad cimport _tasks
from ascend_grad._array_types cimport is_on_device
from ascend_grad._call cimport (
    BT, H, K, LOSS, LOSS_GRADIENT, LOSSES, TOP_K, V, Call, Check, native_dtype, native_vector, shape_of
)
from ascend_grad._checks cimport Floating, Number, Shape, have_same_shape, integer_between, rows_of, vocabulary_of
from ascend_grad._dtypes cimport dtype_of
from ascend_grad._kernels cimport AG_FLOAT32, AG_FLOAT64, ag_dtype
from ascend_grad._linear_schedule cimport least_workspace_of_sizes

from . import arguments
from ._dtypes import FLOATING_DTYPES
from .arrays import AbstractDeviceArray, host_values
from .errors import ParamNullptrError, ParamTypeError
from .operators.options import OUTPUTS, is_zero

cnp.import_array()

cdef tuple _floating = FLOATING_DTYPES  # in the order of ag_dtype

cdef enum:
    ROWS_PER_CHECK = 1 << 18  # targets compared between two checks for signals


# ---- checks of the linear operators ----------------------------------------------------------------------------------


cdef class SoftmaxOrStatistics(Check):
    """Check that ``softmax`` is given, or both ``logits_max`` and ``sum_exp_logits``.

    If ``softmax`` is given, the other two are ignored.
    """

    def __init__(self):
        Check.__init__(self, "softmax", "logits_max", "sum_exp_logits")

    cdef int run(self, Call call) except -1:
        softmax, logits_max, sum_exp = [call.values[self.slots[i]] for i in range(3)]
        if softmax is not None:
            call.values[self.slots[1]] = call.values[self.slots[2]] = None
        elif logits_max is None and sum_exp is None:
            call.fail("softmax", "an array, or logits_max and sum_exp_logits instead of it", None, ParamNullptrError)
        elif logits_max is None:
            expected = "an array, as sum_exp_logits is given and softmax is not"
            call.fail("logits_max", expected, None, ParamNullptrError)
        elif sum_exp is None:
            call.fail("sum_exp_logits", "an array, as logits_max is given and softmax is not", None, ParamNullptrError)
        return 0


cdef class AccumulatorOf(Check):
    """Check that all other arrays that are given are float64 if the first one is, and float32 otherwise."""

    cdef int run(self, Call call) except -1:
        cdef cnp.ndarray first = call.array(self.slots[0]), array
        cdef int expected = AG_FLOAT64 if dtype_of(first) == AG_FLOAT64 else AG_FLOAT32, i
        for i in range(1, self.count):
            if call.values[self.slots[i]] is None:
                continue
            array = call.array(self.slots[i])
            if dtype_of(array) != expected:
                text = f"dtype {_floating[expected]}, as {self.names[0]} has dtype {native_dtype(first)}"
                call.fail(self.names[i], text, array.dtype, ParamTypeError)
        return 0


cdef class LogitsDtypeMatches(Check):
    """Check that the second array, if given, has a floating dtype whose sums have the dtype of the first array."""

    cdef int run(self, Call call) except -1:
        if call.values[self.slots[1]] is None:
            return 0
        cdef cnp.ndarray first = call.array(self.slots[0]), array = call.array(self.slots[1])
        cdef bint is_double = dtype_of(first) == AG_FLOAT64
        if dtype_of(array) < 0 or (dtype_of(array) == AG_FLOAT64) != is_double:
            allowed = "float64" if is_double else "float32, float16 or bfloat16"
            expected = f"dtype {allowed}, as {self.names[0]} has dtype {native_dtype(first)}"
            call.fail(self.names[1], expected, array.dtype, ParamTypeError)
        return 0


cdef class MaskHasRows(Check):
    """Check that a boolean mask has one element for every row, and that a packed mask has at least one bit for each."""

    cdef int run(self, Call call) except -1:
        cdef cnp.ndarray array = call.array(self.slots[0])
        cdef Py_ssize_t rows = call.sizes[BT], nbytes = (rows + 7) // 8
        cdef bint fits = cnp.PyArray_NDIM(array) == 1
        if cnp.PyArray_TYPE(array) == cnp.NPY_BOOL:
            if not fits or cnp.PyArray_DIM(array, 0) != rows:
                call.fail(self.names[0], f"shape (BT = {rows})", shape_of(array))
        elif not fits or cnp.PyArray_DIM(array, 0) < nbytes:
            expected = f"at least {nbytes} bytes in one dimension, a bit for each row"
            call.fail(self.names[0], expected, shape_of(array))
        elif cnp.PyArray_DIM(array, 0) == rows and rows > 8:
            advice = f"for an entry for each row, pass {self.names[0]}.astype(bool)"
            message = f"{call.operator.name}: {self.names[0]}: uint8 is read as packed bits, eight rows to a byte; {advice}"
            warnings.warn(message, UserWarning, stacklevel=2)
        return 0


cdef class NonemptyVocabulary(Check):
    """Check that the named weight has at least one row. Rows of logits have at least one element, if there are rows."""

    cdef int run(self, Call call) except -1:
        if vocabulary_of(call):
            return 0
        if call.operator.family != LOSSES:
            call.fail(self.names[0], "at least one row", shape_of(call.array(self.slots[0])))
        if 0 not in rows_of(call):
            got = f"shape {shape_of(call.array(self.slots[0]))}"
            call.fail(self.names[0], f"at least one element along axis {call.axis}", got)
        return 0


cdef class VocabularyBounds(Check):
    """Check that ``0 <= start <= end`` and ``end - start <= V``; the end is exclusive."""

    def __init__(self):
        Check.__init__(self, "vocab_start_index", "vocab_end_index")

    cdef int run(self, Call call) except -1:
        start = integer_between(call, self.slots[0], 0, arguments.MAX_INDEX)
        end = integer_between(call, self.slots[1], start, arguments.MAX_INDEX)
        if end - start > call.sizes[V]:
            expected = f"at most {call.sizes[V]} (rows of weight) beyond vocab_start_index {start}"
            call.fail("vocab_end_index", expected, end)
        return 0


cdef class ValidOutputMask(Check):
    """Check that ``output_mask`` is a pair of truth values."""

    def __init__(self):
        Check.__init__(self, "output_mask")

    cdef int run(self, Call call) except -1:
        value = call.values[self.slots[0]]
        if (
            type(value) is tuple and len(value) == 2 and type(value[0]) is bool and type(value[1]) is bool
        ):
            return 0
        call.ran_foreign_code = True
        call.values[self.slots[0]] = arguments.pair_of_truth_values(value, "output_mask", call.operator.name)
        return 0


cpdef object least_workspace(Call call):
    """Return the least ``workspace_bytes`` of a linear call whose shapes were checked.

    `out` is checked later, so with one the gradient of the weight may have to be summed in the workspace.
    """
    cdef dict slots = call.operator.slots
    if call.operator.kernels == TOP_K:
        return least_workspace_of_sizes(
            <ag_dtype>dtype_of(call.array(slots["input"])), call.sizes[BT], call.sizes[V], call.sizes[H], True, True, False,
            False, False, False, call.sizes[K]
        )
    cdef bint with_statistics = call.operator.kernels == LOSS
    cdef bint is_loss = with_statistics or call.operator.kernels == LOSS_GRADIENT
    cdef bint with_logits = is_loss or call.values[slots["softmax"]] is None
    # Operators over ranks have another name for the input, which is their first array.
    cdef cnp.ndarray input = call.array(slots["input"] if "input" in slots else call.operator.array_slots[0])
    first, second = call.values[slots["output_mask"]]
    if with_statistics and not call.values[slots["return_grad"]]:
        first = second = False
    return least_workspace_of_sizes(
        <ag_dtype>dtype_of(input), call.sizes[BT], call.sizes[V], call.sizes[H], with_logits, with_statistics, first, second,
        call.has_out or cnp.PyArray_ITEMSIZE(input) == 2, is_loss, 0
    )


cdef class Workspace(Check):
    """Check that ``workspace_bytes`` is None or enough: at least `least`, and the least workspace of the problem."""

    cdef public object least

    def __init__(self, least):
        Check.__init__(self, "workspace_bytes")
        self.least = least

    cdef int run(self, Call call) except -1:
        if call.values[self.slots[0]] is not None:
            integer_between(call, self.slots[0], max(self.least, least_workspace(call)), arguments.MAX_INDEX)
        return 0


cdef str known_reduction(Call call, object reduction):
    """Return a reduction as a plain str, as the argument may be of a subclass. Check that it is known."""
    if not isinstance(reduction, str):
        call.fail("reduction", "'mean', 'sum' or 'none'", arguments.shown(reduction), ParamTypeError)
    for known in ("mean", "sum", "none"):
        if reduction == known:
            return known
    call.fail("reduction", "'mean', 'sum' or 'none'", arguments.shown(reduction))


cdef str expected_grad_loss(str reduction):
    """Describe in errors what ``grad_loss`` has to be. With reduction "none" it may also be an array."""
    return "a real number, or one for each row" if reduction == "none" else f"a real number, as reduction is {reduction!r}"


cdef class Reduction(Check):
    """Check that ``reduction`` is known, and that ``grad_loss`` fits: a number, or one for each row without a reduction.

    ``grad_loss`` is 1 by default. `rows` is the size that the number of rows has in the operator.
    """

    cdef Floating floating
    cdef Shape one_for_each_row
    cdef Number number

    def __init__(self, rows):
        Check.__init__(self, "reduction", "grad_loss")
        self.floating, self.one_for_each_row = Floating("grad_loss"), Shape("grad_loss", rows)
        self.number = Number("grad_loss")

    cdef object bind(self, tuple parameters):
        Check.bind(self, parameters)
        self.floating.bind(parameters)
        self.one_for_each_row.bind(parameters)
        self.number.bind(parameters)

    cdef int run(self, Call call) except -1:
        grad_loss = call.values[self.slots[1]]
        reduction = call.values[self.slots[0]] = known_reduction(call, call.values[self.slots[0]])
        if grad_loss is None:
            call.values[self.slots[1]] = 1.0
            return 0
        if type(grad_loss) is float:
            return 0
        if is_on_device(grad_loss) and cnp.PyArray_NDIM(call.array(self.slots[1])) == 0:
            return self.floating.run(call)  # one number on a device, which is not read, as that would wait
        if is_on_device(grad_loss) and reduction != "none":  # converting it to a number would wait
            call.fail("grad_loss", expected_grad_loss(reduction), f"shape {shape_of(call.array(self.slots[1]))}")
        if (
            reduction == "none" and not isinstance(grad_loss, (str, bytes))
            and cnp.PyArray_NDIM(call.array(self.slots[1]))
        ):
            self.floating.run(call)
            return self.one_for_each_row.run(call)
        call.values[self.slots[1]] = grad_loss  # restored, as messages show the argument that was passed
        return self.number.run_expecting(call, expected_grad_loss(reduction))


# ---- checks of the options of losses ---------------------------------------------------------------------------------


cdef class KnownOutputs(Check):
    """Check that ``outputs`` is a sequence of different names of outputs, and make it a tuple of them."""

    def __init__(self):
        Check.__init__(self, "outputs")

    cdef int run(self, Call call) except -1:
        value = call.values[self.slots[0]]
        if type(value) is tuple and value == ():
            return 0
        expected = f"a tuple of names among {', '.join(map(repr, OUTPUTS))}"
        if not isinstance(value, (tuple, list)):
            call.fail("outputs", expected, arguments.shown(value), ParamTypeError)
        names = tuple(value)
        for name in names:
            if not isinstance(name, str):
                call.fail("outputs", expected, arguments.shown(value), ParamTypeError)
        names = tuple([str(name) for name in names])  # plain str, as names may be of a subclass
        for name in names:
            if name not in OUTPUTS:
                call.fail("outputs", expected, repr(name))
            if names.count(name) > 1:
                call.fail("outputs", "different names", f"{name!r} more than once")
        call.values[self.slots[0]] = names
        return 0


cdef class NumberOrRows(Check):
    """Check that the argument is a number, or an array of a floating dtype with a number for each row.

    `rows` is the size that the number of rows has in the operator; `allowed` is the range of a single number.
    """

    cdef Number number
    cdef Floating floating
    cdef Shape one_for_each_row

    def __init__(self, name, rows, allowed=None):
        Check.__init__(self, name)
        self.number, self.floating, self.one_for_each_row = Number(name, allowed), Floating(name), Shape(name, rows)

    cdef object bind(self, tuple parameters):
        Check.bind(self, parameters)
        self.number.bind(parameters)
        self.floating.bind(parameters)
        self.one_for_each_row.bind(parameters)

    cdef int run(self, Call call) except -1:
        given = call.values[self.slots[0]]
        if type(given) is not float and given is not None and not isinstance(given, (int, str, bytes)):
            if is_on_device(given) or cnp.PyArray_NDIM(call.array(self.slots[0])):
                self.floating.run(call)
                return self.one_for_each_row.run(call)
            call.values[self.slots[0]] = given  # restored, as messages show the argument that was passed
        return self.number.run(call)


# Why a call with dense targets has neither an output nor an upstream gradient of a target.
cdef str _DENSE = "target holds probabilities of all classes"


cdef bint is_dense(Call call) except -1:
    """Return whether the targets of a loss are probabilities of all classes. `Classes` has checked their shape."""
    return dtype_of(call.array(call.operator.array_slots[1 if call.operator.family == LOSSES else 2])) >= 0


cdef class Targets(Check):
    """Check that the target of each row is given, or K of them with probabilities of the same shape, of a floating dtype.

    `rows` is the size that the number of rows has in the operator.
    """

    cdef Floating floating
    cdef Shape one_for_each_row

    def __init__(self, target, target_prob, rows):
        Check.__init__(self, target, target_prob)
        self.floating, self.one_for_each_row = Floating(target_prob), Shape(target, rows)

    cdef object bind(self, tuple parameters):
        Check.bind(self, parameters)
        self.floating.bind(parameters)
        self.one_for_each_row.bind(parameters)

    cdef int run(self, Call call) except -1:
        if dtype_of(call.array(self.slots[0])) >= 0:
            return 0
        if call.values[self.slots[1]] is None:
            self.advise(call)
            return self.one_for_each_row.run(call)
        self.floating.run(call)
        cdef cnp.ndarray target = call.array(self.slots[0]), prob = call.array(self.slots[1])
        cdef bint of_logits = call.operator.family == LOSSES
        cdef tuple shape = shape_of(target), rows = rows_of(call) if of_logits else (call.sizes[BT],)
        cdef bint fits = len(shape) == len(rows) + 1 and shape[:len(rows)] == rows
        if of_logits and not fits:
            expected = f"shape ({', '.join([*map(str, rows), 'K'])}), K entries for each row of input"
            call.fail(self.names[0], expected, shape)
        if of_logits and shape[len(rows)] == 0:
            call.fail(self.names[0], "at least one entry for each row", f"shape {shape}")
        if not fits or shape[len(rows)] == 0:
            call.fail(self.names[0], f"shape (BT = {call.sizes[BT]}, K) with K > 0", shape)
        if not have_same_shape(target, prob):
            call.fail(self.names[1], f"shape {shape} as {self.names[0]} has", shape_of(prob))
        return 0

    cdef int advise(self, Call call) except -1:
        """Refuse targets with one more dimension than the rows, if the likely cause is known."""
        cdef tuple shape = shape_of(call.array(self.slots[0]))
        cdef tuple rows = rows_of(call) if call.operator.family == LOSSES else (call.sizes[BT],)
        if len(shape) != len(rows) + 1 or shape[:len(rows)] != rows:
            return 0
        name, last = self.names[0], shape[len(rows)]
        if last == 1:
            call.fail(name, f"shape {rows}", f"{shape} ({name}.squeeze(-1) has this shape)")
        if last == vocabulary_of(call):
            call.fail(name, f"shape {rows}", f"{shape} (if rows are one-hot, {name}.argmax(-1) gives the classes)")
        call.fail(name, f"shape {rows}, or target_prob with {last} probabilities for each row", shape)


cdef class NothingOfOneTarget(Check):
    """Check that no output of a single target is requested if rows have several, or of any target if they are dense."""

    def __init__(self):
        Check.__init__(self, "target_prob", "outputs")

    cdef int run(self, Call call) except -1:
        outputs = call.values[self.slots[1]]
        if not outputs:
            return 0
        cdef bint has_dense = is_dense(call)
        if call.values[self.slots[0]] is None and not has_dense:
            return 0
        why = _DENSE if has_dense else "target_prob is given"
        for name in outputs:
            if OUTPUTS[name].of_one_target or (has_dense and OUTPUTS[name].is_of_targets):
                call.fail("outputs", f"no output of a single target, as {why}", repr(name))
        return 0


cdef class ZeroProbabilities(Check):
    """Replace the number 0 instead of probabilities of targets by zeros of the targets' shape."""

    def __init__(self, target):
        Check.__init__(self, "target_prob", target)

    cdef int run(self, Call call) except -1:
        if call.values[self.slots[0]] is not None and is_zero(call.values[self.slots[0]]):
            if is_on_device(call.values[self.slots[1]]):
                call.fail("target_prob", "None, as the device's operators compute the loss without it", 0)
            call.values[self.slots[0]] = np.broadcast_to(np.float32(0), shape_of(call.array(self.slots[1])))
        return 0


cdef class NumberOfEachTarget(Check):
    """Check that the argument, if given, has a number for each row, or with ``target_prob`` for each target.

    It is refused with dense targets. `rows` is the size that the number of rows has in the operator.
    """

    cdef Shape one_for_each_row

    def __init__(self, name, target, rows):
        Check.__init__(self, name, target, "target_prob")
        self.one_for_each_row = Shape(name, rows)

    cdef object bind(self, tuple parameters):
        Check.bind(self, parameters)
        self.one_for_each_row.bind(parameters)

    cdef int run(self, Call call) except -1:
        if call.values[self.slots[0]] is None:
            return 0
        cdef cnp.ndarray array = call.array(self.slots[0]), target = call.array(self.slots[1])
        if dtype_of(target) >= 0:
            call.fail(self.names[0], f"None, as {_DENSE}", "an array")
        if call.values[self.slots[2]] is None:
            return self.one_for_each_row.run(call)
        if not have_same_shape(target, array):
            call.fail(self.names[0], f"shape {shape_of(target)} as {self.names[1]} has", shape_of(array))
        return 0


cdef class EntropyForItsGradient(Check):
    """Check that ``entropy`` is given if its upstream gradient is."""

    def __init__(self):
        Check.__init__(self, "entropy", "grad_entropy")

    cdef int run(self, Call call) except -1:
        if call.values[self.slots[0]] is None and call.values[self.slots[1]] is not None:
            call.fail("entropy", "an array, as grad_entropy is given", None, ParamNullptrError)
        return 0


cdef class SomeUpstreamGradient(Check):
    """Check that the loss or one of its outputs has an upstream gradient. ``grad_loss`` is 0 by default."""

    def __init__(self):
        Check.__init__(self, "grad_loss", "grad_lse", "grad_log_prob", "grad_entropy")

    cdef int run(self, Call call) except -1:
        cdef int i
        for i in range(self.count):
            if call.values[self.slots[i]] is not None:
                break
        else:
            call.fail("grad_loss", "an upstream gradient here, or as grad_lse, grad_log_prob or grad_entropy", None)
        if call.values[self.slots[0]] is None:
            call.values[self.slots[0]] = 0.0
        return 0


cdef class PositiveValues(Check):
    """Check that the named argument, if it is on the host, is a positive finite number or an array of them."""

    cdef int run(self, Call call) except -1:
        value = call.values[self.slots[0]]
        if isinstance(value, AbstractDeviceArray):
            return 0
        if type(value) is float:
            if not 0 < <double>value < float("inf"):
                call.fail(self.names[0], "a positive finite number", value)
            return 0
        if call.operator.family == LOSSES:
            value = np.ascontiguousarray(value, np.float64).reshape(-1)
        with np.errstate(all="ignore"):
            wrong = np.flatnonzero(~((value > 0) & (value < np.inf)))
        if wrong.size:
            call.fail(self.names[0], "positive finite numbers", f"{value[wrong[0]]} in row {wrong[0]}")
        return 0


cdef class LeadingDimensions(Check):
    """Merge the dimensions of the rows, as kernels know one: an input (..., H) becomes (BT, H), an array (...) (BT,).

    Parameters
    ----------
    input : str
    rows : str
        The arrays of the rows. Those of targets may have one more dimension, and numbers stay as they are.
    """

    def __init__(self, input, *rows):
        Check.__init__(self, input, *rows)

    cdef int run(self, Call call) except -1:
        cdef cnp.ndarray array = call.array(self.slots[0])
        cdef int i
        # Arrays on devices have two dimensions.
        if cnp.PyArray_NDIM(array) in (0, 2) or not cnp.PyArray_CheckExact(call.values[self.slots[0]]):
            return 0
        cdef tuple leading = shape_of(array)[:-1]
        cdef Py_ssize_t rows = 1, length
        for length in leading:
            rows *= length
        has_several, has_dense = call.operator.slots.get("target_prob"), False
        if has_several is not None:
            has_several, has_dense = call.values[has_several] is not None, is_dense(call)
        for i in range(1, self.count):
            is_of_targets = self.names[i].startswith("target") or self.names[i] == "grad_log_prob"
            has_further = (has_several and is_of_targets) or (has_dense and self.names[i] == "target")
            self.merge(call, i, leading, rows, 1 if has_further else 0)
        call.values[self.slots[0]] = array.reshape((rows, cnp.PyArray_DIM(array, cnp.PyArray_NDIM(array) - 1)))
        call.leading = leading
        return 0

    cdef int merge(self, Call call, int i, tuple leading, Py_ssize_t rows, int further) except -1:
        """Merge the dimensions of the rows of one array, which has this number of further dimensions."""
        cdef object value = call.values[self.slots[i]]
        if value is None or isinstance(value, (int, float, str, bytes)) or is_on_device(value):
            return 0
        cdef cnp.ndarray array = call.array(self.slots[i])
        cdef tuple shape = shape_of(array)
        if not shape and self.names[i] in ("temperature", "grad_loss"):
            call.values[self.slots[i]] = value  # a number, which messages show as it was passed
            return 0
        if len(shape) != len(leading) + further or shape[:len(leading)] != leading:
            expected = f"({', '.join([*map(str, leading), *['K'] * further])}{',' if len(leading) + further == 1 else ''})"
            call.fail(self.names[i], f"shape {expected}, that of {self.names[0]} without its last dimension", shape)
        call.values[self.slots[i]] = array.reshape((rows, *shape[len(leading):]))
        return 0


# ---- checks of targets -----------------------------------------------------------------------------------------------


cdef class Classes(Check):
    """Check that the named array has an integer dtype. Others than int32 and int64 are converted to int64.

    With `allows_dense`, an array of a floating dtype with the shape of the logits is allowed, too, without `target_prob`:
    dense targets.
    """

    cdef bint allows_dense

    def __init__(self, name, *, allows_dense=False):
        Check.__init__(self, name)
        self.allows_dense = allows_dense

    cdef int run(self, Call call) except -1:
        cdef cnp.ndarray array = call.array(self.slots[0])
        if cnp.PyArray_ISSIGNED(array) and cnp.PyArray_ISINTEGER(array) and cnp.PyArray_ITEMSIZE(array) >= 4:
            return 0
        cdef cnp.dtype dtype = array.dtype
        cdef bint is_here = cnp.PyArray_CheckExact(call.values[self.slots[0]])
        cdef bint has_prob = self.allows_dense and call.values[<int>call.operator.slots["target_prob"]] is not None
        if dtype_of(array) >= 0 and is_here and self.allows_dense and not has_prob and self.has_logits_shape(call, array):
            return 0
        if dtype.kind not in "iu" or not is_here:
            advice = f" ({self.names[0]}.astype(numpy.int64) makes classes of it)" if dtype.kind in "fb" and is_here else ""
            expected = "an integer dtype" if is_here else "dtype int32 or int64"
            if has_prob and dtype_of(array) >= 0:
                expected, advice = f"{expected}, as target_prob is given", ""
            call.fail(self.names[0], expected, f"{dtype}{advice}", ParamTypeError)
        if dtype.kind == "u" and cnp.PyArray_ITEMSIZE(array) == 8 and cnp.PyArray_SIZE(array):
            largest = int(array.max())
            if largest > arguments.MAX_INDEX:
                call.fail(self.names[0], "vocabulary entries", largest)
        call.values[self.slots[0]] = array.astype(np.int64)
        return 0

    cdef bint has_logits_shape(self, Call call, cnp.ndarray target) except -1:
        """Return whether targets have the shape of the logits. Refuse them if they have the number of its dimensions."""
        cdef cnp.ndarray first = call.array(call.operator.array_slots[0]), weight
        cdef tuple shape = shape_of(first)
        if call.operator.family != LOSSES and shape:
            weight = call.array(call.operator.array_slots[1])
            if cnp.PyArray_NDIM(weight) != 2:
                return True  # a later check refuses the weight
            shape = shape[:len(shape) - 1] + (cnp.PyArray_DIM(weight, 0),)
        if shape_of(target) == shape:
            return True
        if cnp.PyArray_NDIM(target) == cnp.PyArray_NDIM(first):
            expected = f"shape {shape}, as floating targets are probabilities of all classes"
            call.fail(self.names[0], expected, shape_of(target))
        return False


cdef class TargetsInRange(Check):
    """Check that ``masked_target`` is a row of weight wherever ``target_mask`` is 0."""

    def __init__(self):
        Check.__init__(self, "masked_target", "target_mask")

    cdef int run(self, Call call) except -1:
        if call.device_id >= 0:
            targets_there, mask_there = call.values[self.slots[0]], call.values[self.slots[1]]
            if isinstance(targets_there, AbstractDeviceArray) and (
                not targets_there.IS_READ or targets_there.is_known_below(call.sizes[V], mask_there)
            ):
                return 0
        cdef cnp.ndarray target = call.host_vector(self.slots[0], call.sizes[BT]), mask = None
        cdef const uint8_t *masked = NULL
        cdef bint is_wide = cnp.PyArray_ITEMSIZE(target) == 8, is_packed = False
        cdef const void *targets = cnp.PyArray_DATA(target)
        cdef Py_ssize_t i
        cdef int64_t each, vocabulary = call.sizes[V]
        cdef double last = 0
        for i in range(call.sizes[BT]):
            each = (<const int64_t *>targets)[i] if is_wide else (<const int32_t *>targets)[i]
            if each < 0 or each >= vocabulary:
                if mask is None:
                    is_packed = cnp.PyArray_TYPE(call.array(self.slots[1])) != cnp.NPY_BOOL
                    mask = call.host_vector(self.slots[1], (call.sizes[BT] + 7) // 8 if is_packed else call.sizes[BT])
                    masked = <const uint8_t *>cnp.PyArray_DATA(mask)
                if not (masked[i // 8] >> (i % 8) & 1 if is_packed else masked[i]):
                    expected = f"values in [0, {vocabulary}) wherever target_mask is 0"
                    call.fail("masked_target", expected, f"{each} in row {i}")
            if i % ROWS_PER_CHECK == 0:
                _tasks.check_signals(&last)
        return 0


cdef class TargetsInTheVocabulary(Check):
    """Check that targets are vocabulary entries or ``ignore_index``. A row may have several targets.

    The entries are the rows of a linear layer's weight, the first of which has the id ``vocab_start_index``, or the elements
    of a row of logits. A call on logits gets a copy of the targets, since they are places in memory, which another thread
    must not change later.
    """

    def __init__(self, vocab_start_index=None):
        Check.__init__(self, "target", "ignore_index", *([] if vocab_start_index is None else [vocab_start_index]))

    cdef int run(self, Call call) except -1:
        given = call.values[self.slots[0]]
        cdef bint of_logits = call.operator.family == LOSSES
        if is_dense(call):
            return 0
        if isinstance(given, AbstractDeviceArray) and (of_logits or not given.IS_READ):
            return 0  # no device computes losses of logits
        cdef cnp.ndarray target = call.array(self.slots[0])
        cdef Py_ssize_t columns = 1
        if of_logits:
            target = call.values[self.slots[0]] = np.array(target, target.dtype.newbyteorder("="), order="C")
        elif cnp.PyArray_NDIM(target) == 2:
            columns = cnp.PyArray_DIM(target, 1)
            target = native_vector(given if cnp.PyArray_CheckExact(given) else host_values(given))
        else:
            target = call.host_vector(self.slots[0], call.sizes[BT])
        cdef bint is_wide = cnp.PyArray_ITEMSIZE(target) == 8, is_wrong
        cdef const void *targets = cnp.PyArray_DATA(target)
        cdef Py_ssize_t begin = 0, i, count = cnp.PyArray_SIZE(target)
        if not of_logits:
            count = min(count, call.sizes[BT] * columns)
        cdef int64_t start = call.values[self.slots[2]] if self.count > 2 else 0
        cdef int64_t each, entries = vocabulary_of(call), ignored = call.values[self.slots[1]]
        cdef double last = 0
        while begin < count:
            is_wrong = False
            for i in range(begin, min(begin + ROWS_PER_CHECK, count)):
                each = (<const int64_t *>targets)[i] if is_wide else (<const int32_t *>targets)[i]
                # An unsigned difference does not overflow. It is large if the target is below the first entry.
                is_wrong |= (<uint64_t>each - <uint64_t>start >= <uint64_t>entries) & (each != ignored)
            if is_wrong:
                self.refuse_first(call, target, start, entries, columns)
            begin += ROWS_PER_CHECK
            _tasks.check_signals(&last)
        return 0

    cdef int refuse_first(
        self, Call call, cnp.ndarray target, object start, object entries, Py_ssize_t columns
    ) except -1:
        """Refuse the call because of its first wrong target."""
        ignored = call.values[self.slots[1]]
        wrong = int(np.flatnonzero(((target < start) | (target >= start + entries)) & (target != ignored))[0])
        place = f"in row {wrong // columns}"
        if call.operator.family == LOSSES:
            place = f"at index {tuple([int(index) for index in np.unravel_index(wrong, shape_of(target))])}"
        return call.fail("target", f"values in [{start}, {start + entries}) or {ignored}", f"{target.flat[wrong]} {place}")
