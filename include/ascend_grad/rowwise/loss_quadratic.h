/* Kernels of results of the cross-entropy that are quadratic in the exponentials of a row: probabilities, and the diagonal
 * of the Hessian. Body header, included by loss_kernels.h.
 *
 * A probability below 1 is at most 1/2 unless its exponential is rounded to 1. So 1 - p cancels only where the exponential
 * is 1, and the result there is computed in float64 by the caller.
 */

/* The numbers of one row, or of each element, in lanes. */
typedef struct {
    V first, second, at_one;
} K(quadratic);

AG_INLINE V K(quadratic_value)(V e, const K(quadratic) *q)
{
    const V none = {0};
    const MASKV is_zero = (q->first == 0) & (q->second == 0) & (q->at_one == 0);
    const V value = V_(select)(e == 1, q->at_one, e * V_(fma)(e, q->second, q->first));
    return V_(select)(is_zero, none, value);
}

/* Return whether the rows of the result follow one another in memory, without a gap. */
AG_INLINE int K(quadratic_is_packed)(const ag_tile *tile, const ag_loss_quadratic *q)
{
    if (q->pitch != tile->n * AG_SIZE) return 0;
    for (ptrdiff_t r = 1; r < tile->rows; r++) {
        if (q->numbers[r] != q->numbers[0] + r) return 0;
    }
    return 1;
}

/* Write the results of narrow packed rows over their flat elements. `cached` has their flat exponentials, or is NULL. */
AG_NOINLINE void K(quadratic_flat)(const ag_tile *tile, const ag_loss_rows *rows, const ag_loss_quadratic *q,
                                   const compute_t *cached)
{
    enum { FIRST, SECOND, AT_ONE, SHIFT, SCALE, COUNT };
    compute_t numbers[COUNT][K(LOSS_PADDED)] __attribute__((aligned(64))), each[K(LOSS_CAPACITY)];
    const double *sources[COUNT] = {q->first, q->second, q->at_one, rows->max, rows->scale};
    const ptrdiff_t n = tile->n, block = K(LOSS_CAPACITY) / n / VL * VL;
    for (ptrdiff_t row = 0; row < tile->rows; row += block) {
        const ptrdiff_t some = tile->rows - row < block ? tile->rows - row : block, count = some * n;
        char *to = q->to + q->numbers[row] * q->pitch;
        for (int j = 0; j < (cached ? SHIFT : COUNT); j++) {
            for (ptrdiff_t r = 0; r < some; r++) each[r] = sources[j] ? (compute_t)sources[j][row + r] : 0;
            K_COMPUTE(broadcast)(each, some, n, numbers[j]);
        }
        for (ptrdiff_t i = 0; i < count; i += VL) {
            const K(quadratic) numbers_v = {V_(load)(numbers[FIRST] + i), V_(load)(numbers[SECOND] + i),
                                            V_(load)(numbers[AT_ONE] + i)};
            V e;
            if (cached) {
                e = V_(load)(cached + row * n + i);
            } else {
                const V x = K(loss_load_flat)(tile->a + row * tile->a_stride, i, count);
                e = V_(exp)((x - V_(load)(numbers[SHIFT] + i)) * V_(load)(numbers[SCALE] + i));
            }
            const V value = K(quadratic_value)(e, &numbers_v);
            if (i + VL <= count) AG_STORE(to + i * AG_SIZE, value);
            else AG_STORE_PARTIAL(to + i * AG_SIZE, value, count - i);
        }
    }
}

static void K(loss_rows_quadratic)(const ag_tile *tile, const ag_loss_rows *rows, const ag_loss_quadratic *q)
{
    const int is_flat = K(loss_is_flat)(tile, rows);
    if (K(loss_is_narrow)(tile) && K(quadratic_is_packed)(tile, q) && (is_flat || !rows->cached)) {
        K(quadratic_flat)(tile, rows, q, is_flat ? (const compute_t *)rows->cached : NULL);
        return;
    }
    for (ptrdiff_t r = 0; r < tile->rows; r++) {
        const char *a = tile->a + r * tile->a_stride;
        const compute_t *cached = rows->cached && !is_flat ? (const compute_t *)rows->cached + r * rows->pitch : NULL;
        char *to = q->to + q->numbers[r] * q->pitch;
        const V max = V_(set1)((compute_t)rows->max[r]), scale = V_(set1)((compute_t)rows->scale[r]);
        const K(quadratic) numbers = {V_(set1)((compute_t)q->first[r]),
                                      V_(set1)(q->second ? (compute_t)q->second[r] : (compute_t)0),
                                      V_(set1)((compute_t)q->at_one[r])};
        for (ptrdiff_t i = 0; i < tile->n; i += VL) {
            const ptrdiff_t left = tile->n - i;
            const V e = cached ? V_(load)(cached + i) : V_(exp)((K(loss_load_flat)(a, i, tile->n) - max) * scale);
            const V value = K(quadratic_value)(e, &numbers);
            if (left >= VL) AG_STORE(to + i * AG_SIZE, value);
            else AG_STORE_PARTIAL(to + i * AG_SIZE, value, left);
        }
    }
}
