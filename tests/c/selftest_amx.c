/* Self-test of the kernels for the matrix unit AMX, bit for bit: the emulation against a scalar model of the order of sums,
 * and the unit against the emulation. It prints what it compared.
 *
 *   cc -O2 -ffp-contract=off -Iinclude tests/c/selftest_amx.c -o selftest_amx -lm && ./selftest_amx
 */
#include <math.h>

#include "selftest.h"

#if defined(__x86_64__)
#define AG_ONLY_LANES 16
#include "ascend_grad/foreach_isa.h"
/* The functions of foreach_isa.h tell about the unit, since the emulation begins behind them. */
#if defined(AG_HAS_AMX)
#define COMPILES_UNIT 1
#else
#define COMPILES_UNIT 0
#define AG_HAS_AMX 1
#endif
#define AG_EMULATE_AMX
#include "ascend_grad/linear/linear.h"
#endif

#if defined(AG_X86_64) && COMPILES_UNIT
#include <sys/syscall.h>
#include <unistd.h>

/* The same kernels once more, on the unit. */
#undef AG_EMULATE_AMX
AG_TARGET_BEGIN(AG_TARGET_AMX_BF16)
#define AG_ISA avx512
#define AG_LANES 16
#define AG_INLINE_LARGE AG_INLINE
#define AG_MR 32
#define AG_DTYPE unit
#define AG_IS_F64 0
#define AG_IS_DOT 1
#define AG_UNIT AG_AMX
#include "ascend_grad/linear/kernels.h"
AG_TARGET_END
#endif

/* ---- the model -------------------------------------------------------------------------------------------------- */

/* Return zero of the same sign for a denormal number. */
static float flushed(float x) { return fabsf(x) < 0x1p-126f ? copysignf(0, x) : x; }

/* Return the sum of a[k * a_step] * b[k * b_step] over n terms, all in one chain of steps of 32 terms. */
static float chain_model(const float *a, ptrdiff_t a_step, const float *b, ptrdiff_t b_step, ptrdiff_t n)
{
    float sum = 0;
    for (ptrdiff_t first = 0; first < n; first += 32) {
        float both[2] = {0, 0};
        for (ptrdiff_t k = first; k < first + 32 && k < n; k++) {
            both[k % 2] = flushed(fmaf(flushed(a[k * a_step]), flushed(b[k * b_step]), both[k % 2]));
        }
        sum = flushed(sum + flushed(both[0] + both[1]));
    }
    return sum;
}

/* Return the sum over n terms, in chains of at most 8192 terms that are equally long in steps, but for the last one. */
static float sum_model(const float *a, ptrdiff_t a_step, const float *b, ptrdiff_t b_step, ptrdiff_t n)
{
    const ptrdiff_t steps = (n + 31) / 32, chains = steps > 256 ? (steps + 255) / 256 : 1;
    const ptrdiff_t length = (steps + chains - 1) / chains * 32;
    float sum = chain_model(a, a_step, b, b_step, n < length ? n : length), compensation = 0;
    for (ptrdiff_t first = length; first < n; first += length) {
        const ptrdiff_t here = n - first < length ? n - first : length;
        const float x = chain_model(a + first * a_step, a_step, b + first * b_step, b_step, here);
        const float total = sum + x, part = total - sum;
        compensation += (sum - (total - part)) + (x - part);
        sum = total;
    }
    return chains > 1 && isfinite(sum) ? sum + compensation : sum;
}

/* Check the model's error: in units of 2**-24 of the terms' magnitude, 16 + 2 + n / 32 for a chain of n terms, and 2 for
 * the combination of chains. */
static void test_model(ptrdiff_t n)
{
    float *a = malloc((size_t)n * 4), *b = malloc((size_t)n * 4);
    double exact = 0, magnitude = 0;
    for (ptrdiff_t i = 0; i < n; i++) {
        char value[2];
        put(value, AG_BFLOAT16, 2 * uniform() - 1), a[i] = (float)get(value, AG_BFLOAT16);
        put(value, AG_BFLOAT16, uniform()), b[i] = (float)get(value, AG_BFLOAT16);
        exact += (double)a[i] * b[i], magnitude += fabs((double)a[i] * b[i]);
    }
    const double bound = 20 + (double)(n < 8192 ? n : 8192) / 32, got = sum_model(a, 1, b, 1, n);
    CHECK(fabs(got - exact) <= bound * 0x1p-24 * magnitude, "model of %td terms: %g is not %g", n, got, exact);
    free(a), free(b);
}

/* ---- problems and their results ------------------------------------------------------------------------------------ */

#if defined(AG_X86_64)
typedef struct {
    ptrdiff_t rows, vocab, hidden;
    double scale;   /* of the elements of X and W */
    int special;    /* whether X has infinities and NaNs */
} problem;

typedef struct {
    float *logits, *p, *input_grad, *weight_grad; /* (rows, vocab) twice, (rows, hidden), (vocab, hidden) */
} results;

static ptrdiff_t up(ptrdiff_t n, ptrdiff_t to) { return (n + to - 1) / to * to; }

static void *zeros(ptrdiff_t bytes)
{
    const size_t size = (size_t)up(bytes + 64, 64);
    return memset(aligned_alloc(64, size), 0, size);
}

/* Store random numbers as a matrix of bfloat16, and as float32. */
static ag_matrix random_matrix(float *x, ptrdiff_t rows, ptrdiff_t n, double scale)
{
    const ag_matrix m = {zeros(rows * n * 2), n * 2, 2, AG_BFLOAT16, 0};
    for (ptrdiff_t i = 0; i < rows * n; i++) {
        put(m.data + i * 2, AG_BFLOAT16, scale * (2 * uniform() - 1));
        x[i] = (float)get(m.data + i * 2, AG_BFLOAT16);
    }
    return m;
}

/* Compute logits, P and both gradients by the kernels of a table, in one chunk and one block. `clean` tells after each
 * task whether the state of the unit is released. */
static results compute(const ag_linear_kernels *k, int (*clean)(void), const problem *q, ag_matrix x, ag_matrix w)
{
    const ptrdiff_t rows = q->rows, vocab = q->vocab, hidden = q->hidden, size = k->element_size;
    const ptrdiff_t tiles = up(rows, k->mr) / k->mr, panels = up(vocab, k->nr) / k->nr, of_hidden = up(hidden, k->nr) / k->nr;
    const ptrdiff_t of_row = up((hidden + 1) / 2, k->granule), row_pairs = up((rows + 1) / 2, k->granule);
    const ptrdiff_t vocab_pairs = up((vocab + 1) / 2, k->granule), padded = tiles * k->mr;
    int64_t *number = malloc((size_t)rows * 8), *target = malloc((size_t)rows * 8);
    float *max = zeros(rows * 4), *sum = zeros(rows * 4), *grad = zeros(rows * 4);
    const results r = {zeros(rows * vocab * 4), zeros(rows * vocab * 4), zeros(rows * hidden * 4), zeros(vocab * hidden * 4)};
    ag_linear_block b = {
        .chunk = {rows, number, target, max, sum, grad},
        .vocab = {vocab, 0},
        .hidden = hidden,
        .gradient = {.round_to_bfloat16 = 1},
        .statistics = {.max = zeros(rows * 4), .sum = zeros(rows * (ptrdiff_t)sizeof(ag_sum)), .predicted = zeros(rows * 4),
                       .logits = {(char *)r.logits, vocab * 4, 4, AG_FLOAT32, 0}},
        .packed = {.left_tiles = zeros(tiles * k->mr * of_row * size), .right = zeros(panels * k->nr * of_row * size),
                   .x_columns = zeros(of_hidden * k->nr * row_pairs * size),
                   .w_columns = zeros(of_hidden * k->nr * vocab_pairs * size),
                   .p = zeros(panels * k->nr * padded * 2), .p_pairs = zeros(panels * k->nr * padded * 2),
                   .skipped = zeros(panels * tiles), .panel_max = zeros(panels * padded * 4),
                   .panel_sum = zeros(panels * padded * 4)},
        .input_grad = {(char *)r.input_grad, hidden * 4, 0, 0, 0, 0},
        .weight_grad = {(char *)r.weight_grad, hidden * 4, 0, 0, 0, 0},
    };
    for (ptrdiff_t i = 0; i < rows; i++) {
        number[i] = i, target[i] = i % 3 ? i % vocab : -1;
        sum[i] = 2, grad[i] = 1 + (float)(i % 7) / 8;
        ((float *)b.statistics.max)[i] = -INFINITY;
    }
    for (ptrdiff_t t = 0; t < tiles; t++) {
        const ptrdiff_t left = rows - t * k->mr;
        k->pack_left((char *)b.packed.left_tiles + t * k->mr * of_row * size, 0, &x, 0, t * k->mr, left < k->mr ? left : k->mr, 0, hidden);
    }
    for (ptrdiff_t v = 0; v < panels; v++) {
        const ptrdiff_t left = vocab - v * k->nr;
        k->pack_right((char *)b.packed.right + v * k->nr * of_row * size, 0, &w, 0, v * k->nr, left < k->nr ? left : k->nr, 0, hidden);
    }
    for (ptrdiff_t h = 0; h < of_hidden; h++) {
        const ptrdiff_t left = hidden - h * k->nr, n = left < k->nr ? left : k->nr;
        k->pack_columns((char *)b.packed.x_columns + h * k->nr * row_pairs * size, &x, 0, 0, rows, h * k->nr, n);
        k->pack_columns((char *)b.packed.w_columns + h * k->nr * vocab_pairs * size, &w, 0, 0, vocab, h * k->nr, n);
    }
    k->tiles(&b, AG_FROM_PRODUCT, AG_TO_MAX_SUM, 0, panels, 0, tiles);
    CHECK(clean(), "logits");
    k->tiles(&b, AG_FROM_PRODUCT, AG_TO_GRADIENT, 0, panels, 0, tiles);
    CHECK(clean(), "P");
    k->input_grad(&b, 0, of_hidden, 0, tiles);
    CHECK(clean(), "dX");
    k->weight_grad(&b, 0, of_hidden, 0, up(vocab, k->mr) / k->mr);
    CHECK(clean(), "dW");
    for (ptrdiff_t i = 0; i < rows; i++) {
        for (ptrdiff_t v = 0; v < vocab; v++) {
            const char *from = (const char *)b.packed.p + ((v / k->nr * padded + i) * k->nr + v % k->nr) * 2;
            r.p[i * vocab + v] = (float)get(from, AG_BFLOAT16);
        }
    }
    free(number), free(target), free(max), free(sum), free(grad);
    free(b.statistics.max), free(b.statistics.sum), free(b.statistics.predicted);
    free(b.packed.left_tiles), free(b.packed.right), free(b.packed.x_columns), free(b.packed.w_columns), free(b.packed.p);
    free(b.packed.p_pairs), free(b.packed.skipped), free(b.packed.panel_max), free(b.packed.panel_sum);
    return r;
}

static int is_emulation_released(void) { return !is_configured_amx_avx512; }

#if COMPILES_UNIT
/* Return whether the configuration and the data of the tiles are in their initial state (bits of XINUSE). */
static int is_unit_released(void)
{
    unsigned low, high;
    __asm__ volatile("xgetbv" : "=a"(low), "=d"(high) : "c"(1));
    return !(low & 3u << 17);
}
#endif

static void free_results(results r) { free(r.logits), free(r.p), free(r.input_grad), free(r.weight_grad); }

/* Compare n numbers bit for bit; a NaN equals every NaN. */
static void compare(const char *what, const problem *q, const float *got, const float *right, ptrdiff_t n)
{
    for (ptrdiff_t i = 0; i < n; i++) {
        CHECK(!memcmp(got + i, right + i, 4) || (isnan(got[i]) && isnan(right[i])), "%s (%td, %td, %td) element %td: %a is not %a",
              what, q->rows, q->vocab, q->hidden, i, (double)got[i], (double)right[i]);
    }
}

static void compare_results(const char *what, const problem *q, results got, results right)
{
    char name[64];
    const struct {
        const char *name;
        const float *got, *right;
        ptrdiff_t n;
    } each[] = {{"logits", got.logits, right.logits, q->rows * q->vocab},
                {"P", got.p, right.p, q->rows * q->vocab},
                {"dX", got.input_grad, right.input_grad, q->rows * q->hidden},
                {"dW", got.weight_grad, right.weight_grad, q->vocab * q->hidden}};
    for (size_t i = 0; i < sizeof each / sizeof *each; i++) {
        snprintf(name, sizeof name, "%s %s", what, each[i].name);
        compare(name, q, each[i].got, each[i].right, each[i].n);
    }
}

/* Return what the model computes: logits of X and W, and gradients of a given P. */
static results model(const problem *q, const float *x, const float *w, const float *p)
{
    const ptrdiff_t rows = q->rows, vocab = q->vocab, hidden = q->hidden;
    const results r = {zeros(rows * vocab * 4), zeros(rows * vocab * 4), zeros(rows * hidden * 4), zeros(vocab * hidden * 4)};
    memcpy(r.p, p, (size_t)(rows * vocab) * 4);
    for (ptrdiff_t i = 0; i < rows; i++) {
        for (ptrdiff_t v = 0; v < vocab; v++) r.logits[i * vocab + v] = sum_model(x + i * hidden, 1, w + v * hidden, 1, hidden);
        for (ptrdiff_t c = 0; c < hidden; c++) r.input_grad[i * hidden + c] = sum_model(p + i * vocab, 1, w + c, hidden, vocab);
    }
    for (ptrdiff_t v = 0; v < vocab; v++) {
        for (ptrdiff_t c = 0; c < hidden; c++) r.weight_grad[v * hidden + c] = sum_model(p + v, vocab, x + c, hidden, rows);
    }
    return r;
}

static void test_problem(const problem *q, int has_unit)
{
    float *x_values = zeros(q->rows * q->hidden * 4), *w_values = zeros(q->vocab * q->hidden * 4);
    const ag_matrix x = random_matrix(x_values, q->rows, q->hidden, q->scale);
    const ag_matrix w = random_matrix(w_values, q->vocab, q->hidden, q->scale);
    if (q->special) {
        for (ptrdiff_t i = 0; i < q->rows * q->hidden; i += 37) {
            const uint16_t bits = i % 3 ? 0x7f80 : 0x7fc0;
            memcpy(x.data + 2 * i, &bits, sizeof bits);
            x_values[i] = i % 3 ? INFINITY : NAN;
        }
    }
    const results emulated = compute(ag_linear_amx_kernels_avx512(), is_emulation_released, q, x, w);
    const results modelled = model(q, x_values, w_values, emulated.p);
    compare_results("emulation", q, emulated, modelled);
#if COMPILES_UNIT
    if (has_unit) {
        const results computed = compute(&ag_linear_unit_avx512, is_unit_released, q, x, w);
        compare_results("unit", q, computed, emulated);
        free_results(computed);
    }
#else
    (void)has_unit;
#endif
    free_results(emulated), free_results(modelled);
    free(x_values), free(w_values), free(x.data), free(w.data);
}
#endif

int main(void)
{
    for (ptrdiff_t n = 1; n < 30000; n += n / 2 + 1) test_model(n);
    printf("model: %ld checks\n", checks);
#if defined(AG_X86_64)
    static const problem problems[] = {
        {1, 1, 1, 1, 0},         {2, 3, 33, 1, 0},        {33, 70, 45, 1, 0},      {31, 17, 130, 1, 0},
        {5, 9, 8192, 1, 0},      {5, 9, 8193, 1, 0},      {3, 2, 20000, 1, 0},     {4, 8300, 3, 1, 0},
        {8300, 5, 4, 1, 0},      {40, 40, 200, 0x1p-63, 0}, {33, 70, 45, 1, 1},
    };
    if (!ag_cpu_executes(AG_VARIANT_AVX512)) return failures != 0;
#if COMPILES_UNIT
    const int has_unit = ag_cpu_executes(AG_VARIANT_AMX_BF16), uses_unit = has_unit && !syscall(SYS_arch_prctl, 0x1023, 18);
    const char *state = uses_unit ? "compared" : has_unit ? "refused by the operating system" : "absent";
#else
    const int uses_unit = 0;
    const char *state = "unknown to the compiler";
#endif
    for (size_t i = 0; i < sizeof problems / sizeof *problems; i++) test_problem(problems + i, uses_unit);
    printf("emulation: %ld checks\nunit: %s\n%ld failed\n", checks, state, failures);
#endif
    return failures != 0;
}
