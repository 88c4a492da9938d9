/* Self-test of the kernels of linear cross-entropy, like selftest.c: every variant and kind against scalar double
 * arithmetic, one block and one chunk, whole and in parts, for sizes around the edges of vectors, tiles and panels.
 * It also tests when a team of threads spins.
 *
 * The scalar results are computed in double precision. The bounds are error bounds of float32 (float64) sums, plus the
 * rounding of P to bfloat16.
 */
#include "ascend_grad/linear/bfmmla_in_c.h"
#include "ascend_grad/linear/linear.h"
#include "ascend_grad/team.h"
#include "selftest.h"

static double *numbers(ptrdiff_t n, double scale)
{
    double *x = malloc((size_t)(n + 1) * sizeof *x);
    for (ptrdiff_t i = 0; i < n; i++) x[i] = scale * (2 * uniform() - 1);
    return x;
}

/* The values as the caller's matrix of this dtype; x becomes what it holds. */
static ag_matrix matrix(double *x, ptrdiff_t rows, ptrdiff_t n, ag_dtype dtype, int strided)
{
    const ptrdiff_t size = ag_itemsize[dtype], step = strided ? 3 * size : size;
    ag_matrix m = {malloc((size_t)(rows * n * step + 8)), n * step, step, dtype, 0};
    for (ptrdiff_t i = 0; i < rows * n; i++) put(m.data + i * step, dtype, x[i]), x[i] = get(m.data + i * step, dtype);
    return m;
}

static void *reals(const ag_linear_kernels *k, const double *x, ptrdiff_t n)
{
    char *to = malloc((size_t)(n * k->acc_size + 8));
    for (ptrdiff_t i = 0; i < n; i++) put(to + i * k->acc_size, k->acc_size == 8 ? AG_FLOAT64 : AG_FLOAT32, x[i]);
    return to;
}

static double real_at(const ag_linear_kernels *k, const void *p, ptrdiff_t i)
{
    return get((const char *)p + i * k->acc_size, k->acc_size == 8 ? AG_FLOAT64 : AG_FLOAT32);
}

static ptrdiff_t up(ptrdiff_t n, ptrdiff_t to) { return (n + to - 1) / to * to; }

static void *zeros(ptrdiff_t bytes)
{
    const size_t size = (size_t)up(bytes + 64, 64);
    return memset(aligned_alloc(64, size), 0, size);
}

/* The largest logits of a block's rows, by the tasks of the packed sweep, and by the kernel of unpacked tiles. */
static void test_top_k(const ag_linear_kernels *k, ag_linear_block *b, ptrdiff_t all, const double *x, const double *w, double eps)
{
    const ptrdiff_t rows = b->chunk.rows, vocab = b->vocab.size, count = vocab < 9 ? vocab : 9;
    const ptrdiff_t panels = up(vocab, k->nr) / k->nr, tiles = up(rows, k->mr) / k->mr, pitch = up(vocab, 16);
    double *lowest = numbers(all * count, 0), *logits = numbers(rows * vocab, 0);
    for (ptrdiff_t i = 0; i < all * count; i++) lowest[i] = -INFINITY;
    for (ptrdiff_t i = 0; i < rows; i++) {
        for (ptrdiff_t v = 0; v < vocab; v++) {
            for (ptrdiff_t c = 0; c < b->hidden; c++) {
                logits[i * vocab + v] += x[b->chunk.row_numbers[i] * b->hidden + c] * w[v * b->hidden + c];
            }
        }
    }
    b->packed.logits = zeros(up(rows, k->mr) * up(vocab, k->nr) * k->acc_size), b->tile_pitch = pitch;
    char *tile = zeros(rows * pitch * k->acc_size);
    for (ptrdiff_t i = 0; i < rows; i++) {
        for (ptrdiff_t v = 0; v < vocab; v++) {
            put(tile + (i * pitch + v) * k->acc_size, k->acc_size == 8 ? AG_FLOAT64 : AG_FLOAT32, logits[i * vocab + v]);
        }
    }
    for (int unpacked = 0; unpacked < 2; unpacked++) {
        b->top_k.k = count, b->top_k.scale = 0.5, b->top_k.values = reals(k, lowest, all * count);
        b->top_k.indices = zeros(all * count * 8), b->top_k.rest = zeros(all * (ptrdiff_t)sizeof(ag_sum));
        if (unpacked) {
            k->tile_to_top_k(b, tile);
        } else {
            k->tiles(b, AG_FROM_PRODUCT, AG_TO_TOP_K, 0, panels, 0, tiles);
            k->merge_top_k(b, 0, rows);
        }
        for (ptrdiff_t i = 0; i < rows; i++) {
            const ptrdiff_t first = b->chunk.row_numbers[i] * count;
            const double bound = 64 * eps * (double)(b->hidden + 1), largest = real_at(k, b->top_k.values, first);
            double total = 0;
            for (ptrdiff_t v = 0; v < vocab; v++) {
                const double logit = logits[i * vocab + v], last = real_at(k, b->top_k.values, first + count - 1);
                int is_in_list = 0;
                for (ptrdiff_t j = 0; j < count; j++) is_in_list |= b->top_k.indices[first + j] == v;
                CHECK(is_in_list || logit <= last + bound, "entry %td of row %td, %g, is not in the list", v, i, logit);
                if (v != b->top_k.indices[first]) total += exp((logit - largest) / 2);
            }
            for (ptrdiff_t j = 0; j < count; j++) {
                const double value = real_at(k, b->top_k.values, first + j), right = logits[i * vocab + b->top_k.indices[first + j]];
                CHECK(fabs(value - right) <= bound, "logit %td of row %td: %g is not %g", j, i, value, right);
                CHECK(!j || value <= real_at(k, b->top_k.values, first + j - 1), "logit %td of row %td is larger", j, i);
            }
            CHECK(fabs(ag_sum_total(b->top_k.rest[b->chunk.row_numbers[i]]) - total) <= bound * total, "rest of row %td", i);
        }
        free(b->top_k.values), free(b->top_k.indices), free(b->top_k.rest);
    }
    free(b->packed.logits), free(tile), free(lowest), free(logits);
}

static void test_block(ag_variant variant, ag_dtype dtype, ptrdiff_t rows, ptrdiff_t vocab, ptrdiff_t hidden, int strided)
{
    const ag_linear_kernels *k = ag_linear_kernels_of(variant, dtype);
    const ptrdiff_t padded = up(rows, k->nr), wide = up(vocab, k->nr), h = up(hidden, k->nr), all = rows + 3;
    const ptrdiff_t row_elements = up((rows + k->pair - 1) / k->pair, k->granule);
    const ptrdiff_t vocab_elements = up((vocab + k->pair - 1) / k->pair, k->granule);
    const double eps = dtype == AG_FLOAT64 ? 0x1p-53 : 0x1p-24, coarse = dtype == AG_BFLOAT16 ? 0x1p-8 : 0;
    double *x = numbers(all * hidden, 1), *w = numbers(vocab * hidden, 1), *max = numbers(rows, 1);
    double *sum = numbers(rows, 1), *grad = numbers(rows, 1), *p = numbers(rows * vocab, 1), *slack = numbers(rows * vocab, 0);
    ag_matrix input = matrix(x, all, hidden, dtype, strided), weight = matrix(w, vocab, hidden, dtype, strided);
    int64_t *number = malloc((size_t)rows * 8), *target = malloc((size_t)rows * 8);
    ag_linear_block b = {.chunk = {.rows = rows, .row_numbers = number, .target = target},
                         .vocab = {.size = vocab},
                         .hidden = hidden,
                         .gradient = {.round_to_bfloat16 = dtype == AG_BFLOAT16}};
    for (ptrdiff_t i = 0; i < rows; i++) {
        number[i] = all - 1 - i;
        target[i] = i % 3 ? (int64_t)(uniform() * (double)vocab) : -1;
        sum[i] += 2;
    }
    b.chunk.max = reals(k, max, rows), b.chunk.sum = reals(k, sum, rows), b.chunk.grad = reals(k, grad, rows);
    for (ptrdiff_t i = 0; i < rows; i++) {
        double largest = -INFINITY;
        max[i] = real_at(k, b.chunk.max, i), sum[i] = real_at(k, b.chunk.sum, i), grad[i] = real_at(k, b.chunk.grad, i);
        for (ptrdiff_t v = 0; v < vocab; v++) {
            double logit = 0, size = fabs(max[i]);
            for (ptrdiff_t c = 0; c < hidden; c++) {
                const double term = x[number[i] * hidden + c] * w[v * hidden + c];
                logit += term, size += fabs(term);
            }
            const double e = exp(logit - max[i]) / sum[i];
            largest = fmax(largest, logit);
            p[i * vocab + v] = (e - (target[i] == v)) * grad[i];
            slack[i * vocab + v] = (e * (16 * size + 8) * eps + 2 * eps) * fabs(grad[i]) + coarse * fabs(p[i * vocab + v]);
        }
    }

    b.packed.left = (ag_rows){input, number, 0, rows}; /* read in place, or gathered */
    b.packed.left_tiles = k->granule > 1 ? zeros(padded * (hidden + 32) * k->element_size) : 0;
    b.packed.right = zeros(wide * (hidden + 32) * k->element_size);
    b.packed.x_columns = zeros(padded * h * k->element_size), b.packed.w_columns = zeros(wide * h * k->element_size);
    b.packed.p = zeros(padded * wide * k->element_size), b.packed.p_pairs = zeros(padded * wide * k->element_size);
    b.packed.skipped = zeros(padded * wide), b.packed.panel_max = zeros(padded * wide * 8), b.packed.panel_sum = zeros(padded * wide * 8);
    const ptrdiff_t tiles = up(rows, k->mr) / k->mr, panels = wide / k->nr, of_hidden = h / k->nr;
    const ptrdiff_t row_bytes = up((hidden + k->pair - 1) / k->pair, k->granule) * k->element_size;
    for (ptrdiff_t t = 0; k->granule > 1 && t < tiles; t++) {
        const ptrdiff_t left = rows - t * k->mr;
        k->pack_left((char *)b.packed.left_tiles + t * k->mr * row_bytes, 0, &input, number + t * k->mr, 0, left < k->mr ? left : k->mr, 0, hidden);
    }
    for (ptrdiff_t q = 0; q < panels; q++) {
        const ptrdiff_t left = vocab - q * k->nr;
        k->pack_right((char *)b.packed.right + q * k->nr * row_bytes, 0, &weight, 0, q * k->nr, left < k->nr ? left : k->nr, 0, hidden);
    }
    for (ptrdiff_t q = 0; q < of_hidden; q++) {
        const ptrdiff_t left = hidden - q * k->nr, n = left < k->nr ? left : k->nr;
        k->pack_columns((char *)b.packed.x_columns + q * k->nr * row_elements * k->element_size, &input, number, 0,
                        rows, q * k->nr, n);
        k->pack_columns((char *)b.packed.w_columns + q * k->nr * vocab_elements * k->element_size, &weight, 0, 0,
                        vocab, q * k->nr, n);
    }

    /* the gradient, as one task, as several, and from the coefficients of rows */
    double *zero = numbers(all * hidden + vocab * hidden, 0), *ones = numbers(all, 0);
    ag_loss_row *of_rows = calloc((size_t)all, sizeof *of_rows);
    int64_t *entries = calloc((size_t)all, sizeof *entries);
    for (ptrdiff_t i = 0; i < rows; i++) {
        of_rows[number[i]].a = of_rows[number[i]].grad_loss = of_rows[number[i]].kept_loss = grad[i], of_rows[number[i]].certain = -1;
        of_rows[number[i]].power = 1;
        entries[number[i]] = target[i], ones[number[i]] = 1;
    }
    for (int run = 0; run < 3; run++) {
        const int parts = run == 1;
        b.gradient.is_general = run == 2, b.gradient.filter_eps = 0;
        b.rows = of_rows, b.targets = (ag_loss_targets){1, entries, ones, NULL};
        b.input_grad.data = reals(k, zero, all * hidden), b.weight_grad.data = reals(k, zero, vocab * hidden);
        b.input_grad.compensation = b.weight_grad.compensation = 0;
        b.input_grad.row_stride = b.weight_grad.row_stride = hidden * k->acc_size;
        b.input_grad.add = b.weight_grad.add = b.input_grad.last = b.weight_grad.last = parts;
        if (parts) {
            b.input_grad.compensation = reals(k, zero, rows * hidden), b.weight_grad.compensation = reals(k, zero, vocab * hidden);
            b.input_grad.compensation_stride = b.weight_grad.compensation_stride = hidden * k->acc_size;
            b.gradient.filter_eps = 1e-300; /* skips tiles that are zero, if any */
            if (dtype != AG_FLOAT64) b.gradient.filter_eps = 0x1p-140;
        }
        const ptrdiff_t step = parts ? 1 : tiles, panel_step = parts ? 1 : panels;
        for (ptrdiff_t t = 0; t < tiles; t += step) {
            for (ptrdiff_t q = 0; q < panels; q += panel_step) {
                k->tiles(&b, AG_FROM_PRODUCT, AG_TO_GRADIENT, q, q + panel_step, t, t + step);
            }
        }
        if (run == 2) {
            double *sums = numbers(wide, 0);
            k->sum_p(&b, 0, panels, sums);
            for (ptrdiff_t v = 0; v < vocab; v++) {
                double value = 0, bound = 0;
                for (ptrdiff_t i = 0; i < rows; i++) value += p[i * vocab + v], bound += slack[i * vocab + v];
                CHECK(fabs(sums[v] - value) <= bound, "column sum %td: %g is not %g", v, sums[v], value);
            }
            free(sums);
        }
        k->input_grad(&b, 0, of_hidden, 0, tiles);
        k->weight_grad(&b, 0, of_hidden, 0, up(vocab, k->mr) / k->mr);
        for (ptrdiff_t c = 0; c < hidden; c++) {
            for (ptrdiff_t i = 0; i < rows; i++) {
                double value = 0, bound = 0;
                for (ptrdiff_t v = 0; v < vocab; v++) {
                    value += p[i * vocab + v] * w[v * hidden + c];
                    bound += (slack[i * vocab + v] + 16 * eps * fabs(p[i * vocab + v])) * fabs(w[v * hidden + c]);
                }
                const double got = real_at(k, b.input_grad.data, number[i] * hidden + c);
                CHECK(fabs(got - value) <= bound, "dX %s %s (%td, %td, %td) row %td: %g is not %g", ag_variant_names[variant],
                      dtype_names[dtype], rows, vocab, hidden, i, got, value);
            }
            for (ptrdiff_t v = 0; v < vocab; v++) {
                double value = 0, bound = 0;
                for (ptrdiff_t i = 0; i < rows; i++) {
                    value += p[i * vocab + v] * x[number[i] * hidden + c];
                    bound += (slack[i * vocab + v] + 16 * eps * fabs(p[i * vocab + v])) * fabs(x[number[i] * hidden + c]);
                }
                const double got = real_at(k, b.weight_grad.data, v * hidden + c);
                CHECK(fabs(got - value) <= bound, "dW %s %s (%td, %td, %td) row %td: %g is not %g", ag_variant_names[variant],
                      dtype_names[dtype], rows, vocab, hidden, v, got, value);
            }
        }
        free(b.input_grad.data), free(b.weight_grad.data), free(b.input_grad.compensation), free(b.weight_grad.compensation);
    }

    free(of_rows), free(entries), free(ones);
    b.gradient.is_general = 0, b.rows = 0;

    /* maximum and sum of exponentials */
    double *lowest = numbers(all, 0);
    for (ptrdiff_t i = 0; i < all; i++) lowest[i] = -INFINITY;
    b.statistics.max = reals(k, lowest, all), b.statistics.sum = calloc((size_t)all, sizeof(ag_sum)), b.statistics.predicted = reals(k, zero, all);
    k->tiles(&b, AG_FROM_PRODUCT, AG_TO_MAX_SUM, 0, panels, 0, tiles);
    k->merge_max_sum(&b, 0, rows);
    for (ptrdiff_t i = 0; i < rows; i++) {
        double largest = -INFINITY, total = 0;
        for (int pass = 0; pass < 2; pass++) {
            for (ptrdiff_t v = 0; v < vocab; v++) {
                double logit = 0;
                for (ptrdiff_t c = 0; c < hidden; c++) logit += x[number[i] * hidden + c] * w[v * hidden + c];
                if (pass) total += exp(logit - largest); else largest = fmax(largest, logit);
            }
        }
        const double bound = 64 * eps * (double)(hidden + 1);
        CHECK(fabs(real_at(k, b.statistics.max, number[i]) - largest) <= bound, "max of row %td", i);
        CHECK(fabs(ag_sum_total(b.statistics.sum[number[i]]) - total) <= bound * total, "sum of row %td", i);
    }
    test_top_k(k, &b, all, x, w, eps);
    free(b.statistics.max), free(b.statistics.sum), free(b.statistics.predicted), free(lowest), free(zero);
    free(b.packed.left_tiles), free(b.packed.right), free(b.packed.x_columns), free(b.packed.w_columns), free(b.packed.p), free(b.packed.p_pairs), free(b.packed.skipped);
    free(b.packed.panel_max), free(b.packed.panel_sum), free((void *)b.chunk.max), free((void *)b.chunk.sum), free((void *)b.chunk.grad);
    free(input.data), free(weight.data), free(number), free(target);
    free(x), free(w), free(max), free(sum), free(grad), free(p), free(slack);
}

/* Round p to bfloat16, towards zero, as it is in gradients of bfloat16. */
static void truncate_values(char *p, ptrdiff_t n)
{
    for (ptrdiff_t i = 0; i < n; i++) {
        uint32_t bits;
        memcpy(&bits, p + 4 * i, 4);
        bits &= 0xffff0000;
        memcpy(p + 4 * i, &bits, 4);
    }
}

/* The products that pack nothing: p = A B^T over few rows A, then p B and p^T A. */
static void test_skinny(ag_variant variant, ag_dtype dtype, ptrdiff_t few, ptrdiff_t many, ptrdiff_t hidden, int strided)
{
    const ag_linear_kernels *k = ag_linear_kernels_of(variant, dtype);
    const ag_dtype own = k->acc_size == 8 ? AG_FLOAT64 : AG_FLOAT32;
    const double eps = own == AG_FLOAT64 ? 0x1p-53 : 0x1p-24, coarse = dtype == own ? 0 : dtype == AG_BFLOAT16 ? 0x1p-8 : 0x1p-11;
    const ptrdiff_t pitch = up(hidden, k->vector);
    double *a = numbers(few * hidden, 1), *b = numbers(many * hidden, 1), *none = numbers((many + few) * hidden, 0);
    const ag_rows left = {matrix(a, few, hidden, dtype, strided), 0, 0, few};
    const ag_rows right = {matrix(b, many, hidden, dtype, strided), 0, 0, many};
    const ag_rows out = {matrix(none, many, hidden, dtype, strided), 0, 0, many};
    const ptrdiff_t p_pitch = up(many, 16);
    const ag_rows few_out = {matrix(none, few, hidden, dtype, strided), 0, 0, few};
    char *p = zeros(few * p_pitch * k->acc_size), *sums = zeros(few * pitch * k->acc_size);
    char *twice = zeros(few * pitch * k->acc_size); /* sums that were added to */
    k->dot_products(&left, &right, 0, hidden, p, p_pitch);
    for (ptrdiff_t r = 0; r < few; r++) {
        for (ptrdiff_t s = 0; s < many; s++) {
            double value = 0, size = 0;
            for (ptrdiff_t c = 0; c < hidden; c++) value += a[r * hidden + c] * b[s * hidden + c], size += fabs(a[r * hidden + c] * b[s * hidden + c]);
            const double got = real_at(k, p, r * p_pitch + s);
            CHECK(fabs(got - value) <= 16 * eps * size, "A B^T %s %s: %g is not %g", ag_variant_names[variant], dtype_names[dtype], got, value);
        }
    }
    if (dtype == AG_BFLOAT16) truncate_values(p, few * p_pitch);
    for (ptrdiff_t r = 0; r < few; r += AG_MAX_UNPACKED_ROWS) {
        const ptrdiff_t count = few - r < AG_MAX_UNPACKED_ROWS ? few - r : AG_MAX_UNPACKED_ROWS;
        const char *of_rows = p + r * p_pitch * k->acc_size;
        k->sum_rows(count, &right, 0, hidden, of_rows, p_pitch, sums + r * pitch * k->acc_size, pitch, 0);
        memcpy(twice + r * pitch * k->acc_size, sums + r * pitch * k->acc_size, count * pitch * k->acc_size);
        k->sum_rows(count, &right, 0, hidden, of_rows, p_pitch, twice + r * pitch * k->acc_size, pitch, 1);
    }
    k->write_rows(variant, &left, &out, 0, hidden, p, p_pitch, 1, (int)(few % 2)); /* also with non-temporal stores */
    if (many <= AG_TERMS) k->write_rows(variant, &right, &few_out, 0, hidden, p, 1, p_pitch, 0);
    for (ptrdiff_t c = 0; c < hidden; c++) {
        for (ptrdiff_t r = 0; r < few; r++) {
            double value = 0, size = 0;
            for (ptrdiff_t s = 0; s < many; s++) {
                const double term = real_at(k, p, r * p_pitch + s) * b[s * hidden + c];
                value += term, size += fabs(term);
            }
            const double got[] = {real_at(k, sums, r * pitch + c), real_at(k, twice, r * pitch + c) / 2};
            for (int i = 0; i < 2; i++) {
                CHECK(fabs(got[i] - value) <= 16 * eps * size, "p B %s %s: %g is not %g", ag_variant_names[variant], dtype_names[dtype], got[i], value);
            }
            if (many > AG_TERMS) continue;
            const double written = get(few_out.matrix.data + r * few_out.matrix.row_stride + c * few_out.matrix.step, dtype);
            CHECK(fabs(written - value) <= 16 * eps * size + coarse * fabs(value) + (dtype == AG_FLOAT16 ? 0x1p-25 : 0),
                  "written p B %s %s: %g is not %g", ag_variant_names[variant], dtype_names[dtype], written, value);
        }
        for (ptrdiff_t s = 0; s < many; s++) {
            double value = 0, size = 0;
            for (ptrdiff_t r = 0; r < few; r++) {
                const double term = real_at(k, p, r * p_pitch + s) * a[r * hidden + c];
                value += term, size += fabs(term);
            }
            const double got = get(out.matrix.data + s * out.matrix.row_stride + c * out.matrix.step, dtype);
            CHECK(fabs(got - value) <= 16 * eps * size + coarse * fabs(value) + (dtype == AG_FLOAT16 ? 0x1p-25 : 0),
                  "p^T A %s %s: %g is not %g", ag_variant_names[variant], dtype_names[dtype], got, value);
        }
    }
    free(left.matrix.data), free(right.matrix.data), free(out.matrix.data), free(few_out.matrix.data), free(a), free(b), free(none);
    free(p), free(sums), free(twice);
}

/* The Hessian's product with changes of the logits, in a transposed tile of both, and the sums of its rows. */
static void test_product(ag_variant variant, ag_dtype dtype, ptrdiff_t rows, ptrdiff_t vocab, double scale)
{
    const ag_linear_kernels *k = ag_linear_kernels_of(variant, dtype);
    const ag_dtype own = k->acc_size == 8 ? AG_FLOAT64 : AG_FLOAT32;
    const double eps = own == AG_FLOAT64 ? 0x1p-53 : 0x1p-24, factor = 0.75;
    const ptrdiff_t pitch = up(rows, 16);
    double *x = numbers(2 * vocab * pitch, scale), *bias = numbers(2 * vocab, 1), *grad = numbers(rows, 1);
    double *sums = numbers(vocab, 1), *p = numbers(vocab, 0);
    char *tile = zeros(2 * vocab * pitch * k->acc_size);
    ag_linear_block b;
    memset(&b, 0, sizeof b);
    for (ptrdiff_t i = 0; i < 2 * vocab * pitch; i++) put(tile + i * k->acc_size, own, x[i]), x[i] = real_at(k, tile, i);
    b.chunk.rows = rows, b.chunk.grad = reals(k, grad, rows), b.vocab.size = vocab, b.tile_pitch = pitch;
    b.transform.bias = rows % 2 ? reals(k, bias, 2 * vocab) : NULL, b.transform.scale = factor;
    k->columns_to_product(&b, tile);
    double *before = numbers(vocab, 0), *size_of_sums = numbers(vocab, 0);
    memcpy(before, sums, (size_t)vocab * sizeof *sums);
    k->sum_tile(&b, tile, sums);
    for (ptrdiff_t i = 0; i < rows; i++) {
        double max = -INFINITY, total = 0, mean = 0, size = 0;
        for (int pass = 0; pass < 3; pass++) {
            for (ptrdiff_t c = 0; c < vocab; c++) {
                const double added = b.transform.bias ? real_at(k, b.transform.bias, c) : 0;
                const double moved = b.transform.bias ? real_at(k, b.transform.bias, vocab + c) : 0;
                const double z = factor * (x[c * pitch + i] + added), u = x[(vocab + c) * pitch + i] + moved;
                if (!pass) {
                    max = fmax(max, z);
                } else if (pass == 1) {
                    p[c] = exp(z - max), total += p[c], mean += p[c] * u, size = fmax(size, fabs(u) + fabs(moved));
                } else {
                    const double value = p[c] / total * (u - mean / total) * real_at(k, b.chunk.grad, i);
                    const double got = real_at(k, tile, c * pitch + i), most = fabs(p[c] / total * real_at(k, b.chunk.grad, i));
                    const double bound = eps * most * size * (64 + 8 * scale + (double)vocab / 8);
                    CHECK(fabs(got - value) <= bound + 0x1p-120, "product %s %s: %g is not %g", ag_variant_names[variant],
                          dtype_names[dtype], got, value);
                    before[c] += got, size_of_sums[c] += fabs(got);
                }
            }
        }
    }
    for (ptrdiff_t c = 0; c < vocab; c++) {
        CHECK(fabs(sums[c] - before[c]) <= 64 * 0x1p-53 * (1 + size_of_sums[c]), "sum of products %s: %g is not %g",
              ag_variant_names[variant], sums[c], before[c]);
    }
    free((void *)b.chunk.grad), free((void *)b.transform.bias), free(tile);
    free(x), free(bias), free(grad), free(sums), free(p), free(before), free(size_of_sums);
}

/* Logits and gradients of rows in the format CSR, with features of 32 or 64 bits, in order or not. */
static void test_sparse(ag_variant variant, ag_dtype dtype, ptrdiff_t rows, ptrdiff_t classes, ptrdiff_t features, int is_wide,
                        int is_sorted)
{
    const ag_linear_kernels *k = ag_linear_kernels_of(variant, dtype);
    const ag_dtype own = k->acc_size == 8 ? AG_FLOAT64 : AG_FLOAT32;
    const double eps = own == AG_FLOAT64 ? 0x1p-53 : 0x1p-24;
    const ptrdiff_t pitch = k->sparse_pitch(classes), most = 12, size = is_wide ? 8 : 4, first_row = rows / 3;
    int64_t *starts = calloc((size_t)rows + 1, sizeof *starts), *feature = calloc((size_t)(rows * most + 1), sizeof *feature);
    for (ptrdiff_t i = 0; i < rows; i++) {
        const int64_t count = i % 5 ? (int64_t)(uniform() * (double)most) : 0;
        int64_t at = -1;
        starts[i + 1] = starts[i];
        for (int64_t n = 0; n < count; n++) {
            at = is_sorted ? at + 1 + (int64_t)(uniform() * 4) : (int64_t)(uniform() * (double)features);
            if (at < features) feature[starts[i + 1]++] = at;
        }
    }
    const int64_t count = starts[rows];
    double *a = numbers(count, 1), *w = numbers(features * pitch, 1), *bias = numbers(pitch, 1), *p = numbers(rows * classes, 1);
    char *indices = zeros((count + 1) * size), *values = zeros(count * k->acc_size), *weight = zeros(features * pitch * k->acc_size);
    char *logits = zeros(rows * classes * k->acc_size), *of_p = zeros(rows * classes * k->acc_size);
    char *sums = zeros(features * pitch * k->acc_size), *added = zeros(pitch * k->acc_size);
    int descends = 0;
    for (ptrdiff_t i = 0; i < rows; i++) {
        for (int64_t n = starts[i]; n + 1 < starts[i + 1]; n++) descends |= feature[n + 1] < feature[n];
    }
    for (int64_t n = 0; n < count; n++) {
        const int32_t narrow = (int32_t)feature[n];
        if (is_wide) memcpy(indices + n * size, &feature[n], 8);
        else memcpy(indices + n * size, &narrow, 4);
        put(values + n * k->acc_size, own, a[n]), a[n] = real_at(k, values, n);
    }
    for (ptrdiff_t i = 0; i < features * pitch; i++) {
        if (i % pitch >= classes) w[i] = 0;
        put(weight + i * k->acc_size, own, w[i]), w[i] = real_at(k, weight, i);
    }
    for (ptrdiff_t c = 0; c < classes; c++) put(added + c * k->acc_size, own, bias[c]), bias[c] = real_at(k, added, c);
    for (ptrdiff_t i = 0; i < rows * classes; i++) {
        if (i / classes % 4 == 1) p[i] = 0; /* rows without a gradient are skipped */
        put(of_p + i * k->acc_size, own, p[i]), p[i] = real_at(k, of_p, i);
    }
    ag_sparse_rows x = {values, indices, is_wide, starts, features, descends};
    CHECK(k->sparse_check(&x, 0, rows) == (descends ? AG_SPARSE_UNSORTED : 0), "structure of sparse rows");
    x.features = count ? features : 1;
    for (int64_t n = 0; n < count; n++) x.features = n && x.features > feature[n] ? x.features : feature[n]; /* one too few */
    CHECK(!count || k->sparse_check(&x, 0, rows) & AG_SPARSE_OUTSIDE, "a feature outside of sparse rows");
    x.features = features;
    ag_sparse_task t = {classes, pitch, first_row, rows, first_row, logits, weight, rows % 2 ? added : NULL, sums, 0, features};
    k->sparse_logits(&x, &t);
    for (ptrdiff_t i = first_row; i < rows; i++) {
        for (ptrdiff_t c = 0; c < classes; c++) {
            double value = t.bias ? bias[c] : 0, magnitude = fabs(value);
            for (int64_t n = starts[i]; n < starts[i + 1]; n++) {
                const double term = a[n] * w[feature[n] * pitch + c];
                value += term, magnitude += fabs(term);
            }
            const double got = real_at(k, logits, (i - first_row) * classes + c);
            CHECK(fabs(got - value) <= 16 * eps * magnitude, "sparse logits %s %s: %g is not %g", ag_variant_names[variant],
                  dtype_names[dtype], got, value);
        }
    }
    t.p = of_p + first_row * classes * k->acc_size;
    for (int part = 0; part < 3; part++) { /* ranges of features of three threads */
        t.feature = features * part / 3, t.feature_end = features * (part + 1) / 3;
        k->sparse_sums(&x, &t);
    }
    double *value = numbers(features * classes, 0), *magnitude = numbers(features * classes, 0);
    for (ptrdiff_t i = first_row; i < rows; i++) {
        for (int64_t n = starts[i]; n < starts[i + 1]; n++) {
            for (ptrdiff_t c = 0; c < classes; c++) {
                const double term = a[n] * p[i * classes + c];
                value[feature[n] * classes + c] += term, magnitude[feature[n] * classes + c] += fabs(term);
            }
        }
    }
    for (ptrdiff_t h = 0; h < features; h++) {
        for (ptrdiff_t c = 0; c < classes; c++) {
            const double got = real_at(k, sums, h * pitch + c), right = value[h * classes + c];
            CHECK(fabs(got - right) <= (double)rows * eps * magnitude[h * classes + c], "sparse sums %s %s: %g is not %g",
                  ag_variant_names[variant], dtype_names[dtype], got, right);
        }
    }
    free(starts), free(feature), free(a), free(w), free(bias), free(p), free(indices), free(values), free(weight), free(logits);
    free(of_p), free(sums), free(added), free(value), free(magnitude);
}

#if defined(AG_HAS_BFMMLA) && AG_COMPILES(4)
/* A bfloat16 number: any bits, or of moderate size, or such that products and sums are at the edges of float32. */
static uint16_t bfloat16_bits(void)
{
    static const int exponents[] = {0, 1, 2, 63, 64, 65, 126, 127, 128, 189, 190, 191, 253, 254, 255};
    const uint32_t bits = (uint32_t)(uniform() * 65536);
    switch ((int)(uniform() * 4)) {
    case 0:
        return (uint16_t)bits;
    case 1:
        return (uint16_t)((bits & 0x807f) | (uint32_t)exponents[(int)(uniform() * 15)] << 7);
    case 2:
        return (uint16_t)((bits & 0x8000) | (uint32_t)exponents[(int)(uniform() * 15)] << 7);
    default:
        return (uint16_t)((bits & 0x83ff) | 0x3c00);
    }
}

/* Sums of the plain C are exact, or the neighbour whose last bit is set. */
static void test_round_to_odd(void)
{
    for (int n = 0; n < 200000; n++) {
        const uint32_t a = (uint32_t)bfloat16_bits() << 16 | (uint32_t)(uniform() * 65536);
        const uint32_t b = (uint32_t)bfloat16_bits() << 16 | (uint32_t)(uniform() * 65536);
        float x, y;
        uint32_t bits;
        memcpy(&x, &a, 4), memcpy(&y, &b, 4);
        const float got = ag_add_to_odd(x, y);
        const long double of_x = (long double)ag_flush_denormal((double)x), of_y = (long double)ag_flush_denormal((double)y);
        const long double sum = of_x + of_y, larger = fabsl(of_x) > fabsl(of_y) ? of_x : of_y, smaller = of_x == larger ? of_y : of_x;
        memcpy(&bits, &got, 4);
        if (isnan(sum)) {
            CHECK(bits == 0x7fc00000, "%a + %a is %a", (double)x, (double)y, (double)got);
        } else if (fabsl(sum) < 0x1p-126L) {
            CHECK(got == 0 && (sum == 0 || !signbit(got) == !signbit(sum)), "%a + %a is %a", (double)x, (double)y, (double)got);
        } else if (fabsl(sum) >= 0x1p128L) {
            CHECK(isinf(got) && (got > 0) == (sum > 0), "%a + %a is %a", (double)x, (double)y, (double)got);
        } else if (sum - larger == smaller && (long double)(float)sum == sum) {
            CHECK((long double)got == sum, "%a + %a is %a", (double)x, (double)y, (double)got);
        } else {
            const long double below = (long double)nextafterf(got, -INFINITY), above = (long double)nextafterf(got, INFINITY);
            CHECK(bits & 1 && below <= sum && sum <= above, "%a + %a is %a", (double)x, (double)y, (double)got);
        }
    }
}

#if !defined(AG_EMULATE_BFMMLA)
/* The instruction computes what the plain C does. */
static void test_bfmmla(void)
{
    for (int n = 0; n < 200000; n++) {
        uint16_t a[8], b[8], c[8];
        float expected[4], got[4];
        ag_f32v_baseline left, right, sum;
        for (int i = 0; i < 8; i++) a[i] = bfloat16_bits(), b[i] = bfloat16_bits(), c[i] = bfloat16_bits();
        if (n % 2) for (int i = 0; i < 8; i += 2) c[i] = (uint16_t)(uniform() * 65536); /* numbers are little-endian */
        memcpy(expected, c, sizeof c), memcpy(&left, a, sizeof a), memcpy(&right, b, sizeof b), memcpy(&sum, c, sizeof c);
        ag_bfmmla_in_c(expected, a, b);
        sum = multiply_add_bfmmla_baseline(left, right, sum);
        memcpy(got, &sum, sizeof got);
        CHECK(!memcmp(got, expected, sizeof got), "BFMMLA: %a, %a, %a, %a is not %a, %a, %a, %a", (double)got[0],
              (double)got[1], (double)got[2], (double)got[3], (double)expected[0], (double)expected[1], (double)expected[2],
              (double)expected[3]);
    }
}
#endif

/* Pack n features of 8 rows of X and of W, and compute the tile of their products. */
static void bfmmla_tile(const ag_linear_kernels *k, const ag_matrix *x, const ag_matrix *w, ptrdiff_t n, float *tile)
{
    const ptrdiff_t elements = up((n + 1) / 2, k->granule);
    uint32_t *left = zeros(elements * 8 * 4), *right = zeros(elements * 8 * 4);
    k->pack_left(left, 0, x, 0, 0, 8, 0, n), k->pack_right(right, 0, w, 0, 0, 8, 0, n);
    const ag_packed packed = {.left_tiles = left, .right = right};
    product_logits_bfmmla_baseline(&packed, 2, 0, 0, n, tile);
    free(left), free(right);
}

/* Sums of one chain add pair by pair, in the order of the features, with the bits of the plain additions. */
static void test_bfmmla_order(void)
{
    const ag_linear_kernels *k = ag_linear_kernels_of(AG_VARIANT_NEON_BF16, AG_BFLOAT16);
    for (ptrdiff_t n = 1; n <= AG_CHAIN; n = n * 2 + 3) {
        double *x = numbers(8 * n, 1), *w = numbers(8 * n, 1);
        float tile[64] __attribute__((aligned(64)));
        const ag_matrix of_x = matrix(x, 8, n, AG_BFLOAT16, 0), of_w = matrix(w, 8, n, AG_BFLOAT16, 0);
        bfmmla_tile(k, &of_x, &of_w, n, tile);
        for (ptrdiff_t i = 0; i < 64; i++) {
            const double *a = x + i / 8 * n, *b = w + i % 8 * n; /* products of bfloat16 numbers are exact in float32 */
            float sum = 0;
            for (ptrdiff_t f = 0; f < n; f += 2) {
                sum = ag_add_to_odd(sum, ag_add_to_odd((float)(a[f] * b[f]), f + 1 < n ? (float)(a[f + 1] * b[f + 1]) : 0));
            }
            CHECK(sum == tile[i], "sum %td of %td terms is %a, not %a", i, n, (double)tile[i], (double)sum);
        }
        free(of_x.data), free(of_w.data), free(x), free(w);
    }
}

/* The error of sums of n positive terms is within the bound of gemm_bfmmla.h for each chain, and that of combining them. */
static void test_bfmmla_bound(void)
{
    const ag_linear_kernels *k = ag_linear_kernels_of(AG_VARIANT_NEON_BF16, AG_BFLOAT16);
    for (ptrdiff_t n = 8; n < 20000; n = n * 3 / 2 + 8) {
        double *x = numbers(8 * n, 1), *w = numbers(8 * n, 1);
        float tile[64] __attribute__((aligned(64)));
        for (ptrdiff_t i = 0; i < 8 * n; i++) {
            /* Terms of row 1 and column 1 have one sign. Terms of row 0 shrink along the sum; terms of row 2 grow. */
            if (i / n < 3) x[i] = fabs(x[i]), w[i] = fabs(w[i]);
            if (i / n == 0) x[i] *= exp2(-(double)(i % n) / 64);
            if (i / n == 2) x[i] *= exp2(-(double)(n - i % n) / 64);
        }
        const ag_matrix of_x = matrix(x, 8, n, AG_BFLOAT16, 0), of_w = matrix(w, 8, n, AG_BFLOAT16, 0);
        bfmmla_tile(k, &of_x, &of_w, n, tile);
        for (ptrdiff_t r = 0; r < 8; r++) {
            for (ptrdiff_t c = 0; c < 8; c++) {
                double value = 0, size = 0;
                for (ptrdiff_t i = 0; i < n; i++) value += x[r * n + i] * w[c * n + i], size += fabs(x[r * n + i] * w[c * n + i]);
                const double error = fabs((double)tile[r * 8 + c] - value) / size * 0x1p24;
                CHECK(error <= (double)(n < AG_CHAIN ? n : AG_CHAIN) + 2 + 2, "sum of %td terms errs by %g units", n, error);
            }
        }
        free(of_x.data), free(of_w.data), free(x), free(w);
    }
}
#endif

/* Threads spin where each of them has a core, and only there. */
static void test_team(void)
{
    ag_team team;
    ag_team_init(&team, 2, 2);
    CHECK(team.spin_limit > 0, "two threads on two cores never spin");
    ag_team_init(&team, 3, 2);
    CHECK(team.spin_limit == 0, "three threads on two cores spin %d times", team.spin_limit);
}

/* The arguments are names of variants; without any, all of the CPU's are tested. */
int main(int count, char **names)
{
    static const ptrdiff_t sizes[][3] = {{1, 1, 1},   {2, 3, 2},    {3, 50, 17},  {7, 12, 5},   {8, 48, 16}, {9, 49, 33},
                                         {17, 97, 31}, {24, 24, 47}, {50, 13, 64}, {33, 145, 65}};
    test_team();
    for (int v = 0; v < AG_VARIANT_COUNT; v++) {
        const ag_variant variant = (ag_variant)v;
        int is_named = count == 1;
        for (int i = 1; i < count; i++) is_named |= !strcmp(names[i], ag_variant_names[v]);
        if (!is_named || !ag_variant_supported(variant)) continue;
        for (int dtype = 0; dtype < AG_DTYPE_COUNT; dtype++) {
            for (size_t i = 0; i < sizeof sizes / sizeof *sizes; i++) {
                test_block(variant, (ag_dtype)dtype, sizes[i][0], sizes[i][1], sizes[i][2], (int)i % 2);
            }
            test_block(variant, (ag_dtype)dtype, 5, 7, 1301, 0); /* sums of more than one chain */
            test_block(variant, (ag_dtype)dtype, 1301, 5, 3, 1);
            test_block(variant, (ag_dtype)dtype, 3, 1301, 2, 0);
            for (ptrdiff_t few = 1; few <= AG_MAX_UNPACKED_ROWS; few += few < 18 ? 1 : few < 63 ? 5 : 1) {
                test_skinny(variant, (ag_dtype)dtype, few, few < 48 ? 3 * few : 48, 5 * few + 1, few % 2);
                test_skinny(variant, (ag_dtype)dtype, few, 1 + few * 7 % 48, 1000 + 7 * few, few % 2);
            }
            test_skinny(variant, (ag_dtype)dtype, 1, AG_MAX_STREAMED_STEP, 3, 0);
            test_skinny(variant, (ag_dtype)dtype, 3, 301, 130, 1);
            test_skinny(variant, (ag_dtype)dtype, 1, 9, 301, 0); /* results at all offsets from a multiple of a vector */
            test_skinny(variant, (ag_dtype)dtype, 3, 10, 133, 0);
            test_skinny(variant, (ag_dtype)dtype, 12, 30, 1024, 0); /* rows that collide in a cache are copied */
            test_skinny(variant, (ag_dtype)dtype, 31, 9, 2048, 0);
            test_skinny(variant, (ag_dtype)dtype, AG_TERMS, AG_TERMS, 77, 0);
            test_skinny(variant, (ag_dtype)dtype, AG_TERMS, 9, 300, 1);
            test_skinny(variant, (ag_dtype)dtype, 100, 120, 1100, 1);
            for (ptrdiff_t vocab = 1; vocab <= AG_MAX_UNPACKED_ROWS; vocab += vocab < 18 ? 1 : vocab < 63 ? 5 : 1) {
                test_product(variant, (ag_dtype)dtype, 1 + vocab * 7 % 48, vocab, vocab % 3 ? 1 : 40);
            }
            for (ptrdiff_t classes = 1; classes <= 140; classes += classes < 36 ? 1 : 13) {
                test_sparse(variant, (ag_dtype)dtype, 7 + classes % 2, classes, 30, classes % 3 == 0, classes % 5 != 0);
            }
            test_sparse(variant, (ag_dtype)dtype, 300, 3, 700, 1, 0);
            test_sparse(variant, (ag_dtype)dtype, 301, 9, 700, 0, 1);
            test_sparse(variant, (ag_dtype)dtype, 0, 2, 5, 0, 1);
        }
#if defined(AG_HAS_BFMMLA) && AG_COMPILES(4)
        if (variant == AG_VARIANT_NEON_BF16) {
            test_round_to_odd(), test_bfmmla_order(), test_bfmmla_bound();
#if !defined(AG_EMULATE_BFMMLA)
            test_bfmmla();
#endif
        }
#endif
        printf("%s: %ld checks, %ld failed\n", ag_variant_names[variant], checks, failures);
    }
    return failures != 0;
}
