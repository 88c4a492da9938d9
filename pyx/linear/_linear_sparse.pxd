from libc.stdint cimport int64_t

from ascend_grad._cross_entropy_rows cimport CrossEntropy
from ascend_grad._kernels cimport AG_SUM_LANES, ag_dtype, ag_sum
from ascend_grad._linear_kernels cimport ag_linear_kernels, ag_sparse_rows
from ascend_grad._loss_options cimport LossOptions
from ascend_grad._tasks cimport Team
from ascend_grad._views cimport View

ctypedef struct SparseLoss:
    # The loss of a linear layer whose input is sparse, with its gradients; with a vector, the product of its Hessian with
    # respect to weight and bias and the vector, instead of the gradients. The caller fills in the first fields.
    ag_sparse_rows x
    Py_ssize_t rows                   # all rows
    Py_ssize_t nonzeros
    View weight                       # (V, H)
    View prob                         # (rows, V): probabilities of all classes, if targets are dense
    ag_dtype dtype                    # of input and weight
    LossOptions o                     # `first_entry` is 0
    const double *bias                # (V,) or NULL
    bint with_bias_grad
    View weight_grad                  # (V, H); data is NULL if it is not requested
    View vector                       # (V, H), in the dtype of the weight; data is NULL without a vector
    const double *vector_bias         # (V,), the part of the vector that belongs to the bias; NULL: 0
    # Outputs that only gradients are computed from, (rows,). The entropy may be NULL: 0.
    const double *lse                 # NULL: the loss is computed
    const double *entropy
    # Set by prepare_sparse.
    const ag_linear_kernels *kernels
    int itemsize
    int threads
    Py_ssize_t pitch                  # accumulators from feature to feature of transposed matrices
    Py_ssize_t block                  # rows whose logits are computed together
    Py_ssize_t fold_rows              # rows after which sums are added to totals, or 0: there are none
    Py_ssize_t[2] shape               # of the logits of a block, and their strides
    Py_ssize_t[2] strides
    CrossEntropy loss                 # of the rows of a block
    CrossEntropy last                 # of the rows of the last block
    double[2] denominators
    # Rows that are computed by one thread, with sums of their own, if there are several parts; or all rows.
    Py_ssize_t parts                  # 1: the threads share every block of rows
    Py_ssize_t begin
    Py_ssize_t end
    SparseLoss *each                  # (parts,): what is computed of each, or NULL. Parts have none
    Team *team                        # of the call
    # The workspace.
    char *transposed                  # (H, pitch): the weight, and a vector of padding
    char *transposed_vector           # (H, pitch), likewise; NULL without a vector
    char *sums                        # (H, pitch): the gradient of the weight; NULL if it is not requested
    double *totals                    # (H, pitch): of sums before, which are added to it from time to time; or NULL
    char *logits                      # (block, V): logits, without a vector then P, and a vector of padding
    char *changes                     # (block, V): changes of the logits along the vector, and padding; NULL without it
    char *p                           # (block, V): P, and padding; without a vector, it overwrites the logits
    char *bias_values                 # (V,) and a vector of padding, or NULL
    char *vector_bias_values          # likewise
    double *bias_sums                 # (V,), or NULL
    double *partial_sums              # (tasks, V): of ranges of a block's rows, or NULL
    int64_t *cuts                     # (threads + 1,): the features that each thread adds to
    # The block that is computed.
    CrossEntropy *current
    Py_ssize_t first_row
    ag_sum[AG_SUM_LANES] losses
    ag_sum[AG_SUM_LANES] squares
    int64_t correct
    int is_outside                    # some feature is not in [0, H)


cdef bint fits_memory(const SparseLoss *s) noexcept nogil
cdef bint are_starts_valid(const SparseLoss *s) noexcept nogil
cdef Py_ssize_t least_sparse_workspace(
    ag_dtype dtype, Py_ssize_t rows, Py_ssize_t vocab, Py_ssize_t hidden, Py_ssize_t nonzeros, bint with_weight_grad
) noexcept nogil
cdef int choose_sparse_threads(SparseLoss *s, int asked) noexcept nogil
cdef int expected_sparse_threads(const SparseLoss *s, int asked) noexcept nogil
cdef void prepare_sparse(SparseLoss *s, Py_ssize_t workspace_bytes, int threads) noexcept nogil
cdef Py_ssize_t sparse_workspace_size(SparseLoss *s) noexcept nogil
cdef Py_ssize_t place_sparse_workspace(SparseLoss *s, char *base) noexcept nogil
cdef int run_sparse(SparseLoss *s, int asked, double *last_check) except -1 nogil
