from ascend_grad._linear_run cimport Run

cdef void run_features(const Run *run) noexcept nogil
