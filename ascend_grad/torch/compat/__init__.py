"""Calls of other libraries, for the options that exist here; any other one is a NotImplementedError."""

from . import cce, liger, torch_npu

__all__ = ["cce", "liger", "torch_npu"]
