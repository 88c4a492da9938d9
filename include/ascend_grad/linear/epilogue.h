/* Sources and epilogues of tiles of logits, for one kind of arithmetic and one instruction set. Included by kernels.h; the
 * manual is linear.h. */

/* Return the number of rows of P, padded to whole tiles. */
AG_INLINE ptrdiff_t K(padded_rows)(const ag_linear_block *b) { return (b->chunk.rows + MR - 1) / MR * MR; }

/* ---- sources of a tile --------------------------------------------------------------------------------------------------- */

/* Return the address of a cached tile of logits, or of exponentials followed by the maxima of their rows. */
AG_INLINE char *K(cached_tile)(const ag_linear_block *b, ptrdiff_t panel, ptrdiff_t tile_index)
{
    const size_t row_bytes = b->packed.caches_exp ? NR * sizeof(uint16_t) + sizeof(acc_t) : NR * sizeof(acc_t);
    return (char *)b->packed.logits + (size_t)(panel * K(padded_rows)(b) + tile_index * MR) * row_bytes;
}

/* Load a tile of cached logits. */
static void K(load_logits)(const ag_linear_block *b, ptrdiff_t panel, ptrdiff_t tile_index, acc_t *tile)
{
    memcpy(tile, K(cached_tile)(b, panel, tile_index), MR * NR * sizeof(acc_t));
}

/* Store the first n lanes, or all of them if n is larger. */
AG_INLINE void K(store_some)(acc_t *p, V v, ptrdiff_t n)
{
    if (n < VL) {
        V_(store_partial)(p, v, n);
    } else {
        V_(store)(p, v);
    }
}

/* Load a tile of the caller's probabilities or logits. Elements beyond the last row and column are zero. */
static void K(load_softmax)(const ag_linear_block *b, ptrdiff_t panel, ptrdiff_t tile_index, acc_t *tile)
{
    const ag_matrix *from = &b->gradient.softmax;
    const ptrdiff_t left = b->vocab.size - panel * NR, n = left < NR ? left : NR;
    acc_t buffer[NR];
    memset(tile, 0, MR * NR * sizeof(acc_t));
    for (ptrdiff_t r = 0; r < MR && tile_index * MR + r < b->chunk.rows; r++) {
        const char *source = from->data + b->chunk.row_numbers[tile_index * MR + r] * from->row_stride +
                             (b->vocab.start + panel * NR) * from->step;
        if (from->step != sizeof(acc_t) || from->swapped) {
            ag_copy_block((char *)buffer, 0, sizeof(acc_t), source, 0, from->step, 1, n, sizeof(acc_t), from->swapped);
            source = (const char *)buffer;
        }
        for (ptrdiff_t c = 0; c < n; c += VL) {
            V_(store)(tile + r * NR + c, K(load_some)(source + c * sizeof(acc_t), n - c));
        }
    }
}

/* ---- sums in memory ------------------------------------------------------------------------------------------------------ */

/* Add the first n lanes of x to a sum in memory. x becomes the new sum, and `error` its compensation if memory for one is
 * given. */
AG_INLINE void K(add_to_sum)(V *x, V *error, const acc_t *sum, const acc_t *compensation, ptrdiff_t n)
{
    const V term = *x;
    *x = K(load_some)(sum, n);
    if (compensation) {
        *error = K(load_some)(compensation, n);
        K(add_compensated)(x, error, term);
    } else {
        *x += term;
    }
}

/* Store the first n lanes of a sum and of its compensation, or after the last addition the compensated sum. */
AG_INLINE void K(store_sum)(V total, V error, acc_t *sum, acc_t *compensation, int last, ptrdiff_t n)
{
    if (compensation && !last) K(store_some)(compensation, error, n);
    K(store_some)(sum, compensation && last ? K(compensated)(total, error) : total, n);
}

/* ---- epilogues of a tile of logits ---------------------------------------------------------------------------- */

/* Cache a tile of logits. */
static void K(store_logits)(const ag_linear_block *b, ptrdiff_t panel, ptrdiff_t tile_index, const acc_t *tile)
{
    memcpy(K(cached_tile)(b, panel, tile_index), tile, MR * NR * sizeof(acc_t));
}

#if !AG_IS_F64
/* Cache vector j of the exponentials of a row in float16. With the scale, those from 2**-29 on are normal numbers. */
AG_INLINE void K(store_exp)(char *cached, ptrdiff_t r, int j, V e)
{
    v_f16_store(cached + (r * NR + j * VL) * sizeof(uint16_t), e * V_(set1)(AG_EXP_SCALE));
}

/* Compute the factors that make rows of P of cached exponentials, without the targets. */
AG_INLINE void K(factors_of_exp)(const ag_linear_block *b, ptrdiff_t first, const char *cached, acc_t factors[])
{
    const acc_t *maxima = (const acc_t *)(cached + MR * NR * sizeof(uint16_t));
    const acc_t *max = (const acc_t *)b->chunk.max + first, *sum = (const acc_t *)b->chunk.sum + first;
    const acc_t *grad = (const acc_t *)b->chunk.grad + first;
    for (ptrdiff_t r = 0; r < MR; r += VL) {
        const ptrdiff_t n = MR - r < VL ? MR - r : VL;
        const V exp = V_(exp)(K(load_some)(maxima + r, n) - K(load_some)(max + r, n));
        const V factor = exp / K(load_some)(sum + r, n) * V_(set1)(1 / AG_EXP_SCALE);
        V_(store)(factors + r, factor * K(load_some)(grad + r, n));
    }
}

/* Compute a row of a tile of P from cached exponentials. The target's probability is computed from its logit, in float32. */
AG_INLINE void K(gradient_of_exp)(const ag_linear_block *b, ptrdiff_t i, ptrdiff_t target, const char *cached, V factor,
                                  acc_t *row)
{
    AG_UNROLL(3)
    for (int j = 0; j < NV; j++) V_(store)(row + j * VL, v_f16_load(cached + j * VL * sizeof(uint16_t)) * factor);
    if (target < 0 || target >= NR) return;
    const acc_t logit = ((const acc_t *)b->statistics.predicted)[b->chunk.row_numbers[i]];
    const V p = V_(exp)(V_(set1)(logit - ((const acc_t *)b->chunk.max)[i])) / V_(set1)(((const acc_t *)b->chunk.sum)[i]);
    row[target] = K(minus_one)(b, i, p[0]) * ((const acc_t *)b->chunk.grad)[i];
}
#endif

/* Return the place of vector j of row r in a tile of P, in values. BFMMLA reads 4 values of each row at a time. */
AG_INLINE ptrdiff_t K(place_in_p)(ptrdiff_t r, ptrdiff_t j)
{
    return AG_UNIT == AG_BFMMLA ? (j * MR + r) * VL : r * NR + j * VL;
}

#if AG_IS_DOT
/* Return vector j of rows r and r + 1 of a tile of P as pairs. */
AG_INLINE u32v K(pair_rows)(const uint16_t *tile, ptrdiff_t r, ptrdiff_t j)
{
    u16v low, high;
    memcpy(&low, tile + K(place_in_p)(r, j), sizeof low);
    memcpy(&high, tile + K(place_in_p)(r + 1, j), sizeof high);
    return __builtin_convertvector(low, u32v) | __builtin_convertvector(high, u32v) << 16;
}
#endif

/* Transform a tile of products to logits. */
static void K(transform_tile)(const ag_linear_block *b, ptrdiff_t panel, ptrdiff_t tile_index, acc_t *tile)
{
    for (ptrdiff_t r = 0; r < MR && tile_index * MR + r < b->chunk.rows; r++) {
        const ptrdiff_t left = b->vocab.size - panel * NR;
        K(transform_row)(b, tile_index * MR + r, panel * NR, left < NR ? left : NR, tile + r * NR);
    }
}

/* Where a tile of P comes from. */
enum { K(FROM_PROBABILITIES), K(FROM_LOGITS), K(FROM_EXP), K(FROM_COEFFICIENTS) };

/* Write a tile of P: probabilities minus the one-hot target, times grad, rounded. The tile holds logits or probabilities, or
 * nothing if exponentials are cached. With coefficients, P is made of logits and of the coefficients of each row. */
AG_INLINE void K(store_gradient)(const ag_linear_block *b, const int source, ptrdiff_t panel, ptrdiff_t tile_index, acc_t *tile)
{
    const int is_complete = source == K(FROM_COEFFICIENTS) || source == K(FROM_EXP); /* grad and targets are in the row */
    const ptrdiff_t rows = K(padded_rows)(b), left = b->vocab.size - panel * NR, columns = left < NR ? left : NR;
    const ptrdiff_t first = tile_index * MR;
#if AG_IS_DOT
    uint16_t *to = (uint16_t *)b->packed.p + (panel * rows + first) * NR;
    elem_t *pairs = (elem_t *)b->packed.p_pairs + (panel * rows + first) / PAIR * NR;
#else
    acc_t *to = (acc_t *)b->packed.p + (panel * rows + first) * NR;
#endif
    int is_small = b->gradient.filter_eps > 0;
#if !AG_IS_F64
    const char *cached = source == K(FROM_EXP) ? K(cached_tile)(b, panel, tile_index) : NULL;
    acc_t factors[MR + VL];
    if (source == K(FROM_EXP)) K(factors_of_exp)(b, first, cached, factors);
#endif
    for (ptrdiff_t r = 0; r < MR; r++) {
        const ptrdiff_t i = first + r;
        acc_t *row = tile + r * NR;
        if (i >= b->chunk.rows) {
            for (int j = 0; j < NV; j++) memset(to + K(place_in_p)(r, j), 0, VL * sizeof *to);
            continue;
        }
        const int64_t target = b->chunk.target[i] < 0 ? -1 : b->chunk.target[i] - b->vocab.start - panel * NR;
        if (source == K(FROM_COEFFICIENTS)) {
            K(general_gradient)(b, i, panel * NR, columns, row);
#if !AG_IS_F64
        } else if (source == K(FROM_EXP)) {
            K(gradient_of_exp)(b, i, target, cached + r * NR * sizeof(uint16_t), V_(set1)(factors[r]), row);
#endif
        } else if (source == K(FROM_LOGITS)) {
            const V max = V_(set1)(((const acc_t *)b->chunk.max)[i]), sum = V_(set1)(((const acc_t *)b->chunk.sum)[i]);
            AG_UNROLL(3)
            for (int j = 0; j < NV; j++) {
                V_(store)(row + j * VL, V_(exp)(V_(load)(row + j * VL) - max) / sum);
            }
        }
        if (!is_complete && target >= 0 && target < NR) row[target] = K(minus_one)(b, i, row[target]);
        const V grad = V_(set1)(is_complete ? 1 : ((const acc_t *)b->chunk.grad)[i]);
        for (int j = 0; j < NV; j++) {
            V p = V_(load)(row + j * VL);
            if (!is_complete) p *= grad;
            if (columns - j * VL < VL) p = V_(first)(columns > j * VL ? columns - j * VL : 0, p, (V){0});
            if (is_small) {
                /* A NaN is not small. */
                const V size = V_(max)(p, -p), bound = V_(set1)((acc_t)b->gradient.filter_eps);
                for (int lane = 0; lane < VL; lane++) is_small &= size[lane] < bound[lane];
            }
#if AG_IS_DOT
            v_bf16_store(to + K(place_in_p)(r, j), p);
#else
#if !AG_IS_F64
            if (b->gradient.round_to_bfloat16) p = v_bf16_widen(v_bf16_narrow(p));
#endif
            V_(store)(to + K(place_in_p)(r, j), p);
#endif
        }
    }
#if AG_IS_DOT
    for (int j = 0; j < NV; j++) {
#if AG_UNIT == AG_AMX
        V columns[VL]; /* pairs of rows, which become the rows of a left operand */
        for (ptrdiff_t k = 0; k < MR / 2; k++) columns[k] = (V)K(pair_rows)(to, 2 * k, j);
        K(transpose)(columns);
        memcpy(pairs + j * VL * (MR / 2), columns, sizeof columns);
#elif AG_UNIT == AG_BFMMLA
        for (ptrdiff_t k = 0; k < MR / 2; k += 2) {
            K(store_interleaved)(pairs + k * NR + j * VL * 2, K(pair_rows)(to, 2 * k, j), K(pair_rows)(to, 2 * k + 2, j));
        }
#else
        for (ptrdiff_t k = 0; k < MR / 2; k++) {
            const u32v both = K(pair_rows)(to, 2 * k, j);
            memcpy(pairs + k * NR + j * VL, &both, sizeof both);
        }
#endif
    }
#endif
    if (b->gradient.filter_eps > 0) b->packed.skipped[panel * (rows / MR) + tile_index] = (uint8_t)is_small;
}

static void K(store_gradient_of_logits)(const ag_linear_block *b, ptrdiff_t panel, ptrdiff_t tile_index, acc_t *tile)
{
    K(store_gradient)(b, K(FROM_LOGITS), panel, tile_index, tile);
}

static void K(store_gradient_of_softmax)(const ag_linear_block *b, ptrdiff_t panel, ptrdiff_t tile_index, acc_t *tile)
{
    K(store_gradient)(b, K(FROM_PROBABILITIES), panel, tile_index, tile);
}

static void K(store_general_gradient)(const ag_linear_block *b, ptrdiff_t panel, ptrdiff_t tile_index, acc_t *tile)
{
    K(store_gradient)(b, K(FROM_COEFFICIENTS), panel, tile_index, tile);
}

#if !AG_IS_F64
static void K(store_gradient_of_exp)(const ag_linear_block *b, ptrdiff_t panel, ptrdiff_t tile_index, acc_t *tile)
{
    K(store_gradient)(b, K(FROM_EXP), panel, tile_index, tile);
}
#endif

/* Write logits of row i, n vocabulary entries from `first` on, to the caller's result. */
static void K(put_logits)(const ag_linear_block *b, ptrdiff_t i, ptrdiff_t first, const acc_t *row, ptrdiff_t n)
{
    char *to = b->statistics.logits.data + b->chunk.row_numbers[i] * b->statistics.logits.row_stride +
               (b->vocab.start + first) * b->statistics.logits.step;
#if AG_IS_F64
    memcpy(to, row, (size_t)n * sizeof(acc_t));
#else
    for (ptrdiff_t c = 0; c < n; c += VL) {
        const ptrdiff_t left = n - c < VL ? n - c : VL;
        const V v = v_f32_load(row + c);
        if (b->statistics.logits.dtype == AG_FLOAT32) {
            v_f32_store_partial(to + 4 * c, v, left);
        } else if (b->statistics.logits.dtype == AG_FLOAT16) {
            v_f16_store_partial(to + 2 * c, v, left);
        } else {
            v_bf16_store_partial(to + 2 * c, v, left);
        }
    }
#endif
}
