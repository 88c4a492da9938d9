"""Arrays and settings of Ascend NPUs.

Calls on arrays of the host use the device by themselves where there is one. A chain of calls is cheaper on arrays that
live on the device: `asarray` copies one there, calls on such arrays return such arrays and copy nothing through the
host, and ``numpy()`` brings a result back. Within `stream` such calls are not waited for.

What needs a device raises `BackendUnavailableError` where there is no usable one; `ascend_grad.backends` tells why.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
from numpy.typing import ArrayLike

from . import _aclnn, arrays
from ._array_types import array_type
from .arguments import MAX_RANK, converted_by_numpy, integer, shown, truth_value
from .backends.ascend import determinism, quirks, runtime, session, threads, torch_npu
from .backends.ascend.array import DeviceArray
from .dispatch import ContextChoice
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

#: Bytes up to which the values of a one-dimensional array are kept on the host, too (targets, masks, row gradients).
_REMEMBERED_BYTES = 16 << 20


def _usable_state() -> runtime.State:
    state = runtime.state()
    if not state.usable:
        raise BackendUnavailableError(f"there is no usable device: {state.reason}")
    return state


def asarray(x: ArrayLike | DeviceArray) -> DeviceArray:
    """Copy an array to this thread's device.

    Parameters
    ----------
    x : array_like or DeviceArray
        float32, float16, bfloat16, int32, int64, uint8 or bool, in any layout, rank 0 to 8. An array on a device is
        returned as it is. Of a tensor of torch_npu nothing is copied: the array shares its memory, on its device.

    Returns
    -------
    DeviceArray
        With ``shape, dtype, ndim, size, nbytes, device`` and ``numpy()``. It cannot be changed.

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
    Sharing with torch_npu is proven on a test double; it has not run on hardware yet. What torch writes into the tensor
    is in the array, too: a call on it waits for torch's current stream.
    """
    if isinstance(x, DeviceArray):
        return x
    kind = array_type(x, "x", None)
    array = None if kind is None else kind.view_anywhere(x, "x", None)
    if array is None:
        array = converted_by_numpy(x, "x")
    dtype = arrays.native(array.dtype)
    if dtype.name not in _aclnn.DTYPES:
        raise ParamTypeError(f"x: expected one of the device's dtypes {', '.join(_aclnn.DTYPES)}, got {array.dtype}")
    if array.ndim > MAX_RANK:
        raise ParamInvalidError(f"x: expected rank 0 to {MAX_RANK}, got rank {array.ndim}")
    if isinstance(array, torch_npu.TensorArray):
        return torch_npu.shared_array(array)
    _usable_state()
    with session.session_on(threads.chosen_device()).call() as here:
        result = here.put(array, dtype)
        packed = quirks.packed_copy(here, array)
        here.keep(result, packed)
    result.known.packed = packed
    if array.ndim == 1 and array.nbytes <= _REMEMBERED_BYTES:
        result.known.remember(np.array(array, dtype))
    return result


def device_count() -> int:
    """The number of devices.

    Returns
    -------
    int
        0 where there is no usable device.

    Examples
    --------
    >>> import ascend_grad as ag
    >>> (ag.npu.device_count() > 0) == ag.backends()["npu"].usable
    True
    """
    return runtime.state().device_count


def set_device(device: int) -> None:
    """Choose the device of this thread's calls; other threads keep theirs.

    Parameters
    ----------
    device : int
        From 0 on. Without a choice it is ``ASCEND_GRAD_DEVICE``, else the device that another library has bound the
        thread to, else 0.

    Raises
    ------
    ParamInvalidError
        161002, if there is no such device.
    BackendUnavailableError
        There is no usable device.
    """
    index = integer(device, "device")
    count = _usable_state().device_count
    if not 0 <= index < count:
        raise ParamInvalidError(f"device: expected an int in [0, {count - 1}], got {shown(index)}")
    threads.choose_device(index)


def get_device() -> int:
    """The device of this thread's calls.

    Returns
    -------
    int
        Its number, which `set_device` takes.
    """
    return threads.chosen_device()


@contextmanager
def stream(handle: int) -> Iterator[None]:
    """Put this thread's calls on device arrays on a stream of the caller's, without waiting for their work.

    Parameters
    ----------
    handle : int
        The address of the stream (``aclrtStream``) on this thread's device, as ``torch.npu.Stream.npu_stream`` is one.
        It has to exist until `synchronize` has waited for it.

    Raises
    ------
    ParamInvalidError
        161002: the handle is not positive, or (its subclass `ParamTypeError`) no int.
    BackendUnavailableError
        There is no usable device.

    Notes
    -----
    The block concerns calls on device arrays alone, on the device that is this thread's when the block begins. Calls on
    host arrays, `asarray` and ``numpy()`` are done when they return, as everywhere. Calls on tensors of torch_npu are
    in the order of torch's current stream.

    Whatever else uses an array that the stream may still work on waits for the stream first. This holds for calls
    outside of the block, for other threads, for ``numpy()`` and for an exchange by DLPack. Work that the caller has put
    on other streams is not waited for.

    A call waits for its stream in three cases: it looks at values that are not known on the host (the page on Ascend
    NPUs lists them), some rows have no gradient, or an array shares its memory with torch. Errors of the device appear
    where something waits.

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
    address = integer(handle, "handle")
    if address <= 0:
        raise ParamInvalidError(f"handle: expected the address of a stream, a positive int, got {shown(address)}")
    _usable_state()
    with session.on_stream(address):
        yield


def synchronize() -> None:
    """Wait for the work that calls of this thread have put on streams of the caller's.

    Memory that such calls have released can be used by all calls of the thread from then on.

    Raises
    ------
    AclError
        Some of the work failed.

    Examples
    --------
    Without a block of `stream` before, there is nothing to wait for:

    >>> import ascend_grad as ag
    >>> ag.npu.synchronize()
    """
    session.finish_streams()


class use_deterministic(ContextChoice):
    """Make the device's operators deterministic in the calls that follow, in this context (thread or task), or not.

    As a function it acts at once and lasts; as a context manager it is undone at the end of the block.

    Parameters
    ----------
    mode : bool, default True
        Whether equal calls give equal bits. With False the device's default holds, which is deterministic for all
        operators but `scaled_masked_softmax_backward`, says the vendor.

    Raises
    ------
    ParamTypeError
        161002, if it is no bool.
    RuntimeError
        On leaving a block that was not entered in this context.

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

    _variable = determinism.chosen

    def __init__(self, mode: bool = True):
        super().__init__(truth_value(mode, "mode"))


def release() -> None:
    """Give memory and streams back to the device: what this thread holds, and what all threads keep for later calls.

    Arrays on the device stay. A thread that ends does this for itself.
    """
    session.release()
