/* Sums of doubles with the rounding errors of their additions (Neumaier): accurate over any number of terms. */
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

/* Which of several NaN a sum propagates depends on the instructions, but must not depend on how rows are grouped. */
AG_INLINE double ag_canonical_nan(double sum) { return sum == sum ? sum : (double)NAN; }

/* The compensation is applied unless the sum overflowed. Adding +0 makes -0 positive, whichever way it arose. */
AG_INLINE double ag_sum_total(ag_sum total)
{
    return ag_canonical_nan((isfinite(total.sum) ? total.sum + total.compensation : total.sum) + 0.0);
}

#endif
