from ascend_grad._kernels cimport ag_variant

cdef ag_variant active() noexcept nogil
cdef long cache_size(int level) noexcept nogil
cdef Py_ssize_t shared_cache_size(int threads) noexcept nogil
