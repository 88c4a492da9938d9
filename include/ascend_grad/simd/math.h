/* exp, tanh and log of one instruction set. Body header, see foreach_isa.h.
 *
 * exp(x) is a polynomial of r times 2**k, with k = round(x / ln 2) and r = x - k ln 2, computed in two steps. The
 * polynomial is our minimax on |r| <= ln(2)/2. In float32 it has degree 6 and an error of 0.06 * 2**-24, in float64
 * degree 11 and 2**-53. It is evaluated in pairs of terms (Estrin's scheme), as its time is the latency of dependent
 * steps. Without an instruction for it, 2**k is a product of two powers, so that results overflow to infinity. NaN
 * passes through, exp(-inf) = 0.
 *
 * Arithmetic that underflows takes some CPUs a hundred cycles. So float32 results below the smallest normal number are
 * 0. In float64, whose range is rarely left, underflow is gradual. Results of 0 cost nothing extra in either type. (The
 * square of an argument near 1e-20, in float64 near 1e-78 or 1e-160, also underflows: such logits are slow, but right.)
 */

AG_INLINE_LARGE f32v v_f32_exp(f32v x)
{
    /* Adding to_int leaves the rounded integer in the low bits of the sum, biased like an exponent. */
    const f32v to_int = v_f32_set1(0x1.8p23f + 127);
    const f32v least = v_f32_set1(-0x1.5d589ep6f); /* the logarithm of the smallest normal number */
    const f32v given = x;
#if !AG_IS_AVX512
    x = v_f32_select(given < least, (f32v){0}, x);
#endif
    x = v_f32_min(v_f32_set1(89.0f), x); /* NaN passes through */
    const f32v k = v_f32_fma(x, v_f32_set1(0x1.715476p0f), to_int) - to_int;
    f32v r = v_f32_fma(k, v_f32_set1(-0x1.63p-1f), x);
    r = v_f32_fma(k, v_f32_set1(0x1.bd0106p-13f), r);
    const f32v r2 = r * r;
    const f32v low = v_f32_fma(v_f32_set1(0x1.555492p-3f), r, v_f32_set1(0x1.fffffcp-2f));
    f32v high = v_f32_fma(v_f32_set1(0x1.123a20p-7f), r, v_f32_set1(0x1.5558f2p-5f));
    high = v_f32_fma(v_f32_set1(0x1.6a23d0p-10f), r2, high);
    const f32v p = v_f32_fma(v_f32_fma(high, r2, low), r2, r) + 1.0f;
#if AG_IS_AVX512
    return _mm512_maskz_scalef_ps(_mm512_cmp_ps_mask(given, least, _CMP_NLT_UQ), p, k);
#else
    const f32v half = v_f32_fma(k, v_f32_set1(0.5f), to_int);
    const f32v rest = k - (half - to_int) + to_int;
    return v_f32_select(given < least, (f32v){0}, p * (f32v)((u32v)half << 23) * (f32v)((u32v)rest << 23));
#endif
}

AG_INLINE_LARGE f64v v_f64_exp(f64v x)
{
    const f64v to_int = v_f64_set1(0x1.8p52 + 1023);
    const f64v least = v_f64_set1(-0x1.74910d52d3052p9); /* the logarithm of half the smallest subnormal number */
    const f64v given = x;
#if !AG_IS_AVX512
    x = v_f64_select(given < least, (f64v){0}, x);
#endif
    x = v_f64_min(v_f64_set1(710.0), x);
    const f64v k = v_f64_fma(x, v_f64_set1(0x1.71547652b82fep0), to_int) - to_int;
    f64v r = v_f64_fma(k, v_f64_set1(-0x1.62e42feep-1), x);
    r = v_f64_fma(k, v_f64_set1(-0x1.a39ef35793c76p-33), r);
    const f64v r2 = r * r, r4 = r2 * r2;
    f64v low = v_f64_fma(v_f64_set1(1 / 6.0), r, v_f64_set1(1 / 2.0));
    low = v_f64_fma(v_f64_fma(v_f64_set1(0x1.111111111945ap-7), r, v_f64_set1(0x1.55555555536d1p-5)), r2, low);
    f64v high = v_f64_fma(v_f64_set1(0x1.a01a015aa8d14p-13), r, v_f64_set1(0x1.6c16c17b688bdp-10));
    high = v_f64_fma(v_f64_fma(v_f64_set1(0x1.71dee8c7b160cp-19), r, v_f64_set1(0x1.a019af11e5313p-16)), r2, high);
    high = v_f64_fma(v_f64_fma(v_f64_set1(0x1.ada7a291c28aap-26), r, v_f64_set1(0x1.289bf2097aafep-22)), r4, high);
    const f64v p = v_f64_fma(v_f64_fma(high, r4, low), r2, r) + 1.0;
#if AG_IS_AVX512
    return _mm512_maskz_scalef_pd(_mm512_cmp_pd_mask(given, least, _CMP_NLT_UQ), p, k);
#else
    const f64v half = v_f64_fma(k, v_f64_set1(0.5), to_int);
    const f64v rest = k - (half - to_int) + to_int;
    return v_f64_select(given < least, (f64v){0}, p * (f64v)((u64v)half << 52) * (f64v)((u64v)rest << 52));
#endif
}

/* Compute tanh(x) = 1 - 2 / (exp(2 |x|) + 1) with the sign of x. Near 0, where the difference would cancel, tanh(x) is the
 * convergent of Lambert's continued fraction x / (1 + x^2 / (3 + x^2 / (5 + ...))) that is exact to an eighth of a unit in the
 * last place. Errors are below 4 units in the last place. NaN passes through. */
AG_INLINE_LARGE f32v v_f32_tanh(f32v x)
{
    const f32v size = v_f32_max(x, -x), large = 1.0f - 2.0f / (v_f32_exp(size + size) + 1.0f), x2 = x * x;
    const f32v above = v_f32_fma(x2 + 105.0f, x2, v_f32_set1(945.0f));
    const f32v below = v_f32_fma(v_f32_fma(v_f32_set1(15.0f), x2, v_f32_set1(420.0f)), x2, v_f32_set1(945.0f));
    return v_f32_select(size >= v_f32_set1(0.625f), v_f32_select(x < 0, -large, large), x * above / below);
}

AG_INLINE_LARGE f64v v_f64_tanh(f64v x)
{
    const f64v size = v_f64_max(x, -x), large = 1.0 - 2.0 / (v_f64_exp(size + size) + 1.0), x2 = x * x;
    f64v above = v_f64_fma(x2 + 990.0, x2, v_f64_set1(135135.0));
    above = v_f64_fma(v_f64_fma(above, x2, v_f64_set1(4729725.0)), x2, v_f64_set1(34459425.0));
    f64v below = v_f64_fma(v_f64_fma(v_f64_set1(45.0), x2, v_f64_set1(13860.0)), x2, v_f64_set1(945945.0));
    below = v_f64_fma(v_f64_fma(below, x2, v_f64_set1(16216200.0)), x2, v_f64_set1(34459425.0));
    return v_f64_select(size >= v_f64_set1(0.625), v_f64_select(x < 0, -large, large), x * above / below);
}

/* Compute the logarithm of m * 2**k, where f = m - 1 is exact and m is near 1. Let s = f / (m + 1). Then log(m) =
 * 2 atanh(s) by its series, where 2 s is computed as f - s f. */
AG_INLINE_LARGE f64v v_f64_log_of(f64v k, f64v f)
{
    const f64v s = f / (2.0 + f), z = s * s;
    static const double series[] = {2 / 21.0, 2 / 19.0, 2 / 17.0, 2 / 15.0, 2 / 13.0,
                                    2 / 11.0, 2 / 9.0,  2 / 7.0,  2 / 5.0,  2 / 3.0};
    f64v p = v_f64_set1(2 / 23.0);
    AG_UNROLL(10)
    for (int i = 0; i < 10; i++) p = v_f64_fma(p, z, v_f64_set1(series[i]));
    const f64v log_m = v_f64_fma(k, v_f64_set1(0x1.a39ef35793c76p-33), f - s * (f - z * p));
    return v_f64_fma(k, v_f64_set1(0x1.62e42feep-1), log_m);
}

/* Set k and f = m - 1 for x = m * 2**k from 1 on, with m from the square root of 1/2 on. */
AG_INLINE void v_f64_log_parts(f64v x, f64v *k, f64v *f)
{
    const u64v above = (u64v)x - 0x3fe6a09e667f3bcd; /* bits of x minus the bits of the square root of 1/2 */
    const u64v k_bits = above >> 52;
    *k = (f64v)(k_bits | 0x4330000000000000) - 0x1p52;
    *f = (f64v)((u64v)x - (k_bits << 52)) - 1.0;
}

/* Compute the natural logarithm of numbers from 1 on, or NaN, with an error of about one unit in the last place. */
AG_INLINE_LARGE f64v v_f64_log(f64v x)
{
    f64v k, f;
    v_f64_log_parts(x, &k, &f);
    return v_f64_select(x < INFINITY, v_f64_log_of(k, f), x);
}

/* Compute log(1 + x) for x >= 0, or NaN, with an error of about two units in the last place: where the logarithm is
 * small, f is x itself, not the rounded sum minus 1. */
AG_INLINE_LARGE f64v v_f64_log1p(f64v x)
{
    f64v k, f;
    v_f64_log_parts(1.0 + x, &k, &f);
    f = v_f64_select(k == 0, x, f);
    return v_f64_select(x < INFINITY, v_f64_log_of(k, f), x);
}
