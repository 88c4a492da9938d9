"""The loss of logits as a function that XLA calls without the interpreter's lock, for `ascend_grad.jax`.

A call names its arguments and results as `cross_entropy` does. Its attributes are ``arguments``, ``results``,
``reduction``, ``ignore_index``, ``num_threads`` (0: the default), ``dim`` (counted from the end) and the options that are
numbers; 0 stands for no ``denominator``.
"""

from cpython.pycapsule cimport PyCapsule_New
from libc.math cimport NAN
from libc.stdint cimport int64_t
from libc.stdio cimport snprintf
from libc.string cimport memset

from ascend_grad._cross_entropy_schedule cimport (
    CrossEntropy,
    loss_workspace_size,
    place_loss_workspace,
    plan_of,
    prepare_loss,
    run_loss,
    scale_of,
)
from ascend_grad._kernels cimport AG_FLOAT32, AG_FLOAT64
from ascend_grad._linear_problem cimport set_number
from ascend_grad._memory cimport ALIGNMENT, align_up, aligned, allocate, arena_alloc, release
from ascend_grad._rowwise_kernels cimport ag_row_op
from ascend_grad._rowwise_plan cimport Problem, describe
from ascend_grad._rowwise_schedule cimport choose_threads
from ascend_grad._views cimport View
from ascend_grad._xla_frame cimport (
    AG_XLA_INVALID_ARGUMENT,
    AG_XLA_RESOURCE_EXHAUSTED,
    INT64,
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
    are_integers,
    argument,
    begin_call,
    doubles,
    first_bad_target,
    first_bad_temperature,
    has_dims,
    integers,
    is_complete,
    is_reduction,
    memory_size,
    number_or_doubles,
    numbers,
    refused_target,
    refused_temperature,
    require,
    result,
    setting,
    whole_number,
    write_integers,
)

cdef double ONE = 1

ctypedef struct RowsCall:
    LossCall c
    CrossEntropy x
    BufferView input
    BufferView out                    # the gradient, or the input if it is not requested
    int axis                          # of the classes
    int64_t[MAX_RANK] dims            # of the rows
    int64_t rank
    int64_t rows
    const ag_xla_buffer *target
    bint is_reduced
    void *loss                        # the reduced loss
    double temperature
    int num_threads


# ---- arguments -------------------------------------------------------------------------------------------------------

cdef bint describe_logits(RowsCall *call, const ag_xla_buffer *input) noexcept nogil:
    """Describe the logits, the shape of the rows, and the gradient; return False if they do not fit together."""
    cdef LossCall *c = &call.c
    cdef const ag_xla_buffer *gradient = result(c, "input_grad")
    cdef int64_t dim = whole_number(c, "dim")
    cdef int axis
    if input == NULL or not c.fits or not describe_buffer(&call.input, input) or not -input.rank <= dim < 0:
        return False
    call.axis, call.rows = <int>(input.rank + dim), 1
    for axis in range(call.input.view.ndim):
        if axis != call.axis:
            call.dims[call.rank] = input.dims[axis]
            call.rank, call.rows = call.rank + 1, call.rows * input.dims[axis]
    call.x.return_grad, call.x.is_double = gradient != NULL, call.input.view.dtype == AG_FLOAT64
    if gradient == NULL:
        gradient = input  # never written
    if not describe_buffer(&call.out, gradient):
        return False
    # Rows without an element have no loss.
    return (
        call.out.view.dtype == call.input.view.dtype and has_dims(gradient, input.rank, input.dims)
        and (call.rows == 0 or input.dims[call.axis] > 0)
    )


cdef void set_targets(RowsCall *call) noexcept nogil:
    cdef LossCall *c = &call.c
    cdef CrossEntropy *x = &call.x
    cdef bint has_several
    call.target = argument(c, "target")
    require(c, call.target != NULL and are_integers(call.target))
    if not c.fits:
        return
    has_several = call.target.rank == call.rank + 1
    require(c, has_several or call.target.rank == call.rank)
    require(c, has_several == (argument(c, "target_prob") != NULL))
    if not c.fits:
        return
    x.target_count = call.target.dims[call.rank] if has_several else 1
    require(c, x.target_count > 0 and (has_several or has_dims(call.target, call.rank, call.dims)))
    if has_several:
        x.prob = doubles(c, "target_prob", call.target.rank, call.target.dims)
        require_rows(call)
    x.target, x.has_wide_targets = call.target.data, dtype_of(call.target) == INT64
    x.ignore_index = whole_number(c, "ignore_index")


cdef void require_rows(RowsCall *call) noexcept nogil:
    """Check that several targets of each row have the shape of the rows before their last axis."""
    cdef int64_t axis
    for axis in range(call.rank):
        require(&call.c, call.target.dims[axis] == call.dims[axis])


cdef void set_options(RowsCall *call) noexcept nogil:
    cdef LossCall *c = &call.c
    cdef CrossEntropy *x = &call.x
    cdef int64_t classes = call.input.view.shape[call.axis]
    cdef bint is_number = False
    call.is_reduced = not is_reduction(c, "none")
    x.is_mean = is_reduction(c, "mean")
    require(c, x.is_mean or not call.is_reduced or is_reduction(c, "sum"))
    x.label_smoothing, x.lse_square_scale = setting(c, "label_smoothing"), setting(c, "lse_square_scale")
    x.denominator, call.temperature = setting(c, "denominator"), setting(c, "temperature")
    call.num_threads = <int>whole_number(c, "num_threads")
    x.class_weight = doubles(c, "class_weight", 1, &classes)
    x.token_weight = doubles(c, "token_weight", call.rank, call.dims)
    x.temperature = doubles(c, "temperature", call.rank, call.dims)
    x.has_temperatures = x.temperature != NULL
    if x.temperature == NULL:
        x.temperature = &call.temperature
    x.grad_loss = number_or_doubles(c, "grad_loss", call.rank, call.dims, &is_number)
    x.has_grad_of_rows = x.grad_loss != NULL and not is_number
    require(c, not call.is_reduced or not x.has_grad_of_rows)
    if x.grad_loss == NULL:
        x.grad_loss = &ONE


cdef void set_results(RowsCall *call) noexcept nogil:
    """Describe the results but for the gradient."""
    cdef LossCall *c = &call.c
    cdef CrossEntropy *x = &call.x
    cdef int dtype = AG_FLOAT64 if x.is_double else AG_FLOAT32
    cdef Py_ssize_t bytes = call.rows * sizeof(double)
    call.loss = numbers(c, "loss", dtype, 0 if call.is_reduced else call.rank, call.dims)
    require(c, result(c, "loss") != NULL)
    if call.is_reduced:
        x.loss_terms = <double *>arena_alloc(&c.memory, bytes)
        x.square_terms = <double *>arena_alloc(&c.memory, bytes) if x.lse_square_scale != 0 else NULL
    else:
        x.losses = call.loss
    x.lse = numbers(c, "lse", dtype, call.rank, call.dims)
    x.log_prob = numbers(c, "log_prob", dtype, call.rank, call.dims)
    x.entropy = numbers(c, "entropy", dtype, call.rank, call.dims)
    x.predicted = integers(c, "predicted", call.rank, call.dims)
    if x.predicted == NULL and result(c, "correct") != NULL:
        x.predicted = <int64_t *>arena_alloc(&c.memory, bytes)
    x.has_prob, x.has_class_weight = x.prob != NULL, x.class_weight != NULL
    x.has_row_outputs = x.entropy != NULL or x.predicted != NULL
    x.has_outputs = x.has_row_outputs or x.lse != NULL or x.log_prob != NULL
    # log_prob and correct exist only for rows with a single target.
    require(c, x.prob == NULL or (x.log_prob == NULL and result(c, "correct") == NULL))


cdef Py_ssize_t most_memory(RowsCall *call) noexcept nogil:
    """Return the bytes of converted numbers and of the vectors that `set_results` allocates."""
    return memory_size(&call.c) + 3 * align_up(8 * call.rows, ALIGNMENT)


cdef bint describe_problem(RowsCall *call, Problem *p) noexcept nogil:
    """Describe the problem; return False if it is empty. An array of the rows' numbers has no memory."""
    cdef View numbers_of_rows = call.input.view
    cdef Py_ssize_t[MAX_RANK] strides
    cdef Py_ssize_t stride = 1
    cdef int axis
    cdef CrossEntropy *x = &call.x
    cdef ag_row_op op = plan_of(x, call.input.view.shape[call.axis], call.input.view.dtype != call.out.view.dtype)
    cdef double scale = 1 if x.has_temperatures else scale_of(call.temperature, x.is_double)
    for axis in range(numbers_of_rows.ndim - 1, -1, -1):
        strides[axis] = 0
        if axis != call.axis:
            strides[axis] = stride
            stride *= numbers_of_rows.shape[axis]
    numbers_of_rows.data, numbers_of_rows.strides, numbers_of_rows.itemsize = NULL, strides, 1
    return describe(
        p, op, &call.input.view, &call.input.view, &numbers_of_rows, &call.out.view, call.axis, scale
    )


cdef void write_place(RowsCall *call, int64_t target, char *place, size_t size) noexcept nogil:
    """Write the index of a target in its array, as in "at index (1, 2)"."""
    cdef int64_t[MAX_RANK + 1] index
    cdef int64_t axis
    cdef size_t used = snprintf(place, size, "at index (")
    for axis in range(call.target.rank - 1, -1, -1):
        index[axis] = target % call.target.dims[axis]
        target //= call.target.dims[axis]
    for axis in range(call.target.rank):
        used += snprintf(place + used, size - used, ", %lld" if axis else "%lld", <long long>index[axis])
    snprintf(place + used, size - used, ",)" if call.target.rank == 1 else ")")


cdef ag_xla_error *check_values(RowsCall *call) noexcept nogil:
    cdef CrossEntropy *x = &call.x
    cdef int64_t classes = call.input.view.shape[call.axis], value = 0
    cdef char[256] place
    cdef int64_t i = first_bad_temperature(x.temperature, call.rows) if x.has_temperatures else -1
    if i >= 0:
        return refused_temperature(&call.c, x.temperature, i)
    i = first_bad_target(call.target, classes, x.ignore_index, &value)
    if i < 0:
        return NULL
    write_place(call, i, place, sizeof(place))
    return refused_target(&call.c, classes, x.ignore_index, value, place)


# ---- the function ----------------------------------------------------------------------------------------------------

cdef ag_xla_error *solve(RowsCall *call) noexcept nogil:
    cdef CrossEntropy *x = &call.x
    cdef Problem p
    cdef char *workspace
    cdef Py_ssize_t nbytes
    if not describe_problem(call, &p):
        # The mean over no rows is NaN, unless the caller gave the denominator.
        x.loss = NAN if x.is_mean and x.denominator == 0 else 0
        return NULL
    prepare_loss(x, &p, choose_threads(&p, call.num_threads))
    nbytes = loss_workspace_size(x)
    workspace = allocate(nbytes)
    if workspace == NULL:
        return failed(call.c.frame, AG_XLA_RESOURCE_EXHAUSTED, MEMORY)
    place_loss_workspace(x, aligned(workspace))
    run_loss(x, call.num_threads == 0, NULL)  # raises nothing, as signals are not checked
    release(workspace, nbytes)
    return NULL


cdef ag_xla_error *run_in_memory(RowsCall *call) noexcept nogil:
    cdef LossCall *c = &call.c
    cdef CrossEntropy *x = &call.x
    cdef int64_t *correct
    cdef ag_xla_error *error
    set_targets(call)
    set_options(call)
    set_results(call)
    correct = integers(c, "correct", 0, NULL)
    if not is_complete(c):
        return failed(c.frame, AG_XLA_INVALID_ARGUMENT, SHAPES)
    error = check_values(call)
    if error == NULL:
        error = solve(call)
    if error != NULL:
        return error
    if call.is_reduced:
        set_number(call.loss, 0, x.is_double, x.loss)
    write_integers(c, "predicted", x.predicted)
    if correct != NULL:
        correct[0] = x.correct
        write_integers(c, "correct", correct)
    return NULL


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
    nbytes = most_memory(&call)
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
