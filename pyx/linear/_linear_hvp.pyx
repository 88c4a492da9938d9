"""The Hessian of a linear layer's loss with respect to weight and bias, and its product with a vector, over blocks of rows.

For a block of rows X, the linear engine computes the logits Z = X W^T + bias and their changes U = X V^T + vector_bias along the
vector. The engine of losses of rows turns them into the product of the Hessian with respect to the logits and U, a matrix P.
The linear engine then computes P^T X, as it does for a gradient with given probabilities. Each of the three divides its work
among the threads, and none depends on their number. The products of blocks are added up in float64, in their order.

If the vector has a part Y of the shape of the input, the changes U have the further term Y W^T. The engine of losses of rows
also computes the gradient G with respect to the logits, which adds G^T Y to the weight's product. That of the input is
P W + G V. A pass over all rows computes the product for few classes and most losses (`_linear_hvp_streamed`), but for such
vectors.

The whole Hessian takes the products of each row's Hessian with unit vectors, its columns, times products of two features.

The size of a block follows from shapes and dtypes alone. What a mean is divided by is computed once, from all rows.
"""

import numpy as np

cimport numpy as cnp
from libc.string cimport memset

from ascend_grad cimport _cpu, _cross_entropy_python, _linear_hvp_streamed, _linear_python, _memory
from ascend_grad._call cimport Call, Result, native_vector
from ascend_grad._cross_entropy_rows cimport CrossEntropy
from ascend_grad._dtypes cimport dtype_of
from ascend_grad._kernels cimport AG_FLOAT64
from ascend_grad._linear_kernels cimport ag_matrix
from ascend_grad._linear_problem cimport (
    VECTOR_PADDING,
    Problem,
    bound_transform,
    count_active_rows,
    largest_bias,
    round_bias,
)
from ascend_grad._linear_plan cimport Plan
from ascend_grad._linear_results cimport write_doubles
from ascend_grad._linear_schedule cimport (
    Schedule,
    place_workspace,
    prepare,
    run,
    threads_of,
    workspace_bound as bound_of_schedule,
    workspace_size,
)
from ascend_grad._loss_arguments cimport bytes_of_ids_from_zero, ids_from_zero, option, set_options, vector_of
from ascend_grad._loss_options cimport LossOptions, is_dense, options_of_rows, set_denominators
from ascend_grad._memory cimport ALIGNMENT
from ascend_grad._rowwise_plan cimport Problem as Rows

from ._dtypes import FLOATING_DTYPES
from .arrays import without_memory

cnp.import_array()

cdef tuple _dtypes = FLOATING_DTYPES  # in the order of ag_dtype
cdef cnp.dtype _float32 = np.dtype(np.float32)
cdef cnp.dtype _float64 = np.dtype(np.float64)

# Bytes of a block that mostly stay in L2 from one product to the next. A block of a large weight may take as many bytes as
# the sums of the weight. A block has at least BLOCK_ROWS rows if they take at most BLOCK_LIMIT bytes, since each block also
# passes over the weight and the sums.
cdef Py_ssize_t BLOCK_BYTES = 2 << 20
cdef Py_ssize_t BLOCK_ROWS = 128
cdef Py_ssize_t BLOCK_LIMIT = 32 << 20
# The most bytes that NumPy takes to add arrays of two dtypes, or strided ones: it has buffers of each operand.
cdef Py_ssize_t NUMPY_BUFFERS = 3 * 8 * np.getbufsize()
# Plans never read a vector.
cdef char any_vector = 0


cdef class Layer:
    """The arguments of a call, the sizes of its blocks, and buffers for one block, which have no memory in an estimate."""

    cdef cnp.ndarray input, weight, target
    # The parts of the vector that belong to the weight and the input, or None. Without both the call is of the whole Hessian.
    cdef cnp.ndarray vector, vector_input
    cdef bint is_whole
    cdef cnp.ndarray logits, changes  # (block, V) of accumulators
    cdef cnp.ndarray product  # (block, V): the Hessian's product with respect to the logits
    cdef cnp.ndarray gradient  # (block, V): the gradient with respect to the logits; None without `vector_input`
    cdef cnp.ndarray present  # (block,): 1, or 0 for a row whose product is 0
    cdef cnp.ndarray part, sums  # the result of a block in accumulators, and the sum of blocks in float64
    cdef cnp.ndarray bias_sums  # (V,) of float64
    cdef cnp.ndarray input_part, input_sums  # (block, H), likewise: the two terms of the input's product
    cdef cnp.ndarray features, pairs  # whole Hessian: (block, F) with a column of ones for the bias, and (block, V, F)
    cdef list held
    cdef const double *bias
    cdef const double *vector_bias
    cdef LossOptions o
    cdef double[2] denominators
    cdef double largest_bias
    cdef Py_ssize_t rows, vocab, hidden, width, block
    cdef bint is_streamed  # one pass computes the product
    cdef cnp.dtype accumulator

    def __init__(self, Call call not None, bint with_values):
        cdef Problem p
        self.input, self.weight = option(call, "input"), option(call, "weight")
        self.vector, self.vector_input = option(call, "vector"), option(call, "vector_input")
        self.is_whole = self.vector is None and self.vector_input is None
        self.held = []
        self.set_target(call, with_values)
        self.bias = vector_of(option(call, "bias"), self.held, with_values)
        self.vector_bias = vector_of(option(call, "vector_bias"), self.held, with_values)
        self.rows, self.vocab = cnp.PyArray_DIM(self.input, 0), cnp.PyArray_DIM(self.weight, 0)
        self.hidden = cnp.PyArray_DIM(self.weight, 1)
        self.width = self.hidden + (option(call, "bias") is not None)
        self.accumulator = _float64 if self.o.is_double else _float32
        self.block = self.rows_of_block()
        self.is_streamed = self.vector is not None and self.vector_input is None and _linear_hvp_streamed.is_streamed(
            &self.o, self.rows, self.vocab, self.hidden
        )
        p = _linear_python.layer_of(self.input, self.weight)
        p.transform.scale, p.transform.softcap = self.o.logit_scale, self.o.softcap
        bound_transform(&p)
        # Without values, temperatures are not read.
        self.largest_bias = largest_bias(
            &p, self.o.temperature, self.o.temperatures if with_values else NULL, self.rows
        )

    cdef int set_target(self, Call call, bint with_values) except -1:
        """Set the targets and the options. Ids become numbers of rows of the weight."""
        cdef cnp.ndarray target = option(call, "target")
        cdef bint has_ids = dtype_of(target) < 0
        start, ignored = option(call, "vocab_start_index"), option(call, "ignore_index")
        if has_ids and with_values:
            target = native_vector(target)
            if start:
                target = ids_from_zero(target, start, ignored)
        self.target = target
        self.held += set_options(&self.o, target, call, with_values)
        if has_ids and start:
            self.o.ignore_index, self.o.first_entry = -1, 0
        self.o.is_double = dtype_of(self.input) == AG_FLOAT64
        return 0

    cdef Py_ssize_t rows_of_block(self) noexcept:
        cdef Py_ssize_t itemsize = self.accumulator.itemsize, most = max(BLOCK_BYTES, self.vocab * self.width * itemsize)
        cdef Py_ssize_t of_row = 3 * self.vocab * itemsize + self.hidden * self.input.itemsize
        if self.is_whole:
            of_row += (self.vocab + 1) * self.width * itemsize
        if self.vector_input is not None:
            of_row += self.vocab * itemsize + self.hidden * (self.input.itemsize + itemsize + sizeof(double))
        most = max(most, min(BLOCK_LIMIT, BLOCK_ROWS * of_row))
        return max(<Py_ssize_t>1, min(self.rows, most // max(of_row, <Py_ssize_t>1)))

    cdef list shapes(self):
        """Return the shapes and dtypes of the buffers, in the order of `set_buffers`."""
        cdef cnp.dtype of_sums = self.accumulator
        if self.is_streamed:
            return []
        shapes = [((self.block, self.vocab), of_sums)] * 3 + [((self.block,), of_sums)]
        if not self.is_whole and (self.rows > self.block or self.vector_input is not None):
            shapes += [((self.vocab, self.hidden), of_sums), ((self.vocab, self.hidden), _float64)]
        if self.vector_input is not None:
            shapes += [((self.block, self.vocab), of_sums)]
            shapes += [((self.block, self.hidden), of_sums), ((self.block, self.hidden), _float64)]
        if self.is_whole:
            shapes += [
                ((self.vocab * self.width, self.width), of_sums),
                ((self.vocab, self.width, self.vocab, self.width), _float64),
                ((self.block, self.width), of_sums),
                ((self.block * self.vocab * self.width,), of_sums),
            ]
        return shapes

    cdef int set_buffers(self, list buffers) except -1:
        if not buffers:
            return 0
        self.logits, self.changes, self.product, self.present, *others = buffers
        self.part, self.sums, *others = others or [None, None]
        if self.vector_input is not None:
            self.gradient, self.input_part, self.input_sums = others
        if self.is_whole:
            self.features, self.pairs = others
        return 0

    cdef int prepare_values(self) except -1:
        """Allocate the buffers, round the vector to the dtype of the weight, and compute the divisors of all rows."""
        cdef double last_check = 0
        self.set_buffers([np.empty(shape, dtype) for shape, dtype in self.shapes()])
        if self.sums is not None:
            self.sums[...] = 0
        self.bias_sums = np.zeros(self.vocab)
        if self.vector is not None:
            with np.errstate(all="ignore"):
                self.vector = self.vector.astype(_dtypes[dtype_of(self.weight)], copy=False)
        with nogil:
            set_denominators(&self.o, self.denominators, &last_check)
        return 0

    cdef Problem problem_of_logits(self, cnp.ndarray x, cnp.ndarray weight, const double *bias, cnp.ndarray to):
        """Describe the logits of some rows, but for the statistics that the engine computes beside them."""
        cdef Problem p = _linear_python.layer_of(x, weight)
        p.with_statistics, p.logits = True, _linear_python.matrix(to)
        p.bias, p.transform.scale, p.transform.is_needed = bias, 1, bias != NULL
        return p

    cdef int write_logits(
        self, cnp.ndarray x, cnp.ndarray weight, const double *bias, cnp.ndarray to, int threads
    ) except -1:
        cdef Problem p = self.problem_of_logits(x, weight, bias, to)
        cdef Schedule s
        cdef double last_check = 0
        cdef cnp.ndarray statistics = np.empty((3, cnp.PyArray_DIM(x, 0)), self.accumulator), memory
        p.logits_max, p.sum_exp = cnp.PyArray_DATA(statistics), cnp.PyArray_GETPTR2(statistics, 1, 0)
        p.predicted = cnp.PyArray_GETPTR2(statistics, 2, 0)
        prepare(&s, &p, 0)
        memory = _memory.workspace(workspace_size(&s))
        _memory.check_layout(place_workspace(&s, _memory.aligned(cnp.PyArray_BYTES(memory))), memory)
        if bias != NULL:
            round_bias(<void *>s.p.transform.bias, bias, self.vocab, self.largest_bias, self.o.is_double)
        with nogil:
            run(&s, threads, &last_check)
        return 0

    cdef bint describe_rows(self, CrossEntropy *x, Rows *p, Py_ssize_t begin, Py_ssize_t count) except -1:
        """Describe the product with respect to the logits of some rows, which are in the buffers."""
        cdef cnp.ndarray logits = self.logits[:count], target = self.target, out = logits
        memset(x, 0, sizeof(CrossEntropy))
        x.o = options_of_rows(&self.o, begin, count)
        x.o.denominators = self.denominators
        x.hessian, x.vector = cnp.PyArray_BYTES(self.product), &any_vector
        if is_dense(&self.o):
            target = target[begin:begin + count]
        if self.gradient is not None:
            x.return_grad, out = True, self.gradient[:count]
        return _cross_entropy_python.describe_rows(p, x, logits, target, 1, out)

    cdef int multiply_rows(self, Py_ssize_t begin, Py_ssize_t count, int threads) except -1:
        """Compute `product`, `gradient` and `present` of some rows from `logits` and `changes`."""
        cdef CrossEntropy x
        cdef Rows p
        cdef const char *product = cnp.PyArray_BYTES(self.product)
        cdef const char *gradient = NULL
        cdef char *present = cnp.PyArray_BYTES(self.present)
        if self.gradient is not None:
            gradient = cnp.PyArray_BYTES(self.gradient)
        self.describe_rows(&x, &p, begin, count)
        _cross_entropy_python.solve(&x, &p, threads, self.changes[:count], 1)
        if self.o.is_double:
            mark_present(<const double *>product, <const double *>gradient, count, self.vocab, <double *>present)
        else:
            mark_present(<const float *>product, <const float *>gradient, count, self.vocab, <float *>present)
        if self.width == self.hidden or self.is_whole:
            return 0
        if self.o.is_double:
            add_rows(<const double *>product, count, self.vocab, <double *>cnp.PyArray_DATA(self.bias_sums))
        else:
            add_rows(<const float *>product, count, self.vocab, <double *>cnp.PyArray_DATA(self.bias_sums))
        return 0

    cdef Problem problem_of_rows(self, cnp.ndarray x, cnp.ndarray weights, cnp.ndarray to):
        """Describe the product of the transposed `weights` of rows and the rows `x`. Rows that are not present are left out."""
        cdef cnp.ndarray shape_of_result = without_memory((<object>to).shape, _dtypes[dtype_of(x)])
        cdef Problem p = _linear_python.gradient_problem(x, shape_of_result, weights, None, to)
        p.rows.grad = cnp.PyArray_DATA(self.present)
        return p

    cdef int sum_rows(self, cnp.ndarray x, cnp.ndarray weights, cnp.ndarray to, int threads) except -1:
        cdef Problem p = self.problem_of_rows(x, weights, to)
        return self.solve_present(&p, threads)

    cdef Problem problem_of_input(self, cnp.ndarray x, cnp.ndarray weight, cnp.ndarray of_classes, cnp.ndarray to):
        """Describe the product of the rows `of_classes` and a weight, for the rows `x`. Rows that are not present become 0."""
        cdef Problem p = _linear_python.gradient_problem(x, weight, of_classes, to, None)
        p.rows.grad = cnp.PyArray_DATA(self.present)
        return p

    cdef int multiply_weight(
        self, cnp.ndarray x, cnp.ndarray weight, cnp.ndarray of_classes, cnp.ndarray to, int threads
    ) except -1:
        cdef Problem p = self.problem_of_input(x, weight, of_classes, to)
        return self.solve_present(&p, threads)

    cdef int solve_present(self, Problem *p, int threads) except -1:
        """Solve a problem of the rows that are present."""
        cdef double last_check = 0
        cdef int itemsize = self.accumulator.itemsize
        with nogil:
            count_active_rows(&p.rows, itemsize, &last_check)
        return _linear_python.solve(p, 0, threads, &last_check)

    cdef Problem problem_of_pass(self, cnp.ndarray weight, cnp.ndarray to):
        """Describe the pass over all rows with the weight and the vector, which follow each other in `weight`."""
        cdef Problem p = _linear_python.gradient_problem(self.input, weight, None, None, to)
        p.vocab = self.vocab
        if self.width > self.hidden:
            p.bias_sums = <double *>cnp.PyArray_DATA(self.bias_sums)
        return p

    cdef Plan plan_of_pass(self):
        """Return the plan of the pass, from shapes alone."""
        cdef cnp.ndarray both = without_memory((2 * self.vocab, self.hidden), self.weight.dtype)
        cdef Problem p = self.problem_of_pass(both, self.weight)
        return _linear_hvp_streamed.plan_of(&p)

    cdef int stream(self, cnp.ndarray result, int threads) except -1:
        """Compute the product in one pass, into the result."""
        cdef cnp.ndarray both = np.concatenate([self.weight, self.vector]), memory
        cdef cnp.ndarray numbers = np.empty((2, self.rows), self.accumulator)
        # `round_bias` writes zeros behind a bias.
        cdef cnp.ndarray added = np.zeros(2 * self.vocab + VECTOR_PADDING, self.accumulator)
        cdef Problem p = self.problem_of_pass(both, result)
        cdef Plan plan = _linear_hvp_streamed.plan_of(&p)
        cdef int itemsize = self.accumulator.itemsize
        cdef void *present = cnp.PyArray_DATA(numbers)
        cdef void *coefficients = cnp.PyArray_GETPTR2(numbers, 1, 0)
        cdef char *bias = cnp.PyArray_BYTES(added)
        cdef char *workspace
        cdef double factor = _linear_hvp_streamed.factor_of_logits(&self.o), last_check = 0
        memory = _memory.workspace(_linear_hvp_streamed.workspace_size(&plan))
        workspace = cnp.PyArray_BYTES(memory)
        p.rows.grad = present
        if self.bias != NULL:
            round_bias(bias, self.bias, self.vocab, self.largest_bias, self.o.is_double)
        if self.vector_bias != NULL:
            round_bias(bias + self.vocab * itemsize, self.vector_bias, self.vocab, self.largest_bias, self.o.is_double)
        with nogil:
            _linear_hvp_streamed.set_coefficients(&self.o, self.denominators, self.vocab, present, coefficients)
            count_active_rows(&p.rows, itemsize, &last_check)
            _linear_hvp_streamed.run(
                &p, &plan, coefficients, NULL if self.bias == NULL else bias, factor, workspace, threads, &last_check
            )
        return 0

    cdef int add_product(self, Py_ssize_t begin, cnp.ndarray result, cnp.ndarray input_product, int threads) except -1:
        """Add the product of the block that begins at this row; without `sums` it is the only one and becomes the result.

        The rows of the block are written to `input_product`, unless it is None.
        """
        cdef Py_ssize_t count = min(self.block, self.rows - begin)
        cdef cnp.ndarray x = self.input[begin:begin + count], along = None, changes = self.changes[:count]
        self.write_logits(x, self.weight, self.bias, self.logits[:count], threads)
        if self.vector is not None:
            self.write_logits(x, self.vector, self.vector_bias, changes, threads)
        if self.vector_input is not None:
            along = self.vector_input[begin:begin + count].astype(_dtypes[dtype_of(x)], copy=False)
            self.add_changes(along, changes, threads)
        self.multiply_rows(begin, count, threads)
        if not self.hidden:
            return 0
        self.sum_rows(x, self.product[:count], result if self.sums is None else self.part, threads)
        if self.sums is not None:
            self.sums += self.part
        if along is not None:
            self.sum_rows(along, self.gradient[:count], self.part, threads)
            self.sums += self.part
            self.write_input_product(x, input_product[begin:begin + count], threads)
        return 0

    cdef int add_changes(self, cnp.ndarray along, cnp.ndarray changes, int threads) except -1:
        """Add the changes of logits along the vector's rows of the input. They are all changes without a vector of the weight."""
        cdef cnp.ndarray further = self.product[:cnp.PyArray_DIM(along, 0)]  # computed later
        if self.vector is None:
            return self.write_logits(along, self.weight, self.vector_bias, changes, threads)
        self.write_logits(along, self.weight, NULL, further, threads)
        changes += further
        return 0

    cdef int write_input_product(self, cnp.ndarray x, cnp.ndarray to, int threads) except -1:
        """Compute the rows of the input's product from `product` and `gradient`."""
        cdef Py_ssize_t count = cnp.PyArray_DIM(x, 0)
        cdef cnp.ndarray part = self.input_part[:count], sums = self.input_sums[:count]
        if self.vector is None:
            return self.multiply_weight(x, self.weight, self.product[:count], to, threads)
        self.multiply_weight(x, self.weight, self.product[:count], part, threads)
        sums[...] = part
        self.multiply_weight(x, self.vector, self.gradient[:count], part, threads)
        sums += part
        return write_sums(sums, to)

    cdef int add_hessian(self, Py_ssize_t begin, int threads) except -1:
        """Add the Hessian of a block, but for the classes v < w of the row of a class w.

        The part of the classes v and w is the sum of the rows' Hessians at v and w times products of two features.
        """
        cdef Py_ssize_t count = min(self.block, self.rows - begin), w, length
        cdef cnp.ndarray x = self.input[begin:begin + count], features = self.features[:count], pairs, part
        features[:, :self.hidden] = x
        features[:, self.hidden:] = 1
        self.write_logits(x, self.weight, self.bias, self.logits[:count], threads)
        self.changes[...] = 0
        for w in range(self.vocab):
            self.changes[:, w] = 1
            self.multiply_rows(begin, count, threads)
            self.changes[:, w] = 0
            length = (self.vocab - w) * self.width
            pairs = self.pairs[:count * length].reshape(count, length)
            np.multiply(self.product[:count, w:, None], features[:, None, :], out=pairs.reshape(count, -1, self.width))
            part = self.part[:length]
            self.sum_rows(features, pairs, part, threads)
            self.sums[w:, :, w, :] += part.reshape(-1, self.width, self.width)
        return 0


ctypedef fused real_t:
    float
    double


cdef bint is_any(const real_t *values, Py_ssize_t count) noexcept nogil:
    """Return whether a value is not 0."""
    cdef Py_ssize_t i
    for i in range(count):
        if values[i] != 0:
            return True
    return False


cdef void mark_present(
    const real_t *product, const real_t *gradient, Py_ssize_t rows, Py_ssize_t vocab, real_t *present
) noexcept nogil:
    """Find the rows where the product with respect to the logits or the gradient, which may be NULL, is not 0.

    The other rows are left out of products with the input, as they may hold anything.
    """
    cdef Py_ssize_t i
    for i in range(rows):
        present[i] = is_any(product + i * vocab, vocab) or (
            gradient != NULL and is_any(gradient + i * vocab, vocab)
        )


cdef void add_rows(const real_t *product, Py_ssize_t rows, Py_ssize_t vocab, double *sums) noexcept nogil:
    """Add the rows of a product to sums."""
    cdef Py_ssize_t i, v
    for i in range(rows):
        for v in range(vocab):
            sums[v] += product[i * vocab + v]


cdef int write_sums(cnp.ndarray sums, cnp.ndarray to) except -1:
    """Write sums to a new result of any dtype, each rounded once."""
    cdef cnp.ndarray flat = to.reshape(-1)
    cdef ag_matrix line = _linear_python.matrix(flat)
    write_doubles(_cpu.active(), <const double *>cnp.PyArray_DATA(sums), cnp.PyArray_SIZE(sums), &line)
    return 0


cdef tuple product(Call call, int threads):
    """Compute the product of a validated call, and return its results."""
    cdef Layer layer = Layer(call, True)
    cdef Result result
    cdef cnp.ndarray weight_product, bias_product, input_product
    cdef Py_ssize_t begin = 0
    weight_product, bias_product, input_product = [
        result.allocate(call) if result.is_asked_for(call) else None for result in call.operator.result_specs
    ]
    layer.prepare_values()
    if layer.is_streamed:
        layer.stream(weight_product, threads)
        begin = layer.rows
    with np.errstate(all="ignore"):
        while begin < layer.rows and layer.vocab:
            layer.add_product(begin, weight_product, input_product, threads)
            begin += layer.block
    if layer.sums is not None:
        write_sums(layer.sums, weight_product)
    elif not layer.rows:
        weight_product[...] = 0
    if bias_product is not None:
        write_sums(layer.bias_sums, bias_product)
    if input_product is not None and not layer.vocab:
        input_product[...] = 0
    return weight_product, bias_product, input_product


cdef cnp.ndarray hessian(Call call, int threads):
    """Compute the Hessian of a validated call, and return it."""
    cdef Layer layer = Layer(call, True)
    cdef cnp.ndarray result = (<Result>call.operator.result_specs[0]).allocate(call), matrix
    cdef Py_ssize_t begin = 0, i, size = layer.vocab * layer.width
    layer.prepare_values()
    with np.errstate(all="ignore"):  # rows that are not present may hold anything
        while begin < layer.rows and size:
            layer.add_hessian(begin, threads)
            begin += layer.block
    matrix = layer.sums.reshape(size, size)
    for i in range(size):
        matrix[i, i + 1:] = matrix[i + 1:, i]
    write_sums(layer.sums, result)
    return result


# ---- estimates -------------------------------------------------------------------------------------------------------

cdef Layer without_values(Call call):
    """Return the layer of a call with buffers that have no memory."""
    cdef Layer layer = Layer(call, False)
    layer.set_buffers([without_memory(shape, dtype) for shape, dtype in layer.shapes()])
    layer.bias_sums = without_memory((layer.vocab,), _float64)
    return layer


cdef Py_ssize_t workspace_bound(Call call, int threads) except -1:
    """Return the most bytes that a call takes in addition to its results and copies of vectors, from shapes and layouts."""
    cdef Layer layer = without_values(call)
    cdef cnp.ndarray x = layer.input[:layer.block], weights = layer.product, to
    cdef CrossEntropy rows
    cdef Rows of_rows
    cdef Problem p
    cdef Schedule s
    cdef Plan plan
    cdef Py_ssize_t size = 8 * layer.vocab + 3 * layer.block * layer.accumulator.itemsize, most
    size += NUMPY_BUFFERS if layer.sums is not None else 0
    for shape, dtype in layer.shapes():
        size += np.prod(shape, dtype=np.int64) * dtype.itemsize
    for each in call.values[2:]:  # copies of the vector, and options as float64
        size += 8 * each.size if cnp.PyArray_CheckExact(each) and each is not layer.vector_input else 0
    if layer.vector_input is not None:  # copied by blocks
        size += layer.block * layer.hidden * layer.input.itemsize
    if option(call, "vocab_start_index"):
        size += bytes_of_ids_from_zero(option(call, "target"))
    if not layer.rows or not layer.vocab or not layer.width:
        return size
    if layer.is_streamed:
        plan = layer.plan_of_pass()
        size += 2 * (layer.rows + layer.vocab + VECTOR_PADDING) * layer.accumulator.itemsize + 2 * layer.weight.nbytes
        return size + _linear_hvp_streamed.workspace_size(&plan)
    p = layer.problem_of_logits(x, layer.weight, layer.bias, layer.logits)
    prepare(&s, &p, 0)
    most = bound_of_schedule(&s)
    layer.describe_rows(&rows, &of_rows, 0, layer.block)
    most = max(most, _cross_entropy_python.most_workspace(&rows, &of_rows, threads))
    to = without_memory((layer.vocab, layer.hidden), layer.accumulator)
    if layer.is_whole:
        x, weights, to = layer.features, layer.pairs.reshape(layer.block, -1), layer.part
    if layer.is_whole or layer.hidden:
        p = layer.problem_of_rows(x, weights, to)
        prepare(&s, &p, 0)
        most = max(most, bound_of_schedule(&s))
    if layer.vector_input is not None and layer.hidden:
        p = layer.problem_of_input(x, layer.weight, weights, x if layer.vector is None else layer.input_part)
        prepare(&s, &p, 0)
        most = max(most, bound_of_schedule(&s))
    return size + most + 2 * ALIGNMENT


cdef tuple plan_and_threads(Call call, int threads):
    """Return the plan of a call, and the number of threads of its first product."""
    cdef Layer layer = without_values(call)
    cdef Problem p
    cdef Schedule s
    cdef Plan plan
    if not layer.rows or not layer.vocab:
        return "nothing to compute", 1
    if layer.is_streamed:
        plan = layer.plan_of_pass()
        return "nothing packed", _linear_hvp_streamed.threads_of(&plan, threads)
    p = layer.problem_of_logits(layer.input[:layer.block], layer.weight, layer.bias, layer.logits)
    prepare(&s, &p, 0)
    return f"blocks of {layer.block} rows: {(<bytes>s.plans.name).decode()}", threads_of(&s, threads)
