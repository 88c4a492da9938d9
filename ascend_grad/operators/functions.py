"""The public functions of the device's documents: softmax, its gradients, and the fused linear operators."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from numpy.typing import ArrayLike

from .._dispatch import run
from ..arguments import LAST, axis_named_dim
from . import table
from .results import OnlineMaxSum, Result
from .signatures import documented


def softmax_backward(
    grad_output: ArrayLike,
    output: ArrayLike,
    axis: int = LAST,
    *,
    dim: int | None = None,
    out: Result | None = None,
    backend: str | None = None,
    num_threads: int | None = None,
) -> Result:
    r"""Compute the gradient with respect to the input of a softmax.

    It returns ``(g - sum(g * y)) * y`` along the axis, for the gradient g and the result y of the softmax::

        grad = ag.softmax_backward(grad_output, ag.softmax(x))

    Parameters
    ----------
    grad_output : array_like, shape (...)
        The gradient :math:`g` with respect to the result. Rank 0 to 8; float32, float16, bfloat16 or float64.
    output : array_like, shape (...)
        The softmax's result :math:`y`, of the shape and dtype of `grad_output`. Any values are accepted.
    axis : int, default -1
        The axis of the softmax. (The default of SciPy's functions is all axes.)
    dim : int, optional
        Another name of `axis`.

    Returns
    -------
    ndarray
        The gradient, of the shape and dtype of `grad_output`.

    Other Parameters
    ----------------
    out : ndarray or tensor, optional
        The array for the result, which is returned instead of a new one: of the result's shape, any strides, and any of
        the four floating dtypes (the accumulator is rounded once, to that dtype). It may be one of the inputs or
        overlap them. A new array of NumPy has the axis order of the first input if that is dense (NumPy's order
        ``"K"``), otherwise C order.
    backend : {"auto", "cpu", "npu", "reference"}, optional
        The backend; default: `use_backend`, then ``ASCEND_GRAD_BACKEND``, then an Ascend NPU if it supports the call.
    num_threads : int, optional
        Number of threads on the CPU; default: `set_num_threads`, then ``ASCEND_GRAD_NUM_THREADS``, then OpenMP's own
        setting. The result does not depend on it.

    Raises
    ------
    ParamNullptrError
        161001: a required array is None.
    ParamInvalidError
        161002: an argument is not as described (a dtype or kind: its subclass `ParamTypeError`).
    BackendUnavailableError
        An array is on an unsupported device, or the requested backend cannot compute the call.

    Notes
    -----
    .. math:: \mathrm{out} = (g - \sum_{\mathrm{axis}} g\,y)\; y

    All operators take arrays of any library that offers DLPack on the CPU (PyTorch's tensors, JAX's arrays), and return
    arrays of the same library, over the same memory. All arrays of a call belong to one library. Targets, weights of
    tokens and classes, and the other arguments that ``docs/arrays.md`` lists are an exception: they may be NumPy's if
    the matrices or logits belong to another library, or the reverse.

    Arrays on an Ascend NPU are also accepted. Calls on arrays of `npu.asarray` return such arrays and are done when
    they return. Calls on tensors of torch_npu return such tensors and are in the order of torch's current stream, as
    torch's own operators are. They do not wait, copy nothing to the host, and look at no value. The exceptions are
    calls of the linear operators with H = 0 or V = 0, which are computed on the host and wait. All arrays of a call are
    of one kind, on one device.

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
    if dim is not None:
        axis = axis_named_dim(axis, dim, "softmax_backward")
    return run(table.SOFTMAX_BACKWARD, [grad_output, output, axis], out, backend, num_threads)


@documented(like=softmax_backward)
def log_softmax_backward(
    grad_output: ArrayLike,
    output: ArrayLike,
    axis: int = LAST,
    *,
    dim: int | None = None,
    out: Result | None = None,
    backend: str | None = None,
    num_threads: int | None = None,
) -> Result:
    r"""Compute the gradient with respect to the input of a log-softmax.

    It returns ``g - exp(y) * sum(g)`` along the axis, for the gradient g and the result y of the log-softmax::

        grad = ag.log_softmax_backward(grad_output, ag.log_softmax(x))

    Parameters
    ----------
    output : array_like, shape (...)
        The log-softmax's result :math:`y` (natural logarithms), of the shape and dtype of `grad_output`.

    Notes
    -----
    .. math:: \mathrm{out} = g - e^{y} \sum_{\mathrm{axis}} g

    The formula follows ``aclnnLogSoftmaxBackward``.

    Examples
    --------
    >>> import numpy as np
    >>> import ascend_grad as ag
    >>> ag.log_softmax_backward(np.array([1.0, 0.0]), np.log([0.25, 0.75]))
    array([ 0.75, -0.75])
    """
    if dim is not None:
        axis = axis_named_dim(axis, dim, "log_softmax_backward")
    return run(table.LOG_SOFTMAX_BACKWARD, [grad_output, output, axis], out, backend, num_threads)


@documented(like=softmax_backward)
def scaled_masked_softmax_backward(
    grad_output: ArrayLike,
    y: ArrayLike,
    mask: ArrayLike,
    scale: float = 1.0,
    fix_triu_mask: bool = False,
    *,
    out: Result | None = None,
    backend: str | None = None,
    num_threads: int | None = None,
) -> Result:
    r"""Compute the gradient with respect to the input of a scaled and masked softmax over the last axis.

    It returns ``(g - sum(g * y)) * y * scale``, and exactly +0 where `mask` is True, even if g or y is NaN there. The
    sum includes the masked elements::

        grad = ag.scaled_masked_softmax_backward(grad_output, y, mask, scale)

    Parameters
    ----------
    grad_output : array_like, shape (B, N, S1, S2)
        The gradient :math:`g` with respect to the forward result; float32, float16, bfloat16 or float64.
    y : array_like, shape (B, N, S1, S2)
        The forward result, of the dtype of `grad_output`.
    mask : array_like of bool, shape (B or 1, N or 1, S1, S2)
        True where the position is masked out.
    scale : float, default 1.0
        The factor of the input :math:`x` of the softmax. Rounded to float32 first, except for float64 arrays.
    fix_triu_mask : bool, default False
        Must be False.

    Notes
    -----
    .. math:: d = (g - \sum_{-1} g\,y)\; y, \qquad \mathrm{out} = 0 \text{ where mask, else } d \cdot \mathrm{scale}

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
    return run(table.SCALED_MASKED_SOFTMAX_BACKWARD, values, out, backend, num_threads)


@documented(like=softmax_backward)
def softmax(
    input: ArrayLike,
    axis: int = LAST,
    *,
    dim: int | None = None,
    out: Result | None = None,
    backend: str | None = None,
    num_threads: int | None = None,
) -> Result:
    r"""Compute the softmax along one axis.

    It returns ``exp(x - max(x)) / sum(exp(x - max(x)))``::

        y = ag.softmax(x)

    Parameters
    ----------
    input : array_like, shape (...)
        The logits. Rank 0 to 8; float32, float16, bfloat16 or float64. Integers and truth values become float64.
    axis : int, default -1
        The axis of the softmax.

    Returns
    -------
    ndarray
        The result, of the shape and dtype of `input`.

    Notes
    -----
    .. math:: y = e^{x - \max x} \Big/ \sum_{\mathrm{axis}} e^{x - \max x}

    The formula follows ``aclnnSoftmax``. On the CPU an exponential below the smallest normal number of float32 is 0,
    here and in all operators, unless the arrays are float64.

    Examples
    --------
    >>> import ascend_grad as ag
    >>> ag.softmax([0.0, 0.0])
    array([0.5, 0.5])
    """
    if dim is not None:
        axis = axis_named_dim(axis, dim, "softmax")
    return run(table.SOFTMAX, [input, axis], out, backend, num_threads)


@documented(like=softmax)
def log_softmax(
    input: ArrayLike,
    axis: int = LAST,
    *,
    dim: int | None = None,
    out: Result | None = None,
    backend: str | None = None,
    num_threads: int | None = None,
) -> Result:
    r"""Compute the natural logarithm of the softmax along one axis.

    It returns ``x - max(x) - log(sum(exp(x - max(x))))``::

        y = ag.log_softmax(x)

    Notes
    -----
    .. math:: y = x - \max x - \log \sum_{\mathrm{axis}} e^{x - \max x}

    The formula follows ``aclnnLogSoftmax``.

    Examples
    --------
    >>> import numpy as np
    >>> import ascend_grad as ag
    >>> np.exp(ag.log_softmax([0.0, 0.0]))
    array([0.5, 0.5])
    """
    if dim is not None:
        axis = axis_named_dim(axis, dim, "log_softmax")
    return run(table.LOG_SOFTMAX, [input, axis], out, backend, num_threads)


@documented(like=scaled_masked_softmax_backward)
def scaled_masked_softmax(
    x: ArrayLike,
    mask: ArrayLike,
    scale: float = 1.0,
    fix_triu_mask: bool = False,
    *,
    out: Result | None = None,
    backend: str | None = None,
    num_threads: int | None = None,
) -> Result:
    r"""Compute the scaled and masked softmax over the last axis.

    It returns the softmax of ``where(mask, -10000, scale * x)``. A row that is masked completely becomes 1/S2::

        y = ag.scaled_masked_softmax(x, mask, scale)

    Parameters
    ----------
    x : array_like, shape (B, N, S1, S2)
        The input; float32, float16, bfloat16 or float64.

    Returns
    -------
    ndarray
        The softmax, of the shape and dtype of `x`.

    Notes
    -----
    .. math:: y = \mathrm{softmax}(-10000 \text{ where mask, else } \mathrm{scale} \cdot x)

    The formula follows ``aclnnScaledMaskedSoftmax``.

    Examples
    --------
    >>> import numpy as np
    >>> import ascend_grad as ag
    >>> mask = np.array([False, False, True, True]).reshape(1, 1, 1, 4)
    >>> ag.scaled_masked_softmax(np.zeros((1, 1, 1, 4)), mask)
    array([[[[0.5, 0.5, 0. , 0. ]]]])
    """
    return run(table.SCALED_MASKED_SOFTMAX, [x, mask, scale, fix_triu_mask], out, backend, num_threads)


@documented(like=softmax_backward)
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
    filter_eps: float = 0.0,
    workspace_bytes: int | None = None,
    out: Sequence[Result | None] | None = None,
    backend: str | None = None,
    num_threads: int | None = None,
) -> tuple[Result | Any, Result | Any]:
    r"""Compute the gradients of a linear layer followed by a cross-entropy loss, without storing all logits.

    The layer's logits ``X @ W.T`` have the shape (BT, V), for BT tokens and the V rows of a vocabulary or of a shard of
    it. The results are ``P @ W`` and ``P.T @ X`` with ``P = g * (softmax - is_target)``::

        input_grad, weight_grad = ag.fused_linear_cross_entropy_loss_grad(
            grad, input, weight, target_mask, masked_target, logits_max=logits_max, sum_exp_logits=sum_exp_logits
        )

    The softmax is given, or computed again block by block from two statistics of each row, which takes less memory.

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
        Maximum bytes of the workspace. The minimum is 4 MiB (4194304), or what a panel of all features takes, if that
        is more; ``workspace_size(..., workspace_bytes=0)`` returns it. The default is 64 MiB, or a quarter of the bytes
        of the matrices that the call takes and returns, if that is more, and never below the minimum. In addition, a
        call takes an accumulator of the size of `input` in float32 if results have 16 bits, and a copy of each result
        whose `out` overlaps an input. It never takes memory of the size of the logits. `workspace_size` returns the
        total.
    filter_eps : float, default 0.0
        If positive, tiles of :math:`P` without an entry above it in magnitude may be skipped. Plans that pack nothing
        skip no tile. See the notes of `fused_linear_cross_entropy_loss_grad`.
    out : pair of (ndarray or None), optional
        The arrays for the results, each as in `softmax_backward`; None for a new array. They must not overlap each
        other. The entry of a result that `output_mask` skips must be None.

    Returns
    -------
    input_grad : ndarray, shape (BT, H), or None
        The gradient with respect to `input`, in its dtype.
    weight_grad : ndarray, shape (V, H), or None
        The gradient with respect to `weight`, in its dtype.

    Raises
    ------
    ParamNullptrError
        161001: a required array is None, or `softmax` is None and so is `logits_max` or `sum_exp_logits`.
    ParamInvalidError
        161002: an argument is not as described, or a target is out of range where the mask is not set (a dtype or
        kind: its subclass `ParamTypeError`).

    Notes
    -----
    With the target :math:`t_i` of row i, if it lives in this shard,

    .. math::
        P_{iv} = g_i \left(\mathrm{softmax}_{iv} - [v = t_i]\right), \qquad
        \mathrm{input\_grad} = P W, \qquad \mathrm{weight\_grad} = P^T X

    where the softmax, if it is not given, is
    :math:`e^{(X W^T)_{iv} - \mathrm{logits\_max}_i} / \mathrm{sum\_exp\_logits}_i`.

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
    return run(table.FUSED_LINEAR_CROSS_ENTROPY_LOSS_GRAD, values, out, backend, num_threads)


@documented(like=softmax_backward)
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

    The results are the maximum of each row of ``X @ W.T``, the sum of ``exp(logit - maximum)``, the target's logit less
    the maximum, and which rows have their target here::

        statistics = ag.fused_linear_online_max_sum(input, weight, target, vocab_start_index, vocab_end_index)

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
        Whether to also return the logits.

    Returns
    -------
    logits_max, sum_exp_logits, predicted_logits : ndarray, shape (BT,)
        The largest logit :math:`m`, the sum :math:`s` of exp(logit - largest), and :math:`p`, the target's logit -
        largest (0 if the target lives in another shard); float32, or float64 if `input` is float64.
    target_mask : ndarray of uint8, shape ((BT + 7) // 8,)
        A bit for every row, 1 where the target lives in another shard: row i is bit ``i % 8`` of byte ``i // 8``.
    masked_target : ndarray, shape (BT,)
        ``target - vocab_start_index``, or 0 where the target lives in another shard, of the dtype of `target`.
    vocab_parallel_logits : ndarray, shape (BT, V), or None
        The logits in the dtype of `input`, if requested.

    Notes
    -----
    With the logits :math:`L = X W^T` and the target's row :math:`t_i`,

    .. math::
        m_i = \max_v L_{iv}, \qquad s_i = \sum_v e^{L_{iv} - m_i}, \qquad p_i = L_{i t_i} - m_i

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
    return OnlineMaxSum._make(run(table.FUSED_LINEAR_ONLINE_MAX_SUM, values, None, backend, num_threads))


@documented(like=softmax_backward)
def fused_cross_entropy_loss_with_max_sum(
    logits_max: ArrayLike,
    sum_exp_logits: ArrayLike,
    predicted_logits: ArrayLike,
    label_smoothing: float = 0.0,
    *,
    vocab_parallel_logits: ArrayLike | None = None,
    out: Sequence[Result | None] | None = None,
    backend: str | None = None,
    num_threads: int | None = None,
) -> tuple[Result, Result | Any]:
    r"""Compute the cross-entropy loss of each row from statistics of its logits, and the softmax if logits are given.

    The loss is ``log(sum_exp_logits) - predicted_logits``::

        loss, softmax = ag.fused_cross_entropy_loss_with_max_sum(logits_max, sum_exp_logits, predicted_logits)

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

    Returns
    -------
    loss : ndarray, shape (BT,)
        The loss of each row, in the dtype of `logits_max`.
    softmax : ndarray, shape (BT, V), or None
        The shard's probabilities, in the dtype of `logits_max`; None without `vocab_parallel_logits`.

    Notes
    -----
    .. math::
        \mathrm{loss}_i = \log s_i - p_i, \qquad \mathrm{softmax}_{iv} = e^{L_{iv} - m_i} / s_i

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
    return run(table.FUSED_CROSS_ENTROPY_LOSS_WITH_MAX_SUM, values, out, backend, num_threads)
