/* The floating-point mode of a thread while kernels run: round to nearest, subnormals kept.
 *
 * A library linked with -ffast-math switches subnormals off in the thread that loads it, and in no other thread.
 * Results must not depend on that, nor on which thread of a team computes them.
 */
#ifndef ASCEND_GRAD_FPENV_H
#define ASCEND_GRAD_FPENV_H

#include "base.h"

#if defined(AG_X86_64)
typedef unsigned int ag_fpenv;
/* Bits of MXCSR to clear: flush to zero (15), rounding mode (13, 14), denormals are zero (6). */
#define AG_FP_UNWANTED 0xe040u
#elif defined(AG_AARCH64)
typedef uint64_t ag_fpenv;
/* Bits of FPCR to clear: flush to zero (24, 19) and rounding mode (22, 23). On CPUs with FEAT_AFP also: flush inputs to
 * zero (0), alternate rules for NaN and subnormal numbers (1), scalar results that keep the other lanes (2). On CPUs with
 * FEAT_EBF16 also: sums of products of bfloat16 that round as other sums do (13). Other CPUs read these four as 0. */
#define AG_FP_UNWANTED 0x1c82007ull
#else
typedef int ag_fpenv;
#endif

/* Switch to the mode that the kernels assume, and return the previous mode for ag_fpenv_leave. */
static AG_UNUSED ag_fpenv ag_fpenv_enter(void)
{
#if defined(AG_X86_64)
    const ag_fpenv mode = _mm_getcsr();
    if (mode & AG_FP_UNWANTED) _mm_setcsr(mode & ~AG_FP_UNWANTED);
    return mode;
#elif defined(AG_AARCH64)
    ag_fpenv mode;
    __asm__ volatile("mrs %0, fpcr" : "=r"(mode));
    if (mode & AG_FP_UNWANTED) __asm__ volatile("msr fpcr, %0" : : "r"(mode & ~AG_FP_UNWANTED));
    return mode;
#else
    return 0;
#endif
}

static AG_UNUSED void ag_fpenv_leave(ag_fpenv mode)
{
#if defined(AG_X86_64)
    if (mode & AG_FP_UNWANTED) _mm_setcsr(mode);
#elif defined(AG_AARCH64)
    if (mode & AG_FP_UNWANTED) __asm__ volatile("msr fpcr, %0" : : "r"(mode));
#else
    (void)mode;
#endif
}

/* Round a parameter (such as `scale`) to float32 in the mode of the kernels. The compiler does not know of modes and
 * would move the conversion before the switch. The empty statements keep it between the switches. */
static AG_UNUSED double ag_rounded_to_float32(double x)
{
    const ag_fpenv mode = ag_fpenv_enter();
    __asm__ volatile("" : "+m"(x));
    x = (double)(float)x;
    __asm__ volatile("" : "+m"(x));
    ag_fpenv_leave(mode);
    return x;
}

#endif
