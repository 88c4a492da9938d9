/* Test double of the losses of logits. N rows, C classes; a shard has V of them. See stand_in.h.
 *
 * As on the device: 16-bit logits are widened to float32, in which everything is computed, and each result is rounded
 * to the type of its tensor. The gradient starts from the rounded log-probabilities. */
#include "stand_in.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

static const char *const floats = "FLOAT FLOAT16 BF16";

/* --- arithmetic of a row ------------------------------------------------------------------------------------------ */

/* The row becomes its log-softmax, rounded to float32. */
static void log_softmax(double *row, int64_t count)
{
    double largest = -INFINITY, sum = 0;
    for (int64_t j = 0; j < count; j++)
        if (isnan(row[j]) || row[j] > largest)
            largest = row[j];
    for (int64_t j = 0; j < count; j++)
        sum += exp(row[j] - largest);
    for (int64_t j = 0; j < count; j++)
        row[j] = (float)(row[j] - largest - log(sum));
}

/* Targets are read exactly: a double does not hold every id. */
static int64_t *gather_targets(const struct tensor *t)
{
    int64_t count = si_numel(t), *values = si_allocate((uint64_t)count, sizeof *values);
    for (int64_t i = 0; i < count; i++)
        values[i] = (int64_t)si_number(si_element(t, t, i), t->dtype);
    return values;
}

/* The kernels of 950 take a negative index for "no label is ignored", as the documents do for all. */
static bool is_ignored(const struct operation *op, int64_t target)
{
    return target == op->ignore_index && (target >= 0 || !si_soc_in("950"));
}

static bool is_class(const struct operation *op, int64_t target, int64_t row, int64_t classes)
{
    bool right = target >= 0 && target < classes;
    if (!right) {
        si_lock();
        si_violation("%s: target %lld of row %lld is not in [0, %lld) and not ignored", op->name, (long long)target,
                     (long long)row, (long long)classes);
        si_unlock();
    }
    return right;
}

/* --- checks that both directions share ---------------------------------------------------------------------------- */

/* The documents of the loss and of its gradient promise nothing about strides, and the definitions in CANN 8.5 do not
 * ask for contiguous copies, as later ones do for inputs. */
static int check_contiguous(const struct operation *op)
{
    for (int i = 0; i < op->count; i++)
        if (op->t[i].present && !si_contiguous(&op->t[i]))
            return si_fail(NN_INVALID, "tensor %d is not contiguous", i);
    return OK;
}

static int set_reduction(struct operation *op, const char *reduction)
{
    static const char *const names[] = {[REDUCTION_NONE] = "none", [REDUCTION_SUM] = "sum", [REDUCTION_MEAN] = "mean"};
    for (op->reduction = REDUCTION_NONE; op->reduction <= REDUCTION_MEAN; op->reduction++)
        if (strcmp(reduction, names[op->reduction]) == 0)
            return OK;
    return si_fail(NN_TILING, "reduction \"%s\"", reduction);
}

static int check_extents(const struct operation *op, int logits)
{
    int64_t N = op->t[logits].dims[0], C = op->t[logits].dims[1];
    if (N == 0 || C == 0)
        return si_fail(NN_TILING, "N is %lld, C is %lld", (long long)N, (long long)C);
    if (op->ignore_index >= C)
        return si_fail(NN_TILING, "ignoreIndex %lld with C %lld", (long long)op->ignore_index, (long long)C);
    return OK;
}

/* What belongs to the z-loss is not looked at: torch_npu passes empty tensors where the documents name a length. */
static int64_t length_or_none(const struct tensor *t, int64_t documented) { return si_numel(t) ? documented : 0; }

static void check_z_loss(double scale, bool is_returned)
{
    if (scale != 0 || is_returned)
        si_violation("the z-loss is asked for, and not computed");
}

/* --- CrossEntropyLoss --------------------------------------------------------------------------------------------- */

enum { INPUT, TARGET, WEIGHT, LOSS, LOG_PROB, Z_LOSS, LSE };

/* zlossOut and lseForZlossOut are not written. */
static void loss(struct operation *op, char *workspace)
{
    (void)workspace;
    int64_t N = op->t[INPUT].dims[0], C = op->t[INPUT].dims[1], *target = gather_targets(&op->t[TARGET]);
    double *log_prob = si_gather(&op->t[INPUT]), *weight = op->t[WEIGHT].present ? si_gather(&op->t[WEIGHT]) : NULL;
    double *losses = si_allocate((uint64_t)N, sizeof *losses), sum = 0, weights = 0, smoothing = op->label_smoothing;
    for (int64_t i = 0; i < N; i++) {
        double *row = log_prob + i * C, smooth = 0;
        log_softmax(row, C);
        if (is_ignored(op, target[i]))
            continue;
        bool right = is_class(op, target[i], i, C);
        double factor = !right ? NAN : weight ? weight[target[i]] : 1;
        for (int64_t j = 0; j < C && smoothing > 0; j++)
            smooth -= (weight ? weight[j] : 1) * row[j];
        losses[i] = right ? -(1 - smoothing) * factor * row[target[i]] : NAN;
        losses[i] += smoothing > 0 ? smoothing / (double)C * smooth : 0;
        sum += losses[i];
        weights += factor;
    }
    if (op->reduction != REDUCTION_NONE)
        losses[0] = op->reduction == REDUCTION_MEAN ? (float)sum / (float)weights : sum;
    si_scatter(&op->t[LOSS], losses);
    si_scatter(&op->t[LOG_PROB], log_prob);
    free(target);
    free(log_prob);
    free(weight);
    free(losses);
}

static int check_loss(struct operation *op, const char *reduction)
{
    static const int required[] = {INPUT, TARGET, LOSS, LOG_PROB, Z_LOSS, LSE};
    int code = OK;
    for (size_t i = 0; i < sizeof required / sizeof *required && code == OK; i++)
        code = si_need(op, required[i], "a tensor");
    if (code == OK && !reduction)
        code = si_fail(NN_NULLPTR, "reduction is null");
    if (code)
        return code;
    int64_t N = op->t[INPUT].dims[0], C = op->t[INPUT].dims[1];
    bool is_reduced = strcmp(reduction, "none") != 0;
    const struct si_expectation expected[] = {
        {INPUT, "input", floats, 2, {-1, -1}},
        {TARGET, "target", "INT64", 1, {N}}, /* of the documents' INT32, 910B and 910_93 have no kernel */
        {WEIGHT, "weightOptional", "FLOAT", 1, {C}},
        {LOSS, "lossOut", floats, 1, {is_reduced ? 1 : N}},
        {LOG_PROB, "logProbOut", floats, 2, {N, C}},
        {Z_LOSS, "zlossOut", floats, 1, {length_or_none(&op->t[Z_LOSS], is_reduced ? 1 : N)}},
        {LSE, "lseForZlossOut", floats, 1, {length_or_none(&op->t[LSE], N)}},
    };
    enum { COUNT = sizeof expected / sizeof *expected };
    code = si_check_dtypes(op, expected, COUNT);
    for (int i = LOSS; i <= LSE && code == OK; i++)
        code = si_check_equal_dtypes(op, INPUT, i);
    if (code == OK)
        code = check_contiguous(op);
    if (code == OK)
        code = si_check_shapes(op, expected, COUNT, NN_TILING);
    if (code == OK)
        code = set_reduction(op, reduction);
    if (code == OK && !(op->label_smoothing >= 0 && op->label_smoothing <= 1))
        code = si_fail(NN_TILING, "labelSmoothing %g", (double)op->label_smoothing);
    return code ? code : check_extents(op, INPUT);
}

PHASE_1(CrossEntropyLoss,
        (const void *input, const void *target, const void *weight, const char *reduction, int64_t ignore_index,
         double label_smoothing, double lse_square_scale, bool return_z_loss, void *loss_out, void *log_prob,
         void *z_loss, void *lse))
{
    struct operation op = {.name = "aclnnCrossEntropyLoss",
                           .kernel = loss,
                           .count = 7,
                           .written = 1u << LOSS | 1u << LOG_PROB,
                           .ignore_index = ignore_index,
                           .label_smoothing = (float)label_smoothing,
                           .workspace = 16384 + 768};
    const void *const tensors[] = {input, target, weight, loss_out, log_prob, z_loss, lse};
    int code = si_prepare(&op, "aclnnCrossEntropyLossGetWorkspaceSize", tensors, workspace_size, executor);
    if (code == OK && (code = check_loss(&op, reduction)) == OK)
        check_z_loss(lse_square_scale, return_z_loss);
    return si_finish(&op, code, workspace_size, executor);
}

/* --- CrossEntropyLossGrad ----------------------------------------------------------------------------------------- */

enum { G_GRAD, G_LOG_PROB, G_TARGET, G_WEIGHT, G_GRAD_Z_LOSS, G_LSE, G_OUT };

/* Ids are compared in float32. What an ignored row has is multiplied with 0: NaN stays NaN. */
static void gradient(struct operation *op, char *workspace)
{
    (void)workspace;
    int64_t N = op->t[G_LOG_PROB].dims[0], C = op->t[G_LOG_PROB].dims[1], *target = gather_targets(&op->t[G_TARGET]);
    double *grad = si_gather(&op->t[G_GRAD]), *result = si_gather(&op->t[G_LOG_PROB]);
    double *weight = op->t[G_WEIGHT].present ? si_gather(&op->t[G_WEIGHT]) : NULL, weights = 0;
    double *factors = si_allocate((uint64_t)N, sizeof *factors);
    for (int64_t i = 0; i < N; i++) {
        bool ignored = (float)target[i] == (float)op->ignore_index && is_ignored(op, op->ignore_index);
        if (!ignored)
            factors[i] = !is_class(op, target[i], i, C) ? NAN : weight ? weight[target[i]] : 1;
        weights += factors[i];
    }
    for (int64_t i = 0; i < N; i++) {
        double upstream = op->reduction == REDUCTION_NONE   ? grad[i]
                          : op->reduction == REDUCTION_MEAN ? (float)(grad[0] / (float)weights)
                                                            : grad[0];
        float factor = (float)(upstream * factors[i]);
        for (int64_t j = i * C; j < (i + 1) * C; j++)
            result[j] = (float)((float)exp(result[j]) * factor);
        if (target[i] >= 0 && target[i] < C)
            result[i * C + target[i]] -= factor;
    }
    si_scatter(&op->t[G_OUT], result);
    free(target);
    free(grad);
    free(result);
    free(weight);
    free(factors);
}

static int check_gradient(struct operation *op, const char *reduction)
{
    static const int required[] = {G_GRAD, G_LOG_PROB, G_TARGET, G_OUT};
    int code = OK;
    for (size_t i = 0; i < sizeof required / sizeof *required && code == OK; i++)
        code = si_need(op, required[i], "a tensor");
    if (code == OK && !reduction)
        code = si_fail(NN_NULLPTR, "reduction is null");
    if (code)
        return code;
    int64_t N = op->t[G_LOG_PROB].dims[0], C = op->t[G_LOG_PROB].dims[1];
    bool is_reduced = strcmp(reduction, "none") != 0;
    int64_t rows = is_reduced ? 1 : N;
    int grad_rank = is_reduced ? op->t[G_GRAD].rank != 0 : 1; /* the documents name rank 0, torch_npu passes [1] */
    const struct si_expectation expected[] = {
        {G_GRAD, "gradLoss", floats, grad_rank, {rows}},
        {G_LOG_PROB, "logProb", floats, 2, {-1, -1}},
        {G_TARGET, "target", "INT64", 1, {N}},
        {G_WEIGHT, "weightOptional", "FLOAT", 1, {C}},
        {G_GRAD_Z_LOSS, "gradZlossOptional", floats, grad_rank, {length_or_none(&op->t[G_GRAD_Z_LOSS], rows)}},
        {G_LSE, "lseForZlossOptional", floats, 1, {length_or_none(&op->t[G_LSE], N)}},
        {G_OUT, "out", floats, 2, {N, C}},
    };
    enum { COUNT = sizeof expected / sizeof *expected };
    static const int alike[] = {G_LOG_PROB, G_GRAD_Z_LOSS, G_LSE, G_OUT};
    code = si_check_dtypes(op, expected, COUNT);
    for (size_t i = 0; i < sizeof alike / sizeof *alike && code == OK; i++)
        code = si_check_equal_dtypes(op, G_GRAD, alike[i]);
    if (code == OK)
        code = check_contiguous(op);
    if (code == OK)
        code = si_check_shapes(op, expected, COUNT, NN_TILING);
    if (code == OK)
        code = set_reduction(op, reduction);
    /* the kernels leave the result unwritten */
    if (code == OK && op->label_smoothing != 0)
        code = si_fail(NN_TILING, "labelSmoothing %g, only 0 is supported", (double)op->label_smoothing);
    return code ? code : check_extents(op, G_LOG_PROB);
}

PHASE_1(CrossEntropyLossGrad,
        (const void *grad, const void *log_prob, const void *target, const void *weight, const void *grad_z_loss,
         const void *lse, const char *reduction, int64_t ignore_index, double label_smoothing, double lse_square_scale,
         void *out))
{
    struct operation op = {.name = "aclnnCrossEntropyLossGrad",
                           .kernel = gradient,
                           .count = 7,
                           .written = 1u << G_OUT,
                           .ignore_index = ignore_index,
                           .label_smoothing = (float)label_smoothing,
                           .workspace = 16384 + 256};
    const void *const tensors[] = {grad, log_prob, target, weight, grad_z_loss, lse, out};
    int code = si_prepare(&op, "aclnnCrossEntropyLossGradGetWorkspaceSize", tensors, workspace_size, executor);
    const struct tensor *z = &op.t[G_GRAD_Z_LOSS], *squared = &op.t[G_LSE];
    if (code == OK && (code = check_gradient(&op, reduction)) == OK)
        check_z_loss(lse_square_scale, (z->present && si_numel(z)) || (squared->present && si_numel(squared)));
    return si_finish(&op, code, workspace_size, executor);
}

/* --- SoftmaxCrossEntropyWithLogits -------------------------------------------------------------------------------- */

enum { S_FEATURES, S_LABELS, S_LOSS, S_BACKPROP };

static void loss_of_labels(struct operation *op, char *workspace)
{
    (void)workspace;
    int64_t N = op->t[S_FEATURES].dims[0], C = op->t[S_FEATURES].dims[1];
    double *x = si_gather(&op->t[S_FEATURES]), *labels = si_gather(&op->t[S_LABELS]);
    double *losses = si_allocate((uint64_t)N, sizeof *losses);
    for (int64_t i = 0; i < N; i++) {
        log_softmax(x + i * C, C);
        for (int64_t j = i * C; j < (i + 1) * C; j++) {
            losses[i] -= labels[j] * x[j];
            x[j] = exp(x[j]) - labels[j];
        }
    }
    si_scatter(&op->t[S_LOSS], losses);
    si_scatter(&op->t[S_BACKPROP], x);
    free(x);
    free(labels);
    free(losses);
}

static int check_labels(struct operation *op)
{
    int code = si_need_first(op, op->count);
    if (code)
        return code;
    int64_t N = op->t[S_FEATURES].dims[0], C = op->t[S_FEATURES].dims[1];
    const struct si_expectation expected[] = {
        {S_FEATURES, "features", floats, 2, {-1, -1}},
        {S_LABELS, "labels", floats, 2, {N, C}},
        {S_LOSS, "loss", floats, 1, {N}},
        {S_BACKPROP, "backprop", floats, 2, {N, C}},
    };
    enum { COUNT = sizeof expected / sizeof *expected };
    code = si_check_dtypes(op, expected, COUNT);
    for (int i = S_LABELS; i <= S_BACKPROP && code == OK; i++)
        code = si_check_equal_dtypes(op, S_FEATURES, i);
    if (code == OK)
        code = si_check_shapes(op, expected, COUNT, NN_INVALID);
    op->nothing_to_do = code == OK && si_numel(&op->t[S_FEATURES]) == 0; /* the losses of C = 0 stay unwritten */
    return code;
}

PHASE_1(SoftmaxCrossEntropyWithLogits, (const void *features, void *labels, void *loss_out, void *backprop))
{
    struct operation op = {.name = "aclnnSoftmaxCrossEntropyWithLogits",
                           .kernel = loss_of_labels,
                           .count = 4,
                           .written = 1u << S_LOSS | 1u << S_BACKPROP,
                           .workspace = 2048};
    const void *const tensors[] = {features, labels, loss_out, backprop};
    int code = si_prepare(&op, "aclnnSoftmaxCrossEntropyWithLogitsGetWorkspaceSize", tensors, workspace_size, executor);
    return si_finish(&op, code ? code : check_labels(&op), workspace_size, executor);
}

/* --- CrossEntropySumExpAndIndexLogit ------------------------------------------------------------------------------ */

enum { V_LOGITS, V_TARGET, V_MAX, V_PREDICTED, V_SUM_EXP, V_EXP, V_OFFSET, V_MASK };

static void sums_of_shard(struct operation *op, char *workspace)
{
    (void)workspace;
    int64_t N = si_numel(&op->t[V_TARGET]), V = op->vocab_end - op->vocab_start;
    int64_t *target = gather_targets(&op->t[V_TARGET]);
    double *x = si_gather(&op->t[V_LOGITS]), *largest = si_gather(&op->t[V_MAX]);
    double *results = si_allocate((uint64_t)(N * 4), sizeof *results);
    double *predicted = results, *sums = results + N, *offset = results + 2 * N, *mask = results + 3 * N;
    for (int64_t i = 0; i < N; i++) {
        double *row = x + i * V;
        if (target[i] < 0) {
            si_lock();
            si_violation("%s: target %lld of row %lld is negative", op->name, (long long)target[i], (long long)i);
            si_unlock();
        }
        mask[i] = target[i] < op->vocab_start || target[i] >= op->vocab_end;
        offset[i] = mask[i] != 0 ? 0 : (double)(target[i] - op->vocab_start);
        predicted[i] = mask[i] != 0 ? 0 : row[(int64_t)offset[i]] - largest[i];
        for (int64_t j = 0; j < V; j++) {
            row[j] = (float)exp((float)(row[j] - largest[i]));
            sums[i] += row[j];
        }
    }
    const double *const values[] = {predicted, sums, x, offset, mask};
    for (int i = 0; i < 5; i++)
        si_scatter(&op->t[V_PREDICTED + i], values[i]);
    free(target);
    free(x);
    free(largest);
    free(results);
}

static int check_shard(struct operation *op)
{
    int code = si_need_first(op, op->count);
    if (code)
        return code;
    const struct tensor *logits = &op->t[V_LOGITS];
    int outer = logits->rank == 3 ? 2 : 1;
    const int64_t *dims = logits->dims, V = dims[outer];
    const struct si_expectation expected[] = {
        {V_LOGITS, "vocabParallelLogits", "FLOAT BF16", outer + 1, {-1, -1, -1}},
        {V_TARGET, "target", "INT32", outer, {dims[0], dims[1]}},
        {V_MAX, "globalLogitsMax", "FLOAT BF16", outer, {dims[0], dims[1]}},
        {V_PREDICTED, "predictedLogitsOut", "FLOAT", outer, {dims[0], dims[1]}},
        {V_SUM_EXP, "sumExpLogitsOut", "FLOAT", outer, {dims[0], dims[1]}},
        {V_EXP, "expLogitsOut", "FLOAT", outer + 1, {dims[0], dims[1], dims[2]}},
        {V_OFFSET, "targetOffsetOut", "INT32", outer, {dims[0], dims[1]}},
        {V_MASK, "targetMaskOut", "INT32", outer, {dims[0], dims[1]}},
    };
    enum { COUNT = sizeof expected / sizeof *expected };
    code = si_check_shapes(op, expected, COUNT, NN_INVALID);
    if (code == OK)
        code = si_check_dtypes(op, expected, COUNT);
    if (code == OK)
        code = si_check_equal_dtypes(op, V_LOGITS, V_MAX);
    int64_t N = si_numel(&op->t[V_TARGET]);
    if (code == OK && (op->vocab_start < 0 || op->vocab_end <= op->vocab_start || op->vocab_end - op->vocab_start != V))
        code = si_fail(NN_INVALID, "vocabulary [%lld, %lld) with V %lld", (long long)op->vocab_start,
                       (long long)op->vocab_end, (long long)V);
    if (code == OK && (V < 16 || V > 200000 || V % (logits->dtype == BF16 ? 16 : 8) || N < 1 || N > 32768))
        code = si_fail(NN_INVALID, "N %lld, V %lld of %s", (long long)N, (long long)V, si_dtype_name(logits->dtype));
    return code;
}

PHASE_1(CrossEntropySumExpAndIndexLogit,
        (const void *logits, const void *target, const void *largest, int64_t vocab_start, int64_t vocab_end,
         void *predicted, void *sum_exp, void *exp_logits, void *offset, void *mask))
{
    struct operation op = {.name = "aclnnCrossEntropySumExpAndIndexLogit",
                           .kernel = sums_of_shard,
                           .count = 8,
                           .written = 0xf8,
                           .vocab_start = vocab_start,
                           .vocab_end = vocab_end,
                           .workspace = 4096};
    const void *const tensors[] = {logits, target, largest, predicted, sum_exp, exp_logits, offset, mask};
    static const char *const function = "aclnnCrossEntropySumExpAndIndexLogitGetWorkspaceSize";
    int code = si_prepare(&op, function, tensors, workspace_size, executor);
    return si_finish(&op, code ? code : check_shard(&op), workspace_size, executor);
}
