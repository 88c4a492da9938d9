/* Kernels of the cross-entropy whose targets are probabilities of all classes: sums of rows, and all results of columns. Body
 * header, included by loss_kernels.h. */

/* ---- sums of rows ------------------------------------------------------------------------------------------------ */

/* Sum the terms of one segment, n <= AG_SEGMENT(VL), in the order that rowwise.h defines. */
AG_INLINE void K(dense_segment)(const char *a, const char *prob, const compute_t *class_weight, ptrdiff_t n, V scale, V max,
                                const K(dense_row) *row, double *sums)
{
    const V none = {0};
    K(lane_sums) lanes[3] = {0};
    for (ptrdiff_t i = 0; i < n;) {
        const ptrdiff_t end = i + AG_SUM_BLOCK <= n ? i + AG_SUM_BLOCK : n;
        V partial[3] = {{0}};
        for (; i + VL <= end; i += VL) {
            const V c = class_weight ? V_(load)(class_weight + i) : none;
            const V weight = K(dense_weight)(AG_LOAD(prob + i * AG_SIZE), c, class_weight != NULL, row);
            K(dense_add)(partial, AG_LOAD(a + i * AG_SIZE), weight, scale, max);
        }
        if (i < end) {
            const V c = class_weight ? V_(load_partial)(class_weight + i, end - i) : none;
            const V weight = K(dense_weight)(AG_LOAD_PARTIAL(prob + i * AG_SIZE, end - i), c, class_weight != NULL, row);
            K(dense_add)(partial, AG_LOAD_PARTIAL(a + i * AG_SIZE, end - i), V_(first)(end - i, weight, none), scale, max);
            i = end;
        }
        AG_UNROLL(3)
        for (int j = 0; j < 3; j++) K(fold)(&lanes[j], partial[j]);
    }
    AG_UNROLL(3)
    for (int j = 0; j < 3; j++) sums[j] = K(reduce)(&lanes[j]);
}

/* Compute the sums of narrow rows, of which loss_is_flat holds. */
AG_NOINLINE void K(dense_flat_sums)(const ag_tile *tile, const ag_loss_rows *parameters, double *sums[3])
{
    compute_t terms[3][K(LOSS_PADDED)] __attribute__((aligned(64))), shift[K(LOSS_PADDED)] __attribute__((aligned(64)));
    compute_t each[K(LOSS_CAPACITY)];
    const K(dense_row) dense = K(dense_row_of)(parameters, 0, 0);
    const V scale = V_(set1)((compute_t)tile->scale);
    const ptrdiff_t n = tile->n, block = K(LOSS_CAPACITY) / n / VL * VL;
    for (ptrdiff_t row = 0; row < tile->rows; row += block) {
        const ptrdiff_t rows = tile->rows - row < block ? tile->rows - row : block, count = rows * n;
        for (ptrdiff_t r = 0; r < rows; r++) each[r] = (compute_t)parameters->max[row + r];
        K_COMPUTE(broadcast)(each, rows, n, shift);
        for (ptrdiff_t i = 0; i < count; i += VL) {
            const V x = K(loss_load_flat)(tile->a + row * tile->a_stride, i, count);
            const V prob = K(loss_load_flat)(tile->b + row * tile->b_stride, i, count);
            V added[3] = {{0}};
            K(dense_add)(added, x, K(dense_weight)(prob, prob, 0, &dense), scale, V_(load)(shift + i));
            AG_UNROLL(3)
            for (int j = 0; j < 3; j++) V_(store)(terms[j] + i, added[j]);
        }
        for (int j = 0; j < 3; j++) K_COMPUTE(narrow_row_sums)(terms[j], rows, n, sums[j] + row);
    }
}

static void K(loss_rows_dense)(const ag_tile *tile, const ag_loss_rows *rows, double *deficit, double *below, double *at_max)
{
    double *results[3] = {deficit, below, at_max};
    const K(dense_row) row = K(dense_row_of)(rows, 0, 0);
    const compute_t *weight = (const compute_t *)rows->class_weight;
    if (K(loss_is_flat)(tile, rows)) {
        K(dense_flat_sums)(tile, rows, results);
        return;
    }
    for (ptrdiff_t r = 0; r < tile->rows; r++) {
        const char *a = tile->a + r * tile->a_stride, *prob = tile->b + r * tile->b_stride;
        const V scale = V_(set1)((compute_t)rows->scale[r]), max = V_(set1)((compute_t)rows->max[r]);
        ag_sum totals[3] = {{0}};
        double sums[3] = {0};
        for (ptrdiff_t i = 0; i < tile->n; i += AG_SEGMENT(VL)) {
            const ptrdiff_t length = tile->n - i < AG_SEGMENT(VL) ? tile->n - i : AG_SEGMENT(VL);
            K(dense_segment)(a + i * AG_SIZE, prob + i * AG_SIZE, weight ? weight + i : NULL, length, scale, max, &row, sums);
            for (int j = 0; tile->n > AG_SEGMENT(VL) && j < 3; j++) ag_sum_add(&totals[j], sums[j]);
        }
        for (int j = 0; j < 3; j++) {
            results[j][r] = ag_canonical_nan(tile->n > AG_SEGMENT(VL) ? ag_sum_total(totals[j]) : sums[j] + 0.0);
        }
    }
}

/* ---- columns ----------------------------------------------------------------------------------------------------- */

#if AG_IS_F32 || AG_IS_F64
/* Compute the losses of columns c to c + count, and replace `rest` of loss.h and the three sums by the factor, the smoothing,
 * `certain` and `at_certain` of ag_loss_rows: what finish_row and set_gradient compute of a row (_cross_entropy_finish.pyx). */
AG_NOINLINE void K(dense_finish)(const ag_dense_columns *p, ptrdiff_t c, ptrdiff_t count, double numbers[4][4 * AG_LANES])
{
    const f64v none = {0}, one = v_f64_set1(1), infinite = v_f64_set1(INFINITY), class_scale = v_f64_set1(p->class_scale);
    const f64v inverse = v_f64_set1(p->inverse), grad = v_f64_set1(p->denominator == 0 ? 0 : p->grad_loss);
    f64v token = one, grad_loss = v_f64_select(grad == 0, none, grad / p->denominator);
    i64v is_zero = grad == 0;
    for (ptrdiff_t i = 0; i < count; i += AG_LANES / 2) {
        const f64v rest = v_f64_load(numbers[0] + i), below = v_f64_load(numbers[2] + i), log_sum = v_f64_log1p(rest);
        const f64v deficit = v_f64_load(numbers[1] + i) * class_scale, reciprocal = 1.0 / (1.0 + rest);
        const f64v weights = (below + v_f64_load(numbers[3] + i)) * class_scale;
        f64v loss = weights * log_sum + deficit;
        if (v_f64_bits(loss != loss)) { /* see ag_smoothed_sum */
            const i64v is_infinite = (log_sum == 0) & ((weights == infinite) | (weights == -infinite));
            loss = v_f64_select(is_infinite, v_f64_select(deficit - deficit == 0, weights, deficit), loss);
        }
        loss = v_f64_select(weights == 0, deficit, loss);
        if (p->token_weight) {
            token = K(loss_load)(p->token_weight + c + i, count - i);
            loss = v_f64_select(token == 0, none, token * loss);
            const f64v grad_output = v_f64_select((token == 0) | (grad == 0), none, token * grad);
            is_zero = grad_output == 0;
            grad_loss = v_f64_select(is_zero, none, grad_output / p->denominator);
        }
        /* Without an upstream gradient there is none, whatever the weights and the logits are. */
        const f64v a = v_f64_select(grad_loss == 0, none, grad_loss * weights + 0.0);
        const f64v others = v_f64_select(grad_loss == 0, none, grad_loss * below * class_scale);
        K(loss_store)(p->losses + c + i, loss, count - i);
        v_f64_store(numbers[0] + i, v_f64_select(is_zero, none, a * reciprocal * inverse));
        v_f64_store(numbers[1] + i, v_f64_select(is_zero, none, grad_loss * class_scale * inverse));
        v_f64_store(numbers[2] + i, v_f64_select(reciprocal > AG_NEARLY_CERTAIN, one, one + 1.0));
        v_f64_store(numbers[3] + i, ((0.0 + others) - a * (rest * reciprocal)) * inverse);
    }
}
#endif

/* Load VL numbers, rounded to the compute type. */
AG_INLINE V K(loss_load_narrowed)(const double *x)
{
    const K(lane_sums) lanes = K(loss_load_lanes)(x, VL);
    return K(to_compute_type)(&lanes);
}

static_assert(AG_DENSE_STRIP_ROWS(VL) * 4 * sizeof(V) <= AG_SCRATCH_BYTES, "p->memory holds the exponentials of a strip");

/* Compute a strip of columns. Its exponentials are kept in p->memory, (n, vectors). */
AG_INLINE void K(dense_strip)(const ag_dense_columns *p, const int vectors, const ag_tile *tile, ptrdiff_t c,
                              ptrdiff_t width, int nontemporal)
{
    const char *a = tile->a + c * AG_SIZE, *prob = tile->b + c * AG_SIZE;
    const compute_t *class_weight = (const compute_t *)p->class_weight;
    const V none = {0}, scale = V_(set1)((compute_t)tile->scale);
    const K(dense_row) weights = {V_(set1)((compute_t)p->kept), V_(set1)((compute_t)p->share), none, none};
    K(dense_row) row[4];
    K(lane_sums) rest[4], sums[12];
    V max[4] = {none}, q[4] = {none}, factor[4], smoothing[4], *cached = (V *)p->memory;
    double numbers[4][4 * AG_LANES];
    K(strip_statistics)(vectors, tile, a, width, scale, max, cached, rest);
    K(strip_sum)(AG_LOSS_EXP_OF_DENSE, vectors, tile, a, prob, width, scale, max, &weights, class_weight, sums, NULL);
    AG_UNROLL(4)
    for (int j = 0; j < vectors; j++) {
        K(loss_store_lanes)(numbers[0] + j * VL, &rest[j], VL);
        AG_UNROLL(3)
        for (int k = 0; k < 3; k++) K(loss_store_lanes)(numbers[k + 1] + j * VL, &sums[3 * j + k], VL);
    }
    K_COMPUTE(dense_finish)(p, c, vectors > 1 ? vectors * VL : width, numbers);
    AG_UNROLL(4)
    for (int j = 0; j < vectors; j++) {
        factor[j] = K(loss_load_narrowed)(numbers[0] + j * VL);
        smoothing[j] = K(loss_load_narrowed)(numbers[1] + j * VL);
        row[j] = weights;
        row[j].certain = K(loss_load_narrowed)(numbers[2] + j * VL);
        row[j].at_certain = K(loss_load_narrowed)(numbers[3] + j * VL);
    }
    if (!p->return_grad) return;
    for (ptrdiff_t k = 0; k < tile->n; k++) {
        char *out = tile->out + k * tile->out_stride + c * AG_SIZE;
        const V c_k = class_weight ? V_(set1)(class_weight[k]) : none;
        K(load_strip)(vectors, 1, prob + k * tile->b_stride, width, q);
        AG_UNROLL(4)
        for (int j = 0; j < vectors; j++) {
            const V e = cached[k * vectors + j];
            const V w = K(dense_weight)(q[j], c_k, class_weight != NULL, &row[j]);
            const V value = K(loss_result)(1, e, V_(fma)(e, factor[j], -(smoothing[j] * w)), &row[j]);
            q[j] = V_(select)((factor[j] == 0) & (smoothing[j] == 0), none, value);
        }
        K(store_columns)(vectors, out, width, nontemporal, q);
    }
}

static void K(loss_dense_strips)(const ag_tile *tile, const ag_dense_columns *p)
{
    AG_COMPUTE_STRIPS(K(dense_strip), p, tile);
}
