"""Arrays and settings of Ascend NPUs.

Calls on arrays of the host use a device if there is one. A chain of calls is cheaper on arrays that are on the device:
`asarray` copies an array to the device, calls on such arrays return such arrays and copy nothing through the host, and
``numpy()`` copies a result to the host. Within `stream` calls on such arrays do not wait for the device.

Functions that need a device raise `BackendUnavailableError` if none is usable; `ascend_grad.backends` returns the
reason.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Literal

import numpy as np
from numpy.typing import ArrayLike

from . import _aclnn, arrays
from ._array_types import array_type
from .arguments import MAX_RANK, converted_by_numpy, integer, shown, truth_value
from .backends.ascend import determinism, runtime, session, threads, torch_npu
from .backends.ascend.array import DeviceArray
from .context_choice import ContextChoice
from .errors import BackendUnavailableError, ParamInvalidError, ParamTypeError

__all__ = [
    "DeviceArray",
    "asarray",
    "device_count",
    "get_device",
    "release",
    "set_device",
    "stream",
    "synchronize",
    "use_deterministic",
]

#: Maximum bytes of a one-dimensional array (targets, masks, row gradients) whose values are also cached on the host.
_REMEMBERED_BYTES = 16 << 20


def _usable_state() -> runtime.State:
    state = runtime.state()
    if not state.usable:
        raise BackendUnavailableError(f"there is no usable device: {state.reason}")
    return state


def asarray(x: ArrayLike | DeviceArray) -> DeviceArray:
    """Copy an array to this thread's device, as in ``array = ag.npu.asarray(x)``.

    Parameters
    ----------
    x : array_like or DeviceArray
        The array, of rank 0 to 8 and any layout; float32, float16, bfloat16, int32, int64, uint8 or bool. An array on a
        device is returned unchanged. A tensor of torch_npu is not copied: the result shares its memory, on its device.

    Returns
    -------
    DeviceArray
        An immutable array with ``shape, dtype, ndim, size, nbytes, device`` and ``numpy()``.

    Raises
    ------
    ParamInvalidError
        161002: a rank above 8, or (its subclass `ParamTypeError`) a dtype that the device does not take.
    BackendUnavailableError
        There is no usable device.
    AclError
        The copy failed.

    Notes
    -----
    Sharing with torch_npu is proven on a test double; it has not run on hardware yet. The array shows what torch writes
    into the tensor, as calls on the array wait for torch's current stream.
    """
    if isinstance(x, DeviceArray):
        return x
    operator = "npu.asarray"
    kind = array_type(x, "x", operator)
    array = None if kind is None else kind.view_anywhere(x, "x", operator)
    if array is None:
        array = converted_by_numpy(x, "x", operator)
    dtype = arrays.native(array.dtype)
    if dtype.name not in _aclnn.DTYPES:
        message = f"x: expected one of the device's dtypes {', '.join(_aclnn.DTYPES)}, got {array.dtype}"
        raise ParamTypeError(message, operator=operator)
    if array.ndim > MAX_RANK:
        raise ParamInvalidError(f"x: expected rank 0 to {MAX_RANK}, got rank {array.ndim}", operator=operator)
    if isinstance(array, torch_npu.TensorArray):
        return torch_npu.shared_array(array)
    _usable_state()
    with session.session_on(threads.chosen_device()).call() as here:
        result = here.put(array, dtype)
        packed = here.packed_copy(array)
        here.keep(result, packed)
    result.cache.packed = packed
    if array.ndim == 1 and array.nbytes <= _REMEMBERED_BYTES:
        result.remember(np.array(array, dtype))
    return result


def device_count() -> int:
    """Return the number of devices.

    Returns
    -------
    int
        The number, 0 if there is no usable device.

    Examples
    --------
    >>> import ascend_grad as ag
    >>> (ag.npu.device_count() > 0) == ag.backends()["npu"].usable
    True
    """
    return runtime.state().device_count


def set_device(device: int) -> None:
    """Choose the device of this thread's calls, as in ``ag.npu.set_device(1)``; other threads keep theirs.

    Parameters
    ----------
    device : int
        The number of the device, counted from 0. The default is ``ASCEND_GRAD_DEVICE``, otherwise the device that
        another library has bound the thread to, otherwise 0.

    Raises
    ------
    ParamInvalidError
        161002, if there is no such device.
    BackendUnavailableError
        There is no usable device.
    """
    index = integer(device, "device", "npu.set_device")
    count = _usable_state().device_count
    if not 0 <= index < count:
        message = f"device: expected an int in [0, {count - 1}], got {shown(index)}"
        raise ParamInvalidError(message, operator="npu.set_device")
    threads.choose_device(index)


def get_device() -> int:
    """Return the device of this thread's calls, as in ``device = ag.npu.get_device()``.

    Returns
    -------
    int
        The device's number, as `set_device` takes it.
    """
    return threads.chosen_device()


@contextmanager
def stream(handle: int) -> Iterator[None]:
    """Submit calls on device arrays in ``with ag.npu.stream(handle):`` to that stream, without waiting for their work.

    Parameters
    ----------
    handle : int
        The address of the stream (``aclrtStream``) on this thread's device, such as ``torch.npu.Stream.npu_stream``.
        It has to exist until `synchronize` has waited for it.

    Raises
    ------
    ParamInvalidError
        161002: the handle is not positive, or (its subclass `ParamTypeError`) not an int.
    BackendUnavailableError
        There is no usable device.

    Notes
    -----
    The block affects only calls on device arrays, on this thread's device at the beginning of the block. Calls on host
    arrays, `asarray` and ``numpy()`` are complete when they return, as without the block. Calls on tensors of torch_npu
    are in the order of torch's current stream.

    Any other use of an array that the stream may still work on waits for the stream first. This holds for calls outside
    of the block, for other threads, for ``numpy()`` and for an exchange by DLPack. Work that the caller has submitted
    to other streams is not waited for.

    A call waits for its stream in three cases: it reads values that are not known on the host (the page on Ascend NPUs
    lists them), some rows have no gradient, or an array shares its memory with torch. Errors of the device are raised
    by the call that waits.

    Examples
    --------
    >>> import ascend_grad as ag
    >>> def softmax_twice(array, handle):
    ...     with ag.npu.stream(handle):
    ...         return ag.softmax(ag.softmax(array))
    >>> def three_times(array, handle):
    ...     twice = softmax_twice(array, handle)  # may still be under way
    ...     ag.npu.synchronize()
    ...     return ag.softmax(twice).numpy()
    """
    address = integer(handle, "handle", "npu.stream")
    if address <= 0:
        message = f"handle: expected the address of a stream, a positive int, got {shown(address)}"
        raise ParamInvalidError(message, operator="npu.stream")
    _usable_state()
    with session.on_stream(address):
        yield


def synchronize() -> None:
    """Wait for the work that calls of this thread have submitted to streams of the caller.

    All calls of the thread can then reuse memory that such calls have released.

    Raises
    ------
    AclError
        Some of the work failed.

    Examples
    --------
    There is nothing to wait for if no block of `stream` came before:

    >>> import ascend_grad as ag
    >>> ag.npu.synchronize()
    """
    session.finish_streams()


class use_deterministic(ContextChoice):
    """Choose whether the device's operators are deterministic in the following calls of this context (thread or task).

    ``ag.npu.use_deterministic()`` takes effect immediately and lasts; at the end of a ``with`` block it is undone.

    Parameters
    ----------
    mode : bool or "batch", default True
        Whether equal calls give equal bits. False selects the device's default. According to the vendor, the default is
        deterministic for all operators except `scaled_masked_softmax_backward`. With ``"batch"`` equal rows give equal
        bits, too, whatever other rows the call has. `softmax` and `log_softmax` have that on Ascend 950. The automatic
        choice computes other calls on the CPU, where it always holds.

    Raises
    ------
    ParamInvalidError
        161002, if it is another text; its subclass `ParamTypeError`, if it is neither a bool nor a text.
    RuntimeError
        A block ends that was not entered in this context.

    Notes
    -----
    The option of the device's context is set while an operator is submitted, and then restored. Either of two switches
    makes calls on tensors of torch_npu deterministic: this one, or ``torch.use_deterministic_algorithms(True)``. With
    False torch's switch stays in force. It holds for arrays over tensors, too, and not for other arrays. Where the
    runtime library lacks the option, the automatic choice computes on the CPU, and forced calls raise
    `BackendUnavailableError`.

    Examples
    --------
    >>> import ascend_grad as ag
    >>> with ag.npu.use_deterministic():
    ...     y = ag.softmax([[1.0, 2.0]])
    """

    _variable = determinism.requested

    def __init__(self, mode: bool | Literal["batch"] = True):
        operator, expected = "npu.use_deterministic", "True, False or 'batch'"
        if isinstance(mode, str):
            if mode != "batch":
                raise ParamInvalidError(f"mode: expected {expected}, got {shown(mode)}", operator=operator)
            super().__init__("batch")
        else:
            super().__init__(truth_value(mode, "mode", operator, expected))


def release() -> None:
    """Free this thread's memory and streams on the device, and the memory that all threads cache for later calls.

    Arrays on the device stay. A thread that ends frees its own memory and streams without ``ag.npu.release()``.
    """
    session.release()
