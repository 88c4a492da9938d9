/* Test double of the fused linear cross-entropy operators. BT tokens, hidden size H, V vocabulary rows. See stand_in.h. */
#include "stand_in.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

static uint64_t round_up(int64_t bytes) { return (uint64_t)(bytes + 511) / 512 * 512; }

/* result[m,n] = a[m,k] @ b[n,k].T, accumulated in double */
static void multiply_transposed(const float *a, const float *b, double *result, int64_t m, int64_t n, int64_t k)
{
    for (int64_t i = 0; i < m; i++)
        for (int64_t j = 0; j < n; j++) {
            double sum = 0;
            for (int64_t l = 0; l < k; l++)
                sum += (double)a[i * k + l] * b[j * k + l];
            result[i * n + j] = sum;
        }
}

/* result[m,n] = a[m,k] @ b[k,n], accumulated in double; a's element (i, l) is at i * row + l * column */
static void multiply(const float *a, int64_t row, int64_t column, const float *b, double *result, int64_t m, int64_t n,
                     int64_t k)
{
    memset(result, 0, (size_t)(m * n) * sizeof *result);
    for (int64_t i = 0; i < m; i++)
        for (int64_t l = 0; l < k; l++) {
            double factor = a[i * row + l * column];
            for (int64_t j = 0; j < n; j++)
                result[i * n + j] += factor * b[l * n + j];
        }
}

/* --- FusedLinearCrossEntropyLossGrad ------------------------------------------------------------------------------ */

enum { GRAD, INPUT, WEIGHT, TARGET_MASK, MASKED_TARGET, LOGITS_MAX, SUM_EXP, SOFTMAX, INPUT_GRAD, WEIGHT_GRAD };

/* P[BT,V] before the -1: given, or recomputed. */
static double *probabilities(struct operation *op, const float *input, const float *weight, int64_t BT, int64_t V, int64_t H)
{
    if (op->t[SOFTMAX].present)
        return si_gather(&op->t[SOFTMAX]);
    double *P = si_allocate((uint64_t)(BT * V), sizeof *P);
    double *largest = si_gather(&op->t[LOGITS_MAX]), *sum = si_gather(&op->t[SUM_EXP]);
    multiply_transposed(input, weight, P, BT, V, H);
    for (int64_t i = 0; i < BT; i++)
        for (int64_t j = 0; j < V; j++)
            P[i * V + j] = (float)exp((float)P[i * V + j] - largest[i]) / sum[i];
    free(largest);
    free(sum);
    return P;
}

/* Rows whose grad is 0 take part like all others: NaN * 0 is NaN here. */
static void gradient(struct operation *op, char *workspace)
{
    (void)workspace;
    int64_t BT = op->t[INPUT].dims[0], H = op->t[INPUT].dims[1], V = op->t[WEIGHT].dims[0];
    int dtype = op->t[INPUT].dtype;
    if (BT == 0 || V == 0)
        return; /* the device leaves both results unwritten */
    float *input = si_gather_float(&op->t[INPUT]), *weight = si_gather_float(&op->t[WEIGHT]);
    double *grad = si_gather(&op->t[GRAD]), *mask = si_gather(&op->t[TARGET_MASK]);
    double *target = si_gather(&op->t[MASKED_TARGET]);
    double *P = probabilities(op, input, weight, BT, V, H);
    float *tile = si_allocate((uint64_t)(BT * V), sizeof *tile);
    for (int64_t i = 0; i < BT; i++) {
        bool masked = (int)mask[i / 8] >> (i % 8) & 1;
        if (target[i] >= 0 && target[i] < (double)V)
            P[i * V + (int64_t)target[i]] -= !masked;
        else {
            /* The device checks nothing: it forgets the -1, or, with a given softmax, writes out of bounds (also on
             * masked rows, where it subtracts 0). */
            si_lock();
            si_violation("%s: target %.0f of row %lld is not in [0, %lld)", op->name, target[i], (long long)i, (long long)V);
            si_unlock();
        }
        for (int64_t j = i * V; j < (i + 1) * V; j++) {
            P[j] *= grad[i];
            tile[j] = si_round_to(dtype, (float)P[j]); /* before both products, also in float16 */
        }
    }
    if (op->t[SOFTMAX].present && si_contiguous(&op->t[SOFTMAX]))
        si_scatter(&op->t[SOFTMAX], P); /* computed in place: the argument is destroyed */
    double *result = si_allocate((uint64_t)((BT > V ? BT : V) * H), sizeof *result);
    multiply(tile, V, 1, weight, result, BT, H, V);
    si_scatter(&op->t[INPUT_GRAD], result);
    multiply(tile, 1, V, input, result, V, H, BT);
    si_scatter(&op->t[WEIGHT_GRAD], result);
    free(input);
    free(weight);
    free(grad);
    free(mask);
    free(target);
    free(P);
    free(tile);
    free(result);
}

static int check_label_smoothing(float value)
{
    return value == 0 ? OK : si_fail(NN_INVALID, "label smoothing %g, only 0 is supported", (double)value);
}

static int check_gradient(struct operation *op, float label_smoothing)
{
    static const char *const half = "FLOAT16 BF16";
    static const char *const names[] = {"grad", "input", "weight", "targetMask", "maskedTarget"};
    int code = OK;
    if (!op->t[SOFTMAX].present && !(op->t[LOGITS_MAX].present && op->t[SUM_EXP].present))
        return si_fail(NN_NULLPTR, "neither softmax nor both of logitsMax and sumExpLogits");
    for (int i = 0; i < 5 && code == OK; i++)
        code = si_need(op, i, names[i]);
    if (code == OK && (code = si_need(op, INPUT_GRAD, "inputGradOut")) == OK)
        code = si_need(op, WEIGHT_GRAD, "weightGradOut");
    if (code)
        return code;
    if (!si_soc_in("910B 910_93"))
        return si_fail(NN_RUNTIME, "not on %s", si_soc());
    if (op->t[SOFTMAX].present) /* the others are not looked at */
        op->t[LOGITS_MAX].present = op->t[SUM_EXP].present = false;
    int64_t BT = op->t[GRAD].dims[0], V = op->t[WEIGHT].dims[0], H = op->t[WEIGHT].dims[1];
    const struct si_expectation expected[] = {
        {GRAD, "grad", "FLOAT", 1, {-1, 0}},
        {INPUT, "input", half, 2, {BT, H}},
        {WEIGHT, "weight", half, 2, {-1, -1}},
        {TARGET_MASK, "targetMask", "UINT8", 1, {-1, 0}},
        {MASKED_TARGET, "maskedTarget", "INT32 INT64", 1, {BT, 0}},
        {LOGITS_MAX, "logitsMax", "FLOAT", 1, {BT, 0}},
        {SUM_EXP, "sumExpLogits", "FLOAT", 1, {BT, 0}},
        {SOFTMAX, "softmax", "FLOAT", 2, {BT, V}},
        {INPUT_GRAD, "inputGradOut", half, 2, {BT, H}},
        {WEIGHT_GRAD, "weightGradOut", half, 2, {V, H}},
    };
    enum { COUNT = sizeof expected / sizeof *expected };
    code = si_check_dtypes(op, expected, COUNT);
    if (code == OK)
        code = si_check_equal_dtypes(op, INPUT, WEIGHT);
    if (code == OK)
        code = si_check_equal_dtypes(op, INPUT, INPUT_GRAD);
    if (code == OK)
        code = si_check_equal_dtypes(op, INPUT, WEIGHT_GRAD);
    if (code == OK)
        code = check_label_smoothing(label_smoothing);
    if (code == OK)
        code = si_check_shapes(op, expected, COUNT, NN_INVALID);
    if (code == OK && op->t[TARGET_MASK].dims[0] * 8 < BT)
        code = si_fail(NN_INVALID, "targetMask has fewer than %lld bits", (long long)BT);
    if (code == OK && op->t[SOFTMAX].present) {
        if (V && V < 128)
            code = si_fail(NN_INVALID, "V is %lld, at least 128 with softmax", (long long)V);
        else if (V > 24560 || BT > 65536)
            code = si_fail(NN_INNER_NULLPTR, "V %lld, BT %lld: too large with softmax", (long long)V, (long long)BT);
    }
    if (code == OK && H > 65535)
        code = si_fail(NN_INNER_NULLPTR, "H %lld is too large", (long long)H);
    op->workspace = 16384 + round_up(BT * (V < 1024 ? V : 1024) * 4) + round_up(H * 8);
    return code;
}

int aclnnFusedLinearCrossEntropyLossGradGetWorkspaceSize(
    const void *grad, const void *input, const void *weight, const void *target_mask, const void *masked_target,
    float label_smoothing, const void *logits_max, const void *sum_exp_logits, const void *softmax, void *input_grad,
    void *weight_grad, uint64_t *workspace_size, void **executor);
int aclnnFusedLinearCrossEntropyLossGradGetWorkspaceSize(
    const void *grad, const void *input, const void *weight, const void *target_mask, const void *masked_target,
    float label_smoothing, const void *logits_max, const void *sum_exp_logits, const void *softmax, void *input_grad,
    void *weight_grad, uint64_t *workspace_size, void **executor)
{
    struct operation op = {.name = "aclnnFusedLinearCrossEntropyLossGrad", .kernel = gradient, .count = 10};
    const void *const tensors[] = {grad,       input,          weight,  target_mask, masked_target,
                                   logits_max, sum_exp_logits, softmax, input_grad,  weight_grad};
    int code = si_prepare(&op, "aclnnFusedLinearCrossEntropyLossGradGetWorkspaceSize", tensors, workspace_size, executor);
    if (code == OK)
        code = check_gradient(&op, label_smoothing);
    op.written = 1u << SOFTMAX | 1u << INPUT_GRAD | 1u << WEIGHT_GRAD;
    return si_finish(&op, code, workspace_size, executor);
}

PHASE_2(aclnnFusedLinearCrossEntropyLossGrad)

/* --- FusedLinearOnlineMaxSum -------------------------------------------------------------------------------------- */

enum { O_INPUT, O_WEIGHT, O_TARGET, O_MAX, O_SUM, O_PREDICTED, O_MASK, O_MASKED, O_LOGITS };

static void online_max_sum(struct operation *op, char *workspace)
{
    (void)workspace;
    int64_t BT = op->t[O_INPUT].dims[0], H = op->t[O_INPUT].dims[1], V = op->t[O_WEIGHT].dims[0];
    float *input = si_gather_float(&op->t[O_INPUT]), *weight = si_gather_float(&op->t[O_WEIGHT]);
    double *target = si_gather(&op->t[O_TARGET]), *logits = si_allocate((uint64_t)(BT * V), sizeof *logits);
    double *results = si_allocate((uint64_t)(BT * 4), sizeof *results);
    double *largest = results, *sum = results + BT, *predicted = results + 2 * BT, *masked_target = results + 3 * BT;
    int64_t bytes = (BT + 7) / 8;
    double *mask = si_allocate((uint64_t)bytes, sizeof *mask);
    for (int64_t i = 0; i < bytes; i++)
        mask[i] = 0xff; /* the bits after the last row stay dirty */
    multiply_transposed(input, weight, logits, BT, V, H);
    for (int64_t i = 0; i < BT; i++) {
        double *row = logits + i * V;
        largest[i] = -INFINITY;
        for (int64_t j = 0; j < V; j++) {
            row[j] = si_round_to(op->t[O_INPUT].dtype, (float)row[j]); /* before anything is made of them */
            if (isnan(row[j]) || row[j] > largest[i])
                largest[i] = row[j];
        }
        for (int64_t j = 0; j < V; j++)
            sum[i] += exp(row[j] - largest[i]);
        /* ids and bounds are compared as float32; the end is exclusive */
        float id = (float)target[i], start = (float)op->vocab_start, end = (float)op->vocab_end;
        bool masked = !(id >= start && id < end);
        int64_t local = masked ? 0 : (int64_t)(id - start);
        local = local < V ? local : V - 1;
        masked_target[i] = (double)local;
        predicted[i] = masked ? 0 : row[local] - largest[i];
        if (!masked)
            mask[i / 8] = (int)mask[i / 8] & ~(1 << i % 8);
    }
    const double *const values[] = {largest, sum, predicted, mask, masked_target, logits};
    for (int i = 0; i < 6; i++)
        if (op->t[O_MAX + i].present)
            si_scatter(&op->t[O_MAX + i], values[i]);
    free(input);
    free(weight);
    free(target);
    free(logits);
    free(results);
    free(mask);
}

static int check_online(struct operation *op)
{
    static const char *const half = "FLOAT16 BF16";
    int code = si_need_first(op, O_LOGITS);
    if (code)
        return code;
    int64_t BT = op->t[O_INPUT].dims[0], H = op->t[O_INPUT].dims[1], V = op->t[O_WEIGHT].dims[0];
    const struct si_expectation expected[] = {
        {O_INPUT, "input", half, 2, {-1, -1}},
        {O_WEIGHT, "weight", half, 2, {-1, H}},
        {O_TARGET, "target", "INT32 INT64", 1, {BT, 0}},
        {O_MAX, "logitsMaxLocalOut", "FLOAT", 1, {BT, 0}},
        {O_SUM, "sumExpLogitsLocalOut", "FLOAT", 1, {BT, 0}},
        {O_PREDICTED, "predictedLogitsLocalOut", "FLOAT", 1, {BT, 0}},
        {O_MASK, "targetMaskOut", "UINT8", 1, {(BT + 7) / 8, 0}},
        {O_MASKED, "maskedTargetOut", "INT32 INT64", 1, {BT, 0}},
        {O_LOGITS, "vocabParallelLogitsOutOptional", half, 2, {BT, V}},
    };
    enum { COUNT = sizeof expected / sizeof *expected };
    code = si_check_dtypes(op, expected, COUNT);
    if (code == OK)
        code = si_check_equal_dtypes(op, O_INPUT, O_WEIGHT);
    if (code == OK)
        code = si_check_equal_dtypes(op, O_TARGET, O_MASKED);
    if (code == OK)
        code = si_check_equal_dtypes(op, O_INPUT, O_LOGITS);
    if (code == OK)
        code = si_check_shapes(op, expected, COUNT, NN_INVALID);
    if (code == OK && (V == 0 || H > 65534))
        code = si_fail(NN_INVALID, "V %lld, H %lld", (long long)V, (long long)H);
    if (code == OK && !(0 <= op->vocab_start && op->vocab_start <= op->vocab_end && op->vocab_end - op->vocab_start <= V))
        code = si_fail(NN_INVALID, "vocabulary [%lld, %lld) with V %lld", (long long)op->vocab_start,
                       (long long)op->vocab_end, (long long)V);
    op->workspace = 8192 + round_up(BT * (V < 512 ? V : 512) * 2);
    return code;
}

int aclnnFusedLinearOnlineMaxSumGetWorkspaceSize(const void *input, const void *weight, const void *target,
                                                 int64_t vocab_start, int64_t vocab_end, void *logits_max,
                                                 void *sum_exp_logits, void *predicted, void *target_mask,
                                                 void *masked_target, void *logits, uint64_t *workspace_size,
                                                 void **executor);
int aclnnFusedLinearOnlineMaxSumGetWorkspaceSize(const void *input, const void *weight, const void *target,
                                                 int64_t vocab_start, int64_t vocab_end, void *logits_max,
                                                 void *sum_exp_logits, void *predicted, void *target_mask,
                                                 void *masked_target, void *logits, uint64_t *workspace_size,
                                                 void **executor)
{
    struct operation op = {.name = "aclnnFusedLinearOnlineMaxSum",
                           .kernel = online_max_sum,
                           .count = 9,
                           .written = 0x1f8,
                           .vocab_start = vocab_start,
                           .vocab_end = vocab_end};
    const void *const tensors[] = {input,     weight,      target,        logits_max, sum_exp_logits,
                                   predicted, target_mask, masked_target, logits};
    int code = si_prepare(&op, "aclnnFusedLinearOnlineMaxSumGetWorkspaceSize", tensors, workspace_size, executor);
    return si_finish(&op, code ? code : check_online(&op), workspace_size, executor);
}

PHASE_2(aclnnFusedLinearOnlineMaxSum)

/* --- FusedCrossEntropyLossWithMaxSum ------------------------------------------------------------------------------ */

enum { L_MAX, L_SUM, L_PREDICTED, L_INPUT, L_WEIGHT, L_LOGITS, L_LOSS, L_SOFTMAX };

static void loss(struct operation *op, char *workspace)
{
    (void)workspace;
    int64_t BT = op->t[L_MAX].dims[0];
    double *largest = si_gather(&op->t[L_MAX]), *sum = si_gather(&op->t[L_SUM]), *result = si_gather(&op->t[L_PREDICTED]);
    for (int64_t i = 0; i < BT; i++)
        result[i] = log(sum[i]) - result[i];
    if (op->t[L_LOGITS].present) {
        int64_t V = op->t[L_LOGITS].dims[1];
        double *logits = si_gather(&op->t[L_LOGITS]);
        for (int64_t i = 0; i < BT * V; i++)
            logits[i] = exp(logits[i] - largest[i / V]) / sum[i / V];
        si_scatter(&op->t[L_SOFTMAX], logits);
        free(logits);
    }
    si_scatter(&op->t[L_LOSS], result);
    free(largest);
    free(sum);
    free(result);
}

static int check_loss(struct operation *op, float label_smoothing)
{
    int code = si_need_first(op, 3);
    if (code == OK)
        code = si_need(op, L_LOSS, "lossOut");
    if (code == OK && op->t[L_LOGITS].present)
        code = si_need(op, L_SOFTMAX, "softMaxOutOptional, with vocabParallelLogitsOptional,");
    if (code)
        return code;
    int64_t BT = op->t[L_MAX].dims[0], V = op->t[L_LOGITS].dims[1];
    const struct si_expectation expected[] = {
        {L_MAX, "logitsMax", "FLOAT", 1, {-1, 0}},
        {L_SUM, "sumExpLogits", "FLOAT", 1, {BT, 0}},
        {L_PREDICTED, "predictedLogits", "FLOAT", 1, {BT, 0}},
        {L_LOGITS, "vocabParallelLogitsOptional", "FLOAT FLOAT16 BF16", 2, {BT, -1}},
        {L_LOSS, "lossOut", "FLOAT", 1, {BT, 0}},
        {L_SOFTMAX, "softMaxOutOptional", "FLOAT", 2, {BT, V}},
    };
    enum { COUNT = sizeof expected / sizeof *expected };
    if (!op->t[L_LOGITS].present)
        op->t[L_SOFTMAX].present = false; /* not looked at, and not written */
    code = si_check_dtypes(op, expected, COUNT);
    if (code == OK)
        code = si_check_shapes(op, expected, COUNT, NN_INVALID);
    if (code == OK)
        code = check_label_smoothing(label_smoothing);
    if (code == OK && BT == 0)
        code = si_fail(NN_TILING, "BT is 0");
    op->workspace = 2048 + round_up(BT);
    return code;
}

int aclnnFusedCrossEntropyLossWithMaxSumGetWorkspaceSize(const void *logits_max, const void *sum_exp_logits,
                                                         const void *predicted, float label_smoothing,
                                                         const void *input, const void *weight, const void *logits,
                                                         void *loss_out, void *softmax_out, uint64_t *workspace_size,
                                                         void **executor);
int aclnnFusedCrossEntropyLossWithMaxSumGetWorkspaceSize(const void *logits_max, const void *sum_exp_logits,
                                                         const void *predicted, float label_smoothing,
                                                         const void *input, const void *weight, const void *logits,
                                                         void *loss_out, void *softmax_out, uint64_t *workspace_size,
                                                         void **executor)
{
    struct operation op = {.name = "aclnnFusedCrossEntropyLossWithMaxSum",
                           .kernel = loss,
                           .count = 8,
                           .written = 1u << L_LOSS | 1u << L_SOFTMAX};
    const void *const tensors[] = {logits_max, sum_exp_logits, predicted, input, weight, logits, loss_out, softmax_out};
    int code = si_prepare(&op, "aclnnFusedCrossEntropyLossWithMaxSumGetWorkspaceSize", tensors, workspace_size, executor);
    return si_finish(&op, code ? code : check_loss(&op, label_smoothing), workspace_size, executor);
}

PHASE_2(aclnnFusedCrossEntropyLossWithMaxSum)
