from ascend_grad._kernels cimport ag_variant
from ascend_grad._rowwise_kernels cimport ag_loss_kernels, ag_tile
from ascend_grad._rowwise_plan cimport Plan, Problem
from ascend_grad._tasks cimport Team
from ascend_grad.status cimport Status


cdef enum Phase:
    WHOLE_BLOCKS
    SPLIT_MAX
    COMBINE_MAX
    SPLIT_SUM
    COMBINE_SUM
    SPLIT_WRITE


ctypedef struct Schedule:
    # The plan of one problem, and its workspace.
    Problem p
    Plan plan
    ag_variant variant
    Phase phase
    char *scratch                     # (threads, SCRATCH_BYTES): scratch memory of column kernels
    char *tiles                       # (tasks or threads, tiles_size): gathered operands
    Py_ssize_t first_block            # first block of the wave
    Py_ssize_t first_row              # first row of the wave
    Py_ssize_t rows                   # rows of a wave
    Py_ssize_t to_combine             # rows of the wave whose maxima or sums are combined
    Py_ssize_t combined               # rows of a task of this phase
    double *maxima                    # (splits, rows): maxima of splits
    double *sums                      # (segments, rows): sums of segments
    double *max                       # (rows,): maxima of rows
    double *sum                       # (rows,): sums of rows


cdef int choose_threads(const Problem *p, int asked, Plan *serial) noexcept nogil
cdef int threads_of(const Problem *p, int asked) noexcept nogil
cdef bint compute_at_once(const Problem *p, int threads) noexcept nogil
cdef void prepare(Schedule *s, const Problem *p, int threads, const Plan *serial) noexcept nogil
cdef Py_ssize_t workspace_size(Schedule *s) noexcept nogil
cdef Py_ssize_t place_workspace(Schedule *s, char *base) noexcept nogil
cdef int run(Schedule *s, bint default_threads, double *last_check) except -1 nogil
cdef Status solve(const Problem *p, int num_threads) noexcept nogil

# What schedules of other kernels share.
cdef const ag_loss_kernels *loss_kernels(const Schedule *s) noexcept nogil
cdef Py_ssize_t dense_strip_rows(bint is_double) noexcept nogil
cdef char *scratch_of(const Schedule *s, int thread) noexcept nogil
cdef char *tiles_of(const Schedule *s, Py_ssize_t task, int thread) noexcept nogil
cdef void run_phase(Schedule *s, Team *team, Phase phase, Py_ssize_t tasks) noexcept nogil
cdef void run_combination(Schedule *s, Team *team, Phase phase, Py_ssize_t rows) noexcept nogil
cdef Py_ssize_t column_tile(
    const Schedule *s, Py_ssize_t block, Py_ssize_t k, Py_ssize_t length, char *tiles, ag_tile *tile
) noexcept nogil
cdef void scatter_columns(
    const Schedule *s, Py_ssize_t block, Py_ssize_t k, Py_ssize_t length, char *tiles, const ag_tile *tile
) noexcept nogil
cdef void row_tile(
    const Schedule *s, Py_ssize_t begin, Py_ssize_t end, Py_ssize_t k, Py_ssize_t length, char *tiles, ag_tile *tile
) noexcept nogil
cdef void gather(
    const Schedule *s, Py_ssize_t begin, Py_ssize_t end, Py_ssize_t k, Py_ssize_t length, char *tiles, ag_tile *tile
) noexcept nogil
cdef void scatter(
    const Schedule *s, Py_ssize_t begin, Py_ssize_t end, Py_ssize_t k, Py_ssize_t length, char *tiles, const ag_tile *tile
) noexcept nogil
