/* Test double of operators that sum and compare along dimensions. See stand_in.h. */
#include "stand_in.h"

#include <math.h>
#include <stdlib.h>

/* --- reductions: `value` takes what there is so far and one more element ------------------------------------------ */

/* Where the elements of the first tensor go in the result, when the axes are left out. */
static int64_t target_of(const struct operation *op, int64_t index)
{
    int64_t target = 0, step = 1;
    for (int k = op->t[0].rank - 1; k >= 0; k--) {
        if (!(op->axes >> k & 1)) {
            target += index % op->t[0].dims[k] * step;
            step *= op->t[0].dims[k];
        }
        index /= op->t[0].dims[k];
    }
    return target;
}

/* op->scalars[0]: the value of no elements. The mean is the sum over `dim` elements. */
static void reduce(struct operation *op, char *workspace)
{
    (void)workspace;
    const struct tensor *self = &op->t[0], *out = &op->t[1];
    int64_t count = si_numel(self), results = si_numel(out);
    number *values = si_allocate((uint64_t)results, sizeof *values);
    bool *any = si_allocate((uint64_t)results, sizeof *any);
    for (int64_t i = 0; i < results; i++)
        values[i] = op->scalars[0];
    for (int64_t i = 0; i < count; i++) {
        int64_t target = target_of(op, i);
        number x = si_number(si_element(self, self, i), self->dtype);
        values[target] = any[target] || !isnan(op->scalars[0]) ? op->value(op, (number[]){values[target], x}) : x;
        any[target] = true;
    }
    for (int64_t i = 0; i < results; i++)
        si_put(si_element(out, out, i), out->dtype, values[i] / (number)(op->dim ? op->dim : 1));
    free(values);
    free(any);
}

static int set_axes(struct operation *op, const void *handle)
{
    const struct si_argument *dims = handle ? si_handle_get(handle, KIND_ARGUMENT) : NULL;
    if (handle && (!dims || dims->kind != SI_INTEGERS))
        return si_misuse(NN_INVALID, "dims is %s", si_handle_state(handle, KIND_ARGUMENT));
    int rank = op->t[0].rank;
    if (!dims || dims->count == 0)
        op->axes = (1u << rank) - 1;
    for (int64_t i = 0; dims && i < dims->count && rank; i++) {
        if (dims->items[i] < -rank || dims->items[i] >= rank)
            return si_fail(NN_INVALID, "dimension %lld with rank %d", (long long)dims->items[i], rank);
        op->axes |= 1u << (dims->items[i] + (dims->items[i] < 0 ? rank : 0));
    }
    return OK;
}

static int check_sizes(const struct operation *op)
{
    int64_t kept = 1;
    for (int k = 0; k < op->t[0].rank; k++)
        kept *= op->axes >> k & 1 ? 1 : op->t[0].dims[k];
    return kept == si_numel(&op->t[1]) ? OK : si_fail(NN_INVALID, "the result has a wrong shape");
}

static number sum_of(const struct operation *op, const number *x) { return (void)op, x[0] + x[1]; }
static number product_of(const struct operation *op, const number *x) { return (void)op, x[0] * x[1]; }
static number largest_of(const struct operation *op, const number *x)
{
    return (void)op, isnan(x[0]) || x[0] >= x[1] ? x[0] : x[1];
}
static number least_of(const struct operation *op, const number *x)
{
    return (void)op, isnan(x[0]) || x[0] <= x[1] ? x[0] : x[1];
}
static number any_of(const struct operation *op, const number *x) { return (void)op, x[0] || x[1]; }
static number all_of(const struct operation *op, const number *x) { return (void)op, x[0] && x[1]; }

#define REDUCTION(name_, parameters, dims, function, of_nothing, is_mean)                                              \
    PHASE_1(name_, parameters)                                                                                         \
    {                                                                                                                  \
        struct operation op = {.name = "aclnn" #name_, .kernel = reduce, .value = function};                           \
        const void *const tensors[] = {self, out};                                                                     \
        int code = si_prepare_plain(&op, "aclnn" #name_ "GetWorkspaceSize", tensors, 2, 1, NULL, 0);                   \
        op.scalars[0] = of_nothing;                                                                                    \
        if (code == OK && (code = set_axes(&op, dims)) == OK)                                                          \
            code = check_sizes(&op);                                                                                   \
        if (is_mean && code == OK && si_numel(&op.t[1]))                                                               \
            op.dim = si_numel(&op.t[0]) / si_numel(&op.t[1]);                                                          \
        return si_finish_plain(&op, code, workspace_size, executor);                                                   \
    }

#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wunused-parameter"
REDUCTION(ReduceSum, (const void *self, const void *dims, bool keep, int dtype, void *out), dims, sum_of, 0, false)
REDUCTION(Mean, (const void *self, const void *dims, bool keep, int dtype, void *out), dims, sum_of, 0, true)
REDUCTION(Prod, (const void *self, int dtype, void *out), NULL, product_of, 1, false)
REDUCTION(Any, (const void *self, const void *dims, bool keep, void *out), dims, any_of, 0, false)
REDUCTION(All, (const void *self, const void *dims, bool keep, void *out), dims, all_of, 1, false)
REDUCTION(Amax, (const void *self, const void *dims, bool keep, void *out), dims, largest_of, NAN, false)
REDUCTION(Amin, (const void *self, const void *dims, bool keep, void *out), dims, least_of, NAN, false)
REDUCTION(Max, (const void *self, void *out), NULL, largest_of, NAN, false)
REDUCTION(Min, (const void *self, void *out), NULL, least_of, NAN, false)
#pragma GCC diagnostic pop

/* --- LogSumExp ---------------------------------------------------------------------------------------------------- */

static void log_sum_exp(struct operation *op, char *workspace)
{
    (void)workspace;
    const struct tensor *self = &op->t[0], *out = &op->t[1];
    int64_t count = si_numel(self), results = si_numel(out);
    number *largest = si_allocate((uint64_t)results, sizeof *largest);
    number *sums = si_allocate((uint64_t)results, sizeof *sums);
    for (int64_t i = 0; i < results; i++)
        largest[i] = -INFINITY;
    for (int64_t i = 0; i < count; i++) {
        number x = si_number(si_element(self, self, i), self->dtype), *so_far = &largest[target_of(op, i)];
        *so_far = isnan(x) || x > *so_far ? x : *so_far;
    }
    for (int64_t i = 0; i < count; i++) {
        int64_t target = target_of(op, i);
        number x = si_number(si_element(self, self, i), self->dtype);
        sums[target] += isinf(largest[target]) ? x == INFINITY : expl(x - largest[target]);
    }
    for (int64_t i = 0; i < results; i++)
        si_put(si_element(out, out, i), out->dtype, largest[i] + logl(sums[i]));
    free(largest);
    free(sums);
}

static int check_log_sum_exp(struct operation *op, const void *dims, bool keep)
{
    struct tensor right = {.rank = 0};
    int code = dims ? OK : si_fail(NN_NULLPTR, "dim is null");
    for (int i = 0; i < 2 && code == OK; i++)
        code = si_need_dtype(op, i, "a tensor", "FLOAT FLOAT16 BF16");
    if (code == OK)
        code = si_check_equal_dtypes(op, 0, 1);
    if (code || (code = set_axes(op, dims)))
        return code;
    const struct si_argument *list = si_handle_get(dims, KIND_ARGUMENT);
    if (op->t[0].rank && list->count > 0 && __builtin_popcount(op->axes) != list->count)
        return si_fail(NN_INVALID, "a dimension is named twice");
    for (int k = 0; k < op->t[0].rank; k++)
        if (keep || !(op->axes >> k & 1))
            right.dims[right.rank++] = op->axes >> k & 1 ? 1 : op->t[0].dims[k];
    return si_same_shape(&op->t[1], &right) ? OK : si_fail(NN_INVALID, "the result has a wrong shape");
}

PHASE_1(LogSumExp, (const void *self, const void *dims, bool keep, void *out))
{
    struct operation op = {.name = "aclnnLogSumExp", .kernel = log_sum_exp};
    int code = si_prepare_plain(&op, "aclnnLogSumExpGetWorkspaceSize", (const void *const[]){self, out}, 2, 1, NULL, 0);
    op.on_every_system = false;
    return si_finish_plain(&op, code ? code : check_log_sum_exp(&op, dims, keep), workspace_size, executor);
}

/* --- along one dimension: the extreme one and its place, and sums so far ------------------------------------------ */

struct line {
    int64_t first, length, step; /* in elements of the flattened tensor */
};

static int64_t lines(const struct tensor *t, int64_t dim, struct line *line)
{
    line->length = t->rank ? t->dims[dim] : 1;
    line->step = 1;
    for (int k = (int)dim + 1; k < t->rank; k++)
        line->step *= t->dims[k];
    return line->length ? si_numel(t) / line->length : 0;
}

static number element(const struct operation *op, const struct line *line, int64_t number_, int64_t j)
{
    int64_t start = number_ / line->step * line->step * line->length + number_ % line->step;
    return si_number(si_element(&op->t[0], &op->t[0], start + j * line->step), op->t[0].dtype);
}

static void extreme(struct operation *op, char *workspace)
{
    (void)workspace;
    struct line line;
    int64_t count = lines(&op->t[0], op->dim, &line);
    for (int64_t i = 0; i < count; i++) {
        int64_t best = 0;
        number value = element(op, &line, i, 0);
        for (int64_t j = 1; j < line.length; j++) {
            number x = element(op, &line, i, j), chosen = op->value(op, (number[]){value, x});
            if (!isnan(value) && (isnan(x) || chosen != value))
                value = x, best = j;
        }
        const struct tensor *place = &op->t[op->count - 1];
        if (op->count == 3)
            si_put(si_element(&op->t[1], &op->t[1], i), op->t[1].dtype, value);
        si_put(si_element(place, place, i), place->dtype, best);
    }
}

static void accumulate(struct operation *op, char *workspace)
{
    (void)workspace;
    struct line line;
    const struct tensor *out = &op->t[1];
    int64_t count = lines(&op->t[0], op->dim, &line);
    for (int64_t i = 0; i < count; i++) {
        int64_t start = i / line.step * line.step * line.length + i % line.step;
        number sum = 0;
        for (int64_t j = 0; j < line.length; j++)
            si_put(si_element(out, out, start + j * line.step), out->dtype, sum += element(op, &line, i, j));
    }
}

#define ALONG(name_, parameters, kernel_, function, results, ...)                                                      \
    PHASE_1(name_, parameters)                                                                                         \
    {                                                                                                                  \
        struct operation op = {.name = "aclnn" #name_, .kernel = kernel_, .value = function, .dim = dim};              \
        const void *const tensors[] = {self, __VA_ARGS__};                                                             \
        int code = si_prepare_plain(&op, "aclnn" #name_ "GetWorkspaceSize", tensors, 1 + results, results, NULL, 0);   \
        return si_finish_plain(&op, code ? code : si_check_dim(&op), workspace_size, executor);                        \
    }

#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wunused-parameter"
ALONG(MaxDim, (const void *self, int64_t dim, bool keep, void *out, void *indices), extreme, largest_of, 2, out, indices)
ALONG(MinDim, (const void *self, int64_t dim, bool keep, void *out, void *indices), extreme, least_of, 2, out, indices)
ALONG(ArgMax, (const void *self, int64_t dim, bool keep, void *out), extreme, largest_of, 1, out)
ALONG(ArgMin, (const void *self, int64_t dim, bool keep, void *out), extreme, least_of, 1, out)
ALONG(Cumsum, (const void *self, int64_t dim, int dtype, void *out), accumulate, NULL, 1, out)
#pragma GCC diagnostic pop
