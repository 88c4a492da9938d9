"""Conversion of tensors to what the functions of `ascend_grad` accept, and checks of tensors."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NoReturn

import numpy as np
import torch

import ascend_grad as ag

from ..arguments import advice_on_module, shown, thread_count
from ..errors import BackendUnavailableError, ParamTypeError
from ..operators.signatures import Words

#: The exceptions of all functions for tensors.
ERRORS = """
ParamInvalidError
    161002: an argument is not as described (a dtype or kind: its subclass `ParamTypeError`).
UnsupportedDeviceError
    361001: the Ascend NPU of the tensors lacks the operator.
BackendUnavailableError
    A tensor is neither on the CPU nor on a usable Ascend NPU.
"""
#: Parameters of several functions, with torch's names.
_PARAMETERS = """
dim : int, default -1
    The dimension of the softmax.
axis : int, optional
    Another name of `dim`.
dtype : torch.dtype, optional
    The dtype that `input`, of any real dtype, is converted to first: float32, float16, bfloat16 or float64. The
    gradient has the dtype of `input` before.
"""
TENSORS = Words("torch.Tensor", errors=ERRORS, parameters=_PARAMETERS, module="agt")

# torch has only private functions to ask whether `torch.func` transforms functions, how many modes handle operators or
# functions, and whether a tensor has storage. Tensors of transforms have no storage. Neither have tensors of the older
# batching (`is_grads_batched`, `vectorize`), which is not a transform. If a later torch renames the functions, the
# defaults here select the slower path, which is right for every tensor.
are_transforms_active = getattr(torch._C, "_are_functorch_transforms_active", lambda: True)
_has_storage = getattr(torch._C, "_has_storage", lambda tensor: False)
_operator_modes = getattr(torch._C, "_len_torch_dispatch_stack", lambda: 1)
_function_modes = getattr(torch._C, "_len_torch_function_stack", lambda: 1)


#: Classes of tensors that the functions of `ascend_grad` read whatever the class overrides.
_OWN_CLASSES = torch.Tensor, torch.nn.Parameter


def detached(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor as the functions of `ascend_grad` accept it: of torch's class, and not requiring grad."""
    if type(tensor) not in _OWN_CLASSES:  # another class may override what the functions call
        with torch._C.DisableTorchFunctionSubclass():
            return tensor.detach().as_subclass(torch.Tensor)
    return tensor.detach() if tensor.requires_grad else tensor


def optional(tensor: torch.Tensor | None) -> Any:
    """Return `detached` of an optional tensor."""
    return None if tensor is None else detached(tensor)


def is_observed() -> bool:
    """Return whether a compiler, transform, mode or tracer observes operations on tensors."""
    return (
        torch.compiler.is_compiling()
        or are_transforms_active()
        or _operator_modes() > 0
        or _function_modes() > 0
        or torch.jit.is_tracing()
    )


def _is_memory(tensor: torch.Tensor) -> bool:
    """Return whether a tensor is of torch's own class, and its memory holds its values without lazy negation."""
    return type(tensor) in _OWN_CLASSES and _has_storage(tensor) and not tensor.is_neg() and not tensor._is_zerotensor()


def are_plain(arguments: Iterable[object]) -> bool:
    """Return whether the call is not observed and its tensors are plain CPU memory (see `_is_memory`)."""
    return not is_observed() and all(
        not isinstance(each, torch.Tensor) or (each.is_cpu and _is_memory(each)) for each in arguments
    )


def are_readable(tensors: Iterable[torch.Tensor]) -> bool:
    """Return whether the call is not observed and all tensors have values that can be read and written now."""
    return not is_observed() and all(not each.is_meta and _is_memory(each) for each in tensors)


def check_floating(operator: str, target: torch.Tensor | None = None, /, **tensors: torch.Tensor) -> None:
    """Refuse tensors of integers and truth values, as torch's own functions do. `target` may be swapped with them."""
    for name, tensor in tensors.items():
        if not tensor.is_floating_point() and not tensor.is_complex():  # complex dtypes are refused with all others
            expected = "dtype float32, float16, bfloat16 or float64"
            is_swapped = target is not None and target.is_floating_point()
            advice = f"are {name} and target swapped?" if is_swapped else f"{name}.float() converts it"
            got = f"{str(tensor.dtype).removeprefix('torch.')} ({advice})"
            raise ParamTypeError(f"{name}: expected {expected}, got {got}", operator=operator)


def threads_of(num_threads: object, operator: str) -> int | None:
    """Check a number of threads. None is the default."""
    return None if num_threads is None else thread_count(num_threads, operator)


def refuse_jit_trace(operator: str) -> None:
    """Refuse `torch.jit.trace`, whose graphs have no lists of strings, which losses take."""
    if not torch.compiler.is_compiling() and torch.jit.is_tracing():
        message = "torch.jit.trace cannot record losses (torch.export and torch.compile can)"
        raise NotImplementedError(f"{operator}: {message}")


def refuse_forward_mode(operator: str, **tensors: torch.Tensor) -> None:
    """Refuse forward-mode derivatives, which torch would take as 0 for results that no function of autograd returns."""
    for name, tensor in tensors.items():
        if torch.autograd.forward_ad.unpack_dual(tensor).tangent is not None:
            raise NotImplementedError(f"{operator}: {name}: forward-mode derivatives are not supported")


def refuse_other_class(operator: str, name: str, value: object, expected: str = "torch.Tensor") -> NoReturn:
    """Refuse an argument that is no tensor."""
    advice = advice_on_module(value)
    if isinstance(value, torch.Tensor):
        advice = f" ({expected}({name}) makes one)"
    if isinstance(value, np.ndarray):
        also = f", or ascend_grad.{operator}" if hasattr(ag, operator) else ""
        advice = f" (torch.from_numpy({name}){also})"
    raise ParamTypeError(f"{name}: expected a {expected}, got {shown(value)}{advice}", operator=operator)


def check_tensors(operator: str, **tensors: object) -> None:
    """Refuse arguments that are not dense tensors on one device: the CPU or an Ascend NPU.

    Tensors on "meta" are also accepted: they have shapes but no values, which is enough for torch's tracing.
    """
    place = None
    for name, tensor in tensors.items():
        if not isinstance(tensor, torch.Tensor):
            refuse_other_class(operator, name, tensor)
        if type(tensor) not in _OWN_CLASSES and hasattr(tensor, "full_tensor"):
            expected = "a tensor of this process (to_local() or full_tensor() makes one)"
            message = f"{name}: expected {expected}, got a {type(tensor).__name__}"
            raise ParamTypeError(message, operator=operator)
        if type(tensor) not in _OWN_CLASSES and isinstance(tensor, torch.masked.MaskedTensor):
            expected = "a tensor that computes as torch.Tensor does (to_tensor(value) makes one)"
            raise ParamTypeError(f"{name}: expected {expected}, got a {type(tensor).__name__}", operator=operator)
        device = tensor.device
        if device.type not in ("cpu", "npu", "meta"):
            message = f"{name}: expected a tensor on the CPU or on an Ascend NPU, got one on {device} (cpu() copies it)"
            raise BackendUnavailableError(message, operator=operator)
        if place is None:
            place = device
        elif device != place:
            expected = f"a tensor on {place}, as {next(iter(tensors))} is one"
            raise ParamTypeError(f"{name}: expected {expected}, got one on {device}", operator=operator)
        if tensor.layout != torch.strided or tensor.is_quantized or tensor.is_nested:
            kind = "a nested" if tensor.is_nested else "a quantized" if tensor.is_quantized else f"a {tensor.layout}"
            conversion = "dequantize" if tensor.is_quantized else "to_dense"
            hint = "" if tensor.is_nested else f" ({conversion}() makes one)"
            raise ParamTypeError(f"{name}: expected a dense tensor{hint}, got {kind} tensor", operator=operator)
