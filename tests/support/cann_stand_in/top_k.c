/* Test double of the operators top-k and sort. See stand_in.h.
 *
 * The order of equal elements is not promised on the device, but for a stable sort: the later one comes first here, other
 * than almost anywhere else. NaN is larger than everything. */
#include "stand_in.h"

#include <math.h>
#include <stdlib.h>

struct candidate {
    number value;
    int64_t index;
};

/* Descending. */
static int compare(const void *a, const void *b)
{
    const struct candidate *p = a, *q = b;
    if (isnan(p->value) != isnan(q->value))
        return isnan(p->value) ? -1 : 1;
    if (p->value != q->value && !isnan(p->value))
        return p->value > q->value ? -1 : 1;
    return p->index > q->index ? -1 : 1;
}

static int compare_ascending(const void *a, const void *b)
{
    const struct candidate *p = a, *q = b;
    bool equal = p->value == q->value || (isnan(p->value) && isnan(q->value));
    return equal ? compare(a, b) : -compare(a, b);
}

static int compare_stable(const void *a, const void *b)
{
    const struct candidate *p = a, *q = b;
    bool equal = p->value == q->value || (isnan(p->value) && isnan(q->value));
    return equal ? -compare(a, b) : compare(a, b);
}

static int compare_ascending_stable(const void *a, const void *b) { return -compare(a, b); }

/* By the bits of axes: 1 for the largest ones, 4 for the order of equal ones. */
static int (*comparison(unsigned axes))(const void *, const void *)
{
    if (axes & 4)
        return axes & 1 ? compare_stable : compare_ascending_stable;
    return axes & 1 ? compare : compare_ascending;
}

/* vocab_end: k; axes: 1 for the largest ones, 2 for sorted ones. Those that are not sorted come the other way round. */
static void top_k(struct operation *op, char *workspace)
{
    (void)workspace;
    const struct tensor *self = &op->t[0], *values = &op->t[1], *indices = &op->t[2];
    int64_t n = self->rank ? self->dims[op->dim] : 1, k = op->vocab_end, step = 1;
    for (int axis = (int)op->dim + 1; axis < self->rank; axis++)
        step *= self->dims[axis];
    struct candidate *line = si_allocate((uint64_t)n, sizeof *line);
    int64_t count = si_numel(self) / n;
    for (int64_t i = 0; i < count; i++) {
        int64_t from = i / step * step * n + i % step, to = i / step * step * k + i % step;
        for (int64_t j = 0; j < n; j++)
            line[j] = (struct candidate){si_number(si_element(self, self, from + j * step), self->dtype), j};
        qsort(line, (size_t)n, sizeof *line, comparison(op->axes));
        for (int64_t j = 0; j < k; j++) {
            const struct candidate *chosen = &line[op->axes & 2 ? j : k - 1 - j];
            si_put(si_element(values, values, to + j * step), values->dtype, chosen->value);
            si_put(si_element(indices, indices, to + j * step), indices->dtype, chosen->index);
        }
    }
    free(line);
}

static int check(struct operation *op)
{
    const struct tensor *self = &op->t[0];
    int code = si_need_first(op, 3);
    if (code || (code = si_check_dim(op)))
        return code;
    int64_t n = self->rank ? self->dims[op->dim] : 1, k = op->vocab_end;
    if (k < 0 || k > n)
        return si_fail(NN_INVALID, "k is %lld of %lld", (long long)k, (long long)n);
    code = si_need_dtype(op, 0, "self", "FLOAT FLOAT16 BF16 DOUBLE INT8 UINT8 INT16 INT32 INT64");
    if (code == OK)
        code = si_check_equal_dtypes(op, 0, 1);
    if (code == OK)
        code = si_need_dtype(op, 2, "indicesOut", "INT64");
    struct tensor right = *self;
    right.dims[op->dim] = self->rank ? k : right.dims[op->dim];
    for (int i = 1; i < 3 && code == OK; i++)
        if (!si_same_shape(&op->t[i], &right))
            code = si_fail(NN_INVALID, "result %d has a wrong shape", i);
    op->nothing_to_do = code == OK && si_numel(&right) * k == 0;
    return code;
}

PHASE_1(Topk, (const void *self, int64_t k, int64_t dim, bool largest, bool sorted, void *values, void *indices))
{
    struct operation op = {.name = "aclnnTopk",
                           .kernel = top_k,
                           .count = 3,
                           .written = 6,
                           .dim = dim,
                           .vocab_end = k,
                           .axes = largest + 2u * sorted,
                           .workspace = 8192};
    const void *const tensors[] = {self, values, indices};
    int code = si_prepare(&op, "aclnnTopkGetWorkspaceSize", tensors, workspace_size, executor);
    return si_finish(&op, code ? code : check(&op), workspace_size, executor);
}

PHASE_1(Sort, (const void *self, bool stable, int64_t dim, bool descending, void *values, void *indices))
{
    struct operation op = {.name = "aclnnSort",
                           .kernel = top_k,
                           .count = 3,
                           .written = 6,
                           .dim = dim,
                           .axes = descending + 2u + 4u * stable,
                           .workspace = 8192};
    const void *const tensors[] = {self, values, indices};
    int code = si_prepare(&op, "aclnnSortGetWorkspaceSize", tensors, workspace_size, executor);
    if (code == OK && (code = si_check_dim(&op)) == OK)
        op.vocab_end = op.t[0].rank ? op.t[0].dims[op.dim] : 1;
    return si_finish(&op, code ? code : check(&op), workspace_size, executor);
}
