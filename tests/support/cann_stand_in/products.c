/* Test double of products of matrices, whose leading dimensions are broadcast. See stand_in.h. */
#include "stand_in.h"

#include <math.h>

/* cubeMathType: the conversion of float32 elements before they are multiplied. The first 910 and 310P multiply only
 * float16. */
enum { KEEP, LOWER, USE_FP16, USE_HF32 };

static number narrowed(number value, int dtype, int64_t precision)
{
    int exponent;
    if (dtype != FLOAT || precision == KEEP)
        return value;
    if (precision == USE_FP16 || !si_soc_in("910B 910_93 950"))
        return si_round_to(FLOAT16, (float)value);
    number fraction = frexpl(value, &exponent);
    return isfinite(value) ? ldexpl(rintl(ldexpl(fraction, 12)), exponent - 12) : value; /* 11 bits after the first */
}

static number entry(const struct tensor *t, const struct tensor *out, int64_t batch, int64_t row, int64_t column)
{
    int64_t at = t->offset + row * t->strides[t->rank - 2] + column * t->strides[t->rank - 1];
    for (int k = out->rank - 3; k >= 0; k--) {
        int own = k - (out->rank - t->rank);
        if (own >= 0 && t->dims[own] != 1)
            at += batch % out->dims[k] * t->strides[own];
        batch /= out->dims[k];
    }
    return si_number(si_alias(t->data) + at * (int64_t)si_size(t->dtype), t->dtype);
}

/* scalars: what the added tensor (the last input, if there is one) and the product are multiplied with. */
static void multiply(struct operation *op, char *workspace)
{
    (void)workspace;
    const struct tensor *left = &op->t[0], *right = &op->t[1], *out = &op->t[op->count - 1];
    int64_t n = out->dims[out->rank - 1], m = out->dims[out->rank - 2], inner = left->dims[left->rank - 1];
    int64_t count = si_numel(out);
    for (int64_t i = 0; i < count; i++) {
        number sum = 0;
        for (int64_t l = 0; l < inner; l++)
            sum += narrowed(entry(left, out, i / (m * n), i / n % m, l), left->dtype, op->dim) *
                   narrowed(entry(right, out, i / (m * n), l, i % n), right->dtype, op->dim);
        if (op->count == 4)
            sum = op->scalars[0] * si_number(si_element(&op->t[2], out, i), op->t[2].dtype) + op->scalars[1] * sum;
        si_put(si_element(out, out, i), out->dtype, sum);
    }
}

/* A dimension of length 1, so that a vector is a matrix. */
static void insert_dimension(struct tensor *t, int at)
{
    for (int k = t->rank++; k > at; k--) {
        t->dims[k] = t->dims[k - 1];
        t->strides[k] = t->strides[k - 1];
    }
    t->dims[at] = 1;
    t->strides[at] = 0;
}

/* op->axes: matrices alone, no vectors and no leading dimensions. */
static int check_product(struct operation *op, int precision)
{
    struct tensor *left = &op->t[0], *right = &op->t[1], *out = &op->t[op->count - 1];
    int code = OK;
    op->dim = precision;
    for (int i = 0; i < op->count && code == OK; i++) {
        code = si_need_dtype(op, i, "a tensor", "FLOAT FLOAT16 BF16");
        if (code == OK)
            code = si_check_equal_dtypes(op, 0, i);
    }
    if (code)
        return code;
    bool is_lowered = precision == LOWER || precision == USE_FP16;
    bool is_exact = precision == KEEP || precision == USE_HF32;
    if (!is_lowered && !(is_exact && (left->dtype != FLOAT || si_soc_in("910B 910_93 950"))))
        return si_fail(NN_INVALID, "cubeMathType %d for %s on %s", precision, si_dtype_name(left->dtype), si_soc());
    if (op->axes && (left->rank != 2 || right->rank != 2 || out->rank != 2))
        return si_fail(NN_INVALID, "ranks %d, %d, %d, not 2", left->rank, right->rank, out->rank);
    if (right->rank == 1) {
        insert_dimension(right, 1);
        insert_dimension(out, out->rank);
    }
    if (left->rank == 1) {
        insert_dimension(left, 0);
        insert_dimension(out, out->rank - 1);
    }
    bool right_shapes = left->rank >= 2 && right->rank >= 2 && out->rank >= 2 &&
                        left->dims[left->rank - 1] == right->dims[right->rank - 2] &&
                        left->dims[left->rank - 2] == out->dims[out->rank - 2] &&
                        right->dims[right->rank - 1] == out->dims[out->rank - 1];
    return right_shapes ? OK : si_fail(NN_INVALID, "these are no matrices that can be multiplied");
}

#define PRODUCT(name_, parameters, handles, settings, ...)                                                             \
    PHASE_1(name_, parameters)                                                                                         \
    {                                                                                                                  \
        struct operation op = {.name = "aclnn" #name_, .kernel = multiply, BARE settings};                             \
        const void *const tensors[] = {__VA_ARGS__}, *const scalars[] = {BARE handles NULL};                           \
        int code = si_prepare_plain(&op, "aclnn" #name_ "GetWorkspaceSize", tensors, sizeof tensors / sizeof *tensors, \
                                    1, scalars, sizeof scalars / sizeof *scalars - 1);                                 \
        return si_finish_plain(&op, code ? code : check_product(&op, precision), workspace_size, executor);            \
    }

PRODUCT(Mm, (const void *self, const void *other, void *out, int8_t precision), (), (.axes = 1), self, other, out)
PRODUCT(Matmul, (const void *self, const void *other, void *out, int8_t precision), (), (), self, other, out)
PRODUCT(BatchMatMul, (const void *self, const void *other, void *out, int8_t precision), (), (), self, other, out)
PRODUCT(Addmm,
        (const void *self, const void *left, const void *right, const void *beta, const void *alpha, void *out,
         int8_t precision),
        (beta, alpha, ), (), left, right, self, out)
