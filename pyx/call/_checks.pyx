"""Checks of any operator, compiled as they are part of every call. `operators.table` lists them for each one, in order.

A check reads the values of the parameters that it names. It replaces them by the form that backends take: array-likes
by arrays, other numbers by Python's own. Messages are formatted only on failure.
"""

import numpy as np

cimport numpy as cnp

from ascend_grad._array_types cimport NUMPY, ArrayType, array_type
from ascend_grad._call cimport K, LOSSES, ROWWISE, V, Call, Check, shape_of, size_names, size_numbers
from ascend_grad._dtypes cimport dtype_of
from ascend_grad._kernels cimport AG_FLOAT64

from . import arguments
from ._dtypes import FLOATING_DTYPES
from .arrays import FLOATING_NAMES, AbstractDeviceArray
from .errors import ParamNullptrError, ParamTypeError

cnp.import_array()

cdef extern from "Python.h":
    long long PyLong_AsLongLongAndOverflow(object number, int *overflow) except? -1

cdef object _last = arguments.LAST
cdef tuple _floating = FLOATING_DTYPES  # in the order of ag_dtype

cdef bint is_tensor(Call call, int slot) except -1:
    """Return whether an argument that was converted is a tensor of torch."""
    cdef ArrayType kind = None if call.origins is None else call.origins[slot]
    return kind is not None and kind.library == "torch"


cdef str conversion(Call call, int slot, str dtype):
    """Return for an error the call of an array's method that converts the array to a dtype."""
    if is_tensor(call, slot):
        return "long()" if dtype == "int64" else f"to(torch.{dtype})"
    return f"astype(numpy.{dtype})"


cdef bint have_same_shape(cnp.ndarray a, cnp.ndarray b) noexcept:
    cdef int axis, rank = cnp.PyArray_NDIM(a)
    if cnp.PyArray_NDIM(b) != rank:
        return False
    for axis in range(rank):
        if cnp.PyArray_DIMS(a)[axis] != cnp.PyArray_DIMS(b)[axis]:
            return False
    return True


cdef tuple rows_of(Call call):
    """Return the shape of the rows of the first array: its own without the axis."""
    cdef cnp.ndarray array = call.array(call.operator.array_slots[0])
    return tuple([cnp.PyArray_DIM(array, axis) for axis in range(cnp.PyArray_NDIM(array)) if axis != call.axis])


cdef Py_ssize_t vocabulary_of(Call call) except -1:
    """Return the number of classes: rows of a linear layer's weight, or elements of a row of logits."""
    if call.operator.family != LOSSES:
        return call.sizes[V]
    cdef cnp.ndarray array = call.array(call.operator.array_slots[0])
    return cnp.PyArray_DIM(array, call.axis) if cnp.PyArray_NDIM(array) else 1


# ---- any arrays and numbers ------------------------------------------------------------------------------------------


cdef class NotNone(Check):
    """Check that no required array is None."""

    cdef int run(self, Call call) except -1:
        cdef int i
        for i in range(call.operator.array_count):
            if call.values[call.operator.array_slots[i]] is None:
                call.fail(call.operator.array_names[i], "an array", None, ParamNullptrError)
        return 0


cdef class Floating(Check):
    """Check that the named arrays that are given have the same floating dtype, in any byte order.

    With `converts`, arrays of integers or truth values are converted to the floating dtype of the others, or to float64.
    """

    def __init__(self, *names, converts=False):
        Check.__init__(self, *names)
        self.converts = converts

    cdef int run(self, Call call) except -1:
        cdef int i, number, first = -1
        cdef cnp.ndarray array
        for i in range(self.count):
            if call.values[self.slots[i]] is None:
                continue
            array = call.array(self.slots[i])
            number = dtype_of(array)
            if number < 0 and self.converts and self.convert_integers(call):
                return self.run(call)
            if number < 0:
                expected = f"dtype {FLOATING_NAMES}"
                if array.dtype.kind in "biu":
                    expected += f" ({conversion(call, self.slots[i], 'float32')} converts it)"
                got = f"{array.dtype} (astype(numpy.float64) converts numbers)" if array.dtype == object else array.dtype
                call.fail(self.names[i], expected, got, ParamTypeError)
            if first < 0:
                first = number
            elif number != first:
                expected = f"dtype {_floating[first]} as {self.names[0]} has"
                method = "to" if is_tensor(call, self.slots[i]) else "astype"
                advice = f"{self.names[i]}.{method}({self.names[0]}.dtype) converts it"
                call.fail(self.names[i], expected, f"{array.dtype} ({advice})", ParamTypeError)
        return 0

    cdef bint convert_integers(self, Call call) except -1:
        """Convert the arrays of the host with integers or truth values, and return whether there are any."""
        cdef cnp.dtype common = _floating[AG_FLOAT64]
        cdef cnp.ndarray array
        cdef bint is_any = False
        cdef int i
        for i in range(self.count):
            if call.values[self.slots[i]] is not None and dtype_of(call.array(self.slots[i])) >= 0:
                common = _floating[dtype_of(call.array(self.slots[i]))]
                break
        for i in range(self.count):
            if call.values[self.slots[i]] is None:
                continue
            array = call.array(self.slots[i])
            if array.dtype.kind in "biu" and cnp.PyArray_CheckExact(call.values[self.slots[i]]):
                call.values[self.slots[i]] = array.astype(common)
                is_any = True
        return is_any


cdef class Dtype(Check):
    """Check that the named array has one of at most two dtypes, in any byte order. `note` goes on with the error."""

    cdef char[2] kinds
    cdef int[2] sizes
    cdef str expected

    def __init__(self, name, *dtypes, note=""):
        Check.__init__(self, name)
        self.expected = f"dtype {', or '.join(dtypes)} {note}" if note else f"dtype {' or '.join(dtypes)}"
        for i, each in enumerate((dtypes[0], dtypes[len(dtypes) - 1])):
            self.kinds[i], self.sizes[i] = ord(np.dtype(each).kind), np.dtype(each).itemsize

    cdef int run(self, Call call) except -1:
        cdef cnp.ndarray array = call.array(self.slots[0])
        cdef cnp.dtype dtype = array.dtype
        cdef int i
        for i in range(2):
            if dtype.kind == self.kinds[i] and cnp.PyArray_ITEMSIZE(array) == self.sizes[i]:
                return 0
        return call.fail(self.names[0], self.expected, f"{dtype}{self.advice(call, array)}", ParamTypeError)

    cdef str advice(self, Call call, cnp.ndarray array):
        """Return the conversion of numbers to truth values or indices."""
        cdef bint is_mask = self.kinds[0] == c"b"
        if self.kinds[0] == c"f" or array.dtype.kind not in "biuf":
            return ""
        method = "bool()" if is_mask and is_tensor(call, self.slots[0]) else "astype(bool)"
        return f" ({self.names[0]}.{method if is_mask else conversion(call, self.slots[0], 'int64')} converts it)"


cdef class Number(Check):
    """Check that the argument is one real number of a range. NaN is allowed without a range, truth values are not.

    Parameters
    ----------
    name : str
    allowed : Range, optional
        The range (`operators.options.Range`).
    is_optional : bool
        Whether the argument may be None.
    """

    def __init__(self, name, allowed=None, *, is_optional=False):
        Check.__init__(self, name)
        self.has_range, self.is_optional = allowed is not None, is_optional
        if self.has_range:
            self.expected, self.low, self.high, self.includes_low, self.includes_high = allowed

    cdef int run(self, Call call) except -1:
        return self.run_expecting(call, "a real number")

    cdef int run_expecting(self, Call call, str expected) except -1:
        """Run the check. `expected` describes in the error the argument without a range."""
        value = call.values[self.slots[0]]
        if value is None and self.is_optional:
            return 0
        if type(value) is not float:
            call.ran_foreign_code = True
            value = call.values[self.slots[0]] = arguments.real_number(
                value, self.names[0], call.operator.name, expected
            )
        cdef double number = value
        if self.has_range and not (
            (self.low <= number if self.includes_low else self.low < number)
            and (number <= self.high if self.includes_high else number < self.high)
        ):
            call.fail(self.names[0], self.expected, value)
        return 0


cdef class AxisInRange(Check):
    """Check that ``axis`` is an axis of the named array, and make it non-negative. Rank 0 counts as rank 1."""

    def __init__(self, name):
        Check.__init__(self, name, "axis")

    cdef int run(self, Call call) except -1:
        # This check may run before the checks of dtypes, so the first argument may be of any type.
        cdef object first = call.values[self.slots[0]], given = call.values[self.slots[1]]
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
        if type(given) is not int and given is not _last:
            call.ran_foreign_code = True
            if call.operator.family == ROWWISE and (given is None or isinstance(given, tuple)):
                advice = f"for all axes, as SciPy's default: {self.names[0]}.reshape(-1)"
                call.fail("axis", "an int", f"{arguments.shown(given)} ({advice})", ParamTypeError)
            given = call.values[self.slots[1]] = arguments.integer(given, "axis", call.operator.name)
        axis = PyLong_AsLongLongAndOverflow(given, &overflow)
        if overflow or not -rank <= axis < rank:
            call.fail("axis", f"a value in [{-rank}, {rank - 1}]", arguments.shown(given))
        if axis < 0:
            axis += rank
            call.values[self.slots[1]] = axis
        call.axis = <int>axis
        return 0


cdef class SameShape(Check):
    """Check that the second array, if given, has the shape of the first."""

    cdef int run(self, Call call) except -1:
        cdef cnp.ndarray first, second
        if call.values[self.slots[1]] is None:
            return 0
        first, second = call.array(self.slots[0]), call.array(self.slots[1])
        if not have_same_shape(first, second):
            call.fail(self.names[1], f"shape {shape_of(first)} as {self.names[0]} has", shape_of(second))
        return 0


cdef class Rank(Check):
    """Check that the named array has from `low` to `high` dimensions."""

    cdef int low, high

    def __init__(self, name, int low, int high):
        Check.__init__(self, name)
        self.low, self.high = low, high

    cdef int run(self, Call call) except -1:
        cdef int rank = cnp.PyArray_NDIM(call.array(self.slots[0]))
        if not self.low <= rank <= self.high:
            expected = f"rank {self.low}" if self.low == self.high else f"rank {self.low} to {self.high}"
            advice = ""
            if self.low == self.high and 0 < self.low - rank <= 2:
                advice = f" ({self.names[0]}[{', '.join(['None'] * (self.low - rank))}] has rank {self.low})"
            call.fail(self.names[0], expected, f"rank {rank}{advice}")
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


cdef class Shape(Check):
    """Check that an array, if given, has the named dimensions, with the sizes that earlier arrays have.

    The call records sizes that no earlier array has. For losses of logits, ``"rows"`` stands for all dimensions of the rows,
    and ``"V"`` for the number of elements of a row.
    """

    def __init__(self, name, *dims):
        Check.__init__(self, name)
        self.of_rows = dims == ("rows",)
        self.dims = () if self.of_rows else tuple([size_numbers[dim] for dim in dims])

    cdef int run(self, Call call) except -1:
        if call.values[self.slots[0]] is None:
            return 0
        cdef cnp.ndarray array = call.array(self.slots[0])
        if call.operator.family == LOSSES:
            return self.run_on_rows(call, array)
        cdef int axis, size, rank = <int>len(self.dims)
        cdef bint fits = cnp.PyArray_NDIM(array) == rank
        if fits:
            for axis in range(rank):
                size = self.dims[axis]
                fits = fits and (call.sizes[size] < 0 or call.sizes[size] == cnp.PyArray_DIM(array, axis))
        if not fits:
            names = [(size_names[each], call.sizes[<int>each]) for each in self.dims]
            expected = ", ".join([f"{name} = {known}" if known >= 0 else name for name, known in names])
            call.fail(self.names[0], f"shape ({expected})", f"{shape_of(array)}{self.advice(call, array)}")
        for axis in range(rank):
            call.sizes[<int>self.dims[axis]] = cnp.PyArray_DIM(array, axis)
        return 0

    cdef str advice(self, Call call, cnp.ndarray array):
        """Return what to do about a wrong shape, if its likely cause is known."""
        cdef tuple shape = shape_of(array), sizes = tuple([call.sizes[<int>each] for each in self.dims])
        if len(sizes) == 1 and cnp.PyArray_SIZE(array) == sizes[0]:
            return f" ({self.names[0]}.reshape(-1) has one dimension)"
        if len(sizes) != 2:
            return ""
        if len(shape) == 2 and all([known < 0 or known == got for known, got in zip(sizes, reversed(shape))]):
            return f" (did you mean {self.names[0]}.T?)"
        if len(shape) > 2 and sizes[1] in (-1, shape[len(shape) - 1]):
            return f" ({self.names[0]}.reshape(-1, {shape[len(shape) - 1]}) has two dimensions)"
        return ""

    cdef int run_on_rows(self, Call call, cnp.ndarray array) except -1:
        """Run the check of a loss of logits."""
        cdef tuple expected = rows_of(call) if self.of_rows else (vocabulary_of(call),)
        if shape_of(array) != expected:
            name = call.operator.array_names[0]
            why = f"that of {name} without axis {call.axis}" if self.of_rows else "an entry for each class"
            call.fail(self.names[0], f"shape {expected}, {why}", f"{shape_of(array)}{self.other_axis(call, array)}")
        return 0

    cdef str other_axis(self, Call call, cnp.ndarray array):
        """Return what to do if an array has the shape of the rows along another axis than the call's."""
        cdef int first = call.operator.array_slots[0], axis
        cdef tuple shape = shape_of(call.array(first)), rows = shape_of(array)
        if not self.of_rows:
            return ""
        for axis in range(1, <int>len(shape)):
            if shape[:axis] + shape[axis + 1:] != rows:
                continue
            if is_tensor(call, first) and call.axis == 1:  # the only axis of ascend_grad.torch
                return f" (classes along axis {axis}: {call.operator.array_names[0]}.movedim({axis}, 1))"
            return f" (classes along axis {axis}{', as in PyTorch' if axis == 1 else ''}: axis={axis})"
        return ""


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
        call.ran_foreign_code = True
        index = call.values[slot] = arguments.integer(index, name, call.operator.name)
    if not low <= index <= high:
        expected = f"an int in [{low}, {high}]"
        if low < -arguments.MAX_INDEX:  # every int64 is allowed
            expected = "an int of 64 bits"
        elif high > arguments.MAX_INDEX // 2:
            expected = f"an int of at least {low}" if index < low else f"an int of at most {high}"
        call.fail(name, expected, arguments.shown(index))
    return index


cdef class Integer(Check):
    """Check that the argument is an integer from `low` to `high`.

    Parameters
    ----------
    name : str
    low, high : int, optional
    counts_entries : bool
        Whether it is a number of vocabulary entries, at most all of them. The call records it as the size ``k``.
    precedes_entries : bool
        Whether it is the id of the first of all vocabulary entries, the last one of which has to be at most `high`.
    """

    cdef object low, high
    cdef bint counts_entries, precedes_entries

    def __init__(self, name, low=0, high=arguments.MAX_INDEX, *, counts_entries=False, precedes_entries=False):
        Check.__init__(self, name)
        self.low, self.high = low, high
        self.counts_entries, self.precedes_entries = counts_entries, precedes_entries

    cdef int run(self, Call call) except -1:
        high = self.high
        if self.precedes_entries:
            high -= max(call.sizes[V] - 1, 0)
        if not self.counts_entries:
            integer_between(call, self.slots[0], self.low, high)
            return 0
        count = integer_between(call, self.slots[0], self.low, arguments.MAX_INDEX)
        if count > min(high, call.sizes[V]):
            call.fail(self.names[0], f"at most {high}, and at most V = {call.sizes[V]}", count)
        call.sizes[K] = count
        return 0
