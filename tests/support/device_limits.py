"""State the limits of devices, from the operators' documents and independently of the library.

`code` gives the status of a refused call on a device of the family 910B. `takes` tells which operators and dtypes a
family of devices has. `documents` tells which of them the vendor documents.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from linear_samples import GRADIENT, LINEAR, LOSS, STATISTICS, TOP_K, WHOLE, LinearProblem
from samples import ARRAYS, MASKED, Problem

#: Names that the runtime gives to systems on chip, by family. Names under "unknown" belong to no family.
SYSTEMS = {
    "910": ("Ascend910", "Ascend910A", "Ascend910B", "Ascend910ProA", "Ascend910ProB", "Ascend910PremiumA"),
    "910B": ("Ascend910B1", "Ascend910B2", "Ascend910B2C", "Ascend910B3", "Ascend910B4", "Ascend910B4-1"),
    "910_93": ("Ascend910_9362", "Ascend910_9372", "Ascend910_9381", "Ascend910_9391", "Ascend910_9392"),
    "310P": ("Ascend310P1", "Ascend310P3", "Ascend310P5", "Ascend310P7", "Ascend310P3Vir01"),
    "310B": ("Ascend310B1", "Ascend310B2", "Ascend310B3", "Ascend310B4"),
    "950": ("Ascend950PR_9589", "Ascend950PR_950z", "Ascend950DT_95A1"),
    "unknown": ("", "Ascend310", "Ascend610", "Ascend910C", "Ascend910Bx", "Ascend910_9599", "Ascend960", "BS9SX1A"),
}
_NEWER = ("910B", "910_93", "950")
_ROWWISE = ("910", "310P", *_NEWER)

#: The loss of logits, whose device's operators depend on the kind of its targets.
IDS, DENSE = "cross_entropy, ids", "cross_entropy, probabilities of all classes"
#: The product of its Hessian and a vector, which needs the gradient of the loss if there is a softcap.
PRODUCT = "cross_entropy_hvp, no softcap"

#: For each operator, the device's operators that compute it, and the families of devices that have them. Losses of
#: logits and top-k need further ones, of single elements, which all families have.
KERNELS: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "softmax": (("Softmax",), ("310B", *_ROWWISE)),
    "log_softmax": (("LogSoftmax",), _ROWWISE),
    "softmax_backward": (("SoftmaxBackward",), _ROWWISE),
    "log_softmax_backward": (("LogSoftmaxBackward",), _ROWWISE),
    "scaled_masked_softmax": (("ScaledMaskedSoftmax",), _NEWER),
    "scaled_masked_softmax_backward": (("ScaledMaskedSoftmaxBackward",), ("310P", *_NEWER)),
    GRADIENT: (("FusedLinearCrossEntropyLossGrad",), ("910B", "910_93")),
    STATISTICS: (("FusedLinearOnlineMaxSum",), ("910B", "910_93")),
    LOSS: (("FusedCrossEntropyLossWithMaxSum",), _NEWER),
    WHOLE: (("FusedLinearOnlineMaxSum", "FusedCrossEntropyLossWithMaxSum", "FusedLinearCrossEntropyLossGrad"), _NEWER),
    IDS: (("CrossEntropyLoss", "CrossEntropyLossGrad"), _NEWER),
    DENSE: (("SoftmaxCrossEntropyWithLogits", "LogSoftmax", "ReduceSum"), _ROWWISE),
    PRODUCT: (("Softmax", "SoftmaxBackward"), _ROWWISE),
    TOP_K: (("Mm", "Topk", "LogSumExp"), _NEWER),
}
#: The operators that compute the loss of a linear layer by blocks, in each block of logits.
_OF_BLOCKS = ("LogSumExp", "CrossEntropyLoss", "CrossEntropyLossGrad")


def kernels(family: str, operator: str, dtype: str) -> tuple[str, ...]:
    """Return the device's operators that compute an operator with inputs of this dtype on this family of devices."""
    if operator == WHOLE and (family == "950" or dtype == "float32"):
        return _OF_BLOCKS
    return KERNELS[operator][0]


#: The operators that more families of devices have than the vendor documents.
_MASKED_OR_FUSED = (*MASKED, GRADIENT, STATISTICS, LOSS)


def documents(family: str, operator: str, dtype: str) -> bool:
    """Return whether the vendor documents that a device takes the operator and dtype."""
    return takes(family, operator, dtype) and (operator not in _MASKED_OR_FUSED or family in ("910B", "910_93"))


def takes(family: str, operator: str, dtype: str) -> bool:
    """Return whether a device of this family takes the operator with inputs (for the loss: logits) of this dtype."""
    if family not in KERNELS[operator][1] or (dtype == "bfloat16" and family not in _NEWER):
        return False
    return dtype in ("float16", "bfloat16") or (dtype == "float32" and operator not in (GRADIENT, STATISTICS))


def code_of(problem: Problem | LinearProblem) -> int | None:
    """Return the status code with which a forced device refuses this valid call, or None if it computes the call."""
    if isinstance(problem, LinearProblem):
        return code(problem.operator, problem.arguments)
    return code(problem.operator, dict(zip(ARRAYS[problem.operator], problem.arrays, strict=True)))


def code(operator: str, arguments: dict[str, Any]) -> int | None:
    """Return the status code with which a device refuses the operator with these arguments, or None."""
    if operator == TOP_K:
        return 161002 if arguments["input"].dtype.newbyteorder("=") == np.float64 else None
    return _linear(operator, arguments) if operator in LINEAR else _rowwise(operator, arguments)


def _rowwise(operator: str, arguments: dict[str, Any]) -> int | None:
    first = arguments[ARRAYS[operator][0]]
    if first.dtype.newbyteorder("=") == np.float64:
        return 161002
    if operator in MASKED and first.shape[-1] > 4096 and first.size:
        return 161002
    return None


def _linear(operator: str, arguments: dict[str, Any]) -> int | None:
    dtype = arguments["logits_max" if operator == LOSS else "input"].dtype.newbyteorder("=")
    if dtype == np.float64:
        return 161002
    if operator in (LOSS, WHOLE):
        return None
    if dtype == np.float32:
        return 161002
    bt, h = arguments["input"].shape
    v = len(arguments["weight"])
    if 0 in (bt, h, v):
        return None
    if operator != GRADIENT:
        return 161002 if arguments["vocab_end_index"] > 2**24 or h > 65534 else None
    if arguments.get("softmax") is not None:
        if v < 128:
            return 161002
        if v > 24560 or bt > 65536:
            return 561103
    return 561103 if h > 65535 else None
