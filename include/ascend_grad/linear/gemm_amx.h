/* Steps of products on the matrix unit AMX, for gemm_unit.h. Included by kernels.h.
 *
 * The unit has eight tiles of 16 rows of 64 bytes. A step multiplies 16 pairs along the sum: two tiles of left rows (16 rows
 * of 16 pairs each), two tiles of right columns (16 pairs of 16 columns each), four tiles of sums.
 *
 * Order of a sum. A step adds to each sum one number: the products of the first elements of its 16 pairs run in one chain of
 * fused multiply-adds that begins at 0, the products of the second elements run in another chain, and the sum of both is added.
 * Denormal inputs and results of all these operations are flushed to zero. AG_AMX_CHAIN terms form a chain of steps; chains are
 * combined with compensation, as elsewhere. In units of 2**-24 of the sum of the terms' magnitudes, a chain of n terms errs by
 * at most 16 + 2 + n / 32.
 *
 * Tiles are configured at the start of each task and released at its end: no state is left that a context switch, a signal
 * or a fork would carry.
 */

enum { K(CHAIN) = AG_AMX_CHAIN / MR }; /* steps of a chain */

#if defined(AG_EMULATE_AMX)

/* State of the emulation: 1 while tiles of the calling thread are configured. */
static _Thread_local int K(is_configured);

AG_INLINE void K(begin_task)(void) { K(is_configured) = 1; }
AG_INLINE void K(end_task)(void) { K(is_configured) = 0; }

/* Return zeros of the same sign for denormal lanes. */
AG_INLINE V K(flushed)(V x)
{
    const V size = V_(max)(x, -x);
    return V_(select)(size < V_(set1)(0x1p-126f), (V)((u32v)x & 0x80000000), x);
}

AG_INLINE V K(flushed_multiply_add)(u32v a, u32v b, V c)
{
    return K(flushed)(v_f32_fma(K(flushed)((V)a), K(flushed)((V)b), c));
}

/* One tile of sums += one tile of left rows times one tile of right columns. */
static void K(multiply_tiles)(float *sums, ptrdiff_t pitch, const char *left, ptrdiff_t left_stride, const char *right,
                              ptrdiff_t right_stride)
{
    for (int r = 0; r < 16; r++) {
        V even = {0}, odd = {0};
        for (int k = 0; k < 16; k++) {
            uint32_t pair;
            u32v columns;
            memcpy(&pair, left + r * left_stride + k * 4, sizeof pair);
            memcpy(&columns, right + k * right_stride, sizeof columns);
            even = K(flushed_multiply_add)((pair << 16) + (u32v){0}, columns << 16, even);
            odd = K(flushed_multiply_add)((pair & 0xffff0000) + (u32v){0}, columns & 0xffff0000, odd);
        }
        V_(store)(sums + r * pitch, K(flushed)(V_(load)(sums + r * pitch) + K(flushed)(even + odd)));
    }
}

/* Compute a tile (MR, NR) of sums over some steps; nv: columns in vectors. Steps of the left operand are a_step bytes apart, its
 * rows a_row, and rows of the right operand b_row. With a tail, that is the last step of the left operand, whose rows are 64 bytes
 * apart. */
static void K(chain)(const int nv, const char *a, const ptrdiff_t a_step, ptrdiff_t a_row, const char *tail, const char *b,
                     const ptrdiff_t b_row, ptrdiff_t steps, acc_t *tile)
{
    if (!K(is_configured)) __builtin_trap(); /* as the unit does */
    memset(tile, 0, MR * NR * sizeof(acc_t));
    for (ptrdiff_t s = 0; s < steps; s++, a += a_step, b += 16 * b_row) {
        if (tail && s == steps - 1) a = tail, a_row = 64;
        for (int j = 0; j < nv; j++) {
            K(multiply_tiles)(tile + j * VL, NR, a, a_row, b + j * 64, b_row);
            K(multiply_tiles)(tile + 16 * NR + j * VL, NR, a + 16 * a_row, a_row, b + j * 64, b_row);
        }
    }
}

#else

AG_INLINE void K(begin_task)(void)
{
    static const struct {
        uint8_t palette, start_row, reserved[14];
        uint16_t row_bytes[16];
        uint8_t rows[16];
    } config = {.palette = 1,
                .row_bytes = {64, 64, 64, 64, 64, 64, 64, 64},
                .rows = {16, 16, 16, 16, 16, 16, 16, 16}};
    _tile_loadconfig(&config);
}

AG_INLINE void K(end_task)(void) { _tile_release(); }

/* Compute a tile (MR, NR) of sums over some steps; nv: columns in vectors. Steps of the left operand are a_step bytes apart, its
 * rows a_row, and rows of the right operand b_row. With a tail, that is the last step of the left operand, whose rows are 64 bytes
 * apart. Tiles 0 to 3 are sums, 4 and 5 left, 6 and 7 right. */
static void K(chain)(const int nv, const char *a, const ptrdiff_t a_step, ptrdiff_t a_row, const char *tail, const char *b,
                     const ptrdiff_t b_row, ptrdiff_t steps, acc_t *tile)
{
    const ptrdiff_t pitch = NR * sizeof(acc_t);
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
    for (ptrdiff_t s = 0; s < steps; s++, a += a_step, b += 16 * b_row) {
        if (tail && s == steps - 1) a = tail, a_row = 64;
        _tile_loadd(6, b, b_row);
        _tile_loadd(4, a, a_row);
        _tile_dpbf16ps(0, 4, 6);
        _tile_loadd(5, a + 16 * a_row, a_row);
        _tile_dpbf16ps(2, 5, 6);
        if (nv > 1) {
            _tile_loadd(7, b + 64, b_row);
            _tile_dpbf16ps(1, 4, 7);
            _tile_dpbf16ps(3, 5, 7);
        }
    }
    _tile_stored(0, tile, pitch);
    _tile_stored(1, tile + VL, pitch);
    _tile_stored(2, tile + 16 * NR, pitch);
    _tile_stored(3, tile + 16 * NR + VL, pitch);
}

#endif
