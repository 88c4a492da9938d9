/* Kernels of the cross-entropy: maxima and sums of rows or columns, and gradients. Body header, included by kernels.h.
 *
 * The schedule calls them one after another for a block of rows that fits the cache. Between the sums and the gradients it
 * computes the losses, and the factors of the exponentials.
 */

/* Return the numbers of row r. The numbers of its nearly certain entry are 0 unless they are known (`with_certain`). */
AG_INLINE K(dense_row) K(dense_row_of)(const ag_loss_rows *rows, int with_certain, ptrdiff_t r)
{
    return (K(dense_row)){V_(set1)((compute_t)rows->kept), V_(set1)((compute_t)rows->share),
                          V_(set1)(with_certain ? (compute_t)rows->certain[r] : 0),
                          V_(set1)(with_certain ? (compute_t)rows->at_certain[r] : 0)};
}

/* ---- narrow packed rows ------------------------------------------------------------------------------------------ */

/* As in narrow.h, the arithmetic runs over the flat elements of a block of rows. */
enum { K(LOSS_CAPACITY) = AG_IS_F64 ? 512 : 1024, K(LOSS_PADDED) = K(LOSS_CAPACITY) + AG_LANES };

AG_INLINE int K(loss_is_narrow)(const ag_tile *tile)
{
    return tile->n <= AG_MAX_NARROW_ROW && tile->n % VL && tile->rows > 1 && tile->a_stride == tile->n * AG_SIZE;
}

/* Return whether sums and results of rows are computed over flat elements, and the cached exponentials are flat. */
AG_INLINE int K(loss_is_flat)(const ag_tile *tile, const ag_loss_rows *rows)
{
    return rows->is_uniform && !rows->class_weight && K(loss_is_narrow)(tile) && tile->out_stride == tile->a_stride &&
           (!rows->is_dense || tile->b_stride == tile->a_stride);
}

AG_INLINE V K(loss_load_flat)(const char *a, ptrdiff_t i, ptrdiff_t count)
{
    return i + VL <= count ? AG_LOAD(a + i * AG_SIZE) : AG_LOAD_PARTIAL(a + i * AG_SIZE, count - i);
}

AG_NOINLINE void K(loss_flat_max)(const ag_tile *tile, double *max)
{
    compute_t logits[K(LOSS_PADDED)] __attribute__((aligned(64))), each[K(LOSS_CAPACITY)];
    const ptrdiff_t n = tile->n, block = K(LOSS_CAPACITY) / n / VL * VL;
    for (ptrdiff_t row = 0; row < tile->rows; row += block) {
        const ptrdiff_t rows = tile->rows - row < block ? tile->rows - row : block, count = rows * n;
        for (ptrdiff_t i = 0; i < count; i += VL) {
            V_(store)(logits + i, K(loss_load_flat)(tile->a + row * tile->a_stride, i, count));
        }
        K_COMPUTE(narrow_row_maxima)(logits, rows, n, each);
        for (ptrdiff_t r = 0; r < rows; r++) max[row + r] = each[r];
    }
}

AG_NOINLINE void K(loss_flat_sum)(const ag_tile *tile, const ag_loss_rows *parameters, double *sums)
{
    compute_t terms[K(LOSS_PADDED)] __attribute__((aligned(64))), shift[K(LOSS_PADDED)] __attribute__((aligned(64)));
    compute_t each[K(LOSS_CAPACITY)];
    const V scale = V_(set1)((compute_t)tile->scale);
    const ptrdiff_t n = tile->n, block = K(LOSS_CAPACITY) / n / VL * VL;
    for (ptrdiff_t row = 0; row < tile->rows; row += block) {
        const ptrdiff_t rows = tile->rows - row < block ? tile->rows - row : block, count = rows * n;
        compute_t *to = parameters->cached ? (compute_t *)parameters->cached + row * n : terms;
        for (ptrdiff_t r = 0; r < rows; r++) each[r] = (compute_t)parameters->max[row + r];
        K_COMPUTE(broadcast)(each, rows, n, shift);
        for (ptrdiff_t i = 0; i < count; i += VL) {
            const V x = K(loss_load_flat)(tile->a + row * tile->a_stride, i, count);
            V_(store)(to + i, V_(exp)((x - V_(load)(shift + i)) * scale));
        }
        K_COMPUTE(narrow_row_sums)(to, rows, n, sums + row);
    }
}

AG_NOINLINE void K(loss_flat_write)(const ag_tile *tile, const ag_loss_rows *parameters)
{
    compute_t factor[K(LOSS_PADDED)] __attribute__((aligned(64))), smoothing[K(LOSS_PADDED)] __attribute__((aligned(64)));
    compute_t each[K(LOSS_CAPACITY)];
    const int is_dense = parameters->is_dense;
    const K(dense_row) dense = K(dense_row_of)(parameters, 0, 0);
    const ptrdiff_t n = tile->n, block = K(LOSS_CAPACITY) / n / VL * VL;
    for (ptrdiff_t row = 0; row < tile->rows; row += block) {
        const ptrdiff_t rows = tile->rows - row < block ? tile->rows - row : block, count = rows * n;
        const compute_t *cached = (const compute_t *)parameters->cached + row * n;
        char *out = tile->out + row * tile->out_stride;
        for (ptrdiff_t r = 0; r < rows; r++) each[r] = (compute_t)parameters->factor[row + r];
        K_COMPUTE(broadcast)(each, rows, n, factor);
        if (parameters->is_smoothed) {
            for (ptrdiff_t r = 0; r < rows; r++) each[r] = (compute_t)parameters->smoothing[row + r];
            K_COMPUTE(broadcast)(each, rows, n, smoothing);
        }
        for (ptrdiff_t i = 0; i < count; i += VL) {
            const V e = V_(load)(cached + i), factor_v = V_(load)(factor + i);
            V value = e * factor_v;
            MASKV is_zero = factor_v == 0;
            if (parameters->is_smoothed) {
                const V smoothing_v = V_(load)(smoothing + i);
                const V prob = is_dense ? K(loss_load_flat)(tile->b + row * tile->b_stride, i, count) : (V){0};
                value = V_(fma)(e, factor_v, is_dense ? -(smoothing_v * K(dense_weight)(prob, prob, 0, &dense)) : -smoothing_v);
                is_zero &= smoothing_v == 0;
            }
            value = V_(select)(is_zero, (V){0}, value);
            if (i + VL <= count) AG_STORE(out + i * AG_SIZE, value);
            else AG_STORE_PARTIAL(out + i * AG_SIZE, value, count - i);
        }
        for (ptrdiff_t r = 0; is_dense && r < rows; r++) {
            const V at_certain = V_(set1)((compute_t)parameters->at_certain[row + r]);
            const int is_zero = factor[r * n] == 0 && smoothing[r * n] == 0;
            for (ptrdiff_t k = r * n; parameters->certain[row + r] == 1 && !is_zero && k < (r + 1) * n; k++) {
                if (cached[k] == 1) AG_STORE_PARTIAL(out + k * AG_SIZE, at_certain, 1);
            }
        }
    }
}

/* ---- sums of rows ------------------------------------------------------------------------------------------------ */

static void K(loss_rows_max)(const ag_tile *tile, double *max)
{
    const V none = {0};
    if (K(loss_is_narrow)(tile)) {
        K(loss_flat_max)(tile, max);
        return;
    }
    const ptrdiff_t in_fours = tile->n <= AG_SUM_BLOCK / 2 ? tile->rows / 4 * 4 : 0;
    for (ptrdiff_t r = 0; r < in_fours; r += 4) {
        const ag_tile four = K(row_range)(tile, r, 4);
        compute_t maxima[4];
        K(four_maxima)(AG_LOSS_EXP, &four, none, maxima);
        for (int j = 0; j < 4; j++) max[r + j] = maxima[j];
    }
    for (ptrdiff_t r = in_fours; r < tile->rows; r++) {
        max[r] = K(max_logit)(AG_LOSS_EXP, tile->a + r * tile->a_stride, tile->mask, tile->n, none);
    }
}

/* Sum up the terms of one row. Class weights have the compute type, so segments begin at another offset than in row_sum. */
AG_INLINE double K(loss_row_sum)(const int sum, const char *a, const compute_t *weight, ptrdiff_t n, V scale, compute_t max,
                                 compute_t *cached)
{
    const V max_v = V_(set1)(max);
    if (n <= AG_SEGMENT(VL)) {
        return K(segment_sum)(sum, a, (const char *)weight, NULL, n, scale, max_v, cached) + 0.0;
    }
    ag_sum total = {0.0, 0.0};
    for (ptrdiff_t i = 0; i < n; i += AG_SEGMENT(VL)) {
        const ptrdiff_t length = n - i < AG_SEGMENT(VL) ? n - i : AG_SEGMENT(VL);
        ag_sum_add(&total, K(segment_sum)(sum, a + i * AG_SIZE, (const char *)(weight ? weight + i : weight), NULL, length,
                                          scale, max_v, cached ? cached + i : NULL));
    }
    return ag_sum_total(total);
}

AG_INLINE void K(loss_sum)(const int sum, const ag_tile *tile, const ag_loss_rows *rows, double *sums)
{
    const ptrdiff_t n = tile->n;
    const int caches = sum == AG_LOSS_EXP && rows->cached;
    for (ptrdiff_t r = 0; r < tile->rows;) {
        compute_t *cached = caches ? (compute_t *)rows->cached + r * rows->pitch : NULL;
        const double scale = rows->scale[r];
        if (sum == AG_LOSS_EXP && n <= AG_SUM_BLOCK / 2 && r + 4 <= tile->rows && rows->scale[r + 1] == scale &&
            rows->scale[r + 2] == scale && rows->scale[r + 3] == scale) {
            const ag_tile four = K(row_range)(tile, r, 4);
            compute_t max[4];
            for (int j = 0; j < 4; j++) max[j] = (compute_t)rows->max[r + j];
            K(four_sums)(sum, &four, V_(set1)((compute_t)scale), max, cached, rows->pitch, sums + r);
            for (int j = 0; j < 4; j++, r++) sums[r] = ag_canonical_nan(sums[r]);
            continue;
        }
        sums[r] = 1;
        if (scale > 0) {
            sums[r] = ag_canonical_nan(
                K(loss_row_sum)(sum, tile->a + r * tile->a_stride, (const compute_t *)rows->class_weight, n,
                                V_(set1)((compute_t)scale), (compute_t)rows->max[r], cached));
        }
        r++;
    }
}

static void K(loss_rows_sum)(const ag_tile *tile, ag_row_op sum, const ag_loss_rows *rows, double *sums)
{
    switch (sum) {
    case AG_LOSS_REST:
        K(loss_sum)(AG_LOSS_REST, tile, rows, sums);
        break;
    case AG_LOSS_MOMENT:
        K(loss_sum)(AG_LOSS_MOMENT, tile, rows, sums);
        break;
    case AG_LOSS_DEFICIT:
        K(loss_sum)(AG_LOSS_DEFICIT, tile, rows, sums);
        break;
    case AG_LOSS_WEIGHTED_DEFICIT:
        K(loss_sum)(AG_LOSS_WEIGHTED_DEFICIT, tile, rows, sums);
        break;
    default:
        if (K(loss_is_flat)(tile, rows)) {
            K(loss_flat_sum)(tile, rows, sums);
        } else {
            K(loss_sum)(AG_LOSS_EXP, tile, rows, sums);
        }
    }
}

/* ---- predicted entries ------------------------------------------------------------------------------------------- */

static ptrdiff_t K(loss_find)(const char *a, ptrdiff_t n, double value)
{
    enum { STEP = 8 };
    const compute_t wanted = (compute_t)value;
    const V wanted_v = V_(set1)(wanted);
    compute_t x[VL];
    ptrdiff_t i = 0;
    /* Skip vectors without the value, several at a time. */
    for (; i + STEP * VL <= n; i += STEP * VL) {
        MASKV found = {0};
        AG_UNROLL(8)
        for (int j = 0; j < STEP; j++) {
            const V v = AG_LOAD(a + (i + j * VL) * AG_SIZE);
            found |= value == value ? v == wanted_v : v != v;
        }
        int any = 0;
        for (int j = 0; j < VL; j++) any |= found[j] != 0;
        if (any) break;
    }
    for (; i < n; i += VL) {
        const ptrdiff_t count = n - i < VL ? n - i : VL;
        V_(store)(x, count < VL ? AG_LOAD_PARTIAL(a + i * AG_SIZE, count) : AG_LOAD(a + i * AG_SIZE));
        for (ptrdiff_t j = 0; j < count; j++) {
            if (value == value ? x[j] == wanted : x[j] != x[j]) return i + j;
        }
    }
    return n;
}

/* ---- gradients of rows ------------------------------------------------------------------------------------------- */

/* The numbers of one row, in all lanes. */
typedef struct {
    V max, scale, factor, smoothing, slope;
} K(loss_row);

/* The terms of a result: smoothing without and with class weights, and with both the gradient of the entropy. */
enum { K(UNSMOOTHED), K(SMOOTHED), K(WEIGHTED), K(SLOPED) };

/* Return the gradient from an exponential and its exponent. SLOPED alone reads the exponent, and a weight of 1 for none. */
AG_INLINE V K(loss_gradient)(const int kind, V exponential, V exponent, V weight, const K(loss_row) *row)
{
    if (kind == K(UNSMOOTHED)) return exponential * row->factor;
    if (kind == K(SLOPED)) {
        const V value = exponential * V_(fma)(row->slope, exponent, row->factor);
        return V_(select)(exponential == 0, (V){0}, value) - row->smoothing * weight; /* an exponent may be infinite */
    }
    return V_(fma)(exponential, row->factor, kind == K(WEIGHTED) ? -(row->smoothing * weight) : -row->smoothing);
}

/* Return the factors of `smoothing` of `count` elements, at most VL, from index i on. */
AG_INLINE V K(loss_weight)(const int is_dense, V prob, const compute_t *weight, ptrdiff_t i, ptrdiff_t count,
                           const K(dense_row) *dense)
{
    const V one = V_(set1)((compute_t)1);
    const V w = !weight ? one : count < VL ? V_(load_partial)(weight + i, count) : V_(load)(weight + i);
    return is_dense ? K(dense_weight)(prob, w, weight != NULL, dense) : w;
}

/* Return the result, which is another one at a nearly certain entry of dense targets. */
AG_INLINE V K(loss_result)(const int is_dense, V exponential, V gradient, const K(dense_row) *dense)
{
    return is_dense ? V_(select)(exponential == dense->certain, dense->at_certain, gradient) : gradient;
}

AG_INLINE void K(loss_write_row)(const int kind, const int is_dense, const int is_cached, const char *a, const char *prob,
                                 const compute_t *class_weight, char *out, ptrdiff_t n, const K(loss_row) *row,
                                 const K(dense_row) *dense, const compute_t *cached, int nontemporal, const char *next)
{
    const V none = {0};
    const compute_t *weight = kind == K(WEIGHTED) || kind == K(SLOPED) ? class_weight : NULL;
#define AG_PROB(i) (is_dense ? AG_LOAD(prob + (i) * AG_SIZE) : none)
#define AG_OF_EXPONENTIAL(e, exponent, w) K(loss_result)(is_dense, e, K(loss_gradient)(kind, e, exponent, w, row), dense)
#define AG_GRADIENT(x, w)                                                                                              \
    AG_OF_EXPONENTIAL(V_(exp)(((x) - row->max) * row->scale), ((x) - row->max) * row->scale, w)
#define AG_VALUE(i)                                                                                                    \
    (is_cached ? AG_OF_EXPONENTIAL(V_(load)(cached + (i)), none,                                                       \
                                   K(loss_weight)(is_dense, AG_PROB(i), weight, i, VL, dense))                         \
               : AG_GRADIENT(AG_LOAD(a + (i) * AG_SIZE), K(loss_weight)(is_dense, AG_PROB(i), weight, i, VL, dense)))
/* Write two vectors. The order of their elements does not matter if every element has the same parameters. */
#define AG_WRITE_TWO(i, put, put_two)                                                                                  \
    do {                                                                                                               \
        if (is_cached || weight) {                                                                                     \
            put(out + (i) * AG_SIZE, AG_VALUE(i));                                                                     \
            put(out + ((i) + VL) * AG_SIZE, AG_VALUE((i) + VL));                                                       \
        } else {                                                                                                       \
            V x0, x1, q0 = none, q1 = none;                                                                            \
            AG_LOAD_TWO(a + (i) * AG_SIZE, &x0, &x1);                                                                  \
            if (is_dense) AG_LOAD_TWO(prob + (i) * AG_SIZE, &q0, &q1);                                                 \
            const V w0 = K(loss_weight)(is_dense, q0, NULL, 0, VL, dense);                                             \
            const V w1 = K(loss_weight)(is_dense, q1, NULL, 0, VL, dense);                                             \
            put_two(out + (i) * AG_SIZE, AG_GRADIENT(x0, w0), AG_GRADIENT(x1, w1));                                    \
        }                                                                                                              \
    } while (0)
#define AG_WRITE_PARTIAL(i, count)                                                                                     \
    do {                                                                                                               \
        const V q = is_dense ? AG_LOAD_PARTIAL(prob + (i) * AG_SIZE, count) : none;                                    \
        const V w = K(loss_weight)(is_dense, q, weight, i, count, dense);                                              \
        const V value = is_cached ? AG_OF_EXPONENTIAL(V_(load_partial)(cached + (i), count), none, w)                  \
                                  : AG_GRADIENT(AG_LOAD_PARTIAL(a + (i) * AG_SIZE, count), w);                         \
        AG_STORE_PARTIAL(out + (i) * AG_SIZE, value, count);                                                           \
    } while (0)
#define AG_AFTER_LINES(i)                                                                                              \
    for (ptrdiff_t byte = (i) * AG_SIZE; next && byte < ((i) + AG_LINES) * AG_SIZE; byte += 64)                        \
        __builtin_prefetch(next + byte, 0, 2)
#define AG_AFTER_VECTORS(i)
#include "write_row.h"
#undef AG_PROB
#undef AG_OF_EXPONENTIAL
#undef AG_GRADIENT
}

AG_INLINE void K(loss_write_rows)(const int kind, const int is_dense, const ag_tile *tile, const ag_loss_rows *rows)
{
    for (ptrdiff_t r = 0; r < tile->rows; r++) {
        const char *a = tile->a + r * tile->a_stride, *prob = tile->b + r * tile->b_stride;
        char *out = tile->out + r * tile->out_stride;
        const compute_t *weight = (const compute_t *)rows->class_weight;
        const char *next = rows->next ? rows->next + r * tile->a_stride : NULL;
        const K(loss_row) row = {V_(set1)((compute_t)rows->max[r]), V_(set1)((compute_t)rows->scale[r]),
                                 V_(set1)((compute_t)rows->factor[r]),
                                 V_(set1)(rows->is_smoothed ? (compute_t)rows->smoothing[r] : (compute_t)0),
                                 V_(set1)(kind == K(SLOPED) ? (compute_t)rows->slope[r] : (compute_t)0)};
        const K(dense_row) dense = K(dense_row_of)(rows, is_dense, r);
        if ((compute_t)rows->factor[r] == 0 && (!rows->is_smoothed || (compute_t)rows->smoothing[r] == 0) &&
            (kind != K(SLOPED) || (compute_t)rows->slope[r] == 0)) {
            memset(out, 0, (size_t)(tile->n * AG_SIZE));
        } else if (kind != K(SLOPED) && rows->cached) {
            K(loss_write_row)(kind, is_dense, 1, a, prob, weight, out, tile->n, &row, &dense,
                              (const compute_t *)rows->cached + r * rows->pitch, tile->nontemporal, next);
        } else {
            K(loss_write_row)(kind, is_dense, 0, a, prob, weight, out, tile->n, &row, &dense, NULL, tile->nontemporal, next);
        }
    }
    if (tile->nontemporal) v_fence();
}

static void K(loss_rows_write)(const ag_tile *tile, const ag_loss_rows *rows)
{
    if (rows->is_dense && rows->slope) {
        K(loss_write_rows)(K(SLOPED), 1, tile, rows);
    } else if (rows->slope) {
        K(loss_write_rows)(K(SLOPED), 0, tile, rows);
    } else if (rows->cached && K(loss_is_flat)(tile, rows)) {
        K(loss_flat_write)(tile, rows);
    } else if (rows->is_dense) {
        K(loss_write_rows)(K(WEIGHTED), 1, tile, rows);
    } else if (!rows->is_smoothed) {
        K(loss_write_rows)(K(UNSMOOTHED), 0, tile, rows);
    } else if (!rows->class_weight) {
        K(loss_write_rows)(K(SMOOTHED), 0, tile, rows);
    } else {
        K(loss_write_rows)(K(WEIGHTED), 0, tile, rows);
    }
}

#include "loss_quadratic.h"

/* ---- columns ----------------------------------------------------------------------------------------------------- */

static void K(loss_columns_sum)(const ag_tile *tile, int is_rest, const double *max, double *sums, void *memory)
{
    const K(scratch) s = K(scratch_layout)(memory);
    K(prepare_max)(AG_LOSS_EXP, tile, max, s.max);
    if (is_rest) {
        K(columns_sum)(AG_LOSS_REST, tile, s.max, s.partial, s.sums);
    } else {
        K(columns_sum)(AG_LOSS_EXP, tile, s.max, s.partial, s.sums);
    }
    for (ptrdiff_t c = 0; c < tile->rows; c++) sums[c] = s.sums[c];
}

AG_INLINE void K(loss_strip)(const int vectors, const ag_tile *tile, ptrdiff_t c, ptrdiff_t width, double *max, double *sums)
{
    const char *a = tile->a + c * AG_SIZE;
    const V scale = V_(set1)((compute_t)tile->scale);
    V best[4] = {{0}};
    K(lane_sums) totals[4];
    K(strip_max)(vectors, a, tile->a_stride, tile->n, width, best);
    K(strip_sum)(AG_LOSS_EXP, vectors, tile, a, a, width, scale, best, NULL, NULL, totals, NULL);
    AG_UNROLL(4)
    for (int j = 0; j < vectors; j++) {
        double values[2][VL];
#if AG_IS_F64
        v_f64_store(values[0], best[j]);
        v_f64_store(values[1], totals[j].low);
#else
        f64v low, high;
        v_f32_widen(best[j], &low, &high);
        v_f64_store(values[0], low);
        v_f64_store(values[0] + VL / 2, high);
        v_f64_store(values[1], totals[j].low);
        v_f64_store(values[1] + VL / 2, totals[j].high);
#endif
        const size_t size = sizeof(double) * (size_t)(vectors > 1 ? VL : width);
        memcpy(max + c + j * VL, values[0], size);
        memcpy(sums + c + j * VL, values[1], size);
    }
}

static void K(loss_strips)(const ag_tile *tile, double *max, double *sums)
{
    const ptrdiff_t columns = tile->rows;
    ptrdiff_t c = 0;
    for (; c + 4 * VL <= columns; c += 4 * VL) K(loss_strip)(4, tile, c, VL, max, sums);
    for (; c < columns; c += VL) K(loss_strip)(1, tile, c, columns - c < VL ? columns - c : VL, max, sums);
}

/* Write `count` gradients of one row, or of several packed rows, with parameters for each element. */
AG_INLINE void K(loss_write_columns)(const char *a, char *out, ptrdiff_t count, V scale, const compute_t *max,
                                     const compute_t *factor, int nontemporal)
{
#define AG_GRADIENT(x, max_v, factor_v)                                                                                \
    V_(select)((factor_v) == 0, (V){0}, V_(exp)(((x) - (max_v)) * scale) * (factor_v))
#define AG_VALUE(i) AG_GRADIENT(AG_LOAD(a + (i) * AG_SIZE), V_(load)(max + (i)), V_(load)(factor + (i)))
    ptrdiff_t i = 0;
    const ptrdiff_t before = (ptrdiff_t)(-(uintptr_t)out % 64);
    if (nontemporal && before == 0) {
        for (; i + AG_LINES <= count; i += AG_LINES) {
            AG_UNROLL(4)
            for (int j = 0; j < AG_LINES; j += VL) AG_STORE_NT(out + (i + j) * AG_SIZE, AG_VALUE(i + j));
        }
    }
    for (; i + VL <= count; i += VL) AG_STORE(out + i * AG_SIZE, AG_VALUE(i));
    if (i < count) {
        const V max_v = V_(load_partial)(max + i, count - i), factor_v = V_(load_partial)(factor + i, count - i);
        AG_STORE_PARTIAL(out + i * AG_SIZE, AG_GRADIENT(AG_LOAD_PARTIAL(a + i * AG_SIZE, count - i), max_v, factor_v),
                         count - i);
    }
#undef AG_GRADIENT
#undef AG_VALUE
}

static void K(loss_columns_write)(const ag_tile *tile, const ag_loss_rows *rows, void *memory)
{
    const K(scratch) s = K(scratch_layout)(memory);
    const V scale = V_(set1)((compute_t)tile->scale);
    /* Blocks of short columns may be wider than the buffers. */
    for (ptrdiff_t begin = 0; begin < tile->rows; begin += AG_MAX_COLUMNS) {
        const ptrdiff_t columns = tile->rows - begin < AG_MAX_COLUMNS ? tile->rows - begin : AG_MAX_COLUMNS;
        ptrdiff_t repeats = 1;
        for (ptrdiff_t c = 0; c < columns; c++) {
            s.shift[c] = (compute_t)rows->max[begin + c];
            s.factor[c] = (compute_t)rows->factor[begin + c];
        }
        if (columns <= AG_PACKED_COLUMNS && ag_tile_is_packed(tile, columns * AG_SIZE, 0) &&
            tile->out_stride == columns * AG_SIZE) {
            repeats = AG_MAX_COLUMNS / columns < tile->n ? AG_MAX_COLUMNS / columns : tile->n;
            K(repeat)(s.shift, columns, repeats * columns);
            K(repeat)(s.factor, columns, repeats * columns);
        }
        /* The loop runs backwards, as the rows that the sums read last are still in the cache. */
        for (ptrdiff_t k = (tile->n - 1) / repeats * repeats; k >= 0; k -= repeats) {
            const ptrdiff_t together = tile->n - k < repeats ? tile->n - k : repeats;
            K(loss_write_columns)(tile->a + k * tile->a_stride + begin * AG_SIZE,
                                  tile->out + k * tile->out_stride + begin * AG_SIZE, together * columns, scale, s.shift,
                                  s.factor, tile->nontemporal);
        }
    }
    if (tile->nontemporal) v_fence();
}

/* ---- transformed logits ------------------------------------------------------------------------------------------ */

AG_INLINE void K(loss_store_flat)(char *to, V v, ptrdiff_t left)
{
    if (left >= VL) AG_STORE(to, v);
    else AG_STORE_PARTIAL(to, v, left);
}

static void K(loss_transform)(char *x, ptrdiff_t n, double inner, double cap)
{
    const V inner_v = V_(set1)((compute_t)inner), cap_v = V_(set1)((compute_t)cap);
    for (ptrdiff_t i = 0; i < n; i += VL) {
        const V v = K(loss_load_flat)(x, i, n) * inner_v;
        K(loss_store_flat)(x + i * AG_SIZE, cap > 0 ? V_(tanh)(v) * cap_v : v, n - i);
    }
}

static void K(loss_apply_slopes)(const char *z, char *gradient, ptrdiff_t n, double cap)
{
    const V cap_v = V_(set1)((compute_t)cap), zero = {0};
    for (ptrdiff_t i = 0; i < n; i += VL) {
        const V value = K(loss_load_flat)(z, i, n) / cap_v, g = K(loss_load_flat)(gradient, i, n);
        K(loss_store_flat)(gradient + i * AG_SIZE, V_(select)(g == 0, zero, g * (1 - value * value)), n - i);
    }
}

static void K(loss_apply_curvature)(const char *z, const char *gradient, const char *vector, char *h, ptrdiff_t n, double cap,
                                    double bend)
{
    const V cap_v = V_(set1)((compute_t)cap), bend_v = V_(set1)((compute_t)bend), zero = {0};
    for (ptrdiff_t i = 0; i < n; i += VL) {
        const V value = K(loss_load_flat)(z, i, n) / cap_v, slope = 1 - value * value;
        const V g = K(loss_load_flat)(gradient, i, n), second = K(loss_load_flat)(h, i, n);
        const V other = vector ? K(loss_load_flat)(vector, i, n) : slope;
        const V bent = g * slope * (bend_v * value), curved = second * slope;
        const V all_bent = V_(select)(g == 0, zero, vector ? bent * other : bent);
        K(loss_store_flat)(h + i * AG_SIZE, V_(select)(second == 0, zero, vector ? curved : curved * other) + all_bent, n - i);
    }
}

#include "loss_numbers.h"
#include "loss_targets.h"
#include "loss_dense.h"
#undef AG_FOR_HALVES

static const ag_loss_kernels K(loss_table) AG_UNUSED = {
    .rows_max = K(loss_rows_max),
    .rows_sum = K(loss_rows_sum),
    .rows_dense = K(loss_rows_dense),
    .rows_write = K(loss_rows_write),
    .rows_quadratic = K(loss_rows_quadratic),
    .rows_products = K(loss_rows_products),
    .find = K(loss_find),
    .columns_sum = K(loss_columns_sum),
    .columns_write = K(loss_columns_write),
    .strips = K(loss_strips),
    .log1p = K(loss_log1p),
    .add_numbers = v_f64_add_numbers,
    .target_losses = K(loss_target_losses),
    .target_gradients = K(loss_target_gradients),
    .finish = K(loss_finish),
    .single_target_strips = K(loss_single_target_strips),
    .dense_strip_rows = AG_DENSE_STRIP_ROWS(VL),
    .dense_strips = K(loss_dense_strips),
    .transform = K(loss_transform),
    .apply_slopes = K(loss_apply_slopes),
    .apply_curvature = K(loss_apply_curvature),
};
