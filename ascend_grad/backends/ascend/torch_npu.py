"""Tensors of torch_npu: arrays over their memory, and memory that torch allocates for results.

Nothing is imported here: who has such a tensor has imported torch and torch_npu. Of torch_npu only a few things are
used: the storage of a tensor, its format, and torch's current stream.

torch works on streams of its own, and its memory may be in use there for longer than the tensors live that it belongs
to. So the current stream is waited for before such memory is used on ours; ours is idle when a call returns.

At the end of its operators torch_npu binds the thread to torch's current device, whatever it was bound to before. So
the thread's context is restored after each of them: the rest of a call runs where its tensors are.
"""

from __future__ import annotations

import sys
from typing import Any

import numpy as np

from ... import _acl
from ..._dtypes import BFLOAT16
from ...errors import BackendUnavailableError, ParamInvalidError, ParamTypeError
from . import runtime
from .array import DeviceArray, Layout, Lender
from .session import to_host

#: Formats whose elements lie in memory as the strides say: NCHW, NHWC, ND, NCDHW. All others are torch_npu's own.
STRIDED_FORMATS = (0, 1, 2, 30)
ND = 2

#: The device reads this many bytes at a time.
ALIGNMENT = 32


def is_tensor(value: object) -> bool:
    """Whether this is a tensor on an Ascend NPU."""
    kind = getattr(sys.modules.get("torch"), "Tensor", ())
    return isinstance(value, kind) and value.device.type == "npu"


class TensorMemory:
    """The memory of a tensor, which it keeps alive.

    Attributes
    ----------
    is_shared : bool
        Whether others have the tensor, too, and may write into it between two calls.
    """

    kept = True  # torch gets it back from whoever drops it, not from the session

    def __init__(self, tensor: Any, dtype: np.dtype, *, is_shared: bool):
        storage = tensor.untyped_storage()
        self.tensor = tensor
        self._dtype = dtype
        self.is_shared = is_shared
        self._is_ready = False
        self._range = _acl.borrowed(storage.data_ptr(), storage.nbytes(), tensor.device.index)

    def memory(self) -> _acl.DeviceRange:
        """The storage of the tensor, when torch is done with what it has put on its stream."""
        if self.is_shared or not self._is_ready:
            runtime.wait_for_torch(self._range.device)
            self._is_ready = True
        return self._range

    def share(self, array: DeviceArray) -> DeviceArray:
        """What another library keeps alive while it uses the memory of this array."""
        self.is_shared = True
        return array

    def contiguous(self) -> DeviceArray:
        """The elements of the tensor next to one another, in a copy that torch makes on the device."""
        with _acl.ContextGuard():
            return _array(self.tensor.contiguous(), self._dtype, is_shared=False)


def array_over(
    tensor: Any, name: str, operator: str | None = None, *, is_shared: bool = False, lender: Lender | None = None
) -> DeviceArray:
    """An array over the memory of a dense tensor on a device, in the tensor's layout.

    ``lender``: who allocates the results of calls on it, if not the session.
    """
    _check_device(tensor.device.index, operator)
    with _acl.ContextGuard():
        tensor_format = int(sys.modules["torch_npu"].get_npu_format(tensor))
    if tensor_format not in STRIDED_FORMATS:
        expected = f"a tensor of format ND ({ND}; torch_npu.npu_format_cast({name}, {ND}) makes one)"
        raise ParamTypeError(f"{name}: expected {expected}, got format {tensor_format}", operator=operator)
    remainder = tensor.untyped_storage().data_ptr() % ALIGNMENT
    if remainder:
        expected = f"memory that begins at a multiple of {ALIGNMENT} bytes ({name}.clone() has such)"
        raise ParamInvalidError(f"{name}: expected {expected}, got {remainder} bytes beyond one", operator=operator)
    array = _array(tensor, _numpy_dtype(tensor.dtype, name, operator), is_shared=is_shared)
    array._lender = lender
    return array


def shared_array(tensor: Any, name: str) -> DeviceArray:
    """The same of a tensor that others go on using."""
    if tensor.requires_grad:
        expected = "a tensor that does not require grad (ascend_grad.torch takes those, detach() drops it)"
        raise ParamTypeError(f"{name}: expected {expected}, got one that does")
    if str(tensor.layout) != "torch.strided" or tensor.is_nested or tensor.is_quantized:
        raise ParamTypeError(f"{name}: expected a dense tensor, got layout {tensor.layout}, dtype {tensor.dtype}")
    if tensor.is_neg():
        expected = "a tensor whose elements are as in memory (resolve_neg() makes one)"
        raise ParamTypeError(f"{name}: expected {expected}, got one with the negative bit set")
    return array_over(tensor, name, is_shared=True)


def _array(tensor: Any, dtype: np.dtype, *, is_shared: bool) -> DeviceArray:
    array = DeviceArray(tuple(tensor.shape), dtype, tensor.device.index, to_host)
    if array.size:
        room = tensor.untyped_storage().nbytes() // tensor.element_size()
        # A stride that leads to no element may be anything, and its bytes more than an int64 holds.
        strides = tuple(step if length > 1 else 1 for length, step in zip(tensor.shape, tensor.stride()))
        array._layout = Layout(strides, tensor.storage_offset(), room, tensor.is_contiguous())
        array._allocation = TensorMemory(tensor, dtype, is_shared=is_shared)
    return array


def _check_device(index: int, operator: str | None) -> None:
    state = runtime.state()
    if "torch_npu" not in sys.modules:
        raise BackendUnavailableError("the device cannot be used: torch_npu is not imported", operator=operator)
    if not state.usable or index >= state.device_count:
        raise BackendUnavailableError(f"device {index} cannot be used: {state.reason}", operator=operator)


def _numpy_dtype(dtype: Any, name: str, operator: str | None) -> np.dtype:
    text = str(dtype).removeprefix("torch.")
    try:
        return BFLOAT16 if text == "bfloat16" else np.dtype(text)
    except TypeError:
        raise ParamTypeError(f"{name}: expected a dtype that NumPy has, got {dtype}", operator=operator) from None


def lend(shape: tuple[int, ...], dtype: np.dtype, device: int) -> TensorMemory:
    """Memory for a result: that of a new tensor."""
    return TensorMemory(_empty(shape, dtype, device), dtype, is_shared=False)


def tensor_of(array: DeviceArray) -> Any:
    """A tensor over the memory of an array: that which torch has lent, if it has."""
    memory = array._allocation
    if memory is None:  # no elements
        return _empty(array.shape, array.dtype, array.device)
    if isinstance(memory, TensorMemory):
        return memory.tensor
    torch: Any = sys.modules["torch"]
    return torch.from_dlpack(array)


def _empty(shape: tuple[int, ...], dtype: np.dtype, device: int) -> Any:
    torch: Any = sys.modules["torch"]
    with _acl.ContextGuard():
        return torch.empty(shape, dtype=getattr(torch, dtype.name), device=torch.device("npu", device))
