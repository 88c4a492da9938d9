"""Validated calls on the CPU: results allocated around the schedules of `_rowwise_python` and `_linear_python`.

Whatever is allocated is allocated before kernels begin to write: after that, nothing can fail for memory.
"""

import math

cimport numpy as cnp

from ascend_grad cimport (
    _cross_entropy_python,
    _linear_hvp,
    _linear_python,
    _linear_sparse_python,
    _memory,
    _rowwise_python,
)
from ascend_grad._call cimport (
    BT,
    LAYER_HESSIAN,
    LAYER_PRODUCT,
    LOSS,
    LOSS_GRADIENT,
    LOSS_OF_STATISTICS,
    LOSSES,
    ROWWISE,
    STATISTICS,
    TOP_K,
    Call,
    Result,
    V,
)
from ascend_grad._dtypes cimport dtype_of
from ascend_grad._memory cimport SIZE_LIMIT
from ascend_grad._overlap cimport may_overlap

from . import _cpu
from ._dtypes import FLOATING_DTYPES
from .arrays import without_memory

cnp.import_array()

cdef tuple _dtypes = FLOATING_DTYPES  # in the order of ag_dtype


# ---- results of linear operators -------------------------------------------------------------------------------------

cdef inline object value(Call call, str name):
    return call.values[<Py_ssize_t>call.operator.slots[name]]


cdef bint overlaps_an_input(Call call, cnp.ndarray out) except -1:
    for each in call.values:
        if cnp.PyArray_CheckExact(each) and may_overlap(out, <cnp.ndarray>each):
            return True
    return False


cdef cnp.ndarray given_out(Call call, int i):
    """Return the caller's array for result i, or None."""
    if i == call.operator.out_index:
        return call.first_out
    return call.second_out if i == 1 else None


cdef class Results:
    """The arrays that a call computes its results into, and what it returns.

    A result is None if it is not requested, a new array, or the caller's. If the caller's array shares memory with an
    input, the result is computed into a temporary array, and copied by `deliver`.
    """

    cdef list arrays
    cdef tuple returned  # made before anything is written, as that may fail for memory
    cdef list copies  # pairs: the caller's array, and the temporary one

    def __init__(self, Call call not None):
        cdef Result result
        cdef cnp.ndarray out, temporary
        cdef list returned = []
        cdef int i
        self.arrays, self.copies = [], []
        for i, result in enumerate(call.operator.result_specs):
            out = given_out(call, i)
            if not result.is_asked_for(call):
                self.arrays.append(None)
            elif out is None:
                out = result.allocate(call)
                self.arrays.append(out)
            elif overlaps_an_input(call, out):
                temporary = _memory.empty_like(out, <cnp.dtype>_dtypes[dtype_of(out)])
                self.copies.append((out, temporary))
                self.arrays.append(temporary)
            else:
                self.arrays.append(out)
            returned.append(out)
        self.returned = tuple(returned)

    cdef tuple deliver(self):
        """Return what the call returns."""
        cdef Py_ssize_t i
        for i in range(len(self.copies)):
            _memory.copy_into(<cnp.ndarray>(<tuple>self.copies[i])[0], <cnp.ndarray>(<tuple>self.copies[i])[1])
        return self.returned


# ---- linear operators ------------------------------------------------------------------------------------------------

cdef bint is_sparse(Call call) except -1:
    """Return whether the nonzeros of a sparse input matter. Without rows or classes nothing of the input does."""
    return call.sparse is not None and call.sizes[BT] > 0 and call.sizes[V] > 0


cdef bint is_layer_hessian(Call call) except -1:
    """Return whether `_linear_hvp` computes a call. Products of sparse inputs are computed as their gradients are."""
    return call.operator.kernels == LAYER_HESSIAN or call.operator.kernels == LAYER_PRODUCT and not is_sparse(call)


cdef object linear(Call call, int threads):
    cdef Results results
    if call.sparse is not None and not is_sparse(call):
        call.sparse.parts(call.operator.name)  # refuses a wrong structure
    if call.operator.kernels == STATISTICS:
        return _linear_python.statistics(call, threads)
    if call.operator.kernels == LAYER_PRODUCT and not is_sparse(call):
        return _linear_hvp.product(call, threads)
    if call.operator.kernels == LAYER_HESSIAN:
        return _linear_hvp.hessian(call, threads)
    results = Results(call)
    if is_sparse(call):
        _linear_sparse_python.compute(call, results.arrays, threads)
    else:
        _linear_python.compute(call, results.arrays, threads)
    return results.deliver()


# ---- memory, and plans -----------------------------------------------------------------------------------------------

cdef list shapes_of_results(Call call):
    """Return an array for each result, whose elements must not be read: the caller's, or one without memory."""
    cdef list arrays = []
    for i, spec in enumerate(call.specs):
        out = given_out(call, i)
        if spec is not None and (out is None or overlaps_an_input(call, out)):
            out = without_memory(spec.shape, spec.dtype if out is None else _dtypes[dtype_of(out)])
        arrays.append(None if spec is None else out)
    return arrays


cdef object copied_vectors(Call call):
    """Return the bytes of copies of vectors that are not contiguous or not of native byte order."""
    return sum([
        each.nbytes for each in call.values
        if cnp.PyArray_CheckExact(each) and each.ndim == 1 and not (each.flags.c_contiguous and each.dtype.isnative)
    ])


cdef object linear_workspace_size(Call call, int threads):
    """Return the maximum number of bytes beyond arguments and results, from only shapes, dtypes and layouts."""
    size = copied_vectors(call)
    for out in (call.first_out, call.second_out):
        if out is not None and overlaps_an_input(call, <cnp.ndarray>out):
            size += out.nbytes
    if call.operator.kernels == LOSS_OF_STATISTICS:
        return size
    if is_layer_hessian(call):
        return size + _linear_hvp.workspace_bound(call, threads)
    if is_sparse(call) or call.operator.kernels in (LOSS, LOSS_GRADIENT, TOP_K):
        # A vector and options that are arrays follow the matrices and the target. They are copied, options as float64.
        size += sum([8 * each.size for each in call.values[3:] if cnp.PyArray_CheckExact(each)])
    if is_sparse(call):
        return size + _linear_sparse_python.workspace_bound_of(call, shapes_of_results(call), threads)
    return size + _linear_python.workspace_bound_of(call, shapes_of_results(call))


cdef tuple plan_and_threads(Call call, int threads):
    """Return the name of the plan of a call, its number of threads, and its estimated nanoseconds, if they are known."""
    if call.operator.family == ROWWISE:
        return _rowwise_python.plan_and_threads(call, threads)
    if call.operator.family == LOSSES:
        return _cross_entropy_python.plan_and_threads(call, threads)
    if is_layer_hessian(call):
        return *_linear_hvp.plan_and_threads(call, threads), None
    if call.operator.kernels == STATISTICS or call.operator.kernels == LOSS_OF_STATISTICS:
        return *_linear_python.plan_and_threads(call, None, threads), None  # their results may fit no memory
    if is_sparse(call):
        return *_linear_sparse_python.plan_and_threads(call, shapes_of_results(call), threads), None
    return *_linear_python.plan_and_threads(call, shapes_of_results(call), threads), None


# ---- any operator ----------------------------------------------------------------------------------------------------

cpdef object run(Call call, int threads):
    """Compute a validated call, and return its result, or a tuple of its results. `threads`: 0 for the default."""
    if call.operator.family == ROWWISE:
        return _rowwise_python.compute(call, threads)
    if call.operator.family == LOSSES:
        return _cross_entropy_python.compute(call, threads)
    return linear(call, threads)


def workspace_size(Call call, int threads):
    """Return the maximum bytes that `run` takes beyond arguments and results, from only shapes, dtypes and layouts."""
    # Arguments may be of any size: rows without a stride take no memory.
    sizes = [math.prod(spec.shape) * spec.dtype.itemsize for spec in call.specs if spec is not None]
    if max(sizes, default=0) > SIZE_LIMIT:
        raise MemoryError(f"{call.operator.name}: a result of {max(sizes)} bytes exceeds the address space")
    if call.operator.family == ROWWISE:
        return _rowwise_python.workspace_bound(call, threads)
    if call.operator.family == LOSSES:
        return _cross_entropy_python.workspace_bound(call, threads)
    return linear_workspace_size(call, threads)


cpdef tuple description(Call call, int threads):
    """Return how `run` would compute a validated call: variant, plan, number of threads, and estimated nanoseconds."""
    return _cpu.variant(), *plan_and_threads(call, threads)
