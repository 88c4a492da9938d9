"""Whether a call takes the short way to the CPU: asked before every call, and therefore compiled."""

import logging
from contextvars import ContextVar

cimport numpy as cnp
from cpython.contextvars cimport get_value
from cpython.dict cimport PyDict_GetItem
from cpython.object cimport PyObject

from .config import ENVIRONMENT
from .device import runtime

#: What `use_backend` chose in this context: None, or an object whose ``name`` is that of a backend, or None. Where it is
#: None, the choice is the environment's, or automatic.
chosen = ContextVar("ascend_grad_backend", default=None)

cnp.import_array()

cdef object _chosen = chosen
cdef str _otherwise = ENVIRONMENT.backend or "auto"
cdef object _logger = logging.getLogger("ascend_grad")
cdef object _DEBUG = logging.DEBUG
#: The logger's own memory of its answers by level, which `logging` empties in place whenever one may change. To ask the
#: logger itself would cost a small call a tenth of its time.
cdef dict _answers = getattr(_logger, "_cache", {})


cdef inline bint calls_are_logged():
    cdef PyObject *answer = PyDict_GetItem(_answers, _DEBUG)
    return _logger.isEnabledFor(_DEBUG) if answer is NULL else <object>answer


def is_plain_cpu(backend, array, bint only_halves=False):
    """Whether a call with this array goes to the CPU without further look: the gate of the short ways.

    Where there is a device, so do float64, which no operator of it takes, and for one that takes 16-bit dtypes only,
    float32. Calls that are to be logged do not: the general way tells of them.
    """
    cdef int dtype
    if calls_are_logged():
        return False
    if backend is None:
        choice = get_value(_chosen)
        if choice is not None:
            backend = choice.name
        if backend is None:
            backend = _otherwise
    elif not isinstance(backend, str):  # an array, perhaps: not to be compared but refused on the general way
        return False
    if backend == "auto":
        if not (runtime._state or runtime.state()).status[0]:
            return True
        if not cnp.PyArray_CheckExact(array):
            return False
        dtype = cnp.PyArray_TYPE(<cnp.ndarray>array)
        return dtype == cnp.NPY_DOUBLE or (only_halves and dtype == cnp.NPY_FLOAT)
    return backend == "cpu"
