"""From a public call to the backend that computes it. Compiled, since every call passes here."""

import logging
from contextvars import ContextVar
from typing import NamedTuple

from cpython.contextvars cimport get_value
from cpython.dict cimport PyDict_GetItemWithError
from cpython.object cimport PyObject

from ascend_grad cimport _cpu_backend
from ascend_grad._call cimport Call, Operator, validate
from ascend_grad._kernels cimport ag_fpenv, ag_fpenv_enter, ag_fpenv_leave

from . import arguments
from .backends import REGISTRY, npu
from .config import BACKENDS, ENVIRONMENT
from .device import runtime
from .errors import BackendUnavailableError, MissingKernelError, ParamInvalidError

#: What `use_backend` chose in this context: None, or an object whose ``name`` is that of a backend, or None. Where it is
#: None, the choice is the environment's, or automatic.
chosen = ContextVar("ascend_grad_backend", default=None)

logger = logging.getLogger("ascend_grad")

cdef object _chosen = chosen
#: What is asked for, and by what, where neither the call nor the context says.
cdef tuple _otherwise = (
    ("auto", "automatic choice") if ENVIRONMENT.backend is None else (ENVIRONMENT.backend, "ASCEND_GRAD_BACKEND")
)
cdef dict _runtime = runtime.__dict__
cdef tuple _backends = BACKENDS
cdef object MAX_THREADS = arguments.MAX_THREADS
cdef object _DEBUG = logging.DEBUG
#: The logger's own memory of its answers by level, which `logging` empties in place whenever one may change. To ask the
#: logger itself would cost a small call a tenth of its time.
cdef dict _answers = getattr(logger, "_cache", {})


class Explanation(NamedTuple):
    """Who computes a call, and why."""

    backend: str
    reason: str


cdef inline bint calls_are_logged() except -1:
    cdef PyObject *answer = PyDict_GetItemWithError(_answers, _DEBUG)
    return logger.isEnabledFor(_DEBUG) if answer is NULL else <object>answer


cpdef object checked_backend(object name, str operator=None):
    """The name of a backend, or ``"auto"``."""
    if isinstance(name, str):
        for known in _backends:
            if name == known:
                return known  # a plain str, where the name may be of a subclass
    expected = f"one of {', '.join(BACKENDS)}"
    raise ParamInvalidError(f"backend: expected {expected}, got {arguments.shown(name)}", operator=operator)


cpdef tuple requested(object backend, Operator operator=None):
    """The backend that is asked for, and by what: the argument, `use_backend`, the environment, or nobody."""
    if backend is not None:
        return checked_backend(backend, None if operator is None else operator.name), "the backend argument"
    choice = get_value(_chosen)
    if choice is not None and choice.name is not None:
        return choice.name, "use_backend"
    return _otherwise


cdef int thread_count(object num_threads, Operator operator) except -1:
    """The number of threads that a call asks for, 0 for the default."""
    if type(num_threads) is int and 1 <= num_threads <= MAX_THREADS:
        return num_threads
    return 0 if num_threads is None else arguments.thread_count(num_threads, operator.name)


cdef object cannot(Call call, tuple request, str reason):
    message = f"backend {request[0]!r} ({request[1]}) cannot compute this call: {reason}"
    raise BackendUnavailableError(message, operator=call.operator.name)


cdef object device_status():
    """Whether the device is usable, and the reason; it is looked for once, at first need."""
    cdef PyObject *state = PyDict_GetItemWithError(_runtime, "_state")
    return (<tuple>(runtime.state() if state is NULL or <object>state is None else <object>state))[0]


cdef str select(Call call, tuple request, list reasons):
    """The backend of a validated call; why is added to the list, if there is one.

    Raises where the backend that was asked for cannot take the call. Those of the host take every call, the device has
    its limits; arrays on a card are computed there or not at all.
    """
    cdef str name = request[0]
    cdef bint is_open = name == "auto"
    if not is_open and name != "npu":
        if call.card >= 0:
            cannot(call, request, f"its arrays are on device {call.card} (numpy() brings them back)")
        if reasons is not None:
            reasons.append(f"asked for by {request[1]}")
        return name
    is_open = is_open and call.card < 0
    usable, status = device_status()
    if usable:
        refusal = npu.refusal(call)
        if not is_open:
            if refusal is not None and refusal.error is not None:
                raise refusal.error
            refusal = None
        if refusal is None:
            if reasons is not None and call.card >= 0:
                reasons.append(f"its arrays are on device {call.card}")
            elif reasons is not None:
                reasons.append(request[1] if is_open else f"asked for by {request[1]}")
            return "npu"
        status = refusal.reason
    elif not is_open:
        cannot(call, ("npu", request[1]), status)
    if reasons is not None:
        reasons.append(f"{request[1]}; not npu: {status}")
    return "cpu"


cdef object computed(Call call, tuple request, int threads):
    cdef list reasons = [] if calls_are_logged() else None
    cdef str name = select(call, request, reasons)
    if reasons is not None:
        shapes = ", ".join([f"{array.dtype}{array.shape}" for array in call.arrays])
        logger.debug("%s of %s: %s, %s", call.operator.name, shapes, name, reasons[0])
    return _cpu_backend.run(call, threads) if name == "cpu" else REGISTRY[name].run(call, threads)


cdef object run_in_mode(Operator operator, list values, object out, object backend, object num_threads):
    cdef tuple request = requested(backend, operator)
    cdef int threads = thread_count(num_threads, operator)
    cdef Call call = validate(operator, values, out)
    try:
        return computed(call, request, threads)
    except MissingKernelError:
        if call.card >= 0 or request[0] != "auto":
            raise
    # Nothing was computed, and the device's refusal is known now: who left the choice to us gets another backend.
    return computed(call, request, threads)


def run(Operator operator not None, list values not None, out, backend, num_threads):
    """Validate, choose, compute. `values`: one for each of the operator's parameters; the list becomes the call's."""
    # Conversions and rounding on the way do not depend on the caller's floating-point mode either.
    cdef ag_fpenv mode = ag_fpenv_enter()
    try:
        return run_in_mode(operator, values, out, backend, num_threads)
    finally:
        ag_fpenv_leave(mode)


def prepared(Operator operator not None, list values not None, out, backend, num_threads):
    """What `run` would do: the validated call, the threads asked for (0: none in particular), an `Explanation`."""
    cdef tuple request = requested(backend, operator)
    cdef int threads = thread_count(num_threads, operator)
    cdef Call call = validate(operator, values, out)
    cdef list reasons = []
    cdef str name = select(call, request, reasons)
    return call, threads, Explanation(name, reasons[0])
