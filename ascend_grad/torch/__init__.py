"""The operators for PyTorch tensors, with gradients: functions and modules in the place of torch's own.

Tensors are on the CPU or, with torch_npu, on an Ascend NPU, where they are computed (proven on a test double; it has
not run on hardware yet).

>>> import torch
>>> import ascend_grad.torch as agt
>>> x = torch.zeros(2, 4, requires_grad=True)
>>> agt.softmax(x)[0, 0].backward()
>>> x.grad[0]
tensor([ 0.1875, -0.0625, -0.0625, -0.0625])
"""

import torch

if not hasattr(torch.nn, "LinearCrossEntropyLoss"):
    raise ImportError(f"ascend_grad.torch needs torch 2.13 or newer, found {torch.__version__}")

from . import compat
from .linear import linear_cross_entropy
from .loss import LinearCrossEntropyLoss
from .rowwise import log_softmax, scaled_masked_softmax, softmax

__all__ = [
    "LinearCrossEntropyLoss",
    "compat",
    "linear_cross_entropy",
    "log_softmax",
    "scaled_masked_softmax",
    "softmax",
]
