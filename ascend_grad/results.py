"""Named tuples that calls with several results return."""

from __future__ import annotations

from typing import NamedTuple

from numpy.typing import NDArray


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
    vocab_parallel_logits: NDArray | None


class LinearCrossEntropy(NamedTuple):
    """Loss and gradients of `ascend_grad.linear_cross_entropy`. A gradient that is not requested is None."""

    #: The loss, shape () for a mean or a sum, otherwise (BT,); float32, or float64 if the inputs are float64.
    loss: NDArray
    #: The gradient with respect to input, shape (BT, H), in its dtype.
    input_grad: NDArray | None
    #: The gradient with respect to weight, shape (V, H), in its dtype.
    weight_grad: NDArray | None
