"""Row-wise operators with gradients of any order.

The gradient of a gradient is composed of the same operators and of torch's own.
"""

from __future__ import annotations

import torch
from torch.autograd import Function

from ..errors import ParamTypeError
from .operators import apply, register_gradient, rowwise
from .tensors import check_tensors


def _softmax_backward_wrt_output(
    grad: torch.Tensor, grad_output: torch.Tensor, output: torch.Tensor, dim: int
) -> torch.Tensor:
    """The gradient with respect to y of (g - sum(g*y)) * y."""
    row_sum = (grad_output * output).sum(dim, keepdim=True)
    return grad * (grad_output - row_sum) - grad_output * (grad * output).sum(dim, keepdim=True)


class _Softmax(Function):
    @staticmethod
    def forward(input, dim):
        return rowwise("softmax", input, dim)

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.dim = inputs[1]
        ctx.save_for_backward(output)

    @staticmethod
    def backward(ctx, grad_output):
        (output,) = ctx.saved_tensors
        if not torch.is_grad_enabled():
            return rowwise("softmax_backward", grad_output, output, ctx.dim), None
        return apply(_SoftmaxBackward, grad_output, output, ctx.dim), None


class _SoftmaxBackward(Function):
    @staticmethod
    def forward(grad_output, output, dim):
        return rowwise("softmax_backward", grad_output, output, dim)

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.dim = inputs[2]
        ctx.save_for_backward(*inputs[:2])

    @staticmethod
    def backward(ctx, grad):
        grad_output, output = ctx.saved_tensors
        return (
            apply(_SoftmaxBackward, grad, output, ctx.dim),
            _softmax_backward_wrt_output(grad, grad_output, output, ctx.dim),
            None,
        )


class _LogSoftmax(Function):
    @staticmethod
    def forward(input, dim):
        return rowwise("log_softmax", input, dim)

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.dim = inputs[1]
        ctx.save_for_backward(output)

    @staticmethod
    def backward(ctx, grad_output):
        (output,) = ctx.saved_tensors
        if not torch.is_grad_enabled():
            return rowwise("log_softmax_backward", grad_output, output, ctx.dim), None
        return apply(_LogSoftmaxBackward, grad_output, output, ctx.dim), None


class _LogSoftmaxBackward(Function):
    @staticmethod
    def forward(grad_output, output, dim):
        return rowwise("log_softmax_backward", grad_output, output, dim)

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.dim = inputs[2]
        ctx.save_for_backward(*inputs[:2])

    @staticmethod
    def backward(ctx, grad):
        grad_output, output = ctx.saved_tensors
        scaled = grad * output.exp()  # of g - sum(g) * exp(y)
        return (
            grad - scaled.sum(ctx.dim, keepdim=True),
            -grad_output.sum(ctx.dim, keepdim=True) * scaled,
            None,
        )


class _ScaledMaskedSoftmax(Function):
    @staticmethod
    def forward(x, mask, scale):
        return rowwise("scaled_masked_softmax", x, mask, scale)

    @staticmethod
    def setup_context(ctx, inputs, output):
        _, mask, ctx.scale = inputs
        ctx.save_for_backward(output, mask)

    @staticmethod
    def backward(ctx, grad_output):
        y, mask = ctx.saved_tensors
        if not torch.is_grad_enabled():
            return rowwise("scaled_masked_softmax_backward", grad_output, y, mask, ctx.scale), None, None
        return apply(_ScaledMaskedSoftmaxBackward, grad_output, y, mask, ctx.scale), None, None


class _ScaledMaskedSoftmaxBackward(Function):
    @staticmethod
    def forward(grad_output, y, mask, scale):
        return rowwise("scaled_masked_softmax_backward", grad_output, y, mask, scale)

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.scale = inputs[3]
        ctx.save_for_backward(*inputs[:3])

    @staticmethod
    def backward(ctx, grad):
        grad_output, y, mask = ctx.saved_tensors
        grad = (grad * ctx.scale).masked_fill(mask, 0)
        return (
            apply(_SoftmaxBackward, grad, y, -1),
            _softmax_backward_wrt_output(grad, grad_output, y, -1),
            None,
            None,
        )


for _name, _function in (
    ("softmax", _Softmax),
    ("softmax_backward", _SoftmaxBackward),
    ("log_softmax", _LogSoftmax),
    ("log_softmax_backward", _LogSoftmaxBackward),
    ("scaled_masked_softmax", _ScaledMaskedSoftmax),
    ("scaled_masked_softmax_backward", _ScaledMaskedSoftmaxBackward),
):
    register_gradient(_name, _function)


def softmax(input: torch.Tensor, dim: int = -1) -> torch.Tensor:
    """Softmax along one dimension, as `torch.softmax`.

    Parameters
    ----------
    input : torch.Tensor, shape (...)
        Rank 0 to 8; float32, float16, bfloat16 or float64.
    dim : int, default -1
        The dimension that sums to one.

    Returns
    -------
    torch.Tensor
        A contiguous tensor of the dtype of `input`.

    Raises
    ------
    ParamInvalidError
        161002: a dtype, `dim` or the rank is not as described (a dtype or a kind: its subclass `ParamTypeError`).
    UnsupportedDeviceError
        361001: the Ascend NPU of the tensor lacks the operator.
    BackendUnavailableError
        The tensor is neither on the CPU nor on a usable Ascend NPU.

    Examples
    --------
    >>> import torch
    >>> import ascend_grad.torch as agt
    >>> agt.softmax(torch.zeros(2))
    tensor([0.5000, 0.5000])
    """
    check_tensors("softmax", input=input)
    return apply(_Softmax, input, dim)


def log_softmax(input: torch.Tensor, dim: int = -1) -> torch.Tensor:
    """Natural logarithm of the softmax along one dimension, as `torch.log_softmax`.

    Parameters
    ----------
    input : torch.Tensor, shape (...)
        Rank 0 to 8; float32, float16, bfloat16 or float64.
    dim : int, default -1
        The dimension whose exponentials sum to one.

    Returns
    -------
    torch.Tensor
        A contiguous tensor of the dtype of `input`.

    Raises
    ------
    ParamInvalidError
        161002: a dtype, `dim` or the rank is not as described (a dtype or a kind: its subclass `ParamTypeError`).
    UnsupportedDeviceError
        361001: the Ascend NPU of the tensor lacks the operator.
    BackendUnavailableError
        The tensor is neither on the CPU nor on a usable Ascend NPU.

    Examples
    --------
    >>> import torch
    >>> import ascend_grad.torch as agt
    >>> agt.log_softmax(torch.zeros(2)).exp()
    tensor([0.5000, 0.5000])
    """
    check_tensors("log_softmax", input=input)
    return apply(_LogSoftmax, input, dim)


def scaled_masked_softmax(x: torch.Tensor, mask: torch.Tensor, scale: float = 1.0) -> torch.Tensor:
    r"""Scaled and masked softmax over the last dimension: softmax of (-10000 where mask, else :math:`x\cdot` scale).

    Parameters
    ----------
    x : torch.Tensor, shape (B, N, S1, S2)
        float32, float16, bfloat16 or float64.
    mask : torch.Tensor of bool, shape (B or 1, N or 1, S1, S2)
        True where the position is masked out. (The masks of `torch.nn.functional.scaled_dot_product_attention` are
        True where it is not.)
    scale : float, default 1.0
        Rounded to float32 first, except for float64 tensors.

    Returns
    -------
    torch.Tensor
        A contiguous tensor of the dtype of `x`.

    Raises
    ------
    ParamInvalidError
        161002: a dtype or a shape is not as described (a dtype or a kind: its subclass `ParamTypeError`).
    UnsupportedDeviceError
        361001: the Ascend NPU of the tensors lacks the operator.
    BackendUnavailableError
        A tensor is neither on the CPU nor on a usable Ascend NPU.

    Examples
    --------
    >>> import torch
    >>> import ascend_grad.torch as agt
    >>> mask = torch.tensor([False, False, True, True]).reshape(1, 1, 1, 4)
    >>> agt.scaled_masked_softmax(torch.zeros(1, 1, 1, 4), mask)
    tensor([[[[0.5000, 0.5000, 0.0000, 0.0000]]]])
    """
    check_tensors("scaled_masked_softmax", x=x, mask=mask)
    if isinstance(scale, torch.Tensor) and scale.requires_grad:
        message = (
            "scale: expected a number, got a tensor that requires a gradient, which this function does not compute"
        )
        raise ParamTypeError(message, operator="scaled_masked_softmax")
    return apply(_ScaledMaskedSoftmax, x, mask, scale)
