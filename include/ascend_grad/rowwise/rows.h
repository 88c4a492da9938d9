/* Row kernels, for unit stride along the reduced dimension. Body header, included by kernels.h. */

AG_INLINE double K(row_sum)(const int op, const char *a, const char *b, const uint8_t *mask, ptrdiff_t n, V scale,
                            compute_t max, compute_t *cached)
{
    const V max_v = V_(set1)(max);
    if (n <= AG_SEGMENT(VL)) return K(segment_sum)(op, a, b, mask, n, scale, max_v, cached) + 0.0;
    ag_sum total = {0.0, 0.0};
    for (ptrdiff_t i = 0; i < n; i += AG_SEGMENT(VL)) {
        const ptrdiff_t length = n - i < AG_SEGMENT(VL) ? n - i : AG_SEGMENT(VL);
        ag_sum_add(&total, K(segment_sum)(op, a + i * AG_SIZE, b + i * AG_SIZE, mask + i, length, scale, max_v,
                                      cached ? cached + i : NULL));
    }
    return ag_sum_total(total);
}

AG_INLINE ag_tile K(row_range)(const ag_tile *tile, ptrdiff_t begin, ptrdiff_t count)
{
    ag_tile part = *tile;
    part.a += begin * tile->a_stride;
    part.b += begin * tile->b_stride;
    part.mask += begin * tile->mask_stride;
    part.out += begin * tile->out_stride;
    part.rows = count;
    return part;
}

/* Compute the maxima, or the sums, of four rows of n <= AG_SUM_BLOCK / 2 elements. The four independent chains of
 * operations hide each other's latency. */
AG_INLINE void K(four_maxima)(const int op, const ag_tile *rows, V scale, compute_t *max)
{
    const ptrdiff_t n = rows->n;
    const V lowest = V_(set1)((compute_t)-INFINITY);
    V best[4] = {lowest, lowest, lowest, lowest};
    ptrdiff_t i = 0;
    for (; i + VL <= n; i += VL) {
        AG_UNROLL(4)
        for (int r = 0; r < 4; r++) {
            best[r] = V_(max)(K(logit)(op, AG_LOAD(rows->a + r * rows->a_stride + i * AG_SIZE),
                                       K(get_mask)(ag_masks_sum(op), rows->mask + r * rows->mask_stride, i), scale),
                              best[r]);
        }
    }
    if (i < n) {
        AG_UNROLL(4)
        for (int r = 0; r < 4; r++) {
            const V x = K(logit)(op, AG_LOAD_PARTIAL(rows->a + r * rows->a_stride + i * AG_SIZE, n - i),
                                 K(get_mask_partial)(ag_masks_sum(op), rows->mask + r * rows->mask_stride, i, n - i),
                                 scale);
            best[r] = V_(max)(V_(first)(n - i, x, lowest), best[r]);
        }
    }
    AG_UNROLL(4)
    for (int r = 0; r < 4; r++) max[r] = V_(reduce_max)(best[r]);
}

AG_INLINE void K(four_sums)(const int op, const ag_tile *rows, V scale, const compute_t *max, compute_t *cached,
                            ptrdiff_t pitch, double *sums)
{
    const ptrdiff_t n = rows->n;
    V partial[4] = {{0}};
    ptrdiff_t i = 0;
#define AG_ADD_TERMS(term, ...)                                                                                        \
    AG_UNROLL(4)                                                                                                       \
    for (int r = 0; r < 4; r++) {                                                                                      \
        partial[r] += K(cache_term)(term(op, rows->a + r * rows->a_stride, rows->b + r * rows->b_stride,               \
                                        rows->mask + r * rows->mask_stride, __VA_ARGS__, scale, V_(set1)(max[r])),     \
                                   cached ? cached + r * pitch : NULL, i);                                             \
    }
    for (; i + VL <= n; i += VL) AG_ADD_TERMS(K(term_at), i)
    if (i < n) AG_ADD_TERMS(K(term_at_partial), i, n - i)
#undef AG_ADD_TERMS
    AG_UNROLL(4)
    for (int r = 0; r < 4; r++) {
        K(lane_sums) lanes = {0};
        K(fold)(&lanes, partial[r]);
        sums[r] = K(reduce)(&lanes) + 0.0;
    }
}

/* Process rows in blocks: first all sums of a block, then its results. So the additions of one row overlap with the
 * arithmetic of another. The exponentials of rows of up to CAPACITY elements are cached for the results. */
AG_INLINE void K(wide_rows)(const int op, const ag_tile *tile)
{
    /* CAPACITY is small, as the buffers are on the stack, which may be small in a thread of a team. */
    enum { ROW_BLOCK = 8, ROW_BLOCK_BYTES = 8 << 10, CAPACITY = (16 << 10) / sizeof(compute_t) };
    compute_t cached[CAPACITY] __attribute__((aligned(64))), max[ROW_BLOCK] = {0};
    double sums[ROW_BLOCK] = {0};
    const ptrdiff_t n = tile->n, width = n * AG_SIZE, pitch = (n + VL - 1) / VL * VL;
    const int prefetches = tile->nontemporal && width <= AG_MAX_PREFETCH_BYTES;
    const int caches = K(caches_exp)(op) && pitch <= CAPACITY;
    const ptrdiff_t fitting = caches ? CAPACITY / pitch : ROW_BLOCK_BYTES / width;
    const ptrdiff_t block = fitting >= ROW_BLOCK ? ROW_BLOCK : fitting > 1 ? fitting : 1;
    const V scale = V_(set1)((compute_t)tile->scale);
    for (ptrdiff_t row = 0; row < tile->rows; row += block) {
        const ptrdiff_t rows = tile->rows - row < block ? tile->rows - row : block;
        const ptrdiff_t in_fours = n <= AG_SUM_BLOCK / 2 ? rows / 4 * 4 : 0;
        const ag_tile here = K(row_range)(tile, row, rows);
        if (ag_is_forward(op)) {
            for (ptrdiff_t r = 0; r < in_fours; r += 4) {
                const ag_tile four = K(row_range)(&here, r, 4);
                K(four_maxima)(op, &four, scale, max + r);
            }
            for (ptrdiff_t r = in_fours; r < rows; r++) {
                max[r] = K(max_logit)(op, here.a + r * here.a_stride, here.mask + r * here.mask_stride, n, scale);
            }
        }
        for (ptrdiff_t r = 0; r < in_fours; r += 4) {
            const ag_tile four = K(row_range)(&here, r, 4);
            K(four_sums)(op, &four, scale, max + r, caches ? cached + r * pitch : NULL, pitch, sums + r);
        }
        for (ptrdiff_t r = in_fours; r < rows; r++) {
            const ag_tile one = K(row_range)(&here, r, 1);
            sums[r] = K(row_sum)(op, one.a, one.b, one.mask, n, scale, max[r], caches ? cached + r * pitch : NULL);
        }
        for (ptrdiff_t r = 0; r < rows; r++) sums[r] = ag_canonical_nan(sums[r]);
        if (ag_is_forward(op)) {
            for (ptrdiff_t r = 0; r < rows; r += AG_LANES / 2) {
                v_f64_store(sums + r, K(factors)(op, v_f64_load(sums + r)));
            }
        }
        for (ptrdiff_t r = 0; r < rows; r++) {
            const ag_tile one = K(row_range)(&here, r, 1);
            const ag_prefetch next = {one.a + block * one.a_stride, one.b + block * one.b_stride, NULL};
            const compute_t shift = K(shift_of)(op, max[r], sums[r]), factor = (compute_t)sums[r];
            const ag_prefetch *prefetch = prefetches && row + r + block < tile->rows ? &next : NULL;
            if (caches) {
                K(write_results)(op, 0, one.a, one.b, one.mask, one.out, n, scale, &shift, &factor, &cached[r * pitch],
                                 tile->nontemporal, prefetch);
            } else {
                K(write_results)(op, 0, one.a, one.b, one.mask, one.out, n, scale, &shift, &factor, NULL,
                                 tile->nontemporal, prefetch);
            }
        }
    }
}

/* Compute the sum of a row of one to four whole vectors (`vectors` is a constant), which stay in registers. The callers
 * process such rows one by one, so that reads and writes alternate evenly. */
AG_INLINE double K(vector_sum)(const int op, const int vectors, const V *x, const V *y, const MASKV *mask, V scale,
                               V max, compute_t *cached)
{
    V partial = {0};
    K(lane_sums) lanes = {0};
    AG_UNROLL(4)
    for (int j = 0; j < vectors; j++) {
        partial += K(cache_term)(K(term)(op, x[j], y[j], mask[j], scale, max), cached, j * VL);
    }
    K(fold)(&lanes, partial);
    return ag_canonical_nan(K(reduce)(&lanes) + 0.0);
}

AG_INLINE void K(vector_rows_backward)(const int op, const int vectors, const ag_tile *tile)
{
    const V none = {0}, scale = V_(set1)((compute_t)tile->scale);
    /* Non-temporal stores write only whole aligned vectors, so 16-bit values, which fill half a vector, have none. If
     * rows do not begin at a multiple of a vector's size, the last `left` elements of a row begin the next store. */
    const ptrdiff_t skew = (ptrdiff_t)((uintptr_t)tile->out % (VL * AG_SIZE)), left = skew / AG_SIZE;
    const int packed = tile->out_stride == tile->n * AG_SIZE && skew % AG_SIZE == 0;
    const int nontemporal = AG_SIZE >= 4 && tile->nontemporal && packed;
    char *line = tile->out - skew;
    V last = none;
    for (ptrdiff_t row = 0; row < tile->rows; row++) {
        const ag_tile one = K(row_range)(tile, row, 1);
        V x[4], y[4], value[4];
        MASKV mask[4];
        AG_UNROLL(4)
        for (int j = 0; j < vectors; j++) {
            x[j] = AG_LOAD(one.a + j * VL * AG_SIZE);
            y[j] = AG_LOAD(one.b + j * VL * AG_SIZE);
            mask[j] = K(get_mask)(ag_is_masked(op), one.mask, j * VL);
        }
        const V shift = V_(set1)((compute_t)K(vector_sum)(op, vectors, x, y, mask, scale, none, NULL));
        AG_UNROLL(4)
        for (int j = 0; j < vectors; j++) value[j] = K(value)(op, x[j], y[j], mask[j], scale, shift, none);
        if (!nontemporal) {
            AG_UNROLL(4)
            for (int j = 0; j < vectors; j++) AG_STORE(one.out + j * VL * AG_SIZE, value[j]);
            continue;
        }
        AG_UNROLL(4)
        for (int j = 0; j < vectors; j++, line += VL * AG_SIZE) {
            if (row == 0 && j == 0 && left) {
                AG_STORE_PARTIAL(tile->out, value[j], VL - left);
            } else {
                AG_STORE_NT(line, V_(join)(last, value[j], VL - left));
            }
            last = value[j];
        }
    }
    if (nontemporal && left) AG_STORE_PARTIAL(line, V_(join)(last, last, VL - left), left);
}

/* Process rows of `vectors` whole vectors in row blocks, as logarithms and reciprocals are computed for several sums at
 * a time. */
AG_INLINE void K(vector_rows_forward)(const int op, const int vectors, const ag_tile *tile)
{
    enum { ROW_BLOCK = 8 };
    const ptrdiff_t n = vectors * VL;
    const int caches = K(caches_exp)(op);
    const V none[4] = {{0}}, scale = V_(set1)((compute_t)tile->scale);
    compute_t cached[ROW_BLOCK * 4 * VL] __attribute__((aligned(64))), max[ROW_BLOCK] = {0};
    double sums[ROW_BLOCK] = {0};
    for (ptrdiff_t row = 0; row < tile->rows; row += ROW_BLOCK) {
        const ptrdiff_t rows = tile->rows - row < ROW_BLOCK ? tile->rows - row : ROW_BLOCK;
        const ag_tile here = K(row_range)(tile, row, rows);
        for (ptrdiff_t r = 0; r < rows; r++) {
            const ag_tile one = K(row_range)(&here, r, 1);
            V x[4], best = V_(set1)((compute_t)-INFINITY);
            MASKV mask[4];
            AG_UNROLL(4)
            for (int j = 0; j < vectors; j++) {
                x[j] = AG_LOAD(one.a + j * VL * AG_SIZE);
                mask[j] = K(get_mask)(ag_masks_sum(op), one.mask, j * VL);
                best = V_(max)(K(logit)(op, x[j], mask[j], scale), best);
            }
            max[r] = V_(reduce_max)(best);
            sums[r] = K(vector_sum)(op, vectors, x, none, mask, scale, V_(set1)(max[r]),
                                    caches ? cached + r * n : NULL);
        }
        for (ptrdiff_t r = 0; r < rows; r += AG_LANES / 2) v_f64_store(sums + r, K(factors)(op, v_f64_load(sums + r)));
        for (ptrdiff_t r = 0; r < rows; r++) {
            const ag_tile one = K(row_range)(&here, r, 1);
            const V shift = V_(set1)(max[r]), factor = V_(set1)((compute_t)sums[r]);
            AG_UNROLL(4)
            for (ptrdiff_t i = 0; i < n; i += VL) {
                const V x = caches ? V_(load)(cached + r * n + i) : AG_LOAD(one.a + i * AG_SIZE) - shift;
                AG_STORE(one.out + i * AG_SIZE, K(forward_value)(op, x, factor));
            }
        }
    }
}

AG_INLINE void K(vector_rows)(const int op, const int vectors, const ag_tile *tile)
{
    if (ag_is_forward(op)) {
        K(vector_rows_forward)(op, vectors, tile);
    } else {
        K(vector_rows_backward)(op, vectors, tile);
    }
}

AG_INLINE void K(rows)(const int op, const ag_tile *tile)
{
    const ptrdiff_t n = tile->n, width = n * AG_SIZE;
    const int packed = ag_tile_is_packed(tile, width, ag_reads_b(op)) && tile->out_stride == width &&
                       (!ag_is_masked(op) || tile->mask_stride == n);
    if (n == VL) {
        K(vector_rows)(op, 1, tile);
    } else if (n == 2 * VL) {
        K(vector_rows)(op, 2, tile);
    } else if (n == 3 * VL) {
        K(vector_rows)(op, 3, tile);
    } else if (n == 4 * VL) {
        K(vector_rows)(op, 4, tile);
    } else if (n <= AG_MAX_NARROW_ROW_OF(op) && n % VL && tile->rows > 1 && packed) {
        K(narrow_rows)(op, tile); /* wide_rows would leave lanes of its vectors empty */
    } else {
        K(wide_rows)(op, tile);
    }
    if (tile->nontemporal) v_fence();
}
