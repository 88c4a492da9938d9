/* Losses of one row of logits z in float64, without cancellation.
 *
 * Kernels compute the statistics of a row. These functions turn them into the loss, into outputs beside it, and into the
 * coefficients of the gradient with respect to z,
 *
 *   P_v = a p_v + b p_v (z_v - m) - sum_k w_k [v = t_k] - s c_v
 *
 * with p = softmax(z), m = sum_v p_v z_v, targets t_k, and class weights c (ones unless they are given). Dense targets are
 * probabilities q of all classes. With label smoothing they have the weights c_v ((1 - smoothing) q_v + smoothing / V), which
 * kernels subtract instead of the last two terms.
 *
 * The sum of exponentials relative to the maximum is 1 + rest, where `rest` leaves out one entry that has the maximum. Only
 * `rest` distinguishes a probability that is almost 1 from 1. All sums here have terms of one sign, so that relative errors of
 * the statistics stay relative errors of the results. A NaN makes every result NaN, and so does an infinite maximum, but for
 * the lse.
 */
#ifndef ASCEND_GRAD_LOSS_H
#define ASCEND_GRAD_LOSS_H

#include <float.h>
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

/* Return the logarithm of the sum of exp(z_v). It is the maximum if that is infinite; the other results are NaN then. */
AG_INLINE double ag_log_sum_exp(const ag_row_statistics *row)
{
    return isinf(row->max) ? row->max : row->max + ag_log_sum(row);
}

/* Return the negative log-probability of an entry with logit z. */
AG_INLINE double ag_negative_log_prob(const ag_row_statistics *row, double z) { return ag_log_sum(row) + (row->max - z); }

/* Return 1 - p of an entry with logit z. */
AG_INLINE double ag_one_minus_prob(const ag_row_statistics *row, double z)
{
    return (row->rest - expm1(z - row->max)) / (1 + row->rest);
}

/* Return max - m. */
AG_INLINE double ag_mean_gap(const ag_row_statistics *row) { return row->moment / (1 + row->rest); }

AG_INLINE double ag_entropy(const ag_row_statistics *row) { return ag_log_sum(row) + ag_mean_gap(row); }

/* Return c_v times a distance of z_v; 0 if either is 0, whatever the other is. An infinite c_v at a distance of 0 is
 * counted by class_sum, see ag_smoothed_sum. */
AG_INLINE double ag_weighted_distance(double weight, double distance)
{
    return weight == 0 || distance == 0 ? 0 : weight * distance;
}

/* Return sum_v c_v (lse - z_v), which label smoothing multiplies by smoothing / V. `class_sum` is sum_v c_v. A sum that
 * has an infinite weight is infinite, even if log_sum has been rounded to 0. */
AG_INLINE double ag_smoothed_sum(double log_sum, double class_sum, double deficit)
{
    if (log_sum == 0 && isinf(class_sum)) return isfinite(deficit) ? class_sum : deficit;
    return class_sum * log_sum + deficit;
}

/* ---- numbers of the caller, as accumulators read them ------------------------------------------------------------ */

/* Return a positive factor of logits, or the nearest one that accumulators (float64 if `is_double`, else float32) can
 * multiply with. Products and quotients of two such numbers are finite, and no subnormal numbers. */
AG_INLINE double ag_bounded_factor(double factor, int is_double)
{
    const double largest = is_double ? 0x1p500 : 0x1p60;
    return fmin(fmax(factor, 1 / largest), largest);
}

/* Return the number by which class weights are divided before they are rounded to accumulators. It is multiplied back in
 * float64, into numbers of rows. It is 1 if float32 has room for all weights and for coefficients of about their
 * reciprocals. Otherwise it is a power of two, and the largest finite quotient is about 1. */
static AG_UNUSED double ag_class_scale(const double *weights, ptrdiff_t n, int is_double)
{
    double largest = 0, least = INFINITY;
    for (ptrdiff_t v = 0; v < n; v++) {
        const double size = fabs(weights[v]);
        if (size > largest && size <= DBL_MAX) largest = size;
        if (size < least && size > 0) least = size;
    }
    if (is_double || largest == 0 || (largest <= 0x1p100 && least >= 0x1p-126)) return 1;
    return ldexp(1, (int)fmin(fmax(logb(largest), -1022), 1022));
}

/* Return a class weight divided by the result of ag_class_scale, as accumulators hold it. A weight that is not 0 does not
 * become 0, as an infinite distance is left out of the loss only if its weight is 0. */
AG_INLINE double ag_scaled_weight(double weight, double class_scale, int is_double)
{
    const double scaled = weight / class_scale, rounded = is_double ? scaled : (double)(float)scaled;
    return rounded == 0 && weight != 0 ? copysign(is_double ? 0x1p-1074 : 0x1p-149, weight) : rounded;
}

/* ---- the gradient of a row --------------------------------------------------------------------------------------- */

/* A target whose probability is above this number is nearly certain: its gradient is computed from 1 - p. */
#define AG_NEARLY_CERTAIN 0.9375

/* Upstream gradients of a row. */
typedef struct {
    double square;                    /* of lse^2, with its factor, token weight and denominator */
    double lse, log_prob, entropy;    /* of the outputs; `log_prob` is the sum over the targets */
} ag_upstream;

/* The coefficients of a row's gradient. */
typedef struct {
    double balance; /* the part of `a` that no target takes back. It is summed apart, since it may be tiny beside `a` */
    double a, b, s;
} ag_coefficients;

/* Return the coefficients, where `kept` is the sum of the targets' w_k without the terms of log_prob. */
AG_INLINE ag_coefficients ag_coefficients_of(const ag_upstream *upstream, double kept, double s, double class_sum, double lse)
{
    ag_coefficients c = {.balance = (s != 0 ? s * class_sum : 0) + upstream->lse, .b = -upstream->entropy, .s = s};
    if (upstream->square != 0) c.balance += 2 * upstream->square * lse;
    c.a = c.balance + (kept - upstream->log_prob);
    return c;
}

/* Return the gradient of the entropy at an entry of probability p, where `distance` is z_v - m. */
AG_INLINE double ag_entropy_gradient(const ag_coefficients *c, double p, double distance)
{
    return c->b == 0 || p == 0 ? 0 : c->b * p * distance;
}

/* Return the gradient at a nearly certain entry, without the terms of the entropy and of smoothing. `others` is the sum of
 * w_k of targets that are other entries: a - w is what the target does not take back, so it stands for a where w is 0. */
AG_INLINE double ag_certain_gradient(const ag_coefficients *c, double others, double complement)
{
    return (c->balance + others) - c->a * complement;
}

#endif
