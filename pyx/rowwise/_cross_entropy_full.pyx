"""Results of a loss of rows that have the shape of the logits: probabilities, and the Hessian's diagonal or product.

All are quadratic in the exponentials of a row. A result's rows lie in C order, with the classes side by side, whatever the
layout of the logits is, so that they are written without tiles. The gradient may overwrite the logits, so these results
are written before it. A kernel of columns writes them into memory of its thread, from which they are copied, transposed.
"""

from libc.string cimport memset

from ascend_grad._cross_entropy_finish cimport bend_of
from ascend_grad._cross_entropy_rows cimport CrossEntropy, Rows, bends
from ascend_grad._kernels cimport AG_FLOAT32, AG_FLOAT64, ag_convert, ag_dim
from ascend_grad._rowwise_kernels cimport ag_loss_quadratic, ag_loss_rows, ag_single_target_columns, ag_tile
from ascend_grad._rowwise_plan cimport A, Operand
from ascend_grad._views cimport copy_3d

cdef enum:
    SEGMENT = 256                     # elements of a row that are converted together


cdef ag_loss_quadratic prob_of(const CrossEntropy *x, const Rows *r) noexcept nogil:
    cdef ag_loss_quadratic q
    memset(&q, 0, sizeof(q))
    q.first, q.second, q.at_one, q.to = r.reciprocal, NULL, r.reciprocal, x.prob
    q.numbers, q.pitch = r.numbers, x.s.p.n * x.s.p.operands[A].itemsize
    return q


cdef ag_loss_quadratic hessian_of(const CrossEntropy *x, const Rows *r, Py_ssize_t k) noexcept nogil:
    """Return the parameters of the Hessian's result. Its vector begins at element k of each row."""
    cdef ag_loss_quadratic q
    memset(&q, 0, sizeof(q))
    q.first, q.second, q.at_one, q.to = r.first, r.second, r.at_one, x.hessian
    q.numbers, q.pitch = r.numbers, x.s.p.n * x.s.p.operands[A].itemsize
    if x.vector != NULL:
        q.vector, q.vector_pitch = x.vector + k * x.s.plan.tile_itemsize, x.s.p.n * x.s.plan.tile_itemsize
        q.cap, q.others, q.at_max = x.s.p.cap, r.others, r.at_largest
    return q


cdef void sum_products(
    const CrossEntropy *x, const ag_tile *tile, const ag_loss_rows *rows, Py_ssize_t k, const Rows *r, double *others,
    double *at_largest
) noexcept nogil:
    """Sum up the exponentials of a tile's rows, elements k to k + tile.n, times the vector."""
    cdef ag_loss_quadratic q = hessian_of(x, r, k)
    x.kernels.rows_products(tile, rows, &q, others, at_largest)


cdef void write_full_results(
    const CrossEntropy *x, const ag_tile *tile, const ag_loss_rows *rows, Py_ssize_t k, const Rows *r
) noexcept nogil:
    """Write the requested results of a tile's rows, elements k to k + tile.n."""
    if x.prob != NULL:
        write_result(x, tile, rows, k, r, prob_of(x, r), False)
    if x.hessian != NULL:
        write_result(x, tile, rows, k, r, hessian_of(x, r, k), bends(x))
        if bends(x):
            store_hessian_at_targets(x, tile.rows, k, k + tile.n, r)


cdef void write_result(
    const CrossEntropy *x, const ag_tile *tile, const ag_loss_rows *rows, Py_ssize_t k, const Rows *r,
    ag_loss_quadratic q, bint is_bent
) noexcept nogil:
    cdef const Operand *operand = &x.s.p.operands[A]
    cdef int itemsize = operand.itemsize, tile_itemsize = x.s.plan.tile_itemsize
    cdef bint converts = operand.dtype != x.s.plan.tile_dtype
    cdef Py_ssize_t i, begin
    cdef double[SEGMENT] buffer, gradient
    cdef ag_tile part
    cdef ag_loss_rows row
    cdef Py_ssize_t zero = 0
    cdef char *result = q.to
    cdef const char *vectors = q.vector
    cdef char *to
    cdef char *values
    if not converts and not is_bent:
        q.to += k * itemsize
        x.kernels.rows_quadratic(tile, rows, &q)
        return
    part = tile[0]
    part.rows, part.nontemporal, part.out, part.out_stride = 1, False, <char *>gradient, 0
    q.numbers = &zero
    for i in range(tile.rows):
        row = row_of(rows, i)
        to = result + (r.numbers[i] * x.s.p.n + k) * itemsize
        begin = 0
        while begin < tile.n:
            part.n = min(<Py_ssize_t>SEGMENT, tile.n - begin)
            part.a = tile.a + i * tile.a_stride + begin * tile_itemsize
            part.b = tile.b + i * tile.b_stride + begin * tile_itemsize
            values = <char *>buffer if converts else to
            q.to = values
            if vectors != NULL:
                q.vector = vectors + r.numbers[i] * q.vector_pitch + begin * tile_itemsize
            x.kernels.rows_quadratic(&part, &row, &q)
            if is_bent:
                x.kernels.rows_write(&part, &row)
                x.kernels.apply_curvature(part.a, part.out, q.vector, values, part.n, x.s.p.cap, bend_of(x))
            if converts:
                ag_convert(x.s.variant, x.s.plan.tile_dtype == AG_FLOAT64, buffer, operand.dtype, to, part.n)
            if row.class_weight != NULL:
                row.class_weight = <const char *>row.class_weight + part.n * (8 if x.o.is_double else 4)
            to += part.n * itemsize
            begin += part.n
        q.first, q.at_one = q.first + 1, q.at_one + 1
        if q.second != NULL:
            q.second += 1
        if vectors != NULL:
            q.others, q.at_max = q.others + 1, q.at_max + 1


cdef void place_full_columns(
    const CrossEntropy *x, Py_ssize_t count, char *memory, ag_single_target_columns *columns
) noexcept nogil:
    """Place the requested results of at most FULL_COLUMNS columns in memory."""
    columns.pitch = count * x.s.plan.tile_itemsize
    if x.prob != NULL:
        columns.prob = memory
        memory += x.s.p.n * columns.pitch
    if x.hessian != NULL:
        columns.hessian = memory


cdef void store_full_columns(
    const CrossEntropy *x, const ag_single_target_columns *columns, Py_ssize_t count, Py_ssize_t number,
    const Py_ssize_t *numbers
) noexcept nogil:
    """Copy the results of columns, transposed, to the results of the rows of a call.

    `numbers` has the number of each column's row in the call. If it is NULL, the rows follow row `number`.
    """
    cdef Py_ssize_t first = 0, run
    if columns.prob == NULL and columns.hessian == NULL:
        return
    while first < count:
        run = 1 if numbers != NULL else count
        while first + run < count and numbers[first + run] == numbers[first] + run:
            run += 1
        if numbers != NULL:
            number = numbers[first]
        transpose_columns(x, columns.prob, columns.pitch, first, run, x.prob, number)
        transpose_columns(x, columns.hessian, columns.pitch, first, run, x.hessian, number)
        first += run


cdef void transpose_columns(
    const CrossEntropy *x, const char *columns, Py_ssize_t pitch, Py_ssize_t first, Py_ssize_t count, char *rows,
    Py_ssize_t number
) noexcept nogil:
    """Copy `count` columns, from the first on, to rows from row `number` on. NULL: there are none."""
    cdef int itemsize = x.s.plan.tile_itemsize
    cdef Py_ssize_t row_bytes = x.s.p.n * itemsize
    cdef ag_dim one, classes, along
    if columns == NULL:
        return
    one.length, one.to, one.from_ = 1, 0, 0
    classes.length, classes.to, classes.from_ = x.s.p.n, itemsize, pitch
    along.length, along.to, along.from_ = count, row_bytes, itemsize
    copy_3d(
        x.s.variant, rows + number * row_bytes, columns + first * itemsize, one, classes, along, itemsize, False
    )


cdef ag_loss_rows row_of(const ag_loss_rows *rows, Py_ssize_t i) noexcept nogil:
    """Return the parameters of row i alone, without cached exponentials."""
    cdef ag_loss_rows row = rows[0]
    row.max, row.scale, row.factor, row.smoothing = rows.max + i, rows.scale + i, rows.factor + i, rows.smoothing + i
    row.cached, row.next = NULL, NULL
    if row.is_dense:
        row.certain, row.at_certain = rows.certain + i, rows.at_certain + i
    return row


cdef void store_hessian_at_targets(
    const CrossEntropy *x, Py_ssize_t count, Py_ssize_t begin, Py_ssize_t end, const Rows *r
) noexcept nogil:
    """Store the Hessian's result at the targets of rows among elements begin to end, each rounded once."""
    cdef const Operand *operand = &x.s.p.operands[A]
    cdef Py_ssize_t i, k, entry
    cdef double value
    cdef char *to
    for k in range(x.o.target_count):
        for i in range(count):
            entry = r.t.entries[k * x.pitch + i]
            if not r.stores[i] or entry < begin or entry >= end:
                continue
            value = r.at_targets[k * x.pitch + i]
            to = x.hessian + (r.numbers[i] * x.s.p.n + entry) * operand.itemsize
            if operand.dtype == AG_FLOAT64:
                (<double *>to)[0] = value
            elif operand.dtype == AG_FLOAT32:
                (<float *>to)[0] = <float>value
            else:
                ag_convert(x.s.variant, True, &value, operand.dtype, to, 1)
