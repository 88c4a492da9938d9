"""Inputs that are one row for all rows, expanded once a call: as dense rows that kernels read with stride 0.

`_rowwise_plan` says which inputs are expanded. The row lies in the workspace of the schedule, in the dtype of tiles.
"""

from ascend_grad._kernels cimport (
    AG_FLOAT32,
    AG_FLOAT64,
    ag_convert,
    ag_dim,
    ag_dtype,
    ag_fpenv,
    ag_fpenv_enter,
    ag_fpenv_leave,
    ag_variant,
    ag_widen,
)
from ascend_grad._memory cimport Arena, arena_alloc
from ascend_grad._rowwise_plan cimport OPERANDS, Operand, Problem
from ascend_grad._views cimport copy_3d

cdef enum:
    SEGMENT = 256                     # elements that are converted together


cdef void place_expanded(Problem *p, Arena *arena) noexcept nogil:
    """Place the rows of all expanded inputs in the workspace."""
    cdef int i
    for i in range(OPERANDS):
        if p.is_expanded[i]:
            p.operands[i].data = arena_alloc(arena, p.n * p.operands[i].itemsize)


cdef void expand_rows(const Problem *p, ag_variant variant) noexcept nogil:
    """Fill in the rows of all expanded inputs, in the floating-point mode of the kernels."""
    cdef ag_fpenv mode = ag_fpenv_enter()
    cdef int i
    for i in range(OPERANDS):
        if p.is_expanded[i]:
            expand_row(&p.sources[i], &p.operands[i], p.n, variant)
    ag_fpenv_leave(mode)


cdef void expand_row(const Operand *source, const Operand *row, Py_ssize_t n, ag_variant variant) noexcept nogil:
    cdef double[SEGMENT] values
    cdef ag_dim one, elements
    cdef Py_ssize_t begin = 0
    cdef char *to
    cdef char *copied
    one.length, one.to, one.from_ = 1, 0, 0
    elements.to, elements.from_ = source.itemsize, source.dim_stride
    while begin < n:
        elements.length = min(<Py_ssize_t>SEGMENT, n - begin)
        to = row.data + begin * row.itemsize
        copied = to if source.dtype == row.dtype else <char *>values
        copy_3d(
            variant, copied, source.data + begin * source.dim_stride, one, one, elements, source.itemsize,
            source.swapped
        )
        if copied != to:
            convert_inputs(variant, source.dtype, copied, row.dtype, to, elements.length)
        begin += elements.length


cdef void convert_inputs(
    ag_variant variant, ag_dtype dtype, const char *source, ag_dtype to_dtype, char *to, Py_ssize_t n
) noexcept nogil:
    """Convert n elements to another dtype, which is float32 or float64."""
    cdef float[SEGMENT] floats
    cdef Py_ssize_t begin = 0, count
    if to_dtype == AG_FLOAT32 and dtype != AG_FLOAT64:
        ag_widen(variant, dtype, source, <float *>to, n)
    elif to_dtype == AG_FLOAT32 or dtype == AG_FLOAT32:
        ag_convert(variant, dtype == AG_FLOAT64, source, to_dtype, to, n)
    else:
        while begin < n:
            count = min(<Py_ssize_t>SEGMENT, n - begin)
            ag_widen(variant, dtype, source + 2 * begin, floats, count)
            ag_convert(variant, False, floats, AG_FLOAT64, to + 8 * begin, count)
            begin += count
