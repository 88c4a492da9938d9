/* Tiles of logits and of their gradient, and the units of work made of them, for one kind of arithmetic and one
 * instruction set. Body header, see base.h; the manual is linear_cross_entropy.h.
 */

#include "gemm_body.h"

/* Rows of P, padded to whole tiles. */
AG_INLINE ptrdiff_t K(padded_rows)(const ag_lce_block *b) { return (b->rows + MR - 1) / MR * MR; }

AG_INLINE ptrdiff_t K(units)(ptrdiff_t n) { return (n + PAIR - 1) / PAIR; }

/* ---- where a tile comes from --------------------------------------------------------------------------------------------- */

static void K(load_logits)(const ag_lce_block *b, ptrdiff_t panel, ptrdiff_t tile_index, real *tile)
{
    memcpy(tile, (const real *)b->logits + (panel * K(padded_rows)(b) + tile_index * MR) * NR, MR * NR * sizeof(real));
}

/* Whole vectors where they fit: partial access is slow without masks. */
AG_INLINE V K(load_some)(const void *p, ptrdiff_t n) { return n < VL ? V_(load_partial)(p, n) : V_(load)(p); }

AG_INLINE void K(store_some)(real *p, V v, ptrdiff_t n)
{
    if (n < VL) {
        V_(store_partial)(p, v, n);
    } else {
        V_(store)(p, v);
    }
}

/* The caller's probabilities; zero beyond the last row and column. */
static void K(load_softmax)(const ag_lce_block *b, ptrdiff_t panel, ptrdiff_t tile_index, real *tile)
{
    const ag_matrix *from = &b->softmax;
    const ptrdiff_t left = b->vocab - panel * NR, n = left < NR ? left : NR;
    real buffer[NR];
    memset(tile, 0, MR * NR * sizeof(real));
    for (ptrdiff_t r = 0; r < MR && tile_index * MR + r < b->rows; r++) {
        const char *source = from->data + b->row_numbers[tile_index * MR + r] * from->row_stride +
                             (b->vocab_start + panel * NR) * from->step;
        if (from->step != sizeof(real) || from->swapped) {
            ag_copy_block((char *)buffer, 0, sizeof(real), source, 0, from->step, 1, n, sizeof(real), from->swapped);
            source = (const char *)buffer;
        }
        for (ptrdiff_t c = 0; c < n; c += VL) {
            V_(store)(tile + r * NR + c, K(load_some)(source + c * sizeof(real), n - c));
        }
    }
}

/* ---- sums in memory ------------------------------------------------------------------------------------------------------ */

/* The first n lanes of x and 0 become those of the sum plus x and of its compensation; without one: plainly added. */
AG_INLINE void K(add_to_sum)(V *x, V *lost, const real *sum, const real *compensation, ptrdiff_t n)
{
    const V term = *x;
    *x = K(load_some)(sum, n);
    if (compensation) {
        *lost = K(load_some)(compensation, n);
        K(add_compensated)(x, lost, term);
    } else {
        *x += term;
    }
}

/* A sum and its compensation to memory, as one number after the last addition. */
AG_INLINE void K(store_sum)(V total, V lost, real *sum, real *compensation, int last, ptrdiff_t n)
{
    if (compensation && !last) K(store_some)(compensation, lost, n);
    K(store_some)(sum, compensation && last ? K(compensated)(total, lost) : total, n);
}

/* ---- what becomes of it -------------------------------------------------------------------------------------------------- */

static void K(store_logits)(const ag_lce_block *b, ptrdiff_t panel, ptrdiff_t tile_index, const real *tile)
{
    const ptrdiff_t first = (panel * K(padded_rows)(b) + tile_index * MR) * NR;
    real *to = (real *)b->logits + first, *compensation = b->logits_compensation;
    if (compensation) compensation += first;
    for (ptrdiff_t i = 0; i < MR * NR; i += VL) {
        V total = V_(load)(tile + i), lost = {0};
        if (b->add_logits) K(add_to_sum)(&total, &lost, to + i, compensation ? compensation + i : 0, VL);
        K(store_sum)(total, lost, to + i, compensation ? compensation + i : 0, b->last_logits, VL);
    }
}

/* P: probabilities (made from logits here, if that is what they are), minus the one-hot target, times grad, rounded. */
AG_INLINE void K(store_gradient)(const ag_lce_block *b, const int from_logits, ptrdiff_t panel, ptrdiff_t tile_index,
                                 real *tile)
{
    const ptrdiff_t rows = K(padded_rows)(b), left = b->vocab - panel * NR, columns = left < NR ? left : NR;
    const ptrdiff_t first = tile_index * MR;
    int is_small = b->filter_eps > 0;
    for (ptrdiff_t r = 0; r < MR; r++) {
        const ptrdiff_t i = first + r;
        real *row = tile + r * NR;
#if AG_IS_DOT
        uint16_t *to = (uint16_t *)b->p + (panel * rows + i) * NR;
#else
        real *to = (real *)b->p + (panel * rows + i) * NR;
#endif
        if (i >= b->rows) {
            memset(to, 0, NR * sizeof *to);
            continue;
        }
        if (from_logits) {
            const V max = V_(set1)(((const real *)b->max)[i]), sum = V_(set1)(((const real *)b->sum)[i]);
            for (int j = 0; j < NV; j++) {
                V_(store)(row + j * VL, V_(exp)(V_(load)(row + j * VL) - max) / sum);
            }
        }
        const int64_t target = b->target[i] - b->vocab_start - panel * NR;
        if (b->target[i] >= 0 && target >= 0 && target < NR) row[target] -= 1;
        const V grad = V_(set1)(((const real *)b->grad)[i]);
        for (int j = 0; j < NV; j++) {
            V p = V_(load)(row + j * VL) * grad;
            if (columns - j * VL < VL) p = V_(first)(columns > j * VL ? columns - j * VL : 0, p, (V){0});
            if (is_small) {
                /* NaN is not small */
                const V size = V_(max)(p, -p), bound = V_(set1)((real)b->filter_eps);
                for (int lane = 0; lane < VL; lane++) is_small &= size[lane] < bound[lane];
            }
#if AG_IS_DOT
            v_bf16_store(to + j * VL, p);
#else
#if !AG_IS_F64
            if (b->round_to_bfloat16) p = v_bf16_widen(v_bf16_narrow(p));
#endif
            V_(store)(to + j * VL, p);
#endif
        }
    }
#if AG_IS_DOT
    for (ptrdiff_t r = 0; r < MR; r += 2) {
        const uint16_t *from = (const uint16_t *)b->p + (panel * rows + first + r) * NR;
        uint32_t *pairs = (uint32_t *)b->p_pairs + (panel * rows + first + r) / 2 * NR;
        for (int j = 0; j < NV; j++) {
            u16v low, high;
            memcpy(&low, from + j * VL, sizeof low);
            memcpy(&high, from + NR + j * VL, sizeof high);
            const u32v both = __builtin_convertvector(low, u32v) | __builtin_convertvector(high, u32v) << 16;
            memcpy(pairs + j * VL, &both, sizeof both);
        }
    }
#endif
    if (b->filter_eps > 0) b->skipped[panel * (rows / MR) + tile_index] = (uint8_t)is_small;
}

static void K(store_gradient_of_logits)(const ag_lce_block *b, ptrdiff_t panel, ptrdiff_t tile_index, real *tile)
{
    K(store_gradient)(b, 1, panel, tile_index, tile);
}

static void K(store_gradient_of_softmax)(const ag_lce_block *b, ptrdiff_t panel, ptrdiff_t tile_index, real *tile)
{
    K(store_gradient)(b, 0, panel, tile_index, tile);
}

/* Sum of the lanes, in halves. */
AG_INLINE real K(reduce_sum)(V v)
{
    real lane[VL];
    V_(store)(lane, v);
    for (int half = VL / 2; half > 0; half /= 2) {
        for (int i = 0; i < half; i++) lane[i] += lane[i + half];
    }
    return lane[0];
}

/* Logits of row i and of n words from `first` on, for the caller. */
static void K(put_logits)(const ag_lce_block *b, ptrdiff_t i, ptrdiff_t first, const real *row, ptrdiff_t n)
{
    char *to = b->logits_out.data + b->row_numbers[i] * b->logits_out.row_stride +
               (b->vocab_start + first) * b->logits_out.step;
#if AG_IS_F64
    memcpy(to, row, (size_t)n * sizeof(real));
#else
    for (ptrdiff_t c = 0; c < n; c += VL) {
        const ptrdiff_t left = n - c < VL ? n - c : VL;
        const V v = v_f32_load(row + c);
        if (b->logits_out.dtype == AG_FLOAT32) {
            v_f32_store_partial(to + 4 * c, v, left);
        } else if (b->logits_out.dtype == AG_FLOAT16) {
            v_f16_store_partial(to + 2 * c, v, left);
        } else {
            v_bf16_store_partial(to + 2 * c, v, left);
        }
    }
#endif
}

/* Largest logit of each row of the tile and the sum of the exponentials relative to it; the target's logit. */
static void K(store_max_sum)(const ag_lce_block *b, ptrdiff_t panel, ptrdiff_t tile_index, const real *tile)
{
    const ptrdiff_t rows = K(padded_rows)(b), left = b->vocab - panel * NR, columns = left < NR ? left : NR;
    const V none = V_(set1)((real)-INFINITY);
    for (ptrdiff_t r = 0; r < MR && tile_index * MR + r < b->rows; r++) {
        const ptrdiff_t i = tile_index * MR + r;
        const real *row = tile + r * NR;
        V x[NV], total = {0};
        for (int j = 0; j < NV; j++) {
            x[j] = V_(load)(row + j * VL);
            if (columns - j * VL < VL) x[j] = V_(first)(columns > j * VL ? columns - j * VL : 0, x[j], none);
        }
        real max = V_(reduce_max)(V_(max)(V_(max)(x[0], x[1]), x[2]));
        /* Relative to -inf, exponentials would be NaN: another panel may hold something finite. */
        const V shift = V_(set1)(max == (real)-INFINITY ? 0 : max);
        for (int j = 0; j < NV; j++) total += V_(exp)(x[j] - shift);
        const real sum = K(reduce_sum)(total);
        if (sum != sum) {
            /* NaN among the logits makes the maximum NaN; infinity makes the sum NaN alone */
            for (ptrdiff_t c = 0; c < columns; c++) max = row[c] != row[c] ? row[c] : max;
        }
        ((real *)b->panel_max)[panel * rows + i] = max;
        ((real *)b->panel_sum)[panel * rows + i] = sum;
        const int64_t target = b->target[i] - b->vocab_start - panel * NR;
        if (b->target[i] >= 0 && target >= 0 && target < NR) ((real *)b->predicted)[b->row_numbers[i]] = row[target];
        if (b->logits_out.data) K(put_logits)(b, i, panel * NR, row, columns);
    }
}

/* ---- units of work ------------------------------------------------------------------------------------------------------- */

static void K(tiles)(const ag_lce_block *b, ag_lce_source source, ag_lce_result result, ptrdiff_t panel,
                     ptrdiff_t panel_end, ptrdiff_t tile_index, ptrdiff_t tile_end)
{
    const ptrdiff_t hidden = K(units)(b->hidden_size);
    real tile[MR * NR] __attribute__((aligned(64)));
    for (ptrdiff_t t = tile_index; t < tile_end; t++) {
        for (ptrdiff_t p = panel; p < panel_end; p++) {
            switch (source) {
            case AG_FROM_PRODUCT:
                K(product_logits)((const unit *)b->x_rows + t * hidden * MR, (const unit *)b->w_rows + p * hidden * NR,
                                  hidden, tile);
                break;
            case AG_FROM_LOGITS:
                K(load_logits)(b, p, t, tile);
                break;
            case AG_FROM_SOFTMAX:
                K(load_softmax)(b, p, t, tile);
                break;
            }
            switch (result) {
            case AG_TO_LOGITS:
                K(store_logits)(b, p, t, tile);
                break;
            case AG_TO_MAX_SUM:
                if (b->keep_logits) K(store_logits)(b, p, t, tile);
                K(store_max_sum)(b, p, t, tile);
                break;
            case AG_TO_GRADIENT:
                if (source == AG_FROM_SOFTMAX) {
                    K(store_gradient_of_softmax)(b, p, t, tile);
                } else {
                    K(store_gradient_of_logits)(b, p, t, tile);
                }
                break;
            }
        }
    }
}

static void K(merge_max_sum)(const ag_lce_block *b, ptrdiff_t row, ptrdiff_t row_end)
{
    const ptrdiff_t rows = K(padded_rows)(b), panels = (b->vocab + NR - 1) / NR;
    for (ptrdiff_t i = row; i < row_end; i++) {
        const real *max = (const real *)b->panel_max + i, *sum = (const real *)b->panel_sum + i;
        real *running_max = (real *)b->running_max + b->row_numbers[i];
        double *running_sum = b->running_sum + b->row_numbers[i], total = 0;
        real largest = *running_max;
        for (ptrdiff_t p = 0; p < panels; p++) {
            /* once NaN, always NaN */
            const real x = max[p * rows];
            largest = largest != largest || x <= largest ? largest : x;
        }
        const real shift = largest == (real)-INFINITY ? 0 : largest;
        for (ptrdiff_t p = -1; p < panels; p += VL) {
            /* place -1 is what came before */
            real of_max[VL], of_sum[VL];
            for (ptrdiff_t k = 0; k < VL; k++) {
                const int is_running = p + k < 0, is_there = p + k < panels;
                of_max[k] = is_running ? *running_max : is_there ? max[(p + k) * rows] : (real)-INFINITY;
                of_sum[k] = is_running || !is_there ? 0 : sum[(p + k) * rows];
            }
            V_(store)(of_max, V_(exp)(V_(load)(of_max) - V_(set1)(shift)));
            for (ptrdiff_t k = 0; k < VL; k++) {
                total += p + k < 0 ? *running_sum * (double)of_max[k] : (double)of_sum[k] * (double)of_max[k];
            }
        }
        *running_max = largest;
        *running_sum = total;
    }
}

/* rows [first, first + count) of sums, columns [column, column + n) of H, += the tile */
static void K(add_tile)(const ag_sums *sums, const int64_t *row_numbers, ptrdiff_t first, ptrdiff_t count,
                        ptrdiff_t column, ptrdiff_t n, int add, int last, const real *tile)
{
    for (ptrdiff_t r = 0; r < count; r++) {
        const ptrdiff_t row = row_numbers ? row_numbers[first + r] : first + r;
        real *sum = (real *)(sums->data + row * sums->row_stride) + column - sums->column, *compensation = 0;
        if (sums->compensation) {
            compensation = (real *)(sums->compensation + (first + r) * sums->compensation_stride);
            compensation += column - sums->compensation_column;
        }
        if (!add && !compensation) {
            for (ptrdiff_t c = 0; c < n; c += VL) K(store_some)(sum + c, V_(load)(tile + r * NR + c), n - c);
            continue;
        }
        for (ptrdiff_t c = 0; c < n; c += VL) {
            V total = V_(load)(tile + r * NR + c), lost = {0};
            if (add) K(add_to_sum)(&total, &lost, sum + c, compensation ? compensation + c : 0, n - c);
            K(store_sum)(total, lost, sum + c, compensation ? compensation + c : 0, last, n - c);
        }
    }
}

/* One tile more of a sum of many: runs of a filtered product. */
static void K(add_run)(real *sum, real *compensation, const real *tile)
{
    for (ptrdiff_t i = 0; i < MR * NR; i += VL) {
        V total = V_(load)(tile + i), lost = {0};
        K(add_to_sum)(&total, &lost, sum + i, compensation + i, VL);
        K(store_sum)(total, lost, sum + i, compensation + i, 0, VL);
    }
}

static void K(end_runs)(real *sum, const real *compensation)
{
    for (ptrdiff_t i = 0; i < MR * NR; i += VL) {
        V_(store)(sum + i, K(compensated)(V_(load)(sum + i), V_(load)(compensation + i)));
    }
}

/* dX: rows of the chunk x panels of H, summed over the block's part of V. */
static void K(input_grad)(const ag_lce_block *b, ptrdiff_t panel, ptrdiff_t panel_end, ptrdiff_t tile_index,
                          ptrdiff_t tile_end)
{
    enum { WIDTH = NR / PAIR };
    const ptrdiff_t rows = K(padded_rows)(b), n = K(units)(b->vocab), panels = (b->vocab + NR - 1) / NR;
    real tile[MR * NR] __attribute__((aligned(64))), part[MR * NR] __attribute__((aligned(64)));
    real lost[MR * NR] __attribute__((aligned(64)));
    for (ptrdiff_t t = tile_index; t < tile_end; t++) {
        const ptrdiff_t count = b->rows - t * MR < MR ? b->rows - t * MR : MR;
        const unit *a = (const unit *)b->p + t * MR * WIDTH;
        for (ptrdiff_t h = panel; h < panel_end; h++) {
            const ptrdiff_t columns = b->hidden_size - h * NR < NR ? b->hidden_size - h * NR : NR;
            const int nv = (int)((columns + VL - 1) / VL);
            const unit *right = (const unit *)b->w_columns + h * n * NR;
            if (!(b->filter_eps > 0)) {
                K(product_rows)(nv, a, rows * WIDTH, right, n, tile);
            } else {
                /* runs of panels that are not skipped */
                memset(tile, 0, sizeof tile), memset(lost, 0, sizeof lost);
                for (ptrdiff_t p = 0; p < panels; p++) {
                    const ptrdiff_t begin = p;
                    while (p < panels && !b->skipped[p * (rows / MR) + t]) p++;
                    if (p == begin) continue;
                    const ptrdiff_t end = p * WIDTH < n ? p * WIDTH : n;
                    K(product_rows)(nv, a + begin * rows * WIDTH, rows * WIDTH, right + begin * WIDTH * nv * VL,
                                    end - begin * WIDTH, part);
                    K(add_run)(tile, lost, part);
                }
                K(end_runs)(tile, lost);
            }
            K(add_tile)(&b->input_grad, b->row_numbers, t * MR, count, b->hidden_start + h * NR, columns,
                        b->add_input_grad, b->last_input_grad, tile);
        }
    }
}

/* dW: tiles of MR rows of W x panels of H, summed over the rows of the chunk. */
static void K(weight_grad)(const ag_lce_block *b, ptrdiff_t panel, ptrdiff_t panel_end, ptrdiff_t tile_index,
                           ptrdiff_t tile_end)
{
    const ptrdiff_t rows = K(padded_rows)(b), n = K(units)(b->rows), tiles = rows / MR;
#if AG_IS_DOT
    const unit *p = b->p_pairs;
#else
    const unit *p = b->p;
#endif
    real tile[MR * NR] __attribute__((aligned(64))), part[MR * NR] __attribute__((aligned(64)));
    real lost[MR * NR] __attribute__((aligned(64)));
    for (ptrdiff_t t = tile_index; t < tile_end; t++) {
        const ptrdiff_t count = b->vocab - t * MR < MR ? b->vocab - t * MR : MR;
        const ptrdiff_t of_panel = t * MR / NR;
        const unit *a = p + of_panel * (rows / PAIR) * NR + t * MR % NR;
        for (ptrdiff_t h = panel; h < panel_end; h++) {
            const ptrdiff_t columns = b->hidden_size - h * NR < NR ? b->hidden_size - h * NR : NR;
            const int nv = (int)((columns + VL - 1) / VL);
            const unit *right = (const unit *)b->x_columns + h * n * NR;
            if (!(b->filter_eps > 0)) {
                K(product_columns)(nv, a, right, n, tile);
            } else {
                /* runs of tiles of rows that are not skipped */
                memset(tile, 0, sizeof tile), memset(lost, 0, sizeof lost);
                for (ptrdiff_t i = 0; i < tiles; i++) {
                    const ptrdiff_t begin = i * (MR / PAIR);
                    while (i < tiles && !b->skipped[of_panel * tiles + i]) i++;
                    const ptrdiff_t end = i * (MR / PAIR) < n ? i * (MR / PAIR) : n;
                    if (end <= begin) continue;
                    K(product_columns)(nv, a + begin * NR, right + begin * nv * VL, end - begin, part);
                    K(add_run)(tile, lost, part);
                }
                K(end_runs)(tile, lost);
            }
            K(add_tile)(&b->weight_grad, 0, t * MR, count, b->hidden_start + h * NR, columns, b->add_weight_grad,
                        b->last_weight_grad, tile);
        }
    }
}

static void K(probabilities)(void *to, const void *logits, double max, double sum, ptrdiff_t n)
{
    const V shift = V_(set1)((real)max), divisor = V_(set1)((real)sum);
    const real *from = logits;
    real *target = to;
    for (ptrdiff_t c = 0; c < n; c += VL) {
        const ptrdiff_t left = n - c < VL ? n - c : VL;
        K(store_some)(target + c, V_(exp)(K(load_some)(from + c, left) - shift) / divisor, left);
    }
}

#include "skinny_body.h"

static AG_UNUSED const ag_lce_kernels K(ag_lce) = {
    .mr = MR,
    .nr = NR,
    .vector = VL,
    .pair = PAIR,
    .unit_size = sizeof(unit),
    .real_size = sizeof(real),
    .pack_tile = K(pack_tile),
    .pack_panel = K(pack_panel),
    .pack_columns = K(pack_columns),
    .tiles = K(tiles),
    .merge_max_sum = K(merge_max_sum),
    .input_grad = K(input_grad),
    .weight_grad = K(weight_grad),
    .probabilities = K(probabilities),
    .dot_products = K(dot_products),
    .sum_rows = SUMS(sum_rows),
    .combine = SUMS(combine),
    .write_rows = SUMS(write_rows),
    .tile_to_gradient = SUMS(tile_to_gradient),
    .tile_to_max_sum = SUMS(tile_to_max_sum),
    .columns_to_gradient = SUMS(columns_to_gradient),
    .columns_to_max_sum = SUMS(columns_to_max_sum),
};

#undef K
#undef SUMS
#undef MR
#undef NV
#undef NR
#undef VL
#undef V
#undef LANES
#undef V_
#undef real
#undef unit
#undef PAIR
