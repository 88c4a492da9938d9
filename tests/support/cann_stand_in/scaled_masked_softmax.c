/* Test double of the operators scaled masked softmax, forward and backward. See stand_in.h. */
#include "stand_in.h"

#include <math.h>
#include <stdlib.h>

/* Element of the mask for each line (of S2 elements) of the tensor: dimensions 0 and 1 may be 1 there. */
static int64_t mask_line(const struct tensor *t, const struct tensor *mask, int64_t line)
{
    int64_t s1 = line % t->dims[2], n = line / t->dims[2] % t->dims[1], b = line / t->dims[2] / t->dims[1];
    n = mask->dims[1] == 1 ? 0 : n;
    b = mask->dims[0] == 1 ? 0 : b;
    return ((b * mask->dims[1] + n) * mask->dims[2] + s1) * mask->dims[3];
}

static int64_t lines(const struct tensor *t) { return t->dims[0] * t->dims[1] * t->dims[2]; }

/* Masked elements are filled with -10000, so that a row that is masked as a whole is uniform. */
static void forward(struct operation *op, char *workspace)
{
    (void)workspace;
    const struct tensor *t = &op->t[0];
    double *x = si_gather(t), *mask = si_gather(&op->t[1]);
    int64_t n = t->dims[3];
    for (int64_t line = 0; line < lines(t); line++) {
        double *row = x + line * n, largest = -INFINITY, sum = 0;
        const double *masked = mask + mask_line(t, &op->t[1], line);
        for (int64_t j = 0; j < n; j++) {
            /* float16 is multiplied in float16 on the device */
            float scaled = (float)row[j] * op->scale;
            row[j] = masked[j] != 0 ? -10000 : t->dtype == FLOAT16 ? si_round_to(FLOAT16, scaled) : scaled;
            if (isnan(row[j]) || row[j] > largest)
                largest = row[j];
        }
        for (int64_t j = 0; j < n; j++)
            sum += exp(row[j] - largest);
        for (int64_t j = 0; j < n; j++)
            row[j] = exp(row[j] - largest) / sum;
    }
    si_scatter(&op->t[2], x);
    free(x);
    free(mask);
}

/* The result has the type of grad_output: an `out` of another type is relabelled, and filled with bytes of that type.
 * Not deterministic by default: where the double is told to vary, the order of the sum changes from launch to launch. */
static void backward(struct operation *op, char *workspace)
{
    (void)workspace;
    static bool turned;
    turned = si_varying() && !op->deterministic && !turned;
    const struct tensor *t = &op->t[0];
    double *g = si_gather(t), *y = si_gather(&op->t[1]), *mask = si_gather(&op->t[2]);
    int64_t n = t->dims[3];
    for (int64_t line = 0; line < lines(t); line++) {
        const double *masked = mask + mask_line(t, &op->t[2], line);
        double sum = 0;
        float turned_sum = 0;
        for (int64_t j = line * n; j < (line + 1) * n; j++)
            sum += (float)(g[j] * y[j]);
        for (int64_t j = (line + 1) * n; turned && j-- > line * n;)
            turned_sum += (float)(g[j] * y[j]);
        sum = turned ? turned_sum : sum;
        for (int64_t j = line * n; j < (line + 1) * n; j++) {
            float difference = (float)(g[j] * y[j]) - (float)((float)sum * y[j]);
            g[j] = masked[j - line * n] != 0 ? 0 : difference * op->scale;
        }
    }
    struct tensor out = op->t[3];
    out.dtype = t->dtype;
    si_scatter(&out, g);
    free(g);
    free(y);
    free(mask);
}

/* The tensor of each role, by index; the mask stands before the output. */
static int phase_1(struct operation *op, const char *function, const void *const *tensors, bool fix_triu_mask,
                   uint64_t *workspace_size, void **executor)
{
    int mask = op->count - 2, out = op->count - 1;
    int code = si_prepare(op, function, tensors, workspace_size, executor);
    for (int i = 0; i < op->count && code == OK; i++)
        code = si_need(op, i, "a tensor");
    const char *types = si_soc_in("310P") ? "FLOAT FLOAT16" : "FLOAT FLOAT16 BF16";
    for (int i = 0; i < mask && code == OK; i++) {
        code = si_need_dtype(op, i, "a tensor", types);
        if (code == OK && op->t[i].dtype != op->t[0].dtype)
            code = si_fail(NN_INVALID, "grad_output and y differ in type");
    }
    if (code == OK)
        code = si_need_dtype(op, mask, "mask", "BOOL");
    if (code == OK)
        code = si_need_dtype(op, out, "out", types);
    const int64_t *dims = op->t[0].dims, *mask_dims = op->t[mask].dims, limit = si_soc_in("950") ? 8192 : 4096;
    for (int i = 0; i < op->count && code == OK; i++) {
        if (op->t[i].rank != 4)
            code = si_fail(NN_INVALID, "tensor %d has rank %d, not 4", i, op->t[i].rank);
        else if (i != mask && !si_same_shape(&op->t[i], &op->t[0]))
            code = si_fail(NN_INVALID, "tensor %d has another shape than the first", i);
    }
    for (int k = 0; k < 4 && code == OK; k++) {
        if (dims[k] == 0)
            code = si_fail(NN_INVALID, "dimension %d is 0", k);
        else if (mask_dims[k] != dims[k] && !(k < 2 && mask_dims[k] == 1))
            code = si_fail(NN_INVALID, "dimension %d of the mask is %lld", k, (long long)mask_dims[k]);
    }
    if (code == OK && dims[3] > limit)
        code = si_fail(NN_INVALID, "last dimension %lld, at most %lld on %s", (long long)dims[3], (long long)limit,
                       si_soc());
    if (code == OK && fix_triu_mask)
        code = si_fail(NN_INVALID, "fixTriuMask must be false");
    if (code == OK && op->t[out].dtype != op->t[0].dtype) {
        si_violation("out is %s, the result is %s and is written there all the same", si_dtype_name(op->t[out].dtype),
                     si_dtype_name(op->t[0].dtype));
        if (si_size(op->t[out].dtype) < si_size(op->t[0].dtype))
            code = NN_INVALID; /* the device writes beyond its end */
    }
    op->written = 1u << out;
    op->keeps_executor_without_workspace = true;
    op->workspace = code ? 0 : (uint64_t)(1024 + dims[3] * 4) / 64 * 64;
    return si_finish(op, code, workspace_size, executor);
}

int aclnnScaledMaskedSoftmaxGetWorkspaceSize(const void *x, const void *mask, double scale, bool fix_triu_mask, void *y,
                                             uint64_t *workspace_size, void **executor);
int aclnnScaledMaskedSoftmaxGetWorkspaceSize(const void *x, const void *mask, double scale, bool fix_triu_mask, void *y,
                                             uint64_t *workspace_size, void **executor)
{
    struct operation op = {.name = "aclnnScaledMaskedSoftmax", .kernel = forward, .count = 3, .scale = (float)scale};
    return phase_1(&op, "aclnnScaledMaskedSoftmaxGetWorkspaceSize", (const void *const[]){x, mask, y}, fix_triu_mask,
                   workspace_size, executor);
}

int aclnnScaledMaskedSoftmaxBackwardGetWorkspaceSize(const void *grad_output, const void *y, const void *mask,
                                                     double scale, bool fix_triu_mask, void *out,
                                                     uint64_t *workspace_size, void **executor);
int aclnnScaledMaskedSoftmaxBackwardGetWorkspaceSize(const void *grad_output, const void *y, const void *mask,
                                                     double scale, bool fix_triu_mask, void *out,
                                                     uint64_t *workspace_size, void **executor)
{
    struct operation op = {
        .name = "aclnnScaledMaskedSoftmaxBackward", .kernel = backward, .count = 4, .scale = (float)scale};
    return phase_1(&op, "aclnnScaledMaskedSoftmaxBackwardGetWorkspaceSize", (const void *const[]){grad_output, y, mask, out},
                   fix_triu_mask, workspace_size, executor);
}

PHASE_2(aclnnScaledMaskedSoftmax)
PHASE_2(aclnnScaledMaskedSoftmaxBackward)
