"""Options of losses from validated calls, and from the options of a rank."""

import numpy as np

cimport numpy as cnp
from libc.stdint cimport int64_t
from libc.string cimport memset

from ascend_grad._call cimport Call, doubles, native_vector
from ascend_grad._dtypes cimport dtype_of
from ascend_grad._kernels cimport AG_FLOAT32
from ascend_grad._loss_options cimport (
    REDUCTION_MEAN, REDUCTION_NONE, REDUCTION_SUM, LossOptions, numeric_option, sum_weights
)

cnp.import_array()

cdef enum:
    OUTPUT_COUNT = 5                  # lse, log_prob, entropy, predicted, correct: the last results of a loss


cdef tuple names_of_numbers():
    """Return the names of the options that are one number, in the order of `numeric_option`."""
    cdef LossOptions options
    cdef const char *name
    names = []
    while numeric_option(&options, <int>len(names), &name) != NULL:
        names.append((<bytes>name).decode())
    return tuple(names)


cdef enum:
    FIRST_NUMBER = 11                 # place of the first number in `_arguments`

#: The arguments that `set_options` reads, in this order; the last ones are numbers, in the order of `numeric_option`.
cdef tuple _arguments = (
    "reduction", "ignore_index", "vocab_start_index", "target_prob", "class_weight", "token_weight", "temperature",
    "grad_loss", "grad_lse", "grad_log_prob", "grad_entropy", *names_of_numbers()
)
#: The slots of these arguments by operator, `NO_SLOT` for a parameter that an operator lacks: calls look no names up.
cdef dict _slots = {}
cdef enum:
    NO_SLOT = 255


cdef list arguments_of(object source):
    """Return the arguments that `set_options` reads; None for one that a call or a rank's dictionary lacks."""
    if type(source) is not Call:
        return [(<dict>source).get(name) for name in _arguments]
    cdef Call call = source
    cdef bytes slots = _slots.get(call.operator)
    if slots is None:
        slots = _slots[call.operator] = bytes([call.operator.slots.get(name, NO_SLOT) for name in _arguments])
    cdef list values = call.values, arguments = [None] * len(slots)
    cdef Py_ssize_t i
    for i in range(len(slots)):
        if <unsigned char>slots[i] != NO_SLOT:
            arguments[i] = values[<unsigned char>slots[i]]
    return arguments


cdef object option(object source, str name):
    """Return an argument of a call, or an option of a rank, by name; None if it has none of this name."""
    if type(source) is Call:
        slot = (<Call>source).operator.slots.get(name)
        return None if slot is None else (<Call>source).values[<Py_ssize_t>slot]
    return (<dict>source).get(name)


cdef void *data_of(cnp.ndarray array) noexcept:
    return NULL if array is None else cnp.PyArray_DATA(array)


cdef const double *vector_of(object value, list held, bint with_values) except? NULL:
    """Return the address of an option that is an array, or NULL for None, for one number, and for no elements.

    With `with_values` the elements are float64. The array belongs to `held`.
    """
    if value is None or not cnp.PyArray_Check(value) or not cnp.PyArray_SIZE(<cnp.ndarray>value):
        return NULL
    if with_values:
        value = doubles(value)
        held.append(value)
    return <const double *>cnp.PyArray_DATA(<cnp.ndarray>value)


cdef Py_ssize_t dense_classes(cnp.ndarray target, object source) except -1:
    """Return the number of classes of dense targets, which lie along the axis of a call on logits, or else the last one."""
    cdef int rank = cnp.PyArray_NDIM(target)
    cdef int axis = (<Call>source).axis if type(source) is Call else (<dict>source).get("axis", -1)
    return cnp.PyArray_DIM(target, axis if axis >= 0 else rank - 1) if rank else 1


cdef double one_number(object value) except? -1:
    """Return an option that is one number, 1 for anything else."""
    return value if isinstance(value, float) else 1


cdef int set_probabilities(LossOptions *o, object prob, list held, bint with_values) except -1:
    """Set the probabilities of targets. They are as many as targets, so float32 ones are read in place if possible."""
    cdef cnp.ndarray array
    if prob is not None and cnp.PyArray_Check(prob) and cnp.PyArray_SIZE(<cnp.ndarray>prob):
        array = prob
        if (
            dtype_of(array) == AG_FLOAT32 and cnp.PyArray_IS_C_CONTIGUOUS(array) and cnp.PyArray_ISALIGNED(array)
            and not cnp.PyArray_ISBYTESWAPPED(array)
        ):
            o.target_prob, o.has_float_prob = cnp.PyArray_DATA(array), True
            held.append(array)
            return 0
    o.target_prob = vector_of(prob, held, with_values)
    return 0


cdef list set_options(LossOptions *o, cnp.ndarray target, object source, bint with_values):
    """Fill in the options of a loss, and return the arrays that hold them. Results are not requested.

    `source` is a `Call`, or a dictionary of a rank's options. Without `with_values`, the elements of arrays mean nothing.
    """
    cdef list held = [target]
    cdef list arguments = arguments_of(source)
    (
        reduction, ignore_index, first_entry, prob, class_weight, token_weight, temperature,
        grad_loss, grad_lse, grad_log_prob, grad_entropy
    ) = arguments[:FIRST_NUMBER]
    cdef const char *name
    cdef int i
    memset(o, 0, sizeof(LossOptions))
    o.target_count = 1
    if prob is not None:
        o.target_count = cnp.PyArray_DIM(target, cnp.PyArray_NDIM(target) - 1)
    o.rows = cnp.PyArray_SIZE(target) // o.target_count
    if dtype_of(target) >= 0:
        o.target_count, o.rows = 0, o.rows // max(1, dense_classes(target, source))
    o.target, o.is_wide = cnp.PyArray_DATA(target), cnp.PyArray_ITEMSIZE(target) == 8
    o.ignore_index, o.first_entry = ignore_index, first_entry or 0
    set_probabilities(o, prob, held, with_values)
    o.class_weight = vector_of(class_weight, held, with_values)
    o.classes = 0 if o.class_weight == NULL else cnp.PyArray_SIZE(<cnp.ndarray>class_weight)
    o.token_weight = vector_of(token_weight, held, with_values)
    for i in range(<int>len(arguments) - FIRST_NUMBER):
        numeric_option(o, i, &name)[0] = arguments[FIRST_NUMBER + i] or 0
    o.temperatures, o.temperature = vector_of(temperature, held, with_values), one_number(temperature)
    o.reduction = REDUCTION_SUM if reduction == "sum" else REDUCTION_MEAN if reduction == "mean" else REDUCTION_NONE
    o.grad_losses, o.grad_loss = vector_of(grad_loss, held, with_values), one_number(grad_loss)
    o.grad_lse = vector_of(grad_lse, held, with_values)
    o.grad_log_prob = vector_of(grad_log_prob, held, with_values)
    o.grad_entropy = vector_of(grad_entropy, held, with_values)
    return held


cdef cnp.ndarray ids_from_zero(cnp.ndarray target, object start, object ignored):
    """Return ids that count from 0 instead of `start`, with -1 for ignored ones."""
    cdef cnp.ndarray is_ignored = target == ignored, ids = target.astype(np.int64)
    ids -= start
    ids[is_ignored] = -1
    return ids


cdef Py_ssize_t bytes_of_ids_from_zero(cnp.ndarray target) noexcept:
    """Return the most bytes that `ids_from_zero` allocates."""
    return (8 + 1) * cnp.PyArray_SIZE(target)


cdef void set_results(LossOptions *o, list results):
    """Set the addresses of the loss and its outputs. `results` has an array, or None, for each result of a loss."""
    cdef Py_ssize_t outputs = len(results) - OUTPUT_COUNT
    o.loss = data_of(results[0])
    o.outputs.lse, o.outputs.log_prob = data_of(results[outputs]), data_of(results[outputs + 1])
    o.outputs.entropy = data_of(results[outputs + 2])
    o.outputs.predicted = <int64_t *>data_of(results[outputs + 3])
    o.outputs.correct = <int64_t *>data_of(results[outputs + 4])


def weight_sums(target, **options):
    """Compute the weights that a mean over some rows is divided by.

    Parameters
    ----------
    target : ndarray of int32 or int64, shape (rows,), or (rows, K) with `target_prob`; or dense
        A target that is no class counts as the nearest one. The classes of dense targets lie along the option `axis`, by
        default the last axis.
    **options
        Options of a loss by name, with `ignore_index`. The weights of the targets' classes may be given as
        `target_class_weight`, shape (rows,), where `class_weight` is split over ranks.

    Returns
    -------
    ndarray of float64, shape (2,)
        The sums of the weights of the rows that are not ignored: of the cross-entropy, and of the squared lse.
    """
    cdef LossOptions o
    cdef cnp.ndarray array = np.asarray(target)
    cdef list held = set_options(&o, array if dtype_of(array) >= 0 else native_vector(array), options, True)
    cdef cnp.ndarray sums = np.zeros(2)
    o.target_class_weight = vector_of(options.get("target_class_weight"), held, True)
    with nogil:
        sum_weights(&o, <double *>cnp.PyArray_DATA(sums), NULL)
    return sums
