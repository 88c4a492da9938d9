"""Functions with the signatures of other libraries. Options that are not supported raise NotImplementedError."""

from . import cce, liger, torch_npu, verl

__all__ = ["cce", "liger", "torch_npu", "verl"]
