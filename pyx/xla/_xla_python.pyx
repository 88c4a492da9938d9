"""A function of NumPy's arrays as a function that XLA calls, for `ascend_grad.jax`. It takes the interpreter's lock.

A call names its arguments and results by the attributes ``arguments`` and ``results``. The function is called with a
dictionary of the arguments, which it must not change, and one of the other attributes. It returns the results by name, in the
shapes and dtypes of the call. They are copied.
"""

import numpy as np

cimport numpy as cnp
from cpython.pycapsule cimport PyCapsule_New
from libc.stdint cimport int64_t

from ascend_grad._kernels cimport ag_fpenv, ag_fpenv_enter, ag_fpenv_leave
from ascend_grad._xla_frame cimport (
    AG_XLA_F64,
    AG_XLA_INVALID_ARGUMENT,
    AG_XLA_RESOURCE_EXHAUSTED,
    AG_XLA_S64,
    AG_XLA_SCALAR,
    AG_XLA_STRING,
    INT32,
    INT64,
    MAX_RANK,
    MEMORY,
    SHAPES,
    ag_xla_buffer,
    ag_xla_call_frame,
    ag_xla_error,
    ag_xla_scalar,
    ag_xla_span,
    ag_xla_values,
    buffer_of,
    dtype_of,
    failed,
    is_question,
)

from ._dtypes import FLOATING_DTYPES

cnp.import_array()

cdef tuple _dtypes = FLOATING_DTYPES  # in the order of ag_dtype
cdef dict _integers = {INT32: np.dtype(np.int32), INT64: np.dtype(np.int64)}
cdef object _function = None


cdef cnp.ndarray array_of(const ag_xla_buffer *buffer):
    """Return a buffer as an array over the same memory."""
    cdef int number = dtype_of(buffer) if buffer != NULL else -1
    cdef cnp.dtype dtype = _integers.get(number)
    cdef tuple shape
    cdef cnp.npy_intp nbytes
    if number >= 0:
        dtype = _dtypes[number]
    if dtype is None or not 0 <= buffer.rank <= MAX_RANK:
        raise ValueError((<bytes>SHAPES).decode())
    shape = tuple([buffer.dims[axis] for axis in range(buffer.rank)])
    nbytes = dtype.itemsize
    for length in shape:
        nbytes *= length
    if not nbytes:
        return np.empty(shape, dtype)
    return cnp.PyArray_SimpleNewFromData(1, &nbytes, cnp.NPY_UINT8, buffer.data).view(dtype).reshape(shape)


cdef dict arrays_of(const ag_xla_values *values, str names):
    """Return buffers by name."""
    cdef list given = names.split()
    if len(given) != values.size:
        raise ValueError((<bytes>SHAPES).decode())
    return {name: array_of(buffer_of(values, i)) for i, name in enumerate(given)}


cdef dict attributes_of(const ag_xla_call_frame *frame):
    """Return attributes by name: texts, and numbers of 64 bits."""
    cdef dict found = {}
    cdef const ag_xla_span *span
    cdef const ag_xla_scalar *scalar
    cdef int64_t i
    for i in range(frame.attrs.size):
        name = frame.attrs.names[i].data[:frame.attrs.names[i].length].decode()
        if frame.attrs.types[i] == AG_XLA_STRING:
            span = <const ag_xla_span *>frame.attrs.values[i]
            found[name] = span.data[:span.length].decode()
        elif frame.attrs.types[i] == AG_XLA_SCALAR:
            scalar = <const ag_xla_scalar *>frame.attrs.values[i]
            if scalar.dtype == AG_XLA_S64:
                found[name] = (<const int64_t *>scalar.value)[0]
            elif scalar.dtype == AG_XLA_F64:
                found[name] = (<const double *>scalar.value)[0]
    return found


cdef int compute(const ag_xla_call_frame *frame) except -1:
    cdef dict attributes = attributes_of(frame), arguments = arrays_of(&frame.args, attributes.pop("arguments"))
    cdef dict results = arrays_of(&frame.results, attributes.pop("results"))
    found = _function(arguments, attributes)
    for name, result in results.items():
        if found[name].shape != result.shape or found[name].dtype != result.dtype:
            raise ValueError((<bytes>SHAPES).decode())
        result[...] = found[name]
    return 0


cdef ag_xla_error *answer_with_lock(const ag_xla_call_frame *frame) noexcept:
    try:
        compute(frame)
    except MemoryError:
        return failed(frame, AG_XLA_RESOURCE_EXHAUSTED, MEMORY)
    except Exception as error:
        message = str(error).encode()
        return failed(frame, AG_XLA_INVALID_ARGUMENT, message)
    return NULL


cdef ag_xla_error *call(ag_xla_call_frame *frame) noexcept nogil:
    cdef ag_fpenv mode
    cdef ag_xla_error *error
    if is_question(frame):
        return NULL
    mode = ag_fpenv_enter()
    with gil:
        error = answer_with_lock(frame)
    ag_fpenv_leave(mode)
    return error


def handler(function):
    """Return a function as a capsule, for ``jax.ffi.register_ffi_target``. A process has one such function."""
    global _function
    _function = function
    return PyCapsule_New(<void *>call, NULL, NULL)
