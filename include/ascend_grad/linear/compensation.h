/* Compensated sums of vectors, for one kind of arithmetic and one instruction set. Included by kernels.h. */

/* Add x to a sum, and the rounding error of the addition to its compensation (Knuth's two-sum). */
AG_INLINE void K(add_compensated)(V *sum, V *compensation, V x)
{
    const V total = *sum + x, part = total - *sum;
    *compensation += (*sum - (total - part)) + (x - part);
    *sum = total;
}

/* Return the sum with its compensation; in lanes that are not finite, only the sum. */
AG_INLINE V K(compensated)(V sum, V compensation) { return V_(select)(sum - sum == 0, sum + compensation, sum); }
