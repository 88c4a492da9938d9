"""The public functions of losses of logits and of linear layers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

from numpy.typing import ArrayLike, NDArray

from .._array_types import number
from .._dispatch import run
from ..arguments import LAST, axis_named_dim
from . import table
from .functions import fused_linear_cross_entropy_loss_grad, softmax_backward
from .options import OUTPUTS
from .results import LinearCrossEntropyGradients, LinearTopK, LossResult, Result, class_of, loss_result
from .signatures import Words, documented

# The classes of results without outputs. Small calls make them without a call of `loss_result`.
_ROWS_RESULT = class_of(("loss", "input_grad"))
_LINEAR_RESULT = class_of(("loss", "input_grad", "weight_grad"))

_OUTPUTS = table.CROSS_ENTROPY.slots["outputs"]


@documented(Words(rows="", targets="", outputs=tuple(OUTPUTS)), like=softmax_backward)
def cross_entropy(
    input: ArrayLike,
    target: ArrayLike,
    axis: int = LAST,
    *,
    dim: int | None = None,
    reduction: Literal["mean", "sum", "none"] = "mean",
    ignore_index: int = -100,
    class_weight: ArrayLike | None = None,
    token_weight: ArrayLike | None = None,
    target_prob: ArrayLike | None = None,
    label_smoothing: float = 0.0,
    lse_square_scale: float = 0.0,
    temperature: ArrayLike = 1.0,
    denominator: float | None = None,
    logit_scale: float = 1.0,
    softcap: float | None = None,
    outputs: Sequence[Literal["lse", "log_prob", "entropy", "predicted", "correct", "prob", "hessian_diag"]] = (),
    grad_loss: ArrayLike | None = None,
    grad_lse: ArrayLike | None = None,
    grad_log_prob: ArrayLike | None = None,
    grad_entropy: ArrayLike | None = None,
    return_grad: bool = True,
    out: Result | None = None,
    backend: str | None = None,
    num_threads: int | None = None,
) -> LossResult[Result]:
    r"""Compute the cross-entropy loss of logits and its gradient in one pass over the rows.

    A row is all of `input` along `axis`. Its loss is ``logsumexp(row) - row[target]``, and its gradient
    ``softmax(row) - is_target``, divided by the number of rows for a mean. The result is a named tuple::

        loss, input_grad = ag.cross_entropy(logits, target)
        loss, input_grad, lse = ag.cross_entropy(logits, target, reduction="none", outputs=("lse",))

    Parameters
    ----------
    input : array_like, shape (...)
        The logits :math:`x`. Rank 0 to 8, any strides; float32, float16, bfloat16 or float64. Integers and truth values
        become float64.
    target : array_like of any integer dtype, or of a floating dtype
        The index of each row's target, or `ignore_index`: the shape of `input` without `axis`. With `target_prob` there
        is one more axis, the last one, of :math:`K` targets. An array of any of the four floating dtypes with the shape
        of `input` holds probabilities :math:`q` of all classes, which need not add up to 1. They count as float32
        unless `input` is float64.
    axis : int, default -1
        The axis of the classes.
    reduction : {"mean", "sum", "none"}, default "mean"
        The loss is a weighted mean or the sum over the rows that are not ignored, or one number per row, 0 for ignored
        rows. The mean divides the cross-entropy by the sum of :math:`r c_t`, or of :math:`r` with `target_prob` or
        probabilities of all classes, and the term of the squared lse by the sum of :math:`r`.
    ignore_index : int, default -100
        A target with this value adds nothing. A row without another target is ignored: it has no loss, and a gradient
        of 0. It has no effect on probabilities of all classes.
    .. options::
    grad_loss : float or array_like, optional
        The gradient with respect to the loss, default 1: one number or, with ``reduction="none"``, also one for each
        row, of any of the four dtypes. A row with 0 has a gradient of 0, whatever it holds.
    grad_lse, grad_log_prob, grad_entropy : array_like, optional
        The gradients with respect to the outputs, in their shapes, of any of the four dtypes; default: 0. They count
        whatever the token weight is. Elements of ignored rows and targets are not read.
    return_grad : bool, default True
        Whether to compute the gradient.
    out : ndarray or tensor, optional
        The array for the gradient, as in `softmax_backward`. It may be `input` itself.

    Returns
    -------
    loss : ndarray
        The loss, shape () or that of the rows; float32, or float64 if `input` is float64. A mean without rows, or whose
        sum of weights is 0, is NaN (and its gradients are 0).
    input_grad : ndarray or None
        The gradient with respect to `input`: `out`, or a new array of its shape and dtype, and of its axis order as in
        `softmax_backward`.
    lse, log_prob, entropy, predicted, correct : ndarray
        The requested outputs. Outputs that are not requested are None, and no fields of the tuple. `lse`,
        `entropy` and `predicted` have a number for each row, `log_prob` has one for each target. Those of an ignored
        row are 0, or -1 for `predicted`. `predicted` is the class of the largest logit, int64, the
        lowest one of several. `correct` is the number of rows with ``predicted == target``, shape (); it is refused
        with `target_prob`. Both `log_prob` and `correct` are refused with probabilities of all classes. Floating
        outputs have the dtype of the loss. `lse` is infinite if a logit is positive infinite, or if all are negative
        infinite. The loss, the other outputs and the gradient of such a row are NaN.
    prob, hessian_diag : ndarray, shape of `input`
        These two requested outputs have the shape and the dtype of `input`; they are 0 in ignored rows. `prob` has the
        probabilities. `hessian_diag` has the second derivatives of the reduced loss, times `grad_loss`, each with
        respect to one element of `input` twice. It is refused with gradients with respect to outputs. In memory the
        classes of a row lie side by side.

    Raises
    ------
    ParamInvalidError
        161002: an argument is not as described; a target is neither in [0, V) nor `ignore_index`; there are rows of no
        element; `correct` is requested with `target_prob` (a dtype or kind: its subclass `ParamTypeError`).
    UnsupportedDeviceError
        361001: an Ascend NPU is requested that does not have this operator.

    Notes
    -----
    With the :math:`V` logits :math:`x` of a row,
    :math:`z = \mathrm{softcap} \, \tanh(\mathrm{logit\_scale} \; x / \mathrm{softcap}) / \mathrm{temperature}` (without
    options :math:`z = x`), :math:`\mathrm{lse} = \log \sum_v e^{z_v}`, class weights :math:`c`, a token weight
    :math:`r`, the smoothing :math:`s` and targets :math:`t_k` of probabilities :math:`q_k`, the loss of a row is

    .. math::

        r \Bigl( (1 - s) \sum_k q_k c_{t_k} (\mathrm{lse} - z_{t_k}) + \frac{s}{V} \sum_v c_v (\mathrm{lse} - z_v)
        + \mathrm{lse\_square\_scale} \cdot \mathrm{lse}^2 \Bigr)

    Names and meanings of most arguments follow ``torch.nn.functional.cross_entropy``. Sums leave out one logit that has
    the maximum, so that loss, log-probabilities, entropy and the gradient at the target are accurate to about 1e-5 even
    if the target's probability differs from 1 by 1e-12 only.

    The gradient with respect to :math:`z` is :math:`a p_v - \sum_k w_k [v = t_k] - s_i c_v` with the probabilities
    :math:`p = e^{z - \mathrm{lse}}` and :math:`w_k = g r (1 - s) q_k c_{t_k}`, :math:`s_i = g r s / V`,
    :math:`a = \sum_k w_k + s_i \sum_v c_v + 2 g r\, \mathrm{lse\_square\_scale} \cdot \mathrm{lse}`, for the upstream
    gradient :math:`g`. The outputs add
    :math:`g^{\mathrm{lse}} p_v + \sum_k g^{\mathrm{log\_prob}}_k ([v = t_k] - p_v)
    - g^{\mathrm{entropy}} p_v (z_v - \mathrm{lse} + \mathrm{entropy})`. Pass ``grad_loss=0`` for only the gradient of
    the outputs.

    The diagonal of the Hessian with respect to :math:`z` is
    :math:`a p_v (1 - p_v) + 2 g r\, \mathrm{lse\_square\_scale}\, p_v^2` with these :math:`a` and :math:`g`. With
    respect to :math:`x` it has the factor :math:`(z')^2`, and with `softcap` the further term
    :math:`\partial L / \partial z_v \; z''`.

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
    >>> ag.cross_entropy(np.zeros((2, 4)), np.array([0, 3]), reduction="sum", outputs=("hessian_diag",)).hessian_diag
    array([[0.1875, 0.1875, 0.1875, 0.1875],
           [0.1875, 0.1875, 0.1875, 0.1875]])
    """
    if dim is not None:
        axis = axis_named_dim(axis, dim, "cross_entropy")
    values: list[Any] = [
        input, target, axis, reduction, ignore_index, class_weight, token_weight, target_prob, label_smoothing,
        lse_square_scale, temperature, denominator, logit_scale, softcap, grad_loss, grad_lse, grad_log_prob,
        grad_entropy, outputs, return_grad
    ]  # fmt: skip
    results = run(table.CROSS_ENTROPY, values, out, backend, num_threads)
    loss = results[0] if reduction == "none" else number(results[0])
    requested = values[_OUTPUTS]  # a tuple now
    if not requested:
        return tuple.__new__(_ROWS_RESULT, (loss, results[1]))
    by_name = dict(zip(OUTPUTS, results[2:]))
    return loss_result(("loss", "input_grad", *requested), (loss, results[1], *map(by_name.__getitem__, requested)))


@documented(like=fused_linear_cross_entropy_loss_grad)
def linear_cross_entropy(
    input: ArrayLike,
    weight: ArrayLike,
    target: ArrayLike,
    *,
    reduction: Literal["mean", "sum", "none"] = "mean",
    ignore_index: int = -100,
    vocab_start_index: int = 0,
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
    grad_loss: ArrayLike | None = None,
    return_grad: bool = True,
    output_mask: Sequence[bool] = (True, True),
    filter_eps: float = 0.0,
    workspace_bytes: int | None = None,
    backend: str | None = None,
    num_threads: int | None = None,
) -> LossResult[NDArray]:
    r"""Compute the cross-entropy loss of a linear layer and its gradients in one call, without storing all logits.

    The logits are ``X @ W.T``, of shape (BT, V). The loss of a row is ``logsumexp(row) - row[target]``. The result is a
    named tuple::

        loss, input_grad, weight_grad = ag.linear_cross_entropy(input, weight, target)

    Parameters
    ----------
    input : array_like, shape (..., H), or CSR array of SciPy, shape (BT, H)
        The layer's input; float32, float16, bfloat16 or float64. Integers and truth values become float64, or take the
        dtype of `weight`. The shape without H is that of the rows, called (BT,) here: results with a number for each
        row also have this shape. Sparse arrays of float32 or float64 are read in place. Elements that are not stored
        add nothing, not even times infinity or NaN.
    target : array_like of any integer dtype, shape (BT,), or (BT, K) with `target_prob`; or floating, shape (BT, V)
        Ids: ``target - vocab_start_index`` is the row of `weight`; or `ignore_index`. An array of any of the four
        floating dtypes holds probabilities of all classes, as in `cross_entropy`. Of tensors of torch_npu any other
        value is no error: the row's loss, its row of ``input_grad`` and all of ``weight_grad`` are NaN.
    reduction : {"mean", "sum", "none"}, default "mean"
        The loss is the mean or the sum over the rows that are not ignored, or one number per row, 0 for ignored rows.
    ignore_index : int, default -100
        Rows with this target have no loss and no gradient.
    vocab_start_index : int, default 0
        The id of the first row of `weight`.
    .. options::
    grad_loss : float or array_like, shape (BT,), optional
        The gradient with respect to the loss, default 1: one number or, with ``reduction="none"``, also an array of any
        of the four dtypes with one number per row.
    return_grad : bool, default True
        Whether to compute gradients.

    Returns
    -------
    loss : ndarray, shape () or (BT,)
        The loss; float32, or float64 if `input` is float64. A mean over no rows, or whose sum of
        weights is 0, is NaN (and its gradients are 0).
    input_grad : ndarray, shape (BT, H), or None
        The gradient with respect to `input`, in its dtype; None if `input` is sparse.
    weight_grad : ndarray, shape (V, H), or None
        The gradient with respect to `weight`, in its dtype.
    bias_grad : ndarray, shape (V,), or None
        The gradient with respect to `bias`, in its dtype, summed in float64. The field exists if `bias` is given.
    lse, log_prob, entropy : ndarray, shape (BT,)
        Of the logits, with the dtype of the loss: :math:`\mathrm{lse}`, the target's log-probability, and the entropy
        in nats. They are 0 for ignored rows. `log_prob` has the shape of `target`: (BT, K) with `target_prob`. The lse
        is infinite if a logit is positive infinite, or if all are negative infinite. The loss, the other outputs and
        the gradients of such a row are NaN.
    predicted : ndarray of int64, shape (BT,)
        The id of the largest logit, the lowest one of several; -1 for ignored rows.
    correct : ndarray of int64, shape ()
        The number of correct predictions; it is refused with `target_prob`.

    Raises
    ------
    ParamNullptrError
        161001: a required array is None.
    ParamInvalidError
        161002: an argument is not as described, or a target is neither in the vocabulary nor `ignore_index` (a dtype
        or kind: its subclass `ParamTypeError`).

    Notes
    -----
    With the products :math:`u = X W^T + \mathrm{bias}`, the class weights :math:`c`, the token weights :math:`r`, the
    label smoothing :math:`s` and :math:`\mathrm{lse}_i = \log \sum_v e^{z_{iv}}`,

    .. math::
        z &= \mathrm{softcap} \, \tanh(\mathrm{logit\_scale} \; u / \mathrm{softcap}) / \mathrm{temperature} \\
        \mathrm{loss}_i &= r_i \Big( (1 - s) \sum_k q_{ik} c_{t_{ik}} (\mathrm{lse}_i - z_{i t_{ik}})
        + \frac{s}{V} \sum_v c_v (\mathrm{lse}_i - z_{iv}) + \mathrm{lse\_square\_scale} \; \mathrm{lse}_i^2 \Big)

    By default :math:`z = X W^T` and :math:`\mathrm{loss}_i = \mathrm{lse}_i - z_{i t_i}`.

    The gradient of the bias is never filtered by `filter_eps`. An Ascend NPU computes neither `target_prob` nor
    probabilities of all classes, nor the outputs `entropy`, `predicted` and `correct`.

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
    results = run(table.LINEAR_CROSS_ENTROPY, values, None, backend, num_threads)
    loss = results[0] if reduction == "none" else number(results[0])
    if bias is None and not outputs:
        return tuple.__new__(_LINEAR_RESULT, (loss, results[1], results[2]))
    by_name = dict(zip(table.LINEAR_CROSS_ENTROPY.results, (loss, *results[1:])))
    names = ("loss", "input_grad", "weight_grad", *(("bias_grad",) if bias is not None else ()), *outputs)
    return loss_result(names, map(by_name.__getitem__, names))


@documented(like=linear_cross_entropy)
def linear_cross_entropy_backward(
    input: ArrayLike,
    weight: ArrayLike,
    target: ArrayLike,
    *,
    lse: ArrayLike,
    entropy: ArrayLike | None = None,
    reduction: Literal["mean", "sum", "none"] = "mean",
    ignore_index: int = -100,
    vocab_start_index: int = 0,
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
    grad_loss: ArrayLike | None = None,
    grad_lse: ArrayLike | None = None,
    grad_log_prob: ArrayLike | None = None,
    grad_entropy: ArrayLike | None = None,
    output_mask: Sequence[bool] = (True, True),
    filter_eps: float = 0.0,
    workspace_bytes: int | None = None,
    backend: str | None = None,
    num_threads: int | None = None,
) -> LinearCrossEntropyGradients:
    r"""Compute the gradients of `linear_cross_entropy` and of its outputs, for upstream gradients that are known later.

    The logits are computed again, block by block. The result is a named tuple::

        loss = ag.linear_cross_entropy(x, w, target, return_grad=False, outputs=("lse",))
        input_grad, weight_grad, _ = ag.linear_cross_entropy_backward(x, w, target, lse=loss.lse, grad_loss=2.0)

    Parameters
    ----------
    lse : array_like, shape (BT,)
        The output of `linear_cross_entropy` with this name, of any of the four dtypes.
    entropy : array_like, shape (BT,), optional
        The output with this name. It is required if `grad_entropy` is given.
    grad_loss : float or array_like, shape (BT,), optional
        The gradient with respect to the loss, as in `linear_cross_entropy`. Here None stands for 0.
    grad_lse, grad_log_prob, grad_entropy : array_like, shape (BT,), optional
        The gradients with respect to the outputs, in their shapes, of any of the four dtypes. None stands for 0.
        Elements of ignored rows and targets are not read.

    Returns
    -------
    input_grad : ndarray, shape (BT, H), or None
        The gradient with respect to `input`, in its dtype; None if `input` is sparse.
    weight_grad : ndarray, shape (V, H), or None
        The gradient with respect to `weight`, in its dtype.
    bias_grad : ndarray, shape (V,), or None
        The gradient with respect to `bias`, in its dtype, summed in float64.

    Raises
    ------
    ParamNullptrError
        161001: a required array is None, or `entropy` is None and `grad_entropy` is given.
    ParamInvalidError
        161002: `grad_loss`, `grad_lse`, `grad_log_prob` and `grad_entropy` are all None, or an argument is not as
        described (a dtype or kind: its subclass `ParamTypeError`).

    Notes
    -----
    With :math:`p = e^{z - \mathrm{lse}}` and the upstream gradients :math:`g`, the outputs add to the gradient of the
    loss with respect to :math:`z_{iv}`

    .. math::
        g^{\mathrm{lse}}_i p_{iv} + \sum_k g^{\mathrm{log\_prob}}_{ik} ([v = t_{ik}] - p_{iv})
        - g^{\mathrm{entropy}}_i p_{iv} (z_{iv} - \mathrm{lse}_i + \mathrm{entropy}_i)

    An Ascend NPU computes neither `target_prob` nor probabilities of all classes, nor `grad_entropy`.

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
    results = run(table.LINEAR_CROSS_ENTROPY_BACKWARD, values, None, backend, num_threads)
    return LinearCrossEntropyGradients._make(results)


@documented(like=fused_linear_cross_entropy_loss_grad)
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

    The log-probabilities are the log-softmax of ``X @ W.T`` over the whole vocabulary. The result is a named tuple::

        log_prob, index = ag.linear_top_k(input, weight, k)

    Parameters
    ----------
    input : array_like, shape (..., H)
        The layer's input :math:`X`; float32, float16, bfloat16 or float64. BT stands for all dimensions but the last.
    weight : array_like, shape (V, H)
        The layer's weight :math:`W`, of the dtype of `input`, with at least one row.
    k : int
        The number of log-probabilities of each row: 1 to 128, and at most V.
    .. options::

    Returns
    -------
    log_prob : ndarray, shape (..., k)
        The k largest log-probabilities of each row, from the largest down; float32, or float64 if `input` is float64.
    index : ndarray of int64, shape (..., k)
        Their rows of `weight`. Of equal logits the one with the lower index comes first.

    Raises
    ------
    ParamNullptrError
        161001: a required array is None.
    ParamInvalidError
        161002: an argument is not as described (a dtype or kind: its subclass `ParamTypeError`).
    UnsupportedDeviceError
        361001: an Ascend NPU is requested that does not multiply in float32.

    Notes
    -----
    With the products :math:`u = X W^T + \mathrm{bias}`

    .. math::
        z &= \mathrm{softcap} \, \tanh(\mathrm{logit\_scale} \; u / \mathrm{softcap}) / \mathrm{temperature} \\
        \log p_{iv} &= z_{iv} - \log \sum_w e^{z_{iw}}

    Without `softcap`, :math:`z = \mathrm{logit\_scale} \; u / \mathrm{temperature}`.

    Logits are compared before they are divided by the temperature, as they are computed: in float32, or in float64 for
    float64. Logits that are rounded to the cap, or to the same number below it, are equal. A log-probability close to 0
    also has a small relative error.

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
    return LinearTopK._make(run(table.LINEAR_TOP_K, values, None, backend, num_threads))
