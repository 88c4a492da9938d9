"""Losses of logits and of linear layers with their gradients, and the top k, computed per block of rows."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any, Unpack

import dask.array as da
import numpy as np
from dask.delayed import delayed
from numpy.typing import NDArray

import ascend_grad as ag

from ..arguments import LAST, axis_named_dim
from ..operators.results import LinearTopK, LossResult
from ..operators.signatures import completed, documented, with_options
from ..operators.table import CROSS_ENTROPY, LINEAR_CROSS_ENTROPY, LINEAR_TOP_K
from . import tasks
from .arrays import WORDS, backend_of_blocks, keywords_of
from .row_blocks import OR_NUMBERS, loss, row_blocks

if TYPE_CHECKING:
    from ..option_types import DaskLinearLossOptions, DaskLossOptions

_OF_LOGITS, _OF_LAYER = keywords_of(ag.cross_entropy), keywords_of(ag.linear_cross_entropy)


@with_options(_OF_LOGITS, WORDS, like=ag.cross_entropy)
def cross_entropy(
    input: da.Array | NDArray,
    target: da.Array | NDArray,
    axis: int = LAST,
    *,
    dim: int | None = None,
    **options: Unpack[DaskLossOptions[da.Array | NDArray, float]],
) -> LossResult[da.Array]:
    r"""Compute the cross-entropy loss of logits and its gradient, like `ascend_grad.cross_entropy`.

    Each block of `input` is a task that computes its losses, its gradient and its outputs. For a mean, the weights of
    all blocks are summed before the first gradient is computed.

    Parameters
    ----------
    input : dask.array.Array, shape (...)
        The logits, in one chunk along `axis`. Arrays of rows are rechunked to its chunks; every task holds
        `class_weight`.

    Returns
    -------
    LossResult
        The loss, the gradient and the requested outputs as dask arrays, yet to be computed, of the shapes and dtypes
        that `ascend_grad.cross_entropy` gives them.

    Notes
    -----
    ``dask.compute(*result)`` computes all results together. The loss is the sum of the losses of the blocks, in float64
    and in the order of the blocks.

    Examples
    --------
    >>> import dask
    >>> import dask.array as da
    >>> import ascend_grad.dask as agd
    >>> result = agd.cross_entropy(da.zeros((2, 4), chunks=(1, 4)), da.from_array([0, 3], chunks=1))
    >>> loss, input_grad = dask.compute(*result)
    >>> loss.round(3)
    np.float64(1.386)
    >>> input_grad
    array([[-0.375,  0.125,  0.125,  0.125],
           [ 0.125,  0.125,  0.125, -0.375]])
    """
    if dim is not None:
        axis = axis_named_dim(axis, dim, "cross_entropy")
    values = {"input": input, "target": target, "axis": axis, **completed(options, _OF_LOGITS, "cross_entropy")}
    lists = {name: np.asarray(values[name]) for name in OR_NUMBERS if isinstance(values[name], (list, tuple))}
    return loss(CROSS_ENTROPY, values | lists, in_pairs=False)


@with_options(_OF_LAYER, WORDS, like=ag.linear_cross_entropy)
def linear_cross_entropy(
    input: da.Array | NDArray,
    weight: da.Array | NDArray,
    target: da.Array | NDArray,
    **options: Unpack[DaskLinearLossOptions[da.Array | NDArray, float]],
) -> LossResult[da.Array]:
    r"""Compute the cross-entropy loss of a linear layer and its gradients, like `ascend_grad.linear_cross_entropy`.

    Each chunk of tokens is a task that computes its losses, its outputs and all gradients. The gradients of the weight
    and the bias are added in pairs, in the order of the chunks: gradients of the weight in float32 (float64 if `input`
    is float64), gradients of the bias in float64. The sums are rounded at the end. For a mean without `denominator`,
    the weights of the rows of all chunks are added up before the first gradient is computed.

    Parameters
    ----------
    input : dask.array.Array, shape (BT, H)
        The layer's input. It may have several chunks along the tokens, but only one along the features. All arrays with
        a number for each token are rechunked to its chunks.
    weight : numpy.ndarray or dask.array.Array, shape (V, H)
        The layer's weight, in one chunk. Every worker that computes a chunk holds it, as well as `class_weight` and
        `bias`.

    Returns
    -------
    LossResult
        The results as dask arrays, yet to be computed, of the fields, shapes and dtypes that
        `ascend_grad.linear_cross_entropy` gives them. Results with a number for each token have the chunks of `input`,
        other results one chunk.

    Notes
    -----
    A message about a target that is neither in the vocabulary nor `ignore_index` names its row in the chunk
    and the chunk's index.
    `workspace_bytes` is for each chunk.

    ``dask.compute(*result)`` computes all results together. Computing one of them alone costs as much, so `return_grad`
    and `output_mask` should select only the results that are needed.

    Results depend on the chunks of tokens, not on the scheduler, its workers or their order.

    Examples
    --------
    >>> import dask
    >>> import dask.array as da
    >>> import numpy as np
    >>> import ascend_grad.dask as agd
    >>> x, target = da.from_array(np.eye(2), chunks=(1, 2)), da.from_array([0, 3], chunks=1)
    >>> result = agd.linear_cross_entropy(x, np.zeros((4, 2)), target)
    >>> loss, input_grad, weight_grad = dask.compute(*result)
    >>> loss.round(3)
    np.float64(1.386)
    >>> weight_grad.T
    array([[-0.375,  0.125,  0.125,  0.125],
           [ 0.125,  0.125,  0.125, -0.375]])
    """
    values = {"input": input, "weight": weight, "target": target}
    values |= completed(options, _OF_LAYER, "linear_cross_entropy")
    return loss(LINEAR_CROSS_ENTROPY, values, in_pairs=True)


@documented(WORDS, like=ag.linear_top_k)
def linear_top_k(
    input: da.Array | NDArray,
    weight: da.Array | NDArray,
    k: int,
    *,
    temperature: float | da.Array | NDArray = 1.0,
    bias: da.Array | NDArray | None = None,
    logit_scale: float = 1.0,
    softcap: float | None = None,
    workspace_bytes: int | None = None,
    backend: str | None = None,
    num_threads: int | None = 1,
) -> LinearTopK[da.Array]:
    r"""Compute the k largest log-probabilities of a linear layer for each row, like `ascend_grad.linear_top_k`.

    Each chunk of tokens is a task. Results depend on the chunks, not on the scheduler, its workers or their order.

    Parameters
    ----------
    input, weight
        As in `linear_cross_entropy`. `weight` has at least one row.

    Returns
    -------
    LinearTopK
        The results of `ascend_grad.linear_top_k` as dask arrays, in the chunks of `input` along the tokens.
        ``dask.compute(*result)`` computes both together.

    Examples
    --------
    >>> import dask.array as da
    >>> import numpy as np
    >>> import ascend_grad.dask as agd
    >>> logits = np.log([[0.5, 0.125, 0.25, 0.125]])
    >>> agd.linear_top_k(da.ones((2, 1), chunks=1), logits.T, 3).index.compute()
    array([[0, 2, 1],
           [0, 2, 1]])
    """
    layer = {"input": input, "weight": weight, "k": k, "temperature": temperature, "bias": bias}
    numbers = {"logit_scale": logit_scale, "softcap": softcap, "workspace_bytes": workspace_bytes}
    rows = row_blocks(LINEAR_TOP_K, layer | numbers, num_threads)
    settings = {**rows.settings, "backend": backend_of_blocks(backend, LINEAR_TOP_K), "num_threads": num_threads}
    compute = delayed(partial(tasks.top_k, **settings), nout=2, pure=True)
    parts = zip(*(compute(**block) for block in rows.blocks.values()))
    specs: tuple[Any, ...] = rows.call.specs
    return LinearTopK._make(rows.assembled(part, k, spec.dtype) for part, spec in zip(parts, specs))
