"""Linear cross-entropy of tensors over a vocabulary that is split over the processes of a group."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import TypeVar, cast

import torch
from torch.autograd import Function
from torch.distributed import ProcessGroup
from torch.fx.experimental.proxy_tensor import get_proxy_mode
from torch.utils._python_dispatch import _disable_current_modes

from .. import parallel
from ..errors import AscendGradError, BackendUnavailableError, rename
from ..parallel.agreement import Attempt
from ..parallel.engines import collectives
from . import operators
from .tensors import optional

_T = TypeVar("_T")

_NAME = operators.LINEAR

#: Names for the arguments of `parallel.linear_cross_entropy` in errors of the functions for tensors.
_ARGUMENTS = {
    "weight_shard": "linear_weight",
    "bias": "linear_bias",
    "class_weight": "weight",
    "return_grad": "requires_grad of input or linear_weight",
    "output_mask": "requires_grad of input and linear_weight",
}


@dataclass(eq=False)
class VocabularyShard:
    """The part of the vocabulary that this process holds."""

    group: ProcessGroup
    vocab_start_index: int | None
    vocab_size: int | None

    def run(self, operator: str, check: Callable[[], _T]) -> _T:
        """Return the result of `check()`. If it raises, tell the other processes first, as they wait for this one."""
        attempt = Attempt(operator)
        found = attempt.run(check)
        if attempt.failed:
            with _disable_current_modes():  # modes would trace the card that is sent, or drop its values
                attempt.tell(collectives(self.group, "group", operator), None)
        return cast(_T, found)

    def apply(self, function: type[Function], problem: operators.Loss) -> tuple[torch.Tensor, ...]:
        """Compute a loss with its gradient over all shards, like `operators.apply`."""

        def check() -> None:
            if get_proxy_mode() is not None:  # the graph would outlive the shard
                raise NotImplementedError(f"{_NAME} with a group: graphs by make_fx or torch.export are not supported")
            for name, tensor in zip(("input", "linear_weight", "target"), problem):
                if tensor.is_meta:
                    expected = "a tensor on the CPU or on an Ascend NPU"
                    message = f"{name}: with a group expected {expected}, got one on {tensor.device}"
                    raise BackendUnavailableError(message, operator=_NAME)

        self.run(_NAME, check)
        number = next(operators.SHARD_NUMBERS)
        operators.SHARDS[number] = self
        return operators.apply(function, *problem._replace(shard=number))

    def linear_cross_entropy(
        self, problem: operators.Loss, of_outputs: operators.OutputGradients | None = None
    ) -> tuple[torch.Tensor, ...]:
        """Compute a loss over all shards, as the operator of `operators.Loss` does.

        With `of_outputs`, the gradients of the loss and its outputs are added. Statistics are computed again.
        """
        problem = operators.with_numbers(problem)
        options = operators.options_of(problem)
        upstream = operators.upstream(problem.grad_loss, problem.reduction)
        if of_outputs is not None:
            upstream = 0.0 if upstream is None else upstream
            for name in ("grad_lse", "grad_log_prob", "grad_entropy"):
                options[name] = optional(getattr(of_outputs, name))
        function = partial(
            parallel.linear_cross_entropy,
            comm=collectives(self.group, "group", _NAME),
            vocab_start_index=self.vocab_start_index,
            vocab_size=self.vocab_size,
        )
        try:
            return operators.loss_of(function, problem, upstream, outputs=tuple(problem.outputs), **options)
        except AscendGradError as error:
            rename(error, _NAME, _ARGUMENTS)
            raise
