/* Packing, and products of packed panels, for one kind of arithmetic and one instruction set. Body header, see base.h;
 * the manual is linear_cross_entropy.h.
 *
 * Expects AG_ISA, AG_LANES, AG_DTYPE (the kind: f32, f64 or dot) with AG_IS_F64 and AG_IS_DOT, and AG_MR.
 * Leaves its short names defined for cross_entropy_body.h, which undefines them.
 */

#define K(name) AG_KERNEL_NAME(name)
#define MR AG_MR
#define NV 3          /* vectors of a panel */
#define NR (NV * VL)  /* its width; a multiple of MR, so that panels of P split into tiles of either product */

#if AG_IS_F64
#define VL (AG_LANES / 2)
#define V f64v
#define LANES i64v
#define real double
#define unit double
#define PAIR 1
#define V_(name) AG_CONCAT2(ag_v_f64, AG_CONCAT2(name, AG_ISA))
#else
#define VL AG_LANES
#define V f32v
#define LANES i32v
#define real float
#define V_(name) AG_CONCAT2(ag_v_f32, AG_CONCAT2(name, AG_ISA))
#if AG_IS_DOT
#define unit uint32_t
#define PAIR 2
#else
#define unit float
#define PAIR 1
#endif
#endif

/* ---- rows of a matrix, as the kernels read them ----------------------------------------------------------------------- */

/* Values (bfloat16 for the dot product, else reals) of row `row`, columns [first, first + n): in place where they lie
 * there as such, else gathered and widened into `buffer`, as many reals. n is at most AG_FETCH. */
static const char *K(fetch)(const ag_matrix *from, int64_t row, ptrdiff_t first, ptrdiff_t n, void *buffer)
{
    const int itemsize = ag_itemsize[from->dtype];
    const char *source = from->data + row * from->row_stride + first * from->step;
    if (from->step != itemsize || from->swapped) {
        /* 16-bit values that are to be widened go to the upper half of what they become: widening runs ahead of no reader */
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
        return buffer;
    }
#endif
    return source;
}

/* ---- packing ----------------------------------------------------------------------------------------------------------- */

/* The same, without a call where the values lie there. */
AG_INLINE const char *K(row)(const ag_matrix *from, int64_t row, ptrdiff_t first, ptrdiff_t n, void *buffer)
{
    const int itemsize = AG_IS_DOT ? 2 : sizeof(real);
    if (from->step == itemsize && !from->swapped && ag_itemsize[from->dtype] == itemsize) {
        return from->data + row * from->row_stride + first * itemsize;
    }
    return K(fetch)(from, row, first, n, buffer);
}

/* One tile of X: to[k][r] = row rows[r] of `count` rows, unit k of columns [first, first + n); rows up to MR are zero.
 * (Without the list the rows are start, start + 1, ...) */
static void K(pack_tile)(void *to, const ag_matrix *from, const int64_t *rows, int64_t start, ptrdiff_t count,
                         ptrdiff_t first, ptrdiff_t n)
{
    char buffer[AG_FETCH * sizeof(real)];
    for (ptrdiff_t r = 0; r < MR; r++) {
        for (ptrdiff_t begin = 0; begin < n; begin += AG_FETCH) {
            const ptrdiff_t length = n - begin < AG_FETCH ? n - begin : AG_FETCH;
            const ptrdiff_t units = length / PAIR;
            unit *column = (unit *)to + begin / PAIR * MR + r, last = 0;
            const char *source;
            if (r >= count) {
                for (ptrdiff_t k = 0; k < (length + PAIR - 1) / PAIR; k++) column[k * MR] = 0;
                continue;
            }
            source = K(row)(from, rows ? rows[r] : start + r, first + begin, length, buffer);
            for (ptrdiff_t k = 0; k < units; k++) memcpy(&column[k * MR], source + k * sizeof(unit), sizeof(unit));
            if (length % PAIR) {
                memcpy(&last, source + units * sizeof(unit), sizeof(unit) / PAIR);
                column[units * MR] = last;
            }
        }
    }
}

/* Lane l of a, or of b shifted by half a block: one step of a transposition. */
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

/* VL rows of VL units become columns. */
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

/* As many values as a vector has units, or pairs of them; zeros behind the first n. */
AG_INLINE V K(load_values)(const char *p, ptrdiff_t n)
{
    V v = {0};
    if (n == VL * PAIR) {
        memcpy(&v, p, sizeof v);
    } else {
#if AG_IS_DOT
        memcpy(&v, p, (size_t)n * 2);
#else
        v = V_(load_partial)(p, n);
#endif
    }
    return v;
}

/* One panel of W, NR rows wide, otherwise like pack_tile. */
static void K(pack_panel)(void *to, const ag_matrix *from, const int64_t *rows, int64_t start, ptrdiff_t count,
                          ptrdiff_t first, ptrdiff_t n)
{
    char buffer[VL][AG_FETCH * sizeof(real)];
    const char *source[VL];
    for (ptrdiff_t group = 0; group < NR; group += VL) {
        const ptrdiff_t there = count - group < VL ? count - group : VL;
        for (ptrdiff_t begin = 0; begin < n; begin += AG_FETCH) {
            const ptrdiff_t length = n - begin < AG_FETCH ? n - begin : AG_FETCH;
            unit *target = (unit *)to + begin / PAIR * NR + group;
            for (ptrdiff_t r = 0; r < there; r++) {
                source[r] = K(row)(from, rows ? rows[group + r] : start + group + r, first + begin, length, buffer[r]);
            }
            for (ptrdiff_t k = 0; k < length; k += VL * PAIR) {
                const ptrdiff_t values = length - k < VL * PAIR ? length - k : VL * PAIR;
                V x[VL];
                for (ptrdiff_t r = 0; r < VL; r++) {
                    x[r] = (V){0};
                    if (r < there) x[r] = K(load_values)(source[r] + (size_t)k * sizeof(unit) / PAIR, values);
                }
                K(transpose)(x);
                for (ptrdiff_t i = 0; i < (values + PAIR - 1) / PAIR; i++) {
                    memcpy(target + (k / PAIR + i) * NR, &x[i], sizeof(V));
                }
            }
        }
    }
}

/* to[k][c] = column first + c of row k; columns from n up to a multiple of the vector are zero (n <= NR). With pairs,
 * unit k holds rows 2k and 2k + 1. */
static void K(pack_columns)(void *to, const ag_matrix *from, const int64_t *rows, int64_t start, ptrdiff_t count,
                            ptrdiff_t first, ptrdiff_t n)
{
    const ptrdiff_t width = (n + VL - 1) / VL * VL;
    unit *target = to;
    char buffer[PAIR][AG_FETCH * sizeof(real)];
    for (ptrdiff_t k = 0; k < count; k += PAIR, target += width) {
        const char *source = K(row)(from, rows ? rows[k] : start + k, first, n, buffer[0]);
#if AG_IS_DOT
        const char *second = 0;
        if (k + 1 < count) second = K(row)(from, rows ? rows[k + 1] : start + k + 1, first, n, buffer[1]);
        for (ptrdiff_t c = 0; c < width; c += VL) {
            const ptrdiff_t left = n - c < VL ? n - c : VL;
            const u16v low = v_u16_load_partial(source + 2 * c, left);
            const u16v high = second ? v_u16_load_partial(second + 2 * c, left) : (u16v){0};
            const u32v pairs = __builtin_convertvector(low, u32v) | __builtin_convertvector(high, u32v) << 16;
            memcpy(target + c, &pairs, sizeof pairs);
        }
#else
        for (ptrdiff_t c = 0; c < width; c += VL) {
            const ptrdiff_t left = n - c < VL ? n - c : VL;
            V_(store)(target + c, left < VL ? V_(load_partial)(source + c * sizeof(real), left)
                                            : V_(load)(source + c * sizeof(real)));
        }
#endif
    }
}

/* ---- products ---------------------------------------------------------------------------------------------------------- */

/* c + a * b; for pairs, both products (the second first, as the instruction does it) */
AG_INLINE V K(multiply_add)(V a, V b, V c)
{
#if !AG_IS_DOT
    return V_(fma)(a, b, c);
#elif defined(AG_EMULATE_BF16)
    c = v_f32_fma((f32v)((u32v)a & 0xffff0000), (f32v)((u32v)b & 0xffff0000), c);
    return v_f32_fma((f32v)((u32v)a << 16), (f32v)((u32v)b << 16), c);
#else
    return _mm512_dpbf16_ps(c, (__m512bh)a, (__m512bh)b);
#endif
}

AG_INLINE V K(broadcast)(const unit *p)
{
#if AG_IS_DOT
    return (V)(*p + (u32v){0});
#else
    return V_(set1)(*p);
#endif
}

/* sum[r][j] += a[k * a_step + r * a_row] * b[k][j] over n units k: MR rows, nv vectors. Both operands are asked for ahead
 * of their use (5 to 20 % on CPUs whose own prefetching stops at the second cache): `ahead` and the units ahead_step after
 * it are what the left one needs next. */
AG_INLINE void K(chain)(const int nv, const unit *a, const ptrdiff_t a_step, const ptrdiff_t a_row, const unit *ahead,
                        const ptrdiff_t ahead_step, const unit *b, ptrdiff_t n, V sum[MR][NV])
{
    for (; n > 0; n--, a += a_step, ahead += ahead_step, b += nv * VL) {
        V right[NV];
        __builtin_prefetch(ahead);
        AG_UNROLL(3)
        for (int j = 0; j < nv; j++) {
            memcpy(&right[j], b + j * VL, sizeof(V));
            __builtin_prefetch(b + AG_AHEAD * nv * VL + j * VL);
        }
        AG_UNROLL(8)
        for (int r = 0; r < MR; r++) {
            const V left = K(broadcast)(a + r * a_row);
            AG_UNROLL(3)
            for (int j = 0; j < nv; j++) sum[r][j] = K(multiply_add)(left, right[j], sum[r][j]);
        }
    }
}

/* sum, and what its additions lost in low, += x (Knuth's two-sum) */
AG_INLINE void K(add_compensated)(V *sum, V *low, V x)
{
    const V total = *sum + x, part = total - *sum;
    *low += (*sum - (total - part)) + (x - part);
    *sum = total;
}

/* sum + low where the sum is finite */
AG_INLINE V K(compensated)(V sum, V low) { return V_(select)(sum - sum == 0, sum + low, sum); }

/* How the left operand lies: as tiles of X, as rows of panels of P, or as columns of one panel of P. */
enum { K(TILE), K(ROWS), K(COLUMNS) };

/* tile[r][c] = sum over n units, in chains of at most AG_CHAIN terms that are combined with compensation. `panel` is the
 * distance between panels of P. Rows of the tile are NR apart. */
AG_INLINE void K(product)(const int nv, const int form, const unit *a, ptrdiff_t panel, const unit *b, ptrdiff_t n,
                          real *tile)
{
    enum { WIDTH = NR / PAIR };
    const ptrdiff_t granule = form == K(ROWS) ? WIDTH : 1; /* a chain ends where a panel does */
    const ptrdiff_t limit = AG_CHAIN / PAIR / granule * granule;
    const ptrdiff_t chains = n > limit ? (n + limit - 1) / limit : 1;
    const ptrdiff_t length = ((n + chains - 1) / chains + granule - 1) / granule * granule;
    real low[MR * NR];
    for (ptrdiff_t done = 0; done < n || done == 0; done += length ? length : 1) {
        V sum[MR][NV];
        const ptrdiff_t count = n - done < length ? n - done : length;
        AG_UNROLL(8)
        for (int r = 0; r < MR; r++) {
            AG_UNROLL(3)
            for (int j = 0; j < nv; j++) sum[r][j] = (V){0};
        }
        if (form == K(ROWS)) {
            for (ptrdiff_t k = 0; k < count; k += WIDTH, a += panel) {
                const ptrdiff_t part = count - k < WIDTH ? count - k : WIDTH;
                K(chain)(nv, a, 1, WIDTH, a + panel, MR, b, part, sum); /* ahead: the tile in the next panel */
                b += part * nv * VL;
            }
        } else {
            const ptrdiff_t step = form == K(TILE) ? MR : NR;
            K(chain)(nv, a, step, 1, a + AG_AHEAD * step, step, b, count, sum);
            a += count * step;
            b += count * nv * VL;
        }
        AG_UNROLL(8)
        for (int r = 0; r < MR; r++) {
            AG_UNROLL(3)
            for (int j = 0; j < nv; j++) {
                const ptrdiff_t at = r * NR + j * VL;
                V total = sum[r][j], lost = {0};
                if (done > 0) {
                    total = V_(load)(tile + at), lost = V_(load)(low + at);
                    K(add_compensated)(&total, &lost, sum[r][j]);
                }
                if (chains > 1) V_(store)(low + at, lost);
                V_(store)(tile + at, total);
            }
        }
    }
    if (chains == 1) return;
    for (int r = 0; r < MR; r++) {
        for (int j = 0; j < nv; j++) {
            const ptrdiff_t at = r * NR + j * VL;
            V_(store)(tile + at, K(compensated)(V_(load)(tile + at), V_(load)(low + at)));
        }
    }
}

static void K(product_logits)(const unit *a, const unit *b, ptrdiff_t n, real *tile)
{
    K(product)(NV, K(TILE), a, 0, b, n, tile);
}

/* One function per width, so that each is compiled once. */
#define AG_DEFINE_PRODUCTS(nv)                                                                                          \
    static void K(AG_CONCAT2(product_rows, nv))(const unit *a, ptrdiff_t panel, const unit *b, ptrdiff_t n, real *tile)  \
    {                                                                                                                   \
        K(product)(nv, K(ROWS), a, panel, b, n, tile);                                                                  \
    }                                                                                                                   \
    static void K(AG_CONCAT2(product_columns, nv))(const unit *a, const unit *b, ptrdiff_t n, real *tile)               \
    {                                                                                                                   \
        K(product)(nv, K(COLUMNS), a, 0, b, n, tile);                                                                   \
    }
AG_DEFINE_PRODUCTS(1)
AG_DEFINE_PRODUCTS(2)
AG_DEFINE_PRODUCTS(3)
#undef AG_DEFINE_PRODUCTS

static void K(product_rows)(int nv, const unit *a, ptrdiff_t panel, const unit *b, ptrdiff_t n, real *tile)
{
    switch (nv) {
    case 1:
        K(product_rows_1)(a, panel, b, n, tile);
        break;
    case 2:
        K(product_rows_2)(a, panel, b, n, tile);
        break;
    default:
        K(product_rows_3)(a, panel, b, n, tile);
    }
}

static void K(product_columns)(int nv, const unit *a, const unit *b, ptrdiff_t n, real *tile)
{
    switch (nv) {
    case 1:
        K(product_columns_1)(a, b, n, tile);
        break;
    case 2:
        K(product_columns_2)(a, b, n, tile);
        break;
    default:
        K(product_columns_3)(a, b, n, tile);
    }
}
