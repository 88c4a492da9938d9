"""The cross-entropy of rows on the CPU: problems of validated calls, their results and workspaces."""

import numpy as np

cimport numpy as cnp
from libc.string cimport memset

from ascend_grad cimport _memory
from ascend_grad._call cimport HESSIAN_PRODUCT, Call, Result
from ascend_grad._cross_entropy_rows cimport CrossEntropy, scale_of_all
from ascend_grad._cross_entropy_schedule cimport (
    finish_without_rows,
    loss_workspace_size,
    place_loss_workspace,
    plan_of,
    prepare_loss,
    run_loss,
)
from ascend_grad._dtypes cimport dtype_of
from ascend_grad._kernels cimport AG_FLOAT64
from ascend_grad._loss_arguments cimport data_of, set_options, set_results
from ascend_grad._memory cimport ALIGNMENT
from ascend_grad._overlap cimport may_overlap, overlaps_partly
from ascend_grad._rowwise_kernels cimport ag_row_op
from ascend_grad._rowwise_plan cimport MAX_AXES, Plan, Problem, describe
from ascend_grad._rowwise_python cimport plan_name
from ascend_grad._rowwise_schedule cimport choose_threads, threads_of
from ascend_grad._views cimport View, view_of

from ._dtypes import FLOATING_DTYPES
from .arrays import without_memory

cnp.import_array()

cdef tuple _dtypes = FLOATING_DTYPES  # in the order of ag_dtype

cdef enum:
    INPUT_GRAD = 1                    # places among the results: of the gradient,
    FULL = 7                          # and of two outputs of the shape of the logits, the last ones


cdef inline object value(Call call, str name):
    return call.values[<Py_ssize_t>call.operator.slots[name]]


cdef inline cnp.ndarray input_of(Call call):
    return <cnp.ndarray>call.values[call.operator.array_slots[0]]


cdef inline cnp.ndarray target_of(Call call):
    return <cnp.ndarray>call.values[call.operator.array_slots[1]]


# Plans never read a vector.
cdef char any_vector = 0


cdef bint is_array(object argument) except -1:
    return argument is not None and cnp.PyArray_CheckExact(argument)


cdef list describe_loss(CrossEntropy *x, Call call, list results, bint with_values):
    """Fill in the options and the results of a loss, and return the arrays that hold them.

    Without `with_values`, the elements of arrays mean nothing. `results` has an array for each result that is requested.
    A vector is described by `solve`.
    """
    cdef list held
    memset(x, 0, sizeof(CrossEntropy))
    held = set_options(&x.o, target_of(call), call, with_values)  # the check has copied the targets
    x.o.is_double = dtype_of(input_of(call)) == AG_FLOAT64
    if call.operator.kernels == HESSIAN_PRODUCT:
        # The dtype of the vector follows from the plan, which asks whether there is one.
        x.hessian, x.vector = <char *>data_of(results[0]), &any_vector
        return held
    set_results(&x.o, results[:FULL])
    x.prob, x.hessian = <char *>data_of(results[FULL]), <char *>data_of(results[FULL + 1])
    x.return_grad = value(call, "return_grad")
    return held


cdef bint describe_call(Problem *p, Call call, const CrossEntropy *x, cnp.ndarray out) except -1:
    """Describe the problem of a validated call whose gradient is written to `out`; return False if it is empty.

    `describe_loss` has filled in `x`.
    """
    return describe_rows(p, x, input_of(call), target_of(call), call.axis, out)


cdef bint describe_rows(
    Problem *p, const CrossEntropy *x, cnp.ndarray input, cnp.ndarray target, int dim, cnp.ndarray out
) except -1:
    """Describe the problem of logits whose classes lie along `dim`; return False if it is empty."""
    cdef View a = view_of(input), b = view_of(target), numbers = a, out_view = view_of(out)
    cdef Py_ssize_t[MAX_AXES] strides
    cdef Py_ssize_t stride = 1
    cdef int axis
    cdef Py_ssize_t classes = a.shape[dim] if a.ndim else 1  # an array of rank 0 has one element
    cdef ag_row_op op = plan_of(x, classes, a.dtype != out_view.dtype)
    # An array of numbers of rows in C order, which has no memory: row i is at byte i.
    for axis in range(a.ndim - 1, -1, -1):
        strides[axis] = 0
        if axis != dim:
            strides[axis] = stride
            stride *= a.shape[axis]
    numbers.data, numbers.strides, numbers.itemsize = NULL, strides, 1
    return describe(p, op, &a, &b, &numbers, &out_view, dim, scale_of_all(x))


cdef class Results:
    """The arrays that a call computes its results into, in the order of the contract; None if not requested."""

    cdef list arrays
    cdef cnp.ndarray given, gradient  # the caller's array for the gradient, and where it is computed

    def __init__(self, Call call not None):
        cdef Result result
        self.arrays = [
            result.allocate(call) if result.is_asked_for(call) and (i != INPUT_GRAD or call.first_out is None) else None
            for i, result in enumerate(call.operator.result_specs)
        ]
        self.given = call.first_out
        self.gradient = self.arrays[INPUT_GRAD] if self.given is None else self.given
        if self.given is not None and is_overwritten(call, self.given):
            self.gradient = _memory.empty_like(self.given, <cnp.dtype>_dtypes[dtype_of(self.given)])

    cdef tuple deliver(self):
        if self.given is not None:
            if self.gradient is not self.given:
                _memory.copy_into(self.given, self.gradient)
            self.arrays[INPUT_GRAD] = self.given
        return tuple(self.arrays)


cdef bint is_overwritten(Call call, cnp.ndarray out) except -1:
    """Return whether writing the gradient to `out` would change arguments that are read later."""
    cdef object input = input_of(call)
    for each in call.values:
        if is_array(each) and (overlaps_partly(out, input) if each is input else may_overlap(out, <cnp.ndarray>each)):
            return True
    return False


cdef object compute(Call call, int threads):
    """Compute a validated call, and return its results."""
    if call.operator.kernels == HESSIAN_PRODUCT:
        return hessian_product(call, threads)
    cdef Results results = Results(call)
    cdef CrossEntropy x
    cdef Problem p
    cdef cnp.ndarray gradient = results.gradient
    cdef list held = describe_loss(&x, call, results.arrays, True)
    if gradient is None:
        gradient = input_of(call)  # never written
    if describe_call(&p, call, &x, gradient):
        solve(&x, &p, threads, None, -1)
    else:
        finish_without_rows(&x)
    del held
    return results.deliver()


cdef cnp.ndarray vector_of(Call call):
    return <cnp.ndarray>value(call, "vector")


cdef cnp.ndarray hessian_product(Call call, int threads):
    """Compute the product of the Hessian and a vector, and return it."""
    cdef CrossEntropy x
    cdef Problem p
    cdef cnp.ndarray result = (<Result>call.operator.result_specs[0]).allocate(call)
    cdef list held = describe_loss(&x, call, [result], True)
    if describe_call(&p, call, &x, input_of(call)):
        solve(&x, &p, threads, vector_of(call), call.axis)
    del held
    return result


cdef cnp.ndarray rows_of_vector(cnp.ndarray vector, int axis, int dtype, int tile_dtype):
    """Return the rows of a vector in C order with the classes side by side; a copy if necessary.

    The vector is rounded to `dtype`, that of the logits, and converted to the dtype of tiles.
    """
    with np.errstate(all="ignore"):
        rows = vector.astype(_dtypes[dtype], copy=False)
        if cnp.PyArray_NDIM(vector):
            rows = np.moveaxis(rows, axis, -1)
        return np.require(rows, _dtypes[tile_dtype], ["C", "A"])


cdef int solve(CrossEntropy *x, const Problem *p, int asked, cnp.ndarray vector, int axis) except -1:
    """Solve a problem. `vector` has its classes along `axis`, or is None."""
    cdef Plan serial                  # of the logits as they are; the loss may transform them
    cdef int threads = choose_threads(p, asked, &serial)
    cdef cnp.ndarray memory
    cdef double last_check = 0
    prepare_loss(x, p, threads)
    if vector is not None:
        vector = rows_of_vector(vector, axis, p.dtype, x.s.plan.tile_dtype)
        x.vector = cnp.PyArray_BYTES(vector)
    memory = _memory.workspace(loss_workspace_size(x))
    _memory.check_layout(place_loss_workspace(x, _memory.aligned(cnp.PyArray_BYTES(memory))) + ALIGNMENT, memory)
    with nogil:
        run_loss(x, asked == 0, &last_check)
    return 0


cdef Py_ssize_t copied_bytes(Call call) except -1:
    """Return the most bytes of arguments that are copied."""
    cdef Py_ssize_t size = 0
    for name in call.operator.array_names[1:2] + call.operator.optional_names:
        # Dense targets are read in place.
        if is_array(value(call, name)) and (name != "target" or dtype_of(value(call, name)) < 0):
            size += 8 * cnp.PyArray_SIZE(<cnp.ndarray>value(call, name))
    if call.operator.kernels == HESSIAN_PRODUCT:
        size += copied_vector_bytes(vector_of(call), dtype_of(input_of(call)), call.axis)
    return size


cdef Py_ssize_t copied_vector_bytes(cnp.ndarray vector, int dtype, int axis) except -1:
    """Return the most bytes of the copies that `rows_of_vector` makes. 16-bit logits may have wider tiles."""
    cdef object rows = np.moveaxis(vector, axis, -1) if cnp.PyArray_NDIM(vector) else vector
    if dtype_of(vector) == dtype and vector.dtype.itemsize > 2 and vector.dtype.isnative and rows.flags.c_contiguous and rows.flags.aligned:
        return 0
    return (16 if dtype == AG_FLOAT64 else 8) * cnp.PyArray_SIZE(vector)


cdef list requested(Call call):
    """Return an array for each result that is requested, whose memory is never touched, and None for others."""
    return [None if spec is None else input_of(call) for spec in call.specs]


cdef cnp.ndarray shape_of_gradient(Call call):
    """Return an array like the one that the gradient is computed into; it may have no memory."""
    cdef cnp.ndarray out = call.first_out
    if call.operator.kernels == HESSIAN_PRODUCT or not value(call, "return_grad"):
        return input_of(call)
    if out is None:
        return without_memory(*call.specs[INPUT_GRAD])
    if is_overwritten(call, out):
        return without_memory((<object>out).shape, _dtypes[dtype_of(out)])
    return out


cdef Py_ssize_t workspace_bound(Call call, int threads) except -1:
    """Return the most bytes that `compute` allocates in addition to the results, from shapes, dtypes and layouts."""
    cdef Problem p
    cdef CrossEntropy x
    cdef cnp.ndarray out = shape_of_gradient(call)
    cdef Py_ssize_t copies = copied_bytes(call)
    if call.first_out is not None and out is not call.first_out:
        copies += cnp.PyArray_NBYTES(out)
    describe_loss(&x, call, requested(call), False)
    if not describe_call(&p, call, &x, out):
        return copies
    return copies + most_workspace(&x, &p, threads)


cdef Py_ssize_t most_workspace(CrossEntropy *x, const Problem *p, int threads) except -1:
    """Return the most bytes of the workspace of a problem. `threads`: 0 for the default."""
    cdef Py_ssize_t most = 0
    for count in [threads] if threads else [1, threads_of(p, 0)]:
        prepare_loss(x, p, count)
        most = max(most, loss_workspace_size(x))
    return most


cdef tuple plan_and_threads(Call call, int threads):
    """Return the name of the plan of a call, the threads of calls that follow one another, and the estimated nanoseconds."""
    cdef Problem p
    cdef CrossEntropy x
    describe_loss(&x, call, requested(call), False)
    if not describe_call(&p, call, &x, shape_of_gradient(call)):
        return "nothing to compute", 1, 0.0
    threads = threads_of(&p, threads)
    prepare_loss(&x, &p, threads)
    return plan_name(&x.s), threads, x.s.plan.cost
