"""Linear cross-entropy and its gradients, computed per chunk of tokens."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Literal

import dask.array as da
import numpy as np
from dask.delayed import Delayed, delayed
from numpy.typing import NDArray

from ..contract.linear import LINEAR_CROSS_ENTROPY, LOSS_DEFAULTS
from ..results import LinearCrossEntropy
from . import token_chunks
from .arrays import as_dask_arrays, backend_of_blocks, check_one_chunk, stand_in, validated

#: Arguments with a row for each token, and their ranks.
_BY_TOKEN = {"input": 2, "target": 1, "grad_loss": 1}


def linear_cross_entropy(
    input: da.Array | NDArray,
    weight: da.Array | NDArray,
    target: da.Array | NDArray,
    *,
    reduction: Literal["mean", "sum", "none"] = "mean",
    ignore_index: int = -100,
    grad_loss: float | da.Array | NDArray | None = None,
    vocab_start_index: int = 0,
    return_grad: bool = True,
    output_mask: Sequence[bool] = (True, True),
    workspace_bytes: int | None = None,
    filter_eps: float = 0.0,
    backend: str | None = None,
    num_threads: int | None = 1,
) -> LinearCrossEntropy:
    r"""Compute the cross-entropy loss of a linear layer and its gradients, like `ascend_grad.linear_cross_entropy`.

    Each chunk of tokens is a task that computes its loss and both gradients. The weight gradients are added in pairs,
    in the order of the chunks, in float32 (float64 if `input` is float64). Their sum is rounded at the end.

    Parameters
    ----------
    input : dask.array.Array, shape (BT, H)
        The layer's input; float32, float16, bfloat16 or float64. It may have several chunks along the tokens, but only
        one along the features.
    weight : numpy.ndarray or dask.array.Array, shape (V, H)
        The layer's weight, of the dtype of `input`, in one chunk. Every worker that computes a chunk holds it.
    target : dask.array.Array of int32 or int64, shape (BT,)
        Ids: ``target - vocab_start_index`` is the row of `weight`; or `ignore_index`. It is rechunked to the chunks of
        `input` along the tokens.
    reduction : {"mean", "sum", "none"}, default "mean"
        The loss is the mean or the sum over the rows that are not ignored, or one number per row, 0 for ignored rows.
        For a mean the targets of all chunks are counted before the first gradient is computed.
    ignore_index : int, default -100
        Rows with this target have no loss and no gradient.
    grad_loss : float, or array of shape (BT,), optional
        The gradient with respect to the loss, default 1: one number or, with ``reduction="none"``, also an array with
        one number per row. The array has any of the four dtypes, and is rechunked like `target`.
    vocab_start_index : int, default 0
        The id of the first row of `weight`.
    return_grad : bool, default True
        Whether to compute gradients at all.
    output_mask : pair of bool, default (True, True)
        Which of the two gradients to compute.
    workspace_bytes, filter_eps
        As in `ascend_grad.linear_cross_entropy`, for each chunk.
    backend, num_threads
        As in `softmax_backward`.

    Returns
    -------
    loss : dask.array.Array, shape () or (BT,)
        The loss; float32, or float64 if `input` is float64. The mean over no rows is NaN (and its gradients are 0).
    input_grad : dask.array.Array, shape (BT, H), or None
        The gradient with respect to `input`, in its dtype and its chunks.
    weight_grad : dask.array.Array, shape (V, H), or None
        The gradient with respect to `weight`, in its dtype, in one chunk.

    Raises
    ------
    ParamNullptrError
        161001: `input`, `weight` or `target` is None.
    ParamInvalidError
        161002: an argument is not as described (a dtype or kind: its subclass `ParamTypeError`). Values and blocks are
        checked when their chunk is computed. The message names a target that is neither in the vocabulary nor
        `ignore_index` by its row in the chunk, and a block of another dtype or shape than its array's by its index.

    Notes
    -----
    ``dask.compute(*result)`` computes all three results together. Computing one of them alone costs as much, so
    `return_grad` and `output_mask` should select only the results that are needed.

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
    values = {
        "input": input,
        "weight": weight,
        "target": target,
        "reduction": reduction,
        "ignore_index": ignore_index,
        "grad_loss": grad_loss,
        "vocab_start_index": vocab_start_index,
        "return_grad": return_grad,
        "output_mask": output_mask,
        "workspace_bytes": workspace_bytes,
        "filter_eps": filter_eps,
        **LOSS_DEFAULTS,
    }
    given = list(LINEAR_CROSS_ENTROPY.array_names)
    if getattr(grad_loss, "shape", isinstance(grad_loss, (list, tuple))):  # otherwise it is None or one number
        given.append("grad_loss")
    arrays = as_dask_arrays(values, given, LINEAR_CROSS_ENTROPY)
    call = validated(LINEAR_CROSS_ENTROPY, values | _stand_ins(arrays), num_threads)
    for name, axis in (("input", 1), ("weight", 0), ("weight", 1)):
        check_one_chunk(arrays[name], axis, name, LINEAR_CROSS_ENTROPY)
    tokens = arrays["input"].chunks[0]
    blocks = {
        # method="tasks" suits any scheduler: with a client, dask may choose tasks that only its workers compute.
        name: array.rechunk({0: tokens}, method="tasks").to_delayed(optimize_graph=False).ravel().tolist()
        for name, array in arrays.items()
        if name in _BY_TOKEN
    }

    arguments = call.arguments
    count = None
    if arguments["reduction"] == "mean":
        count_block = delayed(token_chunks.count, pure=True)
        count = _sum([count_block(block, arguments["ignore_index"]) for block in blocks["target"]])
    settings = {name: value for name, value in arguments.items() if name not in (*given, "grad_loss", "reduction")}
    settings["backend"] = backend_of_blocks(backend, LINEAR_CROSS_ENTROPY)
    settings["num_threads"] = num_threads
    settings["reduction"] = "none" if arguments["reduction"] == "none" else "sum"
    compute = delayed(partial(token_chunks.loss_and_gradients, **settings), nout=3, pure=True)
    weight_block = arrays["weight"].to_delayed(optimize_graph=False).item()
    grad_losses = blocks.get("grad_loss", [arguments["grad_loss"]] * len(tokens))
    losses, input_grads, weight_grads = zip(
        *(
            compute(x, weight_block, ids, grad, count)
            for x, ids, grad in zip(blocks["input"], blocks["target"], grad_losses)
        )
    )

    loss_spec, input_spec, weight_spec = call.specs[:3]
    assert loss_spec is not None
    if loss_spec.shape:
        loss = _concatenated(losses, tokens, (), loss_spec.dtype)
    else:
        reduced = delayed(token_chunks.reduced, pure=True)(_sum(losses), count, loss_spec.dtype)
        loss = da.from_delayed(reduced, (), loss_spec.dtype)
    input_grad = weight_grad = None
    if input_spec is not None:
        input_grad = _concatenated(input_grads, tokens, input_spec.shape[1:], input_spec.dtype)
    if weight_spec is not None:
        rounded = delayed(token_chunks.rounded, pure=True)(_sum(weight_grads), weight_spec.dtype)
        weight_grad = da.from_delayed(rounded, weight_spec.shape, weight_spec.dtype)
    return LinearCrossEntropy(loss, input_grad, weight_grad)


def _stand_ins(arrays: dict[str, da.Array]) -> dict[str, NDArray]:
    """Return stand-ins for arrays. If the numbers of tokens agree, they have no rows, as values are checked later."""
    by_token = {name: array for name, array in arrays.items() if name in _BY_TOKEN}
    agree = all(array.ndim == _BY_TOKEN[name] for name, array in by_token.items())
    agree = agree and len({array.shape[0] for array in by_token.values()}) == 1
    return {
        name: stand_in((0, *array.shape[1:]) if agree and name in by_token else array.shape, array.dtype)
        for name, array in arrays.items()
    }


def _sum(parts: Sequence[Delayed]) -> Delayed:
    """Add the parts pairwise in a fixed order, so that the sum does not depend on which part is computed first."""
    add_pair = delayed(token_chunks.add, pure=True)
    while len(parts) > 1:
        odd = parts[len(parts) // 2 * 2 :]
        parts = [add_pair(first, second) for first, second in zip(parts[::2], parts[1::2])] + list(odd)
    return parts[0]


def _concatenated(
    parts: Sequence[Delayed], tokens: tuple[int, ...], width: tuple[int, ...], dtype: np.dtype
) -> da.Array:
    return da.concatenate([da.from_delayed(part, (rows, *width), dtype) for part, rows in zip(parts, tokens)])
