"""The Ascend runtime: its libraries opened at run time, one table of symbols, and classes that own its handles.

Every owner frees its handle when it is closed or garbage-collected, on any thread, and on every error path. In a forked
child the parent's handles are invalid. There, and once the process ends, no function of the runtime is called.
"""

import logging
import os
import threading

from cpython.buffer cimport PyBuffer_FillInfo
from libc.stdint cimport int64_t, uint64_t, uintptr_t
from libc.string cimport memset

from .errors import STATUS_CODES, BackendUnavailableError, device_error

logger = logging.getLogger("ascend_grad")

cdef extern from "ascend_grad/glibc.h" nogil:
    void *dlopen(const char *path, int mode)
    void *dlsym(void *library, const char *name)
    int dlinfo(void *library, int request, void *answer)
    char *dlerror()
    enum:
        RTLD_LAZY
        RTLD_LOCAL
        RTLD_NOLOAD
        RTLD_DI_LINKMAP
    struct link_map:
        char *l_name

cdef ag_acl_functions table
memset(&table, 0, sizeof(table))

cdef bint _detached = False

# Contexts that aclrtSetDevice makes current, by device. A thread with the device's context needs no further call.
MAX_DEVICES = 64
cdef ag_acl_context[64] _contexts
memset(_contexts, 0, sizeof(_contexts))


# The context that `DeviceGuard` left bound in a thread that had none, which is not the caller's choice of a device.
_left = threading.local()


# ---- libraries and symbols; opened libraries are never closed --------------------------------------------------------


def open_library(path):
    """Open a shared library and return its handle. Raise OSError with the loader's message on failure."""
    cdef bytes name = os.fsencode(path)
    cdef const char *text = name
    cdef void *library
    cdef char *error
    with nogil:
        # Symbols are bound lazily, as the toolkit's libraries may lack some that are never called.
        library = dlopen(text, RTLD_LAZY | RTLD_LOCAL)
    if library == NULL:
        error = dlerror()
        raise OSError(error.decode(errors="replace") if error != NULL else f"{path} cannot be opened")
    return <uintptr_t>library


def loaded_library(name):
    """Return the handle of a library that the process has loaded already, or 0 if it has not."""
    cdef bytes text = name.encode()
    return <uintptr_t>dlopen(text, RTLD_LAZY | RTLD_LOCAL | RTLD_NOLOAD)


def path_of(library):
    """Return the path of a library's file, or "" if the loader does not know it."""
    cdef link_map *entry = NULL
    if dlinfo(<void *><uintptr_t>library, RTLD_DI_LINKMAP, &entry) != 0 or entry == NULL:
        return ""
    return os.fsdecode(entry.l_name)


def find(libraries, name):
    """Return the address of a symbol in the first library that has it, or 0."""
    cdef bytes text = name.encode()
    cdef void *found
    for library in libraries:
        found = dlsym(<void *><uintptr_t>library, text)
        if found != NULL:
            return <uintptr_t>found
    return 0


def fill_table(libraries):
    """Look up every function of the table, and return the names of required functions that are missing."""
    cdef uintptr_t address
    missing = []
    for index in range(AG_ACL_SYMBOL_COUNT):
        name = ag_acl_symbols[index].name.decode()
        address = find(libraries, name)
        (<void **>(<char *>&table + ag_acl_symbols[index].offset))[0] = <void *>address
        if not address and ag_acl_symbols[index].required:
            missing.append(name)
    return missing


# ---- status codes ----------------------------------------------------------------------------------------------------


cdef str recent_message():
    """Return the runtime's message about the last failure on this thread, and clear it."""
    cdef const char *text = NULL
    if table.aclGetRecentErrMsg != NULL:
        text = table.aclGetRecentErrMsg()
    return "" if text == NULL else text.decode(errors="replace").strip()


cdef int check(ag_acl_error code, str call) except -1:
    if code != AG_ACL_SUCCESS:
        raise device_error(code, call, recent_message())
    return 0


cdef void destroy(destroyer function, void *handle, str call) noexcept:
    """Free or destroy a handle. A failure is logged, as destructors cannot raise and the handle's state is unknown."""
    cdef ag_acl_error code
    if handle == NULL or function == NULL or _detached:
        return
    with nogil:
        code = function(handle)
    if code != AG_ACL_SUCCESS:
        logger.warning("%s", device_error(code, call, recent_message()))


def detach():
    """Abandon all handles and call no function of the runtime from now on, as the process was forked or ends."""
    global _detached
    _detached = True


def is_detached():
    return _detached


# ---- process and threads ---------------------------------------------------------------------------------------------


def initialise():
    """Call aclInit, and return its status code and message."""
    cdef ag_acl_error code
    with nogil:
        code = table.aclInit(NULL)
    return code, recent_message() if code != AG_ACL_SUCCESS else ""


def finalise():
    """Undo one aclInit if the runtime counts its calls. Other code in this process may still use the runtime."""
    cdef uint64_t count = 0
    if table.aclFinalizeReference != NULL and not _detached:
        with nogil:
            table.aclFinalizeReference(&count)


def device_count():
    cdef uint32_t count = 0
    cdef ag_acl_error code
    with nogil:
        code = table.aclrtGetDeviceCount(&count)
    check(code, "aclrtGetDeviceCount")
    return count


def soc_name():
    """Return the name of the system on chip, or "" if the runtime does not tell it."""
    cdef const char *name = NULL
    if table.aclrtGetSocName != NULL:
        name = table.aclrtGetSocName()
    return "" if name == NULL else name.decode(errors="replace")


cdef ag_acl_context current_context() noexcept nogil:
    cdef ag_acl_context context = NULL
    if table.aclrtGetCurrentContext == NULL or table.aclrtGetCurrentContext(&context) != AG_ACL_SUCCESS:
        return NULL
    return context


cdef ag_acl_error _NO_CONTEXT = STATUS_CODES["ACL_ERROR_RT_CONTEXT_NULL"]


cdef int read_context(ag_acl_context *context) except -1:
    """Read the calling thread's context, NULL where it has none; raise where the runtime cannot tell."""
    cdef ag_acl_error code
    context[0] = NULL
    if table.aclrtGetCurrentContext == NULL:
        return 0
    with nogil:
        code = table.aclrtGetCurrentContext(context)
    if code == _NO_CONTEXT:
        recent_message()
        context[0] = NULL
        return 0
    return check(code, "aclrtGetCurrentContext")


def bound_device():
    """Return the device that other code has bound the calling thread to, or None."""
    cdef int32_t device = 0
    cdef ag_acl_context context = current_context()
    if context == NULL or getattr(_left, "context", None) == <uintptr_t>context or table.aclrtGetDevice == NULL:
        return None
    return device if table.aclrtGetDevice(&device) == AG_ACL_SUCCESS else None


cdef class ContextGuard:
    """A context manager that restores the calling thread's context."""

    cdef ag_acl_context outer

    def __enter__(self):
        self.outer = current_context()
        return self

    def __exit__(self, *exc_info):
        if self.outer != NULL and current_context() != self.outer:
            destroy(<destroyer>table.aclrtSetCurrentContext, self.outer, "aclrtSetCurrentContext")


cdef class DeviceGuard:
    """A context manager that binds the calling thread to a device, and then restores its context."""

    cdef int device
    cdef ag_acl_context outer

    def __cinit__(self, int device):
        self.device = device
        self.outer = NULL

    def __enter__(self):
        cdef ag_acl_error code
        cdef ag_acl_context before = NULL
        read_context(&before)  # or raise: a context that is not known could not be restored
        if before != NULL and before == _contexts[self.device]:
            return self
        with nogil:
            code = table.aclrtSetDevice(self.device)
        check(code, "aclrtSetDevice")
        _contexts[self.device] = current_context()
        if before == NULL:
            _left.context = <uintptr_t>_contexts[self.device]
        self.outer = before
        return self

    def __exit__(self, *exc_info):
        if self.outer != NULL:
            destroy(<destroyer>table.aclrtSetCurrentContext, self.outer, "aclrtSetCurrentContext")
            self.outer = NULL


cdef ag_acl_error _NOT_SET = STATUS_CODES["ACL_ERROR_RT_SYSPARAMOPT_NOT_SET"]


def lacks_determinism():
    """Return the reason why operators cannot be made deterministic, or "" if they can."""
    missing = []
    if table.aclrtCtxGetSysParamOpt == NULL:
        missing.append("aclrtCtxGetSysParamOpt")
    if table.aclrtCtxSetSysParamOpt == NULL:
        missing.append("aclrtCtxSetSysParamOpt")
    return f"the runtime library lacks {' and '.join(missing)}" if missing else ""


cdef class DeterministicGuard:
    """A context manager that sets the level of determinism of the thread's context, and then restores the option.

    A level that other code has set stays, if it is as strict or stricter.
    """

    cdef int64_t outer, level

    def __cinit__(self, int64_t level):
        self.level = level

    def __enter__(self):
        cdef int64_t value = 0
        cdef ag_acl_error code
        cdef str reason = lacks_determinism()
        if reason:
            raise BackendUnavailableError(f"deterministic results were requested, but {reason}")
        with nogil:
            code = table.aclrtCtxGetSysParamOpt(AG_ACL_DETERMINISTIC, &value)
        if code == _NOT_SET:  # the option has no default
            recent_message()
            value = 0
        else:
            check(code, "aclrtCtxGetSysParamOpt")
        self.outer = value
        if value < self.level:
            with nogil:
                code = table.aclrtCtxSetSysParamOpt(AG_ACL_DETERMINISTIC, self.level)
            check(code, "aclrtCtxSetSysParamOpt")
        return self

    def __exit__(self, *exc_info):
        cdef ag_acl_error code
        if self.outer < self.level and not _detached:
            with nogil:
                code = table.aclrtCtxSetSysParamOpt(AG_ACL_DETERMINISTIC, self.outer)
            if code != AG_ACL_SUCCESS:
                logger.warning("%s", device_error(code, "aclrtCtxSetSysParamOpt", recent_message()))


cdef void destroy_on(int device, destroyer function, void *handle, str call) noexcept:
    """Destroy a handle of a device, from a thread that may not be bound to the device."""
    if handle == NULL or _detached:
        return
    try:
        with DeviceGuard(device):
            destroy(function, handle, call)
    except Exception as error:
        logger.warning("%s", error)
        with nogil:  # to leave the thread on this device is better than to leave the handle behind
            table.aclrtSetDevice(device)
        destroy(function, handle, call)


# ---- owners ----------------------------------------------------------------------------------------------------------


cdef class DeviceRange:
    """Memory on a device. Instances of this class itself, made by `borrowed`, do not own the memory."""


def borrowed(uintptr_t address, size_t size, int device):
    """Return a range of memory that another library owns, and must keep while the range is used."""
    cdef DeviceRange result = DeviceRange.__new__(DeviceRange)
    result.address, result.size, result.device = <void *>address, size, device
    return result


def address_of(DeviceRange memory not None):
    return <uintptr_t>memory.address


cdef class DeviceMemory(DeviceRange):
    """Memory on a device that the object owns."""

    def __cinit__(self, size_t size, int device):
        cdef ag_acl_error code
        cdef void *address = NULL
        self.address = NULL
        with DeviceGuard(device):  # other code may have bound the thread to another device
            with nogil:
                code = table.aclrtMalloc(&address, size, AG_ACL_HUGE_FIRST)
            check(code, "aclrtMalloc")
        self.address = address
        self.size = size
        self.device = device

    def close(self):
        cdef void *address = self.address
        self.address = NULL
        destroy_on(self.device, <destroyer>table.aclrtFree, address, "aclrtFree")

    def __dealloc__(self):
        destroy_on(self.device, <destroyer>table.aclrtFree, self.address, "aclrtFree")


cdef class HostMemory:
    """Page-locked memory of the host, as a buffer of bytes."""

    def __cinit__(self, size_t size, int device):
        cdef ag_acl_error code
        cdef void *address = NULL
        self.address = NULL
        with DeviceGuard(device):
            with nogil:
                code = table.aclrtMallocHost(&address, size)
            check(code, "aclrtMallocHost")
        self.address = address
        self.size = size
        self.device = device

    def __getbuffer__(self, Py_buffer *buffer, int flags):
        PyBuffer_FillInfo(buffer, self, self.address, self.size, 0, flags)

    def __dealloc__(self):
        # There is no `close`, as arrays may share the memory. It is freed with the last of them.
        destroy_on(self.device, <destroyer>table.aclrtFreeHost, self.address, "aclrtFreeHost")


cdef class AnyStream:
    """A queue of work on a device. Instances of this class itself, made by `borrowed_stream`, do not own the stream."""

    def synchronize(self):
        """Wait until all work on the stream is done, and raise errors of that work.

        The caller has bound its thread to the device of the stream.
        """
        cdef ag_acl_stream handle = self.handle
        cdef ag_acl_error code
        with nogil:
            code = table.aclrtSynchronizeStream(handle)
        check(code, "aclrtSynchronizeStream")

    def close(self):
        """Forget the stream, which its owner destroys."""
        self.handle = NULL


def borrowed_stream(uintptr_t handle, int device):
    """Return a stream that another library owns, and must keep while the result is used."""
    cdef AnyStream result = AnyStream.__new__(AnyStream)
    result.handle, result.device = <ag_acl_stream>handle, device
    return result


cdef class Stream(AnyStream):
    """A stream on a device that the object owns."""

    def __cinit__(self, int device):
        cdef ag_acl_error code
        cdef ag_acl_stream handle = NULL
        self.handle = NULL
        with DeviceGuard(device):
            with nogil:
                code = table.aclrtCreateStream(&handle)
            check(code, "aclrtCreateStream")
        self.handle = handle
        self.device = device

    def close(self):
        cdef ag_acl_stream handle = self.handle
        self.handle = NULL
        destroy_on(self.device, <destroyer>table.aclrtDestroyStream, handle, "aclrtDestroyStream")

    def __dealloc__(self):
        destroy_on(self.device, <destroyer>table.aclrtDestroyStream, self.handle, "aclrtDestroyStream")


# ---- copies, put on a stream and complete when the stream is synchronised --------------------------------------------


cdef int copy(void *to, size_t capacity, const void *source, size_t size, int kind, AnyStream stream) except -1:
    cdef ag_acl_error code
    with nogil:
        code = table.aclrtMemcpyAsync(to, capacity, source, size, kind, stream.handle)
    return check(code, "aclrtMemcpyAsync")


def copy_in(DeviceRange to, size_t to_offset, HostMemory source, size_t offset, size_t size, AnyStream stream):
    copy(
        <char *>to.address + to_offset, to.size - to_offset, <char *>source.address + offset, size,
        AG_ACL_HOST_TO_DEVICE, stream,
    )


def copy_out(HostMemory to, size_t to_offset, DeviceRange source, size_t offset, size_t size, AnyStream stream):
    copy(
        <char *>to.address + to_offset, to.size - to_offset, <char *>source.address + offset, size,
        AG_ACL_DEVICE_TO_HOST, stream,
    )


def copy_within(DeviceRange to, size_t to_offset, DeviceRange source, size_t offset, size_t size, AnyStream stream):
    copy(
        <char *>to.address + to_offset, to.size - to_offset, <char *>source.address + offset, size,
        AG_ACL_DEVICE_TO_DEVICE, stream,
    )


def clear(DeviceRange memory, size_t size):
    """Fill the first `size` bytes with zeros, synchronously. No work on a stream may use the memory."""
    cdef ag_acl_error code
    with nogil:
        code = table.aclrtMemset(memory.address, memory.size, 0, size)
    check(code, "aclrtMemset")
