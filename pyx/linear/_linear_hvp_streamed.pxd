from ascend_grad._linear_plan cimport Plan
from ascend_grad._linear_problem cimport Problem
from ascend_grad._loss_options cimport LossOptions

cdef bint is_streamed(const LossOptions *o, Py_ssize_t rows, Py_ssize_t vocab, Py_ssize_t hidden) noexcept nogil
cdef void set_coefficients(
    const LossOptions *o, const double *denominators, Py_ssize_t vocab, void *present, void *coefficients
) noexcept nogil
cdef Plan plan_of(const Problem *p) noexcept nogil
cdef Py_ssize_t workspace_size(const Plan *plan) noexcept nogil
cdef int run(
    const Problem *p, const Plan *plan, const void *coefficients, const void *bias, double factor, char *workspace,
    int num_threads, double *last_check
) except -1 nogil
cdef double factor_of_logits(const LossOptions *o) noexcept nogil
cdef int threads_of(const Plan *plan, int num_threads) noexcept nogil
