/* One row of the loss of a linear layer, in float64: its statistics, and the coefficients of its gradient.
 *
 * With the logits z of a row, their maximum, S = sum_v exp(z_v - max) = 1 + R and p_v = exp(z_v - max) / S:
 *
 *   lse = max + log1p(R)       entropy = log1p(R) + G / S       G = sum_v exp(z_v - max) (max - z_v)
 *
 * R leaves out one element that equals the maximum. So the loss of a nearly certain target keeps its digits: 1 + R would round
 * to 1. The gradient with respect to z is
 *
 *   a p_v + b p_v (z_v - m) - sum_k w_k [v = t_k] - s c_v,     m = sum_v p_v z_v = max - G / S
 */
#ifndef ASCEND_GRAD_LINEAR_LOSS_ROW_H
#define ASCEND_GRAD_LINEAR_LOSS_ROW_H

#include <math.h>

#include "../base.h"

/* Sums of exponentials below this number are near 1, so that R is computed without its largest term. */
#define AG_NEAR_ONE 1.0625
/* Probabilities above this number are nearly certain: the gradient at such a target is computed from 1 - p. */
#define AG_NEAR_CERTAIN 0.9375

typedef struct {
    /* The caller sets: */
    double inverse_temperature;
    double grad_loss;     /* upstream gradient of the cross-entropy, with token weight and denominator */
    double grad_square;   /* upstream gradient of lse^2, likewise */
    double grad_lse, grad_log_prob, grad_entropy;
    /* The kernels write: */
    double gap;           /* G */
    double weighted;      /* sum_v c_v z_v, for label smoothing */
    int64_t argmax;       /* vocabulary entry of the first maximum */
    /* ag_loss_row_finish writes: */
    double a, b, s;       /* coefficients of the gradient */
    double mean_gap;      /* max - m */
    double kept_loss;     /* grad_loss (1 - label smoothing): w_k is its product with the weight of target k */
    double certain_grad;  /* gradient with respect to the logit of the entry `certain` */
    int64_t certain;      /* a nearly certain target, or -1 */
} ag_loss_row;

/* The targets of a row: `count` vocabulary entries, -1 for none, with their probabilities times class weights. */
typedef struct {
    ptrdiff_t count;
    const int64_t *entries;
    const double *weights;
} ag_loss_targets;

/* Return 1 - p of a logit, from the logit minus the maximum and from R. */
AG_INLINE double ag_complement(double below_max, double rest) { return (rest - expm1(below_max)) / (1 + rest); }

/* Return log S. Sums that are not near 1 are taken as they were rounded. */
AG_INLINE double ag_log_sum(double sum, double rest) { return sum < AG_NEAR_ONE ? log1p(rest) : log(sum); }

/* Compute the coefficients of the gradient of a row whose statistics are complete. `logit_of` returns the logit of target k,
 * smoothing is s / V, class_sum the sum of the class weights that smoothing uses. */
static AG_UNUSED void ag_loss_row_finish(ag_loss_row *row, const ag_loss_targets *targets, const double *logits, double max,
                                         double sum, double rest, double label_smoothing, ptrdiff_t vocab,
                                         const double *class_weight, double class_sum)
{
    const double log_sum = ag_log_sum(sum, rest), total = sum < AG_NEAR_ONE ? 1 + rest : sum;
    const double kept = 1 - label_smoothing, smoothed = label_smoothing / (double)(vocab > 0 ? vocab : 1);
    double weights = 0;
    for (ptrdiff_t k = 0; k < targets->count; k++) weights += targets->entries[k] < 0 ? 0 : targets->weights[k];
    row->mean_gap = row->gap / total;
    row->kept_loss = row->grad_loss * kept;
    row->s = row->grad_loss * smoothed;
    row->b = -row->grad_entropy;
    /* The part of `a` that no target takes back is summed apart, since it may be tiny beside `a`. */
    double balance = row->s * class_sum + row->grad_lse;
    if (row->grad_square != 0) balance += 2 * row->grad_square * (max + log_sum);
    const double taken = row->kept_loss * weights - row->grad_log_prob;
    row->a = balance + taken;
    row->certain = -1;
    row->certain_grad = 0;
    for (ptrdiff_t k = 0; k < targets->count && row->certain < 0; k++) {
        const double below_max = logits[k] - max, complement = ag_complement(below_max, rest);
        if (targets->entries[k] < 0 || !(complement < 1 - AG_NEAR_CERTAIN)) continue;
        const int64_t entry = targets->entries[k];
        for (ptrdiff_t j = 0; j < targets->count; j++) {
            if (targets->entries[j] >= 0 && targets->entries[j] != entry) balance += row->kept_loss * targets->weights[j];
        }
        row->certain = entry;
        row->certain_grad = balance - row->a * complement - row->s * (class_weight ? class_weight[entry] : 1);
        row->certain_grad += row->b != 0 ? row->b * (1 - complement) * (below_max + row->mean_gap) : 0;
    }
}

#endif
