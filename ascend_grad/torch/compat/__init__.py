"""Calls of other libraries' fused losses, for the options that exist here; any other one is a NotImplementedError."""

from . import cce, liger

__all__ = ["cce", "liger"]
