/* Products with few rows on one side, for one kind of arithmetic and one instruction set: nothing is packed. Body header,
 * see base.h; included by cross_entropy_body.h. The manual is linear_cross_entropy.h.
 *
 * Resident rows (of X or of W) are multiplied with streamed rows (of the other matrix) over a range of the features. Both are
 * read in place where rows are dense and of native byte order, else gathered in segments. p(r, s), the logits or P, is a tile
 * [resident][pitch].
 *
 * Of the kind dot there are dot products alone; what P is multiplied with is widened: SUMS names those functions.
 */

#if AG_IS_DOT
#define SUMS(name) AG_CONCAT3(name, f32, AG_ISA)
#else
#define SUMS(name) K(name)
#endif

enum {
    K(SEGMENT) = 4096 / sizeof(unit) * PAIR,          /* features at a time; those of all resident rows fit into L2 */
    K(RESIDENT) = AG_LANES == 16 ? 4 : 2,  /* resident rows whose accumulators fit into registers */
    K(STREAMS) = 4,                                   /* by so many streamed rows, or so many vectors */
    K(PRODUCTS) = K(RESIDENT) * K(STREAMS),           /* of rows, whose lanes are added up together */
    K(NARROW) = 8,                                    /* rows at a time where they are one vector long, or end in one */
    K(TERMS) = 16,                                    /* streamed rows that one pass over the sums takes in */
    K(LONG) = 512,                                    /* features of long rows */
    K(FEW_FEATURES) = 128,                            /* up to which streamed rows may be transposed */
    K(THIN) = 16                                      /* features up to which lanes are rows in every product */
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

/* The same of rows [i, i + count). */
AG_INLINE void K(dense_rows)(const ag_rows *rows, ptrdiff_t i, ptrdiff_t count, ptrdiff_t first, ptrdiff_t n,
                             char buffer[][4096], const char **to)
{
    const ag_matrix *from = &rows->matrix;
    const int in_place = from->step == ag_itemsize[from->dtype] && !from->swapped;
    const char *start = from->data + first * from->step;
    for (ptrdiff_t k = 0; k < count; k++) {
        to[k] = in_place ? start + (rows->numbers ? rows->numbers[i + k] : rows->start + i + k) * from->row_stride
                         : K(dense)(rows, i + k, first, n, buffer[k]);
    }
}

/* Whether resident rows are read where they lie. Copies of all of them, a segment long, would be much for a thread's stack:
 * where there are copies, these are of SOME rows, or of SHORT values of each. */
static int K(is_in_place)(const ag_matrix *from)
{
    const int itemsize = sizeof(unit) / PAIR;
    return from->step == itemsize && ag_itemsize[from->dtype] == itemsize && !from->swapped;
}

enum { K(SOME) = 16, K(SHORT) = K(SEGMENT) * K(SOME) / AG_RESIDENT };

/* Values [first, first + n) of every resident row, widened but for dot products; copies lie `pitch` bytes apart in the
 * buffer. Pointers up to a multiple of RESIDENT are valid. */
static void K(load_resident)(const ag_rows *rows, ptrdiff_t first, ptrdiff_t n, char *buffer, ptrdiff_t pitch,
                             const char **to)
{
    const ag_matrix *from = &rows->matrix;
    const int in_place = K(is_in_place)(from);
    for (ptrdiff_t r = 0; r < rows->count; r++) {
        char *copy = in_place ? 0 : buffer + r * pitch;
        if (ag_itemsize[from->dtype] == sizeof(unit) / PAIR) {
            to[r] = K(dense)(rows, r, first, n, copy);
            continue;
        }
        const int64_t row = rows->numbers ? rows->numbers[r] : rows->start + r;
        to[r] = copy;
        for (ptrdiff_t begin = 0; begin < n; begin += AG_FETCH) {
            K(fetch)(from, row, first + begin, n - begin < AG_FETCH ? n - begin : AG_FETCH, copy + begin * sizeof(real));
        }
    }
    for (ptrdiff_t r = rows->count; r % K(RESIDENT); r++) to[r] = to[rows->count - 1];
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
#elif AG_IS_DOT
#define AG_BY_DTYPE(dtype, function, ...) function(AG_BFLOAT16, __VA_ARGS__)
#else
#define AG_BY_DTYPE(dtype, function, ...)                                                                               \
    do {                                                                                                                \
        if ((dtype) == AG_FLOAT16) function(AG_FLOAT16, __VA_ARGS__);                                                   \
        else if ((dtype) == AG_BFLOAT16) function(AG_BFLOAT16, __VA_ARGS__);                                            \
        else function(AG_FLOAT32, __VA_ARGS__);                                                                         \
    } while (0)
#endif

/* to[i] = value i of p, `count` of them */
AG_INLINE void K(widen_step)(const ag_dtype dtype, const char *p, ptrdiff_t i, const ptrdiff_t count, real *to)
{
    K(store_some)(to + i, K(load_as)(dtype, p, i, count), count);
}

/* ---- logits: products of rows with rows ---------------------------------------------------------------------------------- */

/* A vector of units of a streamed row from feature k on, of `count` features. */
AG_INLINE V K(load_units)(const ag_dtype dtype AG_UNUSED, const char *row, ptrdiff_t k, const ptrdiff_t count)
{
#if AG_IS_DOT
    return K(load_values)(row + 2 * k, count);
#else
    return K(load_as)(dtype, row, k, count);
#endif
}

/* `count` features of each product, from feature k on: a vector's, or fewer. */
AG_INLINE void K(dot_step)(const ag_dtype dtype, const int nr, const int ns, const char *const *resident,
                           const char *const *streamed, ptrdiff_t k, const ptrdiff_t count, ptrdiff_t ahead, V *sum)
{
    V left[K(RESIDENT)];
    AG_UNROLL(4)
    for (int r = 0; r < nr; r++) left[r] = K(load_values)(resident[r] + k * (ptrdiff_t)sizeof(unit) / PAIR, count);
    AG_UNROLL(16)
    for (int s = 0; s < ns; s++) {
        const V right = K(load_units)(dtype, streamed[s], k, count);
        __builtin_prefetch(streamed[s] + k * ag_itemsize[dtype] + ahead);
        AG_UNROLL(4)
        for (int r = 0; r < nr; r++) sum[r * ns + s] = K(multiply_add)(left[r], right, sum[r * ns + s]);
    }
}

/* sums[r * ns + s] = resident[r] . streamed[s] over n features, r < nr, s < ns. Every lane has a chain of its own; lanes are
 * added in pairs of neighbours, then of neighbouring pairs, and so on. What lies `ahead` bytes further is asked for. */
AG_INLINE void K(dot_rows)(const ag_dtype dtype, const int nr, const int ns, const char *const *resident,
                           const char *const *streamed, ptrdiff_t n, ptrdiff_t ahead, real *sums)
{
    const int count = nr * ns;
    V sum[K(PRODUCTS)];
    AG_UNROLL(16)
    for (int j = 0; j < count; j++) sum[j] = (V){0};
    ptrdiff_t k = 0;
    for (; k + VL * PAIR <= n; k += VL * PAIR) {
        K(dot_step)(dtype, nr, ns, resident, streamed, k, VL * PAIR, ahead, sum);
    }
    if (k < n) K(dot_step)(dtype, nr, ns, resident, streamed, k, n - k, ahead, sum);
    /* Bit b of a lane's number says which one of a pair of vectors it is of, as long as there are pairs. */
    AG_UNROLL(4)
    for (int block = 1; block < VL; block *= 2) {
        const int left = count / block;
        AG_UNROLL(8)
        for (int j = 0; j < K(PRODUCTS) / 2; j++) {
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

/* One segment's terms to all p(r, s) of nr resident rows at a time; without compensation there is nothing to add to. */
AG_INLINE void K(dot_group)(const ag_dtype dtype, const int nr, const int ns, const char *const *resident,
                            ptrdiff_t count, const ag_rows *streamed, ptrdiff_t first, ptrdiff_t n, real *p,
                            ptrdiff_t pitch, real *low)
{
    enum { MOST = K(PRODUCTS) };
    /* Of short rows the next ones are asked for, of long ones what follows in them. */
    const ptrdiff_t ahead = n < K(LONG) ? ns * streamed->matrix.row_stride : 1024;
    char buffer[MOST][4096];
    for (ptrdiff_t begin = 0; begin < streamed->count; begin += ns) {
        const ptrdiff_t streams = streamed->count - begin < ns ? streamed->count - begin : ns;
        const char *rows[MOST];
        K(dense_rows)(streamed, begin, streams, first, n, buffer, rows);
        for (ptrdiff_t s = streams; s < ns; s++) rows[s] = rows[0];
        for (ptrdiff_t r = 0; r < count; r += nr) {
            real sums[MOST];
            K(dot_rows)(dtype, nr, ns, resident + r, rows, n, ahead, sums);
            for (ptrdiff_t i = 0; i < nr && r + i < count; i++) {
                real *const to = p + (r + i) * pitch + begin;
                if (!low) {
                    memcpy(to, sums + i * ns, (size_t)streams * sizeof(real));
                    continue;
                }
                for (ptrdiff_t s = 0; s < streams; s++) {
                    K(add_scalar)(to + s, low + (r + i) * streamed->count + begin + s, sums[i * ns + s]);
                }
            }
        }
    }
}

AG_INLINE void K(dot_segment)(const ag_dtype dtype, const char *const *resident, ptrdiff_t count, const ag_rows *streamed,
                              ptrdiff_t first, ptrdiff_t n, real *p, ptrdiff_t pitch, real *low)
{
    /* Many short rows at a time make little work of adding up lanes; of long rows no CPU fetches so many at a time well. */
    enum { MOST = K(PRODUCTS) };
    if (count == 1 && n < K(LONG)) {
        K(dot_group)(dtype, 1, MOST, resident, count, streamed, first, n, p, pitch, low);
    } else if (count == 2 && n < K(LONG)) {
        K(dot_group)(dtype, 2, MOST / 2, resident, count, streamed, first, n, p, pitch, low);
    } else if (count == 1) {
        K(dot_group)(dtype, 1, K(STREAMS), resident, count, streamed, first, n, p, pitch, low);
    } else if (count == 2) {
        K(dot_group)(dtype, 2, K(STREAMS), resident, count, streamed, first, n, p, pitch, low);
    } else {
        K(dot_group)(dtype, K(RESIDENT), K(STREAMS), resident, count, streamed, first, n, p, pitch, low);
    }
}

/* columns[k][s] = unit k of streamed row `begin` + s from feature `first` on, NR rows and n features; zero behind the last row
 * and feature. */
AG_INLINE void K(transpose_rows)(const ag_dtype dtype, const ag_rows *streamed, ptrdiff_t begin, ptrdiff_t first,
                                 ptrdiff_t n, unit *columns)
{
    char buffer[VL][4096];
    const char *rows[VL];
    for (ptrdiff_t group = 0; group < NR; group += VL) {
        const ptrdiff_t left = streamed->count - begin - group, there = left < VL ? left : VL;
        K(dense_rows)(streamed, begin + group, there, first, n, buffer, rows);
        for (ptrdiff_t k = 0; k < n; k += VL * PAIR) {
            const ptrdiff_t count = n - k < VL * PAIR ? n - k : VL * PAIR;
            V x[VL];
            for (ptrdiff_t r = 0; r < VL; r++) {
                x[r] = (V){0};
                if (r < there) x[r] = K(load_units)(dtype, rows[r], k, count);
            }
            K(transpose)(x);
            for (ptrdiff_t i = 0; i * PAIR < count; i++) memcpy(columns + (k / PAIR + i) * NR + group, &x[i], sizeof(V));
        }
    }
}

#if !AG_IS_DOT

/* Whether rows follow one another. */
AG_INLINE int K(is_run)(const ag_rows *rows)
{
    return !rows->numbers || rows->numbers[rows->count - 1] - rows->numbers[0] == rows->count - 1;
}

/* columns[k][s] = feature first + k of row s, at most THIN features of at most AG_STREAMED rows, as accumulators; zero behind the
 * last row up to a multiple of NR. */
static void K(load_columns)(const ag_rows *rows, ptrdiff_t first, ptrdiff_t n, real columns[][AG_STREAMED])
{
    const ag_matrix *from = &rows->matrix;
    const int itemsize = ag_itemsize[from->dtype];
    const ptrdiff_t count = rows->count, padded = (count + NR - 1) / NR * NR, runs = K(is_run)(rows) ? 1 : count;
    for (ptrdiff_t k = 0; k < n; k++) {
        /* 16-bit values go to the upper half of the column: widening runs ahead of no reader */
        char *raw = (char *)columns[k] + (itemsize == sizeof(real) ? 0 : AG_STREAMED * 2);
        for (ptrdiff_t i = 0; i < runs; i++) {
            const char *source = from->data + (rows->numbers ? rows->numbers[i] : rows->start) * from->row_stride;
            ag_copy_rows(AG_VARIANT_BASELINE, raw + i * itemsize, 0, itemsize, source + (first + k) * from->step, 0,
                         from->row_stride, 1, count / runs, itemsize, from->swapped);
        }
        for (ptrdiff_t s = 0; itemsize != sizeof(real) && s < count; s += VL) {
            AG_BY_DTYPE(from->dtype, K(widen_step), raw, s, count - s < VL ? count - s : VL, columns[k]);
        }
        for (ptrdiff_t s = count; s < padded; s++) columns[k][s] = 0;
    }
}

#endif

/* sum[r][j] += unit r of `left` * vector j of `column`. */
AG_INLINE void K(panel_step)(const int nr, const unit *left, const unit *column, V sum[4][NV])
{
    AG_UNROLL(4)
    for (int r = 0; r < nr; r++) {
        const V a = K(broadcast)(left + r);
        AG_UNROLL(3)
        for (int j = 0; j < NV; j++) {
            V b;
            memcpy(&b, column + j * VL, sizeof b);
            sum[r][j] = K(multiply_add)(a, b, sum[r][j]);
        }
    }
}

/* p(r, s) of nr resident rows and a panel of streamed ones, columns[k][s] of n features, the first `count` of which are
 * there. From column to column it is `step` units. */
AG_INLINE void K(dot_panel)(const int nr, const char *const *resident, const unit *columns, ptrdiff_t step, ptrdiff_t n,
                            ptrdiff_t count, real *p, ptrdiff_t pitch)
{
    V sum[4][NV];
    unit left[4] = {0};
    AG_UNROLL(4)
    for (int r = 0; r < nr; r++) {
        AG_UNROLL(3)
        for (int j = 0; j < NV; j++) sum[r][j] = (V){0};
    }
    for (ptrdiff_t k = 0; k < n / PAIR; k++, columns += step) {
        AG_UNROLL(4)
        for (int r = 0; r < nr; r++) memcpy(&left[r], resident[r] + k * (ptrdiff_t)sizeof(unit), sizeof(unit));
        K(panel_step)(nr, left, columns, sum);
    }
    if (n % PAIR) { /* the first of a pair */
        for (int r = 0; r < nr; r++) {
            left[r] = 0;
            memcpy(&left[r], resident[r] + (n - 1) * 2, 2);
        }
        K(panel_step)(nr, left, columns, sum);
    }
    AG_UNROLL(4)
    for (int r = 0; r < nr; r++) {
        AG_UNROLL(3)
        for (int j = 0; j < NV; j++) {
            const ptrdiff_t there = count - j * VL;
            real *const to = p + r * pitch + j * VL;
            if (there >= VL) {
                V_(store)(to, sum[r][j]);
            } else {
                real values[VL];
                V_(store)(values, sum[r][j]);
                for (int i = 0; i < VL - 1; i++) { /* a loop to `there` makes compilers doubt that it ends within the vector */
                    if (i < there) to[i] = values[i];
                }
            }
        }
    }
}

/* The same as dot_segment where features are few: lanes are streamed rows, so that none has to be added to another. */
static void K(dot_columns)(const char *const *resident, ptrdiff_t count, const ag_rows *streamed, ptrdiff_t first,
                           ptrdiff_t n, real *p, ptrdiff_t pitch)
{
    enum { PANEL = K(FEW_FEATURES) / PAIR * NR, WHOLE = K(THIN) * AG_STREAMED };
    unit columns[PANEL > WHOLE ? PANEL : WHOLE] __attribute__((aligned(64)));
    ptrdiff_t step = NR;
#if !AG_IS_DOT
    if (n <= K(THIN)) {
        K(load_columns)(streamed, first, n, (real (*)[AG_STREAMED])columns);
        step = AG_STREAMED;
    }
#endif
    for (ptrdiff_t s = 0; s < streamed->count; s += NR) {
        const ptrdiff_t there = streamed->count - s < NR ? streamed->count - s : NR;
        const unit *panel = columns + (step == NR ? 0 : s);
        if (step == NR) AG_BY_DTYPE(streamed->matrix.dtype, K(transpose_rows), streamed, s, first, n, columns);
        for (ptrdiff_t r = 0; r < count;) {
            const ptrdiff_t left = count - r;
            real *to = p + r * pitch + s;
            if (left >= 4) {
                K(dot_panel)(4, resident + r, panel, step, n, there, to, pitch);
            } else if (left >= 2) {
                K(dot_panel)(2, resident + r, panel, step, n, there, to, pitch);
            } else {
                K(dot_panel)(1, resident + r, panel, step, n, there, to, pitch);
            }
            r += left >= 4 ? 4 : left >= 2 ? 2 : 1;
        }
    }
}

/* p(r, s) = resident row r . streamed row s over features [first, first + n), for resident rows whose copies fit and at most
 * AG_TILE products. */
static void K(dot_some)(const ag_rows *resident, const ag_rows *streamed, ptrdiff_t first, ptrdiff_t n, int by_columns,
                        real *p, ptrdiff_t pitch)
{
    char buffer[K(SOME)][4096];
    const char *rows[AG_RESIDENT];
    real low[AG_TILE]; /* [resident][streamed] */
    if (by_columns) {
        K(load_resident)(resident, first, n, buffer[0], sizeof buffer[0], rows);
        K(dot_columns)(rows, resident->count, streamed, first, n, p, pitch);
        return;
    }
    if (n > K(SEGMENT)) memset(low, 0, (size_t)(resident->count * streamed->count) * sizeof(real));
    for (ptrdiff_t done = 0; done < n; done += K(SEGMENT)) {
        const ptrdiff_t length = n - done < K(SEGMENT) ? n - done : K(SEGMENT);
        K(load_resident)(resident, first + done, length, buffer[0], sizeof buffer[0], rows);
        AG_BY_DTYPE(streamed->matrix.dtype, K(dot_segment), rows, resident->count, streamed, first + done, length, p, pitch,
                    done ? low : 0);
    }
    if (n <= K(SEGMENT)) return;
    for (ptrdiff_t r = 0; r < resident->count; r++) {
        for (ptrdiff_t s = 0; s < streamed->count; s++) {
            real *sum = p + r * pitch + s;
            if (*sum - *sum == 0) *sum += low[r * streamed->count + s];
        }
    }
}

/* `count` rows from `start` on */
static ag_rows K(subset)(const ag_rows *rows, ptrdiff_t start, ptrdiff_t count)
{
    ag_rows some = *rows;
    some.count = rows->count - start < count ? rows->count - start : count;
    some.start += start;
    if (some.numbers) some.numbers += start;
    return some;
}

/* p(r, s) = resident row r . streamed row s over features [first, first + n). */
static void K(dot_products)(const ag_rows *resident, const ag_rows *streamed, ptrdiff_t first, ptrdiff_t n, void *to,
                            ptrdiff_t pitch)
{
    /* Where lanes are features, adding them up takes longer for more resident rows; to transpose does not. */
    const int by_columns = n <= K(FEW_FEATURES) && n <= PAIR * (VL + 8 * resident->count);
    const ptrdiff_t most = K(is_in_place)(&resident->matrix) ? AG_RESIDENT : K(SOME);
    for (ptrdiff_t r = 0; r < resident->count; r += most) {
        const ag_rows left = K(subset)(resident, r, most);
        for (ptrdiff_t s = 0; s < streamed->count; s += AG_TILE / left.count) {
            const ag_rows right = K(subset)(streamed, s, AG_TILE / left.count);
            K(dot_some)(&left, &right, first, n, by_columns, (real *)to + r * pitch + s, pitch);
        }
    }
}

#if !AG_IS_DOT

/* ---- sums over streamed rows ---------------------------------------------------------------------------------------------- */

/* sums[r][c] += sum over `terms` rows of p(r, s) rows[s][c]: nr resident rows, nv vectors from column c on; the last one of
 * `tail` columns. */
AG_INLINE void K(add_products)(const ag_dtype dtype, const int nr, const int nv, const char *const *rows, ptrdiff_t terms,
                               const real *p, ptrdiff_t pitch, ptrdiff_t c, const ptrdiff_t tail, real *sums,
                               ptrdiff_t sums_pitch, int add)
{
    V sum[K(PRODUCTS)];
    AG_UNROLL(8)
    for (int r = 0; r < nr; r++) {
        AG_UNROLL(4)
        for (int j = 0; j < nv; j++) {
            sum[r * nv + j] = (V){0};
            if (add) sum[r * nv + j] = V_(load)(sums + r * sums_pitch + j * VL);
        }
    }
    for (ptrdiff_t s = 0; s < terms; s++) {
        V right[K(STREAMS)];
        AG_UNROLL(4)
        for (int j = 0; j < nv; j++) right[j] = K(load_as)(dtype, rows[s], c + j * VL, j == nv - 1 ? tail : VL);
        AG_UNROLL(8)
        for (int r = 0; r < nr; r++) {
            const V left = V_(set1)(p[r * pitch + s]);
            AG_UNROLL(4)
            for (int j = 0; j < nv; j++) sum[r * nv + j] = V_(fma)(left, right[j], sum[r * nv + j]);
        }
    }
    AG_UNROLL(8)
    for (int r = 0; r < nr; r++) {
        AG_UNROLL(4)
        for (int j = 0; j < nv; j++) V_(store)(sums + r * sums_pitch + j * VL, sum[r * nv + j]);
    }
}

/* The same for all resident rows and nv vectors, as many rows at a time as keep the multipliers busy. */
AG_INLINE void K(add_columns)(const ag_dtype dtype, const int nv, ptrdiff_t resident, const char *const *rows,
                              ptrdiff_t terms, const real *p, ptrdiff_t pitch, ptrdiff_t c, const ptrdiff_t tail,
                              real *sums, ptrdiff_t sums_pitch, int add)
{
    const int many = nv > 1 ? K(RESIDENT) : K(NARROW);
    while (resident > 0) {
        const int nr = resident >= many ? many : resident >= 4 ? 4 : resident >= 2 ? 2 : 1;
        if (nr == many) {
            K(add_products)(dtype, many, nv, rows, terms, p, pitch, c, tail, sums, sums_pitch, add);
        } else if (nr == 4) {
            K(add_products)(dtype, many > 4 ? 4 : 1, nv, rows, terms, p, pitch, c, tail, sums, sums_pitch, add);
        } else if (nr == 2) {
            K(add_products)(dtype, 2, nv, rows, terms, p, pitch, c, tail, sums, sums_pitch, add);
        } else {
            K(add_products)(dtype, 1, nv, rows, terms, p, pitch, c, tail, sums, sums_pitch, add);
        }
        resident -= nr;
        p += nr * pitch;
        sums += nr * sums_pitch;
    }
}

AG_INLINE void K(sum_rows_of)(const ag_dtype dtype, ptrdiff_t resident, const ag_rows *streamed, ptrdiff_t first,
                              ptrdiff_t n, const real *p, ptrdiff_t pitch, real *sums, ptrdiff_t sums_pitch, int add)
{
    enum { WIDE = K(STREAMS) };
    char buffer[K(TERMS)][4096];
    const char *rows[K(TERMS)];
    /* A segment of the sums stays in L2 while all streamed rows are added to it. */
    for (ptrdiff_t done = 0; done < n; done += K(SEGMENT)) {
        const ptrdiff_t length = n - done < K(SEGMENT) ? n - done : K(SEGMENT);
        for (ptrdiff_t s = 0; s < streamed->count; s += K(TERMS)) {
            const ptrdiff_t terms = streamed->count - s < K(TERMS) ? streamed->count - s : K(TERMS);
            K(dense_rows)(streamed, s, terms, first + done, length, buffer, rows);
            for (ptrdiff_t c = 0; c < length;) {
                const ptrdiff_t left = length - c;
                real *to = sums + done + c;
                if (left >= WIDE * VL) {
                    K(add_columns)(dtype, WIDE, resident, rows, terms, p + s, pitch, c, VL, to, sums_pitch, add || s);
                    c += WIDE * VL;
                } else {
                    K(add_columns)(dtype, 1, resident, rows, terms, p + s, pitch, c, left < VL ? left : VL, to, sums_pitch,
                                   add || s);
                    c += VL;
                }
            }
        }
    }
}

/* The same of few features: products of rows of p and columns. */
static void K(sum_columns)(ptrdiff_t resident, const ag_rows *streamed, ptrdiff_t first, ptrdiff_t n, const real *p,
                           ptrdiff_t pitch, real *sums, ptrdiff_t sums_pitch, int add)
{
    const ag_dtype own = AG_IS_F64 ? AG_FLOAT64 : AG_FLOAT32;
    real columns[K(THIN)][AG_STREAMED], products[AG_RESIDENT * K(THIN)];
    const char *rows[AG_RESIDENT];
    const ag_rows right = {{(char *)columns, sizeof columns[0], sizeof(real), own, 0}, 0, 0, n};
    K(load_columns)(streamed, first, n, columns);
    for (ptrdiff_t r = 0; r < resident || r % K(RESIDENT); r++) {
        rows[r] = (const char *)(p + (r < resident ? r : resident - 1) * pitch);
    }
    K(dot_segment)(own, rows, resident, &right, 0, streamed->count, products, n, 0);
    for (ptrdiff_t r = 0; r < resident; r++) {
        for (ptrdiff_t c = 0; c < n; c++) {
            real *sum = sums + r * sums_pitch + c;
            *sum = add ? *sum + products[r * n + c] : products[r * n + c];
        }
    }
}

/* sums[r][c] (+)= sum over all streamed rows of p(r, s) row s [first + c], c < n; at most AG_RESIDENT resident and AG_STREAMED
 * streamed rows. The pitch of the sums is a multiple of the vector. */
static void K(sum_rows)(ptrdiff_t resident, const ag_rows *streamed, ptrdiff_t first, ptrdiff_t n, const void *p,
                        ptrdiff_t pitch, void *sums, ptrdiff_t sums_pitch, int add)
{
    if (n <= K(THIN)) {
        K(sum_columns)(resident, streamed, first, n, p, pitch, sums, sums_pitch, add);
        return;
    }
    AG_BY_DTYPE(streamed->matrix.dtype, K(sum_rows_of), resident, streamed, first, n, (const real *)p, pitch, (real *)sums,
                sums_pitch, add);
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
    V sum[K(PRODUCTS)];
    AG_UNROLL(16)
    for (int i = 0; i < ns * nv; i++) sum[i] = (V){0};
    for (ptrdiff_t r = 0; r < nr; r++) {
        V right[K(STREAMS)];
        AG_UNROLL(4)
        for (int j = 0; j < nv; j++) {
            const ptrdiff_t n = j == nv - 1 ? tail : VL;
            const char *from = resident[r] + (c + j * VL) * (ptrdiff_t)sizeof(real);
            right[j] = n < VL ? V_(load_partial)(from, n) : V_(load)(from);
        }
        AG_UNROLL(8)
        for (int s = 0; s < ns; s++) {
            const V left = V_(set1)(p[r * r_stride + s * s_stride]);
            AG_UNROLL(4)
            for (int j = 0; j < nv; j++) sum[s * nv + j] = V_(fma)(left, right[j], sum[s * nv + j]);
        }
    }
    AG_UNROLL(8)
    for (int s = 0; s < ns; s++) {
        AG_UNROLL(4)
        for (int j = 0; j < nv; j++) {
            K(store_as)(dtype, nontemporal, to[s] + (c + j * VL) * itemsize, sum[s * nv + j], j == nv - 1 ? tail : VL);
        }
    }
}

AG_INLINE void K(write_segment)(const ag_dtype dtype, const int nontemporal, const char *const *resident, ptrdiff_t nr,
                                ptrdiff_t n, const real *p, ptrdiff_t r_stride, ptrdiff_t s_stride, ptrdiff_t ns,
                                char *const *to)
{
    enum { MANY = K(RESIDENT), WIDE = K(STREAMS) };
    const ptrdiff_t wide = n / (WIDE * VL) * (WIDE * VL);
    for (ptrdiff_t s = 0; s < ns && wide; s += s + MANY <= ns ? MANY : 1) {
        const real *of_row = p + s * s_stride;
        for (ptrdiff_t c = 0; c < wide; c += WIDE * VL) {
            if (s + MANY <= ns) {
                K(write_some)(dtype, nontemporal, MANY, WIDE, resident, nr, of_row, r_stride, s_stride, c, VL, to + s);
            } else {
                K(write_some)(dtype, nontemporal, 1, WIDE, resident, nr, of_row, r_stride, s_stride, c, VL, to + s);
            }
        }
    }
    for (ptrdiff_t c = wide; c < n; c += VL) {
        const ptrdiff_t tail = n - c < VL ? n - c : VL;
        for (ptrdiff_t s = 0; s < ns; s += ns == K(NARROW) ? K(NARROW) : 1) {
            const real *of_row = p + s * s_stride;
            if (ns == K(NARROW)) {
                K(write_some)(dtype, nontemporal, K(NARROW), 1, resident, nr, of_row, r_stride, s_stride, c, tail, to);
            } else {
                K(write_some)(dtype, nontemporal, 1, 1, resident, nr, of_row, r_stride, s_stride, c, tail, to + s);
            }
        }
    }
}

/* The same as write_rows of few features, with s_stride 1: columns of results, rounded, are transposed into rows. */
static void K(write_columns)(ag_variant variant, const ag_rows *resident, const ag_rows *to, ptrdiff_t first, ptrdiff_t n,
                             const real *p, ptrdiff_t pitch)
{
    const ag_dtype own = AG_IS_F64 ? AG_FLOAT64 : AG_FLOAT32, dtype = to->matrix.dtype;
    const int itemsize = ag_itemsize[dtype];
    const ptrdiff_t count = to->count, runs = K(is_run)(to) ? 1 : count;
    const ag_rows right = {{(char *)p, pitch * (ptrdiff_t)sizeof(real), sizeof(real), own, 0}, 0, 0, resident->count};
    real left[K(THIN)][AG_TERMS], columns[K(THIN)][AG_STREAMED];
    char buffer[AG_TERMS * K(THIN) * sizeof(real)], rounded[AG_STREAMED * 8];
    const char *rows[AG_TERMS];
    K(load_resident)(resident, first, n, buffer, K(THIN) * sizeof(real), rows);
    for (ptrdiff_t r = 0; r < resident->count; r++) {
        for (ptrdiff_t k = 0; k < n; k++) memcpy(&left[k][r], rows[r] + k * (ptrdiff_t)sizeof(real), sizeof(real));
    }
    K(sum_rows_of)(own, n, &right, 0, count, left[0], AG_TERMS, columns[0], AG_STREAMED, 0);
    for (ptrdiff_t k = 0; k < n; k++) {
        const char *source = (const char *)columns[k];
        if (dtype != own) {
            ag_round(variant, AG_IS_F64, source, dtype, rounded, count);
            source = rounded;
        }
        for (ptrdiff_t i = 0; i < runs; i++) {
            const int64_t row = to->numbers ? to->numbers[i] : to->start;
            ag_copy_rows(AG_VARIANT_BASELINE, to->matrix.data + row * to->matrix.row_stride + (first + k) * to->matrix.step, 0,
                         to->matrix.row_stride, source + i * itemsize, 0, itemsize, 1, count / runs, itemsize,
                         to->matrix.swapped);
        }
    }
}

/* Row s of `to`, features [first, first + n), = sum over the resident rows (at most AG_TERMS) of p(r, s) row r: rounded once,
 * to any dtype and layout. */
static void K(write_rows)(ag_variant variant, const ag_rows *resident, const ag_rows *to, ptrdiff_t first, ptrdiff_t n,
                          const void *p, ptrdiff_t r_stride, ptrdiff_t s_stride, int nontemporal)
{
    const ag_dtype own = AG_IS_F64 ? AG_FLOAT64 : AG_FLOAT32, dtype = to->matrix.dtype;
    const int itemsize = ag_itemsize[dtype], is_dense = to->matrix.step == itemsize && !to->matrix.swapped;
    const int is_direct = is_dense && (dtype == own || (!AG_IS_F64 && itemsize == 2));
    const ptrdiff_t divisor = (resident->count + AG_RESIDENT - 1) / AG_RESIDENT;
    const ptrdiff_t most = K(is_in_place)(&resident->matrix) ? K(SEGMENT) : K(SHORT) / divisor / VL * VL;
    char buffer[AG_RESIDENT * K(SHORT) * sizeof(real)], results[K(NARROW)][4096], rounded[4096];
    const char *rows[AG_TERMS];
    if (n <= K(THIN) && s_stride == 1 && to->count <= AG_STREAMED) {
        K(write_columns)(variant, resident, to, first, n, p, r_stride);
        return;
    }
    for (ptrdiff_t done = 0; done < n; done += most) {
        const ptrdiff_t length = n - done < most ? n - done : most;
        K(load_resident)(resident, first + done, length, buffer, most * (ptrdiff_t)sizeof(real), rows);
        for (ptrdiff_t s = 0; s < to->count; s += K(NARROW)) {
            const ptrdiff_t ns = to->count - s < K(NARROW) ? to->count - s : K(NARROW);
            const real *of_rows = (const real *)p + s * s_stride;
            char *targets[K(NARROW)] = {0}, *places[K(NARROW)] = {0};
            int is_aligned = nontemporal;
            for (ptrdiff_t i = 0; i < ns; i++) {
                const int64_t row = to->numbers ? to->numbers[s + i] : to->start + s + i;
                places[i] = to->matrix.data + row * to->matrix.row_stride + (first + done) * to->matrix.step;
                targets[i] = is_direct ? places[i] : results[i];
                is_aligned &= ((uintptr_t)places[i] & (VL * (size_t)itemsize - 1)) == 0;
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

/* ---- what logits become: a tile of b->rows x b->vocab values ------------------------------------------ */

/* Logits, or the caller's probabilities where there are none, become P. */
static void K(tile_to_gradient)(const ag_lce_block *b, void *tile)
{
    const ag_rows softmax = {b->softmax, b->row_numbers, 0, b->rows};
    char buffer[4096];
    for (ptrdiff_t i = 0; i < b->rows; i++) {
        real *row = (real *)tile + i * b->tile_pitch;
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
static void K(tile_to_max_sum)(const ag_lce_block *b, const void *tile, void *max, double *sum)
{
    for (ptrdiff_t i = 0; i < b->rows; i++) {
        const real *row = (const real *)tile + i * b->tile_pitch;
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

/* ---- the same of a tile of b->vocab x b->rows values, which holds all words: lanes are rows -------------------------------- */

static void K(columns_to_gradient)(const ag_lce_block *b, void *to)
{
    const ag_rows softmax = {b->softmax, b->row_numbers, 0, b->rows};
    char buffer[4096];
    real *tile = to;
    if (b->softmax.data) {
        for (ptrdiff_t i = 0; i < b->rows; i++) {
            const real *row = (const real *)K(dense)(&softmax, i, 0, b->vocab, buffer);
            for (ptrdiff_t c = 0; c < b->vocab; c++) memcpy(tile + c * b->tile_pitch + i, row + c, sizeof(real));
        }
    }
    for (ptrdiff_t i = 0; i < b->rows && !b->softmax.data; i += VL) {
        const V max = K(load_some)((const real *)b->max + i, b->rows - i);
        const V sum = K(load_some)((const real *)b->sum + i, b->rows - i);
        for (real *x = tile + i; x < tile + b->vocab * b->tile_pitch; x += b->tile_pitch) {
            V_(store)(x, V_(exp)(V_(load)(x) - max) / sum);
        }
    }
    for (ptrdiff_t i = 0; i < b->rows; i++) {
        if (b->target[i] >= 0 && b->target[i] < b->vocab) tile[b->target[i] * b->tile_pitch + i] -= 1;
    }
    for (ptrdiff_t i = 0; i < b->rows; i += VL) {
        const V grad = K(load_some)((const real *)b->grad + i, b->rows - i);
        for (real *x = tile + i; x < tile + b->vocab * b->tile_pitch; x += b->tile_pitch) {
            V p = V_(load)(x) * grad;
#if !AG_IS_F64
            if (b->round_to_bfloat16) p = v_bf16_widen(v_bf16_narrow(p));
#endif
            V_(store)(x, p);
        }
    }
}

/* Maximum and sum of every row: there are no others to be merged with. */
static void K(columns_to_max_sum)(const ag_lce_block *b, const void *from, void *max, double *sum)
{
    const real *tile = from, *end = tile + b->vocab * b->tile_pitch;
    for (ptrdiff_t i = 0; i < b->rows; i += VL) {
        const ptrdiff_t left = b->rows - i < VL ? b->rows - i : VL;
        real sums[VL];
        V largest = V_(set1)((real)-INFINITY), total = {0};
        for (const real *x = tile + i; x < end; x += b->tile_pitch) largest = V_(max)(V_(load)(x), largest);
        const V shift = V_(select)(largest == (real)-INFINITY, (V){0}, largest);
        for (const real *x = tile + i; x < end;) {
            V part = {0}; /* short chains */
            for (int k = 0; k < 8 && x < end; k++, x += b->tile_pitch) part += V_(exp)(V_(load)(x) - shift);
            total += part;
        }
        K(store_some)((real *)max + i, largest, left);
        V_(store)(sums, total);
        for (ptrdiff_t k = i; k < i + left; k++) {
            sum[k] = sums[k - i];
            if (sum[k] == sum[k]) continue;
            /* NaN among the logits makes the maximum NaN; infinity makes the sum NaN alone */
            for (const real *x = tile + k; x < end; x += b->tile_pitch) {
                if (*x != *x) ((real *)max)[k] = *x;
            }
        }
    }
    for (ptrdiff_t i = 0; i < b->rows; i++) {
        if (b->target[i] >= 0 && b->target[i] < b->vocab) {
            ((real *)b->predicted)[b->row_numbers[i]] = tile[b->target[i] * b->tile_pitch + i];
        }
        if (b->logits_out.data) {
            real row[AG_RESIDENT];
            for (ptrdiff_t c = 0; c < b->vocab; c++) row[c] = tile[c * b->tile_pitch + i];
            K(put_logits)(b, i, 0, row, b->vocab);
        }
    }
}

#endif

#undef AG_BY_DTYPE
