/* Column kernels, for unit stride across the reduced dimension. Body header, included by kernels.h.
 *
 * Few rows are processed in strips of a few vectors of columns, which stay in registers and L1. More rows are processed
 * by tile: first the sums of each segment for all columns, then the results.
 */

/* Update the maxima of the columns by one row: best[c] = max(best[c], a[c]). `best` is padded to whole vectors. */
AG_INLINE void K(update_max)(const char *a, ptrdiff_t width, compute_t *best)
{
    ptrdiff_t c = 0;
    for (; c + VL <= width; c += VL) V_(store)(best + c, V_(max)(AG_LOAD(a + c * AG_SIZE), V_(load)(best + c)));
    if (c < width) {
        const V x = V_(first)(width - c, AG_LOAD_PARTIAL(a + c * AG_SIZE, width - c), V_(set1)((compute_t)-INFINITY));
        V_(store)(best + c, V_(max)(x, V_(load)(best + c)));
    }
}

/* Compute the maxima of the columns, ignoring NaN. Packed rows of few columns are processed VL at a time. */
AG_NOINLINE void K(columns_max)(const ag_tile *tile, compute_t *best, double *max)
{
    const ptrdiff_t columns = tile->rows, width = columns * AG_SIZE;
    const int packed = ag_tile_is_packed(tile, width, 0) && columns <= AG_PACKED_COLUMNS;
    const ptrdiff_t together = !packed ? 1 : tile->n < VL ? tile->n : VL;
    for (ptrdiff_t c = 0; c < together * columns + VL; c++) best[c] = (compute_t)-INFINITY;
    for (ptrdiff_t k = 0; k < tile->n; k += together) {
        const ptrdiff_t rows = tile->n - k < together ? tile->n - k : together;
        K(update_max)(tile->a + k * tile->a_stride, rows * columns, best);
    }
    for (ptrdiff_t t = 1; t < together; t++) {
        const compute_t *row = best + t * columns;
        for (ptrdiff_t c = 0; c < columns; c++) best[c] = row[c] > best[c] ? row[c] : best[c];
    }
    for (ptrdiff_t c = 0; c < columns; c++) max[c] = best[c];
}

/* Add `partial` to the sums of VL columns, in float64; if `first`, the sums start at 0. */
AG_INLINE void K(add_partial)(int first, V partial, double *sums)
{
    K(lane_sums) lanes = {0};
    if (!first) {
        lanes.low = v_f64_load(sums);
#if !AG_IS_F64
        lanes.high = v_f64_load(sums + VL / 2);
#endif
    }
    K(fold)(&lanes, partial);
    v_f64_store(sums, lanes.low);
#if !AG_IS_F64
    v_f64_store(sums + VL / 2, lanes.high);
#endif
}

/* Add up the terms of `count` rows for each of `width` consecutive columns, in the compute type, and add the result to
 * sums[c]. Eight vectors of a row are read at a time: rows whose length is a power of two map to the same few cache
 * sets, so a line that is read has to be used before it is evicted. */
AG_INLINE void K(add_rows)(const int op, int first, const char *a, const char *b, ptrdiff_t a_step, ptrdiff_t b_step,
                           ptrdiff_t count, ptrdiff_t width, V scale, const compute_t *max, double *sums,
                           int prefetches)
{
    enum { TOGETHER = 8 };
    const V none = {0};
    ptrdiff_t c = 0;
    for (; c + TOGETHER * VL <= width; c += TOGETHER * VL) {
        V partial[TOGETHER];
        AG_UNROLL(8)
        for (int j = 0; j < TOGETHER; j++) partial[j] = none;
        for (ptrdiff_t t = 0; t < count; t++) {
            const char *a_t = a + t * a_step, *b_t = b + t * b_step;
            AG_UNROLL(8)
            for (int j = 0; j < TOGETHER; j++) {
                const ptrdiff_t i = c + j * VL;
                partial[j] += K(term_at)(op, a_t, b_t, NULL, i, scale, ag_is_forward(op) ? V_(load)(max + i) : none);
                /* The sums do not read this second input, but the results will. */
                if (ag_reads_b(op) && !ag_sums_b(op) && prefetches) __builtin_prefetch(b_t + i * AG_SIZE, 0, 2);
            }
        }
        AG_UNROLL(8)
        for (int j = 0; j < TOGETHER; j++) K(add_partial)(first, partial[j], sums + c + j * VL);
    }
    for (; c < width; c += VL) {
        const V max_v = ag_is_forward(op) ? V_(load)(max + c) : none;
        V partial = none;
        for (ptrdiff_t t = 0; t < count; t++) {
            const char *a_t = a + t * a_step, *b_t = b + t * b_step;
            partial += c + VL <= width ? K(term_at)(op, a_t, b_t, NULL, c, scale, max_v)
                                       : K(term_at_partial)(op, a_t, b_t, NULL, c, width - c, scale, max_v);
        }
        K(add_partial)(first, partial, sums + c);
    }
}

/* Add up the terms of one sum block of `count` rows for all lanes. The terms of a lane are first added up at
 * partial + lane * pitch, then that partial sum is added to the lane's sums. So memory is read in order, and the next
 * row is prefetched meanwhile. */
AG_INLINE void K(add_block)(const int op, int first, const char *a, const char *b, ptrdiff_t a_step, ptrdiff_t b_step,
                            ptrdiff_t count, ptrdiff_t width, ptrdiff_t pitch, V scale, const compute_t *max,
                            compute_t *partial, double *sums)
{
    const V none = {0};
    for (ptrdiff_t t = 0; t < count; t++, a += a_step, b += b_step) {
        compute_t *lane = partial + t % VL * pitch;
        for (ptrdiff_t c = 0; c < width; c += VL) {
            const V max_v = ag_is_forward(op) ? V_(load)(max + c) : none;
            const V term = c + VL <= width ? K(term_at)(op, a, b, NULL, c, scale, max_v)
                                           : K(term_at_partial)(op, a, b, NULL, c, width - c, scale, max_v);
            V_(store)(lane + c, (t < VL ? none : V_(load)(lane + c)) + term);
            __builtin_prefetch(a + a_step + c * AG_SIZE, 0, 2);
            if (ag_sums_b(op)) __builtin_prefetch(b + b_step + c * AG_SIZE, 0, 2);
        }
    }
    for (ptrdiff_t lane = 0; lane < VL && lane < count; lane++) {
        for (ptrdiff_t c = lane * pitch; c < lane * pitch + width; c += VL) {
            K(add_partial)(first, V_(load)(partial + c), sums + c);
        }
    }
}

/* Compute the sums of one segment, tile->n <= AG_SEGMENT(VL), for each of tile->rows columns, into sums[0 .. rows).
 * The sums of lane j of the fixed order start at sums + j * pitch. Packed rows of few columns are processed VL at a
 * time, as one row of VL * columns elements: the lanes are then adjacent, and pitch is the number of columns. */
AG_INLINE void K(columns_sum)(const int op, const ag_tile *tile, const compute_t *max, compute_t *partial, double *sums)
{
    const ptrdiff_t n = tile->n, columns = tile->rows, width = columns * AG_SIZE;
    const int packed = ag_tile_is_packed(tile, width, ag_sums_b(op)) && columns <= AG_PACKED_COLUMNS;
    const ptrdiff_t pitch = packed ? columns : (columns + VL - 1) / VL * VL;
    const V scale = V_(set1)((compute_t)tile->scale);
    for (ptrdiff_t begin = 0; begin < n; begin += AG_SUM_BLOCK) {
        const ptrdiff_t length = n - begin < AG_SUM_BLOCK ? n - begin : AG_SUM_BLOCK;
        if (!packed && !tile->fits_l2) {
            K(add_block)(op, begin == 0, tile->a + begin * tile->a_stride, tile->b + begin * tile->b_stride,
                         tile->a_stride, tile->b_stride, length, columns, pitch, scale, max, partial,
                         sums);
            continue;
        }
        /* Lanes of packed rows are processed together if they have equally many terms: first the lanes with a term in
         * the last, incomplete group of VL rows, then the others. */
        for (ptrdiff_t lane = 0; lane < VL && lane < length;) {
            const ptrdiff_t count = (length - lane + VL - 1) / VL, rest = length % VL;
            const ptrdiff_t together = !packed ? 1 : lane < rest ? rest : (length < VL ? length : VL) - lane;
            const char *a = tile->a + (begin + lane) * tile->a_stride, *b = tile->b + (begin + lane) * tile->b_stride;
            const compute_t *max_l = packed ? max + lane * columns : max;
            K(add_rows)(op, begin == 0, a, b, VL * tile->a_stride, VL * tile->b_stride, count, together * columns,
                        scale, max_l, sums + lane * pitch, tile->fits_l2);
            lane += together;
        }
    }
    ptrdiff_t lanes = n < VL ? n : VL;
    for (ptrdiff_t half = VL / 2; half > 0; half /= 2) {
        if (lanes <= half) continue;
        const ptrdiff_t count = (lanes - half) * pitch;
        const double *upper = sums + half * pitch;
        for (ptrdiff_t c = 0; c < count; c++) sums[c] += upper[c];
        lanes = half;
    }
}

/* Write the results of tile->n rows, `repeats` rows at a time. `shift` and `factor` have one value for each element of
 * `repeats` rows. */
AG_INLINE void K(columns_write)(const int op, const ag_tile *tile, const compute_t *shift, const compute_t *factor,
                                ptrdiff_t repeats)
{
    const V none = {0};
    const ptrdiff_t a_step = repeats * tile->a_stride, b_step = repeats * tile->b_stride;
    const ptrdiff_t out_step = repeats * tile->out_stride;
    /* The loop runs backwards, as the rows that the sums read last are still in the cache. */
    for (ptrdiff_t k = (tile->n - 1) / repeats * repeats; k >= 0; k -= repeats) {
        const ptrdiff_t rows = tile->n - k < repeats ? tile->n - k : repeats;
        const char *a = tile->a + k * tile->a_stride, *b = tile->b + k * tile->b_stride;
        char *out = tile->out + k * tile->out_stride;
        /* `out` is prefetched for ordinary stores alone, which have to read the old values of a line first. */
        const ag_prefetch next = {tile->fits_l2 ? NULL : a - a_step, b - b_step,
                                  tile->nontemporal ? NULL : out - out_step};
        K(write_results)(op, 1, a, b, NULL, out, rows * tile->rows, none, shift, factor, NULL, tile->nontemporal,
                         k ? &next : NULL);
    }
    if (tile->nontemporal) v_fence();
}

/* Load a row of a strip, which is a few vectors of columns of at most a sum block of rows. `vectors` is a constant, 4
 * or 1. A strip of one vector has `width` columns, which may be part of a vector. Unless `in_order`, the columns of two
 * vectors are in the order of AG_LOAD_TWO. */
AG_INLINE void K(load_strip)(const int vectors, const int in_order, const char *p, ptrdiff_t width, V *v)
{
    if (vectors > 1 && in_order) {
        AG_UNROLL(4)
        for (int j = 0; j < vectors; j++) v[j] = AG_LOAD(p + j * VL * AG_SIZE);
    } else if (vectors > 1) {
        AG_UNROLL(2)
        for (int j = 0; j < vectors; j += 2) AG_LOAD_TWO(p + j * VL * AG_SIZE, &v[j], &v[j + 1]);
    } else {
        *v = width == VL ? AG_LOAD(p) : AG_LOAD_PARTIAL(p, width);
    }
}

AG_INLINE void K(store_strip)(const int vectors, char *p, ptrdiff_t width, int nontemporal, const V *v)
{
    if (vectors > 1) {
        AG_UNROLL(2)
        for (int j = 0; j < vectors; j += 2) {
            if (nontemporal) AG_STORE_NT_TWO(p + j * VL * AG_SIZE, v[j], v[j + 1]);
            else AG_STORE_TWO(p + j * VL * AG_SIZE, v[j], v[j + 1]);
        }
    } else if (width == VL) {
        AG_STORE(p, *v);
    } else {
        AG_STORE_PARTIAL(p, *v, width);
    }
}

/* Compute the maxima of the columns of a strip, ignoring NaN. */
AG_INLINE void K(strip_max)(const int vectors, const char *a, ptrdiff_t a_stride, ptrdiff_t n, ptrdiff_t width, V *max)
{
    V x[4] = {{0}};
    AG_UNROLL(4)
    for (int j = 0; j < vectors; j++) max[j] = V_(set1)((compute_t)-INFINITY);
    for (ptrdiff_t k = 0; k < n; k++) {
        K(load_strip)(vectors, 1, a + k * a_stride, width, x);
        AG_UNROLL(4)
        for (int j = 0; j < vectors; j++) max[j] = V_(max)(x[j], max[j]);
    }
}

/* Compute the sums of the columns of a strip of tile->n rows, at most a sum block. The terms are kept in `cached`,
 * (n, vectors), or NULL; AG_LOSS_REST reads exponentials there. AG_LOSS_EXP_OF_DENSE has three sums, and three totals for each
 * vector. It alone reads `dense` and the class weights, ones if they are NULL. */
AG_INLINE void K(strip_sum)(const int op, const int vectors, const ag_tile *tile, const char *a, const char *b,
                            ptrdiff_t width, V scale, const V *max, const K(dense_row) *dense,
                            const compute_t *class_weight, K(lane_sums) *totals, V *cached)
{
    enum { LEVELS = 4, SUMS = 3 };
    const int sums = vectors * (op == AG_LOSS_EXP_OF_DENSE ? SUMS : 1);
    const ptrdiff_t n = tile->n, lanes = n < VL ? n : VL;
    const V none = {0};
    V x[4] = {none}, y[4] = {none};
    /* Lanes are added by halves, in the fixed order: the sum of a lane is pending until its other half is computed. The
     * lane whose sum was computed last is added first. */
    K(lane_sums) sum[4 * SUMS], pending[LEVELS][4 * SUMS];
    ptrdiff_t half = 1, lane = 0;
    int count = 0;
    while (2 * half < lanes) half *= 2;
    if (lanes == 1) half = 0;
    for (;;) {
        V partial[4 * SUMS] = {none};
        for (ptrdiff_t k = lane; k < n; k += VL) {
            K(load_strip)(vectors, 1, a + k * tile->a_stride, width, x);
            if (ag_sums_b(op)) K(load_strip)(vectors, 1, b + k * tile->b_stride, width, y);
            const V weight = class_weight ? V_(set1)(class_weight[k]) : none;
            AG_UNROLL(4)
            for (int j = 0; j < vectors; j++) {
                if (op == AG_LOSS_EXP_OF_DENSE) {
                    const V w = K(dense_weight)(y[j], weight, class_weight != NULL, dense);
                    K(dense_add)(partial + SUMS * j, x[j], w, scale, max[j]);
                } else if (op == AG_LOSS_REST && cached) {
                    partial[j] += V_(select)(x[j] < max[j], cached[k * vectors + j], none);
                } else {
                    const V term = K(term)(op, x[j], y[j], (MASKV){0}, scale, max[j]);
                    if (cached) cached[k * vectors + j] = term;
                    partial[j] += term;
                }
            }
        }
        AG_UNROLL(12)
        for (int j = 0; j < sums; j++) {
            sum[j] = (K(lane_sums)){0};
            K(fold)(&sum[j], partial[j]);
        }
        ptrdiff_t bit = half;
        for (; bit && ((lane & bit) || (lane | bit) >= lanes); bit /= 2) {
            if (!(lane & bit)) continue; /* the column is too short for the other half */
            count--;
            AG_UNROLL(12)
            for (int j = 0; j < sums; j++) K(add_lanes)(&sum[j], &pending[count][j]);
            lane ^= bit;
        }
        if (bit == 0) break;
        AG_UNROLL(12)
        for (int j = 0; j < sums; j++) pending[count][j] = sum[j];
        count++;
        lane |= bit;
    }
    AG_UNROLL(12)
    for (int j = 0; j < sums; j++) totals[j] = K(canonical)(&sum[j]);
}

/* Compute a strip of two rows of a gradient, whose inputs stay in registers. The sum of two numbers of the compute type is the
 * rounded sum in float64, which has more than twice as many digits. */
AG_INLINE void K(strip_of_two)(const int op, const int vectors, const ag_tile *tile, ptrdiff_t c, ptrdiff_t width,
                               int nontemporal)
{
    const V none = {0};
    V x[2][4] = {{none}}, y[2][4] = {{none}}, shift[4];
    AG_UNROLL(2)
    for (int k = 0; k < 2; k++) {
        K(load_strip)(vectors, 0, tile->a + k * tile->a_stride + c * AG_SIZE, width, x[k]);
        if (ag_reads_b(op)) K(load_strip)(vectors, 0, tile->b + k * tile->b_stride + c * AG_SIZE, width, y[k]);
    }
    AG_UNROLL(4)
    for (int j = 0; j < vectors; j++) {
        const V first = K(term)(op, x[0][j], y[0][j], (MASKV){0}, none, none);
        const V sum = first + K(term)(op, x[1][j], y[1][j], (MASKV){0}, none, none) + none; /* -0 becomes +0 */
        shift[j] = V_(select)(sum == sum, sum, V_(set1)((compute_t)NAN)); /* as in canonical */
    }
    AG_UNROLL(2)
    for (int k = 0; k < 2; k++) {
        AG_UNROLL(4)
        for (int j = 0; j < vectors; j++) x[k][j] = K(value)(op, x[k][j], y[k][j], (MASKV){0}, none, shift[j], none);
        K(store_strip)(vectors, tile->out + k * tile->out_stride + c * AG_SIZE, width, nontemporal, x[k]);
    }
}

/* Compute a strip of an operator with one result. The loops repeat the loops of strip_max and strip_sum: calls of these
 * functions made short columns of softmax_backward a tenth slower (GCC 12). */
AG_INLINE void K(strip)(const int op, const int vectors, const ag_tile *tile, ptrdiff_t c, ptrdiff_t width,
                        int nontemporal)
{
    enum { CACHED_ROWS = 16, LEVELS = 4 };
    const char *a = tile->a + c * AG_SIZE, *b = tile->b + c * AG_SIZE;
    const ptrdiff_t n = tile->n, lanes = n < VL ? n : VL;
    const int caches = K(caches_exp)(op) && n <= CACHED_ROWS;
    const V none = {0};
    V x[4] = {none}, y[4] = {none}, shift[4] = {none}, factor[4] = {none}, cached[CACHED_ROWS][4];
    if (n == 1 && (op == AG_SOFTMAX || op == AG_LOG_SOFTMAX)) { /* the only probability is 1, unless x is NaN or infinite */
        K(load_strip)(vectors, 0, a, width, x);
        AG_UNROLL(4)
        for (int j = 0; j < vectors; j++) x[j] = x[j] - x[j] + V_(set1)(op == AG_SOFTMAX);
        K(store_strip)(vectors, tile->out + c * AG_SIZE, width, nontemporal, x);
        return;
    }
    if (n == 2 && !ag_is_forward(op)) {
        K(strip_of_two)(op, vectors, tile, c, width, nontemporal);
        return;
    }
    if (ag_is_forward(op)) {
        AG_UNROLL(4)
        for (int j = 0; j < vectors; j++) shift[j] = V_(set1)((compute_t)-INFINITY);
        for (ptrdiff_t k = 0; k < n; k++) {
            K(load_strip)(vectors, 0, a + k * tile->a_stride, width, x);
            AG_UNROLL(4)
            for (int j = 0; j < vectors; j++) shift[j] = V_(max)(x[j], shift[j]);
        }
    }
    /* Lanes are added by halves, in the fixed order: the sum of a lane is pending until its other half is computed. The
     * lane whose sum was computed last is added first. */
    K(lane_sums) sum[4], pending[LEVELS][4];
    ptrdiff_t half = 1, lane = 0;
    int count = 0;
    while (2 * half < lanes) half *= 2;
    if (lanes == 1) half = 0;
    for (;;) {
        V partial[4] = {none};
        for (ptrdiff_t k = lane; k < n; k += VL) {
            K(load_strip)(vectors, 0, a + k * tile->a_stride, width, x);
            if (ag_sums_b(op)) K(load_strip)(vectors, 0, b + k * tile->b_stride, width, y);
            AG_UNROLL(4)
            for (int j = 0; j < vectors; j++) {
                const V term = K(term)(op, x[j], y[j], (MASKV){0}, none, shift[j]);
                if (caches) cached[k][j] = term;
                partial[j] += term;
            }
        }
        AG_UNROLL(4)
        for (int j = 0; j < vectors; j++) {
            sum[j] = (K(lane_sums)){0};
            K(fold)(&sum[j], partial[j]);
        }
        ptrdiff_t bit = half;
        for (; bit && ((lane & bit) || (lane | bit) >= lanes); bit /= 2) {
            if (!(lane & bit)) continue; /* the column is too short for the other half */
            count--;
            AG_UNROLL(4)
            for (int j = 0; j < vectors; j++) K(add_lanes)(&sum[j], &pending[count][j]);
            lane ^= bit;
        }
        if (bit == 0) break;
        AG_UNROLL(4)
        for (int j = 0; j < vectors; j++) pending[count][j] = sum[j];
        count++;
        lane |= bit;
    }
    AG_UNROLL(4)
    for (int j = 0; j < vectors; j++) {
        K(lane_sums) total = K(canonical)(&sum[j]);
        if (ag_is_forward(op)) {
            total.low = K(factors)(op, total.low);
#if !AG_IS_F64
            total.high = K(factors)(op, total.high);
#endif
            factor[j] = K(to_compute_type)(&total);
        } else {
            shift[j] = K(to_compute_type)(&total);
        }
    }
    for (ptrdiff_t k = 0; k < n; k++) {
        if (!caches) K(load_strip)(vectors, 0, a + k * tile->a_stride, width, x);
        if (ag_reads_b(op)) K(load_strip)(vectors, 0, b + k * tile->b_stride, width, y);
        AG_UNROLL(4)
        for (int j = 0; j < vectors; j++) {
            x[j] = caches ? K(forward_value)(op, cached[k][j], factor[j])
                          : K(value)(op, x[j], y[j], (MASKV){0}, none, shift[j], factor[j]);
        }
        K(store_strip)(vectors, tile->out + k * tile->out_stride + c * AG_SIZE, width, nontemporal, x);
    }
}

/* Compute a tile by strips, each of which `strip` computes: strip(parameter, vectors, tile, first column, width,
 * nontemporal). Strips of four vectors begin at a cache line of the result if they bypass the caches. */
#define AG_COMPUTE_STRIPS(strip, parameter, tile)                                                                      \
    do {                                                                                                               \
        const ptrdiff_t columns = (tile)->rows, before = (ptrdiff_t)(-(uintptr_t)(tile)->out % 64) / AG_SIZE;          \
        const int nontemporal =                                                                                        \
            (tile)->nontemporal && (tile)->out_stride % 64 == 0 && (uintptr_t)(tile)->out % AG_SIZE == 0;              \
        ptrdiff_t c = 0;                                                                                               \
        for (ptrdiff_t width; nontemporal && c < before && c < columns; c += width) {                                  \
            width = before - c < columns - c ? before - c : columns - c;                                               \
            width = width < VL ? width : VL;                                                                           \
            strip(parameter, 1, tile, c, width, 0);                                                                    \
        }                                                                                                              \
        for (; c + 4 * VL <= columns; c += 4 * VL) strip(parameter, 4, tile, c, VL, nontemporal);                      \
        for (; c < columns; c += VL) strip(parameter, 1, tile, c, columns - c < VL ? columns - c : VL, 0);             \
        if ((tile)->nontemporal) v_fence();                                                                            \
    } while (0)

AG_INLINE void K(strips)(const int op, const ag_tile *tile) { AG_COMPUTE_STRIPS(K(strip), op, tile); }

/* Buffers in a thread's scratch memory. */
typedef struct {
    double *sums;                  /* sums of one segment, for VL lanes of each column */
    compute_t *partial;            /* sums of one sum block, for VL lanes of each column */
    double *total, *compensation;  /* compensated sum over segments, for each column */
    compute_t *shift, *factor;     /* one value per column, then repeated for packed rows */
    compute_t *max;                /* maximum of each column, then repeated for packed rows */
} K(scratch);

AG_INLINE K(scratch) K(scratch_layout)(void *memory)
{
    K(scratch) s;
    s.sums = (double *)memory;
    s.partial = (compute_t *)(s.sums + AG_LANES * AG_MAX_COLUMNS);
    s.total = (double *)(s.partial + VL * AG_MAX_COLUMNS);
    s.compensation = s.total + AG_MAX_COLUMNS;
    s.max = (compute_t *)(s.compensation + AG_MAX_COLUMNS);
    s.shift = s.max + AG_SCRATCH_VALUES;
    s.factor = s.shift + AG_SCRATCH_VALUES;
    return s;
}

/* Repeat the first `columns` values until the array holds `count` values. */
AG_INLINE void K(repeat)(compute_t *values, ptrdiff_t columns, ptrdiff_t count)
{
    for (ptrdiff_t done = columns; done < count; done *= 2) {
        memcpy(values + done, values, sizeof(compute_t) * (size_t)(done < count - done ? done : count - done));
    }
}

/* Convert the maxima of the columns to the compute type, and repeat them for packed rows. */
AG_INLINE void K(prepare_max)(const int op, const ag_tile *tile, const double *max, compute_t *prepared)
{
    if (!ag_is_forward(op)) return;
    for (ptrdiff_t c = 0; c < tile->rows; c++) prepared[c] = (compute_t)max[c];
    if (tile->rows <= AG_PACKED_COLUMNS) K(repeat)(prepared, tile->rows, (tile->n < VL ? tile->n : VL) * tile->rows);
}

/* Types of columns_sum, columns_write and strips with a constant operator. */
typedef void K(sum_function)(const ag_tile *tile, K(scratch) s);
typedef void K(write_function)(const ag_tile *tile, const compute_t *shift, const compute_t *factor, ptrdiff_t repeats);
typedef void K(strip_function)(const ag_tile *tile);

AG_INLINE void K(write_prepared)(const int op, K(write_function) *write, const ag_tile *tile, const double *max,
                                 const double *sum, K(scratch) s)
{
    const ptrdiff_t columns = tile->rows;
    const double *shift = ag_is_forward(op) ? max : sum;
    for (ptrdiff_t c = 0; c < columns; c++) s.shift[c] = (compute_t)shift[c];
    for (ptrdiff_t c = 0; ag_is_forward(op) && c < columns; c += AG_LANES / 2) {
        double factor[AG_LANES / 2];
        const ptrdiff_t count = columns - c < AG_LANES / 2 ? columns - c : AG_LANES / 2;
        const f64v sums = count < AG_LANES / 2 ? v_f64_load_partial(sum + c, count) : v_f64_load(sum + c);
        v_f64_store(factor, K(factors)(op, sums));
        for (ptrdiff_t j = 0; j < count; j++) s.factor[c + j] = (compute_t)factor[j];
    }
    ptrdiff_t repeats = 1;
    if (columns <= AG_PACKED_COLUMNS && ag_tile_is_packed(tile, columns * AG_SIZE, ag_reads_b(op)) &&
        tile->out_stride == columns * AG_SIZE) {
        repeats = AG_MAX_COLUMNS / columns < tile->n ? AG_MAX_COLUMNS / columns : tile->n;
        K(repeat)(s.shift, columns, repeats * columns);
        if (ag_is_forward(op)) K(repeat)(s.factor, columns, repeats * columns);
    }
    write(tile, s.shift, s.factor, repeats);
}

AG_INLINE void K(columns)(const int op, K(sum_function) *add, K(write_function) *write, K(strip_function) *strips,
                          const ag_tile *tile, void *memory)
{
    const ptrdiff_t columns = tile->rows, width = columns * AG_SIZE;
    const int packed = ag_tile_is_packed(tile, width, ag_reads_b(op)) && tile->out_stride == width;
    if (tile->n <= AG_STRIP_ROWS(VL) && (columns >= AG_STRIP_COLUMNS || !packed)) {
        strips(tile);
        return;
    }
    const K(scratch) s = K(scratch_layout)(memory);
    double *max = s.compensation; /* free until the sums begin */
    if (ag_is_forward(op)) {
        K(columns_max)(tile, s.shift, max);
        K(prepare_max)(op, tile, max, s.max);
    }
    if (tile->n <= AG_SEGMENT(VL)) {
        /* The sum of a single segment needs no compensation. Adding +0 turns -0 into +0, as in every other sum. */
        add(tile, s);
        for (ptrdiff_t c = 0; c < columns; c++) s.total[c] = ag_canonical_nan(s.sums[c] + 0.0);
        if (ag_is_forward(op)) {
            for (ptrdiff_t c = 0; c < columns; c++) max[c] = s.max[c];
        }
        K(write_prepared)(op, write, tile, max, s.total, s);
        return;
    }
    for (ptrdiff_t c = 0; c < columns; c++) s.total[c] = s.compensation[c] = 0.0;
    for (ptrdiff_t k = 0; k < tile->n; k += AG_SEGMENT(VL)) {
        ag_tile part = K(row_range)(tile, k, columns);
        part.n = tile->n - k < AG_SEGMENT(VL) ? tile->n - k : AG_SEGMENT(VL);
        add(&part, s);
        ag_sums_add(s.total, s.compensation, s.sums, columns);
    }
    ag_sums_total(s.total, s.compensation, columns);
    if (ag_is_forward(op)) {
        for (ptrdiff_t c = 0; c < columns; c++) max[c] = s.max[c];
    }
    K(write_prepared)(op, write, tile, max, s.total, s);
}
