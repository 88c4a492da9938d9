"""The operators of a linear layer as a function that XLA calls without the interpreter's lock, for `ascend_grad.jax`.

A call names its arguments and results as `linear_cross_entropy` does, or `linear_cross_entropy_backward` if ``lse`` is an
argument, or `linear_top_k` if ``index`` is a result. The attributes of a loss are ``arguments``, ``results``, ``reduction``,
``ignore_index``, ``num_threads`` (0: the default) and the options that are numbers; 0 stands for no ``denominator`` and no
``softcap``. `linear_top_k` reads those that it has.
"""

from cpython.pycapsule cimport PyCapsule_New
from libc.stdint cimport int64_t
from libc.stdio cimport snprintf
from libc.string cimport memset

from ascend_grad cimport _cpu
from ascend_grad._kernels cimport AG_FLOAT32, AG_FLOAT64, ag_dtype, ag_itemsize
from ascend_grad._linear_kernels cimport ag_matrix
from ascend_grad._linear_loss cimport (
    Loss,
    describe_loss,
    has_loss_plans,
    loss_workspace_size,
    place_loss_workspace,
    prepare_loss,
    run_loss,
    vectors_size,
)
from ascend_grad._linear_problem cimport Problem, matrix_of
from ascend_grad._linear_results cimport write_doubles
from ascend_grad._linear_schedule cimport Schedule, has_plans, place_workspace, prepare, run, workspace_size
from ascend_grad._linear_top_k cimport describe_top_k
from ascend_grad._loss_options cimport LossOptions, is_dense
from ascend_grad._memory cimport SIZE_LIMIT, allocate, release
from ascend_grad._views cimport size_of
from ascend_grad._xla_frame cimport (
    AG_XLA_INVALID_ARGUMENT,
    AG_XLA_RESOURCE_EXHAUSTED,
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
    doubles,
    first_bad_target,
    first_bad_temperature,
    has_dims,
    integers,
    is_complete,
    memory_size,
    numbers,
    refused_target,
    refused_temperature,
    require,
    result,
    set_options,
    set_results,
    setting,
    whole_number,
    write_integer_results,
    write_integers,
)

from .operators.options import MAX_TOP_K as MOST_TOP_K

cdef int64_t MAX_TOP_K = MOST_TOP_K

ctypedef struct LinearCall:
    LossCall c
    Loss x
    ag_matrix bias_grad               # data is NULL if it is not requested
    int num_threads


# ---- arguments -------------------------------------------------------------------------------------------------------

cdef bint set_matrix(
    ag_matrix *to, const ag_xla_buffer *buffer, int dtype, int64_t rank, const int64_t *dims
) noexcept nogil:
    """Describe a matrix, or a vector; return False if it has another shape or dtype, or is larger than memory."""
    cdef BufferView matrix
    if buffer == NULL or buffer.rank != rank or not describe_buffer(&matrix, buffer):
        return False
    to[0] = matrix_of(&matrix.view)
    return (
        matrix.view.dtype == dtype and has_dims(buffer, rank, dims)
        and size_of(&matrix.view) <= SIZE_LIMIT // matrix.view.itemsize
    )


cdef void set_gradient(
    LossCall *c, const char *name, ag_matrix *to, bint *is_requested, int dtype, const int64_t *dims
) noexcept nogil:
    cdef const ag_xla_buffer *buffer = result(c, name)
    is_requested[0] = buffer != NULL
    require(c, buffer == NULL or set_matrix(to, buffer, dtype, 2, dims))


cdef void set_layer_options(LinearCall *call, int64_t rows, int64_t vocab) noexcept nogil:
    """Describe what the loss of a linear layer has beside the options of every loss, and the gradient of the bias."""
    cdef LossCall *c = &call.c
    cdef Loss *x = &call.x
    cdef const ag_xla_buffer *bias_grad = result(c, "bias_grad")
    x.p.filter_eps = setting(c, "filter_eps")
    x.bias = doubles(c, "bias", 1, &vocab)
    x.lse, x.entropy = doubles(c, "lse", 1, &rows), doubles(c, "entropy", 1, &rows)
    x.with_bias_grad = bias_grad != NULL
    require(c, bias_grad == NULL or set_matrix(&call.bias_grad, bias_grad, dtype_of(bias_grad), 1, &vocab))
    call.num_threads = <int>whole_number(c, "num_threads")


cdef bint set_layer(LossCall *c, Problem *p) noexcept nogil:
    """Describe input and weight; return False if they do not fit together."""
    cdef const ag_xla_buffer *input = argument(c, "input")
    cdef const ag_xla_buffer *weight = argument(c, "weight")
    cdef int dtype
    if input == NULL or weight == NULL or input.rank != 2 or weight.rank != 2 or weight.dims[1] != input.dims[1]:
        return False
    dtype = dtype_of(input)
    if not set_matrix(&p.input, input, dtype, 2, input.dims) or not set_matrix(&p.weight, weight, dtype, 2, weight.dims):
        return False
    p.dtype, p.vocab, p.hidden = <ag_dtype>dtype, weight.dims[0], weight.dims[1]
    return True


cdef bint describe(LinearCall *call) noexcept nogil:
    """Describe the arguments and results of a loss; return False if they do not fit together."""
    cdef LossCall *c = &call.c
    cdef Problem *p = &call.x.p
    cdef const ag_xla_buffer *input = argument(c, "input")
    cdef const ag_xla_buffer *weight = argument(c, "weight")
    cdef int dtype
    cdef int64_t[2] dims
    if not set_layer(c, p):
        return False
    dtype = p.dtype
    set_gradient(c, "input_grad", &p.input_grad, &p.with_input_grad, dtype, input.dims)
    set_gradient(c, "weight_grad", &p.weight_grad, &p.with_weight_grad, dtype, weight.dims)
    if p.with_weight_grad:
        p.weight_grad_bytes = p.vocab * p.hidden * ag_itemsize[dtype]
    call.x.o.is_double = dtype == AG_FLOAT64
    set_options(c, &call.x.o, 1, input.dims, weight.dims[0])
    if c.fits and is_dense(&call.x.o):
        dims[0], dims[1] = input.dims[0], weight.dims[0]
        require(c, set_matrix(&p.prob, c.target, dtype_of(c.target), 2, dims))
    set_layer_options(call, input.dims[0], weight.dims[0])
    if call.x.lse == NULL:
        set_results(c, &call.x.o, 1, input.dims)
    describe_loss(&call.x)
    return is_complete(c)


cdef bint describe_largest(LinearCall *call, const ag_xla_buffer *index) noexcept nogil:
    """Describe the arguments and results of `linear_top_k`; return False if they do not fit together."""
    cdef LossCall *c = &call.c
    cdef Problem *p = &call.x.p
    cdef int64_t[2] dims
    if not set_layer(c, p) or index.rank != 2 or not 1 <= index.dims[1] <= min(MAX_TOP_K, <int64_t>p.vocab):
        return False
    dims[0], dims[1] = argument(c, "input").dims[0], index.dims[1]
    p.rows.total = p.rows.active = call.x.o.rows = dims[0]
    p.with_statistics, p.top_k = True, dims[1]
    p.top_values = numbers(c, "log_prob", AG_FLOAT64 if p.dtype == AG_FLOAT64 else AG_FLOAT32, 2, dims)
    p.top_indices = integers(c, "index", 2, dims)
    p.temperature, p.temperatures = setting(c, "temperature"), doubles(c, "temperature", 1, dims)
    p.transform.scale, p.transform.softcap = setting(c, "logit_scale"), setting(c, "softcap")
    dims[0] = p.vocab
    p.bias, call.x.o.temperatures = doubles(c, "bias", 1, dims), p.temperatures
    call.num_threads = <int>whole_number(c, "num_threads")
    describe_top_k(p)
    require(c, c.frame.results.size == 2)
    return is_complete(c)


cdef ag_xla_error *check_values(LinearCall *call) noexcept nogil:
    cdef const LossOptions *o = &call.x.o
    cdef int64_t i = first_bad_target(&call.c, o, call.x.p.vocab)
    cdef char[32] place
    if i >= 0:
        snprintf(place, sizeof(place), "in row %lld", <long long>(i // o.target_count))
        return refused_target(&call.c, o, call.x.p.vocab, i, place)
    i = first_bad_temperature(o)
    return NULL if i < 0 else refused_temperature(&call.c, o, i)


# ---- the function ----------------------------------------------------------------------------------------------------

cdef ag_xla_error *run_in_workspace(LinearCall *call) noexcept nogil:
    cdef Loss *x = &call.x
    cdef char *workspace = NULL
    cdef Py_ssize_t nbytes
    prepare_loss(x, 0, NULL)  # this and run_loss raise nothing, as signals are not checked
    nbytes = loss_workspace_size(x)
    if has_loss_plans(x):
        workspace = allocate(nbytes)
    if workspace == NULL:
        return failed(call.c.frame, AG_XLA_RESOURCE_EXHAUSTED, MEMORY)
    place_loss_workspace(x, workspace)
    run_loss(x, call.num_threads, NULL)
    release(workspace, nbytes)
    if x.with_bias_grad:
        write_doubles(_cpu.active(), x.p.bias_sums, x.p.vocab, &call.bias_grad)
    write_integer_results(&call.c, &x.o)
    return NULL


cdef ag_xla_error *run_with_vectors(LinearCall *call) noexcept nogil:
    cdef ag_xla_error *error = check_values(call)
    cdef Py_ssize_t nbytes = vectors_size(&call.x)
    if error != NULL:
        return error
    call.x.vectors = allocate(nbytes)
    if call.x.vectors == NULL:
        return failed(call.c.frame, AG_XLA_RESOURCE_EXHAUSTED, MEMORY)
    error = run_in_workspace(call)
    release(call.x.vectors, nbytes)
    return error


cdef ag_xla_error *run_largest(LinearCall *call) noexcept nogil:
    cdef Py_ssize_t nbytes
    cdef char *workspace = NULL
    cdef Schedule schedule
    cdef int64_t i = first_bad_temperature(&call.x.o)
    if i >= 0:
        return refused_temperature(&call.c, &call.x.o, i)
    prepare(&schedule, &call.x.p, 0)  # this and run raise nothing, as signals are not checked
    nbytes = workspace_size(&schedule)
    if has_plans(&schedule):
        workspace = allocate(nbytes)
    if workspace == NULL:
        return failed(call.c.frame, AG_XLA_RESOURCE_EXHAUSTED, MEMORY)
    place_workspace(&schedule, workspace)
    run(&schedule, call.num_threads, NULL)
    release(workspace, nbytes)
    write_integers(&call.c, "index", call.x.p.top_indices)
    return NULL


cdef ag_xla_error *compute(ag_xla_call_frame *frame) noexcept nogil:
    cdef LinearCall call
    cdef ag_xla_error *error
    cdef const ag_xla_buffer *index
    cdef char *memory
    cdef Py_ssize_t nbytes
    memset(&call, 0, sizeof(call))
    if not begin_call(&call.c, frame, "linear_cross_entropy"):
        return failed(frame, AG_XLA_INVALID_ARGUMENT, SIGNATURE)
    nbytes = memory_size(&call.c)
    call.c.memory.base = memory = allocate(nbytes)
    if memory == NULL:
        return failed(frame, AG_XLA_RESOURCE_EXHAUSTED, MEMORY)
    index = result(&call.c, "index")
    if index != NULL and describe_largest(&call, index):
        call.c.operator = "linear_top_k"
        error = run_largest(&call)
    elif index == NULL and describe(&call):
        error = run_with_vectors(&call)
    else:
        error = failed(frame, AG_XLA_INVALID_ARGUMENT, SHAPES)
    release(memory, nbytes)
    return error


cdef ag_xla_error *call(ag_xla_call_frame *frame) noexcept nogil:
    return answer(frame, compute)


def handler():
    """Return the function as a capsule, for ``jax.ffi.register_ffi_target``."""
    return PyCapsule_New(<void *>call, NULL, NULL)
