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

/* Add another sum; its compensation is omitted if it overflowed. */
AG_INLINE void ag_sum_add_sum(ag_sum *total, ag_sum x)
{
    ag_sum_add(total, x.sum);
    if (isfinite(x.sum)) ag_sum_add(total, x.compensation);
}

enum { AG_SUM_LANES = 8 };

/* Return the total of AG_SUM_LANES sums. */
AG_INLINE double ag_sums_total_of_all(const ag_sum *sums)
{
    ag_sum total = sums[0];
    for (int j = 1; j < AG_SUM_LANES; j++) ag_sum_add_sum(&total, sums[j]);
    return ag_sum_total(total);
}

#endif
