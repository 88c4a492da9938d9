"""Types of the losses' options, for signatures whose result depends on the requested outputs.

The functions themselves have all options as arguments. These types exist for type checkers and editors only.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Generic, Literal, TypeAlias, TypedDict, TypeVar

Array = TypeVar("Array")
#: float, or in torch also a tensor without dimensions.
Number = TypeVar("Number")

#: The argument `outputs` of a loss. Without outputs, a function of torch or JAX returns only the loss.
Outputs: TypeAlias = Sequence[Literal["lse", "log_prob", "entropy", "predicted", "correct"]]
#: The same argument of the loss of logits, which has two outputs more.
LogitsOutputs: TypeAlias = Sequence[
    Literal["lse", "log_prob", "entropy", "predicted", "correct", "prob", "hessian_diag"]
]


class ModelOptions(TypedDict, Generic[Array, Number], total=False):
    """Options of both losses that belong to a model, and not to a batch."""

    lse_square_scale: Number
    temperature: float | Array
    logit_scale: Number
    softcap: Number | None


class LossOptions(ModelOptions[Array, Number], Generic[Array, Number], total=False):
    """Options of both losses with the same names in torch and JAX."""

    reduction: Literal["mean", "sum", "none"]
    token_weight: Array | None
    target_prob: Array | Literal[0] | None
    label_smoothing: Number
    denominator: Number | None
    num_threads: int | None


class LinearLossOptions(LossOptions[Array, Number], Generic[Array, Number], total=False):
    """Options of the loss of a linear layer with the same names in torch and JAX."""

    filter_eps: Number


class ClassOptions(TypedDict, Generic[Array], total=False):
    """Options of both losses with the same names for NumPy and JAX."""

    ignore_index: int
    class_weight: Array | None


class JaxLossOptions(LossOptions[Array, Number], ClassOptions[Array], Generic[Array, Number], total=False):
    """Options of the loss of logits in JAX."""

    dim: int | None


class JaxLinearLossOptions(LinearLossOptions[Array, Number], ClassOptions[Array], Generic[Array, Number], total=False):
    """Options of the loss of a linear layer in JAX."""

    bias: Array | None


class NumpyOptions(ClassOptions[Array], Generic[Array, Number], total=False):
    """Further options of both losses with the names that they have for NumPy."""

    grad_loss: Number | Array | None
    backend: str | None


class OutputGradients(TypedDict, Generic[Array], total=False):
    """Upstream gradients of outputs."""

    grad_lse: Array | None
    grad_log_prob: Array | None
    grad_entropy: Array | None


class RequestedResults(TypedDict, total=False):
    """Options that say which results a loss returns."""

    return_grad: bool
    outputs: Outputs


class LinearNumpyOptions(
    LinearLossOptions[Array, Number], NumpyOptions[Array, Number], Generic[Array, Number], total=False
):
    """Options of the gradients of a linear layer's loss with the names that they have for NumPy."""

    output_mask: Sequence[bool]
    workspace_bytes: int | None
    bias: Array | None


class ShardOptions(TypedDict, total=False):
    """Options of all functions over ranks: the place of this rank's rows of the weight."""

    vocab_start_index: int | None
    vocab_size: int | None


class RankGradientOptions(
    LinearNumpyOptions[Array, Number], OutputGradients[Array], ShardOptions, Generic[Array, Number], total=False
):
    """Options of the gradients of a loss over ranks."""

    deterministic: bool


class RankLossOptions(RankGradientOptions[Array, Number], RequestedResults, Generic[Array, Number], total=False):
    """Options of a loss over ranks."""


class DaskLossOptions(
    LossOptions[Array, Number],
    NumpyOptions[Array, Number],
    OutputGradients[Array],
    Generic[Array, Number],
    total=False,
):
    """Options of the loss of logits in dask."""

    return_grad: bool
    outputs: LogitsOutputs


class DaskLinearLossOptions(LinearNumpyOptions[Array, Number], RequestedResults, Generic[Array, Number], total=False):
    """Options of the loss of a linear layer in dask."""

    vocab_start_index: int


class BlockOptions(TypedDict, total=False):
    """Options of the row-wise functions in dask."""

    backend: str | None
    num_threads: int | None


class TopKOptions(ShardOptions, Generic[Array, Number], total=False):
    """Options of the largest log-probabilities of a linear layer over ranks."""

    temperature: float | Array
    bias: Array | None
    logit_scale: Number
    softcap: Number | None
    workspace_bytes: int | None
    backend: str | None
    num_threads: int | None
