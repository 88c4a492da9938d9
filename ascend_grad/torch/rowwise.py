"""Row-wise operators with gradients of any order.

The gradient of a gradient is composed of the same operators and of torch's own.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.autograd import Function

from ..arguments import real_number, shown, truth_value
from ..errors import ParamInvalidError, ParamTypeError
from .operators import apply, is_traced, register_gradient, rowwise, traced_number
from .tensors import check_floating, check_tensors

_DTYPES = (torch.float32, torch.float16, torch.bfloat16, torch.float64)


def _softmax_backward_wrt_output(
    grad: torch.Tensor, grad_output: torch.Tensor, output: torch.Tensor, dim: int
) -> torch.Tensor:
    """Compute the gradient of (g - sum(g*y)) * y with respect to y."""
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
        scaled = grad * output.exp()  # factor in both gradients of g - sum(g) * exp(y)
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
        scale = ctx.scale[0] if isinstance(ctx.scale, torch.Tensor) else ctx.scale  # without a part in the dtype
        grad = (grad * scale).masked_fill(mask, 0)
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


def softmax(input: torch.Tensor, dim: int = -1, dtype: torch.dtype | None = None) -> torch.Tensor:
    """Compute the softmax along one dimension, like `torch.softmax`.

    Parameters
    ----------
    input : torch.Tensor, shape (...)
        Rank 0 to 8; float32, float16, bfloat16 or float64. With `dtype` of any real dtype.
    dim : int, default -1
        The dimension that sums to one.
    dtype : torch.dtype, optional
        The dtype that `input` is converted to first: float32, float16, bfloat16 or float64. The gradient has the dtype
        of `input`.

    Returns
    -------
    torch.Tensor
        A contiguous tensor of `dtype`, by default of the dtype of `input`.

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
    return apply(_Softmax, _converted("softmax", input, dtype), dim)


def log_softmax(input: torch.Tensor, dim: int = -1, dtype: torch.dtype | None = None) -> torch.Tensor:
    """Compute the natural logarithm of the softmax along one dimension, like `torch.log_softmax`.

    Parameters
    ----------
    input : torch.Tensor, shape (...)
        Rank 0 to 8; float32, float16, bfloat16 or float64. With `dtype` of any real dtype.
    dim : int, default -1
        The dimension whose exponentials sum to one.
    dtype : torch.dtype, optional
        The dtype that `input` is converted to first: float32, float16, bfloat16 or float64. The gradient has the dtype
        of `input`.

    Returns
    -------
    torch.Tensor
        A contiguous tensor of `dtype`, by default of the dtype of `input`.

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
    return apply(_LogSoftmax, _converted("log_softmax", input, dtype), dim)


def scaled_masked_softmax(
    x: torch.Tensor, mask: torch.Tensor, scale: float = 1.0, fix_triu_mask: bool = False
) -> torch.Tensor:
    r"""Compute the softmax over the last dimension of (-10000 where `mask` is True, else :math:`x\cdot` scale).

    Parameters
    ----------
    x : torch.Tensor, shape (B, N, S1, S2)
        The input; float32, float16, bfloat16 or float64.
    mask : torch.Tensor of bool, shape (B or 1, N or 1, S1, S2)
        True where the position is masked out. (Masks of `torch.nn.functional.scaled_dot_product_attention` are False
        there.)
    scale : float, default 1.0
        Rounded to float32 first, except for float64 tensors.
    fix_triu_mask : bool, default False
        Must be False.

    Returns
    -------
    torch.Tensor
        A contiguous tensor of the dtype of `x`.

    Raises
    ------
    ParamInvalidError
        161002: a dtype, a shape or `fix_triu_mask` is not as described (a dtype or a kind: its subclass
        `ParamTypeError`).
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
    check_floating("scaled_masked_softmax", x=x)
    return apply(_ScaledMaskedSoftmax, x, mask, _scale_of("scaled_masked_softmax", scale, fix_triu_mask))


def _scale_of(operator: str, scale: Any, fix_triu_mask: object) -> Any:
    """Check the settings and return the scale, which is a tensor of shape (1,) if torch traces it.

    Compiled autograd compiles a graph again for a tensor without dimensions.
    """
    if isinstance(scale, torch.Tensor) and scale.requires_grad:
        message = (
            "scale: expected a number, got a tensor that requires a gradient, which this function does not compute"
        )
        raise ParamTypeError(message, operator=operator)
    if truth_value(fix_triu_mask, "fix_triu_mask", operator, "False"):
        expected = "False (a generated triangular mask is not supported)"
        raise ParamInvalidError(f"fix_triu_mask: expected {expected}, got True", operator=operator)
    if is_traced(scale, default=None):
        return traced_number(scale, "scale", operator)[None]
    return scale if type(scale) is float else real_number(scale, "scale", operator)


def softmax_backward(grad_output: torch.Tensor, output: torch.Tensor, dim: int = -1) -> torch.Tensor:
    r"""Compute the gradient with respect to the input of a softmax, like `ascend_grad.softmax_backward`.

    Parameters
    ----------
    grad_output : torch.Tensor, shape (...)
        The gradient with respect to the softmax's result. Rank 0 to 8; float32, float16, bfloat16 or float64.
    output : torch.Tensor, shape (...)
        The softmax's result, of the shape and dtype of `grad_output`. Any values are accepted.
    dim : int, default -1
        The dimension of the softmax.

    Returns
    -------
    torch.Tensor
        A contiguous tensor of the dtype of `grad_output`. It has gradients of any order with respect to both tensors.

    Raises
    ------
    ParamInvalidError
        161002: a dtype, `dim` or a shape is not as described (a dtype or a kind: its subclass `ParamTypeError`).
    UnsupportedDeviceError
        361001: the Ascend NPU of the tensors lacks the operator.
    BackendUnavailableError
        A tensor is neither on the CPU nor on a usable Ascend NPU.

    Examples
    --------
    >>> import torch
    >>> import ascend_grad.torch as agt
    >>> agt.softmax_backward(torch.tensor([1.0, 0.0]), torch.tensor([0.25, 0.75]))
    tensor([ 0.1875, -0.1875])
    """
    check_tensors("softmax_backward", grad_output=grad_output, output=output)
    return apply(_SoftmaxBackward, grad_output, output, dim)


def log_softmax_backward(grad_output: torch.Tensor, output: torch.Tensor, dim: int = -1) -> torch.Tensor:
    r"""Compute the gradient with respect to the input of a log-softmax, like `ascend_grad.log_softmax_backward`.

    Parameters
    ----------
    grad_output : torch.Tensor, shape (...)
        The gradient with respect to the log-softmax's result. Rank 0 to 8; float32, float16, bfloat16 or float64.
    output : torch.Tensor, shape (...)
        The log-softmax's result (natural logarithms), of the shape and dtype of `grad_output`.
    dim : int, default -1
        The dimension of the log-softmax.

    Returns
    -------
    torch.Tensor
        A contiguous tensor of the dtype of `grad_output`. It has gradients of any order with respect to both tensors.

    Raises
    ------
    ParamInvalidError
        161002: a dtype, a shape or `dim` is not as described (a dtype or a kind: its subclass `ParamTypeError`).
    UnsupportedDeviceError
        361001: the Ascend NPU of the tensors lacks the operator.
    BackendUnavailableError
        A tensor is neither on the CPU nor on a usable Ascend NPU.

    Examples
    --------
    >>> import torch
    >>> import ascend_grad.torch as agt
    >>> agt.log_softmax_backward(torch.tensor([1.0, 0.0]), torch.tensor([0.25, 0.75]).log())
    tensor([ 0.7500, -0.7500])
    """
    check_tensors("log_softmax_backward", grad_output=grad_output, output=output)
    return apply(_LogSoftmaxBackward, grad_output, output, dim)


def scaled_masked_softmax_backward(
    grad_output: torch.Tensor,
    y: torch.Tensor,
    mask: torch.Tensor,
    scale: float = 1.0,
    fix_triu_mask: bool = False,
) -> torch.Tensor:
    r"""Compute the gradient with respect to the input of a scaled and masked softmax.

    It is `ascend_grad.scaled_masked_softmax_backward` for tensors. The result is exactly 0 where the mask is set.

    Parameters
    ----------
    grad_output : torch.Tensor, shape (B, N, S1, S2)
        The gradient with respect to the forward result; float32, float16, bfloat16 or float64.
    y : torch.Tensor, shape (B, N, S1, S2)
        The forward result, of the dtype of `grad_output`.
    mask : torch.Tensor of bool, shape (B or 1, N or 1, S1, S2)
        True where the position is masked out.
    scale : float, default 1.0
        The factor of the forward call. Rounded to float32 first, except for float64 tensors.
    fix_triu_mask : bool, default False
        Must be False.

    Returns
    -------
    torch.Tensor
        A contiguous tensor of the dtype of `grad_output`. It has gradients of any order with respect to `grad_output`
        and `y`.

    Raises
    ------
    ParamInvalidError
        161002: a dtype, a shape or `fix_triu_mask` is not as described (a dtype or a kind: its subclass
        `ParamTypeError`).
    UnsupportedDeviceError
        361001: the Ascend NPU of the tensors lacks the operator.
    BackendUnavailableError
        A tensor is neither on the CPU nor on a usable Ascend NPU.

    Examples
    --------
    >>> import torch
    >>> import ascend_grad.torch as agt
    >>> g = torch.tensor([1.0, 0.0]).reshape(1, 1, 1, 2)
    >>> y = torch.tensor([0.25, 0.75]).reshape(1, 1, 1, 2)
    >>> agt.scaled_masked_softmax_backward(g, y, torch.tensor([False, True]).reshape(1, 1, 1, 2), 2.0)
    tensor([[[[0.3750, 0.0000]]]])
    """
    check_tensors("scaled_masked_softmax_backward", grad_output=grad_output, y=y, mask=mask)
    return apply(
        _ScaledMaskedSoftmaxBackward,
        grad_output,
        y,
        mask,
        _scale_of("scaled_masked_softmax_backward", scale, fix_triu_mask),
    )
