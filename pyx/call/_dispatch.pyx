"""Choose the backend that computes a public call. Compiled, as it is part of every call."""

import logging
from contextvars import ContextVar
from typing import NamedTuple

cimport cython
from cpython.contextvars cimport get_value
from cpython.dict cimport PyDict_GetItemWithError
from cpython.object cimport PyObject

from ascend_grad cimport _cpu_backend
from ascend_grad._call cimport Call, Operator, in_library, mark_outs_written, validate
from ascend_grad._kernels cimport ag_fpenv, ag_fpenv_enter, ag_fpenv_leave

from . import arguments
from .backends import CHOICES, DEVICES, FROM_ENVIRONMENT, REGISTRY
from .errors import BackendUnavailableError, MissingKernelError, ParamInvalidError, ParamTypeError, ProcessEndingError

#: The choice of `use_backend` in this context: None, or an object whose ``value`` is the name of a backend or None. If
#: either is None, the environment decides, or else the automatic choice.
backend_choice = ContextVar("ascend_grad_backend", default=None)

logger = logging.getLogger("ascend_grad")

cdef object _backend_choice = backend_choice
#: The backend, and the source of that choice, if neither the call nor the context names one.
cdef tuple _otherwise = (
    ("auto", "automatic choice") if FROM_ENVIRONMENT is None else (FROM_ENVIRONMENT, "ASCEND_GRAD_BACKEND")
)
cdef tuple _choices = CHOICES
cdef object MAX_THREADS = arguments.MAX_THREADS
cdef object _DEBUG = logging.DEBUG
#: The logger's own cache of `isEnabledFor` by level, which `logging` clears in place whenever a level changes. Calling
#: the logger itself would take a tenth of the time of a small call.
cdef dict _answers = getattr(logger, "_cache", {})


@cython.final
cdef class Device:
    """The backend of a device, with the attributes that every call reads."""

    cdef object backend
    cdef str name
    cdef dict found

    def __init__(self, backend):
        self.backend, self.name, self.found = backend, backend.NAME, backend.found

    cdef tuple status(self):
        """Return whether the device is usable, and the reason. The device is looked for once, at the first call."""
        state = self.found.get("state")  # holds a reference, as the entry is replaced when the process ends
        return self.backend.status() if state is None else <tuple>(<tuple>state)[0]


cdef tuple _devices = tuple([Device(backend) for backend in DEVICES])


class _Choice(NamedTuple):
    backend: str
    reason: str


class Explanation(_Choice):
    """The backend that computes a call, and the reason.

    On the CPU, the attributes `variant`, `plan` and `threads` tell how: the instruction set, the name of the plan, and the
    number of threads of calls that follow one another. `estimated_ns` is the estimated time of a row-wise operator or of
    `cross_entropy` in nanoseconds, by which its plan was chosen. On other backends they are None. `details` tells where a device was
    looked for, if none was found; otherwise it is None. `transferred_bytes` is the number of bytes that a call on arrays of
    the host copies to a device and back, None for other calls.
    """

    variant = plan = threads = estimated_ns = details = transferred_bytes = None

    def __new__(
        cls, backend, reason, variant=None, plan=None, threads=None, estimated_ns=None, details=None, transferred_bytes=None
    ):
        self = _Choice.__new__(cls, backend, reason)
        self.variant, self.plan, self.threads, self.estimated_ns = variant, plan, threads, estimated_ns
        self.details, self.transferred_bytes = details, transferred_bytes
        return self

    def __repr__(self):
        fields = {**self._asdict(), **self.__dict__}
        return f"Explanation({', '.join([f'{name}={each!r}' for name, each in fields.items() if each is not None])})"


cdef inline bint calls_are_logged() except -1:
    cdef PyObject *answer = PyDict_GetItemWithError(_answers, _DEBUG)
    return logger.isEnabledFor(_DEBUG) if answer is NULL else <object>answer


cpdef object checked_backend(object name, str operator=None, str argument="backend"):
    """Check the name of a backend, or ``"auto"``, and return it."""
    is_str = isinstance(name, str)
    if is_str:
        for known in _choices:
            if name == known:
                return known  # a plain str, as the name may be of a subclass
    message = f"{argument}: expected one of {', '.join(CHOICES)}, got {arguments.shown(name)}"
    raise (ParamInvalidError if is_str else ParamTypeError)(message, operator=operator)


cpdef tuple requested(object backend, Operator operator=None):
    """Return the requested backend and the source of the request: the argument, `use_backend`, environment, default."""
    if backend is not None:
        return checked_backend(backend, None if operator is None else operator.name), "the backend argument"
    choice = get_value(_backend_choice)
    if choice is not None and choice.value is not None:
        return choice.value, "use_backend"
    return _otherwise


cdef int thread_count(object num_threads, Operator operator) except -1:
    """Check the number of threads that a call asks for, and return it, or 0 for the default."""
    if type(num_threads) is int and 1 <= num_threads <= MAX_THREADS:
        return num_threads
    return 0 if num_threads is None else arguments.thread_count(num_threads, operator.name)


cdef object cannot(Call call, object name, object asked_by, object reason):
    message = f"backend {name!r} ({asked_by}) cannot compute this call: {reason}"
    raise BackendUnavailableError(message, operator=call.operator.name)


cdef str selected_device(Call call, tuple request, Device device, list reasons):
    """Return the name of a device that was requested or has the arrays; raise if it cannot compute the call."""
    usable, status, _ = device.status()
    if not usable:
        cannot(call, device.name, request[1], status)
    unsupported = device.backend.unsupported_reason(call)
    if unsupported is not None and unsupported.error is not None:
        raise unsupported.error
    if reasons is not None:
        reason = f"requested by {request[1]}" if call.device_id < 0 else f"its arrays are on device {call.device_id}"
        reasons.append(reason if unsupported is None else f"{reason}, though {unsupported.reason}")
    return device.name


cdef str automatic(Call call, tuple request, list reasons):
    """Return the first device that supports the call, else the CPU."""
    cdef Device device
    cdef tuple status
    cdef str others = ""
    for device in _devices:
        status = device.status()
        if status[0]:
            unsupported = device.backend.unsupported_reason(call)
            if unsupported is None:
                if reasons is not None:
                    reasons.append(request[1] + others)
                return device.name
            hint = f" (backend={device.name!r} tries it)" if unsupported.error is None else ""
            status = False, unsupported.reason + hint, ""
        if reasons is not None:
            others += f"; not {device.name}: {status[1]}"
    if reasons is not None:
        reasons.append(request[1] + others)
    return "cpu"


cdef str select(Call call, tuple request, list reasons):
    """Return the backend of a validated call, and append the reason to the list, if there is one.

    Raises an error if the requested backend cannot compute the call. Backends of the host compute every call; devices
    have limits. Arrays on a device are computed there or not at all.
    """
    cdef str name = request[0]
    cdef Device device
    if call.device_id >= 0:
        for device in _devices:
            if device.backend.owns(call.arrays[0]):
                break
        if name not in ("auto", device.name):
            where = f"its arrays are on device {call.device_id} (copy them to the host with {call.arrays[0].TO_HOST})"
            cannot(call, name, request[1], where)
        return selected_device(call, request, device, reasons)
    if name == "auto":
        return automatic(call, request, reasons)
    for device in _devices:
        if name == device.name:
            return selected_device(call, request, device, reasons)
    if reasons is not None:
        reasons.append(f"requested by {request[1]}")
    return name


cdef object computed(Call call, tuple request, int threads):
    cdef list reasons = [] if calls_are_logged() else None
    cdef str name = select(call, request, reasons)
    if reasons is not None:
        shapes = ", ".join([f"{array.dtype}{array.shape}" for array in call.arrays])
        logger.debug("%s of %s: %s, %s", call.operator.name, shapes, name, reasons[0])
    return _cpu_backend.run(call, threads) if name == "cpu" else REGISTRY[name].run(call, threads)


cdef object attempt(Call call, tuple request, int threads):
    try:
        return computed(call, request, threads)
    except (MissingKernelError, ProcessEndingError):
        if call.device_id >= 0 or request[0] != "auto":
            raise
    # Nothing was computed, and the device has recorded the reason. So the automatic choice takes another backend.
    return attempt(call, request, threads)


cdef object run_in_mode(Operator operator, list values, object out, object backend, object num_threads):
    cdef tuple request = requested(backend, operator)
    cdef int threads = thread_count(num_threads, operator)
    cdef Call call = validate(operator, values, out)
    mark_outs_written(call)
    return in_library(call, attempt(call, request, threads))


def run(Operator operator not None, list values not None, out, backend, num_threads):
    """Validate a call, choose its backend, and compute it.

    `values` has one value for each of the operator's parameters. The call keeps and changes the list.
    """
    # Conversions and rounding during validation do not depend on the caller's floating-point mode either.
    cdef ag_fpenv mode = ag_fpenv_enter()
    try:
        return run_in_mode(operator, values, out, backend, num_threads)
    finally:
        ag_fpenv_leave(mode)


def prepared(Operator operator not None, list values not None, out, backend, num_threads):
    """Return the validated call, the requested number of threads (0: the default), and how `run` would compute it."""
    cdef tuple request = requested(backend, operator)
    cdef int threads = thread_count(num_threads, operator)
    cdef Call call = validate(operator, values, out)
    cdef list reasons = []
    cdef str name = select(call, request, reasons)
    variant, plan, count, estimate = _cpu_backend.description(call, threads) if name == "cpu" else (None,) * 4
    cdef Device device
    details = transferred = None
    for device in _devices:
        if "state" in device.found:  # a device that was not asked for is not looked for
            details = device.status()[2] or details
        if device.name == name and call.device_id < 0:
            transferred = device.backend.transferred_bytes(call)
    return call, threads, Explanation(name, reasons[0], variant, plan, count, estimate, details, transferred)
