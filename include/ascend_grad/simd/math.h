/* exp and log of one instruction set. Body header, see foreach_isa.h.
 *
 * exp: k = round(x / ln 2), r = x - k ln 2 in two steps, a polynomial on |r| <= ln(2)/2 (our minimax; float32: degree
 * 6, float64: degree 11, with errors of 0.06 * 2**-24 and 2**-53), then 2**k, as a product of two powers where there is
 * no instruction for it, so that overflow comes out by itself. The polynomials are evaluated in pairs of terms
 * (Estrin's scheme): what limits them is the latency of dependent steps. NaN passes through, exp(-inf) = 0.
 * Arithmetic that underflows takes some CPUs a hundred cycles: in float32 everything below the smallest normal number
 * is 0, in float64, whose range is rarely left, underflow is gradual; what is 0 in the end costs nothing in either.
 * (The square of an argument of some 1e-20, in float64 1e-78 or 1e-160, underflows, too: such logits are slow, and
 * right.)
 */

AG_INLINE_LARGE f32v v_f32_exp(f32v x)
{
    /* Adding it leaves the rounded integer in the low bits of the sum, biased like an exponent. */
    const f32v to_int = v_f32_set1(0x1.8p23f + 127);
    const f32v least = v_f32_set1(-0x1.5d589ep6f); /* the exponentials of smaller numbers are not normal */
    const f32v given = x;
#if !AG_IS_AVX512
    x = v_f32_select(given < least, (f32v){0}, x);
#endif
    x = v_f32_min(v_f32_set1(89.0f), x); /* lets NaN through */
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
    const f64v least = v_f64_set1(-0x1.74910d52d3052p9); /* the logarithm of half the smallest number */
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

/* Natural logarithm of numbers from 1 on, or NaN. x = m * 2**k with m next to 1, s = (m - 1) / (m + 1), and log(m) = 2
 * atanh(s) by its series; 2 s is taken as f - s f, with f = m - 1, which is exact. The error is about one unit of the
 * last place. */
AG_INLINE_LARGE f64v v_f64_log(f64v x)
{
    const u64v above = (u64v)x - 0x3fe6a09e667f3bcd; /* over the square root of 1/2 */
    const u64v k_bits = above >> 52;
    const f64v k = (f64v)(k_bits | 0x4330000000000000) - 0x1p52;
    const f64v f = (f64v)((u64v)x - (k_bits << 52)) - 1.0;
    const f64v s = f / (2.0 + f), z = s * s;
    static const double series[] = {2 / 21.0, 2 / 19.0, 2 / 17.0, 2 / 15.0, 2 / 13.0,
                                    2 / 11.0, 2 / 9.0,  2 / 7.0,  2 / 5.0,  2 / 3.0};
    f64v p = v_f64_set1(2 / 23.0);
    AG_UNROLL(10)
    for (int i = 0; i < 10; i++) p = v_f64_fma(p, z, v_f64_set1(series[i]));
    const f64v log_m = v_f64_fma(k, v_f64_set1(0x1.a39ef35793c76p-33), f - s * (f - z * p));
    return v_f64_select(x < INFINITY, v_f64_fma(k, v_f64_set1(0x1.62e42feep-1), log_m), x);
}
