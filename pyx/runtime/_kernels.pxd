# Cython's declarations of the C headers that all kernels share.

from libc.stdint cimport int64_t, uint32_t

cdef extern from "ascend_grad/base.h" nogil:
    ctypedef enum ag_dtype:
        AG_FLOAT32
        AG_FLOAT16
        AG_BFLOAT16
        AG_FLOAT64
    const int ag_itemsize[]

cdef extern from "ascend_grad/cpu.h" nogil:
    long ag_cache_size(int level, long fallback)
    int ag_cache_count(int level)

cdef extern from "ascend_grad/foreach_isa.h" nogil:
    ctypedef enum ag_variant:
        AG_VARIANT_BASELINE
        AG_VARIANT_AMX_BF16
        AG_VARIANT_COUNT
    const char *const ag_variant_names[]
    int ag_variant_supported(ag_variant variant)
    const char *ag_unsupported_reason(ag_variant variant)
    int ag_variant_is_slow(ag_variant variant)
    ag_variant ag_best_variant(ag_variant end)

cdef extern from "ascend_grad/fpenv.h" nogil:
    ctypedef int ag_fpenv
    ag_fpenv ag_fpenv_enter()
    void ag_fpenv_leave(ag_fpenv mode)
    double ag_rounded_to_float32(double x)

cdef extern from "ascend_grad/sums.h" nogil:
    ctypedef struct ag_sum:
        double sum
        double compensation

    void ag_sum_add(ag_sum *total, double x)
    void ag_sum_add_sum(ag_sum *total, ag_sum x)
    double ag_sum_total(ag_sum total)
    enum:
        AG_SUM_LANES
    double ag_sums_total_of_all(const ag_sum *sums)

cdef extern from "ascend_grad/loss.h" nogil:
    const double AG_ACCURATE_SUM
    const double AG_NEARLY_CERTAIN

    ctypedef struct ag_row_statistics:
        double max
        double rest
        double moment
        double deficit

    double ag_log_sum(const ag_row_statistics *row)
    double ag_log_sum_exp(const ag_row_statistics *row)
    double ag_negative_log_prob(const ag_row_statistics *row, double z)
    double ag_one_minus_prob(const ag_row_statistics *row, double z)
    double ag_entropy(const ag_row_statistics *row)

    ctypedef struct ag_upstream:
        double square
        double lse
        double log_prob
        double entropy

    ctypedef struct ag_coefficients:
        double balance
        double a
        double b
        double s

    ag_coefficients ag_coefficients_of(const ag_upstream *upstream, double kept, double s, double class_sum, double lse)
    double ag_entropy_gradient(const ag_coefficients *c, double p, double distance)
    double ag_certain_gradient(const ag_coefficients *c, double others, double complement)
    double ag_smoothed_sum(double log_sum, double class_sum, double deficit)
    double ag_bounded_factor(double factor, int is_double)
    double ag_class_scale(const double *weights, Py_ssize_t n, int is_double)
    double ag_scaled_weight(double weight, double class_scale, int is_double)

cdef extern from "ascend_grad/strided.h" nogil:
    void ag_copy_block(char *to, Py_ssize_t to_row, Py_ssize_t to_step, const char *source, Py_ssize_t from_row,
                       Py_ssize_t from_step, Py_ssize_t rows, Py_ssize_t n, int itemsize, int swapped)

    ctypedef struct ag_dim:
        Py_ssize_t length
        Py_ssize_t to
        Py_ssize_t from_ "from"

    void ag_copy_3d(ag_variant variant, char *to, const char *source, ag_dim x, ag_dim y, ag_dim z, int itemsize,
                    int swapped)
    int ag_longest_step(ag_variant variant, int itemsize, Py_ssize_t n)
    void ag_widen(ag_variant variant, ag_dtype dtype, const char *source, float *to, Py_ssize_t n)
    void ag_convert(ag_variant variant, int from_double, const void *source, ag_dtype dtype, char *to, Py_ssize_t n)
    void ag_stream_add(ag_variant variant, const float *a, const float *b, float *out, Py_ssize_t n,
                       int nontemporal)

cdef extern from "ascend_grad/team.h" nogil:
    ctypedef int ag_flag
    ctypedef struct ag_team:
        int size
        int64_t busy
        int64_t arrival
    int64_t ag_monotonic_ns()
    int64_t ag_coarse_ns()
    int64_t ag_thread_ns()
    void ag_team_init(ag_team *team, int size, int cores)
    void ag_team_begin_phase(ag_team *team, Py_ssize_t tasks, int by_thread)
    void ag_team_shutdown(ag_team *team)
    uint32_t ag_team_wait_phase(ag_team *team, uint32_t phase)
    Py_ssize_t ag_team_fetch_task(ag_team *team, int thread)
    void ag_team_complete_tasks(ag_team *team, uint32_t count)
    void ag_team_cancel_phase(ag_team *team)
    void ag_team_end_phase(ag_team *team)
    void ag_team_arrive(ag_team *team)
    void ag_team_add_busy(ag_team *team, int64_t nanoseconds)
    int64_t ag_take(int64_t *value)
