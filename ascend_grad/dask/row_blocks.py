"""Losses over blocks of rows: their arrays, their tasks, and the arrays of their results."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from itertools import cycle
from typing import Any, NamedTuple

import dask.array as da
import numpy as np
from dask.delayed import Delayed, delayed
from numpy.typing import NDArray

from .._call import Call, Operator
from .._loss_arguments import weight_sums
from ..arguments import MAX_INDEX
from ..operators.options import NUMBER_OR_PER_ROW, OPTIONS, OUTPUTS, PER_CLASS, is_zero
from ..operators.results import loss_result
from . import tasks
from .arrays import as_dask_arrays, backend_of_blocks, check_one_chunk, placeholder, validated

#: Arguments of the vocabulary, which all tasks hold. The other arrays have a number, or a row, for each row.
_WHOLE = ("weight", *(option.name for option in OPTIONS.values() if option.kind == PER_CLASS))
#: Arguments that are one number, or an array with a number for each row.
OR_NUMBERS = ("grad_loss", *(option.name for option in OPTIONS.values() if option.kind == NUMBER_OR_PER_ROW))
#: Arguments that the divisor of a mean depends on, which are small.
_WEIGHTS = ("target", *(each.name for each in OPTIONS.values() if each.of_logits and each.is_array))

Index = tuple[int, ...]


class RowBlocks(NamedTuple):
    """A checked call, and its arrays in blocks of rows."""

    call: Call
    arrays: dict[str, da.Array]
    #: The axis of the classes or features of `input`, in one chunk.
    axis: int
    #: The chunks of the other axes.
    chunks: tuple[tuple[int, ...], ...]
    #: The arrays' blocks of each block of rows.
    blocks: dict[Index, dict[str, Delayed]]

    @property
    def settings(self) -> dict[str, Any]:
        """Return the arguments that are no arrays."""
        return {name: value for name, value in self.call.arguments.items() if name not in self.arrays}

    def assembled(
        self, parts: Sequence[Delayed], width: int | None, dtype: np.dtype, place: int | None = None
    ) -> da.Array:
        """Join the blocks of an array of rows, each of `width` elements, or of one number for None.

        The elements of a row are along the axis `place`; None: along `axis`.
        """
        blocks, place = {}, self.axis if place is None else place
        for index, part in zip(self.blocks, parts):
            shape = [lengths[i] for lengths, i in zip(self.chunks, index)]
            shape[place:place] = [] if width is None else [width]
            blocks[index] = da.from_delayed(part, tuple(shape), dtype)
        for axis in reversed(range(len(self.chunks))):
            # Blocks that differ in their last index alone are joined.
            joined: dict[Index, list[da.Array]] = {}
            for index, block in blocks.items():
                joined.setdefault(index[:-1], []).append(block)
            at = axis + (width is not None and axis >= place)
            blocks = {index: da.concatenate(each, axis=at) for index, each in joined.items()}
        return blocks[()]


def row_blocks(operator: Operator, values: dict[str, Any], num_threads: int | None) -> RowBlocks:
    """Check the call that all blocks of rows together make, and return it with the blocks."""
    given = [*operator.array_names, *(name for name in operator.optional_names if _is_array(values, name))]
    arrays = as_dask_arrays(values, given, operator)
    if "target" in arrays:
        arrays["target"] = _as_classes(arrays["target"])
    call = validated(operator, values | _placeholders(operator, arrays), num_threads)
    axis = call.arguments.get("axis", max(arrays["input"].ndim - 1, 0))
    if arrays["input"].ndim:
        check_one_chunk(arrays["input"], axis, "input", operator)
    for number in range(2 if "weight" in arrays else 0):
        check_one_chunk(arrays["weight"], number, "weight", operator)
    chunks = tuple(lengths for i, lengths in enumerate(arrays["input"].chunks) if i != axis)
    return RowBlocks(call, arrays, axis, chunks, _blocks(arrays, chunks, axis))


def _as_classes(target: da.Array) -> da.Array:
    """Convert targets of another integer dtype to int64, in which those that are too large stay too large."""
    if target.dtype.kind not in "iu" or (target.dtype.kind == "i" and target.dtype.itemsize >= 4):
        return target
    return (da.minimum(target, MAX_INDEX) if target.dtype.itemsize == 8 else target).astype(np.int64)


def _is_array(values: dict[str, Any], name: str) -> bool:
    """Return whether an argument is an array, or None."""
    value = values[name]
    if name not in OR_NUMBERS:
        return True
    # A dask array without dimensions has the shape of the rows of one row.
    is_one_row = isinstance(value, da.Array) and getattr(values["input"], "ndim", 2) < 2
    return isinstance(value, (list, tuple)) or is_one_row or bool(getattr(value, "shape", ()))


def _placeholders(operator: Operator, arrays: dict[str, da.Array]) -> dict[str, NDArray]:
    """Return placeholders for arrays, whose values are checked later: 1, or 0 for integers.

    If the numbers of rows of a layer's arrays agree, these have no rows, as the vocabulary may not have the target 0.
    """
    rows = arrays["input"].shape[:-1]
    several = arrays["target_prob"].shape[len(rows) :] if "target_prob" in arrays else ()
    agree = "weight" in arrays and len(rows) > 0 and len(several) < 2 and 0 not in several
    for name, array in arrays.items():
        if name not in ("input", *_WHOLE):
            agree = agree and array.shape == (rows + several if name in ("target", "target_prob") else rows)
    return {
        name: placeholder((0, *array.shape[1:]) if agree and name not in _WHOLE else array.shape, array.dtype)
        for name, array in arrays.items()
    }


def _blocks(arrays: dict[str, da.Array], chunks: tuple, axis: int) -> dict[Index, dict[str, Delayed]]:
    """Return the blocks of all arrays by the index of a block of rows. Dense targets have the axis of the classes."""
    result: dict[Index, dict[str, Delayed]] = {index: {} for index in np.ndindex(*map(len, chunks))}
    for name, array in arrays.items():
        if name != "input":
            lengths: dict[int, Any] = dict.fromkeys(range(array.ndim), -1)
            if name == "target" and array.dtype.kind not in "iu" and array.ndim > len(chunks):
                lengths |= dict(enumerate((*chunks[:axis], -1, *chunks[axis:])))
            elif name not in _WHOLE:
                lengths |= dict(enumerate(chunks))
            # method="tasks" suits any scheduler: with a client, dask may choose tasks that only its workers compute.
            array = array.rechunk(lengths, method="tasks")
        parts = array.to_delayed(optimize_graph=False).ravel().tolist()
        # A vocabulary's array has one part for all blocks, as may have one without rows, which dask leaves as it is.
        for block, part in zip(result.values(), cycle(parts)):
            block[name] = part
    return result


def loss(operator: Operator, values: dict[str, Any], *, in_pairs: bool) -> Any:
    """Return the result of a loss for these arguments by name. `in_pairs` is as for `_sum`."""
    num_threads = values["num_threads"]
    if is_zero(values["target_prob"]):
        values = {**values, "target_prob": da.zeros(np.shape(values["target"]), dtype=np.float32)}
    rows = row_blocks(operator, values, num_threads)
    settings, blocks = rows.settings, rows.blocks.values()
    sums = None
    if tasks.is_over_weights(settings):
        shared = {name: settings[name] for name in ("ignore_index", "vocab_start_index", "axis") if name in settings}
        weigh = delayed(partial(weight_sums, **shared), pure=True)
        # These tasks get neither the largest arrays nor arguments without an influence on the sums.
        sums = _sum([weigh(**{name: block[name] for name in _WEIGHTS if name in block}) for block in blocks], in_pairs)
    specs = {name: spec for name, spec in zip(operator.results, rows.call.specs) if spec is not None}
    options = {"backend": backend_of_blocks(values["backend"], operator), "num_threads": num_threads}
    compute = partial(tasks.loss, operator.name, settings, requested=tuple(specs), **options)
    compute = delayed(compute, nout=len(specs), pure=True)
    parts = dict(zip(specs, zip(*(compute(sums, index=index, **block) for index, block in rows.blocks.items()))))

    results: dict[str, da.Array | None] = dict.fromkeys(operator.results)
    for name, spec in specs.items():
        if name in ("weight_grad", "bias_grad", "correct"):
            rounded = delayed(tasks.rounded, pure=True)(_sum(parts[name], in_pairs), spec.dtype)
            results[name] = da.from_delayed(rounded, spec.shape, spec.dtype)
        elif name == "loss" and settings["reduction"] != "none":
            reduced = delayed(tasks.reduced, pure=True)(_sum(parts[name], in_pairs), sums, settings, spec.dtype)
            results[name] = da.from_delayed(reduced, (), spec.dtype)
        elif name in OUTPUTS and OUTPUTS[name].is_of_targets and "target_prob" in rows.arrays:
            results[name] = rows.assembled(parts[name], spec.shape[-1], spec.dtype, len(rows.chunks))
        else:
            input = rows.arrays["input"]
            is_full = name == "input_grad" or (name in OUTPUTS and OUTPUTS[name].is_of_logits)
            width = input.shape[rows.axis] if is_full and input.ndim else None
            results[name] = rows.assembled(parts[name], width, spec.dtype)
    gradients = [f"{name}_grad" for name in ("input", "weight", "bias") if values.get(name) is not None]
    names = ("loss", *gradients, *rows.call.arguments["outputs"])
    return loss_result(names, map(results.__getitem__, names))


def _sum(parts: Sequence[Delayed], in_pairs: bool) -> Delayed:
    """Add the parts in a fixed order, so that the sum does not depend on which part is computed first.

    Sums of two parts at a time need not keep all parts, which may be gradients of a weight.
    """
    add = delayed(tasks.total, pure=True)
    while in_pairs and len(parts) > 1:
        odd = parts[len(parts) // 2 * 2 :]
        parts = [add([first, second]) for first, second in zip(parts[::2], parts[1::2])] + list(odd)
    return parts[0] if in_pairs else add(list(parts))
