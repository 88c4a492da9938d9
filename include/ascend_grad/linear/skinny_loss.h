/* The loss of unpacked tiles whose lanes are rows, in one pass over the logits: statistics, and P from the same exponentials.
 * For losses whose P is (softmax - one_hot) * grad. For one kind of arithmetic and one instruction set; included by kernels.h. */

/* Write the first `left` values of a vector to the rows with these numbers. */
AG_INLINE void K(put_numbers)(void *to, const int64_t *numbers, const int is_run, V values, ptrdiff_t left)
{
    acc_t lanes[VL];
    if (is_run) {
        K(store_some)((acc_t *)to + numbers[0], values, left);
        return;
    }
    V_(store)(lanes, values);
    for (ptrdiff_t k = 0; k < left; k++) ((acc_t *)to)[numbers[k]] = lanes[k];
}

/* Write `rest` of the first `left` rows of a vector, in float64, where a difference from 1 is exact. */
AG_INLINE void K(put_rests)(const ag_linear_block *b, const int64_t *numbers, const int is_run, V sum, V others, ptrdiff_t left)
{
    const V zero = {0}, one = V_(set1)(1);
    /* If the sum is small, the maximum is there once, as two would add 2 to the sum. */
    const LANES is_small = sum < (acc_t)AG_ACCURATE_SUM;
    const V terms = V_(select)(is_small, others, sum), less = V_(select)(is_small, zero, one);
    double rests[VL];
#if AG_IS_F64
    v_f64_store(rests, terms - less);
#else
    f64v low, high, low_less, high_less;
    v_f32_widen(terms, &low, &high);
    v_f32_widen(less, &low_less, &high_less);
    v_f64_store(rests, low - low_less);
    v_f64_store(rests + VL / 2, high - high_less);
#endif
    if (is_run && left == VL) {
        memcpy(b->statistics.rest + numbers[0], rests, sizeof rests);
        return;
    }
    for (ptrdiff_t k = 0; k < left; k++) b->statistics.rest[numbers[k]] = rests[k];
}

/* Write 1 - p of the targets of a vector of rows if they are nearly certain, otherwise -1. */
AG_INLINE void K(put_complements)(const ag_linear_block *b, const int64_t *numbers, const int is_run, V is_largest, V rest,
                                  ptrdiff_t left)
{
    const V complement = rest / (1 + rest), none = V_(set1)(-1);
    const LANES is_certain = (is_largest == 1) & (complement < (acc_t)(1 - AG_NEARLY_CERTAIN));
    K(put_numbers)((void *)b->gradient.complement, numbers, is_run, V_(select)(is_certain, complement, none), left);
}

/* Compute the further statistics of `left` rows, from row i on, from their logits and maxima. */
static void K(put_more_of_lanes)(const ag_linear_block *b, const acc_t *tile, ptrdiff_t i, V max, ptrdiff_t left)
{
    acc_t maxima[VL], row[AG_MAX_UNPACKED_ROWS + VL];
    V_(store)(maxima, max);
    for (ptrdiff_t k = 0; k < left; k++) {
        K(gather_row)(b, tile, i + k, row);
        K(put_more)(b, i + k, row, maxima[k]);
    }
}

/* Compute the maximum of every row, its sum of exponentials (into sum_exp, by row numbers), `rest`, `predicted` and further
 * statistics from a transposed tile of logits, which holds all vocabulary entries. With `with_gradient`, turn the tile into P.
 * Otherwise write the complements that a later pass reads. */
static void K(columns_to_loss)(const ag_linear_block *b, void *tile, void *sum_exp, int with_gradient)
{
    const ptrdiff_t pitch = b->tile_pitch, rows = b->chunk.rows;
    const int is_run = b->chunk.row_numbers[rows - 1] - b->chunk.row_numbers[0] == rows - 1;
    const V none = V_(set1)((acc_t)-INFINITY), nan = V_(set1)((acc_t)NAN), zero = {0}, one = V_(set1)(1);
    for (ptrdiff_t i = 0; i < rows; i += VL) {
        acc_t *const first = (acc_t *)tile + i, *const end = first + b->vocab.size * pitch;
        const ptrdiff_t left = rows - i < VL ? rows - i : VL;
        const int64_t *numbers = b->chunk.row_numbers + i;
        acc_t targets[VL] = {0};
        V largest = none, predicted = zero, sum = zero, others = zero, entry = zero;
        LANES is_nan = largest != largest;
        for (ptrdiff_t k = 0; k < left; k++) targets[k] = (acc_t)b->chunk.target[i + k];
        const V target = V_(load)(targets);
        for (const acc_t *x = first; x < end; x += pitch, entry += 1) {
            const V z = V_(load)(x);
            largest = V_(max)(z, largest);
            is_nan |= z != z;
            predicted = V_(select)(target == entry, z, predicted);
        }
        const V shift = V_(select)(largest == none, zero, largest), max = V_(select)(is_nan, nan, largest);
        if (b->statistics.with_more) K(put_more_of_lanes)(b, (const acc_t *)tile, i, max, left);
        for (acc_t *x = first; x < end;) {
            V part = zero, part_of_others = zero; /* chains of at most eight terms */
            for (int k = 0; k < 8 && x < end; k++, x += pitch) {
                const V z = V_(load)(x), e = V_(exp)(z - shift);
                part += e;
                part_of_others += V_(select)(z == shift, zero, e);
                V_(store)(x, e);
            }
            sum += part, others += part_of_others;
        }
        sum = V_(select)(largest == none, nan, sum);
        const V rest = V_(select)(sum < (acc_t)AG_ACCURATE_SUM, others, sum - 1);
        K(put_numbers)(b->statistics.max, numbers, is_run, max, left);
        K(put_numbers)(sum_exp, numbers, is_run, sum, left);
        K(put_numbers)(b->statistics.predicted, numbers, is_run, predicted, left);
        K(put_rests)(b, numbers, is_run, sum, others, left);
        if (!with_gradient) {
            const V is_largest = V_(select)((target >= 0) & (predicted == largest), one, zero);
            if (b->gradient.complement) K(put_complements)(b, numbers, is_run, is_largest, rest, left);
            continue;
        }
        const V inverse = 1 / sum, grad = K(load_some)((const acc_t *)b->chunk.grad + i, left);
        entry = zero;
        for (acc_t *x = first; x < end; x += pitch, entry += 1) {
            const V e = V_(load)(x);
            /* At a target, the negative sum of the other exponentials: if it is the maximum, `rest` is more accurate. */
            const V negative = V_(select)(e == 1, -rest, e - sum);
            V p = V_(select)(target == entry, negative, e) * inverse * grad;
#if !AG_IS_F64
            if (b->gradient.round_to_bfloat16) p = v_bf16_widen(v_bf16_narrow(p));
#endif
            V_(store)(x, p);
        }
    }
}

/* Turn a transposed tile of products with all vocabulary entries, followed by a tile of their changes along a vector, into P:
 * the Hessian's product with the changes. `transform.bias` has numbers for both tiles, `transform.scale` is the factor of
 * logits, and chunk.grad has the coefficients of rows, with the square of this factor. */
static void K(columns_to_product)(const ag_linear_block *b, void *tile)
{
    const ptrdiff_t pitch = b->tile_pitch, changes = b->vocab.size * pitch;
    const acc_t *bias = (const acc_t *)b->transform.bias;
    const V none = V_(set1)((acc_t)-INFINITY), zero = {0}, factor = V_(set1)((acc_t)b->transform.scale);
    for (ptrdiff_t i = 0; i < b->chunk.rows; i += VL) {
        acc_t *const first = (acc_t *)tile + i, *const end = first + changes;
        V largest = none, at_largest = zero, sum = zero, mean = zero;
        ptrdiff_t c = 0;
        for (acc_t *x = first; x < end; x += pitch, c++) {
            V z = V_(load)(x), u = V_(load)(x + changes);
            if (bias) z += V_(set1)(bias[c]), u += V_(set1)(bias[b->vocab.size + c]);
            z *= factor;
            V_(store)(x, z);
            V_(store)(x + changes, u);
            at_largest = V_(select)(z > largest, u, at_largest);
            largest = V_(max)(z, largest);
        }
        /* Differences from the change of the largest logit are exactly 0 there, which keeps digits where p is almost 1. */
        const V shift = V_(select)(largest == none, zero, largest);
        for (acc_t *x = first; x < end;) {
            V part = zero, part_of_mean = zero; /* chains of at most eight terms */
            for (int k = 0; k < 8 && x < end; k++, x += pitch) {
                const V e = V_(exp)(V_(load)(x) - shift), u = V_(load)(x + changes) - at_largest;
                part += e;
                part_of_mean += e * u;
                V_(store)(x, e);
                V_(store)(x + changes, u);
            }
            sum += part, mean += part_of_mean;
        }
        const V inverse = 1 / sum, grad = K(load_some)((const acc_t *)b->chunk.grad + i, b->chunk.rows - i) * inverse;
        mean *= inverse;
        for (acc_t *x = first; x < end; x += pitch) {
            V p = V_(load)(x) * (V_(load)(x + changes) - mean) * grad;
#if !AG_IS_F64
            if (b->gradient.round_to_bfloat16) p = v_bf16_widen(v_bf16_narrow(p));
#endif
            V_(store)(x, p);
        }
    }
}

/* Add the sums of the rows of a transposed tile of P to `sums`, the gradient with respect to the bias. */
static void K(sum_tile)(const ag_linear_block *b, const void *tile, double *sums)
{
    for (ptrdiff_t c = 0; c < b->vocab.size; c++) {
        const acc_t *row = (const acc_t *)tile + c * b->tile_pitch;
        f64v total = {0}, more = {0};
        for (ptrdiff_t i = 0; i < b->chunk.rows; i += VL) {
            const ptrdiff_t left = b->chunk.rows - i < VL ? b->chunk.rows - i : VL;
            const V p = V_(first)(left, V_(load)(row + i), (V){0});
#if AG_IS_F64
            total += p;
#else
            f64v low, high;
            v_f32_widen(p, &low, &high);
            total += low, more += high;
#endif
        }
        sums[c] += v_f64_reduce_sum(total + more);
    }
}

/* Compute the losses log(1 + rest) - (predicted - max) of n rows. */
static void K(losses)(const double *rest, const void *predicted, const void *max, ptrdiff_t n, double *to)
{
    enum { DOUBLES = AG_LANES / 2 };
    for (ptrdiff_t i = 0; i < n; i++) to[i] = (double)((const acc_t *)predicted)[i] - (double)((const acc_t *)max)[i];
    for (ptrdiff_t i = 0; i < n; i += DOUBLES) {
        const ptrdiff_t left = n - i < DOUBLES ? n - i : DOUBLES;
        if (left == DOUBLES) {
            v_f64_store(to + i, v_f64_log1p(v_f64_load(rest + i)) - v_f64_load(to + i));
        } else {
            const f64v log_sum = v_f64_log1p(v_f64_load_partial(rest + i, left));
            v_f64_store_partial(to + i, log_sum - v_f64_load_partial(to + i, left), left);
        }
    }
}
