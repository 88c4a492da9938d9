/* Unpacked gradients of bfloat16 from a tile of P whose values are bfloat16, with dot products of pairs of rows. Included by
 * kernels.h for the kind dot. The functions of skinny_grads.h with the same names describe the results. They widen bfloat16, which
 * takes twice as many multiply-adds.
 */

enum {
    K(PAIR_THIN) = 8,                         /* most features for which float32 with rows as lanes is faster. Measured */
    K(PAIR_GROUP) = 16,                       /* accumulators of a group of rows and vectors in registers */
    K(PAIR_TERMS) = 48,                       /* streamed rows that are added in one pass over the sums; even */
    K(PAIR_PITCH) = K(PAIR_TERMS) / 2,        /* pairs of P from row to row */
    K(PAIR_SEGMENT) = 1024,                   /* features at a time; of all sums, they fit into L2 */
    K(MOST_PAIRS) = AG_MAX_UNPACKED_ROWS / 2  /* pairs of resident rows that are packed together */
};

/* Return two values of P, which are bfloat16, as a pair. */
AG_INLINE uint32_t K(pair_of)(const acc_t *low, const acc_t *high)
{
    uint32_t a, b = 0;
    memcpy(&a, low, sizeof a);
    if (high) memcpy(&b, high, sizeof b);
    return a >> 16 | (b & 0xffff0000);
}

/* Set to[i] to the pair of p[2 * i] and p[2 * i + 1], for n values. A last value without another one is paired with zero, and so are
 * the pairs behind it up to a multiple of VL / 2. */
AG_INLINE void K(pairs_of_row)(const acc_t *p, ptrdiff_t n, uint32_t *to)
{
    for (ptrdiff_t i = 0; i < n; i += VL) {
        const V values = K(load_some)(p + i, n - i < VL ? n - i : VL);
        const u16v halves = __builtin_convertvector((u32v)values >> 16, u16v);
        memcpy(to + i / 2, &halves, sizeof halves);
    }
}

/* Set to[group][k][s], for groups of NARROW rows s, to the pair of p(2k, s) and p(2k + 1, s), where p(r, s) is
 * p[r * r_stride + s * s_stride]. The last of an odd number of resident rows is paired with zero. */
static void K(pairs_of_rows)(const acc_t *p, ptrdiff_t r_stride, ptrdiff_t s_stride, ptrdiff_t resident, ptrdiff_t streamed,
                             uint32_t *to)
{
    const ptrdiff_t count = (resident + 1) / 2;
    for (ptrdiff_t k = 0; k < count; k++) {
        const acc_t *low = p + 2 * k * r_stride, *high = 2 * k + 1 < resident ? low + r_stride : 0;
        for (ptrdiff_t s = 0; s_stride == 1 && s < streamed; s += VL) {
            const ptrdiff_t n = streamed - s < VL ? streamed - s : VL;
            const u32v upper = high ? (u32v)K(load_some)(high + s, n) & 0xffff0000 : (u32v){0};
            const u32v pairs = (u32v)K(load_some)(low + s, n) >> 16 | upper;
            AG_UNROLL(2)
            for (ptrdiff_t group = 0; group < VL; group += K(NARROW)) {
                memcpy(to + (s + group) * count + k * K(NARROW), (const char *)&pairs + 4 * group, 4 * K(NARROW));
            }
        }
        for (ptrdiff_t s = 0; s_stride != 1 && s < streamed; s++) {
            const ptrdiff_t group = s / K(NARROW) * K(NARROW);
            to[group * count + k * K(NARROW) + s - group] = K(pair_of)(low + s * s_stride, high ? high + s * s_stride : 0);
        }
    }
}

/* ---- sums over streamed rows ---------------------------------------------------------------------------------------------- */

/* Add the products of nr rows of pairs of P and `terms` streamed rows to sums[r][c], for nv vectors from column c on. The last
 * vector has `tail` columns. Without `add`, sums begin with zero. */
AG_INLINE void K(add_pairs)(const int nr, const int nv, const char *const *rows, ptrdiff_t terms,
                            const uint32_t *p, ptrdiff_t c, const ptrdiff_t tail,
                            const ptrdiff_t prefetch_distance, acc_t *sums, ptrdiff_t sums_pitch, int add)
{
    V sum[K(PAIR_GROUP)];
    AG_UNROLL(8)
    for (int r = 0; r < nr; r++) {
        AG_UNROLL(8)
        for (int j = 0; j < nv; j++) {
            sum[r * nv + j] = (V){0};
            if (add) sum[r * nv + j] = V_(load)(sums + r * sums_pitch + j * VL);
        }
    }
    for (ptrdiff_t k = 0; k < terms; k += 2) {
        const char *second = k + 1 < terms ? rows[k + 1] : 0;
        V right[K(PAIR_GROUP)];
        AG_UNROLL(8)
        for (int j = 0; prefetch_distance && j < nv; j += 2) {
            __builtin_prefetch(rows[k] + 2 * (c + j * VL) + prefetch_distance);
            __builtin_prefetch(rows[k + 1] + 2 * (c + j * VL) + prefetch_distance);
        }
        AG_UNROLL(8)
        for (int j = 0; j < nv; j++) {
            const ptrdiff_t at = 2 * (c + j * VL);
            right[j] = (V)K(load_pairs)(rows[k] + at, second ? second + at : 0, j == nv - 1 ? tail : VL);
        }
        AG_UNROLL(8)
        for (int r = 0; r < nr; r++) {
            const V left = K(broadcast)(p + r * K(PAIR_PITCH) + k / 2);
            AG_UNROLL(8)
            for (int j = 0; j < nv; j++) sum[r * nv + j] = K(multiply_add)(left, right[j], sum[r * nv + j]);
        }
    }
    AG_UNROLL(8)
    for (int r = 0; r < nr; r++) {
        AG_UNROLL(8)
        for (int j = 0; j < nv; j++) V_(store)(sums + r * sums_pitch + j * VL, sum[r * nv + j]);
    }
}

/* Add products to n columns of nr rows of sums, whose group has nv vectors. */
AG_INLINE void K(add_rows_of_pairs)(const int nr, const int nv, const char *const *rows, ptrdiff_t terms,
                                    const uint32_t *p, ptrdiff_t n, ptrdiff_t prefetch_distance, acc_t *sums,
                                    ptrdiff_t sums_pitch, int add)
{
    ptrdiff_t c = 0;
    for (; c + nv * VL <= n; c += nv * VL) {
        K(add_pairs)(nr, nv, rows, terms, p, c, VL, prefetch_distance, sums + c, sums_pitch, add);
    }
    for (; nv >= 2 && c + VL < n; c += 2 * VL) {
        K(add_pairs)(nr, 2, rows, terms, p, c, n - c < 2 * VL ? n - c - VL : VL, 0, sums + c, sums_pitch, add);
    }
    if (c < n) K(add_pairs)(nr, 1, rows, terms, p, c, n - c, 0, sums + c, sums_pitch, add);
}

/* Compute sums[r][c], the sum over all streamed rows s of p[r * r_stride + s * s_stride] times feature first + c of row s. With
 * `add`, add it to the earlier sums. */
AG_NOINLINE void K(sum_pairs)(ptrdiff_t resident, const ag_rows *streamed, ptrdiff_t first, ptrdiff_t n, const acc_t *p,
                              ptrdiff_t r_stride, ptrdiff_t s_stride, acc_t *sums, ptrdiff_t sums_pitch, int add)
{
    char buffer[K(PAIR_TERMS)][2 * K(PAIR_SEGMENT) + K(PADDING)];
    const char *rows[K(PAIR_TERMS) + 1];
    uint32_t pairs[AG_MAX_UNPACKED_ROWS * K(PAIR_PITCH)];
    const int copies = (resident >= K(NARROW) && K(collides)(streamed)) || !K(is_dense)(&streamed->matrix);
    /* If rows in place are short, the next rows are prefetched; if they are long, the following bytes of the same rows. */
    const ptrdiff_t in_place_distance = 2 * n <= K(LONG) ? K(PAIR_TERMS) * streamed->matrix.row_stride : 512;
    const ptrdiff_t prefetch_distance = copies ? 0 : in_place_distance;
    /* A segment of the sums stays in L2 while all streamed rows are added to it. */
    for (ptrdiff_t done = 0; done < n; done += K(PAIR_SEGMENT)) {
        const ptrdiff_t length = n - done < K(PAIR_SEGMENT) ? n - done : K(PAIR_SEGMENT);
        for (ptrdiff_t s = 0; s < streamed->count; s += K(PAIR_TERMS)) {
            const ptrdiff_t terms = streamed->count - s < K(PAIR_TERMS) ? streamed->count - s : K(PAIR_TERMS);
            K(dense_rows)(streamed, s, terms, first + done, length, buffer[0], sizeof buffer[0], copies, rows);
            rows[terms] = rows[terms - 1]; /* is only prefetched */
            for (ptrdiff_t r = 0; r < resident; r++) {
                const acc_t *of_row = p + r * r_stride + s * s_stride;
                if (s_stride == 1) K(pairs_of_row)(of_row, terms, pairs + r * K(PAIR_PITCH));
                for (ptrdiff_t k = 0; s_stride != 1 && k < terms; k += 2) {
                    const acc_t *low = of_row + k * s_stride;
                    pairs[r * K(PAIR_PITCH) + k / 2] = K(pair_of)(low, k + 1 < terms ? low + s_stride : 0);
                }
            }
            ptrdiff_t distance = prefetch_distance;
            for (ptrdiff_t r = 0, nr; r < resident; r += nr) {
                const uint32_t *of_rows = pairs + r * K(PAIR_PITCH);
                acc_t *to = sums + r * sums_pitch + done;
                const int adds = add || s;
                nr = resident - r >= 8 ? 8 : resident - r >= 4 ? 4 : resident - r >= 2 ? 2 : 1;
                if (nr == 8) K(add_rows_of_pairs)(8, 2, rows, terms, of_rows, length, distance, to, sums_pitch, adds);
                else if (nr == 4) K(add_rows_of_pairs)(4, 4, rows, terms, of_rows, length, distance, to, sums_pitch, adds);
                else if (nr == 2) K(add_rows_of_pairs)(2, 4, rows, terms, of_rows, length, distance, to, sums_pitch, adds);
                else K(add_rows_of_pairs)(1, 8, rows, terms, of_rows, length, distance, to, sums_pitch, adds);
                distance = 0; /* the first group has prefetched the streamed rows */
            }
        }
    }
}

static void K(sum_rows)(ptrdiff_t resident, const ag_rows *streamed, ptrdiff_t first, ptrdiff_t n, const void *p,
                        ptrdiff_t pitch, void *sums, ptrdiff_t sums_pitch, int add)
{
    if (n <= K(PAIR_THIN)) {
        SUMS(sum_rows)(resident, streamed, first, n, p, pitch, sums, sums_pitch, add);
    } else {
        K(sum_pairs)(resident, streamed, first, n, (const acc_t *)p, pitch, 1, (acc_t *)sums, sums_pitch, add);
    }
}

/* ---- rows that are written once ------------------------------------------------------------------------------------------- */

/* Store two vectors of results in order, as bfloat16 or as they are. */
AG_INLINE void K(store_two)(const ag_dtype dtype, const int nontemporal, char *to, V x, V y)
{
    if (dtype == AG_BFLOAT16) {
        const u16v upper = {1, 3, 5, 7, 9, 11, 13, 15, 17, 19, 21, 23, 25, 27, 29, 31}; /* the upper halves of lanes */
        const __m512i order = _mm512_inserti64x4(_mm512_castsi256_si512((__m256i)upper), (__m256i)(upper + 32), 1);
        const V both = (V)_mm512_permutex2var_epi16((__m512i)v_bf16_round(x), order, (__m512i)v_bf16_round(y));
        if (nontemporal) v_f32_stream(to, both);
        else v_f32_store(to, both);
    } else {
        v_f32_store(to, x);
        v_f32_store(to + sizeof x, y);
    }
}

/* Write to[s][c], the sum over all pairs k of resident rows of p(k, s) right[k][c], for ns results and nv vectors from column c
 * on. The last vector has `tail` columns. */
AG_INLINE void K(write_pairs)(const ag_dtype dtype, const int nontemporal, const int ns, const int nv, const uint32_t *right,
                              ptrdiff_t width, ptrdiff_t count, const uint32_t *p, ptrdiff_t c,
                              const ptrdiff_t tail, char *const *to)
{
    const ptrdiff_t itemsize = ag_itemsize[dtype];
    V sum[K(PAIR_GROUP)];
    AG_UNROLL(16)
    for (int i = 0; i < ns * nv; i++) sum[i] = (V){0};
    for (ptrdiff_t k = 0; k < count; k++) {
        V of_row[K(PAIR_GROUP)];
        AG_UNROLL(8)
        for (int j = 0; j < nv; j++) of_row[j] = V_(load)(right + k * width + c + j * VL);
        AG_UNROLL(8)
        for (int s = 0; s < ns; s++) {
            const V left = K(broadcast)(p + k * K(NARROW) + s);
            AG_UNROLL(8)
            for (int j = 0; j < nv; j++) sum[s * nv + j] = K(multiply_add)(left, of_row[j], sum[s * nv + j]);
        }
    }
    AG_UNROLL(8)
    for (int s = 0; s < ns; s++) {
        AG_UNROLL(4)
        for (int j = 0; j < nv; j += 2) {
            char *place = to[s] + (c + j * VL) * itemsize;
            if (j + 2 < nv || (j + 2 == nv && tail == VL)) {
                K(store_two)(dtype, nontemporal, place, sum[s * nv + j], sum[s * nv + j + 1]);
            } else {
                SUMS(store_as)(dtype, 0, place, sum[s * nv + j], j + 1 < nv ? VL : tail);
                if (j + 1 < nv) SUMS(store_as)(dtype, 0, place + VL * itemsize, sum[s * nv + j + 1], tail);
            }
        }
    }
}

/* Write n columns of ns results. */
AG_INLINE void K(write_chunk)(const ag_dtype dtype, const int nontemporal, const uint32_t *right, ptrdiff_t count,
                              ptrdiff_t n, const uint32_t *p, ptrdiff_t ns, char *const *to)
{
    const ptrdiff_t width = (n + VL - 1) / VL * VL;
    ptrdiff_t c = 0;
    for (; c + 4 * VL <= n; c += 4 * VL) {
        ptrdiff_t s = 0;
        for (; s + 4 <= ns; s += 4) K(write_pairs)(dtype, nontemporal, 4, 4, right, width, count, p + s, c, VL, to + s);
        for (; s < ns; s++) K(write_pairs)(dtype, nontemporal, 1, 4, right, width, count, p + s, c, VL, to + s);
    }
    for (; c + VL < n; c += 2 * VL) {
        const ptrdiff_t tail = n - c < 2 * VL ? n - c - VL : VL;
        ptrdiff_t s = 0;
        for (; s + 8 <= ns; s += 8) K(write_pairs)(dtype, 0, 8, 2, right, width, count, p + s, c, tail, to + s);
        for (; s < ns; s++) K(write_pairs)(dtype, 0, 1, 2, right, width, count, p + s, c, tail, to + s);
    }
    if (c < n) {
        ptrdiff_t s = 0;
        for (; s + 8 <= ns; s += 8) K(write_pairs)(dtype, 0, 8, 1, right, width, count, p + s, c, n - c, to + s);
        for (; s < ns; s++) K(write_pairs)(dtype, 0, 1, 1, right, width, count, p + s, c, n - c, to + s);
    }
}

/* Write rows as sums over all resident rows, which are more than are packed together. */
AG_NOINLINE void K(write_sums)(ag_variant variant, const ag_rows *resident, const ag_rows *to, ptrdiff_t first, ptrdiff_t n,
                               const acc_t *p, ptrdiff_t r_stride, ptrdiff_t s_stride)
{
    acc_t sums[AG_MAX_UNPACKED_ROWS][AG_FETCH];
    for (ptrdiff_t done = 0; done < n; done += AG_FETCH) {
        const ptrdiff_t length = n - done < AG_FETCH ? n - done : AG_FETCH;
        for (ptrdiff_t s = 0; s < to->count; s += AG_MAX_UNPACKED_ROWS) {
            const ptrdiff_t ns = to->count - s < AG_MAX_UNPACKED_ROWS ? to->count - s : AG_MAX_UNPACKED_ROWS;
            K(sum_pairs)(ns, resident, first + done, length, p + s * s_stride, s_stride, r_stride, sums[0], AG_FETCH, 0);
            for (ptrdiff_t i = 0; i < ns; i++) {
                SUMS(place_results)(variant, sums[i], length, &to->matrix, K(place)(to, s + i, first + done));
            }
        }
    }
}

/* Write rows from resident rows that are packed, at most AG_MAX_UNPACKED_ROWS. `to` has at most AG_MAX_STREAMED_STEP rows. */
AG_NOINLINE void K(write_packed)(ag_variant variant, const ag_rows *resident, const ag_rows *to, ptrdiff_t first, ptrdiff_t n,
                                 const acc_t *p, ptrdiff_t r_stride, ptrdiff_t s_stride, int nontemporal)
{
    const ag_dtype dtype = to->matrix.dtype;
    const int is_direct = dtype == AG_BFLOAT16 && K(is_dense)(&to->matrix);
    const ptrdiff_t count = (resident->count + 1) / 2;
    enum { CHUNK = AG_FETCH, MOST = 4 };
    /* The packed rows of all chunks that are computed together take at most 32 KiB. */
    const ptrdiff_t chunks = count * MOST <= K(MOST_PAIRS) ? MOST : count > 0 ? K(MOST_PAIRS) / count : 1, most = chunks * CHUNK;
    uint32_t right[K(MOST_PAIRS) * CHUNK], pairs[K(MOST_PAIRS) * AG_MAX_STREAMED_STEP];
    acc_t results[K(NARROW)][MOST * CHUNK];
    K(pairs_of_rows)(p, r_stride, s_stride, resident->count, to->count, pairs);
    for (ptrdiff_t done = 0; done < n; done += most) {
        const ptrdiff_t length = n - done < most ? n - done : most;
        for (ptrdiff_t c = 0; c < length; c += CHUNK) {
            K(pack_columns)(right + c * count, &resident->matrix, resident->numbers, resident->start, resident->count,
                            first + done + c, length - c < CHUNK ? length - c : CHUNK);
        }
        for (ptrdiff_t s = 0; s < to->count; s += K(NARROW)) {
            const ptrdiff_t ns = to->count - s < K(NARROW) ? to->count - s : K(NARROW);
            char *targets[K(NARROW)] = {0}, *places[K(NARROW)] = {0};
            int is_aligned = nontemporal;
            for (ptrdiff_t i = 0; i < ns; i++) {
                places[i] = K(place)(to, s + i, first + done);
                targets[i] = is_direct ? places[i] : (char *)results[i];
                is_aligned &= ((uintptr_t)places[i] & (sizeof(V) - 1)) == 0;
            }
            const uint32_t *of_rows = pairs + s * count;
            for (ptrdiff_t c = 0; c < length; c += CHUNK) {
                const ptrdiff_t columns = length - c < CHUNK ? length - c : CHUNK;
                if (is_direct && is_aligned) {
                    K(write_chunk)(AG_BFLOAT16, 1, right + c * count, count, columns, of_rows, ns, targets);
                } else if (is_direct) {
                    K(write_chunk)(AG_BFLOAT16, 0, right + c * count, count, columns, of_rows, ns, targets);
                } else {
                    K(write_chunk)(AG_FLOAT32, 0, right + c * count, count, columns, of_rows, ns, targets);
                }
                for (ptrdiff_t i = 0; i < ns; i++) targets[i] += CHUNK * (is_direct ? 2 : (ptrdiff_t)sizeof(acc_t));
            }
            for (ptrdiff_t i = 0; !is_direct && i < ns; i++) {
                SUMS(place_results)(variant, results[i], length, &to->matrix, places[i]);
            }
        }
    }
    if (nontemporal) v_fence();
}

static void K(write_rows)(ag_variant variant, const ag_rows *resident, const ag_rows *to, ptrdiff_t first, ptrdiff_t n,
                          const void *p, ptrdiff_t r_stride, ptrdiff_t s_stride, int nontemporal)
{
    if (n <= K(PAIR_THIN)) {
        SUMS(write_rows)(variant, resident, to, first, n, p, r_stride, s_stride, nontemporal);
    } else if (resident->count > AG_MAX_UNPACKED_ROWS) {
        K(write_sums)(variant, resident, to, first, n, (const acc_t *)p, r_stride, s_stride);
    } else {
        K(write_packed)(variant, resident, to, first, n, (const acc_t *)p, r_stride, s_stride, nontemporal);
    }
}
