/* One row of the loss of a linear layer, in float64: its statistics, and the coefficients of its gradient with respect to the
 * logits z. ../loss.h has the formulas. */
#ifndef ASCEND_GRAD_LINEAR_LOSS_ROW_H
#define ASCEND_GRAD_LINEAR_LOSS_ROW_H

#include "../base.h"
#include "../loss.h"

typedef struct {
    /* The caller sets: */
    double inverse_temperature;
    double grad_loss;   /* upstream gradient of the cross-entropy, with token weight and denominator */
    ag_upstream upstream;
    /* The kernels write: */
    double moment, deficit; /* as in ag_row_statistics */
    double weight;          /* sum of the class weights of the entries so far; with dense targets, of a row's own ones */
    int64_t argmax;         /* vocabulary entry of the first maximum */
    /* ag_loss_row_finish writes: */
    double power;           /* a power of two, about the factor of the products in the logits */
    double a, b, s;         /* coefficients of the gradient, times power; s is that of class weights as accumulators */
    double kept_loss;       /* grad_loss (1 - label smoothing) power: w_k is its product with the weight of target k */
    double kept_log_prob;   /* grad_log_prob power of a single target, otherwise 0 */
    double mean_gap;        /* max - m */
    double certain_grad;    /* gradient with respect to the logit of the entry `certain`, times power */
    int64_t certain;        /* a nearly certain target, or -1 */
} ag_loss_row;

/* The entry of a target that is in another part of the vocabulary. No logit of this part belongs to it. */
#define AG_ELSEWHERE INT64_MAX

/* The targets of a row: `count` vocabulary entries, -1 for none, with their probabilities times class weights. */
typedef struct {
    ptrdiff_t count;
    const int64_t *entries;
    const double *weights;
    const double *grad_log_prob; /* upstream gradients of their log-probabilities; NULL: the row has one target, or none are given */
} ag_loss_targets;

/* Return the targets of row i. */
AG_INLINE ag_loss_targets ag_targets_of_row(ag_loss_targets all, ptrdiff_t i)
{
    const ptrdiff_t begin = i * all.count;
    const ag_loss_targets row = {all.count, all.entries + begin, all.weights + begin,
                                 all.grad_log_prob ? all.grad_log_prob + begin : NULL};
    return row;
}

/* Return w_k of a target from its weight. Without an upstream gradient of the loss it is 0, even if the weight is infinite. */
AG_INLINE double ag_kept_weight(const ag_loss_row *row, double weight)
{
    return row->grad_loss != 0 ? row->kept_loss * weight : 0;
}

/* Return what target k takes back of the gradient, times the row's power if `power` is it, as kept_loss has it then. */
AG_INLINE double ag_kept_of_target(const ag_loss_row *row, const ag_loss_targets *targets, ptrdiff_t k, double power)
{
    const double kept = ag_kept_weight(row, targets->weights[k]);
    return targets->grad_log_prob ? kept - targets->grad_log_prob[k] * power : kept;
}

/* Return the distance between two maxima of a row; equal infinities have none. */
AG_INLINE double ag_max_distance(double larger, double smaller) { return larger == smaller ? 0 : larger - smaller; }

/* Set the power of a row and its coefficients, and multiply what is known of the gradient by the power. */
AG_INLINE void ag_loss_row_scale(ag_loss_row *row, const ag_coefficients *c, double logit_scale, double class_scale)
{
    /* The gradient with respect to the products has the factor slope. Accumulators multiply by the rest of it, near 1. */
    const double slope = fabs(logit_scale * row->inverse_temperature);
    row->power = slope == 0 ? 1 : ldexp(1, (int)fmin(fmax(logb(slope), -1022), 1022));
    row->a = c->a * row->power, row->b = c->b * row->power, row->s = c->s * (class_scale * row->power);
    row->kept_loss *= row->power, row->kept_log_prob *= row->power, row->certain_grad *= row->power;
}

/* Compute the coefficients of the gradient of a row whose statistics are complete. `logits` are the targets' logits,
 * `logit_scale` the factor of the products. `class_weight` (V,) or NULL are the weights that smoothing uses, `class_sum` is
 * their sum, and `class_scale` the result of ag_class_scale. `vocab` and `class_sum` count the whole vocabulary, `class_weight`
 * belongs to this part of it. */
static AG_UNUSED void ag_loss_row_finish(ag_loss_row *row, const ag_loss_targets *targets, const double *logits, double max,
                                         double rest, double logit_scale, double label_smoothing, ptrdiff_t vocab,
                                         const double *class_weight, double class_sum, double class_scale)
{
    const ag_row_statistics statistics = {max, rest, row->moment, row->deficit};
    double weights = 0;
    for (ptrdiff_t k = 0; k < targets->count; k++) weights += targets->entries[k] < 0 ? 0 : targets->weights[k];
    row->mean_gap = ag_mean_gap(&statistics);
    row->kept_loss = row->grad_loss * (1 - label_smoothing);
    const ag_coefficients c =
        ag_coefficients_of(&row->upstream, ag_kept_weight(row, weights),
                           label_smoothing > 0 ? row->grad_loss * label_smoothing / (double)vocab : 0, class_sum,
                           row->upstream.square != 0 ? ag_log_sum_exp(&statistics) : 0);
    row->certain = -1, row->certain_grad = 0;
    for (ptrdiff_t k = 0; k < targets->count && row->certain < 0; k++) {
        const int64_t entry = targets->entries[k];
        const double complement = ag_one_minus_prob(&statistics, logits[k]);
        if (entry < 0 || entry == AG_ELSEWHERE || !(complement < 1 - AG_NEARLY_CERTAIN)) continue;
        double others = 0; /* weights of the other targets */
        for (ptrdiff_t j = 0; j < targets->count; j++) {
            if (targets->entries[j] >= 0 && targets->entries[j] != entry) others += ag_kept_of_target(row, targets, j, 1);
        }
        row->certain = entry;
        row->certain_grad = ag_certain_gradient(&c, others, complement);
        row->certain_grad += ag_entropy_gradient(&c, exp(logits[k] - max) / (1 + rest), (logits[k] - max) + row->mean_gap);
        if (c.s != 0) row->certain_grad -= c.s * (class_weight ? class_weight[entry] : 1);
    }
    row->kept_log_prob = targets->grad_log_prob ? 0 : row->upstream.log_prob;
    ag_loss_row_scale(row, &c, logit_scale, class_scale);
}

/* Compute the coefficients of the gradient of a row with dense targets. `weight` is the sum of the weights of all entries, and
 * `others` of all but `certain`, an entry that has the maximum and is nearly certain, or -1 for none. */
static AG_UNUSED void ag_dense_row_finish(ag_loss_row *row, double weight, double others, int64_t certain, double max,
                                          double rest, double logit_scale, double class_scale)
{
    const ag_row_statistics statistics = {max, rest, row->moment, row->deficit};
    row->mean_gap = ag_mean_gap(&statistics);
    row->kept_loss = row->grad_loss, row->kept_log_prob = 0;
    ag_coefficients c = ag_coefficients_of(&row->upstream, ag_kept_weight(row, weight), 0, 0,
                                           row->upstream.square != 0 ? ag_log_sum_exp(&statistics) : 0);
    row->certain = certain, row->certain_grad = 0;
    if (certain >= 0) {
        row->certain_grad = ag_certain_gradient(&c, ag_kept_weight(row, others), rest / (1 + rest)) +
                            ag_entropy_gradient(&c, 1 / (1 + rest), row->mean_gap);
    }
    c.s = row->grad_loss; /* the weights of the row take the part of class weights in label smoothing */
    ag_loss_row_scale(row, &c, logit_scale, class_scale);
}

#endif
