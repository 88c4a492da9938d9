/* Blocks of strided, byte-swapped or converted elements, to and from dense tiles: how layouts that the kernels do not
 * read directly reach them. Copies move bits; conversions widen exactly, or round once to nearest even.
 */
#ifndef ASCEND_GRAD_STRIDED_H
#define ASCEND_GRAD_STRIDED_H

#include <math.h>

#include "base.h"
#include "simd.h"

/* ---- bits ------------------------------------------------------------------------------------------------------------ */

#define AG_COPY(type, swap)                                                                                             \
    do {                                                                                                                \
        type x_;                                                                                                        \
        memcpy(&x_, from_, sizeof x_);                                                                                  \
        x_ = swap(x_);                                                                                                  \
        memcpy(to_, &x_, sizeof x_);                                                                                    \
    } while (0)

#define AG_AS_IS(x) (x)

typedef struct {
    uint64_t words[2];
} ag_two_words;

/* The inner loop runs where the strided side is closer together, whole cache lines at a time where it can. */
#define AG_DEFINE_COPY(name, type, swap)                                                                                \
    AG_INLINE void name(char *to, ptrdiff_t to_row, ptrdiff_t to_step, const char *from, ptrdiff_t from_row,            \
                        ptrdiff_t from_step, ptrdiff_t rows, ptrdiff_t n)                                               \
    {                                                                                                                   \
        for (ptrdiff_t r = 0; r < rows; r++) {                                                                          \
            char *to_ = to + r * to_row;                                                                                \
            const char *from_ = from + r * from_row;                                                                    \
            if (to_step == sizeof(type) && from_step == sizeof(type)) {                                                 \
                /* constant steps: the compiler makes vectors of it */                                                  \
                for (ptrdiff_t i = 0; i < n; i++, to_ += sizeof(type), from_ += sizeof(type)) AG_COPY(type, swap);      \
            } else {                                                                                                    \
                for (ptrdiff_t i = 0; i < n; i++, to_ += to_step, from_ += from_step) AG_COPY(type, swap);              \
            }                                                                                                           \
        }                                                                                                               \
    }

AG_DEFINE_COPY(ag_copy_1, uint8_t, AG_AS_IS)
AG_DEFINE_COPY(ag_copy_2, uint16_t, AG_AS_IS)
AG_DEFINE_COPY(ag_copy_4, uint32_t, AG_AS_IS)
AG_DEFINE_COPY(ag_copy_8, uint64_t, AG_AS_IS)
AG_DEFINE_COPY(ag_copy_16, ag_two_words, AG_AS_IS)
AG_DEFINE_COPY(ag_copy_swapped_2, uint16_t, __builtin_bswap16)
AG_DEFINE_COPY(ag_copy_swapped_4, uint32_t, __builtin_bswap32)
AG_DEFINE_COPY(ag_copy_swapped_8, uint64_t, __builtin_bswap64)

#undef AG_DEFINE_COPY
#undef AG_COPY
#undef AG_AS_IS

/* Copy a block of rows x n elements, row by row. Items of 16 bytes are several elements that are adjacent on both sides. */
static AG_UNUSED void ag_copy_rows(char *to, ptrdiff_t to_row, ptrdiff_t to_step, const char *from, ptrdiff_t from_row,
                                   ptrdiff_t from_step, ptrdiff_t rows, ptrdiff_t n, int itemsize, int swapped)
{
    if (!swapped && to_step == itemsize && from_step == itemsize) {
        for (ptrdiff_t r = 0; r < rows; r++) memcpy(to + r * to_row, from + r * from_row, (size_t)(n * itemsize));
        return;
    }
    switch (swapped ? -itemsize : itemsize) {
    case 1:
        ag_copy_1(to, to_row, to_step, from, from_row, from_step, rows, n);
        break;
    case 2:
        ag_copy_2(to, to_row, to_step, from, from_row, from_step, rows, n);
        break;
    case 4:
        ag_copy_4(to, to_row, to_step, from, from_row, from_step, rows, n);
        break;
    case 8:
        ag_copy_8(to, to_row, to_step, from, from_row, from_step, rows, n);
        break;
    case 16:
        ag_copy_16(to, to_row, to_step, from, from_row, from_step, rows, n);
        break;
    case -2:
        ag_copy_swapped_2(to, to_row, to_step, from, from_row, from_step, rows, n);
        break;
    case -4:
        ag_copy_swapped_4(to, to_row, to_step, from, from_row, from_step, rows, n);
        break;
    case -8:
        ag_copy_swapped_8(to, to_row, to_step, from, from_row, from_step, rows, n);
        break;
    }
}

/* The same; on one side, n consecutive elements make a row. */
static AG_UNUSED void ag_copy_block(char *to, ptrdiff_t to_row, ptrdiff_t to_step, const char *from, ptrdiff_t from_row,
                                    ptrdiff_t from_step, ptrdiff_t rows, ptrdiff_t n, int itemsize, int swapped)
{
    /* Of the two strides of the strided side, the smaller one inside. */
    const ptrdiff_t row = (from_step == itemsize ? to_row : from_row), step = (from_step == itemsize ? to_step : from_step);
    if ((row < 0 ? -row : row) < (step < 0 ? -step : step)) {
        ag_copy_rows(to, to_step, to_row, from, from_step, from_row, n, rows, itemsize, swapped);
    } else {
        ag_copy_rows(to, to_row, to_step, from, from_row, from_step, rows, n, itemsize, swapped);
    }
}

/* One dimension of a block: its length, and how many bytes lead on from element to element on either side. */
typedef struct {
    ptrdiff_t length, to, from;
} ag_dim;

AG_INLINE ptrdiff_t ag_reach(ag_dim dim)
{
    return (dim.to < 0 ? -dim.to : dim.to) + (dim.from < 0 ? -dim.from : dim.from);
}

/* Copy a block of three dimensions, in any order of them. */
static AG_UNUSED void ag_copy_3d(char *to, const char *from, ag_dim x, ag_dim y, ag_dim z, int itemsize, int swapped)
{
    enum { SHORT = 8 };
    ag_dim t;
    /* Closest elements innermost (z). */
    if (x.length > 1 && (y.length == 1 || ag_reach(x) < ag_reach(y))) t = x, x = y, y = t;
    if (y.length > 1 && (z.length == 1 || ag_reach(y) < ag_reach(z))) t = y, y = z, z = t;
    if (x.length > 1 && (y.length == 1 || ag_reach(x) < ag_reach(y))) t = x, x = y, y = t;
    if (!swapped && z.to == itemsize && z.from == itemsize && z.length > 1) {
        const ptrdiff_t nbytes = z.length * itemsize;
        if (nbytes == 2 || nbytes == 4 || nbytes == 8 || nbytes == 16) {
            itemsize = (int)nbytes; /* adjacent on both sides: one item */
            z = y, y = x, x = (ag_dim){1, 0, 0};
        }
    }
    /* A loop of a few elements costs as much as a long one: it goes outside. */
    if (z.length < SHORT && y.length > z.length) t = y, y = z, z = t;
    if (z.length < SHORT && x.length > z.length) t = x, x = z, z = t;
    for (ptrdiff_t i = 0; i < x.length; i++) {
        ag_copy_rows(to + i * x.to, y.to, z.to, from + i * x.from, y.from, z.from, y.length, z.length, itemsize, swapped);
    }
}

/* ---- values ---------------------------------------------------------------------------------------------------------- */

/* float64 to float32 so that a second rounding, to 16 bits, gives what one rounding would: towards zero, and the last
 * bit set where anything was lost (Boldo and Melquiond 2008). */
AG_INLINE float ag_round_to_odd(double x)
{
    float nearest = (float)x;
    uint32_t bits;
    if ((double)nearest == x || x - x != 0.0) return nearest;
    memcpy(&bits, &nearest, sizeof bits);
    bits -= fabs((double)nearest) > fabs(x);
    bits |= 1;
    memcpy(&nearest, &bits, sizeof bits);
    return nearest;
}

#define AG_DEFINE_CONVERSIONS(isa)                                                                               \
    static AG_UNUSED void ag_widen_f16_##isa(const char *from, float *to, ptrdiff_t n)                                  \
    {                                                                                                                   \
        enum { L = sizeof(ag_f32v_##isa) / 4 };                                                                         \
        ptrdiff_t i = 0;                                                                                                \
        for (; i + L <= n; i += L) ag_v_f32_store_##isa(to + i, ag_v_f16_load_##isa(from + 2 * i));                     \
        if (i < n) ag_v_f32_store_partial_##isa(to + i, ag_v_f16_load_partial_##isa(from + 2 * i, n - i), n - i);       \
    }                                                                                                                   \
    static AG_UNUSED void ag_widen_bf16_##isa(const char *from, float *to, ptrdiff_t n)                                 \
    {                                                                                                                   \
        enum { L = sizeof(ag_f32v_##isa) / 4 };                                                                         \
        ptrdiff_t i = 0;                                                                                                \
        for (; i + L <= n; i += L) ag_v_f32_store_##isa(to + i, ag_v_bf16_load_##isa(from + 2 * i));                    \
        if (i < n) ag_v_f32_store_partial_##isa(to + i, ag_v_bf16_load_partial_##isa(from + 2 * i, n - i), n - i);      \
    }                                                                                                                   \
    static AG_UNUSED void ag_narrow_f16_##isa(const float *from, char *to, ptrdiff_t n)                                 \
    {                                                                                                                   \
        enum { L = sizeof(ag_f32v_##isa) / 4 };                                                                         \
        ptrdiff_t i = 0;                                                                                                \
        for (; i + L <= n; i += L) ag_v_f16_store_##isa(to + 2 * i, ag_v_f32_load_##isa(from + i));                     \
        if (i < n) ag_v_f16_store_partial_##isa(to + 2 * i, ag_v_f32_load_partial_##isa(from + i, n - i), n - i);       \
    }                                                                                                                   \
    static AG_UNUSED void ag_narrow_bf16_##isa(const float *from, char *to, ptrdiff_t n)                                \
    {                                                                                                                   \
        enum { L = sizeof(ag_f32v_##isa) / 4 };                                                                         \
        ptrdiff_t i = 0;                                                                                                \
        for (; i + L <= n; i += L) ag_v_bf16_store_##isa(to + 2 * i, ag_v_f32_load_##isa(from + i));                    \
        if (i < n) ag_v_bf16_store_partial_##isa(to + 2 * i, ag_v_f32_load_partial_##isa(from + i, n - i), n - i);      \
    }

AG_DEFINE_CONVERSIONS(baseline)
#if defined(AG_X86_64)
AG_TARGET_BEGIN(AG_TARGET_AVX2)
AG_DEFINE_CONVERSIONS(avx2)
AG_TARGET_END
AG_TARGET_BEGIN(AG_TARGET_AVX512)
AG_DEFINE_CONVERSIONS(avx512)
AG_TARGET_END
#endif
#undef AG_DEFINE_CONVERSIONS

#if defined(AG_X86_64)
#define AG_BY_VARIANT(variant, name, ...)                                                                               \
    ((variant) == AG_VARIANT_AVX2      ? name##_avx2(__VA_ARGS__)                                                       \
     : (variant) == AG_VARIANT_BASELINE ? name##_baseline(__VA_ARGS__)                                                  \
                                        : name##_avx512(__VA_ARGS__))
#else
#define AG_BY_VARIANT(variant, name, ...) ((void)(variant), name##_baseline(__VA_ARGS__))
#endif

/* 16-bit values to float32. */
static AG_UNUSED void ag_widen(ag_variant variant, ag_dtype dtype, const char *from, float *to, ptrdiff_t n)
{
    if (dtype == AG_FLOAT16) {
        AG_BY_VARIANT(variant, ag_widen_f16, from, to, n);
    } else {
        AG_BY_VARIANT(variant, ag_widen_bf16, from, to, n);
    }
}

/* float32 or float64 (`from_double`) to any other dtype. */
static AG_UNUSED void ag_round(ag_variant variant, int from_double, const void *from, ag_dtype dtype, char *to,
                               ptrdiff_t n)
{
    if (from_double && dtype == AG_FLOAT32) {
        for (ptrdiff_t i = 0; i < n; i++) {
            const float x = (float)((const double *)from)[i];
            memcpy(to + 4 * i, &x, sizeof x);
        }
    } else if (from_double) {
        float odd[256];
        for (ptrdiff_t i = 0; i < n; i += 256) {
            const ptrdiff_t count = n - i < 256 ? n - i : 256;
            for (ptrdiff_t j = 0; j < count; j++) odd[j] = ag_round_to_odd(((const double *)from)[i + j]);
            ag_round(variant, 0, odd, dtype, to + 2 * i, count);
        }
    } else if (dtype == AG_FLOAT64) {
        for (ptrdiff_t i = 0; i < n; i++) {
            const double x = ((const float *)from)[i];
            memcpy(to + 8 * i, &x, sizeof x);
        }
    } else if (dtype == AG_FLOAT16) {
        AG_BY_VARIANT(variant, ag_narrow_f16, (const float *)from, to, n);
    } else {
        AG_BY_VARIANT(variant, ag_narrow_bf16, (const float *)from, to, n);
    }
}

/* ---- the same traffic as the kernels: what memory allows ------------------------------------------------------------- */

#define AG_DEFINE_STREAM(isa)                                                                                           \
    static AG_UNUSED void ag_stream_##isa(const float *a, const float *b, float *out, ptrdiff_t n, int nontemporal)     \
    {                                                                                                                   \
        enum { L = sizeof(ag_f32v_##isa) / 4 };                                                                         \
        ptrdiff_t i = 0;                                                                                                \
        for (; i < n && (uintptr_t)(out + i) % (4 * L); i++) out[i] = a[i] + b[i];                                      \
        if (nontemporal) {                                                                                              \
            for (; i + L <= n; i += L) {                                                                                \
                ag_v_f32_stream_##isa(out + i, ag_v_f32_load_##isa(a + i) + ag_v_f32_load_##isa(b + i));                \
            }                                                                                                           \
        } else {                                                                                                        \
            for (; i + L <= n; i += L) {                                                                                \
                ag_v_f32_store_##isa(out + i, ag_v_f32_load_##isa(a + i) + ag_v_f32_load_##isa(b + i));                 \
            }                                                                                                           \
        }                                                                                                               \
        for (; i < n; i++) out[i] = a[i] + b[i];                                                                        \
        ag_v_fence_##isa();                                                                                             \
    }

AG_DEFINE_STREAM(baseline)
#if defined(AG_X86_64)
AG_TARGET_BEGIN(AG_TARGET_AVX2)
AG_DEFINE_STREAM(avx2)
AG_TARGET_END
AG_TARGET_BEGIN(AG_TARGET_AVX512)
AG_DEFINE_STREAM(avx512)
AG_TARGET_END
#endif
#undef AG_DEFINE_STREAM

/* out = a + b over n floats: two reads and one write. */
static AG_UNUSED void ag_stream(ag_variant variant, const float *a, const float *b, float *out, ptrdiff_t n,
                                int nontemporal)
{
    AG_BY_VARIANT(variant, ag_stream, a, b, out, n, nontemporal);
}

#endif
