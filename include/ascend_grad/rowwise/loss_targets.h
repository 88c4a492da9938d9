/* Kernels of the cross-entropy on rows with any number of targets, in vectors across the rows. Body header, included by
 * loss_kernels.h. */

AG_INLINE i64v K(loss_load_entries)(const int64_t *entries, ptrdiff_t left)
{
    return (i64v)K(loss_load)((const double *)entries, left);
}

/* Replace the logits by distances from the maximum times `inverse`. Compute the weights and the losses of the rows, and the
 * exponentials of these distances if there is memory for them. */
static void K(loss_target_losses)(const ag_target_rows *p, ptrdiff_t count)
{
    const f64v none = {0};
    for (ptrdiff_t i = 0; i < count; i += AG_LANES / 2) {
        const ptrdiff_t left = count - i;
        const f64v max = K(loss_load)(p->max + i, left), inverse = K(loss_load)(p->inverse + i, left);
        const f64v log_sum = K(loss_load)(p->log_sum + i, left);
        f64v loss = none, sum = none;
        for (ptrdiff_t k = 0; k < p->targets; k++) {
            double *logits = p->logits + k * p->pitch + i;
            const f64v weight = K(loss_load)(p->weights + k * p->block + i, left);
            const f64v distance = (K(loss_load)(logits, left) - max) * inverse;
            sum += weight;
            loss += v_f64_select(weight == 0, none, weight * (log_sum - distance)); /* the distance may be infinite */
            K(loss_store)(logits, distance, left);
            if (p->exp) K(loss_store)(p->exp + k * p->block + i, v_f64_exp(distance), left);
        }
        K(loss_store)(p->sums + i, sum, left);
        K(loss_store)(p->losses + i, loss, left);
    }
}

/* Return whether two targets of a row among `lanes` are the same entry. */
AG_INLINE int K(loss_has_equal)(const ag_target_rows *p, ptrdiff_t i, ptrdiff_t left, unsigned lanes)
{
    for (ptrdiff_t k = 1; k < p->targets; k++) {
        const i64v entry = K(loss_load_entries)(p->entries + k * p->pitch + i, left);
        unsigned found = 0;
        for (ptrdiff_t j = 0; j < k; j++) {
            found |= v_i64_equal_bits(entry, K(loss_load_entries)(p->entries + j * p->pitch + i, left));
        }
        if (found & lanes) return 1;
    }
    return 0;
}

/* Set `sums` to the sums of the weights of targets that are the same entries as targets k to k + 3. */
AG_INLINE void K(loss_sum_equal)(const ag_target_rows *p, ptrdiff_t i, ptrdiff_t left, ptrdiff_t k, f64v *sums)
{
    i64v entries[4];
    AG_UNROLL(4)
    for (int m = 0; m < 4; m++) {
        const ptrdiff_t at = k + m < p->targets ? k + m : k;
        entries[m] = K(loss_load_entries)(p->entries + at * p->pitch + i, left);
        sums[m] = (f64v){0};
    }
    for (ptrdiff_t j = 0; j < p->targets; j++) {
        const i64v entry = K(loss_load_entries)(p->entries + j * p->pitch + i, left);
        const f64v weight = K(loss_load)(p->weights + j * p->block + i, left);
        AG_UNROLL(4)
        for (int m = 0; m < 4; m++) sums[m] = v_f64_add_where_equal(sums[m], weight, entries[m], entry);
    }
}

/* Return the sums of the weights of targets that are other entries. */
AG_INLINE f64v K(loss_sum_others)(const ag_target_rows *p, ptrdiff_t i, ptrdiff_t left, i64v entry)
{
    f64v sum = {0};
    for (ptrdiff_t j = 0; j < p->targets; j++) {
        const i64v is_equal = entry == K(loss_load_entries)(p->entries + j * p->pitch + i, left);
        sum += v_f64_select(is_equal, (f64v){0}, K(loss_load)(p->weights + j * p->block + i, left));
    }
    return sum;
}

/* Find the nearly certain targets of rows, and set their entries and distances; -1 for rows without one. All such targets of
 * a row are the same entry. Return the lanes that have one. */
AG_INLINE unsigned K(loss_find_certain)(const ag_target_rows *p, ptrdiff_t i, ptrdiff_t left, f64v reciprocal, i64v *entry,
                                    f64v *distance)
{
    *entry = (i64v){0} - 1;
    *distance = (f64v){0};
    for (ptrdiff_t k = 0; k < p->targets; k++) {
        const i64v e = K(loss_load_entries)(p->entries + k * p->pitch + i, left);
        const i64v is_certain = (K(loss_load)(p->exp + k * p->block + i, left) * reciprocal > AG_NEARLY_CERTAIN) & (e >= 0);
        *entry = (is_certain & e) | (~is_certain & *entry);
        *distance = v_f64_select(is_certain, K(loss_load)(p->logits + k * p->pitch + i, left), *distance);
    }
    return v_f64_bits(*entry >= 0);
}

/* Return the gradients at nearly certain entries of the lanes, which have these distances from the maximum. */
AG_NOINLINE f64v K(loss_certain_gradients)(const ag_target_rows *p, ptrdiff_t i, ptrdiff_t left, unsigned lanes, i64v entry,
                                           f64v distance)
{
    const f64v others = K(loss_sum_others)(p, i, left, entry);
    f64v result = {0};
    for (int j = 0; j < AG_LANES / 2; j++) {
        if (!(lanes >> j & 1)) continue;
        const ag_coefficients c = {.balance = p->balance[i + j], .a = p->a[i + j], .b = p->b[i + j]};
        const double reciprocal = p->reciprocal[i + j], t = distance[j];
        result[j] = ag_certain_gradient(&c, p->grad_loss[i + j] * others[j], (p->rest[i + j] - expm1(t)) * reciprocal);
        if (c.b != 0) result[j] += ag_entropy_gradient(&c, exp(t) * reciprocal, t + p->mean_gap[i + j]);
    }
    return result;
}

/* Return the class weights of entries, 0 for ignored targets. */
AG_NOINLINE f64v K(loss_class_weights)(const ag_target_rows *p, i64v entry)
{
    f64v weights = {0};
    for (int j = 0; j < AG_LANES / 2; j++) {
        if (entry[j] >= 0) weights[j] = p->class_weight ? p->class_weight[entry[j]] : 1;
    }
    return weights;
}

/* Replace the distances of `target_losses` by the gradients at the targets. */
static void K(loss_target_gradients)(const ag_target_rows *p, ptrdiff_t count)
{
    const f64v none = {0};
    for (ptrdiff_t i = 0; i < count; i += AG_LANES / 2) {
        const ptrdiff_t left = count - i;
        const unsigned lanes = left < AG_LANES / 2 ? (1u << left) - 1 : ~0u;
        const f64v reciprocal = K(loss_load)(p->reciprocal + i, left), a = K(loss_load)(p->a + i, left);
        const f64v grad_loss = K(loss_load)(p->grad_loss + i, left), outer = K(loss_load)(p->outer + i, left);
        const f64v grad_log_prob = K(loss_load)(p->grad_log_prob + i, left);
        const f64v b = K(loss_load)(p->b + i, left), s = K(loss_load)(p->s + i, left);
        const f64v mean_gap = K(loss_load)(p->mean_gap + i, left);
        const unsigned has_entropy = v_f64_bits(b != 0), has_smoothing = v_f64_bits(s != 0);
        const int sums_equal = !p->equal && K(loss_has_equal)(p, i, left, lanes);
        i64v certain_entry;
        f64v distance, at_certain = none, equal[4];
        const unsigned certain = K(loss_find_certain)(p, i, left, reciprocal, &certain_entry, &distance) & lanes;
        if (certain) at_certain = K(loss_certain_gradients)(p, i, left, certain, certain_entry, distance);
        for (ptrdiff_t k = 0; k < p->targets; k++) {
            double *logits = p->logits + k * p->pitch + i;
            if (sums_equal && k % 4 == 0) K(loss_sum_equal)(p, i, left, k, equal);
            const i64v entry = K(loss_load_entries)(p->entries + k * p->pitch + i, left);
            const f64v prob = K(loss_load)(p->exp + k * p->block + i, left) * reciprocal;
            const f64v weight = sums_equal ? equal[k % 4]
                                           : K(loss_load)((p->equal ? p->equal : p->weights) + k * p->block + i, left);
            f64v value = a * prob - (grad_loss * weight - grad_log_prob);
            if (has_entropy) {
                const f64v slope = b * prob * (K(loss_load)(logits, left) + mean_gap);
                value = v_f64_select((b == 0) | (prob == 0), value, value + slope);
            }
            value = v_f64_select(entry == certain_entry, at_certain, value);
            if (has_smoothing) {
                value = v_f64_select((s == 0) | (entry < 0), value, value - s * K(loss_class_weights)(p, entry));
            }
            value *= outer;
            if (p->slopes) value *= K(loss_load)(p->slopes + k * p->pitch + i, left);
            K(loss_store)(logits, value, left);
        }
    }
}
