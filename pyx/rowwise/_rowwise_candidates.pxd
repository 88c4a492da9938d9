from ascend_grad._kernels cimport ag_dtype
from ascend_grad._rowwise_kernels cimport ag_row_kernels
from ascend_grad._rowwise_plan cimport Layout, Plan, Problem

cdef enum:
    COPIED = 512                      # most doubles, or as many bytes, of each operand that is copied to the stack

cdef bint is_copied(const Problem *p) noexcept nogil
cdef bint is_plain(const Problem *p, Layout *layout, const ag_row_kernels *kernels) noexcept nogil
cdef bint is_computed_at_once(const Problem *p, Layout *layout, const ag_row_kernels *kernels) noexcept nogil
cdef Plan choose_plan(const Problem *p, ag_dtype tile_dtype, const ag_row_kernels *kernels, int threads) noexcept nogil
