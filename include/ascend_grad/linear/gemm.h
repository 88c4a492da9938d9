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

/* Layouts of the left operand: tiles of X, rows of panels of P, columns of one panel of P. */
enum { K(TILE), K(ROWS), K(COLUMNS) };

/* Compute the tile of a product over n elements, in chains of at most AG_CHAIN terms that are combined with compensation.
 * `panel` is the distance between panels of P. Rows of the tile are NR accumulators apart. */
AG_INLINE void K(product)(const int nv, const int form, const elem_t *a, ptrdiff_t panel, const elem_t *b, ptrdiff_t n,
                          acc_t *tile)
{
    enum { WIDTH = NR / PAIR };
    const ptrdiff_t granule = form == K(ROWS) ? WIDTH : 1; /* chains end at the ends of panels */
    const ptrdiff_t limit = AG_CHAIN / PAIR / granule * granule;
    const ptrdiff_t chains = n > limit ? (n + limit - 1) / limit : 1;
    const ptrdiff_t length = ((n + chains - 1) / chains + granule - 1) / granule * granule;
    acc_t compensation[MR * NR];
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
                K(chain)(nv, a, 1, WIDTH, a + panel, MR, b, part, sum); /* the tile in the next panel is prefetched */
                b += part * nv * VL;
            }
        } else {
            const ptrdiff_t step = form == K(TILE) ? MR : NR;
            K(chain)(nv, a, step, 1, a + AG_PREFETCH_DISTANCE * step, step, b, count, sum);
            a += count * step;
            b += count * nv * VL;
        }
        AG_UNROLL(8)
        for (int r = 0; r < MR; r++) {
            AG_UNROLL(3)
            for (int j = 0; j < nv; j++) {
                const ptrdiff_t at = r * NR + j * VL;
                V total = sum[r][j], error = {0};
                if (done > 0) {
                    total = V_(load)(tile + at), error = V_(load)(compensation + at);
                    K(add_compensated)(&total, &error, sum[r][j]);
                }
                if (chains > 1) V_(store)(compensation + at, error);
                V_(store)(tile + at, total);
            }
        }
    }
    if (chains == 1) return;
    for (int r = 0; r < MR; r++) {
        for (int j = 0; j < nv; j++) {
            const ptrdiff_t at = r * NR + j * VL;
            V_(store)(tile + at, K(compensated)(V_(load)(tile + at), V_(load)(compensation + at)));
        }
    }
}

static void K(product_logits)(const elem_t *a, const elem_t *b, ptrdiff_t n, acc_t *tile)
{
    K(product)(NV, K(TILE), a, 0, b, n, tile);
}

/* Define one function for each number of vectors, so that the compiler instantiates each once. */
#define AG_DEFINE_PRODUCTS(nv)                                                                                          \
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
