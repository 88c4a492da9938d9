/* Unpacked gradients from a tile of P: sums over streamed rows, and rows that are written once. For one kind of arithmetic
 * and one instruction set. Included by kernels.h; skinny_rows.h describes the operands. */

/* ---- sums over streamed rows ---------------------------------------------------------------------------------------------- */

/* Add p(r, s) rows[s][c] over `terms` streamed rows to sums[r][c], for nr resident rows and nv vectors from column c on. The
 * last vector has `tail` columns. Without `add`, sums begin with zero. */
AG_INLINE void K(add_products)(const ag_dtype dtype, const int nr, const int nv, const char *const *rows, ptrdiff_t terms,
                               const acc_t *p, ptrdiff_t pitch, ptrdiff_t c, const ptrdiff_t tail, acc_t *sums,
                               ptrdiff_t sums_pitch, int add)
{
    V sum[K(PRODUCTS)];
    AG_UNROLL(8)
    for (int r = 0; r < nr; r++) {
        AG_UNROLL(4)
        for (int j = 0; j < nv; j++) {
            sum[r * nv + j] = (V){0};
            if (add) sum[r * nv + j] = V_(load)(sums + r * sums_pitch + j * VL);
        }
    }
    for (ptrdiff_t s = 0; s < terms; s++) {
        V right[K(VECTORS_IN_REGISTERS)];
        AG_UNROLL(4)
        for (int j = 0; j < nv; j++) right[j] = K(load_as)(dtype, rows[s], c + j * VL, j == nv - 1 ? tail : VL);
        AG_UNROLL(8)
        for (int r = 0; r < nr; r++) {
            const V left = V_(set1)(p[r * pitch + s]);
            AG_UNROLL(4)
            for (int j = 0; j < nv; j++) sum[r * nv + j] = V_(fma)(left, right[j], sum[r * nv + j]);
        }
    }
    AG_UNROLL(8)
    for (int r = 0; r < nr; r++) {
        AG_UNROLL(4)
        for (int j = 0; j < nv; j++) V_(store)(sums + r * sums_pitch + j * VL, sum[r * nv + j]);
    }
}

/* Add products to nv vectors of all resident rows, for as many rows at a time as keep the multipliers busy. */
AG_INLINE void K(add_columns)(const ag_dtype dtype, const int nv, ptrdiff_t resident, const char *const *rows,
                              ptrdiff_t terms, const acc_t *p, ptrdiff_t pitch, ptrdiff_t c, const ptrdiff_t tail,
                              acc_t *sums, ptrdiff_t sums_pitch, int add)
{
    const int many = nv > 1 ? K(ROWS_IN_REGISTERS) : K(NARROW);
    while (resident > 0) {
        const int nr = resident >= many ? many : resident >= 4 ? 4 : resident >= 2 ? 2 : 1;
        if (nr == many) {
            K(add_products)(dtype, many, nv, rows, terms, p, pitch, c, tail, sums, sums_pitch, add);
        } else if (nr == 4) {
            K(add_products)(dtype, many > 4 ? 4 : 1, nv, rows, terms, p, pitch, c, tail, sums, sums_pitch, add);
        } else if (nr == 2) {
            K(add_products)(dtype, 2, nv, rows, terms, p, pitch, c, tail, sums, sums_pitch, add);
        } else {
            K(add_products)(dtype, 1, nv, rows, terms, p, pitch, c, tail, sums, sums_pitch, add);
        }
        resident -= nr;
        p += nr * pitch;
        sums += nr * sums_pitch;
    }
}

/* Compute sum_rows for streamed rows of this dtype. */
AG_INLINE void K(sum_rows_of)(const ag_dtype dtype, ptrdiff_t resident, const ag_rows *streamed, ptrdiff_t first,
                              ptrdiff_t n, const acc_t *p, ptrdiff_t pitch, acc_t *sums, ptrdiff_t sums_pitch, int add)
{
    enum { WIDE = K(VECTORS_IN_REGISTERS) };
    char buffer[K(TERMS)][4096 + K(PADDING)];
    const char *rows[K(TERMS)];
    const int copies = resident >= K(NARROW) && K(collides)(streamed);
    /* A segment of the sums stays in L2 while all streamed rows are added to it. */
    for (ptrdiff_t done = 0; done < n; done += K(SEGMENT)) {
        const ptrdiff_t length = n - done < K(SEGMENT) ? n - done : K(SEGMENT);
        for (ptrdiff_t s = 0; s < streamed->count; s += K(TERMS)) {
            const ptrdiff_t terms = streamed->count - s < K(TERMS) ? streamed->count - s : K(TERMS);
            K(dense_rows)(streamed, s, terms, first + done, length, buffer[0], sizeof buffer[0], copies, rows);
            for (ptrdiff_t c = 0; c < length;) {
                const ptrdiff_t left = length - c;
                acc_t *to = sums + done + c;
                if (left >= WIDE * VL) {
                    K(add_columns)(dtype, WIDE, resident, rows, terms, p + s, pitch, c, VL, to, sums_pitch, add || s);
                    c += WIDE * VL;
                } else {
                    K(add_columns)(dtype, 1, resident, rows, terms, p + s, pitch, c, left < VL ? left : VL, to, sums_pitch,
                                   add || s);
                    c += VL;
                }
            }
        }
    }
}

/* Compute sum_rows for at most THIN features, as dot products of rows of p and columns of the streamed rows. */
static void K(sum_columns)(ptrdiff_t resident, const ag_rows *streamed, ptrdiff_t first, ptrdiff_t n, const acc_t *p,
                           ptrdiff_t pitch, acc_t *sums, ptrdiff_t sums_pitch, int add)
{
    const ag_dtype own = AG_IS_F64 ? AG_FLOAT64 : AG_FLOAT32;
    acc_t columns[K(THIN)][AG_MAX_STREAMED_STEP], products[AG_MAX_UNPACKED_ROWS * K(THIN)];
    const char *rows[AG_MAX_UNPACKED_ROWS];
    const ag_rows right = {{(char *)columns, sizeof columns[0], sizeof(acc_t), own, 0}, 0, 0, n};
    K(load_columns)(streamed, first, n, columns);
    for (ptrdiff_t r = 0; r < resident || r % K(ROWS_IN_REGISTERS); r++) {
        rows[r] = (const char *)(p + (r < resident ? r : resident - 1) * pitch);
    }
    K(dot_segment)(own, rows, resident, &right, 0, streamed->count, products, n, 0);
    for (ptrdiff_t r = 0; r < resident; r++) {
        for (ptrdiff_t c = 0; c < n; c++) {
            acc_t *sum = sums + r * sums_pitch + c;
            *sum = add ? *sum + products[r * n + c] : products[r * n + c];
        }
    }
}

/* Compute sums[r][c], the sum over all streamed rows s of p(r, s) times feature first + c of row s, for c < n. With `add`, add it
 * to the earlier sums. There are at most AG_MAX_UNPACKED_ROWS resident and AG_MAX_STREAMED_STEP streamed rows. sums_pitch is a
 * multiple of VL. */
static void K(sum_rows)(ptrdiff_t resident, const ag_rows *streamed, ptrdiff_t first, ptrdiff_t n, const void *p,
                        ptrdiff_t pitch, void *sums, ptrdiff_t sums_pitch, int add)
{
    if (n <= K(THIN)) {
        K(sum_columns)(resident, streamed, first, n, (const acc_t *)p, pitch, (acc_t *)sums, sums_pitch, add);
        return;
    }
    AG_BY_DTYPE(streamed->matrix.dtype, K(sum_rows_of), resident, streamed, first, n, (const acc_t *)p, pitch, (acc_t *)sums,
                sums_pitch, add);
}

/* Compute to[c], the compensated sum of `count` partial sums from[i * stride + c], for c < n. */
static void K(combine)(const void *from, ptrdiff_t count, ptrdiff_t stride, ptrdiff_t n, void *to)
{
    for (ptrdiff_t c = 0; c < n; c += VL) {
        const ptrdiff_t left = n - c < VL ? n - c : VL;
        const acc_t *term = (const acc_t *)from + c;
        V total = K(load_some)(term, left), compensation = {0};
        for (ptrdiff_t i = 1; i < count; i++) {
            term += stride;
            K(add_compensated)(&total, &compensation, K(load_some)(term, left));
        }
        K(store_some)((acc_t *)to + c, K(compensated)(total, compensation), left);
    }
}

/* ---- rows that are written once ------------------------------------------------------------------------------------------- */

/* Store the first `count` values of a vector of results, rounded to this dtype. */
AG_INLINE void K(store_as)(const ag_dtype dtype AG_UNUSED, const int nontemporal, char *p, V v, const ptrdiff_t count)
{
#if !AG_IS_F64
    if (dtype == AG_FLOAT16) {
        if (count < VL) v_f16_store_partial(p, v, count);
        else if (nontemporal) v_f16_stream(p, v);
        else v_f16_store(p, v);
        return;
    }
    if (dtype == AG_BFLOAT16) {
        if (count < VL) v_bf16_store_partial(p, v, count);
        else if (nontemporal) v_bf16_stream(p, v);
        else v_bf16_store(p, v);
        return;
    }
#endif
    if (count < VL) V_(store_partial)(p, v, count);
    else if (nontemporal) V_(stream)(p, v);
    else V_(store)(p, v);
}

/* Write to[s][c], the sum over nr resident rows of p(r, s) resident[r][c], for ns results and nv vectors from column c on. The
 * last vector has `tail` columns. */
AG_INLINE void K(write_some)(const ag_dtype dtype, const int nontemporal, const int ns, const int nv,
                             const char *const *resident, ptrdiff_t nr, const acc_t *p, ptrdiff_t r_stride,
                             ptrdiff_t s_stride, ptrdiff_t c, const ptrdiff_t tail, char *const *to)
{
    const ptrdiff_t itemsize = ag_itemsize[dtype];
    V sum[K(PRODUCTS)];
    AG_UNROLL(16)
    for (int i = 0; i < ns * nv; i++) sum[i] = (V){0};
    for (ptrdiff_t r = 0; r < nr; r++) {
        V right[K(VECTORS_IN_REGISTERS)];
        AG_UNROLL(4)
        for (int j = 0; j < nv; j++) {
            const ptrdiff_t n = j == nv - 1 ? tail : VL;
            const char *from = resident[r] + (c + j * VL) * (ptrdiff_t)sizeof(acc_t);
            right[j] = n < VL ? V_(load_partial)(from, n) : V_(load)(from);
        }
        AG_UNROLL(8)
        for (int s = 0; s < ns; s++) {
            const V left = V_(set1)(p[r * r_stride + s * s_stride]);
            AG_UNROLL(4)
            for (int j = 0; j < nv; j++) sum[s * nv + j] = V_(fma)(left, right[j], sum[s * nv + j]);
        }
    }
    AG_UNROLL(8)
    for (int s = 0; s < ns; s++) {
        AG_UNROLL(4)
        for (int j = 0; j < nv; j++) {
            K(store_as)(dtype, nontemporal, to[s] + (c + j * VL) * itemsize, sum[s * nv + j], j == nv - 1 ? tail : VL);
        }
    }
}

/* Write n columns of the result *to from nr resident rows. Vectors of aligned elements are stored at multiples of their size, as a
 * store into two cache lines takes longer than the products of a few rows. */
AG_INLINE void K(write_row)(const ag_dtype dtype, const int nr, const char *const *resident, ptrdiff_t n, const acc_t *p,
                            ptrdiff_t r_stride, char *const *to)
{
    enum { WIDE = K(VECTORS_IN_REGISTERS) };
    const ptrdiff_t itemsize = ag_itemsize[dtype], before = (ptrdiff_t)(-(uintptr_t)*to & (VL * (size_t)itemsize - 1)) / itemsize;
    ptrdiff_t c = before < n ? before : n;
    if (c > 0) K(write_some)(dtype, 0, 1, 1, resident, nr, p, r_stride, 0, 0, c, to);
    for (; c + WIDE * VL <= n; c += WIDE * VL) K(write_some)(dtype, 0, 1, WIDE, resident, nr, p, r_stride, 0, c, VL, to);
    for (; c < n; c += VL) K(write_some)(dtype, 0, 1, 1, resident, nr, p, r_stride, 0, c, n - c < VL ? n - c : VL, to);
}

/* Write n columns of ns results from at most FEW_RESIDENT rows, with a loop for each number of rows. */
AG_INLINE void K(write_from_few)(const ag_dtype dtype, const char *const *resident, ptrdiff_t nr, ptrdiff_t n, const acc_t *p,
                                 ptrdiff_t r_stride, ptrdiff_t s_stride, ptrdiff_t ns, char *const *to)
{
    for (ptrdiff_t s = 0; s < ns; s++, p += s_stride) {
        if (nr == 1) K(write_row)(dtype, 1, resident, n, p, r_stride, to + s);
        else if (nr == 2) K(write_row)(dtype, 2, resident, n, p, r_stride, to + s);
        else if (nr == 3) K(write_row)(dtype, 3, resident, n, p, r_stride, to + s);
        else K(write_row)(dtype, 4, resident, n, p, r_stride, to + s);
    }
}

/* Write n columns of ns results. */
AG_INLINE void K(write_segment)(const ag_dtype dtype, const int nontemporal, const char *const *resident, ptrdiff_t nr,
                                ptrdiff_t n, const acc_t *p, ptrdiff_t r_stride, ptrdiff_t s_stride, ptrdiff_t ns,
                                char *const *to)
{
    enum { MANY = K(ROWS_IN_REGISTERS), WIDE = K(VECTORS_IN_REGISTERS) };
    const ptrdiff_t wide = n / (WIDE * VL) * (WIDE * VL);
    if (!nontemporal && nr <= K(FEW_RESIDENT)) {
        K(write_from_few)(dtype, resident, nr, n, p, r_stride, s_stride, ns, to);
        return;
    }
    /* The resident rows, which may lie in L2, are read once for all results, as a few vectors of each row stay in L1. */
    for (ptrdiff_t c = 0; c < wide; c += WIDE * VL) {
        for (ptrdiff_t s = 0; s < ns; s += s + MANY <= ns ? MANY : 1) {
            const acc_t *of_row = p + s * s_stride;
            if (s + MANY <= ns) {
                K(write_some)(dtype, nontemporal, MANY, WIDE, resident, nr, of_row, r_stride, s_stride, c, VL, to + s);
            } else {
                K(write_some)(dtype, nontemporal, 1, WIDE, resident, nr, of_row, r_stride, s_stride, c, VL, to + s);
            }
        }
    }
    for (ptrdiff_t c = wide; c < n; c += VL) {
        const ptrdiff_t tail = n - c < VL ? n - c : VL;
        for (ptrdiff_t s = 0; s < ns; s += ns == K(NARROW) ? K(NARROW) : 1) {
            const acc_t *of_row = p + s * s_stride;
            if (ns == K(NARROW)) {
                K(write_some)(dtype, nontemporal, K(NARROW), 1, resident, nr, of_row, r_stride, s_stride, c, tail, to);
            } else {
                K(write_some)(dtype, nontemporal, 1, 1, resident, nr, of_row, r_stride, s_stride, c, tail, to + s);
            }
        }
    }
}

/* Compute write_rows for at most THIN features and s_stride 1. Columns of results are rounded and scattered into rows. */
static void K(write_columns)(ag_variant variant, const ag_rows *resident, const ag_rows *to, ptrdiff_t first, ptrdiff_t n,
                             const acc_t *p, ptrdiff_t pitch)
{
    const ag_dtype own = AG_IS_F64 ? AG_FLOAT64 : AG_FLOAT32, dtype = to->matrix.dtype;
    const int itemsize = ag_itemsize[dtype];
    const ptrdiff_t count = to->count, runs = K(is_run)(to) ? 1 : count;
    const ag_rows right = {{(char *)p, pitch * (ptrdiff_t)sizeof(acc_t), sizeof(acc_t), own, 0}, 0, 0, resident->count};
    acc_t left[K(THIN)][AG_TERMS], columns[K(THIN)][AG_MAX_STREAMED_STEP];
    char buffer[AG_TERMS * K(THIN) * sizeof(acc_t)], rounded[AG_MAX_STREAMED_STEP * 8];
    const char *rows[AG_TERMS];
    K(load_resident)(resident, first, n, buffer, K(THIN) * sizeof(acc_t), 0, rows);
    for (ptrdiff_t r = 0; r < resident->count; r++) {
        for (ptrdiff_t k = 0; k < n; k++) memcpy(&left[k][r], rows[r] + k * (ptrdiff_t)sizeof(acc_t), sizeof(acc_t));
    }
    K(sum_rows_of)(own, n, &right, 0, count, left[0], AG_TERMS, columns[0], AG_MAX_STREAMED_STEP, 0);
    for (ptrdiff_t k = 0; k < n; k++) {
        const char *source = (const char *)columns[k];
        if (dtype != own) {
            ag_convert(variant, AG_IS_F64, source, dtype, rounded, count);
            source = rounded;
        }
        for (ptrdiff_t i = 0; i < runs; i++) {
            const int64_t row = to->numbers ? to->numbers[i] : to->start;
            ag_copy_rows(AG_VARIANT_BASELINE, to->matrix.data + row * to->matrix.row_stride + (first + k) * to->matrix.step, 0,
                         to->matrix.row_stride, source + i * itemsize, 0, itemsize, 1, count / runs, itemsize,
                         to->matrix.swapped);
        }
    }
}

/* Store n results in a row of this matrix from `place` on, rounded to its dtype. */
static void K(place_results)(ag_variant variant, const acc_t *results, ptrdiff_t n, const ag_matrix *to, char *place)
{
    const ag_dtype own = AG_IS_F64 ? AG_FLOAT64 : AG_FLOAT32;
    const int itemsize = ag_itemsize[to->dtype];
    char rounded[AG_FETCH * 8];
    for (ptrdiff_t c = 0; c < n; c += AG_FETCH) {
        const ptrdiff_t count = n - c < AG_FETCH ? n - c : AG_FETCH;
        const char *source = (const char *)(results + c);
        if (to->dtype != own) {
            ag_convert(variant, AG_IS_F64, source, to->dtype, rounded, count);
            source = rounded;
        }
        ag_copy_block(place + c * to->step, 0, to->step, source, 0, itemsize, 1, count, itemsize, to->swapped);
    }
}

/* Write features [first, first + n) of every row s of `to`: the sum over the resident rows r, at most AG_TERMS, of p(r, s) times
 * row r. Results are rounded once, to any dtype and layout. */
static void K(write_rows)(ag_variant variant, const ag_rows *resident, const ag_rows *to, ptrdiff_t first, ptrdiff_t n,
                          const void *p, ptrdiff_t r_stride, ptrdiff_t s_stride, int nontemporal)
{
    const ag_dtype own = AG_IS_F64 ? AG_FLOAT64 : AG_FLOAT32, dtype = to->matrix.dtype;
    const int itemsize = ag_itemsize[dtype], is_dense = to->matrix.step == itemsize && !to->matrix.swapped;
    const int is_direct = is_dense && (dtype == own || (!AG_IS_F64 && itemsize == 2));
    const ptrdiff_t divisor = (resident->count + AG_MAX_UNPACKED_ROWS - 1) / AG_MAX_UNPACKED_ROWS;
    const int copies = to->count >= K(NARROW) && K(collides)(resident);
    const int is_copied = copies || !K(is_in_place)(&resident->matrix);
    const ptrdiff_t most = is_copied ? K(SHORT) / divisor / VL * VL : K(SEGMENT);
    char buffer[AG_MAX_UNPACKED_ROWS * K(SHORT) * sizeof(acc_t) + AG_TERMS * K(PADDING)], results[K(NARROW)][4096];
    const char *rows[AG_TERMS];
    if (n <= K(THIN) && s_stride == 1 && to->count <= AG_MAX_STREAMED_STEP) {
        K(write_columns)(variant, resident, to, first, n, (const acc_t *)p, r_stride);
        return;
    }
    for (ptrdiff_t done = 0; done < n; done += most) {
        const ptrdiff_t length = n - done < most ? n - done : most;
        K(load_resident)(resident, first + done, length, buffer, most * (ptrdiff_t)sizeof(acc_t) + K(PADDING), copies, rows);
        for (ptrdiff_t s = 0; s < to->count; s += K(NARROW)) {
            const ptrdiff_t ns = to->count - s < K(NARROW) ? to->count - s : K(NARROW);
            const acc_t *of_rows = (const acc_t *)p + s * s_stride;
            char *targets[K(NARROW)] = {0}, *places[K(NARROW)] = {0};
            int is_aligned = nontemporal;
            for (ptrdiff_t i = 0; i < ns; i++) {
                places[i] = K(place)(to, s + i, first + done);
                targets[i] = is_direct ? places[i] : results[i];
                is_aligned &= ((uintptr_t)places[i] & (VL * (size_t)itemsize - 1)) == 0;
            }
            if (is_direct && is_aligned) {
                AG_BY_DTYPE(dtype, K(write_segment), 1, rows, resident->count, length, of_rows, r_stride, s_stride, ns, targets);
                continue;
            }
            AG_BY_DTYPE(is_direct ? dtype : own, K(write_segment), 0, rows, resident->count, length, of_rows, r_stride,
                        s_stride, ns, targets);
            for (ptrdiff_t i = 0; !is_direct && i < ns; i++) {
                K(place_results)(variant, (const acc_t *)results[i], length, &to->matrix, places[i]);
            }
        }
    }
    if (nontemporal) v_fence();
}
