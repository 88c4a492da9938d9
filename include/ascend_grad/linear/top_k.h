/* The largest logits of a row: candidates from one range of the vocabulary after another. */
#ifndef ASCEND_GRAD_LINEAR_TOP_K_H
#define ASCEND_GRAD_LINEAR_TOP_K_H

#include <math.h>

#include "../base.h"

enum { AG_TOP_K_STEP = 16 }; /* logits that are compared with the least candidate at a time */

/* Insert a logit into `count` candidates in descending order. Of at most k, the last one is dropped. A candidate precedes
 * later ones that are equal. */
AG_INLINE void ag_top_k_insert(double *values, int64_t *indices, ptrdiff_t count, ptrdiff_t k, double value, int64_t index)
{
    ptrdiff_t at = count < k ? count : k - 1;
    for (; at > 0 && values[at - 1] < value; at--) values[at] = values[at - 1], indices[at] = indices[at - 1];
    values[at] = value, indices[at] = index;
}

/* Merge n logits, of vocabulary entries `start`, start + 1, ..., into the candidates of a row: k values in descending order
 * and their entries. The first `start` entries were merged before. A NaN counts as -inf. */
#define AG_TOP_K_MERGE(name, type)                                                                                         \
    static AG_UNUSED void name(double *values, int64_t *indices, ptrdiff_t k, const type *logits, ptrdiff_t n, int64_t start) \
    {                                                                                                                      \
        ptrdiff_t c = 0;                                                                                                   \
        for (; c < n && start + c < k; c++) {                                                                              \
            const double value = logits[c] == logits[c] ? (double)logits[c] : -INFINITY;                                   \
            ag_top_k_insert(values, indices, start + c, k, value, start + c);                                              \
        }                                                                                                                  \
        while (c < n) {                                                                                                    \
            const ptrdiff_t end = c + AG_TOP_K_STEP < n ? c + AG_TOP_K_STEP : n;                                           \
            const type least = (type)values[k - 1];                                                                        \
            int is_any = 0;                                                                                                \
            for (ptrdiff_t j = c; j < end; j++) is_any |= logits[j] > least;                                               \
            for (ptrdiff_t j = c; j < end && is_any; j++) {                                                                \
                if ((double)logits[j] > values[k - 1]) ag_top_k_insert(values, indices, k, k, (double)logits[j], start + j); \
            }                                                                                                              \
            c = end;                                                                                                       \
        }                                                                                                                  \
    }

AG_TOP_K_MERGE(ag_top_k_merge_f32, float)
AG_TOP_K_MERGE(ag_top_k_merge_f64, double)
#undef AG_TOP_K_MERGE

#endif
