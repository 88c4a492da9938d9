/* Products of packed panels, for one kind of arithmetic and one instruction set. Included by kernels.h; the manual is
 * linear.h. */

/* ---- steps of a product -------------------------------------------------------------------------------------- */

/* Only the matrix unit has a state. */
AG_INLINE void K(begin_task)(void) {}
AG_INLINE void K(end_task)(void) {}

/* Return c + a * b. For pairs, add both products, the second one first, as the instruction does. */
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

AG_INLINE V K(broadcast)(const elem_t *p)
{
#if AG_IS_DOT
    return (V)(*p + (u32v){0});
#else
    return V_(set1)(*p);
#endif
}

/* Set all accumulators of a tile to 0. */
AG_INLINE void K(clear)(const int nv, V sum[MR][NV])
{
    AG_UNROLL(8)
    for (int r = 0; r < MR; r++) {
        AG_UNROLL(3)
        for (int j = 0; j < nv; j++) sum[r][j] = (V){0};
    }
}

/* Add a chain to a tile in memory, rows of which are NR accumulators apart. An only chain has no compensation. */
AG_INLINE void K(add_chain)(const int nv, const int is_first, const int is_only, V sum[MR][NV], acc_t *tile, acc_t *compensation)
{
    AG_UNROLL(8)
    for (int r = 0; r < MR; r++) {
        AG_UNROLL(3)
        for (int j = 0; j < nv; j++) {
            const ptrdiff_t at = r * NR + j * VL;
            V total = sum[r][j], error = {0};
            if (!is_first) {
                total = V_(load)(tile + at), error = V_(load)(compensation + at);
                K(add_compensated)(&total, &error, sum[r][j]);
            }
            if (!is_only) V_(store)(compensation + at, error);
            V_(store)(tile + at, total);
        }
    }
}

/* Apply the compensation of a tile. */
AG_INLINE void K(end_chains)(const int nv, acc_t *tile, const acc_t *compensation)
{
    for (int r = 0; r < MR; r++) {
        for (int j = 0; j < nv; j++) {
            const ptrdiff_t at = r * NR + j * VL;
            V_(store)(tile + at, K(compensated)(V_(load)(tile + at), V_(load)(compensation + at)));
        }
    }
}

/* Add a[k * a_step + r * a_row] * b[k][j] to sum[r][j] over n elements k, for MR rows and nv vectors. Both operands are
 * prefetched, which gains 5 to 20 % on CPUs whose own prefetching stops at L2. The left operand is next read at
 * `prefetched`, and from there in steps of prefetched_step elements. */
AG_INLINE void K(chain)(const int nv, const elem_t *a, const ptrdiff_t a_step, const ptrdiff_t a_row, const elem_t *prefetched,
                        const ptrdiff_t prefetched_step, const elem_t *b, ptrdiff_t n, V sum[MR][NV])
{
    for (; n > 0; n--, a += a_step, prefetched += prefetched_step, b += nv * VL) {
        V right[NV];
        __builtin_prefetch(prefetched);
        AG_UNROLL(3)
        for (int j = 0; j < nv; j++) {
            memcpy(&right[j], b + j * VL, sizeof(V));
            __builtin_prefetch(b + AG_PREFETCH_DISTANCE * nv * VL + j * VL);
        }
        AG_UNROLL(8)
        for (int r = 0; r < MR; r++) {
            const V left = K(broadcast)(a + r * a_row);
            AG_UNROLL(3)
            for (int j = 0; j < nv; j++) sum[r][j] = K(multiply_add)(left, right[j], sum[r][j]);
        }
    }
}

/* Layouts of P as the left operand: rows of its panels, columns of one panel. */
enum { K(ROWS), K(COLUMNS) };

/* Compute the tile of a product with P over n elements, in chains of at most AG_P_CHAIN terms that are combined with
 * compensation. `panel` is the distance between panels of P. Rows of the tile are NR accumulators apart. */
AG_INLINE void K(product)(const int nv, const int form, const elem_t *a, ptrdiff_t panel, const elem_t *b, ptrdiff_t n,
                          acc_t *tile)
{
    enum { WIDTH = NR / PAIR };
    const ptrdiff_t granule = form == K(ROWS) ? WIDTH : 1; /* chains end at the ends of panels */
    const ptrdiff_t limit = (AG_IS_DOT ? AG_CHAIN : AG_P_CHAIN) / PAIR / granule * granule; /* pairs have a rounded P */
    const ptrdiff_t chains = n > limit ? (n + limit - 1) / limit : 1;
    const ptrdiff_t length = ((n + chains - 1) / chains + granule - 1) / granule * granule;
    acc_t compensation[MR * NR];
    for (ptrdiff_t done = 0; done < n || done == 0; done += length ? length : 1) {
        V sum[MR][NV];
        const ptrdiff_t count = n - done < length ? n - done : length;
        K(clear)(nv, sum);
        if (form == K(ROWS)) {
            for (ptrdiff_t k = 0; k < count; k += WIDTH, a += panel) {
                const ptrdiff_t part = count - k < WIDTH ? count - k : WIDTH;
                K(chain)(nv, a, 1, WIDTH, a + panel, MR, b, part, sum); /* the tile in the next panel is prefetched */
                b += part * nv * VL;
            }
        } else {
            K(chain)(nv, a, NR, 1, a + AG_PREFETCH_DISTANCE * NR, NR, b, count, sum);
            a += count * NR;
            b += count * nv * VL;
        }
        K(add_chain)(nv, done == 0, chains == 1, sum, tile, compensation);
    }
    if (chains > 1) K(end_chains)(nv, tile, compensation);
}

/* Add element k of rows[r] times b[k][j] to sum[r][j], for elements k from `first` up to `end`, MR rows and nv vectors. Rows lie
 * at any address; rows of b are NR elements. */
AG_INLINE void K(chain_of_rows)(const int nv, const char *const rows[MR], ptrdiff_t first, ptrdiff_t end, const elem_t *b,
                                V sum[MR][NV])
{
    for (ptrdiff_t k = first; k < end; k++, b += NR) {
        V right[NV];
        AG_UNROLL(3)
        for (int j = 0; j < nv; j++) {
            memcpy(&right[j], b + j * VL, sizeof(V));
            __builtin_prefetch(b + AG_PREFETCH_DISTANCE * NR + j * VL);
        }
        AG_UNROLL(8)
        for (int r = 0; r < MR; r++) {
            elem_t x;
            memcpy(&x, rows[r] + k * (ptrdiff_t)sizeof(elem_t), sizeof x);
            const V left = K(broadcast)(&x);
            AG_UNROLL(3)
            for (int j = 0; j < nv; j++) sum[r][j] = K(multiply_add)(left, right[j], sum[r][j]);
        }
    }
}

/* Return the number of row r of the left operand; that of the last one, if r is larger. */
AG_INLINE int64_t K(left_number)(const ag_rows *left, ptrdiff_t r)
{
    const ptrdiff_t i = r < left->count ? r : left->count - 1;
    return left->numbers ? left->numbers[i] : left->start + i;
}

/* Compute a tile of logits over n values: rows [first, first + MR) of the left operand times a panel, in chains of at most
 * AG_CHAIN terms. Rows beyond the last one give any numbers. */
AG_INLINE void K(product_of_rows)(const int nv, const ag_rows *left, ptrdiff_t first, const elem_t *b, ptrdiff_t n, acc_t *tile)
{
    const ptrdiff_t elements = (n + PAIR - 1) / PAIR, whole = n / PAIR, limit = AG_CHAIN / PAIR, size = sizeof(elem_t);
    const ptrdiff_t chains = elements > limit ? (elements + limit - 1) / limit : 1, length = (elements + chains - 1) / chains;
    const int in_place = K(is_in_place)(&left->matrix);
    const ptrdiff_t step = in_place ? length : AG_FETCH / PAIR;
    const char *rows[MR];
    char buffer[MR][AG_FETCH * sizeof(acc_t)];
    acc_t compensation[MR * NR];
    for (ptrdiff_t r = 0; in_place && r < MR; r++) {
        rows[r] = left->matrix.data + K(left_number)(left, first + r) * left->matrix.row_stride;
    }
    for (ptrdiff_t done = 0; done < elements || done == 0; done += length ? length : 1) {
        V sum[MR][NV];
        const ptrdiff_t end = elements - done < length ? elements : done + length;
        K(clear)(nv, sum);
        for (ptrdiff_t k = done; k < end; k += step) {
            const ptrdiff_t last = end - k < step ? end : k + step, values = (last * PAIR < n ? last * PAIR : n) - k * PAIR;
            const ptrdiff_t origin = in_place ? 0 : k; /* the element to which rows[r] points */
            for (ptrdiff_t r = 0; !in_place && r < MR; r++) {
                rows[r] = K(fetch)(&left->matrix, K(left_number)(left, first + r), k * PAIR, values, buffer[r]);
            }
            K(chain_of_rows)(nv, rows, k - origin, (last < whole ? last : whole) - origin, b + k * NR, sum);
            if (last > whole) { /* the last value has no partner */
                elem_t pairs[MR] = {0};
                const char *of_rows[MR];
                for (ptrdiff_t r = 0; r < MR; r++) {
                    memcpy(&pairs[r], rows[r] + (whole - origin) * size, sizeof(elem_t) / PAIR);
                    of_rows[r] = (const char *)&pairs[r];
                }
                K(chain_of_rows)(nv, of_rows, 0, 1, b + whole * NR, sum);
            }
        }
        K(add_chain)(nv, done == 0, chains == 1, sum, tile, compensation);
    }
    if (chains > 1) K(end_chains)(nv, tile, compensation);
}

/* Define one function for each number of vectors, so that the compiler instantiates each once. */
#define AG_DEFINE_PRODUCTS(nv)                                                                                          \
    static void K(AG_CONCAT2(product_logits, nv))(const ag_rows *left, ptrdiff_t first, const elem_t *b, ptrdiff_t n,      \
                                                  acc_t *tile)                                                          \
    {                                                                                                                   \
        K(product_of_rows)(nv, left, first, b, n, tile);                                                                \
    }                                                                                                                   \
    static void K(AG_CONCAT2(product_rows, nv))(const elem_t *a, ptrdiff_t panel, const elem_t *b, ptrdiff_t n, acc_t *tile)  \
    {                                                                                                                   \
        K(product)(nv, K(ROWS), a, panel, b, n, tile);                                                                  \
    }                                                                                                                   \
    static void K(AG_CONCAT2(product_columns, nv))(const elem_t *a, const elem_t *b, ptrdiff_t n, acc_t *tile)               \
    {                                                                                                                   \
        K(product)(nv, K(COLUMNS), a, 0, b, n, tile);                                                                   \
    }
AG_DEFINE_PRODUCTS(1)
AG_DEFINE_PRODUCTS(2)
AG_DEFINE_PRODUCTS(3)
#undef AG_DEFINE_PRODUCTS

/* Compute a tile of logits: tile t of the left operand times panel p of the right one, n values along the sums. */
static void K(product_logits)(const ag_packed *packed, int nv, ptrdiff_t t, ptrdiff_t p, ptrdiff_t n, acc_t *tile)
{
    const elem_t *right = (const elem_t *)packed->right + p * K(elements)(n) * NR;
    switch (nv) {
    case 1:
        K(product_logits_1)(&packed->left, t * MR, right, n, tile);
        break;
    case 2:
        K(product_logits_2)(&packed->left, t * MR, right, n, tile);
        break;
    default:
        K(product_logits_3)(&packed->left, t * MR, right, n, tile);
    }
}

static void K(product_rows)(int nv, const elem_t *a, ptrdiff_t panel, const elem_t *b, ptrdiff_t n, acc_t *tile)
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

static void K(product_columns)(int nv, const elem_t *a, const elem_t *b, ptrdiff_t n, acc_t *tile)
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
