"""Cross-entropy of logits and its gradient, computed block by block."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any, Literal

import dask.array as da
import numpy as np
from dask.delayed import Delayed, delayed
from numpy.typing import NDArray

from .._loss_arguments import weight_sums
from ..operators.results import LossResult, loss_result
from ..operators.table import CROSS_ENTROPY
from . import means, row_blocks
from .arrays import as_dask_arrays, backend_of_blocks, check_one_chunk, stand_in, validated

#: Arguments with a number for each row; `target` and `target_prob` may have K.
_OF_ROWS = (
    "target", "target_prob", "token_weight", "temperature", "grad_loss", "grad_lse", "grad_log_prob", "grad_entropy",
)  # fmt: skip
#: Arguments that a mean is divided by sums of.
_WEIGHTS = ("target", "token_weight", "class_weight", "target_prob")


def cross_entropy(
    input: da.Array | NDArray,
    target: da.Array | NDArray,
    dim: int = -1,
    *,
    reduction: Literal["mean", "sum", "none"] = "mean",
    ignore_index: int = -100,
    class_weight: da.Array | NDArray | None = None,
    token_weight: da.Array | NDArray | None = None,
    target_prob: da.Array | NDArray | None = None,
    label_smoothing: float = 0.0,
    lse_square_scale: float = 0.0,
    temperature: float | da.Array | NDArray = 1.0,
    denominator: float | None = None,
    grad_loss: float | da.Array | NDArray | None = None,
    grad_lse: da.Array | NDArray | None = None,
    grad_log_prob: da.Array | NDArray | None = None,
    grad_entropy: da.Array | NDArray | None = None,
    outputs: Sequence[Literal["lse", "log_prob", "entropy", "predicted", "correct"]] = (),
    return_grad: bool = True,
    backend: str | None = None,
    num_threads: int | None = 1,
) -> LossResult[da.Array]:
    r"""Compute the cross-entropy loss of logits and its gradient, like `ascend_grad.cross_entropy`.

    Each block of `input` is a task that computes its losses, its gradient and its outputs. For a mean, the weights of
    all blocks are summed before the first gradient is computed.

    Parameters
    ----------
    input : dask.array.Array, shape (...)
        The logits: rank 0 to 8; float32, float16, bfloat16 or float64. In one chunk along `dim`.
    target : dask.array.Array of int32 or int64
        The index of each row's target, or `ignore_index`: the shape of `input` without `dim`, and with `target_prob`
        one more axis, the last one. Like all arrays of rows, it is rechunked to the chunks of `input`.
    dim : int, default -1
        The axis of the classes.
    reduction, ignore_index
        As in `ascend_grad.cross_entropy`.
    class_weight : numpy.ndarray or dask.array.Array, shape (V,), optional
        The weights of the classes, which every task holds.
    token_weight, target_prob : array, optional
        As in `ascend_grad.cross_entropy`.
    label_smoothing, lse_square_scale
        As in `ascend_grad.cross_entropy`.
    temperature : float or array, default 1.0
        As in `ascend_grad.cross_entropy`.
    denominator
        As in `ascend_grad.cross_entropy`.
    grad_loss : float or array, optional
        As in `ascend_grad.cross_entropy`.
    grad_lse, grad_log_prob, grad_entropy : array, optional
        As in `ascend_grad.cross_entropy`.
    outputs, return_grad
        As in `ascend_grad.cross_entropy`.
    backend, num_threads
        As in `softmax_backward`.

    Returns
    -------
    LossResult
        The loss, the gradient and the requested outputs as dask arrays, yet to be computed, of the shapes and dtypes
        that `ascend_grad.cross_entropy` gives them.

    Raises
    ------
    ParamNullptrError
        161001: `input` or `target` is None.
    ParamInvalidError
        161002: an argument is not as described (a dtype or kind: its subclass `ParamTypeError`). Values and blocks are
        checked when their block is computed.

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
    values: dict[str, Any] = {
        "input": input,
        "target": target,
        "dim": dim,
        "reduction": reduction,
        "ignore_index": ignore_index,
        "class_weight": class_weight,
        "token_weight": token_weight,
        "target_prob": target_prob,
        "label_smoothing": label_smoothing,
        "lse_square_scale": lse_square_scale,
        "temperature": temperature,
        "denominator": denominator,
        "grad_loss": grad_loss,
        "grad_lse": grad_lse,
        "grad_log_prob": grad_log_prob,
        "grad_entropy": grad_entropy,
        "outputs": outputs,
        "return_grad": return_grad,
    }
    for name in ("temperature", "grad_loss"):
        if isinstance(values[name], (list, tuple)):
            values[name] = np.asarray(values[name])
    given = ["input", "target", "class_weight", "token_weight", "target_prob"]
    given += ["grad_lse", "grad_log_prob", "grad_entropy"]
    given += [
        name
        for name in ("temperature", "grad_loss")
        if isinstance(values[name], da.Array) or (isinstance(values[name], np.ndarray) and values[name].ndim)
    ]
    arrays = as_dask_arrays(values, given, CROSS_ENTROPY)
    stand_ins = {name: stand_in(array.shape, array.dtype) for name, array in arrays.items()}
    if "temperature" in stand_ins:  # a temperature is positive
        stand_ins["temperature"] = np.broadcast_to(
            np.ones((), arrays["temperature"].dtype), arrays["temperature"].shape
        )
    call = validated(CROSS_ENTROPY, values | stand_ins, num_threads)
    arguments = call.arguments
    axis = arguments["dim"]
    if arrays["input"].ndim:
        check_one_chunk(arrays["input"], axis, "input", CROSS_ENTROPY)
    chunks = tuple(lengths for i, lengths in enumerate(arrays["input"].chunks) if i != axis)
    blocks = _blocks(arrays, chunks)

    settings = {name: value for name, value in arguments.items() if name not in arrays}
    settings["backend"] = backend_of_blocks(backend, CROSS_ENTROPY)
    settings["num_threads"] = num_threads
    sums = None
    if means.is_over_weights(settings):
        weigh = delayed(partial(weight_sums, ignore_index=settings["ignore_index"]), pure=True)
        sums = _sum([weigh(**{name: block[name] for name in _WEIGHTS if name in block}) for block in blocks.values()])
    requested = settings["outputs"]
    compute = delayed(partial(row_blocks.loss_and_gradient, settings), nout=2 + len(requested), pure=True)
    results = {index: compute(sums, **block) for index, block in blocks.items()}

    specs = dict(zip(CROSS_ENTROPY.results, call.specs))
    returned: list[da.Array | None] = []
    for number, name in enumerate(("loss", "input_grad", *requested)):
        spec = specs[name]
        parts = {index: result[number] for index, result in results.items()}
        if spec is None:
            returned.append(None)
        elif name == "correct":
            returned.append(da.from_delayed(_sum(list(parts.values())), (), spec.dtype))
        elif name == "loss" and settings["reduction"] != "none":
            reduced = delayed(means.reduced, pure=True)(_sum(list(parts.values())), sums, settings, spec.dtype)
            returned.append(da.from_delayed(reduced, (), spec.dtype))
        else:
            other = arrays["input"].chunks[axis : axis + 1] if name == "input_grad" else ()
            returned.append(_assembled(parts, chunks, axis, other, spec.dtype))
    return loss_result(("loss", "input_grad", *requested), returned)


def _blocks(arrays: dict[str, da.Array], chunks: tuple) -> dict[tuple[int, ...], dict[str, Delayed]]:
    """Return the blocks of all arrays by the index of a block of rows."""
    result: dict[tuple[int, ...], dict[str, Delayed]] = {
        index: {} for index in np.ndindex(*(len(lengths) for lengths in chunks))
    }
    for name, array in arrays.items():
        if name in _OF_ROWS:
            array = array.rechunk(
                {**dict(enumerate(chunks)), **dict.fromkeys(range(len(chunks), array.ndim), -1)}, method="tasks"
            )
        elif name == "class_weight":
            array = array.rechunk(-1)
        parts = array.to_delayed(optimize_graph=False)
        for number, index in enumerate(result):
            result[index][name] = parts.item() if name == "class_weight" else parts.ravel()[number]
    return result


def _assembled(
    parts: dict[tuple[int, ...], Delayed], chunks: tuple, place: int, other: tuple, dtype: np.dtype
) -> da.Array:
    """Return an array of blocks of rows.

    `other` has the chunks of the axis `place`, along which there is one block, or it is empty.
    """
    blocks = {}
    for index, part in parts.items():
        shape = [lengths[i] for lengths, i in zip(chunks, index)]
        shape[place:place] = [lengths[0] for lengths in other]
        blocks[index] = da.from_delayed(part, tuple(shape), dtype)
    for axis in reversed(range(len(chunks))):
        # Blocks that differ in their last index alone are joined.
        joined: dict[tuple[int, ...], list[da.Array]] = {}
        for index, block in blocks.items():
            joined.setdefault(index[:-1], []).append(block)
        at = axis + (1 if other and axis >= place else 0)
        blocks = {index: da.concatenate(each, axis=at) for index, each in joined.items()}
    return blocks[()]


def _sum(parts: Sequence[Delayed]) -> Delayed:
    return delayed(row_blocks.total, pure=True)(list(parts))
