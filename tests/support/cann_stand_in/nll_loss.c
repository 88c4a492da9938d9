/* Test double of torch_npu's losses of log-probabilities, which torch's cross-entropy calls. See stand_in.h. */
#include "stand_in.h"

#include <math.h>
#include <stdlib.h>

/* Of torch's reductions: 0 for none, 1 for the mean, 2 for the sum. */
static int set_reduction(struct operation *op, int64_t reduction)
{
    static const enum si_reduction known[] = {REDUCTION_NONE, REDUCTION_MEAN, REDUCTION_SUM};
    if (reduction < 0 || reduction > 2)
        return si_fail(NN_INVALID, "reduction %lld", (long long)reduction);
    op->reduction = known[reduction];
    return OK;
}

static int64_t target_of(const struct operation *op, const struct tensor *t, int64_t row, int64_t classes)
{
    int64_t target = (int64_t)si_number(si_element(t, t, row), t->dtype);
    if (target == op->ignore_index || (target >= 0 && target < classes))
        return target;
    si_lock();
    si_violation("%s: target %lld of row %lld is not in [0, %lld) and not ignored", op->name, (long long)target,
                 (long long)row, (long long)classes);
    si_unlock();
    return op->ignore_index;
}

/* A single row may be a vector. */
static void extents(const struct tensor *t, int64_t *rows, int64_t *classes)
{
    *classes = t->dims[t->rank - 1];
    *rows = t->rank == 2 ? t->dims[0] : 1;
}

static int check(const struct operation *op, int self, int target, int weight)
{
    const struct tensor *t = &op->t[self];
    bool right = (t->rank == 1 || t->rank == 2) && op->t[weight].rank == 1;
    right = right && op->t[weight].dims[0] == t->dims[t->rank - 1];
    right = right && si_numel(&op->t[target]) == (t->rank == 2 ? t->dims[0] : 1);
    if (!right)
        return si_fail(NN_INVALID, "target or weight has a wrong shape");
    int code = si_need_dtype(op, self, "self", "FLOAT FLOAT16 BF16");
    if (code == OK)
        code = si_check_equal_dtypes(op, self, weight);
    return code ? code : si_need_dtype(op, target, "target", "INT64 INT32 UINT8");
}

enum { SELF, TARGET, WEIGHT, OUT, TOTAL };

static void loss(struct operation *op, char *workspace)
{
    (void)workspace;
    int64_t N, C;
    extents(&op->t[SELF], &N, &C);
    double *log_prob = si_gather(&op->t[SELF]), *weight = si_gather(&op->t[WEIGHT]), total = 0, sum = 0;
    double *losses = si_allocate((uint64_t)N + 1, sizeof *losses);
    for (int64_t i = 0; i < N; i++) {
        int64_t target = target_of(op, &op->t[TARGET], i, C);
        if (target == op->ignore_index)
            continue;
        losses[i] = -weight[target] * log_prob[i * C + target];
        total += weight[target];
        sum += losses[i];
    }
    if (op->reduction != REDUCTION_NONE)
        losses[0] = op->reduction == REDUCTION_MEAN ? sum / total : sum;
    si_scatter(&op->t[OUT], losses);
    si_scatter(&op->t[TOTAL], &total);
    free(log_prob);
    free(weight);
    free(losses);
}

PHASE_1(NLLLoss, (const void *self, const void *target, const void *weight, int64_t reduction, int64_t ignore_index,
                  void *out, void *total))
{
    struct operation op = {.name = "aclnnNLLLoss", .kernel = loss, .ignore_index = ignore_index};
    const void *const tensors[] = {self, target, weight, out, total};
    int code = si_prepare_plain(&op, "aclnnNLLLossGetWorkspaceSize", tensors, 5, 2, NULL, 0);
    if (code == OK)
        code = set_reduction(&op, reduction);
    return si_finish_plain(&op, code ? code : check(&op, SELF, TARGET, WEIGHT), workspace_size, executor);
}

enum { B_GRAD, B_SELF, B_TARGET, B_WEIGHT, B_TOTAL, B_OUT };

static void gradient(struct operation *op, char *workspace)
{
    (void)workspace;
    int64_t N, C;
    extents(&op->t[B_SELF], &N, &C);
    double *grad = si_gather(&op->t[B_GRAD]), *weight = si_gather(&op->t[B_WEIGHT]);
    double *total = si_gather(&op->t[B_TOTAL]);
    double *result = si_allocate((uint64_t)(N * C), sizeof *result);
    for (int64_t i = 0; i < N; i++) {
        int64_t target = target_of(op, &op->t[B_TARGET], i, C);
        if (target != op->ignore_index)
            result[i * C + target] = -weight[target] * grad[op->reduction == REDUCTION_NONE ? i : 0] /
                                     (op->reduction == REDUCTION_MEAN ? *total : 1);
    }
    si_scatter(&op->t[B_OUT], result);
    free(grad);
    free(weight);
    free(total);
    free(result);
}

PHASE_1(NLLLossBackward, (const void *grad, const void *self, const void *target, const void *weight, int64_t reduction,
                          int64_t ignore_index, const void *total, void *out))
{
    struct operation op = {.name = "aclnnNLLLossBackward", .kernel = gradient, .ignore_index = ignore_index};
    const void *const tensors[] = {grad, self, target, weight, total, out};
    int code = si_prepare_plain(&op, "aclnnNLLLossBackwardGetWorkspaceSize", tensors, 6, 1, NULL, 0);
    if (code == OK)
        code = set_reduction(&op, reduction);
    return si_finish_plain(&op, code ? code : check(&op, B_SELF, B_TARGET, B_WEIGHT), workspace_size, executor);
}
