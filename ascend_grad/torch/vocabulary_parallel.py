"""Linear cross-entropy of tensors over a vocabulary that is split over the processes of a group."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar, cast

import torch
from torch.distributed import ProcessGroup
from torch.fx.experimental.proxy_tensor import get_proxy_mode
from torch.utils._python_dispatch import _disable_current_modes

from .. import parallel
from ..errors import AscendGradError, BackendUnavailableError, rename
from ..parallel.agreement import Attempt
from ..parallel.transports import collectives
from .loss_operators import LINEAR, SHARD_NUMBERS, SHARDS

_T = TypeVar("_T")

_NAME = LINEAR.name

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
            with _disable_current_modes():  # modes would trace the record that is sent, or drop its values
                attempt.exchange_records(collectives(self.group, "group", operator), None)
        return cast(_T, found)

    def number(self, *layer: torch.Tensor) -> int:
        """Return the number by which operators find this shard. `layer` has the input, the weight and the target."""

        def check() -> None:
            if get_proxy_mode() is not None:  # the graph would outlive the shard
                raise NotImplementedError(f"{_NAME}: make_fx and torch.export do not support a group")
            for name, tensor in zip(("input", "linear_weight", "target"), layer):
                if tensor.is_meta:
                    expected = "a tensor on the CPU or on an Ascend NPU"
                    message = f"{name}: with a group expected {expected}, got one on {tensor.device}"
                    raise BackendUnavailableError(message, operator=_NAME)

        self.run(_NAME, check)
        number = next(SHARD_NUMBERS)
        SHARDS[number] = self
        return number

    def function(self, name: str) -> Callable:
        """Return the function of `parallel` with this name for this shard. Errors name the arguments for tensors."""

        def over_group(*arguments: Any, **options: Any) -> Any:
            shard = {"vocab_start_index": self.vocab_start_index, "vocab_size": self.vocab_size}
            comm = collectives(self.group, "group", _NAME)
            try:
                return getattr(parallel, name)(*arguments, comm=comm, **shard, **options)
            except AscendGradError as error:
                rename(error, _NAME, _ARGUMENTS)
                raise

        return over_group
