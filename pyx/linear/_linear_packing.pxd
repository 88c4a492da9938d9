from libc.stdint cimport int64_t

from ascend_grad._linear_kernels cimport ag_linear_kernels, ag_matrix
from ascend_grad._tasks cimport Team


ctypedef struct Operand:
    # Rows of X or of W that are packed together, and the memory for them.
    ag_matrix matrix
    const int64_t *row_numbers        # the rows' numbers; NULL: they begin at `start`
    int64_t start
    Py_ssize_t count
    Py_ssize_t hidden
    bint is_left                      # whether it is the left operand of the logits, otherwise the right one
    void *rows                        # packed rows; NULL: they are not packed
    void *columns                     # packed columns; NULL: they are not packed


cdef void pack(const ag_linear_kernels *kernels, const Operand *operand, Team *team) noexcept nogil
