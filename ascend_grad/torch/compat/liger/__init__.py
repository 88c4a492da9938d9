"""The cross-entropy losses of Liger Kernel, with their signatures."""

from .linear import (
    LigerFusedLinearCrossEntropyFunction,
    LigerFusedLinearCrossEntropyLoss,
    LigerFusedLinearScaledCrossEntropyFunction,
    liger_fused_linear_cross_entropy,
)
from .logits import LigerCrossEntropyFunction, LigerCrossEntropyLoss, liger_cross_entropy
from .results import CrossEntropyOutput

__all__ = [
    "CrossEntropyOutput",
    "LigerCrossEntropyFunction",
    "LigerCrossEntropyLoss",
    "LigerFusedLinearCrossEntropyFunction",
    "LigerFusedLinearCrossEntropyLoss",
    "LigerFusedLinearScaledCrossEntropyFunction",
    "liger_cross_entropy",
    "liger_fused_linear_cross_entropy",
]
