"""The public functions of second derivatives of losses."""

from __future__ import annotations

from typing import Literal

from numpy.typing import ArrayLike, NDArray

from .._dispatch import run
from ..arguments import LAST, axis_named_dim
from . import table
from .losses import cross_entropy, linear_cross_entropy
from .results import LinearHessianProduct
from .signatures import Words, documented


@documented(Words(rows="", targets=""), like=cross_entropy)
def cross_entropy_hvp(
    input: ArrayLike,
    target: ArrayLike,
    vector: ArrayLike,
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
    grad_loss: ArrayLike | None = None,
    backend: str | None = None,
    num_threads: int | None = None,
) -> NDArray:
    r"""Compute the product of the Hessian of a cross-entropy loss with respect to its logits and a vector.

    The Hessian has a block for each row, which is never stored. The product is the derivative of the gradient of
    `cross_entropy` in the direction of the vector::

        product = ag.cross_entropy_hvp(logits, target, vector)

    Parameters
    ----------
    vector : array_like, shape (...)
        The vector :math:`v`, in the shape of `input`, of any of the four dtypes. It is rounded to the dtype of `input`.
    .. options:: as in `cross_entropy`

    Returns
    -------
    product : ndarray
        The product, in the shape and dtype of `input`; 0 in ignored rows. In memory the classes of a row lie side by
        side. (On an Ascend NPU it is C-contiguous.)

    Notes
    -----
    With the numbers of a row that `cross_entropy` defines, and the upstream gradient :math:`g` of its loss, the product
    with respect to :math:`z` is

    .. math::

        p_v \Bigl( a \, \bigl( v_v - \sum_u p_u v_u \bigr)
        + 2 g r\, \mathrm{lse\_square\_scale} \sum_u p_u v_u \Bigr)

    With respect to :math:`x` the vector and the product have the factor :math:`z'`, and with `softcap` there is the
    further term :math:`\partial L / \partial z_v \; z'' v_v`. The formula is that of Pearlmutter, "Fast Exact
    Multiplication by the Hessian", 1994, for the gradient of `cross_entropy`.

    Examples
    --------
    >>> import numpy as np
    >>> import ascend_grad as ag
    >>> ag.cross_entropy_hvp(np.zeros((2, 4)), np.array([0, 3]), np.eye(2, 4), reduction="sum")
    array([[ 0.1875, -0.0625, -0.0625, -0.0625],
           [-0.0625,  0.1875, -0.0625, -0.0625]])
    """
    if dim is not None:
        axis = axis_named_dim(axis, dim, "cross_entropy_hvp")
    values = [
        input, target, vector, axis, reduction, ignore_index, class_weight, token_weight, target_prob, label_smoothing,
        lse_square_scale, temperature, denominator, logit_scale, softcap, grad_loss
    ]  # fmt: skip
    return run(table.CROSS_ENTROPY_HVP, values, None, backend, num_threads)


@documented(like=linear_cross_entropy)
def linear_cross_entropy_hvp(
    input: ArrayLike,
    weight: ArrayLike,
    target: ArrayLike,
    vector: ArrayLike | None = None,
    *,
    vector_bias: ArrayLike | None = None,
    vector_input: ArrayLike | None = None,
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
    backend: str | None = None,
    num_threads: int | None = None,
) -> LinearHessianProduct:
    r"""Compute the product of the Hessian of a linear layer's loss and a vector of the shape of its weight.

    The Hessian is that of `linear_cross_entropy` with respect to `weight`, to `bias` if it is given, and to `input` if
    `vector_input` is given. Neither it nor all logits are stored. The result is a named tuple::

        product = ag.linear_cross_entropy_hvp(input, weight, target, vector).weight_product
        weight_product, bias_product, input_product = ag.linear_cross_entropy_hvp(
            input, weight, target, vector, vector_bias=v, vector_input=u, bias=b
        )

    Parameters
    ----------
    target : array_like of any integer dtype, shape (BT,), or (BT, K) with `target_prob`; or floating, shape (BT, V)
        Ids, or probabilities of all classes, as in `linear_cross_entropy`.
    vector : array_like, shape (V, H), optional
        The part of the vector that belongs to `weight`, of any of the four dtypes. It is rounded to the dtype of
        `weight`. With `vector_input` it may be None, which stands for zeros.
    vector_bias : array_like, shape (V,), optional
        The part that belongs to `bias`, of any of the four dtypes; default: 0. It is refused without `bias`.
    vector_input : array_like, of the shape of `input`, optional
        The part that belongs to `input`, of any of the four dtypes. It is rounded to the dtype of `input`. By default
        the input is a constant: the vector and the product have no part of it.

    Returns
    -------
    weight_product : ndarray, shape (V, H)
        The part of the product that belongs to `weight`, in its dtype.
    bias_product : ndarray, shape (V,), or None
        The part that belongs to `bias`, in its dtype; None without `bias`.
    input_product : ndarray, of the shape of `input`, or None
        The part that belongs to `input`, in its dtype; 0 in ignored rows, and None without `vector_input`.

    Notes
    -----
    With a block of rows :math:`X` of the input, and vectors :math:`V` and :math:`v`, the products :math:`X V^T + v` are
    multiplied by the Hessian with respect to :math:`X W^T + \mathrm{bias}` as in `cross_entropy_hvp`. The result
    :math:`P` gives :math:`P^T X` and the sums of its columns, which are added up over blocks. A vector :math:`Y` for
    the input adds :math:`Y W^T` to the products that are multiplied, and :math:`G^T Y` to the weight's part, with the
    gradient :math:`G` with respect to the logits. The input's part is then :math:`P W + G V`.

    Up to 64 classes and with more rows than classes, a block has a few hundred rows, which stay in the caches, unless
    targets are probabilities of all classes or there is an argument among `vector_input`, `lse_square_scale`, `softcap`
    and temperatures of rows. In other cases the logits, their changes and :math:`P` of a block together take at most
    about 2 MiB, or as much memory as the weight in the dtype of sums, or what 128 rows take, but not more than 32 MiB.
    The sums take as much as the weight again, and in float64. `workspace_size` returns the bound of a call. In 16 bits,
    :math:`P` is rounded as the softmax of a gradient is.

    A product with a sparse `input` takes time in proportion to the nonzeros, and no dense copy of it. Weight and vector
    are copied once, transposed. Each part of the rows, of which there are at most eight, computes the product in
    another copy, and for float32 also in float64. Elements that are not stored multiply nothing, neither a vector nor a
    :math:`P` that is infinite or NaN. In a dense input, 0 times infinity is NaN.

    Examples
    --------
    >>> import numpy as np
    >>> import ascend_grad as ag
    >>> x, weight, target = np.eye(2), np.zeros((4, 2)), np.array([0, 3])
    >>> ag.linear_cross_entropy_hvp(x, weight, target, np.eye(4, 2), reduction="sum").weight_product
    array([[ 0.1875, -0.0625],
           [-0.0625,  0.1875],
           [-0.0625, -0.0625],
           [-0.0625, -0.0625]])
    """
    values = [
        input, weight, target, vector, vector_bias, vector_input, reduction, ignore_index, grad_loss, vocab_start_index,
        token_weight, class_weight, target_prob, label_smoothing, lse_square_scale, temperature, denominator, bias,
        logit_scale, softcap
    ]  # fmt: skip
    return LinearHessianProduct._make(run(table.LINEAR_CROSS_ENTROPY_HVP, values, None, backend, num_threads))


@documented(like=linear_cross_entropy)
def linear_cross_entropy_hessian(
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
    grad_loss: ArrayLike | None = None,
    backend: str | None = None,
    num_threads: int | None = None,
) -> NDArray:
    r"""Compute the Hessian of a linear layer's loss with respect to few coefficients.

    The coefficients are the elements of `weight`, and of `bias` if it is given::

        hessian = ag.linear_cross_entropy_hessian(input, weight, target)

    Parameters
    ----------
    input : array_like, shape (..., H)
        The layer's input, as in `linear_cross_entropy`, but no sparse array.
    weight : array_like, shape (V, H)
        The layer's weight, of the dtype of `input`. The Hessian has :math:`(V H)^2` elements.
    target : array_like of any integer dtype, shape (BT,), or (BT, K) with `target_prob`; or floating, shape (BT, V)
        Ids, or probabilities of all classes, as in `linear_cross_entropy`.
    .. options:: as in `linear_cross_entropy`

    Returns
    -------
    hessian : ndarray, shape (V, H, V, H), or (V, H + 1, V, H + 1) with `bias`
        The second derivatives, with `bias` as the last of the features of each class. The Hessian is exactly symmetric.
        It is float32, or float64 if `input` is float64.

    Notes
    -----
    ``hessian.reshape(V * H, V * H)`` is a matrix for the coefficients of one class after another, as in statsmodels'
    ``MNLogit``. With a bias, its rows have the order of ``np.column_stack([weight, bias]).ravel()``.

    With the Hessian :math:`h` of each row with respect to :math:`X W^T + \mathrm{bias}`, as in `cross_entropy_hvp`, and
    a column of ones in :math:`X` for the bias, an element is :math:`\sum_i h_{ivw} X_{ij} X_{ik}`. Blocks of rows are
    added up in float64, which takes as much memory as the result has in float64.

    Examples
    --------
    >>> import numpy as np
    >>> import ascend_grad as ag
    >>> x = np.array([[1.0], [2.0]])
    >>> hessian = ag.linear_cross_entropy_hessian(x, np.zeros((2, 1)), np.array([0, 1]), reduction="sum")
    >>> hessian.reshape(2, 2)
    array([[ 1.25, -1.25],
           [-1.25,  1.25]])
    """
    values = [
        input, weight, target, reduction, ignore_index, grad_loss, vocab_start_index, token_weight, class_weight,
        target_prob, label_smoothing, lse_square_scale, temperature, denominator, bias, logit_scale, softcap
    ]  # fmt: skip
    return run(table.LINEAR_CROSS_ENTROPY_HESSIAN, values, None, backend, num_threads)
