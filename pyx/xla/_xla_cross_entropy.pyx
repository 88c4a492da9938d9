"""The loss of logits as a function that XLA calls without the interpreter's lock, for `ascend_grad.jax`.

A call names its arguments and results as `cross_entropy` does, or asks for the product of the Hessian and a vector alone:
the result ``product`` and the argument ``vector``, both with the classes last. The attributes are ``arguments``, ``results``,
``reduction``, ``ignore_index``, ``num_threads`` (0: the default), ``axis`` (counted from the end) and the options that are
numbers; 0 stands for no ``denominator`` and no ``softcap``.
"""

from cpython.pycapsule cimport PyCapsule_New
from libc.stdint cimport int64_t
from libc.stdio cimport snprintf
from libc.string cimport memset

from ascend_grad cimport _cpu
from ascend_grad._cross_entropy_rows cimport CrossEntropy, scale_of_all
from ascend_grad._cross_entropy_schedule cimport (
    finish_without_rows,
    loss_workspace_size,
    place_loss_workspace,
    plan_of,
    prepare_loss,
    run_loss,
)
from ascend_grad._kernels cimport AG_FLOAT64, ag_dtype, ag_widen
from ascend_grad._loss_options cimport LossOptions, is_dense
from ascend_grad._memory cimport ALIGNMENT, align_up, aligned, allocate, release
from ascend_grad._rowwise_kernels cimport ag_row_op
from ascend_grad._rowwise_plan cimport Plan, Problem, describe
from ascend_grad._rowwise_schedule cimport choose_threads
from ascend_grad._views cimport View
from ascend_grad._xla_frame cimport (
    AG_XLA_INVALID_ARGUMENT,
    AG_XLA_RESOURCE_EXHAUSTED,
    MAX_RANK,
    MEMORY,
    SHAPES,
    SIGNATURE,
    BufferView,
    ag_xla_buffer,
    ag_xla_call_frame,
    ag_xla_error,
    describe_buffer,
    dtype_of,
    failed,
)
from ascend_grad._xla_losses cimport (
    LossCall,
    answer,
    argument,
    begin_call,
    first_bad_target,
    first_bad_temperature,
    has_dims,
    is_complete,
    memory_size,
    numbers,
    refused_target,
    refused_temperature,
    require,
    result,
    set_options,
    set_results,
    whole_number,
    write_integer_results,
)

ctypedef struct RowsCall:
    LossCall c
    CrossEntropy x
    BufferView input
    BufferView prob                   # dense targets
    BufferView out                    # the gradient, or the input if it is not requested
    bint is_product                   # the product of the Hessian and a vector is requested, and nothing else
    int axis                          # of the classes
    int64_t[MAX_RANK] dims            # of the rows
    int64_t rank
    int num_threads


# ---- arguments -------------------------------------------------------------------------------------------------------

cdef bint describe_logits(RowsCall *call, const ag_xla_buffer *input) noexcept nogil:
    """Describe the logits, the shape of the rows, and the gradient; return False if they do not fit together."""
    cdef LossCall *c = &call.c
    cdef const ag_xla_buffer *gradient = result(c, "input_grad")
    cdef int64_t reduced = whole_number(c, "axis")
    cdef int64_t rows = 1
    cdef int axis
    if input == NULL or not c.fits or not describe_buffer(&call.input, input) or not -input.rank <= reduced < 0:
        return False
    call.axis = <int>(input.rank + reduced)
    for axis in range(call.input.view.ndim):
        if axis != call.axis:
            call.dims[call.rank] = input.dims[axis]
            call.rank, rows = call.rank + 1, rows * input.dims[axis]
    call.x.return_grad, call.x.o.is_double = gradient != NULL, call.input.view.dtype == AG_FLOAT64
    if gradient == NULL:
        gradient = input  # never written
    if not describe_buffer(&call.out, gradient):
        return False
    # Rows without an element have no loss.
    return (
        call.out.view.dtype == call.input.view.dtype and has_dims(gradient, input.rank, input.dims)
        and (rows == 0 or input.dims[call.axis] > 0)
    )


cdef bint describe_problem(RowsCall *call, Problem *p) noexcept nogil:
    """Describe the problem; return False if it is empty. An array of the rows' numbers has no memory."""
    cdef View numbers_of_rows = call.input.view
    cdef Py_ssize_t[MAX_RANK] strides
    cdef Py_ssize_t stride = 1
    cdef int axis
    cdef CrossEntropy *x = &call.x
    cdef ag_row_op op = plan_of(x, call.input.view.shape[call.axis], call.input.view.dtype != call.out.view.dtype)
    for axis in range(numbers_of_rows.ndim - 1, -1, -1):
        strides[axis] = 0
        if axis != call.axis:
            strides[axis] = stride
            stride *= numbers_of_rows.shape[axis]
    numbers_of_rows.data, numbers_of_rows.strides, numbers_of_rows.itemsize = NULL, strides, 1
    return describe(
        p, op, &call.input.view, &call.prob.view, &numbers_of_rows, &call.out.view, call.axis, scale_of_all(x)
    )


cdef void write_place(RowsCall *call, int64_t target, char *place, size_t size) noexcept nogil:
    """Write the index of a target in its array, as in "at index (1, 2)"."""
    cdef int64_t[MAX_RANK + 1] index
    cdef int64_t axis
    cdef size_t used = snprintf(place, size, "at index (")
    for axis in range(call.c.target.rank - 1, -1, -1):
        index[axis] = target % call.c.target.dims[axis]
        target //= call.c.target.dims[axis]
    for axis in range(call.c.target.rank):
        used += snprintf(place + used, size - used, ", %lld" if axis else "%lld", <long long>index[axis])
    snprintf(place + used, size - used, ",)" if call.c.target.rank == 1 else ")")


cdef ag_xla_error *check_values(RowsCall *call) noexcept nogil:
    cdef const LossOptions *o = &call.x.o
    cdef int64_t classes = call.input.view.shape[call.axis], i = first_bad_temperature(o)
    cdef char[256] place
    if i >= 0:
        return refused_temperature(&call.c, o, i)
    i = first_bad_target(&call.c, o, classes)
    if i < 0:
        return NULL
    write_place(call, i, place, sizeof(place))
    return refused_target(&call.c, o, classes, i, place)


# ---- the function ----------------------------------------------------------------------------------------------------

cdef Py_ssize_t widened_size(const CrossEntropy *x) noexcept nogil:
    """Return the bytes of the vector in the dtype of tiles; 0 if it has this dtype, that of the logits, already.

    Tiles of 16-bit logits may be float32.
    """
    if x.vector == NULL or x.s.plan.tile_dtype == x.s.p.dtype:
        return 0
    return align_up(x.o.rows * x.s.p.n * <Py_ssize_t>sizeof(float), ALIGNMENT)


cdef ag_xla_error *solve(RowsCall *call) noexcept nogil:
    cdef CrossEntropy *x = &call.x
    cdef Problem p
    cdef Plan serial                  # of the logits as they are; the loss may transform them
    cdef char *workspace
    cdef char *base
    cdef Py_ssize_t nbytes, of_vector
    if not describe_problem(call, &p):
        if not call.is_product:
            finish_without_rows(x)
        return NULL
    prepare_loss(x, &p, choose_threads(&p, call.num_threads, &serial))
    of_vector = widened_size(x)
    nbytes = loss_workspace_size(x) + of_vector
    workspace = allocate(nbytes)
    if workspace == NULL:
        return failed(call.c.frame, AG_XLA_RESOURCE_EXHAUSTED, MEMORY)
    base = aligned(workspace)
    if of_vector:
        ag_widen(_cpu.active(), <ag_dtype>p.dtype, x.vector, <float *>base, p.n * x.o.rows)
        x.vector = base
    place_loss_workspace(x, base + of_vector)
    run_loss(x, call.num_threads == 0, NULL)  # raises nothing, as signals are not checked
    release(workspace, nbytes)
    return NULL


cdef char *full_result(RowsCall *call, const char *name) noexcept nogil:
    """Return the address of a result of the rows' shape and one more dimension, the classes; NULL: not requested."""
    call.dims[call.rank] = call.input.view.shape[call.axis]
    return <char *>numbers(&call.c, name, call.input.view.dtype, call.rank + 1, call.dims)


cdef void set_vector(RowsCall *call) noexcept nogil:
    """Describe the vector that the Hessian is multiplied by. It exists if and only if the product is requested."""
    cdef LossCall *c = &call.c
    cdef const ag_xla_buffer *vector = argument(c, "vector")
    require(c, (vector != NULL) == call.is_product)
    if not c.fits or vector == NULL:
        return
    require(c, dtype_of(vector) == call.input.view.dtype and has_dims(vector, call.rank + 1, call.dims))
    require(c, c.frame.results.size == 1)
    # There is no Hessian of outputs.
    require(c, call.x.o.grad_lse == NULL and call.x.o.grad_log_prob == NULL and call.x.o.grad_entropy == NULL)
    call.x.vector = <const char *>vector.data


cdef ag_xla_error *run_in_memory(RowsCall *call) noexcept nogil:
    cdef LossCall *c = &call.c
    cdef ag_xla_error *error
    set_options(c, &call.x.o, call.rank, call.dims, call.input.view.shape[call.axis])
    set_results(c, &call.x.o, call.rank, call.dims)
    call.x.prob, call.x.hessian = full_result(call, "prob"), full_result(call, "hessian_diag")
    call.is_product = result(c, "product") != NULL
    if call.is_product:
        call.x.hessian = full_result(call, "product")
    set_vector(call)
    if c.fits and is_dense(&call.x.o):
        require(c, has_dims(c.target, call.input.view.ndim, argument(c, "input").dims) and describe_buffer(&call.prob, c.target))
    require(c, call.is_product or result(c, "loss") != NULL)
    call.num_threads = <int>whole_number(c, "num_threads")
    if not is_complete(c):
        return failed(c.frame, AG_XLA_INVALID_ARGUMENT, SHAPES)
    error = check_values(call)
    if error == NULL:
        error = solve(call)
    if error == NULL:
        write_integer_results(c, &call.x.o)
    return error


cdef ag_xla_error *compute(ag_xla_call_frame *frame) noexcept nogil:
    cdef RowsCall call
    cdef ag_xla_error *error
    cdef char *memory
    cdef Py_ssize_t nbytes
    memset(&call, 0, sizeof(call))
    if not begin_call(&call.c, frame, "cross_entropy"):
        return failed(frame, AG_XLA_INVALID_ARGUMENT, SIGNATURE)
    if not describe_logits(&call, argument(&call.c, "input")):
        return failed(frame, AG_XLA_INVALID_ARGUMENT, SHAPES)
    nbytes = memory_size(&call.c)
    call.c.memory.base = memory = allocate(nbytes)
    if memory == NULL:
        return failed(frame, AG_XLA_RESOURCE_EXHAUSTED, MEMORY)
    error = run_in_memory(&call)
    release(memory, nbytes)
    return error


cdef ag_xla_error *call(ag_xla_call_frame *frame) noexcept nogil:
    return answer(frame, compute)


def handler():
    """Return the function as a capsule, for ``jax.ffi.register_ffi_target``."""
    return PyCapsule_New(<void *>call, NULL, NULL)
