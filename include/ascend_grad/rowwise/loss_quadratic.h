/* Kernels of results of the cross-entropy that are quadratic in the exponentials of a row: probabilities, the diagonal of the
 * Hessian, and products of the Hessian and vectors. Body header, included by loss_kernels.h.
 *
 * A probability below 1 is at most 1/2 unless its exponential is rounded to 1. So 1 - p cancels only where the exponential
 * is 1, and the result there is computed in float64 by the caller, or from numbers that the caller computes.
 */

/* The numbers of one row, or of each element, in lanes. */
typedef struct {
    V first, second, at_one, others, at_max;
} K(quadratic);

AG_INLINE MASKV K(quadratic_is_zero)(const K(quadratic) *q)
{
    return (q->first == 0) & (q->second == 0) & (q->at_one == 0);
}

AG_INLINE V K(quadratic_value)(V e, const K(quadratic) *q)
{
    const V none = {0};
    const V value = V_(select)(e == 1, q->at_one, e * V_(fma)(e, q->second, q->first));
    return V_(select)(K(quadratic_is_zero)(q), none, value);
}

/* Return elements of the product of the Hessian and a vector v. */
AG_INLINE V K(product_value)(V e, V v, const K(quadratic) *q)
{
    const V none = {0}, sum = q->others + q->at_max;
    /* If a row has one maximum, at_max is v there, and the difference is 0. */
    const V largest = V_(fma)(q->at_one, v, q->second * (q->others + (q->at_max - v)));
    const V value = V_(select)(e == 1, largest, e * V_(fma)(q->first, v, q->second * sum));
    return V_(select)(K(quadratic_is_zero)(q), none, value);
}

/* Return whether rows of a matrix with this pitch follow one another in memory, without a gap. */
AG_INLINE int K(quadratic_is_packed)(const ag_tile *tile, const ptrdiff_t *numbers, ptrdiff_t pitch)
{
    if (pitch != tile->n * AG_SIZE) return 0;
    for (ptrdiff_t r = 1; r < tile->rows; r++) {
        if (numbers[r] != numbers[0] + r) return 0;
    }
    return 1;
}

/* Return whether results are computed over the flat elements of narrow packed rows. */
AG_INLINE int K(quadratic_is_flat)(const ag_tile *tile, const ag_loss_rows *rows, const ag_loss_quadratic *q)
{
    if (!K(loss_is_narrow)(tile) || (rows->cached && !K(loss_is_flat)(tile, rows))) return 0;
    if (q->vector && (q->cap > 0 || q->vector_pitch != q->pitch)) return 0;
    return K(quadratic_is_packed)(tile, q->numbers, q->pitch);
}

/* Write the results of narrow packed rows over their flat elements. `cached` has their flat exponentials, or is NULL. */
AG_NOINLINE void K(quadratic_flat)(const ag_tile *tile, const ag_loss_rows *rows, const ag_loss_quadratic *q,
                                   const compute_t *cached)
{
    enum { FIRST, SECOND, AT_ONE, OTHERS, AT_MAX, SHIFT, SCALE, COUNT };
    compute_t numbers[COUNT][K(LOSS_PADDED)] __attribute__((aligned(64))), each[K(LOSS_CAPACITY)];
    const double *sources[COUNT] = {q->first, q->second, q->at_one, q->others, q->at_max, rows->max, rows->scale};
    const ptrdiff_t n = tile->n, block = K(LOSS_CAPACITY) / n / VL * VL;
    for (ptrdiff_t row = 0; row < tile->rows; row += block) {
        const ptrdiff_t some = tile->rows - row < block ? tile->rows - row : block, count = some * n;
        char *to = q->to + q->numbers[row] * q->pitch;
        const char *vector = q->vector ? q->vector + q->numbers[row] * q->pitch : NULL;
        for (int j = 0; j < (cached ? SHIFT : COUNT); j++) {
            if (!vector && (j == OTHERS || j == AT_MAX)) continue;
            for (ptrdiff_t r = 0; r < some; r++) each[r] = sources[j] ? (compute_t)sources[j][row + r] : 0;
            K_COMPUTE(broadcast)(each, some, n, numbers[j]);
        }
        for (ptrdiff_t i = 0; i < count; i += VL) {
            K(quadratic) numbers_v = {V_(load)(numbers[FIRST] + i), V_(load)(numbers[SECOND] + i),
                                      V_(load)(numbers[AT_ONE] + i), {0}, {0}};
            V e, value;
            if (cached) {
                e = V_(load)(cached + row * n + i);
            } else {
                const V x = K(loss_load_flat)(tile->a + row * tile->a_stride, i, count);
                e = V_(exp)((x - V_(load)(numbers[SHIFT] + i)) * V_(load)(numbers[SCALE] + i));
            }
            if (vector) {
                numbers_v.others = V_(load)(numbers[OTHERS] + i), numbers_v.at_max = V_(load)(numbers[AT_MAX] + i);
                value = K(product_value)(e, K(loss_load_flat)(vector, i, count), &numbers_v);
            } else {
                value = K(quadratic_value)(e, &numbers_v);
            }
            if (i + VL <= count) AG_STORE(to + i * AG_SIZE, value);
            else AG_STORE_PARTIAL(to + i * AG_SIZE, value, count - i);
        }
    }
}

/* Load `left` elements, but at most a vector, if `is_partial`; otherwise a whole vector. */
AG_INLINE V K(quadratic_load)(const int is_partial, const char *p, ptrdiff_t left)
{
    return is_partial ? AG_LOAD_PARTIAL(p, left) : AG_LOAD(p);
}

/* The addresses of a row's logits, vector and exponentials, and the numbers of the row in all lanes. */
typedef struct {
    const char *a, *vector;
    const compute_t *cached; /* exponentials of the row */
    V max, scale, cap;
} K(quadratic_row);

/* Return the exponentials of elements from i on. */
AG_INLINE V K(exp_of_row)(const int is_cached, const int is_partial, const K(quadratic_row) *row, ptrdiff_t i, ptrdiff_t left)
{
    if (is_cached) return V_(load)(row->cached + i); /* there is memory for a vector beyond the row */
    return V_(exp)((K(quadratic_load)(is_partial, row->a + i * AG_SIZE, left) - row->max) * row->scale);
}

/* Return elements of the vector from i on, with the derivative of the softcap as a factor if there is one. */
AG_INLINE V K(vector_of_row)(const int has_cap, const int is_partial, const K(quadratic_row) *row, ptrdiff_t i, ptrdiff_t left)
{
    const V v = K(quadratic_load)(is_partial, row->vector + i * AG_SIZE, left);
    if (!has_cap) return v;
    const V value = K(quadratic_load)(is_partial, row->a + i * AG_SIZE, left) / row->cap;
    return v * (1 - value * value);
}

AG_INLINE K(quadratic_row) K(quadratic_row_of)(const ag_tile *tile, const ag_loss_rows *rows, const ag_loss_quadratic *q,
                                               int is_flat, ptrdiff_t r)
{
    return (K(quadratic_row)){.a = tile->a + r * tile->a_stride,
                              .vector = q->vector ? q->vector + q->numbers[r] * q->vector_pitch : NULL,
                              .cached = rows->cached && !is_flat ? (const compute_t *)rows->cached + r * rows->pitch : NULL,
                              .max = V_(set1)((compute_t)rows->max[r]),
                              .scale = V_(set1)((compute_t)rows->scale[r]),
                              .cap = V_(set1)((compute_t)q->cap)};
}

AG_INLINE V K(quadratic_result)(const int is_cached, const int has_vector, const int has_cap, const int is_partial,
                                const K(quadratic_row) *row, const K(quadratic) *numbers, ptrdiff_t i, ptrdiff_t left)
{
    const V e = K(exp_of_row)(is_cached, is_partial, row, i, left);
    if (!has_vector) return K(quadratic_value)(e, numbers);
    return K(product_value)(e, K(vector_of_row)(has_cap, is_partial, row, i, left), numbers);
}

AG_INLINE void K(quadratic_write)(const int is_cached, const int has_vector, const int has_cap, const K(quadratic_row) *row,
                                  const K(quadratic) *numbers, char *to, ptrdiff_t n)
{
    ptrdiff_t i = 0;
    for (; i + VL <= n; i += VL) {
        AG_STORE(to + i * AG_SIZE, K(quadratic_result)(is_cached, has_vector, has_cap, 0, row, numbers, i, VL));
    }
    if (i < n) {
        AG_STORE_PARTIAL(to + i * AG_SIZE, K(quadratic_result)(is_cached, has_vector, has_cap, 1, row, numbers, i, n - i), n - i);
    }
}

static void K(loss_rows_quadratic)(const ag_tile *tile, const ag_loss_rows *rows, const ag_loss_quadratic *q)
{
    const int is_flat = K(loss_is_flat)(tile, rows);
    if (K(quadratic_is_flat)(tile, rows, q)) {
        K(quadratic_flat)(tile, rows, q, is_flat ? (const compute_t *)rows->cached : NULL);
        return;
    }
    for (ptrdiff_t r = 0; r < tile->rows; r++) {
        const K(quadratic_row) row = K(quadratic_row_of)(tile, rows, q, is_flat, r);
        const int has_vector = row.vector != NULL;
        char *to = q->to + q->numbers[r] * q->pitch;
        const K(quadratic) numbers = {V_(set1)((compute_t)q->first[r]),
                                      V_(set1)(q->second ? (compute_t)q->second[r] : (compute_t)0),
                                      V_(set1)((compute_t)q->at_one[r]),
                                      V_(set1)(has_vector ? (compute_t)q->others[r] : (compute_t)0),
                                      V_(set1)(has_vector ? (compute_t)q->at_max[r] : (compute_t)0)};
        if (row.cached && has_vector && q->cap == 0) K(quadratic_write)(1, 1, 0, &row, &numbers, to, tile->n);
        else if (row.cached && has_vector) K(quadratic_write)(1, 1, 1, &row, &numbers, to, tile->n);
        else if (row.cached) K(quadratic_write)(1, 0, 0, &row, &numbers, to, tile->n);
        else if (has_vector) K(quadratic_write)(0, 1, q->cap != 0, &row, &numbers, to, tile->n);
        else K(quadratic_write)(0, 0, 0, &row, &numbers, to, tile->n);
    }
}

/* ---- sums of exponentials times vectors -------------------------------------------------------------------------- */

/* Add products of exponentials and elements of a vector to the sum where the exponential is 1, and to the other one. */
AG_INLINE void K(add_product)(V *partial, V e, V v)
{
    const V none = {0};
    partial[0] += V_(select)(e == 1, none, e * v);
    partial[1] += V_(select)(e == 1, v, none);
}

/* Sum up one segment of a row, elements begin to `end`, in the order that rowwise.h defines. */
AG_INLINE void K(product_segment)(const int is_cached, const int has_cap, const K(quadratic_row) *row, ptrdiff_t begin,
                                  ptrdiff_t end, double *sums)
{
    const V none = {0};
    K(lane_sums) lanes[2] = {0};
    for (ptrdiff_t i = begin; i < end;) {
        const ptrdiff_t last = i + AG_SUM_BLOCK <= end ? i + AG_SUM_BLOCK : end;
        V partial[2] = {none};
        for (; i + VL <= last; i += VL) {
            K(add_product)(partial, K(exp_of_row)(is_cached, 0, row, i, VL), K(vector_of_row)(has_cap, 0, row, i, VL));
        }
        if (i < last) {
            const V e = K(exp_of_row)(is_cached, 1, row, i, last - i);
            K(add_product)(partial, V_(first)(last - i, e, none), K(vector_of_row)(has_cap, 1, row, i, last - i));
            i = last;
        }
        for (int j = 0; j < 2; j++) K(fold)(&lanes[j], partial[j]);
    }
    for (int j = 0; j < 2; j++) sums[j] = K(reduce)(&lanes[j]);
}

/* Sum up narrow packed rows over their flat elements. */
AG_NOINLINE void K(product_flat)(const ag_tile *tile, const ag_loss_rows *rows, const ag_loss_quadratic *q,
                                 const compute_t *cached, double *results[2])
{
    compute_t terms[2][K(LOSS_PADDED)] __attribute__((aligned(64)));
    compute_t numbers[2][K(LOSS_PADDED)] __attribute__((aligned(64))), each[K(LOSS_CAPACITY)];
    const double *sources[2] = {rows->max, rows->scale};
    const ptrdiff_t n = tile->n, block = K(LOSS_CAPACITY) / n / VL * VL;
    for (ptrdiff_t row = 0; row < tile->rows; row += block) {
        const ptrdiff_t some = tile->rows - row < block ? tile->rows - row : block, count = some * n;
        const char *vector = q->vector + q->numbers[row] * q->vector_pitch;
        for (int j = 0; j < 2 && !cached; j++) {
            for (ptrdiff_t r = 0; r < some; r++) each[r] = (compute_t)sources[j][row + r];
            K_COMPUTE(broadcast)(each, some, n, numbers[j]);
        }
        for (ptrdiff_t i = 0; i < count; i += VL) {
            V e, added[2] = {{0}};
            if (cached) {
                e = V_(load)(cached + row * n + i);
            } else {
                const V x = K(loss_load_flat)(tile->a + row * tile->a_stride, i, count);
                e = V_(exp)((x - V_(load)(numbers[0] + i)) * V_(load)(numbers[1] + i));
            }
            K(add_product)(added, e, K(loss_load_flat)(vector, i, count));
            for (int j = 0; j < 2; j++) V_(store)(terms[j] + i, added[j]);
        }
        for (int j = 0; j < 2; j++) K_COMPUTE(narrow_row_sums)(terms[j], some, n, results[j] + row);
    }
}

static void K(loss_rows_products)(const ag_tile *tile, const ag_loss_rows *rows, const ag_loss_quadratic *q, double *others,
                                  double *at_max)
{
    double *results[2] = {others, at_max};
    const int is_flat = K(loss_is_flat)(tile, rows);
    const ptrdiff_t n = tile->n;
    if (K(quadratic_is_flat)(tile, rows, q)) {
        K(product_flat)(tile, rows, q, is_flat ? (const compute_t *)rows->cached : NULL, results);
        return;
    }
    for (ptrdiff_t r = 0; r < tile->rows; r++) {
        const K(quadratic_row) row = K(quadratic_row_of)(tile, rows, q, is_flat, r);
        ag_sum totals[2] = {{0}};
        double sums[2] = {0};
        for (ptrdiff_t i = 0; i < n; i += AG_SEGMENT(VL)) {
            const ptrdiff_t end = n - i < AG_SEGMENT(VL) ? n : i + AG_SEGMENT(VL);
            if (row.cached && q->cap == 0) K(product_segment)(1, 0, &row, i, end, sums);
            else if (row.cached) K(product_segment)(1, 1, &row, i, end, sums);
            else K(product_segment)(0, q->cap != 0, &row, i, end, sums);
            for (int j = 0; n > AG_SEGMENT(VL) && j < 2; j++) ag_sum_add(&totals[j], sums[j]);
        }
        for (int j = 0; j < 2; j++) results[j][r] = n > AG_SEGMENT(VL) ? ag_sum_total(totals[j]) : sums[j] + 0.0;
    }
}
