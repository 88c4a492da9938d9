"""Whether a call takes the short way to the CPU: asked before every call, and therefore compiled."""

from contextvars import ContextVar

cimport numpy as cnp
from cpython.contextvars cimport get_value

from .config import ENVIRONMENT
from .device import runtime

#: What `use_backend` chose in this context, an object with a name; None: the environment's choice, or automatic.
chosen = ContextVar("ascend_grad_backend", default=None)

cnp.import_array()

cdef object _chosen = chosen
cdef str _otherwise = ENVIRONMENT.backend or "auto"


def is_plain_cpu(backend, array, bint only_halves=False):
    """Whether a call with this array goes to the CPU without further look: the gate of the short ways.

    Where there is a device, so do float64, which no operator of it takes, and for one that takes 16-bit dtypes only,
    float32.
    """
    cdef int dtype
    if backend is None:
        choice = get_value(_chosen)
        backend = _otherwise if choice is None else choice.name
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
