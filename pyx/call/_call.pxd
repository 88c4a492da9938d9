cimport cython
cimport numpy as cnp

from ascend_grad._array_types cimport ArrayType

cdef enum:
    MAX_SLOTS = 12
    MAX_ARRAYS = 16
    MAX_CONDITIONS = 2

cdef enum:
    BT
    H
    V
    K
    SIZES


cdef enum Family:
    ROWWISE
    LINEAR
    LOSSES

cdef enum LinearKernels:
    GRADIENT
    STATISTICS
    LOSS_OF_STATISTICS
    LOSS
    LOSS_GRADIENT
    TOP_K
    LAYER_PRODUCT
    LAYER_HESSIAN

cdef enum LossKernels:
    CROSS_ENTROPY
    HESSIAN_PRODUCT

cdef enum:  # values of a row-wise call
    FIRST_OPERAND
    SECOND_OPERAND
    MASK_OPERAND
    SCALE_OPERAND
    OPERAND_SLOTS


cdef dict size_numbers  # BT, H, V, K by name
cdef tuple size_names  # names in the order of BT, H, V, K


cdef class Check:
    cdef readonly tuple names
    cdef int count
    cdef bint is_bound
    cdef int[MAX_SLOTS] slots
    cdef object bind(self, tuple parameters)
    cdef int run(self, Call call) except -1


@cython.final
cdef class Result:
    cdef readonly str name
    cdef readonly str like
    cdef tuple dims, asked_by
    cdef str reduced_by
    cdef cnp.dtype dtype
    cdef bint is_accumulator, has_rows, is_of_rows, is_of_targets, is_of_logits, keeps_order
    cdef int like_slot, reduction_slot
    cdef int conditions
    cdef int[MAX_CONDITIONS] condition_slots, condition_entries
    cdef tuple condition_names  # names that the parameters have to contain; None for a condition without one
    cdef object bind(self, tuple parameters, Family family)
    cdef bint is_asked_for(self, Call call) except -1
    cdef int shape_for(self, Call call, cnp.npy_intp *shape) except -1
    cdef cnp.dtype dtype_for(self, Call call)
    cdef bint keeps_order_in(self, Call call) noexcept
    cdef cnp.ndarray allocate(self, Call call)


@cython.final
cdef class Operator:
    cdef readonly str name
    cdef readonly str device_name
    cdef readonly tuple parameters
    cdef readonly tuple array_names
    cdef readonly tuple optional_names
    cdef readonly tuple checks
    cdef readonly tuple value_checks
    cdef readonly tuple result_specs
    cdef readonly tuple results
    cdef int array_count
    cdef int[MAX_SLOTS] array_slots
    cdef int any_array_count  # number of arrays, required or optional
    cdef int[MAX_ARRAYS] any_array_slots
    cdef bint[MAX_ARRAYS] mixes
    cdef readonly dict slots
    cdef int out_index  # of the result that `out` is for, if it is one array
    cdef Family family
    cdef int kernels  # an ag_row_op, a LinearKernels, or a LossKernels
    cdef readonly str sparse  # the parameter that may be a sparse array of SciPy, or an empty text
    cdef int[OPERAND_SLOTS] operand_slots  # row-wise operators: positions of their values, -1 for none


@cython.final
cdef class Call:
    cdef readonly Operator operator
    cdef readonly list values
    # The arrays of `out`; for a call on a device, arrays of the same layouts, whose elements must not be read.
    cdef cnp.ndarray first_out, second_out
    cdef object first_there, second_there  # for a call on a device: the arrays of `out` on the device
    cdef int device_id  # number of the device that has the arrays; -1: the host
    cdef bint has_out  # the caller gave `out`
    cdef int axis  # not negative; -1: the operator has none
    cdef list origins  # types of arrays before conversion; None: all arguments are exact NumPy arrays, or no arrays
    cdef ArrayType kind  # type of the results; None: NumPy
    cdef object first_given, second_given  # the caller's entries of `out` that were converted from another library
    cdef bint ran_foreign_code  # whether code of an argument ran, which may have changed an argument that was checked before
    cdef readonly tuple leading  # shape of the rows of a linear operator's input that has not two dimensions; None: it has two
    cdef Py_ssize_t[SIZES] sizes  # BT, H, V, k of a linear operator; -1: not known yet
    cdef readonly object sparse  # the `SparseRows` of a sparse argument, whose value has the same shape, and no elements; or None
    cdef object by_name
    cdef cnp.ndarray array(self, int slot)
    cdef cnp.ndarray other_array(self, int slot)
    cdef object import_array(self, object value, str name, ArrayType kind)
    cdef cnp.ndarray shape_of_device_array(self, object array)
    cdef cnp.ndarray host_vector(self, int slot, Py_ssize_t least)


cdef Call validate(Operator operator, list values, object out)
cdef int mark_outs_written(Call call) except -1
cdef object in_library(Call call, object results)
cdef cnp.ndarray native_vector(cnp.ndarray array)
cdef cnp.ndarray doubles(object numbers)
cdef tuple shape_of(cnp.ndarray array)
