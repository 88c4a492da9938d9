"""Conversion between tensors and arrays that share memory, and checks of tensors."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import torch
from numpy.typing import NDArray

from .._dtypes import BFLOAT16
from ..arguments import shown
from ..errors import BackendUnavailableError, ParamTypeError

# torch has only private functions to ask whether `torch.func` transforms functions, how many modes handle operators or
# functions, and whether a tensor has storage. Tensors of transforms have no storage. Neither have tensors of the older
# batching (`is_grads_batched`, `vectorize`), which is not a transform. If a later torch renames the functions, the
# defaults here select the slower path, which is right for every tensor.
_are_transforms_active = getattr(torch._C, "_are_functorch_transforms_active", lambda: True)
_has_storage = getattr(torch._C, "_has_storage", lambda tensor: False)
_operator_modes = getattr(torch._C, "_len_torch_dispatch_stack", lambda: 1)
_function_modes = getattr(torch._C, "_len_torch_function_stack", lambda: 1)


def to_array(tensor: torch.Tensor, name: str, operator: str) -> NDArray:
    """Return a tensor's elements as an array. `Tensor.numpy` refuses bfloat16, so such elements pass as integers."""
    tensor = tensor.detach()
    if tensor.dtype == torch.bfloat16:
        return tensor.view(torch.int16).numpy().view(BFLOAT16)
    try:
        return tensor.numpy()
    except TypeError as error:
        message = f"{name}: expected a tensor of a dtype that NumPy has, got {tensor.dtype} on {tensor.device}"
        raise ParamTypeError(message, operator=operator) from error


def to_tensor(array: NDArray) -> torch.Tensor:
    """Return an array's elements as a tensor, which keeps the array's memory alive."""
    if array.size == 0:  # NumPy's and torch's strides of empty arrays differ
        return torch.empty(array.shape, dtype=_tensor_dtype(array.dtype))
    if array.dtype == BFLOAT16:
        return torch.from_numpy(array.view(np.int16)).view(torch.bfloat16)
    return torch.from_numpy(array)


def _tensor_dtype(dtype: np.dtype) -> torch.dtype:
    return to_tensor(np.zeros((1,), dtype)).dtype


def without_gradient(tensor: torch.Tensor, name: str, operator: str) -> torch.Tensor:
    """Return a tensor on an Ascend NPU detached from autograd, as the functions of `ascend_grad` accept it."""
    return tensor.detach()


def itself(tensor: torch.Tensor) -> torch.Tensor:
    """Return a result on an Ascend NPU unchanged: the functions of `ascend_grad` return a tensor already."""
    return tensor


def is_observed() -> bool:
    """Return whether a compiler, transform, mode or tracer observes operations on tensors."""
    return (
        torch.compiler.is_compiling()
        or _are_transforms_active()
        or _operator_modes() > 0
        or _function_modes() > 0
        or torch.jit.is_tracing()
    )


def _is_memory(tensor: torch.Tensor) -> bool:
    """Return whether a tensor is of torch's own class, and its memory holds its values without lazy negation."""
    return (
        type(tensor) in (torch.Tensor, torch.nn.Parameter)
        and _has_storage(tensor)
        and not tensor.is_neg()
        and not tensor._is_zerotensor()
    )


def are_plain(arguments: Iterable[object]) -> bool:
    """Return whether the call is not observed and its tensors are plain CPU memory (see `_is_memory`)."""
    tensors = (each for each in arguments if isinstance(each, torch.Tensor))
    return not is_observed() and all(each.is_cpu and _is_memory(each) for each in tensors)


def are_readable(tensors: Iterable[torch.Tensor]) -> bool:
    """Return whether the call is not observed and all tensors have values that can be read and written now."""
    return not is_observed() and all(not each.is_meta and _is_memory(each) for each in tensors)


def check_tensors(operator: str, **tensors: object) -> None:
    """Refuse arguments that are not dense tensors on one device: the CPU or an Ascend NPU.

    Tensors on "meta" are accepted, too: they have shapes but no values, which is enough for torch's tracing.
    """
    place = None
    for name, tensor in tensors.items():
        if not isinstance(tensor, torch.Tensor):
            raise ParamTypeError(f"{name}: expected a torch.Tensor, got {shown(tensor)}", operator=operator)
        device = tensor.device
        if device.type not in ("cpu", "npu", "meta"):
            message = f"{name}: expected a tensor on the CPU or on an Ascend NPU, got one on {device}"
            raise BackendUnavailableError(message, operator=operator)
        if place is None:
            place = device
        elif device != place:
            expected = f"a tensor on {place}, as {next(iter(tensors))} is one"
            raise ParamTypeError(f"{name}: expected {expected}, got one on {device}", operator=operator)
        if tensor.layout != torch.strided or tensor.is_quantized or tensor.is_nested:
            kind = "a nested" if tensor.is_nested else "a quantized" if tensor.is_quantized else f"a {tensor.layout}"
            raise ParamTypeError(f"{name}: expected a dense tensor, got {kind} tensor", operator=operator)
