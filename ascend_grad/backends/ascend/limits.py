"""The table of the device's limits: valid calls beyond them are computed on the CPU under ``backend="auto"``.

There are two kinds of limits. A forced call beyond what is *possible* raises an exception with a status code. A forced
call beyond what the vendor *documents* is passed on to the device, which computes it or answers with an error.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from ... import _acl, arrays
from ..._call import Call
from ...errors import (
    AscendGradError,
    BackendUnavailableError,
    ParamInvalidError,
    ParamTypeError,
    UnsupportedDeviceError,
)
from ...operators.options import FUSED, OPTIONS, OUTPUT_GRADIENTS, OUTPUTS, given_options
from ..base import Unsupported
from . import cross_entropy, determinism, linear_blocks, matrices, top_k
from .quirks import is_empty
from .runtime import State

#: Families of systems on chip, and the names that the runtime gives to their members. "Ascend910B" without a digit is
#: one of the first 910.
FAMILIES = {
    "910": r"Ascend910(A|B|ProA|ProB|PremiumA)?",
    "910B": r"Ascend910B\d.*",
    "910_93": r"Ascend910_93.*",
    "310P": r"Ascend310P.*",
    "310B": r"Ascend310B.*",
    "950": r"Ascend950.*",
}
#: The family of all other systems, whose operators are not known. Only forced calls go to such a system.
UNKNOWN = ""
#: Families that compute bfloat16.
WITH_BFLOAT16 = ("910B", "910_93", "950", UNKNOWN)


def family(soc: str) -> str:
    """Return the family of a system on chip."""
    return next((name for name, members in FAMILIES.items() if re.fullmatch(members, soc)), UNKNOWN)


#: A function of a call and a family: why devices of the family do not take the call, None if they do.
Limit = Callable[[Call, str], Unsupported | None]


def _unsupported(call: Call, kind: type[AscendGradError], reason: str) -> Unsupported:
    return Unsupported(reason, kind(reason, operator=call.operator.name))


def only_on(*families: str, operator: str = "the operator") -> Limit:
    """Make the limit to systems that have the operator (361001)."""

    def limit(call: Call, soc: str) -> Unsupported | None:
        if soc in (*families, UNKNOWN):
            return None
        reason = f"{operator} exists only on {', '.join(families)}, this device is {soc}"
        return _unsupported(call, UnsupportedDeviceError, reason)

    return limit


def documented_on(*families: str) -> Limit:
    """Make the limit to systems that the vendor documents; others that have the operator take forced calls."""

    def limit(call: Call, soc: str) -> Unsupported | None:
        if soc in (*families, UNKNOWN):
            return None
        documented = f"the vendor documents the operator only on {', '.join(families)}"
        return Unsupported(f"{documented}, this device is {soc}", None)

    return limit


def dtype(name: str, *allowed: str) -> Limit:
    """Make the limit to these dtypes (161002); bfloat16 needs a system that computes it."""

    def limit(call: Call, soc: str) -> Unsupported | None:
        array = call.arguments[name]
        if array is None:
            return None
        got = str(arrays.native(array.dtype))
        here = [each for each in allowed if each != "bfloat16" or soc in WITH_BFLOAT16]
        if got in here:
            return None
        reason = f"{name}: the device supports dtype {' or '.join(here)}, got {got}"
        return _unsupported(call, ParamTypeError, reason)

    return limit


def at_most(what: str, size: Callable[[Call, str], tuple[int, int]], *, asks_device: bool = False) -> Limit:
    """Make the limit to a largest size (161002); with `asks_device` a forced call gets the device's own answer."""

    def limit(call: Call, soc: str) -> Unsupported | None:
        got, largest = size(call, soc)
        if got <= largest or is_empty(call):
            return None
        reason = f"the device supports {what} up to {largest}, got {got}"
        return Unsupported(reason, None) if asks_device else _unsupported(call, ParamInvalidError, reason)

    return limit


def last_dim(call: Call, soc: str) -> tuple[int, int]:
    """Return the last dimension of the first array, and the largest that the device takes."""
    return call.arrays[0].shape[-1], 8192 if soc in ("950", UNKNOWN) else 4096


def dim(name: str, largest: int) -> Callable[[Call, str], tuple[int, int]]:
    """Make the function that returns a size of the call, and the largest that the device takes."""
    return lambda call, soc: (call.dims[name], largest)


def stored_dim(name: str, largest: int) -> Callable[[Call, str], tuple[int, int]]:
    """Make the same function for a size that is limited only if the probabilities are given."""
    return lambda call, soc: (0 if call.arguments["softmax"] is None else call.dims[name], largest)


def first_lacking(names: Iterable[str], arguments: Mapping[str, Any], loss: str) -> tuple[str, str] | None:
    """Return the first option or gradient that no device computes, and which part of it no device computes."""
    on_device = {
        *(option.name for option in OPTIONS.values() if loss in option.on_device),
        *(f"grad_{output.name}" for output in OUTPUTS.values() if loss in output.on_device),
    }
    for name in names:
        if name == "outputs":
            lacking = ", ".join(each for each in arguments[name] if loss not in OUTPUTS[each].on_device)
        else:
            lacking = "" if name in on_device else "it"
        if lacking:
            return name, lacking
    return None


def is_dense(call: Call) -> bool:
    """Return whether the target of a loss holds probabilities of all classes."""
    return call.arguments["target"].dtype.kind not in "iu"


def loss_options(call: Call, soc: str) -> Unsupported | None:
    """Return the reason against gradients and options of a loss that the device's operators lack (161002)."""
    return _options_of(call, call.operator.name.removesuffix("_backward").removesuffix("_hvp"))


def fused_options(call: Call, soc: str) -> Unsupported | None:
    """Return the reason against gradients and options of a loss that the fused operators lack."""
    return _options_of(call, FUSED)


def _options_of(call: Call, loss: str) -> Unsupported | None:
    a = call.arguments
    gradients = [name for name in OUTPUT_GRADIENTS if a.get(name) is not None]
    found, computed = first_lacking(gradients, a, loss), "the gradients"
    if found is None and is_dense(call) and loss != "cross_entropy":
        found, computed = ("target", "probabilities of all classes"), "the loss"
    if found is None:
        found, computed = first_lacking(given_options(a), a, loss), "the loss"
    if found is None:
        return None
    reason = f"{found[0]}: the device's operators do not support {found[1]} in {computed}"
    return _unsupported(call, ParamInvalidError, reason)


def of_ids(limit: Limit) -> Limit:
    """Make the limit for targets that are ids."""
    return lambda call, soc: None if is_dense(call) else limit(call, soc)


def of_several_ids(limit: Limit) -> Limit:
    """Make the limit for rows with several targets."""
    return lambda call, soc: None if call.arguments["target_prob"] is None else limit(call, soc)


def with_softcap(limit: Limit) -> Limit:
    """Make the limit for products of the Hessian that need the gradient of the loss."""
    return lambda call, soc: None if call.arguments["softcap"] is None else limit(call, soc)


def compared_classes(call: Call, soc: str) -> tuple[int, int]:
    """Return the number of classes among which the device finds the first largest one, and the largest such number."""
    a, shape = call.arguments, call.arrays[0].shape
    is_asked = "predicted" in a["outputs"] or "correct" in a["outputs"]
    return shape[a["axis"]] if is_asked and shape else 0, matrices.MAX_COLUMNS


#: Rows of the weight from which on the vendor documents the fused gradient.
SMALLEST_VOCABULARY = 128


def vocabulary(call: Call, soc: str) -> Unsupported | None:
    """Return the reason against a small vocabulary: 161002 with stored probabilities, undocumented without."""
    size = call.dims["V"]
    if size >= SMALLEST_VOCABULARY or is_empty(call) or not call.arguments.get("return_grad", True):
        return None
    if call.arguments.get("softmax") is None:
        return Unsupported(f"weight: the vendor documents V of at least {SMALLEST_VOCABULARY}, got {size}", None)
    reason = f"weight: with softmax given, the device supports V of at least {SMALLEST_VOCABULARY}, got {size}"
    return _unsupported(call, ParamInvalidError, reason)


#: The largest id up to which all are exact in float32, in which the device compares them.
LARGEST_ID = 2**24

#: The limit of the oldest operators. 310B lacks them, but for the forward softmax.
EVERYWHERE = only_on("910", "910B", "910_93", "310P", "950")

#: The limit of products in float32.
WITH_PRODUCTS = only_on("910B", "910_93", "950")

#: The limits of the operators for ids, which compute losses and gradients.
WITH_IDS = of_ids(only_on("910B", "910_93", "950", operator="the operator of ids"))
WITH_SEVERAL_IDS = of_several_ids(documented_on("910B", "910_93"))

#: Operators whose rows have the same bits whatever other rows there are, at the level of determinism for that.
ROWS_ALONE = ("softmax", "log_softmax")

FLOATS = ("float32", "float16", "bfloat16")
FLOATS_16_BIT = ("float16", "bfloat16")

#: The limits of each operator. An operator without an entry is not computed on the device.
LIMITS: dict[str, tuple[Limit, ...]] = {
    "softmax_backward": (EVERYWHERE, dtype("grad_output", *FLOATS)),
    "log_softmax_backward": (EVERYWHERE, dtype("grad_output", *FLOATS)),
    "softmax": (dtype("input", *FLOATS),),
    "log_softmax": (EVERYWHERE, dtype("input", *FLOATS)),
    "scaled_masked_softmax_backward": (
        only_on("910B", "910_93", "310P", "950"),
        documented_on("910B", "910_93"),
        dtype("grad_output", *FLOATS),
        at_most("a last dimension", last_dim),
    ),
    "scaled_masked_softmax": (
        only_on("910B", "910_93", "950"),
        documented_on("910B", "910_93"),
        dtype("x", *FLOATS),
        at_most("a last dimension", last_dim),
    ),
    "fused_linear_cross_entropy_loss_grad": (
        only_on("910B", "910_93"),
        dtype("input", *FLOATS_16_BIT),
        vocabulary,
        at_most("V, with softmax given,", stored_dim("V", 24560), asks_device=True),
        at_most("BT, with softmax given,", stored_dim("BT", 65536), asks_device=True),
        at_most("H", dim("H", 65535), asks_device=True),
    ),
    "fused_linear_online_max_sum": (
        only_on("910B", "910_93"),
        dtype("input", *FLOATS_16_BIT),
        at_most("H", dim("H", 65534)),
        at_most("vocab_end_index", lambda call, soc: (call.arguments["vocab_end_index"], LARGEST_ID)),
    ),
    "fused_cross_entropy_loss_with_max_sum": (
        only_on("910B", "910_93", "950"),
        documented_on("910B", "910_93"),
        dtype("logits_max", "float32"),
        dtype("vocab_parallel_logits", *FLOATS),
    ),
    "cross_entropy": (
        EVERYWHERE,
        WITH_IDS,
        WITH_SEVERAL_IDS,
        loss_options,
        at_most("classes for predicted and correct", compared_classes),
        dtype("input", *FLOATS),
    ),
    "cross_entropy_hvp": (
        EVERYWHERE,
        with_softcap(WITH_IDS),
        with_softcap(WITH_SEVERAL_IDS),
        loss_options,
        dtype("input", *FLOATS),
    ),
    "linear_cross_entropy": (WITH_PRODUCTS, loss_options, dtype("input", *FLOATS)),
    "linear_cross_entropy_backward": (WITH_PRODUCTS, loss_options, dtype("input", *FLOATS)),
    "linear_top_k": (WITH_PRODUCTS, dtype("input", *FLOATS)),
}

#: The limits of the fused operators for a loss of a linear layer; see `is_fused`.
FUSED_LIMITS: dict[str, tuple[Limit, ...]] = {
    # The chain of the three operators. Ids start at 0 on the device, wherever the vocabulary starts.
    "linear_cross_entropy": (
        only_on("910B", "910_93"),
        fused_options,
        dtype("input", *FLOATS_16_BIT),
        at_most("H", dim("H", 65534)),
        at_most("V", dim("V", LARGEST_ID)),
        vocabulary,
    ),
    "linear_cross_entropy_backward": (
        only_on("910B", "910_93"),
        fused_options,
        dtype("input", *FLOATS_16_BIT),
        vocabulary,
        at_most("H", dim("H", 65535), asks_device=True),
    ),
}


#: The functions that name the device's operators of a call, for functions that are made of several in one way.
NEEDED: dict[str, Callable[[Call], tuple[str, ...]]] = {
    "cross_entropy": cross_entropy.needed,
    "cross_entropy_hvp": cross_entropy.needed_for_product,
    "linear_top_k": top_k.needed,
}


def _fused_needed(call: Call) -> tuple[str, ...]:
    """Return the names of the fused operators that a loss of a linear layer is made of."""
    gradient = ("aclnnFusedLinearCrossEntropyLossGrad",)
    if call.operator.name == "linear_cross_entropy_backward":
        return gradient
    loss = "aclnnFusedLinearOnlineMaxSum", "aclnnFusedCrossEntropyLossWithMaxSum"
    return (*loss, *gradient) if call.arguments["return_grad"] else loss


def is_fused(call: Call, state: State) -> bool:
    """Return whether the fused operators compute a loss of a linear layer, or its gradients; otherwise blocks do.

    The fused operators have precedence where they are documented, and blocks where they are not.
    """
    soc = family(state.soc)
    reasons = [reason for limit in FUSED_LIMITS[call.operator.name] if (reason := limit(call, soc)) is not None]
    if any(reason.error is not None for reason in reasons):
        return False
    if any(name in state.absent for name in linear_blocks.needed(call)):
        return True
    return not reasons and not any(name in state.absent for name in _fused_needed(call))


def needed(call: Call, state: State) -> tuple[str, ...]:
    """Return the names of the device's operators that a call is made of."""
    if call.operator.device_name is not None:
        return (call.operator.device_name,)
    if call.operator.name in FUSED_LIMITS:
        return _fused_needed(call) if is_fused(call, state) else linear_blocks.needed(call)
    return NEEDED[call.operator.name](call)


def _first_absent(names: Iterable[str], state: State) -> str | None:
    """Return why the toolkit lacks the first operator of these that it lacks, None if it has all of them."""
    return next((state.absent[name] for name in names if name in state.absent), None)


def unsupported_reason(call: Call, state: State) -> Unsupported | None:
    """Return why the device that was found does not take this valid call, None if it does."""
    if call.sparse is not None:
        return _unsupported(call, UnsupportedDeviceError, "sparse arrays are computed on the CPU")
    limits = LIMITS.get(call.operator.name)
    is_by_fused = call.operator.name in FUSED_LIMITS and is_fused(call, state)
    if is_by_fused:
        limits = FUSED_LIMITS[call.operator.name]
    if limits is None:
        return _unsupported(call, UnsupportedDeviceError, "the function is not implemented for the NPU")
    if (lacking := _first_absent(needed(call, state), state)) is not None:
        # If the toolkit had the operators of blocks, these would compute the call.
        blocks = _first_absent(linear_blocks.needed(call), state) if is_by_fused else None
        lacking += "" if blocks is None else f"; for blocks of logits: {blocks}"
        return _unsupported(call, BackendUnavailableError, lacking)
    level, soc = determinism.level(call), family(state.soc)
    if level and (lack := _acl.lacks_determinism()):
        return _unsupported(call, BackendUnavailableError, f"deterministic results were requested, but {lack}")
    if level == determinism.BATCH_INVARIANT and (call.operator.name not in ROWS_ALONE or soc not in ("950", UNKNOWN)):
        having = " and ".join(ROWS_ALONE)
        asked_for = f"batch-invariant results were requested, which only {having} have, on 950"
        return _unsupported(call, UnsupportedDeviceError, asked_for)
    reasons = [reason for limit in limits if (reason := limit(call, soc)) is not None]
    if soc == UNKNOWN:
        reasons.append(
            Unsupported(f"the operators of this device are not known ({state.soc or 'unknown model'})", None)
        )
    impossible = (reason for reason in reasons if reason.error is not None)
    return next(impossible, reasons[0] if reasons else None)
