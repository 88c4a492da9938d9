"""Tasks of a loss of rows: blocks of whole rows or columns, and the phases of rows that are split."""

from libc.math cimport INFINITY, NAN, isfinite
from libc.stdint cimport int64_t
from libc.string cimport memset

from ascend_grad cimport _cpu, _tasks
from ascend_grad._cross_entropy_finish cimport finish_rows
from ascend_grad._cross_entropy_full cimport (
    FULL_COLUMNS,
    place_full_columns,
    store_full_columns,
    sum_products,
    write_full_results,
)
from ascend_grad._cross_entropy_rows cimport (
    CrossEntropy,
    Rows,
    begin_rows,
    has_full_results,
    inverse_of_row,
    number_rows,
    parameters,
    rows_at,
    rows_from,
    set_loss,
    store_at_targets,
    upstream_of_all,
)
from ascend_grad._kernels cimport AG_ACCURATE_SUM, ag_sum, ag_sum_add, ag_sum_total
from ascend_grad._loss_options cimport is_dense, number_of, target_at
from ascend_grad._rowwise_kernels cimport (
    AG_LOSS_DENSE_STRIPS,
    AG_LOSS_EXP,
    AG_LOSS_EXP_OF_DENSE,
    AG_LOSS_MOMENT,
    AG_LOSS_REST,
    AG_MAX_COLUMNS,
    AG_STRIP_COLUMNS,
    ag_dense_columns,
    ag_loss_rows,
    ag_row_op,
    ag_single_target_columns,
    ag_tile,
)
from ascend_grad._rowwise_plan cimport MASK, OUT, A, Problem, offset_of, tile_at
from ascend_grad._rowwise_schedule cimport (
    COMBINE_MAX,
    COMBINE_SUM,
    SPLIT_MAX,
    SPLIT_SUM,
    SPLIT_WRITE,
    Schedule,
    column_tile,
    gather,
    row_tile,
    run_combination,
    run_phase,
    scatter,
    scatter_columns,
    scratch_of,
    tiles_of,
)
from ascend_grad._tasks cimport Team

# ---- tasks that are whole blocks -------------------------------------------------------------------------------------

cdef void subtract_largest(const CrossEntropy *x, const ag_tile *tile, const ag_loss_rows *rows, Rows *r) noexcept nogil:
    """Subtract 1, the exponential of the maximum, from sums of rows. Sums close to 1 are computed again, without it."""
    cdef ag_loss_rows part = rows[0]
    cdef ag_tile close = tile[0]
    cdef Py_ssize_t i = 0, first
    while i < tile.rows:
        first = i
        while i < tile.rows and r.rest[i] < AG_ACCURATE_SUM and r.scale[i] > 0:
            i += 1
        if i == first:
            r.rest[i] -= 1
            i += 1
            continue
        close.a, close.rows = tile.a + first * tile.a_stride, i - first
        part.max, part.scale = &r.max[first], &r.scale[first]
        x.kernels.rows_sum(&close, AG_LOSS_REST, &part, &r.rest[first])


cdef void set_given_statistics(const CrossEntropy *x, Py_ssize_t count, Rows *r) noexcept nogil:
    """Set the statistics of rows whose lse is given, as if a logit of probability 1 were the lse."""
    cdef Py_ssize_t i
    cdef double lse
    for i in range(count):
        lse = x.given_lse[r.numbers[i]]
        # No probability follows from an infinite lse.
        r.max[i] = lse / inverse_of_row(x, r.numbers[i]) if isfinite(lse) else NAN
        r.rest[i] = 0
        r.moment[i] = number_of(x.given_entropy, r.numbers[i])


cdef void whole_rows(CrossEntropy *x, Py_ssize_t begin, const ag_tile *tile, Rows *r, const char *next) noexcept nogil:
    """Compute the whole rows of a tile, which begins at row `begin`, up to the gradients at targets."""
    cdef ag_loss_rows rows
    cdef Py_ssize_t i
    begin_rows(x, begin, tile.rows, r)
    if x.given_lse != NULL:
        set_given_statistics(x, tile.rows, r)
    else:
        x.kernels.rows_max(tile, r.max)
    rows = parameters(x, r)
    rows.next = next
    if x.given_lse != NULL:
        x.kernels.rows_sum(tile, AG_LOSS_EXP, &rows, r.deficit)  # for the exponentials that it caches
    else:
        x.kernels.rows_sum(tile, AG_LOSS_EXP, &rows, r.rest)
        subtract_largest(x, tile, &rows, r)
        if x.needs_moment:
            x.kernels.rows_sum(tile, AG_LOSS_MOMENT, &rows, r.moment)
    if x.needs_deficit:
        x.kernels.rows_sum(tile, x.deficit_sum, &rows, r.deficit)
    if is_dense(&x.o):
        x.kernels.rows_dense(tile, &rows, r.deficit, r.below, r.at_max)
    if x.predicted != NULL:
        for i in range(tile.rows):
            x.predicted[r.numbers[i]] = find_place(
                x, tile.a + i * tile.a_stride, x.s.p.n, r.max[i], r.rest[i]
            ) % x.s.p.n
    if x.vector != NULL:
        sum_products(x, tile, &rows, 0, r, r.others, r.at_largest)
    finish_rows(x, tile.rows, r)
    if has_full_results(x):
        write_full_results(x, tile, &rows, 0, r)
    if x.return_grad:
        x.kernels.rows_write(tile, &rows)


cdef Py_ssize_t find_place(
    const CrossEntropy *x, const char *a, Py_ssize_t length, double maximum, double rest
) noexcept nogil:
    """Return the first place of the maximum in elements of a row, or `length` if they do not have it.

    As in NumPy, a NaN is larger than anything else. In a row with NaN, places of the maximum of the others count from V on.
    """
    cdef Py_ssize_t place
    if rest == rest:
        return x.kernels.find(a, length, maximum)
    place = x.kernels.find(a, length, NAN)
    if place < length:
        return place
    place = x.kernels.find(a, length, maximum)
    return place + x.s.p.n if place < length else length


cdef void chunks_of_rows(
    CrossEntropy *x, Py_ssize_t begin, const ag_tile *tile, Rows *r, bint stores_targets
) noexcept nogil:
    """Compute the rows of a tile, which begins at row `begin`, in chunks whose exponentials are cached."""
    cdef Py_ssize_t row = 0
    cdef ag_tile part = tile[0]
    cdef Rows rows = r[0]
    cdef const char *next
    cdef bint prefetches = tile.nontemporal and x.s.p.n * x.s.p.operands[A].itemsize <= _cpu.cache_size(2) // 4
    while row < tile.rows:
        part.rows = min(x.chunk, tile.rows - row)
        part.a = tile.a + row * tile.a_stride
        part.b = tile.b + row * tile.b_stride
        part.out = tile.out + row * tile.out_stride
        if not stores_targets:
            rows = rows_from(r, row)
        next = part.a + part.rows * tile.a_stride if prefetches and row + 2 * part.rows <= tile.rows else NULL
        whole_rows(x, begin + row, &part, &rows, next)
        if x.return_grad and stores_targets:
            store_at_targets(x, part.rows, &rows)
        row += part.rows


cdef void columns_in_segments(CrossEntropy *x, const ag_tile *tile, bint is_rest, Rows *r, char *scratch) noexcept nogil:
    """Compute sums of the columns of a tile, segment by segment, into r.moment."""
    cdef ag_tile part = tile[0]
    cdef ag_sum total
    cdef double *compensation = r.smoothing
    cdef double *sums = r.deficit
    cdef Py_ssize_t segment = x.s.plan.kernels.segment, k = 0, c
    for c in range(tile.rows):
        r.moment[c] = compensation[c] = 0
    while k < tile.n:
        part.a = tile.a + k * tile.a_stride
        part.n = min(segment, tile.n - k)
        x.kernels.columns_sum(&part, is_rest, r.max, sums, scratch)
        for c in range(tile.rows):
            total.sum, total.compensation = r.moment[c], compensation[c]
            ag_sum_add(&total, sums[c])
            r.moment[c], compensation[c] = total.sum, total.compensation
        k += segment
    for c in range(tile.rows):
        total.sum, total.compensation = r.moment[c], compensation[c]
        r.moment[c] = ag_sum_total(total)


cdef inline bint is_strip(const CrossEntropy *x, const ag_tile *tile) noexcept nogil:
    """Return whether the columns of a tile are short enough for `strips`, and not better computed packed."""
    cdef bint is_packed = tile.a_stride == tile.rows * x.s.plan.tile_itemsize
    return tile.n <= x.s.plan.kernels.strip_rows and (tile.rows >= AG_STRIP_COLUMNS or not is_packed)


cdef bint uses_numbers_in_place(const CrossEntropy *x, Py_ssize_t begin, Py_ssize_t count) noexcept nogil:
    """Return whether kernels read numbers of columns, from row `begin` of the problem on, and write losses where they are.

    The numbers of the columns are then adjacent, and the losses, in float64, are reduced later.
    """
    cdef const Problem *p = &x.s.p
    cdef int last = p.axes - 1
    return (
        x.loss_terms != NULL and p.operands[MASK].strides[last] == 1
        and begin // p.shape[last] == (begin + count - 1) // p.shape[last]
    )


cdef const double *column_weights(
    const CrossEntropy *x, Py_ssize_t number, bint in_place, Py_ssize_t count, Rows *r
) noexcept nogil:
    """Return the token weights of columns, of which the first is row `number` if they are read in place; NULL for ones."""
    cdef Py_ssize_t i
    if x.o.token_weight == NULL:
        return NULL
    if in_place:
        return &x.o.token_weight[number]
    for i in range(count):
        r.factor[i] = x.o.token_weight[r.numbers[i]]
    return r.factor


cdef void set_losses(CrossEntropy *x, Py_ssize_t count, Rows *r) noexcept nogil:
    """Set the losses of rows, which are in `log_sum`."""
    cdef Py_ssize_t i
    if x.loss_terms != NULL:
        for i in range(count):
            x.loss_terms[r.numbers[i]] = r.log_sum[i]
    else:
        for i in range(count):
            set_loss(x, r.numbers[i], r.log_sum[i], 0)


cdef void single_target_columns(CrossEntropy *x, Py_ssize_t begin, const ag_tile *tile, Rows *r, char *scratch) noexcept nogil:
    """Compute the columns of a strip that begins at row `begin` of the problem, of which `is_single_target` holds.

    Results of the shape of the logits are computed in `scratch`, some columns at a time.
    """
    cdef ag_single_target_columns columns
    cdef Py_ssize_t number = offset_of(&x.s.p, &x.s.p.operands[MASK], begin), first = 0, i
    # Targets and weights of columns that follow each other in C order need no copies, and neither do reduced losses.
    cdef bint in_place = uses_numbers_in_place(x, begin, tile.rows)
    cdef Py_ssize_t most = min(tile.rows, <Py_ssize_t>FULL_COLUMNS) if has_full_results(x) else tile.rows
    cdef ag_tile part = tile[0]
    memset(&columns, 0, sizeof(columns))
    columns.has_wide_targets, columns.ignore_index = x.o.is_wide, x.o.ignore_index
    columns.grad, columns.inverse, columns.return_grad = upstream_of_all(x), x.inverse_temperature, x.return_grad
    columns.smoothing, columns.class_weight = x.o.label_smoothing, x.o.class_weight
    if in_place:
        columns.targets = <const char *>x.o.target + number * (8 if x.o.is_wide else 4)
        columns.losses = &x.loss_terms[number]
    else:
        number_rows(x, begin, tile.rows, False, r)
        columns.targets, columns.has_wide_targets, columns.losses = r.t.entries, True, r.log_sum
        for i in range(tile.rows):
            r.t.entries[i] = target_at(&x.o, r.numbers[i])
    columns.token_weight = column_weights(x, number, in_place, tile.rows, r)
    while first < tile.rows:
        part.rows = min(most, tile.rows - first)
        place_full_columns(x, part.rows, scratch, &columns)
        x.kernels.single_target_strips(&part, &columns)
        store_full_columns(x, &columns, part.rows, number + first, NULL if in_place else &r.numbers[first])
        part.a += part.rows * x.s.plan.tile_itemsize
        part.out += part.rows * x.s.plan.tile_itemsize
        columns.targets = <const char *>columns.targets + part.rows * (8 if columns.has_wide_targets else 4)
        columns.losses += part.rows
        if columns.token_weight != NULL:
            columns.token_weight += part.rows
        first += part.rows
    if not in_place:
        set_losses(x, tile.rows, r)


cdef void dense_columns(CrossEntropy *x, Py_ssize_t begin, const ag_tile *tile, Rows *r, char *scratch) noexcept nogil:
    """Compute the columns of a tile that begins at row `begin` of a problem that follows AG_LOSS_DENSE_STRIPS."""
    cdef ag_dense_columns columns
    cdef ag_loss_rows rows = parameters(x, r)
    cdef Py_ssize_t number = offset_of(&x.s.p, &x.s.p.operands[MASK], begin)
    cdef bint in_place = uses_numbers_in_place(x, begin, tile.rows)
    columns.kept, columns.share, columns.class_weight, columns.class_scale = (
        rows.kept, rows.share, rows.class_weight, x.class_scale
    )
    columns.grad_loss, columns.denominator, columns.return_grad = x.o.grad_loss, x.denominators[0], x.return_grad
    columns.inverse, columns.memory = x.inverse_temperature * x.outer_slope, scratch
    if not in_place:
        number_rows(x, begin, tile.rows, False, r)
    columns.losses = &x.loss_terms[number] if in_place else r.log_sum
    columns.token_weight = column_weights(x, number, in_place, tile.rows, r)
    x.kernels.dense_strips(tile, &columns)
    if not in_place:
        set_losses(x, tile.rows, r)


cdef void whole_columns(CrossEntropy *x, Py_ssize_t begin, const ag_tile *tile, Rows *r, char *scratch) noexcept nogil:
    """Compute the whole columns of a tile, which begins at row `begin` of the problem, up to the gradients at targets."""
    cdef ag_loss_rows rows = parameters(x, r)
    cdef ag_tile part
    cdef Rows some
    cdef Py_ssize_t c, first = 0, i
    cdef bint has_near_one
    begin_rows(x, begin, tile.rows, r)
    if is_strip(x, tile):
        x.kernels.strips(tile, r.max, r.rest)
    else:
        x.s.plan.kernels.columns_max(tile, r.max, scratch)
        columns_in_segments(x, tile, False, r, scratch)
        for c in range(tile.rows):
            r.rest[c] = r.moment[c]
    while first < tile.rows:
        part = tile[0]
        part.a += first * x.s.plan.tile_itemsize
        part.rows = min(<Py_ssize_t>AG_MAX_COLUMNS, tile.rows - first)
        some = rows_from(r, first)
        has_near_one = False
        for i in range(part.rows):
            has_near_one = has_near_one or some.rest[i] < AG_ACCURATE_SUM
        if has_near_one:
            columns_in_segments(x, &part, True, &some, scratch)
        for i in range(part.rows):
            some.rest[i] = some.moment[i] if some.rest[i] < AG_ACCURATE_SUM else some.rest[i] - 1
        first += part.rows
    finish_rows(x, tile.rows, r)
    if x.return_grad:
        x.kernels.columns_write(tile, &rows, scratch)


cdef void whole_block(const void *context, Py_ssize_t block, int thread) noexcept nogil:
    """Compute a block of whole rows, or of whole columns. The task of a phase."""
    cdef CrossEntropy *x = <CrossEntropy *>context
    cdef const Schedule *s = &x.s
    cdef Py_ssize_t begin = block * s.plan.block_size, end = min(begin + s.plan.block_size, s.p.rows)
    cdef Py_ssize_t last = s.p.shape[s.p.axes - 1]
    cdef char *tiles = tiles_of(s, block, thread)
    cdef Rows r = rows_at(x, x.buffers + thread * x.buffer_size)
    cdef ag_tile tile
    cdef bint is_single
    if s.plan.by_columns:
        begin = column_tile(s, block, 0, s.p.n, tiles, &tile)
        # The kernel rounds gradients at targets to the dtype of the tile, which has to be the result's.
        is_single = x.is_single_target and s.plan.tile_dtype == s.p.operands[OUT].dtype and (
            x.o.label_smoothing != 0 or has_full_results(x) or is_strip(x, &tile)
        )
        if is_single:
            single_target_columns(x, begin, &tile, &r, scratch_of(s, thread))
        elif s.p.op == AG_LOSS_DENSE_STRIPS:
            dense_columns(x, begin, &tile, &r, scratch_of(s, thread))
        else:
            whole_columns(x, begin, &tile, &r, scratch_of(s, thread))
        if x.return_grad:
            scatter_columns(s, block, 0, s.p.n, tiles, &tile)
            if not is_single:
                store_at_targets(x, tile.rows, &r)  # dense targets have none
    elif s.plan.gathers:
        gather(s, begin, end, 0, s.p.n, tiles, &tile)
        chunks_of_rows(x, begin, &tile, &r, False)
        if x.return_grad:
            scatter(s, begin, end, 0, s.p.n, tiles, &tile)
            store_at_targets(x, tile.rows, &r)
    else:
        while begin < end:
            tile_at(&s.p, begin, &tile)
            tile.nontemporal = s.plan.nontemporal
            tile.rows = min(end - begin, last - begin % last)
            chunks_of_rows(x, begin, &tile, &r, True)
            begin += tile.rows


# ---- tasks that are splits -------------------------------------------------------------------------------------------

cdef Py_ssize_t split_range(
    const Schedule *s, Py_ssize_t task, Py_ssize_t *begin, Py_ssize_t *end, Py_ssize_t *length
) noexcept nogil:
    """Set the rows and the length of a split, and return its first element."""
    cdef Py_ssize_t block = task // s.plan.splits, k = task % s.plan.splits * s.plan.split_size
    begin[0] = block * s.plan.block_size
    end[0] = min(begin[0] + s.plan.block_size, s.p.rows)
    length[0] = min(s.plan.split_size, s.p.n - k)
    return k


cdef const void *weights_from(const CrossEntropy *x, Py_ssize_t k) noexcept nogil:
    """Return the kernels' class weights from element k on."""
    if x.kernel_weight == NULL:
        return NULL
    return <const char *>x.kernel_weight + k * (8 if x.o.is_double else 4)


cdef void sum_split(const void *context, Py_ssize_t task, int thread) noexcept nogil:
    """Sum up the segments of a split. The task of a phase."""
    cdef CrossEntropy *x = <CrossEntropy *>context
    cdef const Schedule *s = &x.s
    cdef Py_ssize_t begin, end, length, k = split_range(s, task, &begin, &end, &length), last = k + length
    cdef Py_ssize_t segment = k // s.plan.kernels.segment, row
    cdef Rows all_rows = rows_at(x, x.buffers), r
    cdef ag_loss_rows rows
    cdef ag_tile tile
    cdef Py_ssize_t all_sums = s.plan.segments * s.p.rows
    cdef double *sums
    while k < last:
        length = min(s.plan.kernels.segment, last - k)
        if s.plan.by_columns:
            row = column_tile(s, task // s.plan.splits, k, length, tiles_of(s, task, thread), &tile)
            x.kernels.columns_sum(
                &tile, x.sum == AG_LOSS_REST, &s.max[row], &s.sums[segment * s.p.rows + row], scratch_of(s, thread)
            )
        else:
            row_tile(s, begin, end, k, length, tiles_of(s, task, thread), &tile)
            r = rows_from(&all_rows, begin)
            rows = parameters(x, &r)
            rows.class_weight = weights_from(x, k)
            sums = &s.sums[segment * s.p.rows + begin]
            if x.sums_products:
                sum_products(x, &tile, &rows, k, &r, sums, &x.further_sums[segment * s.p.rows + begin])
            elif x.sum == AG_LOSS_EXP_OF_DENSE:
                x.kernels.rows_dense(
                    &tile, &rows, sums, &x.further_sums[segment * s.p.rows + begin],
                    &x.further_sums[all_sums + segment * s.p.rows + begin]
                )
            else:
                x.kernels.rows_sum(&tile, x.sum, &rows, sums)
        k += length
        segment += 1


cdef void find_in_split(const void *context, Py_ssize_t task, int thread) noexcept nogil:
    """Find the predicted entries of rows, as far as they are in a split, or else infinity. The task of a phase."""
    cdef CrossEntropy *x = <CrossEntropy *>context
    cdef const Schedule *s = &x.s
    cdef Py_ssize_t begin, end, length, k = split_range(s, task, &begin, &end, &length), row, place
    cdef Rows r = rows_at(x, x.buffers)
    cdef ag_tile tile
    row_tile(s, begin, end, k, length, tiles_of(s, task, thread), &tile)
    for row in range(begin, end):
        place = find_place(x, tile.a + (row - begin) * tile.a_stride, length, r.max[row], r.rest[row])
        s.maxima[task % s.plan.splits * s.p.rows + row] = -(k + place) if place != length else -INFINITY


cdef void write_split(const void *context, Py_ssize_t task, int thread) noexcept nogil:
    """Write the gradients of a split. The task of a phase."""
    cdef CrossEntropy *x = <CrossEntropy *>context
    cdef const Schedule *s = &x.s
    cdef Py_ssize_t begin, end, length, k = split_range(s, task, &begin, &end, &length)
    cdef Rows all_rows = rows_at(x, x.buffers), r
    cdef ag_loss_rows rows
    cdef char *tiles = tiles_of(s, task, thread)
    cdef ag_tile tile
    if s.plan.by_columns:
        begin = column_tile(s, task // s.plan.splits, k, length, tiles, &tile)
    else:
        row_tile(s, begin, end, k, length, tiles, &tile)
    r = rows_from(&all_rows, begin)
    rows = parameters(x, &r)
    rows.class_weight = weights_from(x, k)
    if s.plan.by_columns:
        x.kernels.columns_write(&tile, &rows, scratch_of(s, thread))
        scatter_columns(s, task // s.plan.splits, k, length, tiles, &tile)
    else:
        if has_full_results(x):
            write_full_results(x, &tile, &rows, k, &r)
        if not x.return_grad:
            return
        x.kernels.rows_write(&tile, &rows)
        if s.plan.gathers:
            scatter(s, begin, end, k, length, tiles, &tile)


cdef void finish_all_rows(const void *context, Py_ssize_t task, int thread) noexcept nogil:
    """Compute what follows from the statistics of all rows. The only task of a phase."""
    cdef CrossEntropy *x = <CrossEntropy *>context
    cdef Rows r = rows_at(x, x.buffers)
    finish_rows(x, x.s.p.rows, &r)


cdef void store_at_all_targets(const void *context, Py_ssize_t task, int thread) noexcept nogil:
    """Store the gradients at the targets of all rows. The only task of a phase."""
    cdef CrossEntropy *x = <CrossEntropy *>context
    cdef Rows r = rows_at(x, x.buffers)
    store_at_targets(x, x.s.p.rows, &r)


cdef void sum_splits(CrossEntropy *x, Team *team, ag_row_op which, double *sums) noexcept nogil:
    """Compute a sum of all rows of a problem that is split."""
    x.sum = which
    x.s.sum = sums
    x.s.phase = SPLIT_SUM
    _tasks.run_phase(team, sum_split, x, x.s.plan.blocks * x.s.plan.splits, True)
    run_combination(&x.s, team, COMBINE_SUM, x.s.p.rows)


cdef void combine_further(CrossEntropy *x, Team *team, int which, double *to) noexcept nogil:
    """Combine the sums of all splits that are number `which` of `further_sums`."""
    cdef double *sums = x.s.sums
    x.s.sums, x.s.sum = x.further_sums + which * x.s.plan.segments * x.s.p.rows, to
    run_combination(&x.s, team, COMBINE_SUM, x.s.p.rows)
    x.s.sums = sums


cdef void sum_dense_splits(CrossEntropy *x, Team *team, Rows *r) noexcept nogil:
    """Compute the three sums of dense targets of all rows of a problem that is split."""
    sum_splits(x, team, AG_LOSS_EXP_OF_DENSE, r.deficit)
    combine_further(x, team, 0, r.below)
    combine_further(x, team, 1, r.at_max)


cdef void sum_product_splits(CrossEntropy *x, Team *team, Rows *r) noexcept nogil:
    """Compute the sums of the exponentials times the vector of all rows of a problem that is split."""
    x.sums_products = True
    sum_splits(x, team, AG_LOSS_EXP, r.others)
    x.sums_products = False
    combine_further(x, team, 0, r.at_largest)


cdef void compute_split_statistics(CrossEntropy *x, Team *team, Rows *r) noexcept nogil:
    """Compute the statistics of all rows of a problem that is split, but for the sums of label smoothing."""
    cdef Schedule *s = &x.s
    cdef Py_ssize_t row
    cdef bint has_near_one = False
    s.max = r.max
    run_phase(s, team, SPLIT_MAX, s.plan.blocks * s.plan.splits)
    run_combination(s, team, COMBINE_MAX, s.p.rows)
    sum_splits(x, team, AG_LOSS_EXP, r.rest)
    for row in range(s.p.rows):
        has_near_one = has_near_one or (r.scale[row] > 0 and r.rest[row] < AG_ACCURATE_SUM)
    if has_near_one:
        sum_splits(x, team, AG_LOSS_REST, r.factor)
    for row in range(s.p.rows):
        r.rest[row] = r.factor[row] if has_near_one and r.rest[row] < AG_ACCURATE_SUM else r.rest[row] - 1
    if x.needs_moment:
        sum_splits(x, team, AG_LOSS_MOMENT, r.moment)


cdef void run_split_phases(CrossEntropy *x, Team *team) noexcept nogil:
    cdef Schedule *s = &x.s
    cdef Rows r = rows_at(x, x.buffers)
    cdef Py_ssize_t tasks = s.plan.blocks * s.plan.splits, row
    begin_rows(x, 0, s.p.rows, &r)
    if x.given_lse != NULL:
        s.max = r.max
        if s.plan.caches_inputs:
            run_phase(s, team, SPLIT_MAX, tasks)  # gathers tiles for the phases below; its maxima are not used
        set_given_statistics(x, s.p.rows, &r)
    else:
        compute_split_statistics(x, team, &r)
    if x.needs_deficit:
        sum_splits(x, team, x.deficit_sum, r.deficit)
    if is_dense(&x.o):
        sum_dense_splits(x, team, &r)
    if x.vector != NULL:
        sum_product_splits(x, team, &r)
    if x.predicted != NULL:
        _tasks.run_phase(team, find_in_split, x, tasks, True)
        s.max = r.factor
        run_combination(s, team, COMBINE_MAX, s.p.rows)  # the first place is the largest negative one
        s.max = r.max
        for row in range(s.p.rows):
            x.predicted[r.numbers[row]] = <int64_t>-r.factor[row] % s.p.n
    _tasks.run_serially(team, finish_all_rows, x, 1)
    if x.return_grad or has_full_results(x):
        s.phase = SPLIT_WRITE
        _tasks.run_phase(team, write_split, x, tasks, not s.plan.nontemporal)
    if x.return_grad:
        _tasks.run_serially(team, store_at_all_targets, x, 1)


# ---- the program of a team -------------------------------------------------------------------------------------------

cdef void run_phases(void *context, Team *team) noexcept nogil:
    """Run the phases of a schedule."""
    cdef CrossEntropy *x = <CrossEntropy *>context
    if x.s.plan.is_split:
        run_split_phases(x, team)
    else:
        _tasks.run_phase(team, whole_block, x, x.s.plan.blocks, not x.s.plan.nontemporal)
