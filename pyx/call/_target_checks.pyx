"""Checks of targets and of their probabilities, compiled as they are part of every call (see `_checks`)."""

import numpy as np

cimport numpy as cnp
from libc.stdint cimport int32_t, int64_t, uint8_t, uint64_t

from ascend_grad cimport _tasks
from ascend_grad._array_types cimport is_on_device
from ascend_grad._call cimport BT, LOSSES, V, Call, Check, native_vector, shape_of
from ascend_grad._checks cimport Floating, Shape, conversion, have_same_shape, is_tensor, rows_of, vocabulary_of
from ascend_grad._dtypes cimport dtype_of

from . import arguments
from .arrays import AbstractDeviceArray, host_values
from .errors import ParamTypeError
from .operators.options import OUTPUTS, is_zero

cnp.import_array()

cdef enum:
    ROWS_PER_CHECK = 1 << 18  # targets compared between two checks for signals

# Why a call with dense targets has neither an output nor an upstream gradient of a target.
cdef str _DENSE = "target holds probabilities of all classes"


cdef bint is_dense(Call call) except -1:
    """Return whether the targets of a loss are probabilities of all classes. `Classes` has checked their shape."""
    return dtype_of(call.array(call.operator.array_slots[1 if call.operator.family == LOSSES else 2])) >= 0


def looks_one_hot(cnp.ndarray ids, Py_ssize_t classes):
    """Return whether integers look like one-hot rows: as many as classes, more than two, one of them 1 and the others 0."""
    cdef int rank = cnp.PyArray_NDIM(ids)
    if classes < 3 or not rank or cnp.PyArray_DIM(ids, rank - 1) != classes or not cnp.PyArray_SIZE(ids):
        return False
    return bool(ids.min() == 0 and ids.max() == 1 and (ids.sum(-1) == 1).all())


cdef str advice_on_one_hot(str name):
    """Return what to do about targets with as many entries for each row as classes."""
    return f"if rows are one-hot, pass {name}.argmax(-1)"


cdef class Targets(Check):
    """Check that the target of each row is given, or K of them with probabilities of the same shape, of a floating dtype.

    `rows` is the size that the number of rows has in the operator.
    """

    cdef Floating floating
    cdef Shape one_for_each_row

    def __init__(self, target, target_prob, rows):
        Check.__init__(self, target, target_prob)
        self.floating, self.one_for_each_row = Floating(target_prob), Shape(target, rows)

    cdef object bind(self, tuple parameters):
        Check.bind(self, parameters)
        self.floating.bind(parameters)
        self.one_for_each_row.bind(parameters)

    cdef int run(self, Call call) except -1:
        if dtype_of(call.array(self.slots[0])) >= 0:
            return 0
        if call.values[self.slots[1]] is None:
            self.advise(call)
            return self.one_for_each_row.run(call)
        self.floating.run(call)
        cdef cnp.ndarray target = call.array(self.slots[0]), prob = call.array(self.slots[1])
        cdef bint of_logits = call.operator.family == LOSSES
        cdef tuple shape = shape_of(target), rows = rows_of(call) if of_logits else (call.sizes[BT],)
        cdef bint fits = len(shape) == len(rows) + 1 and shape[:len(rows)] == rows
        advice = ""
        if shape == rows and shape_of(prob) == rows + (vocabulary_of(call),):
            advice = f"; pass probabilities of all classes as {self.names[0]}, without {self.names[1]}"
        if of_logits and not fits:
            expected = f"shape ({', '.join([*map(str, rows), 'K'])}), K entries for each row of input"
            call.fail(self.names[0], expected, f"{shape}{advice}")
        if of_logits and shape[len(rows)] == 0:
            call.fail(self.names[0], "at least one entry for each row", f"shape {shape}")
        if not fits or shape[len(rows)] == 0:
            call.fail(self.names[0], f"shape (BT = {call.sizes[BT]}, K) with K > 0", f"{shape}{advice}")
        if not have_same_shape(target, prob):
            call.fail(self.names[1], f"shape {shape} as {self.names[0]} has", shape_of(prob))
        return 0

    cdef int advise(self, Call call) except -1:
        """Refuse targets with one more dimension than the rows, if the likely cause is known."""
        cdef tuple shape = shape_of(call.array(self.slots[0]))
        cdef tuple rows = rows_of(call) if call.operator.family == LOSSES else (call.sizes[BT],)
        if len(shape) != len(rows) + 1 or shape[:len(rows)] != rows:
            return 0
        name, last = self.names[0], shape[len(rows)]
        if last == 1:
            call.fail(name, f"shape {rows}", f"{shape}; pass {name}.squeeze(-1)")
        if last == vocabulary_of(call):
            call.fail(name, f"shape {rows}", f"{shape}; {advice_on_one_hot(name)}")
        call.fail(name, f"shape {rows}, or target_prob with {last} probabilities for each row", shape)


cdef class NothingOfOneTarget(Check):
    """Check that no output of a single target is requested if rows have several, or of any target if they are dense."""

    def __init__(self):
        Check.__init__(self, "target_prob", "outputs")

    cdef int run(self, Call call) except -1:
        outputs = call.values[self.slots[1]]
        if not outputs:
            return 0
        cdef bint has_dense = is_dense(call)
        if call.values[self.slots[0]] is None and not has_dense:
            return 0
        why = _DENSE if has_dense else "target_prob is given"
        for name in outputs:
            if OUTPUTS[name].of_one_target or (has_dense and OUTPUTS[name].is_of_targets):
                call.fail("outputs", f"no output of a single target, as {why}", repr(name))
        return 0


cdef class ZeroProbabilities(Check):
    """Replace the number 0 instead of probabilities of targets by zeros of the targets' shape."""

    def __init__(self, target):
        Check.__init__(self, "target_prob", target)

    cdef int run(self, Call call) except -1:
        if call.values[self.slots[0]] is not None and is_zero(call.values[self.slots[0]]):
            if is_on_device(call.values[self.slots[1]]):
                call.fail("target_prob", "an array of zeros on the device of target", 0)
            call.values[self.slots[0]] = np.broadcast_to(np.float32(0), shape_of(call.array(self.slots[1])))
        return 0


cdef class NumberOfEachTarget(Check):
    """Check that the argument, if given, has a number for each row, or with ``target_prob`` for each target.

    It is refused with dense targets. `rows` is the size that the number of rows has in the operator.
    """

    cdef Shape one_for_each_row

    def __init__(self, name, target, rows):
        Check.__init__(self, name, target, "target_prob")
        self.one_for_each_row = Shape(name, rows)

    cdef object bind(self, tuple parameters):
        Check.bind(self, parameters)
        self.one_for_each_row.bind(parameters)

    cdef int run(self, Call call) except -1:
        if call.values[self.slots[0]] is None:
            return 0
        cdef cnp.ndarray array = call.array(self.slots[0]), target = call.array(self.slots[1])
        if dtype_of(target) >= 0:
            call.fail(self.names[0], f"None, as {_DENSE}", "an array")
        if call.values[self.slots[2]] is None:
            return self.one_for_each_row.run(call)
        if not have_same_shape(target, array):
            call.fail(self.names[0], f"shape {shape_of(target)} as {self.names[1]} has", shape_of(array))
        return 0


# ---- checks of places in the vocabulary ------------------------------------------------------------------------------


cdef class Classes(Check):
    """Check that the named array has an integer dtype. Others than int32 and int64 are converted to int64.

    With `allows_dense`, an array of a floating dtype with the shape of the logits is allowed, too, without `target_prob`:
    dense targets.
    """

    cdef bint allows_dense

    def __init__(self, name, *, allows_dense=False):
        Check.__init__(self, name)
        self.allows_dense = allows_dense

    cdef int run(self, Call call) except -1:
        cdef cnp.ndarray array = call.array(self.slots[0])
        if cnp.PyArray_ISSIGNED(array) and cnp.PyArray_ISINTEGER(array) and cnp.PyArray_ITEMSIZE(array) >= 4:
            return 0
        cdef cnp.dtype dtype = array.dtype
        cdef bint is_here = cnp.PyArray_CheckExact(call.values[self.slots[0]])
        cdef bint has_prob = self.allows_dense and call.values[<int>call.operator.slots["target_prob"]] is not None
        if dtype_of(array) >= 0 and self.allows_dense and not has_prob:
            return self.check_dense(call, array)
        if dtype.kind not in "iu" or not is_here:
            advice = f"; {self.advice(call, array)}" if is_here and (dtype.kind in "fbOUT" or dtype_of(array) >= 0) else ""
            expected = "an integer dtype" if is_here else "dtype int32 or int64"
            if has_prob and dtype_of(array) >= 0:
                expected, advice = f"{expected}, as target_prob is given", ""
            call.fail(self.names[0], expected, f"{dtype}{advice}", ParamTypeError)
        if dtype.kind == "u" and cnp.PyArray_ITEMSIZE(array) == 8 and cnp.PyArray_SIZE(array):
            largest = int(array.max())
            if largest > arguments.MAX_INDEX:
                index = tuple([int(each) for each in np.unravel_index(array.argmax(), shape_of(array))])
                advice = f"{conversion(call, self.slots[0], 'int64')} converts it to {largest - 2**64}"
                call.fail(self.names[0], "values in the range of int64", f"{largest} at index {index} ({advice})")
        call.values[self.slots[0]] = array.astype(np.int64)
        return 0

    cdef int check_dense(self, Call call, cnp.ndarray target) except -1:
        """Check that floating targets have the shape of the logits."""
        cdef cnp.ndarray first = call.array(call.operator.array_slots[0]), weight
        cdef tuple shape = shape_of(first)
        if call.operator.family != LOSSES and shape:
            weight = call.array(call.operator.array_slots[1])
            if cnp.PyArray_NDIM(weight) != 2:
                return 0  # a later check refuses the weight
            shape = shape[:len(shape) - 1] + (cnp.PyArray_DIM(weight, 0),)
        if shape_of(target) == shape:
            return 0
        cdef int rank = cnp.PyArray_NDIM(target)
        expected = f"shape {shape}, as floating targets are probabilities of all classes"
        advice = ""
        if rank == cnp.PyArray_NDIM(first):
            if shape_of(target) == shape[:len(shape) - 1] + (1,):
                method = "long()" if is_tensor(call, self.slots[0]) else "astype(int)"
                advice = f"; for class ids, pass {self.names[0]}.squeeze(-1).{method}"
            call.fail(self.names[0], expected, f"{shape_of(target)}{advice}")
        if rank + 1 == cnp.PyArray_NDIM(first) or self.is_swapped(call, target):
            advice = f"; {self.advice(call, target)}"
        got = f"{target.dtype} of shape {shape_of(target)}{advice}"
        return call.fail(self.names[0], f"an integer dtype, or {expected}", got, ParamTypeError)

    cdef bint is_swapped(self, Call call, cnp.ndarray target) except -1:
        """Return whether targets may be the logits, and the logits the targets."""
        cdef cnp.ndarray first = call.array(call.operator.array_slots[0])
        cdef int rank = cnp.PyArray_NDIM(first)
        if call.operator.family != LOSSES or cnp.PyArray_NDIM(target) != rank + 1:
            return False
        return shape_of(target)[:rank] == shape_of(first)

    cdef str advice(self, Call call, cnp.ndarray array):
        """Return how targets that are no integers become classes."""
        cdef cnp.ndarray first = call.array(call.operator.array_slots[0])
        name = self.names[0]
        if array.dtype.kind in "UT" or (array.dtype == object and array.size and isinstance(array.flat[0], str)):
            return f"numpy.unique({name}, return_inverse=True)[1] converts labels to classes"
        if array.dtype.kind == "b" and cnp.PyArray_NDIM(array) == cnp.PyArray_NDIM(first):
            return advice_on_one_hot(name)
        if dtype_of(array) >= 0:
            if self.is_swapped(call, array):
                return f"are {call.operator.array_names[0]} and {name} swapped?"
            if (array != array).any():
                filled = f"{name}.nan_to_num(" if is_tensor(call, self.slots[0]) else f"numpy.nan_to_num({name}, nan="
                filled = f"{filled}ignore_index).{conversion(call, self.slots[0], 'int64')}"
                return f"to ignore rows with NaN, pass {filled}"
        return f"{name}.{conversion(call, self.slots[0], 'int64')} converts it to classes"


cdef class TargetsInRange(Check):
    """Check that ``masked_target`` is a row of weight wherever ``target_mask`` is 0."""

    def __init__(self):
        Check.__init__(self, "masked_target", "target_mask")

    cdef int run(self, Call call) except -1:
        if call.device_id >= 0:
            targets_there, mask_there = call.values[self.slots[0]], call.values[self.slots[1]]
            if isinstance(targets_there, AbstractDeviceArray) and (
                not targets_there.IS_READ or targets_there.is_known_below(call.sizes[V], mask_there)
            ):
                return 0
        cdef cnp.ndarray target = call.host_vector(self.slots[0], call.sizes[BT]), mask = None
        cdef const uint8_t *masked = NULL
        cdef bint is_wide = cnp.PyArray_ITEMSIZE(target) == 8, is_packed = False
        cdef const void *targets = cnp.PyArray_DATA(target)
        cdef Py_ssize_t i
        cdef int64_t each, vocabulary = call.sizes[V]
        cdef double last = 0
        for i in range(call.sizes[BT]):
            each = (<const int64_t *>targets)[i] if is_wide else (<const int32_t *>targets)[i]
            if each < 0 or each >= vocabulary:
                if mask is None:
                    is_packed = cnp.PyArray_TYPE(call.array(self.slots[1])) != cnp.NPY_BOOL
                    mask = call.host_vector(self.slots[1], (call.sizes[BT] + 7) // 8 if is_packed else call.sizes[BT])
                    masked = <const uint8_t *>cnp.PyArray_DATA(mask)
                if not (masked[i // 8] >> (i % 8) & 1 if is_packed else masked[i]):
                    expected = f"values in [0, {vocabulary}) wherever target_mask is 0"
                    call.fail("masked_target", expected, f"{each} in row {i}")
            if i % ROWS_PER_CHECK == 0:
                _tasks.check_signals(&last)
        return 0


cdef bint has_others(
    const void *targets, bint is_wide, Py_ssize_t begin, Py_ssize_t end, int64_t start, int64_t entries
) noexcept nogil:
    """Return whether some targets in [begin, end) are no entries. The loops have no comparisons, so that they have vectors."""
    cdef uint64_t bits = 0, offset, last = <uint64_t>entries - 1
    cdef Py_ssize_t i
    # Both numbers have the sign 0 if and only if the offset is in [0, last]. An unsigned difference does not overflow.
    if is_wide:
        for i in range(begin, end):
            offset = <uint64_t>(<const int64_t *>targets)[i] - <uint64_t>start
            bits |= offset | (last - offset)
    else:
        for i in range(begin, end):
            offset = <uint64_t>(<const int32_t *>targets)[i] - <uint64_t>start
            bits |= offset | (last - offset)
    return bits >> 63


cdef class TargetsInTheVocabulary(Check):
    """Check that targets are vocabulary entries or ``ignore_index``. A row may have several targets.

    The entries are the rows of a linear layer's weight, the first of which has the id ``vocab_start_index``, or the elements
    of a row of logits. A call on logits gets a copy of the targets, since they are places in memory, which another thread
    must not change later. Several targets of a row are compared with the number of classes again when they are read.
    """

    def __init__(self, vocab_start_index=None):
        starts = [] if vocab_start_index is None else [vocab_start_index]
        Check.__init__(self, "target", "ignore_index", "target_prob", *starts)

    cdef int run(self, Call call) except -1:
        given = call.values[self.slots[0]]
        cdef bint of_logits = call.operator.family == LOSSES
        if is_dense(call):
            if not of_logits and call.sizes[V] == 0 and call.sizes[BT] > 0:
                call.fail(self.names[0], "only class ids equal to ignore_index, as the vocabulary is empty", "probabilities")
            return 0
        cdef bint is_here = cnp.PyArray_CheckExact(given)
        if isinstance(given, AbstractDeviceArray) and not given.IS_READ:
            return 0
        cdef cnp.ndarray target = call.array(self.slots[0])
        cdef Py_ssize_t columns = 1
        if of_logits:
            target = target if is_here else host_values(given)
            if call.values[self.slots[2]] is not None:
                target = np.require(target, target.dtype.newbyteorder("="), ["C", "A"])
            else:
                target = np.array(target, target.dtype.newbyteorder("="), order="C")
            if is_here:
                call.values[self.slots[0]] = target
        elif cnp.PyArray_NDIM(target) == 2:
            columns = cnp.PyArray_DIM(target, 1)
            target = native_vector(given if is_here else host_values(given))
        else:
            target = call.host_vector(self.slots[0], call.sizes[BT])
        cdef bint is_wide = cnp.PyArray_ITEMSIZE(target) == 8, is_wrong
        cdef const void *targets = cnp.PyArray_DATA(target)
        cdef Py_ssize_t begin = 0, end, i, count = cnp.PyArray_SIZE(target)
        if not of_logits:
            count = min(count, call.sizes[BT] * columns)
        cdef int64_t start = call.values[self.slots[3]] if self.count > 3 else 0
        cdef int64_t each, entries = vocabulary_of(call), ignored = call.values[self.slots[1]]
        cdef double last = 0
        while begin < count:
            end = min(begin + ROWS_PER_CHECK, count)
            is_wrong = False
            for i in range(begin, end if has_others(targets, is_wide, begin, end, start, entries) else begin):
                each = (<const int64_t *>targets)[i] if is_wide else (<const int32_t *>targets)[i]
                # An unsigned difference does not overflow. It is large if the target is below the first entry.
                is_wrong |= (<uint64_t>each - <uint64_t>start >= <uint64_t>entries) & (each != ignored)
            if is_wrong:
                self.refuse_first(call, target, start, entries, columns)
            begin += ROWS_PER_CHECK
            _tasks.check_signals(&last)
        if call.values[self.slots[2]] is not None and looks_one_hot(target, entries):
            advice = "pass probabilities of all classes as floating targets, without target_prob"
            what = "looks one-hot (all ids are 0 or 1, K = V), but integers are read as class ids"
            arguments.warn(f"{call.operator.name}: target: {what}; {advice}")
        return 0

    cdef int refuse_first(
        self, Call call, cnp.ndarray target, object start, object entries, Py_ssize_t columns
    ) except -1:
        """Refuse the call because of its first wrong target."""
        ignored = call.values[self.slots[1]]
        wrong = int(np.flatnonzero(((target < start) | (target >= start + entries)) & (target != ignored))[0])
        place = f"in row {wrong // columns}"
        if call.operator.family == LOSSES:
            place = f"at index {tuple([int(index) for index in np.unravel_index(wrong, shape_of(target))])}"
        return call.fail("target", f"values in [{start}, {start + entries}) or {ignored}", f"{target.flat[wrong]} {place}")
