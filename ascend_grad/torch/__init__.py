"""The operators for PyTorch tensors, with gradients: functions and modules that replace torch's own.

>>> import torch
>>> import ascend_grad.torch as agt
>>> logits = torch.zeros(2, 4, requires_grad=True)
>>> agt.cross_entropy(logits, torch.tensor([0, 3])).backward()
>>> logits.grad[0]
tensor([-0.3750,  0.1250,  0.1250,  0.1250])

Tensors are on the CPU or, with torch_npu, on an Ascend NPU, which then computes. (The latter is tested on a test
double; it has not run on hardware yet.)
"""

try:
    import torch
except ImportError as error:
    raise ImportError(f"ascend_grad.torch needs PyTorch (pip install torch): {error}", name="torch") from error

if not hasattr(torch, "accelerator"):  # added in torch 2.6
    raise ImportError(f"ascend_grad.torch needs torch 2.6 or newer, found {torch.__version__}")

from . import compat, fused, rowwise
from .cross_entropy import cross_entropy
from .fused import *
from .linear import linear_cross_entropy
from .loss import LinearCrossEntropyLoss
from .rowwise import *
from .top_k import linear_top_k

__all__ = [
    "LinearCrossEntropyLoss",
    "compat",
    "cross_entropy",
    "linear_cross_entropy",
    "linear_top_k",
]
__all__ += fused.__all__ + rowwise.__all__
