"""Types of the options of the losses, for type checkers and editors (see `ascend_grad.option_types`)."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from ..option_types import LinearLossOptions, LossOptions

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup
    from torch.nn import LinearCrossEntropyOptions


class Options(LossOptions[torch.Tensor, float | torch.Tensor], total=False):
    """Options of `ascend_grad.torch.cross_entropy`. Options that torch has, too, have torch's names."""

    ignore_index: int


class LinearOptions(LinearLossOptions[torch.Tensor, float | torch.Tensor], total=False):
    """Options of `ascend_grad.torch.linear_cross_entropy`. Options that torch has, too, have torch's names."""

    linear_bias: torch.Tensor | None
    weight: torch.Tensor | None
    ignore_index: int | None
    options: LinearCrossEntropyOptions | None
    group: ProcessGroup | None
    vocab_start_index: int | None
    vocab_size: int | None
