"""What a call is and what it is checked by. Compiled, since every call passes here; the operators stand in `contract`.

An `Operator` is a description: its parameters, its checks in the order in which a failure decides, its results. A `Call`
holds one value for every parameter. A `Check` reads the values of those that it names, and replaces them where backends
take another form: arrays for whatever converts to one, Python's own numbers for others. Messages are made on failure alone.
"""

from typing import NamedTuple

import numpy as np

cimport cython
cimport numpy as cnp
from libc.stdint cimport int32_t, int64_t, uint8_t

from ascend_grad cimport _memory, _tasks
from ascend_grad._dtypes cimport dtype_of
from ascend_grad._kernels cimport AG_FLOAT32, AG_FLOAT64
from ascend_grad._overlap cimport may_overlap, overlaps_itself

from . import arguments
from ._dtypes import FLOATING_DTYPES
from .arrays import FLOATING_NAMES, AbstractDeviceArray, host_values
from .errors import ParamInvalidError, ParamNullptrError, ParamTypeError

cnp.import_array()

cdef extern from "Python.h":
    long long PyLong_AsLongLongAndOverflow(object number, int *overflow) except? -1

cdef tuple _floating = FLOATING_DTYPES  # in the order of ag_dtype
cdef cnp.dtype _float32 = np.dtype(np.float32)
cdef cnp.dtype _float64 = np.dtype(np.float64)
cdef dict _size_numbers = {"BT": BT, "H": H, "V": V}
cdef tuple _size_names = ("BT", "H", "V")

cdef enum:
    ROWS_PER_CHECK = 1 << 18  # targets that are looked at between two looks at signals

#: The dtype of a result: float64 where the array that it is like is float64, else float32.
ACCUMULATOR = "accumulator"


class ResultSpec(NamedTuple):
    """What a fresh result is: its shape, and its dtype in native byte order."""

    shape: tuple
    dtype: np.dtype


# ---- arrays ----------------------------------------------------------------------------------------------------------


cdef cnp.dtype native_dtype(cnp.ndarray array):
    """The array's dtype in native byte order, without metadata."""
    cdef int number = dtype_of(array)
    return <cnp.dtype>_floating[number] if number >= 0 else array.dtype.newbyteorder("=")


cdef cnp.dtype accumulator_of(cnp.ndarray array):
    return _float64 if dtype_of(array) == AG_FLOAT64 else _float32


cdef bint is_index(cnp.ndarray array) noexcept:
    """Whether the dtype is int32 or int64."""
    return cnp.PyArray_ISSIGNED(array) and cnp.PyArray_ITEMSIZE(array) in (4, 8)


cdef cnp.ndarray native_vector(cnp.ndarray array):
    """The array itself, if it is contiguous, aligned and in native byte order; else such a copy."""
    if cnp.PyArray_IS_C_CONTIGUOUS(array) and cnp.PyArray_ISALIGNED(array) and not cnp.PyArray_ISBYTESWAPPED(array):
        return array
    return np.require(array, array.dtype.newbyteorder("="), ["C", "A"])


cdef inline bint have_same_shape(cnp.ndarray a, cnp.ndarray b) noexcept:
    cdef int axis, rank = cnp.PyArray_NDIM(a)
    if cnp.PyArray_NDIM(b) != rank:
        return False
    for axis in range(rank):
        if cnp.PyArray_DIMS(a)[axis] != cnp.PyArray_DIMS(b)[axis]:
            return False
    return True


cdef tuple shape_of(cnp.ndarray array):
    return tuple([cnp.PyArray_DIM(array, axis) for axis in range(cnp.PyArray_NDIM(array))])


# ---- operators -------------------------------------------------------------------------------------------------------


cdef class Check:
    """One condition on a call, of one operator. Its arguments are names of parameters."""

    def __init__(self, *names):
        self.names = names
        self.count = len(names)

    cdef object bind(self, tuple parameters):
        """Find the parameters of the operator that the check belongs to."""
        cdef int i
        if self.is_bound or self.count > MAX_SLOTS:
            raise ValueError(f"{type(self).__name__}{self.names} belongs to an operator already, or names too much")
        self.is_bound = True
        for i in range(self.count):
            self.slots[i] = parameters.index(self.names[i])

    cdef int run(self, Call call) except -1:
        raise NotImplementedError


cdef class Result:
    """One result of an operator.

    Parameters
    ----------
    name : str
    like : str
        The parameter whose dtype it has, and whose shape unless another is given.
    dims : tuple of str, optional
        Its shape, in sizes of the call; ``"bits of BT"`` for as many bytes as BT bits take.
    dtype : ACCUMULATOR or numpy.dtype, optional
        Its dtype, where that is not the one of `like`.
    asked_by : tuple of str or (str, int)
        Parameters, or entries of parameters; where one is False or None, the call does not ask for the result.
    reduced_by : str, optional
        The parameter that makes it one number, unless it is "none".
    """

    def __init__(self, str name, str like, *, tuple dims=None, dtype=None, tuple asked_by=(), str reduced_by=None):
        self.name, self.like, self.dims, self.asked_by, self.reduced_by = name, like, dims, asked_by, reduced_by
        self.is_accumulator = dtype is ACCUMULATOR
        self.dtype = None if self.is_accumulator else dtype

    cdef object bind(self, tuple parameters):
        self.like_slot = parameters.index(self.like)
        self.reduction_slot = -1 if self.reduced_by is None else parameters.index(self.reduced_by)
        cdef int i
        self.conditions = <int>len(self.asked_by)
        if self.conditions > MAX_CONDITIONS:
            raise ValueError(f"{self.name}: asked for by at most {MAX_CONDITIONS} parameters")
        for i in range(self.conditions):
            parameter, entry = (self.asked_by[i], -1) if isinstance(self.asked_by[i], str) else self.asked_by[i]
            self.condition_slots[i], self.condition_entries[i] = parameters.index(parameter), entry

    cdef bint is_asked_for(self, Call call) except -1:
        cdef int i
        for i in range(self.conditions):
            value = call.values[self.condition_slots[i]]
            if self.condition_entries[i] >= 0:
                value = (<tuple>value)[self.condition_entries[i]]
            if value is None or value is False:
                return False
        return True

    cdef int shape_for(self, Call call, cnp.npy_intp *shape) except -1:
        """Write its shape, for a rank of at most 8; the rank."""
        cdef cnp.ndarray like
        cdef int axis
        if self.dims is None:
            like = call.array(self.like_slot)
            for axis in range(cnp.PyArray_NDIM(like)):
                shape[axis] = cnp.PyArray_DIMS(like)[axis]
            return cnp.PyArray_NDIM(like)
        if self.reduction_slot >= 0 and call.values[self.reduction_slot] != "none":
            return 0
        for axis in range(len(self.dims)):
            name = self.dims[axis]
            shape[axis] = (call.sizes[BT] + 7) // 8 if name == "bits of BT" else call.sizes[<int>_size_numbers[name]]
        return <int>len(self.dims)

    cdef cnp.dtype dtype_for(self, Call call):
        if self.dtype is not None:
            return self.dtype
        cdef cnp.ndarray like = call.array(self.like_slot)
        return accumulator_of(like) if self.is_accumulator else native_dtype(like)

    cdef cnp.ndarray fresh(self, Call call):
        """A new array for the result."""
        cdef cnp.npy_intp[8] shape
        cdef int rank = self.shape_for(call, shape)
        return _memory.fresh(rank, shape, self.dtype_for(call))

    def spec(self, Call call not None):
        """What the result of a validated call is; None where it does not ask for it."""
        cdef cnp.npy_intp[8] shape
        cdef int axis
        if not self.is_asked_for(call):
            return None
        cdef int rank = self.shape_for(call, shape)
        return ResultSpec(tuple([shape[axis] for axis in range(rank)]), self.dtype_for(call))


cdef class Operator:
    """One public operator.

    Parameters
    ----------
    name : str
        The public function.
    device_name : str or None
        The operator of the device library that computes the same; None for a chain of several.
    parameters : str
        The names of the public function's arguments that say what is computed, in order.
    arrays : str
        Those that are required arrays.
    optional : str
        Those that are arrays or None.
    checks : sequence of Check
        Everything that is checked, in the order in which a failure decides.
    results : sequence of Result

    Attributes
    ----------
    array_names, optional_names : tuple of str
    results : tuple of str
        The names of the results.
    result_specs : tuple of Result
    """

    def __init__(self, str name, str device_name, str parameters, *, str arrays, checks, results, str optional=""):
        cdef Check check
        cdef Result result
        cdef int i
        self.name, self.device_name = name, device_name
        self.parameters = tuple(parameters.split())
        self.array_names, self.optional_names = tuple(arrays.split()), tuple(optional.split())
        self.array_count = <int>len(self.array_names)
        if self.array_count > MAX_SLOTS:
            raise ValueError(f"{name}: at most {MAX_SLOTS} required arrays")
        for i in range(self.array_count):
            self.array_slots[i] = self.parameters.index(self.array_names[i])
        self.checks, self.result_specs = tuple(checks), tuple(results)
        for check in self.checks:
            check.bind(self.parameters)
        for result in self.result_specs:
            result.bind(self.parameters)
        self.results = tuple([(<Result>each).name for each in self.result_specs])
        self.row_op = -1

    def __repr__(self):
        return f"Operator({self.name!r})"


@cython.freelist(8)
cdef class Call:
    """One call of an operator: its arguments, after validation in the form that backends take.

    Attributes
    ----------
    operator : Operator
        What is called.
    values : list
        One for each of ``operator.parameters``: arrays as they lie in memory, scalars converted.
    """

    @property
    def outs(self):
        """Where the results go, one entry for each; None: into a fresh array, or the result is not asked for.

        Operators of more than two results take no ``out``.
        """
        count = len(self.operator.results)
        return (self.first_out, self.second_out, *(None,) * (count - 2)) if count > 1 else (self.first_out,)

    @property
    def arguments(self):
        """Every argument by name."""
        if self.by_name is None:
            self.by_name = dict(zip(self.operator.parameters, self.values))
        return self.by_name

    @property
    def arrays(self):
        """The required arrays, in the order of ``operator.array_names``."""
        return [self.arguments[name] for name in self.operator.array_names]

    @property
    def specs(self):
        """What the results are, one entry for each; None: not asked for."""
        return tuple([(<Result>result).spec(self) for result in self.operator.result_specs])

    @property
    def dims(self):
        """The sizes that the shapes of a linear operator's arrays agree on: ``BT``, ``H``, ``V``."""
        cdef int i
        return {_size_names[i]: self.sizes[i] for i in range(SIZES) if self.sizes[i] >= 0}

    @property
    def device(self):
        """The card that all arrays live on, None for the host."""
        return None if self.card < 0 else self.card

    def with_arguments(self, by_name):
        """The same call on other arrays of the same shapes."""
        cdef Call other = Call.__new__(Call)
        other.operator, other.card, other.axis, other.sizes = self.operator, self.card, self.axis, self.sizes
        other.first_out, other.second_out = self.first_out, self.second_out
        other.values = [by_name[name] for name in self.operator.parameters]
        return other

    def fail(self, argument, expected, got, kind=ParamInvalidError):
        raise kind(f"{argument}: expected {expected}, got {got}", operator=self.operator.name)

    cdef cnp.ndarray array(self, int slot):
        """An argument as an array that has its shape and its dtype; itself, on the host."""
        cdef object value = self.values[slot]
        if cnp.PyArray_CheckExact(value):
            return <cnp.ndarray>value
        return self.other_array(slot)

    cdef cnp.ndarray other_array(self, int slot):
        value = self.values[slot]
        if isinstance(value, AbstractDeviceArray):
            self.card = value.device
            return np.broadcast_to(np.empty((), value.dtype), value.shape)  # without memory of its own
        self.ran_others = True
        value = self.values[slot] = arguments.converted(value, self.operator.parameters[slot], self.operator.name)
        return value

    cdef cnp.ndarray host_vector(self, int slot, Py_ssize_t least):
        """The values of a vector on the host, at least so many, contiguous, aligned and in native byte order."""
        value = self.values[slot]
        cdef cnp.ndarray vector = native_vector(value if cnp.PyArray_CheckExact(value) else host_values(value))
        # It was checked, but the conversion of another argument may have changed it since.
        if cnp.PyArray_NDIM(vector) != 1 or cnp.PyArray_DIM(vector, 0) < least:
            self.fail(self.operator.parameters[slot], f"at least {least} entries in one dimension", shape_of(vector))
        return vector


# ---- checks of any operator ------------------------------------------------------------------------------------------


cdef class NotNone(Check):
    """The required arrays are there."""

    cdef int run(self, Call call) except -1:
        cdef int i
        for i in range(call.operator.array_count):
            if call.values[call.operator.array_slots[i]] is None:
                call.fail(call.operator.array_names[i], "an array", None, ParamNullptrError)
        return 0


cdef class Floating(Check):
    """The named arrays have one of the floating dtypes, the same one (byte orders aside)."""

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
    """The named array has dtype bool."""

    cdef int run(self, Call call) except -1:
        cdef cnp.ndarray array = call.array(self.slots[0])
        if cnp.PyArray_TYPE(array) != cnp.NPY_BOOL:
            call.fail(self.names[0], "dtype bool", array.dtype, ParamTypeError)
        return 0


cdef class RealNumber(Check):
    """The argument is one real number (NaN and infinities are; truth values are not)."""

    cdef int run(self, Call call) except -1:
        value = call.values[self.slots[0]]
        if type(value) is not float:
            call.ran_others = True
            call.values[self.slots[0]] = arguments.real_number(value, self.names[0], call.operator.name)
        return 0


cdef class DimInRange(Check):
    """``dim`` is an axis of the named array; it becomes non-negative. Rank 0 counts as rank 1."""

    def __init__(self, name):
        Check.__init__(self, name, "dim")

    cdef int run(self, Call call) except -1:
        # The one check that may come before the dtypes are looked at, so the rank is asked of whatever came.
        cdef object first = call.values[self.slots[0]], dim = call.values[self.slots[1]]
        cdef long long rank = 1, axis
        cdef int overflow = 0
        if cnp.PyArray_CheckExact(first):
            rank = cnp.PyArray_NDIM(<cnp.ndarray>first)
        elif isinstance(first, AbstractDeviceArray):
            rank = first.ndim
        else:
            rank = arguments.any_array(first, self.names[0], call.operator.name).ndim
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
    """The second array has the shape of the first."""

    cdef int run(self, Call call) except -1:
        cdef cnp.ndarray first = call.array(self.slots[0]), second = call.array(self.slots[1])
        if not have_same_shape(first, second):
            call.fail(self.names[1], f"shape {shape_of(first)} as {self.names[0]} has", shape_of(second))
        return 0


cdef class RankAtMost(Check):
    """The named array has so many dimensions at most."""

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
    """The named array has so many dimensions."""

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
    """A (B, N, S1, S2) array takes masks (B or 1, N or 1, S1, S2), nothing else."""

    cdef int run(self, Call call) except -1:
        cdef cnp.ndarray array = call.array(self.slots[0]), mask = call.array(self.slots[1])
        cdef cnp.npy_intp *shape = cnp.PyArray_DIMS(array)
        cdef cnp.npy_intp *own = cnp.PyArray_DIMS(mask)
        cdef int axis
        for axis in range(4):
            if own[axis] != shape[axis] and (axis > 1 or own[axis] != 1):
                expected = f"shape ({shape[0]} or 1, {shape[1]} or 1, {shape[2]}, {shape[3]})"
                call.fail(self.names[1], expected, shape_of(mask))
        return 0


cdef class NoTriuMask(Check):
    """``fix_triu_mask`` is False."""

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


cdef class OneMode(Check):
    """The probabilities are given, or what they are recomputed from; if they are, the rest is not looked at."""

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
    """The other arrays, where given, are float64 where the first one is, else float32."""

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
    """The named array has one of the two dtypes of sums."""

    cdef int run(self, Call call) except -1:
        cdef cnp.ndarray array = call.array(self.slots[0])
        if dtype_of(array) not in (AG_FLOAT32, AG_FLOAT64):
            call.fail(self.names[0], "dtype float32 or float64", array.dtype, ParamTypeError)
        return 0


cdef class LogitsBeside(Check):
    """The optional second array has a floating dtype whose sums have the dtype of the first."""

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
    """The named array has dtype bool or uint8."""

    cdef int run(self, Call call) except -1:
        cdef cnp.ndarray array = call.array(self.slots[0])
        if cnp.PyArray_TYPE(array) not in (cnp.NPY_BOOL, cnp.NPY_UINT8):
            call.fail(self.names[0], "dtype bool, or uint8 with eight rows to a byte", array.dtype, ParamTypeError)
        return 0


cdef class Int32OrInt64(Check):
    """The named array has one of the two dtypes of targets."""

    cdef int run(self, Call call) except -1:
        cdef cnp.ndarray array = call.array(self.slots[0])
        if not is_index(array):
            call.fail(self.names[0], "dtype int32 or int64", array.dtype, ParamTypeError)
        return 0


cdef class Shape(Check):
    """The array, where given, has these dimensions; each has the size that earlier arrays gave it, if they did."""

    cdef tuple dims

    def __init__(self, name, *dims):
        Check.__init__(self, name)
        self.dims = tuple([_size_numbers[dim] for dim in dims])

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
            names = [(_size_names[each], call.sizes[<int>each]) for each in self.dims]
            expected = ", ".join([f"{name} = {known}" if known >= 0 else name for name, known in names])
            call.fail(self.names[0], f"shape ({expected})", shape_of(array))
        for axis in range(rank):
            call.sizes[<int>self.dims[axis]] = cnp.PyArray_DIM(array, axis)
        return 0


cdef class MaskHasRows(Check):
    """The named mask has an element for every row, or, as bits, at least one."""

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


cdef class AVocabulary(Check):
    """The named weight has rows."""

    cdef int run(self, Call call) except -1:
        if call.sizes[V] == 0:
            call.fail(self.names[0], "at least one row", shape_of(call.array(self.slots[0])))
        return 0


cdef class NoLabelSmoothing(RealNumber):
    """``label_smoothing`` is 0."""

    def __init__(self):
        Check.__init__(self, "label_smoothing")

    cdef int run(self, Call call) except -1:
        RealNumber.run(self, call)
        value = call.values[self.slots[0]]
        if <double>value != 0:
            call.fail("label_smoothing", "0 (smoothing is not supported)", value)
        return 0


cdef class TrueOrFalse(Check):
    """The argument is a bool."""

    cdef int run(self, Call call) except -1:
        value = call.values[self.slots[0]]
        if value is not True and value is not False:
            call.values[self.slots[0]] = arguments.truth_value(value, self.names[0], call.operator.name)
        return 0


cdef object integer_between(Call call, int slot, object low, object high):
    """The argument as an int from low to high."""
    name = call.operator.parameters[slot]
    index = call.values[slot]
    if type(index) is not int:
        call.ran_others = True
        index = call.values[slot] = arguments.integer(index, name, call.operator.name)
    if not low <= index <= high:
        call.fail(name, f"an int in [{low}, {high}]", arguments.shown(index))
    return index


cdef class IntegerFrom(Check):
    """The argument is an int that is not below a bound."""

    cdef object low

    def __init__(self, name, low):
        Check.__init__(self, name)
        self.low = low

    cdef int run(self, Call call) except -1:
        integer_between(call, self.slots[0], self.low, arguments.MAX_INDEX)
        return 0


cdef class VocabularyBounds(Check):
    """``0 <= start <= end``, and no more ids than weight has rows; the end is exclusive."""

    def __init__(self):
        Check.__init__(self, "vocab_start_index", "vocab_end_index")

    cdef int run(self, Call call) except -1:
        start = integer_between(call, self.slots[0], 0, arguments.MAX_INDEX)
        end = integer_between(call, self.slots[1], start, arguments.MAX_INDEX)
        if end - start > call.sizes[V]:
            expected = f"at most {call.sizes[V]} (rows of weight) beyond vocab_start_index {start}"
            call.fail("vocab_end_index", expected, end)
        return 0


cdef class ChosenResults(Check):
    """``output_mask`` says of two results whether they are asked for."""

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


cdef class WorkspaceAndFilter(Check):
    """``workspace_bytes`` is None or a size from a bound on; ``filter_eps`` is a finite number that is not negative."""

    cdef public object least

    def __init__(self, least):
        Check.__init__(self, "workspace_bytes", "filter_eps")
        self.least = least

    cdef int run(self, Call call) except -1:
        if call.values[self.slots[0]] is not None:
            integer_between(call, self.slots[0], self.least, arguments.MAX_INDEX)
        value = call.values[self.slots[1]]
        if type(value) is not float:
            call.ran_others = True
            value = call.values[self.slots[1]] = arguments.real_number(value, "filter_eps", call.operator.name)
        if not 0 <= <double>value < float("inf"):
            call.fail("filter_eps", "a finite number that is not negative", value)
        return 0


cdef class ReductionAndItsGradient(Check):
    """``grad_loss`` is one number, 1 by default; without a reduction it may be an array of one for every row."""

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
        reduction, grad_loss = call.values[self.slots[0]], call.values[self.slots[1]]
        if not isinstance(reduction, str):
            call.fail("reduction", "'mean', 'sum' or 'none'", arguments.shown(reduction), ParamTypeError)
        for known in ("mean", "sum", "none"):
            if reduction == known:
                reduction = call.values[self.slots[0]] = known  # a plain str, where it may be of a subclass
                break
        else:
            call.fail("reduction", "'mean', 'sum' or 'none'", arguments.shown(reduction))
        if grad_loss is None:
            call.values[self.slots[1]] = 1.0
            return 0
        if type(grad_loss) is float:
            return 0
        if (
            reduction == "none" and not isinstance(grad_loss, (str, bytes))
            and cnp.PyArray_NDIM(call.array(self.slots[1]))
        ):
            self.floating.run(call)
            return self.one_for_each_row.run(call)
        call.values[self.slots[1]] = grad_loss  # messages show what came
        return self.number.run(call)


cdef class TargetsInRange(Check):
    """``masked_target`` is a row of weight wherever ``target_mask`` is 0. Checked last, for it reads values."""

    def __init__(self):
        Check.__init__(self, "masked_target", "target_mask")

    cdef int run(self, Call call) except -1:
        if call.card >= 0:
            targets_there, mask_there = call.values[self.slots[0]], call.values[self.slots[1]]
            if isinstance(targets_there, AbstractDeviceArray) and targets_there.is_known_below(call.sizes[V], mask_there):
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
    """``target`` less ``vocab_start_index`` is a row of weight, or target is ``ignore_index``."""

    def __init__(self):
        Check.__init__(self, "target", "vocab_start_index", "ignore_index")

    cdef int run(self, Call call) except -1:
        cdef cnp.ndarray target = call.host_vector(self.slots[0], call.sizes[BT])
        cdef bint is_wide = cnp.PyArray_ITEMSIZE(target) == 8
        cdef const void *targets = cnp.PyArray_DATA(target)
        cdef int64_t each, start = call.values[self.slots[1]], ignored = call.values[self.slots[2]]
        cdef Py_ssize_t i
        cdef double last = 0
        for i in range(call.sizes[BT]):
            each = (<const int64_t *>targets)[i] if is_wide else (<const int32_t *>targets)[i]
            # No id is below start, which is not negative, so the difference fits.
            if (each < start or each - start >= call.sizes[V]) and each != ignored:
                expected = f"values in [{start}, {start + <object>call.sizes[V]}) or {ignored}"
                call.fail("target", expected, f"{each} in row {i}")
            if i % ROWS_PER_CHECK == 0:
                _tasks.check_signals(&last)
        return 0


# ---- results ---------------------------------------------------------------------------------------------------------


cdef cnp.ndarray writable_result(Call call, str name, object out, Result result):
    """``out`` is None or an array that can take the result."""
    cdef cnp.npy_intp[8] shape
    cdef int rank, axis
    cdef bint fits
    cdef cnp.ndarray array
    if out is None:
        return None
    if not result.is_asked_for(call):
        call.fail(name, "None, as the call does not ask for this result", arguments.shown(out))
    if not cnp.PyArray_Check(out):
        call.fail(name, "a numpy.ndarray", type(out).__name__, ParamTypeError)
    if not cnp.PyArray_CheckExact(out):
        arguments.check_class(type(out), name, call.operator.name)
    array = <cnp.ndarray>out
    if dtype_of(array) < 0:
        call.fail(name, f"dtype {FLOATING_NAMES}", array.dtype, ParamTypeError)
    rank = result.shape_for(call, shape)
    fits = cnp.PyArray_NDIM(array) == rank
    for axis in range(rank if fits else 0):
        fits = fits and cnp.PyArray_DIMS(array)[axis] == shape[axis]
    if not fits:
        call.fail(name, f"shape {tuple([shape[axis] for axis in range(rank)])}", shape_of(array))
    if not cnp.PyArray_ISWRITEABLE(array):
        call.fail(name, "a writable array", "a read-only one")
    if overlaps_itself(array):
        call.fail(name, "an array whose elements do not share memory", f"strides {out.strides}")
    return array


cdef int set_outs(Call call, object out) except -1:
    """Note where the results go: ``out``, or one entry of it for each of two results. Checked last, for every operator."""
    cdef tuple results = call.operator.result_specs
    if out is None:
        return 0
    if len(results) == 1:
        call.first_out = writable_result(call, "out", out, <Result>results[0])
        return 0
    cdef tuple entries = tuple(out) if isinstance(out, (tuple, list)) else None  # a list may change meanwhile
    if entries is None or len(entries) != len(results):
        expected = f"a tuple ({', '.join(call.operator.results)}) of arrays or None"
        if entries is None:
            call.fail("out", expected, type(out).__name__, ParamTypeError)
        call.fail("out", expected, f"{len(entries)} entries")
    call.first_out = writable_result(call, "out[0]", entries[0], <Result>results[0])
    call.second_out = writable_result(call, "out[1]", entries[1], <Result>results[1])
    if call.first_out is not None and call.second_out is not None and may_overlap(call.first_out, call.second_out):
        call.fail("out", "arrays that do not share memory", "two that do")
    return 0


cdef int check_devices(Call call, object out) except -1:
    """Of a call with an array on a device, all arrays are on the same one."""
    cdef dict inputs = dict(zip(call.operator.array_names, call.arrays))
    for name in call.operator.optional_names:
        if isinstance(call.arguments[name], (np.ndarray, AbstractDeviceArray)):
            inputs[name] = call.arguments[name]
    first = next(name for name in inputs if isinstance(inputs[name], AbstractDeviceArray))
    there = inputs[first]
    for name, array in inputs.items():
        if isinstance(array, AbstractDeviceArray):
            got = f"one on device {array.device}"
        else:
            got = f"an array on the host ({there.MAKER} copies it, numpy() brings the others back)"
        if type(array) is not type(there) or array.device != there.device:
            call.fail(name, f"an array on device {there.device}, as {first} is one", got, ParamTypeError)
    if out is not None:
        call.fail("out", "None, as calls on arrays of the device give new ones", type(out).__name__, ParamTypeError)
    return 0


cdef int run_checks(Call call) except -1:
    cdef int i
    for i in range(SIZES):
        call.sizes[i] = -1
    for i in range(<int>len(call.operator.checks)):
        (<Check>call.operator.checks[i]).run(call)
    return 0


cdef Call validate(Operator operator, list values, object out):
    """Check one call against its contract and return it in the form that backends take."""
    cdef Call call = Call.__new__(Call)
    call.operator, call.values, call.card, call.axis = operator, values, -1, -1
    run_checks(call)
    if call.ran_others:  # every value has its final form now, so nobody else's code runs this time
        run_checks(call)
    if call.card >= 0:
        check_devices(call, out)
    set_outs(call, out)
    return call
