# What the C headers offer, for Cython.

from libc.stdint cimport uint8_t

cdef extern from "ascend_grad/cpu.h" nogil:
    ctypedef enum ag_variant:
        AG_VARIANT_BASELINE
        AG_VARIANT_COUNT
    const char *const ag_variant_names[]
    int ag_variant_supported(ag_variant variant)
    ag_variant ag_best_variant()
    long ag_cache_size(int level, long fallback)

cdef extern from "ascend_grad/fpenv.h" nogil:
    ctypedef int ag_fpenv
    ag_fpenv ag_fpenv_enter()
    void ag_fpenv_leave(ag_fpenv mode)

cdef extern from "ascend_grad/rowwise.h" nogil:
    ctypedef enum ag_dtype:
        AG_FLOAT32
        AG_FLOAT16
        AG_BFLOAT16
        AG_FLOAT64
    const int ag_itemsize[]

    ctypedef enum ag_row_op:
        AG_SOFTMAX_BACKWARD
        AG_LOG_SOFTMAX_BACKWARD
        AG_SCALED_MASKED_SOFTMAX_BACKWARD
        AG_SOFTMAX
        AG_LOG_SOFTMAX
        AG_SCALED_MASKED_SOFTMAX

    enum:
        AG_MAX_COLUMNS
        AG_PACKED_COLUMNS
        AG_SCRATCH_BYTES

    ctypedef struct ag_tile:
        const char *a
        const char *b
        const uint8_t *mask
        char *out
        Py_ssize_t a_stride
        Py_ssize_t b_stride
        Py_ssize_t mask_stride
        Py_ssize_t out_stride
        Py_ssize_t rows
        Py_ssize_t n
        double scale
        int stream
        int fits

    ctypedef struct ag_row_kernels:
        Py_ssize_t segment
        void (*rows)(const ag_tile *tile) noexcept nogil
        double (*piece_max)(const ag_tile *tile) noexcept nogil
        double (*piece_sum)(const ag_tile *tile, double max) noexcept nogil
        void (*piece_write)(const ag_tile *tile, double max, double sum) noexcept nogil
        void (*columns)(const ag_tile *tile, void *memory) noexcept nogil
        void (*columns_max)(const ag_tile *tile, double *max, void *memory) noexcept nogil
        void (*columns_sum)(const ag_tile *tile, const double *max, double *sum, void *memory) noexcept nogil
        void (*columns_write)(const ag_tile *tile, const double *max, const double *sum, void *memory) noexcept nogil

    const ag_row_kernels *ag_rowwise_kernels(ag_variant variant, ag_dtype dtype, ag_row_op op)

    ctypedef struct ag_sum:
        double sum
        double error
    void ag_sum_add(ag_sum *total, double x)
    double ag_sum_total(ag_sum total)

cdef extern from "ascend_grad/strided.h" nogil:
    void ag_copy_block(char *to, Py_ssize_t to_row, Py_ssize_t to_step, const char *source, Py_ssize_t from_row,
                       Py_ssize_t from_step, Py_ssize_t rows, Py_ssize_t n, int itemsize, int swapped)
    void ag_widen(ag_variant variant, ag_dtype dtype, const char *source, float *to, Py_ssize_t n)
    void ag_round(ag_variant variant, int from_double, const void *source, ag_dtype dtype, char *to, Py_ssize_t n)
    void ag_stream(ag_variant variant, const float *a, const float *b, float *out, Py_ssize_t n, int nontemporal)
