/* Steps of products with the matrix instruction BFMMLA of aarch64, for gemm_unit.h. Included by kernels.h.
 *
 * The instruction multiplies 2 rows by 2 columns of 4 bfloat16 numbers each, and adds the products to 2 x 2 sums. A step
 * multiplies 4 pairs along the sum by two instructions for each 2 x 2 sums, 32 for a tile of 8 x 8. The tile of sums takes 16
 * of the 32 registers.
 *
 * Order of a sum. The products of a pair are added to each other, and then to the sum: pair by pair, one addition for two
 * terms. Every addition rounds to odd (if it is not exact, the last bit of the truncated result is set), and denormal inputs
 * and results are flushed to zero. FPCR changes nothing of that, as fpenv.h clears its bit EBF. AG_CHAIN terms form a chain,
 * and chains are combined with compensation, as elsewhere.
 *
 * Error of a chain of n terms, in units of 2**-24 of the sum of the terms' magnitudes. Products are exact. An addition that
 * rounds to odd errs by less than 2 units of its result. A term takes part in one addition within its pair, and in at most
 * n / 2 additions to the sum, so that the chain errs by at most n + 2 (to first order). Besides, each of these operations may
 * lose a value below 2**-126.
 */

#if defined(AG_EMULATE_BFMMLA)
#include "bfmmla_in_c.h"
#endif

enum { K(CHAIN) = AG_CHAIN / MR }; /* steps of a chain */

/* The instruction has no state. */
AG_INLINE void K(begin_task)(void) {}
AG_INLINE void K(end_task)(void) {}

/* Return the sums (2, 2) after adding a (2, 4) times the transpose of b (2, 4). */
AG_INLINE V K(multiply_add)(V a, V b, V sum)
{
#if defined(AG_EMULATE_BFMMLA)
    uint16_t left[8], right[8];
    float result[4];
    memcpy(left, &a, sizeof left), memcpy(right, &b, sizeof right), memcpy(result, &sum, sizeof result);
    ag_bfmmla_in_c(result, left, right);
    memcpy(&sum, result, sizeof result);
#else
    /* Assembler, as the intrinsic would need a target that includes all options of the build (-march, -mcpu): functions of
     * the baseline could not be inlined otherwise. */
    __asm__(".arch_extension bf16\n\tbfmmla %0.4s, %1.8h, %2.8h" : "+w"(sum) : "w"(a), "w"(b));
#endif
    return sum;
}

/* Compute a tile (MR, nv * VL) of sums over some steps; columns beyond are zero. */
AG_INLINE void K(chain_of)(const int nv, const char *a, const ptrdiff_t a_step, const char *b, ptrdiff_t steps, acc_t *tile)
{
    V sum[MR / 2][NR / 2]; /* of two rows and two columns each */
    AG_UNROLL(4)
    for (int i = 0; i < MR / 2; i++) {
        AG_UNROLL(4)
        for (int j = 0; j < NR / 2; j++) sum[i][j] = (V){0};
    }
    for (; steps > 0; steps--, a += a_step) {
        AG_UNROLL(2)
        for (int half = 0; half < 2; half++, b += nv * 32) {
            V left[MR / 2];
            AG_UNROLL(4)
            for (int i = 0; i < MR / 2; i++) memcpy(&left[i], a + half * MR * 8 + i * 16, sizeof(V));
            AG_UNROLL(4)
            for (int j = 0; j < 2 * nv; j++) {
                V right;
                memcpy(&right, b + j * 16, sizeof(V));
                AG_UNROLL(4)
                for (int i = 0; i < MR / 2; i++) sum[i][j] = K(multiply_add)(left[i], right, sum[i][j]);
            }
        }
    }
    AG_UNROLL(4)
    for (int i = 0; i < MR / 2; i++) {
        AG_UNROLL(4)
        for (int j = 0; j < NR / 2; j += 2) {
            V_(store)(tile + 2 * i * NR + 2 * j, AG_SHUFFLE(i32v, sum[i][j], sum[i][j + 1], 0, 1, 4, 5));
            V_(store)(tile + (2 * i + 1) * NR + 2 * j, AG_SHUFFLE(i32v, sum[i][j], sum[i][j + 1], 2, 3, 6, 7));
        }
    }
}

/* Compute a tile (MR, NR) of sums over some steps. Steps of the left operand are a_step bytes apart; nv: columns in vectors. Both
 * operands are packed. */
static void K(chain)(const int nv, const char *a, const ptrdiff_t a_step, ptrdiff_t a_row AG_UNUSED, const char *tail AG_UNUSED,
                     const char *b, const ptrdiff_t b_row AG_UNUSED, ptrdiff_t steps, acc_t *tile)
{
    if (nv == 1) {
        K(chain_of)(1, a, a_step, b, steps, tile);
    } else {
        K(chain_of)(2, a, a_step, b, steps, tile);
    }
}
