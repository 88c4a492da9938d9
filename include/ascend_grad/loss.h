/* Losses of one row of logits z in float64, without cancellation.
 *
 * Kernels compute the statistics of a row. These functions turn them into the loss, into outputs beside it, and into the
 * coefficients of the gradient with respect to z,
 *
 *   P_v = a p_v + b p_v (z_v - m) - sum_k w_k [v = t_k] - s c_v
 *
 * with p = softmax(z), m = sum_v p_v z_v, targets t_k, and class weights c (ones unless they are given).
 *
 * The sum of exponentials relative to the maximum is 1 + rest, where `rest` leaves out one entry that has the maximum. A
 * probability that is almost 1 is told from 1 by `rest` alone. All sums here have terms of one sign, so that relative
 * errors of the statistics stay relative errors of the results. A NaN or an infinite maximum makes every result NaN.
 */
#ifndef ASCEND_GRAD_LOSS_H
#define ASCEND_GRAD_LOSS_H

#include <math.h>

#include "base.h"

/* A sum of exponentials relative to the maximum, above which subtracting 1 gives `rest` accurately enough. */
#define AG_ACCURATE_SUM 1.0625

typedef struct {
    double max;     /* the largest logit */
    double rest;    /* sum of exp(z_v - max), without one entry that has the maximum */
    double moment;  /* sum of exp(z_v - max) (max - z_v); read for the entropy alone */
    double deficit; /* sum of c_v (max - z_v); read for label smoothing alone */
} ag_row_statistics;

/* Return the logarithm of the sum of exp(z_v - max). */
AG_INLINE double ag_log_sum(const ag_row_statistics *row) { return log1p(row->rest); }

/* Return the logarithm of the sum of exp(z_v). */
AG_INLINE double ag_log_sum_exp(const ag_row_statistics *row)
{
    return isinf(row->max) ? (double)NAN : row->max + ag_log_sum(row);
}

/* Return the negative log-probability of an entry with logit z. */
AG_INLINE double ag_negative_log_prob(const ag_row_statistics *row, double z) { return ag_log_sum(row) + (row->max - z); }

/* Return 1 - p of an entry with logit z. */
AG_INLINE double ag_one_minus_prob(const ag_row_statistics *row, double z)
{
    return (row->rest - expm1(z - row->max)) / (1 + row->rest);
}

AG_INLINE double ag_entropy(const ag_row_statistics *row)
{
    return ag_log_sum(row) + row->moment / (1 + row->rest);
}

/* Return sum_v c_v (lse - z_v), which label smoothing multiplies by smoothing / V. `class_sum` is sum_v c_v. */
AG_INLINE double ag_smoothed_sum(const ag_row_statistics *row, double class_sum)
{
    return class_sum * ag_log_sum(row) + row->deficit;
}

/* Return the gradient at an entry with logit z, where `w` is the sum of the coefficients of the targets there, and `s` the
 * product of smoothing's coefficient and the class weight there. It is accurate for p near 1 and a = w. */
AG_INLINE double ag_gradient_at_target(const ag_row_statistics *row, double z, double a, double b, double w, double s)
{
    const double complement = ag_one_minus_prob(row, z), p = exp(z - row->max) / (1 + row->rest);
    /* z - m = (z - max) + (max - m), where max - m = moment / (1 + rest). */
    const double mean = b == 0 ? 0 : b * p * ((z - row->max) + row->moment / (1 + row->rest));
    return (a - w) - a * complement + mean - s;
}

#endif
