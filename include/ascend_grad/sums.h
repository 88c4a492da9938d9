/* Compensated sums of doubles (Neumaier): the rounding errors of the additions are summed up separately, so that a sum
 * is accurate over any number of terms. */
#ifndef ASCEND_GRAD_SUMS_H
#define ASCEND_GRAD_SUMS_H

#include <math.h>

#include "base.h"

typedef struct {
    double sum, compensation;
} ag_sum;

AG_INLINE void ag_sum_add(ag_sum *total, double x)
{
    const double sum = total->sum + x;
    total->compensation += fabs(total->sum) >= fabs(x) ? (total->sum - sum) + x : (x - sum) + total->sum;
    total->sum = sum;
}

/* Return the sum, with every NaN replaced by one NaN. Instructions differ in which of several NaN they propagate, and
 * the result must not depend on how rows are grouped. */
AG_INLINE double ag_canonical_nan(double sum) { return sum == sum ? sum : (double)NAN; }

/* Return the compensated sum; the compensation is omitted if the sum overflowed. Adding +0 turns -0 into +0. */
AG_INLINE double ag_sum_total(ag_sum total)
{
    return ag_canonical_nan((isfinite(total.sum) ? total.sum + total.compensation : total.sum) + 0.0);
}

#endif
