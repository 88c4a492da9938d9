"""Whether a call takes the short way to the CPU: asked before every call, and therefore compiled."""

from contextvars import ContextVar

from cpython.contextvars cimport get_value

from .config import ENVIRONMENT
from .device import runtime

#: What `use_backend` chose in this context, an object with a name; None: the environment's choice, or automatic.
chosen = ContextVar("ascend_grad_backend", default=None)

cdef object _chosen = chosen
cdef str _otherwise = ENVIRONMENT.backend or "auto"


def is_plain_cpu(backend):
    """Whether a call without further look goes to the CPU: the gate of the short ways."""
    if backend is None:
        choice = get_value(_chosen)
        backend = _otherwise if choice is None else choice.name
    elif not isinstance(backend, str):  # an array, perhaps: not to be compared but refused on the general way
        return False
    if backend == "auto":
        return not (runtime._state or runtime.state()).status[0]
    return backend == "cpu"
