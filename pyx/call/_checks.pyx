"""Checks of calls, compiled as they are part of every call. `contract` lists the checks of each operator, in order.

A check reads the values of the parameters that it names. It replaces them by the form that backends take: array-likes
by arrays, other numbers by Python's own. Messages are formatted only on failure.
"""

import numpy as np

cimport numpy as cnp
from libc.stdint cimport int32_t, int64_t, uint8_t, uint64_t

from ascend_grad cimport _tasks
from ascend_grad._array_types cimport NUMPY, ArrayType, array_type, is_on_device
from ascend_grad._call cimport (
    BT, H, K, LOSS, LOSS_GRADIENT, TOP_K, V, Call, Check, native_dtype, native_vector, shape_of, size_names,
    size_numbers
)
from ascend_grad._dtypes cimport dtype_of
from ascend_grad._kernels cimport AG_FLOAT32, AG_FLOAT64, ag_dtype
from ascend_grad._linear_schedule cimport least_workspace_of_sizes

from . import arguments
from ._dtypes import FLOATING_DTYPES
from .arrays import FLOATING_NAMES, AbstractDeviceArray, host_values
from .errors import ParamNullptrError, ParamTypeError

cnp.import_array()

cdef extern from "Python.h":
    long long PyLong_AsLongLongAndOverflow(object number, int *overflow) except? -1

cdef tuple _floating = FLOATING_DTYPES  # in the order of ag_dtype

cdef enum:
    ROWS_PER_CHECK = 1 << 18  # targets compared between two checks for signals


cdef bint is_index(cnp.ndarray array) noexcept:
    """Return whether the dtype is int32 or int64."""
    return cnp.PyArray_ISSIGNED(array) and cnp.PyArray_ITEMSIZE(array) in (4, 8)


cdef inline bint have_same_shape(cnp.ndarray a, cnp.ndarray b) noexcept:
    cdef int axis, rank = cnp.PyArray_NDIM(a)
    if cnp.PyArray_NDIM(b) != rank:
        return False
    for axis in range(rank):
        if cnp.PyArray_DIMS(a)[axis] != cnp.PyArray_DIMS(b)[axis]:
            return False
    return True


# ---- checks of any operator ------------------------------------------------------------------------------------------


cdef class NotNone(Check):
    """Check that no required array is None."""

    cdef int run(self, Call call) except -1:
        cdef int i
        for i in range(call.operator.array_count):
            if call.values[call.operator.array_slots[i]] is None:
                call.fail(call.operator.array_names[i], "an array", None, ParamNullptrError)
        return 0


cdef class Floating(Check):
    """Check that the named arrays have the same floating dtype, in any byte order."""

    cdef int run(self, Call call) except -1:
        cdef int i, number, first = -1
        cdef cnp.ndarray array
        for i in range(self.count):
            array = call.array(self.slots[i])
            number = dtype_of(array)
            if number < 0:
                call.fail(self.names[i], f"dtype {FLOATING_NAMES}", array.dtype, ParamTypeError)
            if first < 0:
                first = number
            elif number != first:
                expected = f"dtype {_floating[first]} as {self.names[0]} has"
                call.fail(self.names[i], expected, array.dtype, ParamTypeError)
        return 0


cdef class Boolean(Check):
    """Check that the named array has dtype bool."""

    cdef int run(self, Call call) except -1:
        cdef cnp.ndarray array = call.array(self.slots[0])
        if cnp.PyArray_TYPE(array) != cnp.NPY_BOOL:
            call.fail(self.names[0], "dtype bool", array.dtype, ParamTypeError)
        return 0


cdef class RealNumber(Check):
    """Check that the argument is one real number. NaN and infinities are allowed, truth values are not."""

    cdef int run(self, Call call) except -1:
        return self.run_expecting(call, "a real number")

    cdef int run_expecting(self, Call call, str expected) except -1:
        """Run the check. `expected` describes in the error what the argument should be."""
        value = call.values[self.slots[0]]
        if type(value) is not float:
            call.ran_others = True
            call.values[self.slots[0]] = arguments.real_number(value, self.names[0], call.operator.name, expected)
        return 0


cdef class DimInRange(Check):
    """Check that ``dim`` is an axis of the named array, and make it non-negative. Rank 0 counts as rank 1."""

    def __init__(self, name):
        Check.__init__(self, name, "dim")

    cdef int run(self, Call call) except -1:
        # This check may run before the checks of dtypes, so the first argument may be of any type.
        cdef object first = call.values[self.slots[0]], dim = call.values[self.slots[1]]
        cdef long long rank = 1, axis
        cdef int overflow = 0
        cdef ArrayType kind
        if cnp.PyArray_CheckExact(first):
            rank = cnp.PyArray_NDIM(<cnp.ndarray>first)
        elif isinstance(first, AbstractDeviceArray):
            rank = first.ndim
        else:
            kind = array_type(first, self.names[0], call.operator.name)
            if kind is None or kind is NUMPY:
                rank = arguments.any_array(first, self.names[0], call.operator.name).ndim
            else:
                rank = cnp.PyArray_NDIM(call.array(self.slots[0]))
        if rank == 0:
            rank = 1
        if type(dim) is not int:
            call.ran_others = True
            dim = call.values[self.slots[1]] = arguments.integer(dim, "dim", call.operator.name)
        axis = PyLong_AsLongLongAndOverflow(dim, &overflow)
        if overflow or not -rank <= axis < rank:
            call.fail("dim", f"a value in [{-rank}, {rank - 1}]", arguments.shown(dim))
        if axis < 0:
            axis += rank
            call.values[self.slots[1]] = axis
        call.axis = <int>axis
        return 0


cdef class SameShape(Check):
    """Check that the second array has the shape of the first."""

    cdef int run(self, Call call) except -1:
        cdef cnp.ndarray first = call.array(self.slots[0]), second = call.array(self.slots[1])
        if not have_same_shape(first, second):
            call.fail(self.names[1], f"shape {shape_of(first)} as {self.names[0]} has", shape_of(second))
        return 0


cdef class RankAtMost(Check):
    """Check that the named array has at most `limit` dimensions."""

    cdef int limit

    def __init__(self, name, int limit):
        Check.__init__(self, name)
        self.limit = limit

    cdef int run(self, Call call) except -1:
        cdef int rank = cnp.PyArray_NDIM(call.array(self.slots[0]))
        if rank > self.limit:
            call.fail(self.names[0], f"rank 0 to {self.limit}", f"rank {rank}")
        return 0


cdef class RankExactly(Check):
    """Check that the named array has exactly `rank` dimensions."""

    cdef int rank

    def __init__(self, name, int rank):
        Check.__init__(self, name)
        self.rank = rank

    cdef int run(self, Call call) except -1:
        cdef int rank = cnp.PyArray_NDIM(call.array(self.slots[0]))
        if rank != self.rank:
            call.fail(self.names[0], f"rank {self.rank}", f"rank {rank}")
        return 0


cdef class MaskCovers(Check):
    """Check that the mask of an array (B, N, S1, S2) has the shape (B or 1, N or 1, S1, S2)."""

    cdef int run(self, Call call) except -1:
        cdef cnp.ndarray array = call.array(self.slots[0]), mask = call.array(self.slots[1])
        cdef cnp.npy_intp *shape = cnp.PyArray_DIMS(array)
        cdef cnp.npy_intp *own = cnp.PyArray_DIMS(mask)
        cdef int axis
        for axis in range(4):
            if own[axis] != shape[axis] and (axis > 1 or own[axis] != 1):
                first, second = ["1" if shape[i] == 1 else f"{shape[i]} or 1" for i in range(2)]
                call.fail(self.names[1], f"shape ({first}, {second}, {shape[2]}, {shape[3]})", shape_of(mask))
        return 0


cdef class NoTriuMask(Check):
    """Check that ``fix_triu_mask`` is False."""

    def __init__(self):
        Check.__init__(self, "fix_triu_mask")

    cdef int run(self, Call call) except -1:
        value = call.values[self.slots[0]]
        if value is False:
            return 0
        if not isinstance(value, (bool, np.bool_)):
            call.fail("fix_triu_mask", "False", arguments.shown(value), ParamTypeError)
        if value:
            call.fail("fix_triu_mask", "False (a generated triangular mask is not supported)", True)
        return 0


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


cdef class Float32OrFloat64(Check):
    """Check that the named array has dtype float32 or float64, the dtypes of sums."""

    cdef int run(self, Call call) except -1:
        cdef cnp.ndarray array = call.array(self.slots[0])
        if dtype_of(array) not in (AG_FLOAT32, AG_FLOAT64):
            call.fail(self.names[0], "dtype float32 or float64", array.dtype, ParamTypeError)
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


cdef class BitsOrBooleans(Check):
    """Check that the named array has dtype bool or uint8."""

    cdef int run(self, Call call) except -1:
        cdef cnp.ndarray array = call.array(self.slots[0])
        if cnp.PyArray_TYPE(array) not in (cnp.NPY_BOOL, cnp.NPY_UINT8):
            call.fail(self.names[0], "dtype bool, or uint8 with eight rows to a byte", array.dtype, ParamTypeError)
        return 0


cdef class Int32OrInt64(Check):
    """Check that the named array has dtype int32 or int64, the dtypes of targets."""

    cdef int run(self, Call call) except -1:
        cdef cnp.ndarray array = call.array(self.slots[0])
        if not is_index(array):
            call.fail(self.names[0], "dtype int32 or int64", array.dtype, ParamTypeError)
        return 0


cdef class Shape(Check):
    """Check that an array, if given, has the named dimensions, with the sizes that earlier arrays have.

    The call records sizes that no earlier array has.
    """

    cdef tuple dims

    def __init__(self, name, *dims):
        Check.__init__(self, name)
        self.dims = tuple([size_numbers[dim] for dim in dims])

    cdef int run(self, Call call) except -1:
        if call.values[self.slots[0]] is None:
            return 0
        cdef cnp.ndarray array = call.array(self.slots[0])
        cdef int axis, size, rank = <int>len(self.dims)
        cdef bint fits = cnp.PyArray_NDIM(array) == rank
        if fits:
            for axis in range(rank):
                size = self.dims[axis]
                fits = fits and (call.sizes[size] < 0 or call.sizes[size] == cnp.PyArray_DIM(array, axis))
        if not fits:
            names = [(size_names[each], call.sizes[<int>each]) for each in self.dims]
            expected = ", ".join([f"{name} = {known}" if known >= 0 else name for name, known in names])
            call.fail(self.names[0], f"shape ({expected})", shape_of(array))
        for axis in range(rank):
            call.sizes[<int>self.dims[axis]] = cnp.PyArray_DIM(array, axis)
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
        return 0


cdef class NonemptyVocabulary(Check):
    """Check that the named weight has at least one row."""

    cdef int run(self, Call call) except -1:
        if call.sizes[V] == 0:
            call.fail(self.names[0], "at least one row", shape_of(call.array(self.slots[0])))
        return 0


cdef class NoLabelSmoothing(RealNumber):
    """Check that ``label_smoothing`` is 0."""

    def __init__(self):
        Check.__init__(self, "label_smoothing")

    cdef int run(self, Call call) except -1:
        RealNumber.run(self, call)
        value = call.values[self.slots[0]]
        if <double>value != 0:
            call.fail("label_smoothing", "0 (smoothing is not supported)", value)
        return 0


cdef class TrueOrFalse(Check):
    """Check that the argument is a bool."""

    cdef int run(self, Call call) except -1:
        value = call.values[self.slots[0]]
        if value is not True and value is not False:
            call.values[self.slots[0]] = arguments.truth_value(value, self.names[0], call.operator.name)
        return 0


cdef object integer_between(Call call, int slot, object low, object high):
    """Check that the argument is an integer from low to high, and return it as an int."""
    name = call.operator.parameters[slot]
    index = call.values[slot]
    if type(index) is not int:
        call.ran_others = True
        index = call.values[slot] = arguments.integer(index, name, call.operator.name)
    if not low <= index <= high:
        call.fail(name, f"an int in [{low}, {high}]", arguments.shown(index))
    return index


cdef class IntegerFrom(Check):
    """Check that the argument is an integer that is at least `low`."""

    cdef object low

    def __init__(self, name, low):
        Check.__init__(self, name)
        self.low = low

    cdef int run(self, Call call) except -1:
        integer_between(call, self.slots[0], self.low, arguments.MAX_INDEX)
        return 0


cdef class VocabularyStart(Check):
    """Check that ``vocab_start_index`` is an integer from 0 on, and that the last vocabulary entry fits int64."""

    def __init__(self):
        Check.__init__(self, "vocab_start_index")

    cdef int run(self, Call call) except -1:
        integer_between(call, self.slots[0], 0, arguments.MAX_INDEX - max(call.sizes[V] - 1, 0))
        return 0


cdef class CountOfEntries(Check):
    """Check that the argument is an integer from 1 to `most`, and at most the size of the vocabulary."""

    cdef Py_ssize_t most

    def __init__(self, name, Py_ssize_t most):
        Check.__init__(self, name)
        self.most = most

    cdef int run(self, Call call) except -1:
        call.sizes[K] = integer_between(call, self.slots[0], 1, min(self.most, call.sizes[V]))
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
        call.ran_others = True
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


cdef int check_workspace(Call call, int slot, object least) except -1:
    """Check that ``workspace_bytes`` is None or enough: at least `least`, and the least workspace of the problem."""
    if call.values[slot] is not None:
        integer_between(call, slot, max(least, least_workspace(call)), arguments.MAX_INDEX)
    return 0


cdef class Workspace(Check):
    """Check that ``workspace_bytes`` is None or enough."""

    cdef public object least

    def __init__(self, least):
        Check.__init__(self, "workspace_bytes")
        self.least = least

    cdef int run(self, Call call) except -1:
        return check_workspace(call, self.slots[0], self.least)


cdef class WorkspaceAndFilter(Check):
    """Check that ``workspace_bytes`` is None or enough, and that ``filter_eps`` is finite and not negative.

    Enough is at least `least`, and the least workspace of the problem.
    """

    cdef public object least

    def __init__(self, least):
        Check.__init__(self, "workspace_bytes", "filter_eps")
        self.least = least

    cdef int run(self, Call call) except -1:
        check_workspace(call, self.slots[0], self.least)
        value = call.values[self.slots[1]]
        if type(value) is not float:
            call.ran_others = True
            value = call.values[self.slots[1]] = arguments.real_number(value, "filter_eps", call.operator.name)
        if not 0 <= <double>value < float("inf"):
            call.fail("filter_eps", "a finite number that is not negative", value)
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


cdef class ReductionAndItsGradient(Check):
    """Check that ``reduction`` is known, and that ``grad_loss`` fits: a number, or a vector of BT without a reduction.

    ``grad_loss`` is 1 by default.
    """

    cdef Floating floating
    cdef Shape one_for_each_row
    cdef RealNumber number

    def __init__(self):
        Check.__init__(self, "reduction", "grad_loss")
        self.floating, self.one_for_each_row = Floating("grad_loss"), Shape("grad_loss", "BT")
        self.number = RealNumber("grad_loss")

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


cdef class FloatingIfGiven(Check):
    """Check that the named array, if given, has a floating dtype."""

    cdef int run(self, Call call) except -1:
        if call.values[self.slots[0]] is None:
            return 0
        cdef cnp.ndarray array = call.array(self.slots[0])
        if dtype_of(array) < 0:
            call.fail(self.names[0], f"dtype {FLOATING_NAMES}", array.dtype, ParamTypeError)
        return 0


cdef class FiniteNumber(RealNumber):
    """Check that the argument is a finite number."""

    cdef int run(self, Call call) except -1:
        RealNumber.run(self, call)
        value = call.values[self.slots[0]]
        if not -float("inf") < <double>value < float("inf"):
            call.fail(self.names[0], "a finite number", value)
        return 0


cdef class Fraction(RealNumber):
    """Check that the argument is a number from 0 to 1."""

    cdef int run(self, Call call) except -1:
        RealNumber.run(self, call)
        value = call.values[self.slots[0]]
        if not 0 <= <double>value <= 1:
            call.fail(self.names[0], "a number in [0, 1]", value)
        return 0


cdef class PositiveNumber(RealNumber):
    """Check that the argument is a positive finite number."""

    cdef int run(self, Call call) except -1:
        RealNumber.run(self, call)
        value = call.values[self.slots[0]]
        if not 0 < <double>value < float("inf"):
            call.fail(self.names[0], "a positive finite number", value)
        return 0


cdef class PositiveNumberIfGiven(PositiveNumber):
    """Check that the argument is None or a positive finite number."""

    cdef int run(self, Call call) except -1:
        return 0 if call.values[self.slots[0]] is None else PositiveNumber.run(self, call)


cdef class KnownOutputs(Check):
    """Check that ``outputs`` is a sequence of different names of outputs, and make it a tuple of them."""

    def __init__(self):
        Check.__init__(self, "outputs")

    cdef int run(self, Call call) except -1:
        value = call.values[self.slots[0]]
        if type(value) is tuple and value == ():
            return 0
        expected = f"a tuple of names among {', '.join(map(repr, arguments.OUTPUTS))}"
        if not isinstance(value, (tuple, list)):
            call.fail("outputs", expected, arguments.shown(value), ParamTypeError)
        names = tuple(value)
        for name in names:
            if not isinstance(name, str):
                call.fail("outputs", expected, arguments.shown(value), ParamTypeError)
        names = tuple([str(name) for name in names])  # plain str, as names may be of a subclass
        for name in names:
            if name not in arguments.OUTPUTS:
                call.fail("outputs", expected, repr(name))
            if names.count(name) > 1:
                call.fail("outputs", "different names", f"{name!r} more than once")
        call.values[self.slots[0]] = names
        return 0


cdef class NumberOrVector(Check):
    """Check that the argument is a positive finite number, or a vector of BT of a floating dtype."""

    cdef PositiveNumber number
    cdef FloatingIfGiven floating
    cdef Shape one_for_each_row

    def __init__(self, name):
        Check.__init__(self, name)
        self.number, self.floating = PositiveNumber(name), FloatingIfGiven(name)
        self.one_for_each_row = Shape(name, "BT")

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


cdef class TargetsWithProbabilities(Check):
    """Check that the second array, if given, has a floating dtype, and that both have the same shape of BT rows.

    Without the second array the first one is a vector of BT.
    """

    cdef Shape vector

    def __init__(self, target, target_prob):
        Check.__init__(self, target, target_prob)
        self.vector = Shape(target, "BT")

    cdef object bind(self, tuple parameters):
        Check.bind(self, parameters)
        self.vector.bind(parameters)

    cdef int run(self, Call call) except -1:
        if call.values[self.slots[1]] is None:
            return self.vector.run(call)
        cdef cnp.ndarray target = call.array(self.slots[0]), prob = call.array(self.slots[1])
        if dtype_of(prob) < 0:
            call.fail(self.names[1], f"dtype {FLOATING_NAMES}", prob.dtype, ParamTypeError)
        if (
            cnp.PyArray_NDIM(target) != 2 or cnp.PyArray_DIM(target, 0) != call.sizes[BT]
            or cnp.PyArray_DIM(target, 1) == 0
        ):
            call.fail(self.names[0], f"shape (BT = {call.sizes[BT]}, K) with K > 0", shape_of(target))
        if not have_same_shape(target, prob):
            call.fail(self.names[1], f"shape {shape_of(target)} as {self.names[0]} has", shape_of(prob))
        return 0


cdef class NoOutputOfSeveralTargets(Check):
    """Check that outputs that need a single target are not requested if rows have several."""

    def __init__(self):
        Check.__init__(self, "target_prob", "outputs")

    cdef int run(self, Call call) except -1:
        if call.values[self.slots[0]] is None:
            return 0
        for name in ("log_prob", "correct"):
            if name in call.values[self.slots[1]]:
                call.fail("outputs", "no output of a single target, as target_prob is given", repr(name))
        return 0


cdef class EntropyForItsGradient(Check):
    """Check that ``entropy`` is given if its upstream gradient is."""

    def __init__(self):
        Check.__init__(self, "entropy", "grad_entropy")

    cdef int run(self, Call call) except -1:
        if call.values[self.slots[0]] is None and call.values[self.slots[1]] is not None:
            call.fail("entropy", "an array, as grad_entropy is given", None, ParamNullptrError)
        return 0


cdef class NoLogProbOfSeveralTargets(Check):
    """Check that there is no gradient of a single target's log-probability if rows have several targets."""

    def __init__(self):
        Check.__init__(self, "target_prob", "grad_log_prob")

    cdef int run(self, Call call) except -1:
        if call.values[self.slots[0]] is not None and call.values[self.slots[1]] is not None:
            call.fail("grad_log_prob", "None, as target_prob is given", "an array")
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
    """Check that the named argument, if it is a vector on the host, has positive finite elements."""

    cdef int run(self, Call call) except -1:
        value = call.values[self.slots[0]]
        if type(value) is float or isinstance(value, AbstractDeviceArray):
            return 0
        with np.errstate(all="ignore"):
            wrong = np.flatnonzero(~((value > 0) & (value < np.inf)))
        if wrong.size:
            call.fail(self.names[0], "positive finite numbers", f"{value[wrong[0]]} in row {wrong[0]}")
        return 0


# ---- checks of the cross-entropy of rows -----------------------------------------------------------------------------


cdef tuple rows_of(Call call, int slot):
    """Return the shape of the rows of an array: its own without the axis `dim`."""
    cdef cnp.ndarray array = call.array(slot)
    return tuple([cnp.PyArray_DIM(array, axis) for axis in range(cnp.PyArray_NDIM(array)) if axis != call.axis])


cdef class TargetsOfRows(Check):
    """Check that ``target`` has an entry for each row of ``input``, or K entries with ``target_prob``, and that V > 0."""

    def __init__(self):
        Check.__init__(self, "input", "target", "target_prob")

    cdef int run(self, Call call) except -1:
        cdef cnp.ndarray input = call.array(self.slots[0]), target = call.array(self.slots[1]), prob
        cdef tuple rows = rows_of(call, self.slots[0]), shape = shape_of(target)
        if call.values[self.slots[2]] is None:
            if shape != rows:
                call.fail("target", f"shape {rows}, that of input without dim {call.axis}", shape)
        else:
            prob = call.array(self.slots[2])
            if len(shape) != len(rows) + 1 or shape[:len(rows)] != rows:
                expected = f"shape ({', '.join([*map(str, rows), 'K'])}), K entries for each row of input"
                call.fail("target", expected, shape)
            if shape[len(rows)] == 0:
                call.fail("target", "at least one entry for each row", f"shape {shape}")
            if not have_same_shape(target, prob):
                call.fail("target_prob", f"shape {shape} as target has", shape_of(prob))
        if cnp.PyArray_NDIM(input) and cnp.PyArray_DIM(input, call.axis) == 0 and 0 not in rows:
            call.fail("input", f"at least one element along dim {call.axis}", f"shape {shape_of(input)}")
        return 0


cdef class ArrayOfRows(FloatingIfGiven):
    """Check that the named array, if given, has a floating dtype, and a number for each row of ``input``."""

    def __init__(self, name):
        Check.__init__(self, name, "input")

    cdef int run(self, Call call) except -1:
        FloatingIfGiven.run(self, call)
        if call.values[self.slots[0]] is None:
            return 0
        cdef tuple rows = rows_of(call, self.slots[1]), shape = shape_of(call.array(self.slots[0]))
        if shape != rows:
            call.fail(self.names[0], f"shape {rows}, that of input without dim {call.axis}", shape)
        return 0


cdef class NumberOrArrayOfRows(ArrayOfRows):
    """Check that the argument is one number, or has one for each row of ``input``. Values are checked elsewhere."""

    cdef RealNumber number

    def __init__(self, name):
        ArrayOfRows.__init__(self, name)
        self.number = RealNumber(name)

    cdef object bind(self, tuple parameters):
        Check.bind(self, parameters)
        self.number.bind(parameters)

    cdef bint is_number(self, Call call) except -1:
        """Return whether the argument has no axes. The argument itself is kept, as messages show it."""
        value = call.values[self.slots[0]]
        if type(value) is float or isinstance(value, (str, bytes)):
            return True
        if cnp.PyArray_NDIM(call.array(self.slots[0])):
            return False
        call.values[self.slots[0]] = value
        return True

    cdef int run(self, Call call) except -1:
        if self.is_number(call):
            return self.number.run(call)
        return ArrayOfRows.run(self, call)


cdef class ReductionOfRows(NumberOrArrayOfRows):
    """Check ``reduction``, and that ``grad_loss`` is a number or, without a reduction, has one for each row.

    ``grad_loss`` is 1 by default.
    """

    def __init__(self):
        Check.__init__(self, "grad_loss", "input", "reduction")
        self.number = RealNumber("grad_loss")

    cdef int run(self, Call call) except -1:
        reduction = call.values[self.slots[2]] = known_reduction(call, call.values[self.slots[2]])
        if call.values[self.slots[0]] is None:
            call.values[self.slots[0]] = 1.0
        if type(call.values[self.slots[0]]) is float:  # as by default, without the text of an error
            return 0
        if reduction != "none":
            return self.number.run_expecting(call, expected_grad_loss(reduction))
        return NumberOrArrayOfRows.run(self, call)


cdef class ClassWeights(FloatingIfGiven):
    """Check that ``class_weight``, if given, has a floating dtype, and a number for each element of a row of ``input``."""

    def __init__(self):
        Check.__init__(self, "class_weight", "input")

    cdef int run(self, Call call) except -1:
        FloatingIfGiven.run(self, call)
        if call.values[self.slots[0]] is None:
            return 0
        cdef cnp.ndarray input = call.array(self.slots[1])
        cdef tuple shape = shape_of(call.array(self.slots[0]))
        expected = cnp.PyArray_DIM(input, call.axis) if cnp.PyArray_NDIM(input) else 1
        if shape != (expected,):
            call.fail("class_weight", f"shape ({expected},), an entry for each class", shape)
        return 0


cdef class PositiveElements(NumberOrArrayOfRows):
    """Check that the argument is a positive finite number, or an array of them."""

    cdef int run(self, Call call) except -1:
        value = call.values[self.slots[0]]
        cdef cnp.ndarray values
        if isinstance(value, AbstractDeviceArray):  # no device computes the call, so the values do not matter
            return 0
        if not cnp.PyArray_CheckExact(value):
            if not 0 < <double>value < float("inf"):
                call.fail(self.names[0], "a positive finite number", value)
            return 0
        values = np.ascontiguousarray(value, np.float64)
        bad = np.flatnonzero(~((values > 0) & (values < float("inf"))))
        if bad.size:
            call.fail(self.names[0], "positive finite numbers", f"{values.flat[bad[0]]} in row {bad[0]}")
        return 0


cdef class TargetsInTheRow(Check):
    """Check that targets are elements of a row of ``input``, or ``ignore_index``.

    The call gets a copy of the targets, since they are places in memory, which another thread must not change later.
    """

    def __init__(self):
        Check.__init__(self, "target", "input", "ignore_index")

    cdef int run(self, Call call) except -1:
        cdef cnp.ndarray input = call.array(self.slots[1]), target = call.array(self.slots[0])
        cdef int64_t each, end = cnp.PyArray_DIM(input, call.axis) if cnp.PyArray_NDIM(input) else 1
        cdef int64_t ignored = call.values[self.slots[2]]
        if isinstance(call.values[self.slots[0]], AbstractDeviceArray):  # no device computes the call
            return 0
        target = np.array(target, target.dtype.newbyteorder("="), order="C")
        cdef bint is_wide = cnp.PyArray_ITEMSIZE(target) == 8
        cdef const void *targets = cnp.PyArray_DATA(target)
        cdef Py_ssize_t begin = 0, i, count = cnp.PyArray_SIZE(target)
        cdef bint is_wrong
        cdef double last = 0
        while begin < count:
            is_wrong = False
            for i in range(begin, min(begin + ROWS_PER_CHECK, count)):
                each = (<const int64_t *>targets)[i] if is_wide else (<const int32_t *>targets)[i]
                is_wrong |= (<uint64_t>each >= <uint64_t>end) & (each != ignored)
            if is_wrong:
                self.refuse_first(call, target)
            begin += ROWS_PER_CHECK
            _tasks.check_signals(&last)
        call.values[self.slots[0]] = target
        return 0

    cdef int refuse_first(self, Call call, cnp.ndarray target) except -1:
        """Refuse the call because of its first wrong target."""
        cdef cnp.ndarray input = call.array(self.slots[1])
        end = cnp.PyArray_DIM(input, call.axis) if cnp.PyArray_NDIM(input) else 1
        ignored = call.values[self.slots[2]]
        wrong = np.flatnonzero(((target < 0) | (target >= end)) & (target != ignored))[0]
        place = tuple([int(index) for index in np.unravel_index(wrong, shape_of(target))])
        return call.fail("target", f"values in [0, {end}) or {ignored}", f"{target.flat[wrong]} at index {place}")


# ---- checks of targets -----------------------------------------------------------------------------------------------


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
    """Check that ``target - vocab_start_index`` is a row of weight, or ``target`` is ``ignore_index``.

    A row may have several targets.
    """

    def __init__(self):
        Check.__init__(self, "target", "vocab_start_index", "ignore_index")

    cdef int run(self, Call call) except -1:
        target_there = call.values[self.slots[0]]
        if isinstance(target_there, AbstractDeviceArray) and not target_there.IS_READ:
            return 0
        cdef cnp.ndarray target
        cdef Py_ssize_t count = 1
        if cnp.PyArray_NDIM(call.array(self.slots[0])) == 2:
            count = cnp.PyArray_DIM(call.array(self.slots[0]), 1)
            target = native_vector(
                target_there if cnp.PyArray_CheckExact(target_there) else host_values(target_there)
            ).reshape(-1)
        else:
            target = call.host_vector(self.slots[0], call.sizes[BT])
        cdef bint is_wide = cnp.PyArray_ITEMSIZE(target) == 8
        cdef const void *targets = cnp.PyArray_DATA(target)
        cdef int64_t each, start = call.values[self.slots[1]], ignored = call.values[self.slots[2]]
        cdef Py_ssize_t i
        cdef double last = 0
        for i in range(min(call.sizes[BT] * count, cnp.PyArray_SIZE(target))):
            each = (<const int64_t *>targets)[i] if is_wide else (<const int32_t *>targets)[i]
            # The difference does not overflow, as it is computed only if 0 <= start <= each.
            if (each < start or each - start >= call.sizes[V]) and each != ignored:
                expected = f"values in [{start}, {start + <object>call.sizes[V]}) or {ignored}"
                call.fail("target", expected, f"{each} in row {i // count}")
            if i % ROWS_PER_CHECK == 0:
                _tasks.check_signals(&last)
        return 0
