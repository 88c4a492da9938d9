"""Row-wise operators with gradients of any order.

The gradient of a gradient is composed of the same operators and of torch's own.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.autograd import Function

import ascend_grad as ag

from ..arguments import real_number, shown, truth_value
from ..errors import AscendGradError, ParamInvalidError, ParamTypeError, rename
from ..operators.signatures import documented
from .operators import apply, is_traced, register_gradient, rowwise, traced_number
from .tensors import TENSORS, check_floating, check_tensors, threads_of

__all__ = ["log_softmax", "scaled_masked_softmax", "softmax"]
__all__ += ["log_softmax_backward", "scaled_masked_softmax_backward", "softmax_backward"]

_DTYPES = (torch.float32, torch.float16, torch.bfloat16, torch.float64)


def _computation(operator: str) -> staticmethod:
    """Return the function that computes an operator. Compilers cannot trace `functools.partial` here."""
    return staticmethod(lambda *arguments: rowwise(operator, *arguments))


def _with_gradients(operator: str, backward_of_backward: Callable) -> tuple[type[Function], type[Function]]:
    """Return the functions of an operator and of its backward operator; torch can differentiate both.

    Both take tensors, the last of which may be a mask, a setting (the dimension or the scale), and a number of threads.
    `backward_of_backward` returns the gradients with respect to the tensors of the backward operator.
    """
    name_of_backward = f"{operator}_backward"

    class Forward(Function):
        forward = _computation(operator)

        @staticmethod
        def setup_context(ctx, inputs, output):
            _, *mask, ctx.setting, ctx.num_threads = inputs
            ctx.save_for_backward(output, *mask)

        @staticmethod
        def backward(ctx, grad_output):
            arguments = grad_output, *ctx.saved_tensors, ctx.setting, ctx.num_threads
            is_differentiated = torch.is_grad_enabled()
            gradient = apply(Backward, *arguments) if is_differentiated else rowwise(name_of_backward, *arguments)
            return gradient, *[None] * (len(arguments) - 2)

    class Backward(Function):
        forward = _computation(name_of_backward)

        @staticmethod
        def setup_context(ctx, inputs, output):
            *tensors, ctx.setting, ctx.num_threads = inputs
            ctx.save_for_backward(*tensors)

        @staticmethod
        def backward(ctx, grad):
            return *backward_of_backward(grad, *ctx.saved_tensors, ctx.setting, ctx.num_threads), None, None

    register_gradient(operator, Forward)
    register_gradient(name_of_backward, Backward)
    return Forward, Backward


def _softmax_backward_backward(grad, grad_output, output, dim, num_threads):
    row_sum = (grad_output * output).sum(dim, keepdim=True)
    wrt_output = grad * (grad_output - row_sum) - grad_output * (grad * output).sum(dim, keepdim=True)
    return apply(_SoftmaxBackward, grad, output, dim, num_threads), wrt_output


def _log_softmax_backward_backward(grad, grad_output, output, dim, num_threads):
    scaled = grad * output.exp()  # factor in both gradients of g - sum(g) * exp(y)
    return grad - scaled.sum(dim, keepdim=True), -grad_output.sum(dim, keepdim=True) * scaled


def _scaled_masked_softmax_backward_backward(grad, grad_output, y, mask, scale, num_threads):
    scale = scale[0] if isinstance(scale, torch.Tensor) else scale  # without a part in the dtype
    grad = (grad * scale).masked_fill(mask, 0)
    return *_softmax_backward_backward(grad, grad_output, y, -1, num_threads), None


_Softmax, _SoftmaxBackward = _with_gradients("softmax", _softmax_backward_backward)
_LogSoftmax, _LogSoftmaxBackward = _with_gradients("log_softmax", _log_softmax_backward_backward)
_ScaledMaskedSoftmax, _ScaledMaskedSoftmaxBackward = _with_gradients(
    "scaled_masked_softmax", _scaled_masked_softmax_backward_backward
)


def _along(
    function: type[Function], operator: str, *tensors: torch.Tensor, dim: int, axis: int | None, num_threads: int | None
) -> torch.Tensor:
    """Compute an operator along one dimension, of which `axis` is another name."""
    if axis is not None:
        if dim != -1:
            raise TypeError(f"{operator}() got dim and axis, which are two names of one argument")
        dim = axis
    try:
        return apply(function, *tensors, dim, threads_of(num_threads, operator))
    except AscendGradError as error:
        rename(error, operator, {"axis": "dim"})
        raise


def _converted(operator: str, input: torch.Tensor, dtype: torch.dtype | None) -> torch.Tensor:
    """Check the tensor and convert it to `dtype`, if it is given."""
    check_tensors(operator, input=input)
    if dtype is None:
        check_floating(operator, input=input)
        return input
    if dtype not in _DTYPES:
        expected = f"None or one of {', '.join(map(str, _DTYPES))}"
        raise ParamTypeError(f"dtype: expected {expected}, got {shown(dtype)}", operator=operator)
    if input.is_complex():
        raise ParamTypeError(f"input: expected a tensor of a real dtype, got {input.dtype}", operator=operator)
    return input.to(dtype)


@documented(TENSORS, like=ag.softmax)
def softmax(
    input: torch.Tensor,
    dim: int = -1,
    dtype: torch.dtype | None = None,
    *,
    axis: int | None = None,
    num_threads: int | None = None,
) -> torch.Tensor:
    """Compute the softmax along one dimension, like `torch.softmax`.

    Examples
    --------
    >>> import torch
    >>> import ascend_grad.torch as agt
    >>> agt.softmax(torch.zeros(2))
    tensor([0.5000, 0.5000])
    """
    input = _converted("softmax", input, dtype)
    return _along(_Softmax, "softmax", input, dim=dim, axis=axis, num_threads=num_threads)


@documented(TENSORS, like=ag.log_softmax)
def log_softmax(
    input: torch.Tensor,
    dim: int = -1,
    dtype: torch.dtype | None = None,
    *,
    axis: int | None = None,
    num_threads: int | None = None,
) -> torch.Tensor:
    """Compute the natural logarithm of the softmax along one dimension, like `torch.log_softmax`.

    Examples
    --------
    >>> import torch
    >>> import ascend_grad.torch as agt
    >>> agt.log_softmax(torch.zeros(2)).exp()
    tensor([0.5000, 0.5000])
    """
    input = _converted("log_softmax", input, dtype)
    return _along(_LogSoftmax, "log_softmax", input, dim=dim, axis=axis, num_threads=num_threads)


@documented(TENSORS, like=ag.scaled_masked_softmax)
def scaled_masked_softmax(
    x: torch.Tensor,
    mask: torch.Tensor,
    scale: float = 1.0,
    fix_triu_mask: bool = False,
    *,
    num_threads: int | None = None,
) -> torch.Tensor:
    """Compute the scaled and masked softmax over the last dimension, like `ascend_grad.scaled_masked_softmax`.

    Parameters
    ----------
    mask : torch.Tensor of bool, shape (B or 1, N or 1, S1, S2)
        True where the position is masked out. (Masks of `torch.nn.functional.scaled_dot_product_attention` are False
        there.)

    Examples
    --------
    >>> import torch
    >>> import ascend_grad.torch as agt
    >>> mask = torch.tensor([False, False, True, True]).reshape(1, 1, 1, 4)
    >>> agt.scaled_masked_softmax(torch.zeros(1, 1, 1, 4), mask)
    tensor([[[[0.5000, 0.5000, 0.0000, 0.0000]]]])
    """
    name = "scaled_masked_softmax"
    check_tensors(name, x=x, mask=mask)
    check_floating(name, x=x)
    return apply(_ScaledMaskedSoftmax, x, mask, _scale_of(name, scale, fix_triu_mask), threads_of(num_threads, name))


def _scale_of(operator: str, scale: Any, fix_triu_mask: object) -> Any:
    """Check the settings and return the scale, which is a tensor of shape (1,) if torch traces it.

    Compiled autograd compiles a graph again for a tensor without dimensions.
    """
    if isinstance(scale, torch.Tensor) and scale.requires_grad:
        message = "scale: expected a number, got a tensor that requires grad; gradients of scale are not supported"
        raise ParamTypeError(message, operator=operator)
    if truth_value(fix_triu_mask, "fix_triu_mask", operator, "False"):
        expected = "False (a generated triangular mask is not supported)"
        raise ParamInvalidError(f"fix_triu_mask: expected {expected}, got True", operator=operator)
    if is_traced(scale, default=None):
        return traced_number(scale, "scale", operator)[None]
    return scale if type(scale) is float else real_number(scale, "scale", operator)


@documented(TENSORS, like=ag.softmax_backward)
def softmax_backward(
    grad_output: torch.Tensor,
    output: torch.Tensor,
    dim: int = -1,
    *,
    axis: int | None = None,
    num_threads: int | None = None,
) -> torch.Tensor:
    r"""Compute the gradient with respect to the input of a softmax, like `ascend_grad.softmax_backward`.

    The result has gradients of any order with respect to both tensors.

    Examples
    --------
    >>> import torch
    >>> import ascend_grad.torch as agt
    >>> agt.softmax_backward(torch.tensor([1.0, 0.0]), torch.tensor([0.25, 0.75]))
    tensor([ 0.1875, -0.1875])
    """
    check_tensors("softmax_backward", grad_output=grad_output, output=output)
    return _along(
        _SoftmaxBackward, "softmax_backward", grad_output, output, dim=dim, axis=axis, num_threads=num_threads
    )


@documented(TENSORS, like=ag.log_softmax_backward)
def log_softmax_backward(
    grad_output: torch.Tensor,
    output: torch.Tensor,
    dim: int = -1,
    *,
    axis: int | None = None,
    num_threads: int | None = None,
) -> torch.Tensor:
    r"""Compute the gradient with respect to the input of a log-softmax, like `ascend_grad.log_softmax_backward`.

    The result has gradients of any order with respect to both tensors.

    Examples
    --------
    >>> import torch
    >>> import ascend_grad.torch as agt
    >>> agt.log_softmax_backward(torch.tensor([1.0, 0.0]), torch.tensor([0.25, 0.75]).log())
    tensor([ 0.7500, -0.7500])
    """
    check_tensors("log_softmax_backward", grad_output=grad_output, output=output)
    return _along(
        _LogSoftmaxBackward, "log_softmax_backward", grad_output, output, dim=dim, axis=axis, num_threads=num_threads
    )


@documented(TENSORS, like=ag.scaled_masked_softmax_backward)
def scaled_masked_softmax_backward(
    grad_output: torch.Tensor,
    y: torch.Tensor,
    mask: torch.Tensor,
    scale: float = 1.0,
    fix_triu_mask: bool = False,
    *,
    num_threads: int | None = None,
) -> torch.Tensor:
    r"""Compute the gradient with respect to the input of a scaled and masked softmax.

    The result has gradients of any order with respect to `grad_output` and `y`.

    Examples
    --------
    >>> import torch
    >>> import ascend_grad.torch as agt
    >>> g = torch.tensor([1.0, 0.0]).reshape(1, 1, 1, 2)
    >>> y = torch.tensor([0.25, 0.75]).reshape(1, 1, 1, 2)
    >>> agt.scaled_masked_softmax_backward(g, y, torch.tensor([False, True]).reshape(1, 1, 1, 2), 2.0)
    tensor([[[[0.3750, 0.0000]]]])
    """
    name = "scaled_masked_softmax_backward"
    check_tensors(name, grad_output=grad_output, y=y, mask=mask)
    settings = _scale_of(name, scale, fix_triu_mask), threads_of(num_threads, name)
    return apply(_ScaledMaskedSoftmaxBackward, grad_output, y, mask, *settings)
