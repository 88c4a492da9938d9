"""Calls of operators and their validation, compiled as it is part of every call. `operators.table` lists them.

An `Operator` describes its parameters, its checks and its results. The first check that fails decides the error. A
`Call` holds one value for every parameter. The checks themselves are in `_checks`.
"""

from typing import NamedTuple

import numpy as np

cimport cython
cimport numpy as cnp

from ascend_grad cimport _memory
from ascend_grad._array_types cimport NUMPY, ArrayType, array_type, known_array_type, mark_written
from ascend_grad._dtypes cimport accumulator_of, dtype_of, native_dtype
from ascend_grad._overlap cimport may_overlap, overlaps_itself
from ascend_grad._rowwise_kernels cimport AG_ROW_OP_COUNT, ag_row_ops

from . import arguments
from .arrays import FLOATING_NAMES, AbstractDeviceArray, host_values, with_axis_innermost
from .errors import ParamInvalidError, ParamTypeError

cnp.import_array()

cdef cnp.dtype _float64 = np.dtype(np.float64)
size_numbers = {"BT": BT, "H": H, "H with bias": H, "V": V, "k": K}
size_names = ("BT", "H", "V", "k")
ROW_SHAPES = ("rows", "targets", "logits")

#: The dtype of a result that is float64 if the array named by `like` is float64, else float32.
ACCUMULATOR = "accumulator"


class ResultSpec(NamedTuple):
    """The shape of a new result, its dtype in native byte order, and its strides; None stands for C order."""

    shape: tuple
    dtype: np.dtype
    strides: tuple | None


# ---- arrays ----------------------------------------------------------------------------------------------------------

cdef cnp.ndarray native_vector(cnp.ndarray array):
    """Return the array itself if it is contiguous, aligned and in native byte order, or None, else a copy that is."""
    if array is None or cnp.PyArray_ISCARRAY_RO(array):
        return array
    return np.require(array, array.dtype.newbyteorder("="), ["C", "A"])


cdef cnp.ndarray doubles(object numbers):
    """Return one number, or a vector of any floating dtype and layout, as a contiguous vector of float64."""
    cdef cnp.npy_intp one = 1
    cdef cnp.ndarray result
    if not isinstance(numbers, float):
        with np.errstate(all="ignore"):
            return np.require(numbers, _float64, ["C", "A"])
    result = _memory.empty(1, &one, _float64)
    (<double *>cnp.PyArray_DATA(result))[0] = numbers
    return result


cdef tuple shape_of(cnp.ndarray array):
    return tuple([cnp.PyArray_DIM(array, axis) for axis in range(cnp.PyArray_NDIM(array))])


# ---- operators -------------------------------------------------------------------------------------------------------

cdef class Check:
    """A condition on the calls of one operator. Its arguments are names of parameters."""

    def __init__(self, *names):
        self.names = names
        self.count = len(names)

    cdef object bind(self, tuple parameters):
        """Look up the numbers of the named parameters in the operator that the check belongs to."""
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
        The parameter whose dtype and shape the result has, unless `dtype` or `dims` is given.
    dims : tuple of str, optional
        The result's shape, as names of sizes of the call; ``"bits of BT"`` is the bytes that hold BT bits, and
        ``"H with bias"`` is H, or H + 1 with a bias. ``("rows",)`` is the shape of `like` without the axis, ``("targets",)``
        that of ``target``, ``("logits",)`` that of `like`.
    dtype : ACCUMULATOR or numpy.dtype, optional
        The result's dtype, if it is not the dtype of `like`.
    asked_by : tuple of str, (str, int) or (str, str)
        Parameters, entries of parameters, or parameters with a name that they have to contain. If one of them is False or
        None, or does not contain the name, the call does not ask for the result.
    reduced_by : str, optional
        The parameter that reduces the result to one number, unless its value is "none".
    """

    def __init__(self, str name, str like, *, tuple dims=None, dtype=None, tuple asked_by=(), str reduced_by=None):
        self.name, self.like, self.dims, self.asked_by, self.reduced_by = name, like, dims, asked_by, reduced_by
        self.is_accumulator = dtype is ACCUMULATOR
        self.dtype = None if self.is_accumulator else dtype

    cdef object bind(self, tuple parameters, Family family):
        self.like_slot = parameters.index(self.like)
        self.is_of_rows, self.is_of_targets, self.is_of_logits = [self.dims == (each,) for each in ROW_SHAPES]
        self.keeps_order = family != LINEAR and self.dims is None
        # The input of a linear operator is its first parameter.
        self.has_rows = self.dims[:1] in (("BT",), ("targets",)) if self.dims is not None else self.like_slot == 0
        self.reduction_slot = -1 if self.reduced_by is None else parameters.index(self.reduced_by)
        cdef int i
        self.conditions = <int>len(self.asked_by)
        if self.conditions > MAX_CONDITIONS:
            raise ValueError(f"{self.name}: asked for by at most {MAX_CONDITIONS} parameters")
        names = []
        for i in range(self.conditions):
            parameter, entry = (self.asked_by[i], -1) if isinstance(self.asked_by[i], str) else self.asked_by[i]
            names.append(entry if isinstance(entry, str) else None)
            self.condition_slots[i] = parameters.index(parameter)
            self.condition_entries[i] = -1 if isinstance(entry, str) else entry
        self.condition_names = tuple(names)

    cdef bint is_asked_for(self, Call call) except -1:
        cdef int i
        for i in range(self.conditions):
            value = call.values[self.condition_slots[i]]
            if self.condition_entries[i] >= 0:
                value = (<tuple>value)[self.condition_entries[i]]
            if self.condition_names[i] is not None:
                if self.condition_names[i] not in <tuple>value:
                    return False
            elif value is None or value is False:
                return False
        return True

    cdef int shape_for(self, Call call, cnp.npy_intp *shape) except -1:
        """Set the result's shape, of at most 8 dimensions, and return its rank."""
        cdef cnp.ndarray like
        cdef int axis, rank = 0
        if self.dims is None or self.is_of_targets or self.is_of_logits:
            like = call.array(self.like_slot if not self.is_of_targets else <int>call.operator.slots["target"])
            for axis in range(cnp.PyArray_NDIM(like)):
                shape[axis] = cnp.PyArray_DIMS(like)[axis]
            return cnp.PyArray_NDIM(like)
        if self.reduction_slot >= 0 and call.values[self.reduction_slot] != "none":
            return 0
        if self.is_of_rows:
            like = call.array(self.like_slot)
            for axis in range(cnp.PyArray_NDIM(like)):
                if axis != call.axis:
                    shape[rank] = cnp.PyArray_DIMS(like)[axis]
                    rank += 1
            return rank
        for axis, name in enumerate(self.dims):
            shape[axis] = (call.sizes[BT] + 7) // 8 if name == "bits of BT" else call.sizes[<int>size_numbers[name]]
            shape[axis] += name == "H with bias" and call.values[<int>call.operator.slots["bias"]] is not None
        return <int>len(self.dims)

    cdef cnp.dtype dtype_for(self, Call call):
        if self.dtype is not None:
            return self.dtype
        cdef cnp.ndarray like = call.array(self.like_slot)
        return accumulator_of(like) if self.is_accumulator else native_dtype(like)

    cdef bint keeps_order_in(self, Call call) noexcept:
        """Return whether the call's result has the axis order of `like`: row-wise results of NumPy have."""
        return self.keeps_order and (call.kind is NUMPY or call.kind is None)

    cdef cnp.ndarray allocate(self, Call call):
        """Allocate a new array for the result."""
        cdef cnp.npy_intp[8] shape
        cdef int rank = self.shape_for(call, shape)
        cdef cnp.dtype dtype = self.dtype_for(call)
        if self.keeps_order_in(call):
            return _memory.empty_in_order(call.array(self.like_slot), dtype)
        if self.is_of_logits and call.axis < rank - 1:
            return _memory.empty_in_order(with_axis_innermost(call.array(self.like_slot), call.axis), dtype)
        return _memory.empty(rank, shape, dtype) if call.kind is None else call.kind.empty(rank, shape, dtype)

    def spec(self, Call call not None):
        """Return the specification of the result of a validated call, or None if the call does not ask for it."""
        cdef cnp.npy_intp[8] shape, strides
        cdef int axis
        if not self.is_asked_for(call):
            return None
        cdef int rank = self.shape_for(call, shape)
        cdef cnp.dtype dtype = self.dtype_for(call)
        order = with_axis_innermost(call.array(self.like_slot), call.axis).strides if self.is_of_logits and rank else None
        if self.keeps_order_in(call) and _memory.set_order(call.array(self.like_slot), dtype.itemsize, strides):
            order = tuple([strides[axis] for axis in range(rank)])
        return ResultSpec(tuple([shape[axis] for axis in range(rank)]), dtype, order)


#: Names of the kernels of the linear operators, in the order of `LinearKernels`.
LOSS_KERNELS = ("cross_entropy", "hessian_product")
LINEAR_KERNELS = ("gradient", "statistics", "loss_of_statistics", "loss", "loss_gradient", "top_k", "hvp", "hessian")

cdef list _rowwise_kernels = [ag_row_ops[op].name.decode() for op in range(AG_ROW_OP_COUNT)]


cdef class Operator:
    """One public operator.

    Parameters
    ----------
    name : str
        The public function.
    device_name : str or None
        The operator of the device library that computes the same, or None if that takes several operators.
    parameters : str
        The names of the public function's arguments that determine its results, in order.
    arrays : str
        The parameters that are required arrays.
    optional : str
        The parameters that are arrays or None.
    mixes : str
        The parameters that are short vectors, and may be NumPy's while other arrays are of another library, or the
        reverse. All other arrays have to be of one library.
    checks : sequence of Check
        Checks of shapes, dtypes and single numbers, in the order in which they run. The first failure decides the error.
    value_checks : sequence of Check
        Checks that read elements of arrays. They run after all others, since they may wait for a device.
    results : sequence of Result
    family : {"rowwise", "linear", "losses"}
        The family of kernels that computes the operator on the CPU.
    kernels : str
        The name of its kernels within the family: an operator of `rowwise.h`, or one of `LINEAR_KERNELS` or
        `LOSS_KERNELS`.
    out : str, optional
        The result that ``out`` is for, if it is one array; default: the first result.
    sparse, operands, mask, scale : str, optional
        The parameter that may be a sparse array of SciPy; the parameters of row-wise kernels: one or two arrays, mask and
        factor.

    Attributes
    ----------
    slots : dict
        The position of each parameter's value in a call.
    array_names, optional_names : tuple of str
    results : tuple of str
        The names of the results.
    result_specs : tuple of Result
    """

    def __init__(
        self, str name, str device_name, str parameters, *, str arrays, checks, results, str family, str kernels,
        value_checks=(), str optional="", str mixes="", str out=None, str sparse="", str operands="", str mask="",
        str scale="",
    ):
        cdef Check check
        cdef Result result
        cdef int i
        self.name, self.device_name, self.sparse = name, device_name, sparse
        self.family = {"rowwise": ROWWISE, "linear": LINEAR, "losses": LOSSES}[family]
        self.parameters = tuple(parameters.split())
        self.array_names, self.optional_names = tuple(arrays.split()), tuple(optional.split())
        self.array_count = <int>len(self.array_names)
        if self.array_count > MAX_SLOTS:
            raise ValueError(f"{name}: at most {MAX_SLOTS} required arrays")
        for i in range(self.array_count):
            self.array_slots[i] = self.parameters.index(self.array_names[i])
        any_array = [each for each in self.parameters if each in self.array_names + self.optional_names]
        self.any_array_count = <int>len(any_array)
        if self.any_array_count > MAX_ARRAYS:
            raise ValueError(f"{name}: at most {MAX_ARRAYS} arrays")
        for i in range(self.any_array_count):
            self.any_array_slots[i] = self.parameters.index(any_array[i])
            self.mixes[i] = any_array[i] in mixes.split()
        self.checks, self.value_checks, self.result_specs = tuple(checks), tuple(value_checks), tuple(results)
        for check in (*self.checks, *self.value_checks):
            check.bind(self.parameters)
        for result in self.result_specs:
            result.bind(self.parameters, self.family)
        self.results = tuple([(<Result>each).name for each in self.result_specs])
        self.slots = {each: i for i, each in enumerate(self.parameters)}
        self.out_index = 0 if out is None else self.results.index(out)
        self.kernels = {ROWWISE: _rowwise_kernels, LINEAR: LINEAR_KERNELS, LOSSES: LOSS_KERNELS}[self.family].index(kernels)
        for i, each in enumerate((*operands.split(), "", "")[:2] + (mask, scale)):
            self.operand_slots[i] = self.parameters.index(each) if each else -1

    def __repr__(self):
        return f"Operator({self.name!r})"


@cython.freelist(8)
cdef class Call:
    """One call of an operator: its arguments, after validation in the form that backends take.

    Attributes
    ----------
    operator : Operator
        The operator that is called.
    values : list
        One value for each of ``operator.parameters``: arrays without a copy, and scalars converted.
    """

    @property
    def outs(self):
        """Return the caller's array for each result; None stands for a new array, or a result that is not asked for.

        Operators of more than two results take no ``out``, or an array for one of them.
        """
        count = len(self.operator.results)
        first, second = self.first_out, self.second_out
        if self.device_id >= 0:
            first, second = self.first_there, self.second_there
        if self.operator.out_index:
            return tuple([first if i == self.operator.out_index else None for i in range(count)])
        return (first, second, *(None,) * (count - 2)) if count > 1 else (first,)

    @property
    def arguments(self):
        """Return all arguments by name."""
        if self.by_name is None:
            self.by_name = dict(zip(self.operator.parameters, self.values))
        return self.by_name

    @property
    def arrays(self):
        """Return the required arrays, in the order of ``operator.array_names``."""
        return [self.arguments[name] for name in self.operator.array_names]

    @property
    def specs(self):
        """Return the specification of each result, or None for a result that is not asked for."""
        return tuple([(<Result>result).spec(self) for result in self.operator.result_specs])

    @property
    def dims(self):
        """Return the sizes ``BT``, ``H``, ``V`` and ``K`` of a linear operator's arrays, as far as they are known."""
        cdef int i
        return {size_names[i]: self.sizes[i] for i in range(SIZES) if self.sizes[i] >= 0}

    @property
    def device(self):
        """Return the number of the device that has the arrays, or None for the host."""
        return None if self.device_id < 0 else self.device_id

    def with_arguments(self, by_name):
        """Return the same call on other arrays of the same shapes."""
        cdef Call other = Call.__new__(Call)
        other.operator, other.device_id, other.axis, other.sizes = self.operator, self.device_id, self.axis, self.sizes
        other.leading, other.sparse = self.leading, None
        other.first_out, other.second_out = self.first_out, self.second_out
        if self.device_id >= 0:
            other.first_out = other.second_out = None
        other.values = [by_name[name] for name in self.operator.parameters]
        return other

    def empty(self, tuple shape, cnp.dtype dtype):
        """Return a new array, of at most 8 dimensions, that `in_library` converts without a copy."""
        cdef cnp.npy_intp[8] lengths
        cdef int axis, rank = <int>len(shape)
        if rank > 8:
            raise ValueError(f"expected at most 8 dimensions, got {rank}")
        for axis in range(rank):
            lengths[axis] = shape[axis]
        return (NUMPY if self.kind is None else self.kind).empty(rank, lengths, dtype)

    def in_library(self, results):
        """Return results that were computed from a validated call as arrays of the library of its arrays."""
        return [result_in_library(self, each, None) for each in results]

    def fail(self, argument, expected, got, kind=ParamInvalidError):
        raise kind(f"{argument}: expected {expected}, got {got}", operator=self.operator.name)

    cdef cnp.ndarray array(self, int slot):
        """Return an argument on the host, or an array of the host with the shape and dtype of one on a device."""
        cdef object value = self.values[slot]
        if cnp.PyArray_CheckExact(value):
            return <cnp.ndarray>value
        return self.other_array(slot)

    cdef cnp.ndarray other_array(self, int slot):
        cdef str name = self.operator.parameters[slot]
        value = self.values[slot]
        cdef ArrayType kind = known_array_type(value)
        if kind is None:
            if isinstance(value, AbstractDeviceArray):
                return self.shape_of_device_array(value)
            kind = array_type(value, name, self.operator.name)
        if self.origins is None:
            self.origins = [NUMPY] * len(self.values)
        self.origins[slot] = kind
        value = self.values[slot] = self.import_array(value, name, kind)
        return <cnp.ndarray>value if cnp.PyArray_CheckExact(value) else self.shape_of_device_array(value)

    cdef cnp.ndarray shape_of_device_array(self, object array):
        """Return an array of the host with the shape and dtype of one on a device, but without memory for elements."""
        self.device_id = array.device
        return np.broadcast_to(np.empty((), array.dtype), array.shape)

    cdef object import_array(self, object value, str name, ArrayType kind):
        """Convert an array of a type, or anything else if the type is None, to a NumPy array or to a backend's."""
        view = None
        if kind is None or not kind.is_plain:
            self.ran_foreign_code = True
        if kind is None and name == self.operator.sparse:
            self.sparse = arguments.sparse_rows(value, name, self.operator.name)
            if self.sparse is not None and self.sparse.has_integers:
                self.sparse.convert_integers(self.array(self.operator.slots["weight"]), self.operator.name)
            view = None if self.sparse is None else self.sparse.stand_in
        if kind is not None:
            view = kind.view_anywhere(value, name, self.operator.name)
        return arguments.converted_by_numpy(value, name, self.operator.name) if view is None else view

    cdef cnp.ndarray host_vector(self, int slot, Py_ssize_t least):
        """Return a vector on the host, of at least `least` values, contiguous, aligned and in native byte order."""
        value = self.values[slot]
        cdef cnp.ndarray vector = native_vector(value if cnp.PyArray_CheckExact(value) else host_values(value))
        # The shape was checked, but the conversion of another argument may have changed it since.
        if cnp.PyArray_NDIM(vector) != 1 or cnp.PyArray_DIM(vector, 0) < least:
            self.fail(self.operator.parameters[slot], f"at least {least} entries in one dimension", shape_of(vector))
        return vector


# ---- results ---------------------------------------------------------------------------------------------------------

cdef cnp.ndarray writable_result(Call call, str name, object out, Result result):
    """Check that an entry of ``out`` is None or an array that can hold the result, and return it."""
    cdef cnp.npy_intp[8] shape
    cdef int rank, axis
    cdef bint fits
    cdef cnp.ndarray array
    if out is None:
        return None
    if not result.is_asked_for(call):
        got = "an array" if call.device_id >= 0 else arguments.shown(out)  # `shown` reads elements
        call.fail(name, "None, as this result is not requested", got)
    if not cnp.PyArray_Check(out):
        call.fail(name, "a writable array", type(out).__name__, ParamTypeError)
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
        call.fail(name, "an array whose elements do not overlap", f"strides {out.strides}")
    return array


cdef object imported_out(Call call, str name, object out):
    """Return an entry of ``out``; an array of another library becomes an array over the same memory, if possible."""
    cdef ArrayType kind
    if out is None:
        return None
    if call.device_id >= 0 and isinstance(out, AbstractDeviceArray):
        call.fail(name, "a tensor, as the inputs are", out.KIND, ParamTypeError)
    kind = NUMPY if cnp.PyArray_CheckExact(out) else array_type(out, name, call.operator.name)
    if kind is None:
        return out
    if call.kind is not None and kind.library is not None and kind.library != call.kind.library:
        expected = f"an array of {call.kind.library}, as the inputs are"
        call.fail(name, expected, f"one of {kind.library}", ParamTypeError)
    if kind is NUMPY:
        return out
    call.ran_foreign_code = call.ran_foreign_code or not kind.is_plain
    view = kind.view_anywhere(out, name, call.operator.name)
    if view is None:
        return out
    device = view.device if isinstance(view, AbstractDeviceArray) else -1
    if device != call.device_id:
        places = ["the host" if each < 0 else f"device {each}" for each in (call.device_id, device)]
        call.fail(name, f"an array on {places[0]}, as the inputs are", f"one on {places[1]}", ParamTypeError)
    return view


cdef tuple entries_of(Call call, object out):
    """Return the two entries of ``out`` for an operator with two results."""
    cdef tuple entries = tuple(out) if isinstance(out, (tuple, list)) else None
    if entries is None or len(entries) != 2:
        expected = f"a tuple ({', '.join(call.operator.results)}) of arrays or None"
        if entries is None:
            call.fail("out", expected, type(out).__name__, ParamTypeError)
        call.fail("out", expected, f"{len(entries)} entries")
    return entries


cdef int check_devices(Call call, object out) except -1:
    """Check that all arrays of a call on a device are on that device, and set the call's type of results."""
    cdef dict inputs = dict(zip(call.operator.array_names, call.arrays))
    for name in call.operator.optional_names:
        if isinstance(call.arguments[name], (np.ndarray, AbstractDeviceArray)):
            inputs[name] = call.arguments[name]
    first = next(name for name in inputs if isinstance(inputs[name], AbstractDeviceArray))
    there = inputs[first]
    for name, array in inputs.items():
        if not isinstance(array, AbstractDeviceArray):
            got = f"one on the host (copy it with {there.TO_DEVICE}, or the others with {there.TO_HOST})"
        elif array.device != there.device:
            got = f"one on device {array.device}"
        else:
            got = f"{array.KIND} on that device"
        if type(array) is not type(there) or array.device != there.device:
            kind = "an array" if not isinstance(array, AbstractDeviceArray) or array.KIND == there.KIND else there.KIND
            call.fail(name, f"{kind} on device {there.device}, like {first}", got, ParamTypeError)
    if out is not None and not there.CAN_BE_OUT:
        call.fail("out", "None, as calls on arrays of a device return new arrays", type(out).__name__, ParamTypeError)
    call.kind = NUMPY if call.origins is None else call.origins[call.operator.parameters.index(first)]
    return 0


cdef ArrayType common_type(Call call):
    """Return the type of the first array that has a library, or None. Check that the other arrays have the same."""
    cdef Operator called = call.operator
    cdef ArrayType first = None, kind
    cdef int i, first_i = 0
    for i in range(called.any_array_count):
        if not cnp.PyArray_Check(call.values[called.any_array_slots[i]]):  # None, or a number
            continue
        kind = call.origins[called.any_array_slots[i]]
        if kind is None or kind.library is None:
            continue
        if first is None:
            first, first_i = kind, i
        elif kind is not first and kind.library != first.library:
            if (called.mixes[i] or called.mixes[first_i]) and (kind is NUMPY or first is NUMPY):
                continue
            expected = f"an array of {first.library}, like {called.parameters[called.any_array_slots[first_i]]}"
            name = called.parameters[called.any_array_slots[i]]
            call.fail(name, expected, f"one of {kind.library}", ParamTypeError)
    return first


cdef int run_checks(Call call) except -1:
    cdef int i
    for i in range(SIZES):
        call.sizes[i] = -1
    for i in range(<int>len(call.operator.checks)):
        (<Check>call.operator.checks[i]).run(call)
    return 0


cdef int run_value_checks(Call call) except -1:
    cdef int i
    for i in range(<int>len(call.operator.value_checks)):
        (<Check>call.operator.value_checks[i]).run(call)
    return 0


cdef Call validate(Operator operator, list values, object out):
    """Check one call by the checks of its operator, and return it in the form that backends take."""
    cdef Call call = Call.__new__(Call)
    call.operator, call.values, call.device_id, call.axis = operator, values, -1, -1
    call.has_out = out is not None
    cdef bint is_pair = out is not None and len(operator.result_specs) == 2
    cdef object first = out, second = None, first_view, second_view
    run_checks(call)
    if call.device_id >= 0:  # values come later: reading values of a device would wait
        check_devices(call, out)
    run_value_checks(call)
    if call.device_id < 0:
        call.kind = NUMPY if call.origins is None else common_type(call)
    if is_pair:
        first, second = entries_of(call, out)
    first_view = imported_out(call, "out[0]" if is_pair else "out", first)
    second_view = imported_out(call, "out[1]", second)
    if call.ran_foreign_code:  # every value has its final form now, so no code of an argument runs this time
        run_checks(call)
        run_value_checks(call)
    if out is None:
        return call
    # `out` is checked last, for every operator.
    call.first_given = None if first_view is first else first
    call.second_given = None if second_view is second else second
    if call.device_id >= 0:
        call.first_there, call.second_there = first_view, second_view
        first_view, second_view = [
            each.unreadable_array() if isinstance(each, AbstractDeviceArray) else each for each in (first_view, second_view)
        ]
    call.first_out = writable_result(
        call, "out[0]" if is_pair else "out", first_view, <Result>operator.result_specs[operator.out_index]
    )
    if is_pair:
        call.second_out = writable_result(call, "out[1]", second_view, <Result>operator.result_specs[1])
        if call.first_out is not None and call.second_out is not None and may_overlap(call.first_out, call.second_out):
            call.fail("out", "arrays that do not overlap", "two that do")
    return call


def checked(Operator operator not None, list values not None):
    """Validate a call of an operator that no backend computes, as it is composed of operators that backends compute."""
    return validate(operator, values, None)


# ---- results as arrays of the caller's library -----------------------------------------------------------------------

cdef int mark_outs_written(Call call) except -1:
    """Tell other libraries that the call is about to write into their arrays."""
    if call.first_given is not None:
        mark_written(call.first_given)
    if call.second_given is not None:
        mark_written(call.second_given)
    return 0


cdef object with_leading_dimensions(Call call, object results):
    """Return results with the dimensions of the input's rows instead of one dimension for them."""
    cdef list reshaped = []
    if type(results) is not tuple:
        return with_leading_dimensions(call, (results,))[0]
    for result, array in zip(call.operator.result_specs, results):
        if (<Result>result).has_rows and array is not None and array.ndim:
            array = array.reshape(call.leading + array.shape[1:])
        reshaped.append(array)
    return tuple(reshaped)


cdef object in_library(Call call, object results):
    """Return the results as arrays of the caller's library, and entries of ``out`` as the objects that were passed."""
    if call.leading is not None:
        results = with_leading_dimensions(call, results)
    if (call.kind is None or call.kind is NUMPY) and call.first_given is None and call.second_given is None:
        return results
    if type(results) is not tuple:
        return result_in_library(call, results, call.first_given)
    if call.operator.out_index:
        return tuple([
            result_in_library(call, each, call.first_given if i == call.operator.out_index else None)
            for i, each in enumerate(results)
        ])
    cdef list converted = [result_in_library(call, results[0], call.first_given)]
    converted.append(result_in_library(call, results[1], call.second_given))
    converted += [result_in_library(call, each, None) for each in results[2:]]
    return tuple(converted)


cdef object result_in_library(Call call, object result, object given):
    if given is not None:
        return given
    if call.kind is None:
        return result
    if isinstance(result, AbstractDeviceArray):
        return result.in_library()
    return call.kind.own(result) if cnp.PyArray_Check(result) else result
