"""Dtypes by name."""

from __future__ import annotations

import ml_dtypes
import numpy as np

NARROW_DTYPES = ("float32", "bfloat16", "float16")
DTYPES = (*NARROW_DTYPES, "float64")


def numpy_dtype(name: str) -> np.dtype:
    return np.dtype(ml_dtypes.bfloat16 if name == "bfloat16" else name)


def compute_dtype(name: str) -> np.dtype:
    """The type in which NumPy computes a case, and BLAS: float32 for 16 bits, which is faster there, too."""
    return np.dtype("float64" if name == "float64" else "float32")
