/* Vectors of one instruction set: types, arithmetic, float32 and float64 in memory. Body header, see foreach_isa.h.
 *
 * The code is plain GCC/Clang vector arithmetic wherever that compiles to the right instruction. Intrinsics serve only
 * what vector arithmetic cannot express: fused multiply-add, float16, non-temporal and masked access, halves of a
 * vector. Everything else (bfloat16, selection, exp) is written once for all instruction sets.
 *
 *   f32v  AG_LANES floats        compute type of float32, float16, bfloat16
 *   f64v  AG_LANES/2 doubles     compute type of float64, and accumulators of the narrower types
 *   u16v  AG_LANES 16-bit values, as in memory
 *
 * Loads and stores take any address. `partial` loads and stores access only the first n elements (0 <= n <= lanes); a
 * load sets the other lanes to zero. `stream` stores are non-temporal: they bypass the cache and need an address
 * aligned to their size.
 */

typedef float f32v __attribute__((vector_size(4 * AG_LANES)));
typedef int32_t i32v __attribute__((vector_size(4 * AG_LANES)));
typedef uint32_t u32v __attribute__((vector_size(4 * AG_LANES)));
typedef double f64v __attribute__((vector_size(4 * AG_LANES)));
typedef int64_t i64v __attribute__((vector_size(4 * AG_LANES)));
typedef uint64_t u64v __attribute__((vector_size(4 * AG_LANES)));
typedef uint16_t u16v __attribute__((vector_size(2 * AG_LANES)));

/* ---- constants, selection ---------------------------------------------------------------------------------------- */

AG_INLINE f32v v_f32_set1(float x) { return x - (f32v){0}; }
AG_INLINE f64v v_f64_set1(double x) { return x - (f64v){0}; }

/* Select `yes` in lanes where the mask is -1, and `no` where it is 0. */
AG_INLINE f32v v_f32_select(i32v mask, f32v yes, f32v no)
{
    return (f32v)((mask & (i32v)yes) | (~mask & (i32v)no));
}

/* Return a bit for each lane of a mask, the lowest for the first lane. */
AG_INLINE unsigned v_f64_bits(i64v mask)
{
#if AG_IS_AVX512
    return _mm512_movepi64_mask((__m512i)mask);
#elif AG_IS_AVX2
    return (unsigned)_mm256_movemask_pd((__m256d)mask);
#elif AG_IS_SSE2
    return (unsigned)_mm_movemask_pd((__m128d)mask);
#else
    unsigned bits = 0;
    for (int j = 0; j < AG_LANES / 2; j++) bits |= (unsigned)(mask[j] & 1) << j;
    return bits;
#endif
}

/* Return a bit for each lane in which two integers are equal. */
AG_INLINE unsigned v_i64_equal_bits(i64v a, i64v b)
{
#if AG_IS_AVX512
    return _mm512_cmpeq_epi64_mask((__m512i)a, (__m512i)b);
#else
    return v_f64_bits(a == b);
#endif
}

/* Return sum + x in lanes in which a and b are equal, else the sum. */
AG_INLINE f64v v_f64_add_where_equal(f64v sum, f64v x, i64v a, i64v b)
{
#if AG_IS_AVX512
    return _mm512_mask_add_pd(sum, _mm512_cmpeq_epi64_mask((__m512i)a, (__m512i)b), sum, x);
#else
    return sum + (f64v)((a == b) & (i64v)x);
#endif
}

AG_INLINE f64v v_f64_select(i64v mask, f64v yes, f64v no)
{
    return (f64v)((mask & (i64v)yes) | (~mask & (i64v)no));
}

/* Compute a > b ? a : b in each lane, which is b if either is NaN. */
AG_INLINE f32v v_f32_max(f32v a, f32v b)
{
#if AG_IS_AVX512
    return _mm512_max_ps(a, b);
#elif AG_IS_AVX2
    return _mm256_max_ps(a, b);
#elif AG_IS_SSE2
    return _mm_max_ps(a, b);
#else
    return v_f32_select(a > b, a, b);
#endif
}

AG_INLINE f64v v_f64_max(f64v a, f64v b)
{
#if AG_IS_AVX512
    return _mm512_max_pd(a, b);
#elif AG_IS_AVX2
    return _mm256_max_pd(a, b);
#elif AG_IS_SSE2
    return _mm_max_pd(a, b);
#else
    return v_f64_select(a > b, a, b);
#endif
}

/* Compute a < b ? a : b in each lane, which is b if either is NaN. */
AG_INLINE f32v v_f32_min(f32v a, f32v b)
{
#if AG_IS_AVX512
    return _mm512_min_ps(a, b);
#elif AG_IS_AVX2
    return _mm256_min_ps(a, b);
#elif AG_IS_SSE2
    return _mm_min_ps(a, b);
#else
    return v_f32_select(a < b, a, b);
#endif
}

AG_INLINE f64v v_f64_min(f64v a, f64v b)
{
#if AG_IS_AVX512
    return _mm512_min_pd(a, b);
#elif AG_IS_AVX2
    return _mm256_min_pd(a, b);
#elif AG_IS_SSE2
    return _mm_min_pd(a, b);
#else
    return v_f64_select(a < b, a, b);
#endif
}

/* Compute a * b + c, fused if the instruction set has that. */
AG_INLINE f32v v_f32_fma(f32v a, f32v b, f32v c)
{
#if AG_IS_AVX512
    return _mm512_fmadd_ps(a, b, c);
#elif AG_IS_AVX2
    return _mm256_fmadd_ps(a, b, c);
#elif AG_IS_NEON
    return vfmaq_f32(c, a, b);
#else
    return a * b + c;
#endif
}

AG_INLINE f64v v_f64_fma(f64v a, f64v b, f64v c)
{
#if AG_IS_AVX512
    return _mm512_fmadd_pd(a, b, c);
#elif AG_IS_AVX2
    return _mm256_fmadd_pd(a, b, c);
#elif AG_IS_NEON
    return vfmaq_f64(c, a, b);
#else
    return a * b + c;
#endif
}

/* Keep lanes 0 .. n-1 of v, and take the remaining lanes from `others`. */
AG_INLINE f32v v_f32_first(ptrdiff_t n, f32v v, f32v others)
{
    i32v lane;
    for (int i = 0; i < AG_LANES; i++) lane[i] = i;
    return v_f32_select(lane < (int32_t)n, v, others);
}

AG_INLINE f64v v_f64_first(ptrdiff_t n, f64v v, f64v others)
{
    i64v lane;
    for (int i = 0; i < AG_LANES / 2; i++) lane[i] = i;
    return v_f64_select(lane < (int64_t)n, v, others);
}

/* Join lanes n .. of v and the first n lanes of `next`; n may be the number of lanes. */
AG_INLINE f32v v_f32_join(f32v v, f32v next, ptrdiff_t n)
{
#if AG_IS_AVX512
    i32v lane;
    for (int i = 0; i < AG_LANES; i++) lane[i] = i;
    return _mm512_permutex2var_ps(v, (__m512i)(lane + (int32_t)n), next);
#else
    const f32v both[2] = {v, next};
    f32v joined;
    memcpy(&joined, (const char *)both + 4 * n, sizeof joined);
    return joined;
#endif
}

AG_INLINE f64v v_f64_join(f64v v, f64v next, ptrdiff_t n)
{
#if AG_IS_AVX512
    i64v lane;
    for (int i = 0; i < AG_LANES / 2; i++) lane[i] = i;
    return _mm512_permutex2var_pd(v, (__m512i)(lane + (int64_t)n), next);
#else
    const f64v both[2] = {v, next};
    f64v joined;
    memcpy(&joined, (const char *)both + 8 * n, sizeof joined);
    return joined;
#endif
}

/* ---- reductions, in the order of halves: lane j with lane j + lanes/2, and so on --------------------------------- */

/* Widen the first half of v into `low` and the second half into `high`. */
AG_INLINE void v_f32_widen(f32v v, f64v *low, f64v *high)
{
#if AG_IS_AVX512
    *low = _mm512_cvtps_pd(_mm512_castps512_ps256(v));
    *high = _mm512_cvtps_pd(_mm512_extractf32x8_ps(v, 1));
#elif AG_IS_AVX2
    *low = _mm256_cvtps_pd(_mm256_castps256_ps128(v));
    *high = _mm256_cvtps_pd(_mm256_extractf128_ps(v, 1));
#elif AG_IS_SSE2
    *low = _mm_cvtps_pd(v);
    *high = _mm_cvtps_pd(_mm_movehl_ps(v, v));
#elif AG_IS_NEON
    *low = vcvt_f64_f32(vget_low_f32(v));
    *high = vcvt_high_f64_f32(v);
#else
    for (int i = 0; i < AG_LANES / 2; i++) (*low)[i] = v[i], (*high)[i] = v[i + AG_LANES / 2];
#endif
}

/* Round `low` and `high` to float32, as the first and second half of a vector. */
AG_INLINE f32v v_f32_narrow(f64v low, f64v high)
{
#if AG_IS_AVX512
    return _mm512_insertf32x8(_mm512_castps256_ps512(_mm512_cvtpd_ps(low)), _mm512_cvtpd_ps(high), 1);
#elif AG_IS_AVX2
    return _mm256_insertf128_ps(_mm256_castps128_ps256(_mm256_cvtpd_ps(low)), _mm256_cvtpd_ps(high), 1);
#elif AG_IS_SSE2
    return _mm_movelh_ps(_mm_cvtpd_ps(low), _mm_cvtpd_ps(high));
#elif AG_IS_NEON
    return vcvt_high_f32_f64(vcvt_f32_f64(low), high);
#else
    f32v v;
    for (int i = 0; i < AG_LANES / 2; i++) v[i] = (float)low[i], v[i + AG_LANES / 2] = (float)high[i];
    return v;
#endif
}

AG_INLINE float v_f32_reduce_sum(f32v v)
{
#if AG_IS_AVX512
    const __m256 eight = _mm512_castps512_ps256(v) + _mm512_extractf32x8_ps(v, 1);
    const __m128 four = _mm256_castps256_ps128(eight) + _mm256_extractf128_ps(eight, 1);
    const __m128 two = four + _mm_movehl_ps(four, four);
    return two[0] + two[1];
#elif AG_IS_AVX2
    const __m128 four = _mm256_castps256_ps128(v) + _mm256_extractf128_ps(v, 1);
    const __m128 two = four + _mm_movehl_ps(four, four);
    return two[0] + two[1];
#else
    for (int half = AG_LANES / 2; half > 0; half /= 2) {
        for (int i = 0; i < half; i++) v[i] += v[i + half];
    }
    return v[0];
#endif
}

AG_INLINE double v_f64_reduce_sum(f64v v)
{
#if AG_IS_AVX512
    const __m256d four = _mm512_castpd512_pd256(v) + _mm512_extractf64x4_pd(v, 1);
    const __m128d two = _mm256_castpd256_pd128(four) + _mm256_extractf128_pd(four, 1);
    return two[0] + two[1];
#elif AG_IS_AVX2
    const __m128d two = _mm256_castpd256_pd128(v) + _mm256_extractf128_pd(v, 1);
    return two[0] + two[1];
#else
    for (int half = AG_LANES / 4; half > 0; half /= 2) {
        for (int i = 0; i < half; i++) v[i] += v[i + half];
    }
    return v[0];
#endif
}

/* Do what ag_sum_add of sums.h does for every lane. */
AG_INLINE void v_f64_add_compensated(f64v *sum, f64v *compensation, f64v x)
{
    const f64v total = *sum + x;
    const i64v is_larger = (f64v)((i64v)*sum & INT64_MAX) >= (f64v)((i64v)x & INT64_MAX); /* absolute values */
    *compensation += v_f64_select(is_larger, (*sum - total) + x, (x - total) + *sum);
    *sum = total;
}

AG_INLINE float v_f32_reduce_max(f32v v)
{
#if AG_IS_AVX512
    return _mm512_reduce_max_ps(v);
#else
    float best = v[0];
    for (int i = 1; i < AG_LANES; i++) best = v[i] > best ? v[i] : best;
    return best;
#endif
}

AG_INLINE double v_f64_reduce_max(f64v v)
{
#if AG_IS_AVX512
    return _mm512_reduce_max_pd(v);
#else
    double best = v[0];
    for (int i = 1; i < AG_LANES / 2; i++) best = v[i] > best ? v[i] : best;
    return best;
#endif
}

/* ---- float32, float64 in memory ---------------------------------------------------------------------------------- */

AG_INLINE f32v v_f32_load(const void *p)
{
    f32v v;
    memcpy(&v, p, sizeof v);
    return v;
}

AG_INLINE void v_f32_store(void *p, f32v v) { memcpy(p, &v, sizeof v); }

AG_INLINE f64v v_f64_load(const void *p)
{
    f64v v;
    memcpy(&v, p, sizeof v);
    return v;
}

AG_INLINE void v_f64_store(void *p, f64v v) { memcpy(p, &v, sizeof v); }

AG_INLINE void v_f32_stream(void *p, f32v v)
{
#if AG_IS_AVX512
    _mm512_stream_ps((float *)p, v);
#elif AG_IS_AVX2
    _mm256_stream_ps((float *)p, v);
#elif AG_IS_SSE2
    _mm_stream_ps((float *)p, v);
#else
    v_f32_store(p, v);
#endif
}

AG_INLINE void v_f64_stream(void *p, f64v v)
{
#if AG_IS_AVX512
    _mm512_stream_pd((double *)p, v);
#elif AG_IS_AVX2
    _mm256_stream_pd((double *)p, v);
#elif AG_IS_SSE2
    _mm_stream_pd((double *)p, v);
#else
    v_f64_store(p, v);
#endif
}

/* Partial loads and stores without masks are made of a few whole ones: a call of memcpy with a variable size would take
 * as long as many vectors, and save all registers. */
AG_INLINE f32v v_f32_load_partial(const void *p, ptrdiff_t n)
{
#if AG_IS_AVX512
    return _mm512_maskz_loadu_ps((__mmask16)((1u << n) - 1), p);
#elif AG_IS_AVX2
    i32v lane;
    for (int i = 0; i < AG_LANES; i++) lane[i] = i;
    return _mm256_maskload_ps((const float *)p, (__m256i)(lane < (int32_t)n));
#else
    f64v pairs = {0};
    f32v v;
    if (n & 4) return v_f32_load(p);
    if (n & 2) memcpy(&pairs, p, 8);
    v = (f32v)pairs;
    if (n == 3) memcpy((char *)&v + 8, (const char *)p + 8, 4);
    if (n == 1) memcpy(&v, p, 4);
    return v;
#endif
}

AG_INLINE void v_f32_store_partial(void *p, f32v v, ptrdiff_t n)
{
#if AG_IS_AVX512
    _mm512_mask_storeu_ps(p, (__mmask16)((1u << n) - 1), v);
#else
    char *to = (char *)p;
#if AG_IS_AVX2
    __m128 rest = _mm256_castps256_ps128(v);
    if (n & 8) {
        v_f32_store(p, v);
        return;
    }
    if (n & 4) {
        memcpy(to, &rest, 16);
        rest = _mm256_extractf128_ps(v, 1);
        to += 16;
    }
#else
    f32v rest = v;
    if (n & 4) {
        v_f32_store(p, v);
        return;
    }
#endif
    if (n & 2) {
        memcpy(to, &rest, 8);
        rest[0] = rest[2];
        to += 8;
    }
    if (n & 1) memcpy(to, &rest, 4);
#endif
}

AG_INLINE f64v v_f64_load_partial(const void *p, ptrdiff_t n)
{
#if AG_IS_AVX512
    return _mm512_maskz_loadu_pd((__mmask8)((1u << n) - 1), p);
#elif AG_IS_AVX2
    i64v lane;
    for (int i = 0; i < AG_LANES / 2; i++) lane[i] = i;
    return _mm256_maskload_pd((const double *)p, (__m256i)(lane < (int64_t)n));
#else
    f64v v = {0};
    if (n & 2) return v_f64_load(p);
    if (n) memcpy(&v, p, 8);
    return v;
#endif
}

AG_INLINE void v_f64_store_partial(void *p, f64v v, ptrdiff_t n)
{
#if AG_IS_AVX512
    _mm512_mask_storeu_pd(p, (__mmask8)((1u << n) - 1), v);
#elif AG_IS_AVX2
    char *to = (char *)p;
    __m128d rest = _mm256_castpd256_pd128(v);
    if (n & 4) {
        v_f64_store(p, v);
        return;
    }
    if (n & 2) {
        memcpy(to, &rest, 16);
        rest = _mm256_extractf128_pd(v, 1);
        to += 16;
    }
    if (n & 1) memcpy(to, &rest, 8);
#else
    if (n & 2) v_f64_store(p, v);
    if (n & 1) memcpy(p, &v, 8);
#endif
}

/* Order non-temporal stores before later stores, so that other threads may read the results. */
AG_INLINE void v_fence(void)
{
#if defined(AG_X86_64)
    _mm_sfence();
#endif
}

/* Add n numbers to AG_SUM_LANES sums, number i to sum i % AG_SUM_LANES: chains that do not wait for each other. */
AG_INLINE void v_f64_add_numbers(ag_sum *sums, const double *x, ptrdiff_t n)
{
    enum { VECTORS = AG_SUM_LANES / (AG_LANES / 2) };
    f64v sum[VECTORS], compensation[VECTORS];
    ptrdiff_t i = 0;
    for (int j = 0; j < AG_SUM_LANES; j++) {
        sum[j / (AG_LANES / 2)][j % (AG_LANES / 2)] = sums[j].sum;
        compensation[j / (AG_LANES / 2)][j % (AG_LANES / 2)] = sums[j].compensation;
    }
    for (; i + AG_SUM_LANES <= n; i += AG_SUM_LANES) {
        AG_UNROLL(4)
        for (int v = 0; v < VECTORS; v++) {
            v_f64_add_compensated(&sum[v], &compensation[v], v_f64_load(x + i + v * (AG_LANES / 2)));
        }
    }
    for (int j = 0; j < AG_SUM_LANES; j++) {
        sums[j].sum = sum[j / (AG_LANES / 2)][j % (AG_LANES / 2)];
        sums[j].compensation = compensation[j / (AG_LANES / 2)][j % (AG_LANES / 2)];
    }
    for (int j = 0; i < n; i++, j++) ag_sum_add(&sums[j], x[i]);
}
