/* Products with rows of X in the format CSR, one kind of arithmetic. Body header, see kernels.h; the manual is linear.h.
 *
 * The weight and its gradient are transposed, (H, pitch): a nonzero reads or writes the classes of its feature, which lie side
 * by side. Few classes take narrower vectors than V, so that features take less of the caches.
 */

enum {
    K(SPARSE_VECTORS) = 4,  /* most vectors of classes that are in registers together */
    K(SPARSE_CHAIN) = 512,  /* most nonzeros of a row whose products are added up without compensation */
};

/* Return the accumulators from feature to feature: a power of two, or a multiple of the vector. */
static ptrdiff_t K(sparse_pitch)(ptrdiff_t classes)
{
    ptrdiff_t pitch = 2;
    while (pitch < classes && pitch < VL) pitch *= 2;
    return pitch < classes ? (classes + VL - 1) / VL * VL : pitch;
}

AG_INLINE int64_t K(sparse_feature)(const void *indices, int is_wide, int64_t k)
{
    return is_wide ? ((const int64_t *)indices)[k] : ((const int32_t *)indices)[k];
}

/* Return the first nonzero in [k, end) whose feature is at least `feature`. The features are sorted. */
AG_INLINE int64_t K(sparse_first)(const void *indices, int is_wide, int64_t k, int64_t end, int64_t feature)
{
    while (k < end) {
        const int64_t middle = k + (end - k) / 2;
        if (K(sparse_feature)(indices, is_wide, middle) < feature) k = middle + 1;
        else end = middle;
    }
    return k;
}

/* Return whether a row of P has an element that is not 0. */
AG_INLINE int K(sparse_any)(const acc_t *p, ptrdiff_t n)
{
    ptrdiff_t c = 0;
    while (c < n && p[c] == 0) c++; /* mostly, the first element is not 0 */
    return c < n;
}

#define T_UNFUSED(a, b, c) ((a) * (b) + (c))

#define T V
#define T_FMA V_(fma)
#define T_NAME(name) K(sparse_vectors_##name)
#include "sparse_rows.h"

typedef acc_t K(two) __attribute__((vector_size(2 * sizeof(acc_t))));
#define T K(two)
#define T_FMA T_UNFUSED
#define T_NAME(name) K(sparse_two_##name)
#include "sparse_rows.h"

#if AG_LANES > (AG_IS_F64 ? 8 : 4)
typedef acc_t K(four) __attribute__((vector_size(4 * sizeof(acc_t))));
#define T K(four)
#define T_FMA T_UNFUSED
#define T_NAME(name) K(sparse_four_##name)
#include "sparse_rows.h"
#endif

#if AG_LANES > 8 && !AG_IS_F64
typedef acc_t K(eight) __attribute__((vector_size(8 * sizeof(acc_t))));
#define T K(eight)
#define T_FMA T_UNFUSED
#define T_NAME(name) K(sparse_eight_##name)
#include "sparse_rows.h"
#endif

#undef T_UNFUSED

/* Call a function of all classes, with the vectors that their pitch asks for. */
#if AG_LANES > 8 && !AG_IS_F64
#define T_EIGHT(name) if (t->pitch == 8) K(sparse_eight_##name)(x, t, is_wide, 0, 1); else
#else
#define T_EIGHT(name)
#endif
#if AG_LANES > (AG_IS_F64 ? 8 : 4)
#define T_FOUR(name) if (t->pitch == 4) K(sparse_four_##name)(x, t, is_wide, 0, 1); else
#else
#define T_FOUR(name)
#endif
#define T_BY_PITCH(name)                                                                                               \
    if (t->pitch >= VL) {                                                                                              \
        for (ptrdiff_t c = 0; c < t->pitch; c += K(SPARSE_VECTORS) * VL) {                                             \
            const ptrdiff_t left = (t->pitch - c) / VL;                                                                \
            if (left >= 4) K(sparse_vectors_##name)(x, t, is_wide, c, 4);                                              \
            else if (left == 3) K(sparse_vectors_##name)(x, t, is_wide, c, 3);                                         \
            else if (left == 2) K(sparse_vectors_##name)(x, t, is_wide, c, 2);                                         \
            else K(sparse_vectors_##name)(x, t, is_wide, c, 1);                                                        \
        }                                                                                                              \
    } else                                                                                                             \
        T_EIGHT(name) T_FOUR(name) K(sparse_two_##name)(x, t, is_wide, 0, 1);

AG_INLINE void K(sparse_logits_of)(const ag_sparse_rows *x, const ag_sparse_task *t, int is_wide) { T_BY_PITCH(logits) }
AG_INLINE void K(sparse_sums_of)(const ag_sparse_rows *x, const ag_sparse_task *t, int is_wide) { T_BY_PITCH(sums) }

#undef T_EIGHT
#undef T_FOUR
#undef T_BY_PITCH

static void K(sparse_logits)(const ag_sparse_rows *x, const ag_sparse_task *t)
{
    if (x->is_wide) K(sparse_logits_of)(x, t, 1);
    else K(sparse_logits_of)(x, t, 0);
}

static void K(sparse_sums)(const ag_sparse_rows *x, const ag_sparse_task *t)
{
    if (x->is_wide) K(sparse_sums_of)(x, t, 1);
    else K(sparse_sums_of)(x, t, 0);
}

#define T_CHECKED(name, index_t, vector, unsigned_vector, limit_t, limit)                                              \
    static int K(name)(const ag_sparse_rows *x, ptrdiff_t row, ptrdiff_t row_end)                                      \
    {                                                                                                                  \
        enum { N = sizeof(vector) / sizeof(index_t) };                                                                 \
        const index_t *index = (const index_t *)x->indices;                                                            \
        const int64_t begin = x->starts[row], end = x->starts[row_end];                                                \
        const limit_t most = limit;                                                                                    \
        vector is_outside = {0}, descents = {0};                                                                       \
        int64_t k = begin, descended = 0;                                                                              \
        int outside = begin < end && (limit_t)index[k++] >= most;                                                      \
        for (; k + N <= end; k += N) {                                                                                 \
            vector features, before;                                                                                   \
            memcpy(&features, index + k, sizeof features);                                                             \
            memcpy(&before, index + k - 1, sizeof before);                                                             \
            is_outside |= (vector)((unsigned_vector)features >= most);                                                 \
            descents -= (vector)(features < before);                                                                   \
        }                                                                                                              \
        for (; k < end; k++) outside |= (limit_t)index[k] >= most, descended += index[k] < index[k - 1];               \
        for (int l = 0; l < N; l++) outside |= is_outside[l] != 0, descended += descents[l];                           \
        /* From row to row the features may descend. */                                                                \
        for (ptrdiff_t i = row; i < row_end; i++) {                                                                    \
            const int64_t first = x->starts[i];                                                                        \
            descended -= first > begin && first < x->starts[i + 1] && index[first] < index[first - 1];                 \
        }                                                                                                              \
        return (outside ? AG_SPARSE_OUTSIDE : 0) | (descended ? AG_SPARSE_UNSORTED : 0);                               \
    }
T_CHECKED(sparse_checked_32, int32_t, i32v, u32v, uint32_t, (uint32_t)(x->features > INT32_MAX ? 1ll << 31 : x->features))
T_CHECKED(sparse_checked_64, int64_t, i64v, u64v, uint64_t, (uint64_t)x->features)
#undef T_CHECKED

static int K(sparse_check)(const ag_sparse_rows *x, ptrdiff_t row, ptrdiff_t row_end)
{
    return x->is_wide ? K(sparse_checked_64)(x, row, row_end) : K(sparse_checked_32)(x, row, row_end);
}
