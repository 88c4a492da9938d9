/* Copies and conversions of one instruction set. Body header, see foreach_isa.h; the manual is ../strided.h.
 *
 * A `size` is the bytes of an element; steps and row strides are in bytes.
 */

#define K(name) AG_ISA_NAME(ag_##name)

/* ---- bits: rows of elements -------------------------------------------------------------------------------------- */

/* Copy n elements. Callers pass constant steps where they can, as the compiler then vectorises the loop. */
#define AG_DEFINE_COPY(size, type, bswap)                                                                              \
    AG_INLINE void K(run_##size)(char *__restrict to, ptrdiff_t to_step, const char *__restrict from,                  \
                                 ptrdiff_t from_step, ptrdiff_t n, int swapped)                                        \
    {                                                                                                                  \
        for (ptrdiff_t i = 0; i < n; i++) {                                                                            \
            type x;                                                                                                    \
            memcpy(&x, from + i * from_step, size);                                                                    \
            if (swapped) x = bswap(x);                                                                                 \
            memcpy(to + i * to_step, &x, size);                                                                        \
        }                                                                                                              \
    }                                                                                                                  \
                                                                                                                       \
    static AG_UNUSED void K(copy_##size)(char *to, ptrdiff_t to_row, ptrdiff_t to_step, const char *from,              \
                                         ptrdiff_t from_row, ptrdiff_t from_step, ptrdiff_t rows, ptrdiff_t n,         \
                                         int swapped)                                                                  \
    {                                                                                                                  \
        if (!swapped && to_step == size && from_step != 2 * size && /* a compiled loop is as fast for a step of 2 */   \
            K(copy_steps_##size)(to, to_row, from, from_row, from_step, rows, n)) {                                    \
            return;                                                                                                    \
        }                                                                                                              \
        for (ptrdiff_t r = 0; r < rows; r++, to += to_row, from += from_row) {                                         \
            if (swapped) {                                                                                             \
                if (to_step == size && from_step == size) K(run_##size)(to, size, from, size, n, 1);                   \
                else K(run_##size)(to, to_step, from, from_step, n, 1);                                                \
            } else if (to_step == size && from_step == -size) {                                                        \
                K(run_##size)(to, size, from, -size, n, 0);                                                            \
            } else if (to_step == -size && from_step == size) {                                                        \
                K(run_##size)(to, -size, from, size, n, 0);                                                            \
            } else if (to_step == size && from_step == 2 * size) {                                                     \
                K(run_##size)(to, size, from, 2 * size, n, 0);                                                         \
            } else if (to_step == size && from_step == 0) {                                                            \
                K(run_##size)(to, size, from, 0, n, 0);                                                                \
            } else {                                                                                                   \
                K(run_##size)(to, to_step, from, from_step, n, 0);                                                     \
            }                                                                                                          \
        }                                                                                                              \
    }

AG_DEFINE_COPY(1, uint8_t, )
AG_DEFINE_COPY(2, uint16_t, __builtin_bswap16)
AG_DEFINE_COPY(4, uint32_t, __builtin_bswap32)
AG_DEFINE_COPY(8, uint64_t, __builtin_bswap64)
AG_DEFINE_COPY(16, ag_u64_pair, )
#undef AG_DEFINE_COPY

/* ---- bits: transposed blocks ------------------------------------------------------------------------------------- */

/* Interleave the first half of the rows of T x T elements in registers with the second half. Done log2(T) times, this
 * transposes the block. */
#define AG_INTERLEAVE(T, v)                                                                                            \
    do {                                                                                                               \
        AG_UNROLL(8)                                                                                                   \
        for (int i = 0; i < T / 2; i++) {                                                                              \
            y[2 * i] = AG_SHUFFLE(v, x[i], x[i + T / 2], AG_LOW_##T);                                                  \
            y[2 * i + 1] = AG_SHUFFLE(v, x[i], x[i + T / 2], AG_HIGH_##T);                                             \
        }                                                                                                              \
        AG_UNROLL(16)                                                                                                  \
        for (int i = 0; i < T; i++) x[i] = y[i];                                                                       \
    } while (0)

/* Transpose `lines` rows of n elements, both at least T: to[j][i] = from[i][j]. The last block of a row or column
 * overlaps the block before it. */
#define AG_DEFINE_TRANSPOSE(size, type, T)                                                                             \
    static AG_UNUSED void K(transpose_##size##_##T)(char *__restrict to, ptrdiff_t to_row,                             \
                                                    const char *__restrict from,                                       \
                                                    ptrdiff_t from_row, ptrdiff_t lines, ptrdiff_t n)                  \
    {                                                                                                                  \
        typedef type v __attribute__((vector_size(T * size)));                                                         \
        for (ptrdiff_t line = 0; line < lines; line += T) {                                                            \
            const ptrdiff_t i0 = line + T <= lines ? line : lines - T;                                                 \
            for (ptrdiff_t at = 0; at < n; at += T) {                                                                  \
                const ptrdiff_t j0 = at + T <= n ? at : n - T;                                                         \
                v x[T], y[T];                                                                                          \
                AG_UNROLL(16)                                                                                          \
                for (int i = 0; i < T; i++) memcpy(&x[i], from + (i0 + i) * from_row + j0 * size, sizeof(v));          \
                AG_INTERLEAVE(T, v);                                                                                   \
                AG_INTERLEAVE(T, v);                                                                                   \
                if (T >= 8) AG_INTERLEAVE(T, v);                                                                       \
                if (T >= 16) AG_INTERLEAVE(T, v);                                                                      \
                AG_UNROLL(16)                                                                                          \
                for (int j = 0; j < T; j++) memcpy(to + (j0 + j) * to_row + i0 * size, &x[j], sizeof(v));              \
            }                                                                                                          \
        }                                                                                                              \
    }

AG_DEFINE_TRANSPOSE(1, uint8_t, 8)
AG_DEFINE_TRANSPOSE(1, uint8_t, 16)
AG_DEFINE_TRANSPOSE(2, uint16_t, 4)
AG_DEFINE_TRANSPOSE(2, uint16_t, 8)
AG_DEFINE_TRANSPOSE(4, uint32_t, 4)
#if AG_LANES >= 8
AG_DEFINE_TRANSPOSE(4, uint32_t, 8)
AG_DEFINE_TRANSPOSE(8, uint64_t, 4)
#endif
#if AG_LANES >= 16
AG_DEFINE_TRANSPOSE(2, uint16_t, 16)
AG_DEFINE_TRANSPOSE(4, uint32_t, 16)
AG_DEFINE_TRANSPOSE(8, uint64_t, 8)
#endif
#undef AG_DEFINE_TRANSPOSE
#undef AG_INTERLEAVE

/* Transpose `lines` rows of n elements with the largest blocks that fit, and return 1. Return 0 if no block has this
 * element size and fits. */
static AG_UNUSED int K(transpose)(char *to, ptrdiff_t to_row, const char *from, ptrdiff_t from_row, ptrdiff_t lines,
                                  ptrdiff_t n, int size)
{
    const ptrdiff_t least = lines < n ? lines : n;
#define AG_TRY(s, T) if (size == s && least >= T) return K(transpose_##s##_##T)(to, to_row, from, from_row, lines, n), 1
#if AG_LANES >= 16
    AG_TRY(2, 16);
    AG_TRY(4, 16);
    AG_TRY(8, 8);
#endif
#if AG_LANES >= 8
    AG_TRY(4, 8);
    AG_TRY(8, 4);
#endif
    AG_TRY(1, 16);
    AG_TRY(1, 8);
    AG_TRY(2, 8);
    AG_TRY(2, 4);
    AG_TRY(4, 4);
#undef AG_TRY
    return 0;
}

/* ---- values ------------------------------------------------------------------------------------------------------ */

#define AG_DEFINE_WIDEN(dtype)                                                                                         \
    static AG_UNUSED void K(widen_##dtype)(const char *from, float *to, ptrdiff_t n)                                   \
    {                                                                                                                  \
        ptrdiff_t i = 0;                                                                                               \
        for (; i + AG_LANES <= n; i += AG_LANES) v_f32_store(to + i, v_##dtype##_load(from + 2 * i));                  \
        if (i < n) v_f32_store_partial(to + i, v_##dtype##_load_partial(from + 2 * i, n - i), n - i);                  \
    }

/* Define the conversions of float32 and float64 to a 16-bit type. */
#define AG_DEFINE_NARROW(dtype)                                                                                        \
    static AG_UNUSED void K(narrow_##dtype)(const float *from, char *to, ptrdiff_t n)                                  \
    {                                                                                                                  \
        ptrdiff_t i = 0;                                                                                               \
        for (; i + AG_LANES <= n; i += AG_LANES) v_##dtype##_store(to + 2 * i, v_f32_load(from + i));                  \
        if (i < n) v_##dtype##_store_partial(to + 2 * i, v_f32_load_partial(from + i, n - i), n - i);                  \
    }                                                                                                                  \
                                                                                                                       \
    AG_INLINE f32v K(load_f64_##dtype)(const double *from)                                                             \
    {                                                                                                                  \
        const f64v low = v_##dtype##_round_f64(v_f64_load(from));                                                      \
        return v_f32_narrow(low, v_##dtype##_round_f64(v_f64_load(from + AG_LANES / 2)));                              \
    }                                                                                                                  \
                                                                                                                       \
    static AG_UNUSED void K(narrow_f64_##dtype)(const double *from, char *to, ptrdiff_t n)                             \
    {                                                                                                                  \
        ptrdiff_t i = 0;                                                                                               \
        for (; i + AG_LANES <= n; i += AG_LANES) v_##dtype##_store(to + 2 * i, K(load_f64_##dtype)(from + i));         \
        if (i < n) {                                                                                                   \
            double rest[AG_LANES] = {0};                                                                               \
            memcpy(rest, from + i, (size_t)(n - i) * sizeof *rest);                                                    \
            v_##dtype##_store_partial(to + 2 * i, K(load_f64_##dtype)(rest), n - i);                                   \
        }                                                                                                              \
    }

AG_DEFINE_WIDEN(f16)
AG_DEFINE_WIDEN(bf16)
AG_DEFINE_NARROW(f16)
AG_DEFINE_NARROW(bf16)
#undef AG_DEFINE_WIDEN
#undef AG_DEFINE_NARROW

static AG_UNUSED void K(narrow_f64_f32)(const double *__restrict from, char *__restrict to, ptrdiff_t n)
{
    for (ptrdiff_t i = 0; i < n; i++) {
        const float x = (float)from[i];
        memcpy(to + 4 * i, &x, sizeof x);
    }
}

static AG_UNUSED void K(widen_f32_f64)(const float *__restrict from, char *__restrict to, ptrdiff_t n)
{
    for (ptrdiff_t i = 0; i < n; i++) {
        const double x = from[i];
        memcpy(to + 8 * i, &x, sizeof x);
    }
}

/* ---- the memory traffic of a backward operator ------------------------------------------------------------------- */

/* Compute out = a + b over n floats, with non-temporal stores if `nontemporal`. */
static AG_UNUSED void K(stream_add)(const float *a, const float *b, float *out, ptrdiff_t n, int nontemporal)
{
    ptrdiff_t i = 0;
    for (; i < n && (uintptr_t)(out + i) % (4 * AG_LANES); i++) out[i] = a[i] + b[i];
    if (nontemporal) {
        for (; i + AG_LANES <= n; i += AG_LANES) v_f32_stream(out + i, v_f32_load(a + i) + v_f32_load(b + i));
    } else {
        for (; i + AG_LANES <= n; i += AG_LANES) v_f32_store(out + i, v_f32_load(a + i) + v_f32_load(b + i));
    }
    for (; i < n; i++) out[i] = a[i] + b[i];
    v_fence();
}

#undef K
