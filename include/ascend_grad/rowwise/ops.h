/* The formulas of the operators for a vector of elements: terms of the row sum, and results. Body header, included by
 * kernels.h.
 *
 * `op` is a constant wherever it appears: every function is inlined into the entry points of kernels.h. So an operator
 * does not slow down the others.
 */

/* Return the logits of a forward operator: AG_MASKED_LOGIT at masked positions, and scaled values at the others. */
AG_INLINE V K(logit)(const int op, V x, MASKV mask, V scale)
{
    if (!ag_masks_sum(op)) return x;
    return V_(select)(mask, V_(set1)((compute_t)AG_MASKED_LOGIT), x * scale);
}

/* Return the terms of the row sum. Only the forward operators use `max`. AG_LOSS_REST leaves out one element if no other
 * is equal to the maximum: so it is for sums of exponentials below 2. */
AG_INLINE V K(term)(const int op, V a, V b, MASKV mask, V scale, V max)
{
    switch (op) {
    case AG_LOG_SOFTMAX_BACKWARD:
        return a;
    case AG_SOFTMAX_BACKWARD:
    case AG_SCALED_MASKED_SOFTMAX_BACKWARD:
        return a * b;
    case AG_LOSS_EXP:
        return V_(exp)((a - max) * scale);
    case AG_LOSS_REST:
        return V_(select)(a < max, V_(exp)((a - max) * scale), (V){0});
    case AG_LOSS_MOMENT: {
        const V distance = (max - a) * scale, e = V_(exp)(-distance);
        return V_(select)(e == 0, (V){0}, e * distance); /* distance may be infinite */
    }
    case AG_LOSS_DEFICIT:
        return (max - a) * scale;
    case AG_LOSS_WEIGHTED_DEFICIT: {
        const V distance = (max - a) * scale;
        return V_(select)((b == 0) | (distance == 0), (V){0}, b * distance); /* either may be infinite */
    }
    default:
        return V_(exp)(K(logit)(op, a, mask, scale) - max);
    }
}

/* Return the factor of a forward operator for each row sum: its logarithm, which log-softmax subtracts, or its
 * reciprocal, by which the others multiply. */
AG_INLINE f64v K(factors)(const int op, f64v sums) { return op == AG_LOG_SOFTMAX ? v_f64_log(sums) : 1.0 / sums; }

/* Return whether the results of an operator use the same exponentials as its sum. */
AG_INLINE int K(caches_exp)(const int op) { return ag_is_forward(op) && op != AG_LOG_SOFTMAX; }

/* Return the result of a forward operator. If caches_exp, x is the exponential of the shifted logit, otherwise the
 * shifted logit itself. */
AG_INLINE V K(forward_value)(const int op, V x, V factor) { return op == AG_LOG_SOFTMAX ? x - factor : x * factor; }

/* Return the result of an operator. `shift` is the row sum (backward) or the maximum (forward); `factor` is a result of
 * `factors` (forward only). */
AG_INLINE V K(value)(const int op, V a, V b, MASKV mask, V scale, V shift, V factor)
{
    switch (op) {
    case AG_SOFTMAX_BACKWARD:
        return (a - shift) * b;
    case AG_LOG_SOFTMAX_BACKWARD:
        return V_(fma)(-shift, V_(exp)(b), a);
    case AG_SCALED_MASKED_SOFTMAX_BACKWARD:
        return V_(select)(mask, (V){0}, (a - shift) * b * scale);
    default:
        a = K(logit)(op, a, mask, scale) - shift;
        return K(forward_value)(op, K(caches_exp)(op) ? V_(exp)(a) : a, factor);
    }
}

/* Return `shift` and `factor` of one row, from its maximum and sum. */
AG_INLINE compute_t K(shift_of)(const int op, double max, double sum)
{
    return (compute_t)(ag_is_forward(op) ? max : sum);
}
AG_INLINE compute_t K(factor_of)(const int op, double sum)
{
    return ag_is_forward(op) ? (compute_t)K(factors)(op, v_f64_set1(sum))[0] : 0;
}

/* Load elements i .. i+VL-1 of an input, or the first n of them (and zeros). Return zeros if the input is not
 * wanted. */
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

/* Load terms' second input: in its dtype, or class weights, which have the compute type. */
AG_INLINE V K(get_summed_b)(const int op, const char *b, ptrdiff_t i)
{
    return op == AG_LOSS_WEIGHTED_DEFICIT ? V_(load)((const compute_t *)b + i) : K(get)(ag_sums_b(op), b, i);
}
AG_INLINE V K(get_summed_b_partial)(const int op, const char *b, ptrdiff_t i, ptrdiff_t n)
{
    return op == AG_LOSS_WEIGHTED_DEFICIT ? V_(load_partial)((const compute_t *)b + i, n)
                                          : K(get_partial)(ag_sums_b(op), b, i, n);
}

AG_INLINE V K(term_at)(const int op, const char *a, const char *b, const uint8_t *mask, ptrdiff_t i, V scale, V max)
{
    return K(term)(op, AG_LOAD(a + i * AG_SIZE), K(get_summed_b)(op, b, i),
                   K(get_mask)(ag_masks_sum(op), mask, i), scale, max);
}

AG_INLINE V K(term_at_partial)(const int op, const char *a, const char *b, const uint8_t *mask, ptrdiff_t i,
                               ptrdiff_t n, V scale, V max)
{
    const V term = K(term)(op, AG_LOAD_PARTIAL(a + i * AG_SIZE, n), K(get_summed_b_partial)(op, b, i, n),
                           K(get_mask_partial)(ag_masks_sum(op), mask, i, n), scale, max);
    return ag_is_forward(op) ? V_(first)(n, term, (V){0}) : term; /* as exp(0) would add 1 */
}

/* ---- weights of dense targets --------------------------------------------------------------------------------------- */

/* Numbers of dense targets, in all lanes. */
typedef struct {
    V kept, share, certain, at_certain;
} K(dense_row);

/* Return the weights of classes from their probabilities and from their class weights, if there are any. */
AG_INLINE V K(dense_weight)(V prob, V class_weight, int has_weights, const K(dense_row) *row)
{
    const V weight = V_(fma)(prob, row->kept, row->share);
    return has_weights ? weight * class_weight : weight;
}

/* Add the terms of the three sums of a vector of elements. */
AG_INLINE void K(dense_add)(V *partial, V x, V weight, V scale, V max)
{
    const V none = {0}, distance = (max - x) * scale;
    const MASKV is_below = x < max;
    partial[0] += V_(select)((weight == 0) | (distance == 0), none, weight * distance); /* either may be infinite */
    partial[1] += V_(select)(is_below, weight, none);
    partial[2] += V_(select)(is_below, none, weight);
}
