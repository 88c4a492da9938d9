"""Types of the losses' options, for signatures whose result depends on the requested outputs.

The functions themselves have all options as arguments. These types exist for type checkers and editors only.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Generic, Literal, TypeAlias, TypedDict, TypeVar

Array = TypeVar("Array")

#: The argument `outputs` of a loss. Without any, a function of torch or JAX returns the loss alone.
Outputs: TypeAlias = Sequence[Literal["lse", "log_prob", "entropy", "predicted", "correct"]]


class LossOptions(TypedDict, Generic[Array], total=False):
    """Options of both losses with the same names in torch and JAX."""

    reduction: Literal["mean", "sum", "none"]
    token_weight: Array | None
    target_prob: Array | None
    label_smoothing: float
    lse_square_scale: float
    temperature: float | Array
    denominator: float | None
    num_threads: int | None


class LinearLossOptions(LossOptions[Array], Generic[Array], total=False):
    """Options of the loss of a linear layer with the same names in torch and JAX."""

    logit_scale: float
    softcap: float | None
    filter_eps: float
