/* Test double of operators that compute element by element. See stand_in.h.
 *
 * A table: the name, the arguments of the first phase, and the value of one element of the result. `x` are the elements
 * of the inputs, `op->scalars` the scalars, in order. All is computed in a type that holds every int64, and rounded at the
 * end. */
#include "stand_in.h"

#include <math.h>

/* --- shapes ------------------------------------------------------------------------------------------------------- */

bool si_broadcasts(const struct tensor *t, const struct tensor *result)
{
    int missing = result->rank - t->rank;
    for (int k = 0; k < t->rank; k++)
        if (missing < 0 || (t->dims[k] != 1 && t->dims[k] != result->dims[k + missing]))
            return missing < 0 && si_numel(t) == 1;
    return true;
}

char *si_element(const struct tensor *t, const struct tensor *result, int64_t index)
{
    int64_t at = t->offset;
    for (int k = result->rank - 1; k >= 0; k--) {
        int own = k - (result->rank - t->rank);
        if (own >= 0 && t->dims[own] != 1)
            at += index % result->dims[k] * t->strides[own];
        index /= result->dims[k];
    }
    return si_alias(t->data) + at * (int64_t)si_size(t->dtype);
}

/* --- first phase -------------------------------------------------------------------------------------------------- */

int si_prepare_plain(struct operation *op, const char *function, const void *const *tensors, int count, int results,
                     const void *const *scalars, int scalar_count)
{
    op->count = count;
    op->on_every_system = true;
    for (int i = count - results; i < count; i++)
        op->written |= 1u << i;
    uint64_t *no_size = &(uint64_t){0};
    void **no_executor = &(void *){NULL};
    int code = si_prepare(op, function, tensors, no_size, no_executor);
    for (int i = 0; i < count && code == OK; i++)
        code = si_need(op, i, "a tensor");
    for (int i = 0; i < scalar_count && code == OK; i++) {
        const struct si_argument *argument = scalars[i] ? si_handle_get(scalars[i], KIND_ARGUMENT) : NULL;
        if (scalars[i] && (!argument || argument->kind != SI_SCALAR))
            code = si_misuse(NN_INVALID, "scalar %d is %s", i,
                             argument ? "an array or a list" : si_handle_state(scalars[i], KIND_ARGUMENT));
        op->scalars[i] = argument ? argument->value : NAN;
    }
    return code;
}

int si_finish_plain(struct operation *op, int code, uint64_t *workspace_size, void **executor)
{
    op->nothing_to_do = code == OK && si_numel(&op->t[op->count - 1]) == 0;
    return si_finish(op, code, workspace_size, executor);
}

static void kernel(struct operation *op, char *workspace)
{
    (void)workspace;
    struct tensor *out = &op->t[op->count - 1];
    int64_t count = si_numel(out);
    for (op->index = 0; op->index < count; op->index++) {
        number x[MAX_SCALARS + 1];
        for (int i = 0; i < op->count - 1; i++)
            x[i] = si_number(si_element(&op->t[i], out, op->index), op->t[i].dtype);
        si_put(si_element(out, out, op->index), out->dtype, op->value(op, x));
    }
}

static bool is_floating(const struct tensor *t)
{
    return t->dtype == FLOAT || t->dtype == FLOAT16 || t->dtype == BF16 || t->dtype == DOUBLE;
}

/* Each dimension of the result comes from some input, unless the operator has none or spreads its input. */
static int check_shapes(const struct operation *op)
{
    const struct tensor *out = &op->t[op->count - 1];
    for (int i = 0; i < op->count - 1; i++)
        if (!si_broadcasts(&op->t[i], out))
            return si_fail(NN_INVALID, "tensor %d cannot be broadcast to the result", i);
    for (int k = 0; k < out->rank && op->count > 1 && !(op->liberties & SPREADS); k++) {
        bool found = false;
        for (int i = 0; i < op->count - 1 && !found; i++) {
            int own = k - (out->rank - op->t[i].rank);
            found = own >= 0 && op->t[i].dims[own] == out->dims[k];
        }
        if (!found)
            return si_fail(NN_INVALID, "dimension %d of the result is not that of an input", k);
    }
    return OK;
}

static int check_types(const struct operation *op)
{
    const struct tensor *out = &op->t[op->count - 1];
    int code = OK;
    for (int i = 0; i < op->count && code == OK; i++)
        code = si_need_dtype(op, i, "a tensor", "FLOAT FLOAT16 BF16 DOUBLE INT8 UINT8 INT16 INT32 INT64 BOOL");
    for (int i = 0; i < op->count - 1 && code == OK && !(op->liberties & CONVERTS); i++)
        if (is_floating(&op->t[i]) && !is_floating(out) && out->dtype != BOOL)
            code = si_fail(NN_INVALID, "tensor %d is %s, the result %s", i, si_dtype_name(op->t[i].dtype),
                           si_dtype_name(out->dtype));
    return code;
}

static int prepare(struct operation *op, const char *function, const void *const *tensors, int count,
                   const void *const *scalars, int scalar_count)
{
    op->kernel = kernel;
    int code = si_prepare_plain(op, function, tensors, count, 1, scalars, scalar_count);
    for (int i = 0; i < scalar_count && code == OK && !(op->liberties & SCALARS_MAY_BE_ABSENT); i++)
        if (!scalars[i])
            code = si_fail(NN_NULLPTR, "scalar %d is null", i);
    if (code == OK)
        code = check_types(op);
    return code ? code : check_shapes(op);
}

static int phase_1(struct operation *op, const char *function, const void *const *tensors, int count,
                   const void *const *scalars, int scalar_count, uint64_t *workspace_size, void **executor)
{
    int code = prepare(op, function, tensors, count, scalars, scalar_count);
    return si_finish_plain(op, code, workspace_size, executor);
}

/* --- the table ---------------------------------------------------------------------------------------------------- */

/* `handles`: the handles of the scalars, each followed by a comma. `settings`: other fields of the operation. */
#define ELEMENTWISE(name_, parameters, inputs_and_result, handles, settings, expression)                               \
    static number name_##_value(const struct operation *op, const number *x)                                           \
    {                                                                                                                  \
        (void)op, (void)x;                                                                                             \
        return expression;                                                                                             \
    }                                                                                                                  \
    PHASE_1(name_, parameters)                                                                                         \
    {                                                                                                                  \
        const void *const tensors[] = {BARE inputs_and_result}, *const scalars[] = {BARE handles NULL};                \
        struct operation op = {.name = "aclnn" #name_, .value = name_##_value, BARE settings};                         \
        return phase_1(&op, "aclnn" #name_ "GetWorkspaceSize", tensors, sizeof tensors / sizeof *tensors, scalars,     \
                       sizeof scalars / sizeof *scalars - 1, workspace_size, executor);                                \
    }

#define UNARY(name, expression)                                                                                        \
    ELEMENTWISE(name, (const void *self, void *out), (self, out), (), (), expression)                                  \
    ELEMENTWISE(Inplace##name, (void *self), (self, self), (), (), expression)

/* With a tensor and with a scalar (named by their own suffixes), both also in place. `a` and `b` are the operands. */
#define BINARY(name, tensor, scalar, function)                                                                         \
    ELEMENTWISE(name##tensor, (const void *self, const void *other, void *out), (self, other, out), (), (),            \
                function(x[0], x[1]))                                                                                  \
    ELEMENTWISE(name##scalar, (const void *self, const void *other, void *out), (self, out), (other, ), (),            \
                function(x[0], op->scalars[0]))                                                                        \
    ELEMENTWISE(Inplace##name##tensor, (void *self, const void *other), (self, other, self), (), (),                   \
                function(x[0], x[1]))                                                                                  \
    ELEMENTWISE(Inplace##name##scalar, (void *self, const void *other), (self, self), (other, ), (),                   \
                function(x[0], op->scalars[0]))

#define EQUAL(p, q) ((p) == (q))
#define DIFFERENT(p, q) ((p) != (q))
#define LESS(p, q) ((p) < (q))
#define AT_MOST(p, q) ((p) <= (q))
#define GREATER(p, q) ((p) > (q))
#define AT_LEAST(p, q) ((p) >= (q))
#define TIMES(p, q) ((p) * (q))
#define OVER(p, q) ((p) / (q))
#define BITS_AND(p, q) ((int64_t)(p) & (int64_t)(q))
#define BITS_OR(p, q) ((int64_t)(p) | (int64_t)(q))
#define BITS_XOR(p, q) ((int64_t)(p) ^ (int64_t)(q))
#define SHIFTED_LEFT(p, q) ((int64_t)((uint64_t)(int64_t)(p) << (int64_t)(q)))
#define SHIFTED_RIGHT(p, q) ((int64_t)(p) >> (int64_t)(q))
#define FLOORED(p, q) floorl((p) / (q))

BINARY(Eq, Tensor, Scalar, EQUAL)
BINARY(Ne, Tensor, Scalar, DIFFERENT)
BINARY(Lt, Tensor, Scalar, LESS)
BINARY(Le, Tensor, Scalar, AT_MOST)
BINARY(Gt, Tensor, Scalar, GREATER)
BINARY(Ge, Tensor, Scalar, AT_LEAST)
BINARY(Mul, , s, TIMES)
BINARY(Div, , s, OVER)
BINARY(FloorDivide, , s, FLOORED)
BINARY(BitwiseAnd, Tensor, Scalar, BITS_AND)
BINARY(BitwiseOr, Tensor, Scalar, BITS_OR)
BINARY(BitwiseXor, Tensor, Scalar, BITS_XOR)
BINARY(LeftShift, , s, SHIFTED_LEFT)
BINARY(RightShift, , s, SHIFTED_RIGHT)
#define REMAINDER(p, q) ((p) - (q) * floorl((p) / (q)))
BINARY(RemainderTensor, Tensor, Scalar, REMAINDER)
BINARY(PowTensor, Tensor, Scalar, powl)

/* A third factor: the result is self + alpha * other, and the like. */
#define SCALED(name, sign)                                                                                             \
    ELEMENTWISE(name, (const void *self, const void *other, const void *alpha, void *out), (self, other, out),         \
                (alpha, ), (), x[0] sign op->scalars[0] * x[1])                                                        \
    ELEMENTWISE(name##s, (const void *self, const void *other, const void *alpha, void *out), (self, out),             \
                (other, alpha, ), (), x[0] sign op->scalars[1] * op->scalars[0])                                       \
    ELEMENTWISE(Inplace##name, (void *self, const void *other, const void *alpha), (self, other, self), (alpha, ), (), \
                x[0] sign op->scalars[0] * x[1])                                                                       \
    ELEMENTWISE(Inplace##name##s, (void *self, const void *other, const void *alpha), (self, self), (other, alpha, ),  \
                (), x[0] sign op->scalars[1] * op->scalars[0])

SCALED(Add, +)
SCALED(Sub, -)
ELEMENTWISE(Rsub, (const void *self, const void *other, const void *alpha, void *out), (self, other, out), (alpha, ),
            (), x[1] - op->scalars[0] * x[0])
ELEMENTWISE(Rsubs, (const void *self, const void *other, const void *alpha, void *out), (self, out), (other, alpha, ),
            (), op->scalars[0] - op->scalars[1] * x[0])

static number divided(number p, number q, int64_t mode) /* 1: towards 0, 2: down */
{
    return mode == 1 ? truncl(p / q) : mode == 2 ? floorl(p / q) : p / q;
}

ELEMENTWISE(DivMod, (const void *self, const void *other, int mode, void *out), (self, other, out), (), (.dim = mode),
            divided(x[0], x[1], op->dim))
ELEMENTWISE(DivMods, (const void *self, const void *other, int mode, void *out), (self, out), (other, ), (.dim = mode),
            divided(x[0], op->scalars[0], op->dim))
ELEMENTWISE(InplaceDivMod, (void *self, const void *other, int mode), (self, other, self), (), (.dim = mode),
            divided(x[0], x[1], op->dim))
ELEMENTWISE(InplaceDivMods, (void *self, const void *other, int mode), (self, self), (other, ), (.dim = mode),
            divided(x[0], op->scalars[0], op->dim))

#define OF_TENSORS(name, expression)                                                                                   \
    ELEMENTWISE(name, (const void *self, const void *other, void *out), (self, other, out), (), (), expression)        \
    ELEMENTWISE(Inplace##name, (void *self, const void *other), (self, other, self), (), (), expression)

OF_TENSORS(LogicalAnd, x[0] && x[1])
OF_TENSORS(LogicalOr, x[0] || x[1])
OF_TENSORS(LogicalXor, !x[0] != !x[1])
OF_TENSORS(Maximum, isnan(x[0]) || x[0] > x[1] ? x[0] : x[1])
OF_TENSORS(Minimum, isnan(x[0]) || x[0] < x[1] ? x[0] : x[1])

UNARY(LogicalNot, !x[0])
UNARY(Neg, -x[0])
UNARY(Abs, fabsl(x[0]))
UNARY(Reciprocal, 1 / x[0])
UNARY(Exp, expl(x[0]))
UNARY(Expm1, expm1l(x[0]))
UNARY(Log, logl(x[0]))
UNARY(Log1p, log1pl(x[0]))
UNARY(Sqrt, sqrtl(x[0]))
UNARY(Rsqrt, 1 / sqrtl(x[0]))
UNARY(Floor, floorl(x[0]))
UNARY(Ceil, ceill(x[0]))
UNARY(Round, rintl(x[0]))
UNARY(Trunc, truncl(x[0]))
UNARY(Sign, x[0] > 0 ? 1 : x[0] < 0 ? -1 : x[0])
UNARY(Tanh, tanhl(x[0]))
UNARY(IsFinite, isfinite(x[0]))
UNARY(IsPosInf, x[0] == INFINITY)
UNARY(IsNegInf, x[0] == -INFINITY)
UNARY(BitwiseNot, op->t[0].dtype == BOOL ? !x[0] : ~(int64_t)x[0])

ELEMENTWISE(InplaceCopy, (void *self, const void *source), (source, self), (), (.liberties = CONVERTS | SPREADS),
            x[0])
ELEMENTWISE(InplaceZero, (void *self), (self), (), (), 0)
ELEMENTWISE(InplaceOne, (void *self), (self), (), (), 1)
ELEMENTWISE(InplaceFillScalar, (void *self, const void *value), (self), (value, ), (), op->scalars[0])
ELEMENTWISE(InplaceFillTensor, (void *self, const void *value), (value, self), (), (.liberties = CONVERTS | SPREADS),
            x[0])
ELEMENTWISE(SWhere, (const void *condition, const void *self, const void *other, void *out),
            (condition, self, other, out), (), (), x[0] ? x[1] : x[2])
ELEMENTWISE(InplaceMaskedFillScalar, (void *self, const void *mask, const void *value), (self, mask, self), (value, ),
            (), x[1] ? op->scalars[0] : x[0])
ELEMENTWISE(InplaceMaskedFillTensor, (void *self, const void *mask, const void *value), (self, mask, value, self), (),
            (), x[1] ? x[2] : x[0])

static number clamped(number value, number least, number most)
{
    value = value < least ? least : value; /* comparisons with NaN, an absent bound, are false */
    return value > most ? most : value;
}

ELEMENTWISE(Clamp, (const void *self, const void *least, const void *most, void *out), (self, out), (least, most, ),
            (.liberties = SCALARS_MAY_BE_ABSENT), clamped(x[0], op->scalars[0], op->scalars[1]))
ELEMENTWISE(ClampMin, (const void *self, const void *least, void *out), (self, out), (least, ), (),
            clamped(x[0], op->scalars[0], NAN))
ELEMENTWISE(ClampMax, (const void *self, const void *most, void *out), (self, out), (most, ), (),
            clamped(x[0], NAN, op->scalars[0]))
ELEMENTWISE(Arange, (const void *start, const void *end, const void *step, void *out), (out), (start, end, step, ), (),
            op->scalars[0] + (number)op->index * op->scalars[2])

/* --- random numbers: any, by seed, offset and place --------------------------------------------------------------- */

static number uniform(const struct operation *op, uint64_t stream) /* within (0, 1) */
{
    uint64_t bits = (uint64_t)op->dim * 0x9e3779b97f4a7c15u + (uint64_t)op->index * 2 + stream;
    bits = (bits ^ bits >> 30) * 0xbf58476d1ce4e5b9u;
    bits = (bits ^ bits >> 27) * 0x94d049bb133111ebu;
    return ((number)((bits ^ bits >> 31) >> 11) + 0.5L) * 0x1p-53L;
}

static number normal(const struct operation *op)
{
    return sqrtl(-2 * logl(uniform(op, 0))) * cosl(6.283185307179586L * uniform(op, 1));
}

ELEMENTWISE(InplaceUniform, (void *self, double from, double to, uint64_t seed, uint64_t offset), (self), (),
            (.dim = (int64_t)(seed * 1000003u + offset), .scale = (float)from, .vocab_end = (int64_t)(1e6 * (to - from))),
            op->scale + uniform(op, 0) * ((number)op->vocab_end * 1e-6L))
ELEMENTWISE(InplaceNormal, (void *self, float mean, float deviation, int64_t seed, int64_t offset), (self), (),
            (.dim = seed * 1000003 + offset, .scale = deviation, .vocab_end = (int64_t)(1e6f * mean)),
            (number)op->vocab_end * 1e-6L + op->scale * normal(op))
ELEMENTWISE(InplaceRandom, (void *self, int64_t from, int64_t to, uint64_t seed, uint64_t offset), (self), (),
            (.dim = (int64_t)(seed * 1000003u + offset), .vocab_start = from, .vocab_end = to),
            op->vocab_start + floorl(uniform(op, 0) * (number)(op->vocab_end - op->vocab_start)))

/* --- Cast --------------------------------------------------------------------------------------------------------- */

static number itself(const struct operation *op, const number *x) { return (void)op, x[0]; }

/* The type is said twice. */
PHASE_1(Cast, (const void *self, int dtype, void *out))
{
    struct operation op = {.name = "aclnnCast", .value = itself, .liberties = CONVERTS};
    int code = prepare(&op, "aclnnCastGetWorkspaceSize", (const void *const[]){self, out}, 2, NULL, 0);
    op.on_every_system = false;
    if (code == OK && op.t[1].dtype != dtype)
        code = si_fail(NN_INVALID, "out is %s, not of type %d", si_dtype_name(op.t[1].dtype), dtype);
    return si_finish_plain(&op, code, workspace_size, executor);
}
