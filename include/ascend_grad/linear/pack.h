/* Conversion of rows, and packing, for one kind of arithmetic and one instruction set. Included by kernels.h; the manual is
 * linear.h. */

/* Return the number of packed elements of n values, with those that only fill the last step of a matrix unit. */
AG_INLINE ptrdiff_t K(elements)(ptrdiff_t n) { return (n + PAIR * GRANULE - 1) / (PAIR * GRANULE) * GRANULE; }

/* Return whether the values of a row follow one another, in native byte order. */
AG_INLINE int K(is_dense)(const ag_matrix *from) { return from->step == ag_itemsize[from->dtype] && !from->swapped; }

/* Return whether kernels can read rows in place, as packed elements that follow one another. */
AG_INLINE int K(is_in_place)(const ag_matrix *from)
{
    return K(is_dense)(from) && ag_itemsize[from->dtype] == sizeof(elem_t) / PAIR;
}

/* ---- rows of a matrix, widened -------------------------------------------------------------------------------- */

/* Return columns [first, first + n) of a row, as bfloat16 for the dot product and as accumulators otherwise. Values that need
 * no conversion are returned in place, others are gathered and widened into `buffer`. n is at most AG_FETCH, and the
 * buffer has space for n accumulators. */
static const char *K(fetch)(const ag_matrix *from, int64_t row, ptrdiff_t first, ptrdiff_t n, void *buffer)
{
    const int itemsize = ag_itemsize[from->dtype];
    const char *source = from->data + row * from->row_stride + first * from->step;
    if (from->step != itemsize || from->swapped) {
        /* 16-bit values that are widened in place lie in the upper half of the buffer, so that no store overwrites values
         * that are not read yet. */
        char *raw = (char *)buffer + (AG_IS_DOT || itemsize != 2 ? 0 : n * 2);
        ag_copy_block(raw, 0, itemsize, source, 0, from->step, 1, n, itemsize, from->swapped);
        source = raw;
    }
#if !AG_IS_F64 && !AG_IS_DOT
    if (itemsize == 2) {
        float *to = (float *)buffer;
        ptrdiff_t i = 0;
        if (from->dtype == AG_BFLOAT16) {
            for (; i + VL <= n; i += VL) v_f32_store(to + i, v_bf16_load(source + 2 * i));
            if (i < n) v_f32_store_partial(to + i, v_bf16_load_partial(source + 2 * i, n - i), n - i);
        } else {
            for (; i + VL <= n; i += VL) v_f32_store(to + i, v_f16_load(source + 2 * i));
            if (i < n) v_f32_store_partial(to + i, v_f16_load_partial(source + 2 * i, n - i), n - i);
        }
        return (const char *)to;
    }
#endif
    return source;
}

/* ---- packing ----------------------------------------------------------------------------------------------------------- */

/* Return values as `fetch` does, without a call if they need no conversion. */
AG_INLINE const char *K(row)(const ag_matrix *from, int64_t row, ptrdiff_t first, ptrdiff_t n, void *buffer)
{
    if (K(is_in_place)(from)) return from->data + row * from->row_stride + first * from->step;
    return K(fetch)(from, row, first, n, buffer);
}

#if AG_UNIT
/* Pack one tile of the left operand: to[k / ROW_GROUP][r][k % ROW_GROUP] is pair k of columns [first, first + n) of row rows[r].
 * Elements of rows from `count` up to MR, and pairs up to a whole step, are zero. If `rows` is NULL, the rows are start,
 * start + 1, ... */
static void K(pack_left)(void *to, ptrdiff_t pitch AG_UNUSED, const ag_matrix *from, const int64_t *rows, int64_t start,
                         ptrdiff_t count, ptrdiff_t first, ptrdiff_t n)
{
    enum { VALUES = ROW_GROUP * PAIR, BYTES = VALUES * 2 }; /* of a row in a group */
    char buffer[AG_FETCH * sizeof(acc_t)];
    memset(to, 0, (size_t)((n + MR - 1) / MR * MR * MR * 2));
    for (ptrdiff_t r = 0; r < count; r++) {
        for (ptrdiff_t begin = 0; begin < n; begin += AG_FETCH) {
            const ptrdiff_t length = n - begin < AG_FETCH ? n - begin : AG_FETCH;
            const char *source = K(row)(from, rows ? rows[r] : start + r, first + begin, length, buffer);
            char *target = (char *)to + begin * MR * 2 + r * BYTES;
            ptrdiff_t k = 0;
            for (; k + VALUES <= length; k += VALUES, target += MR * BYTES) memcpy(target, source + 2 * k, BYTES);
            if (k < length) memcpy(target, source + 2 * k, (size_t)(length - k) * 2);
        }
    }
}
#else
/* Copy rows of the left operand that cannot be read in place, widened: to[r][k] is packed element k of columns [first, first + n)
 * of row rows[r]. Rows of `to` are `pitch` elements apart. If `rows` is NULL, the rows are start, start + 1, ... */
static void K(pack_left)(void *to, ptrdiff_t pitch, const ag_matrix *from, const int64_t *rows, int64_t start,
                         ptrdiff_t count, ptrdiff_t first, ptrdiff_t n)
{
    for (ptrdiff_t r = 0; r < count; r++) {
        for (ptrdiff_t k = 0; k < n; k += AG_FETCH) {
            const ptrdiff_t length = n - k < AG_FETCH ? n - k : AG_FETCH;
            char *target = (char *)to + (r * pitch + k / PAIR) * (ptrdiff_t)sizeof(elem_t);
            const char *source = K(fetch)(from, rows ? rows[r] : start + r, first + k, length, target);
            if (source != target) memcpy(target, source, (size_t)length * sizeof(elem_t) / PAIR);
        }
    }
}
#endif

/* Merge two vectors in one step of a transposition. Lanes without the bit `block` are from a, the others from b. With
 * `second`, lanes of a come from `block` lanes above; otherwise, lanes of b come from `block` lanes below. */
AG_INLINE V K(exchange)(V a, V b, const int block, const int second)
{
#if defined(__clang__)
    V result;
    for (int l = 0; l < VL; l++) {
        result[l] = l & block ? b[second ? l : l - block] : a[second ? l + block : l];
    }
    return result;
#else
    LANES pick;
    for (int l = 0; l < VL; l++) {
        pick[l] = l & block ? VL + (second ? l : l - block) : second ? l + block : l;
    }
    return __builtin_shuffle(a, b, pick);
#endif
}

/* Transpose VL vectors of VL elements in place. */
AG_INLINE void K(transpose)(V x[VL])
{
    AG_UNROLL(4)
    for (int block = 1; block < VL; block *= 2) {
        AG_UNROLL(16)
        for (int i = 0; i < VL; i++) {
            if (i & block) continue;
            const V a = x[i], b = x[i + block];
            x[i] = K(exchange)(a, b, block, 0);
            x[i + block] = K(exchange)(a, b, block, 1);
        }
    }
}

/* Load n values, at most VL * PAIR, into a vector whose other elements are zero. */
AG_INLINE V K(load_values)(const char *p, ptrdiff_t n)
{
    V v = {0};
    if (n == VL * PAIR) {
        memcpy(&v, p, sizeof v);
    } else {
#if AG_IS_DOT && AG_IS_AVX512
        v = (V)_mm512_maskz_loadu_epi16((__mmask32)((1u << n) - 1), p);
#elif AG_IS_DOT
        memcpy(&v, p, (size_t)n * 2);
#else
        v = V_(load_partial)(p, n);
#endif
    }
    return v;
}

#if AG_UNIT != AG_BFMMLA
/* Pack one panel of the right operand, NR rows wide: to[k][r] is packed element k of columns [first, first + n) of row rows[r].
 * Vectors without a row are not written, except on matrix units. */
static void K(pack_right)(void *to, ptrdiff_t pitch AG_UNUSED, const ag_matrix *from, const int64_t *rows, int64_t start,
                          ptrdiff_t count, ptrdiff_t first, ptrdiff_t n)
{
    char buffer[VL][AG_FETCH * sizeof(acc_t)];
    const char *source[VL];
    for (ptrdiff_t group = 0; group < (AG_UNIT ? NR : count); group += VL) {
        const ptrdiff_t there = count - group < VL ? count - group : VL;
        for (ptrdiff_t begin = 0; begin < n; begin += AG_FETCH) {
            const ptrdiff_t length = n - begin < AG_FETCH ? n - begin : AG_FETCH;
            elem_t *target = (elem_t *)to + begin / PAIR * NR + group;
            for (ptrdiff_t r = 0; r < there; r++) {
                source[r] = K(row)(from, rows ? rows[group + r] : start + group + r, first + begin, length, buffer[r]);
            }
            for (ptrdiff_t k = 0; k < length; k += VL * PAIR) {
                const ptrdiff_t values = length - k < VL * PAIR ? length - k : VL * PAIR;
                V x[VL];
                for (ptrdiff_t r = 0; r < VL; r++) {
                    x[r] = (V){0};
                    if (r < there) x[r] = K(load_values)(source[r] + (size_t)k * sizeof(elem_t) / PAIR, values);
                }
                K(transpose)(x);
                /* the transposed values end with zeros, which fill the last step of the matrix unit */
                for (ptrdiff_t i = 0; i < (values + PAIR * GRANULE - 1) / (PAIR * GRANULE) * GRANULE; i++) {
                    memcpy(target + (k / PAIR + i) * NR, &x[i], sizeof(V));
                }
            }
        }
    }
}

#endif

#if AG_IS_DOT
/* Return n values, at most VL, of two rows as pairs. Lanes from n on are zero; without a second row, its values are. */
AG_INLINE u32v K(load_pairs)(const char *row, const char *second, ptrdiff_t n)
{
    u16v low, high = {0};
    if (n == VL) {
        memcpy(&low, row, sizeof low);
        if (second) memcpy(&high, second, sizeof high);
    } else {
        low = v_u16_load_partial(row, n);
        if (second) high = v_u16_load_partial(second, n);
    }
    return __builtin_convertvector(low, u32v) | __builtin_convertvector(high, u32v) << 16;
}
#endif

#if AG_UNIT == AG_BFMMLA
/* Store two pairs of each of VL columns side by side. */
AG_INLINE void K(store_interleaved)(elem_t *to, u32v first, u32v second)
{
#if AG_IS_NEON
    vst2q_u32(to, (uint32x4x2_t){{(uint32x4_t)first, (uint32x4_t)second}});
#else
    for (int c = 0; c < VL; c++) to[2 * c] = first[c], to[2 * c + 1] = second[c];
#endif
}

/* Pack one panel of columns: to[k / 2][c][k % 2] is pair k, which is rows 2k and 2k + 1, of column first + c, n <= NR. Columns
 * from n up to a multiple of VL, and rows up to a multiple of 4, are zero. */
static void K(pack_columns)(void *to, const ag_matrix *from, const int64_t *rows, int64_t start, ptrdiff_t count,
                            ptrdiff_t first, ptrdiff_t n)
{
    const ptrdiff_t width = (n + VL - 1) / VL * VL;
    elem_t *target = to;
    char buffer[4][AG_FETCH * sizeof(acc_t)];
    for (ptrdiff_t k = 0; k < count; k += 4, target += 2 * width) {
        const char *source[4] = {0};
        for (ptrdiff_t i = 0; i < 4 && k + i < count; i++) {
            source[i] = K(row)(from, rows ? rows[k + i] : start + k + i, first, n, buffer[i]);
        }
        for (ptrdiff_t c = 0; c < width; c += VL) {
            const ptrdiff_t left = n - c < VL ? n - c : VL;
            const char *at[4];
            for (int i = 0; i < 4; i++) at[i] = source[i] ? source[i] + 2 * c : 0;
            const u32v second = at[2] ? K(load_pairs)(at[2], at[3], left) : (u32v){0};
            K(store_interleaved)(target + 2 * c, K(load_pairs)(at[0], at[1], left), second);
        }
    }
}
#else
/* Pack one panel of columns: to[k][c] is column first + c of row k, n <= AG_FETCH. Columns from n up to a multiple of VL are zero.
 * With pairs, packed element k holds rows 2k and 2k + 1. */
static void K(pack_columns)(void *to, const ag_matrix *from, const int64_t *rows, int64_t start, ptrdiff_t count,
                            ptrdiff_t first, ptrdiff_t n)
{
    const ptrdiff_t width = (n + VL - 1) / VL * VL;
    elem_t *target = (elem_t *)to;
    char buffer[PAIR][AG_FETCH * sizeof(acc_t)];
    for (ptrdiff_t k = 0; k < count; k += PAIR, target += width) {
        const char *source = K(row)(from, rows ? rows[k] : start + k, first, n, buffer[0]);
#if AG_IS_DOT
        const char *second = 0;
        if (k + 1 < count) second = K(row)(from, rows ? rows[k + 1] : start + k + 1, first, n, buffer[1]);
        for (ptrdiff_t c = 0; c < width; c += VL) {
            const ptrdiff_t left = n - c < VL ? n - c : VL;
            const u32v pairs = K(load_pairs)(source + 2 * c, second ? second + 2 * c : 0, left);
            memcpy(target + c, &pairs, sizeof pairs);
        }
#else
        for (ptrdiff_t c = 0; c < width; c += VL) {
            const ptrdiff_t left = n - c < VL ? n - c : VL;
            V_(store)(target + c, left < VL ? V_(load_partial)(source + c * sizeof(acc_t), left)
                                            : V_(load)(source + c * sizeof(acc_t)));
        }
#endif
    }
}
#endif
