"""Results of the losses: a named tuple of the loss and its requested outputs."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any, TypeAlias

import torch

from ..arguments import shown
from ..errors import ParamInvalidError, ParamTypeError
from ..operators.options import LAYER_OUTPUTS, statistics_for_backward
from ..operators.results import LossResult, class_of

#: The loss under "loss", and the outputs that were computed.
Computed: TypeAlias = dict[str, torch.Tensor]


def requested(found: Computed, outputs: Sequence[str]) -> LossResult[torch.Tensor]:
    """Return the loss and the outputs of these names, in this order."""
    names = ("loss", *outputs)
    values = [found[name] for name in names]
    return class_of(names)(*values) if _IS_OLD else tuple.__new__(class_of(names), values)


#: The compiler of torch 2.6 cannot trace `tuple.__new__`, and that of 2.13 cannot trace a call of such a class.
_IS_OLD = torch.__version__.startswith("2.6.")
# A compiler does not trace how the class of a result is made. `torch.compiler.assume_constant_result` only sets this
# attribute, but first imports the compiler, which takes a second.
class_of._dynamo_marked_constant = True  # type: ignore[attr-defined]


def check_outputs(operator: str, outputs: object, known: Collection[str] = LAYER_OUTPUTS) -> None:
    """Refuse an argument that is not a sequence of names of known outputs."""
    expected = f"a tuple of names among {', '.join(map(repr, known))}"
    if not isinstance(outputs, (tuple, list)) or not all(isinstance(each, str) for each in outputs):
        raise ParamTypeError(f"outputs: expected {expected}, got {shown(outputs)}", operator=operator)
    for each in outputs:
        if each not in known:
            raise ParamInvalidError(f"outputs: expected {expected}, got {each!r}", operator=operator)


def computed_outputs(outputs: Sequence[str], options: Mapping[str, Any]) -> list[str]:
    """Return the names of the outputs to compute: those that are requested, and those that backward needs."""
    return [*outputs, *(name for name in statistics_for_backward(outputs, options) if name not in outputs)]


def statistics(
    outputs: Sequence[str], lse: torch.Tensor, entropy: torch.Tensor
) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """Return the outputs that backward through outputs needs, None for those that were not computed."""
    return lse if "lse" in outputs else None, entropy if "entropy" in outputs else None


def no_lse_error(operator: str) -> ParamInvalidError:
    """Return the error of backward through outputs that were computed without lse."""
    message = "outputs: expected 'lse' among the names, as the gradients of outputs need it"
    return ParamInvalidError(message, operator=operator)
