/* The k largest logits of each row of unpacked tiles, for one kind of arithmetic and one instruction set. Included by kernels.h;
 * top_k.h describes the lists.
 *
 * Each task has separate lists. A thread that completes a task merges the lists of all complete tasks that follow one another
 * into the lists of the rows, unless another thread does so. The last entry of a row's list is the floor of later tasks: a
 * smaller logit is not among the k largest. It enters a task's list only as the largest logit of the task so far, which the sum
 * refers to. So floors change neither sums nor results, whenever threads read them. */

AG_INLINE acc_t K(floor_of_row)(const ag_top_k *lists, ptrdiff_t row)
{
    acc_t floor = (acc_t)-INFINITY;
    if (lists->floors) __atomic_load((acc_t *)lists->floors + row, &floor, __ATOMIC_RELAXED);
    return floor;
}

/* Merge a tile of b->chunk.rows x b->vocab.size logits into the lists and sums of its rows. */
static void K(tile_to_top_k)(const ag_linear_block *b, const void *tile)
{
    const ptrdiff_t n = b->vocab.size, k = b->top_k.k;
    const V none = V_(set1)((acc_t)-INFINITY);
    for (ptrdiff_t i = 0; i < b->chunk.rows; i++) {
        const ptrdiff_t number = b->chunk.row_numbers[i];
        const acc_t scale = K(scale_of_row)(&b->top_k, number);
        const acc_t *row = (const acc_t *)tile + i * b->tile_pitch;
        acc_t *values = (acc_t *)b->top_k.values + number * k;
        ag_sum *rest = b->top_k.rest + number;
        V largest = none, total = {0};
        for (ptrdiff_t c = 0; c < n; c += VL) {
            largest = V_(max)(V_(first)(n - c < VL ? n - c : VL, V_(load)(row + c), none), largest);
        }
        const acc_t max = V_(reduce_max)(largest), before = values[0], now = max > before ? max : before;
        const acc_t shift = now == (acc_t)-INFINITY ? 0 : now;
        ptrdiff_t first = -1; /* the new maximum, which the sum leaves out */
        if (max > before) {
            for (first = 0; first < n - 1 && row[first] != max;) first++;
        }
        for (ptrdiff_t c = 0; c < n;) {
            V part = {0}; /* one chain of at most eight terms */
            for (int t = 0; t < 8 && c < n; t++, c += VL) {
                V e = V_(exp)((V_(load)(row + c) - V_(set1)(shift)) * V_(set1)(scale));
                e = V_(first)(n - c < VL ? n - c : VL, e, (V){0});
                if (first >= c && first < c + VL) e[first - c] -= 1; /* exactly 1, or NaN */
                part += e;
            }
            total += part;
        }
        if (max > before) {
            const double carried = K(rescaled)(ag_sum_total(*rest), before, shift, scale);
            rest->sum = carried, rest->compensation = 0;
        }
        ag_sum_add(rest, (double)V_(reduce_sum)(total));
        const acc_t floor = K(floor_of_row)(&b->top_k, number);
        if (K(enters)(values, k, floor, max)) {
            K(insert_row)(values, b->top_k.indices + number * k, k, floor, row, n, b->vocab.start);
        }
    }
}

/* Merge lists and sums of rows [row, row_end) into the lists and sums of earlier vocabulary entries. */
static void K(join_top_k)(const ag_top_k *from, const ag_top_k *to, ptrdiff_t row, ptrdiff_t row_end)
{
    const ptrdiff_t k = to->k;
    for (ptrdiff_t i = row; i < row_end; i++) {
        const acc_t scale = K(scale_of_row)(to, i);
        const acc_t *added = (const acc_t *)from->values + i * k;
        acc_t *values = (acc_t *)to->values + i * k;
        const acc_t before = values[0], now = added[0] > before ? added[0] : before;
        const acc_t shift = now == (acc_t)-INFINITY ? 0 : now;
        const double rest = ag_sum_total(to->rest[i]), added_rest = ag_sum_total(from->rest[i]);
        if (added[0] > before) {
            to->rest[i] = from->rest[i];
            ag_sum_add(&to->rest[i], K(rescaled)(rest, before, shift, scale));
        } else {
            ag_sum_add(&to->rest[i], K(rescaled)(added_rest, added[0], shift, scale));
        }
        for (ptrdiff_t j = 0; j < k && added[j] > values[k - 1]; j++) {
            K(insert)(values, to->indices + i * k, k, added[j], from->indices[i * k + j]);
        }
        if (to->floors) __atomic_store((acc_t *)to->floors + i, values + k - 1, __ATOMIC_RELAXED);
    }
}
