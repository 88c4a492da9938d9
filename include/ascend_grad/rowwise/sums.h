/* Loops over consecutive elements of a row: the largest logit, the sum of a segment, results. Body header, included by
 * kernels.h. */

/* The accumulators of a segment: one float64 per lane. */
typedef struct {
    f64v low;
#if !AG_IS_F64
    f64v high;
#endif
} K(lane_sums);

AG_INLINE void K(fold)(K(lane_sums) *sums, V partial)
{
#if AG_IS_F64
    sums->low += partial;
#else
    f64v low, high;
    v_f32_widen(partial, &low, &high);
    sums->low += low;
    sums->high += high;
#endif
}

AG_INLINE void K(add_lanes)(K(lane_sums) *sums, const K(lane_sums) *others)
{
    sums->low += others->low;
#if !AG_IS_F64
    sums->high += others->high;
#endif
}

/* Return the lanes as sums of rows, with -0 replaced by +0 and every NaN by one NaN. */
AG_INLINE K(lane_sums) K(canonical)(const K(lane_sums) *sums)
{
    const f64v nan = v_f64_set1(NAN);
    K(lane_sums) totals = *sums;
    totals.low = v_f64_select(totals.low == totals.low, totals.low + 0.0, nan);
#if !AG_IS_F64
    totals.high = v_f64_select(totals.high == totals.high, totals.high + 0.0, nan);
#endif
    return totals;
}

AG_INLINE V K(to_compute_type)(const K(lane_sums) *sums)
{
#if AG_IS_F64
    return sums->low;
#else
    return v_f32_narrow(sums->low, sums->high);
#endif
}

AG_INLINE double K(reduce)(const K(lane_sums) *sums)
{
#if AG_IS_F64
    return v_f64_reduce_sum(sums->low);
#else
    return v_f64_reduce_sum(sums->low + sums->high);
#endif
}

/* Prefetch `count` elements of the next rows from index i on into L2, so that memory is read while results are computed
 * from cached rows. */
AG_INLINE void K(prefetch_next_rows)(const int op, const ag_prefetch *prefetch, ptrdiff_t i, ptrdiff_t count)
{
    for (ptrdiff_t byte = i * AG_SIZE; byte < (i + count) * AG_SIZE; byte += 64) {
        if (prefetch->a) __builtin_prefetch(prefetch->a + byte, 0, 2);
        if (prefetch->a && ag_reads_b(op)) __builtin_prefetch(prefetch->b + byte, 0, 2);
        if (prefetch->out) __builtin_prefetch(prefetch->out + byte, 1, 2);
    }
}

/* Return the maximum of the logits of n elements, ignoring NaN. */
AG_INLINE compute_t K(max_logit)(const int op, const char *a, const uint8_t *mask, ptrdiff_t n, V scale)
{
    const V lowest = V_(set1)((compute_t)-INFINITY);
    V best[4] = {lowest, lowest, lowest, lowest};
    ptrdiff_t i = 0;
    for (; i + 4 * VL <= n; i += 4 * VL) {
        AG_UNROLL(4)
        for (int j = 0; j < 4; j++) {
            best[j] = V_(max)(K(logit)(op, AG_LOAD(a + (i + j * VL) * AG_SIZE),
                                       K(get_mask)(ag_masks_sum(op), mask, i + j * VL), scale), best[j]);
        }
    }
    for (; i + VL <= n; i += VL) {
        const V x = K(logit)(op, AG_LOAD(a + i * AG_SIZE), K(get_mask)(ag_masks_sum(op), mask, i), scale);
        best[0] = V_(max)(x, best[0]);
    }
    if (i < n) {
        const V x = K(logit)(op, AG_LOAD_PARTIAL(a + i * AG_SIZE, n - i),
                             K(get_mask_partial)(ag_masks_sum(op), mask, i, n - i), scale);
        best[1] = V_(max)(V_(first)(n - i, x, lowest), best[1]);
    }
    return V_(reduce_max)(V_(max)(V_(max)(best[0], best[1]), V_(max)(best[2], best[3])));
}

/* Return the term, and store it at index i of `cached` unless that is NULL. */
AG_INLINE V K(cache_term)(V term, compute_t *cached, ptrdiff_t i)
{
    if (cached) V_(store)(cached + i, term);
    return term;
}

/* Sum the terms of one segment, n <= AG_SEGMENT(VL), in the order that rowwise.h defines. */
AG_INLINE double K(segment_sum)(const int op, const char *a, const char *b, const uint8_t *mask, ptrdiff_t n, V scale,
                                V max, compute_t *cached)
{
#define AG_TERM(i) K(cache_term)(K(term_at)(op, a, b, mask, i, scale, max), cached, i)
    K(lane_sums) sums = {0};
    ptrdiff_t i = 0;
    for (; i + AG_SUM_BLOCK <= n; i += AG_SUM_BLOCK) {
        V partial = AG_TERM(i);
        if (ag_is_forward(op)) {
            for (int t = 1; t < 16; t++) partial += AG_TERM(i + t * VL);
        } else {
            AG_UNROLL(15)
            for (int t = 1; t < 16; t++) partial += AG_TERM(i + t * VL);
        }
        K(fold)(&sums, partial);
    }
    if (i < n) {
        V partial = {0};
        for (; i + VL <= n; i += VL) partial += AG_TERM(i);
        if (i < n) partial += K(cache_term)(K(term_at_partial)(op, a, b, mask, i, n - i, scale, max), cached, i);
        K(fold)(&sums, partial);
    }
    return K(reduce)(&sums);
#undef AG_TERM
}

/* Write the results of n elements. `shift` and `factor` have one value each, or (if `varying`) one for each element.
 * `cached`, if not NULL, holds the exponentials of a softmax. */
AG_INLINE void K(write_results)(const int op, const int varying, const char *a, const char *b, const uint8_t *mask,
                                char *out, ptrdiff_t n, V scale, const compute_t *shift, const compute_t *factor,
                                const compute_t *cached, int nontemporal, const ag_prefetch *prefetch)
{
    const int has_b = ag_reads_b(op), masked = ag_is_masked(op), forward = ag_is_forward(op);
    const V none = {0};
    const V shift0 = varying ? none : V_(set1)(*shift), factor0 = varying || !forward ? none : V_(set1)(*factor);
#define AG_SHIFT(i) (varying ? V_(load)(shift + (i)) : shift0)
#define AG_FACTOR(i) (varying && forward ? V_(load)(factor + (i)) : factor0)
#define AG_VALUE(i)                                                                                                    \
    (cached ? K(forward_value)(op, V_(load)(cached + (i)), AG_FACTOR(i))                                               \
          : K(value)(op, AG_LOAD(a + (i) * AG_SIZE), K(get)(has_b, b, i), K(get_mask)(masked, mask, i), scale,         \
                     AG_SHIFT(i), AG_FACTOR(i)))
/* Write two vectors of results. The order of their elements does not matter (AG_LOAD_TWO) unless shift, factor, mask or
 * `cached` differ between elements. */
#define AG_WRITE_TWO(i, put, put_two)                                                                                  \
    do {                                                                                                               \
        if (varying || masked || cached) {                                                                             \
            put(out + (i) * AG_SIZE, AG_VALUE(i));                                                                     \
            put(out + ((i) + VL) * AG_SIZE, AG_VALUE((i) + VL));                                                       \
        } else {                                                                                                       \
            V a0, a1, b0 = none, b1 = none;                                                                            \
            AG_LOAD_TWO(a + (i) * AG_SIZE, &a0, &a1);                                                                  \
            if (has_b) AG_LOAD_TWO(b + (i) * AG_SIZE, &b0, &b1);                                                       \
            put_two(out + (i) * AG_SIZE, K(value)(op, a0, b0, (MASKV){0}, scale, shift0, factor0),                     \
                    K(value)(op, a1, b1, (MASKV){0}, scale, shift0, factor0));                                         \
        }                                                                                                              \
    } while (0)
#define AG_WRITE_PARTIAL(i, count)                                                                                     \
    do {                                                                                                               \
        const V shift_ = varying ? V_(load_partial)(shift + (i), count) : shift0;                                      \
        const V factor_ = varying && forward ? V_(load_partial)(factor + (i), count) : factor0;                        \
        AG_STORE_PARTIAL(out + (i) * AG_SIZE,                                                                          \
                         cached ? K(forward_value)(op, V_(load_partial)(cached + (i), count), factor_)                 \
                              : K(value)(op, AG_LOAD_PARTIAL(a + (i) * AG_SIZE, count),                                \
                                         K(get_partial)(has_b, b, i, count),                                           \
                                         K(get_mask_partial)(masked, mask, i, count), scale, shift_, factor_),         \
                         count);                                                                                       \
    } while (0)
#define AG_AFTER_LINES(i)                                                                                              \
    if (prefetch) K(prefetch_next_rows)(op, prefetch, i, AG_LINES)
#define AG_AFTER_VECTORS(i)                                                                                            \
    if (varying && prefetch) K(prefetch_next_rows)(op, prefetch, i, 4 * VL)
#include "write_row.h"
#undef AG_SHIFT
#undef AG_FACTOR
}
