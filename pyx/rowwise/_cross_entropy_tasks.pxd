from ascend_grad._tasks cimport Team

cdef void run_phases(void *context, Team *team) noexcept nogil
