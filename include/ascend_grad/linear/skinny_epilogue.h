/* Epilogues of unpacked tiles of logits, for one kind of arithmetic and one instruction set. Included by kernels.h;
 * skinny_rows.h describes the operands. */

/* ---- tiles of b->chunk.rows x b->vocab.size values: lanes are vocabulary entries ------------------------------------------ */

/* Transform a tile of products to logits. */
static void K(tile_to_logits)(const ag_linear_block *b, void *tile)
{
    for (ptrdiff_t i = 0; i < b->chunk.rows; i++) {
        K(transform_row)(b, i, 0, b->vocab.size, (acc_t *)tile + i * b->tile_pitch);
    }
}

/* Round P, if the problem does so. */
AG_INLINE void K(round_row)(const ag_linear_block *b AG_UNUSED, acc_t *row AG_UNUSED, ptrdiff_t n AG_UNUSED)
{
#if !AG_IS_F64
    for (ptrdiff_t c = 0; c < n && b->gradient.round_to_bfloat16; c += VL) {
        V_(store)(row + c, v_bf16_widen(v_bf16_narrow(V_(load)(row + c))));
    }
#endif
}

/* Turn a tile of logits into P. If the caller gave probabilities, or logits for a general P, make P of them instead. */
static void K(tile_to_gradient)(const ag_linear_block *b, void *tile)
{
    const ag_rows softmax = {b->gradient.softmax, b->chunk.row_numbers, 0, b->chunk.rows};
    char buffer[4096];
    for (ptrdiff_t i = 0; i < b->chunk.rows; i++) {
        acc_t *row = (acc_t *)tile + i * b->tile_pitch;
        if (b->gradient.softmax.data) {
            memcpy(row, K(dense)(&softmax, i, b->vocab.start, b->vocab.size, buffer), (size_t)b->vocab.size * sizeof(acc_t));
        }
        if (b->gradient.is_general) {
            K(general_gradient)(b, i, 0, b->vocab.size, row);
            K(round_row)(b, row, b->vocab.size);
            continue;
        }
        const int64_t target = b->chunk.target[i] - b->vocab.start;
        const V grad = V_(set1)(((const acc_t *)b->chunk.grad)[i]);
        if (!b->gradient.softmax.data) {
            const V max = V_(set1)(((const acc_t *)b->chunk.max)[i]), sum = V_(set1)(((const acc_t *)b->chunk.sum)[i]);
            for (ptrdiff_t c = 0; c < b->vocab.size; c += VL) {
                V_(store)(row + c, V_(exp)(V_(load)(row + c) - max) / sum);
            }
        }
        if (b->chunk.target[i] >= 0 && target >= 0 && target < b->vocab.size) row[target] = K(minus_one)(b, i, row[target]);
        for (ptrdiff_t c = 0; c < b->vocab.size; c += VL) {
            V p = V_(load)(row + c) * grad;
#if !AG_IS_F64
            if (b->gradient.round_to_bfloat16) p = v_bf16_widen(v_bf16_narrow(p));
#endif
            V_(store)(row + c, p);
        }
    }
}

/* Merge the maximum of each row, and its sum of exponentials relative to the maximum, into max and sum; likewise `rest`, and if
 * requested, `more`. Store the logits of the targets, and all logits if the caller requests them. */
static void K(tile_to_max_sum)(const ag_linear_block *b, const void *tile, void *max, ag_sum *sum, double *rest, ag_more *more)
{
    for (ptrdiff_t i = 0; i < b->chunk.rows; i++) {
        const acc_t *row = (const acc_t *)tile + i * b->tile_pitch;
        const acc_t before = ((const acc_t *)max)[i];
        V largest = V_(set1)((acc_t)-INFINITY), total = {0};
        for (ptrdiff_t c = 0; c < b->vocab.size; c += VL) {
            largest = V_(max)(V_(first)(b->vocab.size - c < VL ? b->vocab.size - c : VL, V_(load)(row + c), largest), largest);
        }
        acc_t now = V_(reduce_max)(largest);
        now = before != before || now <= before ? before : now; /* a maximum that is NaN stays NaN */
        const V shift = V_(set1)(now == (acc_t)-INFINITY ? 0 : now);
        for (ptrdiff_t c = 0; c < b->vocab.size;) {
            V part = {0}; /* one chain of at most eight terms */
            for (int k = 0; k < 8 && c < b->vocab.size; k++, c += VL) {
                const V e = V_(exp)(V_(load)(row + c) - shift);
                part += V_(first)(b->vocab.size - c < VL ? b->vocab.size - c : VL, e, (V){0});
            }
            total += part;
        }
        const acc_t added = V_(reduce_sum)(total);
        if (added != added) {
            /* A NaN among the logits makes the maximum NaN. An infinite logit makes the sum alone NaN. */
            for (ptrdiff_t c = 0; c < b->vocab.size; c++) now = row[c] != row[c] ? row[c] : now;
        }
        const V factor = V_(exp)(V_(set1)(before) - shift);
        if (b->statistics.with_more) {
            ag_more here;
            const double earlier = ag_sum_total(sum[i]), d = ag_max_distance((double)now, (double)before);
            K(more_of_row)(b, i, row, 0, b->vocab.size, now, before, &here);
            if (b->statistics.with_moments) {
                more[i].moment = here.moment + (earlier == 0 ? 0 : exp(-d) * (more[i].moment + earlier * d));
                more[i].deficit += here.deficit + ag_weighted_distance(more[i].weight, d);
                more[i].weight += here.weight;
            }
            if (!(before == now || before != before)) more[i].argmax = here.argmax;
        }
        if (b->statistics.target_logits) K(store_target_logits)(b, i, 0, b->vocab.size, row);
        if (rest) {
            const int is_new = !(before == now || before != before);
            rest[i] = is_new ? K(rest_of_row)(row, b->vocab.size, now, added) + (1 + rest[i]) * (double)factor[0]
                             : rest[i] + (double)added;
        }
        sum[i].sum *= (double)factor[0], sum[i].compensation *= (double)factor[0];
        ag_sum_add(&sum[i], (double)added);
        ((acc_t *)max)[i] = now;
        const int64_t target = b->chunk.target[i] - b->vocab.start;
        if (b->chunk.target[i] >= 0 && target >= 0 && target < b->vocab.size) ((acc_t *)b->statistics.predicted)[b->chunk.row_numbers[i]] = row[target];
        if (b->statistics.logits.data) K(put_logits)(b, i, 0, row, b->vocab.size);
    }
}

/* ---- tiles of b->vocab.size x b->chunk.rows values, which hold all vocabulary entries: lanes are rows -------------------- */

/* Transform a transposed tile of products to logits. */
static void K(columns_to_logits)(const ag_linear_block *b, void *tile)
{
    const acc_t *bias = (const acc_t *)b->transform.bias;
    const int is_capped = b->transform.softcap > 0;
    const V inner = V_(set1)((acc_t)(is_capped ? K(inner_factor)(b) : 1));
    if (bias && !is_capped && !b->rows && b->transform.scale == 1) {
        for (ptrdiff_t c = 0; c < b->vocab.size; c++) {
            const V added = V_(set1)(bias[b->vocab.start + c]);
            acc_t *x = (acc_t *)tile + c * b->tile_pitch;
            for (ptrdiff_t i = 0; i < b->chunk.rows; i += VL) V_(store)(x + i, V_(load)(x + i) + added);
        }
        return;
    }
    for (ptrdiff_t i = 0; i < b->chunk.rows; i += VL) {
        acc_t factors[VL] = {0};
        for (ptrdiff_t k = i; k < i + VL && k < b->chunk.rows; k++) factors[k - i] = (acc_t)K(outer_factor)(b, k);
        const V outer = V_(load)(factors);
        for (ptrdiff_t c = 0; c < b->vocab.size; c++) {
            acc_t *x = (acc_t *)tile + c * b->tile_pitch + i;
            const V u = bias ? V_(load)(x) + V_(set1)(bias[b->vocab.start + c]) : V_(load)(x);
            V_(store)(x, (is_capped ? V_(tanh)(u * inner) : u) * outer);
        }
    }
}

/* Copy row i of a transposed tile to a row that is padded to whole vectors. */
static void K(gather_row)(const ag_linear_block *b, const acc_t *tile, ptrdiff_t i, acc_t *row)
{
    for (ptrdiff_t c = 0; c < b->vocab.size; c++) row[c] = tile[c * b->tile_pitch + i];
    memset(row + b->vocab.size, 0, VL * sizeof *row);
}

/* Turn a transposed tile of logits into P, from the coefficients of its rows. */
static void K(columns_to_general_gradient)(const ag_linear_block *b, acc_t *tile)
{
    acc_t row[AG_MAX_UNPACKED_ROWS + VL];
    for (ptrdiff_t i = 0; i < b->chunk.rows; i++) {
        K(gather_row)(b, tile, i, row);
        K(general_gradient)(b, i, 0, b->vocab.size, row);
        K(round_row)(b, row, b->vocab.size);
        for (ptrdiff_t c = 0; c < b->vocab.size; c++) tile[c * b->tile_pitch + i] = row[c];
    }
}

/* Turn a transposed tile of logits into P, as tile_to_gradient does. */
static void K(columns_to_gradient)(const ag_linear_block *b, void *to)
{
    const ag_rows softmax = {b->gradient.softmax, b->chunk.row_numbers, 0, b->chunk.rows};
    char buffer[4096];
    acc_t *tile = (acc_t *)to;
    if (b->gradient.softmax.data) {
        for (ptrdiff_t i = 0; i < b->chunk.rows; i++) {
            const acc_t *row = (const acc_t *)K(dense)(&softmax, i, 0, b->vocab.size, buffer);
            for (ptrdiff_t c = 0; c < b->vocab.size; c++) memcpy(tile + c * b->tile_pitch + i, row + c, sizeof(acc_t));
        }
    }
    if (b->gradient.is_general) {
        K(columns_to_general_gradient)(b, tile);
        return;
    }
    for (ptrdiff_t i = 0; i < b->chunk.rows && !b->gradient.softmax.data; i += VL) {
        const V max = K(load_some)((const acc_t *)b->chunk.max + i, b->chunk.rows - i);
        const V sum = K(load_some)((const acc_t *)b->chunk.sum + i, b->chunk.rows - i);
        for (acc_t *x = tile + i; x < tile + b->vocab.size * b->tile_pitch; x += b->tile_pitch) {
            V_(store)(x, V_(exp)(V_(load)(x) - max) / sum);
        }
    }
    for (ptrdiff_t i = 0; i < b->chunk.rows; i++) {
        if (b->chunk.target[i] < 0 || b->chunk.target[i] >= b->vocab.size) continue;
        acc_t *p = tile + b->chunk.target[i] * b->tile_pitch + i;
        *p = K(minus_one)(b, i, *p);
    }
    for (ptrdiff_t i = 0; i < b->chunk.rows; i += VL) {
        const V grad = K(load_some)((const acc_t *)b->chunk.grad + i, b->chunk.rows - i);
        for (acc_t *x = tile + i; x < tile + b->vocab.size * b->tile_pitch; x += b->tile_pitch) {
            V p = V_(load)(x) * grad;
#if !AG_IS_F64
            if (b->gradient.round_to_bfloat16) p = v_bf16_widen(v_bf16_narrow(p));
#endif
            V_(store)(x, p);
        }
    }
}

/* Compute the further statistics of row i, from all of its logits and their maximum. */
static void K(put_more)(const ag_linear_block *b, ptrdiff_t i, const acc_t *row, acc_t max)
{
    ag_loss_row *of_row = b->rows + b->chunk.row_numbers[i];
    ag_more more;
    K(more_of_row)(b, i, row, 0, b->vocab.size, max, (acc_t)-INFINITY, &more);
    of_row->moment = more.moment, of_row->deficit = more.deficit, of_row->weight = more.weight;
    of_row->argmax = more.argmax;
}

/* Compute the maximum and the sum of exponentials of every row, complete since the tile holds all vocabulary entries. */
static void K(columns_to_max_sum)(const ag_linear_block *b, const void *from, void *max, double *sum)
{
    const acc_t *tile = (const acc_t *)from, *end = tile + b->vocab.size * b->tile_pitch;
    for (ptrdiff_t i = 0; i < b->chunk.rows; i += VL) {
        const ptrdiff_t left = b->chunk.rows - i < VL ? b->chunk.rows - i : VL;
        acc_t sums[VL];
        V largest = V_(set1)((acc_t)-INFINITY), total = {0};
        for (const acc_t *x = tile + i; x < end; x += b->tile_pitch) largest = V_(max)(V_(load)(x), largest);
        const V shift = V_(select)(largest == (acc_t)-INFINITY, (V){0}, largest);
        for (const acc_t *x = tile + i; x < end;) {
            V part = {0}; /* one chain of at most eight terms */
            for (int k = 0; k < 8 && x < end; k++, x += b->tile_pitch) part += V_(exp)(V_(load)(x) - shift);
            total += part;
        }
        K(store_some)((acc_t *)max + i, largest, left);
        V_(store)(sums, total);
        for (ptrdiff_t k = i; k < i + left; k++) {
            sum[k] = sums[k - i];
            if (sum[k] == sum[k]) continue;
            /* A NaN among the logits makes the maximum NaN. An infinite logit makes the sum alone NaN. */
            for (const acc_t *x = tile + k; x < end; x += b->tile_pitch) {
                if (*x != *x) ((acc_t *)max)[k] = *x;
            }
        }
    }
    for (ptrdiff_t i = 0; i < b->chunk.rows; i++) {
        const ptrdiff_t number = b->chunk.row_numbers[i];
        const acc_t of_max = ((const acc_t *)max)[i];
        acc_t row[AG_MAX_UNPACKED_ROWS + VL];
        if (b->statistics.with_more || b->statistics.target_logits || (b->statistics.rest && sum[i] < AG_ACCURATE_SUM)) {
            K(gather_row)(b, tile, i, row);
        }
        if (b->statistics.rest) b->statistics.rest[number] = K(rest_of_row)(row, b->vocab.size, of_max, (acc_t)sum[i]);
        if (b->statistics.with_more) K(put_more)(b, i, row, of_max);
        if (b->statistics.target_logits) K(store_target_logits)(b, i, 0, b->vocab.size, row);
        const int has_target = b->chunk.target[i] >= 0 && b->chunk.target[i] < b->vocab.size;
        ((acc_t *)b->statistics.predicted)[number] = has_target ? tile[b->chunk.target[i] * b->tile_pitch + i] : 0;
        if (b->statistics.logits.data) {
            acc_t row[AG_MAX_UNPACKED_ROWS];
            for (ptrdiff_t c = 0; c < b->vocab.size; c++) row[c] = tile[c * b->tile_pitch + i];
            K(put_logits)(b, i, 0, row, b->vocab.size);
        }
    }
}
