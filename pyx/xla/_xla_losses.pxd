# The declarations that the functions of both losses share: arguments and results by name, and numbers as the schedules read them.

from libc.stdint cimport int64_t, uint64_t

from ascend_grad._loss_options cimport LossOptions
from ascend_grad._memory cimport Arena
from ascend_grad._xla_frame cimport ag_xla_buffer, ag_xla_call_frame, ag_xla_error, ag_xla_span


ctypedef struct LossCall:
    # A call of a loss. The attributes "arguments" and "results" name the buffers in order, separated by spaces.
    ag_xla_call_frame *frame
    const char *operator
    const ag_xla_span *arguments
    const ag_xla_span *results
    const ag_xla_buffer *target
    uint64_t found_arguments          # a bit for each argument that was looked up
    uint64_t found_results
    bint fits                         # all of them have the shapes and dtypes of their names, all attributes exist
    Arena memory                      # converted numbers


ctypedef ag_xla_error *(*Compute)(ag_xla_call_frame *) noexcept nogil


cdef inline void require(LossCall *c, bint condition) noexcept nogil:
    if not condition:
        c.fits = False


cdef ag_xla_error *answer(ag_xla_call_frame *frame, Compute compute) noexcept nogil
cdef bint begin_call(LossCall *c, ag_xla_call_frame *frame, const char *operator) noexcept nogil
cdef Py_ssize_t memory_size(const LossCall *c) noexcept nogil
cdef bint is_complete(const LossCall *c) noexcept nogil
cdef const ag_xla_buffer *argument(LossCall *c, const char *name) noexcept nogil
cdef const ag_xla_buffer *result(LossCall *c, const char *name) noexcept nogil
cdef bint has_dims(const ag_xla_buffer *buffer, int64_t rank, const int64_t *dims) noexcept nogil
cdef const double *doubles(LossCall *c, const char *name, int64_t rank, const int64_t *dims) noexcept nogil
cdef void *numbers(LossCall *c, const char *name, int dtype, int64_t rank, const int64_t *dims) noexcept nogil
cdef int64_t *integers(LossCall *c, const char *name, int64_t rank, const int64_t *dims) noexcept nogil
cdef void write_integers(LossCall *c, const char *name, const int64_t *values) noexcept nogil
cdef double setting(LossCall *c, const char *name) noexcept nogil
cdef int64_t whole_number(LossCall *c, const char *name) noexcept nogil
cdef void set_options(
    LossCall *c, LossOptions *o, int64_t rank, const int64_t *dims, int64_t classes
) noexcept nogil
cdef void set_results(LossCall *c, LossOptions *o, int64_t rank, const int64_t *dims) noexcept nogil
cdef void write_integer_results(LossCall *c, const LossOptions *o) noexcept nogil
cdef int64_t first_bad_target(const LossCall *c, const LossOptions *o, int64_t classes) noexcept nogil
cdef int64_t first_bad_temperature(const LossOptions *o) noexcept nogil
cdef ag_xla_error *refused_target(
    const LossCall *c, const LossOptions *o, int64_t classes, int64_t i, const char *place
) noexcept nogil
cdef ag_xla_error *refused_temperature(const LossCall *c, const LossOptions *o, int64_t row) noexcept nogil
