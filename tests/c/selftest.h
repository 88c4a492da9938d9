/* What the self-tests share: counted checks, scalar conversions, random numbers. */
#ifndef SELFTEST_H
#define SELFTEST_H

#include <stdio.h>
#include <stdlib.h>

#include "ascend_grad/base.h"

static long checks, failures;

#define CHECK(condition, ...)                                                                                           \
    do {                                                                                                                \
        checks++;                                                                                                       \
        if (!(condition) && failures++ < 20) printf("FAILED %s: ", #condition), printf(__VA_ARGS__), printf("\n");      \
    } while (0)

static const char *const dtype_names[] = {"float32", "float16", "bfloat16", "float64"};
/* ---- scalar conversions, written from the formats' definitions ------------------------------------------------------ */

static double half_value(uint16_t h, int exponent_bits)
{
    const int fraction_bits = 15 - exponent_bits, bias = (1 << (exponent_bits - 1)) - 1;
    const int exponent = (h >> fraction_bits) & ((1 << exponent_bits) - 1), fraction = h & ((1 << fraction_bits) - 1);
    double value;
    if (exponent == (1 << exponent_bits) - 1) {
        value = fraction ? NAN : INFINITY;
    } else if (exponent == 0) {
        value = ldexp(fraction, 1 - bias - fraction_bits);
    } else {
        value = ldexp((1 << fraction_bits) + fraction, exponent - bias - fraction_bits);
    }
    return h >> 15 ? -value : value;
}

/* The nearest of the finite neighbours and infinity, ties to the even pattern: patterns of one sign are ordered. */
static uint16_t half_bits(double x, int exponent_bits)
{
    const uint16_t sign = signbit(x) ? 0x8000 : 0;
    const uint16_t infinity = (uint16_t)(((1 << exponent_bits) - 1) << (15 - exponent_bits));
    uint16_t low = 0, high = infinity;
    x = fabs(x);
    while (high - low > 1) {
        const uint16_t middle = (uint16_t)((low + high) / 2);
        if (half_value(middle, exponent_bits) <= x) low = middle; else high = middle;
    }
    /* Infinity rounds as if it were the next value of the format. */
    const double below = half_value(low, exponent_bits);
    const double above = high == infinity ? ldexp(1, 1 << (exponent_bits - 1)) : half_value(high, exponent_bits);
    if (isinf(x)) return sign | infinity;
    if (x - below < above - x || (x - below == above - x && !(low & 1))) return sign | low;
    return sign | high;
}

static double get(const char *p, ag_dtype dtype)
{
    float f;
    double d;
    uint16_t h;
    switch (dtype) {
    case AG_FLOAT32:
        memcpy(&f, p, 4);
        return f;
    case AG_FLOAT64:
        memcpy(&d, p, 8);
        return d;
    default:
        memcpy(&h, p, 2);
        return half_value(h, dtype == AG_FLOAT16 ? 5 : 8);
    }
}

static void put(char *p, ag_dtype dtype, double x)
{
    const float f = (float)x;
    uint16_t h;
    switch (dtype) {
    case AG_FLOAT32:
        memcpy(p, &f, 4);
        break;
    case AG_FLOAT64:
        memcpy(p, &x, 8);
        break;
    default:
        h = half_bits(x, dtype == AG_FLOAT16 ? 5 : 8);
        memcpy(p, &h, 2);
    }
}

static uint64_t state = 88172645463325252u;
static double uniform(void)
{
    state ^= state << 13;
    state ^= state >> 7;
    state ^= state << 17;
    return (double)(state >> 11) * 0x1p-53;
}

#endif
