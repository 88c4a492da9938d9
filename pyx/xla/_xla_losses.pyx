"""Calls of losses by XLA: their arguments and results by name, their numbers, and errors in values.

Which arguments and results a call has depends on its options, so it names them. Vectors of options may have any floating
dtype, and integer results may have 32 bits, as JAX has 64 on request only. The schedules read float64 and write int64.
"""

from libc.math cimport INFINITY
from libc.stdint cimport int32_t, int64_t, uint64_t
from libc.stdio cimport snprintf
from libc.string cimport memcmp, strlen

from ascend_grad cimport _cpu
from ascend_grad._kernels cimport (
    AG_FLOAT32,
    AG_FLOAT64,
    ag_dtype,
    ag_fpenv,
    ag_fpenv_enter,
    ag_fpenv_leave,
    ag_widen,
)
from ascend_grad._loss_options cimport (
    REDUCTION_MEAN, REDUCTION_NONE, REDUCTION_SUM, LossOptions, is_dense, numeric_option, target_at
)
from ascend_grad._memory cimport ALIGNMENT, SIZE_LIMIT, align_up, arena_alloc
from ascend_grad._xla_frame cimport (
    AG_XLA_INVALID_ARGUMENT,
    INT32,
    INT64,
    advise_results,
    ag_xla_values,
    buffer_of,
    dtype_of,
    failed,
    integer,
    is_question,
    is_text,
    real,
    text,
)

cdef enum:
    SEGMENT = 256                     # numbers of 16 bits that are converted at a time
    MESSAGE_SIZE = 256
    MAX_BUFFERS = 63                  # arguments, or results, of a call


cdef ag_xla_error *answer(ag_xla_call_frame *frame, Compute compute) noexcept nogil:
    """Answer XLA's question for the version of its interface, or compute in the default floating-point mode."""
    cdef ag_fpenv mode
    cdef ag_xla_error *error
    if is_question(frame):
        return NULL
    mode = ag_fpenv_enter()
    advise_results(frame)
    error = compute(frame)
    ag_fpenv_leave(mode)
    return error


# ---- buffers by name -------------------------------------------------------------------------------------------------

cdef int64_t place_of(const ag_xla_span *names, const char *name) noexcept nogil:
    """Return the place of a word among words that are separated by spaces, or -1."""
    cdef size_t begin = 0, end = 0, length = strlen(name)
    cdef int64_t place = 0
    while begin < names.length:
        end = begin
        while end < names.length and names.data[end] != c" ":
            end += 1
        if end - begin == length and memcmp(names.data + begin, name, length) == 0:
            return place
        begin, place = end + 1, place + 1
    return -1


cdef const ag_xla_buffer *named(
    LossCall *c, const ag_xla_span *names, const ag_xla_values *values, uint64_t *found, const char *name
) noexcept nogil:
    """Return the buffer of this name, or NULL if the call has none."""
    cdef int64_t place = place_of(names, name)
    cdef const ag_xla_buffer *buffer
    if place < 0:
        return NULL
    buffer = buffer_of(values, place) if place < min(values.size, <int64_t>MAX_BUFFERS) else NULL
    require(c, buffer != NULL and count_of(buffer) >= 0)
    if not c.fits:
        return NULL
    found[0] |= <uint64_t>1 << place
    return buffer


cdef int64_t count_of(const ag_xla_buffer *buffer) noexcept nogil:
    """Return the number of elements, or -1 for more than memory holds."""
    cdef int64_t count = 1, axis
    for axis in range(buffer.rank):
        if buffer.dims[axis] < 0 or (buffer.dims[axis] and count > SIZE_LIMIT // 8 // buffer.dims[axis]):
            return -1
        count *= buffer.dims[axis]
    return count


cdef bint begin_call(LossCall *c, ag_xla_call_frame *frame, const char *operator) noexcept nogil:
    """Fill in a call without memory; return False if it does not name its buffers."""
    c.frame, c.operator, c.found_arguments, c.found_results, c.fits = frame, operator, 0, 0, True
    c.arguments, c.results = text(&frame.attrs, "arguments"), text(&frame.attrs, "results")
    c.memory.base, c.memory.used, c.target = NULL, 0, NULL
    return (
        c.arguments != NULL and c.results != NULL and frame.args.size < MAX_BUFFERS and frame.results.size < MAX_BUFFERS
    )


cdef Py_ssize_t memory_size(const LossCall *c) noexcept nogil:
    """Return the bytes that converted numbers take at most."""
    cdef Py_ssize_t size = 0
    cdef const ag_xla_buffer *buffer
    cdef int64_t i
    for i in range(c.frame.args.size):
        buffer = buffer_of(&c.frame.args, i)
        # Matrices are read in place, and targets as well, which may be a matrix of probabilities.
        if buffer != NULL and count_of(buffer) > 0 and dtype_of(buffer) >= 0 and not is_matrix(c, i):
            size += align_up(8 * count_of(buffer), ALIGNMENT)
    for i in range(c.frame.results.size):
        buffer = buffer_of(&c.frame.results, i)
        if buffer != NULL and count_of(buffer) > 0 and dtype_of(buffer) == INT32:
            size += align_up(8 * count_of(buffer), ALIGNMENT)
    return size


cdef bint is_matrix(const LossCall *c, int64_t place) noexcept nogil:
    return (
        place == place_of(c.arguments, "input") or place == place_of(c.arguments, "weight")
        or place == place_of(c.arguments, "target") or place == place_of(c.arguments, "vector")
    )


cdef bint is_complete(const LossCall *c) noexcept nogil:
    """Return whether all buffers of the call were looked up, and all fit."""
    return (
        c.fits and c.found_arguments == (<uint64_t>1 << c.frame.args.size) - 1
        and c.found_results == (<uint64_t>1 << c.frame.results.size) - 1
    )


cdef const ag_xla_buffer *argument(LossCall *c, const char *name) noexcept nogil:
    return named(c, c.arguments, &c.frame.args, &c.found_arguments, name)


cdef const ag_xla_buffer *result(LossCall *c, const char *name) noexcept nogil:
    return named(c, c.results, &c.frame.results, &c.found_results, name)


cdef bint has_dims(const ag_xla_buffer *buffer, int64_t rank, const int64_t *dims) noexcept nogil:
    cdef int64_t axis
    if buffer.rank != rank:
        return False
    for axis in range(rank):
        if buffer.dims[axis] != dims[axis]:
            return False
    return True


cdef bint are_integers(const ag_xla_buffer *buffer) noexcept nogil:
    return dtype_of(buffer) == INT32 or dtype_of(buffer) == INT64


# ---- numbers ---------------------------------------------------------------------------------------------------------

cdef void widen(int dtype, const char *source, double *to, int64_t n) noexcept nogil:
    cdef float[SEGMENT] buffer
    cdef int64_t begin = 0, i
    if dtype == AG_FLOAT32:
        for i in range(n):
            to[i] = (<const float *>source)[i]
        return
    while begin < n:
        ag_widen(_cpu.active(), <ag_dtype>dtype, source + 2 * begin, buffer, min(<int64_t>SEGMENT, n - begin))
        for i in range(begin, min(begin + SEGMENT, n)):
            to[i] = buffer[i - begin]
        begin += SEGMENT


cdef double *converted(LossCall *c, const ag_xla_buffer *buffer) noexcept nogil:
    """Return the numbers of a buffer as float64; NULL if it has none."""
    cdef int dtype = dtype_of(buffer)
    cdef int64_t n = count_of(buffer)
    cdef double *to
    require(c, dtype >= 0)
    if not c.fits or n == 0:
        return NULL
    if dtype == AG_FLOAT64:
        return <double *>buffer.data
    to = <double *>arena_alloc(&c.memory, n * sizeof(double))
    widen(dtype, <const char *>buffer.data, to, n)
    return to


cdef const double *doubles(LossCall *c, const char *name, int64_t rank, const int64_t *dims) noexcept nogil:
    """Return an argument of this shape as float64. NULL: the call has no such argument, or it has no elements."""
    cdef const ag_xla_buffer *buffer = argument(c, name)
    require(c, buffer == NULL or has_dims(buffer, rank, dims))
    return NULL if buffer == NULL else converted(c, buffer)


cdef const double *number_or_doubles(
    LossCall *c, const char *name, int64_t rank, const int64_t *dims, bint *is_number
) noexcept nogil:
    """Return an argument of this shape, or of one number, as float64; otherwise like `doubles`."""
    cdef const ag_xla_buffer *buffer = argument(c, name)
    is_number[0] = buffer != NULL and buffer.rank == 0
    require(c, buffer == NULL or is_number[0] or has_dims(buffer, rank, dims))
    return NULL if buffer == NULL else converted(c, buffer)


cdef void *numbers(LossCall *c, const char *name, int dtype, int64_t rank, const int64_t *dims) noexcept nogil:
    """Return the address of a result of this dtype and shape, or NULL if it is not requested."""
    cdef const ag_xla_buffer *buffer = result(c, name)
    require(c, buffer == NULL or (dtype_of(buffer) == dtype and has_dims(buffer, rank, dims)))
    return NULL if buffer == NULL else buffer.data


cdef int64_t *integers(LossCall *c, const char *name, int64_t rank, const int64_t *dims) noexcept nogil:
    """Return memory for an integer result of this shape, or NULL if it is not requested. `write_integers` follows."""
    cdef const ag_xla_buffer *buffer = result(c, name)
    require(c, buffer == NULL or (are_integers(buffer) and has_dims(buffer, rank, dims)))
    if buffer == NULL or not c.fits:
        return NULL
    if dtype_of(buffer) == INT64:
        return <int64_t *>buffer.data
    return <int64_t *>arena_alloc(&c.memory, count_of(buffer) * sizeof(int64_t))


cdef void write_integers(LossCall *c, const char *name, const int64_t *values) noexcept nogil:
    """Write an integer result, if it is requested, from the memory that `integers` returned."""
    cdef const ag_xla_buffer *buffer = result(c, name)
    cdef int64_t i
    if buffer != NULL and dtype_of(buffer) == INT32:
        for i in range(count_of(buffer)):
            (<int32_t *>buffer.data)[i] = <int32_t>values[i]


# ---- attributes ------------------------------------------------------------------------------------------------------

cdef double setting(LossCall *c, const char *name) noexcept nogil:
    cdef const double *value = real(&c.frame.attrs, name)
    require(c, value != NULL)
    return 0 if value == NULL else value[0]


cdef int64_t whole_number(LossCall *c, const char *name) noexcept nogil:
    cdef const int64_t *value = integer(&c.frame.attrs, name)
    require(c, value != NULL)
    return 0 if value == NULL else value[0]


cdef bint is_reduction(LossCall *c, const char *name) noexcept nogil:
    """Return whether the attribute "reduction" is this one."""
    cdef const ag_xla_span *reduction = text(&c.frame.attrs, "reduction")
    require(c, reduction != NULL)
    return reduction != NULL and is_text(reduction, name)


# ---- options and results ---------------------------------------------------------------------------------------------

cdef void set_target(LossCall *c, LossOptions *o, int64_t rank, const int64_t *dims) noexcept nogil:
    """Describe the targets of rows of this shape, with their probabilities. The caller checks the shape of dense targets."""
    cdef int64_t axis
    c.target = argument(c, "target")
    require(c, c.target != NULL and (are_integers(c.target) or dtype_of(c.target) >= 0))
    if c.fits and dtype_of(c.target) >= 0:
        o.target_count, o.ignore_index = 0, whole_number(c, "ignore_index")
        return
    if not c.fits:
        return
    require(c, c.target.rank == rank or (c.target.rank == rank + 1 and c.target.dims[rank] > 0))
    require(c, (c.target.rank > rank) == (argument(c, "target_prob") != NULL))
    for axis in range(rank if c.fits else 0):
        require(c, c.target.dims[axis] == dims[axis])
    if not c.fits:
        return
    o.target_count = c.target.dims[rank] if c.target.rank > rank else 1
    o.target_prob = doubles(c, "target_prob", c.target.rank, c.target.dims)
    o.target, o.is_wide, o.ignore_index = c.target.data, dtype_of(c.target) == INT64, whole_number(c, "ignore_index")


cdef void set_options(
    LossCall *c, LossOptions *o, int64_t rank, const int64_t *dims, int64_t classes
) noexcept nogil:
    """Fill in the options of a loss with rows of this shape. `o` is all 0."""
    cdef bint is_number = False
    cdef int64_t axis
    cdef const char *name
    cdef double *number
    cdef int i = 0
    o.rows, o.classes = 1, classes
    for axis in range(rank):
        o.rows *= dims[axis]
    set_target(c, o, rank, dims)
    o.reduction = REDUCTION_MEAN
    if not is_reduction(c, "mean"):
        o.reduction = REDUCTION_SUM if is_reduction(c, "sum") else REDUCTION_NONE
        require(c, o.reduction == REDUCTION_SUM or is_reduction(c, "none"))
    o.temperature, number = setting(c, "temperature"), numeric_option(o, 0, &name)
    while number != NULL:
        number[0] = setting(c, name)
        i += 1
        number = numeric_option(o, i, &name)
    o.class_weight, o.token_weight = doubles(c, "class_weight", 1, &classes), doubles(c, "token_weight", rank, dims)
    o.temperatures = doubles(c, "temperature", rank, dims)
    o.grad_losses, o.grad_loss = number_or_doubles(c, "grad_loss", rank, dims, &is_number), 1
    if is_number and o.grad_losses != NULL:
        o.grad_loss, o.grad_losses = o.grad_losses[0], NULL
    require(c, o.reduction == REDUCTION_NONE or o.grad_losses == NULL)
    o.grad_lse, o.grad_entropy = doubles(c, "grad_lse", rank, dims), doubles(c, "grad_entropy", rank, dims)
    if c.fits:
        o.grad_log_prob = doubles(c, "grad_log_prob", c.target.rank, c.target.dims)
    require(c, not is_dense(o) or o.grad_log_prob == NULL)


cdef void set_results(LossCall *c, LossOptions *o, int64_t rank, const int64_t *dims) noexcept nogil:
    """Set the addresses of the loss and of its outputs. `o.is_double` is set."""
    cdef int dtype = AG_FLOAT64 if o.is_double else AG_FLOAT32
    o.loss = numbers(c, "loss", dtype, rank if o.reduction == REDUCTION_NONE else 0, dims)
    o.outputs.lse, o.outputs.entropy = numbers(c, "lse", dtype, rank, dims), numbers(c, "entropy", dtype, rank, dims)
    if c.fits:
        o.outputs.log_prob = numbers(c, "log_prob", dtype, c.target.rank, c.target.dims)
    o.outputs.predicted, o.outputs.correct = integers(c, "predicted", rank, dims), integers(c, "correct", 0, NULL)
    # Calls with dense targets have neither the output log_prob nor correct.
    require(c, (o.target_prob == NULL and not is_dense(o)) or o.outputs.correct == NULL)
    require(c, not is_dense(o) or o.outputs.log_prob == NULL)


cdef void write_integer_results(LossCall *c, const LossOptions *o) noexcept nogil:
    write_integers(c, "predicted", o.outputs.predicted)
    write_integers(c, "correct", o.outputs.correct)


# ---- values that are refused -----------------------------------------------------------------------------------------

cdef int64_t first_bad_target(const LossCall *c, const LossOptions *o, int64_t classes) noexcept nogil:
    """Return the place of the first target that is neither in [0, classes) nor ignored, or -1."""
    cdef int64_t i, each
    if is_dense(o):
        return -1
    for i in range(count_of(c.target)):
        each = target_at(o, i)
        if (each < 0 or each >= classes) and each != o.ignore_index:
            return i
    return -1


cdef int64_t first_bad_temperature(const LossOptions *o) noexcept nogil:
    """Return the first row whose temperature is not a positive finite number, or -1."""
    cdef int64_t i
    for i in range(0 if o.temperatures == NULL else o.rows):
        if not 0 < o.temperatures[i] < INFINITY:
            return i
    return -1


cdef ag_xla_error *refused_target(
    const LossCall *c, const LossOptions *o, int64_t classes, int64_t i, const char *place
) noexcept nogil:
    """Return the error of target `i`, which is at `place`."""
    cdef char[MESSAGE_SIZE] message
    snprintf(
        message, MESSAGE_SIZE, "%s: target: expected values in [0, %lld) or %lld, got %lld %s", c.operator,
        <long long>classes, <long long>o.ignore_index, <long long>target_at(o, i), place
    )
    return failed(c.frame, AG_XLA_INVALID_ARGUMENT, message)


cdef ag_xla_error *refused_temperature(const LossCall *c, const LossOptions *o, int64_t row) noexcept nogil:
    cdef char[MESSAGE_SIZE] message
    snprintf(
        message, MESSAGE_SIZE, "%s: temperature: expected positive finite numbers, got %g in row %lld", c.operator,
        o.temperatures[row], <long long>row
    )
    return failed(c.frame, AG_XLA_INVALID_ARGUMENT, message)
