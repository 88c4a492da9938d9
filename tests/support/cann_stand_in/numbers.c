/* Test double of the Ascend runtime: elements of each data type, one at a time. See stand_in.h. */
#include "stand_in.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

uint64_t si_size(int dtype)
{
    switch (dtype) {
    case INT8:
    case UINT8:
    case BOOL:
        return 1;
    case INT16:
    case FLOAT16:
    case BF16:
        return 2;
    case FLOAT:
    case INT32:
        return 4;
    case INT64:
    case DOUBLE:
        return 8;
    default:
        return 0;
    }
}

const char *si_dtype_name(int dtype)
{
    switch (dtype) {
    case INT8:
        return "INT8";
    case INT16:
        return "INT16";
    case UINT8:
        return "UINT8";
    case BOOL:
        return "BOOL";
    case FLOAT16:
        return "FLOAT16";
    case BF16:
        return "BF16";
    case FLOAT:
        return "FLOAT";
    case INT32:
        return "INT32";
    case INT64:
        return "INT64";
    case DOUBLE:
        return "DOUBLE";
    default:
        return "an unknown type";
    }
}

static float from_half(uint16_t bits)
{
    int exponent = bits >> 10 & 31, fraction = bits & 1023;
    float magnitude = exponent == 31 ? (fraction ? NAN : INFINITY)
                      : exponent     ? ldexpf((float)(fraction + 1024), exponent - 25)
                                     : ldexpf((float)fraction, -24);
    return bits >> 15 ? -magnitude : magnitude;
}

/* rintf rounds to nearest, ties to even; a carry out of the fraction goes into the exponent by itself. */
static uint16_t to_half(float value)
{
    uint16_t sign = signbit(value) ? 0x8000 : 0;
    float magnitude = fabsf(value);
    int exponent;
    if (isnan(value))
        return sign | 0x7e00;
    if (magnitude >= 65520.0f)
        return sign | 0x7c00;
    if (magnitude < 0x1p-14f)
        return (uint16_t)(sign | (int)rintf(magnitude * 0x1p24f));
    float fraction = frexpf(magnitude, &exponent); /* in [1/2, 1) */
    return (uint16_t)(sign | (((exponent + 14) << 10) + (int)rintf(fraction * 2048) - 1024));
}

static float from_bfloat(uint16_t bits)
{
    uint32_t wide = (uint32_t)bits << 16;
    float value;
    memcpy(&value, &wide, 4);
    return value;
}

static uint16_t to_bfloat(float value)
{
    uint32_t wide;
    memcpy(&wide, &value, 4);
    if (isnan(value))
        return (uint16_t)(wide >> 16 | 0x40);
    return (uint16_t)((wide + 0x7fff + (wide >> 16 & 1)) >> 16);
}

union number {
    float f;
    double d;
    uint16_t h;
    int32_t i;
    int64_t l;
    unsigned char c;
};

double si_load(const char *element, int dtype)
{
    union number u;
    memcpy(&u, element, si_size(dtype));
    switch (dtype) {
    case FLOAT:
        return u.f;
    case DOUBLE:
        return u.d;
    case FLOAT16:
        return from_half(u.h);
    case BF16:
        return from_bfloat(u.h);
    case INT32:
        return u.i;
    case INT64:
        return (double)u.l;
    default:
        return *(const unsigned char *)element;
    }
}

void si_store(char *element, int dtype, double value)
{
    union number u;
    switch (dtype) {
    case FLOAT:
        u.f = (float)value;
        break;
    case DOUBLE:
        u.d = value;
        break;
    case FLOAT16:
        u.h = to_half((float)value);
        break;
    case BF16:
        u.h = to_bfloat((float)value);
        break;
    case INT32:
        u.i = (int32_t)value;
        break;
    case INT64:
        u.l = (int64_t)value;
        break;
    default:
        u.c = (unsigned char)value;
    }
    memcpy(element, &u, si_size(dtype));
}

number si_number(const void *element, int dtype)
{
    int64_t wide;
    int16_t narrow;
    switch (dtype) {
    case INT64:
        memcpy(&wide, element, sizeof wide);
        return wide;
    case INT16:
        memcpy(&narrow, element, sizeof narrow);
        return narrow;
    case INT8:
        return *(const signed char *)element;
    default:
        return si_load(element, dtype);
    }
}

void si_put(char *element, int dtype, number value)
{
    bool fits = value >= -0x1p63L && value < 0x1p63L; /* and is no NaN */
    int64_t whole = fits ? (int64_t)value : value > 0 ? INT64_MAX : value < 0 ? INT64_MIN : 0;
    switch (dtype) {
    case BOOL:
        *element = value != 0;
        break;
    case INT64:
    case INT32:
    case INT16:
    case INT8:
    case UINT8:
        memcpy(element, &whole, si_size(dtype)); /* the low bytes */
        break;
    default:
        si_store(element, dtype, (double)value);
    }
}

float si_round_to(int dtype, float value)
{
    return dtype == FLOAT16 ? from_half(to_half(value)) : dtype == BF16 ? from_bfloat(to_bfloat(value)) : value;
}

void *si_allocate(uint64_t count, uint64_t size)
{
    void *memory = calloc(count ? count : 1, size);
    if (!memory)
        abort();
    return memory;
}

/* Calls `visit` for every element, in the order of the indices. */
static void for_each_element(const struct tensor *t, void *values, void (*visit)(char *, int, void *, int64_t))
{
    int64_t index[MAX_RANK] = {0}, count = si_numel(t), size = (int64_t)si_size(t->dtype), at = t->offset;
    char *base = si_alias(t->data);
    for (int64_t i = 0; i < count; i++) {
        visit(base + at * size, t->dtype, values, i);
        for (int k = t->rank - 1; k >= 0; k--) {
            at += t->strides[k];
            if (++index[k] < t->dims[k])
                break;
            at -= t->strides[k] * t->dims[k];
            index[k] = 0;
        }
    }
}

static void read_double(char *element, int dtype, void *values, int64_t i)
{
    ((double *)values)[i] = si_load(element, dtype);
}

static void read_float(char *element, int dtype, void *values, int64_t i)
{
    ((float *)values)[i] = (float)si_load(element, dtype);
}

static void write_double(char *element, int dtype, void *values, int64_t i)
{
    si_store(element, dtype, ((double *)values)[i]);
}

double *si_gather(const struct tensor *t)
{
    double *values = si_allocate((uint64_t)si_numel(t), sizeof *values);
    for_each_element(t, values, read_double);
    return values;
}

float *si_gather_float(const struct tensor *t)
{
    float *values = si_allocate((uint64_t)si_numel(t), sizeof *values);
    for_each_element(t, values, read_float);
    return values;
}

void si_scatter(const struct tensor *t, const double *values)
{
    for_each_element(t, (void *)(uintptr_t)values, write_double);
}
