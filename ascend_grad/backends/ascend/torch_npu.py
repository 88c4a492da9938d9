"""Tensors of torch_npu: arrays over their memory, and calls in the order of torch's current stream.

Nothing is imported here: a caller with such a tensor has imported torch and torch_npu. Of torch_npu only the storage of
a tensor, its format, torch's current device and its current stream are used.

There are two kinds of arrays over tensors:

- `TensorArray`: an argument of a call, or its result. The call is put on torch's current stream (`tensor_queue`), as
  torch's own operators are, and does not wait. All memory that it needs is torch's.
- `DeviceArray` over `TensorMemory`: the result of `ascend_grad.npu.asarray`. Calls on it are done when they return.
  They run on a stream of the library. Torch's memory may be in use on torch's stream for longer than tensors live. So
  such calls wait for that stream first.

At the end of its operators torch_npu binds the thread to torch's current device, whatever it was bound to before. So
the thread's context is restored after them, and within a call on tensors torch's current device is theirs.
"""

from __future__ import annotations

import sys
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ... import _acl
from ..._dtypes import BFLOAT16
from ...errors import BackendUnavailableError, ParamInvalidError, ParamTypeError
from . import runtime
from .array import DeviceArray, Layout
from .session import to_host

#: Formats whose elements lie in memory as the strides say: NCHW, NHWC, ND, NCDHW. Other formats are torch_npu's own.
STRIDED_FORMATS = (0, 1, 2, 30)
ND = 2

#: The number of bytes that the device reads at a time.
ALIGNMENT = 32


class TensorMemory:
    """The memory of a tensor, which this object keeps alive. torch may write into it between two calls."""

    kept = True  # a session never releases the memory: torch gets it back with the last reference to the tensor
    is_shared = was_shared = is_of_torch = True

    def __init__(self, tensor: Any, dtype: np.dtype):
        storage = tensor.untyped_storage()
        self.tensor = tensor
        self._dtype = dtype
        self.range = _acl.borrowed(storage.data_ptr(), storage.nbytes(), tensor.device.index)

    def memory(self) -> _acl.DeviceRange:
        """Return the storage of the tensor, when the work on torch's current stream is done."""
        runtime.wait_for_torch(self.range.device)
        return self.range

    def share(self, array: DeviceArray) -> DeviceArray:
        """Return what another library keeps alive while it uses the memory of this array."""
        return array

    def contiguous(self) -> DeviceArray:
        """Return a copy that torch makes on the device, whose elements lie next to one another."""
        with _acl.ContextGuard():
            return _array(DeviceArray, self.tensor.contiguous(), self._dtype)


class TensorArray(DeviceArray):
    """A tensor as a call takes it: the work is in the order of torch's current stream, and is not waited for.

    Attributes
    ----------
    tensor : torch.Tensor
    """

    __slots__ = ("tensor",)

    KIND = "a tensor"
    TO_DEVICE, TO_HOST = "Tensor.npu()", "Tensor.cpu()"
    IS_READ = False
    CAN_BE_OUT = True

    tensor: Any

    def in_library(self) -> object:
        return self.tensor

    def unreadable_array(self) -> NDArray:
        strides = tuple(step * self.dtype.itemsize for step in self.tensor.stride())
        return np.asarray(_Unreadable(self.tensor.data_ptr(), self.shape, strides, self.dtype)).view(self.dtype)


class _Unreadable:
    """The description of memory for NumPy, which cannot read it."""

    def __init__(self, address: int, shape: tuple[int, ...], strides: tuple[int, ...], dtype: np.dtype):
        typestr = f"|V{dtype.itemsize}"
        self.__array_interface__ = {
            "version": 3, "shape": shape, "strides": strides, "typestr": typestr, "data": (address, False)
        }  # fmt: skip


def tensor_array(tensor: Any, name: str, operator: str | None) -> TensorArray:
    """Return the array over a tensor that is an argument of a call."""
    array = _array(TensorArray, tensor, _checked_dtype(tensor, name, operator))
    assert isinstance(array, TensorArray)
    return array


def shared_array(argument: TensorArray) -> DeviceArray:
    """Return an array over the memory of a tensor that others go on using, in the tensor's layout."""
    return _array(DeviceArray, argument.tensor, argument.dtype)


def _checked_dtype(tensor: Any, name: str, operator: str | None) -> np.dtype:
    """Return the dtype of a dense tensor that the device can read in place, or raise if it cannot."""
    if str(tensor.layout) != "torch.strided" or tensor.is_nested or tensor.is_quantized:
        message = f"{name}: expected a dense tensor, got layout {tensor.layout}, dtype {tensor.dtype}"
        raise ParamTypeError(message, operator=operator)
    _check_device(tensor.device.index, operator)
    with _acl.ContextGuard():
        tensor_format = int(sys.modules["torch_npu"].get_npu_format(tensor))
    if tensor_format not in STRIDED_FORMATS:
        got = f"format {tensor_format}; pass torch_npu.npu_format_cast({name}, {ND})"
        raise ParamTypeError(f"{name}: expected a tensor of format ND ({ND}), got {got}", operator=operator)
    remainder = tensor.untyped_storage().data_ptr() % ALIGNMENT
    if remainder:
        got = f"an address {remainder} bytes beyond such a multiple; pass {name}.clone()"
        message = f"{name}: expected memory at a multiple of {ALIGNMENT} bytes, got {got}"
        raise ParamInvalidError(message, operator=operator)
    return _numpy_dtype(tensor.dtype, name, operator)


def _array(kind: type[DeviceArray], tensor: Any, dtype: np.dtype) -> DeviceArray:
    array = kind(tuple(tensor.shape), dtype, tensor.device.index, to_host)
    if isinstance(array, TensorArray):
        array.tensor = tensor
    if array.size:
        storage_size = tensor.untyped_storage().nbytes() // tensor.element_size()
        # A stride of an axis of length 1 leads to no element. It may be so large that its bytes exceed an int64.
        strides = tuple(step if length > 1 else 1 for length, step in zip(tensor.shape, tensor.stride()))
        array.storage.layout = Layout(strides, tensor.storage_offset(), storage_size, tensor.is_contiguous())
        array.storage.allocation = TensorMemory(tensor, dtype)
    return array


def _check_device(index: int, operator: str | None) -> None:
    state = runtime.state()
    if "torch_npu" not in sys.modules:
        raise BackendUnavailableError("the device cannot be used: torch_npu is not imported", operator=operator)
    if not state.usable or index >= state.device_count:
        raise BackendUnavailableError(f"device {index} cannot be used: {state.reason}", operator=operator)


def torch_dtype(dtype: np.dtype) -> Any:
    """Return torch's dtype of the same name."""
    return getattr(sys.modules["torch"], dtype.name)


def _numpy_dtype(dtype: Any, name: str, operator: str | None) -> np.dtype:
    text = str(dtype).removeprefix("torch.")
    try:
        return BFLOAT16 if text == "bfloat16" else np.dtype(text)
    except TypeError:
        raise ParamTypeError(f"{name}: expected a dtype that NumPy has, got {dtype}", operator=operator) from None


def tensor_of(array: DeviceArray) -> Any:
    """Return a tensor over the memory of an array."""
    torch: Any = sys.modules["torch"]
    return array.tensor if isinstance(array, TensorArray) else torch.from_dlpack(array)


def array_of(tensor: Any) -> TensorArray:
    """Return the array over a tensor that torch has computed."""
    array = _array(TensorArray, tensor, _numpy_dtype(tensor.dtype, "tensor", None))
    assert isinstance(array, TensorArray)
    return array


def array_like(tensor: Any, like: DeviceArray) -> DeviceArray:
    """Return an array over the memory of a tensor, of the kind of another array."""
    return _array(type(like), tensor, _numpy_dtype(tensor.dtype, "tensor", None))
