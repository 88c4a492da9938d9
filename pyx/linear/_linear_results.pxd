from libc.stdint cimport int64_t

from ascend_grad._kernels cimport AG_NEARLY_CERTAIN, ag_dtype, ag_variant
from ascend_grad._linear_kernels cimport ag_linear_kernels, ag_matrix
from ascend_grad._linear_problem cimport Problem, Rows, set_number
from ascend_grad._linear_run cimport Run


ctypedef struct Probabilities:
    # The problem of writing exp(logits - max) / sum to `out`; matrices are (rows, n).
    const ag_linear_kernels *kernels
    ag_variant variant
    ag_matrix logits
    ag_matrix out
    const void *max                   # (rows,): float64 if is_double, otherwise float32; `sum` likewise
    const void *sum
    bint is_double
    Py_ssize_t rows, n


cdef void compute_coefficients(const Problem *p, Py_ssize_t i) noexcept nogil


cdef inline void finish_row(const Problem *p, Py_ssize_t i, double sum_exp) noexcept nogil:
    """Compute what the gradient of row i reads, from its statistics: 1 - p of its target, or its coefficients."""
    # Few rows are nearly certain of an entry. The others have nothing to compute if the loss has no options.
    if p.is_general or sum_exp * AG_NEARLY_CERTAIN < 1:
        compute_coefficients(p, i)
    elif p.complement != NULL:
        set_number(p.complement, i, p.dtype == ag_dtype.AG_FLOAT64, -1)


cdef double sum_dense_weights(const Problem *p, Py_ssize_t i, int64_t without) noexcept nogil
cdef void finish_statistics(const Run *run, Py_ssize_t begin, Py_ssize_t end) noexcept nogil
cdef int describe_targets(
    const Rows *rows, bint is_double, const void *logits_max, void *predicted, void *mask, bint is_packed, void *entries,
    double *last_check
) except -1 nogil
cdef int write_losses(
    ag_variant variant, bint is_double, const void *sum_exp, const void *predicted, Py_ssize_t rows, const ag_matrix *out,
    double *last_check
) except -1 nogil
cdef int write_doubles(ag_variant variant, const double *values, Py_ssize_t n, const ag_matrix *out) except -1 nogil
cdef int write_probabilities(const Probabilities *p, int num_threads, double *last_check) except -1 nogil
