/* Kernels of the cross-entropy on numbers of rows: their functions and sums, and the results of rows with one target each,
 * of which short columns are computed at once. Body header, included by loss_kernels.h. */

/* ---- functions of a number of each row --------------------------------------------------------------------------- */

AG_INLINE f64v K(loss_load)(const double *x, ptrdiff_t left)
{
    return left < AG_LANES / 2 ? v_f64_load_partial(x, left) : v_f64_load(x);
}

AG_INLINE void K(loss_store)(double *to, f64v x, ptrdiff_t left)
{
    if (left < AG_LANES / 2) v_f64_store_partial(to, x, left);
    else v_f64_store(to, x);
}

static void K(loss_log1p)(const double *x, double *results, ptrdiff_t count)
{
    for (ptrdiff_t i = 0; i < count; i += AG_LANES / 2) {
        K(loss_store)(results + i, v_f64_log1p(K(loss_load)(x + i, count - i)), count - i);
    }
}

/* ---- rows with one target each ----------------------------------------------------------------------------------- */

#if AG_IS_F64
#define AG_FOR_HALVES(statement) statement(low)
#else
#define AG_FOR_HALVES(statement) statement(low) statement(high)
#endif

AG_INLINE K(lane_sums) K(loss_widen)(V v)
{
    K(lane_sums) lanes;
#if AG_IS_F64
    lanes.low = v;
#else
    v_f32_widen(v, &lanes.low, &lanes.high);
#endif
    return lanes;
}

/* Load, or store, `left` numbers, but at most VL. */
AG_INLINE K(lane_sums) K(loss_load_lanes)(const double *x, ptrdiff_t left)
{
    K(lane_sums) lanes = {0};
    lanes.low = K(loss_load)(x, left);
#if !AG_IS_F64
    if (left > VL / 2) lanes.high = K(loss_load)(x + VL / 2, left - VL / 2);
#endif
    return lanes;
}

AG_INLINE void K(loss_store_lanes)(double *to, const K(lane_sums) *x, ptrdiff_t left)
{
    K(loss_store)(to, x->low, left);
#if !AG_IS_F64
    if (left > VL / 2) K(loss_store)(to + VL / 2, x->high, left - VL / 2);
#endif
}

/* Results of rows with one target each: losses, factors of the exponentials, and gradients at the targets. */
typedef struct {
    K(lane_sums) loss, factor, at_target;
} K(loss_results);

/* Compute results from `rest` of loss.h, and the maxima and the targets' logits, as `finish` of ag_loss_kernels does. If the
 * target does not have the maximum, `rest` includes its exponential e, and 1 - e is at least as large as the error of the
 * difference. */
AG_INLINE K(loss_results) K(loss_finish_vector)(const K(lane_sums) *rest, V max, V logit, V scale, double grad,
                                                double inverse, double smoothing)
{
    const double target_weight = 1 - smoothing;
    const K(lane_sums) exponential = K(loss_widen)(V_(exp)((logit - max) * scale));
    const K(lane_sums) wide_max = K(loss_widen)(max), wide_logit = K(loss_widen)(logit);
    K(loss_results) results;
#define AG_FINISH(half)                                                                                                \
    do {                                                                                                               \
        const f64v z = (wide_logit.half - wide_max.half) * inverse, r = rest->half;                                    \
        results.loss.half = v_f64_log1p(r);                                                                            \
        if (target_weight != 0) results.loss.half -= target_weight * z; /* which may be infinite */                    \
        results.factor.half = v_f64_set1(grad * inverse) / (r + 1.0);                                                  \
        results.at_target.half =                                                                                       \
            -results.factor.half * v_f64_select(z == 0, r, (r - exponential.half) + 1.0);                              \
    } while (0);
    AG_FOR_HALVES(AG_FINISH)
#undef AG_FINISH
    return results;
}

static void K(loss_finish)(const double *rest, const double *max, const double *logits, double scale, double grad,
                           double inverse, double smoothing, double *losses, double *factors, double *at_targets,
                           ptrdiff_t count)
{
    for (ptrdiff_t i = 0; i < count; i += VL) {
        const ptrdiff_t left = count - i;
        const K(lane_sums) r = K(loss_load_lanes)(rest + i, left), m = K(loss_load_lanes)(max + i, left);
        const K(lane_sums) z = K(loss_load_lanes)(logits + i, left);
        const K(loss_results) results = K(loss_finish_vector)(&r, K(to_compute_type)(&m), K(to_compute_type)(&z),
                                                              V_(set1)((compute_t)scale), grad, inverse, smoothing);
        K(loss_store_lanes)(losses + i, &results.loss, left);
        K(loss_store_lanes)(factors + i, &results.factor, left);
        K(loss_store_lanes)(at_targets + i, &results.at_target, left);
    }
}

/* ---- short columns ----------------------------------------------------------------------------------------------- */

/* Compute the maxima of the columns of a strip, their exponentials, and `rest` of loss.h. */
AG_INLINE void K(strip_statistics)(const int vectors, const ag_tile *tile, const char *a, ptrdiff_t width, V scale, V *max,
                                   V *cached, K(lane_sums) *rest)
{
    K(lane_sums) sums[4], accurate[4];
    i64v is_near_one = {0};
    int64_t has_near_one = 0;
    K(strip_max)(vectors, a, tile->a_stride, tile->n, width, max);
    K(strip_sum)(AG_LOSS_EXP, vectors, tile, a, a, width, scale, max, NULL, NULL, sums, cached);
    AG_UNROLL(4)
    for (int j = 0; j < vectors; j++) {
#define AG_SUBTRACT(half)                                                                                              \
    is_near_one |= sums[j].half < AG_ACCURATE_SUM;                                                                     \
    rest[j].half = sums[j].half - 1.0;
        AG_FOR_HALVES(AG_SUBTRACT)
#undef AG_SUBTRACT
    }
    AG_UNROLL(8)
    for (int j = 0; j < AG_LANES / 2; j++) has_near_one |= is_near_one[j];
    if (!has_near_one) return;
    K(strip_sum)(AG_LOSS_REST, vectors, tile, a, a, width, scale, max, NULL, NULL, accurate, cached);
    AG_UNROLL(4)
    for (int j = 0; j < vectors; j++) {
#define AG_REPLACE(half) rest[j].half = v_f64_select(sums[j].half < AG_ACCURATE_SUM, accurate[j].half, rest[j].half);
        AG_FOR_HALVES(AG_REPLACE)
#undef AG_REPLACE
    }
}

/* Store a row of a strip, with columns in order. */
AG_INLINE void K(store_columns)(const int vectors, char *out, ptrdiff_t width, int nontemporal, const V *v)
{
    AG_UNROLL(4)
    for (int j = 0; j < vectors; j++) {
        if (nontemporal) AG_STORE_NT(out + j * VL * AG_SIZE, v[j]);
        else if (vectors > 1 || width == VL) AG_STORE(out + j * VL * AG_SIZE, v[j]);
        else AG_STORE_PARTIAL(out, v[j], width);
    }
}

/* ---- short columns with one target each -------------------------------------------------------------------------- */

AG_INLINE int64_t K(loss_target)(const ag_single_target_columns *p, ptrdiff_t c)
{
    return p->has_wide_targets ? ((const int64_t *)p->targets)[c] : ((const int32_t *)p->targets)[c];
}

/* Return the indices of the targets of `width` columns; -1: the column is ignored. */
AG_INLINE V K(loss_load_targets)(const ag_single_target_columns *p, ptrdiff_t c, ptrdiff_t width)
{
    compute_t indices[VL] = {0};
    for (ptrdiff_t j = 0; j < width; j++) {
        const int64_t target = K(loss_target)(p, c + j);
        indices[j] = (compute_t)(target == p->ignore_index ? -1 : target);
    }
    return V_(load)(indices);
}

/* Return the weights of `width` columns, and set the targets of those without a token weight to -1. */
AG_NOINLINE K(lane_sums) K(loss_load_weights)(const ag_single_target_columns *p, ptrdiff_t c, ptrdiff_t width, V *targets)
{
    double weights[VL] = {0};
    compute_t indices[VL];
    V_(store)(indices, *targets);
    for (ptrdiff_t j = 0; j < width; j++) {
        weights[j] = p->token_weight ? p->token_weight[c + j] : 1;
        if (weights[j] == 0) indices[j] = -1;
        if (p->class_weight) weights[j] = indices[j] < 0 ? 0 : weights[j] * p->class_weight[K(loss_target)(p, c + j)];
    }
    *targets = V_(load)(indices);
    return K(loss_load_lanes)(weights, VL);
}

/* Return the numbers of the Hessian's diagonal, as `set_curvature` of _cross_entropy_finish.pyx computes them, where a gradient
 * without targets has the exponentials times `factor`. All are 0 where it is 0. */
AG_INLINE K(quadratic) K(loss_curvature)(const K(lane_sums) *factor, const K(lane_sums) *rest, double inverse)
{
    const f64v none = {0};
    K(lane_sums) first = {0}, second = {0}, at_one = {0};
#define AG_CURVE(half)                                                                                                 \
    do {                                                                                                               \
        const f64v reciprocal = 1.0 / (1.0 + rest->half), a = factor->half * (1.0 + rest->half) * inverse;             \
        const i64v is_zero = factor->half == 0;                                                                        \
        first.half = v_f64_select(is_zero, none, a * reciprocal);                                                      \
        second.half = v_f64_select(is_zero, none, (0.0 - a) * reciprocal * reciprocal);                                \
        at_one.half = v_f64_select(is_zero, none, reciprocal * (a * (rest->half * reciprocal) + 0.0));                 \
    } while (0);
    AG_FOR_HALVES(AG_CURVE)
#undef AG_CURVE
    return (K(quadratic)){K(to_compute_type)(&first), K(to_compute_type)(&second), K(to_compute_type)(&at_one), {0}, {0}};
}

/* Return the numbers of the probabilities. They are 0 in ignored columns, whose targets are negative. */
AG_INLINE K(quadratic) K(loss_probability)(const K(lane_sums) *rest, V target)
{
    const V none = {0};
    K(lane_sums) reciprocal = {0};
#define AG_INVERT(half) reciprocal.half = 1.0 / (1.0 + rest->half);
    AG_FOR_HALVES(AG_INVERT)
#undef AG_INVERT
    const V p = V_(select)(target < 0, none, K(to_compute_type)(&reciprocal));
    return (K(quadratic)){p, none, p, none, none};
}

/* Write results of a strip from its exponentials. */
AG_INLINE void K(strip_quadratic)(const int vectors, ptrdiff_t n, const V *cached, const K(quadratic) *numbers, char *to,
                                  ptrdiff_t pitch, ptrdiff_t width)
{
    for (ptrdiff_t k = 0; k < n; k++) {
        V value[4] = {{0}};
        AG_UNROLL(4)
        for (int j = 0; j < vectors; j++) value[j] = K(quadratic_value)(cached[k * vectors + j], &numbers[j]);
        K(store_columns)(vectors, to + k * pitch, width, 0, value);
    }
}

AG_INLINE void K(loss_single_target_strip)(const ag_single_target_columns *p, const int vectors, const ag_tile *tile,
                                           ptrdiff_t c, ptrdiff_t width, int nontemporal)
{
    const char *a = tile->a + c * AG_SIZE;
    /* Label smoothing subtracts `subtrahend` from the gradient of every class. At the target it adds `balance` in all. */
    const double share = p->smoothing / (double)tile->n, subtrahend = p->grad * p->inverse * share;
    const double balance = p->grad * p->inverse * (p->smoothing - share);
    const V scale = V_(set1)((compute_t)tile->scale), none = {0};
    const f64v none_wide = {0}, grad = v_f64_set1(p->grad);
    V max[4] = {none}, x[4] = {none}, logit[4] = {none}, target[4] = {none}, factor[4], at_target[4], smoothed[4];
    V cached[AG_STRIP_ROWS(VL) * vectors];
    const int has_weights = p->class_weight || p->token_weight;
    K(lane_sums) rest[4], deficit[4], weight[4];
    V entry[4] = {none}; /* of the target, also in columns of weight 0 */
    K(lane_sums) wide_factor[4];
    K(quadratic) numbers[4];
    K(strip_statistics)(vectors, tile, a, width, scale, max, cached, rest);
    AG_UNROLL(4)
    for (int j = 0; j < vectors; j++) {
        deficit[j] = (K(lane_sums)){0};
        target[j] = K(loss_load_targets)(p, c + j * VL, width);
        entry[j] = target[j];
        if (has_weights) weight[j] = K(loss_load_weights)(p, c + j * VL, width, &target[j]);
    }
    if (p->smoothing != 0) {
        K(strip_sum)(AG_LOSS_DEFICIT, vectors, tile, a, a, width, scale, max, NULL, NULL, deficit, NULL);
    }
    for (ptrdiff_t k = 0; k < tile->n; k++) {
        K(load_strip)(vectors, 1, a + k * tile->a_stride, width, x);
        AG_UNROLL(4)
        for (int j = 0; j < vectors; j++) logit[j] = V_(select)(target[j] == (compute_t)k, x[j], logit[j]);
    }
    AG_UNROLL(1)
    for (int j = 0; j < vectors; j++) {
        const K(lane_sums) wide_target = K(loss_widen)(target[j]);
        K(lane_sums) difference;
        K(loss_results) results =
            K(loss_finish_vector)(&rest[j], max[j], logit[j], scale, p->grad, p->inverse, p->smoothing);
#define AG_COMPLETE(half)                                                                                              \
    do {                                                                                                               \
        f64v loss = results.loss.half, factor = results.factor.half, at_target = results.at_target.half;               \
        f64v smooth = v_f64_set1(subtrahend);                                                                          \
        if (p->smoothing != 0) {                                                                                       \
            loss += deficit[j].half * share;                                                                           \
            at_target += balance;                                                                                      \
        }                                                                                                              \
        if (has_weights) {                                                                                             \
            loss = v_f64_select(weight[j].half == 0, none_wide, loss * weight[j].half);                                \
            factor *= weight[j].half;                                                                                  \
            at_target *= weight[j].half;                                                                               \
            smooth *= weight[j].half;                                                                                  \
        }                                                                                                              \
        const i64v is_ignored = wide_target.half < 0, is_zero = is_ignored | (grad == 0);                              \
        results.loss.half = v_f64_select(is_ignored, none_wide, loss);                                                 \
        results.factor.half = v_f64_select(is_zero, none_wide, factor);                                                \
        results.at_target.half = v_f64_select(is_zero, none_wide, at_target);                                          \
        difference.half = v_f64_select(is_zero, none_wide, smooth);                                                    \
    } while (0);
        AG_FOR_HALVES(AG_COMPLETE)
#undef AG_COMPLETE
        K(loss_store_lanes)(p->losses + c + j * VL, &results.loss, width);
#if AG_SIZE == 2
        results.at_target.low = AG_ROUND(results.at_target.low);
        results.at_target.high = AG_ROUND(results.at_target.high);
#endif
        wide_factor[j] = results.factor;
        factor[j] = K(to_compute_type)(&results.factor);
        smoothed[j] = K(to_compute_type)(&difference);
        at_target[j] = K(to_compute_type)(&results.at_target);
    }
    if (p->prob) {
        AG_UNROLL(4)
        for (int j = 0; j < vectors; j++) numbers[j] = K(loss_probability)(&rest[j], entry[j]);
        K(strip_quadratic)(vectors, tile->n, cached, numbers, p->prob + c * AG_SIZE, p->pitch, width);
    }
    if (p->hessian) {
        AG_UNROLL(4)
        for (int j = 0; j < vectors; j++) numbers[j] = K(loss_curvature)(&wide_factor[j], &rest[j], p->inverse);
        K(strip_quadratic)(vectors, tile->n, cached, numbers, p->hessian + c * AG_SIZE, p->pitch, width);
    }
    if (!p->return_grad) return;
    for (ptrdiff_t k = 0; k < tile->n; k++) {
        char *out = tile->out + k * tile->out_stride + c * AG_SIZE;
        AG_UNROLL(4)
        for (int j = 0; j < vectors; j++) {
            const V e = cached[k * vectors + j];
            V value;
            if (p->smoothing == 0) value = V_(select)(factor[j] == 0, none, e * factor[j]);
            else value = V_(select)((factor[j] == 0) & (smoothed[j] == 0), none, V_(fma)(e, factor[j], -smoothed[j]));
            x[j] = V_(select)(target[j] == (compute_t)k, at_target[j], value);
        }
        K(store_columns)(vectors, out, width, nontemporal, x);
    }
}

static void K(loss_single_target_strips)(const ag_tile *tile, const ag_single_target_columns *p)
{
    AG_COMPUTE_STRIPS(K(loss_single_target_strip), p, tile);
}
