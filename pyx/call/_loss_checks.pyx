"""Checks of the linear operators and of options of losses, compiled as they are part of every call (see `_checks`)."""

import numpy as np

cimport numpy as cnp

from ascend_grad._array_types cimport is_on_device
from ascend_grad._call cimport BT, H, K, LOSS, LOSS_GRADIENT, LOSSES, TOP_K, V, Call, Check, shape_of
from ascend_grad._checks cimport Floating, Number, Shape, integer_between, rows_of, vocabulary_of
from ascend_grad._dtypes cimport dtype_of, native_dtype
from ascend_grad._kernels cimport AG_FLOAT32, AG_FLOAT64, ag_dtype
from ascend_grad._linear_schedule cimport least_workspace_of_sizes
from ascend_grad._linear_sparse cimport least_sparse_workspace
from ascend_grad._target_checks cimport advice_on_one_hot, is_dense

from . import arguments
from ._dtypes import FLOATING_DTYPES
from .arrays import AbstractDeviceArray
from .errors import ParamNullptrError, ParamTypeError

cnp.import_array()

cdef tuple _floating = FLOATING_DTYPES  # in the order of ag_dtype


# ---- checks of the linear operators ----------------------------------------------------------------------------------


cdef class SoftmaxOrStatistics(Check):
    """Check that ``softmax`` is given, or both ``logits_max`` and ``sum_exp_logits``.

    If ``softmax`` is given, the other two are ignored.
    """

    def __init__(self):
        Check.__init__(self, "softmax", "logits_max", "sum_exp_logits")

    cdef int run(self, Call call) except -1:
        softmax, logits_max, sum_exp = [call.values[self.slots[i]] for i in range(3)]
        if softmax is not None:
            call.values[self.slots[1]] = call.values[self.slots[2]] = None
        elif logits_max is None and sum_exp is None:
            call.fail("softmax", "an array, or logits_max and sum_exp_logits instead of it", None, ParamNullptrError)
        elif logits_max is None:
            expected = "an array, as sum_exp_logits is given and softmax is not"
            call.fail("logits_max", expected, None, ParamNullptrError)
        elif sum_exp is None:
            call.fail("sum_exp_logits", "an array, as logits_max is given and softmax is not", None, ParamNullptrError)
        return 0


cdef class AccumulatorOf(Check):
    """Check that all other arrays that are given are float64 if the first one is, and float32 otherwise."""

    cdef int run(self, Call call) except -1:
        cdef cnp.ndarray first = call.array(self.slots[0]), array
        cdef int expected = AG_FLOAT64 if dtype_of(first) == AG_FLOAT64 else AG_FLOAT32, i
        for i in range(1, self.count):
            if call.values[self.slots[i]] is None:
                continue
            array = call.array(self.slots[i])
            if dtype_of(array) != expected:
                text = f"dtype {_floating[expected]}, as {self.names[0]} has dtype {native_dtype(first)}"
                call.fail(self.names[i], text, array.dtype, ParamTypeError)
        return 0


cdef class LogitsDtypeMatches(Check):
    """Check that the second array, if given, has a floating dtype whose sums have the dtype of the first array."""

    cdef int run(self, Call call) except -1:
        if call.values[self.slots[1]] is None:
            return 0
        cdef cnp.ndarray first = call.array(self.slots[0]), array = call.array(self.slots[1])
        cdef bint is_double = dtype_of(first) == AG_FLOAT64
        if dtype_of(array) < 0 or (dtype_of(array) == AG_FLOAT64) != is_double:
            allowed = "float64" if is_double else "float32, float16 or bfloat16"
            expected = f"dtype {allowed}, as {self.names[0]} has dtype {native_dtype(first)}"
            call.fail(self.names[1], expected, array.dtype, ParamTypeError)
        return 0


cdef class MaskHasRows(Check):
    """Check that a boolean mask has one element for every row, and that a packed mask has at least one bit for each."""

    cdef int run(self, Call call) except -1:
        cdef cnp.ndarray array = call.array(self.slots[0])
        cdef Py_ssize_t rows = call.sizes[BT], nbytes = (rows + 7) // 8
        cdef bint fits = cnp.PyArray_NDIM(array) == 1
        if cnp.PyArray_TYPE(array) == cnp.NPY_BOOL:
            if not fits or cnp.PyArray_DIM(array, 0) != rows:
                call.fail(self.names[0], f"shape (BT = {rows})", shape_of(array))
        elif not fits or cnp.PyArray_DIM(array, 0) < nbytes:
            expected = f"at least {nbytes} bytes in one dimension, a bit for each row"
            call.fail(self.names[0], expected, shape_of(array))
        elif cnp.PyArray_DIM(array, 0) == rows and rows > 1:
            advice = f"for an entry for each row, pass {self.names[0]}.astype(bool)"
            message = f"{call.operator.name}: {self.names[0]}: uint8 is read as packed bits, eight rows to a byte; {advice}"
            arguments.warn(message)
        return 0


cdef class NonemptyVocabulary(Check):
    """Check that the named weight has at least one row. Rows of logits have at least one element, if there are rows."""

    cdef int run(self, Call call) except -1:
        if vocabulary_of(call):
            return 0
        if call.operator.family != LOSSES:
            call.fail(self.names[0], "at least one row", shape_of(call.array(self.slots[0])))
        if 0 not in rows_of(call):
            got = f"shape {shape_of(call.array(self.slots[0]))}"
            call.fail(self.names[0], f"at least one element along axis {call.axis}", got)
        return 0


cdef class VocabularyBounds(Check):
    """Check that ``0 <= start <= end`` and ``end - start <= V``; the end is exclusive."""

    def __init__(self):
        Check.__init__(self, "vocab_start_index", "vocab_end_index")

    cdef int run(self, Call call) except -1:
        start = integer_between(call, self.slots[0], 0, arguments.MAX_INDEX)
        end = integer_between(call, self.slots[1], start, arguments.MAX_INDEX)
        if end - start > call.sizes[V]:
            expected = f"at most {start + call.sizes[V]}, the sum of vocab_start_index and the rows of weight"
            call.fail("vocab_end_index", expected, end)
        return 0


cdef class ValidOutputMask(Check):
    """Check that ``output_mask`` is a pair of truth values."""

    def __init__(self):
        Check.__init__(self, "output_mask")

    cdef int run(self, Call call) except -1:
        value = call.values[self.slots[0]]
        if (
            type(value) is tuple and len(value) == 2 and type(value[0]) is bool and type(value[1]) is bool
        ):
            self.leave_out_sparse(call, value)
            return 0
        call.ran_foreign_code = True
        call.values[self.slots[0]] = arguments.pair_of_truth_values(value, "output_mask", call.operator.name)
        self.leave_out_sparse(call, call.values[self.slots[0]])
        return 0

    cdef int leave_out_sparse(self, Call call, tuple mask) except -1:
        """Leave out the gradient of a sparse input, and refuse to compute it alone."""
        if call.sparse is not None and mask[0]:
            if not mask[1]:
                call.fail("output_mask", "(True, True) or (False, True), as a sparse input has no gradient", mask)
            call.values[self.slots[0]] = (False, True)
        return 0


cpdef object least_workspace(Call call):
    """Return the least ``workspace_bytes`` of a linear call whose shapes were checked.

    `out` is checked later, so with one the gradient of the weight may have to be summed in the workspace.
    """
    cdef dict slots = call.operator.slots
    if call.operator.kernels == TOP_K:
        return least_workspace_of_sizes(
            <ag_dtype>dtype_of(call.array(slots["input"])), call.sizes[BT], call.sizes[V], call.sizes[H], True, True, False,
            False, False, False, call.sizes[K]
        )
    cdef bint with_statistics = call.operator.kernels == LOSS
    cdef bint is_loss = with_statistics or call.operator.kernels == LOSS_GRADIENT
    cdef bint with_logits = is_loss or call.values[slots["softmax"]] is None
    # Operators over ranks have another name for the input, which is their first array.
    cdef cnp.ndarray input = call.array(slots["input"] if "input" in slots else call.operator.array_slots[0])
    first, second = call.values[slots["output_mask"]]
    if with_statistics and not call.values[slots["return_grad"]]:
        first = second = False
    if call.sparse is not None:
        return least_sparse_workspace(
            <ag_dtype>dtype_of(input), call.sizes[BT], call.sizes[V], call.sizes[H], call.sparse.nonzeros, second
        )
    return least_workspace_of_sizes(
        <ag_dtype>dtype_of(input), call.sizes[BT], call.sizes[V], call.sizes[H], with_logits, with_statistics, first, second,
        call.has_out or cnp.PyArray_ITEMSIZE(input) == 2, is_loss, 0
    )


cdef class Workspace(Check):
    """Check that ``workspace_bytes`` is None or enough: at least `least`, and the least workspace of the problem."""

    cdef public object least

    def __init__(self, least):
        Check.__init__(self, "workspace_bytes")
        self.least = least

    cdef int run(self, Call call) except -1:
        if call.values[self.slots[0]] is not None:
            integer_between(call, self.slots[0], max(self.least, least_workspace(call)), arguments.MAX_INDEX)
        return 0


cdef str known_reduction(Call call, object reduction):
    """Return a reduction as a plain str, as the argument may be of a subclass. Check that it is known."""
    if not isinstance(reduction, str):
        call.fail("reduction", "'mean', 'sum' or 'none'", arguments.shown(reduction), ParamTypeError)
    for known in ("mean", "sum", "none"):
        if reduction == known:
            return known
    call.fail("reduction", "'mean', 'sum' or 'none'", arguments.shown(reduction))


cdef str expected_grad_loss(str reduction):
    """Describe in errors what ``grad_loss`` has to be. With reduction "none" it may also be an array."""
    return "a real number, or one for each row" if reduction == "none" else f"a real number, as reduction is {reduction!r}"


cdef class Reduction(Check):
    """Check that ``reduction`` is known, and that ``grad_loss`` fits: a number, or one for each row without a reduction.

    ``grad_loss`` is 1 by default. `rows` is the size that the number of rows has in the operator.
    """

    cdef Floating floating
    cdef Shape one_for_each_row
    cdef Number number

    def __init__(self, rows):
        Check.__init__(self, "reduction", "grad_loss")
        self.floating, self.one_for_each_row = Floating("grad_loss"), Shape("grad_loss", rows)
        self.number = Number("grad_loss")

    cdef object bind(self, tuple parameters):
        Check.bind(self, parameters)
        self.floating.bind(parameters)
        self.one_for_each_row.bind(parameters)
        self.number.bind(parameters)

    cdef int run(self, Call call) except -1:
        grad_loss = call.values[self.slots[1]]
        reduction = call.values[self.slots[0]] = known_reduction(call, call.values[self.slots[0]])
        if grad_loss is None:
            call.values[self.slots[1]] = 1.0
            return 0
        if type(grad_loss) is float:
            return 0
        if is_on_device(grad_loss) and cnp.PyArray_NDIM(call.array(self.slots[1])) == 0:
            return self.floating.run(call)  # one number on a device, which is not read, as that would wait
        if is_on_device(grad_loss) and reduction != "none":  # converting it to a number would wait
            call.fail("grad_loss", expected_grad_loss(reduction), f"shape {shape_of(call.array(self.slots[1]))}")
        if (
            reduction == "none" and not isinstance(grad_loss, (str, bytes))
            and cnp.PyArray_NDIM(call.array(self.slots[1]))
        ):
            self.floating.run(call)
            return self.one_for_each_row.run(call)
        call.values[self.slots[1]] = grad_loss  # restored, as messages show the argument that was passed
        return self.number.run_expecting(call, expected_grad_loss(reduction))


# ---- checks of the options of losses ---------------------------------------------------------------------------------


cdef class KnownOutputs(Check):
    """Check that ``outputs`` is a sequence of different names among `known`, and make it a tuple of them."""

    cdef object known

    def __init__(self, known):
        Check.__init__(self, "outputs")
        self.known = known

    cdef int run(self, Call call) except -1:
        value = call.values[self.slots[0]]
        if type(value) is tuple and value == ():
            return 0
        expected = f"a tuple of names among {', '.join(map(repr, self.known))}"
        if not isinstance(value, (tuple, list)):
            call.fail("outputs", expected, arguments.shown(value), ParamTypeError)
        names = tuple(value)
        for name in names:
            if not isinstance(name, str):
                call.fail("outputs", expected, arguments.shown(value), ParamTypeError)
        names = tuple([str(name) for name in names])  # plain str, as names may be of a subclass
        for name in names:
            if name not in self.known:
                call.fail("outputs", expected, repr(name))
            if names.count(name) > 1:
                call.fail("outputs", "different names", f"{name!r} more than once")
        call.values[self.slots[0]] = names
        return 0


cdef class HessianOfLossAlone(Check):
    """Check that no upstream gradient of an output is given if the diagonal of the Hessian is requested."""

    def __init__(self, *gradients):
        Check.__init__(self, "outputs", *gradients)

    cdef int run(self, Call call) except -1:
        cdef int i
        if "hessian_diag" not in <tuple>call.values[self.slots[0]]:
            return 0
        for i in range(1, self.count):
            if call.values[self.slots[i]] is not None:
                expected = f"no 'hessian_diag' with {self.names[i]}, which is not part of this Hessian"
                call.fail("outputs", expected, "both")
        return 0


cdef class NumberOrRows(Check):
    """Check that the argument is a number, or an array of a floating dtype with a number for each row.

    `rows` is the size that the number of rows has in the operator; `allowed` is the range of a single number.
    """

    cdef Number number
    cdef Floating floating
    cdef Shape one_for_each_row

    def __init__(self, name, rows, allowed=None):
        Check.__init__(self, name)
        self.number, self.floating, self.one_for_each_row = Number(name, allowed), Floating(name), Shape(name, rows)

    cdef object bind(self, tuple parameters):
        Check.bind(self, parameters)
        self.number.bind(parameters)
        self.floating.bind(parameters)
        self.one_for_each_row.bind(parameters)

    cdef int run(self, Call call) except -1:
        given = call.values[self.slots[0]]
        if type(given) is not float and given is not None and not isinstance(given, (int, str, bytes)):
            if is_on_device(given) or cnp.PyArray_NDIM(call.array(self.slots[0])):
                self.floating.run(call)
                return self.one_for_each_row.run(call)
            call.values[self.slots[0]] = given  # restored, as messages show the argument that was passed
        return self.number.run(call)


cdef class EntropyForItsGradient(Check):
    """Check that ``entropy`` is given if its upstream gradient is."""

    def __init__(self):
        Check.__init__(self, "entropy", "grad_entropy")

    cdef int run(self, Call call) except -1:
        if call.values[self.slots[0]] is None and call.values[self.slots[1]] is not None:
            call.fail("entropy", "an array, as grad_entropy is given", None, ParamNullptrError)
        return 0


cdef class SomeUpstreamGradient(Check):
    """Check that the loss or one of its outputs has an upstream gradient. ``grad_loss`` is 0 by default."""

    def __init__(self):
        Check.__init__(self, "grad_loss", "grad_lse", "grad_log_prob", "grad_entropy")

    cdef int run(self, Call call) except -1:
        cdef int i
        for i in range(self.count):
            if call.values[self.slots[i]] is not None:
                break
        else:
            call.fail("grad_loss", "an upstream gradient, or one as grad_lse, grad_log_prob or grad_entropy", None)
        if call.values[self.slots[0]] is None:
            call.values[self.slots[0]] = 0.0
        return 0


cdef class SomeVector(Check):
    """Check that a vector of the shape of the weight is given, or one of the shape of the input."""

    def __init__(self):
        Check.__init__(self, "vector", "vector_input")

    cdef int run(self, Call call) except -1:
        if call.values[self.slots[0]] is None and call.values[self.slots[1]] is None:
            call.fail("vector", "an array, as vector_input is None", None, ParamNullptrError)
        return 0


cdef class DenseWith(Check):
    """Check that the first argument is no sparse array if the second one is given."""

    cdef int run(self, Call call) except -1:
        if call.sparse is not None and call.values[self.slots[1]] is not None:
            expected = f"a dense array, as {self.names[1]} is given"
            call.fail(self.names[0], expected, "a sparse array (toarray() makes a dense one)")
        return 0


cdef class NoneWithout(Check):
    """Check that the first argument is None if the second one is."""

    cdef int run(self, Call call) except -1:
        if call.values[self.slots[0]] is not None and call.values[self.slots[1]] is None:
            shown = f"shape {shape_of(call.array(self.slots[0]))}"
            call.fail(self.names[0], f"None, as {self.names[1]} is None", shown)
        return 0


cdef class PositiveValues(Check):
    """Check that the named argument, if it is on the host, is a positive finite number or an array of them."""

    cdef int run(self, Call call) except -1:
        value = call.values[self.slots[0]]
        if isinstance(value, AbstractDeviceArray):
            return 0
        if type(value) is float:
            if not 0 < <double>value < float("inf"):
                call.fail(self.names[0], "a positive finite number", value)
            return 0
        if call.operator.family == LOSSES:
            value = np.ascontiguousarray(value, np.float64).reshape(-1)
        with np.errstate(all="ignore"):
            wrong = np.flatnonzero(~((value > 0) & (value < np.inf)))
        if wrong.size:
            call.fail(self.names[0], "positive finite numbers", f"{value[wrong[0]]} in row {wrong[0]}")
        return 0


cdef class LeadingDimensions(Check):
    """Merge the dimensions of the rows, as kernels know one: an input (..., H) becomes (BT, H), an array (...) (BT,).

    Parameters
    ----------
    input : str
    rows : str
        The arrays of the rows. Arrays of targets may have one more dimension, and numbers stay as they are.
    like_input : tuple of str
        Arrays of the shape of the input.
    """

    cdef int rows  # number of `input` and `rows` among the names

    def __init__(self, input, *rows, like_input=()):
        Check.__init__(self, input, *rows, *like_input)
        self.rows = 1 + <int>len(rows)

    cdef int run(self, Call call) except -1:
        cdef cnp.ndarray array = call.array(self.slots[0]), other
        cdef int i
        # Arrays on devices have two dimensions.
        if cnp.PyArray_NDIM(array) in (0, 2) or not cnp.PyArray_CheckExact(call.values[self.slots[0]]):
            return 0
        cdef tuple leading = shape_of(array)[:cnp.PyArray_NDIM(array) - 1]
        cdef Py_ssize_t rows = 1, length
        for length in leading:
            rows *= length
        has_several, has_dense = call.operator.slots.get("target_prob"), False
        if has_several is not None:
            has_several, has_dense = call.values[has_several] is not None, is_dense(call)
        for i in range(1, self.rows):
            is_of_targets = self.names[i].startswith("target") or self.names[i] == "grad_log_prob"
            has_further = (has_several and is_of_targets) or (has_dense and self.names[i] == "target")
            self.merge(call, i, leading, rows, 1 if has_further else 0)
        for i in range(self.rows, self.count):
            if call.values[self.slots[i]] is None or is_on_device(call.values[self.slots[i]]):
                continue
            other = call.array(self.slots[i])
            if shape_of(other) != shape_of(array):
                call.fail(self.names[i], f"shape {shape_of(array)} as {self.names[0]} has", shape_of(other))
            call.values[self.slots[i]] = other.reshape((rows, cnp.PyArray_DIM(other, cnp.PyArray_NDIM(other) - 1)))
        call.values[self.slots[0]] = array.reshape((rows, cnp.PyArray_DIM(array, cnp.PyArray_NDIM(array) - 1)))
        call.leading = leading
        return 0

    cdef int merge(self, Call call, int i, tuple leading, Py_ssize_t rows, int further) except -1:
        """Merge the dimensions of the rows of one array, which has this number of further dimensions."""
        cdef object value = call.values[self.slots[i]]
        if value is None or isinstance(value, (int, float, str, bytes)) or is_on_device(value):
            return 0
        cdef cnp.ndarray array = call.array(self.slots[i])
        cdef tuple shape = shape_of(array)
        if not shape and self.names[i] in ("temperature", "grad_loss"):
            call.values[self.slots[i]] = value  # a number, which messages show as it was passed
            return 0
        if len(shape) != len(leading) + further or shape[:len(leading)] != leading:
            expected = f"({', '.join([*map(str, leading), *['K'] * further])}{',' if len(leading) + further == 1 else ''})"
            advice = self.advice(call, self.names[i], shape, leading, rows, further)
            call.fail(
                self.names[i], f"shape {expected}, that of {self.names[0]} without its last dimension", f"{shape}{advice}"
            )
        call.values[self.slots[i]] = array.reshape((rows, *shape[len(leading):]))
        return 0

    cdef str advice(self, Call call, str name, tuple shape, tuple leading, Py_ssize_t rows, int further):
        """Return what to do about an array of rows of another shape than this one, if the likely cause is known."""
        cdef cnp.ndarray weight = call.array(call.operator.array_slots[1])
        cdef Py_ssize_t count = 1, length
        cdef tuple last = shape[len(shape) - further:]
        for length in shape[:len(shape) - further]:
            count *= length
        if count == rows and len(last) == further:
            return f"; pass {name}.reshape({leading + last})"
        is_one_hot = not further and name.startswith("target") and shape == (*leading, *shape_of(weight)[:1])
        return f"; {advice_on_one_hot(name)}" if is_one_hot else ""
