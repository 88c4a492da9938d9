/* Tasks of the packed sweep, made of tiles, for one kind of arithmetic and one instruction set. Included by kernels.h; the
 * manual is linear.h. */

/* ---- tasks ------------------------------------------------------------------------------------------------------- */

/* Run the epilogue of a tile, which holds products, logits or probabilities. */
static void K(convert_tile)(const ag_linear_block *b, ag_linear_source source, ag_linear_result result, ptrdiff_t p, ptrdiff_t t,
                            acc_t *tile)
{
    if (source == AG_FROM_PRODUCT && b->transform.is_needed) K(transform_tile)(b, p, t, tile);
    switch (result) {
    case AG_TO_MAX_SUM:
        if (b->packed.caches_logits && !b->packed.caches_exp) K(store_logits)(b, p, t, tile);
        K(store_max_sum)(b, p, t, tile);
        break;
    case AG_TO_TOP_K:
        K(store_top_k)(b, p, t, tile);
        break;
    case AG_TO_GRADIENT:
        if (b->gradient.is_general) {
            K(store_general_gradient)(b, p, t, tile);
        } else if (source == AG_FROM_SOFTMAX) {
            K(store_gradient_of_softmax)(b, p, t, tile);
#if !AG_IS_F64
        } else if (source == AG_FROM_LOGITS && b->packed.caches_exp) {
            K(store_gradient_of_exp)(b, p, t, tile);
#endif
        } else {
            K(store_gradient_of_logits)(b, p, t, tile);
        }
        break;
    }
}

/* Return the number of vectors of a panel of n columns, at most NV. */
AG_INLINE int K(vectors_of)(ptrdiff_t n) { return n < NR ? (int)((n + VL - 1) / VL) : NV; }

/* Compute products of NR rows, the panel g of X, and NR vocabulary entries from tiles of W: `tile` is (rows, entries). */
static void K(product_by_columns)(const ag_linear_block *b, ptrdiff_t p, ptrdiff_t g, acc_t *tile)
{
    acc_t columns[NR * NR] __attribute__((aligned(64)));
    const ptrdiff_t rows = b->chunk.rows - g * NR, left = b->vocab.size - p * NR, entries = left < NR ? left : NR;
    const int nv = K(vectors_of)(rows);
    for (ptrdiff_t i = 0; i * MR < entries; i++) {
        K(product_logits)(&b->packed, nv, p * (NR / MR) + i, g, b->hidden, columns + i * MR * NR);
    }
    for (ptrdiff_t row = 0; row < nv * VL; row += VL) {
        for (ptrdiff_t entry = 0; entry < entries; entry += VL) {
            V x[VL];
            AG_UNROLL(16)
            for (ptrdiff_t i = 0; i < VL; i++) x[i] = V_(load)(columns + (entry + i) * NR + row);
            K(transpose)(x);
            AG_UNROLL(16)
            for (ptrdiff_t i = 0; i < VL; i++) V_(store)(tile + (row + i) * NR + entry, x[i]);
        }
    }
}

/* Compute or load tiles of logits, and run their epilogue. If W is the left operand, tasks begin at panels of X. */
static void K(tiles)(const ag_linear_block *b, ag_linear_source source, ag_linear_result result, ptrdiff_t panel,
                     ptrdiff_t panel_end, ptrdiff_t tile_index, ptrdiff_t tile_end)
{
    const int by_columns = source == AG_FROM_PRODUCT && b->packed.weight_is_left;
    const ptrdiff_t step = by_columns ? NR / MR : 1;
    acc_t tile[NR * NR] __attribute__((aligned(64))); /* `step` tiles */
    K(begin_task)();
    for (ptrdiff_t t = tile_index; t < tile_end; t += step) {
        for (ptrdiff_t p = panel; p < panel_end; p++) {
            switch (source) {
            case AG_FROM_PRODUCT:
                if (by_columns) {
                    K(product_by_columns)(b, p, t / step, tile);
                } else {
                    K(product_logits)(&b->packed, K(vectors_of)(b->vocab.size - p * NR), t, p, b->hidden, tile);
                }
                break;
            case AG_FROM_LOGITS:
                if (!b->packed.caches_exp) K(load_logits)(b, p, t, tile);
                break;
            case AG_FROM_SOFTMAX:
                K(load_softmax)(b, p, t, tile);
                break;
            }
            for (ptrdiff_t i = 0; i < step && t + i < tile_end; i++) {
                K(convert_tile)(b, source, result, p, t + i, tile + i * MR * NR);
            }
        }
    }
    K(end_task)();
}

/* Merge moment, deficit and weight of panel p into the moment, deficit and weight of row i of the chunk, whose sum is `sum`
 * relative to the maximum `before`. The new maximum of the row is `largest`. */
static void K(merge_moments)(const ag_linear_block *b, ptrdiff_t i, ptrdiff_t p, double before, double largest, double sum)
{
    const ptrdiff_t place = p * K(padded_rows)(b) + i;
    const ag_more *more = b->packed.panel_more + place;
    ag_loss_row *row = b->rows + b->chunk.row_numbers[i];
    /* Relative to a maximum that is larger by d, the moment of a sum S becomes exp(-d) (moment + S d). */
    const double from_row = ag_max_distance(largest, before);
    const double d = ag_max_distance(largest, (double)((const acc_t *)b->packed.panel_max)[place]);
    double moment = sum == 0 ? 0 : (from_row == 0 ? 1 : exp(-from_row)) * (row->moment + sum * from_row);
    if (d < INFINITY) moment += exp(-d) * (more->moment + (double)((const acc_t *)b->packed.panel_sum)[place] * d);
    row->moment = moment;
    row->deficit += ag_weighted_distance(row->weight, from_row) + (more->deficit + ag_weighted_distance(more->weight, d));
    row->weight += more->weight;
}

enum { K(WIDE) = VL / (AG_LANES / 2) }; /* vectors of doubles to which a vector of accumulators is widened */

/* Widen a vector of accumulators to one or two vectors of doubles. */
AG_INLINE void K(widen)(V v, f64v wide[])
{
#if AG_IS_F64
    wide[0] = v;
#else
    v_f32_widen(v, &wide[0], &wide[1]);
#endif
}

/* Statistics of a vector of rows. `rest` are the sums without their largest term, -1 for no terms, and `holder` the panel of
 * this block that holds the maximum, -1 for earlier blocks. */
typedef struct {
    V max;
    LANES holder;
    f64v sum[K(WIDE)], compensation[K(WIDE)], rest[K(WIDE)];
} K(merged);

/* Multiply the sums of lanes that are not 0 in `is_new` by `factor`. `of_panel` become their sums without the largest term, to
 * which the earlier ones are added. */
AG_INLINE void K(rescale_sums)(K(merged) *rows, const LANES is_new, V factor, V of_panel)
{
    f64v by[K(WIDE)], first[K(WIDE)], mask[K(WIDE)];
    const V one = V_(set1)(1), zero = {0};
    K(widen)(V_(select)(is_new, factor, one), by);
    K(widen)(of_panel, first);
    K(widen)(V_(select)(is_new, one, zero), mask);
    for (int h = 0; h < K(WIDE); h++) {
        rows->sum[h] *= by[h], rows->compensation[h] *= by[h];
        rows->rest[h] = v_f64_select(mask[h] != 0, first[h] + (1 + rows->rest[h]) * by[h], rows->rest[h]);
    }
}

/* Merge the maxima and sums of a block's panels into the running ones of rows [row, row_end), a vector of rows at a time. Panels
 * are merged one after another, so that results do not depend on the blocks. */
static void K(merge_max_sum)(const ag_linear_block *b, ptrdiff_t row, ptrdiff_t row_end)
{
    enum { DOUBLES = AG_LANES / 2 };
    const ptrdiff_t rows = K(padded_rows)(b);
    const int panels = (int)((b->vocab.size + NR - 1) / NR);
    const V zero = {0};
    for (ptrdiff_t i = row; i < row_end; i += VL) {
        const ptrdiff_t count = row_end - i < VL ? row_end - i : VL;
        const int64_t *numbers = b->chunk.row_numbers + i;
        const acc_t *max = (const acc_t *)b->packed.panel_max + i, *sum = (const acc_t *)b->packed.panel_sum + i;
        const acc_t *of_rest = (const acc_t *)b->packed.panel_rest + i;
        acc_t maxima[VL] = {0}, before[VL];
        double total[VL] = {0}, compensation[VL] = {0}, rest[VL] = {0};
        K(merged) state;
        for (ptrdiff_t l = 0; l < count; l++) {
            maxima[l] = ((const acc_t *)b->statistics.max)[numbers[l]];
            total[l] = b->statistics.sum[numbers[l]].sum, compensation[l] = b->statistics.sum[numbers[l]].compensation;
            if (b->statistics.rest) rest[l] = b->statistics.rest[numbers[l]];
        }
        state.max = V_(load)(maxima), state.holder = (LANES){0} - 1;
        for (int h = 0; h < K(WIDE); h++) {
            state.sum[h] = v_f64_load(total + h * DOUBLES), state.compensation[h] = v_f64_load(compensation + h * DOUBLES);
            state.rest[h] = v_f64_load(rest + h * DOUBLES);
        }
        for (int p = 0; p < panels; p++) {
            /* A maximum that is NaN stays NaN. */
            const V x = K(load_some)(max + p * rows, count), of_panel = K(load_some)(sum + p * rows, count);
            const LANES is_new = ~((state.max != state.max) | (x <= state.max)), number = (LANES){0} + p;
            const V largest = V_(select)(is_new, x, state.max);
            const V shift = V_(select)(largest == V_(set1)((acc_t)-INFINITY), zero, largest);
            f64v terms[K(WIDE)], factors[K(WIDE)];
            if (b->statistics.with_moments) {
                V_(store)(before, state.max), V_(store)(maxima, largest);
                for (int h = 0; h < K(WIDE); h++) {
                    v_f64_store(total + h * DOUBLES, state.sum[h] + state.compensation[h]);
                }
                for (ptrdiff_t l = 0; l < count; l++) {
                    K(merge_moments)(b, i + l, p, (double)before[l], (double)maxima[l], total[l]);
                }
            }
            if (V_(reduce_max)(V_(select)(is_new, V_(set1)(1), zero)) > 0) { /* new maxima become rare */
                const V first = b->statistics.rest ? K(load_some)(of_rest + p * rows, count) : zero;
                K(rescale_sums)(&state, is_new, V_(exp)(state.max - shift), first);
            }
            const V factor = V_(exp)(x - shift);
            K(widen)(factor, factors);
            K(widen)(of_panel, terms);
            for (int h = 0; h < K(WIDE); h++) {
                v_f64_add_compensated(&state.sum[h], &state.compensation[h], terms[h] * factors[h]);
            }
            if (b->statistics.rest) {
                K(widen)(V_(select)(is_new, zero, factor), factors);
                K(widen)(V_(select)(is_new, zero, of_panel), terms);
                for (int h = 0; h < K(WIDE); h++) state.rest[h] += terms[h] * factors[h];
            }
            state.max = largest, state.holder = (is_new & number) | (~is_new & state.holder);
        }
        V_(store)(maxima, state.max);
        for (int h = 0; h < K(WIDE); h++) {
            v_f64_store(total + h * DOUBLES, state.sum[h]), v_f64_store(compensation + h * DOUBLES, state.compensation[h]);
            v_f64_store(rest + h * DOUBLES, state.rest[h]);
        }
        for (ptrdiff_t l = 0; l < count; l++) {
            const int64_t number = numbers[l];
            const ptrdiff_t holder = (ptrdiff_t)state.holder[l];
            if (b->statistics.with_more && holder >= 0) {
                b->rows[number].argmax = b->packed.panel_more[holder * rows + i + l].argmax;
            }
            if (b->statistics.rest) b->statistics.rest[number] = rest[l];
            ((acc_t *)b->statistics.max)[number] = maxima[l];
            b->statistics.sum[number] = (ag_sum){total[l], compensation[l]};
        }
    }
}

/* Ask for the memory of sums, which a tile is added to after its product: rows [first, first + count), n columns from `column`
 * on. */
AG_INLINE void K(prefetch_sums)(const ag_sums *sums, const int64_t *row_numbers, ptrdiff_t first, ptrdiff_t count,
                                ptrdiff_t column, ptrdiff_t n)
{
    const ptrdiff_t itemsize = sums->rounded_to ? 2 : sizeof(acc_t);
    for (ptrdiff_t r = 0; r < count; r++) {
        const char *sum = sums->data + (row_numbers ? row_numbers[first + r] : first + r) * sums->row_stride;
        for (ptrdiff_t c = 0; c < n; c += 64 / itemsize) __builtin_prefetch(sum + (column + c) * itemsize, 1);
    }
}

/* Store the first n lanes of a vector of complete sums, or all of them if n is larger, rounded to 16 bits. */
AG_INLINE void K(store_rounded)(ag_dtype dtype, char *to, V v, ptrdiff_t n)
{
#if AG_IS_F64
    (void)dtype, (void)to, (void)v, (void)n; /* float64 is converted later */
#else
    if (dtype == AG_FLOAT16) {
        if (n < VL) v_f16_store_partial(to, v, n);
        else v_f16_store(to, v);
    } else {
        if (n < VL) v_bf16_store_partial(to, v, n);
        else v_bf16_store(to, v);
    }
#endif
}

/* Add a tile to rows [first, first + count) and columns [column, column + n) of a gradient's sums. */
static void K(add_tile)(const ag_sums *sums, const int64_t *row_numbers, ptrdiff_t first, ptrdiff_t count,
                        ptrdiff_t column, ptrdiff_t n, const acc_t *tile)
{
    for (ptrdiff_t r = 0; r < count; r++) {
        const ptrdiff_t row = row_numbers ? row_numbers[first + r] : first + r;
        acc_t *sum = (acc_t *)(sums->data + row * sums->row_stride) + column, *compensation = 0;
        if (sums->rounded_to) {
            char *to = sums->data + row * sums->row_stride + column * 2;
            for (ptrdiff_t c = 0; c < n; c += VL) {
                K(store_rounded)(sums->rounded_to, to + 2 * c, V_(load)(tile + r * NR + c), n - c);
            }
            continue;
        }
        if (sums->compensation) {
            compensation = (acc_t *)(sums->compensation + (first + r) * sums->compensation_stride);
            compensation += column;
        }
        if (!sums->add && !compensation) {
            for (ptrdiff_t c = 0; c < n; c += VL) K(store_some)(sum + c, V_(load)(tile + r * NR + c), n - c);
            continue;
        }
        for (ptrdiff_t c = 0; c < n; c += VL) {
            V total = V_(load)(tile + r * NR + c), error = {0};
            if (sums->add) K(add_to_sum)(&total, &error, sum + c, compensation ? compensation + c : 0, n - c);
            K(store_sum)(total, error, sum + c, compensation ? compensation + c : 0, sums->last, n - c);
        }
    }
}

/* Add a tile, the product of one run of unskipped tiles of P, to a compensated sum of tiles. */
static void K(add_run)(acc_t *sum, acc_t *compensation, const acc_t *tile)
{
    for (ptrdiff_t i = 0; i < MR * NR; i += VL) {
        V total = V_(load)(tile + i), error = {0};
        K(add_to_sum)(&total, &error, sum + i, compensation + i, VL);
        K(store_sum)(total, error, sum + i, compensation + i, 0, VL);
    }
}

/* Apply the compensation of a sum of tiles. */
static void K(end_runs)(acc_t *sum, const acc_t *compensation)
{
    for (ptrdiff_t i = 0; i < MR * NR; i += VL) {
        V_(store)(sum + i, K(compensated)(V_(load)(sum + i), V_(load)(compensation + i)));
    }
}

/* Add tiles of P W to dX: rows of the chunk, panels of H, summed over the vocabulary entries of the block. */
static void K(input_grad)(const ag_linear_block *b, ptrdiff_t panel, ptrdiff_t panel_end, ptrdiff_t tile_index,
                          ptrdiff_t tile_end)
{
    enum { WIDTH = NR / PAIR };
    const ptrdiff_t rows = K(padded_rows)(b), n = K(elements)(b->vocab.size), panels = (b->vocab.size + NR - 1) / NR;
    acc_t tile[MR * NR] __attribute__((aligned(64))), part[MR * NR] __attribute__((aligned(64)));
    acc_t compensation[MR * NR] __attribute__((aligned(64)));
    K(begin_task)();
    for (ptrdiff_t t = tile_index; t < tile_end; t++) {
        const ptrdiff_t count = b->chunk.rows - t * MR < MR ? b->chunk.rows - t * MR : MR;
        const elem_t *a = (const elem_t *)b->packed.p + t * MR * WIDTH;
        for (ptrdiff_t h = panel; h < panel_end; h++) {
            const ptrdiff_t columns = b->hidden - h * NR < NR ? b->hidden - h * NR : NR;
            const int nv = (int)((columns + VL - 1) / VL);
            const elem_t *right = (const elem_t *)b->packed.w_columns + h * n * NR;
            K(prefetch_sums)(&b->input_grad, b->chunk.row_numbers, t * MR, count, h * NR, columns);
            if (!(b->gradient.filter_eps > 0)) {
                K(product_rows)(nv, a, rows * WIDTH, right, n, tile);
            } else {
                /* Multiply runs of panels of P that are not skipped. */
                memset(tile, 0, sizeof tile), memset(compensation, 0, sizeof compensation);
                for (ptrdiff_t p = 0; p < panels; p++) {
                    const ptrdiff_t begin = p;
                    while (p < panels && !b->packed.skipped[p * (rows / MR) + t]) p++;
                    if (p == begin) continue;
                    const ptrdiff_t end = p * WIDTH < n ? p * WIDTH : n;
                    K(product_rows)(nv, a + begin * rows * WIDTH, rows * WIDTH, right + begin * WIDTH * nv * VL,
                                    end - begin * WIDTH, part);
                    K(add_run)(tile, compensation, part);
                }
                K(end_runs)(tile, compensation);
            }
            K(add_tile)(&b->input_grad, b->chunk.row_numbers, t * MR, count, h * NR, columns, tile);
        }
    }
    K(end_task)();
}

/* Add tiles of P^T X to dW: MR rows of W, panels of H, summed over the rows of the chunk. */
static void K(weight_grad)(const ag_linear_block *b, ptrdiff_t panel, ptrdiff_t panel_end, ptrdiff_t tile_index,
                           ptrdiff_t tile_end)
{
    const ptrdiff_t rows = K(padded_rows)(b), n = K(elements)(b->chunk.rows), tiles = rows / MR;
#if AG_IS_DOT
    const elem_t *p = (const elem_t *)b->packed.p_pairs;
#else
    const elem_t *p = (const elem_t *)b->packed.p;
#endif
    acc_t tile[MR * NR] __attribute__((aligned(64))), part[MR * NR] __attribute__((aligned(64)));
    acc_t compensation[MR * NR] __attribute__((aligned(64)));
    K(begin_task)();
    for (ptrdiff_t t = tile_index; t < tile_end; t++) {
        const ptrdiff_t count = b->vocab.size - t * MR < MR ? b->vocab.size - t * MR : MR;
        const ptrdiff_t of_panel = t * MR / NR;
        const elem_t *a = p + of_panel * (rows / PAIR) * NR + t * MR % NR;
        for (ptrdiff_t h = panel; h < panel_end; h++) {
            const ptrdiff_t columns = b->hidden - h * NR < NR ? b->hidden - h * NR : NR;
            const int nv = (int)((columns + VL - 1) / VL);
            const elem_t *right = (const elem_t *)b->packed.x_columns + h * n * NR;
            K(prefetch_sums)(&b->weight_grad, 0, t * MR, count, h * NR, columns);
            if (!(b->gradient.filter_eps > 0)) {
                K(product_columns)(nv, a, right, n, tile);
            } else {
                /* Multiply runs of tiles of P that are not skipped. */
                memset(tile, 0, sizeof tile), memset(compensation, 0, sizeof compensation);
                for (ptrdiff_t i = 0; i < tiles; i++) {
                    const ptrdiff_t begin = i * (MR / PAIR);
                    while (i < tiles && !b->packed.skipped[of_panel * tiles + i]) i++;
                    const ptrdiff_t end = i * (MR / PAIR) < n ? i * (MR / PAIR) : n;
                    if (end <= begin) continue;
                    K(product_columns)(nv, a + begin * NR, right + begin * nv * VL, end - begin, part);
                    K(add_run)(tile, compensation, part);
                }
                K(end_runs)(tile, compensation);
            }
            K(add_tile)(&b->weight_grad, 0, t * MR, count, h * NR, columns, tile);
        }
    }
    K(end_task)();
}

/* Add the columns of P of panels [panel, panel_end) to sums of doubles, one for each vocabulary entry of the block. */
static void K(sum_p)(const ag_linear_block *b, ptrdiff_t panel, ptrdiff_t panel_end, double *sums)
{
    const ptrdiff_t rows = K(padded_rows)(b);
    for (ptrdiff_t p = panel; p < panel_end; p++) {
        const ptrdiff_t left = b->vocab.size - p * NR, columns = left < NR ? left : NR;
        double total[NR] = {0};
        for (ptrdiff_t i = 0; i < b->chunk.rows; i++) {
            const ptrdiff_t tile = (p * rows + i / MR * MR) * NR;
            for (int j = 0; j < NV; j++) {
                const ptrdiff_t place = tile + K(place_in_p)(i % MR, j);
#if AG_IS_DOT
                const uint16_t *row = (const uint16_t *)b->packed.p + place;
                for (int lane = 0; lane < VL; lane++) {
                    const uint32_t bits = (uint32_t)row[lane] << 16;
                    float value;
                    memcpy(&value, &bits, sizeof value);
                    total[j * VL + lane] += (double)value;
                }
#else
                const acc_t *row = (const acc_t *)b->packed.p + place;
                for (int lane = 0; lane < VL; lane++) total[j * VL + lane] += (double)row[lane];
#endif
            }
        }
        for (ptrdiff_t c = 0; c < columns; c++) sums[p * NR + c] += total[c];
    }
}

/* Compute n probabilities of a row from its logits, maximum and sum of exponentials. */
static void K(probabilities)(void *to, const void *logits, double max, double sum, ptrdiff_t n)
{
    const V shift = V_(set1)((acc_t)max), divisor = V_(set1)((acc_t)sum);
    const acc_t *from = (const acc_t *)logits;
    acc_t *target = (acc_t *)to;
    for (ptrdiff_t c = 0; c < n; c += VL) {
        const ptrdiff_t left = n - c < VL ? n - c : VL;
        K(store_some)(target + c, V_(exp)(K(load_some)(from + c, left) - shift) / divisor, left);
    }
}
