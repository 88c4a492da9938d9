"""Exceptions of the library: one per family of device status codes."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial

#: Names of the status codes, as the device library's headers spell them.
STATUS_NAMES = {
    # Status codes of the operator library (aclnnStatus).
    161001: "ACLNN_ERR_PARAM_NULLPTR",
    161002: "ACLNN_ERR_PARAM_INVALID",
    361001: "ACLNN_ERR_RUNTIME_ERROR",
    561000: "ACLNN_ERR_INNER",
    561001: "ACLNN_ERR_INNER_INFERSHAPE_ERROR",
    561002: "ACLNN_ERR_INNER_TILING_ERROR",
    561003: "ACLNN_ERR_INNER_FIND_KERNEL_ERROR",
    561101: "ACLNN_ERR_INNER_CREATE_EXECUTOR",
    561103: "ACLNN_ERR_INNER_NULLPTR",
    561107: "ACLNN_ERR_INNER_OPP_PATH_NOT_FOUND",
    561112: "ACLNN_ERR_INNER_OPP_KERNEL_PKG_NOT_FOUND",
    # Status codes of the runtime (aclError).
    100000: "ACL_ERROR_INVALID_PARAM",
    100001: "ACL_ERROR_UNINITIALIZE",
    100002: "ACL_ERROR_REPEAT_INITIALIZE",
    100037: "ACL_ERROR_REPEAT_FINALIZE",
    100039: "ACL_ERROR_COMPILING_STUB_MODE",
    107000: "ACL_ERROR_RT_PARAM_INVALID",
    107001: "ACL_ERROR_RT_INVALID_DEVICEID",
    107002: "ACL_ERROR_RT_CONTEXT_NULL",
    107003: "ACL_ERROR_RT_STREAM_CONTEXT",
    107017: "ACL_ERROR_RT_INVALID_HANDLE",
    107019: "ACL_ERROR_RT_WAIT_TIMEOUT",
    107021: "ACL_ERROR_RT_SYSPARAMOPT_NOT_SET",
    200000: "ACL_ERROR_BAD_ALLOC",
    207001: "ACL_ERROR_RT_MEMORY_ALLOCATION",
    207004: "ACL_ERROR_RT_NO_DEVICE",
    207018: "ACL_ERROR_RT_DEVICE_OOM",
    500000: "ACL_ERROR_INTERNAL_ERROR",
    507008: "ACL_ERROR_RT_SOC_VERSION",
    507014: "ACL_ERROR_RT_AICORE_TIMEOUT",
    507015: "ACL_ERROR_RT_AICORE_EXCEPTION",
    507033: "ACL_ERROR_RT_DEV_SETUP_ERROR",
    507034: "ACL_ERROR_RT_VECTOR_CORE_TIMEOUT",
    507035: "ACL_ERROR_RT_VECTOR_CORE_EXCEPTION",
    507046: "ACL_ERROR_RT_STREAM_SYNC_TIMEOUT",
    507053: "ACL_ERROR_RT_DEVICE_MEM_ERROR",
    507899: "ACL_ERROR_RT_DRV_INTERNAL_ERROR",
}

#: Status codes by name.
STATUS_CODES = {name: code for code, name in STATUS_NAMES.items()}


class AscendGradError(Exception):
    """Base of every exception that a call of this library raises on purpose.

    Attributes
    ----------
    code : int or None
        Status code of the Ascend operator library for this failure, or None. Messages have it if a device failed.
    code_name : str
        Name of this code in the headers of the device's libraries, "" if it has none.
    operator : str or None
        Name of the public function that was called, mostly an operator.
    call : str
        The function of the device's libraries that failed, "" if no such function failed.
    runtime_message : str
        The message of the device's runtime, "" if there is none.
    """

    code: int | None = None
    #: Whether messages name the code: it is the device's answer, and not that of the library's own checks.
    _is_of_device = False

    def __init__(
        self,
        message: str,
        *,
        operator: str | None = None,
        code: int | None = None,
        call: str = "",
        runtime_message: str = "",
    ):
        if code is not None:
            self.code = code
        self.operator = operator
        self.call = call
        self.runtime_message = runtime_message
        self._message = message
        super().__init__(message)

    @property
    def code_name(self) -> str:
        """Name of the code in the device library's headers, "" if it has none."""
        return STATUS_NAMES.get(self.code, "") if self.code is not None else ""

    def __str__(self) -> str:
        text = f"{self.operator}: {self._message}" if self.operator else self._message
        if self.code is None or not (self._is_of_device or self.call):
            return text
        return f"{text} [{self.code} {self.code_name or 'device status'}]"

    def __reduce__(self):
        return _rebuild, (type(self), self._message, self.operator, self.code, self.call, self.runtime_message)


def rename(error: AscendGradError, operator: str, arguments: Mapping[str, str]) -> None:
    """Replace the operator of an error, and rename the argument that the message begins with by `arguments`."""
    error.operator = operator
    argument, separator, rest = error._message.partition(": ")
    error._message = arguments.get(argument, argument) + separator + rest


def _rebuild(cls, message, operator, code, call, runtime_message):
    return cls(message, operator=operator, code=code, call=call, runtime_message=runtime_message)


class ParamNullptrError(AscendGradError, ValueError):
    """A required argument is None (161001)."""

    code = STATUS_CODES["ACLNN_ERR_PARAM_NULLPTR"]


class ParamInvalidError(AscendGradError, ValueError):
    """An argument has a value, shape or dimension that the operator does not take (161002)."""

    code = STATUS_CODES["ACLNN_ERR_PARAM_INVALID"]


class ParamTypeError(ParamInvalidError, TypeError):
    """An argument is of a dtype or kind that the operator does not take (161002)."""


class UnsupportedDeviceError(AscendGradError, RuntimeError):
    """The operator does not exist on this device (361001)."""

    code = STATUS_CODES["ACLNN_ERR_RUNTIME_ERROR"]
    _is_of_device = True


class BackendUnavailableError(AscendGradError, RuntimeError):
    """The requested backend cannot be used on this machine."""


class ProcessEndingError(BackendUnavailableError):
    """The process has begun to end, and the device takes no further calls. Nothing was computed."""


class RankError(AscendGradError, RuntimeError):
    """Another rank of a parallel call failed; `rank` is its number. That rank raises its own exception."""

    def __init__(self, message: str, *, rank: int, operator: str | None = None):
        super().__init__(message, operator=operator)
        self.rank = rank

    def __reduce__(self):
        return partial(RankError, rank=self.rank, operator=self.operator), (self._message,)


class AclError(AscendGradError, RuntimeError):
    """The device's runtime or operator library failed with a code that has no separate class.

    `call` names the function; `code` is None if that function returns none.
    """

    _is_of_device = True


class MissingKernelError(AclError):
    """The first stage of an operator reported that the toolkit has no usable kernel for it. Nothing was computed."""


NO_KERNEL = (
    STATUS_CODES["ACLNN_ERR_INNER_FIND_KERNEL_ERROR"],
    STATUS_CODES["ACLNN_ERR_INNER_OPP_PATH_NOT_FOUND"],
    STATUS_CODES["ACLNN_ERR_INNER_OPP_KERNEL_PKG_NOT_FOUND"],
)


def device_error(code: int | None, call: str, runtime_message: str = "") -> AscendGradError:
    """Return the exception for a status code that a function of the device returned."""
    kinds = (ParamNullptrError, ParamInvalidError, UnsupportedDeviceError)
    kind = next((kind for kind in kinds if kind.code == code), AclError)
    if code in NO_KERNEL and call.endswith("GetWorkspaceSize"):
        kind = MissingKernelError
    message = f"{call} failed: {runtime_message}" if runtime_message else f"{call} failed"
    return kind(message, code=code, call=call, runtime_message=runtime_message)
