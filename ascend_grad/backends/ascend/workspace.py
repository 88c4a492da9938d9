"""The bytes of memory that the first stages of the device's operators ask for.

The first stage looks at shapes, dtypes and layouts alone. So the tensors here have no memory, and nothing is copied or
allocated on the device. No second stage follows: the executors are destroyed.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from ... import _aclnn, arrays
from ..._call import Call
from . import determinism, quirks, session, threads
from .array import DeviceArray
from .queue import Queue

FLOAT32 = np.dtype(np.float32)
UINT8 = np.dtype(np.uint8)
INT64 = np.dtype(np.int64)


class Described(NamedTuple):
    """The description of an array for the device, without memory."""

    shape: tuple[int, ...]
    dtype: np.dtype
    #: Strides, offset and space as `_aclnn.Tensor` takes them; None if C-contiguous.
    layout: tuple[tuple[int, ...], int, int] | None = None


#: The first stage of an operator, and its arguments, with descriptions of arrays.
Stage = tuple[Callable[..., _aclnn.Plan], tuple[Any, ...]]


def workspace_size(call: Call) -> int:
    """Return the bytes that all operators of a call ask for, each of which keeps its workspace until the call ends.

    Rows that a call leaves out because of their values count like all others.
    """
    if quirks.is_empty(call):
        return 0
    device = threads.chosen_device() if call.device is None else call.device
    with session.session_on(device).call(is_deterministic=determinism.is_asked_for(call)) as here:
        return sum(_first_stage(here, *stage) for stage in STAGES[call.operator.name](call))


def _first_stage(queue: Queue, prepare: Callable[..., _aclnn.Plan], arguments: tuple[Any, ...]) -> int:
    tensors: list[_aclnn.Tensor] = []
    plan = None
    try:
        converted = []
        for argument in arguments:
            if isinstance(argument, Described):
                code = _aclnn.DTYPES[argument.dtype.name]
                tensors.append(_aclnn.Tensor(None, quirks.shape_for_device(argument.shape), code, argument.layout))
                converted.append(tensors[-1])
            else:
                converted.append(argument)
        with determinism.guard(queue):
            plan = prepare(*converted)
        return plan.workspace_size
    finally:
        if plan is not None:
            plan.close()
        for tensor in tensors:
            tensor.close()


def _described(array: Any, dtype: np.dtype | None = None) -> Described | None:
    """Describe an argument as a call sends it: arrays of the host become contiguous, in this dtype."""
    if array is None:
        return None
    if isinstance(array, DeviceArray):
        return Described(array.shape, array.dtype, quirks.layout_for_device(array))
    return Described(array.shape, dtype or arrays.native(array.dtype))


def _row(call: Call) -> list[Stage]:
    *inputs, last = (_described(array, quirks.computing_dtype(call)) for array in call.arrays)
    assert last is not None
    out = Described(last.shape, last.dtype)
    return [(getattr(_aclnn, call.operator.name), (*inputs, last, call.arguments["dim"], out))]


def _masked(call: Call) -> list[Stage]:
    *floats, mask = call.arrays
    first, *others = (_described(array, quirks.computing_dtype(call)) for array in floats)
    assert first is not None
    arguments = first, *others, _described(mask), call.arguments["scale"], Described(first.shape, first.dtype)
    return [(getattr(_aclnn, call.operator.name), arguments)]


def _mask_bits(count: int) -> Described:
    return Described((-(-count // 8),), UINT8)


def _gradient(call: Call) -> list[Stage]:
    a = call.arguments
    softmax = a["softmax"]
    statistics = (None, None) if softmax is not None else (a["logits_max"], a["sum_exp_logits"])
    mask = a["target_mask"]
    is_there = isinstance(mask, DeviceArray) and mask.dtype == UINT8
    arguments = (
        *(_described(a[name]) for name in ("grad", "input", "weight")),
        _described(mask) if is_there else _mask_bits(call.dims["BT"]),
        _described(a["masked_target"]),
        *map(_described, statistics),
        None if softmax is None else Described(softmax.shape, FLOAT32),
    )
    return [_gradient_stage(a["input"], a["weight"], arguments)]


def _gradient_stage(input: Any, weight: Any, arguments: tuple[Any, ...]) -> Stage:
    results = (Described(array.shape, arrays.native(array.dtype)) for array in (input, weight))
    return _aclnn.fused_linear_cross_entropy_loss_grad, (*arguments, *results)


def _statistics(call: Call) -> list[Stage]:
    a = call.arguments
    target = _described(a["target"])
    bounds = a["vocab_start_index"], a["vocab_end_index"]
    return [_statistics_stage(a["input"], a["weight"], target, bounds, return_logits=a["return_logits"])]


def _statistics_stage(
    input: Any, weight: Any, target: Described | None, bounds: tuple[int, int], *, return_logits: bool
) -> Stage:
    assert target is not None
    count, dtype = input.shape[0], arrays.native(input.dtype)
    results = (
        *[Described((count,), FLOAT32)] * 3,
        _mask_bits(count),
        Described((count,), target.dtype),
        Described((count, weight.shape[0]), dtype) if return_logits else None,
    )
    return _aclnn.fused_linear_online_max_sum, (_described(input), _described(weight), target, *bounds, *results)


def _loss(call: Call) -> list[Stage]:
    names = "logits_max", "sum_exp_logits", "predicted_logits", "vocab_parallel_logits"
    *vectors, logits = (_described(call.arguments[name]) for name in names)
    loss = Described(call.arguments["logits_max"].shape, FLOAT32)
    softmax = None if logits is None else Described(logits.shape, FLOAT32)
    return [(_aclnn.fused_cross_entropy_loss_with_max_sum, (*vectors, logits, loss, softmax))]


def _linear_cross_entropy(call: Call) -> list[Stage]:
    a = call.arguments
    count, vocabulary = call.dims["BT"], call.dims["V"]
    target = Described((count,), INT64) if a["vocab_start_index"] else _described(a["target"])
    vector = Described((count,), FLOAT32)
    stages = [
        _statistics_stage(a["input"], a["weight"], target, (0, vocabulary), return_logits=False),
        (_aclnn.fused_cross_entropy_loss_with_max_sum, (vector, vector, vector, None, vector, None)),
    ]
    if a["return_grad"]:
        matrices = _described(a["input"]), _described(a["weight"])
        arguments = vector, *matrices, _mask_bits(count), target, vector, vector, None
        stages.append(_gradient_stage(a["input"], a["weight"], arguments))
    return stages


def _linear_cross_entropy_backward(call: Call) -> list[Stage]:
    a = call.arguments
    count = call.dims["BT"] * (1 if a["grad_lse"] is None else 2)
    vector, weight, target = Described((count,), FLOAT32), _described(a["weight"]), _described(a["target"])
    assert target is not None
    input = Described((count, call.dims["H"]), arrays.native(a["input"].dtype))
    arguments = vector, input, weight, _mask_bits(count), Described((count,), target.dtype), vector, vector, None
    return [_gradient_stage(input, a["weight"], arguments)]


STAGES: dict[str, Callable[[Call], list[Stage]]] = {
    "softmax_backward": _row,
    "log_softmax_backward": _row,
    "scaled_masked_softmax_backward": _masked,
    "softmax": _row,
    "log_softmax": _row,
    "scaled_masked_softmax": _masked,
    "fused_linear_cross_entropy_loss_grad": _gradient,
    "fused_linear_online_max_sum": _statistics,
    "fused_cross_entropy_loss_with_max_sum": _loss,
    "linear_cross_entropy": _linear_cross_entropy,
    "linear_cross_entropy_backward": _linear_cross_entropy_backward,
}
