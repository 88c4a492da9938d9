from ascend_grad._linear_run cimport Run

cdef void run_rows_streamed(const Run *run) noexcept nogil
