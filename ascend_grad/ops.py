"""The public operators.

Each function is the same three lines: the short way (`_rowwise`, which takes the common case of plain arrays on the
CPU and otherwise answers None), then the general way through `dispatch`.
"""

from __future__ import annotations

from numpy.typing import ArrayLike, NDArray

from . import _rowwise, contract, dispatch

__all__ = [
    "log_softmax",
    "log_softmax_backward",
    "scaled_masked_softmax",
    "scaled_masked_softmax_backward",
    "softmax",
    "softmax_backward",
]


def softmax_backward(
    grad_output: ArrayLike,
    output: ArrayLike,
    dim: int = -1,
    *,
    out: NDArray | None = None,
    backend: str | None = None,
    num_threads: int | None = None,
) -> NDArray:
    r"""Gradient with respect to the input of a softmax.

    .. math:: \mathrm{out} = (g - \sum_{\mathrm{dim}} g\,y)\; y

    Parameters
    ----------
    grad_output : array_like, shape (...)
        The gradient :math:`g` with respect to the softmax's result. Rank 0 to 8; float32, float16, bfloat16 or float64.
    output : array_like, shape (...)
        The softmax's result :math:`y`, of the shape and dtype of `grad_output`. Any values are taken.
    dim : int, default -1
        The axis of the softmax.
    out : ndarray, optional
        Where the result goes: of its shape, any strides, any of the four floating dtypes (the accumulator is rounded
        once, to that dtype). It may be one of the inputs or overlap them.
    backend : {"auto", "cpu", "npu", "reference"}, optional
        Who computes; default: `use_backend`, then ``ASCEND_GRAD_BACKEND``, then the device if it takes the call.
    num_threads : int, optional
        Threads on the CPU; default: `set_num_threads`, then ``ASCEND_GRAD_NUM_THREADS``, then OpenMP's own
        setting. The result does not depend on it.

    Returns
    -------
    ndarray
        The gradient: `out`, or a new C-contiguous array of the dtype of `grad_output`.

    Raises
    ------
    ParamNullptrError
        161001: `grad_output` or `output` is None.
    ParamInvalidError
        161002: a dtype, `dim`, a shape or `out` is not as described (a dtype: its subclass `ParamTypeError`).

    Notes
    -----
    Sums of float32 and narrower inputs are carried in float64. The formula is that of ``aclnnSoftmaxBackward``;
    the subtraction comes first, then the multiplication.

    Examples
    --------
    >>> import numpy as np
    >>> import ascend_grad as ag
    >>> y = np.array([[0.25, 0.75]])
    >>> ag.softmax_backward(np.array([[1.0, 0.0]]), y)
    array([[ 0.1875, -0.1875]])
    """
    if dispatch.is_plain_cpu(backend):
        result = _rowwise.softmax_backward(grad_output, output, dim, out, num_threads)
        if result is not None:
            return result
    arguments = {"grad_output": grad_output, "output": output, "dim": dim}
    return dispatch.run(contract.SOFTMAX_BACKWARD, arguments, out, backend, num_threads)


def log_softmax_backward(
    grad_output: ArrayLike,
    output: ArrayLike,
    dim: int = -1,
    *,
    out: NDArray | None = None,
    backend: str | None = None,
    num_threads: int | None = None,
) -> NDArray:
    r"""Gradient with respect to the input of a log-softmax.

    .. math:: \mathrm{out} = g - e^{y} \sum_{\mathrm{dim}} g

    Parameters
    ----------
    grad_output : array_like, shape (...)
        The gradient :math:`g` with respect to the log-softmax's result. Rank 0 to 8; float32, float16, bfloat16 or
        float64.
    output : array_like, shape (...)
        The log-softmax's result :math:`y` (natural logarithms), of the shape and dtype of `grad_output`.
    dim : int, default -1
        The axis of the log-softmax.
    out, backend, num_threads
        As in `softmax_backward`.

    Returns
    -------
    ndarray
        The gradient: `out`, or a new C-contiguous array of the dtype of `grad_output`.

    Raises
    ------
    ParamNullptrError
        161001: `grad_output` or `output` is None.
    ParamInvalidError
        161002: a dtype, a shape, `dim` or `out` is not as described (a dtype: its subclass `ParamTypeError`).

    Notes
    -----
    The formula is that of ``aclnnLogSoftmaxBackward``.

    Examples
    --------
    >>> import numpy as np
    >>> import ascend_grad as ag
    >>> ag.log_softmax_backward(np.array([1.0, 0.0]), np.log([0.25, 0.75]))
    array([ 0.75, -0.75])
    """
    if dispatch.is_plain_cpu(backend):
        result = _rowwise.log_softmax_backward(grad_output, output, dim, out, num_threads)
        if result is not None:
            return result
    arguments = {"grad_output": grad_output, "output": output, "dim": dim}
    return dispatch.run(contract.LOG_SOFTMAX_BACKWARD, arguments, out, backend, num_threads)


def scaled_masked_softmax_backward(
    grad_output: ArrayLike,
    y: ArrayLike,
    mask: ArrayLike,
    scale: float = 1.0,
    fix_triu_mask: bool = False,
    *,
    out: NDArray | None = None,
    backend: str | None = None,
    num_threads: int | None = None,
) -> NDArray:
    r"""Gradient with respect to the input of a scaled and masked softmax over the last axis.

    .. math:: d = (g - \sum_{-1} g\,y)\; y, \qquad \mathrm{out} = 0 \text{ where mask, else } d \cdot \mathrm{scale}

    The sum is not affected by the mask. A masked position is exactly +0, even if it held NaN or infinity.

    Parameters
    ----------
    grad_output : array_like, shape (B, N, S1, S2)
        The gradient :math:`g` with respect to the forward result; float32, float16, bfloat16 or float64.
    y : array_like, shape (B, N, S1, S2)
        The forward result, of the dtype of `grad_output`.
    mask : array_like of bool, shape (B or 1, N or 1, S1, S2)
        True where the position is masked out.
    scale : float, default 1.0
        The factor of the forward call. Rounded to float32 first, except for float64 arrays.
    fix_triu_mask : bool, default False
        Must be False.
    out, backend, num_threads
        As in `softmax_backward`.

    Returns
    -------
    ndarray
        The gradient: `out`, or a new C-contiguous array of the dtype of `grad_output`.

    Raises
    ------
    ParamNullptrError
        161001: `grad_output`, `y` or `mask` is None.
    ParamInvalidError
        161002: a dtype, a shape, `fix_triu_mask` or `out` is not as described (a dtype: its subclass
        `ParamTypeError`).

    Notes
    -----
    The formula is that of ``aclnnScaledMaskedSoftmaxBackward``.

    Examples
    --------
    >>> import numpy as np
    >>> import ascend_grad as ag
    >>> g = np.array([1.0, 0.0]).reshape(1, 1, 1, 2)
    >>> y = np.array([0.25, 0.75]).reshape(1, 1, 1, 2)
    >>> mask = np.array([False, True]).reshape(1, 1, 1, 2)
    >>> ag.scaled_masked_softmax_backward(g, y, mask, 2.0)
    array([[[[0.375, 0.   ]]]])
    """
    if dispatch.is_plain_cpu(backend):
        result = _rowwise.scaled_masked_softmax_backward(grad_output, y, mask, scale, fix_triu_mask, out, num_threads)
        if result is not None:
            return result
    arguments = {"grad_output": grad_output, "y": y, "mask": mask, "scale": scale, "fix_triu_mask": fix_triu_mask}
    return dispatch.run(contract.SCALED_MASKED_SOFTMAX_BACKWARD, arguments, out, backend, num_threads)


def softmax(
    input: ArrayLike,
    dim: int = -1,
    *,
    out: NDArray | None = None,
    backend: str | None = None,
    num_threads: int | None = None,
) -> NDArray:
    r"""Softmax along one axis: :math:`e^{x - \max x} / \sum e^{x - \max x}`.

    Parameters
    ----------
    input : array_like, shape (...)
        Rank 0 to 8; float32, float16, bfloat16 or float64.
    dim : int, default -1
        The axis that sums to one.
    out, backend, num_threads
        As in `softmax_backward`.

    Returns
    -------
    ndarray
        The softmax: `out`, or a new C-contiguous array of the dtype of `input`.

    Raises
    ------
    ParamNullptrError
        161001: `input` is None.
    ParamInvalidError
        161002: a dtype, `dim`, the rank or `out` is not as described (a dtype: its subclass `ParamTypeError`).

    Notes
    -----
    The formula is that of ``aclnnSoftmax``.

    Examples
    --------
    >>> import ascend_grad as ag
    >>> ag.softmax([0.0, 0.0])
    array([0.5, 0.5])
    """
    if dispatch.is_plain_cpu(backend):
        result = _rowwise.softmax(input, dim, out, num_threads)
        if result is not None:
            return result
    return dispatch.run(contract.SOFTMAX, {"input": input, "dim": dim}, out, backend, num_threads)


def log_softmax(
    input: ArrayLike,
    dim: int = -1,
    *,
    out: NDArray | None = None,
    backend: str | None = None,
    num_threads: int | None = None,
) -> NDArray:
    r"""Natural logarithm of the softmax along one axis: :math:`x - \max x - \log \sum e^{x - \max x}`.

    Parameters
    ----------
    input : array_like, shape (...)
        Rank 0 to 8; float32, float16, bfloat16 or float64.
    dim : int, default -1
        The axis whose exponentials sum to one.
    out, backend, num_threads
        As in `softmax_backward`.

    Returns
    -------
    ndarray
        The log-softmax: `out`, or a new C-contiguous array of the dtype of `input`.

    Raises
    ------
    ParamNullptrError
        161001: `input` is None.
    ParamInvalidError
        161002: `dim`, a dtype, the rank or `out` is not as described (a dtype: its subclass `ParamTypeError`).

    Notes
    -----
    The formula is that of ``aclnnLogSoftmax``.

    Examples
    --------
    >>> import numpy as np
    >>> import ascend_grad as ag
    >>> np.exp(ag.log_softmax([0.0, 0.0]))
    array([0.5, 0.5])
    """
    if dispatch.is_plain_cpu(backend):
        result = _rowwise.log_softmax(input, dim, out, num_threads)
        if result is not None:
            return result
    return dispatch.run(contract.LOG_SOFTMAX, {"input": input, "dim": dim}, out, backend, num_threads)


def scaled_masked_softmax(
    x: ArrayLike,
    mask: ArrayLike,
    scale: float = 1.0,
    fix_triu_mask: bool = False,
    *,
    out: NDArray | None = None,
    backend: str | None = None,
    num_threads: int | None = None,
) -> NDArray:
    r"""Scaled and masked softmax over the last axis: softmax of (-10000 where mask, else :math:`x\cdot` scale).

    A row that is masked as a whole gives the uniform 1/S2, not NaN.

    Parameters
    ----------
    x : array_like, shape (B, N, S1, S2)
        float32, float16, bfloat16 or float64.
    mask : array_like of bool, shape (B or 1, N or 1, S1, S2)
        True where the position is masked out.
    scale : float, default 1.0
        Rounded to float32 first, except for float64 arrays.
    fix_triu_mask : bool, default False
        Must be False.
    out, backend, num_threads
        As in `softmax_backward`.

    Returns
    -------
    ndarray
        The softmax: `out`, or a new C-contiguous array of the dtype of `x`.

    Raises
    ------
    ParamNullptrError
        161001: `x` or `mask` is None.
    ParamInvalidError
        161002: a dtype, a shape, `fix_triu_mask` or `out` is not as described (a dtype: its subclass
        `ParamTypeError`).

    Notes
    -----
    The formula is that of ``aclnnScaledMaskedSoftmax``.

    Examples
    --------
    >>> import numpy as np
    >>> import ascend_grad as ag
    >>> mask = np.array([False, False, True, True]).reshape(1, 1, 1, 4)
    >>> ag.scaled_masked_softmax(np.zeros((1, 1, 1, 4)), mask)
    array([[[[0.5, 0.5, 0. , 0. ]]]])
    """
    if dispatch.is_plain_cpu(backend):
        result = _rowwise.scaled_masked_softmax(x, mask, scale, fix_triu_mask, out, num_threads)
        if result is not None:
            return result
    arguments = {"x": x, "mask": mask, "scale": scale, "fix_triu_mask": fix_triu_mask}
    return dispatch.run(contract.SCALED_MASKED_SOFTMAX, arguments, out, backend, num_threads)
