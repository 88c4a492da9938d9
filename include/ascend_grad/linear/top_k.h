/* The k largest logits of each row, for one kind of arithmetic and one instruction set. Included by kernels.h; the manual is
 * linear.h.
 *
 * A row has a list of its k largest logits so far, sorted from the largest down, and the sum of the exponentials of all its
 * logits but one that is the largest. The exponentials are relative to the largest logit, and the difference is divided by
 * the temperature of the row. Logits are transformed before they are compared, but for the temperature. The sum leaves out
 * the largest logit so that the logarithm of a sum of almost 1 is accurate.
 *
 * Logits enter a list in the order of the vocabulary, and only if they exceed its smallest entry. So the first ones of equal
 * logits are in the list. A NaN never enters. It makes the sum NaN, and so does an infinite logit.
 */

/* Insert a logit, which exceeds the last entry, into a list of k entries, behind entries that are equal. */
static void K(insert)(acc_t *values, int64_t *indices, ptrdiff_t k, acc_t x, int64_t index)
{
    ptrdiff_t low = 0, high = k - 1;
    while (low < high) {
        const ptrdiff_t middle = (low + high) / 2;
        if (values[middle] >= x) {
            low = middle + 1;
        } else {
            high = middle;
        }
    }
    memmove(values + low + 1, values + low, (size_t)(k - 1 - low) * sizeof *values);
    memmove(indices + low + 1, indices + low, (size_t)(k - 1 - low) * sizeof *indices);
    values[low] = x, indices[low] = index;
}

/* Return whether a logit enters a list: it exceeds the last entry, and is not below the floor. A new maximum always enters. */
AG_INLINE int K(enters)(const acc_t *values, ptrdiff_t k, acc_t floor, acc_t x)
{
    return x > values[k - 1] && (x >= floor || x > values[0]);
}

/* Insert n logits into a list, except those that are too small for it. `start` is the first one's vocabulary entry. */
static void K(insert_row)(acc_t *values, int64_t *indices, ptrdiff_t k, acc_t floor, const acc_t *row, ptrdiff_t n,
                          int64_t start)
{
    for (ptrdiff_t c = 0; c < n; c += VL) {
        const ptrdiff_t end = n - c < VL ? n : c + VL;
        if (end == c + VL && !K(enters)(values, k, floor, V_(reduce_max)(V_(load)(row + c)))) continue;
        for (ptrdiff_t i = c; i < end; i++) {
            if (K(enters)(values, k, floor, row[i])) K(insert)(values, indices, k, row[i], start + i);
        }
    }
}

/* Return the reciprocal of a row's temperature. */
AG_INLINE acc_t K(scale_of_row)(const ag_top_k *lists, ptrdiff_t row)
{
    return (acc_t)(lists->scales ? lists->scales[row] : lists->scale);
}

/* Return the sum of a list's exponentials relative to its maximum `before`, as part of a sum relative to `now`, which is larger.
 * The one that the list's sum leaves out is part of it then. `shift` is `now`, or 0 for -inf. */
AG_INLINE double K(rescaled)(double rest, acc_t before, acc_t shift, acc_t scale)
{
    const V factor = V_(exp)((V_(set1)(before) - V_(set1)(shift)) * V_(set1)(scale));
    return (before == (acc_t)-INFINITY ? rest : 1 + rest) * (double)factor[0];
}

/* ---- the packed sweep ---------------------------------------------------------------------------------------------------- */

/* Compute the largest logit of each row of a tile and the sum of all exponentials relative to it. Store the logits of a row if
 * one of them exceeds the last entry of the row's list. */
static void K(store_top_k)(const ag_linear_block *b, ptrdiff_t panel, ptrdiff_t tile_index, const acc_t *tile)
{
    const ptrdiff_t rows = K(padded_rows)(b), left = b->vocab.size - panel * NR, columns = left < NR ? left : NR;
    const ptrdiff_t k = b->top_k.k;
    const V none = V_(set1)((acc_t)-INFINITY);
    for (ptrdiff_t r = 0; r < MR && tile_index * MR + r < b->chunk.rows; r++) {
        const ptrdiff_t i = tile_index * MR + r;
        const acc_t smallest = ((const acc_t *)b->top_k.values)[b->chunk.row_numbers[i] * k + k - 1];
        acc_t *to = (acc_t *)b->packed.logits + (panel * rows + i) * NR;
        const V scale = V_(set1)(K(scale_of_row)(&b->top_k, b->chunk.row_numbers[i]));
        V x[NV], total = {0};
        for (int j = 0; j < NV; j++) {
            x[j] = V_(load)(tile + r * NR + j * VL);
            if (columns - j * VL < VL) x[j] = V_(first)(columns > j * VL ? columns - j * VL : 0, x[j], none);
        }
        V highest = x[0];
        for (int j = 1; j < NV; j++) highest = V_(max)(highest, x[j]);
        const acc_t max = V_(reduce_max)(highest);
        /* Exponentials relative to -inf would be NaN, although another panel may hold finite logits. */
        const V shift = V_(set1)(max == (acc_t)-INFINITY ? 0 : max);
        for (int j = 0; j < NV; j++) total += V_(exp)((x[j] - shift) * scale);
        ((acc_t *)b->packed.panel_max)[panel * rows + i] = max;
        ((acc_t *)b->packed.panel_sum)[panel * rows + i] = V_(reduce_sum)(total);
        if (max > smallest) {
            for (int j = 0; j < NV; j++) V_(store)(to + j * VL, x[j]);
        }
    }
}

/* Return the sum of the exponentials of a panel's NR logits relative to `max`, without the first logit that equals `max`. */
static acc_t K(rest_of_panel)(const acc_t *row, acc_t max, acc_t scale)
{
    acc_t each[NR];
    V total = {0};
    ptrdiff_t first = 0;
    while (first < NR - 1 && row[first] != max) first++;
    for (int j = 0; j < NV; j++) {
        V_(store)(each + j * VL, V_(exp)((V_(load)(row + j * VL) - V_(set1)(max)) * V_(set1)(scale)));
    }
    each[first] = 0;
    for (int j = 0; j < NV; j++) total += V_(load)(each + j * VL);
    return V_(reduce_sum)(total);
}

/* Compute the factors exp((max - now) scale) of `count` panels, at most a vector, that are `step` accumulators apart. */
AG_INLINE void K(factors_of_panels)(const acc_t *max, ptrdiff_t step, ptrdiff_t count, acc_t now, acc_t scale, acc_t *factor)
{
    const acc_t shift = now == (acc_t)-INFINITY ? 0 : now;
    for (ptrdiff_t l = 0; l < VL; l++) factor[l] = l < count ? max[l * step] : (acc_t)-INFINITY;
    V_(store)(factor, V_(exp)((V_(load)(factor) - V_(set1)(shift)) * V_(set1)(scale)));
}

/* Merge the panels of a block, of which store_top_k stored the statistics and some logits, into the lists and sums of rows
 * [row, row_end). Sums are merged panel by panel, so that results do not depend on the blocks. */
static void K(merge_top_k)(const ag_linear_block *b, ptrdiff_t row, ptrdiff_t row_end)
{
    const ptrdiff_t rows = K(padded_rows)(b), panels = (b->vocab.size + NR - 1) / NR, k = b->top_k.k;
    for (ptrdiff_t i = row; i < row_end; i++) {
        const ptrdiff_t number = b->chunk.row_numbers[i];
        const acc_t scale = K(scale_of_row)(&b->top_k, number);
        const acc_t *max = (const acc_t *)b->packed.panel_max + i, *sum = (const acc_t *)b->packed.panel_sum + i;
        const acc_t *logits = (const acc_t *)b->packed.logits + i * NR;
        acc_t *values = (acc_t *)b->top_k.values + number * k, factor[VL], now = values[0];
        int64_t *indices = b->top_k.indices + number * k;
        ag_sum total = b->top_k.rest[number];
        for (ptrdiff_t p = 0; p < panels; p++) {
            const ptrdiff_t lane = p % VL, left = panels - p;
            if (max[p * rows] > now) { /* a new maximum, which is rare after the first panels */
                const acc_t of_panel = sum[p * rows], before = now;
                now = max[p * rows];
                const double carried = K(rescaled)(ag_sum_total(total), before, now, scale);
                /* A sum that is NaN belongs to a logit that is NaN or infinite, wherever it is. */
                total.sum = of_panel == of_panel ? K(rest_of_panel)(logits + p * rows * NR, now, scale) : of_panel;
                total.compensation = 0;
                ag_sum_add(&total, carried);
                K(factors_of_panels)(max + (p - lane) * rows, rows, lane + left < VL ? lane + left : VL, now, scale, factor);
                continue;
            }
            if (!lane) K(factors_of_panels)(max + p * rows, rows, left < VL ? left : VL, now, scale, factor);
            ag_sum_add(&total, (double)sum[p * rows] * (double)factor[lane]);
        }
        b->top_k.rest[number] = total;
        for (ptrdiff_t p = 0; p < panels; p++) {
            if (max[p * rows] > values[k - 1]) {
                K(insert_row)(values, indices, k, (acc_t)-INFINITY, logits + p * rows * NR, NR, b->vocab.start + p * NR);
            }
        }
    }
}
