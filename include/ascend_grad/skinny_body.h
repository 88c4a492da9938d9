/* Products with few rows on one side, for one kind of arithmetic and one instruction set: nothing is packed. Body header,
 * see base.h; included by cross_entropy_body.h. The manual is linear_cross_entropy.h.
 *
 * At most AG_RESIDENT rows (of X or of W) are multiplied with streamed rows (of the other matrix), AG_STREAMED of them or
 * fewer at a time, over a range of the features. Both are read in place where rows are dense and of native byte order, else
 * gathered in segments. p(r, s), the logits or P, has a stride for either index.
 */

enum {
    K(SEGMENT) = 4096 / sizeof(real),                 /* features at a time; those of all resident rows fit into L2 */
    K(RESIDENT) = AG_LANES == 16 ? 4 : 2,  /* resident rows whose accumulators fit into registers */
    K(STREAMS) = 4,                                   /* by so many streamed rows, or so many vectors */
    K(TERMS) = 8                                      /* streamed rows that one pass over the sums takes in */
};

/* Values [first, first + n) of a row, dense and of native byte order, of their own dtype; n <= SEGMENT. */
static const char *K(dense)(const ag_rows *rows, ptrdiff_t i, ptrdiff_t first, ptrdiff_t n, char *buffer)
{
    const ag_matrix *from = &rows->matrix;
    const int itemsize = ag_itemsize[from->dtype];
    const char *source = from->data + (rows->numbers ? rows->numbers[i] : rows->start + i) * from->row_stride;
    source += first * from->step;
    if (from->step == itemsize && !from->swapped) return source;
    ag_copy_block(buffer, 0, itemsize, source, 0, from->step, 1, n, itemsize, from->swapped);
    return buffer;
}

/* Values [first, first + n) of every resident row, as accumulators; n <= SEGMENT. */
static void K(load_resident)(const ag_rows *rows, ptrdiff_t first, ptrdiff_t n, char buffer[][4096],
                             const char *to[AG_RESIDENT])
{
    const ag_matrix *from = &rows->matrix;
    const int in_place = ag_itemsize[from->dtype] == sizeof(real);
    for (ptrdiff_t r = 0; r < rows->count; r++) {
        if (in_place) {
            to[r] = K(dense)(rows, r, first, n, buffer[r]);
            continue;
        }
        const int64_t row = rows->numbers ? rows->numbers[r] : rows->start + r;
        to[r] = buffer[r];
        for (ptrdiff_t begin = 0; begin < n; begin += AG_FETCH) {
            K(fetch)(from, row, first + begin, n - begin < AG_FETCH ? n - begin : AG_FETCH,
                     buffer[r] + begin * sizeof(real));
        }
    }
    for (ptrdiff_t r = rows->count; r < AG_RESIDENT; r++) to[r] = to[rows->count - 1];
}

/* A vector of values of this dtype, widened, from value i on; `count` of them. */
AG_INLINE V K(load_as)(const ag_dtype dtype AG_UNUSED, const char *p, ptrdiff_t i, const ptrdiff_t count)
{
#if !AG_IS_F64
    if (dtype == AG_FLOAT16) return count < VL ? v_f16_load_partial(p + 2 * i, count) : v_f16_load(p + 2 * i);
    if (dtype == AG_BFLOAT16) return count < VL ? v_bf16_load_partial(p + 2 * i, count) : v_bf16_load(p + 2 * i);
#endif
    p += i * (ptrdiff_t)sizeof(real);
    return count < VL ? V_(load_partial)(p, count) : V_(load)(p);
}

/* Calls `function` with its first argument constant: one copy for every dtype. */
#if AG_IS_F64
#define AG_BY_DTYPE(dtype, function, ...) function(AG_FLOAT64, __VA_ARGS__)
#else
#define AG_BY_DTYPE(dtype, function, ...)                                                                               \
    do {                                                                                                                \
        if ((dtype) == AG_FLOAT16) function(AG_FLOAT16, __VA_ARGS__);                                                   \
        else if ((dtype) == AG_BFLOAT16) function(AG_BFLOAT16, __VA_ARGS__);                                            \
        else function(AG_FLOAT32, __VA_ARGS__);                                                                         \
    } while (0)
#endif

/* ---- logits: products of rows with rows ---------------------------------------------------------------------------------- */

/* sums[r * STREAMS + s] = resident[r] . streamed[s] over n features, r < nr. Every lane has a chain of its own; lanes are
 * added in pairs of neighbours, then of neighbouring pairs, and so on. */
AG_INLINE void K(dot_rows)(const ag_dtype dtype, const int nr, const char *const *resident, const char *const *streamed,
                           ptrdiff_t n, real *sums)
{
    const int count = nr * K(STREAMS);
    V sum[K(RESIDENT) * K(STREAMS)];
    AG_UNROLL(16)
    for (int j = 0; j < count; j++) sum[j] = (V){0};
    ptrdiff_t k = 0;
    for (; k + VL <= n; k += VL) {
        V right[K(STREAMS)];
        AG_UNROLL(4)
        for (int s = 0; s < K(STREAMS); s++) right[s] = K(load_as)(dtype, streamed[s], k, VL);
        AG_UNROLL(4)
        for (int r = 0; r < nr; r++) {
            const V left = V_(load)(resident[r] + k * (ptrdiff_t)sizeof(real));
            AG_UNROLL(4)
            for (int s = 0; s < K(STREAMS); s++) sum[r * K(STREAMS) + s] = V_(fma)(left, right[s], sum[r * K(STREAMS) + s]);
        }
    }
    if (k < n) {
        V right[K(STREAMS)];
        AG_UNROLL(4)
        for (int s = 0; s < K(STREAMS); s++) right[s] = K(load_as)(dtype, streamed[s], k, n - k);
        AG_UNROLL(4)
        for (int r = 0; r < nr; r++) {
            const V left = V_(load_partial)(resident[r] + k * (ptrdiff_t)sizeof(real), n - k);
            AG_UNROLL(4)
            for (int s = 0; s < K(STREAMS); s++) sum[r * K(STREAMS) + s] = V_(fma)(left, right[s], sum[r * K(STREAMS) + s]);
        }
    }
    /* Bit b of a lane's number says which one of a pair of vectors it is of, as long as there are pairs. */
    AG_UNROLL(4)
    for (int block = 1; block < VL; block *= 2) {
        const int left = count / block;
        AG_UNROLL(8)
        for (int j = 0; j < K(RESIDENT) * K(STREAMS) / 2; j++) {
            if (2 * j >= left && j > 0) continue;
            const V a = sum[left > 1 ? 2 * j : 0], b = sum[left > 1 ? 2 * j + 1 : 0];
            sum[j] = K(exchange)(a, b, block, 0) + K(exchange)(a, b, block, 1);
        }
    }
    if (count < VL) {
        real lanes[VL];
        V_(store)(lanes, sum[0]);
        memcpy(sums, lanes, (size_t)count * sizeof(real));
    } else {
        AG_UNROLL(8)
        for (int j = 0; j < count / VL; j++) V_(store)(sums + j * VL, sum[j]);
    }
}

/* sum, and what its additions lost in low, += x, of scalars */
AG_INLINE void K(add_scalar)(real *sum, real *low, real x)
{
    const real total = *sum + x, part = total - *sum;
    *low += (*sum - (total - part)) + (x - part);
    *sum = total;
}

/* One segment's terms to all p(r, s); without compensation there is nothing to add to. */
AG_INLINE void K(dot_segment)(const ag_dtype dtype, const char *const *resident, const ag_rows *of_resident,
                              const ag_rows *streamed, ptrdiff_t first, ptrdiff_t n, real *p, real *low, ptrdiff_t r_stride,
                              ptrdiff_t s_stride)
{
    char buffer[K(STREAMS)][4096];
    for (ptrdiff_t begin = 0; begin < streamed->count; begin += K(STREAMS)) {
        const ptrdiff_t streams = streamed->count - begin < K(STREAMS) ? streamed->count - begin : K(STREAMS);
        const char *rows[K(STREAMS)];
        for (ptrdiff_t s = 0; s < K(STREAMS); s++) {
            rows[s] = s < streams ? K(dense)(streamed, begin + s, first, n, buffer[s]) : rows[0];
        }
        for (ptrdiff_t r = 0; r < of_resident->count; r += K(RESIDENT)) {
            const ptrdiff_t left = of_resident->count - r, count = left < K(RESIDENT) ? left : K(RESIDENT);
            real sums[K(RESIDENT) * K(STREAMS)];
            if (count == 1) {
                K(dot_rows)(dtype, 1, resident + r, rows, n, sums);
            } else if (count == 2) {
                K(dot_rows)(dtype, 2, resident + r, rows, n, sums);
            } else {
                K(dot_rows)(dtype, K(RESIDENT), resident + r, rows, n, sums);
            }
            for (ptrdiff_t i = 0; i < count; i++) {
                for (ptrdiff_t s = 0; s < streams; s++) {
                    const ptrdiff_t at = (r + i) * r_stride + (begin + s) * s_stride;
                    if (low) {
                        K(add_scalar)(p + at, low + at, sums[i * K(STREAMS) + s]);
                    } else {
                        p[at] = sums[i * K(STREAMS) + s];
                    }
                }
            }
        }
    }
}

/* p(r, s) = resident row r . streamed row s over features [first, first + n), for AG_TILE values p at most. */
static void K(dot_products)(const ag_rows *resident, const ag_rows *streamed, ptrdiff_t first, ptrdiff_t n, void *to,
                            ptrdiff_t r_stride, ptrdiff_t s_stride)
{
    char buffer[AG_RESIDENT][4096];
    const char *rows[AG_RESIDENT];
    real low[AG_TILE], *p = to;
    if (n > K(SEGMENT)) memset(low, 0, sizeof low);
    for (ptrdiff_t done = 0; done < n; done += K(SEGMENT)) {
        const ptrdiff_t length = n - done < K(SEGMENT) ? n - done : K(SEGMENT);
        K(load_resident)(resident, first + done, length, buffer, rows);
        AG_BY_DTYPE(streamed->matrix.dtype, K(dot_segment), rows, resident, streamed, first + done, length, p,
                    done ? low : 0, r_stride, s_stride);
    }
    if (n <= K(SEGMENT)) return;
    for (ptrdiff_t r = 0; r < resident->count; r++) {
        for (ptrdiff_t s = 0; s < streamed->count; s++) {
            real *sum = p + r * r_stride + s * s_stride;
            if (*sum - *sum == 0) *sum += low[r * r_stride + s * s_stride];
        }
    }
}

/* ---- sums over streamed rows ---------------------------------------------------------------------------------------------- */

/* sums[r][c] += sum over `terms` rows of p(r, s) rows[s][c]: nr resident rows, nv vectors from column c on; the last one of
 * `tail` columns. */
AG_INLINE void K(add_products)(const ag_dtype dtype, const int nr, const int nv, const char *const *rows, ptrdiff_t terms,
                           const real *p, ptrdiff_t r_stride, ptrdiff_t s_stride, ptrdiff_t c, const ptrdiff_t tail,
                           real *sums, ptrdiff_t pitch, int add)
{
    V sum[K(RESIDENT)][K(STREAMS)];
    AG_UNROLL(4)
    for (int r = 0; r < nr; r++) {
        AG_UNROLL(4)
        for (int j = 0; j < nv; j++) {
            sum[r][j] = (V){0};
            if (add) sum[r][j] = V_(load)(sums + r * pitch + j * VL);
        }
    }
    for (ptrdiff_t s = 0; s < terms; s++) {
        V right[K(STREAMS)];
        AG_UNROLL(4)
        for (int j = 0; j < nv; j++) right[j] = K(load_as)(dtype, rows[s], c + j * VL, j == nv - 1 ? tail : VL);
        AG_UNROLL(4)
        for (int r = 0; r < nr; r++) {
            const V left = V_(set1)(p[r * r_stride + s * s_stride]);
            AG_UNROLL(4)
            for (int j = 0; j < nv; j++) sum[r][j] = V_(fma)(left, right[j], sum[r][j]);
        }
    }
    AG_UNROLL(4)
    for (int r = 0; r < nr; r++) {
        AG_UNROLL(4)
        for (int j = 0; j < nv; j++) V_(store)(sums + r * pitch + j * VL, sum[r][j]);
    }
}

AG_INLINE void K(sum_rows_of)(const ag_dtype dtype, ptrdiff_t resident, const ag_rows *streamed, ptrdiff_t first,
                              ptrdiff_t n, const real *p, ptrdiff_t r_stride, ptrdiff_t s_stride, real *sums,
                              ptrdiff_t pitch, int add)
{
    enum { WIDE = K(STREAMS) };
    char buffer[K(TERMS)][4096];
    const char *rows[K(TERMS)];
    for (ptrdiff_t s = 0; s < streamed->count; s += K(TERMS), p += K(TERMS) * s_stride, add = 1) {
        const ptrdiff_t terms = streamed->count - s < K(TERMS) ? streamed->count - s : K(TERMS);
        for (ptrdiff_t done = 0; done < n; done += K(SEGMENT)) {
            const ptrdiff_t length = n - done < K(SEGMENT) ? n - done : K(SEGMENT);
            for (ptrdiff_t t = 0; t < terms; t++) rows[t] = K(dense)(streamed, s + t, first + done, length, buffer[t]);
            for (ptrdiff_t c = 0; c < length;) {
                const ptrdiff_t left = length - c;
                for (ptrdiff_t r = 0; r < resident;) {
                    const real *of_row = p + r * r_stride;
                    real *to = sums + r * pitch + done + c;
                    const int many = resident - r >= K(RESIDENT);
                    if (left >= WIDE * VL && many) {
                        K(add_products)(dtype, K(RESIDENT), WIDE, rows, terms, of_row, r_stride, s_stride, c, VL, to, pitch, add);
                    } else if (left >= WIDE * VL) {
                        K(add_products)(dtype, 1, WIDE, rows, terms, of_row, r_stride, s_stride, c, VL, to, pitch, add);
                    } else if (many) {
                        K(add_products)(dtype, K(RESIDENT), 1, rows, terms, of_row, r_stride, s_stride, c,
                                    left < VL ? left : VL, to, pitch, add);
                    } else {
                        K(add_products)(dtype, 1, 1, rows, terms, of_row, r_stride, s_stride, c, left < VL ? left : VL, to,
                                    pitch, add);
                    }
                    r += many ? K(RESIDENT) : 1;
                }
                c += left >= WIDE * VL ? WIDE * VL : VL;
            }
        }
    }
}

/* sums[r][c] (+)= sum over all streamed rows of p(r, s) row s [first + c], c < n. Rows of sums are `pitch` apart, a multiple
 * of the vector. */
static void K(sum_rows)(ptrdiff_t resident, const ag_rows *streamed, ptrdiff_t first, ptrdiff_t n, const void *p,
                        ptrdiff_t r_stride, ptrdiff_t s_stride, void *sums, ptrdiff_t pitch, int add)
{
    AG_BY_DTYPE(streamed->matrix.dtype, K(sum_rows_of), resident, streamed, first, n, (const real *)p, r_stride, s_stride,
                (real *)sums, pitch, add);
}

/* to[c] = sum over `count` partial sums from[i * stride + c], c < n, with compensation. */
static void K(combine)(const void *from, ptrdiff_t count, ptrdiff_t stride, ptrdiff_t n, void *to)
{
    for (ptrdiff_t c = 0; c < n; c += VL) {
        const ptrdiff_t left = n - c < VL ? n - c : VL;
        const real *term = (const real *)from + c;
        V total = K(load_some)(term, left), lost = {0};
        for (ptrdiff_t i = 1; i < count; i++) {
            term += stride;
            K(add_compensated)(&total, &lost, K(load_some)(term, left));
        }
        K(store_some)((real *)to + c, K(compensated)(total, lost), left);
    }
}

/* ---- rows that are written once ------------------------------------------------------------------------------------------- */

/* A vector of results, rounded to this dtype; `count` of its values. */
AG_INLINE void K(store_as)(const ag_dtype dtype AG_UNUSED, const int nontemporal, char *p, V v, const ptrdiff_t count)
{
#if !AG_IS_F64
    if (dtype == AG_FLOAT16) {
        if (count < VL) v_f16_store_partial(p, v, count);
        else if (nontemporal) v_f16_stream(p, v);
        else v_f16_store(p, v);
        return;
    }
    if (dtype == AG_BFLOAT16) {
        if (count < VL) v_bf16_store_partial(p, v, count);
        else if (nontemporal) v_bf16_stream(p, v);
        else v_bf16_store(p, v);
        return;
    }
#endif
    if (count < VL) V_(store_partial)(p, v, count);
    else if (nontemporal) V_(stream)(p, v);
    else V_(store)(p, v);
}

/* to[s][c] = sum over nr resident rows of p(r, s) resident[r][c]: ns results, nv vectors; the last one of `tail` columns. */
AG_INLINE void K(write_some)(const ag_dtype dtype, const int nontemporal, const int ns, const int nv,
                             const char *const *resident, ptrdiff_t nr, const real *p, ptrdiff_t r_stride,
                             ptrdiff_t s_stride, ptrdiff_t c, const ptrdiff_t tail, char *const *to)
{
    const ptrdiff_t itemsize = ag_itemsize[dtype];
    V sum[K(RESIDENT)][K(STREAMS)];
    AG_UNROLL(4)
    for (int s = 0; s < ns; s++) {
        AG_UNROLL(4)
        for (int j = 0; j < nv; j++) sum[s][j] = (V){0};
    }
    for (ptrdiff_t r = 0; r < nr; r++) {
        V right[K(STREAMS)];
        AG_UNROLL(4)
        for (int j = 0; j < nv; j++) {
            const ptrdiff_t n = j == nv - 1 ? tail : VL;
            const char *from = resident[r] + (c + j * VL) * (ptrdiff_t)sizeof(real);
            right[j] = n < VL ? V_(load_partial)(from, n) : V_(load)(from);
        }
        AG_UNROLL(4)
        for (int s = 0; s < ns; s++) {
            const V left = V_(set1)(p[r * r_stride + s * s_stride]);
            AG_UNROLL(4)
            for (int j = 0; j < nv; j++) sum[s][j] = V_(fma)(left, right[j], sum[s][j]);
        }
    }
    AG_UNROLL(4)
    for (int s = 0; s < ns; s++) {
        AG_UNROLL(4)
        for (int j = 0; j < nv; j++) {
            K(store_as)(dtype, nontemporal, to[s] + (c + j * VL) * itemsize, sum[s][j], j == nv - 1 ? tail : VL);
        }
    }
}

AG_INLINE void K(write_segment)(const ag_dtype dtype, const int nontemporal, const char *const *resident, ptrdiff_t nr,
                                ptrdiff_t n, const real *p, ptrdiff_t r_stride, ptrdiff_t s_stride, ptrdiff_t ns,
                                char *const *to)
{
    enum { WIDE = K(STREAMS) };
    for (ptrdiff_t s = 0; s < ns; s += s + K(RESIDENT) <= ns ? K(RESIDENT) : 1) {
        const int many = s + K(RESIDENT) <= ns;
        const real *of_row = p + s * s_stride;
        ptrdiff_t c = 0;
        for (; c + WIDE * VL <= n; c += WIDE * VL) {
            if (many) {
                K(write_some)(dtype, nontemporal, K(RESIDENT), WIDE, resident, nr, of_row, r_stride, s_stride, c, VL, to + s);
            } else {
                K(write_some)(dtype, nontemporal, 1, WIDE, resident, nr, of_row, r_stride, s_stride, c, VL, to + s);
            }
        }
        for (; c < n; c += VL) {
            const ptrdiff_t tail = n - c < VL ? n - c : VL;
            if (many) {
                K(write_some)(dtype, nontemporal, K(RESIDENT), 1, resident, nr, of_row, r_stride, s_stride, c, tail, to + s);
            } else {
                K(write_some)(dtype, nontemporal, 1, 1, resident, nr, of_row, r_stride, s_stride, c, tail, to + s);
            }
        }
    }
}

/* Row s of `to`, features [first, first + n), = sum over the resident rows of p(r, s) row r: rounded once, to any dtype and
 * layout. */
static void K(write_rows)(ag_variant variant, const ag_rows *resident, const ag_rows *to, ptrdiff_t first, ptrdiff_t n,
                          const void *p, ptrdiff_t r_stride, ptrdiff_t s_stride, int nontemporal)
{
    const ag_dtype own = AG_IS_F64 ? AG_FLOAT64 : AG_FLOAT32, dtype = to->matrix.dtype;
    const int itemsize = ag_itemsize[dtype], is_dense = to->matrix.step == itemsize && !to->matrix.swapped;
    const int is_direct = is_dense && (dtype == own || (!AG_IS_F64 && itemsize == 2));
    char buffer[AG_RESIDENT][4096], results[K(RESIDENT)][4096], rounded[4096];
    const char *rows[AG_RESIDENT];
    for (ptrdiff_t done = 0; done < n; done += K(SEGMENT)) {
        const ptrdiff_t length = n - done < K(SEGMENT) ? n - done : K(SEGMENT);
        K(load_resident)(resident, first + done, length, buffer, rows);
        for (ptrdiff_t s = 0; s < to->count; s += K(RESIDENT)) {
            const ptrdiff_t ns = to->count - s < K(RESIDENT) ? to->count - s : K(RESIDENT);
            const real *of_rows = (const real *)p + s * s_stride;
            char *targets[K(RESIDENT)] = {0}, *places[K(RESIDENT)] = {0};
            int is_aligned = nontemporal;
            for (ptrdiff_t i = 0; i < ns; i++) {
                const int64_t row = to->numbers ? to->numbers[s + i] : to->start + s + i;
                places[i] = to->matrix.data + row * to->matrix.row_stride + (first + done) * to->matrix.step;
                targets[i] = is_direct ? places[i] : results[i];
                is_aligned &= (uintptr_t)places[i] % (VL * (size_t)itemsize) == 0;
            }
            if (is_direct && is_aligned) {
                AG_BY_DTYPE(dtype, K(write_segment), 1, rows, resident->count, length, of_rows, r_stride, s_stride, ns, targets);
                continue;
            }
            AG_BY_DTYPE(is_direct ? dtype : own, K(write_segment), 0, rows, resident->count, length, of_rows, r_stride,
                        s_stride, ns, targets);
            for (ptrdiff_t i = 0; !is_direct && i < ns; i++) {
                /* 256 values at a time: a float64 result of float32 sums is larger than its segment */
                for (ptrdiff_t c = 0; c < length; c += AG_FETCH) {
                    const ptrdiff_t count = length - c < AG_FETCH ? length - c : AG_FETCH;
                    const char *source = results[i] + c * (ptrdiff_t)sizeof(real);
                    if (dtype != own) {
                        ag_round(variant, AG_IS_F64, source, dtype, rounded, count);
                        source = rounded;
                    }
                    ag_copy_block(places[i] + c * to->matrix.step, 0, to->matrix.step, source, 0, itemsize, 1, count,
                                  itemsize, to->matrix.swapped);
                }
            }
        }
    }
    if (nontemporal) v_fence();
}

/* ---- what logits become: a tile of b->rows x b->vocab values, rows `pitch` apart ------------------------------------------ */

/* Logits, or the caller's probabilities where there are none, become P. */
static void K(tile_to_gradient)(const ag_lce_block *b, void *tile, ptrdiff_t pitch)
{
    const ag_rows softmax = {b->softmax, b->row_numbers, 0, b->rows};
    char buffer[4096];
    for (ptrdiff_t i = 0; i < b->rows; i++) {
        real *row = (real *)tile + i * pitch;
        const int64_t target = b->target[i] - b->vocab_start;
        const V grad = V_(set1)(((const real *)b->grad)[i]);
        if (b->softmax.data) {
            memcpy(row, K(dense)(&softmax, i, b->vocab_start, b->vocab, buffer), (size_t)b->vocab * sizeof(real));
        } else {
            const V max = V_(set1)(((const real *)b->max)[i]), sum = V_(set1)(((const real *)b->sum)[i]);
            for (ptrdiff_t c = 0; c < b->vocab; c += VL) {
                V_(store)(row + c, V_(exp)(V_(load)(row + c) - max) / sum);
            }
        }
        if (b->target[i] >= 0 && target >= 0 && target < b->vocab) row[target] -= 1;
        for (ptrdiff_t c = 0; c < b->vocab; c += VL) {
            V p = V_(load)(row + c) * grad;
#if !AG_IS_F64
            if (b->round_to_bfloat16) p = v_bf16_widen(v_bf16_narrow(p));
#endif
            V_(store)(row + c, p);
        }
    }
}

/* The maximum of each row and the sum of its exponentials relative to it are merged into max and sum; the target's logit;
 * logits for the caller. */
static void K(tile_to_max_sum)(const ag_lce_block *b, const void *tile, ptrdiff_t pitch, void *max, double *sum)
{
    for (ptrdiff_t i = 0; i < b->rows; i++) {
        const real *row = (const real *)tile + i * pitch;
        const real before = ((const real *)max)[i];
        V largest = V_(set1)((real)-INFINITY), total = {0};
        for (ptrdiff_t c = 0; c < b->vocab; c += VL) {
            largest = V_(max)(V_(first)(b->vocab - c < VL ? b->vocab - c : VL, V_(load)(row + c), largest), largest);
        }
        real now = V_(reduce_max)(largest);
        now = before != before || now <= before ? before : now; /* once NaN, always NaN */
        const V shift = V_(set1)(now == (real)-INFINITY ? 0 : now);
        for (ptrdiff_t c = 0; c < b->vocab; c += VL) {
            const V e = V_(exp)(V_(load)(row + c) - shift);
            total += V_(first)(b->vocab - c < VL ? b->vocab - c : VL, e, (V){0});
        }
        const real added = K(reduce_sum)(total);
        if (added != added) {
            /* NaN among the logits makes the maximum NaN; infinity makes the sum NaN alone */
            for (ptrdiff_t c = 0; c < b->vocab; c++) now = row[c] != row[c] ? row[c] : now;
        }
        const V factor = V_(exp)(V_(set1)(before) - shift);
        sum[i] = sum[i] * (double)factor[0] + (double)added;
        ((real *)max)[i] = now;
        const int64_t target = b->target[i] - b->vocab_start;
        if (b->target[i] >= 0 && target >= 0 && target < b->vocab) ((real *)b->predicted)[b->row_numbers[i]] = row[target];
        if (b->logits_out.data) K(put_logits)(b, i, 0, row, b->vocab);
    }
}

#undef AG_BY_DTYPE
