/* Test double of the operators softmax and log-softmax, forward and backward. See stand_in.h.
 *
 * As on the device: the first phase stops at the first failed check, in the device's order; an empty tensor succeeds
 * before anything but NULL was looked at. */
#include "stand_in.h"

#include <math.h>
#include <stdlib.h>

/* --- arithmetic: every line along `dim`, in double, rounded to float at the end ----------------------------------- */

static void lines(const struct tensor *t, int64_t dim, int64_t *count, int64_t *length, int64_t *step)
{
    *length = t->rank ? t->dims[dim] : 1;
    *step = 1;
    for (int k = (int)dim + 1; k < t->rank; k++)
        *step *= t->dims[k];
    *count = si_numel(t) / *length;
}

static int64_t line_start(int64_t line, int64_t length, int64_t step) { return line / step * step * length + line % step; }

static void forward(struct operation *op, bool logarithm)
{
    double *x = si_gather(&op->t[0]);
    int64_t count, n, step;
    lines(&op->t[0], op->dim, &count, &n, &step);
    for (int64_t line = 0; line < count; line++) {
        double *row = x + line_start(line, n, step), largest = -INFINITY, sum = 0;
        for (int64_t j = 0; j < n; j++)
            if (isnan(row[j * step]) || row[j * step] > largest)
                largest = row[j * step];
        for (int64_t j = 0; j < n; j++)
            sum += exp(row[j * step] - largest);
        for (int64_t j = 0; j < n; j++) {
            double centred = row[j * step] - largest;
            row[j * step] = logarithm ? centred - log(sum) : exp(centred) / sum;
        }
    }
    si_scatter(&op->t[1], x);
    free(x);
}

/* The device's form of the softmax gradient: g*y - s*y. It differs from (g - s)*y where a product overflows. */
static void backward(struct operation *op, bool logarithm)
{
    double *g = si_gather(&op->t[0]), *y = si_gather(&op->t[1]);
    int64_t count, n, step;
    lines(&op->t[0], op->dim, &count, &n, &step);
    for (int64_t line = 0; line < count; line++) {
        int64_t start = line_start(line, n, step);
        double sum = 0;
        for (int64_t j = start; j < start + n * step; j += step)
            sum += logarithm ? g[j] : (float)(g[j] * y[j]);
        for (int64_t j = start; j < start + n * step; j += step)
            g[j] = logarithm ? g[j] - (float)sum * exp(y[j]) : (float)(g[j] * y[j]) - (float)((float)sum * y[j]);
    }
    si_scatter(&op->t[2], g);
    free(g);
    free(y);
}

static void softmax(struct operation *op, char *workspace)
{
    (void)workspace;
    forward(op, false);
}

static void log_softmax(struct operation *op, char *workspace)
{
    (void)workspace;
    forward(op, true);
}

static void softmax_backward(struct operation *op, char *workspace)
{
    (void)workspace;
    backward(op, false);
}

static void log_softmax_backward(struct operation *op, char *workspace)
{
    (void)workspace;
    backward(op, true);
}

/* --- checks ------------------------------------------------------------------------------------------------------- */

static const char *const types = "FLOAT FLOAT16 BF16";

static int check_dtypes(const struct operation *op)
{
    for (int i = 0; i < op->count; i++) {
        int code = si_need_dtype(op, i, "a tensor", types);
        if (code)
            return code;
        if (op->t[i].dtype != op->t[0].dtype)
            return si_fail(NN_INVALID, "tensor %d is %s, the first one %s", i, si_dtype_name(op->t[i].dtype),
                           si_dtype_name(op->t[0].dtype));
    }
    return OK;
}

static int check_shapes(const struct operation *op)
{
    for (int i = 1; i < op->count; i++)
        if (!si_same_shape(&op->t[i], &op->t[0]))
            return si_fail(NN_INVALID, "tensor %d has another shape than the first", i);
    return OK;
}

enum check { NO_CHECK, DTYPE, DIM, SHAPE };

static int phase_1(struct operation *op, const char *function, const void *const *tensors, const enum check order[3],
                   uint64_t *workspace_size, void **executor)
{
    int code = si_prepare(op, function, tensors, workspace_size, executor);
    for (int i = 0; i < op->count && code == OK; i++)
        code = si_need(op, i, "a tensor");
    op->nothing_to_do = code == OK && si_numel(&op->t[0]) == 0;
    for (int i = 0; i < 3 && code == OK && !op->nothing_to_do; i++)
        code = order[i] == DTYPE ? check_dtypes(op) : order[i] == DIM ? si_check_dim(op) : check_shapes(op);
    op->written = 1u << (op->count - 1);
    op->workspace = code ? 0 : 512 + (uint64_t)(si_numel(&op->t[0]) % 1000000) / 512 * 512;
    return si_finish(op, code, workspace_size, executor);
}

#define FORWARD(function, arithmetic, phase_1_name, ...)                                                               \
    int phase_1_name(const void *self, int64_t dim, void *out, uint64_t *workspace_size, void **executor);             \
    int phase_1_name(const void *self, int64_t dim, void *out, uint64_t *workspace_size, void **executor)              \
    {                                                                                                                  \
        struct operation op = {.name = #function, .kernel = arithmetic, .count = 2, .dim = dim};                       \
        return phase_1(&op, #phase_1_name, (const void *const[]){self, out}, (const enum check[]){__VA_ARGS__},        \
                       workspace_size, executor);                                                                      \
    }                                                                                                                  \
    PHASE_2(function)

#define BACKWARD(function, arithmetic, phase_1_name, ...)                                                              \
    int phase_1_name(const void *grad_output, const void *output, int64_t dim, void *out, uint64_t *workspace_size,    \
                     void **executor);                                                                                 \
    int phase_1_name(const void *grad_output, const void *output, int64_t dim, void *out, uint64_t *workspace_size,    \
                     void **executor)                                                                                  \
    {                                                                                                                  \
        struct operation op = {.name = #function, .kernel = arithmetic, .count = 3, .dim = dim};                       \
        return phase_1(&op, #phase_1_name, (const void *const[]){grad_output, output, out},                            \
                       (const enum check[]){__VA_ARGS__}, workspace_size, executor);                                   \
    }                                                                                                                  \
    PHASE_2(function)

FORWARD(aclnnSoftmax, softmax, aclnnSoftmaxGetWorkspaceSize, DTYPE, DIM, SHAPE)
FORWARD(aclnnLogSoftmax, log_softmax, aclnnLogSoftmaxGetWorkspaceSize, DIM, DTYPE, SHAPE)
BACKWARD(aclnnSoftmaxBackward, softmax_backward, aclnnSoftmaxBackwardGetWorkspaceSize, DTYPE, DIM, SHAPE)
BACKWARD(aclnnLogSoftmaxBackward, log_softmax_backward, aclnnLogSoftmaxBackwardGetWorkspaceSize, DTYPE, SHAPE, DIM)
