/* The instruction BFMMLA in plain C, bit for bit: for tests, and for builds with AG_EMULATE_BFMMLA. gemm_bfmmla.h describes its
 * arithmetic. */
#ifndef ASCEND_GRAD_LINEAR_BFMMLA_IN_C_H
#define ASCEND_GRAD_LINEAR_BFMMLA_IN_C_H

#include <math.h>
#include <stdint.h>
#include <string.h>

#include "../base.h"

/* Round x + error to float32, to odd. x is the nearest double to that sum; results below 2**-126 are flushed to zero, and a
 * NaN becomes the default one. */
static float ag_round_to_odd(double x, double error)
{
    const uint64_t dropped = (UINT64_C(1) << 29) - 1; /* bits of a double that float32 lacks */
    uint64_t bits;
    if (isnan(x)) return __builtin_nanf("");
    memcpy(&bits, &x, sizeof bits);
    if (error != 0) bits = (bits - ((error < 0) != (x < 0))) | 1; /* truncated, and marked as inexact */
    if (bits & dropped) bits = (bits & ~dropped) | (dropped + 1);
    memcpy(&x, &bits, sizeof x);
    return fabs(x) < 0x1p-126 ? copysignf(0, (float)x) : (float)x;
}

/* Return a double with its denormal values (as a float32) flushed to zero. */
static double ag_flush_denormal(double x) { return fabs(x) < 0x1p-126 ? copysign(0, x) : x; }

/* Return the value of a bfloat16 number, flushed. */
static double ag_flushed_bfloat16(uint16_t x)
{
    const uint32_t bits = (uint32_t)x << 16;
    float value;
    memcpy(&value, &bits, sizeof value);
    return ag_flush_denormal((double)value);
}

/* Return the product of two bfloat16 numbers, which float32 holds exactly. */
static float ag_product_of_bfloat16(uint16_t a, uint16_t b)
{
    return ag_round_to_odd(ag_flushed_bfloat16(a) * ag_flushed_bfloat16(b), 0);
}

/* Return the sum of two float32 numbers, rounded to odd. */
static float ag_add_to_odd(float x, float y)
{
    const double a = ag_flush_denormal((double)x), b = ag_flush_denormal((double)y);
    const double sum = a + b, part = sum - a;
    return ag_round_to_odd(sum, isfinite(sum) ? (a - (sum - part)) + (b - part) : 0);
}

/* sum (2, 2) += a (2, 4) times the transpose of b (2, 4). */
static AG_UNUSED void ag_bfmmla_in_c(float sum[4], const uint16_t a[8], const uint16_t b[8])
{
    for (int i = 0; i < 2; i++) {
        for (int j = 0; j < 2; j++) {
            for (int k = 0; k < 4; k += 2) {
                const uint16_t *left = a + 4 * i + k, *right = b + 4 * j + k;
                const float first = ag_product_of_bfloat16(left[0], right[0]);
                const float second = ag_product_of_bfloat16(left[1], right[1]);
                sum[2 * i + j] = ag_add_to_odd(sum[2 * i + j], ag_add_to_odd(first, second));
            }
        }
    }
}

#endif
