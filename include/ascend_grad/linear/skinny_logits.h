/* Unpacked logits, for one kind of arithmetic and one instruction set. Included by kernels.h; skinny_rows.h describes the
 * operands. */

/* ---- lanes are features ---------------------------------------------------------------------------------- */

/* Load `count` features of a streamed row from feature k on, as packed elements. */
AG_INLINE V K(load_streamed)(const ag_dtype dtype AG_UNUSED, const char *row, ptrdiff_t k, const ptrdiff_t count)
{
#if AG_IS_DOT
    return K(load_values)(row + 2 * k, count);
#else
    return K(load_as)(dtype, row, k, count);
#endif
}

/* Add the terms of features [k, k + count) to nr * ns dot products; `count` is at most VL * PAIR. */
AG_INLINE void K(dot_step)(const ag_dtype dtype, const int nr, const int ns, const char *const *resident,
                           const char *const *streamed, ptrdiff_t k, const ptrdiff_t count, const int prefetches,
                           ptrdiff_t prefetch_distance, V *sum)
{
    V left[K(ROWS_IN_REGISTERS)];
    AG_UNROLL(4)
    for (int r = 0; r < nr; r++) left[r] = K(load_values)(resident[r] + k * (ptrdiff_t)sizeof(elem_t) / PAIR, count);
    AG_UNROLL(16)
    for (int s = 0; s < ns; s++) {
        const V right = K(load_streamed)(dtype, streamed[s], k, count);
        if (prefetches) __builtin_prefetch(streamed[s] + k * ag_itemsize[dtype] + prefetch_distance);
        AG_UNROLL(4)
        for (int r = 0; r < nr; r++) sum[r * ns + s] = K(multiply_add)(left[r], right, sum[r * ns + s]);
    }
}

/* Compute sums[r * ns + s], the dot product of rows resident[r] and streamed[s] over n features, for r < nr and s < ns. Every
 * lane is a separate chain. Neighbouring lanes are added, then neighbouring pairs of lanes, and so on. With `prefetches`, the
 * bytes `prefetch_distance` after the current ones are prefetched. */
AG_INLINE void K(dot_rows)(const ag_dtype dtype, const int nr, const int ns, const char *const *resident,
                           const char *const *streamed, ptrdiff_t n, const int prefetches,
                           ptrdiff_t prefetch_distance, acc_t *sums)
{
    const int count = nr * ns;
    V sum[K(PRODUCTS)];
    AG_UNROLL(16)
    for (int j = 0; j < count; j++) sum[j] = (V){0};
    ptrdiff_t k = 0;
    for (; k + VL * PAIR <= n; k += VL * PAIR) {
        K(dot_step)(dtype, nr, ns, resident, streamed, k, VL * PAIR, prefetches, prefetch_distance, sum);
    }
    if (k < n) K(dot_step)(dtype, nr, ns, resident, streamed, k, n - k, prefetches, prefetch_distance, sum);
    /* Each step merges pairs of vectors: lanes without the bit `block` belong to the first vector of a pair, the others to
     * the second one. If a single vector is left, it is added to itself. */
    AG_UNROLL(4)
    for (int block = 1; block < VL; block *= 2) {
        const int left = count / block;
        AG_UNROLL(8)
        for (int j = 0; j < K(PRODUCTS) / 2; j++) {
            if (2 * j >= left && j > 0) continue;
            const V a = sum[left > 1 ? 2 * j : 0], b = sum[left > 1 ? 2 * j + 1 : 0];
            sum[j] = K(exchange)(a, b, block, 0) + K(exchange)(a, b, block, 1);
        }
    }
    if (count < VL) {
        acc_t lanes[VL];
        V_(store)(lanes, sum[0]);
        memcpy(sums, lanes, (size_t)count * sizeof(acc_t));
    } else {
        AG_UNROLL(8)
        for (int j = 0; j < count / VL; j++) V_(store)(sums + j * VL, sum[j]);
    }
}

/* Add x to a scalar sum, and the rounding error of the addition to its compensation. */
AG_INLINE void K(add_scalar)(acc_t *sum, acc_t *compensation, acc_t x)
{
    const acc_t total = *sum + x, part = total - *sum;
    *compensation += (*sum - (total - part)) + (x - part);
    *sum = total;
}

/* Compute the terms of one segment, for nr resident and ns streamed rows at a time. Add them to p(r, s) with compensation, or
 * store them there if `compensation` is NULL. */
AG_INLINE void K(dot_group)(const ag_dtype dtype, const int nr, const int ns, const char *const *resident,
                            ptrdiff_t count, const ag_rows *streamed, ptrdiff_t first, ptrdiff_t n, acc_t *p,
                            ptrdiff_t pitch, acc_t *compensation)
{
    enum { MOST = K(PRODUCTS) };
    /* If rows are short, the next rows are prefetched; if they are long, the following bytes of the same rows. */
    const ptrdiff_t prefetch_distance = n * ag_itemsize[dtype] <= K(LONG) ? ns * streamed->matrix.row_stride : 512;
    /* The buffer holds MOST short rows, or VECTORS_IN_REGISTERS rows of LONGER segments. */
    enum { BYTES = 4096 * (MOST > K(VECTORS_IN_REGISTERS) * K(LONGER) ? MOST : K(VECTORS_IN_REGISTERS) * K(LONGER)) };
    char buffer[BYTES];
    for (ptrdiff_t begin = 0; begin < streamed->count; begin += ns) {
        const ptrdiff_t streams = streamed->count - begin < ns ? streamed->count - begin : ns;
        const char *rows[MOST];
        K(dense_rows)(streamed, begin, streams, first, n, buffer, BYTES / ns, 0, rows);
        for (ptrdiff_t s = streams; s < ns; s++) rows[s] = rows[0];
        for (ptrdiff_t r = 0; r < count; r += nr) {
            acc_t sums[MOST];
            if (r == 0) {
                K(dot_rows)(dtype, nr, ns, resident + r, rows, n, 1, prefetch_distance, sums);
            } else { /* the first resident rows have prefetched the streamed rows */
                K(dot_rows)(dtype, nr, ns, resident + r, rows, n, 0, 0, sums);
            }
            for (ptrdiff_t i = 0; i < nr && r + i < count; i++) {
                acc_t *const to = p + (r + i) * pitch + begin;
                if (!compensation) {
                    memcpy(to, sums + i * ns, (size_t)streams * sizeof(acc_t));
                    continue;
                }
                for (ptrdiff_t s = 0; s < streams; s++) {
                    K(add_scalar)(to + s, compensation + (r + i) * streamed->count + begin + s, sums[i * ns + s]);
                }
            }
        }
    }
}

/* Compute the terms of one segment, for as many rows at a time as suit their number and length. */
AG_INLINE void K(dot_segment)(const ag_dtype dtype, const char *const *resident, ptrdiff_t count, const ag_rows *streamed,
                              ptrdiff_t first, ptrdiff_t n, acc_t *p, ptrdiff_t pitch, acc_t *compensation)
{
    /* With many rows at a time, adding up lanes is a small part of the work. CPUs do not prefetch many long rows well. */
    enum { MOST = K(PRODUCTS) };
    const int is_short = n * ag_itemsize[dtype] <= K(LONG);
    if (count == 1 && is_short) {
        K(dot_group)(dtype, 1, MOST, resident, count, streamed, first, n, p, pitch, compensation);
    } else if (count == 2 && is_short) {
        K(dot_group)(dtype, 2, MOST / 2, resident, count, streamed, first, n, p, pitch, compensation);
    } else if (count == 1) {
        K(dot_group)(dtype, 1, K(VECTORS_IN_REGISTERS), resident, count, streamed, first, n, p, pitch, compensation);
    } else if (count == 2) {
        K(dot_group)(dtype, 2, K(VECTORS_IN_REGISTERS), resident, count, streamed, first, n, p, pitch, compensation);
    } else {
        K(dot_group)(dtype, K(ROWS_IN_REGISTERS), K(VECTORS_IN_REGISTERS), resident, count, streamed, first, n, p, pitch,
                     compensation);
    }
}

/* Transpose n features, from `first` on, of NR streamed rows: columns[k][s] is packed element k of row begin + s. Elements
 * after the last row and feature are zero. */
AG_INLINE void K(transpose_rows)(const ag_dtype dtype, const ag_rows *streamed, ptrdiff_t begin, ptrdiff_t first,
                                 ptrdiff_t n, elem_t *columns)
{
    char buffer[VL][K(FEW_FEATURES) * sizeof(elem_t) / PAIR];
    const char *rows[VL];
    for (ptrdiff_t group = 0; group < NR; group += VL) {
        const ptrdiff_t left = streamed->count - begin - group, there = left < VL ? left : VL;
        K(dense_rows)(streamed, begin + group, there, first, n, buffer[0], sizeof buffer[0], 0, rows);
        for (ptrdiff_t k = 0; k < n; k += VL * PAIR) {
            const ptrdiff_t count = n - k < VL * PAIR ? n - k : VL * PAIR;
            V x[VL];
            for (ptrdiff_t r = 0; r < VL; r++) {
                x[r] = (V){0};
                if (r < there) x[r] = K(load_streamed)(dtype, rows[r], k, count);
            }
            K(transpose)(x);
            for (ptrdiff_t i = 0; i * PAIR < count; i++) memcpy(columns + (k / PAIR + i) * NR + group, &x[i], sizeof(V));
        }
    }
}

#if !AG_IS_DOT

/* Return whether the row numbers are consecutive. */
AG_INLINE int K(is_run)(const ag_rows *rows)
{
    return !rows->numbers || rows->numbers[rows->count - 1] - rows->numbers[0] == rows->count - 1;
}

/* Load features [first, first + n) as columns of accumulators: columns[k][s] is feature first + k of row s. At most THIN
 * features of at most AG_MAX_STREAMED_STEP rows. Elements after the last row are zero up to a multiple of NR. */
static void K(load_columns)(const ag_rows *rows, ptrdiff_t first, ptrdiff_t n, acc_t columns[][AG_MAX_STREAMED_STEP])
{
    const ag_matrix *from = &rows->matrix;
    const int itemsize = ag_itemsize[from->dtype];
    const ptrdiff_t count = rows->count, padded = (count + NR - 1) / NR * NR, runs = K(is_run)(rows) ? 1 : count;
    /* 16-bit values lie in the upper half of the column, so that widening overwrites none that is not read yet. */
    const ptrdiff_t upper = itemsize == sizeof(acc_t) ? 0 : AG_MAX_STREAMED_STEP * 2;
    const char *start = from->data + (rows->numbers ? rows->numbers[0] : rows->start) * from->row_stride + first * from->step;
    const int is_transposed = runs == 1 && K(is_dense)(from) &&
                              AG_ISA_NAME(ag_transpose)((char *)columns + upper, sizeof columns[0], start, from->row_stride,
                                                        count, n, itemsize);
    for (ptrdiff_t k = 0; k < n; k++) {
        char *raw = (char *)columns[k] + upper;
        for (ptrdiff_t i = 0; i < runs && !is_transposed; i++) {
            const char *source = from->data + (rows->numbers ? rows->numbers[i] : rows->start) * from->row_stride;
            ag_copy_rows(AG_VARIANT_BASELINE, raw + i * itemsize, 0, itemsize, source + (first + k) * from->step, 0,
                         from->row_stride, 1, count / runs, itemsize, from->swapped);
        }
        for (ptrdiff_t s = 0; itemsize != sizeof(acc_t) && s < count; s += VL) {
            AG_BY_DTYPE(from->dtype, K(widen_step), raw, s, count - s < VL ? count - s : VL, columns[k]);
        }
        for (ptrdiff_t s = count; s < padded; s++) columns[k][s] = 0;
    }
}

#endif

/* Add left[r] times vector j of a column to sum[r][j]. */
AG_INLINE void K(panel_step)(const int nr, const elem_t *left, const elem_t *column, V sum[4][NV])
{
    AG_UNROLL(4)
    for (int r = 0; r < nr; r++) {
        const V a = K(broadcast)(left + r);
        AG_UNROLL(3)
        for (int j = 0; j < NV; j++) {
            V b;
            memcpy(&b, column + j * VL, sizeof b);
            sum[r][j] = K(multiply_add)(a, b, sum[r][j]);
        }
    }
}

/* Compute p(r, s) of nr resident rows and a panel of streamed rows, of which columns[k][s] holds n features. The panel has
 * `count` rows, and columns are `step` elements apart. */
AG_INLINE void K(dot_panel)(const int nr, const char *const *resident, const elem_t *columns, ptrdiff_t step, ptrdiff_t n,
                            ptrdiff_t count, acc_t *p, ptrdiff_t pitch)
{
    V sum[4][NV];
    elem_t left[4] = {0};
    AG_UNROLL(4)
    for (int r = 0; r < nr; r++) {
        AG_UNROLL(3)
        for (int j = 0; j < NV; j++) sum[r][j] = (V){0};
    }
    for (ptrdiff_t k = 0; k < n / PAIR; k++, columns += step) {
        AG_UNROLL(4)
        for (int r = 0; r < nr; r++) memcpy(&left[r], resident[r] + k * (ptrdiff_t)sizeof(elem_t), sizeof(elem_t));
        K(panel_step)(nr, left, columns, sum);
    }
    if (n % PAIR) { /* the last feature has no partner */
        for (int r = 0; r < nr; r++) {
            left[r] = 0;
            memcpy(&left[r], resident[r] + (n - 1) * 2, 2);
        }
        K(panel_step)(nr, left, columns, sum);
    }
    AG_UNROLL(4)
    for (int r = 0; r < nr; r++) {
        AG_UNROLL(3)
        for (int j = 0; j < NV; j++) {
            const ptrdiff_t there = count - j * VL;
            acc_t *const to = p + r * pitch + j * VL;
            if (there > 0) K(store_some)(to, sum[r][j], there);
        }
    }
}

/* Compute p(r, s), the dot products over features [first, first + n), if there are few features. Lanes are streamed rows, so
 * that no lanes have to be added up. There are at most SOME resident rows unless they are read in place. Inlining both this
 * function and dot_some would take too much stack. */
AG_NOINLINE void K(dot_columns)(const ag_rows *resident, const ag_rows *streamed, ptrdiff_t first, ptrdiff_t n, acc_t *p,
                                ptrdiff_t pitch)
{
    const ptrdiff_t count = resident->count;
    char buffer[K(SOME)][K(FEW_FEATURES) * sizeof(elem_t) / PAIR];
    const char *rows[AG_MAX_UNPACKED_ROWS];
    enum { PANEL = K(FEW_FEATURES) / PAIR * NR, WHOLE = K(THIN) * AG_MAX_STREAMED_STEP };
    elem_t columns[PANEL > WHOLE ? PANEL : WHOLE] __attribute__((aligned(64)));
    ptrdiff_t step = NR;
    K(load_resident)(resident, first, n, buffer[0], sizeof buffer[0], 0, rows);
#if !AG_IS_DOT
    if (n <= K(THIN)) {
        K(load_columns)(streamed, first, n, (acc_t (*)[AG_MAX_STREAMED_STEP])columns);
        step = AG_MAX_STREAMED_STEP;
    }
#endif
    for (ptrdiff_t s = 0; s < streamed->count; s += NR) {
        const ptrdiff_t there = streamed->count - s < NR ? streamed->count - s : NR;
        const elem_t *panel = columns + (step == NR ? 0 : s);
        if (step == NR) AG_BY_DTYPE(streamed->matrix.dtype, K(transpose_rows), streamed, s, first, n, columns);
        for (ptrdiff_t r = 0; r < count;) {
            const ptrdiff_t left = count - r;
            acc_t *to = p + r * pitch + s;
            if (left >= 4) {
                K(dot_panel)(4, rows + r, panel, step, n, there, to, pitch);
            } else if (left >= 2) {
                K(dot_panel)(2, rows + r, panel, step, n, there, to, pitch);
            } else {
                K(dot_panel)(1, rows + r, panel, step, n, there, to, pitch);
            }
            r += left >= 4 ? 4 : left >= 2 ? 2 : 1;
        }
    }
}

/* Compute p(r, s) as dot_columns does, for any number of features, in segments. There are at most AG_TILE products. */
AG_NOINLINE void K(dot_some)(const ag_rows *resident, const ag_rows *streamed, ptrdiff_t first, ptrdiff_t n,
                             ptrdiff_t segment, acc_t *p, ptrdiff_t pitch)
{
    char buffer[K(SOME)][4096];
    const char *rows[AG_MAX_UNPACKED_ROWS];
    acc_t compensation[AG_TILE]; /* [resident][streamed] */
    if (n > segment) memset(compensation, 0, (size_t)(resident->count * streamed->count) * sizeof(acc_t));
    for (ptrdiff_t done = 0; done < n; done += segment) {
        const ptrdiff_t length = n - done < segment ? n - done : segment;
        K(load_resident)(resident, first + done, length, buffer[0], segment * (ptrdiff_t)sizeof(elem_t) / PAIR, 0, rows);
        AG_BY_DTYPE(streamed->matrix.dtype, K(dot_segment), rows, resident->count, streamed, first + done, length, p, pitch,
                    done ? compensation : 0);
    }
    if (n <= segment) return;
    for (ptrdiff_t r = 0; r < resident->count; r++) {
        for (ptrdiff_t s = 0; s < streamed->count; s++) {
            acc_t *sum = p + r * pitch + s;
            if (*sum - *sum == 0) *sum += compensation[r * streamed->count + s];
        }
    }
}

/* Return at most `count` of the rows, from index `start` on. */
static ag_rows K(subset)(const ag_rows *rows, ptrdiff_t start, ptrdiff_t count)
{
    ag_rows some = *rows;
    some.count = rows->count - start < count ? rows->count - start : count;
    some.start += start;
    if (some.numbers) some.numbers += start;
    return some;
}

/* Compute p(r, s), the dot products of resident and streamed rows over features [first, first + n). */
static void K(dot_products)(const ag_rows *resident, const ag_rows *streamed, ptrdiff_t first, ptrdiff_t n, void *to,
                            ptrdiff_t pitch)
{
#if AG_IS_DOT
    if (n <= K(THIN)) { /* load_columns makes accumulators, not pairs */
        SUMS(dot_products)(resident, streamed, first, n, to, pitch);
        return;
    }
#endif
    /* If lanes are features, adding them up takes longer for more resident rows. Transposing does not. */
    const int by_columns = n <= K(FEW_FEATURES) && n <= PAIR * (VL + 8 * resident->count);
    /* CPUs fetch whole rows faster than parts of rows. If resident rows are few, longer segments fit into the buffers and
     * into L1. A lane gets fewer than AG_CHAIN terms even if there are two lanes. Segments depend on sizes alone, and so do
     * results. */
    const ptrdiff_t segment = K(SEGMENT) * (resident->count * K(LONGER) <= K(SOME) ? K(LONGER) : 1);
    const ptrdiff_t most = K(is_in_place)(&resident->matrix) ? AG_MAX_UNPACKED_ROWS : K(SOME);
    for (ptrdiff_t r = 0; r < resident->count; r += most) {
        const ag_rows left = K(subset)(resident, r, most);
        for (ptrdiff_t s = 0; s < streamed->count; s += AG_TILE / left.count) {
            const ag_rows right = K(subset)(streamed, s, AG_TILE / left.count);
            acc_t *const p = (acc_t *)to + r * pitch + s;
            if (by_columns) {
                K(dot_columns)(&left, &right, first, n, p, pitch);
            } else {
                K(dot_some)(&left, &right, first, n, segment, p, pitch);
            }
        }
    }
}
