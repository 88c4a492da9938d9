"""Operators of linear layers, computed per chunk of tokens: the cross-entropy with its gradients, and the top k."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from itertools import cycle
from typing import Any, Literal

import dask.array as da
import numpy as np
from dask.delayed import Delayed, delayed
from numpy.typing import NDArray

from .._call import Call, Operator
from .._loss_arguments import weight_sums
from ..operators.results import LinearTopK, LossResult, loss_result
from ..operators.table import LINEAR_CROSS_ENTROPY, LINEAR_TOP_K
from . import means, token_chunks
from .arrays import as_dask_arrays, backend_of_blocks, check_one_chunk, stand_in, validated

#: Arguments with a row for each token; the others that are arrays belong to the vocabulary.
_BY_TOKEN = ("input", "target", "target_prob", "grad_loss", "token_weight", "temperature")
#: Arguments that are arrays or None, and arguments that are arrays or numbers.
_ARRAYS, _OR_NUMBERS = ("token_weight", "class_weight", "target_prob", "bias"), ("grad_loss", "temperature")


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
    token_weight: da.Array | NDArray | None = None,
    class_weight: da.Array | NDArray | None = None,
    target_prob: da.Array | NDArray | None = None,
    label_smoothing: float = 0.0,
    lse_square_scale: float = 0.0,
    temperature: float | da.Array | NDArray = 1.0,
    denominator: float | None = None,
    bias: da.Array | NDArray | None = None,
    logit_scale: float = 1.0,
    softcap: float | None = None,
    outputs: Sequence[Literal["lse", "log_prob", "entropy", "predicted", "correct"]] = (),
    backend: str | None = None,
    num_threads: int | None = 1,
) -> LossResult[da.Array]:
    r"""Compute the cross-entropy loss of a linear layer and its gradients, like `ascend_grad.linear_cross_entropy`.

    Each chunk of tokens is a task that computes its losses, its outputs and all gradients. The gradients of the weight
    and the bias are added in pairs, in the order of the chunks: gradients of the weight in float32 (float64 if `input`
    is float64), gradients of the bias in float64. The sums are rounded at the end.

    Parameters
    ----------
    input : dask.array.Array, shape (BT, H)
        The layer's input; float32, float16, bfloat16 or float64. It may have several chunks along the tokens, but only
        one along the features.
    weight : numpy.ndarray or dask.array.Array, shape (V, H)
        The layer's weight, of the dtype of `input`, in one chunk. Every worker that computes a chunk holds it.
    target : dask.array.Array of int32 or int64, shape (BT,), or (BT, K) with `target_prob`
        Ids: ``target - vocab_start_index`` is the row of `weight`; or `ignore_index`. Like all arrays with a number for
        each token, it is rechunked to the chunks of `input` along the tokens.
    reduction : {"mean", "sum", "none"}, default "mean"
        The loss is the mean or the sum over the rows that are not ignored, or one number per row, 0 for ignored rows.
        For a mean without `denominator`, the weights of the rows of all chunks are added up before the first gradient
        is computed.
    ignore_index : int, default -100
        Rows with this target have no loss and no gradient.
    grad_loss : float, or array of shape (BT,), optional
        The gradient with respect to the loss, default 1: one number or, with ``reduction="none"``, also an array with
        one number per row, of any of the four dtypes.
    vocab_start_index : int, default 0
        The id of the first row of `weight`.
    return_grad : bool, default True
        Whether to compute gradients at all.
    output_mask : pair of bool, default (True, True)
        Which of the two gradients to compute.
    workspace_bytes, filter_eps
        As in `ascend_grad.linear_cross_entropy`, for each chunk.
    token_weight : array, shape (BT,) and (BT, K), optional
        As in `ascend_grad.linear_cross_entropy`.
    class_weight : numpy.ndarray or dask.array.Array, shape (V,), optional
        As in `ascend_grad.linear_cross_entropy`. Every worker that computes a chunk holds them.
    target_prob : array, shape (BT,) and (BT, K), optional
        As in `ascend_grad.linear_cross_entropy`.
    label_smoothing, lse_square_scale
        As in `ascend_grad.linear_cross_entropy`.
    temperature : float, or array of shape (BT,), default 1.0
        As in `ascend_grad.linear_cross_entropy`.
    denominator
        As in `ascend_grad.linear_cross_entropy`.
    bias : numpy.ndarray or dask.array.Array, shape (V,), optional
        As in `ascend_grad.linear_cross_entropy`. Every worker that computes a chunk holds them.
    logit_scale, softcap, outputs
        As in `ascend_grad.linear_cross_entropy`.
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
    bias_grad : dask.array.Array, shape (V,), or None
        The gradient with respect to `bias`, in its dtype. The field exists if `bias` is given.
    lse, log_prob, entropy, predicted, correct : dask.array.Array
        The requested outputs, of the shapes and dtypes that `ascend_grad.linear_cross_entropy` gives them.

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
        "token_weight": token_weight,
        "class_weight": class_weight,
        "target_prob": target_prob,
        "label_smoothing": label_smoothing,
        "lse_square_scale": lse_square_scale,
        "temperature": temperature,
        "denominator": denominator,
        "bias": bias,
        "logit_scale": logit_scale,
        "softcap": softcap,
        "outputs": outputs,
    }
    call, arrays = _prepared(LINEAR_CROSS_ENTROPY, values, num_threads)
    tokens = arrays["input"].chunks[0]
    blocks = _blocks(arrays)

    arguments = {name: value for name, value in call.arguments.items() if name not in arrays}
    sums = None
    if means.is_over_weights(arguments):
        shared = {name: arguments[name] for name in ("ignore_index", "vocab_start_index")}
        weigh = delayed(partial(weight_sums, **shared), pure=True)
        # These tasks get neither the largest arrays nor arguments without an influence on the sums.
        names = ("target", "token_weight", "class_weight", "target_prob")
        sums = _sum([weigh(**{name: block[name] for name in names if name in block}) for block in blocks])
    specs = {name: spec for name, spec in zip(LINEAR_CROSS_ENTROPY.results, call.specs) if spec is not None}
    compute = delayed(
        partial(
            token_chunks.results,
            arguments,
            requested=tuple(specs),
            backend=backend_of_blocks(backend, LINEAR_CROSS_ENTROPY),
            num_threads=num_threads,
        ),
        nout=len(specs),
        pure=True,
    )
    parts = dict(zip(specs, zip(*(compute(sums, **block) for block in blocks))))

    results: dict[str, da.Array | None] = dict.fromkeys(LINEAR_CROSS_ENTROPY.results)
    for name, spec in specs.items():
        if name in ("weight_grad", "bias_grad", "correct"):
            rounded = delayed(token_chunks.rounded, pure=True)(_sum(parts[name]), spec.dtype)
            results[name] = da.from_delayed(rounded, spec.shape, spec.dtype)
        elif spec.shape:
            results[name] = _concatenated(parts[name], tokens, spec.shape[1:], spec.dtype)
        else:
            reduced = delayed(means.reduced, pure=True)(_sum(parts[name]), sums, arguments, spec.dtype)
            results[name] = da.from_delayed(reduced, (), spec.dtype)
    fields = (*(("bias_grad",) if bias is not None else ()), *call.arguments["outputs"])
    names = ("loss", "input_grad", "weight_grad", *fields)
    return loss_result(names, map(results.__getitem__, names))


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

    Each chunk of tokens is a task.

    Parameters
    ----------
    input : dask.array.Array, shape (BT, H)
        The layer's input; float32, float16, bfloat16 or float64. It may have several chunks along the tokens, but only
        one along the features.
    weight : numpy.ndarray or dask.array.Array, shape (V, H)
        The layer's weight, of the dtype of `input`, with at least one row, in one chunk. Every worker that computes a
        chunk holds it.
    k : int
        The number of log-probabilities of each row: 1 to 128, and at most V.
    temperature : float, or array of shape (BT,), default 1.0
        The divisor of the logits, positive and finite: one number, or one for each row, of any of the four dtypes.
    bias : numpy.ndarray or dask.array.Array, shape (V,), optional
        The layer's bias, of any of the four dtypes. It is rechunked to one chunk.
    logit_scale, softcap
        As in `ascend_grad.linear_top_k`.
    workspace_bytes
        As in `ascend_grad.linear_top_k`, for each chunk.
    backend, num_threads
        As in `softmax_backward`.

    Returns
    -------
    log_prob : dask.array.Array, shape (BT, k)
        The k largest log-probabilities of each row, from the largest down; float32, or float64 if `input` is float64.
        It has the chunks of `input` along the tokens.
    index : dask.array.Array of int64, shape (BT, k)
        Their rows of `weight`, in the same chunks.

    Raises
    ------
    ParamNullptrError
        161001: `input` or `weight` is None.
    ParamInvalidError
        161002: an argument is not as described (a dtype or kind: its subclass `ParamTypeError`). Blocks are checked
        when their chunk is computed.

    Notes
    -----
    ``dask.compute(*result)`` computes both results together. Results depend on the chunks of tokens, not on the
    scheduler, its workers or their order.

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
    values = {
        "input": input,
        "weight": weight,
        "k": k,
        "temperature": temperature,
        "bias": bias,
        "logit_scale": logit_scale,
        "softcap": softcap,
        "workspace_bytes": workspace_bytes,
    }
    call, arrays = _prepared(LINEAR_TOP_K, values, num_threads)
    settings = {name: value for name, value in call.arguments.items() if name not in arrays}
    settings["backend"] = backend_of_blocks(backend, LINEAR_TOP_K)
    settings["num_threads"] = num_threads
    compute = delayed(partial(token_chunks.top_k, **settings), nout=2, pure=True)
    parts = zip(*(compute(**block) for block in _blocks(arrays)))
    tokens = arrays["input"].chunks[0]
    return LinearTopK._make(
        _concatenated(each, tokens, spec.shape[1:], spec.dtype)
        for each, spec in zip(parts, call.specs)
        if spec is not None
    )


def _prepared(operator: Operator, values: dict[str, Any], num_threads: int | None) -> tuple[Call, dict[str, da.Array]]:
    """Validate the call that all chunks together make. Return it with its arrays."""
    arrays = as_dask_arrays(values, _given(values, operator), operator)
    call = validated(operator, values | _stand_ins(arrays), num_threads)
    for name, axis in (("input", 1), ("weight", 0), ("weight", 1)):
        check_one_chunk(arrays[name], axis, name, operator)
    return call, arrays


def _given(values: dict[str, Any], operator: Operator) -> list[str]:
    """Return the names of the arguments that are arrays, or None."""
    optional = [name for name in _ARRAYS if name in values]
    optional += [  # the others are one number, or None
        name for name in _OR_NUMBERS if getattr(values.get(name), "shape", isinstance(values.get(name), (list, tuple)))
    ]
    return [*operator.array_names, *optional]


def _stand_ins(arrays: dict[str, da.Array]) -> dict[str, NDArray]:
    """Return stand-ins for arrays. If the numbers of tokens agree, they have no rows, as values are checked later."""
    rows, several = arrays["input"].shape[:1], arrays["target_prob"].shape[1:] if "target_prob" in arrays else ()
    shapes = {name: arrays[name].shape for name in _BY_TOKEN if name in arrays and name != "input"}
    agree = arrays["input"].ndim == 2 and len(several) < 2 and 0 not in several
    agree = agree and all(
        shape == (rows + several if name in ("target", "target_prob") else rows) for name, shape in shapes.items()
    )
    return {
        name: stand_in((0, *array.shape[1:]) if agree and name in _BY_TOKEN else array.shape, array.dtype)
        for name, array in arrays.items()
    }


def _blocks(arrays: dict[str, da.Array]) -> list[dict[str, Delayed]]:
    """Return the blocks of all arrays for each chunk of tokens. Arrays of the vocabulary are in each of them."""
    tokens = arrays["input"].chunks[0]
    blocks: list[dict[str, Delayed]] = [{} for _ in tokens]
    for name, array in arrays.items():
        chunks: dict[int, Any] = dict.fromkeys(range(array.ndim), -1)
        if name in _BY_TOKEN:
            chunks[0] = tokens
        # method="tasks" suits any scheduler: with a client, dask may choose tasks that only its workers compute.
        parts = array.rechunk(chunks, method="tasks").to_delayed(optimize_graph=False).ravel().tolist()
        # A vocabulary's array has one part for all chunks, as may have one without tokens, which dask leaves as it is.
        for block, part in zip(blocks, cycle(parts)):
            block[name] = part
    return blocks


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
