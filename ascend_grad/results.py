"""What calls with several named results return."""

from __future__ import annotations

from typing import NamedTuple

from numpy.typing import NDArray


class OnlineMaxSum(NamedTuple):
    """Statistics of the logits of one vocabulary shard; see `ascend_grad.fused_linear_online_max_sum`.

    The three numbers of each row are float32, or float64 where the inputs are.
    """

    #: The largest logit of each row, shape (BT,).
    logits_max: NDArray
    #: The sum of exp(logit - logits_max), shape (BT,).
    sum_exp_logits: NDArray
    #: The target's logit - logits_max, 0 where the target lives in another shard, shape (BT,).
    predicted_logits: NDArray
    #: A bit for each row, 1 where the target lives in another shard: uint8, shape ((BT + 7) // 8,).
    target_mask: NDArray
    #: The target's row of this shard, 0 where it lives in another one, shape (BT,).
    masked_target: NDArray
    #: The logits in input's dtype, shape (BT, V), where asked for.
    vocab_parallel_logits: NDArray | None


class LinearCrossEntropy(NamedTuple):
    """Loss and gradients of `ascend_grad.linear_cross_entropy`; gradients are None where not asked for."""

    #: Shape () for a mean or a sum, else (BT,); float32, or float64 where the inputs are.
    loss: NDArray
    #: The gradient with respect to input, shape (BT, H), in its dtype.
    input_grad: NDArray | None
    #: The gradient with respect to weight, shape (V, H), in its dtype.
    weight_grad: NDArray | None
