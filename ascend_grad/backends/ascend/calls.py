"""Validated calls on arrays of the host, on arrays of the device, or on tensors: the results, and the memory."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ... import arrays
from ..._call import Call
from ...errors import AscendGradError, MissingKernelError
from ...operators.table import CROSS_ENTROPY
from .. import reference
from . import determinism, operators, quirks, runtime, session, tensor_queue, threads, workspace
from .array import DeviceArray
from .torch_npu import TensorArray


@contextmanager
def _failures_of(call: Call) -> Iterator[None]:
    """Name the operator in errors, and remember what has no kernel."""
    try:
        yield
    except AscendGradError as error:
        error.operator = call.operator.name
        if isinstance(error, MissingKernelError):
            runtime.mark_operator_missing(error)
        raise


def workspace_size(call: Call) -> int:
    with _failures_of(call), np.errstate(all="ignore"):
        return workspace.workspace_size(call)


def run(call: Call) -> Any:
    with _failures_of(call), np.errstate(all="ignore"):
        results: tuple[Any, ...]
        if call.device is None:
            results = _from_the_host(call)
        elif isinstance(call.arrays[0], TensorArray):
            results = _from_tensors(call)
        else:
            results = _from_the_device(call)
    return results if len(call.operator.results) > 1 else results[0]


def _rounded(array: Any, dtype: np.dtype) -> Any:
    """Round an array of the host to a dtype. An array of the device is returned unchanged."""
    if isinstance(array, DeviceArray) or array.dtype == dtype:
        return array
    rounded = np.empty(array.shape, dtype)
    arrays.round_into(rounded, array)
    return rounded


def _from_the_host(call: Call) -> tuple[NDArray | None, ...]:
    """Compute a call on arrays of the host, which are copied to the device, and its results back."""
    if quirks.is_empty(call):
        return _empty(call)
    # New results are allocated first: nothing has happened yet if that fails.
    results = tuple(
        None if spec is None else np.empty(spec.shape, spec.dtype) if out is None else out
        for spec, out in zip(call.specs, call.outs)
    )
    level = determinism.level(call)
    with session.session_on(threads.chosen_device()).call(determinism_level=level) as here:
        computed = list(zip(operators.OPERATORS[call.operator.name](here, call), results))
        here.fetch((a, result) for a, result in computed if isinstance(a, DeviceArray) and result is not None)
    for array, result in computed:
        if result is None:
            continue
        if isinstance(array, DeviceArray):
            array.cache.clear_padding(result)
        elif isinstance(array, np.ndarray):
            arrays.round_into(result, array)
    return results


def _from_the_device(call: Call) -> tuple[DeviceArray | None, ...]:
    """Compute a call on arrays of the device, whose results are such arrays."""
    first = call.arrays[0]
    assert isinstance(first, DeviceArray)
    values = _empty(call) if quirks.is_empty(call) else None
    level = determinism.level(call)
    with session.session_for_arrays(first.device).call(determinism_level=level) as here:
        computed = operators.OPERATORS[call.operator.name](here, call) if values is None else values
        results = tuple(
            None if array is None or spec is None else here.put(_rounded(array, spec.dtype))
            for array, spec in zip(computed, call.specs)
        )
        here.keep(*results)
    return results


def _from_tensors(call: Call) -> tuple[DeviceArray | None, ...]:
    """Compute a call on tensors, whose results are tensors; the work is on torch's current stream on return."""
    first = call.arrays[0]
    assert isinstance(first, TensorArray)
    values = _tensors_without_elements(call) if quirks.is_empty(call) else None
    with tensor_queue.on_current_stream(first.device, determinism_level=determinism.level(call)) as here:
        if values is not None:
            places: Any = call.outs
            return tuple(None if each is None else here.from_host(each, out) for each, out in zip(values, places))
        results: list[DeviceArray | None] = []
        for result, spec, out in zip(operators.OPERATORS[call.operator.name](here, call), call.specs, call.outs):
            dtype = spec.dtype if spec is not None and out is None else None  # torch converts what goes into an out
            array: Any = None if result is None or spec is None else here.put(result, dtype)
            if out is not None:
                out.tensor.copy_(array.tensor)
            results.append(array if out is None else out)
    return tuple(results)


def copy_to_device_of(array: NDArray, other: DeviceArray) -> DeviceArray:
    """Copy an array of the host to the device of another array, as an array of the same kind."""
    if isinstance(other, TensorArray):
        with tensor_queue.on_current_stream(other.device) as queue:
            return queue.from_host(array)
    with session.session_on(other.device).call() as here:
        result = here.put(array)
        here.keep(result)
    if array.ndim < 2:
        result.remember(np.array(array))
    return result


def _empty(call: Call) -> tuple[NDArray | None, ...]:
    """Compute a call with an array of no elements by the reference: the device leaves such results unwritten.

    Vectors of the device are copied to the host if there are rows. No result depends on other elements: they become 0
    there.
    """
    has_rows = call.operator is not CROSS_ENTROPY and call.dims.get("BT", 0) > 0

    def on_the_host(value: Any) -> Any:
        if not isinstance(value, DeviceArray):
            return value
        is_read = has_rows and value.ndim < 2
        return value.host_values() if is_read else np.broadcast_to(np.zeros((), value.dtype), value.shape)

    arguments = {name: on_the_host(value) for name, value in call.arguments.items()}
    results = reference.run(call.with_arguments(arguments), 0)
    return results if len(call.operator.results) > 1 else (results,)


def _outside(call: Call) -> NDArray:
    """Return which rows have targets that are outside of the weight, and neither masked nor ignored."""
    a = call.arguments
    if call.operator.name == "fused_linear_cross_entropy_loss_grad":
        target, start = a["masked_target"].host_values(), 0
        present = ~arrays.unpacked(a["target_mask"].host_values(), target.size)
    else:
        target, start = a["target"].host_values(), a["vocab_start_index"]
        present = target != a["ignore_index"]
    return present & ~((target >= start) & (target < start + call.dims["V"]))


def _tensors_without_elements(call: Call) -> tuple[NDArray | None, ...]:
    """Compute a call on tensors without elements. Rows whose targets are outside of the weight become NaN."""
    if "input_grad" not in call.operator.results or call.operator is CROSS_ENTROPY:
        return _empty(call)  # logits without elements have no rows
    a, outside = call.arguments, _outside(call)
    if "target" in a:
        others = {"target": np.where(outside, a["ignore_index"], a["target"].host_values().astype(np.int64))}
    else:
        others = {"grad": np.where(outside, np.float32(0), a["grad"].host_values())}
    results = dict(zip(call.operator.results, _empty(call.with_arguments(a | others))))
    extent = call.dims["V"]
    lse = np.log(extent) if extent else -np.inf
    for name, value in {"loss": np.nan, "input_grad": np.nan, "log_prob": np.nan, "lse": lse}.items():
        result = results.get(name)
        if result is not None and outside.any():
            result[outside if result.ndim else ()] = value
    return tuple(results.values())
