/* The row-wise kernels of one dtype and one instruction set. Body header, see base.h; the manual is rowwise.h.
 *
 * Expects AG_ISA, AG_LANES, and AG_DTYPE (f32, f16, bf16 or f64: the values in memory) with AG_IS_F64.
 * `op` is a constant wherever it appears: every function is inlined into the entry points at the end of the file.
 */

#define AG_LOAD AG_CONCAT3(ag_v, AG_DTYPE, AG_CONCAT2(load, AG_ISA))
#define AG_STORE AG_CONCAT3(ag_v, AG_DTYPE, AG_CONCAT2(store, AG_ISA))
#define AG_STREAM AG_CONCAT3(ag_v, AG_DTYPE, AG_CONCAT2(stream, AG_ISA))
#define AG_LOAD_TWO AG_CONCAT3(ag_v, AG_DTYPE, AG_CONCAT2(load_two, AG_ISA))
#define AG_STORE_TWO AG_CONCAT3(ag_v, AG_DTYPE, AG_CONCAT2(store_two, AG_ISA))
#define AG_STREAM_TWO AG_CONCAT3(ag_v, AG_DTYPE, AG_CONCAT2(stream_two, AG_ISA))
#define AG_LOAD_PARTIAL AG_CONCAT3(ag_v, AG_DTYPE, AG_CONCAT2(load_partial, AG_ISA))
#define AG_STORE_PARTIAL AG_CONCAT3(ag_v, AG_DTYPE, AG_CONCAT2(store_partial, AG_ISA))

#if AG_IS_F64
#define AG_SIZE 8
#define VL (AG_LANES / 2)
#define real double
#define V f64v
#define MASKV i64v
#define V_(name) AG_CONCAT2(ag_v_f64, AG_CONCAT2(name, AG_ISA))
#else
#if AG_IS_F32
#define AG_SIZE 4
#else
#define AG_SIZE 2
#endif
#define VL AG_LANES
#define real float
#define V f32v
#define MASKV i32v
#define V_(name) AG_CONCAT2(ag_v_f32, AG_CONCAT2(name, AG_ISA))
#endif

#define K(name) AG_KERNEL_NAME(name)
#define AG_BLOCK (16 * VL)
/* Elements of whole cache lines, and of whole pairs of vectors. */
#define AG_LINES (2 * VL * AG_SIZE < 64 ? 64 / AG_SIZE : 2 * VL)
#define AG_NARROW (16 * VL < 64 ? 16 * VL : 64)
#define AG_NARROWEST (VL < 8 ? VL : 8)

/* ---- terms, values ------------------------------------------------------------------------------------------------- */

/* The logit of a forward operator: masked positions get -10000, the others are scaled. */
AG_INLINE V K(logit)(const int op, V x, MASKV mask, V scale)
{
    if (op != AG_SCALED_MASKED_SOFTMAX) return x;
    return V_(select)(mask, V_(set1)((real)-10000.0), x * scale);
}

/* What the row sum adds up. `max` is used by the forward operators only. */
AG_INLINE V K(term)(const int op, V a, V b, MASKV mask, V scale, V max)
{
    switch (op) {
    case AG_LOG_SOFTMAX_BACKWARD:
        return a;
    case AG_SOFTMAX_BACKWARD:
    case AG_SCALED_MASKED_SOFTMAX_BACKWARD:
        return a * b;
    default:
        return V_(exp)(K(logit)(op, a, mask, scale) - max);
    }
}

/* The result. `shift` is the sum (backward) or the maximum (forward), `factor` 1/sum or log(sum) (forward). */
AG_INLINE V K(value)(const int op, V a, V b, MASKV mask, V scale, V shift, V factor)
{
    switch (op) {
    case AG_SOFTMAX_BACKWARD:
        return (a - shift) * b;
    case AG_LOG_SOFTMAX_BACKWARD:
        return V_(fma)(-shift, V_(exp)(b), a);
    case AG_SCALED_MASKED_SOFTMAX_BACKWARD:
        return V_(select)(mask, (V){0}, (a - shift) * b * scale);
    case AG_LOG_SOFTMAX:
        return (a - shift) - factor;
    default:
        return V_(exp)(K(logit)(op, a, mask, scale) - shift) * factor;
    }
}

AG_INLINE int K(reads_b)(const int op) { return op <= AG_SCALED_MASKED_SOFTMAX_BACKWARD; }
AG_INLINE int K(reads_b_for_sum)(const int op) { return K(reads_b)(op) && op != AG_LOG_SOFTMAX_BACKWARD; }
AG_INLINE int K(is_forward)(const int op) { return op >= AG_SOFTMAX; }
AG_INLINE int K(is_masked)(const int op)
{
    return op == AG_SCALED_MASKED_SOFTMAX_BACKWARD || op == AG_SCALED_MASKED_SOFTMAX;
}
AG_INLINE int K(masks_sum)(const int op) { return op == AG_SCALED_MASKED_SOFTMAX; }

AG_INLINE real K(shift_of)(const int op, double max, double sum) { return (real)(K(is_forward)(op) ? max : sum); }
AG_INLINE f64v K(factors)(const int op, f64v sums) { return op == AG_LOG_SOFTMAX ? v_f64_log(sums) : 1.0 / sums; }
AG_INLINE real K(factor_of)(const int op, double sum)
{
    return K(is_forward)(op) ? (real)K(factors)(op, v_f64_set1(sum))[0] : 0;
}

/* Inputs of lanes i .. i+VL-1, or of the first n of them (the others zero). */
AG_INLINE V K(get)(int wanted, const char *p, ptrdiff_t i) { return wanted ? AG_LOAD(p + i * AG_SIZE) : (V){0}; }
AG_INLINE V K(get_partial)(int wanted, const char *p, ptrdiff_t i, ptrdiff_t n)
{
    return wanted ? AG_LOAD_PARTIAL(p + i * AG_SIZE, n) : (V){0};
}
AG_INLINE MASKV K(get_mask)(int wanted, const uint8_t *p, ptrdiff_t i)
{
    return wanted ? V_(mask)(p + i) : (MASKV){0};
}
AG_INLINE MASKV K(get_mask_partial)(int wanted, const uint8_t *p, ptrdiff_t i, ptrdiff_t n)
{
    return wanted ? V_(mask_partial)(p + i, n) : (MASKV){0};
}

AG_INLINE V K(term_at)(const int op, const char *a, const char *b, const uint8_t *mask, ptrdiff_t i, V scale, V max)
{
    return K(term)(op, AG_LOAD(a + i * AG_SIZE), K(get)(K(reads_b_for_sum)(op), b, i),
                   K(get_mask)(K(masks_sum)(op), mask, i), scale, max);
}

AG_INLINE V K(term_at_partial)(const int op, const char *a, const char *b, const uint8_t *mask, ptrdiff_t i,
                               ptrdiff_t n, V scale, V max)
{
    const V term = K(term)(op, AG_LOAD_PARTIAL(a + i * AG_SIZE, n), K(get_partial)(K(reads_b_for_sum)(op), b, i, n),
                           K(get_mask_partial)(K(masks_sum)(op), mask, i, n), scale, max);
    return K(is_forward)(op) ? V_(first)(n, term, (V){0}) : term;
}

/* ---- a run of consecutive elements --------------------------------------------------------------------------------- */

/* The accumulators of a segment: one float64 per lane. */
typedef struct {
    f64v low;
#if !AG_IS_F64
    f64v high;
#endif
} K(lanes);

AG_INLINE void K(fold)(K(lanes) *sums, V partial)
{
#if AG_IS_F64
    sums->low += partial;
#else
    f64v low, high;
    v_f32_widen(partial, &low, &high);
    sums->low += low;
    sums->high += high;
#endif
}

AG_INLINE void K(add_lanes)(K(lanes) *sums, const K(lanes) *others)
{
    sums->low += others->low;
#if !AG_IS_F64
    sums->high += others->high;
#endif
}

/* Each lane as the sum of a row: one kind of zero, one of NaN. */
AG_INLINE K(lanes) K(totals)(const K(lanes) *sums)
{
    const f64v nan = v_f64_set1(NAN);
    K(lanes) totals = *sums;
    totals.low = v_f64_select(totals.low == totals.low, totals.low + 0.0, nan);
#if !AG_IS_F64
    totals.high = v_f64_select(totals.high == totals.high, totals.high + 0.0, nan);
#endif
    return totals;
}

AG_INLINE V K(rounded)(const K(lanes) *sums)
{
#if AG_IS_F64
    return sums->low;
#else
    return v_f32_narrow(sums->low, sums->high);
#endif
}

AG_INLINE double K(reduce)(const K(lanes) *sums)
{
#if AG_IS_F64
    return v_f64_reduce_sum(sums->low);
#else
    return v_f64_reduce_sum(sums->low + sums->high);
#endif
}

/* Ask for `count` elements of a row of the next group from i on, into the second cache: the memory should not rest while
 * results are made from what is there. */
AG_INLINE void K(ask_ahead)(const int op, const ag_ahead *ahead, ptrdiff_t i, ptrdiff_t count)
{
    for (ptrdiff_t byte = i * AG_SIZE; byte < (i + count) * AG_SIZE; byte += 64) {
        if (ahead->a) __builtin_prefetch(ahead->a + byte, 0, 2);
        if (ahead->a && K(reads_b)(op)) __builtin_prefetch(ahead->b + byte, 0, 2);
        if (ahead->out) __builtin_prefetch(ahead->out + byte, 1, 2);
    }
}

/* Maximum of the logits of n elements, NaN passed over. */
AG_INLINE real K(run_max)(const int op, const char *a, const uint8_t *mask, ptrdiff_t n, V scale)
{
    const V lowest = V_(set1)((real)-INFINITY);
    V best[4] = {lowest, lowest, lowest, lowest};
    ptrdiff_t i = 0;
    for (; i + 4 * VL <= n; i += 4 * VL) {
        AG_UNROLL(4)
        for (int j = 0; j < 4; j++) {
            best[j] = V_(max)(K(logit)(op, AG_LOAD(a + (i + j * VL) * AG_SIZE),
                                       K(get_mask)(K(masks_sum)(op), mask, i + j * VL), scale), best[j]);
        }
    }
    for (; i + VL <= n; i += VL) {
        best[0] = V_(max)(K(logit)(op, AG_LOAD(a + i * AG_SIZE), K(get_mask)(K(masks_sum)(op), mask, i), scale), best[0]);
    }
    if (i < n) {
        const V x = K(logit)(op, AG_LOAD_PARTIAL(a + i * AG_SIZE, n - i),
                             K(get_mask_partial)(K(masks_sum)(op), mask, i, n - i), scale);
        best[1] = V_(max)(V_(first)(n - i, x, lowest), best[1]);
    }
    return V_(reduce_max)(V_(max)(V_(max)(best[0], best[1]), V_(max)(best[2], best[3])));
}

/* A term that is left where `kept`, if not NULL, has room for it. */
AG_INLINE V K(kept_term)(V term, real *kept, ptrdiff_t i)
{
    if (kept) V_(store)(kept + i, term);
    return term;
}

/* Sum of the terms of one segment, n <= AG_SEGMENT(VL), in the order that rowwise.h fixes. */
AG_INLINE double K(run_sum)(const int op, const char *a, const char *b, const uint8_t *mask, ptrdiff_t n, V scale, V max,
                            real *kept)
{
#define AG_TERM(i) K(kept_term)(K(term_at)(op, a, b, mask, i, scale, max), kept, i)
    K(lanes) sums = {0};
    ptrdiff_t i = 0;
    for (; i + AG_BLOCK <= n; i += AG_BLOCK) {
        V partial = AG_TERM(i);
        if (K(is_forward)(op)) {
            for (int t = 1; t < 16; t++) partial += AG_TERM(i + t * VL);
        } else {
            AG_UNROLL(15)
            for (int t = 1; t < 16; t++) partial += AG_TERM(i + t * VL);
        }
        K(fold)(&sums, partial);
    }
    if (i < n) {
        V partial = {0};
        for (; i + VL <= n; i += VL) partial += AG_TERM(i);
        if (i < n) partial += K(kept_term)(K(term_at_partial)(op, a, b, mask, i, n - i, scale, max), kept, i);
        K(fold)(&sums, partial);
    }
    return K(reduce)(&sums);
#undef AG_TERM
}

/* Results of n elements. shift and factor: one value each, or (varying) one for each element. `kept`, if not NULL, has
 * the exponentials of a softmax. */
AG_INLINE void K(run_write)(const int op, const int varying, const char *a, const char *b, const uint8_t *mask, char *out,
                            ptrdiff_t n, V scale, const real *shift, const real *factor, const real *kept, int stream,
                            const ag_ahead *ahead)
{
    const int second = K(reads_b)(op), masked = K(is_masked)(op), two = K(is_forward)(op);
    const V none = {0};
    const V shift0 = varying ? none : V_(set1)(*shift), factor0 = varying || !two ? none : V_(set1)(*factor);
#define AG_SHIFT(i) (varying ? V_(load)(shift + (i)) : shift0)
#define AG_FACTOR(i) (varying && two ? V_(load)(factor + (i)) : factor0)
#define AG_VALUE(i)                                                                                                     \
    (kept ? V_(load)(kept + (i)) * AG_FACTOR(i)                                                                         \
          : K(value)(op, AG_LOAD(a + (i) * AG_SIZE), K(get)(second, b, i), K(get_mask)(masked, mask, i), scale,         \
                     AG_SHIFT(i), AG_FACTOR(i)))
/* Where all values of the two vectors are treated alike, their order is free. */
#define AG_WRITE_TWO(i, put, put_two)                                                                                   \
    do {                                                                                                                \
        if (varying || masked || kept) {                                                                                \
            put(out + (i) * AG_SIZE, AG_VALUE(i));                                                                      \
            put(out + ((i) + VL) * AG_SIZE, AG_VALUE((i) + VL));                                                        \
        } else {                                                                                                        \
            V a0, a1, b0 = none, b1 = none;                                                                             \
            AG_LOAD_TWO(a + (i) * AG_SIZE, &a0, &a1);                                                                   \
            if (second) AG_LOAD_TWO(b + (i) * AG_SIZE, &b0, &b1);                                                       \
            put_two(out + (i) * AG_SIZE, K(value)(op, a0, b0, (MASKV){0}, scale, shift0, factor0),                      \
                    K(value)(op, a1, b1, (MASKV){0}, scale, shift0, factor0));                                          \
        }                                                                                                               \
    } while (0)
#define AG_WRITE_PARTIAL(i, count)                                                                                      \
    do {                                                                                                                \
        const V shift_ = varying ? V_(load_partial)(shift + (i), count) : shift0;                                       \
        const V factor_ = varying && two ? V_(load_partial)(factor + (i), count) : factor0;                             \
        AG_STORE_PARTIAL(out + (i) * AG_SIZE,                                                                           \
                         kept ? V_(load_partial)(kept + (i), count) * factor_                                           \
                              : K(value)(op, AG_LOAD_PARTIAL(a + (i) * AG_SIZE, count),                                 \
                                         K(get_partial)(second, b, i, count),                                           \
                                         K(get_mask_partial)(masked, mask, i, count), scale, shift_, factor_),          \
                         count);                                                                                        \
    } while (0)
    ptrdiff_t i = 0;
    /* Whole cache lines alone are streamed: one that is written in both ways is slow. Where every run begins and ends with
     * part of a line, short ones are better left to the cache. */
    const ptrdiff_t before = (ptrdiff_t)(-(uintptr_t)out % 64);
    if (stream && before % AG_SIZE == 0 && n * AG_SIZE >= (before ? 2048 : 256)) {
        for (; i + VL <= before / AG_SIZE; i += VL) AG_STORE(out + i * AG_SIZE, AG_VALUE(i));
        if (i < before / AG_SIZE) {
            AG_WRITE_PARTIAL(i, before / AG_SIZE - i);
            i = before / AG_SIZE;
        }
        for (; i + AG_LINES <= n; i += AG_LINES) {
            AG_UNROLL(4)
            for (int j = 0; j < AG_LINES; j += 2 * VL) AG_WRITE_TWO(i + j, AG_STREAM, AG_STREAM_TWO);
            if (ahead) K(ask_ahead)(op, ahead, i, AG_LINES);
        }
    }
    for (; i + 4 * VL <= n; i += 4 * VL) {
        AG_WRITE_TWO(i, AG_STORE, AG_STORE_TWO);
        AG_WRITE_TWO(i + 2 * VL, AG_STORE, AG_STORE_TWO);
        if (varying && ahead) K(ask_ahead)(op, ahead, i, 4 * VL);
    }
    for (; i + VL <= n; i += VL) AG_STORE(out + i * AG_SIZE, AG_VALUE(i));
    if (i < n) AG_WRITE_PARTIAL(i, n - i);
#undef AG_SHIFT
#undef AG_FACTOR
#undef AG_VALUE
#undef AG_WRITE_TWO
#undef AG_WRITE_PARTIAL
}

/* ---- rows ----------------------------------------------------------------------------------------------------------- */

AG_INLINE double K(row_sum)(const int op, const char *a, const char *b, const uint8_t *mask, ptrdiff_t n, V scale,
                            real max, real *kept)
{
    const V max_v = V_(set1)(max);
    if (n <= AG_SEGMENT(VL)) return K(run_sum)(op, a, b, mask, n, scale, max_v, kept) + 0.0;
    ag_sum total = {0.0, 0.0};
    for (ptrdiff_t i = 0; i < n; i += AG_SEGMENT(VL)) {
        const ptrdiff_t length = n - i < AG_SEGMENT(VL) ? n - i : AG_SEGMENT(VL);
        ag_sum_add(&total, K(run_sum)(op, a + i * AG_SIZE, b + i * AG_SIZE, mask + i, length, scale, max_v,
                                      kept ? kept + i : NULL));
    }
    return ag_sum_total(total);
}

AG_INLINE ag_tile K(some_rows)(const ag_tile *tile, ptrdiff_t begin, ptrdiff_t count)
{
    ag_tile part = *tile;
    part.a += begin * tile->a_stride;
    part.b += begin * tile->b_stride;
    part.mask += begin * tile->mask_stride;
    part.out += begin * tile->out_stride;
    part.rows = count;
    return part;
}

/* Maxima, and sums, of four rows of n <= AG_BLOCK / 2 elements: what waits in one row lets the others go on. */
AG_INLINE void K(four_maxima)(const int op, const ag_tile *rows, V scale, real *max)
{
    const ptrdiff_t n = rows->n;
    const V lowest = V_(set1)((real)-INFINITY);
    V best[4] = {lowest, lowest, lowest, lowest};
    ptrdiff_t i = 0;
    for (; i + VL <= n; i += VL) {
        AG_UNROLL(4)
        for (int r = 0; r < 4; r++) {
            best[r] = V_(max)(K(logit)(op, AG_LOAD(rows->a + r * rows->a_stride + i * AG_SIZE),
                                       K(get_mask)(K(masks_sum)(op), rows->mask + r * rows->mask_stride, i), scale),
                              best[r]);
        }
    }
    if (i < n) {
        AG_UNROLL(4)
        for (int r = 0; r < 4; r++) {
            const V x = K(logit)(op, AG_LOAD_PARTIAL(rows->a + r * rows->a_stride + i * AG_SIZE, n - i),
                                 K(get_mask_partial)(K(masks_sum)(op), rows->mask + r * rows->mask_stride, i, n - i),
                                 scale);
            best[r] = V_(max)(V_(first)(n - i, x, lowest), best[r]);
        }
    }
    AG_UNROLL(4)
    for (int r = 0; r < 4; r++) max[r] = V_(reduce_max)(best[r]);
}

AG_INLINE void K(four_sums)(const int op, const ag_tile *rows, V scale, const real *max, real *kept, ptrdiff_t pitch,
                            double *sums)
{
    const ptrdiff_t n = rows->n;
    V partial[4] = {{0}};
    ptrdiff_t i = 0;
#define AG_ADD_TERMS(term, ...)                                                                                         \
    AG_UNROLL(4)                                                                                                        \
    for (int r = 0; r < 4; r++) {                                                                                       \
        partial[r] += K(kept_term)(term(op, rows->a + r * rows->a_stride, rows->b + r * rows->b_stride,                 \
                                        rows->mask + r * rows->mask_stride, __VA_ARGS__, scale, V_(set1)(max[r])),      \
                                   kept ? kept + r * pitch : NULL, i);                                                  \
    }
    for (; i + VL <= n; i += VL) AG_ADD_TERMS(K(term_at), i)
    if (i < n) AG_ADD_TERMS(K(term_at_partial), i, n - i)
#undef AG_ADD_TERMS
    AG_UNROLL(4)
    for (int r = 0; r < 4; r++) {
        K(lanes) lanes = {0};
        K(fold)(&lanes, partial[r]);
        sums[r] = K(reduce)(&lanes) + 0.0;
    }
}

/* Of a packed row of n values: its sum in the order of run_sum, its maximum with NaN passed over. */
AG_INLINE double K(narrow_sum)(const real *terms, ptrdiff_t n)
{
    K(lanes) sums = {0};
    V partial = {0};
    for (ptrdiff_t k = 0; k < n; k += VL) partial += V_(first)(n - k, V_(load)(terms + k), (V){0});
    K(fold)(&sums, partial);
    return K(reduce)(&sums) + 0.0;
}

AG_INLINE real K(narrow_max)(const real *logits, ptrdiff_t n)
{
    const V lowest = V_(set1)((real)-INFINITY);
    V best = lowest;
    for (ptrdiff_t k = 0; k < n; k += VL) best = V_(max)(V_(first)(n - k, V_(load)(logits + k), lowest), best);
    return V_(reduce_max)(best);
}

/* The same of `count` rows, a multiple of VL, of n <= AG_NARROWEST values: VL rows at a time, row r in lane r. With a
 * constant n; see AG_WITH_CONSTANT. */
AG_INLINE V K(across_rows)(const real *values, const ptrdiff_t n)
{
    V v;
    AG_UNROLL(16)
    for (int r = 0; r < VL; r++) v[r] = values[r * n];
    return v;
}

AG_INLINE void K(sums_of)(const real *terms, ptrdiff_t count, const ptrdiff_t n, double *sums)
{
    for (ptrdiff_t row = 0; row < count; row += VL) {
        K(lanes) lanes[8] = {0};
        AG_UNROLL(8)
        for (ptrdiff_t k = 0; k < n; k++) K(fold)(&lanes[k], K(across_rows)(terms + row * n + k, n));
        AG_UNROLL(3)
        for (ptrdiff_t half = 4; half > 0; half /= 2) {
            AG_UNROLL(4)
            for (ptrdiff_t k = 0; k < half; k++) {
                if (k + half >= n) continue;
                lanes[k].low += lanes[k + half].low;
#if !AG_IS_F64
                lanes[k].high += lanes[k + half].high;
#endif
            }
        }
        v_f64_store(sums + row, lanes[0].low + 0.0);
#if !AG_IS_F64
        v_f64_store(sums + row + VL / 2, lanes[0].high + 0.0);
#endif
    }
}

AG_INLINE void K(max_of)(const real *logits, ptrdiff_t count, const ptrdiff_t n, real *max)
{
    for (ptrdiff_t row = 0; row < count; row += VL) {
        V best = V_(set1)((real)-INFINITY);
        AG_UNROLL(8)
        for (ptrdiff_t k = 0; k < n; k++) best = V_(max)(K(across_rows)(logits + row * n + k, n), best);
        V_(store)(max + row, best);
    }
}

AG_INLINE void K(spread_over)(const real *values, ptrdiff_t count, const ptrdiff_t n, real *to)
{
    for (ptrdiff_t row = 0; row < count; row++) {
        AG_UNROLL(8)
        for (ptrdiff_t k = 0; k < n; k++) to[row * n + k] = values[row];
    }
}

/* Call with n as a constant, for n <= AG_NARROWEST <= 8. */
#define AG_WITH_CONSTANT(function, from, count, n, to)                                                                   \
    switch (n) {                                                                                                        \
    case 1: function(from, count, 1, to); break;                                                                        \
    case 2: function(from, count, 2, to); break;                                                                        \
    case 3: function(from, count, 3, to); break;                                                                        \
    case 4: function(from, count, 4, to); break;                                                                        \
    case 5: function(from, count, 5, to); break;                                                                        \
    case 6: function(from, count, 6, to); break;                                                                        \
    case 7: function(from, count, 7, to); break;                                                                        \
    default: function(from, count, 8, to); break;                                                                       \
    }

/* How many of `rows` packed rows of n values are taken VL at a time. */
AG_INLINE ptrdiff_t K(rows_together)(ptrdiff_t rows, ptrdiff_t n) { return n <= AG_NARROWEST ? rows / VL * VL : 0; }

/* Sums, and maxima, of `rows` packed rows. */
AG_NOINLINE void K(narrow_sums)(const real *terms, ptrdiff_t rows, ptrdiff_t n, double *sums)
{
    const ptrdiff_t together = K(rows_together)(rows, n);
    if (together) AG_WITH_CONSTANT(K(sums_of), terms, together, n, sums)
    for (ptrdiff_t r = together; r < rows; r++) sums[r] = K(narrow_sum)(terms + r * n, n);
    for (ptrdiff_t r = 0; r < rows; r++) sums[r] = ag_one_nan(sums[r]);
}

AG_NOINLINE void K(narrow_maxima)(const real *logits, ptrdiff_t rows, ptrdiff_t n, real *max)
{
    const ptrdiff_t together = K(rows_together)(rows, n);
    if (together) AG_WITH_CONSTANT(K(max_of), logits, together, n, max)
    for (ptrdiff_t r = together; r < rows; r++) max[r] = K(narrow_max)(logits + r * n, n);
}

/* One value for each row in the place of each of its n elements; beyond the last element is room for a vector. */
AG_NOINLINE void K(spread)(const real *values, ptrdiff_t rows, ptrdiff_t n, real *to)
{
    if (n <= AG_NARROWEST) {
        AG_WITH_CONSTANT(K(spread_over), values, rows, n, to)
        return;
    }
    for (ptrdiff_t r = 0; r < rows; r++) {
        const V value = V_(set1)(values[r]);
        for (ptrdiff_t k = 0; k < n; k += VL) V_(store)(to + r * n + k, value);
    }
}

/* Packed rows narrower than a few vectors. All arithmetic runs over the flat elements of a group of rows, however the
 * rows lie in the vectors; only sums and maxima are taken row by row, from a copy of the terms in the first cache, and
 * written back as one value per element. */
AG_INLINE void K(narrow_rows)(const int op, const ag_tile *tile)
{
    /* On the stack, which may be small in a thread of a team. */
    enum { CAPACITY = AG_IS_F64 ? 512 : 1024, PADDED = CAPACITY + AG_LANES };
    real terms[PADDED] __attribute__((aligned(64))), shift[PADDED] __attribute__((aligned(64)));
    real factor[PADDED] __attribute__((aligned(64))), each[CAPACITY] __attribute__((aligned(64)));
    double sums[CAPACITY] __attribute__((aligned(64)));
    const ptrdiff_t n = tile->n, group = CAPACITY / n / VL * VL;
    const V scale = V_(set1)((real)tile->scale), lowest = V_(set1)((real)-INFINITY);
    for (ptrdiff_t row = 0; row < tile->rows; row += group) {
        const ptrdiff_t rows = tile->rows - row < group ? tile->rows - row : group, count = rows * n;
        const char *a = tile->a + row * n * AG_SIZE, *b = tile->b + row * n * AG_SIZE;
        const uint8_t *mask = tile->mask + row * n;
        ptrdiff_t i = 0;
        if (K(is_forward)(op)) {
            for (; i + VL <= count; i += VL) {
                V_(store)(terms + i, K(logit)(op, AG_LOAD(a + i * AG_SIZE), K(get_mask)(K(masks_sum)(op), mask, i), scale));
            }
            if (i < count) {
                V_(store)(terms + i, K(logit)(op, AG_LOAD_PARTIAL(a + i * AG_SIZE, count - i),
                                              K(get_mask_partial)(K(masks_sum)(op), mask, i, count - i), scale));
            }
            K(narrow_maxima)(terms, rows, n, each);
            K(spread)(each, rows, n, shift);
            for (i = 0; i < count; i += VL) {
                const V shifted = V_(load)(terms + i) - V_(load)(shift + i);
                /* The log-softmax needs the shifted logits again, the others their exponentials. */
                if (op == AG_LOG_SOFTMAX) V_(store)(shift + i, shifted);
                V_(store)(terms + i, V_(exp)(shifted));
            }
        } else {
            for (; i + VL <= count; i += VL) V_(store)(terms + i, K(term_at)(op, a, b, mask, i, scale, lowest));
            if (i < count) V_(store)(terms + i, K(term_at_partial)(op, a, b, mask, i, count - i, scale, lowest));
        }
        K(narrow_sums)(terms, rows, n, sums);
        if (K(is_forward)(op)) {
            for (ptrdiff_t r = 0; r < rows; r += AG_LANES / 2) v_f64_store(sums + r, K(factors)(op, v_f64_load(sums + r)));
        }
        for (ptrdiff_t r = 0; r < rows; r++) each[r] = (real)sums[r];
        K(spread)(each, rows, n, K(is_forward)(op) ? factor : shift);
        char *out = tile->out + row * n * AG_SIZE;
        if (!K(is_forward)(op)) {
            K(run_write)(op, 1, a, b, mask, out, count, scale, shift, factor, NULL, tile->stream, NULL);
            continue;
        }
        for (i = 0; i + VL <= count; i += VL) {
            const V spread = V_(load)(factor + i);
            AG_STORE(out + i * AG_SIZE, op == AG_LOG_SOFTMAX ? V_(load)(shift + i) - spread : V_(load)(terms + i) * spread);
        }
        if (i < count) {
            const V spread = V_(load)(factor + i);
            AG_STORE_PARTIAL(out + i * AG_SIZE,
                             op == AG_LOG_SOFTMAX ? V_(load)(shift + i) - spread : V_(load)(terms + i) * spread, count - i);
        }
    }
}

/* Rows in groups, sums first: the additions of one row run beside the arithmetic of another, and the exponentials of
 * rows that are not too long are kept for the results. */
AG_INLINE void K(wide_rows)(const int op, const ag_tile *tile)
{
    /* On the stack, which may be small in a thread of a team. */
    enum { GROUP = 8, GROUP_BYTES = 8 << 10, CAPACITY = (16 << 10) / sizeof(real) };
    real kept[CAPACITY] __attribute__((aligned(64))), max[GROUP] = {0};
    double sums[GROUP] = {0};
    const ptrdiff_t n = tile->n, width = n * AG_SIZE, pitch = (n + VL - 1) / VL * VL;
    const int asks = tile->stream && width <= AG_MAX_AHEAD;
    const int keeps = K(is_forward)(op) && op != AG_LOG_SOFTMAX && pitch <= CAPACITY;
    const ptrdiff_t fitting = keeps ? CAPACITY / pitch : GROUP_BYTES / width;
    const ptrdiff_t group = fitting >= GROUP ? GROUP : fitting > 1 ? fitting : 1;
    const V scale = V_(set1)((real)tile->scale);
    for (ptrdiff_t row = 0; row < tile->rows; row += group) {
        const ptrdiff_t rows = tile->rows - row < group ? tile->rows - row : group;
        const ptrdiff_t in_fours = n <= AG_BLOCK / 2 ? rows / 4 * 4 : 0;
        const ag_tile here = K(some_rows)(tile, row, rows);
        if (K(is_forward)(op)) {
            for (ptrdiff_t r = 0; r < in_fours; r += 4) {
                const ag_tile four = K(some_rows)(&here, r, 4);
                K(four_maxima)(op, &four, scale, max + r);
            }
            for (ptrdiff_t r = in_fours; r < rows; r++) {
                max[r] = K(run_max)(op, here.a + r * here.a_stride, here.mask + r * here.mask_stride, n, scale);
            }
        }
        for (ptrdiff_t r = 0; r < in_fours; r += 4) {
            const ag_tile four = K(some_rows)(&here, r, 4);
            K(four_sums)(op, &four, scale, max + r, keeps ? kept + r * pitch : NULL, pitch, sums + r);
        }
        for (ptrdiff_t r = in_fours; r < rows; r++) {
            const ag_tile one = K(some_rows)(&here, r, 1);
            sums[r] = K(row_sum)(op, one.a, one.b, one.mask, n, scale, max[r], keeps ? kept + r * pitch : NULL);
        }
        for (ptrdiff_t r = 0; r < rows; r++) sums[r] = ag_one_nan(sums[r]);
        if (K(is_forward)(op)) {
            for (ptrdiff_t r = 0; r < rows; r += AG_LANES / 2) {
                v_f64_store(sums + r, K(factors)(op, v_f64_load(sums + r)));
            }
        }
        for (ptrdiff_t r = 0; r < rows; r++) {
            const ag_tile one = K(some_rows)(&here, r, 1);
            const ag_ahead next = {one.a + group * one.a_stride, one.b + group * one.b_stride, NULL};
            const real shift = K(shift_of)(op, max[r], sums[r]), factor = (real)sums[r];
            const ag_ahead *ahead = asks && row + r + group < tile->rows ? &next : NULL;
            if (keeps) {
                K(run_write)(op, 0, one.a, one.b, one.mask, one.out, n, scale, &shift, &factor, &kept[r * pitch],
                             tile->stream, ahead);
            } else {
                K(run_write)(op, 0, one.a, one.b, one.mask, one.out, n, scale, &shift, &factor, NULL, tile->stream, ahead);
            }
        }
    }
}

/* Rows of one to four whole vectors (`vectors` is a constant), which stay in registers. What the processor does for a row
 * waits for nothing that another row needs, so they are taken one by one: reads and writes then come evenly. */
AG_INLINE double K(vector_sum)(const int op, const int vectors, const V *x, const V *y, const MASKV *mask, V scale, V max,
                               real *kept)
{
    V partial = {0};
    K(lanes) lanes = {0};
    AG_UNROLL(4)
    for (int j = 0; j < vectors; j++) {
        partial += K(kept_term)(K(term)(op, x[j], y[j], mask[j], scale, max), kept, j * VL);
    }
    K(fold)(&lanes, partial);
    return ag_one_nan(K(reduce)(&lanes) + 0.0);
}

AG_INLINE void K(vector_rows_backward)(const int op, const int vectors, const ag_tile *tile)
{
    const V none = {0}, scale = V_(set1)((real)tile->scale);
    /* Whole lines alone are streamed (a vector of 16-bit values is none), and rows do not end where these do: what is left of
     * a row begins the next line. */
    const ptrdiff_t skew = (ptrdiff_t)((uintptr_t)tile->out % (VL * AG_SIZE)), left = skew / AG_SIZE;
    const int stream = AG_SIZE >= 4 && tile->stream && tile->out_stride == tile->n * AG_SIZE && skew % AG_SIZE == 0;
    char *line = tile->out - skew;
    V last = none;
    for (ptrdiff_t row = 0; row < tile->rows; row++) {
        const ag_tile one = K(some_rows)(tile, row, 1);
        V x[4], y[4], value[4];
        MASKV mask[4];
        AG_UNROLL(4)
        for (int j = 0; j < vectors; j++) {
            x[j] = AG_LOAD(one.a + j * VL * AG_SIZE);
            y[j] = AG_LOAD(one.b + j * VL * AG_SIZE);
            mask[j] = K(get_mask)(K(is_masked)(op), one.mask, j * VL);
        }
        const V shift = V_(set1)((real)K(vector_sum)(op, vectors, x, y, mask, scale, none, NULL));
        AG_UNROLL(4)
        for (int j = 0; j < vectors; j++) value[j] = K(value)(op, x[j], y[j], mask[j], scale, shift, none);
        if (!stream) {
            AG_UNROLL(4)
            for (int j = 0; j < vectors; j++) AG_STORE(one.out + j * VL * AG_SIZE, value[j]);
            continue;
        }
        AG_UNROLL(4)
        for (int j = 0; j < vectors; j++, line += VL * AG_SIZE) {
            if (row == 0 && j == 0 && left) {
                AG_STORE_PARTIAL(tile->out, value[j], VL - left);
            } else {
                AG_STREAM(line, V_(join)(last, value[j], VL - left));
            }
            last = value[j];
        }
    }
    if (stream && left) AG_STORE_PARTIAL(line, V_(join)(last, last, VL - left), left);
}

/* The same, some at a time: logarithms and quotients of all sums together. */
AG_INLINE void K(vector_rows_forward)(const int op, const int vectors, const ag_tile *tile)
{
    enum { GROUP = 8 };
    const ptrdiff_t n = vectors * VL;
    const int keeps = op != AG_LOG_SOFTMAX;
    const V none[4] = {{0}}, scale = V_(set1)((real)tile->scale);
    real kept[GROUP * 4 * VL] __attribute__((aligned(64))), max[GROUP] = {0};
    double sums[GROUP] = {0};
    for (ptrdiff_t row = 0; row < tile->rows; row += GROUP) {
        const ptrdiff_t rows = tile->rows - row < GROUP ? tile->rows - row : GROUP;
        const ag_tile here = K(some_rows)(tile, row, rows);
        for (ptrdiff_t r = 0; r < rows; r++) {
            const ag_tile one = K(some_rows)(&here, r, 1);
            V x[4], best = V_(set1)((real)-INFINITY);
            MASKV mask[4];
            AG_UNROLL(4)
            for (int j = 0; j < vectors; j++) {
                x[j] = AG_LOAD(one.a + j * VL * AG_SIZE);
                mask[j] = K(get_mask)(K(masks_sum)(op), one.mask, j * VL);
                best = V_(max)(K(logit)(op, x[j], mask[j], scale), best);
            }
            max[r] = V_(reduce_max)(best);
            sums[r] = K(vector_sum)(op, vectors, x, none, mask, scale, V_(set1)(max[r]), keeps ? kept + r * n : NULL);
        }
        for (ptrdiff_t r = 0; r < rows; r += AG_LANES / 2) v_f64_store(sums + r, K(factors)(op, v_f64_load(sums + r)));
        for (ptrdiff_t r = 0; r < rows; r++) {
            const ag_tile one = K(some_rows)(&here, r, 1);
            const V shift = V_(set1)(max[r]), factor = V_(set1)((real)sums[r]);
            AG_UNROLL(4)
            for (ptrdiff_t i = 0; i < n; i += VL) {
                AG_STORE(one.out + i * AG_SIZE, keeps ? V_(load)(kept + r * n + i) * factor
                                                      : (AG_LOAD(one.a + i * AG_SIZE) - shift) - factor);
            }
        }
    }
}

AG_INLINE void K(vector_rows)(const int op, const int vectors, const ag_tile *tile)
{
    if (K(is_forward)(op)) {
        K(vector_rows_forward)(op, vectors, tile);
    } else {
        K(vector_rows_backward)(op, vectors, tile);
    }
}

AG_INLINE void K(rows)(const int op, const ag_tile *tile)
{
    const ptrdiff_t n = tile->n, width = n * AG_SIZE;
    const int packed = tile->a_stride == width && tile->out_stride == width && (!K(reads_b)(op) || tile->b_stride == width) &&
                       (!K(is_masked)(op) || tile->mask_stride == n);
    if (n == VL) {
        K(vector_rows)(op, 1, tile);
    } else if (n == 2 * VL) {
        K(vector_rows)(op, 2, tile);
    } else if (n == 3 * VL) {
        K(vector_rows)(op, 3, tile);
    } else if (n == 4 * VL) {
        K(vector_rows)(op, 4, tile);
    } else if (n <= AG_NARROW && n % VL && tile->rows > 1 && packed) {
        K(narrow_rows)(op, tile); /* vectors would be part empty */
    } else {
        K(wide_rows)(op, tile);
    }
    if (tile->stream) v_fence();
}

/* ---- columns -------------------------------------------------------------------------------------------------------- */

/* best[c] = max(best[c], elements of column c); `best` is padded to whole vectors */
AG_INLINE void K(raise_max)(const char *a, ptrdiff_t width, real *best)
{
    ptrdiff_t c = 0;
    for (; c + VL <= width; c += VL) V_(store)(best + c, V_(max)(AG_LOAD(a + c * AG_SIZE), V_(load)(best + c)));
    if (c < width) {
        const V x = V_(first)(width - c, AG_LOAD_PARTIAL(a + c * AG_SIZE, width - c), V_(set1)((real)-INFINITY));
        V_(store)(best + c, V_(max)(x, V_(load)(best + c)));
    }
}

/* Maxima of the columns, NaN passed over. Packed narrow columns are taken VL rows at a time. */
AG_NOINLINE void K(columns_max)(const ag_tile *tile, real *best, double *max)
{
    const ptrdiff_t columns = tile->rows, width = columns * AG_SIZE;
    const int packed = ag_tile_is_packed(tile, width, 0) && columns <= AG_PACKED_COLUMNS;
    const ptrdiff_t together = !packed ? 1 : tile->n < VL ? tile->n : VL;
    for (ptrdiff_t c = 0; c < together * columns + VL; c++) best[c] = (real)-INFINITY;
    for (ptrdiff_t k = 0; k < tile->n; k += together) {
        const ptrdiff_t rows = tile->n - k < together ? tile->n - k : together;
        K(raise_max)(tile->a + k * tile->a_stride, rows * columns, best);
    }
    for (ptrdiff_t t = 1; t < together; t++) {
        const real *row = best + t * columns;
        for (ptrdiff_t c = 0; c < columns; c++) best[c] = row[c] > best[c] ? row[c] : best[c];
    }
    for (ptrdiff_t c = 0; c < columns; c++) max[c] = best[c];
}

/* sums[c] (+)= partial, in float64 */
AG_INLINE void K(add_partial)(int first, V partial, double *sums)
{
    K(lanes) lanes = {0};
    if (!first) {
        lanes.low = v_f64_load(sums);
#if !AG_IS_F64
        lanes.high = v_f64_load(sums + VL / 2);
#endif
    }
    K(fold)(&lanes, partial);
    v_f64_store(sums, lanes.low);
#if !AG_IS_F64
    v_f64_store(sums + VL / 2, lanes.high);
#endif
}

/* sums[c] (+)= the terms of `count` rows at column c, added in the compute type, for `width` consecutive columns. Eight
 * vectors of a row at a time: with row lengths of a power of two all rows compete for the same few places in the cache,
 * so what is fetched has to be used at once. */
AG_INLINE void K(add_rows)(const int op, int first, const char *a, const char *b, ptrdiff_t a_step, ptrdiff_t b_step,
                           ptrdiff_t count, ptrdiff_t width, const real *max, double *sums, int asks)
{
    enum { TOGETHER = 8 };
    const V none = {0};
    ptrdiff_t c = 0;
    for (; c + TOGETHER * VL <= width; c += TOGETHER * VL) {
        V partial[TOGETHER];
        AG_UNROLL(8)
        for (int j = 0; j < TOGETHER; j++) partial[j] = none;
        for (ptrdiff_t t = 0; t < count; t++) {
            const char *a_t = a + t * a_step, *b_t = b + t * b_step;
            AG_UNROLL(8)
            for (int j = 0; j < TOGETHER; j++) {
                const ptrdiff_t i = c + j * VL;
                partial[j] += K(term_at)(op, a_t, b_t, NULL, i, none, K(is_forward)(op) ? V_(load)(max + i) : none);
                /* The log-softmax gradient reads b only when it writes. */
                if (op == AG_LOG_SOFTMAX_BACKWARD && asks) __builtin_prefetch(b_t + i * AG_SIZE, 0, 2);
            }
        }
        AG_UNROLL(8)
        for (int j = 0; j < TOGETHER; j++) K(add_partial)(first, partial[j], sums + c + j * VL);
    }
    for (; c < width; c += VL) {
        const V max_v = K(is_forward)(op) ? V_(load)(max + c) : none;
        V partial = none;
        for (ptrdiff_t t = 0; t < count; t++) {
            const char *a_t = a + t * a_step, *b_t = b + t * b_step;
            partial += c + VL <= width ? K(term_at)(op, a_t, b_t, NULL, c, none, max_v)
                                       : K(term_at_partial)(op, a_t, b_t, NULL, c, width - c, none, max_v);
        }
        K(add_partial)(first, partial, sums + c);
    }
}

/* The same for all lanes of a block of `count` rows, taken as they lie in memory: a lane's terms are added up at
 * partial + lane * pitch first. So memory is read as one stream, and the next row is asked for all the while. */
AG_INLINE void K(add_block)(const int op, int first, const char *a, const char *b, ptrdiff_t a_step, ptrdiff_t b_step,
                            ptrdiff_t count, ptrdiff_t width, ptrdiff_t pitch, const real *max, real *partial, double *sums)
{
    const V none = {0};
    for (ptrdiff_t t = 0; t < count; t++, a += a_step, b += b_step) {
        real *lane = partial + t % VL * pitch;
        for (ptrdiff_t c = 0; c < width; c += VL) {
            const V max_v = K(is_forward)(op) ? V_(load)(max + c) : none;
            const V term = c + VL <= width ? K(term_at)(op, a, b, NULL, c, none, max_v)
                                           : K(term_at_partial)(op, a, b, NULL, c, width - c, none, max_v);
            V_(store)(lane + c, (t < VL ? none : V_(load)(lane + c)) + term);
            __builtin_prefetch(a + a_step + c * AG_SIZE, 0, 2);
            if (K(reads_b_for_sum)(op)) __builtin_prefetch(b + b_step + c * AG_SIZE, 0, 2);
        }
    }
    for (ptrdiff_t lane = 0; lane < VL && lane < count; lane++) {
        for (ptrdiff_t c = lane * pitch; c < lane * pitch + width; c += VL) {
            K(add_partial)(first, V_(load)(partial + c), sums + c);
        }
    }
}

/* Sums of one segment, tile->n <= AG_SEGMENT(VL), for each of tile->rows columns, left in sums[0 .. rows).
 * Lane j of the fixed order is the array of sums that starts at j * pitch. Packed narrow columns are taken VL rows at a
 * time, as one row of VL * columns elements: then lanes lie side by side and pitch is the number of columns. */
AG_INLINE void K(columns_sum)(const int op, const ag_tile *tile, const real *max, real *partial, double *sums)
{
    const ptrdiff_t n = tile->n, columns = tile->rows, width = columns * AG_SIZE;
    const int packed = ag_tile_is_packed(tile, width, K(reads_b_for_sum)(op)) && columns <= AG_PACKED_COLUMNS;
    const ptrdiff_t pitch = packed ? columns : (columns + VL - 1) / VL * VL;
    for (ptrdiff_t block = 0; block < n; block += AG_BLOCK) {
        const ptrdiff_t length = n - block < AG_BLOCK ? n - block : AG_BLOCK;
        if (!packed && !tile->fits) {
            K(add_block)(op, block == 0, tile->a + block * tile->a_stride, tile->b + block * tile->b_stride,
                         tile->a_stride, tile->b_stride, length, columns, pitch, max, partial, sums);
            continue;
        }
        /* Packed rows: the lanes with a term in the last, shorter group of VL rows together, and the others together. */
        for (ptrdiff_t lane = 0; lane < VL && lane < length;) {
            const ptrdiff_t count = (length - lane + VL - 1) / VL, rest = length % VL;
            const ptrdiff_t together = !packed ? 1 : lane < rest ? rest : (length < VL ? length : VL) - lane;
            const char *a = tile->a + (block + lane) * tile->a_stride, *b = tile->b + (block + lane) * tile->b_stride;
            const real *max_l = packed ? max + lane * columns : max;
            K(add_rows)(op, block == 0, a, b, VL * tile->a_stride, VL * tile->b_stride, count, together * columns, max_l,
                        sums + lane * pitch, tile->fits);
            lane += together;
        }
    }
    ptrdiff_t lanes = n < VL ? n : VL;
    for (ptrdiff_t half = VL / 2; half > 0; half /= 2) {
        if (lanes <= half) continue;
        const ptrdiff_t count = (lanes - half) * pitch;
        const double *upper = sums + half * pitch;
        for (ptrdiff_t c = 0; c < count; c++) sums[c] += upper[c];
        lanes = half;
    }
}

/* Results of tile->n rows, `repeats` of them at a time; shift and factor have one value for each of their elements. */
AG_INLINE void K(columns_write)(const int op, const ag_tile *tile, const real *shift, const real *factor,
                                ptrdiff_t repeats)
{
    const V none = {0};
    const ptrdiff_t a_step = repeats * tile->a_stride, b_step = repeats * tile->b_stride;
    const ptrdiff_t out_step = repeats * tile->out_stride;
    /* Backwards: the rows that the sums read last are the ones still in the cache. */
    for (ptrdiff_t k = (tile->n - 1) / repeats * repeats; k >= 0; k -= repeats) {
        const ptrdiff_t rows = tile->n - k < repeats ? tile->n - k : repeats;
        const char *a = tile->a + k * tile->a_stride, *b = tile->b + k * tile->b_stride;
        char *out = tile->out + k * tile->out_stride;
        /* Results that do not bypass the cache wait for their old values otherwise. */
        const ag_ahead next = {tile->fits ? NULL : a - a_step, b - b_step, tile->stream ? NULL : out - out_step};
        K(run_write)(op, 1, a, b, NULL, out, rows * tile->rows, none, shift, factor, NULL, tile->stream, k ? &next : NULL);
    }
    if (tile->stream) v_fence();
}

/* A few vectors of columns of at most a block of rows: nothing but them leaves the registers and the first cache. `vectors`
 * is a constant, 4 or 1; one may be a part of a vector, `width` columns. */
AG_INLINE void K(load_strip)(const int vectors, const char *p, ptrdiff_t width, V *v)
{
    if (vectors > 1) {
        AG_UNROLL(2)
        for (int j = 0; j < vectors; j += 2) AG_LOAD_TWO(p + j * VL * AG_SIZE, &v[j], &v[j + 1]);
    } else {
        *v = width == VL ? AG_LOAD(p) : AG_LOAD_PARTIAL(p, width);
    }
}

AG_INLINE void K(store_strip)(const int vectors, char *p, ptrdiff_t width, int stream, const V *v)
{
    if (vectors > 1) {
        AG_UNROLL(2)
        for (int j = 0; j < vectors; j += 2) {
            if (stream) AG_STREAM_TWO(p + j * VL * AG_SIZE, v[j], v[j + 1]);
            else AG_STORE_TWO(p + j * VL * AG_SIZE, v[j], v[j + 1]);
        }
    } else if (width == VL) {
        AG_STORE(p, *v);
    } else {
        AG_STORE_PARTIAL(p, *v, width);
    }
}

AG_INLINE void K(strip)(const int op, const int vectors, const ag_tile *tile, ptrdiff_t c, ptrdiff_t width, int stream)
{
    enum { KEPT = 16, LEVELS = 4 };
    const char *a = tile->a + c * AG_SIZE, *b = tile->b + c * AG_SIZE;
    const ptrdiff_t n = tile->n, lanes = n < VL ? n : VL;
    const int keeps = K(is_forward)(op) && op != AG_LOG_SOFTMAX && n <= KEPT;
    const V none = {0};
    V x[4] = {none}, y[4] = {none}, shift[4] = {none}, factor[4] = {none}, kept[KEPT][4];
    if (K(is_forward)(op)) {
        AG_UNROLL(4)
        for (int j = 0; j < vectors; j++) shift[j] = V_(set1)((real)-INFINITY);
        for (ptrdiff_t k = 0; k < n; k++) {
            K(load_strip)(vectors, a + k * tile->a_stride, width, x);
            AG_UNROLL(4)
            for (int j = 0; j < vectors; j++) shift[j] = V_(max)(x[j], shift[j]);
        }
    }
    /* Lanes are added by halves: each as soon as its other half is there, of those that wait the last one first. */
    K(lanes) sum[4], waiting[LEVELS][4];
    ptrdiff_t half = 1, lane = 0;
    int count = 0;
    while (2 * half < lanes) half *= 2;
    if (lanes == 1) half = 0;
    for (;;) {
        V partial[4] = {none};
        for (ptrdiff_t k = lane; k < n; k += VL) {
            K(load_strip)(vectors, a + k * tile->a_stride, width, x);
            if (K(reads_b_for_sum)(op)) K(load_strip)(vectors, b + k * tile->b_stride, width, y);
            AG_UNROLL(4)
            for (int j = 0; j < vectors; j++) {
                const V term = K(term)(op, x[j], y[j], (MASKV){0}, none, shift[j]);
                if (keeps) kept[k][j] = term;
                partial[j] += term;
            }
        }
        AG_UNROLL(4)
        for (int j = 0; j < vectors; j++) {
            sum[j] = (K(lanes)){0};
            K(fold)(&sum[j], partial[j]);
        }
        ptrdiff_t bit = half;
        for (; bit && ((lane & bit) || (lane | bit) >= lanes); bit /= 2) {
            if (!(lane & bit)) continue; /* the row is too short for an other half */
            count--;
            AG_UNROLL(4)
            for (int j = 0; j < vectors; j++) K(add_lanes)(&sum[j], &waiting[count][j]);
            lane ^= bit;
        }
        if (bit == 0) break;
        AG_UNROLL(4)
        for (int j = 0; j < vectors; j++) waiting[count][j] = sum[j];
        count++;
        lane |= bit;
    }
    AG_UNROLL(4)
    for (int j = 0; j < vectors; j++) {
        K(lanes) total = K(totals)(&sum[j]);
        if (K(is_forward)(op)) {
            total.low = K(factors)(op, total.low);
#if !AG_IS_F64
            total.high = K(factors)(op, total.high);
#endif
            factor[j] = K(rounded)(&total);
        } else {
            shift[j] = K(rounded)(&total);
        }
    }
    for (ptrdiff_t k = 0; k < n; k++) {
        if (!keeps) K(load_strip)(vectors, a + k * tile->a_stride, width, x);
        if (K(reads_b)(op)) K(load_strip)(vectors, b + k * tile->b_stride, width, y);
        AG_UNROLL(4)
        for (int j = 0; j < vectors; j++) {
            x[j] = keeps ? kept[k][j] * factor[j] : K(value)(op, x[j], y[j], (MASKV){0}, none, shift[j], factor[j]);
        }
        K(store_strip)(vectors, tile->out + k * tile->out_stride + c * AG_SIZE, width, stream, x);
    }
}

AG_INLINE void K(strips)(const int op, const ag_tile *tile)
{
    const ptrdiff_t columns = tile->rows, before = (ptrdiff_t)(-(uintptr_t)tile->out % 64) / AG_SIZE;
    const int stream = tile->stream && tile->out_stride % 64 == 0 && (uintptr_t)tile->out % AG_SIZE == 0;
    ptrdiff_t c = 0;
    for (ptrdiff_t width; stream && c < before && c < columns; c += width) {
        width = before - c < columns - c ? before - c : columns - c;
        width = width < VL ? width : VL;
        K(strip)(op, 1, tile, c, width, 0);
    }
    for (; c + 4 * VL <= columns; c += 4 * VL) K(strip)(op, 4, tile, c, VL, stream);
    for (; c < columns; c += VL) K(strip)(op, 1, tile, c, columns - c < VL ? columns - c : VL, 0);
    if (tile->stream) v_fence();
}

/* Where the pieces of a thread's scratch lie. */
typedef struct {
    double *sums;            /* one segment: VL lanes of columns */
    real *partial;           /* one block: VL lanes of columns */
    double *total, *error;   /* compensated sum over segments, one per column */
    real *shift, *factor;    /* one per column, then repeated */
    real *max;
} K(scratch);

AG_INLINE K(scratch) K(carve)(void *memory)
{
    K(scratch) s;
    s.sums = (double *)memory;
    s.partial = (real *)(s.sums + AG_LANES * AG_MAX_COLUMNS);
    s.total = (double *)(s.partial + VL * AG_MAX_COLUMNS);
    s.error = s.total + AG_MAX_COLUMNS;
    s.max = (real *)(s.error + AG_MAX_COLUMNS);
    s.shift = s.max + AG_SCRATCH_VALUES;
    s.factor = s.shift + AG_SCRATCH_VALUES;
    return s;
}

/* Repeat the first `columns` values until `count` are there. */
AG_INLINE void K(repeat)(real *values, ptrdiff_t columns, ptrdiff_t count)
{
    for (ptrdiff_t done = columns; done < count; done *= 2) {
        memcpy(values + done, values, sizeof(real) * (size_t)(done < count - done ? done : count - done));
    }
}

/* The maxima of the columns as the sums need them: repeated for packed rows. */
AG_INLINE void K(prepare_max)(const int op, const ag_tile *tile, const double *max, real *prepared)
{
    if (!K(is_forward)(op)) return;
    for (ptrdiff_t c = 0; c < tile->rows; c++) prepared[c] = (real)max[c];
    if (tile->rows <= AG_PACKED_COLUMNS) K(repeat)(prepared, tile->rows, (tile->n < VL ? tile->n : VL) * tile->rows);
}

/* `columns_sum` and `columns_write` with a constant operator. */
typedef void K(adder)(const ag_tile *tile, K(scratch) s);
typedef void K(writer)(const ag_tile *tile, const real *shift, const real *factor, ptrdiff_t repeats);
typedef void K(stripper)(const ag_tile *tile);

AG_INLINE void K(write_prepared)(const int op, K(writer) *write, const ag_tile *tile, const double *max, const double *sum,
                                 K(scratch) s)
{
    const ptrdiff_t columns = tile->rows;
    const double *shift = K(is_forward)(op) ? max : sum;
    for (ptrdiff_t c = 0; c < columns; c++) s.shift[c] = (real)shift[c];
    for (ptrdiff_t c = 0; K(is_forward)(op) && c < columns; c += AG_LANES / 2) {
        double factor[AG_LANES / 2];
        const ptrdiff_t count = columns - c < AG_LANES / 2 ? columns - c : AG_LANES / 2;
        v_f64_store(factor, K(factors)(op, count < AG_LANES / 2 ? v_f64_load_partial(sum + c, count) : v_f64_load(sum + c)));
        for (ptrdiff_t j = 0; j < count; j++) s.factor[c + j] = (real)factor[j];
    }
    ptrdiff_t repeats = 1;
    if (columns <= AG_PACKED_COLUMNS && ag_tile_is_packed(tile, columns * AG_SIZE, K(reads_b)(op)) &&
        tile->out_stride == columns * AG_SIZE) {
        repeats = AG_MAX_COLUMNS / columns < tile->n ? AG_MAX_COLUMNS / columns : tile->n;
        K(repeat)(s.shift, columns, repeats * columns);
        if (K(is_forward)(op)) K(repeat)(s.factor, columns, repeats * columns);
    }
    write(tile, s.shift, s.factor, repeats);
}

AG_INLINE void K(columns)(const int op, K(adder) *add, K(writer) *write, K(stripper) *strips, const ag_tile *tile,
                          void *memory)
{
    const ptrdiff_t columns = tile->rows, width = columns * AG_SIZE;
    const int packed = ag_tile_is_packed(tile, width, K(reads_b)(op)) && tile->out_stride == width;
    if (tile->n <= AG_STRIP_ROWS(VL) && (columns >= AG_STRIP_COLUMNS || !packed)) {
        strips(tile);
        return;
    }
    const K(scratch) s = K(carve)(memory);
    double *max = s.error; /* free until the sums begin */
    if (K(is_forward)(op)) {
        K(columns_max)(tile, s.shift, max);
        K(prepare_max)(op, tile, max, s.max);
    }
    if (tile->n <= AG_SEGMENT(VL)) {
        /* Adding one sum to nothing, and 0 to that */
        add(tile, s);
        for (ptrdiff_t c = 0; c < columns; c++) s.total[c] = ag_one_nan(s.sums[c] + 0.0);
        if (K(is_forward)(op)) {
            for (ptrdiff_t c = 0; c < columns; c++) max[c] = s.max[c];
        }
        K(write_prepared)(op, write, tile, max, s.total, s);
        return;
    }
    for (ptrdiff_t c = 0; c < columns; c++) s.total[c] = s.error[c] = 0.0;
    for (ptrdiff_t k = 0; k < tile->n; k += AG_SEGMENT(VL)) {
        ag_tile part = K(some_rows)(tile, k, columns);
        part.n = tile->n - k < AG_SEGMENT(VL) ? tile->n - k : AG_SEGMENT(VL);
        add(&part, s);
        ag_sums_add(s.total, s.error, s.sums, columns);
    }
    ag_sums_total(s.total, s.error, columns);
    if (K(is_forward)(op)) {
        for (ptrdiff_t c = 0; c < columns; c++) max[c] = s.max[c];
    }
    K(write_prepared)(op, write, tile, max, s.total, s);
}

/* ---- entry points: each of the above with a constant operator ------------------------------------------------------- */

#define AG_ENTRY_POINTS(op, name)                                                                                       \
    static void K(name##_rows)(const ag_tile *tile) { K(rows)(op, tile); }                                              \
    static double K(name##_piece_max)(const ag_tile *tile)                                                              \
    {                                                                                                                   \
        return K(run_max)(op, tile->a, tile->mask, tile->n, V_(set1)((real)tile->scale));                               \
    }                                                                                                                   \
    static double K(name##_piece_sum)(const ag_tile *tile, double max)                                                  \
    {                                                                                                                   \
        return K(run_sum)(op, tile->a, tile->b, tile->mask, tile->n, V_(set1)((real)tile->scale),                       \
                          V_(set1)((real)max), NULL);                                                                   \
    }                                                                                                                   \
    static void K(name##_piece_write)(const ag_tile *tile, double max, double sum)                                      \
    {                                                                                                                   \
        const real shift = K(shift_of)(op, max, sum), factor = K(factor_of)(op, sum);                                   \
        K(run_write)(op, 0, tile->a, tile->b, tile->mask, tile->out, tile->n, V_(set1)((real)tile->scale), &shift,      \
                     &factor, NULL, tile->stream, NULL);                                                                \
        if (tile->stream) v_fence();                                                                                    \
    }

#define AG_COLUMN_ENTRY_POINTS(op, name)                                                                                \
    AG_NOINLINE void K(name##_add)(const ag_tile *tile, K(scratch) s)                                                   \
    {                                                                                                                   \
        K(columns_sum)(op, tile, s.max, s.partial, s.sums);                                                             \
    }                                                                                                                   \
    AG_NOINLINE void K(name##_write)(const ag_tile *tile, const real *shift, const real *factor, ptrdiff_t repeats)     \
    {                                                                                                                   \
        K(columns_write)(op, tile, shift, factor, repeats);                                                             \
    }                                                                                                                   \
    AG_NOINLINE void K(name##_strips)(const ag_tile *tile) { K(strips)(op, tile); }                                     \
    static void K(name##_columns)(const ag_tile *tile, void *memory)                                                    \
    {                                                                                                                   \
        K(columns)(op, K(name##_add), K(name##_write), K(name##_strips), tile, memory);                                 \
    }                                                                                                                   \
    static void K(name##_columns_max)(const ag_tile *tile, double *max, void *memory)                                   \
    {                                                                                                                   \
        K(columns_max)(tile, K(carve)(memory).shift, max);                                                              \
    }                                                                                                                   \
    static void K(name##_columns_sum)(const ag_tile *tile, const double *max, double *sum, void *memory)                \
    {                                                                                                                   \
        const K(scratch) s = K(carve)(memory);                                                                          \
        K(prepare_max)(op, tile, max, s.max);                                                                           \
        K(name##_add)(tile, s);                                                                                         \
        for (ptrdiff_t c = 0; c < tile->rows; c++) sum[c] = s.sums[c];                                                  \
    }                                                                                                                   \
    static void K(name##_columns_write)(const ag_tile *tile, const double *max, const double *sum, void *memory)        \
    {                                                                                                                   \
        K(write_prepared)(op, K(name##_write), tile, max, sum, K(carve)(memory));                                       \
    }

AG_ENTRY_POINTS(AG_SOFTMAX_BACKWARD, softmax_backward)
AG_ENTRY_POINTS(AG_LOG_SOFTMAX_BACKWARD, log_softmax_backward)
AG_ENTRY_POINTS(AG_SCALED_MASKED_SOFTMAX_BACKWARD, scaled_masked_softmax_backward)
AG_ENTRY_POINTS(AG_SOFTMAX, softmax)
AG_ENTRY_POINTS(AG_LOG_SOFTMAX, log_softmax)
AG_ENTRY_POINTS(AG_SCALED_MASKED_SOFTMAX, scaled_masked_softmax)
AG_COLUMN_ENTRY_POINTS(AG_SOFTMAX_BACKWARD, softmax_backward)
AG_COLUMN_ENTRY_POINTS(AG_LOG_SOFTMAX_BACKWARD, log_softmax_backward)
AG_COLUMN_ENTRY_POINTS(AG_SOFTMAX, softmax)
AG_COLUMN_ENTRY_POINTS(AG_LOG_SOFTMAX, log_softmax)

#define AG_ROW_FUNCTIONS(name)                                                                                          \
    .rows = K(name##_rows), .piece_max = K(name##_piece_max), .piece_sum = K(name##_piece_sum),                         \
    .piece_write = K(name##_piece_write)
#define AG_COLUMN_FUNCTIONS(name)                                                                                       \
    .columns = K(name##_columns), .columns_max = K(name##_columns_max), .columns_sum = K(name##_columns_sum),           \
    .columns_write = K(name##_columns_write)

static const ag_row_kernels K(ag_rowwise)[AG_OP_COUNT] AG_UNUSED = {
    [AG_SOFTMAX_BACKWARD] = {.segment = AG_SEGMENT(VL), .strip_rows = AG_STRIP_ROWS(VL), AG_ROW_FUNCTIONS(softmax_backward),
                             AG_COLUMN_FUNCTIONS(softmax_backward)},
    [AG_LOG_SOFTMAX_BACKWARD] = {.segment = AG_SEGMENT(VL), .strip_rows = AG_STRIP_ROWS(VL), AG_ROW_FUNCTIONS(log_softmax_backward),
                                 AG_COLUMN_FUNCTIONS(log_softmax_backward)},
    [AG_SCALED_MASKED_SOFTMAX_BACKWARD] = {.segment = AG_SEGMENT(VL), .strip_rows = AG_STRIP_ROWS(VL), AG_ROW_FUNCTIONS(scaled_masked_softmax_backward)},
    [AG_SOFTMAX] = {.segment = AG_SEGMENT(VL), .strip_rows = AG_STRIP_ROWS(VL), AG_ROW_FUNCTIONS(softmax), AG_COLUMN_FUNCTIONS(softmax)},
    [AG_LOG_SOFTMAX] = {.segment = AG_SEGMENT(VL), .strip_rows = AG_STRIP_ROWS(VL), AG_ROW_FUNCTIONS(log_softmax), AG_COLUMN_FUNCTIONS(log_softmax)},
    [AG_SCALED_MASKED_SOFTMAX] = {.segment = AG_SEGMENT(VL), .strip_rows = AG_STRIP_ROWS(VL), AG_ROW_FUNCTIONS(scaled_masked_softmax)},
};

#undef AG_ENTRY_POINTS
#undef AG_COLUMN_ENTRY_POINTS
#undef AG_ROW_FUNCTIONS
#undef AG_COLUMN_FUNCTIONS
#undef AG_LOAD
#undef AG_STORE
#undef AG_STREAM
#undef AG_LOAD_TWO
#undef AG_STORE_TWO
#undef AG_STREAM_TWO
#undef AG_LOAD_PARTIAL
#undef AG_STORE_PARTIAL
#undef AG_SIZE
#undef VL
#undef real
#undef V
#undef MASKV
#undef V_
#undef K
#undef AG_BLOCK
#undef AG_LINES
#undef AG_NARROW
#undef AG_NARROWEST
#undef AG_WITH_CONSTANT
