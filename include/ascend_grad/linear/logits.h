/* Rows of logits: their transformation, their statistics beside maximum and sum, and the gradient of the general loss. One
 * kind of arithmetic and one instruction set; included by kernels.h. */

/* Return the index of the first logit that equals the maximum, or if the maximum is NaN, of the first NaN. */
static ptrdiff_t K(first_maximum)(const acc_t *row, ptrdiff_t n, acc_t max)
{
    for (ptrdiff_t c = 0; c < n; c++) {
        if (row[c] == max || (max != max && row[c] != row[c])) return c;
    }
    return 0;
}

/* Load n values, or a whole vector if n is larger. Whole vectors have a separate path, as partial loads are slow without
 * masks. */
AG_INLINE V K(load_some)(const void *p, ptrdiff_t n) { return n < VL ? V_(load_partial)(p, n) : V_(load)(p); }

/* ---- the transformation -------------------------------------------------------------------------------------------------- */

/* Return the factor of the last step of the transformation for row i of the chunk. */
AG_INLINE double K(outer_factor)(const ag_linear_block *b, ptrdiff_t i)
{
    const ag_logit_transform *t = &b->transform;
    const double factor = t->softcap > 0 ? t->softcap : t->scale;
    return b->rows ? factor * b->rows[b->chunk.row_numbers[i]].inverse_temperature : factor;
}

/* Return the factor of the argument of tanh. */
AG_INLINE double K(inner_factor)(const ag_linear_block *b) { return b->transform.scale / b->transform.softcap; }

/* Transform n products of row i, from vocabulary entry `first` of the block on, to logits. Rows are padded to whole vectors. */
static void K(transform_row)(const ag_linear_block *b, ptrdiff_t i, ptrdiff_t first, ptrdiff_t n, acc_t *row)
{
    const acc_t *bias = (const acc_t *)b->transform.bias;
    const int is_capped = b->transform.softcap > 0;
    const V outer = V_(set1)((acc_t)K(outer_factor)(b, i)), inner = V_(set1)((acc_t)(is_capped ? K(inner_factor)(b) : 1));
    for (ptrdiff_t c = 0; c < n; c += VL) {
        V u = V_(load)(row + c);
        if (bias) u += V_(load)(bias + b->vocab.start + first + c);
        V_(store)(row + c, (is_capped ? V_(tanh)(u * inner) : u) * outer);
    }
}

/* Return the derivatives of logits with respect to the products, from the logits. */
AG_INLINE V K(slopes)(const V z, const V inverse_outer, const V most)
{
    const V value = z * inverse_outer;
    return (1 - value * value) * most;
}

/* ---- weights of classes -------------------------------------------------------------------------------------------------- */

/* Return the class weights of n entries for row i, from vocabulary entry `first` of the block on; NULL if all are 1. With
 * probabilities they are c (kept q + share), computed in `buffer`, which has AG_MAX_STREAMED_STEP accumulators. */
static const acc_t *K(weights_of_row)(const ag_linear_block *b, ptrdiff_t i, ptrdiff_t first, ptrdiff_t n, acc_t *buffer)
{
    const acc_t *class_weight = (const acc_t *)b->gradient.class_weight;
    const ag_matrix *prob = &b->gradient.prob;
    double raw[AG_MAX_STREAMED_STEP];
    if (class_weight) class_weight += b->vocab.start + first;
    if (!prob->data) return class_weight;
    const char *source = prob->data + b->chunk.row_numbers[i] * prob->row_stride + (b->vocab.start + first) * prob->step;
    ag_copy_block((char *)raw, 0, ag_itemsize[prob->dtype], source, 0, prob->step, 1, n, ag_itemsize[prob->dtype], prob->swapped);
#if AG_IS_F64
    if (prob->dtype == AG_FLOAT64) {
        memcpy(buffer, raw, (size_t)n * sizeof *buffer);
    } else {
        float floats[AG_MAX_STREAMED_STEP];
        if (prob->dtype == AG_FLOAT32) memcpy(floats, raw, (size_t)n * sizeof *floats);
        else if (prob->dtype == AG_FLOAT16) AG_ISA_NAME(ag_widen_f16)((const char *)raw, floats, n);
        else AG_ISA_NAME(ag_widen_bf16)((const char *)raw, floats, n);
        AG_ISA_NAME(ag_widen_f32_f64)(floats, (char *)buffer, n);
    }
#else
    if (prob->dtype == AG_FLOAT32) memcpy(buffer, raw, (size_t)n * sizeof *buffer);
    else if (prob->dtype == AG_FLOAT64) AG_ISA_NAME(ag_narrow_f64_f32)(raw, (char *)buffer, n);
    else if (prob->dtype == AG_FLOAT16) AG_ISA_NAME(ag_widen_f16)((const char *)raw, buffer, n);
    else AG_ISA_NAME(ag_widen_bf16)((const char *)raw, buffer, n);
#endif
    for (ptrdiff_t c = n; c % VL; c++) buffer[c] = 0;
    const V kept = V_(set1)((acc_t)b->gradient.kept), share = V_(set1)((acc_t)b->gradient.share);
    for (ptrdiff_t c = 0; c < n; c += VL) {
        const V weight = V_(fma)(V_(load)(buffer + c), kept, share);
        V_(store)(buffer + c, class_weight ? weight * V_(load)(class_weight + c) : weight);
    }
    return buffer;
}

/* ---- statistics ---------------------------------------------------------------------------------------------------------- */

/* Return the sum of exponentials of n logits without their first maximum. `max` is the maximum, `sum` the whole sum. */
static AG_UNUSED double K(rest_of_row)(const acc_t *row, ptrdiff_t n, acc_t max, acc_t sum)
{
    if (!(sum < (acc_t)AG_ACCURATE_SUM)) return (double)sum - 1;
    if (max == (acc_t)-INFINITY) return NAN;
    /* The maximum is there once, as two would add 2 to the sum. */
    const V largest = V_(set1)(max), zero = {0};
    V total = {0};
    for (ptrdiff_t c = 0; c < n; c += VL) {
        const V z = V_(load)(row + c);
        total += V_(first)(n - c < VL ? n - c : VL, V_(select)(z == largest, zero, V_(exp)(z - largest)), zero);
    }
    return (double)V_(reduce_sum)(total);
}

/* Compute ag_more of n logits of row i, from vocabulary entry `first` of the block on, relative to their maximum; all fields but argmax
 * are 0 without with_moments. If the maximum is not larger than `before`, that of earlier logits, argmax means nothing. */
static void K(more_of_row)(const ag_linear_block *b, ptrdiff_t i, const acc_t *row, ptrdiff_t first, ptrdiff_t n, acc_t max,
                           acc_t before, ag_more *to)
{
    acc_t buffer[AG_MAX_STREAMED_STEP];
    const acc_t *weights = b->statistics.with_moments ? K(weights_of_row)(b, i, first, n, buffer) : NULL;
    const V shift = V_(set1)(max == (acc_t)-INFINITY ? 0 : max), zero = {0};
    to->moment = to->deficit = to->weight = 0;
    for (ptrdiff_t c = 0; b->statistics.with_moments && c < n;) {
        V moment = {0}, deficit = {0}, weight = {0}; /* chains of at most eight terms */
        for (int k = 0; k < 8 && c < n; k++, c += VL) {
            const ptrdiff_t left = n - c < VL ? n - c : VL;
            const V z = V_(load)(row + c), e = V_(exp)(z - shift);
            const V w = weights ? V_(load)(weights + c) : V_(set1)(1);
            /* A logit of -inf adds nothing: the exponential is 0, but its product with infinity would be NaN. */
            moment += V_(first)(left, V_(select)(e == 0, zero, e * (shift - z)), zero);
            deficit += V_(first)(left, V_(select)((w == 0) | (z == shift), zero, w * (shift - z)), zero);
            weight += V_(first)(left, w, zero);
        }
        to->moment += (double)V_(reduce_sum)(moment), to->deficit += (double)V_(reduce_sum)(deficit);
        to->weight += (double)V_(reduce_sum)(weight);
    }
    to->argmax = b->vocab.start + first;
    if (!(max <= before)) to->argmax += K(first_maximum)(row, n, max);
}

/* Store the logits of all targets of row i that are among n logits, from vocabulary entry `first` of the block on. */
static void K(store_target_logits)(const ag_linear_block *b, ptrdiff_t i, ptrdiff_t first, ptrdiff_t n, const acc_t *row)
{
    const int64_t begin = b->chunk.row_numbers[i] * b->targets.count;
    for (ptrdiff_t k = 0; k < b->targets.count; k++) {
        const int64_t entry = b->targets.entries[begin + k] - b->vocab.start - first;
        if (b->targets.entries[begin + k] >= 0 && entry >= 0 && entry < n) b->statistics.target_logits[begin + k] = row[entry];
    }
}

/* Return the probability of row i's target minus 1. Of a nearly certain target, 1 - p is known with its own digits. */
AG_INLINE acc_t K(minus_one)(const ag_linear_block *b, ptrdiff_t i, acc_t p)
{
    if (!b->gradient.complement) return p - 1;
    const acc_t complement = ((const acc_t *)b->gradient.complement)[b->chunk.row_numbers[i]];
    return complement >= 0 ? -complement : p - 1;
}

/* ---- the gradient -------------------------------------------------------------------------------------------------------- */

/* Turn n logits of row i, from vocabulary entry `first` of the block on, into the gradient with respect to the products. */
static void K(general_gradient)(const ag_linear_block *b, ptrdiff_t i, ptrdiff_t first, ptrdiff_t n, acc_t *row)
{
    const ag_loss_row *of_row = b->rows + b->chunk.row_numbers[i];
    acc_t buffer[AG_MAX_STREAMED_STEP];
    const int is_capped = b->transform.softcap > 0, is_smoothed = of_row->s != 0, with_entropy = of_row->b != 0;
    const double outer = b->transform.is_needed ? K(outer_factor)(b, i) : 1;
    const double slope = (is_capped ? outer * K(inner_factor)(b) : outer) / of_row->power;
    const V max = V_(set1)(((const acc_t *)b->chunk.max)[i]), sum = V_(set1)(((const acc_t *)b->chunk.sum)[i]);
    const V by_p = V_(set1)((acc_t)of_row->a), by_gap = V_(set1)((acc_t)of_row->b), s = V_(set1)((acc_t)of_row->s);
    const V mean_gap = V_(set1)((acc_t)of_row->mean_gap), zero = {0};
    const V inverse_outer = V_(set1)((acc_t)(1 / outer)), most = V_(set1)((acc_t)slope);
    acc_t slopes[AG_MAX_STREAMED_STEP];
    const acc_t *weights = is_smoothed ? K(weights_of_row)(b, i, first, n, buffer) : NULL;
    for (ptrdiff_t c = 0; c < n; c += VL) {
        const V z = V_(load)(row + c), e = V_(exp)(z - max) / sum;
        V p = e * by_p;
        if (with_entropy) p += V_(select)(e == 0, zero, e * by_gap * ((z - max) + mean_gap));
        if (is_smoothed) p -= weights ? s * V_(load)(weights + c) : s;
        if (is_capped) V_(store)(slopes + c, K(slopes)(z, inverse_outer, most));
        V_(store)(row + c, p);
    }
    const int64_t begin = b->chunk.row_numbers[i] * b->targets.count;
    for (ptrdiff_t k = 0; k < b->targets.count; k++) {
        const int64_t entry = b->targets.entries[begin + k] - b->vocab.start - first;
        if (b->targets.entries[begin + k] < 0 || entry < 0 || entry >= n) continue;
        row[entry] -= (acc_t)(ag_kept_of_target(of_row, &b->targets, begin + k, of_row->power) - of_row->kept_log_prob);
    }
    const int64_t certain = of_row->certain - b->vocab.start - first;
    if (of_row->certain >= 0 && certain >= 0 && certain < n) row[certain] = (acc_t)of_row->certain_grad;
    for (ptrdiff_t c = 0; c < n && b->transform.is_needed; c += VL) {
        V_(store)(row + c, V_(load)(row + c) * (is_capped ? V_(load)(slopes + c) : most));
    }
}
