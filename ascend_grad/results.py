"""Named tuples that calls with several results return.

The type of a result that depends on the arguments contains Any: the result is None if it was not requested. A caller
who requested it need not tell a type checker that it is not None.
"""

from __future__ import annotations

from collections import namedtuple
from functools import cache
from typing import Any, Generic, NamedTuple, TypeVar

from numpy.typing import NDArray

#: The class of the arrays: NumPy's, or dask's.
Array = TypeVar("Array")


class OnlineMaxSum(NamedTuple):
    """Statistics of the logits of one vocabulary shard; see `ascend_grad.fused_linear_online_max_sum`.

    The three numbers of each row are float32, or float64 if the inputs are float64.
    """

    #: The largest logit of each row, shape (BT,).
    logits_max: NDArray
    #: The sum of exp(logit - logits_max), shape (BT,).
    sum_exp_logits: NDArray
    #: The target's logit - logits_max, or 0 if the target lives in another shard, shape (BT,).
    predicted_logits: NDArray
    #: A bit for each row, 1 if the target lives in another shard: uint8, shape ((BT + 7) // 8,).
    target_mask: NDArray
    #: The target's row of this shard, or 0 if the target lives in another shard, shape (BT,).
    masked_target: NDArray
    #: The logits in input's dtype, shape (BT, V), or None if not requested.
    vocab_parallel_logits: NDArray | Any


class LinearTopK(NamedTuple, Generic[Array]):
    """The largest log-probabilities of each row, from the largest down; see `ascend_grad.linear_top_k`."""

    #: The log-probabilities, shape (BT, k); float32, or float64 if the inputs are float64.
    log_prob: Array
    #: Their vocabulary entries, rows of weight: int64, shape (BT, k).
    index: Array  # type: ignore[assignment]  # hides the method of tuples


class _Outputs(Generic[Array]):
    """Outputs of a loss that were not requested. Classes of `with_outputs` have the requested ones as fields."""

    __slots__ = ()

    @property
    def lse(self) -> Array | Any:
        """The logarithm of the sum of the exponentials of each row's logits; 0 for ignored rows."""
        return None

    @property
    def log_prob(self) -> Array | Any:
        """The log-probability of each target; 0 for ignored rows."""
        return None

    @property
    def entropy(self) -> Array | Any:
        """The entropy of each row's probabilities, in nats; 0 for ignored rows."""
        return None

    @property
    def predicted(self) -> Array | Any:
        """The entry with the largest logit of each row, int64, the first one of several; -1 for ignored rows."""
        return None

    @property
    def correct(self) -> Array | Any:
        """The number of rows whose target is the predicted entry, int64, shape ()."""
        return None


class _CrossEntropy(NamedTuple, Generic[Array]):
    #: The loss, shape () for a mean or a sum, otherwise that of the rows; float32, or float64 if the input is float64.
    loss: Array
    #: The gradient with respect to input, in its shape and dtype.
    input_grad: Array | Any


class CrossEntropy(_Outputs[Array], _CrossEntropy[Array]):
    """Loss and gradient of `ascend_grad.cross_entropy`. The requested outputs are further fields."""

    __slots__ = ()


class _LinearCrossEntropy(NamedTuple, Generic[Array]):
    #: The loss, shape () for a mean or a sum, otherwise (BT,); float32, or float64 if the inputs are float64.
    loss: Array
    #: The gradient with respect to input, shape (BT, H), in its dtype.
    input_grad: Array | Any
    #: The gradient with respect to weight, shape (V, H), in its dtype.
    weight_grad: Array | Any


class LinearCrossEntropy(_Outputs[Array], _LinearCrossEntropy[Array]):
    """Loss and gradients of `ascend_grad.linear_cross_entropy`. A gradient that is not requested is None.

    The gradient of a bias and the requested outputs are further fields.
    """

    __slots__ = ()

    @property
    def bias_grad(self) -> Array | Any:
        """The gradient with respect to bias, shape (V,), in its dtype."""
        return None


class LinearCrossEntropyGradients(NamedTuple):
    """Gradients of `ascend_grad.linear_cross_entropy_backward`. A gradient that is not requested is None."""

    #: The gradient with respect to input, shape (BT, H), in its dtype.
    input_grad: NDArray | Any
    #: The gradient with respect to weight, shape (V, H), in its dtype.
    weight_grad: NDArray | Any
    #: The gradient with respect to bias, shape (V,), in its dtype; None without a bias.
    bias_grad: NDArray | Any


@cache
def _class_with(base: type, outputs: tuple[str, ...]) -> type:
    # A named tuple of all fields comes before `base`, whose methods know its own fields alone.
    fields = namedtuple(base.__name__, base._fields + outputs)  # type: ignore[attr-defined, misc]
    for name in outputs:
        getattr(fields, name).__doc__ = getattr(base, name).__doc__
    members: dict[str, Any] = {"__slots__": (), "__doc__": base.__doc__}
    members["__reduce__"] = lambda self: (with_outputs, (base, outputs, tuple(self)))
    return type(base.__name__, (fields, base), members)


def with_outputs(base: type, outputs: tuple[str, ...], values: tuple) -> Any:
    """Return values as a named tuple of the class `base`, with the names in `outputs` as further fields."""
    cls = _class_with(base, outputs) if outputs else base
    return tuple.__new__(cls, values)
