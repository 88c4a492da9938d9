/* Kernels of packed rows that are shorter than a few vectors. Body header, included by kernels.h.
 *
 * All arithmetic runs over the flat elements of a row block, so that a vector may hold parts of several rows. Only sums
 * and maxima are computed row by row, from a copy of the terms in L1, and broadcast to one value per element.
 */

/* Elements of the longest narrow row, and of the longest row that is transposed (row r in lane r). Without a mask or
 * conversions, longer rows are faster as rows of whole vectors on AVX-512; nothing else is. Measured. */
#define AG_MAX_NARROW_ROW (16 * VL < 64 ? 16 * VL : 64)
#define AG_MAX_NARROW_ROW_OF(op) (AG_IS_AVX512 && AG_SIZE >= 4 && !ag_is_masked(op) ? 2 * VL : AG_MAX_NARROW_ROW)
#define AG_MAX_TRANSPOSED_ROW (VL < 8 ? VL : 8)

/* Sums, maxima and broadcasts of values of the compute type: 16-bit dtypes use the functions of float32. */
#if AG_SIZE >= 4

/* Sum a packed row of n values in the order of segment_sum, or compute its maximum, ignoring NaN. */
AG_INLINE double K(narrow_row_sum)(const compute_t *terms, ptrdiff_t n)
{
    K(lane_sums) sums = {0};
    V partial = {0};
    for (ptrdiff_t k = 0; k < n; k += VL) partial += V_(first)(n - k, V_(load)(terms + k), (V){0});
    K(fold)(&sums, partial);
    return K(reduce)(&sums) + 0.0;
}

AG_INLINE compute_t K(narrow_row_max)(const compute_t *logits, ptrdiff_t n)
{
    const V lowest = V_(set1)((compute_t)-INFINITY);
    V best = lowest;
    for (ptrdiff_t k = 0; k < n; k += VL) best = V_(max)(V_(first)(n - k, V_(load)(logits + k), lowest), best);
    return V_(reduce_max)(best);
}

/* Load one value of VL consecutive rows of n <= AG_MAX_TRANSPOSED_ROW values, row r into lane r. In this and the next
 * functions n is a constant (AG_WITH_CONSTANT), and `count`, the number of rows, is a multiple of VL. */
AG_INLINE V K(load_transposed)(const compute_t *values, const ptrdiff_t n)
{
    V v;
    AG_UNROLL(16)
    for (int r = 0; r < VL; r++) v[r] = values[r * n];
    return v;
}

AG_INLINE void K(transposed_sums)(const compute_t *terms, ptrdiff_t count, const ptrdiff_t n, double *sums)
{
    for (ptrdiff_t row = 0; row < count; row += VL) {
        K(lane_sums) lanes[8] = {0};
        AG_UNROLL(8)
        for (ptrdiff_t k = 0; k < n; k++) K(fold)(&lanes[k], K(load_transposed)(terms + row * n + k, n));
        AG_UNROLL(3)
        for (ptrdiff_t half = 4; half > 0; half /= 2) {
            AG_UNROLL(4)
            for (ptrdiff_t k = 0; k < half; k++) {
                if (k + half >= n) continue;
                lanes[k].low += lanes[k + half].low;
#if !AG_IS_F64
                lanes[k].high += lanes[k + half].high;
#endif
            }
        }
        v_f64_store(sums + row, lanes[0].low + 0.0);
#if !AG_IS_F64
        v_f64_store(sums + row + VL / 2, lanes[0].high + 0.0);
#endif
    }
}

AG_INLINE void K(transposed_maxima)(const compute_t *logits, ptrdiff_t count, const ptrdiff_t n, compute_t *max)
{
    for (ptrdiff_t row = 0; row < count; row += VL) {
        V best = V_(set1)((compute_t)-INFINITY);
        AG_UNROLL(8)
        for (ptrdiff_t k = 0; k < n; k++) best = V_(max)(K(load_transposed)(logits + row * n + k, n), best);
        V_(store)(max + row, best);
    }
}

AG_INLINE void K(broadcast_constant)(const compute_t *values, ptrdiff_t count, const ptrdiff_t n, compute_t *to)
{
    for (ptrdiff_t row = 0; row < count; row++) {
        AG_UNROLL(8)
        for (ptrdiff_t k = 0; k < n; k++) to[row * n + k] = values[row];
    }
}

/* Call a function with n as a constant, for n <= AG_MAX_TRANSPOSED_ROW <= 8. */
#define AG_WITH_CONSTANT(function, from, count, n, to)                                                                 \
    switch (n) {                                                                                                       \
    case 1: function(from, count, 1, to); break;                                                                       \
    case 2: function(from, count, 2, to); break;                                                                       \
    case 3: function(from, count, 3, to); break;                                                                       \
    case 4: function(from, count, 4, to); break;                                                                       \
    case 5: function(from, count, 5, to); break;                                                                       \
    case 6: function(from, count, 6, to); break;                                                                       \
    case 7: function(from, count, 7, to); break;                                                                       \
    default: function(from, count, 8, to); break;                                                                      \
    }

/* Return how many of `rows` packed rows of n values are transposed, VL at a time. */
AG_INLINE ptrdiff_t K(rows_together)(ptrdiff_t rows, ptrdiff_t n)
{
    return n <= AG_MAX_TRANSPOSED_ROW ? rows / VL * VL : 0;
}

/* Compute the sums, or the maxima, of `rows` packed rows. */
AG_NOINLINE void K(narrow_row_sums)(const compute_t *terms, ptrdiff_t rows, ptrdiff_t n, double *sums)
{
    const ptrdiff_t together = K(rows_together)(rows, n);
    if (together) AG_WITH_CONSTANT(K(transposed_sums), terms, together, n, sums)
    for (ptrdiff_t r = together; r < rows; r++) sums[r] = K(narrow_row_sum)(terms + r * n, n);
    for (ptrdiff_t r = 0; r < rows; r++) sums[r] = ag_canonical_nan(sums[r]);
}

AG_NOINLINE void K(narrow_row_maxima)(const compute_t *logits, ptrdiff_t rows, ptrdiff_t n, compute_t *max)
{
    const ptrdiff_t together = K(rows_together)(rows, n);
    if (together) AG_WITH_CONSTANT(K(transposed_maxima), logits, together, n, max)
    for (ptrdiff_t r = together; r < rows; r++) max[r] = K(narrow_row_max)(logits + r * n, n);
}

/* Broadcast each row's value to its elements: to[r * n + k] = values[r] for each k < n. Stores of whole vectors may
 * reach up to a vector beyond the last element. */
AG_NOINLINE void K(broadcast)(const compute_t *values, ptrdiff_t rows, ptrdiff_t n, compute_t *to)
{
    if (n <= AG_MAX_TRANSPOSED_ROW) {
        AG_WITH_CONSTANT(K(broadcast_constant), values, rows, n, to)
        return;
    }
    for (ptrdiff_t r = 0; r < rows; r++) {
        const V value = V_(set1)(values[r]);
        for (ptrdiff_t k = 0; k < n; k += VL) V_(store)(to + r * n + k, value);
    }
}

#endif

AG_INLINE void K(narrow_rows)(const int op, const ag_tile *tile)
{
    /* CAPACITY is small, as the buffers are on the stack, which may be small in a thread of a team. */
    enum { CAPACITY = AG_IS_F64 ? 512 : 1024, PADDED = CAPACITY + AG_LANES };
    compute_t terms[PADDED] __attribute__((aligned(64))), shift[PADDED] __attribute__((aligned(64)));
    compute_t factor[PADDED] __attribute__((aligned(64))), each[CAPACITY] __attribute__((aligned(64)));
    double sums[CAPACITY] __attribute__((aligned(64)));
    const ptrdiff_t n = tile->n, block = CAPACITY / n / VL * VL;
    const V scale = V_(set1)((compute_t)tile->scale), lowest = V_(set1)((compute_t)-INFINITY);
    for (ptrdiff_t row = 0; row < tile->rows; row += block) {
        const ptrdiff_t rows = tile->rows - row < block ? tile->rows - row : block, count = rows * n;
        const char *a = tile->a + row * n * AG_SIZE, *b = tile->b + row * n * AG_SIZE;
        const uint8_t *mask = tile->mask + row * n;
        ptrdiff_t i = 0;
        if (ag_is_forward(op)) {
            for (; i + VL <= count; i += VL) {
                const MASKV mask_v = K(get_mask)(ag_masks_sum(op), mask, i);
                V_(store)(terms + i, K(logit)(op, AG_LOAD(a + i * AG_SIZE), mask_v, scale));
            }
            if (i < count) {
                V_(store)(terms + i, K(logit)(op, AG_LOAD_PARTIAL(a + i * AG_SIZE, count - i),
                                              K(get_mask_partial)(ag_masks_sum(op), mask, i, count - i), scale));
            }
            K_COMPUTE(narrow_row_maxima)(terms, rows, n, each);
            K_COMPUTE(broadcast)(each, rows, n, shift);
            for (i = 0; i < count; i += VL) {
                const V shifted = V_(load)(terms + i) - V_(load)(shift + i);
                if (!K(caches_exp)(op)) V_(store)(shift + i, shifted);
                V_(store)(terms + i, V_(exp)(shifted));
            }
        } else {
            for (; i + VL <= count; i += VL) V_(store)(terms + i, K(term_at)(op, a, b, mask, i, scale, lowest));
            if (i < count) V_(store)(terms + i, K(term_at_partial)(op, a, b, mask, i, count - i, scale, lowest));
        }
        K_COMPUTE(narrow_row_sums)(terms, rows, n, sums);
        if (ag_is_forward(op)) {
            for (ptrdiff_t r = 0; r < rows; r += AG_LANES / 2) {
                v_f64_store(sums + r, K(factors)(op, v_f64_load(sums + r)));
            }
        }
        for (ptrdiff_t r = 0; r < rows; r++) each[r] = (compute_t)sums[r];
        K_COMPUTE(broadcast)(each, rows, n, ag_is_forward(op) ? factor : shift);
        char *out = tile->out + row * n * AG_SIZE;
        if (!ag_is_forward(op)) {
            K(write_results)(op, 1, a, b, mask, out, count, scale, shift, factor, NULL, tile->nontemporal, NULL);
            continue;
        }
        const compute_t *cached = K(caches_exp)(op) ? terms : shift;
        for (i = 0; i + VL <= count; i += VL) {
            AG_STORE(out + i * AG_SIZE, K(forward_value)(op, V_(load)(cached + i), V_(load)(factor + i)));
        }
        if (i < count) {
            const V value = K(forward_value)(op, V_(load)(cached + i), V_(load)(factor + i));
            AG_STORE_PARTIAL(out + i * AG_SIZE, value, count - i);
        }
    }
}

#undef AG_WITH_CONSTANT
#undef AG_MAX_TRANSPOSED_ROW
