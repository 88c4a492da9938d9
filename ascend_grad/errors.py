"""Exceptions of the library: one per family of device status codes."""

from __future__ import annotations

#: Names of the status codes, as the device library's headers spell them.
STATUS_NAMES = {
    161001: "ACLNN_ERR_PARAM_NULLPTR",
    161002: "ACLNN_ERR_PARAM_INVALID",
    361001: "ACLNN_ERR_RUNTIME_ERROR",
}


class AscendGradError(Exception):
    """Base of every exception that a call of this library raises on purpose.

    Attributes
    ----------
    code : int or None
        Status code of the Ascend operator library for this failure, None where it has none.
    operator : str or None
        Public name of the operator that was called.
    """

    code: int | None = None

    def __init__(self, message: str, *, operator: str | None = None, code: int | None = None):
        if code is not None:
            self.code = code
        self.operator = operator
        self._message = message
        super().__init__(message)

    def __str__(self) -> str:
        text = f"{self.operator}: {self._message}" if self.operator else self._message
        if self.code is None:
            return text
        return f"{text} [{self.code} {STATUS_NAMES.get(self.code, 'device status')}]"

    def __reduce__(self):
        return _rebuild, (type(self), self._message, self.operator, self.code)


def _rebuild(cls, message, operator, code):
    return cls(message, operator=operator, code=code)


class ParamNullptrError(AscendGradError, ValueError):
    """A required argument is None (161001)."""

    code = 161001


class ParamInvalidError(AscendGradError, ValueError):
    """An argument has a value, shape or dimension that the operator does not take (161002)."""

    code = 161002


class ParamTypeError(ParamInvalidError, TypeError):
    """An argument is of a dtype or kind that the operator does not take (161002)."""


class UnsupportedDeviceError(AscendGradError, RuntimeError):
    """The operator does not exist on this device (361001)."""

    code = 361001


class BackendUnavailableError(AscendGradError, RuntimeError):
    """The backend that was asked for cannot be used on this machine."""
