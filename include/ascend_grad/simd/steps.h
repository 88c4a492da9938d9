/* Copies of elements with steps of 2 to 8 elements, by permutes. Body header, see foreach_isa.h; the manual is ../strided.h.
 *
 * A block, the elements of one stored vector, is read by `step` vectors, and each of them is permuted to the lanes of its
 * elements. Vector j begins j vectors after the first element of the block. The last vector ends at the last element
 * instead, as the memory after it may not be readable. The last block of a row overlaps the block before it.
 *
 * There are no permutes where they were no faster than loops (Granite Rapids, tiles in L2): with vectors of 64 bytes for
 * steps of 5 to 8 elements of 8 bytes; with vectors of 32 bytes for steps of 8 elements of 2 bytes and of 6 to 8 elements
 * of 4 bytes, and for all elements of 8 bytes.
 */

#define K(name) AG_ISA_NAME(ag_##name)

#if AG_IS_AVX512 || AG_IS_AVX2

/* The first element of vector j, counted from the first element of the block, for vectors of T elements. */
#define AG_START(j, T) ((j) < step - 1 ? (j) * (T) : (step - 1) * ((T) - 1))

/* Copy the rows by blocks of T elements. `load` is the vector of the block that begins at `block`. */
#define AG_COPY_BLOCKS(size, T, load)                                                                                  \
    do {                                                                                                               \
        const ptrdiff_t from_step = reversed ? -step * size : step * size;                                             \
        if (reversed) from -= (T - 1) * step * size;                                                                   \
        for (ptrdiff_t r = 0; r < rows; r++, to += to_row, from += from_row) {                                         \
            for (ptrdiff_t k = 0; k < n; k += T) {                                                                     \
                const ptrdiff_t i = k + T <= n ? k : n - T;                                                            \
                const char *block = from + i * from_step;                                                              \
                v_f32_store(to + i * size, (f32v)load);                                                                \
            }                                                                                                          \
        }                                                                                                              \
    } while (0)

#if AG_IS_AVX512
#define AG_DEFINE_STEP(size, type, T, bits)                                                                            \
    AG_INLINE __m512i K(load_block_##size)(const char *block, const int step, const __m512i *index,                    \
                                           const __mmask##T *is_inside)                                                \
    {                                                                                                                  \
        __m512i x = _mm512_permutexvar_epi##bits(index[0], _mm512_loadu_si512(block));                                 \
        AG_UNROLL(8)                                                                                                   \
        for (int j = 1; j < step; j++) {                                                                               \
            x = _mm512_mask_permutexvar_epi##bits(x, is_inside[j], index[j],                                           \
                                                  _mm512_loadu_si512(block + AG_START(j, T) * size));                  \
        }                                                                                                              \
        return x;                                                                                                      \
    }                                                                                                                  \
                                                                                                                       \
    AG_INLINE void K(step_##size)(char *__restrict to, ptrdiff_t to_row, const char *__restrict from,                  \
                                  ptrdiff_t from_row, ptrdiff_t rows, ptrdiff_t n, const int step, int reversed)       \
    {                                                                                                                  \
        typedef type v __attribute__((vector_size(64)));                                                               \
        __m512i index[8];                                                                                              \
        __mmask##T is_inside[8];                                                                                       \
        v element;                                                                                                     \
        for (int lane = 0; lane < T; lane++) element[lane] = (type)((reversed ? T - 1 - lane : lane) * step);          \
        AG_UNROLL(8)                                                                                                   \
        for (int j = 0; j < step; j++) {                                                                               \
            index[j] = (__m512i)(element - (type)AG_START(j, T));                                                      \
            is_inside[j] = _mm512_cmplt_epu##bits##_mask(index[j], _mm512_set1_epi##bits(T));                          \
        }                                                                                                              \
        AG_COPY_BLOCKS(size, T, K(load_block_##size)(block, step, index, is_inside));                                  \
    }
AG_DEFINE_STEP(2, uint16_t, 32, 16)
AG_DEFINE_STEP(4, uint32_t, 16, 32)
AG_DEFINE_STEP(8, uint64_t, 8, 64)
#else
/* Bytes are permuted within halves of a vector, so a block is two blocks of T elements side by side. */
#define AG_DEFINE_STEP(size, T)                                                                                        \
    AG_INLINE __m256i K(load_blocks_##size)(const char *low, const char *high, const int step, const __m256i *index)   \
    {                                                                                                                  \
        __m256i x = _mm256_setzero_si256();                                                                            \
        AG_UNROLL(8)                                                                                                   \
        for (int j = 0; j < step; j++) {                                                                               \
            const __m128i *first = (const __m128i *)(low + AG_START(j, T) * size);                                     \
            const __m128i *second = (const __m128i *)(high + AG_START(j, T) * size);                                   \
            x |= _mm256_shuffle_epi8(_mm256_inserti128_si256(_mm256_castsi128_si256(_mm_loadu_si128(first)),           \
                                                             _mm_loadu_si128(second), 1), index[j]);                   \
        }                                                                                                              \
        return x;                                                                                                      \
    }                                                                                                                  \
                                                                                                                       \
    AG_INLINE void K(step_##size)(char *__restrict to, ptrdiff_t to_row, const char *__restrict from,                  \
                                  ptrdiff_t from_row, ptrdiff_t rows, ptrdiff_t n, const int step, int reversed)       \
    {                                                                                                                  \
        typedef int8_t v __attribute__((vector_size(32)));                                                             \
        const ptrdiff_t low = reversed ? T * step * size : 0, high = T * step * size - low;                            \
        __m256i index[8];                                                                                              \
        v element, byte;                                                                                               \
        for (int i = 0; i < 32; i++) {                                                                                 \
            const int lane = i % 16 / size;                                                                            \
            element[i] = (int8_t)((reversed ? T - 1 - lane : lane) * step);                                            \
            byte[i] = (int8_t)(i % size);                                                                              \
        }                                                                                                              \
        AG_UNROLL(8)                                                                                                   \
        for (int j = 0; j < step; j++) {                                                                               \
            const v at = element - (int8_t)AG_START(j, T), is_inside = (at >= 0) & (at < T);                           \
            index[j] = (__m256i)(((at * size + byte) & is_inside) | (INT8_MIN & ~is_inside)); /* INT8_MIN: 0 */        \
        }                                                                                                              \
        AG_COPY_BLOCKS(size, 2 * T, K(load_blocks_##size)(block + low, block + high, step, index));                    \
    }
AG_DEFINE_STEP(2, 8)
AG_DEFINE_STEP(4, 4)
#endif
#undef AG_DEFINE_STEP
#undef AG_COPY_BLOCKS
#undef AG_START
#endif

/* Copy rows of n adjacent elements from rows with a step, and return 1. Return 0 if there are no permutes for the step, or
 * fewer elements than a block has. */
#define AG_CASE(size, distance)                                                                                        \
    case distance:                                                                                                     \
        return K(step_##size)(to, to_row, from, from_row, rows, n, distance, from_step < 0), 1;
#define AG_TO_4(size) AG_CASE(size, 2) AG_CASE(size, 3) AG_CASE(size, 4)
#define AG_TO_5(size) AG_TO_4(size) AG_CASE(size, 5)
#define AG_TO_7(size) AG_TO_5(size) AG_CASE(size, 6) AG_CASE(size, 7)
#define AG_TO_8(size) AG_TO_7(size) AG_CASE(size, 8)
#define AG_DEFINE_COPY_STEPS(size, longest)                                                                            \
    enum { K(longest_step_##size) = longest };                                                                         \
                                                                                                                       \
    static AG_UNUSED int K(copy_steps_##size)(char *to, ptrdiff_t to_row, const char *from, ptrdiff_t from_row,        \
                                              ptrdiff_t from_step, ptrdiff_t rows, ptrdiff_t n)                        \
    {                                                                                                                  \
        const ptrdiff_t bytes = from_step < 0 ? -from_step : from_step;                                                \
        if (n * size < 4 * AG_LANES || bytes % size) return 0;                                                         \
        switch (bytes / size) { AG_TO_##longest(size) default: return 0; }                                             \
    }
/* Define the function of elements without permutes. */
#define AG_DEFINE_NO_STEPS(size)                                                                                       \
    enum { K(longest_step_##size) = 0 };                                                                               \
                                                                                                                       \
    AG_INLINE int K(copy_steps_##size)(char *to, ptrdiff_t to_row, const char *from, ptrdiff_t from_row,               \
                                       ptrdiff_t from_step, ptrdiff_t rows, ptrdiff_t n)                               \
    {                                                                                                                  \
        (void)to, (void)to_row, (void)from, (void)from_row, (void)from_step, (void)rows, (void)n;                      \
        return 0;                                                                                                      \
    }
AG_DEFINE_NO_STEPS(1)
AG_DEFINE_NO_STEPS(16)
#if AG_IS_AVX512
AG_DEFINE_COPY_STEPS(2, 8)
AG_DEFINE_COPY_STEPS(4, 8)
AG_DEFINE_COPY_STEPS(8, 4)
#elif AG_IS_AVX2
AG_DEFINE_COPY_STEPS(2, 7)
AG_DEFINE_COPY_STEPS(4, 5)
AG_DEFINE_NO_STEPS(8)
#else
AG_DEFINE_NO_STEPS(2)
AG_DEFINE_NO_STEPS(4)
AG_DEFINE_NO_STEPS(8)
#endif

/* Return the longest step of rows of n elements of `size` bytes for which there are permutes, or 0. */
static AG_UNUSED int K(longest_step)(int size, ptrdiff_t n)
{
    if (n * size < 4 * AG_LANES) return 0;
    return size == 2 ? K(longest_step_2) : size == 4 ? K(longest_step_4) : size == 8 ? K(longest_step_8) : 0;
}

#undef AG_CASE
#undef AG_TO_4
#undef AG_TO_5
#undef AG_TO_7
#undef AG_TO_8
#undef AG_DEFINE_COPY_STEPS
#undef AG_DEFINE_NO_STEPS
#undef K
