"""The public operators: signatures and documentation. `contract` describes them, `_dispatch` computes them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

from numpy.typing import ArrayLike, NDArray

from ._dispatch import run
from .contract import linear, losses, rowwise
from .results import (
    CrossEntropy,
    LinearCrossEntropy,
    LinearCrossEntropyGradients,
    LinearTopK,
    OnlineMaxSum,
    with_outputs,
)

__all__ = [
    "cross_entropy",
    "fused_cross_entropy_loss_with_max_sum",
    "fused_linear_cross_entropy_loss_grad",
    "fused_linear_online_max_sum",
    "linear_cross_entropy",
    "linear_cross_entropy_backward",
    "linear_top_k",
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
    r"""Compute the gradient with respect to the input of a softmax.

    .. math:: \mathrm{out} = (g - \sum_{\mathrm{dim}} g\,y)\; y

    Parameters
    ----------
    grad_output : array_like, shape (...)
        The gradient :math:`g` with respect to the softmax's result. Rank 0 to 8; float32, float16, bfloat16 or float64.
    output : array_like, shape (...)
        The softmax's result :math:`y`, of the shape and dtype of `grad_output`. Any values are accepted.
    dim : int, default -1
        The axis of the softmax.
    out : ndarray or tensor, optional
        The array for the result, of the result's shape, any strides, and any of the four floating dtypes (the
        accumulator is rounded once, to that dtype). It may be one of the inputs or overlap them.
    backend : {"auto", "cpu", "npu", "reference"}, optional
        The backend; default: `use_backend`, then ``ASCEND_GRAD_BACKEND``, then the device if it takes the call.
    num_threads : int, optional
        Number of threads on the CPU; default: `set_num_threads`, then ``ASCEND_GRAD_NUM_THREADS``, then OpenMP's own
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
        161002: a dtype, `dim`, a shape or `out` is not as described (a dtype or kind: its subclass `ParamTypeError`).
    BackendUnavailableError
        An array is on an unsupported device, or the requested backend cannot compute the call.

    Notes
    -----
    All operators take arrays of any library that offers DLPack on the CPU (PyTorch's tensors, JAX's arrays), and return
    arrays of the same library, over the same memory. All arrays of a call belong to one library. Targets, weights of
    tokens and classes, and the other arguments that ``docs/arrays.md`` lists are an exception: they may be NumPy's if
    the matrices or logits belong to another library, or the reverse.

    Arrays on an Ascend NPU are taken, too. Calls on arrays of `npu.asarray` return such arrays and are done when they
    return. Calls on tensors of torch_npu return such tensors and are in the order of torch's current stream, as torch's
    own operators are. They do not wait, copy nothing to the host, and look at no value. The exceptions are calls of the
    linear operators with H = 0 or V = 0, which are computed on the host and wait. All arrays of a call are of one kind,
    on one device.

    The operators also take anything that NumPy converts to an array, and subclasses of its arrays such as memory maps.
    Arrays with more than elements (masked arrays, matrices, arrays with units) are refused, as inputs and as `out`,
    since the rest would be lost. In general these are classes that define ``__array_ufunc__``, ``__array_function__``
    or ``__mul__``. A bool is neither an integer nor a real number.

    Sums of float32 and narrower inputs are carried in float64. The formula follows ``aclnnSoftmaxBackward``: first the
    subtraction, then the multiplication.

    Examples
    --------
    >>> import numpy as np
    >>> import ascend_grad as ag
    >>> y = np.array([[0.25, 0.75]])
    >>> ag.softmax_backward(np.array([[1.0, 0.0]]), y)
    array([[ 0.1875, -0.1875]])
    """
    return run(rowwise.SOFTMAX_BACKWARD, [grad_output, output, dim], out, backend, num_threads)


def log_softmax_backward(
    grad_output: ArrayLike,
    output: ArrayLike,
    dim: int = -1,
    *,
    out: NDArray | None = None,
    backend: str | None = None,
    num_threads: int | None = None,
) -> NDArray:
    r"""Compute the gradient with respect to the input of a log-softmax.

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
    The formula follows ``aclnnLogSoftmaxBackward``.

    Examples
    --------
    >>> import numpy as np
    >>> import ascend_grad as ag
    >>> ag.log_softmax_backward(np.array([1.0, 0.0]), np.log([0.25, 0.75]))
    array([ 0.75, -0.75])
    """
    return run(rowwise.LOG_SOFTMAX_BACKWARD, [grad_output, output, dim], out, backend, num_threads)


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
    r"""Compute the gradient with respect to the input of a scaled and masked softmax over the last axis.

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
    The formula follows ``aclnnScaledMaskedSoftmaxBackward``.

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
    values = [grad_output, y, mask, scale, fix_triu_mask]
    return run(rowwise.SCALED_MASKED_SOFTMAX_BACKWARD, values, out, backend, num_threads)


def softmax(
    input: ArrayLike,
    dim: int = -1,
    *,
    out: NDArray | None = None,
    backend: str | None = None,
    num_threads: int | None = None,
) -> NDArray:
    r"""Compute the softmax along one axis: :math:`e^{x - \max x} / \sum e^{x - \max x}`.

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
    The formula follows ``aclnnSoftmax``. On the CPU an exponential below the smallest normal number of float32 is 0,
    here and in all operators, unless the arrays are float64.

    Examples
    --------
    >>> import ascend_grad as ag
    >>> ag.softmax([0.0, 0.0])
    array([0.5, 0.5])
    """
    return run(rowwise.SOFTMAX, [input, dim], out, backend, num_threads)


def log_softmax(
    input: ArrayLike,
    dim: int = -1,
    *,
    out: NDArray | None = None,
    backend: str | None = None,
    num_threads: int | None = None,
) -> NDArray:
    r"""Compute the natural logarithm of the softmax along one axis: :math:`x - \max x - \log \sum e^{x - \max x}`.

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
    The formula follows ``aclnnLogSoftmax``.

    Examples
    --------
    >>> import numpy as np
    >>> import ascend_grad as ag
    >>> np.exp(ag.log_softmax([0.0, 0.0]))
    array([0.5, 0.5])
    """
    return run(rowwise.LOG_SOFTMAX, [input, dim], out, backend, num_threads)


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
    r"""Compute the scaled and masked softmax over the last axis.

    It is the softmax of (-10000 where `mask` is True, else :math:`x\cdot` scale).

    A completely masked row gives the uniform value 1/S2, not NaN.

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
    The formula follows ``aclnnScaledMaskedSoftmax``.

    Examples
    --------
    >>> import numpy as np
    >>> import ascend_grad as ag
    >>> mask = np.array([False, False, True, True]).reshape(1, 1, 1, 4)
    >>> ag.scaled_masked_softmax(np.zeros((1, 1, 1, 4)), mask)
    array([[[[0.5, 0.5, 0. , 0. ]]]])
    """
    return run(rowwise.SCALED_MASKED_SOFTMAX, [x, mask, scale, fix_triu_mask], out, backend, num_threads)


def cross_entropy(
    input: ArrayLike,
    target: ArrayLike,
    dim: int = -1,
    *,
    reduction: Literal["mean", "sum", "none"] = "mean",
    ignore_index: int = -100,
    class_weight: ArrayLike | None = None,
    token_weight: ArrayLike | None = None,
    target_prob: ArrayLike | None = None,
    label_smoothing: float = 0.0,
    lse_square_scale: float = 0.0,
    temperature: ArrayLike = 1.0,
    denominator: float | None = None,
    grad_loss: ArrayLike | None = None,
    grad_lse: ArrayLike | None = None,
    grad_log_prob: ArrayLike | None = None,
    grad_entropy: ArrayLike | None = None,
    outputs: Sequence[Literal["lse", "log_prob", "entropy", "predicted", "correct"]] = (),
    return_grad: bool = True,
    out: NDArray | None = None,
    backend: str | None = None,
    num_threads: int | None = None,
) -> CrossEntropy[NDArray]:
    r"""Compute the cross-entropy loss of logits and its gradient in one pass over the rows.

    A row is all of `input` along `dim`, of :math:`V` logits :math:`x`. With :math:`z = x / \mathrm{temperature}`,
    :math:`\mathrm{lse} = \log \sum_v e^{z_v}`, class weights :math:`c`, a token weight :math:`r`, the smoothing
    :math:`s` and targets :math:`t_k` of probabilities :math:`q_k`, the loss of a row is

    .. math::

        r \Bigl( (1 - s) \sum_k q_k c_{t_k} (\mathrm{lse} - z_{t_k}) + \frac{s}{V} \sum_v c_v (\mathrm{lse} - z_v)
        + \mathrm{lse\_square\_scale} \cdot \mathrm{lse}^2 \Bigr)

    Parameters
    ----------
    input : array_like, shape (...)
        The logits :math:`x`. Rank 0 to 8, any strides; float32, float16, bfloat16 or float64.
    target : array_like of int32 or int64
        The index of each row's target, or `ignore_index`: the shape of `input` without `dim`. With `target_prob` there
        is one more axis, the last one, of :math:`K` targets.
    dim : int, default -1
        The axis of the classes.
    reduction : {"mean", "sum", "none"}, default "mean"
        The loss is a weighted mean or the sum over the rows that are not ignored, or one number per row, 0 for ignored
        rows. The mean divides the cross-entropy by the sum of :math:`r c_t`, or of :math:`r` with `target_prob`, and
        the term of the squared lse by the sum of :math:`r`.
    ignore_index : int, default -100
        A target with this value adds nothing. A row without another target is ignored: it has no loss, and a gradient
        of 0.
    class_weight : array_like, shape (V,), optional
        The weights :math:`c` of the classes, of any of the four dtypes; default: ones. A term of weight 0 is 0,
        whatever its logit is.
    token_weight : array_like, optional
        The weight :math:`r` of each row, of any of the four dtypes; default: ones. A row of weight 0 adds nothing,
        whatever it holds.
    target_prob : array_like, optional
        The probabilities :math:`q`, of the shape of `target`, of any of the four dtypes. Equal targets of a row are
        added up. Without it, a row has one target of probability 1.
    label_smoothing : float, default 0.0
        The part :math:`s` of the loss, from 0 to 1, that is spread over all classes.
    lse_square_scale : float, default 0.0
        The factor of the squared lse, which keeps logits from drifting (z-loss).
    temperature : float or array_like, default 1.0
        What logits are divided by: a positive number, or one for each row. A number outside of [2**-60, 2**60] counts
        as the nearest end ([2**-500, 2**500] if `input` is float64).
    denominator : float, optional
        What a mean divides by, instead of the sums of weights: a positive number. Other reductions ignore it.
    grad_loss : float or array_like, optional
        The gradient with respect to the loss, default 1: one number or, with ``reduction="none"``, also one for each
        row, of any of the four dtypes. A row with 0 has a gradient of 0, whatever it holds.
    grad_lse, grad_log_prob, grad_entropy : array_like, optional
        The gradients with respect to the outputs, one number for each row, of any of the four dtypes; default: 0. They
        count whatever the token weight is. Elements of ignored rows are not read. With `target_prob` there is no
        `grad_log_prob`.
    outputs : sequence of {"lse", "log_prob", "entropy", "predicted", "correct"}, default ()
        What to return in addition, as further fields in this order.
    return_grad : bool, default True
        Whether to compute the gradient at all.
    out : ndarray or tensor, optional
        The array for the gradient, as in `softmax_backward`. It may be `input` itself.
    backend, num_threads
        As in `softmax_backward`.

    Returns
    -------
    loss : ndarray
        The loss, shape () or that of the rows; float32, or float64 if `input` is float64. A mean without rows, or whose
        sum of weights is 0, is NaN (and its gradients are 0).
    input_grad : ndarray or None
        The gradient with respect to `input`: `out`, or a new C-contiguous array of its shape and dtype.
    lse, log_prob, entropy, predicted, correct : ndarray
        The requested outputs. Others are no fields, and None as attributes. All but the last have a number for each
        row, and that of an ignored row is 0, or -1 for `predicted`. `predicted` is the class of the largest logit,
        int64, the lowest one of several. `correct` is the number of rows with ``predicted == target``, shape ().
        Floating outputs have the dtype of the loss. `log_prob` and `correct` are of a single target, so they are
        refused with `target_prob`. `lse` is infinite if a logit is positive infinite, or if all are negative infinite.
        The loss, the other outputs and the gradient of such a row are NaN.

    Raises
    ------
    ParamNullptrError
        161001: `input` or `target` is None.
    ParamInvalidError
        161002: an argument is not as described; a target is neither in [0, V) nor `ignore_index`; there are rows of no
        element; an output of a single target is requested with `target_prob` (a dtype or kind: its subclass
        `ParamTypeError`).
    UnsupportedDeviceError
        361001: ``backend="npu"`` where a device is present, as it has no such operator.

    Notes
    -----
    Names and meanings of most arguments follow ``torch.nn.functional.cross_entropy``. Sums leave out one logit that has
    the maximum, so that loss, log-probabilities, entropy and the gradient at the target are accurate to about 1e-5 even
    if the target's probability differs from 1 by 1e-12 only.

    The gradient with respect to :math:`z` is :math:`a p_v - \sum_k w_k [v = t_k] - s_i c_v` with the probabilities
    :math:`p = e^{z - \mathrm{lse}}` and :math:`w_k = g r (1 - s) q_k c_{t_k}`, :math:`s_i = g r s / V`,
    :math:`a = \sum_k w_k + s_i \sum_v c_v + 2 g r\, \mathrm{lse\_square\_scale} \cdot \mathrm{lse}`, for the upstream
    gradient :math:`g`. The outputs add
    :math:`g^{\mathrm{lse}} p_v + g^{\mathrm{log\_prob}} ([v = t] - p_v)
    - g^{\mathrm{entropy}} p_v (z_v - \mathrm{lse} + \mathrm{entropy})`. Pass ``grad_loss=0`` for their gradient alone.

    Smoothing is that of Szegedy et al., "Rethinking the Inception Architecture for Computer
    Vision", 2016; the squared lse is that of Chowdhery et al., "PaLM: Scaling Language Modeling with Pathways", 2022.

    Examples
    --------
    >>> import numpy as np
    >>> import ascend_grad as ag
    >>> loss, input_grad = ag.cross_entropy(np.zeros((2, 4)), np.array([0, 3]))
    >>> loss.round(3)
    np.float64(1.386)
    >>> input_grad
    array([[-0.375,  0.125,  0.125,  0.125],
           [ 0.125,  0.125,  0.125, -0.375]])
    >>> ag.cross_entropy(np.eye(2), np.array([0, 0]), return_grad=False, outputs=("correct",)).correct
    array(1)
    """
    values: list[Any] = [
        input, target, dim, reduction, ignore_index, class_weight, token_weight, target_prob, label_smoothing,
        lse_square_scale, temperature, denominator, grad_loss, grad_lse, grad_log_prob, grad_entropy, outputs,
        return_grad
    ]  # fmt: skip
    results = dict(zip(losses.CROSS_ENTROPY.results, run(losses.CROSS_ENTROPY, values, out, backend, num_threads)))
    requested = values[losses.CROSS_ENTROPY.slots["outputs"]]
    return with_outputs(
        CrossEntropy, requested, (results["loss"], results["input_grad"], *map(results.__getitem__, requested))
    )


def fused_linear_cross_entropy_loss_grad(
    grad: ArrayLike,
    input: ArrayLike,
    weight: ArrayLike,
    target_mask: ArrayLike,
    masked_target: ArrayLike,
    label_smoothing: float = 0.0,
    logits_max: ArrayLike | None = None,
    sum_exp_logits: ArrayLike | None = None,
    softmax: ArrayLike | None = None,
    *,
    output_mask: Sequence[bool] = (True, True),
    workspace_bytes: int | None = None,
    filter_eps: float = 0.0,
    out: Sequence[NDArray | None] | None = None,
    backend: str | None = None,
    num_threads: int | None = None,
) -> tuple[NDArray | Any, NDArray | Any]:
    r"""Compute the gradients of a linear layer followed by a cross-entropy loss, without storing all logits.

    The layer's logits are :math:`X W^T`, of shape (BT, V) for BT tokens and the V rows of a vocabulary or of a shard of
    it. With the target :math:`t_i` of row i, if it lives in this shard,

    .. math::
        P_{iv} = g_i \left(\mathrm{softmax}_{iv} - [v = t_i]\right), \qquad
        \mathrm{input\_grad} = P W, \qquad \mathrm{weight\_grad} = P^T X

    The softmax is given, or recomputed block by block as
    :math:`e^{(X W^T)_{iv} - \mathrm{logits\_max}_i} / \mathrm{sum\_exp\_logits}_i`, which takes less memory.

    Parameters
    ----------
    grad : array_like, shape (BT,)
        The gradient :math:`g` with respect to the loss of each row; float32, or float64 if `input` is float64. A row
        whose gradient is 0 is absent: its input gradient is 0, and it adds nothing to the weight's gradient, whatever
        values it holds.
    input : array_like, shape (BT, H)
        The layer's input :math:`X`; float32, float16, bfloat16 or float64.
    weight : array_like, shape (V, H)
        The layer's weight :math:`W`, of the dtype of `input`.
    target_mask : array_like of bool, shape (BT,), or of uint8, one-dimensional
        True where the row's target lives in another shard of the vocabulary: the row then has no one-hot here, but its
        softmax counts. An array of uint8 holds row i as bit ``i % 8`` of byte ``i // 8`` (zeros and ones, one for each
        row, have to be bool); bits beyond BT are not looked at.
    masked_target : array_like of int32 or int64, shape (BT,)
        The target's row in `weight`; any value where the mask is set. A tensor of torch_npu may hold a row outside of
        `weight` without an error. Then the row of ``input_grad`` and all of ``weight_grad`` are NaN.
    label_smoothing : float, default 0.0
        Must be 0.
    logits_max, sum_exp_logits : array_like, shape (BT,), optional
        Largest logit of each row, and sum of exp(logit - largest), over the whole vocabulary; dtype as `grad`. Both
        are needed unless `softmax` is given.
    softmax : array_like, shape (BT, V), optional
        The probabilities; dtype as `grad`. If given, `logits_max` and `sum_exp_logits` are ignored. Never modified.
    output_mask : pair of bool, default (True, True)
        Which of the two gradients to compute; the other one is None.
    workspace_bytes : int, optional
        Maximum bytes of the workspace. The least is 4 MiB (4194304), or what a panel of all features takes, if that is
        more; ``workspace_size(..., workspace_bytes=0)`` returns it. The default is 64 MiB, or a quarter of the bytes
        of the matrices that the call takes and returns, if that is more, and never below the least. In addition, a call
        takes an accumulator of the size of `input` in float32 if results have 16 bits, and a copy of each result whose
        `out` overlaps an input. It never takes memory of the size of the logits. `workspace_size` returns the total.
    filter_eps : float, default 0.0
        If positive, tiles of :math:`P` without an entry above it in magnitude may be skipped. Plans that pack nothing
        skip no tile. See Notes.
    out : pair of (ndarray or None), optional
        The arrays for the results, each as in `softmax_backward`; None for a new array. They must not overlap each
        other. The entry of a result that `output_mask` skips must be None.
    backend, num_threads
        As in `softmax_backward`.

    Returns
    -------
    input_grad : ndarray, shape (BT, H), or None
        The entry of `out`, or a new C-contiguous array of the dtype of `input`.
    weight_grad : ndarray, shape (V, H), or None
        The entry of `out`, or a new C-contiguous array of the dtype of `weight`.

    Raises
    ------
    ParamNullptrError
        161001: a required array is None, or `softmax` is None and so is `logits_max` or `sum_exp_logits`.
    ParamInvalidError
        161002: a dtype, a shape, `label_smoothing`, `workspace_bytes`, `filter_eps` or `out` is not as described, or a
        target is out of range where the mask is not set (a dtype: its subclass `ParamTypeError`).

    Notes
    -----
    The formula follows ``aclnnFusedLinearCrossEntropyLossGrad``. Products are accumulated in float32 (float64 for
    float64) and rounded once. With bfloat16 inputs each entry of :math:`P` is rounded to bfloat16 before the two
    products, as the device does; with float16 it stays float32.

    A skipped tile changes ``input_grad[i]`` by at most ``filter_eps * sum_v |weight[v]|`` and ``weight_grad[v]`` by at
    most ``filter_eps * sum_i |input[i]|``, elementwise.

    Examples
    --------
    >>> import numpy as np
    >>> import ascend_grad as ag
    >>> x, w = np.eye(2), np.zeros((4, 2))
    >>> input_grad, weight_grad = ag.fused_linear_cross_entropy_loss_grad(
    ...     np.ones(2),
    ...     x,
    ...     w,
    ...     np.zeros(2, bool),
    ...     np.array([0, 3]),
    ...     logits_max=np.zeros(2),
    ...     sum_exp_logits=np.full(2, 4.0),
    ... )
    >>> weight_grad.T
    array([[-0.75,  0.25,  0.25,  0.25],
           [ 0.25,  0.25,  0.25, -0.75]])
    """
    values = [
        grad, input, weight, target_mask, masked_target, label_smoothing, logits_max, sum_exp_logits, softmax,
        output_mask, workspace_bytes, filter_eps
    ]  # fmt: skip
    return run(linear.FUSED_LINEAR_CROSS_ENTROPY_LOSS_GRAD, values, out, backend, num_threads)


def fused_linear_online_max_sum(
    input: ArrayLike,
    weight: ArrayLike,
    target: ArrayLike,
    vocab_start_index: int,
    vocab_end_index: int,
    *,
    return_logits: bool = False,
    backend: str | None = None,
    num_threads: int | None = None,
) -> OnlineMaxSum:
    r"""Compute statistics of a linear layer's logits over one shard of the vocabulary, without storing all logits.

    With the logits :math:`L = X W^T` and the target's row :math:`t_i`,

    .. math::
        m_i = \max_v L_{iv}, \qquad s_i = \sum_v e^{L_{iv} - m_i}, \qquad p_i = L_{i t_i} - m_i

    Parameters
    ----------
    input : array_like, shape (BT, H)
        The layer's input :math:`X`; float32, float16, bfloat16 or float64.
    weight : array_like, shape (V, H)
        The shard of the layer's weight :math:`W`, of the dtype of `input`, with at least one row.
    target : array_like of int32 or int64, shape (BT,)
        Ids in the whole vocabulary; any value.
    vocab_start_index, vocab_end_index : int
        The ids that live in this shard, the end exclusive: ``0 <= start <= end`` and ``end - start <= V``.
    return_logits : bool, default False
        Whether to return the logits, too.
    backend, num_threads
        As in `softmax_backward`.

    Returns
    -------
    logits_max, sum_exp_logits, predicted_logits : ndarray, shape (BT,)
        :math:`m`, :math:`s` and :math:`p`, the last one 0 if the target lives in another shard; float32, or float64 if
        `input` is float64.
    target_mask : ndarray of uint8, shape ((BT + 7) // 8,)
        A bit for every row, 1 where the target lives in another shard: row i is bit ``i % 8`` of byte ``i // 8``.
    masked_target : ndarray, shape (BT,)
        ``target - vocab_start_index``, or 0 where the target lives in another shard, of the dtype of `target`.
    vocab_parallel_logits : ndarray, shape (BT, V), or None
        The logits in the dtype of `input`, if requested.

    Raises
    ------
    ParamNullptrError
        161001: `input`, `weight` or `target` is None.
    ParamInvalidError
        161002: a dtype, a shape, the bounds or `return_logits` are not as described (a dtype: its subclass
        `ParamTypeError`).

    Notes
    -----
    The formula follows ``aclnnFusedLinearOnlineMaxSum``, for the vocabulary-parallel cross-entropy of Megatron-LM. The
    statistics are computed from unrounded logits; only the returned logits are rounded.

    Examples
    --------
    >>> import numpy as np
    >>> import ascend_grad as ag
    >>> statistics = ag.fused_linear_online_max_sum(np.eye(2), np.zeros((4, 2)), np.array([5, 9]), 4, 8)
    >>> statistics.sum_exp_logits
    array([4., 4.])
    >>> statistics.masked_target, statistics.target_mask
    (array([1, 0]), array([2], dtype=uint8))
    """
    values = [input, weight, target, vocab_start_index, vocab_end_index, return_logits]
    return OnlineMaxSum._make(run(linear.FUSED_LINEAR_ONLINE_MAX_SUM, values, None, backend, num_threads))


def fused_cross_entropy_loss_with_max_sum(
    logits_max: ArrayLike,
    sum_exp_logits: ArrayLike,
    predicted_logits: ArrayLike,
    label_smoothing: float = 0.0,
    *,
    vocab_parallel_logits: ArrayLike | None = None,
    out: Sequence[NDArray | None] | None = None,
    backend: str | None = None,
    num_threads: int | None = None,
) -> tuple[NDArray, NDArray | Any]:
    r"""Compute the cross-entropy loss of each row from statistics of its logits, and the softmax if logits are given.

    .. math::
        \mathrm{loss}_i = \log s_i - p_i, \qquad \mathrm{softmax}_{iv} = e^{L_{iv} - m_i} / s_i

    Parameters
    ----------
    logits_max, sum_exp_logits, predicted_logits : array_like, shape (BT,)
        :math:`m`, :math:`s` and :math:`p` of `fused_linear_online_max_sum`, over the whole vocabulary; float32 or
        float64, all three the same.
    label_smoothing : float, default 0.0
        Must be 0.
    vocab_parallel_logits : array_like, shape (BT, V), optional
        The logits :math:`L` of one shard; float32, float16 or bfloat16 (float64 if `logits_max` is float64).
    out : pair of (ndarray or None), optional
        The arrays for loss and softmax, each as in `softmax_backward`; None for a new array. They must not overlap each
        other. Without `vocab_parallel_logits` the second entry must be None.
    backend, num_threads
        As in `softmax_backward`.

    Returns
    -------
    loss : ndarray, shape (BT,)
        The entry of `out`, or a new array of the dtype of `logits_max`.
    softmax : ndarray, shape (BT, V), or None
        The entry of `out`, or a new C-contiguous array of the dtype of `logits_max`; None without
        `vocab_parallel_logits`.

    Raises
    ------
    ParamNullptrError
        161001: one of the three statistics is None.
    ParamInvalidError
        161002: a dtype, a shape, `label_smoothing` or `out` is not as described (a dtype: its subclass
        `ParamTypeError`).

    Notes
    -----
    The formula follows ``aclnnFusedCrossEntropyLossWithMaxSum``, for the vocabulary-parallel cross-entropy of
    Megatron-LM.

    Examples
    --------
    >>> import numpy as np
    >>> import ascend_grad as ag
    >>> loss, softmax = ag.fused_cross_entropy_loss_with_max_sum(
    ...     np.zeros(1), np.full(1, 4.0), np.zeros(1), vocab_parallel_logits=np.zeros((1, 4))
    ... )
    >>> loss.round(3), softmax
    (array([1.386]), array([[0.25, 0.25, 0.25, 0.25]]))
    """
    values = [logits_max, sum_exp_logits, predicted_logits, label_smoothing, vocab_parallel_logits]
    return run(linear.FUSED_CROSS_ENTROPY_LOSS_WITH_MAX_SUM, values, out, backend, num_threads)


def linear_cross_entropy(
    input: ArrayLike,
    weight: ArrayLike,
    target: ArrayLike,
    *,
    reduction: Literal["mean", "sum", "none"] = "mean",
    ignore_index: int = -100,
    grad_loss: ArrayLike | None = None,
    vocab_start_index: int = 0,
    return_grad: bool = True,
    output_mask: Sequence[bool] = (True, True),
    workspace_bytes: int | None = None,
    filter_eps: float = 0.0,
    token_weight: ArrayLike | None = None,
    class_weight: ArrayLike | None = None,
    target_prob: ArrayLike | None = None,
    label_smoothing: float = 0.0,
    lse_square_scale: float = 0.0,
    temperature: ArrayLike = 1.0,
    denominator: float | None = None,
    bias: ArrayLike | None = None,
    logit_scale: float = 1.0,
    softcap: float | None = None,
    outputs: Sequence[str] = (),
    backend: str | None = None,
    num_threads: int | None = None,
) -> LinearCrossEntropy[NDArray]:
    r"""Compute the cross-entropy loss of a linear layer and its gradients in one call, without storing all logits.

    By default the logits are :math:`z = X W^T`, and with :math:`\mathrm{lse}_i = \log \sum_v e^{z_{iv}}`

    .. math:: \mathrm{loss}_i = \mathrm{lse}_i - z_{i t_i}

    All options together compute, with the products :math:`u = X W^T + \mathrm{bias}`, the class weights :math:`c`, the
    token weights :math:`r` and the label smoothing :math:`s`,

    .. math::
        z &= \mathrm{softcap} \, \tanh(\mathrm{logit\_scale} \; u / \mathrm{softcap}) / \mathrm{temperature} \\
        \mathrm{loss}_i &= r_i \Big( (1 - s) \sum_k q_{ik} c_{t_{ik}} (\mathrm{lse}_i - z_{i t_{ik}})
        + \frac{s}{V} \sum_v c_v (\mathrm{lse}_i - z_{iv}) + \mathrm{lse\_square\_scale} \; \mathrm{lse}_i^2 \Big)

    Parameters
    ----------
    input : array_like, shape (BT, H)
        The layer's input :math:`X`; float32, float16, bfloat16 or float64.
    weight : array_like, shape (V, H)
        The layer's weight :math:`W`, of the dtype of `input`.
    target : array_like of int32 or int64, shape (BT,), or (BT, K) with `target_prob`
        Ids: ``target - vocab_start_index`` is the row of `weight`; or `ignore_index`. Of tensors of torch_npu any other
        value is no error: the row's loss, its row of ``input_grad`` and all of ``weight_grad`` are NaN.
    reduction : {"mean", "sum", "none"}, default "mean"
        The loss is the mean or the sum over the rows that are not ignored, or one number per row, 0 for ignored rows.
    ignore_index : int, default -100
        Rows with this target have no loss and no gradient.
    grad_loss : float or array_like, shape (BT,), optional
        The gradient with respect to the loss, default 1: one number or, with ``reduction="none"``, also an array of any
        of the four dtypes with one number per row.
    vocab_start_index : int, default 0
        The id of the first row of `weight`.
    return_grad : bool, default True
        Whether to compute gradients at all.
    output_mask : pair of bool, default (True, True)
        Which of the two gradients to compute.
    workspace_bytes, filter_eps
        As in `fused_linear_cross_entropy_loss_grad`. The gradient of the bias is never filtered.
    token_weight : array_like, shape (BT,), optional
        Factors :math:`r` of the losses of the rows, of any of the four dtypes. A row of weight 0 adds nothing to the
        loss and to the gradients, whatever values it holds.
    class_weight : array_like, shape (V,), optional
        Factors :math:`c` of the vocabulary entries, of any of the four dtypes. A term of weight 0 is 0, whatever its
        logit is.
    target_prob : array_like, shape (BT, K), optional
        Probabilities :math:`q` of K targets in each row, of any of the four dtypes. A target that is `ignore_index`
        adds nothing, and a row of such targets alone is ignored. Targets that occur twice in a row are added up.
    label_smoothing : float, default 0.0
        The share :math:`s` of the loss that goes to all vocabulary entries, from 0 to 1.
    lse_square_scale : float, default 0.0
        The factor of the squared :math:`\mathrm{lse}` (z-loss).
    temperature : float or array_like, shape (BT,), default 1.0
        The divisor of the logits, above 0: one number, or one for each row, of any of the four dtypes. A `temperature`,
        `softcap` or `logit_scale` beyond 2**60 (2**500 if `input` is float64) counts as that number, and a
        `temperature` or `softcap` below 2**-60 (2**-500) as that one.
    denominator : float, optional
        The divisor of a mean, above 0. The default is :math:`\sum_i r_i c_{t_i}` over the rows that are not ignored;
        :math:`\sum_i r_i` for the squared :math:`\mathrm{lse}`, and with `target_prob`. Ranks that share a batch pass
        the sum over all ranks.
    bias : array_like, shape (V,), optional
        The layer's bias, of any of the four dtypes. If `input` is not float64, a finite number above the range of
        float32 counts as its largest number, and one below it as negative infinity.
    logit_scale : float, default 1.0
        The factor of the products.
    softcap : float, optional
        The bound of the logits before `temperature` divides them, above 0. None: the logits are not bounded.
    outputs : sequence of {"lse", "log_prob", "entropy", "predicted", "correct"}, default ()
        Results beside the loss, in further fields. With ``return_grad=False`` no array of the size of `weight` is kept.
    backend, num_threads
        As in `softmax_backward`. Of the options from `token_weight` on, a device takes `token_weight`, `class_weight`,
        `denominator` and the outputs `lse` and `log_prob`.

    Returns
    -------
    loss : ndarray, shape () or (BT,)
        The loss; float32, or float64 if `input` is float64. A mean over no rows, or whose sum of
        weights is 0, is NaN (and its gradients are 0).
    input_grad : ndarray, shape (BT, H), or None
        The gradient with respect to `input`, in its dtype.
    weight_grad : ndarray, shape (V, H), or None
        The gradient with respect to `weight`, in its dtype.
    bias_grad : ndarray, shape (V,), or None
        The gradient with respect to `bias`, in its dtype, summed in float64. The field exists if `bias` is given.
    lse, log_prob, entropy : ndarray, shape (BT,)
        Of the logits, with the dtype of the loss: :math:`\mathrm{lse}`, the target's log-probability, and the entropy
        in nats. They are 0 for ignored rows. The lse is infinite if a logit is positive infinite, or if all are
        negative infinite. The loss, the other outputs and the gradients of such a row are NaN.
    predicted : ndarray of int64, shape (BT,)
        The id of the largest logit, the lowest one of several; -1 for ignored rows.
    correct : ndarray of int64, shape ()
        The number of rows whose target is `predicted`.

    Raises
    ------
    ParamNullptrError
        161001: `input`, `weight` or `target` is None.
    ParamInvalidError
        161002: an argument is not as described, or a target is neither in the vocabulary nor `ignore_index` (a dtype
        or kind: its subclass `ParamTypeError`).

    Notes
    -----
    Names and meanings of the arguments follow ``torch.nn.functional.linear_cross_entropy``. The formulas follow
    `fused_linear_online_max_sum`, `fused_cross_entropy_loss_with_max_sum` and `fused_linear_cross_entropy_loss_grad`.

    Losses, log-probabilities, entropies and the gradient at the target keep their digits where the target's probability
    is almost 1: a loss of 1e-12 has a relative error below 1e-4 in every dtype, apart from the rounding of the logits.

    Examples
    --------
    >>> import numpy as np
    >>> import ascend_grad as ag
    >>> loss, input_grad, weight_grad = ag.linear_cross_entropy(np.eye(2), np.zeros((4, 2)), np.array([0, 3]))
    >>> loss.round(3)
    np.float64(1.386)
    >>> weight_grad.T
    array([[-0.375,  0.125,  0.125,  0.125],
           [ 0.125,  0.125,  0.125, -0.375]])
    >>> ag.linear_cross_entropy(
    ...     np.eye(2), 3 * np.eye(4, 2), np.array([0, 0]), return_grad=False, outputs=("predicted", "correct")
    ... )[3:]
    (array([0, 1]), array(1))
    """
    values = [
        input, weight, target, reduction, ignore_index, grad_loss, vocab_start_index, return_grad, output_mask,
        workspace_bytes, filter_eps, token_weight, class_weight, target_prob, label_smoothing, lse_square_scale,
        temperature, denominator, bias, logit_scale, softcap, outputs
    ]  # fmt: skip
    results = run(linear.LINEAR_CROSS_ENTROPY, values, None, backend, num_threads)
    names = (*(("bias_grad",) if bias is not None else ()), *outputs)
    if not names:
        return LinearCrossEntropy._make(results[:3])
    by_name = dict(zip(linear.LINEAR_CROSS_ENTROPY.results, results))
    return with_outputs(LinearCrossEntropy, names, (*results[:3], *(by_name[name] for name in names)))


def linear_cross_entropy_backward(
    input: ArrayLike,
    weight: ArrayLike,
    target: ArrayLike,
    *,
    lse: ArrayLike,
    entropy: ArrayLike | None = None,
    reduction: Literal["mean", "sum", "none"] = "mean",
    ignore_index: int = -100,
    grad_loss: ArrayLike | None = None,
    grad_lse: ArrayLike | None = None,
    grad_log_prob: ArrayLike | None = None,
    grad_entropy: ArrayLike | None = None,
    vocab_start_index: int = 0,
    output_mask: Sequence[bool] = (True, True),
    workspace_bytes: int | None = None,
    filter_eps: float = 0.0,
    token_weight: ArrayLike | None = None,
    class_weight: ArrayLike | None = None,
    target_prob: ArrayLike | None = None,
    label_smoothing: float = 0.0,
    lse_square_scale: float = 0.0,
    temperature: ArrayLike = 1.0,
    denominator: float | None = None,
    bias: ArrayLike | None = None,
    logit_scale: float = 1.0,
    softcap: float | None = None,
    backend: str | None = None,
    num_threads: int | None = None,
) -> LinearCrossEntropyGradients:
    r"""Compute the gradients of `linear_cross_entropy` and of its outputs, for upstream gradients that are known later.

    The logits :math:`z` are computed again, block by block. With :math:`p = e^{z - \mathrm{lse}}` and the upstream
    gradients :math:`g`, the outputs add to the gradient of the loss with respect to :math:`z_{iv}`

    .. math::
        g^{\mathrm{lse}}_i p_{iv} + g^{\mathrm{log\_prob}}_i ([v = t_i] - p_{iv})
        - g^{\mathrm{entropy}}_i p_{iv} (z_{iv} - \mathrm{lse}_i + \mathrm{entropy}_i)

    Parameters
    ----------
    input, weight, target
        As in `linear_cross_entropy`.
    lse : array_like, shape (BT,)
        The output of `linear_cross_entropy` with this name, of any of the four dtypes.
    entropy : array_like, shape (BT,), optional
        The output with this name. It is required if `grad_entropy` is given.
    reduction, ignore_index
        As in `linear_cross_entropy`.
    grad_loss : float or array_like, shape (BT,), optional
        The gradient with respect to the loss, as in `linear_cross_entropy`. Here None stands for 0.
    grad_lse, grad_log_prob, grad_entropy : array_like, shape (BT,), optional
        The gradients with respect to the outputs, of any of the four dtypes. None stands for 0. Elements of ignored
        rows are not read.
    vocab_start_index, output_mask, workspace_bytes, filter_eps
        As in `linear_cross_entropy`.
    token_weight, class_weight, target_prob, label_smoothing, lse_square_scale, temperature, denominator
        As in `linear_cross_entropy`. With `target_prob` there is no `grad_log_prob`.
    bias, logit_scale, softcap
        As in `linear_cross_entropy`.
    backend, num_threads
        As in `softmax_backward`. A device computes calls without `grad_entropy` and without options other than
        `token_weight`, `class_weight` and `denominator`.

    Returns
    -------
    input_grad : ndarray, shape (BT, H), or None
        The gradient with respect to `input`, in its dtype.
    weight_grad : ndarray, shape (V, H), or None
        The gradient with respect to `weight`, in its dtype.
    bias_grad : ndarray, shape (V,), or None
        The gradient with respect to `bias`, in its dtype, summed in float64.

    Raises
    ------
    ParamNullptrError
        161001: `input`, `weight`, `target` or `lse` is None, or `entropy` is None and `grad_entropy` is given.
    ParamInvalidError
        161002: `grad_loss`, `grad_lse`, `grad_log_prob` and `grad_entropy` are all None, or an argument is not as
        described (a dtype or kind: its subclass `ParamTypeError`).

    Notes
    -----
    The probabilities are computed from `lse` and from logits that are rounded to the dtype of sums. The gradient at a
    target whose probability is 1 up to such a rounding error is 0, where `linear_cross_entropy` keeps its digits.

    Examples
    --------
    >>> import numpy as np
    >>> import ascend_grad as ag
    >>> x, w, target = np.eye(2), np.zeros((4, 2)), np.array([0, 3])
    >>> result = ag.linear_cross_entropy(x, w, target, return_grad=False, outputs=("lse",))
    >>> ag.linear_cross_entropy_backward(x, w, target, lse=result.lse, grad_loss=1.0).weight_grad.T
    array([[-0.375,  0.125,  0.125,  0.125],
           [ 0.125,  0.125,  0.125, -0.375]])
    """
    values = [
        input, weight, target, lse, entropy, reduction, ignore_index, grad_loss, grad_lse, grad_log_prob, grad_entropy,
        vocab_start_index, output_mask, workspace_bytes, filter_eps, token_weight, class_weight, target_prob,
        label_smoothing, lse_square_scale, temperature, denominator, bias, logit_scale, softcap
    ]  # fmt: skip
    results = run(linear.LINEAR_CROSS_ENTROPY_BACKWARD, values, None, backend, num_threads)
    return LinearCrossEntropyGradients._make(results)


def linear_top_k(
    input: ArrayLike,
    weight: ArrayLike,
    k: int,
    *,
    temperature: ArrayLike = 1.0,
    bias: ArrayLike | None = None,
    logit_scale: float = 1.0,
    softcap: float | None = None,
    workspace_bytes: int | None = None,
    backend: str | None = None,
    num_threads: int | None = None,
) -> LinearTopK[NDArray]:
    r"""Compute the k largest log-probabilities of a linear layer for each row, without storing all logits.

    The log-probabilities are a log-softmax over the whole vocabulary. The logits :math:`z` are the logits of
    `linear_cross_entropy`, with the products :math:`u = X W^T + \mathrm{bias}`:

    .. math::
        z &= \mathrm{softcap} \, \tanh(\mathrm{logit\_scale} \; u / \mathrm{softcap}) / \mathrm{temperature} \\
        \log p_{iv} &= z_{iv} - \log \sum_w e^{z_{iw}}

    Without `softcap`, :math:`z = \mathrm{logit\_scale} \; u / \mathrm{temperature}`.

    Parameters
    ----------
    input : array_like, shape (BT, H)
        The layer's input :math:`X`; float32, float16, bfloat16 or float64.
    weight : array_like, shape (V, H)
        The layer's weight :math:`W`, of the dtype of `input`, with at least one row.
    k : int
        The number of log-probabilities of each row: 1 to 128, and at most V.
    temperature : float or array_like, shape (BT,), default 1.0
        The divisor of the logits, positive and finite: one number, or one for each row, of any of the four dtypes. A
        number outside of [2**-60, 2**60] counts as the nearest end ([2**-500, 2**500] if `input` is float64).
    bias : array_like, shape (V,), optional
        The layer's bias, of any of the four dtypes. Without `softcap`, negative infinity
        excludes a vocabulary entry.
    logit_scale : float, default 1.0
        The factor of the products.
    softcap : float, optional
        The bound of the logits before `temperature` divides them, above 0. None: the logits are not bounded. A
        `softcap` or `logit_scale` beyond 2**60 (2**500 if `input` is float64) counts as that number, and a `softcap`
        below 2**-60 (2**-500) as that one.
    workspace_bytes
        As in `fused_linear_cross_entropy_loss_grad`.
    backend, num_threads
        As in `softmax_backward`.

    Returns
    -------
    log_prob : ndarray, shape (BT, k)
        The k largest log-probabilities of each row, from the largest down; float32, or float64 if `input` is float64.
    index : ndarray of int64, shape (BT, k)
        Their rows of `weight`. Of equal logits the one with the lower index comes first.

    Raises
    ------
    ParamNullptrError
        161001: `input` or `weight` is None.
    ParamInvalidError
        161002: an argument is not as described (a dtype or kind: its subclass `ParamTypeError`).
    UnsupportedDeviceError
        361001: an Ascend NPU is requested, which does not have this operator.

    Notes
    -----
    Logits are compared before they are divided by the temperature, as they are computed: in float32, or in float64 for
    float64. Logits that are rounded to the cap, or to the same number below it, are equal. A log-probability close to 0
    has a small relative error, too.

    If a logit of a row is NaN or positive infinite, or if all are negative infinite, the row's log-softmax is NaN. All
    log-probabilities of the row are NaN then, and its indices are 0 to k - 1. A negative infinite logit in another row
    has the log-probability negative infinity.

    The formula is that of `log_softmax`, and the selection that of ``torch.topk``. The method is the online softmax
    with a running list of the largest logits: M. Milakov, N. Gimelshein, "Online normalizer calculation for softmax",
    arXiv:1805.02867.

    Examples
    --------
    >>> import numpy as np
    >>> import ascend_grad as ag
    >>> logits = np.log([[0.5, 0.125, 0.25, 0.125]])
    >>> log_prob, index = ag.linear_top_k(np.eye(1), logits.T, 3)
    >>> index
    array([[0, 2, 1]])
    >>> np.exp(log_prob).round(3)
    array([[0.5  , 0.25 , 0.125]])
    """
    values = [input, weight, k, temperature, bias, logit_scale, softcap, workspace_bytes]
    return LinearTopK._make(run(linear.LINEAR_TOP_K, values, None, backend, num_threads))
