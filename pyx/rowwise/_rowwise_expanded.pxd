from ascend_grad._kernels cimport ag_dtype, ag_variant
from ascend_grad._memory cimport Arena
from ascend_grad._rowwise_plan cimport Problem

cdef void place_expanded(Problem *p, Arena *arena) noexcept nogil
cdef void expand_rows(const Problem *p, ag_variant variant) noexcept nogil
cdef void convert_inputs(
    ag_variant variant, ag_dtype dtype, const char *source, ag_dtype to_dtype, char *to, Py_ssize_t n
) noexcept nogil
