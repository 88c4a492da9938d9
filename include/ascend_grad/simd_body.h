/* Vectors of one instruction set. Body header: included once per AG_ISA with AG_LANES (float32 lanes of a vector).
 *
 * Plain GCC/Clang vector arithmetic wherever it compiles to the right instruction; intrinsics only for what it cannot
 * say: fused multiply-add, float16, non-temporal and masked access, halves of a vector. Everything else (bfloat16,
 * selection, exp) is written once for all.
 *
 *   f32v  AG_LANES floats        compute type of float32, float16, bfloat16
 *   f64v  AG_LANES/2 doubles     compute type of float64, and the accumulators of the narrower ones
 *   u16v  AG_LANES 16-bit values as they lie in memory
 *
 * Loads and stores take any address. `partial` ones touch the first n elements only (0 <= n < lanes); the lanes beyond
 * are zero. Streams bypass the cache and need an address aligned to their size.
 *
 * exp: k = round(x / ln 2), r = x - k ln 2 in two steps, a polynomial on |r| <= ln(2)/2 (our minimax; float32: degree 6,
 * float64: degree 11, with errors of 0.06 * 2**-24 and 2**-53), then 2**k, as a product of two powers where there is no
 * instruction for it, so that overflow comes out by itself. The polynomials are evaluated in pairs of terms (Estrin's
 * scheme): what limits them is how long one step waits for another. NaN passes through, exp(-inf) = 0. Arithmetic that
 * underflows takes some CPUs a hundred cycles: in float32 everything below the smallest normal number is 0, in float64,
 * whose range is rarely left, underflow is gradual; what is 0 in the end costs nothing in either. (The square of an
 * argument of some 1e-20, in float64 1e-78 or 1e-160, underflows, too: such logits are slow, and right.)
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

/* yes where the mask is -1, no where it is 0 */
AG_INLINE f32v v_f32_select(i32v mask, f32v yes, f32v no)
{
    return (f32v)((mask & (i32v)yes) | (~mask & (i32v)no));
}

AG_INLINE f64v v_f64_select(i64v mask, f64v yes, f64v no)
{
    return (f64v)((mask & (i64v)yes) | (~mask & (i64v)no));
}

/* a > b ? a : b in each lane: b where either is NaN */
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

/* a < b ? a : b in each lane: b where either is NaN */
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

/* a * b + c, fused where the instruction set can */
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

/* lanes 0 .. n-1 of v, the others replaced */
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

/* lanes n .. of one vector, and the first n of the next; n may be all */
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

/* ---- reductions, in the order of halves: lane j with lane j + lanes/2, and so on ----------------------------------- */

/* low += the first half of v, high += the second, in float64 */
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

/* The reverse, rounded. */
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

/* ---- float32, float64 in memory ------------------------------------------------------------------------------------ */

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

AG_INLINE f32v v_f32_load_partial(const void *p, ptrdiff_t n)
{
#if AG_IS_AVX512
    return _mm512_maskz_loadu_ps((__mmask16)((1u << n) - 1), p);
#else
    f32v v = {0};
    memcpy(&v, p, (size_t)n * 4);
    return v;
#endif
}

AG_INLINE void v_f32_store_partial(void *p, f32v v, ptrdiff_t n)
{
#if AG_IS_AVX512
    _mm512_mask_storeu_ps(p, (__mmask16)((1u << n) - 1), v);
#else
    memcpy(p, &v, (size_t)n * 4);
#endif
}

AG_INLINE f64v v_f64_load_partial(const void *p, ptrdiff_t n)
{
#if AG_IS_AVX512
    return _mm512_maskz_loadu_pd((__mmask8)((1u << n) - 1), p);
#else
    f64v v = {0};
    memcpy(&v, p, (size_t)n * 8);
    return v;
#endif
}

AG_INLINE void v_f64_store_partial(void *p, f64v v, ptrdiff_t n)
{
#if AG_IS_AVX512
    _mm512_mask_storeu_pd(p, (__mmask8)((1u << n) - 1), v);
#else
    memcpy(p, &v, (size_t)n * 8);
#endif
}

/* ---- 16-bit values in memory --------------------------------------------------------------------------------------- */

AG_INLINE u16v v_u16_load_partial(const void *p, ptrdiff_t n)
{
#if AG_IS_AVX512
    return (u16v)_mm256_maskz_loadu_epi16((__mmask16)((1u << n) - 1), p);
#else
    u16v v = {0};
    memcpy(&v, p, (size_t)n * 2);
    return v;
#endif
}

AG_INLINE void v_u16_store_partial(void *p, u16v v, ptrdiff_t n)
{
#if AG_IS_AVX512
    _mm256_mask_storeu_epi16(p, (__mmask16)((1u << n) - 1), (__m256i)v);
#else
    memcpy(p, &v, (size_t)n * 2);
#endif
}

AG_INLINE void v_u16_store(void *p, u16v v) { memcpy(p, &v, sizeof v); }

AG_INLINE void v_u16_stream(void *p, u16v v)
{
#if AG_IS_AVX512
    _mm256_stream_si256((__m256i *)p, (__m256i)v);
#elif AG_IS_AVX2
    _mm_stream_si128((__m128i *)p, (__m128i)v);
#elif AG_IS_SSE2
    long long bits;
    memcpy(&bits, &v, sizeof bits);
    _mm_stream_si64((long long *)p, bits);
#else
    v_u16_store(p, v);
#endif
}

/* bfloat16 is the upper half of a float32 */
AG_INLINE f32v v_bf16_widen(u16v h)
{
#if AG_IS_AVX512
    return (f32v)_mm512_slli_epi32(_mm512_cvtepu16_epi32((__m256i)h), 16);
#elif AG_IS_AVX2
    return (f32v)_mm256_slli_epi32(_mm256_cvtepu16_epi32((__m128i)h), 16);
#else
    return (f32v)(__builtin_convertvector(h, u32v) << 16);
#endif
}

/* Rounded to nearest even in the upper half of each lane, the lower half being of no meaning. NaN stays NaN (the quiet bit
 * set), subnormals are kept. */
AG_INLINE u32v v_bf16_round(f32v v)
{
    const u32v bits = (u32v)v;
    const u32v rounded = bits + 0x7fff + ((bits >> 16) & 1);
#if AG_IS_AVX512
    const __mmask16 is_nan = _mm512_cmp_ps_mask(v, v, _CMP_UNORD_Q);
    return (u32v)_mm512_mask_or_epi32((__m512i)rounded, is_nan, (__m512i)bits, _mm512_set1_epi32(0x400000));
#else
    const u32v is_nan = (u32v)(v != v);
    return (is_nan & (bits | 0x400000)) | (~is_nan & rounded);
#endif
}

AG_INLINE u16v v_bf16_narrow(f32v v)
{
    const u32v result = v_bf16_round(v) >> 16;
#if AG_IS_AVX512
    return (u16v)_mm512_cvtepi32_epi16((__m512i)result);
#elif AG_IS_AVX2
    const __m256i pairs = _mm256_packus_epi32((__m256i)result, (__m256i)result);
    return (u16v)_mm256_castsi256_si128(_mm256_permute4x64_epi64(pairs, 0x08));
#else
    return __builtin_convertvector(result, u16v);
#endif
}

AG_INLINE_LARGE f32v v_f16_widen(u16v h)
{
#if AG_IS_AVX512
    return _mm512_cvtph_ps((__m256i)h);
#elif AG_IS_AVX2
    return _mm256_cvtph_ps((__m128i)h);
#elif AG_IS_NEON
    return vcvt_f32_f16(vreinterpret_f16_u16(h));
#else
    /* Exponent and fraction moved into place are the value times 2**-112: one product restores it, subnormals too. */
    const u32v bits = __builtin_convertvector(h, u32v);
    const u32v magnitude = (bits & 0x7fff) << 13;
    const u32v finite = (u32v)((f32v)magnitude * 0x1p112f);
    const u32v is_special = (u32v)((bits & 0x7c00) == 0x7c00);
    return (f32v)((finite & ~is_special) | ((magnitude | 0x7f800000) & is_special) | ((bits & 0x8000) << 16));
#endif
}

AG_INLINE_LARGE u16v v_f16_narrow(f32v v)
{
#if AG_IS_AVX512
    return (u16v)_mm512_cvtps_ph(v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
#elif AG_IS_AVX2
    return (u16v)_mm256_cvtps_ph(v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
#elif AG_IS_NEON
    return vreinterpret_u16_f16(vcvt_f16_f32(v));
#else
    const u32v bits = (u32v)v;
    const u32v sign = (bits >> 16) & 0x8000;
    const u32v magnitude = bits & 0x7fffffff;
    /* normal: rebias the exponent and round the 13 bits away; a carry into the exponent (up to infinity) is right */
    const u32v normal = (magnitude - 0x38000000 + 0xfff + ((magnitude >> 13) & 1)) >> 13;
    /* below 2**-14: adding 0.5 aligns the unit of float16 subnormals with the last bit, and rounds */
    const u32v subnormal = (u32v)((f32v)magnitude + 0.5f) - 0x3f000000;
    const u32v is_small = (u32v)(magnitude < 0x38800000);
    const u32v is_large = (u32v)(magnitude >= 0x47800000);
    const u32v is_nan = (u32v)(magnitude > 0x7f800000);
    const u32v special = 0x7c00 | (is_nan & (0x200 | ((magnitude >> 13) & 0x3ff)));
    const u32v ordinary = (is_small & subnormal) | (~is_small & normal);
    return __builtin_convertvector(sign | (is_large & special) | (~is_large & ordinary), u16v);
#endif
}

AG_INLINE f32v v_bf16_load(const void *p)
{
    u16v h;
    memcpy(&h, p, sizeof h);
    return v_bf16_widen(h);
}

AG_INLINE f32v v_f16_load(const void *p)
{
    u16v h;
    memcpy(&h, p, sizeof h);
    return v_f16_widen(h);
}

AG_INLINE f32v v_bf16_load_partial(const void *p, ptrdiff_t n) { return v_bf16_widen(v_u16_load_partial(p, n)); }
AG_INLINE f32v v_f16_load_partial(const void *p, ptrdiff_t n) { return v_f16_widen(v_u16_load_partial(p, n)); }
AG_INLINE void v_bf16_store(void *p, f32v v) { v_u16_store(p, v_bf16_narrow(v)); }
AG_INLINE void v_f16_store(void *p, f32v v) { v_u16_store(p, v_f16_narrow(v)); }
AG_INLINE void v_bf16_stream(void *p, f32v v) { v_u16_stream(p, v_bf16_narrow(v)); }
AG_INLINE void v_f16_stream(void *p, f32v v) { v_u16_stream(p, v_f16_narrow(v)); }

AG_INLINE void v_bf16_store_partial(void *p, f32v v, ptrdiff_t n) { v_u16_store_partial(p, v_bf16_narrow(v), n); }
AG_INLINE void v_f16_store_partial(void *p, f32v v, ptrdiff_t n) { v_u16_store_partial(p, v_f16_narrow(v), n); }

/* Two vectors of consecutive values whose order within the two does not matter: of bfloat16 those at even and at odd
 * places, which takes half the instructions. */
#define AG_TWO(dtype, vector, size)                                                                                     \
    AG_INLINE void v_##dtype##_load_two(const char *p, vector *x, vector *y)                                            \
    {                                                                                                                   \
        *x = v_##dtype##_load(p);                                                                                       \
        *y = v_##dtype##_load(p + size);                                                                                \
    }                                                                                                                   \
    AG_INLINE void v_##dtype##_store_two(char *p, vector x, vector y)                                                   \
    {                                                                                                                   \
        v_##dtype##_store(p, x);                                                                                        \
        v_##dtype##_store(p + size, y);                                                                                 \
    }

AG_TWO(f32, f32v, sizeof(f32v))
AG_TWO(f64, f64v, sizeof(f64v))
AG_TWO(f16, f32v, sizeof(u16v))
#undef AG_TWO

AG_INLINE void v_f32_stream_two(char *p, f32v x, f32v y)
{
    v_f32_stream(p, x);
    v_f32_stream(p + sizeof x, y);
}

AG_INLINE void v_f64_stream_two(char *p, f64v x, f64v y)
{
    v_f64_stream(p, x);
    v_f64_stream(p + sizeof x, y);
}

/* Of 16-bit values, as one vector: halves of cache lines are slow to stream. The address is aligned to both. */
AG_INLINE void v_f16_stream_two(char *p, f32v x, f32v y)
{
    const u16v halves[2] = {v_f16_narrow(x), v_f16_narrow(y)};
    f32v both;
    memcpy(&both, halves, sizeof both);
    v_f32_stream(p, both);
}

AG_INLINE void v_bf16_load_two(const char *p, f32v *x, f32v *y)
{
    u32v pairs;
    memcpy(&pairs, p, sizeof pairs);
    *x = (f32v)(pairs << 16);
    *y = (f32v)(pairs & 0xffff0000);
}

AG_INLINE u32v v_bf16_pairs(f32v x, f32v y) { return (v_bf16_round(x) >> 16) | (v_bf16_round(y) & 0xffff0000); }

AG_INLINE void v_bf16_store_two(char *p, f32v x, f32v y)
{
    const u32v pairs = v_bf16_pairs(x, y);
    memcpy(p, &pairs, sizeof pairs);
}

AG_INLINE void v_bf16_stream_two(char *p, f32v x, f32v y) { v_f32_stream(p, (f32v)v_bf16_pairs(x, y)); }

/* ---- masks: bytes that are zero or not, to lanes of 0 or -1 -------------------------------------------------------- */

AG_INLINE i32v v_f32_mask(const uint8_t *p)
{
#if AG_IS_AVX512
    return (i32v)_mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i *)p)) != 0;
#elif AG_IS_AVX2
    return (i32v)_mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i *)p)) != 0;
#else
    i32v v = {0};
    for (int i = 0; i < AG_LANES; i++) v[i] = p[i];
    return v != 0;
#endif
}

AG_INLINE i64v v_f64_mask(const uint8_t *p)
{
    i64v v = {0};
    for (int i = 0; i < AG_LANES / 2; i++) v[i] = p[i];
    return v != 0;
}

AG_INLINE i32v v_f32_mask_partial(const uint8_t *p, ptrdiff_t n)
{
    uint8_t bytes[AG_LANES] = {0};
    for (ptrdiff_t i = 0; i < n; i++) bytes[i] = p[i];
    return v_f32_mask(bytes);
}

AG_INLINE i64v v_f64_mask_partial(const uint8_t *p, ptrdiff_t n)
{
    uint8_t bytes[AG_LANES] = {0};
    for (ptrdiff_t i = 0; i < n; i++) bytes[i] = p[i];
    return v_f64_mask(bytes);
}

/* ---- exp ------------------------------------------------------------------------------------------------------------ */

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

/* Natural logarithm of numbers from 1 on, or NaN. x = m * 2**k with m next to 1, s = (m - 1) / (m + 1), and log(m) = 2 atanh(s)
 * by its series; 2 s is taken as f - s f, with f = m - 1, which is exact. The error is about one unit of the last place. */
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

/* After streams, before another thread may look. */
AG_INLINE void v_fence(void)
{
#if defined(AG_X86_64)
    _mm_sfence();
#endif
}
