/* Test double of the losses of logits: CrossEntropyLoss, CrossEntropyLossGrad, SoftmaxCrossEntropyWithLogits. See stand_in.h.
 *
 * As on the device: log-probabilities are rounded to the dtype of the logits, and the gradient is computed from them. The
 * results for the z-loss have to be passed, and are not written. */
#include "stand_in.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

static const char *const floats = "FLOAT FLOAT16 BF16";

static int need_shape(const struct operation *op, int index, const char *name, int rank, int64_t first, int64_t second)
{
    if (!op->t[index].present || si_has_shape(&op->t[index], rank, (const int64_t[]){first, second}))
        return OK;
    return si_fail(NN_TILING, "%s has a wrong shape", name);
}

static int need_all(const struct operation *op, const int *indices, int count)
{
    int code = OK;
    for (int i = 0; i < count && code == OK; i++)
        code = si_need(op, indices[i], "a tensor");
    return code;
}

static int need_equal(const struct operation *op, int index, int like)
{
    if (!op->t[index].present || op->t[index].dtype == op->t[like].dtype)
        return OK;
    return si_fail(NN_INVALID, "tensor %d is %s, tensor %d is %s", index, si_dtype_name(op->t[index].dtype), like,
                   si_dtype_name(op->t[like].dtype));
}

static int find_reduction(struct operation *op, const char *reduction)
{
    static const char *const names[] = {"none", "mean", "sum"};
    for (op->dim = 0; op->dim < 3; op->dim++)
        if (reduction && strcmp(reduction, names[op->dim]) == 0)
            return OK;
    return si_fail(reduction ? NN_TILING : NN_NULLPTR, "reduction is %s", reduction ? reduction : "NULL");
}

static int check_smoothing(double smoothing, double most)
{
    return smoothing >= 0 && smoothing <= most ? OK : si_fail(NN_TILING, "labelSmoothing is %g", smoothing);
}

enum { NONE, MEAN, SUM };

/* The weight of the target of each row, 0 of ignored rows, and the sum of them. */
static double weights_of(const struct operation *op, const double *target, const double *weight, int64_t N, int64_t C,
                         double *of_rows)
{
    double total = 0;
    for (int64_t i = 0; i < N; i++) {
        bool ignored = (int64_t)target[i] == op->vocab_start;
        if (!ignored && !(target[i] >= 0 && target[i] < (double)C))
            si_violation("%s: target %g of row %lld is not in [0, %lld)", op->name, target[i], (long long)i, (long long)C);
        bool inside = target[i] >= 0 && target[i] < (double)C;
        total += of_rows[i] = ignored || !inside ? 0 : weight ? weight[(int64_t)target[i]] : 1;
    }
    return total;
}

/* --- CrossEntropyLoss --------------------------------------------------------------------------------------------- */

enum { INPUT, TARGET, WEIGHT, LOSS, LOG_PROB, ZLOSS, LSE };

static void forward(struct operation *op, char *workspace)
{
    (void)workspace;
    int64_t N = op->t[INPUT].dims[0], C = op->t[INPUT].dims[1];
    double *z = si_gather(&op->t[INPUT]), *target = si_gather(&op->t[TARGET]);
    double *weight = op->t[WEIGHT].present ? si_gather(&op->t[WEIGHT]) : NULL;
    double *losses = si_allocate((uint64_t)N, sizeof *losses), *of_rows = si_allocate((uint64_t)N, sizeof *of_rows);
    double divisor = weights_of(op, target, weight, N, C, of_rows), smoothing = (float)op->scalars[0], total = 0;
    for (int64_t i = 0; i < N; i++) {
        double *row = z + i * C, largest = -INFINITY, sum = 0, smooth = 0;
        bool ignored = (int64_t)target[i] == op->vocab_start;
        for (int64_t j = 0; j < C; j++)
            if (isnan(row[j]) || row[j] > largest)
                largest = row[j];
        for (int64_t j = 0; j < C; j++)
            sum += exp(row[j] - largest);
        for (int64_t j = 0; j < C; j++) {
            row[j] = row[j] - largest - log(sum);
            smooth -= (weight ? weight[j] : 1) * row[j];
        }
        int64_t t = target[i] >= 0 && target[i] < (double)C ? (int64_t)target[i] : 0;
        double of_target = ignored ? 0 : -of_rows[i] * row[t];
        losses[i] = (1 - smoothing) * of_target + (ignored || smoothing == 0 ? 0 : smoothing / (double)C * smooth);
        total += losses[i];
    }
    si_scatter(&op->t[LOG_PROB], z);
    if (op->dim == MEAN)
        total /= divisor;
    si_scatter(&op->t[LOSS], op->dim == NONE ? losses : &total);
    free(z);
    free(target);
    free(weight);
    free(losses);
    free(of_rows);
}

int aclnnCrossEntropyLossGetWorkspaceSize(const void *input, const void *target, const void *weight, char *reduction,
                                          int64_t ignore_index, double smoothing, double zloss_scale, bool return_zloss,
                                          void *loss, void *log_prob, void *zloss, void *lse, uint64_t *workspace_size,
                                          void **executor);
int aclnnCrossEntropyLossGetWorkspaceSize(const void *input, const void *target, const void *weight, char *reduction,
                                          int64_t ignore_index, double smoothing, double zloss_scale, bool return_zloss,
                                          void *loss, void *log_prob, void *zloss, void *lse, uint64_t *workspace_size,
                                          void **executor)
{
    (void)zloss_scale, (void)return_zloss; /* without effect on the device, too */
    struct operation op = {.name = "aclnnCrossEntropyLoss",
                           .kernel = forward,
                           .count = 7,
                           .written = 1u << LOSS | 1u << LOG_PROB,
                           .vocab_start = ignore_index,
                           .scalars = {smoothing}};
    const void *const tensors[] = {input, target, weight, loss, log_prob, zloss, lse};
    int code = si_prepare(&op, "aclnnCrossEntropyLossGetWorkspaceSize", tensors, workspace_size, executor);
    if (code == OK)
        code = need_all(&op, (const int[]){INPUT, TARGET, LOSS, LOG_PROB, ZLOSS, LSE}, 6);
    if (code == OK && !reduction)
        code = si_fail(NN_NULLPTR, "reduction is NULL");
    if (code == OK)
        code = si_need_dtype(&op, INPUT, "input", floats);
    if (code == OK)
        code = si_need_dtype(&op, TARGET, "target", "INT32 INT64");
    if (code == OK && op.t[WEIGHT].present)
        code = si_need_dtype(&op, WEIGHT, "weight", "FLOAT");
    for (int i = LOSS; i <= LSE && code == OK; i++)
        code = need_equal(&op, i, INPUT);
    if (code == OK && op.t[INPUT].rank != 2)
        code = si_fail(NN_TILING, "input has rank %d", op.t[INPUT].rank);
    int64_t N = op.t[INPUT].dims[0], C = op.t[INPUT].dims[1];
    if (code == OK && C == 0)
        code = si_fail(NN_TILING, "input has no classes");
    if (code == OK)
        code = find_reduction(&op, reduction);
    if (code == OK && op.t[TARGET].dtype == INT32 && si_soc_in("910B 910_93"))
        code = si_fail(NN_TILING, "target is INT32");
    if (code == OK)
        code = need_shape(&op, TARGET, "target", 1, N, 0);
    if (code == OK)
        code = need_shape(&op, WEIGHT, "weight", 1, C, 0);
    if (code == OK)
        code = need_shape(&op, LOSS, "lossOut", 1, op.dim == NONE ? N : 1, 0);
    if (code == OK)
        code = need_shape(&op, LOG_PROB, "logProbOut", 2, N, C);
    if (code == OK)
        code = need_shape(&op, ZLOSS, "zlossOut", 1, op.dim == NONE ? N : 1, 0);
    if (code == OK)
        code = need_shape(&op, LSE, "lseForZlossOut", 1, N, 0);
    if (code == OK)
        code = check_smoothing(smoothing, 1);
    op.workspace = 4096 + (uint64_t)(N % 100000) / 512 * 512;
    return si_finish(&op, code, workspace_size, executor);
}

PHASE_2(aclnnCrossEntropyLoss)

/* --- CrossEntropyLossGrad ----------------------------------------------------------------------------------------- */

enum { G_LOSS, G_LOG_PROB, G_TARGET, G_WEIGHT, G_ZLOSS, G_LSE, G_OUT };

static void backward(struct operation *op, char *workspace)
{
    (void)workspace;
    int64_t N = op->t[G_LOG_PROB].dims[0], C = op->t[G_LOG_PROB].dims[1];
    double *p = si_gather(&op->t[G_LOG_PROB]), *target = si_gather(&op->t[G_TARGET]), *grad = si_gather(&op->t[G_LOSS]);
    double *weight = op->t[G_WEIGHT].present ? si_gather(&op->t[G_WEIGHT]) : NULL;
    double *of_rows = si_allocate((uint64_t)N, sizeof *of_rows);
    double divisor = weights_of(op, target, weight, N, C, of_rows);
    for (int64_t i = 0; i < N; i++) {
        double g = of_rows[i] * (op->dim == NONE ? grad[i] : op->dim == MEAN ? grad[0] / divisor : grad[0]);
        for (int64_t j = 0; j < C; j++) /* of ignored rows, too: 0 times NaN is NaN */
            p[i * C + j] = (float)g * ((float)exp(p[i * C + j]) - (j == (int64_t)target[i] ? 1 : 0));
    }
    si_scatter(&op->t[G_OUT], p);
    free(p);
    free(target);
    free(grad);
    free(weight);
    free(of_rows);
}

int aclnnCrossEntropyLossGradGetWorkspaceSize(const void *grad_loss, const void *log_prob, const void *target,
                                              const void *weight, const void *grad_zloss, const void *lse, char *reduction,
                                              int64_t ignore_index, double smoothing, double zloss_scale, void *out,
                                              uint64_t *workspace_size, void **executor);
int aclnnCrossEntropyLossGradGetWorkspaceSize(const void *grad_loss, const void *log_prob, const void *target,
                                              const void *weight, const void *grad_zloss, const void *lse, char *reduction,
                                              int64_t ignore_index, double smoothing, double zloss_scale, void *out,
                                              uint64_t *workspace_size, void **executor)
{
    (void)zloss_scale;
    struct operation op = {.name = "aclnnCrossEntropyLossGrad",
                           .kernel = backward,
                           .count = 7,
                           .written = 1u << G_OUT,
                           .vocab_start = ignore_index};
    const void *const tensors[] = {grad_loss, log_prob, target, weight, grad_zloss, lse, out};
    int code = si_prepare(&op, "aclnnCrossEntropyLossGradGetWorkspaceSize", tensors, workspace_size, executor);
    if (code == OK)
        code = need_all(&op, (const int[]){G_LOSS, G_LOG_PROB, G_TARGET, G_OUT}, 4);
    if (code == OK && !reduction)
        code = si_fail(NN_NULLPTR, "reduction is NULL");
    if (code == OK)
        code = si_need_dtype(&op, G_LOG_PROB, "logProb", floats);
    if (code == OK)
        code = si_need_dtype(&op, G_TARGET, "target", "INT64");
    if (code == OK && op.t[G_WEIGHT].present)
        code = si_need_dtype(&op, G_WEIGHT, "weight", "FLOAT");
    if (code == OK)
        code = need_equal(&op, G_LOSS, G_LOG_PROB);
    if (code == OK)
        code = need_equal(&op, G_OUT, G_LOG_PROB);
    if (code == OK && op.t[G_LOG_PROB].rank != 2)
        code = si_fail(NN_TILING, "logProb has rank %d", op.t[G_LOG_PROB].rank);
    int64_t N = op.t[G_LOG_PROB].dims[0], C = op.t[G_LOG_PROB].dims[1];
    if (code == OK)
        code = find_reduction(&op, reduction);
    if (code == OK && (op.t[G_ZLOSS].present || op.t[G_LSE].present))
        code = si_fail(NN_TILING, "the z-loss is not supported");
    if (code == OK)
        code = op.dim == NONE ? need_shape(&op, G_LOSS, "gradLoss", 1, N, 0)
                              : need_shape(&op, G_LOSS, "gradLoss", op.t[G_LOSS].rank ? 1 : 0, 1, 0);
    if (code == OK)
        code = need_shape(&op, G_TARGET, "target", 1, N, 0);
    if (code == OK)
        code = need_shape(&op, G_WEIGHT, "weight", 1, C, 0);
    if (code == OK)
        code = need_shape(&op, G_OUT, "out", 2, N, C);
    if (code == OK)
        code = check_smoothing(smoothing, 0);
    op.workspace = 8192;
    return si_finish(&op, code, workspace_size, executor);
}

PHASE_2(aclnnCrossEntropyLossGrad)

/* --- SoftmaxCrossEntropyWithLogits -------------------------------------------------------------------------------- */

enum { FEATURES, LABELS, DENSE_LOSS, BACKPROP };

static void dense(struct operation *op, char *workspace)
{
    (void)workspace;
    int64_t N = op->t[FEATURES].dims[0], C = op->t[FEATURES].dims[1];
    double *z = si_gather(&op->t[FEATURES]), *labels = si_gather(&op->t[LABELS]);
    double *losses = si_allocate((uint64_t)N, sizeof *losses);
    for (int64_t i = 0; i < N; i++) {
        double *row = z + i * C, largest = -INFINITY, sum = 0;
        for (int64_t j = 0; j < C; j++)
            if (isnan(row[j]) || row[j] > largest)
                largest = row[j];
        for (int64_t j = 0; j < C; j++)
            sum += exp(row[j] - largest);
        for (int64_t j = 0; j < C; j++) {
            losses[i] -= labels[i * C + j] * (row[j] - largest - log(sum));
            row[j] = (float)(exp(row[j] - largest) / sum) - labels[i * C + j];
        }
    }
    si_scatter(&op->t[DENSE_LOSS], losses);
    si_scatter(&op->t[BACKPROP], z);
    free(z);
    free(labels);
    free(losses);
}

int aclnnSoftmaxCrossEntropyWithLogitsGetWorkspaceSize(const void *features, const void *labels, void *loss, void *backprop,
                                                       uint64_t *workspace_size, void **executor);
int aclnnSoftmaxCrossEntropyWithLogitsGetWorkspaceSize(const void *features, const void *labels, void *loss, void *backprop,
                                                       uint64_t *workspace_size, void **executor)
{
    struct operation op = {.name = "aclnnSoftmaxCrossEntropyWithLogits",
                           .kernel = dense,
                           .count = 4,
                           .written = 1u << DENSE_LOSS | 1u << BACKPROP};
    const void *const tensors[] = {features, labels, loss, backprop};
    int code = si_prepare(&op, "aclnnSoftmaxCrossEntropyWithLogitsGetWorkspaceSize", tensors, workspace_size, executor);
    if (code == OK)
        code = need_all(&op, (const int[]){FEATURES, LABELS, DENSE_LOSS, BACKPROP}, 4);
    if (code == OK)
        code = si_need_dtype(&op, FEATURES, "features", floats);
    for (int i = LABELS; i <= BACKPROP && code == OK; i++)
        code = need_equal(&op, i, FEATURES);
    if (code == OK && op.t[FEATURES].rank != 2)
        code = si_fail(NN_TILING, "features has rank %d", op.t[FEATURES].rank);
    int64_t N = op.t[FEATURES].dims[0], C = op.t[FEATURES].dims[1];
    if (code == OK)
        code = need_shape(&op, LABELS, "labels", 2, N, C);
    if (code == OK)
        code = need_shape(&op, DENSE_LOSS, "loss", 1, N, 0);
    if (code == OK)
        code = need_shape(&op, BACKPROP, "backprop", 2, N, C);
    op.workspace = 2048;
    return si_finish(&op, code, workspace_size, executor);
}

PHASE_2(aclnnSoftmaxCrossEntropyWithLogits)
