"""Registration of the operators with torch, as ``torch.ops.ascend_grad``, for tracing and batching.

Each operator has a schema, a computation on the CPU and on an Ascend NPU, a "fake" that returns tensors without memory,
and a rule for `torch.vmap`. This module registers the row-wise operators, `fused` and `loss_operators` the others.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

import torch
from torch._functorch.autograd_function import enable_single_level_autograd_function
from torch.autograd.forward_ad import _set_fwd_grad_enabled, unpack_dual
from torch.autograd.function import Function, _SingleLevelFunction
from torch.utils.flop_counter import register_flop_formula

import ascend_grad as ag

from .._call import Operator
from ..arguments import advice_on_gradient, real_number, shown
from ..errors import ParamInvalidError, ParamTypeError
from ..operators.table import ROWWISE
from .tensors import are_plain, are_readable, check_tensors, detached

#: What has been registered. torch keeps it and the operators when this module is imported once more.
_REGISTERED: set[str] = vars(torch.ops.ascend_grad).setdefault("_registered", set())


def _is_first(what: str) -> bool:
    """Return whether something has not been registered in this process, and record that it is registered."""
    is_first = what not in _REGISTERED
    _REGISTERED.add(what)
    return is_first


def register(name: str, schema: str, compute: Callable, fake: Callable, vmap: Callable) -> None:
    """Register an operator, once in a process. `vmap` is its rule for batches, after the operator's name."""
    if not _is_first(name):
        return
    qualified = f"ascend_grad::{name}"
    torch.library.define(qualified, schema, tags=(torch.Tag.pt2_compliant_tag,))
    for key in ("cpu", "privateuseone"):  # the latter is torch_npu's, which renames it
        torch.library.impl(qualified, key, compute)
    torch.library.register_fake(qualified, fake)
    torch.library.register_vmap(qualified, partial(vmap, name))


def register_flops(name: str, formula: Callable) -> None:
    """Register the floating-point operations of an operator for `torch.utils.flop_counter`."""
    if _is_first(f"flops of {name}"):
        register_flop_formula([getattr(torch.ops.ascend_grad, name)])(formula)


def register_gradient(name: str, function: type[Function]) -> None:
    """Register the gradient of `function`, which has the operator's arguments and results, for an operator."""
    if not _is_first(f"gradient of {name}"):
        return
    operator = getattr(torch.ops.ascend_grad, name).default

    def compute(*arguments):
        with torch._C._AutoDispatchBelowAutograd():
            return operator(*arguments)

    class SingleLevel(_SingleLevelFunction):  # torch's handling of transforms has come before
        setup_context = staticmethod(function.setup_context)
        backward = staticmethod(function.backward)

        @staticmethod
        def jvp(ctx, *tangents):
            with _set_fwd_grad_enabled(True):  # torch disables forward mode of outer transforms as well
                return function.jvp(ctx, *tangents)

        @staticmethod
        def forward(*arguments):
            with torch.enable_grad(), _set_fwd_grad_enabled(True):  # outer transforms also see this call
                return compute(*arguments)

    def compute_with_gradient(*arguments):
        with enable_single_level_autograd_function():  # one call for each transform
            return SingleLevel.apply(*arguments)

    torch.library.impl(f"ascend_grad::{name}", "Autograd", compute_with_gradient)


def saved_primals(ctx: Any) -> list[torch.Tensor | None]:
    """Return the tensors that a function saved for forward mode, without the tangents of this differentiation."""
    # torch has one level, 0. Its compiler does not set the level that `unpack_dual` takes by default.
    return [None if each is None else unpack_dual(each, level=0).primal for each in ctx.saved_tensors]


def apply(function: type[Function], *arguments: Any) -> Any:
    """Compute a function with its gradient. The slower registered operator is used only if `are_readable` is False."""
    if are_readable(each for each in arguments if isinstance(each, torch.Tensor)):
        # This skips the handling of keyword arguments and of transforms in `Function.apply`.
        return super(Function, function).apply(*arguments)
    return function.forward(*arguments)


# -- numbers that torch traces --


def is_traced(value: object, default: float | None) -> bool:
    """Return whether torch traces a number. While it compiles, it traces all numbers but a default."""
    if isinstance(value, torch.Tensor):
        return not are_plain((value,))
    if isinstance(value, (torch.SymFloat, torch.SymInt)):
        return True
    return torch.compiler.is_compiling() and type(value) in (int, float) and value != default


def traced_number(value: Any, name: str, operator: str) -> torch.Tensor:
    """Return a number as a tensor of float64 without dimensions. torch compiles a graph for each value of a number."""
    if isinstance(value, torch.Tensor):
        check_tensors(operator, **{name: value})
        is_number = not value.dim() and value.dtype not in (torch.bool, torch.complex64, torch.complex128)
        if not is_number or value.requires_grad:
            advice = advice_on_gradient(value, name) if is_number else ""
            raise ParamTypeError(f"{name}: expected a real number, got {shown(value)}{advice}", operator=operator)
        return value.to("cpu", torch.float64)
    if type(value) not in (int, float, torch.SymFloat, torch.SymInt):
        value = real_number(value, name, operator)
    return torch.ones((), dtype=torch.float64) * value  # torch specialises graphs to the numbers in `torch.full`


# -- row-wise operators --


def _rowwise(name: str, *arguments: Any) -> torch.Tensor:
    *tensors, setting, num_threads = arguments
    setting = setting.item() if isinstance(setting, torch.Tensor) else setting
    return getattr(ag, name)(*(detached(each) for each in tensors), setting, num_threads=num_threads)


def _rowwise_fake(first: torch.Tensor, *_: object) -> torch.Tensor:
    return first.new_empty(first.shape)


def _batch_first(tensor: torch.Tensor, batch_dim: int | None, size: int) -> torch.Tensor:
    return tensor.expand(size, *tensor.shape) if batch_dim is None else tensor.movedim(batch_dim, 0)


def _softmax_vmap(name: str, info, in_dims: tuple, *arguments) -> tuple[torch.Tensor, int]:
    operator = getattr(torch.ops.ascend_grad, name)
    *tensors, dim, num_threads = arguments
    tensors = [_batch_first(each, batch_dim, info.batch_size) for each, batch_dim in zip(tensors, in_dims)]
    rank = tensors[0].dim() - 1
    least = max(rank, 1)
    if not -least <= dim < least:
        raise ParamInvalidError(f"dim: expected an int in [{-least}, {least - 1}], got {dim}", operator=name)
    if rank == 0:
        return operator(*(each.unsqueeze(1) for each in tensors), 1, num_threads).squeeze(1), 0
    return operator(*tensors, dim % rank + 1, num_threads), 0


def _scaled_masked_vmap(name: str, info, in_dims: tuple, *arguments) -> tuple[torch.Tensor, int]:
    """Compute a batch as one problem. It becomes part of the first dimension, over which a mask may be broadcast."""
    *tensors, mask, scale, num_threads = arguments
    if in_dims[-2] is not None:  # one call has one scale
        return one_after_another(name, info, in_dims, *arguments)
    size = info.batch_size
    tensors = [_batch_first(each, batch_dim, size).flatten(0, 1) for each, batch_dim in zip(tensors, in_dims)]
    mask_dim = in_dims[len(tensors)]
    if mask_dim is not None or mask.shape[0] != 1:
        mask = _batch_first(mask, mask_dim, size)
        if mask.shape[1] == 1:
            mask = mask.expand(size, len(tensors[0]) // size, *mask.shape[2:])
        mask = mask.flatten(0, 1)
    result = getattr(torch.ops.ascend_grad, name)(*tensors, mask, scale, num_threads)
    return result.unflatten(0, (size, -1)), 0


def rowwise_schema(operator: Operator) -> str:
    """Return the schema of a row-wise operator. Compiled graphs take a scale as a tensor, so that it may change."""
    tensors = ", ".join(f"Tensor {name}" for name in operator.array_names)
    setting = "Tensor scale" if "scale" in operator.parameters else "int dim"
    return f"({tensors}, {setting}, SymInt? num_threads) -> Tensor"


for _operator in ROWWISE:
    _vmap = _scaled_masked_vmap if "scale" in _operator.parameters else _softmax_vmap
    register(_operator.name, rowwise_schema(_operator), partial(_rowwise, _operator.name), _rowwise_fake, _vmap)


def rowwise(name: str, *arguments: Any) -> torch.Tensor:
    """Compute an operator of tensors, of `dim` or of `scale` as a number or a tensor, and of a number of threads.

    torch's dispatcher takes longer, so it is used only if `are_plain` is False.
    """
    *tensors, setting, num_threads = arguments
    if not are_plain(arguments):
        setting = traced_number(setting, "scale", name)[None] if isinstance(setting, float) else setting
        return getattr(torch.ops.ascend_grad, name)(*tensors, setting, num_threads)
    return _rowwise(name, *arguments)


# -- what linear operators and losses share --


def accumulator(tensor: torch.Tensor) -> torch.dtype:
    """Return the dtype of losses and statistics of a tensor's rows."""
    return torch.float64 if tensor.dtype == torch.float64 else torch.float32


def without_none(like: torch.Tensor, results: Iterable[torch.Tensor | None]) -> tuple[torch.Tensor, ...]:
    """Return results with an empty tensor instead of each None, as schemas of operators have no optional results."""
    return tuple([like.new_empty(0) if each is None else each for each in results])


def linear_flops(input: Sequence[int], weight: Sequence[int], products: int) -> int:
    """Return the floating-point operations of products of the size of the logits, for shapes of input and weight."""
    return 2 * products * input[0] * weight[0] * weight[1]


def one_after_another(name: str, info: Any, in_dims: tuple, *arguments: Any) -> tuple[Any, Any]:
    """Compute the problems of a batch in order, where they are not one problem, as with a sum over the rows of each."""

    def problem(i: int) -> list:
        return [
            each if dim is None or not isinstance(each, torch.Tensor) else each.select(dim, i)
            for each, dim in zip(arguments, in_dims)
        ]

    results = [getattr(torch.ops.ascend_grad, name)(*problem(i)) for i in range(info.batch_size)]
    if not results:
        message = "expected a batch of at least one problem, got none"
        raise ParamInvalidError(f"torch.vmap: {message}", operator=name)
    if isinstance(results[0], torch.Tensor):
        return torch.stack(results), 0
    return tuple(torch.stack(each) for each in zip(*results)), (0,) * len(results[0])
