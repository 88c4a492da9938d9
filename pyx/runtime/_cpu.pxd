from ascend_grad._kernels cimport ag_variant

cdef ag_variant active() noexcept nogil
cdef long cache_size(int level) noexcept nogil
