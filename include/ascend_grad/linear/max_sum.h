/* The epilogue of statistics: maxima and sums of exponentials of a tile of logits, for one kind of arithmetic and one instruction
 * set. Included by kernels.h; the manual is linear.h. */

/* Rows whose statistics are computed together, as lanes of a vector. */
#define GROUP (MR < VL ? MR : VL)

/* Return half the lanes of each row, the first or the second half: rows of a, then rows of b. A row has `width` lanes. */
AG_INLINE V K(half_of_rows)(V a, V b, const int width, const int second)
{
    const int half = width / 2;
#if defined(__clang__)
    V result;
    for (int l = 0; l < VL; l++) {
        const int lane = l % (VL / 2) / half * width + l % half + second * half;
        result[l] = l < VL / 2 ? a[lane] : b[lane];
    }
    return result;
#else
    LANES pick;
    AG_UNROLL(16)
    for (int l = 0; l < VL; l++) pick[l] = (l < VL / 2 ? 0 : VL) + l % (VL / 2) / half * width + l % half + second * half;
    return __builtin_shuffle(a, b, pick);
#endif
}

/* Reduce n vectors, whose rows have `width` lanes each, to half as many vectors, whose rows have half as many lanes. */
AG_INLINE void K(halve_rows)(V x[GROUP], const int n, const int width, const int is_sum)
{
    AG_UNROLL(8)
    for (int i = 0; i < (n + 1) / 2; i++) {
        const V a = x[2 * i], b = x[2 * i + 1 < n ? 2 * i + 1 : 2 * i];
        const V first = K(half_of_rows)(a, b, width, 0), second = K(half_of_rows)(a, b, width, 1);
        x[i] = is_sum ? first + second : V_(max)(first, second);
    }
}

/* Reduce GROUP vectors, one for each row, to a vector whose lanes are the sums or maxima of the rows. Sums are added in the order
 * of reduce_sum. */
AG_INLINE V K(reduce_rows)(const V rows[GROUP], const int is_sum)
{
    V x[GROUP];
    AG_UNROLL(16)
    for (int r = 0; r < GROUP; r++) x[r] = rows[r];
    K(halve_rows)(x, GROUP, VL, is_sum);
    if (VL >= 4) K(halve_rows)(x, (GROUP + 1) / 2, VL >= 4 ? VL / 2 : 2, is_sum);
    if (VL >= 8) K(halve_rows)(x, (GROUP + 3) / 4, VL >= 8 ? VL / 4 : 2, is_sum);
    if (VL >= 16) K(halve_rows)(x, (GROUP + 7) / 8, VL >= 16 ? VL / 8 : 2, is_sum);
    return x[0];
}

/* Load vector j of a row of a tile. Lanes beyond the last column are -inf. */
AG_INLINE V K(load_logits_of_row)(const acc_t *row, int j, ptrdiff_t columns)
{
    const V x = V_(load)(row + j * VL);
    if (columns - j * VL >= VL) return x;
    return V_(first)(columns > j * VL ? columns - j * VL : 0, x, V_(set1)((acc_t)-INFINITY));
}

/* Compute the largest logit of each row of a tile and the sum of the exponentials relative to it. Store the logits of the
 * targets, and all logits if the caller requests them. */
static void K(store_max_sum)(const ag_linear_block *b, ptrdiff_t panel, ptrdiff_t tile_index, const acc_t *tile)
{
    const ptrdiff_t rows = K(padded_rows)(b), left = b->vocab.size - panel * NR, columns = left < NR ? left : NR;
    const ptrdiff_t tile_rows = b->chunk.rows - tile_index * MR < MR ? b->chunk.rows - tile_index * MR : MR;
    const V lowest = V_(set1)((acc_t)-INFINITY), zero = {0};
    const int with_rest = b->statistics.rest != 0, caches_exp = b->packed.caches_logits && b->packed.caches_exp;
    for (ptrdiff_t begin = 0; begin < tile_rows; begin += GROUP) {
        const ptrdiff_t first = tile_index * MR + begin, n = tile_rows - begin < GROUP ? tile_rows - begin : GROUP;
        const ptrdiff_t place = panel * rows + first;
        char *cached = caches_exp ? K(cached_tile)(b, panel, tile_index) : NULL;
        V partial[GROUP], others[GROUP];
        acc_t maxima[VL], shifts[VL];
        for (ptrdiff_t r = n; r < GROUP; r++) partial[r] = others[r] = zero; /* rows beyond the last */
        for (ptrdiff_t r = 0; r < n; r++) {
            const acc_t *row = tile + (begin + r) * NR;
            partial[r] = K(load_logits_of_row)(row, 0, columns);
            AG_UNROLL(3)
            for (int j = 1; j < NV; j++) partial[r] = V_(max)(partial[r], K(load_logits_of_row)(row, j, columns));
        }
        V max = K(reduce_rows)(partial, 0);
        /* Exponentials relative to -inf would be NaN, although another panel may hold finite logits. */
        V_(store)(shifts, V_(select)(max == lowest, zero, max));
        for (ptrdiff_t r = 0; r < n; r++) {
            const acc_t *row = tile + (begin + r) * NR;
            const V shift = V_(set1)(shifts[r]);
            partial[r] = others[r] = zero;
            AG_UNROLL(3)
            for (int j = 0; j < NV; j++) {
                const V x = K(load_logits_of_row)(row, j, columns), e = V_(exp)(x - shift);
                partial[r] += e;
                if (with_rest) others[r] += V_(select)(x == shift, zero, e); /* as in rest_of_row */
#if !AG_IS_F64
                if (caches_exp) K(store_exp)(cached, begin + r, j, e);
#endif
            }
        }
        const V sum = K(reduce_rows)(partial, 1);
        V_(store)(maxima, max);
        if (V_(reduce_max)(V_(select)(sum != sum, V_(set1)(1), zero)) > 0) {
            /* A NaN among the logits makes the maximum NaN. An infinite logit makes the sum alone NaN. */
            for (ptrdiff_t r = 0; r < n; r++) {
                const acc_t *row = tile + (begin + r) * NR;
                for (ptrdiff_t c = 0; c < columns; c++) maxima[r] = row[c] != row[c] ? row[c] : maxima[r];
            }
            max = V_(load)(maxima);
        }
        K(store_some)((acc_t *)b->packed.panel_max + place, max, n);
        K(store_some)((acc_t *)b->packed.panel_sum + place, sum, n);
        if (caches_exp) K(store_some)((acc_t *)(cached + MR * NR * sizeof(uint16_t)) + begin, max, n);
        if (with_rest) {
            V rest = V_(select)(sum < V_(set1)((acc_t)AG_ACCURATE_SUM), K(reduce_rows)(others, 1), sum - 1);
            rest = V_(select)(max == lowest, V_(set1)((acc_t)NAN), rest);
            K(store_some)((acc_t *)b->packed.panel_rest + place, rest, n);
        }
        for (ptrdiff_t r = 0; r < n; r++) {
            const ptrdiff_t i = first + r;
            const acc_t *row = tile + (begin + r) * NR;
            if (b->statistics.with_more) {
                const acc_t before = ((const acc_t *)b->statistics.max)[b->chunk.row_numbers[i]];
                K(more_of_row)(b, i, row, panel * NR, columns, maxima[r], before, b->packed.panel_more + place + r);
            }
            if (b->statistics.target_logits) K(store_target_logits)(b, i, panel * NR, columns, row);
            const int64_t target = b->chunk.target[i] - b->vocab.start - panel * NR;
            if (b->chunk.target[i] >= 0 && target >= 0 && target < NR) {
                ((acc_t *)b->statistics.predicted)[b->chunk.row_numbers[i]] = row[target];
            }
            if (b->statistics.logits.data) K(put_logits)(b, i, panel * NR, row, columns);
        }
    }
}

#undef GROUP
