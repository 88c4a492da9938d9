/* Conversions of values whose type in memory differs from the lane's type: float16, bfloat16 and masks. Body header,
 * see foreach_isa.h; vec.h describes the conventions.
 */

/* ---- 16-bit values in memory ------------------------------------------------------------------------------------- */

AG_INLINE u16v v_u16_load_partial(const void *p, ptrdiff_t n)
{
#if AG_IS_AVX512
    return (u16v)_mm256_maskz_loadu_epi16((__mmask16)((1u << n) - 1), p);
#elif AG_IS_AVX2
    /* Masks select 32 bits: pairs of values are loaded, and then the last value of an odd number. */
    const __m128i lane = _mm_set_epi16(7, 6, 5, 4, 3, 2, 1, 0);
    const __m128i pair = _mm_set_epi32(3, 2, 1, 0);
    __m128i v = _mm_maskload_epi32((const int *)p, _mm_cmpgt_epi32(_mm_set1_epi32((int)(n / 2)), pair));
    if (n & 1) {
        short last;
        memcpy(&last, (const char *)p + 2 * (n - 1), sizeof last);
        v = _mm_or_si128(v, _mm_and_si128(_mm_set1_epi16(last), _mm_cmpeq_epi16(lane, _mm_set1_epi16((short)(n - 1)))));
    }
    return (u16v)v;
#else
    const uint64_t bytes = ag_load_bytes(p, 2 * n);
    u16v v;
    memcpy(&v, &bytes, sizeof v);
    return v;
#endif
}

AG_INLINE void v_u16_store_partial(void *p, u16v v, ptrdiff_t n)
{
#if AG_IS_AVX512
    _mm256_mask_storeu_epi16(p, (__mmask16)((1u << n) - 1), (__m256i)v);
#else
    char *to = (char *)p;
    uint64_t rest;
    memcpy(&rest, &v, sizeof rest);
    if (n == AG_LANES) {
        memcpy(p, &v, sizeof v);
        return;
    }
#if AG_IS_AVX2
    if (n & 4) {
        memcpy(to, &rest, 8);
        rest = (uint64_t)_mm_extract_epi64((__m128i)v, 1);
        to += 8;
    }
#endif
    if (n & 2) {
        memcpy(to, &rest, 4);
        rest >>= 32;
        to += 4;
    }
    if (n & 1) memcpy(to, &rest, 2);
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

/* Widen bfloat16, which is the upper half of a float32. */
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

/* Round to bfloat16, to nearest even, in the upper half of each lane; the lower half of the result is meaningless. NaN
 * stays NaN (with the quiet bit set), and subnormals are kept. */
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
    __m256i narrow = _mm512_cvtepi32_epi16((__m512i)result);
    __asm__("" : "+v"(narrow)); /* keeps the compiler from storing with VPMOVDW, which is slow */
    return (u16v)narrow;
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
    /* The shifted exponent and fraction, read as float32, are the value times 2**-112. One product restores the value,
     * also of subnormals. */
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
    /* Normal results: rebias the exponent and round away 13 bits. A carry into the exponent (up to infinity) is
     * right. */
    const u32v normal = (magnitude - 0x38000000 + 0xfff + ((magnitude >> 13) & 1)) >> 13;
    /* Results below 2**-14: adding 0.5 aligns the last bit of float16 subnormals with the float32's last bit, and
     * rounds. */
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

/* Load or store two vectors of consecutive values, in an order that does not matter to the
 * caller. For bfloat16 one vector has the elements with even indices, the other the odd ones: half the instructions. */
#define AG_TWO(dtype, vector, size)                                                                                    \
    AG_INLINE void v_##dtype##_load_two(const char *p, vector *x, vector *y)                                           \
    {                                                                                                                  \
        *x = v_##dtype##_load(p);                                                                                      \
        *y = v_##dtype##_load(p + size);                                                                               \
    }                                                                                                                  \
    AG_INLINE void v_##dtype##_store_two(char *p, vector x, vector y)                                                  \
    {                                                                                                                  \
        v_##dtype##_store(p, x);                                                                                       \
        v_##dtype##_store(p + size, y);                                                                                \
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

/* Store two vectors as 16-bit values in one non-temporal store, as non-temporal stores of half cache lines are slow.
 * The address is aligned to the size of a whole vector. */
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

/* ---- float64 to 16 bits ------------------------------------------------------------------------------------------ */

/* Round once to the significant binary digits of a 16-bit type, so that further conversions are exact, except for
 * overflow. Adding a number whose last place is the last digit to keep rounds the sum there. `smallest` is the smallest
 * normal number of the type. */
AG_INLINE f64v v_f64_round_to_digits(f64v x, int digits, double smallest)
{
    const u64v sign = (u64v)x & (u64v)v_f64_set1(-0.0);
    f64v power = (f64v)((u64v)x & (u64v)v_f64_set1(INFINITY)); /* the largest power of two up to |x| */
    power = v_f64_min(v_f64_set1(0x1p200), v_f64_max(v_f64_set1(smallest), power));
    const f64v large = power * (1.5 * (double)((uint64_t)1 << (53 - digits)));
    const f64v rounded = (x + large) - large;
    return (f64v)(((u64v)rounded & ~(u64v)v_f64_set1(-0.0)) | sign);
}

AG_INLINE f64v v_f16_round_f64(f64v x) { return v_f64_round_to_digits(x, 11, 0x1p-14); }
AG_INLINE f64v v_bf16_round_f64(f64v x) { return v_f64_round_to_digits(x, 8, 0x1p-126); }

/* ---- masks: bytes that are zero or not, to lanes of 0 or -1 ------------------------------------------------------ */

#if !AG_IS_AVX512
AG_INLINE i32v v_f32_mask_of(uint64_t bytes)
{
#if AG_IS_AVX2
    return (i32v)_mm256_cvtepu8_epi32(_mm_cvtsi64_si128((long long)bytes)) != 0;
#else
    return (i32v){(int)(bytes & 0xff), (int)(bytes >> 8 & 0xff), (int)(bytes >> 16 & 0xff), (int)(bytes >> 24 & 0xff)} != 0;
#endif
}
#endif

AG_INLINE i64v v_f64_mask_of(uint64_t bytes)
{
#if AG_IS_AVX512
    return (i64v)_mm512_cvtepu8_epi64(_mm_cvtsi64_si128((long long)bytes)) != 0;
#elif AG_IS_AVX2
    return (i64v)_mm256_cvtepu8_epi64(_mm_cvtsi64_si128((long long)bytes)) != 0;
#else
    return (i64v){(int64_t)(bytes & 0xff), (int64_t)(bytes >> 8 & 0xff)} != 0;
#endif
}

AG_INLINE i32v v_f32_mask(const uint8_t *p)
{
#if AG_IS_AVX512
    return (i32v)_mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i *)p)) != 0;
#else
    uint64_t bytes = 0;
    memcpy(&bytes, p, AG_LANES);
    return v_f32_mask_of(bytes);
#endif
}

AG_INLINE i64v v_f64_mask(const uint8_t *p)
{
    uint64_t bytes = 0;
    memcpy(&bytes, p, AG_LANES / 2);
    return v_f64_mask_of(bytes);
}

AG_INLINE i32v v_f32_mask_partial(const uint8_t *p, ptrdiff_t n)
{
#if AG_IS_AVX512
    return (i32v)_mm512_cvtepu8_epi32(_mm_maskz_loadu_epi8((__mmask16)((1u << n) - 1), p)) != 0;
#else
    return v_f32_mask_of(ag_load_bytes(p, n));
#endif
}

AG_INLINE i64v v_f64_mask_partial(const uint8_t *p, ptrdiff_t n) { return v_f64_mask_of(ag_load_bytes(p, n)); }
