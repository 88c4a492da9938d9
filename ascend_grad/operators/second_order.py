"""The public functions of second derivatives of losses."""

from __future__ import annotations

from typing import Literal

from numpy.typing import ArrayLike, NDArray

from .._dispatch import run
from ..arguments import LAST, axis_named_dim
from . import table
from .losses import cross_entropy
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
        side.

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
