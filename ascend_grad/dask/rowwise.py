"""Row-wise operators, which compute each block of the result from one block of every argument."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any, Unpack

import dask.array as da
import numpy as np
from numpy.typing import NDArray

import ascend_grad as ag

from .._call import Operator
from ..arguments import LAST, axis_named_dim
from ..operators import table
from ..operators.signatures import completed, with_options
from .arrays import WORDS, as_dask_arrays, backend_of_blocks, check_one_chunk, placeholder, validated

if TYPE_CHECKING:
    from ..option_types import BlockOptions

__all__ = ["log_softmax", "scaled_masked_softmax", "softmax"]
__all__ += ["log_softmax_backward", "scaled_masked_softmax_backward", "softmax_backward"]

_OPTIONS = {"backend": None, "num_threads": 1}


def blockwise(
    operator: Operator,
    values: dict[str, Any],
    backend: str | None,
    num_threads: int | None,
    out_dtype: np.dtype | None = None,
) -> da.Array:
    """Return the result of a row-wise operator for these arguments by name, in another dtype if one is given."""
    arrays = as_dask_arrays(values, operator.array_names, operator)
    placeholders = {name: placeholder(array.shape, array.dtype) for name, array in arrays.items()}
    call = validated(operator, values | placeholders, num_threads)
    (result,) = call.specs
    assert result is not None
    rank = len(result.shape)
    operands: list[Any] = []
    for name, array in arrays.items():
        if rank:
            check_one_chunk(array, call.arguments.get("axis", rank - 1), name, operator)
        # dask matches blocks by these indices. An axis of length 1, as a mask may have, is broadcast to all blocks.
        # dask recognizes such an axis by its number of chunks, including empty chunks: hence one chunk.
        array = array.rechunk({axis: -1 for axis, length in enumerate(array.shape) if length < 2})
        operands += [array, tuple(range(rank))]
    settings = {name: value for name, value in call.arguments.items() if name not in arrays}
    function, dtype = getattr(ag, operator.name), result.dtype
    if out_dtype is not None:
        function, dtype = partial(_with_out, function, out_dtype), out_dtype
    return da.blockwise(
        function,
        tuple(range(rank)),
        *operands,
        token=operator.name,
        dtype=dtype,
        meta=np.empty((0,) * rank, dtype),
        backend=backend_of_blocks(backend, operator),
        num_threads=num_threads,
        **settings,
    )


def _with_out(function: Callable[..., NDArray], dtype: np.dtype, *arrays: NDArray, **settings: Any) -> NDArray:
    """Compute a block in a dtype. A block of the result has the shape of the first array's."""
    return function(*arrays, out=np.empty_like(arrays[0], dtype), **settings)


def _computed(operator: Operator, options: BlockOptions, **values: Any) -> da.Array:
    return blockwise(operator, values, **completed(options, _OPTIONS, operator.name))


def _along(operator: Operator, axis: int, dim: int | None, options: BlockOptions, **arrays: Any) -> da.Array:
    if dim is not None:
        axis = axis_named_dim(axis, dim, operator.name)
    return _computed(operator, options, **arrays, axis=axis)


@with_options(_OPTIONS, WORDS, like=ag.softmax_backward)
def softmax_backward(
    grad_output: da.Array | NDArray,
    output: da.Array | NDArray,
    axis: int = LAST,
    *,
    dim: int | None = None,
    **options: Unpack[BlockOptions],
) -> da.Array:
    """Compute the gradient with respect to the input of a softmax, like `ascend_grad.softmax_backward`.

    Notes
    -----
    Arrays are of dask or NumPy, in one chunk along `axis`. If chunks along other axes differ between two arrays, dask
    splits both arrays at all chunk borders. All results of `ascend_grad.dask` are yet to be computed.

    There is no `out`, as the result has no memory before it is computed; `dask.array.store` writes it to an existing
    array.

    Examples
    --------
    >>> import dask.array as da
    >>> import ascend_grad.dask as agd
    >>> y = da.full((4, 2), 0.5, chunks=(2, 2))
    >>> agd.softmax_backward(da.eye(4, chunks=4)[:, :2].rechunk((2, 2)), y).compute()[0]
    array([ 0.25, -0.25])
    """
    return _along(table.SOFTMAX_BACKWARD, axis, dim, options, grad_output=grad_output, output=output)


@with_options(_OPTIONS, WORDS, like=ag.log_softmax_backward)
def log_softmax_backward(
    grad_output: da.Array | NDArray,
    output: da.Array | NDArray,
    axis: int = LAST,
    *,
    dim: int | None = None,
    **options: Unpack[BlockOptions],
) -> da.Array:
    """Compute the gradient with respect to the input of a log-softmax, like `ascend_grad.log_softmax_backward`.

    Examples
    --------
    >>> import dask.array as da
    >>> import ascend_grad.dask as agd
    >>> agd.log_softmax_backward(da.ones((4, 2), chunks=(2, 2)), da.log(da.full((4, 2), 0.5, chunks=(2, 2)))).compute()[
    ...     0
    ... ]
    array([0., 0.])
    """
    return _along(table.LOG_SOFTMAX_BACKWARD, axis, dim, options, grad_output=grad_output, output=output)


@with_options(_OPTIONS, WORDS, like=ag.scaled_masked_softmax_backward)
def scaled_masked_softmax_backward(
    grad_output: da.Array | NDArray,
    y: da.Array | NDArray,
    mask: da.Array | NDArray,
    scale: float = 1.0,
    fix_triu_mask: bool = False,
    **options: Unpack[BlockOptions],
) -> da.Array:
    """Compute the gradient of a scaled and masked softmax, like `ascend_grad.scaled_masked_softmax_backward`.

    Examples
    --------
    >>> import dask.array as da
    >>> import numpy as np
    >>> import ascend_grad.dask as agd
    >>> y = da.full((2, 1, 1, 2), 0.5, chunks=1).rechunk({3: -1})
    >>> mask = np.array([False, True]).reshape(1, 1, 1, 2)
    >>> agd.scaled_masked_softmax_backward(y * np.array([2.0, 0.0]), y, mask).compute()[0]
    array([[[0.25, 0.  ]]])
    """
    return _computed(
        table.SCALED_MASKED_SOFTMAX_BACKWARD,
        options,
        grad_output=grad_output,
        y=y,
        mask=mask,
        scale=scale,
        fix_triu_mask=fix_triu_mask,
    )


@with_options(_OPTIONS, WORDS, like=ag.softmax)
def softmax(
    input: da.Array | NDArray, axis: int = LAST, *, dim: int | None = None, **options: Unpack[BlockOptions]
) -> da.Array:
    """Compute the softmax along one axis, like `ascend_grad.softmax`.

    Examples
    --------
    >>> import dask.array as da
    >>> import ascend_grad.dask as agd
    >>> agd.softmax(da.zeros((4, 2), chunks=(2, 2)))
    dask.array<softmax, shape=(4, 2), dtype=float64, chunksize=(2, 2), chunktype=numpy.ndarray>
    """
    return _along(table.SOFTMAX, axis, dim, options, input=input)


@with_options(_OPTIONS, WORDS, like=ag.log_softmax)
def log_softmax(
    input: da.Array | NDArray, axis: int = LAST, *, dim: int | None = None, **options: Unpack[BlockOptions]
) -> da.Array:
    """Compute the natural logarithm of the softmax along one axis, like `ascend_grad.log_softmax`.

    Examples
    --------
    >>> import dask.array as da
    >>> import ascend_grad.dask as agd
    >>> agd.log_softmax(da.zeros((4, 2), chunks=(2, 2))).compute()[0].round(3)
    array([-0.693, -0.693])
    """
    return _along(table.LOG_SOFTMAX, axis, dim, options, input=input)


@with_options(_OPTIONS, WORDS, like=ag.scaled_masked_softmax)
def scaled_masked_softmax(
    x: da.Array | NDArray,
    mask: da.Array | NDArray,
    scale: float = 1.0,
    fix_triu_mask: bool = False,
    **options: Unpack[BlockOptions],
) -> da.Array:
    """Compute the scaled and masked softmax over the last axis, like `ascend_grad.scaled_masked_softmax`.

    Examples
    --------
    >>> import dask.array as da
    >>> import numpy as np
    >>> import ascend_grad.dask as agd
    >>> mask = np.array([False, False, True, True]).reshape(1, 1, 1, 4)
    >>> agd.scaled_masked_softmax(da.zeros((2, 1, 1, 4), chunks=(1, 1, 1, 4)), mask).compute()[0]
    array([[[0.5, 0.5, 0. , 0. ]]])
    """
    return _computed(table.SCALED_MASKED_SOFTMAX, options, x=x, mask=mask, scale=scale, fix_triu_mask=fix_triu_mask)
