"""NumPy's dtypes by name."""

from __future__ import annotations

import ml_dtypes
import numpy as np

NARROW_DTYPES = ("float32", "bfloat16", "float16")
DTYPES = (*NARROW_DTYPES, "float64")
DTYPES_OF_16_BITS = NARROW_DTYPES[1:]


def numpy_dtype(name: str) -> np.dtype:
    return np.dtype(ml_dtypes.bfloat16 if name == "bfloat16" else name)


def compute_dtype(name: str) -> np.dtype:
    """Return the type in which NumPy and BLAS compute a case; for 16-bit types that is float32, which is faster."""
    return np.dtype("float64" if name == "float64" else "float32")
