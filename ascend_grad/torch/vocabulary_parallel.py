"""The loss of tensors whose vocabulary is split over the processes of a group."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal, NamedTuple

import torch
from torch.distributed import ProcessGroup

from .. import parallel
from ..parallel.agreement import Attempt
from ..parallel.engines import collectives
from .tensors import to_array, to_tensor


class VocabularyShard(NamedTuple):
    """Which part of the vocabulary this process has."""

    group: ProcessGroup
    vocab_start_index: int | None
    vocab_size: int | None

    def run(self, operator: str, check: Callable[[], None]) -> None:
        """What a check raises is told to the other processes, which wait for this one."""
        attempt = Attempt(operator)
        attempt.run(check)
        if attempt.failed:
            attempt.tell(collectives(self.group, "group", operator), None)

    @torch.compiler.disable
    def linear_cross_entropy(
        self,
        input: torch.Tensor,
        weight: torch.Tensor,
        target: torch.Tensor,
        grad_loss: torch.Tensor | None,
        reduction: Literal["mean", "sum", "none"],
        ignore_index: int,
        input_grad: bool,
        weight_grad: bool,
        filter_eps: float,
        num_threads: int | None,
    ) -> tuple[torch.Tensor, ...]:
        """As the operator of this name in `operators`, over all shards."""
        result = parallel.linear_cross_entropy(
            to_array(input),
            to_array(weight),
            to_array(target),
            comm=self.group,
            vocab_start_index=self.vocab_start_index,
            vocab_size=self.vocab_size,
            reduction=reduction,
            ignore_index=ignore_index,
            grad_loss=None if grad_loss is None else to_array(grad_loss),
            return_grad=input_grad or weight_grad,
            output_mask=(input_grad, weight_grad),
            filter_eps=filter_eps,
            num_threads=num_threads,
        )
        gradients = (input.new_empty(0) if each is None else to_tensor(each) for each in result[1:])
        return to_tensor(result.loss), *gradients
