/* Names that every header shares: dtypes, and macros to compile one body several times.
 *
 * A kernel body is a header without include guard. It is included once per instruction set (foreach_isa.h), and
 * possibly per dtype, each time with AG_ISA (and AG_DTYPE) defined. All names that it defines are AG_ISA_NAME(x) or
 * AG_KERNEL_NAME(x).
 */
#ifndef ASCEND_GRAD_BASE_H
#define ASCEND_GRAD_BASE_H

#include <stddef.h>
#include <stdint.h>
#include <string.h>

#if !defined(__GNUC__)
#error "ascend_grad needs the vector extensions of GCC or Clang"
#endif

#if defined(__x86_64__)
#define AG_X86_64 1
#include <immintrin.h>
#elif defined(__aarch64__)
#define AG_AARCH64 1
#include <arm_neon.h>
#endif

#define AG_INLINE static inline __attribute__((always_inline))
#define AG_UNUSED __attribute__((unused))
#define AG_NOINLINE static __attribute__((noinline, unused))

#define AG_CONCAT3_(a, b, c) a##_##b##_##c
#define AG_CONCAT2_(a, b) a##_##b
#define AG_CONCAT3(a, b, c) AG_CONCAT3_(a, b, c)
#define AG_CONCAT2(a, b) AG_CONCAT2_(a, b)
#define AG_ISA_NAME(x) AG_CONCAT2(x, AG_ISA)
#define AG_KERNEL_NAME(x) AG_CONCAT3(x, AG_DTYPE, AG_ISA)

#if defined(__clang__)
#define AG_PRAGMA(x) _Pragma(#x)
#define AG_TARGET_BEGIN(features) \
    AG_PRAGMA(clang attribute push(__attribute__((target(features))), apply_to = function))
#define AG_TARGET_END _Pragma("clang attribute pop")
#define AG_UNROLL(n) AG_PRAGMA(clang loop unroll_count(n))
#else
#define AG_PRAGMA(x) _Pragma(#x)
#define AG_TARGET_BEGIN(features) AG_PRAGMA(GCC push_options) AG_PRAGMA(GCC target(features))
#define AG_TARGET_END _Pragma("GCC pop_options")
#define AG_UNROLL(n) AG_PRAGMA(GCC unroll n)
#endif

/* A vector made of elements of a and b, selected by index: with n elements in a, index n is the first element of b. */
#if defined(__clang__) || __GNUC__ >= 12
#define AG_SHUFFLE(vector, a, b, ...) __builtin_shufflevector(a, b, __VA_ARGS__)
#else
#define AG_SHUFFLE(vector, a, b, ...) __builtin_shuffle(a, b, (vector){__VA_ARGS__})
#endif

/* Floating dtypes of the library. 16-bit values are passed as uint16_t. */
typedef enum { AG_FLOAT32, AG_FLOAT16, AG_BFLOAT16, AG_FLOAT64, AG_DTYPE_COUNT } ag_dtype;

static const int ag_itemsize[AG_DTYPE_COUNT] = {4, 2, 2, 8};

/* Load n bytes, at most 8, as the lowest ones of a number. */
AG_INLINE uint64_t ag_load_bytes(const void *p, ptrdiff_t n)
{
    const char *bytes = (const char *)p;
    uint32_t four = 0;
    uint16_t two = 0;
    uint8_t one = 0;
    uint64_t eight;
    if (n & 8) {
        memcpy(&eight, bytes, 8);
        return eight;
    }
    if (n & 4) memcpy(&four, bytes, 4);
    if (n & 2) memcpy(&two, bytes + (n & 4), 2);
    if (n & 1) memcpy(&one, bytes + (n & 6), 1);
    return four | (uint64_t)two << 8 * (n & 4) | (uint64_t)one << 8 * (n & 6);
}

#endif
