from libc.stdint cimport int64_t

from ascend_grad._linear_kernels cimport ag_matrix, ag_rows
from ascend_grad._linear_schedule cimport Schedule


cdef class SkinnySchedule(Schedule):
    cdef Py_ssize_t combined_rows

    cdef void run_pass(self) noexcept nogil
    cdef ag_rows rows_of(
        self, const ag_matrix *matrix, const int64_t *numbers, int64_t start, Py_ssize_t count
    ) noexcept nogil
    cdef bint gives_up(self) noexcept nogil
    cdef void stream_words(self, Py_ssize_t u) noexcept nogil
    cdef void stream_rows(self, Py_ssize_t u) noexcept nogil
    cdef void multiply_features(self, Py_ssize_t u) noexcept nogil
    cdef void finish_tile(self) noexcept nogil
    cdef void write_features(self, Py_ssize_t u) noexcept nogil
    cdef void combine_tasks(self, Py_ssize_t u) noexcept nogil
