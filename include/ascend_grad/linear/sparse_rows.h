/* Products of the nonzeros of rows with one type of vectors. Body header, see sparse.h.
 *
 * Expects T, the type of vectors, T_FMA, its multiply-add, and T_NAME(name), the names of the functions. Each computes
 * `count` vectors of classes, from class `first` on.
 */

#define T_LANES ((ptrdiff_t)(sizeof(T) / sizeof(acc_t)))

AG_INLINE T T_NAME(load)(const acc_t *p)
{
    T v;
    memcpy(&v, p, sizeof v);
    return v;
}

/* Add x to sums, and the rounding errors of the additions to `rest`. */
AG_INLINE void T_NAME(add)(T *total, T *rest, T x)
{
    const T sum = *total + x, part = sum - *total;
    *rest += (*total - (sum - part)) + (x - part);
    *total = sum;
}

/* Write the logits of rows. Nonzeros with even and with odd places in a row have a sum each. Of long rows, the sums of parts
 * are added with compensation. */
AG_INLINE void T_NAME(logits)(const ag_sparse_rows *x, const ag_sparse_task *t, int is_wide, ptrdiff_t first, int count)
{
    const acc_t *weight = (const acc_t *)t->weight + first, *values = (const acc_t *)x->values;
    const void *indices = x->indices;
    const ptrdiff_t pitch = t->pitch;
    for (ptrdiff_t i = t->row; i < t->row_end; i++) {
        const int64_t end = x->starts[i + 1];
        acc_t *to = (acc_t *)t->p + (i - t->first_row) * t->classes + first;
        T even[K(SPARSE_VECTORS)], odd[K(SPARSE_VECTORS)], total[K(SPARSE_VECTORS)], rest[K(SPARSE_VECTORS)];
        int64_t k = x->starts[i];
        const int is_long = end - k > K(SPARSE_CHAIN);
        for (int v = 0; v < count; v++) total[v] = rest[v] = (T){0};
        do {
            const int64_t part_end = end - k > K(SPARSE_CHAIN) ? k + K(SPARSE_CHAIN) : end;
            for (int v = 0; v < count; v++) even[v] = odd[v] = (T){0};
            for (; k + 1 < part_end; k += 2) {
                const acc_t *w = weight + K(sparse_feature)(indices, is_wide, k) * pitch;
                const acc_t *u = weight + K(sparse_feature)(indices, is_wide, k + 1) * pitch;
                const T a = values[k] - (T){0}, b = values[k + 1] - (T){0};
                for (int v = 0; v < count; v++) {
                    even[v] = T_FMA(a, T_NAME(load)(w + v * T_LANES), even[v]);
                    odd[v] = T_FMA(b, T_NAME(load)(u + v * T_LANES), odd[v]);
                }
            }
            if (k < part_end) {
                const acc_t *w = weight + K(sparse_feature)(indices, is_wide, k++) * pitch;
                const T a = values[k - 1] - (T){0};
                for (int v = 0; v < count; v++) even[v] = T_FMA(a, T_NAME(load)(w + v * T_LANES), even[v]);
            }
            for (int v = 0; v < count && is_long; v++) T_NAME(add)(&total[v], &rest[v], even[v] + odd[v]);
        } while (k < end);
        for (int v = 0; v < count && is_long; v++) {
            even[v] = total[v];
            for (ptrdiff_t l = 0; l < T_LANES; l++) odd[v][l] = total[v][l] - total[v][l] == 0 ? rest[v][l] : 0;
        }
        for (int v = 0; v < count; v++) {
            const ptrdiff_t left = t->classes - first - v * T_LANES;
            T sum = even[v] + odd[v];
            if (t->bias) sum += T_NAME(load)((const acc_t *)t->bias + first + v * T_LANES);
            /* Elements that are written beyond a row belong to the next row, which is written after it. */
            if (left >= T_LANES || (i + 1 < t->row_end && t->pitch <= 4 * VL)) memcpy(to + v * T_LANES, &sum, sizeof sum);
            else memcpy(to + v * T_LANES, &sum, (size_t)left * sizeof(acc_t));
        }
    }
}

/* Add to the sums of features [feature, feature_end), in the order of the rows. */
AG_INLINE void T_NAME(sums)(const ag_sparse_rows *x, const ag_sparse_task *t, int is_wide, ptrdiff_t first, int count)
{
    /* Local copies, as the compiler cannot tell that sums are stored elsewhere. */
    const acc_t *values = (const acc_t *)x->values;
    const void *indices = x->indices;
    acc_t *sums = (acc_t *)t->sums + first;
    const ptrdiff_t pitch = t->pitch;
    const int64_t feature_begin = t->feature, feature_end = t->feature_end;
    const int is_unsorted = x->is_unsorted;
    for (ptrdiff_t i = t->row; i < t->row_end; i++) {
        const acc_t *p = (const acc_t *)t->p + (i - t->first_row) * t->classes;
        int64_t k = x->starts[i], end = x->starts[i + 1];
        T of_p[K(SPARSE_VECTORS)];
        if (!is_unsorted && feature_begin > 0) k = K(sparse_first)(indices, is_wide, k, end, feature_begin);
        if (!is_unsorted && feature_end < x->features) end = K(sparse_first)(indices, is_wide, k, end, feature_end);
        if (k == end || !K(sparse_any)(p, t->classes)) continue;
        /* Elements that are read beyond a row of P are added to padding. */
        for (int v = 0; v < count; v++) of_p[v] = T_NAME(load)(p + first + v * T_LANES);
        for (; k < end; k++) {
            const int64_t feature = K(sparse_feature)(indices, is_wide, k);
            acc_t *to = sums + feature * pitch;
            const T a = values[k] - (T){0};
            if (is_unsorted && (feature < feature_begin || feature >= feature_end)) continue;
            for (int v = 0; v < count; v++) {
                const T sum = T_FMA(a, of_p[v], T_NAME(load)(to + v * T_LANES));
                memcpy(to + v * T_LANES, &sum, sizeof sum);
            }
        }
    }
}

#undef T_LANES
#undef T
#undef T_FMA
#undef T_NAME
