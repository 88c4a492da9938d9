/* Copies of blocks of strided, byte-swapped or converted elements, to and from dense tiles, for layouts that kernels do
 * not read directly. Copies move bits. Conversions widen exactly, or round once to nearest even.
 */
#ifndef ASCEND_GRAD_STRIDED_H
#define ASCEND_GRAD_STRIDED_H

#include "base.h"
#include "simd.h"

/* Two 8-byte elements that are adjacent in source and destination. */
typedef struct {
    uint64_t words[2];
} ag_u64_pair;

/* Indices for AG_SHUFFLE that interleave the lower or the upper halves of two vectors of 4, 8 or 16 elements. */
#define AG_LOW_4 0, 4, 1, 5
#define AG_HIGH_4 2, 6, 3, 7
#define AG_LOW_8 0, 8, 1, 9, 2, 10, 3, 11
#define AG_HIGH_8 4, 12, 5, 13, 6, 14, 7, 15
#define AG_LOW_16 0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23
#define AG_HIGH_16 8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31

#define AG_ISA_BODY "simd/steps.h"
#include "foreach_isa.h"
#define AG_ISA_BODY "simd/copy.h"
#include "foreach_isa.h"

/* ---- bits -------------------------------------------------------------------------------------------------------- */

/* Copy a block of rows x n items, row by row. An item of 16 bytes is several elements that are adjacent in source and
 * destination. */
static AG_UNUSED void ag_copy_rows(ag_variant variant, char *to, ptrdiff_t to_row, ptrdiff_t to_step, const char *from,
                                   ptrdiff_t from_row, ptrdiff_t from_step, ptrdiff_t rows, ptrdiff_t n, int itemsize,
                                   int swapped)
{
    if (!swapped && to_step == itemsize && from_step == itemsize) {
        for (ptrdiff_t r = 0; r < rows; r++) memcpy(to + r * to_row, from + r * from_row, (size_t)(n * itemsize));
        return;
    }
#define AG_COPY_SIZED(size)                                                                                            \
    AG_BY_VARIANT(variant, ag_copy_##size, to, to_row, to_step, from, from_row, from_step, rows, n, swapped)
    switch (itemsize) {
    case 1:
        AG_COPY_SIZED(1);
        break;
    case 2:
        AG_COPY_SIZED(2);
        break;
    case 4:
        AG_COPY_SIZED(4);
        break;
    case 8:
        AG_COPY_SIZED(8);
        break;
    case 16:
        AG_COPY_SIZED(16);
        break;
    }
#undef AG_COPY_SIZED
}

/* Return the longest step, in elements, that permutes copy to rows of n adjacent elements, or 0. */
static AG_UNUSED int ag_longest_step(ag_variant variant, int itemsize, ptrdiff_t n)
{
    return AG_BY_VARIANT(variant, ag_longest_step, itemsize, n);
}

/* Copy a block of rows x n elements, of which each row is contiguous in the source or in the destination. */
static AG_UNUSED void ag_copy_block(char *to, ptrdiff_t to_row, ptrdiff_t to_step, const char *from, ptrdiff_t from_row,
                                    ptrdiff_t from_step, ptrdiff_t rows, ptrdiff_t n, int itemsize, int swapped)
{
    /* The inner loop runs along the smaller stride of the side that is not contiguous, and along a single row. */
    const int from_rows = from_step == itemsize;
    const ptrdiff_t row = from_rows ? to_row : from_row, step = from_rows ? to_step : from_step;
    if (rows > 1 && (row < 0 ? -row : row) < (step < 0 ? -step : step)) {
        ag_copy_rows(AG_VARIANT_BASELINE, to, to_step, to_row, from, from_step, from_row, n, rows, itemsize, swapped);
    } else {
        ag_copy_rows(AG_VARIANT_BASELINE, to, to_row, to_step, from, from_row, from_step, rows, n, itemsize, swapped);
    }
}

/* One dimension of a block: its length, and its strides in bytes in the destination (`to`) and the source (`from`). */
typedef struct {
    ptrdiff_t length, to, from;
} ag_dim;

/* Return whether the sum of the strides of dimension x is smaller than the sum of the strides of y. If the sums are equal,
 * the dimension with two equal strides counts as smaller: its elements may be contiguous in source and destination, while
 * the elements of a broadcast dimension are not. */
AG_INLINE int ag_has_smaller_strides(ag_dim x, ag_dim y)
{
    const ptrdiff_t x_to = x.to < 0 ? -x.to : x.to, x_from = x.from < 0 ? -x.from : x.from;
    const ptrdiff_t y_to = y.to < 0 ? -y.to : y.to, y_from = y.from < 0 ? -y.from : y.from;
    return x_to + x_from != y_to + y_from ? x_to + x_from < y_to + y_from : x_to == x_from && y_to != y_from;
}

/* Swap two dimensions if the first one has the smaller strides. */
AG_INLINE void ag_sort_dims(ag_dim *outer, ag_dim *inner)
{
    const ag_dim t = *outer;
    if (outer->length > 1 && (inner->length == 1 || ag_has_smaller_strides(*outer, *inner))) {
        *outer = *inner, *inner = t;
    }
}

/* Coalesce two dimensions if the outer one continues the inner one in source and destination. */
AG_INLINE void ag_coalesce_dims(ag_dim *outer, ag_dim *inner)
{
    if (outer->length > 1 && outer->to == inner->to * inner->length && outer->from == inner->from * inner->length) {
        inner->length *= outer->length;
        outer->length = 1;
    }
}

/* Copy a block of three dimensions, given in any order. */
static AG_UNUSED void ag_copy_3d(ag_variant variant, char *to, const char *from, ag_dim x, ag_dim y, ag_dim z,
                                 int itemsize, int swapped)
{
    enum { SHORT = 8, SPLAT = 32, CHUNK = 128 };
    ag_dim t;
    /* Sort the dimensions so that the innermost one (z) has the smallest strides. */
    ag_sort_dims(&x, &y);
    ag_sort_dims(&y, &z);
    ag_sort_dims(&x, &y);
    ag_coalesce_dims(&y, &z);
    ag_sort_dims(&x, &y);
    ag_coalesce_dims(&y, &z);
    if (!swapped && z.to == itemsize && z.from == itemsize && z.length > 1) {
        const ptrdiff_t nbytes = z.length * itemsize;
        if (nbytes == 2 || nbytes == 4 || nbytes == 8 || nbytes == 16) {
            itemsize = (int)nbytes; /* z is contiguous in source and destination: copy it as one item */
            z = y, y = x, x = (ag_dim){1, 0, 0};
        }
    }
    /* A row that repeats one element is written by vectors of it, which is faster than a transpose from SPLAT elements on. */
    if (!swapped && !(z.from == 0 && z.to == itemsize && z.length >= SPLAT)) {
        /* A transpose: z becomes the contiguous dimension of the source, y the one of the destination. */
        if (x.from == itemsize || x.to == itemsize) {
            if (z.from != itemsize && z.to != itemsize) t = x, x = z, z = t;
            else if (y.from != itemsize && y.to != itemsize) t = x, x = y, y = t;
        }
        if (y.from == itemsize) t = y, y = z, z = t;
        if (z.from == itemsize && y.to == itemsize) {
            ptrdiff_t i = 0;
            while (i < x.length && AG_BY_VARIANT(variant, ag_transpose, to + i * x.to, z.to, from + i * x.from, y.from,
                                                 y.length, z.length, itemsize)) i++;
            if (i == x.length) return;
        }
    }
    /* A short inner loop has much overhead per element, so a longer dimension becomes the inner one. */
    if (z.length < SHORT && y.length > z.length) t = y, y = z, z = t;
    if (z.length < SHORT && x.length > z.length) t = x, x = z, z = t;
    const ptrdiff_t chunk = z.length > 2 * CHUNK && z.to != itemsize && z.from != itemsize ? CHUNK : z.length;
    /* A long inner loop over strides leaves L1 before the next rows use the rest of its cache lines. */
    for (ptrdiff_t begin = 0; begin < z.length; begin += chunk) {
        const ptrdiff_t length = z.length - begin < chunk ? z.length - begin : chunk;
        for (ptrdiff_t i = 0; i < x.length; i++) {
            ag_copy_rows(variant, to + i * x.to + begin * z.to, y.to, z.to, from + i * x.from + begin * z.from, y.from,
                         z.from, y.length, length, itemsize, swapped);
        }
    }
}

/* ---- values ------------------------------------------------------------------------------------------------------ */

/* Widen n 16-bit values to float32. */
static AG_UNUSED void ag_widen(ag_variant variant, ag_dtype dtype, const char *from, float *to, ptrdiff_t n)
{
    if (dtype == AG_FLOAT16) {
        AG_BY_VARIANT(variant, ag_widen_f16, from, to, n);
    } else {
        AG_BY_VARIANT(variant, ag_widen_bf16, from, to, n);
    }
}

/* Convert n values of float32, or of float64 if `from_double`, to another dtype. */
static AG_UNUSED void ag_convert(ag_variant variant, int from_double, const void *from, ag_dtype dtype, char *to,
                               ptrdiff_t n)
{
    if (from_double && dtype == AG_FLOAT32) {
        AG_BY_VARIANT(variant, ag_narrow_f64_f32, (const double *)from, to, n);
    } else if (from_double && dtype == AG_FLOAT16) {
        AG_BY_VARIANT(variant, ag_narrow_f64_f16, (const double *)from, to, n);
    } else if (from_double) {
        AG_BY_VARIANT(variant, ag_narrow_f64_bf16, (const double *)from, to, n);
    } else if (dtype == AG_FLOAT64) {
        AG_BY_VARIANT(variant, ag_widen_f32_f64, (const float *)from, to, n);
    } else if (dtype == AG_FLOAT16) {
        AG_BY_VARIANT(variant, ag_narrow_f16, (const float *)from, to, n);
    } else {
        AG_BY_VARIANT(variant, ag_narrow_bf16, (const float *)from, to, n);
    }
}

/* Compute out = a + b over n floats, the Add kernel of the STREAM benchmark: two reads and one write. */
static AG_UNUSED void ag_stream_add(ag_variant variant, const float *a, const float *b, float *out, ptrdiff_t n,
                                    int nontemporal)
{
    AG_BY_VARIANT(variant, ag_stream_add, a, b, out, n, nontemporal);
}

#endif
