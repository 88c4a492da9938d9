/* Self-test of the C headers, without Python: compiled natively with sanitizers and, to see the NEON code run, for
 * aarch64 under emulation. Every variant of the machine against scalar double arithmetic; every layout bit for bit.
 *
 *   cc -O2 -ffp-contract=off -Iinclude tests/c/selftest.c -o selftest -lm && ./selftest
 */
#include <sys/mman.h>

#include "ascend_grad/fpenv.h"
#include "ascend_grad/rowwise/rowwise.h"
#include "ascend_grad/strided.h"
#include "selftest.h"

/* ---- the operators, one element at a time --------------------------------------------------------------------------- */

typedef struct {
    double value, bound;
} expectation;

static void expected_row(ag_row_op op, ag_dtype dtype, const char *a, const char *b, const uint8_t *mask, ptrdiff_t n,
                         double scale, expectation *result)
{
    const double eps = dtype == AG_FLOAT64 ? 0x1p-53 : 0x1p-24;
    /* The bounds of ascend_grad/bounds.py, where they are explained. */
    const double constant = dtype == AG_FLOAT64 ? 32 + (double)n / 1024 : 32;
    const int size = ag_itemsize[dtype];
    long double exact = 0;
    double magnitude = 0, max = -INFINITY;
    for (ptrdiff_t i = 0; i < n; i++) {
        const double x = get(a + i * size, dtype), y = get(b + i * size, dtype);
        /* -10000 as the contract says, not AG_MASKED_LOGIT: this is what the kernels are compared with. */
        const double logit = !ag_masks_sum(op) ? x : mask[i] ? -10000.0 : dtype == AG_FLOAT64 ? x * scale : (float)(x * scale);
        if (ag_is_forward(op)) result[i].value = logit, max = logit > max ? logit : max;
        const double term = op == AG_LOG_SOFTMAX_BACKWARD ? x : x * y;
        exact += term, magnitude += fabs(term);
    }
    if (ag_is_forward(op)) {
        exact = 0;
        for (ptrdiff_t i = 0; i < n; i++) exact += exp(result[i].value - max);
    }
    const double sum = (double)exact;
    for (ptrdiff_t i = 0; i < n; i++) {
        const double x = get(a + i * size, dtype), y = get(b + i * size, dtype), shifted = result[i].value - max;
        double value, bound;
        switch (op) {
        case AG_SOFTMAX_BACKWARD:
        case AG_SCALED_MASKED_SOFTMAX_BACKWARD:
            value = (x - sum) * y;
            bound = constant * eps * (fabs(x * y) + fabs(y) * magnitude);
            if (op == AG_SCALED_MASKED_SOFTMAX_BACKWARD) {
                value = mask[i] ? 0 : value * scale;
                bound = mask[i] ? 0 : bound * fabs(scale) + eps * fabs(value);
            }
            break;
        case AG_LOG_SOFTMAX_BACKWARD:
            value = x - sum * exp(y);
            bound = constant * eps * (fabs(x) + exp(y) * magnitude);
            break;
        case AG_LOG_SOFTMAX:
            value = shifted - log(sum);
            bound = constant * eps * (1 + fabs(shifted) + fabs(log(sum)));
            break;
        default:
            value = exp(shifted) / sum;
            bound = (constant + fabs(shifted)) * eps * value;
        }
        bound += (1 + (double)n * fabs(y)) * 0x1p-126;
        if (dtype == AG_FLOAT16) bound += fmax(fabs(value) * 0x1p-11, 0x1p-25) * 1.001;
        if (dtype == AG_BFLOAT16) bound += fmax(fabs(value) * 0x1p-8, 0x1p-134) * 1.001;
        result[i].value = value, result[i].bound = bound;
    }
}

/* ---- tests ------------------------------------------------------------------------------------------------------------ */

static char *copy_of(const char *p, size_t nbytes)
{
    /* Exactly as large as it needs to be and at an odd address, so that a sanitizer sees any step outside. */
    char *block = malloc(nbytes + 1);
    if (!block) abort();
    memcpy(block + 1, p, nbytes);
    return block + 1;
}

static void test_operator(ag_variant variant, ag_dtype dtype, ag_row_op op, ptrdiff_t rows, ptrdiff_t n)
{
    const ag_row_kernels *kernels = ag_rowwise_kernels(variant, dtype, op);
    const int size = ag_itemsize[dtype], backward = !ag_is_forward(op);
    const size_t nbytes = (size_t)(rows * n * size);
    char *a = malloc(nbytes), *b = malloc(nbytes), *out = malloc(nbytes), *other = malloc(nbytes);
    uint8_t *mask = malloc((size_t)(rows * n));
    expectation *expected = malloc((size_t)n * sizeof *expected);
    const double scale = 0.375;
    for (ptrdiff_t i = 0; i < rows * n; i++) {
        put(a + i * size, dtype, 4 * uniform() - 2);
        put(b + i * size, dtype, op == AG_LOG_SOFTMAX_BACKWARD ? -8 * uniform() : uniform() / (double)n);
        mask[i] = uniform() < 0.3 ? (uint8_t)(1 + 255 * uniform()) : 0;
    }
    const ptrdiff_t width = n * size;
    char *a1 = copy_of(a, nbytes), *b1 = copy_of(b, nbytes), *out1 = copy_of(a, nbytes);
    uint8_t *mask1 = (uint8_t *)copy_of((char *)mask, (size_t)(rows * n));
    ag_tile tile = {a1, b1, mask1, out1, width, width, n, width, rows, n, scale, 0, 0};
    kernels->rows(&tile);
    memcpy(out, out1, nbytes);
    for (ptrdiff_t r = 0; r < rows; r++) {
        expected_row(op, dtype, a + r * width, b + r * width, mask + r * n, n, scale, expected);
        for (ptrdiff_t i = 0; i < n; i++) {
            const double got = get(out + r * width + i * size, dtype);
            CHECK(fabs(got - expected[i].value) <= expected[i].bound, "%s %s %s (%td, %td) [%td, %td]: %g, expected %g",
                  ag_variant_names[variant], dtype_names[dtype], ag_row_ops[op].name, rows, n, r, i, got, expected[i].value);
        }
    }

#define CHECK_SAME(what, pointer)                                                                                       \
    CHECK(memcmp(pointer, out, nbytes) == 0, "%s %s %s (%td, %td): %s", ag_variant_names[variant], dtype_names[dtype],  \
          ag_row_ops[op].name, rows, n, what)

    /* non-temporal, at an aligned address and at others, where nothing around may be touched */
    char *aligned = aligned_alloc(64, (nbytes + 2 * 64 + 63) / 64 * 64);
    for (int skew = 0; skew < 64; skew += skew ? 16 : size) {
        memset(aligned, 0x55, nbytes + 2 * 64);
        tile.out = aligned + skew, tile.nontemporal = 1;
        kernels->rows(&tile);
        CHECK_SAME("non-temporal", aligned + skew);
        int touched = 0;
        for (int i = 0; i < 64; i++) {
            touched |= (i < skew && aligned[i] != 0x55) || aligned[(ptrdiff_t)nbytes + skew + i] != 0x55;
        }
        CHECK(!touched, "%s %s %s (%td, %td): bytes around the result", ag_variant_names[variant], dtype_names[dtype],
              ag_row_ops[op].name, rows, n);
    }
    tile.nontemporal = 0;

    /* in place */
    memcpy(aligned, a, nbytes);
    tile.a = tile.out = aligned;
    kernels->rows(&tile);
    CHECK_SAME("in place", aligned);

    /* in splits */
    for (ptrdiff_t r = 0; r < rows; r++) {
        ag_tile split = {a1 + r * width, b1 + r * width, mask1 + r * n, other + r * width, 0, 0, 0, 0, 1, n, scale, 0, 0};
        const double max = backward ? 0 : kernels->split_max(&split);
        ag_sum total = {0, 0};
        for (ptrdiff_t k = 0; k < n; k += kernels->segment) {
            ag_tile segment = split;
            segment.a += k * size, segment.b += k * size, segment.mask += k;
            segment.n = n - k < kernels->segment ? n - k : kernels->segment;
            ag_sum_add(&total, kernels->split_sum(&segment, max));
        }
        kernels->split_write(&split, max, ag_sum_total(total));
    }
    CHECK_SAME("in splits", other);

    /* the transposed problem, by columns */
    if (kernels->columns && rows <= AG_MAX_COLUMNS) {
        const size_t room = nbytes + (size_t)(n * size);
        char *at = malloc(room), *bt = malloc(room), *outt = malloc(room);
        void *scratch = malloc(AG_SCRATCH_BYTES);
        for (int beyond = 0; beyond < 2; beyond++) { /* L2, and with a gap between rows */
            const ptrdiff_t pitch = (rows + beyond) * size;
            ag_copy_block(at, pitch, size, a, size, width, n, rows, size, 0);
            ag_copy_block(bt, pitch, size, b, size, width, n, rows, size, 0);
            ag_tile columns = {at, bt, mask, outt, pitch, pitch, 0, pitch, rows, n, 1.0, 0, !beyond};
            kernels->columns(&columns, scratch);
            ag_copy_block(other, width, size, outt, size, pitch, rows, n, size, 0);
            CHECK_SAME(beyond ? "by columns beyond the cache" : "by columns", other);
        }
        /* non-temporal: rows of whole lines, from an aligned address on and from another one */
        const ptrdiff_t pitch = (rows * size + 2 * 64) / 64 * 64;
        char *lines = aligned_alloc(64, (size_t)(n * pitch + 64));
        ag_copy_block(at, rows * size, size, a, size, width, n, rows, size, 0);
        ag_copy_block(bt, rows * size, size, b, size, width, n, rows, size, 0);
        for (int skew = 0; skew <= size; skew += size) {
            ag_tile columns = {at, bt, mask, lines + skew, rows * size, rows * size, 0, pitch, rows, n, 1.0, 1, 1};
            kernels->columns(&columns, scratch);
            ag_copy_block(other, width, size, lines + skew, size, pitch, rows, n, size, 0);
            CHECK_SAME("by columns, non-temporal", other);
        }
        free(at), free(bt), free(outt), free(scratch), free(lines);
    }
    free(a), free(b), free(out), free(other), free(mask), free(expected), free(aligned);
    free(a1 - 1), free(b1 - 1), free(out1 - 1), free(mask1 - 1);
}

static void test_conversions(ag_variant variant)
{
    enum { COUNT = 65536 };
    static uint16_t bits[COUNT], back[COUNT];
    static float values[COUNT], points[3 * COUNT];
    static double doubles[3 * COUNT];
    static uint16_t rounded[3 * COUNT];
    for (int i = 0; i < COUNT; i++) bits[i] = (uint16_t)i;
    for (int bfloat = 0; bfloat < 2; bfloat++) {
        const ag_dtype dtype = bfloat ? AG_BFLOAT16 : AG_FLOAT16;
        const int exponent_bits = bfloat ? 8 : 5;
        ag_widen(variant, dtype, (const char *)bits, values, COUNT);
        ag_convert(variant, 0, values, dtype, (char *)back, COUNT);
        for (int i = 0; i < COUNT; i++) {
            const double value = half_value(bits[i], exponent_bits);
            CHECK(isnan(value) ? isnan(values[i]) : values[i] == value, "%s widen %04x", dtype_names[dtype], i);
            CHECK(isnan(value) ? isnan(half_value(back[i], exponent_bits)) : back[i] == bits[i], "%s %04x and back %04x",
                  dtype_names[dtype], i, back[i]);
            /* half way to the next value, and just beside it */
            const double next = half_value((uint16_t)(i + 1), exponent_bits), middle = isfinite(next - value) ? (value + next) / 2 : value;
            doubles[3 * i] = middle;
            doubles[3 * i + 1] = isnan(middle) ? 1 : nextafter(middle, INFINITY);
            doubles[3 * i + 2] = isnan(middle) ? 1 : nextafter(middle, -INFINITY);
        }
        ag_convert(variant, 1, doubles, dtype, (char *)rounded, 3 * COUNT);
        for (int i = 0; i < 3 * COUNT; i++) {
            if (isnan(doubles[i])) continue;
            CHECK(rounded[i] == half_bits(doubles[i], exponent_bits), "%s of %a: %04x", dtype_names[dtype], doubles[i], rounded[i]);
            points[i] = (float)doubles[i];
        }
        ag_convert(variant, 0, points, dtype, (char *)rounded, 3 * COUNT);
        for (int i = 0; i < 3 * COUNT; i++) {
            if (isnan(doubles[i])) continue;
            CHECK(rounded[i] == half_bits(points[i], exponent_bits), "%s of %a: %04x", dtype_names[dtype], points[i], rounded[i]);
        }
    }
}

/* Copies of three dimensions, with steps in all directions on either side, against a plain loop. */
static void test_copies(ag_variant variant)
{
    enum { ROOM = 1 << 16 };
    static char from[2 * ROOM], to[2 * ROOM], expected[2 * ROOM];
    static const int sizes[] = {1, 2, 4, 8};
    for (int i = 0; i < 2 * ROOM; i++) from[i] = (char)(i * 37 + i / 251);
    for (int round = 0; round < 4000; round++) {
        const int size = sizes[round % 4], swapped = size > 1 && uniform() < 0.3;
        ag_dim dims[3];
        ptrdiff_t to_reach = size, from_reach = size;
        char *to_base = to + ROOM, *from_base = from + ROOM;
        /* Each dimension steps over the dimensions within it. Source and destination have independent orders. */
        const int first_to = (int)(3 * uniform()), first_from = (int)(3 * uniform());
        for (int d = 0; d < 3; d++) dims[d].length = 1 + (ptrdiff_t)(uniform() < 0.5 ? 5 * uniform() : 50 * uniform());
        for (int d = 0; d < 3; d++) {
            ag_dim *dim = &dims[(first_to + d) % 3];
            dim->to = to_reach * (uniform() < 0.7 ? 1 : uniform() < 0.5 ? -1 : 2);
            to_reach = (dim->to < 0 ? -dim->to : dim->to) * dim->length;
            dim = &dims[(first_from + 2 * d) % 3];
            dim->from = uniform() < 0.1 ? 0 : from_reach * (uniform() < 0.7 ? 1 : (ptrdiff_t)(17 * uniform()) - 8);
            if (dim->from) from_reach = (dim->from < 0 ? -dim->from : dim->from) * dim->length;
        }
        if (to_reach >= ROOM || from_reach >= ROOM) continue;
        memset(to, 0, sizeof to);
        memset(expected, 0, sizeof expected);
        for (ptrdiff_t i = 0; i < dims[0].length; i++) {
            for (ptrdiff_t j = 0; j < dims[1].length; j++) {
                for (ptrdiff_t k = 0; k < dims[2].length; k++) {
                    const char *source = from_base + i * dims[0].from + j * dims[1].from + k * dims[2].from;
                    char *place = expected + ROOM + i * dims[0].to + j * dims[1].to + k * dims[2].to;
                    for (int byte = 0; byte < size; byte++) place[byte] = source[swapped ? size - 1 - byte : byte];
                }
            }
        }
        ag_copy_3d(variant, to_base, from_base, dims[0], dims[1], dims[2], size, swapped);
        CHECK(memcmp(to, expected, sizeof to) == 0, "%s: copy of %td x %td x %td elements of %d bytes",
              ag_variant_names[variant], dims[0].length, dims[1].length, dims[2].length, size);
    }
}

/* Copies of rows with steps of all signs, which read nothing before the first element and nothing after the last one. */
static void test_steps(ag_variant variant)
{
    enum { ROOM = 1 << 16 };
    static char to[ROOM];
    char *memory = mmap(NULL, 3 * ROOM, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0), *begin = memory + ROOM;
    if (memory == MAP_FAILED || mprotect(begin, ROOM, PROT_READ | PROT_WRITE)) abort();
    for (int i = 0; i < ROOM; i++) begin[i] = (char)(i * 37 + i / 251);
    for (int size = 1; size <= 8; size *= 2) {
        for (ptrdiff_t step = -9; step <= 9; step++) {
            for (ptrdiff_t n = 1; n < 100; n++) {
                const ptrdiff_t rows = 3, reach = (step < 0 ? -step : step) * (n - 1) * size, row = reach + 3 * size;
                for (int at_end = 0; at_end < 2; at_end++) {
                    const char *from = at_end ? begin + ROOM - (rows - 1) * row - reach - size : begin;
                    if (step < 0) from += reach;
                    memset(to, 0, sizeof to);
                    ag_copy_rows(variant, to, (n + 2) * size, size, from, row, step * size, rows, n, size, 0);
                    int differs = 0;
                    for (ptrdiff_t r = 0; r < rows; r++) {
                        for (ptrdiff_t k = 0; k < n + 2; k++) {
                            static const char zeros[8];
                            const char *expected = k < n ? from + r * row + k * step * size : zeros;
                            differs |= memcmp(to + (r * (n + 2) + k) * size, expected, (size_t)size) != 0;
                        }
                    }
                    CHECK(!differs, "%s: %td elements of %d bytes, step %td", ag_variant_names[variant], n, size, step);
                }
            }
        }
    }
    munmap(memory, 3 * ROOM);
}

#if defined(AG_X86_64)
static ag_fpenv get_mode(void) { return _mm_getcsr(); }
static void set_mode(ag_fpenv mode) { _mm_setcsr(mode); }
/* Denormals are zero, both bits of the rounding mode, flush to zero. */
static const ag_fpenv mode_bits[] = {0x40, 0x2000, 0x4000, 0x8000};
#elif defined(AG_AARCH64)
static ag_fpenv get_mode(void)
{
    ag_fpenv mode;
    __asm__ volatile("mrs %0, fpcr" : "=r"(mode));
    return mode;
}
static void set_mode(ag_fpenv mode) { __asm__ volatile("msr fpcr, %0" : : "r"(mode)); }
/* FIZ, AH and NEP (on CPUs with FEAT_AFP; the others ignore them), EBF (with FEAT_EBF16), FZ16, both bits of the rounding mode,
 * FZ. */
static const ag_fpenv mode_bits[] = {1 << 0, 1 << 1, 1 << 2, 1 << 13, 1 << 19, 1 << 22, 1 << 23, 1 << 24};
#endif

/* Kernels compute in a fixed floating-point mode, whatever mode the caller has set, and restore the caller's mode. */
static void test_modes(void)
{
    const ag_fpenv original = get_mode();
    int settable = 0;
    for (size_t i = 0; i < sizeof mode_bits / sizeof *mode_bits; i++) {
        const ag_fpenv bit = mode_bits[i];
        set_mode(original | bit);
        if (get_mode() & bit) { /* this CPU has it */
            settable++;
            const ag_fpenv before = ag_fpenv_enter();
            volatile float smallest = 0x1p-149f, sum = smallest + smallest;
            CHECK(sum == 0x1p-148f, "bit %#llx", (unsigned long long)bit);
            CHECK(!(get_mode() & bit), "bit %#llx", (unsigned long long)bit);
            ag_fpenv_leave(before);
            CHECK(get_mode() & bit, "bit %#llx", (unsigned long long)bit);
        }
        set_mode(original);
    }
    printf("floating-point mode: %d bits, %ld checks, %ld failed\n", settable, checks, failures);
}

int main(void)
{
    static const ptrdiff_t lengths[] = {1, 2, 3, 4, 5, 7, 8, 9, 15, 16, 17, 31, 32, 33, 63, 64, 65, 97, 127, 129, 255, 257, 513, 1023, 1025, 2049, 4095, 4100};
    test_modes();
    for (int v = 0; v < AG_VARIANT_COUNT; v++) {
        const ag_variant variant = (ag_variant)v;
        if (!ag_variant_supported(variant)) continue;
        for (int dtype = 0; dtype < AG_DTYPE_COUNT; dtype++) {
            for (int op = 0; op < AG_ROW_OP_COUNT; op++) {
                for (size_t i = 0; i < sizeof lengths / sizeof *lengths; i++) {
                    test_operator(variant, (ag_dtype)dtype, (ag_row_op)op, 1, lengths[i]);
                    test_operator(variant, (ag_dtype)dtype, (ag_row_op)op, 7, lengths[i]);
                    if (lengths[i] < 100) test_operator(variant, (ag_dtype)dtype, (ag_row_op)op, 150, lengths[i]);
                }
            }
        }
        test_conversions(variant);
        test_copies(variant);
        test_steps(variant);
        printf("%s: %ld checks, %ld failed\n", ag_variant_names[variant], checks, failures);
    }
    return failures != 0;
}
